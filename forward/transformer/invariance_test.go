package transformer_test

import (
	"fmt"
	"io/fs"
	"testing"

	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/internal/golden"
)

// subject is a model that invariance is tried on.
type subject struct {
	name    string
	folder  func(t *testing.T) fs.FS
	n       int // requests per draw
	longest int // tokens of a request
	draws   int
	large   bool
}

func goldenSubject(model string, n, longest, draws int) subject {
	return subject{model, func(t *testing.T) fs.FS { return golden.FS(t, model) }, n, longest, draws, false}
}

func synthetic(name, config, dtype string, n, longest, draws int) subject {
	return subject{name + " " + dtype, func(t *testing.T) fs.FS {
		return golden.Synthetic{Config: config, DType: dtype, Seed: 7}.Write(t)
	}, n, longest, draws, true}
}

var subjects = []subject{
	goldenSubject("qwen3-sharded-bf16", 9, 90, 2),
	goldenSubject("mistral-tiny", 9, 90, 3),
	goldenSubject("gemma3-tiny", 9, 90, 2),
	goldenSubject("qwen2-tiny", 9, 300, 1),
	synthetic("wide", golden.Wide, "BF16", 6, 280, 1),
	synthetic("windowed", golden.Windowed, "F32", 6, 280, 1),
}

// No bit of an answer depends on the layout, on the other requests, on their order, or on the number of threads. Each draw of requests runs
// one by one on one thread first.
func TestBitsDoNotDependOnThePlan(t *testing.T) {
	golden.Kernels(t, func(t *testing.T, name string) {
		for _, s := range subjects {
			draws := s.draws
			if name == "generic" || testing.Short() {
				draws, s.n = 1, 6
			}
			if s.large && name == "generic" && testing.Short() {
				continue // a minute under the race detector
			}
			t.Run(s.name, func(t *testing.T) {
				folder := s.folder(t)
				models := []*golden.Loaded{golden.Load(t, folder, golden.Options{Threads: 1})}
				for n := 2; n <= 3; n++ {
					if !testing.Short() || n == 2 {
						models = append(models, golden.Load(t, folder, golden.Options{Threads: n}))
					}
				}
				for seed := range uint64(draws) {
					plans(t, models, s, seed)
				}
			})
		}
	})
}

func plans(t *testing.T, models []*golden.Loaded, s subject, seed uint64) {
	r := golden.Rand(seed)
	inputs := active(golden.Draw(r, models[0].Spec().Vocabulary, s.n, s.longest))
	if b := pack(t, inputs, fullSharing); s.large && len(b.Tokens) <= 240 {
		t.Fatalf("seed %d: %d packed tokens are too few to be cut into blocks", seed, len(b.Tokens))
	}
	alone := make([]golden.Answer, len(inputs))
	for i := range inputs {
		alone[i] = run(t, models[0], inputs[i:i+1], fullSharing)[0]
	}
	compare := func(m *golden.Loaded, what string, order []int, how layout) {
		t.Helper()
		list := make([]forward.Input, len(order))
		for i, k := range order {
			list[i] = inputs[k]
		}
		for i, a := range run(t, m, list, how) {
			if d := golden.Diff(alone[order[i]], a); d != "" {
				t.Fatalf("seed %d, %d threads, %s: request %d (%d tokens) differs from alone (-):\n%s",
					seed, m.Backend.Threads(), what, order[i], len(list[i].Tokens), d)
			}
		}
	}
	for _, m := range models {
		whole := make([]int, len(inputs))
		for i := range whole {
			whole[i] = i
		}
		compare(m, "fully shared", whole, fullSharing)
		compare(m, "not shared", r.Perm(len(inputs)), noSharing)
		compare(m, "partly shared", r.Perm(len(inputs)), someSharing(r))
		cut := r.IntN(len(inputs))
		compare(m, fmt.Sprintf("without request %d", cut), append(whole[:cut:cut], whole[cut+1:]...), fullSharing)
	}
}
