package claim

import (
	"math/rand/v2"
	"testing"
)

// FuzzClaim reads its bytes as the choices of a world: what happens, where, when, and what becomes of it. The invariants are those of
// the explorer.
func FuzzClaim(f *testing.F) {
	for seed := range uint64(16) {
		r := rand.New(rand.NewPCG(seed, 1))
		data := make([]byte, 400)
		for i := range data {
			data[i] = byte(r.IntN(256))
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		if w := decoded(data, false); w.broken != "" {
			decoded(data, true).fail(t, "this input breaks it")
		}
	})
}

func decoded(data []byte, tracing bool) *world {
	choose := func(n int) int {
		if len(data) == 0 {
			return 0
		}
		b := data[0]
		data = data[1:]
		return int(b) % n
	}
	w, s := draw(choose, mutant{})
	w.tracing = tracing
	w.chaos(s, choose, 300, func() bool { return len(data) > 0 })
	w.calm(s)
	return w
}
