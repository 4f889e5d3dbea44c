package sim

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"hash/fnv"
	"log/slog"
	"math/rand/v2"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
	"github.com/redis/rueidis"

	"github.com/e51fe0e6/dsync/driver"
	"github.com/e51fe0e6/dsync/driver/goredis"
	rueidisdriver "github.com/e51fe0e6/dsync/driver/rueidis"
	"github.com/e51fe0e6/dsync/dsync"
	"github.com/e51fe0e6/dsync/internal/session"
	"github.com/e51fe0e6/dsync/scripts"
)

// The client libraries a process can have.
const (
	GoRedis = "goredis"
	Rueidis = "rueidis"
)

// answerTimeout is what the client libraries are configured to wait for an answer.
const answerTimeout = 2 * time.Second

var errKilled = errors.New("sim: the process is gone")

// Process is a simulated process: a client of its own behind a link and a clock of its own.
type Process struct {
	Name   string
	Client *dsync.Client
	Link   *Link
	Clock  *Clock

	w      *World
	ctx    context.Context //nolint:containedctx // of all that the process's goroutines do; ended by Crash
	cancel context.CancelCauseFunc
	driver *tap
	shut   func() // closes the client library's client

	closing atomic.Bool   // somebody closes Client: not a sync.Once, whose mutex would stop virtual time
	closed  chan struct{} // closed when that is done
}

// connect makes the client of one of the two libraries.
func connect(kind string, l *Link) (driver.Driver, func(), error) {
	if kind == GoRedis {
		c := redis.NewClient(&redis.Options{
			Dialer:          func(ctx context.Context, _, _ string) (net.Conn, error) { return l.Dial(ctx) },
			DialTimeout:     dialTimeout,
			DialerRetries:   1,
			MaxRetries:      -1, // of no effect on scripts; where it has one, its back-off has dice of its own
			ReadTimeout:     answerTimeout,
			WriteTimeout:    answerTimeout,
			PoolSize:        32, // never waited for: a timer that go-redis keeps for it would leave the bubble
			ConnMaxIdleTime: -1,
			DisableIdentity: true,
			MaintNotificationsConfig: &maintnotifications.Config{
				Mode: maintnotifications.ModeDisabled,
			},
		})
		return goredis.New(c), func() { _ = c.Close() }, nil
	}
	c, err := rueidis.NewClient(rueidis.ClientOption{
		InitAddress: []string{"server"},
		DialCtxFn: func(ctx context.Context, _ string, _ *net.Dialer, _ *tls.Config) (net.Conn, error) {
			return l.Dial(ctx)
		},
		Dialer:            net.Dialer{Timeout: dialTimeout, KeepAlive: answerTimeout},
		ConnWriteTimeout:  answerTimeout,
		ForceSingleClient: true,
		DisableCache:      true,
		AlwaysPipelining:  true,
		PipelineMultiplex: -1, // one connection: which of several a command takes is chosen by dice that are not ours
	})
	if err != nil {
		return nil, nil, err
	}
	return rueidisdriver.New(c), c.Close, nil
}

// Process starts a process. rate is how fast its clock goes, 1 being right.
func (w *World) Process(kind string, rate float64, opts ...dsync.ClientOption) *Process {
	w.t.Helper()
	w.mu.Lock()
	name := fmt.Sprintf("p%d", len(w.processes)+1)
	w.mu.Unlock()
	p := &Process{Name: name, w: w, Clock: newClock(rate), closed: make(chan struct{})}
	p.ctx, p.cancel = context.WithCancelCause(w.ctx)
	p.Link = &Link{name: name, server: w.Redis.Dial, latency: w.latency, log: w.logf, seed: w.seed ^ uint64(len(w.processes)+1)<<32}
	d, shut, err := connect(kind, p.Link)
	if err != nil {
		w.t.Fatalf("process %s on %s: %v", name, kind, err)
	}
	p.shut = shut
	p.driver = &tap{Driver: d, p: p, rename: newRenamer()}
	opts = append([]dsync.ClientOption{dsync.WithLogger(slog.New(slog.DiscardHandler))}, opts...)
	p.Client = dsync.New(p.driver, opts...)
	w.mu.Lock()
	w.processes = append(w.processes, p)
	w.mu.Unlock()
	w.logf("", "%s: starts on %s, clock rate %v", name, kind, rate)
	return p
}

// dead reports whether the process has crashed, or has left.
func (p *Process) dead() bool { return p.ctx.Err() != nil }

// Context ends when the process crashes, and with the simulation.
func (p *Process) Context() context.Context { return p.ctx }

// Timeout returns a context that ends after d by the process's clock, and when d has passed.
func (p *Process) Timeout(d time.Duration) (ctx context.Context, stop func()) {
	ctx, cancel := context.WithCancelCause(p.ctx)
	off := p.Clock.AfterFunc(d, func() { cancel(context.DeadlineExceeded) })
	return ctx, func() { off(); cancel(nil) }
}

// Wait lets d pass on the process's clock, and reports whether the process is still there. It is cut short when wake is closed.
func (p *Process) Wait(d time.Duration, wake <-chan struct{}) bool {
	over := make(chan struct{})
	stop := p.Clock.AfterFunc(d, func() { close(over) })
	defer stop()
	select {
	case <-over:
	case <-wake:
		p.Clock.Gate()
	case <-p.ctx.Done():
	}
	return !p.dead()
}

// Pause stops the process for d: it does nothing, and nothing reaches it. While it is paused, another call does nothing.
func (p *Process) Pause(d time.Duration) {
	if !p.Clock.pause() {
		return
	}
	p.w.logf("", "%s: paused for %v", p.Name, d)
	p.w.History.paused(p)
	time.AfterFunc(d, func() {
		p.w.logf("", "%s: resumed", p.Name)
		p.Clock.unpause()
	})
}

// Crash ends the process: it never speaks again. What it sent last arrives after late, or never if late is 0; with silent the server
// does not notice that its connections are gone.
func (p *Process) Crash(late time.Duration, silent bool) {
	p.w.logf("", "%s: crashes", p.Name)
	p.w.History.crashed(p)
	p.cancel(errKilled)
	if silent {
		p.Link.Hold(forever, Up, Down)
	}
	p.Link.Kill(late)
	p.Clock.unpause() // so that its goroutines can end
	go p.end()
}

// end frees what a dead process uses here. That Close comes first and finds no server is not part of the simulation.
func (p *Process) end() {
	if p.closing.CompareAndSwap(false, true) {
		ctx, cancel := context.WithCancel(p.w.ctx)
		cancel()
		_ = p.Client.Close(ctx)
		p.shut()
		close(p.closed)
		return
	}
	<-p.closed
}

// Close closes the process's client as a program does that shuts down, with ctx ending after d. Another call waits for the first.
func (p *Process) Close(d time.Duration) (err error) {
	if !p.closing.CompareAndSwap(false, true) {
		<-p.closed
		return nil
	}
	defer close(p.closed)
	p.Clock.Gate()
	ctx, stop := p.Timeout(d)
	defer stop()
	p.w.logf("", "%s: closes within %v", p.Name, d)
	err = p.Client.Close(ctx)
	p.driver.closed()
	p.w.logf("", "%s: closed: %v", p.Name, oneLine(err))
	// As long as a command is out the client library may be dialing, and rueidis forgets to close a connection that it gets after its Close.
	for p.driver.busy() {
		<-time.After(time.Millisecond)
	}
	p.shut()
	return err
}

// tap is the driver of a process. It brings the process's clock to the session, keeps a paused process from speaking and hearing, and
// writes the trace.
type tap struct {
	driver.Driver
	p      *Process
	rename *renamer
	out    atomic.Int32 // calls of the driver that have not returned

	mu       sync.Mutex // guards what follows
	closedAt time.Time
	released map[string]bool
	sent     int
}

// Clock implements session.Simulated.
func (d *tap) Clock() session.Clock { return d.p.Clock }

// Float64 implements session.Simulated. It depends on the time and not on who asks first.
func (d *tap) Float64() float64 {
	return rand.New(rand.NewPCG(d.p.Link.seed, uint64(d.p.w.Simulated()))).Float64()
}

// moment lets pass what a process takes until it reaches the network, another for each purpose: two commands that are due at once would come to the
// network in any order, and the seed would not replay.
func (d *tap) moment(purpose string) {
	if d.p.w.instant {
		return
	}
	sum := fnv.New32a()
	_, _ = sum.Write([]byte(purpose))
	<-time.After(time.Duration(1 + sum.Sum32()%1000))
}

// Exec implements driver.Driver.
func (d *tap) Exec(ctx context.Context, c driver.Cmd) (driver.Reply, error) {
	began := time.Now()
	d.moment(c.Keys[0])
	d.p.Clock.Gate()
	what := d.sends(c, began)
	d.out.Add(1)
	defer d.out.Add(-1)
	r, err := d.Driver.Exec(ctx, c)
	d.p.Clock.Gate()
	d.got(what, r, err)
	return r, err
}

// ExecMulti implements driver.Driver.
func (d *tap) ExecMulti(ctx context.Context, cs []driver.Cmd) []driver.Result {
	began := time.Now()
	d.moment("many")
	d.p.Clock.Gate()
	what := make([]line, len(cs))
	for i, c := range cs {
		what[i] = d.sends(c, began)
	}
	d.out.Add(1)
	defer d.out.Add(-1)
	results := d.Driver.ExecMulti(ctx, cs)
	d.p.Clock.Gate()
	for i, r := range results {
		d.got(what[i], r.Reply, r.Err)
	}
	return results
}

// OpenSession implements driver.Driver. When ctx ends it leaves the driver waiting for the end of its dial, instead of letting it close the
// connection meanwhile as it would: go-redis dials under a mutex and takes the same one to close, and virtual time does not pass
// while a goroutine waits for a mutex.
func (d *tap) OpenSession(ctx context.Context, emit func(driver.Event)) (driver.Session, error) {
	type opened struct {
		s   driver.Session
		err error
	}
	d.moment("subscription")
	d.p.Clock.Gate()
	done := make(chan opened, 1)
	go func() { // ends with the dial
		s, err := d.Driver.OpenSession(context.WithoutCancel(ctx), func(ev driver.Event) {
			d.p.Clock.Gate()
			if ev.Kind != driver.Pong {
				d.p.w.logf("", "%s: hears %v %q %v", d.p.Name, ev.Kind, d.rename.text(ev.Payload), oneLine(ev.Err))
			}
			emit(ev)
		})
		done <- opened{s, err}
	}()
	select {
	case o := <-done:
		d.p.Clock.Gate()
		if o.err != nil {
			d.p.w.logf("", "%s: no subscription: %v", d.p.Name, oneLine(o.err))
		}
		return o.s, o.err
	case <-ctx.Done():
		go func() { // ends with the dial
			if o := <-done; o.err == nil {
				_ = o.s.Close()
			}
		}()
		return nil, &driver.Error{Class: driver.ErrNotExecuted, Cause: ctx.Err()}
	}
}

// sends notes a command, and what it must not be: one after Close, or a renewal of a lease whose release was sent.
func (d *tap) sends(c driver.Cmd, began time.Time) line {
	_, name, _ := strings.Cut(strings.TrimSuffix(c.Keys[0], "}:mutex"), "{")
	verb, end, ask := c.Args[0], c.Args[1], c.Args[2]
	d.mu.Lock()
	d.sent++
	late := !d.closedAt.IsZero() && began.After(d.closedAt)
	again := verb == scripts.Renew && d.released[end]
	if verb == scripts.Release {
		if d.released == nil {
			d.released = map[string]bool{}
		}
		d.released[end] = true
	}
	d.mu.Unlock()
	text := fmt.Sprintf("%s %s end=%s ask=%s ttl=%s %s", verb, name, d.rename.token(end), d.rename.token(ask), c.Args[3], c.Args[6])
	d.p.w.logf(name, "%s: sends %s", d.p.Name, text)
	if late {
		d.p.w.Errorf(name, time.Now(), "%s sends %s after Close", d.p.Name, text)
	}
	if again {
		d.p.w.Errorf(name, time.Now(), "%s renews what it has released: %s", d.p.Name, text)
	}
	return line{name: name, text: text}
}

func (d *tap) got(what line, r driver.Reply, err error) {
	var got []string
	for i := range r.Len() {
		if n, ok := r.Int(i); ok {
			got = append(got, strconv.FormatInt(n, 10))
		} else {
			text, _ := r.Str(i)
			got = append(got, text)
		}
	}
	text := strings.Join(got, " ")
	if err != nil {
		text = oneLine(err)
	}
	d.p.w.logf(what.name, "%s: gets %s => %s", d.p.Name, what.text, text)
}

func (d *tap) busy() bool { return d.out.Load() > 0 }

func (d *tap) closed() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.closedAt = time.Now()
}

// Sent returns how many commands the process has sent.
func (p *Process) Sent() int {
	p.driver.mu.Lock()
	defer p.driver.mu.Unlock()
	return p.driver.sent
}

// renamer gives random tokens short names, for the trace.
type renamer struct {
	mu    sync.Mutex
	names map[string]string
}

func newRenamer() *renamer { return &renamer{names: map[string]string{}} }

func (r *renamer) token(token string) string {
	_, generation, _ := strings.Cut(token, ":")
	if generation == "" {
		return "-"
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	name := r.names[generation]
	if name == "" {
		name = fmt.Sprintf("g%d", len(r.names)+1)
		r.names[generation] = name
	}
	return name
}

// text renames the generation in a message.
func (r *renamer) text(payload string) string {
	kind, rest, ok := strings.Cut(payload, " ")
	generation, rest, ok2 := strings.Cut(rest, " ")
	if !ok || !ok2 || kind == "e" {
		return payload
	}
	return kind + " " + r.token(":"+generation) + " " + rest
}

func oneLine(err error) string {
	if err == nil {
		return ""
	}
	return strings.ReplaceAll(err.Error(), "\n", "; ")
}
