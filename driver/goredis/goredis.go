// Package goredis adapts github.com/redis/go-redis/v9 to dsync.
//
// The client is the caller's: it is configured, observed and closed by whoever made it. Settings that matter:
//
//   - ReadTimeout and WriteTimeout bound how long a silent server is waited for; 1 to 5 seconds is sensible.
//     If they are switched off (-1, -2), a command gives up after 30 seconds and its goroutine stays until
//     the connection breaks.
//   - DialTimeout and DialerRetries bound how long a call waits when the server is away (5 s, five times).
//   - MaxRetries is of no effect on scripts: they are marked as not to be retried, since a script whose
//     reply was lost has run. MaxRedirects is in effect, and needed.
//   - PoolSize: this package needs few connections (see below), each pub/sub session takes one more.
//   - Hooks and tracing see a lone command as a command and combined ones as a pipeline with the context values
//     of one of the callers, without its deadline.
//
// Calls that are ready together go out together: while a few pipelines are on their way, further
// calls gather and leave as one pipeline as soon as one returns. A lone call leaves at once. On
// a Cluster, calls gather for each node by itself, so that a dead node does not hold up the others.
//
// A [redis.Ring] is several independent servers and redirects nothing: every call on it fails with
// [driver.ErrPermanent].
package goredis

import (
	"context"
	"errors"
	"net"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/e51fe0e6/dsync/driver"
	"github.com/e51fe0e6/dsync/driver/internal/detach"
)

// errRing is why every call on a Ring fails.
var errRing = errors.New("goredis: a redis.Ring is not supported: its servers know nothing of each other")

// cluster is what a ClusterClient has and other clients have not; it also finds one inside a user's wrapper.
type cluster interface {
	MasterForKey(ctx context.Context, key string) (*redis.Client, error)
	ReloadState(ctx context.Context)
}

// adapter implements driver.Driver. It has no goroutine while nothing is in flight, so it needs no Close.
type adapter struct {
	client  redis.UniversalClient
	cluster cluster // nil unless client is a cluster's
	waiter  *detach.Waiter
	inline  bool // the client's own timeouts keep the promised bound, so a caller may run its command itself

	// slotsKnown says that the cluster's slot map has been loaded once; until then MasterForKey blocks.
	slotsKnown atomic.Bool
	lanes      sync.Map // address of a node (empty if there is no cluster) -> *lane
}

// New returns a driver over c, which may be a [redis.Client] of any kind (so also of Sentinel) or a [redis.ClusterClient].
// It panics if c is nil. It needs no closing; close c when no dsync client uses it any more.
func New(c redis.UniversalClient) driver.Driver {
	if v := reflect.ValueOf(c); !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil() {
		panic("goredis: New: the client is nil")
	}
	a := &adapter{client: c, waiter: detach.NewWaiter(detach.Bound), inline: bounded(c)}
	a.cluster, _ = c.(cluster)
	return a
}

// bounded reports whether the timeouts of c end every command within the minute that the contract of
// driver.Driver allows: waiting for a connection, dialing it, greeting the server, and the command itself.
func bounded(c redis.UniversalClient) bool {
	client, ok := c.(*redis.Client)
	if !ok {
		return false // a cluster goes through all that for each redirect
	}
	o := client.Options()
	if o.ReadTimeout <= 0 || o.WriteTimeout <= 0 || o.DialTimeout <= 0 || o.PoolTimeout <= 0 {
		return false
	}
	dials := time.Duration(o.DialerRetries) * (o.DialTimeout + max(o.DialerRetryTimeout, time.Second))
	return o.PoolTimeout+dials+2*(o.ReadTimeout+o.WriteTimeout) <= time.Minute
}

// Exec implements driver.Driver.
func (a *adapter) Exec(ctx context.Context, c driver.Cmd) (driver.Reply, error) {
	if err := a.check(ctx, c); err != nil {
		return driver.Reply{}, err
	}
	l := newCall(c)
	if a.cluster == nil || a.slotsKnown.Load() {
		// A goroutine for each call costs more than it seems: starting it wakes a second thread. A
		// lone caller that cannot be cancelled runs its command itself and saves that.
		a.submit(context.WithoutCancel(ctx), l, a.inline && ctx.Done() == nil)
	} else {
		go a.submit(context.WithoutCancel(ctx), l, true) // stopped by the client's timeouts
	}
	return l.await(ctx, a.waiter)
}

// ExecMulti implements driver.Driver. Its pipelines do not gather with other calls: a thousand renewals in
// front of somebody's lock would make it wait.
func (a *adapter) ExecMulti(ctx context.Context, cs []driver.Cmd) []driver.Result {
	results := make([]driver.Result, len(cs))
	calls := make([]*call, len(cs))
	for i, c := range cs {
		if err := a.check(ctx, c); err != nil {
			results[i].Err = err
			continue
		}
		calls[i] = newCall(c)
	}
	go a.execMulti(context.WithoutCancel(ctx), calls) // stopped by the client's timeouts
	for i, l := range calls {
		if l != nil {
			results[i].Reply, results[i].Err = l.await(ctx, a.waiter)
		}
	}
	return results
}

// execMulti runs the calls that are not nil in one pipeline for each node, so that a dead node holds up only its own.
func (a *adapter) execMulti(ctx context.Context, calls []*call) {
	groups := map[*lane][]*call{}
	for _, l := range calls {
		if l == nil {
			continue
		}
		to, err := a.lane(ctx, l)
		if err != nil {
			l.finish(driver.Reply{}, notSent(err))
			continue
		}
		groups[to] = append(groups[to], l)
	}
	for _, group := range groups {
		go a.run(ctx, group) // stopped by the client's timeouts
	}
}

// check returns why the command must not be sent, or nil.
func (a *adapter) check(ctx context.Context, c driver.Cmd) error {
	if _, ok := a.client.(*redis.Ring); ok {
		return &driver.Error{Class: driver.ErrPermanent, Cause: errRing}
	}
	if err := c.Validate(); err != nil {
		return err
	}
	return detach.Refuse(ctx)
}

// submit hands the call to the lane of its node.
func (a *adapter) submit(ctx context.Context, l *call, inline bool) {
	to, err := a.lane(ctx, l)
	if err != nil {
		l.finish(driver.Reply{}, notSent(err))
		return
	}
	to.submit(ctx, l, inline)
}

// lane returns where calls to the node of l gather. Entries are never removed: one is as small as the name of its node.
func (a *adapter) lane(ctx context.Context, l *call) (*lane, error) {
	addr := ""
	if a.cluster != nil {
		node, err := a.cluster.MasterForKey(ctx, l.keys[0])
		if err != nil {
			return nil, err
		}
		a.slotsKnown.Store(true)
		addr = node.Options().Addr
	}
	if to, ok := a.lanes.Load(addr); ok {
		return to.(*lane), nil //nolint:forcetypeassert // only *lane is stored
	}
	to, _ := a.lanes.LoadOrStore(addr, &lane{run: a.run})
	return to.(*lane), nil //nolint:forcetypeassert // only *lane is stored
}

// run executes the calls and finishes each. Those whose script the server does not know are sent again: first with
// the source once for each script, since that lets the rest of the same pipeline find it, then, for a
// cluster that has led them to other nodes in between, with the source for each.
func (a *adapter) run(ctx context.Context, calls []*call) {
	for _, source := range []func(*driver.Script) bool{never, firstOnly(), always} {
		a.send(ctx, calls, source)
		var unknown []*call
		for _, l := range calls {
			if l.noScript() {
				unknown = append(unknown, l)
			} else {
				l.finish(l.result())
			}
		}
		if calls = unknown; len(calls) == 0 {
			return
		}
	}
	for _, l := range calls {
		l.finish(l.result())
	}
}

// send runs the calls in one write. What came of each is in its cmd.
func (a *adapter) send(ctx context.Context, calls []*call, source func(*driver.Script) bool) {
	if len(calls) == 1 {
		_ = a.client.Process(ctx, calls[0].prepare(ctx, source)) // kept in the command
		return
	}
	pipe := a.client.Pipeline()
	for _, l := range calls {
		_ = pipe.Process(ctx, l.prepare(ctx, source)) // queues only
	}
	_, _ = pipe.Exec(ctx) // kept in the commands
}

// classify gives an error of go-redis its class.
func classify(err error) error {
	var reply redis.Error
	var dial *net.OpError
	switch {
	case errors.Is(err, redis.Nil): // the script ran and returned nil, which breaks its contract
		return &driver.Error{Class: driver.ErrUnknown, Cause: err}
	case errors.As(err, &reply):
		return driver.Classify(reply.Error(), err)
	case errors.Is(err, redis.ErrClosed): // only a pool says this, before anything is written
		return &driver.Error{Class: driver.ErrPermanent, Cause: err}
	case errors.Is(err, redis.ErrPoolTimeout), errors.Is(err, redis.ErrPoolExhausted):
		return &driver.Error{Class: driver.ErrNotExecuted, Cause: err}
	case errors.As(err, &dial) && dial.Op == "dial":
		return &driver.Error{Class: driver.ErrNotExecuted, Cause: err}
	default:
		return &driver.Error{Class: driver.ErrUnknown, Cause: err}
	}
}

// notSent gives its class to an error that came before the command was written: never unknown.
func notSent(err error) error {
	if classified := classify(err); errors.Is(classified, driver.ErrPermanent) {
		return classified
	}
	return &driver.Error{Class: driver.ErrNotExecuted, Cause: err}
}
