package main

import (
	"context"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/slots"
	"github.com/trainerrank/engine/trainerrank"
)

// policy is the name of the adapter that learns.
const policy = "policy"

// longest is the most tokens of an answer.
const longest = 5

// loop is a run under way.
type loop struct {
	options
	rank       *trainerrank.TrainerRank
	vocabulary int
	prompt     []int32
	tasks      tasks
	curve      *curve
	updates    int
}

// answer is a sampled answer to a task.
type answer struct {
	task
	tokens []int32
	done   bool
}

func (a *answer) right() bool { return slices.Equal(a.tokens, a.answer) }

// reward is 1 for the right answer, and for a wrong number the less the further it is off.
func (a *answer) reward() float64 {
	if a.right() {
		return 1
	}
	if n, ok := number(a.tokens); ok {
		return 0.5 * math.Exp(-math.Abs(float64(n-a.value))/10)
	}
	return 0
}

// sequence is all that the model reads of an answer.
func (l *loop) sequence(a *answer) []int32 { return slices.Concat(l.prompt, a.question, a.tokens) }

// sample draws answers from the policy, a token of each at a time. All unfinished answers are scored together, in as many waves as the budget needs: in a wave the
// prompt is computed once, each question once, and of answers that still are the same, one.
func (l *loop) sample(ctx context.Context, answers []*answer, draw func() float64) error {
	for range longest {
		var open []*answer
		var items []forward.Inputs
		for _, a := range answers {
			if !a.done {
				open = append(open, a)
				items = append(items, forward.One(forward.Input{Tokens: l.sequence(a), TopK: l.vocabulary}))
			}
		}
		for wave, err := range l.rank.ForwardMicroBatches(ctx, items, trainerrank.WithCheckpoint(forward.Checkpoint(policy))) {
			if err != nil {
				return err
			}
			for i, a := range trainerrank.Select(wave, open) {
				top := wave.Outputs[i].Output().TopK
				p, ids := top.Logprobs.Data().([]float32), top.Tokens.Data().([]int32)
				last := len(p) - l.vocabulary // the distribution behind the last token, most likely first
				id := choose(p[last:], ids[last:], draw)
				a.tokens = append(a.tokens, id)
				a.done = id == end
			}
			wave.Result.Release()
		}
	}
	return nil
}

// choose draws a token.
func choose(logprobs []float32, ids []int32, draw func() float64) int32 {
	x := draw()
	for i, lp := range logprobs {
		if x -= math.Exp(float64(lp)); x < 0 {
			return ids[i]
		}
	}
	return ids[0] // what rounding left over
}

// stats are what a step tells of itself.
type stats struct {
	right           float64 // share of right answers
	logical, packed int
	subforwards     int
	retention       trainerrank.Retention
	peak            int64
	norm            float64
}

// step is one update of the policy.
func (l *loop) step(ctx context.Context) (*stats, error) {
	// Sample a group of answers to each question.
	l.updates++
	random := rand.New(rand.NewPCG(l.seed, uint64(l.updates)<<8))
	var answers []*answer
	for range l.questions {
		t := l.tasks.next()
		for range l.group {
			answers = append(answers, &answer{task: t})
		}
	}
	if err := l.sample(ctx, answers, random.Float64); err != nil {
		return nil, err
	}

	// An answer's advantage is how much better its reward is than the mean of its group, in standard deviations.
	s := &stats{}
	advantages := make([]float64, len(answers))
	for g := 0; g < len(answers); g += l.group {
		var sum, squares float64
		for _, a := range answers[g : g+l.group] {
			r := a.reward()
			sum, squares = sum+r, squares+r*r
			if a.right() {
				s.right += 1 / float64(len(answers))
			}
		}
		n := float64(l.group)
		mean := sum / n
		deviation := math.Sqrt(max(0, squares/n-mean*mean))
		for i, a := range answers[g : g+l.group] {
			advantages[g+i] = (a.reward() - mean) / (deviation + 1e-4)
		}
	}

	// Score them with gradients. Only the answers' own tokens have labels. A group that is all right or all wrong teaches nothing, and asks for nothing.
	inputs := make([]forward.Input, len(answers))
	grads := make([]forward.OutputGrad, len(answers))
	scored := 0
	for i, a := range answers {
		inputs[i] = forward.Input{Tokens: l.sequence(a)}
		if advantages[i] == 0 {
			continue
		}
		n, first := len(inputs[i].Tokens), len(l.prompt)+len(a.question)-1
		labels := slices.Repeat([]int32{forward.IgnoreLabel}, n)
		copy(labels[first:], a.tokens)
		inputs[i].Targets = labels
		grads[i].TargetLogprobs = make([]float32, n)
		scored += len(a.tokens)
	}
	l.note(s.right)
	if scored == 0 {
		s.retention = trainerrank.Stored
		return s, nil
	}
	// The loss is -1/n sum of advantage * logprob over the n tokens: on-policy, so every importance ratio is 1. These are its derivatives.
	for i, a := range answers {
		if inputs[i].Targets != nil {
			first := len(l.prompt) + len(a.question) - 1
			for j := range a.tokens {
				grads[i].TargetLogprobs[first+j] = float32(-advantages[i] / float64(scored))
			}
		}
	}
	res, err := l.rank.DPRankForward(ctx, forward.Many(inputs...),
		trainerrank.WithCheckpoint(forward.Checkpoint(policy)), trainerrank.WithGradMode(forward.WithGrad))
	if err != nil {
		return nil, err
	}
	defer res.Release()
	for i, o := range res.Outputs.Flat() {
		if inputs[i].Targets != nil {
			for j, lp := range o.TargetLogprobs.Data().([]float32) {
				l.note(float64(lp) * float64(grads[i].TargetLogprobs[j]))
			}
		}
	}
	if err := res.Backward(ctx, grads); err != nil {
		return nil, err
	}
	adam := slots.Adam(l.rate * (1 - float64(l.updates-1)/float64(l.steps))) // falling to nothing
	adam.WeightDecay, adam.GradClipNorm = 0, 1
	report, err := l.rank.OptimStep(ctx, slots.StepOptions{Params: adam})
	if err != nil {
		return nil, err
	}
	t := &res.Telemetry
	s.logical, s.packed, s.subforwards, s.retention, s.peak = t.LogicalTokens, t.PackedTokens, t.SubforwardCount, t.Retention, res.ObservedPeakBytes()
	s.norm = report.Slots[0].GradNorm
	l.note(s.norm)
	if t.SubforwardCount > 1 {
		l.curve.splits++
	}
	if t.Retention != trainerrank.Stored {
		l.curve.again++
	}
	l.curve.peak = max(l.curve.peak, s.peak)
	return s, nil
}

// note takes a number into the digest of the run, to the bit.
func (l *loop) note(x float64) {
	h := fnv.New64a()
	for _, v := range []uint64{l.curve.digest, math.Float64bits(x)} {
		for i := range 8 {
			h.Write([]byte{byte(v >> (8 * i))})
		}
	}
	l.curve.digest = h.Sum64()
}

// test is the share of right answers, sampled at temperature 1, to questions that no run is trained on.
func (l *loop) test(ctx context.Context) (float64, error) {
	questions, random := newTasks(1<<40), rand.New(rand.NewPCG(1<<40, l.seed))
	right := 0.0
	for left := l.eval; left > 0; left -= 64 {
		var answers []*answer
		for range min(left, 64) {
			answers = append(answers, &answer{task: questions.next()})
		}
		if err := l.sample(ctx, answers, random.Float64); err != nil {
			return 0, err
		}
		for _, a := range answers {
			if a.right() {
				right++
			}
		}
	}
	l.note(right)
	return right / float64(l.eval), nil
}
