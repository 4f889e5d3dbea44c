package claim

import (
	"testing"
	"time"
)

func TestAcquireFreeLockIsOneCommandEachWay(t *testing.T) {
	t.Parallel()
	s := run(t)
	cmd := s.request("a").sends(Acquire, "", "g1")
	if !cmd.Wait || cmd.Repeated || cmd.TTL != ttl || cmd.Life != 3*Period(ttl) {
		t.Fatalf("acquire: %+v", cmd)
	}
	s.says(cmd, granted(ttl)).grants("a", ViaReply)
	cmd = s.release("a").sends(Release, "g1", "")
	if cmd.Tombstone || cmd.Used != fence {
		t.Fatalf("release: %+v", cmd)
	}
	s.says(cmd, Answer{Status: Released}).confirms("a", OK).idle()
}

func TestAcquireOnlyOneCommandIsInFlight(t *testing.T) {
	t.Parallel()
	s := run(t)
	cmd := s.request("a").sends(Acquire, "", "g1")
	s.request("b").request("c").cancel("b", true).subscribe(Opening).subscribe(Ready).hint("g1").done()
	s.says(cmd, granted(ttl)).grants("a", ViaReply).done()
}

func TestAcquireUnansweredIsRepeatedAndSaysSo(t *testing.T) {
	t.Parallel()
	s := run(t)
	first := s.request("a").sends(Acquire, "", "g1")
	second := s.next(CommandTimeout(ttl)).sends(Acquire, "", "g1")
	if !second.Repeated {
		t.Fatal("the second does not say that it repeats")
	}
	// The late answer to the first counts, by its own sending.
	s.reply(first, Reply{Ask: granted(ttl)}).grants("a", ViaReply)
	if got, want := s.c.Remaining(s.now, s.reqs["a"]), ttl-CommandTimeout(ttl)-Margin(ttl); got != want {
		t.Fatalf("remaining: got %v, want %v", got, want)
	}
	s.reply(second, Reply{Ask: Answer{Status: Gone}}).done() // it ran first; what came later stands
}

func TestAcquireNotExecutedIsNotARepetition(t *testing.T) {
	t.Parallel()
	s := run(t)
	cmd := s.request("a").sends(Acquire, "", "g1")
	s.fails(cmd, NotExecuted).done()
	if cmd = s.next(firstBackOff).sends(Acquire, "", "g1"); cmd.Repeated {
		t.Fatal("nothing was asked before")
	}
	s.cancel("a", true).fails(cmd, NotExecuted).idle()
}

func TestAcquireValidityCountsFromBeforeTheCommand(t *testing.T) {
	t.Parallel()
	s := run(t)
	cmd := s.request("a").sends(Acquire, "", "g1")
	s.late(200*time.Millisecond).reply(cmd, Reply{Ask: granted(5 * time.Second)}).grants("a", ViaReply)
	if got, want := s.c.Remaining(s.now, s.reqs["a"]), 5*time.Second-200*time.Millisecond-90*time.Millisecond; got != want {
		t.Fatalf("remaining: got %v, want %v", got, want)
	}
}

func TestAcquireGrantThatLapsedBeforeItsReplyEndsItsGeneration(t *testing.T) {
	t.Parallel()
	s := run(t)
	cmd := s.request("a").sends(Acquire, "", "g1")
	s.late(5*time.Second).reply(cmd, Reply{Ask: granted(5 * time.Second)}).sends(Release, "g1", "g2")
}

func TestAcquireGoneStartsAnew(t *testing.T) {
	t.Parallel()
	for _, status := range []Status{Gone, Ended} {
		s := run(t).waits("a")
		cmd := s.next(Period(ttl)-rtt).sends(Acquire, "", "g1")
		if cmd = s.says(cmd, Answer{Status: status}).sends(Acquire, "", "g2"); cmd.Repeated {
			t.Fatal("a new generation repeats nothing")
		}
	}
}

func TestAcquireGoneWhileAnOlderOneIsUnansweredLeavesATombstone(t *testing.T) {
	t.Parallel()
	s := run(t)
	s.request("a").sends(Acquire, "", "g1") // never answered
	cmd := s.wait(time.Second).sends(Acquire, "", "g1")
	if cmd = s.says(cmd, Answer{Status: Gone}).sends(Release, "g1", "g2"); !cmd.Tombstone {
		t.Fatal("the first may still run")
	}
}

func TestAcquireUndecidedHasAPlaceAllTheSame(t *testing.T) {
	t.Parallel()
	s := run(t)
	cmd := s.request("a").sends(Acquire, "", "g1")
	cmd = s.says(cmd, Answer{Status: Again, Unfinished: true}).sends(Acquire, "", "g1")
	s.says(cmd, Answer{Status: Again, Unfinished: true}).sends(Acquire, "", "g1")
	s = run(t)
	cmd = s.request("a").sends(Acquire, "", "g1")
	cmd = s.says(cmd, Answer{Status: Again, Unfinished: true}).sends(Acquire, "", "g1")
	s.cancel("a", true).done()
	s.fails(cmd, NotExecuted).next(firstBackOff).sends(Release, "g1", "") // and does not leave it behind
}

func TestQueueRechecks(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name     string
		ttl      time.Duration
		position int
		left     time.Duration
		want     time.Duration // from the answer
	}{
		{"each-period", ttl, 1, time.Minute, 3*time.Second - rtt},
		{"a-third-of-a-short-ttl", 3 * time.Second, 9, time.Minute, time.Second - rtt},
		{"never-over-the-longest", time.Hour, 9, time.Minute, 3*time.Second - rtt},
		{"first-at-the-holders-expiry", ttl, 1, 500 * time.Millisecond, 501 * time.Millisecond},
		{"third-at-the-holders-expiry", ttl, 3, 500 * time.Millisecond, 501 * time.Millisecond},
		{"fourth-not", ttl, 4, 500 * time.Millisecond, 3*time.Second - rtt},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := run(t)
			cmd := s.request("a", lease(c.ttl)).sends(Acquire, "", "g1")
			s.says(cmd, s.queuedAt(c.position, c.left)).next(c.want).sends(Acquire, "", "g1")
		})
	}
}

func TestQueueGoesByTheLatestQuestion(t *testing.T) {
	t.Parallel()
	s := run(t)
	first := s.request("a").sends(Acquire, "", "g1")
	second := s.wait(time.Second).sends(Acquire, "", "g1")
	third := s.wait(time.Second).done().next(2*firstBackOff).sends(Acquire, "", "g1")
	// The second ran before the first, and the third after both.
	s.reply(second, Reply{Ask: Answer{Status: Gone}}).done()
	s.says(third, s.queuedAt(9, ttl)).done()
	s.reply(first, Reply{Ask: s.queuedAt(9, ttl)}).done().next(Period(ttl)-rtt).sends(Acquire, "", "g1")
}

func TestQueueIsWaitedInByOneHoweverManyWait(t *testing.T) {
	t.Parallel()
	s := run(t).waits("a")
	for range 1000 {
		// The session tells the subscription with each call.
		s.request("x").subscribe(Ready).done()
	}
	cmd := s.next(Period(ttl)-rtt).sends(Acquire, "", "g1")
	s.says(cmd, s.queuedAt(1, ttl)).done()
}

func TestMessageIsAGrant(t *testing.T) {
	t.Parallel()
	s := run(t).waits("a")
	sent := s.now - rtt
	s.late(time.Second).message("g1", fence, ttl, sent+time.Second).grants("a", ViaMessage)
	// Queued by the server's clock at sent, granted a second later.
	if got, want := s.c.Remaining(s.now, s.reqs["a"]), ttl-rtt-Margin(ttl); got != want {
		t.Fatalf("remaining: got %v, want %v", got, want)
	}
	s.message("g1", fence, ttl, sent+time.Second).done() // doubled
}

func TestMessageNeverCountsFromTheFuture(t *testing.T) {
	t.Parallel()
	s := run(t).waits("a")
	s.message("g1", fence, ttl, s.now+Margin(ttl)/4).grants("a", ViaMessage) // the server's clock is a little faster
	if got, want := s.c.Remaining(s.now, s.reqs["a"]), ttl-Margin(ttl); got != want {
		t.Fatalf("remaining: got %v, want %v", got, want)
	}
}

func TestMessageThatIsLateHasLessLeft(t *testing.T) {
	t.Parallel()
	s := run(t).waits("a")
	at := s.now + 100*time.Millisecond
	s.late(2*time.Second).message("g1", fence, ttl, at).grants("a", ViaMessage)
	if got, want := s.c.Remaining(s.now, s.reqs["a"]), ttl-(2*time.Second-100*time.Millisecond)-Margin(ttl); got != want {
		t.Fatalf("remaining: got %v, want %v", got, want)
	}
}

func TestMessageBeforeTheFirstAnswerCountsFromTheFirstQuestion(t *testing.T) {
	t.Parallel()
	s := run(t)
	first := s.request("a").sends(Acquire, "", "g1")
	second := s.wait(time.Second).sends(Acquire, "", "g1")
	s.late(rtt).message("g1", fence, ttl, 0).grants("a", ViaMessage)
	if got, want := s.c.Remaining(s.now, s.reqs["a"]), ttl-time.Second-rtt-Margin(ttl); got != want {
		t.Fatalf("remaining: got %v, want %v", got, want)
	}
	// Answers that ran before the grant take nothing back.
	s.reply(first, Reply{Ask: s.queuedAt(1, ttl)}).done().reply(second, Reply{Ask: s.queuedAt(1, ttl)}).done()
}

func TestMessageIsIgnored(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		token string
		fence int64
	}{
		{"of-another-generation", "g0", fence},
		{"of-a-hold-before-the-queue", "g1", fence - 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := run(t).waits("a")
			s.message(c.token, c.fence, ttl, s.now).done()
		})
	}
}

func TestMessageThatProvesNothingLeadsToAQuestion(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name     string
		delay    time.Duration
		at, left time.Duration
	}{
		{"lapsed", 2 * time.Second, 0, time.Second},
		{"the-servers-clock-was-set-back", 0, -time.Hour, ttl},
		{"the-servers-clock-was-set-forward", 0, time.Hour, ttl},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := run(t).waits("a")
			at := s.now + c.at
			cmd := s.late(c.delay).message("g1", fence, c.left, at).sends(Acquire, "", "g1")
			s.says(cmd, granted(time.Second)).grants("a", ViaRecheck)
		})
	}
}

func TestCancelBeforeTheGrant(t *testing.T) {
	t.Parallel()
	t.Run("in-the-queue", func(t *testing.T) {
		t.Parallel()
		s := run(t).waits("a")
		cmd := s.cancel("a", true).sends(Release, "g1", "")
		if cmd.Tombstone {
			t.Error("everything is answered")
		}
		s.message("g1", fence, ttl, s.now).done() // too late, and the release finds it
		s.says(cmd, Answer{Status: Released}).idle()
	})
	t.Run("while-asking", func(t *testing.T) {
		t.Parallel()
		s := run(t)
		ask := s.request("a").sends(Acquire, "", "g1")
		s.cancel("a", true).done() // a command is out; it is not canceled
		cmd := s.says(ask, granted(ttl)).sends(Release, "g1", "")
		s.says(cmd, Answer{Status: Released}).idle()
	})
	t.Run("while-asking-for-nothing", func(t *testing.T) {
		t.Parallel()
		s := run(t)
		ask := s.request("a").sends(Acquire, "", "g1")
		s.cancel("a", true).fails(ask, NotExecuted).idle()
	})
	t.Run("unanswered", func(t *testing.T) {
		t.Parallel()
		s := run(t)
		ask := s.request("a").sends(Acquire, "", "g1")
		s.cancel("a", true).done()
		cmd := s.next(CommandTimeout(ttl)).sends(Release, "g1", "")
		if !cmd.Tombstone {
			t.Error("the acquire may still run")
		}
		s.says(cmd, Answer{Status: NotYours}).idle()
		s.reply(ask, Reply{Ask: Answer{Status: Ended}}).idle()
	})
	t.Run("answered-against-the-order", func(t *testing.T) {
		t.Parallel()
		s := run(t)
		first := s.request("a").sends(Acquire, "", "g1")
		second := s.wait(time.Second).sends(Acquire, "", "g1")
		s.cancel("a", true).done()
		s.reply(first, Reply{Ask: granted(ttl)}).done()
		s.reply(second, Reply{Ask: Answer{Status: Gone}}).sends(Release, "g1", "") // it ran first
	})
}

func TestCancelAfterTheGrantIsTooLate(t *testing.T) {
	t.Parallel()
	s := run(t).holds("a").cancel("a", false).done()
	s.release("a").sends(Release, "g1", "")
}

func TestCancelOfTheFirstLeavesTheQueuePlaceToTheNext(t *testing.T) {
	t.Parallel()
	s := run(t).waits("a").request("b").cancel("a", true).done()
	s.message("g1", fence, ttl, s.now).grants("b", ViaMessage)
}

func TestGrantThatDoesNotFitIsAskedForAgain(t *testing.T) {
	t.Parallel()
	s := run(t).waits("a").request("b", lease(time.Minute)).cancel("a", true).done()
	s.message("g1", fence, ttl, s.now)
	if cmd := s.sends(Release, "g1", "g2"); cmd.TTL != time.Minute {
		t.Fatalf("asked for %v, want the second's ttl", cmd.TTL)
	}
}
