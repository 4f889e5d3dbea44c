package dsync_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/e51fe0e6/dsync/dsync"
)

func init() {
	children["count"] = childCount
	children["hold"] = childHold
}

// childCount adds to a counter in a file, by reading and then writing it, and logs its fences.
func childCount(args []string) {
	c := childClient(args)
	counter, goroutines, rounds := args[2], atoi(args[3]), atoi(args[4])
	mu := dsync.NewMutex(c, "counter")
	var wg sync.WaitGroup
	for range goroutines {
		wg.Go(func() {
			for range rounds {
				if err := mu.Do(context.Background(), func(ctx context.Context) error {
					fence, _ := dsync.Fence(ctx)
					return addOne(counter, fence)
				}); err != nil {
					panic(err)
				}
			}
		})
	}
	wg.Wait()
	if err := c.Close(context.Background()); err != nil {
		panic(err)
	}
}

func addOne(counter string, fence int64) error {
	text, err := os.ReadFile(counter)
	if err != nil {
		return err
	}
	n := atoi(string(text))
	log, err := os.OpenFile(counter+".log", os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintln(log, fence); err != nil {
		return err
	}
	if err := log.Close(); err != nil {
		return err
	}
	return os.WriteFile(counter, []byte(strconv.Itoa(n+1)), 0o600)
}

func atoi(s string) int {
	n, err := strconv.Atoi(strings.TrimSpace(s))
	if err != nil {
		panic(err)
	}
	return n
}

// childHold locks when told "lock", unlocks when told "unlock", and says what came of it.
func childHold(args []string) {
	c := childClient(args)
	ttl, err := time.ParseDuration(args[3])
	if err != nil {
		panic(err)
	}
	mu := dsync.NewMutex(c, args[2], dsync.WithTTL(ttl))
	fmt.Println("ready")
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		switch in.Text() {
		case "lock":
			if err := mu.Lock(context.Background()); err != nil {
				fmt.Println("error", err)
				continue
			}
			fmt.Println("held", mu.Fence(), mu.Remaining() > 0)
		case "unlock":
			err := mu.Unlock(context.Background())
			switch {
			case errors.Is(err, dsync.ErrLost):
				fmt.Println("lost")
			default:
				fmt.Println("unlocked", err)
			}
		}
	}
}

// Issue 1, 1: nothing is lost, and fences strictly increase.
func TestMutexExcludesProcessesFromACounter(t *testing.T) {
	onServer(t, func(t *testing.T, w *world) {
		const processes, goroutines, rounds = 8, 8, 10
		counter := filepath.Join(t.TempDir(), "counter")
		require.NoError(t, os.WriteFile(counter, []byte("0"), 0o600))
		var all []*child
		for range processes {
			all = append(all, w.spawn(t, "count", counter, strconv.Itoa(goroutines), strconv.Itoa(rounds)))
		}
		for _, c := range all {
			require.NoError(t, c.cmd.Wait())
		}
		text, err := os.ReadFile(counter)
		require.NoError(t, err)
		require.Equal(t, processes*goroutines*rounds, atoi(string(text)))
		log, err := os.ReadFile(counter + ".log")
		require.NoError(t, err)
		last := 0
		for line := range strings.Lines(string(log)) {
			require.Greater(t, atoi(line), last, "fences strictly increase")
			last = atoi(line)
		}
	})
}

// Issue 1, 4: SIGKILL of the holder, of the head waiter, and of both.
func TestMutexPassesOverKilledProcesses(t *testing.T) {
	onServer(t, func(t *testing.T, w *world) {
		for _, dead := range []string{"holder", "head", "both"} {
			t.Run(dead, func(t *testing.T) {
				holder, head := w.spawn(t, "hold", dead, "1s"), w.spawn(t, "hold", dead, "1s")
				holder.expect("ready")
				head.expect("ready")
				mu := dsync.NewMutex(w.client(t), dead)
				holder.tell("lock")
				first := atoi(strings.Fields(holder.expect("held"))[0])
				head.tell("lock")
				queued(t, mu, 1)
				got := make(chan error, 1)
				go func() { got <- mu.Lock(within(t)) }()
				queued(t, mu, 2)
				if dead != "head" {
					require.NoError(t, holder.cmd.Process.Kill())
				}
				if dead != "holder" {
					require.NoError(t, head.cmd.Process.Kill())
				}
				switch dead {
				case "holder":
					head.expect("held")
					head.tell("unlock")
					head.expect("unlocked <nil>")
				case "head":
					holder.tell("unlock")
					holder.expect("unlocked <nil>")
				}
				require.NoError(t, <-got)
				require.Greater(t, mu.Fence(), int64(first))
				require.NoError(t, mu.Unlock(within(t)))
			})
		}
	})
}

// Issue 1, 4; B02, B11, D08: a process that is stopped past its lease has no stale success, as holder or as waiter.
func TestMutexStoppedProcessHasNoStaleSuccess(t *testing.T) {
	onServer(t, func(t *testing.T, w *world) {
		t.Run("holder", func(t *testing.T) {
			holder := w.spawn(t, "hold", "holder", "500ms")
			holder.expect("ready")
			holder.tell("lock")
			first := atoi(strings.Fields(holder.expect("held"))[0])
			holder.stop()
			mu := dsync.NewMutex(w.client(t), "holder")
			require.NoError(t, mu.Lock(within(t)))
			require.Greater(t, mu.Fence(), int64(first))
			holder.resume()
			holder.tell("unlock")
			holder.expect("lost")
			require.NoError(t, mu.Unlock(within(t)), "the late unlock did not touch it")
		})
		t.Run("waiter", func(t *testing.T) {
			waiter := w.spawn(t, "hold", "waiter", "500ms")
			waiter.expect("ready")
			mu := dsync.NewMutex(w.client(t), "waiter")
			require.NoError(t, mu.Lock(within(t)))
			waiter.tell("lock")
			queued(t, mu, 1)
			waiter.stop()
			require.NoError(t, mu.Unlock(within(t))) // grants the stopped process, or passes over its dead place
			require.NoError(t, mu.Lock(within(t)))
			mine := mu.Fence()
			waiter.resume()
			queued(t, mu, 1) // it asks anew, and waits
			require.NoError(t, mu.Unlock(within(t)))
			later := strings.Fields(waiter.expect("held"))
			require.Greater(t, int64(atoi(later[0])), mine)
			require.Equal(t, "true", later[1])
		})
	})
}
