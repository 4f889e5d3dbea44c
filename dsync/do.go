package dsync

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"

	"github.com/e51fe0e6/dsync/internal/session"
)

// section is what the context of a running Do carries: a list of the holds around it, innermost first.
type section struct {
	c     *Client
	key   string
	fence int64
	outer *section
	over  atomic.Bool // fn has returned: its context may live on, but nothing is held by it
}

type sectionKey struct{}

func around(ctx context.Context) *section {
	s, _ := ctx.Value(sectionKey{}).(*section)
	return s
}

// holding reports whether a Do on this key of this client is running around ctx.
func holding(ctx context.Context, c *Client, key string) bool {
	for s := around(ctx); s != nil; s = s.outer {
		if s.c == c && s.key == key && !s.over.Load() {
			return true
		}
	}
	return false
}

// Fence returns the fencing token of the innermost Do around ctx, and whether there is one. Hand it to the resource that the lock protects,
// and have the resource refuse a token smaller than one it has seen: that holds even against a holder that was paused past its lease.
func Fence(ctx context.Context) (int64, bool) {
	s := around(ctx)
	if s == nil {
		return 0, false
	}
	return s.fence, true
}

// run calls fn under h, and releases by way of release, whatever becomes of fn: a panic or a runtime.Goexit releases and goes on.
func (l *lock) run(ctx context.Context, h *session.Hold, fn func(context.Context) error, release func(context.Context, *session.Hold) error) (err error) {
	s := &section{c: l.c, key: l.key, fence: h.Fence(), outer: around(ctx)}
	inner, cancel := context.WithCancelCause(context.WithValue(ctx, sectionKey{}, s))
	h.OnEnd(cancel)
	defer func() {
		s.over.Store(true)
		ended := release(ctx, h)
		cancel(nil)
		switch {
		case errors.Is(ended, ErrLost):
			err = errors.Join(err, l.wrap("Do", ErrLost))
		case ended != nil && !errors.Is(ended, ErrNotHeld):
			// Never the error of Do: the caller would do again what has been done. If only ctx ended, all is well most likely.
			level := slog.LevelWarn
			if ctx.Err() != nil {
				level = slog.LevelDebug
			}
			l.log(ctx, level, "dsync: a release after Do is not confirmed yet", ended)
		}
	}()
	return fn(inner)
}
