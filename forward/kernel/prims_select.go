package kernel

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

// available lists the tables that this machine can run, the best last. The generic one is always there, first.
func available() []*prims { return append([]*prims{&generic}, vectorised()...) }

// choose picks the table to run: the one named by env (generic, avx2, avx512), or the best one that works if env is empty.
// A table is tried on small inputs before it is used. One that differs from the generic table is passed over
// and note says so; if env named it, that is an error.
func choose(env string) (p *prims, note string, err error) {
	tables := available()
	if env != "" {
		i := slices.IndexFunc(tables, func(t *prims) bool { return t.name == env })
		if i < 0 {
			var have []string
			for _, t := range tables {
				have = append(have, t.name)
			}
			why := "unknown kernel"
			if slices.Contains(vectorisedNames, env) {
				why = "this machine cannot run kernel"
			}
			return nil, "", fmt.Errorf("%s %q (available: %s)", why, env, strings.Join(have, ", "))
		}
		if err := selfTest(tables[i]); err != nil {
			return nil, "", fmt.Errorf("kernel %q fails its self-test: %w", env, err)
		}
		return tables[i], "", nil
	}
	return best(tables)
}

// best is the last of tables that passes its self-test.
func best(tables []*prims) (p *prims, note string, err error) {
	var notes []string
	for _, t := range slices.Backward(tables) {
		if err := selfTest(t); err != nil {
			notes = append(notes, fmt.Sprintf("kernel %q is not used: %v", t.name, err))
			continue
		}
		return t, strings.Join(notes, "; "), nil
	}
	return nil, "", fmt.Errorf("no kernel works: %s", strings.Join(notes, "; "))
}

// selfTest compares p with the generic table on small inputs of odd sizes. It takes well under a millisecond: it is there to
// catch a processor or an emulator that does not do what it says, not to replace the tests.
func selfTest(p *prims) error {
	if p == &generic {
		return nil
	}
	for _, trial := range trials {
		if err := differ(trial.name, trial.run(p), trial.run(&generic), trial.tol); err != nil {
			return err
		}
	}
	return nil
}

// trials are the parts of the self-test: what a table computes from fixed inputs, and how far two tables may be apart.
var trials = []struct {
	name string
	tol  float64
	run  func(p *prims) []float32
}{
	{"gemm", 1e-5, func(p *prims) []float32 {
		const m, k = 19, 13
		a, b, c := drawn(m*k, 1), drawn(k*Width, 2), make([]float32, 2*m*Width)
		p.gemm(c, Width, a, k, 1, b, m, k, false)
		p.gemm(c[m*Width:], Width, a, 1, m, b, m, k, false)
		p.gemm(c[m*Width:], Width, a, 1, m, b, m-2, k-1, true)
		return c
	}},
	{"widen", 0, func(p *prims) []float32 {
		const n = 37
		dst, src := make([]float32, 2*n), make([]uint16, n)
		for i := range src {
			src[i] = uint16(i*991 + 0x3000)
		}
		p.widenBF16(dst[:n], src)
		p.widenF16(dst[n:], src)
		return dst
	}},
	{"elementwise", 1e-5, func(p *prims) []float32 {
		const n = 43
		x, y, w, dst := drawn(n, 3), drawn(n, 4), drawn(n, 5), make([]float32, 4*n)
		p.silu(dst[:n], x, y)
		p.geluTanh(dst[n:2*n], x, y)
		p.scaleNorm(dst[2*n:3*n], x, w, 0.75, 1)
		copy(dst[3*n:], x)
		p.add(dst[3*n:], y)
		p.rope(dst[3*n:], y[:n/2], w[:n/2])
		return dst
	}},
	{"reductions", 1e-5, func(p *prims) []float32 {
		x := drawn(77, 6)
		return []float32{p.sumSquares(x), p.max(x), float32(p.expSum(x, 1))}
	}},
	{"attention", 1e-5, func(p *prims) []float32 {
		const n, hd, key0 = 7, 13, 5
		out := make([]float32, 0, 1024)
		var lo, hi [Width]int32
		var off [Width]int
		var mx, sum, corr [Width]float32
		for l := range Width {
			lo[l], hi[l] = int32(l%3+key0), int32(key0+l%(n+2))
			mx[l], sum[l] = float32(l%5)-2, 1
			off[l] = (l * 7 % Width) * hd
		}
		s, v, q := drawn(n*Width, 7), drawn(n*hd, 8), drawn(hd*Width, 9)
		p.softmaxBlock(s, n, 1.5, key0, &lo, &hi, &mx, &sum, &corr)
		o, back := make([]float32, hd*Width), make([]float32, hd*Width)
		p.gatherLanes(o, q, &off, hd)
		p.scaleLanes(o, hd, &corr)
		p.accumMasked(o, hd, v, hd, s, n, key0, &lo, &hi)
		p.scatterLanes(back, &off, Width-3, o, &sum, hd)
		return append(append(append(append(append(out, s...), mx[:]...), sum[:]...), o...), back...)
	}},
	{"gradients", 1e-5, func(p *prims) []float32 {
		const n = 43
		x, y, w, z, dst := drawn(n, 11), drawn(n, 12), drawn(n, 13), drawn(n, 14), make([]float32, 7*n)
		part := func(i int) []float32 { return dst[i*n : (i+1)*n] }
		p.siluGrad(part(0), part(1), part(2), x, y, w)
		p.geluTanhGrad(part(3), part(4), part(5), x, y, w)
		p.normGrad(part(6), x, y, w, 0.75, 1, 0.5)
		p.mulAdd(x, y, w, 0.75)
		p.expScale(y, 1, 0.5)
		p.scale(z, 0.75)
		return append(append(append(append(dst, x...), y...), z...), p.dot(x, w), p.normDot(x, z, w, 1))
	}},
	{"gradients of attention", 1e-5, func(p *prims) []float32 {
		const n, first = 7, 5
		var lo, hi [Width]int32
		for l := range Width {
			lo[l], hi[l] = int32(l%3+first), int32(first+l%(n+2))
		}
		mx, inv, d := (*[Width]float32)(drawn(Width, 15)), (*[Width]float32)(drawn(Width, 16)), (*[Width]float32)(drawn(Width, 17))
		s, dp := drawn(2*n*Width, 18), drawn(2*n*Width, 19)
		p.softmaxGradLanes(s[:n*Width], dp[:n*Width], n, 1.5, first, &lo, &hi, mx, inv, d)
		p.softmaxGradRows(s[n*Width:], dp[n*Width:], n, 1.5, first, &lo, &hi, mx[:], inv[:], 3, d[:], 2)
		return append(s, dp...)
	}},
	{"packing", 0, func(p *prims) []float32 {
		const rows, k = 29, 11
		src, dst := drawn(rows*k, 10), make([]float32, k*Width, 2*k*Width)
		src16, dst16 := make([]uint16, rows*k), make([]uint16, k*Width)
		for i, x := range src {
			src16[i] = uint16(math.Float32bits(x) >> 16)
		}
		if p.packPanel32(dst, src, rows, k) || p.packPanel16(dst16, src16, rows, k, 0x7f80) {
			dst[0]++ // there is nothing to be found
		}
		for _, x := range dst16 {
			dst = append(dst, float32(x))
		}
		return dst
	}},
}

// drawn are n values in [-2, 2) that depend on seed alone.
func drawn(n int, seed uint32) []float32 {
	x := make([]float32, n)
	draw(x, seed)
	return x
}

// draw fills x with values in [-2, 2) that depend on seed alone.
func draw(x []float32, seed uint32) {
	for i := range x {
		seed = seed*1664525 + 1013904223
		x[i] = float32(int32(seed)>>8) / (1 << 22)
	}
}

// differ says where got and want are further apart than tol, relative to the larger of 1 and want.
func differ(what string, got, want []float32, tol float64) error {
	for i := range want {
		g, w := float64(got[i]), float64(want[i])
		if g == w || g != g && w != w {
			continue
		}
		if d := math.Abs(g - w); !(d <= tol*max(1, math.Abs(w))) {
			return fmt.Errorf("%s: element %d is %v instead of %v", what, i, g, w)
		}
	}
	return nil
}
