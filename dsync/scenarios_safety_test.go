package dsync_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/e51fe0e6/dsync/driver"
	"github.com/e51fe0e6/dsync/dsync"
	"github.com/e51fe0e6/dsync/internal/redistest"
	"github.com/e51fe0e6/dsync/scripts"
)

// B01: an acquire that runs after its caller gave up, and after the clean-up where that can overtake it, leaves no hold that anybody
// would have to wait for; with a lease of ten minutes expiry cannot help.
func TestScenarioB01CanceledAcquireLeavesNoLiveLock(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		p := redistest.NewProxy(t, w.server.Addr())
		c := w.clientAt(t, p.Addr())
		w.warm(t, c)
		b := dsync.NewMutex(w.client(t), "b01")
		m := watch(t, w.server)
		ctx, cancel := context.WithCancel(within(t))
		p.HoldExisting()
		done := locking(ctx, dsync.NewMutex(c, "b01", dsync.WithTTL(10*time.Minute)))
		eventually(t, "the held acquire", func() bool { up, _ := p.Buffered(); return up > 0 })
		cancel()
		require.ErrorIs(t, <-done, context.Canceled)
		if w.dialer.name == "goredis" { // it cleans up on a second connection; rueidis has one, and keeps the order
			eventually(t, "the clean-up", func() bool { return len(m.seen("release", key("b01"))) > 0 })
		}
		require.NoError(t, b.Lock(within(t)))
		require.NoError(t, b.Unlock(within(t)))
		before := m.count("acquire", key("b01"))
		p.ReleaseExisting()
		eventually(t, "the late acquire", func() bool { return len(m.seen("acquire", key("b01"))) > before })
		require.NoError(t, b.Lock(within(t)), "A's acquire left nothing that lives")
		require.NoError(t, b.Unlock(within(t)))
		require.Zero(t, m.renewals("b01"))
	})
}

// B02: a renewal that finds its lease gone does not make a new one: the hold is lost, by SIGSTOP (the other half is in
// TestMutexStoppedProcessHasNoStaleSuccess) as by DEL, and fences go on increasing.
func TestScenarioB02RenewalDoesNotRecreateALapsedLease(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		t.Run("stopped", func(t *testing.T) {
			a := w.spawn(t, "lose", "b02-stopped")
			first := int64(atoi(a.expect("held")))
			a.stop()
			b := dsync.NewMutex(w.client(t), "b02-stopped")
			require.NoError(t, b.Lock(within(t)))
			second := b.Fence()
			require.Greater(t, second, first)
			require.NoError(t, b.Unlock(within(t)))
			a.resume()
			a.expect("gone")
			require.Empty(t, holder(w.server, "b02-stopped"))
			a.tell("unlock")
			require.Contains(t, a.expect("unlocked"), "lost")
			require.Empty(t, holder(w.server, "b02-stopped"))
			require.NoError(t, b.Lock(within(t)))
			require.Greater(t, b.Fence(), second)
			require.NoError(t, b.Unlock(within(t)))
		})
		t.Run("deleted", func(t *testing.T) {
			m := watch(t, w.server)
			reason := make(chan string, 1)
			c := w.client(t, dsync.WithHooks(dsync.Hooks{Lost: func(i dsync.LostInfo) { reason <- i.Reason }}))
			a, b := dsync.NewMutex(c, "b02-deleted", dsync.WithTTL(3*time.Second)), dsync.NewMutex(w.client(t), "b02-deleted")
			require.NoError(t, a.Lock(within(t)))
			first := a.Fence()
			w.server.MustDo("DEL", key("b02-deleted"))
			receive(t, "the loss", a.Lost())
			require.Equal(t, "denied by the server", receive(t, "the hook", reason), "the first renewal found out, not the end of the lease")
			require.Equal(t, 1, m.renewals("b02-deleted"))
			require.Empty(t, holder(w.server, "b02-deleted"))
			require.ErrorIs(t, a.Unlock(within(t)), dsync.ErrLost)
			require.NoError(t, b.Lock(within(t)))
			require.Greater(t, b.Fence(), first)
			require.NoError(t, b.Unlock(within(t)))
		})
	})
}

// B03: an Unlock around the instant of expiry never ends the next owner's hold: each later holder's own Unlock finds its hold in Redis.
func TestScenarioB03ReleaseAtExpiryLeavesTheNextOwner(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		const ttl = 120 * time.Millisecond
		ctx := within(t)
		p := redistest.NewProxy(t, w.server.Addr())
		ca, cb, cc := w.clientAt(t, p.Addr()), w.client(t), w.client(t)
		w.warm(t, cb)
		var wg sync.WaitGroup
		for i := range 4 {
			name := fmt.Sprintf("b03-%d", i)
			a := dsync.NewMutex(ca, name, dsync.WithTTL(ttl), dsync.WithoutRenewal())
			b, c := dsync.NewMutex(cb, name), dsync.NewMutex(cc, name)
			g := &gate{} // of B and C, whose leases are long: they are never lost
			visit := func(m *dsync.Mutex) {
				g.enter(m.Fence())
				g.leave()
				if err := m.Unlock(ctx); err != nil {
					t.Errorf("the hold was taken away: %v", err)
				}
			}
			wg.Go(func() {
				for range rounds(8, 300) {
					if err := a.Lock(ctx); err != nil {
						t.Error(err)
						return
					}
					locked := time.Now()
					p.SetDelay(time.Duration(rand.IntN(15))*time.Millisecond, 0) // more than the margin: some releases come late
					var others sync.WaitGroup
					others.Go(func() {
						if err := b.Lock(ctx); err != nil {
							t.Error(err)
							return
						}
						visit(b)
					})
					done := make(chan struct{})
					others.Go(func() {
						tick := time.NewTicker(time.Millisecond)
						defer tick.Stop()
						for range tick.C {
							select {
							case <-done:
								return
							default:
							}
							ok, err := c.TryLock(ctx)
							if err != nil {
								t.Error(err)
							}
							if ok {
								visit(c)
							}
						}
					})
					// The instant of expiry is what this is about.
					<-time.After(time.Until(locked.Add(ttl - 8*time.Millisecond + time.Duration(rand.IntN(10))*time.Millisecond)))
					if err := a.Unlock(ctx); err != nil && !errors.Is(err, dsync.ErrLost) && !errors.Is(err, dsync.ErrUnconfirmed) {
						t.Error(err)
					}
					close(done)
					others.Wait()
				}
			})
			t.Cleanup(func() { g.check(t) })
		}
		wg.Wait()
	})
}

// B04: wherever a process is killed or its connection cut, no key stays without an expiry, and every name can be locked again.
func TestScenarioB04CrashLeavesNoKeyForEver(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		const names, all = 50, "50"
		for range rounds(4, 60) {
			a, b := w.spawn(t, "spin", all), w.spawn(t, "spin", all)
			a.expect("spinning")
			b.expect("spinning")
			for range 10 {
				w.server.MustDo("CLIENT", "KILL", "TYPE", "normal")
				everythingExpires(t, w.server)
			}
			require.NoError(t, a.cmd.Process.Kill())
			require.NoError(t, b.cmd.Process.Kill())
			everythingExpires(t, w.server)
		}
		c := w.client(t)
		for i := range names {
			mu := dsync.NewMutex(c, fmt.Sprintf("spin-%d", i))
			require.NoError(t, mu.Lock(within(t)))
			require.NoError(t, mu.Unlock(within(t)))
		}
	})
}

// B06 (a): a grant whose reply took longer than the lease is not handed out: Lock gives it back, asks anew, and counts from before it asked.
func TestScenarioB06LateGrantIsNotHandedOut(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		p := redistest.NewProxy(t, w.server.Addr())
		c := w.clientAt(t, p.Addr())
		w.warm(t, c)
		// 300 ms would do, but a slow machine must not lose the second hold before it is looked at.
		mu, other := dsync.NewMutex(c, "b06", dsync.WithTTL(time.Second)), dsync.NewMutex(w.client(t), "b06")
		p.HoldDown()
		done := locking(within(t), mu)
		eventually(t, "the grant", func() bool { return holder(w.server, "b06") != "" })
		first := lastFence(w.server, "b06")
		eventually(t, "its expiry", func() bool {
			state, err := other.Inspect(t.Context())
			return err == nil && state.Holder == nil
		})
		stillWaits(t, done)
		p.Release()
		require.NoError(t, <-done)
		require.Greater(t, mu.Fence(), first, "the first grant was void")
		if err := mu.Unlock(within(t)); err != nil {
			require.ErrorIs(t, err, dsync.ErrLost) // a slow machine
		}

		slow := dsync.NewMutex(c, "b06-slow", dsync.WithTTL(time.Minute))
		p.SetDelay(50*time.Millisecond, 50*time.Millisecond)
		require.NoError(t, slow.Lock(within(t)))
		require.Less(t, slow.Remaining(), time.Minute-100*time.Millisecond, "the time under way is not part of the lease")
		require.NoError(t, slow.Unlock(within(t)))
	})
}

// B11: the grant lies in the socket of a stopped waiter until it has lapsed and a third process holds: the waiter does not take it
// for its own, and waits again. (TestMutexStoppedProcessHasNoStaleSuccess does not make sure that there was a grant.)
func TestScenarioB11StaleGrantIsNoSuccess(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		b := w.spawn(t, "hold", "b11", "2s")
		b.expect("ready")
		a, c := dsync.NewMutex(w.client(t), "b11"), dsync.NewMutex(w.client(t), "b11")
		require.NoError(t, a.Lock(within(t)))
		b.tell("lock")
		queued(t, a, 1)
		b.stop()
		mine := holder(w.server, "b11")
		require.NoError(t, a.Unlock(within(t)))
		token := holder(w.server, "b11")
		require.NotEmpty(t, token, "B was granted while it was stopped")
		require.NotEqual(t, mine, token)
		require.NoError(t, c.Lock(within(t)), "B's lease lapses")
		held := holder(w.server, "b11")
		b.resume()
		queued(t, c, 1) // B has read its grant, and asked anew
		require.Equal(t, held, holder(w.server, "b11"), "C is still the only holder")
		require.Empty(t, b.line, "B did not say that it holds")
		third := c.Fence()
		require.NoError(t, c.Unlock(within(t)))
		require.Greater(t, int64(atoi(strings.Fields(b.expect("held"))[0])), third)
	})
}

// B14: a renewal by a token that holds no more is refused, however often it comes, and leaves the holder's lease as it is.
func TestScenarioB14StaleRenewalExtendsNothing(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		p := redistest.NewProxy(t, w.server.Addr())
		c := w.clientAt(t, p.Addr())
		w.warm(t, c)
		m := watch(t, w.server)
		a := dsync.NewMutex(c, "b14", dsync.WithTTL(500*time.Millisecond))
		b := dsync.NewMutex(w.client(t), "b14", dsync.WithTTL(time.Minute), dsync.WithoutRenewal())
		require.NoError(t, a.Lock(within(t)))
		stale := holder(w.server, "b14")
		p.HoldUp() // and with it the renewals
		receive(t, "the loss", a.Lost())
		require.NoError(t, b.Lock(within(t)))
		record := w.server.MustDo("HGET", key("b14"), "h")
		before := m.renewals("b14")
		p.Release()
		eventually(t, "a late renewal", func() bool { return len(m.seen("renew", key("b14"))) > before })
		require.ErrorIs(t, a.Unlock(within(t)), dsync.ErrLost)

		d, done, err := w.dialer.dial(w.server.Addr(), "", "")
		require.NoError(t, err)
		defer done()
		for range 20 {
			r, err := d.Exec(within(t), driver.Cmd{
				Script: scripts.Mutex,
				Keys:   []string{key("b14")},
				Args:   []string{scripts.Renew, stale, "", "600000", "0", "0", "", "dsync:c:", "", ""},
			})
			require.NoError(t, err)
			status, ok := r.Int(0)
			require.True(t, ok)
			require.EqualValues(t, scripts.NotYours, status)
			require.Equal(t, record, w.server.MustDo("HGET", key("b14"), "h"), "B's record, its deadline included, is as it was")
		}
		require.NoError(t, b.Unlock(within(t)))
	})
}
