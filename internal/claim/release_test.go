package claim

import (
	"errors"
	"slices"
	"testing"
	"time"
)

var (
	notYours = Answer{Status: NotYours}
	released = Answer{Status: Released}
)

// outcomes is what Unlock returns, as DESIGN section 2 has it. Each case finds "a" holding, releases it, and sees what comes of it.
var outcomes = []struct {
	name string
	want Outcome
	run  func(s *script)
}{
	{"confirmed", OK, func(s *script) {
		s.says(s.release("a").sends(Release, "g1", ""), released)
	}},
	{"confirmed-late", OK, func(s *script) {
		cmd := s.release("a").sends(Release, "g1", "")
		s.wait(time.Second).sends(Release, "g1", "")
		s.reply(cmd, Reply{End: released})
	}},
	{"first-answer-is-not-yours", Lost, func(s *script) {
		s.says(s.release("a").sends(Release, "g1", ""), notYours)
	}},
	{"first-answer-says-it-was-only-waiting", Lost, func(s *script) {
		s.says(s.release("a").sends(Release, "g1", ""), Answer{Status: Withdrawn})
	}},
	{"first-answer-is-not-yours-and-late", Lost, func(s *script) {
		cmd := s.release("a").sends(Release, "g1", "")
		s.wait(time.Second).sends(Release, "g1", "")
		s.reply(cmd, Reply{End: notYours})
	}},
	{"not-yours-to-a-repeated-one", OK, func(s *script) {
		s.release("a").sends(Release, "g1", "")
		s.says(s.wait(time.Second).sends(Release, "g1", ""), notYours)
	}},
	{"not-yours-after-one-that-never-ran", Lost, func(s *script) {
		s.fails(s.release("a").sends(Release, "g1", ""), NotExecuted)
		s.says(s.next(firstBackOff).sends(Release, "g1", ""), notYours)
	}},
	{"not-yours-to-a-repeated-one-that-was-first-sent-too-late", Lost, func(s *script) {
		cmd := s.late(ttl-time.Second).wait(0).sends(Renew, "g1", "")
		s.release("a").done() // behind the renewal
		s.wait(CommandTimeout(ttl)).sends(Release, "g1", "")
		s.fails(cmd, Unknown)
		s.wait(time.Second).done()
		s.says(s.next(2*firstBackOff).sends(Release, "g1", ""), notYours)
	}},
	{"refused", Unconfirmed, func(s *script) {
		s.fails(s.release("a").sends(Release, "g1", ""), Refused)
	}},
	{"denied", Unconfirmed, func(s *script) {
		s.fails(s.release("a").sends(Release, "g1", ""), Denied)
	}},
	{"never-confirmed", Unconfirmed, func(s *script) {
		s.fails(s.release("a").sends(Release, "g1", ""), NotExecuted)
		for s.now < s.c.ends[0].overAt-time.Second {
			s.fails(s.wait(time.Second).sends(Release, "g1", ""), NotExecuted)
		}
		s.wait(time.Second)
	}},
	{"validity-had-ended", Lost, func(s *script) {
		s.late(ttl).release("a").loses("a", LostExpired)
	}},
}

func TestReleaseOutcome(t *testing.T) {
	t.Parallel()
	for _, c := range outcomes {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := run(t).holds("a")
			c.run(s)
			a := s.tells(Confirm, "a")
			if a.Outcome != c.want || (a.Err != nil) != (c.want == Unconfirmed) {
				t.Fatalf("got outcome %d, %v; want %d", a.Outcome, a.Err, c.want)
			}
			if c.want == Unconfirmed && !errors.Is(a.Err, errTest) {
				t.Errorf("the cause is %v", a.Err)
			}
		})
	}
}

func TestReleaseRefusedGoesOnInTheBackground(t *testing.T) {
	t.Parallel()
	for _, class := range []Class{Refused, Denied} {
		s := run(t).holds("a")
		s.fails(s.release("a").sends(Release, "g1", ""), class).confirms("a", Unconfirmed)
		cmd := s.next(firstBackOff).sends(Release, "g1", "")
		s.says(cmd, Answer{Status: Released}).idle()
	}
}

func TestReleaseUnfinishedIsRepeatedAtOnce(t *testing.T) {
	t.Parallel()
	s := run(t).holds("a")
	cmd := s.release("a").sends(Release, "g1", "")
	cmd = s.says(cmd, Answer{Status: Released, Unfinished: true}).confirms("a", OK).sends(Release, "g1", "")
	s.says(cmd, Answer{Status: NotYours}).idle()
}

func TestReleaseAsksAgainInTheSameCommand(t *testing.T) {
	t.Parallel()
	s := run(t).holds("a", fifo).request("b", fifo).hint("g1").done()
	cmd := s.release("a").sends(Release, "g1", "g2")
	if !cmd.Wait || cmd.Repeated || cmd.TTL != ttl {
		t.Fatalf("%+v", cmd)
	}
	s.says(cmd, s.queuedAt(1, ttl)).confirms("a", OK).done()
}

func TestReleaseIsGivenUpWhenTheLeaseIsOver(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		run  func(s *script)
		want time.Duration
	}{
		{"held", func(s *script) { s.holds("a").release("a").sends(Release, "g1", "") }, ttl},
		// The place may be granted until the end of its life.
		{"queued", func(s *script) { s.waits("a").cancel("a", true).sends(Release, "g1", "") }, ttl + 3*Period(ttl)},
		// And what is unanswered may come for as long as it has a tombstone.
		{"asking", func(s *script) {
			cmd := s.request("a").sends(Acquire, "", "g1")
			s.fails(cmd, Unknown).cancel("a", true)
		}, ttl + 3*Period(ttl) + time.Minute},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := run(t)
			c.run(s)
			s.done()
			if got := s.c.ends[0].overAt - s.now; got != c.want {
				t.Errorf("given up after %v, want %v", got, c.want)
			}
		})
	}
}

// The second ending is over before the first: neither waits for the other.
func TestReleasesAreGivenUpOnTheirOwn(t *testing.T) {
	t.Parallel()
	s := run(t)
	s.fails(s.request("a", try, lease(time.Hour)).sends(Acquire, "", "g1"), Unknown).failed("a", Unavailable)
	cmd := s.request("b", lease(time.Second)).next(firstBackOff).sends(Release, "g1", "g2")
	s.reply(cmd, Reply{Class: Unknown, Err: errTest}).done()
	s.message("g2", fence, time.Second, 0).grants("b", ViaMessage)
	s.release("b").done()
	s.wait(time.Second)
	// The lease is over, so its Unlock has nothing to wait for; the ending goes on, for the acquire that is unanswered.
	if !slices.ContainsFunc(s.queue, func(a Action) bool { return a.Kind == Confirm && a.Outcome == Unconfirmed }) {
		t.Fatalf("no confirmation at the end of the lease: %+v", s.queue)
	}
	s.queue = nil
	if len(s.c.ends) != 2 || s.c.ends[1].overAt > s.now+2*time.Minute {
		t.Fatalf("endings: %+v", s.c.ends)
	}
	s.wait(90 * time.Second)
	if len(s.c.ends) != 1 || s.c.ends[0].token != "g1" {
		t.Fatalf("endings: %+v", s.c.ends)
	}
}
