package drivertest

import (
	"errors"
	"reflect"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"

	"github.com/e51fe0e6/dsync/driver"
	"github.com/e51fe0e6/dsync/internal/redistest"
)

// basicTests need nothing but a driver.
func basicTests() []test {
	return []test{
		{"ExecReturnsWhatTheScriptDoes", testReply},
		{"ExecKeepsBytesExact", testBytes},
		{"ExecKeepsIntegersExact", testIntegers},
		{"ExecRefusesWhatBreaksTheRules", testInvalid},
		{"ExecReportsMalformedReplies", testMalformed},
		{"ExecClassifiesErrorsOfScripts", testScriptErrors},
		{"ExecConcurrently", testConcurrent},
		{"ExecManyFirstCallsAtOnce", testManyFirstCalls},
		{"ExecMultiKeepsOrderAndSeparatesErrors", testMulti},
		{"ExecWaitReturnsTheReply", testWaitBasic},
	}
}

// execTests look at the server or the network beside the driver.
func execTests() []test {
	return []test{
		{"ExecSendsTheSourceOnlyAfterNoScript", testNoScript},
		{"ExecMultiRepeatsOnlyUnknownScripts", testMultiNoScript},
		{"ExecWaitRepeatsUnknownScripts", testWaitNoScript},
		{"ExecMultiIsFewRoundTrips", testMultiRoundTrips},
		{"ExecWaitCountsReplicas", testWaitReplicas},
		{"IdleDriverHasNoGoroutine", testIdle},
	}
}

func testReply(t *testing.T, e *env) {
	for source, want := range map[string][]any{
		"return {1, 'a', 2}":                    {int64(1), "a", int64(2)},
		"return {}":                             {},
		"return 7":                              {int64(7)},
		"return 'word'":                         {"word"},
		"return redis.status_reply('FINE')":     {"FINE"},
		"return {KEYS[1], KEYS[2], ARGV[1], 3}": {"{k}1", "{k}2", "arg", int64(3)},
	} {
		for range 2 { // by source and by digest
			r := mustExec(t, e.d, driver.Cmd{
				Script: driver.NewScript(source), Keys: []string{"{k}1", "{k}2"}, Args: []string{"arg"},
			})
			wantReply(t, source, r, want)
		}
	}
}

func wantReply(t *testing.T, step string, r driver.Reply, want []any) {
	t.Helper()
	if r.Len() != len(want) {
		t.Fatalf("%s: reply has %d elements, want %v", step, r.Len(), want)
	}
	for i, w := range want {
		var got any
		if n, ok := r.Int(i); ok {
			got = n
		} else if s, ok := r.Str(i); ok {
			got = s
		}
		if got != w {
			t.Fatalf("%s: element %d is %#v, want %#v", step, i, got, w)
		}
	}
}

func testBytes(t *testing.T, e *env) {
	echo := driver.NewScript("redis.call('SET', KEYS[1], ARGV[1])\n" +
		"return {KEYS[1], ARGV[1], string.len(ARGV[1]), redis.call('GET', KEYS[1])}")
	for _, s := range []string{
		"", " ", "\x00", "a\x00b", "\r\n", "$3\r\nabc\r\n", "*1\r\n", "+OK", "-ERR no", "\xff\xfe\xc0\x80", "café ☕", "12", "-0", "1e3",
		"{", "}", "{}", "{a}b", strings.Repeat("\x00\r\nx", 1<<16),
	} {
		r := mustExec(t, e.d, cmd(echo, "k"+s, s))
		wantReply(t, "echo of "+strconv.Quote(s[:min(len(s), 20)]), r, []any{"k" + s, s, int64(len(s)), s})
	}
	empty := mustExec(t, e.d, cmd(driver.NewScript("return {KEYS[1], #ARGV}"), ""))
	wantReply(t, "empty key, no arguments", empty, []any{"", int64(0)})
}

func testIntegers(t *testing.T, e *env) {
	const limit = 1<<53 - 1
	for _, n := range []int64{0, 1, -1, 1 << 31, -1 << 31, 1 << 32, 1_700_000_000_000_000, limit, -limit} {
		r := mustExec(t, e.d, cmd(driver.NewScript("return {tonumber(ARGV[1])}"), "k", strconv.FormatInt(n, 10)))
		wantReply(t, "integer", r, []any{n})
	}
}

func testInvalid(t *testing.T, e *env) {
	s := count("invalid")
	bad := []driver.Cmd{
		{Script: s},
		{Keys: []string{"k"}},
		{Script: s, Keys: []string{"{a}", "{b}"}},
		{Script: s, Keys: []string{"a", "b"}},
		{Script: s, Keys: []string{"{a}1", "{a}2", "{a"}},
	}
	for _, c := range bad {
		_, err := e.d.Exec(t.Context(), c)
		wantClass(t, "Exec", err, driver.ErrPermanent)
		_, _, err = e.d.ExecWait(t.Context(), c, 0, time.Millisecond)
		wantClass(t, "ExecWait", err, driver.ErrPermanent)
	}
	results := e.d.ExecMulti(t.Context(), append(bad, cmd(s, "good")))
	for i := range bad {
		wantClass(t, "ExecMulti", results[i].Err, driver.ErrPermanent)
	}
	if err := results[len(bad)].Err; err != nil {
		t.Errorf("the good command among bad ones: %v", err)
	}
}

func testMalformed(t *testing.T, e *env) {
	for _, source := range []string{"return nil", "return false", "return", "return {1, {2}}", "return {1, false, 'b'}"} {
		_, err := e.d.Exec(t.Context(), cmd(driver.NewScript(source), "k"))
		wantClass(t, source, err, driver.ErrUnknown)
	}
}

func testScriptErrors(t *testing.T, e *env) {
	reply := driver.NewScript("return redis.error_reply(ARGV[1])")
	for text, code := range map[string]string{
		"OOM out of memory": "OOM", "READONLY it is": "READONLY", "MISCONF disk": "MISCONF", "NOREPLICAS few": "NOREPLICAS",
		"my own trouble": "ERR", "ERR plain": "ERR", "CUSTOM code": "CUSTOM",
	} {
		_, err := e.d.Exec(t.Context(), cmd(reply, "k", text))
		wantCode(t, text, err, code)
	}
	for _, text := range []string{"NOPERM no", "NOAUTH who", "WRONGTYPE kind"} {
		_, err := e.d.Exec(t.Context(), cmd(reply, "k", text))
		wantClass(t, text, err, driver.ErrPermanent)
	}
	wrongType := driver.NewScript("redis.call('SET', KEYS[1], 'x')\nreturn {redis.call('LPUSH', KEYS[1], 'y')}")
	_, err := e.d.Exec(t.Context(), cmd(wrongType, "string"))
	wantClass(t, "wrong type", err, driver.ErrPermanent)
	_, err = e.d.Exec(t.Context(), cmd(driver.NewScript("this is not Lua"), "k"))
	if class(t, err) == nil {
		t.Error("a script that does not compile succeeded")
	}
}

func testConcurrent(t *testing.T, e *env) {
	const goroutines, calls = 64, 30
	s := count("concurrent")
	var wg sync.WaitGroup
	for g := range goroutines {
		wg.Go(func() { // ends with its calls
			key := "k" + strconv.Itoa(g)
			for i := range calls {
				r, err := e.d.Exec(t.Context(), cmd(s, key))
				if err != nil {
					t.Errorf("call %d of %s: %v", i, key, err)
					return
				}
				if n, _ := r.Int(0); n != int64(i+1) {
					t.Errorf("call %d of %s returned %d: somebody else's reply, or executed twice", i, key, n)
					return
				}
			}
		})
	}
	wg.Wait()
}

func testManyFirstCalls(t *testing.T, e *env) {
	const goroutines = 64
	scripts := []*driver.Script{count("first a"), count("first b"), count("first c")}
	var wg sync.WaitGroup
	for g := range goroutines {
		wg.Go(func() { // ends with its call
			if _, err := e.d.Exec(t.Context(), cmd(scripts[g%len(scripts)], "k")); err != nil {
				t.Errorf("Exec: %v", err)
			}
		})
	}
	wg.Wait()
	wantReply(t, "the call after them", mustExec(t, e.d, cmd(scripts[0], "k")), []any{int64(goroutines + 1)})
}

func testMulti(t *testing.T, e *env) {
	s := count("multi")
	fail := driver.NewScript("return redis.error_reply('CUSTOM trouble')")
	if got := e.d.ExecMulti(t.Context(), nil); len(got) != 0 {
		t.Errorf("ExecMulti of nothing returned %d results", len(got))
	}
	for _, n := range []int{1, 2, 300} {
		var cs []driver.Cmd
		for i := range n {
			if i%3 == 1 {
				cs = append(cs, cmd(fail, "k"))
			} else {
				cs = append(cs, cmd(s, "multi"+strconv.Itoa(n)+":"+strconv.Itoa(i)))
			}
		}
		results := e.d.ExecMulti(t.Context(), append(cs, cmd(s, "last"+strconv.Itoa(n))))
		for i := range n {
			if i%3 == 1 {
				wantCode(t, "element that fails", results[i].Err, "CUSTOM")
				continue
			}
			if results[i].Err != nil {
				t.Fatalf("element %d of %d: %v", i, n, results[i].Err)
			}
			wantReply(t, "element", results[i].Reply, []any{int64(1)})
		}
		wantReply(t, "last element", results[n].Reply, []any{int64(1)})
	}
}

func testWaitBasic(t *testing.T, e *env) {
	for i := range 2 {
		r, acked, err := e.d.ExecWait(t.Context(), cmd(count("wait"), "k"), 0, 50*time.Millisecond)
		if err != nil || acked != 0 {
			t.Fatalf("ExecWait for no replica: %d acknowledged, %v", acked, err)
		}
		wantReply(t, "ExecWait", r, []any{int64(i + 1)})
	}
	_, _, err := e.d.ExecWait(t.Context(), cmd(driver.NewScript("return redis.error_reply('CUSTOM x')"), "k"), 0, time.Millisecond)
	wantCode(t, "ExecWait of a script that fails", err, "CUSTOM")
}

// sent returns how many EVALSHA and EVAL the server has got since the last CONFIG RESETSTAT.
func (e *env) sent() (evalsha, eval int64) {
	stats := e.server.CommandStats()
	return stats["evalsha"], stats["eval"]
}

func wantSent(t *testing.T, e *env, step string, evalsha, eval int64) {
	t.Helper()
	if gotSHA, gotEval := e.sent(); gotSHA != evalsha || gotEval != eval {
		t.Fatalf("%s: server got %d EVALSHA and %d EVAL, want %d and %d", step, gotSHA, gotEval, evalsha, eval)
	}
}

func testNoScript(t *testing.T, e *env) {
	s := count("noscript")
	e.server.MustDo("CONFIG", "RESETSTAT")
	mustExec(t, e.d, cmd(s, "k"))
	wantSent(t, e, "first call", 1, 1)
	mustExec(t, e.d, cmd(s, "k"))
	wantSent(t, e, "second call", 2, 1)
	e.server.MustDo("SCRIPT", "FLUSH")
	mustExec(t, e.d, cmd(s, "k"))
	wantSent(t, e, "after SCRIPT FLUSH", 3, 2)
	if got := e.ran(t, "k"); got != 3 {
		t.Errorf("3 calls ran %d times", got)
	}
}

func testMultiNoScript(t *testing.T, e *env) {
	known, unknown := count("known"), count("unknown")
	e.warm(t, known)
	results := e.d.ExecMulti(t.Context(), []driver.Cmd{
		cmd(known, "a"), cmd(unknown, "b"), cmd(known, "c"), cmd(unknown, "d"), cmd(unknown, "b"),
	})
	for i, r := range results {
		if r.Err != nil {
			t.Fatalf("element %d: %v", i, r.Err)
		}
	}
	for key, want := range map[string]int{"a": 1, "b": 2, "c": 1, "d": 1} {
		if got := e.ran(t, key); got != want {
			t.Errorf("script of %s ran %d times, want %d", key, got, want)
		}
	}
}

func testWaitNoScript(t *testing.T, e *env) {
	s := count("wait noscript")
	for i := range 3 {
		e.server.MustDo("SCRIPT", "FLUSH")
		r, _, err := e.d.ExecWait(t.Context(), cmd(s, "k"), 0, 10*time.Millisecond)
		if err != nil {
			t.Fatalf("ExecWait: %v", err)
		}
		wantReply(t, "ExecWait", r, []any{int64(i + 1)})
	}
}

func testMultiRoundTrips(t *testing.T, e *env) {
	const delay, n = 20 * time.Millisecond, 200
	s := count("round trips")
	e.warm(t, s)
	e.proxy.SetDelay(delay, delay)
	cs := make([]driver.Cmd, n)
	for i := range cs {
		cs[i] = cmd(s, "k")
	}
	began := time.Now()
	for _, r := range e.d.ExecMulti(t.Context(), cs) {
		if r.Err != nil {
			t.Fatal(r.Err)
		}
	}
	if took, one := time.Since(began), 2*delay; took > n/4*one {
		t.Errorf("%d commands took %v, as long as %d round trips", n, took, took/one)
	}
}

func testWaitReplicas(t *testing.T, e *env) {
	redistest.StartReplica(t, e.server)
	s := count("wait replicas")
	for range 5 {
		if _, acked, err := e.d.ExecWait(t.Context(), cmd(s, "k"), 1, 5*time.Second); err != nil || acked != 1 {
			t.Fatalf("ExecWait for 1 of 1 replicas: %d acknowledged, %v", acked, err)
		}
	}
	began := time.Now()
	_, acked, err := e.d.ExecWait(t.Context(), cmd(s, "k"), 2, 100*time.Millisecond)
	if err != nil || acked != 1 {
		t.Errorf("ExecWait for 2 of 1 replicas: %d acknowledged, %v; want 1", acked, err)
	}
	if took := time.Since(began); took < 90*time.Millisecond {
		t.Errorf("ExecWait for a replica that is not there took %v, want the timeout of 100ms", took)
	}
	// A WAIT that is longer than a client waits for other replies.
	if _, acked, err := e.d.ExecWait(t.Context(), cmd(s, "k"), 2, 1500*time.Millisecond); err != nil || acked != 1 {
		t.Errorf("ExecWait with a long timeout: %d acknowledged, %v; want 1", acked, err)
	}
}

// testIdle looks for goroutines that mention the driver's package: the client's own may stay.
func testIdle(t *testing.T, e *env) {
	typ := reflect.TypeOf(e.d)
	if typ.Kind() == reflect.Pointer {
		typ = typ.Elem()
	}
	working := func() int {
		stacks := make([]byte, 1<<20)
		stacks = stacks[:runtime.Stack(stacks, true)]
		n := 0
		for stack := range strings.SplitSeq(string(stacks), "\n\n") {
			if strings.Contains(stack, typ.PkgPath()+".") {
				n++
			}
		}
		return n
	}
	before := working()
	testConcurrent(t, e)
	session, _ := open(t, e)
	_ = session.Close()
	redistest.WaitFor(t, "the driver's goroutines to end", func() bool { return working() <= before })
}

func testFakedErrors(t *testing.T, h Harness) {
	m := miniredis.RunT(t)
	d := h.New(t, m.Addr())
	s := count("faked")
	mustExec(t, d, cmd(s, "k"))
	for _, text := range []string{
		"LOADING Redis is loading the dataset in memory", "MASTERDOWN Link with MASTER is down", "CLUSTERDOWN Hash slot not served",
		"TRYAGAIN Multiple keys request during rehashing of slot", "BUSY Redis is busy running a script",
	} {
		m.SetError(text)
		_, err := d.Exec(t.Context(), cmd(s, "k"))
		m.SetError("")
		wantClass(t, text, err, driver.ErrNotExecuted)
	}
	m.SetError("UNHEARD of")
	_, err := d.Exec(t.Context(), cmd(s, "k"))
	m.SetError("")
	if server, ok := errors.AsType[*driver.ServerError](err); !ok || server.Code != "UNHEARD" || server.Err == nil {
		t.Errorf("unknown code: %v, want a ServerError with the client's error in it", err)
	}
	wantReply(t, "after all", mustExec(t, d, cmd(s, "k")), []any{int64(2)})
}
