package transformer

import (
	"context"
	"fmt"

	"gorgonia.org/tensor"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/forward/kernel"
)

// blockRows is the number of packed rows that run through a layer together. A pass holds the residual stream, the current layer's
// keys and values, and the intermediates of one block. No bit of a result depends on it.
const blockRows = 240

// pass is a forward under way: the same code on a real arena and backend, and in a rehearsal.
type pass struct {
	*Model
	ctx   context.Context
	b     *forward.Batch
	be    kernel.Backend
	arena device.Arena
	work  device.Mem   // workspace of the backend
	cos   []kernel.Mat // per rope: [positions, rotary/2]
	sin   []kernel.Mat
	spans []kernel.Span
	x     kernel.Mat // the residual stream [packed, hidden]
	outs  []outputs
	done  int // steps
	steps int
}

// outputs is the memory of one request's answers; what it does not want is empty.
type outputs struct {
	targets, topLogprobs, topTokens, logits, hidden device.Mem
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
	if err := p.score(); err != nil {
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

// mat takes scratch for a matrix.
func (p *pass) mat(rows, cols int) kernel.Mat {
	return kernel.NewMat(p.arena.Scratch(kernel.MatBytes(rows, cols)), rows, cols)
}

// scope runs fn and gives back the scratch that it took.
func (p *pass) scope(fn func()) {
	mark := p.arena.Mark()
	fn()
	p.arena.Pop(mark)
}

// begin takes what lives for the whole pass and embeds the tokens.
func (p *pass) begin() {
	headDim := 0
	for _, l := range p.spec.Layers {
		headDim = max(headDim, l.Attention.HeadDim)
	}
	p.work = p.arena.Scratch(kernel.WorkBytes(p.be.Threads(), headDim))
	n := maxPosition(p.b)
	for _, r := range p.spec.Ropes {
		cos, sin := p.mat(n, r.Rotary/2), p.mat(n, r.Rotary/2)
		p.be.RopeTable(cos, sin, r.InvFreq())
		p.cos, p.sin = append(p.cos, cos), append(p.sin, sin)
	}
	for _, s := range p.b.Spans {
		p.spans = append(p.spans, kernel.Span{Parent: s.Parent, Start: s.Start, End: s.End, Offset: s.Offset})
	}
	rows := len(p.b.Tokens)
	p.x = p.mat(rows, p.spec.Hidden)
	p.be.Embed(p.x, &p.embed, p.b.Tokens, float32(p.spec.EmbedScale))
	p.steps = len(p.layers) * ((rows + blockRows - 1) / blockRows)
}

// step honours the context and reports progress. It is called once per layer and block.
func (p *pass) step() error {
	if err := p.ctx.Err(); err != nil {
		return err
	}
	if p.b.Progress != nil {
		p.b.Progress(p.done, p.steps)
	}
	p.done++
	return nil
}

// layer runs layer i over all rows, a block at a time. A block needs the keys of its own rows and of rows before it, and parents
// are packed before their children, so one walk is enough.
func (p *pass) layer(i int) error {
	l := p.spec.Layers[i]
	kv := l.Attention.KVHeads * l.Attention.HeadDim
	mark := p.arena.Mark()
	defer p.arena.Pop(mark)
	k, v := p.mat(p.x.Rows, kv), p.mat(p.x.Rows, kv)
	for from := 0; from < p.x.Rows; from += blockRows {
		if err := p.step(); err != nil {
			return err
		}
		p.scope(func() { p.block(l, &p.layers[i], from, min(from+blockRows, p.x.Rows), k, v) })
	}
	return nil
}

func (p *pass) norm(dst, src kernel.Mat, w device.Mem) {
	p.be.Norm(dst, src, w, p.spec.NormOffset, p.spec.NormEps)
}

// block runs packed rows [from, to) through a layer.
func (p *pass) block(l Layer, w *layerWeights, from, to int, k, v kernel.Mat) {
	x, n := p.x.RowRange(from, to), to-from
	h := p.mat(n, p.spec.Hidden)
	p.norm(h, x, w.attnNorm)
	p.scope(func() { p.attention(l, w, h, x, from, to, k, v) })
	p.norm(h, x, w.mlpNorm)
	p.scope(func() {
		act := p.mat(n, l.MLP.Intermediate)
		p.be.GatedMLP(p.work, act, h, &w.gate, &w.up, w.gateBias, w.upBias, l.MLP.Activation.kernel())
		p.residual(x, act, &w.down, w.downBias, l.PostNorms, w.mlpPostNorm, h)
	})
}

// attention adds the mixer's output for h to x.
func (p *pass) attention(l Layer, w *layerWeights, h, x kernel.Mat, from, to int, k, v kernel.Mat) {
	a, n := l.Attention, to-from
	pos := p.b.Positions[from:to]
	k1, v1 := k.RowRange(from, to), v.RowRange(from, to)
	q, o := p.mat(n, a.Heads*a.HeadDim), p.mat(n, a.Heads*a.HeadDim)
	p.be.Linear(p.work, q, h, &w.q, w.qBias, false)
	p.be.Linear(p.work, k1, h, &w.k, w.kBias, false)
	p.be.Linear(p.work, v1, h, &w.v, w.vBias, false)
	if a.QKNorm {
		p.norm(q, q, w.qNorm)
		p.norm(k1, k1, w.kNorm)
	}
	p.be.Rope(q, a.HeadDim, pos, p.cos[a.Rope], p.sin[a.Rope])
	p.be.Rope(k1, a.HeadDim, pos, p.cos[a.Rope], p.sin[a.Rope])
	p.be.Attend(p.work, o, q, k, v, from, p.spans, a.kernel())
	p.residual(x, o, &w.o, w.oBias, l.PostNorms, w.attnPostNorm, h)
}

// residual adds w*src + bias to x, normed first if post. tmp has the shape of x.
func (p *pass) residual(x, src kernel.Mat, w *kernel.Weight, bias device.Mem, post bool, norm device.Mem, tmp kernel.Mat) {
	if !post {
		p.be.Linear(p.work, x, src, w, bias, true)
		return
	}
	p.be.Linear(p.work, tmp, src, w, bias, false)
	p.norm(tmp, tmp, norm)
	p.be.Add(x, tmp)
}

// hidden answers the requests that want hidden states: the residual stream after the final norm.
func (p *pass) hidden() {
	var rows []int32
	for r, o := range p.outs {
		if o.hidden.Bytes() == 0 {
			continue
		}
		rows = p.b.Gather(r, rows[:0])
		for at := 0; at < len(rows); at += blockRows {
			part := rows[at:min(at+blockRows, len(rows))]
			p.scope(func() {
				h := p.normed(part)
				size := int64(p.spec.Hidden) * 4
				p.be.Store(o.hidden.Slice(int64(at)*size, int64(len(part))*size), h)
			})
		}
	}
}

// normed takes scratch for some rows of the residual stream after the final norm.
func (p *pass) normed(rows []int32) kernel.Mat {
	h := p.mat(len(rows), p.spec.Hidden)
	p.be.CopyRows(h, p.x, rows)
	p.norm(h, h, p.finalNorm)
	return h
}

// score answers the requests that want something of the head. Rows are scored only where an input asks, each once, however many
// requests share it.
func (p *pass) score() error {
	head := &p.head
	if p.spec.Tied {
		head = &p.embed
	}
	var rows []int32
	var asks []kernel.Ask
	k := 0
	flush := func() error {
		if len(rows) == 0 {
			return nil
		}
		if err := p.ctx.Err(); err != nil {
			return err
		}
		p.scope(func() {
			h := p.normed(rows)
			scratch := p.arena.Scratch(kernel.HeadBytes(p.be.Threads(), len(rows), k))
			p.be.Head(p.work, scratch, h, head, asks)
		})
		rows, asks, k = rows[:0], asks[:0], 0
		return nil
	}
	for _, s := range p.b.Spans {
		for pos := s.Start; pos < s.End; pos++ {
			before := len(asks)
			for _, r := range s.Rows {
				asks = p.asks(asks, int32(len(rows)), r, pos)
			}
			if len(asks) == before {
				continue
			}
			rows = append(rows, int32(s.Offset+pos-s.Start))
			for _, a := range asks[before:] {
				if a.Kind == kernel.AskTopK {
					k = max(k, int(a.Arg))
				}
			}
			if len(rows) == kernel.HeadRows || len(rows)*k >= headTopK {
				if err := flush(); err != nil {
					return err
				}
			}
		}
	}
	return flush()
}

// headTopK bounds rows times k of one call of the head, so that a large k does not take memory for HeadRows rows of it.
const headTopK = 1 << 15

// asks appends what request r wants of the head at a position. row is the row of the head's matrix.
func (p *pass) asks(list []kernel.Ask, row int32, r, pos int) []kernel.Ask {
	in, o := p.b.Requests[r], &p.outs[r]
	cell := func(m device.Mem, i, n int) device.Mem { return m.Slice(int64(i)*int64(n)*4, int64(n)*4) }
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
