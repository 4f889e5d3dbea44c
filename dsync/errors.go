package dsync

import (
	"errors"
	"fmt"
	"strings"

	"github.com/e51fe0e6/dsync/internal/keys"
	"github.com/e51fe0e6/dsync/internal/session"
)

// Errors. Test with [errors.Is]: what a method returns is an [*Error] that wraps one of these, an error of ctx, or an error
// that the client library or the server gave.
var (
	// ErrNotHeld is returned by Unlock: this value holds nothing. Nothing was sent.
	ErrNotHeld = session.ErrNotHeld

	// ErrLost is returned by Unlock and Do, and is the cause of the context of Do: the lease ended before the release. Somebody
	// else may have held the lock meanwhile, or may hold it now, so what was done under it is only as safe as the
	// fencing token made it. The value is free again after its Unlock.
	ErrLost = session.ErrLost

	// ErrUnconfirmed is returned by Unlock: the lease was valid when Unlock was called, so the section was protected, but
	// the server has not confirmed the release. It goes on in the background until it is confirmed or the lease is over; at
	// worst the next holder waits for the rest of the lease.
	ErrUnconfirmed = session.ErrUnconfirmed

	// ErrClosed is returned by every method after [Client.Close] was called, and by those that waited then.
	ErrClosed = session.ErrClosed

	// ErrUnavailable is returned when Redis could not be reached, or was not fit for use (loading, out of memory, read-only, …), for the
	// outage budget of the client, or for one attempt of TryLock, or until ctx ended (then the error also matches ctx.Err()). Nothing is
	// held; what may have been left in Redis is withdrawn in the background, at the latest by its own expiry.
	ErrUnavailable = session.ErrUnavailable

	// ErrDeadlock is returned when a name is locked again inside its own Do, found through the context: it would wait for itself.
	ErrDeadlock = errors.New("dsync: locked again inside its own Do")

	// ErrInvalidName is returned by every method of a value whose name cannot be used. Nothing was sent.
	ErrInvalidName = errors.New("dsync: invalid name")

	// ErrInvalidOption is returned by every method of a value, or of all values of a client, whose options cannot be used. Nothing
	// was sent.
	ErrInvalidOption = errors.New("dsync: invalid option")

	// ErrNilContext is returned when the context is nil. Nothing was sent.
	ErrNilContext = errors.New("dsync: nil context")

	// errUnmade is what the methods of a zero value return, where they return an error.
	errUnmade = fmt.Errorf("%w: the value was not made by its constructor", ErrInvalidOption)
)

// Error tells which operation failed, on what. Every error of this package's methods is one, but for what Do and
// TryDo pass on from their function.
type Error struct {
	Op   string // such as "Lock"
	Kind string // such as "mutex"; "client" for methods of Client
	Name string // of the primitive; empty for methods of Client
	Err  error
}

// Error returns the text; a long name is cut.
func (e *Error) Error() string {
	text := "dsync: " + e.Op + " of " + e.Kind
	if e.Name != "" {
		text += " " + quote(e.Name)
	}
	return text + ": " + strings.TrimPrefix(e.Err.Error(), "dsync: ")
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

func quote(name string) string { return `"` + strings.ToValidUTF8(keys.Short(name), "\uFFFD") + `"` }
