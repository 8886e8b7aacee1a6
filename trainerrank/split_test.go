package trainerrank_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/forward/prefixtree"
	"github.com/trainerrank/engine/internal/golden"
	"github.com/trainerrank/engine/trainerrank"
)

// dear is a cost under which sharing is too dear: each span costs more than any tokens.
var dear = prefixtree.Table{Name: "dear", Coefficients: prefixtree.Coefficients{Token: 1, Segment: 1e6, Level: 1e6}}

// splitCall is a call that can be split: its inputs, what it needs whole, and the least.
func splitCall(t *testing.T) (m *golden.Loaded, in forward.Inputs, whole, least int64) {
	t.Helper()
	folder := golden.FS(t, "qwen2-tiny")
	m = golden.Load(t, folder, golden.Options{Threads: 2})
	in = forward.Many(golden.Inputs(golden.Requests(t, folder))...)
	a, err := wrap(t, m.Model).Plan(t.Context(), in)
	if err != nil {
		t.Fatal(err)
	}
	if a.SmallestBudgetBytes >= a.PredictedPeakBytes {
		t.Fatalf("the call needs %d bytes whole and %d split", a.PredictedPeakBytes, a.SmallestBudgetBytes)
	}
	return m, in, a.PredictedPeakBytes, a.SmallestBudgetBytes
}

// However a call is split, its answers have the same bits, it takes exactly what was predicted, and that within the budget. Half of the
// calls run in memory that is full of NaN, on a device whose mapper cannot trim and for which layouts are chosen by another cost.
func TestSplitsGiveTheSameBits(t *testing.T) {
	seeds := uint64(60)
	if testing.Short() {
		seeds = 8
	}
	var models []*golden.Loaded
	for threads := 1; threads <= 2; threads++ {
		models = append(models, golden.Load(t, golden.FS(t, "qwen2-tiny"), golden.Options{Threads: threads}))
	}
	counts := map[int]int{}
	for seed := range seeds {
		r := golden.Rand(seed)
		m := models[r.IntN(len(models))]
		var ran [][]*forward.Input
		s := &spy{Model: m.Model, before: func(_ context.Context, b *forward.Batch) { ran = append(ran, b.Requests) }}
		inputs := golden.Draw(r, m.Spec().Vocabulary, 2+r.IntN(12), 1+r.IntN(250))
		in := nested(r, inputs)
		dev, opts := device.Device(m.Host), []trainerrank.Option(nil)
		if seed%2 == 0 {
			dev = m.Dirty
		}
		if r.IntN(3) == 0 {
			opts = append(opts, trainerrank.WithCostTables(dear))
		}
		opts = append(opts, trainerrank.WithDevice(dev))
		a, err := wrap(t, s, opts...).Plan(t.Context(), in)
		if err != nil {
			t.Fatal(err)
		}
		want, _ := score(t, wrap(t, m.Model), in)
		for range 4 {
			least, most := a.SmallestBudgetBytes, a.PredictedPeakBytes
			usable := least + r.Int64N(most-least+1)
			rank := wrap(t, s, append(opts, trainerrank.WithUsableBytes(usable))...)
			plan, err := rank.Plan(t.Context(), in)
			if err != nil {
				t.Fatal(err)
			}
			before := stateOf(dev)
			dev.ResetPeak()
			ran = nil
			res, err := rank.DPRankForward(t.Context(), in)
			if err != nil {
				t.Fatalf("seed %d, %d of %d..%d bytes: %v", seed, usable, least, most, err)
			}
			tel, now := res.Telemetry, dev.Stats()
			counts[min(tel.SubforwardCount, 5)]++
			got := map[string]int64{
				"planned": plan.PredictedPeakBytes, "observed": tel.ObservedPeakBytes, "shares": plan.Shares.Total(),
				"in use": now.PeakInUse - before.InUse.Total(), "allocated": now.PeakAllocated - before.Allocated,
			}
			for what, n := range got {
				if n != tel.PredictedPeakBytes || n > usable {
					t.Errorf("seed %d: %s %d, predicted %d, usable %d", seed, what, n, tel.PredictedPeakBytes, usable)
				}
			}
			kept := before
			kept.InUse[device.Outputs] += tel.RetainedBytes
			if s := stateOf(dev); s.InUse != kept.InUse || dev == device.Device(m.Host) && s.Allocated != before.Allocated+tel.RetainedBytes {
				t.Errorf("seed %d: after the call %+v, before it %+v, kept %d", seed, s, before, tel.RetainedBytes)
			}
			checkOrder(t, inputs, ran, tel)
			for i, o := range res.Outputs.Flat() {
				if d := golden.Diff(want[i], golden.Copy(o)); d != "" {
					t.Errorf("seed %d, %d subforwards, input %d:\n%s", seed, tel.SubforwardCount, i, d)
				}
			}
			res.Release()
			unchanged(t, dev, before)
			if t.Failed() {
				t.Fatalf("seed %d", seed)
			}
		}
	}
	t.Logf("calls by subforwards: %v", counts)
	if counts[2] == 0 || counts[3] == 0 {
		t.Error("too little was split")
	}
}

// checkOrder holds the batches that ran against the telemetry.
func checkOrder(t *testing.T, inputs []forward.Input, ran [][]*forward.Input, tel trainerrank.Telemetry) {
	t.Helper()
	if len(tel.SubforwardRequestIndices) != tel.SubforwardCount {
		t.Errorf("%+v", tel)
	}
	var all []int
	batch := 0
	for _, indices := range tel.SubforwardRequestIndices {
		all = append(all, indices...)
		var want [][]int32
		for _, i := range indices {
			if inputs[i].Active() {
				want = append(want, inputs[i].Tokens)
			}
		}
		if want == nil {
			continue
		}
		if batch == len(ran) {
			t.Fatalf("%d batches ran of %+v", batch, tel)
		}
		var got [][]int32
		for _, in := range ran[batch] {
			got = append(got, in.Tokens)
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("batch %d:\n%s", batch, d)
		}
		batch++
	}
	if slices.Sort(all); batch != len(ran) || !slices.Equal(all, ascending(len(inputs))) {
		t.Errorf("%d batches ran, requests %v: %+v", len(ran), all, tel)
	}
}

// A layout that is cheapest to run but too large gives way to the one with fewest tokens.
func TestTheCheapestLayoutGivesWay(t *testing.T) {
	m, in, whole, _ := splitCall(t)
	rank := func(usable int64) *trainerrank.TrainerRank {
		return wrap(t, m.Model, trainerrank.WithCostTables(dear), trainerrank.WithUsableBytes(usable))
	}
	_, free := score(t, rank(1<<40), in)
	if free.SelectedMaxDepth != 1 || free.PredictedPeakBytes <= whole {
		t.Fatalf("%+v", free)
	}
	_, tight := score(t, rank(free.PredictedPeakBytes-1), in)
	if tight.SubforwardCount != 1 || tight.PredictedPeakBytes != whole || tight.PackedTokens >= free.PackedTokens {
		t.Errorf("%+v", tight)
	}
}

// Equal calls have equal plans, byte for byte, and a plan says what the call then does.
func TestPlansAreDeterministic(t *testing.T) {
	m, in, whole, least := splitCall(t)
	for _, usable := range []int64{0, least - 1, least, (least + whole) / 2, whole - 1, whole} {
		var texts []string
		for range 3 {
			a, err := wrap(t, m.Model, trainerrank.WithUsableBytes(usable)).Plan(t.Context(), in)
			if err != nil {
				t.Fatal(err)
			}
			text, err := json.Marshal(a)
			if err != nil {
				t.Fatal(err)
			}
			texts = append(texts, string(text))
			for _, r := range a.Rungs {
				if r.Fits != (r.TotalBytes <= usable) || len(r.Chunks) != r.Count || len(r.Required) != r.Count || len(r.Retained) != r.Count {
					t.Errorf("%d usable bytes: %+v", usable, r)
				}
			}
			if last := a.Rungs[len(a.Rungs)-1]; a.Verdict != trainerrank.Refused && (last.TotalBytes != a.PredictedPeakBytes || last.Count != a.SubforwardCount()) {
				t.Errorf("%d usable bytes: the last rung is %+v", usable, last)
			}
			if a.SmallestBudgetBytes != least {
				t.Errorf("%d usable bytes: the smallest budget is %d, want %d", usable, a.SmallestBudgetBytes, least)
			}
		}
		if texts[0] != texts[1] || texts[1] != texts[2] {
			t.Errorf("%d usable bytes: plans differ", usable)
		}
	}
}

// A failure in a split says which subforward, leaves nothing, and the next call works. If memory ran out, there is a *MemoryError in it.
func TestPartialExecution(t *testing.T) {
	m, in, _, least := splitCall(t)
	want, _ := score(t, wrap(t, m.Model), in)
	luck := errors.New("no luck")
	for name, c := range map[string]struct {
		memory bool
		fail   func(b *forward.Batch) error
	}{
		"an error": {false, func(*forward.Batch) error { return luck }},
		"out of memory": {true, func(*forward.Batch) error {
			return fmt.Errorf("deep inside: %w", &device.OutOfMemoryError{Op: "allocate"})
		}},
		"an overrun":       {true, func(b *forward.Batch) error { b.Arena.Scratch(1 << 40); return nil }},
		"too many outputs": {true, func(b *forward.Batch) error { b.Arena.Keep(device.Outputs, 1<<40); return nil }},
	} {
		t.Run(name, func(t *testing.T) {
			s := &spy{Model: m.Model}
			rank := wrap(t, s, trainerrank.WithUsableBytes(least))
			_, tel := score(t, rank, in)
			count, before := tel.SubforwardCount, stateOf(m.Host)
			if count < 2 {
				t.Fatalf("%d subforwards", count)
			}
			for k := 1; k <= count; k++ {
				var failed error
				n := 0
				s.before = func(_ context.Context, b *forward.Batch) {
					if n++; n == k {
						failed = c.fail(b)
					}
				}
				s.after = func(p *forward.Pass, err error) (*forward.Pass, error) {
					if failed != nil {
						return nil, failed
					}
					return p, err
				}
				_, err := rank.DPRankForward(t.Context(), in)
				// A panic leaves the spy under way.
				s.running.Store(0)
				var e *trainerrank.PartialExecutionError
				var full *trainerrank.MemoryError
				if !errors.As(err, &e) || e.Completed != k-1 || e.Count != count || errors.As(err, &full) != c.memory {
					t.Fatalf("in subforward %d: %v", k, err)
				}
				if text := fmt.Sprintf("subforward %d of %d failed during execution (%d of %d completed)", k, count, k-1, count); !strings.Contains(err.Error(), text) {
					t.Errorf("%v, want %s", err, text)
				}
				if name == "an error" && !errors.Is(err, luck) {
					t.Errorf("%v hides its cause", err)
				}
				if c.memory && (full.PredictedPeakBytes != tel.PredictedPeakBytes || full.Err == nil || !full.Executing || !strings.Contains(full.Suggestion, "smaller")) {
					t.Errorf("%+v", full)
				}
				unchanged(t, m.Host, before)
				last, err := rank.LastForwardTelemetry()
				if err != nil || last.SubforwardCount != count || last.RetainedBytes != 0 || k > 1 && last.ObservedPeakBytes == 0 {
					t.Errorf("telemetry: %v, %+v", err, last)
				}
				s.before, s.after = nil, nil
			}
			got, _ := score(t, rank, in)
			for i := range want {
				if d := golden.Diff(want[i], got[i]); d != "" {
					t.Errorf("the call after: %s", d)
				}
			}
		})
	}
}

// A context that ends between two subforwards, or in one, ends the call: no further subforward runs, nothing is left.
func TestCancelledBetweenSubforwards(t *testing.T) {
	m, in, _, least := splitCall(t)
	s := &spy{Model: m.Model}
	rank := wrap(t, s, trainerrank.WithUsableBytes(least))
	_, tel := score(t, rank, in)
	before := stateOf(m.Host)
	for k := 1; k < tel.SubforwardCount; k++ {
		ctx, cancel := context.WithCancel(t.Context())
		from := s.forwards.Load()
		s.after = func(p *forward.Pass, err error) (*forward.Pass, error) {
			if int(s.forwards.Load()-from) == k {
				cancel()
			}
			return p, err
		}
		_, err := rank.DPRankForward(ctx, in)
		cancel()
		var partial *trainerrank.PartialExecutionError
		if !errors.Is(err, context.Canceled) || errors.As(err, &partial) || int(s.forwards.Load()-from) != k {
			t.Errorf("cancelled after subforward %d, %d ran: %v", k, s.forwards.Load()-from, err)
		}
		unchanged(t, m.Host, before)
	}
	s.after = nil
	last, steps := 0, 0
	res, err := rank.DPRankForward(t.Context(), in, trainerrank.WithProgress(func(done, total int) {
		if done < last || total != tel.PackedTokens {
			t.Errorf("progress goes from %d to %d of %d, want %d", last, done, total, tel.PackedTokens)
		}
		last, steps = done, steps+1
	}))
	if err != nil || last != tel.PackedTokens || steps <= tel.SubforwardCount {
		t.Fatalf("%d of %d after %d steps: %v", last, tel.PackedTokens, steps, err)
	}
	res.Release()
}

// expert is a model whose experts are spread over ranks.
type expert struct{ *spy }

func (e expert) Spec() forward.Spec {
	s := e.spy.Spec()
	s.ExpertParallel = 4
	return s
}

func TestExpertParallelCallsAreNotSplit(t *testing.T) {
	m, in, whole, _ := splitCall(t)
	s := &spy{Model: m.Model}
	rank := func(usable int64) *trainerrank.TrainerRank {
		return wrap(t, expert{s}, trainerrank.WithUsableBytes(usable))
	}
	if _, tel := score(t, rank(whole), in); tel.SubforwardCount != 1 {
		t.Errorf("%+v", tel)
	}
	if e := refused(t, s, m.Host, rank(whole-1), in); !strings.Contains(e.Error(), "splitting is disabled under expert parallelism") || e.SmallestBudgetBytes != whole {
		t.Errorf("%v", e)
	}
}

// The hooks for tests work only behind their gate.
func TestHooks(t *testing.T) {
	m, in, whole, least := splitCall(t)
	rank := wrap(t, m.Model)
	limit := func(n int64) {
		t.Setenv("ART_TRAINER_RANK_TEST_MEMORY_LIMIT_BYTES", fmt.Sprint(m.Host.Stats().Allocated+n))
	}
	count := func(want int) {
		t.Helper()
		if _, tel := score(t, rank, in); min(2, tel.SubforwardCount) != want {
			t.Errorf("%+v", tel)
		}
	}
	limit(least)
	t.Setenv("ART_TRAINER_RANK_TEST_ANCHOR", "none such")
	count(1) // inert
	t.Setenv("ART_TRAINER_RANK_TEST_HOOKS", "1")
	var unknown *prefixtree.AnchorError
	if _, err := rank.DPRankForward(t.Context(), in); !errors.As(err, &unknown) {
		t.Errorf("an unknown label: %v", err)
	}
	if err := os.Unsetenv("ART_TRAINER_RANK_TEST_ANCHOR"); err != nil {
		t.Fatal(err)
	}
	count(2)
	limit(least - 1)
	if e := refused(t, &spy{Model: m.Model}, m.Host, rank, in); e.UsableLimitBytes != least-1 {
		t.Errorf("%+v", e)
	}
	limit(-1 << 20)
	if e := refused(t, &spy{Model: m.Model}, m.Host, rank, in); e.UsableLimitBytes != 0 || e.LargestPrefix != 0 {
		t.Errorf("%+v", e)
	}
	limit(whole)
	count(1)
	t.Setenv("ART_TRAINER_RANK_TEST_MEMORY_LIMIT_BYTES", "much")
	if _, err := rank.Plan(t.Context(), in); err == nil || !strings.Contains(err.Error(), "ART_TRAINER_RANK_TEST_MEMORY_LIMIT_BYTES") {
		t.Errorf("a limit that is no number: %v", err)
	}
	t.Setenv("ART_TRAINER_RANK_TEST_MEMORY_LIMIT_BYTES", "")
	t.Setenv("ART_TRAINER_RANK_TEST_ANCHOR", "no_sharing")
	if _, tel := score(t, rank, in); tel.PackedTokens != tel.LogicalTokens {
		t.Errorf("no sharing: %+v", tel)
	}
}
