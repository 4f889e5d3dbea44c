package goredis

import (
	"bufio"
	"context"
	"errors"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"go.uber.org/goleak"

	"github.com/e51fe0e6/dsync/driver"
	"github.com/e51fe0e6/dsync/driver/drivertest"
	"github.com/e51fe0e6/dsync/driver/internal/detach"
	"github.com/e51fe0e6/dsync/internal/redistest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// options has the retries of go-redis on: they must not concern scripts.
func options(addr string) *redis.Options {
	return &redis.Options{
		Addr: addr, MaxRetries: 3,
		DialTimeout: time.Second, DialerRetries: 1, ReadTimeout: time.Second, WriteTimeout: time.Second,
	}
}

// patient is for miniredis, which takes milliseconds for each script under the race detector.
const patient = 20 * time.Second

func newDriver(tb testing.TB, opt *redis.Options) driver.Driver {
	tb.Helper()
	client := redis.NewClient(opt)
	tb.Cleanup(func() { _ = client.Close() })
	return New(client)
}

func harness(change func(*redis.Options)) drivertest.Harness {
	return drivertest.Harness{
		New: func(tb testing.TB, addr string) driver.Driver {
			tb.Helper()
			opt := options(addr)
			change(opt)
			return newDriver(tb, opt)
		},
		Bound: 6 * time.Second,
	}
}

func TestConformance(t *testing.T) { drivertest.Run(t, harness(func(*redis.Options) {})) }

func TestConformanceRESP2(t *testing.T) {
	drivertest.Run(t, harness(func(o *redis.Options) { o.Protocol = 2 }))
}

func TestConformanceMini(t *testing.T) {
	drivertest.RunMini(t, harness(func(o *redis.Options) { o.ReadTimeout, o.WriteTimeout = patient, patient }))
}

func TestConformanceCluster(t *testing.T) {
	drivertest.RunCluster(t, drivertest.Harness{
		New: func(tb testing.TB, addr string) driver.Driver {
			tb.Helper()
			client := redis.NewClusterClient(&redis.ClusterOptions{
				Addrs: []string{addr}, MaxRetries: 3,
				DialTimeout: time.Second, DialerRetries: 1, ReadTimeout: time.Second, WriteTimeout: time.Second,
			})
			tb.Cleanup(func() { _ = client.Close() })
			return New(client)
		},
		Bound: 15 * time.Second,
	})
}

var incr = driver.NewScript("return {redis.call('INCR', KEYS[1])}")

func incrCmd(key string) driver.Cmd { return driver.Cmd{Script: incr, Keys: []string{key}} }

func TestNewPanicsWithoutClient(t *testing.T) {
	for name, client := range map[string]redis.UniversalClient{"nil": nil, "nil pointer": (*redis.Client)(nil)} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("New of %s did not panic", name)
				}
			}()
			New(client)
		}()
	}
}

func TestRingIsRefused(t *testing.T) {
	ring := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"a": "127.0.0.1:1"}, HeartbeatFrequency: time.Hour})
	defer func() { _ = ring.Close() }()
	d := New(ring)
	_, err := d.Exec(t.Context(), incrCmd("k"))
	_, _, errWait := d.ExecWait(t.Context(), incrCmd("k"), 0, 0)
	errMulti := d.ExecMulti(t.Context(), []driver.Cmd{incrCmd("k")})[0].Err
	_, errSession := d.OpenSession(t.Context(), func(driver.Event) {})
	for i, err := range []error{err, errWait, errMulti, errSession} {
		if !errors.Is(err, driver.ErrPermanent) {
			t.Errorf("call %d on a Ring: %v, want ErrPermanent", i, err)
		}
	}
}

func TestClosedClientIsPermanent(t *testing.T) {
	client := redis.NewClient(options(redistest.Start(t).Addr()))
	d := New(client)
	if _, err := d.Exec(t.Context(), incrCmd("k")); err != nil {
		t.Fatal(err)
	}
	_ = client.Close()
	_, err := d.Exec(t.Context(), incrCmd("k"))
	_, _, errWait := d.ExecWait(t.Context(), incrCmd("k"), 0, 0)
	_, errSession := d.OpenSession(t.Context(), func(driver.Event) {})
	for i, err := range []error{err, errWait, errSession} {
		if !errors.Is(err, driver.ErrPermanent) {
			t.Errorf("call %d on a closed client: %v, want ErrPermanent", i, err)
		}
	}
}

func TestPoolTimeoutIsNotExecuted(t *testing.T) {
	opt := options(redistest.Start(t).Addr())
	opt.PoolSize, opt.PoolTimeout = 1, 50*time.Millisecond
	client := redis.NewClient(opt)
	defer func() { _ = client.Close() }()
	conn := client.Conn()
	defer func() { _ = conn.Close() }()
	if err := conn.Ping(t.Context()).Err(); err != nil { // takes the one connection
		t.Fatal(err)
	}
	if _, err := New(client).Exec(t.Context(), incrCmd("k")); !errors.Is(err, driver.ErrNotExecuted) {
		t.Errorf("Exec without a free connection: %v, want ErrNotExecuted", err)
	}
}

// The library's defaults would run the script four times here.
func TestShortReadTimeoutExecutesOnce(t *testing.T) {
	server := redistest.Start(t)
	opt := options(server.Addr())
	opt.ReadTimeout = 100 * time.Millisecond
	d := newDriver(t, opt)
	if _, err := d.Exec(t.Context(), incrCmd("warm")); err != nil {
		t.Fatal(err)
	}
	server.Pause()
	defer server.Resume()
	_, err := d.Exec(t.Context(), incrCmd("single"))
	multi := d.ExecMulti(t.Context(), []driver.Cmd{incrCmd("multi"), incrCmd("multi2")})
	server.Resume()
	for i, err := range []error{err, multi[0].Err, multi[1].Err} {
		if !errors.Is(err, driver.ErrUnknown) {
			t.Errorf("call %d: %v, want ErrUnknown", i, err)
		}
	}
	redistest.WaitFor(t, "the late script to run", func() bool { return server.MustDo("GET", "single") != nil })
	if got := server.MustDo("GET", "single"); got != "1" {
		t.Errorf("the script of single ran %v times", got)
	}
	for _, key := range []string{"multi", "multi2"} { // they got no further than the greeting of a new connection
		if got := server.MustDo("GET", key); got != nil {
			t.Errorf("the script of %s ran %v times", key, got)
		}
	}
}

// Neither a cancelable caller nor one that cannot be cancelled waits for a client whose timeouts are off.
func TestOwnBoundWithoutTimeoutsOfTheClient(t *testing.T) {
	proxy := redistest.NewProxy(t, redistest.Start(t).Addr())
	opt := options(proxy.Addr())
	opt.ReadTimeout, opt.WriteTimeout = -1, -1
	a := newDriver(t, opt).(*adapter)
	a.waiter = detach.NewWaiter(200 * time.Millisecond)
	if _, err := a.Exec(t.Context(), incrCmd("k")); err != nil {
		t.Fatal(err)
	}
	proxy.BlackHole(true)
	defer proxy.BlackHole(false)
	began := time.Now()
	for _, ctx := range []context.Context{t.Context(), context.WithoutCancel(t.Context())} {
		_, err := a.Exec(ctx, incrCmd("k"))
		_, _, errWait := a.ExecWait(ctx, incrCmd("k"), 0, time.Millisecond)
		errMulti := a.ExecMulti(ctx, []driver.Cmd{incrCmd("k")})[0].Err
		for i, err := range []error{err, errWait, errMulti} {
			if !errors.Is(err, driver.ErrUnknown) {
				t.Errorf("call %d: %v, want ErrUnknown", i, err)
			}
		}
	}
	_, err := a.OpenSession(t.Context(), func(driver.Event) {})
	if !errors.Is(err, driver.ErrNotExecuted) {
		t.Errorf("OpenSession: %v, want ErrNotExecuted", err)
	}
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("took %v with a bound of 200ms each", took)
	}
	proxy.CutAll() // ends the commands that the library still waits for
}

func TestBounded(t *testing.T) {
	for _, tc := range []struct {
		name   string
		change func(*redis.Options)
		want   bool
	}{
		{"defaults", func(*redis.Options) {}, true},
		{"no read timeout", func(o *redis.Options) { o.ReadTimeout = -1 }, false},
		{"no deadlines at all", func(o *redis.Options) { o.ReadTimeout, o.WriteTimeout = -2, -2 }, false},
		{"patient", func(o *redis.Options) { o.ReadTimeout = 40 * time.Second }, false},
		{"many dials", func(o *redis.Options) { o.DialerRetries = 20 }, false},
	} {
		opt := &redis.Options{Addr: "127.0.0.1:1"}
		tc.change(opt)
		client := redis.NewClient(opt)
		if got := bounded(client); got != tc.want {
			t.Errorf("%s: bounded = %v, want %v", tc.name, got, tc.want)
		}
		_ = client.Close()
	}
}

func TestCallsThatAreReadyTogetherGoOutTogether(t *testing.T) {
	const goroutines, rounds, delay = 64, 4, 4 * time.Millisecond
	server := redistest.Start(t)
	proxy := redistest.NewProxy(t, server.Addr())
	d := newDriver(t, options(proxy.Addr()))
	if _, err := d.Exec(t.Context(), incrCmd("warm")); err != nil {
		t.Fatal(err)
	}
	proxy.SetDelay(delay/2, delay/2)
	var wg sync.WaitGroup
	for g := range goroutines {
		wg.Go(func() { // ends with its calls
			for range rounds {
				if _, err := d.Exec(t.Context(), incrCmd("k"+strconv.Itoa(g))); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	const few = 4 * maxInFlight // on a slow machine a pipeline may look stalled, and another starts
	if got := proxy.Accepted(); got > few {
		t.Errorf("%d callers took %d connections, want at most %d", goroutines, got, few)
	}
}

func TestStalledPipelinesDoNotHoldUpOthers(t *testing.T) {
	server := redistest.Start(t)
	proxy := redistest.NewProxy(t, server.Addr())
	opt := options(proxy.Addr())
	opt.ReadTimeout = 10 * time.Second
	d := newDriver(t, opt)
	var stuck []<-chan error
	start := func(key string) <-chan error {
		done := make(chan error, 1)
		go func() { // ends when Exec returns
			_, err := d.Exec(t.Context(), incrCmd(key))
			done <- err
		}()
		return done
	}
	if err := <-start("warm"); err != nil {
		t.Fatal(err)
	}
	for i := range maxInFlight { // each takes a turn and a connection, and gets no answer
		stuck = append(stuck, start("stuck"+strconv.Itoa(i)))
		proxy.HoldUp()
		redistest.WaitFor(t, "a connection for each turn", func() bool { return proxy.Connections() > i })
	}
	redistest.WaitFor(t, "the commands to be held", func() bool { up, _ := proxy.Buffered(); return up > 0 })
	proxy.HoldExisting()
	proxy.Release()
	began := time.Now()
	for range 3 {
		if err := <-start("free"); err != nil {
			t.Fatal(err)
		}
	}
	if took := time.Since(began); took > 2*time.Second {
		t.Errorf("calls behind stalled pipelines took %v", took)
	}
	proxy.ReleaseExisting()
	for _, done := range stuck {
		if err := <-done; err != nil {
			t.Errorf("a stalled call: %v", err)
		}
	}
}

// go-redis would dial again inside Receive. If this fails after an upgrade, look at the type ended.
func TestSessionNeverDialsAgain(t *testing.T) {
	server := redistest.Start(t)
	proxy := redistest.NewProxy(t, server.Addr())
	d := newDriver(t, options(proxy.Addr()))
	down := make(chan driver.Event, 1)
	subscribed := make(chan struct{})
	s, err := d.OpenSession(t.Context(), func(e driver.Event) {
		if e.Kind == driver.Subscribed {
			close(subscribed)
		}
		if e.Kind == driver.Down {
			down <- e
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Subscribe("a"); err != nil {
		t.Fatal(err)
	}
	<-subscribed
	before := proxy.Accepted()
	proxy.CutAll()
	if e := <-down; e.Err == nil {
		t.Error("Down without a reason")
	}
	if err := s.Ping("late"); err == nil {
		t.Error("Ping after Down succeeded")
	}
	if got := proxy.Accepted(); got != before {
		t.Errorf("the session dialed %d times more", got-before)
	}
}

// A server that speaks RESP and not pub/sub makes go-redis panic.
func TestSessionSurvivesNonsense(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	go func() { // ends when the listener is closed
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			for r := bufio.NewReader(conn); ; { // until the client hangs up
				line, err := r.ReadString('\n')
				if err != nil {
					break
				}
				switch strings.ToLower(strings.TrimSpace(line)) {
				case "ping":
					_, _ = conn.Write([]byte("*1\r\n:1\r\n"))
				case "hello", "client":
					_, _ = conn.Write([]byte("-ERR unknown command\r\n"))
				}
			}
			_ = conn.Close()
		}
	}()
	_, err = newDriver(t, options(ln.Addr().String())).OpenSession(t.Context(), func(driver.Event) {})
	if !errors.Is(err, driver.ErrNotExecuted) || !strings.Contains(err.Error(), "not a pub/sub reply") {
		t.Errorf("OpenSession: %v, want ErrNotExecuted because of the reply", err)
	}
}
