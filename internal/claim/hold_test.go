package claim

import (
	"testing"
	"time"
)

// renewal is when the first renewal of a hold by the reply to its acquire is due, from the reply.
func renewal(s *script) time.Duration { return s.c.gen.renewAt - s.now }

func TestHoldIsRenewedEachThirdOrTenSeconds(t *testing.T) {
	t.Parallel()
	for _, ttl := range []time.Duration{100 * time.Millisecond, time.Second, 10 * time.Second, time.Minute, 24 * time.Hour} {
		s := run(t).holds("a", lease(ttl))
		d := renewal(s)
		if want := min(ttl/3, 10*time.Second); d > want || d < want*8/10 {
			t.Errorf("ttl %v: renewed after %v, want %v or a little earlier", ttl, d, want)
		}
		before := s.c.Remaining(s.now, s.reqs["a"])
		cmd := s.next(d).sends(Renew, "g1", "")
		s.says(cmd, Answer{Status: Renewed, Remaining: ttl}).done()
		if after := s.c.Remaining(s.now, s.reqs["a"]); after != before {
			t.Errorf("ttl %v: %v left after a renewal, want %v", ttl, after, before)
		}
	}
}

func TestHoldWithoutRenewalIsNotRenewed(t *testing.T) {
	t.Parallel()
	s := run(t).holds("a", unrenewed)
	s.next(ttl-rtt-Margin(ttl)).loses("a", LostExpired).sends(Release, "g1", "")
}

func TestRenewalThatFailsIsTriedUntilTheValidityEnds(t *testing.T) {
	t.Parallel()
	s := run(t).holds("a")
	end := s.now + s.c.Remaining(s.now, s.reqs["a"])
	cmd := s.next(renewal(s)).sends(Renew, "g1", "")
	tries := 0
	for {
		s.fails(cmd, NotExecuted).tells(RenewFailed, "a")
		tries++
		at, _ := s.c.Next()
		s.next(at - s.now)
		if s.now >= end {
			break
		}
		cmd = s.sends(Renew, "g1", "")
	}
	s.loses("a", LostExpired).done()
	if s.now != end || tries < 6 {
		t.Fatalf("lost at %v after %d tries, want at %v", s.now, tries, end)
	}
}

func TestRenewalUnansweredIsSentAgain(t *testing.T) {
	t.Parallel()
	s := run(t).holds("a")
	first := s.next(renewal(s)).sends(Renew, "g1", "")
	s.next(CommandTimeout(ttl)).tells(RenewFailed, "a")
	second := s.sends(Renew, "g1", "")
	left := s.c.Remaining(s.now, s.reqs["a"])
	s.reply(first, Reply{End: Answer{Status: Renewed, Remaining: ttl}}).done()
	if got := s.c.Remaining(s.now, s.reqs["a"]); got <= left {
		t.Fatalf("a late answer counts too: %v left, before %v", got, left)
	}
	s.fails(second, Unknown).tells(RenewFailed, "a")
	// Renewals that may still run: the release leaves a tombstone, and is tried as long as they could make the lease live.
	cmd := s.release("a").done().next(firstBackOff).sends(Release, "g1", "")
	if !cmd.Tombstone {
		t.Fatal("a renewal is unanswered")
	}
}

// Another generation's release is out and its packet dropped: the lease in use must not wait for it.
func TestRenewalDoesNotWaitLongForAnotherCommand(t *testing.T) {
	t.Parallel()
	const short = 300 * time.Millisecond
	s := run(t)
	s.fails(s.request("a", try).sends(Acquire, "", "g1"), Unknown).failed("a", Unavailable)
	cmd := s.request("b", lease(short)).next(firstBackOff).sends(Release, "g1", "g2")
	s.message("g2", fence, short, 0).grants("b", ViaMessage)
	s.fails(cmd, NotExecuted).next(short/8).sends(Release, "g1", "") // silent
	s.next(CommandTimeout(short)).done().next(short/8).sends(Renew, "g2", "")
	if left := s.c.Remaining(s.now, s.reqs["b"]); left < CommandTimeout(short) {
		t.Fatalf("%v left", left)
	}
}

func TestRenewalDeniedEndsTheHoldAtOnce(t *testing.T) {
	t.Parallel()
	s := run(t).holds("a")
	cmd := s.next(renewal(s)).sends(Renew, "g1", "")
	// And what may have come back of it with a failover is withdrawn.
	cmd = s.says(cmd, Answer{Status: NotYours}).loses("a", LostDenied).sends(Release, "g1", "")
	s.says(cmd, Answer{Status: Withdrawn}).done()
	s.release("a").confirms("a", Lost).idle()
}

func TestRenewalAnsweredAfterTheEndRevivesNothing(t *testing.T) {
	t.Parallel()
	s := run(t).holds("a")
	cmd := s.next(renewal(s)).sends(Renew, "g1", "")
	s.late(ttl).reply(cmd, Reply{End: Answer{Status: Renewed, Remaining: ttl}}).loses("a", LostExpired).sends(Release, "g1", "")
}

func TestNothingRenewsAfterRelease(t *testing.T) {
	t.Parallel()
	s := run(t).holds("a")
	d := renewal(s)
	cmd := s.release("a").sends(Release, "g1", "")
	s.fails(cmd, NotExecuted).done().wait(d).sends(Release, "g1", "")
}

func TestLostUserKeepsTheNameUntilItsRelease(t *testing.T) {
	t.Parallel()
	s := run(t).holds("a").request("b").done()
	cmd := s.late(ttl).wait(0).loses("a", LostExpired).sends(Release, "g1", "")
	s.says(cmd, Answer{Status: Released}).done() // and asks for nothing
	s.request("c", try).tells(Refuse, "c")
	s.message("g1", fence+5, ttl, s.now).done()
	s.release("a").confirms("a", Lost).sends(Acquire, "", "g2")
}

func TestExpiryIsFoundByTheReleaseThoughTheTimerIsLate(t *testing.T) {
	t.Parallel()
	s := run(t).holds("a").late(ttl)
	if left := s.c.Remaining(s.now, s.reqs["a"]); left != 0 {
		t.Fatalf("%v left", left)
	}
	s.release("a").loses("a", LostExpired).confirms("a", Lost).sends(Release, "g1", "")
}

func TestMaxHold(t *testing.T) {
	t.Parallel()
	const most = 2 * time.Second
	s := run(t).holds("a", maxHold(most))
	if got := s.c.Remaining(s.now, s.reqs["a"]); got != most {
		t.Fatalf("remaining: got %v, want %v", got, most)
	}
	s.request("b", maxHold(most)).done()
	s.late(most/2).release("a").confirms("a", OK).grants("b", ViaLocal) // counts for each hold
	s.wait(most).loses("b", LostMaxHold).sends(Release, "g1", "")
	s.release("b").confirms("b", Lost).done()
}

func TestHandOverInTheProcessCostsNoCommand(t *testing.T) {
	t.Parallel()
	s := run(t).holds("a").request("b").request("c").done()
	s.release("a").confirms("a", OK).grants("b", ViaLocal)
	s.release("b").confirms("b", OK).grants("c", ViaLocal)
	cmd := s.release("c").sends(Release, "g1", "")
	if cmd.Used != fence+2 {
		t.Fatalf("used fence: got %d, want %d", cmd.Used, fence+2)
	}
}

func TestHandOverWaitsOutTheMicrosecondOfItsFence(t *testing.T) {
	t.Parallel()
	s := run(t).holds("a")
	granted := s.now
	for _, step := range []struct {
		from, to  string
		fence     int64
		notBefore time.Duration
	}{{"a", "b", fence + 1, time.Microsecond}, {"b", "c", fence + 2, 2 * time.Microsecond}} {
		s.request(step.to).release(step.from).confirms(step.from, OK)
		a := s.tells(Grant, step.to)
		if a.Fence != step.fence || a.NotBefore-granted != step.notBefore {
			t.Fatalf("fence %d, not before %v; want %d, %v", a.Fence, a.NotBefore-granted, step.fence, step.notBefore)
		}
	}
}

func TestHandOverNeedsALeaseThatFits(t *testing.T) {
	t.Parallel()
	none := func(*Request) {}
	for _, c := range []struct {
		name  string
		a, b  func(*Request)
		after time.Duration
	}{
		{"other-ttl", none, lease(time.Minute), 0},
		{"other-renewal", none, unrenewed, 0},
		{"no-renewal", unrenewed, unrenewed, 0},
		{"less-than-a-third-left", none, none, 2 * ttl / 3},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := run(t).holds("a", c.a).request("b", c.b).done()
			cmd := s.late(c.after).release("a").sends(Release, "g1", "g2")
			s.says(cmd, granted(cmd.TTL)).confirms("a", OK).grants("b", ViaReply).done()
		})
	}
}

func TestHandOverGoesOnForTheSliceOnceAnotherProcessWaits(t *testing.T) {
	t.Parallel()
	s := run(t).holds("a").request("b").request("c").request("d").done()
	s.hint("g1").late(time.Millisecond)
	s.release("a").confirms("a", OK).grants("b", ViaLocal)
	s.hint("g1").late(3 * time.Millisecond) // counts from the first news
	s.release("b").confirms("b", OK).grants("c", ViaLocal)
	s.late(time.Millisecond)
	cmd := s.release("c").sends(Release, "g1", "g2")
	s.says(cmd, s.queuedAt(2, ttl)).confirms("c", OK).done()
}

func TestHandOverWithoutSliceIsFIFOBetweenProcesses(t *testing.T) {
	t.Parallel()
	s := run(t).holds("a", fifo).request("b", fifo).done()
	s.hint("g1").release("a").sends(Release, "g1", "g2")
}

func TestNewsOfWaitersCountsInTheOrderOfItsQuestions(t *testing.T) {
	t.Parallel()
	s := run(t).holds("a", fifo).request("b", fifo).request("c", fifo).done()
	cmd := s.next(renewal(s)).sends(Renew, "g1", "")
	// The renewal ran before the other came; its answer is later than the hint.
	s.late(rtt).hint("g1").done()
	s.says(cmd, Answer{Status: Renewed, Remaining: ttl}).done()
	s.release("a").sends(Release, "g1", "g2")

	s = run(t).holds("a", fifo).request("b", fifo).done().hint("g1").done()
	cmd = s.next(renewal(s)).sends(Renew, "g1", "")
	s.says(cmd, Answer{Status: Renewed, Remaining: ttl}).done() // the other has gone
	s.release("a").confirms("a", OK).grants("b", ViaLocal)
}

func TestGrantSaysThatOthersWait(t *testing.T) {
	t.Parallel()
	s := run(t).waits("a", fifo).request("b", fifo).done()
	s.event("message", func() { s.c.Granted(s.now, "g1", fence, ttl, s.now, true) }).grants("a", ViaMessage)
	s.release("a").sends(Release, "g1", "g2")
}

func TestLinger(t *testing.T) {
	t.Parallel()
	lingering := func(t *testing.T) *script {
		t.Helper()
		return run(t).holds("a", linger).release("a").confirms("a", OK).done()
	}
	t.Run("next-lock-costs-nothing", func(t *testing.T) {
		t.Parallel()
		s := lingering(t).late(time.Second/2).request("b", linger).grants("b", ViaLocal)
		s.release("b").confirms("b", OK).next(time.Second).sends(Release, "g1", "")
	})
	t.Run("so-does-a-try", func(t *testing.T) {
		t.Parallel()
		lingering(t).request("b", try).grants("b", ViaLocal).done()
	})
	t.Run("hint-ends-it", func(t *testing.T) {
		t.Parallel()
		lingering(t).hint("g1").sends(Release, "g1", "")
	})
	t.Run("none-while-contended", func(t *testing.T) {
		t.Parallel()
		run(t).holds("a", linger).hint("g1").release("a").sends(Release, "g1", "")
	})
	t.Run("none-without-renewal", func(t *testing.T) {
		t.Parallel()
		run(t).holds("a", linger, unrenewed).release("a").sends(Release, "g1", "")
	})
	t.Run("is-renewed-and-nobody-is-told-of-a-failure", func(t *testing.T) {
		t.Parallel()
		s := run(t).holds("a", linger, lease(time.Second)).release("a").confirms("a", OK)
		cmd := s.next(renewal(s)).sends(Renew, "g1", "")
		s.fails(cmd, Denied).done()
	})
	t.Run("lost-alone", func(t *testing.T) {
		t.Parallel()
		lingering(t).wait(ttl).sends(Release, "g1", "")
	})
	t.Run("little-left-asks-anew", func(t *testing.T) {
		t.Parallel()
		long := func(r *Request) { r.Linger = time.Minute }
		s := run(t).holds("a", long).release("a").confirms("a", OK)
		cmd := s.wait(3*time.Second).sends(Renew, "g1", "")
		s.late(3*time.Second).fails(cmd, NotExecuted).request("b").done()
		s.next(firstBackOff).sends(Release, "g1", "g2")
	})
	t.Run("another-ttl-asks-anew", func(t *testing.T) {
		t.Parallel()
		lingering(t).request("b", lease(time.Minute)).sends(Release, "g1", "g2")
	})
}
