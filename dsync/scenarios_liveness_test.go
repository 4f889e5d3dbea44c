package dsync_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/e51fe0e6/dsync/dsync"
	"github.com/e51fe0e6/dsync/internal/redistest"
)

// B21: the lock is released while the waiter's SUBSCRIBE is still under way: it asks again once that is confirmed, and does not wait for a message
// that was never sent. A's lease of a minute does not help it.
func TestScenarioB21UnlockBeforeTheSubscriptionIsLive(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		p := redistest.NewProxy(t, w.server.Addr())
		b := w.split(t, w.server.Addr(), p.Addr())
		a := dsync.NewMutex(w.client(t), "b21", dsync.WithTTL(time.Minute))
		require.NoError(t, a.Lock(within(t)))
		m := watch(t, w.server)
		p.HoldUp()
		start := time.Now()
		got := locking(within(t), dsync.NewMutex(b, "b21", dsync.WithTTL(time.Minute)))
		eventually(t, "B's first question", func() bool { return len(m.seen("acquire", key("b21"))) > 0 })
		require.NoError(t, a.Unlock(within(t)))
		p.Release()
		require.NoError(t, <-got)
		require.LessOrEqual(t, int64(m.count("acquire", key("b21"))), atMost(1, start, time.Second), "it did not poll")
	})
}

// B24: a hundred unlocks that nobody waited for, and one whose waiter had given up, leave nothing behind by which a later waiter would
// be woken, or Redis would grow.
func TestScenarioB24LeftoverWakeUpsDoNotExist(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		a, cb, cc := dsync.NewMutex(w.client(t), "b24"), w.client(t), w.client(t)
		w.warm(t, cb)
		w.warm(t, cc)
		pair := func() {
			ok, err := a.TryLock(within(t))
			require.NoError(t, err)
			require.True(t, ok)
			require.NoError(t, a.Unlock(within(t)))
		}
		pair()
		size := w.server.MustDo("HLEN", key("b24"))
		for range 100 {
			pair()
		}
		require.Equal(t, size, w.server.MustDo("HLEN", key("b24")))

		require.NoError(t, a.Lock(within(t)))
		b, c := dsync.NewMutex(cb, "b24"), dsync.NewMutex(cc, "b24")
		ctx, cancel := context.WithCancel(within(t))
		gone := locking(ctx, b)
		queued(t, a, 1)
		cancel()
		require.ErrorIs(t, <-gone, context.Canceled)
		queued(t, a, 0)
		require.NoError(t, a.Unlock(within(t)))

		require.NoError(t, a.Lock(within(t)))
		m := watch(t, w.server)
		start := time.Now()
		gotB, gotC := locking(within(t), b), locking(within(t), c)
		queued(t, a, 2)
		<-time.After(500 * time.Millisecond) // for them to spin in, if they do
		stillWaits(t, gotB)
		stillWaits(t, gotC)
		require.LessOrEqual(t, int64(m.count("acquire", key("b24"))), atMost(2, start, 3*time.Second))
		require.NoError(t, a.Unlock(within(t)))
		for range 2 {
			select {
			case err := <-gotB:
				require.NoError(t, err)
				require.NoError(t, b.Unlock(within(t)))
			case err := <-gotC:
				require.NoError(t, err)
				require.NoError(t, c.Unlock(within(t)))
			}
		}
	})
}

// B25: whoever deletes the lock behind everybody's back, the waiters find it free by asking again, one after the other, and the holder is told;
// its lease of ten minutes has nothing to do with it.
func TestScenarioB25AdministrativeDeletionReachesWaiters(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		var waiters []*dsync.Client
		for range 5 {
			c := w.client(t)
			w.warm(t, c)
			waiters = append(waiters, c)
		}
		ca := w.client(t)
		for how, do := range map[string]func(k string){
			"del":      func(k string) { w.server.MustDo("DEL", k) },
			"flushall": func(string) { w.server.MustDo("FLUSHALL") },
			"flushdb":  func(string) { w.server.MustDo("FLUSHDB") },
			"rename":   func(k string) { w.server.MustDo("RENAME", k, "elsewhere") },
			"expire":   func(k string) { w.server.MustDo("PEXPIRE", k, "10") },
		} {
			t.Run(how, func(t *testing.T) {
				a := dsync.NewMutex(ca, how, dsync.WithTTL(10*time.Minute), dsync.WithoutRenewal())
				require.NoError(t, a.Lock(within(t)))
				g := &gate{}
				g.enter(a.Fence())
				g.leave()
				var got sync.WaitGroup
				ctx := within(t)
				for i, c := range waiters {
					mu := dsync.NewMutex(c, how, dsync.WithTTL(900*time.Millisecond))
					got.Go(func() {
						if err := mu.Lock(ctx); err != nil {
							t.Error(err)
							return
						}
						g.enter(mu.Fence())
						g.leave()
						if err := mu.Unlock(ctx); err != nil && !errors.Is(err, dsync.ErrLost) { // a slow machine
							t.Error(err)
						}
					})
					queued(t, a, i+1)
				}
				do(key(how))
				got.Wait()
				g.check(t)
				require.ErrorIs(t, a.Unlock(within(t)), dsync.ErrLost)
			})
		}
	})
}

// B29: after the last Unlock of many quick pairs nothing is renewed any more, for five leases long.
func TestScenarioB29NothingIsRenewedAfterUnlock(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		c := w.client(t)
		m := watch(t, w.server)
		g := &gate{}
		ctx := within(t)
		var wg sync.WaitGroup
		for range 8 {
			mu := dsync.NewMutex(c, "b29", dsync.WithTTL(300*time.Millisecond))
			wg.Go(func() {
				for range rounds(100, 2500) {
					if err := mu.Lock(ctx); err != nil {
						t.Error(err)
						return
					}
					g.enter(mu.Fence())
					g.leave()
					if err := mu.Unlock(ctx); err != nil && !errors.Is(err, dsync.ErrLost) && !errors.Is(err, dsync.ErrUnconfirmed) { // a slow machine
						t.Error(err)
						return
					}
				}
			})
		}
		wg.Wait()
		g.check(t)
		freed(t, w.server, "b29")
		before := m.renewals("b29")
		<-time.After(1500 * time.Millisecond) // five leases, fifteen renewals
		require.Equal(t, before, m.renewals("b29"))
		require.Empty(t, holder(w.server, "b29"))
	})
}

// B32: with Redis killed, stopped or cut off, every call comes back by its context with an outage and never with "taken"; afterwards all is well
// without a new client.
func TestScenarioB32NoCallHangsWhenRedisIsGone(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		p := redistest.NewProxy(t, w.server.Addr())
		c := w.clientAt(t, p.Addr())
		w.warm(t, c)
		for name, o := range map[string]struct{ begin, end func() }{
			"killed":  {w.server.Kill, w.server.Restart},
			"stopped": {w.server.Pause, w.server.Resume},
			// A stream with a hole in it is nothing that TCP would let through afterwards, so it ends with a reset.
			"black-hole": {func() { p.BlackHole(true) }, func() { p.CutAll(); p.BlackHole(false) }},
		} {
			t.Run(name, func(t *testing.T) {
				held, mu := dsync.NewMutex(c, "b32-held-"+name, dsync.WithTTL(time.Minute)), dsync.NewMutex(c, "b32-"+name)
				require.NoError(t, held.Lock(within(t)))
				o.begin()
				errs := make(chan error, 4)
				call := func(do func(ctx context.Context) error) {
					go func() {
						ctx, cancel := context.WithTimeout(within(t), 500*time.Millisecond)
						defer cancel()
						errs <- do(ctx)
					}()
				}
				call(func(ctx context.Context) error {
					ok, err := dsync.NewMutex(c, "b32-try-"+name).TryLock(ctx)
					if ok || err == nil {
						t.Errorf("TryLock said %v and no error", ok)
					}
					return err
				})
				call(mu.Lock)
				call(func(ctx context.Context) error { return mu.Do(ctx, func(context.Context) error { return nil }) })
				call(func(ctx context.Context) error {
					err := held.Unlock(ctx)
					if !errors.Is(err, dsync.ErrUnconfirmed) {
						t.Errorf("Unlock: %v", err)
					}
					return fmt.Errorf("%w: %w", dsync.ErrUnavailable, err)
				})
				outages := 0
				for range 4 {
					err := <-errs
					if !errors.Is(err, context.DeadlineExceeded) { // TryLock's one attempt may fail before
						require.ErrorIs(t, err, dsync.ErrUnavailable)
					}
					if errors.Is(err, dsync.ErrUnavailable) {
						outages++
					}
				}
				require.Positive(t, outages)
				o.end()
				require.NoError(t, mu.Lock(within(t)))
				require.NoError(t, mu.Unlock(within(t)))
				require.NoError(t, held.Lock(within(t)), "what was held was released in the background")
				require.NoError(t, held.Unlock(within(t)))
			})
		}
	})
}

// B33: a black hole around the subscription alone: hand-offs go on by re-checks, the silence is found out, dialing again is bounded, and
// afterwards messages arrive again.
func TestScenarioB33SubscriptionRecoversFromABlackHole(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		p := redistest.NewProxy(t, w.server.Addr())
		via := make(chan dsync.Via, 1000)
		b := w.split(t, w.server.Addr(), p.Addr(), dsync.WithHooks(dsync.Hooks{Acquired: func(i dsync.AcquiredInfo) {
			if i.Name == "b33" {
				via <- i.Via
			}
		}}))
		w.warm(t, b)
		holders := w.client(t)
		a, mu := dsync.NewMutex(holders, "b33"), dsync.NewMutex(b, "b33", dsync.WithTTL(900*time.Millisecond))
		var waiters sync.WaitGroup // on other names, which share the subscription
		ctx, cancel := context.WithCancel(within(t))
		defer waiters.Wait()
		defer cancel()
		for i := range rounds(20, 200) {
			name := fmt.Sprintf("b33-%d", i)
			require.NoError(t, dsync.NewMutex(holders, name).Lock(within(t)))
			other := dsync.NewMutex(b, name)
			waiters.Go(func() { _ = other.Lock(ctx) })
		}
		handOff := func() dsync.Via {
			require.NoError(t, a.Lock(within(t)))
			got := locking(within(t), mu)
			queued(t, a, 1)
			require.NoError(t, a.Unlock(within(t)))
			require.NoError(t, <-got)
			if err := mu.Unlock(within(t)); err != nil {
				require.ErrorIs(t, err, dsync.ErrLost) // a slow machine
			}
			return receive(t, "the hook", via)
		}
		require.Equal(t, dsync.ViaMessage, handOff())
		dialed := p.Accepted()
		start := time.Now()
		p.BlackHole(true)
		require.Equal(t, dsync.ViaRecheck, handOff())
		for p.Accepted() == dialed { // until the echo is missed
			handOff()
		}
		require.Equal(t, dsync.ViaRecheck, handOff())
		require.LessOrEqual(t, int64(p.Accepted()-dialed), atMost(2, start, time.Second), "dialed again, with back-off")
		p.BlackHole(false)
		eventually(t, "a hand-off by message", func() bool { return handOff() == dsync.ViaMessage })
	})
}

// B36: Unlock of a lock that TryLock took comes back whatever else is going on, and the lock is gone.
func TestScenarioB36UnlockAfterTryLockReturns(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		take := func(t *testing.T, ctx context.Context, c *dsync.Client, name string) *dsync.Mutex {
			mu := dsync.NewMutex(c, name, dsync.WithTTL(10*time.Minute))
			ok, err := mu.TryLock(ctx)
			require.NoError(t, err)
			require.True(t, ok)
			return mu
		}
		t.Run("failed-tries", func(t *testing.T) {
			c, other := w.client(t), w.client(t)
			mu := take(t, within(t), c, "b36-tries")
			ctx := within(t)
			var tries sync.WaitGroup
			for range 8 {
				for _, who := range []*dsync.Client{c, other} {
					tries.Go(func() {
						if ok, err := dsync.NewMutex(who, "b36-tries").TryLock(ctx); ok && err == nil {
							t.Error("taken twice")
						}
					})
				}
			}
			tries.Wait()
			for range 8 { // and while more of them are under way
				again := dsync.NewMutex(other, "b36-tries")
				tries.Go(func() {
					if ok, _ := again.TryLock(ctx); ok {
						_ = again.Unlock(ctx)
					}
				})
			}
			require.NoError(t, mu.Unlock(within(t)))
			tries.Wait()
			freed(t, w.server, "b36-tries")
		})
		t.Run("closing", func(t *testing.T) {
			c := w.client(t)
			mu := take(t, within(t), c, "b36-closing")
			closed := make(chan error, 1)
			go func() { closed <- c.Close(within(t)) }()
			require.NoError(t, mu.Unlock(within(t)))
			require.NoError(t, <-closed)
			require.Empty(t, holder(w.server, "b36-closing"))
		})
		t.Run("context-done", func(t *testing.T) {
			ctx, cancel := context.WithCancel(within(t))
			mu := take(t, ctx, w.client(t), "b36-done")
			cancel()
			if err := mu.Unlock(ctx); err != nil {
				require.ErrorIs(t, err, dsync.ErrUnconfirmed)
			}
			freed(t, w.server, "b36-done")
		})
	})
}

// B37: forty goroutines of four processes on one name, while the subscriptions are cut all the time: nobody sleeps on beside a free lock.
func TestScenarioB37NobodySleepsBesideAFreeLock(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		ctx := within(t)
		g := &gate{}
		var wg sync.WaitGroup
		for range 4 {
			c := w.client(t)
			w.warm(t, c)
			for range 10 {
				mu := dsync.NewMutex(c, "b37", dsync.WithTTL(900*time.Millisecond))
				wg.Go(func() {
					for range rounds(5, 300) {
						if err := mu.Lock(ctx); err != nil {
							t.Error(err)
							return
						}
						g.enter(mu.Fence())
						g.leave()
						if err := mu.Unlock(ctx); err != nil && !errors.Is(err, dsync.ErrLost) && !errors.Is(err, dsync.ErrUnconfirmed) {
							t.Error(err)
						}
					}
				})
			}
		}
		done := make(chan struct{})
		go func() { wg.Wait(); close(done) }()
		for running := true; running; {
			select {
			case <-done:
				running = false
			case <-time.After(time.Duration(rand.IntN(60)) * time.Millisecond): // let some hand-offs happen between two cuts
				w.server.MustDo("CLIENT", "KILL", "TYPE", "pubsub")
			}
		}
		g.check(t)
	})
}

// B41: the acquire ran and its reply was lost: the repeated one finds the same hold, and does not take it for another's. With ten minutes of
// lease, nobody waited for its end. (D14 and TestMutexLostReplies have the other forms.)
func TestScenarioB41RepeatedAcquireKnowsItsOwnLock(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		p := redistest.NewProxy(t, w.server.Addr())
		c := w.clientAt(t, p.Addr())
		w.warm(t, c)
		m := watch(t, w.server)
		for _, try := range []bool{false, true} {
			name := fmt.Sprintf("b41-%v", try)
			fired := p.LoseReplyTo(func(request []byte) bool {
				return bytes.Contains(request, []byte("acquire")) && bytes.Contains(request, []byte(name))
			})
			mu := dsync.NewMutex(c, name, dsync.WithTTL(10*time.Minute))
			if try { // one attempt: it is told the outage, and what it may have taken is given back
				ok, err := mu.TryLock(within(t))
				require.False(t, ok)
				require.ErrorIs(t, err, dsync.ErrUnavailable)
				<-fired
				require.NoError(t, mu.Lock(within(t)))
			} else {
				require.NoError(t, mu.Lock(within(t)))
				<-fired
				require.Equal(t, 2, m.count("acquire", key(name)))
				require.Equal(t, 1, m.count("HSET", key(name), "h"), "it was granted once")
			}
			require.Equal(t, lastFence(w.server, name), mu.Fence())
			require.NoError(t, mu.Unlock(within(t)))
			require.Empty(t, holder(w.server, name))
		}
	})
}

// B43: eight contenders with nothing to do: the lock goes from one to the next by message. A re-check, the only thing that takes a fixed time here,
// grants only where a hand-over took longer than its period of three seconds.
func TestScenarioB43HandOffDoesNotWaitForABackOff(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		const contenders = 8
		via := make(chan dsync.Via, contenders)
		ctx := within(t)
		blocker := dsync.NewMutex(w.client(t), "b43", dsync.WithTTL(time.Minute))
		require.NoError(t, blocker.Lock(ctx))
		g := &gate{}
		start := time.Now() // each waiter asks again three seconds after it asked, and may just then be granted
		var wg sync.WaitGroup
		for i := range contenders {
			c := w.client(t, dsync.WithHooks(dsync.Hooks{Acquired: func(i dsync.AcquiredInfo) {
				if i.Name == "b43" {
					via <- i.Via
				}
			}}))
			w.warm(t, c)
			mu := dsync.NewMutex(c, "b43", dsync.WithTTL(time.Minute))
			wg.Go(func() {
				if err := mu.Lock(ctx); err != nil {
					t.Error(err)
					return
				}
				g.enter(mu.Fence())
				g.leave()
				if err := mu.Unlock(ctx); err != nil {
					t.Error(err)
				}
			})
			eventuallyQuiet(t, w.server, key("b43"), i+1)
		}
		require.NoError(t, blocker.Unlock(ctx))
		wg.Wait()
		g.check(t)
		messages := 0
		for range contenders {
			if receive(t, "the hook", via) == dsync.ViaMessage {
				messages++
			}
		}
		require.GreaterOrEqual(t, messages, contenders*(1-int(time.Since(start)/(3*time.Second))))
		require.Positive(t, messages)
	})
}
