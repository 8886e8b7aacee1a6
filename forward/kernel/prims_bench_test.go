package kernel

import (
	"fmt"
	"testing"
	"time"
)

// fastest runs f over and over as b asks and returns the least time that one call took, in nanoseconds: on a shared machine the mean
// says more about the neighbours. f should take 10 to 100 microseconds, far above the clock and far below a time slice.
func fastest(b *testing.B, f func()) float64 {
	least := time.Duration(1 << 62)
	for b.Loop() {
		t := time.Now()
		f()
		least = min(least, time.Since(t))
	}
	return float64(least.Nanoseconds())
}

// peakRate is the rate of p's own multiply-adds in GFLOP/s, 0 if unknown.
func peakRate(p *prims) float64 {
	best := 0.0
	for range 200 {
		t := time.Now()
		flops := peakRun(p, 5000)
		best = max(best, flops/float64(time.Since(t).Nanoseconds()))
	}
	return best
}

func BenchmarkGemm(b *testing.B) {
	for _, p := range available() {
		for _, s := range []struct {
			m, k, stride int
			trans        bool
		}{{96, 256, 592, false}, {96, 512, 592, false}, {96, 512, 1024, false}, {96, 512, 96, true}, {13, 512, 592, false}, {4, 512, 592, false}, {1, 512, 592, false}} {
			layout := "rows"
			if s.trans {
				layout = "cols"
			}
			b.Run(fmt.Sprintf("%s/%dx%dx32/%s%d", p.name, s.m, s.k, layout, s.stride), func(b *testing.B) {
				peak := peakRate(p)
				a := make([]float32, max(s.m, s.k)*s.stride+s.k)
				panel, c := make([]float32, s.k*Width), make([]float32, s.m*Width)
				draw(a, 1)
				draw(panel, 2)
				ars, acs := s.stride, 1
				if s.trans {
					ars, acs = 1, s.stride
				}
				reps := max(1, 96/s.m)
				ns := fastest(b, func() {
					for range reps {
						p.gemm(c, Width, a, ars, acs, panel, s.m, s.k, false)
					}
				})
				rate := 2 * Width * float64(s.m*s.k*reps) / ns
				b.ReportMetric(rate, "GFLOP/s")
				if peak > 0 {
					b.ReportMetric(100*rate/peak, "%peak")
				}
			})
		}
	}
}

// each runs f for every table and reports nanoseconds per element of n.
func each(b *testing.B, name string, n int, f func(p *prims)) {
	for _, p := range available() {
		b.Run(p.name+"/"+name, func(b *testing.B) {
			reps := max(1, 20000/n)
			ns := fastest(b, func() {
				for range reps {
					f(p)
				}
			})
			b.ReportMetric(ns/float64(n*reps), "ns/element")
		})
	}
}

func BenchmarkPrims(b *testing.B) {
	const n = 1024
	x, y, w := drawn(n, 1), drawn(n, 2), drawn(n, 3)
	dst, half := make([]float32, n), make([]uint16, n)
	each(b, "widenBF16", n, func(p *prims) { p.widenBF16(dst, half) })
	each(b, "widenF16", n, func(p *prims) { p.widenF16(dst, half) })
	each(b, "sumSquares", n, func(p *prims) { p.sumSquares(x) })
	each(b, "scaleNorm", n, func(p *prims) { p.scaleNorm(dst, x, w, 0.5, 0) })
	each(b, "rope", n, func(p *prims) { p.rope(dst, x[:n/2], y[:n/2]) })
	each(b, "silu", n, func(p *prims) { p.silu(dst, x, y) })
	each(b, "geluTanh", n, func(p *prims) { p.geluTanh(dst, x, y) })
	each(b, "add", n, func(p *prims) { p.add(dst, x) })
	each(b, "max", n, func(p *prims) { p.max(x) })
	each(b, "expSum", n, func(p *prims) { p.expSum(x, 1) })
	z, dst2, dst3 := drawn(n, 7), make([]float32, n), make([]float32, n)
	each(b, "dot", n, func(p *prims) { p.dot(x, y) })
	each(b, "scale", n, func(p *prims) { p.scale(dst, 0.5) })
	each(b, "mulAdd", n, func(p *prims) { p.mulAdd(dst, x, y, 0.5) })
	each(b, "expScale", n, func(p *prims) { copy(dst, x); p.expScale(dst, 1, 0.5) })
	each(b, "normDot", n, func(p *prims) { p.normDot(x, y, w, 1) })
	each(b, "normGrad", n, func(p *prims) { p.normGrad(dst, x, y, w, 0.5, 1, 0.5) })
	each(b, "siluGrad", n, func(p *prims) { p.siluGrad(dst, dst2, dst3, x, y, z) })
	each(b, "geluTanhGrad", n, func(p *prims) { p.geluTanhGrad(dst, dst2, dst3, x, y, z) })

	const keys, head = 64, 128
	var lo, hi, part [Width]int32
	var mx, sum, corr [Width]float32
	var off [Width]int
	for l := range Width {
		hi[l], part[l], corr[l], off[l] = keys, int32(l)+keys/2, 1, l*head
	}
	scores, weights, v, o := drawn(keys*Width, 4), drawn(keys*Width, 5), drawn(keys*head, 6), make([]float32, head*Width)
	each(b, "softmaxBlock", keys*Width, func(p *prims) {
		copy(scores, weights)
		p.softmaxBlock(scores, keys, 1, 0, &lo, &hi, &mx, &sum, &corr)
	})
	dp := make([]float32, keys*Width)
	each(b, "softmaxGradLanes", keys*Width, func(p *prims) {
		copy(scores, weights)
		copy(dp, weights)
		p.softmaxGradLanes(scores, dp, keys, 1, 0, &lo, &part, &mx, &corr, &mx)
	})
	each(b, "softmaxGradRows", keys*Width, func(p *prims) {
		copy(scores, weights)
		copy(dp, weights)
		p.softmaxGradRows(scores, dp, keys, 1, 0, &lo, &part, x, y, 9, w, 9)
	})
	each(b, "scaleLanes", head*Width, func(p *prims) { p.scaleLanes(o, head, &corr) })
	each(b, "accumMasked/all", keys*Width*head, func(p *prims) { p.accumMasked(o, head, v, head, weights, keys, 0, &lo, &hi) })
	each(b, "accumMasked/causal", keys*Width*head, func(p *prims) { p.accumMasked(o, head, v, head, weights, keys, 0, &lo, &part) })
	each(b, "gatherLanes", head*Width, func(p *prims) { p.gatherLanes(o, v, &off, head) })
	each(b, "scatterLanes", head*Width, func(p *prims) { p.scatterLanes(v, &off, Width, o, &corr, head) })
	for _, k := range []int{592, 1024} {
		src16, dst16 := make([]uint16, Width*k), make([]uint16, Width*k)
		src32, dst32 := make([]float32, Width*k), make([]float32, Width*k)
		each(b, fmt.Sprintf("packPanel16/%d", k), Width*k, func(p *prims) { p.packPanel16(dst16, src16, Width, k, 0x7f80) })
		each(b, fmt.Sprintf("packPanel32/%d", k), Width*k, func(p *prims) { p.packPanel32(dst32, src32, Width, k) })
	}
}

// BenchmarkPackFromMemory packs a matrix that no cache holds.
func BenchmarkPackFromMemory(b *testing.B) {
	const n, k = 16384, 1024
	src, dst := make([]uint16, n*k), make([]uint16, Width*k)
	for _, p := range available() {
		b.Run(p.name, func(b *testing.B) {
			at := 0
			ns := fastest(b, func() {
				p.packPanel16(dst, src[at:], Width, k, 0x7f80)
				at = (at + Width*k) % len(src)
			})
			b.ReportMetric(2*Width*k/ns, "GB/s")
		})
	}
}

func BenchmarkSelfTest(b *testing.B) {
	for _, p := range vectorised() {
		b.Run(p.name, func(b *testing.B) {
			for b.Loop() {
				if err := selfTest(p); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
