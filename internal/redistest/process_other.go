//go:build !linux

package redistest

import (
	"errors"
	"os"
	"syscall"
)

// Without Pdeathsig a server outlives a test binary that dies without running its cleanups.
func childAttr() *syscall.SysProcAttr { return nil }

func pause(*os.Process) error { return errors.New("redistest: Pause needs /proc, which is Linux only") }

func resume(*os.Process) error { return errors.New("redistest: Resume is implemented for Linux only") }
