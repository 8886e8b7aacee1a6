package transformer

import (
	"fmt"
	"slices"
	"strings"
)

// Role says what a tensor does in the decoder.
type Role uint8

// The roles, in execution order within a layer. In brackets: the tensor's name below its layer, Gemma 3's where it differs.
const (
	Embedding         Role = iota // [Vocab, Hidden]
	AttentionNorm                 // [Hidden], before the mixer: input_layernorm
	Query                         // [Heads*HeadDim, Hidden]
	QueryBias                     // [Heads*HeadDim]
	Key                           // [KVHeads*HeadDim, Hidden]
	KeyBias                       // [KVHeads*HeadDim]
	Value                         // [KVHeads*HeadDim, Hidden]
	ValueBias                     // [KVHeads*HeadDim]
	QueryNorm                     // [HeadDim]
	KeyNorm                       // [HeadDim]
	AttentionOut                  // [Hidden, Heads*HeadDim]
	AttentionOutBias              // [Hidden]
	AttentionPostNorm             // [Hidden], after the mixer: post_attention_layernorm of Gemma 3
	MLPNorm                       // [Hidden], before the feed-forward: post_attention_layernorm; pre_feedforward_layernorm of Gemma 3
	Gate                          // [Intermediate, Hidden]
	GateBias                      // [Intermediate]
	Up                            // [Intermediate, Hidden]
	UpBias                        // [Intermediate]
	Down                          // [Hidden, Intermediate]
	DownBias                      // [Hidden]
	MLPPostNorm                   // [Hidden], after the feed-forward: post_feedforward_layernorm of Gemma 3
	FinalNorm                     // [Hidden]
	Head                          // [Vocab, Hidden]

	numRoles = int(Head) + 1
)

var roleNames = [numRoles]string{"embedding", "attention norm", "query", "query bias", "key", "key bias", "value", "value bias",
	"query norm", "key norm", "attention out", "attention out bias", "attention post norm", "mlp norm", "gate", "gate bias",
	"up", "up bias", "down", "down bias", "mlp post norm", "final norm", "head"}

func (r Role) String() string {
	if int(r) < numRoles {
		return roleNames[r]
	}
	return fmt.Sprintf("role %d", uint8(r))
}

// Param is one tensor that a decoder needs.
type Param struct {
	Name  string  // in the files
	Shape []int64 // row-major; matrices are [out, in]
	Role  Role
	Layer int // -1 outside the layers
}

// Params lists every tensor that the decoder needs, in execution order, under the names of a plain causal language model
// ("model.layers.0...", "lm_head.weight"). Its length and order depend on the Spec alone; [Spec.Resolve] keeps them.
func (s *Spec) Params() []Param {
	h := int64(s.Hidden)
	out := make([]Param, 0, 3+16*len(s.Layers))
	add := func(role Role, layer int, name string, shape ...int64) {
		out = append(out, Param{name, shape, role, layer})
	}
	add(Embedding, -1, plainNames.body+embedName, int64(s.Vocab), h)
	for i, l := range s.Layers {
		at := fmt.Sprintf("%slayers.%d.", plainNames.body, i)
		if a := l.Attention; a != nil {
			add(AttentionNorm, i, at+"input_layernorm.weight", h)
			q, kv, dim := int64(a.Heads)*int64(a.HeadDim), int64(a.KVHeads)*int64(a.HeadDim), int64(a.HeadDim)
			project := func(role Role, name string, rows, cols int64, bias bool) {
				add(role, i, at+"self_attn."+name+".weight", rows, cols)
				if bias {
					add(role+1, i, at+"self_attn."+name+".bias", rows)
				}
			}
			project(Query, "q_proj", q, h, a.QKVBias)
			project(Key, "k_proj", kv, h, a.QKVBias)
			project(Value, "v_proj", kv, h, a.QKVBias)
			if a.QKNorm {
				add(QueryNorm, i, at+"self_attn.q_norm.weight", dim)
				add(KeyNorm, i, at+"self_attn.k_norm.weight", dim)
			}
			project(AttentionOut, "o_proj", h, q, a.OutBias)
		}
		if m := l.MLP; m != nil {
			if l.PostNorms {
				add(AttentionPostNorm, i, at+"post_attention_layernorm.weight", h)
				add(MLPNorm, i, at+"pre_feedforward_layernorm.weight", h)
			} else {
				add(MLPNorm, i, at+"post_attention_layernorm.weight", h)
			}
			project := func(role Role, name string, rows, cols int64) {
				add(role, i, at+"mlp."+name+".weight", rows, cols)
				if m.Bias {
					add(role+1, i, at+"mlp."+name+".bias", rows)
				}
			}
			n := int64(m.Intermediate)
			project(Gate, "gate_proj", n, h)
			project(Up, "up_proj", n, h)
			project(Down, "down_proj", h, n)
			if l.PostNorms {
				add(MLPPostNorm, i, at+"post_feedforward_layernorm.weight", h)
			}
		}
	}
	add(FinalNorm, -1, plainNames.body+"norm.weight", h)
	if !s.Tied {
		add(Head, -1, plainNames.head, int64(s.Vocab), h)
	}
	return out
}

// naming is one way of laying a decoder's tensors out in a folder's name space.
type naming struct {
	body string // before embed_tokens, layers and norm
	head string
	what string
}

const embedName = "embed_tokens.weight"

var (
	plainNames = naming{"model.", "lm_head.weight", "a causal language model"}
	namings    = []naming{
		plainNames,
		{"model.language_model.", "lm_head.weight", "the text part of a multimodal model"},
		{"language_model.model.", "language_model.lm_head.weight", "the text part of a multimodal model, as transformers 4 wrote it"},
		{"", "lm_head.weight", "a bare model without its head"},
	}
)

func (n naming) of(p Param) string {
	if p.Role == Head {
		return n.head
	}
	return n.body + strings.TrimPrefix(p.Name, plainNames.body)
}

// Resolve matches [Spec.Params] with the tensors of a folder. have looks a tensor up by name; its shape is not kept.
//
// The result is Params with the names that the folder uses: those of a plain causal model, or of the text part of a
// multimodal one, whose other tensors (vision, multi-token prediction) are not asked for. The notes say what the folder
// has beyond the Spec and is left aside. The error is a *[TensorError]: a tensor is missing, has another shape, or the
// folder holds one that the Spec says does not exist and whose absence would change the result (a bias, a norm).
//
// A tied model uses its embedding as the head even if the folder holds a head of its own; see [Spec.SpareHead].
func (s *Spec) Resolve(have func(name string) (shape []int64, ok bool)) ([]Param, []string, error) {
	n, err := s.naming(have)
	if err != nil {
		return nil, nil, err
	}
	var notes []string
	if n != plainNames {
		notes = append(notes, fmt.Sprintf("tensors are named %s...: %s", n.body, n.what))
	}
	params := s.Params()
	want := make(map[string]bool, len(params))
	for i := range params {
		p := &params[i]
		p.Name = n.of(*p)
		want[p.Name] = true
		shape, ok := have(p.Name)
		if !ok {
			return nil, nil, &TensorError{Name: p.Name, Wanted: p.Shape, Advice: missingHint(*p, have)}
		}
		if !slices.Equal(shape, p.Shape) {
			return nil, nil, &TensorError{Name: p.Name, Present: true, Found: slices.Clone(shape), Wanted: p.Shape, Advice: shapeHint(*p, shape)}
		}
	}
	// What some family has, and would be skipped in silence here.
	extras := []string{n.body + "norm.bias", strings.TrimSuffix(n.head, "weight") + "bias"}
	for i := range s.Layers {
		for _, tail := range []string{"self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias", "self_attn.o_proj.bias",
			"self_attn.q_norm.weight", "self_attn.k_norm.weight", "self_attn.sinks", "mlp.gate_proj.bias", "mlp.up_proj.bias", "mlp.down_proj.bias",
			"input_layernorm.bias", "post_attention_layernorm.bias", "pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight"} {
			extras = append(extras, fmt.Sprintf("%slayers.%d.%s", n.body, i, tail))
		}
	}
	for _, name := range extras {
		if shape, ok := have(name); ok && !want[name] {
			return nil, nil, &TensorError{Name: name, Present: true, Found: slices.Clone(shape),
				Advice: "config.json does not announce it and a forward without it would be another model; is it the config.json of these weights?"}
		}
	}
	if name := fmt.Sprintf("%slayers.%d.input_layernorm.weight", n.body, len(s.Layers)); present(have, name) {
		notes = append(notes, fmt.Sprintf("the folder holds %s, config.json says %d layers: the layers above are not used", name, len(s.Layers)))
	}
	if p, ok := s.SpareHead(have); ok {
		notes = append(notes, fmt.Sprintf("the folder holds %s, config.json says tie_word_embeddings: the embedding is the head", p.Name))
	}
	return params, notes, nil
}

// SpareHead returns the head tensor that the folder of a tied model holds beside its embedding, if it does. Such folders
// are common and the two are then equal (small Qwen and Gemma releases). Where they differ, transformers 4 uses the embedding and
// transformers 5 the head, so whoever loads the weights should compare the bytes and refuse on a difference.
func (s *Spec) SpareHead(have func(name string) (shape []int64, ok bool)) (Param, bool) {
	if !s.Tied {
		return Param{}, false
	}
	n, err := s.naming(have)
	if err != nil || !present(have, n.head) {
		return Param{}, false
	}
	return Param{n.head, []int64{int64(s.Vocab), int64(s.Hidden)}, Head, -1}, true
}

// naming finds out under which names the folder holds the decoder: by the embedding, which every decoder has.
func (s *Spec) naming(have func(name string) (shape []int64, ok bool)) (naming, error) {
	var found []naming
	for _, n := range namings {
		if present(have, n.body+embedName) {
			found = append(found, n)
		}
	}
	switch len(found) {
	case 1:
		return found[0], nil
	case 0:
		hint := "the folder may hold another kind of model, or only some of its shards; other names tried:"
		for i, n := range namings[1:] {
			if i > 0 {
				hint += ","
			}
			hint += " " + n.body + embedName
		}
		return naming{}, &TensorError{Name: plainNames.body + embedName, Wanted: []int64{int64(s.Vocab), int64(s.Hidden)}, Advice: hint}
	}
	name := found[1].body + embedName
	shape, _ := have(name)
	return naming{}, &TensorError{Name: name, Present: true, Found: slices.Clone(shape),
		Advice: fmt.Sprintf("the folder also holds %s: it is not clear which decoder is meant", found[0].body+embedName)}
}

func present(have func(string) ([]int64, bool), name string) bool {
	_, ok := have(name)
	return ok
}

// missingHint guesses why p is not there.
func missingHint(p Param, have func(string) ([]int64, bool)) string {
	if p.Role == Head {
		return "config.json says tie_word_embeddings false, or says nothing; if the head is the embedding, set it to true"
	}
	stem := strings.TrimSuffix(p.Name, ".weight")
	for _, tail := range []string{".qweight", ".weight_packed", ".weight.absmax", ".weight_scale_inv", ".weight_scale"} {
		if present(have, stem+tail) {
			return "the folder holds " + stem + tail + ": quantised weights are not read; use the folder in bf16, f16 or f32"
		}
	}
	if strings.HasSuffix(p.Name, ".bias") {
		return "config.json announces biases that the folder does not hold; is it the config.json of these weights?"
	}
	if p.Layer >= 0 {
		at := p.Name[:strings.Index(p.Name, "layers.")] + fmt.Sprintf("layers.%d.", p.Layer)
		for _, other := range []struct{ tail, what string }{
			{"self_attn.qkv_proj.weight", "the projections are fused in one tensor"},
			{"mlp.gate_up_proj.weight", "the projections are fused in one tensor"},
			{"mlp.gate.weight", "the layer has experts"},
			{"block_sparse_moe.gate.weight", "the layer has experts"},
			{"linear_attn.out_proj.weight", "the layer is recurrent (gated delta net)"},
		} {
			if present(have, at+other.tail) {
				return fmt.Sprintf("the folder holds %s: %s", at+other.tail, other.what)
			}
		}
	}
	return "a shard may be missing, or config.json belongs to other weights"
}

// shapeHint guesses why p has another shape than config.json says.
func shapeHint(p Param, found []int64) string {
	if (p.Role == Embedding || p.Role == Head) && len(found) == 2 && found[1] == p.Shape[1] {
		return fmt.Sprintf("config.json says vocab_size %d; if the embedding was resized or padded, say so there", p.Shape[0])
	}
	if len(found) == 2 && len(p.Shape) == 2 && found[0] == p.Shape[1] && found[1] == p.Shape[0] {
		return "the matrix is transposed"
	}
	if len(found) == 2 && len(p.Shape) == 2 && found[1] == 1 {
		return "a matrix of one column looks like packed 4-bit weights, which are not read"
	}
	return "config.json belongs to other weights"
}
