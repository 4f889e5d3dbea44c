// Package driver is the seam between dsync and a Redis client library.
//
// A [Driver] runs scripts and opens pub/sub sessions. It decides nothing: it does not retry, it does not
// reconnect, it knows no lock. What happened to a command is told by the error, and the caller acts on it.
//
// An adapter for another client library is correct when it passes package drivertest.
// The shape follows database/sql/driver and Go CDK's driver packages: the caller wraps errors once, so an
// adapter returns them raw inside one of the classes below.
package driver

import (
	"context"
	"crypto/sha1" //nolint:gosec // EVALSHA names scripts by SHA-1; nothing is protected by it
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"time"
)

// Driver speaks to one Redis server, one Sentinel group or one Cluster.
//
// All methods may be called concurrently. None panics on input from a user or from the network.
type Driver interface {
	// Exec runs one script: EVALSHA once, and EVAL once if and only if the server said NOSCRIPT, which
	// proves that nothing ran. It never sends again after anything else; redirects of a cluster (MOVED, ASK)
	// are followed, since a redirected command was not executed.
	//
	// ctx never reaches the wire: a client library that cancels a command may close a connection that
	// others share. When ctx ends, Exec returns promptly with an error that matches ErrUnknown and
	// ctx.Err(), and the command may still run. If ctx has ended before the call, nothing is sent
	// and the error matches ErrNotExecuted and ctx.Err().
	//
	// Exec always returns within a bound of the driver's own, whatever ctx says (a minute at the very most).
	// The arguments are not kept after Exec has returned, nor are they changed.
	Exec(ctx context.Context, c Cmd) (Reply, error)

	// ExecMulti runs many scripts with as few writes as the client library allows (one per node) and
	// returns their results in the order of cs. Each element follows the contract of Exec; there
	// is no atomicity across elements, and one element's failure is not another's.
	ExecMulti(ctx context.Context, cs []Cmd) []Result

	// ExecWait is Exec followed by WAIT on the same connection. acked is the number of replicas that
	// confirmed, and means something only if err is nil. WAIT speaks of the last write of its own
	// connection, so the script must write in this very call.
	ExecWait(ctx context.Context, c Cmd, replicas int, timeout time.Duration) (r Reply, acked int, err error)

	// OpenSession dials one pub/sub connection. emit is called serially, from one goroutine, until and
	// including the event Down; it does not block and must not call the Session. A driver that cannot dial returns
	// an error of one of the classes below and never calls emit.
	//
	// ctx bounds the dial only; the session outlives it.
	OpenSession(ctx context.Context, emit func(Event)) (Session, error)
}

// Session is one pub/sub connection. It never reconnects: after any failure, or Close, exactly one Down is
// emitted as the last event and every method but Close fails. Its methods may be called concurrently.
type Session interface {
	// Subscribe asks for channels. nil means written; only the event Subscribed confirms, one for each channel.
	Subscribe(channels ...string) error
	// Unsubscribe gives channels up; the event Unsubscribed confirms, one for each channel.
	Unsubscribe(channels ...string) error
	// Ping asks for a Pong with the same id.
	Ping(id string) error
	// Close ends the session promptly. Any number of calls is as good as one.
	Close() error
}

// EventKind says what an [Event] is.
type EventKind int

// The kinds of events. The zero value is none of them.
const (
	// Subscribed: what is published to Channel from now on arrives as Message, or the session tells that it
	// may not (Down, or Unsubscribed for this channel). It may come again for a channel that is subscribed: a client library may
	// have reconnected beneath the driver, and messages in between are lost.
	Subscribed EventKind = iota + 1
	// Unsubscribed: Channel is no longer heard, asked for or not.
	Unsubscribed
	// Message: Payload was published to Channel.
	Message
	// Pong answers Ping; Payload is its id.
	Pong
	// Refused: the server refused a request of this session, as told by Err (for instance a channel that
	// the ACL user may not use). Channel may be empty when the server does not name it.
	Refused
	// Down: the connection is gone; Err says why, and is nil after Close.
	Down
)

// String returns the kind's name.
func (k EventKind) String() string {
	switch k {
	case Subscribed:
		return "Subscribed"
	case Unsubscribed:
		return "Unsubscribed"
	case Message:
		return "Message"
	case Pong:
		return "Pong"
	case Refused:
		return "Refused"
	case Down:
		return "Down"
	default:
		return fmt.Sprintf("EventKind(%d)", int(k))
	}
}

// Event is what a [Session] has to say.
type Event struct {
	Kind    EventKind
	Channel string
	Payload string
	Err     error
}

// Script is the source of a Lua script and its digest. It does not change once made.
type Script struct {
	src  string
	sha1 string
}

// NewScript returns the script with the given source.
func NewScript(src string) *Script {
	sum := sha1.Sum([]byte(src)) //nolint:gosec // see the import
	return &Script{src: src, sha1: hex.EncodeToString(sum[:])}
}

// Src returns the source, for EVAL.
func (s *Script) Src() string { return s.src }

// SHA1 returns the digest, for EVALSHA.
func (s *Script) SHA1() string { return s.sha1 }

// Cmd is one call of a script.
type Cmd struct {
	Script *Script
	Keys   []string // at least one; all share one hash tag
	Args   []string // decimal integers without exponent, or opaque bytes
}

// Validate returns nil if c keeps to the rules that its fields state, and an error of [ErrPermanent] otherwise.
// Adapters call it before they send anything: a client library may answer keys of two slots with a panic,
// and a single server would accept them, so that the mistake would be found only on the first Cluster.
func (c Cmd) Validate() error {
	if c.Script == nil {
		return &Error{Class: ErrPermanent, Cause: errors.New("a command without a script")}
	}
	if len(c.Keys) == 0 {
		return &Error{Class: ErrPermanent, Cause: errors.New("a command without keys")}
	}
	tag := hashTag(c.Keys[0])
	for _, key := range c.Keys[1:] {
		if hashTag(key) != tag {
			return &Error{Class: ErrPermanent, Cause: fmt.Errorf("keys %q and %q have different hash tags", c.Keys[0], key)}
		}
	}
	return nil
}

// hashTag returns the part of key that a Cluster hashes: what is between the first "{" and the next "}", or
// the whole key if there is nothing between them.
func hashTag(key string) string {
	if _, behind, ok := strings.Cut(key, "{"); ok {
		if tag, _, ok := strings.Cut(behind, "}"); ok && tag != "" {
			return tag
		}
	}
	return key
}

// Result is the outcome of one [Cmd] of [Driver.ExecMulti].
type Result struct {
	Reply Reply
	Err   error
}

// Reply is what a script returned: a flat array of integers and strings. The zero value is an empty reply.
type Reply struct {
	elems []any // each int64 or string
}

// NewReply makes a reply of int64 and string elements. Anything else (nil, a nested array, a float, an
// error) breaks the contract of the scripts, and the error says which element does.
func NewReply(elems []any) (Reply, error) {
	for i, e := range elems {
		switch e.(type) {
		case int64, string:
		default:
			return Reply{}, fmt.Errorf("driver: element %d of a script's reply is a %T, want an integer or a string", i, e)
		}
	}
	return Reply{elems: elems}, nil
}

// ReplyOf makes a reply of what a client library decoded: an array as by [NewReply], or a lone integer or string
// as a reply of one element.
func ReplyOf(v any) (Reply, error) {
	if elems, ok := v.([]any); ok {
		return NewReply(elems)
	}
	return NewReply([]any{v})
}

// Len returns the number of elements.
func (r Reply) Len() int { return len(r.elems) }

// Int returns element i and whether there is such an element and it is an integer.
func (r Reply) Int(i int) (int64, bool) {
	if i < 0 || i >= len(r.elems) {
		return 0, false
	}
	n, ok := r.elems[i].(int64)
	return n, ok
}

// Str returns element i and whether there is such an element and it is a string.
func (r Reply) Str(i int) (string, bool) {
	if i < 0 || i >= len(r.elems) {
		return "", false
	}
	s, ok := r.elems[i].(string)
	return s, ok
}

// Every error of a driver matches exactly one of these three, or is a [*ServerError] that reports that the script began and
// failed. What the client library said stays reachable through errors.As.
var (
	// ErrNotExecuted: the script certainly did not run and will not. Sending it again is safe.
	ErrNotExecuted = errors.New("driver: command was not executed")
	// ErrUnknown: the script may have run, may be running, or may run later.
	ErrUnknown = errors.New("driver: outcome of the command is unknown")
	// ErrPermanent: the script did not run, and would not if it were sent again as it is.
	ErrPermanent = errors.New("driver: command can never succeed")
)

// Error is an error of a class together with its cause.
type Error struct {
	Class error // ErrNotExecuted, ErrUnknown or ErrPermanent
	Cause error
}

// Error returns the cause's text behind the class's.
func (e *Error) Error() string { return e.Class.Error() + ": " + e.Cause.Error() }

// Unwrap returns the class and the cause.
func (e *Error) Unwrap() []error { return []error{e.Class, e.Cause} }
