package transformer_test

import (
	"math"

	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/forward/transformer"
)

// plain is a decoder written down in float64, one request and one position after the other: no packing, no blocks, no formula of a backward.
type plain struct {
	*transformer.Spec
	params map[transformer.Role]map[int][]float64 // by role and layer (-1 outside)
	lora   map[int]plainLoRA                      // by module
}

// plainLoRA adds scale * (x Aᵀ) B, with A [rank, in] and B [rank, out].
type plainLoRA struct {
	rank  int
	scale float64
	a, b  []float64
}

func (p *plain) at(r transformer.Role, layer int) []float64 { return p.params[r][layer] }

// linear is w x + bias, w being [out, in], and what an adapter adds to module; -1 is none.
func (p *plain) linear(x, w, bias []float64, module int) []float64 {
	y := make([]float64, len(w)/len(x))
	for o := range y {
		for i, v := range x {
			y[o] += w[o*len(x)+i] * v
		}
		if bias != nil {
			y[o] += bias[o]
		}
	}
	if l, ok := p.lora[module]; ok {
		for r := range l.rank {
			var low float64
			for i, v := range x {
				low += l.a[r*len(x)+i] * v
			}
			for o := range y {
				y[o] += l.scale * low * l.b[r*len(y)+o]
			}
		}
	}
	return y
}

// norm norms every run of len(w) elements of x.
func (p *plain) norm(x, w []float64) []float64 {
	y := make([]float64, len(x))
	for at := 0; at < len(x); at += len(w) {
		var squares float64
		for _, v := range x[at : at+len(w)] {
			squares += v * v
		}
		r := 1 / math.Sqrt(squares/float64(len(w))+p.NormEps)
		for i := range w {
			y[at+i] = x[at+i] * r * (float64(p.NormOffset) + w[i])
		}
	}
	return y
}

// rotate turns the heads of x by the angles of a position.
func (p *plain) rotate(x []float64, dim, pos int, rope transformer.Rope) {
	for at := 0; at < len(x); at += dim {
		for i, f := range rope.InvFreq() {
			sin, cos := math.Sincos(float64(pos) * f)
			a, b := at+i, at+i+rope.Rotary/2
			x[a], x[b] = x[a]*cos-x[b]*sin, x[b]*cos+x[a]*sin
		}
	}
}

// attend is what the heads give for a query, over keys and values of the positions that it sees.
func (p *plain) attend(a *transformer.Attention, q []float64, keys, values [][]float64) []float64 {
	out := make([]float64, len(q))
	from := 0
	if a.Window > 0 {
		from = max(0, len(keys)-a.Window)
	}
	for h := range a.Heads {
		kv := h / (a.Heads / a.KVHeads) * a.HeadDim
		weights, sum := make([]float64, len(keys)), 0.0
		for j := from; j < len(keys); j++ {
			for e := range a.HeadDim {
				weights[j] += a.Scale * q[h*a.HeadDim+e] * keys[j][kv+e]
			}
			weights[j] = math.Exp(weights[j])
			sum += weights[j]
		}
		for j := from; j < len(keys); j++ {
			for e := range a.HeadDim {
				out[h*a.HeadDim+e] += weights[j] / sum * values[j][kv+e]
			}
		}
	}
	return out
}

// run gives the hidden state after the final norm, and the logits, of every position.
func (p *plain) run(tokens []int32) (hidden, logits [][]float64) {
	add := func(x, y []float64) {
		for i := range x {
			x[i] += y[i]
		}
	}
	keys, values := make([][][]float64, len(p.Layers)), make([][][]float64, len(p.Layers))
	for pos, token := range tokens {
		x := append([]float64(nil), p.at(transformer.Embedding, -1)[int(token)*p.Hidden:][:p.Hidden]...)
		for i := range x {
			x[i] *= p.EmbedScale
		}
		for i, l := range p.Layers {
			a, at := l.Attention, func(r transformer.Role) []float64 { return p.at(r, i) }
			h := p.norm(x, at(transformer.AttentionNorm))
			q := p.linear(h, at(transformer.Query), at(transformer.QueryBias), 7*i)
			k := p.linear(h, at(transformer.Key), at(transformer.KeyBias), 7*i+1)
			v := p.linear(h, at(transformer.Value), at(transformer.ValueBias), 7*i+2)
			if a.QKNorm {
				q, k = p.norm(q, at(transformer.QueryNorm)), p.norm(k, at(transformer.KeyNorm))
			}
			p.rotate(q, a.HeadDim, pos, p.Ropes[a.Rope])
			p.rotate(k, a.HeadDim, pos, p.Ropes[a.Rope])
			keys[i], values[i] = append(keys[i], k), append(values[i], v)
			y := p.linear(p.attend(a, q, keys[i], values[i]), at(transformer.AttentionOut), at(transformer.AttentionOutBias), 7*i+3)
			if l.PostNorms {
				y = p.norm(y, at(transformer.AttentionPostNorm))
			}
			add(x, y)
			h = p.norm(x, at(transformer.MLPNorm))
			gate := p.linear(h, at(transformer.Gate), at(transformer.GateBias), 7*i+4)
			up := p.linear(h, at(transformer.Up), at(transformer.UpBias), 7*i+5)
			for j, g := range gate {
				switch l.MLP.Activation {
				case transformer.SiLU:
					up[j] *= g / (1 + math.Exp(-g))
				case transformer.GELUTanh:
					up[j] *= 0.5 * g * (1 + math.Tanh(math.Sqrt(2/math.Pi)*(g+0.044715*g*g*g)))
				}
			}
			y = p.linear(up, at(transformer.Down), at(transformer.DownBias), 7*i+6)
			if l.PostNorms {
				y = p.norm(y, at(transformer.MLPPostNorm))
			}
			add(x, y)
		}
		head := p.at(transformer.Head, -1)
		if p.Tied {
			head = p.at(transformer.Embedding, -1)
		}
		h := p.norm(x, p.at(transformer.FinalNorm, -1))
		hidden, logits = append(hidden, h), append(logits, p.linear(h, head, nil, -1))
	}
	return hidden, logits
}

// loss is the sum of all outputs of some requests times their cotangents.
func (p *plain) loss(inputs []forward.Input, grads []forward.OutputGrad) (loss float64) {
	for r, in := range inputs {
		hidden, logits := p.run(in.Tokens)
		for i := range in.Tokens {
			var sum float64
			for _, v := range logits[i] {
				sum += math.Exp(v)
			}
			for j := i * in.Width(); in.Targets != nil && j < (i+1)*in.Width(); j++ {
				if label := in.Targets[j]; label != forward.IgnoreLabel && grads[r].TargetLogprobs != nil {
					loss += float64(grads[r].TargetLogprobs[j]) * (logits[i][label] - math.Log(sum))
				}
			}
			for j, v := range logits[i] {
				if grads[r].Logits != nil {
					loss += float64(grads[r].Logits[i*p.Vocab+j]) * v
				}
			}
			for j, v := range hidden[i] {
				if grads[r].HiddenStates != nil {
					loss += float64(grads[r].HiddenStates[i*p.Hidden+j]) * v
				}
			}
		}
	}
	return loss
}
