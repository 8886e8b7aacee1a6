package trainerrank_test

import (
	"bytes"
	"errors"
	"fmt"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"testing"

	"github.com/trainerrank/engine/collective"
	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/internal/golden"
	"github.com/trainerrank/engine/slots"
	"github.com/trainerrank/engine/trainerrank"
)

// Steps, loads and snapshots from other goroutines wait for the call or the backward that runs: the race detector is the judge, and at the end nothing is held.
func TestStepsBesideCalls(t *testing.T) {
	m, rank := trained(t, "qwen2-tiny", golden.Options{Threads: 2})
	dir := filepath.Join(t.TempDir(), "b")
	if err := rank.SaveCheckpoint(t.Context(), "b", dir); err != nil {
		t.Fatal(err)
	}
	before := stateOf(m.Host)
	inputs := golden.Draw(golden.Rand(3), m.Spec().Vocabulary, 3, 60)
	grads := cotangentsOf(golden.Rand(4), m.Spec(), inputs)
	var wg sync.WaitGroup
	times := 12
	repeat := func(what string, fn func() error) {
		wg.Go(func() {
			for range times {
				var state *trainerrank.SlotStateError
				var graph *trainerrank.GraphError
				if err := fn(); err != nil && !errors.As(err, &state) && !errors.As(err, &graph) {
					t.Errorf("%s: %v", what, err)
				}
			}
		})
	}
	for _, name := range []string{"a", "b"} {
		repeat("train "+name, func() error {
			res, err := rank.DPRankForward(t.Context(), forward.Many(inputs...), withGrad, trainerrank.WithCheckpoint(forward.Checkpoint(name)))
			if err != nil {
				return err
			}
			defer res.Release()
			return res.Backward(t.Context(), grads)
		})
		repeat("score "+name, func() error {
			res, err := rank.DPRankForward(t.Context(), forward.Many(inputs...), trainerrank.WithCheckpoint(forward.Checkpoint(name)))
			if err == nil {
				res.Release()
			}
			return err
		})
	}
	repeat("step", func() error {
		_, err := rank.OptimStep(t.Context(), slots.StepOptions{Params: slots.Adam(1e-3)})
		return err
	})
	repeat("zero", func() error { return rank.ZeroGrad("a") })
	repeat("load", func() error { return rank.LoadCheckpoint(t.Context(), "b", dir) })
	repeat("snapshot", func() error {
		if _, err := rank.SnapshotCheckpoint(t.Context(), "a", "copy"); err != nil {
			return err
		}
		return rank.Checkpoints().Unload(t.Context(), "copy")
	})
	repeat("save", func() error { return rank.SaveCheckpoint(t.Context(), "a", filepath.Join(filepath.Dir(dir), "a")) })
	repeat("info", func() error {
		_, err := rank.Checkpoints().Info("a")
		return err
	})
	wg.Wait()
	unchanged(t, m.Host, before)
	for _, name := range []string{"a", "b"} {
		if info, err := rank.Checkpoints().Info(name); err != nil || info.Live != 0 {
			t.Errorf("%v, %v", info, err)
		}
	}
}

// When a rank was closed its graphs are of no use, and say so.
func TestBackwardAfterClose(t *testing.T) {
	_, rank := trained(t, "qwen2-tiny", golden.Options{})
	res, err := rank.DPRankForward(t.Context(), forward.One(forward.Input{Tokens: []int32{1, 2, 3}, Targets: []int32{2, 3, 4}}), onA()...)
	if err != nil {
		t.Fatal(err)
	}
	rank.Close()
	var graph *trainerrank.GraphError
	if err := res.Backward(t.Context(), []forward.OutputGrad{{TargetLogprobs: []float32{1, 1, 1}}}); !errors.As(err, &graph) {
		t.Errorf("a backward after Close: %v", err)
	}
	res.Release()
	if _, err := rank.DPRankForward(t.Context(), forward.One(forward.Input{Tokens: []int32{1, 2, 3}, TopK: 1}), onA()...); err == nil {
		t.Error("a call on a checkpoint of a closed rank")
	}
}

// Training that is stopped, saved, and gone on with by another rank has the bits of training that is not: adapter, value head and moments.
func TestRestart(t *testing.T) {
	const model = "qwen2-tiny"
	dir := filepath.Join(t.TempDir(), "a")
	var want []byte
	for _, stops := range [][]int{nil, {1}, {1, 2, 3}} {
		m, rank := trained(t, model, golden.Options{Threads: 1 + len(stops)})
		for step := range 4 {
			if slices.Contains(stops, step) {
				if err := rank.SaveCheckpoint(t.Context(), "a", dir); err != nil {
					t.Fatal(err)
				}
				rank.Close()
				m, rank = load(t, golden.FS(t, model), golden.Options{Threads: 2})
				t.Cleanup(rank.Close)
				if err := rank.LoadCheckpoint(t.Context(), "a", dir); err != nil {
					t.Fatal(err)
				}
			}
			head, err := rank.Checkpoints().Parameter(t.Context(), "a", "value", []int64{int64(m.Spec().Hidden)}, func(w []float32) { w[0] = 1 })
			if err != nil {
				t.Fatal(err)
			}
			r := golden.Rand(uint64(step))
			inputs := golden.Draw(r, m.Spec().Vocabulary, 5, 80)
			inputs[0].HiddenStates, inputs[0].Grad, inputs[0].Checkpoint = true, forward.Inherit, forward.Selection{}
			grads := cotangentsOf(r, m.Spec(), inputs)
			res, err := rank.DPRankForward(t.Context(), forward.Many(inputs...), onA()...)
			if err != nil {
				t.Fatal(err)
			}
			if err := head.Accumulate(res.Outputs.Flat()[0].HiddenStates.Data().([]float32)[:m.Spec().Hidden]); err != nil {
				t.Fatal(err)
			}
			if err := res.Backward(t.Context(), grads); err != nil {
				t.Fatal(err)
			}
			res.Release()
			if report, err := rank.OptimStep(t.Context(), slots.StepOptions{Params: slots.Adam(1e-2)}); err != nil || !report.Updated() {
				t.Fatal(report, err)
			}
		}
		a, err := rank.Checkpoints().Adapter("a")
		if err != nil {
			t.Fatal(err)
		}
		head, err := rank.Checkpoints().Parameter(t.Context(), "a", "value", []int64{int64(m.Spec().Hidden)}, nil)
		if err != nil {
			t.Fatal(err)
		}
		values, err := head.Value()
		if err != nil {
			t.Fatal(err)
		}
		got := fmt.Append(bytes.Clone(a.Params.Raw()), values)
		info, _ := rank.Checkpoints().Info("a")
		if info.Revision != 4 || info.Steps != 4 {
			t.Errorf("%v: revision %d after %d steps", stops, info.Revision, info.Steps)
		}
		if want == nil {
			want = got
		} else if !bytes.Equal(got, want) {
			t.Errorf("stopped before the steps %v: other bits", stops)
		}
	}
}

// The least budget of a training call, of which some inputs may keep no graph or run on another checkpoint, is the least: with it the call is admitted and its forward and backward stay
// inside, with a page less it is refused; and the largest prefix is admitted and the next is not.
func TestLeastBudgetOfTraining(t *testing.T) {
	m, rank := trained(t, "qwen2-tiny", golden.Options{Threads: 2})
	calls := 12
	if testing.Short() {
		calls = 3
	}
	for seed := range uint64(calls) {
		r := golden.Rand(100 + seed)
		inputs := golden.Draw(r, m.Spec().Vocabulary, 2+r.IntN(7), 30+r.IntN(150))
		grads := cotangentsOf(r, m.Spec(), inputs)
		some := false
		for i := range inputs {
			switch r.IntN(5) {
			case 0:
				inputs[i].Checkpoint = forward.Checkpoint("b")
			case 1:
				inputs[i].Grad = forward.NoGrad
				grads[i] = forward.OutputGrad{}
			case 2:
				inputs[i].Checkpoint = forward.BaseModel()
				inputs[i].Grad = forward.NoGrad
				grads[i] = forward.OutputGrad{}
			}
			some = some || inputs[i].Active() && inputs[i].Grad != forward.NoGrad
		}
		in := forward.Many(inputs...)
		var opts []trainerrank.CallOption
		switch r.IntN(4) {
		case 0:
			opts = onA(trainerrank.WithRetentions(trainerrank.Stored))
		case 1:
			opts = onA(trainerrank.WithRetentions(trainerrank.Layer))
		case 2:
			opts = onA(trainerrank.WithRetentions(trainerrank.Replay, trainerrank.Stored))
		default:
			opts = onA()
		}
		with := func(budget int64) *device.Block {
			ballast, err := m.Host.Allocate(device.Ballast, m.Host.Free()-budget)
			if err != nil {
				t.Fatal(err)
			}
			return ballast
		}
		whole, err := rank.Plan(t.Context(), in, opts...)
		if err != nil {
			t.Fatal(err)
		}
		least := whole.SmallestBudgetBytes
		ballast := with(least - device.PageSize)
		before := stateOf(m.Host)
		_, err = rank.DPRankForward(t.Context(), in, opts...)
		var refused *trainerrank.MemoryError
		if !errors.As(err, &refused) {
			t.Fatalf("seed %d: a page less than the least budget: %v", seed, err)
		}
		unchanged(t, m.Host, before)
		if refused.SmallestBudgetBytes != least {
			t.Errorf("seed %d: the refusal says %d, the plan %d", seed, refused.SmallestBudgetBytes, least)
		}
		for n := range len(inputs) {
			a, err := rank.Plan(t.Context(), forward.Many(inputs[:n+1]...), opts...)
			if err != nil {
				t.Fatal(err)
			}
			// The prefix itself must fit and the one above it must not; what is below need not be monotone.
			if edge := n+1 == refused.LargestPrefix || n == refused.LargestPrefix; edge && (a.Verdict != trainerrank.Refused) != (n+1 == refused.LargestPrefix) {
				t.Errorf("seed %d: the first %d inputs: %s, but the largest prefix is %d", seed, n+1, a.Verdict, refused.LargestPrefix)
			}
		}
		ballast.Free()
		ballast = with(least)
		before = stateOf(m.Host)
		res, err := rank.DPRankForward(t.Context(), in, opts...)
		if err != nil {
			t.Fatalf("seed %d: with the least budget of %d: %v", seed, least, err)
		}
		if some {
			err = res.Backward(t.Context(), grads)
		}
		if err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		if got := res.ObservedPeakBytes(); got > least || got > res.Telemetry.PredictedPeakBytes {
			t.Errorf("seed %d: %d bytes observed, %d predicted, %d usable", seed, got, res.Telemetry.PredictedPeakBytes, least)
		}
		res.Release()
		unchanged(t, m.Host, before)
		ballast.Free()
		if err := rank.ZeroGrad(); err != nil {
			t.Fatal(err)
		}
	}
}

// An input without gradients beside one with them changes no bit of either, in outputs and gradients; nor does one that trains another checkpoint.
func TestGradientsBesideOthers(t *testing.T) {
	m, rank := trained(t, "llama3-tiny", golden.Options{Threads: 2})
	for seed := range uint64(4) {
		r := golden.Rand(200 + seed)
		inputs := golden.Draw(r, m.Spec().Vocabulary, 8, 90)
		where := make([]int, len(inputs))
		grads := cotangentsOf(r, m.Spec(), inputs)
		for i := range inputs {
			inputs[i].Grad = forward.WithGrad
			switch where[i] = r.IntN(4); where[i] {
			case 0:
				inputs[i].Checkpoint = forward.Checkpoint("a")
			case 1:
				inputs[i].Checkpoint = forward.Checkpoint("b")
			case 2:
				inputs[i].Checkpoint, inputs[i].Grad = forward.Checkpoint("a"), forward.NoGrad
			case 3:
				inputs[i].Checkpoint, inputs[i].Grad = forward.BaseModel(), forward.NoGrad
			}
			if inputs[i].Grad == forward.NoGrad {
				grads[i] = forward.OutputGrad{}
			}
		}
		run := func(choose func(i int) bool) (map[int]golden.Answer, [2][]float32) {
			var list []forward.Input
			var g []forward.OutputGrad
			var which []int
			graph := false
			for i := range inputs {
				if choose(i) {
					list, g, which = append(list, inputs[i]), append(g, grads[i]), append(which, i)
					graph = graph || inputs[i].Grad == forward.WithGrad && inputs[i].Active()
				}
			}
			res, err := rank.DPRankForward(t.Context(), forward.Many(list...))
			if err != nil {
				t.Fatal(err)
			}
			defer res.Release()
			if graph {
				if err := res.Backward(t.Context(), g); err != nil {
					t.Fatal(err)
				}
			}
			answers := map[int]golden.Answer{}
			for i, a := range golden.CopyAll(res.Outputs.Flat()) {
				answers[which[i]] = a
			}
			vectors := [2][]float32{gradients(t, rank, "a"), gradients(t, rank, "b")}
			if err := rank.ZeroGrad(); err != nil {
				t.Fatal(err)
			}
			return answers, vectors
		}
		all, vectors := run(func(int) bool { return true })
		for k := range 4 {
			own, alone := run(func(i int) bool { return where[i] == k })
			for i, a := range own {
				if d := golden.Diff(a, all[i]); d != "" {
					t.Errorf("seed %d: output %d: %s", seed, i, d)
				}
			}
			if k < 2 && !slices.Equal(alone[k], vectors[k]) {
				t.Errorf("seed %d: gradients of checkpoint %d are others beside inputs of other groups", seed, k)
			}
		}
	}
}

// Ranks with calls of their own, one of them with none, get the step of one rank that has made all the calls; and the same bits as each other.
func TestStepsOverRanks(t *testing.T) {
	for _, size := range []int{2, 4} {
		var mu sync.Mutex
		vectors := make([][]byte, size)
		err := collective.Run(size, func(w collective.World) error {
			m, rank := trained(t, "qwen2-tiny", golden.Options{}, trainerrank.WithWorld(w))
			for step := range 2 {
				r := golden.Rand(uint64(10*step + w.Rank()))
				if w.Rank() != (step+1)%size {
					inputs := golden.Draw(r, m.Spec().Vocabulary, 1+w.Rank(), 60)
					grads := cotangentsOf(r, m.Spec(), inputs)
					res, err := rank.DPRankForward(t.Context(), forward.Many(inputs...), onA(trainerrank.AgreeAcrossRanks())...)
					if err != nil {
						return err
					}
					if slices.ContainsFunc(inputs, func(in forward.Input) bool { return in.Active() }) {
						if err := res.Backward(t.Context(), grads); err != nil {
							return err
						}
					}
					res.Release()
				} else if res, err := rank.DPRankForward(t.Context(), forward.Many(), onA(trainerrank.AgreeAcrossRanks())...); err != nil {
					return err
				} else {
					res.Release()
				}
				report, err := rank.OptimStep(t.Context(), slots.StepOptions{Params: slots.Adam(1e-2)})
				if err != nil {
					return err
				}
				if !report.Updated() || len(report.Slots) != 1 {
					return fmt.Errorf("%v", report)
				}
			}
			a, err := rank.Checkpoints().Adapter("a")
			if err != nil {
				return err
			}
			mu.Lock()
			defer mu.Unlock()
			vectors[w.Rank()] = bytes.Clone(a.Params.Raw())
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		for r := range vectors {
			if !bytes.Equal(vectors[r], vectors[0]) {
				t.Errorf("%d ranks: rank %d has other parameters than rank 0", size, r)
			}
		}
	}
}

// A list is trained in waves, in whatever memory there is, as in one call.
func TestMicroBatchesTrain(t *testing.T) {
	m, rank := trained(t, "qwen2-tiny", golden.Options{})
	r := golden.Rand(9)
	inputs := golden.Draw(r, m.Spec().Vocabulary, 12, 90)
	grads := cotangentsOf(r, m.Spec(), inputs)
	items := make([]forward.Inputs, len(inputs))
	for i := range inputs {
		items[i] = forward.One(inputs[i])
	}
	res, err := rank.DPRankForward(t.Context(), forward.Many(inputs...), onA()...)
	if err != nil {
		t.Fatal(err)
	}
	if err := res.Backward(t.Context(), grads); err != nil {
		t.Fatal(err)
	}
	peak := res.ObservedPeakBytes()
	res.Release()
	want := gradients(t, rank, "a")
	if err := rank.ZeroGrad(); err != nil {
		t.Fatal(err)
	}
	for _, share := range []int64{100, 70, 45} {
		ballast, err := m.Host.Allocate(device.Ballast, m.Host.Free()-device.RoundPages(peak*share/100))
		if err != nil {
			t.Fatal(err)
		}
		before := stateOf(m.Host)
		waves := 0
		for batch, err := range rank.ForwardMicroBatches(t.Context(), items, onA()...) {
			if err != nil {
				t.Fatal(err)
			}
			waves++
			own := trainerrank.Select(batch, grads)
			active := false
			for i := range own {
				active = active || inputs[batch.Indices[i]].Active()
			}
			if active {
				if err := batch.Result.Backward(t.Context(), own); err != nil {
					t.Fatal(err)
				}
			}
			batch.Result.Release()
		}
		unchanged(t, m.Host, before)
		ballast.Free()
		if e := distance(gradients(t, rank, "a"), want); e > 1e-5 {
			t.Errorf("%d %%, %d waves: gradients are %.2e off", share, waves, e)
		}
		t.Logf("%d %%: %d waves", share, waves)
		if err := rank.ZeroGrad(); err != nil {
			t.Fatal(err)
		}
	}
}

// Results given up in any state are reclaimed, graphs and leases: whole, after the backward of a part, while a subforward or an output is kept.
func TestAbandonedInParts(t *testing.T) {
	m, rank := trained(t, "qwen2-tiny", golden.Options{})
	inputs := golden.Draw(golden.Rand(31), m.Spec().Vocabulary, 6, 120)
	for i := range inputs {
		if inputs[i].Targets == nil {
			inputs[i] = forward.Input{Tokens: inputs[i].Tokens, Targets: inputs[i].Tokens}
		}
	}
	grads := cotangentsOf(golden.Rand(4), m.Spec(), inputs)
	whole, err := rank.Plan(t.Context(), forward.Many(inputs...), onA(trainerrank.WithRetentions(trainerrank.Replay))...)
	if err != nil {
		t.Fatal(err)
	}
	ballast, err := m.Host.Allocate(device.Ballast, m.Host.Free()-device.RoundPages(whole.SmallestBudgetBytes))
	if err != nil {
		t.Fatal(err)
	}
	defer ballast.Free()
	before := stateOf(m.Host)
	live := func() int { info, _ := rank.Checkpoints().Info("a"); return info.Live }
	func() {
		res, err := rank.DPRankForward(t.Context(), forward.Many(inputs...), onA(trainerrank.WithRetentions(trainerrank.Replay))...)
		if err != nil {
			t.Fatal(err)
		}
		subs := res.Subforwards()
		if len(subs) < 2 {
			t.Fatalf("%d subforwards", len(subs))
		}
		var own []forward.OutputGrad
		for _, q := range subs[1].RequestIndices {
			own = append(own, grads[q])
		}
		sub := subs[0]
		if err := subs[1].Backward(t.Context(), own); err != nil {
			t.Fatal(err)
		}
		if got := live(); got != len(subs)-1 {
			t.Errorf("%d leases after the backward of one of %d", got, len(subs))
		}
		res, subs = nil, nil
		runtime.GC()
		runtime.GC()
		own = nil
		for _, q := range sub.RequestIndices {
			own = append(own, grads[q])
		}
		if err := sub.Backward(t.Context(), own); err != nil { // who keeps a subforward keeps the result
			t.Error(err)
		}
	}()
	if !collected(func() bool { return live() == 0 }) {
		t.Errorf("%d leases are not released", live())
	}
	unchanged(t, m.Host, before)
}

// A step of the base model makes every graph stale, those of adapters included: they ran on it too.
func TestStepOfTheBaseBeneathAGraph(t *testing.T) {
	_, rank := trained(t, "qwen2-tiny", golden.Options{Base: true})
	if err := rank.TrainBase(t.Context()); err != nil {
		t.Fatal(err)
	}
	in := forward.One(forward.Input{Tokens: []int32{1, 2, 3}, Targets: []int32{2, 3, 4}})
	one := []forward.OutputGrad{{TargetLogprobs: []float32{1, 1, 1}}}
	onA, err := rank.DPRankForward(t.Context(), in, onA()...)
	if err != nil {
		t.Fatal(err)
	}
	defer onA.Release()
	base, err := rank.DPRankForward(t.Context(), in, withGrad)
	if err != nil {
		t.Fatal(err)
	}
	defer base.Release()
	if err := base.Backward(t.Context(), one); err != nil {
		t.Fatal(err)
	}
	o := slots.StepOptions{Params: slots.Adam(1e-2), OnLiveGraphs: slots.Error}
	var state *trainerrank.SlotStateError
	if _, err := rank.OptimStep(t.Context(), o); !errors.As(err, &state) || state.Slot != "" {
		t.Errorf("a step of the base model beneath a live graph: %v", err)
	}
	o.OnLiveGraphs = slots.Allow
	if _, err := rank.OptimStep(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	var graph *trainerrank.GraphError
	if err := onA.Backward(t.Context(), one); !errors.As(err, &graph) {
		t.Errorf("a backward over two sets of weights: %v", err)
	}
}

func TestUnknownRetentions(t *testing.T) {
	_, rank := trained(t, "qwen2-tiny", golden.Options{})
	in := forward.One(forward.Input{Tokens: []int32{1, 2, 3}, Targets: []int32{2, 3, 4}})
	for _, list := range [][]trainerrank.Retention{{"all"}, {""}, {trainerrank.Layer, trainerrank.Layer}, {trainerrank.Replay, "stored "}} {
		if res, err := rank.DPRankForward(t.Context(), in, onA(trainerrank.WithRetentions(list...))...); err == nil {
			res.Release()
			t.Errorf("%q: no error", list)
		}
	}
}
