package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"

	"github.com/trainerrank/engine/collective"
	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/internal/failpoint"
	"github.com/trainerrank/engine/trainerrank"
)

// The arms that need fail-points. A build without them does not have these arms, and says so.
const (
	armSweep = "faults fail-points"
	armTrain = "faults fail-points, training"
	armRanks = "faults fail-points, ranks"
	armFirst = "faults fail-points, first"

	noFailpoints = "faults: fail-points are not compiled in, and their arms are left out: go run -tags failpoints ./acceptance --phase faults"
)

var failpointArms = []string{armSweep, armTrain, armRanks, armFirst}

// armedPoints are the fail-points that are armed from outside, by arm: its process begins with them.
var armedPoints = map[string]string{armFirst: "device/allocate=1,device/populate=1,transformer/rehearse=1,transformer/block=1:panic,trainerrank/subforward=3"}

const (
	gateTried     = "faults at fail-points"
	gateUnhit     = "fail-points that no call comes to"
	gateOutcomes  = "calls of a rank in which a fail-point failed"
	gateGradients = "next calls with other gradients, or none"
	gateResumed   = "graphs whose backward was run after another had failed"
	gateLost      = "graphs whose gradients could not be added, and that are refused"
	gateAgain     = "failed backwards that could not be done again, or with other gradients"

	gateUnsplitFaults = "training calls that are not split in their smallest budget"
	gateRanks         = "ranks that ended otherwise than all must"
	gateFirsts        = "first failures of the process"
)

var (
	sweepGates = []string{gateTried, gateUnhit, gateTyped, gateLeaked, gateNext}
	trainGates = []string{gateTried, gateUnhit, gateUnsplitFaults, gateTyped, gateLeaked, gateResumed, gateLost, gateAgain, gateGradients}
	ranksGates = []string{gateOutcomes, gateRanks, gateLeaked, gateNext}
	firstGates = []string{gateFirsts, gateTyped, gateLeaked, gateNext}
)

// actions are what an armed fail-point does.
var actions = []struct {
	name string
	do   func(cancel func()) func(*failpoint.Error) error
}{
	{"an error", func(func()) func(*failpoint.Error) error { return failpoint.Fail }},
	{"a panic", func(func()) func(*failpoint.Error) error { return failpoint.Panic }},
	{"a cancellation", func(cancel func()) func(*failpoint.Error) error {
		return func(*failpoint.Error) error {
			cancel()
			return nil
		}
	}},
}

// hits is how often each fail-point is hit by fn.
func hits(fn func()) map[failpoint.Point]int {
	armed := map[failpoint.Point]*failpoint.Armed{}
	for _, p := range failpoint.Points() {
		armed[p] = failpoint.Arm(p, math.MaxInt, failpoint.Fail)
	}
	fn()
	failpoint.Disarm()
	n := map[failpoint.Point]int{}
	for p, a := range armed {
		n[p] = a.Hits()
	}
	return n
}

// tries are hits from 1 to n: all of few, and of many so many that are evenly spaced, the first and the last among them.
func (b *bench) tries(n int) []int {
	most := 24
	if b.Short {
		most = 6
	}
	var list []int
	for i := range min(n, most) {
		list = append(list, 1+i*(n-1)/max(1, min(n, most)-1))
	}
	return list
}

// sweep makes split calls fail at each fail-point, at its first hit, its last, and some between, in every way.
func sweep(b *bench) error {
	c, err := b.conversion()
	if err != nil {
		return err
	}
	whole, err := c.unlimited("no fault")
	if err != nil {
		return err
	}
	least, err := smallest(c, c.twin, c.in)
	if err != nil {
		return err
	}
	rank, err := c.rank(trainerrank.WithUsableBytes(least))
	if err != nil {
		return err
	}
	f := &failing{conversion: c, want: whole.digests}
	var sound *outcome
	times := hits(func() { sound = f.callIn(b, "", rank, f.in, trainerrank.AgreeAcrossRanks()) })
	if sound.err != nil {
		return sound.err
	}
	var tried, fired int64
	var unhit tally
	for _, point := range failpoint.Points() {
		n := times[point]
		other := point == failpoint.Allocate || point == failpoint.Backward || point == failpoint.Accumulate // for weights, and with gradients
		unhit.wrong(n == 0 && !other, "%s", point)
		memory := point == failpoint.Reserve || point == failpoint.Populate
		for _, action := range actions {
			if memory && action.name == "a panic" {
				continue // the operating system does not panic
			}
			for _, hit := range b.tries(n) {
				what := fmt.Sprintf("%s at hit %d of %d of %s", action.name, hit, n, point)
				ctx, cancel := context.WithCancel(b)
				armed := failpoint.Arm(point, hit, action.do(cancel))
				o, panicked := f.caught(ctx, rank)
				failpoint.Disarm()
				cancel()
				tried++
				fired += count(armed.Fired())
				switch {
				case action.name == "a cancellation" && point == failpoint.Meet && o.err == nil:
					// In a meeting after all has run there is nothing left to cancel.
					f.typed.wrong(hit < n || differing(f.want, o.digests) > 0, "%s: the call went on", what)
				case action.name == "a cancellation":
					f.typed.wrong(!errors.Is(o.err, context.Canceled), "%s: %v", what, o.err)
				default:
					f.typed.wrong(!failed(o.err, point, hit) || panicked != (action.name == "a panic"), "%s: %v, as a panic: %t", what, o.err, panicked)
				}
				if action.name == "an error" {
					var gone *collective.AbortError
					var partial *trainerrank.PartialExecutionError
					f.typed.wrong(memory != (o.refusal != nil), "%s: %v", what, o.err)
					f.typed.wrong((point == failpoint.Meet) != errors.As(o.err, &gone), "%s: %v", what, o.err)
					runs := point == failpoint.Subforward || point == failpoint.Layer || point == failpoint.Block
					f.typed.wrong(runs != errors.As(o.err, &partial), "%s: %v", what, o.err)
					f.typed.wrong(o.forwards > 0 && (memory || point == failpoint.Rehearse), "%s: %d forwards ran", what, o.forwards)
				}
				f.after(what, o, rank)
			}
		}
	}
	f.atLeast(gateTried, max(1, tried), fired)
	b.gate(unhit.none(gateUnhit), f.typed.none(gateTyped), f.leaked.none(gateLeaked), f.next.none(gateNext))
	return nil
}

// failed says whether an error comes from a hit of a fail-point.
func failed(err error, p failpoint.Point, hit int) bool {
	var e *failpoint.Error
	return errors.As(err, &e) && e.Point == p && e.N == hit
}

// caught runs the call as ranks that agree do, and makes a panic the outcome.
func (f *failing) caught(ctx context.Context, rank *trainerrank.TrainerRank) (o *outcome, panicked bool) {
	before := counters(f.dev.Stats())
	err, panicked := caught(func() error {
		o = f.callIn(ctx, "", rank, f.in, trainerrank.AgreeAcrossRanks())
		return nil
	})
	if panicked {
		o = &outcome{err: err, changed: counters(f.dev.Stats()) != before}
	}
	return o, panicked
}

// sweepTraining makes training calls fail at each fail-point, in their forward and in their backward, and in every way, whatever their graphs keep. A backward that has failed leaves what it has not
// done: it is done then, one subforward after the other, and what it adds up to must have the bits of a backward that did not fail. Only if gradients could not be added to those of the
// checkpoint they are lost, and another backward of that graph is refused.
func sweepTraining(b *bench) error {
	b.Tokens = max(16, b.Tokens/8) // many calls
	c, err := b.trainingConversion(training())
	if err != nil {
		return err
	}
	s := &trainingFaults{conversion: c, hits: map[failpoint.Point]int{}}
	var split tally
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
		times := hits(func() { o = c.train("", s.rank, c.job, combined, s.opts...) })
		if o.err != nil {
			return o.err
		}
		s.want = o.gradient
		split.wrong(o.tel.SubforwardCount < 2, "%s: the call is whole in its smallest budget", keep)
		for _, point := range failpoint.Points() {
			s.hits[point] += times[point]
			for _, action := range actions {
				if action.name == "a panic" && (point == failpoint.Reserve || point == failpoint.Populate) {
					continue // the operating system does not panic
				}
				for _, hit := range b.tries(times[point]) {
					what := fmt.Sprintf("%s, %s at hit %d of %d of %s", keep, action.name, hit, times[point], point)
					ctx, cancel := context.WithCancel(b)
					armed := failpoint.Arm(point, hit, action.do(cancel))
					s.tried++
					s.fails(ctx, what, func(err error, panicked bool) {
						failpoint.Disarm()
						cancel()
						s.fired += count(armed.Fired())
						switch {
						case action.name == "a cancellation" && point == failpoint.Accumulate && armed.Fired():
							// The last one, when all is done: nothing is left to be cancelled.
							s.typed.wrong(err != nil && !errors.Is(err, context.Canceled), "%s: %v", what, err)
						case action.name == "a cancellation":
							s.typed.wrong(!errors.Is(err, context.Canceled), "%s: %v", what, err)
						default:
							s.typed.wrong(!failed(err, point, hit) || panicked != (action.name == "a panic"), "%s: %v, as a panic: %t", what, err, panicked)
						}
					})
					o := c.train("", s.rank, c.job, combined, s.opts...)
					s.next.wrong(o.err != nil || otherBits(s.want, o.gradient) > 0, "after %s: %v", what, o.err)
					s.left("after " + what)
				}
			}
		}
		s.rank.Close()
	}
	var unhit tally
	for _, point := range failpoint.Points() {
		unhit.wrong(s.hits[point] == 0 && point != failpoint.Allocate, "%s", point) // which is for weights
	}
	b.atLeast(gateTried, max(1, s.tried), s.fired)
	b.atLeast(gateResumed, max(1, s.tried/8), s.resumed)
	b.atLeast(gateLost, 1, s.lost)
	b.gate(unhit.none(gateUnhit), split.none(gateUnsplitFaults), s.typed.none(gateTyped), s.leaked.none(gateLeaked), s.again.none(gateAgain), s.next.none(gateGradients))
	return nil
}

// trainingFaults is the arm of training calls that fail, under way.
type trainingFaults struct {
	*conversion
	opts   []trainerrank.CallOption // of the present retention
	rank   *trainerrank.TrainerRank
	before held
	want   []float32
	hits   map[failpoint.Point]int

	tried, fired, resumed, lost int64
	typed, leaked, again, next  tally
}

// left checks that nothing is left of a call once it is released.
func (s *trainingFaults) left(what string) {
	s.leaked.wrong(live(s.rank) != 0, "%s: %d graphs are live", what, live(s.rank))
	s.leaked.wrong(counters(s.dev.Stats()) != s.before, "%s: the device's counters differ", what)
}

// fails runs a call and its backward, says how that ended, does what the backward has not done, and releases what there is.
func (s *trainingFaults) fails(ctx context.Context, what string, ended func(err error, panicked bool)) {
	var res *trainerrank.Result
	var inUse device.Sizes
	err, panicked := caught(func() (err error) {
		if res, err = s.rank.DPRankForward(ctx, s.in, s.opts...); err != nil {
			return err
		}
		inUse = s.dev.Stats().InUse
		return combined(ctx, s.job, res)
	})
	ended(err, panicked)
	defer s.left(what)
	if res == nil {
		_, err := takeGradient(s.rank)
		s.again.wrong(err != nil, "%s: %v", what, err)
		return
	}
	defer res.Release()
	now := s.dev.Stats().InUse
	s.leaked.wrong(now[device.Scratch] != inUse[device.Scratch] || now[device.Outputs] != inUse[device.Outputs] || now[device.Retained] > inUse[device.Retained],
		"%s: after the backward %v is in use, %v was before it", what, now, inUse)
	lost := false
	for _, sub := range res.Subforwards() {
		err := sub.Backward(s, s.only(sub.RequestIndices).grads)
		var used *trainerrank.GraphError
		switch {
		case err == nil:
			s.resumed++
		case errors.As(err, &used) && used.Reason == "its backward was run already":
		case errors.As(err, &used) && strings.Contains(used.Reason, "gradients are lost"):
			s.lost++
			lost = true
		default:
			s.again.wrong(true, "another backward after %s: %v", what, err)
		}
	}
	got, err := takeGradient(s.rank)
	s.again.wrong(err != nil || !lost && otherBits(s.want, got) > 0, "%s, and another backward: other gradients, %v", what, err)
}

// caught makes a panic an error.
func caught(fn func() error) (err error, panicked bool) {
	defer func() {
		if p := recover(); p != nil {
			cause, _ := p.(error)
			err, panicked = fmt.Errorf("panic: %w", cause), true
		}
	}()
	return fn(), false
}

// sweepRanks makes each collective of ranks that agree on the outcome fail on one of them: none may wait for ever, and all must fail.
func sweepRanks(b *bench) error {
	const ranks = 3
	twin, err := b.openModel(1)
	if err != nil {
		return err
	}
	in := forward.Many(workload(twin.Spec().Vocabulary, b.Requests, b.Tokens)...)
	a, err := priceOn(b, twin, in, ample)
	if err != nil {
		return err
	}
	labs := make([]*lab, ranks)
	var want []string
	for i := range labs {
		if labs[i], err = b.lab(1, a.PredictedPeakBytes); err != nil {
			return err
		}
		if i > 0 {
			continue
		}
		rank, err := labs[0].rank()
		if err != nil {
			return err
		}
		o := labs[0].call("one rank alone", rank, in)
		if o.err != nil {
			return o.err
		}
		want = o.digests
	}
	// run makes the call on new ranks. Of one that panics there is no outcome.
	run := func() ([]*outcome, error) {
		outcomes := make([]*outcome, ranks)
		return outcomes, collective.Run(ranks, func(w collective.World) error {
			rank, err := labs[w.Rank()].rank(trainerrank.WithWorld(w))
			if err == nil {
				outcomes[w.Rank()] = labs[w.Rank()].call("", rank, in, trainerrank.AgreeAcrossRanks())
			}
			return err
		})
	}
	var fired int64
	var wrong, leaked, next tally
	n := hits(func() {
		outcomes, err := run()
		next.wrong(err != nil || outcomes[0].err != nil, "a call without a fault: %v", err)
	})[failpoint.Meet]
	before := make([]held, ranks)
	for i, l := range labs {
		before[i] = counters(l.dev.Stats())
	}
	for hit := 1; hit <= n; hit++ {
		for _, action := range actions[:2] {
			what := fmt.Sprintf("%s at hit %d of %d of %s", action.name, hit, n, failpoint.Meet)
			armed := failpoint.Arm(failpoint.Meet, hit, action.do(nil))
			outcomes, err := run()
			failpoint.Disarm()
			fired += count(armed.Fired())
			panicked := 0
			for i, o := range outcomes {
				if o == nil {
					panicked++
				} else {
					var gone *collective.AbortError
					wrong.wrong(!errors.As(o.err, &gone) || !failed(o.err, failpoint.Meet, hit), "%s, rank %d: %v", what, i, o.err)
				}
				leaked.wrong(counters(labs[i].dev.Stats()) != before[i], "%s, rank %d: the device's counters differ", what, i)
			}
			wrong.wrong(panicked != int(count(action.name == "a panic")) || (err != nil) != (panicked > 0), "%s: %d ranks panic: %v", what, panicked, err)
			outcomes, err = run()
			for i, o := range outcomes {
				next.wrong(err != nil || o == nil || o.err != nil || differing(want, o.digests) > 0, "after %s, rank %d: %v", what, i, err)
			}
		}
	}
	b.atLeast(gateOutcomes, max(1, int64(2*n)), fired)
	b.gate(wrong.none(gateRanks), leaked.none(gateLeaked), next.none(gateNext))
	return nil
}

// firstOfAll is a process in which, by its environment, the first allocation fails, the first rehearsal, the first reservation, a worker in the first pass, and
// in the next call the second subforward. After each failure the same is tried again, until the call gives its answers.
func firstOfAll(b *bench) error {
	m, err := b.openModel(b.Threads)
	if err != nil {
		return err
	}
	capacity := b.Capacity
	if capacity == 0 {
		capacity = m.WeightBytes() + firstRoom
	}
	dev, err := device.NewHost(capacity)
	if err != nil {
		return err
	}
	list := workload(m.Spec().Vocabulary, b.Requests, b.Tokens)
	f := &failing{conversion: &conversion{lab: &lab{bench: b, dev: dev, model: &spy{Model: m}}, in: forward.Many(list...), job: job{list: list}}}
	var firsts int64
	first := func(what string, err error, p failpoint.Point, hit int, as any) {
		firsts += count(failed(err, p, hit))
		f.typed.wrong(!failed(err, p, hit) || as != nil && !errors.As(err, as), "%s: %v", what, err)
	}

	first("the first allocation", m.Place(dev), failpoint.Allocate, 1, new(*device.OutOfMemoryError))
	f.leaked.wrong(counters(dev.Stats()) != held{} || dev.Free() != dev.Capacity(), "the first allocation: the device's counters differ")
	if err := m.Place(dev); err != nil {
		return err
	}
	if err := m.Load(b, 0, nil); err != nil {
		return err
	}
	_, err = smallest(b, f.model, f.in)
	first("the first rehearsal", err, failpoint.Rehearse, 1, nil)
	least, err := smallest(b, f.model, f.in)
	if err != nil {
		return err
	}
	rank, err := f.rank(trainerrank.WithUsableBytes(least))
	if err != nil {
		return err
	}
	for _, c := range []struct {
		what  string
		point failpoint.Point
		hit   int
		as    any
	}{
		{"the first reservation", failpoint.Populate, 1, new(*trainerrank.MemoryError)},
		{"the first block of rows", failpoint.Block, 1, nil},
		{"the second subforward", failpoint.Subforward, 3, new(*trainerrank.PartialExecutionError)},
	} {
		o, panicked := f.caught(b, rank)
		first(c.what, o.err, c.point, c.hit, c.as)
		f.typed.wrong(panicked != (c.point == failpoint.Block), "%s, as a panic: %t", c.what, panicked)
		f.leaked.wrong(o.changed, "%s: the device's counters differ", c.what)
	}
	o := f.call("after the failures", rank, f.in)
	whole, err := f.unlimited("with room")
	if err != nil {
		return err
	}
	f.next.wrong(o.err != nil || o.tel.SubforwardCount < 2 || differing(whole.digests, o.digests) > 0, "the call after: %v", o.err)
	f.leaked.wrong(o.changed, "the call after: the device's counters differ")
	b.equal(gateFirsts, 5, firsts)
	b.gate(f.typed.none(gateTyped), f.leaked.none(gateLeaked), f.next.none(gateNext))
	return nil
}

// firstRoom is what the device of [firstOfAll] has beside the weights unless a capacity is stated. The call cannot be priced before: that is the first rehearsal.
const firstRoom = 1 << 30
