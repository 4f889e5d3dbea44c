package dsync_test

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/e51fe0e6/dsync/dsync"
)

// B45: waiters that come and go leave no place that outlives its lease, so a head that is killed does not block those behind it.
func TestScenarioB45PlacesDoNotDriftIntoTheFuture(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		const ttl = 900 * time.Millisecond // a place lives as long: three periods of a third
		a := dsync.NewMutex(w.client(t), "b45", dsync.WithTTL(30*time.Second))
		require.NoError(t, a.Lock(within(t)))
		var wg sync.WaitGroup
		done := make(chan struct{})
		for range 5 {
			c := w.client(t)
			w.warm(t, c)
			mu := dsync.NewMutex(c, "b45", dsync.WithTTL(ttl))
			wg.Go(func() {
				for {
					select {
					case <-done:
						return
					default:
					}
					ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
					if err := mu.Lock(ctx); !errors.Is(err, context.DeadlineExceeded) {
						t.Errorf("Lock: %v", err)
					}
					cancel()
				}
			})
		}
		seen := 0
		for range rounds(50, 10_000) {
			state, err := a.Inspect(within(t))
			require.NoError(t, err)
			for _, place := range state.Queue {
				seen++
				require.LessOrEqual(t, place.Remaining, ttl, "by the server's clock")
			}
		}
		close(done)
		wg.Wait()
		require.Positive(t, seen)
		queued(t, a, 0)

		head := w.spawn(t, "hold", "b45", ttl.String())
		head.expect("ready")
		head.tell("lock")
		queued(t, a, 1)
		next := dsync.NewMutex(w.client(t), "b45")
		got := locking(within(t), next)
		queued(t, a, 2)
		require.NoError(t, head.cmd.Process.Kill())
		require.NoError(t, a.Unlock(within(t)))
		require.NoError(t, <-got)
		require.NoError(t, next.Unlock(within(t)))
	})
}

// B46: more dead waiters than one call may pass over are passed over all the same, and no place of theirs is left. A grant to any of them would
// be for ten minutes.
func TestScenarioB46ManyDeadWaitersAreSkipped(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		n := rounds(70, 200) // more than the 64 numbers that one call may pass
		a := dsync.NewMutex(w.client(t), "b46", dsync.WithTTL(time.Minute))
		require.NoError(t, a.Lock(within(t)))
		crowd := w.spawn(t, "crowd", "b46", strconv.Itoa(n))
		eventually(t, "all to have said that they hear", func() bool { // each does when it asks for the second time
			passable := 0
			for _, v := range fields(w.server, key("b46")) {
				if f := strings.Fields(v); len(f) == 6 && f[4] == "1" {
					passable++
				}
			}
			return passable == n
		})
		require.NoError(t, crowd.cmd.Process.Kill())
		eventually(t, "the server to notice", func() bool { return w.subscriptions() == 1 }) // A's
		c := w.client(t)
		w.warm(t, c)
		late := dsync.NewMutex(c, "b46")
		got := locking(within(t), late)
		eventuallyQuiet(t, w.server, key("b46"), n+1)
		require.NoError(t, a.Unlock(within(t)))
		require.NoError(t, <-got)
		require.NoError(t, late.Unlock(within(t)))
		all := fields(w.server, key("b46"))
		for i := 0; i < len(all); i += 2 {
			require.False(t, strings.HasPrefix(all[i], "q"), "the place %s is left", all[i])
		}
	})
}

// B47: the holder is killed, and no unlock is ever published: those first in the queue find out by themselves, and all are served in order, as
// many as they are.
func TestScenarioB47DeadHolderIsNoticedByTheQueue(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		for _, waiters := range []int{2, rounds(20, 100)} {
			t.Run(strconv.Itoa(waiters), func(t *testing.T) {
				name := fmt.Sprintf("b47-%d", waiters)
				a := w.spawn(t, "hold", name, "1s")
				a.expect("ready")
				a.tell("lock")
				a.expect("held")
				g := &gate{}
				order := make(chan int, waiters)
				ctx := within(t)
				var wg sync.WaitGroup
				for i := range waiters {
					c := w.client(t)
					w.warm(t, c)
					mu := dsync.NewMutex(c, name)
					wg.Go(func() {
						if err := mu.Lock(ctx); err != nil {
							t.Error(err)
							return
						}
						g.enter(mu.Fence())
						order <- i
						g.leave()
						if err := mu.Unlock(ctx); err != nil {
							t.Error(err)
						}
					})
					eventuallyQuiet(t, w.server, key(name), i+1)
				}
				require.NoError(t, a.cmd.Process.Kill())
				wg.Wait()
				g.check(t)
				for i := range waiters {
					require.Equal(t, i, <-order)
				}
				require.Empty(t, holder(w.server, name))
				queued(t, dsync.NewMutex(w.client(t), name), 0)
			})
		}
	})
}
