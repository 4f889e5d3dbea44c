package sim

import (
	"math"
	"sync"
	"time"
)

// Clock is the clock of one process: it goes at a rate of its own, and it can be paused, which pauses the process. It implements
// session.Clock.
//
// A paused process does nothing: its timers do not fire, and neither replies nor messages reach it. It is not told of the pause. Time
// goes on meanwhile, as it does for a process that the kernel does not schedule.
type Clock struct {
	origin time.Time
	rate   float64

	mu      sync.Mutex    // guards what follows
	resume  chan struct{} // closed by Resume; nil while the process runs
	resumed time.Time
}

func newClock(rate float64) *Clock { return &Clock{origin: time.Now(), rate: rate} }

// Now implements session.Clock.
func (c *Clock) Now() time.Time {
	now := time.Now()
	if c.rate == 1 {
		return now
	}
	return c.origin.Add(time.Duration(float64(now.Sub(c.origin)) * c.rate))
}

// AfterFunc implements session.Clock.
func (c *Clock) AfterFunc(d time.Duration, f func()) (stop func() bool) {
	timer := time.AfterFunc(c.real(d), func() {
		c.Gate()
		f()
	})
	return timer.Stop
}

// real returns how long d by this clock takes.
func (c *Clock) real(d time.Duration) time.Duration {
	if c.rate == 1 {
		return d
	}
	return time.Duration(math.Ceil(float64(d)/c.rate)) + 1
}

// Gate returns when the process runs. Whatever a process does must come after it.
func (c *Clock) Gate() {
	for {
		c.mu.Lock()
		resume := c.resume
		c.mu.Unlock()
		if resume == nil {
			return
		}
		<-resume
	}
}

// pause stops the process, and reports whether it ran.
func (c *Clock) pause() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.resume != nil {
		return false
	}
	c.resume = make(chan struct{})
	return true
}

// unpause lets it run again.
func (c *Clock) unpause() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.resume != nil {
		close(c.resume)
		c.resume, c.resumed = nil, time.Now()
	}
}

// resumedAt returns when the last pause ended.
func (c *Clock) resumedAt() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.resumed
}
