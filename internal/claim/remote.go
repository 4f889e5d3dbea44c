package claim

import (
	"slices"
	"time"
)

// Verb says what a [Command] does.
type Verb int

// Verbs.
const (
	Acquire Verb = iota + 1
	Renew
	Release // ends End, and asks for Ask in the same call if it is not empty
)

// Command is what the session sends. It does not change once it is out.
type Command struct {
	Verb      Verb
	End       string // the generation that is renewed or released
	Ask       string // the generation that asks
	TTL       time.Duration
	Life      time.Duration // of the queue place
	Used      int64         // last fence used by End
	Wait      bool          // Ask may be given a place
	Repeated  bool          // Ask may have been asked before
	Tombstone bool          // something of End is unanswered and may still come

	SentAt Time
	Meta   string
	epoch  int  // of the subscription
	again  bool // an earlier release of End may have been executed
	alone  bool // every earlier acquire of Ask is answered: this one is executed last
}

// Status of an [Answer]; the same facts as the statuses of the scripts.
type Status int

// Statuses.
const (
	NotYours Status = iota
	Granted
	Queued
	Busy
	Ended
	Gone
	Again
	Renewed
	Released
	Withdrawn
)

// Answer is the server's word on one generation.
type Answer struct {
	Status     Status
	Fence      int64
	Remaining  time.Duration // of the lease: mine if granted, the holder's otherwise
	ServerTime time.Duration // on the server's clock
	Waiting    bool          // others wait
	Position   int           // 1 is next
	Unfinished bool          // call again at once
}

// Class says what is known of a command that got no answer.
type Class int

// Classes of failures.
const (
	Answered    Class = iota
	NotExecuted       // it did not run and will not
	Unknown           // it may have run or may still run
	Refused           // the server refused it for now, and changed nothing
	Denied            // the server, or the client library, will never do it
)

// Reply is what came of a [Command].
type Reply struct {
	Class Class
	Err   error
	End   Answer
	Ask   Answer
}

// Reply takes what came of cmd, in time or late.
func (c *Claim) Reply(now Time, cmd *Command, rep Reply) {
	current := cmd == c.flight
	if current {
		c.flight = nil
	}
	c.expire(now) // late reply after deadline: what time has ended, no reply revives
	if rep.Class != Unknown {
		c.settle(cmd, rep)
	}
	if rep.Class == Answered {
		c.outage, c.outageErr, c.failures = false, nil, 0
		if current {
			c.retryAt = 0
		}
		switch cmd.Verb {
		case Renew:
			c.renewed(now, cmd, rep.End)
		case Release:
			c.released(cmd, rep.End)
		case Acquire:
		}
		if cmd.Ask != "" {
			c.asked(now, cmd, rep.Ask, current)
		}
	} else {
		c.failed(now, cmd, rep, current)
	}
	c.drive(now)
}

// settle notes that cmd is over: nothing of it can come any more.
func (c *Claim) settle(cmd *Command, rep Reply) {
	ran := rep.Class == Answered
	if g := c.gen; g != nil && (g.token == cmd.Ask || cmd.Verb == Renew && g.token == cmd.End) {
		g.open--
		if !ran && cmd.Verb != Renew {
			g.sent--
		}
	}
	c.ends = slices.DeleteFunc(c.ends, func(e *ending) bool {
		switch {
		case e.token == cmd.Ask:
			e.open--
			s := rep.Ask.Status
			// What one answer found counts, even if another one, executed before it, found nothing.
			e.answered = e.answered || ran && s != Busy && s != Gone && s != Ended
			return e.open == 0 && e.sent == 0 && e.confirm == nil && !e.answered
		case e.token == cmd.End && cmd.Verb == Renew:
			e.open--
		case e.token == cmd.End && !ran:
			e.sent--
		}
		return false
	})
}

// asked takes the answer to an acquire.
func (c *Claim) asked(now Time, cmd *Command, a Answer, current bool) {
	g := c.gen
	if g == nil || g.token != cmd.Ask {
		return // it has an ending
	}
	if g.phase == held {
		if a.Status == Granted {
			g.extend(cmd.SentAt + a.Remaining - Margin(g.ttl))
			c.others(now, cmd.SentAt, a.Waiting)
		}
		return // a message was faster; an older answer takes nothing back
	}
	switch a.Status {
	case Granted:
		via := ViaReply
		if g.answered {
			via = ViaRecheck
		}
		c.hold(now, cmd.SentAt+a.Remaining, a, via)
	case Queued, Again:
		c.queued(now, cmd, a)
	case Busy:
		c.drop(now)
		if c.head != nil && c.head.Try {
			c.refuseTries(a.Remaining)
			return
		}
		c.tried = true
	case Ended, Gone:
		if current { // an older command may have found this before a newer one made it untrue
			if cmd.alone { // else one that was sent before it may have been executed after it
				g.answered = false
			}
			c.drop(now)
		}
	default: // no answer to an acquire
	}
}

// queued takes the answer that a place was given or kept, or that the server has not decided yet: then there is a place all the same,
// unless none was asked for.
func (c *Claim) queued(now Time, cmd *Command, a Answer) {
	g := c.gen
	if !cmd.Wait {
		if g.open == 0 {
			g.sent = 0 // it left no trace, so what comes next repeats nothing
		}
		return
	}
	g.lastFence = max(g.lastFence, a.Fence)
	if cmd.SentAt < g.lastSent {
		return
	}
	g.phase, g.answered = queued, true
	g.lastSent, g.lastServer = cmd.SentAt, a.ServerTime
	g.recheckAt = cmd.SentAt + Period(g.ttl)
	if a.Position <= firstFew {
		// The holder's lease ends after this, if nobody renews it: then nobody but us tells.
		g.recheckAt = min(g.recheckAt, now+a.Remaining+time.Millisecond)
	}
	// Subscribe against publish: this was asked before the channel was confirmed, so a grant since then may have gone unheard.
	early := cmd.epoch != c.epoch
	if a.Status == Again || a.Unfinished || early {
		g.recheckAt = now
	}
}

// Granted takes a grant message. It counts only for the outstanding ask, and only with the time that is left since the
// earliest moment at which the grant can have happened.
func (c *Claim) Granted(now Time, token string, fence int64, remaining, serverTime time.Duration, waiting bool) {
	c.expire(now)
	defer c.drive(now)
	g := c.gen
	if g == nil || g.token != token || !g.wait {
		return
	}
	if g.phase == held {
		if waiting {
			c.others(now, now, true)
		}
		return
	}
	if fence <= g.lastFence {
		return // of a hold that was over before we were told that we wait
	}
	start := g.firstSent
	if g.answered {
		// The last answer left the server after lastSent; since then its clock went on by the difference.
		start = g.lastSent + (serverTime - g.lastServer)
		if start > now+Margin(g.ttl)/2 {
			// More time went by there than here: its clock was set forward, and the count is worth nothing. Ask.
			g.recheckAt = now
			return
		}
	}
	start = min(start, now)
	if start+remaining-Margin(g.ttl) <= now {
		g.recheckAt = now // lapsed, or its clock was set back: the answer tells what is left
		return
	}
	c.hold(now, start+remaining, Answer{Fence: fence, Waiting: waiting}, ViaMessage)
}

// Hint takes the news that another process waits for the lease of a generation. It comes on another connection than the
// grant's reply and may overtake it, so it counts before the hold is known as well.
func (c *Claim) Hint(now Time, token string) {
	c.expire(now)
	if g := c.gen; g != nil && g.token == token {
		c.others(now, now, true)
	}
	c.drive(now)
}

// hold begins the hold of the current generation; in Redis it ends at end.
func (c *Claim) hold(now, end Time, a Answer, via Via) {
	g := c.gen
	g.phase = held
	g.validUntil = end - Margin(g.ttl)
	g.renewAt = renewAt(end-g.ttl, g.ttl)
	g.grantFence, g.usedFence, g.grantedAt = a.Fence, a.Fence, now
	if a.Waiting {
		c.others(now, now, true)
	}
	c.retryAt = min(c.retryAt, now+g.ttl/8) // what was only asked could wait longer than what is held
	switch {
	case now >= g.validUntil:
		c.end(now, nil)
		if c.head.Try {
			c.failTries(now, errLapsed) // one attempt
		}
		return
	case !fits(g, c.head): // the one it was asked for has given up
		c.end(now, nil)
		return
	}
	c.use(now, Action{Fence: a.Fence, Via: via})
}

// extend moves the end of the validity, never back.
func (g *generation) extend(to Time) { g.validUntil = max(g.validUntil, to) }

// renewAt is when a lease that began, or was renewed, at start is due. Rounding down to a tenth of the interval
// lets the renewals of many names fall together and leave in one pipeline.
func renewAt(start Time, ttl time.Duration) Time {
	interval := min(ttl/3, renewAtMost)
	grain := max(interval/10, time.Millisecond)
	return (start + interval) / grain * grain
}

// others takes the news, asked for at sent, whether other processes wait.
func (c *Claim) others(now, sent Time, wait bool) {
	g := c.gen
	if !wait {
		if sent >= g.contendAt { // else somebody came since then
			g.contended = false
		}
		return
	}
	if !g.contended {
		g.contended, g.contendAt = true, now
	}
	if g.lingerTill > 0 {
		c.end(now, nil)
	}
}

// renewed takes the answer to a renewal. "Not yours" counts whenever it was said: a generation that is not the holder
// will never be again.
func (c *Claim) renewed(now Time, cmd *Command, a Answer) {
	g := c.gen
	if g == nil || g.token != cmd.End || g.phase != held {
		return // late reply after deadline: what was lost stays lost
	}
	if a.Status != Renewed {
		c.lose(now, LostDenied)
		return
	}
	g.renewErr = nil
	g.extend(cmd.SentAt + a.Remaining - Margin(g.ttl))
	g.renewAt = max(g.renewAt, renewAt(cmd.SentAt, g.ttl))
	c.others(now, cmd.SentAt, a.Waiting)
}

// released takes the answer to a release.
func (c *Claim) released(cmd *Command, a Answer) {
	c.ends = slices.DeleteFunc(c.ends, func(e *ending) bool {
		if e.token != cmd.End {
			return false
		}
		if r := e.confirm; r != nil {
			e.confirm = nil
			outcome := OK
			// Not ours any more. To a repeated release that is what a lost reply leaves behind; to the first it means that it was lost.
			if a.Status != Released && (!cmd.again || !e.inTime) {
				outcome = Lost
			}
			c.act(Action{Kind: Confirm, Req: r, Outcome: outcome})
		}
		return !a.Unfinished
	})
}

// failed takes a command that got no answer.
func (c *Claim) failed(now Time, cmd *Command, rep Reply, current bool) {
	if rep.Class == Denied {
		c.denied(now, cmd, rep.Err, current)
		return
	}
	if current { // else it was counted when it was given up, and others may have been answered since
		if !c.outage {
			c.outage, c.outageSince = true, cmd.SentAt
		}
		c.outageErr = rep.Err
		c.backOff(now)
		c.renewFailed(cmd, rep.Err)
	}
	if rep.Class == Refused && cmd.Verb == Release {
		c.unconfirmed(cmd.End, rep.Err) // the server has spoken; the release goes on all the same
	}
	if cmd.Ask != "" && c.head != nil && c.head.Try && c.gen != nil && c.gen.token == cmd.Ask {
		c.failTries(now, rep.Err) // one attempt
	}
}

// denied takes an error that waiting does not heal: whoever waits is told at once. What is held or left behind is tried on
// all the same, for rights may come back before the lease is over; only a client that closes does not wait for that.
func (c *Claim) denied(now Time, cmd *Command, err error, current bool) {
	if current && cmd.Verb != Acquire {
		c.backOff(now)
		c.renewFailed(cmd, err)
	}
	if cmd.Verb == Release {
		c.unconfirmed(cmd.End, err)
		c.ends = slices.DeleteFunc(c.ends, func(e *ending) bool { return c.closed && e.token == cmd.End })
	}
	if cmd.Ask == "" || c.gen == nil || c.gen.token != cmd.Ask || c.gen.phase == held {
		return
	}
	c.drop(now)
	for r := c.head; r != nil; r = c.head {
		c.remove(r)
		c.act(Action{Kind: Fail, Req: r, Outcome: Permanent, Err: err})
	}
}

// renewFailed reports a failed renewal, if somebody holds by it: a lease that only lingers is nobody's trouble.
func (c *Claim) renewFailed(cmd *Command, err error) {
	if cmd.Verb == Renew && c.user != nil && c.gen != nil && c.gen.token == cmd.End {
		c.gen.renewErr = err
		c.act(Action{Kind: RenewFailed, Req: c.user, Err: err})
	}
}

func (c *Claim) unconfirmed(token string, err error) {
	for _, e := range c.ends {
		if e.token == token && e.confirm != nil {
			c.act(Action{Kind: Confirm, Req: e.confirm, Outcome: Unconfirmed, Err: err})
			e.confirm = nil
		}
	}
}

// failTries fails the tries at the head of the queue: the one attempt was for all of them.
func (c *Claim) failTries(now Time, err error) {
	for r := c.head; r != nil && r.Try; r = c.head {
		c.remove(r)
		c.act(Action{Kind: Fail, Req: r, Outcome: Unavailable, Err: err})
	}
	if c.gen != nil && c.gen.phase != held {
		c.drop(now)
	}
}

// backOff keeps the next command back for a while: exponential, with jitter, and short beside a lease that is at stake.
func (c *Claim) backOff(now Time) {
	d := min(firstBackOff<<min(c.failures, 10), lastBackOff)
	c.failures++
	if c.gen != nil && c.gen.phase == held {
		d = min(d, c.gen.ttl/8)
	}
	c.retryAt = now + d/2 + time.Duration(c.cfg.Jitter()*float64(d/2))
}

// end takes the current generation out of use and sees to its end in Redis, for r if it is not nil.
func (c *Claim) end(now Time, r *Request) {
	g := c.gen
	c.gen = nil
	over := now + g.ttl
	if g.phase != held {
		over += life(g.ttl) // its place may be granted until the very end
	}
	if g.open > 0 {
		over += tombstoned
	}
	c.ends = append(c.ends, &ending{
		token: g.token, used: g.usedFence, open: g.open,
		answered: g.answered || g.phase == held, valid: g.validUntil, confirm: r, leaseEnd: now + g.ttl, overAt: over,
	})
}

// drop forgets the current generation if Redis cannot know it nor hear of it any more, else ends it.
func (c *Claim) drop(now Time) {
	if c.gen.open > 0 || c.gen.answered {
		c.end(now, nil)
		return
	}
	c.gen = nil
}
