package claim

import (
	"strconv"
	"testing"
	"time"
)

// counted returns a configuration with generations that cost nothing, so that a benchmark sees the transitions alone.
func counted() Config {
	const ready = 1024
	tokens := make([]string, ready)
	for i := range tokens {
		tokens[i] = strconv.Itoa(i)
	}
	n := 0
	return Config{
		Generation: func() string {
			n++
			return tokens[n%ready]
		},
		Jitter: func() float64 { return 0 },
		Budget: 30 * time.Second,
	}
}

// One Lock and Unlock of a free lock: two commands and their answers.
func BenchmarkUncontended(b *testing.B) {
	c := New(counted())
	c.Subscribed(0, Ready)
	now := Time(0)
	r := Request{TTL: 10 * time.Second, Renew: true}
	b.ReportAllocs()
	for b.Loop() {
		now += time.Microsecond
		c.Request(now, &r)
		cmd := c.Actions()[0].Cmd
		c.Reply(now, cmd, Reply{Ask: Answer{Status: Granted, Fence: int64(now), Remaining: r.TTL}})
		c.Actions()
		c.Release(now, &r)
		cmd = c.Actions()[0].Cmd
		c.Reply(now, cmd, Reply{End: Answer{Status: Released}})
		c.Actions()
		c.Next()
	}
}

// A lock that passes between two goroutines of the process: no command.
func BenchmarkLocalHandOver(b *testing.B) {
	c := New(counted())
	c.Subscribed(0, Ready)
	now := Time(0)
	rs := [2]Request{}
	for i := range rs {
		rs[i] = Request{TTL: time.Hour, Renew: true}
	}
	c.Request(now, &rs[0])
	cmd := c.Actions()[0].Cmd
	c.Reply(now, cmd, Reply{Ask: Answer{Status: Granted, Fence: 1, Remaining: rs[0].TTL}})
	c.Actions()
	b.ReportAllocs()
	for i := 0; b.Loop(); i ^= 1 {
		c.Request(now, &rs[i^1])
		c.Release(now, &rs[i])
		if a := c.Actions(); len(a) != 2 || a[1].Kind != Grant {
			b.Fatalf("got %v, want a confirmation and a grant", a)
		}
		c.Next()
	}
}
