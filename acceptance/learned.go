package main

import (
	"errors"
	"fmt"
	"slices"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/profile"
	"github.com/trainerrank/engine/trainerrank"
)

// The arms of --pricing learned have the model's ability to rehearse hidden ([trainerrank.Opaque]): calls are priced by what calls took. Such a price is an estimate, so it is not gated
// that it is met to the byte. What is: never more than is usable, the same bits, typed failures that leave nothing; and that a call that was seen is not priced below
// what it takes.

const (
	gateCold    = "priced cold"
	gateLearned = "priced by what was learned"

	gateRefusedForwards = "forwards of the refused call"
	gateRefusedCounters = "device counters changed by the refused call"
)

var (
	learnedWholeGates   = []string{gateSubforwards, gateForwards, gateTold, gateLive, gateCounters, gateCold, gateLearned, gateObserved}
	learnedConvertGates = []string{gateTooLarge, gateSubforwards, gateForwards, gateBits, gateObserved, gatePredicted, gateTaken, gateTold, gateLive, gateCounters, gateLearned}
	learnedColdGates    = append([]string{gateCold, gateRefusedForwards, gateRefusedCounters, gateRefused, gateNothing, gateWording, gateFields}, learnedConvertGates...)
)

// estimate is an arm of --pricing learned: a workload that does not fit cold in what is left of the memory, and does split once it was seen.
type estimate struct {
	*conversion
	known *profile.Profile // what the ranks of the arm have learned
	left  int64            // usable bytes under ballast
}

// learnedDoublings bounds how often the tokens of the workload are doubled.
const learnedDoublings = 6

// estimate makes the workload and loads the model. The ballast leaves three fifths of what the call is expected to need by what will be learned: a tenth more than
// it takes, or the cold price if that is more. The workload grows until that is less than the cold price, and a quarter more than what the smallest split
// really needs, and half of the call needs no more than a tenth above its tokens' share: an estimate by tokens is good where memory goes with tokens. (Workspaces, of which
// there is one per thread, do not.)
func (b *bench) estimate() (*estimate, error) {
	twin, err := b.openModel(b.Threads)
	if err != nil {
		return nil, err
	}
	e := &estimate{conversion: &conversion{twin: twin}, known: new(profile.Profile)}
	tokens := b.Tokens
	for doubled := 0; ; doubled++ {
		e.list = workload(twin.Spec().Vocabulary, b.Requests, tokens)
		e.in = forward.Many(e.list...)
		exact, err := priceOn(b, twin, e.in, ample)
		if err != nil {
			return nil, err
		}
		cold, err := e.price(b, e.in, ample)
		if err != nil {
			return nil, err
		}
		e.whole = max(cold.PredictedPeakBytes, exact.PredictedPeakBytes*11/10)
		e.left = e.whole * 3 / 5 &^ (device.PageSize - 1)
		least, err := smallest(b, twin, e.in)
		if err != nil {
			return nil, err
		}
		half, err := priceOn(b, twin, forward.Many(e.list[:len(e.list)/2]...), ample)
		if err != nil {
			return nil, err
		}
		share := exact.PredictedPeakBytes * int64(half.PackedTokens) / int64(exact.PackedTokens)
		if e.left < cold.PredictedPeakBytes && e.left >= least*5/4 && half.PredictedPeakBytes <= share*11/10 {
			break
		}
		if doubled == learnedDoublings {
			return nil, fmt.Errorf("of %d requests of %d tokens the cold price is %d, and what is learned %d, of which %d bytes would be left; the smallest split needs %d, and half of it %d, with %d by its tokens",
				b.Requests, tokens, cold.PredictedPeakBytes, e.whole, e.left, least, half.PredictedPeakBytes, share)
		}
		tokens *= 2
	}
	if tokens != b.Tokens {
		b.note("requests of %d tokens, not of %d: so that tokens outweigh workspaces, and the cold price is more than a split needs", tokens, b.Tokens)
	}
	// The part of the device that stays free comes on top.
	e.lab, err = b.lab(b.Threads, e.whole*5/4)
	return e, err
}

// price plans a call by what is known, on an empty device of usable bytes.
func (e *estimate) price(b *bench, in forward.Inputs, usable int64) (*trainerrank.Admission, error) {
	nowhere, err := device.NewHost(ample)
	if err != nil {
		return nil, err
	}
	rank, err := trainerrank.New(trainerrank.Opaque(e.twin), trainerrank.WithDevice(nowhere), trainerrank.WithUsableBytes(usable), trainerrank.WithProfile(e.known))
	if err != nil {
		return nil, err
	}
	return rank.Plan(b, in)
}

// rank wraps the model anew. It knows what the ranks before it have learned.
func (e *estimate) rank(opts ...trainerrank.Option) (*trainerrank.TrainerRank, error) {
	return trainerrank.New(trainerrank.Opaque(e.model), append(opts, trainerrank.WithProfile(e.known))...)
}

// run runs a call and remembers what it taught.
func (e *estimate) run(title string, rank *trainerrank.TrainerRank, in forward.Inputs) *outcome {
	o := e.call(title, rank, in)
	e.known = rank.Profile()
	return o
}

// profiled runs the call whole, with all the memory that there is, and prices it anew.
func (e *estimate) profiled(title string) (*outcome, error) {
	rank, err := e.rank()
	if err != nil {
		return nil, err
	}
	o := e.run(title, rank, e.in)
	if o.err == nil && o.tel.SubforwardCount != 1 {
		o.err = fmt.Errorf("the call that has room was split into %d", o.tel.SubforwardCount)
	}
	if o.err != nil {
		return nil, o.err
	}
	a, err := e.price(e.bench, e.in, ample)
	if err != nil {
		return nil, err
	}
	e.whole = a.PredictedPeakBytes
	return o, nil
}

// reserve is what stays free of the device.
func (e *estimate) reserve() int64 {
	all := e.dev.Capacity()
	return all - profile.Usable(all, all)
}

// splits gates that the call does not fit whole in usable bytes by what was learned, and is split.
func (e *estimate) splits(title string, usable int64, want []string) error {
	rank, err := e.rank()
	if err != nil {
		return err
	}
	o := e.run(title, rank, e.in)
	if o.err != nil {
		return o.err
	}
	e.atLeast(gateTooLarge, usable+1, e.whole)
	e.atLeast(gateSubforwards, 2, int64(o.tel.SubforwardCount))
	e.equal(gateForwards, int64(o.tel.SubforwardCount), int64(o.forwards))
	e.equal(gateBits, 0, differing(want, o.digests))
	e.atMost(gateObserved, o.tel.PredictedPeakBytes, o.observed)
	e.atMost(gatePredicted, usable, o.tel.PredictedPeakBytes)
	e.atMost(gateTaken, usable, o.taken)
	e.equal(gateTold, o.observed, o.tel.ObservedPeakBytes)
	e.equal(gateLive, o.tel.RetainedBytes, o.live)
	e.equal(gateCounters, 0, count(o.changed))
	e.equal(gateLearned, 1, count(o.tel.Basis == trainerrank.Learned))
	e.note("unsplit it is priced at %d bytes, %d usable: %d subforwards, predicted %d, observed %d", e.whole, usable, o.tel.SubforwardCount, o.tel.PredictedPeakBytes, o.observed)
	return nil
}

// learnedUnlimited: with room the call runs whole, first by a cold price, which it may exceed, then by a learned one, which it may not.
func learnedUnlimited(b *bench) error {
	e, err := b.estimate()
	if err != nil {
		return err
	}
	for i, title := range []string{"first call", "second call"} {
		o, err := e.profiled(title)
		if err != nil {
			return err
		}
		e.note("%s: priced %s, predicted %d, observed %d", title, o.tel.Basis, o.tel.PredictedPeakBytes, o.observed)
		again := []string{"", "again: "}[i]
		if i == 0 {
			e.equal(gateCold, 1, count(o.tel.Basis == trainerrank.Cold))
		} else {
			e.equal(gateLearned, 1, count(o.tel.Basis == trainerrank.Learned))
			e.atMost(gateObserved, o.tel.PredictedPeakBytes, o.observed)
		}
		e.equal(again+gateSubforwards, 1, int64(o.tel.SubforwardCount))
		e.equal(again+gateForwards, 1, int64(o.forwards))
		e.equal(again+gateTold, o.observed, o.tel.ObservedPeakBytes)
		e.equal(again+gateLive, o.tel.RetainedBytes, o.live)
		e.equal(again+gateCounters, 0, count(o.changed))
	}
	return nil
}

// learnedBelowWhole: with a byte less than the unsplit call is priced at it is split.
func learnedBelowWhole(b *bench) error {
	e, err := b.estimate()
	if err != nil {
		return err
	}
	whole, err := e.profiled("no cap")
	if err != nil {
		return err
	}
	usable := e.whole - 1
	if err := e.limitTo(usable); err != nil {
		return err
	}
	return e.splits("cap one byte below", usable, whole.digests)
}

// learnedBelowOne: with less than any single request is priced at nothing is run.
func learnedBelowOne(b *bench) error {
	e, err := b.estimate()
	if err != nil {
		return err
	}
	if _, err := e.profiled("no cap"); err != nil {
		return err
	}
	least := int64(ample)
	for _, in := range e.list {
		a, err := e.price(b, forward.One(in), ample)
		if err != nil {
			return err
		}
		least = min(least, a.PredictedPeakBytes)
	}
	if err := e.limitTo(least - 1); err != nil {
		return err
	}
	rank, err := e.rank()
	if err != nil {
		return err
	}
	e.belowOne(rank, least)
	return nil
}

// learnedBallast: a call that ran whole before is split when live ballast leaves it three fifths, beside the part that stays free.
func learnedBallast(b *bench) error {
	e, err := b.estimate()
	if err != nil {
		return err
	}
	whole, err := e.profiled("no ballast")
	if err != nil {
		return err
	}
	block, err := e.squeeze(e.left + e.reserve())
	if err != nil {
		return err
	}
	defer block.Free()
	e.note("ballast: %d bytes live, every page touched; %d stay free", block.Bytes(), e.reserve())
	return e.splits("ballast leaves 3/5", profile.Usable(e.dev.Free(), e.dev.Capacity()), whole.digests)
}

// learnedEighth: with an eighth of the price it is refused, or with less if that much is enough for a split.
func learnedEighth(b *bench) error {
	e, err := b.estimate()
	if err != nil {
		return err
	}
	if _, err := e.profiled("no ballast"); err != nil {
		return err
	}
	a, err := e.price(b, e.in, 0)
	if err != nil {
		return err
	}
	left := min(e.whole/8, a.SmallestBudgetBytes-1) &^ (device.PageSize - 1)
	block, err := e.squeeze(left + e.reserve())
	if err != nil {
		return err
	}
	defer block.Free()
	rank, err := e.rank()
	if err != nil {
		return err
	}
	e.note("priced at %d, split at %d at least", e.whole, a.SmallestBudgetBytes)
	e.refused(e.run("ballast leaves an eighth", rank, e.in), profile.Usable(e.dev.Free(), e.dev.Capacity()))
	return nil
}

// learnedCold: the first call of the process, under ballast, is refused; the same call is run once with room; and then it is split under the same ballast.
func learnedCold(b *bench) error {
	e, err := b.estimate()
	if err != nil {
		return err
	}
	block, err := e.squeeze(e.left + e.reserve())
	if err != nil {
		return err
	}
	rank, err := e.rank()
	if err != nil {
		return err
	}
	usable := profile.Usable(e.dev.Free(), e.dev.Capacity())
	o := e.run("the first call of the process", rank, e.in)
	e.refused(o, usable)
	e.equal(gateCold, 1, count(o.tel.Basis == trainerrank.Cold))
	block.Free()
	whole, err := e.profiled("the profiled call")
	if err != nil {
		return err
	}
	if block, err = e.squeeze(e.left + e.reserve()); err != nil {
		return err
	}
	defer block.Free()
	// The split has gates of the same names.
	refused := slices.Clone(b.gates)
	for i := range refused {
		switch g := &refused[i]; g.Name {
		case gateForwards:
			g.Name = gateRefusedForwards
		case gateCounters:
			g.Name = gateRefusedCounters
		}
	}
	b.gates = nil
	err = e.splits("under ballast again", usable, whole.digests)
	b.gates = append(refused, b.gates...)
	return err
}

const (
	gateSoakFailed = "failures of another type than memory"
	gateSoakKnown  = "calls that had run, and then were refused at their price, or took more"
	gateSoakLess   = "calls that had run, and were run whole with a byte less than their price"
	gateSoakPlan   = "calls that their own smallest budget judged otherwise"
)

var learnedSoakGates = []string{gateSoakCalls, gateSoakFailed, gateSoakPlan, gateAgreement, gateOver, gateSoakBits, gateSoakKnown, gateSoakLess, gateRefusals, gateKept, gateCounters, gateSoakAdmit, gateSoakSplit, gateSoakRefuse}

// learnedSoak runs random calls in random budgets, by a profile that all of them teach. Admitted if and only if they would fit by what is known; a call that was admitted may run out, since a price
// is an estimate, but not for more than was usable, nor untyped, nor leaving anything. Then it is run with room, and asked for less it is not.
func learnedSoak(b *bench) error {
	calls := 100
	if b.Short {
		calls = 24
	}
	twin, err := b.openModel(b.Threads)
	if err != nil {
		return err
	}
	e := &estimate{conversion: &conversion{twin: twin}, known: new(profile.Profile)}
	drawn := func(i int) []forward.Input {
		list := draw(random(uint64(5000+i)), twin.Spec().Vocabulary, b.Requests, b.Tokens)
		for k := range list { // of few kinds, so that something is learned of each
			if in := &list[k]; in.Active() && i%4 > 0 {
				*in = forward.Input{Tokens: in.Tokens, Targets: make([]int32, len(in.Tokens))}
			}
		}
		return list
	}
	var need int64
	for i := range calls {
		for _, m := range []forward.Model{twin, trainerrank.Opaque(twin)} {
			a, err := priceOn(b, m, forward.Many(drawn(i)...), ample)
			if err != nil {
				return err
			}
			need = max(need, a.PredictedPeakBytes)
		}
	}
	// A profile of few calls may ask a few times what a call needs.
	if e.lab, err = b.lab(b.Threads, 16*need); err != nil {
		return err
	}
	baseline := counters(e.dev.Stats())
	var failed, judged, agreement, over, bits, known, less, rules, kept, changed tally
	var admitted, split, refused, out int64
	for i := range calls {
		r := random(uint64(9000 + i))
		in := nested(r, drawn(i))
		exact, err := trainerrank.New(e.model)
		if err != nil {
			return err
		}
		want := e.call("", exact, in)
		if want.err != nil {
			return want.err
		}
		free, err := e.price(b, in, ample)
		if err != nil {
			return err
		}
		// Around the thresholds of what is known now.
		low, high := free.SmallestBudgetBytes, free.PredictedPeakBytes
		usable := max(0, []int64{low - 1, low, low + r.Int64N(max(1, high-low)), high - 1, high}[r.IntN(5)])
		what := fmt.Sprintf("call %d in %d bytes (smallest %d, whole %d)", i, usable, low, high)
		rank, err := e.rank(trainerrank.WithUsableBytes(usable))
		if err != nil {
			return err
		}
		a, err := rank.Plan(e, in)
		if err != nil {
			return err
		}
		title := ""
		if i < 12 {
			title = fmt.Sprintf("call %d", i+1)
		}
		o := e.run(title, rank, in)
		turned := o.refusal != nil && !o.refusal.Executing
		judged.wrong((usable < low) != turned, "%s: %v", what, o.err)
		agreement.wrong((a.Verdict == trainerrank.Refused) != turned, "%s: %s, then: %v", what, a.Verdict, o.err)
		over.wrong(o.taken > usable, "%s: took %d", what, o.taken)
		changed.wrong(o.changed, "%s", what)
		var oom *device.OutOfMemoryError
		short := o.refusal != nil && o.refusal.Executing && errors.As(o.err, &oom)
		failed.wrong(o.err != nil && !turned && !short, "%s: %v", what, o.err)
		switch {
		case short:
			out++
		case turned:
			refused++
			t := wording(o.err)
			rules.wrong(t.n > 0, "%s: %s", what, t.why)
			t = contradictions(o, usable)
			rules.wrong(t.n > 0, "%s: %s", what, t.why)
		case o.err == nil:
			admitted++
			split += count(o.tel.SubforwardCount > 1)
			kept.wrong(o.live != o.tel.RetainedBytes, "%s: %d kept, %d told", what, o.live, o.tel.RetainedBytes)
			bits.wrong(differing(want.digests, o.digests) > 0, "%s", what)
		}
		// With room it teaches what it takes; then its price is enough, and less is not.
		e.in = in
		if _, err := e.profiled(""); err != nil {
			return err
		}
		for _, cut := range []int64{0, 1} {
			if rank, err = e.rank(trainerrank.WithUsableBytes(e.whole - cut)); err != nil {
				return err
			}
			price := e.whole
			o := e.run("", rank, in)
			changed.wrong(o.changed, "%s, and again", what)
			if price == 0 {
				continue // nothing is wanted
			}
			if cut == 0 {
				known.wrong(o.err != nil || o.tel.SubforwardCount != 1 || o.observed > price, "%s: priced at %d: %v, %d observed", what, price, o.err, o.observed)
			} else {
				less.wrong(o.err == nil && o.tel.SubforwardCount == 1, "%s: priced at %d", what, price)
			}
		}
	}
	changed.wrong(counters(e.dev.Stats()) != baseline, "after all calls")
	b.equal(gateSoakCalls, int64(calls), admitted+refused+out)
	b.gate(failed.none(gateSoakFailed), judged.none(gateSoakPlan), agreement.none(gateAgreement), over.none(gateOver), bits.none(gateSoakBits), known.none(gateSoakKnown),
		less.none(gateSoakLess), rules.none(gateRefusals), kept.none(gateKept), changed.none(gateCounters))
	b.note("%d calls ran, %d of them split, %d were refused, %d ran out of what was usable", admitted, split, refused, out)
	b.atLeast(gateSoakAdmit, int64(calls/6), admitted)
	b.atLeast(gateSoakSplit, 1, split)
	b.atLeast(gateSoakRefuse, int64(calls/10), refused)
	return nil
}
