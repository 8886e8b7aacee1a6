package kernel

import (
	"fmt"
	"testing"
	"time"
)

// peakRate is the rate of the widest multiply-add in GFLOP/s, or 0 where there is none: the best of a few short runs.
func peakRate() float64 {
	best := 0.0
	for range 20 {
		const n = 20000
		t := time.Now()
		flops := peakRun(n)
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
				peak := peakRate()
				a := make([]float32, max(s.m, s.k)*s.stride+s.k)
				panel, c := make([]float32, s.k*Width), make([]float32, s.m*Width)
				draw(a, 1)
				draw(panel, 2)
				ars, acs := s.stride, 1
				if s.trans {
					ars, acs = 1, s.stride
				}
				b.ResetTimer()
				for b.Loop() {
					p.gemm(c, Width, a, ars, acs, panel, s.m, s.k, false)
				}
				rate := 2 * Width * float64(s.m*s.k) * float64(b.N) / float64(b.Elapsed().Nanoseconds())
				b.ReportMetric(rate, "GFLOP/s")
				if peak > 0 {
					b.ReportMetric(100*rate/peak, "%peak")
				}
			})
		}
	}
}
