package dsync_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/e51fe0e6/dsync/dsync"
	"github.com/e51fe0e6/dsync/internal/redistest"
)

// B77: the acquire runs and its reply comes after the caller has given up: none of the locks stays behind, and none is renewed meanwhile.
func TestScenarioB77TimedOutTryLeavesNoLock(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		n := rounds(50, 1000)
		p := redistest.NewProxy(t, w.server.Addr())
		c := w.clientAt(t, p.Addr())
		w.warm(t, c)
		m := watch(t, w.server)
		p.HoldDown()
		ctx, cancel := context.WithTimeout(within(t), 200*time.Millisecond)
		defer cancel()
		errs := make(chan error, n)
		for i := range n {
			mu := dsync.NewMutex(c, fmt.Sprintf("b77-%d", i), dsync.WithTTL(10*time.Minute))
			go func() {
				ok, err := mu.TryLock(ctx)
				if ok {
					t.Error("locked without a reply")
				}
				errs <- err
			}()
		}
		for range n {
			require.ErrorIs(t, <-errs, context.DeadlineExceeded)
		}
		p.Release()
		for i := range n {
			freed(t, w.server, fmt.Sprintf("b77-%d", i))
		}
		require.Positive(t, m.count("acquire"), "some did run")
		require.Zero(t, m.count("renew"))
	})
}

// B78: canceled within the first milliseconds, Lock either holds, or has left nothing behind that lives or is renewed.
func TestScenarioB78InterruptedAcquireStartsNoWatchdog(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		p := redistest.NewProxy(t, w.server.Addr())
		c := w.clientAt(t, p.Addr())
		w.warm(t, c)
		m := watch(t, w.server)
		held, ended := 0, 0
		for _, delay := range []time.Duration{0, 2 * time.Millisecond} {
			p.SetDelay(delay, delay)
			for i := range rounds(60, 2500) {
				name := fmt.Sprintf("b78-%v-%d", delay, i)
				mu := dsync.NewMutex(c, name, dsync.WithTTL(10*time.Minute))
				ctx, cancel := context.WithTimeout(within(t), time.Duration(rand.IntN(5000))*time.Microsecond)
				err := mu.Lock(ctx)
				cancel()
				if err == nil {
					held++
					require.NotEmpty(t, holder(w.server, name))
					require.Equal(t, lastFence(w.server, name), mu.Fence())
					require.NoError(t, mu.Unlock(within(t)))
				} else {
					ended++
					require.ErrorIs(t, err, context.DeadlineExceeded)
					require.ErrorIs(t, mu.Unlock(within(t)), dsync.ErrNotHeld)
				}
				freed(t, w.server, name)
			}
		}
		require.Zero(t, m.count("renew"))
		t.Logf("%d held, %d ended before", held, ended)
	})
}

// B80: a waiter comes back when its context ends, at once: not even a server that is stopped can keep it. Its place goes, too.
func TestScenarioB80ContextEndsTheWait(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		a := dsync.NewMutex(w.client(t), "b80", dsync.WithTTL(time.Minute))
		require.NoError(t, a.Lock(within(t)))
		c := w.client(t)
		w.warm(t, c)
		ctx, cancel := context.WithCancel(within(t))
		got := locking(ctx, dsync.NewMutex(c, "b80", dsync.WithTTL(time.Hour)))
		queued(t, a, 1)
		w.server.Pause()
		cancel()
		err := receive(t, "the end of Lock", got)
		w.server.Resume()
		require.ErrorIs(t, err, context.Canceled)
		queued(t, a, 0)
		require.NoError(t, a.Unlock(within(t)))
	})
}

// B81: a waiter gives up at any instant between its first command and its grant, every other time with its commands' connections cut: its place goes, and a
// grant that crosses is handed on. Its lease of ten minutes would keep the next one waiting.
func TestScenarioB81CanceledWaiterLeavesNoPlace(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		p := redistest.NewProxy(t, w.server.Addr())
		cw, cn := w.split(t, p.Addr(), w.server.Addr()), w.client(t)
		w.warm(t, cw)
		w.warm(t, cn)
		ca := w.client(t)
		granted := 0
		for i := range rounds(40, 2000) {
			name := fmt.Sprintf("b81-%d", i)
			a, waiter := dsync.NewMutex(ca, name), dsync.NewMutex(cw, name, dsync.WithTTL(10*time.Minute))
			next := dsync.NewMutex(cn, name)
			require.NoError(t, a.Lock(within(t)))
			ctx, cancel := context.WithCancel(within(t))
			got := locking(ctx, waiter)
			behind := locking(within(t), next)
			if i%4 < 2 {
				eventuallyQuiet(t, w.server, key(name), 2)
			}
			var wg sync.WaitGroup
			wg.Go(func() {
				<-time.After(time.Duration(rand.IntN(4000)) * time.Microsecond) // any instant around the grant
				if i%2 == 0 {
					p.CutAll()
				}
				cancel()
			})
			require.NoError(t, a.Unlock(within(t)))
			wg.Wait()
			if err := <-got; err == nil {
				granted++
				require.NoError(t, waiter.Unlock(within(t)))
			} else {
				require.ErrorIs(t, err, context.Canceled)
			}
			require.NoError(t, <-behind)
			require.NoError(t, next.Unlock(within(t)))
			queued(t, a, 0)
			freed(t, w.server, name)
		}
		t.Logf("%d granted before the cancel", granted)
	})
}

// B82: Unlock with a context that has ended releases all the same, and says what it knows; Do does as well.
func TestScenarioB82UnlockWithADeadContextReleases(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		mu, next := dsync.NewMutex(w.client(t), "b82", dsync.WithTTL(10*time.Minute)), dsync.NewMutex(w.client(t), "b82")
		for range 20 {
			ctx, cancel := context.WithCancel(within(t))
			require.NoError(t, mu.Lock(ctx))
			cancel()
			if err := mu.Unlock(ctx); err != nil {
				require.ErrorIs(t, err, dsync.ErrUnconfirmed)
				require.ErrorIs(t, err, context.Canceled)
			}
			require.NoError(t, next.Lock(within(t)))
			require.NoError(t, next.Unlock(within(t)))

			ctx, cancel = context.WithCancel(within(t))
			require.ErrorIs(t, mu.Do(ctx, func(ctx context.Context) error {
				cancel()
				return ctx.Err()
			}), context.Canceled)
			require.NoError(t, next.Lock(within(t)))
			require.NoError(t, next.Unlock(within(t)))
		}
	})
}

// B83: with a context that has ended nothing is sent, made or run.
func TestScenarioB83EndedContextSendsNothing(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		c := w.client(t)
		w.warm(t, c)
		canceled, cancel := context.WithCancel(within(t))
		cancel()
		past, cancel := context.WithDeadline(within(t), time.Now().Add(-time.Hour))
		defer cancel()
		fn := func(context.Context) error {
			t.Error("it ran")
			return nil
		}
		before := calls(w.server)
		for _, ctx := range []context.Context{canceled, past} {
			mu := dsync.NewMutex(c, "b83")
			require.ErrorIs(t, mu.Lock(ctx), ctx.Err())
			ok, err := mu.TryLock(ctx)
			require.False(t, ok)
			require.ErrorIs(t, err, ctx.Err())
			require.ErrorIs(t, mu.Do(ctx, fn), ctx.Err())
			ok, err = mu.TryDo(ctx, fn)
			require.False(t, ok)
			require.ErrorIs(t, err, ctx.Err())
			require.ErrorIs(t, mu.Unlock(ctx), dsync.ErrNotHeld)
		}
		require.Equal(t, before, calls(w.server))
		require.Equal(t, int64(0), w.server.MustDo("EXISTS", key("b83")))
	})
}

// B84: a release that is stuck is told as unconfirmed, goes on by itself, and nothing is renewed meanwhile; so a second Unlock has nothing to do.
func TestScenarioB84StuckReleaseGoesOn(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		p := redistest.NewProxy(t, w.server.Addr())
		c := w.clientAt(t, p.Addr())
		w.warm(t, c)
		m := watch(t, w.server)
		mu := dsync.NewMutex(c, "b84", dsync.WithTTL(10*time.Minute))
		short := dsync.NewMutex(c, "b84-short", dsync.WithTTL(time.Second)) // would be renewed while the release is stuck
		require.NoError(t, mu.Lock(within(t)))
		require.NoError(t, short.Lock(within(t)))
		p.HoldUp()
		before := m.count("renew")
		for _, mu := range []*dsync.Mutex{mu, short} {
			ctx, cancel := context.WithTimeout(within(t), 50*time.Millisecond)
			err := mu.Unlock(ctx)
			cancel()
			require.ErrorIs(t, err, dsync.ErrUnconfirmed)
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.ErrorIs(t, mu.Unlock(within(t)), dsync.ErrNotHeld)
			require.Zero(t, mu.Remaining())
		}
		<-time.After(1300 * time.Millisecond) // a command counts as unanswered after a second, and the next one goes out
		p.Release()
		freed(t, w.server, "b84")
		freed(t, w.server, "b84-short")
		require.Zero(t, m.renewals("b84"))
		require.LessOrEqual(t, m.count("renew"), before+1, "one may have been on its way when Unlock was called")
	})
}

// B86: whatever ends a wait, and be it at the very instant of the grant: nil means held, an error means that nothing is held, and then Unlock
// takes nothing from anybody.
func TestScenarioB86NilMeansHeld(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		ca, cb := w.client(t), w.client(t)
		w.warm(t, cb)
		granted, ended := 0, 0
		// wants is the error of a wait that ended before; nil: it asks anew and is always granted.
		round := func(t *testing.T, name string, c *dsync.Client, wants error, abort func(cancel func())) {
			a, b := dsync.NewMutex(ca, name, dsync.WithTTL(10*time.Minute)), dsync.NewMutex(c, name, dsync.WithTTL(10*time.Minute))
			require.NoError(t, a.Lock(within(t)))
			ctx, cancel := context.WithCancel(within(t))
			defer cancel()
			got := locking(ctx, b)
			eventuallyQuiet(t, w.server, key(name), 1)
			start := make(chan struct{})
			var wg sync.WaitGroup
			wg.Go(func() {
				<-start
				<-time.After(time.Duration(rand.IntN(800)) * time.Microsecond) // any instant around the grant
				abort(cancel)
			})
			close(start)
			err := a.Unlock(within(t))
			if err != nil {
				require.ErrorIs(t, err, dsync.ErrLost) // where the abort is a DEL
			}
			wg.Wait()
			if err := receive(t, "the end of Lock", got); err == nil {
				granted++
				if wants != nil || holder(w.server, name) != "" { // a DEL may come right after the grant
					require.Equal(t, b.Fence(), lastFence(w.server, name))
					require.NotEmpty(t, holder(w.server, name))
				}
				if err := b.Unlock(within(t)); wants != nil {
					require.NoError(t, err)
				}
			} else {
				ended++
				require.NotNil(t, wants, "%v", err)
				require.ErrorIs(t, err, wants)
				third := dsync.NewMutex(ca, name)
				require.NoError(t, third.Lock(within(t)))
				require.ErrorIs(t, b.Unlock(within(t)), dsync.ErrNotHeld)
				require.NoError(t, third.Unlock(within(t)))
			}
			freed(t, w.server, name)
		}
		t.Run("cancel", func(t *testing.T) {
			for i := range rounds(40, 2000) {
				round(t, fmt.Sprintf("b86-cancel-%d", i), cb, context.Canceled, func(cancel func()) { cancel() })
			}
		})
		t.Run("close", func(t *testing.T) {
			for i := range rounds(5, 200) {
				c := w.client(t)
				w.warm(t, c)
				var closed sync.WaitGroup
				round(t, fmt.Sprintf("b86-close-%d", i), c, dsync.ErrClosed, func(func()) {
					closed.Go(func() { _ = c.Close(within(t)) })
				})
				closed.Wait()
			}
		})
		t.Run("place-lost", func(t *testing.T) {
			for i := range rounds(5, 200) {
				name := fmt.Sprintf("b86-place-%d", i)
				round(t, name, cb, nil, func(func()) { w.server.MustDo("DEL", key(name)) })
			}
		})
		t.Logf("%d granted, %d ended before", granted, ended)
	})
}

// B88: ctx bounds the wait only. The hold goes on and is renewed after its end, without a deadline or cancellation of it.
func TestScenarioB88ContextDoesNotBoundTheHold(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		const ttl = 1500 * time.Millisecond
		m := watch(t, w.server)
		c := w.client(t)
		timed, cancelTimed := context.WithTimeout(within(t), time.Second)
		defer cancelTimed()
		canceled, cancel := context.WithCancel(within(t))
		a, b := dsync.NewMutex(c, "b88-timed", dsync.WithTTL(ttl)), dsync.NewMutex(c, "b88-canceled", dsync.WithTTL(ttl))
		require.NoError(t, a.Lock(timed))
		require.NoError(t, b.Lock(canceled))
		cancel()
		receive(t, "the deadline", timed.Done())
		for _, name := range []string{"b88-timed", "b88-canceled"} {
			before := m.renewals(name)
			eventually(t, "a renewal after the end of the context", func() bool { return len(m.seen("renew", key(name))) > before })
			require.True(t, strings.HasPrefix(holder(w.server, name), strings.Split(holder(w.server, "b88-timed"), ":")[0]))
		}
		require.NoError(t, a.Unlock(within(t)))
		require.NoError(t, b.Unlock(within(t)))
	})
}
