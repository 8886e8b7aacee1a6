package trainerrank

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sort"
	"time"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/forward/prefixtree"
)

// Basis says where a price comes from.
type Basis string

// The bases. Only exact prices exist so far: a model that cannot be rehearsed is refused.
const Exact Basis = "exact"

// Verdict says how a call is run.
type Verdict string

// The verdicts.
const (
	Whole   Verdict = "whole"
	Refused Verdict = "refused"
)

// Rung is one plan that was priced: a number of subforwards, the requests of each, and the bytes that each requires and retains.
type Rung struct {
	Count      int     `json:"count"`
	Chunks     [][]int `json:"chunks"`
	Required   []int64 `json:"required"`
	Retained   []int64 `json:"retained"`
	TotalBytes int64   `json:"total_bytes"`
	Fits       bool    `json:"fits"`
}

// Admission is the answer to whether a call fits, and how it would run. It holds no token.
type Admission struct {
	Verdict                  Verdict              `json:"verdict"`
	Basis                    Basis                `json:"basis"`
	UsableLimitBytes         int64                `json:"usable_limit_bytes"`
	PredictedPeakBytes       int64                `json:"predicted_peak_bytes"`
	PackedTokens             int                  `json:"packed_tokens"`
	LogicalTokens            int                  `json:"logical_tokens"`
	Layout                   []*prefixtree.Layout `json:"layout"`
	Rungs                    []Rung               `json:"rungs"`
	SubforwardRequestIndices [][]int              `json:"subforward_request_indices"`
	Retention                string               `json:"retention"`
	SmallestBudgetBytes      int64                `json:"smallest_budget_bytes"`
	LargestPrefix            int                  `json:"largest_prefix"`
	Shares                   device.Sizes         `json:"-"` // PredictedPeakBytes by purpose
	PlanningTime             time.Duration        `json:"-"`
}

// call is one call on its way: what the caller gave, flattened and checked.
type call struct {
	grad       forward.GradMode
	checkpoint forward.Selection
	progress   func(done, total int)
	inputs     []*forward.Input // in the caller's order
	active     []int            // those that want an output
	logical    int              // tokens of the active inputs
}

// newCall flattens and checks the inputs.
func (t *TrainerRank) newCall(in forward.Inputs, opts []CallOption) (*call, error) {
	c := &call{grad: forward.NoGrad}
	for _, o := range opts {
		o(c)
	}
	spec := t.model.Spec()
	err := in.Walk(func(in *forward.Input, path func() string) error {
		err := check(in, spec)
		if err == nil && in.Active() {
			err = c.supported(in)
		}
		if err != nil {
			return &InputError{path(), len(c.inputs), err}
		}
		if in.Active() {
			c.active = append(c.active, len(c.inputs))
			c.logical += len(in.Tokens)
		}
		c.inputs = append(c.inputs, in)
		return nil
	})
	return c, err
}

// check says what is wrong with an input.
func check(in *forward.Input, spec forward.Spec) error {
	if len(in.Tokens) == 0 {
		return errors.New("no tokens")
	}
	for i, tok := range in.Tokens {
		if tok < 0 || int(tok) >= spec.Vocabulary {
			return fmt.Errorf("token %d at position %d is outside the vocabulary of %d", tok, i, spec.Vocabulary)
		}
	}
	if in.TargetWidth < 0 {
		return fmt.Errorf("target width %d is negative", in.TargetWidth)
	}
	if in.Targets != nil {
		// Divided, not multiplied: the width may be anything.
		if w, n := in.Width(), len(in.Targets); n%w != 0 || n/w != len(in.Tokens) {
			return fmt.Errorf("%d targets for %d tokens with %d labels per position", n, len(in.Tokens), w)
		}
		for i, l := range in.Targets {
			if l != forward.IgnoreLabel && (l < 0 || int(l) >= spec.Vocabulary) {
				return fmt.Errorf("label %d at position %d is outside the vocabulary of %d and not %d", l, i/in.Width(), spec.Vocabulary, forward.IgnoreLabel)
			}
		}
	}
	if in.TopK < 0 || in.TopK > spec.Vocabulary {
		return fmt.Errorf("top k %d is not between 0 and the vocabulary of %d", in.TopK, spec.Vocabulary)
	}
	if in.Grad > forward.NoGrad {
		return fmt.Errorf("grad mode %d is not one of inherit, with grad, no grad", in.Grad)
	}
	return nil
}

// supported says what the engine cannot do yet for an active input.
func (c *call) supported(in *forward.Input) error {
	sel := in.Checkpoint
	if sel.Inherits() {
		sel = c.checkpoint
	}
	if sel.Name() != "" {
		return &SlotStateError{sel.Name(), "no checkpoint of that name is loaded"}
	}
	grad := in.Grad
	if grad == forward.Inherit {
		grad = c.grad
	}
	if grad == forward.WithGrad {
		return &RuntimeSupportError{"gradients are not built yet: use the no-grad mode"}
	}
	return nil
}

// plan is a way to run some inputs of a call in one subforward, with its price.
type plan struct {
	requests  []int // indices of the caller's inputs
	layout    *prefixtree.Layout
	batch     *forward.Batch
	footprint forward.Footprint
}

// plan lays out, packs and prices the inputs with the given indices, all active.
func (t *TrainerRank) plan(c *call, requests []int) (*plan, error) {
	rows := make([][]int32, len(requests))
	p := &plan{requests: requests, batch: &forward.Batch{}}
	for i, r := range requests {
		rows[i] = c.inputs[r].Tokens
		p.batch.Requests = append(p.batch.Requests, c.inputs[r])
	}
	tree, err := prefixtree.Build(rows)
	if err != nil {
		return nil, err
	}
	p.layout = tree.FullSharing()
	if p.batch.Batch, err = p.layout.Pack(rows); err != nil {
		return nil, err
	}
	p.footprint, err = t.exact.Rehearse(p.batch)
	return p, err
}

// admit plans a call and says whether it fits in usable bytes.
func (t *TrainerRank) admit(ctx context.Context, c *call, usable int64) (*Admission, *plan, error) {
	start := time.Now()
	all := make([]int, len(c.inputs))
	for i := range all {
		all[i] = i
	}
	a := &Admission{
		Verdict: Whole, Basis: Exact, UsableLimitBytes: usable, LogicalTokens: c.logical, Retention: "stored",
		SubforwardRequestIndices: [][]int{all}, LargestPrefix: len(c.inputs), Layout: []*prefixtree.Layout{}, Rungs: []Rung{},
	}
	if len(c.inputs) == 0 {
		a.SubforwardRequestIndices = [][]int{}
	}
	if len(c.active) == 0 {
		return a, nil, nil
	}
	p, err := t.plan(c, c.active)
	if err != nil {
		return nil, nil, err
	}
	need := p.footprint.Required()
	a.PredictedPeakBytes, a.SmallestBudgetBytes = need, need
	a.PackedTokens = p.layout.Packed
	a.Layout = []*prefixtree.Layout{p.layout}
	a.Shares = device.Sizes{device.Outputs: p.footprint.Outputs, device.Retained: p.footprint.Retained, device.Scratch: p.footprint.Scratch}
	a.Rungs = []Rung{{
		Count: 1, Chunks: [][]int{all}, Required: []int64{need}, Retained: []int64{p.footprint.Outputs + p.footprint.Retained},
		TotalBytes: need, Fits: need <= usable,
	}}
	if need > usable {
		a.Verdict = Refused
		if a.LargestPrefix, err = t.largestPrefix(ctx, c, usable); err != nil {
			return nil, nil, err
		}
	}
	a.PlanningTime = time.Since(start)
	return a, p, nil
}

// largestPrefix is the largest n such that the first n inputs of the caller fit. A price never falls when an input is added.
func (t *TrainerRank) largestPrefix(ctx context.Context, c *call, usable int64) (int, error) {
	var failed error
	n := sort.Search(len(c.inputs), func(n int) bool { // the first n for which n+1 inputs do not fit
		if err := ctx.Err(); err != nil && failed == nil {
			failed = err
		}
		end, _ := slices.BinarySearch(c.active, n+1)
		if failed != nil || end == 0 {
			return false
		}
		p, err := t.plan(c, c.active[:end])
		if err != nil {
			failed = err
			return false
		}
		return p.footprint.Required() > usable
	})
	return n, failed
}

// refusal is the error for a call that was not admitted.
func (c *call) refusal(a *Admission) *MemoryError {
	fits := "not even the first input fits"
	if a.LargestPrefix > 0 {
		fits = fmt.Sprintf("the first %d of the %d inputs fit now", a.LargestPrefix, len(c.inputs))
	}
	return &MemoryError{
		PredictedPeakBytes: a.PredictedPeakBytes, UsableLimitBytes: a.UsableLimitBytes,
		Suggestion:   fmt.Sprintf("give it %d bytes, or smaller inputs or fewer outputs: %s", a.SmallestBudgetBytes, fits),
		PackedTokens: a.PackedTokens, LogicalTokens: a.LogicalTokens, Requests: len(c.active),
		Rungs: a.Rungs, Shares: a.Shares, SmallestBudgetBytes: a.SmallestBudgetBytes, LargestPrefix: a.LargestPrefix,
	}
}

// overtaken is the error for a call that was admitted, but whose bytes were gone when they were reserved: somebody else took from the
// device, or the operating system did not have what the device counts as free. It is a refusal by what is free now.
func (t *TrainerRank) overtaken(ctx context.Context, c *call, err error) error {
	var oom *device.OutOfMemoryError
	if !errors.As(err, &oom) {
		return fmt.Errorf("forward: %w", err)
	}
	a, _, admitErr := t.admit(ctx, c, max(0, min(t.limit, oom.FreeBytes)))
	if admitErr != nil {
		return admitErr
	}
	e := c.refusal(a)
	e.Telemetry = telemetry(a)
	if a.Verdict != Refused {
		e.Err = oom
		e.Suggestion = "the operating system has less memory than the device may hold: give the device a smaller capacity, or the call smaller inputs"
	}
	t.record(e.Telemetry)
	return e
}
