package trainerrank_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"gorgonia.org/tensor"

	"github.com/trainerrank/engine/collective"
	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/internal/golden"
	"github.com/trainerrank/engine/profile"
	"github.com/trainerrank/engine/slots"
	"github.com/trainerrank/engine/trainerrank"
)

// This file tests calls of models that cannot rehearse. Comments name the defects of the studied system that a test is about, by their numbers in section 9 (#848) and
// section 10 (10.3) of the reference. Others are tested where their code is:
//
//   - package profile, the arithmetic of prices: #812, #848, #860, #870, #877, #893, #913, #927, 10.1, 10.3 to 10.6, 10.11, 10.13, 10.27, 10.28, 10.31
//   - package ladder: #877, #906, 10.6 to 10.8, 10.10, 10.13, 10.20, 10.22
//   - the other files here: #826, #840, #872, #899, #906, #907, #927 (width_test.go, waves_test.go, shared_test.go), 10.16 (agree_test.go), 10.18 (refusal_test.go), 10.25 (rules_test.go)
//   - package slots: #799, #823, #835
//
// The rest is about what the engine does not have: an allocator that keeps what is freed (#900, but for its second half: nothing is run twice), buffers of expert-parallel exchanges (#894), selective
// recomputation (#914, #915, #922), tensor-, context- and pipeline-parallel runs (#832, #854, #859, #916, #917), tables fitted on GPUs (#836, #843), versions of graphs
// (#925), and what a caller's backward takes where a model cannot rehearse (#898), which is not built.

// scripted is a model that takes the memory that it is told to. All its answers are 0.
type scripted struct {
	dev      device.Device
	spec     forward.Spec
	variant  string
	scratch  func(packed int) int64 // bytes
	retained func(packed int) int64 // bytes beside the outputs; nil: none
	forwards int
}

func (s *scripted) Spec() forward.Spec    { return s.spec }
func (s *scripted) Device() device.Device { return s.dev }
func (s *scripted) Variant() string       { return s.variant }

func (s *scripted) Forward(_ context.Context, b *forward.Batch) (*forward.Pass, error) {
	s.forwards++
	p := &forward.Pass{}
	dense := func(n, width int) *tensor.Dense {
		m := b.Arena.Keep(device.Outputs, 4*int64(n*width))
		clear(m.Raw())
		return tensor.New(tensor.WithShape(n, width), tensor.WithBacking(m.F32()))
	}
	for _, in := range b.Requests {
		var o forward.Output
		if n := len(in.Tokens); in.Targets != nil {
			o.TargetLogprobs = dense(n, in.Width())
		}
		if in.HiddenStates {
			o.HiddenStates = dense(len(in.Tokens), s.spec.Hidden)
		}
		p.Outputs = append(p.Outputs, o)
	}
	if s.retained != nil {
		b.Arena.Keep(device.Retained, s.retained(len(b.Tokens)))
	}
	mark := b.Arena.Mark()
	defer b.Arena.Pop(mark)
	b.Arena.Scratch(s.scratch(len(b.Tokens)))
	return p, nil
}

// perToken is so many bytes per token.
func perToken(bytes int64) func(int) int64 {
	return func(packed int) int64 { return bytes * int64(packed) }
}

// script is a scripted model on a device of a GiB, with hidden states of 4 bytes: its cold estimate is 16 bytes a token.
func script(t *testing.T, scratch func(int) int64) *scripted {
	t.Helper()
	h, err := device.NewHost(1 << 30)
	if err != nil {
		t.Fatal(err)
	}
	device.CheckLeaks(t, h)
	return &scripted{dev: h, spec: forward.Spec{Name: "scripted", Vocabulary: 1 << 20, Hidden: 16, Layers: 1}, scratch: scratch}
}

// apart are n requests of so many tokens each that share none.
func apart(n, tokens int) []forward.Input {
	list := make([]forward.Input, n)
	for i := range list {
		for k := range tokens {
			list[i].Tokens = append(list[i].Tokens, int32(1000*i+k%1000))
		}
		list[i].Targets = make([]int32, tokens)
	}
	return list
}

// planned is the plan of a call on a rank of its own with that profile, in so many bytes.
func planned(t *testing.T, m forward.Model, p *profile.Profile, in forward.Inputs, usable int64) *trainerrank.Admission {
	t.Helper()
	a, err := wrap(t, m, trainerrank.WithProfile(p), trainerrank.WithUsableBytes(usable)).Plan(t.Context(), in)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// after is what was learned from calls, each with all the memory that there is.
func after(t *testing.T, m forward.Model, calls ...[]forward.Input) *profile.Profile {
	t.Helper()
	rank := wrap(t, m)
	for _, in := range calls {
		score(t, rank, forward.Many(in...))
	}
	return rank.Profile()
}

const plenty = 1 << 40

// A real model whose rehearsal is hidden: refused cold, split once a call was seen to run whole, with the same bits as an exact price gives, within the estimate. The
// device's reserve of 3/100 stays free (10.1 is that this is refused also where prices are exact; there it is not).
func TestALearnedCallConvertsAfterOneProfiledCall(t *testing.T) {
	m := golden.Load(t, golden.FS(t, "arith"), golden.Options{Threads: 2})
	r := golden.Rand(1)
	inputs := make([]forward.Input, 8)
	for i := range inputs {
		inputs[i].Tokens = golden.Draw(r, m.Spec().Vocabulary, 1, 2)[0].Tokens
		for len(inputs[i].Tokens) < 500 {
			inputs[i].Tokens = append(inputs[i].Tokens, int32(r.IntN(m.Spec().Vocabulary)))
		}
		inputs[i].Targets = labels(len(inputs[i].Tokens))
	}
	in := forward.Many(inputs...)
	want, _ := score(t, wrap(t, m.Model), in)
	s := &spy{Model: m.Model}
	opaque := trainerrank.Opaque(s)
	if _, ok := opaque.(forward.Rehearser); ok {
		t.Fatal("an opaque model can rehearse")
	}
	whole := planned(t, opaque, after(t, opaque, inputs), in, plenty).PredictedPeakBytes
	left := whole * 3 / 5

	rank := wrap(t, opaque)
	squeeze := func() *device.Block {
		reserve := m.Host.Capacity() - profile.Usable(m.Host.Capacity(), m.Host.Capacity())
		b, err := m.Host.Allocate(device.Ballast, (m.Host.Free()-reserve-left)&^(device.PageSize-1))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	ballast, before, ran := squeeze(), stateOf(m.Host), s.forwards.Load()
	_, err := rank.DPRankForward(t.Context(), in)
	var e *trainerrank.MemoryError
	if !errors.As(err, &e) || e.Executing || e.Telemetry.Basis != trainerrank.Cold || s.forwards.Load() != ran {
		t.Fatalf("cold: %v", err)
	}
	usable := m.Host.Free() - (m.Host.Capacity() - profile.Usable(m.Host.Capacity(), m.Host.Capacity()))
	if e.UsableLimitBytes != usable || usable < left || !strings.Contains(e.Suggestion, "smaller") || !strings.Contains(e.Suggestion, "after one call like it") {
		t.Errorf("%d bytes usable: %+v", usable, e)
	}
	if e.Shares.Total() != e.PredictedPeakBytes || e.SmallestBudgetBytes <= usable {
		t.Errorf("%+v", e)
	}
	unchanged(t, m.Host, before)
	ballast.Free()

	answers, tel := score(t, rank, in)
	if tel.Basis != trainerrank.Cold || tel.SubforwardCount != 1 {
		t.Errorf("the profiled call: %+v", tel)
	}
	check := func(answers []golden.Answer) {
		t.Helper()
		for i := range want {
			if d := golden.Diff(want[i], answers[i]); d != "" {
				t.Errorf("input %d: %s", i, d)
			}
		}
	}
	check(answers)

	ballast = squeeze()
	defer ballast.Free()
	before = stateOf(m.Host)
	live := m.Host.Stats().TotalInUse()
	for calls := 1; ; calls++ {
		m.Host.ResetPeak()
		res, err := rank.DPRankForward(t.Context(), in)
		if err != nil {
			t.Fatal(err)
		}
		tel, now := res.Telemetry, m.Host.Stats()
		if tel.Basis != trainerrank.Learned || tel.SubforwardCount < 2 || tel.UsableLimitBytes != usable || tel.PredictedPeakBytes > usable {
			t.Errorf("warm: %+v", tel)
		}
		if seen := now.PeakInUse - live; seen != tel.ObservedPeakBytes || now.PeakAllocated-before.Allocated > usable {
			t.Errorf("%d in use at most, %d taken: %+v", seen, now.PeakAllocated-before.Allocated, tel)
		}
		if kept := now.TotalInUse() - live; kept != tel.RetainedBytes || now.Allocated-before.Allocated != kept || now.InUse[device.Outputs] != kept {
			t.Errorf("%d kept: %+v\n%v", kept, tel, now)
		}
		check(golden.CopyAll(res.Outputs.Flat()))
		res.Release()
		unchanged(t, m.Host, before)
		// A part takes more than its share, because it has as many workspaces as the whole. That is known once one was seen.
		if tel.ObservedPeakBytes <= tel.PredictedPeakBytes {
			break
		}
		if calls == 3 {
			t.Fatalf("call %d: %+v", calls, tel)
		}
	}
}

// The trust range, in tokens and in logical per packed tokens: 8 times what was seen is believed, and a split found; with one more of either everything counts as retained.
func TestTrustEndsAtEightTimes(t *testing.T) {
	m := script(t, perToken(1<<14))
	seen := after(t, m, apart(10, 10)) // 100 tokens, shared by none
	believed := func(inputs []forward.Input) bool {
		t.Helper()
		in := forward.Many(inputs...)
		whole := planned(t, m, seen, in, plenty)
		r := whole.Rungs[0]
		if whole.Basis != trainerrank.Learned || r.Count != 1 || r.Required[0] != whole.PredictedPeakBytes {
			t.Fatalf("%s", whole)
		}
		if all := whole.Shares[device.Outputs]+whole.Shares[device.Retained] == whole.PredictedPeakBytes; all == (r.Retained[0] < r.Required[0]) {
			t.Errorf("%v of %d", whole.Shares, r.Retained[0])
		}
		return r.Retained[0] < r.Required[0]
	}
	in := apart(80, 10)
	for _, c := range []struct {
		name   string
		inputs []forward.Input
		want   bool
	}{
		{"800 tokens", in, true},
		{"801 tokens", append(slices.Clone(in), apart(81, 1)[80]), false},
		{"100 tokens, 800 logical", slices.Repeat(in[:10], 8), true},
		{"100 tokens, 801 logical", append(slices.Repeat(in[:10], 8), apart(1, 1)...), false},
	} {
		if got := believed(c.inputs); got != c.want {
			t.Errorf("%s: retained bytes are believed: %v", c.name, got)
		}
	}
	// What it is for. It is the size of a subforward that counts, not that of the call.
	for _, c := range []struct {
		n, tokens int
		want      trainerrank.Verdict
	}{{2, 800, trainerrank.Split}, {2, 801, trainerrank.Refused}, {80, 11, trainerrank.Split}, {7, 801, trainerrank.Refused}, {1, 800, trainerrank.Whole}, {1, 805, trainerrank.Refused}} {
		in := forward.Many(apart(c.n, c.tokens)...)
		if a := planned(t, m, seen, in, 14_500_000); a.Verdict != c.want {
			t.Errorf("%d requests of %d: %s", c.n, c.tokens, a)
		}
	}
}

// kept are the observations of retained bytes in a profile.
func kept(p *profile.Profile) []string {
	var list []string
	for _, part := range strings.Split(string(p.Save()), `"kept":`)[1:] {
		part, _, _ = strings.Cut(part, "]}]")
		_, fraction, _ := strings.Cut(part, `"fraction":`)
		if strings.HasPrefix(part, "null") {
			fraction = "none"
		}
		list = append(list, strings.Trim(fraction, "}]"))
	}
	return list
}

// A model that keeps all that it takes is not one of which nothing is known: what is known stands (3.6), and what is not is the first that is seen.
func TestAllRetainedDiffersFromUnobserved(t *testing.T) {
	in := apart(16, 64) // a page of outputs
	m := script(t, perToken(0))
	m.retained = perToken(1 << 14)
	rank := wrap(t, m)
	little := func() {
		m.scratch, m.retained = m.retained, nil
		score(t, rank, forward.Many(in...))
	}
	score(t, rank, forward.Many(in...))
	if got := kept(rank.Profile()); !slices.Equal(got, []string{"[1,1"}) {
		t.Errorf("all is kept: %s", got)
	}
	little()
	if got := kept(rank.Profile()); !slices.Equal(got, []string{"[1,1"}) {
		t.Errorf("afterwards less is kept: %s", got)
	}
	half := func(p *profile.Profile) *trainerrank.Admission {
		whole := planned(t, m, p, forward.Many(in...), plenty).PredictedPeakBytes
		return planned(t, m, p, forward.Many(in...), whole/2)
	}
	if a := half(rank.Profile()); a.Verdict != trainerrank.Refused || a.Basis != trainerrank.Learned {
		t.Errorf("all is kept, half the bytes: %s", a)
	}

	// A call that ran out has shown a peak, and nothing that is kept.
	m = script(t, perToken(1<<14))
	rank = wrap(t, m, trainerrank.WithUsableBytes(1<<20))
	if _, err := rank.DPRankForward(t.Context(), forward.Many(in...)); err == nil {
		t.Fatal("16 MiB fit in 1")
	}
	p := rank.Profile()
	if got := kept(p); !slices.Equal(got, []string{"none"}) {
		t.Errorf("after a call that ran out: %s", got)
	}
	if a := half(p); a.Verdict != trainerrank.Refused || a.Basis != trainerrank.Learned {
		t.Errorf("after a call that ran out: %s", a)
	}
	rank = wrap(t, m, trainerrank.WithProfile(p))
	score(t, rank, forward.Many(in...))
	if got := kept(rank.Profile()); len(got) != 1 || got[0] == "none" || got[0] == "[1,1" {
		t.Errorf("after the first that did not: %s", got)
	}
	if a := half(rank.Profile()); a.Verdict != trainerrank.Split {
		t.Errorf("%s", a)
	}
}

// #848, 10.3: a tiny first call that took 17.5 MB a token, compiling, made upstream ask 386 GB for one that needs 1.26. Here the sizes are a hundredth. The large call
// runs even if the tiny one is all that was seen, and afterwards its price is as if that had never been.
func TestATinyCallDoesNotPoisonALargeOne(t *testing.T) {
	long, tiny := apart(20, 1000), apart(1, 10)
	m := script(t, func(packed int) int64 {
		if packed == 10 {
			return 1_754_545
		}
		return 572 * int64(packed)
	})
	want := planned(t, m, after(t, m, long), forward.Many(long...), plenty)
	for name, calls := range map[string][][]forward.Input{"tiny first": {tiny, long}, "tiny last": {long, tiny}, "often": {tiny, long, tiny, tiny}} {
		p := after(t, m, calls...)
		a := planned(t, m, p, forward.Many(long...), plenty)
		if a.PredictedPeakBytes != want.PredictedPeakBytes || a.Rungs[0].Retained[0] != want.Rungs[0].Retained[0] {
			t.Errorf("%s: %s\nwithout:\n%s", name, a, want)
		}
		if a := planned(t, m, p, forward.Many(long...), want.PredictedPeakBytes); a.Verdict != trainerrank.Whole {
			t.Errorf("%s: %s", name, a)
		}
	}
	// And with a real model, whose workspaces are most of what a tiny call takes.
	real := golden.Load(t, golden.FS(t, "arith"), golden.Options{Threads: 2})
	big, one := []forward.Input{{Tokens: tokens(3000)}}, []forward.Input{{Tokens: tokens(1)}}
	for i := range big[0].Tokens {
		big[0].Tokens[i] %= int32(real.Spec().Vocabulary)
	}
	big[0].Targets, one[0].Targets = labels(3000), labels(1)
	opaque := trainerrank.Opaque(real.Model)
	alone := planned(t, opaque, after(t, opaque, big), forward.Many(big...), plenty).PredictedPeakBytes
	if both := planned(t, opaque, after(t, opaque, one, big, one), forward.Many(big...), plenty).PredictedPeakBytes; both != alone {
		t.Errorf("%d bytes, after a tiny call %d", alone, both)
	}
}

// Equal inputs, profile and budget give equal admissions, byte for byte, on every rank; also where the profile went through a file: nothing is understated after that.
func TestLearnedAdmissionsAreDeterministic(t *testing.T) {
	m := golden.Load(t, golden.FS(t, "arith"), golden.Options{Threads: 2})
	opaque := trainerrank.Opaque(m.Model)
	vocab := m.Spec().Vocabulary
	for seed := range uint64(12) {
		r := golden.Rand(seed)
		rank := wrap(t, opaque)
		for range 1 + r.IntN(4) {
			score(t, rank, nested(r, golden.Draw(r, vocab, 1+r.IntN(8), 1+r.IntN(300))))
		}
		p := rank.Profile()
		text := p.Save()
		read, err := profile.Read(text)
		if err != nil {
			t.Fatal(err)
		}
		inputs := golden.Draw(r, vocab, 2+r.IntN(8), 1+r.IntN(500))
		in := nested(r, inputs)
		whole := planned(t, opaque, p, in, plenty)
		for _, usable := range []int64{0, whole.SmallestBudgetBytes - 1, whole.SmallestBudgetBytes, (whole.SmallestBudgetBytes + whole.PredictedPeakBytes) / 2, whole.PredictedPeakBytes, plenty} {
			var texts []string
			for _, p := range []*profile.Profile{p, read, rank.Profile()} {
				a := planned(t, opaque, p, in, usable)
				text, err := json.Marshal(a)
				if err != nil {
					t.Fatal(err)
				}
				texts = append(texts, string(text))
				if (a.Verdict == trainerrank.Refused) != (usable < a.SmallestBudgetBytes) {
					t.Errorf("seed %d, %d bytes: %s", seed, usable, a)
				}
			}
			if texts[0] != texts[1] || texts[1] != texts[2] {
				t.Errorf("seed %d, %d bytes: the plans differ:\n%s", seed, usable, strings.Join(texts, "\n"))
			}
		}
		if got := rank.Profile().Save(); string(got) != string(text) {
			t.Errorf("seed %d: planning changed the profile:\n%s\n%s", seed, text, got)
		}
	}
}

// The profile that a rank was given, and the one that it gives, are its own: it learns, they do not.
func TestProfilesAreCopied(t *testing.T) {
	m := script(t, perToken(100))
	given := after(t, m, apart(2, 30))
	text := string(given.Save())
	rank := wrap(t, m, trainerrank.WithProfile(given))
	taken := rank.Profile()
	score(t, rank, forward.Many(apart(2, 3000)...))
	if string(given.Save()) != text || string(taken.Save()) != text {
		t.Error("a copy has learned")
	}
	if string(rank.Profile().Save()) == text {
		t.Error("the rank has not")
	}
	taken.Observe(profile.Signature{Model: "other"}, profile.Observation{Load: profile.Load{Packed: 1, Logical: 1}})
	if strings.Contains(string(rank.Profile().Save()), "other") {
		t.Error("a copy taught the rank")
	}
	// A model that can rehearse teaches nothing.
	real, exact := load(t, golden.FS(t, "arith"), golden.Options{})
	score(t, exact, forward.One(forward.Input{Tokens: tokens(3)[:1], Targets: labels(1)}))
	if got := string(exact.Profile().Save()); got != string((&profile.Profile{}).Save()) {
		t.Errorf("%s of %s", got, real.Spec().Name)
	}
	// While calls run, anybody may look.
	var wg sync.WaitGroup
	wg.Go(func() {
		for range 50 {
			score(t, rank, forward.Many(apart(2, 20)...))
		}
	})
	for range 50 {
		rank.Profile().Save()
	}
	wg.Wait()
}

// #848, #913, 10.2: the cold estimate is far below the truth and the call is admitted. What it needs beyond is taken from the device as long as that is usable; the next call is priced by what was seen.
func TestAColdCallMayTakeMoreThanItsEstimate(t *testing.T) {
	m := script(t, perToken(1000))
	in := forward.Many(apart(10, 100)...)
	rank := wrap(t, m)
	cold := planned(t, m, &profile.Profile{}, in, plenty)
	before := stateOf(m.dev)
	m.dev.ResetPeak()
	res, err := rank.DPRankForward(t.Context(), in)
	if err != nil {
		t.Fatal(err)
	}
	tel := res.Telemetry
	if tel.Basis != trainerrank.Cold || tel.PredictedPeakBytes != cold.PredictedPeakBytes || tel.ObservedPeakBytes < 1_000_000 || tel.PredictedPeakBytes > 300_000 {
		t.Errorf("%+v", tel)
	}
	if now := m.dev.Stats(); now.PeakInUse != tel.ObservedPeakBytes || now.Allocated != tel.RetainedBytes {
		t.Errorf("%+v\n%v", tel, now)
	}
	res.Release()
	unchanged(t, m.dev, before)
	a := planned(t, m, rank.Profile(), in, plenty)
	if a.Basis != trainerrank.Learned || a.PredictedPeakBytes < tel.ObservedPeakBytes || a.PredictedPeakBytes > tel.ObservedPeakBytes*12/10 {
		t.Errorf("%d were seen: %s", tel.ObservedPeakBytes, a)
	}
}

// #848, #872, #900, #913, 10.20: if there is too little, an unsplit call is a MemoryError with the numbers of the plan that ran, which were in the telemetry before it did. Nothing is left and nothing is
// tried twice; the same call is not admitted for the same bytes again, and with more it runs.
func TestRunningOut(t *testing.T) {
	for name, c := range map[string]struct {
		usable  int64
		ballast bool // so much is free, reserve included, or it is a limit
	}{"of a limit": {900_000, false}, "of the device": {900_000, true}} {
		t.Run(name, func(t *testing.T) {
			m := script(t, perToken(1000))
			in := forward.Many(apart(10, 100)...)
			opts := []trainerrank.Option{trainerrank.WithUsableBytes(c.usable)}
			if c.ballast {
				reserve := m.dev.Capacity() - profile.Usable(m.dev.Capacity(), m.dev.Capacity())
				b, err := m.dev.Allocate(device.Ballast, m.dev.Free()-reserve-c.usable)
				if err != nil {
					t.Fatal(err)
				}
				defer b.Free()
				opts = nil
			}
			rank := wrap(t, m, opts...)
			a, err := rank.Plan(t.Context(), in)
			if err != nil {
				t.Fatal(err)
			}
			before := stateOf(m.dev)
			res, err := rank.DPRankForward(t.Context(), in)
			var e *trainerrank.MemoryError
			var partial *trainerrank.PartialExecutionError
			var oom *device.OutOfMemoryError
			if res != nil || !errors.As(err, &e) || errors.As(err, &partial) || !errors.As(err, &oom) || m.forwards != 1 {
				t.Fatalf("%d forwards: %v", m.forwards, err)
			}
			if oom.FreeBytes > c.usable || oom.AskedBytes <= oom.FreeBytes {
				t.Errorf("%v", oom)
			}
			unchanged(t, m.dev, before)
			if !e.Executing || e.PredictedPeakBytes != a.PredictedPeakBytes || e.UsableLimitBytes != a.UsableLimitBytes || e.PackedTokens != a.PackedTokens ||
				e.LogicalTokens != a.LogicalTokens || e.Shares != a.Shares || e.Telemetry.Basis != trainerrank.Cold || !strings.Contains(e.Suggestion, "smaller") {
				t.Errorf("planned: %s\nfailed: %+v", a, e)
			}
			if text := err.Error(); !strings.Contains(text, "an estimate, cold") || strings.Contains(text, "split") {
				t.Errorf("%s", text)
			}
			if last, err := rank.LastForwardTelemetry(); err != nil || cmp.Diff(e.Telemetry, last) != "" || last.ObservedPeakBytes == 0 || last.ObservedPeakBytes > c.usable {
				t.Errorf("%v\n%s", err, cmp.Diff(e.Telemetry, last))
			}
			// What is retained was not seen, so no split helps.
			for range 2 {
				_, err = rank.DPRankForward(t.Context(), in)
				if e = nil; !errors.As(err, &e) || e.Executing || m.forwards != 1 || e.Telemetry.Basis != trainerrank.Learned || e.SmallestBudgetBytes < 1_000_000 {
					t.Errorf("again, %d forwards: %v", m.forwards, err)
				}
				unchanged(t, m.dev, before)
			}
			more := wrap(t, m, trainerrank.WithProfile(rank.Profile()), trainerrank.WithDevice(roomy(t)))
			if _, tel := score(t, more, in); tel.Basis != trainerrank.Learned || tel.ObservedPeakBytes > tel.PredictedPeakBytes {
				t.Errorf("%+v", tel)
			}
		})
	}
}

// roomy is a device with nothing on it.
func roomy(t *testing.T) device.Device {
	h, err := device.NewHost(1 << 30)
	if err != nil {
		t.Fatal(err)
	}
	device.CheckLeaks(t, h)
	return h
}

// A split that takes more than it was seen to take fails at the subforward that does, and says so; nothing is left, and the next call is priced by it.
func TestASplitThatRunsOut(t *testing.T) {
	m := script(t, perToken(1000))
	inputs := apart(10, 100)
	in := forward.Many(inputs...)
	p := after(t, m, inputs)
	usable := planned(t, m, p, in, plenty).PredictedPeakBytes / 2
	for fail := 1; fail <= 3; fail++ {
		rank := wrap(t, m, trainerrank.WithProfile(p), trainerrank.WithUsableBytes(usable))
		a, err := rank.Plan(t.Context(), in)
		if err != nil || a.SubforwardCount() != 3 {
			t.Fatalf("%v\n%s", err, a)
		}
		first := m.forwards
		m.scratch = func(packed int) int64 {
			if m.forwards-first == fail {
				return 10_000 * int64(packed)
			}
			return 1000 * int64(packed)
		}
		before := stateOf(m.dev)
		_, err = rank.DPRankForward(t.Context(), in)
		var partial *trainerrank.PartialExecutionError
		var e *trainerrank.MemoryError
		if !errors.As(err, &partial) || partial.Completed != fail-1 || partial.Count != 3 || !errors.As(err, &e) || !e.Executing || e.PredictedPeakBytes != a.PredictedPeakBytes {
			t.Fatalf("%v", err)
		}
		if !strings.Contains(err.Error(), "in a split that was admitted (its price was an estimate, learned)") {
			t.Errorf("%v", err)
		}
		unchanged(t, m.dev, before)
		if a, err = rank.Plan(t.Context(), in); err != nil || a.Verdict != trainerrank.Refused {
			t.Errorf("%v\n%s", err, a)
		}
	}
}

// ReservePool is that of a device that says it has more than it will give.
func (f *faint) ReservePool(bytes, most int64) (*device.Pool, error) {
	if f.err != nil {
		return nil, f.err()
	}
	return f.Device.ReservePool(bytes, most)
}

// #899, 10.18: what was free when a call was planned may be gone when it runs. It is planned anew for what there is, reserve included.
func TestLearnedBytesThatAreGone(t *testing.T) {
	m := script(t, perToken(10_000))
	inputs := apart(10, 100)
	in := forward.Many(inputs...)
	p := after(t, m, inputs)
	whole := planned(t, m, p, in, plenty).PredictedPeakBytes
	small, err := device.NewHost(2 * whole)
	if err != nil {
		t.Fatal(err)
	}
	device.CheckLeaks(t, small)
	m.dev = small
	rank := wrap(t, m, trainerrank.WithProfile(p), trainerrank.WithDevice(&faint{Device: m.dev}), trainerrank.WithUsableBytes(2*whole+1))
	reserve := m.dev.Capacity() - profile.Usable(m.dev.Capacity(), m.dev.Capacity())
	for _, c := range []struct {
		left int64
		runs bool
	}{{whole / 2, true}, {whole / 100, false}} {
		b, err := m.dev.Allocate(device.Ballast, m.dev.Free()-reserve-c.left)
		if err != nil {
			t.Fatal(err)
		}
		before, ran := stateOf(m.dev), m.forwards
		res, err := rank.DPRankForward(t.Context(), in)
		var e *trainerrank.MemoryError
		if c.runs && (err != nil || res.Telemetry.SubforwardCount < 2 || res.Telemetry.UsableLimitBytes > c.left) || !c.runs && (!errors.As(err, &e) || e.UsableLimitBytes > c.left || m.forwards != ran) {
			t.Errorf("%d bytes left: %v, %+v", c.left, err, res)
		}
		if res != nil {
			res.Release()
		}
		unchanged(t, m.dev, before)
		b.Free()
	}
}

// #927, 10.5, 10.6: what was learned of one kind of request, variant of a model or cost of layouts says nothing of another. Requests that want nothing do not count.
func TestWhatWasLearnedKeepsToItsKind(t *testing.T) {
	m := script(t, perToken(1000))
	inputs := apart(4, 50)
	p := after(t, m, inputs)
	with := func(change func(in *forward.Input)) forward.Inputs {
		list := slices.Clone(inputs)
		change(&list[1])
		return forward.Many(list...)
	}
	other := *m
	other.variant = "more threads"
	deep := *m
	deep.spec.Layers = 2
	price := func(m forward.Model, in forward.Inputs, opts ...trainerrank.Option) *trainerrank.Admission {
		t.Helper()
		a, err := wrap(t, m, append(opts, trainerrank.WithProfile(p))...).Plan(t.Context(), in)
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	same := price(m, forward.Many(inputs...))
	for _, c := range []struct {
		name string
		a    *trainerrank.Admission
		want trainerrank.Basis
	}{
		{"the same", same, trainerrank.Learned},
		{"a part", price(m, forward.Many(inputs[1:]...)), trainerrank.Learned},
		{"hidden states too", price(m, with(func(in *forward.Input) { in.HiddenStates = true })), trainerrank.Cold},
		{"two labels", price(m, with(func(in *forward.Input) { in.TargetWidth, in.Targets = 2, make([]int32, 2*len(in.Tokens)) })), trainerrank.Cold},
		{"another variant", price(&other, forward.Many(inputs...)), trainerrank.Cold},
		{"another depth", price(&deep, forward.Many(inputs...)), trainerrank.Cold},
		{"another cost", price(m, forward.Many(inputs...), trainerrank.WithCostTables(dear)), trainerrank.Cold},
	} {
		if c.a.Basis != c.want {
			t.Errorf("%s: %s", c.name, c.a.Basis)
		}
	}
	idle := price(m, forward.Many(append(slices.Clone(inputs), forward.Input{Tokens: tokens(5000)})...))
	if idle.PredictedPeakBytes != same.PredictedPeakBytes || idle.LogicalTokens != same.LogicalTokens || idle.Basis != trainerrank.Learned {
		t.Errorf("with a request that wants nothing: %s\nwithout: %s", idle, same)
	}
	// One request for hidden states among labels: a call of such requests alone is beyond what was seen of them.
	mixed := apart(20, 50)
	mixed[3].HiddenStates = true
	p = after(t, m, mixed)
	alone := []forward.Input{mixed[3]}
	a, b := price(m, forward.Many(alone...)), price(m, forward.Many(mixed...))
	if a.Basis != trainerrank.Learned || a.Trusted || !b.Trusted || a.Rungs[0].Retained[0] != a.Rungs[0].Required[0] {
		t.Errorf("%v: %s", a.Trusted, a)
	}
}

// Whatever calls of a real model come in whatever budgets: an error is one of memory, and nothing of it stays; answers have the bits of the exact road; the device sees what the telemetry says, which
// is within the usable bytes; a call that was seen to run whole is never priced below what it takes.
func TestRandomLearnedCalls(t *testing.T) {
	m := golden.Load(t, golden.FS(t, "arith"), golden.Options{Threads: 2})
	vocab := m.Spec().Vocabulary
	seeds := uint64(16)
	if testing.Short() {
		seeds = 4
	}
	counts := map[string]int{}
	for seed := range seeds {
		r := golden.Rand(seed)
		opaque := trainerrank.Opaque(m.Model)
		var p profile.Profile
		for range 10 {
			inputs := golden.Draw(r, vocab, 1+r.IntN(8), 1+r.IntN(300))
			for i := range inputs {
				if r.IntN(20) > 0 { // few kinds, so that something is learned of each
					inputs[i] = forward.Input{Tokens: inputs[i].Tokens, Targets: labels(len(inputs[i].Tokens))}
				}
			}
			in := nested(r, inputs)
			want, _ := score(t, wrap(t, m.Model), in)
			a := planned(t, opaque, &p, in, plenty)
			usable := a.SmallestBudgetBytes/2 + r.Int64N(2*a.PredictedPeakBytes+1)
			rank := wrap(t, opaque, trainerrank.WithProfile(&p), trainerrank.WithUsableBytes(usable))
			before, live := stateOf(m.Host), m.Host.Stats().TotalInUse()
			m.Host.ResetPeak()
			res, err := rank.DPRankForward(t.Context(), in)
			p = *rank.Profile()
			now := m.Host.Stats()
			if taken := now.PeakAllocated - before.Allocated; taken > usable {
				t.Errorf("seed %d: %d bytes of %d", seed, taken, usable)
			}
			if err != nil {
				var e *trainerrank.MemoryError
				if !errors.As(err, &e) {
					t.Fatalf("seed %d: %v", seed, err)
				}
				counts[fmt.Sprintf("%s, ran out %v", e.Telemetry.Basis, e.Executing)]++
				unchanged(t, m.Host, before)
				continue
			}
			tel := res.Telemetry
			counts[fmt.Sprintf("%s, split %v", tel.Basis, tel.SubforwardCount > 1)]++
			if now.PeakInUse-live != tel.ObservedPeakBytes || now.Allocated-before.Allocated != tel.RetainedBytes {
				t.Errorf("seed %d: %+v\n%v", seed, tel, now)
			}
			for i, o := range res.Outputs.Flat() {
				if d := golden.Diff(want[i], golden.Copy(o)); d != "" {
					t.Errorf("seed %d: input %d: %s", seed, i, d)
				}
			}
			res.Release()
			unchanged(t, m.Host, before)
			if tel.SubforwardCount == 1 && tel.PackedTokens > 0 {
				_, again := score(t, wrap(t, opaque, trainerrank.WithProfile(&p)), in)
				if again.Basis != trainerrank.Learned || again.SubforwardCount != 1 || again.ObservedPeakBytes > again.PredictedPeakBytes {
					t.Errorf("seed %d: first %+v\nthen %+v", seed, tel, again)
				}
			}
			if t.Failed() {
				t.FailNow()
			}
		}
	}
	t.Log(counts)
}

// Ranks that share their inputs and have learned different things, on different variants, plan the same: by what they know together, for the one that needs most. A rank
// whose model can rehearse does not plan with one whose model cannot.
func TestRanksThatShareInputsLearnTogether(t *testing.T) {
	inputs := apart(10, 100)
	in := forward.Many(inputs...)
	rates := []int64{1000, 3000, 2000}
	alone := make([]*trainerrank.Admission, len(rates))
	models := make([]*scripted, len(rates))
	known := make([]*profile.Profile, len(rates))
	for i, rate := range rates {
		models[i] = script(t, perToken(rate))
		models[i].variant = fmt.Sprint(rate)
		known[i] = after(t, models[i], inputs)
		alone[i] = planned(t, models[i], known[i], in, plenty)
	}
	usable := alone[1].PredictedPeakBytes * 3 / 5
	texts := make([]string, len(rates))
	err := collective.Run(len(rates), func(w collective.World) error {
		i := w.Rank()
		rank, err := trainerrank.New(models[i], trainerrank.WithSharedInputs(w), trainerrank.WithProfile(known[i]), trainerrank.WithUsableBytes(usable+int64(i)*device.PageSize))
		if err != nil {
			return err
		}
		a, err := rank.Plan(soon(t), in)
		if err != nil {
			return err
		}
		text, err := json.Marshal(a)
		if texts[i] = string(text); err != nil || a.Verdict != trainerrank.Split || a.Rungs[0].TotalBytes != alone[1].PredictedPeakBytes || a.UsableLimitBytes != usable {
			return fmt.Errorf("%v: %s\n%s", err, a, alone[1])
		}
		res, err := rank.DPRankForward(soon(t), in)
		if err != nil {
			return err
		}
		defer res.Release()
		if tel := res.Telemetry; tel.Basis != trainerrank.Learned || tel.PredictedPeakBytes != a.PredictedPeakBytes || tel.ObservedPeakBytes > tel.PredictedPeakBytes {
			return fmt.Errorf("%+v", tel)
		}
		return nil
	})
	if err != nil || texts[0] != texts[1] || texts[1] != texts[2] {
		t.Errorf("%v\n%s", err, strings.Join(texts, "\n"))
	}
	real := golden.Load(t, golden.FS(t, "arith"), golden.Options{})
	_ = collective.Run(2, func(w collective.World) error {
		rank, err := trainerrank.New([]forward.Model{real.Model, trainerrank.Opaque(real.Model)}[w.Rank()], trainerrank.WithSharedInputs(w))
		if err != nil {
			t.Error(err)
			return err
		}
		var e *trainerrank.SharedInputsError
		if _, err := rank.Plan(soon(t), forward.One(forward.Input{Tokens: []int32{1}, Targets: labels(1)})); !errors.As(err, &e) || e.What != "how calls are priced" {
			t.Errorf("rank %d: %v", w.Rank(), err)
		}
		return nil
	})
}

// Section 4.8, #927: a first wave of one item, which teaches; then as many as trust reaches, 8 times the tokens, and 8 times these; another kind of request begins again.
func TestLearnedWavesGrow(t *testing.T) {
	m := script(t, perToken(1000))
	rank := wrap(t, m)
	items := func(n int, hidden bool) []forward.Inputs {
		var list []forward.Inputs
		for _, in := range apart(n, 2) {
			in.HiddenStates = hidden
			list = append(list, forward.One(in))
		}
		return list
	}
	for _, c := range []struct {
		n      int
		hidden bool
		want   []int
	}{{64, false, []int{1, 8, 55}}, {64, false, []int{64}}, {20, true, []int{1, 8, 11}}} {
		var widths []int
		for b, err := range rank.ForwardMicroBatches(t.Context(), items(c.n, c.hidden)) {
			if err != nil {
				t.Fatal(err)
			}
			if cold := b.Stats.GlobalCount == 1; b.Stats.ColdStart != cold || (b.Result.Telemetry.Basis == trainerrank.Cold) != cold {
				t.Errorf("%+v", b.Stats)
			}
			widths = append(widths, b.Stats.GlobalCount)
			b.Result.Release()
		}
		if !slices.Equal(widths, c.want) {
			t.Errorf("%d items, hidden states %v: waves of %v, want %v", c.n, c.hidden, widths, c.want)
		}
	}
}

// Requests on a checkpoint are priced apart from those on the base model, and have the bits that an exact price gives.
func TestLearnedCallsOnACheckpoint(t *testing.T) {
	m, exact := trained(t, "qwen2-tiny", golden.Options{Threads: 2})
	inputs := golden.Inputs(golden.Requests(t, golden.FS(t, "qwen2-tiny")))
	in, onA := forward.Many(inputs...), trainerrank.WithCheckpoint(forward.Checkpoint("a"))
	want, _ := score(t, exact, in, onA)
	a, err := exact.Checkpoints().Adapter("a")
	if err != nil {
		t.Fatal(err)
	}
	rank := wrap(t, trainerrank.Opaque(m.Model))
	if err := rank.CreateCheckpoint(t.Context(), "a", slots.Config{Rank: 3, Alpha: 6, TargetPattern: slots.AllLinear}); err != nil {
		t.Fatal(err)
	}
	copied, err := rank.Checkpoints().Adapter("a")
	if err != nil {
		t.Fatal(err)
	}
	copy(copied.Params.F32(), a.Params.F32())
	defer rank.Close()
	var basis []trainerrank.Basis
	for range 2 {
		got, tel := score(t, rank, in, onA)
		for i := range want {
			if d := golden.Diff(want[i], got[i]); d != "" {
				t.Errorf("input %d: %s", i, d)
			}
		}
		basis = append(basis, tel.Basis)
	}
	_, tel := score(t, rank, in)
	if basis = append(basis, tel.Basis); !slices.Equal(basis, []trainerrank.Basis{trainerrank.Cold, trainerrank.Learned, trainerrank.Cold}) {
		t.Errorf("twice on the checkpoint, once on the base model: priced %v", basis)
	}
}

// What cannot rehearse is not trained yet: a typed error, before anything is planned.
func TestLearnedCallsKeepNoGraph(t *testing.T) {
	m := script(t, perToken(1000))
	in := apart(1, 3)
	in[0].Grad = forward.WithGrad
	real, _ := trained(t, "qwen2-tiny", golden.Options{})
	rank := wrap(t, trainerrank.Opaque(real.Model))
	if err := rank.CreateCheckpoint(t.Context(), "a", slots.Config{Rank: 3, Alpha: 6, TargetPattern: slots.AllLinear}); err != nil {
		t.Fatal(err)
	}
	defer rank.Close()
	for name, c := range map[string]struct {
		rank *trainerrank.TrainerRank
		in   forward.Input
	}{
		"a model without adapters": {wrap(t, m), in[0]},
		"one with":                 {rank, forward.Input{Tokens: tokens(3), Targets: labels(3), Grad: forward.WithGrad, Checkpoint: forward.Checkpoint("a")}},
	} {
		var e *trainerrank.RuntimeSupportError
		if _, err := c.rank.DPRankForward(t.Context(), forward.One(c.in)); !errors.As(err, &e) || !strings.Contains(err.Error(), "rehearse") || m.forwards != 0 {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A call that is cancelled, fails, or is abandoned leaves nothing, and teaches nothing.
func TestLearnedCallsThatFail(t *testing.T) {
	m := golden.Load(t, golden.FS(t, "arith"), golden.Options{Threads: 2})
	s := &spy{Model: m.Model}
	rank := wrap(t, trainerrank.Opaque(s))
	in := forward.One(forward.Input{Tokens: slices.Repeat([]int32{1, 2}, 150), Targets: labels(300)})
	before, nothing := stateOf(m.Host), string(rank.Profile().Save())
	luck := errors.New("no luck")
	ctx, cancel := context.WithCancel(t.Context())
	for name, c := range map[string]struct {
		set  func()
		want error
	}{
		"cancelled": {func() { s.before = func(context.Context, *forward.Batch) { cancel() } }, context.Canceled},
		"failed":    {func() { s.after = func(*forward.Pass, error) (*forward.Pass, error) { return nil, luck } }, luck},
	} {
		c.set()
		use := t.Context()
		if c.want == context.Canceled {
			use = ctx
		}
		_, err := rank.DPRankForward(use, in)
		var e *trainerrank.MemoryError
		if !errors.Is(err, c.want) || errors.As(err, &e) {
			t.Errorf("%s: %v", name, err)
		}
		unchanged(t, m.Host, before)
		if got := string(rank.Profile().Save()); got != nothing {
			t.Errorf("%s: it taught %s", name, got)
		}
		s.before, s.after = nil, nil
	}
	// A fault of another kind is not swallowed.
	s.before = func(context.Context, *forward.Batch) { panic(luck) }
	func() {
		defer func() {
			if r := recover(); r != luck {
				t.Errorf("%v", r)
			}
		}()
		_, _ = rank.DPRankForward(t.Context(), in)
	}()
	unchanged(t, m.Host, before)
}
