package dsync

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/e51fe0e6/dsync/internal/claim"
	"github.com/e51fe0e6/dsync/internal/session"
	"github.com/e51fe0e6/dsync/scripts"
)

// Mutex is a mutual exclusion lock as [sync.Mutex] is, held across processes. It excludes every other Mutex of the same name under the same
// prefix, in this process and in all others. Other kinds of primitives may use the same name.
//
// A Mutex may be used by any number of goroutines, and as with sync.Mutex one goroutine may lock and another unlock. It must not be copied.
//
// Whoever waits is served in the order of arrival: processes among each other, and goroutines within a process; see [WithSlice] for
// the bounded exception. The holder that releases hands the lock to the next waiter inside Redis, so waiting costs next to nothing.
//
// A hold is a lease: if its process dies, or is cut off from Redis, the lease ends after its TTL and another may be granted. The holder
// counts the lease conservatively and knows of the loss before Redis can grant to anybody else ([Mutex.Lost], the context of [Mutex.Do]),
// provided that it is running at all; a process that is paused at the wrong moment learns of it too late. What must be right even then
// is protected by the fencing token ([Mutex.Fence], [Fence]).
//
// What happened under a hold is visible to the next holder in the sense of the Go memory model if both are in one process; across processes
// it is as visible as the store makes it in which it happened.
type Mutex struct {
	_ noCopy

	lock
	hold       atomic.Pointer[session.Hold] // the current hold, lost or not
	retryAfter atomic.Int64
}

// NewMutex returns the mutex with the given name, of 1 to 1,024 bytes. Nothing is sent. A name or options that cannot be used are told by every
// method of the value. A nil client panics.
func NewMutex(c *Client, name string, opts ...Option) *Mutex {
	return &Mutex{lock: newLock(c, "mutex", name, opts)}
}

// Name returns the name.
func (m *Mutex) Name() string { return m.name }

// Lock waits until the mutex is held. ctx bounds the wait, never the hold: after Lock has returned nil, ctx may end without effect.
//
// It returns an error that matches ctx.Err() if ctx ends first, [ErrClosed] if the client is closed, [ErrUnavailable] if
// Redis is out of reach for longer than the client's outage budget, and at once what waiting cannot heal: missing rights, a key of
// another type, [ErrDeadlock], [ErrInvalidName], [ErrInvalidOption]. On an error nothing is held, and what may have reached Redis is withdrawn in the
// background. Through a shorter outage, a restart or a failover of Redis it goes on waiting.
func (m *Mutex) Lock(ctx context.Context) error {
	_, err := m.acquire(ctx, false)
	return m.wrap("Lock", err)
}

// TryLock locks the mutex if that is possible now, and reports whether it did. It never waits for a holder: false and nil mean
// that somebody else holds it, or is ahead in the queue; see [Mutex.RetryAfter]. It makes one attempt of at most 3 s, and returns [ErrUnavailable] if Redis does
// not answer; otherwise the errors are those of Lock.
func (m *Mutex) TryLock(ctx context.Context) (bool, error) {
	h, err := m.acquire(ctx, true)
	return h != nil, m.wrap("TryLock", err)
}

// Unlock ends the hold: in this process at once, before anything is sent, and in Redis even if ctx has ended already, for ctx
// bounds only how long Unlock waits for the confirmation.
//
// nil: the lease was valid when Unlock was called. [ErrLost]: it was not, or the server says so. [ErrUnconfirmed]: it was, but ctx ended,
// or the server refused, or the lease was over, before the release was confirmed; it goes on in the background. [ErrNotHeld]: this value
// holds nothing.
func (m *Mutex) Unlock(ctx context.Context) error {
	if m.invalid != nil {
		return m.wrap("Unlock", m.invalid)
	}
	if err := m.c.check(ctx); err != nil {
		return m.wrap("Unlock", err)
	}
	return m.wrap("Unlock", m.release(ctx))
}

// Do calls fn while the mutex is held. The context of fn is derived from ctx, ends with the cause [ErrLost] when the lease is lost and [ErrClosed] when
// the client is closed, and carries the fencing token for [Fence].
//
// Do returns the error of fn as it is, joined with ErrLost if the lease was lost before fn returned, or the error of Lock, and then fn was not called.
// The error alone does not tell which: have fn note that it ran, if that matters. A release that stays unconfirmed is logged and told to the hooks, and is not an error of Do. If fn panics or calls runtime.Goexit, the
// mutex is released and the panic goes on.
//
// The one ctx bounds the wait and the section. Where a caller may stop waiting but must not break off the section, use Lock with its context, and
// watch [Mutex.Lost].
func (m *Mutex) Do(ctx context.Context, fn func(ctx context.Context) error) error {
	h, err := m.acquire(ctx, false)
	if err != nil {
		return m.wrap("Do", err)
	}
	return m.run(ctx, h, fn, m.releaseHold)
}

// TryDo is Do without waiting for a holder, as TryLock is Lock. The bool tells whether fn was called.
func (m *Mutex) TryDo(ctx context.Context, fn func(ctx context.Context) error) (bool, error) {
	h, err := m.acquire(ctx, true)
	if h == nil {
		return false, m.wrap("TryDo", err)
	}
	return true, m.run(ctx, h, fn, m.releaseHold)
}

// Lost returns a channel that is closed when the current hold is lost. Without a hold it is closed already. It may have been closed by
// the time you look.
func (m *Mutex) Lost() <-chan struct{} {
	if h := m.hold.Load(); h != nil {
		return h.Lost()
	}
	none := make(chan struct{})
	close(none)
	return none
}

// Fence returns the fencing token of the current hold, or 0. The tokens of a name strictly increase from hold to hold, in every process.
func (m *Mutex) Fence() int64 {
	if h := m.hold.Load(); h != nil {
		return h.Fence()
	}
	return 0
}

// Remaining returns how long the current hold is certain to last if it is not renewed any more, by the conservative count; 0 without a
// hold, or when it is lost.
func (m *Mutex) Remaining() time.Duration {
	if h := m.hold.Load(); h != nil {
		return h.Remaining()
	}
	return 0
}

// RetryAfter returns how long the lease of the holder was still to last when TryLock or TryDo of this value last found one, for a
// Retry-After: after that time the lock is free even if its holder has died. Most holders are done much sooner, and one that lives renews. 0:
// unknown. It sends nothing. Goroutines that share the value see each other's; and callers who all come back at the same moment meet again, so add some jitter.
func (m *Mutex) RetryAfter() time.Duration { return time.Duration(m.retryAfter.Load()) }

// Locker returns the mutex as a [sync.Locker], for code that takes one. Lock blocks through every outage, as sync.Mutex blocks, and panics on what can
// never succeed (a closed client, missing rights, bad options): it never returns without the lock. Unlock panics on [ErrNotHeld], as
// sync.Mutex does, and logs a loss, of which its caller cannot be told.
func (m *Mutex) Locker() sync.Locker { return locker{m} }

func (m *Mutex) acquire(ctx context.Context, try bool) (*session.Hold, error) {
	if err := m.check(ctx); err != nil {
		return nil, err
	}
	h, retryAfter, err := m.c.session.Acquire(ctx, m.key, scripts.Mutex, claim.Request{
		Try: try, TTL: m.opts.ttl, Renew: m.opts.renew, MaxHold: m.opts.maxHold,
		Slice: m.opts.slice, Linger: m.opts.linger, Meta: m.meta,
	})
	if h != nil {
		m.hold.Store(h)
	}
	if try && err == nil {
		m.retryAfter.Store(int64(retryAfter))
	}
	return h, err
}

// release takes the hold before it ends it, so that a goroutine to which the lock passes at once finds the place empty.
func (m *Mutex) release(ctx context.Context) error {
	h := m.hold.Swap(nil)
	if h == nil {
		return ErrNotHeld
	}
	return h.Release(ctx)
}

// releaseHold is release for a Do, which ends its own hold and no other: fn may have unlocked, and another goroutine may hold by now.
func (m *Mutex) releaseHold(ctx context.Context, h *session.Hold) error {
	m.hold.CompareAndSwap(h, nil)
	return h.Release(ctx)
}

type locker struct{ m *Mutex }

// Lock is for sync.Locker.
func (l locker) Lock() {
	for {
		err := l.m.Lock(context.Background()) //nolint:forbidigo // sync.Locker has no context to take
		switch {
		case err == nil:
			return
		case !errors.Is(err, ErrUnavailable):
			panic(err)
		}
		l.m.log(context.Background(), slog.LevelWarn, "dsync: still waiting for a lock", err) //nolint:forbidigo // see above
	}
}

// Unlock is for sync.Locker.
func (l locker) Unlock() {
	err := l.m.Unlock(context.Background()) //nolint:forbidigo // sync.Locker has no context to take
	switch {
	case errors.Is(err, ErrNotHeld), errors.Is(err, ErrInvalidName), errors.Is(err, ErrInvalidOption):
		panic(err)
	case err != nil:
		l.m.log(context.Background(), slog.LevelWarn, "dsync: unlocked, but", err) //nolint:forbidigo // see above
	}
}
