package slots

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/trainerrank/engine/collective"
	"github.com/trainerrank/engine/device"
)

// LiveGraphs says what a step does about live graphs of the slots that it changes.
type LiveGraphs uint8

// The choices. A graph whose slot was stepped is of no use for a backward: see [Lease.Stale].
const (
	Allow LiveGraphs = iota // step: a forward that adds nothing to the loss must not hold up training
	Error                   // refuse, on all ranks, before anything changes
)

func (l LiveGraphs) String() string { return [...]string{"allow", "error"}[min(l, 1)] }

// StepOptions say what [Set.Step] does. They must be the same on all ranks.
type StepOptions struct {
	Params AdamParams // of each slot that is not in PerSlot
	Scale  float64    // the same: what gradients are multiplied with before they are added over the ranks; 0 is 1
	// PerSlot has the slots that differ, by name.
	PerSlot map[string]SlotParams
	// Slots are those to step: each must be loaded and trainable, and have gradients on some rank. Nil: all slots that have.
	Slots        []string
	OnLiveGraphs LiveGraphs
}

// SlotParams are the settings of one slot.
type SlotParams struct {
	Params AdamParams
	Scale  float64 // 0 is 1
}

// StepReport is what a step did, the same on all ranks.
type StepReport struct {
	Slots []SlotStep // by name
}

// SlotStep is what a step did to one slot.
type SlotStep struct {
	Name         string
	LearningRate float64
	GradNorm     float64 // of the slot's gradients, summed over the ranks and scaled, before clipping
	ClipFactor   float64 // what they were multiplied with
	Updated      bool    // false: a norm, of this slot or of another in the step, was not finite
	Revision     int64   // after the step
}

// Updated says whether the step changed the slots. It did not if the norm of one was not finite.
func (r *StepReport) Updated() bool {
	return !slices.ContainsFunc(r.Slots, func(s SlotStep) bool { return !s.Updated })
}

func (r *StepReport) String() string {
	var b strings.Builder
	for _, s := range r.Slots {
		fmt.Fprintf(&b, "%s: gradient norm %.6g, clipped by %.6g, learning rate %g, revision %d", quote(s.Name), s.GradNorm, s.ClipFactor, s.LearningRate, s.Revision)
		if !s.Updated {
			b.WriteString(", NOT updated")
		}
		b.WriteByte('\n')
	}
	return b.String()
}

func (o *StepOptions) of(name string) SlotParams {
	p, ok := o.PerSlot[name]
	if !ok {
		p = SlotParams{o.Params, o.Scale}
	}
	if p.Scale == 0 {
		p.Scale = 1
	}
	return p
}

func (o *StepOptions) check() error {
	if o.OnLiveGraphs > Error {
		return fmt.Errorf("there is no choice %d of what to do about live graphs", o.OnLiveGraphs)
	}
	names := append(slices.Sorted(maps.Keys(o.PerSlot)), "\x00") // any name that is not in PerSlot
	for _, name := range names {
		p := o.of(name)
		if err := p.Params.check(); err != nil && (name != "\x00" || !o.allNamed()) {
			return err
		}
		if math.IsNaN(p.Scale) || math.IsInf(p.Scale, 0) {
			return fmt.Errorf("gradients cannot be scaled by %g", p.Scale)
		}
	}
	return nil
}

// allNamed says whether every slot of the step has settings of its own.
func (o *StepOptions) allNamed() bool {
	if o.Slots == nil {
		return false
	}
	for _, name := range o.Slots {
		if _, ok := o.PerSlot[name]; !ok {
			return false
		}
	}
	return true
}

// bucket is how many elements go into one collective.
const bucket = 4 << 20

// Step is one step of AdamW for the selected slots: their gradients are scaled, summed over the ranks (not averaged), clipped by their own norm, and applied, the weights decaying
// first; then they are zero again and the revision is one higher. If a norm is not finite no slot changes, all gradients of the step are dropped, and the report says so. A rank without gradients of a slot counts as
// zeros. All ranks call it.
//
// Without a slot that could be stepped it is a [*SlotStateError], on all ranks, and nothing has changed. If the ranks lose one another under way (the context, a rank that is gone), the gradients of the
// step are dropped, and no slot has changed.
func (s *Set) Step(ctx context.Context, o StepOptions) (*StepReport, error) {
	s.turn.Lock()
	defer s.turn.Unlock()
	r, err := s.step(ctx, &o)
	if err != nil {
		return nil, fmt.Errorf("step: %w", err)
	}
	return r, nil
}

func (s *Set) step(ctx context.Context, o *StepOptions) (*StepReport, error) {
	names, err := s.chosen(ctx, o)
	if err != nil {
		return nil, err
	}
	chosen := make([]*slot, len(names))
	for i, name := range names {
		if chosen[i], err = s.lookup(name); err != nil {
			return nil, err
		}
	}
	report := &StepReport{}
	finite := true
	for _, sl := range chosen {
		p := o.of(sl.name)
		norm, err := s.reduce(ctx, sl, p.Scale)
		if err != nil {
			for _, sl := range chosen {
				s.drop(sl)
			}
			return nil, err
		}
		clip := 1.0
		if p.Params.GradClipNorm > 0 {
			clip = min(1, p.Params.GradClipNorm/(norm+1e-6))
		}
		if math.IsNaN(norm) || math.IsInf(norm, 0) {
			finite, clip = false, 0
		}
		report.Slots = append(report.Slots, SlotStep{Name: sl.name, LearningRate: p.Params.LearningRate, GradNorm: norm, ClipFactor: clip})
	}
	for i, sl := range chosen {
		if finite {
			s.apply(sl, o.of(sl.name).Params, report.Slots[i].ClipFactor)
		}
		s.drop(sl)
		report.Slots[i].Updated, report.Slots[i].Revision = finite, sl.revision
	}
	return report, nil
}

// drop zeroes the accumulators of a slot, also those of a rank that had nothing pending: others' gradients were added to them.
func (s *Set) drop(sl *slot) {
	s.mu.Lock()
	sl.pending = true
	s.mu.Unlock()
	s.clear(sl)
}

// reduce makes the accumulators of a slot the scaled sum over the ranks, and returns its norm.
func (s *Set) reduce(ctx context.Context, sl *slot, scale float64) (float64, error) {
	vectors := sl.trainable()
	all := spans(vectors)
	if f := float32(scale); f != 1 {
		each(s.threads, len(all), func(i int) {
			g := all[i].of(all[i].v.grads)
			for j := range g {
				g[j] *= f
			}
		})
	}
	for _, v := range vectors {
		g := v.grads.F32()
		for len(g) > 0 {
			n := min(len(g), bucket)
			if err := s.world.AllReduceFloat32(ctx, "slots/gradients", collective.Sum, g[:n]); err != nil {
				return 0, err
			}
			g = g[n:]
		}
	}
	sums := make([]float64, len(all))
	each(s.threads, len(all), func(i int) { sums[i] = squares(all[i].of(all[i].v.grads)) })
	total := 0.0
	for _, x := range sums {
		total += x
	}
	return math.Sqrt(total), nil
}

// apply updates a slot.
func (s *Set) apply(sl *slot, p AdamParams, clip float64) {
	vectors := sl.trainable()
	rules := map[*vector]adamw{}
	s.mu.Lock()
	for _, v := range vectors {
		v.steps++
		rules[v] = p.at(v.steps, clip)
	}
	sl.revision++
	sl.adam = &p
	s.mu.Unlock()
	all := spans(vectors)
	each(s.threads, len(all), func(i int) {
		x := all[i]
		rules[x.v].apply(x.of(x.v.params), x.of(x.v.grads), x.of(x.v.mean), x.of(x.v.sq))
	})
}

// vote is what a rank says before a step.
type vote struct {
	Err     string // why it cannot take part; "" if it can
	Options string // must be the same everywhere
	Slots   []slotVote
}

type slotVote struct {
	Name          string
	Print         string // layout and revision
	Trained       bool
	Snapshot      bool
	Pending, Live bool
}

// chosen are the slots of a step, by one collective.
func (s *Set) chosen(ctx context.Context, o *StepOptions) ([]string, error) {
	mine := vote{Options: fmt.Sprintf("%+v", *o)}
	failed := o.check()
	if failed != nil {
		mine.Err = failed.Error()
	}
	s.mu.Lock()
	list := slices.Collect(maps.Values(s.slots))
	live := s.bases.live > 0 // every graph is one of the base model too
	for _, sl := range list {
		live = live || sl.live > 0
	}
	if s.bases.trained {
		list = append(list, &s.bases)
	}
	for _, sl := range list {
		mine.Slots = append(mine.Slots, slotVote{Name: sl.name, Trained: sl.trained, Snapshot: sl.snapshot, Pending: sl.pending, Live: sl.live > 0 || sl == &s.bases && live})
	}
	s.mu.Unlock()
	for i, sl := range list {
		if !s.alone() {
			mine.Slots[i].Print = fmt.Sprintf("revision %d of %s", sl.revision, sl.print(false))
		}
	}
	all, err := s.world.AllGather(ctx, "slots/step", encode(mine))
	if err != nil {
		return nil, errors.Join(failed, err)
	}
	if failed != nil {
		return nil, failed
	}
	votes := make([]vote, len(all))
	for r := range all {
		if err := decode(all[r], &votes[r]); err != nil {
			return nil, err
		}
	}
	return choose(votes, o)
}

// choose is the decision over a step, a pure function of what all ranks said.
func choose(votes []vote, o *StepOptions) ([]string, error) {
	for r, v := range votes {
		if v.Err != "" {
			return nil, &collective.PeerError{Rank: r, Text: v.Err}
		}
	}
	for r, v := range votes {
		if v.Options != votes[0].Options {
			return nil, fmt.Errorf("ranks 0 and %d were given different options: %s, and %s", r, votes[0].Options, v.Options)
		}
	}
	type state struct {
		slotVote
		ranks int
		odd   bool // the ranks do not agree on what it is
	}
	states := map[string]*state{}
	for _, v := range votes {
		for _, sv := range v.Slots {
			st := states[sv.Name]
			if st == nil {
				st = &state{slotVote: sv}
				states[sv.Name] = st
			}
			st.ranks++
			st.odd = st.odd || sv.Print != st.Print || sv.Trained != st.Trained || sv.Snapshot != st.Snapshot
			st.Pending, st.Live = st.Pending || sv.Pending, st.Live || sv.Live
		}
	}
	names := slices.Compact(slices.Sorted(slices.Values(o.Slots)))
	if o.Slots == nil {
		for _, name := range slices.Sorted(maps.Keys(states)) {
			if st := states[name]; st.Pending && !st.Snapshot {
				names = append(names, name)
			}
		}
	}
	if len(names) == 0 {
		return nil, &SlotStateError{"", "no slot has gradients on any rank"}
	}
	for _, name := range names {
		st := states[name]
		switch {
		case st == nil && name == "":
			return nil, &SlotStateError{name, "the base model is not trained"}
		case st == nil:
			return nil, &SlotStateError{name, "no checkpoint of that name is loaded"}
		case st.ranks < len(votes), st.odd:
			return nil, &SlotStateError{name, "the ranks do not have the same: not loaded on all, or at different revisions"}
		case st.Snapshot:
			return nil, &SlotStateError{name, "it is a snapshot, which is not trained"}
		case !st.Trained:
			return nil, &SlotStateError{name, "it was loaded for inference only"}
		case !st.Pending:
			return nil, &SlotStateError{name, "it has no gradients on any rank"}
		case st.Live && o.OnLiveGraphs == Error:
			return nil, &SlotStateError{name, "graphs of it are live: run their backward or release their results first"}
		}
	}
	return names, nil
}

// AddBase makes the parameters of the base model trainable, as the slot named "": one vector of float32 that the model keeps, with these tensors in it, in ascending order. It takes the memory of the
// accumulators and moments, 4 bytes each for every 4 of the vector. It can be done once. All ranks call it.
func (s *Set) AddBase(ctx context.Context, params device.Mem, tensors []Tensor) error {
	s.turn.Lock()
	defer s.turn.Unlock()
	v := &vector{name: "base", tensors: tensors, bytes: params.Bytes(), params: params}
	err := checkTensors(tensors, v.bytes)
	if v.bytes%4 != 0 || !params.Real() {
		err = fmt.Errorf("its parameters are %d bytes, not whole float32 in memory", v.bytes)
	}
	if s.bases.trained {
		err = &SlotStateError{"", "the base model is trained already"}
	}
	if err == nil {
		err = v.takeState(s.dev)
	}
	same := ""
	if err == nil && !s.alone() {
		same = (&slot{main: v}).print(true)
	}
	if err = s.settle(ctx, "base", err, same); err != nil {
		v.free()
		return fmt.Errorf("train the base model: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.bases.main, s.bases.trained = v, true
	return nil
}
