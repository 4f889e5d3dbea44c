package session

import (
	"container/heap"
	"sync"
	"time"
)

// longestSleep bounds how late the end of a suspension is noticed: a timer counts the monotonic clock only.
const longestSleep = time.Second

// timers wakes entries at the times that their claims want. One runtime timer serves all of them. It is moved only when
// something is due earlier, so a lock that is taken and released in a loop does not touch it.
type timers struct {
	s *Session

	mu      sync.Mutex // guards what follows; taken under an entry's lock, and nothing is called under it but the clock
	heap    alarms
	stop    func() bool // of the armed timer; nil if none is armed
	armedAt time.Duration
	armed   int // which arming this is; a timer that was moved may fire all the same
	closed  bool
}

// set has e woken at the given time, or not at all.
func (t *timers) set(e *entry, now, at time.Duration, on bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return
	}
	switch {
	case !on && e.alarm >= 0:
		heap.Remove(&t.heap, e.alarm)
	case on && e.alarm >= 0:
		e.alarmAt = at
		heap.Fix(&t.heap, e.alarm)
	case on:
		e.alarmAt = at
		heap.Push(&t.heap, e)
	}
	t.armLocked(now)
}

func (t *timers) armLocked(now time.Duration) {
	if len(t.heap) == 0 || t.closed {
		return // an armed timer finds nothing, and is not armed again
	}
	at := min(t.heap[0].alarmAt, now+longestSleep)
	if t.stop != nil {
		if at >= t.armedAt {
			return
		}
		t.stop()
	}
	t.armed++
	which := t.armed
	t.armedAt = at
	t.stop = t.s.cfg.Clock.AfterFunc(max(0, at-now), func() { t.fire(which) })
}

// fire runs what is due. What falls due together is sent together.
func (t *timers) fire(which int) {
	now := t.s.watch.now()
	t.mu.Lock()
	if which == t.armed {
		t.stop = nil
	}
	var due []*entry
	for len(t.heap) > 0 && t.heap[0].alarmAt <= now && !t.closed {
		due = append(due, heap.Pop(&t.heap).(*entry)) //nolint:forcetypeassert // the heap holds nothing else
	}
	t.armLocked(now)
	t.mu.Unlock()
	t.s.all(due, (*entry).tick)
}

func (t *timers) close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.closed = true
	t.heap = nil
	if t.stop != nil {
		t.stop()
	}
}

// alarms is a heap of entries by alarmAt.
type alarms []*entry

func (a *alarms) Len() int           { return len(*a) }
func (a *alarms) Less(i, j int) bool { return (*a)[i].alarmAt < (*a)[j].alarmAt }
func (a *alarms) Swap(i, j int) {
	h := *a
	h[i], h[j] = h[j], h[i]
	h[i].alarm, h[j].alarm = i, j
}

// Push is for package heap.
func (a *alarms) Push(x any) {
	e := x.(*entry) //nolint:forcetypeassert // the heap holds nothing else
	e.alarm = len(*a)
	*a = append(*a, e)
}

// Pop is for package heap.
func (a *alarms) Pop() any {
	last := len(*a) - 1
	e := (*a)[last]
	(*a)[last] = nil
	*a = (*a)[:last]
	e.alarm = -1
	return e
}
