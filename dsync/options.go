package dsync

import (
	"fmt"
	"log/slog"
	"time"

	"github.com/e51fe0e6/dsync/internal/keys"
)

// Defaults and limits.
const (
	defaultTTL    = 10 * time.Second
	minTTL        = 100 * time.Millisecond
	maxOption     = 366 * 24 * time.Hour
	defaultSlice  = 5 * time.Millisecond
	defaultPrefix = "dsync"
	defaultBudget = 30 * time.Second
	maxLabel      = 256
)

// Option configures a lock. A value that is out of range, or contradicts another, makes every method of the lock return [ErrInvalidOption].
type Option interface{ applyLock(o *lockOptions) }

type lockOptions struct {
	ttl       time.Duration
	renew     bool
	maxHold   time.Duration
	maxHoldOn bool
	slice     time.Duration
	linger    time.Duration
	label     string
}

type lockOption func(o *lockOptions)

func (f lockOption) applyLock(o *lockOptions) { f(o) }

// WithTTL sets how long the lease lasts without renewal: what a crashed holder makes the others wait. Default 10 s, from 100 ms to a year;
// rounded up to milliseconds. A holder that lives renews it each third, or each 10 s if that is sooner.
func WithTTL(d time.Duration) Option { return lockOption(func(o *lockOptions) { o.ttl = d }) }

// WithoutRenewal lets the lease end after its TTL even if the holder lives. Each hold then gets a lease of its own.
func WithoutRenewal() Option { return lockOption(func(o *lockOptions) { o.renew = false }) }

// WithMaxHold ends each hold after d: it is lost, then released, whether its holder is done or not. It is a guard against a
// holder that hangs but lives. Default: no limit. From 1 ms to a year.
func WithMaxHold(d time.Duration) Option {
	return lockOption(func(o *lockOptions) { o.maxHold, o.maxHoldOn = d, true })
}

// WithSlice sets for how long a lock may go on passing between goroutines of this process once another process is known to
// wait. Longer gives more throughput, shorter more fairness; 0 is strict FIFO between processes. Default 5 ms, up to a year.
// While no other process waits, the lock passes locally without limit.
func WithSlice(d time.Duration) Option { return lockOption(func(o *lockOptions) { o.slice = d }) }

// WithLinger keeps the lease for d after the last Unlock, unless another process waits, so that the next Lock in this process
// costs no command. Default 0, up to a year. Other processes see the lock as held meanwhile: their TryLock fails. It contradicts [WithoutRenewal].
func WithLinger(d time.Duration) Option { return lockOption(func(o *lockOptions) { o.linger = d }) }

// WithLabel says who holds or waits, for Inspect. Up to 256 bytes; host and process id are told anyway.
func WithLabel(label string) Option { return lockOption(func(o *lockOptions) { o.label = label }) }

func newLockOptions(opts []Option) (lockOptions, error) {
	o := lockOptions{ttl: defaultTTL, renew: true, slice: defaultSlice}
	for _, opt := range opts {
		if opt == nil {
			return o, fmt.Errorf("%w: an option is nil", ErrInvalidOption)
		}
		opt.applyLock(&o)
	}
	return o, o.check()
}

func (o *lockOptions) check() error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: %s", ErrInvalidOption, fmt.Sprintf(format, args...))
	}
	switch {
	case o.ttl < minTTL || o.ttl > maxOption:
		return bad("TTL %v, want %v to %v", o.ttl, minTTL, maxOption)
	case o.maxHoldOn && (o.maxHold < time.Millisecond || o.maxHold > maxOption):
		return bad("max hold %v, want %v to %v", o.maxHold, time.Millisecond, maxOption)
	case o.slice < 0 || o.slice > maxOption:
		return bad("slice %v, want 0 to %v", o.slice, maxOption)
	case o.linger < 0 || o.linger > maxOption:
		return bad("linger %v, want 0 to %v", o.linger, maxOption)
	case len(o.label) > maxLabel:
		return bad("the label has %d bytes, want at most %d", len(o.label), maxLabel)
	case !o.renew && o.linger > 0:
		return bad("linger %v without renewal: a lease without renewal is never used twice", o.linger)
	case !o.renew && o.maxHoldOn && o.maxHold > o.ttl:
		return bad("max hold %v without renewal: the lease ends after its TTL of %v", o.maxHold, o.ttl)
	}
	return nil
}

// ClientOption configures a [Client]. A value that is out of range makes every method return [ErrInvalidOption].
type ClientOption interface{ applyClient(o *clientOptions) }

type clientOptions struct {
	prefix string
	budget time.Duration
	logger *slog.Logger
	hooks  Hooks
}

type clientOption func(o *clientOptions)

func (f clientOption) applyClient(o *clientOptions) { f(o) }

// WithPrefix sets what every key and channel begins with. Clients exclude each other only under the same prefix. Default "dsync"; 1 to 1,024 bytes,
// no braces.
func WithPrefix(prefix string) ClientOption {
	return clientOption(func(o *clientOptions) { o.prefix = prefix })
}

// WithOutageBudget sets how long Redis may be out of reach before a waiting Lock returns [ErrUnavailable]. Default 30 s, from 1 ms to
// a year. A holder's lease ends by itself meanwhile, whatever the budget.
func WithOutageBudget(d time.Duration) ClientOption {
	return clientOption(func(o *clientOptions) { o.budget = d })
}

// WithLogger sets where the few things are logged that nobody's error tells: a refused channel, a release that stayed unconfirmed
// in Do, a hook that panicked. Default [slog.Default].
func WithLogger(l *slog.Logger) ClientOption {
	return clientOption(func(o *clientOptions) { o.logger = l })
}

// WithHooks sets functions that are called for what happens to locks.
func WithHooks(h Hooks) ClientOption { return clientOption(func(o *clientOptions) { o.hooks = h }) }

func newClientOptions(opts []ClientOption) (clientOptions, error) {
	o := clientOptions{prefix: defaultPrefix, budget: defaultBudget, logger: slog.Default()}
	for _, opt := range opts {
		if opt == nil {
			return o, fmt.Errorf("%w: an option is nil", ErrInvalidOption)
		}
		opt.applyClient(&o)
	}
	if o.logger == nil {
		o.logger = slog.Default()
		return o, fmt.Errorf("%w: the logger is nil", ErrInvalidOption)
	}
	if err := keys.CheckPrefix(o.prefix); err != nil {
		return o, fmt.Errorf("%w: %w", ErrInvalidOption, err)
	}
	if o.budget < time.Millisecond || o.budget > maxOption {
		return o, fmt.Errorf("%w: outage budget %v, want %v to %v", ErrInvalidOption, o.budget, time.Millisecond, maxOption)
	}
	return o, nil
}
