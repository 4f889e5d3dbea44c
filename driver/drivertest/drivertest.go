// Package drivertest is the conformance suite of [driver.Driver]. An adapter for another client library is right
// when it passes [Run], which injects faults between a real redis-server and the driver, and [RunMini].
//
//	func TestConformance(t *testing.T) {
//		drivertest.Run(t, drivertest.Harness{New: newDriver, Bound: 5 * time.Second})
//	}
//
// Run the suite with -race, and check for leaked goroutines in TestMain: closing a client must end what its driver began.
package drivertest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"

	"github.com/e51fe0e6/dsync/driver"
	"github.com/e51fe0e6/dsync/internal/redistest"
)

// prompt is what counts as "promptly": far above what it takes, far below every timeout of a client.
const prompt = 700 * time.Millisecond

// Harness tells the suite how to make the driver under test.
type Harness struct {
	// New returns a driver over a client of its own that dials addr, one plain server. It fails the test if it cannot, and has
	// the client closed by tb.Cleanup. The client's timeouts should be about a second, and retries that the client
	// offers should be on: the suite shows that they are harmless.
	New func(tb testing.TB, addr string) driver.Driver
	// Bound is how long a call may take while the server is silent, with the timeouts that New sets.
	Bound time.Duration
}

// env is what one test works with.
type env struct {
	h      Harness
	server *redistest.Server // nil on miniredis
	proxy  *redistest.Proxy  // nil on miniredis; between d and server
	d      driver.Driver
}

type test struct {
	name string
	run  func(t *testing.T, e *env)
}

// Run runs the suite against real servers that it starts.
func Run(t *testing.T, h Harness) {
	t.Helper()
	shared := redistest.Start(t)
	for _, tests := range [][]test{basicTests(), execTests(), faultTests(), sessionTests(), sessionFaultTests()} {
		for _, tc := range tests {
			t.Run(tc.name, func(t *testing.T) {
				shared.MustDo("FLUSHALL")
				shared.MustDo("SCRIPT", "FLUSH")
				tc.run(t, through(t, h, shared))
			})
		}
	}
	for _, tc := range serverTests() { // those that change the server, so each has its own
		t.Run(tc.name, func(t *testing.T) { tc.run(t, through(t, h, redistest.Start(t))) })
	}
}

// RunMini runs the part of the suite that miniredis can serve. There are no faults in it, and miniredis is slow, so
// h.New should make a client with long timeouts.
func RunMini(t *testing.T, h Harness) {
	t.Helper()
	for _, tests := range [][]test{basicTests(), sessionTests()} {
		for _, tc := range tests {
			t.Run(tc.name, func(t *testing.T) {
				tc.run(t, &env{h: h, d: h.New(t, miniredis.RunT(t).Addr())})
			})
		}
	}
	t.Run("RepliesThatForbidExecution", func(t *testing.T) { testFakedErrors(t, h) })
}

// through puts a proxy between a new driver and the server.
func through(t *testing.T, h Harness, server *redistest.Server) *env {
	t.Helper()
	proxy := redistest.NewProxy(t, server.Addr())
	return &env{h: h, server: server, proxy: proxy, d: h.New(t, proxy.Addr())}
}

// count is a script that shows how often it ran. Scripts with different notes are different to the server.
func count(note string) *driver.Script {
	return driver.NewScript("-- " + note + "\nreturn {redis.call('INCR', KEYS[1])}")
}

func cmd(s *driver.Script, key string, args ...string) driver.Cmd {
	return driver.Cmd{Script: s, Keys: []string{key}, Args: args}
}

// ran returns how often the script of count ran for key, as the server sees it.
func (e *env) ran(t *testing.T, key string) int {
	t.Helper()
	n := 0
	if v, ok := e.server.MustDo("GET", key).(string); ok {
		if _, err := fmt.Sscan(v, &n); err != nil {
			t.Fatalf("counter %s is %q", key, v)
		}
	}
	return n
}

// warm makes the driver dial and the server know the scripts, so that what follows is one EVALSHA each.
func (e *env) warm(t *testing.T, scripts ...*driver.Script) {
	t.Helper()
	for _, s := range scripts {
		mustExec(t, e.d, cmd(s, "warm"))
	}
}

func mustExec(t *testing.T, d driver.Driver, c driver.Cmd) driver.Reply {
	t.Helper()
	r, err := d.Exec(t.Context(), c)
	if err != nil {
		t.Fatalf("Exec: %v", err)
	}
	return r
}

// mentions matches the requests that contain s.
func mentions(s string) func([]byte) bool {
	return func(request []byte) bool { return strings.Contains(string(request), s) }
}

// class returns the one class that err matches, and fails the test if it matches none or several.
func class(t *testing.T, err error) error {
	t.Helper()
	if err == nil {
		return nil
	}
	var found []error
	for _, c := range []error{driver.ErrNotExecuted, driver.ErrUnknown, driver.ErrPermanent} {
		if errors.Is(err, c) {
			found = append(found, c)
		}
	}
	if server, ok := errors.AsType[*driver.ServerError](err); ok {
		found = append(found, server)
	}
	if len(found) != 1 {
		t.Fatalf("error %q (%T) is of %d classes %v, want exactly one", err, err, len(found), found)
	}
	return found[0]
}

// wantClass fails the test unless err is of one of the classes.
func wantClass(t *testing.T, step string, err error, classes ...error) {
	t.Helper()
	if slices.Contains(classes, class(t, err)) { // which returns the sentinel itself
		return
	}
	t.Fatalf("%s: error is %v, want one of %v", step, err, classes)
}

// wantCode fails the test unless the server refused with the code, inside the script.
func wantCode(t *testing.T, step string, err error, code string) {
	t.Helper()
	_ = class(t, err)
	if server, ok := errors.AsType[*driver.ServerError](err); !ok || server.Code != code {
		t.Fatalf("%s: error is %v, want a ServerError with code %s", step, err, code)
	}
}

// outcome is what a call came to.
type outcome struct {
	reply driver.Reply
	err   error
	took  time.Duration
}

// goExec calls Exec in a goroutine, which ends when Exec returns.
func (e *env) goExec(ctx context.Context, c driver.Cmd) <-chan outcome {
	done := make(chan outcome, 1)
	go func() {
		began := time.Now()
		r, err := e.d.Exec(ctx, c)
		done <- outcome{r, err, time.Since(began)}
	}()
	return done
}

// within receives from c, and fails the test if that takes longer than limit.
func within[T any](t *testing.T, what string, limit time.Duration, c <-chan T) T {
	t.Helper()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case v := <-c:
		return v
	case <-timer.C:
		t.Fatalf("gave up waiting for %s after %v", what, limit)
		panic("unreachable")
	}
}

// held waits until the proxy holds a request that the driver has sent.
func (e *env) held(t *testing.T) {
	t.Helper()
	redistest.WaitFor(t, "the request to reach the proxy", func() bool {
		up, _ := e.proxy.Buffered()
		return up > 0
	})
}

// works waits until Exec succeeds again after a fault has been lifted.
func (e *env) works(t *testing.T) {
	t.Helper()
	s := count("after the fault")
	redistest.WaitFor(t, "Exec to work again", func() bool {
		_, err := e.d.Exec(t.Context(), cmd(s, "after"))
		_ = class(t, err)
		return err == nil
	})
}
