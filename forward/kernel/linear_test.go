package kernel

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/trainerrank/engine/device"
)

// dot is the product of row x with row w in float64, and the sum of the absolute values of its terms.
func dot(x []float32, w []float64) (sum, abs float64) {
	for i, v := range x {
		t := float64(v) * w[i]
		sum += t
		abs += math.Abs(t)
	}
	return sum, abs
}

func biasAt(b device.Mem, i int) float64 {
	if b.Bytes() == 0 {
		return 0
	}
	return float64(b.F32()[i])
}

// inner draws the inner length of a product: on both sides of the places where it is cut.
func inner(r *rand.Rand) int {
	return among(r, 1, 2, 3, 1+r.IntN(100), blockK-1, blockK, blockK+1, 1+r.IntN(700), 2*blockK, 2*blockK+1)
}

// outer draws the number of outputs: whole panels and others.
func outer(r *rand.Rand) int { return among(r, 1, 31, 32, 33, 64, 1+r.IntN(150)) }

func TestLinearAgreesWithFloat64(t *testing.T) {
	eachHost(t, func(t *testing.T, h *Host) {
		eachTrial(t, 24, func(x *trial) {
			d, out, in, rows := among(x.r, dtypes...), outer(x.r), inner(x.r), x.rows(300)
			add := x.r.IntN(2) == 0
			w, wide := x.weight(h, d, out, in)
			src, bias := x.normal("src", rows, in, 1), x.maybeVector("bias", out, 1)
			x.what = fmt.Sprintf("%d rows, %s [%d, %d], bias %t, add %t", rows, d, out, in, bias.Bytes() > 0, add)
			dst := x.mat("dst", rows, out)
			was := dst // not looked at
			if add {
				dst = x.normal("dst", rows, out, 1)
				was = x.copyOf(dst)
			}
			x.blocks(h, rows, 0, func(work device.Mem, from, to int) {
				h.Linear(work, dst.RowRange(from, to), src.RowRange(from, to), w, bias, add)
			})
			x.near("dst", dst, func(i, j int) (float64, float64) {
				v, abs := dot(src.row(i), wide[j])
				b, old := biasAt(bias, j), 0.0
				if add {
					old = float64(was.row(i)[j])
				}
				return v + b + old, (float64(in)+3)*unit*abs + 2*unit*(math.Abs(b)+math.Abs(old))
			})
		})
	})
}

// siluOf and geluOf are the activations in float64.
func siluOf(x float64) float64 { return x / (1 + math.Exp(-x)) }

func geluOf(x float64) float64 {
	return 0.5 * x * (1 + math.Tanh(math.Sqrt(2/math.Pi)*(x+0.044715*x*x*x)))
}

func TestGatedMLPAgreesWithFloat64(t *testing.T) {
	eachHost(t, func(t *testing.T, h *Host) {
		eachTrial(t, 24, func(x *trial) {
			d, out, in, rows := among(x.r, dtypes...), outer(x.r), inner(x.r), x.rows(200)
			act, f := SiLU, siluOf
			if x.r.IntN(2) == 0 {
				act, f = GELUTanh, geluOf
			}
			gate, gateWide := x.weight(h, d, out, in)
			up, upWide := x.weight(h, among(x.r, d, dtypes[x.r.IntN(3)]), out, in)
			gateBias, upBias := x.maybeVector("gate bias", out, 1), x.maybeVector("up bias", out, 1)
			x.what = fmt.Sprintf("%d rows, %s and %s [%d, %d], activation %d, biases %t %t", rows, gate.DType, up.DType, out, in, act, gateBias.Bytes() > 0, upBias.Bytes() > 0)
			// Gates of all sizes, so that the flat ends of the activation are reached too.
			src, dst := x.normal("src", rows, in, math.Exp2(float64(x.r.IntN(6)-3))), x.mat("dst", rows, out)
			x.blocks(h, rows, 0, func(work device.Mem, from, to int) {
				h.GatedMLP(work, dst.RowRange(from, to), src.RowRange(from, to), gate, up, gateBias, upBias, act)
			})
			x.near("dst", dst, func(i, j int) (float64, float64) {
				g, gAbs := dot(src.row(i), gateWide[j])
				u, uAbs := dot(src.row(i), upWide[j])
				gTol := (float64(in)+3)*unit*gAbs + unit*math.Abs(biasAt(gateBias, j))
				uTol := (float64(in)+3)*unit*uAbs + unit*math.Abs(biasAt(upBias, j))
				g, u = g+biasAt(gateBias, j), u+biasAt(upBias, j)
				a := f(g)
				// The slope of either activation is below 1.13. The activation itself is good to 16 units of its value, and,
				// where tanh or exp saturate, of its argument's order.
				aTol := 1.13*gTol + 16*unit*math.Abs(a) + 1e-7*min(1, math.Abs(g))
				return a * u, aTol*(math.Abs(u)+uTol) + math.Abs(a)*uTol
			})
		})
	})
}

// Products give a row the same bits in any block, beside any neighbours, on any number of threads.
func TestProductsTreatEachRowAlone(t *testing.T) {
	eachHost(t, func(t *testing.T, h *Host) {
		eachTrial(t, 16, func(x *trial) {
			d, out, in, rows := among(x.r, dtypes...), outer(x.r), inner(x.r), x.rows(300)
			x.what = fmt.Sprintf("%d rows, %s [%d, %d]", rows, d, out, in)
			w, _ := x.weight(h, d, out, in)
			up, _ := x.weight(h, d, out, in)
			src, old := x.normal("src", rows, in, 1), x.normal("old", rows, out, 1)
			bias := x.maybeVector("bias", out, 1)
			run := func(plan func(*Host, int, int, func(device.Mem, int, int)), src Mat) (sum, mlp Mat) {
				sum, mlp = x.copyOf(old), x.mat("mlp", rows, out)
				plain := x.mat("plain", rows, out)
				plan(h, rows, 0, func(work device.Mem, from, to int) {
					part := src.RowRange(from, to)
					h.Linear(work, plain.RowRange(from, to), part, w, bias, false)
					h.Linear(work, sum.RowRange(from, to), part, up, bias, true)
					h.GatedMLP(work, mlp.RowRange(from, to), part, w, up, bias, device.Mem{}, SiLU)
					h.Add(sum.RowRange(from, to), plain.RowRange(from, to))
				})
				return sum, mlp
			}
			sum, mlp := run(x.whole, src)
			gotSum, gotMLP := run(x.blocks, src)
			x.same("linear in blocks", gotSum, 0, sum)
			x.same("mlp in blocks", gotMLP, 0, mlp)
			ill := x.r.IntN(rows)
			sick := x.copyOf(src)
			poison(x.r, sick.row(ill))
			gotSum, gotMLP = run(x.blocks, sick)
			x.same("linear, before a row that is not finite", sum, 0, gotSum.RowRange(0, ill))
			x.same("mlp, before a row that is not finite", mlp, 0, gotMLP.RowRange(0, ill))
			if ill+1 < rows {
				x.same("linear, after a row that is not finite", sum, ill+1, gotSum.RowRange(ill+1, rows))
				x.same("mlp, after a row that is not finite", mlp, ill+1, gotMLP.RowRange(ill+1, rows))
			}
		})
	})
}

// A weight that is not finite reaches its own output column only; the others keep their bits.
func TestLinearTreatsEachColumnAlone(t *testing.T) {
	eachHost(t, func(t *testing.T, h *Host) {
		eachTrial(t, 10, func(x *trial) {
			out, in, rows := outer(x.r), inner(x.r), x.rows(50)
			ill := x.r.IntN(out)
			x.what = fmt.Sprintf("%d rows, [%d, %d], column %d", rows, out, in, ill)
			w, _ := x.weight(h, F32, out, in)
			src, work := x.normal("src", rows, in, 1), x.work(0)
			want, got := x.mat("want", rows, out), x.mat("got", rows, out)
			x.do(h, func() { h.Linear(work, want, src, w, device.Mem{}, false) })
			w.Mem.F32()[(ill/Width*in+x.r.IntN(in))*Width+ill%Width] = float32(math.NaN())
			x.do(h, func() { h.Linear(work, got, src, w, device.Mem{}, false) })
			for i := range rows {
				for j, g := range got.row(i) {
					if j == ill && g == g || j != ill && math.Float32bits(g) != math.Float32bits(want.row(i)[j]) {
						x.errorf("(%d, %d) is %v instead of %v", i, j, g, want.row(i)[j])
					}
				}
			}
		})
	})
}
