package dsync_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"reflect"
	"slices"
	"strconv"
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

// D01: vet reports copies of a Mutex, since it has a field with the methods of a lock; a copy that is made all the same shares the hold, which is
// released once.
func TestScenarioD01CopyOfAMutex(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		field := reflect.TypeFor[dsync.Mutex]().Field(0).Type
		require.True(t, reflect.PointerTo(field).Implements(reflect.TypeFor[sync.Locker]()), "vet's copylocks looks for this")
		mu := dsync.NewMutex(w.client(t), "d01")
		require.NoError(t, mu.Lock(within(t)))
		dup := &dsync.Mutex{}
		reflect.ValueOf(dup).Elem().Set(reflect.ValueOf(mu).Elem()) // behind vet's back
		other := dsync.NewMutex(w.client(t), "d01")
		require.Equal(t, mu.Fence(), dup.Fence())
		require.NoError(t, dup.Unlock(within(t)))
		require.NoError(t, other.Lock(within(t)))
		require.ErrorIs(t, mu.Unlock(within(t)), dsync.ErrNotHeld)
		require.NoError(t, other.Unlock(within(t)), "the second release took nothing away")
	})
}

// D02: a nil context is an error of every method that takes one, before any command.
func TestScenarioD02NilContext(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		c := w.client(t)
		mu, held := dsync.NewMutex(c, "d02"), dsync.NewMutex(c, "d02-held")
		require.NoError(t, held.Lock(within(t)))
		before := calls(w.server)
		var none context.Context
		_, try := mu.TryLock(none)
		_, tryDo := mu.TryDo(none, nil)
		_, inspect := mu.Inspect(none)
		for op, err := range map[string]error{
			"Lock": mu.Lock(none), "TryLock": try, "Unlock": held.Unlock(none), "Do": mu.Do(none, nil), "TryDo": tryDo,
			"Inspect": inspect, "Ping": c.Ping(none), "Close": c.Close(none),
		} {
			require.ErrorIs(t, err, dsync.ErrNilContext, op)
		}
		require.Equal(t, before, calls(w.server))
		require.NoError(t, held.Unlock(within(t)), "it is still held")
	})
}

// D03: names up to the limit work; above it, and empty, they are refused, and no error repeats a huge one.
func TestScenarioD03HugeNames(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		exchange(t, w, []string{"x", strings.Repeat("x", 1024), strings.Repeat("}", 1024), strings.Repeat(`\`, 1024)})
		c := w.client(t)
		before := calls(w.server)
		for _, size := range []int{0, 1025, 64 << 10, 1 << 20, 64 << 20} {
			mu := dsync.NewMutex(c, strings.Repeat("x", size))
			err := mu.Lock(within(t))
			require.ErrorIs(t, err, dsync.ErrInvalidName)
			require.Less(t, len(err.Error()), 400)
			_, err = mu.TryLock(within(t))
			require.ErrorIs(t, err, dsync.ErrInvalidName)
		}
		require.Equal(t, before, calls(w.server))
		// A long name is cut in the errors of Redis, too.
		long := strings.Repeat("x", 1024)
		w.server.MustDo("SET", key(long), "foreign", "EX", "60")
		w.server.MustDo("DEL", key(long))
		w.server.MustDo("SET", key(long), "foreign", "EX", "60")
		err := dsync.NewMutex(c, long).Lock(within(t))
		require.ErrorContains(t, err, "WRONGTYPE")
		require.Less(t, len(err.Error()), 400)
	})
}

// D04: any bytes are a name, exactly as they are: nothing is normalized, split, matched as a pattern or run as a command.
func TestScenarioD04OddBytesInNames(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		exchange(t, w, []string{
			"\x00", "a\x00b", "\r\n", "a\r\nFLUSHALL\r\n", " ", "  ", " a", "a ", "a b c", "'", `"`, "`", "*", "?", "[a-z]", "a*",
			"😀", "é", "e\u0301", "\xff", "\xc3\x28", "%", "%d", "%s%n", "a:b", ":", "A", "ß", "ss", "\u2028", "\u202e",
		})
	})
}

// D05: CLIENT PAUSE for longer than the lease: the holder is told by its own clock; afterwards no acquire of a caller that is gone stays in
// force, and the waiter is served.
func TestScenarioD05ClientPause(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		for _, mode := range []string{"WRITE", "ALL"} {
			t.Run(mode, func(t *testing.T) {
				cb := w.client(t)
				w.warm(t, cb)
				a := dsync.NewMutex(w.client(t), "d05-"+mode, dsync.WithTTL(400*time.Millisecond))
				b := dsync.NewMutex(cb, "d05-"+mode, dsync.WithTTL(10*time.Second))
				gone := dsync.NewMutex(cb, "d05-gone-"+mode, dsync.WithTTL(10*time.Minute))
				require.NoError(t, a.Lock(within(t)))
				first := a.Fence()
				got := locking(within(t), b)
				queued(t, a, 1)
				w.server.MustDo("CLIENT", "PAUSE", "1200", mode)
				ctx, cancel := context.WithTimeout(within(t), 50*time.Millisecond)
				require.ErrorIs(t, gone.Lock(ctx), context.DeadlineExceeded)
				cancel()
				receive(t, "the loss", a.Lost())
				require.NoError(t, <-got)
				require.Greater(t, b.Fence(), first)
				require.ErrorIs(t, a.Unlock(within(t)), dsync.ErrLost)
				require.NoError(t, b.Unlock(within(t)))
				require.NoError(t, dsync.NewMutex(w.client(t), gone.Name()).Lock(within(t)), "nobody is in the way for ten minutes")
			})
		}
	})
}

// rawConn is a connection that is not a driver's, for what blocks.
func rawConn(t testing.TB, s *redistest.Server, command string) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", s.Addr())
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	_, err = io.WriteString(conn, command)
	require.NoError(t, err)
	return conn
}

// D06: a foreign script keeps the server busy: that is an outage and not "taken", the renewal is tried again, and after SCRIPT KILL the hold is
// still in force.
func TestScenarioD06BusyScript(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		failed := make(chan error, 1000)
		c := w.client(t, dsync.WithHooks(dsync.Hooks{RenewalFailed: func(i dsync.RenewalFailedInfo) { failed <- i.Err }}))
		other := w.client(t)
		w.warm(t, other)
		m := watch(t, w.server)
		mu := dsync.NewMutex(c, "d06", dsync.WithTTL(3*time.Second))
		w.server.MustDo("CONFIG", "SET", "busy-reply-threshold", "10")
		require.NoError(t, mu.Lock(within(t)))
		rawConn(t, w.server, "EVAL \"while true do end\" 0\r\n")
		eventually(t, "the server to be busy", func() bool {
			_, err := w.server.Do("GET", "x")
			return err != nil && strings.HasPrefix(err.Error(), "BUSY")
		})
		for _, name := range []string{"d06", "d06-free"} {
			ok, err := dsync.NewMutex(other, name).TryLock(within(t))
			require.False(t, ok)
			require.ErrorIs(t, err, dsync.ErrUnavailable)
			require.ErrorContains(t, err, "BUSY")
		}
		require.ErrorContains(t, receive(t, "the failed renewal", failed), "BUSY")
		w.server.MustDo("SCRIPT", "KILL")
		eventually(t, "the renewal", func() bool { return len(m.seen("renew", key("d06"))) > 0 }) // it shows no refused command
		require.NoError(t, mu.Unlock(within(t)))
	})
}

// D07: with no connection to be had, that is an outage and not "taken"; dialing backs off; who has a connection is renewed on it; and when there is
// room again the same client works. (The server's words do not get through: both client libraries write first, and see the reset only.)
func TestScenarioD07MaxClients(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		mu := dsync.NewMutex(w.client(t), "d07", dsync.WithTTL(1500*time.Millisecond))
		require.NoError(t, mu.Lock(within(t)))
		eventually(t, "the subscription", func() bool { return w.subscriptions() == 1 })
		m := watch(t, w.server)
		ids := func() (all []string) {
			for line := range strings.Lines(w.server.MustDo("CLIENT", "LIST").(string)) {
				id, _, _ := strings.Cut(strings.TrimPrefix(line, "id="), " ")
				all = append(all, id)
			}
			return all
		}
		others := ids()
		c := w.client(t)
		w.warm(t, c)
		w.server.MustDo("CONFIG", "SET", "maxclients", "1")
		for _, id := range ids() {
			if !slices.Contains(others, id) {
				w.server.MustDo("CLIENT", "KILL", "ID", id)
			}
		}
		start, began := connections(w.server), time.Now()
		waiting := locking(within(t), dsync.NewMutex(c, "d07-wait"))
		for range 5 {
			ok, err := dsync.NewMutex(c, "d07").TryLock(within(t))
			require.False(t, ok)
			require.ErrorIs(t, err, dsync.ErrUnavailable)
		}
		before := m.renewals("d07")
		eventually(t, "a renewal on the open connection", func() bool { return len(m.seen("renew", key("d07"))) > before })
		stillWaits(t, waiting)
		// A client library dials up to five times for each of our tries. Ours are half a second apart in the end.
		require.LessOrEqual(t, int64(connections(w.server)-start), 5*(5+2*6+2*atMost(2, began, 500*time.Millisecond)))
		w.server.MustDo("CONFIG", "SET", "maxclients", "1000")
		require.NoError(t, <-waiting)
		require.NoError(t, mu.Unlock(within(t)))
	})
}

// D08: the server is stopped: for less than the lease nothing is lost; for more the loss comes while it is stopped, and what it answers afterwards revives
// nothing.
func TestScenarioD08StoppedServer(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		failed := make(chan error, 1000)
		c := w.client(t, dsync.WithHooks(dsync.Hooks{RenewalFailed: func(i dsync.RenewalFailedInfo) {
			if i.Name == "d08-long" {
				failed <- i.Err
			}
		}}))
		w.warm(t, c)
		long, short := dsync.NewMutex(c, "d08-long", dsync.WithTTL(4*time.Second)), dsync.NewMutex(c, "d08-short", dsync.WithTTL(500*time.Millisecond))
		require.NoError(t, long.Lock(within(t)))
		require.NoError(t, short.Lock(within(t)))
		first := short.Fence()
		w.server.Pause()
		receive(t, "the loss", short.Lost())
		require.Error(t, receive(t, "a failed renewal", failed)) // past its renewal, with more than a third of the lease left
		w.server.Resume()
		m := watch(t, w.server)
		eventually(t, "the renewal", func() bool { return len(m.seen("renew", key("d08-long"))) > 0 })
		require.False(t, isLost(long))
		require.NoError(t, long.Unlock(within(t)))
		require.True(t, isLost(short))
		require.Zero(t, short.Remaining())
		require.ErrorIs(t, short.Unlock(within(t)), dsync.ErrLost)
		other := dsync.NewMutex(w.client(t), "d08-short")
		require.NoError(t, other.Lock(within(t)))
		require.Greater(t, other.Fence(), first)
		require.NoError(t, other.Unlock(within(t)))
	})
}

// D09: a client that is led to a replica decides nothing by it: not that a lock is taken, nor that it is free.
func TestScenarioD09ReplicaDecidesNothing(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		replica := redistest.StartReplica(t, w.server)
		a := dsync.NewMutex(w.client(t), "d09", dsync.WithTTL(time.Minute))
		require.NoError(t, a.Lock(within(t)))
		eventually(t, "the replica to have it", func() bool { return replica.MustDo("EXISTS", key("d09")) == int64(1) })
		c := w.clientAt(t, replica.Addr())
		for _, name := range []string{"d09", "d09-free"} {
			ok, err := dsync.NewMutex(c, name).TryLock(within(t))
			require.False(t, ok)
			require.ErrorIs(t, err, dsync.ErrUnavailable)
			require.ErrorContains(t, err, "READONLY")
		}
		require.NoError(t, a.Unlock(within(t)))
	})
}

// D10: SWAPDB takes the hold away: it is lost by its next renewal. Clients of different databases do not hear of each other's locks.
func TestScenarioD10Databases(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		one := func() *dsync.Client {
			return w.special(t, func(o *redis.Options) { o.DB = 1 }, func(o *rueidis.ClientOption) { o.SelectDB = 1 })
		}
		reason := make(chan string, 1)
		zero := w.client(t, dsync.WithHooks(dsync.Hooks{Lost: func(i dsync.LostInfo) { reason <- i.Reason }}))
		there, waiter := one(), one()
		w.warm(t, waiter)
		a, b, c := dsync.NewMutex(zero, "d10", dsync.WithTTL(3*time.Second)), dsync.NewMutex(there, "d10"), dsync.NewMutex(waiter, "d10")
		require.NoError(t, a.Lock(within(t)))
		require.NoError(t, b.Lock(within(t)), "another database, another lock")
		got := locking(within(t), c)
		queued(t, b, 1)
		require.NoError(t, b.Unlock(within(t)))
		require.NoError(t, <-got)
		require.False(t, isLost(a))
		first := a.Fence()
		require.NoError(t, c.Unlock(within(t)))
		w.server.MustDo("SWAPDB", "0", "1")
		receive(t, "the loss", a.Lost())
		require.Equal(t, "denied by the server", receive(t, "the hook", reason))
		require.ErrorIs(t, a.Unlock(within(t)), dsync.ErrLost)
		require.NoError(t, a.Lock(within(t)))
		require.Greater(t, a.Fence(), first)
		require.NoError(t, a.Unlock(within(t)))
	})
}

// D11 is TestCloseWakesWaitersAndWaitsForHolds and TestCloseTakesAwayWhatIsLeft.

// D12: a hook that panics and one that blocks for ever keep neither the renewals of other holds nor the locks from going on.
func TestScenarioD12BadHooks(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		for how, hook := range map[string]func(block <-chan struct{}){
			"panics": func(<-chan struct{}) { panic("boom") },
			"blocks": func(block <-chan struct{}) { <-block },
		} {
			t.Run(how, func(t *testing.T) {
				block, called := make(chan struct{}), make(chan struct{}, 10)
				defer close(block) // or its goroutine stays
				log := &journal{}
				bad := func() { called <- struct{}{}; hook(block) }
				c := w.client(t, log.option(), dsync.WithHooks(dsync.Hooks{
					Lost:     func(dsync.LostInfo) { bad() },
					Acquired: func(dsync.AcquiredInfo) { bad() },
				}))
				m := watch(t, w.server)
				kept, lost := dsync.NewMutex(c, "d12-kept-"+how, dsync.WithTTL(1500*time.Millisecond)), dsync.NewMutex(c, "d12-lost-"+how, dsync.WithTTL(600*time.Millisecond))
				require.NoError(t, kept.Lock(within(t)))
				require.NoError(t, lost.Lock(within(t)))
				w.server.MustDo("DEL", key(lost.Name()))
				receive(t, "the loss", lost.Lost())
				receive(t, "the hook", called)
				receive(t, "the other hook", called)
				before := m.renewals(kept.Name())
				eventually(t, "two renewals of the other hold", func() bool { return len(m.seen("renew", key(kept.Name()))) >= before+2 })
				require.ErrorIs(t, lost.Unlock(within(t)), dsync.ErrLost)
				require.NoError(t, kept.Unlock(within(t)))
				require.NoError(t, kept.Lock(within(t)))
				require.NoError(t, kept.Unlock(within(t)))
				require.NoError(t, c.Close(within(t)))
				if how == "panics" {
					eventually(t, "the panic in the log", func() bool { return strings.Contains(strings.Join(log.lines(), ""), "boom") })
				}
			})
		}
	})
}

// D13: no two clients, nor two asks of one, have equal tokens, in one process or in processes started at the same time. (A snapshot of a machine's memory
// cannot be made here.)
func TestScenarioD13TokensAreUnique(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		ids, generations := map[string]bool{}, map[string]bool{}
		note := func(name string, fresh bool) {
			id, generation, ok := strings.Cut(holder(w.server, name), ":")
			require.True(t, ok)
			require.GreaterOrEqual(t, len(id), 22, "128 bits")
			require.GreaterOrEqual(t, len(generation), 11, "64 bits")
			require.False(t, generations[generation])
			require.False(t, fresh && ids[id])
			ids[id], generations[generation] = true, true
		}
		for i := range 10 {
			mu := dsync.NewMutex(w.client(t), fmt.Sprintf("d13-%d", i))
			for k := range 5 {
				require.NoError(t, mu.Lock(within(t)))
				note(mu.Name(), k == 0)
				require.NoError(t, mu.Unlock(within(t)))
			}
		}
		var children []*child
		for i := range 4 {
			children = append(children, w.spawn(t, "hold", fmt.Sprintf("d13-child-%d", i), "1m"))
		}
		for i, c := range children {
			c.expect("ready")
			c.tell("lock")
			c.expect("held")
			note(fmt.Sprintf("d13-child-%d", i), true)
		}
	})
}

// D14: the release ran, its reply was lost, and another holds by the time it is repeated: it is no loss, and the other keeps its hold.
func TestScenarioD14RetriedRelease(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		p := redistest.NewProxy(t, w.server.Addr())
		c, cb := w.clientAt(t, p.Addr()), w.client(t)
		w.warm(t, cb)
		m := watch(t, w.server)
		a, b := dsync.NewMutex(c, "d14", dsync.WithTTL(time.Minute)), dsync.NewMutex(cb, "d14", dsync.WithTTL(time.Minute))
		require.NoError(t, a.Lock(within(t)))
		got := locking(within(t), b)
		queued(t, a, 1)
		fired := p.LoseReplyTo(func(request []byte) bool {
			return bytes.Contains(request, []byte("release")) && bytes.Contains(request, []byte(key("d14")))
		})
		require.NoError(t, a.Unlock(within(t)), "the repeated one finds nothing, and that is right")
		receive(t, "the fault", fired)
		require.NoError(t, <-got)
		require.GreaterOrEqual(t, m.count("release", key("d14")), 2)
		require.False(t, isLost(b))
		require.NoError(t, b.Unlock(within(t)))
	})
}

// D15: fences are exact up to 2^53 - 1, where Lua's numbers end, and refused from there on: none is rounded, and no lock is handed out with it.
func TestScenarioD15IntegerLimits(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		const limit = 1<<53 - 1
		c := w.client(t)
		mu := dsync.NewMutex(c, "d15")
		require.NoError(t, mu.Lock(within(t)))
		require.NoError(t, mu.Unlock(within(t)))
		w.server.MustDo("HSET", key("d15"), "f", strconv.Itoa(limit-2))
		for _, want := range []int64{limit - 1, limit} {
			require.NoError(t, mu.Lock(within(t)))
			require.Equal(t, want, mu.Fence())
			require.Equal(t, want, lastFence(w.server, "d15"))
			require.NoError(t, mu.Unlock(within(t)))
		}
		for range 3 {
			ok, err := mu.TryLock(within(t))
			require.False(t, ok)
			require.Error(t, err)
			require.Zero(t, mu.Fence())
		}
	})
}
