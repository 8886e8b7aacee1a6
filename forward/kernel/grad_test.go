package kernel

import (
	"fmt"
	"math"
	"slices"
	"sync"
	"testing"

	"github.com/trainerrank/engine/device"
)

// eachGradTrial is eachTrial with workspaces for the operations of a backward, not a byte larger than they must be.
func eachGradTrial(t *testing.T, n int, fn func(h *Host, x *trial)) {
	eachHost(t, func(t *testing.T, h *Host) {
		eachTrial(t, n, func(x *trial) {
			x.backward = true
			fn(h, x)
		})
	})
}

// column is column j of the first n rows of m, in float64.
func column(m Mat, j int) []float64 {
	c := make([]float64, m.Rows)
	for i := range c {
		c[i] = float64(m.row(i)[j])
	}
	return c
}

// wide is row i of m in float64.
func wide(m Mat, i int) []float64 {
	w := make([]float64, m.Cols)
	for j, v := range m.row(i) {
		w[j] = float64(v)
	}
	return w
}

// rank draws the inner width of an adapter, or another small number of columns.
func (x *trial) rank() int { return among(x.r, 1, 2, 4, 8, 16, 31, 32, 33, 1+x.r.IntN(40)) }

func TestPackedMatrixIsTheMatrixOrItsTranspose(t *testing.T) {
	eachGradTrial(t, 16, func(h *Host, x *trial) {
		out, in := among(x.r, x.rank(), outer(x.r)), among(x.r, x.rank(), inner(x.r))
		x.what = fmt.Sprintf("[%d, %d]", out, in)
		src := x.vector("src", out*in, 1)
		for _, transposed := range []bool{false, true} {
			w := &Weight{Mem: x.mem("packed", WeightBytes(F32, out, in)), Out: out, In: in}
			x.do(h, func() { h.Pack(w, src, transposed) })
			for i := range panels(out) * Width {
				for j := range in {
					want := float32(0) // rows that fill the last panel
					if i < out && transposed {
						want = src.F32()[j*out+i]
					} else if i < out {
						want = src.F32()[i*in+j]
					}
					if got := w.Mem.F32()[(i/Width*in+j)*Width+i%Width]; got != want {
						x.errorf("transposed %t: (%d, %d) is %v instead of %v", transposed, i, j, got, want)
						return
					}
				}
			}
		}
	})
}

func TestLinearGradAgreesWithFloat64(t *testing.T) {
	eachGradTrial(t, 24, func(h *Host, x *trial) {
		d, out, in, rows := among(x.r, dtypes...), among(x.r, x.rank(), outer(x.r), inner(x.r)), among(x.r, x.rank(), outer(x.r), inner(x.r)), x.rows(300)
		add := x.r.IntN(2) == 0
		w, values := x.weight(h, d, out, in)
		dy := x.normal("dy", rows, out, 1)
		x.what = fmt.Sprintf("%d rows, %s [%d, %d], add %t", rows, d, out, in, add)
		dx := x.mat("dx", rows, in)
		was := dx // not looked at
		if add {
			dx = x.normal("dx", rows, in, 1)
			was = x.copyOf(dx)
		}
		x.blocks(h, rows, 0, func(work device.Mem, from, to int) {
			h.LinearGrad(work, dx.RowRange(from, to), dy.RowRange(from, to), w, add)
		})
		col := make([]float64, out)
		cols := make([][]float64, in)
		for j := range cols {
			for o := range col {
				col[o] = values[o][j]
			}
			cols[j] = slices.Clone(col)
		}
		x.near("dx", dx, func(i, j int) (float64, float64) {
			v, abs := dot(dy.row(i), cols[j])
			old := 0.0
			if add {
				old = float64(was.row(i)[j])
			}
			return v + old, (float64(out)+3)*unit*abs + 2*unit*math.Abs(old)
		})
	})
}

func TestOuterAgreesWithFloat64(t *testing.T) {
	eachGradTrial(t, 24, func(h *Host, x *trial) {
		rows, m, n := among(x.r, x.rows(900), blockK, 2*blockK+1), among(x.r, x.rank(), 1+x.r.IntN(300), chunkRows+1), among(x.r, x.rank(), outer(x.r))
		add := x.r.IntN(2) == 0
		x.what = fmt.Sprintf("%d rows, [%d, %d], add %t", rows, m, n, add)
		a, b, dst := x.normal("a", rows, m, 1), x.normal("b", rows, n, 1), x.mat("dst", m, n)
		was := dst // not looked at
		if add {
			dst = x.normal("dst", m, n, 1)
			was = x.copyOf(dst)
		}
		// Workers share the columns.
		x.blocks(h, n, 0, func(work device.Mem, from, to int) {
			h.Outer(work, dst.ColRange(from, to), a, b.ColRange(from, to), add)
		})
		right := make([][]float64, n)
		for j := range right {
			right[j] = column(b, j)
		}
		left := make([]float32, rows)
		last := -1
		x.near("dst", dst, func(i, j int) (float64, float64) {
			if i != last {
				last = i
				for r := range left {
					left[r] = a.row(r)[i]
				}
			}
			v, abs := dot(left, right[j])
			if add {
				v, abs = v+float64(was.row(i)[j]), abs+math.Abs(float64(was.row(i)[j]))
			}
			return v, (float64(rows) + 2) * unit * abs
		})
	})
}

// Products give an element the same bits however rows are cut into calls, and on whichever worker: those of a gradient by inputs alone, and sums over rows if the
// calls follow each other.
func TestProductsOfABackwardDoNotSeeHowRowsAreCut(t *testing.T) {
	eachGradTrial(t, 16, func(h *Host, x *trial) {
		d, out, in, rows := among(x.r, dtypes...), among(x.r, x.rank(), outer(x.r)), among(x.r, x.rank(), inner(x.r)), x.rows(700)
		x.what = fmt.Sprintf("%d rows, %s [%d, %d]", rows, d, out, in)
		w, _ := x.weight(h, d, out, in)
		dy, b, old := x.normal("dy", rows, out, 1), x.normal("b", rows, in, 1), x.normal("old", rows, in, 1)
		run := func(plan func(*Host, int, int, func(device.Mem, int, int))) (plain, sum Mat) {
			plain, sum = x.mat("plain", rows, in), x.copyOf(old)
			plan(h, rows, 0, func(work device.Mem, from, to int) {
				h.LinearGrad(work, plain.RowRange(from, to), dy.RowRange(from, to), w, false)
				h.LinearGrad(work, sum.RowRange(from, to), dy.RowRange(from, to), w, true)
			})
			return plain, sum
		}
		plain, sum := run(x.whole)
		gotPlain, gotSum := run(x.blocks)
		x.same("gradient in blocks", gotPlain, 0, plain)
		x.same("sum in blocks", gotSum, 0, sum)

		whole, parts, cols := x.mat("outer", out, in), x.mat("outer in parts", out, in), x.mat("outer in columns", out, in)
		work := x.work(0)
		cut := x.r.IntN(rows)
		x.do(h, func() {
			h.Outer(work, whole, dy, b, false)
			h.Outer(work, parts, dy.RowRange(0, cut), b.RowRange(0, cut), false)
			h.Outer(work, parts, dy.RowRange(cut, rows), b.RowRange(cut, rows), true)
		})
		x.blocks(h, in, 0, func(work device.Mem, from, to int) {
			h.Outer(work, cols.ColRange(from, to), dy, b.ColRange(from, to), false)
		})
		x.same(fmt.Sprintf("sum over rows cut at %d", cut), parts, 0, whole)
		x.same("sum over rows by columns", cols, 0, whole)
	})
}

func TestActivateAndItsGradientAgreeWithFloat64(t *testing.T) {
	eachGradTrial(t, 16, func(h *Host, x *trial) {
		rows, n := x.rows(200), 1+x.r.IntN(200)
		act, f := SiLU, siluOf
		if x.r.IntN(2) == 0 {
			act, f = GELUTanh, geluOf
		}
		gate, up, da := x.normal("gate", rows, n, math.Exp2(float64(x.r.IntN(6)-3))), x.normal("up", rows, n, 1), x.normal("dact", rows, n, 1)
		x.what = fmt.Sprintf("%d rows of %d, activation %d", rows, n, act)
		wasGate, wasUp, wasDa := x.copyOf(gate), x.copyOf(up), x.copyOf(da)
		fwd := x.mat("act", rows, n)
		if x.r.IntN(2) == 0 {
			fwd = x.copyOf(gate)
			x.blocks(h, rows, 0, func(_ device.Mem, from, to int) {
				h.Activate(fwd.RowRange(from, to), fwd.RowRange(from, to), up.RowRange(from, to), act)
			})
		} else {
			x.blocks(h, rows, 0, func(_ device.Mem, from, to int) {
				h.Activate(fwd.RowRange(from, to), gate.RowRange(from, to), up.RowRange(from, to), act)
			})
		}
		a, dg, du := x.mat("act", rows, n), x.mat("dgate", rows, n), x.mat("dup", rows, n)
		if x.r.IntN(2) == 0 { // as the backward calls it
			a = da
		}
		x.blocks(h, rows, 0, func(_ device.Mem, from, to int) {
			h.ActivateGrad(a.RowRange(from, to), dg.RowRange(from, to), du.RowRange(from, to), gate.RowRange(from, to), up.RowRange(from, to), da.RowRange(from, to), act)
		})
		x.same("the activation of the backward", a, 0, fwd)
		tol := func(g float64) float64 { return 2e-6 * (1 + math.Abs(g)) } // as in the tests of the primitives
		at := func(m Mat, i, j int) float64 { return float64(m.row(i)[j]) }
		x.near("act", fwd, func(i, j int) (float64, float64) {
			g, u := at(wasGate, i, j), at(wasUp, i, j)
			return f(g) * u, tol(g) * math.Abs(u)
		})
		x.near("dup", du, func(i, j int) (float64, float64) {
			g, d := at(wasGate, i, j), at(wasDa, i, j)
			return f(g) * d, tol(g) * math.Abs(d)
		})
		x.near("dgate", dg, func(i, j int) (float64, float64) {
			g, u, d := at(wasGate, i, j), at(wasUp, i, j), at(wasDa, i, j)
			return slope(f, g) * u * d, tol(g) * math.Abs(u*d)
		})
	})
}

func TestNormGradsAgreeWithFloat64(t *testing.T) {
	eachGradTrial(t, 20, func(h *Host, x *trial) {
		rows, n, heads := x.rows(300), among(x.r, 1, 7, 31, 32, 33, 64, 128, 576, 1+x.r.IntN(300)), among(x.r, 1, 1, 2, 5)
		offset, eps := among(x.r, float32(0), 1), among(x.r, 1e-5, 1e-6)
		scale := math.Exp2(float64(x.r.IntN(13) - 6))
		inPlace := x.r.IntN(2) == 0
		x.what = fmt.Sprintf("%d rows of %d runs of %d, offset %v, values about %v, in place %t", rows, heads, n, offset, scale, inPlace)
		src, dy, w := x.normal("x", rows, n*heads, scale), x.normal("dy", rows, n*heads, 1), x.vector("w", n, 1)
		was := x.copyOf(dy)
		dx := dy
		if !inPlace {
			dx = x.mat("dx", rows, n*heads)
		}
		dw := x.mem("dw", int64(n)*4)
		x.do(h, func() { h.NormWeightGrad(dw, dy, src, eps) })
		x.blocks(h, rows, 0, func(_ device.Mem, from, to int) {
			h.NormGrad(dx.RowRange(from, to), dy.RowRange(from, to), src.RowRange(from, to), w, offset, eps)
		})
		inv, mean, meanAbs := make([]float64, rows*heads), make([]float64, rows*heads), make([]float64, rows*heads)
		for i := range inv {
			var squares float64
			for j, v := range src.row(i / heads)[i%heads*n:][:n] {
				v := float64(v)
				t := float64(was.row(i / heads)[i%heads*n+j]) * (float64(offset) + float64(w.F32()[j])) * v
				squares, mean[i], meanAbs[i] = squares+v*v, mean[i]+t, meanAbs[i]+math.Abs(t)
			}
			inv[i] = 1 / math.Sqrt(squares/float64(n)+eps)
		}
		rel := (float64(n)/Width + 12) * unit // of a sum by lanes, a root, some products
		x.near("dx", dx, func(i, j int) (float64, float64) {
			r, v := inv[i*heads+j/n], float64(src.row(i)[j])
			g := float64(was.row(i)[j]) * (float64(offset) + float64(w.F32()[j%n]))
			k := r * r * r / float64(n)
			gTol := unit * math.Abs(float64(was.row(i)[j])) * (1 + math.Abs(float64(w.F32()[j%n]))) // offset+w may cancel
			return r*g - v*k*mean[i*heads+j/n], 3*rel*(math.Abs(r*g)+math.Abs(v)*k*meanAbs[i*heads+j/n]) + r*gTol + math.Abs(v)*k*meanAbs[i*heads+j/n]*2*unit
		})
		x.near("dw", Mat{dw, 1, n, n}, func(_, j int) (float64, float64) {
			var sum, abs float64
			for i := range inv {
				t := inv[i] * float64(src.row(i / heads)[i%heads*n+j]) * float64(was.row(i / heads)[i%heads*n+j])
				sum, abs = sum+t, abs+math.Abs(t)
			}
			return sum, abs * (rel + float64(len(inv)+3)*unit)
		})
	})
}

func TestRowOperationsOfABackwardAgreeWithFloat64(t *testing.T) {
	eachGradTrial(t, 16, func(h *Host, x *trial) {
		rows, heads, hd := x.rows(200), 1+x.r.IntN(5), 1+x.r.IntN(130)
		n, s := heads*hd, float32(x.r.NormFloat64())
		x.what = fmt.Sprintf("%d rows, %d heads of %d", rows, heads, hd)
		a, b := x.normal("a", rows, n, 1), x.normal("b", rows, n, 1)
		dots, scaled, cleared, copied, placed := x.mat("dots", rows, heads), x.copyOf(a), x.mat("cleared", rows, n), x.mat("copied", rows, n), x.mat("placed", rows, n)
		added, one := x.copyOf(a), x.vector("one", n, 1)
		sum := x.mem("sum", int64(n)*4)
		at := make([]int32, rows)
		for i, r := range x.r.Perm(rows) {
			at[i] = int32(r)
		}
		chosen := x.r.IntN(rows)
		x.blocks(h, rows, 0, func(_ device.Mem, from, to int) {
			h.RowDot(dots.RowRange(from, to), a.RowRange(from, to), b.RowRange(from, to), hd)
			h.Scale(scaled.RowRange(from, to), s)
			h.Clear(cleared.RowRange(from, to))
			h.Copy(copied.RowRange(from, to), a.RowRange(from, to))
			h.PlaceRows(placed, a.RowRange(from, to), at[from:to])
		})
		x.do(h, func() { h.AddRow(added, chosen, one.F32()); h.SumRows(sum, a) })
		back := make([]int, rows)
		for i, r := range at {
			back[r] = i
		}
		v := func(m Mat, i, j int) float64 { return float64(m.row(i)[j]) }
		x.near("dots", dots, func(i, head int) (float64, float64) {
			d, abs := dot(a.row(i)[head*hd:][:hd], wide(b, i)[head*hd:])
			return d, (float64(hd)/Width + 8) * unit * abs
		})
		x.near("scaled", scaled, func(i, j int) (float64, float64) { return float64(a.row(i)[j] * s), 0 })
		x.near("cleared", cleared, func(int, int) (float64, float64) { return 0, 0 })
		x.near("copied", copied, func(i, j int) (float64, float64) { return v(a, i, j), 0 })
		x.near("placed", placed, func(i, j int) (float64, float64) { return v(a, back[i], j), 0 })
		x.near("added", added, func(i, j int) (float64, float64) {
			if i != chosen {
				return v(a, i, j), 0
			}
			return float64(a.row(i)[j] + one.F32()[j]), 0
		})
		x.near("sum", Mat{sum, 1, n, n}, func(_, j int) (float64, float64) {
			var total, abs float64
			for i := range rows {
				total, abs = total+v(a, i, j), abs+math.Abs(v(a, i, j))
			}
			return total, float64(rows) * unit * abs
		})
	})
}

// headGradCase is a head, rows for it, their normalisers as Head gives them, and cotangents.
type headGradCase struct {
	h      Mat
	w      *Weight
	values [][]float64
	logZ   []float64
	wants  []AskGrad
}

func (x *trial) headGrad(h *Host) *headGradCase {
	n, in := vocab(x.r), among(x.r, 1, 8, 17, 64, 100)
	if n > 3000 {
		n = 3000
	}
	c := &headGradCase{h: x.normal("h", x.headRows(n), in, among(x.r, 0.1, 1, 3))}
	c.w, c.values = x.weight(h, among(x.r, dtypes...), n, in)
	rows := c.h.Rows
	logZ := x.mem("logZ", int64(rows)*8)
	var asks []Ask
	for r := range rows {
		asks = append(asks, Ask{Row: int32(r), Kind: AskLogZ, Out: logZ.Slice(int64(r)*8, 8)})
		for range x.r.IntN(4) { // none; several, of the same label too; rows of logits, more than one for inputs that share a row
			a := AskGrad{Row: int32(r), Label: int32(among(x.r, 0, n-1, x.r.IntN(n))), Factor: float32(x.r.NormFloat64())}
			if x.r.IntN(3) == 0 {
				a = AskGrad{Row: int32(r), Logits: x.vector("cotangents", n, 1).F32()}
			}
			c.wants = append(c.wants, a)
		}
	}
	x.whole(h, rows, 0, func(work device.Mem, _, _ int) { h.Head(work, x.mem("scratch", HeadBytes(rows, 0)), c.h, c.w, asks) })
	for r := range rows {
		c.logZ = append(c.logZ, logZ.F64()[r])
	}
	x.what = fmt.Sprintf("%d rows, head %s [%d, %d], %d cotangents", rows, c.w.DType, n, in, len(c.wants))
	return c
}

// logits are the gradients by the logits of row r, and how far they may be off.
func (c *headGradCase) logits(r int) (grad, tol []float64) {
	n := c.w.Out
	grad, tol = make([]float64, n), make([]float64, n)
	scores := make([]float64, n)
	worst, highest := 0.0, math.Inf(-1)
	for j := range scores {
		var abs float64
		scores[j], abs = dot(c.h.row(r), c.values[j])
		worst, highest = max(worst, (float64(c.w.In)+2)*unit*abs+unit*math.Abs(scores[j])), max(highest, scores[j])
	}
	var sum, factor, size float64
	for _, s := range scores {
		sum += math.Exp(s - highest)
	}
	logZ := highest + math.Log(sum)
	for _, a := range c.wants {
		if int(a.Row) != r {
			continue
		}
		factor, size = factor+float64(a.Factor), size+math.Abs(float64(a.Factor))
		for j := range grad {
			v := 0.0
			if a.Logits != nil {
				v = float64(a.Logits[j])
			} else if int(a.Label) == j {
				v = float64(a.Factor)
			}
			grad[j] += v
			tol[j] += 4 * unit * math.Abs(v)
		}
	}
	for j := range grad {
		p := math.Exp(scores[j] - logZ)
		grad[j] -= factor * p
		// The logit, its rounding, and the normaliser's, which is cut to float32; exp, and the sum of the cotangents.
		tol[j] += p * (math.Abs(factor)*(2*worst+unit*(2*math.Abs(logZ)+20)) + 4*unit*size)
	}
	return grad, tol
}

// run gives the gradient by h as plan cuts the rows.
func (c *headGradCase) run(x *trial, h *Host, plan func(*Host, int, int, func(device.Mem, int, int))) Mat {
	dh := x.mat("dh", c.h.Rows, c.h.Cols)
	var mu sync.Mutex // x is for one goroutine
	plan(h, c.h.Rows, 0, func(work device.Mem, from, to int) {
		mu.Lock()
		scratch := x.mem("scratch", HeadGradBytes(to-from))
		mu.Unlock()
		h.HeadGrad(work, scratch, dh.RowRange(from, to), c.h.RowRange(from, to), c.w, c.logZ[from:to], c.part(from, to))
	})
	return dh
}

// part are the cotangents of rows [from, to).
func (c *headGradCase) part(from, to int) (part []AskGrad) {
	for _, a := range c.wants {
		if int(a.Row) >= from && int(a.Row) < to {
			a.Row -= int32(from)
			part = append(part, a)
		}
	}
	return part
}

func TestHeadGradAgreesWithFloat64(t *testing.T) {
	eachGradTrial(t, 16, func(h *Host, x *trial) {
		c := x.headGrad(h)
		dh := c.run(x, h, x.blocks)
		want, tols := make([]float64, c.h.Cols), make([]float64, c.h.Cols)
		last := -1
		x.near("dh", dh, func(i, j int) (float64, float64) {
			if i != last {
				last = i
				grad, tol := c.logits(i)
				for d := range want {
					want[d], tols[d] = 0, 0
					for v := range grad {
						t := grad[v] * c.values[v][d]
						want[d] += t
						tols[d] += tol[v]*math.Abs(c.values[v][d]) + float64(c.w.Out+2)*unit*math.Abs(t)
					}
				}
			}
			return want[j], tols[j]
		})
		x.same("rows at once", dh, 0, c.run(x, h, x.whole))
	})
}

// The gradient of the head's weights, some tiles on each worker and rows in pieces: as float64, and with the bits of all rows at once.
func TestHeadWeightGradAgreesWithFloat64(t *testing.T) {
	eachGradTrial(t, 12, func(h *Host, x *trial) {
		c := x.headGrad(h)
		rows, n, in := c.h.Rows, c.w.Out, c.w.In
		cuts := []int{0, x.r.IntN(rows), rows}
		run := func(cuts []int) *Weight {
			dw := &Weight{Mem: x.mem("dw", WeightBytes(F32, n, in)), Out: n, In: in}
			clear(dw.Mem.F32())
			works, scratch := make([]device.Mem, h.Threads()), make([]device.Mem, h.Threads())
			for i := range works {
				works[i], scratch[i] = x.work(0), x.mem("scratch", HeadGradBytes(rows))
			}
			x.do(h, func() {
				h.Each((panels(n)+HeadPanels-1)/HeadPanels, func(worker, i int) {
					for p := range len(cuts) - 1 {
						from, to := cuts[p], cuts[p+1]
						h.HeadWeightGrad(works[worker], scratch[worker], dw, i*HeadPanels, c.h.RowRange(from, to), c.w, c.logZ[from:to], c.part(from, to), from > 0)
					}
				})
			})
			return dw
		}
		dw := run([]int{0, rows})
		want, tols := make([][]float64, n), make([][]float64, n)
		for v := range want {
			want[v], tols[v] = make([]float64, in), make([]float64, in)
		}
		for r := range rows {
			grad, tol := c.logits(r)
			for v := range grad {
				for j, hv := range c.h.row(r) {
					t := grad[v] * float64(hv)
					want[v][j] += t
					tols[v][j] += tol[v]*math.Abs(float64(hv)) + float64(rows+2)*unit*math.Abs(t)
				}
			}
		}
		got := x.mat("rows of dw", n, in)
		for v := range n {
			dw.Row(got.row(v), v)
		}
		x.near("dw", got, func(i, j int) (float64, float64) { return want[i][j], tols[i][j] })
		if other := run(cuts); !slices.Equal(other.Mem.Raw(), dw.Mem.Raw()) {
			x.errorf("rows cut at %d give other bits than all at once", cuts[1])
		}
	})
}

func TestEmbedGradAddsTheRowsOfEachToken(t *testing.T) {
	eachGradTrial(t, 16, func(h *Host, x *trial) {
		rows, n, in, scale := x.rows(300), 1+x.r.IntN(100), 1+x.r.IntN(200), among(x.r, 1, 1, float32(math.Sqrt(200)))
		x.what = fmt.Sprintf("%d tokens of [%d, %d], scale %v", rows, n, in, scale)
		dx, dw := x.normal("dx", rows, in, 1), &Weight{Mem: x.vector("dw", panels(n)*Width*in, 1), Out: n, In: in}
		tokens := make([]int32, rows)
		for i := range tokens {
			tokens[i] = int32(x.r.IntN(n))
		}
		was := x.mat("was", n, in)
		for v := range n {
			dw.Row(was.row(v), v)
		}
		x.blocks(h, in, 0, func(_ device.Mem, from, to int) { h.EmbedGrad(dw, dx, tokens, scale, from, to) })
		got := x.mat("got", n, in)
		for v := range n {
			dw.Row(got.row(v), v)
		}
		x.near("dw", got, func(i, j int) (float64, float64) {
			sum := float64(was.row(i)[j])
			abs := math.Abs(sum)
			for r, token := range tokens {
				if int(token) == i {
					t := float64(scale) * float64(dx.row(r)[j])
					sum, abs = sum+t, abs+math.Abs(t)
				}
			}
			return sum, float64(rows+1) * 2 * unit * abs
		})
	})
}
