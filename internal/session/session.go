// Package session is the shell around package claim: one Session for each client. It carries out what claims ask for (commands,
// timers, waking local callers) and brings them what happens. It decides nothing about locks.
//
// # Goroutines
//
// A held or waiting name has no goroutine of its own. There is one for each command in flight, one for the subscription
// while it is in use, and one for as long as a runtime timer's function runs.
//
// # Locks
//
// Each name in use has an entry with a lock; a claim is only touched under it. Order: entry.mu, then Session.mu, hub.mu or timers.mu,
// of which none is taken under another. No command is sent and no function of a user is called under any of them.
package session

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"log/slog"
	mrand "math/rand/v2"
	"sync"
	"time"

	"github.com/e51fe0e6/dsync/driver"
	"github.com/e51fe0e6/dsync/internal/claim"
	"github.com/e51fe0e6/dsync/internal/keys"
)

// closeGrace bounds how long Close, whose ctx has ended, waits for the answers to the releases that it sent itself.
const closeGrace = 100 * time.Millisecond

// batch is how many commands that fall due together go out in one write: more would hold up the server.
const batch = 128

// Config is what a session is made of. Driver is required.
type Config struct {
	Driver  driver.Driver
	Prefix  string
	Budget  time.Duration
	Clock   Clock
	Jitter  func() float64 // in [0, 1)
	Logger  *slog.Logger
	Observe func(Event) // called for what happens to holds, if not nil; must not block
}

// Event is something that an observer is told. Key is the key in Redis.
type Event struct {
	Kind   EventKind
	Key    string
	Hold   *Hold
	Via    claim.Via     // Acquired
	Wait   time.Duration // Acquired: since the call
	Held   time.Duration // Released, WasLost: since the grant
	Reason claim.Reason  // WasLost
	Err    error         // Released, RenewalFailed, WasLost: the last failure, if there is one
}

// EventKind says what an [Event] is.
type EventKind int

// Kinds of events.
const (
	Acquired EventKind = iota + 1
	Released
	WasLost
	RenewalFailed
)

// Session speaks to Redis for all claims of one client.
type Session struct {
	cfg      Config
	id       string // 128 random bits
	channels string // prefix of channels
	watch    *stopwatch
	timers   timers
	hub      hub
	ctx      context.Context //nolint:containedctx // of everything that outlives its caller; canceled by Close
	cancel   context.CancelFunc
	detached context.Context //nolint:containedctx // of commands: never canceled, so that a driver may run them in place

	mu      sync.Mutex // guards what follows
	entries map[string]*entry
	closing bool
	drained chan struct{} // closed when closing and no entry is left
	closed  chan struct{} // closed when Close is done
	done    bool          // nothing is sent any more
}

// entry is a name in use, from the first local demand until its claim is idle.
type entry struct {
	s      *Session
	key    string
	script *driver.Script

	mu    sync.Mutex // guards what follows
	claim *claim.Claim
	hold  *Hold // who holds here, lost or not
	dead  bool  // it is no longer in Session.entries
	sends []*claim.Command
	after []func() // what is to be done when mu is released
	// settled is made by Close, and closed when nothing is left to be ended in Redis.
	settled chan struct{}

	alarm   int           // index in timers.heap, -1: not there; guarded by timers.mu
	alarmAt time.Duration // guarded by timers.mu
}

// New returns a session. Nothing is sent, and nothing is started, before it is used.
func New(cfg Config) *Session {
	if sim, ok := cfg.Driver.(Simulated); ok {
		cfg.Clock, cfg.Jitter = sim.Clock(), sim.Float64
	}
	if cfg.Clock == nil {
		cfg.Clock = SystemClock{}
	}
	if cfg.Jitter == nil {
		cfg.Jitter = mrand.Float64
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	s := &Session{
		cfg:      cfg,
		id:       random(16),
		channels: keys.Channels(cfg.Prefix),
		watch:    newStopwatch(cfg.Clock),
		entries:  map[string]*entry{},
		drained:  make(chan struct{}),
		closed:   make(chan struct{}),
	}
	s.ctx, s.cancel = context.WithCancel(context.Background()) //nolint:forbidigo // there is no caller to take one from
	s.detached = context.WithoutCancel(s.ctx)
	s.timers.s = s
	s.hub.init(s)
	return s
}

// ID returns the client id, the first part of its tokens and the last of its channel.
func (s *Session) ID() string { return s.id }

// random returns n random bytes as text without colon or space.
func random(n int) string {
	b := make([]byte, n)
	_, _ = rand.Read(b) // never fails, as of Go 1.24
	return base64.RawURLEncoding.EncodeToString(b)
}

// locked returns the entry of a key, locked. With a claim that became idle meanwhile its entry is dead, and a new one is made.
func (s *Session) locked(key string, script *driver.Script) (*entry, error) {
	for {
		s.mu.Lock()
		if s.closing {
			s.mu.Unlock()
			return nil, ErrClosed
		}
		e := s.entries[key]
		if e == nil {
			e = &entry{s: s, key: key, script: script, alarm: -1, claim: claim.New(claim.Config{
				Generation: func() string { return random(8) },
				Jitter:     s.cfg.Jitter,
				Budget:     s.cfg.Budget,
			})}
			s.entries[key] = e
		}
		s.mu.Unlock()
		e.mu.Lock()
		if !e.dead {
			return e, nil
		}
		e.mu.Unlock()
	}
}

// Closed reports whether Close was called.
func (s *Session) Closed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closing
}

// lookup returns the entry of a key in use, or nil.
func (s *Session) lookup(key string) *entry {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.entries[key]
}

// snapshot returns all entries.
func (s *Session) snapshot() []*entry {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make([]*entry, 0, len(s.entries))
	for _, e := range s.entries {
		all = append(all, e)
	}
	return all
}

// step runs one event and sends what comes of it.
func (e *entry) step(event func(c *claim.Claim, now time.Duration)) {
	e.mu.Lock()
	e.applyLocked(event)
	e.unlockAndSend()
}

// applyLocked runs one event and takes in its actions, but sends nothing yet.
func (e *entry) applyLocked(event func(c *claim.Claim, now time.Duration)) {
	now := e.s.watch.now()
	event(e.claim, now)
	for _, a := range e.claim.Actions() {
		e.performLocked(now, a)
	}
	at, on := e.claim.Next()
	e.s.timers.set(e, now, at, on)
	if e.settled != nil && !e.claim.Pending() {
		close(e.settled)
		e.settled = nil
	}
	if e.claim.Idle() && !e.dead {
		e.dead = true
		e.s.forget(e)
	}
}

// unlockAndSend releases mu and sends what came up, each command by a goroutine of its own.
func (e *entry) unlockAndSend() {
	for _, cmd := range e.unlock() {
		go e.exec(cmd) // ends with the driver's Exec
	}
}

// unlock releases mu, does what had to wait for it, and returns what is to be sent.
func (e *entry) unlock() []*claim.Command {
	sends, after := e.sends, e.after
	e.sends, e.after = nil, nil
	e.mu.Unlock()
	for _, f := range after {
		f()
	}
	return sends
}

func (e *entry) performLocked(now time.Duration, a claim.Action) {
	var h *Hold
	if a.Req != nil {
		h = a.Req.Tag.(*Hold) //nolint:forcetypeassert // every request is a Hold's
	}
	switch a.Kind {
	case claim.Send:
		e.sends = append(e.sends, a.Cmd)
	case claim.Grant:
		e.hold = h
		h.decideLocked(verdict{ok: true, fence: a.Fence, notBefore: a.NotBefore})
		e.observe(Event{Kind: Acquired, Hold: h, Via: a.Via, Wait: now - a.Req.Since()})
	case claim.Refuse:
		h.decideLocked(verdict{retryAfter: a.RetryAfter})
	case claim.Fail:
		h.decideLocked(verdict{err: failure(a)})
	case claim.Lose:
		h.loseLocked()
		e.observe(Event{Kind: WasLost, Hold: h, Reason: a.Reason, Err: a.Err, Held: now - a.Req.HeldAt()})
	case claim.Confirm:
		if e.hold == h {
			e.hold = nil
		}
		err := confirmation(a)
		h.releasedLocked(err)
		e.observe(Event{Kind: Released, Hold: h, Err: err, Held: h.endedAt - a.Req.HeldAt()})
	case claim.RenewFailed:
		e.observe(Event{Kind: RenewalFailed, Hold: h, Err: a.Err})
	}
}

func (e *entry) observe(ev Event) {
	if e.s.cfg.Observe == nil {
		return
	}
	ev.Key = e.key
	e.after = append(e.after, func() { e.s.cfg.Observe(ev) })
}

// exec sends one command and brings its claim the answer.
func (e *entry) exec(cmd *claim.Command) {
	s := e.s
	if s.over() {
		return
	}
	dc, nonce := s.prepare(e, cmd)
	r, err := s.cfg.Driver.Exec(s.detached, dc)
	e.take(cmd, nonce, r, err)
}

// all runs an event on many entries and sends what comes of it with few writes. A batch is answered when its slowest command
// is, so what has met silence or a failure goes alone: on a cluster, one dead node would hold up the names of all.
func (s *Session) all(entries []*entry, event func(e *entry)) {
	type due struct {
		e   *entry
		cmd *claim.Command
	}
	var sends []due
	for _, e := range entries {
		e.mu.Lock()
		event(e)
		alone := e.claim.Outage(s.watch.now()) != nil
		for _, cmd := range e.unlock() {
			if alone {
				go e.exec(cmd) // ends with the driver's Exec
				continue
			}
			sends = append(sends, due{e, cmd})
		}
	}
	if len(sends) == 1 {
		go sends[0].e.exec(sends[0].cmd) // ends with the driver's Exec
		return
	}
	for len(sends) > 0 {
		n := min(len(sends), batch)
		part := sends[:n:n]
		sends = sends[n:]
		go func() { // ends with the driver's ExecMulti
			if s.over() {
				return
			}
			cmds, nonces := make([]driver.Cmd, n), make([]string, n)
			for i, d := range part {
				cmds[i], nonces[i] = s.prepare(d.e, d.cmd)
			}
			for i, res := range s.cfg.Driver.ExecMulti(s.detached, cmds) {
				part[i].e.take(part[i].cmd, nonces[i], res.Reply, res.Err)
			}
		}()
	}
}

// tick is the event of an alarm.
func (e *entry) tick() { e.applyLocked((*claim.Claim).Tick) }

func (s *Session) prepare(e *entry, cmd *claim.Command) (dc driver.Cmd, nonce string) {
	passable := false
	if cmd.Ask != "" {
		nonce, passable = s.hub.mark(cmd.Wait)
	}
	return s.encode(e, cmd, nonce, passable), nonce
}

func (e *entry) take(cmd *claim.Command, nonce string, r driver.Reply, err error) {
	rep, flags := decode(cmd, r, err)
	if nonce != "" {
		e.s.hub.asked(nonce, flags)
	}
	e.step(func(c *claim.Claim, now time.Duration) { c.Reply(now, cmd, rep) })
}

func (s *Session) over() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.done
}

// forget removes an idle entry.
func (s *Session) forget(e *entry) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.entries[e.key] == e {
		delete(s.entries, e.key)
	}
	s.drainedLocked()
}

func (s *Session) drainedLocked() {
	if s.closing && len(s.entries) == 0 {
		select {
		case <-s.drained:
		default:
			close(s.drained)
		}
	}
}

// Close refuses new calls, wakes waiters with ErrClosed and interrupts running Do's, then waits for holds to be released until ctx ends.
// Holds left then are declared lost, and only then released: nobody else can be granted while a user here believes to hold.
// It returns how many there were. Another call waits for the first, or until its own ctx ends.
func (s *Session) Close(ctx context.Context) (forced int) {
	s.mu.Lock()
	if s.closing {
		s.mu.Unlock()
		select {
		case <-s.closed:
		case <-ctx.Done():
		}
		return 0
	}
	s.closing = true
	defer close(s.closed)
	s.drainedLocked()
	s.mu.Unlock()

	s.all(s.snapshot(), func(e *entry) {
		e.applyLocked((*claim.Claim).Close)
		if h := e.hold; h != nil {
			h.interruptLocked(ErrClosed)
		}
	})
	select {
	case <-s.drained:
	case <-ctx.Done():
		forced = s.force()
	}
	s.hub.close()
	s.timers.close()
	s.mu.Lock()
	s.done = true
	s.mu.Unlock()
	s.cancel()
	s.all(s.snapshot(), func(e *entry) { // whoever waits for an answer would wait for ever
		e.applyLocked(func(c *claim.Claim, _ time.Duration) { c.Shut() })
	})
	return forced
}

// force takes the holds away that are left, and waits for their releases within closeGrace.
func (s *Session) force() (forced int) {
	var settling []chan struct{}
	s.all(s.snapshot(), func(e *entry) {
		if h := e.hold; h != nil && !h.lost && !h.ended {
			forced++
		}
		settled := make(chan struct{})
		e.settled = settled
		settling = append(settling, settled)
		e.applyLocked((*claim.Claim).Force)
	})
	grace := make(chan struct{})
	stop := s.cfg.Clock.AfterFunc(closeGrace, func() { close(grace) })
	defer stop()
	for _, settled := range settling {
		select {
		case <-settled:
		case <-grace:
			return forced
		}
	}
	return forced
}
