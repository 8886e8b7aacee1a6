package trainerrank_test

import (
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/internal/golden"
	"github.com/trainerrank/engine/trainerrank"
)

// exactly runs a call and holds its price against what the device saw, at its peak, after it, and after the release.
func exactly(t *testing.T, m *golden.Loaded, rank *trainerrank.TrainerRank, in forward.Inputs) trainerrank.Telemetry {
	t.Helper()
	a, err := rank.Plan(t.Context(), in)
	if err != nil {
		t.Fatal(err)
	}
	before, live := stateOf(m.Host), m.Host.Stats().TotalInUse()
	m.Host.ResetPeak()
	res, err := rank.DPRankForward(t.Context(), in)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Release()
	s, tel := m.Host.Stats(), res.Telemetry
	got := map[string]int64{
		"planned": a.PredictedPeakBytes, "shares": a.Shares.Total(), "predicted": tel.PredictedPeakBytes, "observed": tel.ObservedPeakBytes,
		"peak of the device": s.PeakInUse - live, "peak allocated": s.PeakAllocated - before.Allocated,
	}
	want := map[string]int64{}
	for k := range got {
		want[k] = a.PredictedPeakBytes
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("bytes:\n%s", d)
	}
	kept := a.Shares[device.Outputs]
	if tel.RetainedBytes != kept || s.TotalInUse()-live != kept || s.Allocated-before.Allocated != kept {
		t.Errorf("after the call %d bytes are said to be kept, %d are in use and %d allocated, want %d",
			tel.RetainedBytes, s.TotalInUse()-live, s.Allocated-before.Allocated, kept)
	}
	if last, err := rank.LastForwardTelemetry(); err != nil || cmp.Diff(last, tel) != "" {
		t.Errorf("the last telemetry is not the result's: %v\n%s", err, cmp.Diff(last, tel))
	}
	res.Release()
	unchanged(t, m.Host, before)
	return tel
}

func TestPredictedBytesAreTheObservedOnes(t *testing.T) {
	for _, c := range golden.Cases {
		for threads := 1; threads <= 3; threads++ {
			t.Run(c.Name(), func(t *testing.T) {
				folder := golden.FS(t, c.Model)
				m, rank := load(t, folder, golden.Options{Config: c.Config, Threads: threads})
				tel := exactly(t, m, rank, forward.Many(golden.Inputs(golden.Requests(t, folder))...))
				if tel.Basis != trainerrank.Exact || tel.PackedTokens >= tel.LogicalTokens || tel.SelectedMaxDepth < 2 {
					t.Errorf("telemetry %+v", tel)
				}
			})
		}
	}
}

func TestPredictedBytesAreTheObservedOnesInRandomCalls(t *testing.T) {
	seeds := uint64(200)
	if testing.Short() {
		seeds = 20
	}
	var models []*golden.Loaded
	var ranks []*trainerrank.TrainerRank
	for _, model := range []string{"qwen2-tiny", "arith"} {
		for threads := 1; threads <= 2; threads++ {
			m, rank := load(t, golden.FS(t, model), golden.Options{Threads: threads})
			models, ranks = append(models, m), append(ranks, rank)
		}
	}
	for seed := range seeds {
		r := golden.Rand(seed)
		k := r.IntN(len(models))
		vocab := models[k].Spec().Vocabulary
		inputs := golden.Draw(r, vocab, 1+r.IntN(8), 1+r.IntN(300))
		if r.IntN(5) == 0 {
			inputs[r.IntN(len(inputs))].TopK = 1 + r.IntN(vocab)
		}
		if exactly(t, models[k], ranks[k], nested(r, inputs)); t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

// A call on several checkpoints has several passes a subforward. The one with the most intermediates is the last, so that the bytes of all are in use at one moment.
func TestPredictedBytesAreTheObservedOnesOnSeveralCheckpoints(t *testing.T) {
	m, rank := trained(t, "qwen2-tiny", golden.Options{Threads: 2})
	on := []forward.Selection{forward.BaseModel(), forward.Checkpoint("a"), forward.Checkpoint("b")}
	splits := 0
	for seed := range uint64(8) {
		r := golden.Rand(seed)
		inputs := golden.Draw(r, m.Spec().Vocabulary, 4+r.IntN(6), 150)
		for i := range inputs {
			inputs[i].Checkpoint = on[r.IntN(len(on))]
		}
		in := nested(r, inputs)
		exactly(t, m, rank, in)
		a, err := rank.Plan(t.Context(), in)
		if err != nil {
			t.Fatal(err)
		}
		ballast, err := m.Host.Allocate(device.Ballast, m.Host.Free()-a.SmallestBudgetBytes)
		if err != nil {
			t.Fatal(err)
		}
		_, tel := score(t, rank, in)
		if tel.ObservedPeakBytes != tel.PredictedPeakBytes {
			t.Errorf("seed %d: %d bytes observed in %d subforwards, %d predicted", seed, tel.ObservedPeakBytes, tel.SubforwardCount, tel.PredictedPeakBytes)
		}
		splits += tel.SubforwardCount - 1
		ballast.Free()
	}
	if splits == 0 {
		t.Error("nothing was split")
	}
}

// A model that has no place yet is planned for as one that is loaded, and planning takes no memory.
func TestPlanNeedsNoWeights(t *testing.T) {
	folder := golden.FS(t, "qwen2-tiny")
	in := forward.Many(golden.Inputs(golden.Requests(t, folder))...)
	m := golden.Load(t, folder, golden.Options{Unloaded: true})
	plan := func() string {
		a, err := wrap(t, m.Model, trainerrank.WithDevice(m.Host), trainerrank.WithUsableBytes(10<<20)).Plan(t.Context(), in)
		if err != nil {
			t.Fatal(err)
		}
		text, err := json.MarshalIndent(a, "", " ")
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	cold := plan()
	if s := m.Host.Stats(); s.PeakAllocated != 0 {
		t.Errorf("planning allocated %d bytes", s.PeakAllocated)
	}
	if err := m.Place(m.Host); err != nil {
		t.Fatal(err)
	}
	if err := m.Load(t.Context(), m.MinStaging(), nil); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(cold, plan()); d != "" {
		t.Errorf("plans before (-) and after (+) the weights were loaded:\n%s", d)
	}
}
