package scripts_test

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/e51fe0e6/dsync/scripts"
)

// crowd seeds another's expired hold, n dead places, holes among them, and one live place at the end.
func (f *fixture) crowd(n int) {
	f.Helper()
	f.holding(other, 11_000, -1000)
	fields := []string{}
	for i := 1; i <= n; i++ {
		if i%3 == 0 {
			continue // a hole
		}
		token := fmt.Sprintf("d%d:1", i)
		fields = append(fields, "q"+strconv.Itoa(i), fmt.Sprintf("%s %d %d %d 0 label=x", token, ttl, f.millis()-1, life), "w"+token, strconv.Itoa(i))
	}
	f.write(0, fields...)
	f.placed(next, n+1, life, false)
	f.queue(1, n+1)
}

func TestDeadPlacesAreDroppedWithinABudget(t *testing.T) {
	for _, tc := range []struct {
		name  string
		q     question
		calls []string // until one is without "+again"
		state string
	}{
		{
			"wait", acquire(me, "w"),
			[]string{"again+waiting+again", "again+waiting+again", "again+waiting+again", "queued#1+waiting"},
			"h=nx:1 q=me:1",
		},
		{
			"try", acquire(me, ""),
			[]string{"again+waiting+again", "again+waiting+again", "again+waiting+again", "busy"},
			"h=nx:1",
		},
		{
			"renew", renew(me),
			[]string{"not-yours+waiting+again", "not-yours+waiting+again", "not-yours+waiting+again", "not-yours"},
			"h=nx:1",
		},
		{
			"release", release(other, "", ""),
			[]string{"released+waiting+again", "not-yours+waiting+again", "not-yours+waiting+again", "not-yours"},
			"h=nx:1",
		},
		{
			"exchange", release(other, "w", again),
			[]string{
				"released+waiting,again+waiting+again", "not-yours+waiting,again+waiting+again", "not-yours+waiting,again+waiting+again",
				"not-yours+waiting,queued#1+waiting",
			},
			"h=nx:1 q=me:2",
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			both(t, func(f *fixture) {
				f.crowd(200)
				for i, want := range tc.calls {
					before := len(f.state().fields)
					if got := f.ask(tc.q).String(); got != want {
						f.Fatalf("call %d: %s, want %s", i+1, got, want)
					}
					if gone := before - len(f.state().fields); gone > 2*64 {
						f.Errorf("call %d dropped %d fields", i+1, gone)
					}
				}
				if got := f.state().String(); got != tc.state {
					f.Errorf("left %s, want %s", got, tc.state)
				}
				if got := f.messages(); len(got) != 1 || !strings.HasPrefix(got[0], "nx g ") {
					f.Errorf("published %q, want the grant", got)
				}
			})
		})
	}
}

func TestHeadBehindManyDeadHintsWhenItIsFound(t *testing.T) {
	both(t, func(f *fixture) {
		f.crowd(100)
		f.holding(other, 0, ttl)
		f.do("HDEL", f.key, "q101", "w"+next)
		for i, want := range []string{"queued#38+waiting+again", "queued#1+waiting", "queued#1+waiting"} {
			if got := f.ask(acquire(me, "w")).String(); got != want {
				f.Errorf("call %d: %s, want %s", i+1, got, want)
			}
		}
		if got, want := f.messages(), []string{"ot h 1", "ot h 1"}; !slices.Equal(got, want) {
			f.Errorf("published %q, want %q", got, want)
		}
	})
}

func TestFirstWaiterHintsAndRepeatsItAndOthersDoNot(t *testing.T) {
	both(t, func(f *fixture) {
		f.ask(acquire(other, "w"))
		for _, step := range []struct {
			q    question
			want []string
		}{
			{acquire(me, "w"), []string{"ot h 1"}},
			{acquire(next, "w"), nil},
			{acquire(next, "wr"), nil},
			{acquire(me, "wr"), []string{"ot h 1"}},
			{release(me, "", ""), nil},
			{acquire(next, "wr"), []string{"ot h 1"}}, // it is the head now
		} {
			f.ask(step.q)
			if got := f.messages(); !slices.Equal(got, step.want) {
				f.Errorf("%+v published %q, want %q", step.q, got, step.want)
			}
		}
	})
}

func TestRepliesToTheHolderSayWhetherOthersWait(t *testing.T) {
	f := onMini(t)
	steps := func(q question, want string) {
		t.Helper()
		if got := f.ask(q).String(); got != want {
			t.Errorf("%+v: %s, want %s", q, got, want)
		}
	}
	steps(acquire(me, "w"), "granted")
	steps(renew(me), "renewed")
	steps(acquire(next, "w"), "queued#1+waiting")
	steps(renew(me), "renewed+waiting")
	steps(acquire(me, "wr"), "granted+waiting")
	f.clock((life + 1) * time.Millisecond)
	steps(renew(me), "renewed") // the place is over
	steps(acquire(next, "wr"), "gone")
}

func TestGrantMessageTellsWhatIsStored(t *testing.T) {
	both(t, func(f *fixture) {
		f.ask(acquire(other, "w"))
		long := acquire(me, "w")
		long.ttl = 20_000
		f.ask(long)
		f.ask(acquire(next, "w"))
		f.messages()
		r := f.ask(release(other, "", ""))
		_, _, till, since := f.state().holder()
		want := fmt.Sprintf("me g 1 %d %d %d 1", f.state().number("f"), till-r.last().now/1000, since)
		if got := f.messages(); len(got) != 1 || got[0] != want {
			f.Errorf("published %q, want %q", got, want)
		}
		f.ask(release(me, "", ""))
		if got := f.messages(); len(got) != 1 || !strings.HasSuffix(got[0], " 0") {
			f.Errorf("published %q, want a grant that says that nobody waits", got)
		}
	})
}

func TestFIFO(t *testing.T) {
	both(t, func(f *fixture) {
		f.ask(acquire("p0:1", "w"))
		for i := 1; i < 20; i++ {
			if got, want := f.ask(acquire(fmt.Sprintf("p%d:1", i), "w")).last().position, int64(i); got != want {
				f.Errorf("p%d is at %d, want %d", i, got, want)
			}
		}
		for i := range 19 {
			f.ask(release(fmt.Sprintf("p%d:1", i), "", ""))
			if got, want := party(f.state().fields["h"]), fmt.Sprintf("p%d:1", i+1); got != want {
				f.Errorf("%s holds, want %s", got, want)
			}
		}
	})
}

func TestEchoCarriesTheCountOfSubscribers(t *testing.T) {
	both(t, func(f *fixture) {
		q := acquire(me, "w")
		q.nonce = "n0nce"
		want := func(flags int64, message string) {
			f.Helper()
			if r := f.ask(q); r.last().flags != flags {
				f.Errorf("%v: flags %d, want %d", r, r.last().flags, flags)
			}
			if got := f.messages(); !slices.Contains(got, message) {
				f.Errorf("published %q, want %q", got, message)
			}
		}
		want(scripts.FlagEchoed, "me e n0nce 0")
		leave := f.subscribe("me")
		want(scripts.FlagEchoed, "me e n0nce 1") // granted, repeated
		f.ask(release(me, "", ""))
		f.ask(acquire(other, "w"))
		want(scripts.FlagEchoed, "me e n0nce 1") // queued
		q.letters = ""
		want(scripts.FlagEchoed, "me e n0nce 1") // busy
		leave()
		want(scripts.FlagEchoed, "me e n0nce 0")
		q = release(me, "w", again)
		q.nonce = "n0nce"
		want(scripts.FlagEchoed, "me e n0nce 0")
	})
}

func TestWaiterWhoseSubscriptionIsGoneIsPassedOver(t *testing.T) {
	both(t, func(f *fixture) {
		leave := f.subscribe("me")
		f.ask(acquire(other, "w"))
		f.ask(acquire(me, "wp"))
		f.ask(acquire(next, "w"))
		leave()
		if got := f.ask(release(other, "", "")).String(); got != "released" {
			f.Errorf("release: %s", got)
		}
		if got, want := f.state().String(), "h=nx:1 p=me:1"; got != want {
			f.Fatalf("stored %s, want %s", got, want)
		}

		// It comes back, to its old place in front of whoever came later.
		f.ask(acquire("lt:1", "w"))
		if got := f.ask(acquire(me, "wrp")).String(); got != "queued#1+waiting" {
			f.Errorf("back: %s", got)
		}
		if got, want := f.state().String(), "h=nx:1 q=me:1 q=lt:1"; got != want {
			f.Fatalf("stored %s, want %s", got, want)
		}
		// And is not passed over again, though it says that it may be, and is gone again.
		leave = f.subscribe("me")
		f.ask(acquire(me, "wrp"))
		leave()
		f.ask(release(next, "", ""))
		if got, want := f.state().String(), "h=me:1 q=lt:1"; got != want {
			f.Errorf("stored %s, want %s", got, want)
		}
	})
}

func TestOnlyAWaiterThatTheServerSawIsPassedOver(t *testing.T) {
	for _, tc := range []struct {
		name, letters   string
		before, at, now bool // subscribed when it asks, when it asks again, when it is its turn
		granted         bool
	}{
		{"never-subscribed", "w", false, false, false, true},
		{"did-not-say", "w", true, true, false, true},
		{"still-there", "wp", true, true, true, true},
		{"gone", "wp", true, true, false, false},
		{"gone-before-it-asked-again", "wp", true, false, false, true}, // what it believes is of another server
		{"says-so-to-a-server-that-never-saw-it", "wp", false, false, false, true},
		{"came-later", "wp", false, true, false, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			both(t, func(f *fixture) {
				var leave func()
				set := func(on bool) {
					switch {
					case on && leave == nil:
						leave = f.subscribe("me")
					case !on && leave != nil:
						leave()
						leave = nil
					}
				}
				f.ask(acquire(other, "w"))
				set(tc.before)
				f.ask(acquire(me, tc.letters))
				f.ask(acquire(next, "w"))
				set(tc.at)
				f.ask(acquire(me, tc.letters+"r"))
				set(tc.now)
				f.ask(release(other, "", ""))
				want := "h=nx:1 p=me:1"
				if tc.granted {
					want = "h=me:1 q=nx:1"
				}
				if got := f.state().String(); got != want {
					f.Errorf("stored %s, want %s", got, want)
				}
			})
		})
	}
}

func TestPassedOverCanLeave(t *testing.T) {
	for _, letters := range []string{"", "t"} {
		both(t, func(f *fixture) {
			leave := f.subscribe("me")
			f.ask(acquire(other, "w"))
			f.ask(acquire(me, "wp"))
			leave()
			f.ask(release(other, "", ""))
			if got := f.ask(release(me, letters, "")).String(); got != "withdrawn" {
				f.Errorf("release: %s", got)
			}
			want := map[string]string{"": "gone", "t": "ended"}[letters]
			if got := f.ask(acquire(me, "wr")).String(); got != want {
				f.Errorf("late acquire: %s, want %s", got, want)
			}
		})
	}
}

func TestReturnedWaitersKeepTheirOrder(t *testing.T) {
	f := onMini(t)
	f.queue(9, 8)
	f.holding(other, 0, ttl)
	f.noted(me, "p3", 1, retention)
	f.noted(next, "p5", 2, retention)
	for _, token := range []string{"lt:1", next, me} {
		f.ask(acquire(token, "w"))
	}
	if got, want := f.state().String(), "h=ot:1 q=me:1 q=nx:1 q=lt:1"; got != want {
		t.Errorf("stored %s, want %s", got, want)
	}
	f.ask(release(next, "", "")) // it has a place again: none is left
	if got, want := f.state().String(), "h=ot:1 q=me:1 q=lt:1"; got != want {
		t.Errorf("stored %s, want %s", got, want)
	}
}

func TestTombstoneStopsALateAcquireOfAnEndedGeneration(t *testing.T) {
	both(t, func(f *fixture) {
		for _, late := range []string{"w", "wr", "", "r"} {
			token := "me:" + late + "9"
			f.ask(release(token, "t", ""))
			if got := f.ask(acquire(token, late)).String(); got != "ended" {
				f.Errorf("acquire %q after its end: %s", late, got)
			}
		}
		if h := f.state().fields["h"]; h != "" {
			f.Errorf("held by %s", h)
		}
	})
}

func TestNotesAreSweptAndDoNotPileUp(t *testing.T) {
	f := onMini(t)
	for i := range 10 {
		f.ask(release(fmt.Sprintf("a%d:1", i), "t", ""))
	}
	f.ask(release("a0:1", "t", "")) // repeated: it has one
	if got := len(f.state().fields); got != 2+2+20 {
		t.Errorf("%d fields, want two for each tombstone and four more", got)
	}
	f.clock((retention - 1) * time.Millisecond)
	if got := f.ask(acquire("a0:1", "w")).String(); got != "ended" {
		t.Errorf("just before its time is over the tombstone is %s", got)
	}
	f.ask(acquire(other, "w")) // keeps the key
	f.clock(retention * time.Millisecond)
	for i := range 4 {
		f.ask(release(fmt.Sprintf("b%d:1", i), "t", ""))
	}
	if got := f.state().String(); got != "h=ot:1 x=b0:1 x=b1:1 x=b2:1 x=b3:1" {
		t.Errorf("stored %s", got)
	}
}

func TestNotesFromAClockThatWasAheadDoNotHoldUpTheSweep(t *testing.T) {
	f := onMini(t)
	f.noted(next, "x", 1, hour)
	f.ask(release(me, "t", ""))
	if got := f.state().String(); got != "x=me:1" {
		t.Errorf("stored %s", got)
	}
}

func TestSweepLeavesAWaiterThatCameBack(t *testing.T) {
	f := onMini(t)
	f.holding(other, 0, ttl)
	f.noted(me, "p1", 1, 1000)
	f.queue(2, 1)
	f.ask(acquire(me, "w"))
	f.clock(2 * time.Second)
	f.ask(release(next, "t", ""))
	if got, want := f.state().String(), "h=ot:1 q=me:1 x=nx:1"; got != want {
		t.Errorf("stored %s, want %s", got, want)
	}
}

func TestPlacesAheadOfTheClockAreCut(t *testing.T) {
	f := onMini(t)
	f.holding(other, -hour, hour+ttl)
	f.placed(next, 1, hour+life, false)
	f.placed(me, 2, hour+life, false)
	f.queue(1, 2)
	f.ask(acquire("lt:1", "w")) // cuts the lease and the head
	f.clock((ttl + 1) * time.Millisecond)
	f.setBack = true // the seeds are as if
	f.ask(acquire("lt:2", "w"))
	// nx has not been heard of since; me was behind it and is cut only now.
	if got := f.state().String(); !strings.HasPrefix(got, "h=me:1 ") {
		t.Errorf("stored %s, want me to hold", got)
	}
}
