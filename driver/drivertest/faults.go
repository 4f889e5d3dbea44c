package drivertest

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/e51fe0e6/dsync/driver"
	"github.com/e51fe0e6/dsync/internal/redistest"
)

// faultTests disturb the network.
func faultTests() []test {
	return []test{
		{"ReplyLostIsUnknownAndExecutedOnce", testReplyLost},
		{"RequestLostIsNotSentAgain", testRequestLost},
		{"CanceledCallerReturnsAndHarmsNobody", testCanceled},
		{"DeadlineOfCallerHarmsNobody", testDeadline},
		{"ArgumentsAreNotKept", testArgumentsNotKept},
		{"DeadContextSendsNothing", testDeadContext},
		{"SilentServerIsLeftWithinTheBound", testSilent},
		{"CutConnectionsUnderLoad", testCutUnderLoad},
		{"RefusedConnectionHeals", testRefusedConnection},
	}
}

// serverTests change a server of their own.
func serverTests() []test {
	return []test{
		{"DeadServerIsNotExecuted", testDeadServer},
		{"ForbiddenCommandIsPermanent", testForbiddenCommand},
		{"ForbiddenEvalIsPermanent", testForbiddenEval},
		{"MissingPasswordIsPermanent", testNoAuth},
		{"OutOfMemoryIsTheScriptsError", testOutOfMemory},
		{"ReplicaIsReadOnly", testReadOnly},
		{"ForbiddenWaitAfterTheScript", testForbiddenWait},
		{"ForbiddenChannelIsRefused", testForbiddenChannel},
	}
}

func testReplyLost(t *testing.T, e *env) {
	s := count("reply lost")
	for way, exec := range map[string]func(c driver.Cmd) error{
		"exec": func(c driver.Cmd) error {
			_, err := e.d.Exec(t.Context(), c)
			return err
		},
		"multi": func(c driver.Cmd) error {
			results := e.d.ExecMulti(t.Context(), []driver.Cmd{c, cmd(s, "beside")})
			wantClass(t, "the element beside", results[1].Err, driver.ErrUnknown)
			return results[0].Err
		},
		"wait": func(c driver.Cmd) error {
			_, _, err := e.d.ExecWait(t.Context(), c, 0, 10*time.Millisecond)
			return err
		},
	} {
		e.warm(t, s)
		lost := e.proxy.LoseReplyTo(mentions("lost-" + way))
		err := exec(cmd(s, "lost-"+way))
		wantClass(t, way, err, driver.ErrUnknown)
		within(t, "the fault", prompt, lost)
		redistest.WaitFor(t, "the script to run", func() bool { return e.ran(t, "lost-"+way) > 0 })
		e.works(t) // a driver or client that sends again has done so by now
		if got := e.ran(t, "lost-"+way); got != 1 {
			t.Errorf("%s: a script whose reply was lost ran %d times, want 1", way, got)
		}
	}
}

func testRequestLost(t *testing.T, e *env) {
	s := count("request lost")
	e.warm(t, s)
	lost := e.proxy.NeverDeliver(mentions("never"))
	_, err := e.d.Exec(t.Context(), cmd(s, "never"))
	within(t, "the fault", prompt, lost)
	wantClass(t, "Exec", err, driver.ErrUnknown)
	e.works(t)
	if got := e.ran(t, "never"); got != 0 {
		t.Errorf("a script that was reported as unknown ran %d times behind the caller's back", got)
	}
}

func testCanceled(t *testing.T, e *env) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	callerGivesUp(t, e, ctx, cancel, context.Canceled)
}

func testDeadline(t *testing.T, e *env) {
	ctx, cancel := context.WithTimeout(t.Context(), untilDeadline)
	defer cancel()
	callerGivesUp(t, e, ctx, func() {}, context.DeadlineExceeded)
}

// untilDeadline leaves time for the command to be sent before its caller gives up.
const untilDeadline = 300 * time.Millisecond

// callerGivesUp ends ctx while its command and those of innocent callers are under way.
func callerGivesUp(t *testing.T, e *env, ctx context.Context, end func(), want error) { //nolint:revive // t first
	t.Helper()
	const innocents = 8
	s := count("caller gives up")
	e.warm(t, s)
	e.proxy.HoldUp()
	guilty := e.goExec(ctx, cmd(s, "guilty"))
	e.held(t)
	var innocent []<-chan outcome
	for range innocents / 2 {
		innocent = append(innocent, e.goExec(t.Context(), cmd(s, "innocent")))
		innocent = append(innocent, e.goExec(context.WithoutCancel(t.Context()), cmd(s, "innocent")))
	}
	end()
	got := within(t, "the caller that gave up", untilDeadline+prompt, guilty)
	wantClass(t, "the caller that gave up", got.err, driver.ErrUnknown)
	if !errors.Is(got.err, want) {
		t.Errorf("the caller that gave up got %v, want it to match %v", got.err, want)
	}
	e.proxy.Release()
	for _, c := range innocent {
		if got := within(t, "an innocent caller", e.h.Bound, c); got.err != nil {
			t.Errorf("an innocent caller got %v", got.err)
		}
	}
	redistest.WaitFor(t, "the abandoned command to run", func() bool { return e.ran(t, "guilty") == 1 })
	if got := e.ran(t, "innocent"); got != innocents {
		t.Errorf("%d innocent calls ran %d times", innocents, got)
	}
}

func testArgumentsNotKept(t *testing.T, e *env) {
	e.warm(t, count("arguments")) // so that what is held below is the command itself
	// The script is unknown, so the arguments are needed again for EVAL, after the caller has left.
	s := driver.NewScript("return {redis.call('SET', KEYS[1], ARGV[1]) and 1}")
	for way, exec := range map[string]func(ctx context.Context, c driver.Cmd){
		"exec":  func(ctx context.Context, c driver.Cmd) { _, _ = e.d.Exec(ctx, c) },
		"multi": func(ctx context.Context, c driver.Cmd) { e.d.ExecMulti(ctx, []driver.Cmd{c, c}) },
		"wait":  func(ctx context.Context, c driver.Cmd) { _, _, _ = e.d.ExecWait(ctx, c, 0, time.Millisecond) },
	} {
		e.server.MustDo("SCRIPT", "FLUSH")
		c := driver.Cmd{Script: s, Keys: []string{way}, Args: []string{"original"}}
		e.proxy.HoldUp()
		ctx, cancel := context.WithCancel(t.Context())
		returned := make(chan struct{})
		go func() { // ends with ctx
			exec(ctx, c)
			close(returned)
		}()
		e.held(t)
		cancel()
		within(t, way, prompt, returned)
		c.Keys[0], c.Args[0] = "changed", "changed" // the race detector looks here too
		e.proxy.Release()
		redistest.WaitFor(t, "the script to run with the original arguments", func() bool {
			return e.server.MustDo("GET", way) == "original"
		})
	}
	if v := e.server.MustDo("GET", "changed"); v != nil {
		t.Errorf("the driver used arguments after it had returned: %v", v)
	}
}

func testDeadContext(t *testing.T, e *env) {
	s := count("dead context")
	e.warm(t, s)
	e.server.MustDo("CONFIG", "RESETSTAT")
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	expired, cancel := context.WithDeadline(t.Context(), time.Unix(0, 0))
	defer cancel()
	for _, ctx := range []context.Context{canceled, expired} {
		check := func(step string, err error) {
			t.Helper()
			wantClass(t, step, err, driver.ErrNotExecuted)
			if !errors.Is(err, ctx.Err()) {
				t.Errorf("%s: %v does not match %v", step, err, ctx.Err())
			}
		}
		_, err := e.d.Exec(ctx, cmd(s, "k"))
		check("Exec", err)
		check("ExecMulti", e.d.ExecMulti(ctx, []driver.Cmd{cmd(s, "k")})[0].Err)
		_, _, err = e.d.ExecWait(ctx, cmd(s, "k"), 0, time.Millisecond)
		check("ExecWait", err)
		_, err = e.d.OpenSession(ctx, func(ev driver.Event) { t.Errorf("event %v without a session", ev.Kind) })
		check("OpenSession", err)
	}
	mustExec(t, e.d, cmd(s, "k"))
	wantSent(t, e, "one live call after the dead ones", 1, 0)
}

func testSilent(t *testing.T, e *env) {
	s := count("silent")
	e.warm(t, s)
	e.proxy.BlackHole(true)
	var calls []<-chan outcome
	for range 4 {
		calls = append(calls, e.goExec(t.Context(), cmd(s, "k")), e.goExec(context.WithoutCancel(t.Context()), cmd(s, "k")))
	}
	for _, c := range calls {
		got := within(t, "Exec on a silent server", e.h.Bound, c)
		wantClass(t, "Exec on a silent server", got.err, driver.ErrUnknown, driver.ErrNotExecuted)
	}
	e.proxy.BlackHole(false)
	e.works(t)
}

func testCutUnderLoad(t *testing.T, e *env) {
	const goroutines, cuts = 16, 5
	s := count("cut under load")
	e.warm(t, s)
	var stop atomic.Bool
	var succeeded atomic.Int64
	var wg sync.WaitGroup
	failures := make(chan error, 1<<16)
	for g := range goroutines {
		wg.Go(func() { // ends when stop is set: Exec always returns
			for !stop.Load() {
				_, err := e.d.Exec(t.Context(), cmd(s, "load"+strconv.Itoa(g)))
				if err == nil {
					succeeded.Add(1)
					continue
				}
				select {
				case failures <- err:
				default:
				}
			}
		})
	}
	for range cuts {
		target := succeeded.Load() + 200
		redistest.WaitFor(t, "commands to succeed between cuts", func() bool { return succeeded.Load() >= target })
		e.proxy.CutAll()
	}
	stop.Store(true)
	wg.Wait()
	close(failures)
	for err := range failures {
		wantClass(t, "Exec over a cut connection", err, driver.ErrUnknown, driver.ErrNotExecuted)
	}
	ran := 0
	for g := range goroutines {
		ran += e.ran(t, "load"+strconv.Itoa(g))
	}
	if int64(ran) < succeeded.Load() {
		t.Errorf("%d calls succeeded but only %d ran", succeeded.Load(), ran)
	}
}

func testRefusedConnection(t *testing.T, e *env) {
	s := count("refused connection")
	e.warm(t, s)
	e.proxy.Refuse(true)
	for range 3 {
		got := within(t, "Exec", e.h.Bound, e.goExec(t.Context(), cmd(s, "k")))
		wantClass(t, "Exec", got.err, driver.ErrUnknown, driver.ErrNotExecuted)
	}
	e.proxy.Refuse(false)
	e.works(t)
	if got := e.ran(t, "k"); got != 0 {
		t.Errorf("3 commands without a connection ran %d times", got)
	}
}

func testDeadServer(t *testing.T, e *env) {
	direct := &env{h: e.h, server: e.server, d: e.h.New(t, e.server.Addr())} // a proxy would accept the dial
	s := count("dead server")
	direct.warm(t, s)
	e.server.Kill()
	redistest.WaitFor(t, "a dial to be refused", func() bool {
		got := within(t, "Exec", e.h.Bound, direct.goExec(t.Context(), cmd(s, "k")))
		wantClass(t, "Exec", got.err, driver.ErrUnknown, driver.ErrNotExecuted)
		return errors.Is(got.err, driver.ErrNotExecuted)
	})
	e.server.Restart()
	direct.works(t)
	if got := e.ran(t, "k"); got != 0 {
		t.Errorf("a command to a dead server ran %d times", got)
	}
}

func testForbiddenCommand(t *testing.T, e *env) {
	s := count("forbidden command")
	e.warm(t, s)
	e.server.MustDo("ACL", "SETUSER", "default", "-incr")
	_, err := e.d.Exec(t.Context(), cmd(s, "k"))
	wantClass(t, "a command that the user may not use, in a script", err, driver.ErrPermanent)
	e.server.MustDo("ACL", "SETUSER", "default", "+incr", "resetkeys", "~mine:*")
	_, err = e.d.Exec(t.Context(), cmd(s, "k"))
	wantClass(t, "a key that the user may not use", err, driver.ErrPermanent)
	mustExec(t, e.d, cmd(s, "mine:k"))
}

func testForbiddenEval(t *testing.T, e *env) {
	e.warm(t, count("forbidden eval"))
	e.server.MustDo("ACL", "SETUSER", "default", "-evalsha", "-eval")
	for range 2 {
		_, err := e.d.Exec(t.Context(), cmd(count("forbidden eval"), "k"))
		wantClass(t, "EVALSHA", err, driver.ErrPermanent)
	}
	_, _, err := e.d.ExecWait(t.Context(), cmd(count("forbidden eval"), "k"), 0, time.Millisecond)
	wantClass(t, "EVALSHA before WAIT", err, driver.ErrPermanent)
	e.server.MustDo("ACL", "SETUSER", "default", "+evalsha")
	_, err = e.d.Exec(t.Context(), cmd(count("a script that is not loaded"), "k"))
	wantClass(t, "EVAL after NOSCRIPT", err, driver.ErrPermanent)
}

func testNoAuth(t *testing.T, e *env) {
	s := count("no auth")
	e.warm(t, s)
	e.server.MustDo("ACL", "SETUSER", "default", "resetpass", ">secret")
	e.server.MustDo("CLIENT", "KILL", "TYPE", "normal")
	redistest.WaitFor(t, "the server to ask for a password", func() bool {
		_, err := e.d.Exec(t.Context(), cmd(s, "k"))
		wantClass(t, "Exec", err, driver.ErrPermanent, driver.ErrUnknown, driver.ErrNotExecuted)
		return errors.Is(err, driver.ErrPermanent)
	})
	_, err := e.d.OpenSession(t.Context(), func(ev driver.Event) { t.Errorf("event %v without a session", ev.Kind) })
	wantClass(t, "OpenSession", err, driver.ErrPermanent)
	if got := e.ran(t, "k"); got != 0 {
		t.Errorf("a refused script ran %d times", got)
	}
}

func testOutOfMemory(t *testing.T, e *env) {
	s := count("oom")
	e.warm(t, s)
	e.server.MustDo("CONFIG", "SET", "maxmemory", "1")
	_, err := e.d.Exec(t.Context(), cmd(s, "k"))
	wantCode(t, "a write without memory", err, "OOM")
	e.server.MustDo("CONFIG", "SET", "maxmemory", "0")
	e.works(t)
}

func testReadOnly(t *testing.T, e *env) {
	replica := redistest.StartReplica(t, e.server)
	d := e.h.New(t, replica.Addr())
	for range 2 {
		_, err := d.Exec(t.Context(), cmd(count("read only"), "k"))
		wantCode(t, "a write on a replica", err, "READONLY")
	}
}

func testForbiddenWait(t *testing.T, e *env) {
	s := count("forbidden wait")
	e.warm(t, s)
	e.server.MustDo("ACL", "SETUSER", "default", "-wait")
	_, _, err := e.d.ExecWait(t.Context(), cmd(s, "k"), 0, time.Millisecond)
	wantClass(t, "WAIT refused after the script ran", err, driver.ErrUnknown)
	if got := e.ran(t, "k"); got != 1 {
		t.Errorf("the script ran %d times, want 1", got)
	}
}

func testForbiddenChannel(t *testing.T, e *env) {
	e.server.MustDo("ACL", "SETUSER", "default", "resetchannels", "&mine:*")
	s, r := open(t, e)
	if err := s.Subscribe("theirs"); err != nil {
		t.Fatalf("Subscribe: %v", err)
	}
	redistest.WaitFor(t, "an answer to a forbidden channel", func() bool {
		return slices.ContainsFunc(r.all(), func(ev driver.Event) bool { return ev.Kind == driver.Refused || ev.Kind == driver.Down })
	})
	ev := r.all()[len(r.all())-1]
	wantClass(t, "the refusal", ev.Err, driver.ErrPermanent)
	if ev.Kind == driver.Down {
		return
	}
	if ev.Channel != "" && ev.Channel != "theirs" {
		t.Errorf("refused channel is %q", ev.Channel)
	}
	subscribe(t, s, r, "mine:1") // the session is of use after a refusal
	closeAndCheck(t, s, r)
}
