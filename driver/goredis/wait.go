package goredis

import (
	"context"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/e51fe0e6/dsync/driver"
	"github.com/e51fe0e6/dsync/driver/internal/detach"
)

const (
	// waitMargin is what WAIT's own timeout is kept below the client's ReadTimeout, or the reply would come too late.
	waitMargin = time.Second
	// waitAttempts is how often ExecWait sends at most: each time but the last it was told that nothing ran.
	waitAttempts = 6
	// reloadPause is how long a changed slot map is given to arrive after MOVED: a node's own pipeline does not follow it.
	reloadPause = 50 * time.Millisecond
)

// ExecWait implements driver.Driver. On a Cluster it follows MOVED; a slot that is being migrated right now (ASK)
// makes it fail with driver.ErrNotExecuted.
func (a *adapter) ExecWait(
	ctx context.Context, c driver.Cmd, replicas int, timeout time.Duration,
) (driver.Reply, int, error) {
	if err := a.check(ctx, c); err != nil {
		return driver.Reply{}, 0, err
	}
	timeout = max(timeout, time.Millisecond) // WAIT takes 0 for "forever"
	l, acked, done := newCall(c), 0, make(chan struct{})
	go func() { // stopped by the client's timeouts
		acked = a.wait(context.WithoutCancel(ctx), l, replicas, timeout)
		close(done)
	}()
	if err := detach.Await(ctx, done, a.waiter.Bound()+timeout); err != nil {
		return driver.Reply{}, 0, &driver.Error{Class: driver.ErrUnknown, Cause: err}
	}
	return l.reply, acked, l.err
}

// wait runs l and WAIT on one connection, again with the source if the server does not know the script: WAIT has been
// answered then too, but speaks of no write. It sets the outcome of l without finishing it.
func (a *adapter) wait(ctx context.Context, l *call, replicas int, timeout time.Duration) (acked int) {
	source := never
	for range waitAttempts {
		node, err := a.node(ctx, l.keys[0], timeout)
		if err != nil {
			l.err = notSent(err)
			return 0
		}
		pipe := node.Pipeline()
		_ = pipe.Process(ctx, l.prepare(ctx, source)) // queues only
		wait := pipe.Do(ctx, "wait", replicas, timeout.Milliseconds())
		_, _ = pipe.Exec(ctx) // kept in the commands
		switch {
		case l.noScript():
			source = always
			continue
		case a.cluster != nil && redis.HasErrorPrefix(l.cmd.Err(), "MOVED"):
			a.cluster.ReloadState(ctx)
			<-time.After(reloadPause)
			continue
		}
		if l.reply, l.err = l.result(); l.err != nil {
			return 0
		}
		if acked, err = wait.Int(); err != nil {
			// The script ran, so this is not WAIT's own class: a refused WAIT does not mean that nothing happened.
			l.err = &driver.Error{Class: driver.ErrUnknown, Cause: err}
		}
		return acked
	}
	l.reply, l.err = l.result()
	return 0
}

// node returns the client whose pipelines stay on one connection of the server that owns key, and waits for WAIT: a
// cluster's own pipeline would send WAIT to any node, which answers with a number that means nothing.
func (a *adapter) node(ctx context.Context, key string, timeout time.Duration) (redis.UniversalClient, error) {
	client := a.client
	if a.cluster != nil {
		node, err := a.cluster.MasterForKey(ctx, key)
		if err != nil {
			return nil, err
		}
		a.slotsKnown.Store(true)
		client = node
	}
	if node, ok := client.(*redis.Client); ok {
		if read := node.Options().ReadTimeout; read > 0 && read < timeout+waitMargin {
			return node.WithTimeout(timeout + max(read, waitMargin)), nil // shares the connections
		}
	}
	return client, nil
}
