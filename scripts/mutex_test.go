package scripts_test

import (
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/e51fe0e6/dsync/scripts"
)

// verbs are the columns of the table below.
var verbs = map[string]question{
	"wait":     acquire(me, "w"),
	"try":      acquire(me, ""),
	"wait-on":  acquire(me, "wr"),
	"try-on":   acquire(me, "r"),
	"renew":    renew(me),
	"release":  release(me, "", ""),
	"end":      release(me, "t", ""),
	"exchange": release(me, "w", again),
	"inspect":  {verb: "inspect"},
}

// TestEveryVerbFromEveryState runs each verb twice in a row, on both servers. A line is what came of it: reply | what is stored |
// messages. What follows the arrow is what came of the second time; "same" is the first again, without the messages that only
// news deserve.
func TestEveryVerbFromEveryState(t *testing.T) {
	both(t, func(f *fixture) {
		every(f.T, f, func(f *fixture, seed func(f *fixture), verb, want string) {
			if got := f.twice(seed, verbs[verb]); got != want {
				f.Errorf("\n got %s\nwant %s", got, want)
			}
		})
	})
}

// twice seeds a state, runs a verb two times and tells what came of it.
func (f *fixture) twice(seed func(f *fixture), q question) string {
	f.Helper()
	seed(f)
	f.fence = f.state().number("f")
	first, second := f.cell(q), f.cell(q)
	if second != first {
		return first + " -> " + second
	}
	return first
}

// cell runs a verb and tells what came of it.
func (f *fixture) cell(q question) string {
	f.Helper()
	r := f.ask(q)
	var heard []string
	for _, m := range f.messages() {
		word := strings.Fields(m)
		kind := map[string]string{"g": "grant", "h": "hint", "e": "echo"}[word[1]]
		heard = append(heard, kind+" "+word[0]+":"+word[2])
	}
	parts := append([]string{r.String(), f.state().String()}, heard...)
	return strings.Join(parts, " | ")
}

// cells reads the lines of a row: "<verb>: <cell>".
func cells(text string) map[string]string {
	found := map[string]string{}
	for line := range strings.Lines(text) {
		verb, cell, _ := strings.Cut(strings.TrimSpace(line), ": ")
		found[verb] = strings.TrimSpace(cell)
	}
	return found
}

const hour = 3_600_000

var states = []struct {
	name string
	seed func(f *fixture)
	want string
}{
	{"nothing", func(*fixture) {}, `
		wait: granted | h=me:1
		wait-on: gone | none
		try: granted | h=me:1
		try-on: gone | none
		renew: not-yours | none
		release: not-yours | none
		end: not-yours | x=me:1
		exchange: not-yours,granted | h=me:2
		inspect: inspected | none`},
	{"free", func(f *fixture) { f.write(0) }, `
		wait: granted | h=me:1
		wait-on: gone | free
		try: granted | h=me:1
		try-on: gone | free
		renew: not-yours | free
		release: not-yours | free
		end: not-yours | x=me:1
		exchange: not-yours,granted | h=me:2
		inspect: inspected | free`},
	{"mine", func(f *fixture) { f.holding(me, 1000, 9000) }, `
		wait: granted | h=me:1
		wait-on: granted | h=me:1
		try: granted | h=me:1
		try-on: granted | h=me:1
		renew: renewed | h=me:1
		release: released | free -> not-yours | free
		end: released | x=me:1 -> not-yours | x=me:1
		exchange: released,granted | h=me:2 -> not-yours,granted | h=me:2
		inspect: inspected | h=me:1`},
	{"mine-with-a-waiter", func(f *fixture) {
		f.holding(me, 1000, 9000)
		f.placed(next, 1, life, false)
		f.queue(1, 1)
	}, `
		wait: granted+waiting | h=me:1 q=nx:1
		wait-on: granted+waiting | h=me:1 q=nx:1
		try: granted+waiting | h=me:1 q=nx:1
		try-on: granted+waiting | h=me:1 q=nx:1
		renew: renewed+waiting | h=me:1 q=nx:1
		release: released | h=nx:1 | grant nx:1 -> not-yours | h=nx:1
		end: released | h=nx:1 x=me:1 | grant nx:1 -> not-yours | h=nx:1 x=me:1
		exchange: released+waiting,queued#1+waiting | h=nx:1 q=me:2 | grant nx:1 -> not-yours+waiting,queued#1+waiting | h=nx:1 q=me:2 | hint nx:1
		inspect: inspected#1+waiting | h=me:1 q=nx:1`},
	{"mine-expired", func(f *fixture) { f.holding(me, 11_000, -1000) }, `
		wait: granted | h=me:1
		wait-on: gone | h=me:1
		try: granted | h=me:1
		try-on: gone | h=me:1
		renew: not-yours | h=me:1
		release: released | free -> not-yours | free
		end: released | x=me:1 -> not-yours | x=me:1
		exchange: released,granted | h=me:2 -> not-yours,granted | h=me:2
		inspect: inspected | h=me:1`},
	{"mine-expired-with-a-waiter", func(f *fixture) {
		f.holding(me, 11_000, -1000)
		f.placed(next, 1, life, false)
		f.queue(1, 1)
	}, `
		wait: queued#1+waiting | h=nx:1 q=me:1 | grant nx:1 -> queued#1+waiting | h=nx:1 q=me:1 | hint nx:1
		wait-on: gone | h=nx:1 | grant nx:1 -> gone | h=nx:1
		try: busy | h=nx:1 | grant nx:1 -> busy | h=nx:1
		try-on: gone | h=nx:1 | grant nx:1 -> gone | h=nx:1
		renew: not-yours | h=nx:1 | grant nx:1 -> not-yours | h=nx:1
		release: released | h=nx:1 | grant nx:1 -> not-yours | h=nx:1
		end: released | h=nx:1 x=me:1 | grant nx:1 -> not-yours | h=nx:1 x=me:1
		exchange: released+waiting,queued#1+waiting | h=nx:1 q=me:2 | grant nx:1 -> not-yours+waiting,queued#1+waiting | h=nx:1 q=me:2 | hint nx:1
		inspect: inspected#1+waiting | h=me:1 q=nx:1`},
	{"anothers", func(f *fixture) { f.holding(other, 1000, 9000) }, `
		wait: queued#1+waiting | h=ot:1 q=me:1 | hint ot:1
		wait-on: gone | h=ot:1
		try: busy | h=ot:1
		try-on: gone | h=ot:1
		renew: not-yours | h=ot:1
		release: not-yours | h=ot:1
		end: not-yours | h=ot:1 x=me:1
		exchange: not-yours,queued#1+waiting | h=ot:1 q=me:2 | hint ot:1 -> not-yours+waiting,queued#1+waiting | h=ot:1 q=me:2 | hint ot:1
		inspect: inspected | h=ot:1`},
	{"anothers-with-a-waiter", func(f *fixture) {
		f.holding(other, 1000, 9000)
		f.placed(next, 1, life, false)
		f.queue(1, 1)
	}, `
		wait: queued#2+waiting | h=ot:1 q=nx:1 q=me:1
		wait-on: gone+waiting | h=ot:1 q=nx:1
		try: busy+waiting | h=ot:1 q=nx:1
		try-on: gone+waiting | h=ot:1 q=nx:1
		renew: not-yours+waiting | h=ot:1 q=nx:1
		release: not-yours+waiting | h=ot:1 q=nx:1
		end: not-yours+waiting | h=ot:1 q=nx:1 x=me:1
		exchange: not-yours+waiting,queued#2+waiting | h=ot:1 q=nx:1 q=me:2
		inspect: inspected#1+waiting | h=ot:1 q=nx:1`},
	{"anothers-expired", func(f *fixture) { f.holding(other, 11_000, -1000) }, `
		wait: granted | h=me:1
		wait-on: gone | h=ot:1
		try: granted | h=me:1
		try-on: gone | h=ot:1
		renew: not-yours | h=ot:1
		release: not-yours | h=ot:1
		end: not-yours | h=ot:1 x=me:1
		exchange: not-yours,granted | h=me:2
		inspect: inspected | h=ot:1`},
	{"anothers-expired-with-a-waiter", func(f *fixture) {
		f.holding(other, 11_000, -1000)
		f.placed(next, 1, life, false)
		f.queue(1, 1)
	}, `
		wait: queued#1+waiting | h=nx:1 q=me:1 | grant nx:1 -> queued#1+waiting | h=nx:1 q=me:1 | hint nx:1
		wait-on: gone | h=nx:1 | grant nx:1 -> gone | h=nx:1
		try: busy | h=nx:1 | grant nx:1 -> busy | h=nx:1
		try-on: gone | h=nx:1 | grant nx:1 -> gone | h=nx:1
		renew: not-yours | h=nx:1 | grant nx:1 -> not-yours | h=nx:1
		release: not-yours | h=nx:1 | grant nx:1 -> not-yours | h=nx:1
		end: not-yours | h=nx:1 x=me:1 | grant nx:1 -> not-yours | h=nx:1 x=me:1
		exchange: not-yours+waiting,queued#1+waiting | h=nx:1 q=me:2 | grant nx:1 -> not-yours+waiting,queued#1+waiting | h=nx:1 q=me:2 | hint nx:1
		inspect: inspected#1+waiting | h=ot:1 q=nx:1`},
	{"me-first", func(f *fixture) {
		f.holding(other, 1000, 9000)
		f.placed(me, 5, life, false)
		f.placed(next, 6, life, false)
		f.queue(5, 6)
	}, `
		wait: queued#1+waiting | h=ot:1 q=me:1 q=nx:1 | hint ot:1
		wait-on: queued#1+waiting | h=ot:1 q=me:1 q=nx:1 | hint ot:1
		try: busy+waiting | h=ot:1 q=me:1 q=nx:1
		try-on: busy+waiting | h=ot:1 q=me:1 q=nx:1
		renew: not-yours+waiting | h=ot:1 q=me:1 q=nx:1
		release: withdrawn+waiting | h=ot:1 q=nx:1 -> not-yours+waiting | h=ot:1 q=nx:1
		end: withdrawn+waiting | h=ot:1 q=nx:1 x=me:1 -> not-yours+waiting | h=ot:1 q=nx:1 x=me:1
		exchange: withdrawn+waiting,queued#2+waiting | h=ot:1 q=nx:1 q=me:2 -> not-yours+waiting,queued#2+waiting | h=ot:1 q=nx:1 q=me:2
		inspect: inspected#2+waiting | h=ot:1 q=me:1 q=nx:1`},
	{"me-second", func(f *fixture) {
		f.holding(other, 1000, 9000)
		f.placed(next, 5, life, false)
		f.placed(me, 6, life, false)
		f.queue(5, 6)
	}, `
		wait: queued#2+waiting | h=ot:1 q=nx:1 q=me:1
		wait-on: queued#2+waiting | h=ot:1 q=nx:1 q=me:1
		try: busy+waiting | h=ot:1 q=nx:1 q=me:1
		try-on: busy+waiting | h=ot:1 q=nx:1 q=me:1
		renew: not-yours+waiting | h=ot:1 q=nx:1 q=me:1
		release: withdrawn+waiting | h=ot:1 q=nx:1 -> not-yours+waiting | h=ot:1 q=nx:1
		end: withdrawn+waiting | h=ot:1 q=nx:1 x=me:1 -> not-yours+waiting | h=ot:1 q=nx:1 x=me:1
		exchange: withdrawn+waiting,queued#3+waiting | h=ot:1 q=nx:1 q=me:2 -> not-yours+waiting,queued#3+waiting | h=ot:1 q=nx:1 q=me:2
		inspect: inspected#2+waiting | h=ot:1 q=nx:1 q=me:1`},
	{"me-first-holder-expired", func(f *fixture) {
		f.holding(other, 11_000, -1000)
		f.placed(me, 5, life, false)
		f.placed(next, 6, life, false)
		f.queue(5, 6)
	}, `
		wait: granted+waiting | h=me:1 q=nx:1
		wait-on: granted+waiting | h=me:1 q=nx:1
		try: granted+waiting | h=me:1 q=nx:1
		try-on: granted+waiting | h=me:1 q=nx:1
		renew: not-yours+waiting | h=me:1 q=nx:1 | grant me:1 -> renewed+waiting | h=me:1 q=nx:1
		release: withdrawn | h=nx:1 | grant nx:1 -> not-yours | h=nx:1
		end: withdrawn | h=nx:1 x=me:1 | grant nx:1 -> not-yours | h=nx:1 x=me:1
		exchange: withdrawn+waiting,queued#1+waiting | h=nx:1 q=me:2 | grant nx:1 -> not-yours+waiting,queued#1+waiting | h=nx:1 q=me:2 | hint nx:1
		inspect: inspected#2+waiting | h=ot:1 q=me:1 q=nx:1`},
	{"me-second-holder-expired", func(f *fixture) {
		f.holding(other, 11_000, -1000)
		f.placed(next, 5, life, false)
		f.placed(me, 6, life, false)
		f.queue(5, 6)
	}, `
		wait: queued#1+waiting | h=nx:1 q=me:1 | grant nx:1 -> queued#1+waiting | h=nx:1 q=me:1 | hint nx:1
		wait-on: queued#1+waiting | h=nx:1 q=me:1 | grant nx:1 -> queued#1+waiting | h=nx:1 q=me:1 | hint nx:1
		try: busy+waiting | h=nx:1 q=me:1 | grant nx:1 -> busy+waiting | h=nx:1 q=me:1
		try-on: busy+waiting | h=nx:1 q=me:1 | grant nx:1 -> busy+waiting | h=nx:1 q=me:1
		renew: not-yours+waiting | h=nx:1 q=me:1 | grant nx:1 -> not-yours+waiting | h=nx:1 q=me:1
		release: withdrawn+waiting | h=nx:1 | grant nx:1 -> not-yours+waiting | h=nx:1
		end: withdrawn+waiting | h=nx:1 x=me:1 | grant nx:1 -> not-yours+waiting | h=nx:1 x=me:1
		exchange: withdrawn+waiting,queued#2+waiting | h=nx:1 q=me:2 | grant nx:1 -> not-yours+waiting,queued#1+waiting | h=nx:1 q=me:2 | hint nx:1
		inspect: inspected#2+waiting | h=ot:1 q=nx:1 q=me:1`},
	{"me-second-behind-the-dead", func(f *fixture) {
		f.holding(other, 1000, 9000)
		f.placed(next, 5, -1, false)
		f.placed(me, 6, life, false)
		f.queue(5, 6)
	}, `
		wait: queued#1+waiting | h=ot:1 q=me:1 | hint ot:1
		wait-on: queued#1+waiting | h=ot:1 q=me:1 | hint ot:1
		try: busy+waiting | h=ot:1 q=nx:1 q=me:1
		try-on: busy+waiting | h=ot:1 q=nx:1 q=me:1
		renew: not-yours+waiting | h=ot:1 q=nx:1 q=me:1
		release: withdrawn+waiting | h=ot:1 q=nx:1 -> not-yours+waiting | h=ot:1 q=nx:1
		end: withdrawn+waiting | h=ot:1 q=nx:1 x=me:1 -> not-yours+waiting | h=ot:1 q=nx:1 x=me:1
		exchange: withdrawn+waiting,queued#1+waiting | h=ot:1 q=me:2 | hint ot:1 -> not-yours+waiting,queued#1+waiting | h=ot:1 q=me:2 | hint ot:1
		inspect: inspected#2+waiting | h=ot:1 q=nx:1 q=me:1`},
	{"ended", func(f *fixture) { f.noted(me, "x", 1, retention) }, `
		wait: ended | x=me:1
		wait-on: ended | x=me:1
		try: ended | x=me:1
		try-on: ended | x=me:1
		renew: not-yours | x=me:1
		release: not-yours | x=me:1
		end: not-yours | x=me:1
		exchange: not-yours,granted | h=me:2 x=me:1
		inspect: inspected | x=me:1`},
	{"ended-holder-expired-with-a-waiter", func(f *fixture) {
		f.holding(other, 11_000, -1000)
		f.placed(next, 1, life, false)
		f.queue(1, 1)
		f.noted(me, "x", 1, retention)
	}, `
		wait: ended | h=nx:1 x=me:1 | grant nx:1 -> ended | h=nx:1 x=me:1
		wait-on: ended | h=nx:1 x=me:1 | grant nx:1 -> ended | h=nx:1 x=me:1
		try: ended | h=nx:1 x=me:1 | grant nx:1 -> ended | h=nx:1 x=me:1
		try-on: ended | h=nx:1 x=me:1 | grant nx:1 -> ended | h=nx:1 x=me:1
		renew: not-yours | h=nx:1 x=me:1 | grant nx:1 -> not-yours | h=nx:1 x=me:1
		release: not-yours | h=nx:1 x=me:1 | grant nx:1 -> not-yours | h=nx:1 x=me:1
		end: not-yours | h=nx:1 x=me:1 | grant nx:1 -> not-yours | h=nx:1 x=me:1
		exchange: not-yours+waiting,queued#1+waiting | h=nx:1 q=me:2 x=me:1 | grant nx:1 -> not-yours+waiting,queued#1+waiting | h=nx:1 q=me:2 x=me:1 | hint nx:1
		inspect: inspected#1+waiting | h=ot:1 q=nx:1 x=me:1`},
	{"passed-over", func(f *fixture) {
		f.holding(other, 1000, 9000)
		f.placed(next, 6, life, false)
		f.queue(6, 6)
		f.noted(me, "p5", 1, retention)
	}, `
		wait: queued#1+waiting | h=ot:1 q=me:1 q=nx:1 | hint ot:1
		wait-on: queued#1+waiting | h=ot:1 q=me:1 q=nx:1 | hint ot:1
		try: busy+waiting | h=ot:1 q=nx:1 p=me:1
		try-on: busy+waiting | h=ot:1 q=nx:1 p=me:1
		renew: not-yours+waiting | h=ot:1 q=nx:1 p=me:1
		release: withdrawn+waiting | h=ot:1 q=nx:1 -> not-yours+waiting | h=ot:1 q=nx:1
		end: withdrawn+waiting | h=ot:1 q=nx:1 x=me:1 -> not-yours+waiting | h=ot:1 q=nx:1 x=me:1
		exchange: withdrawn+waiting,queued#2+waiting | h=ot:1 q=nx:1 q=me:2 -> not-yours+waiting,queued#2+waiting | h=ot:1 q=nx:1 q=me:2
		inspect: inspected#1+waiting | h=ot:1 q=nx:1 p=me:1`},
	{"passed-over-and-free", func(f *fixture) {
		f.queue(6, 5)
		f.noted(me, "p5", 1, retention)
	}, `
		wait: granted | h=me:1
		wait-on: granted | h=me:1
		try: granted | h=me:1
		try-on: granted | h=me:1
		renew: not-yours | p=me:1
		release: withdrawn | free -> not-yours | free
		end: withdrawn | x=me:1 -> not-yours | x=me:1
		exchange: withdrawn,granted | h=me:2 -> not-yours,granted | h=me:2
		inspect: inspected | p=me:1`},
	{"clock-set-back", func(f *fixture) { // an hour ago, as seen from the deadlines
		f.holding(other, -hour+1000, hour+9000)
		f.placed(next, 1, hour+life, false)
		f.queue(1, 1)
	}, `
		wait: queued#2+waiting | h=ot:1 q=nx:1 q=me:1
		wait-on: gone+waiting | h=ot:1 q=nx:1
		try: busy+waiting | h=ot:1 q=nx:1
		try-on: gone+waiting | h=ot:1 q=nx:1
		renew: not-yours+waiting | h=ot:1 q=nx:1
		release: not-yours+waiting | h=ot:1 q=nx:1
		end: not-yours+waiting | h=ot:1 q=nx:1 x=me:1
		exchange: not-yours+waiting,queued#2+waiting | h=ot:1 q=nx:1 q=me:2
		inspect: inspected#1+waiting | h=ot:1 q=nx:1`},
	{"clock-set-back-under-me", func(f *fixture) { f.holding(me, -hour+1000, hour+9000) }, `
		wait: granted | h=me:1
		wait-on: granted | h=me:1
		try: granted | h=me:1
		try-on: granted | h=me:1
		renew: renewed | h=me:1
		release: released | free -> not-yours | free
		end: released | x=me:1 -> not-yours | x=me:1
		exchange: released,granted | h=me:2 -> not-yours,granted | h=me:2
		inspect: inspected | h=me:1`},
	{"all-expired", func(f *fixture) { // the clock was set forward
		f.holding(other, hour, -hour)
		f.placed(next, 1, -hour, false)
		f.placed(me, 2, -hour, false)
		f.queue(1, 2)
	}, `
		wait: granted | h=me:1
		wait-on: granted | h=me:1
		try: granted | h=me:1
		try-on: granted | h=me:1
		renew: not-yours | h=ot:1
		release: withdrawn | h=ot:1 -> not-yours | h=ot:1
		end: withdrawn | h=ot:1 x=me:1 -> not-yours | h=ot:1 x=me:1
		exchange: withdrawn+waiting,granted | h=me:2 -> not-yours,granted | h=me:2
		inspect: inspected#2+waiting | h=ot:1 q=nx:1 q=me:1`},
	{"a-string", func(f *fixture) { f.do("SET", f.key, "v") }, `
		wait: error | string
		wait-on: error | string
		try: error | string
		try-on: error | string
		renew: error | string
		release: error | string
		end: error | string
		exchange: error | string
		inspect: error | string`},
	{"a-strangers-hash", func(f *fixture) { f.do("HSET", f.key, "h", "1", "f", "2", "a", "3", "w"+me, "4") }, `
		wait: error | h=1 ?wme:1=4
		wait-on: error | h=1 ?wme:1=4
		try: error | h=1 ?wme:1=4
		try-on: error | h=1 ?wme:1=4
		renew: error | h=1 ?wme:1=4
		release: error | h=1 ?wme:1=4
		end: error | h=1 ?wme:1=4
		exchange: error | h=1 ?wme:1=4
		inspect: error | h=1 ?wme:1=4`},
	{"a-strangers-hash-with-x", func(f *fixture) { f.do("HSET", f.key, "x", "1", "y", "2") }, `
		wait: error | free
		wait-on: error | free
		try: error | free
		try-on: error | free
		renew: error | free
		release: error | free
		end: error | free
		exchange: error | free
		inspect: error | free`},
	{"a-strangers-words", func(f *fixture) { f.do("HSET", f.key, "x", "1", "f", "none") }, `
		wait: error | free
		wait-on: error | free
		try: error | free
		try-on: error | free
		renew: error | free
		release: error | free
		end: error | free
		exchange: error | free
		inspect: error | free`},
}

func TestForeignKeysAreRefusedAsWrongtype(t *testing.T) {
	both(t, func(f *fixture) {
		for _, fields := range [][]string{
			{"h", "1"},
			{"x", "1", "y", "2"},
			{"f", "1", "h", "2", "w" + me, "3"},
			{"x", "1", "f", "none"},
			{"x", "1", "f", "1", "z", "none"},
			{"x", "1", "f", "1", "h", "none"},
		} {
			f.do("DEL", f.key)
			f.do(append([]string{"HSET", f.key}, fields...)...)
			for verb, q := range verbs {
				if r := f.ask(q); !strings.Contains(r.err, "WRONGTYPE") && verb != "inspect" && verb != "release" {
					f.Errorf("%s on %v: %v, want WRONGTYPE", verb, fields, r)
				}
			}
		}
	})
}

func TestFenceCountsWhatAnExpiredHoldMayHaveUsed(t *testing.T) {
	f := onMini(t)
	first := f.ask(acquire(other, ""))
	f.clock(ttl * time.Millisecond)
	second := f.ask(acquire(me, ""))
	// One fence for each microsecond from the grant to the deadline, and the next: not only max(last + 1, time).
	if got, least := second.last().fence, first.last().fence+ttl*1000-456; got <= least {
		f.Errorf("fence %d after %d, want more than %d", got, first.last().fence, least)
	}
}

func TestFenceCountsExpiredHoldWhoseFencesRanAheadOfTheClock(t *testing.T) {
	both(t, func(f *fixture) {
		ahead := f.micros() + hour*1000
		f.holding(other, 11_000, -1000)
		f.write(0, "f", strconv.FormatInt(ahead, 10))
		_, _, till, since := f.state().holder()
		if got, want := f.ask(acquire(me, "")).last().fence, ahead+till*1000-since+1; got != want {
			f.Errorf("fence %d, want %d", got, want)
		}
	})
}

func TestFenceCountsATimeThatTheClockWentBackOver(t *testing.T) {
	f := onMini(t)
	first := f.ask(acquire(other, "")).last().fence
	f.clock(-time.Hour) // an hour back; the holder goes on for its ttl
	if r := f.ask(acquire(me, "w")); r.String() != "queued#1+waiting" || r.last().remaining != ttl {
		f.Fatalf("behind a holder with a deadline ahead: %v %+v", r, r.last())
	}
	for i := range 3 { // renewals
		f.clock(-time.Hour + time.Duration(i+1)*3*time.Second)
		f.ask(renew(other))
	}
	f.clock(-time.Hour + 20*time.Second)
	used := first + 19_000_000 // the holder may have passed it on once in each microsecond of 9 s + its ttl
	if r := f.ask(acquire(next, "")); r.last().status != scripts.Granted || r.last().fence <= used {
		f.Errorf("%v with fence %d, want granted with more than %d", r, r.last().fence, used)
	}
}

func TestFenceSurvivesFlush(t *testing.T) {
	both(t, func(f *fixture) {
		for i := range 3 {
			if f.mini != nil {
				f.clock(time.Duration(i) * time.Microsecond)
			}
			f.ask(acquire(me, "")) // the invariants want a higher fence each time
			f.do("DEL", f.key)     // FLUSHALL for this name; the real server is not ours alone
		}
	})
}

func TestReleaseCarriesTheLastFenceUsed(t *testing.T) {
	both(t, func(f *fixture) {
		fence := f.ask(acquire(me, "")).last().fence
		used := fence + 1_000_000_000
		q := release(me, "", "")
		q.used = used
		if r := f.ask(q); r.last().fence != used {
			f.Errorf("released with fence %d, want %d", r.last().fence, used)
		}
		if r := f.ask(acquire(other, "")); r.last().fence != used+1 {
			f.Errorf("granted with fence %d, want %d", r.last().fence, used+1)
		}
		late := release(me, "t", "")
		late.used = used + 1000
		if r := f.ask(late); r.last().fence != used+1 {
			f.Errorf("a late release moved the fence to %d, want %d", r.last().fence, used+1)
		}
	})
}

func TestRepeatedAcquireDoesNotExtend(t *testing.T) {
	f := onMini(t)
	f.ask(acquire(me, "w"))
	f.clock(4 * time.Second)
	if r := f.ask(acquire(me, "wr")); r.last().remaining != ttl-4000 {
		f.Errorf("remaining %d ms, want %d", r.last().remaining, ttl-4000)
	}
}

func TestRenewNeverShortens(t *testing.T) {
	both(t, func(f *fixture) {
		long := acquire(me, "")
		long.ttl = 50_000
		f.ask(long)
		_, _, before, _ := f.state().holder()
		f.ask(renew(me))
		if _, length, after, _ := f.state().holder(); after < before || length != 50_000 {
			f.Errorf("the deadline went from %d to %d with ttl %d", before, after, length)
		}
	})
}

func TestRenewRaisesTheExpiryOfTheKey(t *testing.T) {
	f := onMini(t)
	f.ask(acquire(me, ""))
	before := f.state()
	f.clock(9 * time.Second)
	f.ask(renew(me)) // the invariants want x and the native expiry alike, and behind the lease
	if after := f.state(); after.native != before.native+9000 {
		f.Errorf("the key ended at %d, and now at %d, want 9 s later", before.native, after.native)
	}
}

func TestShorterTTLNeverShortensTheExpiryOfTheKey(t *testing.T) {
	both(t, func(f *fixture) {
		long := acquire(other, "")
		long.ttl = 300_000
		f.ask(long)
		before := f.state().native
		short := acquire(me, "w")
		short.ttl, short.life = 100, 99
		f.ask(short)
		f.ask(release(other, "t", ""))
		f.ask(release(me, "", ""))
		if after := f.state().native; after != before {
			f.Errorf("the key ended at %d, and now at %d", before, after)
		}
	})
}

func TestPlaceRaisesTheExpiryOfTheKey(t *testing.T) {
	both(t, func(f *fixture) {
		f.ask(acquire(other, ""))
		long := acquire(me, "w")
		long.ttl, long.life = 300_000, 200_000
		r := f.ask(long)
		if got, want := f.state().native, r.last().now/1000+500_000; got != want {
			f.Errorf("the key ends at %d, want %d", got, want)
		}
	})
}

func TestLongerTTLStretchesTheRetention(t *testing.T) {
	both(t, func(f *fixture) {
		long := acquire(me, "")
		long.ttl = 300_000
		r := f.ask(long)
		if got, want := f.state().native, r.last().now/1000+600_000; got != want {
			f.Errorf("the key ends at %d, want %d", got, want)
		}
	})
}

func TestNothingIsLeftAfterTheRetention(t *testing.T) {
	f := onMini(t)
	f.ask(acquire(me, ""))
	f.ask(acquire(next, "w"))
	f.ask(release(me, "t", ""))
	f.ask(release(next, "t", ""))
	f.clock((ttl + retention + life + 1) * time.Millisecond)
	if s := f.state(); s.kind != "none" {
		f.Errorf("left: %v", s.fields)
	}
}

func TestInspectListsHolderAndQueue(t *testing.T) {
	both(t, func(f *fixture) {
		f.holding(other, 1000, 9000)
		for i := 1; i <= 150; i++ {
			if i != 7 { // a hole
				f.placed("w"+strconv.Itoa(i)+":1", i, life, false)
			}
		}
		f.queue(1, 150)
		before := f.state()
		r := f.ask(question{verb: "inspect"})
		if a := r.last(); a.status != scripts.Inspected || a.position != 150 || a.fence != before.number("f") || a.now == 0 {
			f.Errorf("inspected: %+v", a)
		}
		if r.rest[0] != before.fields["h"] || r.rest[1] != int64(100) || len(r.rest) != 102 {
			f.Fatalf("holder %q, %v places listed, %d elements", r.rest[0], r.rest[1], len(r.rest))
		}
		if r.rest[2] != before.fields["q1"] || r.rest[8] != before.fields["q8"] || r.rest[101] != before.fields["q101"] {
			f.Errorf("the places are not in order: %q, %q, %q", r.rest[2], r.rest[8], r.rest[101])
		}
	})
}

func TestInspectOfNothing(t *testing.T) {
	both(t, func(f *fixture) {
		r := f.ask(question{verb: "inspect"})
		if a := r.last(); a.fence != 0 || a.position != 0 || len(r.rest) != 2 || r.rest[0] != "" || r.rest[1] != int64(0) {
			f.Errorf("inspected: %+v %v", a, r.rest)
		}
	})
}
