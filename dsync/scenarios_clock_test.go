package dsync_test

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/e51fe0e6/dsync/dsync"
	"github.com/e51fe0e6/dsync/internal/redistest"
)

// B89 (jumps of the server's clock) cannot be done to a real server here; the simulation does it.

// record returns what the first grant of the mutex wrote: its ttl, its deadline and when it was granted, all in ms of the server's clock. It
// reads it off the monitor, since on a slow machine a short lease may be over by the time one looks.
func record(t testing.TB, m *monitor, name string) (ttl, deadline, since int) {
	t.Helper()
	m.count()
	lines := m.seen("HSET", key(name), "h")
	require.NotEmpty(t, lines)
	f := strings.Fields(strings.Split(lines[0], `"`)[7])
	require.Len(t, f, 5)
	return atoi(f[1]), atoi(f[2]), atoi(f[3]) / 1000
}

// B91: a TTL of nothing, or less, is refused before any command by every method that acquires, never taken for "for ever" or "delete now". (There is
// no Extend.)
func TestScenarioB91NoTTLIsRefused(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		c := w.client(t)
		before := calls(w.server)
		for _, ttl := range []time.Duration{0, -1, -time.Second, -1 << 63} {
			mu := dsync.NewMutex(c, "b91", dsync.WithTTL(ttl))
			require.ErrorIs(t, mu.Lock(within(t)), dsync.ErrInvalidOption)
			_, err := mu.TryLock(within(t))
			require.ErrorIs(t, err, dsync.ErrInvalidOption)
			require.ErrorContains(t, err, ttl.String())
			require.ErrorIs(t, mu.Do(within(t), nil), dsync.ErrInvalidOption)
			require.ErrorIs(t, mu.Unlock(within(t)), dsync.ErrInvalidOption)
		}
		require.Equal(t, before, calls(w.server))
		require.Equal(t, int64(0), w.server.MustDo("DBSIZE"))
	})
}

// B92: what is below the minimum is told before any command; above it fractions of a millisecond are rounded up, and the server gets integers.
func TestScenarioB92FractionsAreRoundedUp(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		c := w.client(t)
		m := watch(t, w.server)
		before := calls(w.server)
		for _, ttl := range []time.Duration{1, 999 * time.Microsecond, time.Millisecond, 1500 * time.Microsecond, 100*time.Millisecond - 1} {
			err := dsync.NewMutex(c, "b92", dsync.WithTTL(ttl)).Lock(within(t))
			require.ErrorIs(t, err, dsync.ErrInvalidOption)
			require.ErrorContains(t, err, "100ms", "the rule is told")
		}
		require.Equal(t, before, calls(w.server))
		for ttl, want := range map[time.Duration]int{
			100 * time.Millisecond:      100,
			100*time.Millisecond + 1:    101,
			1999900 * time.Microsecond:  2000,
			time.Second + time.Second/3: 1334,
		} {
			name := fmt.Sprint("b92-", ttl)
			require.NoError(t, dsync.NewMutex(c, name, dsync.WithTTL(ttl), dsync.WithoutRenewal()).Lock(within(t)))
			got, deadline, since := record(t, m, name)
			require.Equal(t, want, got)
			require.Equal(t, since+want, deadline)
		}
	})
}

// B93: a lease is as long as was said, to the millisecond, from the shortest to the longest, also after a renewal; what would overflow is refused.
func TestScenarioB93UnitsAreRight(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		c := w.client(t)
		m := watch(t, w.server)
		for _, ttl := range []time.Duration{100 * time.Millisecond, time.Second, time.Minute, 30 * 24 * time.Hour, 366 * 24 * time.Hour} {
			name := fmt.Sprint("b93-", ttl)
			mu := dsync.NewMutex(c, name, dsync.WithTTL(ttl))
			require.NoError(t, mu.Lock(within(t)))
			got, deadline, since := record(t, m, name)
			require.EqualValues(t, ttl.Milliseconds(), got)
			require.Equal(t, since+got, deadline)
			require.LessOrEqual(t, mu.Remaining(), ttl)
			state, err := mu.Inspect(within(t))
			require.NoError(t, err)
			if state.Holder != nil {
				require.LessOrEqual(t, state.Holder.Remaining, ttl)
			}
			// The key outlives the lease by the retention of the fence: a minute, or as long as the lease.
			left := w.server.MustDo("PTTL", key(name))
			require.LessOrEqual(t, left, (ttl + max(ttl, time.Minute)).Milliseconds())
			require.Greater(t, left, (max(ttl, time.Minute) / 2).Milliseconds())
		}
		eventually(t, "a renewal", func() bool { return len(m.seen("renew", key("b93-1s"))) > 0 })
		m.count()
		if record, ok := w.server.MustDo("HGET", key("b93-1s"), "h").(string); ok {
			deadline := atoi(strings.Fields(record)[2])
			now := atoi(w.server.MustDo("TIME").([]any)[0].(string))*1000 + 1000 // the second may have just begun
			require.LessOrEqual(t, deadline, now+1000)
		}
		for _, ttl := range []time.Duration{5 * time.Millisecond, 366*24*time.Hour + 1, 1<<63 - 1} {
			require.ErrorIs(t, dsync.NewMutex(c, "b93", dsync.WithTTL(ttl)).Lock(within(t)), dsync.ErrInvalidOption)
		}
	})
}

// B94: however often a lease was renewed, it never lasts longer than its TTL, and so a killed holder makes nobody wait for what piled up.
func TestScenarioB94RenewalsDoNotAddUp(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		const ttl = 300 * time.Millisecond
		m := watch(t, w.server)
		a := w.spawn(t, "hold", "b94", ttl.String())
		a.expect("ready")
		a.tell("lock")
		a.expect("held")
		b := dsync.NewMutex(w.client(t), "b94")
		for len(m.seen("renew", key("b94"))) < rounds(6, 100) {
			state, err := b.Inspect(within(t))
			require.NoError(t, err)
			if state.Holder != nil {
				require.LessOrEqual(t, state.Holder.Remaining, ttl)
			}
			<-time.After(5 * time.Millisecond) // leave the server some room
			if state.Holder == nil {
				break // a slow machine has lost the lease
			}
		}
		require.NoError(t, a.cmd.Process.Kill())
		require.NoError(t, b.Lock(within(t)))
		require.NoError(t, b.Unlock(within(t)))
	})
}

// B95: the period of renewal follows from the TTL and cannot be set to nonsense. It leaves room for two failed attempts and latency; switched off
// means that nothing is renewed, and that the hold ends.
func TestScenarioB95RenewalLeavesRoomForFailures(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		p := redistest.NewProxy(t, w.server.Addr())
		c := w.clientAt(t, p.Addr())
		m := watch(t, w.server)
		once := dsync.NewMutex(c, "b95-once", dsync.WithTTL(time.Second), dsync.WithoutRenewal())
		require.NoError(t, once.Lock(within(t)))
		mu := dsync.NewMutex(c, "b95", dsync.WithTTL(3*time.Second))
		require.NoError(t, mu.Lock(within(t)))
		p.SetDelay(25*time.Millisecond, 25*time.Millisecond)
		renewal := func(request []byte) bool {
			return bytes.Contains(request, []byte("renew")) && bytes.Contains(request, []byte(key("b95")))
		}
		first, second := p.NeverDeliver(renewal), p.NeverDeliver(renewal)
		receive(t, "the first fault", first)
		receive(t, "the second fault", second)
		eventually(t, "the third attempt", func() bool { return len(m.seen("renew", key("b95"))) > 0 })
		receive(t, "the end of what is not renewed", once.Lost())
		require.Zero(t, m.renewals("b95-once"))
		require.ErrorIs(t, once.Unlock(within(t)), dsync.ErrLost)
		require.False(t, isLost(mu))
		require.NoError(t, mu.Unlock(within(t)))
	})
}

// B101: the wait is bounded by ctx alone: many times the waiter's own TTL do not end it, and the end of ctx does, also between two attempts.
func TestScenarioB101WaitIsNotCappedByTheTTL(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		a := dsync.NewMutex(w.client(t), "b101", dsync.WithTTL(time.Minute))
		require.NoError(t, a.Lock(within(t)))
		c := w.client(t)
		b := dsync.NewMutex(c, "b101", dsync.WithTTL(150*time.Millisecond))
		m := watch(t, w.server)
		got := locking(within(t), b)
		eventually(t, "ten re-checks, more than three TTLs", func() bool { return len(m.seen("acquire", key("b101"))) >= 10 })
		stillWaits(t, got)
		require.NoError(t, a.Unlock(within(t)))
		require.NoError(t, <-got)
		if err := b.Unlock(within(t)); err != nil {
			require.ErrorIs(t, err, dsync.ErrLost) // a slow machine
		}

		require.NoError(t, a.Lock(within(t)))
		other := dsync.NewMutex(c, "b101", dsync.WithTTL(time.Hour)) // re-checks each 3 s only
		for range 5 {
			ctx, cancel := context.WithTimeout(within(t), 30*time.Millisecond)
			start := time.Now()
			before := m.count("acquire", key("b101"))
			err := other.Lock(ctx)
			cancel()
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.LessOrEqual(t, int64(m.count("acquire", key("b101"))-before), atMost(1, start, 3*time.Second))
		}
		require.NoError(t, a.Unlock(within(t)))
	})
}
