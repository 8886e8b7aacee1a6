package collective

import (
	"context"
	"fmt"
	"testing"
)

// bench runs op b.N times on every rank of a group.
func bench(b *testing.B, n int, op func(ctx context.Context, w World) func() error) {
	b.Helper()
	ctx := b.Context()
	b.ReportAllocs()
	err := Run(n, func(w World) error {
		f := op(ctx, w)
		if err := f(); err != nil { // the first touch of what it allocated
			return err
		}
		if err := w.Barrier(ctx, "start"); err != nil {
			return err
		}
		if w.Rank() == 0 {
			b.ResetTimer()
		}
		for range b.N {
			if err := f(); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		b.Fatal(err)
	}
}

// BenchmarkSmall is the latency of what planning does all the time: two numbers over all ranks.
func BenchmarkSmall(b *testing.B) {
	for _, n := range []int{1, 2, 4, 8} {
		b.Run(fmt.Sprintf("int64/ranks=%d", n), func(b *testing.B) {
			bench(b, n, func(ctx context.Context, w World) func() error {
				v := []int64{1, -2}
				return func() error { return w.AllReduceInt64(ctx, "small", Max, v) }
			})
		})
		b.Run(fmt.Sprintf("agree/ranks=%d", n), func(b *testing.B) {
			bench(b, n, func(ctx context.Context, w World) func() error {
				return func() error { return Agree(ctx, w, nil) }
			})
		})
	}
}

// BenchmarkSum is a gradient bucket; MB/s counts one rank's bytes, as its caller would.
func BenchmarkSum(b *testing.B) {
	for _, bytes := range []int{64 << 10, 1 << 20, 64 << 20} {
		for _, n := range []int{2, 4, 8} {
			b.Run(fmt.Sprintf("KiB=%d/ranks=%d", bytes>>10, n), func(b *testing.B) {
				b.SetBytes(int64(bytes))
				bench(b, n, func(ctx context.Context, w World) func() error {
					v := make([]float32, bytes/4)
					for i := range v {
						v[i] = 1e-30 // no growth to infinity, whose adding some processors do more slowly
					}
					return func() error { return w.AllReduceFloat32(ctx, "bucket", Sum, v) }
				})
			})
		}
	}
}

// BenchmarkBroadcast is a chunk of weights from one rank to the others.
func BenchmarkBroadcast(b *testing.B) {
	for _, n := range []int{2, 4} {
		b.Run(fmt.Sprintf("KiB=65536/ranks=%d", n), func(b *testing.B) {
			b.SetBytes(64 << 20)
			bench(b, n, func(ctx context.Context, w World) func() error {
				p := make([]byte, 64<<20)
				return func() error { return w.Broadcast(ctx, "chunk", 0, p) }
			})
		})
	}
}

// BenchmarkCopy is what memory allows: one goroutine copies 64 MiB.
func BenchmarkCopy(b *testing.B) {
	b.SetBytes(64 << 20)
	to, from := make([]byte, 64<<20), make([]byte, 64<<20)
	copy(to, from)
	for b.Loop() {
		copy(to, from)
	}
}
