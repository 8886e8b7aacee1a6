// Package trainerrank runs the forwards of one trainer rank inside a byte budget.
//
// A [TrainerRank] wraps a model call. [TrainerRank.DPRankForward] takes requests, nested as the caller likes, packs those that share
// prefixes so that shared tokens are computed once, says exactly how many bytes the call needs, splits it into the fewest subforwards that fit if it does not fit
// whole, reserves its bytes or refuses before anything runs ([*MemoryError]), runs, and gives the answers back in the caller's
// order and nesting. An answer has the same bits whatever else was in the call, and however it was split. [TrainerRank.ForwardMicroBatches] runs a list that
// is longer than fits at once, over one or several ranks, in waves that do.
//
// How many bytes is exact for a model that can rehearse its calls ([forward.Rehearser]). For any other it is an estimate, from what calls took that ran before (see package
// profile), and [Telemetry.Basis] says so: learned, or cold as long as nothing like the call was observed. Then a call holds the estimate
// before it runs, and may take more from the device while it runs, up to what was usable when it was planned. If that is too little it fails with a [*MemoryError], or a split with a
// [*PartialExecutionError], and what it took is remembered. Such a model cannot be trained yet.
//
// With gradients, what each subforward leaves for its backward stays until [Result.Backward], or [Subforward.Backward], has added its gradients to those of the checkpoint
// that it ran on; what the backward needs was reserved with the call. [TrainerRank.Checkpoints] are the adapters that are trained.
package trainerrank

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"sync"
	"time"

	"github.com/trainerrank/engine/collective"
	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/forward/prefixtree"
	"github.com/trainerrank/engine/profile"
	"github.com/trainerrank/engine/slots"
)

// TrainerRank runs calls of one model on one device. Its methods may be called from several goroutines; calls run one at a time.
type TrainerRank struct {
	model forward.Model
	exact forward.Rehearser // nil: prices are learned
	dev   device.Device
	limit int64            // bytes that a call may use at most
	turn  chan struct{}    // holds one token: the right to run a call
	world collective.World // ranks with inputs of their own
	peers collective.World // ranks with the same inputs
	slots *slots.Set       // nil if the model takes no adapters
	// tables are those of costs, in the order in which they are asked whether they are for the model and the device.
	tables  []prefixtree.Table
	records func(*Record)  // of every plan; nil: not wanted
	misses  func(*Record)  // of plans that were wrong; nil: not wanted
	widths  map[string]int // of the last waves of micro-batches, by kind of call; whoever has the turn may look

	mu    sync.Mutex
	last  *Telemetry
	known *profile.Profile // what calls took. It is changed by whoever has the turn, under mu.
}

// New wraps a model. The device is that of the model's weights unless [WithDevice] names one.
func New(m forward.Model, opts ...Option) (*TrainerRank, error) {
	t := &TrainerRank{model: m, limit: math.MaxInt64, turn: make(chan struct{}, 1), world: collective.Solo{}, peers: collective.Solo{}, widths: map[string]int{}, tables: Tables(), known: &profile.Profile{}}
	for _, o := range opts {
		o(t)
	}
	for i := range t.tables { // they travel with records, where nobody asks for it
		t.tables[i].Certificate = nil
	}
	t.exact, _ = m.(forward.Rehearser)
	if placed, ok := m.(interface{ Device() device.Device }); ok && t.dev == nil {
		t.dev = placed.Device()
	}
	if t.dev == nil {
		return nil, fmt.Errorf("new trainer rank: no device: place the model on one, or use WithDevice")
	}
	if ad, ok := m.(forward.Adaptable); ok {
		t.slots = slots.New(ad.Modules(), t.dev, slots.Options{World: t.world, BaseModel: m.Spec().Name})
	}
	return t, nil
}

// Telemetry is what happened in one call.
type Telemetry struct {
	PlanningTime             time.Duration
	SubforwardCount          int
	SubforwardRequestIndices [][]int // in execution order
	SelectedMaxDepth         int
	PackedTokens             int
	LogicalTokens            int
	PredictedPeakBytes       int64 // of the call, beside what was allocated before it; if the basis is not exact, an estimate
	UsableLimitBytes         int64
	ObservedPeakBytes        int64 // most bytes of the call in use at one moment; 0 if it did not run
	RetainedBytes            int64 // in use after the call, until the result is released
	Basis                    Basis
	Retention                Retention
}

// LastForwardTelemetry is the telemetry of the last call that was planned, refused ones included. Before the first it is an error.
func (t *TrainerRank) LastForwardTelemetry() (Telemetry, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.last == nil {
		return Telemetry{}, errors.New("last forward telemetry: no call was planned yet")
	}
	return *t.last, nil
}

func (t *TrainerRank) record(tel Telemetry) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.last = &tel
}

func telemetry(a *Admission) Telemetry {
	return Telemetry{
		PlanningTime: a.PlanningTime, SubforwardCount: a.SubforwardCount(), SubforwardRequestIndices: a.SubforwardRequestIndices,
		SelectedMaxDepth: a.SelectedMaxDepth(), PackedTokens: a.PackedTokens, LogicalTokens: a.LogicalTokens, PredictedPeakBytes: a.PredictedPeakBytes,
		UsableLimitBytes: a.UsableLimitBytes, Basis: a.Basis, Retention: a.Retention,
	}
}

// Result holds the answers to one call. Its outputs lie in device memory until Release.
type Result struct {
	Outputs   forward.Outputs
	Telemetry Telemetry

	owner  *TrainerRank
	inputs int // of the call
	held   *holding
}

// memory is where the passes of a call live: a [device.Reservation] of what they were rehearsed to need, what a call with gradients has ([training]), or a [device.Pool]
// that begins with an estimate.
type memory interface {
	device.Arena
	NextTurn()
	Peak() int64
	Kept() int64
	ReleaseScratch()
	Release()
}

// holding is the memory of a result. The result and each of its outputs refer to it; when none of them is reachable any more, its cleanup gives the memory back.
type holding struct {
	memory
	cleanup runtime.Cleanup
}

func hold(m memory) *holding {
	h := &holding{memory: m}
	h.cleanup = runtime.AddCleanup(h, memory.Release, m)
	return h
}

// Release gives the memory of the outputs back; their tensors must not be used after it. Further calls do nothing. A result that is abandoned with all its outputs is
// released by the collector, some time later. A tensor alone, taken out of its [forward.Output], does not keep the memory.
func (r *Result) Release() {
	r.held.cleanup.Stop()
	r.held.memory.Release()
}

// ObservedPeakBytes is the most that the call had in use at one moment so far, in bytes: in its forward, and in the backwards that were run.
func (r *Result) ObservedPeakBytes() int64 {
	if m, ok := r.held.memory.(*training); ok {
		m.mu.Lock()
		defer m.mu.Unlock()
		return m.peak
	}
	return r.Telemetry.ObservedPeakBytes
}

// lock waits for the turn of a call.
func (t *TrainerRank) lock(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("forward: %w", err)
	}
	select {
	case t.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("forward: waiting for the call before: %w", ctx.Err())
	}
}

// Plan says whether a call would fit now, how it would run, and what the least is that it would run in. It runs nothing and reserves nothing.
func (t *TrainerRank) Plan(ctx context.Context, in forward.Inputs, opts ...CallOption) (*Admission, error) {
	c, err := t.newCall(in, opts)
	if err == nil {
		if err = t.lock(ctx); err == nil {
			defer func() { <-t.turn }()
		}
	}
	g, err := t.survey(ctx, c, err)
	var a *Admission
	if err == nil {
		a, err = t.admit(ctx, c, g, true)
	}
	c.agree = false // peers plan as one, and others by themselves
	if err = t.settle(ctx, c, a, err); err != nil {
		return nil, err
	}
	return a, nil
}

// DPRankForward runs one call on this rank: whole if it fits, else in the fewest subforwards that do. The outputs have the nesting of the inputs. What fits in no way is
// refused with a [*MemoryError], and what breaks a rule with an [*InputError], before anything runs. A split that fails under way
// is a [*PartialExecutionError]. After any error the device holds what it held before.
//
// The context is looked at between subforwards and, by the model, between layers.
func (t *TrainerRank) DPRankForward(ctx context.Context, in forward.Inputs, opts ...CallOption) (*Result, error) {
	c, err := t.newCall(in, opts)
	if err == nil {
		if err = t.lock(ctx); err == nil {
			defer func() { <-t.turn }()
		}
	}
	err = t.ensure(ctx, c, err)
	g, err := t.survey(ctx, c, err)
	return t.execute(ctx, in, c, g, err)
}

// execute plans a call and runs it, unless it has failed already: in that case it tells the others.
func (t *TrainerRank) execute(ctx context.Context, in forward.Inputs, c *call, g *ground, err error) (*Result, error) {
	var a *Admission
	var slabs memory = (*device.Reservation)(nil)
	kept := false
	defer func() { // whatever ends the call: an error, a panic, the end of the goroutine
		if !kept {
			slabs.Release()
		}
	}()
	if err == nil && len(c.inputs) > 0 { // an empty call disturbs nothing, the telemetry included
		a, slabs, err = t.reserve(ctx, c, g)
	}
	if err = t.settle(ctx, c, a, err); err != nil {
		return nil, err
	}
	flat := make([]*forward.Output, len(c.inputs))
	for i := range flat {
		flat[i] = &forward.Output{NoGrad: true}
	}
	var tel Telemetry
	if a != nil {
		tel = telemetry(a)
		if a.PackedTokens > 0 {
			err = t.run(ctx, c, a, slabs, flat, &tel)
		}
		t.record(tel)
	}
	if err = t.settle(ctx, c, nil, err); err != nil {
		return nil, err
	}
	res := &Result{owner: t, inputs: len(flat), held: hold(slabs), Telemetry: tel, Outputs: in.Shape(flat)}
	for _, o := range flat {
		o.KeepAlive(res.held)
	}
	kept = true
	return res, nil
}
