package main

import (
	"context"
	"encoding/json"
	"math"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/e51fe0e6/dsync/dsync"
)

// locks is what the two kinds of lock have in common here.
type locks interface {
	// tryDo calls fn if nobody holds the lock. Otherwise ran is false, and retryAfter tells how long it may last; 0: unknown.
	tryDo(ctx context.Context, name string, fn func(context.Context) error) (ran bool, retryAfter time.Duration, err error)
	// do waits for the lock, then calls fn.
	do(ctx context.Context, name string, fn func(context.Context) error) error
}

// localLocks has a sync.Mutex for each name: right as long as there is one process.
type localLocks struct{ byName sync.Map }

func (l *localLocks) mutex(name string) *sync.Mutex {
	mu, _ := l.byName.LoadOrStore(name, new(sync.Mutex))
	return mu.(*sync.Mutex) //nolint:forcetypeassert // nothing else is stored
}

func (l *localLocks) tryDo(ctx context.Context, name string, fn func(context.Context) error) (bool, time.Duration, error) {
	mu := l.mutex(name)
	if !mu.TryLock() {
		return false, 0, nil
	}
	defer mu.Unlock()
	return true, 0, fn(ctx)
}

func (l *localLocks) do(ctx context.Context, name string, fn func(context.Context) error) error {
	mu := l.mutex(name)
	mu.Lock()
	defer mu.Unlock()
	return fn(ctx)
}

// sharedLocks has a dsync.Mutex for each name: one lock, however many processes. A Mutex costs nothing to make, so every
// request makes its own. The context that fn gets carries the fencing token, and ends if the lease is lost.
type sharedLocks struct {
	client *dsync.Client
	ttl    time.Duration
}

func (l *sharedLocks) mutex(name string) *dsync.Mutex {
	return dsync.NewMutex(l.client, name, dsync.WithTTL(l.ttl), dsync.WithLabel("checkout"))
}

func (l *sharedLocks) tryDo(ctx context.Context, name string, fn func(context.Context) error) (bool, time.Duration, error) {
	mu := l.mutex(name)
	ran, err := mu.TryDo(ctx, fn)
	return ran, mu.RetryAfter(), err
}

func (l *sharedLocks) do(ctx context.Context, name string, fn func(context.Context) error) error {
	return l.mutex(name).Do(ctx, fn)
}

// shop is one process of the shop.
type shop struct {
	locks locks
	bank  *bankClient
}

func (s *shop) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /orders/{id}/pay", s.pay)
	mux.HandleFunc("POST /invoices", s.invoice)
	return mux
}

// pay charges an order once, if the lock is one for all that call it. It does not wait: the click before this one is
// being served, and whoever clicked again learns when to ask what became of it.
func (s *shop) pay(w http.ResponseWriter, r *http.Request) {
	order := r.PathValue("id")
	// A customer who closes the page must not break off a charge half way, so the request's end does not end the section.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), time.Minute)
	defer cancel()
	ran, retryAfter, err := s.locks.tryDo(ctx, "order:"+order, func(ctx context.Context) error {
		fence, _ := dsync.Fence(ctx) // 0 under a local lock
		paid, err := s.bank.paid(ctx, order, fence)
		if err != nil || paid {
			return err
		}
		return s.bank.charge(ctx, order, fence) // the bank must still be told only once: hence the lock
	})
	switch {
	case err != nil:
		// Whatever it was (the bank, Redis, a lost lease), asking again is safe: the section starts with the question.
		fail(w, err)
	case !ran:
		w.Header().Set("Retry-After", strconv.Itoa(max(1, int(math.Ceil(retryAfter.Seconds())))))
		http.Error(w, "this order is being paid", http.StatusConflict)
	default:
		w.WriteHeader(http.StatusOK)
	}
}

// invoiceReply is the answer to POST /invoices.
type invoiceReply struct {
	Number int64
	Wait   time.Duration // for the lock
}

// invoice gives out the next number. No two invoices may have the same and none may be left out, so callers take turns: they wait.
func (s *shop) invoice(w http.ResponseWriter, r *http.Request) {
	var reply invoiceReply
	asked := time.Now()
	err := s.locks.do(r.Context(), "invoices", func(ctx context.Context) error {
		reply.Wait = time.Since(asked)
		fence, _ := dsync.Fence(ctx)
		last, err := s.bank.lastInvoice(ctx, fence)
		if err != nil {
			return err
		}
		reply.Number = last + 1
		return s.bank.setLastInvoice(ctx, fence, reply.Number)
	})
	if err != nil {
		fail(w, err)
		return
	}
	_ = json.NewEncoder(w).Encode(reply) // the caller may be gone
}

func fail(w http.ResponseWriter, err error) {
	w.Header().Set("Retry-After", "1")
	http.Error(w, err.Error(), http.StatusServiceUnavailable)
}
