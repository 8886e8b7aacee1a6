package kernel

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"unsafe"

	"github.com/trainerrank/engine/device"
)

// The benchmarks of whole operations report, beside the time, the best rate of one call: on a shared machine the mean says more about the
// neighbours. `-bench 'Linear/avx2'` runs one table only.

// stage is memory and values for a benchmark.
type stage struct{ r *rand.Rand }

// mem is memory aligned as an arena would.
func (s stage) mem(bytes int64) device.Mem {
	raw := make([]byte, bytes+device.Align)
	skip := -int(uintptr(unsafe.Pointer(&raw[0]))) & (device.Align - 1)
	return device.MemOf(raw[skip : skip+int(bytes)])
}

func (s stage) mat(rows, cols int) Mat {
	m := NewMat(s.mem(MatBytes(rows, cols)), rows, cols)
	for i := range m.Mem.F32() {
		m.Mem.F32()[i] = s.r.Float32()*2 - 1
	}
	return m
}

func (s stage) weight(d DType, out, in int) *Weight {
	w := &Weight{Mem: s.mem(WeightBytes(d, out, in)), DType: d, Out: out, In: in}
	switch d {
	case F32:
		for i := range w.Mem.F32() {
			w.Mem.F32()[i] = s.r.Float32()*2 - 1
		}
	default: // between 1/2 and 2 as bfloat16, about 1.8 as float16
		for i := range w.Mem.U16() {
			w.Mem.U16()[i] = 0x3f00 + uint16(s.r.Uint32()&0xff)
		}
	}
	return w
}

// eachBench runs fn for each table, on 1 and 2 threads.
func eachBench(b *testing.B, fn func(b *testing.B, h *Host, s stage)) {
	for _, p := range available() {
		for threads := 1; threads <= 2; threads++ {
			b.Run(fmt.Sprintf("%s/threads=%d", p.name, threads), func(b *testing.B) {
				h := newHost(p, threads, "")
				defer h.Close()
				fn(b, h, stage{rand.New(rand.NewPCG(1, 1))})
			})
		}
	}
}

// endless says whether an operation is not worth waiting for: the generic table does about a GFLOP/s.
func endless(h *Host, flops float64) bool { return h.p == &generic && flops > 2e9 }

// rate runs op, which does a number of floating-point operations or other units, and reports its best rate per nanosecond or, if inverse,
// the least nanoseconds per unit.
func rate(b *testing.B, h *Host, units float64, metric string, inverse bool, op func()) {
	_ = h.Do(func() error {
		op() // touch the pages
		b.ResetTimer()
		ns := fastest(b, op)
		if inverse {
			b.ReportMetric(ns/units, metric)
		} else {
			b.ReportMetric(units/ns, metric)
		}
		return nil
	})
}

// share lets the workers of h run op for equal blocks of rows, at most the rows of one product each; the returned function runs them
// once. op is given a workspace of its worker.
func share(h *Host, s stage, rows, headDim int, op func(work device.Mem, from, to int)) func() {
	works := make([]device.Mem, h.Threads())
	for i := range works {
		works[i] = s.mem(WorkBytes(headDim))
	}
	n := (rows + chunkRows - 1) / chunkRows
	n = (n + h.Threads() - 1) / h.Threads() * h.Threads()
	return func() {
		h.Each(n, func(worker, i int) {
			if from, to := i*rows/n, (i+1)*rows/n; from < to {
				op(works[worker], from, to)
			}
		})
	}
}

func BenchmarkLinear(b *testing.B) {
	eachBench(b, func(b *testing.B, h *Host, s stage) {
		for _, d := range []DType{F32, BF16} {
			for _, c := range [][3]int{{512, 1024, 1024}, {2048, 1024, 1024}, {512, 2560, 2560}, {2048, 2560, 2560}, {512, 9728, 2560}, {512, 2560, 9728}} {
				rows, out, in := c[0], c[1], c[2]
				flops := 2 * float64(rows) * float64(out) * float64(in)
				if endless(h, flops) {
					continue
				}
				b.Run(fmt.Sprintf("%s/%dx%dx%d", d, rows, out, in), func(b *testing.B) {
					src, dst, w := s.mat(rows, in), s.mat(rows, out), s.weight(d, out, in)
					rate(b, h, flops, "GFLOP/s", false, share(h, s, rows, 0, func(work device.Mem, from, to int) {
						h.Linear(work, dst.RowRange(from, to), src.RowRange(from, to), w, device.Mem{}, false)
					}))
				})
			}
		}
	})
}

func BenchmarkGatedMLP(b *testing.B) {
	eachBench(b, func(b *testing.B, h *Host, s stage) {
		for _, c := range []struct {
			rows, out, in int
			act           Activation
		}{{512, 1536, 576, SiLU}, {512, 3072, 1024, SiLU}, {512, 3072, 1024, GELUTanh}} {
			flops := 4 * float64(c.rows) * float64(c.out) * float64(c.in)
			if endless(h, flops) {
				continue
			}
			b.Run(fmt.Sprintf("bf16/%dx%dx%d/act=%d", c.rows, c.out, c.in, c.act), func(b *testing.B) {
				src, dst := s.mat(c.rows, c.in), s.mat(c.rows, c.out)
				gate, up := s.weight(BF16, c.out, c.in), s.weight(BF16, c.out, c.in)
				rate(b, h, flops, "GFLOP/s", false, share(h, s, c.rows, 0, func(work device.Mem, from, to int) {
					h.GatedMLP(work, dst.RowRange(from, to), src.RowRange(from, to), gate, up, device.Mem{}, device.Mem{}, c.act)
				}))
			})
		}
	})
}

func BenchmarkAttend(b *testing.B) {
	eachBench(b, func(b *testing.B, h *Host, s stage) {
		for _, c := range []struct {
			name string
			a    Attention
		}{
			{"smollm2", Attention{Heads: 9, KVHeads: 3, HeadDim: 64}},
			{"smollm2-window256", Attention{Heads: 9, KVHeads: 3, HeadDim: 64, Window: 256}},
			{"qwen3-0.6b", Attention{Heads: 16, KVHeads: 8, HeadDim: 128}},
		} {
			b.Run(c.name, func(b *testing.B) {
				const n = 1024
				a := c.a
				a.Scale = float32(1 / math.Sqrt(float64(a.HeadDim)))
				q, dst := s.mat(n, a.Heads*a.HeadDim), s.mat(n, a.Heads*a.HeadDim)
				k, v := s.mat(n, a.KVHeads*a.HeadDim), s.mat(n, a.KVHeads*a.HeadDim)
				pairs := 0 // of a query and a key that it sees
				for p := range n {
					if pairs += p + 1; a.Window > 0 && p+1 > a.Window {
						pairs -= p + 1 - a.Window
					}
				}
				spans := []Span{{Parent: -1, End: n}}
				// Smaller blocks than share makes, as late rows see more keys.
				works := []device.Mem{s.mem(WorkBytes(a.HeadDim)), s.mem(WorkBytes(a.HeadDim))}
				rate(b, h, 4*float64(pairs)*float64(a.Heads)*float64(a.HeadDim), "GFLOP/s", false, func() {
					h.Each(n/32, func(worker, i int) {
						h.Attend(works[worker], dst.RowRange(i*32, i*32+32), Mat{}, q.RowRange(i*32, i*32+32), k, v, i*32, spans, a)
					})
				})
			})
		}
	})
}

func BenchmarkHead(b *testing.B) {
	eachBench(b, func(b *testing.B, h *Host, s stage) {
		const vocab, in = 49152, 576
		for _, c := range []struct{ rows, k int }{{1, 0}, {120, 0}, {HeadRows, 0}, {HeadRows, 20}} {
			if endless(h, 2*float64(c.rows)*vocab*in) {
				continue
			}
			b.Run(fmt.Sprintf("bf16/%dx%dx%d/k=%d", c.rows, vocab, in, c.k), func(b *testing.B) {
				hidden, w := s.mat(c.rows, in), s.weight(BF16, vocab, in)
				var asks []Ask
				for r := range c.rows {
					asks = append(asks, Ask{Row: int32(r), Kind: AskTarget, Arg: int32(r), Out: s.mem(4)})
					if c.k > 0 {
						asks = append(asks, Ask{Row: int32(r), Kind: AskTopK, Arg: int32(c.k), Out: s.mem(4 * int64(c.k)), IDs: s.mem(4 * int64(c.k))})
					}
				}
				per := len(asks) / c.rows
				rate(b, h, float64(c.rows)*vocab, "ns/logit", true, share(h, s, c.rows, 0, func(work device.Mem, from, to int) {
					part := slices.Clone(asks[from*per : to*per])
					for i := range part {
						part[i].Row -= int32(from)
					}
					h.Head(work, s.mem(HeadBytes(to-from, c.k)), hidden.RowRange(from, to), w, part)
				}))
			})
		}
	})
}

func BenchmarkNorm(b *testing.B) {
	eachBench(b, func(b *testing.B, h *Host, s stage) {
		for _, c := range [][2]int{{576, 1}, {1024, 1}, {128, 16}} {
			b.Run(fmt.Sprintf("512x%dx%d", c[1], c[0]), func(b *testing.B) {
				x, dst, w := s.mat(512, c[0]*c[1]), s.mat(512, c[0]*c[1]), s.mat(1, c[0])
				rate(b, h, 512*float64(c[0]*c[1]), "ns/elem", true, share(h, s, 512, 0, func(_ device.Mem, from, to int) {
					h.Norm(dst.RowRange(from, to), x.RowRange(from, to), w.Mem.Slice(0, int64(c[0])*4), 0, 1e-6)
				}))
			})
		}
	})
}

func BenchmarkRope(b *testing.B) {
	eachBench(b, func(b *testing.B, h *Host, s stage) {
		for _, c := range [][2]int{{9, 64}, {16, 128}} {
			b.Run(fmt.Sprintf("512x%dx%d", c[0], c[1]), func(b *testing.B) {
				x, cos, sin := s.mat(512, c[0]*c[1]), s.mat(512, c[1]/2), s.mat(512, c[1]/2)
				freq := make([]float64, c[1]/2) // angle 0: values that are rotated again and again stay what they are
				positions := make([]int32, 512)
				for i := range positions {
					positions[i] = int32(i)
				}
				_ = h.Do(func() error { h.RopeTable(cos, sin, 0, freq); return nil })
				rate(b, h, 512*float64(c[0]*c[1]), "ns/elem", true, share(h, s, 512, 0, func(_ device.Mem, from, to int) {
					h.Rope(x.RowRange(from, to), c[1], positions[from:to], cos, sin)
				}))
			})
		}
	})
}
