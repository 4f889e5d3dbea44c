package dsync_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/e51fe0e6/dsync/dsync"
)

// B103: the deferred Unlock after a Lock that failed, and every method of a value that no constructor made, return an error and do not panic.
func TestScenarioB103UnlockAfterAFailedLock(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		w.server.MustDo("SET", key("b103"), "foreign", "EX", "60")
		mu := dsync.NewMutex(w.client(t), "b103")
		var later error
		err := func() error {
			defer func() { later = mu.Unlock(within(t)) }()
			return mu.Lock(within(t))
		}()
		require.ErrorContains(t, err, "WRONGTYPE", "the first error is the one to see")
		require.ErrorIs(t, later, dsync.ErrNotHeld)
		require.Zero(t, mu.Fence())
		require.Zero(t, mu.Remaining())
		require.True(t, isLost(mu))

		for _, zero := range []*dsync.Mutex{{}, dsync.NewMutex(&dsync.Client{}, "b103")} {
			require.NotPanics(t, func() {
				require.Error(t, zero.Unlock(within(t)))
				require.Error(t, zero.Lock(within(t)))
				ok, err := zero.TryLock(within(t))
				require.False(t, ok)
				require.Error(t, err)
				require.Error(t, zero.Do(within(t), nil))
				_, err = zero.Inspect(within(t))
				require.Error(t, err)
				require.Zero(t, zero.Fence())
				require.Zero(t, zero.Remaining())
				require.True(t, isLost(zero))
			})
		}
		require.NotPanics(t, func() {
			require.Error(t, (&dsync.Client{}).Ping(within(t)))
			require.NoError(t, (&dsync.Client{}).Close(within(t)), "there is nothing to close")
		})
	})
}

// B104: never locked, unlocked already, lost, lost to another, and no server are told apart with errors.Is, from whatever goroutine; and the
// other is not harmed.
func TestScenarioB104UnlockErrorsAreToldApart(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		c := w.client(t)
		all := []error{dsync.ErrNotHeld, dsync.ErrLost, dsync.ErrUnconfirmed, dsync.ErrUnavailable, dsync.ErrClosed}
		unlock := func(t *testing.T, mu *dsync.Mutex, want error) {
			t.Helper()
			got := make(chan error, 1)
			go func() { got <- mu.Unlock(within(t)) }() // another goroutine than the one that locked
			err := <-got
			for _, is := range all {
				require.Equal(t, errors.Is(want, is), errors.Is(err, is), "%v: %v", is, err)
			}
			require.ErrorIs(t, mu.Unlock(within(t)), dsync.ErrNotHeld, "the hold is over in any case")
		}
		lapsed := func(t *testing.T, name string) *dsync.Mutex {
			mu := dsync.NewMutex(c, name, dsync.WithTTL(100*time.Millisecond), dsync.WithoutRenewal())
			require.NoError(t, mu.Lock(within(t)))
			receive(t, "the end of the lease", mu.Lost())
			return mu
		}
		unlock(t, dsync.NewMutex(c, "b104-never"), dsync.ErrNotHeld)
		twice := dsync.NewMutex(c, "b104-twice")
		require.NoError(t, twice.Lock(within(t)))
		require.NoError(t, twice.Unlock(within(t)))
		unlock(t, twice, dsync.ErrNotHeld)
		unlock(t, lapsed(t, "b104-lapsed"), dsync.ErrLost)
		mu, b := lapsed(t, "b104-taken"), dsync.NewMutex(w.client(t), "b104-taken")
		require.NoError(t, b.Lock(within(t)))
		unlock(t, mu, dsync.ErrLost)
		require.NoError(t, b.Unlock(within(t)))

		down := dsync.NewMutex(c, "b104-down", dsync.WithTTL(time.Minute))
		require.NoError(t, down.Lock(within(t)))
		w.server.Kill()
		ctx, cancel := context.WithTimeout(within(t), 200*time.Millisecond)
		defer cancel()
		err := down.Unlock(ctx)
		require.ErrorIs(t, err, dsync.ErrUnconfirmed)
		require.NotErrorIs(t, err, dsync.ErrLost)
		require.NotErrorIs(t, err, dsync.ErrNotHeld)
	})
}

// B105: the hold belongs to the value and not to a goroutine: another one may release it, and then there is nothing left for the first.
func TestScenarioB105AnotherGoroutineMayUnlock(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		mu := dsync.NewMutex(w.client(t), "b105")
		require.NoError(t, mu.Lock(within(t)))
		got := make(chan error, 1)
		go func() { got <- mu.Unlock(within(t)) }()
		require.NoError(t, <-got)
		require.ErrorIs(t, mu.Unlock(within(t)), dsync.ErrNotHeld)
		require.Empty(t, holder(w.server, "b105"))
	})
}

// B106: Lock of a sync.Locker never comes back without the lock: it sits out a dead server far beyond the outage budget, and the holder's turn, and
// panics where it can never succeed.
func TestScenarioB106LockerNeverReturnsWithoutTheLock(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		c := w.client(t, dsync.WithOutageBudget(50*time.Millisecond), (&journal{}).option())
		mu, other := dsync.NewMutex(c, "b106"), dsync.NewMutex(w.client(t), "b106")
		locker := mu.Locker()
		take := func() <-chan error {
			got := make(chan error, 1)
			go func() {
				locker.Lock()
				if mu.Fence() == 0 {
					t.Error("it came back without the lock")
				}
				got <- nil
			}()
			return got
		}
		require.NoError(t, other.Lock(within(t)))
		got := take()
		queued(t, other, 1)
		stillWaits(t, got)
		require.NoError(t, other.Unlock(within(t)))
		require.NoError(t, receive(t, "the lock", got))
		locker.Unlock()

		w.server.Kill()
		got = take()
		<-time.After(300 * time.Millisecond) // several budgets
		stillWaits(t, got)
		w.server.Restart()
		require.NoError(t, receive(t, "the lock", got))
		require.NotEmpty(t, holder(w.server, "b106"))
		locker.Unlock()
		require.Panics(t, locker.Unlock, "as sync.Mutex does")
		require.NoError(t, c.Close(within(t)))
		require.Panics(t, locker.Lock)
	})
}

// B113: many goroutines start with a fresh client at the same instant, on one value and on several: one at a time, every release finds its hold,
// and there is one subscription.
func TestScenarioB113ConcurrentFirstUse(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		for i := range rounds(5, 200) {
			name := fmt.Sprintf("b113-%d", i)
			before := w.subscriptions()
			c := w.client(t)
			shared := dsync.NewMutex(c, name)
			g := &gate{}
			ctx := within(t)
			begin := make(chan struct{})
			var wg sync.WaitGroup
			for k := range 12 {
				mu := shared
				if k%2 == 0 {
					mu = dsync.NewMutex(c, name)
				}
				wg.Go(func() {
					<-begin
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
			}
			close(begin)
			wg.Wait()
			g.check(t)
			require.NoError(t, c.Close(within(t)))
			eventually(t, "the subscription to be gone", func() bool { return w.subscriptions() == before })
			w.server.MustDo("SCRIPT", "FLUSH")
		}
		m := watch(t, w.server)
		c := w.client(t)
		var got []<-chan error
		for i := range 6 {
			got = append(got, locking(within(t), dsync.NewMutex(c, fmt.Sprintf("b113-sub-%d", i))))
		}
		for _, done := range got {
			require.NoError(t, <-done)
		}
		eventually(t, "the subscription", func() bool { return w.subscriptions() == 1 })
		require.LessOrEqual(t, m.count("subscribe")+m.count("SUBSCRIBE"), 1)
	})
}

// B114 (a): TryDo around a short job excludes, and does not mean once per period: ten instances that come one after the other run it ten times.
func TestScenarioB114ExclusionIsNotOncePerPeriod(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		g := &gate{}
		ran := 0
		for range 10 {
			ok, err := dsync.NewMutex(w.client(t), "b114").TryDo(within(t), func(ctx context.Context) error {
				fence, _ := dsync.Fence(ctx)
				g.enter(fence)
				defer g.leave()
				ran++
				return nil
			})
			require.NoError(t, err)
			require.True(t, ok)
		}
		g.check(t)
		require.Equal(t, 10, ran)
	})
}

// B116: whatever becomes of the function in one process, on the first run or the third, those who wait in others go on, and its error goes to its
// own caller only. With ten minutes of lease, none of them waits for its end.
func TestScenarioB116PanicsAndErrorsReleaseForOthers(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		boom := errors.New("boom")
		a := dsync.NewMutex(w.client(t), "b116", dsync.WithTTL(10*time.Minute))
		var others []*dsync.Mutex
		for range 2 {
			c := w.client(t)
			w.warm(t, c)
			others = append(others, dsync.NewMutex(c, "b116", dsync.WithTTL(10*time.Minute)))
		}
		g := &gate{}
		run := func(ctx context.Context) {
			fence, _ := dsync.Fence(ctx)
			g.enter(fence)
			g.leave()
		}
		for i := range 6 {
			got := make(chan error, 2)
			first := func(ctx context.Context) error {
				for k, mu := range others {
					go func() { got <- mu.Do(within(t), func(ctx context.Context) error { run(ctx); return nil }) }()
					queued(t, a, k+1)
				}
				run(ctx)
				if i%2 == 0 {
					return boom
				}
				panic(boom)
			}
			if i%2 == 0 {
				require.ErrorIs(t, a.Do(within(t), first), boom)
			} else {
				require.PanicsWithValue(t, boom, func() { _ = a.Do(within(t), first) })
			}
			for range others {
				require.NoError(t, receive(t, "the others", got))
			}
		}
		g.check(t)
		require.Empty(t, holder(w.server, "b116"))
	})
}
