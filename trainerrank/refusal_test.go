package trainerrank_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/internal/golden"
	"github.com/trainerrank/engine/trainerrank"
)

// refused runs a call that must be refused, and checks that the refusal agrees with itself and left everything alone.
func refused(t *testing.T, m *spy, dev device.Device, rank *trainerrank.TrainerRank, in forward.Inputs) *trainerrank.MemoryError {
	t.Helper()
	before, ran := stateOf(dev), m.forwards.Load()
	res, err := rank.DPRankForward(t.Context(), in)
	var e *trainerrank.MemoryError
	if !errors.As(err, &e) {
		if err == nil {
			res.Release()
		}
		t.Fatalf("the call was not refused: %v", err)
	}
	unchanged(t, dev, before)
	if m.forwards.Load() != ran {
		t.Error("a refused call ran the model")
	}
	text := strings.ToLower(err.Error())
	for _, words := range []string{"split", "unable to find a feasible split", fmt.Sprint(e.PredictedPeakBytes), fmt.Sprint(e.UsableLimitBytes)} {
		if !strings.Contains(text, words) {
			t.Errorf("%q is missing in: %s", words, text)
		}
	}
	for _, words := range []string{"no feasible", "infeasible"} {
		if strings.Contains(text, words) {
			t.Errorf("%q is claimed in: %s", words, text)
		}
	}
	if e.Requests == 1 && !strings.Contains(text, "a single request cannot be split") {
		t.Errorf("one request, and this is not said: %s", text)
	}
	if !strings.Contains(e.Suggestion, "smaller") || e.Hint() != e.Suggestion {
		t.Errorf("suggestion %q", e.Suggestion)
	}
	a, err := rank.Plan(t.Context(), in)
	if err != nil {
		t.Fatal(err)
	}
	want := &trainerrank.MemoryError{
		PredictedPeakBytes: a.PredictedPeakBytes, UsableLimitBytes: a.UsableLimitBytes, Suggestion: e.Suggestion,
		PackedTokens: a.PackedTokens, LogicalTokens: a.LogicalTokens, Requests: e.Requests, Reason: a.Reason, Rungs: a.Rungs,
		Shares: a.Shares, SmallestBudgetBytes: a.SmallestBudgetBytes, LargestPrefix: a.LargestPrefix,
		Telemetry: trainerrank.Telemetry{
			SubforwardCount: 1, SubforwardRequestIndices: a.SubforwardRequestIndices, SelectedMaxDepth: a.Layout[0].Depth, PackedTokens: a.PackedTokens,
			LogicalTokens: a.LogicalTokens, PredictedPeakBytes: a.PredictedPeakBytes, UsableLimitBytes: a.UsableLimitBytes,
			Basis: trainerrank.Exact, Retention: trainerrank.Stored,
		},
	}
	if r := a.Rungs[0]; a.Verdict != trainerrank.Refused || r.Count != 1 || r.TotalBytes != a.PredictedPeakBytes || r.Required[0] != r.TotalBytes || r.Retained[0] != a.Shares[device.Outputs] {
		t.Errorf("the plan: %+v", a)
	}
	for _, r := range a.Rungs {
		if r.Fits || r.TotalBytes <= a.UsableLimitBytes {
			t.Errorf("a rung of a refused call fits: %+v", r)
		}
	}
	if d := cmp.Diff(want, e, cmpopts.IgnoreFields(trainerrank.Telemetry{}, "PlanningTime")); d != "" {
		t.Errorf("the plan (-) and the refusal (+):\n%s", d)
	}
	if e.PredictedPeakBytes <= e.UsableLimitBytes || e.Shares.Total() != e.PredictedPeakBytes || e.PackedTokens > e.LogicalTokens || e.PackedTokens < 1 {
		t.Errorf("the numbers contradict each other: %+v", e)
	}
	if last, err := rank.LastForwardTelemetry(); err != nil || cmp.Diff(last, e.Telemetry) != "" {
		t.Errorf("the refusal is not in the telemetry: %v\n%s", err, cmp.Diff(last, e.Telemetry))
	}
	return e
}

// With a byte less than the smallest budget a call is refused before anything runs; with the smallest it runs, and with what the whole call needs it
// runs whole. The limit may be set, or be what others leave free on the device.
func TestOneByteLessIsRefused(t *testing.T) {
	folder := golden.FS(t, "qwen2-tiny")
	m := golden.Load(t, folder, golden.Options{Threads: 2})
	s := &spy{Model: m.Model}
	all := golden.Inputs(golden.Requests(t, folder))
	sets := [][]forward.Input{all, all[:1], all[15:16], {{Tokens: tokens(7)}, all[7], {Tokens: tokens(3)}}}
	for seed := range uint64(20) {
		r := golden.Rand(seed)
		sets = append(sets, golden.Draw(r, m.Spec().Vocabulary, 1+r.IntN(9), 1+r.IntN(200)))
	}
	splits := 0
	for i, inputs := range sets {
		in := nested(golden.Rand(uint64(i)), inputs)
		a, err := wrap(t, s).Plan(t.Context(), in)
		if err != nil {
			t.Fatal(err)
		}
		need, least := a.PredictedPeakBytes, a.SmallestBudgetBytes
		if need == 0 {
			continue // nothing is wanted
		}
		if a.Verdict != trainerrank.Whole || least > need {
			t.Errorf("set %d: %+v", i, a)
		}
		runs := func(rank *trainerrank.TrainerRank, limit int64) {
			t.Helper()
			before := s.forwards.Load()
			_, tel := score(t, rank, in)
			if tel.PredictedPeakBytes > limit || tel.ObservedPeakBytes != tel.PredictedPeakBytes || int(s.forwards.Load()-before) != tel.SubforwardCount {
				t.Errorf("set %d: %+v", i, tel)
			}
			if (tel.SubforwardCount == 1) != (limit >= need) {
				t.Errorf("set %d: %d subforwards in %d bytes, the whole call needs %d", i, tel.SubforwardCount, limit, need)
			}
			splits += tel.SubforwardCount - 1
		}
		e := refused(t, s, m.Host, wrap(t, s, trainerrank.WithUsableBytes(least-1)), in)
		if e.SmallestBudgetBytes != least || e.UsableLimitBytes != least-1 {
			t.Errorf("set %d: %+v", i, e)
		}
		for _, limit := range []int64{least, need - 1, need} {
			if limit >= least {
				runs(wrap(t, s, trainerrank.WithUsableBytes(limit)), limit)
			}
		}

		ballast, err := m.Host.Allocate(device.Ballast, m.Host.Free()-least+1)
		if err != nil {
			t.Fatal(err)
		}
		if e := refused(t, s, m.Host, wrap(t, s), in); e.UsableLimitBytes != m.Host.Free() || e.SmallestBudgetBytes != least {
			t.Errorf("set %d: %+v", i, e)
		}
		ballast.Free()
		for _, limit := range []int64{least, need} {
			if ballast, err = m.Host.Allocate(device.Ballast, m.Host.Free()-limit); err != nil {
				t.Fatal(err)
			}
			if free := m.Host.Free(); free != limit {
				t.Fatalf("%d bytes free, want %d", free, limit)
			}
			runs(wrap(t, s), limit)
			ballast.Free()
		}
		if t.Failed() {
			t.Fatalf("set %d", i)
		}
	}
	if splits == 0 {
		t.Error("nothing was split")
	}
}

// The largest prefix fits, whole or split, and with one input more it does not.
func TestLargestPrefix(t *testing.T) {
	m := golden.Load(t, golden.FS(t, "qwen2-tiny"), golden.Options{})
	s := &spy{Model: m.Model}
	for seed := range uint64(40) {
		r := golden.Rand(seed)
		inputs := golden.Draw(r, m.Spec().Vocabulary, 2+r.IntN(10), 1+r.IntN(200))
		if r.IntN(2) == 0 {
			inputs[r.IntN(len(inputs))].TopK = m.Spec().Vocabulary
		}
		a, err := wrap(t, s).Plan(t.Context(), forward.Many(inputs...))
		if err != nil {
			t.Fatal(err)
		}
		if a.PredictedPeakBytes == 0 {
			continue
		}
		least := a.SmallestBudgetBytes
		for _, usable := range []int64{0, least / 4, r.Int64N(least), least - 1} {
			rank := wrap(t, s, trainerrank.WithUsableBytes(usable))
			e := refused(t, s, m.Host, rank, nested(r, inputs))
			for n, want := range map[int]bool{e.LargestPrefix: false, e.LargestPrefix + 1: true} {
				p, err := rank.Plan(t.Context(), forward.Many(inputs[:n]...))
				if err != nil {
					t.Fatal(err)
				}
				if (p.Verdict == trainerrank.Refused) != want {
					t.Errorf("seed %d, %d usable bytes, largest prefix %d: the first %d inputs are %s", seed, usable, e.LargestPrefix, n, p.Verdict)
				}
			}
		}
	}
}

// An input more never makes a call cheaper: the search for the largest prefix, and every search for a split, stands on it.
func TestPricesAreMonotone(t *testing.T) {
	for threads := 1; threads <= 3; threads++ {
		m := golden.Load(t, golden.FS(t, "qwen2-tiny"), golden.Options{Threads: threads})
		rank := wrap(t, m.Model)
		vocab := m.Spec().Vocabulary
		grow := func(what string, inputs []forward.Input) {
			t.Helper()
			last := int64(0)
			for n := range inputs {
				a, err := rank.Plan(t.Context(), forward.Many(inputs[:n+1]...))
				if err != nil {
					t.Fatal(err)
				}
				if a.PredictedPeakBytes < last {
					t.Errorf("%d threads, %s: %d inputs need %d bytes, and %d need %d", threads, what, n, last, n+1, a.PredictedPeakBytes)
				}
				last = a.PredictedPeakBytes
			}
		}
		for seed := range uint64(50) {
			r := golden.Rand(seed)
			inputs := golden.Draw(r, vocab, 2+r.IntN(8), 1+r.IntN(400))
			for i := range inputs {
				if r.IntN(3) == 0 {
					inputs[i].TopK = 1 + r.IntN(vocab)
				}
			}
			grow(fmt.Sprintf("seed %d", seed), inputs)
		}
		// A token at a time, across the numbers of rows at which work is cut into more blocks.
		for blocks := 1; blocks <= 2*threads; blocks++ {
			inputs := []forward.Input{{Tokens: tokens(240*blocks - 6), TopK: 1}}
			for i := range 12 {
				inputs = append(inputs, forward.Input{Tokens: []int32{int32(60 + i)}, TopK: 1})
			}
			grow(fmt.Sprintf("%d blocks", blocks), inputs)
		}
		// A larger k at a time.
		inputs := []forward.Input{{Tokens: tokens(300), TopK: 1}}
		for k := 1; k <= vocab; k += 23 {
			inputs = append(inputs, forward.Input{Tokens: []int32{1}, TopK: k})
		}
		grow("k", inputs)
	}
}

// faint is a device that says it has more than it will give.
type faint struct {
	device.Device
	err func() error // of a reservation; nil: what the device says
}

func (f *faint) Free() int64 { return 1 << 40 }

func (f *faint) Reserve(s device.Sizes) (*device.Reservation, error) {
	if f.err != nil {
		return nil, f.err()
	}
	return f.Device.Reserve(s)
}

func (f *faint) ReserveTurns(turns []device.Sizes) (*device.Reservation, error) {
	if f.err != nil {
		return nil, f.err()
	}
	return f.Device.ReserveTurns(turns)
}

// Memory that is gone between the admission and the reservation makes another plan for what is there, or a refusal if that is too little, or if the system refuses.
func TestBytesThatAreGone(t *testing.T) {
	folder := golden.FS(t, "qwen2-tiny")
	m := golden.Load(t, folder, golden.Options{})
	in := forward.Many(golden.Inputs(golden.Requests(t, folder))...)
	want, _ := score(t, wrap(t, m.Model), in)
	before := stateOf(m.Host)
	plan, err := wrap(t, m.Model).Plan(t.Context(), in)
	if err != nil {
		t.Fatal(err)
	}
	need, least := plan.PredictedPeakBytes, plan.SmallestBudgetBytes
	if least >= need {
		t.Fatalf("the call needs %d bytes, split %d", need, least)
	}
	gone := int64(1 << 39)
	for _, c := range []struct {
		name  string
		err   func() error
		leave int64
		runs  bool
		cause bool // the device's error is named
	}{
		{"enough for a split", nil, need - 1, true, false},
		{"enough for the smallest split", nil, least, true, false},
		{"too little", nil, least - 1, false, false},
		{"nothing", nil, 0, false, false},
		{"refused by the system", func() error {
			return &device.OutOfMemoryError{Op: "reserve", FreeBytes: 1 << 40, Err: errors.New("no pages")}
		}, need, false, true},
		{"less every time", func() error {
			gone /= 2
			return &device.OutOfMemoryError{Op: "reserve", FreeBytes: gone}
		}, need, false, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := &spy{Model: m.Model}
			rank := wrap(t, s, trainerrank.WithDevice(&faint{Device: m.Host, err: c.err}))
			ballast, err := m.Host.Allocate(device.Ballast, m.Host.Free()-c.leave&^4095)
			if err != nil {
				t.Fatal(err)
			}
			defer ballast.Free()
			if c.runs {
				got, tel := score(t, rank, in)
				for i := range want {
					if d := golden.Diff(want[i], got[i]); d != "" {
						t.Error(d)
					}
				}
				if tel.SubforwardCount < 2 || tel.PredictedPeakBytes > c.leave || tel.ObservedPeakBytes != tel.PredictedPeakBytes {
					t.Errorf("%+v", tel)
				}
				return
			}
			_, err = rank.DPRankForward(t.Context(), in)
			var e *trainerrank.MemoryError
			if !errors.As(err, &e) {
				t.Fatalf("%v", err)
			}
			if s.forwards.Load() != 0 {
				t.Error("it ran")
			}
			var oom *device.OutOfMemoryError
			if (e.PredictedPeakBytes <= e.UsableLimitBytes) != c.cause || (e.Err != nil) != c.cause || errors.As(err, &oom) != c.cause || (e.Reason == "") != c.cause {
				t.Errorf("%+v", e)
			}
			if e.SmallestBudgetBytes != least {
				t.Errorf("the smallest budget is %d, want %d", e.SmallestBudgetBytes, least)
			}
			if text := strings.ToLower(err.Error()); !strings.Contains(text, "unable to find a feasible split") || !strings.Contains(e.Suggestion, "smaller") {
				t.Errorf("%v\n%s", err, e.Suggestion)
			}
			if last, err := rank.LastForwardTelemetry(); err != nil || cmp.Diff(last, e.Telemetry) != "" || last.UsableLimitBytes != e.UsableLimitBytes {
				t.Errorf("telemetry: %v\n%s", err, cmp.Diff(last, e.Telemetry))
			}
		})
	}
	unchanged(t, m.Host, before)
}
