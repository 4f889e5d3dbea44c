package claim

import (
	"testing"
	"time"
)

func TestOutageShorterThanTheBudgetIsWaitedOut(t *testing.T) {
	t.Parallel()
	s := run(t)
	cmd := s.request("a").sends(Acquire, "", "g1")
	began := s.now
	for s.now < began+budget-2*time.Second {
		s.fails(cmd, NotExecuted).done()
		at, _ := s.c.Next()
		if wait := at - s.now; wait < firstBackOff/2 || wait > lastBackOff {
			t.Fatalf("back-off of %v", wait)
		}
		cmd = s.next(at-s.now).sends(Acquire, "", "g1")
	}
	s.says(cmd, granted(ttl)).grants("a", ViaReply)
	if s.c.Outage(s.now) != nil {
		t.Fatal("the outage is over")
	}
}

func TestOutageLongerThanTheBudgetFailsWhoeverWaited(t *testing.T) {
	t.Parallel()
	s := run(t)
	cmd := s.request("a").sends(Acquire, "", "g1")
	began := s.now
	s.request("b").done()
	for {
		s.fails(cmd, NotExecuted).done()
		at, _ := s.c.Next()
		s.next(at - s.now)
		if s.now >= began+budget {
			break
		}
		if s.now == began+budget-10*time.Second+time.Second {
			s.request("c")
		}
		cmd = s.sends(Acquire, "", "g1")
	}
	if s.now != began+budget {
		t.Fatalf("failed after %v", s.now-began)
	}
	s.failed("a", Unavailable).failed("b", Unavailable).idle()
}

func TestOutageBudgetIsEachCallsOwn(t *testing.T) {
	t.Parallel()
	s := run(t)
	cmd := s.request("a").sends(Acquire, "", "g1")
	s.fails(cmd, NotExecuted).done()
	cmd = s.wait(20*time.Second).sends(Acquire, "", "g1")
	s.request("b").fails(cmd, NotExecuted).done()
	cmd = s.wait(12*time.Second).failed("a", Unavailable).sends(Acquire, "", "g1")
	s.says(cmd, granted(ttl)).grants("b", ViaReply)
}

// What was given up as unanswered fails at last; meanwhile others have been answered.
func TestOutageIsNotBegunByAnOldCommand(t *testing.T) {
	t.Parallel()
	s := run(t)
	first := s.request("a").sends(Acquire, "", "g1")
	second := s.wait(time.Second).sends(Acquire, "", "g1")
	s.says(second, s.queuedAt(1, time.Minute)).fails(first, Unknown).done()
	if s.c.Outage(s.now) != nil {
		t.Fatal("the server answered just now")
	}
}

func TestOutageOfWhichNothingIsHeardFailsNobody(t *testing.T) {
	t.Parallel()
	t.Run("behind-a-lost-user", func(t *testing.T) {
		t.Parallel()
		s := run(t).holds("a", unrenewed)
		cmd := s.wait(ttl).loses("a", LostExpired).sends(Release, "g1", "")
		for len(s.c.ends) > 0 {
			s.fails(cmd, NotExecuted).done()
			if s.wait(time.Second); len(s.queue) > 0 {
				cmd = s.sends(Release, "g1", "")
			}
		}
		s.request("b").wait(2 * budget).done() // it waits for a, not for Redis
		s.release("a").confirms("a", Lost).sends(Acquire, "", "g2")
	})
	t.Run("behind-a-user-by-message", func(t *testing.T) {
		t.Parallel()
		s := run(t).waits("a", unrenewed, lease(time.Hour))
		cmd := s.wait(3*time.Second).sends(Acquire, "", "g1")
		s.message("g1", fence, time.Hour, s.now).grants("a", ViaMessage)
		s.fails(cmd, NotExecuted).request("b").done()
		s.wait(2 * budget).done()
	})
}

func TestOutageWithManyTriesLeavesFewBehind(t *testing.T) {
	t.Parallel()
	s := run(t)
	unanswered := func() {
		t.Helper()
		for len(s.queue) > 0 && s.queue[0].Kind == Send {
			s.reply(s.read(Send).Cmd, Reply{Class: Unknown, Err: errTest})
		}
	}
	for tries := range 500 {
		s.request("try", try, lease(24*time.Hour))
		for unanswered(); len(s.queue) == 0; unanswered() {
			at, _ := s.c.Next()
			s.wait(max(at-s.now, 0))
		}
		s.failed("try", Unavailable)
		unanswered()
		if len(s.c.ends) > manyEnds {
			t.Fatalf("%d endings after %d tries", len(s.c.ends), tries+1)
		}
	}
	// When the server is back, its first answer opens the way again.
	s.request("a").wait(lastBackOff)
	cmd := s.sends(Release, "g1", "")
	cmd = s.says(cmd, Answer{Status: NotYours}).read(Send).Cmd
	if cmd.Verb != Release || cmd.Ask == "" {
		t.Fatalf("sent %s", cmdString(cmd))
	}
	s.reply(cmd, Reply{End: Answer{Status: NotYours}, Ask: granted(ttl)}).grants("a", ViaReply)
}

func TestOutageIsStillKnownToTheOneWhoCancels(t *testing.T) {
	t.Parallel()
	s := run(t)
	cmd := s.request("a").sends(Acquire, "", "g1")
	s.fails(cmd, NotExecuted).cancel("a", true)
	if s.c.Outage(s.now) == nil {
		t.Fatal("the caller cannot be told why it waited in vain")
	}
}

func TestDeniedFailsWhoeverWaits(t *testing.T) {
	t.Parallel()
	s := run(t)
	cmd := s.request("a").sends(Acquire, "", "g1")
	s.request("b").done()
	s.fails(cmd, Denied).failed("a", Permanent).failed("b", Permanent).idle()
}

func TestDeniedRenewalIsTriedAgain(t *testing.T) {
	t.Parallel()
	s := run(t).holds("a")
	cmd := s.next(renewal(s)).sends(Renew, "g1", "")
	s.fails(cmd, Denied).tells(RenewFailed, "a")
	cmd = s.next(firstBackOff).sends(Renew, "g1", "")
	s.says(cmd, Answer{Status: Renewed, Remaining: ttl}).done()
}

func TestBackOffOfAQuestionDoesNotHoldUpARenewal(t *testing.T) {
	t.Parallel()
	const short = 300 * time.Millisecond
	s := run(t).waits("a", lease(short))
	cmd := s.wait(Period(short)).sends(Acquire, "", "g1")
	for range 8 {
		cmd = s.fails(cmd, NotExecuted).wait(time.Second).sends(Acquire, "", "g1")
	}
	s.fails(cmd, NotExecuted).message("g1", fence, short, s.now-rtt).grants("a", ViaMessage)
	at, _ := s.c.Next()
	if left := s.c.Remaining(s.now, s.reqs["a"]); at-s.now > left/2 {
		t.Fatalf("renewed after %v, of %v left", at-s.now, left)
	}
}
