package claim

import (
	"maps"
	"slices"
	"testing"
	"time"
)

// move is one op of the small alphabet of the exhaustive enumeration.
type move func(*world)

const exhaustTTL = 300 * time.Millisecond

// moves lists everything that can happen next. Each takes its world, so that it can be applied to a copy.
func (w *world) moves(calls int) (all []move) {
	for i, p := range w.procs {
		if len(p.calls) < calls {
			all = append(all, func(w *world) {
				w.request(w.procs[i], Request{TTL: exhaustTTL, Renew: true})
			})
		}
		for j, c := range p.calls {
			switch {
			case c.state == waits:
				all = append(all, func(w *world) { w.cancel(w.procs[i], w.procs[i].calls[j]) })
			case c.state == uses && w.now >= c.returned:
				all = append(all, func(w *world) { w.release(w.procs[i], w.procs[i].calls[j]) })
			}
		}
	}
	for i, x := range w.wires {
		if x.runs == 0 {
			all = append(all, func(w *world) { w.run(w.wires[i]) })
		} else if !x.answered {
			all = append(all, func(w *world) { w.answer(w.wires[i]) })
		}
		if !x.answered {
			all = append(all, func(w *world) { w.lose(w.wires[i]) })
		}
	}
	for i := range w.notes {
		drop := func(w *world) *mail {
			m := w.notes[i]
			w.notes = slices.Delete(w.notes, i, i+1)
			return m
		}
		all = append(all, func(w *world) { w.hear(drop(w)) }, func(w *world) { drop(w) })
	}
	return append(all, w.clocks()...)
}

// clocks lists the ways in which time goes on: to the next timer, or to the end of the lease in Redis with all timers late.
func (w *world) clocks() (all []move) {
	next := never
	for _, p := range w.procs {
		if at, ok := p.claim.Next(); ok {
			next = min(next, at)
		}
	}
	if next != never {
		all = append(all, func(w *world) {
			w.now = max(w.now, next)
			w.ticks()
		})
	}
	if left := w.srv.remains(w.srv.holder); left > 0 {
		all = append(all, func(w *world) { w.now += left })
	}
	return all
}

// copy returns a world that goes its own way from here.
func (w *world) copy() *world {
	n := *w
	s := *w.srv
	n.srv = &s
	s.queue, s.tombs = slices.Clone(s.queue), maps.Clone(s.tombs)
	n.fences, n.excused = maps.Clone(w.fences), maps.Clone(w.excused)
	n.trace = slices.Clip(w.trace)
	n.procs, n.wires, n.notes = nil, nil, nil
	n.connect()
	procs, claims := map[*process]*process{}, map[*Claim]*Claim{}
	for _, p := range w.procs {
		q := *p
		q.dead = maps.Clone(p.dead)
		q.claim, q.calls = copyClaim(p)
		q.claim.cfg = n.config(&q)
		procs[p], claims[p.claim] = &q, q.claim
		n.procs = append(n.procs, &q)
	}
	for _, x := range w.wires {
		y := *x
		y.p, y.c = procs[x.p], claims[x.c]
		n.wires = append(n.wires, &y)
	}
	for _, m := range w.notes {
		o := *m
		o.to = procs[m.to]
		n.notes = append(n.notes, &o)
	}
	return &n
}

func copyClaim(p *process) (*Claim, []*call) {
	c := *p.claim
	reqs := map[*Request]*Request{nil: nil}
	calls := make([]*call, len(p.calls))
	for i, old := range p.calls {
		r, n := *old.req, *old
		n.req, reqs[old.req] = &r, &r
		calls[i] = &n
	}
	for _, r := range reqs {
		if r != nil {
			r.next, r.prev = reqs[r.next], reqs[r.prev]
		}
	}
	c.out, c.head, c.tail, c.user = nil, reqs[c.head], reqs[c.tail], reqs[c.user]
	if c.gen != nil {
		g := *c.gen
		c.gen = &g
	}
	c.ends = slices.Clone(c.ends)
	for i, e := range c.ends {
		n := *e
		n.confirm = reqs[e.confirm]
		c.ends[i] = &n
	}
	return &c, calls
}

// hash of a world's state, as far as it matters for what comes: moments count from now.
type hash uint64

func (h *hash) num(ns ...int64) {
	for _, n := range ns {
		*h = (*h ^ hash(n)) * 0x9e3779b97f4a7c15
		*h ^= *h >> 29
	}
}

func (h *hash) str(s string) {
	for i := range len(s) {
		h.num(int64(s[i]))
	}
	h.num(-1)
}

func (h *hash) at(now Time, ts ...Time) {
	for _, t := range ts {
		if t == 0 || t == never {
			h.num(int64(t), 1)
			continue
		}
		h.num(int64(t - now))
	}
}

func (h *hash) bits(bs ...bool) {
	n := int64(1)
	for _, b := range bs {
		n <<= 1
		if b {
			n |= 1
		}
	}
	h.num(n)
}

func (w *world) hash() hash {
	h := hash(len(w.wires))
	for _, p := range w.procs {
		h.claim(w.now, p.claim)
		for _, c := range p.calls {
			h.num(int64(c.state))
			h.bits(c.valid, c.lost, c.req == p.claim.user, c.req.waiting)
			h.at(w.now, c.returned, c.req.since, c.req.heldAt)
		}
	}
	for _, x := range w.wires {
		h.str(x.cmd.End + x.cmd.Ask)
		h.at(w.now, x.cmd.SentAt)
		h.bits(x.runs > 0, x.answered, x.cmd.Tombstone, x.cmd.Repeated, x.cmd == x.p.claim.flight)
		h.num(int64(x.cmd.Verb), x.cmd.Used, int64(x.reply.End.Status), int64(x.reply.Ask.Status))
		h.at(w.now, x.reply.Ask.Remaining+w.now, x.reply.End.Remaining+w.now)
	}
	for _, m := range w.notes {
		h.str(m.token)
		h.bits(m.hint, m.waiting)
		h.num(m.fence, w.srv.clock()-int64(m.serverTime/time.Microsecond))
	}
	now := w.srv.clock()
	h.str(w.srv.holder)
	h.num(w.srv.till*1000-now, w.srv.from-now, w.srv.fence-now, int64(len(w.srv.queue)))
	for _, q := range w.srv.queue {
		h.str(q.token)
		h.num(q.till*1000 - now)
	}
	return h
}

func (h *hash) claim(now Time, c *Claim) {
	if g := c.gen; g != nil {
		h.str(g.token)
		h.num(int64(g.phase), int64(g.sent), int64(g.open), g.grantFence, g.usedFence-g.grantFence)
		h.bits(g.answered, g.contended)
		h.at(now, g.firstSent, g.recheckAt, g.lastSent, g.validUntil, g.renewAt, g.contendAt)
	}
	for _, e := range c.ends {
		h.str(e.token)
		h.num(int64(e.open), int64(e.sent))
		h.bits(e.answered, e.inTime, e.confirm != nil)
		h.at(now, e.overAt, e.valid)
	}
	h.bits(c.outage, c.flight != nil, c.head != nil, c.user != nil)
	h.num(int64(c.failures))
	h.at(now, c.retryAt, c.outageSince)
}

// Every sequence of the alphabet up to a depth, for two processes, from a few situations.
func TestExhaustTwoProcesses(t *testing.T) {
	t.Parallel()
	depth := int(fromEnv("CLAIM_DEPTH", 5))
	lock := Request{TTL: exhaustTTL, Renew: true}
	for _, situation := range []struct {
		name         string
		calls, extra int
		make         func(*world)
	}{
		{"from-nothing", 1, 1, func(*world) {}},
		{"one-holds-one-queues", 1, 0, func(w *world) {
			for _, p := range w.procs {
				w.request(p, lock)
				w.flow()
			}
		}},
		{"both-want-two", 2, 0, func(w *world) {
			for _, p := range slices.Concat(w.procs, w.procs) {
				w.request(p, lock)
			}
		}},
		{"an-answer-is-lost", 1, 0, func(w *world) {
			w.request(w.procs[0], lock)
			w.run(w.wires[0])
			w.lose(w.wires[0])
			w.request(w.procs[1], lock)
		}},
	} {
		t.Run(situation.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(2, 0.004, 64, mutant{})
			for _, p := range w.procs {
				w.subscribe(p, true)
				w.tellSub(p, Ready)
			}
			w.now = time.Second
			situation.make(w)
			states := exhaust(t, w, depth+situation.extra, situation.calls)
			t.Logf("%d states within %d moves", states, depth+situation.extra)
		})
	}
}

// flow delivers what is under way until nothing is.
func (w *world) flow() {
	for w.traffic() {
		w.now += time.Millisecond
	}
}

// exhaust goes through all worlds within depth moves, breadth first, each state once.
func exhaust(t *testing.T, first *world, depth, calls int) (states int) {
	t.Helper()
	type node struct {
		w    *world
		path []int
	}
	seen := map[hash]bool{first.hash(): true}
	level := []node{{w: first}}
	for d := range depth {
		var next []node
		for _, n := range level {
			for i, m := range n.w.moves(calls) {
				w := n.w.copy()
				m(w)
				path := append(slices.Clip(n.path), i)
				if w.broken != "" {
					replay(t, first, path, calls)
				}
				if h := w.hash(); !seen[h] {
					seen[h] = true
					if d+1 < depth {
						next = append(next, node{w, path})
					}
				}
			}
		}
		level = next
	}
	return len(seen)
}

// replay shows what happened on the way to a broken world.
func replay(t *testing.T, first *world, path []int, calls int) {
	t.Helper()
	w := first.copy()
	w.tracing = true
	for _, i := range path {
		w.moves(calls)[i](w)
	}
	w.fail(t, "a sequence of moves breaks it")
}
