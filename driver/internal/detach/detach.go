// Package detach lets a caller wait for a command that runs apart from it, as the contract of
// [driver.Driver] wants it: the caller's context ends the waiting and never the command.
package detach

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/e51fe0e6/dsync/driver"
)

// Bound is how long an adapter waits for a command whatever the context says. It is above the time a client
// library with sane timeouts needs to give up by itself, so it bites only when the user has switched those off.
const Bound = 30 * time.Second

// Refuse returns the error of a call whose context has ended before anything was sent, or nil.
func Refuse(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return &driver.Error{Class: driver.ErrNotExecuted, Cause: err}
	}
	return nil
}

// Await returns nil once done is closed. If ctx ends or bound passes first, it returns why, without a class: the
// command goes on, and nobody will read its outcome.
func Await(ctx context.Context, done <-chan struct{}, bound time.Duration) error {
	timer := time.NewTimer(bound)
	defer timer.Stop()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return silent(bound)
	}
}

func silent(least time.Duration) error {
	return fmt.Errorf("no answer from the client library for %v or longer", least)
}

// Waiter is Await for calls that are many and short. Its methods may be called concurrently.
type Waiter struct {
	bound  time.Duration
	shared atomic.Pointer[expiry]
}

// expiry is a moment that many calls share as the end of their patience.
//
// A timer for each call costs more than it seems: a new timer wakes the thread that sleeps in the network poller, and
// that one steals the goroutine that is about to write. For a lone caller it was a third of the round trip.
type expiry struct {
	at   time.Time
	past chan struct{} // closed by a timer at at
}

// NewWaiter returns a Waiter that never waits longer than bound, and never gives up before half of it.
func NewWaiter(bound time.Duration) *Waiter { return &Waiter{bound: bound} }

// Bound is what the Waiter was made with.
func (w *Waiter) Bound() time.Duration { return w.bound }

// Await is as the function Await.
func (w *Waiter) Await(ctx context.Context, done <-chan struct{}) error {
	select {
	case <-done: // by whoever was about to wait for it
		return nil
	default:
	}
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-w.expiry().past:
		return silent(w.bound / 2)
	}
}

// expiry returns the shared moment if it is far enough away, else a new one.
func (w *Waiter) expiry() *expiry {
	e, now := w.shared.Load(), time.Now()
	if e != nil && e.at.Sub(now) >= w.bound/2 {
		return e
	}
	e = &expiry{at: now.Add(w.bound), past: make(chan struct{})}
	time.AfterFunc(w.bound, func() { close(e.past) }) // fires once and leaves nothing behind
	w.shared.Store(e)                                 // of several at once one is kept, and each is right for its caller
	return e
}
