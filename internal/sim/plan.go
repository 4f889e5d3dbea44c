package sim

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/e51fe0e6/dsync/dsync"
)

// plan is what a seed decides.
type plan struct {
	seed    uint64
	kinds   []string  // client library of each process
	rates   []float64 // of the processes' clocks
	workers []int     // goroutines of each process
	names   []string
	options []options
	faults  []fault
	strict  bool // slice 0 everywhere
	chaos   time.Duration
	length  time.Duration // of the work, from which chaos is the first part
	latency time.Duration
}

// options are those of a Mutex, in a form that can be printed.
type options struct {
	ttl, slice, linger, maxHold time.Duration
	renew                       bool
}

func (o options) list() []dsync.Option {
	list := []dsync.Option{dsync.WithTTL(o.ttl), dsync.WithSlice(o.slice), dsync.WithLinger(o.linger)}
	if !o.renew {
		list = append(list, dsync.WithoutRenewal())
	}
	if o.maxHold > 0 {
		list = append(list, dsync.WithMaxHold(o.maxHold))
	}
	return list
}

// recovery is how long after the last fault everything is as if there had been none: leases of the dead and places of the frozen are
// over, the client libraries have given up what they waited for, subscriptions are dialed again.
func (p *plan) recovery() time.Duration {
	longest := time.Duration(0)
	for _, o := range p.options {
		longest = max(longest, o.ttl)
	}
	return 2*longest + 10*time.Second
}

func newPlan(seed uint64) *plan {
	dice := rand.New(rand.NewPCG(seed, 0))
	p := &plan{seed: seed, latency: spread(dice, 50*time.Microsecond, time.Millisecond)}
	for range 2 + dice.IntN(4) {
		p.kinds = append(p.kinds, []string{GoRedis, Rueidis}[dice.IntN(2)])
		p.rates = append(p.rates, []float64{1, 1, 1.004, 0.996}[dice.IntN(4)])
		p.workers = append(p.workers, 1+dice.IntN(3))
	}
	p.names = []string{"a", "b", "c"}[:1+dice.IntN(4)/2]
	p.strict = dice.IntN(3) == 0
	ttls := []time.Duration{
		100 * time.Millisecond, 200 * time.Millisecond, 500 * time.Millisecond, time.Second, 3 * time.Second, 10 * time.Second,
	}
	for range 1 + dice.IntN(2) {
		if p.strict && len(p.options) > 0 {
			break // a place is asked for with one ttl; to whom it passes with another, it is of no use
		}
		o := options{ttl: ttls[dice.IntN(len(ttls))], renew: dice.IntN(3) > 0}
		if !p.strict {
			o.slice = []time.Duration{0, 5 * time.Millisecond, 5 * time.Millisecond, 200 * time.Millisecond}[dice.IntN(4)]
			if o.renew && dice.IntN(3) == 0 {
				o.linger = spread(dice, time.Millisecond, time.Second)
			}
		}
		if o.renew && dice.IntN(4) == 0 {
			o.maxHold = spread(dice, 5*time.Millisecond, 5*time.Second)
		}
		p.options = append(p.options, o)
	}
	p.chaos = 5*time.Second + time.Duration(dice.Int64N(int64(15*time.Second)))
	var kinds []FaultKind
	style, steps := dice.IntN(10), dice.IntN(4) == 0
	for k := range faultKinds {
		// Fences survive that the server forgets them by its clock: one of the two must be right.
		excluded := steps && (k == FlushAll || k == DeleteKey) || !steps && k == StepClock
		if !excluded && (style >= 5 || style >= 2 && k.mild()) {
			kinds = append(kinds, k)
		}
	}
	if style >= 7 { // few kinds again and again find other things than all of them
		dice.Shuffle(len(kinds), func(i, j int) { kinds[i], kinds[j] = kinds[j], kinds[i] })
		kinds = kinds[:1+dice.IntN(3)]
	}
	if len(kinds) > 0 {
		p.faults = schedule(dice, kinds, len(p.kinds), p.names, p.options[0].ttl, p.chaos, spread(dice, 100*time.Millisecond, 4*time.Second))
		p.length = p.chaos + p.recovery() + 5*time.Second
	} else {
		p.length = p.chaos
	}
	return p
}

// String is the head of a trace.
func (p *plan) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "seed %d: processes %v, clock rates %v, goroutines %v, names %v, strict %v, latency %v, chaos %v of %v\n",
		p.seed, p.kinds, p.rates, p.workers, p.names, p.strict, p.latency, p.chaos, p.length)
	for _, o := range p.options {
		fmt.Fprintf(&b, "options %+v\n", o)
	}
	for _, f := range p.faults {
		fmt.Fprintf(&b, "fault %v\n", f)
	}
	return b.String()
}

// excused returns what the faults of the plan may break.
func (p *plan) excused() (all Promise) {
	for _, f := range p.faults {
		all |= f.kind.excuses()
	}
	return all
}

// Result is what a run came to.
type Result struct {
	Simulated time.Duration
	Holds     int
	Sent      int
}

// run carries the plan out.
func (p *plan) run(t testing.TB) (res Result) {
	t.Helper()
	w := NewWorld(t, p.seed, p.latency)
	w.plan = p
	excused := p.excused()
	var work sync.WaitGroup
	for i, kind := range p.kinds {
		proc := w.Process(kind, p.rates[i])
		shared := map[options]map[string]*dsync.Mutex{}
		for _, o := range p.options {
			shared[o] = map[string]*dsync.Mutex{}
			for _, name := range p.names {
				shared[o][name] = dsync.NewMutex(proc.Client, name, o.list()...)
			}
		}
		for n := range p.workers[i] {
			u := &user{
				p: proc, plan: p, who: fmt.Sprintf("u%d", n+1), shared: shared, excused: excused,
				dice: rand.New(rand.NewPCG(p.seed, uint64(1000*(i+1)+n))),
			}
			work.Go(u.work)
		}
	}
	for _, f := range p.faults {
		<-time.After(f.at - w.Simulated())
		w.inflict(f)
	}
	<-time.After(p.chaos - w.Simulated())
	for _, proc := range w.processes {
		proc.Clock.unpause()
		proc.Link.Heal()
	}
	w.Answer("", false)
	w.logf("", "all faults are over")

	settled := p.chaos + p.recovery()
	done := make(chan struct{})
	go func() { work.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(p.length + p.recovery() + 2*time.Minute):
		w.Errorf("", time.Now(), "some are not served %v after the last fault", p.recovery()+2*time.Minute)
		w.cancel()
		<-done
	}
	res = Result{Simulated: w.Simulated(), Holds: w.History.Holds()}
	for _, proc := range w.processes {
		res.Sent += proc.Sent()
	}
	w.History.CheckExclusion()
	w.History.CheckLocal()
	if excused&Kept == 0 {
		w.History.CheckKept()
	}
	if excused&Order == 0 && p.strict {
		w.History.CheckOrder(50 * time.Millisecond)
	}
	if excused&Prompt == 0 {
		w.History.CheckGaps(w.began, 50*time.Millisecond)
	} else {
		w.History.CheckGaps(w.began.Add(settled), 50*time.Millisecond)
	}
	w.Finish(3 * time.Minute)
	return res
}

// user is a goroutine of a process that takes locks until the time is over.
type user struct {
	p       *Process
	plan    *plan
	who     string
	dice    *rand.Rand
	shared  map[options]map[string]*dsync.Mutex
	excused Promise
}

func (u *user) work() {
	w := u.p.w
	for w.Simulated() < u.plan.length {
		if !u.p.Wait(spread(u.dice, time.Millisecond, 3*time.Second), nil) {
			return
		}
		name := u.plan.names[u.dice.IntN(len(u.plan.names))]
		o := u.plan.options[u.dice.IntN(len(u.plan.options))]
		mu := u.shared[o][name]
		if u.dice.IntN(2) == 0 {
			mu = dsync.NewMutex(u.p.Client, name, o.list()...)
		}
		var again bool
		if u.dice.IntN(4) == 0 {
			again = u.section(mu, o)
		} else {
			again = u.lock(mu, o)
		}
		if !again {
			return
		}
	}
}

// wait draws the context of a call: without an end, with a deadline, or one that has ended already.
func (u *user) wait() (ctx context.Context, stop func()) {
	switch n := u.dice.IntN(10); {
	case n < 5:
		return u.p.Timeout(forever)
	case n < 9:
		return u.p.Timeout(spread(u.dice, time.Millisecond, 10*time.Second))
	default:
		ctx, stop = u.p.Timeout(forever)
		stop()
		return ctx, stop
	}
}

// lock is Lock or TryLock, a section, and Unlock.
func (u *user) lock(mu *dsync.Mutex, o options) bool {
	h := u.p.w.History
	ctx, stop := u.wait()
	defer stop()
	ended := watch(ctx)
	try := u.dice.IntN(4) == 0
	c := h.call(u.p, mu.Name(), u.who, try)
	var err error
	got := true
	if try {
		got, err = mu.TryLock(ctx)
	} else {
		err = mu.Lock(ctx)
	}
	u.p.Clock.Gate()
	if u.p.dead() {
		return u.gone(c)
	}
	if err != nil || !got {
		h.refused(c, err)
		return u.judge(ctx, c, ended, err)
	}
	hold := h.granted(c, mu.Fence(), mu.Lost(), mu.Remaining, !o.renew || o.maxHold > 0)
	u.judge(ctx, c, ended, nil)
	alive := u.hold(mu.Lost(), o)
	if !alive {
		return false
	}
	uctx, ustop := u.p.Timeout([]time.Duration{forever, 0, time.Millisecond, time.Second, 5 * time.Second}[u.dice.IntN(5)])
	defer ustop()
	uended := watch(uctx)
	h.unlocks(hold)
	err = mu.Unlock(uctx)
	u.p.Clock.Gate()
	if u.p.dead() {
		return false
	}
	h.unlocked(hold, err)
	u.judgeUnlock(hold, uended, err)
	return true
}

// section is Do or TryDo.
func (u *user) section(mu *dsync.Mutex, o options) bool {
	h := u.p.w.History
	ctx, stop := u.wait()
	defer stop()
	ended := watch(ctx)
	try := u.dice.IntN(4) == 0
	c := h.call(u.p, mu.Name(), u.who, try)
	var hold *Hold
	fn := func(inner context.Context) error {
		u.p.Clock.Gate()
		if u.p.dead() {
			return nil
		}
		fence, _ := dsync.Fence(inner)
		// Not the end of inner, which ends with the caller's context too.
		lost := mu.Lost()
		hold = h.granted(c, fence, lost, mu.Remaining, !o.renew || o.maxHold > 0)
		u.hold(lost, o)
		h.unlocks(hold)
		select {
		case <-lost:
			select {
			case <-inner.Done():
			case <-time.After(time.Nanosecond): // at once, but not before Lost
				u.p.w.Errorf(c.Name, time.Now(), "%s of %s: the context of Do goes on after the loss of %s", u.who, u.p.Name, c.Name)
			}
		default:
		}
		return nil
	}
	var err error
	if try {
		_, err = mu.TryDo(ctx, fn)
	} else {
		err = mu.Do(ctx, fn)
	}
	u.p.Clock.Gate()
	if u.p.dead() {
		return u.gone(c)
	}
	if hold == nil {
		h.refused(c, err)
		return u.judge(ctx, c, ended, err)
	}
	h.unlocked(hold, err)
	u.judge(ctx, c, ended, nil)
	if err != nil && !errors.Is(err, dsync.ErrLost) {
		u.p.w.Errorf(c.Name, c.done, "%s of %s: Do of %s: %v", u.who, u.p.Name, c.Name, err)
	}
	return true
}

// hold is a critical section: some heed the loss of the lock, some do not. It reports whether the process is still there.
func (u *user) hold(lost <-chan struct{}, o options) bool {
	d := spread(u.dice, 10*time.Microsecond, time.Second)
	if long := u.dice.IntN(8); long == 0 || long < 3 && !o.renew {
		d = o.ttl + time.Duration(u.dice.Int64N(int64(o.ttl)))
	}
	if u.dice.IntN(3) == 0 {
		lost = nil
	}
	return u.p.Wait(d, lost)
}

func (u *user) gone(c *Call) bool {
	if c.hold == nil {
		u.p.w.History.refused(c, errKilled)
	}
	return false
}

// watch notes when a context ended.
func watch(ctx context.Context) func() time.Time {
	var mu sync.Mutex
	var at time.Time
	note := func() {
		mu.Lock()
		defer mu.Unlock()
		if at.IsZero() && ctx.Err() != nil {
			at = time.Now()
		}
	}
	note()
	context.AfterFunc(ctx, note)
	return func() time.Time {
		note() // it may have ended just now
		mu.Lock()
		defer mu.Unlock()
		return at
	}
}

// atOnce is what may pass between a cause and its effect without a network between them: fences that are ahead of the clock.
const atOnce = time.Millisecond

// judge checks what a call returned, and reports whether the process has more to do.
func (u *user) judge(ctx context.Context, c *Call, ended func() time.Time, err error) bool {
	w, at := u.p.w, ended()
	fail := func(format string, args ...any) {
		w.Errorf(c.Name, c.done, "%s of %s on %s, called at %s: %s", u.who, u.p.Name, c.Name, w.History.stamp(c.called), fmt.Sprintf(format, args...))
	}
	if !at.IsZero() && !u.p.Clock.resumedAt().After(at) {
		switch {
		case c.done.Sub(at) > atOnce:
			fail("returned %v after its context had ended: %v", c.done.Sub(at), err)
		case err == nil && c.hold != nil && c.done.After(at.Add(atOnce)):
			fail("succeeded after its context had ended")
		}
	}
	switch {
	case err == nil && !c.Try && c.hold == nil:
		fail("nil without the lock")
	case err == nil:
	case ctx.Err() != nil && errors.Is(err, ctx.Err()):
	case errors.Is(err, dsync.ErrUnavailable):
		if u.excused&Available == 0 {
			fail("%v", err)
		}
	case errors.Is(err, dsync.ErrClosed):
		return false
	default:
		fail("%v", err)
	}
	if limit := 3*time.Second + atOnce; c.Try && c.hold == nil && c.done.Sub(c.called) > 2*limit && u.excused&Kept == 0 {
		fail("a try took %v", c.done.Sub(c.called))
	}
	return true
}

func (u *user) judgeUnlock(hold *Hold, ended func() time.Time, err error) {
	w := u.p.w
	switch {
	case err == nil, errors.Is(err, dsync.ErrLost):
	case errors.Is(err, dsync.ErrUnconfirmed) && (!ended().IsZero() || u.excused&Available != 0):
	default:
		w.Errorf(hold.Name, time.Now(), "%s of %s: Unlock of %s at %s: %v", u.who, u.p.Name, hold.Name, w.History.stamp(hold.unlocked), err)
	}
}
