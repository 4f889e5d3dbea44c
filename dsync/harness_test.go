package dsync_test

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/e51fe0e6/dsync/driver"
	"github.com/e51fe0e6/dsync/driver/goredis"
	rueidisdriver "github.com/e51fe0e6/dsync/driver/rueidis"
	"github.com/e51fe0e6/dsync/dsync"
	"github.com/e51fe0e6/dsync/internal/redistest"
)

// childEnv makes the test binary a child: it names one of children, which runs instead of the tests.
const childEnv = "DSYNC_TEST_CHILD"

func TestMain(m *testing.M) {
	if name := os.Getenv(childEnv); name != "" {
		children[name](strings.Fields(os.Getenv(childEnv + "_ARGS")))
		os.Exit(0)
	}
	// Tests that run beside others wait far more than they compute. -parallel on the command line comes later, and wins.
	if err := flag.Set("test.parallel", "8"); err != nil {
		panic(err)
	}
	code := m.Run()
	if err := goleak.Find(); err != nil && code == 0 {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// dialer makes a driver for one process at an address, and what closes its client.
type dialer struct {
	name string
	dial func(addr, user, password string) (driver.Driver, func(), error)
}

var dialers = []dialer{
	{"goredis", func(addr, user, password string) (driver.Driver, func(), error) {
		c := redis.NewClient(&redis.Options{Addr: addr, Username: user, Password: password, DialTimeout: time.Second, ReadTimeout: 2 * time.Second})
		return goredis.New(c), func() { _ = c.Close() }, nil
	}},
	{"rueidis", func(addr, user, password string) (driver.Driver, func(), error) {
		c, err := rueidis.NewClient(rueidis.ClientOption{
			InitAddress: []string{addr}, Username: user, Password: password, ForceSingleClient: true,
			DisableCache: true, AlwaysPipelining: true, PipelineMultiplex: -1, ConnWriteTimeout: 2 * time.Second,
		})
		if err != nil {
			if c != nil {
				c.Close()
			}
			return nil, nil, err
		}
		return rueidisdriver.New(c), c.Close, nil
	}},
}

func dialerNamed(name string) dialer {
	for _, d := range dialers {
		if d.name == name {
			return d
		}
	}
	panic("no dialer " + name)
}

// onServer runs a test for each driver on a real server of its own.
func onServer(t *testing.T, test func(t *testing.T, w *world)) {
	for _, d := range dialers {
		t.Run(d.name, func(t *testing.T) {
			test(t, &world{dialer: d, server: redistest.Start(t)})
		})
	}
}

// world is a server and how processes reach it.
type world struct {
	dialer dialer
	server *redistest.Server
}

// client returns a client of its own connections, as another process would have; it is closed at the end of the test.
func (w *world) client(t testing.TB, opts ...dsync.ClientOption) *dsync.Client {
	t.Helper()
	return w.clientAt(t, w.server.Addr(), opts...)
}

// clientAt is client through a proxy or as another address.
func (w *world) clientAt(t testing.TB, addr string, opts ...dsync.ClientOption) *dsync.Client {
	t.Helper()
	d, done, err := w.dialer.dial(addr, "", "")
	require.NoError(t, err)
	c := dsync.New(d, opts...)
	t.Cleanup(func() {
		closeNow(t, c)
		done()
	})
	return c
}

// closeNow closes a client whatever it holds. Tests that mean something by Close call it themselves.
func closeNow(t testing.TB, c *dsync.Client) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
	defer cancel()
	_ = c.Close(ctx)
}

// within is a context that ends a test that hangs; it is no assertion on speed.
func within(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Duration(rounds(30, 1200))*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// key is where the state of a mutex is.
func key(name string) string { return "dsync:{" + name + "}:mutex" }

// eventually waits for a condition.
func eventually(t testing.TB, what string, cond func() bool) {
	t.Helper()
	redistest.WaitFor(t, what, cond)
}

// queued waits until n processes wait for the mutex.
func queued(t testing.TB, m *dsync.Mutex, n int) {
	t.Helper()
	eventually(t, fmt.Sprintf("%d waiters", n), func() bool {
		state, err := m.Inspect(t.Context())
		return err == nil && len(state.Queue) == n
	})
}

// warm has the client's subscription confirmed, so that its next Lock enters the queue at once.
func (w *world) warm(t testing.TB, c *dsync.Client) {
	t.Helper()
	ctx := within(t)
	before, _ := w.server.MustDo("PUBSUB", "CHANNELS", "dsync:c:*").([]any)
	mu := dsync.NewMutex(c, fmt.Sprintf("warm-%p", c))
	require.NoError(t, mu.Lock(ctx))
	require.NoError(t, mu.Unlock(ctx))
	eventually(t, "the subscription", func() bool { // a new one: others may be closing
		channels, _ := w.server.MustDo("PUBSUB", "CHANNELS", "dsync:c:*").([]any)
		return slices.ContainsFunc(channels, func(c any) bool { return !slices.Contains(before, c) })
	})
}

func (w *world) subscriptions() int {
	channels, _ := w.server.MustDo("PUBSUB", "CHANNELS", "dsync:c:*").([]any)
	return len(channels)
}

// gate is what a lock protects: it is not part of dsync, and counts who is inside.
type gate struct {
	mu     sync.Mutex
	inside int
	last   int64
	err    error
}

func (g *gate) enter(fence int64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.inside++
	if g.inside > 1 {
		g.err = errors.Join(g.err, fmt.Errorf("%d are inside at fence %d", g.inside, fence))
	}
	if fence <= g.last {
		g.err = errors.Join(g.err, fmt.Errorf("fence %d after %d", fence, g.last))
	}
	g.last = fence
}

func (g *gate) leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.inside--
}

// check fails the test if two were ever inside, or fences did not increase.
func (g *gate) check(t testing.TB) {
	t.Helper()
	g.mu.Lock()
	defer g.mu.Unlock()
	require.NoError(t, g.err)
}

// child is an operating-system process that runs one of children.
type child struct {
	t    testing.TB
	cmd  *exec.Cmd
	in   io.WriteCloser
	line chan string
}

// spawn starts a child. It ends with the test, whatever state it is in.
func (w *world) spawn(t testing.TB, name string, args ...string) *child {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childEnv+"="+name,
		childEnv+"_ARGS="+strings.Join(append([]string{w.dialer.name, w.server.Addr()}, args...), " "))
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	c := &child{t: t, cmd: cmd, in: in, line: make(chan string, 1000)}
	go func() { // ends with the child's output
		defer close(c.line)
		for s := bufio.NewScanner(out); s.Scan(); {
			c.line <- s.Text()
		}
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		for range c.line { // until the reader is done
		}
	})
	return c
}

// stop sends SIGSTOP, and returns once the child runs no more.
func (c *child) stop() {
	c.t.Helper()
	require.NoError(c.t, c.cmd.Process.Signal(syscall.SIGSTOP))
	eventually(c.t, "the child to stop", func() bool {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", c.cmd.Process.Pid))
		_, state, found := strings.Cut(string(stat), ") ")
		return err == nil && found && strings.HasPrefix(state, "T")
	})
}

// resume undoes stop.
func (c *child) resume() {
	c.t.Helper()
	require.NoError(c.t, c.cmd.Process.Signal(syscall.SIGCONT))
}

// expect waits for a line of the child that begins with word, and returns the rest.
func (c *child) expect(word string) string {
	c.t.Helper()
	select {
	case l, ok := <-c.line:
		require.True(c.t, ok, "the child ended, want %q", word)
		rest, found := strings.CutPrefix(l, word)
		require.True(c.t, found, "got %q, want %q", l, word)
		return strings.TrimSpace(rest)
	case <-time.After(30 * time.Second):
		require.Fail(c.t, "no line from the child", "want %q", word)
		return ""
	}
}

// tell writes a line to the child.
func (c *child) tell(line string) {
	c.t.Helper()
	_, err := io.WriteString(c.in, line+"\n")
	require.NoError(c.t, err)
}

// childClient is a child's client, from the first two of its arguments.
func childClient(args []string) *dsync.Client {
	d, _, err := dialerNamed(args[0]).dial(args[1], "", "")
	if err != nil {
		panic(err)
	}
	return dsync.New(d)
}

// children are the programs that spawn starts. Each gets the driver, the address and what else the test passes.
var children = map[string]func(args []string){}
