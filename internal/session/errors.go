package session

import "errors"

// The sentinels are documented in package dsync, which exports them.
var (
	ErrNotHeld     = errors.New("dsync: not held")
	ErrLost        = errors.New("dsync: the lease was lost")
	ErrUnconfirmed = errors.New("dsync: the release is not confirmed")
	ErrClosed      = errors.New("dsync: the client is closed")
	ErrUnavailable = errors.New("dsync: Redis is not available")
)
