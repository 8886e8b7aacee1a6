package kernel

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/trainerrank/engine/device"
)

// growPreorder draws a forest as [grow] does, but each span is followed by those that descend from it, as the backward needs it.
func growPreorder(r *rand.Rand, n, most int) (spans []Span, rows int) {
	var open []int // the way from a root to the last span
	for i := range n {
		open = open[:r.IntN(len(open)+1)]
		s := Span{Parent: -1, Offset: rows}
		if len(open) > 0 {
			s.Parent = open[len(open)-1]
			s.Start = spans[s.Parent].End
		}
		s.End = s.Start + min(most, among(r, 1, 2, 1+r.IntN(10), keyBlock-1, keyBlock, keyBlock+1, 1+r.IntN(3*keyBlock)))
		rows += s.End - s.Start
		spans, open = append(spans, s), append(open, i)
		if r.IntN(4) > 0 && len(open) > 1 && r.IntN(2) == 0 {
			open = open[:len(open)-1] // brothers
		}
	}
	return spans, rows
}

// attentionCase is an attention layer with what its backward is given: statistics and outputs of the forward, and cotangents.
type attentionCase struct {
	Attention
	spans                     []Span
	q, k, v, dout, stats, dot Mat
	n                         int
}

func (x *trial) attention(h *Host) *attentionCase {
	c := &attentionCase{Attention: x.shape()}
	c.spans, c.n = growPreorder(x.r, 1+x.r.IntN(7), 4096/c.HeadDim)
	n, qs, kvs := c.n, c.Heads*c.HeadDim, c.KVHeads*c.HeadDim
	c.q, c.k, c.v, c.dout = x.normal("q", n, qs, 2), x.normal("k", n, kvs, 1), x.normal("v", n, kvs, 1), x.normal("dout", n, qs, 1)
	c.stats, c.dot = x.mat("stats", n, 2*c.Heads), x.mat("dot", n, c.Heads)
	out := x.mat("out", n, qs)
	x.whole(h, n, c.HeadDim, func(work device.Mem, _, _ int) {
		h.Attend(work, out, c.stats, c.q, c.k, c.v, 0, c.spans, c.Attention)
		h.RowDot(c.dot, c.dout, out, c.HeadDim)
	})
	x.what = fmt.Sprintf("%+v, %d rows, spans %s", c.Attention, n, describe(c.spans))
	return c
}

// queries and keys run the backward, as plan cuts the rows.
func (c *attentionCase) queries(x *trial, h *Host, plan func(*Host, int, int, func(device.Mem, int, int))) (dq Mat) {
	dq = x.mat("dq", c.n, c.q.Cols)
	plan(h, c.n, c.HeadDim, func(work device.Mem, from, to int) {
		// A block may see the keys of its own rows and of rows before it; the others need not be there.
		h.AttendQueryGrad(work, dq.RowRange(from, to), c.q.RowRange(from, to), upTo(c.k, to), upTo(c.v, to), c.dout.RowRange(from, to), c.stats.RowRange(from, to),
			c.dot.RowRange(from, to), from, c.spans, c.Attention)
	})
	return dq
}

func (c *attentionCase) keys(x *trial, h *Host, plan func(*Host, int, int, func(device.Mem, int, int))) (dk, dv Mat) {
	dk, dv = x.mat("dk", c.n, c.k.Cols), x.mat("dv", c.n, c.k.Cols)
	plan(h, c.n, c.HeadDim, func(work device.Mem, from, to int) {
		h.AttendKeyGrad(work, dk.RowRange(from, to), dv.RowRange(from, to), c.q, c.k, c.v, c.dout, c.stats, c.dot, from, c.spans, c.Attention)
	})
	return dk, dv
}

// grads are the gradients in float64, and how far each may be off, row-major.
type grads struct{ dq, dk, dv, dqTol, dkTol, dvTol []float64 }

func (c *attentionCase) reference() *grads {
	hd, n := c.HeadDim, c.n
	zeros := func(m Mat) []float64 { return make([]float64, n*m.Cols) }
	g := &grads{zeros(c.q), zeros(c.k), zeros(c.v), zeros(c.q), zeros(c.k), zeros(c.v)}
	wideRows := func(m Mat) [][]float64 {
		rows := make([][]float64, m.Rows)
		for i := range rows {
			rows[i] = wide(m, i)
		}
		return rows
	}
	k, v := wideRows(c.k), wideRows(c.v)
	out, outTol := make([]float64, c.q.Cols), make([]float64, c.q.Cols)
	scale := float64(c.Scale)
	for i := range n {
		s, pos := where(c.spans, i)
		rows := seen(c.spans, s, pos, c.Window)
		weights, dweights, sizes := make([]float64, len(rows)), make([]float64, len(rows)), make([]float64, len(rows))
		for head := range c.Heads {
			kv := head / (c.Heads / c.KVHeads)
			at, kvAt := head*hd, kv*hd
			q, dout := c.q.row(i)[at:][:hd], c.dout.row(i)[at:][:hd]
			reference(out[at:][:hd], outTol[at:][:hd], q, c.k, c.v, rows, kv, c.Attention)
			// The weights once more, the gradients by them, and D = dout * out, which is their mean.
			var highest, sum, off, size float64
			highest = math.Inf(-1)
			for j, r := range rows {
				score, abs := dot(q, k[r][kvAt:])
				weights[j] = score * scale
				highest, size, off = max(highest, weights[j]), max(size, math.Abs(weights[j])), max(off, (float64(hd)+2)*unit*abs*scale)
				dweights[j], sizes[j] = dot(dout, v[r][kvAt:])
			}
			for j := range weights {
				weights[j] = math.Exp(weights[j] - highest)
				sum += weights[j]
			}
			d, dTol := 0.0, 0.0
			for e := range hd {
				t := float64(dout[e]) * out[at+e]
				d += t
				dTol += math.Abs(float64(dout[e]))*outTol[at+e] + (float64(hd)/Width+8)*unit*math.Abs(t)
			}
			// As in reference, but the inverse of the sum is rounded too.
			rel := 2*off + 4*unit*size + unit*(6*float64(len(rows))/keyBlock+float64(len(rows))+24)
			for j, r := range rows {
				p := weights[j] / sum
				ds := scale * p * (dweights[j] - d)
				dsTol := scale*p*((float64(hd)+2)*unit*sizes[j]+dTol+rel*math.Abs(dweights[j]-d)) + 4*unit*math.Abs(ds)
				for e := range hd {
					qe, ke, de := float64(q[e]), k[r][kvAt+e], float64(dout[e])
					add := func(grad, tol []float64, at int, x, xTol, by float64, terms int) {
						grad[at] += x * by
						tol[at] += math.Abs(by) * (xTol + float64(terms+2)*unit*math.Abs(x))
					}
					add(g.dq, g.dqTol, i*c.q.Cols+at+e, ds, dsTol, ke, len(rows))
					add(g.dk, g.dkTol, r*c.k.Cols+kvAt+e, ds, dsTol, qe, n*c.Heads/c.KVHeads)
					add(g.dv, g.dvTol, r*c.v.Cols+kvAt+e, p, rel*p, de, n*c.Heads/c.KVHeads)
				}
			}
		}
	}
	return g
}

func TestAttentionGradientsAgreeWithFloat64(t *testing.T) {
	eachGradTrial(t, 24, func(h *Host, x *trial) {
		c := x.attention(h)
		want := c.reference()
		dq := c.queries(x, h, x.blocks)
		dk, dv := c.keys(x, h, x.blocks)
		for _, m := range []struct {
			name        string
			got         Mat
			values, tol []float64
		}{{"dq", dq, want.dq, want.dqTol}, {"dk", dk, want.dk, want.dkTol}, {"dv", dv, want.dv, want.dvTol}} {
			x.near(m.name, m.got, func(i, j int) (float64, float64) { return m.values[i*m.got.Cols+j], m.tol[i*m.got.Cols+j] + 1e-30 })
		}
	})
}

// Other blocks, other workers: the same bits as all rows at once.
func TestAttentionGradientsDoNotSeeHowRowsAreCut(t *testing.T) {
	eachGradTrial(t, 16, func(h *Host, x *trial) {
		c := x.attention(h)
		dq := c.queries(x, h, x.whole)
		dk, dv := c.keys(x, h, x.whole)
		gotK, gotV := c.keys(x, h, x.blocks)
		x.same("dq in blocks", c.queries(x, h, x.blocks), 0, dq)
		x.same("dk in blocks", gotK, 0, dk)
		x.same("dv in blocks", gotV, 0, dv)
		if c.n > 1 { // behind the rows of other spans, as the first row of a block
			i := 1 + x.r.IntN(c.n-1)
			at := func(h *Host, n, headDim int, op func(work device.Mem, from, to int)) {
				work := x.work(headDim)
				x.do(h, func() { op(work, 0, i); op(work, i, i+1); op(work, i+1, n) })
			}
			if i+1 < c.n {
				x.same(fmt.Sprintf("dq, row %d apart", i), c.queries(x, h, at), 0, dq)
				gotK, gotV = c.keys(x, h, at)
				x.same(fmt.Sprintf("dk, row %d apart", i), gotK, 0, dk)
				x.same(fmt.Sprintf("dv, row %d apart", i), gotV, 0, dv)
			}
		}
	})
}

// What is not finite stays within its tree: rows that share no beginning with it keep their bits. (Within a tree it may reach whatever shares the
// parameters' gradients with it.)
func TestAttentionGradientsKeepWhatIsNotFiniteInItsTree(t *testing.T) {
	eachGradTrial(t, 12, func(h *Host, x *trial) {
		c := x.attention(h)
		dq := c.queries(x, h, x.whole)
		dk, dv := c.keys(x, h, x.whole)
		root := func(row int) int {
			s, _ := where(c.spans, row)
			for c.spans[s].Parent >= 0 {
				s = c.spans[s].Parent
			}
			return s
		}
		ill := root(x.r.IntN(c.n))
		for _, m := range []Mat{c.q, c.k, c.v, c.dout, c.stats, c.dot} {
			for i := range c.n {
				if root(i) == ill {
					poison(x.r, m.row(i))
				}
			}
		}
		gotQ := c.queries(x, h, x.blocks)
		gotK, gotV := c.keys(x, h, x.blocks)
		for i := range c.n {
			if root(i) != ill {
				x.same("dq", gotQ, i, dq.RowRange(i, i+1))
				x.same("dk", gotK, i, dk.RowRange(i, i+1))
				x.same("dv", gotV, i, dv.RowRange(i, i+1))
			}
		}
	})
}

// loss is the sum of outputs times cotangents in float64, with q, k and v moved by step along directions of their shapes.
func (c *attentionCase) loss(dir [3][]float64, step float64) float64 {
	moved := func(m Mat, along []float64) []float64 {
		list := make([]float64, 0, m.Rows*m.Cols)
		for i := range m.Rows {
			list = append(list, wide(m, i)...)
		}
		for i := range list {
			list[i] += step * along[i]
		}
		return list
	}
	q, k, v := moved(c.q, dir[0]), moved(c.k, dir[1]), moved(c.v, dir[2])
	var loss float64
	for i := range c.n {
		s, pos := where(c.spans, i)
		rows := seen(c.spans, s, pos, c.Window)
		for head := range c.Heads {
			at, kvAt := i*c.q.Cols+head*c.HeadDim, head/(c.Heads/c.KVHeads)*c.HeadDim
			var top, sum, out float64
			top = math.Inf(-1)
			scores := make([]float64, len(rows))
			for j, r := range rows {
				for e := range c.HeadDim {
					scores[j] += float64(c.Scale) * q[at+e] * k[r*c.k.Cols+kvAt+e]
				}
				top = max(top, scores[j])
			}
			for j, r := range rows {
				w := math.Exp(scores[j] - top)
				sum += w
				for e := range c.HeadDim {
					out += w * v[r*c.v.Cols+kvAt+e] * float64(c.dout.row(i)[head*c.HeadDim+e])
				}
			}
			loss += out / sum
		}
	}
	return loss
}

// Along random directions the gradients are the slopes of the attention itself, computed in float64 without any of the formulas of the backward.
func TestAttentionGradientsAreDerivatives(t *testing.T) {
	eachGradTrial(t, 4, func(h *Host, x *trial) {
		c := x.attention(h)
		got := [3]Mat{c.queries(x, h, x.blocks)}
		got[1], got[2] = c.keys(x, h, x.blocks)
		var size float64 // of the gradient by the values, which no window makes zero
		for i := range got[2].Rows {
			for _, g := range got[2].row(i) {
				size += float64(g) * float64(g)
			}
		}
		for i, name := range []string{"q", "k", "v"} {
			var dir [3][]float64
			for j, m := range got {
				dir[j] = make([]float64, m.Rows*m.Cols)
			}
			var want, norm float64
			for r := range got[i].Rows {
				for j, g := range got[i].row(r) {
					d := x.r.NormFloat64()
					dir[i][r*got[i].Cols+j] = d
					want += float64(g) * d
					norm += float64(g) * float64(g)
				}
			}
			if s := slope(func(h float64) float64 { return c.loss(dir, h) }, 0); !(math.Abs(s-want) <= 1e-5*(math.Sqrt(norm)+math.Sqrt(size))) {
				x.errorf("along a direction of %s the loss rises by %v, the gradient says %v; its norm is %v", name, s, want, math.Sqrt(norm))
			}
		}
	})
}
