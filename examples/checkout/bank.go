package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"
)

const price = 49_90 // of every order, in cents

// bank is played by the parent process. It does what it is told and keeps the ledger; like the interfaces of many real
// ones it does not mind charging the same order twice. It also keeps the number of the last invoice.
//
// The one protection it offers is the fence: a request whose fencing token is below one seen before for the same thing comes
// from a holder whose lease is over, and is refused. Under local locks there are no tokens, so nothing is ever refused.
type bank struct {
	latency time.Duration

	mu      sync.Mutex // guards what follows
	ledger  map[string][]charge
	fences  map[string]int64 // the highest token seen, by URL path
	held    map[string]*heldBack
	invoice int64
	charges int
	doubled int // orders charged more than once
}

type charge struct {
	pid   int // of the process that asked for it
	fence int64
}

// heldBack is one charge that the network keeps for a while.
type heldBack struct {
	caught   chan charge   // receives the charge when its request has come in
	deliver  chan struct{} // closed by whoever wants it to go on
	accepted chan bool     // receives what became of it
}

func newBank(latency time.Duration) *bank {
	return &bank{latency: latency, ledger: map[string][]charge{}, fences: map[string]int64{}, held: map[string]*heldBack{}}
}

// handler serves until ctx ends. It never looks at the context of a request: a request that has come in is carried out, even if
// its sender has died meanwhile. That is how late writes happen.
func (b *bank) handler(ctx context.Context) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /orders/{id}", func(w http.ResponseWriter, r *http.Request) {
		b.serve(w, r, func() int64 { return int64(len(b.ledger[r.PathValue("id")])) })
	})
	mux.HandleFunc("POST /orders/{id}", func(w http.ResponseWriter, r *http.Request) {
		id := r.PathValue("id")
		c := charge{pid: int(number(r, "pid")), fence: number(r, "fence")}
		held := b.takeHeld(id)
		if held != nil {
			held.caught <- c
			select {
			case <-held.deliver:
			case <-ctx.Done():
				return
			}
		} else if wait(ctx, b.latency) != nil {
			return
		}
		accepted := b.serve(w, r, func() int64 { return b.chargeLocked(id, c) })
		if held != nil {
			held.accepted <- accepted
		}
	})
	mux.HandleFunc("GET /invoices", func(w http.ResponseWriter, r *http.Request) {
		b.serve(w, r, func() int64 { return b.invoice })
	})
	mux.HandleFunc("PUT /invoices", func(w http.ResponseWriter, r *http.Request) {
		b.serve(w, r, func() int64 { b.invoice = number(r, "number"); return b.invoice })
	})
	return mux
}

// serve checks the fence, carries out what is asked, answers with its number, and reports whether the fence let it pass.
//
// Reading counts too: whoever was told "not paid yet" under a token will rely on it, so from then on older tokens
// are refused. If only charges raised the fence, a late one could still slip in between another's question and its charge.
func (b *bank) serve(w http.ResponseWriter, r *http.Request, do func() int64) bool {
	fence := number(r, "fence")
	b.mu.Lock()
	defer b.mu.Unlock()
	if seen := b.fences[r.URL.Path]; fence < seen {
		http.Error(w, fmt.Sprintf("the fence is at %d", seen), http.StatusPreconditionFailed)
		return false
	}
	b.fences[r.URL.Path] = fence
	_, _ = io.WriteString(w, strconv.FormatInt(do(), 10)) // the sender may be gone
	return true
}

func (b *bank) chargeLocked(id string, c charge) int64 {
	b.ledger[id] = append(b.ledger[id], c)
	b.charges++
	if len(b.ledger[id]) == 2 {
		b.doubled++
	}
	return price
}

// holdBack has the network keep the next charge of the order until told to deliver it.
func (b *bank) holdBack(id string) *heldBack {
	h := &heldBack{caught: make(chan charge, 1), deliver: make(chan struct{}), accepted: make(chan bool, 1)}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.held[id] = h
	return h
}

func (b *bank) takeHeld(id string) *heldBack {
	b.mu.Lock()
	defer b.mu.Unlock()
	h := b.held[id]
	delete(b.held, id)
	return h
}

func (b *bank) chargesOf(id string) []charge {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.ledger[id]
}

// String is for the progress line.
func (b *bank) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return fmt.Sprintf("the bank: %d charges, %d orders charged twice", b.charges, b.doubled)
}

// number returns a number of the query; 0 if it is missing, which the fence lets pass only where no token was ever seen.
func number(r *http.Request, name string) int64 {
	n, _ := strconv.ParseInt(r.URL.Query().Get(name), 10, 64)
	return n
}

// bankClient is what the shop has of the bank.
type bankClient struct {
	http *http.Client
	url  string
	pid  int
}

func (c *bankClient) paid(ctx context.Context, order string, fence int64) (bool, error) {
	n, err := c.call(ctx, http.MethodGet, "/orders/"+order, fence, 0)
	return n > 0, err
}

func (c *bankClient) charge(ctx context.Context, order string, fence int64) error {
	_, err := c.call(ctx, http.MethodPost, "/orders/"+order, fence, 0)
	return err
}

func (c *bankClient) lastInvoice(ctx context.Context, fence int64) (int64, error) {
	return c.call(ctx, http.MethodGet, "/invoices", fence, 0)
}

func (c *bankClient) setLastInvoice(ctx context.Context, fence, last int64) error {
	_, err := c.call(ctx, http.MethodPut, "/invoices", fence, last)
	return err
}

func (c *bankClient) call(ctx context.Context, method, path string, fence, n int64) (int64, error) {
	url := fmt.Sprintf("%s%s?fence=%d&pid=%d&number=%d", c.url, path, fence, c.pid, n)
	req, err := http.NewRequestWithContext(ctx, method, url, nil)
	if err != nil {
		return 0, err
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return 0, err
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, err
	}
	if resp.StatusCode != http.StatusOK { // such as 412: the lease is over, and somebody else has a newer token
		return 0, fmt.Errorf("the bank says %s: %s", resp.Status, strings.TrimSpace(string(body)))
	}
	return strconv.ParseInt(string(body), 10, 64)
}
