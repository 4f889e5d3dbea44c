package rueidis

import (
	"context"
	"strconv"
	"sync/atomic"
	"testing"

	"github.com/redis/rueidis"

	"github.com/e51fe0e6/dsync/driver"
	"github.com/e51fe0e6/dsync/internal/redistest"
)

// BenchmarkExec compares the adapter with what its client does alone.
// Run it with: go test -run '^$' -bench Exec -count 10 ./driver/rueidis.
func BenchmarkExec(b *testing.B) {
	server := redistest.Start(b)
	client, err := rueidis.NewClient(rueidis.ClientOption{
		InitAddress: []string{server.Addr()}, ForceSingleClient: true, DisableCache: true,
	})
	if err != nil {
		b.Fatal(err)
	}
	defer client.Close()
	script := driver.NewScript("return {1}")
	d := New(client)
	adapter := func(ctx context.Context, key string) error {
		_, err := d.Exec(ctx, driver.Cmd{Script: script, Keys: []string{key}, Args: []string{"x"}})
		return err
	}
	ways := []struct {
		name string
		exec func(ctx context.Context, key string) error
	}{
		{"plain", func(ctx context.Context, key string) error {
			return client.Do(ctx, client.B().Evalsha().Sha1(script.SHA1()).Numkeys(1).Key(key).Arg("x").Build()).Error()
		}},
		{"adapter-background", func(_ context.Context, key string) error { return adapter(context.Background(), key) }},
		{"adapter-cancelable", adapter},
	}
	for _, callers := range []int{1, 2, 64} {
		for _, way := range ways {
			b.Run(strconv.Itoa(callers)+"/"+way.name, func(b *testing.B) {
				server.MustDo("SCRIPT", "LOAD", script.Src())
				if callers == 1 {
					ctx := context.WithoutCancel(b.Context())
					if way.name == "adapter-cancelable" {
						ctx = b.Context()
					}
					for b.Loop() {
						if err := way.exec(ctx, "k"); err != nil {
							b.Fatal(err)
						}
					}
					return
				}
				var id atomic.Int64
				b.SetParallelism(callers / 2)
				b.RunParallel(func(pb *testing.PB) {
					key := "k" + strconv.FormatInt(id.Add(1), 10)
					for pb.Next() {
						if err := way.exec(b.Context(), key); err != nil {
							b.Error(err)
							return
						}
					}
				})
			})
		}
	}
}
