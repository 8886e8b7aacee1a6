package trainerrank_test

import (
	"fmt"
	"io/fs"
	"testing"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/internal/golden"
	"github.com/trainerrank/engine/trainerrank"
)

// An answer has the same bits whatever call it is part of: alone, together, in another order, in another nesting, on 1, 2 or 3 threads, in
// an arena of exactly the bytes predicted or in a large one, without one of the others, and whatever the others ask for.
func TestBitsDoNotDependOnTheCall(t *testing.T) {
	golden.Kernels(t, func(t *testing.T, kernel string) {
		for _, s := range []struct {
			name       string
			folder     func(t testing.TB) fs.FS
			n, longest int
			seeds      uint64
		}{
			{"qwen2-tiny", func(t testing.TB) fs.FS { return golden.FS(t, "qwen2-tiny") }, 10, 90, 3},
			{"llama3-tiny", func(t testing.TB) fs.FS { return golden.FS(t, "llama3-tiny") }, 10, 90, 2},
			{"gemma3-tiny", func(t testing.TB) fs.FS { return golden.FS(t, "gemma3-tiny") }, 10, 120, 2},
			{"mistral-tiny", func(t testing.TB) fs.FS { return golden.FS(t, "mistral-tiny") }, 10, 120, 2},
			{"wide", func(t testing.TB) fs.FS {
				return golden.Synthetic{Config: golden.Wide, DType: "F16", Seed: 5}.Write(t)
			}, 6, 260, 1},
		} {
			if kernel == "generic" || testing.Short() {
				if s.name == "wide" {
					continue // the same code at twenty times the cost; package transformer has it
				}
				s.seeds = 1
			}
			t.Run(s.name, func(t *testing.T) {
				folder := s.folder(t)
				var ranks []*trainerrank.TrainerRank
				var models []*golden.Loaded
				for threads := 1; threads <= 3; threads++ {
					m, rank := load(t, folder, golden.Options{Threads: threads})
					models, ranks = append(models, m), append(ranks, rank)
				}
				for seed := range s.seeds {
					calls(t, models, ranks, seed, s.n, s.longest)
				}
			})
		}
	})
}

func calls(t *testing.T, models []*golden.Loaded, ranks []*trainerrank.TrainerRank, seed uint64, n, longest int) {
	r := golden.Rand(seed)
	vocab := models[0].Spec().Vocabulary
	inputs := golden.Draw(r, vocab, n, longest)
	alone := make([]golden.Answer, len(inputs))
	for i, in := range inputs {
		answers, _ := score(t, ranks[0], forward.One(in))
		alone[i] = answers[0]
	}
	for k, rank := range ranks {
		dev := models[k].Host
		compare := func(what string, order []int, in forward.Inputs) trainerrank.Telemetry {
			t.Helper()
			answers, tel := score(t, rank, in)
			if len(answers) != len(order) {
				t.Fatalf("seed %d, %s: %d answers to %d inputs", seed, what, len(answers), len(order))
			}
			for i, a := range answers {
				if d := golden.Diff(alone[order[i]], a); d != "" {
					t.Fatalf("seed %d, %d threads, %s: input %d (%d tokens) differs from alone (-):\n%s", seed, k+1, what, order[i], len(inputs[order[i]].Tokens), d)
				}
			}
			return tel
		}
		whole := ascending(n)
		tel := compare("together", whole, forward.Many(inputs...))
		order := r.Perm(n)
		compare("shuffled", order, forward.Many(picked(inputs, order)...))
		compare("nested", whole, nested(r, inputs))
		order = r.Perm(n)
		compare("shuffled and nested", order, nested(r, picked(inputs, order)))
		cut := r.IntN(n)
		order = append(whole[:cut:cut], whole[cut+1:]...)
		compare(fmt.Sprintf("without input %d", cut), order, nested(r, picked(inputs, order)))

		ballast, err := dev.Allocate(device.Ballast, dev.Free()-tel.PredictedPeakBytes)
		if err != nil {
			t.Fatal(err)
		}
		compare("in an arena without a byte to spare", whole, forward.Many(inputs...))
		ballast.Free()

		// The others ask for other things, and this one for the same.
		mine := r.IntN(n)
		others := make([]forward.Input, n)
		for i, in := range inputs {
			others[i] = golden.Wants(r, vocab, in.Tokens)
		}
		others[mine] = inputs[mine]
		answers, _ := score(t, rank, forward.Many(others...))
		if d := golden.Diff(alone[mine], answers[mine]); d != "" {
			t.Fatalf("seed %d, %d threads: input %d depends on what others ask for:\n%s", seed, k+1, mine, d)
		}
	}
}

// What is asked beside an output does not change it.
func TestOutputsDoNotDependOnEachOther(t *testing.T) {
	m, rank := load(t, golden.FS(t, "qwen2-tiny"), golden.Options{Threads: 2})
	vocab := m.Spec().Vocabulary
	in := forward.Input{Tokens: tokens(130), Targets: labels(260), TargetWidth: 2, TopK: 7, Logits: true, HiddenStates: true}
	answers, _ := score(t, rank, forward.One(in))
	all := answers[0]
	for mask := range 16 {
		part, want := forward.Input{Tokens: in.Tokens}, golden.Answer{}
		if mask&1 != 0 {
			part.Targets, part.TargetWidth = in.Targets, 2
			want.Targets, want.Shapes = all.Targets, want.Shapes+"targets(130, 2) "
		}
		if mask&2 != 0 {
			part.TopK = 7
			want.TopLogprobs, want.TopTokens, want.Shapes = all.TopLogprobs, all.TopTokens, want.Shapes+"top(130, 7) tokens(130, 7) "
		}
		if mask&4 != 0 {
			part.Logits = true
			want.Logits, want.Shapes = all.Logits, want.Shapes+fmt.Sprintf("logits(130, %d) ", vocab)
		}
		if mask&8 != 0 {
			part.HiddenStates = true
			want.Hidden, want.Shapes = all.Hidden, want.Shapes+fmt.Sprintf("hidden(130, %d) ", m.Spec().Hidden)
		}
		answers, _ := score(t, rank, forward.One(part))
		if d := golden.Diff(want, answers[0]); d != "" {
			t.Errorf("outputs %04b:\n%s", mask, d)
		}
	}
}
