package goredis

import (
	"context"
	"slices"

	"github.com/redis/go-redis/v9"

	"github.com/e51fe0e6/dsync/driver"
	"github.com/e51fe0e6/dsync/driver/internal/detach"
)

// call is one script on its way. Whoever runs it writes reply and err and then closes done; the caller
// reads them only after that, and not at all if it has stopped waiting.
type call struct {
	script *driver.Script
	keys   []string // copied: the caller may reuse its slices once it has stopped waiting
	args   []string
	cmd    *redis.Cmd // the last attempt

	done  chan struct{}
	reply driver.Reply
	err   error
}

func newCall(c driver.Cmd) *call {
	return &call{script: c.Script, keys: slices.Clone(c.Keys), args: slices.Clone(c.Args), done: make(chan struct{})}
}

// await waits for the outcome, but not longer than ctx and w allow. A finished call is never called unknown.
func (l *call) await(ctx context.Context, w *detach.Waiter) (driver.Reply, error) {
	if err := w.Await(ctx, l.done); err != nil {
		select {
		case <-l.done: // select picks at random when several cases are ready
		default:
			return driver.Reply{}, &driver.Error{Class: driver.ErrUnknown, Cause: err}
		}
	}
	return l.reply, l.err
}

func (l *call) finish(r driver.Reply, err error) {
	l.reply, l.err = r, err
	close(l.done)
}

// prepare makes the command of the next attempt: EVAL if source says so for its script, else EVALSHA.
func (l *call) prepare(ctx context.Context, source func(*driver.Script) bool) redis.Cmder {
	args := make([]any, 0, 3+len(l.keys)+len(l.args))
	if source(l.script) {
		args = append(args, "eval", l.script.Src())
	} else {
		args = append(args, "evalsha", l.script.SHA1())
	}
	args = append(args, len(l.keys))
	for _, key := range l.keys {
		args = append(args, key)
	}
	for _, arg := range l.args {
		args = append(args, arg)
	}
	l.cmd = redis.NewCmd(ctx, args...)
	l.cmd.SetFirstKeyPos(3)
	return noRetry{l.cmd}
}

// noScript reports whether the last attempt did not run because the server does not know the digest.
func (l *call) noScript() bool { return redis.HasErrorPrefix(l.cmd.Err(), "NOSCRIPT") }

// result returns what the last attempt came to.
func (l *call) result() (driver.Reply, error) {
	v, err := l.cmd.Result()
	if err != nil {
		return driver.Reply{}, classify(err)
	}
	r, err := driver.ReplyOf(v)
	if err != nil {
		// The script ran, but what it did is not to be read from this.
		return driver.Reply{}, &driver.Error{Class: driver.ErrUnknown, Cause: err}
	}
	return r, nil
}

// noRetry keeps go-redis from sending a command again whose reply was lost: by default it does so three
// times, and the script runs each time. Redirects of a cluster are followed nevertheless.
type noRetry struct{ *redis.Cmd }

// NoRetry implements redis.Cmder.
func (noRetry) NoRetry() bool { return true }

func never(*driver.Script) bool { return false }

func always(*driver.Script) bool { return true }

// firstOnly returns a function that says yes once for each script.
func firstOnly() func(*driver.Script) bool {
	seen := map[string]bool{}
	return func(s *driver.Script) bool {
		first := !seen[s.SHA1()]
		seen[s.SHA1()] = true
		return first
	}
}
