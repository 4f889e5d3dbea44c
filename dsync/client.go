package dsync

import (
	"context"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"strconv"

	"github.com/e51fe0e6/dsync/driver"
	"github.com/e51fe0e6/dsync/internal/keys"
	"github.com/e51fe0e6/dsync/internal/session"
)

// Client connects the primitives of one process to one Redis. It may be used by any number of goroutines, and one per process is
// right: goroutines of one client queue in the process and cost Redis one place, and all of them share one subscription.
type Client struct {
	_ noCopy

	driver  driver.Driver
	opts    clientOptions
	invalid error // of the options; every method returns it
	session *session.Session
	host    string
}

// noCopy has go vet report copies of the type that has it as a field.
type noCopy struct{}

func (*noCopy) Lock()   {}
func (*noCopy) Unlock() {}

// New returns a client that speaks through d, an adapter around a client of your own, which stays yours to close. Nothing is sent before the first
// use. A nil driver panics.
func New(d driver.Driver, opts ...ClientOption) *Client {
	if d == nil {
		panic("dsync: New with a nil driver")
	}
	c := &Client{driver: d}
	c.opts, c.invalid = newClientOptions(opts)
	c.host, _ = os.Hostname() // for Inspect only
	c.session = session.New(session.Config{
		Driver:  d,
		Prefix:  c.opts.prefix,
		Budget:  c.opts.budget,
		Logger:  c.opts.logger,
		Observe: c.observer(c.opts.hooks),
	})
	return c
}

// Ping tries on a name of its own all that a lock needs: that the scripts run and may use their commands and keys, that what a script
// publishes arrives, and that the server's clock goes. The error says what to do. It takes a few round trips and at most 5 s, and opens one
// connection for the time. Call it at start, and fail early.
func (c *Client) Ping(ctx context.Context) error {
	if err := c.checkOpen(ctx); err != nil {
		return &Error{Op: "Ping", Kind: "client", Err: err}
	}
	if err := c.session.Ping(ctx); err != nil {
		return &Error{Op: "Ping", Kind: "client", Err: err}
	}
	return nil
}

// Close refuses new calls and wakes the waiting ones with [ErrClosed], ends the contexts of running Do's with ErrClosed as their cause, and waits
// until what is held has been released or ctx ends. Holds that are left then are declared lost, and released after that: so a
// rolling deploy never opens the lock under a running section that heeds its context. The error tells how many holds that were; it is nil if none was.
// Their releases go out, and Close waits for the answers for at most a tenth of a second more. A second Close is nil.
func (c *Client) Close(ctx context.Context) error {
	if ctx == nil {
		return &Error{Op: "Close", Kind: "client", Err: ErrNilContext}
	}
	if c.session == nil {
		return nil // made without New, it never did anything
	}
	if n := c.session.Close(ctx); n > 0 {
		return &Error{Op: "Close", Kind: "client", Err: fmt.Errorf("%d holds were still in use, and are lost: %w", n, session.Ended(ctx))}
	}
	return nil
}

// check returns what forbids any use of the client, now or at all. It may be the nil or zero client of a value that was not made by New or
// NewMutex.
func (c *Client) check(ctx context.Context) error {
	switch {
	case ctx == nil:
		return ErrNilContext
	case c == nil || c.session == nil:
		return errUnmade
	}
	return c.invalid
}

// checkOpen is check, and refuses what a closed client does not do.
func (c *Client) checkOpen(ctx context.Context) error {
	if err := c.check(ctx); err != nil {
		return err
	}
	if c.session.Closed() {
		return ErrClosed
	}
	return nil
}

// lock is what a kind of lock keeps of its client, name and options.
type lock struct {
	c       *Client
	kind    string
	name    string
	key     string
	opts    lockOptions
	meta    string
	invalid error
}

func newLock(c *Client, kind, name string, opts []Option) lock {
	if c == nil {
		panic("dsync: a " + kind + " with a nil client")
	}
	l := lock{c: c, kind: kind, name: name, key: keys.For(c.opts.prefix, name, kind)}
	l.opts, l.invalid = newLockOptions(opts)
	if err := keys.Check(name); err != nil {
		l.invalid = fmt.Errorf("%w: %w", ErrInvalidName, err)
	}
	l.meta = meta(c.host, l.opts.label)
	return l
}

func meta(host, label string) string {
	return url.Values{"host": {host}, "pid": {strconv.Itoa(os.Getpid())}, "label": {label}}.Encode()
}

// check returns what forbids the operation before anything is sent.
func (l *lock) check(ctx context.Context) error {
	if l.invalid != nil {
		return l.invalid
	}
	if err := l.c.check(ctx); err != nil {
		return err
	}
	if holding(ctx, l.c, l.key) {
		return ErrDeadlock
	}
	return nil
}

func (l *lock) wrap(op string, err error) error {
	if err == nil {
		return nil
	}
	return &Error{Op: op, Kind: l.kind, Name: l.name, Err: err}
}

func (l *lock) log(ctx context.Context, level slog.Level, text string, err error) {
	l.c.opts.logger.LogAttrs(context.WithoutCancel(ctx), level, text,
		slog.String("kind", l.kind), slog.String("name", keys.Short(l.name)), slog.Any("error", err))
}
