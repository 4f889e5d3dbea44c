package sim

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/alicebob/miniredis/v2/server"
)

// World is a server, the processes that use it, and what is known of them.
type World struct {
	Redis   *miniredis.Miniredis
	History *History

	t       testing.TB
	plan    *plan // nil in a test that is not random
	seed    uint64
	latency func(dice *rand.Rand) time.Duration
	instant bool // nothing takes any time but what is made to
	began   time.Time
	ctx     context.Context //nolint:containedctx // of everything in the simulation
	cancel  context.CancelFunc

	mu        sync.Mutex // guards what follows
	processes []*Process
	trace     []line
	failures  []line

	// The server.
	answer      string
	scriptsOnly bool
	offset      time.Duration // of its clock
}

// NewWorld starts a server in the bubble of the calling goroutine. Messages in either direction take no time if latency is 0, and else up to
// twice latency.
func NewWorld(t testing.TB, seed uint64, latency time.Duration) *World {
	t.Helper()
	w := &World{t: t, seed: seed, began: time.Now(), Redis: miniredis.NewMiniRedis()}
	w.ctx, w.cancel = context.WithCancel(context.Background())
	w.History = &History{w: w}
	w.Redis.ClockTTL(true)
	w.instant = latency == 0
	w.latency = func(*rand.Rand) time.Duration { return 0 }
	if latency > 0 {
		w.latency = func(dice *rand.Rand) time.Duration { return latency/8 + time.Duration(dice.Int64N(int64(2*latency))) }
	}
	c, err := w.Redis.Dial() // starts it
	if err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
	w.Redis.Server().SetPreHook(w.before)
	return w
}

// line is one of the trace.
type line struct {
	at   time.Duration
	name string // of the lock it is about; empty: it may concern all
	text string
}

func (l line) String() string { return fmt.Sprintf("%12.6f  %s", l.at.Seconds(), l.text) }

// logf adds a line to the trace.
func (w *World) logf(name, format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.trace = append(w.trace, line{w.Simulated(), name, fmt.Sprintf(format, args...)})
}

// Errorf notes a broken promise about a name, or about all if that is empty. What it names last is when it was broken.
func (w *World) Errorf(name string, at time.Time, format string, args ...any) {
	w.logf(name, "BROKEN: "+format, args...)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.failures = append(w.failures, line{at.Sub(w.began), name, fmt.Sprintf(format, args...)})
}

// Do runs a command on the server, as an administrator would.
func (w *World) Do(args ...string) {
	w.t.Helper()
	c, err := w.Redis.Dial()
	if err != nil {
		w.t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	if _, err := c.Write(command(args...)); err != nil {
		w.t.Fatal(err)
	}
	b := make([]byte, 4096)
	n, err := c.Read(b)
	if err != nil || n == 0 || b[0] == '-' {
		w.t.Fatalf("%v: %q, %v", args, b[:n], err)
	}
}

// Answer has the server answer with this error instead of doing what it is asked; empty: not any more. Errors that a script meets at its first write come
// in answer to scripts only, the others to every command.
func (w *World) Answer(text string, scriptsOnly bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.answer, w.scriptsOnly = text, scriptsOnly
}

// step sets the server's clock forward, or back.
func (w *World) step(d time.Duration) {
	w.History.stepped()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.offset += d
}

// before is called before each command on the server; also before those of scripts, which are left alone: they run under the server's lock, and
// what stops a script stops it at its start.
func (w *World) before(c *server.Peer, cmd string, _ ...string) bool {
	script := cmd == "EVAL" || cmd == "EVALSHA"
	if !script && !slices.Contains([]string{"PING", "HELLO", "CLIENT", "SUBSCRIBE"}, cmd) {
		return false
	}
	w.setTime()
	w.mu.Lock()
	text := w.answer
	if w.scriptsOnly && !script {
		text = ""
	}
	w.mu.Unlock()
	if text != "" {
		c.WriteError(text)
	}
	return text != ""
}

// setTime brings the server's clock, which stands still once it was set, to where it belongs.
func (w *World) setTime() {
	w.mu.Lock()
	offset := w.offset
	w.mu.Unlock()
	if offset != 0 {
		w.Redis.SetTime(time.Now().Add(offset))
	}
}

// Finish ends all processes that are left, and checks what must be so when nobody uses anything any more.
func (w *World) Finish(retention time.Duration) {
	w.t.Helper()
	w.mu.Lock()
	processes := w.processes
	w.mu.Unlock()
	for _, p := range processes {
		p.Clock.unpause()
		p.Link.Heal()
		if p.dead() {
			p.end()
		} else {
			_ = p.Close(time.Second)
		}
	}
	w.cancel()
	w.expiries()
	// All timeouts of the client libraries, so that what is left in the bubble after that has leaked.
	<-time.After(40 * time.Second)
	if n := w.Redis.CurrentConnectionCount(); n != 0 {
		w.Errorf("", time.Now(), "%d connections are left", n)
	}
	<-time.After(retention)
	w.setTime()
	if keys := w.Redis.Keys(); len(keys) > 0 {
		w.Errorf("", time.Now(), "keys are left after the retention: %q\n%s", keys, w.Redis.Dump())
	}
	w.Redis.Close()
	w.report()
}

// expiries checks that each key has an expiry.
func (w *World) expiries() {
	w.setTime()
	for _, key := range w.Redis.Keys() {
		if w.Redis.TTL(key) <= 0 && w.Redis.Exists(key) {
			w.Errorf("", time.Now(), "key %s has no expiry", key)
		}
	}
}

// Simulated returns how much time has passed in the bubble.
func (w *World) Simulated() time.Duration { return time.Since(w.began) }

// report tells the test what was broken, with the part of the trace that led to the first of it.
func (w *World) report() {
	w.t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.failures) == 0 {
		return
	}
	var b strings.Builder
	if w.plan != nil {
		b.WriteString(w.plan.String())
	}
	fmt.Fprintf(&b, "%d promises broken:\n", len(w.failures))
	for _, f := range w.failures[:min(20, len(w.failures))] {
		fmt.Fprintln(&b, f)
	}
	const before, after = 200, 20
	first, all := w.failures[0], os.Getenv("SIM_SEED") != ""
	trace := slices.DeleteFunc(slices.Clone(w.trace), func(l line) bool {
		return !all && first.name != "" && l.name != "" && l.name != first.name
	})
	from, to := 0, len(trace)
	if !all {
		at := slices.IndexFunc(trace, func(l line) bool { return l.at > first.at })
		if at < 0 {
			at = to
		}
		from, to = max(0, at-before), min(to, at+after)
	}
	fmt.Fprintln(&b, "\ntrace (all of it with SIM_SEED):")
	for _, l := range trace[from:to] {
		fmt.Fprintln(&b, l)
	}
	w.t.Error(b.String())
}
