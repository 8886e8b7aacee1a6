package transformer_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/forward/transformer"
	"github.com/trainerrank/engine/internal/golden"
)

// tiny are small decoders that have, together, everything that a decoder may have.
var tiny = map[string]string{
	"biases": `{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
		"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "vocab_size": 61, "tie_word_embeddings": false,
		"hidden_act": "silu", "max_position_embeddings": 4096, "attention_bias": true, "mlp_bias": true}`,
	"qwen2": `{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 32, "intermediate_size": 36, "num_hidden_layers": 2,
		"num_attention_heads": 4, "num_key_value_heads": 1, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "vocab_size": 67, "tie_word_embeddings": true,
		"hidden_act": "silu", "max_position_embeddings": 4096}`,
	"qwen3": `{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
		"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 14, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "vocab_size": 61, "tie_word_embeddings": false,
		"hidden_act": "silu", "max_position_embeddings": 4096}`,
	"mistral": `{"architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
		"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 12, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": 6, "vocab_size": 61,
		"tie_word_embeddings": false, "hidden_act": "silu", "max_position_embeddings": 4096}`,
	"gemma3": `{"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 20, "intermediate_size": 28, "num_hidden_layers": 2,
		"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 12, "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 20,
		"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7,
		"rope_parameters": {"full_attention": {"factor": 8.0, "rope_theta": 1000000.0, "rope_type": "linear"}, "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}},
		"vocab_size": 57, "tie_word_embeddings": true, "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 4096}`,
}

// randomAdapter is an adapter with random values on some modules of a model, each with a rank of its own.
func randomAdapter(t testing.TB, m *golden.Loaded, r *rand.Rand, chance int) *forward.Adapter {
	t.Helper()
	var lora []forward.LoRA
	for i := range m.Modules() {
		if r.IntN(chance) == 0 || len(lora) == 0 && i+1 == len(m.Modules()) {
			lora = append(lora, forward.LoRA{Module: i, Rank: 1 + r.IntN(6), Scale: float32(0.5 + r.Float64())})
		}
	}
	a := forward.NewAdapter("random", m.Modules(), lora)
	block, err := m.Host.Allocate(device.Adapters, a.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(block.Free)
	a.Params = block.Mem()
	clear(a.Params.F32())
	for _, l := range a.LoRA {
		mod := m.Modules()[l.Module]
		for _, part := range []struct {
			at int64
			n  int
		}{{l.A, l.Rank * mod.In}, {l.B, l.Rank * mod.Out}} {
			for i := range a.Params.Slice(part.at, int64(part.n)*4).F32() {
				a.Params.Slice(part.at, int64(part.n)*4).F32()[i] = float32(r.NormFloat64() * 0.2)
			}
		}
	}
	return a
}

// drawCotangents draws cotangents of all that is asked for: of some outputs none, of others some zeros.
func drawCotangents(r *rand.Rand, spec *transformer.Spec, inputs []forward.Input) []forward.OutputGrad {
	values := func(n int) []float32 {
		list := make([]float32, n)
		sparse := r.IntN(2) == 0
		for i := range list {
			if list[i] = float32(r.NormFloat64()); sparse && r.IntN(2) == 0 {
				list[i] = 0
			}
		}
		return list
	}
	grads := make([]forward.OutputGrad, len(inputs))
	for i, in := range inputs {
		if in.Targets != nil && r.IntN(8) > 0 {
			grads[i].TargetLogprobs = values(len(in.Targets))
		}
		if in.Logits && r.IntN(8) > 0 {
			grads[i].Logits = values(len(in.Tokens) * spec.Vocab)
		}
		if in.HiddenStates && r.IntN(8) > 0 {
			grads[i].HiddenStates = values(len(in.Tokens) * spec.Hidden)
		}
	}
	return grads
}

// Along a random direction of each parameter the gradient is the slope of the loss, by central differences of the decoder in float64: for the base model and for
// adapters, whatever kind of parameter it is.
func TestGradientsAreSlopesInFloat64(t *testing.T) {
	for name, config := range tiny {
		t.Run(name, func(t *testing.T) {
			folder := golden.Synthetic{Config: config, DType: "F32", Seed: 11}.Write(t)
			m := golden.Load(t, folder, golden.Options{Threads: 2, Base: true})
			worst, checked := 0.0, 0
			defer func() { t.Logf("%d directions, off by at most %.1e of the norm of the gradient", checked, worst) }()
			for seed := range uint64(2) {
				r := golden.Rand(seed)
				inputs := active(golden.Draw(r, m.Decoder().Vocab, 6, 26))
				grads := drawCotangents(r, m.Decoder(), inputs)
				p := &plain{Spec: m.Decoder(), params: map[transformer.Role]map[int][]float64{}}
				wide := func(x []float32) []float64 {
					list := make([]float64, len(x))
					for i, v := range x {
						list[i] = float64(v)
					}
					return list
				}
				for i, param := range m.Params() {
					if p.params[param.Role] == nil {
						p.params[param.Role] = map[int][]float64{}
					}
					p.params[param.Role][param.Layer] = wide(m.BaseValues(m.BaseVector(), i))
				}
				// slope holds the gradient of some values against the slope of the loss as they move.
				var total float64
				slope := func(what string, values []float64, grad []float32) {
					t.Helper()
					dir, was := make([]float64, len(values)), append([]float64(nil), values...)
					var want, norm float64
					for i, g := range grad {
						dir[i] = r.NormFloat64()
						want += dir[i] * float64(g)
						norm += float64(g) * float64(g)
					}
					norm = math.Sqrt(norm)
					total = max(total, norm)
					step := 0.01 / math.Sqrt(float64(len(dir)))
					at := func(steps float64) float64 {
						for i := range values {
							values[i] = was[i] + steps*step*dir[i]
						}
						return p.loss(inputs, grads)
					}
					got := (8*(at(1)-at(-1)) - (at(2) - at(-2))) / (12 * step)
					copy(values, was)
					d := math.Abs(got - want)
					worst, checked = max(worst, d/(norm+0.05*total)), checked+1
					if !(d <= 2e-5*norm+1e-6*total) {
						t.Errorf("seed %d, %s: the loss rises by %v, the gradient says %v: off by %.2e of its norm", seed, what, got, want, d/norm)
					}
				}

				b := pack(t, inputs, fullSharing)
				b.Grad = true
				_, vector := backward(t, m, b, grads)
				mem := device.MemOf(bytesOf(vector))
				for i, param := range m.Params() {
					slope(fmt.Sprintf("%s of layer %d", param.Role, param.Layer), p.params[param.Role][param.Layer], m.BaseValues(mem, i))
				}

				b.Adapter = randomAdapter(t, m, r, 2)
				_, vector = backward(t, m, b, grads)
				p.lora = map[int]plainLoRA{}
				for _, l := range b.Adapter.LoRA {
					mod := m.Modules()[l.Module]
					a, bm := vector[l.A/4:][:l.Rank*mod.In], vector[l.B/4:][:l.Rank*mod.Out]
					own := plainLoRA{l.Rank, float64(l.Scale), wide(b.Adapter.Params.F32()[l.A/4:][:len(a)]), wide(b.Adapter.Params.F32()[l.B/4:][:len(bm)])}
					p.lora[l.Module] = own
				}
				total = 0
				for _, l := range b.Adapter.LoRA {
					mod, own := m.Modules()[l.Module], p.lora[l.Module]
					slope(mod.Path+" A", own.a, vector[l.A/4:][:len(own.a)])
					slope(mod.Path+" B", own.b, vector[l.B/4:][:len(own.b)])
				}
			}
		})
	}
}
