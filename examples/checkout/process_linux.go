package main

import "syscall"

// childAttr has the kernel kill a shop when its parent dies, even if it could not read that its standard input has ended.
func childAttr() *syscall.SysProcAttr { return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} }
