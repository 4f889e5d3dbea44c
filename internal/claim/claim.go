// Package claim is the state machine of one process's claim on one name. It does no I/O, reads no clock and starts no
// goroutine: events come in with the time at which they happened, and actions go out.
//
// # Who may call what
//
// Only internal/session calls a Claim, under the lock of its name, and carries out the actions afterwards, in order. A Claim
// remembers nothing of the session; the session decides nothing that is in here.
//
// # States and their owners
//
// Three things live side by side in a claim, and each has one owner.
//
//   - The local queue and the user. A [Request] waits in the queue, then it is the user, then it is done. The claim moves it;
//     the caller may take it out while it waits (Cancel), and only the caller ends its use (Release). A user
//     whose lease was lost stays the user until then, so that goroutines of one process never overlap.
//   - The current generation: asking (a command is out or due), queued (it has a place in Redis) or held. A generation is one random
//     token for one hold; it is never used again.
//   - The endings: generations that must be ended in Redis, whatever happened to them. An ending is done when the server says so, or
//     when the lease is over in any case.
//
// A user exists only together with a held generation, or after it was lost. While a lost user is there, nothing is asked for.
//
// # What a message or reply can find
//
// One command is in flight. One that is not answered in time counts as unknown and the next may go out, so a reply may find its generation
// moved on: a grant for the current generation counts whenever it arrives, with the time that is left since its own command was
// sent; anything for another generation changes nothing, since that one has an ending, which leaves a tombstone in Redis
// if any acquire of it is still unanswered. The four races are named where they occur.
package claim

import (
	"errors"
	"time"
)

// Time is a moment, counted from an origin that the session chooses. It never goes back.
type Time = time.Duration

const never = Time(1<<63 - 1)

// Margin is what the holder takes off the end of its lease, for clocks that run at different rates.
func Margin(ttl time.Duration) time.Duration { return max(ttl/100, 5*time.Millisecond) }

// Period is the longest that a waiter goes without asking again by itself.
func Period(ttl time.Duration) time.Duration { return min(ttl/3, 3*time.Second) }

// life is how long a queue place lives after it was asked for.
func life(ttl time.Duration) time.Duration { return placePeriods * Period(ttl) }

// CommandTimeout is how long a command may be unanswered before the next one goes out.
func CommandTimeout(ttl time.Duration) time.Duration { return min(ttl/4, longestSilence) }

const (
	placePeriods   = 3                // a queue place lives this many periods
	manyEnds       = 8                // with so many endings unanswered nothing new is asked for
	firstFew       = 3                // so many at the head of the queue look for a dead holder at its expiry
	tryBound       = 3 * time.Second  // TryLock waits at most this long for an answer
	longestSilence = time.Second      // a command unanswered for so long is unknown
	blindAfter     = time.Second      // without a confirmed subscription the queue is entered after this
	tombstoned     = time.Minute      // how long Redis remembers a tombstone
	renewAtMost    = 10 * time.Second // longest time between renewals
	firstBackOff   = 20 * time.Millisecond
	lastBackOff    = time.Second
)

// Config is what a claim needs from outside.
type Config struct {
	Generation func() string  // a new unguessable generation, at each call another
	Jitter     func() float64 // in [0, 1)
	Budget     time.Duration  // how long Redis may be unreachable before a waiter gives up
}

// Subscription is what the session knows of the process's channel.
type Subscription int

// States of the subscription.
const (
	Opening Subscription = iota // not confirmed yet
	Ready                       // confirmed by the server: what is published arrives
	Deaf                        // refused: re-checks alone must do
)

// Request is one local call of Lock or TryLock, from the call until its release. The caller fills the exported fields and does not touch them
// again.
type Request struct {
	TTL     time.Duration
	Renew   bool          // keep the lease alive while it is used
	Try     bool          // do not wait for a holder
	Slice   time.Duration // how long the lock passes locally while another process waits
	Linger  time.Duration // how long the lease is kept after the last release
	MaxHold time.Duration // 0: no limit
	Meta    string        // who asks, for inspection
	Tag     any           // the session's

	since      Time // when it was made
	heldAt     Time
	lost       bool
	waiting    bool
	next, prev *Request
}

// Since returns when the request was made.
func (r *Request) Since() Time { return r.since }

// HeldAt returns when the request was granted.
func (r *Request) HeldAt() Time { return r.heldAt }

// Via says how a hold was granted.
type Via int

// Ways of a grant.
const (
	ViaReply   Via = iota // the lock was free when asked for
	ViaMessage            // whoever had it handed it over, and the news arrived
	ViaRecheck            // a repeated question found the grant
	ViaLocal              // passed on, or lingering, in this process
)

// Reason says why a hold was lost.
type Reason int

// Reasons of a loss.
const (
	LostExpired Reason = iota + 1 // no renewal succeeded in time, or there was none
	LostDenied                    // the server says that the lease is not ours
	LostMaxHold                   // the limit of the hold was reached
	LostClosed                    // the client was closed
)

// ActionKind says what an [Action] asks of the session.
type ActionKind int

// Kinds of actions.
const (
	Send        ActionKind = iota + 1 // send Cmd, and call Reply with what comes of it
	Grant                             // Req holds: Fence, Via; it may return at NotBefore
	Refuse                            // Req, a try, was not granted: RetryAfter
	Fail                              // Req will not be granted: Err, Outage
	Lose                              // the hold of Req is lost: Reason
	Confirm                           // the release of Req is over: nil Err and not Lost is good
	RenewFailed                       // one renewal failed with Err; it will be tried again
)

// Action is what the session must do, in the order given.
type Action struct {
	Kind       ActionKind
	Cmd        *Command
	Req        *Request
	Fence      int64
	Via        Via
	NotBefore  Time
	RetryAfter time.Duration
	Reason     Reason
	Outcome    Outcome
	Err        error
}

// Outcome refines Fail and Confirm.
type Outcome int

// Outcomes.
const (
	OK          Outcome = iota
	Lost                // Confirm: the hold was over before the release
	Unconfirmed         // Confirm: released in time, but the server did not say so: Err
	Unavailable         // Fail: Redis was not reached in time: Err
	Permanent           // Fail: Redis will not do it: Err
	Closed              // Fail: the client is closed
)

// Claim is one process's claim on one name. It is not safe for concurrent use.
type Claim struct {
	cfg    Config
	sub    Subscription
	closed bool
	out    []Action

	head, tail *Request // local queue
	user       *Request // who holds here; lost or not

	gen    *generation // the current one, or nil
	ends   []*ending
	flight *Command // the one command in flight

	// An outage lasts from the first command that failed until the first that is answered.
	outage      bool
	outageSince Time
	outageErr   error
	failures    int
	retryAt     Time // nothing is sent before this

	epoch   int  // counts confirmations of the subscription: what was asked in an earlier one is asked again
	tried   bool // the head was refused as a try while the subscription was being opened
	blindAt Time // ask for a place without a confirmed subscription from then on; 0: not decided
}

// phase of a generation.
type phase int

const (
	asking phase = iota
	queued
	held
)

// generation is one ask, and the hold that may come of it.
type generation struct {
	token string
	phase phase
	ttl   time.Duration
	renew bool
	meta  string
	wait  bool // it may be given a place

	sent      int  // acquires that may have been executed and have left something
	open      int  // acquires and renewals not answered: while there are any, the end needs a tombstone
	firstSent Time // of the first acquire
	recheckAt Time

	// From the last reply that said queued.
	answered   bool
	lastSent   Time
	lastServer time.Duration
	lastFence  int64

	// While held.
	validUntil Time
	renewAt    Time
	grantFence int64
	usedFence  int64
	grantedAt  Time  // when the grant was learned
	renewErr   error // of the last renewal, if it failed
	contended  bool
	contendAt  Time // since when another process is known to wait
	lingerTill Time // 0: used
}

// ending is a generation that must go from Redis.
type ending struct {
	token    string
	used     int64
	open     int
	answered bool     // it had a place or the hold
	sent     int      // releases that may have been executed
	valid    Time     // end of the hold's validity
	inTime   bool     // the first release went out before that
	confirm  *Request // whose Release waits for the answer, or nil
	leaseEnd Time     // from then on the lease is over anyway, and confirm has nothing to wait for
	overAt   Time     // from then on nothing of it can be left
}

// New returns a claim that wants nothing.
func New(cfg Config) *Claim { return &Claim{cfg: cfg} }

// Actions returns what is to be done since the last call, to be carried out before the next event. The slice is valid until then.
func (c *Claim) Actions() []Action {
	out := c.out
	c.out = c.out[:0]
	return out
}

// Idle reports whether nothing is held, wanted or left to be done: the claim may be forgotten.
func (c *Claim) Idle() bool {
	return c.head == nil && c.user == nil && c.gen == nil && len(c.ends) == 0 && c.flight == nil
}

// Waiting reports whether the claim waits in Redis, or is about to: then a new subscription must be told to it.
func (c *Claim) Waiting() bool { return c.head != nil }

// Outage returns the error of the outage that goes on, or nil. A command that should have been answered is the beginning of one.
func (c *Claim) Outage(now Time) error {
	if f := c.flight; c.outageErr == nil && f != nil && now >= f.SentAt+longestSilence {
		return errSilent
	}
	return c.outageErr
}

// Remaining returns how long the hold of r is still valid by the conservative count.
func (c *Claim) Remaining(now Time, r *Request) time.Duration {
	if c.user != r || r.lost || c.gen == nil {
		return 0
	}
	left := c.gen.validUntil - now
	if r.MaxHold > 0 {
		left = min(left, r.heldAt+r.MaxHold-now)
	}
	return max(0, left)
}

func (c *Claim) act(a Action) { c.out = append(c.out, a) }

var (
	errSilent = errors.New("no answer from the server in time")
	errLapsed = errors.New("the answer took longer than the lease that it granted")
)

// Pending reports whether something is still to be ended in Redis.
func (c *Claim) Pending() bool { return len(c.ends) > 0 || c.flight != nil }
