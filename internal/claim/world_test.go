package claim

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// world is several processes' claims on one name, the model server, and a network between them that does what it likes. Each op is one
// event at one place; whoever drives the world (seeds, fuzz bytes, enumeration) chooses ops, so every delay is a
// choice. Nothing in here is random. After each op all invariants are checked.
type world struct {
	now   Time
	srv   *server
	procs []*process
	wires []*wire
	notes []*mail

	rate    float64 // the server's clock runs faster by this
	step    Time    // sum of the steps of the server's clock
	leapt   bool    // it was once set forward: then nobody can promise exclusion
	flushed bool
	fences  map[int64]bool
	fence   int64           // last one granted
	excused map[string]bool // tokens of which a command ran again after it was answered
	mutant  mutant
	trace   []string // only if tracing
	tracing bool
	broken  string // the first invariant that did not hold
}

// process is one client; a crash replaces the claim.
type process struct {
	id, life, gens int
	claim          *Claim
	calls          []*call // not over yet
	listening      bool    // what is published now reaches it
	dead           map[string]bool
	last           string // the current generation as last seen
	closed         bool
}

// call is one Lock or TryLock of a user, and its Unlock.
type call struct {
	req      *Request
	state    callState
	valid    bool // when Release was called
	lost     bool
	returned Time // Lock returns then
}

type callState int

const (
	waits callState = iota
	uses
	unlocks
)

// wire is one command that was sent.
type wire struct {
	p        *process
	c        *Claim // the incarnation that sent it
	cmd      *Command
	sentAt   Time
	runs     int
	reply    Reply
	answered bool // the claim was told something
}

type mail struct {
	note
	to     *process
	sentAt Time
}

// mutant is a deliberate fault. The explorer must find it.
type mutant struct {
	name    string
	command func(*Command)              // as it goes out
	reply   func(*world, *wire, *Reply) // as it comes in
	note    func(*world, *mail)         // as it comes in
	after   func(*world, *process)      // after each event
	server  func(*server)
}

var errModel = errors.New("model")

const epoch = 1_000_000_000_000_000 // µs

func newWorld(processes int, rate float64, budget int, m mutant) *world {
	w := &world{rate: rate, fences: map[int64]bool{}, excused: map[string]bool{}, mutant: m}
	w.srv = &server{budget: budget, tombs: map[string]int64{}}
	w.connect()
	for i := range processes {
		p := &process{id: i}
		w.procs = append(w.procs, p)
		w.boot(p)
	}
	return w
}

// connect joins the parts; a copy of the world needs it again.
func (w *world) connect() {
	w.srv.clock = func() int64 {
		return epoch + int64(float64(w.now)*(1+w.rate))/1000 + int64(w.step/time.Microsecond)
	}
	w.srv.tell = func(n note) {
		p := w.procs[owner(n.token)[0]-'0']
		if p.listening {
			w.notes = append(w.notes, &mail{note: n, to: p, sentAt: w.now})
		}
	}
}

func (w *world) boot(p *process) {
	p.life++
	p.claim, p.calls, p.closed = New(w.config(p)), nil, false
	p.dead, p.last = map[string]bool{}, ""
}

func (w *world) config(p *process) Config {
	return Config{
		Generation: func() string {
			p.gens++
			return fmt.Sprintf("%d.%d.%d", p.id, p.life, p.gens)
		},
		Jitter: func() float64 { return 0.5 },
		Budget: 5 * time.Second,
	}
}

func (w *world) logf(format string, args ...any) {
	if w.tracing {
		w.trace = append(w.trace, fmt.Sprintf("%12v  ", w.now)+fmt.Sprintf(format, args...))
	}
}

func (w *world) breakf(format string, args ...any) {
	if w.broken == "" {
		w.broken = fmt.Sprintf(format, args...)
		w.logf("BROKEN: %s", w.broken)
	}
}

// event runs one event of a process's claim and what it asks for.
func (w *world) event(p *process, f func(*Claim)) {
	f(p.claim)
	w.perform(p)
	if w.mutant.after != nil {
		w.mutant.after(w, p)
	}
	w.check(p)
}

func (w *world) perform(p *process) {
	sent := 0
	for _, a := range p.claim.Actions() {
		switch a.Kind {
		case Send:
			sent++
			w.send(p, a.Cmd)
		case RenewFailed:
			w.logf("p%d renewal failed", p.id)
		default:
			w.tellCall(p, a)
		}
	}
	if sent > 1 {
		w.breakf("p%d sent %d commands in one event", p.id, sent)
	}
}

func (w *world) send(p *process, cmd *Command) {
	if w.tracing {
		w.logf("p%d sends %s", p.id, cmdString(cmd))
	}
	c := p.claim
	switch {
	case c.flight != cmd:
		w.breakf("p%d sent a command that is not the one in flight", p.id)
	case p.dead[cmd.Ask], cmd.Verb == Renew && p.dead[cmd.End]:
		w.breakf("p%d sent a command for a dead generation: %s", p.id, cmdString(cmd))
	case cmd.Verb == Release && c.gen != nil && c.gen.token == cmd.End:
		w.breakf("p%d releases its current generation", p.id)
	}
	if w.mutant.command != nil {
		w.mutant.command(cmd)
	}
	w.wires = append(w.wires, &wire{p: p, c: c, cmd: cmd, sentAt: w.now})
}

// tellCall brings a call its verdict, and checks that it is one that the contract allows.
func (w *world) tellCall(p *process, a Action) {
	i := slices.IndexFunc(p.calls, func(c *call) bool { return c.req == a.Req })
	if i < 0 {
		w.breakf("p%d: action %d for a call that is over", p.id, a.Kind)
		return
	}
	c := p.calls[i]
	if w.tracing {
		w.logf("p%d %s", p.id, actionString(a))
	}
	expect := map[ActionKind]callState{Grant: waits, Refuse: waits, Fail: waits, Lose: uses, Confirm: unlocks}[a.Kind]
	if c.state != expect {
		w.breakf("p%d: action %d for a call in state %d", p.id, a.Kind, c.state)
	}
	switch a.Kind {
	case Grant:
		c.state, c.returned = uses, a.NotBefore
		w.granted(p, a)
		return
	case Lose:
		c.lost = true
		return
	case Confirm:
		if !c.valid && a.Outcome != Lost {
			w.breakf("p%d: a release after the end of the validity was confirmed with %d", p.id, a.Outcome)
		}
	case Refuse:
		if !c.req.Try {
			w.breakf("p%d: a Lock was refused", p.id)
		}
	case Fail:
		early := w.now < c.req.since+p.claim.cfg.Budget
		if a.Outcome == Unavailable && (a.Err == nil || !c.req.Try && early) {
			w.breakf("p%d: failed too early, or without a cause: %v", p.id, a.Err)
		}
	case Send, RenewFailed:
	}
	p.calls = slices.Delete(p.calls, i, i+1)
}

func (w *world) granted(p *process, a Action) {
	if w.fences[a.Fence] && (!w.flushed || w.step >= 0) {
		w.breakf("p%d: fence %d was given twice", p.id, a.Fence)
	}
	w.fences[a.Fence] = true
	if !w.leapt && a.Fence <= w.fence {
		w.breakf("p%d: fence %d after %d", p.id, a.Fence, w.fence)
	}
	w.fence = max(w.fence, a.Fence)
	for _, q := range w.procs {
		if q != p && w.valid(q) > 0 && !w.leapt {
			w.breakf("p%d was granted while p%d holds", p.id, q.id)
		}
	}
}

// valid returns for how long p's user believes to hold from now on.
func (w *world) valid(p *process) time.Duration {
	c := p.claim
	if c.user == nil || c.user.lost || c.gen == nil {
		return 0
	}
	return max(0, c.gen.validUntil-w.now)
}

// check holds p, and whoever holds, to the invariants.
func (w *world) check(p *process) {
	c := p.claim
	token := ""
	if c.gen != nil {
		token = c.gen.token
	}
	if p.last != "" && p.last != token {
		p.dead[p.last] = true
	}
	p.last = token
	if p.dead[token] {
		w.breakf("p%d: generation %s rose from the dead", p.id, token)
	}
	if u := c.user; u != nil && !u.lost && (c.gen == nil || c.gen.phase != held) {
		w.breakf("p%d has a user without a hold", p.id)
	}
	if u := c.user; u != nil && u.lost && c.gen != nil {
		w.breakf("p%d asks while a lost user is there", p.id)
	}
	if c.gen != nil && c.gen.phase != held && c.head == nil {
		w.breakf("p%d asks for nobody", p.id)
	}
	if _, ok := c.Next(); !ok && (c.head != nil && c.user == nil || c.user != nil && !c.user.lost || len(c.ends) > 0 || c.flight != nil) {
		w.breakf("p%d sleeps for ever", p.id)
	}
	if len(c.ends) > manyEnds+3 {
		w.breakf("p%d has %d endings", p.id, len(c.ends))
	}
	for _, q := range w.procs {
		left := w.valid(q)
		if left == 0 || w.leapt {
			continue
		}
		there := time.Duration(float64(w.srv.remains(q.claim.gen.token)) / (1 + w.rate))
		if left > there {
			w.breakf("p%d believes to hold for %v, the server says %v", q.id, left, there)
		}
	}
}

// fail prints a broken world.
func (w *world) fail(t testing.TB, title string) {
	t.Helper()
	t.Fatalf("%s: %s\n%s", title, w.broken, strings.Join(w.trace, "\n"))
}

func cmdString(c *Command) string {
	s := []string{"?", "acquire", "renew", "release"}[c.Verb] + " end=" + c.End + " ask=" + c.Ask
	return fmt.Sprintf("%s wait=%v repeated=%v tombstone=%v", s, c.Wait, c.Repeated, c.Tombstone)
}

func actionString(a Action) string {
	kind := []string{"?", "send", "grant", "refuse", "fail", "lose", "confirm", "renewfailed"}[a.Kind]
	return fmt.Sprintf("%s %v fence=%d via=%d outcome=%d reason=%d err=%v", kind, a.Req.Tag, a.Fence, a.Via, a.Outcome, a.Reason, a.Err)
}

func answerString(r Reply) string {
	return fmt.Sprintf("class=%d end=%+v ask=%+v", r.Class, r.End, r.Ask)
}
