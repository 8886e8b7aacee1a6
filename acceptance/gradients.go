package main

import (
	"fmt"
	"math"
	"slices"

	"gorgonia.org/tensor"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/forward/prefixtree"
	"github.com/trainerrank/engine/trainerrank"
)

const (
	gateGradKept    = "gradients with other bits where less is kept, elements"
	gateGradThreads = "gradients with other bits on another number of threads, elements"
	gateGradSplits  = "farthest gradients of a split, billionths of their norm"
	gateGradLayouts = "farthest gradients in another layout, billionths of their norm"
	gateGradOrders  = "farthest gradients in another order and nesting, billionths of their norm"
	gateGradBits    = "calls with answers of other bits than the first"
	gateNonZero     = "unsplit gradients that are not zero"
	gateSlope       = "farthest gradients from how the outputs change, millionths"
	gateLayouts     = "calls that were laid out otherwise"
)

var gradientGates = []string{gateGradKept, gateGradThreads, gateGradSplits, gateGradLayouts, gateGradOrders, gateSlope, gateGradBits, gateNonZero, gateCalls, gateSplit, gateLayouts, gateFailed, gateGraphsLeft, gateCounters}

// steepest is how far, in millionths, the norm of a gradient may lie from the slope of the outputs along it, which is taken over a short way and from float32 values.
const steepest = 5000

// layouts are tables of costs by which calls are laid out otherwise than by the engine's own: it would share every prefix, since only tokens cost something.
var layouts = []prefixtree.Table{
	{Name: "no segments", Coefficients: prefixtree.Coefficients{Token: 1, Segment: 1 << 30}},
	{Name: "no short segments", Coefficients: prefixtree.Coefficients{Token: 1, Short: 1 << 30, ShortBelow: 32}},
	{Name: "no levels", Coefficients: prefixtree.Coefficients{Token: 1, Level: 1 << 30}},
}

// invariantGradients runs random calls that train in every way. In one plan gradients have the same bits whatever is kept for them and however many threads there are; in another layout, split or order
// of the requests they are sums in another order. Answers have the same bits in all.
func invariantGradients(b *bench) error {
	sets := 8
	if b.Short {
		sets = 2
	}
	var kept, threads, bits, failed, leases, changed tally
	var calls, split, other, norm int64
	var far struct{ splits, layouts, orders, slope int64 }
	type firsts struct {
		whole []float32
		parts [][]int // of a split that was made on the first number of threads
		split []float32
	}
	first := make([]firsts, sets)
	for turn, n := range []int{1, b.Threads, b.Threads + 1} {
		twin, err := b.openModel(n)
		if err != nil {
			return err
		}
		bytes, err := policyBytes(twin)
		if err != nil {
			return err
		}
		jobs := make([]job, sets)
		var need int64
		for s := range jobs {
			jobs[s] = drawTraining(uint64(300+s), twin.Spec(), b.Requests, b.Tokens)
			a, err := priceOn(b, twin, forward.Many(jobs[s].list...), ample, training()...)
			if err != nil {
				return err
			}
			need = max(need, a.PredictedPeakBytes)
		}
		l, err := b.lab(n, need+3*bytes)
		if err != nil {
			return err
		}
		rank, err := l.trainee()
		if err != nil {
			return err
		}
		var want *outcome
		ran := func(what string, o *outcome) *outcome {
			calls++
			failed.wrong(o.err != nil, "%s: %v", what, o.err)
			leases.wrong(o.left != 0, "%s: %d graphs", what, o.left)
			changed.wrong(o.changed, "%s", what)
			split += count(o.err == nil && o.tel.SubforwardCount > 1)
			if want != nil && o.err == nil {
				bits.wrong(differing(want.digests, o.digests) > 0, "%s", what)
			}
			return o
		}
		compare := func(t *tally, what string, want, got []float32) {
			if n := otherBits(want, got); n > 0 {
				t.wrong(true, "%s", what)
				t.n += n - 1
			}
		}
		for s, j := range jobs {
			r := random(uint64(400 + s))
			at := fmt.Sprintf("set %d on %d threads", s, n)
			title := func(what string) string {
				if s > 0 || turn > 0 {
					return ""
				}
				return what
			}
			want = nil
			whole := ran(at, l.train(title("whole"), rank, j, combined, keeping(trainerrank.Stored)...))
			if want = whole; whole.err != nil {
				continue
			}
			norm += count(magnitude(whole.gradient) > 0)
			for _, keep := range []trainerrank.Retention{trainerrank.Layer, trainerrank.Replay} {
				o := ran(at+", "+string(keep), l.train(title("whole"), rank, j, combined, keeping(keep)...))
				compare(&kept, at+", "+string(keep), whole.gradient, o.gradient)
			}
			if turn == 0 {
				first[s].whole = whole.gradient
				off, err := l.slope(rank, j, whole.gradient)
				if err != nil {
					return err
				}
				far.slope = max(far.slope, off)
			} else {
				compare(&threads, at, first[s].whole, whole.gradient)
			}

			// A split, whatever it keeps, and the same parts on this number of threads as on the first.
			least, err := smallest(b, l.model, forward.Many(j.list...), training()...)
			if err != nil {
				return err
			}
			stored, err := smallest(b, l.model, forward.Many(j.list...), keeping(trainerrank.Stored)...)
			if err != nil {
				return err
			}
			for i, usable := range []int64{least, stored, least + (stored-least)/2, whole.tel.PredictedPeakBytes - 1} {
				if usable < least {
					continue // it is never split
				}
				small, err := l.trainee(trainerrank.WithUsableBytes(usable))
				if err != nil {
					return err
				}
				run := combined
				if i%2 == 1 {
					run = reversed
				}
				o := ran(fmt.Sprintf("%s in %d bytes", at, usable), l.train(title("less memory"), small, j, run, training()...))
				small.Close()
				far.splits = max(far.splits, apart(whole.gradient, o.gradient))
				if i > 0 || o.err != nil {
					continue
				}
				if turn == 0 {
					first[s].parts = o.tel.SubforwardRequestIndices
				}
				same, _, err := l.parts(rank, j, o.tel.SubforwardRequestIndices, keeping(trainerrank.Stored)...)
				if err != nil {
					return err
				}
				compare(&kept, fmt.Sprintf("%s, %s in %d subforwards", at, o.tel.Retention, o.tel.SubforwardCount), same, o.gradient)
			}
			got, _, err := l.parts(rank, j, first[s].parts, keeping(trainerrank.Stored)...)
			if err != nil {
				return err
			}
			if turn == 0 {
				first[s].split = got
			} else {
				compare(&threads, at+", in parts", first[s].split, got)
			}

			for k := range 2 {
				order := r.Perm(len(j.list))
				moved := j.only(order)
				seed := r.Uint64()
				o := ran(fmt.Sprintf("%s, order %d", at, k), unmoved(l.trainOn(title("another order"), rank, nested(random(seed), moved.list), moved, combined, training()...), order))
				far.orders = max(far.orders, apart(whole.gradient, o.gradient))
			}
			for i := range layouts {
				laid, err := l.trainee(trainerrank.WithCostTables(layouts[i]))
				if err != nil {
					return err
				}
				what := at + ", " + layouts[i].Name
				o := ran(what, l.train(title(layouts[i].Name), laid, j, combined, training()...))
				laid.Close()
				far.layouts = max(far.layouts, apart(whole.gradient, o.gradient))
				other += count(o.err == nil && o.tel.PackedTokens != whole.tel.PackedTokens)
			}
		}
		if s := l.dev.Stats().InUse; s[device.Outputs] != 0 || s[device.Retained] != 0 {
			changed.wrong(true, "%v is left", s)
		}
		if err := b.close(); err != nil {
			return err
		}
	}
	b.gate(kept.none(gateGradKept), threads.none(gateGradThreads), bits.none(gateGradBits), failed.none(gateFailed), leases.none(gateGraphsLeft), changed.none(gateCounters))
	b.atMost(gateSlope, steepest, far.slope)
	b.atMost(gateGradSplits, farthest, far.splits)
	b.atMost(gateGradLayouts, farthest, far.layouts)
	b.atMost(gateGradOrders, farthest, far.orders)
	b.atLeast(gateNonZero, int64(3*sets), norm)
	b.atLeast(gateCalls, int64(3*sets*8), calls)
	b.atLeast(gateSplit, int64(sets), split)
	b.atLeast(gateLayouts, int64(sets), other)
	return nil
}

// slope says how far the gradient's norm lies from what moving the policy along it does to the sum of outputs and cotangents, in millionths. All else here compares gradients with gradients.
func (l *lab) slope(rank *trainerrank.TrainerRank, j job, gradient []float32) (int64, error) {
	a, err := rank.Checkpoints().Adapter(policy)
	if err != nil {
		return 0, err
	}
	params := a.Params.F32()
	start := slices.Clone(params)
	defer copy(params, start)
	norm := 0.0
	for _, g := range gradient {
		norm += float64(g) * float64(g)
	}
	norm = math.Sqrt(norm)
	const way = 1.0 / 1024
	at := func(way float64) (sum float64, err error) {
		for i := range params {
			params[i] = float32(float64(start[i]) + way*float64(gradient[i])/norm)
		}
		o := l.callAnd(l, "", rank, forward.Many(j.list...), func(res *trainerrank.Result, _ *outcome) { sum = weighed(res.Outputs.Flat(), j.grads) },
			trainerrank.WithCheckpoint(forward.Checkpoint(policy)))
		return sum, o.err
	}
	up, err := at(way)
	if err != nil {
		return 0, err
	}
	down, err := at(-way)
	if err != nil {
		return 0, err
	}
	if off := math.Abs((up-down)/(2*way)/norm-1) * 1e6; off < 1e18 {
		return int64(math.Ceil(off)), nil
	}
	return math.MaxInt64, nil // NaN too
}

// weighed is the sum of all outputs, each times its cotangent.
func weighed(outputs []*forward.Output, grads []forward.OutputGrad) (sum float64) {
	add := func(t *tensor.Dense, c []float32) {
		if len(c) == 0 {
			return
		}
		values, ok := t.Data().([]float32)
		if !ok {
			values = []float32{t.Data().(float32)}
		}
		for i, v := range values {
			sum += float64(v) * float64(c[i])
		}
	}
	for i, o := range outputs {
		add(o.TargetLogprobs, grads[i].TargetLogprobs)
		add(o.Logits, grads[i].Logits)
		add(o.HiddenStates, grads[i].HiddenStates)
	}
	return sum
}

// unmoved puts answers of inputs that were given in another order into that of the inputs.
func unmoved(o *outcome, order []int) *outcome {
	if len(o.digests) == len(order) {
		back := make([]string, len(order))
		for i, j := range order {
			back[j] = o.digests[i]
		}
		o.digests = back
	}
	return o
}

// drawTraining draws the requests of a random call that trains, some of which keep no graph, and cotangents for those that do. There is a gradient.
func drawTraining(seed uint64, spec forward.Spec, n, longest int) job {
	r := random(seed)
	j := job{list: draw(r, spec.Vocabulary, n, longest)}
	first := &j.list[0]
	first.HiddenStates = true // whatever else it wants: not all outputs have cotangents
	for i := 1; i < len(j.list); i++ {
		if r.IntN(6) == 0 {
			j.list[i].Grad = forward.NoGrad
		}
	}
	j.grads = cotangents(r, spec, j.list)
	return j
}
