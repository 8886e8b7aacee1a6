package trainerrank_test

import (
	"bufio"
	"bytes"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"testing"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/internal/golden"
	"github.com/trainerrank/engine/trainerrank"
)

// resident reads a size from /proc/self/status, in bytes.
func resident(t *testing.T, field string) int64 {
	t.Helper()
	data, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	for lines := bufio.NewScanner(bytes.NewReader(data)); lines.Scan(); {
		if rest, ok := strings.CutPrefix(lines.Text(), field+":"); ok {
			n, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			return n << 10
		}
	}
	t.Fatalf("/proc/self/status has no %s", field)
	return 0
}

// The counters tell the truth about the machine: in a call that needs 512 MiB or more, once nearly all for scratch and once nearly all
// for outputs, the process's peak resident set grows by no more than was predicted, and 32 MiB for everything else.
func TestResidentMemoryGrowsByWhatWasPredicted(t *testing.T) {
	if testing.Short() || raceEnabled {
		t.Skip("takes half a GiB and seconds")
	}
	const slack = 32 << 20
	for _, c := range []struct {
		name, config string
		requests     int
		each         forward.Input
		mostly       device.Purpose
	}{
		{"scratch", `{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 32, "num_hidden_layers": 1,
			"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "vocab_size": 160,
			"tie_word_embeddings": true, "hidden_act": "silu", "max_position_embeddings": 4096}`, 300, forward.Input{TopK: 1}, device.Scratch},
		{"outputs", `{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
			"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "vocab_size": 50000,
			"tie_word_embeddings": true, "hidden_act": "silu", "max_position_embeddings": 4096}`, 24, forward.Input{Logits: true}, device.Outputs},
	} {
		t.Run(c.name, func(t *testing.T) {
			m, rank := load(t, golden.Synthetic{Config: c.config, DType: "BF16", Seed: 1}.Write(t), golden.Options{Threads: 2})
			r := golden.Rand(2)
			var inputs []forward.Input
			for range c.requests {
				in := c.each
				for range 120 {
					in.Tokens = append(in.Tokens, int32(r.IntN(m.Spec().Vocabulary)))
				}
				inputs = append(inputs, in)
			}
			call := forward.Many(inputs...)
			debug.FreeOSMemory()
			if err := os.WriteFile("/proc/self/clear_refs", []byte("5"), 0); err != nil {
				t.Skipf("SKIPPED: the peak of the resident set cannot be reset: %v", err)
			}
			before := resident(t, "VmRSS")
			res, err := rank.DPRankForward(t.Context(), call)
			if err != nil {
				t.Fatal(err)
			}
			defer res.Release()
			grown, predicted := resident(t, "VmHWM")-before, res.Telemetry.PredictedPeakBytes
			t.Logf("predicted %d bytes, the resident set grew by %d (%+d)", predicted, grown, grown-predicted)
			if predicted < 512<<20 {
				t.Errorf("the call needs %d bytes only", predicted)
			}
			if grown > predicted+slack {
				t.Errorf("the resident set grew by %d bytes, %d more than predicted", grown, grown-predicted)
			}
			if grown < predicted*9/10 {
				t.Errorf("the resident set grew by %d bytes of the %d predicted: this measures something else", grown, predicted)
			}
			if a, err := rank.Plan(t.Context(), call); err != nil || a.Shares[c.mostly] < predicted*9/10 {
				t.Errorf("the call needs %v: %v", a.Shares, err)
			}
			res.Release()
			debug.FreeOSMemory()
			if left := resident(t, "VmRSS") - before; left > slack {
				t.Errorf("%d bytes stayed resident after the release", left)
			}
		})
	}
}

// A split takes no more of the machine than was predicted for it, and leaves what its outputs take: the rest of its slab is given back.
func TestResidentMemoryOfASplit(t *testing.T) {
	if testing.Short() || raceEnabled {
		t.Skip("takes half a GiB and seconds")
	}
	const slack = 32 << 20
	m := golden.Load(t, golden.Synthetic{Config: `{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 32, "num_hidden_layers": 1,
		"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "vocab_size": 160,
		"tie_word_embeddings": true, "hidden_act": "silu", "max_position_embeddings": 4096}`, DType: "BF16", Seed: 1}.Write(t), golden.Options{Threads: 2})
	r := golden.Rand(2)
	var inputs []forward.Input
	for i := range 300 {
		in := forward.Input{TopK: 1, HiddenStates: i%8 == 0}
		for range 120 {
			in.Tokens = append(in.Tokens, int32(r.IntN(160)))
		}
		inputs = append(inputs, in)
	}
	call := forward.Many(inputs...)
	a, err := wrap(t, m.Model).Plan(t.Context(), call)
	if err != nil {
		t.Fatal(err)
	}
	rank := wrap(t, m.Model, trainerrank.WithUsableBytes(a.PredictedPeakBytes*2/3))
	debug.FreeOSMemory()
	if err := os.WriteFile("/proc/self/clear_refs", []byte("5"), 0); err != nil {
		t.Skipf("SKIPPED: the peak of the resident set cannot be reset: %v", err)
	}
	before := resident(t, "VmRSS")
	res, err := rank.DPRankForward(t.Context(), call)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Release()
	tel := res.Telemetry
	grown := resident(t, "VmHWM") - before
	debug.FreeOSMemory()
	left := resident(t, "VmRSS") - before
	t.Logf("%d subforwards: predicted %d bytes, the resident set grew by %d (%+d), and stayed larger by %d, of which %d are outputs", tel.SubforwardCount,
		tel.PredictedPeakBytes, grown, grown-tel.PredictedPeakBytes, left, tel.RetainedBytes)
	if tel.SubforwardCount < 2 || tel.ObservedPeakBytes != tel.PredictedPeakBytes || tel.RetainedBytes < 2*slack || tel.PredictedPeakBytes < tel.RetainedBytes+2*slack {
		t.Errorf("%+v", tel)
	}
	if grown > tel.PredictedPeakBytes+slack || grown < tel.PredictedPeakBytes*9/10 {
		t.Errorf("the resident set grew by %d bytes, predicted %d", grown, tel.PredictedPeakBytes)
	}
	if left > tel.RetainedBytes+slack {
		t.Errorf("%d bytes stayed, the outputs have %d", left, tel.RetainedBytes)
	}
	res.Release()
	if left := resident(t, "VmRSS") - before; left > slack {
		t.Errorf("%d bytes stayed resident after the release", left)
	}
}
