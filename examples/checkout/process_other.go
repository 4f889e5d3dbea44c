//go:build !linux

package main

import "syscall"

// childAttr leaves it to the end of standard input to tell a shop that its parent is gone.
func childAttr() *syscall.SysProcAttr { return nil }
