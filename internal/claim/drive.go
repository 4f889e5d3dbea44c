package claim

import "slices"

// drive sends the next command, if one is due and none is in flight. Every event ends here.
func (c *Claim) drive(now Time) {
	if c.flight != nil {
		return
	}
	c.rest()
	if now < c.retryAt {
		return
	}
	if g := c.gen; g != nil && g.phase == held && g.renew && now >= g.renewAt {
		g.open++
		c.send(now, &Command{Verb: Renew, End: g.token, TTL: g.ttl})
		return
	}
	if len(c.ends) > 0 {
		c.sendEnd(now, c.ends[0])
		return
	}
	if c.ready(now) {
		cmd := &Command{Verb: Acquire}
		c.ask(cmd)
		c.send(now, cmd)
	}
}

// rest ends an outage of which nothing more will be heard, since nothing is left to be sent: whoever waits then waits for the user here, and
// must not be told some time later that Redis is still away.
func (c *Claim) rest() {
	if c.user != nil && len(c.ends) == 0 && (c.gen == nil || !c.gen.renew) {
		c.outage, c.outageErr = false, nil
	}
}

// sendEnd releases a generation, and asks in the same call if there is something to ask for. What of it is unanswered may
// still be executed, so then a tombstone is left.
func (c *Claim) sendEnd(now Time, e *ending) {
	cmd := &Command{Verb: Release, End: e.token, Used: e.used, Tombstone: e.open > 0, again: e.sent > 0}
	if e.sent == 0 {
		e.inTime = now < e.valid
	}
	e.sent++
	if c.ready(now) {
		c.ask(cmd)
	}
	c.send(now, cmd)
}

// ready reports whether the local queue wants a command to go out for it, and makes the generation to ask for.
func (c *Claim) ready(now Time) bool {
	if c.closed || c.head == nil || c.user != nil {
		return false
	}
	if g := c.gen; g != nil {
		return g.phase == asking || g.phase == queued && now >= g.recheckAt
	}
	if len(c.ends) >= manyEnds {
		// In an outage each call that gives up may leave one that lives as long as its lease would. It is not the time to
		// add to them: the first that is answered opens the way again.
		return false
	}
	wait := !c.head.Try && (c.sub != Opening || c.blindAt > 0 && now >= c.blindAt)
	if !wait && !c.head.Try {
		// Subscribe against publish: a place in the queue before the channel is confirmed could be granted unheard. So it is asked
		// for as a try meanwhile, once, and goes into the queue when the session tells of the confirmation.
		if c.blindAt == 0 {
			c.blindAt = now + blindAfter
		}
		if c.tried {
			return false
		}
	}
	r := c.head
	c.gen = &generation{
		token: c.cfg.Generation(), ttl: r.TTL, renew: r.Renew, meta: r.Meta, wait: wait, firstSent: now,
	}
	return true
}

// ask adds the question for the current generation to cmd.
func (c *Claim) ask(cmd *Command) {
	g := c.gen
	cmd.Ask, cmd.TTL, cmd.Wait, cmd.Meta = g.token, g.ttl, g.wait, g.meta
	cmd.Life = life(g.ttl)
	cmd.Repeated = g.sent > 0
	cmd.alone = g.open == 0
	g.sent++
	g.open++
}

func (c *Claim) send(now Time, cmd *Command) {
	cmd.SentAt, cmd.epoch = now, c.epoch
	c.flight = cmd
	c.act(Action{Kind: Send, Cmd: cmd})
}

// patience returns when the command in flight counts as unknown. A try makes one attempt and waits for its answer, however
// short its ttl is beside the round trip, until the try itself ends. Behind any other command a renewal may have to wait, so
// that the lease in use counts, even if the command is about another: a dropped packet must cost none.
func (c *Claim) patience() Time {
	f, g := c.flight, c.gen
	ttl := f.TTL
	switch {
	case g == nil:
	case g.token == f.Ask && c.head != nil && c.head.Try:
		return never
	case ttl == 0:
		ttl = g.ttl
	default:
		ttl = min(ttl, g.ttl)
	}
	if ttl == 0 {
		return f.SentAt + longestSilence // a bare release: nothing but its own confirmation waits for it
	}
	return f.SentAt + CommandTimeout(ttl)
}

// Subscribed takes the state of the subscription; one that is known already changes nothing. After a re-subscription a message may
// have been lost, so what waits asks at once; and a question that is out now will have been asked too early, whatever its
// answer says (see asked).
func (c *Claim) Subscribed(now Time, sub Subscription) {
	if sub == c.sub {
		return
	}
	c.sub = sub
	if sub != Opening {
		c.epoch++
		c.tried, c.blindAt = false, 0
		if g := c.gen; g != nil && g.phase == queued {
			g.recheckAt = now
		} else if g != nil && g.phase == held {
			// A hint may have been lost. Whoever would pass the lease on locally, or keep it, asks now; who may come to do so
			// takes it that others wait, until an answer says that they do not.
			if c.head != nil || g.lingerTill > 0 {
				g.renewAt = now
			}
			if c.user != nil {
				c.others(now, now, true)
			}
		}
	}
	c.expire(now)
	c.drive(now)
}

// Tick takes the passing of time. The session calls it at Next, or later.
func (c *Claim) Tick(now Time) {
	c.expire(now)
	if r := c.head; r != nil && r.Try && now >= r.since+tryBound {
		err := c.outageErr
		if err == nil {
			err = errSilent
		}
		c.failTries(now, err) // first: what it waited for may be overdue for those behind it
	}
	if c.flight != nil && now >= c.patience() {
		c.silent(now)
	}
	c.giveUp(now)
	c.drive(now)
}

// silent gives the command in flight up: it may have run, it may still run. Whatever comes of it will be told to Reply.
func (c *Claim) silent(now Time) {
	f := c.flight
	c.flight = nil
	if !c.outage {
		c.outage, c.outageSince, c.outageErr = true, f.SentAt, errSilent
	}
	if c.failures > 0 {
		c.backOff(now) // the first time the silence was waiting enough
	} else {
		c.failures++
	}
	c.renewFailed(f, errSilent)
}

// giveUp ends what has waited for the server too long.
func (c *Claim) giveUp(now Time) {
	c.ends = slices.DeleteFunc(c.ends, func(e *ending) bool {
		if now >= e.leaseEnd && e.confirm != nil {
			c.act(Action{Kind: Confirm, Req: e.confirm, Outcome: Unconfirmed, Err: c.outageErr})
			e.confirm = nil
		}
		return now >= e.overAt
	})
	for r := c.head; r != nil && !r.Try && c.outage && now >= max(c.outageSince, r.since)+c.cfg.Budget; r = c.head {
		c.remove(r)
		c.act(Action{Kind: Fail, Req: r, Outcome: Unavailable, Err: c.outageErr})
	}
	if c.head == nil && c.gen != nil && c.gen.phase != held {
		c.drop(now)
	}
}

// Next returns when Tick is to be called, if nothing else happens before; false: not at all.
func (c *Claim) Next() (Time, bool) {
	at := never
	if c.flight != nil {
		at = c.patience()
	}
	idle := c.flight == nil // something may be due that nothing but its time holds back
	if g := c.gen; g != nil {
		switch g.phase {
		case held:
			at = min(at, g.validUntil)
			if u := c.user; u == nil {
				at = min(at, g.lingerTill)
			} else if u.MaxHold > 0 {
				at = min(at, u.heldAt+u.MaxHold)
			}
			if idle && g.renew {
				at = min(at, max(g.renewAt, c.retryAt))
			}
		case queued:
			if idle {
				at = min(at, max(g.recheckAt, c.retryAt))
			}
		case asking:
			if idle {
				at = min(at, c.retryAt)
			}
		}
	} else if idle && c.head != nil && c.user == nil {
		at = min(at, max(c.blindAt, c.retryAt))
	}
	for _, e := range c.ends {
		at = min(at, e.overAt)
		if e.confirm != nil {
			at = min(at, e.leaseEnd)
		}
		if idle {
			at = min(at, c.retryAt)
		}
	}
	if r := c.head; r != nil {
		if r.Try {
			at = min(at, r.since+tryBound)
		} else if c.outage {
			at = min(at, max(c.outageSince, r.since)+c.cfg.Budget)
		}
	}
	return at, at != never
}
