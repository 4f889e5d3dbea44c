package main

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// findings is what was seen in the four chapters.
type findings struct {
	local, dsync payments
	waits        waits
	crash        crash
}

// payments is what became of the orders, by the ledger of the bank, and of the clicks, by what the customers were told.
type payments struct {
	orders, clicks   int
	charges, doubled int // doubled: orders charged more than once
	unpaid           int // orders never charged
	counts           *clickCounts
}

func (p payments) excess() string {
	cents := price * (p.charges - (p.orders - p.unpaid))
	return fmt.Sprintf("%d.%02d", cents/100, cents%100)
}

// String sums it up.
func (p payments) String() string {
	return fmt.Sprintf("%d orders, %d clicks: %d charges; %d orders charged more than once, %s too much",
		p.orders, p.clicks, p.charges, p.doubled, p.excess())
}

// waits is what waiting for the lock was like.
type waits struct {
	invoices, twice, missing int
	p50, p99                 time.Duration
	perShop                  []int
}

func newWaits(invoices []invoice, shops int) waits {
	w := waits{invoices: len(invoices), perShop: make([]int, shops)}
	numbers := map[int64]int{}
	waited := make([]time.Duration, 0, len(invoices))
	for _, v := range invoices {
		if !v.unmeasured {
			w.perShop[v.shop]++
			waited = append(waited, v.Wait)
		}
		if numbers[v.Number]++; numbers[v.Number] == 2 {
			w.twice++
		}
	}
	for n := range int64(len(numbers)) {
		if numbers[n+1] == 0 {
			w.missing++
		}
	}
	if len(waited) > 0 {
		slices.Sort(waited)
		w.p50, w.p99 = waited[len(waited)/2].Round(10*time.Microsecond), waited[len(waited)*99/100].Round(10*time.Microsecond)
	}
	return w
}

// fairness is the fewest turns of a process by the most: 1 is perfectly fair.
func (w waits) fairness() float64 {
	if w.invoices == 0 {
		return 0
	}
	return float64(slices.Min(w.perShop)) / float64(slices.Max(w.perShop))
}

// String sums it up.
func (w waits) String() string {
	return fmt.Sprintf("%d invoices; waited p50 %v, p99 %v; turns of each process %v", w.invoices, w.p50, w.p99, w.perShop)
}

// crash is what became of the order whose process was killed.
type crash struct {
	pid, secondPID          int
	firstFence, secondFence int64
	after                   time.Duration // from the kill to the customer's answer
	paid, lateAccepted      bool
	charges                 int
}

// report prints the summary, with a mark at each row that is a promise, and returns whether all of them were seen to hold.
func (c *console) report(f findings) bool {
	const none, held, failed = "", "ok", "FAIL"
	var text strings.Builder
	table := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	row := func(mark, name, local, shared string) {
		_, _ = fmt.Fprintf(table, "  %s\t%s\t%s\t%s\n", mark, name, local, shared)
	}
	mark := func(ok bool) string {
		if ok {
			return held
		}
		return failed
	}
	local, shared, w, cr := f.local, f.dsync, f.waits, f.crash
	row(none, "", "sync.Mutex", "dsync.Mutex")
	row(none, "orders, clicks", n(local.orders, local.clicks), n(shared.orders, shared.clicks))
	row(none, "charges", n(local.charges), n(shared.charges))
	// Were it 0 on the left, the demonstration would show nothing: perhaps there was no race to win.
	row(mark(local.doubled > 0 && shared.doubled == 0), "orders charged more than once", n(local.doubled), n(shared.doubled))
	row(none, "charged too much", local.excess(), shared.excess())
	conflicts, gaveUp, failures := shared.counts.conflicts.Load(), shared.counts.gaveUp.Load(), shared.counts.failed.Load()
	row(mark(conflicts > 0 && shared.counts.noRetryAfter.Load() == 0), "clicks answered 409 with Retry-After", n(local.counts.conflicts.Load()), n(conflicts))
	row(mark(shared.unpaid == 0 && gaveUp == 0 && failures == 0), "orders unpaid, customers who gave up, requests failed", "", n(int64(shared.unpaid), gaveUp, failures))
	row(mark(w.invoices > 0 && w.twice == 0 && w.missing == 0), "invoices, numbers given twice, numbers left out", "", n(w.invoices, w.twice, w.missing))
	row(none, "waited for the lock: p50, p99", "", fmt.Sprintf("%v, %v", w.p50, w.p99))
	row(mark(w.fairness() >= 0.5), "turns of each process, min/max", "", fmt.Sprintf("%s, %.2f", n(w.perShop...), w.fairness()))
	row(mark(cr.paid && cr.secondPID != cr.pid), "after a kill, paid by another process", "", fmt.Sprintf("%.1f s", cr.after.Seconds()))
	row(mark(cr.firstFence > 0 && cr.secondFence > cr.firstFence), "fencing token, the next is above it by", "", n(cr.firstFence, cr.secondFence-cr.firstFence))
	row(mark(!cr.lateAccepted && cr.charges == 1), "late charge of the killed process, charges in all", "", verdict(cr.lateAccepted)+", "+n(cr.charges))
	_ = table.Flush() // a Builder does not fail
	c.printf("\n%s", text.String())
	return !strings.Contains(text.String(), failed)
}

func verdict(accepted bool) string {
	if accepted {
		return "ACCEPTED"
	}
	return "refused"
}

// n lists numbers.
func n[T int | int64](numbers ...T) string {
	return strings.ReplaceAll(strings.Trim(fmt.Sprint(numbers), "[]"), " ", ", ")
}

// console prints the story, with a line of progress: rewritten in place on a terminal, now and then a new one elsewhere.
type console struct {
	out      *os.File
	terminal bool
}

func newConsole(out *os.File) *console {
	info, err := out.Stat()
	return &console{out: out, terminal: err == nil && info.Mode()&os.ModeCharDevice != 0}
}

func (c *console) printf(format string, args ...any) { _, _ = fmt.Fprintf(c.out, format, args...) }

func (c *console) title(text string) { c.printf("\n%s\n", text) }

// live shows status until the returned function is called, which returns when nothing more will be printed.
func (c *console) live(status func() string) (stop func()) {
	every := time.Second
	if c.terminal {
		every = 100 * time.Millisecond
	}
	ticker, done, ended := time.NewTicker(every), make(chan struct{}), make(chan struct{})
	start := time.Now()
	go func() { // ends when stop is called, which waits for it
		defer close(ended)
		for {
			select {
			case <-ticker.C:
			case <-done:
				return
			}
			if line := fmt.Sprintf("   %4.1f s  %s", time.Since(start).Seconds(), status()); c.terminal {
				c.printf("\r\x1b[K%s", line)
			} else {
				c.printf("%s\n", line)
			}
		}
	}()
	return func() {
		ticker.Stop()
		close(done)
		<-ended
		if c.terminal {
			c.printf("\r\x1b[K")
		}
	}
}
