package rueidis

import (
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/redis/rueidis"

	"github.com/e51fe0e6/dsync/driver"
	"github.com/e51fe0e6/dsync/driver/internal/detach"
)

// errSessionOver is why a method of a session that is down fails.
var errSessionOver = errors.New("the session is over")

// maxPending is how many events wait for a slow emit before the connection is no longer read.
const maxPending = 64

// session implements driver.Session over a dedicated connection.
//
// Events come from two sides: messages and confirmations from the connection's read loop through hooks, refusals and
// pongs from the goroutine that asked. Both hand them to one goroutine, which alone calls emit.
type session struct {
	client rueidis.DedicatedClient
	events chan driver.Event // never closed
	over   chan struct{}     // closed once, by end
	wake   chan struct{}     // capacity 1: requests is not empty

	mu       sync.Mutex // protects what follows; nothing blocks while it is held
	requests []request  // in the order of the calls
	ended    bool
	cause    error // why the session is over, nil after Close; written before over is closed
}

// request is what the writing goroutine is to do. It waits for the answer, so that the order is kept.
type request func(ctx context.Context)

// OpenSession implements driver.Driver. A session that is open has answered a PING.
func (a *adapter) OpenSession(ctx context.Context, emit func(driver.Event)) (driver.Session, error) {
	if err := detach.Refuse(ctx); err != nil {
		return nil, err
	}
	s := &session{events: make(chan driver.Event, maxPending), over: make(chan struct{}), wake: make(chan struct{}, 1)}
	var opened error
	var broken <-chan error
	done := make(chan struct{})
	go func() { // stopped by the client's timeouts
		defer close(done)
		if opened = a.closed(context.WithoutCancel(ctx)); opened == nil {
			broken, opened = s.open(context.WithoutCancel(ctx), a.client)
		}
	}()
	if err := a.waiter.Await(ctx, done); err != nil {
		go func() { // stopped with the dial
			<-done
			s.end(nil)
			s.release()
		}()
		return nil, &driver.Error{Class: driver.ErrNotExecuted, Cause: err}
	}
	if opened != nil {
		if errors.Is(opened, rueidis.ErrClosing) {
			a.closing.Store(true)
		}
		s.end(nil)
		s.release()
		return nil, notOpened(opened)
	}
	go s.emitAll(emit, broken)                // stopped by the end of the session
	go s.writeAll(context.WithoutCancel(ctx)) // likewise
	return s, nil
}

// open takes a connection and waits for the server's answer. A user without the right to PING has been answered too.
func (s *session) open(ctx context.Context, client rueidis.Client) (broken <-chan error, err error) {
	s.client, _ = client.Dedicate() // Close below releases it too
	broken = s.client.SetPubSubHooks(rueidis.PubSubHooks{
		OnMessage: func(m rueidis.PubSubMessage) {
			s.put(driver.Event{Kind: driver.Message, Channel: m.Channel, Payload: m.Message})
		},
		OnSubscription: func(sub rueidis.PubSubSubscription) {
			switch sub.Kind {
			case "subscribe":
				s.put(driver.Event{Kind: driver.Subscribed, Channel: sub.Channel})
			case "unsubscribe":
				s.put(driver.Event{Kind: driver.Unsubscribed, Channel: sub.Channel})
			}
		},
	})
	err = s.client.Do(ctx, s.client.B().Ping().Build()).Error()
	if reply, ok := rueidis.IsRedisErr(err); ok && driver.Code(reply.Error()) == "NOPERM" {
		return broken, nil
	}
	return broken, err
}

// notOpened gives its class to an error of open: no script was sent, so it is never unknown.
func notOpened(err error) error {
	if classified := classify(err); errors.Is(classified, driver.ErrPermanent) {
		return classified
	}
	return &driver.Error{Class: driver.ErrNotExecuted, Cause: err}
}

// put hands an event to the emitting goroutine. Nobody may be held up by a session that is over: then it is dropped.
func (s *session) put(e driver.Event) {
	select {
	case s.events <- e:
	case <-s.over:
	}
}

// emitAll calls emit until and including Down, and then closes the connection.
func (s *session) emitAll(emit func(driver.Event), broken <-chan error) {
	defer s.release()
	for {
		select {
		case e := <-s.events:
			emit(e)
			continue
		case err := <-broken: // the read loop has ended, so no hook will put anything any more
			if err == nil {
				err = errSessionOver
			}
			s.end(classify(err))
		case <-s.over:
		}
		break
	}
	s.mu.Lock()
	cause := s.cause
	s.mu.Unlock()
	if cause != nil {
		s.emitPending(emit)
	}
	emit(driver.Event{Kind: driver.Down, Err: cause})
}

// emitPending emits what had come before the connection broke.
func (s *session) emitPending(emit func(driver.Event)) {
	for {
		select {
		case e := <-s.events:
			emit(e)
		default:
			return
		}
	}
}

// writeAll runs the requests one after the other.
func (s *session) writeAll(ctx context.Context) {
	for {
		select {
		case <-s.wake:
		case <-s.over:
			return
		}
		s.mu.Lock()
		requests := s.requests
		s.requests = nil
		s.mu.Unlock()
		for _, r := range requests {
			r(ctx)
		}
	}
}

// Subscribe implements driver.Session.
func (s *session) Subscribe(channels ...string) error {
	if len(channels) == 0 {
		return nil // without channels the server refuses the command
	}
	channels = slices.Clone(channels)
	return s.ask(func(ctx context.Context) {
		err := s.client.Do(ctx, s.client.B().Subscribe().Channel(channels...).Build()).Error()
		s.answered(err, channels)
	})
}

// Unsubscribe implements driver.Session.
func (s *session) Unsubscribe(channels ...string) error {
	if len(channels) == 0 {
		return nil // without channels it would mean all of them
	}
	channels = slices.Clone(channels)
	return s.ask(func(ctx context.Context) {
		err := s.client.Do(ctx, s.client.B().Unsubscribe().Channel(channels...).Build()).Error()
		s.answered(err, channels)
	})
}

// Ping implements driver.Session.
func (s *session) Ping(id string) error {
	return s.ask(func(ctx context.Context) {
		err := s.client.Do(ctx, s.client.B().Ping().Message(id).Build()).Error()
		if err == nil { // the answer is the id, or for miniredis an array that ends with it
			s.put(driver.Event{Kind: driver.Pong, Payload: id})
		}
		s.answered(err, []string{""})
	})
}

// Close implements driver.Session. The connection is closed by the emitting goroutine after Down: if the server
// is silent, rueidis takes a second for it.
func (s *session) Close() error {
	s.end(nil)
	return nil
}

// ask queues a request for the writing goroutine: rueidis waits for the answer to each, which may never come.
func (s *session) ask(r request) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return &driver.Error{Class: driver.ErrPermanent, Cause: errSessionOver}
	}
	s.requests = append(s.requests, r)
	select {
	case s.wake <- struct{}{}:
	default: // a wake is pending, and whoever gets it takes all requests
	}
	return nil
}

// answered acts on the error of a request: a refusal concerns each of its channels, anything else the connection.
func (s *session) answered(err error, channels []string) {
	if err == nil {
		return
	}
	if _, ok := rueidis.IsRedisErr(err); !ok {
		s.end(classify(err))
		return
	}
	for _, channel := range channels {
		s.put(driver.Event{Kind: driver.Refused, Channel: channel, Err: classify(err)})
	}
}

// end makes the session over, for the given reason or for none if it was closed. Only the first call counts.
func (s *session) end(cause error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.ended {
		s.ended, s.cause = true, cause
		close(s.over)
	}
}

// release closes the connection, which ends whatever request is still waiting for an answer.
func (s *session) release() {
	if s.client != nil {
		s.client.Close()
	}
}
