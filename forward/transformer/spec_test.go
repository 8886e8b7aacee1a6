package transformer

import (
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// The expected frequencies were computed with 40 decimal digits from the wavelength form of the published formula (a
// wavelength 2 pi / f against original / low and original / high), not from the one in InvFreq.
func TestInvFreqAgreesWithDecimalArithmetic(t *testing.T) {
	for _, c := range []struct {
		name string
		rope Rope
		want map[int]float64
	}{
		{"plain", Rope{Theta: 1e4, Rotary: 16, Factor: 1},
			map[int]float64{0: 1, 1: 0.31622776601683793, 2: 0.1, 3: 0.031622776601683793, 4: 0.01, 5: 0.0031622776601683793, 6: 0.001, 7: 0.00031622776601683793}},
		{"linear", Rope{Theta: 1e6, Rotary: 16, Factor: 8},
			map[int]float64{0: 0.125, 1: 0.022228492625486535, 2: 0.0039528470752104742, 3: 0.00070292665648793635, 4: 0.000125, 7: 7.0292665648793635e-07}},
		// llama3-tiny: pair 0 turns 5.09 times in 32 tokens (kept), pair 1 1.097 times (blended), the others less than once.
		{"llama3, tiny", Rope{Theta: 1e4, Rotary: 12, Factor: 1, Llama3: &Llama3Scaling{8, 1, 4, 32}},
			map[int]float64{0: 1, 1: 0.033041057121966347, 2: 0.0058019860420159736, 3: 0.00125, 4: 0.00026930433625398547, 5: 5.8019860420159736e-05}},
		// Llama 3.2 1B: three of its 32 pairs are blended.
		{"llama3, 1B", Rope{Theta: 5e5, Rotary: 64, Factor: 1, Llama3: &Llama3Scaling{32, 1, 4, 8192}},
			map[int]float64{0: 1, 1: 0.66360123769608844, 10: 0.016560440080994446, 14: 0.003211445994752591, 15: 0.0012905479282092638,
				16: 0.00042955679655936820, 17: 9.7082878026276723e-05, 18: 1.9461638184831124e-05, 19: 1.2914767187047390e-05, 31: 9.4183067254349098e-08}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := c.rope.InvFreq()
			if len(got) != c.rope.Rotary/2 {
				t.Fatalf("%d frequencies for %d rotated elements", len(got), c.rope.Rotary)
			}
			for i, w := range c.want {
				if math.Abs(got[i]-w) > 1e-15*w*4 {
					t.Errorf("pair %d: got %.17g, want %.17g", i, got[i], w)
				}
			}
		})
	}
}

func sample() *Spec {
	return &Spec{
		Family: "test", Vocab: 8, Hidden: 4, EmbedScale: 1, NormEps: 1e-6,
		Ropes: []Rope{{Theta: 1e4, Rotary: 2, Factor: 1}, {Theta: 1e4, Rotary: 2, Factor: 1, Llama3: &Llama3Scaling{8, 1, 4, 32}}},
		Layers: []Layer{{
			Attention: &Attention{Heads: 2, KVHeads: 1, HeadDim: 2, Scale: 0.7, QKNorm: true, QKVBias: true, OutBias: true},
			MLP:       &GatedMLP{Intermediate: 6, Bias: true}, PostNorms: true,
		}},
	}
}

func TestValidateNamesTheField(t *testing.T) {
	if err := sample().Validate(); err != nil {
		t.Fatal(err)
	}
	for key, spoil := range map[string]func(*Spec){
		"vocab":                     func(s *Spec) { s.Vocab = 0 },
		"hidden":                    func(s *Spec) { s.Hidden = maxHidden + 1 },
		"layers":                    func(s *Spec) { s.Layers = nil },
		"embed scale":               func(s *Spec) { s.EmbedScale = math.Inf(1) },
		"norm eps":                  func(s *Spec) { s.NormEps = math.NaN() },
		"norm offset":               func(s *Spec) { s.NormOffset = 2 },
		"max positions":             func(s *Spec) { s.MaxPositions = -1 },
		"ropes[0].theta":            func(s *Spec) { s.Ropes[0].Theta = -1 },
		"ropes[0].factor":           func(s *Spec) { s.Ropes[0].Factor = 0 },
		"ropes[0].rotary":           func(s *Spec) { s.Ropes[0].Rotary = 3 },
		"ropes[1].llama3.factor":    func(s *Spec) { s.Ropes[1].Llama3.Factor = 0 },
		"ropes[1].llama3.low freq":  func(s *Spec) { s.Ropes[1].Llama3.LowFreq = 0 },
		"ropes[1].llama3.high freq": func(s *Spec) { s.Ropes[1].Llama3.HighFreq = 1 },
		"ropes[1].llama3.original":  func(s *Spec) { s.Ropes[1].Llama3.Original = 0 },
		"layers[0].attention, mlp":  func(s *Spec) { s.Layers[0].MLP = nil },
		"layers[0].heads":           func(s *Spec) { s.Layers[0].Attention.Heads = 0 },
		"layers[0].kv heads":        func(s *Spec) { s.Layers[0].Attention.KVHeads = 3 },
		"layers[0].head dim":        func(s *Spec) { s.Layers[0].Attention.HeadDim = 513 },
		"layers[0].scale":           func(s *Spec) { s.Layers[0].Attention.Scale = 0 },
		"layers[0].window":          func(s *Spec) { s.Layers[0].Attention.Window = -1 },
		"layers[0].rope":            func(s *Spec) { s.Layers[0].Attention.Rope = 2 },
		"layers[0].rope.rotary":     func(s *Spec) { s.Ropes[0].Rotary = 4 },
		"layers[0].intermediate":    func(s *Spec) { s.Layers[0].MLP.Intermediate = 0 },
		"layers[0].activation":      func(s *Spec) { s.Layers[0].MLP.Activation = 9 },
	} {
		s := sample()
		spoil(s)
		var e *ConfigError
		if err := s.Validate(); !errors.As(err, &e) || e.Key != key {
			t.Errorf("%s: got %v", key, err)
		}
	}
}

func TestLimitsCannotOverflow(t *testing.T) {
	const worst = int64(maxHeads) * maxHeadDim * maxHidden // the largest tensor; the embedding and the feed-forward are smaller
	if int64(maxVocab)*maxHidden > worst*16 || int64(maxIntermediate)*maxHidden > worst {
		t.Fatal("another tensor is the largest")
	}
	if math.MaxInt64/8/maxLayers/16 < worst {
		t.Fatalf("%d elements in each of 16 tensors of %d layers do not fit in 63 bits as bytes", worst, maxLayers)
	}
}

func TestStringShowsWhatTheGoldenModelsDoNotHave(t *testing.T) {
	s := sample()
	s.Layers = append(s.Layers, Layer{})
	s.Notes = []string{"one", "two"}
	want := strings.TrimPrefix(`
test: vocab 8, hidden 4, 2 layers, norm eps 1e-06
layers  heads  kv  dim  window  rope  scale  qk norm  bias       mlp     post norms
0       2      1   2    -       0     0.7    yes      qkv+o+mlp  6 silu  yes
1       incomplete
rope 0: theta 10000, rotates 2
rope 1: theta 10000, rotates 2, llama3 factor 8 between 1 and 4 turns of 32 tokens
note: one
note: two
`, "\n")
	if d := cmp.Diff(want, s.String()); d != "" {
		t.Error(d)
	}
	for _, c := range []struct{ got, want string }{
		{Activation(7).String(), "activation 7"}, {Role(200).String(), "role 200"},
		{Embedding.String(), "embedding"}, {Head.String(), "head"}, {MLPPostNorm.String(), "mlp post norm"}, {QueryBias.String(), "query bias"},
	} {
		if c.got != c.want {
			t.Errorf("got %q, want %q", c.got, c.want)
		}
	}
}
