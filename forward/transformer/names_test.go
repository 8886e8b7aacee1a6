package transformer

import (
	"errors"
	"maps"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

type folder map[string][]int64

func (f folder) have(name string) ([]int64, bool) { shape, ok := f[name]; return shape, ok }

// folderOf holds what s needs, with each name changed by rename.
func folderOf(s *Spec, rename func(string) string) folder {
	f := folder{}
	for _, p := range s.Params() {
		f[rename(p.Name)] = p.Shape
	}
	return f
}

func plain(name string) string { return name }

func TestParamsAreInExecutionOrder(t *testing.T) {
	s := sample()
	var got []string
	for _, p := range s.Params() {
		got = append(got, p.Role.String()+" "+p.Name+" "+shapeString(p.Shape))
	}
	const l = "model.layers.0."
	want := []string{
		"embedding model.embed_tokens.weight [8, 4]",
		"attention norm " + l + "input_layernorm.weight [4]",
		"query " + l + "self_attn.q_proj.weight [4, 4]",
		"query bias " + l + "self_attn.q_proj.bias [4]",
		"key " + l + "self_attn.k_proj.weight [2, 4]",
		"key bias " + l + "self_attn.k_proj.bias [2]",
		"value " + l + "self_attn.v_proj.weight [2, 4]",
		"value bias " + l + "self_attn.v_proj.bias [2]",
		"query norm " + l + "self_attn.q_norm.weight [2]",
		"key norm " + l + "self_attn.k_norm.weight [2]",
		"attention out " + l + "self_attn.o_proj.weight [4, 4]",
		"attention out bias " + l + "self_attn.o_proj.bias [4]",
		"attention post norm " + l + "post_attention_layernorm.weight [4]",
		"mlp norm " + l + "pre_feedforward_layernorm.weight [4]",
		"gate " + l + "mlp.gate_proj.weight [6, 4]",
		"gate bias " + l + "mlp.gate_proj.bias [6]",
		"up " + l + "mlp.up_proj.weight [6, 4]",
		"up bias " + l + "mlp.up_proj.bias [6]",
		"down " + l + "mlp.down_proj.weight [4, 6]",
		"down bias " + l + "mlp.down_proj.bias [4]",
		"mlp post norm " + l + "post_feedforward_layernorm.weight [4]",
		"final norm model.norm.weight [4]",
		"head lm_head.weight [8, 4]",
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	for i, p := range s.Params() {
		if wantLayer := 0; (p.Role == Embedding || p.Role == FinalNorm || p.Role == Head) != (p.Layer == -1) || p.Layer > wantLayer {
			t.Errorf("%d: %+v", i, p)
		}
	}
	// Without post norms, the name of the norm after attention is that of the norm before the feed-forward.
	s.Layers[0].PostNorms, s.Tied = false, true
	for _, p := range s.Params() {
		if p.Role == Head || strings.Contains(p.Name, "feedforward") || strings.Contains(p.Name, "post_attention") && p.Role != MLPNorm {
			t.Errorf("%+v", p)
		}
	}
}

func TestResolveFindsEveryNaming(t *testing.T) {
	for _, c := range []struct {
		body, head string
		notes      int
	}{
		{"model.", "lm_head.weight", 0},
		{"model.language_model.", "lm_head.weight", 1},
		{"language_model.model.", "language_model.lm_head.weight", 1},
		{"", "lm_head.weight", 1},
	} {
		s := sample()
		rename := func(name string) string {
			if name == "lm_head.weight" {
				return c.head
			}
			return c.body + strings.TrimPrefix(name, "model.")
		}
		f := folderOf(s, rename)
		f["model.visual.patch.weight"] = []int64{3}
		f["mtp.layers.0.input_layernorm.weight"] = []int64{4}
		params, notes, err := s.Resolve(f.have)
		if err != nil || len(notes) != c.notes {
			t.Errorf("%q: %v %q", c.body, err, notes)
			continue
		}
		want := s.Params()
		for i := range want {
			want[i].Name = rename(want[i].Name)
		}
		if d := cmp.Diff(want, params); d != "" {
			t.Errorf("%q: %s", c.body, d)
		}
	}
}

func TestResolveRefuses(t *testing.T) {
	bare := sample() // nothing beyond what every layer has
	bare.Layers[0] = Layer{Attention: &Attention{Heads: 2, KVHeads: 1, HeadDim: 2, Scale: 1}, MLP: &GatedMLP{Intermediate: 6}}
	const l = "model.layers.0."
	for _, c := range []struct {
		what        string
		change      func(folder)
		name        string
		text, hints string
	}{
		{"no embedding", func(f folder) { delete(f, "model.embed_tokens.weight") }, "model.embed_tokens.weight", "found no such tensor, wanted [8, 4]", "model.language_model.embed_tokens.weight"},
		{"two embeddings", func(f folder) { f["language_model.model.embed_tokens.weight"] = []int64{8, 4} }, "language_model.model.embed_tokens.weight", "wanted none", "not clear"},
		{"no head", func(f folder) { delete(f, "lm_head.weight") }, "lm_head.weight", "found no such tensor", "tie_word_embeddings"},
		{"head bias", func(f folder) { f["lm_head.bias"] = []int64{8} }, "lm_head.bias", "found [8], wanted none", "another model"},
		{"missing norm", func(f folder) { delete(f, l+"input_layernorm.weight") }, l + "input_layernorm.weight", "found no such tensor, wanted [4]", "shard"},
		{"wrong shape", func(f folder) { f[l+"mlp.up_proj.weight"] = []int64{5, 4} }, l + "mlp.up_proj.weight", "found [5, 4], wanted [6, 4]", "other weights"},
		{"wrong rank", func(f folder) { f[l+"mlp.up_proj.weight"] = []int64{6, 4, 1} }, l + "mlp.up_proj.weight", "found [6, 4, 1], wanted [6, 4]", "other weights"},
		{"transposed", func(f folder) { f[l+"mlp.up_proj.weight"] = []int64{4, 6} }, l + "mlp.up_proj.weight", "found [4, 6]", "transposed"},
		{"4 bits", func(f folder) { f[l+"mlp.up_proj.weight"] = []int64{12, 1} }, l + "mlp.up_proj.weight", "found [12, 1]", "4-bit"},
		{"resized", func(f folder) { f["model.embed_tokens.weight"] = []int64{64, 4} }, "model.embed_tokens.weight", "found [64, 4], wanted [8, 4]", "vocab_size 8"},
		{"quantised", func(f folder) {
			delete(f, l+"self_attn.q_proj.weight")
			f[l+"self_attn.q_proj.qweight"] = []int64{1}
		}, l + "self_attn.q_proj.weight", "no such tensor", "quantised"},
		{"fused", func(f folder) {
			delete(f, l+"self_attn.q_proj.weight")
			f[l+"self_attn.qkv_proj.weight"] = []int64{8, 4}
		}, l + "self_attn.q_proj.weight", "no such tensor", "fused"},
		{"experts", func(f folder) {
			delete(f, l+"mlp.gate_proj.weight")
			f[l+"mlp.gate.weight"] = []int64{8, 4}
		}, l + "mlp.gate_proj.weight", "no such tensor", "experts"},
		{"bias that the config does not announce", func(f folder) { f[l+"self_attn.o_proj.bias"] = []int64{4} }, l + "self_attn.o_proj.bias", "found [4], wanted none", "announce"},
		{"norm that the config does not announce", func(f folder) { f[l+"self_attn.q_norm.weight"] = []int64{2} }, l + "self_attn.q_norm.weight", "found [2], wanted none", "announce"},
		{"four norms", func(f folder) { f[l+"pre_feedforward_layernorm.weight"] = []int64{4} }, l + "pre_feedforward_layernorm.weight", "wanted none", "announce"},
	} {
		f := folderOf(bare, plain)
		c.change(f)
		_, _, err := bare.Resolve(f.have)
		var e *TensorError
		if !errors.As(err, &e) {
			t.Errorf("%s: %v", c.what, err)
			continue
		}
		if e.Name != c.name || !strings.Contains(e.Error(), c.text) || !strings.Contains(e.Hint(), c.hints) {
			t.Errorf("%s: %v; hint: %s", c.what, e, e.Hint())
		}
	}
	full := sample()
	f := folderOf(full, plain)
	delete(f, l+"self_attn.k_proj.bias")
	var e *TensorError
	if _, _, err := full.Resolve(f.have); !errors.As(err, &e) || !strings.Contains(e.Hint(), "announces biases") {
		t.Error(err)
	}
}

func TestResolveNotesWhatItLeavesAside(t *testing.T) {
	s := sample()
	f := folderOf(s, plain)
	f["model.layers.1.input_layernorm.weight"] = []int64{4}
	_, notes, err := s.Resolve(f.have)
	if err != nil || len(notes) != 1 || !strings.Contains(notes[0], "1 layers") {
		t.Errorf("%v %q", err, notes)
	}

	s = sample()
	tied := *s
	tied.Tied = true
	f = maps.Clone(folderOf(s, plain))
	params, notes, err := tied.Resolve(f.have)
	if err != nil || len(notes) != 1 || !strings.Contains(notes[0], "lm_head.weight") || len(params) != len(s.Params())-1 {
		t.Errorf("%v %q", err, notes)
	}
	if p, ok := tied.SpareHead(f.have); !ok || p.Name != "lm_head.weight" || p.Role != Head {
		t.Errorf("%+v %v", p, ok)
	}
	if p, ok := s.SpareHead(f.have); ok {
		t.Errorf("an untied model's head is not spare: %+v", p)
	}
	delete(f, "lm_head.weight")
	if p, ok := tied.SpareHead(f.have); ok {
		t.Errorf("%+v", p)
	}
}
