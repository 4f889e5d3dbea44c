package session

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestStopwatchCountsWhicheverClockMovedFurther(t *testing.T) {
	w := newStopwatch(SystemClock{})
	reading := w.read
	require.Equal(t, time.Duration(0), reading(0, 0))
	require.Equal(t, time.Second, reading(time.Second, time.Second))
	require.Equal(t, time.Second+time.Microsecond, reading(time.Second+time.Microsecond, time.Second+500*time.Microsecond), "noise is no leap")

	// Suspended for a minute: the monotonic clock stood still.
	require.Equal(t, time.Minute+2*time.Second, reading(2*time.Second, time.Minute+2*time.Second))
	require.Equal(t, time.Minute+3*time.Second, reading(3*time.Second, time.Minute+3*time.Second))

	// Set back by an hour: nothing is taken back, and nothing is added.
	require.Equal(t, time.Minute+4*time.Second, reading(4*time.Second, time.Minute+4*time.Second-time.Hour))

	// Suspended again, with the wall clock still behind: it counts all the same.
	require.Equal(t, 2*time.Minute+5*time.Second, reading(5*time.Second, 2*time.Minute+5*time.Second-time.Hour))
}

func TestStopwatchNeverGoesBack(t *testing.T) {
	w := newStopwatch(SystemClock{})
	last := w.now()
	for range 10_000 {
		now := w.now()
		require.GreaterOrEqual(t, now, last)
		last = now
	}
}
