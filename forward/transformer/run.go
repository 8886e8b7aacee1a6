package transformer

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"gorgonia.org/tensor"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/forward/kernel"
)

// blockRows is the most packed rows that run through a layer together. No bit of a result depends on it.
const blockRows = kernel.HeadRows

// pass is a forward under way: the same code on a real arena and backend, and in a rehearsal.
//
// Workers share the packed rows block by block. A layer is two loops over the blocks: keys and values of all rows first, then the rest. A pass
// holds the residual stream, the current layer's keys and values, and per worker the intermediates of one block.
type pass struct {
	*Model
	ctx    context.Context
	b      *forward.Batch
	be     kernel.Backend
	arena  device.Arena
	work   device.Mem   // a workspace per worker
	cos    []kernel.Mat // per rope: [positions, rotary/2]
	sin    []kernel.Mat
	spans  []kernel.Span
	x      kernel.Mat // the residual stream [packed, hidden]
	outs   []outputs
	blocks blocks
	report sync.Mutex // held while progress is reported
	steps  int        // done
}

// outputs is the memory of one request's answers; what it does not want is empty.
type outputs struct {
	targets, topLogprobs, topTokens, logits, hidden device.Mem
}

// lane is what a worker has for a block: the backend, memory of its own, and the backend's workspace.
type lane struct {
	kernel.Backend
	arena device.Arena
	work  device.Mem
}

func (m *Model) run(ctx context.Context, b *forward.Batch, arena device.Arena, be kernel.Backend) (*forward.Pass, error) {
	if b.Grad {
		return nil, fmt.Errorf("forward: gradients are not built yet")
	}
	p := &pass{Model: m, ctx: ctx, b: b, be: be, arena: arena}
	p.outputs()
	mark := arena.Mark()
	defer arena.Pop(mark)
	p.begin()
	for i := range m.spec.Layers {
		if err := p.layer(i); err != nil {
			return nil, fmt.Errorf("layer %d of %d: %w", i+1, len(m.spec.Layers), err)
		}
	}
	p.hidden()
	p.score()
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("head: %w", err)
	}
	return p.tensors(), nil
}

// outputs takes the memory of all answers, before any scratch: they are there until the end, so the peak of the pass is their
// sum plus the peak of the scratch.
func (p *pass) outputs() {
	keep := func(rows, cols int) device.Mem { return p.arena.Keep(device.Outputs, int64(rows)*int64(cols)*4) }
	for r, in := range p.b.Requests {
		n := p.b.RowLen(r)
		var o outputs
		if in.Targets != nil {
			o.targets = keep(n, in.Width())
			p.be.Zero(o.targets) // ignored labels score 0
		}
		if in.TopK > 0 {
			o.topLogprobs, o.topTokens = keep(n, in.TopK), keep(n, in.TopK)
		}
		if in.Logits {
			o.logits = keep(n, p.spec.Vocab)
		}
		if in.HiddenStates {
			o.hidden = keep(n, p.spec.Hidden)
		}
		p.outs = append(p.outs, o)
	}
}

func (l *lane) mat(rows, cols int) kernel.Mat {
	return kernel.NewMat(l.arena.Scratch(kernel.MatBytes(rows, cols)), rows, cols)
}

func (p *pass) mat(rows, cols int) kernel.Mat {
	return kernel.NewMat(p.arena.Scratch(kernel.MatBytes(rows, cols)), rows, cols)
}

// scope runs fn and gives back the scratch that it took.
func (l *lane) scope(fn func()) {
	mark := l.arena.Mark()
	fn()
	l.arena.Pop(mark)
}

// each runs fn for every i < n on the workers. What fn takes from its lane is measured on a rehearsal of largest, and taken from the arena for
// every worker before the first starts. Once the context has ended, fn is not called any more.
func (p *pass) each(n int, largest func(l *lane), fn func(l *lane, i int)) {
	c := device.NewCounter()
	largest(&lane{kernel.Rehearsal(1), c, device.Mem{}})
	size := c.Sizes()[device.Scratch]
	mark := p.arena.Mark()
	defer p.arena.Pop(mark)
	all := p.arena.Scratch(size * int64(p.be.Threads()))
	p.be.Each(n, func(worker, i int) {
		if p.ctx.Err() == nil {
			fn(&lane{p.be, device.NewStack(part(all, worker, size)), p.workspace(worker)}, i)
		}
	})
}

func part(m device.Mem, i int, size int64) device.Mem { return m.Slice(int64(i)*size, size) }

func (p *pass) workspace(worker int) device.Mem {
	return part(p.work, worker, p.work.Bytes()/int64(p.be.Threads()))
}

// eachBlock runs fn for every block of packed rows [from, to), and then what follows. The last block is first: its rows see the most
// keys, so no worker is left alone with it at the end.
func (p *pass) eachBlock(fn func(l *lane, from, to int), then ...func()) {
	p.each(p.blocks.count, func(l *lane) { fn(l, 0, widest(p.x.Rows, blockRows, p.be.Threads())) }, func(l *lane, i int) {
		from, to := p.blocks.at(p.blocks.count - 1 - i)
		fn(l, from, to)
		for _, f := range then {
			f()
		}
	})
}

// blocks are n rows in count blocks of about equal size, whole tiles but for the last, if they allow.
type blocks struct{ n, count, tile int }

// tileRows is the number of rows of a tile of the widest kernel.
const tileRows = 12

// cut divides n rows into blocks of at most most rows: as many for every worker, as far as there are tiles. Equal blocks, since a worker that has a tile
// more than another is waited for in every layer.
func cut(n, most, workers int) blocks {
	count := (n + most - 1) / most
	count = min((count+workers-1)/workers*workers, (n+tileRows-1)/tileRows)
	if whole := ((n+count-1)/count + tileRows - 1) / tileRows * tileRows; whole > most {
		return blocks{n, max(count, (n+most-1)/most), 1}
	}
	return blocks{n, count, tileRows}
}

// at is the rows [from, to) of block i. None is empty, and none is longer than the rows of one, rounded up to tiles.
func (b blocks) at(i int) (from, to int) {
	end := func(i int) int {
		unit := b.tile * b.count
		return min(b.n, (i*b.n+unit-1)/unit*b.tile)
	}
	return end(i), end(i + 1)
}

// widest is the most rows of a block that cut makes of n rows or fewer. Workers take memory for as many: cut makes smaller blocks of 481 rows
// than of 480, and a request more must never need less.
func widest(n, most, workers int) int {
	return min(n, most, ((n+workers-1)/workers+11)/12*12)
}

// begin takes what lives for the whole pass and embeds the tokens.
func (p *pass) begin() {
	headDim := 0
	for _, l := range p.spec.Layers {
		headDim = max(headDim, l.Attention.HeadDim)
	}
	p.work = p.arena.Scratch(kernel.WorkBytes(headDim) * int64(p.be.Threads()))
	for _, s := range p.b.Spans {
		p.spans = append(p.spans, kernel.Span{Parent: s.Parent, Start: s.Start, End: s.End, Offset: s.Offset})
	}
	n := maxPosition(p.b)
	for _, r := range p.spec.Ropes {
		cos, sin, freq := p.mat(n, r.Rotary/2), p.mat(n, r.Rotary/2), r.InvFreq()
		p.be.Each((n+blockRows-1)/blockRows, func(_, i int) {
			from, to := i*blockRows, min((i+1)*blockRows, n)
			p.be.RopeTable(cos.RowRange(from, to), sin.RowRange(from, to), from, freq)
		})
		p.cos, p.sin = append(p.cos, cos), append(p.sin, sin)
	}
	p.x = p.mat(len(p.b.Tokens), p.spec.Hidden)
	p.blocks = cut(p.x.Rows, blockRows, p.be.Threads())
	p.eachBlock(func(l *lane, from, to int) {
		l.Embed(p.x.RowRange(from, to), &p.embed, p.b.Tokens[from:to], float32(p.spec.EmbedScale))
	})
}

// layer runs layer i over all rows.
func (p *pass) layer(i int) error {
	spec, w := p.spec.Layers[i], &p.layers[i]
	kv := spec.Attention.KVHeads * spec.Attention.HeadDim
	mark := p.arena.Mark()
	defer p.arena.Pop(mark)
	k, v := p.mat(p.x.Rows, kv), p.mat(p.x.Rows, kv)
	p.eachBlock(func(l *lane, from, to int) { p.keys(l, spec, w, from, to, k, v) })
	p.eachBlock(func(l *lane, from, to int) { p.block(l, spec, w, from, to, k, v) }, p.step)
	return p.ctx.Err()
}

// step reports progress: a block went through a layer.
func (p *pass) step() {
	p.report.Lock()
	defer p.report.Unlock()
	p.steps++
	if p.b.Progress != nil {
		p.b.Progress(p.steps, len(p.layers)*p.blocks.count)
	}
}

func (p *pass) norm(l *lane, dst, src kernel.Mat, w device.Mem) {
	l.Norm(dst, src, w, p.spec.NormOffset, p.spec.NormEps)
}

// keys computes keys and values of packed rows [from, to).
func (p *pass) keys(l *lane, spec Layer, w *layerWeights, from, to int, k, v kernel.Mat) {
	a := spec.Attention
	h := l.mat(to-from, p.spec.Hidden)
	p.norm(l, h, p.x.RowRange(from, to), w.attnNorm)
	k, v = k.RowRange(from, to), v.RowRange(from, to)
	l.Linear(l.work, k, h, &w.k, w.kBias, false)
	l.Linear(l.work, v, h, &w.v, w.vBias, false)
	if a.QKNorm {
		p.norm(l, k, k, w.kNorm)
	}
	l.Rope(k, a.HeadDim, p.b.Positions[from:to], p.cos[a.Rope], p.sin[a.Rope])
}

// block runs packed rows [from, to) through the rest of a layer.
func (p *pass) block(l *lane, spec Layer, w *layerWeights, from, to int, k, v kernel.Mat) {
	x, n := p.x.RowRange(from, to), to-from
	h := l.mat(n, p.spec.Hidden)
	p.norm(l, h, x, w.attnNorm)
	l.scope(func() {
		a := spec.Attention
		q, o := l.mat(n, a.Heads*a.HeadDim), l.mat(n, a.Heads*a.HeadDim)
		l.Linear(l.work, q, h, &w.q, w.qBias, false)
		if a.QKNorm {
			p.norm(l, q, q, w.qNorm)
		}
		l.Rope(q, a.HeadDim, p.b.Positions[from:to], p.cos[a.Rope], p.sin[a.Rope])
		l.Attend(l.work, o, kernel.Mat{}, q, k, v, from, p.spans, a.kernel())
		p.residual(l, x, o, &w.o, w.oBias, spec.PostNorms, w.attnPostNorm, h)
	})
	p.norm(l, h, x, w.mlpNorm)
	l.scope(func() {
		act := l.mat(n, spec.MLP.Intermediate)
		l.GatedMLP(l.work, act, h, &w.gate, &w.up, w.gateBias, w.upBias, spec.MLP.Activation.kernel())
		p.residual(l, x, act, &w.down, w.downBias, spec.PostNorms, w.mlpPostNorm, h)
	})
}

// residual adds w*src + bias to x, normed first if post. tmp has the shape of x.
func (p *pass) residual(l *lane, x, src kernel.Mat, w *kernel.Weight, bias device.Mem, post bool, norm device.Mem, tmp kernel.Mat) {
	if !post {
		l.Linear(l.work, x, src, w, bias, true)
		return
	}
	l.Linear(l.work, tmp, src, w, bias, false)
	p.norm(l, tmp, tmp, norm)
	l.Add(x, tmp)
}

// normed takes scratch for some rows of the residual stream after the final norm.
func (p *pass) normed(l *lane, rows []int32) kernel.Mat {
	h := l.mat(len(rows), p.spec.Hidden)
	l.CopyRows(h, p.x, rows)
	p.norm(l, h, h, p.finalNorm)
	return h
}

// hidden answers the requests that want hidden states: the residual stream after the final norm.
func (p *pass) hidden() {
	type piece struct {
		rows []int32
		to   device.Mem
	}
	var pieces []piece
	most, size := 0, int64(p.spec.Hidden)*4
	for r, o := range p.outs {
		if o.hidden.Bytes() == 0 {
			continue
		}
		most = max(most, min(p.b.RowLen(r), blockRows))
		p.be.Each(1, func(_, _ int) {
			rows := p.b.Gather(r, nil)
			for at := 0; at < len(rows); at += blockRows {
				part := rows[at:min(at+blockRows, len(rows))]
				pieces = append(pieces, piece{part, o.hidden.Slice(int64(at)*size, int64(len(part))*size)})
			}
		})
	}
	if most == 0 {
		return
	}
	p.each(len(pieces), func(l *lane) { p.normed(l, make([]int32, most)) }, func(l *lane, i int) {
		l.Store(pieces[i].to, p.normed(l, pieces[i].rows))
	})
}

// headTopK bounds rows times k of one call of the head, so that a large k does not take memory for HeadRows rows of it.
const headTopK = 1 << 15

// score answers the requests that want something of the head. Rows are scored only where an input asks, each once, however many
// requests share it.
func (p *pass) score() {
	k, any := 0, false
	for _, in := range p.b.Requests {
		k = max(k, in.TopK)
		any = any || in.Targets != nil || in.TopK > 0 || in.Logits
	}
	if !any {
		return
	}
	widest := min(kernel.HeadRows, p.x.Rows)
	most := min(widest, max(1, headTopK/max(1, k)))
	head := &p.head
	if p.spec.Tied {
		head = &p.embed
	}
	var scored []place
	p.be.Each(1, func(_, _ int) { scored = p.scored() })
	var parts blocks
	if len(scored) > 0 {
		parts = cut(len(scored), most, p.be.Threads())
	}
	run := func(l *lane, packed []int32, asks []kernel.Ask) {
		h := p.normed(l, packed)
		l.Head(l.work, l.arena.Scratch(kernel.HeadBytes(len(packed), k)), h, head, asks)
	}
	p.each(parts.count, func(l *lane) {
		// Fewer rows go together if k is large. A request more must never need less, so that is not taken into account.
		p.normed(l, make([]int32, widest))
		top := min(widest*k, max(headTopK, k)) // the k largest of each of some rows take as much as so many largest of one
		l.arena.Scratch(kernel.HeadBytes(widest, 0) + kernel.HeadBytes(1, top) - kernel.HeadBytes(1, 0))
	}, func(l *lane, i int) {
		from, to := parts.at(i)
		part := scored[from:to]
		packed := make([]int32, len(part))
		var asks []kernel.Ask
		for j, at := range part {
			s := &p.b.Spans[at.span]
			packed[j] = int32(s.Offset + at.pos - s.Start)
			for _, r := range s.Rows {
				asks = p.asks(asks, int32(j), r, at.pos)
			}
		}
		run(l, packed, asks)
	})
}

// place is a packed row: a position of a span.
type place struct{ span, pos int }

// scored lists the packed rows of which something is wanted of the head.
func (p *pass) scored() []place {
	var list []place
	for i, s := range p.b.Spans {
		for pos := s.Start; pos < s.End; pos++ {
			if slices.ContainsFunc(s.Rows, func(r int) bool { return p.wanted(r, pos) }) {
				list = append(list, place{i, pos})
			}
		}
	}
	return list
}

// wanted says whether request r wants something of the head at a position.
func (p *pass) wanted(r, pos int) bool {
	in := p.b.Requests[r]
	if in.TopK > 0 || in.Logits {
		return true
	}
	if in.Targets == nil {
		return false
	}
	w := in.Width()
	return slices.ContainsFunc(in.Targets[pos*w:(pos+1)*w], func(label int32) bool { return label != forward.IgnoreLabel })
}

// asks appends what request r wants of the head at a position. row is the row of the head's matrix.
func (p *pass) asks(list []kernel.Ask, row int32, r, pos int) []kernel.Ask {
	in, o := p.b.Requests[r], &p.outs[r]
	cell := func(m device.Mem, i, n int) device.Mem { return part(m, i, int64(n)*4) }
	if in.Targets != nil {
		w := in.Width()
		for j, label := range in.Targets[pos*w : (pos+1)*w] {
			if label != forward.IgnoreLabel {
				list = append(list, kernel.Ask{Row: row, Kind: kernel.AskTarget, Arg: label, Out: cell(o.targets, pos*w+j, 1)})
			}
		}
	}
	if in.TopK > 0 {
		list = append(list, kernel.Ask{Row: row, Kind: kernel.AskTopK, Arg: int32(in.TopK), Out: cell(o.topLogprobs, pos, in.TopK), IDs: cell(o.topTokens, pos, in.TopK)})
	}
	if in.Logits {
		list = append(list, kernel.Ask{Row: row, Kind: kernel.AskLogits, Out: cell(o.logits, pos, p.spec.Vocab)})
	}
	return list
}

// tensors dresses the outputs as tensors. A rehearsal has none.
func (p *pass) tensors() *forward.Pass {
	res := &forward.Pass{Outputs: make([]forward.Output, len(p.outs))}
	for r, o := range p.outs {
		in, n := p.b.Requests[r], p.b.RowLen(r)
		out := &res.Outputs[r]
		out.NoGrad = true
		if o.targets.Real() {
			shape := []int{n}
			if in.Width() > 1 {
				shape = append(shape, in.Width())
			}
			out.TargetLogprobs = dense(o.targets.F32(), shape...)
		}
		if o.topLogprobs.Real() {
			out.TopK = &forward.TopK{Logprobs: dense(o.topLogprobs.F32(), n, in.TopK), Tokens: dense(o.topTokens.I32(), n, in.TopK)}
		}
		if o.logits.Real() {
			out.Logits = dense(o.logits.F32(), n, p.spec.Vocab)
		}
		if o.hidden.Real() {
			out.HiddenStates = dense(o.hidden.F32(), n, p.spec.Hidden)
		}
	}
	return res
}

func dense[T float32 | int32](data []T, shape ...int) *tensor.Dense {
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(data))
}
