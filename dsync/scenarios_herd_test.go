package dsync_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/e51fe0e6/dsync/dsync"
)

// B54: after FLUSHALL, and after the subscription is cut, under many holds and waits of one process: each hold is told its loss once, each
// waiter is served, and the command rate is again that of the renewals.
func TestScenarioB54NoCommandLoopAfterAFlush(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		const names, ttl = 30, 1500 * time.Millisecond
		lost := make(chan string, 10*names)
		c := w.client(t, dsync.WithHooks(dsync.Hooks{Lost: func(i dsync.LostInfo) { lost <- i.Name }}))
		w.warm(t, c)
		other := w.client(t)
		var held, theirs, waits []*dsync.Mutex
		var got []<-chan error
		for i := range names {
			mine, his := fmt.Sprintf("mine-%d", i), fmt.Sprintf("his-%d", i)
			held = append(held, dsync.NewMutex(c, mine, dsync.WithTTL(ttl)))
			theirs = append(theirs, dsync.NewMutex(other, his, dsync.WithTTL(10*time.Minute), dsync.WithoutRenewal()))
			waits = append(waits, dsync.NewMutex(c, his, dsync.WithTTL(ttl)))
			require.NoError(t, held[i].Lock(within(t)))
			require.NoError(t, theirs[i].Lock(within(t)))
			got = append(got, locking(within(t), waits[i]))
			queued(t, theirs[i], 1)
		}
		w.server.MustDo("CLIENT", "KILL", "TYPE", "pubsub")
		w.server.MustDo("FLUSHALL")
		told := map[string]int{}
		for _, done := range got {
			require.NoError(t, <-done)
		}
		for range names {
			told[receive(t, "the hook", lost)]++
		}
		for i, mu := range held {
			require.True(t, isLost(mu))
			require.Equal(t, 1, told[mu.Name()])
			require.ErrorIs(t, theirs[i].Unlock(within(t)), dsync.ErrLost)
		}
		before, start := calls(w.server), time.Now()
		<-time.After(time.Second) // for a loop to show
		// Each of the new holds is renewed in each third of its lease, and the losses may be cleaned up.
		require.LessOrEqual(t, calls(w.server)-before, atMost(names, start, ttl/3))
		for i := range names {
			require.ErrorIs(t, held[i].Unlock(within(t)), dsync.ErrLost)
			if err := waits[i].Unlock(within(t)); err != nil {
				require.ErrorIs(t, err, dsync.ErrLost) // a slow machine
			}
		}
	})
}

// B55: a waiter costs one command in each period, with the channel as without it.
func TestScenarioB55WaitingDoesNotSpin(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		const ttl = 600 * time.Millisecond
		w.server.MustDo("ACL", "SETUSER", "deaf", "on", ">pw", "~*", "resetchannels", "+@all")
		for mode, c := range map[string]*dsync.Client{"subscribed": w.client(t), "re-checks only": w.asUser(t, "deaf")} {
			t.Run(mode, func(t *testing.T) {
				a := dsync.NewMutex(w.client(t), "b55", dsync.WithTTL(10*time.Minute), dsync.WithoutRenewal())
				require.NoError(t, a.Lock(within(t)))
				got := locking(within(t), dsync.NewMutex(c, "b55", dsync.WithTTL(ttl)))
				queued(t, a, 1)
				before, start := calls(w.server), time.Now()
				<-time.After(time.Second) // for it to spin in
				stillWaits(t, got)
				require.LessOrEqual(t, calls(w.server)-before, atMost(1, start, ttl/3))
				require.NoError(t, a.Unlock(within(t)))
				require.NoError(t, <-got)
				w.server.MustDo("DEL", key("b55"))
			})
		}
	})
}

// B56: (a) hundreds of goroutines in a few processes cost two commands for each turn of a process at most, and none for those who wait; (b) after
// a restart of the server all come back, without a storm. (TestMutexContendedAcquisitionCostsTwoCalls has (a) for many processes.)
func TestScenarioB56WaitersDoNotStampede(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		run := func(t *testing.T, name string, processes, goroutines int, disturb func()) {
			a := dsync.NewMutex(w.client(t), name, dsync.WithTTL(time.Minute))
			require.NoError(t, a.Lock(within(t)))
			ctx := within(t)
			var wg sync.WaitGroup
			for i := range processes {
				c := w.client(t)
				w.warm(t, c)
				for range goroutines {
					mu := dsync.NewMutex(c, name, dsync.WithTTL(time.Minute))
					wg.Go(func() {
						if err := mu.Lock(ctx); err != nil {
							t.Error(err)
							return
						}
						if err := mu.Unlock(ctx); err != nil && !errors.Is(err, dsync.ErrUnconfirmed) {
							t.Error(err)
						}
					})
				}
				eventuallyQuiet(t, w.server, key(name), i+1)
			}
			disturb()
			before, start := calls(w.server), time.Now()
			_ = a.Unlock(within(t)) // lost, if the server was restarted
			wg.Wait()
			got := calls(w.server) - before
			// While it waits each process asks every three seconds; trying again after an outage has one second at the longest.
			require.LessOrEqual(t, got, int64(2*processes*goroutines)+atMost(processes, start, time.Second))
		}
		t.Run("hand-overs", func(t *testing.T) { run(t, "b56-a", 5, rounds(50, 500), func() {}) })
		t.Run("restart", func(t *testing.T) { run(t, "b56-b", rounds(20, 50), 1, w.server.Restart) })
	})
}

// B58, the half that needs no cluster: an unlock for which nobody waits publishes nothing, and one for which somebody waits publishes once.
func TestScenarioB58UnlockWithoutWaiterPublishesNothing(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		c, other := w.client(t), w.client(t)
		w.warm(t, c)
		w.warm(t, other)
		a, b := dsync.NewMutex(c, "b58", dsync.WithTTL(time.Minute)), dsync.NewMutex(other, "b58", dsync.WithTTL(time.Minute))
		m := watch(t, w.server)
		published := func(what string) int {
			n := 0
			m.count()
			for _, line := range m.seen("PUBLISH") {
				if _, message, _ := strings.Cut(line, `" "dsync:c:`); strings.ContainsAny(message[strings.Index(message, `" "`)+3:][:1], what) {
					n++
				}
			}
			return n
		}
		for range 100 {
			require.NoError(t, a.Lock(within(t)))
			require.NoError(t, a.Unlock(within(t)))
		}
		// Anything but an echo ("e"), by which a client that has heard nothing for a while looks after its subscription.
		require.Zero(t, published("abcdfghijklmnopqrstuvwxyz"))
		require.NoError(t, a.Lock(within(t)))
		got := locking(within(t), b)
		queued(t, a, 1)
		require.NoError(t, a.Unlock(within(t)))
		require.NoError(t, <-got)
		require.Equal(t, 1, published("g"), "the grant")
		require.NoError(t, b.Unlock(within(t)))
	})
}

// B59: a read-only server is asked again with back-off, by many callers on many names; they are served once it takes writes again.
func TestScenarioB59ReadOnlyServerIsNotHammered(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		const names = 20
		c := w.client(t)
		w.warm(t, c)
		w.server.MustDo("REPLICAOF", "127.0.0.1", "1") // nobody is there: it stays as it is, and takes no writes
		before, start := calls(w.server), time.Now()
		var got []<-chan error
		for i := range names {
			got = append(got, locking(within(t), dsync.NewMutex(c, fmt.Sprintf("b59-%d", i), dsync.WithTTL(time.Minute))))
		}
		short, cancel := context.WithTimeout(within(t), 1500*time.Millisecond) // for them to hammer in
		defer cancel()
		err := dsync.NewMutex(c, "b59-short").Lock(short)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorIs(t, err, dsync.ErrUnavailable)
		require.ErrorContains(t, err, "READONLY")
		// Six tries lead up to the longest pause of half a second at least.
		require.LessOrEqual(t, calls(w.server)-before, 2*atMost(names+1, start, 500*time.Millisecond))
		w.server.MustDo("REPLICAOF", "NO", "ONE")
		for _, done := range got {
			require.NoError(t, <-done)
		}
	})
}
