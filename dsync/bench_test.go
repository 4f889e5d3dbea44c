package dsync_test

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/e51fe0e6/dsync/driver"
	"github.com/e51fe0e6/dsync/dsync"
	"github.com/e51fe0e6/dsync/internal/redistest"
)

// The bare pair is the floor: what any lock over Redis pays that takes and gives back in two commands.
var (
	barePut  = driver.NewScript(`return {redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) and 1 or 0}`)
	bareDrop = driver.NewScript(`if redis.call('GET', KEYS[1]) == ARGV[1] then return {redis.call('DEL', KEYS[1])} end return {0}`)
)

func BenchmarkUncontended(b *testing.B) {
	for _, d := range dialers {
		server := redistest.Start(b)
		w := &world{dialer: d, server: server}
		for _, names := range []int{1, 64} {
			b.Run(fmt.Sprintf("%s/names=%d/bare", d.name, names), func(b *testing.B) {
				drv, done, err := d.dial(server.Addr(), "", "")
				require.NoError(b, err)
				defer done()
				var next atomic.Int64
				b.SetParallelism(max(1, names/2))
				b.ReportAllocs()
				run := func() {
					key := []string{fmt.Sprint("bare-", next.Add(1))}
					put := driver.Cmd{Script: barePut, Keys: key, Args: []string{"token", "10000"}}
					drop := driver.Cmd{Script: bareDrop, Keys: key, Args: []string{"token"}}
					if _, err := drv.Exec(b.Context(), put); err != nil {
						b.Error(err)
					}
					if _, err := drv.Exec(b.Context(), drop); err != nil {
						b.Error(err)
					}
				}
				if names == 1 {
					for b.Loop() {
						run()
					}
					return
				}
				b.RunParallel(func(pb *testing.PB) {
					for pb.Next() {
						run()
					}
				})
			})
			b.Run(fmt.Sprintf("%s/names=%d/mutex", d.name, names), func(b *testing.B) {
				c := w.client(b)
				var next atomic.Int64
				b.SetParallelism(max(1, names/2))
				b.ReportAllocs()
				loop := func(more func() bool) {
					mu := dsync.NewMutex(c, fmt.Sprint("mutex-", next.Add(1)))
					for more() {
						if err := mu.Lock(b.Context()); err != nil {
							b.Error(err)
						}
						if err := mu.Unlock(b.Context()); err != nil {
							b.Error(err)
						}
					}
				}
				if names == 1 {
					loop(b.Loop)
					return
				}
				b.RunParallel(func(pb *testing.PB) { loop(pb.Next) })
			})
		}
		b.Run(d.name+"/linger", func(b *testing.B) {
			mu := dsync.NewMutex(w.client(b), "linger", dsync.WithLinger(time.Minute))
			b.ReportAllocs()
			for b.Loop() {
				_ = mu.Lock(b.Context())
				_ = mu.Unlock(b.Context())
			}
		})
		b.Run(d.name+"/local-64", func(b *testing.B) {
			c := w.client(b)
			b.SetParallelism(32)
			b.ReportAllocs()
			b.RunParallel(func(pb *testing.PB) {
				mu := dsync.NewMutex(c, "local")
				for pb.Next() {
					_ = mu.Lock(b.Context())
					_ = mu.Unlock(b.Context())
				}
			})
		})
	}
}
