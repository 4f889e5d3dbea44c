package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"
)

const (
	shopCount   = 3
	readyPrefix = "ready at "
)

// town is a bank, the processes of a shop, and their customers.
type town struct {
	bank      *bank
	shops     []*process
	customers *customers
	lock      string
	closeBank func()
}

// process is one process of the shop.
type process struct {
	cmd    *exec.Cmd
	stdout io.Reader
	url    string
	cancel context.CancelFunc // ends it
	waited bool
}

// open starts a bank and the shop's processes. They end with ctx, with close, or with this process, whatever comes first.
func open(ctx context.Context, cfg config, lock string) (_ *town, err error) {
	t := &town{bank: newBank(cfg.latency), customers: &customers{http: newHTTPClient()}, lock: lock}
	bankURL, err := t.openBank(ctx)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			t.close()
		}
	}()
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	for range shopCount {
		p, err := start(ctx, []string{redisEnv + "=" + cfg.redis}, self, shopCommand, "-lock="+lock, "-driver="+cfg.driver,
			"-prefix="+cfg.prefix, "-ttl="+cfg.ttl.String(), "-bank="+bankURL)
		if err != nil {
			return nil, err
		}
		t.shops = append(t.shops, p)
	}
	for _, p := range t.shops { // they started together; now wait for each
		if err := p.ready(); err != nil {
			return nil, err
		}
		t.customers.shops = append(t.customers.shops, p.url)
	}
	return t, nil
}

func (t *town) openBank(ctx context.Context) (string, error) {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithCancel(ctx)
	server := &http.Server{Handler: t.bank.handler(ctx), ReadHeaderTimeout: 10 * time.Second}
	go func() { _ = server.Serve(listener) }() // ends when the bank is closed
	t.closeBank = func() { cancel(); _ = server.Close() }
	return "http://" + listener.Addr().String(), nil
}

// String tells which processes there are.
func (t *town) String() string {
	pids := make([]string, len(t.shops))
	for i, p := range t.shops {
		pids[i] = strconv.Itoa(p.cmd.Process.Pid)
	}
	return fmt.Sprintf("three processes, -lock=%s: pid %s", t.lock, strings.Join(pids, ", "))
}

// kill kills the process with SIGKILL: it cannot release anything, nor say goodbye.
func (t *town) kill(pid int) error {
	for _, p := range t.shops {
		if p.cmd.Process.Pid == pid {
			if err := p.cmd.Process.Kill(); err != nil {
				return err
			}
			p.wait()
			return nil
		}
	}
	return fmt.Errorf("no process of the shop has pid %d", pid)
}

// close ends the processes and waits for them, then closes the bank.
func (t *town) close() {
	for _, p := range t.shops {
		p.cancel()
	}
	for _, p := range t.shops {
		p.wait()
	}
	t.closeBank()
}

// start starts a process that ends when its standard input does, be it that it is told to or that this process is gone.
func start(ctx context.Context, env []string, name string, args ...string) (*process, error) {
	ctx, cancel := context.WithCancel(ctx)
	p := &process{cmd: exec.CommandContext(ctx, name, args...), cancel: cancel}
	p.cmd.Env = append(os.Environ(), env...)
	p.cmd.Stderr = os.Stderr
	p.cmd.SysProcAttr = childAttr()
	stdin, err := p.cmd.StdinPipe()
	if err != nil {
		cancel()
		return nil, err
	}
	p.cmd.Cancel = stdin.Close        // asks it to end
	p.cmd.WaitDelay = 4 * time.Second // then it is killed
	p.stdout, err = p.cmd.StdoutPipe()
	if err == nil {
		err = p.cmd.Start()
	}
	if err != nil {
		cancel()
		return nil, err
	}
	return p, nil
}

// ready waits until the process serves. If it cannot, it has said why on standard error.
func (p *process) ready() error {
	line, err := bufio.NewReader(p.stdout).ReadString('\n')
	url, ok := strings.CutPrefix(strings.TrimSpace(line), readyPrefix)
	if !ok {
		return fmt.Errorf("a process of the shop did not start: %q, %w", line, err)
	}
	p.url = url
	return nil
}

// wait returns when the process has ended. How it ended says nothing that is not known already.
func (p *process) wait() {
	if !p.waited {
		p.waited = true
		_ = p.cmd.Wait()
		p.cancel()
	}
}
