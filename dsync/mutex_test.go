package dsync_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/e51fe0e6/dsync/dsync"
	"github.com/e51fe0e6/dsync/internal/redistest"
)

// Issue 1, 2: processes are served in the order in which they came, with slice 0.
func TestMutexIsFIFOBetweenProcesses(t *testing.T) {
	onServer(t, func(t *testing.T, w *world) {
		const processes = 8
		ctx := within(t)
		mu := dsync.NewMutex(w.client(t), "fifo", dsync.WithSlice(0))
		require.NoError(t, mu.Lock(ctx))
		order := make(chan int, 3*processes)
		var wg sync.WaitGroup
		for i := range processes {
			c := w.client(t)
			w.warm(t, c)
			own := dsync.NewMutex(c, "fifo", dsync.WithSlice(0))
			for range 3 { // three goroutines of each process: with slice 0 each gets one turn, then the next process does
				wg.Go(func() {
					if err := own.Lock(ctx); err != nil {
						t.Error(err)
						return
					}
					order <- i
					if err := own.Unlock(ctx); err != nil {
						t.Error(err)
					}
				})
			}
			queued(t, mu, i+1)
		}
		require.NoError(t, mu.Unlock(ctx))
		wg.Wait()
		for i := range 3 * processes {
			require.Equal(t, i%processes, <-order, "turn %d", i)
		}
	})
}

// Issue 1, 2: with a slice, one process's run is bounded: the others are served although it never stops asking.
func TestMutexLocalRunEndsWithTheSlice(t *testing.T) {
	onServer(t, func(t *testing.T, w *world) {
		ctx, stop := context.WithCancel(within(t))
		busy, other := w.client(t), w.client(t)
		w.warm(t, busy)
		w.warm(t, other)
		var wg sync.WaitGroup
		for range 4 {
			mu := dsync.NewMutex(busy, "slice")
			wg.Go(func() {
				for ctx.Err() == nil {
					if mu.Lock(ctx) == nil {
						_ = mu.Unlock(context.WithoutCancel(ctx))
					}
				}
			})
		}
		mu := dsync.NewMutex(other, "slice")
		for range 20 {
			require.NoError(t, mu.Lock(ctx))
			require.NoError(t, mu.Unlock(ctx))
		}
		stop()
		wg.Wait()
	})
}

// Issue 1, 2: two script calls for each contended acquisition, whatever the number of waiters.
func TestMutexContendedAcquisitionCostsTwoCalls(t *testing.T) {
	onServer(t, func(t *testing.T, w *world) {
		for _, waiters := range []int{2, 16, 64} {
			t.Run(strconv.Itoa(waiters), func(t *testing.T) {
				ctx := within(t)
				name := fmt.Sprintf("calls-%d", waiters)
				// A long lease: what is counted is hand-overs, not the re-checks of a slow machine.
				mu := dsync.NewMutex(w.client(t), name, dsync.WithTTL(time.Minute))
				require.NoError(t, mu.Lock(ctx))
				var clients []*dsync.Client
				for range waiters {
					c := w.client(t)
					w.warm(t, c)
					clients = append(clients, c)
				}
				g := &gate{}
				before := calls(w.server)
				var wg sync.WaitGroup
				for i, c := range clients {
					own := dsync.NewMutex(c, name, dsync.WithTTL(time.Minute))
					wg.Go(func() {
						if err := own.Lock(ctx); err != nil {
							t.Error(err)
							return
						}
						g.enter(own.Fence())
						g.leave()
						if err := own.Unlock(ctx); err != nil {
							t.Error(err)
						}
					})
					eventuallyQuiet(t, w.server, "dsync:{"+name+"}:mutex", i+1)
				}
				require.NoError(t, mu.Unlock(ctx))
				wg.Wait()
				g.check(t)
				// One release more than acquisitions; and a waiter asks again each 3 s, should this take so long here.
				got := calls(w.server) - before
				require.GreaterOrEqual(t, got, int64(2*waiters+1))
				require.LessOrEqual(t, got, int64(2*waiters+1+waiters/4+2), "about two calls each")
			})
		}
	})
}

// calls counts the scripts that the server ran.
func calls(s *redistest.Server) int64 {
	stats := s.CommandStats()
	return stats["evalsha"] + stats["eval"]
}

// eventuallyQuiet waits for n places in a queue without running a script.
func eventuallyQuiet(t testing.TB, s *redistest.Server, key string, n int) {
	t.Helper()
	eventually(t, fmt.Sprintf("%d places", n), func() bool {
		last, err := s.Do("HGET", key, "z")
		return err == nil && last == strconv.Itoa(n)
	})
}

// Issue 1, 3: the release grants by itself, and the message is enough: the waiter asked once.
func TestMutexIsGrantedByTheRelease(t *testing.T) {
	onServer(t, func(t *testing.T, w *world) {
		ctx := within(t)
		via := make(chan dsync.Via, 4)
		c := w.client(t, dsync.WithHooks(dsync.Hooks{Acquired: func(i dsync.AcquiredInfo) {
			if i.Name == "grant" {
				via <- i.Via
			}
		}}))
		w.warm(t, c)
		mu, waiter := dsync.NewMutex(w.client(t), "grant"), dsync.NewMutex(c, "grant")
		require.NoError(t, mu.Lock(ctx))
		done := make(chan error, 1)
		go func() { done <- waiter.Lock(ctx) }()
		queued(t, mu, 1)
		require.NoError(t, mu.Unlock(ctx))
		require.NoError(t, <-done)
		require.Equal(t, dsync.ViaMessage, <-via)
		require.NoError(t, waiter.Unlock(ctx))
	})
}

// Issue 1, 3; B22, B37, B66: the subscription is cut a thousand times at random, and nobody sleeps on.
func TestMutexSurvivesCutsOfTheSubscription(t *testing.T) {
	onServer(t, func(t *testing.T, w *world) {
		ctx := within(t)
		cuts := 1000
		if testing.Short() {
			cuts = 50
		}
		g := &gate{}
		done := make(chan struct{})
		var wg sync.WaitGroup
		for range 3 {
			c := w.client(t)
			w.warm(t, c)
			for range 4 {
				mu := dsync.NewMutex(c, "cuts", dsync.WithTTL(900*time.Millisecond))
				wg.Go(func() {
					for {
						select {
						case <-done:
							return
						default:
						}
						if err := mu.Lock(ctx); err != nil {
							t.Error(err)
							return
						}
						g.enter(mu.Fence())
						g.leave()
						if err := mu.Unlock(ctx); err != nil && !errors.Is(err, dsync.ErrLost) { // a slow machine may lose a lease
							t.Error(err)
						}
					}
				})
			}
		}
		for range cuts {
			w.server.MustDo("CLIENT", "KILL", "TYPE", "pubsub")
			if rand.IntN(3) == 0 {
				w.server.MustDo("PING")
			}
		}
		close(done)
		wg.Wait() // everybody got the lock once more
		g.check(t)
	})
}

// Issue 1, 6; B125, B131, B104: the loss is told by Lost, the context, the hook and the error, and ends with the release.
func TestMutexTellsTheLoss(t *testing.T) {
	onServer(t, func(t *testing.T, w *world) {
		ctx := within(t)
		lost := make(chan dsync.LostInfo, 4)
		mu := dsync.NewMutex(w.client(t, dsync.WithHooks(dsync.Hooks{Lost: func(i dsync.LostInfo) { lost <- i }})),
			"loss", dsync.WithTTL(300*time.Millisecond))
		require.NoError(t, mu.Lock(ctx))
		first := mu.Fence()
		w.server.MustDo("DEL", key("loss"))
		<-mu.Lost()
		require.Zero(t, mu.Remaining())
		info := <-lost
		require.Equal(t, "loss", info.Name)
		require.Equal(t, first, info.Fence)

		// Until it is unlocked, it occupies its process: local callers wait, and try in vain.
		other := dsync.NewMutex(w.client(t), "loss")
		ok, err := mu.TryLock(ctx)
		require.NoError(t, err)
		require.False(t, ok)
		ok, err = other.TryLock(ctx)
		require.NoError(t, err)
		require.True(t, ok, "another process may go on")
		require.ErrorIs(t, mu.Unlock(ctx), dsync.ErrLost)
		require.ErrorIs(t, mu.Unlock(ctx), dsync.ErrNotHeld)
		require.NotEmpty(t, w.server.MustDo("HGET", key("loss"), "h"), "the late unlock did not touch the other's hold")
		require.NoError(t, other.Unlock(ctx))

		err = mu.Do(ctx, func(ctx context.Context) error {
			fence, ok := dsync.Fence(ctx)
			require.True(t, ok)
			require.Greater(t, fence, first)
			w.server.MustDo("DEL", key("loss"))
			<-ctx.Done()
			require.ErrorIs(t, context.Cause(ctx), dsync.ErrLost)
			return context.Cause(ctx)
		})
		require.ErrorIs(t, err, dsync.ErrLost)
		require.NoError(t, mu.Lock(ctx), "after the loss the value is as new")
		require.NoError(t, mu.Unlock(ctx))
	})
}

// Do releases and goes on, whatever becomes of fn.
func TestMutexDoReleasesOnEveryWayOut(t *testing.T) {
	onServer(t, func(t *testing.T, w *world) {
		ctx := within(t)
		mu := dsync.NewMutex(w.client(t), "do")
		boom := errors.New("boom")
		require.ErrorIs(t, mu.Do(ctx, func(context.Context) error { return boom }), boom)
		require.PanicsWithValue(t, "boom", func() {
			_ = mu.Do(ctx, func(context.Context) error { panic("boom") })
		})
		exited := make(chan struct{})
		go func() {
			defer close(exited)
			_ = mu.Do(ctx, func(context.Context) error { runtime.Goexit(); return nil })
		}()
		<-exited
		called, err := mu.TryDo(ctx, func(context.Context) error { return boom })
		require.True(t, called)
		require.ErrorIs(t, err, boom)
		require.ErrorIs(t, mu.Do(ctx, func(ctx context.Context) error { return mu.Lock(ctx) }), dsync.ErrDeadlock)
		state, err := mu.Inspect(ctx)
		require.NoError(t, err)
		require.Nil(t, state.Holder)
		require.Zero(t, mu.Fence())
		<-mu.Lost()
	})
}

// ctx bounds the wait, not the hold; nor does an ended one keep Unlock from releasing (B82, B88).
func TestMutexContextBoundsTheWaitOnly(t *testing.T) {
	onServer(t, func(t *testing.T, w *world) {
		mu, other := dsync.NewMutex(w.client(t), "ctx"), dsync.NewMutex(w.client(t), "ctx")
		ctx, cancel := context.WithCancel(within(t))
		require.NoError(t, mu.Lock(ctx))
		cancel()
		require.Positive(t, mu.Remaining())
		require.ErrorIs(t, mu.Lock(ctx), context.Canceled)
		why := errors.New("why")
		short, stop := context.WithCancelCause(within(t))
		done := make(chan error, 1)
		go func() { done <- other.Lock(short) }()
		queued(t, mu, 1)
		stop(why)
		err := <-done
		require.ErrorIs(t, err, context.Canceled)
		require.ErrorIs(t, err, why)
		queued(t, mu, 0)
		if err := mu.Unlock(ctx); err != nil {
			require.ErrorIs(t, err, dsync.ErrUnconfirmed)
		}
		require.NoError(t, other.Lock(within(t)))
		require.NoError(t, other.Unlock(within(t)))
	})
}

// Linger: no command for the next Lock, given up at once when another process waits.
func TestMutexLingers(t *testing.T) {
	onServer(t, func(t *testing.T, w *world) {
		ctx := within(t)
		c := w.client(t)
		w.warm(t, c)
		mu := dsync.NewMutex(c, "linger", dsync.WithLinger(20*time.Second), dsync.WithTTL(time.Minute))
		require.NoError(t, mu.Lock(ctx))
		require.NoError(t, mu.Unlock(ctx))
		before, last := calls(w.server), int64(0)
		for range 1000 {
			require.NoError(t, mu.Lock(ctx))
			require.Greater(t, mu.Fence(), last)
			last = mu.Fence()
			require.NoError(t, mu.Unlock(ctx))
		}
		require.Equal(t, before, calls(w.server))
		other := dsync.NewMutex(w.client(t), "linger")
		require.NoError(t, other.Lock(ctx), "the hint makes it give way, long before the linger time")
		require.Greater(t, other.Fence(), last)
		require.NoError(t, other.Unlock(ctx))
	})
}

// Issue 1, 8; D11, B61: Close with a hundred blocked callers and fifty holds.
func TestCloseWakesWaitersAndWaitsForHolds(t *testing.T) {
	onServer(t, func(t *testing.T, w *world) {
		c := w.client(t)
		blocker := dsync.NewMutex(w.client(t), "blocked")
		require.NoError(t, blocker.Lock(within(t)))
		waiting := make(chan error, 100)
		for range 100 {
			mu := dsync.NewMutex(c, "blocked")
			go func() { waiting <- mu.Lock(within(t)) }()
		}
		queued(t, blocker, 1)
		var holds []*dsync.Mutex
		for i := range 50 {
			mu := dsync.NewMutex(c, fmt.Sprintf("held-%d", i))
			require.NoError(t, mu.Lock(within(t)))
			holds = append(holds, mu)
		}
		inDo := make(chan error, 1)
		go func() {
			inDo <- dsync.NewMutex(c, "do").Do(within(t), func(ctx context.Context) error {
				<-ctx.Done()
				return context.Cause(ctx)
			})
		}()
		eventually(t, "the Do", func() bool { return w.server.MustDo("HEXISTS", key("do"), "h") == int64(1) })

		closed := make(chan error, 1)
		go func() { closed <- c.Close(within(t)) }()
		for range 100 {
			require.ErrorIs(t, <-waiting, dsync.ErrClosed)
		}
		require.ErrorIs(t, <-inDo, dsync.ErrClosed)
		require.ErrorIs(t, dsync.NewMutex(c, "late").Lock(within(t)), dsync.ErrClosed)
		for i, mu := range holds {
			require.NoError(t, mu.Unlock(within(t)), "hold %d is in force until its owner is done", i)
		}
		require.NoError(t, <-closed)
		require.NoError(t, c.Close(within(t)))
		queued(t, blocker, 0)
		require.NoError(t, blocker.Unlock(within(t)))
	})
}

// Issue 1, 9: Close under a running section: lost first, released then.
func TestCloseTakesAwayWhatIsLeft(t *testing.T) {
	onServer(t, func(t *testing.T, w *world) {
		c := w.client(t)
		mu, next := dsync.NewMutex(c, "left"), dsync.NewMutex(w.client(t), "left")
		require.NoError(t, mu.Lock(within(t)))
		granted := make(chan error, 1)
		go func() { granted <- next.Lock(within(t)) }()
		queued(t, mu, 1)
		ctx, cancel := context.WithCancel(within(t))
		cancel()
		err := c.Close(ctx)
		require.ErrorIs(t, err, context.Canceled)
		require.ErrorContains(t, err, "1 holds")
		select {
		case <-mu.Lost():
		default:
			require.Fail(t, "Close returned before the hold was lost")
		}
		require.NoError(t, <-granted)
		require.ErrorIs(t, mu.Unlock(within(t)), dsync.ErrLost)
		require.NoError(t, next.Unlock(within(t)))
	})
}
