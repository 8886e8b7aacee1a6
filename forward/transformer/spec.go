package transformer

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
)

// Spec is a decoder as data: every number that the arithmetic of a forward depends on, and nothing else of config.json.
// Two Specs that are equal (go-cmp needs no options) describe the same computation over the same tensors.
//
// A Spec from [ParseConfig] is valid in the sense of [Spec.Validate]. Its JSON form is that of [Rehearsal].
type Spec struct {
	Family string  `json:"family"` // "qwen3", "qwen2", "llama", "mistral" or "gemma3"
	Vocab  int     `json:"vocab"`  // rows of the embedding and of the head
	Hidden int     `json:"hidden"` // width of the residual stream
	Layers []Layer `json:"layers"` // in execution order
	Ropes  []Rope  `json:"ropes"`  // rotary tables that attention refers to by index, in the order of first use; none twice

	EmbedScale   float64  `json:"embed_scale"`     // embeddings are multiplied by it: 1, or sqrt(Hidden) for Gemma 3
	NormOffset   float32  `json:"norm_offset"`     // every norm multiplies by NormOffset + w: 0, or 1 for Gemma 3
	NormEps      float64  `json:"norm_eps"`        // added to the mean square, inside the root
	Tied         bool     `json:"tied"`            // the head is the embedding, no lm_head.weight is needed
	MaxPositions int      `json:"max_positions"`   // what the model was made for; informational
	DType        string   `json:"dtype"`           // what the config says about the stored weights, "" if nothing; informational
	Notes        []string `json:"notes,omitempty"` // what was ignored or assumed and the reader should know, one sentence each
}

// Layer is one residual block: a mixer, then a feed-forward, each behind its own norm.
type Layer struct {
	Attention *Attention `json:"attention"`
	MLP       *GatedMLP  `json:"mlp"`
	// PostNorms says that the outputs of the mixer and of the feed-forward are normed too, before they are added to the
	// residual stream (Gemma 3: four norms a layer).
	PostNorms bool `json:"post_norms,omitzero"`
}

// Attention is a causal softmax mixer with grouped key and value heads.
type Attention struct {
	Heads   int `json:"heads"` // query head h uses key head h / (Heads / KVHeads)
	KVHeads int `json:"kv_heads"`
	HeadDim int `json:"head_dim"`
	Window  int `json:"window,omitzero"` // 0: none; else query i sees key j when 0 <= i-j < Window
	Rope    int `json:"rope"`            // index into [Spec.Ropes]

	QKNorm  bool    `json:"qk_norm,omitzero"`  // q and k of each head are normed over HeadDim, before the rotation
	QKVBias bool    `json:"qkv_bias,omitzero"` // biases on q, k and v
	OutBias bool    `json:"out_bias,omitzero"` // bias on the output projection
	Scale   float64 `json:"scale"`             // scores are multiplied by it
}

// GatedMLP is down(act(gate(x)) * up(x)).
type GatedMLP struct {
	Intermediate int        `json:"intermediate"`
	Activation   Activation `json:"activation"`
	Bias         bool       `json:"bias,omitzero"` // on all three projections
}

// Activation is the function on the gate of a [GatedMLP].
type Activation uint8

// The activations.
const (
	SiLU     Activation = iota // x * sigmoid(x)
	GELUTanh                   // GELU in its tanh form: x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3)))
)

func (a Activation) String() string {
	switch a {
	case SiLU:
		return "silu"
	case GELUTanh:
		return "gelu-tanh"
	}
	return fmt.Sprintf("activation %d", uint8(a))
}

// MarshalText is the name of the activation.
func (a Activation) MarshalText() ([]byte, error) { return []byte(a.String()), nil }

// UnmarshalText takes a name that MarshalText gives to one of the activations.
func (a *Activation) UnmarshalText(text []byte) error {
	for known := SiLU; known <= GELUTanh; known++ {
		if known.String() == string(text) {
			*a = known
			return nil
		}
	}
	return fmt.Errorf("%q is no activation, want silu or gelu-tanh", text)
}

// Rope is a table of rotary frequencies. Element i of a head is paired with element i + Rotary/2 for i < Rotary/2;
// elements from Rotary on pass unrotated.
type Rope struct {
	Theta  float64        `json:"theta"`            // base of the frequencies
	Rotary int            `json:"rotary"`           // rotated elements of a head, even
	Factor float64        `json:"factor"`           // every frequency is divided by it: 1, or the factor of linear scaling
	Llama3 *Llama3Scaling `json:"llama3,omitempty"` // nil, or the scaling of rope type llama3 (Factor is then 1)
}

// Llama3Scaling slows the low frequencies down and leaves the high ones alone (rope type llama3).
type Llama3Scaling struct {
	Factor   float64 `json:"factor"`    // low frequencies are divided by it
	LowFreq  float64 `json:"low_freq"`  // turns within Original tokens up to which a frequency counts as low
	HighFreq float64 `json:"high_freq"` // turns from which it counts as high
	Original int     `json:"original"`  // context length of the first training, in tokens
}

// InvFreq returns the Rotary/2 frequencies, in radians per position, scaling included.
//
// Pair i turns by f = Theta^(-2i/Rotary). Linear scaling divides by Factor. llama3 scaling looks at t = Original f / 2 pi,
// the turns within the original context: f stays for t >= HighFreq, becomes f/factor for t <= LowFreq, and between
// them b f + (1-b) f/factor with b = (t - LowFreq) / (HighFreq - LowFreq).
func (r Rope) InvFreq() []float64 {
	out := make([]float64, r.Rotary/2)
	for i := range out {
		f := math.Pow(r.Theta, -float64(2*i)/float64(r.Rotary)) / r.Factor
		if s := r.Llama3; s != nil {
			switch t := float64(s.Original) * f / (2 * math.Pi); {
			case t >= s.HighFreq:
			case t <= s.LowFreq:
				f /= s.Factor
			default:
				b := (t - s.LowFreq) / (s.HighFreq - s.LowFreq)
				f = b*f + (1-b)*f/s.Factor
			}
		}
		out[i] = f
	}
	return out
}

// Upper limits of a Spec. They are far above any decoder that exists, and low enough that the product of any two (a
// tensor's elements), times the bytes of an element, times the layers, stays far below 2^63.
const (
	maxVocab        = 1 << 24
	maxHidden       = 1 << 18
	maxLayers       = 1 << 12
	maxHeads        = 1 << 12
	maxHeadDim      = 512 // what the attention kernels take
	maxIntermediate = 1 << 21
	maxTokens       = math.MaxInt32 // positions and windows

	// Scales, thetas and factors outside these bounds are a broken file: the float32 arithmetic could not hold them.
	minScalar = 1e-30
	maxScalar = 1e30
)

// Validate checks the numbers of s against each other and against the limits of this package. The error is a
// *[ConfigError] whose Key is the field.
func (s *Spec) Validate() error {
	bad := func(key string, found any, wanted string) error {
		return &ConfigError{Key: key, Found: fmt.Sprint(found), Wanted: wanted}
	}
	inRange := func(key string, v, limit int) error {
		if v < 1 || v > limit {
			return bad(key, v, fmt.Sprintf("1 to %d", limit))
		}
		return nil
	}
	positive := func(key string, v float64) error {
		if !(v >= minScalar && v <= maxScalar) {
			return bad(key, v, "a finite number above 0")
		}
		return nil
	}
	if err := firstError(
		inRange("vocab", s.Vocab, maxVocab),
		inRange("hidden", s.Hidden, maxHidden),
		inRange("layers", len(s.Layers), maxLayers),
		positive("embed scale", s.EmbedScale),
		positive("norm eps", s.NormEps),
	); err != nil {
		return err
	}
	if s.MaxPositions < 0 || s.MaxPositions > maxTokens {
		return bad("max positions", s.MaxPositions, fmt.Sprintf("0 to %d", maxTokens))
	}
	if s.NormOffset != 0 && s.NormOffset != 1 {
		return bad("norm offset", s.NormOffset, "0 or 1")
	}
	for i, r := range s.Ropes {
		at := fmt.Sprintf("ropes[%d].", i)
		if err := firstError(positive(at+"theta", r.Theta), positive(at+"factor", r.Factor)); err != nil {
			return err
		}
		if r.Rotary < 2 || r.Rotary%2 != 0 {
			return bad(at+"rotary", r.Rotary, "an even number above 0")
		}
		if l := r.Llama3; l != nil {
			if err := firstError(
				positive(at+"llama3.factor", l.Factor),
				positive(at+"llama3.low freq", l.LowFreq),
				positive(at+"llama3.high freq", l.HighFreq),
				inRange(at+"llama3.original", l.Original, maxTokens),
			); err != nil {
				return err
			}
			if l.HighFreq <= l.LowFreq {
				return bad(at+"llama3.high freq", l.HighFreq, fmt.Sprintf("above the low frequency %v", l.LowFreq))
			}
		}
	}
	for i, l := range s.Layers {
		at := fmt.Sprintf("layers[%d].", i)
		a, m := l.Attention, l.MLP
		if a == nil || m == nil {
			return bad(at+"attention, mlp", "none", "both")
		}
		if err := firstError(
			inRange(at+"heads", a.Heads, maxHeads),
			inRange(at+"kv heads", a.KVHeads, maxHeads),
			inRange(at+"head dim", a.HeadDim, maxHeadDim),
			positive(at+"scale", a.Scale),
			inRange(at+"intermediate", m.Intermediate, maxIntermediate),
		); err != nil {
			return err
		}
		if a.Heads%a.KVHeads != 0 {
			return bad(at+"kv heads", a.KVHeads, fmt.Sprintf("a divisor of the %d heads", a.Heads))
		}
		if a.Window < 0 || a.Window > maxTokens {
			return bad(at+"window", a.Window, fmt.Sprintf("0 to %d", maxTokens))
		}
		if a.Rope < 0 || a.Rope >= len(s.Ropes) {
			return bad(at+"rope", a.Rope, fmt.Sprintf("an index into the %d ropes", len(s.Ropes)))
		}
		if r := s.Ropes[a.Rope]; r.Rotary > a.HeadDim {
			return bad(at+"rope.rotary", r.Rotary, fmt.Sprintf("at most the head dim %d", a.HeadDim))
		}
		if m.Activation > GELUTanh {
			return bad(at+"activation", m.Activation, "silu or gelu-tanh")
		}
	}
	return nil
}

func firstError(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// String prints s as a small table; neighbouring layers that are equal share a line.
func (s *Spec) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: vocab %d, hidden %d, %d layers, norm eps %g", s.Family, s.Vocab, s.Hidden, len(s.Layers), s.NormEps)
	if s.NormOffset != 0 {
		fmt.Fprintf(&b, " (weights + %g)", s.NormOffset)
	}
	if s.EmbedScale != 1 {
		fmt.Fprintf(&b, ", embeddings x %.6g", s.EmbedScale)
	}
	if s.Tied {
		b.WriteString(", tied head")
	}
	if s.MaxPositions > 0 {
		fmt.Fprintf(&b, ", %d positions", s.MaxPositions)
	}
	if s.DType != "" {
		fmt.Fprintf(&b, ", %s", s.DType)
	}
	b.WriteByte('\n')

	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "layers\theads\tkv\tdim\twindow\trope\tscale\tqk norm\tbias\tmlp\tpost norms")
	for i := 0; i < len(s.Layers); {
		line, j := s.Layers[i].row(), i+1
		for j < len(s.Layers) && s.Layers[j].row() == line {
			j++
		}
		span := strconv.Itoa(i)
		if j > i+1 {
			span += ".." + strconv.Itoa(j-1)
		}
		fmt.Fprintf(w, "%s\t%s\n", span, line)
		i = j
	}
	w.Flush()

	for i, r := range s.Ropes {
		fmt.Fprintf(&b, "rope %d: theta %g, rotates %d", i, r.Theta, r.Rotary)
		if r.Factor != 1 {
			fmt.Fprintf(&b, ", linear factor %g", r.Factor)
		}
		if l := r.Llama3; l != nil {
			fmt.Fprintf(&b, ", llama3 factor %g between %g and %g turns of %d tokens", l.Factor, l.LowFreq, l.HighFreq, l.Original)
		}
		b.WriteByte('\n')
	}
	for _, n := range s.Notes {
		fmt.Fprintf(&b, "note: %s\n", n)
	}
	return b.String()
}

// row is the layer as tab-separated cells.
func (l Layer) row() string {
	a, m := l.Attention, l.MLP
	if a == nil || m == nil {
		return "incomplete"
	}
	window := "-"
	if a.Window > 0 {
		window = strconv.Itoa(a.Window)
	}
	var biases []string
	for _, x := range []struct {
		on   bool
		name string
	}{{a.QKVBias, "qkv"}, {a.OutBias, "o"}, {m.Bias, "mlp"}} {
		if x.on {
			biases = append(biases, x.name)
		}
	}
	bias := "-"
	if len(biases) > 0 {
		bias = strings.Join(biases, "+")
	}
	mark := func(on bool) string {
		if on {
			return "yes"
		}
		return "-"
	}
	return fmt.Sprintf("%d\t%d\t%d\t%s\t%d\t%.6g\t%s\t%s\t%d %s\t%s", a.Heads, a.KVHeads, a.HeadDim, window, a.Rope, a.Scale,
		mark(a.QKNorm), bias, m.Intermediate, m.Activation, mark(l.PostNorms))
}

// rope returns the index of r in s.Ropes, where it is put if it is new.
func (s *Spec) rope(r Rope) int {
	for i, have := range s.Ropes {
		if have.equal(r) {
			return i
		}
	}
	s.Ropes = append(s.Ropes, r)
	return len(s.Ropes) - 1
}

func (r Rope) equal(o Rope) bool {
	if (r.Llama3 == nil) != (o.Llama3 == nil) || r.Llama3 != nil && *r.Llama3 != *o.Llama3 {
		return false
	}
	r.Llama3, o.Llama3 = nil, nil
	return r == o
}

// note adds a sentence to the notes, once.
func (s *Spec) note(format string, args ...any) {
	if n := fmt.Sprintf(format, args...); !slices.Contains(s.Notes, n) {
		s.Notes = append(s.Notes, n)
	}
}
