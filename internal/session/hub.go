package session

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/e51fe0e6/dsync/driver"
	"github.com/e51fe0e6/dsync/internal/claim"
	"github.com/e51fe0e6/dsync/scripts"
)

const (
	dialBound     = 5 * time.Second  // for opening a session, and again for its confirmation
	quiet         = 3 * time.Second  // after hearing nothing for so long, the next question asks for an echo
	echoBound     = time.Second      // an echo that is published comes back within this, or the session is on the wrong server
	deafPause     = 30 * time.Second // a refused channel is tried again after this: rights may be given
	firstDialWait = 50 * time.Millisecond
	lastDialWait  = 5 * time.Second
)

// hub is the process's one subscription: a channel of its own, whatever the number of names and waiters.
//
// Its state has one owner, the goroutine of run, which alone dials, subscribes and closes. Events of the session come in on the
// driver's goroutine and carry the epoch they belong to; those of an old epoch are ignored.
//
// A message is only news of a fact in Redis, so a lost one costs time and nothing else. What can be lost: all between a dropped connection and
// the next confirmation, which is why each confirmation makes all waiters ask again; and all that is published on
// another server than the one we listen to, after a failover that left our connection alive, which is what the echo
// finds: a script publishes to our own channel, through the server that decides.
type hub struct {
	s       *Session
	channel string
	stopped chan struct{} // closed when run has ended

	mu      sync.Mutex // guards what follows; nothing is called under it
	started bool
	sub     claim.Subscription
	epoch   int
	redial  chan struct{} // of the present epoch: closed once, to have it replaced
	given   bool          // redial is closed; no more echoes are asked for in this epoch
	heardAt time.Duration
	logged  bool // the refused channel was logged

	// The echo, of the present epoch.
	nonce    string // asked for and not back; empty: none
	wanted   bool   // ask for one with the next question
	passable bool   // an echo came back, and the server that sent it saw our subscription
	mute     bool   // the server refuses to publish to our channel: do not ask again
}

func (h *hub) init(s *Session) {
	h.s = s
	h.channel = s.channels + s.id
	h.stopped = make(chan struct{})
}

// open starts the subscription if it is not there yet.
func (h *hub) open() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.started || h.s.ctx.Err() != nil {
		return
	}
	h.started = true
	go h.run() // ends with Session.ctx; close waits for it
}

func (h *hub) close() {
	h.s.cancel()
	h.mu.Lock()
	started := h.started
	h.started = true // never again
	h.mu.Unlock()
	if started {
		<-h.stopped
	}
}

func (h *hub) state() claim.Subscription {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.sub
}

// run keeps the subscription until the session is closed.
func (h *hub) run() {
	defer close(h.stopped)
	wait := firstDialWait
	for h.s.ctx.Err() == nil {
		began := h.s.watch.now()
		err := h.listen()
		var pause time.Duration
		if errors.Is(err, errDeaf) {
			h.set(claim.Deaf)
			pause = deafPause
		} else {
			h.set(claim.Opening)
			if h.s.watch.now()-began > lastDialWait {
				wait = firstDialWait // it was good for a while
			}
			pause = wait
			wait = min(2*wait, lastDialWait)
		}
		h.sleep(pause/2 + time.Duration(h.s.cfg.Jitter()*float64(pause/2)))
	}
}

var (
	errDeaf        = errors.New("dsync: the channel is refused")
	errUnconfirmed = errors.New("dsync: the subscription was not confirmed in time")
	errEcho        = errors.New("dsync: the echo did not come back")
)

// listen opens a session, subscribes, and returns when the session is over.
func (h *hub) listen() error {
	h.mu.Lock()
	h.epoch++
	epoch := h.epoch
	redial := make(chan struct{})
	h.redial, h.given = redial, false
	h.mu.Unlock()
	h.expectEcho()

	// Subscribed, Refused and Down. The last two end the session, so one that does not fit follows one that ends it, unless a
	// driver confirms without end; then the echo finds out.
	events := make(chan driver.Event, 16)
	ctx, cancel := context.WithCancel(h.s.ctx)
	defer cancel()
	stop := h.s.cfg.Clock.AfterFunc(dialBound, cancel)
	session, err := h.s.cfg.Driver.OpenSession(ctx, func(ev driver.Event) { h.emit(epoch, ev, events) })
	stop()
	if err != nil {
		return h.refused(err)
	}
	defer func() { _ = session.Close() }()
	// A Subscribe that waits on a silent connection must not hold up Close.
	unhook := context.AfterFunc(h.s.ctx, func() { _ = session.Close() })
	defer unhook()
	if err := session.Subscribe(h.channel); err != nil {
		return h.refused(err)
	}
	late := make(chan struct{})
	stop = h.s.cfg.Clock.AfterFunc(dialBound, func() { close(late) })
	defer stop()
	confirmed := false
	for {
		select {
		case ev := <-events:
			switch ev.Kind {
			case driver.Subscribed:
				if confirmed { // another connection, to another server perhaps, and what was published between is lost
					h.set(claim.Opening)
				}
				confirmed = true
				h.expectEcho()
				h.set(claim.Ready)
			case driver.Refused:
				return h.refused(ev.Err)
			default:
				return ev.Err
			}
		case <-late:
			if !confirmed {
				return errUnconfirmed
			}
			late = nil
		case <-redial:
			return errEcho
		case <-h.s.ctx.Done():
			return nil
		}
	}
}

// refused sorts out the errors that no other dial will heal.
func (h *hub) refused(err error) error {
	if errors.Is(err, driver.ErrPermanent) {
		return h.deaf(err)
	}
	return err
}

// deaf logs a refused channel once, with what to do about it.
func (h *hub) deaf(err error) error {
	h.mu.Lock()
	first := !h.logged
	h.logged = true
	h.mu.Unlock()
	if first {
		h.s.cfg.Logger.Warn("dsync: the server refuses our channel; waiters are served by re-checks only, which takes longer. "+
			"Allow the channels of the prefix (ACL: &"+h.s.cfg.Prefix+":*) and SUBSCRIBE.", "channel", h.channel, "error", err)
	}
	return errors.Join(errDeaf, err)
}

// emit takes an event of a session. It is called on the driver's goroutine and does not block: a claim's lock is held for
// short only, and what is to be sent gets goroutines of its own.
func (h *hub) emit(epoch int, ev driver.Event, events chan<- driver.Event) {
	h.mu.Lock()
	current := epoch == h.epoch
	if current {
		h.heardAt = h.s.watch.now()
	}
	h.mu.Unlock()
	if !current {
		return
	}
	switch ev.Kind {
	case driver.Message:
		if ev.Channel == h.channel {
			h.message(ev.Payload)
		}
	case driver.Subscribed:
		if ev.Channel == h.channel {
			offer(events, ev)
		}
	case driver.Refused, driver.Down:
		offer(events, ev)
	case driver.Unsubscribed: // not asked for, so the server moved; nothing is heard on this connection any more
		offer(events, driver.Event{Kind: driver.Down})
	case driver.Pong:
	}
}

func offer(events chan<- driver.Event, ev driver.Event) {
	select {
	case events <- ev:
	default:
	}
}

func (h *hub) message(payload string) {
	m, ok := parse(payload)
	if !ok {
		return
	}
	if m.kind == 'e' {
		h.echoed(m)
		return
	}
	e := h.s.lookup(m.key)
	if e == nil {
		return
	}
	e.step(func(c *claim.Claim, now time.Duration) {
		if m.kind == 'h' {
			c.Hint(now, m.generation)
			return
		}
		c.Granted(now, m.generation, m.fence, m.remaining, m.serverTime, m.waiting)
	})
}

// set changes what is known of the subscription, and tells every claim. After a confirmation, first or not, whoever waits
// asks again: what was published before may be lost.
func (h *hub) set(sub claim.Subscription) {
	h.mu.Lock()
	changed := sub != h.sub
	h.sub = sub
	h.mu.Unlock()
	if !changed {
		return
	}
	h.s.all(h.s.snapshot(), func(e *entry) {
		e.applyLocked(func(c *claim.Claim, now time.Duration) { c.Subscribed(now, sub) })
	})
}

// mark says what a question carries: a nonce to be echoed, and whether the server may take a missing subscription of ours for
// a sign that we are gone.
func (h *hub) mark(waits bool) (nonce string, passable bool) {
	now := h.s.watch.now()
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.sub != claim.Ready || !waits {
		return "", false
	}
	if h.nonce == "" && !h.mute && !h.given && (h.wanted || now-h.heardAt >= quiet) {
		h.nonce, h.wanted = random(8), false
		nonce = h.nonce
	}
	return nonce, h.passable
}

// expectEcho asks for an echo with the next question, and believes none from before.
func (h *hub) expectEcho() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.nonce, h.wanted, h.passable, h.mute = "", true, false, false
}

// asked takes the flags of the answer to a question that carried a nonce.
func (h *hub) asked(nonce string, flags int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.nonce != nonce {
		return // it is back already, or of an old epoch
	}
	switch {
	case flags&scripts.FlagEchoed != 0:
		epoch := h.epoch
		h.s.cfg.Clock.AfterFunc(echoBound, func() { h.overdue(epoch, nonce) })
	case flags&scripts.FlagMute != 0:
		h.nonce, h.mute = "", true
	default:
		h.nonce, h.wanted = "", true // it may not have been published
	}
}

// echoed takes an echo.
func (h *hub) echoed(m message) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if m.nonce == "" || m.nonce != h.nonce {
		return
	}
	h.nonce = ""
	h.passable = m.count > 0
}

// overdue gives the session up if its echo is not back.
func (h *hub) overdue(epoch int, nonce string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if epoch == h.epoch && h.nonce == nonce && !h.given {
		h.nonce, h.given = "", true
		close(h.redial)
	}
}

// sleep waits, or less if the session is closed.
func (h *hub) sleep(d time.Duration) {
	over := make(chan struct{})
	stop := h.s.cfg.Clock.AfterFunc(d, func() { close(over) })
	defer stop()
	select {
	case <-over:
	case <-h.s.ctx.Done():
	}
}
