package claim

import "time"

// Request puts r at the end of the local queue. A try is refused at once if somebody here holds, or waits for a holder. Behind another try,
// of which it is not known yet what comes of it, it waits for the one answer: refused now, it would say that somebody holds the
// lock while perhaps nobody can be asked.
func (c *Claim) Request(now Time, r *Request) {
	r.since = now
	c.expire(now)
	switch {
	case c.closed:
		c.act(Action{Kind: Fail, Req: r, Outcome: Closed})
		return
	case r.Try && (c.user != nil || c.tail != nil && !c.tail.Try):
		c.act(Action{Kind: Refuse, Req: r, RetryAfter: c.localRetryAfter(now)})
		return
	}
	c.push(r)
	if c.user == nil && c.gen != nil && c.gen.phase == held { // lingering
		c.pass(now)
	}
	c.drive(now)
}

// Cancel takes r out of the local queue and reports whether it was there. If not, r holds: the race of cancel against
// grant is decided here, under the session's lock, and a grant that won is the caller's to keep or to release.
func (c *Claim) Cancel(now Time, r *Request) bool {
	if !r.waiting {
		return false
	}
	c.remove(r)
	if c.head == nil && c.gen != nil && c.gen.phase != held {
		c.drop(now)
	}
	c.drive(now)
	return true
}

// Release ends the use by r. A Confirm for it follows, at once or when the server has answered.
func (c *Claim) Release(now Time, r *Request) {
	c.expire(now) // expiry between check and use: the timer may be late, the count is not
	if c.user != r {
		c.act(Action{Kind: Confirm, Req: r, Outcome: Lost})
		return
	}
	c.user = nil
	switch {
	case r.lost:
		c.act(Action{Kind: Confirm, Req: r, Outcome: Lost})
	case c.head != nil && c.mayPass(now, r, c.head):
		c.act(Action{Kind: Confirm, Req: r})
		c.pass(now)
	case c.head == nil && r.Linger > 0 && r.Renew && !c.gen.contended && !c.closed:
		c.gen.lingerTill = now + r.Linger
		c.act(Action{Kind: Confirm, Req: r})
	default:
		c.end(now, r)
	}
	c.drive(now)
}

// Close refuses what waits and all that comes, and gives up what is not in use.
func (c *Claim) Close(now Time) {
	c.closed = true
	for r := c.head; r != nil; r = c.head {
		c.remove(r)
		c.act(Action{Kind: Fail, Req: r, Outcome: Closed})
	}
	if g := c.gen; g != nil && c.user == nil {
		g.answered = g.answered || g.phase == held
		c.drop(now)
	}
	c.drive(now)
}

// Shut ends the claim's part when nothing will be sent any more: who still waits for a confirmation gets none.
func (c *Claim) Shut() {
	for _, e := range c.ends {
		if e.confirm != nil {
			c.act(Action{Kind: Confirm, Req: e.confirm, Outcome: Unconfirmed, Err: c.outageErr})
		}
	}
	c.ends, c.gen, c.flight = nil, nil, nil
}

// Force declares the hold lost that is left after Close, and releases it: in this order, so that its user is told before anybody else can
// be granted.
func (c *Claim) Force(now Time) {
	if c.user != nil && !c.user.lost {
		c.lose(now, LostClosed)
	}
	c.drive(now)
}

// mayPass reports whether the lease of r may go on under next.
func (c *Claim) mayPass(now Time, r, next *Request) bool {
	g := c.gen
	return g.suits(now, next) && (!g.contended || now-g.contendAt < r.Slice)
}

// fits reports whether a lease of g is what r asks for.
func fits(g *generation, r *Request) bool { return g.ttl == r.TTL && g.renew == r.Renew }

// suits reports whether the lease, as it is, will do for r. A hold without renewal always gets one of its own.
func (g *generation) suits(now Time, r *Request) bool {
	return fits(g, r) && g.renew && g.validUntil-now >= g.ttl/3
}

// pass gives the held lease to the head of the local queue. If it does not suit the head, it is given back, and
// asked for again in the same command.
//
// A hand-over's fence is the previous + 1, but never ahead of the clock: each microsecond since the grant stands for one fence, which
// is also what Redis counts for a hold that it drops.
func (c *Claim) pass(now Time) {
	g := c.gen
	if !g.suits(now, c.head) {
		c.end(now, nil)
		return
	}
	g.usedFence++
	notBefore := g.grantedAt + time.Duration(g.usedFence-g.grantFence)*time.Microsecond
	c.use(now, Action{Fence: g.usedFence, Via: ViaLocal, NotBefore: notBefore})
}

// use makes the head of the queue the user.
func (c *Claim) use(now Time, a Action) {
	r := c.head
	c.remove(r)
	r.heldAt = now
	c.user = r
	c.gen.lingerTill = 0
	a.Kind, a.Req = Grant, r
	c.act(a)
	c.refuseTries(c.localRetryAfter(now))
}

// refuseTries refuses the tries at the head of the queue: one answer is for all of them.
func (c *Claim) refuseTries(retryAfter time.Duration) {
	for r := c.head; r != nil && r.Try; r = c.head {
		c.remove(r)
		c.act(Action{Kind: Refuse, Req: r, RetryAfter: retryAfter})
	}
}

// lose declares the hold lost and ends the generation.
func (c *Claim) lose(now Time, why Reason) {
	if c.user != nil {
		c.user.lost = true
		c.act(Action{Kind: Lose, Req: c.user, Reason: why, Err: c.gen.renewErr})
	}
	c.end(now, nil) // even if the server denied it: after a failover the place that it came from may be there again
}

// expire finds what time alone has ended.
func (c *Claim) expire(now Time) {
	if c.gen == nil || c.gen.phase != held {
		return
	}
	u := c.user
	switch {
	case now >= c.gen.validUntil:
		c.lose(now, LostExpired)
	case u != nil && u.MaxHold > 0 && now >= u.heldAt+u.MaxHold:
		c.lose(now, LostMaxHold)
	case u == nil && now >= c.gen.lingerTill:
		c.end(now, nil)
	}
}

func (c *Claim) localRetryAfter(now Time) time.Duration {
	if c.gen == nil || c.gen.phase != held {
		return 0
	}
	return max(0, c.gen.validUntil-now)
}

func (c *Claim) push(r *Request) {
	r.waiting = true
	r.prev, r.next = c.tail, nil
	if c.tail != nil {
		c.tail.next = r
	} else {
		c.head = r
	}
	c.tail = r
}

func (c *Claim) remove(r *Request) {
	r.waiting = false
	if r == c.head {
		c.tried = false // it was that one's
	}
	if r.prev != nil {
		r.prev.next = r.next
	} else {
		c.head = r.next
	}
	if r.next != nil {
		r.next.prev = r.prev
	} else {
		c.tail = r.prev
	}
	r.prev, r.next = nil, nil
}
