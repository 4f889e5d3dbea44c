package claim

import (
	"testing"
	"time"
)

func TestSubscribeFirstAcquireIsATryMeanwhile(t *testing.T) {
	t.Parallel()
	t.Run("free", func(t *testing.T) {
		t.Parallel()
		s := runDeaf(t)
		cmd := s.request("a").sends(Acquire, "", "g1")
		if cmd.Wait {
			t.Fatal("a place could be granted unheard")
		}
		s.says(cmd, granted(ttl)).grants("a", ViaReply)
	})
	t.Run("confirmed", func(t *testing.T) {
		t.Parallel()
		s := runDeaf(t)
		cmd := s.request("a").sends(Acquire, "", "g1")
		s.says(cmd, Answer{Status: Busy, Remaining: ttl}).done() // a Lock is not refused
		if cmd = s.subscribe(Ready).sends(Acquire, "", "g2"); !cmd.Wait {
			t.Fatal("no place was asked for")
		}
	})
	t.Run("confirmed-before-the-answer", func(t *testing.T) {
		t.Parallel()
		s := runDeaf(t)
		cmd := s.request("a").sends(Acquire, "", "g1")
		s.subscribe(Ready).done()
		s.says(cmd, Answer{Status: Busy, Remaining: ttl}).sends(Acquire, "", "g2")
	})
	t.Run("refused", func(t *testing.T) {
		t.Parallel()
		s := runDeaf(t)
		cmd := s.request("a").sends(Acquire, "", "g1")
		s.says(cmd, Answer{Status: Busy, Remaining: ttl}).done()
		if cmd = s.subscribe(Deaf).sends(Acquire, "", "g2"); !cmd.Wait {
			t.Fatal("no place was asked for")
		}
	})
	t.Run("the-next-in-line-is-tried-for-as-well", func(t *testing.T) {
		t.Parallel()
		s := runDeaf(t)
		cmd := s.request("a").sends(Acquire, "", "g1")
		s.says(cmd, Answer{Status: Busy, Remaining: ttl}).request("b").done()
		s.cancel("a", true).sends(Acquire, "", "g2")
	})
}

func TestSubscribeUnconfirmedForASecondIsQueuedBlind(t *testing.T) {
	t.Parallel()
	s := runDeaf(t)
	cmd := s.request("a").sends(Acquire, "", "g1")
	s.says(cmd, Answer{Status: Busy, Remaining: ttl}).done()
	cmd = s.next(blindAfter-rtt).sends(Acquire, "", "g2")
	if !cmd.Wait {
		t.Fatal("no place was asked for")
	}
	s.says(cmd, s.queuedAt(1, 0)).done() // served by its re-checks
	cmd = s.next(time.Millisecond).sends(Acquire, "", "g2")
	s.says(cmd, granted(ttl)).grants("a", ViaRecheck)
	// The next call need not wait that second again.
	cmd = s.release("a").sends(Release, "g2", "")
	s.says(cmd, Answer{Status: Released}).confirms("a", OK)
	if cmd = s.request("b").sends(Acquire, "", "g3"); !cmd.Wait {
		t.Fatal("no place was asked for")
	}
}

func TestSubscribeAgainAsksAtOnce(t *testing.T) {
	t.Parallel()
	s := run(t).waits("a").subscribe(Opening).done()
	cmd := s.late(time.Millisecond).subscribe(Ready).sends(Acquire, "", "g1")
	s.says(cmd, granted(ttl-time.Millisecond)).grants("a", ViaRecheck)
}

func TestSubscribeTwiceIsOnce(t *testing.T) {
	t.Parallel()
	run(t).waits("a").subscribe(Ready).done()
}

// The question was out while the subscription came back: it ran before, so its answer proves nothing about what was published in between.
func TestSubscribeAgainWhileAQuestionIsOutAsksOnceMore(t *testing.T) {
	t.Parallel()
	s := run(t)
	cmd := s.request("a").sends(Acquire, "", "g1")
	s.subscribe(Opening).subscribe(Ready).done()
	cmd = s.says(cmd, s.queuedAt(1, time.Minute)).sends(Acquire, "", "g1")
	s.says(cmd, s.queuedAt(1, time.Minute)).done()
}
