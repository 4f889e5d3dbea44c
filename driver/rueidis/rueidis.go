// Package rueidis adapts github.com/redis/rueidis to dsync. Import it under another name beside the client library:
//
//	import dsyncrueidis "github.com/e51fe0e6/dsync/driver/rueidis"
//
// The client is the caller's: it is configured, observed and closed by whoever made it. Settings that matter:
//
//   - AlwaysPipelining: with it a lone caller pays a little latency; without it, a deadline of some other user of
//     the client can fail innocent commands on the same connection, dsync's among them (dsync itself never
//     passes a deadline on). dsync is right either way, since the error is one of unknown outcome.
//   - ConnWriteTimeout bounds how long a silent server is waited for: 10 seconds by default, 2 or 3 are better.
//   - Dialer.Timeout bounds a dial, 5 seconds by default. A command that must dial waits for it. Keep the sum of it and
//     twice ConnWriteTimeout below half a minute: it is what a call whose context cannot end may take.
//   - ForceSingleClient, DisableCache: needed for miniredis, which answers like a cluster and has no caching.
//   - DisableRetry and RetryDelay are of no effect on scripts: rueidis never sends a script again by itself.
//   - AlwaysRESP2 works; a session then takes two connections and its Ping proves only one of them alive.
//   - ClusterOption.MaxMovedRedirections is unlimited by default; here a call gives up after 30 seconds anyway.
package rueidis

import (
	"context"
	"errors"
	"reflect"
	"sync/atomic"
	"time"

	"github.com/redis/rueidis"

	"github.com/e51fe0e6/dsync/driver"
	"github.com/e51fe0e6/dsync/driver/internal/detach"
)

// adapter implements driver.Driver. It has no goroutine while nothing is in flight, so it needs no Close.
type adapter struct {
	client rueidis.Client
	waiter *detach.Waiter
	// closing says that a command has been told rueidis.ErrClosing: see open.
	closing atomic.Bool
}

// New returns a driver over c, for one server, Sentinel or a Cluster.
// It panics if c is nil. It needs no closing; close c when no dsync client uses it any more.
func New(c rueidis.Client) driver.Driver {
	if v := reflect.ValueOf(c); !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil() {
		panic("dsync/driver/rueidis: New: the client is nil")
	}
	return &adapter{client: c, waiter: detach.NewWaiter(detach.Bound)}
}

// Exec implements driver.Driver.
func (a *adapter) Exec(ctx context.Context, c driver.Cmd) (driver.Reply, error) {
	if ctx.Done() != nil {
		r := a.ExecMulti(ctx, []driver.Cmd{c})
		return r[0].Reply, r[0].Err
	}
	// A goroutine for each call costs more than it seems: starting it wakes a second thread. A caller that
	// cannot be cancelled runs its command itself and saves that.
	if err := refuse(ctx, c); err != nil {
		return driver.Reply{}, err
	}
	l := newCall(0, c)
	a.run(a.detached(ctx), []*call{l})
	return l.result.Reply, l.result.Err
}

// ExecMulti implements driver.Driver. If ctx ends while one node of a cluster is silent, the outcome of all is unknown.
func (a *adapter) ExecMulti(ctx context.Context, cs []driver.Cmd) []driver.Result {
	results := make([]driver.Result, len(cs))
	calls := make([]*call, 0, len(cs))
	for i, c := range cs {
		if results[i].Err = refuse(ctx, c); results[i].Err == nil {
			calls = append(calls, newCall(i, c))
		}
	}
	done := make(chan struct{})
	go func() { // stopped by the client's timeouts
		a.run(a.detached(ctx), calls)
		close(done)
	}()
	err := a.waiter.Await(ctx, done)
	for _, l := range calls {
		if err != nil {
			results[l.index].Err = &driver.Error{Class: driver.ErrUnknown, Cause: err}
		} else {
			results[l.index] = l.result
		}
	}
	return results
}

// refuse returns why the command must not be sent, or nil.
func refuse(ctx context.Context, c driver.Cmd) error {
	if err := c.Validate(); err != nil {
		return err
	}
	return detach.Refuse(ctx)
}

// detached returns the context that a command sees: the values of ctx and neither its end nor its deadline. After
// the bound it makes rueidis send nothing more, which would otherwise follow a MOVED that leads in a circle for ever.
func (a *adapter) detached(ctx context.Context) context.Context {
	return detached{Context: context.WithoutCancel(ctx), until: time.Now().Add(a.waiter.Bound())}
}

// errTooLong ends what a detached context is asked to go on with.
var errTooLong = errors.New("gave up sending the command again")

// detached has no Deadline and no Done, which would make rueidis break a shared connection or start goroutines.
type detached struct {
	context.Context //nolint:containedctx // it is a context
	until           time.Time
}

// Err implements context.Context.
func (d detached) Err() error {
	if time.Now().After(d.until) {
		return errTooLong
	}
	return nil
}
