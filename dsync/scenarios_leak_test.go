package dsync_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/e51fe0e6/dsync/dsync"
	"github.com/e51fe0e6/dsync/internal/redistest"
)

// journal is a log to look at.
type journal struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (j *journal) Write(p []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.Write(p)
}

func (j *journal) lines() []string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return strings.Split(strings.TrimSpace(j.text.String()), "\n")
}

func (j *journal) option() dsync.ClientOption {
	return dsync.WithLogger(slog.New(slog.NewTextHandler(j, nil)))
}

// connections is how many a server has been made, ever.
func connections(s *redistest.Server) int {
	return atoi(s.Info("stats")["total_connections_received"])
}

// B60: where SUBSCRIBE is refused, waiters do not dial again and again, it is logged once, and they get their locks by re-checks.
func TestScenarioB60RefusedSubscribeLeaksNoConnection(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		const names, ttl = 20, 900 * time.Millisecond
		w.server.MustDo("ACL", "SETUSER", "mute", "on", ">pw", "~*", "&*", "+@all", "-subscribe", "-ssubscribe", "-psubscribe")
		log := &journal{}
		c, holders := w.asUser(t, "mute", log.option()), w.client(t)
		var held []*dsync.Mutex
		var got []<-chan error
		for i := range names {
			held = append(held, dsync.NewMutex(holders, fmt.Sprintf("b60-%d", i)))
			require.NoError(t, held[i].Lock(within(t)))
			got = append(got, locking(within(t), dsync.NewMutex(c, held[i].Name(), dsync.WithTTL(ttl))))
			queued(t, held[i], 1)
		}
		m := watch(t, w.server)
		before := connections(w.server)
		eventually(t, "three re-checks of each", func() bool { return len(m.seen("acquire")) >= 3*names })
		// A pool may still grow by what it needs for commands that fall due together, once.
		require.LessOrEqual(t, connections(w.server)-before, names)
		for _, mu := range held {
			require.NoError(t, mu.Unlock(within(t)))
		}
		for _, done := range got {
			require.NoError(t, <-done)
		}
		require.Len(t, log.lines(), 1)
		require.Contains(t, log.lines()[0], "SUBSCRIBE")
	})
}

// B61: after short holds, lost ones, canceled waits, panics and a Close under blocked callers, all goroutines and connections are gone. It does not
// run beside others, since it counts.
func TestScenarioB61CloseLeavesNoGoroutine(t *testing.T) {
	onServer(t, func(t *testing.T, w *world) {
		defer everythingExpires(t, w.server)
		baseline := runtime.NumGoroutine()
		d, done, err := w.dialer.dial(w.server.Addr(), "", "")
		require.NoError(t, err)
		other, otherDone, err := w.dialer.dial(w.server.Addr(), "", "")
		require.NoError(t, err)
		c, o := dsync.New(d), dsync.New(other)
		blocker := dsync.NewMutex(o, "b61")
		require.NoError(t, blocker.Lock(within(t)))
		for i := range rounds(300, 10_000) {
			mu := dsync.NewMutex(c, fmt.Sprintf("b61-%d", i%100))
			require.NoError(t, mu.Lock(within(t)))
			require.NoError(t, mu.Unlock(within(t)))
		}
		var lost []*dsync.Mutex
		for i := range rounds(50, 1000) {
			mu := dsync.NewMutex(c, fmt.Sprintf("b61-lost-%d", i), dsync.WithTTL(300*time.Millisecond))
			require.NoError(t, mu.Lock(within(t)))
			lost = append(lost, mu)
			w.server.MustDo("DEL", key(mu.Name()))
		}
		for i := range rounds(100, 1000) {
			ctx, cancel := context.WithCancel(within(t))
			got := locking(ctx, dsync.NewMutex(c, "b61"))
			if i%2 == 0 {
				queued(t, blocker, 1)
			}
			cancel()
			require.ErrorIs(t, <-got, context.Canceled)
		}
		for range rounds(20, 100) {
			require.Panics(t, func() {
				_ = dsync.NewMutex(c, "b61-panic").Do(within(t), func(context.Context) error { panic("boom") })
			})
		}
		for _, mu := range lost {
			receive(t, "the loss", mu.Lost())
			require.ErrorIs(t, mu.Unlock(within(t)), dsync.ErrLost)
		}
		var blocked []<-chan error
		for range 50 {
			blocked = append(blocked, locking(within(t), dsync.NewMutex(c, "b61")))
		}
		queued(t, blocker, 1)
		require.NoError(t, c.Close(within(t)))
		for _, got := range blocked {
			require.ErrorIs(t, <-got, dsync.ErrClosed)
		}
		require.NoError(t, c.Close(within(t)))
		require.NoError(t, blocker.Unlock(within(t)))
		require.NoError(t, o.Close(within(t)))
		eventually(t, "the subscriptions to be gone", func() bool { return w.subscriptions() == 0 })
		done()
		otherDone()
		eventually(t, "the connections to be gone", func() bool { return w.server.Info("clients")["connected_clients"] == "1" })
		eventually(t, "the goroutines to be gone", func() bool { return runtime.NumGoroutine() <= baseline })
	})
}

// B62: a name that was used leaves nothing for longer than the retention of a minute, whether it was locked, waited for or abandoned.
func TestScenarioB62NamesLeaveNothingBehind(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		const ttl, retention = 10 * time.Second, time.Minute
		c, other := w.client(t), w.client(t)
		w.warm(t, other)
		for i := range rounds(200, 20_000) {
			mu := dsync.NewMutex(c, fmt.Sprintf("b62-%d", i), dsync.WithTTL(ttl))
			require.NoError(t, mu.Lock(within(t)))
			if i%20 == 0 { // somebody waits, and gives up
				ctx, cancel := context.WithCancel(within(t))
				got := locking(ctx, dsync.NewMutex(other, mu.Name(), dsync.WithTTL(ttl)))
				queued(t, mu, 1)
				cancel()
				require.ErrorIs(t, <-got, context.Canceled)
			}
			if err := mu.Unlock(within(t)); err != nil {
				require.ErrorIs(t, err, dsync.ErrLost) // a slow machine
			}
		}
		for _, k := range w.server.MustDo("KEYS", "dsync:{b62-*").([]any) {
			left := w.server.MustDo("PTTL", k.(string)).(int64)
			require.NotEqual(t, int64(-1), left)
			require.LessOrEqual(t, left, (ttl + 3*ttl + retention).Milliseconds(), k)
			require.Less(t, len(fields(w.server, k.(string))), 20, "%s is small", k)
		}
		if rounds(0, 1) == 1 {
			limit := time.Now().Add(2 * retention)
			for w.server.MustDo("DBSIZE") != int64(0) && time.Now().Before(limit) {
				<-time.After(time.Second) // the retention has to pass
			}
			require.Equal(t, int64(0), w.server.MustDo("DBSIZE"))
		}
	})
}

// B65: with a pool of two connections, hundreds of waiters on as many names share one subscription, and keep no command of a holder from
// its connection.
func TestScenarioB65WaitersTakeNoConnection(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		const ttl = 900 * time.Millisecond
		n := rounds(100, 5000)
		w.server.MustDo("CONFIG", "SET", "maxclients", "20")
		c := w.special(t, func(o *redis.Options) { o.PoolSize = 2 }, func(*rueidis.ClientOption) {})
		holders := w.client(t)
		w.warm(t, c)
		own := dsync.NewMutex(c, "b65-own", dsync.WithTTL(3*time.Second))
		require.NoError(t, own.Lock(within(t)))
		var held []*dsync.Mutex
		var got []<-chan error
		ctx := within(t)
		for i := range n {
			held = append(held, dsync.NewMutex(holders, fmt.Sprintf("b65-%d", i), dsync.WithTTL(time.Minute)))
			require.NoError(t, held[i].Lock(ctx))
			got = append(got, locking(ctx, dsync.NewMutex(c, held[i].Name(), dsync.WithTTL(ttl))))
		}
		queued(t, held[n-1], 1)
		m := watch(t, w.server)
		eventually(t, "a renewal beside the waiters", func() bool { return len(m.seen("renew", key("b65-own"))) > 0 })
		require.Equal(t, 2, w.subscriptions(), "one for each client")
		require.NoError(t, own.Unlock(within(t)))
		for i, mu := range held {
			require.NoError(t, mu.Unlock(within(t)))
			require.NoError(t, <-got[i])
		}
		rejected := w.server.Info("stats")["rejected_connections"]
		require.Equal(t, "0", rejected)
	})
}

// B66: each time the subscription is cut one SUBSCRIBE of one channel follows, however many wait.
func TestScenarioB66ResubscribingDoesNotGrow(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		const names = 50
		c, holders := w.client(t), w.client(t)
		w.warm(t, c)
		var held []*dsync.Mutex
		var got []<-chan error
		for i := range names {
			held = append(held, dsync.NewMutex(holders, fmt.Sprintf("b66-%d", i), dsync.WithTTL(10*time.Minute), dsync.WithoutRenewal()))
			ok, err := held[i].TryLock(within(t))
			require.NoError(t, err)
			require.True(t, ok)
			got = append(got, locking(within(t), dsync.NewMutex(c, held[i].Name(), dsync.WithTTL(time.Minute))))
			queued(t, held[i], 1)
		}
		m := watch(t, w.server)
		subscribed := func() []string {
			var all []string
			for _, line := range m.seen() {
				if strings.Contains(strings.ToLower(line), `"subscribe"`) {
					all = append(all, line)
				}
			}
			return all
		}
		const cuts = 5
		for range rounds(cuts, 3*cuts) {
			before := len(subscribed())
			w.server.MustDo("CLIENT", "KILL", "TYPE", "pubsub")
			eventually(t, "another subscription", func() bool { return len(subscribed()) > before && w.subscriptions() == 1 })
		}
		m.count() // all of it is known
		require.Len(t, subscribed(), rounds(cuts, 3*cuts))
		for _, line := range subscribed() {
			require.Equal(t, 1, strings.Count(line, `"dsync:c:`), line)
		}
		for i, mu := range held {
			require.NoError(t, mu.Unlock(within(t)))
			require.NoError(t, <-got[i])
		}
	})
}
