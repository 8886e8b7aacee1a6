package trainerrank_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/tensor"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/internal/golden"
	"github.com/trainerrank/engine/slots"
	"github.com/trainerrank/engine/trainerrank"
)

// trained is a rank with a fresh adapter "a" on every projection, whose B is not zero.
func trained(t testing.TB, model string, o golden.Options, opts ...trainerrank.Option) (*golden.Loaded, *trainerrank.TrainerRank) {
	t.Helper()
	m, rank := load(t, golden.FS(t, model), o, opts...)
	t.Cleanup(rank.Close)
	for _, name := range []string{"a", "b"} {
		if err := rank.CreateCheckpoint(t.Context(), name, slots.Config{Rank: 3, Alpha: 6, TargetPattern: slots.AllLinear, Seed: uint64(len(name) + int(name[0]))}); err != nil {
			t.Fatal(err)
		}
		a, err := rank.Checkpoints().Adapter(name)
		if err != nil {
			t.Fatal(err)
		}
		r := golden.Rand(7)
		for _, l := range a.LoRA {
			mod := m.Modules()[l.Module]
			b := a.Params.Slice(l.B, int64(l.Rank*mod.Out)*4).F32()
			for i := range b {
				b[i] = float32(r.NormFloat64()) * 0.1
			}
		}
	}
	return m, rank
}

// gradients is a copy of what was accumulated for a checkpoint.
func gradients(t testing.TB, rank *trainerrank.TrainerRank, name string) []float32 {
	t.Helper()
	g, err := rank.Checkpoints().Gradients(name)
	if err != nil {
		t.Fatal(err)
	}
	return slices.Clone(g.F32())
}

// cotangentsOf draws a cotangent for every output that has one.
func cotangentsOf(r *rand.Rand, spec forward.Spec, inputs []forward.Input) []forward.OutputGrad {
	grads := make([]forward.OutputGrad, len(inputs))
	draw := func(n int) []float32 {
		x := make([]float32, n)
		for i := range x {
			x[i] = float32(r.NormFloat64())
		}
		return x
	}
	for i, in := range inputs {
		if in.Targets != nil {
			grads[i].TargetLogprobs = draw(len(in.Targets))
		}
		if in.Logits {
			grads[i].Logits = draw(len(in.Tokens) * spec.Vocabulary)
		}
		if in.HiddenStates {
			grads[i].HiddenStates = draw(len(in.Tokens) * spec.Hidden)
		}
	}
	return grads
}

// distance is the L2 distance of two vectors relative to the second.
func distance(got, want []float32) float64 {
	var n, d float64
	for i := range want {
		x := float64(got[i]) - float64(want[i])
		n, d = n+x*x, d+float64(want[i])*float64(want[i])
	}
	return math.Sqrt(n / d)
}

var withGrad = trainerrank.WithGradMode(forward.WithGrad)

// onA are the options of a call that trains checkpoint a.
func onA(more ...trainerrank.CallOption) []trainerrank.CallOption {
	return append([]trainerrank.CallOption{withGrad, trainerrank.WithCheckpoint(forward.Checkpoint("a"))}, more...)
}

// A training call uses what was predicted, in its forward and in its backward, under every retention; its gradients have the same bits under each, and nothing is
// left of it.
func TestTrainingUsesWhatWasPredicted(t *testing.T) {
	folder := golden.FS(t, "qwen2-tiny")
	requests := golden.Requests(t, folder)
	inputs := golden.Inputs(requests)
	for threads := 1; threads <= 2; threads++ {
		m, rank := trained(t, "qwen2-tiny", golden.Options{Threads: threads})
		grads := cotangentsOf(golden.Rand(1), m.Spec(), inputs)
		var first []float32
		for _, keep := range []trainerrank.Retention{trainerrank.Stored, trainerrank.Layer, trainerrank.Replay} {
			opts := onA(trainerrank.WithRetentions(keep))
			a, err := rank.Plan(t.Context(), forward.Many(inputs...), opts...)
			if err != nil {
				t.Fatal(err)
			}
			before, live := stateOf(m.Host), m.Host.Stats().TotalInUse()
			m.Host.ResetPeak()
			res, err := rank.DPRankForward(t.Context(), forward.Many(inputs...), opts...)
			if err != nil {
				t.Fatal(err)
			}
			if res.Telemetry.Retention != keep || a.Shares.Total() != a.PredictedPeakBytes {
				t.Errorf("%s: ran with %s; shares %v of %d", keep, res.Telemetry.Retention, a.Shares, a.PredictedPeakBytes)
			}
			if err := rank.Checkpoints().Load(t.Context(), "a", t.TempDir(), slots.LoadOptions{}); err == nil || !strings.Contains(err.Error(), "live") {
				t.Errorf("loaded over a live graph: %v", err)
			}
			if err := res.Backward(t.Context(), grads); err != nil {
				t.Fatal(err)
			}
			s := m.Host.Stats()
			if got, want := s.PeakInUse-live, a.PredictedPeakBytes; got != want || s.PeakAllocated-before.Allocated != want || res.ObservedPeakBytes() != want {
				t.Errorf("%s, %d threads: %d bytes in use at the peak, %d allocated, %d observed, %d predicted", keep, threads, got, s.PeakAllocated-before.Allocated, res.ObservedPeakBytes(), want)
			}
			if got := s.Allocated - before.Allocated; got != a.Shares[device.Outputs] {
				t.Errorf("%s: %d bytes after the backward, outputs take %d", keep, got, a.Shares[device.Outputs])
			}
			var used *trainerrank.GraphError
			if err := res.Backward(t.Context(), grads); !errors.As(err, &used) {
				t.Errorf("a second backward: %v", err)
			}
			res.Release()
			if err := res.Backward(t.Context(), grads); !errors.As(err, &used) {
				t.Errorf("a backward after the release: %v", err)
			}
			unchanged(t, m.Host, before)
			got := gradients(t, rank, "a")
			if first == nil {
				first = got
			} else if !slices.Equal(got, first) {
				t.Errorf("%s, %d threads: other gradients", keep, threads)
			}
			if err := rank.ZeroGrad("a"); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// Whatever the split, the order of the backwards and what is kept, gradients are those of the whole call, and no call takes more than it was admitted with.
func TestSplitTraining(t *testing.T) {
	m, rank := trained(t, "qwen2-tiny", golden.Options{Threads: 2})
	calls := 12
	if testing.Short() {
		calls = 3
	}
	seen := map[string]int{}
	for seed := range uint64(calls) {
		r := golden.Rand(seed)
		inputs := golden.Draw(r, m.Spec().Vocabulary, 3+r.IntN(6), 150)
		grads := cotangentsOf(r, m.Spec(), inputs)
		for i := range inputs { // some run on another checkpoint, or keep no graph
			switch r.IntN(6) {
			case 0:
				inputs[i].Checkpoint = forward.Checkpoint("b")
			case 1:
				inputs[i].Grad = forward.NoGrad
				grads[i] = forward.OutputGrad{}
			}
		}
		in := forward.Many(inputs...)
		whole, err := rank.Plan(t.Context(), in, onA(trainerrank.WithRetentions(trainerrank.Stored))...)
		if err != nil {
			t.Fatal(err)
		}
		var want [2][]float32
		var outputs []golden.Answer
		for _, percent := range []int64{100, 99, 80, 60, 50, 40, 30, 20, 12} {
			budget := whole.PredictedPeakBytes * percent / 100
			ballast, err := m.Host.Allocate(device.Ballast, m.Host.Free()-device.RoundPages(budget))
			if err != nil {
				t.Fatal(err)
			}
			budget = m.Host.Free()
			for _, order := range []string{"combined", "reverse"} {
				before := stateOf(m.Host)
				res, err := rank.DPRankForward(t.Context(), in, onA()...)
				var refused *trainerrank.MemoryError
				if errors.As(err, &refused) {
					if percent == 100 {
						t.Fatal(err)
					}
					seen["refused"]++
					unchanged(t, m.Host, before)
					continue
				}
				if err != nil {
					t.Fatalf("seed %d, %d %%: %v", seed, percent, err)
				}
				seen[fmt.Sprintf("%s, split %v", res.Telemetry.Retention, res.Telemetry.SubforwardCount > 1)]++
				answers := golden.CopyAll(res.Outputs.Flat())
				if outputs == nil {
					outputs = answers
				}
				for i := range answers {
					if d := golden.Diff(outputs[i], answers[i]); d != "" {
						t.Fatalf("seed %d, %d %%: output %d: %s", seed, percent, i, d)
					}
				}
				if order == "combined" {
					err = res.Backward(t.Context(), grads)
				} else {
					for _, s := range slices.Backward(res.Subforwards()) {
						own := make([]forward.OutputGrad, len(s.RequestIndices))
						kept := false
						for i, q := range s.RequestIndices {
							own[i] = grads[q]
							kept = kept || inputs[q].Active() && inputs[q].Grad != forward.NoGrad
						}
						if e := s.Backward(t.Context(), own); kept != (e == nil) {
							err = errors.Join(err, fmt.Errorf("subforward keeps a graph: %v, backward: %w", kept, e))
						}
					}
				}
				var none *trainerrank.GraphError
				if errors.As(err, &none) && !slices.ContainsFunc(inputs, func(in forward.Input) bool { return in.Active() && in.Grad != forward.NoGrad }) {
					err = nil // no input keeps a graph
				}
				if err != nil {
					t.Fatalf("seed %d, %d %%, %s: %v", seed, percent, order, err)
				}
				if got, want := res.ObservedPeakBytes(), res.Telemetry.PredictedPeakBytes; got > want || want > budget || order == "combined" && none == nil && got != want {
					t.Errorf("seed %d, %d %%, %s, %s: %d bytes observed, %d predicted, %d usable", seed, percent, order, res.Telemetry.Retention, got, res.Telemetry.PredictedPeakBytes, budget)
				}
				res.Release()
				unchanged(t, m.Host, before)
				for i, name := range []string{"a", "b"} {
					got := gradients(t, rank, name)
					if want[i] == nil {
						want[i] = got
					} else if e := distance(got, want[i]); e > 1e-5 {
						t.Errorf("seed %d, %d %%, %s: gradients of %s are %.2e off", seed, percent, order, name, e)
					}
				}
				if err := rank.ZeroGrad(); err != nil {
					t.Fatal(err)
				}
			}
			ballast.Free()
		}
	}
	t.Log(seen)
	for _, what := range []string{"stored, split false", "stored, split true", "layer, split true"} {
		if seen[what] == 0 {
			t.Errorf("no call was %s: %v", what, seen)
		}
	}
}

// A result that is abandoned is collected, with the leases of its graphs.
func TestAbandonedGraphs(t *testing.T) {
	m, rank := trained(t, "qwen2-tiny", golden.Options{})
	before := stateOf(m.Host)
	func() {
		res, err := rank.DPRankForward(t.Context(), forward.One(forward.Input{Tokens: []int32{1, 2, 3}, Targets: []int32{2, 3, 4}}), onA()...)
		if err != nil {
			t.Fatal(err)
		}
		if info, _ := rank.Checkpoints().Info("a"); info.Live != 1 {
			t.Errorf("%d leases", info.Live)
		}
		runtime.KeepAlive(res)
	}()
	if !collected(func() bool { info, _ := rank.Checkpoints().Info("a"); return info.Live == 0 }) {
		t.Error("the lease was not released")
	}
	unchanged(t, m.Host, before)
}

// A backward that is cancelled changes nothing: it can be run again, and gives what it would have given.
func TestCancelledBackward(t *testing.T) {
	m, rank := trained(t, "qwen2-tiny", golden.Options{})
	inputs := golden.Draw(golden.Rand(3), m.Spec().Vocabulary, 4, 100)
	grads := cotangentsOf(golden.Rand(4), m.Spec(), inputs)
	for _, keep := range []trainerrank.Retention{trainerrank.Stored, trainerrank.Layer, trainerrank.Replay} {
		run := func(cancel bool) []float32 {
			res, err := rank.DPRankForward(t.Context(), forward.Many(inputs...), onA(trainerrank.WithRetentions(keep))...)
			if err != nil {
				t.Fatal(err)
			}
			defer res.Release()
			if cancel {
				for _, after := range []int{0, 1, 3, 5} {
					if err := res.Backward(&cancelled{Context: t.Context(), after: after}, grads); !errors.Is(err, context.Canceled) {
						t.Errorf("%s, after %d looks: %v", keep, after, err)
					}
				}
			}
			if err := res.Backward(t.Context(), grads); err != nil {
				t.Fatal(err)
			}
			g := gradients(t, rank, "a")
			if err := rank.ZeroGrad(); err != nil {
				t.Fatal(err)
			}
			return g
		}
		if !slices.Equal(run(true), run(false)) {
			t.Errorf("%s: other gradients after a backward that was cancelled", keep)
		}
	}
}

// cancelled is a context that ends after some looks at it.
type cancelled struct {
	context.Context
	after int
}

func (c *cancelled) Err() error {
	if c.after--; c.after < 0 {
		return context.Canceled
	}
	return nil
}

// Cotangents that do not belong to the outputs are refused by name, and nothing is changed.
func TestWrongCotangents(t *testing.T) {
	m, rank := trained(t, "qwen2-tiny", golden.Options{})
	in := forward.Many(forward.Input{Tokens: []int32{1, 2, 3}, Targets: []int32{2, 3, 4}}, forward.Input{Tokens: []int32{1, 2}, TopK: 1, Grad: forward.NoGrad})
	res, err := rank.DPRankForward(t.Context(), in, onA()...)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Release()
	one := forward.OutputGrad{TargetLogprobs: []float32{1, 1, 1}}
	for _, c := range []struct {
		want  string
		grads []forward.OutputGrad
	}{
		{"cotangents of 1 outputs, but there are 2", []forward.OutputGrad{one}},
		{"output 1 has a cotangent, but keeps no graph", []forward.OutputGrad{one, one}},
		{"output 0 has 2 cotangents for its target logprobs, but 3 values", []forward.OutputGrad{{TargetLogprobs: []float32{1, 2}}, {}}},
		{"output 0 has a cotangent for its logits, which were not asked for", []forward.OutputGrad{{Logits: make([]float32, 3*m.Spec().Vocabulary)}, {}}},
	} {
		if err := res.Backward(t.Context(), c.grads); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v, want %s", err, c.want)
		}
	}
	if err := res.Backward(t.Context(), []forward.OutputGrad{one, {}}); err != nil {
		t.Errorf("after all these: %v", err)
	}
	plain, err := rank.DPRankForward(t.Context(), in, trainerrank.WithCheckpoint(forward.Checkpoint("a")))
	if err != nil {
		t.Fatal(err)
	}
	defer plain.Release()
	if err := plain.Backward(t.Context(), make([]forward.OutputGrad, 2)); err == nil || !strings.Contains(err.Error(), "kept no graph") {
		t.Errorf("%v", err)
	}
}

// Three steps of AdamW on the golden loss, against the float64 references: the whole way from files to files.
func TestGoldenSteps(t *testing.T) {
	for _, c := range []struct{ model, adapter string }{{"qwen3-tiny", "adapter-a"}, {"qwen3-tiny", "adapter-b"}, {"llama3-tiny", "adapter-a"}, {"llama3-tiny", "adapter-b"}} {
		t.Run(c.model+"/"+c.adapter, func(t *testing.T) {
			folder := golden.FS(t, c.model)
			m, rank := load(t, folder, golden.Options{Threads: 2})
			defer rank.Close()
			if err := rank.LoadCheckpoint(t.Context(), "a", filepath.Join(golden.Dir(t, c.model), c.adapter)); err != nil {
				t.Fatal(err)
			}
			requests := golden.Requests(t, folder)
			ref := golden.Tensors(t, folder, "gradients.safetensors")
			grads := golden.Cotangents(requests, ref)
			want := golden.Tensors(t, folder, "adamw."+c.adapter+".safetensors")
			start := golden.Tensors(t, golden.Sub(t, folder, c.adapter), "adapter_model.safetensors")
			for step := 1; step <= 3; step++ {
				res, err := rank.DPRankForward(t.Context(), forward.Many(golden.Inputs(requests)...), onA()...)
				if err != nil {
					t.Fatal(err)
				}
				if err := res.Backward(t.Context(), grads); err != nil {
					t.Fatal(err)
				}
				res.Release()
				report, err := rank.OptimStep(t.Context(), slots.StepOptions{Params: slots.AdamParams{LearningRate: 1e-2, Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, WeightDecay: 0.1, GradClipNorm: 0.5}})
				if err != nil {
					t.Fatal(err)
				}
				if norm := want["pre_clip_norms"][step-1]; math.Abs(report.Slots[0].GradNorm/norm-1) > 2e-5 {
					t.Errorf("step %d: norm %v, want %v", step, report.Slots[0].GradNorm, norm)
				}
				if step == 2 {
					continue
				}
				prefix := map[int]string{1: "step1.", 3: ""}[step]
				a, err := rank.Checkpoints().Adapter("a")
				if err != nil {
					t.Fatal(err)
				}
				var n, d float64
				for name, got := range golden.Named(m.Modules(), a, a.Params.F32()) {
					for i, v := range got {
						x, u := float64(v)-want[prefix+name][i], want[prefix+name][i]-start[name][i]
						n, d = n+x*x, d+u*u
					}
				}
				if e := math.Sqrt(n / d); !(e <= 1e-4) {
					t.Errorf("step %d: the update is %.2e off", step, e)
				} else {
					t.Logf("step %d: the update is %.1e off", step, e)
				}
			}
		})
	}
}

// All parameters of the base model are trained: gradients are the golden ones, accumulated over two calls of half the loss, and a step lowers the loss.
func TestTrainBase(t *testing.T) {
	for _, model := range []string{"qwen2-tiny", "gemma3-tiny", "qwen3-sharded-bf16"} {
		t.Run(model, func(t *testing.T) {
			folder := golden.FS(t, model)
			m, rank := load(t, folder, golden.Options{Threads: 2, Base: true})
			defer rank.Close()
			requests := golden.Requests(t, folder)
			ref := golden.Tensors(t, folder, "gradients.safetensors")
			grads := golden.Cotangents(requests, ref)
			in := forward.Many(golden.Inputs(requests)...)
			var frozen *trainerrank.SlotStateError
			if _, err := rank.DPRankForward(t.Context(), in, withGrad); !errors.As(err, &frozen) {
				t.Errorf("trained before it was said: %v", err)
			}
			if err := rank.TrainBase(t.Context()); err != nil {
				t.Fatal(err)
			}
			loss := func(backward bool) float64 {
				res, err := rank.DPRankForward(t.Context(), in, withGrad)
				if err != nil {
					t.Fatal(err)
				}
				defer res.Release()
				sum := 0.0
				for i, o := range res.Outputs.Flat() {
					dot := func(x *tensor.Dense, c []float32) {
						for j := range c {
							sum += float64(x.Data().([]float32)[j]) * float64(c[j])
						}
					}
					dot(o.TargetLogprobs, grads[i].TargetLogprobs)
					dot(o.Logits, grads[i].Logits)
					dot(o.HiddenStates, grads[i].HiddenStates)
				}
				if backward {
					if err := res.Backward(t.Context(), grads); err != nil {
						t.Fatal(err)
					}
				}
				return sum
			}
			first := loss(true)
			loss(true)
			vector, err := rank.Checkpoints().Gradients("")
			if err != nil {
				t.Fatal(err)
			}
			var n, d float64
			for i, p := range m.Params() {
				for j, v := range m.BaseValues(vector, i) {
					x := float64(v)/2 - ref[p.Name][j]
					n, d = n+x*x, d+ref[p.Name][j]*ref[p.Name][j]
				}
			}
			if e := math.Sqrt(n / d); !(e <= 2e-5) {
				t.Errorf("gradients are %.2e off", e)
			}
			if _, err := rank.OptimStep(t.Context(), slots.StepOptions{Params: slots.Adam(1e-3)}); err != nil {
				t.Fatal(err)
			}
			if after := loss(false); !(after < first) {
				t.Errorf("the loss was %v and is %v after a step", first, after)
			}
		})
	}
}

// A call is planned on outlines of checkpoints as on the checkpoints themselves, and is not run on them.
func TestPlanOnOutlines(t *testing.T) {
	m, rank := load(t, golden.FS(t, "qwen2-tiny"), golden.Options{}, trainerrank.WithUsableBytes(1<<20))
	defer rank.Close()
	set := rank.Checkpoints()
	var outlines []*slots.Outline
	configs := map[string]slots.Config{"a": {Rank: 3, Alpha: 1, TargetPattern: slots.AllLinear}, "b": {Rank: 9, Alpha: 1, Targets: []string{"q_proj", "up_proj"}}}
	for name, c := range configs {
		o, err := set.OutlineNew(name, c)
		if err != nil {
			t.Fatal(err)
		}
		outlines = append(outlines, o)
	}
	inputs := golden.Draw(golden.Rand(5), m.Spec().Vocabulary, 9, 150)
	for i := range inputs[:4] {
		inputs[i].Checkpoint = forward.Checkpoint("b")
	}
	in := forward.Many(inputs...)
	calls := [][]trainerrank.CallOption{{trainerrank.WithCheckpoint(forward.Checkpoint("a"))}, onA(), onA(trainerrank.WithRetentions(trainerrank.Replay))}
	var planned []string
	before := stateOf(m.Host)
	for _, opts := range calls {
		var missing *trainerrank.SlotStateError
		if _, err := rank.Plan(t.Context(), in, opts...); !errors.As(err, &missing) {
			t.Errorf("planned on nothing: %v", err)
		}
		opts = append(slices.Clip(opts), trainerrank.WithOutlines(outlines...))
		a, err := rank.Plan(t.Context(), in, opts...)
		if err != nil {
			t.Fatal(err)
		}
		planned = append(planned, a.String())
		if _, err := rank.DPRankForward(t.Context(), in, opts...); !errors.As(err, &missing) {
			t.Errorf("ran on an outline: %v", err)
		}
		unchanged(t, m.Host, before)
	}
	for name, c := range configs {
		if err := rank.CreateCheckpoint(t.Context(), name, c); err != nil {
			t.Fatal(err)
		}
	}
	for i, opts := range calls {
		a, err := rank.Plan(t.Context(), in, opts...)
		if err != nil {
			t.Fatal(err)
		}
		if got := a.String(); got != planned[i] {
			t.Errorf("planned on outlines:\n%son the checkpoints:\n%s", planned[i], got)
		}
		// What is loaded counts, whatever the outlines say.
		other := *outlines[0]
		other.Name = "a"
		other.Trainable = false
		again, err := rank.Plan(t.Context(), in, append(slices.Clip(opts), trainerrank.WithOutlines(&other))...)
		if err != nil || again.String() != planned[i] {
			t.Errorf("beside an outline that is not asked for: %v, %v", again, err)
		}
	}
}
