package redistest

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestProxyForwardsBothWaysAndTheEnd(t *testing.T) {
	b := newBackend(t)
	p := NewProxy(t, b.addr())
	c := dial(t, p.Addr())
	big := strings.Repeat("0123456789abcdef", 1<<16) // many chunks
	go c.write(big)                                  // ends once the echo below has been read
	c.want(big)
	if got := p.Connections(); got != 1 {
		t.Errorf("Connections = %d, want 1", got)
	}
	_ = c.CloseWrite()
	c.wantEnd(io.EOF) // the backend closes when it sees the end
	b.conn(0).wantEnd()
	WaitFor(t, "the connection to be forgotten", func() bool { return p.Connections() == 0 })
	if got := p.Accepted(); got != 1 {
		t.Errorf("Accepted = %d, want 1", got)
	}
}

func TestProxyClosesTheClientWhenTheServerIsGone(t *testing.T) {
	b := newBackend(t)
	p := NewProxy(t, b.addr())
	c := connect(t, p)
	b.conn(0).close()
	c.wantEnd(io.EOF)
	b.stop()
	dial(t, p.Addr()).wantEnd(io.EOF)
}

func TestProxyDelayIsLatencyNotThroughput(t *testing.T) {
	const delay = 100 * time.Millisecond
	const sent = "the quick brown fox jumps over the lazy dog"
	for _, tc := range []struct {
		name     string
		up, down time.Duration
	}{{"up", delay, 0}, {"down", 0, delay}} {
		t.Run(tc.name, func(t *testing.T) {
			p := NewProxy(t, newBackend(t).addr())
			c := connect(t, p)
			p.SetDelay(tc.up, tc.down)
			began := time.Now()
			for _, r := range sent {
				c.write(string(r)) // a chunk each, mostly
			}
			c.want(sent)
			if took := time.Since(began); took < delay || took > delay*time.Duration(len(sent))/2 {
				t.Errorf("%d writes took %v, want at least %v and far less than that for each", len(sent), took, delay)
			}
			p.SetDelay(0, 0)
			c.write("!")
			c.want("!")
		})
	}
}

func TestProxyHoldUpHoldsPresentAndFutureConnections(t *testing.T) {
	b := newBackend(t)
	p := NewProxy(t, b.addr())
	c0 := connect(t, p)
	p.HoldUp()
	c1 := dial(t, p.Addr())
	c0.write("held")
	c1.write("also")
	p.waitBuffered(t, 8, 0)
	p.ReleaseExisting() // the other kind of hold
	p.waitBuffered(t, 8, 0)
	if got := b.conn(0).received() + b.conn(1).received(); got != hello {
		t.Errorf("the server received %q, want only %q", got, hello)
	}
	p.Release()
	c0.want("held")
	c1.want("also")
}

func TestProxyHoldDownHoldsReplies(t *testing.T) {
	b := newBackend(t)
	p := NewProxy(t, b.addr())
	c := connect(t, p)
	p.HoldDown()
	c.write("ran")
	b.conn(0).want("ran")
	p.waitBuffered(t, 0, 3)
	if got := c.readFor(20 * time.Millisecond); got != "" {
		t.Errorf("the client received %q while held", got)
	}
	p.Release()
	c.want("ran")
}

func TestProxyHoldExistingLetsNewConnectionsPass(t *testing.T) {
	b := newBackend(t)
	p := NewProxy(t, b.addr())
	c0 := connect(t, p)
	p.HoldExisting()
	c0.write("late")
	p.waitBuffered(t, 4, 0)
	b.conn(0).write("news")
	c0.want("news")
	connect(t, p) // has an answer
	p.Release()   // the other kind of hold
	connect(t, p)
	p.waitBuffered(t, 4, 0)
	if got := b.conn(0).received(); got != hello {
		t.Errorf("the server received %q, want only %q", got, hello)
	}
	p.ReleaseExisting()
	c0.want("late")
}

func TestProxyDeliversHeldBytesOfACutClient(t *testing.T) {
	b := newBackend(t)
	p := NewProxy(t, b.addr())
	c := connect(t, p)
	p.HoldExisting()
	c.write("late")
	p.waitBuffered(t, 4, 0)
	p.CutClients()
	c.wantEnd(syscall.ECONNRESET)
	if got := p.Connections(); got != 0 {
		t.Errorf("Connections = %d after CutClients, want 0", got)
	}
	connect(t, p) // as a client would
	b.conn(0).want("")
	p.ReleaseExisting()
	b.conn(0).want("late")
	if b.conn(0).ended() {
		t.Error("the server noticed that the client is gone")
	}
	p.CutAll()
	b.conn(0).wantEnd()
}

func TestProxyDeliversHeldBytesOfAClientThatLeft(t *testing.T) {
	b := newBackend(t)
	p := NewProxy(t, b.addr())
	c := connect(t, p)
	p.HoldUp()
	c.write("late")
	_ = c.Close()
	WaitFor(t, "the proxy to see the end", func() bool { return p.Connections() == 0 })
	if b.conn(0).ended() || b.conn(0).received() != hello {
		t.Errorf("the server received %q, ended %v, while held", b.conn(0).received(), b.conn(0).ended())
	}
	p.Release()
	b.conn(0).want("late")
	b.conn(0).wantEnd()
}

func TestProxyCutAllCutsBothSides(t *testing.T) {
	b := newBackend(t)
	p := NewProxy(t, b.addr())
	c := connect(t, p)
	p.CutAll()
	c.wantEnd(syscall.ECONNRESET)
	b.conn(0).wantEnd()
	connect(t, p)
}

func TestProxyDropsWhatItIsTold(t *testing.T) {
	for _, tc := range []struct {
		name       string
		set        func(p *Proxy, on bool)
		dropsUp    bool
		dropsReply bool
	}{
		{"up", (*Proxy).DropUp, true, false},
		{"down", (*Proxy).DropDown, false, true},
		{"black-hole", (*Proxy).BlackHole, true, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			b := newBackend(t)
			p := NewProxy(t, b.addr())
			c := connect(t, p)
			tc.set(p, true)
			c.write("up.")
			lost, wantServer, wantClient := 3, "", "up."
			if !tc.dropsUp {
				wantServer = "up."
			}
			if tc.dropsUp || tc.dropsReply {
				wantClient = ""
			}
			p.waitSwallowed(t, lost)
			b.conn(0).write("down.")
			if tc.dropsReply {
				lost += 5
			} else {
				wantClient += "down."
			}
			p.waitSwallowed(t, lost)
			// A connection made meanwhile is accepted and treated alike.
			c1 := dial(t, p.Addr())
			c1.write("new")
			p.waitSwallowed(t, lost+3)
			tc.set(p, false)
			c.write("after")
			b.conn(0).want(wantServer + "after")
			c.want(wantClient + "after")
			c1.write("more")
			c1.want("more")
		})
	}
}

func TestProxyBlackHoleHidesThatTheServerClosed(t *testing.T) {
	b := newBackend(t)
	p := NewProxy(t, b.addr())
	c := connect(t, p)
	p.BlackHole(true)
	b.conn(0).close()
	b.stop()
	c1 := dial(t, p.Addr()) // cannot be forwarded
	for _, c := range []*peer{c, c1} {
		if got := c.readFor(20 * time.Millisecond); got != "" {
			t.Errorf("received %q out of a black hole", got)
		}
	}
	p.BlackHole(false)
	c.wantEnd(io.EOF)
	c1.wantEnd(io.EOF)
}

func TestProxyRefuseCutsOldAndNewConnections(t *testing.T) {
	b := newBackend(t)
	p := NewProxy(t, b.addr())
	c := connect(t, p)
	p.Refuse(true)
	c.wantEnd(syscall.ECONNRESET)
	b.conn(0).wantEnd()
	if c, err := net.Dial("tcp", p.Addr()); err == nil { // the reset may come before the dial returns
		(&peer{t, c.(*net.TCPConn)}).wantEnd(syscall.ECONNRESET)
	}
	WaitFor(t, "both connections to be counted", func() bool { return p.Accepted() == 2 })
	if got := p.Connections(); got != 0 {
		t.Errorf("Connections = %d, want 0", got)
	}
	p.Refuse(false)
	connect(t, p)
}

func TestProxyLosesTheReplyOnce(t *testing.T) {
	b := newBackend(t)
	p := NewProxy(t, b.addr())
	c := connect(t, p)
	fired := p.LoseReplyTo(contains("two"))
	c.write("one.")
	c.want("one.")
	c.write("two.")
	c.wantEnd(syscall.ECONNRESET) // and not a byte of the reply
	receive(t, fired)
	b.conn(0).want("one.two.")
	b.conn(0).wantEnd()
	c = connect(t, p)
	c.write("two.")
	c.want("two.")
}

func TestProxyLoseReplyFiresWhenTheServerDies(t *testing.T) {
	b := newBackend(t)
	b.mute()
	p := NewProxy(t, b.addr())
	c := dial(t, p.Addr())
	fired := p.LoseReplyTo(contains("two"))
	c.write("two.")
	b.conn(0).want("two.")
	b.conn(0).close()
	receive(t, fired)
	c.wantEnd(syscall.ECONNRESET)
}

func TestProxyLoseReplyRunsTheRequestBehindAnEarlierReply(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	p := NewProxy(t, ln.Addr().String())
	p.HoldDown() // makes no difference: the reply is lost where it is read
	c := dial(t, p.Addr())
	server, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = server.Close() }()
	var matched atomic.Bool
	fired := p.LoseReplyTo(func([]byte) bool { matched.Store(true); return true })
	c.write("two.")
	WaitFor(t, "the request to pass", matched.Load)
	if _, err := io.WriteString(server, "early reply"); err != nil {
		t.Fatal(err)
	}
	receive(t, fired)
	c.wantEnd(syscall.ECONNRESET)
	if u, d := p.Buffered(); u != 0 || d != 0 {
		t.Errorf("%d and %d bytes buffered for a client that is gone", u, d)
	}
	// Only now does the server read: a reset would have taken the request away from it.
	if got, err := io.ReadAll(server); string(got) != "two." || err != nil {
		t.Errorf("the server received %q, %v; want two. and a polite end", got, err)
	}
}

func TestProxyNeverDeliversOnce(t *testing.T) {
	b := newBackend(t)
	p := NewProxy(t, b.addr())
	c := connect(t, p)
	fired := p.NeverDeliver(contains("two"))
	c.write("one.")
	c.want("one.")
	c.write("two.")
	c.wantEnd(syscall.ECONNRESET)
	receive(t, fired)
	b.conn(0).wantEnd()
	b.conn(0).want("one.")
	c = connect(t, p)
	c.write("two.")
	c.want("two.")
}

func TestProxyStopsReadingWhenItsBufferIsFull(t *testing.T) {
	b := newBackend(t)
	p := NewProxy(t, b.addr())
	c := connect(t, p)
	p.HoldUp()
	data := bytes.Repeat([]byte("x"), 3*maxQueued)
	go c.write(string(data)) // ends when the echo has been read
	WaitFor(t, "the buffer to be full", func() bool { n, _ := p.Buffered(); return n >= maxQueued })
	if n, _ := p.Buffered(); n >= maxQueued+64<<10 {
		t.Errorf("%d bytes buffered, want at most one chunk over %d", n, maxQueued)
	}
	p.Release()
	c.want(string(data))
}

func TestProxyLeavesNoGoroutine(t *testing.T) {
	t.Run("everything-under-way", func(t *testing.T) {
		b := newBackend(t)
		p := NewProxy(t, b.addr())
		p.LoseReplyTo(contains("never sent"))
		c := connect(t, p)
		p.HoldExisting()
		c.write("held")
		p.waitBuffered(t, 4, 0)
		p.CutClients()
		connect(t, p)
		p.SetDelay(time.Hour, time.Hour)
		dial(t, p.Addr()).write("delayed")
		p.waitBuffered(t, 4+7, 0)
		p.HoldDown()
		p.BlackHole(true)
	})
	goleak.VerifyNone(t)
}

// The three fates of a command whose caller saw a broken connection, on a real server.
func TestProxyFatesOfACommand(t *testing.T) {
	const set = "SET k late\r\n"
	s := Start(t)
	p := NewProxy(t, s.Addr())
	ping := func(c *peer) *peer {
		c.write("PING\r\n")
		c.want("+PONG\r\n")
		return c
	}
	c := ping(dial(t, p.Addr()))
	receive(t, broken(p.NeverDeliver(contains("SET")), c, set))
	if got := s.CommandStats()["set"]; got != 0 {
		t.Errorf("NeverDeliver: SET ran %d times", got)
	}
	c = ping(dial(t, p.Addr()))
	receive(t, broken(p.LoseReplyTo(contains("SET")), c, set))
	if got := s.MustDo("GET", "k"); got != "late" {
		t.Errorf("LoseReplyTo: k = %v, want late", got)
	}
	// Late: after the cleanup that its caller sent on a new connection.
	c = ping(dial(t, p.Addr()))
	p.HoldExisting()
	c.write(set)
	p.waitBuffered(t, len(set), 0)
	p.CutClients()
	c = dial(t, p.Addr())
	c.write("DEL k\r\n")
	c.want(":1\r\n")
	p.ReleaseExisting()
	WaitFor(t, "the late SET", func() bool { return s.MustDo("GET", "k") == "late" })
}

// broken writes request to c, whose connection is expected to fail, and returns fired.
func broken(fired <-chan struct{}, c *peer, request string) <-chan struct{} {
	c.t.Helper()
	c.write(request)
	c.wantEnd(syscall.ECONNRESET)
	return fired
}

func contains(s string) func([]byte) bool {
	return func(request []byte) bool { return bytes.Contains(request, []byte(s)) }
}

func receive(t *testing.T, fired <-chan struct{}) {
	t.Helper()
	select {
	case <-fired:
	case <-time.After(patience):
		t.Fatal("the fault never fired")
	}
}

func (p *Proxy) waitBuffered(t *testing.T, up, down int) {
	t.Helper()
	WaitFor(t, "bytes in the proxy", func() bool {
		u, d := p.Buffered()
		return u == up && d == down
	})
}

func (p *Proxy) waitSwallowed(t *testing.T, n int) {
	t.Helper()
	WaitFor(t, "bytes to be swallowed", func() bool { return p.Swallowed() == n })
}

// peer is a client in a test.
type peer struct {
	t *testing.T
	*net.TCPConn
}

func dial(t *testing.T, addr string) *peer {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return &peer{t, c.(*net.TCPConn)}
}

const hello = "hello;"

// connect dials and has an answer, so the connection exists on both sides of the proxy.
func connect(t *testing.T, p *Proxy) *peer {
	t.Helper()
	c := dial(t, p.Addr())
	c.write(hello)
	c.want(hello)
	return c
}

func (c *peer) write(s string) {
	c.t.Helper()
	if _, err := io.WriteString(c, s); err != nil {
		c.t.Errorf("write: %v", err)
	}
}

// want reads exactly want.
func (c *peer) want(want string) {
	c.t.Helper()
	_ = c.SetReadDeadline(time.Now().Add(patience))
	b := make([]byte, len(want))
	if n, err := io.ReadFull(c, b); err != nil || string(b) != want {
		c.t.Fatalf("client received %.80q, %v; want %.80q", b[:n], err, want)
	}
}

// readFor returns what arrives within d.
func (c *peer) readFor(d time.Duration) string {
	c.t.Helper()
	_ = c.SetReadDeadline(time.Now().Add(d))
	b, err := io.ReadAll(c)
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		c.t.Errorf("connection ended with %v, want it open", err)
	}
	return string(b)
}

// wantEnd waits for the connection to end, with nothing received before.
func (c *peer) wantEnd(want error) {
	c.t.Helper()
	_ = c.SetReadDeadline(time.Now().Add(patience))
	b := make([]byte, 64)
	if n, err := c.Read(b); n != 0 || !errors.Is(err, want) {
		c.t.Fatalf("client received %q, %v; want the end, %v", b[:n], err, want)
	}
}

// backend is a server that records what it receives and, unless muted, echoes it.
type backend struct {
	t  *testing.T
	ln net.Listener
	wg sync.WaitGroup

	// mu protects the fields below, and those of the conns.
	mu    sync.Mutex
	conns []*backendConn
	muted bool
}

type backendConn struct {
	b *backend
	net.Conn
	data []byte
	over bool
}

func newBackend(t *testing.T) *backend {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	b := &backend{t: t, ln: ln}
	b.wg.Go(b.serve) // ends when stop closes the listener
	t.Cleanup(func() {
		b.stop()
		b.mu.Lock()
		for _, c := range b.conns {
			_ = c.Close()
		}
		b.mu.Unlock()
		b.wg.Wait()
	})
	return b
}

func (b *backend) serve() {
	for {
		conn, err := b.ln.Accept()
		if err != nil {
			return
		}
		c := &backendConn{b: b, Conn: conn}
		b.mu.Lock()
		b.conns = append(b.conns, c)
		b.mu.Unlock()
		b.wg.Go(c.serve) // ends when the connection does, or the test
	}
}

func (b *backend) addr() string { return b.ln.Addr().String() }
func (b *backend) stop()        { _ = b.ln.Close() }

func (b *backend) mute() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.muted = true
}

// conn waits for the i-th connection.
func (b *backend) conn(i int) *backendConn {
	b.t.Helper()
	var c *backendConn
	WaitFor(b.t, "a connection to the server", func() bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		if i < len(b.conns) {
			c = b.conns[i]
		}
		return c != nil
	})
	return c
}

func (c *backendConn) serve() {
	buf := make([]byte, 64<<10)
	for {
		n, err := c.Read(buf)
		c.b.mu.Lock()
		c.data = append(c.data, buf[:n]...)
		c.over = err != nil
		muted := c.b.muted
		c.b.mu.Unlock()
		if err != nil {
			_ = c.Close()
			return
		}
		if !muted {
			_, _ = c.Write(buf[:n])
		}
	}
}

func (c *backendConn) received() string {
	c.b.mu.Lock()
	defer c.b.mu.Unlock()
	return string(c.data)
}

func (c *backendConn) ended() bool {
	c.b.mu.Lock()
	defer c.b.mu.Unlock()
	return c.over
}

func (c *backendConn) close() { _ = c.Close() }

func (c *backendConn) write(s string) {
	if _, err := io.WriteString(c, s); err != nil {
		c.b.t.Errorf("backend write: %v", err)
	}
}

// want waits until exactly want has been received, apart from the hello.
func (c *backendConn) want(want string) {
	c.b.t.Helper()
	got := ""
	if !poll(patience, func() bool { got = strings.TrimPrefix(c.received(), hello); return got == want }) {
		c.b.t.Fatalf("server received %.80q, want %.80q", got, want)
	}
}

func (c *backendConn) wantEnd() {
	c.b.t.Helper()
	WaitFor(c.b.t, "the server's connection to end", c.ended)
}
