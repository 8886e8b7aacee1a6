package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/slots"
	"github.com/trainerrank/engine/trainerrank"
)

// policy is the checkpoint that calls with gradients train: an adapter on every projection.
const policy = "policy"

var policyConfig = slots.Config{Rank: 4, Alpha: 8, TargetPattern: slots.AllLinear, Seed: 1}

// fewThreads bounds the threads of arms in which training calls are split: each thread has a workspace, and with many of them these outweigh what a split can save.
const fewThreads = 8

// farthest is how far gradients of one call may lie apart in two plans, in billionths of their norm: a shared prefix adds those of its branches in another order.
const farthest = 10000

// training are the options of a call whose inputs train the policy.
func training(more ...trainerrank.CallOption) []trainerrank.CallOption {
	return append([]trainerrank.CallOption{trainerrank.WithGradMode(forward.WithGrad), trainerrank.WithCheckpoint(forward.Checkpoint(policy))}, more...)
}

// keeping are the same, with graphs that keep what is listed.
func keeping(r ...trainerrank.Retention) []trainerrank.CallOption {
	return training(trainerrank.WithRetentions(r...))
}

// policyBytes is what the policy takes of a device.
func policyBytes(m forward.Adaptable) (int64, error) {
	s, err := slots.New(m.Modules(), nil, slots.Options{}).Price(policyConfig, slots.LoadOptions{})
	return s.Total(), err
}

// trainee is a rank with the policy, on the device of the lab until it is closed. A fresh adapter adds nothing, and then half of its gradients are zero: this one adds something.
func (l *lab) trainee(opts ...trainerrank.Option) (*trainerrank.TrainerRank, error) {
	rank, err := l.rank(opts...)
	if err != nil {
		return nil, err
	}
	if err := rank.CreateCheckpoint(l, policy, policyConfig); err != nil {
		return nil, err
	}
	l.closers = append([]func() error{func() error { rank.Close(); return nil }}, l.closers...)
	a, err := rank.Checkpoints().Adapter(policy)
	if err != nil {
		return nil, err
	}
	r := random(2)
	for i := range a.LoRA {
		of := &a.LoRA[i]
		for j, b := 0, a.Params.Slice(of.B, int64(of.Rank*l.model.Modules()[of.Module].Out)*4).F32(); j < len(b); j++ {
			b[j] = float32(r.NormFloat64()) / 16
		}
	}
	return rank, nil
}

// cotangents draws one for each output that has any, and whose input is trained on.
func cotangents(r *rand.Rand, spec forward.Spec, list []forward.Input) []forward.OutputGrad {
	draw := func(wanted bool, n int) []float32 {
		if !wanted {
			return nil
		}
		values := make([]float32, n)
		for i := range values {
			values[i] = float32(r.NormFloat64())
		}
		return values
	}
	grads := make([]forward.OutputGrad, len(list))
	for i := range list {
		in := &list[i]
		on := in.Grad != forward.NoGrad
		grads[i] = forward.OutputGrad{
			TargetLogprobs: draw(on && in.Targets != nil, len(in.Targets)),
			Logits:         draw(on && in.Logits, len(in.Tokens)*spec.Vocabulary),
			HiddenStates:   draw(on && in.HiddenStates, len(in.Tokens)*spec.Hidden),
		}
	}
	return grads
}

// keepsGraph says whether an input of a call that trains keeps a graph.
func keepsGraph(in *forward.Input) bool { return in.Active() && in.Grad != forward.NoGrad }

// job is a list of inputs with a cotangent for each.
type job struct {
	list  []forward.Input
	grads []forward.OutputGrad
}

// only is the job with some of the inputs, in that order.
func (j job) only(indices []int) job {
	var some job
	for _, i := range indices {
		some.list, some.grads = append(some.list, j.list[i]), append(some.grads, j.grads[i])
	}
	return some
}

// backward runs the backwards of a result.
type backward func(ctx context.Context, j job, res *trainerrank.Result) error

// combined is one backward for all graphs.
func combined(ctx context.Context, j job, res *trainerrank.Result) error {
	return res.Backward(ctx, j.grads)
}

// reversed is a backward for each subforward, the last one first.
func reversed(ctx context.Context, j job, res *trainerrank.Result) error {
	list := res.Subforwards()
	for i := len(list) - 1; i >= 0; i-- {
		part := j.only(list[i].RequestIndices)
		if !slices.ContainsFunc(part.list, func(in forward.Input) bool { return keepsGraph(&in) }) {
			continue
		}
		if err := list[i].Backward(ctx, part.grads); err != nil {
			return err
		}
	}
	return nil
}

// trained is what became of the gradients of a call.
type trained struct {
	graphs   int       // live before its backward
	left     int       // live after its release
	gradient []float32 // what it has added to the policy's, of which nothing is left there
}

// train runs a call that trains, and its backward. What goes wrong in this is the outcome's error.
func (l *lab) train(title string, rank *trainerrank.TrainerRank, j job, run backward, opts ...trainerrank.CallOption) *outcome {
	return l.trainOn(title, rank, forward.Many(j.list...), j, run, opts...)
}

// trainOn is the same for inputs that are nested.
func (l *lab) trainOn(title string, rank *trainerrank.TrainerRank, in forward.Inputs, j job, run backward, opts ...trainerrank.CallOption) *outcome {
	o := l.add(title, rank, in, j, run, opts...)
	var err error
	o.gradient, err = takeGradient(rank)
	o.err = errors.Join(o.err, err)
	return o
}

// add is the same, and the gradient stays with the policy's.
func (l *lab) add(title string, rank *trainerrank.TrainerRank, in forward.Inputs, j job, run backward, opts ...trainerrank.CallOption) *outcome {
	o := l.callAnd(l, title, rank, in, func(res *trainerrank.Result, o *outcome) {
		o.graphs = live(rank)
		o.err = run(l, j, res)
	}, opts...)
	o.left = live(rank)
	return o
}

// live is the number of graphs of the policy that are live, and -1 if there is no policy.
func live(rank *trainerrank.TrainerRank) int {
	info, err := rank.Checkpoints().Info(policy)
	if err != nil {
		return -1
	}
	return info.Live
}

// takeGradient is what was accumulated for the policy, which begins at zero again.
func takeGradient(rank *trainerrank.TrainerRank) ([]float32, error) {
	g, err := rank.Checkpoints().Gradients(policy)
	if err != nil {
		return nil, err
	}
	list := slices.Clone(g.F32())
	return list, rank.ZeroGrad(policy)
}

// parts runs each of some parts of a job as a call of its own that is not split, in this order, and gives what they add up to. It is the same plan as that of one call that is split into
// them, on a device where there is room for everything.
func (l *lab) parts(rank *trainerrank.TrainerRank, j job, parts [][]int, opts ...trainerrank.CallOption) (gradient []float32, outcomes []*outcome, err error) {
	for _, indices := range parts {
		part := j.only(indices)
		run := combined
		if !slices.ContainsFunc(part.list, func(in forward.Input) bool { return keepsGraph(&in) }) {
			run = func(context.Context, job, *trainerrank.Result) error { return nil }
		}
		o := l.add("", rank, forward.Many(part.list...), part, run, opts...)
		if o.err == nil && o.tel.SubforwardCount != 1 {
			o.err = fmt.Errorf("a part that has room was split into %d", o.tel.SubforwardCount)
		}
		if o.err != nil {
			return nil, nil, o.err
		}
		outcomes = append(outcomes, o)
	}
	gradient, err = takeGradient(rank)
	return gradient, outcomes, err
}

// apart is how far got lies from want, in billionths of the norm of want, rounded up.
func apart(want, got []float32) int64 {
	if len(want) != len(got) || len(want) == 0 {
		return math.MaxInt64
	}
	var off, norm float64
	for i := range want {
		w := float64(want[i])
		d := float64(got[i]) - w
		off, norm = off+d*d, norm+w*w
	}
	switch r := math.Sqrt(off/norm) * 1e9; {
	case off == 0:
		return 0
	case r < 1e18:
		return int64(math.Ceil(r))
	}
	return math.MaxInt64 // NaN too
}

// otherBits is how many values have other bits than those wanted.
func otherBits(want, got []float32) int64 {
	n := int64(max(len(want), len(got)) - min(len(want), len(got)))
	for i := range min(len(want), len(got)) {
		n += count(math.Float32bits(want[i]) != math.Float32bits(got[i]))
	}
	return n
}

// magnitude is the norm of a gradient, in thousandths, for a gate that it is there.
func magnitude(g []float32) int64 {
	sum := 0.0
	for _, v := range g {
		sum += float64(v) * float64(v)
	}
	if n := math.Sqrt(sum) * 1e3; n < 1e18 {
		return int64(n)
	}
	return -1 // NaN too
}
