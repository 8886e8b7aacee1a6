package main

import (
	"fmt"
	"os"
	"strings"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/forward/transformer"
	"github.com/trainerrank/engine/trainerrank"
)

// The gates of a call that converts, of one that is whole, and of one that is refused.
var (
	convertGates = []string{gateTooLarge, gateSubforwards, gateForwards, gateBits, gateObserved, gateExact, gatePredicted, gateTaken, gateTold, gateLive, gateCounters}
	wholeGates   = []string{gateSubforwards, gateForwards, gateExact, gateLive, gateCounters}
	refusedGates = []string{gateRefused, gateForwards, gateNothing, gateWording, gateFields, gateCounters}
)

// The names of gates.
const (
	gateTooLarge    = "unsplit the call needs more than is usable, bytes"
	gateSubforwards = "subforwards"
	gateForwards    = "forwards that ran"
	gateBits        = "answers with other bits than unsplit"
	gateObserved    = "observed peak within the predicted, bytes"
	gateExact       = "observed peak is the predicted, bytes"
	gatePredicted   = "predicted peak within the usable, bytes"
	gateTaken       = "taken from the device within the usable, bytes"
	gateNothing     = "taken from the device, bytes"
	gateTold        = "observed peak of the telemetry is the device's, bytes"
	gateLive        = "kept by the unreleased result, its outputs alone, bytes"
	gateCounters    = "device counters changed"
	gateRefused     = "refused"
	gateAdmitted    = "admitted, as its smallest budget says"
	gateWording     = "words missing or forbidden in the refusal"
	gateFields      = "fields of the refusal that contradict each other"
	gatePrefix      = "inputs that are said to fit"
	gateSingle      = "words missing in the refusal of a single request"
)

// conversion is an arm of the phases that split: a workload and what it needs whole.
type conversion struct {
	*lab
	job                      // its inputs, and cotangents for those of a call that trains
	twin  *transformer.Model // never run, for prices
	in    forward.Inputs
	opts  []trainerrank.CallOption // of a call that trains
	whole int64                    // bytes that the unsplit call needs
}

// conversion prices the workload and loads the model. With options the call is one that trains: see [training].
func (b *bench) conversion(opts ...trainerrank.CallOption) (*conversion, error) {
	twin, err := b.openModel(b.Threads)
	if err != nil {
		return nil, err
	}
	c := &conversion{twin: twin, opts: opts}
	c.list = workload(twin.Spec().Vocabulary, b.Requests, b.Tokens)
	c.in = forward.Many(c.list...)
	a, err := priceOn(b, twin, c.in, ample, opts...)
	if err != nil {
		return nil, err
	}
	c.whole = a.PredictedPeakBytes
	need := c.whole
	if len(opts) > 0 {
		c.grads = cotangents(random(3), twin.Spec(), c.list)
		bytes, err := policyBytes(twin)
		if err != nil {
			return nil, err
		}
		need += 2 * bytes // there may be two ranks
	}
	c.lab, err = b.lab(b.Threads, need)
	return c, err
}

// unlimited runs the call with all the memory that there is.
func (c *conversion) unlimited(title string) (*outcome, error) {
	rank, err := c.rank()
	if err != nil {
		return nil, err
	}
	o := c.call(title, rank, c.in)
	if o.err == nil && o.tel.SubforwardCount != 1 {
		o.err = fmt.Errorf("the call that has room was split into %d", o.tel.SubforwardCount)
	}
	return o, o.err
}

// converts gates a call that does not fit whole in usable bytes and is to be split.
func (c *conversion) converts(o *outcome, usable int64, want []string) error {
	if o.err != nil {
		return o.err
	}
	c.atLeast(gateTooLarge, usable+1, c.whole)
	c.atLeast(gateSubforwards, 2, int64(o.tel.SubforwardCount))
	c.equal(gateForwards, int64(o.tel.SubforwardCount), int64(o.forwards))
	c.equal(gateBits, 0, differing(want, o.digests))
	c.atMost(gateObserved, o.tel.PredictedPeakBytes, o.observed)
	c.equal(gateExact, o.tel.PredictedPeakBytes, o.observed)
	c.atMost(gatePredicted, usable, o.tel.PredictedPeakBytes)
	c.atMost(gateTaken, usable, o.taken)
	c.equal(gateTold, o.observed, o.tel.ObservedPeakBytes)
	c.equal(gateLive, o.tel.RetainedBytes, o.live)
	c.equal(gateCounters, 0, count(o.changed))
	c.note("%d requests of %d tokens, %d packed whole: unsplit needs %d bytes, %d usable: %d subforwards, predicted %d, observed %d, retained by the result %d, planned in %.1f ms",
		c.Requests, c.Tokens, c.packed(), c.whole, usable, o.tel.SubforwardCount, o.tel.PredictedPeakBytes, o.observed, o.tel.RetainedBytes, float64(o.tel.PlanningTime.Microseconds())/1e3)
	return c.rungs(usable)
}

// packed is the number of tokens of the unsplit call.
func (c *conversion) packed() int {
	a, err := priceOn(c, c.twin, c.in, ample, c.opts...)
	if err != nil {
		return 0
	}
	return a.PackedTokens
}

// rungs notes what was tried with so many usable bytes, in that order.
func (c *conversion) rungs(usable int64) error {
	a, err := priceOn(c, c.twin, c.in, usable, c.opts...)
	if err != nil {
		return err
	}
	for i := range a.Rungs {
		r := &a.Rungs[i]
		layout, why := string(r.Layout), "fits"
		if layout == "" {
			layout = "at least, in any layout"
		}
		if !r.Fits {
			why = fmt.Sprintf("%d more than usable", r.TotalBytes-usable)
		}
		c.note("tried: count %d, %s: %d bytes, %s", r.Count, layout, r.TotalBytes, why)
	}
	return nil
}

// refused gates a call that is to be refused with usable bytes. Nothing of it may run, and nothing may be taken.
func (b *bench) refused(o *outcome, usable int64) { b.refusedAs("", o, usable) }

// refusedAs is the same with something in front of the names of the gates.
func (b *bench) refusedAs(prefix string, o *outcome, usable int64) {
	b.equal(prefix+gateRefused, 1, count(o.refusal != nil))
	b.equal(prefix+gateForwards, 0, int64(o.forwards))
	b.equal(prefix+gateNothing, 0, o.taken)
	b.gate(wording(o.err).none(prefix + gateWording))
	b.gate(contradictions(o, usable).none(prefix + gateFields))
	b.equal(prefix+gateCounters, 0, count(o.changed))
}

// wording counts what a refusal must say and does not, and what it must not say and does.
func wording(err error) *tally {
	t := new(tally)
	text := ""
	if err != nil {
		text = strings.ToLower(err.Error())
	}
	for _, words := range []string{"split", "unable to find a feasible split"} {
		t.wrong(!strings.Contains(text, words), "%q is missing in: %s", words, text)
	}
	for _, words := range []string{"no feasible", "infeasible"} {
		t.wrong(strings.Contains(text, words), "%q is claimed in: %s", words, text)
	}
	return t
}

// contradictions counts the fields of a refusal that cannot belong to one plan.
func contradictions(o *outcome, usable int64) *tally {
	t := new(tally)
	e := o.refusal
	if e == nil {
		t.wrong(true, "there is no refusal: %v", o.err)
		return t
	}
	t.wrong(e.PredictedPeakBytes <= e.UsableLimitBytes, "%d bytes are needed, %d usable", e.PredictedPeakBytes, e.UsableLimitBytes)
	t.wrong(e.UsableLimitBytes != usable, "%d bytes are said to be usable, %d are", e.UsableLimitBytes, usable)
	t.wrong(e.SmallestBudgetBytes <= usable, "%d bytes are said to be enough, %d were usable", e.SmallestBudgetBytes, usable)
	t.wrong(e.Shares.Total() != e.PredictedPeakBytes, "the shares add up to %d, %d bytes are predicted", e.Shares.Total(), e.PredictedPeakBytes)
	t.wrong(e.PackedTokens < 1 || e.PackedTokens > e.LogicalTokens, "%d tokens packed of %d", e.PackedTokens, e.LogicalTokens)
	t.wrong(!strings.Contains(e.Suggestion, "smaller"), "the suggestion is %q", e.Suggestion)
	t.wrong(len(e.Rungs) == 0, "no rung is named")
	for _, r := range e.Rungs {
		t.wrong(r.Fits || r.TotalBytes <= usable, "a rung of %d needs %d bytes and is said not to fit in %d", r.Count, r.TotalBytes, usable)
	}
	return t
}

// capUnlimited: with room the call runs whole, and needs to the byte what was predicted.
func capUnlimited(b *bench) error {
	c, err := b.conversion()
	if err != nil {
		return err
	}
	for i, title := range []string{"first call", "second call"} {
		o, err := c.unlimited(title)
		if err != nil {
			return err
		}
		again := []string{"", "again: "}[i]
		c.equal(again+gateSubforwards, 1, int64(o.tel.SubforwardCount))
		c.equal(again+gateForwards, 1, int64(o.forwards))
		c.equal(again+gateExact, o.tel.PredictedPeakBytes, o.observed)
		c.equal(again+gateLive, o.tel.RetainedBytes, o.live)
		c.equal(again+gateCounters, 0, count(o.changed))
	}
	return nil
}

// limitTo caps by the test hooks what a call may use.
func (l *lab) limitTo(usable int64) error {
	return os.Setenv(limitVariable, fmt.Sprint(l.dev.Stats().Allocated+usable))
}

// capBelowWhole: with a byte less than the unsplit call needs it is split.
func capBelowWhole(b *bench) error {
	c, err := b.conversion()
	if err != nil {
		return err
	}
	whole, err := c.unlimited("no cap")
	if err != nil {
		return err
	}
	usable := whole.tel.PredictedPeakBytes - 1
	if err := c.limitTo(usable); err != nil {
		return err
	}
	rank, err := c.rank()
	if err != nil {
		return err
	}
	return c.converts(c.call("cap one byte below", rank, c.in), usable, whole.digests)
}

// capBelowOne: with less than any single request needs nothing is run.
func capBelowOne(b *bench) error {
	c, err := b.conversion()
	if err != nil {
		return err
	}
	least := int64(ample)
	for _, in := range c.list {
		a, err := priceOn(c, c.twin, forward.One(in), ample)
		if err != nil {
			return err
		}
		least = min(least, a.PredictedPeakBytes)
	}
	if err := c.limitTo(least - 1); err != nil {
		return err
	}
	rank, err := c.rank()
	if err != nil {
		return err
	}
	c.belowOne(rank, least)
	return nil
}

// belowOne gates a call in a byte less than the cheapest of its requests needs, and one of the requests alone.
func (c *conversion) belowOne(rank *trainerrank.TrainerRank, least int64) {
	usable := least - 1
	o := c.call("cap below one request", rank, c.in)
	c.refused(o, usable)
	prefix := int64(-1)
	if o.refusal != nil {
		prefix = int64(o.refusal.LargestPrefix)
		c.note("%d bytes usable, the cheapest request needs %d: %v", usable, least, o.err)
	}
	c.equal(gatePrefix, 0, prefix)
	single := c.call("", rank, forward.One(c.list[0]))
	t := wording(single.err)
	t.wrong(single.err == nil || !strings.Contains(strings.ToLower(single.err.Error()), "a single request cannot be split"), "%v", single.err)
	c.gate(t.none(gateSingle))
}

// leaves is what the ballast leaves of the unsplit need: three fifths. Where no split fits in that, because the workspaces of many threads
// outweigh the tokens, it is midway between the smallest budget and the whole.
func (c *conversion) leaves() (int64, error) {
	least, err := smallest(c, c.twin, c.in)
	if err != nil {
		return 0, err
	}
	fifths := c.whole * 3 / 5 &^ (device.PageSize - 1)
	if fifths >= least {
		return fifths, nil
	}
	middle := least + (c.whole-least)/2
	c.note("no split fits in three fifths of %d bytes: the smallest budget is %d", c.whole, least)
	if device.RoundPages(least) >= c.whole {
		return 0, fmt.Errorf("the call needs %d bytes whole and %d split: give it more --tokens", c.whole, least)
	}
	return max(middle&^(device.PageSize-1), device.RoundPages(least)), nil
}

// ballastWarm: a call that ran whole before is split when live ballast leaves it three fifths.
func ballastWarm(b *bench) error {
	c, err := b.conversion()
	if err != nil {
		return err
	}
	whole, err := c.unlimited("no ballast")
	if err != nil {
		return err
	}
	left, err := c.leaves()
	if err != nil {
		return err
	}
	block, err := c.squeeze(left)
	if err != nil {
		return err
	}
	defer block.Free()
	rank, err := c.rank()
	if err != nil {
		return err
	}
	usable := c.dev.Free()
	c.note("ballast: %d bytes live, every page touched", block.Bytes())
	return c.converts(c.call("ballast leaves 3/5", rank, c.in), usable, whole.digests)
}

// ballastEighth: with an eighth of what the call needs whole it is refused, or split if it says that so little is enough.
func ballastEighth(b *bench) error {
	c, err := b.conversion()
	if err != nil {
		return err
	}
	block, err := c.squeeze(c.whole / 8)
	if err != nil {
		return err
	}
	least, err := smallest(c, c.twin, c.in)
	if err != nil {
		return err
	}
	rank, err := c.rank()
	if err != nil {
		return err
	}
	usable := c.dev.Free()
	o := c.call("ballast leaves an eighth", rank, c.in)
	c.equal(gateAdmitted, count(least <= usable), count(o.err == nil))
	if least > usable {
		c.note("%d bytes usable, the smallest budget is %d: to be refused", usable, least)
		c.refused(o, usable)
		return nil
	}
	c.note("%d bytes usable, the smallest budget is %d: to be split", usable, least)
	block.Free()
	whole, err := c.unlimited("no ballast")
	if err != nil {
		return err
	}
	return c.converts(o, usable, whole.digests)
}

// coldBallast: the same as ballastWarm, but it is the first call of the process: nothing was run, planned or learned before.
func coldBallast(b *bench) error {
	c, err := b.conversion()
	if err != nil {
		return err
	}
	left, err := c.leaves()
	if err != nil {
		return err
	}
	block, err := c.squeeze(left)
	if err != nil {
		return err
	}
	rank, err := c.rank()
	if err != nil {
		return err
	}
	usable := c.dev.Free()
	o := c.call("the first call of the process", rank, c.in)
	c.equal("priced exactly", 1, count(o.tel.Basis == trainerrank.Exact))
	block.Free()
	whole, err := c.unlimited("afterwards, no ballast")
	if err != nil {
		return err
	}
	return c.converts(o, usable, whole.digests)
}
