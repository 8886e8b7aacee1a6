package transformer

import (
	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/forward/kernel"
	"github.com/trainerrank/engine/internal/failpoint"
)

// backpass is a backward under way. Each layer is done in two halves, the feed-forward and then the mixer: first a loop over blocks of rows takes the gradient of the
// residual stream from bp.dx to bp.spare, and leaves what the parameters' gradients are products of; then these products, sums over all rows, are shared
// among the workers by columns. So every sum has one order, however many workers there are.
type backpass struct {
	*pass
	g         *graph
	grads     []forward.OutputGrad // none in a rehearsal
	rows      []wish               // those with cotangents
	scored    int                  // the first of them have some of labels or logits
	vector    device.Mem           // the result
	base      *weights             // gradients of the base model's parameters, in vector; nil if an adapter is trained
	back      []kernel.Mat         // per rope: the sines of the opposite angles
	dx, spare kernel.Mat           // gradient by the residual stream [packed, hidden], and room for the next
	tasks     []func(l *lane)
}

// gradients takes the vector of gradients, all zero.
func (bp *backpass) gradients() {
	size := int64(0)
	if a := bp.b.Adapter; a != nil {
		size = a.Bytes
	} else {
		size = bp.Model.vector
	}
	bp.vector = bp.arena.Keep(device.Gradients, size)
	const step = 1 << 20
	bp.be.Each(int((size+step-1)/step), func(_, i int) {
		at := int64(i) * step
		bp.be.Zero(bp.vector.Slice(at, min(step, size-at)))
	})
	if bp.b.Adapter != nil {
		return
	}
	bp.base = &weights{layers: make([]layerWeights, len(bp.spec.Layers))}
	for i := range bp.params {
		p := &bp.params[i]
		mem, slot := bp.vector.Slice(bp.trained[i], p.trainedBytes()), bp.base.slot(p.Param)
		if slot.weight != nil {
			*slot.weight = kernel.Weight{Mem: mem, DType: kernel.F32, Out: int(p.Shape[0]), In: int(p.Shape[1])}
		} else {
			*slot.vector = mem
		}
	}
}

// trainedBytes is the size of a parameter's gradient.
func (p *placed) trainedBytes() int64 {
	if p.weight != nil {
		return kernel.WeightBytes(kernel.F32, int(p.Shape[0]), int(p.Shape[1]))
	}
	return p.Shape[0] * 4
}

// full takes a matrix with a row for each packed one, if it is wanted.
func (bp *backpass) full(wanted bool, cols int) kernel.Mat {
	if !wanted {
		return kernel.Mat{}
	}
	return bp.mat(bp.dx.Rows, cols)
}

// run shares the tasks among the workers.
func (bp *backpass) run() {
	tasks := bp.tasks
	bp.tasks = bp.tasks[:0]
	bp.each(len(tasks), func(*lane) {}, func(l *lane, i int) { tasks[i](l) })
}

// columns is the number of columns of one task.
const columns = 4 * kernel.Width

// outer adds tasks for dst = a^T * b.
func (bp *backpass) outer(dst, a, b kernel.Mat) {
	for from := 0; from < b.Cols; from += columns {
		to := min(from+columns, b.Cols)
		bp.tasks = append(bp.tasks, func(l *lane) { l.Outer(l.work, dst.ColRange(from, to), a, b.ColRange(from, to), false) })
	}
}

// parameters adds tasks for the gradients of a projection of layer i: x is what it is applied to, dy the gradient by what it gives, low and dlow are those of project
// and projectGrad. dw is the gradient of its matrix.
func (bp *backpass) parameters(ad *addition, x, dy, low, dlow kernel.Mat, dw func(*layerWeights) (*kernel.Weight, device.Mem), i int) {
	if ad != nil {
		at := func(offset int64, cols int) kernel.Mat {
			return kernel.Mat{Mem: bp.vector.Slice(offset, int64(ad.Rank*cols)*4), Rows: ad.Rank, Cols: cols, Stride: cols}
		}
		bp.outer(at(ad.A, ad.In), dlow, x)
		bp.outer(at(ad.B, ad.Out), low, dy)
	}
	if bp.base == nil {
		return
	}
	w, bias := dw(&bp.base.layers[i])
	for from := 0; from < w.Out; from += kernel.Width {
		bp.tasks = append(bp.tasks, func(l *lane) {
			l.Outer(l.work, w.Panel(from/kernel.Width), x, dy.ColRange(from, min(from+kernel.Width, w.Out)), false)
		})
	}
	if bias.Bytes() > 0 {
		bp.tasks = append(bp.tasks, func(l *lane) { l.SumRows(bias, dy) })
	}
}

// normWeight adds a task for the gradient of a norm of layer i.
func (bp *backpass) normWeight(dw device.Mem, dy, x kernel.Mat) {
	bp.tasks = append(bp.tasks, func(l *lane) { l.NormWeightGrad(dw, dy, x, bp.spec.NormEps) })
}

func (bp *backpass) normGrad(l *lane, dx, dy, x kernel.Mat, w device.Mem) {
	l.NormGrad(dx, dy, x, w, bp.spec.NormOffset, bp.spec.NormEps)
}

// layer takes the gradient of the residual stream, bp.dx, from behind layer i to before it.
func (bp *backpass) layer(i int) error {
	mark := bp.arena.Mark()
	defer bp.arena.Pop(mark)
	sv := bp.g.saved[i]
	if sv.v.Rows == 0 { // the layer is to be run again
		bp.g.activations(&sv, func(cols int) kernel.Mat { return bp.full(true, cols) }, i)
		bp.x = sv.x
		if err := bp.pass.layer(i, kernel.Mat{}, &sv); err != nil {
			return err
		}
	}
	ad := bp.pack(i)
	bp.feedForward(i, &sv, &ad)
	bp.hit(failpoint.Backward)
	bp.mixer(i, &sv, &ad)
	return bp.err()
}

// feedForward takes the gradient from behind layer i to between its mixer and its feed-forward.
func (bp *backpass) feedForward(i int, sv *saved, ad *additions) {
	mark := bp.arena.Mark()
	defer bp.arena.Pop(mark)
	spec, w, base := &bp.spec.Layers[i], &bp.weights.layers[i], bp.base != nil
	hidden, inner := bp.spec.Hidden, spec.MLP.Intermediate
	act := bp.full(base || ad[down] != nil, inner)
	dgate, dup := bp.full(base || ad[gate] != nil, inner), bp.full(base || ad[up] != nil, inner)
	h := bp.full(base || ad[gate] != nil || ad[up] != nil, hidden)
	dh := bp.full(base, hidden)
	dy := bp.dx
	if spec.PostNorms {
		dy = bp.full(base || ad[down] != nil, hidden)
	}
	dlow := bp.low(ad, gate, up, down)
	bp.eachBlock(func(l *lane, from, to int) {
		n := to - from
		dx, next, mid := bp.dx.RowRange(from, to), bp.spare.RowRange(from, to), sv.mid.RowRange(from, to)
		l.Copy(next, dx)
		if spec.PostNorms {
			d := l.own(dy, from, to, hidden)
			bp.normGrad(l, d, dx, sv.mlp.RowRange(from, to), w.mlpPostNorm)
			dx = d
		}
		a, dg, du := l.own(act, from, to, inner), l.own(dgate, from, to, inner), l.own(dup, from, to, inner)
		bp.projectGrad(l, a, dx, &w.down, false, ad[down], some(dlow[down], from, to))
		l.ActivateGrad(a, dg, du, sv.gate.RowRange(from, to), sv.up.RowRange(from, to), a, spec.MLP.Activation.kernel())
		d := l.own(dh, from, to, hidden)
		bp.projectGrad(l, d, dg, &w.gate, false, ad[gate], some(dlow[gate], from, to))
		bp.projectGrad(l, d, du, &w.up, true, ad[up], some(dlow[up], from, to))
		t := l.mat(n, hidden)
		bp.normGrad(l, t, d, mid, w.mlpNorm)
		l.Add(next, t)
		if h.Rows > 0 {
			bp.norm(l, h.RowRange(from, to), mid, w.mlpNorm)
		}
	})
	bp.parameters(ad[gate], h, dgate, sv.low[gate], dlow[gate], func(w *layerWeights) (*kernel.Weight, device.Mem) { return &w.gate, w.gateBias }, i)
	bp.parameters(ad[up], h, dup, sv.low[up], dlow[up], func(w *layerWeights) (*kernel.Weight, device.Mem) { return &w.up, w.upBias }, i)
	bp.parameters(ad[down], act, dy, sv.low[down], dlow[down], func(w *layerWeights) (*kernel.Weight, device.Mem) { return &w.down, w.downBias }, i)
	if base {
		bp.normWeight(bp.base.layers[i].mlpNorm, dh, sv.mid)
		if spec.PostNorms {
			bp.normWeight(bp.base.layers[i].mlpPostNorm, bp.dx, sv.mlp)
		}
	}
	bp.run()
	bp.dx, bp.spare = bp.spare, bp.dx
}

// low takes memory for the gradients by what the A of some projections give, where there is one.
func (bp *backpass) low(ad *additions, of ...projection) (dlow [numProjections]kernel.Mat) {
	for _, j := range of {
		if ad[j] != nil {
			dlow[j] = bp.full(true, ad[j].Rank)
		}
	}
	return dlow
}

// mixer takes the gradient from between the mixer and the feed-forward of layer i to before the layer.
func (bp *backpass) mixer(i int, sv *saved, ad *additions) {
	mark := bp.arena.Mark()
	defer bp.arena.Pop(mark)
	spec, w, base := &bp.spec.Layers[i], &bp.weights.layers[i], bp.base != nil
	a, hidden := spec.Attention, bp.spec.Hidden
	qs, kvs := a.Heads*a.HeadDim, a.KVHeads*a.HeadDim
	dy := bp.dx
	if spec.PostNorms {
		dy = bp.full(base || ad[attentionOut] != nil, hidden)
	}
	dout, dot := bp.full(true, qs), bp.full(true, a.Heads)
	q, k := sv.q, sv.k
	if a.QKNorm {
		q, k = bp.full(true, qs), bp.full(true, kvs)
	}
	h, dh := bp.full(base || ad[query] != nil || ad[key] != nil || ad[value] != nil, hidden), bp.full(base, hidden)
	dq, dk, dv := bp.full(base || ad[query] != nil, qs), bp.full(base || ad[key] != nil, kvs), bp.full(base || ad[value] != nil, kvs)
	dqn, dkn := bp.full(base && a.QKNorm, qs), bp.full(base && a.QKNorm, kvs) // by what the norms of queries and keys give
	dlow := bp.low(ad, query, key, value, attentionOut)
	bp.eachBlock(func(l *lane, from, to int) {
		dx := bp.dx.RowRange(from, to)
		if spec.PostNorms {
			d := l.own(dy, from, to, hidden)
			bp.normGrad(l, d, dx, sv.attn.RowRange(from, to), w.attnPostNorm)
			dx = d
		}
		d := dout.RowRange(from, to)
		bp.projectGrad(l, d, dx, &w.o, false, ad[attentionOut], some(dlow[attentionOut], from, to))
		l.RowDot(dot.RowRange(from, to), d, sv.o.RowRange(from, to), a.HeadDim)
		if a.QKNorm {
			bp.norm(l, q.RowRange(from, to), sv.q.RowRange(from, to), w.qNorm)
			bp.norm(l, k.RowRange(from, to), sv.k.RowRange(from, to), w.kNorm)
			l.Rope(q.RowRange(from, to), a.HeadDim, bp.b.Positions[from:to], bp.cos[a.Rope], bp.sin[a.Rope])
			l.Rope(k.RowRange(from, to), a.HeadDim, bp.b.Positions[from:to], bp.cos[a.Rope], bp.sin[a.Rope])
		}
	})
	bp.eachBlock(func(l *lane, from, to int) {
		x, next := sv.x.RowRange(from, to), bp.spare.RowRange(from, to)
		dq, dk, dv := l.own(dq, from, to, qs), l.own(dk, from, to, kvs), l.own(dv, from, to, kvs)
		l.AttendQueryGrad(l.work, dq, q.RowRange(from, to), k, sv.v, dout.RowRange(from, to), sv.stats.RowRange(from, to), dot.RowRange(from, to), from, bp.spans, a.kernel())
		l.AttendKeyGrad(l.work, dk, dv, q, k, sv.v, dout, sv.stats, dot, from, bp.spans, a.kernel())
		l.Rope(dq, a.HeadDim, bp.b.Positions[from:to], bp.cos[a.Rope], bp.back[a.Rope])
		l.Rope(dk, a.HeadDim, bp.b.Positions[from:to], bp.cos[a.Rope], bp.back[a.Rope])
		if a.QKNorm {
			if base {
				l.Copy(dqn.RowRange(from, to), dq)
				l.Copy(dkn.RowRange(from, to), dk)
			}
			bp.normGrad(l, dq, dq, sv.q.RowRange(from, to), w.qNorm)
			bp.normGrad(l, dk, dk, sv.k.RowRange(from, to), w.kNorm)
		}
		d := l.own(dh, from, to, hidden)
		bp.projectGrad(l, d, dq, &w.q, false, ad[query], some(dlow[query], from, to))
		bp.projectGrad(l, d, dk, &w.k, true, ad[key], some(dlow[key], from, to))
		bp.projectGrad(l, d, dv, &w.v, true, ad[value], some(dlow[value], from, to))
		bp.normGrad(l, next, d, x, w.attnNorm)
		l.Add(next, bp.dx.RowRange(from, to))
		if h.Rows > 0 {
			bp.norm(l, h.RowRange(from, to), x, w.attnNorm)
		}
	})
	bp.parameters(ad[query], h, dq, sv.low[query], dlow[query], func(w *layerWeights) (*kernel.Weight, device.Mem) { return &w.q, w.qBias }, i)
	bp.parameters(ad[key], h, dk, sv.low[key], dlow[key], func(w *layerWeights) (*kernel.Weight, device.Mem) { return &w.k, w.kBias }, i)
	bp.parameters(ad[value], h, dv, sv.low[value], dlow[value], func(w *layerWeights) (*kernel.Weight, device.Mem) { return &w.v, w.vBias }, i)
	bp.parameters(ad[attentionOut], sv.o, dy, sv.low[attentionOut], dlow[attentionOut], func(w *layerWeights) (*kernel.Weight, device.Mem) { return &w.o, w.oBias }, i)
	if base {
		g := &bp.base.layers[i]
		bp.normWeight(g.attnNorm, dh, sv.x)
		if spec.PostNorms {
			bp.normWeight(g.attnPostNorm, bp.dx, sv.attn)
		}
		if a.QKNorm {
			bp.normWeight(g.qNorm, dqn, sv.q)
			bp.normWeight(g.kNorm, dkn, sv.k)
		}
	}
	bp.run()
	bp.dx, bp.spare = bp.spare, bp.dx
}
