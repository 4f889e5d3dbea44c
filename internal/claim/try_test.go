package claim

import (
	"testing"
	"time"
)

func TestTryDoesNotWaitForAHolder(t *testing.T) {
	t.Parallel()
	s := run(t)
	cmd := s.request("a", try).sends(Acquire, "", "g1")
	if cmd.Wait {
		t.Fatal("a try takes no place")
	}
	s.says(cmd, Answer{Status: Busy, Remaining: 2 * time.Second})
	if a := s.tells(Refuse, "a"); a.RetryAfter != 2*time.Second {
		t.Fatalf("retry after %v", a.RetryAfter)
	}
	s.idle()
}

func TestTryIsRefusedWhileSomebodyHereHoldsOrWaits(t *testing.T) {
	t.Parallel()
	t.Run("holds", func(t *testing.T) {
		t.Parallel()
		s := run(t).holds("a").request("b", try)
		if a := s.tells(Refuse, "b"); a.RetryAfter != ttl-rtt-Margin(ttl) {
			t.Errorf("retry after %v", a.RetryAfter)
		}
		s.done()
	})
	t.Run("waits", func(t *testing.T) {
		t.Parallel()
		run(t).waits("a").request("b", try).tells(Refuse, "b")
	})
	t.Run("asks", func(t *testing.T) {
		t.Parallel()
		s := run(t)
		s.request("a").sends(Acquire, "", "g1")
		s.request("b", try).tells(Refuse, "b")
	})
}

func TestTryMakesOneAttempt(t *testing.T) {
	t.Parallel()
	for _, class := range []Class{NotExecuted, Unknown, Refused} {
		s := run(t)
		cmd := s.request("a", try).sends(Acquire, "", "g1")
		s.fails(cmd, class).failed("a", Unavailable).done()
	}
}

func TestTryIsToldAtOnceWhatWillNeverBe(t *testing.T) {
	t.Parallel()
	s := run(t)
	cmd := s.request("a", try).sends(Acquire, "", "g1")
	s.fails(cmd, Denied).failed("a", Permanent).idle()
}

func TestTryEndsWithinThreeSeconds(t *testing.T) {
	t.Parallel()
	s := run(t)
	s.request("a", try, lease(100*time.Millisecond)).sends(Acquire, "", "g1")
	s.next(tryBound).failed("a", Unavailable) // one answer is waited for, though the ttl is short
	if cmd := s.sends(Release, "g1", ""); !cmd.Tombstone {
		t.Fatal("the acquire may still run")
	}
}

func TestTryThatEndsFreesWhoeverWaitsBehindItsSilentCommand(t *testing.T) {
	t.Parallel()
	s := run(t)
	s.request("a", try).sends(Acquire, "", "g1")
	s.request("b").done()
	s.next(tryBound).failed("a", Unavailable).sends(Release, "g1", "g2")
}

func TestTryGrantedTooLateIsNotAnotherAttempt(t *testing.T) {
	t.Parallel()
	s := run(t)
	cmd := s.request("a", try, lease(time.Second)).sends(Acquire, "", "g1")
	s.late(2*time.Second).reply(cmd, Reply{Ask: granted(time.Second)}).failed("a", Unavailable).sends(Release, "g1", "")
}

func TestTryCanceledGivesBackWhatItGets(t *testing.T) {
	t.Parallel()
	s := run(t)
	cmd := s.request("a", try).sends(Acquire, "", "g1")
	s.cancel("a", true).done()
	cmd = s.says(cmd, granted(ttl)).sends(Release, "g1", "")
	s.says(cmd, Answer{Status: Released}).idle()
}

func TestTryUndecidedIsAskedAgainAtOnceAndRepeatsNothing(t *testing.T) {
	t.Parallel()
	s := run(t)
	cmd := s.request("a", try).sends(Acquire, "", "g1")
	cmd = s.says(cmd, Answer{Status: Again, Unfinished: true}).sends(Acquire, "", "g1")
	if cmd.Repeated {
		t.Fatal("a try leaves no trace: as a repetition it would be told that it is gone")
	}
	s.says(cmd, granted(ttl)).grants("a", ViaReply)
}
