package sim

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"testing"
	"testing/cryptotest"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	// seeds is how many the default run takes: with the other tests, what two slow cores do in 40 s under the race detector.
	seeds = 12
	// stuckAfter is when a seed counts as stuck in real time: some goroutine waits for a mutex whose owner waits for virtual time.
	stuckAfter = 2 * time.Minute
)

func TestMain(m *testing.M) {
	redis.SetLogger(quiet{})
	os.Exit(m.Run())
}

// quiet is a logger for go-redis, which has much to say about connections that fail.
type quiet struct{}

func (quiet) Printf(context.Context, string, ...any) {}

// TestSim runs a fixed number of seeds, or the one of SIM_SEED.
func TestSim(t *testing.T) {
	if text := os.Getenv("SIM_SEED"); text != "" {
		seed, err := strconv.ParseUint(text, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		simulate(t, seed)
		return
	}
	var total tally
	for seed := range uint64(seeds) {
		total.add(simulate(t, seed))
	}
	total.report(t)
}

// TestSimStress runs as many seeds as fit in SIM_TIME, from a random one on.
func TestSimStress(t *testing.T) {
	limit, err := time.ParseDuration(os.Getenv("SIM_TIME"))
	if err != nil {
		t.Skip("SIM_TIME is not set")
	}
	total := tally{began: time.Now()}
	for seed := rand.Uint64N(1 << 40); time.Since(total.began) < limit && total.failed < 5; seed++ {
		total.add(simulate(t, seed))
	}
	total.report(t)
}

// tally sums up.
type tally struct {
	began         time.Time
	seeds, failed int
	Result
}

func (n *tally) add(r Result, ok bool) {
	if n.began.IsZero() {
		n.began = time.Now()
	}
	n.seeds++
	if !ok {
		n.failed++
	}
	n.Simulated += r.Simulated
	n.Holds += r.Holds
	n.Sent += r.Sent
}

func (n *tally) report(t *testing.T) {
	t.Helper()
	took := time.Since(n.began)
	t.Logf("%d seeds, %d failed; %v of virtual time in %v; %d holds, %d commands",
		n.seeds, n.failed, n.Simulated.Round(time.Second), took.Round(time.Millisecond), n.Holds, n.Sent)
}

// simulate runs one seed in a bubble. The bubble itself fails if a goroutine is left.
func simulate(t *testing.T, seed uint64) (res Result, ok bool) {
	t.Helper()
	ok = t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
		p := newPlan(seed)
		stuck := time.AfterFunc(stuckAfter, func() {
			buf := make([]byte, 4<<20)
			panic(fmt.Sprintf("stuck, for virtual time does not pass: %v\n%s", p, buf[:runtime.Stack(buf, true)]))
		})
		defer stuck.Stop()
		defer func() {
			if r := recover(); r != nil {
				buf := make([]byte, 4<<20)
				t.Logf("%v%v\n%s", p, r, buf[:runtime.Stack(buf, true)])
				panic(r)
			}
		}()
		cryptotest.SetGlobalRandom(t, seed)
		synctest.Test(t, func(t *testing.T) { res = p.run(t) })
	})
	return res, ok
}
