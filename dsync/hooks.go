package dsync

import (
	"log/slog"
	"sync"
	"time"

	"github.com/e51fe0e6/dsync/internal/claim"
	"github.com/e51fe0e6/dsync/internal/keys"
	"github.com/e51fe0e6/dsync/internal/session"
)

// Hooks are functions that are told what happens. Any may be nil. They are called one after another for each kind, on a
// goroutine of their own: a hook that blocks delays only later calls of itself, of which the last thousand are kept, and one that
// panics is logged. The lock never waits for them.
type Hooks struct {
	Acquired      func(AcquiredInfo)
	Released      func(ReleasedInfo)
	Lost          func(LostInfo)
	RenewalFailed func(RenewalFailedInfo)
}

// Via says how a lock was granted.
type Via string

// Ways of a grant.
const (
	ViaReply   Via = "reply"   // it was free when it was asked for
	ViaMessage Via = "message" // its holder handed it over, and the message arrived
	ViaRecheck Via = "recheck" // a repeated question found the grant
	ViaLocal   Via = "local"   // it passed, or was kept, inside this process
)

// AcquiredInfo tells of a lock that was acquired.
type AcquiredInfo struct {
	Kind, Name string
	Fence      int64
	Wait       time.Duration // since the call
	Via        Via
}

// ReleasedInfo tells of a release that is over. Err is nil, or matches [ErrLost] or [ErrUnconfirmed].
type ReleasedInfo struct {
	Kind, Name string
	Fence      int64
	Held       time.Duration
	Err        error
}

// LostInfo tells of a hold that was lost while it was in use.
type LostInfo struct {
	Kind, Name string
	Fence      int64
	Held       time.Duration
	Reason     string // "expired", "denied by the server", "max hold", "closed"
	Err        error  // what kept the last renewal from succeeding, if that was it
}

// RenewalFailedInfo tells of one renewal that failed; it is tried again while the lease lasts.
type RenewalFailedInfo struct {
	Kind, Name string
	Err        error
}

const hookBacklog = 1000

// hookRunner calls the hooks of one kind in order.
type hookRunner struct {
	logger *slog.Logger

	mu      sync.Mutex // guards what follows; no hook is called under it
	backlog []func()
	running bool
}

func (r *hookRunner) run(call func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.backlog) >= hookBacklog {
		r.backlog = r.backlog[1:] // the newest tell more
	}
	r.backlog = append(r.backlog, call)
	if !r.running {
		r.running = true
		go r.drain() // ends when the backlog is empty
	}
}

func (r *hookRunner) drain() {
	emptied := false
	defer func() {
		if !emptied { // a hook ended this goroutine, with runtime.Goexit
			go r.drain() // as in run
		}
	}()
	for {
		r.mu.Lock()
		if len(r.backlog) == 0 {
			r.backlog, r.running, emptied = nil, false, true
			r.mu.Unlock()
			return
		}
		call := r.backlog[0]
		r.backlog = r.backlog[1:]
		r.mu.Unlock()
		r.guard(call)
	}
}

func (r *hookRunner) guard(call func()) {
	defer func() {
		if p := recover(); p != nil {
			r.logger.Error("dsync: a hook panicked", "panic", p)
		}
	}()
	call()
}

// observer turns a session's events into calls of the hooks.
func (c *Client) observer(h Hooks) func(session.Event) {
	if h.Acquired == nil && h.Released == nil && h.Lost == nil && h.RenewalFailed == nil {
		return nil
	}
	acquired, released := &hookRunner{logger: c.opts.logger}, &hookRunner{logger: c.opts.logger}
	lost, renewal := &hookRunner{logger: c.opts.logger}, &hookRunner{logger: c.opts.logger}
	return func(ev session.Event) {
		name, kind := keys.Split(c.opts.prefix, ev.Key)
		switch {
		case ev.Kind == session.Acquired && h.Acquired != nil:
			info := AcquiredInfo{Kind: kind, Name: name, Fence: ev.Hold.Fence(), Wait: ev.Wait, Via: viaOf(ev.Via)}
			acquired.run(func() { h.Acquired(info) })
		case ev.Kind == session.Released && h.Released != nil:
			info := ReleasedInfo{Kind: kind, Name: name, Fence: ev.Hold.Fence(), Held: ev.Held, Err: ev.Err}
			released.run(func() { h.Released(info) })
		case ev.Kind == session.WasLost && h.Lost != nil:
			info := LostInfo{Kind: kind, Name: name, Fence: ev.Hold.Fence(), Held: ev.Held, Reason: reasonOf(ev.Reason), Err: ev.Err}
			lost.run(func() { h.Lost(info) })
		case ev.Kind == session.RenewalFailed && h.RenewalFailed != nil:
			info := RenewalFailedInfo{Kind: kind, Name: name, Err: ev.Err}
			renewal.run(func() { h.RenewalFailed(info) })
		}
	}
}

func viaOf(v claim.Via) Via {
	switch v {
	case claim.ViaMessage:
		return ViaMessage
	case claim.ViaRecheck:
		return ViaRecheck
	case claim.ViaLocal:
		return ViaLocal
	default:
		return ViaReply
	}
}

func reasonOf(r claim.Reason) string {
	switch r {
	case claim.LostDenied:
		return "denied by the server"
	case claim.LostMaxHold:
		return "max hold"
	case claim.LostClosed:
		return "closed"
	default:
		return "expired"
	}
}
