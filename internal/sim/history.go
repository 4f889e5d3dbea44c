package sim

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/e51fe0e6/dsync/dsync"
)

// History is what the users of locks saw: who asked when, who was told what when. Nothing in it comes from inside the library.
type History struct {
	w *World

	mu     sync.Mutex // guards what follows
	calls  []*Call
	losses []loss      // of data on the server
	steps  []time.Time // of its clock
}

// Call is one call of Lock, TryLock, Do or TryDo.
type Call struct {
	Name   string
	Try    bool
	p      *Process
	who    string
	called time.Time
	done   time.Time // zero: it has not returned
	err    error
	hold   *Hold // what it was granted
}

// Hold is the use of a lock, from the return of Lock to the call of Unlock.
type Hold struct {
	*Call
	fence     int64
	from      time.Time // Lock returned
	to        time.Time // when the user stopped to believe that it holds; zero: not yet
	lost      time.Time // Lost was closed
	unlocked  time.Time // Unlock was called
	limited   bool      // it may be lost without any fault: no renewal, or a limit to the hold
	bound     time.Time // what was certain when the process was paused last
	remaining func() time.Duration
	over      chan struct{} // closed by unlock
}

type loss struct {
	name string // empty: all
	at   time.Time
}

func (h *History) call(p *Process, name, who string, try bool) *Call {
	h.mu.Lock()
	defer h.mu.Unlock()
	c := &Call{Name: name, Try: try, p: p, who: who, called: time.Now()}
	h.calls = append(h.calls, c)
	h.w.logf(name, "%s: %s asks for %s, try %v", p.Name, who, name, try)
	return c
}

// refused takes the return of a call without a hold.
func (h *History) refused(c *Call, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	c.done, c.err = time.Now(), err
	h.w.logf(c.Name, "%s: %s is refused %s: %v", c.p.Name, c.who, c.Name, oneLine(err))
}

// granted takes the return of a call with a hold, and watches it until it is given back.
func (h *History) granted(c *Call, fence int64, lost <-chan struct{}, remaining func() time.Duration, limited bool) *Hold {
	left := remaining()
	h.mu.Lock()
	defer h.mu.Unlock()
	now := time.Now()
	c.done = now
	hold := &Hold{Call: c, fence: fence, from: now, remaining: remaining, limited: limited, over: make(chan struct{})}
	c.hold = hold
	h.w.logf(c.Name, "%s: %s holds %s, fence %d, %v left", c.p.Name, c.who, c.Name, fence, left)
	go func() { // ends with the hold
		select {
		case <-lost:
			h.mu.Lock()
			defer h.mu.Unlock()
			if hold.unlocked.IsZero() && !c.p.dead() {
				hold.lost = time.Now()
				hold.endLocked()
				h.w.logf(c.Name, "%s: %s has lost %s", c.p.Name, c.who, c.Name)
			}
		case <-hold.over:
		}
	}()
	return hold
}

// unlocks takes the moment before Unlock is called.
func (h *History) unlocks(hold *Hold) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if hold.unlocked.IsZero() {
		hold.unlocked = time.Now()
		hold.endLocked()
		close(hold.over)
		h.w.logf(hold.Name, "%s: %s unlocks %s", hold.p.Name, hold.who, hold.Name)
	}
}

// endLocked ends the belief of the user. If the process has been paused until now, it could have known nothing beyond what was certain before.
func (hold *Hold) endLocked() {
	now := time.Now()
	if !hold.to.IsZero() {
		return
	}
	hold.to = now
	resumed := hold.p.Clock.resumedAt()
	if !hold.bound.IsZero() && hold.bound.Before(now) && !now.After(resumed) {
		hold.to = later(hold.bound, hold.from)
	}
}

// unlocked takes what Unlock returned.
func (h *History) unlocked(hold *Hold, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.w.logf(hold.Name, "%s: %s has unlocked %s: %v", hold.p.Name, hold.who, hold.Name, oneLine(err))
	if err == nil && !hold.lost.IsZero() {
		h.w.Errorf(hold.Name, hold.unlocked, "%s of %s: Unlock of %s said nil after Lost was closed", hold.who, hold.p.Name, hold.Name)
	}
	if errors.Is(err, dsync.ErrLost) && hold.lost.IsZero() {
		hold.lost = time.Now()
	}
}

// paused notes what the users of a process are certain of at this moment.
func (h *History) paused(p *Process) {
	for _, hold := range h.open(p) {
		left := p.Clock.real(hold.remaining())
		h.mu.Lock()
		hold.bound = time.Now().Add(left)
		h.mu.Unlock()
	}
}

// crashed ends the holds of a process.
func (h *History) crashed(p *Process) {
	for _, hold := range h.open(p) {
		h.mu.Lock()
		hold.to = time.Now()
		if !hold.bound.IsZero() && hold.bound.Before(hold.to) {
			hold.to = later(hold.bound, hold.from) // it was paused: what it knew had ended before
		}
		h.mu.Unlock()
	}
}

// open returns the holds of a process that its users believe in.
func (h *History) open(p *Process) []*Hold {
	h.mu.Lock()
	defer h.mu.Unlock()
	var open []*Hold
	for _, c := range h.calls {
		if c.p == p && c.hold != nil && c.hold.to.IsZero() {
			open = append(open, c.hold)
		}
	}
	return open
}

// lose notes that the server lost what it knew of a name, or of all.
func (h *History) lose(name string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.losses = append(h.losses, loss{name, time.Now()})
}

// stepped notes that the server's clock was set.
func (h *History) stepped() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.steps = append(h.steps, time.Now())
}

// excused reports whether the server forgot the first of two holds before it granted the second. A fence is at least the
// server's time in microseconds at the grant, and at most a little more.
func (h *History) excused(first, second *Hold) bool {
	for _, l := range h.losses {
		at := l.at.UnixMicro()
		if (l.name == "" || l.name == first.Name) && first.fence <= at && second.fence >= at {
			return true
		}
	}
	// Or its clock was set between the two, before the first was over. Their grants may have been on the way.
	const travel = 10 * time.Second
	for _, at := range h.steps {
		if first.from.Before(at.Add(travel)) && second.from.After(at) && first.to.After(at) {
			return true
		}
	}
	return false
}

// holds returns the holds of each name in the order of their fences.
func (h *History) holds() map[string][]*Hold {
	byName := map[string][]*Hold{}
	for _, c := range h.calls {
		if c.hold != nil {
			byName[c.Name] = append(byName[c.Name], c.hold)
		}
	}
	for _, holds := range byName {
		slices.SortFunc(holds, func(a, b *Hold) int {
			return cmp.Or(cmp.Compare(a.fence, b.fence), a.from.Compare(b.from))
		})
	}
	return byName
}

// stamp is a moment as the trace shows it.
func (h *History) stamp(t time.Time) string {
	return fmt.Sprintf("%.6f", t.Sub(h.w.began).Seconds())
}

func (h *History) String(hold *Hold) string {
	return fmt.Sprintf("%s of %s held %s with fence %d from %s to %s", hold.who, hold.p.Name, hold.Name, hold.fence, h.stamp(hold.from), h.stamp(hold.to))
}

// CheckExclusion checks that no two users ever believed to hold a name at once, and that fences are in the order of the holds.
func (h *History) CheckExclusion() {
	h.mu.Lock()
	defer h.mu.Unlock()
	now := time.Now()
	for _, holds := range h.holds() {
		for i, second := range holds {
			if second.to.IsZero() {
				second.to = now
			}
			for _, first := range holds[:i] {
				switch {
				case first.fence == second.fence:
					h.w.Errorf(second.Name, second.from, "one fence twice: %s; %s", h.String(first), h.String(second))
				case first.from.Equal(first.to) || second.from.Equal(second.to):
					// It was lost before the user had it in hand.
				case first.to.After(second.from) && !h.excused(first, second):
					h.w.Errorf(second.Name, second.from, "two hold at once, or out of order: %s; %s", h.String(first), h.String(second))
				}
			}
		}
	}
}

// CheckLocal checks that the goroutines of one process never overlap, even after a loss.
func (h *History) CheckLocal() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, holds := range h.holds() {
		for i, a := range holds {
			for _, b := range holds[:i] {
				if a.p == b.p && !b.unlocked.IsZero() && !a.unlocked.IsZero() && a.from.Before(b.unlocked) && b.from.Before(a.unlocked) {
					h.w.Errorf(a.Name, a.from, "two goroutines of a process at once: %s until unlocked at %s; %s until unlocked at %s",
						h.String(b), h.stamp(b.unlocked), h.String(a), h.stamp(a.unlocked))
				}
			}
		}
	}
}

// CheckKept checks that no hold was lost that nothing limits. Only for histories without faults that may cost a lease.
func (h *History) CheckKept() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, holds := range h.holds() {
		for _, hold := range holds {
			if !hold.lost.IsZero() && !hold.limited {
				h.w.Errorf(hold.Name, hold.lost, "lost without a reason at %s: %s", h.stamp(hold.lost), h.String(hold))
			}
		}
	}
}

// CheckGaps checks that from a moment on no name was free for longer than limit while somebody waited for it.
func (h *History) CheckGaps(since time.Time, limit time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	type edge struct {
		at          time.Time
		held, waits int
	}
	now := time.Now()
	byName := map[string][]edge{}
	add := func(name string, from, to time.Time, held, waits int) {
		if to.IsZero() {
			to = now
		}
		byName[name] = append(byName[name], edge{from, held, waits}, edge{to, -held, -waits})
	}
	for _, c := range h.calls {
		if hold := c.hold; hold != nil {
			end := hold.unlocked
			if end.IsZero() {
				end = hold.to
			}
			add(c.Name, hold.from, end, 1, 0)
		}
		if !c.p.dead() && !c.Try {
			add(c.Name, c.called, c.done, 0, 1)
		}
	}
	for name, edges := range byName {
		slices.SortStableFunc(edges, func(a, b edge) int { return a.at.Compare(b.at) })
		held, waits := 0, 0
		var free time.Time // since when it is free and waited for
		for i, e := range edges {
			held += e.held
			waits += e.waits
			if i+1 < len(edges) && edges[i+1].at.Equal(e.at) {
				continue
			}
			idle := held == 0 && waits > 0
			switch {
			case idle && free.IsZero():
				free = later(e.at, since)
			case !idle && !free.IsZero():
				if e.at.Sub(free) > limit {
					h.w.Errorf(name, e.at, "%s was free from %s to %s, and waited for", name, h.stamp(free), h.stamp(e.at))
				}
				free = time.Time{}
			}
		}
	}
}

// CheckOrder checks that processes were served in the order in which they came to wait, and goroutines of a process in
// the order of their calls. Arrivals closer together than slack may have met on the way. Only for histories without faults and slice 0.
func (h *History) CheckOrder(slack time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	type place struct {
		*Call
		since time.Time // when its process came to ask for it
	}
	places := map[string][]place{}
	type queue struct {
		name string
		p    *Process
	}
	last := map[queue]*Call{} // the last that was served
	type turn struct{ since, left time.Time }
	ahead := map[queue]turn{} // the last of those before
	calls := slices.Clone(h.calls)
	slices.SortStableFunc(calls, func(a, b *Call) int { return a.called.Compare(b.called) })
	for _, c := range calls {
		q := queue{c.Name, c.p}
		if c.Try && c.hold == nil {
			continue
		}
		if prev := last[q]; prev != nil && c.hold != nil && c.hold.from.Before(prev.hold.from) {
			h.w.Errorf(c.Name, c.hold.from, "%s of %s overtook %s on %s at %s", c.who, c.p.Name, prev.who, c.Name, h.stamp(c.hold.from))
		}
		// Who was called while another of the process waited has that one's place if it gave up, and a new one when it was served.
		t := turn{since: c.called, left: c.done}
		if before := ahead[q]; before.left.After(c.called) {
			t.since = before.since
		}
		if c.hold != nil {
			last[q] = c
			places[c.Name] = append(places[c.Name], place{c, t.since})
			if t.left = c.hold.unlocked; t.left.IsZero() {
				t.left = time.Now()
			}
			t.since = t.left
		}
		if before := ahead[q]; before.left.After(t.left) {
			t = before
		}
		ahead[q] = t
	}
	for _, ps := range places {
		for _, a := range ps {
			for _, b := range ps {
				if a.p != b.p && a.since.Add(slack).Before(b.since) && a.hold.from.After(b.hold.from) {
					h.w.Errorf(a.Name, a.hold.from, "%s of %s waited for %s since %s and was served at %s, after %s of %s, which waited since %s and was served at %s",
						a.who, a.p.Name, a.Name, h.stamp(a.since), h.stamp(a.hold.from), b.who, b.p.Name, h.stamp(b.since), h.stamp(b.hold.from))
				}
			}
		}
	}
}

// Holds returns how many holds there were.
func (h *History) Holds() (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, c := range h.calls {
		if c.hold != nil {
			n++
		}
	}
	return n
}
