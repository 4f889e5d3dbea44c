package dsync_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
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

// B124: a release that the server refuses is told with the server's reason. Nothing is renewed any more, and it is repeated until it is done. (A full
// memory refuses no release: B135.)
func TestScenarioB124RefusedReleaseIsTold(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		c := w.client(t)
		m := watch(t, w.server)
		dir, _ := w.server.MustDo("CONFIG", "GET", "dir").([]any)
		for reason, o := range map[string]struct{ begin, end func() }{
			"NOREPLICAS": {
				func() { w.server.MustDo("CONFIG", "SET", "min-replicas-to-write", "1") },
				func() { w.server.MustDo("CONFIG", "SET", "min-replicas-to-write", "0") },
			},
			"READONLY": {
				func() { w.server.MustDo("REPLICAOF", "127.0.0.1", "1") },
				func() { w.server.MustDo("REPLICAOF", "NO", "ONE") },
			},
			"MISCONF": {
				func() { // a directory is where the dump should go
					require.NoError(t, os.Mkdir(filepath.Join(dir[1].(string), "dump.rdb"), 0o700))
					w.server.MustDo("CONFIG", "SET", "save", "3600 100000")
					w.server.MustDo("BGSAVE")
					eventually(t, "the failed save", func() bool { return w.server.Info("persistence")["rdb_last_bgsave_status"] == "err" })
				},
				func() { w.server.MustDo("CONFIG", "SET", "stop-writes-on-bgsave-error", "no") },
			},
		} {
			t.Run(reason, func(t *testing.T) {
				mu := dsync.NewMutex(c, "b124-"+reason, dsync.WithTTL(10*time.Minute))
				short := dsync.NewMutex(c, "b124-short-"+reason, dsync.WithTTL(600*time.Millisecond))
				require.NoError(t, mu.Lock(within(t)))
				require.NoError(t, short.Lock(within(t)))
				o.begin()
				err := mu.Unlock(within(t))
				require.ErrorIs(t, err, dsync.ErrUnconfirmed)
				require.ErrorContains(t, err, reason)
				require.Error(t, short.Unlock(within(t)))
				before := m.count("renew")
				<-time.After(500 * time.Millisecond) // two renewals of the short one
				require.Equal(t, before, m.count("renew"))
				o.end()
				freed(t, w.server, mu.Name())
			})
		}
	})
}

// B125: cut off without a word, the holder is told by itself, once and for ever, with the cause; the lock is granted to another only after that.
// That it is told *before* the server can grant is shown in virtual time.
func TestScenarioB125SilenceIsToldAsLoss(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		p := redistest.NewProxy(t, w.server.Addr())
		lost := make(chan dsync.LostInfo, 10)
		failed := make(chan error, 1000)
		c := w.clientAt(t, p.Addr(), dsync.WithHooks(dsync.Hooks{
			Lost:          func(i dsync.LostInfo) { lost <- i },
			RenewalFailed: func(i dsync.RenewalFailedInfo) { failed <- i.Err },
		}))
		w.warm(t, c)
		mu, other := dsync.NewMutex(c, "b125", dsync.WithTTL(900*time.Millisecond)), dsync.NewMutex(w.client(t), "b125")
		ended := make(chan error, 1)
		running := make(chan struct{})
		go func() {
			ended <- mu.Do(within(t), func(ctx context.Context) error {
				close(running)
				<-ctx.Done()
				return context.Cause(ctx)
			})
		}()
		receive(t, "Do", running)
		channel := mu.Lost()
		p.BlackHole(true)
		receive(t, "the loss", channel)
		require.Zero(t, mu.Remaining())
		require.ErrorIs(t, receive(t, "the end of Do", ended), dsync.ErrLost)
		info := receive(t, "the hook", lost)
		require.Equal(t, "expired", info.Reason)
		require.Error(t, info.Err, "the cause is attached")
		require.Positive(t, info.Fence)
		require.Error(t, receive(t, "a failed renewal", failed))
		require.NoError(t, other.Lock(within(t)))
		require.Greater(t, other.Fence(), info.Fence)
		p.CutAll()
		p.BlackHole(false)
		require.NoError(t, other.Unlock(within(t)))
		require.NoError(t, mu.Lock(within(t)))
		require.NoError(t, mu.Unlock(within(t)))
		require.Empty(t, lost, "it was told once")
		<-channel // and does not open again
	})
}

// B127: one renewal that fails, in whatever way, is told as that and tried again; the hold is not lost.
func TestScenarioB127OneFailedRenewalIsNoLoss(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		failed := map[string]chan error{}
		begin := func(name string, c func(opts ...dsync.ClientOption) *dsync.Client) *dsync.Mutex {
			told := make(chan error, 100)
			failed[name] = told
			mu := dsync.NewMutex(c(dsync.WithHooks(dsync.Hooks{
				RenewalFailed: func(i dsync.RenewalFailedInfo) { told <- i.Err },
				Lost:          func(i dsync.LostInfo) { t.Errorf("%s is lost: %v", name, i.Err) },
			})), name, dsync.WithTTL(4*time.Second))
			require.NoError(t, mu.Lock(within(t)))
			return mu
		}
		held := map[string]*dsync.Mutex{}
		for _, code := range []string{"LOADING", "CLUSTERDOWN", "TRYAGAIN", "BUSY", "OOM"} {
			name := "b127-" + code
			held[name] = begin(name, func(opts ...dsync.ClientOption) *dsync.Client {
				d, done, err := w.dialer.dial(w.server.Addr(), "", "")
				require.NoError(t, err)
				return clientOf(t, &refusing{Driver: d, verb: "renew", text: code + " try again later"}, done, opts...)
			})
		}
		for name, fault := range map[string]func(p *redistest.Proxy, match func([]byte) bool) <-chan struct{}{
			"b127-reset": (*redistest.Proxy).NeverDeliver,
			"b127-reply": (*redistest.Proxy).LoseReplyTo,
		} {
			p := redistest.NewProxy(t, w.server.Addr())
			held[name] = begin(name, func(opts ...dsync.ClientOption) *dsync.Client { return w.clientAt(t, p.Addr(), opts...) })
			fault(p, func(request []byte) bool { return bytes.Contains(request, []byte("renew")) })
		}
		m := watch(t, w.server)
		for name, told := range failed {
			err := receive(t, "the failure of "+name, told)
			require.Error(t, err)
			if code := strings.TrimPrefix(name, "b127-"); strings.ToUpper(code) == code {
				require.ErrorContains(t, err, code)
			}
			eventually(t, "the next try of "+name, func() bool { return len(m.seen("renew", key(name))) > 0 })
		}
		w.server.Pause() // a pause shorter than the lease
		<-time.After(300 * time.Millisecond)
		w.server.Resume()
		for name, mu := range held {
			require.False(t, isLost(mu), name)
			require.NoError(t, mu.Unlock(within(t)), name)
		}
	})
}

// B128: renewals on their way when the lock is released raise no false loss, and none follows the release.
func TestScenarioB128ReleaseRacesTheRenewal(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		const workers = 8
		var mu sync.Mutex // guards lost
		lost := map[int64]bool{}
		p := redistest.NewProxy(t, w.server.Addr())
		c := w.clientAt(t, p.Addr(), dsync.WithHooks(dsync.Hooks{Lost: func(i dsync.LostInfo) {
			mu.Lock()
			defer mu.Unlock()
			lost[i.Fence] = true
		}}))
		w.warm(t, c)
		m := watch(t, w.server)
		p.SetDelay(3*time.Millisecond, 3*time.Millisecond)
		ctx := within(t)
		good := make(chan int64, workers*rounds(15, 1000))
		var wg sync.WaitGroup
		for i := range workers {
			own := dsync.NewMutex(c, fmt.Sprintf("b128-%d", i), dsync.WithTTL(100*time.Millisecond))
			wg.Go(func() {
				for range rounds(15, 1000) {
					if err := own.Lock(ctx); err != nil {
						t.Error(err)
						return
					}
					fence := own.Fence()
					<-time.After(25*time.Millisecond + time.Duration(rand.IntN(15))*time.Millisecond) // the first renewal is due at 33
					switch err := own.Unlock(ctx); {
					case err == nil:
						good <- fence
					case !errors.Is(err, dsync.ErrLost) && !errors.Is(err, dsync.ErrUnconfirmed): // a slow machine
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
		close(good)
		for i := range workers {
			freed(t, w.server, fmt.Sprintf("b128-%d", i))
		}
		before := m.count("renew")
		t.Logf("%d renewals, %d good holds", before, len(good))
		<-time.After(200 * time.Millisecond) // six renewals
		require.Equal(t, before, m.count("renew"))
		mu.Lock()
		defer mu.Unlock()
		for fence := range good {
			require.False(t, lost[fence], "released in time, and told as lost")
		}
	})
}

// B131: after a loss, and after its release, the same value locks at once and with a greater fence. What was lost stays lost, even when a good
// answer to an old renewal comes late.
func TestScenarioB131WhatIsLostStaysLost(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		p := redistest.NewProxy(t, w.server.Addr())
		c := w.clientAt(t, p.Addr())
		w.warm(t, c)
		m := watch(t, w.server)
		mu := dsync.NewMutex(c, "b131", dsync.WithTTL(600*time.Millisecond))
		require.NoError(t, mu.Lock(within(t)))
		first, channel := mu.Fence(), mu.Lost()
		p.HoldDown()
		receive(t, "the loss", channel)
		require.Positive(t, m.renewals("b131"), "there is a good answer on its way")
		p.Release()
		require.NoError(t, dsync.NewMutex(c, "b131-other").Lock(within(t)), "what was held back has been read")
		require.Zero(t, mu.Remaining())
		<-channel
		ok, err := mu.TryLock(within(t))
		require.NoError(t, err)
		require.False(t, ok, "its owner is still inside")
		require.ErrorIs(t, mu.Unlock(within(t)), dsync.ErrLost)

		for _, lose := range []func(){func() { w.server.MustDo("DEL", key("b131-again")) }, w.server.Restart} {
			again := dsync.NewMutex(c, "b131-again", dsync.WithTTL(time.Second))
			require.NoError(t, again.Lock(within(t)))
			require.Greater(t, again.Fence(), first)
			first = again.Fence()
			lose()
			receive(t, "the loss", again.Lost())
			require.ErrorIs(t, again.Unlock(within(t)), dsync.ErrLost)
			require.NoError(t, again.Lock(within(t)))
			require.Greater(t, again.Fence(), first)
			first = again.Fence()
			require.ErrorIs(t, errors.Join(again.Unlock(within(t)), again.Unlock(within(t))), dsync.ErrNotHeld)
			require.Empty(t, holder(w.server, "b131-again"))
		}
	})
}

// B134: a holder without the right to any channel: its Unlock is no error and grants to the waiter, which hears nothing and finds the grant by asking.
// The missing right is named once. (TestMutexWithoutTheChannel has the waiter without it.)
func TestScenarioB134MissingChannelRight(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		w.server.MustDo("ACL", "SETUSER", "deaf", "on", ">pw", "~*", "resetchannels", "+@all")
		log := &journal{}
		via := make(chan dsync.Via, 10)
		c := w.client(t, dsync.WithHooks(dsync.Hooks{Acquired: func(i dsync.AcquiredInfo) {
			if i.Name == "b134" {
				via <- i.Via
			}
		}}))
		w.warm(t, c)
		a, b := dsync.NewMutex(w.asUser(t, "deaf", log.option()), "b134", dsync.WithTTL(10*time.Minute)), dsync.NewMutex(c, "b134", dsync.WithTTL(900*time.Millisecond))
		require.NoError(t, a.Lock(within(t)))
		got := locking(within(t), b)
		queued(t, a, 1)
		require.NoError(t, a.Unlock(within(t)))
		require.NoError(t, <-got)
		require.Equal(t, dsync.ViaRecheck, receive(t, "the hook", via))
		if err := b.Unlock(within(t)); err != nil {
			require.ErrorIs(t, err, dsync.ErrLost) // a slow machine
		}
		eventually(t, "the warning", func() bool { return strings.Contains(strings.Join(log.lines(), ""), "&dsync:*") })
		require.Len(t, log.lines(), 1)
	})
}

// B135: a full memory: a new lock is refused with the reason and leaves nothing half written; what is held is released and passed on, waiters can leave,
// and afterwards all is well. (TestMutexHoldsThroughFullMemory has the renewals.)
func TestScenarioB135FullMemory(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		const names = 20
		c, other := w.client(t), w.client(t)
		w.warm(t, other)
		ctx, cancel := context.WithCancel(within(t))
		var held []*dsync.Mutex
		var got []<-chan error
		for i := range names {
			held = append(held, dsync.NewMutex(c, fmt.Sprintf("b135-%d", i), dsync.WithTTL(time.Minute)))
			require.NoError(t, held[i].Lock(within(t)))
			got = append(got, locking(ctx, dsync.NewMutex(other, held[i].Name(), dsync.WithTTL(time.Minute))))
			queued(t, held[i], 1)
		}
		w.server.MustDo("CONFIG", "SET", "maxmemory", "1")
		ok, err := dsync.NewMutex(c, "b135-new").TryLock(within(t))
		require.False(t, ok)
		require.ErrorIs(t, err, dsync.ErrUnavailable)
		require.ErrorContains(t, err, "OOM")
		short, stop := context.WithTimeout(within(t), 100*time.Millisecond)
		defer stop()
		require.ErrorContains(t, dsync.NewMutex(c, "b135-new").Lock(short), "OOM")
		require.Equal(t, int64(0), w.server.MustDo("EXISTS", key("b135-new")))
		for i, mu := range held[:names/2] {
			require.NoError(t, mu.Unlock(within(t)))
			require.NoError(t, <-got[i])
		}
		cancel()
		for i, mu := range held[names/2:] {
			require.ErrorIs(t, <-got[names/2+i], context.Canceled)
			queued(t, mu, 0)
			require.NoError(t, mu.Unlock(within(t)))
			require.Empty(t, holder(w.server, mu.Name()))
		}
		w.server.MustDo("CONFIG", "SET", "maxmemory", "0")
		mu := dsync.NewMutex(c, "b135-new")
		require.NoError(t, mu.Lock(within(t)))
		require.NoError(t, mu.Unlock(within(t)))
	})
}

// B136: the server evicts the lock: the holder is told by its next renewal, and the next fence is greater although its counter is gone too.
func TestScenarioB136Eviction(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		lost := make(chan dsync.LostInfo, 1)
		c := w.client(t, dsync.WithHooks(dsync.Hooks{Lost: func(i dsync.LostInfo) { lost <- i }}))
		a, b := dsync.NewMutex(c, "b136", dsync.WithTTL(3*time.Second)), dsync.NewMutex(w.client(t), "b136")
		require.NoError(t, a.Lock(within(t)))
		first := a.Fence()
		w.server.MustDo("CONFIG", "SET", "maxmemory-policy", "volatile-lru")
		w.server.MustDo("CONFIG", "SET", "maxmemory", "1")
		eventually(t, "the eviction", func() bool {
			_, _ = w.server.Do("SET", "more", "data") // each write has the server make room
			return w.server.MustDo("EXISTS", key("b136")) == int64(0)
		})
		w.server.MustDo("CONFIG", "SET", "maxmemory", "0")
		require.NoError(t, b.Lock(within(t)))
		require.Greater(t, b.Fence(), first)
		receive(t, "the loss", a.Lost())
		require.Equal(t, "denied by the server", receive(t, "the hook", lost).Reason)
		require.ErrorIs(t, a.Unlock(within(t)), dsync.ErrLost)
		require.NoError(t, b.Unlock(within(t)))
	})
}

// B138: over RESP2, and where HELLO is refused, all works as otherwise: a waiter is woken by message.
func TestScenarioB138RESP2(t *testing.T) {
	scenario(t, func(t *testing.T, w *world) {
		w.server.MustDo("ACL", "SETUSER", "nohello", "on", ">pw", "~*", "&*", "+@all", "-hello")
		for how, c := range map[string]func(t *testing.T) *dsync.Client{
			"resp2": func(t *testing.T) *dsync.Client {
				return w.special(t, func(o *redis.Options) { o.Protocol = 2 }, func(o *rueidis.ClientOption) { o.AlwaysRESP2 = true })
			},
			"hello-refused": func(t *testing.T) *dsync.Client {
				d, done, err := w.dialer.dial(w.server.Addr(), "nohello", "pw")
				if err != nil {
					require.ErrorContains(t, err, "NOPERM") // told at once, by the client library
					t.Skipf("%s needs HELLO, and says so: %v", w.dialer.name, err)
				}
				return clientOf(t, d, done)
			},
		} {
			t.Run(how, func(t *testing.T) {
				ca, cb := c(t), c(t)
				w.warm(t, ca)
				w.warm(t, cb)
				require.NoError(t, ca.Ping(within(t)))
				a, b := dsync.NewMutex(ca, how, dsync.WithTTL(time.Minute)), dsync.NewMutex(cb, how, dsync.WithTTL(time.Minute))
				g := &gate{}
				for range 5 {
					require.NoError(t, a.Lock(within(t)))
					g.enter(a.Fence())
					start, before := time.Now(), calls(w.server)
					got := locking(within(t), b)
					eventually(t, "the waiter", func() bool { return len(fields(w.server, key(how))) > 0 && holdsPlace(w.server, how) })
					g.leave()
					require.NoError(t, a.Unlock(within(t)))
					require.NoError(t, <-got)
					g.enter(b.Fence())
					g.leave()
					require.LessOrEqual(t, calls(w.server)-before, 2+atMost(1, start, 3*time.Second), "by message, not by asking again and again")
					require.NoError(t, b.Unlock(within(t)))
				}
				g.check(t)
			})
		}
	})
}

// holdsPlace reports whether somebody is in the queue of a mutex, without running a script.
func holdsPlace(s *redistest.Server, name string) bool {
	all := fields(s, key(name))
	for i := 0; i < len(all); i += 2 {
		if strings.HasPrefix(all[i], "q") {
			return true
		}
	}
	return false
}

// B139: a server that does not know a command of the scripts is told at once and as permanent, by Lock and by Ping, and wherever in the
// script that command comes, nothing stays that would hold the lock or never expire.
func TestScenarioB139OldServerIsToldAtOnce(t *testing.T) {
	t.Parallel()
	for _, d := range dialers {
		for _, command := range []string{"EVALSHA", "TIME", "HMGET", "HSET", "PEXPIREAT"} {
			t.Run(d.name+"/"+command, func(t *testing.T) {
				w := &world{dialer: d, server: redistest.Start(t, redistest.WithConfig("rename-command", command, "GONE-"+command))}
				c := w.client(t)
				mu := dsync.NewMutex(c, "b139")
				for _, err := range []error{mu.Lock(within(t)), c.Ping(within(t)), func() error { _, err := mu.TryLock(within(t)); return err }()} {
					require.Error(t, err)
					require.NotErrorIs(t, err, dsync.ErrUnavailable)
					require.Contains(t, strings.ToLower(err.Error()), "unknown")
				}
				require.Empty(t, holder(w.server, "b139"))
				everythingExpires(t, w.server)
			})
		}
	}
}
