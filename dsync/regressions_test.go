package dsync_test

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/e51fe0e6/dsync/dsync"
	"github.com/e51fe0e6/dsync/internal/redistest"
	"github.com/e51fe0e6/dsync/scripts"
)

// goredisWorld is for what does not depend on the driver.
func goredisWorld(t *testing.T) *world {
	t.Helper()
	return &world{dialer: dialers[0], server: redistest.Start(t)}
}

// A Do whose release is not answered when Close gives up never returns: the timers are gone and so is whoever sends.
func TestCloseLeavesNoUnlockWaiting(t *testing.T) {
	w := goredisWorld(t)
	p := redistest.NewProxy(t, w.server.Addr())
	c := w.clientAt(t, p.Addr())
	mu := dsync.NewMutex(c, "hang", dsync.WithTTL(3*time.Second))
	in, done := make(chan struct{}), make(chan error, 1)
	go func() {
		done <- mu.Do(context.Background(), func(ctx context.Context) error {
			close(in)
			<-ctx.Done() // heeds Close
			return nil
		})
	}()
	<-in
	p.BlackHole(true)
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	_ = c.Close(ctx)
	p.BlackHole(false)         // even though Redis comes back
	require.NoError(t, <-done) // an unconfirmed release is not an error of Do
}

// The Released hook says nothing of a release for which nobody waited to the end.
func TestReleasedHookTellsOfEveryRelease(t *testing.T) {
	w := goredisWorld(t)
	var acquired, released atomic.Int64
	c := w.client(t, dsync.WithHooks(dsync.Hooks{
		Acquired: func(dsync.AcquiredInfo) { acquired.Add(1) },
		Released: func(dsync.ReleasedInfo) { released.Add(1) },
	}))
	mu := dsync.NewMutex(c, "hook")
	for range 20 {
		ctx, cancel := context.WithCancel(within(t))
		require.NoError(t, mu.Do(ctx, func(context.Context) error { cancel(); return nil }))
	}
	require.NoError(t, mu.Lock(within(t)))
	require.NoError(t, mu.Unlock(within(t)))
	eventually(t, "as many releases as acquisitions", func() bool { return acquired.Load() == 21 && released.Load() == 21 })
}

// A context that outlives its Do says ErrDeadlock for ever.
func TestDeadlockEndsWithTheDo(t *testing.T) {
	w := goredisWorld(t)
	mu := dsync.NewMutex(w.client(t), "later")
	var later context.Context
	require.NoError(t, mu.Do(within(t), func(ctx context.Context) error {
		later = context.WithoutCancel(ctx) //nolint:fatcontext // the test is about a context that outlives its Do
		return nil
	}))
	ok, err := mu.TryLock(later) // as a follow-up job would
	require.NoError(t, err)
	require.True(t, ok)
}

// Do releases whatever the value holds when fn returns, not its own hold.
func TestDoReleasesItsOwnHoldOnly(t *testing.T) {
	w := goredisWorld(t)
	c := w.client(t)
	mu := dsync.NewMutex(c, "steal")
	require.NoError(t, mu.Do(within(t), func(ctx context.Context) error {
		require.NoError(t, mu.Unlock(ctx)) // early, a mistake or an optimisation
		locked := make(chan error)
		go func() { locked <- mu.Lock(within(t)) }() // another goroutine's section begins
		require.NoError(t, <-locked)
		return nil
	}))
	ok, err := dsync.NewMutex(c, "steal").TryLock(within(t))
	require.NoError(t, err)
	require.False(t, ok, "the other goroutine's hold was released by the Do")
}

// While Redis is away all concurrent tries but one are told that somebody holds the lock.
func TestTryLocksShareTheOutage(t *testing.T) {
	w := goredisWorld(t)
	p := redistest.NewProxy(t, w.server.Addr())
	c := w.clientAt(t, p.Addr())
	require.NoError(t, c.Ping(within(t)))
	p.BlackHole(true)
	var wg sync.WaitGroup
	var lies atomic.Int64
	for range 10 {
		wg.Go(func() {
			if ok, err := dsync.NewMutex(c, "away").TryLock(context.Background()); !ok && err == nil {
				lies.Add(1)
			}
		})
	}
	wg.Wait()
	require.Zero(t, lies.Load(), "of 10 tries so many were told that somebody holds it; nobody does")
}

func TestClosedClientSaysSo(t *testing.T) {
	w := goredisWorld(t)
	c := w.client(t)
	mu := dsync.NewMutex(c, "closed")
	require.NoError(t, c.Close(within(t)))
	_, err := mu.Inspect(within(t))
	errPing := c.Ping(within(t))
	require.ErrorIs(t, errPing, dsync.ErrClosed)
	require.ErrorIs(t, err, dsync.ErrClosed)
}

func TestPingAndInspectTellAnOutage(t *testing.T) {
	w := goredisWorld(t)
	p := redistest.NewProxy(t, w.server.Addr())
	c := w.clientAt(t, p.Addr())
	p.CutAll()
	p.Refuse(true)
	_, err := dsync.NewMutex(c, "away").Inspect(within(t))
	errPing := c.Ping(within(t))
	require.ErrorIs(t, errPing, dsync.ErrUnavailable)
	require.ErrorIs(t, err, dsync.ErrUnavailable)
}

// TryLock with a context shorter than 3 s on a silent server.
func TestTryLockTellsTheOutageWithTheContext(t *testing.T) {
	w := goredisWorld(t)
	p := redistest.NewProxy(t, w.server.Addr())
	// The client's own timeout is far, so that it is ctx which ends the call.
	c := w.special(t, func(o *redis.Options) { o.Addr, o.ReadTimeout = p.Addr(), 20*time.Second }, nil)
	require.NoError(t, c.Ping(within(t)))
	p.BlackHole(true)
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	_, err := dsync.NewMutex(c, "silent").TryLock(ctx)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorIs(t, err, dsync.ErrUnavailable)
}

func TestLossTellsWhyRenewalsFailed(t *testing.T) {
	w := goredisWorld(t)
	w.server.MustDo("ACL", "SETUSER", "u", "on", ">p", "~*", "&*", "+@all")
	d, done, err := w.dialer.dial(w.server.Addr(), "u", "p")
	require.NoError(t, err)
	defer done()
	failed, lost := make(chan error, 100), make(chan dsync.LostInfo, 1)
	c := dsync.New(d, dsync.WithHooks(dsync.Hooks{
		RenewalFailed: func(i dsync.RenewalFailedInfo) { failed <- i.Err },
		Lost:          func(i dsync.LostInfo) { lost <- i },
	}))
	defer closeNow(t, c)
	mu := dsync.NewMutex(c, "denied", dsync.WithTTL(600*time.Millisecond))
	require.NoError(t, mu.Lock(within(t)))
	w.server.MustDo("ACL", "SETUSER", "u", "-evalsha", "-eval")
	i := <-lost
	require.NotEmpty(t, failed)
	t.Log("renewals failed with", <-failed)
	require.Error(t, i.Err, "reason %s", i.Reason)
}

func TestHookMayEndItsGoroutine(t *testing.T) {
	w := goredisWorld(t)
	var n atomic.Int64
	c := w.client(t, dsync.WithHooks(dsync.Hooks{Acquired: func(dsync.AcquiredInfo) {
		if n.Add(1) == 1 {
			runtime.Goexit() // t.FailNow, for one
		}
	}}))
	mu := dsync.NewMutex(c, "goexit")
	for range 3 {
		require.NoError(t, mu.Lock(within(t)))
		require.NoError(t, mu.Unlock(within(t)))
	}
	eventually(t, "three calls", func() bool { return n.Load() == 3 })
}

// evalMutex runs the script as a stranger would.
func evalMutex(w *world, name, verb, mine, ask, letters string) []any {
	r, _ := w.server.MustDo("EVAL", scripts.Mutex.Src(), "1", key(name),
		verb, mine, ask, "600000", "600000", "0", letters, "dsync:c:", "", "pid=1").([]any)
	return r
}

func TestInspectCountsBehindGivenUpPlaces(t *testing.T) {
	w := goredisWorld(t)
	evalMutex(w, "holes", "acquire", "", "a:holder", "w")
	evalMutex(w, "holes", "acquire", "", "b:head", "w")
	const gaveUp = 1_100
	for i := range gaveUp {
		token := fmt.Sprintf("c:%d", i)
		evalMutex(w, "holes", "acquire", "", token, "w")
		evalMutex(w, "holes", "release", token, "", "")
	}
	evalMutex(w, "holes", "acquire", "", "d:tail", "w")
	mu := dsync.NewMutex(w.client(t), "holes")
	state, err := mu.Inspect(within(t))
	require.NoError(t, err)
	require.GreaterOrEqual(t, state.Waiting, 2, "Waiting: queue %v", len(state.Queue))
}

func TestZeroValueLockerPanicsWithItsError(t *testing.T) {
	var mu dsync.Mutex
	defer func() {
		if err, _ := recover().(runtime.Error); err != nil {
			t.Fatal(err)
		}
	}()
	mu.Locker().Unlock()
}
