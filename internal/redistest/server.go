package redistest

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// ErrNoServer is returned by StartMain when redis-server is not installed.
var ErrNoServer = errors.New("redistest: redis-server not found in PATH")

var errExited = errors.New("redis-server ended before it answered")

// ServerOption changes how a server is started.
type ServerOption func(*Server)

// WithConfig sets a directive of redis.conf, here and at every Restart. A password must be set at run time
// instead (CONFIG SET requirepass): a server that asks for one never looks ready.
func WithConfig(name string, values ...string) ServerOption {
	return func(s *Server) { s.args = append(append(s.args, "--"+name), values...) }
}

// WithAOF makes every acknowledged write survive Kill and Restart.
func WithAOF() ServerOption {
	return func(s *Server) {
		// "everysec" may put off the write itself, not only the fsync, so SIGKILL could lose an acknowledged one.
		s.args = append(s.args, "--appendonly", "yes", "--appendfsync", "always")
	}
}

// Server is one redis-server process on the loopback interface. All methods may be called concurrently; those that
// return no error fail the test (a server of StartMain panics), and so belong on the test's goroutine.
type Server struct {
	binary string
	dir    string
	port   int
	args   []string // from the options
	client *client
	fail   func(format string, args ...any)

	// mu protects proc. It is held while a process is started or killed, so that two of Kill, Restart, Pause and Resume
	// never work on different processes. No command to the server is waited for under it except by Restart.
	mu   sync.Mutex
	proc *process
}

// Start runs a server until the end of the test. It keeps nothing on disk unless told to by WithAOF. Without a redis-server
// in PATH the test is skipped, or fails if DSYNC_REQUIRE_REDIS=1 is set (as in CI, where a skip would hide a gap).
func Start(tb testing.TB, opts ...ServerOption) *Server {
	tb.Helper()
	s, err := start(opts)
	if errors.Is(err, ErrNoServer) && os.Getenv("DSYNC_REQUIRE_REDIS") != "1" {
		tb.Skip("SKIPPED, not tested: redis-server is not in PATH; DSYNC_REQUIRE_REDIS=1 makes this a failure")
	}
	if err != nil {
		tb.Fatalf("start redis-server: %v", err)
	}
	s.fail = tb.Fatalf
	tb.Cleanup(s.stop)
	return s
}

// StartMain is Start for a TestMain or a program. stop ends the server. The goroutine that owns the process lives
// until then, so stop must come before a leak check.
func StartMain(opts ...ServerOption) (s *Server, stop func(), err error) {
	s, err = start(opts)
	if err != nil {
		return nil, nil, err
	}
	s.fail = func(format string, args ...any) { panic(fmt.Sprintf("redistest: "+format, args...)) }
	return s, s.stop, nil
}

// StartReplica is Start for a replica of primary, and returns when the replica is in sync. It is a replica again after Restart.
func StartReplica(tb testing.TB, primary *Server, opts ...ServerOption) *Server {
	tb.Helper()
	s := Start(tb, append(opts, WithConfig("replicaof", "127.0.0.1", strconv.Itoa(primary.port)))...)
	WaitFor(tb, "replica "+s.Addr()+" to be in sync with "+primary.Addr(), func() bool {
		return s.Info("replication")["master_link_status"] == "up"
	})
	return s
}

func start(opts []ServerOption) (*Server, error) {
	binary, err := exec.LookPath("redis-server")
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoServer, err)
	}
	dir, err := os.MkdirTemp("", "redistest-")
	if err != nil {
		return nil, err
	}
	s := &Server{binary: binary, dir: dir}
	for _, o := range opts {
		o(s)
	}
	// Another process can take the port between choosing and binding; then redis-server ends, and another is tried.
	// An option that redis-server rejects looks the same, so the attempts are few.
	for range 5 {
		if s.port, err = freePort(); err != nil {
			break
		}
		s.client = &client{addr: s.Addr()}
		if s.proc, err = s.launch(); !errors.Is(err, errExited) {
			break
		}
	}
	if err != nil {
		_ = os.RemoveAll(dir)
		return nil, err
	}
	return s, nil
}

// freePort returns a port that nobody listens on, below the range from which Linux takes the ports of outgoing
// connections (32768 and up): otherwise any dial on the machine could take it while the server is down between
// Kill and Restart. 10000 above it, where a cluster node opens its bus, is below that range too.
func freePort() (int, error) {
	var last error
	for range 50 {
		port := 12000 + rand.IntN(10000)
		ln, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
		if err == nil {
			return port, ln.Close()
		}
		last = err
	}
	return 0, fmt.Errorf("no free port: %w", last)
}

// launch starts a process and returns it once it answers.
func (s *Server) launch() (*process, error) {
	logPath := filepath.Join(s.dir, "redis.log")
	args := append([]string{
		"--bind", "127.0.0.1", "--port", strconv.Itoa(s.port), "--dir", s.dir,
		"--save", "", "--appendonly", "no",
		"--repl-diskless-sync-delay", "0", // 5 s by default, in the hope of more replicas
	}, s.args...)
	proc, err := startProcess(s.binary, args, logPath)
	if err != nil {
		return nil, err
	}
	ready := poll(patience, func() bool {
		select {
		case <-proc.done:
			return true
		default:
			return s.answers(proc)
		}
	})
	select {
	case <-proc.done:
		err = errExited
	default:
		if ready {
			return proc, nil
		}
		err = fmt.Errorf("no answer from %s within %v", s.Addr(), patience)
	}
	proc.kill()
	s.client.drop()
	log, _ := os.ReadFile(logPath)
	return nil, fmt.Errorf("%w; it said: %s", err, bytes.TrimSpace(log))
}

// answers reports whether proc itself, and not another server that took its port, has loaded its data and serves.
// After Restart it is also what finds out that the client's old connection is dead.
func (s *Server) answers(proc *process) bool {
	info, err := s.info("server")
	if err != nil || info["process_id"] != strconv.Itoa(proc.Pid) {
		s.client.drop()
		return false
	}
	_, err = s.Do("PING") // INFO is answered while loading, PING is not
	return err == nil
}

// Addr is the server's host:port. It stays the same over Restart.
func (s *Server) Addr() string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(s.port)) }

// Pid is the process id, of the last process if the server has been killed.
func (s *Server) Pid() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.proc.Pid
}

// Kill ends the server with SIGKILL, paused or not, and returns when it is gone. Killing a dead server does nothing.
func (s *Server) Kill() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.proc.kill()
}

func (s *Server) stop() {
	s.Kill()
	s.client.drop()
	_ = os.RemoveAll(s.dir)
}

// Restart kills the server if it runs and starts it on the same port. Its data is lost, except with WithAOF.
func (s *Server) Restart() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.proc.kill()
	var err error
	// The port cannot be exchanged for another one here; whoever took it may give it back.
	if !poll(patience, func() bool {
		var proc *process
		if proc, err = s.launch(); err == nil {
			s.proc = proc
		}
		return !errors.Is(err, errExited)
	}) || err != nil {
		s.fail("restart redis-server on %s: %v", s.Addr(), err)
	}
}

// Pause stops the process (SIGSTOP) and returns when it has stopped: connections stay open, nothing is answered,
// and what clients send meanwhile runs after Resume.
func (s *Server) Pause() { s.signal("pause", pause) }

// Resume lets a paused process go on.
func (s *Server) Resume() { s.signal("resume", resume) }

func (s *Server) signal(what string, send func(*os.Process) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := send(s.proc.Process); err != nil {
		s.fail("%s redis-server %s: %v", what, s.Addr(), err)
	}
}

// Do runs one command on a connection of the server's own, one at a time. The reply is a string, int64, nil or []any of these
// (and of ServerError inside an array); an error reply is returned as a ServerError.
func (s *Server) Do(args ...string) (any, error) { return s.client.do(args) }

// MustDo is Do for a command that must succeed.
func (s *Server) MustDo(args ...string) any {
	reply, err := s.Do(args...)
	if err != nil {
		s.fail("%q on %s: %v", args, s.Addr(), err)
	}
	return reply
}

// Info is one section of INFO by field name.
func (s *Server) Info(section string) map[string]string {
	info, err := s.info(section)
	if err != nil {
		s.fail("INFO %s on %s: %v", section, s.Addr(), err)
	}
	return info
}

func (s *Server) info(section string) (map[string]string, error) {
	reply, err := s.Do("INFO", section)
	if err != nil {
		return nil, err
	}
	text, ok := reply.(string)
	if !ok {
		return nil, fmt.Errorf("INFO replied with a %T", reply)
	}
	info := make(map[string]string)
	for line := range strings.Lines(text) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), ":"); ok {
			info[name] = value
		}
	}
	return info, nil
}

// CommandStats is the number of calls of each command ("evalsha", "client|setinfo") since start or CONFIG RESETSTAT, with those
// of Do and those made inside scripts. It tells how often something really ran.
func (s *Server) CommandStats() map[string]int64 {
	calls := make(map[string]int64)
	for name, value := range s.Info("commandstats") {
		name, isCommand := strings.CutPrefix(name, "cmdstat_")
		value, _, _ = strings.Cut(strings.TrimPrefix(value, "calls="), ",")
		if n, err := strconv.ParseInt(value, 10, 64); err == nil && isCommand {
			calls[name] = n
		}
	}
	return calls
}

// ReplicaOf makes the server a replica of primary, or with nil a primary. It does not wait for the sync.
func (s *Server) ReplicaOf(primary *Server) {
	if primary == nil {
		s.MustDo("REPLICAOF", "NO", "ONE")
		return
	}
	s.MustDo("REPLICAOF", "127.0.0.1", strconv.Itoa(primary.port))
}

// process is a running child.
type process struct {
	*os.Process
	done chan struct{} // closed by the owner goroutine when the child has been waited for
}

// startProcess starts a child that writes its output to logPath.
func startProcess(binary string, args []string, logPath string) (*process, error) {
	log, err := os.Create(logPath)
	if err != nil {
		return nil, err
	}
	defer func() { _ = log.Close() }() // the child has its own descriptor
	cmd := exec.Command(binary, args...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = childAttr()

	started, done := make(chan error, 1), make(chan struct{})
	// The owner goroutine ends when the child does; kill waits for it through done.
	go func() {
		defer close(done)
		// Pdeathsig is sent when the forking thread ends, and Go ends threads: forked from the test's goroutine, the
		// server would be killed at random when some locked goroutine that ran on the same thread returns. So the
		// thread belongs to this goroutine until the child is gone.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait() // killed, as a rule; how it ended interests nobody
		}
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	return &process{Process: cmd.Process, done: done}, nil
}

// kill needs no SIGCONT: SIGKILL ends a stopped process as well, and a resumed one would run what had piled up.
func (p *process) kill() {
	_ = p.Kill() // the only error is that it has ended already
	<-p.done
}
