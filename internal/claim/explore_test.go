package claim

import (
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"testing"
	"time"
)

// pick chooses one of n; a world driven by the same choices does the same.
type pick func(n int) int

// setting is what a run may do beside delaying and losing; each is drawn from its seed.
type setting struct {
	processes int
	ttl       time.Duration
	back      bool // the server's clock may be set back
	ahead     bool // and forward, which ends the promise of exclusion
	crashes   bool
	closes    bool
	doubled   bool // a packet may arrive twice
}

func draw(choose pick, m mutant) (*world, setting) {
	s := setting{
		processes: 1 + choose(3),
		ttl:       []time.Duration{300 * time.Millisecond, time.Second, 3 * time.Second}[choose(3)],
		back:      choose(4) == 0,
		ahead:     choose(8) == 0,
		crashes:   choose(4) == 0,
		closes:    choose(4) == 0,
		doubled:   choose(2) == 0,
	}
	rate := float64(choose(9)-4) / 1000 // well inside the margin
	budget := []int{64, 64, 1}[choose(3)]
	return newWorld(s.processes, rate, budget, m), s
}

// chaos lets anything happen for a number of steps, or until the choices are used up.
func (w *world) chaos(s setting, choose pick, steps int, more func() bool) {
	for range steps {
		if w.broken != "" || !more() {
			return
		}
		w.now += []time.Duration{
			0, time.Microsecond, 100 * time.Microsecond, time.Millisecond, time.Millisecond, 4 * time.Millisecond,
			20 * time.Millisecond, 90 * time.Millisecond, s.ttl / 3, s.ttl,
		}[choose(10)]
		if choose(4) > 0 { // else all timers are late
			w.ticks()
		}
		w.anything(s, choose)
		w.overdue()
		if len(w.notes) > 20 {
			w.notes = w.notes[10:]
		}
	}
}

func (w *world) ticks() {
	for _, p := range w.procs {
		if at, ok := p.claim.Next(); ok && at <= w.now {
			w.tick(p)
		}
	}
}

func (w *world) anything(s setting, choose pick) {
	p := w.procs[choose(len(w.procs))]
	switch kind := choose(32); {
	case kind < 6:
		if p.closed && choose(4) > 0 {
			w.crash(p) // its successor starts
		}
		if len(p.calls) < 4 {
			w.request(p, w.spec(s, choose))
		}
	case kind < 7:
		if c := p.find(waits, choose); c != nil {
			w.cancel(p, c)
		}
	case kind < 12:
		if c := p.find(uses, choose); c != nil && w.now >= c.returned {
			w.release(p, c)
		}
	case kind < 26:
		w.network(s, choose)
	case kind < 29:
		if len(w.notes) > 0 {
			i := choose(len(w.notes))
			m := w.notes[i]
			if fate := choose(8); fate > 0 { // else it is heard again
				w.notes = slices.Delete(w.notes, i, i+1)
				if fate == 1 {
					return // it was lost
				}
			}
			w.hear(m)
		}
	case kind < 30:
		switch choose(4) {
		case 0:
			w.subscribe(p, false)
		case 1:
			w.tellSub(p, Opening)
		default:
			w.subscribe(p, true)
			w.tellSub(p, Ready)
		}
	default:
		w.disaster(s, p, choose)
	}
}

func (w *world) network(s setting, choose pick) {
	if len(w.wires) == 0 {
		return
	}
	x := w.wires[choose(len(w.wires))]
	switch fate := choose(16); {
	case fate == 0 && !x.answered:
		w.lose(x)
	case fate == 1 && !x.answered && x.runs == 0:
		w.refuse(x, []Class{NotExecuted, Refused, Refused, Denied}[choose(4)])
	case x.runs == 0:
		w.run(x)
		if fate > 5 && !x.answered {
			w.answer(x)
		}
	case !x.answered:
		w.answer(x)
	case fate == 2 && s.doubled && x.runs == 1:
		w.run(x)
	}
}

func (w *world) disaster(s setting, p *process, choose pick) {
	switch choose(8) {
	case 0:
		if s.crashes {
			w.crash(p)
		}
	case 1:
		if s.closes {
			w.closeDown(p, choose(2) == 0)
		}
	case 2:
		if s.back {
			w.leap(-[]time.Duration{time.Millisecond, time.Second, time.Hour}[choose(3)])
		}
	case 3:
		if s.ahead {
			w.leap([]time.Duration{50 * time.Millisecond, time.Second, time.Hour}[choose(3)])
		}
	case 4:
		if s.ahead {
			w.flush()
		}
	case 5:
		w.tellSub(p, Deaf)
	default:
		w.tick(p) // too early does no harm
	}
}

func (p *process) find(state callState, choose pick) *call {
	var found []*call
	for _, c := range p.calls {
		if c.state == state {
			found = append(found, c)
		}
	}
	if len(found) == 0 {
		return nil
	}
	return found[choose(len(found))]
}

func (w *world) spec(s setting, choose pick) Request {
	r := Request{TTL: s.ttl, Renew: true, Slice: 5 * time.Millisecond}
	switch choose(16) {
	case 0, 1, 2, 3:
		r.Try = true
	case 4:
		r.Renew = false
	case 5:
		r.TTL = 2 * s.ttl
	case 6:
		r.MaxHold = s.ttl / 2
	case 7, 8:
		r.Linger = 30 * time.Millisecond
	case 9:
		r.Slice = 0
	}
	return r
}

// calm ends all faults: every command arrives and is answered at once, every timer is on time, users release after a short while.
// Everybody must be served within the bound, and nothing may be left.
func (w *world) calm(s setting) (took time.Duration) {
	const hold, hop = 2 * time.Millisecond, 100 * time.Microsecond
	began := w.now
	waiting := 0
	for _, p := range w.procs {
		p.listening = true
		w.tellSub(p, Ready)
		waiting += len(p.calls)
	}
	// A hold, and a waiter, that died in the faults cost a lease each; a lost message a period; a back-off at most a second.
	bound := 8*s.ttl + 2*lastBackOff + time.Duration(waiting)*20*time.Millisecond
	for rounds := 0; w.broken == "" && !w.settled(); rounds++ {
		if took = w.now - began; took > bound || rounds > 20000 {
			w.breakf("not everybody was served %v after the last fault (%d rounds)", took, rounds)
			break
		}
		w.ticks()
		if w.traffic() {
			w.now += hop
			continue
		}
		next, busy := never, false
		for _, p := range w.procs {
			if at, ok := p.claim.Next(); ok {
				next = min(next, at)
			}
			for _, c := range p.calls {
				if c.state != uses {
					continue
				}
				if at := max(c.returned, c.req.heldAt+hold); at > w.now {
					next = min(next, at)
				} else {
					w.release(p, c)
					busy = true
				}
				break
			}
		}
		if !busy && next == never && !w.settled() {
			w.breakf("everybody sleeps")
		}
		if !busy && next != never {
			w.now = max(w.now, next)
		}
	}
	for _, token := range w.srv.leftovers() {
		if !w.excused[token] && w.step == 0 && !w.flushed { // else tombstones end early, or places late
			w.breakf("%s is left on the server", token)
		}
	}
	return took
}

// traffic delivers everything that is under way.
func (w *world) traffic() (something bool) {
	wires, notes := w.wires, w.notes
	w.wires, w.notes = nil, nil
	for _, x := range wires {
		if x.runs == 0 {
			w.run(x)
			something = true
		}
		if !x.answered {
			w.answer(x)
			something = true
		}
	}
	for _, m := range notes {
		w.hear(m)
		something = true
	}
	return something
}

func (w *world) settled() bool {
	for _, p := range w.procs {
		if len(p.calls) > 0 || !p.claim.Idle() {
			return false
		}
	}
	return len(w.wires) == 0 && len(w.notes) == 0
}

// explore runs one seed.
func explore(seed uint64, m mutant, tracing bool) (*world, time.Duration) {
	r := rand.New(rand.NewPCG(seed, 0))
	w, s := draw(r.IntN, m)
	w.tracing = tracing
	if r.IntN(4) > 0 {
		for _, p := range w.procs {
			w.subscribe(p, true)
			w.tellSub(p, Ready)
		}
	}
	w.chaos(s, r.IntN, 40+r.IntN(160), func() bool { return true })
	return w, w.calm(s)
}

// fromEnv reads a number, so that make stress can ask for more, or for the seed of a failure.
func fromEnv(name string, otherwise uint64) uint64 {
	if n, err := strconv.ParseUint(os.Getenv(name), 10, 64); err == nil {
		return n
	}
	return otherwise
}

func TestExploreRandomFaults(t *testing.T) {
	t.Parallel()
	seeds, first := fromEnv("CLAIM_SEEDS", 1000), fromEnv("CLAIM_SEED", 1)
	var slowest time.Duration
	for seed := first; seed < first+seeds; seed++ {
		w, took := explore(seed, mutant{}, false)
		if w.broken != "" {
			w, _ = explore(seed, mutant{}, true)
			w.fail(t, fmt.Sprintf("CLAIM_SEED=%d CLAIM_SEEDS=1", seed))
		}
		slowest = max(slowest, took)
	}
	t.Logf("%d seeds, the slowest was served after %v", seeds, slowest)
}
