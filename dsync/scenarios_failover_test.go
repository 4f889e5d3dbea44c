package dsync_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/e51fe0e6/dsync/dsync"
)

// B72: SCRIPT FLUSH before every step, in mid-wait and between renewals that leave in one pipeline: nothing is noticed but one more round trip.
func TestScenarioB72ScriptsAreLoadedAgain(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		c, other := w.client(t), w.client(t)
		w.warm(t, other)
		flush := func() { w.server.MustDo("SCRIPT", "FLUSH") }
		a, b := dsync.NewMutex(c, "b72"), dsync.NewMutex(other, "b72")
		for range 5 {
			flush()
			require.NoError(t, a.Lock(within(t)))
			flush()
			ok, err := b.TryLock(within(t))
			require.NoError(t, err)
			require.False(t, ok)
			flush()
			got := locking(within(t), b)
			queued(t, a, 1)
			flush()
			require.NoError(t, a.Unlock(within(t)))
			require.NoError(t, <-got)
			flush()
			require.NoError(t, b.Unlock(within(t)))
		}

		const names = 20
		m := watch(t, w.server)
		var held []*dsync.Mutex
		for i := range names {
			held = append(held, dsync.NewMutex(c, fmt.Sprintf("b72-%d", i), dsync.WithTTL(2*time.Second)))
			require.NoError(t, held[i].Lock(within(t)))
		}
		renewed := func() int { return int(w.server.CommandStats()["pexpireat"]) }
		before := renewed()
		flush()
		eventually(t, "all to be renewed", func() bool { return renewed() >= before+names })
		flush()
		before = renewed()
		eventually(t, "all to be renewed again", func() bool { return renewed() >= before+names })
		require.Positive(t, m.count("eval", "renew")+m.count("EVAL", "renew"), "a renewal found no script")
		for _, mu := range held {
			require.NoError(t, mu.Unlock(within(t)))
		}
	})
}

// B73, the half that needs no Sentinel: a demoted primary that keeps its connections answers READONLY. That is never "taken"; a renewal is
// tried again and succeeds after the promotion, or the hold is lost.
func TestScenarioB73DemotedPrimaryIsNoAnswer(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		failed := make(chan error, 1000)
		c := w.client(t, dsync.WithHooks(dsync.Hooks{RenewalFailed: func(i dsync.RenewalFailedInfo) { failed <- i.Err }}))
		w.warm(t, c)
		demote := func() { w.server.MustDo("REPLICAOF", "127.0.0.1", "1") }
		promote := func() { w.server.MustDo("REPLICAOF", "NO", "ONE") }
		a := dsync.NewMutex(c, "b73", dsync.WithTTL(3*time.Second))
		require.NoError(t, a.Lock(within(t)))
		demote()
		for _, name := range []string{"b73", "b73-free"} { // held and free: neither is known here
			ok, err := dsync.NewMutex(w.client(t), name).TryLock(within(t))
			require.False(t, ok)
			require.ErrorIs(t, err, dsync.ErrUnavailable)
			require.ErrorContains(t, err, "READONLY")
		}
		require.ErrorContains(t, receive(t, "the failed renewal", failed), "READONLY")
		promote()
		m := watch(t, w.server)
		eventually(t, "the renewal", func() bool { return len(m.seen("renew", key("b73"))) > 0 })
		require.NoError(t, a.Unlock(within(t)))

		short := dsync.NewMutex(c, "b73-short", dsync.WithTTL(300*time.Millisecond))
		require.NoError(t, short.Lock(within(t)))
		demote()
		receive(t, "the loss", short.Lost())
		promote()
		require.ErrorIs(t, short.Unlock(within(t)), dsync.ErrLost)
		require.NoError(t, short.Lock(within(t)))
		if err := short.Unlock(within(t)); err != nil {
			require.ErrorIs(t, err, dsync.ErrLost) // a slow machine
		}
	})
}
