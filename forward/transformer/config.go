package transformer

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/trainerrank/engine/internal/strictjson"
)

const (
	// maxConfigBytes is far above any config.json (the largest hold a label list of some hundred kilobytes).
	maxConfigBytes = 8 << 20
	maxConfigDepth = 32
)

// ParseConfig turns the config.json of a model folder into a [Spec].
//
// It reads the spelling of transformers 4 (rope_theta and rope_scaling at the top, torch_dtype, sliding_window_pattern) and that
// of transformers 5 (rope_parameters, dtype, layer_types), and the text_config of Gemma3ForConditionalGeneration. Where
// a key is absent, the value is the one that transformers assumes; a note says so.
//
// What the Spec cannot say is refused with an *[UnsupportedError]: other families, and every key known to change the
// arithmetic. A key that is not known at all is refused too if its value is a number or true; it is noted and ignored if
// it is a string, a list or an object; it is ignored if it is null, false, 0 or empty. Broken or contradictory values
// are a *[ConfigError], broken JSON is a *strictjson.Error.
func ParseConfig(data []byte) (*Spec, error) {
	if len(data) > maxConfigBytes {
		return nil, &ConfigError{Found: fmt.Sprintf("%d bytes", len(data)), Wanted: fmt.Sprintf("at most %d", maxConfigBytes)}
	}
	top, err := strictjson.Parse(data, maxConfigDepth)
	if err != nil {
		return nil, fmt.Errorf("parse config.json: %w", err)
	}
	if top.Kind() != strictjson.Object {
		return nil, &ConfigError{Found: top.Kind().String(), Wanted: "an object"}
	}
	s := &Spec{EmbedScale: 1}
	r := newReader(s, "", top)
	if err := parse(r, s); err != nil {
		return nil, err
	}
	if more := r.shared.unknown - maxUnknown; more > 0 {
		s.note("%d more keys are not known and are ignored", more)
	}
	if a := r.shared.assumed; len(a) > 0 {
		s.note("not in config.json, so as transformers assumes: %s", strings.Join(a, ", "))
	}
	if err := s.Validate(); err != nil {
		return nil, err
	}
	return s, nil
}

func parse(r *reader, s *Spec) error {
	kind := r.modelType()
	if r.failed() {
		return r.err()
	}
	f := families[kind]
	if kind != gemma3Wrapper {
		if f == nil {
			return &UnsupportedError{Key: r.path("model_type"), Value: quoted(kind), Why: whyNotFamily(kind), Advice: "families: " + familyNames()}
		}
		r.build(f, s, nil)
		return r.err()
	}

	// A vision-language model around a text model: the text model is wanted, the rest is left aside.
	f = families["gemma3_text"]
	text := r.get("text_config")
	r.refuse()
	r.architectures(f)
	if text.Kind() != strictjson.Object {
		r.fail(&ConfigError{Key: r.path("text_config"), Found: shown(text), Wanted: "an object"})
		return r.err()
	}
	if r.get("vision_config").Kind() == strictjson.Object {
		s.note("vision_config is ignored: only the text part is run, on text alone")
	}
	inner := r.sub("text_config", text)
	if v := inner.get("model_type"); v.Kind() != strictjson.Missing {
		if t := inner.text("model_type"); families[t] != f && !r.failed() {
			r.fail(&UnsupportedError{Key: inner.path("model_type"), Value: quoted(t), Why: whyNotFamily(t), Advice: "inside gemma3 only gemma3_text is run"})
		}
	}
	if r.failed() {
		return r.err()
	}
	inner.build(f, s, r)
	r.leftovers()
	return r.err()
}

// modelType is the config's model_type or, where that is absent, what the architecture says it must be.
func (r *reader) modelType() string {
	if v := r.get("model_type"); v.Kind() != strictjson.Missing {
		return r.text("model_type")
	}
	if a := r.get("architectures").Items(); len(a) == 1 {
		name, _ := a[0].Text()
		for kind, f := range families {
			if slices.Contains(f.architectures, name) {
				if _, nested := r.obj.Get("text_config"); nested && f.gemma {
					kind = gemma3Wrapper
				}
				r.spec.note("model_type is not in config.json: %s, by its architecture", kind)
				return kind
			}
		}
	}
	r.fail(&ConfigError{Key: r.path("model_type"), Found: "nothing", Wanted: "one of " + familyNames()})
	return ""
}

// family maps a config.json to a Spec, as far as families differ. The defaults are those of the family's configuration
// class in transformers: they hold where config.json is silent.
type family struct {
	name          string
	architectures []string

	// Sizes; 0: config.json must say. Only Gemma 3's released files leave them out (they hold what differs from the class).
	vocab, hidden, intermediate, layers, heads int

	kvHeads    int  // 0: as many as heads
	headDim    int  // 0: hidden / heads
	window     int  // where sliding_window is absent
	tied       bool // where tie_word_embeddings is absent
	theta      float64
	localTheta float64 // Gemma 3: windowed layers have a rope of their own

	qkNorm        bool
	qkvBias       bool // biases on q, k and v whatever config.json says
	attentionBias bool // config.json may ask for biases on q, k, v and o
	mlpBias       bool // config.json may ask for biases in the feed-forward
	gemma         bool // norms by 1 + w, four a layer; scaled embeddings; GELU; the score scale has a key of its own

	windows func(r *reader, f *family, n int) []int // of each layer; 0: none
}

const gemma3Wrapper = "gemma3"

// families is keyed by model_type.
var families = map[string]*family{
	"qwen3": {
		name: "qwen3", architectures: []string{"Qwen3ForCausalLM", "Qwen3Model"},
		kvHeads: 32, headDim: 128, window: 4096, theta: 1e4, qkNorm: true, attentionBias: true, windows: qwenWindows,
	},
	"qwen2": {
		name: "qwen2", architectures: []string{"Qwen2ForCausalLM", "Qwen2Model"},
		kvHeads: 32, window: 4096, theta: 1e4, qkvBias: true, windows: qwenWindows,
	},
	"llama": {
		name: "llama", architectures: []string{"LlamaForCausalLM", "LlamaModel", "LLaMAForCausalLM"},
		theta: 1e4, attentionBias: true, mlpBias: true, windows: llamaWindows,
	},
	"mistral": {
		name: "mistral", architectures: []string{"MistralForCausalLM", "MistralModel"},
		kvHeads: 8, window: 4096, theta: 1e4, windows: mistralWindows,
	},
	"gemma3_text": {
		name: "gemma3", architectures: []string{"Gemma3ForCausalLM", "Gemma3TextModel", "Gemma3ForConditionalGeneration", "Gemma3Model"},
		vocab: 262208, hidden: 2304, intermediate: 9216, layers: 26, heads: 8, kvHeads: 4, headDim: 256, window: 4096, tied: true,
		theta: 1e6, localTheta: 1e4, qkNorm: true, attentionBias: true, gemma: true, windows: gemmaWindows,
	},
}

func familyNames() string { return "qwen3, qwen2, llama, mistral, gemma3" }

// build fills s. outer is the configuration around this one, or nil.
func (r *reader) build(f *family, s *Spec, outer *reader) {
	r.refuse() // first: "experts" says more than a size that is missing because of them
	r.architectures(f)
	if r.failed() {
		return
	}
	s.Family = f.name
	s.Vocab = r.countOr("vocab_size", maxVocab, f.vocab)
	s.Hidden = r.countOr("hidden_size", maxHidden, f.hidden)
	n := r.countOr("num_hidden_layers", maxLayers, f.layers)
	s.NormEps = r.positiveOr("rms_norm_eps", 1e-6)
	if s.NormEps > 1 {
		r.fail(&ConfigError{Key: r.path("rms_norm_eps"), Found: fmt.Sprint(s.NormEps), Wanted: "at most 1"})
	}
	if r.set("max_position_embeddings") {
		s.MaxPositions = r.count("max_position_embeddings", maxTokens)
	}
	s.Tied = r.tied(f, outer)
	s.DType = r.dtype(outer)

	a := Attention{Heads: r.countOr("num_attention_heads", maxHeads, f.heads), QKNorm: f.qkNorm, QKVBias: f.qkvBias}
	m := GatedMLP{Intermediate: r.countOr("intermediate_size", maxIntermediate, f.intermediate), Activation: r.activation(f)}
	if r.failed() {
		return // what follows divides by these
	}
	a.KVHeads = r.kvHeads(f, a.Heads)
	a.HeadDim = r.headDim(f, s.Hidden, a.Heads)
	a.Scale = 1 / math.Sqrt(float64(a.HeadDim))
	switch {
	case f.attentionBias:
		on := r.boolOr("attention_bias", false)
		a.QKVBias, a.OutBias = on, on
	case f.qkvBias && r.boolOr("attention_bias", false):
		s.note("attention_bias is ignored: %s has biases on q, k and v and none on o, whatever it says", f.name)
	}
	if f.mlpBias {
		m.Bias = r.boolOr("mlp_bias", false)
	}
	if f.gemma {
		s.NormOffset = 1
		s.EmbedScale = math.Sqrt(float64(s.Hidden))
		a.Scale = 1 / math.Sqrt(r.positiveOr("query_pre_attn_scalar", 256))
	}
	full, local := r.ropes(f, a.HeadDim)
	windows := f.windows(r, f, n)
	if r.failed() {
		return
	}
	for _, w := range windows {
		at, mlp := a, m
		at.Window = w
		table := full
		if w > 0 && f.localTheta > 0 {
			table = local
		}
		at.Rope = s.rope(table)
		s.Layers = append(s.Layers, Layer{Attention: &at, MLP: &mlp, PostNorms: f.gemma})
	}
	r.leftovers()
}

// architectures refuses heads other than a language model's, and folders whose two statements of family disagree.
func (r *reader) architectures(f *family) {
	v := r.get("architectures")
	if v.Kind() == strictjson.Missing || v.Kind() == strictjson.Null {
		return
	}
	if v.Kind() != strictjson.Array {
		r.fail(&ConfigError{Key: r.path("architectures"), Found: shown(v), Wanted: "a list of strings"})
		return
	}
	for i, item := range v.Items() {
		key := fmt.Sprintf("%s[%d]", r.path("architectures"), i)
		name, err := item.Text()
		switch {
		case err != nil:
			r.fail(&ConfigError{Key: key, Found: shown(item), Wanted: "a string"})
		case slices.Contains(f.architectures, name):
		case strings.Contains(name, "Classification") || strings.Contains(name, "Reward") || strings.Contains(name, "QuestionAnswering"):
			r.fail(&UnsupportedError{Key: key, Value: quoted(name), Why: "its head is not a language model's",
				Advice: "the body can be run from a folder saved as " + f.architectures[0]})
		default:
			r.fail(&UnsupportedError{Key: key, Value: quoted(name), Why: "the model_type is " + f.name + "'s, the architecture another",
				Advice: "wanted one of " + strings.Join(f.architectures, ", ")})
		}
	}
}

func (r *reader) tied(f *family, outer *reader) bool {
	const key = "tie_word_embeddings"
	mine, theirs := r.set(key), outer != nil && outer.set(key)
	switch {
	case mine && theirs:
		a, b := r.boolOr(key, f.tied), outer.boolOr(key, f.tied)
		if a != b {
			r.fail(&ConfigError{Key: r.path(key), Found: fmt.Sprint(a), Wanted: fmt.Sprintf("%v, as %s says", b, outer.path(key)),
				Advice: "make both say whether the head is the embedding"})
		}
		return a
	case theirs:
		return outer.boolOr(key, f.tied)
	case mine:
		return r.boolOr(key, f.tied)
	}
	r.get(key)
	return f.tied
}

func (r *reader) dtype(outer *reader) string {
	for from := r; from != nil; from, outer = outer, nil {
		for _, key := range []string{"dtype", "torch_dtype"} {
			if from.set(key) {
				return strings.TrimPrefix(from.text(key), "torch.")
			}
		}
	}
	return ""
}

func (r *reader) kvHeads(f *family, heads int) int {
	const key = "num_key_value_heads"
	kv := heads
	if v := r.get(key); v.Kind() == strictjson.Missing && f.kvHeads > 0 || v.Kind() != strictjson.Missing && v.Kind() != strictjson.Null {
		kv = r.countOr(key, maxHeads, f.kvHeads)
	}
	if kv > 0 && heads%kv != 0 {
		r.fail(&ConfigError{Key: r.path(key), Found: fmt.Sprint(kv), Wanted: fmt.Sprintf("a divisor of num_attention_heads %d", heads)})
	}
	return kv
}

func (r *reader) headDim(f *family, hidden, heads int) int {
	const key = "head_dim"
	var dim int
	switch v := r.get(key); {
	case f.headDim > 0 || v.Kind() != strictjson.Missing && v.Kind() != strictjson.Null:
		dim = r.countOr(key, maxHeadDim, f.headDim)
	case hidden%heads != 0:
		r.fail(&ConfigError{Key: r.path(key), Found: shown(v),
			Wanted: fmt.Sprintf("a whole number, since hidden_size %d is not a multiple of num_attention_heads %d", hidden, heads)})
		return 0
	default:
		if dim = hidden / heads; dim > maxHeadDim {
			r.fail(&ConfigError{Key: r.path(key), Found: fmt.Sprintf("hidden_size / num_attention_heads = %d", dim), Wanted: fmt.Sprintf("at most %d", maxHeadDim)})
		}
	}
	if dim%2 != 0 {
		r.fail(&ConfigError{Key: r.path(key), Found: fmt.Sprint(dim), Wanted: "an even number", Advice: "rotary positions pair the elements of a head"})
	}
	return dim
}

func (r *reader) activation(f *family) Activation {
	refuse := func(key, name, wanted string) {
		r.fail(&UnsupportedError{Key: r.path(key), Value: quoted(name), Why: "another activation", Advice: f.name + " runs with " + wanted})
	}
	if f.gemma {
		const wanted = "gelu_pytorch_tanh"
		if r.set("hidden_activation") {
			if name := r.text("hidden_activation"); name != wanted {
				refuse("hidden_activation", name, wanted)
			}
		}
		if r.set("hidden_act") {
			switch name := r.text("hidden_act"); name {
			case wanted:
			case "gelu": // early Gemma files; transformers looks at hidden_activation alone
				r.spec.note(`hidden_act "gelu" is ignored, as in transformers: gemma3 runs with %s`, wanted)
			default:
				refuse("hidden_act", name, wanted)
			}
		}
		return GELUTanh
	}
	for _, key := range []string{"hidden_act", "hidden_activation"} {
		if r.set(key) {
			if name := r.text(key); name != "silu" && name != "swish" {
				refuse(key, name, "silu")
			}
		}
	}
	return SiLU
}

// layerTypes reads which layers slide; nil where config.json does not say.
func (r *reader) layerTypes(n int) (sliding []bool) {
	v := r.get("layer_types")
	if v.Kind() == strictjson.Missing || v.Kind() == strictjson.Null {
		return nil
	}
	key := r.path("layer_types")
	if v.Kind() != strictjson.Array {
		r.fail(&ConfigError{Key: key, Found: shown(v), Wanted: "a list of strings"})
		return nil
	}
	if len(v.Items()) != n {
		r.fail(&ConfigError{Key: key, Found: fmt.Sprintf("%d entries", len(v.Items())), Wanted: fmt.Sprintf("%d, as num_hidden_layers says", n)})
		return nil
	}
	for i, item := range v.Items() {
		at := fmt.Sprintf("%s[%d]", key, i)
		name, err := item.Text()
		if err != nil {
			r.fail(&ConfigError{Key: at, Found: shown(item), Wanted: "a string"})
			return nil
		}
		if name != "full_attention" && name != "sliding_attention" {
			r.fail(&UnsupportedError{Key: at, Value: quoted(name), Why: whyNotLayer(name), Advice: "full_attention and sliding_attention are run"})
			return nil
		}
		sliding = append(sliding, name == "sliding_attention")
	}
	return sliding
}

// window reads sliding_window: 0 where it is null, the family's where it is absent.
func (r *reader) window(f *family) int {
	if r.get("sliding_window").Kind() == strictjson.Null {
		return 0
	}
	return r.countOr("sliding_window", maxTokens, f.window)
}

// each gives n layers the window w where slides says so.
func (r *reader) each(n, w int, slides func(i int) bool) []int {
	out := make([]int, n)
	for i := range out {
		if slides(i) {
			if w == 0 {
				r.fail(&ConfigError{Key: r.path("sliding_window"), Found: "none in force",
					Wanted: fmt.Sprintf("a width, since layer %d is to slide", i), Advice: "see layer_types, sliding_window and use_sliding_window"})
				return out
			}
			out[i] = w
		}
	}
	return out
}

// qwenWindows: sliding_window counts only when use_sliding_window is true, and then from layer max_window_layers on,
// unless layer_types says which.
func qwenWindows(r *reader, f *family, n int) []int {
	w := 0
	if r.boolOr("use_sliding_window", false) {
		w = r.window(f)
	}
	r.get("sliding_window")
	from := 28
	if r.set("max_window_layers") {
		from = r.number("max_window_layers", 0, maxTokens)
	}
	if types := r.layerTypes(n); types != nil {
		return r.each(n, w, func(i int) bool { return types[i] })
	}
	return r.each(n, w, func(i int) bool { return w > 0 && i >= from })
}

// llamaWindows: there are none.
func llamaWindows(r *reader, _ *family, n int) []int {
	for i, slides := range r.layerTypes(n) {
		if slides {
			r.fail(&UnsupportedError{Key: fmt.Sprintf("%s[%d]", r.path("layer_types"), i), Value: `"sliding_attention"`, Why: "llama has no windows"})
		}
	}
	return make([]int, n)
}

// mistralWindows: every layer slides, or none.
func mistralWindows(r *reader, f *family, n int) []int {
	w := r.window(f)
	for i, slides := range r.layerTypes(n) {
		if slides != (w > 0) {
			r.fail(&ConfigError{Key: fmt.Sprintf("%s[%d]", r.path("layer_types"), i), Found: fmt.Sprintf("sliding: %v", slides),
				Wanted: fmt.Sprintf("sliding: %v, as sliding_window says of every layer", w > 0),
				Advice: "transformers ignores layer_types in mistral; a model with mixed layers is a ministral"})
		}
	}
	return r.each(n, w, func(int) bool { return w > 0 })
}

// gemmaWindows: layer i is full where i+1 is a multiple of the pattern, unless layer_types says which.
func gemmaWindows(r *reader, f *family, n int) []int {
	w := r.window(f)
	pattern := 6
	if r.set("sliding_window_pattern") {
		pattern = r.count("sliding_window_pattern", maxTokens)
	}
	if types := r.layerTypes(n); types != nil {
		r.get("_sliding_window_pattern") // what the class would have assumed; transformers 5 saves it beside layer_types
		return r.each(n, w, func(i int) bool { return types[i] })
	}
	if r.set("_sliding_window_pattern") {
		if p := r.count("_sliding_window_pattern", maxTokens); p != pattern && !r.failed() {
			r.fail(&ConfigError{Key: r.path("_sliding_window_pattern"), Found: fmt.Sprint(p), Wanted: fmt.Sprint(pattern),
				Advice: "say in layer_types which layers slide"})
		}
	}
	if r.failed() {
		return nil
	}
	return r.each(n, w, func(i int) bool { return (i+1)%pattern != 0 })
}
