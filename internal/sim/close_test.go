package sim

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/e51fe0e6/dsync/dsync"
)

func TestSimCloseWakesWaitersAndWaitsForHolders(t *testing.T) {
	play(t, time.Millisecond, func(s *scene) {
		p1, p2, p3 := s.process(), s.process(), s.process()
		ended := make(chan time.Time, 1)
		release := make(chan struct{})
		done := make(chan error, 1)
		go func() {
			mu := dsync.NewMutex(p1.Client, "x")
			done <- mu.Do(p1.Context(), func(ctx context.Context) error {
				<-ctx.Done()
				s.check(errors.Is(context.Cause(ctx), dsync.ErrClosed), "the context of Do ended with %v", context.Cause(ctx))
				ended <- time.Now()
				<-release
				return nil
			})
		}()
		s.pass(100 * time.Millisecond)
		local := s.waits(p1)
		w2 := s.waits(p2)
		w3 := s.waits(p3)
		began := time.Now()
		closed := make(chan error, 1)
		go func() { closed <- p1.Close(10 * time.Second) }()
		<-local.done
		s.check(errors.Is(local.err, dsync.ErrClosed), "the waiter got %v", local.err)
		s.within("waking the waiter", began, local.at, 0, 0)
		s.within("the end of Do's context", began, <-ended, 0, 0)
		s.pass(2 * time.Second)
		s.check(!w2.over(), "granted under a running section")
		close(release)
		s.must(<-done)
		s.must(<-closed)
		s.within("Close and the hand-over", began, s.served(w2), 2*time.Second, 2*time.Second+near)
		began = time.Now()
		s.unlock(p2, w2.mu)
		s.within("the hand-over", began, s.served(w3), 0, near)
		s.unlock(p3, w3.mu)
	})
}

func TestSimCloseTakesHoldsAwayWhenItsContextEnds(t *testing.T) {
	play(t, time.Millisecond, func(s *scene) {
		p1, p2 := s.process(), s.process()
		mu := s.holds(p1)
		w := s.waits(p2)
		began := time.Now()
		lost := make(chan time.Time, 1)
		go func() { lost <- s.lostAt(mu) }()
		err := p1.Close(500 * time.Millisecond)
		s.check(err != nil, "Close said nil while a hold was left")
		at := <-lost
		s.within("the loss", began, at, 500*time.Millisecond, 500*time.Millisecond+near)
		s.within("the grant after the loss", at, s.served(w), 1, near)
		err = mu.Unlock(p1.Context())
		s.check(errors.Is(err, dsync.ErrLost), "Unlock after Close: %v", err)
		s.must(p1.Client.Close(s.ctx))
		err = mu.Lock(p1.Context())
		s.check(errors.Is(err, dsync.ErrClosed), "Lock after Close: %v", err)
		s.unlock(p2, w.mu)
	})
}

func TestSimCanceledWaiterLeavesNothing(t *testing.T) {
	play(t, time.Millisecond, func(s *scene) {
		p1, p2, p3 := s.process(), s.process(), s.process()
		mu := s.holds(p1)
		ctx, cancel := context.WithCancel(p2.Context())
		w2 := lock(ctx, dsync.NewMutex(p2.Client, "x"))
		s.pass(100 * time.Millisecond)
		w3 := s.waits(p3)
		began := time.Now()
		cancel()
		<-w2.done
		s.check(errors.Is(w2.err, context.Canceled), "the canceled Lock got %v", w2.err)
		s.within("the canceled Lock", began, w2.at, 0, 0)
		s.unlock(p1, mu) // crosses the withdrawal on its way
		s.within("the hand-over", began, s.served(w3), 0, near)
		s.unlock(p3, w3.mu)
	})
}

func TestSimLateAcquireTakesNothing(t *testing.T) {
	play(t, time.Millisecond, func(s *scene) {
		p1, p2 := s.process(), s.process()
		ctx, cancel := context.WithTimeout(p1.Context(), 50*time.Millisecond)
		defer cancel()
		p1.Link.HoldConns(5*time.Second, Commands, Up)
		w := lock(ctx, dsync.NewMutex(p1.Client, "x", dsync.WithTTL(time.Minute)))
		<-w.done
		s.check(errors.Is(w.err, context.DeadlineExceeded), "the Lock got %v", w.err)
		p1.Link.Cut(5*time.Second, Commands) // what was sent arrives after the withdrawal on a new connection
		s.pass(8 * time.Second)
		began := time.Now()
		mu := s.holds(p2)
		s.within("the Lock of another", began, time.Now(), 0, near)
		s.unlock(p2, mu)
	})
}

func TestSimLostReplyOfAnAcquireCostsNoLease(t *testing.T) {
	play(t, time.Millisecond, func(s *scene) {
		p1, p2 := s.process(), s.process()
		p1.Link.HoldConns(forever, Commands, Down)
		w := lock(p1.Context(), dsync.NewMutex(p1.Client, "x", dsync.WithTTL(time.Minute)))
		s.pass(20 * time.Millisecond)
		began := time.Now()
		p1.Link.Cut(0, Commands)
		s.within("finding the grant", began, s.served(w), 0, 100*time.Millisecond)
		got, err := dsync.NewMutex(p2.Client, "x").TryLock(p2.Context())
		s.check(!got && err == nil, "TryLock of another: %v, %v", got, err)
		s.unlock(p1, w.mu)
	})
}

func TestSimLostReplyOfAReleaseIsNoLoss(t *testing.T) {
	play(t, time.Millisecond, func(s *scene) {
		p1 := s.process()
		mu := s.holds(p1, dsync.WithTTL(time.Minute))
		p1.Link.HoldConns(forever, Commands, Down)
		cut := time.AfterFunc(20*time.Millisecond, func() { p1.Link.Cut(0, Commands) })
		defer cut.Stop()
		s.unlock(p1, mu)
	})
}

func TestSimLingeringLeaseIsGivenUpToAnother(t *testing.T) {
	play(t, time.Millisecond, func(s *scene) {
		// A process that only ever tries must hear hints all the same.
		p1, p2 := s.Process(s.kind, 1), s.process()
		mu := dsync.NewMutex(p1.Client, "x", dsync.WithLinger(time.Minute))
		got, err := mu.TryLock(p1.Context())
		s.check(got && err == nil, "TryLock: %v, %v", got, err)
		s.unlock(p1, mu)
		s.pass(time.Second)
		sent := p1.Sent()
		s.must(mu.Lock(p1.Context()))
		s.unlock(p1, mu)
		s.check(p1.Sent() == sent, "a lock that lingers cost a command")
		began := time.Now()
		mu2 := s.holds(p2)
		s.within("the Lock of another", began, time.Now(), 0, near)
		s.unlock(p2, mu2)
	})
}

func TestSimHoldsForHours(t *testing.T) {
	play(t, time.Millisecond, func(s *scene) {
		p1, p2 := s.Process(s.kind, 0.996), s.process()
		const length = 2 * time.Hour
		mu := s.holds(p1, dsync.WithTTL(30*time.Second)) // renewed each 10 s
		began := time.Now()
		stop := make(chan struct{})
		go func() {
			select {
			case <-mu.Lost():
				s.check(false, "lost after %v", time.Since(began))
			case <-stop:
			}
		}()
		sent := p1.Sent()
		s.pass(length)
		close(stop)
		s.within("the time between renewals", began, began.Add(length/time.Duration(p1.Sent()-sent)), 9*time.Second, 11*time.Second)
		got, err := dsync.NewMutex(p2.Client, "x").TryLock(p2.Context())
		s.check(!got && err == nil, "TryLock of another: %v, %v", got, err)
		s.unlock(p1, mu)
	})
}
