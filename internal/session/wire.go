package session

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/e51fe0e6/dsync/driver"
	"github.com/e51fe0e6/dsync/internal/claim"
	"github.com/e51fe0e6/dsync/scripts"
)

// Tokens are "<client id>:<generation>"; claims know generations only.

// encode makes the call of a script from a command. echo and passable are the subscription's, see hub.
func (s *Session) encode(e *entry, c *claim.Command, echo string, passable bool) driver.Cmd {
	verb, letters := scripts.Acquire, ""
	var end, ask string
	switch c.Verb {
	case claim.Renew:
		verb = scripts.Renew
	case claim.Release:
		verb = scripts.Release
	default:
	}
	if c.End != "" {
		end = s.id + ":" + c.End
	}
	if c.Ask != "" {
		ask = s.id + ":" + c.Ask
	}
	if c.Wait {
		letters = scripts.Wait
	}
	if c.Repeated {
		letters += scripts.Repeated
	}
	if passable {
		letters += scripts.Passable
	}
	if c.Tombstone {
		letters += scripts.Tombstone
	}
	return driver.Cmd{
		Script: e.script,
		Keys:   []string{e.key},
		Args: []string{
			verb, end, ask, millis(c.TTL), millis(c.Life), strconv.FormatInt(c.Used, 10), letters,
			s.channels, echo, c.Meta,
		},
	}
}

// millis rounds up: a lease is never shorter than was asked for.
func millis(d time.Duration) string {
	return strconv.FormatInt(int64((d+time.Millisecond-1)/time.Millisecond), 10)
}

var errReply = errors.New("dsync: the reply of the script makes no sense")

// decode turns what came of a script into what a claim understands. flags are those of the answer to the asking part.
func decode(c *claim.Command, r driver.Reply, err error) (rep claim.Reply, flags int64) {
	if err == nil {
		if status, ok := r.Int(0); ok && status == scripts.Failed {
			text, _ := r.Str(1)
			err = driver.Classify(text, errors.New(text))
		}
	}
	if err != nil {
		return claim.Reply{Class: classify(err), Err: err}, 0
	}
	at := 0
	if c.End != "" {
		of := []claim.Status{claim.NotYours, claim.Released, claim.Withdrawn}
		if c.Verb == claim.Renew {
			of = []claim.Status{claim.NotYours, claim.Renewed}
		}
		if rep.End, _, err = answer(r, at, of...); err != nil {
			return claim.Reply{Class: claim.Unknown, Err: err}, 0
		}
		at += scripts.Group
	}
	if c.Ask != "" {
		rep.Ask, flags, err = answer(r, at, claim.Granted, claim.Queued, claim.Busy, claim.Ended, claim.Gone, claim.Again)
		if err != nil {
			return claim.Reply{Class: claim.Unknown, Err: err}, 0
		}
		at += scripts.Group
	}
	if r.Len() != at {
		return claim.Reply{Class: claim.Unknown, Err: fmt.Errorf("%w: %d elements, want %d", errReply, r.Len(), at)}, 0
	}
	return rep, flags
}

// answer reads a group of integers; its status must be one of those that the question can have.
func answer(r driver.Reply, at int, of ...claim.Status) (claim.Answer, int64, error) {
	var n [scripts.Group]int64
	for i := range n {
		v, ok := r.Int(at + i)
		if !ok || v < 0 || v >= 1<<53 {
			return claim.Answer{}, 0, fmt.Errorf("%w: element %d", errReply, at+i)
		}
		n[i] = v
	}
	if !slices.Contains(of, claim.Status(n[0])) || n[2] > int64(maxDuration/time.Millisecond) {
		return claim.Answer{}, 0, fmt.Errorf("%w: status %d, remaining %d ms", errReply, n[0], n[2])
	}
	return claim.Answer{
		Status:     claim.Status(n[0]),
		Fence:      n[1],
		Remaining:  time.Duration(n[2]) * time.Millisecond,
		ServerTime: time.Duration(n[3]) * time.Microsecond,
		Waiting:    n[4] == 1,
		Position:   int(n[5]),
		Unfinished: n[6]&scripts.FlagAgain != 0,
	}, n[6], nil
}

// maxDuration keeps arithmetic on durations that came from outside from running over.
const maxDuration = 100 * 366 * 24 * time.Hour

// Explain adds ErrUnavailable to an error of a command that may go better another time.
func Explain(err error) error {
	if err == nil || classify(err) == claim.Denied {
		return err
	}
	return fmt.Errorf("%w: %w", ErrUnavailable, err)
}

func classify(err error) claim.Class {
	var refused *driver.ServerError
	switch {
	case errors.Is(err, driver.ErrNotExecuted):
		return claim.NotExecuted
	case errors.Is(err, driver.ErrPermanent):
		return claim.Denied
	case errors.As(err, &refused):
		if refused.Permanent() {
			return claim.Denied
		}
		return claim.Refused
	default:
		return claim.Unknown
	}
}

// message is what came on the channel. Anything that is not one of the scripts' messages, to the letter, is none: whoever may publish
// there can neither grant nor harm.
type message struct {
	kind       byte // g, h or e, as in names.lua
	key        string
	generation string
	nonce      string
	count      int64
	fence      int64
	remaining  time.Duration
	serverTime time.Duration
	waiting    bool
}

func parse(payload string) (m message, ok bool) {
	fields := func(n int) []string {
		f := strings.SplitN(payload, " ", n)
		if len(f) != n {
			return nil
		}
		return f
	}
	if len(payload) < 2 || payload[1] != ' ' {
		return message{}, false
	}
	m.kind = payload[0]
	switch m.kind {
	case 'g':
		f := fields(7)
		if f == nil || (f[5] != "0" && f[5] != "1") {
			return message{}, false
		}
		fence, ok1 := number(f[2])
		left, ok2 := number(f[3])
		at, ok3 := number(f[4])
		if !ok1 || !ok2 || !ok3 || left > int64(maxDuration/time.Millisecond) {
			return message{}, false
		}
		m.generation, m.fence, m.waiting, m.key = f[1], fence, f[5] == "1", f[6]
		m.remaining, m.serverTime = time.Duration(left)*time.Millisecond, time.Duration(at)*time.Microsecond
	case 'h':
		f := fields(3)
		if f == nil {
			return message{}, false
		}
		m.generation, m.key = f[1], f[2]
	case 'e':
		f := fields(3)
		if f == nil {
			return message{}, false
		}
		if m.count, ok = number(f[2]); !ok {
			return message{}, false
		}
		m.nonce = f[1]
	default:
		return message{}, false
	}
	return m, true
}

// number reads a decimal integer from 0 to 2^53 - 1, as the scripts write it.
func number(s string) (int64, bool) {
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n < 0 || n >= 1<<53 || strconv.FormatInt(n, 10) != s {
		return 0, false
	}
	return n, true
}
