package claim

import (
	"errors"
	"strconv"
	"testing"
	"time"
)

// script is one claim, led by the hand: events go in, and what is asked for in return must be read, all of it and in order, before the
// next event. Generations are "g1", "g2", …; requests have names.
type script struct {
	t     *testing.T
	c     *Claim
	now   Time
	gens  int
	reqs  map[string]*Request
	queue []Action
}

const (
	ttl    = 9 * time.Second
	rtt    = time.Millisecond
	budget = 30 * time.Second
	fence  = 1000
)

var errTest = errors.New("test")

// run returns the script of a claim whose subscription is confirmed.
func run(t *testing.T) *script {
	t.Helper()
	s := runDeaf(t)
	s.subscribe(Ready)
	return s
}

// runDeaf returns the script of a claim whose subscription is still being opened.
func runDeaf(t *testing.T) *script {
	t.Helper()
	s := &script{t: t, reqs: map[string]*Request{}, now: time.Hour}
	s.c = New(Config{
		Generation: func() string {
			s.gens++
			return "g" + strconv.Itoa(s.gens)
		},
		Jitter: func() float64 { return 1 },
		Budget: budget,
	})
	return s
}

// event runs one.
func (s *script) event(what string, f func()) *script {
	s.t.Helper()
	if len(s.queue) > 0 {
		s.t.Fatalf("before %s: nobody expected %+v", what, s.queue[0])
	}
	f()
	s.queue = append(s.queue, s.c.Actions()...)
	return s
}

// plain is what most requests are; the functions after it change one thing each.
func plain() Request { return Request{TTL: ttl, Renew: true, Slice: 5 * time.Millisecond} }

func try(r *Request)                           { r.Try = true }
func unrenewed(r *Request)                     { r.Renew = false }
func linger(r *Request)                        { r.Linger = time.Second }
func fifo(r *Request)                          { r.Slice = 0 }
func lease(d time.Duration) func(r *Request)   { return func(r *Request) { r.TTL = d } }
func maxHold(d time.Duration) func(r *Request) { return func(r *Request) { r.MaxHold = d } }

func (s *script) request(name string, with ...func(*Request)) *script {
	s.t.Helper()
	r := plain()
	for _, f := range with {
		f(&r)
	}
	r.Tag = name
	s.reqs[name] = &r
	return s.event("request "+name, func() { s.c.Request(s.now, &r) })
}

func (s *script) cancel(name string, want bool) *script {
	s.t.Helper()
	return s.event("cancel "+name, func() {
		if got := s.c.Cancel(s.now, s.reqs[name]); got != want {
			s.t.Fatalf("cancel %s: got %v, want %v", name, got, want)
		}
	})
}

func (s *script) release(name string) *script {
	s.t.Helper()
	return s.event("release "+name, func() { s.c.Release(s.now, s.reqs[name]) })
}

func (s *script) subscribe(sub Subscription) *script {
	s.t.Helper()
	return s.event("subscribe", func() { s.c.Subscribed(s.now, sub) })
}

// wait lets time go by, with the timers of that time late: one tick at its end.
func (s *script) wait(d time.Duration) *script {
	s.t.Helper()
	s.now += d
	return s.event("tick", func() { s.c.Tick(s.now) })
}

// late lets time go by and no timer fire.
func (s *script) late(d time.Duration) *script {
	s.now += d
	return s
}

// next goes to the next timer, which must be at d from now.
func (s *script) next(d time.Duration) *script {
	s.t.Helper()
	at, ok := s.c.Next()
	if !ok || at-s.now != d {
		s.t.Fatalf("next timer: got %v from now (%v), want %v", at-s.now, ok, d)
	}
	return s.wait(d)
}

func (s *script) reply(cmd *Command, r Reply) *script {
	s.t.Helper()
	return s.event("reply", func() { s.c.Reply(s.now, cmd, r) })
}

// says brings the answer to the asking, or only, half of a command after a round trip.
func (s *script) says(cmd *Command, a Answer) *script {
	s.t.Helper()
	s.late(rtt)
	if cmd.Ask == "" {
		return s.reply(cmd, Reply{End: a})
	}
	return s.reply(cmd, Reply{End: Answer{Status: Released}, Ask: a})
}

func (s *script) fails(cmd *Command, class Class) *script {
	s.t.Helper()
	return s.late(rtt).reply(cmd, Reply{Class: class, Err: errTest})
}

// message brings a grant; the server's clock is the claim's.
func (s *script) message(token string, fence int64, remaining, at time.Duration) *script {
	s.t.Helper()
	return s.event("message", func() { s.c.Granted(s.now, token, fence, remaining, at, false) })
}

func (s *script) hint(token string) *script {
	s.t.Helper()
	return s.event("hint", func() { s.c.Hint(s.now, token) })
}

// granted, queuedAt and so on are answers.
func granted(left time.Duration) Answer {
	return Answer{Status: Granted, Fence: fence, Remaining: left}
}

func (s *script) queuedAt(position int, left time.Duration) Answer {
	return Answer{Status: Queued, Fence: fence - 1, Remaining: left, Position: position, ServerTime: s.now, Waiting: true}
}

// sends reads a command.
func (s *script) sends(verb Verb, end, ask string) *Command {
	s.t.Helper()
	a := s.read(Send)
	if a.Cmd.Verb != verb || a.Cmd.End != end || a.Cmd.Ask != ask {
		s.t.Fatalf("sent %s, want verb %d, end %q, ask %q", cmdString(a.Cmd), verb, end, ask)
	}
	return a.Cmd
}

// read reads one action.
func (s *script) read(kind ActionKind) Action {
	s.t.Helper()
	if len(s.queue) == 0 {
		s.t.Fatalf("nothing was asked for, want action %d", kind)
	}
	a := s.queue[0]
	s.queue = s.queue[1:]
	if a.Kind != kind {
		s.t.Fatalf("got action %+v, want kind %d", a, kind)
	}
	return a
}

// tells reads an action that speaks of a request.
func (s *script) tells(kind ActionKind, name string) Action {
	s.t.Helper()
	a := s.read(kind)
	if a.Req != s.reqs[name] {
		s.t.Fatalf("action %d is for %v, want %s", kind, a.Req.Tag, name)
	}
	return a
}

func (s *script) grants(name string, via Via) *script {
	s.t.Helper()
	if a := s.tells(Grant, name); a.Via != via {
		s.t.Fatalf("granted via %d, want %d", a.Via, via)
	}
	return s
}

func (s *script) confirms(name string, want Outcome) *script {
	s.t.Helper()
	if a := s.tells(Confirm, name); a.Outcome != want {
		s.t.Fatalf("release of %s: outcome %d, want %d", name, a.Outcome, want)
	}
	return s
}

func (s *script) failed(name string, want Outcome) *script {
	s.t.Helper()
	if a := s.tells(Fail, name); a.Outcome != want || (a.Err == nil) != (want == Closed) {
		s.t.Fatalf("%s failed with outcome %d, %v; want %d", name, a.Outcome, a.Err, want)
	}
	return s
}

func (s *script) loses(name string, why Reason) *script {
	s.t.Helper()
	if a := s.tells(Lose, name); a.Reason != why {
		s.t.Fatalf("%s lost for reason %d, want %d", name, a.Reason, why)
	}
	return s
}

// done requires that nothing more was asked for.
func (s *script) done() *script {
	s.t.Helper()
	return s.event("done", func() {})
}

// idle requires that the claim may be forgotten.
func (s *script) idle() {
	s.t.Helper()
	s.done()
	if at, ok := s.c.Next(); !s.c.Idle() || ok {
		s.t.Fatalf("not idle: %+v, next %v", s.c, at)
	}
}

// holds has name hold by the generation "g1", with its whole ttl left.
func (s *script) holds(name string, with ...func(*Request)) *script {
	s.t.Helper()
	cmd := s.request(name, with...).sends(Acquire, "", "g1")
	return s.says(cmd, granted(cmd.TTL)).grants(name, ViaReply)
}

// waits has name wait as the first in the queue by the generation "g1", for a holder with its whole ttl left.
func (s *script) waits(name string, with ...func(*Request)) *script {
	s.t.Helper()
	cmd := s.request(name, with...).sends(Acquire, "", "g1")
	return s.says(cmd, s.queuedAt(1, cmd.TTL)).done()
}
