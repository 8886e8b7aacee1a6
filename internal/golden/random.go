package golden

import (
	"encoding/binary"
	"encoding/json"
	"io/fs"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/forward/transformer"
)

// Rand is the source of a seed.
func Rand(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, 0x60c4e)) }

// Synthetic describes a model with random weights.
type Synthetic struct {
	Config string // config.json
	DType  string // "F32", "BF16", "F16", or anything else that the format knows and whose elements have as many bits
	Seed   uint64
	// Change, if not nil, may change the values of a tensor before they are stored, and the name of its type.
	Change func(name string, values []float32, dtype *string)
}

// Configs of synthetic models. Wide has several blocks of everything: its inner sizes are above one step of a matrix product and odd
// in whole vectors; Windowed has every second layer windowed, four norms a layer and a gelu.
const (
	Wide = `{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 344, "intermediate_size": 424,
		"num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 40, "rms_norm_eps": 1e-5,
		"rope_theta": 10000.0, "vocab_size": 1111, "tie_word_embeddings": false, "hidden_act": "silu", "max_position_embeddings": 4096}`
	Windowed = `{"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 200, "intermediate_size": 168,
		"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 24, "rms_norm_eps": 1e-6,
		"query_pre_attn_scalar": 24, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 70,
		"rope_parameters": {"full_attention": {"factor": 8.0, "rope_theta": 1000000.0, "rope_type": "linear"},
			"sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}},
		"vocab_size": 515, "tie_word_embeddings": true, "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 4096}`
)

// Write writes the model as a folder of safetensors and returns it.
func (s Synthetic) Write(t testing.TB) fs.FS {
	t.Helper()
	spec, err := transformer.ParseConfig([]byte(s.Config))
	if err != nil {
		t.Fatal(err)
	}
	rnd := Rand(s.Seed)
	header := map[string]any{}
	var body []byte
	for _, p := range spec.Params() {
		n := int64(1)
		for _, d := range p.Shape {
			n *= d
		}
		values := make([]float32, n)
		shift, scale := 0.0, 0.1
		switch {
		case len(p.Shape) > 1 && p.Role != transformer.Embedding:
			scale = 1 / math.Sqrt(float64(p.Shape[1]))
		case p.Role == transformer.Embedding:
			scale = 1 / spec.EmbedScale
		case spec.NormOffset == 0:
			shift = 1
		}
		for i := range values {
			values[i] = float32(shift + scale*rnd.NormFloat64())
		}
		dtype := s.DType
		if s.Change != nil {
			s.Change(p.Name, values, &dtype)
		}
		from := len(body)
		body = appendValues(body, values, dtype)
		header[p.Name] = map[string]any{"dtype": dtype, "shape": p.Shape, "data_offsets": []int{from, len(body)}}
	}
	head, err := json.Marshal(header)
	if err != nil {
		t.Fatal(err)
	}
	for len(head)%8 != 0 {
		head = append(head, ' ')
	}
	file := binary.LittleEndian.AppendUint64(nil, uint64(len(head)))
	file = append(append(file, head...), body...)
	dir := t.TempDir()
	for name, data := range map[string][]byte{"config.json": []byte(s.Config), "model.safetensors": file} {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return os.DirFS(dir)
}

func appendValues(to []byte, values []float32, dtype string) []byte {
	for _, v := range values {
		bits := math.Float32bits(v)
		switch dtype {
		case "BF16":
			to = binary.LittleEndian.AppendUint16(to, uint16(bits>>16))
		case "F16", "I16":
			to = binary.LittleEndian.AppendUint16(to, half(bits))
		case "F64":
			to = binary.LittleEndian.AppendUint64(to, math.Float64bits(float64(v)))
		default: // F32, I32
			to = binary.LittleEndian.AppendUint32(to, bits)
		}
	}
	return to
}

// half cuts a float32 to a float16, towards zero; what is too small becomes 0, what is too large infinite.
func half(bits uint32) uint16 {
	sign, exp, frac := uint16(bits>>16&0x8000), int(bits>>23&0xff)-127+15, uint16(bits>>13&0x3ff)
	switch {
	case bits&0x7fffffff > 0x7f800000:
		return sign | 0x7e00
	case exp >= 31:
		return sign | 0x7c00
	case exp <= 0:
		return sign
	}
	return sign | uint16(exp)<<10 | frac
}

// Draw draws requests: some share a prefix, some of these a second one below it; there are exact duplicates, requests of one
// token, requests that end inside another, and requests that share nothing. Outputs are mixed, and a few requests want none.
// Every request has at most longest tokens.
func Draw(r *rand.Rand, vocab, n, longest int) []forward.Input {
	fresh := func(n int) []int32 {
		list := make([]int32, n)
		for i := range list {
			list[i] = int32(r.IntN(vocab))
		}
		return list
	}
	upTo := func(n int) int { return 1 + r.IntN(max(1, n)) }
	join := func(parts ...[]int32) []int32 {
		var all []int32
		for _, p := range parts {
			all = append(all, p...)
		}
		return all[:min(len(all), longest)]
	}
	trunk := fresh(upTo(longest / 2))
	branches := [][]int32{join(trunk, fresh(upTo(longest/4))), join(trunk, fresh(upTo(longest/4)))}
	var list []forward.Input
	for range n {
		var tokens []int32
		switch kind := r.IntN(8); {
		case kind < 2:
			tokens = join(trunk, fresh(upTo(longest/2)))
		case kind < 4:
			tokens = join(branches[r.IntN(2)], fresh(upTo(longest/4)))
		case kind == 4 && len(list) > 0: // a duplicate
			tokens = list[r.IntN(len(list))].Tokens
		case kind == 5 && len(list) > 0: // ends inside another
			tokens = list[r.IntN(len(list))].Tokens
			tokens = tokens[:upTo(len(tokens))]
		case kind == 6:
			tokens = fresh(1)
		default:
			tokens = fresh(upTo(longest))
		}
		list = append(list, Wants(r, vocab, tokens))
	}
	return list
}

// Wants is a request for tokens with random outputs wanted, none now and then.
func Wants(r *rand.Rand, vocab int, tokens []int32) forward.Input {
	in := forward.Input{Tokens: tokens}
	if r.IntN(12) == 0 {
		return in
	}
	for !in.Active() {
		if r.IntN(2) == 0 {
			in.TargetWidth = r.IntN(4)
			in.Targets = make([]int32, len(tokens)*in.Width())
			for i := range in.Targets {
				if in.Targets[i] = int32(r.IntN(vocab)); r.IntN(3) == 0 {
					in.Targets[i] = forward.IgnoreLabel
				}
			}
		}
		if r.IntN(4) == 0 {
			in.TopK = 1 + r.IntN(9)
		}
		in.Logits = r.IntN(6) == 0
		in.HiddenStates = r.IntN(6) == 0
	}
	return in
}

// Nested puts inputs into a random nesting, in the same order, with empty lists here and there.
func Nested(r *rand.Rand, inputs []forward.Input) forward.Inputs {
	var parts []forward.Inputs
	for len(inputs) > 0 {
		n := 1 + r.IntN(len(inputs))
		switch {
		case n == 1:
			parts = append(parts, forward.One(inputs[0]))
		case r.IntN(3) == 0:
			parts = append(parts, forward.Many(inputs[:n]...))
		default:
			parts = append(parts, Nested(r, inputs[:n]))
		}
		if r.IntN(5) == 0 {
			parts = append(parts, forward.Many())
		}
		inputs = inputs[n:]
	}
	if len(parts) == 1 {
		return forward.Nest(forward.Nest(parts[0]))
	}
	return forward.Nest(parts...)
}
