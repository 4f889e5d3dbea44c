package rueidis

import (
	"context"
	"errors"
	"net"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"go.uber.org/goleak"

	"github.com/e51fe0e6/dsync/driver"
	"github.com/e51fe0e6/dsync/driver/drivertest"
	"github.com/e51fe0e6/dsync/driver/internal/detach"
	"github.com/e51fe0e6/dsync/internal/redistest"
)

func TestMain(m *testing.M) {
	// rueidis lets a second pass before it reloads the slots of a cluster, also when the client is closed meanwhile.
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/redis/rueidis.(*call).DelayDo.func1"))
}

func options(addr string) rueidis.ClientOption {
	return rueidis.ClientOption{
		InitAddress: []string{addr}, ForceSingleClient: true, DisableCache: true,
		ConnWriteTimeout: time.Second, Dialer: net.Dialer{Timeout: time.Second},
	}
}

func newClient(tb testing.TB, opt rueidis.ClientOption) rueidis.Client {
	tb.Helper()
	client, err := rueidis.NewClient(opt)
	if client != nil { // with ForceSingleClient there is one even if the dial failed
		tb.Cleanup(client.Close)
	}
	if err != nil {
		tb.Fatalf("NewClient: %v", err)
	}
	return client
}

func harness(change func(*rueidis.ClientOption)) drivertest.Harness {
	return drivertest.Harness{
		New: func(tb testing.TB, addr string) driver.Driver {
			tb.Helper()
			opt := options(addr)
			change(&opt)
			return New(newClient(tb, opt))
		},
		Bound: 6 * time.Second,
	}
}

func TestConformance(t *testing.T) { drivertest.Run(t, harness(func(*rueidis.ClientOption) {})) }

func TestConformanceAlwaysPipelining(t *testing.T) {
	drivertest.Run(t, harness(func(o *rueidis.ClientOption) { o.AlwaysPipelining, o.PipelineMultiplex = true, -1 }))
}

func TestConformanceRESP2(t *testing.T) {
	drivertest.Run(t, harness(func(o *rueidis.ClientOption) { o.AlwaysRESP2 = true }))
}

func TestConformanceMini(t *testing.T) {
	// miniredis takes milliseconds for each script under the race detector.
	drivertest.RunMini(t, harness(func(o *rueidis.ClientOption) { o.ConnWriteTimeout = 20 * time.Second }))
}

func TestConformanceCluster(t *testing.T) {
	drivertest.RunCluster(t, harness(func(o *rueidis.ClientOption) { o.ForceSingleClient = false }))
}

var incr = driver.NewScript("return {redis.call('INCR', KEYS[1])}")

func incrCmd(key string) driver.Cmd { return driver.Cmd{Script: incr, Keys: []string{key}} }

func TestNewPanicsWithoutClient(t *testing.T) {
	defer func() {
		if recover() == nil {
			t.Error("New(nil) did not panic")
		}
	}()
	New(nil)
}

func TestClosedClientIsPermanent(t *testing.T) {
	client := newClient(t, options(redistest.Start(t).Addr()))
	d := New(client)
	if _, err := d.Exec(t.Context(), incrCmd("k")); err != nil {
		t.Fatal(err)
	}
	client.Close()
	// The first call cannot tell a client that is closed from one that is closed while the command is on its way.
	if _, err := d.Exec(t.Context(), incrCmd("k")); !errors.Is(err, driver.ErrUnknown) {
		t.Errorf("first call on a closed client: %v, want ErrUnknown", err)
	}
	if _, err := d.Exec(t.Context(), incrCmd("k")); !errors.Is(err, driver.ErrPermanent) {
		t.Errorf("Exec on a closed client: %v, want ErrPermanent", err)
	}
	if _, _, err := d.ExecWait(t.Context(), incrCmd("k"), 0, time.Millisecond); !errors.Is(err, driver.ErrPermanent) {
		t.Errorf("ExecWait on a closed client: %v, want ErrPermanent", err)
	}
	if _, err := d.OpenSession(t.Context(), func(driver.Event) {}); !errors.Is(err, driver.ErrPermanent) {
		t.Errorf("OpenSession on a closed client: %v, want ErrPermanent", err)
	}
}

// A client with generous timeouts does not bind a caller that can be cancelled.
func TestOwnBoundWithoutTimeoutsOfTheClient(t *testing.T) {
	proxy := redistest.NewProxy(t, redistest.Start(t).Addr())
	opt := options(proxy.Addr())
	opt.ConnWriteTimeout = time.Minute
	client := newClient(t, opt)
	a := New(client).(*adapter)
	a.waiter = detach.NewWaiter(200 * time.Millisecond)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	if _, err := a.Exec(ctx, incrCmd("k")); err != nil {
		t.Fatal(err)
	}
	proxy.BlackHole(true)
	began := time.Now()
	_, err := a.Exec(ctx, incrCmd("k"))
	if !errors.Is(err, driver.ErrUnknown) || ctx.Err() != nil {
		t.Errorf("Exec: %v, want ErrUnknown", err)
	}
	_, _, err = a.ExecWait(ctx, incrCmd("k"), 0, time.Millisecond)
	if !errors.Is(err, driver.ErrUnknown) {
		t.Errorf("ExecWait: %v, want ErrUnknown", err)
	}
	if took := time.Since(began); took > 2*time.Second {
		t.Errorf("took %v with a bound of 200ms", took)
	}
	proxy.BlackHole(false)
	proxy.CutAll() // or the library would wait its minute for the lost reply
}
