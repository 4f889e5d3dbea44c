package redistest

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestPauseStopsAndResumeContinues(t *testing.T) {
	s := Start(t)
	c := dial(t, s.Addr())
	s.Pause()
	if got := state(s.Pid()); got != 'T' {
		t.Errorf("state after Pause = %q, want T", got)
	}
	c.write("PING\r\n")
	if got := c.readFor(50 * time.Millisecond); got != "" {
		t.Errorf("a paused server answered %q", got)
	}
	s.Resume()
	c.want("+PONG\r\n")
}

func TestKillEndsAPausedServer(t *testing.T) {
	s := Start(t)
	defer s.Resume() // of a dead server: nothing happens
	s.Pause()
	s.Kill()
	if listening(s.Addr()) {
		t.Error("somebody listens after Kill")
	}
}

func TestServerOutlivesTheThreadThatStartedIt(t *testing.T) {
	type result struct {
		tid  int
		s    *Server
		stop func()
		err  error
	}
	results, release := make(chan result), make(chan struct{})
	var start func()
	start = func() {
		runtime.LockOSThread()
		if syscall.Gettid() == os.Getpid() {
			go start() // ends after its send; it gets another thread while this one is taken
			<-release  // the main thread never ends, so it is of no use here
			runtime.UnlockOSThread()
			return
		}
		s, stop, err := StartMain()
		results <- result{syscall.Gettid(), s, stop, err}
	}
	go start() // ends after the send, or by release. Its thread ends with it, as it is never unlocked
	r := <-results
	close(release)
	if r.err != nil {
		t.Fatal(r.err)
	}
	defer r.stop()
	WaitFor(t, "the thread to end", func() bool {
		_, err := os.Stat(fmt.Sprintf("/proc/self/task/%d", r.tid))
		return errors.Is(err, os.ErrNotExist)
	})
	if _, err := r.s.Do("PING"); err != nil {
		t.Errorf("PING after the thread has ended: %v", err)
	}
}

func TestServerDiesWithTheTestProcess(t *testing.T) {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), orphanEnv+"=1", "TMPDIR="+t.TempDir())
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	addr, err := bufio.NewReader(stdout).ReadString('\n')
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	_ = stdin.Close()
	addr = strings.TrimSpace(addr)
	if _, _, splitErr := net.SplitHostPort(addr); err != nil || splitErr != nil {
		t.Fatalf("the other process said %q, %v; want an address", addr, err)
	}
	WaitFor(t, "the server to die", func() bool { return !listening(addr) })
}
