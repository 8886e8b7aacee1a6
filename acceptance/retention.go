package main

import (
	"fmt"

	"github.com/trainerrank/engine/trainerrank"
)

const (
	gateRetained   = "calls that kept otherwise than the budget calls for, or not at all"
	gateLayers     = "calls that kept the inputs of layers"
	gateReplays    = "calls that kept nothing"
	gateRetSplit   = "of these split"
	gateStoredBits = "gradients with other bits than those of stored activations, elements"
	gateWholeBits  = "gradients of the unsplit call with other bits where less is kept, elements"
	gateForbidden  = "calls that may not keep less and were not refused before anything ran"
	gateAway       = "farthest gradients from the unsplit, billionths of their norm"
	gateAnswers    = "calls with answers of other bits than the unsplit"
	gateGraphsLeft = "calls after which a graph is live"
)

var retentionGates = []string{gateRetained, gateLayers, gateReplays, gateRetSplit, gatePromise, gateOver, gateAnswers, gateStoredBits, gateWholeBits, gateAway, gateGradient, gateForbidden, gateGraphsLeft, gateCounters}

// retention: a training call that fits in no split while its activations are stored is run with the inputs of layers kept, and one that does not fit so with nothing kept. That changes no
// bit of its gradients, which is seen by running the same parts on a device with room for everything. A caller who forbids it is refused.
func retention(b *bench) error {
	c, err := b.trainingConversion(training())
	if err != nil {
		return err
	}
	big, err := c.trainee()
	if err != nil {
		return err
	}
	whole, err := c.unsplitTraining("room for everything", big)
	if err != nil {
		return err
	}
	c.atLeast(gateGradient, 1, magnitude(whole.gradient))
	least := map[trainerrank.Retention]int64{}
	var other, rung, promise, over, answers, bits, forbidden, leases, changed tally
	for _, keep := range []trainerrank.Retention{trainerrank.Stored, trainerrank.Layer, trainerrank.Replay} {
		if least[keep], err = smallest(c, c.twin, c.in, keeping(keep)...); err != nil {
			return err
		}
		o := c.train("room, "+string(keep), big, c.job, combined, keeping(keep)...)
		if o.err != nil {
			return o.err
		}
		other.n += otherBits(whole.gradient, o.gradient)
		other.wrong(o.tel.Retention != keep, "asked for %s, and %s was kept", keep, o.tel.Retention)
		answers.wrong(differing(whole.digests, o.digests) > 0, "whole, %s", keep)
	}
	c.note("the smallest budgets: stored %d bytes, layer %d, replay %d; whole and stored %d", least[trainerrank.Stored], least[trainerrank.Layer], least[trainerrank.Replay], c.whole)
	if least[trainerrank.Layer] >= least[trainerrank.Stored] || least[trainerrank.Replay] >= least[trainerrank.Layer] {
		return fmt.Errorf("keeping less does not need less: give the call more --tokens")
	}
	far := int64(0)
	kept := map[trainerrank.Retention]int64{}
	split := int64(0)
	for _, t := range []struct {
		title  string
		usable int64
		want   trainerrank.Retention
		only   []trainerrank.Retention // with which it is refused
	}{
		{"stored lacks a byte", least[trainerrank.Stored] - 1, trainerrank.Layer, []trainerrank.Retention{trainerrank.Stored}},
		{"the least of layer", least[trainerrank.Layer], trainerrank.Layer, []trainerrank.Retention{trainerrank.Stored}},
		{"layer lacks a byte", least[trainerrank.Layer] - 1, trainerrank.Replay, []trainerrank.Retention{trainerrank.Stored, trainerrank.Layer}},
		{"the least of replay", least[trainerrank.Replay], trainerrank.Replay, []trainerrank.Retention{trainerrank.Stored, trainerrank.Layer}},
	} {
		rank, err := c.trainee(trainerrank.WithUsableBytes(t.usable))
		if err != nil {
			return err
		}
		what := fmt.Sprintf("%s: %d bytes", t.title, t.usable)
		o := c.train(t.title, rank, c.job, combined, training()...)
		rung.wrong(o.err != nil || o.tel.Retention != t.want, "%s: %s instead of %s, %v", what, o.tel.Retention, t.want, o.err)
		changed.wrong(o.changed, "%s", what)
		leases.wrong(o.left != 0, "%s: %d", what, o.left)
		refused := c.train("", rank, c.job, combined, keeping(t.only...)...)
		forbidden.wrong(refused.refusal == nil || refused.forwards > 0 || refused.taken > 0 || refused.changed || wording(refused.err).n > 0, "%s, only %v: %v", what, t.only, refused.err)
		rank.Close()
		if o.err != nil {
			continue
		}
		kept[o.tel.Retention]++
		split += count(o.tel.SubforwardCount > 1)
		promise.wrong(o.observed != o.tel.PredictedPeakBytes || o.tel.PredictedPeakBytes > t.usable || o.told != o.observed,
			"%s: predicted %d, observed %d, said to be %d", what, o.tel.PredictedPeakBytes, o.observed, o.told)
		over.wrong(o.taken > t.usable, "%s: took %d", what, o.taken)
		answers.wrong(differing(whole.digests, o.digests) > 0, "%s", what)
		far = max(far, apart(whole.gradient, o.gradient))
		stored, _, err := c.parts(big, c.job, o.tel.SubforwardRequestIndices, keeping(trainerrank.Stored)...)
		if err != nil {
			return err
		}
		if n := otherBits(stored, o.gradient); n > 0 {
			bits.wrong(true, "%s, %s in %d subforwards", what, o.tel.Retention, o.tel.SubforwardCount)
			bits.n += n - 1
		}
		c.note("%s: %s, %d subforwards, predicted %d, observed %d, in use after the forward %d", what, o.tel.Retention, o.tel.SubforwardCount, o.tel.PredictedPeakBytes, o.observed, o.kept)
	}
	b.gate(rung.none(gateRetained), promise.none(gatePromise), over.none(gateOver), answers.none(gateAnswers), bits.none(gateStoredBits), other.none(gateWholeBits),
		forbidden.none(gateForbidden), leases.none(gateGraphsLeft), changed.none(gateCounters))
	b.atLeast(gateLayers, 2, kept[trainerrank.Layer])
	b.atLeast(gateReplays, 2, kept[trainerrank.Replay])
	b.atLeast(gateRetSplit, 2, split)
	b.atMost(gateAway, farthest, far)
	return nil
}
