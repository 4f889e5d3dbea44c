package redistest

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"syscall"
)

// childAttr makes the kernel kill the server when the test binary dies without running its cleanups (timeout,
// panic in another goroutine, SIGKILL). The signal comes when the *thread* that forked ends; see startProcess.
func childAttr() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}

// pause returns once p has really stopped: the signal alone leaves a moment in which a command still runs.
func pause(p *os.Process) error {
	if err := p.Signal(syscall.SIGSTOP); err != nil {
		return err
	}
	if !poll(patience, func() bool { return state(p.Pid) == 'T' }) {
		return fmt.Errorf("process %d is in state %q, want it stopped", p.Pid, state(p.Pid))
	}
	return nil
}

// resume forgives a process that has ended, so that a test may defer Resume and still kill.
func resume(p *os.Process) error {
	if err := p.Signal(syscall.SIGCONT); !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	return nil
}

// state is the kernel's letter for the main thread, the one that runs commands; 0 if the process is gone.
func state(pid int) byte {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	// The name before it is in parentheses and may contain anything, so count from its end.
	_, after, ok := bytes.Cut(stat[bytes.LastIndexByte(stat, ')')+1:], []byte(" "))
	if !ok || len(after) == 0 {
		return 0
	}
	return after[0]
}
