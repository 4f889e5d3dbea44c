package claim

import (
	"strings"
	"time"
)

// server is mutex.lua in a few lines of Go: one holder, a queue, tombstones, fences, one clock. What it does not have: connections
// to look for (nobody is passed over), and memory limits.
type server struct {
	clock  func() int64 // µs, its TIME
	budget int          // places that one call may drop
	tell   func(note)

	nowUS, now int64 // of the present call, as TIME and in ms
	left       int
	unfinished bool

	holder          string
	ttl, till, from int64 // of the hold: ms, ms, µs
	fence           int64
	queue           []place
	tombs           map[string]int64
}

type place struct {
	token           string
	ttl, till, life int64
}

// note is a message to a process.
type note struct {
	hint       bool
	token      string
	fence      int64
	remaining  time.Duration
	serverTime time.Duration
	waiting    bool
}

// exec runs one command, as often as it comes.
func (s *server) exec(c *Command) Reply {
	s.nowUS = s.clock()
	s.now, s.left, s.unfinished = s.nowUS/1000, s.budget, false
	switch c.Verb {
	case Acquire:
		s.read()
		return Reply{Ask: s.request(c)}
	case Renew:
		return Reply{End: s.renew(c)}
	default:
		return s.release(c)
	}
}

// read drops an expired hold. It counts as one fence per microsecond that it may have lasted.
func (s *server) read() {
	if s.holder == "" {
		return
	}
	if s.till > s.now+s.ttl {
		s.cut()
	}
	if s.till <= s.now {
		s.fence += max(0, s.till*1000-s.from)
		s.holder = ""
	}
}

// cut shortens a hold after the clock was set back. Its begin goes back at least as far, so that it stays good for the fences of the time
// until now.
func (s *server) cut() {
	s.from -= s.till*1000 - s.nowUS
	s.till = s.now + s.ttl
}

func (s *server) hold(token string, ttl int64) {
	s.holder, s.ttl, s.till, s.from = token, ttl, s.now+ttl, s.nowUS
	s.fence = max(s.fence+1, s.nowUS)
}

// front drops the dead at the head of the queue and reports whether somebody alive is there.
func (s *server) front() bool {
	for len(s.queue) > 0 {
		if s.left == 0 {
			s.unfinished = true
			return false
		}
		s.left--
		p := &s.queue[0]
		p.till = min(p.till, s.now+p.life)
		if p.till > s.now {
			return true
		}
		s.queue = s.queue[1:]
	}
	return false
}

func (s *server) grant(asks string) {
	if !s.front() {
		return
	}
	p := s.queue[0]
	s.queue = s.queue[1:]
	s.hold(p.token, p.ttl)
	if p.token != asks {
		s.tell(note{
			token: p.token, fence: s.fence, remaining: ms(p.ttl), serverTime: us(s.nowUS), waiting: len(s.queue) > 0,
		})
	}
}

func (s *server) request(c *Command) Answer {
	standing := s.place(c.Ask)
	switch {
	case s.holder == c.Ask:
		return s.answer(Granted)
	case s.tombs[c.Ask] > s.now, c.Repeated && standing < 0:
		if s.holder == "" {
			s.grant("")
		}
		if s.tombs[c.Ask] > s.now {
			return s.answer(Ended)
		}
		return s.answer(Gone)
	case s.holder == "" && len(s.queue) == 0:
		s.hold(c.Ask, c.TTL.Milliseconds())
		return s.answer(Granted)
	case s.holder != "" && !c.Wait:
		return s.answer(Busy)
	}
	held := s.holder
	if c.Wait {
		s.enqueue(c, standing)
	}
	if s.holder == "" {
		s.grant(c.Ask)
	}
	if s.holder == "" && !c.Wait && !s.unfinished {
		s.hold(c.Ask, c.TTL.Milliseconds())
	}
	switch {
	case s.holder == c.Ask:
		return s.answer(Granted)
	case s.holder == "":
		return s.answer(Again)
	case !c.Wait:
		return s.answer(Busy)
	}
	if held != "" && s.front() && s.queue[0].token == c.Ask {
		s.tell(note{hint: true, token: s.holder})
	}
	a := s.answer(Queued)
	a.Position = max(1, s.place(c.Ask)+1)
	return a
}

func (s *server) enqueue(c *Command, at int) {
	life := c.Life.Milliseconds()
	p := place{token: c.Ask, ttl: c.TTL.Milliseconds(), till: s.now + life, life: life}
	if at < 0 {
		s.queue = append(s.queue, p)
	} else {
		s.queue[at] = p
	}
}

func (s *server) renew(c *Command) Answer {
	s.read()
	if s.holder == c.End {
		s.ttl = c.TTL.Milliseconds()
		s.till = s.now + s.ttl
		s.front()
		return s.answer(Renewed)
	}
	if s.holder == "" {
		s.grant("")
	}
	return s.answer(NotYours)
}

func (s *server) release(c *Command) (r Reply) {
	status := NotYours
	if s.holder == c.End {
		s.holder, status = "", Released // even if its deadline has passed: nobody was admitted since
		s.fence = max(s.fence, c.Used)
	} else {
		if i := s.place(c.End); i >= 0 {
			s.queue, status = append(s.queue[:i:i], s.queue[i+1:]...), Withdrawn
		}
		s.read()
	}
	if c.Tombstone {
		s.tombs[c.End] = s.now + tombstoned.Milliseconds()
	}
	if c.Ask != "" {
		r.End = s.answer(status)
		r.Ask = s.request(c)
		return r
	}
	if s.holder == "" {
		s.grant("")
	}
	r.End = s.answer(status)
	return r
}

func (s *server) place(token string) int {
	for i, p := range s.queue {
		if p.token == token {
			return i
		}
	}
	return -1
}

func (s *server) answer(status Status) Answer {
	a := Answer{
		Status: status, Fence: s.fence, ServerTime: us(s.nowUS), Waiting: len(s.queue) > 0, Unfinished: s.unfinished,
	}
	if s.holder != "" {
		a.Remaining = ms(s.till - s.now)
	}
	return a
}

// remains returns how long token's hold still lasts; 0: it has none.
func (s *server) remains(token string) time.Duration {
	if s.holder != token {
		return 0
	}
	now := s.clock()
	return max(0, us(min(s.till*1000, now+s.ttl*1000)-now))
}

// leftovers returns the tokens that hold or wait and have not expired.
func (s *server) leftovers() (tokens []string) {
	now := s.clock() / 1000
	if s.holder != "" && s.till > now {
		tokens = append(tokens, s.holder)
	}
	for _, p := range s.queue {
		if p.till > now {
			tokens = append(tokens, p.token)
		}
	}
	return tokens
}

func ms(n int64) time.Duration { return time.Duration(n) * time.Millisecond }
func us(n int64) time.Duration { return time.Duration(n) * time.Microsecond }

// owner returns the number of the process that made token: "<process>.<incarnation>.<generation>".
func owner(token string) string { return token[:strings.IndexByte(token, '.')] }
