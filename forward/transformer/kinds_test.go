package transformer

import (
	"math/rand/v2"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/forward/kernel"
	"github.com/trainerrank/engine/forward/prefixtree"
)

// walked is a backend for a rehearsal that goes through every layer.
type walked struct{ kernel.Rehearsal }

// A rehearsal of one layer of each kind says what one of all layers says: with windowed and full layers, adapters that add other ranks to some layers or nothing,
// every retention, and the base model's own gradients.
func TestKindsOfLayersStandForAll(t *testing.T) {
	const config = `{"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 96,
		"num_hidden_layers": 7, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 16,
		"layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
		"sliding_window": 16, "rope_parameters": {"full_attention": {"rope_theta": 1000000.0, "rope_type": "default"},
		"sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}}, "vocab_size": 99, "tie_word_embeddings": true, "hidden_activation": "gelu_pytorch_tanh",
		"max_position_embeddings": 4096}`
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 0x21d5))
		spec, err := ParseConfig([]byte(config))
		if err != nil {
			t.Fatal(err)
		}
		for i := range spec.Layers { // no family has layers of other sizes beside each other, but a Spec can say it
			l := &spec.Layers[i]
			attention, mlp := *l.Attention, *l.MLP
			if r.IntN(5) == 0 {
				attention.Heads *= 1 << r.IntN(6)
			}
			if r.IntN(5) == 0 {
				mlp.Intermediate *= 1 + r.IntN(5)
			}
			l.Attention, l.MLP, l.PostNorms = &attention, &mlp, r.IntN(2) == 0
		}
		rows := make([][]int32, 1+r.IntN(4))
		b := &forward.Batch{Grad: r.IntN(4) > 0, Keep: []forward.Retention{forward.Stored, forward.Layer, forward.Replay}[r.IntN(3)]}
		for i := range rows {
			rows[i] = make([]int32, 1+r.IntN(300))
			for j := range rows[i] {
				rows[i][j] = int32(r.IntN(3))
			}
			in := &forward.Input{Tokens: rows[i], Targets: rows[i], Logits: r.IntN(3) == 0, HiddenStates: r.IntN(3) == 0}
			b.Requests = append(b.Requests, in)
		}
		tree, err := prefixtree.Build(rows)
		if err != nil {
			t.Fatal(err)
		}
		if b.Batch, err = tree.FullSharing().Pack(rows); err != nil {
			t.Fatal(err)
		}
		threads := 1 + r.IntN(3)
		m := Rehearsal{spec, threads}.model()
		if r.IntN(3) > 0 {
			m.modules = spec.modules()
			var lora []forward.LoRA
			for i := range m.modules {
				if r.IntN(3) > 0 {
					lora = append(lora, forward.LoRA{Module: i, Rank: 1 + r.IntN(1+r.IntN(40)), Scale: 1})
				}
			}
			b.Adapter = forward.NewAdapter("a", m.modules, lora)
		}
		want, err := m.footprint(b, walked{kernel.Rehearsal(threads)})
		if err != nil {
			t.Fatal(err)
		}
		got, err := m.rehearse(b, threads)
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Fatalf("seed %d: all layers (-), one of each kind (+):\n%s", seed, d)
		}
	}
}
