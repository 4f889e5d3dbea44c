package goredis

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/e51fe0e6/dsync/driver"
	"github.com/e51fe0e6/dsync/driver/internal/detach"
)

// session implements driver.Session over a redis.PubSub of its own.
type session struct {
	ps     *redis.PubSub
	closed atomic.Bool
}

// OpenSession implements driver.Driver. A session that is open has answered a PING.
func (a *adapter) OpenSession(ctx context.Context, emit func(driver.Event)) (driver.Session, error) {
	if _, ok := a.client.(*redis.Ring); ok {
		return nil, &driver.Error{Class: driver.ErrPermanent, Cause: errRing}
	}
	if err := detach.Refuse(ctx); err != nil {
		return nil, err
	}
	ps := a.client.Subscribe(context.WithoutCancel(ctx))
	var greeted error
	done := make(chan struct{})
	go func() { // stopped by the client's timeouts, or by closing ps below
		greeted = greet(context.WithoutCancel(ctx), ps)
		close(done)
	}()
	if err := a.waiter.Await(ctx, done); err != nil {
		go func() { _ = ps.Close() }() // waits for a dial that is under way, so for the client's DialTimeout
		return nil, &driver.Error{Class: driver.ErrNotExecuted, Cause: err}
	}
	if greeted != nil {
		_ = ps.Close()
		return nil, notSent(greeted)
	}
	s := &session{ps: ps}
	go s.receive(emit) //nolint:contextcheck // the session outlives ctx. Stopped by Close or by the first failure of the connection
	return s, nil
}

// greet dials and waits for the server's first answer. A user without the right to PING has been answered too.
func greet(ctx context.Context, ps *redis.PubSub) error {
	if err := ps.Ping(ctx); err != nil {
		return err
	}
	_, err := receive(ps) //nolint:contextcheck // see ended
	if redis.HasErrorPrefix(err, "NOPERM") {
		return nil
	}
	return err
}

// receive is ps.Receive, which panics if what the server sends is not pub/sub at all.
func receive(ps *redis.PubSub) (msg any, err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("goredis: not a pub/sub reply: %v", r)
		}
	}()
	return ps.Receive(ended{})
}

// receive emits what the connection says until it breaks.
func (s *session) receive(emit func(driver.Event)) {
	for {
		msg, err := receive(s.ps)
		if refused(err) {
			emit(driver.Event{Kind: driver.Refused, Err: classify(err)})
			continue
		}
		if err != nil {
			_ = s.ps.Close()
			if s.closed.Load() {
				emit(driver.Event{Kind: driver.Down})
			} else {
				emit(driver.Event{Kind: driver.Down, Err: classify(err)})
			}
			return
		}
		if e, ok := event(msg); ok {
			emit(e)
		}
	}
}

// refused reports whether err is the server's answer to a request on a connection that goes on. Any other
// error of the server (LOADING, NOAUTH) comes from a connection that go-redis is trying to set up.
func refused(err error) bool {
	var reply redis.Error
	if !errors.As(err, &reply) || errors.Is(err, redis.Nil) {
		return false
	}
	code := driver.Code(reply.Error())
	return code == "NOPERM" || code == "ERR"
}

// event translates what PubSub.Receive returned; false means that it is of no interest.
func event(msg any) (driver.Event, bool) {
	switch msg := msg.(type) {
	case *redis.Message:
		return driver.Event{Kind: driver.Message, Channel: msg.Channel, Payload: msg.Payload}, true
	case *redis.Pong:
		return driver.Event{Kind: driver.Pong, Payload: msg.Payload}, true
	case *redis.Subscription:
		switch msg.Kind {
		case "subscribe":
			return driver.Event{Kind: driver.Subscribed, Channel: msg.Channel}, true
		case "unsubscribe":
			return driver.Event{Kind: driver.Unsubscribed, Channel: msg.Channel}, true
		}
	}
	return driver.Event{}, false
}

// Subscribe implements driver.Session.
func (s *session) Subscribe(channels ...string) error {
	if len(channels) == 0 {
		return nil // without channels the server refuses the command
	}
	return s.written(s.ps.Subscribe(ended{}, channels...))
}

// Unsubscribe implements driver.Session.
func (s *session) Unsubscribe(channels ...string) error {
	if len(channels) == 0 {
		return nil // without channels it would mean all of them
	}
	return s.written(s.ps.Unsubscribe(ended{}, channels...))
}

// Ping implements driver.Session.
func (s *session) Ping(id string) error { return s.written(s.ps.Ping(ended{}, id)) }

// written ends the session if a request could not be written: go-redis would keep it for its next connection.
func (s *session) written(err error) error {
	if err == nil {
		return nil
	}
	_ = s.ps.Close()
	return classify(err)
}

// Close implements driver.Session.
func (s *session) Close() error {
	s.closed.Store(true)
	_ = s.ps.Close() // says only that it was closed before
	return nil
}

// ended is a context that is over and has no deadline. Reading and writing on a connection heed
// only a deadline, but dialing heeds the end: with it a PubSub does not reconnect by itself, which would hold
// Down back until that has succeeded or failed, for as long as the dial takes.
type ended struct{}

// Deadline implements context.Context.
func (ended) Deadline() (time.Time, bool) { return time.Time{}, false }

// Done implements context.Context.
func (ended) Done() <-chan struct{} {
	done := make(chan struct{})
	close(done)
	return done
}

// Err implements context.Context.
func (ended) Err() error { return context.Canceled }

// Value implements context.Context.
func (ended) Value(any) any { return nil }
