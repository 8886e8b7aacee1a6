package profile

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/internal/strictjson"
)

const gib = int64(1) << 30

// Numbers of section 3.2: 3 tokens, 2 labels each, top 5, vocabulary 10, hidden size 4, float32; the studied system keeps a top token in 8 bytes.
func TestOutputBytesOfEachKindAddUp(t *testing.T) {
	in := &forward.Input{Tokens: make([]int32, 3), Targets: make([]int32, 6), TargetWidth: 2, TopK: 5, Logits: true, HiddenStates: true}
	spec := forward.Spec{Vocabulary: 10, Hidden: 4}
	upstream := Widths{Label: 4, TopK: 12, Logit: 4, Hidden: 4}
	for _, c := range []struct {
		w    Widths
		want int64
	}{{upstream, 24 + 180 + 120 + 48}, {EngineWidths, 24 + 120 + 120 + 48}} {
		if got, err := c.w.Outputs(in, spec); got != c.want || err != nil {
			t.Errorf("%+v: %d, %v, want %d", c.w, got, err, c.want)
		}
	}
	if got, err := EngineWidths.Outputs(&forward.Input{Tokens: make([]int32, 9)}, spec); got != 0 || err != nil {
		t.Errorf("inactive: %d, %v", got, err)
	}
	if _, err := EngineWidths.Outputs(in, forward.Spec{Hidden: 4}); err == nil {
		t.Error("logits of an unknown vocabulary have a size")
	}
	in.TopK = math.MaxInt
	if got, _ := EngineWidths.Outputs(in, spec); got != math.MaxInt64 {
		t.Errorf("%d bytes for an impossible top k, want the largest number", got)
	}
}

// Section 3.3 and the two vectors that the reference recomputed (3.4).
func TestColdPricesAreTheStudiedOnes(t *testing.T) {
	for layers, factor := range map[int64]int64{0: 4, 1: 4, 3: 4, 4: 5, 8: 6, 12: 7, 32: 12, 36: 13, 48: 16, 64: 16} {
		if got := (Geometry{Hidden: 3, Layers: layers, ElementBytes: 2}).Static(7); got != 7*3*2*factor {
			t.Errorf("%d layers: %d, want %d", layers, got, 7*3*2*factor)
		}
	}
	var p Profile
	labels := Load{Packed: 4 * 12288, Logical: 4 * 12288, Outputs: 4 * 12288 * 4}
	if got := p.Price(Signature{}, Geometry{2560, 4, 2}, labels).Required; got != 1_384_336_588 {
		t.Errorf("%d, want 1384336588", got)
	}
	hidden := Load{Packed: 32_710, Logical: 38_443, Outputs: 38_443 * 5120 * 2} // #913
	got := p.Price(Signature{}, Geometry{5120, 64, 2}, hidden)
	if s := fmt.Sprintf("%.3f", float64(got.Required)/float64(gib)); s != "5.894" {
		t.Errorf("%s GiB, want 5.894", s)
	}
	if got.Basis != Cold || got.Trusted || got.Retained != got.Required {
		t.Errorf("cold price %v: nothing is trusted before it was observed, and all is retained", got)
	}
	if got := p.Price(Signature{}, Geometry{5120, 64, 2}, Load{Outputs: 100}); got != (Price{100, 100, 100, Exact, true}) {
		t.Errorf("no tokens: %v, want the outputs without a safety factor", got)
	}
}

func TestExactPricesAreTheFootprints(t *testing.T) {
	f := forward.Footprint{Outputs: 10, Retained: 200, Scratch: 300, BackwardScratch: 250, Gradients: 60}
	if got, want := OfFootprints(f), (Price{f.Required(), 210, 10, Exact, true}); got != want {
		t.Errorf("got %v, want %v", got, want)
	}
	g := forward.Footprint{Outputs: 1, Scratch: 305}
	if got, want := OfFootprints(f, g), (Price{211 + 310, 211, 11, Exact, true}); got != want {
		t.Errorf("two groups: got %v, want %v", got, want)
	}
	if got := OfFootprints(); got.Required != 0 || got.Check() != nil {
		t.Errorf("no groups: %v", got)
	}
	for _, bad := range []Price{{Required: 1, Retained: 2}, {Required: 2, Retained: 1, Outputs: 2}, {Outputs: -1}} {
		if bad.Check() == nil {
			t.Errorf("%v passes for a price", bad)
		}
	}
}

// Defect 1 of section 10: a cold call is priced exactly, so that its retained bytes are its outputs from the first call on.
func TestAColdCallThatCanBeRehearsedRetainsItsOutputsOnly(t *testing.T) {
	if p := OfFootprints(forward.Footprint{Outputs: 7, Scratch: 1000}); p.Retained != 7 || !p.Trusted {
		t.Errorf("%v", p)
	}
}

// Defect 31: a machine without a GPU has a budget too, and (#870) what an allocator caches is not free.
func TestTotalIsTheLeastThatLeavesEnough(t *testing.T) {
	r := rand.New(rand.NewPCG(9, 10))
	for i := range int64(20_000) {
		n := i
		if i > 10_000 {
			n = 1 + r.Int64N(1<<r.IntN(57))
		}
		if total := Total(n); Usable(total, total) < n || total > 0 && Usable(total-1, total-1) >= n {
			t.Fatalf("%d usable: a total of %d leaves %d, one less %d", n, total, Usable(total, total), Usable(total-1, total-1))
		}
	}
	if Total(-5) != 0 || Total(math.MaxInt64) != math.MaxInt64 {
		t.Error(Total(-5), Total(math.MaxInt64))
	}
}

func TestUsableLeavesAReserve(t *testing.T) {
	for _, c := range [][3]int64{{1000, 1000, 970}, {30, 1000, 0}, {29, 1000, 0}, {31, 1000, 1}, {1000, 1033, 970}, {5, 0, 5}, {0, 1 << 40, 0}} {
		if got := Usable(c[0], c[1]); got != c[2] {
			t.Errorf("%d free of %d: %d, want %d", c[0], c[1], got, c[2])
		}
	}
}

var sig = Signature{Model: "m"}

// seen is a profile of observations {packed, logical, outputs, peak, retained}, -1 for not measured.
func seen(list ...[5]int64) *Profile {
	p := &Profile{}
	for _, o := range list {
		p.Observe(sig, Observation{Load: Load{Packed: o[0], Logical: o[1], Outputs: o[2]}, Peak: o[3], Retained: o[4], Kept: o[4] >= 0})
	}
	return p
}

func priceOf(p *Profile, packed, logical, outputs int64) Price {
	return p.Price(sig, Geometry{}, Load{Packed: packed, Logical: logical, Outputs: outputs})
}

// The sequence of section 3.6: a fraction that was observed as 1 is not one that was never observed.
func TestRetainedFractionIsMaxMergedOnceObserved(t *testing.T) {
	fraction := func(p *Profile) string {
		r, peak, ok := p.RetainedFraction(sig, nil)
		if !ok {
			return "none"
		}
		return big.NewRat(r, peak).FloatString(1)
	}
	p := seen([5]int64{10, 10, 0, 40, -1})
	for _, c := range []struct {
		retained int64
		want     string
	}{{-1, "none"}, {40, "1.0"}, {4, "1.0"}} {
		p.Observe(sig, Observation{Load: Load{Packed: 10, Logical: 10}, Peak: 40, Retained: c.retained, Kept: c.retained >= 0})
		if got := fraction(p); got != c.want {
			t.Errorf("after %d: %s, want %s", c.retained, got, c.want)
		}
	}
	p.Forget(sig)
	for _, c := range []struct {
		retained int64
		want     string
	}{{20, "0.5"}, {28, "0.7"}, {12, "0.7"}, {-1, "0.7"}} {
		p.Observe(sig, Observation{Load: Load{Packed: 10, Logical: 10}, Peak: 40, Retained: c.retained, Kept: c.retained >= 0})
		if got := fraction(p); got != c.want {
			t.Errorf("after clearing and %d: %s, want %s", c.retained, got, c.want)
		}
	}
	if p := seen([5]int64{10, 10, 0, 40, 0}); fraction(p) != "0.0" {
		t.Error("nothing retained, as measured, is not told from nothing measured")
	}
}

// Section 7.2: forward 60 GiB of which 30 stay, backward 100. Halves need 55 each and keep 16.5: 71.5 GiB together. The
// fraction of the forward times the peak of the backward would be 82.5 (#860; #812 and defect 11: the backward is learned).
func TestBackwardPeakDoesNotInflateRetainedSplitMemory(t *testing.T) {
	const n = 1 << 20
	for _, outputs := range []int64{0, 4 * gib} {
		whole := Load{Packed: n, Logical: n, Outputs: outputs}
		observations := []Observation{{Load: whole, Peak: 60 * gib, Retained: 30 * gib, Kept: true}, {Load: whole, Peak: 100 * gib}}
		for _, order := range [][]int{{0, 1}, {1, 0}} {
			var p Profile
			for _, i := range order {
				p.Observe(sig, observations[i])
			}
			half := priceOf(&p, n/2, n/2, outputs/2)
			if half.Required != 55*gib || half.Retained != 16*gib+gib/2 {
				t.Errorf("outputs %d, order %v: %v, want 55 and 16.5 GiB", outputs, order, half)
			}
			if total := 2*half.Retained + half.Ephemeral(); total != 71*gib+gib/2 || total > 75*gib {
				t.Errorf("outputs %d: the halves need %d together", outputs, total)
			}
		}
	}
}

// The further vectors of 7.2 that are about arithmetic.
func TestRetainedVectors(t *testing.T) {
	// Retained outputs are charged separately: 500 bytes a token stay, whatever the outputs were.
	merged := seen([5]int64{100, 100, 1000, 200_000, 31_000}, [5]int64{100, 100, 50_000, 120_000, 100_000}, [5]int64{100, 100, 0, 150_000, 10_000})
	for _, c := range [][2]int64{{40_000, 99_000}, {10_000, 66_000}, {110_000, 176_000}} {
		if got := priceOf(merged, 100, 100, c[0]); got.Retained != c[1] {
			t.Errorf("outputs %d: %v, want %d retained", c[0], got, c[1])
		}
	}
	// #877's witness: 4 MiB for each of 8,000 tokens and 10,000 bytes of outputs.
	witness := seen([5]int64{8000, 8000, 0, 8000 * 4 << 20, 0})
	if got := priceOf(witness, 8000, 8000, 10_000).Required; got != 36_909_886_200 {
		t.Errorf("%d, want 36909886200", got)
	}
}

// Defect 28: what stays is rounded up, what is required never falls below it.
func TestRetainedIsRoundedUp(t *testing.T) {
	p := seen([5]int64{3, 3, 0, 100, 1})
	if got := priceOf(p, 1, 1, 0); got.Retained != 2 || got.Required != 37 {
		t.Errorf("%v: a third of a byte times 1.1 stays, want it rounded up twice to 2", got)
	}
	p = seen([5]int64{1, 1, 0, 1, 1})
	if got := priceOf(p, 1, 1, 0); got.Retained != got.Required || got.Check() != nil {
		t.Errorf("%v", got)
	}
}

// The trust range: 8 times the tokens and 8 times the sharing are in, one more of either is out, and then everything is retained (3.7, 7.2: 800 and 801).
func TestTrustEndsAtEightTimesWhatWasObserved(t *testing.T) {
	p := seen([5]int64{100, 200, 0, 100_000, 1000})
	for _, c := range []struct {
		packed, logical   int64
		trusted, believed bool
	}{
		{800, 800, true, true}, {801, 801, false, false}, {1, 1, true, true},
		{50, 800, true, true}, {50, 801, true, false}, {800, 12_800, true, true}, {800, 12_801, true, false},
	} {
		got := priceOf(p, c.packed, c.logical, 0)
		if got.Trusted != c.trusted || (got.Retained < got.Required) != c.believed || got.Basis != Learned {
			t.Errorf("%d packed, %d logical: %v", c.packed, c.logical, got)
		}
	}
	// Beyond, what was learned is still a floor (#893: a bigger request was admitted where a smaller one was refused).
	if in, out := priceOf(p, 800, 800, 0), priceOf(p, 801, 801, 0); out.Required < in.Required {
		t.Errorf("%v, but with a token more %v", in, out)
	}
	// A peak alone, like the one after the caller's backward, earns no trust in retained bytes.
	p.Observe(sig, Observation{Load: Load{Packed: 500, Logical: 500}, Peak: 1})
	if got := priceOf(p, 801, 801, 0); !got.Trusted || got.Retained != got.Required {
		t.Errorf("%v: a peak was taken for retained bytes", got)
	}
}

// Defect 3 (and #848): one call of 10 tokens took 17.5 MB a token, compiling; 20,000 tokens of 57 kB each are priced as without it: 1.26 GB, not 386.
func TestATinyCallDoesNotPoisonALargeOne(t *testing.T) {
	long := [5]int64{20_000, 20_000, 0, 1_145_454_546, 0}
	tiny := [5]int64{10, 10, 0, 175_454_545, 170_000_000}
	want := priceOf(seen(long), 20_000, 20_000, 0)
	for _, p := range []*Profile{seen(long, tiny), seen(tiny, long)} {
		got := priceOf(p, 20_000, 20_000, 0)
		if got.Required != want.Required || got.Required != 1_260_000_000 {
			t.Errorf("%v, want %v", got, want)
		}
		if got.Retained > 11*170_000_000/10 {
			t.Errorf("%v: the tiny call's retained bytes grew with the tokens", got)
		}
		if beyond := priceOf(p, 40_000, 40_000, 0); beyond.Required > 2*want.Required+2 {
			t.Errorf("twice the tokens: %v", beyond)
		}
		// But what a smaller call really took stays a floor.
		if floor := priceOf(p, 11, 11, 0).Required; floor < 193_000_000 {
			t.Errorf("11 tokens cost %d, 10 tokens took 175454545", floor)
		}
	}
}

// The rule by rate: within 8 times up and down the largest rate counts, beyond that the nearest larger; what was outgrown keeps what it asked for last.
func TestRatesCountWithinEightTimes(t *testing.T) {
	p := seen([5]int64{10, 10, 0, 1000, -1}, [5]int64{20_000, 20_000, 0, 1_000_000, -1})
	for _, c := range [][2]int64{
		{1, 110}, {10, 1100}, {80, 8800}, // 100 bytes a token
		{81, 8800}, {160, 8800}, {161, 8855}, {500, 27_500}, // 50, but no less than 80 tokens asked for
		{20_000, 1_100_000}, {40_000, 2_200_000}, {160_001, 8_800_055},
	} {
		if got := priceOf(p, c[0], c[0], 0).Required; got != c[1] {
			t.Errorf("%d tokens: %d, want %d", c[0], got, c[1])
		}
	}
}

// Both limits of trust met by one number of tokens alone: 80 packed, which 640 logical ones must not be less than.
func TestTheBoundSeesTrustAtASinglePoint(t *testing.T) {
	p := seen([5]int64{10, 10, 0, 1000, 0})
	l := Load{Packed: 1, Logical: 640}
	bound := p.Bound(sig, Geometry{}, l)
	if l.Packed = 80; p.Price(sig, Geometry{}, l).Retained != 0 || bound.Retained != 0 {
		t.Errorf("%v", bound)
	}
}

// Defect 4: the highest rate does not come with the largest size; each observation stays joint.
func TestARateDoesNotGainAnotherObservationsReach(t *testing.T) {
	p := seen([5]int64{64, 64, 0, 64_000, 64}, [5]int64{8000, 8000, 0, 80_000, -1})
	if got := priceOf(p, 8000, 8000, 0); got.Required != 88_000 || got.Retained != got.Required {
		t.Errorf("%v: want the rate of 8000 tokens, and retained bytes not trusted so far from 64", got)
	}
}

// Defect 5: one logits request in a hundred is not a hundred in a hundred. The share of a kind is an axis of trust, like size and ratio.
func TestTheMixOfRequestsBoundsTrust(t *testing.T) {
	mix := func(labels, logits int64) []Share {
		m := []Share{{"logits", logits}, {"targets:1", labels}}
		return slices.DeleteFunc(m, func(s Share) bool { return s.Tokens == 0 })
	}
	p := &Profile{}
	p.Observe(sig, Observation{Load: Load{Packed: 1000, Logical: 1000, Mix: mix(990, 10)}, Peak: 1000, Retained: 10, Kept: true})
	for _, c := range []struct {
		labels, logits int64
		trusted        bool
	}{{990, 10, true}, {920, 80, true}, {919, 81, false}, {0, 1000, false}, {1000, 0, true}} {
		got := p.Price(sig, Geometry{}, Load{Packed: 1000, Logical: 1000, Mix: mix(c.labels, c.logits)})
		if got.Trusted != c.trusted || (got.Retained < got.Required) != c.trusted {
			t.Errorf("%d label and %d logits tokens: %v", c.labels, c.logits, got)
		}
		if got.Required < 1100 {
			t.Errorf("%d and %d: %v is below what was observed", c.labels, c.logits, got)
		}
	}
	// A kind that was never seen has nothing to go by.
	got := p.Price(sig, Geometry{}, Load{Packed: 1000, Logical: 1000, Mix: []Share{{"hidden", 1000}}})
	if got.Basis != Cold || got.Trusted {
		t.Errorf("%v", got)
	}
	// A chunk whose requests are some of the call's kinds is priced by the call, not as cold; one that was observed itself by that.
	p.Observe(sig, Observation{Load: Load{Packed: 1000, Logical: 1000, Mix: mix(1000, 0)}, Peak: 500})
	if got := p.Price(sig, Geometry{}, Load{Packed: 1000, Logical: 1000, Mix: mix(1000, 0)}); got.Required != 550 {
		t.Errorf("%v, want what these kinds took alone", got)
	}
}

// Defect 6: inactive requests are in no mix.
func TestMixCountsActiveRequestsByKind(t *testing.T) {
	in := func(n int, f func(*forward.Input)) *forward.Input {
		in := &forward.Input{Tokens: make([]int32, n)}
		f(in)
		return in
	}
	labels := func(in *forward.Input) { in.Targets = make([]int32, len(in.Tokens)) }
	got := Mix([]*forward.Input{
		in(3, labels), in(100, func(*forward.Input) {}), in(4, labels), in(5, func(in *forward.Input) { in.TopK, in.Logits = 5, true }),
		in(2, func(in *forward.Input) { in.Targets, in.TargetWidth, in.HiddenStates = make([]int32, 4), 2, true }),
	})
	if want := "[{targets:1 7} {targets:2+hidden 2} {topk:5+logits 5}]"; fmt.Sprint(got) != want {
		t.Errorf("%v, want %s", got, want)
	}
	if Kind(&forward.Input{}) != "inactive" {
		t.Error("an input that wants nothing is active")
	}
}

// Everything that a signature names keeps calls apart (3.5; #927: what was learned under other weights was reused).
func TestSignaturesKeepCallsApart(t *testing.T) {
	p := seen([5]int64{10, 10, 0, 100, 0})
	for i, other := range []Signature{
		{Model: "other"}, {Model: "m", Topology: Topology{TensorParallel: 2}}, {Model: "m", Cost: "version-1"}, {Model: "m", GradGroups: 1}, {Model: "m", NoGradGroups: 2},
	} {
		if got := p.Price(other, Geometry{}, Load{Packed: 10, Logical: 10}); got.Basis != Cold {
			t.Errorf("signature %d: %v", i, got)
		}
	}
	if got := p.Price(Signature{Model: "m", Topology: Topology{1, 1, 1, 1}}, Geometry{}, Load{Packed: 10, Logical: 10}); got.Basis != Learned {
		t.Errorf("an unknown topology is not one rank: %v", got)
	}
}

// Section 3.4: a call that shares more than what was observed is charged for its logical tokens.
func TestMoreSharingThanObservedIsCharged(t *testing.T) {
	p := seen([5]int64{100, 200, 0, 1000, -1})
	for _, c := range [][3]int64{{100, 200, 1100}, {100, 100, 1100}, {100, 400, 2200}, {50, 300, 1650}} {
		if got := priceOf(p, c[0], c[1], 0).Required; got != c[2] {
			t.Errorf("%d packed, %d logical: %d, want %d", c[0], c[1], got, c[2])
		}
	}
}

func randomProfile(r *rand.Rand) *Profile {
	p := &Profile{}
	for range r.IntN(7) {
		packed := 1 + r.Int64N(int64(1)<<r.IntN(20))
		logical := packed * (1 + r.Int64N(6)) * 2 / (1 + r.Int64N(2))
		peak := r.Int64N(packed * 1000)
		o := Observation{Load: Load{Packed: packed, Logical: logical, Outputs: r.Int64N(1 + peak)}, Peak: peak, Kept: r.IntN(3) > 0}
		o.Retained = r.Int64N(1 + peak)
		if r.IntN(3) == 0 {
			o.Mix = []Share{{"a", logical / 3}, {"b", logical - logical/3}}
		}
		p.Observe(sig, o)
	}
	return p
}

// Defects 13 and 27 (#877): prices are integers that never fall as a call grows, and the bound is below the price of every layout, on both sides of every limit of trust.
func TestPricesAreMonotoneAndBoundsAreSound(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for i := range 20_000 {
		p := randomProfile(r)
		if i%3 == 0 {
			p = p.Floor()
		}
		g := Geometry{Hidden: r.Int64N(3), Layers: 4, ElementBytes: 2}
		logical := 1 + r.Int64N(int64(1)<<r.IntN(22))
		l := Load{Packed: 1 + r.Int64N(logical), Logical: logical, Outputs: r.Int64N(5000)}
		if r.IntN(4) == 0 {
			l.Mix = []Share{{"a", logical}}
		}
		bound, small := p.Bound(sig, g, l), p.Price(sig, g, l)
		if small.Check() != nil || bound.Check() != nil {
			t.Fatalf("%v, bound %v", small, bound)
		}
		more := l
		more.Packed, more.Logical, more.Outputs = l.Packed+r.Int64N(1+logical), logical+r.Int64N(1+logical), l.Outputs+r.Int64N(3)
		if got := p.Price(sig, g, more); got.Required < small.Required {
			t.Fatalf("%+v costs %v, %+v costs %v\n%s", l, small, more, got, p.Save())
		}
		probes := []int64{l.Packed, l.Packed + 1, logical, logical - 1, l.Packed + r.Int64N(logical-l.Packed+1)}
		for _, e := range p.entries {
			for _, b := range e.buckets {
				at := mulDivUp(logical, b.kept.ratio.den, max(1, 8*b.kept.ratio.num))
				probes = append(probes, 8*b.kept.packed, 8*b.kept.packed+1, 8*b.peak.packed, 8*b.peak.packed+1, at-1, at, at+1)
			}
		}
		for _, packed := range probes {
			if packed < l.Packed || packed > logical {
				continue
			}
			layout := l
			layout.Packed = packed
			if got := p.Price(sig, g, layout); got.Required < bound.Required || got.Retained < bound.Retained {
				t.Fatalf("bound of %+v is %v, but %d packed tokens cost %v\n%s", l, bound, packed, got, p.Save())
			}
		}
	}
}

// A first call of 10 tokens that took 175 MB, compiling, says by itself that 20,000 tokens need 386 GB (#848). The floor says no more of them than of 640 tokens, and not less than of fewer.
func TestTheFloorEndsWhereARateSaysLittle(t *testing.T) {
	tiny := seen([5]int64{10, 10, 0, 175_454_545, 0})
	for _, c := range [][3]int64{{9, 173_700_000, 173_700_000}, {640, 12_351_999_968, 12_351_999_968}, {641, 12_371_299_968, 12_351_999_968}, {20_000, 385_999_999_000, 12_351_999_968}} {
		if by, floor := priceOf(tiny, c[0], c[0], 0).Required, priceOf(tiny.Floor(), c[0], c[0], 0).Required; by != c[1] || floor != c[2] {
			t.Errorf("%d tokens: %d, at least %d; want %d and %d", c[0], by, floor, c[1], c[2])
		}
	}
	if got := tiny.Floor().Price(sig, Geometry{Hidden: 1000, Layers: 4, ElementBytes: 4}, Load{Packed: 1_000_000, Logical: 1_000_000}); got.Required != 22_000_000_000 || got.Trusted || got.Retained != got.Required {
		t.Errorf("%v: want the cold estimate, which is more", got)
	}
	r := rand.New(rand.NewPCG(7, 8))
	same, s := 0, sig.canonical()
	for range 20_000 {
		p := randomProfile(r)
		packed := 1 + r.Int64N(int64(1)<<r.IntN(20))
		l := Load{Packed: packed, Logical: packed + r.Int64N(1+3*packed), Outputs: r.Int64N(500)}
		by, floor := p.Price(sig, Geometry{}, l), p.Floor().Price(sig, Geometry{}, l)
		if floor.Check() != nil || floor.Required > by.Required || floor.Retained > by.Retained || floor.Trusted != by.Trusted {
			t.Fatalf("%+v: %v, at least %v\n%s", l, by, floor, p.Save())
		}
		e := p.find(&s, nil)
		if e == nil {
			continue
		}
		last := &e.buckets[len(e.buckets)-1].peak
		if within := last.tokens(l.Packed, l.Logical) <= 64*last.packed; within && floor != by {
			t.Fatalf("%+v: %v, at least %v\n%s", l, by, floor, p.Save())
		} else if within {
			same++
		}
	}
	if same < 1000 {
		t.Errorf("only %d loads were within reach", same)
	}
}

// A price is never below what was observed of that very call, whatever else was observed (the floor of planner.md).
func TestNoObservationIsUnderstated(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for range 5000 {
		var all []Observation
		p := &Profile{}
		for range 1 + r.IntN(8) {
			packed := 1 + r.Int64N(int64(1)<<r.IntN(16))
			o := Observation{Load: Load{Packed: packed, Logical: packed + r.Int64N(packed)}, Peak: r.Int64N(1 << 30), Retained: r.Int64N(1 << 29), Kept: r.IntN(2) == 0}
			all = append(all, o)
			p.Observe(sig, o)
		}
		for _, q := range []func() *Profile{
			func() *Profile { return p },
			func() *Profile { return reread(t, p) },
			func() *Profile { m := &Profile{}; m.Merge(p); m.Merge(p); return m },
		} {
			q := q()
			for _, o := range all {
				got := q.Price(sig, Geometry{}, o.Load)
				if got.Required < o.Peak || o.Kept && got.Retained < min(o.Retained, o.Peak) || !got.Trusted {
					t.Fatalf("%v for %+v", got, o)
				}
				larger := o.Load
				larger.Packed, larger.Logical = o.Packed*100, o.Logical*100
				if got := q.Price(sig, Geometry{}, larger); got.Required < o.Peak {
					t.Fatalf("%v for 100 times %+v", got, o)
				}
			}
		}
	}
}

func reread(t *testing.T, p *Profile) *Profile {
	t.Helper()
	q, err := Read(p.Save())
	if err != nil {
		t.Fatalf("%v\n%s", err, p.Save())
	}
	if !bytes.Equal(q.Save(), p.Save()) {
		t.Fatalf("saved as\n%s\nread as\n%s", p.Save(), q.Save())
	}
	// As a part of another text.
	text, err := json.Marshal([]*Profile{p})
	if err != nil {
		t.Fatal(err)
	}
	var inside []*Profile
	if err := json.Unmarshal(text, &inside); err != nil || !bytes.Equal(inside[0].Save(), p.Save()) {
		t.Fatalf("%v: %s", err, text)
	}
	list, err := strictjson.Parse(text, 9)
	if err != nil {
		t.Fatal(err)
	}
	part := new(Profile)
	if err := part.DecodeJSON(list.Items()[0]); err != nil || !bytes.Equal(part.Save(), p.Save()) {
		t.Fatalf("%v: %s", err, text)
	}
	return q
}

// The order of observations, and who made them, leaves no trace: ranks that exchange profiles have equal bytes.
func TestObservationsCommute(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	for range 500 {
		var all []Observation
		for range 1 + r.IntN(9) {
			packed := 1 + r.Int64N(300)
			o := Observation{Load: Load{Packed: packed, Logical: packed * 2, Outputs: r.Int64N(9)}, Peak: r.Int64N(99), Retained: r.Int64N(99), Kept: r.IntN(2) == 0}
			if r.IntN(2) == 0 {
				o.Mix = []Share{{"a", packed}, {"b", packed}}
			}
			all = append(all, o)
		}
		var one, two, left, right Profile
		for i, o := range all {
			one.Observe(sig, o)
			[]*Profile{&left, &right}[i%2].Observe(sig, o)
		}
		for _, i := range r.Perm(len(all)) {
			two.Observe(sig, all[i])
		}
		left.Merge(&right)
		for _, p := range []*Profile{&two, &left} {
			if !bytes.Equal(p.Save(), one.Save()) {
				t.Fatalf("%s\n%s", one.Save(), p.Save())
			}
		}
		reread(t, &one)
	}
}

func TestADamagedProfileIsRefusedWithThePlace(t *testing.T) {
	p := seen([5]int64{100, 200, 10, 1000, 500}, [5]int64{1000, 2000, 10, 9000, -1})
	p.Observe(Signature{Model: "n"}, Observation{Load: Load{Packed: 3, Logical: 3, Mix: []Share{{"a", 1}, {"b", 2}}}, Peak: 9})
	good := string(p.Save())
	reread(t, p)
	for _, c := range [][3]string{
		{`"version":1`, `"version":2`, "version 2"},
		{`"version":1`, `"version":1.0`, "plain integer"},
		{`"version":1,`, ``, `no key "version"`},
		{`"cost":""`, `"cost":"","x":1`, `unknown key "x"`},
		{`"packed_tokens":100,`, `"packed_tokens":100,"packed_tokens":100,`, "duplicate key"},
		{`"bytes_per_token":[99,10]`, `"bytes_per_token":[98,10]`, "lowest terms"},
		{`"bytes_per_token":[99,10]`, `"bytes_per_token":[97,10]`, "more than 97/10 per token"},
		{`"bytes_per_token":[99,10]`, `"bytes_per_token":[99]`, "numerator and a denominator"},
		{`"bytes_per_token":[99,10]`, `"bytes_per_token":[99,0]`, "less than 1"},
		{`"packed_tokens":1000`, `"packed_tokens":90`, ""},
		{`"fraction":[1,2]`, `"fraction":[3,2]`, "more is retained"},
		{`"kinds":["a","b"]`, `"kinds":["b","a"]`, "ascending"},
		{`"kinds":["a","b"]`, `"kinds":["a"]`, "2 shares for 1 kinds"},
		{`"topology":[1,1,1,1]`, `"topology":[1,1,1]`, "want 4"},
		{`"topology":[1,1,1,1]`, `"topology":[1,0,1,1]`, "less than 1"},
		{`"model":"m"`, `"model":"z"`, "ascending"},
		{`"shares":[[1,3],`, `"shares":[[4,3],`, "above 1"},
		{`"kept":null`, `"kept":[]`, "want an object"},
		{`{"version"`, `[{"version"`, ""},
	} {
		bad := strings.Replace(good, c[0], c[1], 1)
		if bad == good {
			t.Errorf("%s is not in\n%s", c[0], good)
		}
		if _, err := Read([]byte(bad)); err == nil || !strings.Contains(err.Error(), c[2]) || !strings.Contains(err.Error(), "line ") {
			t.Errorf("%s -> %s: %v, want %q", c[0], c[1], err, c[2])
		}
	}
	for cut := range len(good) - 1 {
		if _, err := Read([]byte(good[:cut])); err == nil {
			t.Fatalf("a profile cut off after %d bytes is read", cut)
		}
	}
}

func TestExtremesSaturate(t *testing.T) {
	p := seen([5]int64{1, 1, 0, math.MaxInt64, math.MaxInt64}, [5]int64{math.MaxInt64, math.MaxInt64, 0, 0, 0})
	for _, n := range []int64{1, 2, 1 << 40, math.MaxInt64} {
		if got := priceOf(p, n, math.MaxInt64, math.MaxInt64); got.Check() != nil || got.Required < math.MaxInt64/11*10 {
			t.Errorf("%d tokens: %v", n, got)
		}
	}
	if got := (Geometry{math.MaxInt64, math.MaxInt64, 2}).Static(math.MaxInt64); got != math.MaxInt64 {
		t.Errorf("static %d", got)
	}
}

func FuzzRead(f *testing.F) {
	f.Add(seen([5]int64{100, 200, 10, 1000, 500}, [5]int64{1000, 2000, 10, 9000, -1}).Save())
	f.Fuzz(func(t *testing.T, text []byte) {
		p, err := Read(text)
		if err != nil {
			return
		}
		reread(t, p)
		if got := priceOf(p, 77, 100, 5); got.Check() != nil {
			t.Fatal(got)
		}
	})
}

func BenchmarkPrice(b *testing.B) {
	p := seen([5]int64{10, 10, 0, 1000, 5}, [5]int64{1000, 2000, 0, 100_000, 50}, [5]int64{100_000, 200_000, 0, 9_000_000, 5000})
	l := Load{Packed: 26_624, Logical: 172_032, Outputs: 688_128}
	b.ReportAllocs()
	for b.Loop() {
		p.Bound(sig, Geometry{2560, 36, 2}, l)
	}
}

// What is about a signature is enough for its prices, and says nothing of others.
func TestAboutKeepsThePricesOfItsSignatures(t *testing.T) {
	r := rand.New(rand.NewPCG(9, 10))
	other := sig
	other.Model = "another"
	for range 2000 {
		p, q := randomProfile(r), randomProfile(r)
		all := new(Profile)
		all.Merge(p)
		for _, e := range q.entries {
			e.signature.Model = other.Model
			all.Merge(&Profile{entries: []entry{e}})
		}
		before := string(all.Save())
		packed := 1 + r.Int64N(int64(1)<<r.IntN(20))
		l := Load{Packed: packed, Logical: packed + r.Int64N(1+3*packed), Outputs: r.Int64N(500)}
		if got, want := all.About(sig), string(p.Save()); string(got.Save()) != want {
			t.Fatalf("about %v:\n%swant\n%s", sig, got.Save(), want)
		}
		if got, want := all.About(other).Price(other, Geometry{}, l), all.Price(other, Geometry{}, l); got != want {
			t.Fatalf("%+v: %v, want %v", l, got, want)
		}
		if both := all.About(other, sig); string(both.Save()) != before || string(all.Save()) != before {
			t.Fatalf("about both:\n%swant\n%s", both.Save(), before)
		}
	}
}
