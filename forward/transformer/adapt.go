package transformer

import (
	"fmt"
	"sort"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/forward/kernel"
)

// projection is a matrix of a layer to which an adapter may add.
type projection int

// The projections, in execution order.
const (
	query projection = iota
	key
	value
	attentionOut
	gate
	up
	down

	numProjections = int(down) + 1
)

// modules lists the projections of all layers.
func (s *Spec) modules() []forward.Module {
	var list []forward.Module
	for i, l := range s.Layers {
		a, inner := l.Attention, l.MLP.Intermediate
		q, kv := a.Heads*a.HeadDim, a.KVHeads*a.HeadDim
		for _, m := range [numProjections]forward.Module{
			query:        {Path: "self_attn.q_proj", In: s.Hidden, Out: q},
			key:          {Path: "self_attn.k_proj", In: s.Hidden, Out: kv},
			value:        {Path: "self_attn.v_proj", In: s.Hidden, Out: kv},
			attentionOut: {Path: "self_attn.o_proj", In: q, Out: s.Hidden},
			gate:         {Path: "mlp.gate_proj", In: s.Hidden, Out: inner},
			up:           {Path: "mlp.up_proj", In: s.Hidden, Out: inner},
			down:         {Path: "mlp.down_proj", In: inner, Out: s.Hidden},
		} {
			m.Path = fmt.Sprintf("%slayers.%d.%s", plainNames.body, i, m.Path)
			list = append(list, m)
		}
	}
	return list
}

// Modules lists the projections to which an adapter may add: seven of each layer.
func (m *Model) Modules() []forward.Module { return m.modules }

// checkAdapter says why an adapter does not belong to the model.
func (m *Model) checkAdapter(a *forward.Adapter) error {
	if a == nil {
		return nil
	}
	last := -1
	for _, l := range a.LoRA {
		if l.Module <= last || l.Module >= len(m.modules) || l.Rank < 1 {
			return fmt.Errorf("forward: adapter %s adds to module %d of %d with rank %d", a.Name, l.Module, len(m.modules), l.Rank)
		}
		last = l.Module
		mod := &m.modules[l.Module]
		if l.A < 0 || l.B < 0 || l.A+int64(l.Rank*mod.In)*4 > a.Bytes || l.B+int64(l.Rank*mod.Out)*4 > a.Bytes {
			return fmt.Errorf("forward: adapter %s has no room for %s", a.Name, mod.Path)
		}
	}
	return nil
}

// addition is what the adapter of a pass adds to a projection, packed for one layer.
type addition struct {
	*forward.LoRA
	forward.Module
	a, b kernel.Weight
}

// additions are those of a layer; nil where there is none.
type additions [numProjections]*addition

// lora is what the adapter adds to layer i, without its matrices.
func (p *pass) lora(i int) (ad additions) {
	list := loraOf(p.b.Adapter, i)
	for j := range list {
		l := &list[j]
		ad[l.Module%numProjections] = &addition{LoRA: l, Module: p.modules[l.Module]}
	}
	return ad
}

// loraOf is what an adapter adds to layer i; nothing if it is nil.
func loraOf(a *forward.Adapter, i int) []forward.LoRA {
	if a == nil {
		return nil
	}
	from := func(layer int) int {
		return sort.Search(len(a.LoRA), func(j int) bool { return a.LoRA[j].Module >= layer*numProjections })
	}
	return a.LoRA[from(i):from(i+1)]
}

// pack packs the matrices of what the adapter adds to layer i into scratch.
func (p *pass) pack(i int) additions {
	ad := p.lora(i)
	for _, a := range ad {
		if a == nil {
			continue
		}
		take := func(out, in int) kernel.Weight {
			return kernel.Weight{Mem: p.arena.Scratch(kernel.WeightBytes(kernel.F32, out, in)), DType: kernel.F32, Out: out, In: in}
		}
		a.a, a.b = take(a.Rank, a.In), take(a.Out, a.Rank)
		if params := p.b.Adapter.Params; params.Real() && !p.idle {
			p.be.Pack(&a.a, params.Slice(a.A, int64(a.Rank*a.In)*4), false)
			p.be.Pack(&a.b, params.Slice(a.B, int64(a.Rank*a.Out)*4), true)
		}
	}
	return ad
}

// project is dst = src * w^T + bias, or dst += it if add, with what an adapter adds, if anything. low receives scale * src * A^T if it has rows.
func (p *pass) project(l *lane, dst, src kernel.Mat, w *kernel.Weight, bias device.Mem, add bool, ad *addition, low kernel.Mat) {
	l.Linear(l.work, dst, src, w, bias, add)
	if ad == nil {
		return
	}
	l.scope(func() {
		if low.Rows == 0 {
			low = l.mat(src.Rows, ad.Rank)
		}
		l.Linear(l.work, low, src, &ad.a, device.Mem{}, false)
		l.Scale(low, ad.Scale)
		l.Linear(l.work, dst, low, &ad.b, device.Mem{}, true)
	})
}

// projectGrad is the backward of project: dx = dy * w, or dx += it if add, with the adapter's part. dlow receives scale * dy * B if it has rows.
func (p *pass) projectGrad(l *lane, dx, dy kernel.Mat, w *kernel.Weight, add bool, ad *addition, dlow kernel.Mat) {
	l.LinearGrad(l.work, dx, dy, w, add)
	if ad == nil {
		return
	}
	l.scope(func() {
		if dlow.Rows == 0 {
			dlow = l.mat(dy.Rows, ad.Rank)
		}
		l.LinearGrad(l.work, dlow, dy, &ad.b, false)
		l.Scale(dlow, ad.Scale)
		l.LinearGrad(l.work, dx, dlow, &ad.a, true)
	})
}
