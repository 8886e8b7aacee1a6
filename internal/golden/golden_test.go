package golden

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/forward/prefixtree"
)

// The copies inside the repository are the golden data, if these lie beside it.
func TestCopiesAreTheGoldenOnes(t *testing.T) {
	for _, model := range []string{"qwen2-tiny", "arith"} {
		dir := filepath.Join(shared(), model)
		if _, err := os.Stat(dir); err != nil {
			t.Skipf("SKIPPED: no golden data beside this checkout: %v", err)
		}
		err := fs.WalkDir(FS(t, model), ".", func(name string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			have, err := fs.ReadFile(FS(t, model), name)
			if err != nil {
				return err
			}
			want, err := os.ReadFile(filepath.Join(dir, name))
			if err != nil {
				return err
			}
			if !bytes.Equal(have, want) {
				t.Errorf("%s/%s differs from the golden file", model, name)
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	}
}

// What is drawn has all that it promises, within a few seeds.
func TestDrawKeepsItsPromises(t *testing.T) {
	seen := map[string]int{}
	const seeds = 20
	for seed := range uint64(seeds) {
		inputs := Draw(Rand(seed), 300, 9, 90)
		rows := make([][]int32, len(inputs))
		for i, in := range inputs {
			rows[i] = in.Tokens
			count := func(what string, yes bool) {
				if yes {
					seen[what]++
				}
			}
			count("targets", in.Targets != nil)
			count("wide targets", in.TargetWidth > 1)
			count("ignored labels", slices.Contains(in.Targets, forward.IgnoreLabel))
			count("top k", in.TopK > 0)
			count("logits", in.Logits)
			count("hidden states", in.HiddenStates)
			count("inactive", !in.Active())
			count("one token", len(in.Tokens) == 1)
			for _, other := range rows[:i] {
				count("duplicate", slices.Equal(other, in.Tokens))
				count("ends inside another", len(in.Tokens) < len(other) && slices.Equal(other[:len(in.Tokens)], in.Tokens))
			}
			if len(in.Tokens) > 90 {
				t.Errorf("seed %d: %d tokens", seed, len(in.Tokens))
			}
		}
		tree, err := prefixtree.Build(rows)
		if err != nil {
			t.Fatal(err)
		}
		if tree.FullSharing().Depth > 2 {
			seen["prefixes two levels deep"]++
		}
	}
	for _, what := range []string{"targets", "wide targets", "ignored labels", "top k", "logits", "hidden states", "inactive", "one token", "duplicate",
		"ends inside another", "prefixes two levels deep"} {
		if seen[what] < 3 {
			t.Errorf("%s: %d times in %d draws", what, seen[what], seeds)
		}
	}
}
