package session

import (
	"sync/atomic"
	"time"
)

// Clock is where a session gets time from. The simulation gives each of its processes one of its own, to pause, suspend and
// slow down one process among others.
type Clock interface {
	Now() time.Time
	// AfterFunc calls f in a goroutine of its own after d. stop reports whether it came in time.
	AfterFunc(d time.Duration, f func()) (stop func() bool)
}

// Simulated is a driver that brings a clock and dice of its own, which the session then uses instead of the real ones: that is how the
// simulation reaches into a client of the public package, which has no option for it. No driver outside this module can be one, since
// it could not name Clock.
type Simulated interface {
	Clock() Clock
	// Float64 is in [0, 1). It is for jitter only.
	Float64() float64
}

// SystemClock is the clock of package time.
type SystemClock struct{}

// Now is time.Now.
func (SystemClock) Now() time.Time { return time.Now() }

// AfterFunc is time.AfterFunc.
func (SystemClock) AfterFunc(d time.Duration, f func()) func() bool { return time.AfterFunc(d, f).Stop }

// leap is the least by which the wall clock must run ahead of the monotonic one to be believed.
const leap = time.Millisecond

// stopwatch counts time since its start for leases. The monotonic clock of Linux stands still while the machine is
// suspended and the wall clock does not; the wall clock may be set and the monotonic one may not. So whichever moved further since the
// last reading counts: too much ends a lease early, too little would keep one that Redis has given away.
type stopwatch struct {
	clock  Clock
	origin time.Time
	ahead  atomic.Int64 // by how much the wall clock was ahead of the monotonic one at the last look
	leaped atomic.Int64 // sum of its leaps forward
}

func newStopwatch(c Clock) *stopwatch { return &stopwatch{clock: c, origin: c.Now()} }

func (w *stopwatch) now() time.Duration {
	t := w.clock.Now()
	return w.read(t.Sub(w.origin), t.Round(0).Sub(w.origin.Round(0)))
}

// read takes what each clock says has passed since the origin.
func (w *stopwatch) read(mono, wall time.Duration) time.Duration {
	ahead := int64(wall - mono)
	for {
		was := w.ahead.Load()
		if ahead >= was && ahead-was < int64(leap) {
			break
		}
		if w.ahead.CompareAndSwap(was, ahead) {
			if ahead > was {
				w.leaped.Add(ahead - was)
			}
			break
		}
	}
	return mono + time.Duration(w.leaped.Load())
}
