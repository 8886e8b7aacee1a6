package main

import (
	"errors"
	"fmt"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/trainerrank"
)

const (
	gateSoakCalls   = "calls"
	gateVerdicts    = "calls admitted that would not fit, or refused that would"
	gateAgreement   = "calls that Plan judged differently"
	gateOutOfMemory = "out of memory after admission"
	gateOver        = "calls that took more than was usable"
	gatePromise     = "calls that used other bytes than predicted, or were predicted more than usable"
	gateSoakBits    = "calls with other bits than unlimited"
	gateSoakAdmit   = "calls admitted"
	gateSoakSplit   = "calls split"
	gateSoakRefuse  = "calls refused"
	gateRefusals    = "refusals that break a rule"
	gatePrefixes    = "refusals whose largest prefix does not fit, or is not the largest"
	gateKept        = "results that keep other bytes than their outputs"
)

var soakGates = []string{gateSoakCalls, gateVerdicts, gateAgreement, gateOutOfMemory, gateOver, gatePromise, gateSoakBits, gateSoakAdmit, gateSoakSplit, gateSoakRefuse, gateRefusals, gatePrefixes, gateKept, gateCounters}

// soak runs random calls in random budgets, one after the other on the same device: admitted if and only if they would fit, which is
// known beforehand from a refusal's own smallest budget, with live ballast up to the page and a limit for the bytes below it.
func soak(b *bench) error {
	calls := 200
	if b.Short {
		calls = 30
	}
	twin, err := b.openModel(b.Threads)
	if err != nil {
		return err
	}
	var need int64
	type job struct {
		seed         uint64
		whole, least int64
	}
	jobs := make([]job, calls)
	for i := range jobs {
		jobs[i].seed = uint64(1000 + i)
		in := nested(random(jobs[i].seed), draw(random(jobs[i].seed), twin.Spec().Vocabulary, b.Requests, b.Tokens))
		a, err := priceOn(b, twin, in, ample)
		if err != nil {
			return err
		}
		jobs[i].whole = a.PredictedPeakBytes
		if jobs[i].least, err = smallest(b, twin, in); err != nil {
			return err
		}
		need = max(need, a.PredictedPeakBytes)
	}
	l, err := b.lab(b.Threads, need)
	if err != nil {
		return err
	}
	baseline := counters(l.dev.Stats())
	var verdicts, agreement, oom, over, promise, bits, rules, prefixes, kept, changed tally
	var admitted, split, refused int64
	for i, j := range jobs {
		r := random(j.seed + 1)
		list := draw(random(j.seed), twin.Spec().Vocabulary, b.Requests, b.Tokens)
		in := nested(random(j.seed), list)
		budgets := []int64{j.least, j.least - 1, j.whole, j.whole - 1, j.least/2 + r.Int64N(j.whole), j.least + r.Int64N(max(1, j.whole-j.least))}
		usable := max(0, budgets[r.IntN(len(budgets))])
		what := fmt.Sprintf("call %d in %d bytes (smallest %d, whole %d)", i, usable, j.least, j.whole)
		unlimited, err := l.rank()
		if err != nil {
			return err
		}
		want := l.call("", unlimited, in)
		if want.err != nil {
			return want.err
		}
		block, err := l.squeeze(device.RoundPages(usable))
		if err != nil {
			return err
		}
		rank, err := l.rank(trainerrank.WithUsableBytes(usable))
		if err != nil {
			return err
		}
		a, err := rank.Plan(l, in)
		if err != nil {
			return err
		}
		title := ""
		if i < 12 {
			title = fmt.Sprintf("call %d", i+1)
		}
		o := l.call(title, rank, in)
		block.Free()
		fits := j.least <= usable
		verdicts.wrong(fits != (o.err == nil), "%s: %v", what, o.err)
		agreement.wrong((a.Verdict == trainerrank.Refused) != (o.err != nil), "%s: %s, then: %v", what, a.Verdict, o.err)
		var out *device.OutOfMemoryError
		oom.wrong(errors.As(o.err, &out) || o.err != nil && o.forwards > 0, "%s: %v", what, o.err)
		over.wrong(o.taken > usable, "%s: took %d", what, o.taken)
		changed.wrong(o.changed, "%s", what)
		if o.err != nil {
			refused++
			t := wording(o.err)
			rules.wrong(t.n > 0, "%s: %s", what, t.why)
			t = contradictions(o, usable)
			rules.wrong(t.n > 0, "%s: %s", what, t.why)
			rules.wrong(o.refusal != nil && o.refusal.SmallestBudgetBytes != j.least, "%s: the smallest budget is said to be another", what)
			if o.refusal == nil {
				continue
			}
			for n := range 2 { // the first LargestPrefix inputs fit, one more does not
				prefix := o.refusal.LargestPrefix + n
				a, err := priceOn(b, twin, forward.Many(list[:min(prefix, len(list))]...), usable)
				if err != nil {
					return err
				}
				prefixes.wrong(prefix > len(list) || (a.Verdict == trainerrank.Refused) != (n == 1), "%s: the first %d inputs: %s", what, prefix, a.Verdict)
			}
			continue
		}
		admitted++
		kept.wrong(o.live != o.tel.RetainedBytes, "%s: %d kept, %d of outputs", what, o.live, o.tel.RetainedBytes)
		split += count(o.tel.SubforwardCount > 1)
		promise.wrong(o.observed != o.tel.PredictedPeakBytes || o.tel.PredictedPeakBytes > usable, "%s: predicted %d, observed %d", what, o.tel.PredictedPeakBytes, o.observed)
		bits.wrong(differing(want.digests, o.digests) > 0, "%s", what)
	}
	changed.wrong(counters(l.dev.Stats()) != baseline, "after all calls")
	b.equal(gateSoakCalls, int64(calls), admitted+refused)
	b.gate(verdicts.none(gateVerdicts), agreement.none(gateAgreement), oom.none(gateOutOfMemory), over.none(gateOver), promise.none(gatePromise),
		bits.none(gateSoakBits), rules.none(gateRefusals), prefixes.none(gatePrefixes), kept.none(gateKept), changed.none(gateCounters))
	// Budgets are drawn around the thresholds, so that there is enough of everything.
	b.atLeast(gateSoakAdmit, int64(calls/4), admitted)
	b.atLeast(gateSoakSplit, int64(calls/10), split)
	b.atLeast(gateSoakRefuse, int64(calls/10), refused)
	return nil
}
