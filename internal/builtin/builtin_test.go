package builtin_test

import (
	"io/fs"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/internal/builtin"
	"github.com/trainerrank/engine/internal/golden"
	"github.com/trainerrank/engine/trainerrank"
)

func TestOpenSaysWhatThereIs(t *testing.T) {
	if d := cmp.Diff([]string{builtin.Default}, builtin.Names()); d != "" {
		t.Error(d)
	}
	for _, name := range []string{"", "none", ".", "..", "arith/config.json"} {
		if _, err := builtin.Open(name); err == nil || !strings.Contains(err.Error(), builtin.Default) {
			t.Errorf("%q: %v", name, err)
		}
	}
	folder, err := builtin.Open(builtin.Default)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"config.json", "model.safetensors", "requests.jsonl"} {
		if _, err := fs.Stat(folder, name); err != nil {
			t.Error(err)
		}
	}
}

// The built-in model, scored by the public API with each kernel, gives the logprobs of its float64 references.
func TestBuiltInModelIsRight(t *testing.T) {
	folder := golden.FS(t, builtin.Default)
	requests := golden.Requests(t, folder)
	references := golden.References(t, builtin.Default, folder)
	golden.Kernels(t, func(t *testing.T, _ string) {
		rank, err := trainerrank.New(golden.Load(t, folder, golden.Options{Threads: 2}).Model)
		if err != nil {
			t.Fatal(err)
		}
		res, err := rank.DPRankForward(t.Context(), forward.Many(golden.Inputs(requests)...))
		if err != nil {
			t.Fatal(err)
		}
		defer res.Release()
		w := references.Errors(t, requests, golden.CopyAll(res.Outputs.Flat()))
		if t.Logf("logprobs are off by at most %.1e", w.Logprob); !(w.Logprob > 0 && w.Logprob <= 5e-5) {
			t.Errorf("logprobs are off by %v, 5e-5 are allowed", w.Logprob)
		}
	})
}
