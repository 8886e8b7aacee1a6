package kernel

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// gateGrads are the backwards of the gates, with the forward of each.
var gateGrads = []struct {
	name    string
	abs     float64 // error against generic, relative to 1 + |g|
	grad    func(p *prims) func(a, dg, du, g, u, da []float32)
	forward func(p *prims) func(dst, g, u []float32)
}{
	{"silu", 8e-7, func(p *prims) func(a, dg, du, g, u, da []float32) { return p.siluGrad }, func(p *prims) func(dst, g, u []float32) { return p.silu }},
	{"geluTanh", 2e-6, func(p *prims) func(a, dg, du, g, u, da []float32) { return p.geluTanhGrad }, func(p *prims) func(dst, g, u []float32) { return p.geluTanh }},
}

func TestGateGradientsTreatEachElementAlone(t *testing.T) {
	r := rand.New(rand.NewPCG(21, 21))
	everyTable(t, func(t *testing.T, p *prims) {
		for _, gate := range gateGrads {
			run := gate.grad(p)
			for _, n := range sizes() {
				for _, end := range []bool{false, true} {
					what := fmt.Sprintf("%s of %d", gate.name, n)
					f := &fence{tb: t}
					in, out := make([][]float32, 3), make([][]float32, 3)
					want, forward := make([][]float32, 3), make([]float32, n)
					for i := range in {
						in[i], out[i] = fenced(f, values(r, n, 3, true), end), fenced(f, make([]float32, n), end)
						want[i] = make([]float32, n)
					}
					run(out[0], out[1], out[2], in[0], in[1], in[2])
					gate.forward(p)(forward, in[0], in[1])
					wantBits(t, what+": the activation is that of the forward", out[0], forward)
					gate.grad(&generic)(want[0], want[1], want[2], in[0], in[1], in[2])
					for i := range n {
						g, u, d := in[0][i:i+1], in[1][i:i+1], in[2][i:i+1]
						var one [3][1]float32
						run(one[0][:], one[1][:], one[2][:], g, u, d)
						x, factor := math.Abs(float64(g[0])), [3]float64{math.Abs(float64(u[0])), math.Abs(float64(u[0]) * float64(d[0])), math.Abs(float64(d[0]))}
						for j := range one {
							wantBits(t, what+": alone", one[j][:], out[j][i:i+1])
							if gate.name == "geluTanh" && factor[j] > math.MaxFloat32 {
								continue // infinity times a gate that is tiny here and 0 there
							}
							wantNear(t, what, out[j][i:i+1], want[j][i:i+1], 0, (gate.abs*(1+x)+1e-37)*factor[j]+1e-44)
						}
					}
					// In place, in every order.
					for _, at := range [][3]int{{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}} {
						same := [3][]float32{slices.Clone(in[0]), slices.Clone(in[1]), slices.Clone(in[2])}
						run(same[at[0]], same[at[1]], same[at[2]], same[0], same[1], same[2])
						for j := range at {
							wantBits(t, fmt.Sprintf("%s: in place %v", what, at), same[at[j]], out[j])
						}
					}
					f.close()
				}
			}
		}
	})
	g, u, d := values(r, 4099, 4, true), values(r, 4099, 4, true), values(r, 4099, 4, true)
	for _, gate := range gateGrads {
		agree(t, gate.name, func(p *prims) []float32 {
			out := make([]float32, 3*len(g))
			gate.grad(p)(out[:len(g)], out[len(g):2*len(g)], out[2*len(g):], g, u, d)
			return out
		})
	}
}

// slope is the derivative of f at x, by differences of fourth order.
func slope(f func(x float64) float64, x float64) float64 {
	const h = 1e-3
	return (8*(f(x+h)-f(x-h)) - (f(x+2*h) - f(x-2*h))) / (12 * h)
}

func TestGateGradientsAreDerivatives(t *testing.T) {
	acts := map[string]func(x float64) float64{
		"silu":     func(x float64) float64 { return x / (1 + math.Exp(-x)) },
		"geluTanh": func(x float64) float64 { return 0.5 * x * (1 + math.Tanh(math.Sqrt(2/math.Pi)*(x+0.044715*x*x*x))) },
	}
	var g, one []float32
	for x := -100.0; x < 100; x += 0.0173 {
		g, one = append(g, float32(x), float32(x*0.1)), append(one, 1, 1)
	}
	everyTable(t, func(t *testing.T, p *prims) {
		for _, gate := range gateGrads {
			a, dg, du := make([]float32, len(g)), make([]float32, len(g)), make([]float32, len(g))
			gate.grad(p)(a, dg, du, g, one, one)
			worst := 0.0
			for i, x := range g {
				worst = max(worst, math.Abs(float64(dg[i])-slope(acts[gate.name], float64(x))))
				if du[i] != a[i] {
					t.Fatalf("%s(%v) is %v as activation and %v as derivative by up", gate.name, x, a[i], du[i])
				}
			}
			t.Logf("%s: error %.2g", gate.name, worst)
			if !(worst <= 2.5e-7) {
				t.Errorf("%s: error %v", gate.name, worst)
			}
			// Far from 0 it is the step, exactly; an infinite or odd gate is for NaN.
			for _, c := range []struct{ x, want float32 }{
				{200, 1}, {1e19, 1}, {math.MaxFloat32, 1}, {-200, 0}, {-1e19, 0}, {-math.MaxFloat32, 0}, {0, 0.5}, {inf32, nan32}, {-inf32, nan32}, {nan32, nan32},
			} {
				var a, dg, du [1]float32
				gate.grad(p)(a[:], dg[:], du[:], []float32{c.x}, one[:1], one[:1])
				if dg[0] != c.want && !(dg[0] != dg[0] && c.want != c.want) {
					t.Errorf("%s: the derivative at %v is %v instead of %v", gate.name, c.x, dg[0], c.want)
				}
			}
		}
	})
}

func TestNormGradIsTheDerivative(t *testing.T) {
	const n, eps, offset = 45, 1e-6, 1
	r := rand.New(rand.NewPCG(22, 22))
	x, w, dy := values(r, n, 2, false), values(r, n, 1, false), values(r, n, 1, false)
	// loss is the sum of dy times the norm, with x[at] moved to v.
	loss := func(at int, v float64) float64 {
		in := func(i int) float64 {
			if i == at {
				return v
			}
			return float64(x[i])
		}
		var squares, sum float64
		for i := range x {
			squares += in(i) * in(i)
			sum += float64(dy[i]) * in(i) * (offset + float64(w[i]))
		}
		return sum / math.Sqrt(squares/n+eps)
	}
	everyTable(t, func(t *testing.T, p *prims) {
		scale := float32(1 / math.Sqrt(float64(p.sumSquares(x))/n+eps))
		got := make([]float32, n)
		p.normGrad(got, dy, x, w, scale, offset, scale*scale*scale/n*p.normDot(dy, x, w, offset))
		for i := range got {
			want := float32(slope(func(v float64) float64 { return loss(i, v) }, float64(x[i])))
			wantNear(t, fmt.Sprintf("x[%d]", i), got[i:i+1], []float32{want}, 0, 1e-6)
		}
	})
}

// softmaxState is what the backward of a softmax takes, with statistics per lane and per row.
type softmaxState struct {
	block
	dp              []float32
	inv, d          [Width]float32
	rmx, rinv, rd   []float32
	stride, dstride int
}

const softmaxScale = 0.7

func newSoftmaxState(r *rand.Rand, n int, odd bool) softmaxState {
	s := softmaxState{block: newBlock(r, n, odd), dp: values(r, n*Width, 3, odd), stride: r.IntN(4), dstride: r.IntN(4)}
	s.rmx, s.rinv, s.rd = values(r, n*4, 3, odd), values(r, n*4, 1, odd), values(r, n*4, 1, odd)
	copy(s.inv[:], values(r, Width, 1, odd))
	copy(s.d[:], values(r, Width, 1, odd))
	return s
}

// run returns the weights and derivatives, by lanes and by rows.
func (s softmaxState) run(p *prims) (lanes, rows [2][]float32) {
	lanes, rows = [2][]float32{slices.Clone(s.s), slices.Clone(s.dp)}, [2][]float32{slices.Clone(s.s), slices.Clone(s.dp)}
	p.softmaxGradLanes(lanes[0], lanes[1], s.n, softmaxScale, s.key0, &s.lo, &s.hi, &s.mx, &s.inv, &s.d)
	p.softmaxGradRows(rows[0], rows[1], s.n, softmaxScale, s.key0, &s.lo, &s.hi, s.rmx, s.rinv, s.stride, s.rd, s.dstride)
	return lanes, rows
}

func (s softmaxState) seen(j, l int) bool {
	at := s.key0 + int32(j)
	return s.lo[l] <= at && at < s.hi[l]
}

func TestSoftmaxGradTreatsEachElementAlone(t *testing.T) {
	r := rand.New(rand.NewPCG(23, 23))
	everyTable(t, func(t *testing.T, p *prims) {
		for n := range 65 {
			for _, odd := range []bool{false, true} {
				s := newSoftmaxState(r, n, odd)
				what := fmt.Sprintf("%d rows odd %v", n, odd)
				wantLanes, wantRows := s.run(&generic)

				f := &fence{tb: t}
				lanes := [2][]float32{fenced(f, s.s, true), fenced(f, s.dp, true)}
				rows := [2][]float32{fenced(f, s.s, true), fenced(f, s.dp, true)}
				stats := func(x []float32, stride int) []float32 {
					return fenced(f, x[:min(len(x), max(0, (n-1)*stride+1))], true)
				}
				rmx, rinv, rd := stats(s.rmx, s.stride), stats(s.rinv, s.stride), stats(s.rd, s.dstride)
				p.softmaxGradLanes(lanes[0], lanes[1], n, softmaxScale, s.key0, &s.lo, &s.hi, &s.mx, &s.inv, &s.d)
				p.softmaxGradRows(rows[0], rows[1], n, softmaxScale, s.key0, &s.lo, &s.hi, rmx, rinv, s.stride, rd, s.dstride)
				for i, name := range []string{"weight", "derivative"} {
					wantNear(t, what+": lanes, "+name, lanes[i], wantLanes[i], 1e-6, 1e-35)
					wantNear(t, what+": rows, "+name, rows[i], wantRows[i], 1e-6, 1e-35)
				}

				for j := range n {
					// What lies under the mask does not matter, nor do the other rows; a row of rows is a row of lanes with equal statistics.
					row := softmaxState{block: s.block, dp: s.dp}
					row.n, row.key0 = 1, s.key0+int32(j)
					row.block.s, row.dp = slices.Clone(s.s[j*Width:(j+1)*Width]), slices.Clone(s.dp[j*Width:(j+1)*Width])
					for l := range Width {
						if !s.seen(j, l) {
							row.block.s[l], row.dp[l] = nan32, inf32
						}
						row.mx[l], row.inv[l], row.d[l] = s.rmx[j*s.stride], s.rinv[j*s.stride], s.rd[j*s.dstride]
					}
					alone := [2][]float32{slices.Clone(row.block.s), slices.Clone(row.dp)}
					p.softmaxGradLanes(alone[0], alone[1], 1, softmaxScale, row.key0, &s.lo, &s.hi, &row.mx, &row.inv, &row.d)
					own := [2][]float32{row.block.s, row.dp}
					p.softmaxGradLanes(own[0], own[1], 1, softmaxScale, row.key0, &s.lo, &s.hi, &s.mx, &s.inv, &s.d)
					for i := range own {
						wantBits(t, what+": a row of rows", rows[i][j*Width:(j+1)*Width], alone[i])
						wantBits(t, what+": a row of lanes", lanes[i][j*Width:(j+1)*Width], own[i])
					}
					for l := range Width {
						for _, v := range []float32{lanes[0][j*Width+l], lanes[1][j*Width+l], rows[0][j*Width+l], rows[1][j*Width+l]} {
							if !s.seen(j, l) && math.Float32bits(v) != 0 {
								t.Fatalf("%s: row %d lane %d is masked and %v", what, j, l, v)
							}
						}
					}
				}
				f.close()
			}
		}
	})
	for n := range 65 {
		s := newSoftmaxState(r, n, n%2 == 0)
		agree(t, fmt.Sprintf("%d rows", n), func(p *prims) []float32 {
			lanes, rows := s.run(p)
			return slices.Concat(lanes[0], lanes[1], rows[0], rows[1])
		})
	}
}

func TestSoftmaxGradIsTheDerivative(t *testing.T) {
	r := rand.New(rand.NewPCG(24, 24))
	s, dp := values(r, Width, 2, false), values(r, Width, 1, false)
	// loss is the sum of dp times the weights, with the score of key at moved to v; weights also returns what they are exponentials over.
	weights := func(at int, v float64) (loss, top, sum float64) {
		for j, x := range s {
			x := float64(x)
			if j == at {
				x = v
			}
			e := math.Exp(softmaxScale * x)
			loss, top, sum = loss+e*float64(dp[j]), max(top, softmaxScale*x), sum+e
		}
		return loss / sum, top, sum * math.Exp(-top)
	}
	loss, top, sum := weights(-1, 0)
	wantP, wantDs := make([]float32, Width), make([]float32, Width)
	for j, x := range s {
		wantP[j] = float32(math.Exp(softmaxScale*float64(x)-top) / sum)
		wantDs[j] = float32(slope(func(v float64) float64 { l, _, _ := weights(j, v); return l }, float64(x)))
	}
	everyTable(t, func(t *testing.T, p *prims) {
		// One query with its keys in the lanes of a row, and with its keys in the rows of a lane.
		lo, hi := new([Width]int32), new([Width]int32)
		for l := range Width {
			hi[l] = Width
		}
		mx, inv, d := []float32{float32(top)}, []float32{float32(1 / sum)}, []float32{float32(loss)}
		gotP, gotDs := slices.Clone(s), slices.Clone(dp)
		p.softmaxGradRows(gotP, gotDs, 1, softmaxScale, 0, lo, hi, mx, inv, 1, d, 1)
		wantNear(t, "rows: weights", gotP, wantP, 0, 1e-7)
		wantNear(t, "rows: derivatives", gotDs, wantDs, 0, 2e-7)

		const lane = 5
		ls, ldp := make([]float32, Width*Width), make([]float32, Width*Width)
		var lmx, linv, ld [Width]float32
		lmx[lane], linv[lane], ld[lane] = mx[0], inv[0], d[0]
		for j := range Width {
			ls[j*Width+lane], ldp[j*Width+lane] = s[j], dp[j]
		}
		p.softmaxGradLanes(ls, ldp, Width, softmaxScale, 0, lo, hi, &lmx, &linv, &ld)
		for j := range Width {
			wantBits(t, "lanes: weights", ls[j*Width+lane:][:1], gotP[j:j+1])
			wantBits(t, "lanes: derivatives", ldp[j*Width+lane:][:1], gotDs[j:j+1])
		}
	})
}

func TestGradientsRefuseWhatLeavesTheirSlices(t *testing.T) {
	const n = 5
	x := func(less int) []float32 { return make([]float32, n-less) }
	rows := func(less int) []float32 { return make([]float32, n*Width-less) }
	var lo, hi [Width]int32
	var st [Width]float32
	everyTable(t, func(t *testing.T, p *prims) {
		for name, f := range map[string]func(){
			"dot: y":                  func() { p.dot(x(0), x(1)) },
			"mulAdd: x":               func() { p.mulAdd(x(0), x(1), x(0), 1) },
			"mulAdd: y":               func() { p.mulAdd(x(0), x(0), x(1), 1) },
			"normDot: dy":             func() { p.normDot(x(1), x(0), x(0), 1) },
			"normDot: w":              func() { p.normDot(x(0), x(0), x(1), 1) },
			"normGrad: dy":            func() { p.normGrad(x(0), x(1), x(0), x(0), 1, 1, 1) },
			"normGrad: x":             func() { p.normGrad(x(0), x(0), x(1), x(0), 1, 1, 1) },
			"normGrad: w":             func() { p.normGrad(x(0), x(0), x(0), x(1), 1, 1, 1) },
			"siluGrad: dg":            func() { p.siluGrad(x(0), x(1), x(0), x(0), x(0), x(0)) },
			"siluGrad: da":            func() { p.siluGrad(x(0), x(0), x(0), x(0), x(0), x(1)) },
			"geluTanhGrad: du":        func() { p.geluTanhGrad(x(0), x(0), x(1), x(0), x(0), x(0)) },
			"geluTanhGrad: u":         func() { p.geluTanhGrad(x(0), x(0), x(0), x(0), x(1), x(0)) },
			"softmaxGradLanes: s":     func() { p.softmaxGradLanes(rows(1), rows(0), n, 1, 0, &lo, &hi, &st, &st, &st) },
			"softmaxGradLanes: dp":    func() { p.softmaxGradLanes(rows(0), rows(1), n, 1, 0, &lo, &hi, &st, &st, &st) },
			"softmaxGradRows: s":      func() { p.softmaxGradRows(rows(1), rows(0), n, 1, 0, &lo, &hi, x(0), x(0), 1, x(0), 1) },
			"softmaxGradRows: dp":     func() { p.softmaxGradRows(rows(0), rows(1), n, 1, 0, &lo, &hi, x(0), x(0), 1, x(0), 1) },
			"softmaxGradRows: mx":     func() { p.softmaxGradRows(rows(0), rows(0), n, 1, 0, &lo, &hi, x(1), x(0), 1, x(0), 1) },
			"softmaxGradRows: inv":    func() { p.softmaxGradRows(rows(0), rows(0), n, 1, 0, &lo, &hi, x(0), x(1), 1, x(0), 1) },
			"softmaxGradRows: d":      func() { p.softmaxGradRows(rows(0), rows(0), n, 1, 0, &lo, &hi, x(0), x(0), 1, x(1), 1) },
			"softmaxGradRows: stride": func() { p.softmaxGradRows(rows(0), rows(0), n, 1, 0, &lo, &hi, x(0), x(0), -1, x(0), 1) },
		} {
			func() {
				defer func() {
					if recover() == nil {
						t.Errorf("%s: no panic", name)
					}
				}()
				f()
			}()
		}
	})
}
