package transformer

import (
	"context"
	"errors"
	"fmt"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/forward/kernel"
)

// graph is what a pass with gradients leaves for its backward: nothing of it is memory of its own.
type graph struct {
	*Model
	b     *forward.Batch
	saved []saved // per layer; none if the pass is to be run again
	final kernel.Mat
	logZ  device.Mem
	used  bool
}

// saved are the activations of one layer that its backward reads, of all packed rows. With [forward.Layer] only x is there.
type saved struct {
	x           kernel.Mat                 // the residual stream before the layer
	q, k        kernel.Mat                 // before their norms, or without such rotated
	v, o, stats kernel.Mat                 // values; what the heads give, and the statistics of their weights
	attn, mlp   kernel.Mat                 // what the mixer and the feed-forward add, before their post norms; only with those
	mid         kernel.Mat                 // the residual stream between mixer and feed-forward
	gate, up    kernel.Mat                 // before the activation
	low         [numProjections]kernel.Mat // what the adapter's A gives, scaled
}

// matrices hands out matrices with a row for each packed one.
type matrices func(cols int) kernel.Mat

// graph takes the memory that a pass keeps for its backward.
func (p *pass) graph() *graph {
	g := &graph{Model: p.Model, b: p.b}
	if p.b.Keep == forward.Replay {
		return g
	}
	rows := len(p.b.Tokens)
	take := func(cols int) kernel.Mat {
		return kernel.NewMat(p.arena.Keep(device.Retained, kernel.MatBytes(rows, cols)), rows, cols)
	}
	g.take(take, p.b.Keep)
	g.logZ = p.keepLogZ(func(bytes int64) device.Mem { return p.arena.Keep(device.Retained, bytes) })
	p.logZ = g.logZ
	return g
}

func (g *graph) take(take matrices, keep forward.Retention) {
	g.saved = make([]saved, len(g.spec.Layers))
	for i := range g.saved {
		g.saved[i].x = take(g.spec.Hidden)
		if keep != forward.Layer {
			g.activations(&g.saved[i], take, i)
		}
	}
	g.final = take(g.spec.Hidden)
}

// activations takes memory for all that the backward of layer i reads beside its input.
func (g *graph) activations(sv *saved, take matrices, i int) {
	l := &g.spec.Layers[i]
	a := l.Attention
	sv.q, sv.k, sv.v = take(a.Heads*a.HeadDim), take(a.KVHeads*a.HeadDim), take(a.KVHeads*a.HeadDim)
	sv.o, sv.stats = take(a.Heads*a.HeadDim), take(2*a.Heads)
	if l.PostNorms {
		sv.attn, sv.mlp = take(g.spec.Hidden), take(g.spec.Hidden)
	}
	sv.mid, sv.gate, sv.up = take(g.spec.Hidden), take(l.MLP.Intermediate), take(l.MLP.Intermediate)
	for _, ad := range loraOf(g.b.Adapter, i) {
		sv.low[ad.Module%numProjections] = take(ad.Rank)
	}
}

// keepLogZ takes memory for the normalisers of all rows, if any input wants labels scored.
func (p *pass) keepLogZ(take func(bytes int64) device.Mem) device.Mem {
	for _, in := range p.b.Requests {
		if in.Targets != nil {
			return take(int64(len(p.b.Tokens)) * 8)
		}
	}
	return device.Mem{}
}

// Backward implements [forward.Graph].
func (g *graph) Backward(ctx context.Context, arena device.Arena, grads []forward.OutputGrad) (grad device.Mem, err error) {
	if g.used {
		return device.Mem{}, errors.New("backward: the graph was used already")
	}
	if err := g.check(grads); err != nil {
		return device.Mem{}, err
	}
	err = g.backend.Do(func() error {
		grad, err = g.backward(ctx, arena, g.backend, grads)
		return err
	})
	g.used = err == nil
	return grad, err
}

// check says why cotangents do not belong to the outputs.
func (g *graph) check(grads []forward.OutputGrad) error {
	if len(grads) != len(g.b.Requests) {
		return fmt.Errorf("backward: cotangents of %d outputs, but there are %d", len(grads), len(g.b.Requests))
	}
	for r := range grads {
		in, n := g.b.Requests[r], g.b.RowLen(r)
		for _, c := range []struct {
			what   string
			asked  bool
			length int
			want   int
		}{
			{"target logprobs", in.Targets != nil, len(grads[r].TargetLogprobs), n * in.Width()},
			{"logits", in.Logits, len(grads[r].Logits), n * g.spec.Vocab},
			{"hidden states", in.HiddenStates, len(grads[r].HiddenStates), n * g.spec.Hidden},
		} {
			switch {
			case c.length == 0: // nil is zero
			case !c.asked:
				return fmt.Errorf("backward: output %d has a cotangent for its %s, which were not asked for", r, c.what)
			case c.length != c.want:
				return fmt.Errorf("backward: output %d has %d cotangents for its %s, but %d values", r, c.length, c.what, c.want)
			}
		}
	}
	return nil
}

// backward is the same code on a real arena and backend, and in a rehearsal, which has no cotangents.
func (g *graph) backward(ctx context.Context, arena device.Arena, be kernel.Backend, grads []forward.OutputGrad) (device.Mem, error) {
	b := *g.b
	b.Progress = nil // it was told of the forward
	p := g.newPass(ctx, &b, arena, be)
	bp := &backpass{pass: p, g: g, grads: grads}
	bp.gradients()
	be.Each(1, func(_, _ int) {
		bp.rows, bp.scored = bp.wishes()
		p.idle = len(bp.rows) == 0
	})
	mark := arena.Mark()
	defer arena.Pop(mark)
	p.begin(kernel.GradWorkBytes(g.spec.headDim()))
	for _, r := range g.spec.Ropes {
		freq := r.InvFreq()
		for i := range freq {
			freq[i] = -freq[i]
		}
		_, sin := p.ropeTable(r.Rotary, freq)
		bp.back = append(bp.back, sin)
	}
	p.blocks = cut(len(g.b.Tokens), blockRows, be.Threads())
	again := *g // with what a replay computes
	bp.g = &again
	if len(g.saved) == 0 {
		again.take(func(cols int) kernel.Mat { return p.mat(len(g.b.Tokens), cols) }, forward.Layer)
		again.logZ = p.keepLogZ(arena.Scratch)
		p.logZ = again.logZ
		if err := p.layers(&again); err != nil {
			return device.Mem{}, fmt.Errorf("replay: %w", err)
		}
		p.score()
	}
	p.x = again.final
	bp.dx, bp.spare = p.mat(p.x.Rows, g.spec.Hidden), p.mat(p.x.Rows, g.spec.Hidden)
	bp.head()
	var seen []kind
	for i := len(g.spec.Layers) - 1; i >= 0; i-- {
		if p.known(&seen, i) {
			continue
		}
		if err := bp.layer(i); err != nil {
			return device.Mem{}, fmt.Errorf("backward: layer %d of %d: %w", i+1, len(g.spec.Layers), err)
		}
	}
	bp.embedding()
	if err := p.err(); err != nil {
		return device.Mem{}, fmt.Errorf("backward: %w", err)
	}
	return bp.vector, nil
}
