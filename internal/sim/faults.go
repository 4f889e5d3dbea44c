package sim

import (
	"fmt"
	"math/rand/v2"
	"time"
)

// FaultKind is something that goes wrong.
type FaultKind int

// Kinds of faults.
const (
	Crash           FaultKind = iota // a process ends, and the server sees its connections close
	CrashSilently                    // a process ends, and the server sees nothing
	Leave                            // a process closes its client under its users
	Pause                            // a process does nothing for a while
	CutCommands                      // its command connections break; what was sent is lost
	CutLate                          // they break, and what was sent is executed later
	CutSubscription                  // its subscription breaks
	BlackHole                        // silence in both directions, then everything arrives
	LoseUp                           // silence to the server, then all connections break
	LoseDown                         // silence from the server, then all connections break: replies are lost after execution
	HoldCommands                     // commands are late
	HoldReplies                      // replies are late
	HoldMessages                     // messages are late
	RefuseDials                      // connections break and no new one can be made
	DropMessages                     // messages vanish
	ScriptFlush                      // the server forgets the scripts
	FlushAll                         // the server forgets everything
	DeleteKey                        // the server forgets a name
	AnswerLoading                    // the server refuses all commands
	AnswerReadonly                   // the server refuses to write
	AnswerOOM                        // likewise
	StepClock                        // the server's clock is set forward or back
	faultKinds
)

// String returns the kind's name.
func (k FaultKind) String() string {
	return [...]string{
		"crash", "crash silently", "leave", "pause", "cut commands", "cut late", "cut subscription", "black hole", "lose up", "lose down",
		"hold commands", "hold replies", "hold messages", "refuse dials", "drop messages", "script flush", "flushall", "delete key",
		"answer LOADING", "answer READONLY", "answer OOM", "step clock",
	}[k]
}

// Promise is something that holds unless a fault of some kind excuses it. The order of fences, the errors of calls, and that in the end
// everybody is served and nothing is left behind, are excused by nothing.
type Promise int

// Promises.
const (
	Exclusion Promise = 1 << iota // never two holders, as far as their own count of the lease goes
	Kept                          // a hold that is renewed and not limited is not lost
	Available                     // no call returns ErrUnavailable, and releases are confirmed
	Order                         // FIFO between processes
	Prompt                        // who waits for a free lock has it at once
)

// excuses is the table: what a fault of a kind may break.
func (k FaultKind) excuses() Promise {
	switch k {
	case ScriptFlush:
		return 0
	case DropMessages, CutSubscription, HoldMessages:
		return Order | Prompt // the re-check comes to the rescue
	case Crash, CrashSilently:
		return Order | Prompt // a dead holder costs its lease, a dead waiter may cost one too
	case Leave:
		return Order | Prompt | Kept // Close ends with the holds that are left
	case FlushAll, DeleteKey, StepClock:
		return Exclusion | Order | Prompt | Kept // until the holder is told
	default:
		return Order | Prompt | Kept | Available
	}
}

// mild reports whether the fault costs time only.
func (k FaultKind) mild() bool { return k.excuses()&^(Order|Prompt) == 0 }

// fault is one entry of a plan's schedule.
type fault struct {
	kind  FaultKind
	at    time.Duration
	lasts time.Duration
	proc  int
	name  string
}

// String is for the head of a trace.
func (f fault) String() string {
	return fmt.Sprintf("at %v: %v for %v, process %d, name %s", f.at, f.kind, f.lasts, f.proc+1, f.name)
}

// schedule draws faults of the kinds over a time. Half of them last for a time that means something to a lease.
func schedule(dice *rand.Rand, kinds []FaultKind, procs int, names []string, ttl, length, every time.Duration) []fault {
	var fs []fault
	for at := spread(dice, every/20, every); at < length; at += spread(dice, every/20, 2*every) {
		f := fault{
			kind:  kinds[dice.IntN(len(kinds))],
			at:    at,
			lasts: spread(dice, 5*time.Millisecond, 6*time.Second),
			proc:  dice.IntN(procs),
			name:  names[dice.IntN(len(names))],
		}
		if dice.IntN(2) == 0 {
			f.lasts = ttl/50 + time.Duration(dice.Int64N(int64(ttl+ttl/2)))
		}
		if f.kind == AnswerLoading || f.kind == AnswerReadonly || f.kind == AnswerOOM {
			f.lasts /= 4
		}
		f.lasts = min(f.lasts, length-at)
		fs = append(fs, f)
	}
	return fs
}

// spread draws a duration between the two, small ones as often as large ones.
func spread(dice *rand.Rand, from, to time.Duration) time.Duration {
	for size := from; size < to; size *= 4 {
		if dice.IntN(4) == 0 {
			return size + time.Duration(dice.Int64N(int64(min(3*size, to-size)+1)))
		}
	}
	return from + time.Duration(dice.Int64N(int64(to-from)))
}

// inflict makes the fault happen now; all of it is over when it has lasted.
func (w *World) inflict(f fault) {
	p := w.processes[f.proc]
	if p.dead() {
		return
	}
	w.logf("", "FAULT %v", f)
	l := p.Link
	switch f.kind {
	case Crash:
		p.Crash(f.lasts/2, false)
	case CrashSilently:
		p.Crash(f.lasts/2, true)
	case Leave:
		go func() { // ends within what it lasts, and the bound of Close
			_ = p.Close(f.lasts)
			p.cancel(errKilled)
		}()
	case Pause:
		p.Pause(f.lasts)
	case CutCommands:
		l.Cut(0, Commands)
	case CutLate:
		l.Cut(f.lasts, Commands)
	case CutSubscription:
		l.Cut(0, Subscription)
	case BlackHole:
		l.Hold(f.lasts, Up, Down)
	case LoseUp:
		l.Hold(f.lasts, Up)
		time.AfterFunc(f.lasts-1, func() { l.Cut(0, Commands, Subscription) })
	case LoseDown:
		l.Hold(f.lasts, Down)
		time.AfterFunc(f.lasts-1, func() { l.Cut(time.Millisecond, Commands, Subscription) })
	case HoldCommands:
		l.HoldConns(f.lasts, Commands, Up)
	case HoldReplies:
		l.HoldConns(f.lasts, Commands, Down)
	case HoldMessages:
		l.HoldConns(f.lasts, Subscription, Down)
	case RefuseDials:
		l.Refuse(true)
		l.Cut(0, Commands, Subscription)
		time.AfterFunc(f.lasts, func() { l.Refuse(false) })
	case DropMessages:
		l.Drop(func(string) bool { return true })
		time.AfterFunc(f.lasts, func() { l.Drop(nil) })
	case ScriptFlush:
		w.Do("SCRIPT", "FLUSH")
	case FlushAll:
		w.History.lose("")
		w.Redis.FlushAll()
	case DeleteKey:
		w.History.lose(f.name)
		w.Redis.Del(key(f.name))
	case AnswerLoading:
		w.answerFor(f.lasts, "LOADING Redis is loading the dataset in memory", false)
	case AnswerReadonly:
		w.answerFor(f.lasts, "READONLY You can't write against a read only replica.", true)
	case AnswerOOM:
		w.answerFor(f.lasts, "OOM command not allowed when used memory > 'maxmemory'.", true)
	case StepClock:
		step := f.lasts
		if f.at%2 == 0 { // as good as a coin
			step = -step
		}
		w.step(step)
	case faultKinds:
	}
}

func (w *World) answerFor(d time.Duration, text string, scriptsOnly bool) {
	w.Answer(text, scriptsOnly)
	time.AfterFunc(d, func() { w.Answer("", false) })
}

// key is where the state of a mutex is.
func key(name string) string { return "dsync:{" + name + "}:mutex" }
