package scripts_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/e51fe0e6/dsync/internal/redistest"
	"github.com/e51fe0e6/dsync/scripts"
)

// shared is the real server of all tests that do not spoil it, nil without one.
var shared *redistest.Server

func TestMain(m *testing.M) {
	flag.Parse()
	server, stop, err := redistest.StartMain()
	switch {
	case err == nil:
		shared = server
	case !errors.Is(err, redistest.ErrNoServer) || os.Getenv("DSYNC_REQUIRE_REDIS") == "1":
		log.Fatal(err)
	}
	code := m.Run()
	if shared != nil {
		stop()
	}
	os.Exit(code)
}

// retention is how long fence and notes outlive the last hold, ms.
const retention = 60_000

// The parties of the tests. A client id is the part before the colon.
const (
	me, again   = "me:1", "me:2" // one client's generation, and its next
	other, next = "ot:1", "nx:1"
)

// fixture is a name of its own on a server.
type fixture struct {
	*testing.T
	rdb      *redis.Client        // may do everything
	user     *redis.Client        // runs the scripts; as a rule the same
	mini     *miniredis.Miniredis // nil on a real server
	key      string
	channels string
	heard    *redis.PubSub // all channels of the fixture, by pattern: that is not seen by NUMSUB
	fence    int64         // the highest that was seen
	setBack  bool          // the clock was: miniredis moves the end of a key with it, a real server does not
}

var names atomic.Int64

// client returns a client that sends nothing by itself, and nothing twice.
func client(t *testing.T, o *redis.Options) *redis.Client {
	t.Helper()
	o.Protocol, o.MaxRetries, o.DisableIdentity = 2, -1, true
	c := redis.NewClient(o)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// connect makes a fixture with a name of its own, which does not listen yet.
func connect(t *testing.T, addr string) *fixture {
	t.Helper()
	f := &fixture{rdb: client(t, &redis.Options{Addr: addr})}
	f.user = f.rdb
	return f.another(t)
}

// another returns a fixture with another name, and the same connections.
func (f *fixture) another(t *testing.T) *fixture {
	t.Helper()
	prefix := fmt.Sprintf("dsync:t%d", names.Add(1))
	return &fixture{T: t, rdb: f.rdb, user: f.user, mini: f.mini, heard: f.heard, key: prefix + ":{a name}:mutex", channels: prefix + ":c:"}
}

// start is when the clock of miniredis stands still.
var start = time.UnixMicro(1_700_000_000_123_456)

// clock sets the clock of miniredis, counted from start.
func (f *fixture) clock(d time.Duration) {
	f.Helper()
	f.setBack = f.setBack || f.micros() > start.Add(d).UnixMicro()
	f.mini.SetTime(start.Add(d))
}

// both runs a test on miniredis, with a clock that stands still until it is moved, and on a real server.
func both(t *testing.T, body func(f *fixture)) {
	t.Helper()
	t.Run("miniredis", func(t *testing.T) { body(onMini(t)) })
	t.Run("redis", func(t *testing.T) { body(onReal(t)) })
}

func onMini(t *testing.T) *fixture {
	t.Helper()
	m := miniredis.RunT(t)
	m.SetTime(start)
	m.ClockTTL(true)
	f := connect(t, m.Addr())
	f.mini = m
	f.listen()
	return f
}

func onReal(t *testing.T) *fixture {
	t.Helper()
	if shared == nil {
		t.Skip("SKIPPED, not tested: redis-server is not in PATH; DSYNC_REQUIRE_REDIS=1 makes this a failure")
	}
	f := connect(t, shared.Addr())
	f.listen()
	return f
}

// listen begins to hear what is published on the channels of this fixture and of others made from it.
func (f *fixture) listen() {
	f.Helper()
	f.heard = f.rdb.PSubscribe(context.Background(), "dsync:t*")
	f.confirm(f.heard)
}

// subscribe is the subscription of a client; the returned function ends it and returns when the server has seen that.
func (f *fixture) subscribe(client string) (leave func()) {
	f.Helper()
	p := f.rdb.Subscribe(f.Context(), f.channels+client)
	f.confirm(p)
	return func() {
		f.Helper()
		_ = p.Close()
		redistest.WaitFor(f, "the subscription to be gone", func() bool {
			return f.rdb.PubSubNumSub(f.Context(), f.channels+client).Val()[f.channels+client] == 0
		})
	}
}

func (f *fixture) confirm(p *redis.PubSub) {
	f.Helper()
	f.Cleanup(func() { _ = p.Close() })
	if _, err := p.Receive(f.Context()); err != nil {
		f.Fatalf("subscribe: %v", err)
	}
}

// messages returns what was published since it was last called, each "<client> <payload>" without the key, which it checks.
func (f *fixture) messages() []string {
	f.Helper()
	f.do("PUBLISH", f.channels+"end", "")
	var all []string
	for {
		m, err := f.heard.ReceiveMessage(f.Context())
		if err != nil {
			f.Fatalf("receive: %v", err)
		}
		client, ours := strings.CutPrefix(m.Channel, f.channels)
		switch {
		case !ours:
			continue // of another name
		case client == "end":
			return all
		}
		payload := m.Payload
		if payload[0] != 'e' {
			var ok bool
			if payload, ok = strings.CutSuffix(payload, " "+f.key); !ok {
				f.Fatalf("message %q does not end with the key", m.Payload)
			}
		}
		all = append(all, client+" "+payload)
	}
}

func (f *fixture) do(args ...string) any {
	f.Helper()
	v, err := send(f.rdb, args...)
	if err != nil {
		f.Fatalf("%q: %v", args, err)
	}
	return v
}

func send(c *redis.Client, args ...string) (any, error) {
	anys := make([]any, len(args))
	for i, a := range args {
		anys[i] = a
	}
	v, err := c.Do(context.Background(), anys...).Result()
	if errors.Is(err, redis.Nil) {
		return nil, nil //nolint:nilnil // the null reply is nil, and no error
	}
	return v, err
}

// micros is the server's time.
func (f *fixture) micros() int64 {
	f.Helper()
	at, err := f.rdb.Time(f.Context()).Result()
	if err != nil {
		f.Fatal(err)
	}
	return at.UnixMicro()
}

func (f *fixture) millis() int64 { f.Helper(); return f.micros() / 1000 }

// question is the arguments of one call, with values that fit most tests.
type question struct {
	verb, mine, ask string
	ttl, life       int64
	used            int64
	letters         string
	nonce           string
}

func acquire(ask, letters string) question {
	return question{verb: "acquire", ask: ask, letters: letters}
}
func renew(mine string) question { return question{verb: "renew", mine: mine} }

func release(mine, letters, ask string) question {
	return question{verb: "release", mine: mine, letters: letters, ask: ask}
}

const ttl, life = 10_000, 9_000 // unless a question says otherwise, ms

// answer is one group of a reply.
type answer struct {
	status, fence, remaining, now, waiting, position, flags int64
}

// reply is all that a script replied.
type reply struct {
	err    string   // of the status -1
	groups []answer // one, or two of a release that asks again
	rest   []any    // of inspect
}

func (r reply) last() answer { return r.groups[len(r.groups)-1] }

// raw runs the script and returns what it replied.
func (f *fixture) raw(q question) ([]any, error) {
	if q.ttl == 0 {
		q.ttl = ttl
	}
	if q.life == 0 {
		q.life = life
	}
	dec := func(n int64) string { return strconv.FormatInt(n, 10) }
	args := []string{"EVALSHA", scripts.Mutex.SHA1(), "1", f.key, q.verb, q.mine, q.ask, dec(q.ttl), dec(q.life), dec(q.used), q.letters, f.channels, q.nonce, "label=x"}
	v, err := send(f.user, args...)
	if err != nil && strings.HasPrefix(err.Error(), "NOSCRIPT") {
		args[0], args[1] = "EVAL", scripts.Mutex.Src()
		v, err = send(f.user, args...)
	}
	if err != nil {
		return nil, err
	}
	elements, ok := v.([]any)
	if !ok {
		return nil, fmt.Errorf("the reply is a %T", v)
	}
	return elements, nil
}

// ask runs the script and checks what must hold for every reply and every state.
func (f *fixture) ask(q question) reply {
	f.Helper()
	before := f.state()
	elements, err := f.raw(q)
	if err != nil {
		f.Fatalf("%+v: %v", q, err)
	}
	r := f.decode(q, elements)
	f.invariants(q, before, f.state(), r)
	return r
}

func (f *fixture) decode(q question, elements []any) reply {
	f.Helper()
	if elements[0] == int64(scripts.Failed) {
		text, ok := elements[1].(string)
		if !ok || len(elements) != 2 {
			f.Fatalf("%+v: reply %v", q, elements)
		}
		return reply{err: text}
	}
	groups := 1
	if q.mine != "" && q.ask != "" {
		groups = 2
	}
	if n := groups * scripts.Group; len(elements) < n || q.verb != "inspect" && len(elements) > n {
		f.Fatalf("%+v: %d elements: %v", q, len(elements), elements)
	}
	var r reply
	for ; groups > 0; groups-- {
		var n [scripts.Group]int64
		for i := range n {
			v, ok := elements[i].(int64)
			if !ok || v < 0 || v >= 1<<53 {
				f.Fatalf("%+v: element %d is %v", q, i, elements[i])
			}
			n[i] = v
		}
		r.groups = append(r.groups, answer{n[0], n[1], n[2], n[3], n[4], n[5], n[6]})
		elements = elements[scripts.Group:]
	}
	r.rest = elements
	return r
}

// state is what is stored.
type state struct {
	kind   string            // TYPE
	fields map[string]string // of a hash
	native int64             // PEXPIRETIME: -1 none, -2 no key
}

func (f *fixture) state() state {
	f.Helper()
	s := state{kind: f.rdb.Type(f.Context(), f.key).Val()}
	s.native, _ = f.do("PEXPIRETIME", f.key).(int64)
	if s.kind == "hash" {
		s.fields = f.rdb.HGetAll(f.Context(), f.key).Val()
	}
	return s
}

func (s state) number(field string) int64 {
	n, _ := strconv.ParseInt(s.fields[field], 10, 64)
	return n
}

// party is the token in front of a record.
func party(record string) string {
	token, _, _ := strings.Cut(record, " ")
	return token
}

// holder returns token, ttl, deadline (ms) and since (µs); a dead one counts as well.
func (s state) holder() (token string, length, deadline, since int64) {
	_, _ = fmt.Sscan(s.fields["h"], &token, &length, &deadline, &since)
	return token, length, deadline, since
}

// String is the holder, the queue, and the tokens that have no place: "h=me:1 q=ot:1 p=nx:1 x=me:1"; a known name without
// these is free. What does not fit together is marked by "?".
func (s state) String() string {
	if s.kind != "hash" {
		return s.kind
	}
	var out []string
	if h := party(s.fields["h"]); h != "" {
		out = append(out, "h="+h)
	}
	var numbers []int
	var notes []string
	for field, value := range s.fields {
		switch field[0] {
		case 'q':
			n, _ := strconv.Atoi(field[1:])
			numbers = append(numbers, n)
			if stands := strings.TrimPrefix(s.fields["w"+party(value)], "b"); stands != field[1:] {
				notes = append(notes, "?"+field+"="+stands)
			}
		case 'w':
			switch value[0] {
			case 'p', 'x':
				notes = append(notes, value[:1]+"="+field[1:])
			default:
				if party(s.fields["q"+strings.TrimPrefix(value, "b")]) != field[1:] {
					notes = append(notes, "?"+field+"="+value)
				}
			}
		}
	}
	slices.Sort(numbers)
	slices.Sort(notes)
	for _, n := range numbers {
		out = append(out, "q="+party(s.fields["q"+strconv.Itoa(n)]))
	}
	if out = append(out, notes...); len(out) == 0 {
		return "free"
	}
	return strings.Join(out, " ")
}

// invariants are true after every call, whatever was asked and whatever was stored.
func (f *fixture) invariants(q question, was, is state, r reply) {
	f.Helper()
	if r.err != "" && !strings.Contains(r.err, "user executing the script") && fmt.Sprint(was.fields) != fmt.Sprint(is.fields) {
		f.Errorf("%+v: failed with %q, and changed %v to %v", q, r.err, was.fields, is.fields)
	}
	if is.kind != "hash" || is.native < 0 && was.native == is.native {
		return // nothing, or a stranger's
	}
	if x := is.number("x"); is.native < x && !f.setBack || is.native != x && !f.setBack && r.err == "" || x < was.number("x") || is.native < was.native {
		f.Errorf("%+v: the key ends at %d and says %d; before at %d", q, is.native, x, was.native)
	}
	if is.number("f") < was.number("f") {
		f.Errorf("%+v: the fence went from %d back to %d", q, was.number("f"), is.number("f"))
	}
	if r.err != "" {
		return
	}
	now := r.last().now / 1000
	heldBy, _, heldTill, _ := was.holder()
	holds, length, till, since := is.holder()
	if now > 0 && heldBy != "" && heldTill > now && holds != heldBy && q.mine != heldBy {
		f.Errorf("%+v: %s holds until %d, and at %d the holder became %q", q, heldBy, heldTill, now, holds)
	}
	if holds != "" && now > 0 {
		if till > now+length && q.verb != "inspect" {
			f.Errorf("%+v: the lease ends %d ms from now, its ttl is %d", q, till-now, length)
		}
		if is.native < till+max(retention, length) && !f.setBack {
			f.Errorf("%+v: the key ends at %d, the lease at %d", q, is.native, till)
		}
	}
	if holds != "" && holds != heldBy {
		if fence := is.number("f"); fence <= f.fence || fence <= was.number("f") || fence < r.last().now {
			f.Errorf("%+v: granted with fence %d at %d µs, after %d", q, fence, r.last().now, max(f.fence, was.number("f")))
		}
		if since != r.last().now || till != now+length {
			f.Errorf("%+v: granted from %d to %d ms with ttl %d, at %d µs", q, since, till, length, r.last().now)
		}
	}
	f.fence = max(f.fence, is.number("f"))
	for _, g := range r.groups {
		switch g.status {
		case scripts.Granted:
			if g.fence != is.number("f") || holds != q.ask || g.remaining != till-now || g.remaining <= 0 {
				f.Errorf("%+v: reply %+v, stored %v", q, g, is.fields)
			}
		case scripts.Queued, scripts.Busy:
			if g.fence != is.number("f") || g.remaining != till-now || g.remaining <= 0 {
				f.Errorf("%+v: reply %+v, stored %v", q, g, is.fields)
			}
		case scripts.Renewed:
			if g.remaining != till-now || holds != q.mine || g.remaining < q.ttl {
				f.Errorf("%+v: reply %+v, stored %v", q, g, is.fields)
			}
		}
	}
}

var statusNames = []string{"not-yours", "granted", "queued", "busy", "ended", "gone", "again", "renewed", "released", "withdrawn", "inspected"}

// String is the statuses with position, "+waiting" if others wait, and "+again" if work is left.
func (r reply) String() string {
	if r.err != "" {
		return "error"
	}
	var out []string
	for _, g := range r.groups {
		s := statusNames[g.status]
		if g.position > 0 {
			s += fmt.Sprintf("#%d", g.position)
		}
		if g.waiting == 1 {
			s += "+waiting"
		}
		if g.flags&scripts.FlagAgain != 0 {
			s += "+again"
		}
		out = append(out, s)
	}
	return strings.Join(out, ",")
}

// holding makes token the holder, since `ago` ms, until `left` ms from now.
func (f *fixture) holding(token string, ago, left int64) {
	f.Helper()
	at := f.micros()
	f.write(at/1000+left, "h", fmt.Sprintf("%s %d %d %d label=x", token, ttl, at/1000+left, at-ago*1000), "f", strconv.FormatInt(at-ago*1000, 10))
}

// placed puts token into the queue at a number, with a place that ends in `left` ms.
func (f *fixture) placed(token string, number int, left int64, passable bool) {
	f.Helper()
	flag := 0
	if passable {
		flag = 1
	}
	n, till := strconv.Itoa(number), f.millis()+left
	f.write(till, "q"+n, fmt.Sprintf("%s %d %d %d %d label=x", token, ttl, till, life, flag), "w"+token, n)
}

// queue sets the numbers of the first and the last place.
func (f *fixture) queue(first, last int) {
	f.Helper()
	f.write(0, "a", strconv.Itoa(first), "z", strconv.Itoa(last))
}

// noted leaves a word about a token, as number n of the notes.
func (f *fixture) noted(token, word string, n int, left int64) {
	f.Helper()
	f.write(0, "w"+token, word, "n"+strconv.Itoa(n), fmt.Sprintf("%d %s %s", f.millis()+left, word, token), "u", "1", "v", strconv.Itoa(n))
}

// write sets fields as the scripts would, in a key that outlives `till` (ms).
func (f *fixture) write(till int64, fields ...string) {
	f.Helper()
	s := f.state()
	if s.fields["f"] == "" {
		f.do("HSET", f.key, "f", strconv.FormatInt(f.micros()-30_000_000, 10))
	}
	x := strconv.FormatInt(max(s.number("x"), till+retention, f.millis()+ttl+retention), 10)
	f.do(append([]string{"HSET", f.key, "x", x}, fields...)...)
	f.do("PEXPIREAT", f.key, x)
}
