package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

const (
	rush       = time.Second            // within this time all orders are placed
	impatience = 50 * time.Millisecond  // within this time a customer's clicks fall
	jitter     = 500 * time.Millisecond // is added at random when a page asks again
	settle     = 200 * time.Millisecond
	maxTries   = 6 // then it gives up
)

// customers are played by the parent process. Like a load balancer, they spread over the processes of the shop.
type customers struct {
	http  *http.Client
	shops []string // URLs
}

// newHTTPClient keeps enough connections for all its concurrent callers.
func newHTTPClient() *http.Client {
	return &http.Client{Timeout: 2 * time.Minute, Transport: &http.Transport{MaxIdleConnsPerHost: 1000}}
}

func orderID(i int) string { return strconv.Itoa(1001 + i) }

// clickCounts is what became of clicks so far.
type clickCounts struct {
	clicks, paid, conflicts, failed, gaveUp atomic.Int64

	noRetryAfter atomic.Int64 // conflicts without a usable Retry-After
}

// String is for the progress line.
func (c *clickCounts) String() string {
	return fmt.Sprintf("%d clicks, %d told paid, %d × 409", c.clicks.Load(), c.paid.Load(), c.conflicts.Load())
}

// clickAll places the orders, each with several clicks on its button, and returns when every customer knows the outcome.
func (c *customers) clickAll(ctx context.Context, counts *clickCounts, orders, clicks int) {
	var wg sync.WaitGroup
	for i := range orders {
		placed := rand.N(rush)
		for click := range clicks {
			wg.Go(func() {
				if wait(ctx, placed+rand.N(impatience)) == nil {
					c.click(ctx, counts, orderID(i), i+click)
				}
			})
		}
	}
	wg.Wait()
}

// click is one click on "pay", and what the page does until it knows that the order is paid: after a 409 it comes back when
// it was told to, and what is not answered, or fails, it asks of the next process.
func (c *customers) click(ctx context.Context, counts *clickCounts, order string, shop int) {
	counts.clicks.Add(1)
	for range maxTries {
		status, retryAfter, err := c.pay(ctx, order, shop)
		switch {
		case ctx.Err() != nil:
			return
		case err == nil && status == http.StatusOK:
			counts.paid.Add(1)
			return
		case err == nil && status == http.StatusConflict:
			counts.conflicts.Add(1)
			if retryAfter <= 0 {
				counts.noRetryAfter.Add(1)
			}
		default: // the process is gone, or in trouble
			counts.failed.Add(1)
			shop++
		}
		// Not all at the same moment, or those who were turned away together would turn each other away again.
		if wait(ctx, retryAfter+rand.N(jitter)) != nil {
			return
		}
	}
	counts.gaveUp.Add(1)
}

func (c *customers) pay(ctx context.Context, order string, shop int) (status int, retryAfter time.Duration, err error) {
	resp, err := c.post(ctx, shop, "/orders/"+order+"/pay")
	if err != nil {
		return 0, 0, err
	}
	defer func() { _ = resp.Body.Close() }()
	_, _ = io.Copy(io.Discard, resp.Body) // so that the connection is used again
	seconds, _ := strconv.Atoi(resp.Header.Get("Retry-After"))
	return resp.StatusCode, time.Duration(seconds) * time.Second, nil
}

func (c *customers) post(ctx context.Context, shop int, path string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.shops[shop%len(c.shops)]+path, nil)
	if err != nil {
		return nil, err
	}
	return c.http.Do(req)
}

// invoice is one that was written, by which process.
type invoice struct {
	invoiceReply

	shop       int
	unmeasured bool // its number counts, its wait does not
}

type invoiceCounts struct{ written atomic.Int64 }

// String is for the progress line.
func (c *invoiceCounts) String() string { return fmt.Sprintf("%d invoices", c.written.Load()) }

// invoiceAll has the same number of customers at each process, and each asks for one invoice after another for the given
// time. So the processes always want the lock equally much, and what they get shows whether it is fair.
func (c *customers) invoiceAll(ctx context.Context, counts *invoiceCounts, perShop int, during time.Duration) ([]invoice, error) {
	var (
		wg     sync.WaitGroup
		failed atomic.Pointer[error]
		mu     sync.Mutex // guards all
		all    []invoice
	)
	for shop := range c.shops { // the first wait of a process also opens its subscription, which is not what is measured
		reply, err := c.invoice(ctx, shop)
		if err != nil {
			return nil, err
		}
		all = append(all, invoice{invoiceReply: reply, shop: shop, unmeasured: true})
	}
	if err := wait(ctx, settle); err != nil {
		return nil, err
	}
	end := time.Now().Add(during)
	for i := range perShop * len(c.shops) {
		shop := i % len(c.shops)
		wg.Go(func() {
			for time.Now().Before(end) {
				reply, err := c.invoice(ctx, shop)
				if err != nil {
					failed.Store(&err)
					return
				}
				counts.written.Add(1)
				mu.Lock()
				all = append(all, invoice{invoiceReply: reply, shop: shop})
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	if err := failed.Load(); err != nil {
		return nil, *err
	}
	return all, nil
}

func (c *customers) invoice(ctx context.Context, shop int) (reply invoiceReply, err error) {
	resp, err := c.post(ctx, shop, "/invoices")
	if err != nil {
		return reply, err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(resp.Body)
		return reply, fmt.Errorf("invoice: %s: %s", resp.Status, text)
	}
	return reply, json.NewDecoder(resp.Body).Decode(&reply)
}

// wait returns nil after d, or the error of ctx when that ends first.
func wait(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
