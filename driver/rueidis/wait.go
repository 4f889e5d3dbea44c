package rueidis

import (
	"context"
	"time"

	"github.com/redis/rueidis"

	"github.com/e51fe0e6/dsync/driver"
	"github.com/e51fe0e6/dsync/driver/internal/detach"
)

const (
	// waitAttempts is how often ExecWait sends at most: each time but the last it was told that nothing ran.
	waitAttempts = 6
	// reloadPause is how long news of a node that MOVED named first are given to arrive.
	reloadPause = 50 * time.Millisecond
)

// ExecWait implements driver.Driver. On a Cluster it follows MOVED; a slot that is being migrated right now (ASK)
// makes it fail with driver.ErrNotExecuted.
func (a *adapter) ExecWait(
	ctx context.Context, c driver.Cmd, replicas int, timeout time.Duration,
) (driver.Reply, int, error) {
	if err := refuse(ctx, c); err != nil {
		return driver.Reply{}, 0, err
	}
	timeout = max(timeout, time.Millisecond) // WAIT takes 0 for "forever"
	l, acked := newCall(0, c), 0
	done := make(chan struct{})
	go func() { // stopped by the watchdog in wait at the latest
		acked = a.wait(a.detached(ctx), l, replicas, timeout)
		close(done)
	}()
	if err := detach.Await(ctx, done, a.waiter.Bound()+timeout); err != nil {
		return driver.Reply{}, 0, &driver.Error{Class: driver.ErrUnknown, Cause: err}
	}
	return l.result.Reply, acked, l.result.Err
}

// wait runs l and WAIT on one connection, again with the source if the server does not know the script: WAIT has been
// answered then too, but speaks of no write.
//
// The connection is a dedicated one: the plain client of a cluster follows MOVED with the script alone, and WAIT
// would come back from the old node with a number that means nothing.
func (a *adapter) wait(ctx context.Context, l *call, replicas int, timeout time.Duration) (acked int) {
	if l.result.Err = a.closed(ctx); l.result.Err != nil {
		return 0
	}
	node, source := a.client, false
	for range waitAttempts {
		rs := a.waitOnce(ctx, node, l.build(a.client.B(), source), replicas, timeout)
		l.result = a.result(rs[0])
		if reply, ok := rueidis.IsRedisErr(rs[0].Error()); ok {
			if reply.IsNoScript() {
				source = true
				continue
			}
			if addr, moved := reply.IsMoved(); moved {
				if other, known := a.client.Nodes()[addr]; known {
					node = other
				} else {
					<-time.After(reloadPause) // rueidis has begun to ask who is in the cluster
				}
				continue
			}
		}
		if l.result.Err != nil {
			return 0
		}
		n, err := rs[1].AsInt64()
		if err != nil {
			// The script ran, so this is not WAIT's own class: a refused WAIT does not mean that nothing happened.
			l.result.Err = &driver.Error{Class: driver.ErrUnknown, Cause: err}
			return 0
		}
		return int(n)
	}
	return 0
}

// waitOnce sends the command and WAIT in one write. rueidis knows WAIT as blocking and reads without a deadline, so that
// only the watchdog gets the connection back from a silent server.
func (a *adapter) waitOnce(
	ctx context.Context, node rueidis.Client, cmd rueidis.Completed, replicas int, timeout time.Duration,
) []rueidis.RedisResult {
	conn, release := node.Dedicate()
	defer release()
	watchdog := time.AfterFunc(a.waiter.Bound()+timeout, conn.Close)
	defer watchdog.Stop()
	return conn.DoMulti(ctx, cmd, conn.B().Wait().Numreplicas(int64(replicas)).Timeout(timeout.Milliseconds()).Build())
}
