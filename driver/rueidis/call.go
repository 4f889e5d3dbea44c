package rueidis

import (
	"context"
	"errors"
	"net"
	"slices"
	"strconv"

	"github.com/redis/rueidis"

	"github.com/e51fe0e6/dsync/driver"
)

// call is one script on its way. Whoever runs it writes result; the caller reads it only after it has been told
// that the run is over, and not at all if it has stopped waiting.
type call struct {
	index  int // in the caller's slice
	script *driver.Script
	keys   []string // copied: the caller may reuse its slices once it has stopped waiting
	args   []string
	result driver.Result
}

func newCall(index int, c driver.Cmd) *call {
	return &call{index: index, script: c.Script, keys: slices.Clone(c.Keys), args: slices.Clone(c.Args)}
}

// build makes the command: EVAL with the source, or EVALSHA. rueidis recycles a command once it has been run, so every
// attempt needs its own.
func (l *call) build(b rueidis.Builder, source bool) rueidis.Completed {
	name, script := "EVALSHA", l.script.SHA1()
	if source {
		name, script = "EVAL", l.script.Src()
	}
	return b.Arbitrary(name, script, strconv.Itoa(len(l.keys))).Keys(l.keys...).Args(l.args...).Build()
}

// run executes the calls and sets their results. Those whose script the server does not know are sent again: first with
// the source once for each script, since that lets the rest of the same pipeline find it, then, for a
// cluster where the rest went elsewhere, with the source for each.
func (a *adapter) run(ctx context.Context, calls []*call) {
	if err := a.closed(ctx); err != nil {
		for _, l := range calls {
			l.result.Err = err
		}
		return
	}
	for _, source := range []func(*driver.Script) bool{never, firstOnly(), always} {
		cmds := make([]rueidis.Completed, len(calls))
		for i, l := range calls {
			cmds[i] = l.build(a.client.B(), source(l.script))
		}
		var unknown []*call
		for i, r := range a.do(ctx, cmds) {
			if noScript(r) {
				unknown = append(unknown, calls[i])
			}
			calls[i].result = a.result(r)
		}
		if calls = unknown; len(calls) == 0 {
			return
		}
	}
}

// do runs the commands with one write for each node.
func (a *adapter) do(ctx context.Context, cmds []rueidis.Completed) []rueidis.RedisResult {
	if len(cmds) == 1 {
		return []rueidis.RedisResult{a.client.Do(ctx, cmds[0])}
	}
	return a.client.DoMulti(ctx, cmds...)
}

func noScript(r rueidis.RedisResult) bool {
	reply, ok := rueidis.IsRedisErr(r.Error())
	return ok && reply.IsNoScript()
}

// result translates what rueidis returned.
func (a *adapter) result(r rueidis.RedisResult) driver.Result {
	v, err := r.ToAny()
	if err != nil {
		if errors.Is(err, rueidis.ErrClosing) {
			a.closing.Store(true)
		}
		return driver.Result{Err: classify(err)}
	}
	reply, err := driver.ReplyOf(v)
	if err != nil {
		// The script ran, but what it did is not to be read from this.
		err = &driver.Error{Class: driver.ErrUnknown, Cause: err}
	}
	return driver.Result{Reply: reply, Err: err}
}

// closed returns an error of driver.ErrPermanent if the client is closed, before anything is sent. rueidis says ErrClosing
// also for a command that was on its way when the client was closed, so the error proves nothing about the command that
// it came for; but when a later PING gets it too, then what has not been sent yet never will be.
func (a *adapter) closed(ctx context.Context) error {
	if !a.closing.Load() {
		return nil
	}
	if err := a.client.Do(ctx, a.client.B().Ping().Build()).Error(); errors.Is(err, rueidis.ErrClosing) {
		return &driver.Error{Class: driver.ErrPermanent, Cause: err}
	}
	a.closing.Store(false)
	return nil
}

// classify gives an error of rueidis its class.
func classify(err error) error {
	var dial *net.OpError
	if reply, ok := rueidis.IsRedisErr(err); ok {
		return driver.Classify(reply.Error(), err)
	}
	if errors.As(err, &dial) && dial.Op == "dial" {
		return &driver.Error{Class: driver.ErrNotExecuted, Cause: err}
	}
	if errors.Is(err, rueidis.ErrNoSlot) || errors.Is(err, rueidis.ErrNoAddr) {
		return &driver.Error{Class: driver.ErrNotExecuted, Cause: err}
	}
	// Nil is among these: the script ran and returned nil, which breaks its contract.
	return &driver.Error{Class: driver.ErrUnknown, Cause: err}
}

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
