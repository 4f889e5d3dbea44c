package claim

import (
	"fmt"
	"slices"
	"time"
)

// What can happen in a world.

// request makes a call of Lock or TryLock.
func (w *world) request(p *process, r Request) {
	r.Tag = fmt.Sprintf("p%d#%d", p.id, w.now)
	w.logf("p%d requests %+v", p.id, r.Tag)
	c := &call{req: &r}
	p.calls = append(p.calls, c)
	w.event(p, func(cl *Claim) { cl.Request(w.now, c.req) })
}

// cancel ends the wait of a call. If it was decided before, it goes on.
func (w *world) cancel(p *process, c *call) {
	w.logf("p%d cancels %v", p.id, c.req.Tag)
	w.event(p, func(cl *Claim) {
		if cl.Cancel(w.now, c.req) {
			i := slices.Index(p.calls, c)
			p.calls = slices.Delete(p.calls, i, i+1)
		} else if c.state == waits {
			w.breakf("p%d: %v waits and cannot be canceled", p.id, c.req.Tag)
		}
	})
}

// release is the Unlock of a call that holds, or that has lost its hold.
func (w *world) release(p *process, c *call) {
	c.state = unlocks
	c.valid = !c.lost && p.claim.Remaining(w.now, c.req) > 0
	w.logf("p%d releases %v, valid %v", p.id, c.req.Tag, c.valid)
	w.event(p, func(cl *Claim) {
		// What expires in this very event is told first.
		c.state = uses
		cl.expire(w.now)
		w.perform(p)
		c.state = unlocks
		cl.Release(w.now, c.req)
	})
}

func (w *world) tick(p *process) {
	w.event(p, func(cl *Claim) { cl.Tick(w.now) })
	if at, ok := p.claim.Next(); ok && at <= w.now {
		w.breakf("p%d wants to be ticked at %v, and was", p.id, at)
	}
}

// subscribe changes whether messages reach p; tellSub says so to its claim, at that time or later.
func (w *world) subscribe(p *process, on bool) { p.listening = on }

func (w *world) tellSub(p *process, sub Subscription) {
	w.logf("p%d subscription is %d", p.id, sub)
	w.event(p, func(cl *Claim) { cl.Subscribed(w.now, sub) })
}

func (w *world) closeDown(p *process, force bool) {
	w.logf("p%d closes, force %v", p.id, force)
	p.closed = true
	w.event(p, func(cl *Claim) {
		cl.Close(w.now)
		if force {
			cl.Force(w.now)
		}
	})
}

// crash ends a process, and another starts in its place. What it sent is still under way.
func (w *world) crash(p *process) {
	w.logf("p%d crashes", p.id)
	for token := range p.dead {
		w.excused[token] = true
	}
	w.excused[p.last] = true
	for _, e := range p.claim.ends {
		w.excused[e.token] = true
	}
	w.boot(p)
	if p.listening {
		w.tellSub(p, Ready)
	}
}

// run has the server execute a command; the second time is a doubled packet.
func (w *world) run(x *wire) {
	if w.mutant.server != nil {
		w.mutant.server(w.srv)
	}
	r := w.srv.exec(x.cmd)
	x.runs++
	if w.tracing {
		w.logf("server runs %s: %s", cmdString(x.cmd), answerString(r))
	}
	if x.runs == 1 {
		x.reply = r
	} else {
		w.excused[x.cmd.Ask] = w.excused[x.cmd.Ask] || x.answered // nothing but its own deadline ends what it left
	}
	for _, p := range w.procs {
		w.check(p)
	}
}

// answer delivers the reply of a command that ran.
func (w *world) answer(x *wire) { w.deliver(x, x.reply) }

// lose tells that nothing is known of a command; it may still run.
func (w *world) lose(x *wire) { w.deliver(x, Reply{Class: Unknown, Err: errModel}) }

// refuse ends a command that has not run and will not.
func (w *world) refuse(x *wire, class Class) {
	x.runs = 2 // never again
	w.excused[x.cmd.End] = w.excused[x.cmd.End] || class == Denied && x.p.closed
	w.deliver(x, Reply{Class: class, Err: errModel})
}

func (w *world) deliver(x *wire, r Reply) {
	x.answered = true
	if x.c != x.p.claim {
		return // a crash came first
	}
	if w.tracing {
		w.logf("p%d hears of %s: %s", x.p.id, cmdString(x.cmd), answerString(r))
	}
	said := r
	if w.mutant.reply != nil {
		w.mutant.reply(w, x, &r)
	}
	w.event(x.p, func(cl *Claim) { cl.Reply(w.now, x.cmd, r) })
	if denied := said.Class == Answered && x.cmd.Verb == Renew && said.End.Status == NotYours; denied && x.p.last == x.cmd.End {
		w.breakf("p%d goes on although the server denies its lease", x.p.id)
	}
}

// Bounds of the network: a driver's own, and how long a packet can be under way (below the life of a tombstone).
const (
	driverBound = 15 * time.Second
	packetBound = 40 * time.Second
)

// overdue tells of what is unanswered for too long, and drops what can have no effect any more.
func (w *world) overdue() {
	for _, x := range slices.Clone(w.wires) {
		if !x.answered && w.now-x.sentAt > driverBound {
			w.lose(x)
		}
	}
	w.wires = slices.DeleteFunc(w.wires, func(x *wire) bool {
		return x.answered && (x.runs > 1 || w.now-x.sentAt > packetBound)
	})
}

// hear delivers a message.
func (w *world) hear(m *mail) {
	if w.mutant.note != nil {
		w.mutant.note(w, m)
	}
	w.logf("p%d hears %+v", m.to.id, m.note)
	w.event(m.to, func(cl *Claim) {
		if m.hint {
			cl.Hint(w.now, m.token)
			return
		}
		cl.Granted(w.now, m.token, m.fence, m.remaining, m.serverTime, m.waiting)
	})
}

// flush empties the server: what was held is not, and nobody can promise exclusion.
func (w *world) flush() {
	w.logf("FLUSHALL")
	w.srv.holder, w.srv.fence, w.srv.queue, w.srv.tombs = "", 0, nil, map[string]int64{}
	w.leapt, w.flushed = true, true
}

// leap sets the server's clock.
func (w *world) leap(by time.Duration) {
	w.logf("the server's clock steps by %v", by)
	w.step += by
	w.leapt = w.leapt || by > 0
}
