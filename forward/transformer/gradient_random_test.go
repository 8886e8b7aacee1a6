package transformer_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/internal/golden"
)

// retentions are all of them.
var retentions = []forward.Retention{forward.Stored, forward.Layer, forward.Replay}

// apart is the distance of two vectors, relative to the length of the second.
func apart(got, want []float32) float64 {
	var num, den float64
	for i, w := range want {
		d := float64(got[i]) - float64(w)
		num, den = num+d*d, den+float64(w)*float64(w)
	}
	if den == 0 {
		den = 1
	}
	return math.Sqrt(num / den)
}

// sum is a + b.
func sum(a, b []float32) []float32 {
	list := slices.Clone(a)
	for i := range list {
		list[i] += b[i]
	}
	return list
}

// trained is a batch of inputs with gradients by an adapter, or without one by the base model.
func trained(t testing.TB, inputs []forward.Input, how layout, a *forward.Adapter, keep forward.Retention) *forward.Batch {
	t.Helper()
	b := pack(t, inputs, how)
	b.Grad, b.Adapter, b.Keep = true, a, keep
	return b
}

// Random requests with random cotangents, by the base model and by random adapters. Gradients have the same bits on any number of threads and whatever is kept, and each
// backward takes what was rehearsed (see backward). They hardly depend on what is shared and on the order of the requests; and they are linear in the
// cotangents, so a request whose cotangents are zero does not count and the others do.
func TestRandomGradients(t *testing.T) {
	golden.Kernels(t, func(t *testing.T, name string) {
		for _, s := range []subject{
			goldenSubject("qwen2-tiny", 6, 60, 2),
			goldenSubject("gemma3-tiny", 6, 80, 2),
			goldenSubject("qwen3-sharded-bf16", 6, 60, 2),
			synthetic("wide", golden.Wide, "BF16", 5, 260, 1),
			synthetic("windowed", golden.Windowed, "F32", 5, 260, 1),
		} {
			if (name == "generic" || testing.Short()) && s.large || name == "generic" && testing.Short() && s.name != "qwen2-tiny" {
				continue
			}
			t.Run(s.name, func(t *testing.T) {
				folder := s.folder(t)
				var models []*golden.Loaded
				for threads := 1; threads <= 3; threads++ {
					models = append(models, golden.Load(t, folder, golden.Options{Threads: threads}))
				}
				draws := s.draws
				if name == "generic" || testing.Short() { // which is slow, and differs in nothing that is drawn
					draws = 1
				}
				for seed := range uint64(draws) {
					for _, base := range []bool{true, false} {
						randomGradients(t, models, s, seed, base)
					}
				}
			})
		}
	})
}

func randomGradients(t *testing.T, models []*golden.Loaded, s subject, seed uint64, base bool) {
	r := golden.Rand(seed)
	spec := models[0].Decoder()
	inputs := active(golden.Draw(r, spec.Vocab, s.n, s.longest))
	inputs[0].HiddenStates = true
	grads := drawCotangents(r, spec, inputs)
	adapter := func(m *golden.Loaded) *forward.Adapter {
		if base {
			return nil
		}
		return randomAdapter(t, m, golden.Rand(seed), 2)
	}
	at := fmt.Sprintf("seed %d, base %t", seed, base)
	outputs := runBatch(t, models[0], func() *forward.Batch {
		b := pack(t, inputs, fullSharing)
		b.Adapter = adapter(models[0])
		return b
	}())
	var want []float32
	for i, m := range models {
		a := adapter(m)
		for _, keep := range retentions {
			answers, got := backward(t, m, trained(t, inputs, fullSharing, a, keep), grads)
			if want == nil {
				want = got
			}
			what := fmt.Sprintf("%s, %d threads, %s", at, i+1, keep)
			sameBits(t, what, got, want)
			for j := range answers {
				if d := golden.Diff(outputs[j], answers[j]); d != "" {
					t.Errorf("%s: output %d differs from that of a pass without gradients (-):\n%s", what, j, d)
				}
			}
		}
	}
	m := models[r.IntN(len(models))]
	a := adapter(m)
	keep := retentions[r.IntN(len(retentions))]
	near := func(what string, got []float32) {
		t.Helper()
		if d := apart(got, want); !(d <= 1e-5) {
			t.Errorf("%s, %s: gradients are %.1e apart", at, what, d)
		}
	}
	order := r.Perm(len(inputs))
	list, cots := make([]forward.Input, len(inputs)), make([]forward.OutputGrad, len(inputs))
	for i, k := range order {
		list[i], cots[i] = inputs[k], grads[k]
	}
	_, got := backward(t, m, trained(t, list, noSharing, a, keep), cots)
	near("not shared", got)
	_, got = backward(t, m, trained(t, list, someSharing(r), a, keep), cots)
	near("partly shared", got)
	// Cotangents of some requests, and of the others, those that are zero given as such or left out.
	var parts [2][]forward.OutputGrad
	for i := range parts {
		parts[i] = slices.Clone(grads)
	}
	for i := range grads {
		g := &parts[r.IntN(2)][i]
		if r.IntN(2) == 0 {
			*g = forward.OutputGrad{}
			continue
		}
		g.TargetLogprobs, g.Logits, g.HiddenStates = make([]float32, len(g.TargetLogprobs)), make([]float32, len(g.Logits)), make([]float32, len(g.HiddenStates))
	}
	_, first := backward(t, m, trained(t, inputs, fullSharing, a, keep), parts[0])
	_, second := backward(t, m, trained(t, inputs, fullSharing, a, keep), parts[1])
	near("of some requests and of the others", sum(first, second))
}

// Labels that are ignored, and cotangents of zero, give gradients of zero, even where activations are not finite: nothing is computed then.
func TestGradientsOfNothingAreZero(t *testing.T) {
	ill := golden.Synthetic{Config: tiny["qwen3"], DType: "F32", Change: func(name string, values []float32, _ *string) {
		for i := range values {
			if strings.Contains(name, "embed") {
				values[i] = float32(math.NaN())
			}
		}
	}}
	m := golden.Load(t, ill.Write(t), golden.Options{Threads: 2})
	r := golden.Rand(1)
	inputs := active(golden.Draw(r, m.Decoder().Vocab, 5, 50))
	for i := range inputs {
		inputs[i].Targets, inputs[i].TargetWidth = make([]int32, len(inputs[i].Tokens)), 1
	}
	ignored := make([]forward.Input, len(inputs))
	zeros, ones, none := make([]forward.OutputGrad, len(inputs)), make([]forward.OutputGrad, len(inputs)), make([]forward.OutputGrad, len(inputs))
	for i, in := range inputs {
		n := len(in.Tokens)
		zeros[i].TargetLogprobs = make([]float32, n)
		if in.HiddenStates {
			zeros[i].HiddenStates = make([]float32, n*m.Decoder().Hidden)
		}
		ones[i].TargetLogprobs = slices.Repeat([]float32{1}, n)
		ignored[i] = in
		ignored[i].Targets = slices.Repeat([]int32{forward.IgnoreLabel}, n)
	}
	for _, a := range []*forward.Adapter{nil, randomAdapter(t, m, r, 2)} {
		for _, keep := range retentions {
			for what, c := range map[string]struct {
				inputs []forward.Input
				grads  []forward.OutputGrad
			}{"cotangents of zero": {inputs, zeros}, "no cotangents": {inputs, none}, "ignored labels": {ignored, ones}} {
				_, vector := backward(t, m, trained(t, c.inputs, fullSharing, a, keep), c.grads)
				for i, v := range vector {
					if v != 0 {
						t.Fatalf("%s, %s, adapter %t: gradient %d is %v", what, keep, a != nil, i, v)
					}
				}
			}
		}
	}
}

// atLeast says whether no part of a footprint is less than that of another.
func atLeast(f, least forward.Footprint) bool {
	return f.Outputs >= least.Outputs && f.Retained >= least.Retained && f.Scratch >= least.Scratch && f.BackwardScratch >= least.BackwardScratch &&
		f.Gradients >= least.Gradients && f.OutputBytes >= least.OutputBytes
}

// A request whose cotangents are zero, and that shares nothing, changes no value of the gradients of the others.
func TestARequestWithoutCotangentsChangesNoGradient(t *testing.T) {
	for _, model := range []string{"qwen3-tiny", "gemma3-tiny", "qwen2-tiny"} {
		m := golden.Load(t, golden.FS(t, model), golden.Options{Threads: 2})
		spec := m.Decoder()
		for seed := range uint64(3) {
			r := golden.Rand(seed)
			inputs := active(golden.Draw(r, spec.Vocab/2, 4, 60))
			other := golden.Wants(r, spec.Vocab, []int32{int32(spec.Vocab - 1)})
			for range r.IntN(300) {
				other.Tokens = append(other.Tokens, int32(r.IntN(spec.Vocab)))
			}
			other = forward.Input{Tokens: other.Tokens, HiddenStates: true}
			grads := drawCotangents(r, spec, inputs)
			for _, a := range []*forward.Adapter{nil, randomAdapter(t, m, r, 2)} {
				_, want := backward(t, m, trained(t, inputs, fullSharing, a, ""), grads)
				at := r.IntN(len(inputs) + 1)
				_, got := backward(t, m, trained(t, slices.Insert(slices.Clone(inputs), at, other), fullSharing, a, ""), slices.Insert(slices.Clone(grads), at, forward.OutputGrad{}))
				for i := range want {
					if got[i] != want[i] {
						t.Fatalf("%s, seed %d, adapter %t: gradient %d is %v instead of %v", model, seed, a != nil, i, got[i], want[i])
					}
				}
			}
		}
	}
}

// A request more never makes a batch with gradients need less, of anything, whatever is kept; and no layout needs less than full sharing.
func TestPricesOfGradientsAreMonotone(t *testing.T) {
	seeds := uint64(30)
	if testing.Short() {
		seeds = 6
	}
	for _, folder := range []string{"qwen3-tiny", "gemma3-tiny"} {
		for threads := 1; threads <= 3; threads++ {
			m := golden.Load(t, golden.FS(t, folder), golden.Options{Threads: threads, Unloaded: true})
			for seed := range seeds {
				r := golden.Rand(seed)
				inputs := active(golden.Draw(r, m.Spec().Vocabulary, 1+r.IntN(7), 1+r.IntN(700)))
				var a *forward.Adapter
				if seed%2 == 0 {
					a = forward.NewAdapter("planned", m.Modules(), []forward.LoRA{{Module: r.IntN(len(m.Modules())), Rank: 1 + r.IntN(40), Scale: 1}})
				}
				for _, keep := range retentions {
					var last forward.Footprint
					for n := range inputs {
						f, err := m.Rehearse(trained(t, inputs[:n+1], fullSharing, a, keep))
						if err != nil {
							t.Fatal(err)
						}
						other, err := m.Rehearse(trained(t, inputs[:n+1], someSharing(r), a, keep))
						if err != nil {
							t.Fatal(err)
						}
						at := fmt.Sprintf("%s, %d threads, seed %d, %s, %d inputs", folder, threads, seed, keep, n+1)
						if !atLeast(f, last) {
							t.Errorf("%s take %v, one less %v", at, f, last)
						}
						if !atLeast(other, f) {
							t.Errorf("%s: full sharing takes %v, another layout %v", at, f, other)
						}
						if (f.Retained == 0) != (keep == forward.Replay) || f.Gradients == 0 || f.BackwardScratch == 0 {
							t.Errorf("%s take %v", at, f)
						}
						last = f
					}
				}
			}
		}
	}
}

// countdown is a context that ends when it was looked at so often.
type countdown struct {
	context.Context
	left atomic.Int64
}

func (c *countdown) Err() error {
	if c.left.Add(-1) < 0 {
		return context.Canceled
	}
	return nil
}

// A backward that is cancelled, wherever, says so and leaves no scratch. The graph is as it was: another backward gives the right bits, once.
func TestACancelledBackwardCanBeRepeated(t *testing.T) {
	m := golden.Load(t, golden.FS(t, "qwen3-tiny"), golden.Options{Threads: 2})
	r := golden.Rand(3)
	inputs := active(golden.Draw(r, m.Decoder().Vocab, 5, 60))
	grads := drawCotangents(r, m.Decoder(), inputs)
	a := randomAdapter(t, m, r, 2)
	for _, keep := range retentions {
		_, want := backward(t, m, trained(t, inputs, fullSharing, a, keep), grads)
		b := trained(t, inputs, fullSharing, a, keep)
		f, err := m.Rehearse(b)
		if err != nil {
			t.Fatal(err)
		}
		run := func(looks int64) (cancelled bool) {
			arena, err := m.Dirty.Reserve(device.Sizes{device.Outputs: f.Outputs, device.Retained: f.Retained, device.Scratch: f.Scratch})
			if err != nil {
				t.Fatal(err)
			}
			defer arena.Release()
			progress := 0
			b.Arena, b.Progress = arena, func(int, int) { progress++ }
			pass, err := m.Forward(t.Context(), b)
			if err != nil {
				t.Fatal(err)
			}
			was := progress
			attempt := func(ctx context.Context) ([]float32, error) {
				back, err := m.Dirty.Reserve(device.Sizes{device.Scratch: f.BackwardScratch, device.Gradients: f.Gradients})
				if err != nil {
					t.Fatal(err)
				}
				defer back.Release()
				vector, err := pass.Graph.Backward(ctx, back, grads)
				if back.Mark() != 0 {
					t.Errorf("%s: the backward leaves %d bytes of scratch", keep, back.Mark())
				}
				if err != nil {
					return nil, err
				}
				return slices.Clone(vector.F32()), nil
			}
			ctx := &countdown{Context: t.Context()}
			ctx.left.Store(looks)
			got, err := attempt(ctx)
			if err != nil {
				cancelled = true
				if !errors.Is(err, context.Canceled) {
					t.Errorf("%s, cancelled at look %d: %v", keep, looks, err)
				}
				if got, err = attempt(t.Context()); err != nil {
					t.Fatalf("%s, cancelled at look %d, then: %v", keep, looks, err)
				}
			}
			sameBits(t, fmt.Sprintf("%s, cancelled at look %d", keep, looks), got, want)
			if _, err := attempt(t.Context()); err == nil {
				t.Errorf("%s: a graph is used twice", keep)
			}
			if progress != was {
				t.Errorf("%s: a backward reports progress %d times", keep, progress-was)
			}
			return cancelled
		}
		looks := int64(0)
		for run(looks) {
			looks += 1 + looks/4
		}
		if looks < 20 {
			t.Errorf("%s: a backward looks at its context less than %d times", keep, looks)
		}
	}
}
