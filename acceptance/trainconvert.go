package main

import (
	"fmt"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/trainerrank"
)

const (
	gateGraphs   = "graphs live before the backward"
	gateInUse    = "in use after the forward, as it says that it retains, bytes"
	gateOutputs  = "kept after the backward, the outputs alone, bytes"
	gateDistance = "distance of the gradients from the unsplit, billionths of their norm"
	gateGradient = "norm of the unsplit gradients, thousandths"
	gateLeases   = "graphs live after the release"
	gateRungs    = "unsplit plans tried"
	gateFits     = "unsplit plans that fit"
	gateMeasured = "the split's predicted need within that of its parts as measured, bytes"
	gateWindow   = "usable is at least what the parts were measured to need, bytes"
	gateUnsplit  = "usable is less than the unsplit call was measured to need, bytes"
)

// trainingGates are those of a training call that is split; exactGates hold as well if its backward is combined, and so begins with the subforward that needs most.
var (
	trainingGates = []string{gateSubforwards, gateForwards, gateBits, gateGraphs, gateInUse, gateObserved, gatePredicted, gateTaken, gateTold, gateOutputs, gateDistance, gateLeases, gateCounters}
	combinedGates = append([]string{gateTooLarge, gateExact, gateGradient}, trainingGates...)

	capTrainingGates     = append(prefixed("unsplit: ", []string{gateSubforwards, gateExact}), append(prefixed(inReverse, trainingGates), combinedGates...)...)
	ballastTrainingGates = append([]string{gateRungs, gateFits, gateMeasured, gateWindow, gateUnsplit}, append(prefixed(inReverse, trainingGates), combinedGates...)...)
	eighthTrainingGates  = append(prefixed("stored: ", refusedGates), gateAdmitted, gateForwards, gateCounters, gateDistance)
)

// inReverse marks the gates of the call whose subforwards have a backward each, the last one first.
const inReverse = "in reverse: "

func prefixed(prefix string, names []string) []string {
	list := make([]string, len(names))
	for i, name := range names {
		list[i] = prefix + name
	}
	return list
}

// unsplitTraining runs the training call with all the memory that there is.
func (c *conversion) unsplitTraining(title string, rank *trainerrank.TrainerRank) (*outcome, error) {
	o := c.train(title, rank, c.job, combined, c.opts...)
	if o.err == nil && o.tel.SubforwardCount != 1 {
		o.err = fmt.Errorf("the call that has room was split into %d", o.tel.SubforwardCount)
	}
	return o, o.err
}

// convertsTraining gates a training call that does not fit whole in usable bytes and is to be split: a combined backward, and then the same call with one backward for each
// subforward, in reverse.
func (c *conversion) convertsTraining(o, reverse *outcome, usable int64, whole *outcome) error {
	if o.err != nil {
		return o.err
	}
	c.atLeast(gateTooLarge, usable+1, whole.tel.PredictedPeakBytes)
	c.equal(gateExact, o.tel.PredictedPeakBytes, o.observed)
	c.atLeast(gateGradient, 1, magnitude(whole.gradient))
	c.trainedSplit("", o, usable, whole)
	c.trainedSplit(inReverse, reverse, usable, whole)
	c.note("%d requests of %d tokens with gradients, %d packed whole: unsplit needs %d bytes, %d usable: %d subforwards, predicted %d, observed %d, in use after the forward %d, after the backward %d",
		c.Requests, c.Tokens, c.packed(), c.whole, usable, o.tel.SubforwardCount, o.tel.PredictedPeakBytes, o.observed, o.kept, o.live)
	return c.rungs(usable)
}

// trainedSplit gates one of the two.
func (c *conversion) trainedSplit(prefix string, o *outcome, usable int64, whole *outcome) {
	if o.err != nil {
		c.note("%s%v", prefix, o.err)
	}
	k := int64(o.tel.SubforwardCount)
	c.atLeast(prefix+gateSubforwards, 2, k)
	c.equal(prefix+gateForwards, k, int64(o.forwards))
	c.equal(prefix+gateBits, 0, differing(whole.digests, o.digests))
	c.equal(prefix+gateGraphs, k, int64(o.graphs))
	c.equal(prefix+gateInUse, o.tel.RetainedBytes, o.kept)
	c.atMost(prefix+gateObserved, o.tel.PredictedPeakBytes, o.observed)
	c.atMost(prefix+gatePredicted, usable, o.tel.PredictedPeakBytes)
	c.atMost(prefix+gateTaken, usable, o.taken)
	c.equal(prefix+gateTold, o.observed, o.told)
	c.equal(prefix+gateOutputs, o.planned[device.Outputs], o.live)
	c.atMost(prefix+gateDistance, farthest, apart(whole.gradient, o.gradient))
	c.equal(prefix+gateLeases, 0, int64(o.left))
	c.equal(prefix+gateCounters, 0, count(o.changed))
}

// trainingConversion is the workload as a call that trains and keeps all activations: the only way to fit is then to split.
func (b *bench) trainingConversion(opts []trainerrank.CallOption) (*conversion, error) {
	if b.Threads > fewThreads {
		b.note("%d threads: with more, their workspaces outweigh what a split saves", fewThreads)
		b.Threads = fewThreads
	}
	return b.conversion(opts...)
}

// capTraining: with a byte less than the unsplit training call needs it is split, and its gradients are those of the unsplit call.
func capTraining(b *bench) error {
	c, err := b.trainingConversion(keeping(trainerrank.Stored))
	if err != nil {
		return err
	}
	rank, err := c.trainee()
	if err != nil {
		return err
	}
	whole, err := c.unsplitTraining("no cap", rank)
	if err != nil {
		return err
	}
	c.equal("unsplit: "+gateSubforwards, 1, int64(whole.tel.SubforwardCount))
	c.equal("unsplit: "+gateExact, whole.tel.PredictedPeakBytes, whole.observed)
	usable := whole.tel.PredictedPeakBytes - 1
	if err := c.limitTo(usable); err != nil {
		return err
	}
	o := c.train("cap one byte below", rank, c.job, combined, c.opts...)
	reverse := c.train("the same, backwards in reverse", rank, c.job, reversed, c.opts...)
	return c.convertsTraining(o, reverse, usable, whole)
}

// ballastTraining: live ballast puts what is usable into the window in which only the split fits. Splitting saves nothing of what graphs keep, only the intermediates of a backward, of which
// those of one subforward are there at a time. So the window is narrow, and where it lies is measured: the whole call, and each part of the split as a call of its own, are run with all the
// memory that there is. The parts together need what all of them keep, and the most that one of them needs beside; and the window is from that to what the whole needs.
func ballastTraining(b *bench) error {
	c, err := b.trainingConversion(keeping(trainerrank.Stored))
	if err != nil {
		return err
	}
	rank, err := c.trainee()
	if err != nil {
		return err
	}
	whole, err := c.unsplitTraining("no ballast", rank)
	if err != nil {
		return err
	}
	split, err := priceOn(c, c.twin, c.in, whole.observed-1, c.opts...)
	if err != nil {
		return err
	}
	if split.Verdict != trainerrank.Split {
		return fmt.Errorf("the call needs %d bytes whole, and is not split for one less: give it more --tokens", whole.observed)
	}
	_, parts, err := c.parts(rank, c.job, split.SubforwardRequestIndices, c.opts...)
	if err != nil {
		return err
	}
	var kept, most int64
	for _, o := range parts {
		kept += o.kept
		most = max(most, o.observed-o.kept)
	}
	low, high := device.RoundPages(kept+most), whole.observed
	usable := (low + (high-low)/2) &^ (device.PageSize - 1)
	c.note("measured: the whole call keeps %d of %d bytes (%.3f), the %d parts together %d and the largest needs %d beside: the window is [%d, %d), %d bytes",
		whole.kept, whole.observed, float64(whole.kept)/float64(whole.observed), len(parts), kept, most, low, high, high-low)
	if usable < low || usable >= high {
		return fmt.Errorf("there is no window between %d and %d bytes: give the call more --tokens", low, high)
	}
	block, err := c.squeeze(usable)
	if err != nil {
		return err
	}
	defer block.Free()
	usable = c.dev.Free()
	c.note("ballast: %d bytes live, every page touched, %d left", block.Bytes(), usable)
	a, err := rank.Plan(c, c.in, c.opts...)
	if err != nil {
		return err
	}
	var tried, fit int64
	for i := range a.Rungs {
		if a.Rungs[i].Count == 1 {
			tried++
			fit += count(a.Rungs[i].Fits || a.Rungs[i].TotalBytes <= usable)
		}
	}
	c.atLeast(gateRungs, 1, tried)
	c.equal(gateFits, 0, fit)
	c.atMost(gateMeasured, low, a.PredictedPeakBytes)
	c.atLeast(gateWindow, low, usable)
	c.atMost(gateUnsplit, high-1, usable)
	o := c.train("ballast, in the window", rank, c.job, combined, c.opts...)
	reverse := c.train("the same, backwards in reverse", rank, c.job, reversed, c.opts...)
	return c.convertsTraining(o, reverse, usable, whole)
}

// ballastEighthTraining: with an eighth of what the training call needs whole and stored it is refused with everything stored. If its graphs may keep less it is run if it says that so
// little is enough.
func ballastEighthTraining(b *bench) error {
	c, err := b.trainingConversion(keeping(trainerrank.Stored))
	if err != nil {
		return err
	}
	rank, err := c.trainee()
	if err != nil {
		return err
	}
	block, err := c.squeeze(c.whole / 8)
	if err != nil {
		return err
	}
	defer block.Free()
	usable := c.dev.Free()
	o := c.train("an eighth, stored", rank, c.job, combined, c.opts...)
	c.refusedAs("stored: ", o, usable)
	least, err := smallest(c, c.twin, c.in, training()...)
	if err != nil {
		return err
	}
	o = c.train("the same, whatever is kept", rank, c.job, combined, training()...)
	c.equal(gateAdmitted, count(least <= usable), count(o.err == nil))
	c.equal(gateForwards, count(o.err == nil)*int64(o.tel.SubforwardCount), int64(o.forwards))
	c.equal(gateCounters, 0, count(o.changed || o.left > 0))
	block.Free()
	far := int64(0)
	if o.err == nil {
		whole, err := c.unsplitTraining("no ballast", rank)
		if err != nil {
			return err
		}
		far = apart(whole.gradient, o.gradient)
	}
	c.atMost(gateDistance, farthest, far)
	c.note("%d bytes usable; the smallest budget of the call is %d, and it was %s", usable, least, map[bool]string{true: "run, " + string(o.tel.Retention), false: "refused"}[o.err == nil])
	return nil
}
