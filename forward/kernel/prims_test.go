package kernel

import (
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var (
	nan32 = float32(math.NaN())
	inf32 = float32(math.Inf(1))
)

// everyTable runs f as a subtest for each table that this machine has.
func everyTable(t *testing.T, f func(t *testing.T, p *prims)) {
	for _, p := range available() {
		t.Run(p.name, func(t *testing.T) { f(t, p) })
	}
}

func TestTablesThatRan(t *testing.T) {
	have := map[string]bool{}
	for _, p := range available() {
		have[p.name] = true
		t.Logf("ran: %s", p.name)
	}
	for _, n := range vectorisedNames {
		if !have[n] {
			t.Logf("SKIPPED, not supported by this machine: %s", n)
		}
	}
}

// sizes are lengths around all the multiples that matter.
func sizes() []int {
	var s []int
	for n := range 71 {
		s = append(s, n)
	}
	return append(s, 95, 96, 97, 127, 128, 129, 159, 255, 256, 257, 1023)
}

var specials = []float32{0, float32(math.Copysign(0, -1)), nan32, inf32, -inf32, 1e-45, -1e-40, math.SmallestNonzeroFloat32, 1.1754944e-38,
	math.MaxFloat32, -math.MaxFloat32, -87.33654, -87.33655, -87.4, -104, -88, 88.72283, 88.72284, 88.8, 89, 1e20, -1e20, 1, -1}

// values are n normal variates times scale, some replaced by special values if odd is set.
func values(r *rand.Rand, n int, scale float64, odd bool) []float32 {
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(r.NormFloat64() * scale)
		if odd && r.IntN(8) == 0 {
			x[i] = specials[r.IntN(len(specials))]
		}
	}
	return x
}

func sameBits(a, b float32) bool {
	return math.Float32bits(a) == math.Float32bits(b) || a != a && b != b
}

// wantBits compares bits; all NaN are alike.
func wantBits(t *testing.T, what string, got, want []float32) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%s: %d values instead of %d", what, len(got), len(want))
	}
	for i := range want {
		if !sameBits(got[i], want[i]) {
			t.Fatalf("%s: element %d of %d is %v (%#x) instead of %v (%#x)", what, i, len(want), got[i], math.Float32bits(got[i]), want[i], math.Float32bits(want[i]))
		}
	}
}

// wantNear compares within rel of the wanted value plus abs; NaN and infinities must agree.
func wantNear(t *testing.T, what string, got, want []float32, rel, abs float64) {
	t.Helper()
	for i := range want {
		g, w := float64(got[i]), float64(want[i])
		if g == w || g != g && w != w {
			continue
		}
		if d := math.Abs(g - w); !(d <= rel*math.Abs(w)+abs) {
			t.Fatalf("%s: element %d of %d is %v instead of %v", what, i, len(want), g, w)
		}
	}
}

// agree checks that every vectorised table gives the same bits.
func agree(t *testing.T, what string, run func(p *prims) []float32) {
	t.Helper()
	tables := vectorised()
	for i := 1; i < len(tables); i++ {
		wantBits(t, fmt.Sprintf("%s: %s against %s", what, tables[i].name, tables[0].name), run(tables[i]), run(tables[0]))
	}
}

// fma32 is x*y + z rounded once. The product is exact in float64; the sum is rounded to odd there, so that rounding it again does
// no harm (Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums", 2008).
func fma32(x, y, z float32) float32 {
	a, b := float64(x)*float64(y), float64(z)
	s := a + b
	t := s - a
	e := (a - (s - t)) + (b - t)
	if e != 0 && !math.IsInf(s, 0) && math.Float64bits(s)&1 == 0 {
		s = math.Nextafter(s, math.Inf(int(math.Copysign(1, e))))
	}
	return float32(s)
}

func TestGemmIsAccurateAndRowsDoNotDependOnThePlan(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	type c struct {
		m, k, ldc, ars, acs int
	}
	var cases []c
	for m := 1; m <= 40; m++ {
		for _, k := range []int{1, 2, 3, 4, 5, 7, 8, 17, 64} {
			cases = append(cases, c{m, k, Width + r.IntN(5), k + r.IntN(7), 1}, c{m, k, Width, 1, m + r.IntN(4)})
		}
	}
	cases = append(cases, c{13, 512, 33, 592, 1}, c{25, 300, 32, 3, 80}, c{3, 7, 40, 0, 1}, c{5, 9, 32, 2, 0})
	everyTable(t, func(t *testing.T, p *prims) {
		for _, s := range cases {
			for _, odd := range []bool{false, true} {
				what := fmt.Sprintf("%+v odd %v", s, odd)
				f := &fence{tb: t}
				a := fenced(f, values(r, (s.m-1)*s.ars+(s.k-1)*s.acs+1, 1, odd), true)
				b := fenced(f, values(r, s.k*Width, 1, odd), true)
				old := values(r, (s.m-1)*s.ldc+Width, 1, false)
				out := fenced(f, old, true)
				p.gemm(out, s.ldc, a, s.ars, s.acs, b, s.m, s.k, true)
				for i := range s.m {
					row := out[i*s.ldc:][:Width]
					if i < s.m-1 { // between rows nothing changes
						wantBits(t, what+": gap", out[i*s.ldc+Width:(i+1)*s.ldc], old[i*s.ldc+Width:(i+1)*s.ldc])
					}
					if !odd {
						for j := range row {
							x := old[i*s.ldc+j]
							sum, size, chain := float64(x), math.Abs(float64(x)), x
							for k := range s.k {
								x, y := a[i*s.ars+k*s.acs], b[k*Width+j]
								sum += float64(x) * float64(y)
								size += math.Abs(float64(x) * float64(y))
								chain = fma32(x, y, chain)
							}
							wantNear(t, what, row[j:j+1], []float32{float32(sum)}, 0, (1+math.Sqrt(float64(s.k)))*1e-7*size)
							if p != &generic {
								wantBits(t, what+": one chain of fused multiply-adds", row[j:j+1], []float32{chain})
							}
						}
					}
					// Alone, from its own start, with k cut in two: the same bits.
					alone := slices.Clone(old[i*s.ldc:][:Width])
					cut := r.IntN(s.k)
					if cut > 0 {
						p.gemm(alone, Width, a[i*s.ars:], s.ars, s.acs, b, 1, cut, true)
					}
					p.gemm(alone, Width, a[i*s.ars+cut*s.acs:], 1, s.acs, b[cut*Width:], 1, s.k-cut, true)
					wantBits(t, what+": alone", alone, row)
				}
				// Without acc it is as if c had held zeros.
				zeros := make([]float32, len(out))
				p.gemm(zeros, s.ldc, a, s.ars, s.acs, b, s.m, s.k, true)
				p.gemm(out, s.ldc, a, s.ars, s.acs, b, s.m, s.k, false)
				for i := range s.m {
					wantBits(t, what+": from 0", out[i*s.ldc:][:Width], zeros[i*s.ldc:][:Width])
				}
				f.close()
			}
		}
	})
	for _, s := range cases {
		a, b := values(r, (s.m-1)*s.ars+(s.k-1)*s.acs+1, 1, true), values(r, s.k*Width, 1, true)
		agree(t, fmt.Sprintf("%+v", s), func(p *prims) []float32 {
			out := make([]float32, s.m*s.ldc)
			p.gemm(out, s.ldc, a, s.ars, s.acs, b, s.m, s.k, false)
			return out
		})
	}
}

func TestGemmRefusesWhatLeavesItsSlices(t *testing.T) {
	everyTable(t, func(t *testing.T, p *prims) {
		a, b, c := make([]float32, 24), make([]float32, 4*Width), make([]float32, 6*Width)
		for name, f := range map[string]func(){
			"a": func() { p.gemm(c, Width, a[:23], 4, 1, b, 6, 4, false) },
			"b": func() { p.gemm(c, Width, a, 4, 1, b[:4*Width-1], 6, 4, false) },
			"c": func() { p.gemm(c[:6*Width-1], Width, a, 4, 1, b, 6, 4, false) },
		} {
			func() {
				defer func() {
					if recover() == nil {
						t.Errorf("%s too short: no panic", name)
					}
				}()
				f()
			}()
		}
	})
}

func TestWidenIsExactForEveryValue(t *testing.T) {
	all := make([]uint16, 1<<16)
	for i := range all {
		all[i] = uint16(i)
	}
	everyTable(t, func(t *testing.T, p *prims) {
		got, want := make([]float32, len(all)), make([]float32, len(all))
		p.widenBF16(got, all)
		widenBF16Generic(want, all)
		wantBits(t, "bfloat16", got, want)
		p.widenF16(got, all)
		widenF16Generic(want, all)
		wantBits(t, "float16", got, want)
		for _, n := range sizes() {
			for _, end := range []bool{false, true} {
				f := &fence{tb: t}
				src, dst := fenced(f, all[100:100+n], end), fenced(f, make([]float32, n), end)
				p.widenBF16(dst, src)
				widenBF16Generic(want[:n], src)
				wantBits(t, "bfloat16", dst, want[:n])
				p.widenF16(dst, src)
				widenF16Generic(want[:n], src)
				wantBits(t, "float16", dst, want[:n])
				f.close()
			}
		}
	})
}

func TestWidenF16AgreesWithItsDefinition(t *testing.T) {
	for i := range 1 << 16 {
		sign, exp, frac := 1.0, i>>10&0x1f, float64(i&0x3ff)
		if i>>15 == 1 {
			sign = -1
		}
		var want float64
		switch exp {
		case 0:
			want = sign * math.Ldexp(frac, -24)
		case 31:
			want = math.Inf(int(sign))
			if frac != 0 {
				want = math.NaN()
			}
		default:
			want = sign * math.Ldexp(1024+frac, exp-25)
		}
		if got := widenF16(uint16(i)); !sameBits(got, float32(want)) {
			t.Fatalf("%#x is %v instead of %v", i, got, want)
		}
	}
}

// elementwiseOps are the functions whose result at i depends on the inputs at i, in one form: dst starts as x.
var elementwiseOps = []struct {
	name     string
	inout    bool    // dst counts, so x may be dst but y may not
	rel, abs float64 // error against generic; abs in units of |x*y|
	run      func(p *prims, dst, x, y, z []float32)
}{
	{"add", true, 0, 0, func(p *prims, dst, _, y, _ []float32) { p.add(dst, y) }},
	{"scaleNorm", false, 0, 0, func(p *prims, dst, x, y, _ []float32) { p.scaleNorm(dst, x, y, 0.37, 1) }},
	{"silu", false, 4e-7, 0, func(p *prims, dst, x, y, _ []float32) { p.silu(dst, x, y) }},
	{"geluTanh", false, 5e-7, 1e-7, func(p *prims, dst, x, y, _ []float32) { p.geluTanh(dst, x, y) }},
	{"scale", true, 0, 0, func(p *prims, dst, _, _, _ []float32) { p.scale(dst, 0.37) }},
	{"mulAdd", true, 0, 0, func(p *prims, dst, _, y, z []float32) { p.mulAdd(dst, y, z, 0.37) }},
	{"expScale", true, 4e-7, 0, func(p *prims, dst, _, _, _ []float32) { p.expScale(dst, 0.37, -1.9) }},
	{"normGrad", false, 0, 0, func(p *prims, dst, x, y, z []float32) { p.normGrad(dst, x, y, z, 0.37, 1, 0.59) }},
}

func TestElementwiseTreatsEachElementAlone(t *testing.T) {
	r := rand.New(rand.NewPCG(2, 2))
	everyTable(t, func(t *testing.T, p *prims) {
		for _, op := range elementwiseOps {
			for _, n := range sizes() {
				for _, end := range []bool{false, true} {
					what := fmt.Sprintf("%s of %d", op.name, n)
					f := &fence{tb: t}
					x, y, z := fenced(f, values(r, n, 3, true), end), fenced(f, values(r, n, 3, true), end), fenced(f, values(r, n, 3, true), end)
					dst := fenced(f, x, end)
					op.run(p, dst, x, y, z)
					want := slices.Clone(x)
					op.run(&generic, want, x, y, z)
					if op.rel == 0 {
						wantBits(t, what, dst, want)
					}
					for i := range dst {
						one := []float32{x[i]}
						op.run(p, one, x[i:i+1], y[i:i+1], z[i:i+1])
						wantBits(t, what+": alone", one, dst[i:i+1])
						if op.name == "geluTanh" && math.IsInf(float64(y[i]), 0) {
							continue // times a gate that is tiny here and 0 there
						}
						abs := 1e-37
						if op.abs > 0 {
							abs += op.abs * math.Abs(float64(x[i])*float64(y[i]))
						}
						wantNear(t, what, dst[i:i+1], want[i:i+1], op.rel, abs)
					}
					// In place.
					inX, inY := slices.Clone(x), slices.Clone(y)
					op.run(p, inX, inX, y, z)
					wantBits(t, what+": dst is x", inX, dst)
					if !op.inout {
						op.run(p, inY, x, inY, z)
						wantBits(t, what+": dst is y", inY, dst)
					}
					f.close()
				}
			}
		}
	})
	x, y, z := values(r, 4099, 4, true), values(r, 4099, 4, true), values(r, 4099, 4, true)
	for _, op := range elementwiseOps {
		agree(t, op.name, func(p *prims) []float32 {
			dst := slices.Clone(x)
			op.run(p, dst, x, y, z)
			return dst
		})
	}
}

func TestGatesAreAccurate(t *testing.T) {
	everyTable(t, func(t *testing.T, p *prims) {
		var g, one []float32
		for x := -100.0; x < 100; x += 0.00731 {
			g, one = append(g, float32(x), float32(x*1e-4)), append(one, 1, 1)
		}
		dst, worst := make([]float32, len(g)), 0.0
		p.silu(dst, g, one)
		for i, x := range g {
			want := float64(x) / (1 + math.Exp(-float64(x)))
			if math.Abs(want) > 1e-36 {
				worst = max(worst, math.Abs(float64(dst[i])-want)/math.Abs(want))
			}
		}
		t.Logf("silu: relative error %.2g", worst)
		if worst > 3e-7 {
			t.Errorf("silu: relative error %v", worst)
		}
		p.geluTanh(dst, g, one)
		worst, tail := 0.0, 0.0
		for i, x := range g {
			y := 2 * math.Sqrt(2/math.Pi) * (float64(x) + 0.044715*float64(x)*float64(x)*float64(x))
			want := float64(x) / (1 + math.Exp(-y))
			err := math.Abs(float64(dst[i]) - want)
			if x > -1 {
				worst = max(worst, err/math.Abs(want))
			}
			tail = max(tail, err/math.Abs(float64(x)))
		}
		t.Logf("geluTanh: relative error %.2g above -1, error %.2g times |x| anywhere", worst, tail)
		if worst > 6e-7 || tail > 2e-7 {
			t.Errorf("geluTanh: relative error %v, error %v |x|", worst, tail)
		}
	})
}

func TestRopeEqualsGeneric(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 3))
	everyTable(t, func(t *testing.T, p *prims) {
		for _, h := range sizes() {
			for _, end := range []bool{false, true} {
				f := &fence{tb: t}
				x := values(r, 2*h+r.IntN(5), 1, true)
				cos, sin, got := fenced(f, values(r, h, 1, false), end), fenced(f, values(r, h, 1, false), end), fenced(f, x, end)
				p.rope(got, cos, sin)
				ropeGeneric(x, cos, sin)
				wantBits(t, fmt.Sprintf("%d pairs", h), got, x)
				f.close()
			}
		}
	})
}

func TestReductionsEqualGeneric(t *testing.T) {
	r := rand.New(rand.NewPCG(4, 4))
	everyTable(t, func(t *testing.T, p *prims) {
		for _, n := range sizes() {
			for _, odd := range []bool{false, true} {
				for _, end := range []bool{false, true} {
					what := fmt.Sprintf("%d values odd %v", n, odd)
					f := &fence{tb: t}
					x := fenced(f, values(r, n, 2, odd), end)
					wantBits(t, "sumSquares of "+what, []float32{p.sumSquares(x)}, []float32{sumSquaresGeneric(x)})
					y, w := fenced(f, values(r, n, 2, odd), end), fenced(f, values(r, n, 2, odd), end)
					wantBits(t, "dot of "+what, []float32{p.dot(x, y)}, []float32{dotGeneric(x, y)})
					wantBits(t, "normDot of "+what, []float32{p.normDot(x, y, w, 1)}, []float32{normDotGeneric(x, y, w, 1)})
					if n > 0 {
						if got, want := p.max(x), maxGeneric(x); got != want && !(got != got && want != want) {
							t.Fatalf("max of %s: %v instead of %v", what, got, want)
						}
						low := slices.Repeat([]float32{-inf32}, n)
						low[r.IntN(n)] = -3
						if got := p.max(low); got != -3 {
							t.Fatalf("max of %s: %v instead of -3", what, got)
						}
					}
					m := float32(r.NormFloat64())
					got, want := p.expSum(x, m), expSumGeneric(x, m)
					if got != want && !(got != got && want != want) && !(math.Abs(got-want) <= 1e-6*want) {
						t.Fatalf("expSum of %s: %v instead of %v", what, got, want)
					}
					f.close()
				}
			}
		}
	})
	for _, n := range sizes() {
		x, y, w := values(r, n, 2, n%2 == 0), values(r, n, 2, n%2 == 0), values(r, n, 2, n%2 == 0)
		agree(t, fmt.Sprintf("reductions of %d", n), func(p *prims) []float32 {
			e := math.Float64bits(p.expSum(x, 0.5))
			out := []float32{p.sumSquares(x), p.dot(x, y), p.normDot(x, y, w, 1), math.Float32frombits(uint32(e>>32) & 0x7fffffff), math.Float32frombits(uint32(e) & 0xff)}
			if n > 0 {
				out = append(out, p.max(x))
			}
			return out
		})
	}
}

// expOf is a table's exponential, seen through the sum of one value.
func expOf(p *prims, x float32) float32 { return float32(p.expSum([]float32{x}, 0)) }

func TestExpIsAccurate(t *testing.T) {
	everyTable(t, func(t *testing.T, p *prims) {
		worst, at := 0.0, float32(0)
		buf := make([]float32, 1)
		for x := float32(-87.33654); x <= 88.72283; x += 0.00017 {
			buf[0] = x
			want := math.Exp(float64(x))
			if e := math.Abs(p.expSum(buf, 0)-want) / want; !(e <= worst) {
				worst, at = e, x
			}
		}
		t.Logf("relative error %.3g at %v", worst, at)
		if !(worst <= 2e-7) {
			t.Errorf("relative error %v at %v", worst, at)
		}
		for _, c := range []struct{ x, want float32 }{
			{nan32, nan32}, {-nan32, nan32}, {math.Float32frombits(0x7f800001), nan32}, {math.Float32frombits(0xffc00081), nan32},
			{inf32, inf32}, {-inf32, 0}, {0, 1}, {float32(math.Copysign(0, -1)), 1}, {1e-45, 1}, {-1e-40, 1},
			{-87.33655, 0}, {-88, 0}, {-103, 0}, {-104, 0}, {-1e10, 0}, {-math.MaxFloat32, 0}, {88.72284, inf32}, {89, inf32}, {128, inf32}, {1e10, inf32}, {math.MaxFloat32, inf32},
		} {
			if got := expOf(p, c.x); !sameBits(got, c.want) {
				t.Errorf("exp(%v) is %v instead of %v", c.x, got, c.want)
			}
		}
		for _, x := range []float32{-87.33654, 88.72283} {
			wantNear(t, "exp at the ends", []float32{expOf(p, x)}, []float32{float32(math.Exp(float64(x)))}, 2e-7, 0)
		}
	})
}

func TestExpHasTheSameBitsInEveryExtension(t *testing.T) {
	agree(t, "exp", func(p *prims) []float32 {
		var out []float32
		buf := make([]float32, 1)
		for bits := uint64(0); bits < 1<<32; bits += 4093 {
			buf[0] = math.Float32frombits(uint32(bits))
			out = append(out, float32(p.expSum(buf, 0)))
		}
		return out
	})
}

// block is the state of a softmax over a block of keys.
type block struct {
	s            []float32
	n            int
	key0         int32
	lo, hi       [Width]int32
	mx, sum, cor [Width]float32
}

func newBlock(r *rand.Rand, n int, odd bool) block {
	b := block{s: values(r, n*Width, 3, odd), n: n, key0: int32(r.IntN(100))}
	causal := r.IntN(3)
	for l := range Width {
		b.mx[l], b.sum[l] = float32(r.NormFloat64()), r.Float32()*5
		if r.IntN(3) == 0 {
			b.mx[l], b.sum[l] = -inf32, 0
		}
		switch causal {
		case 0: // all keys
			b.lo[l], b.hi[l] = 0, 1000
		case 1: // up to its own
			b.lo[l], b.hi[l] = 0, b.key0+int32(l)
		case 2: // anything, also nothing
			b.lo[l] = b.key0 + int32(r.IntN(n+4)-2)
			b.hi[l] = b.key0 + int32(r.IntN(n+4)-2)
		}
	}
	return b
}

func (b block) run(p *prims) block {
	b.s = slices.Clone(b.s)
	p.softmaxBlock(b.s, b.n, 0.7, b.key0, &b.lo, &b.hi, &b.mx, &b.sum, &b.cor)
	return b
}

func (b block) flat() []float32 {
	return slices.Concat(b.s, b.mx[:], b.sum[:], b.cor[:])
}

func TestSoftmaxBlock(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 5))
	everyTable(t, func(t *testing.T, p *prims) {
		for n := range 65 {
			for _, odd := range []bool{false, true} {
				b := newBlock(r, n, odd)
				what := fmt.Sprintf("%d keys odd %v", n, odd)
				want := b.run(&generic)
				f := &fence{tb: t}
				got := b
				got.s = fenced(f, b.s, true)
				p.softmaxBlock(got.s, n, 0.7, b.key0, &got.lo, &got.hi, &got.mx, &got.sum, &got.cor)
				got.s = slices.Clone(got.s)
				f.close()
				wantBits(t, what+": max", got.mx[:], want.mx[:])
				wantNear(t, what, got.flat(), want.flat(), 2e-6, 1e-37)
				for l := range Width {
					if seen := max(0, min(int(b.hi[l]-b.key0), n)-max(0, int(b.lo[l]-b.key0))); seen == 0 {
						if got.cor[l] != 1 || !sameBits(got.mx[l], b.mx[l]) || !sameBits(got.sum[l], b.sum[l]) {
							t.Fatalf("%s: lane %d saw no key and changed: max %v sum %v corr %v", what, l, got.mx[l], got.sum[l], got.cor[l])
						}
					}
				}

				// What lies under the mask does not matter, nor does the lane.
				other := b
				other.s = slices.Clone(b.s)
				turn := 1 + r.IntN(Width-1)
				for l := range Width {
					to := (l + turn) % Width
					other.lo[to], other.hi[to], other.mx[to], other.sum[to] = b.lo[l], b.hi[l], b.mx[l], b.sum[l]
					for j := range n {
						v := b.s[j*Width+l]
						if k := b.key0 + int32(j); k < b.lo[l] || k >= b.hi[l] {
							v = nan32
						}
						other.s[j*Width+to] = v
					}
				}
				other = other.run(p)
				for l := range Width {
					to := (l + turn) % Width
					wantBits(t, what+": turned", []float32{other.mx[to], other.sum[to], other.cor[to]}, []float32{got.mx[l], got.sum[l], got.cor[l]})
					for j := range n {
						wantBits(t, what+": turned weights", other.s[j*Width+to:][:1], got.s[j*Width+l:][:1])
					}
				}
			}
		}
	})
	for n := range 65 {
		b := newBlock(r, n, n%2 == 0)
		agree(t, fmt.Sprintf("%d keys", n), func(p *prims) []float32 { b := b.run(p); return b.flat() })
	}
}

func TestAccumMaskedLeavesUnseenLanesAlone(t *testing.T) {
	r := rand.New(rand.NewPCG(6, 6))
	type c struct {
		b      block
		hd, vs int
		o, v   []float32
	}
	draw := func(i int) c {
		n := 1 + i%64
		b := newBlock(r, n, false).run(&generic)
		hd := 1 + r.IntN(40)
		if i%9 == 0 {
			hd = 128
		}
		vs := hd + r.IntN(4)
		return c{b, hd, vs, values(r, hd*Width, 1, false), values(r, (n-1)*vs+hd, 1, i%4 == 1)}
	}
	everyTable(t, func(t *testing.T, p *prims) {
		for i := range 200 {
			x := draw(i)
			what := fmt.Sprintf("%d keys, head %d", x.b.n, x.hd)
			for j := range x.o {
				if r.IntN(5) == 0 {
					x.o[j] = float32(math.Copysign(0, -1))
				}
			}
			f := &fence{tb: t}
			got, v, w := fenced(f, x.o, true), fenced(f, x.v, true), fenced(f, x.b.s, true)
			p.accumMasked(got, x.hd, v, x.vs, w, x.b.n, x.b.key0, &x.b.lo, &x.b.hi)
			want := slices.Clone(x.o)
			accumMaskedGeneric(want, x.hd, v, x.vs, w, x.b.n, x.b.key0, &x.b.lo, &x.b.hi)
			if i%4 != 1 {
				wantNear(t, what, got, want, 1e-5, 1e-5)
			}
			for l := range Width {
				if max(x.b.lo[l], x.b.key0) < min(x.b.hi[l], x.b.key0+int32(x.b.n)) {
					continue
				}
				for d := range x.hd {
					wantBits(t, what+": unseen lane", got[d*Width+l:][:1], x.o[d*Width+l:][:1])
				}
			}
			if p != &generic && i%4 != 1 {
				for d := range x.hd {
					for l := range Width {
						o := x.o[d*Width+l]
						for j := range x.b.n {
							if k := x.b.key0 + int32(j); k >= x.b.lo[l] && k < x.b.hi[l] {
								o = fma32(v[j*x.vs+d], w[j*Width+l], o)
							}
						}
						want[d*Width+l] = o
					}
				}
				wantBits(t, what+": one chain of fused multiply-adds", got, want)
			}
			// Key by key the bits are the same.
			steps := slices.Clone(x.o)
			for j := range x.b.n {
				p.accumMasked(steps, x.hd, v[j*x.vs:], x.vs, w[j*Width:], 1, x.b.key0+int32(j), &x.b.lo, &x.b.hi)
			}
			wantBits(t, what+": key by key", steps, got)
			f.close()
		}
	})
	for i := range 100 {
		x := draw(i)
		agree(t, fmt.Sprintf("%d keys, head %d", x.b.n, x.hd), func(p *prims) []float32 {
			o := slices.Clone(x.o)
			p.accumMasked(o, x.hd, x.v, x.vs, x.b.s, x.b.n, x.b.key0, &x.b.lo, &x.b.hi)
			return o
		})
	}
}

func TestScaleLanesEqualsGeneric(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 7))
	everyTable(t, func(t *testing.T, p *prims) {
		for n := range 20 {
			var corr [Width]float32
			copy(corr[:], values(r, Width, 1, true))
			x := values(r, n*Width, 1, true)
			f := &fence{tb: t}
			got := fenced(f, x, true)
			p.scaleLanes(got, n, &corr)
			scaleLanesGeneric(x, n, &corr)
			wantBits(t, fmt.Sprintf("%d rows", n), got, x)
			f.close()
		}
	})
}

func TestLanesEqualGeneric(t *testing.T) {
	r := rand.New(rand.NewPCG(8, 8))
	everyTable(t, func(t *testing.T, p *prims) {
		for _, n := range sizes() {
			lanes := r.IntN(Width + 1)
			if n%3 == 0 {
				lanes = Width
			}
			var off [Width]int
			gap := n + r.IntN(9)
			for l, at := range r.Perm(Width) {
				off[l] = at * gap
			}
			src := values(r, (Width-1)*gap+n, 1, true)
			f := &fence{tb: t}
			from, tile := fenced(f, src, true), fenced(f, make([]float32, n*Width), true)
			p.gatherLanes(tile, from, &off, n)
			want := make([]float32, n*Width)
			gatherLanesGeneric(want, src, &off, n)
			wantBits(t, fmt.Sprintf("gather %d", n), tile, want)

			var inv [Width]float32
			copy(inv[:], values(r, Width, 1, true))
			for l := lanes; l < Width; l++ {
				off[l] = 1 << 40
				inv[l] = nan32
			}
			back, wantBack := fenced(f, src, true), slices.Clone(src)
			p.scatterLanes(back, &off, lanes, tile, &inv, n)
			scatterLanesGeneric(wantBack, &off, lanes, want, &inv, n)
			wantBits(t, fmt.Sprintf("scatter %d of %d lanes", n, lanes), back, wantBack)
			f.close()
		}
	})
}

func TestPackPanelEqualsGeneric(t *testing.T) {
	r := rand.New(rand.NewPCG(9, 9))
	everyTable(t, func(t *testing.T, p *prims) {
		for _, k := range sizes() {
			for _, rows := range []int{Width, r.IntN(Width + 1), 1} {
				what := fmt.Sprintf("%d rows of %d", rows, k)
				for _, mask := range []uint16{0x7f80, 0x7c00} {
					src := make([]uint16, rows*k)
					for i := range src {
						if src[i] = uint16(r.Uint32()); src[i]&mask == mask {
							src[i] ^= 0x0400 | mask&0x80
						}
					}
					if len(src) > 0 && r.IntN(2) == 0 {
						src[r.IntN(len(src))] |= mask
					}
					f := &fence{tb: t}
					from, got, want := fenced(f, src, true), fenced(f, make([]uint16, k*Width), true), make([]uint16, k*Width)
					for i := range got {
						got[i], want[i] = 7, 7
					}
					bad, wantBad := p.packPanel16(got, from, rows, k, mask), packPanel16Generic(want, src, rows, k, mask)
					if bad != wantBad || !slices.Equal(got, want) {
						t.Fatalf("16 bits, %s: not as generic (non-finite %v, %v)", what, bad, wantBad)
					}
					f.close()
				}
				src := values(r, rows*k, 1, false)
				if len(src) > 0 && r.IntN(2) == 0 {
					src[r.IntN(len(src))] = specials[r.IntN(len(specials))]
				}
				f := &fence{tb: t}
				from, got, want := fenced(f, src, true), fenced(f, make([]float32, k*Width), true), make([]float32, k*Width)
				for i := range got {
					got[i], want[i] = 7, 7
				}
				bad, wantBad := p.packPanel32(got, from, rows, k), packPanel32Generic(want, src, rows, k)
				if bad != wantBad {
					t.Fatalf("32 bits, %s: non-finite %v", what, bad)
				}
				wantBits(t, what, got, want)
				f.close()
			}
		}
	})
}

func TestChoose(t *testing.T) {
	for _, p := range available() {
		if got, note, err := choose(p.name); err != nil || got != p || note != "" {
			t.Errorf("choose(%q) is %v, %q, %v", p.name, got, note, err)
		}
	}
	tables := available()
	if got, note, err := choose(""); err != nil || note != "" || got != tables[len(tables)-1] {
		t.Errorf("the default is %v, %q, %v instead of the best", got, note, err)
	}
	if _, _, err := choose("neon"); err == nil || !strings.Contains(err.Error(), `"neon"`) || !strings.Contains(err.Error(), "generic") {
		t.Errorf("an unknown name: %v", err)
	}
}

func TestATableThatFailsItsSelfTestIsPassedOver(t *testing.T) {
	broken := generic
	broken.name, broken.silu = "broken", func(dst, _, _ []float32) { clear(dst) }
	got, note, err := best([]*prims{&generic, &broken})
	if err != nil || got != &generic || !strings.Contains(note, `"broken"`) || !strings.Contains(note, "elementwise") {
		t.Errorf("chose %v, %q, %v", got, note, err)
	}
}

// TestAVX2FileKeepsToAVX2: registers 16 to 31 would be encoded with AVX-512, unnoticed on a machine that has it.
func TestAVX2FileKeepsToAVX2(t *testing.T) {
	text, err := os.ReadFile("prims_avx2_amd64.s")
	if err != nil {
		t.Fatal(err)
	}
	if found := regexp.MustCompile(`\b([XY](1[6-9]|2\d|3[01])|Z\d+|K[0-7])\b|Requires:.*AVX512`).Find(text); found != nil {
		t.Errorf("the AVX2 assembly contains %s", found)
	}
}
