package transformer

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/trainerrank/engine/internal/strictjson"
)

var rewrite = flag.Bool("rewrite-specs", false, "rewrite testdata/specs")

// goldenModels is where the golden data lies beside a full checkout; tests that need it are skipped without it.
const goldenModels = "../../../shared/golden/models"

var runnable = []string{"arith", "qwen3-tiny", "qwen3-sharded-bf16", "qwen2-tiny", "llama3-tiny", "mistral-tiny", "gemma3-tiny"}

func configFile(t testing.TB, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", "configs", name))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func mustParse(t testing.TB, data []byte) *Spec {
	t.Helper()
	s, err := ParseConfig(data)
	if err != nil {
		t.Fatalf("%v\n%s", err, data)
	}
	return s
}

func TestBothSpellingsGiveOneSpec(t *testing.T) {
	for _, m := range runnable {
		s5, s4 := mustParse(t, configFile(t, m+".config.json")), mustParse(t, configFile(t, m+".config.v4.json"))
		if d := cmp.Diff(s5, s4); d != "" {
			t.Errorf("%s: transformers 5 (-) and 4 (+) spellings differ:\n%s", m, d)
		}
		if len(s5.Notes) > 0 {
			t.Errorf("%s: notes on a file that leaves nothing open: %q", m, s5.Notes)
		}
	}
}

func TestConfigsInTestdataAreTheGoldenOnes(t *testing.T) {
	for _, m := range runnable {
		for _, name := range []string{"config.json", "config.v4.json"} {
			golden, err := os.ReadFile(filepath.Join(goldenModels, m, name))
			if errors.Is(err, os.ErrNotExist) {
				t.Skip("no golden data beside this checkout")
			}
			if d := cmp.Diff(string(golden), string(configFile(t, m+"."+name))); d != "" {
				t.Errorf("%s/%s: %s", m, name, d)
			}
		}
	}
}

func TestPrintedSpecs(t *testing.T) {
	files, err := filepath.Glob("testdata/configs/*.json")
	if err != nil || len(files) == 0 {
		t.Fatal(err, "no configs")
	}
	for _, f := range files {
		name := strings.TrimSuffix(filepath.Base(f), ".json")
		s, err := ParseConfig(configFile(t, filepath.Base(f)))
		got := ""
		if err != nil {
			got = "error: " + err.Error() + "\n"
			var h interface{ Hint() string }
			if errors.As(err, &h) {
				got += "hint: " + h.Hint() + "\n"
			}
		} else {
			got = s.String()
		}
		at := filepath.Join("testdata", "specs", name+".txt")
		if *rewrite {
			if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(at, []byte(got), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(at)
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(string(want), got); d != "" {
			t.Errorf("%s (-want +got; rewrite with -rewrite-specs):\n%s", name, d)
		}
	}
}

// Every number of a printed Spec is also pinned here by hand for one model per family, because a rewritten golden file
// proves nothing.
func TestSpecOfEachFamily(t *testing.T) {
	layers := func(n int, f func(i int) Layer) (out []Layer) {
		for i := range n {
			out = append(out, f(i))
		}
		return out
	}
	for name, want := range map[string]*Spec{
		"qwen3-tiny": {
			Family: "qwen3", Vocab: 331, Hidden: 64, EmbedScale: 1, NormEps: 1e-6, Tied: true, MaxPositions: 512, DType: "float32",
			Ropes: []Rope{{Theta: 1e6, Rotary: 32, Factor: 1}},
			Layers: layers(3, func(int) Layer {
				return Layer{Attention: &Attention{Heads: 4, KVHeads: 2, HeadDim: 32, QKNorm: true, Scale: 0.17677669529663687}, MLP: &GatedMLP{Intermediate: 160}}
			}),
		},
		"qwen2-tiny": {
			Family: "qwen2", Vocab: 389, Hidden: 56, EmbedScale: 1, NormEps: 1e-6, Tied: true, MaxPositions: 512, DType: "float16",
			Ropes: []Rope{{Theta: 1e6, Rotary: 14, Factor: 1}},
			Layers: layers(3, func(int) Layer {
				return Layer{Attention: &Attention{Heads: 4, KVHeads: 2, HeadDim: 14, QKVBias: true, Scale: 0.2672612419124244}, MLP: &GatedMLP{Intermediate: 120}}
			}),
		},
		"llama3-tiny": {
			Family: "llama", Vocab: 251, Hidden: 96, EmbedScale: 1, NormEps: 1e-5, MaxPositions: 512, DType: "float32",
			Ropes: []Rope{{Theta: 1e4, Rotary: 12, Factor: 1, Llama3: &Llama3Scaling{Factor: 8, LowFreq: 1, HighFreq: 4, Original: 32}}},
			Layers: layers(2, func(int) Layer {
				return Layer{Attention: &Attention{Heads: 8, KVHeads: 2, HeadDim: 12, Scale: 0.2886751345948129}, MLP: &GatedMLP{Intermediate: 116}}
			}),
		},
		"mistral-tiny": {
			Family: "mistral", Vocab: 293, Hidden: 64, EmbedScale: 1, NormEps: 1e-5, MaxPositions: 512, DType: "float32",
			Ropes: []Rope{{Theta: 1e4, Rotary: 16, Factor: 1}},
			Layers: layers(3, func(int) Layer {
				return Layer{Attention: &Attention{Heads: 4, KVHeads: 1, HeadDim: 16, Window: 16, Scale: 0.25}, MLP: &GatedMLP{Intermediate: 104}}
			}),
		},
		"gemma3-tiny": {
			Family: "gemma3", Vocab: 283, Hidden: 60, EmbedScale: 7.745966692414834, NormOffset: 1, NormEps: 1e-6, Tied: true, MaxPositions: 512, DType: "float32",
			Ropes: []Rope{{Theta: 1e4, Rotary: 16, Factor: 1}, {Theta: 1e6, Rotary: 16, Factor: 8}},
			Layers: layers(4, func(i int) Layer {
				a := &Attention{Heads: 4, KVHeads: 2, HeadDim: 16, Window: 12, Rope: 0, QKNorm: true, Scale: 0.22360679774997896}
				if i == 2 {
					a.Window, a.Rope = 0, 1
				}
				return Layer{Attention: a, MLP: &GatedMLP{Intermediate: 100, Activation: GELUTanh}, PostNorms: true}
			}),
		},
	} {
		if d := cmp.Diff(want, mustParse(t, configFile(t, name+".config.json"))); d != "" {
			t.Errorf("%s (-want +got):\n%s", name, d)
		}
	}
}

func TestParamsAreTheTensorsOfTheFiles(t *testing.T) {
	for _, m := range runnable {
		// What the files hold, as Python's json read it from their headers.
		b, err := os.ReadFile(filepath.Join("testdata", "tensors", m+".txt"))
		if err != nil {
			t.Fatal(err)
		}
		listed := map[string][]int64{}
		for line := range strings.Lines(string(b)) {
			name, shape, _ := strings.Cut(strings.TrimSpace(line), " ")
			var dims []int64
			if err := json.Unmarshal([]byte(shape), &dims); err != nil {
				t.Fatal(err)
			}
			listed[name] = dims
		}
		if files, _ := filepath.Glob(filepath.Join(goldenModels, m, "model*.safetensors")); len(files) > 0 {
			inFiles := map[string][]int64{}
			for _, f := range files {
				for name, shape := range header(t, f) {
					inFiles[name] = shape
				}
			}
			if d := cmp.Diff(inFiles, listed); d != "" {
				t.Errorf("%s: testdata/tensors is not what the golden files hold:\n%s", m, d)
			}
		}

		s := mustParse(t, configFile(t, m+".config.json"))
		wanted := map[string][]int64{}
		for _, p := range s.Params() {
			if wanted[p.Name] != nil {
				t.Errorf("%s: %s twice", m, p.Name)
			}
			wanted[p.Name] = p.Shape
		}
		if d := cmp.Diff(listed, wanted); d != "" {
			t.Errorf("%s (-files +Params):\n%s", m, d)
		}
		params, notes, err := s.Resolve(folder(listed).have)
		if err != nil || len(notes) > 0 {
			t.Errorf("%s: %v %q", m, err, notes)
		}
		if d := cmp.Diff(s.Params(), params); d != "" {
			t.Errorf("%s: Resolve changes the names of a plain folder:\n%s", m, d)
		}
	}
}

// header reads names and shapes with the standard library, independent of the loader.
func header(t *testing.T, file string) map[string][]int64 {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var n uint64
	if err := binary.Read(f, binary.LittleEndian, &n); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, n)
	if _, err := f.ReadAt(b, 8); err != nil {
		t.Fatal(err)
	}
	var raw map[string]json.RawMessage
	if err := json.Unmarshal(b, &raw); err != nil {
		t.Fatal(err)
	}
	out := map[string][]int64{}
	for name, r := range raw {
		if name == "__metadata__" {
			continue
		}
		var tensor struct{ Shape []int64 }
		if err := json.Unmarshal(r, &tensor); err != nil {
			t.Fatal(err)
		}
		out[name] = tensor.Shape
	}
	return out
}

// edit is a config with keys set (to JSON text) or, with "", removed. A path goes into objects.
func edit(t testing.TB, base string, changes map[string]string) []byte {
	t.Helper()
	var top map[string]any
	if err := json.Unmarshal(configFile(t, base), &top); err != nil {
		t.Fatal(err)
	}
	for path, text := range changes {
		obj := top
		keys := strings.Split(path, "/")
		for _, k := range keys[:len(keys)-1] {
			next, ok := obj[k].(map[string]any)
			if !ok {
				next = map[string]any{}
				obj[k] = next
			}
			obj = next
		}
		last := keys[len(keys)-1]
		if text == "" {
			delete(obj, last)
			continue
		}
		obj[last] = json.RawMessage(text)
	}
	b, err := json.Marshal(top)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

const (
	qwen3, qwen3v4     = "qwen3-tiny.config.json", "qwen3-tiny.config.v4.json"
	qwen2v4            = "qwen2-tiny.config.v4.json"
	llama, llamav4     = "llama3-tiny.config.json", "llama3-tiny.config.v4.json"
	mistral, mistralv4 = "mistral-tiny.config.json", "mistral-tiny.config.v4.json"
	gemma, gemmav4     = "gemma3-tiny.config.json", "gemma3-tiny.config.v4.json"
	gemmaNested        = "published-gemma-3-4b-it.json"
)

func TestUnsupportedIsRefusedByName(t *testing.T) {
	for _, c := range []struct {
		base      string
		set       map[string]string
		key, why  string // why: a part of it
		wantValue string // "": whatever
	}{
		{"qwen3moe-tiny.config.json", nil, "model_type", "experts", `"qwen3_moe"`},
		{"qwen3moe-tiny.config.v4.json", nil, "model_type", "experts", ""},
		{"qwen35-tiny.config.json", nil, "model_type", "recurrent layers (gated delta net)", `"qwen3_5_text"`},
		{"qwen35-tiny.config.v4.json", nil, "model_type", "recurrent layers (gated delta net)", ""},
		{"qwen35-tiny.config.nested.json", nil, "model_type", "recurrent layers (gated delta net)", `"qwen3_5"`},
		{"qwen3next-tiny.config.json", nil, "model_type", "experts", `"qwen3_next"`},
		{"qwen3next-tiny.config.v4.json", nil, "model_type", "recurrent layers (gated delta net)", ""},
		{qwen3, map[string]string{"model_type": `"gemma2"`}, "model_type", "soft cap", ""},
		{qwen3, map[string]string{"model_type": `"granite"`}, "model_type", "multiplier", ""},
		{qwen3, map[string]string{"model_type": `"frobnicate"`}, "model_type", "not known", `"frobnicate"`},
		{qwen3, map[string]string{"model_type": `"Qwen3"`}, "model_type", "not known", ""},

		{qwen3, map[string]string{"architectures": `["Qwen3ForSequenceClassification"]`}, "architectures[0]", "head", ""},
		{qwen3, map[string]string{"architectures": `["Qwen3MoeForCausalLM"]`}, "architectures[0]", "another", ""},
		{llama, map[string]string{"architectures": `["LlamaForCausalLM","MixtralForCausalLM"]`}, "architectures[1]", "another", ""},
		{gemmaNested, map[string]string{"architectures": `["LlavaForConditionalGeneration"]`}, "architectures[0]", "another", ""},

		{qwen3, map[string]string{"hidden_act": `"gelu"`}, "hidden_act", "activation", `"gelu"`},
		{llama, map[string]string{"hidden_activation": `"relu"`}, "hidden_activation", "activation", ""},
		{gemma, map[string]string{"hidden_activation": `"silu"`}, "hidden_activation", "activation", ""},
		{gemma, map[string]string{"hidden_activation": `"gelu"`}, "hidden_activation", "activation", ""},
		{gemma, map[string]string{"hidden_act": `"relu"`}, "hidden_act", "activation", ""},

		{gemma, map[string]string{"attn_logit_softcapping": `50.0`}, "attn_logit_softcapping", "soft cap", "50.0"},
		{gemma, map[string]string{"final_logit_softcapping": `30.0`}, "final_logit_softcapping", "soft cap", ""},
		{gemma, map[string]string{"attn_logit_softcapping": `0`}, "attn_logit_softcapping", "soft cap", ""},
		{gemma, map[string]string{"final_logit_softcapping": `0`}, "final_logit_softcapping", "soft cap", ""},
		{gemma, map[string]string{"use_bidirectional_attention": `true`}, "use_bidirectional_attention", "later tokens", "true"},
		{gemmaNested, map[string]string{"text_config/use_bidirectional_attention": `true`}, "text_config.use_bidirectional_attention", "later tokens", ""},
		{gemmaNested, map[string]string{"text_config/model_type": `"gemma2"`}, "text_config.model_type", "soft cap", ""},
		{gemmaNested, map[string]string{"quantization_config": `{"bits":4}`}, "quantization_config", "quantised", ""},
		{gemmaNested, map[string]string{"some_scale": `2`}, "some_scale", "not known", ""},
		{gemmaNested, map[string]string{"text_config/some_scale": `2`}, "text_config.some_scale", "not known", "2"},

		{llamav4, map[string]string{"rope_scaling": `{"rope_type":"yarn","factor":4.0}`}, "rope_scaling.rope_type", "YaRN", `"yarn"`},
		{llamav4, map[string]string{"rope_scaling": `{"type":"dynamic","factor":4.0}`}, "rope_scaling.type", "NTK", ""},
		{llamav4, map[string]string{"rope_scaling": `{"type":"longrope","short_factor":[1],"long_factor":[1]}`}, "rope_scaling.type", "LongRoPE", ""},
		{llamav4, map[string]string{"rope_scaling": `{"type":"mrope","mrope_section":[1,1,1]}`}, "rope_scaling.mrope_section", "dimensions", ""},
		{llamav4, map[string]string{"rope_scaling": `{"type":"mrope"}`}, "rope_scaling.type", "dimensions", ""},
		{llamav4, map[string]string{"rope_scaling": `{"type":"proportional"}`}, "rope_scaling.type", "part of the head", ""},
		{llamav4, map[string]string{"rope_scaling": `{"type":"swirl"}`}, "rope_scaling.type", "not known", ""},
		{llamav4, map[string]string{"rope_scaling": `{"type":"linear","factor":2.0,"attention_factor":1.2}`}, "rope_scaling.attention_factor", "multiplier", ""},
		{llamav4, map[string]string{"rope_scaling": `{"type":"linear","factor":2.0,"beta_fast":32}`}, "rope_scaling.beta_fast", "not known", ""},
		{qwen3, map[string]string{"rope_parameters": `{"rope_type":"yarn","rope_theta":1e6,"factor":4.0}`}, "rope_parameters.rope_type", "YaRN", ""},
		{gemma, map[string]string{"rope_parameters/full_attention/rope_type": `"yarn"`}, "rope_parameters.full_attention.rope_type", "YaRN", ""},
		{gemma, map[string]string{"rope_parameters/chunked": `3`}, "rope_parameters.chunked", "not known", ""},
		{qwen3v4, map[string]string{"partial_rotary_factor": `0.25`}, "partial_rotary_factor", "rotary", "0.25"},
		{qwen3, map[string]string{"rope_parameters/partial_rotary_factor": `0.5`}, "rope_parameters.partial_rotary_factor", "rotary", ""},
		{llamav4, map[string]string{"rope_interleaved": `true`}, "rope_interleaved", "rotary", ""},
		{llamav4, map[string]string{"no_rope_layers": `[1,1,1,0]`}, "no_rope_layers", "without positions", "a list of 4"},
		{llamav4, map[string]string{"no_rope_layer_interval": `4`}, "no_rope_layer_interval", "without positions", ""},
		{llamav4, map[string]string{"attention_chunk_size": `8192`}, "attention_chunk_size", "chunks", ""},
		{llamav4, map[string]string{"alibi": `true`}, "alibi", "ALiBi", ""},
		{llamav4, map[string]string{"position_embedding_type": `"alibi"`}, "position_embedding_type", "rotary", ""},
		{llamav4, map[string]string{"clip_qkv": `8.0`}, "clip_qkv", "clipping", ""},
		{llamav4, map[string]string{"quantization_config": `{"quant_method":"fp8"}`}, "quantization_config", "quantised", "an object with 1 keys"},
		{llamav4, map[string]string{"logit_scale": `0.0625`}, "logit_scale", "multiplier", ""},
		{llamav4, map[string]string{"embedding_multiplier": `12`}, "embedding_multiplier", "multiplier", ""},
		{llamav4, map[string]string{"residual_multiplier": `0.22`}, "residual_multiplier", "multiplier", ""},
		{llamav4, map[string]string{"logits_scaling": `8`}, "logits_scaling", "multiplier", ""},
		{llamav4, map[string]string{"attention_multiplier": `1`}, "attention_multiplier", "multiplier", ""},
		{llamav4, map[string]string{"num_experts": `8`}, "num_experts", "experts", ""},
		{llamav4, map[string]string{"num_local_experts": `1`}, "num_local_experts", "experts", ""},
		{llamav4, map[string]string{"kv_lora_rank": `512`}, "kv_lora_rank", "latent", ""},
		{llamav4, map[string]string{"linear_num_key_heads": `2`}, "linear_num_key_heads", "delta net", ""},
		{llamav4, map[string]string{"use_qk_norm": `true`}, "use_qk_norm", "norms", ""},
		{llamav4, map[string]string{"is_causal": `false`}, "is_causal", "later tokens", ""},
		{llamav4, map[string]string{"is_encoder_decoder": `true`}, "is_encoder_decoder", "encoder", ""},
		{llamav4, map[string]string{"pruned_heads": `{"0":[1]}`}, "pruned_heads", "heads", ""},
		{llamav4, map[string]string{"text_config": `{"hidden_size":4}`}, "text_config", "inside", ""},
		{llamav4, map[string]string{"sliding_window": `128`}, "sliding_window", "not known", ""},
		{llamav4, map[string]string{"zeta": `1e-9`}, "zeta", "not known", "1e-9"},
		{llamav4, map[string]string{"use_zeta": `true`}, "use_zeta", "not known", "true"},
		{mistralv4, map[string]string{"attention_bias": `true`}, "attention_bias", "not known", ""},
		{qwen3v4, map[string]string{"mlp_bias": `true`}, "mlp_bias", "not known", ""},
		{llamav4, map[string]string{"odd\nkey": `1`}, `"odd\nkey"`, "not known", ""},

		{qwen3, map[string]string{"layer_types": `["full_attention","linear_attention","full_attention"]`}, "layer_types[1]", "delta net", `"linear_attention"`},
		{qwen3, map[string]string{"layer_types": `["chunked_attention","full_attention","full_attention"]`}, "layer_types[0]", "chunks", ""},
		{gemma, map[string]string{"layer_types": `["full_attention","mamba","full_attention","full_attention"]`}, "layer_types[1]", "recurrent", ""},
		{gemma, map[string]string{"layer_types": `["full_attention","windy","full_attention","full_attention"]`}, "layer_types[1]", "not known", ""},
		{llama, map[string]string{"layer_types": `["full_attention","sliding_attention"]`}, "layer_types[1]", "no windows", ""},
	} {
		s, err := ParseConfig(edit(t, c.base, c.set))
		var e *UnsupportedError
		if !errors.As(err, &e) {
			t.Errorf("%s with %v: got %v %v", c.base, c.set, s, err)
			continue
		}
		if e.Key != c.key || !strings.Contains(e.Why, c.why) || c.wantValue != "" && e.Value != c.wantValue {
			t.Errorf("%s with %v:\n got %v\nwant %s: %s: %s", c.base, c.set, e, c.key, c.wantValue, c.why)
		}
		if !strings.HasPrefix(e.Error(), "parse config.json: "+c.key+": ") || strings.ContainsAny(e.Error(), "\n") {
			t.Errorf("text: %q", e.Error())
		}
	}
}

func TestBrokenValuesNameTheKey(t *testing.T) {
	for _, c := range []struct {
		base         string
		set          map[string]string
		key          string
		found, wants string // parts
	}{
		{qwen3, map[string]string{"vocab_size": ""}, "vocab_size", "nothing", "a whole number, 1 to 16777216"},
		{qwen3, map[string]string{"vocab_size": "0"}, "vocab_size", "0", "1 to"},
		{qwen3, map[string]string{"vocab_size": "9223372036854775808"}, "vocab_size", "9223372036854775808", "1 to"},
		{qwen3, map[string]string{"vocab_size": "331.0"}, "vocab_size", "331.0", "a whole number"},
		{qwen3, map[string]string{"vocab_size": `"331"`}, "vocab_size", `"331"`, "a whole number"},
		{qwen3, map[string]string{"hidden_size": "-64"}, "hidden_size", "-64", "1 to"},
		{qwen3, map[string]string{"hidden_size": "null"}, "hidden_size", "null", "1 to"},
		{qwen3, map[string]string{"num_hidden_layers": "1000000"}, "num_hidden_layers", "1000000", "1 to 4096"},
		{qwen3, map[string]string{"num_attention_heads": "0"}, "num_attention_heads", "0", "1 to"},
		{qwen3, map[string]string{"intermediate_size": ""}, "intermediate_size", "nothing", "1 to"},
		{qwen3, map[string]string{"num_key_value_heads": "3"}, "num_key_value_heads", "3", "a divisor of num_attention_heads 4"},
		{qwen3, map[string]string{"num_key_value_heads": ""}, "num_key_value_heads", "32", "a divisor"}, // transformers' default
		{qwen3, map[string]string{"head_dim": "15"}, "head_dim", "15", "even"},
		{qwen3, map[string]string{"head_dim": "514"}, "head_dim", "514", "1 to 512"},
		{qwen3, map[string]string{"head_dim": "null"}, "head_dim", "null", "a whole number"},
		{llamav4, map[string]string{"hidden_size": "100"}, "head_dim", "nothing", "not a multiple of num_attention_heads 8"},
		{llamav4, map[string]string{"hidden_size": "8200"}, "head_dim", "1025", "at most 512"},
		{qwen3, map[string]string{"rms_norm_eps": "0"}, "rms_norm_eps", "0", "above 0"},
		{qwen3, map[string]string{"rms_norm_eps": "2"}, "rms_norm_eps", "2", "at most 1"},
		{qwen3, map[string]string{"rms_norm_eps": "1e400"}, "rms_norm_eps", "1e400", "above 0"},
		{qwen3, map[string]string{"max_position_embeddings": "0"}, "max_position_embeddings", "0", "1 to"},
		{qwen3, map[string]string{"tie_word_embeddings": "1"}, "tie_word_embeddings", "1", "true or false"},
		{qwen3, map[string]string{"dtype": "16"}, "dtype", "16", "a string"},
		{qwen3, map[string]string{"model_type": "3"}, "model_type", "3", "a string"},
		{qwen3, map[string]string{"model_type": "", "architectures": ""}, "model_type", "nothing", "one of qwen3"},
		{qwen3, map[string]string{"architectures": `"Qwen3ForCausalLM"`}, "architectures", `"Qwen3ForCausalLM"`, "a list"},
		{qwen3, map[string]string{"architectures": `[3]`}, "architectures[0]", "3", "a string"},
		{qwen3, map[string]string{"hidden_act": "3"}, "hidden_act", "3", "a string"},
		{qwen3, map[string]string{"layer_types": `["full_attention"]`}, "layer_types", "1 entries", "3, as num_hidden_layers says"},
		{qwen3, map[string]string{"layer_types": `"full_attention"`}, "layer_types", "", "a list"},
		{qwen3, map[string]string{"layer_types": `[1,2,3]`}, "layer_types[0]", "1", "a string"},
		{qwen3, map[string]string{"layer_types": `["full_attention","full_attention","sliding_attention"]`}, "sliding_window", "none", "layer 2"},
		{qwen3, map[string]string{"use_sliding_window": "true", "sliding_window": "0", "layer_types": ""}, "sliding_window", "0", "1 to"},
		{qwen3, map[string]string{"use_sliding_window": `"yes"`}, "use_sliding_window", `"yes"`, "true or false"},
		{qwen3, map[string]string{"max_window_layers": "-1"}, "max_window_layers", "-1", "0 to"},
		{mistral, map[string]string{"sliding_window": "0"}, "sliding_window", "0", "1 to"},
		{mistral, map[string]string{"layer_types": `["sliding_attention","full_attention","sliding_attention"]`}, "layer_types[1]", "false", "true"},
		{gemma, map[string]string{"sliding_window": "null"}, "sliding_window", "none", "layer 0"},
		{gemma, map[string]string{"query_pre_attn_scalar": "-1"}, "query_pre_attn_scalar", "-1", "above 0"},
		{gemmav4, map[string]string{"sliding_window_pattern": "0"}, "sliding_window_pattern", "0", "1 to"},
		{gemmav4, map[string]string{"_sliding_window_pattern": "6"}, "_sliding_window_pattern", "6", "3"},

		{qwen3, map[string]string{"rope_parameters/rope_theta": "0"}, "rope_parameters.rope_theta", "0", "above 0"},
		{qwen3, map[string]string{"rope_parameters/rope_theta": "-1e4"}, "rope_parameters.rope_theta", "-1e4", "above 0"},
		{qwen3, map[string]string{"rope_theta": "5000"}, "rope_parameters.rope_theta", "1e+06", "5000, as outside"},
		{qwen3, map[string]string{"rope_parameters": "[]"}, "rope_parameters", "a list of 0", "an object"},
		{qwen3v4, map[string]string{"rope_theta": "1e31"}, "rope_theta", "1e31", "above 0"},
		{qwen3v4, map[string]string{"rope_scaling": `{"factor":8.0}`}, "rope_scaling.factor", "8.0", "none with rope type default"},
		{qwen3v4, map[string]string{"rope_scaling": `{"type":"linear"}`}, "rope_scaling.factor", "nothing", "above 0"},
		{qwen3v4, map[string]string{"rope_scaling": `{"type":"linear","rope_type":"default"}`}, "rope_scaling.type", "linear", "default"},
		{qwen3v4, map[string]string{"rope_scaling": `{"type":7}`}, "rope_scaling.type", "7", "a string"},
		{llamav4, map[string]string{"rope_scaling/low_freq_factor": ""}, "rope_scaling.low_freq_factor", "nothing", "above 0"},
		{llamav4, map[string]string{"rope_scaling/high_freq_factor": "1"}, "rope_scaling.high_freq_factor", "1", "more than low_freq_factor"},
		{llamav4, map[string]string{"rope_scaling/original_max_position_embeddings": ""}, "rope_scaling.original_max_position_embeddings", "nothing", "1 to"},
		{llamav4, map[string]string{"original_max_position_embeddings": "64"}, "original_max_position_embeddings", "64", "32"},
		{llama, map[string]string{"rope_scaling": `{"type":"linear","factor":2.0}`}, "rope_scaling", "Factor:2", "as rope_parameters says"},
		{gemma, map[string]string{"rope_parameters/sliding_attention": ""}, "rope_parameters.sliding_attention", "nothing", "an object"},
		{gemma, map[string]string{"rope_parameters": `{"rope_type":"default","rope_theta":1e6}`}, "rope_parameters.full_attention", "nothing", "an object"},
		{gemma, map[string]string{"rope_local_base_freq": "5000"}, "rope_parameters.sliding_attention.rope_theta", "10000", "5000"},
		{gemmaNested, map[string]string{"text_config": ""}, "text_config", "nothing", "an object"},
		{gemmaNested, map[string]string{"text_config/hidden_size": "-1"}, "text_config.hidden_size", "-1", "1 to"},
		{gemmaNested, map[string]string{"tie_word_embeddings": "true", "text_config/tie_word_embeddings": "false"}, "text_config.tie_word_embeddings", "false", "true, as tie_word_embeddings says"},
	} {
		s, err := ParseConfig(edit(t, c.base, c.set))
		var e *ConfigError
		if !errors.As(err, &e) {
			t.Errorf("%s with %v: got %v %v", c.base, c.set, s, err)
			continue
		}
		if e.Key != c.key || !strings.Contains(e.Found, c.found) || !strings.Contains(e.Wanted, c.wants) {
			t.Errorf("%s with %v:\n got %v\nwant %s: %s, %s", c.base, c.set, e, c.key, c.found, c.wants)
		}
	}
}

func TestBrokenJSONSaysWhere(t *testing.T) {
	for text, want := range map[string]string{
		``:                                "",
		`[]`:                              "parse config.json: found a list, wanted an object",
		`{"vocab_size":1,"vocab_size":2}`: "duplicate key",
		`{"rms_norm_eps":NaN}`:            "line 1",
		strings.Repeat("[", 100):          "nested deeper",
		"{\"a\":\"\xff\"}":                "line 1",
	} {
		_, err := ParseConfig([]byte(text))
		var place *strictjson.Error
		var e *ConfigError
		if err == nil || !strings.HasPrefix(err.Error(), "parse config.json: ") || !strings.Contains(err.Error(), want) || !errors.As(err, &place) && !errors.As(err, &e) {
			t.Errorf("%q: %v", text, err)
		}
	}
	if _, err := ParseConfig(make([]byte, maxConfigBytes+1)); err == nil || !strings.Contains(err.Error(), "at most") {
		t.Error(err)
	}
}

// Each case changes a config in a way that must be accepted, and says what it does to the Spec.
func TestAcceptedVariants(t *testing.T) {
	windows := func(s *Spec) (out []int) {
		for _, l := range s.Layers {
			out = append(out, l.Attention.Window)
		}
		return out
	}
	for _, c := range []struct {
		name string
		base string
		set  map[string]string
		want func(s *Spec) bool
		note string // a part of the only note; "": none
	}{
		{"qwen3 head_dim absent", qwen3, map[string]string{"head_dim": ""}, func(s *Spec) bool { return s.Layers[0].Attention.HeadDim == 128 && s.Ropes[0].Rotary == 128 }, "head_dim 128"},
		{"qwen2 head_dim absent", qwen2v4, nil, func(s *Spec) bool { return s.Layers[0].Attention.HeadDim == 14 }, ""},
		{"qwen2 head_dim present", qwen2v4, map[string]string{"head_dim": "18"}, func(s *Spec) bool { return s.Layers[0].Attention.HeadDim == 18 }, ""},
		{"llama head_dim null", llamav4, map[string]string{"head_dim": "null"}, func(s *Spec) bool { return s.Layers[0].Attention.HeadDim == 12 }, ""},
		{"llama kv absent", llamav4, map[string]string{"num_key_value_heads": ""}, func(s *Spec) bool { return s.Layers[0].Attention.KVHeads == 8 }, ""},
		{"qwen3 kv null", qwen3, map[string]string{"num_key_value_heads": "null"}, func(s *Spec) bool { return s.Layers[0].Attention.KVHeads == 4 }, ""},
		{"mistral kv absent", mistralv4, map[string]string{"num_key_value_heads": "", "num_attention_heads": "16"}, func(s *Spec) bool { return s.Layers[0].Attention.KVHeads == 8 }, "num_key_value_heads 8"},
		{"eps absent", llamav4, map[string]string{"rms_norm_eps": ""}, func(s *Spec) bool { return s.NormEps == 1e-6 }, "rms_norm_eps 1e-06"},
		{"llama theta absent", llamav4, map[string]string{"rope_theta": ""}, func(s *Spec) bool { return s.Ropes[0].Theta == 1e4 }, "rope_theta 10000"},
		{"qwen3 theta absent", qwen3v4, map[string]string{"rope_theta": ""}, func(s *Spec) bool { return s.Ropes[0].Theta == 1e4 }, "rope_theta 10000"},
		{"gemma thetas absent", gemmav4, map[string]string{"rope_theta": "", "rope_local_base_freq": ""}, func(s *Spec) bool {
			return s.Ropes[0].Theta == 1e4 && s.Ropes[1].Theta == 1e6
		}, "rope_theta 1e+06, rope_local_base_freq 10000"},
		{"tie absent", qwen3, map[string]string{"tie_word_embeddings": ""}, func(s *Spec) bool { return !s.Tied }, ""},
		{"tie absent, gemma", gemma, map[string]string{"tie_word_embeddings": ""}, func(s *Spec) bool { return s.Tied }, ""},
		{"gemma untied", gemma, map[string]string{"tie_word_embeddings": "false"}, func(s *Spec) bool { return !s.Tied }, ""},
		{"nested, untied outside", gemmaNested, map[string]string{"tie_word_embeddings": "false", "text_config/vocab_size": "262208", "text_config/rms_norm_eps": "1e-6"}, func(s *Spec) bool { return !s.Tied && s.DType == "bfloat16" }, "*"},
		{"positions absent", llamav4, map[string]string{"max_position_embeddings": ""}, func(s *Spec) bool { return s.MaxPositions == 0 }, ""},
		{"dtype with a module", llamav4, map[string]string{"torch_dtype": `"torch.float16"`}, func(s *Spec) bool { return s.DType == "float16" }, ""},
		{"model_type absent", llamav4, map[string]string{"model_type": ""}, func(s *Spec) bool { return s.Family == "llama" }, "by its architecture"},
		{"model_type absent, nested", gemmaNested, map[string]string{"model_type": ""}, func(s *Spec) bool { return s.Family == "gemma3" && s.Hidden == 2560 }, "*"},
		{"architectures null", llamav4, map[string]string{"architectures": "null"}, func(*Spec) bool { return true }, ""},
		{"bare body", llamav4, map[string]string{"architectures": `["LlamaModel"]`}, func(*Spec) bool { return true }, ""},
		{"swish", llamav4, map[string]string{"hidden_act": `"swish"`}, func(s *Spec) bool { return s.Layers[0].MLP.Activation == SiLU }, ""},
		{"gelu in an early Gemma file", gemma, map[string]string{"hidden_act": `"gelu"`, "hidden_activation": ""}, func(s *Spec) bool { return s.Layers[0].MLP.Activation == GELUTanh }, "hidden_act"},

		{"llama biases", llamav4, map[string]string{"attention_bias": "true", "mlp_bias": "true"}, func(s *Spec) bool {
			l := s.Layers[0]
			return l.Attention.QKVBias && l.Attention.OutBias && l.MLP.Bias
		}, ""},
		{"qwen3 biases", qwen3, map[string]string{"attention_bias": "true"}, func(s *Spec) bool { return s.Layers[0].Attention.QKVBias && s.Layers[0].Attention.OutBias }, ""},
		{"qwen2 biases", qwen2v4, map[string]string{"attention_bias": "false"}, func(s *Spec) bool { return s.Layers[0].Attention.QKVBias && !s.Layers[0].Attention.OutBias }, ""},
		{"qwen2 biases announced", qwen2v4, map[string]string{"attention_bias": "true"}, func(s *Spec) bool { return s.Layers[0].Attention.QKVBias && !s.Layers[0].Attention.OutBias }, "attention_bias is ignored"},

		{"qwen window not in use", qwen3v4, map[string]string{"sliding_window": "4096"}, func(s *Spec) bool { return slices.Equal(windows(s), []int{0, 0, 0}) }, ""},
		{"qwen window from a layer on", qwen3v4, map[string]string{"sliding_window": "64", "use_sliding_window": "true", "max_window_layers": "2"}, func(s *Spec) bool { return slices.Equal(windows(s), []int{0, 0, 64}) }, ""},
		{"qwen window, all layers", qwen2v4, map[string]string{"sliding_window": "64", "use_sliding_window": "true", "max_window_layers": "0"}, func(s *Spec) bool { return slices.Equal(windows(s), []int{64, 64, 64}) }, ""},
		{"qwen window, above all layers", qwen2v4, map[string]string{"sliding_window": "64", "use_sliding_window": "true"}, func(s *Spec) bool { return slices.Equal(windows(s), []int{0, 0, 0}) }, ""},
		{"qwen window, null in use", qwen2v4, map[string]string{"sliding_window": "null", "use_sliding_window": "true", "max_window_layers": "0"}, func(s *Spec) bool { return slices.Equal(windows(s), []int{0, 0, 0}) }, ""},
		{"qwen window, absent in use", qwen2v4, map[string]string{"sliding_window": "", "use_sliding_window": "true", "max_window_layers": "1"}, func(s *Spec) bool { return slices.Equal(windows(s), []int{0, 4096, 4096}) }, "sliding_window 4096"},
		{"qwen, layer_types wins", qwen3, map[string]string{"sliding_window": "64", "use_sliding_window": "true", "max_window_layers": "2", "layer_types": `["sliding_attention","full_attention","full_attention"]`}, func(s *Spec) bool { return slices.Equal(windows(s), []int{64, 0, 0}) }, ""},
		{"mistral null", mistralv4, map[string]string{"sliding_window": "null"}, func(s *Spec) bool { return slices.Equal(windows(s), []int{0, 0, 0}) }, ""},
		{"mistral absent", mistralv4, map[string]string{"sliding_window": ""}, func(s *Spec) bool { return slices.Equal(windows(s), []int{4096, 4096, 4096}) }, "sliding_window 4096"},
		{"mistral layer_types that agree", mistralv4, map[string]string{"sliding_window": "null", "layer_types": `["full_attention","full_attention","full_attention"]`}, func(s *Spec) bool { return slices.Equal(windows(s), []int{0, 0, 0}) }, ""},
		{"llama layer_types", llama, map[string]string{"layer_types": `["full_attention","full_attention"]`}, func(s *Spec) bool { return slices.Equal(windows(s), []int{0, 0}) }, ""},
		{"gemma pattern 1", gemmav4, map[string]string{"sliding_window_pattern": "1"}, func(s *Spec) bool { return slices.Equal(windows(s), []int{0, 0, 0, 0}) && len(s.Ropes) == 1 }, ""},
		{"gemma pattern absent", gemmav4, map[string]string{"sliding_window_pattern": "", "num_hidden_layers": "7"}, func(s *Spec) bool { return slices.Equal(windows(s), []int{12, 12, 12, 12, 12, 0, 12}) }, ""},
		{"gemma window absent", gemmav4, map[string]string{"sliding_window": ""}, func(s *Spec) bool { return slices.Equal(windows(s), []int{4096, 4096, 0, 4096}) }, "sliding_window 4096"},
		{"gemma scalar absent", gemmav4, map[string]string{"query_pre_attn_scalar": ""}, func(s *Spec) bool { return s.Layers[0].Attention.Scale == 0.0625 }, "query_pre_attn_scalar 256"},

		{"rope scaling null type default", qwen3v4, map[string]string{"rope_scaling": `{"rope_type":"default","factor":1}`}, func(s *Spec) bool { return s.Ropes[0].Factor == 1 }, ""},
		{"rope scaling empty", qwen3v4, map[string]string{"rope_scaling": `{}`}, func(s *Spec) bool { return s.Ropes[0].Factor == 1 }, ""},
		{"rope type in both spellings", qwen3v4, map[string]string{"rope_scaling": `{"type":"linear","rope_type":"linear","factor":4}`}, func(s *Spec) bool { return s.Ropes[0].Factor == 4 && s.Ropes[0].Theta == 1e6 }, ""},
		{"both spellings that agree", llama, map[string]string{"rope_theta": "1e4", "rope_scaling": `{"rope_type":"llama3","factor":8.0,"low_freq_factor":1.0,"high_freq_factor":4.0,"original_max_position_embeddings":32}`},
			func(s *Spec) bool { return s.Ropes[0].Llama3.Factor == 8 }, ""},
		{"theta only in rope_scaling", llamav4, map[string]string{"rope_theta": "", "rope_scaling/rope_theta": "7e3"}, func(s *Spec) bool { return s.Ropes[0].Theta == 7e3 }, ""},
		{"original context outside, where nothing reads it", qwen3v4, map[string]string{"original_max_position_embeddings": "128"}, func(*Spec) bool { return true }, ""},
		{"original context outside, the same", llamav4, map[string]string{"original_max_position_embeddings": "32"}, func(*Spec) bool { return true }, ""},
		{"partial rotary of a whole head", llamav4, map[string]string{"partial_rotary_factor": "1.0"}, func(s *Spec) bool { return s.Ropes[0].Rotary == 12 }, ""},

		{"neutral unknown keys", llamav4, map[string]string{"a": "null", "b": "false", "c": "0", "d": "0.0", "e": `""`, "f": "[]", "g": "{}"}, func(*Spec) bool { return true }, ""},
		{"neutral known keys", llamav4, map[string]string{"num_experts": "0", "alibi": "false", "logit_scale": "1.0", "no_rope_layers": "[]", "quantization_config": "null", "clip_qkv": "null", "is_causal": "true", "pruned_heads": "{}"},
			func(*Spec) bool { return true }, ""},
		{"harmless keys", llamav4, map[string]string{"transformers.js_config": `{"dtype":"q4"}`, "is_llama_config": "true", "resid_pdrop": "0.1", "unsloth_fixed": "true", "id2label": `{"0":"x"}`, "temperature": "0.7", "_name_or_path": `"x/y"`, "auto_map": `{"AutoModel":"x"}`, "image_token_id": "7", "layerdrop": "0.1"},
			func(*Spec) bool { return true }, ""},
		{"unknown text", llamav4, map[string]string{"flavour": `"sour"`}, func(*Spec) bool { return true }, "flavour is not known and is ignored"},
		{"unknown list", llamav4, map[string]string{"flavours": `[1]`}, func(*Spec) bool { return true }, "flavours is not known and is ignored"},
	} {
		s, err := ParseConfig(edit(t, c.base, c.set))
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		if !c.want(s) {
			t.Errorf("%s: wrong\n%v", c.name, s)
		}
		switch {
		case c.note == "*":
		case c.note == "" && len(s.Notes) > 0, c.note != "" && (len(s.Notes) != 1 || !strings.Contains(s.Notes[0], c.note)):
			t.Errorf("%s: notes %q, want one with %q", c.name, s.Notes, c.note)
		}
	}
}

func TestNotesAreBounded(t *testing.T) {
	set := map[string]string{}
	for i := range 1000 {
		set[strings.Repeat("k", i+1)] = `"x"`
	}
	s := mustParse(t, edit(t, llamav4, set))
	if len(s.Notes) != maxUnknown+1 || !strings.Contains(s.Notes[maxUnknown], "980 more") {
		t.Errorf("%d notes, the last %q", len(s.Notes), s.Notes[len(s.Notes)-1])
	}
}

func FuzzParseConfig(f *testing.F) {
	files, _ := filepath.Glob("testdata/configs/*.json")
	for _, name := range files {
		f.Add(configFile(f, filepath.Base(name)))
	}
	f.Add([]byte(`{"model_type":"gemma3_text"}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		s, err := ParseConfig(data)
		if err != nil {
			if s != nil || !strings.HasPrefix(err.Error(), "parse config.json: ") {
				t.Fatalf("%v %v", s, err)
			}
			return
		}
		if err := s.Validate(); err != nil {
			t.Fatalf("accepted, but %v\n%s", err, data)
		}
		if again := mustParse(t, data); !cmp.Equal(s, again) {
			t.Fatal("not deterministic")
		}
		_ = s.String()
		held := map[string][]int64{}
		for _, p := range s.Params() {
			held[p.Name] = p.Shape
			for _, n := range p.Shape {
				if n < 1 {
					t.Fatalf("%s %v", p.Name, p.Shape)
				}
			}
		}
		if _, _, err := s.Resolve(func(name string) ([]int64, bool) { shape, ok := held[name]; return shape, ok }); err != nil {
			t.Fatal(err)
		}
		for _, r := range s.Ropes {
			for _, x := range r.InvFreq() {
				if !(x >= 0) {
					t.Fatalf("frequency %v of %+v", x, r)
				}
			}
		}
	})
}
