package goredis

import (
	"context"
	"slices"
	"sync"
	"time"
)

const (
	// maxInFlight is how many pipelines of a lane are on their way before calls gather. One would leave the
	// connection idle while replies are handed out; with more the pipelines get short.
	maxInFlight = 2
	// stallAfter is when a pipeline no longer counts as being on its way, so that one dead connection or one
	// slow script does not hold up calls that another connection could serve.
	stallAfter = 50 * time.Millisecond
)

// lane combines calls to one node: few pipelines are in flight, and what arrives meanwhile leaves together.
type lane struct {
	run func(ctx context.Context, calls []*call) // executes and finishes the calls

	mu       sync.Mutex  // protects what follows; nothing blocks while it is held
	waiting  []*call     // not empty only while maxInFlight turns are taken
	inFlight []*turn     // the turns taken, without those that have stalled
	stall    *time.Timer // set if and only if calls wait: a lone caller pays for no timer
	watch    int         // tells the timer that is set from those before it
}

// turn is the right to have one pipeline in flight.
type turn struct{ began time.Time }

// submit has the call executed, at once if there is a turn to take: by the caller itself if inline, else by a goroutine.
func (ln *lane) submit(ctx context.Context, l *call, inline bool) {
	ln.mu.Lock()
	if len(ln.inFlight) >= maxInFlight {
		ln.waiting = append(ln.waiting, l)
		if ln.stall == nil {
			ln.watchLocked(ctx)
		}
		ln.mu.Unlock()
		return
	}
	t := ln.takeTurnLocked()
	ln.mu.Unlock()
	if !inline {
		go ln.serve(ctx, t, []*call{l}) // ends when no call waits; each pipeline is bounded by the client's timeouts
		return
	}
	ln.run(ctx, []*call{l})
	if calls := ln.next(t); len(calls) > 0 {
		go ln.serve(ctx, t, calls) // likewise; this caller is done and must not work for others
	}
}

func (ln *lane) takeTurnLocked() *turn {
	t := &turn{began: time.Now()}
	ln.inFlight = append(ln.inFlight, t)
	return t
}

// serve executes the calls and then what has gathered meanwhile, until nothing has or the turn was taken away.
// ctx lends its values (tracing) to all of them.
func (ln *lane) serve(ctx context.Context, t *turn, calls []*call) {
	for len(calls) > 0 {
		ln.run(ctx, calls)
		calls = ln.next(t)
	}
}

// watchLocked has the waiting calls relieved if they still wait in a while.
func (ln *lane) watchLocked(ctx context.Context) {
	ln.watch++
	watch := ln.watch
	ln.stall = time.AfterFunc(stallAfter, func() { ln.relieve(ctx, watch) })
}

// next returns the calls that have gathered, or gives the turn back if there are none.
func (ln *lane) next(t *turn) []*call {
	ln.mu.Lock()
	defer ln.mu.Unlock()
	i := slices.Index(ln.inFlight, t)
	if i < 0 {
		return nil // stalled
	}
	if len(ln.waiting) == 0 {
		ln.inFlight = slices.Delete(ln.inFlight, i, i+1)
		return nil
	}
	t.began = time.Now()
	return ln.takeLocked()
}

func (ln *lane) takeLocked() []*call {
	calls := ln.waiting
	ln.waiting = nil
	ln.stall.Stop()
	ln.stall = nil
	ln.watch++ // in case the timer has fired already
	return calls
}

// relieve takes the turns away from pipelines that have stalled, for the calls that wait.
func (ln *lane) relieve(ctx context.Context, watch int) {
	ln.mu.Lock()
	defer ln.mu.Unlock()
	if ln.watch != watch {
		return
	}
	now := time.Now()
	ln.inFlight = slices.DeleteFunc(ln.inFlight, func(t *turn) bool { return now.Sub(t.began) >= stallAfter })
	if len(ln.inFlight) < maxInFlight {
		go ln.serve(ctx, ln.takeTurnLocked(), ln.takeLocked()) // as in submit
		return
	}
	ln.watchLocked(ctx)
}
