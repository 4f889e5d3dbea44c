// Command checkout shows what dsync is for, with nothing installed: a small shop that runs as three processes, customers who
// click "pay" twice, and a bank that charges as often as it is told.
//
//	go run ./examples/checkout
//
// The story is in this file. The shop, with a sync.Mutex and a dsync.Mutex side by side, is in shop.go; the bank and its fence
// are in bank.go, the customers in traffic.go, the processes in process.go, and what is printed in report.go.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/signal"
	"runtime"
	"strconv"
	"syscall"
	"time"

	"github.com/alicebob/miniredis/v2" //nolint:depguard // the example brings its own Redis, so that it runs anywhere
	"github.com/redis/go-redis/v9"
)

const usage = `checkout shows what dsync is for: a shop that runs as three processes, customers who click "pay" twice,
and a bank that charges as often as it is told. It ends by itself after some 15 seconds.

  1  each process has a sync.Mutex for each order: orders are charged twice
  2  all share a dsync.Mutex for each order: none is; the second click gets 409 and Retry-After
  3  invoice numbers, one after another: callers wait with Lock; how long, and is it fair?
  4  a process is killed inside its section: the order goes on elsewhere, and the dead one's late charge is refused

The exit status is 0 if all of that was seen, 1 if not, 2 if it could not be tried.

Usage: go run ./examples/checkout [flags]

`

// customersPerShop is how many ask each process for invoices at the same time.
const customersPerShop = 4

type config struct {
	redis, driver  string
	orders, clicks int
	latency, ttl   time.Duration
	invoicing      time.Duration
	prefix         string // of all keys of this run, so that no earlier run can be in its way
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second Ctrl-C ends the program at once
	if len(os.Args) > 1 && os.Args[1] == shopCommand {
		os.Exit(shopMain(ctx, os.Args[2:]))
	}
	os.Exit(demoMain(ctx, os.Args[1:], os.Stdout))
}

func demoMain(ctx context.Context, args []string, out *os.File) int {
	cfg := config{prefix: "checkout-" + strconv.FormatUint(rand.Uint64(), 36)}
	flags := flag.NewFlagSet("checkout", flag.ContinueOnError)
	flags.Usage = func() {
		_, _ = io.WriteString(flags.Output(), usage)
		flags.PrintDefaults()
	}
	flags.StringVar(&cfg.redis, "redis", "", "`URL` of a Redis to use, such as redis://user:password@host:6379/0 (default: one inside this program)")
	flags.StringVar(&cfg.driver, "driver", "goredis", "the Redis client of the shops: goredis or rueidis")
	flags.IntVar(&cfg.orders, "orders", 40, "orders to pay")
	flags.IntVar(&cfg.clicks, "clicks", 4, "clicks on each order's button, within 50 ms; 3 or more reach each process")
	flags.DurationVar(&cfg.latency, "latency", 150*time.Millisecond, "how long the bank takes to charge")
	flags.DurationVar(&cfg.ttl, "ttl", 3*time.Second, "lease of the locks: what a crash makes the others wait")
	flags.DurationVar(&cfg.invoicing, "invoicing", 3*time.Second, "how long invoices are written")
	switch err := flags.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		return 2
	case flags.NArg() > 0 || cfg.orders < 1 || cfg.clicks < 2:
		fmt.Fprintln(os.Stderr, "checkout: want no arguments, at least 1 order and 2 clicks; see -h")
		return 2
	case cfg.driver != "goredis" && cfg.driver != "rueidis":
		fmt.Fprintf(os.Stderr, "checkout: driver %q, want goredis or rueidis\n", cfg.driver)
		return 2
	}

	// Pdeathsig (see process_linux.go) fires when the thread ends that started the child, so this one shall last.
	runtime.LockOSThread()
	con := newConsole(out)
	seen, err := tell(ctx, cfg, con)
	switch {
	case ctx.Err() != nil:
		fmt.Fprintln(os.Stderr, "checkout: interrupted")
		return 130
	case err != nil:
		fmt.Fprintln(os.Stderr, "checkout:", err)
		return 2
	case !con.report(seen):
		return 1
	}
	return 0
}

// tell runs the four chapters and returns what was seen.
func tell(ctx context.Context, cfg config, con *console) (seen findings, err error) {
	if cfg.redis == "" {
		server := miniredis.NewMiniRedis()
		if err := server.StartAddr("127.0.0.1:0"); err != nil {
			return seen, err
		}
		defer server.Close()
		server.ClockTTL(true) // keys expire by the clock, as in a real server
		cfg.redis = "redis://" + server.Addr()
	} else if err := reach(ctx, cfg.redis); err != nil {
		return seen, err
	}

	con.title("1  a sync.Mutex in each of three processes")
	seen.local, err = payWithLocalLocks(ctx, cfg, con)
	if err == nil && seen.local.doubled == 0 {
		con.printf("   the race was never lost, so once more with more load\n")
		cfg := cfg
		cfg.orders, cfg.latency = 2*cfg.orders, 2*cfg.latency
		seen.local, err = payWithLocalLocks(ctx, cfg, con)
	}
	if err != nil {
		return seen, err
	}

	con.title("2  a dsync.Mutex for each order, shared by three processes")
	town, err := open(ctx, cfg, lockDsync)
	if err != nil {
		return seen, err
	}
	defer town.close()
	con.printf("   %s\n", town)
	if seen.dsync, err = payOrders(ctx, cfg, con, town); err != nil {
		return seen, err
	}

	con.title("3  invoice numbers under one dsync.Mutex: who comes waits")
	if seen.waits, err = writeInvoices(ctx, cfg, con, town); err != nil {
		return seen, err
	}

	con.title("4  a process is killed while it holds the lock")
	seen.crash, err = killHolder(ctx, cfg, con, town)
	return seen, err
}

// reach tells before the first chapter what the shops would tell in the second.
func reach(ctx context.Context, url string) error {
	opts, err := redis.ParseURL(url)
	if err != nil {
		return err
	}
	client := redis.NewClient(opts)
	return errors.Join(client.Ping(ctx).Err(), client.Close())
}

func payWithLocalLocks(ctx context.Context, cfg config, con *console) (payments, error) {
	town, err := open(ctx, cfg, lockLocal)
	if err != nil {
		return payments{}, err
	}
	defer town.close()
	con.printf("   %s\n", town)
	return payOrders(ctx, cfg, con, town)
}

// payOrders has every order's button clicked several times, and asks the bank afterwards how often each was charged.
func payOrders(ctx context.Context, cfg config, con *console, t *town) (payments, error) {
	var counts clickCounts
	stop := con.live(func() string { return counts.String() + "; " + t.bank.String() })
	t.customers.clickAll(ctx, &counts, cfg.orders, cfg.clicks)
	stop()
	p := payments{orders: cfg.orders, clicks: cfg.orders * cfg.clicks, counts: &counts}
	for i := range cfg.orders {
		charges := len(t.bank.chargesOf(orderID(i)))
		p.charges += charges
		switch {
		case charges == 0:
			p.unpaid++
		case charges > 1:
			p.doubled++
		}
	}
	con.printf("   %s\n", p)
	return p, ctx.Err()
}

// writeInvoices has customers at every process who each ask for one invoice after another.
func writeInvoices(ctx context.Context, cfg config, con *console, t *town) (waits, error) {
	var counts invoiceCounts
	stop := con.live(counts.String)
	invoices, err := t.customers.invoiceAll(ctx, &counts, customersPerShop, cfg.invoicing)
	stop()
	if err != nil {
		return waits{}, err
	}
	w := newWaits(invoices, len(t.shops))
	con.printf("   %s\n", w)
	return w, ctx.Err()
}

// killHolder follows one customer. The first process that works for this order dies inside its section, when its charge has
// left but has not arrived: the network holds it back. The customer's browser turns to the other processes, which answer 409
// until the lease is over. When the order is paid, the network delivers the dead process's charge.
func killHolder(ctx context.Context, cfg config, con *console, t *town) (crash, error) {
	const order = "order-of-the-unlucky"
	patience, cancel := context.WithTimeout(ctx, 30*time.Second+3*cfg.ttl)
	defer cancel()
	held := t.bank.holdBack(order)

	var counts clickCounts
	clicked := make(chan struct{})
	go func() { // ends when the order is paid, or patience is at its end
		defer close(clicked)
		t.customers.click(patience, &counts, order, 0)
	}()
	var c crash
	select {
	case first := <-held.caught: // this is how the process says that it is inside its section
		c.pid, c.firstFence = first.pid, first.fence
	case <-clicked:
		return c, errors.Join(errors.New("the charge of the order did not get as far as the bank"), ctx.Err())
	}
	if err := t.kill(c.pid); err != nil {
		return c, err
	}
	killed := time.Now()
	con.printf("   pid %d is inside its section, its charge under fence %d is under way; killed\n", c.pid, c.firstFence)

	stop := con.live(func() string {
		return fmt.Sprintf("%.1f s since the kill; the customer was told 409 %d times", time.Since(killed).Seconds(), counts.conflicts.Load())
	})
	<-clicked
	stop()
	c.after = time.Since(killed)
	if charges := t.bank.chargesOf(order); len(charges) > 0 {
		c.paid, c.secondPID, c.secondFence = true, charges[0].pid, charges[0].fence
		con.printf("   pid %d went on after %.1f s, and paid under fence %d; the customer was told 409 and when to come back %d times\n",
			c.secondPID, c.after.Seconds(), c.secondFence, counts.conflicts.Load())
	}

	close(held.deliver)
	select {
	case c.lateAccepted = <-held.accepted:
	case <-ctx.Done():
		return c, ctx.Err()
	}
	c.charges = len(t.bank.chargesOf(order))
	con.printf("   the late charge of the dead pid %d arrives under fence %d: %s\n",
		c.pid, c.firstFence, verdict(c.lateAccepted))
	return c, nil
}
