package sim

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/e51fe0e6/dsync/dsync"
)

// near is what a few messages take in these tests, with room.
const near = 10 * time.Millisecond

// scene is a world in which a test plays, with processes that all use one client library.
type scene struct {
	*World
	kind string
}

// play runs a test with each client library, in a bubble of its own. latency is that of the network.
func play(t *testing.T, latency time.Duration, test func(s *scene)) {
	t.Helper()
	for _, kind := range []string{GoRedis, Rueidis} {
		t.Run(kind, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := &scene{NewWorld(t, 1, latency), kind}
				test(s)
				s.Finish(3 * time.Hour) // the fence is kept for a ttl after the longest lease
			})
		})
	}
}

// process starts a process whose subscription is confirmed.
func (s *scene) process(opts ...dsync.ClientOption) *Process {
	p := s.Process(s.kind, 1, opts...)
	mu := dsync.NewMutex(p.Client, "warm", dsync.WithTTL(time.Second))
	s.must(mu.Lock(p.Context()))
	s.must(mu.Unlock(p.Context()))
	s.pass(100 * time.Millisecond)
	// A second time, so that the echo has come back: only then does the server trust the subscription of a waiter.
	s.must(mu.Lock(p.Context()))
	s.must(mu.Unlock(p.Context()))
	s.pass(100 * time.Millisecond)
	return p
}

// pass lets time pass.
func (s *scene) pass(d time.Duration) { <-time.After(d) }

// check notes a broken promise unless ok.
func (s *scene) check(ok bool, format string, args ...any) {
	if !ok {
		s.Errorf("", time.Now(), format, args...)
	}
}

func (s *scene) must(err error) { s.check(err == nil, "%v", err) }

// within checks how much time passed between two moments.
func (s *scene) within(what string, from, to time.Time, least, most time.Duration) {
	took := to.Sub(from)
	s.check(!to.IsZero() && took >= least && took <= most, "%s took %v, want %v to %v", what, took, least, most)
}

// waiter is a call of Lock in a goroutine.
type waiter struct {
	mu   *dsync.Mutex
	done chan struct{}
	at   time.Time // written before done is closed
	err  error
}

func lock(ctx context.Context, mu *dsync.Mutex) *waiter {
	w := &waiter{mu: mu, done: make(chan struct{})}
	go func() { // ends with ctx
		w.err = mu.Lock(ctx)
		w.at = time.Now()
		close(w.done)
	}()
	return w
}

// over reports whether the call has returned.
func (w *waiter) over() bool {
	select {
	case <-w.done:
		return true
	default:
		return false
	}
}

// waits starts a Lock that has to wait, and returns when it is in the queue.
func (s *scene) waits(p *Process, opts ...dsync.Option) *waiter {
	w := lock(p.Context(), dsync.NewMutex(p.Client, "x", opts...))
	s.pass(100 * time.Millisecond)
	s.check(!w.over(), "the waiter of %s is served already", p.Name)
	return w
}

// served waits until the waiter has the lock.
func (s *scene) served(w *waiter) time.Time {
	select {
	case <-w.done:
		s.must(w.err)
		return w.at
	case <-time.After(5 * time.Minute):
		s.check(false, "not served")
		return time.Time{}
	}
}

// holds has a process hold the lock.
func (s *scene) holds(p *Process, opts ...dsync.Option) *dsync.Mutex {
	mu := dsync.NewMutex(p.Client, "x", opts...)
	s.must(mu.Lock(p.Context()))
	return mu
}

func (s *scene) unlock(p *Process, mu *dsync.Mutex) { s.must(mu.Unlock(p.Context())) }

// lostAt waits for the loss of a hold.
func (s *scene) lostAt(mu *dsync.Mutex) time.Time {
	select {
	case <-mu.Lost():
		return time.Now()
	case <-time.After(time.Minute):
		s.check(false, "not lost")
		return time.Time{}
	}
}

func TestSimHandOverByMessageTakesNoTimeOfItsOwn(t *testing.T) {
	play(t, 0, func(s *scene) {
		p1, p2, p3 := s.process(), s.process(), s.process()
		mu := s.holds(p1, dsync.WithTTL(time.Hour))
		w2 := s.waits(p2, dsync.WithTTL(time.Hour))
		w3 := s.waits(p3, dsync.WithTTL(time.Hour))
		began, sent := time.Now(), p2.Sent()
		s.unlock(p1, mu)
		s.within("the hand-over", began, s.served(w2), 0, 0)
		s.check(p2.Sent() == sent, "%d commands for a grant by message", p2.Sent()-sent)
		s.unlock(p2, w2.mu)
		s.within("the next hand-over", began, s.served(w3), 0, 0)
		s.unlock(p3, w3.mu)
	})
}

func TestSimDroppedGrantIsFoundByRecheck(t *testing.T) {
	for _, c := range []struct{ ttl, most time.Duration }{
		{600 * time.Millisecond, 200 * time.Millisecond},
		{time.Minute, 3 * time.Second},
	} {
		t.Run(c.ttl.String(), func(t *testing.T) {
			play(t, time.Millisecond, func(s *scene) {
				p1, p2 := s.process(), s.process()
				for range 5 {
					mu := s.holds(p1, dsync.WithTTL(c.ttl))
					w := s.waits(p2, dsync.WithTTL(c.ttl))
					p2.Link.Drop(func(string) bool { return true })
					began := time.Now()
					s.unlock(p1, mu)
					s.within("the hand-over", began, s.served(w), 0, c.most+near)
					p2.Link.Drop(nil)
					s.unlock(p2, w.mu)
				}
			})
		})
	}
}

func TestSimDeadHolderCostsItsLease(t *testing.T) {
	for _, silent := range []bool{false, true} {
		t.Run(map[bool]string{false: "seen", true: "silent"}[silent], func(t *testing.T) {
			play(t, time.Millisecond, func(s *scene) {
				p1, p2 := s.process(), s.process()
				s.holds(p1, dsync.WithTTL(10*time.Second))
				w := s.waits(p2, dsync.WithTTL(time.Minute))
				s.pass(4 * time.Second) // a renewal
				began := time.Now()
				p1.Crash(0, silent)
				s.within("the hand-over", began, s.served(w), 0, 10*time.Second+near)
				s.unlock(p2, w.mu)
			})
		})
	}
}

func TestSimDeadHeadWaiterIsPassedOver(t *testing.T) {
	play(t, time.Millisecond, func(s *scene) {
		p1, p2, p3 := s.process(), s.process(), s.process()
		mu := s.holds(p1)
		s.waits(p2)
		w3 := s.waits(p3)
		p2.Crash(0, false)
		s.pass(100 * time.Millisecond)
		began := time.Now()
		s.unlock(p1, mu)
		s.within("the hand-over", began, s.served(w3), 0, near)
		s.unlock(p3, w3.mu)
	})
}

func TestSimDeadHeadWaiterThatIsNotSeenCostsItsLeaseOnce(t *testing.T) {
	play(t, time.Millisecond, func(s *scene) {
		p1, p2, p3, p4 := s.process(), s.process(), s.process(), s.process()
		mu := s.holds(p1)
		s.waits(p2, dsync.WithTTL(2*time.Second))
		s.waits(p3, dsync.WithTTL(2*time.Second))
		w4 := s.waits(p4)
		p2.Crash(0, true)
		p3.Crash(0, true)
		began := time.Now()
		s.unlock(p1, mu)
		// The places of both are over 2 s later; two leases at worst, however many froze together.
		s.within("the hand-over", began, s.served(w4), 0, 4*time.Second+near)
		s.unlock(p4, w4.mu)
	})
}

func TestSimDeadHolderAndDeadHeadWaiter(t *testing.T) {
	play(t, time.Millisecond, func(s *scene) {
		p1, p2, p3 := s.process(), s.process(), s.process()
		s.holds(p1, dsync.WithTTL(5*time.Second))
		s.waits(p2, dsync.WithTTL(5*time.Second))
		w3 := s.waits(p3)
		began := time.Now()
		p1.Crash(0, false)
		p2.Crash(0, false)
		s.within("the hand-over", began, s.served(w3), 0, 5*time.Second+near)
		s.unlock(p3, w3.mu)
	})
}

func TestSimHolderKnowsOfTheLossBeforeTheNextIsGranted(t *testing.T) {
	for name, fault := range map[string]func(p *Process){
		"silence":      func(p *Process) { p.Link.Hold(time.Minute, Up, Down) },
		"lost-renewal": func(p *Process) { p.Link.Hold(time.Minute, Up) },
		"lost-reply":   func(p *Process) { p.Link.Hold(time.Minute, Down) },
		"no-dials":     func(p *Process) { p.Link.Refuse(true); p.Link.Cut(0, Commands, Subscription) },
	} {
		t.Run(name, func(t *testing.T) {
			play(t, time.Millisecond, func(s *scene) {
				// The holder's clock is slow, by less than the margin allows for.
				p1, p2 := s.Process(s.kind, 0.992), s.process()
				mu := s.holds(p1, dsync.WithTTL(3*time.Second))
				w := s.waits(p2)
				s.pass(time.Second + 30*time.Millisecond)
				began := time.Now()
				fault(p1)
				lost := s.lostAt(mu)
				s.check(!w.over(), "granted to the next before the holder knew")
				s.within("the loss", began, lost, 0, 4*time.Second)
				s.within("the grant after the loss", lost, s.served(w), 1, 4*time.Second)
				p1.Link.Heal()
				err := mu.Unlock(p1.Context())
				s.check(errors.Is(err, dsync.ErrLost), "Unlock after the loss: %v", err)
				s.unlock(p2, w.mu)
			})
		})
	}
}

func TestSimPausedHolderKnowsOfTheLossWhenItRuns(t *testing.T) {
	play(t, time.Millisecond, func(s *scene) {
		p1, p2 := s.process(), s.process()
		mu := s.holds(p1, dsync.WithTTL(3*time.Second))
		fence := mu.Fence()
		w := s.waits(p2)
		began := time.Now()
		p1.Pause(10 * time.Second)
		s.within("the grant", began, s.served(w), 0, 3*time.Second+near)
		s.check(w.mu.Fence() > fence, "fence %d after %d", w.mu.Fence(), fence)
		lost := s.lostAt(mu)
		s.within("the loss", began.Add(10*time.Second), lost, 0, 0)
		s.check(mu.Remaining() == 0, "%v remain of a lost hold", mu.Remaining())
		err := mu.Unlock(p1.Context())
		s.check(errors.Is(err, dsync.ErrLost), "Unlock after the loss: %v", err)
		select {
		case <-w.mu.Lost():
			s.check(false, "the late holder took the lock from the next")
		default:
		}
		s.unlock(p2, w.mu)
	})
}

func TestSimFlushAllWhileSomebodyHoldsAndSomebodyWaits(t *testing.T) {
	play(t, time.Millisecond, func(s *scene) {
		p1, p2 := s.process(), s.process()
		mu := s.holds(p1, dsync.WithTTL(3*time.Second))
		fence := mu.Fence()
		w := s.waits(p2, dsync.WithTTL(3*time.Second))
		began := time.Now()
		s.Redis.FlushAll()
		told := make(chan time.Time, 1)
		go func() { told <- s.lostAt(mu) }()
		s.within("the grant", began, s.served(w), 0, time.Second+near)
		s.within("the loss", began, <-told, 0, time.Second+near) // the next renewal
		s.check(w.mu.Fence() > fence, "fence %d after %d", w.mu.Fence(), fence)
		err := mu.Unlock(p1.Context())
		s.check(errors.Is(err, dsync.ErrLost), "Unlock after the loss: %v", err)
		s.unlock(p2, w.mu)
	})
}

func TestSimWaiterAsksAgainWhenItsSubscriptionIsBack(t *testing.T) {
	play(t, time.Millisecond, func(s *scene) {
		p1, p2 := s.process(), s.process()
		mu := s.holds(p1, dsync.WithTTL(time.Hour))
		w := s.waits(p2, dsync.WithTTL(time.Hour)) // asks again each 3 s
		s.pass(100 * time.Millisecond)
		began := time.Now()
		p2.Link.Cut(0, Subscription)
		s.unlock(p1, mu) // nobody hears it, or it is passed over and stays in its place
		s.within("the hand-over", began, s.served(w), 0, 100*time.Millisecond)
		s.unlock(p2, w.mu)
		// The subscription works again.
		mu = s.holds(p1, dsync.WithTTL(time.Hour))
		w = s.waits(p2, dsync.WithTTL(time.Hour))
		began = time.Now()
		s.unlock(p1, mu)
		s.within("the hand-over by message", began, s.served(w), 0, near)
		s.unlock(p2, w.mu)
	})
}

func TestSimSilentSubscriptionIsReplaced(t *testing.T) {
	play(t, time.Millisecond, func(s *scene) {
		p1, p2 := s.process(), s.process()
		mu := s.holds(p1, dsync.WithTTL(time.Hour))
		p2.Link.HoldConns(forever, Subscription, Down) // the present one only; no error ever comes
		w := s.waits(p2, dsync.WithTTL(time.Hour))
		s.pass(20 * time.Second) // it hears nothing, asks for an echo, misses it, dials again
		began := time.Now()
		s.unlock(p1, mu)
		s.within("the hand-over", began, s.served(w), 0, near)
		s.unlock(p2, w.mu)
	})
}

func TestSimFirstLockWhileTheSubscriptionHangs(t *testing.T) {
	play(t, time.Millisecond, func(s *scene) {
		p1 := s.process()
		// It is free: no wait at all.
		p2 := s.Process(s.kind, 1)
		p2.Link.HoldKind(forever, Subscription, Up)
		began := time.Now()
		mu := s.holds(p2)
		s.within("the first Lock of a free lock", began, time.Now(), 0, near)
		s.unlock(p2, mu)

		// It becomes free within the second in which the subscription is waited for: no later than after that.
		p3 := s.Process(s.kind, 1)
		p3.Link.HoldKind(forever, Subscription, Up)
		mu = s.holds(p1)
		began = time.Now()
		w := s.waits(p3)
		s.pass(400 * time.Millisecond)
		s.unlock(p1, mu)
		s.within("the wait for the subscription", began, s.served(w), 0, time.Second+near)
		s.unlock(p3, w.mu)

		// It becomes free later: the re-check finds the grant.
		p4 := s.Process(s.kind, 1)
		p4.Link.HoldKind(forever, Subscription, Up)
		mu = s.holds(p1)
		w = s.waits(p4)
		s.pass(1500 * time.Millisecond)
		began = time.Now()
		s.unlock(p1, mu)
		s.within("the re-check", began, s.served(w), 0, 3*time.Second+near)
		s.unlock(p4, w.mu)
	})
}

func TestSimLateNewsLeavesLessOfTheLease(t *testing.T) {
	const ttl, late = 3 * time.Second, 700 * time.Millisecond
	for name, granted := range map[string]func(s *scene, p1 *Process) *dsync.Mutex{
		"acquired": func(s *scene, p1 *Process) *dsync.Mutex {
			p1.Link.HoldConns(late, Commands, Down)
			return s.holds(p1, dsync.WithTTL(ttl), dsync.WithoutRenewal())
		},
		"granted": func(s *scene, p1 *Process) *dsync.Mutex {
			p0 := s.process()
			mu := s.holds(p0, dsync.WithTTL(time.Minute))
			w := s.waits(p1, dsync.WithTTL(ttl), dsync.WithoutRenewal())
			p1.Link.HoldConns(late, Subscription, Down)
			s.unlock(p0, mu)
			s.served(w)
			return w.mu
		},
		"renewed": func(s *scene, p1 *Process) *dsync.Mutex {
			mu := s.holds(p1, dsync.WithTTL(ttl))
			s.pass(ttl/3 - 120*time.Millisecond) // renewals are due on a grid of a tenth
			p1.Link.HoldConns(late, Commands, Down)
			s.pass(late + near)
			p1.Link.HoldConns(forever, Commands, Up)
			p1.Link.HoldKind(forever, Commands, Up) // no more renewals
			return mu
		},
	} {
		t.Run(name, func(t *testing.T) {
			play(t, time.Millisecond, func(s *scene) {
				p1, p2 := s.process(), s.process()
				mu := granted(s, p1)
				left := mu.Remaining()
				s.check(left > time.Second && left < ttl-late+150*time.Millisecond, "%v are left of %v when the news is %v late", left, ttl, late)
				w := s.waits(p2)
				lost := s.lostAt(mu)
				s.check(!w.over(), "granted to the next before the holder knew")
				s.within("the grant after the loss", lost, s.served(w), 1, 100*time.Millisecond)
				p1.Link.Heal()
				_ = mu.Unlock(p1.Context()) // its errors have tests of their own
				s.unlock(p2, w.mu)
			})
		})
	}
}

func TestSimHintThatCameBeforeTheSubscriptionIsNotMissed(t *testing.T) {
	play(t, time.Millisecond, func(s *scene) {
		p1, p2 := s.Process(s.kind, 1), s.process()
		p1.Link.HoldKind(50*time.Millisecond, Subscription, Up)
		mu := s.holds(p1, dsync.WithTTL(time.Minute), dsync.WithSlice(0))
		w := lock(p2.Context(), dsync.NewMutex(p2.Client, "x", dsync.WithTTL(time.Minute), dsync.WithSlice(0)))
		s.pass(100 * time.Millisecond) // the hint was published before p1 was subscribed
		local := s.waits(p1, dsync.WithTTL(time.Minute), dsync.WithSlice(0))
		s.unlock(p1, mu)
		s.served(w)
		s.check(!local.over(), "the local waiter overtook the other process, which came first")
		s.unlock(p2, w.mu)
		s.served(local)
		s.unlock(p1, local.mu)
	})
}
