package dsync_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/e51fe0e6/dsync/driver"
	"github.com/e51fe0e6/dsync/driver/goredis"
	rueidisdriver "github.com/e51fe0e6/dsync/driver/rueidis"
	"github.com/e51fe0e6/dsync/dsync"
	"github.com/e51fe0e6/dsync/internal/redistest"
)

// The scenarios_*_test.go files hold one test for each field report (B…) and probe (D…) that applies to Mutex, named by its number.
// What a scenario calls "promptly" is shown by what brought it about (a message, a bounded number of commands, an order of
// events) and never by the clock.

func init() {
	children["spin"] = childSpin
	children["lose"] = childLose
	children["crowd"] = childCrowd
}

// scenario runs a test for each driver as onServer does, beside other scenarios, and checks what each must leave behind: no key without an expiry.
func scenario(t *testing.T, test func(t *testing.T, w *world)) {
	t.Parallel()
	onServer(t, func(t *testing.T, w *world) {
		t.Cleanup(func() { everythingExpires(t, w.server) }) // when the clients are closed
		test(t, w)
	})
}

func everythingExpires(t testing.TB, s *redistest.Server) {
	t.Helper()
	found, err := s.Do("KEYS", "dsync:*")
	if err != nil {
		return // the scenario ended without its server
	}
	for _, k := range found.([]any) {
		require.NotEqual(t, int64(-1), s.MustDo("PTTL", k.(string)), "%s has no expiry", k)
	}
}

// rounds is how often a scenario repeats what depends on chance: few, or many with DSYNC_STRESS=1.
func rounds(few, many int) int {
	if os.Getenv("DSYNC_STRESS") == "1" {
		return many
	}
	return few
}

// locking locks in a goroutine of its own, which ends with ctx at the latest.
func locking(ctx context.Context, m *dsync.Mutex) <-chan error {
	done := make(chan error, 1)
	go func() { done <- m.Lock(ctx) }()
	return done
}

// stillWaits fails the test if the call has come back.
func stillWaits(t testing.TB, done <-chan error) {
	t.Helper()
	select {
	case err := <-done:
		require.Fail(t, "it came back", "%v", err)
	default:
	}
}

// receive waits for what a channel brings, or for its end.
func receive[T any](t testing.TB, what string, from <-chan T) (v T) {
	t.Helper()
	select {
	case v = <-from:
	case <-within(t).Done():
		require.Fail(t, "nothing came", what)
	}
	return v
}

// isLost reports whether the hold was lost.
func isLost(m *dsync.Mutex) bool {
	select {
	case <-m.Lost():
		return true
	default:
		return false
	}
}

// holder returns the token that holds the mutex as Redis has it, whether its lease is over or not; "": none.
func holder(s *redistest.Server, name string) string {
	record, _ := s.MustDo("HGET", key(name), "h").(string)
	token, _, _ := strings.Cut(record, " ")
	return token
}

// lastFence returns the last fence of the mutex that Redis knows of.
func lastFence(s *redistest.Server, name string) int64 {
	fence, _ := s.MustDo("HGET", key(name), "f").(string)
	return int64(atoi(fence))
}

// freed waits until Redis has no holder of the mutex. In tests with long leases only a release does that.
func freed(t testing.TB, s *redistest.Server, name string) {
	t.Helper()
	eventually(t, "the release of "+name, func() bool { return holder(s, name) == "" })
}

// atMost is how many commands that many waiters may have sent since then: one in each period, and a few to begin with. It grows with the time that
// really went by, so a slow machine does not break it, and a loop does.
func atMost(waiters int, since time.Time, period time.Duration) int64 {
	return int64(waiters) * (int64(time.Since(since)/period) + 3)
}

// monitor is all that a server was asked since watch, by MONITOR.
type monitor struct {
	t testing.TB
	s *redistest.Server

	mu    sync.Mutex
	lines []string
	marks int
}

func watch(t testing.TB, s *redistest.Server) *monitor {
	t.Helper()
	conn, err := net.Dial("tcp", s.Addr())
	require.NoError(t, err)
	m := &monitor{t: t, s: s}
	done := make(chan struct{})
	go func() { // ends when conn is closed
		defer close(done)
		in := bufio.NewScanner(conn)
		in.Buffer(nil, 1<<20)
		for in.Scan() {
			m.mu.Lock()
			m.lines = append(m.lines, in.Text())
			m.mu.Unlock()
		}
	}()
	t.Cleanup(func() {
		_ = conn.Close()
		<-done
	})
	_, err = io.WriteString(conn, "MONITOR\r\n")
	require.NoError(t, err)
	eventually(t, "MONITOR", func() bool { return len(m.seen()) > 0 })
	require.Equal(t, "+OK", m.seen()[0])
	return m
}

// seen returns the lines that have all the words among their arguments. It is not sure to know of the latest.
func (m *monitor) seen(words ...string) (found []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
next:
	for _, line := range m.lines {
		for _, word := range words {
			if !strings.Contains(line, `"`+word+`"`) {
				continue next
			}
		}
		found = append(found, line)
	}
	return found
}

// count returns how many commands with all these words the server has been sent until now.
func (m *monitor) count(words ...string) int {
	m.t.Helper()
	m.marks++
	mark := fmt.Sprintf("mark-%d", m.marks)
	m.s.MustDo("ECHO", mark)
	eventually(m.t, "the mark", func() bool { return len(m.seen(mark)) == 1 })
	return len(m.seen(words...))
}

// renewals returns how often the lease of the mutex was renewed, or the attempt was made.
func (m *monitor) renewals(name string) int { return m.count("renew", key(name)) }

// clientOf is client with a driver that the test made.
func clientOf(t testing.TB, d driver.Driver, done func(), opts ...dsync.ClientOption) *dsync.Client {
	t.Helper()
	c := dsync.New(d, opts...)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
		defer cancel()
		_ = c.Close(ctx)
		done()
	})
	return c
}

// split is a driver whose subscription takes another way than its commands.
type split struct {
	driver.Driver
	sub driver.Driver
}

func (s split) OpenSession(ctx context.Context, emit func(driver.Event)) (driver.Session, error) {
	return s.sub.OpenSession(ctx, emit)
}

// split returns a client that sends its commands to one address and subscribes at another.
func (w *world) split(t testing.TB, commands, subscription string, opts ...dsync.ClientOption) *dsync.Client {
	t.Helper()
	d, done, err := w.dialer.dial(commands, "", "")
	require.NoError(t, err)
	sub, subDone, err := w.dialer.dial(subscription, "", "")
	require.NoError(t, err)
	return clientOf(t, split{d, sub}, func() { done(); subDone() }, opts...)
}

// refusing is a driver that answers the next command of a verb in place of the server, with an error of the server's.
type refusing struct {
	driver.Driver

	mu   sync.Mutex
	verb string
	text string
}

func (r *refusing) refuse(c driver.Cmd) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.text == "" || c.Args[0] != r.verb {
		return nil
	}
	text := r.text
	r.text = ""
	return driver.Classify(text, redistest.ServerError(text))
}

func (r *refusing) Exec(ctx context.Context, c driver.Cmd) (driver.Reply, error) {
	if err := r.refuse(c); err != nil {
		return driver.Reply{}, err
	}
	return r.Driver.Exec(ctx, c)
}

// asUser returns a client of an ACL user, whose password is pw.
func (w *world) asUser(t testing.TB, user string, opts ...dsync.ClientOption) *dsync.Client {
	t.Helper()
	d, done, err := w.dialer.dial(w.server.Addr(), user, "pw")
	require.NoError(t, err)
	return clientOf(t, d, done, opts...)
}

// special returns a client whose Redis client is configured by hand.
func (w *world) special(t testing.TB, gr func(*redis.Options), ru func(*rueidis.ClientOption)) *dsync.Client {
	t.Helper()
	if w.dialer.name == "goredis" {
		o := &redis.Options{Addr: w.server.Addr(), DialTimeout: time.Second, ReadTimeout: 2 * time.Second}
		gr(o)
		c := redis.NewClient(o)
		return clientOf(t, goredis.New(c), func() { _ = c.Close() })
	}
	o := rueidis.ClientOption{
		InitAddress: []string{w.server.Addr()}, ForceSingleClient: true,
		DisableCache: true, AlwaysPipelining: true, PipelineMultiplex: -1, ConnWriteTimeout: 2 * time.Second,
	}
	ru(&o)
	c, err := rueidis.NewClient(o)
	require.NoError(t, err)
	return clientOf(t, rueidisdriver.New(c), c.Close)
}

// orders returns the lines that the test tells its child. The process ends with the test, even if that was killed.
func orders() <-chan string {
	lines := make(chan string, 10)
	go func() { // ends with the process
		for in := bufio.NewScanner(os.Stdin); in.Scan(); {
			lines <- in.Text()
		}
		os.Exit(1)
	}()
	return lines
}

// childSpin locks and unlocks names in turn, for ever. It says so once it has begun.
func childSpin(args []string) {
	orders()
	c := childClient(args)
	for i := 0; ; i++ {
		mu := dsync.NewMutex(c, fmt.Sprintf("spin-%d", i%atoi(args[2])), dsync.WithTTL(300*time.Millisecond))
		if mu.Lock(context.Background()) == nil {
			_ = mu.Unlock(context.Background())
		}
		if i == 0 {
			fmt.Println("spinning")
		}
	}
}

// childLose locks, says when the hold is lost, and unlocks when told anything.
func childLose(args []string) {
	told := orders()
	mu := dsync.NewMutex(childClient(args), args[2], dsync.WithTTL(500*time.Millisecond))
	if err := mu.Lock(context.Background()); err != nil {
		panic(err)
	}
	fmt.Println("held", mu.Fence())
	<-mu.Lost()
	fmt.Println("gone")
	<-told
	fmt.Println("unlocked", mu.Unlock(context.Background()))
}

// childCrowd waits for one name as many processes would.
func childCrowd(args []string) {
	orders()
	var wg sync.WaitGroup
	for range atoi(args[3]) {
		mu := dsync.NewMutex(childClient(args), args[2], dsync.WithTTL(10*time.Minute))
		wg.Go(func() { _ = mu.Lock(context.Background()) })
	}
	wg.Wait()
}
