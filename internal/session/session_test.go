package session

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/e51fe0e6/dsync/driver"
	"github.com/e51fe0e6/dsync/internal/claim"
	"github.com/e51fe0e6/dsync/scripts"
)

// wrongServer queues whoever asks, and says that echoes are published; none comes back: the subscription is on another server.
type wrongServer struct {
	driver.Driver
	mu      sync.Mutex
	opened  int
	ready   chan struct{} // the session that stays
	onClose func()
	asked   chan struct{}
}

func (d *wrongServer) Exec(_ context.Context, c driver.Cmd) (driver.Reply, error) {
	flags := int64(0)
	if c.Args[8] != "" {
		flags = scripts.FlagEchoed
	}
	status := int64(scripts.Queued)
	if c.Args[0] == scripts.Release {
		status = scripts.Withdrawn
	}
	if flags != 0 {
		defer func() { d.asked <- struct{}{} }()
	}
	return driver.NewReply([]any{status, int64(1), int64(9000), time.Now().UnixMicro(), int64(1), int64(9), flags})
}

func (d *wrongServer) ExecMulti(ctx context.Context, cs []driver.Cmd) []driver.Result {
	rs := make([]driver.Result, len(cs))
	for i, c := range cs {
		rs[i].Reply, rs[i].Err = d.Exec(ctx, c)
	}
	return rs
}

type wrongSession struct {
	d    *wrongServer
	emit func(driver.Event)
	stay bool
	once sync.Once
}

func (d *wrongServer) OpenSession(_ context.Context, emit func(driver.Event)) (driver.Session, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.opened++
	return &wrongSession{d: d, emit: emit, stay: d.opened == 8}, nil
}

func (s *wrongSession) Subscribe(channels ...string) error {
	go func() {
		s.emit(driver.Event{Kind: driver.Subscribed, Channel: channels[0]})
		if s.stay {
			<-time.After(10 * time.Millisecond)
			close(s.d.ready)
		} else {
			s.emit(driver.Event{Kind: driver.Down, Err: errors.New("gone")})
		}
	}()
	return nil
}
func (s *wrongSession) Unsubscribe(...string) error { return nil }
func (s *wrongSession) Ping(string) error           { return nil }
func (s *wrongSession) Close() error {
	if s.stay {
		s.once.Do(s.d.onClose)
	}
	return nil
}

// A question that goes out between the end of an echo's patience and the hub's noticing it must not ask for a second echo of the same epoch: the
// session would be given up twice.
func TestHubGivesASessionUpOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &wrongServer{ready: make(chan struct{}), asked: make(chan struct{}, 100)}
		s := New(Config{Driver: d, Prefix: "b", Budget: time.Minute, Jitter: func() float64 { return 0.99 }})
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		lock := func(name string) {
			wg.Go(func() {
				_, _, _ = s.Acquire(ctx, "b:{"+name+"}:mutex", scripts.Mutex, claim.Request{TTL: 10 * time.Second, Renew: true})
			})
		}
		d.onClose = func() { // the hub is about to say Opening; at this moment somebody locks
			lock("second")
			select {
			case <-d.asked:
			case <-time.After(50 * time.Millisecond):
			}
		}
		s.hub.open()
		<-d.ready
		<-time.After(2200 * time.Millisecond)
		lock("first")
		<-d.asked
		defer func() {
			cancel()
			wg.Wait()
			_ = s.Close(t.Context())
		}()
		<-time.After(10 * time.Second) // a panic of a timer would end the test here
	})
}

// deadNode grants everything, and does not answer renewals of sick names before over: as ExecMulti does on a cluster with a dead node, it
// returns when the last element is decided.
type deadNode struct {
	driver.Driver
	over chan struct{}
}

func (d *deadNode) reply(c driver.Cmd) driver.Result {
	status := int64(map[string]int{scripts.Acquire: scripts.Granted, scripts.Renew: scripts.Renewed, scripts.Release: scripts.Released}[c.Args[0]])
	r, err := driver.NewReply([]any{status, int64(1), int64(1000), time.Now().UnixMicro(), int64(0), int64(0), int64(0)})
	return driver.Result{Reply: r, Err: err}
}

func (d *deadNode) dead(c driver.Cmd) bool {
	return c.Args[0] == scripts.Renew && strings.Contains(c.Keys[0], "sick")
}

func (d *deadNode) Exec(_ context.Context, c driver.Cmd) (driver.Reply, error) {
	r := d.ExecMulti(context.Background(), []driver.Cmd{c})
	return r[0].Reply, r[0].Err
}

func (d *deadNode) ExecMulti(_ context.Context, cs []driver.Cmd) []driver.Result {
	<-time.After(time.Millisecond)
	rs := make([]driver.Result, len(cs))
	wait := false
	for i, c := range cs {
		rs[i] = d.reply(c)
		if d.dead(c) {
			wait = true
			rs[i] = driver.Result{Err: &driver.Error{Class: driver.ErrUnknown, Cause: errors.New("timeout")}}
		}
	}
	if wait {
		<-d.over
	}
	return rs
}

func (d *deadNode) OpenSession(context.Context, func(driver.Event)) (driver.Session, error) {
	return nil, &driver.Error{Class: driver.ErrNotExecuted, Cause: errors.New("none")}
}

func TestDeadNodeDoesNotTakeTheBatchAlong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &deadNode{over: make(chan struct{})}
		var mu sync.Mutex
		lost := map[bool]int{}
		s := New(Config{Driver: d, Prefix: "b", Budget: time.Minute, Observe: func(e Event) {
			mu.Lock()
			defer mu.Unlock()
			if e.Kind == WasLost {
				lost[strings.Contains(e.Key, "sick")]++
			}
		}})
		const healthy, sick = 200, 100
		for i := range healthy + sick {
			name := fmt.Sprintf("well%d", i)
			if i < sick {
				name = fmt.Sprintf("sick%d", i)
			}
			if _, _, err := s.Acquire(t.Context(), "b:{"+name+"}:mutex", scripts.Mutex, claim.Request{TTL: time.Second, Renew: true, Try: true}); err != nil {
				t.Fatal(err)
			}
		}
		<-time.After(3 * time.Second)
		mu.Lock()
		n, m := lost[false], lost[true]
		mu.Unlock()
		close(d.over)
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		s.Close(ctx)
		t.Logf("lost: %d of %d healthy, %d of %d sick", n, healthy, m, sick)
		if n > 0 {
			t.Fail()
		}
	})
}

// wrongStatus answers an acquire with a status that is none of an acquire's.
type wrongStatus struct {
	deadNode
	mu sync.Mutex
	n  int
}

func (d *wrongStatus) Exec(_ context.Context, c driver.Cmd) (driver.Reply, error) {
	d.mu.Lock()
	d.n++
	d.mu.Unlock()
	return driver.NewReply([]any{int64(scripts.Renewed), int64(1), int64(1000), time.Now().UnixMicro(), int64(0), int64(0), int64(0)})
}

func TestReplyOfAnotherVerbIsAnOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &wrongStatus{}
		s := New(Config{Driver: d, Prefix: "b", Budget: 100 * time.Millisecond})
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer cancel()
		_, _, err := s.Acquire(ctx, "b:{x}:mutex", scripts.Mutex, claim.Request{TTL: time.Second, Renew: true})
		d.mu.Lock()
		n := d.n
		d.mu.Unlock()
		ctx2, cancel2 := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel2()
		s.Close(ctx2)
		if n > 100 {
			t.Errorf("%d commands in 500 ms, and with an outage budget of 100 ms the error is %v", n, err)
		}
	})
}
