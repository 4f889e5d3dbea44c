package dsync_test

import (
	"context"
	"fmt"
	"log"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/e51fe0e6/dsync/driver/goredis"
	"github.com/e51fe0e6/dsync/dsync"
)

// exampleServer stands in for your Redis.
func exampleServer() (addr string, stop func()) {
	server, err := miniredis.Run()
	if err != nil {
		log.Fatal(err)
	}
	server.ClockTTL(true) // keys of miniredis do not age otherwise
	return server.Addr(), server.Close
}

// A section that must not run twice at once in the whole fleet.
func ExampleMutex_Do() {
	addr, stop := exampleServer()
	defer stop()
	ctx := context.Background()

	rdb := redis.NewClient(&redis.Options{Addr: addr})
	defer func() { _ = rdb.Close() }()
	client := dsync.New(goredis.New(rdb)) // one per process
	defer func() { _ = client.Close(ctx) }()

	mu := dsync.NewMutex(client, "order:42")
	err := mu.Do(ctx, func(ctx context.Context) error {
		fence, _ := dsync.Fence(ctx)
		fmt.Println("charged with a fence:", fence > 0)
		return nil
	})
	fmt.Println(err)
	// Output:
	// charged with a fence: true
	// <nil>
}

// Who comes second is turned away instead of waiting.
func ExampleMutex_TryLock() {
	addr, stop := exampleServer()
	defer stop()
	ctx := context.Background()

	rdb := redis.NewClient(&redis.Options{Addr: addr})
	defer func() { _ = rdb.Close() }()
	client := dsync.New(goredis.New(rdb))
	defer func() { _ = client.Close(ctx) }()

	first, second := dsync.NewMutex(client, "order:42"), dsync.NewMutex(client, "order:42")
	ok, err := first.TryLock(ctx)
	fmt.Println(ok, err)
	ok, err = second.TryLock(ctx)
	fmt.Println(ok, err, second.RetryAfter() > 0)
	fmt.Println(first.Unlock(ctx))
	// Output:
	// true <nil>
	// false <nil> true
	// <nil>
}
