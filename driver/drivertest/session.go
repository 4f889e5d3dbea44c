package drivertest

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/e51fe0e6/dsync/driver"
	"github.com/e51fe0e6/dsync/internal/redistest"
)

// sessionTests need nothing but a driver.
func sessionTests() []test {
	return []test{
		{"SessionDeliversWhatIsPublished", testPublish},
		{"SessionUnsubscribes", testUnsubscribe},
		{"SessionAnswersPings", testPing},
		{"SessionManyChannels", testManyChannels},
		{"SessionCloseIsTheLastEvent", testClose},
		{"SessionsManyAtOnce", testManySessions},
		{"SessionOutlivesItsContext", testSessionContext},
	}
}

// sessionFaultTests disturb the network, or the session itself.
func sessionFaultTests() []test {
	return []test{
		{"SessionKeepsBytesExact", testSessionBytes},
		{"SessionSlowHandlerHarmsNoCommand", testSlowHandler},
		{"SessionCutIsDownOnce", testSessionCut},
		{"SessionDownDoesNotWaitForADial", testDownIsPrompt},
		{"SessionCloseOnSilentServer", testCloseSilent},
		{"SessionCloseRacesWithEverything", testCloseRace},
		{"OpenSessionWithoutServer", testOpenRefused},
		{"OpenSessionOnSilentServer", testOpenSilent},
	}
}

// recorder collects the events of one session.
type recorder struct {
	tb   testing.TB
	busy atomic.Bool

	mu     sync.Mutex // protects what follows
	events []driver.Event
}

// emit is given to OpenSession. It checks that nobody calls it twice at once.
func (r *recorder) emit(e driver.Event) {
	if !r.busy.CompareAndSwap(false, true) {
		r.tb.Errorf("emit was called while it ran: events are to be serial")
	}
	defer r.busy.Store(false)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, e)
}

func (r *recorder) all() []driver.Event {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.events)
}

// wait returns the first event of the kind for the channel.
func (r *recorder) wait(t *testing.T, kind driver.EventKind, channel string) driver.Event {
	t.Helper()
	var found driver.Event
	redistest.WaitFor(t, kind.String()+" "+channel, func() bool {
		i := slices.IndexFunc(r.all(), func(e driver.Event) bool { return e.Kind == kind && e.Channel == channel })
		if i >= 0 {
			found = r.all()[i]
		}
		return i >= 0
	})
	return found
}

func open(t *testing.T, e *env) (driver.Session, *recorder) {
	t.Helper()
	r := &recorder{tb: t}
	s, err := e.d.OpenSession(t.Context(), r.emit)
	if err != nil {
		t.Fatalf("OpenSession: %v", err)
	}
	t.Cleanup(func() {
		_ = s.Close()
		r.wait(t, driver.Down, "")
	})
	return s, r
}

func subscribe(t *testing.T, s driver.Session, r *recorder, channels ...string) {
	t.Helper()
	if err := s.Subscribe(channels...); err != nil {
		t.Fatalf("Subscribe: %v", err)
	}
	for _, channel := range channels {
		r.wait(t, driver.Subscribed, channel)
	}
}

func publish(t *testing.T, e *env, channel, payload string) {
	t.Helper()
	mustExec(t, e.d, cmd(driver.NewScript("return {redis.call('PUBLISH', ARGV[1], ARGV[2])}"), "k", channel, payload))
}

// wantOver checks that the one Down is the last event and that the session's methods fail.
func wantOver(t *testing.T, s driver.Session, r *recorder) {
	t.Helper()
	for name, err := range map[string]error{
		"Subscribe": s.Subscribe("late"), "Unsubscribe": s.Unsubscribe("late"), "Ping": s.Ping("late"),
	} {
		if class(t, err) == nil {
			t.Errorf("%s of a session that is down returned nil", name)
		}
	}
	if err := s.Close(); err != nil {
		t.Errorf("Close of a session that is down: %v", err)
	}
	events := r.all()
	for i, e := range events {
		if e.Kind == driver.Down && i != len(events)-1 {
			t.Errorf("event %d of %d is Down: %v", i, len(events), events)
		}
	}
}

func closeAndCheck(t *testing.T, s driver.Session, r *recorder) {
	t.Helper()
	if err := s.Close(); err != nil {
		t.Errorf("Close: %v", err)
	}
	if e := r.wait(t, driver.Down, ""); e.Err != nil {
		t.Errorf("Down after Close carries %v, want nil", e.Err)
	}
	wantOver(t, s, r)
}

func testPublish(t *testing.T, e *env) {
	s, r := open(t, e)
	subscribe(t, s, r, "a", "b")
	for i, channel := range []string{"a", "b", "a", "other", "b"} {
		publish(t, e, channel, strconv.Itoa(i))
	}
	publish(t, e, "a", "last")
	var got []string
	redistest.WaitFor(t, "the last message", func() bool {
		got = nil
		for _, ev := range r.all() {
			if ev.Kind == driver.Message {
				got = append(got, ev.Channel+ev.Payload)
			}
		}
		return slices.Contains(got, "alast")
	})
	if want := []string{"a0", "b1", "a2", "b4", "alast"}; !slices.Equal(got, want) {
		t.Errorf("messages %v, want %v", got, want)
	}
	closeAndCheck(t, s, r)
}

func testUnsubscribe(t *testing.T, e *env) {
	s, r := open(t, e)
	subscribe(t, s, r, "a", "b", "c")
	if err := errors.Join(s.Subscribe(), s.Unsubscribe()); err != nil { // of nothing: nothing happens
		t.Errorf("Subscribe and Unsubscribe without channels: %v", err)
	}
	if err := s.Unsubscribe("a", "b"); err != nil {
		t.Fatalf("Unsubscribe: %v", err)
	}
	r.wait(t, driver.Unsubscribed, "a")
	r.wait(t, driver.Unsubscribed, "b")
	publish(t, e, "a", "unheard")
	publish(t, e, "c", "heard")
	r.wait(t, driver.Message, "c")
	for _, ev := range r.all() {
		if ev.Kind == driver.Message && ev.Channel != "c" || ev.Kind == driver.Unsubscribed && ev.Channel == "c" {
			t.Errorf("unexpected event %v", ev)
		}
	}
	subscribe(t, s, r, "a")
	if err := s.Unsubscribe("a", "c"); err != nil {
		t.Fatalf("Unsubscribe: %v", err)
	}
	r.wait(t, driver.Unsubscribed, "c")
	subscribe(t, s, r, "d") // after the session had no channel at all
	closeAndCheck(t, s, r)
}

func testPing(t *testing.T, e *env) {
	s, r := open(t, e)
	var want []string
	ping := func() {
		for range 3 {
			id := "id" + strconv.Itoa(len(want))
			want = append(want, id)
			if err := s.Ping(id); err != nil {
				t.Fatalf("Ping: %v", err)
			}
		}
	}
	ping()
	subscribe(t, s, r, "a") // before and after the first channel the wire format differs
	ping()
	var got []string
	redistest.WaitFor(t, "all pongs", func() bool {
		got = nil
		for _, ev := range r.all() {
			if ev.Kind == driver.Pong {
				got = append(got, ev.Payload)
			}
		}
		return len(got) >= len(want)
	})
	if !slices.Equal(got, want) {
		t.Errorf("pongs %q, want %q", got, want)
	}
	closeAndCheck(t, s, r)
}

func testManyChannels(t *testing.T, e *env) {
	const n = 500
	s, r := open(t, e)
	var channels []string
	for i := range n {
		channels = append(channels, "many"+strconv.Itoa(i))
	}
	if err := s.Subscribe(channels[:n/2]...); err != nil {
		t.Fatalf("Subscribe: %v", err)
	}
	for _, channel := range channels[n/2:] {
		if err := s.Subscribe(channel); err != nil {
			t.Fatalf("Subscribe: %v", err)
		}
	}
	redistest.WaitFor(t, "one confirmation for each channel", func() bool {
		confirmed := map[string]bool{}
		for _, ev := range r.all() {
			confirmed[ev.Channel] = confirmed[ev.Channel] || ev.Kind == driver.Subscribed
		}
		return len(confirmed) == n
	})
	publish(t, e, channels[n-1], "x")
	r.wait(t, driver.Message, channels[n-1])
	closeAndCheck(t, s, r)
}

func testClose(t *testing.T, e *env) {
	s, r := open(t, e)
	subscribe(t, s, r, "a")
	began := time.Now()
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() { // ends with Close
			if err := s.Close(); err != nil {
				t.Errorf("Close: %v", err)
			}
		})
	}
	wg.Wait()
	closeAndCheck(t, s, r)
	if took := time.Since(began); took > prompt {
		t.Errorf("Close and Down took %v", took)
	}
	publish(t, e, "a", "nobody hears it") // commands are not affected
}

func testManySessions(t *testing.T, e *env) {
	const n = 20
	sessions, recorders := make([]driver.Session, n), make([]*recorder, n)
	for i := range n {
		sessions[i], recorders[i] = open(t, e)
		subscribe(t, sessions[i], recorders[i], "all", "only"+strconv.Itoa(i))
	}
	publish(t, e, "all", "x")
	publish(t, e, "only7", "y")
	for i := range n {
		recorders[i].wait(t, driver.Message, "all")
		if i == 7 {
			recorders[i].wait(t, driver.Message, "only7")
		}
		closeAndCheck(t, sessions[i], recorders[i])
	}
}

func testSessionContext(t *testing.T, e *env) {
	ctx, cancel := context.WithCancel(t.Context())
	r := &recorder{tb: t}
	s, err := e.d.OpenSession(ctx, r.emit)
	cancel()
	if err != nil {
		t.Fatalf("OpenSession: %v", err)
	}
	subscribe(t, s, r, "a")
	publish(t, e, "a", "x")
	r.wait(t, driver.Message, "a")
	closeAndCheck(t, s, r)
}

func testSessionBytes(t *testing.T, e *env) {
	s, r := open(t, e)
	for i, text := range []string{"", "\x00", "\r\n", "+OK\r\n", "\xff\xfe", "x y"} {
		channel := "bytes" + strconv.Itoa(i) + text
		subscribe(t, s, r, channel)
		publish(t, e, channel, text)
		if got := r.wait(t, driver.Message, channel).Payload; got != text {
			t.Errorf("payload %q, want %q", got, text)
		}
	}
	closeAndCheck(t, s, r)
}

func testSlowHandler(t *testing.T, e *env) {
	r := &recorder{tb: t}
	block, blocked := make(chan struct{}), make(chan struct{})
	var once sync.Once
	s, err := e.d.OpenSession(t.Context(), func(ev driver.Event) {
		r.emit(ev)
		if ev.Kind == driver.Message {
			once.Do(func() {
				close(blocked)
				<-block
			})
		}
	})
	if err != nil {
		t.Fatalf("OpenSession: %v", err)
	}
	subscribe(t, s, r, "slow")
	publish(t, e, "slow", "x")
	within(t, "the handler", prompt, blocked)
	for i := range 300 { // more than any buffer between the connection and the handler is likely to take
		publish(t, e, "slow", strconv.Itoa(i))
	}
	other, events := open(t, e)
	subscribe(t, other, events, "other")
	publish(t, e, "other", "x")
	events.wait(t, driver.Message, "other")
	close(block)
	closeAndCheck(t, s, r)
}

func testSessionCut(t *testing.T, e *env) {
	for _, cut := range []func(){e.proxy.CutAll, e.proxy.CutClients} {
		s, r := open(t, e)
		idle, idleEvents := open(t, e) // without a channel
		subscribe(t, s, r, "a")
		cut()
		for _, r := range []*recorder{r, idleEvents} {
			if down := r.wait(t, driver.Down, ""); class(t, down.Err) == nil {
				t.Error("Down after a cut says nothing, as if the session had been closed")
			}
		}
		wantOver(t, s, r)
		wantOver(t, idle, idleEvents)
		e.works(t)
	}
}

func testDownIsPrompt(t *testing.T, e *env) {
	s, r := open(t, e)
	subscribe(t, s, r, "a")
	e.proxy.BlackHole(true) // whoever dials now waits in vain
	defer e.proxy.BlackHole(false)
	began := time.Now()
	e.proxy.CutClients()
	r.wait(t, driver.Down, "")
	if took := time.Since(began); took > prompt {
		t.Errorf("Down came %v after the cut", took)
	}
	wantOver(t, s, r)
}

func testCloseSilent(t *testing.T, e *env) {
	s, r := open(t, e)
	subscribe(t, s, r, "a")
	e.proxy.BlackHole(true)
	defer e.proxy.BlackHole(false)
	began := time.Now()
	_ = s.Ping("unanswered")
	_ = s.Subscribe("unanswered")
	if took := time.Since(began); took > prompt {
		t.Errorf("Ping and Subscribe on a silent server took %v", took)
	}
	closeAndCheck(t, s, r)
	if took := time.Since(began); took > 2*prompt {
		t.Errorf("Close on a silent server took %v", took)
	}
}

func testCloseRace(t *testing.T, e *env) {
	for i := range 20 {
		s, r := open(t, e)
		var wg sync.WaitGroup
		for g := range 3 { // each ends with its calls: the methods of a session return
			wg.Go(func() {
				for j := range 10 {
					_ = s.Subscribe("race" + strconv.Itoa(j))
					_ = s.Ping(strconv.Itoa(g))
					_ = s.Unsubscribe("race" + strconv.Itoa(j))
				}
			})
		}
		if i%2 == 0 {
			wg.Go(func() { _ = s.Close() }) // ends at once
		} else {
			wg.Go(e.proxy.CutAll) // ends at once
		}
		wg.Wait()
		_ = s.Close()
		r.wait(t, driver.Down, "")
		wantOver(t, s, r)
	}
}

func testOpenRefused(t *testing.T, e *env) {
	e.warm(t, count("open refused"))
	e.proxy.Refuse(true)
	for range 2 {
		_, err := e.d.OpenSession(t.Context(), func(ev driver.Event) { t.Errorf("event %v without a session", ev.Kind) })
		wantClass(t, "OpenSession", err, driver.ErrNotExecuted)
	}
	e.proxy.Refuse(false)
	e.works(t)
	s, r := open(t, e)
	subscribe(t, s, r, "a")
	closeAndCheck(t, s, r)
}

func testOpenSilent(t *testing.T, e *env) {
	e.warm(t, count("open silent"))
	e.proxy.BlackHole(true)
	defer e.proxy.BlackHole(false)
	never := func(ev driver.Event) { t.Errorf("event %v without a session", ev.Kind) }
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	began := time.Now()
	_, err := e.d.OpenSession(ctx, never)
	wantClass(t, "OpenSession whose context ends", err, driver.ErrNotExecuted)
	if took := time.Since(began); !errors.Is(err, context.DeadlineExceeded) || took > prompt {
		t.Errorf("OpenSession whose context ends returned %v after %v", err, took)
	}
	_, err = e.d.OpenSession(t.Context(), never)
	wantClass(t, "OpenSession", err, driver.ErrNotExecuted)
	if took := time.Since(began); took > e.h.Bound {
		t.Errorf("OpenSession on a silent server took %v", took)
	}
}
