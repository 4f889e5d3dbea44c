package session

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/e51fe0e6/dsync/driver"
	"github.com/e51fe0e6/dsync/internal/claim"
)

// Hold is one call of Lock or TryLock and what came of it.
type Hold struct {
	e   *entry
	req claim.Request

	// Guarded by e.mu, and not changed once decided.
	verdict verdict
	decided bool
	wake    chan struct{} // closed when it is decided; made only for a caller that has to wait

	// Guarded by e.mu.
	outcome     error // of the release, once it is over
	over        bool
	done        chan struct{} // closed when the release is over; made only for a caller that has to wait
	ended       bool
	endedAt     time.Duration
	lost        bool
	lostCh      chan struct{} // made when asked for; closed by the loss
	interrupted error
	onEnd       func(cause error) // called once, when the hold is lost or the client closes
}

// verdict is how an acquisition ended.
type verdict struct {
	ok         bool
	fence      int64
	notBefore  time.Duration // the caller may return from then on
	retryAfter time.Duration
	err        error
}

func (h *Hold) decideLocked(v verdict) {
	h.verdict, h.decided = v, true
	if h.wake != nil {
		close(h.wake)
	}
}

func (h *Hold) releasedLocked(err error) {
	h.outcome, h.over = err, true
	if h.done != nil {
		close(h.done)
	}
}

func failure(a claim.Action) error {
	switch a.Outcome {
	case claim.Closed:
		return ErrClosed
	case claim.Permanent:
		return a.Err
	default:
		return fmt.Errorf("%w: %w", ErrUnavailable, a.Err)
	}
}

func confirmation(a claim.Action) error {
	switch a.Outcome {
	case claim.OK:
		return nil
	case claim.Lost:
		return ErrLost
	default:
		if a.Err == nil {
			return ErrUnconfirmed
		}
		return fmt.Errorf("%w: %w", ErrUnconfirmed, a.Err)
	}
}

// Acquire asks for the lock at key as spec says, and returns when it is held, or refused to a try (nil, and how long its holder's lease
// still lasts), or ctx ends, or with an error.
func (s *Session) Acquire(ctx context.Context, key string, script *driver.Script, spec claim.Request) (*Hold, time.Duration, error) {
	if ctx.Err() != nil {
		return nil, 0, Ended(ctx)
	}
	h := &Hold{req: spec}
	h.req.Tag = h
	if !spec.Try || spec.Linger > 0 { // who lingers must hear that others wait
		s.hub.open() //nolint:contextcheck // the subscription outlives this call
	}
	e, err := s.locked(key, script)
	if err != nil {
		return nil, 0, err
	}
	h.e = e
	e.applyLocked(func(c *claim.Claim, now time.Duration) {
		if sub := s.hub.state(); sub != claim.Opening {
			c.Subscribed(now, sub)
		}
		c.Request(now, &h.req)
	})
	if !h.decided {
		h.wake = make(chan struct{})
	}
	wake := h.wake
	e.unlockAndSend()
	if wake != nil {
		select {
		case <-wake:
		case <-ctx.Done():
			if err := h.cancel(ctx); err != nil {
				return nil, 0, err
			}
		}
	}
	if v := h.verdict; !v.ok {
		return nil, v.retryAfter, v.err
	}
	s.sleepUntil(h.verdict.notBefore)
	return h, 0, nil
}

// cancel takes the call out of the queue; nil: it was decided before.
func (h *Hold) cancel(ctx context.Context) (err error) {
	h.e.step(func(c *claim.Claim, now time.Duration) {
		if !c.Cancel(now, &h.req) {
			return
		}
		err = Ended(ctx)
		if cause := c.Outage(now); cause != nil {
			err = fmt.Errorf("%w: %w: %w", err, ErrUnavailable, cause)
		}
	})
	return err
}

// Ended returns the error of a context that has ended: it matches ctx.Err(), and the cause if there is another.
func Ended(ctx context.Context) error {
	if cause := context.Cause(ctx); !errors.Is(cause, ctx.Err()) {
		return fmt.Errorf("%w: %w", ctx.Err(), cause)
	}
	return context.Cause(ctx)
}

// Release ends the hold here at once, then in Redis. ctx bounds the wait for the confirmation only.
func (h *Hold) Release(ctx context.Context) error {
	e := h.e
	e.mu.Lock()
	if h.ended {
		e.mu.Unlock()
		return ErrNotHeld
	}
	h.ended = true
	h.onEnd = nil
	e.applyLocked(func(c *claim.Claim, now time.Duration) {
		h.endedAt = now
		c.Release(now, &h.req)
	})
	if !h.over {
		h.done = make(chan struct{})
	}
	done := h.done
	e.unlockAndSend()
	if done == nil {
		return h.outcome
	}
	select {
	case <-done:
		return h.outcome
	case <-ctx.Done():
	}
	cause := Ended(ctx)
	e.mu.Lock() // the release goes on, and its end is observed
	outage := e.claim.Outage(e.s.watch.now())
	e.mu.Unlock()
	if outage != nil {
		cause = fmt.Errorf("%w: %w", cause, outage)
	}
	return fmt.Errorf("%w: %w", ErrUnconfirmed, cause)
}

// Fence returns the fencing token.
func (h *Hold) Fence() int64 { return h.verdict.fence }

// Lost returns a channel that is closed when the hold is lost.
func (h *Hold) Lost() <-chan struct{} {
	h.e.mu.Lock()
	defer h.e.mu.Unlock()
	if h.lostCh == nil {
		h.lostCh = make(chan struct{})
		if h.lost {
			close(h.lostCh)
		}
	}
	return h.lostCh
}

// Remaining returns how long the hold is still valid by the conservative count.
func (h *Hold) Remaining() time.Duration {
	h.e.mu.Lock()
	defer h.e.mu.Unlock()
	return h.e.claim.Remaining(h.e.s.watch.now(), &h.req)
}

// OnEnd has f called once, with ErrLost or ErrClosed, when the hold is lost or the client closes; at once if that has
// happened. It is not called after Release.
func (h *Hold) OnEnd(f func(cause error)) {
	h.e.mu.Lock()
	h.onEnd = f
	switch {
	case h.lost:
		h.interruptLocked(ErrLost)
	case h.interrupted != nil:
		h.interruptLocked(h.interrupted)
	}
	h.e.unlockAndSend()
}

func (h *Hold) loseLocked() {
	h.lost = true
	if h.lostCh != nil {
		close(h.lostCh)
	}
	h.interruptLocked(ErrLost)
}

func (h *Hold) interruptLocked(cause error) {
	h.interrupted = cause
	if f := h.onEnd; f != nil {
		h.onEnd = nil
		h.e.after = append(h.e.after, func() { f(cause) })
	}
}

// sleepUntil waits out the microseconds by which a fast hand-over is ahead of the clock with its fence.
func (s *Session) sleepUntil(at time.Duration) {
	for now := s.watch.now(); now < at; now = s.watch.now() {
		woken := make(chan struct{})
		s.cfg.Clock.AfterFunc(at-now, func() { close(woken) })
		<-woken
	}
}
