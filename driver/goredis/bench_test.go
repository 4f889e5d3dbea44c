package goredis

import (
	"context"
	"strconv"
	"sync/atomic"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/e51fe0e6/dsync/driver"
	"github.com/e51fe0e6/dsync/internal/redistest"
)

// BenchmarkExec compares the adapter with what its client does alone: EVALSHA, one command per call.
// Run it with: go test -run '^$' -bench Exec -count 10 ./driver/goredis.
func BenchmarkExec(b *testing.B) {
	server := redistest.Start(b)
	client := redis.NewClient(&redis.Options{Addr: server.Addr()})
	defer func() { _ = client.Close() }()
	script := driver.NewScript("return {1}")
	ways := []struct {
		name string
		exec func(ctx context.Context, key string) error
	}{
		{"plain", func(ctx context.Context, key string) error {
			return client.EvalSha(ctx, script.SHA1(), []string{key}, "x").Err()
		}},
		{"adapter-background", func() func(ctx context.Context, key string) error {
			d := New(client)
			return func(_ context.Context, key string) error {
				_, err := d.Exec(context.Background(), driver.Cmd{Script: script, Keys: []string{key}, Args: []string{"x"}})
				return err
			}
		}()},
		{"adapter-cancelable", func() func(ctx context.Context, key string) error {
			d := New(client)
			return func(ctx context.Context, key string) error {
				_, err := d.Exec(ctx, driver.Cmd{Script: script, Keys: []string{key}, Args: []string{"x"}})
				return err
			}
		}()},
	}
	for _, callers := range []int{1, 2, 8, 64, 256} {
		for _, way := range ways {
			b.Run(strconv.Itoa(callers)+"/"+way.name, func(b *testing.B) {
				server.MustDo("SCRIPT", "LOAD", script.Src())
				var id atomic.Int64
				b.SetParallelism(max(1, callers/2))
				if callers == 1 {
					ctx := b.Context()
					for b.Loop() {
						if err := way.exec(ctx, "k"); err != nil {
							b.Fatal(err)
						}
					}
					return
				}
				b.RunParallel(func(pb *testing.PB) {
					ctx := b.Context()
					key := "k" + strconv.FormatInt(id.Add(1), 10)
					for pb.Next() {
						if err := way.exec(ctx, key); err != nil {
							b.Error(err)
							return
						}
					}
				})
			})
		}
	}
}
