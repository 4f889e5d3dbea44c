package dsync

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/e51fe0e6/dsync/driver"
	"github.com/e51fe0e6/dsync/internal/session"
	"github.com/e51fe0e6/dsync/scripts"
)

// Party is a process that holds or waits, as it told about itself.
type Party struct {
	ClientID  string // of its Client: random, different for each
	Label     string // see WithLabel
	Host      string
	PID       int
	Since     time.Time     // of a holder: when it was granted, by the server's clock
	Remaining time.Duration // until its lease, or its place in the queue, ends if it is not heard of again
}

// MutexState is what Redis knew about a [Mutex] at one moment.
type MutexState struct {
	Holder  *Party  // nil: it is free
	Fence   int64   // the last fencing token given, or used; 0: none is remembered
	Queue   []Party // processes that wait, in order, at most 100
	Waiting int     // how many places the queue has in all; an upper bound beyond the first 100
}

// Inspect asks Redis who holds the mutex and who waits. It changes nothing, and what it returns may have changed since.
func (m *Mutex) Inspect(ctx context.Context) (MutexState, error) {
	if m.invalid != nil {
		return MutexState{}, m.wrap("Inspect", m.invalid)
	}
	if err := m.c.checkOpen(ctx); err != nil {
		return MutexState{}, m.wrap("Inspect", err)
	}
	reply, err := m.c.driver.Exec(ctx, driver.Cmd{
		Script: scripts.Mutex,
		Keys:   []string{m.key},
		Args:   []string{scripts.Inspect, "", "", "0", "0", "0", "", "", "", ""},
	})
	if err != nil {
		return MutexState{}, m.wrap("Inspect", session.Explain(err))
	}
	state, err := mutexState(reply)
	return state, m.wrap("Inspect", err)
}

func mutexState(r driver.Reply) (MutexState, error) {
	if status, _ := r.Int(0); status == scripts.Failed {
		text, _ := r.Str(1)
		return MutexState{}, session.Explain(driver.Classify(text, errors.New(text)))
	}
	const holderAt, listedAt, queueAt = scripts.Group, scripts.Group + 1, scripts.Group + 2
	fence, ok1 := r.Int(1)
	now, ok2 := r.Int(3)
	record, ok3 := r.Str(holderAt)
	listed, ok4 := r.Int(listedAt)
	if !ok1 || !ok2 || !ok3 || !ok4 || r.Len() != queueAt+int(listed) {
		return MutexState{}, fmt.Errorf("the reply of the script makes no sense: %d elements", r.Len())
	}
	state := MutexState{Fence: fence}
	if holder, err := parseHolder(record, now); err != nil {
		return MutexState{}, err
	} else if holder.Remaining > 0 {
		state.Holder = &holder
	}
	for i := range int(listed) {
		place, _ := r.Str(queueAt + i)
		waiter, err := parsePlace(place, now)
		if err != nil {
			return MutexState{}, err
		}
		if waiter.Remaining > 0 {
			state.Queue = append(state.Queue, waiter)
		}
	}
	state.Waiting = len(state.Queue)
	// The script looks at 100 places, or at 1,000 numbers of which some are given up: beyond, it only knows how far they go.
	if places, ok := r.Int(5); ok && (listed == 100 || places > 1000) {
		state.Waiting = max(state.Waiting, int(places))
	}
	return state, nil
}

// parseHolder reads "<token> <ttl> <deadline> <since, us> <meta>"; an empty record is no holder.
func parseHolder(record string, nowMicros int64) (Party, error) {
	if record == "" {
		return Party{}, nil
	}
	f := strings.SplitN(record, " ", 5)
	if len(f) != 5 {
		return Party{}, fmt.Errorf("the holder's record %q makes no sense", record)
	}
	p, err := parseParty(f[0], f[2], f[4], nowMicros)
	if err != nil {
		return Party{}, err
	}
	since, err := strconv.ParseInt(f[3], 10, 64)
	p.Since = time.UnixMicro(since)
	return p, err
}

// parsePlace reads "<token> <ttl> <deadline> <life> <passable> <meta>".
func parsePlace(record string, nowMicros int64) (Party, error) {
	f := strings.SplitN(record, " ", 6)
	if len(f) != 6 {
		return Party{}, fmt.Errorf("the place's record %q makes no sense", record)
	}
	return parseParty(f[0], f[2], f[5], nowMicros)
}

func parseParty(token, deadline, meta string, nowMicros int64) (Party, error) {
	at, err := strconv.ParseInt(deadline, 10, 64)
	if err != nil {
		return Party{}, err
	}
	values, err := url.ParseQuery(meta)
	if err != nil {
		return Party{}, err
	}
	id, _, _ := strings.Cut(token, ":")
	pid, _ := strconv.Atoi(values.Get("pid")) // 0 if it did not say
	return Party{
		ClientID: id, Label: values.Get("label"), Host: values.Get("host"), PID: pid,
		Remaining: max(0, time.Duration(at)*time.Millisecond-time.Duration(nowMicros)*time.Microsecond),
	}, nil
}
