// Package dsync gives a fleet of Go services what package sync gives goroutines: primitives that exclude each other across processes, through
// Redis.
//
//	rdb := redis.NewClient(&redis.Options{Addr: "localhost:6379"})
//	client := dsync.New(goredis.New(rdb)) // one per process
//	defer client.Close(ctx)
//
//	mu := dsync.NewMutex(client, "orders:42")
//	err := mu.Do(ctx, func(ctx context.Context) error {
//		fence, _ := dsync.Fence(ctx)
//		return charge(ctx, order, fence) // ctx ends if the lease is lost
//	})
//
// The driver is an adapter around the Redis client that you have: package driver/goredis for go-redis, package driver/rueidis for rueidis. TLS,
// Sentinel, Cluster and users are configured there.
//
// # What waiting is like
//
// A process has at most one place in the queue of a name, however many of its goroutines wait. Whoever releases the lock hands it, in
// the same script, to the process that waits longest, and tells it so: nobody polls, nobody is woken in vain, and a hand-over costs two script calls
// whatever the number of waiters. Within a process the lock passes from goroutine to goroutine without Redis, without
// limit while no other process waits, and for [WithSlice] once one does.
//
// # What is promised
//
//   - On one surviving primary two leases of a name never overlap in Redis's own order, and a holder that runs knows of the end of
//     its lease before Redis can grant the next: it counts from before it asked, less a margin.
//   - Fencing tokens of a name strictly increase, in the order of the holds.
//   - A call that ended leaves nothing behind that nobody owns: a lock taken after its caller gave up is given back, whenever the command
//     arrives. If the process is cut off or dies at that moment, its place in the queue lasts for up to its TTL, and a lease that it
//     is still given for one TTL more.
//   - A lost message costs min(TTL/3, 3 s); a dead holder costs the rest of its lease.
//
// # What no lease can promise
//
// A process that is paused (a long collection, a suspended machine, a stopped container) may wake up after its lease has ended, and believe
// for a moment that it still holds. A failover may lose the last writes, and with them a grant. Only the resource itself can keep such a
// holder out: hand it the fencing token ([Fence]), and let it refuse one that is smaller than one it has seen.
//
// The effect of a section is at least once, not exactly once: a holder may crash after the charge and before it wrote that down. Give the payment gateway an
// idempotency key as well.
//
// # What it is not
//
// No re-entrance by goroutine identity: identity is the value, as in sync, and locking again inside a Do is [ErrDeadlock]. No silent success
// when Redis is away: [ErrUnavailable] is returned, and what to do is yours to decide.
package dsync
