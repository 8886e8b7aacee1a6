package main

import (
	"errors"
	"fmt"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/forward/transformer"
	"github.com/trainerrank/engine/slots"
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
	gateKept        = "results that keep other bytes than their outputs, and their graphs"
	gateSoakTrained = "backwards"
	gateSoakFewer   = "of these after a split, or with less kept"
	gateSoakFar     = "farthest gradients from those with unlimited memory, billionths of their norm"
	gateSteps       = "steps of the optimizer"
	gateStepped     = "steps that were not made, or after which the same call runs otherwise"
)

var soakGates = []string{gateSoakCalls, gateVerdicts, gateAgreement, gateOutOfMemory, gateOver, gatePromise, gateSoakBits, gateSoakAdmit, gateSoakSplit, gateSoakRefuse, gateRefusals, gatePrefixes, gateKept,
	gateSoakTrained, gateSoakFewer, gateSoakFar, gateSteps, gateStepped, gateGraphsLeft, gateCounters}

// soakCall is one call of the soak: random requests, every third time of a call that trains.
type soakCall struct {
	job
	in           forward.Inputs
	opts         []trainerrank.CallOption // of one that trains
	whole, least int64                    // bytes that it needs whole, and at least
}

// soakCall draws call i, and prices it.
func (b *bench) soakCall(m *transformer.Model, i int) (*soakCall, error) {
	seed := uint64(1000 + i)
	c := &soakCall{}
	if i%3 == 2 {
		c.job = drawTraining(seed, m.Spec(), b.Requests, b.Tokens)
		c.opts = [][]trainerrank.CallOption{training(), training(), keeping(trainerrank.Stored), keeping(trainerrank.Stored, trainerrank.Replay)}[random(seed+2).IntN(4)]
	} else {
		c.list = draw(random(seed), m.Spec().Vocabulary, b.Requests, b.Tokens)
	}
	c.in = nested(random(seed), c.list)
	a, err := priceOn(b, m, c.in, ample, c.opts...)
	if err != nil {
		return nil, err
	}
	c.whole = a.PredictedPeakBytes
	c.least, err = smallest(b, m, c.in, c.opts...)
	return c, err
}

// soakRank is a rank for a call.
func (l *lab) soakRank(c *soakCall, opts ...trainerrank.Option) (*trainerrank.TrainerRank, error) {
	if c.opts == nil {
		return l.rank(opts...)
	}
	return l.trainee(opts...)
}

// soakRun runs a call, and if it trains its backward. The gradient stays with the policy's.
func (l *lab) soakRun(title string, rank *trainerrank.TrainerRank, c *soakCall, run backward) *outcome {
	if c.opts == nil {
		return l.call(title, rank, c.in)
	}
	return l.add(title, rank, c.in, c.job, run, c.opts...)
}

// soak runs random calls in random budgets, one after the other on the same device: admitted if and only if they would fit, which is
// known beforehand from a refusal's own smallest budget, with live ballast up to the page and a limit for the bytes below it. Those that train are run backward too, and now and then the optimizer
// steps.
func soak(b *bench) error {
	calls := 200
	if b.Short {
		calls = 36
	}
	twin, err := b.openModel(b.Threads)
	if err != nil {
		return err
	}
	list := make([]*soakCall, calls)
	need, err := policyBytes(twin)
	if err != nil {
		return err
	}
	need *= 2
	most := int64(0)
	for i := range list {
		if list[i], err = b.soakCall(twin, i); err != nil {
			return err
		}
		most = max(most, list[i].whole)
	}
	l, err := b.lab(b.Threads, need+most)
	if err != nil {
		return err
	}
	baseline := counters(l.dev.Stats())
	var verdicts, agreement, oom, over, promise, bits, rules, prefixes, kept, stepped, leases, changed tally
	var admitted, split, refused, trained, less, far, steps int64
	for i, c := range list {
		r := random(uint64(1001 + i))
		budgets := []int64{c.least, c.least - 1, c.whole, c.whole - 1, c.least/2 + r.Int64N(c.whole), c.least + r.Int64N(max(1, c.whole-c.least))}
		usable := max(0, budgets[r.IntN(len(budgets))])
		what := fmt.Sprintf("call %d in %d bytes (smallest %d, whole %d)", i, usable, c.least, c.whole)
		unlimited, err := l.soakRank(c)
		if err != nil {
			return err
		}
		want := l.soakRun("", unlimited, c, combined)
		if want.err != nil {
			return want.err
		}
		rank, err := l.soakRank(c, trainerrank.WithUsableBytes(usable))
		if err != nil {
			return err
		}
		block, err := l.squeeze(device.RoundPages(usable))
		if err != nil {
			return err
		}
		a, err := rank.Plan(l, c.in, c.opts...)
		if err != nil {
			return err
		}
		title := ""
		if i < 12 {
			title = fmt.Sprintf("call %d", i+1)
		}
		run := []backward{combined, reversed}[r.IntN(2)]
		o := l.soakRun(title, rank, c, run)
		fits := c.least <= usable
		verdicts.wrong(fits != (o.err == nil), "%s: %v", what, o.err)
		agreement.wrong((a.Verdict == trainerrank.Refused) != (o.err != nil), "%s: %s, then: %v", what, a.Verdict, o.err)
		var out *device.OutOfMemoryError
		oom.wrong(errors.As(o.err, &out) || o.err != nil && o.forwards > 0, "%s: %v", what, o.err)
		over.wrong(o.taken > usable, "%s: took %d", what, o.taken)
		leases.wrong(o.left != 0, "%s: %d", what, o.left)
		changed.wrong(o.changed, "%s", what)
		if o.err != nil {
			refused++
			t := wording(o.err)
			rules.wrong(t.n > 0, "%s: %s", what, t.why)
			t = contradictions(o, usable)
			rules.wrong(t.n > 0, "%s: %s", what, t.why)
			rules.wrong(o.refusal != nil && o.refusal.SmallestBudgetBytes != c.least, "%s: the smallest budget is said to be another", what)
			for n := range 2 { // the first LargestPrefix inputs fit, one more does not
				if o.refusal == nil {
					break
				}
				prefix := o.refusal.LargestPrefix + n
				a, err := priceOn(b, twin, forward.Many(c.list[:min(prefix, len(c.list))]...), usable, c.opts...)
				if err != nil {
					return err
				}
				prefixes.wrong(prefix > len(c.list) || (a.Verdict == trainerrank.Refused) != (n == 1), "%s: the first %d inputs: %s", what, prefix, a.Verdict)
			}
		} else {
			admitted++
			split += count(o.tel.SubforwardCount > 1)
			// What of a training call is kept once its backward is done belongs to its outputs. It uses all that is predicted only if the backward is first that needs most.
			held, used := o.live, o.observed == o.tel.PredictedPeakBytes
			if c.opts != nil {
				held, used = o.kept, o.observed <= o.tel.PredictedPeakBytes && o.told == o.observed
			}
			kept.wrong(held != o.tel.RetainedBytes, "%s: %d kept, %d of outputs and graphs", what, held, o.tel.RetainedBytes)
			promise.wrong(!used || o.tel.PredictedPeakBytes > usable, "%s: predicted %d, observed %d, said to be %d", what, o.tel.PredictedPeakBytes, o.observed, o.told)
			bits.wrong(differing(want.digests, o.digests) > 0, "%s", what)
		}
		if c.opts != nil && o.err == nil {
			trained++
			less += count(o.tel.SubforwardCount > 1 || o.tel.Retention != trainerrank.Stored)
			off, made, err := l.soakStep(rank, unlimited, c, o, run, r.IntN(2) == 0)
			far, steps = max(far, off), steps+count(made)
			stepped.wrong(err != nil, "%s: %v", what, err)
		}
		block.Free()
		for _, rank := range []*trainerrank.TrainerRank{rank, unlimited} {
			rank.Close()
		}
	}
	changed.wrong(counters(l.dev.Stats()) != baseline, "after all calls")
	b.equal(gateSoakCalls, int64(calls), admitted+refused)
	b.gate(verdicts.none(gateVerdicts), agreement.none(gateAgreement), oom.none(gateOutOfMemory), over.none(gateOver), promise.none(gatePromise),
		bits.none(gateSoakBits), rules.none(gateRefusals), prefixes.none(gatePrefixes), kept.none(gateKept), stepped.none(gateStepped), leases.none(gateGraphsLeft), changed.none(gateCounters))
	b.atMost(gateSoakFar, farthest, far)
	// Budgets are drawn around the thresholds, so that there is enough of everything.
	b.atLeast(gateSoakAdmit, int64(calls/4), admitted)
	b.atLeast(gateSoakSplit, int64(calls/10), split)
	b.atLeast(gateSoakRefuse, int64(calls/10), refused)
	b.atLeast(gateSoakTrained, int64(calls/9), trained)
	b.atLeast(gateSoakFewer, int64(calls/18), less)
	b.atLeast(gateSteps, int64(calls/36), steps)
	return nil
}

// soakStep compares the gradient of a call with that of the same call with unlimited memory, in billionths of its norm, and if asked to has the optimizer step. Then the same call runs again: as before, with other
// answers.
func (l *lab) soakStep(rank, unlimited *trainerrank.TrainerRank, c *soakCall, o *outcome, run backward, step bool) (off int64, made bool, err error) {
	want, err := takeGradient(unlimited)
	if err != nil {
		return 0, false, err
	}
	g, err := rank.Checkpoints().Gradients(policy)
	if err != nil {
		return 0, false, err
	}
	if off = apart(want, g.F32()); !step {
		return off, false, nil
	}
	report, err := rank.OptimStep(l, slots.StepOptions{Params: slots.Adam(1e-2), OnLiveGraphs: slots.Error})
	if err != nil {
		return off, false, err
	}
	left, err := takeGradient(rank)
	if err == nil && (!report.Updated() || report.Slots[0].Revision != 1 || magnitude(left) != 0) {
		err = fmt.Errorf("not made, or gradients are left: %v", report)
	}
	again := l.soakRun("", rank, c, run)
	err = errors.Join(err, again.err)
	if err == nil && (again.observed != o.observed || again.tel.PredictedPeakBytes != o.tel.PredictedPeakBytes || again.changed || again.left != 0) {
		err = fmt.Errorf("the same call again: %d bytes observed, not %d; %d graphs live", again.observed, o.observed, again.left)
	}
	if err == nil && differing(o.digests, again.digests) == 0 {
		err = errors.New("the same call again: the same answers")
	}
	return off, true, err
}
