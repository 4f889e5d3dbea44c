package redistest

import (
	"errors"
	"fmt"
	"net"
	"os"
	"reflect"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

// orphanEnv makes the test binary start a server and wait to be killed.
const orphanEnv = "REDISTEST_ORPHAN"

func TestMain(m *testing.M) {
	if os.Getenv(orphanEnv) != "" {
		runOrphanMaker() // the other process of TestServerDiesWithTheTestProcess
	}
	goleak.VerifyTestMain(m)
}

func TestDoDecodesEveryKindOfReply(t *testing.T) {
	s := Start(t)
	s.MustDo("RPUSH", "list", "a", "", "c\r\nd")
	for _, tc := range []struct {
		name string
		args []string
		want any
	}{
		{"simple-string", []string{"SET", "k", "v"}, "OK"},
		{"integer", []string{"INCR", "n"}, int64(1)},
		{"bulk", []string{"GET", "k"}, "v"},
		{"nil", []string{"GET", "none"}, nil},
		{"array-with-empty-and-binary", []string{"LRANGE", "list", "0", "-1"}, []any{"a", "", "c\r\nd"}},
		{"empty-array", []string{"LRANGE", "none", "0", "-1"}, []any{}},
		{
			"nested-array",
			[]string{"EVAL", "return {1, {'x', false}, redis.error_reply('ODD thing')}", "0"},
			[]any{int64(1), []any{"x", nil}, ServerError("ODD thing")},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if got := s.MustDo(tc.args...); !reflect.DeepEqual(got, tc.want) {
				t.Errorf("%q = %#v, want %#v", tc.args, got, tc.want)
			}
		})
	}
}

func TestDoReturnsErrorRepliesAsServerError(t *testing.T) {
	s := Start(t)
	s.MustDo("SET", "k", "v")
	_, err := s.Do("LPUSH", "k", "x")
	if e, ok := errors.AsType[ServerError](err); !ok || !strings.HasPrefix(string(e), "WRONGTYPE ") {
		t.Errorf("LPUSH on a string: got error %#v, want a ServerError with WRONGTYPE", err)
	}
	if got := s.MustDo("GET", "k"); got != "v" {
		t.Errorf("GET after an error reply = %v, want v", got)
	}
}

func TestDoKeepsItsConnection(t *testing.T) {
	s := Start(t)
	if a, b := s.MustDo("CLIENT", "ID"), s.MustDo("CLIENT", "ID"); a != b {
		t.Errorf("two commands ran on connections %v and %v, want one", a, b)
	}
}

func TestRestartKeepsTheAddressAndLosesTheData(t *testing.T) {
	s := Start(t)
	addr, pid := s.Addr(), s.Pid()
	s.MustDo("SET", "k", "v")
	s.Kill()
	s.Kill() // of a dead server: nothing happens
	if _, err := s.Do("PING"); err == nil {
		t.Error("PING after Kill succeeded")
	}
	s.Restart()
	if s.Addr() != addr || s.Pid() == pid {
		t.Errorf("after Restart: %s, pid %d; want %s, and not pid %d", s.Addr(), s.Pid(), addr, pid)
	}
	if got := s.MustDo("GET", "k"); got != nil {
		t.Errorf("GET after Restart = %v, want nil", got)
	}
}

func TestRestartWithAOFKeepsTheData(t *testing.T) {
	s := Start(t, WithAOF())
	s.MustDo("SET", "k", "v")
	s.Restart() // of a running server: kills it
	if got := s.MustDo("GET", "k"); got != "v" {
		t.Errorf("GET after Restart = %v, want v", got)
	}
}

func TestWithConfigHoldsOverRestart(t *testing.T) {
	s := Start(t, WithConfig("maxmemory", "100mb"), WithConfig("client-output-buffer-limit", "pubsub", "1mb", "1mb", "1"))
	s.Restart()
	if got, want := s.MustDo("CONFIG", "GET", "maxmemory"), []any{"maxmemory", "104857600"}; !reflect.DeepEqual(got, want) {
		t.Errorf("CONFIG GET maxmemory = %v, want %v", got, want)
	}
}

func TestStartReportsWhatTheServerSaid(t *testing.T) {
	_, _, err := StartMain(WithConfig("no-such-directive", "1"))
	if err == nil || !strings.Contains(err.Error(), "no-such-directive") {
		t.Errorf("StartMain with a bad directive: error %v, want the server's own words", err)
	}
}

func TestStartMainFailsByPanic(t *testing.T) {
	s, stop, err := StartMain()
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	defer func() {
		if r := recover(); r == nil {
			t.Error("MustDo of a command that fails did not panic")
		}
	}()
	s.MustDo("NOSUCHCOMMAND")
}

func TestLaunchDoesNotMistakeAnotherServerForItsOwn(t *testing.T) {
	s := Start(t)
	thief := &Server{binary: s.binary, dir: t.TempDir(), port: s.port, client: &client{addr: s.Addr()}}
	proc, err := thief.launch()
	if err == nil {
		proc.kill()
	}
	if !errors.Is(err, errExited) {
		t.Errorf("launch on a port in use: error %v, want %v", err, errExited)
	}
}

func TestCommandStatsCountsExecutions(t *testing.T) {
	s := Start(t)
	for range 3 {
		s.MustDo("INCR", "n")
	}
	s.MustDo("EVAL", "return redis.call('INCR', KEYS[1])", "1", "n")
	stats := s.CommandStats()
	if stats["incr"] != 4 || stats["eval"] != 1 {
		t.Errorf("incr %d, eval %d; want 4 and 1 (all: %v)", stats["incr"], stats["eval"], stats)
	}
}

func TestReplicaFollowsAlsoAfterRestartAndCanBePromoted(t *testing.T) {
	primary := Start(t)
	replica := StartReplica(t, primary)
	follows := func(want string) func() bool {
		primary.MustDo("SET", "k", want)
		return func() bool {
			got, err := replica.Do("GET", "k")
			return err == nil && got == want
		}
	}
	WaitFor(t, "the replica to follow", follows("1"))
	replica.Restart()
	WaitFor(t, "the replica to follow after its restart", follows("2"))
	replica.ReplicaOf(nil)
	if got := replica.Info("replication")["role"]; got != "master" {
		t.Errorf("role after promotion = %q, want master", got)
	}
	primary.ReplicaOf(replica)
	WaitFor(t, "the old primary to follow the new one", func() bool {
		return primary.Info("replication")["master_port"] == strconv.Itoa(replica.port)
	})
}

func TestWithoutRedisServer(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	if _, _, err := StartMain(); !errors.Is(err, ErrNoServer) {
		t.Errorf("StartMain: error %v, want %v", err, ErrNoServer)
	}
	for _, tc := range []struct{ require, want string }{{"", "skip"}, {"1", "fatal"}} {
		t.Setenv("DSYNC_REQUIRE_REDIS", tc.require)
		tb := &outcome{TB: t}
		done := make(chan struct{})
		// Ends by outcome's Goexit, which the receive below waits for.
		go func() {
			defer close(done)
			Start(tb)
		}()
		<-done
		if tb.got != tc.want {
			t.Errorf("DSYNC_REQUIRE_REDIS=%q: outcome %q, want %q", tc.require, tb.got, tc.want)
		}
	}
}

// outcome records how a helper ended its test instead of ending it.
type outcome struct {
	testing.TB
	got string
}

func (o *outcome) Helper() {}

func (o *outcome) Skip(...any) {
	o.got = "skip"
	runtime.Goexit()
}

func (o *outcome) Fatalf(string, ...any) {
	o.got = "fatal"
	runtime.Goexit()
}

func TestWaitForFailsTheTestNotTheProcess(t *testing.T) {
	calls := 0
	WaitFor(t, "the third call", func() bool { calls++; return calls == 3 })
	if poll(0, func() bool { return false }) {
		t.Error("poll of what never comes reported true")
	}
}

// listening reports whether anybody accepts connections at addr.
func listening(addr string) bool {
	c, err := net.Dial("tcp", addr)
	if err != nil {
		return false
	}
	_ = c.Close()
	return true
}

// runOrphanMaker starts a server, says where, and waits to be killed.
func runOrphanMaker() {
	s, _, err := StartMain()
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println(s.Addr())
	_, _ = os.Stdin.Read(make([]byte, 1))
	os.Exit(1)
}
