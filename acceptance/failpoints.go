package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/trainerrank/engine/collective"
	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/internal/failpoint"
	"github.com/trainerrank/engine/slots"
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
	gateRanks     = "ranks that ended otherwise than all must"
	gateFirsts    = "first failures of the process"
)

var (
	sweepGates = []string{gateTried, gateUnhit, gateTyped, gateLeaked, gateNext}
	trainGates = []string{gateTried, gateUnhit, gateTyped, gateLeaked, gateGradients}
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
		other := point == failpoint.Allocate || point == failpoint.Backward // for weights, and with gradients
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
				case action.name == "a cancellation" && point == failpoint.Meet && hit == n:
					// The ranks meet once more when all has run. There is nothing left to cancel.
					f.typed.wrong(o.err != nil || differing(f.want, o.digests) > 0, "%s: %v", what, o.err)
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
	defer func() {
		if p := recover(); p != nil {
			err, _ := p.(error)
			o, panicked = &outcome{err: fmt.Errorf("panic: %w", err), changed: counters(f.dev.Stats()) != before}, true
		}
	}()
	return f.callIn(ctx, "", rank, f.in, trainerrank.AgreeAcrossRanks()), false
}

// trainLab is where a call is run forward and backward, in as many subforwards as may be.
type trainLab struct {
	*lab
	rank  *trainerrank.TrainerRank
	in    forward.Inputs
	grads []forward.OutputGrad
}

// trained is the checkpoint that is trained.
const trained = "trained"

// withAdapter makes a rank that trains a fresh adapter on every projection.
func withAdapter(ctx context.Context, m forward.Model, opts ...trainerrank.Option) (*trainerrank.TrainerRank, error) {
	rank, err := trainerrank.New(m, opts...)
	if err != nil {
		return nil, err
	}
	if err := rank.CreateCheckpoint(ctx, trained, slots.Config{Rank: 4, Alpha: 8, TargetPattern: slots.AllLinear, Seed: 1}); err != nil {
		rank.Close()
		return nil, err
	}
	return rank, nil
}

// training are the options of a call that trains.
func training() []trainerrank.CallOption {
	return []trainerrank.CallOption{trainerrank.WithGradMode(forward.WithGrad), trainerrank.WithCheckpoint(forward.Checkpoint(trained))}
}

// trainLab prices the training of the workload on a device that nothing else is on, and loads the model onto one with room for it in the smallest budget.
func (b *bench) trainLab() (*trainLab, error) {
	twin, err := b.openModel(b.Threads)
	if err != nil {
		return nil, err
	}
	s := &trainLab{}
	list := workload(twin.Spec().Vocabulary, b.Requests, b.Tokens)
	for _, in := range list {
		s.grads = append(s.grads, forward.OutputGrad{TargetLogprobs: slices.Repeat([]float32{-1}, len(in.Targets))})
	}
	s.in = forward.Many(list...)
	nowhere, err := device.NewHost(ample)
	if err != nil {
		return nil, err
	}
	price, err := withAdapter(b, twin, trainerrank.WithDevice(nowhere))
	if err != nil {
		return nil, err
	}
	defer price.Close()
	a, err := price.Plan(b, s.in, training()...)
	if err != nil {
		return nil, err
	}
	if s.lab, err = b.lab(b.Threads, a.SmallestBudgetBytes+nowhere.Stats().Allocated); err != nil {
		return nil, err
	}
	if s.rank, err = withAdapter(b, s.model, trainerrank.WithUsableBytes(a.SmallestBudgetBytes)); err != nil {
		return nil, err
	}
	b.closers = append([]func() error{func() error { s.rank.Close(); return nil }}, b.closers...) // before the model
	return s, nil
}

// train runs the call and its backward, and releases what it has. It gives the gradients, and whether the call was split.
func (s *trainLab) train(ctx context.Context) (sum []float32, split bool, err error) {
	res, err := s.rank.DPRankForward(ctx, s.in, training()...)
	if err != nil {
		return nil, false, err
	}
	defer res.Release()
	if err := res.Backward(ctx, s.grads); err != nil {
		return nil, false, err
	}
	mem, err := s.rank.Checkpoints().Gradients(trained)
	if err != nil {
		return nil, false, err
	}
	return slices.Clone(mem.F32()), res.Telemetry.SubforwardCount > 1, nil
}

// sweepTraining is [sweep] for a call with gradients and its backward.
func sweepTraining(b *bench) error {
	s, err := b.trainLab()
	if err != nil {
		return err
	}
	before := counters(s.dev.Stats())
	var want []float32
	var split bool
	times := hits(func() { want, split, err = s.train(b) })
	if err != nil {
		return err
	}
	if !split {
		b.note("the training call is whole in its smallest budget: give it more --requests for a split")
	}
	var tried, fired int64
	var unhit, typed, leaked, next tally
	after := func(what string) {
		info, err := s.rank.Checkpoints().Info(trained)
		leaked.wrong(err != nil || info.Live != 0, "%s: %d leases of the checkpoint: %v", what, info.Live, err)
		leaked.wrong(counters(s.dev.Stats()) != before, "%s: the device's counters differ", what)
		err = s.rank.ZeroGrad(trained)
		next.wrong(err != nil, "%s: %v", what, err)
	}
	after("a call without a fault")
	for _, point := range failpoint.Points() {
		n := times[point]
		unhit.wrong(n == 0 && point != failpoint.Allocate, "%s", point) // which is for weights
		for _, action := range actions {
			if action.name == "a panic" && (point == failpoint.Reserve || point == failpoint.Populate) {
				continue
			}
			for _, hit := range b.tries(n) {
				what := fmt.Sprintf("%s at hit %d of %d of %s", action.name, hit, n, point)
				ctx, cancel := context.WithCancel(b)
				armed := failpoint.Arm(point, hit, action.do(cancel))
				var err error
				panicked := false
				func() {
					defer func() {
						if p := recover(); p != nil {
							cause, _ := p.(error)
							err, panicked = fmt.Errorf("panic: %w", cause), true
						}
					}()
					_, _, err = s.train(ctx)
				}()
				failpoint.Disarm()
				cancel()
				tried++
				fired += count(armed.Fired())
				if action.name == "a cancellation" {
					typed.wrong(!errors.Is(err, context.Canceled), "%s: %v", what, err)
				} else {
					typed.wrong(!failed(err, point, hit) || panicked != (action.name == "a panic"), "%s: %v, as a panic: %t", what, err, panicked)
				}
				after(what)
				sum, _, err := s.train(b)
				next.wrong(err != nil || !slices.Equal(sum, want), "after %s: %v", what, err)
				after("after " + what)
			}
		}
	}
	b.atLeast(gateTried, max(1, tried), fired)
	b.gate(unhit.none(gateUnhit), typed.none(gateTyped), leaked.none(gateLeaked), next.none(gateGradients))
	return nil
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
