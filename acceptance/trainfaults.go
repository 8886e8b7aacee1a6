package main

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/slots"
	"github.com/trainerrank/engine/trainerrank"
)

const (
	gateForwardFaults  = "faults put into forwards"
	gateBackwardFaults = "faults put into backwards"
	gateStopped        = "calls cancelled in forward or backward"
	gateForbiddenSteps = "backwards, steps and replacements that must be refused"
	gateAllowed        = "of these allowed, refused with another type, or with something changed"
)

var trainFaultGates = []string{gateForwardFaults, gateBackwardFaults, gateStopped, gateResumed, gateForbiddenSteps, gateAllowed, gateTyped, gateLeaked, gateAgain, gateGradients}

// faultsTraining makes training calls fail in every way that needs no fail-point: the model failing or running out of memory in each subforward's forward, failing in its backward, and backwards that are
// cancelled. Then what must not be done is tried.
func faultsTraining(b *bench) error {
	b.Tokens = max(16, b.Tokens/8) // many calls
	c, err := b.trainingConversion(training())
	if err != nil {
		return err
	}
	s := &trainingFaults{conversion: c}
	var forwards, backwards, cancelled int64
	for _, keep := range []trainerrank.Retention{trainerrank.Stored, trainerrank.Layer, trainerrank.Replay} {
		s.opts = keeping(keep)
		least, err := smallest(c, c.twin, c.in, s.opts...)
		if err != nil {
			return err
		}
		if s.rank, err = c.trainee(trainerrank.WithUsableBytes(least)); err != nil {
			return err
		}
		s.before = counters(c.dev.Stats())
		o := c.train("no fault, "+string(keep), s.rank, c.job, combined, s.opts...)
		if o.err != nil {
			return o.err
		}
		s.want = o.gradient
		k := o.tel.SubforwardCount
		for i := range k {
			for _, memory := range []bool{false, true} {
				c.model.fault = only(i, c.fault(memory))
				forwards++
				s.tries(s.Context, fmt.Sprintf("%s, a fault in the forward of subforward %d of %d", keep, i+1, k), func(what string, err error) {
					c.model.fault = nil
					var partial *trainerrank.PartialExecutionError
					var refused *trainerrank.MemoryError
					s.typed.wrong(!errors.Is(err, errInjected) || errors.As(err, &partial) != (k > 1) || k > 1 && (partial.Completed != i || errors.As(err, &refused) != memory), "%s: %v", what, err)
				})
			}
			c.model.backFault = only(i, errInjected)
			backwards++
			s.tries(s.Context, fmt.Sprintf("%s, a fault in the backward of subforward %d of %d", keep, i+1, k), func(what string, err error) {
				c.model.backFault = nil
				s.typed.wrong(!errors.Is(err, errInjected), "%s: %v", what, err)
			})
		}
		looks := &looked{Context: s, after: -1}
		s.tries(looks, string(keep)+", looked at", func(what string, err error) { s.typed.wrong(err != nil, "%s: %v", what, err) })
		n := int(looks.seen.Load())
		for _, after := range b.tries(n) {
			cancelled++
			s.tries(&looked{Context: s, after: int64(after)}, fmt.Sprintf("%s, cancelled at look %d of %d", keep, after, n), func(what string, err error) {
				s.typed.wrong(!errors.Is(err, context.Canceled), "%s: %v", what, err)
			})
		}
		s.rank.Close()
	}
	tried, allowed, err := s.refusals()
	if err != nil {
		return err
	}
	b.atLeast(gateForwardFaults, 2*3, forwards)
	b.atLeast(gateBackwardFaults, 3, backwards)
	b.atLeast(gateStopped, 3*2, cancelled)
	b.atLeast(gateResumed, backwards, s.resumed)
	b.atLeast(gateForbiddenSteps, 1, tried)
	b.gate(allowed.none(gateAllowed), s.typed.none(gateTyped), s.leaked.none(gateLeaked), s.again.none(gateAgain), s.next.none(gateGradients))
	return nil
}

// only is the fault of number i.
func only(i int, err error) func(int) error {
	return func(j int) error {
		if i == j {
			return err
		}
		return nil
	}
}

// fault is one that a model has: it fails, or its device runs out of memory.
func (l *lab) fault(memory bool) error {
	if memory {
		return &device.OutOfMemoryError{Op: "reserve", Device: l.dev.Name(), AskedBytes: 1, Err: errInjected}
	}
	return errInjected
}

// tries runs a call that is to fail, says how it ended, and sees that the next one has the right gradients.
func (s *trainingFaults) tries(ctx context.Context, what string, ended func(what string, err error)) {
	s.model.forwards, s.model.backwards = 0, 0
	s.fails(ctx, what, func(err error, panicked bool) {
		s.typed.wrong(panicked, "%s: as a panic: %v", what, err)
		ended(what, err)
	})
	o := s.train("", s.rank, s.job, combined, s.opts...)
	s.next.wrong(o.err != nil || otherBits(s.want, o.gradient) > 0, "after %s: %v", what, o.err)
	s.left("after " + what)
}

// looked is a context that ends when it is looked at so often; never if after is negative. Workers look at it too.
type looked struct {
	context.Context
	after int64
	seen  atomic.Int64
}

// Err is why it has ended.
func (l *looked) Err() error {
	if n := l.seen.Add(1); l.after >= 0 && n >= l.after {
		return context.Canceled
	}
	return l.Context.Err()
}

// refusals tries what must not be done with graphs and with checkpoints that have some: each is refused with an error of its type, and nothing is changed by it.
func (s *trainingFaults) refusals() (tried int64, allowed tally, err error) {
	s.opts = training()
	if s.rank, err = s.trainee(); err != nil {
		return 0, allowed, err
	}
	defer s.rank.Close()
	start := counters(s.dev.Stats())
	refuses := func(what string, as any, err error) {
		tried++
		allowed.wrong(err == nil || !errors.As(err, as), "%s: %v", what, err)
	}
	graph, slot := new(*trainerrank.GraphError), new(*trainerrank.SlotStateError)
	step := slots.StepOptions{Params: slots.Adam(1e-3), OnLiveGraphs: slots.Error}

	plain, err := s.rank.DPRankForward(s, s.in, trainerrank.WithCheckpoint(forward.Checkpoint(policy)))
	if err != nil {
		return tried, allowed, err
	}
	refuses("a backward of a call without gradients", graph, plain.Backward(s, s.grads))
	plain.Release()

	res, err := s.rank.DPRankForward(s, s.in, s.opts...)
	if err != nil {
		return tried, allowed, err
	}
	defer res.Release()
	before := counters(s.dev.Stats())
	refuses("too few cotangents", graph, res.Backward(s, s.grads[1:]))
	refuses("too few cotangents for a subforward", graph, res.Subforwards()[0].Backward(s, s.grads[1:]))
	refuses("unloading a checkpoint with a live graph", slot, s.rank.Checkpoints().Unload(s, policy))
	_, err = s.rank.OptimStep(s, step)
	refuses("a step without gradients", slot, err)
	allowed.wrong(counters(s.dev.Stats()) != before || live(s.rank) != 1, "the device's counters differ after what was refused")
	if err := res.Backward(s, s.grads); err != nil {
		return tried, allowed, err
	}
	refuses("a second backward", graph, res.Backward(s, s.grads))
	refuses("unloading a checkpoint with gradients", slot, s.rank.Checkpoints().Unload(s, policy))

	stale, err := s.rank.DPRankForward(s, s.in, s.opts...)
	if err != nil {
		return tried, allowed, err
	}
	defer stale.Release()
	_, err = s.rank.OptimStep(s, step)
	refuses("a step that minds live graphs", slot, err)
	got, err := takeGradient(s.rank)
	if err != nil {
		return tried, allowed, err
	}
	whole := s.train("", s.rank, s.job, combined, s.opts...)
	allowed.wrong(whole.err != nil || otherBits(whole.gradient, got) > 0, "what was refused has changed the gradients: %v", whole.err)
	err = s.add("", s.rank, s.in, s.job, combined, s.opts...).err
	step.OnLiveGraphs = slots.Allow
	report, e := s.rank.OptimStep(s, step)
	if err = errors.Join(err, e); err != nil {
		return tried, allowed, err
	}
	allowed.wrong(!report.Updated(), "a step was not made: %v", report)
	refuses("a backward of a graph whose checkpoint was stepped", graph, stale.Backward(s, s.grads))
	got, err = takeGradient(s.rank)
	allowed.wrong(err != nil || magnitude(got) != 0, "gradients are left after a step, or came from a graph before it: %v", err)
	stale.Release()
	refuses("a backward after the release", graph, stale.Backward(s, s.grads))
	res.Release()
	allowed.wrong(counters(s.dev.Stats()) != start || live(s.rank) != 0, "the device's counters differ at the end")
	return tried, allowed, nil
}
