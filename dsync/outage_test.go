package dsync_test

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/e51fe0e6/dsync/dsync"
	"github.com/e51fe0e6/dsync/internal/redistest"
)

// Issue 1, 5; B01, B77, B84: a command that is held back on its connection runs after everything that was done about it.
func TestMutexLateCommandsHarmNobody(t *testing.T) {
	onServer(t, func(t *testing.T, w *world) {
		setup := func(t *testing.T) (*redistest.Proxy, *dsync.Client, *dsync.Client) {
			p := redistest.NewProxy(t, w.server.Addr())
			c, other := w.clientAt(t, p.Addr()), w.client(t)
			w.warm(t, c)
			return p, c, other
		}
		// held holds back what the client sends on its present connections, and waits until do has sent something.
		held := func(t *testing.T, p *redistest.Proxy, do func()) {
			p.HoldExisting()
			do()
			eventually(t, "the held command", func() bool { up, _ := p.Buffered(); return up > 0 })
		}
		// late delivers what was held, and waits until the server has run it.
		late := func(t *testing.T, p *redistest.Proxy) {
			before := calls(w.server)
			p.ReleaseExisting()
			eventually(t, "the late command", func() bool { return calls(w.server) > before })
		}
		t.Run("acquire", func(t *testing.T) {
			p, c, other := setup(t)
			mu := dsync.NewMutex(c, "late-acquire", dsync.WithTTL(10*time.Minute))
			ctx, cancel := context.WithCancel(within(t))
			done := make(chan error, 1)
			held(t, p, func() { go func() { done <- mu.Lock(ctx) }() })
			cancel()
			require.ErrorIs(t, <-done, context.Canceled)
			p.CutClients() // the withdrawal takes a new connection, and arrives first
			eventually(t, "the tombstone", func() bool {
				return strings.Contains(strings.Join(fields(w.server, key("late-acquire")), " "), " x ")
			})
			late(t, p)
			require.NotContains(t, fields(w.server, key("late-acquire")), "h")
			require.NoError(t, dsync.NewMutex(other, "late-acquire").Lock(within(t)))
		})
		t.Run("release", func(t *testing.T) {
			p, c, other := setup(t)
			mu, next := dsync.NewMutex(c, "late-release", dsync.WithTTL(10*time.Minute)), dsync.NewMutex(other, "late-release")
			require.NoError(t, mu.Lock(within(t)))
			ctx, cancel := context.WithCancel(within(t))
			done := make(chan error, 1)
			held(t, p, func() { go func() { done <- mu.Unlock(ctx) }() })
			cancel()
			err := <-done
			require.ErrorIs(t, err, dsync.ErrUnconfirmed)
			require.ErrorIs(t, err, context.Canceled)
			p.CutClients()
			require.NoError(t, next.Lock(within(t)), "the release goes on, on another connection")
			late(t, p)
			require.Equal(t, "next", holderIs(t, next))
			require.NoError(t, next.Unlock(within(t)))
		})
		t.Run("renew", func(t *testing.T) {
			p, c, other := setup(t)
			mu, next := dsync.NewMutex(c, "late-renew", dsync.WithTTL(3*time.Second)), dsync.NewMutex(other, "late-renew")
			require.NoError(t, mu.Lock(within(t)))
			held(t, p, func() {}) // the renewal comes by itself
			p.CutClients()
			require.NoError(t, mu.Unlock(within(t)))
			require.NoError(t, next.Lock(within(t)))
			late(t, p)
			require.Equal(t, "next", holderIs(t, next))
			require.NoError(t, next.Unlock(within(t)))
		})
	})
}

// fields returns the hash at a key, flat.
func fields(s *redistest.Server, key string) (all []string) {
	values, _ := s.MustDo("HGETALL", key).([]any)
	for _, v := range values {
		all = append(all, v.(string))
	}
	return all
}

// holderIs says "next" if the holder in Redis is the hold of m.
func holderIs(t testing.TB, m *dsync.Mutex) string {
	t.Helper()
	state, err := m.Inspect(t.Context())
	require.NoError(t, err)
	if state.Holder == nil {
		return "nobody"
	}
	if state.Fence == m.Fence() {
		return "next"
	}
	return "somebody else"
}

// B41, D14: the reply is lost on the way, after execution or with the command before it: in both forms the lock is taken once, and released.
func TestMutexLostReplies(t *testing.T) {
	onServer(t, func(t *testing.T, w *world) {
		p := redistest.NewProxy(t, w.server.Addr())
		c := w.clientAt(t, p.Addr())
		w.warm(t, c)
		for verb, name := range map[string]string{"acquire": "lost-acquire", "release": "lost-release"} {
			for form, fault := range map[string]func(func([]byte) bool) <-chan struct{}{"ran": p.LoseReplyTo, "never": p.NeverDeliver} {
				t.Run(verb+"-"+form, func(t *testing.T) {
					fired := fault(func(request []byte) bool {
						return bytes.Contains(request, []byte(verb)) && bytes.Contains(request, []byte(name))
					})
					mu := dsync.NewMutex(c, name, dsync.WithTTL(time.Minute))
					require.NoError(t, mu.Lock(within(t)))
					require.NoError(t, mu.Unlock(within(t)))
					<-fired
					require.NotContains(t, fields(w.server, key(name)), "h")
				})
			}
		}
	})
}

// Issue 1, 7: each bad input gets its error, and nothing is sent.
func TestMutexRefusesBadInput(t *testing.T) {
	onServer(t, func(t *testing.T, w *world) {
		ctx := within(t)
		c := w.client(t)
		for what, m := range map[string]struct {
			mu   *dsync.Mutex
			want error
			text string
		}{
			"empty name":         {dsync.NewMutex(c, ""), dsync.ErrInvalidName, "empty"},
			"long name":          {dsync.NewMutex(c, strings.Repeat("x", 1025)), dsync.ErrInvalidName, "1025 bytes, want 1 to 1024"},
			"short ttl":          {dsync.NewMutex(c, "n", dsync.WithTTL(99*time.Millisecond)), dsync.ErrInvalidOption, "TTL 99ms"},
			"zero ttl":           {dsync.NewMutex(c, "n", dsync.WithTTL(0)), dsync.ErrInvalidOption, "TTL 0s"},
			"negative ttl":       {dsync.NewMutex(c, "n", dsync.WithTTL(-1)), dsync.ErrInvalidOption, "TTL -1ns"},
			"endless ttl":        {dsync.NewMutex(c, "n", dsync.WithTTL(1<<63-1)), dsync.ErrInvalidOption, "TTL"},
			"negative slice":     {dsync.NewMutex(c, "n", dsync.WithSlice(-1)), dsync.ErrInvalidOption, "slice"},
			"negative linger":    {dsync.NewMutex(c, "n", dsync.WithLinger(-1)), dsync.ErrInvalidOption, "linger"},
			"zero max hold":      {dsync.NewMutex(c, "n", dsync.WithMaxHold(0)), dsync.ErrInvalidOption, "max hold"},
			"long label":         {dsync.NewMutex(c, "n", dsync.WithLabel(strings.Repeat("l", 257))), dsync.ErrInvalidOption, "257 bytes"},
			"linger, no renewal": {dsync.NewMutex(c, "n", dsync.WithLinger(1), dsync.WithoutRenewal()), dsync.ErrInvalidOption, "linger"},
			"nil option":         {dsync.NewMutex(c, "n", nil), dsync.ErrInvalidOption, "nil"},
			"braces in a prefix": {dsync.NewMutex(w.client(t, dsync.WithPrefix("a{b")), "n"), dsync.ErrInvalidOption, "brace"},
			"empty prefix":       {dsync.NewMutex(w.client(t, dsync.WithPrefix("")), "n"), dsync.ErrInvalidOption, "prefix"},
			"zero budget":        {dsync.NewMutex(w.client(t, dsync.WithOutageBudget(0)), "n"), dsync.ErrInvalidOption, "budget 0s"},
			"nil logger":         {dsync.NewMutex(w.client(t, dsync.WithLogger(nil)), "n"), dsync.ErrInvalidOption, "logger"},
		} {
			t.Run(strings.ReplaceAll(what, " ", "-"), func(t *testing.T) {
				before := calls(w.server)
				_, try := m.mu.TryLock(ctx)
				_, tryDo := m.mu.TryDo(ctx, nil)
				_, inspect := m.mu.Inspect(ctx)
				for op, err := range map[string]error{
					"Lock": m.mu.Lock(ctx), "TryLock": try, "Unlock": m.mu.Unlock(ctx), "Do": m.mu.Do(ctx, nil), "TryDo": tryDo, "Inspect": inspect,
				} {
					require.ErrorIs(t, err, m.want, op)
					require.ErrorContains(t, err, m.text, op)
					var e *dsync.Error
					require.ErrorAs(t, err, &e)
					require.Equal(t, op, e.Op)
					require.LessOrEqual(t, len(err.Error()), 300, "a huge name is not repeated")
				}
				require.Equal(t, before, calls(w.server))
			})
		}
		require.PanicsWithValue(t, "dsync: New with a nil driver", func() { dsync.New(nil) })
		require.PanicsWithValue(t, "dsync: a mutex with a nil client", func() { dsync.NewMutex(nil, "n") })
		mu := dsync.NewMutex(c, "n")
		require.ErrorIs(t, mu.Lock(nil), dsync.ErrNilContext) //nolint:staticcheck // the test of it
		require.ErrorIs(t, mu.Unlock(ctx), dsync.ErrNotHeld)
	})
}

// Issue 1, 7; B119: what cannot heal by waiting is told at once, by Ping and by Lock.
func TestMutexTellsPermanentErrorsAtOnce(t *testing.T) {
	onServer(t, func(t *testing.T, w *world) {
		ctx := within(t)
		acl := "+@all -hset"
		w.server.MustDo(append([]string{"ACL", "SETUSER", "nohset", "on", ">pw", "~*", "&*"}, strings.Fields(acl)...)...)
		w.server.MustDo("ACL", "SETUSER", "nokeys", "on", ">pw", "~other:*", "&*", "+@all")
		for _, user := range []string{"nohset", "nokeys"} {
			t.Run(user, func(t *testing.T) {
				d, done, err := w.dialer.dial(w.server.Addr(), user, "pw")
				require.NoError(t, err)
				defer done()
				c := dsync.New(d)
				defer closeNow(t, c)
				err = c.Ping(ctx)
				require.ErrorContains(t, err, "the user needs")
				err = dsync.NewMutex(c, "n").Lock(ctx)
				require.Error(t, err)
				require.NotErrorIs(t, err, dsync.ErrUnavailable)
				requireServerError(t, err)
			})
		}
		w.server.MustDo("SET", key("string"), "mine")
		w.server.MustDo("HSET", key("hash"), "mine", "1")
		for _, name := range []string{"string", "hash"} {
			t.Run(name, func(t *testing.T) {
				mu := dsync.NewMutex(w.client(t), name)
				require.ErrorContains(t, mu.Lock(ctx), "WRONGTYPE")
				_, err := mu.TryLock(ctx)
				require.ErrorContains(t, err, "WRONGTYPE")
				require.NoError(t, dsync.NewMutex(w.client(t), "other").Lock(ctx))
			})
		}
		require.Equal(t, "mine", w.server.MustDo("GET", key("string")))
		require.Equal(t, []string{"mine", "1"}, fields(w.server, key("hash")))

		w.server.MustDo("CONFIG", "SET", "requirepass", "secret")
		d, done, err := w.dialer.dial(w.server.Addr(), "", "wrong")
		if err == nil { // rueidis already refuses to connect
			defer done()
			c := dsync.New(d)
			defer closeNow(t, c)
			require.Error(t, c.Ping(ctx))
			err = dsync.NewMutex(c, "n").Lock(ctx)
			require.NotErrorIs(t, err, dsync.ErrUnavailable)
		}
		require.ErrorContains(t, err, "WRONGPASS")
	})
}

// requireServerError checks that errors.As reaches what the client library or the server said.
func requireServerError(t testing.TB, err error) {
	t.Helper()
	var gr redis.Error
	_, isRueidis := rueidis.IsRedisErr(err)
	var rr *rueidis.RedisError
	text := errors.As(err, &gr) || errors.As(err, &rr) || isRueidis || strings.Contains(err.Error(), "NOPERM") ||
		strings.Contains(err.Error(), "can't run this command")
	require.True(t, text, "%v", err)
}

// Issue 1, 7; B59, B73, B124, B135, D06, D07: what may pass is an outage: Lock waits through it and holds after its end; nobody hangs.
func TestMutexWaitsThroughOutages(t *testing.T) {
	onServer(t, func(t *testing.T, w *world) {
		primary := redistest.Start(t)
		outages := map[string]struct{ begin, end func() }{
			"readonly": {
				func() { w.server.ReplicaOf(primary) },
				func() { w.server.MustDo("REPLICAOF", "NO", "ONE") },
			},
			"out-of-memory": {
				func() { w.server.MustDo("CONFIG", "SET", "maxmemory", "1") },
				func() { w.server.MustDo("CONFIG", "SET", "maxmemory", "0") },
			},
			"no-replicas": {
				func() { w.server.MustDo("CONFIG", "SET", "min-replicas-to-write", "1") },
				func() { w.server.MustDo("CONFIG", "SET", "min-replicas-to-write", "0") },
			},
			"stopped": {w.server.Pause, w.server.Resume},
		}
		for name, o := range outages {
			t.Run(name, func(t *testing.T) {
				failed := make(chan error, 100)
				c := w.client(t)
				w.warm(t, c)
				mu := dsync.NewMutex(c, "outage-"+name)
				o.begin()
				short, cancel := context.WithTimeout(within(t), 2*time.Second)
				defer cancel()
				err := mu.Lock(short)
				require.ErrorIs(t, err, context.DeadlineExceeded)
				require.ErrorIs(t, err, dsync.ErrUnavailable, "the outage is told too")
				_, err = dsync.NewMutex(c, "try-"+name).TryLock(within(t))
				require.ErrorIs(t, err, dsync.ErrUnavailable)
				go func() { failed <- mu.Lock(within(t)) }()
				o.end()
				require.NoError(t, <-failed)
				require.NoError(t, mu.Unlock(within(t)))
			})
		}
	})
}

// B135: a full memory refuses no renewal, no release, no withdrawal and no grant.
func TestMutexHoldsThroughFullMemory(t *testing.T) {
	onServer(t, func(t *testing.T, w *world) {
		renewed := make(chan error, 100)
		c := w.client(t, dsync.WithHooks(dsync.Hooks{RenewalFailed: func(i dsync.RenewalFailedInfo) { renewed <- i.Err }}))
		other := w.client(t)
		w.warm(t, other)
		mu, next, third := dsync.NewMutex(c, "full", dsync.WithTTL(600*time.Millisecond)), dsync.NewMutex(other, "full"), dsync.NewMutex(w.client(t), "full")
		require.NoError(t, mu.Lock(within(t)))
		granted, gone := make(chan error, 1), make(chan error, 1)
		ctx, cancel := context.WithCancel(within(t))
		go func() { granted <- next.Lock(within(t)) }()
		queued(t, mu, 1)
		go func() { gone <- third.Lock(ctx) }()
		queued(t, mu, 2)
		w.server.MustDo("CONFIG", "SET", "maxmemory", "1")
		before := w.server.CommandStats()["pexpireat"]
		eventually(t, "three renewals", func() bool { return w.server.CommandStats()["pexpireat"] >= before+3 })
		cancel()
		require.ErrorIs(t, <-gone, context.Canceled)
		queued(t, mu, 1)
		require.NoError(t, mu.Unlock(within(t)))
		require.NoError(t, <-granted)
		require.NoError(t, next.Unlock(within(t)))
		require.Empty(t, renewed)
	})
}

// B134, B60: without the right to the channel Ping says so, and Lock works by re-checks.
func TestMutexWithoutTheChannel(t *testing.T) {
	onServer(t, func(t *testing.T, w *world) {
		ctx := within(t)
		w.server.MustDo("ACL", "SETUSER", "deaf", "on", ">pw", "~*", "resetchannels", "+@all")
		d, done, err := w.dialer.dial(w.server.Addr(), "deaf", "pw")
		require.NoError(t, err)
		defer done()
		c := dsync.New(d)
		defer closeNow(t, c)
		require.ErrorContains(t, c.Ping(ctx), "channel")
		mu, waiter := dsync.NewMutex(w.client(t), "deaf"), dsync.NewMutex(c, "deaf", dsync.WithTTL(300*time.Millisecond))
		require.NoError(t, mu.Lock(ctx))
		granted := make(chan error, 1)
		go func() { granted <- waiter.Lock(ctx) }()
		queued(t, mu, 1)
		require.NoError(t, mu.Unlock(ctx), "the refused message is no error of the release")
		require.NoError(t, <-granted)
		require.NoError(t, waiter.Unlock(ctx))
	})
}
