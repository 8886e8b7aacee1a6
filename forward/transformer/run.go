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
	"github.com/trainerrank/engine/internal/failpoint"
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
	logZ   device.Mem // of each packed row, float64; empty if no backward needs it
	blocks blocks
	idle   bool // no loop does anything: only memory is taken, since no cotangent is other than zero
	fault  failpoint.Fault
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
	if err := m.checkAdapter(b.Adapter); err != nil {
		return nil, err
	}
	p := m.newPass(ctx, b, arena, be)
	p.outputs()
	var g *graph
	if b.Grad {
		g = p.graph()
	}
	mark := arena.Mark()
	defer arena.Pop(mark)
	p.begin(kernel.WorkBytes(m.spec.headDim()))
	if err := p.layers(g); err != nil {
		return nil, err
	}
	p.hidden()
	p.score()
	if err := p.err(); err != nil {
		return nil, fmt.Errorf("head: %w", err)
	}
	res := p.tensors()
	if g != nil {
		res.Graph = g
	}
	return res, nil
}

func (m *Model) newPass(ctx context.Context, b *forward.Batch, arena device.Arena, be kernel.Backend) *pass {
	return &pass{Model: m, ctx: ctx, b: b, be: be, arena: arena}
}

// err says why the pass is not to go on, or nil.
func (p *pass) err() error {
	if err := p.fault.Err(); err != nil {
		return err
	}
	return p.ctx.Err()
}

// hit makes the pass fail if the fail-point does. In a rehearsal, which runs no loop, it does nothing.
func (p *pass) hit(point failpoint.Point) {
	if failpoint.Enabled {
		p.be.Each(1, func(int, int) { p.fault.Hit(point) })
	}
}

// layers embeds the tokens and runs all layers. The residual stream goes through the matrices of g, or if it has none stays in one.
func (p *pass) layers(g *graph) error {
	rows := len(p.b.Tokens)
	if g == nil || len(g.saved) == 0 {
		p.x = p.mat(rows, p.spec.Hidden)
	} else {
		p.x = g.saved[0].x
	}
	p.blocks = cut(rows, blockRows, p.be.Threads())
	p.eachBlock(func(l *lane, from, to int) {
		l.Embed(p.x.RowRange(from, to), &p.embed, p.b.Tokens[from:to], float32(p.spec.EmbedScale))
	})
	var none saved
	var seen []kind
	for i := range p.spec.Layers {
		if p.known(&seen, i) {
			continue
		}
		sv, out := &none, p.x
		if g != nil && len(g.saved) > 0 {
			sv, out = &g.saved[i], g.final
			if i+1 < len(g.saved) {
				out = g.saved[i+1].x
			}
		}
		if err := p.layer(i, out, sv); err != nil {
			return fmt.Errorf("layer %d of %d: %w", i+1, len(p.spec.Layers), err)
		}
	}
	return nil
}

// kind is all that the scratch of a layer depends on beside the rows.
type kind struct {
	attention Attention
	mlp       GatedMLP
	postNorms bool
	ranks     [numProjections]int // of what the adapter adds
}

// known says whether layer i is of a kind that a rehearsal has seen: it takes what that one took, and gives it back too, so that a deep model is rehearsed as fast as one
// with a layer of each kind. Outside of a rehearsal no layer is known.
func (p *pass) known(seen *[]kind, i int) bool {
	if _, rehearsal := p.be.(kernel.Rehearsal); !rehearsal {
		return false
	}
	l := &p.spec.Layers[i]
	k := kind{attention: *l.Attention, mlp: *l.MLP, postNorms: l.PostNorms}
	for _, lora := range loraOf(p.b.Adapter, i) {
		k.ranks[lora.Module%numProjections] = lora.Rank
	}
	if slices.Contains(*seen, k) {
		return true
	}
	*seen = append(*seen, k)
	return false
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
	if p.idle {
		return
	}
	p.be.Each(n, func(worker, i int) {
		if p.fault.Hit(failpoint.Block) && p.ctx.Err() == nil {
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
	p.each(p.blocks.count, func(l *lane) { fn(l, 0, widest(len(p.b.Tokens), blockRows, p.be.Threads())) }, func(l *lane, i int) {
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

// begin takes what lives for the whole pass: workspaces of so many bytes, and tables.
func (p *pass) begin(work int64) {
	p.work = p.arena.Scratch(work * int64(p.be.Threads()))
	for _, s := range p.b.Spans {
		p.spans = append(p.spans, kernel.Span{Parent: s.Parent, Start: s.Start, End: s.End, Offset: s.Offset})
	}
	for _, r := range p.spec.Ropes {
		cos, sin := p.ropeTable(r.Rotary, r.InvFreq())
		p.cos, p.sin = append(p.cos, cos), append(p.sin, sin)
	}
}

func (p *pass) ropeTable(rotary int, freq []float64) (cos, sin kernel.Mat) {
	n := maxPosition(p.b)
	cos, sin = p.mat(n, rotary/2), p.mat(n, rotary/2)
	p.be.Each((n+blockRows-1)/blockRows, func(_, i int) {
		from, to := i*blockRows, min((i+1)*blockRows, n)
		p.be.RopeTable(cos.RowRange(from, to), sin.RowRange(from, to), from, freq)
	})
	return cos, sin
}

// headDim is the widest head of any layer.
func (s *Spec) headDim() int {
	n := 0
	for _, l := range s.Layers {
		n = max(n, l.Attention.HeadDim)
	}
	return n
}

// layer runs layer i over all rows, from p.x to out, which may be p.x and then is p.x. What sv has room for is kept there; then out is another matrix. Without out
// only what sv has room for is computed.
func (p *pass) layer(i int, out kernel.Mat, sv *saved) error {
	spec, w := p.spec.Layers[i], &p.weights.layers[i]
	a := spec.Attention
	mark := p.arena.Mark()
	defer p.arena.Pop(mark)
	run := layerRun{Layer: spec, w: w, ad: p.pack(i), sv: sv, out: out, k: sv.k, v: sv.v}
	if run.k.Rows == 0 || a.QKNorm {
		run.k = p.mat(len(p.b.Tokens), a.KVHeads*a.HeadDim)
	}
	if run.v.Rows == 0 {
		run.v = p.mat(len(p.b.Tokens), a.KVHeads*a.HeadDim)
	}
	p.eachBlock(func(l *lane, from, to int) { p.keys(l, &run, from, to) })
	p.hit(failpoint.Layer)
	p.eachBlock(func(l *lane, from, to int) { p.block(l, &run, from, to) }, p.step)
	p.x = out
	return p.err()
}

// layerRun is a layer under way.
type layerRun struct {
	Layer
	w    *layerWeights
	ad   additions
	sv   *saved
	out  kernel.Mat
	k, v kernel.Mat // rotated keys, and values, of all rows
}

// step reports progress: a block went through a layer.
func (p *pass) step() {
	p.report.Lock()
	defer p.report.Unlock()
	p.steps++
	if p.b.Progress != nil {
		p.b.Progress(p.steps, len(p.spec.Layers)*p.blocks.count)
	}
}

func (p *pass) norm(l *lane, dst, src kernel.Mat, w device.Mem) {
	l.Norm(dst, src, w, p.spec.NormOffset, p.spec.NormEps)
}

// own is rows [from, to) of m, or if it has no rows scratch of that shape.
func (l *lane) own(m kernel.Mat, from, to, cols int) kernel.Mat {
	if m.Rows > 0 {
		return m.RowRange(from, to)
	}
	return l.mat(to-from, cols)
}

// some is rows [from, to) of m, or if it has none, none.
func some(m kernel.Mat, from, to int) kernel.Mat {
	if m.Rows > 0 {
		return m.RowRange(from, to)
	}
	return m
}

// keys computes keys and values of packed rows [from, to).
func (p *pass) keys(l *lane, r *layerRun, from, to int) {
	a := r.Attention
	h := l.mat(to-from, p.spec.Hidden)
	p.norm(l, h, p.x.RowRange(from, to), r.w.attnNorm)
	k, v := r.k.RowRange(from, to), r.v.RowRange(from, to)
	raw := k
	if r.sv.k.Rows > 0 {
		raw = r.sv.k.RowRange(from, to)
	}
	p.project(l, raw, h, &r.w.k, r.w.kBias, false, r.ad[key], some(r.sv.low[key], from, to))
	p.project(l, v, h, &r.w.v, r.w.vBias, false, r.ad[value], some(r.sv.low[value], from, to))
	if a.QKNorm {
		p.norm(l, k, raw, r.w.kNorm)
	}
	l.Rope(k, a.HeadDim, p.b.Positions[from:to], p.cos[a.Rope], p.sin[a.Rope])
}

// block runs packed rows [from, to) through the rest of a layer.
func (p *pass) block(l *lane, r *layerRun, from, to int) {
	w, sv, n := r.w, r.sv, to-from
	in, x := p.x.RowRange(from, to), some(r.out, from, to)
	mid := x
	if sv.mid.Rows > 0 {
		mid = sv.mid.RowRange(from, to)
	}
	if sv.x.Rows > 0 { // else they are the same
		l.Copy(mid, in)
	}
	h := l.mat(n, p.spec.Hidden)
	p.norm(l, h, in, w.attnNorm)
	l.scope(func() {
		a := r.Attention
		cols := a.Heads * a.HeadDim
		raw := l.own(sv.q, from, to, cols)
		q := raw
		if a.QKNorm && sv.q.Rows > 0 {
			q = l.mat(n, cols)
		}
		o := l.own(sv.o, from, to, cols)
		p.project(l, raw, h, &w.q, w.qBias, false, r.ad[query], some(sv.low[query], from, to))
		if a.QKNorm {
			p.norm(l, q, raw, w.qNorm)
		}
		l.Rope(q, a.HeadDim, p.b.Positions[from:to], p.cos[a.Rope], p.sin[a.Rope])
		l.Attend(l.work, o, some(sv.stats, from, to), q, r.k, r.v, from, p.spans, a.kernel())
		p.residual(l, mid, o, &w.o, w.oBias, r.ad[attentionOut], some(sv.low[attentionOut], from, to), r.PostNorms, w.attnPostNorm, some(sv.attn, from, to), h)
	})
	p.norm(l, h, mid, w.mlpNorm)
	if sv.mid.Rows > 0 && x.Rows > 0 {
		l.Copy(x, mid)
	}
	l.scope(func() {
		inner, act := r.MLP.Intermediate, r.MLP.Activation.kernel()
		var a kernel.Mat
		if sv.gate.Rows == 0 && r.ad[gate] == nil && r.ad[up] == nil {
			a = l.mat(n, inner)
			l.GatedMLP(l.work, a, h, &w.gate, &w.up, w.gateBias, w.upBias, act)
		} else {
			g, u := l.own(sv.gate, from, to, inner), l.own(sv.up, from, to, inner)
			p.project(l, g, h, &w.gate, w.gateBias, false, r.ad[gate], some(sv.low[gate], from, to))
			p.project(l, u, h, &w.up, w.upBias, false, r.ad[up], some(sv.low[up], from, to))
			if x.Rows == 0 && !r.PostNorms && r.ad[down] == nil {
				return // nothing more is kept
			}
			a = g
			if sv.gate.Rows > 0 {
				a = l.mat(n, inner)
			}
			l.Activate(a, g, u, act)
		}
		p.residual(l, x, a, &w.down, w.downBias, r.ad[down], some(sv.low[down], from, to), r.PostNorms, w.mlpPostNorm, some(sv.mlp, from, to), h)
	})
}

// residual adds to x w*src + bias and what an adapter adds, normed first if post. tmp has the shape of x; so has kept, if it has rows, where what is normed is
// kept. Without x only that is computed.
func (p *pass) residual(l *lane, x, src kernel.Mat, w *kernel.Weight, bias device.Mem, ad *addition, low kernel.Mat, post bool, norm device.Mem, kept, tmp kernel.Mat) {
	if !post && x.Rows > 0 {
		p.project(l, x, src, w, bias, true, ad, low)
		return
	}
	t := tmp
	if kept.Rows > 0 {
		t = kept
	}
	p.project(l, t, src, w, bias, false, ad, low)
	if x.Rows == 0 {
		return
	}
	p.norm(l, tmp, t, norm)
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
// requests share it. A pass without outputs only computes the normalisers that its backward needs.
func (p *pass) score() {
	k, any := 0, false
	for _, in := range p.b.Requests {
		any = any || in.Targets != nil
		if p.outs != nil {
			k = max(k, in.TopK)
			any = any || in.TopK > 0 || in.Logits
		}
	}
	if !any {
		return
	}
	widest := min(kernel.HeadRows, len(p.b.Tokens))
	most := min(widest, max(1, headTopK/max(1, k)))
	var scored []place
	p.be.Each(1, func(_, _ int) { scored = p.scored() })
	var parts blocks
	if len(scored) > 0 {
		parts = cut(len(scored), most, p.be.Threads())
	}
	run := func(l *lane, packed []int32, asks []kernel.Ask) {
		h := p.normed(l, packed)
		l.Head(l.work, l.arena.Scratch(kernel.HeadBytes(len(packed), k)), h, p.headWeight(), asks)
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
			if p.logZ.Bytes() > 0 {
				asks = append(asks, kernel.Ask{Row: int32(j), Kind: kernel.AskLogZ, Out: p.logZ.Slice(int64(packed[j])*8, 8)})
			}
		}
		run(l, packed, asks)
	})
}

func (m *Model) headWeight() *kernel.Weight {
	if m.spec.Tied {
		return &m.embed
	}
	return &m.head
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
	if p.outs != nil && (in.TopK > 0 || in.Logits) {
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
	if p.outs == nil {
		return list
	}
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
		out.NoGrad = !p.b.Grad
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
