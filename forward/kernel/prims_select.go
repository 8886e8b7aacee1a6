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
		if d := math.Abs(g - w); !(d <= tol*max(1, math.Abs(w))) {
			return fmt.Errorf("%s: element %d is %v instead of %v", what, i, g, w)
		}
	}
	return nil
}

// selfTest compares p with the generic table on small inputs of odd sizes. It takes well under a millisecond: it is there to
// catch a processor or an emulator that does not do what it says, not to replace the tests.
func selfTest(p *prims) error {
	if p == &generic {
		return nil
	}
	tests := []func(p *prims) (what string, out []float32, tol float64){
		func(p *prims) (string, []float32, float64) {
			const m, k = 19, 13
			var a [m * k]float32
			var b [k * Width]float32
			out := make([]float32, 2*m*Width)
			draw(a[:], 1)
			draw(b[:], 2)
			p.gemm(out, Width, a[:], k, 1, b[:], m, k, false)
			p.gemm(out[m*Width:], Width, a[:], 1, m, b[:], m, k, false)
			return "gemm", out, 1e-5
		},
		func(p *prims) (string, []float32, float64) {
			out, src := make([]float32, 2*37), make([]uint16, 37)
			for i := range src {
				src[i] = uint16(i*991 + 0x3000)
			}
			p.widenBF16(out[:37], src)
			p.widenF16(out[37:], src)
			return "widen", out, 0
		},
	}
	for _, t := range tests {
		_, want, _ := t(&generic)
		what, got, tol := t(p)
		if err := differ(what, got, want, tol); err != nil {
			return err
		}
	}
	return nil
}
