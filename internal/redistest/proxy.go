package redistest

import (
	"bytes"
	"net"
	"slices"
	"sync"
	"testing"
	"time"
)

// maxQueued bounds what one direction of one connection keeps in the proxy. Beyond it the proxy stops reading, and
// the sender feels it as it would on a real network.
const maxQueued = 4 << 20

// Proxy forwards TCP connections to one address, with faults. "Up" is client to server, "down" is server to client.
//
// Bytes travel in chunks, what one read returned: usually all that one write of the sender held. A chunk is
// subject to the faults that are on when it leaves the proxy: delayed or held chunks can still be dropped. The end
// of a stream travels behind its bytes; where bytes are dropped it waits until the fault is over, because who loses
// every packet does not see the other side close.
//
// A connection exists once the proxy has accepted it, which may be a moment after the client's dial returned: let the
// client have an answer first, or wait for Connections, before using a method that speaks of existing connections.
//
// All methods may be called concurrently.
type Proxy struct {
	target   string
	listener *net.TCPListener
	wg       sync.WaitGroup // the accept loop and one serve per connection

	// mu protects everything below and every field of the links. Nothing blocks while it is held:
	// bytes are read and written without it. Each pump waits on a condition of its own that uses mu.
	mu        sync.Mutex
	links     map[*link]struct{}
	accepted  int
	swallowed int
	delay     [2]time.Duration // by direction
	hold      [2]bool
	drop      [2]bool
	blackHole bool
	refuse    bool
	closed    bool
	rules     []*rule // not fired yet
}

type direction int

const (
	up direction = iota
	down
)

// rule is a fault that waits for its request.
type rule struct {
	match   func(request []byte) bool
	deliver bool          // to the server, losing the reply; otherwise the request is lost
	fired   chan struct{} // closed when the fault has happened
}

// link is one connection of a client, and the one to the server made for it.
type link struct {
	client *net.TCPConn
	server *net.TCPConn // nil while it is being dialed
	pumps  [2]*pump
	held   bool            // HoldExisting
	ended  bool            // the client has closed its sending side
	cut    bool            // the client side was closed by a fault
	orphan bool            // ... and the server must not notice
	dead   bool            // both sides are closed; all goroutines are on their way out
	losing []chan struct{} // LoseReplyTo: the next bytes from the server are lost and close these
}

// pump is one direction of a link: a reader fills the queue, a writer empties it. Two goroutines, so that bytes
// under way neither slow down those behind them nor hide the end of the connection.
type pump struct {
	dir   direction
	ready sync.Cond // on Proxy.mu: the queue or a fault has changed
	queue []chunk
	size  int // bytes in queue
}

type chunk struct {
	data []byte // nil: the stream ends here
	due  time.Time
}

// NewProxy starts a proxy on a free loopback port. It ends with the test, with every connection through it.
func NewProxy(tb testing.TB, target string) *Proxy {
	tb.Helper()
	ln, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		tb.Fatalf("start proxy: %v", err)
	}
	p := &Proxy{target: target, listener: ln, links: make(map[*link]struct{})}
	p.wg.Go(p.accept) // ends when close closes the listener
	tb.Cleanup(p.close)
	return p
}

func (p *Proxy) close() {
	_ = p.listener.Close()
	p.change(func() {
		p.closed = true
		p.eachLocked(p.killLocked)
	})
	p.wg.Wait()
}

// Addr is the host:port for clients.
func (p *Proxy) Addr() string { return p.listener.Addr().String() }

// Connections is the number of connections whose client side is open.
func (p *Proxy) Connections() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for l := range p.links {
		if !l.cut && !l.ended {
			n++
		}
	}
	return n
}

// Accepted is the number of connections that clients ever made, refused ones included.
func (p *Proxy) Accepted() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.accepted
}

// Buffered is the number of bytes that are in the proxy, held or delayed. A test that holds a request waits for upBytes > 0 to know
// that the client has sent it.
func (p *Proxy) Buffered() (upBytes, downBytes int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for l := range p.links {
		upBytes += l.pumps[up].size
		downBytes += l.pumps[down].size
	}
	return upBytes, downBytes
}

// Swallowed is the number of bytes lost so far to BlackHole, DropUp, DropDown, LoseReplyTo and NeverDeliver. It tells a test
// that what was sent has met the fault, before the fault is lifted.
func (p *Proxy) Swallowed() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.swallowed
}

// SetDelay adds latency to bytes that arrive from now on. Order is kept, throughput is not limited.
func (p *Proxy) SetDelay(up, down time.Duration) {
	p.change(func() { p.delay = [2]time.Duration{up, down} })
}

// HoldUp keeps the bytes of every client, present or future, from the server until Release.
func (p *Proxy) HoldUp() { p.change(func() { p.hold[up] = true }) }

// HoldDown keeps the bytes of the server from every client, present or future, until Release.
func (p *Proxy) HoldDown() { p.change(func() { p.hold[down] = true }) }

// Release ends HoldUp and HoldDown, but not HoldExisting. What was held is delivered.
func (p *Proxy) Release() { p.change(func() { p.hold = [2]bool{} }) }

// HoldExisting is HoldUp for the connections that exist now; later ones pass. A command held like this
// runs after those that its client sends on a new connection.
func (p *Proxy) HoldExisting() { p.change(func() { p.eachLocked(func(l *link) { l.held = true }) }) }

// ReleaseExisting ends HoldExisting. What was held is delivered, even if its client is gone.
func (p *Proxy) ReleaseExisting() {
	p.change(func() { p.eachLocked(func(l *link) { l.held = false }) })
}

// CutClients resets the client side of every connection. The server side stays open, and the server still
// gets all bytes that the proxy has read (see Buffered), held ones when they are released: the
// client sees a failure, and its command runs late.
func (p *Proxy) CutClients() {
	p.change(func() {
		p.eachLocked(func(l *link) {
			if !l.cut && !l.ended {
				l.orphan = true
				p.cutClientLocked(l)
			}
		})
	})
}

// CutAll resets every connection on both sides. Bytes in the proxy are lost, and the server may drop what it has not read yet.
func (p *Proxy) CutAll() { p.change(func() { p.eachLocked(p.killLocked) }) }

// BlackHole swallows all bytes both ways while on. Connections stay open, and new ones are accepted. What was swallowed is
// missing afterwards: a pipelining client then takes replies for those of other requests, so end it with CutAll.
func (p *Proxy) BlackHole(on bool) { p.change(func() { p.blackHole = on }) }

// DropUp swallows the bytes from clients while on.
func (p *Proxy) DropUp(on bool) { p.change(func() { p.drop[up] = on }) }

// DropDown swallows the bytes from the server while on: commands run, and nobody hears of it.
func (p *Proxy) DropDown(on bool) { p.change(func() { p.drop[down] = on }) }

// Refuse cuts all connections and, while on, closes each new one at once. A dial may still
// succeed, and the first read fails.
func (p *Proxy) Refuse(on bool) {
	p.change(func() {
		p.refuse = on
		if on {
			p.eachLocked(p.killLocked)
		}
	})
}

// LoseReplyTo makes the next chunk that matches run without an answer: it is delivered, the next bytes from the
// server are discarded, and the client's connection is reset. On a pipelined connection those bytes may answer an earlier
// request; the matching one runs all the same. It happens once, and then the returned channel is closed. (So it
// is, too, if the server closes the connection instead of answering: whether the request ran is open then.)
//
// match sees everything that the client wrote at once, which may be several commands. It is called under the proxy's lock and must
// not call the proxy nor keep its argument.
func (p *Proxy) LoseReplyTo(match func(request []byte) bool) <-chan struct{} {
	return p.addRule(match, true)
}

// NeverDeliver makes the next chunk that matches never run: it is lost and the connection is reset on both sides. It
// happens once, and then the returned channel is closed. For match see LoseReplyTo.
func (p *Proxy) NeverDeliver(match func(request []byte) bool) <-chan struct{} {
	return p.addRule(match, false)
}

func (p *Proxy) addRule(match func([]byte) bool, deliver bool) <-chan struct{} {
	r := &rule{match: match, deliver: deliver, fired: make(chan struct{})}
	p.change(func() { p.rules = append(p.rules, r) })
	return r.fired
}

// change applies a fault and wakes everybody whom it may concern.
func (p *Proxy) change(apply func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	apply()
	p.eachLocked(wakeLocked)
}

func (p *Proxy) eachLocked(do func(*link)) {
	for l := range p.links {
		do(l)
	}
}

func wakeLocked(l *link) {
	for _, d := range l.pumps {
		d.ready.Broadcast()
	}
}

// cutClientLocked resets the client side. The reader of that side ends by it.
func (p *Proxy) cutClientLocked(l *link) {
	l.cut = true
	reset(l.client)
}

// killLocked resets both sides and ends the link's goroutines.
func (p *Proxy) killLocked(l *link) {
	l.dead = true
	p.cutClientLocked(l)
	if l.server != nil {
		reset(l.server)
	}
	wakeLocked(l)
}

// reset closes with RST instead of FIN. Closing twice is harmless.
func reset(c *net.TCPConn) {
	_ = c.SetLinger(0)
	_ = c.Close()
}

func (p *Proxy) accept() {
	for {
		c, err := p.listener.AcceptTCP()
		if err != nil {
			// Closed, or out of descriptors: then a listener that is closed tells the test, and a loop would not.
			_ = p.listener.Close()
			return
		}
		p.mu.Lock()
		p.accepted++
		if p.refuse || p.closed {
			reset(c)
		} else {
			l := &link{client: c}
			for _, dir := range []direction{up, down} {
				l.pumps[dir] = &pump{dir: dir, ready: sync.Cond{L: &p.mu}}
			}
			p.links[l] = struct{}{}
			p.wg.Go(func() { p.serve(l) }) // ends with the link: both sides closed, or close
		}
		p.mu.Unlock()
	}
}

// serve connects l to the server and moves bytes until the server closes or a fault ends the link. A client that leaves
// does not end it: its last bytes may still be held.
func (p *Proxy) serve(l *link) {
	if p.dial(l) {
		var wg sync.WaitGroup
		// The readers end when their connection is closed, below at the latest; the writer when the link is dead.
		wg.Go(func() { p.read(l, l.pumps[up], l.client) })
		wg.Go(func() { p.read(l, l.pumps[down], l.server) })
		wg.Go(func() { p.write(l, l.pumps[up], l.server) })
		p.write(l, l.pumps[down], l.client)
		defer wg.Wait()
	}
	p.mu.Lock()
	defer p.mu.Unlock() // before wg.Wait, which needs the lock free
	l.dead = true
	delete(p.links, l)
	_ = l.client.Close() // with FIN, unless it was reset
	if l.server != nil {
		_ = l.server.Close()
	}
	wakeLocked(l)
}

// dial sets l.server. Where the server cannot be reached the client's connection is closed, but not while a fault
// would keep the news of it from the client.
func (p *Proxy) dial(l *link) bool {
	conn, err := net.DialTimeout("tcp", p.target, patience)
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil {
		for !l.dead && (p.hold[down] || p.droppingLocked(down)) {
			l.pumps[down].ready.Wait()
		}
		return false
	}
	server, ok := conn.(*net.TCPConn)
	if !ok || l.dead {
		_ = conn.Close()
		return false
	}
	l.server = server
	return true
}

// read fills d's queue from src until src ends.
func (p *Proxy) read(l *link, d *pump, src *net.TCPConn) {
	buf := make([]byte, 64<<10)
	for {
		n, err := src.Read(buf)
		if !p.push(l, d, buf[:n], err != nil) {
			return
		}
	}
}

// push queues what was read, and the end of the stream if last. It reports whether to go on.
func (p *Proxy) push(l *link, d *pump, data []byte, last bool) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if d.dir == down && len(l.losing) > 0 {
		p.swallowed += len(data)
		p.loseReplyLocked(l)
	}
	due := time.Now().Add(p.delay[d.dir])
	for d.size >= maxQueued && !l.dead {
		d.ready.Wait()
	}
	if l.cut && (d.dir == down || !l.orphan) {
		data = nil // nobody is left to receive it, or it came after the request whose reply was lost
	}
	if len(data) > 0 {
		d.queue = append(d.queue, chunk{bytes.Clone(data), due})
		d.size += len(data)
	}
	if last {
		d.queue = append(d.queue, chunk{nil, due})
		l.ended = l.ended || d.dir == up
	}
	d.ready.Broadcast()
	return !last && !l.dead
}

// loseReplyLocked cuts the client off. The writer of the up direction may just be writing the matching request, so
// the server side is left to it: it finds the end of the stream next and closes politely, where a reset could
// make the server drop the request unread.
func (p *Proxy) loseReplyLocked(l *link) {
	p.cutClientLocked(l)
	l.pumps[up].queue, l.pumps[up].size = nil, 0
	if l.ended {
		l.pumps[up].queue = []chunk{{nil, time.Now()}}
	}
	for _, fired := range l.losing {
		close(fired)
	}
	l.losing = nil
	wakeLocked(l)
}

// write empties d's queue into dst until the stream's end has passed or the link is dead.
func (p *Proxy) write(l *link, d *pump, dst *net.TCPConn) {
	for {
		data, ok := p.next(l, d)
		if !ok {
			return
		}
		// A failed write needs no handling: the reader of that side sees the end. What the other side sends meanwhile
		// must be taken all the same, as by a network.
		_, _ = dst.Write(data)
	}
}

// next waits for the chunk to be written next. At the end of the stream it closes the server's side as the
// client did and returns false; the client's side is closed by serve.
func (p *Proxy) next(l *link, d *pump) ([]byte, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for !l.dead {
		if len(d.queue) == 0 || p.hold[d.dir] || l.held && d.dir == up {
			d.ready.Wait()
			continue
		}
		c := d.queue[0]
		if wait := time.Until(c.due); wait > 0 {
			p.waitLocked(d, wait)
			continue
		}
		dropping := p.droppingLocked(d.dir)
		if c.data == nil {
			if dropping {
				d.ready.Wait()
				continue
			}
			if d.dir == up && !l.orphan {
				_ = l.server.CloseWrite()
			}
			return nil, false
		}
		d.queue = d.queue[1:]
		d.size -= len(c.data)
		d.ready.Broadcast() // the reader may wait for room
		if !dropping && (d.dir == down || p.passesLocked(l, c.data)) {
			return c.data, true
		}
		p.swallowed += len(c.data)
	}
	return nil, false
}

// waitLocked waits for a change of d, at most for limit.
func (p *Proxy) waitLocked(d *pump, limit time.Duration) {
	// The callback takes the lock, so it cannot fire between this line and the wait. It runs once.
	t := time.AfterFunc(limit, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		d.ready.Broadcast()
	})
	defer t.Stop()
	d.ready.Wait()
}

func (p *Proxy) droppingLocked(dir direction) bool { return p.blackHole || p.drop[dir] }

// passesLocked looks for a rule that waits for request, applies it and reports whether the request is delivered.
func (p *Proxy) passesLocked(l *link, request []byte) bool {
	i := slices.IndexFunc(p.rules, func(r *rule) bool { return r.match(request) })
	if i < 0 {
		return true
	}
	r := p.rules[i]
	p.rules = slices.Delete(p.rules, i, i+1)
	if !r.deliver {
		p.killLocked(l)
		close(r.fired)
		return false
	}
	// Before the request is written, or its reply could come first.
	l.losing = append(l.losing, r.fired)
	return true
}
