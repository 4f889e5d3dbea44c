package sim

import (
	"context"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"
)

// Direction of a stream on a connection.
type Direction int

// Directions.
const (
	Up   Direction = iota // to the server
	Down                  // to the client
)

// Kind of a connection, found from what its client sends.
type Kind int

// Kinds.
const (
	Commands Kind = iota
	Subscription
)

// dialTimeout is what the client libraries are configured to wait for a connection.
const dialTimeout = time.Second

// forever is later than any simulation ends.
const forever = 100 * 365 * 24 * time.Hour

// Link is a process's way to the server. Every fault of the network is one of its methods.
type Link struct {
	name    string
	server  func() (net.Conn, error) // in memory
	latency func(dice *rand.Rand) time.Duration
	log     func(name, format string, args ...any)
	seed    uint64

	mu     sync.Mutex // guards what follows and all connections; nothing waits under it
	conns  []*Conn
	dialed int
	held   [2][2]time.Time // by kind and direction: nothing passes before this; what holds commands holds dials too
	refuse bool            // dials fail at once
	dead   bool            // Kill was called
	drop   func(payload string) bool
}

// Conn is one connection, from the client's side. A write never blocks: the bytes are on their way, and arrive even if the client closes
// the connection right after, as they do in TCP.
type Conn struct {
	link   *Link
	id     int
	server net.Conn // the server's side ends here
	dice   *rand.Rand

	// Guarded by link.mu.
	kind     Kind
	streams  [2]stream
	closed   bool  // by the client
	gone     bool  // the server's side is closed
	broken   error // what the client gets from now on
	deadline time.Time
	wake     chan struct{} // closed and replaced whenever anything above changes
}

// stream is what is on its way in one direction, in order.
type stream struct {
	segments []segment
	last     time.Time // when the newest arrives
	held     time.Time // nothing arrives before this
}

// segment is some bytes, or the end of the stream.
type segment struct {
	data []byte
	at   time.Time
	end  error
}

// Dial makes a connection. It fails as net.Dial does.
func (l *Link) Dial(ctx context.Context) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	fail := func(err error) (net.Conn, error) {
		return nil, &net.OpError{Op: "dial", Net: "sim", Addr: addr("server"), Err: err}
	}
	l.mu.Lock()
	l.dialed++
	id := l.dialed
	l.mu.Unlock()
	c := &Conn{link: l, id: id, dice: rand.New(rand.NewPCG(l.seed, uint64(id))), wake: make(chan struct{})}
	delay := l.latency(c.dice) + l.latency(c.dice)
	for wait := true; wait; {
		l.mu.Lock()
		held := later(l.held[Commands][Up], l.held[Commands][Down])
		refused := l.refuse || l.dead
		l.mu.Unlock()
		if refused {
			return fail(syscall.ECONNREFUSED)
		}
		at := later(time.Now().Add(delay), held)
		if wait = at.After(time.Now()); wait {
			delay = 0
			select {
			case <-time.After(min(time.Until(at), 10*time.Millisecond)): // looks again: the hold may be lifted
			case <-ctx.Done():
				return fail(os.ErrDeadlineExceeded)
			}
		}
	}
	server, err := l.server()
	if err != nil {
		return fail(err)
	}
	c.server = server
	l.mu.Lock()
	l.conns = append(l.conns, c)
	l.mu.Unlock()
	go c.pumpUp()   // ends with the stream up, or when the server is gone
	go c.pumpDown() // ends when the server's side is closed
	return c, nil
}

// Drop has f decide which messages of subscriptions vanish; nil: none.
func (l *Link) Drop(f func(payload string) bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.drop = f
}

// Refuse has dials fail at once, or not any more.
func (l *Link) Refuse(on bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.refuse = on
}

// Hold keeps everything back in the directions for so long, new connections too. It is silent: nobody gets an error. What was held is late, not lost.
func (l *Link) Hold(d time.Duration, dirs ...Direction) {
	l.HoldKind(d, Commands, dirs...)
	l.HoldKind(d, Subscription, dirs...)
}

// HoldKind is Hold for the connections of one kind, also for those that come to be of it.
func (l *Link) HoldKind(d time.Duration, kind Kind, dirs ...Direction) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, dir := range dirs {
		l.held[kind][dir] = time.Now().Add(d)
	}
	l.wakeLocked()
}

// HoldConns is Hold for the connections of one kind that are there now, and for no new ones.
func (l *Link) HoldConns(d time.Duration, kind Kind, dirs ...Direction) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range l.conns {
		if c.kind == kind {
			c.holdLocked(d, dirs...)
		}
	}
}

// Cut breaks all connections of the kinds: the client gets an error at once. What it had sent arrives after late, if late is more than 0, and is
// lost otherwise. What the server had sent is lost.
func (l *Link) Cut(late time.Duration, kinds ...Kind) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range slices.Clone(l.conns) { // a cut connection may leave the list
		if slices.Contains(kinds, c.kind) {
			c.cutLocked(late)
		}
	}
}

// Heal ends all that keeps the link from working, but for Kill.
func (l *Link) Heal() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.held = [2][2]time.Time{}
	l.refuse = false
	l.drop = nil
	for _, c := range l.conns {
		for d := range c.streams {
			c.streams[d].held = time.Time{}
		}
	}
	l.wakeLocked()
}

// Kill ends the link for good. What was sent arrives as with Cut.
func (l *Link) Kill(late time.Duration) {
	l.mu.Lock()
	l.dead = true
	l.mu.Unlock()
	l.Cut(late, Commands, Subscription)
}

func (l *Link) wakeLocked() {
	for _, c := range l.conns {
		c.changedLocked()
	}
}

// overLocked forgets a connection that neither side uses any more.
func (c *Conn) overLocked() {
	if c.gone && (c.closed || c.broken != nil) {
		c.link.conns = slices.DeleteFunc(c.link.conns, func(other *Conn) bool { return other == c })
	}
}

func (c *Conn) holdLocked(d time.Duration, dirs ...Direction) {
	for _, dir := range dirs {
		c.streams[dir].held = time.Now().Add(d)
	}
	c.changedLocked()
}

func (c *Conn) cutLocked(late time.Duration) {
	if c.broken != nil {
		return
	}
	c.broken = &net.OpError{Op: "read", Net: "sim", Err: syscall.ECONNRESET}
	up := &c.streams[Up]
	if late > 0 {
		up.held = later(up.held, time.Now().Add(late))
	} else {
		up.segments, up.held = nil, time.Time{}
	}
	c.endLocked()
	c.changedLocked()
	c.overLocked()
}

// endLocked ends the stream to the server.
func (c *Conn) endLocked() {
	up := &c.streams[Up]
	up.segments = append(up.segments, segment{at: later(up.last, time.Now()), end: io.EOF})
}

func (c *Conn) changedLocked() {
	close(c.wake)
	c.wake = make(chan struct{})
}

// Write implements net.Conn.
func (c *Conn) Write(b []byte) (int, error) {
	c.link.mu.Lock()
	defer c.link.mu.Unlock()
	switch {
	case c.closed:
		return 0, net.ErrClosed
	case c.broken != nil:
		return 0, c.broken
	}
	if subscribes(b) {
		c.kind = Subscription
	}
	c.pushLocked(Up, segment{data: append([]byte(nil), b...)})
	return len(b), nil
}

func (c *Conn) pushLocked(d Direction, s segment) {
	st := &c.streams[d]
	s.at = later(st.last, time.Now().Add(c.link.latency(c.dice)))
	st.last = s.at
	st.segments = append(st.segments, s)
	c.changedLocked()
}

// Read implements net.Conn.
func (c *Conn) Read(b []byte) (int, error) { return c.take(Down, b) }

// take waits for what arrives next.
func (c *Conn) take(d Direction, b []byte) (int, error) {
	for {
		c.link.mu.Lock()
		n, until, err := c.tryLocked(d, b)
		wake := c.wake
		c.link.mu.Unlock()
		if n > 0 || err != nil {
			return n, err
		}
		if until.IsZero() {
			<-wake
			continue
		}
		timer := time.NewTimer(time.Until(until))
		select {
		case <-wake:
		case <-timer.C:
		}
		timer.Stop()
	}
}

// tryLocked takes what has arrived, or says when to look again if nothing changes meanwhile.
func (c *Conn) tryLocked(d Direction, b []byte) (n int, until time.Time, err error) {
	if d == Down && c.closed {
		return 0, until, net.ErrClosed
	}
	if d == Down && c.broken != nil {
		return 0, until, c.broken
	}
	now, st := time.Now(), &c.streams[d]
	if len(st.segments) > 0 {
		head := &st.segments[0]
		at := later(head.at, later(st.held, c.link.held[c.kind][d]))
		switch {
		case at.After(now):
			until = at
		case head.end != nil:
			return 0, until, head.end
		default:
			n = copy(b, head.data)
			if head.data = head.data[n:]; len(head.data) == 0 {
				st.segments = st.segments[1:]
			}
			return n, until, nil
		}
	}
	if d == Down && !c.deadline.IsZero() {
		if !c.deadline.After(now) {
			return 0, until, os.ErrDeadlineExceeded
		}
		if until.IsZero() || c.deadline.Before(until) {
			until = c.deadline
		}
	}
	return 0, until, nil
}

// pumpUp brings the server what has arrived.
func (c *Conn) pumpUp() {
	defer func() { _ = c.server.Close() }()
	b := make([]byte, 64<<10)
	for {
		n, err := c.take(Up, b)
		if err != nil {
			return
		}
		if _, err := c.server.Write(b[:n]); err != nil {
			return
		}
	}
}

// pumpDown takes from the server whatever it sends, at once, and lets it travel.
func (c *Conn) pumpDown() {
	var got []byte
	b := make([]byte, 64<<10)
	for {
		n, err := c.server.Read(b)
		got = append(got, b[:n]...)
		c.link.mu.Lock()
		for size := frame(got); size > 0; size = frame(got) {
			one := got[:size:size]
			got = got[size:]
			if text, ok := message(one); ok && c.link.drop != nil && c.link.drop(text) {
				c.link.log("", "%s: net drops %q", c.link.name, text)
				continue
			}
			c.pushLocked(Down, segment{data: append([]byte(nil), one...)})
		}
		if err != nil {
			c.pushLocked(Down, segment{end: io.EOF})
			c.gone = true
			c.overLocked()
		}
		c.link.mu.Unlock()
		if err != nil {
			return
		}
	}
}

// Close implements net.Conn.
func (c *Conn) Close() error {
	c.link.mu.Lock()
	defer c.link.mu.Unlock()
	if c.closed {
		return net.ErrClosed
	}
	c.closed = true
	if c.broken == nil {
		c.endLocked()
	}
	c.changedLocked()
	c.overLocked()
	return nil
}

// SetDeadline implements net.Conn. Writes need none.
func (c *Conn) SetDeadline(t time.Time) error { return c.SetReadDeadline(t) }

// SetReadDeadline implements net.Conn.
func (c *Conn) SetReadDeadline(t time.Time) error {
	c.link.mu.Lock()
	defer c.link.mu.Unlock()
	c.deadline = t
	c.changedLocked()
	return nil
}

// SetWriteDeadline implements net.Conn.
func (c *Conn) SetWriteDeadline(time.Time) error { return nil }

// LocalAddr implements net.Conn.
func (c *Conn) LocalAddr() net.Addr { return addr(c.link.name) }

// RemoteAddr implements net.Conn.
func (c *Conn) RemoteAddr() net.Addr { return addr("server") }

type addr string

func (a addr) Network() string { return "sim" }
func (a addr) String() string  { return string(a) }

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}
