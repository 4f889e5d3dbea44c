package dsync_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/e51fe0e6/dsync/dsync"
)

// B119: where the key holds something of somebody else's, each method says so in one command, and the data is as it was to the byte, also when it
// came in place of a hold. The plain name is nobody's key.
func TestScenarioB119ForeignKeyIsNotTouched(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		c := w.client(t)
		w.warm(t, c)
		m := watch(t, w.server)
		for what, cmd := range map[string][]string{
			"string": {"SET", "", "mine"},
			"json":   {"SET", "", `{"token":"x","ttl":10}`},
			"empty":  {"SET", "", ""},
			"hash":   {"HSET", "", "h", "mine", "q1", "mine"},
			"list":   {"RPUSH", "", "a", "b"},
			"set":    {"SADD", "", "a", "b"},
			"zset":   {"ZADD", "", "1", "a"},
			"stream": {"XADD", "", "1-1", "a", "b"},
		} {
			t.Run(what, func(t *testing.T) {
				k := key("b119-" + what)
				cmd[1] = k
				w.server.MustDo(cmd...)
				defer w.server.MustDo("DEL", k) // it has no expiry
				dump := w.server.MustDo("DUMP", k)
				mu := dsync.NewMutex(c, "b119-"+what)
				ran := func(context.Context) error {
					t.Error("it ran")
					return nil
				}
				for op, do := range map[string]func() error{
					"Lock":    func() error { return mu.Lock(within(t)) },
					"TryLock": func() error { _, err := mu.TryLock(within(t)); return err },
					"Do":      func() error { return mu.Do(within(t), ran) },
					"TryDo":   func() error { _, err := mu.TryDo(within(t), ran); return err },
					"Inspect": func() error { _, err := mu.Inspect(within(t)); return err },
				} {
					before := m.count("acquire", k) + m.count("inspect", k)
					err := do()
					require.ErrorContains(t, err, "WRONGTYPE", op)
					require.NotErrorIs(t, err, dsync.ErrUnavailable, op)
					// One more, if the script was not loaded yet.
					require.LessOrEqual(t, m.count("acquire", k)+m.count("inspect", k), before+2, "%s tells at once", op)
				}
				require.ErrorIs(t, mu.Unlock(within(t)), dsync.ErrNotHeld)
				require.Equal(t, dump, w.server.MustDo("DUMP", k))

				held := dsync.NewMutex(c, "b119-held-"+what, dsync.WithTTL(time.Minute))
				require.NoError(t, held.Lock(within(t)))
				k = key(held.Name())
				w.server.MustDo("DEL", k)
				cmd[1] = k
				w.server.MustDo(cmd...)
				defer w.server.MustDo("DEL", k)
				err := held.Unlock(within(t))
				require.ErrorContains(t, err, "WRONGTYPE")
				require.ErrorIs(t, err, dsync.ErrUnconfirmed)
				require.Equal(t, dump, w.server.MustDo("DUMP", k))
			})
		}
		w.server.MustDo("SET", "b119-plain", "mine")
		mu := dsync.NewMutex(c, "b119-plain")
		require.NoError(t, mu.Lock(within(t)))
		require.NoError(t, mu.Unlock(within(t)))
		require.Equal(t, "mine", w.server.MustDo("GET", "b119-plain"))
	})
}

// B120, the half that needs no cluster: names with braces are names like others: none is another's lock, each passes between processes by message,
// and a prefix with braces is refused.
func TestScenarioB120BracesInNames(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		exchange(t, w, []string{"a", "{a}", "a{b}c{d}", "{}a", "a{}", "{a", "a}", "}{", "{{a}}", "{a}{b}", "}", `\}`, `\\}`, `\`, "}:mutex", "a}:mutex:{b"})
		for _, prefix := range []string{"{p}", "p{", "}p"} {
			require.ErrorIs(t, dsync.NewMutex(w.client(t, dsync.WithPrefix(prefix)), "a").Lock(within(t)), dsync.ErrInvalidOption)
		}
	})
}

// exchange holds all the names at once and then passes each to another process, which must hear of it by message under the very name.
func exchange(t *testing.T, w *world, names []string) {
	t.Helper()
	acquired := make(chan dsync.AcquiredInfo, len(names))
	c := w.client(t, dsync.WithHooks(dsync.Hooks{Acquired: func(i dsync.AcquiredInfo) {
		if i.Via != dsync.ViaReply {
			acquired <- i
		}
	}}))
	w.warm(t, c)
	first := w.client(t)
	var held []*dsync.Mutex
	var got []<-chan error
	for _, name := range names {
		mu := dsync.NewMutex(first, name, dsync.WithTTL(time.Minute))
		ok, err := mu.TryLock(within(t))
		require.NoError(t, err)
		require.True(t, ok, "%q is another's lock", name)
		held = append(held, mu)
	}
	for i, mu := range held {
		ok, err := dsync.NewMutex(c, names[i]).TryLock(within(t))
		require.NoError(t, err)
		require.False(t, ok)
		got = append(got, locking(within(t), dsync.NewMutex(c, names[i], dsync.WithTTL(time.Minute))))
		queued(t, mu, 1)
	}
	for i, mu := range held {
		require.NoError(t, mu.Unlock(within(t)))
		require.NoError(t, <-got[i])
		info := receive(t, "the hook", acquired)
		require.Equal(t, names[i], info.Name)
		require.Equal(t, dsync.ViaMessage, info.Via, "%q", names[i])
		require.Equal(t, names[i], mu.Name())
	}
}
