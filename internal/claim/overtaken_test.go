package claim

import (
	"testing"
	"time"
)

// A repeated acquire is executed first and finds nothing; the one that it repeats is executed then, and its answer arrives first. The place is
// released all the same.
func TestGoneThatWasOvertakenForgetsNoPlace(t *testing.T) {
	t.Parallel()
	s := run(t)
	first := s.request("a", lease(10*time.Second)).sends(Acquire, "", "g1")
	second := s.next(time.Second).sends(Acquire, "", "g1")
	s.says(first, Answer{Status: Queued, Remaining: 9 * time.Second, Position: 1}).done()
	s.says(second, Answer{Status: Gone}).sends(Release, "g1", "g2")
}

// A refused renewal says nothing of the release that has not been sent yet.
func TestReleaseOutlivesARefusedRenewal(t *testing.T) {
	t.Parallel()
	s := run(t).holds("a")
	renewal := s.wait(renewAt(0, ttl)).sends(Renew, "g1", "")
	s.release("a").done()
	s.fails(renewal, Refused)
	s.done()
	cmd := s.next(firstBackOff).sends(Release, "g1", "")
	s.says(cmd, Answer{Status: Released}).confirms("a", OK).idle()
}
