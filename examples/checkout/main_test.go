package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/e51fe0e6/dsync/internal/redistest"
)

// mainEnv makes the test binary the program itself, and so also the shops that the program starts.
const mainEnv = "CHECKOUT_TEST_MAIN"

func TestMain(m *testing.M) {
	if os.Getenv(mainEnv) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// program returns the command that runs the program with parameters that make it short, and those given.
func program(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	short := []string{"-orders=12", "-latency=100ms", "-ttl=600ms", "-invoicing=1500ms"}
	cmd := exec.CommandContext(t.Context(), self, append(short, args...)...)
	cmd.Env = append(os.Environ(), mainEnv+"=1")
	return cmd
}

func TestEveryPromiseIsSeen(t *testing.T) {
	for _, driver := range []string{"goredis", "rueidis"} {
		t.Run("embedded/"+driver, func(t *testing.T) {
			t.Parallel()
			checkRun(t, "-driver="+driver)
		})
		t.Run("server/"+driver, func(t *testing.T) {
			t.Parallel()
			server := redistest.Start(t)
			checkRun(t, "-driver="+driver, "-redis=redis://"+server.Addr())
			keys, _ := server.MustDo("KEYS", "*").([]any)
			if len(keys) == 0 {
				t.Error("nothing is remembered in this Redis: was it used?")
			}
			for _, key := range keys {
				name := fmt.Sprint(key)
				if ttl := server.MustDo("PTTL", name); !strings.HasPrefix(name, "checkout-") || fmt.Sprint(ttl) == "-1" {
					t.Errorf("left behind: %s, PTTL %v", name, ttl)
				}
			}
		})
	}
}

func checkRun(t *testing.T, args ...string) {
	t.Helper()
	out, err := program(t, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, want := range []string{
		`(?m)^ +orders, clicks +12, 48 +12, 48$`,
		`(?m)^  ok +orders charged more than once +[1-9]\d* +0$`,
		`(?m)^  ok +clicks answered 409 with Retry-After +\d+ +[1-9]\d*$`,
		`(?m)^  ok +orders unpaid, customers who gave up, requests failed +0, 0, 0$`,
		`(?m)^  ok +invoices, numbers given twice, numbers left out +[1-9]\d*, 0, 0$`,
		`(?m)^  ok +fencing token, the next is above it by +[1-9]\d*, [1-9]\d*$`,
		`(?m)^  ok +late charge of the killed process, charges in all +refused, 1$`,
	} {
		if !regexp.MustCompile(want).Match(out) {
			t.Errorf("no line matches %s", want)
		}
	}
	if strings.Contains(string(out), "\r") {
		t.Error("a progress line was rewritten in place, though this is no terminal")
	}
	if t.Failed() {
		t.Logf("%s", out)
	}
}

func TestNoProcessIsLeftBehind(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("reads /proc")
	}
	for _, c := range []struct {
		name   string
		signal os.Signal
		code   int
	}{
		{"interrupted", os.Interrupt, 130},
		{"terminated", syscall.SIGTERM, 130},
		{"killed", os.Kill, -1},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			cmd := program(t, "-latency=1m") // so that sections are running when the signal comes
			cmd.Stderr = os.Stderr
			stdout, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			var pids []string
			lines := bufio.NewScanner(stdout)
			for busy := false; !busy && lines.Scan(); {
				if _, list, ok := strings.Cut(lines.Text(), ": pid "); ok {
					pids = strings.Split(list, ", ")
				}
				busy = strings.Contains(lines.Text(), " clicks, ")
			}
			if len(pids) != shopCount {
				t.Fatalf("the program told of the processes %v, want %d", pids, shopCount)
			}
			if err := cmd.Process.Signal(c.signal); err != nil {
				t.Fatal(err)
			}
			_, _ = io.Copy(io.Discard, stdout)
			_ = cmd.Wait()
			if code := cmd.ProcessState.ExitCode(); code != c.code {
				t.Errorf("exit status %d, want %d", code, c.code)
			}
			for _, pid := range pids {
				redistest.WaitFor(t, "process "+pid+" to end", func() bool { return !running(pid) })
			}
		})
	}
}

// running reports whether a process runs; one that has ended and is only not yet reaped does not.
func running(pid string) bool {
	stat, err := os.ReadFile(filepath.Join("/proc", pid, "stat"))
	return err == nil && !strings.Contains(string(stat), ") Z ")
}

func TestWhatCannotBeTriedIsToldAtOnce(t *testing.T) {
	for _, args := range [][]string{
		{"-driver=memcached"},
		{"-redis=http://localhost"},
		{"-redis=redis://127.0.0.1:1"},
		{"-clicks=1"},
		{"-nonsense"},
	} {
		out, err := program(t, args...).CombinedOutput()
		if bytes.Contains(out, []byte(": pid ")) {
			t.Errorf("%v: it was tried all the same\n%s", args, out)
		}
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.ExitCode() != 2 {
			t.Errorf("%v: %v, want exit status 2\n%s", args, err, out)
		}
	}
	out, err := program(t, "-h").CombinedOutput()
	if err != nil || !bytes.Contains(out, []byte("-clicks")) {
		t.Errorf("-h: %v\n%s", err, out)
	}
}

func TestABrokenPromiseFailsTheRun(t *testing.T) {
	seen := func() findings {
		f := findings{
			local: payments{orders: 2, charges: 3, doubled: 1, counts: &clickCounts{}},
			dsync: payments{orders: 2, charges: 2, counts: &clickCounts{}},
			waits: waits{invoices: 3, perShop: []int{1, 1, 1}},
			crash: crash{pid: 1, secondPID: 2, firstFence: 10, secondFence: 11, paid: true, charges: 1},
		}
		f.dsync.counts.conflicts.Store(1)
		return f
	}
	out, err := os.Create(filepath.Join(t.TempDir(), "out"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = out.Close() }()
	if !newConsole(out).report(seen()) {
		t.Fatal("the report failed though every promise was seen to hold")
	}
	for name, breakIt := range map[string]func(f *findings){
		"no double charge without":  func(f *findings) { f.local.doubled = 0 },
		"double charge with dsync":  func(f *findings) { f.dsync.doubled = 1 },
		"an order unpaid":           func(f *findings) { f.dsync.unpaid = 1 },
		"a customer gave up":        func(f *findings) { f.dsync.counts.gaveUp.Store(1) },
		"a request failed":          func(f *findings) { f.dsync.counts.failed.Store(1) },
		"no 409":                    func(f *findings) { f.dsync.counts.conflicts.Store(0) },
		"409 without Retry-After":   func(f *findings) { f.dsync.counts.noRetryAfter.Store(1) },
		"no invoice":                func(f *findings) { f.waits.invoices = 0 },
		"a number twice":            func(f *findings) { f.waits.twice = 1 },
		"a number missing":          func(f *findings) { f.waits.missing = 1 },
		"a process starved":         func(f *findings) { f.waits.perShop[1] = 0 },
		"the order never went on":   func(f *findings) { f.crash.paid = false },
		"the dead one went on":      func(f *findings) { f.crash.secondPID = 1 },
		"the fence is not higher":   func(f *findings) { f.crash.secondFence = 10 },
		"the late charge was taken": func(f *findings) { f.crash.lateAccepted = true },
		"charged twice after all":   func(f *findings) { f.crash.charges = 2 },
	} {
		f := seen()
		breakIt(&f)
		if newConsole(out).report(f) {
			t.Errorf("%s: the report passed", name)
		}
	}
}

func TestTheBankRefusesOldFences(t *testing.T) {
	b := newBank(0)
	server := httptest.NewServer(b.handler(t.Context()))
	defer server.Close()
	c := &bankClient{http: server.Client(), url: server.URL}
	if paid, err := c.paid(t.Context(), "1", 8); paid || err != nil {
		t.Fatalf("paid = %t, %v", paid, err)
	}
	// The question was asked under 8, so a charge under 7 must not slip in between it and the charge that follows from it.
	if err := c.charge(t.Context(), "1", 7); err == nil {
		t.Error("a charge under an older fence was accepted")
	}
	if err := c.charge(t.Context(), "1", 8); err != nil {
		t.Error(err)
	}
	if err := c.charge(t.Context(), "2", 7); err != nil {
		t.Errorf("another order's fence: %v", err)
	}
	if n := len(b.chargesOf("1")); n != 1 {
		t.Errorf("%d charges, want 1", n)
	}
}
