// Package redistest gives tests real Redis servers and a network that misbehaves on demand.
//
// [Start] runs a redis-server of the test's own; [NewProxy] puts a TCP proxy in front of one, which loses, delays,
// holds back and cuts as told. Nothing here imports a Redis client: the adapters under test must
// not vouch for themselves.
//
// Faults take effect on what passes from then on. A test that needs something to be *under way* first waits
// for it with [WaitFor]: there is no sleep in here, and there should be none in its callers.
package redistest

import (
	"testing"
	"time"
)

// patience bounds every wait for something that should happen soon. It is long because a machine under load
// starts a process slowly, and costs nothing when all is well.
const patience = 15 * time.Second

// WaitFor polls cond until it is true, and fails the test if that takes too long. what ends the sentence
// "gave up waiting for". Like every method that may fail the test, it belongs on the test's goroutine.
func WaitFor(tb testing.TB, what string, cond func() bool) {
	tb.Helper()
	if !poll(patience, cond) {
		tb.Fatalf("gave up waiting for %s after %v", what, patience)
	}
}

// poll reports whether cond became true within limit.
func poll(limit time.Duration, cond func() bool) bool {
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(limit); !cond(); <-tick.C {
		if time.Now().After(deadline) {
			return false
		}
	}
	return true
}
