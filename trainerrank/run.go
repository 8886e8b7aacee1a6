package trainerrank

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/internal/failpoint"
)

// maxPlans is how often a call is planned, when what it was planned for is gone by the time that it is reserved.
const maxPlans = 3

// reserve plans a call and takes its bytes. Others may take from the device at the same time: if what was free is gone, nothing has run yet, and the call
// is planned anew for what there is. (With peers it is not, since they would have to do the same.) It gives a *MemoryError if that is too little.
func (t *TrainerRank) reserve(ctx context.Context, c *call, g *ground) (*Admission, memory, error) {
	none := (*device.Reservation)(nil)
	for plans := 1; ; plans++ {
		a, err := t.admit(ctx, c, g, false)
		if err != nil {
			return nil, none, err
		}
		t.record(telemetry(a))
		if a.Verdict == Refused {
			return nil, none, c.refusal(a)
		}
		if a.PackedTokens == 0 {
			return a, none, nil // nothing is wanted
		}
		held, err := t.take(c, a)
		if err == nil {
			return a, held, nil
		}
		var oom *device.OutOfMemoryError
		if !errors.As(err, &oom) {
			return nil, none, fmt.Errorf("forward: %w", err)
		}
		if oom.Err != nil || plans == maxPlans || t.peers.Size() > 1 {
			e := c.memoryError(a)
			e.Err = oom
			if all, err := t.admit(ctx, c, g, true); err == nil {
				e.SmallestBudgetBytes = all.SmallestBudgetBytes // so far it is what this plan needs, which may be more than the least
			}
			e.Suggestion = "the operating system has less memory than the device may hold: give the device a smaller capacity, or the call smaller inputs"
			if oom.Err == nil {
				e.Suggestion = "others take the device's memory while the call is planned: let it run alone, or give it smaller inputs"
			}
			return nil, none, e
		}
		g.usable = t.usable(oom.FreeBytes, g.hooks)
	}
}

// take takes the bytes of an admission from the device.
func (t *TrainerRank) take(c *call, a *Admission) (memory, error) {
	if slices.ContainsFunc(c.kinds, func(g group) bool { return g.Grad }) {
		m, err := t.takeTraining(c, a)
		if err != nil {
			return nil, err
		}
		return m, nil
	}
	if a.asked.Learned != nil {
		slab, most := a.PredictedPeakBytes, a.UsableLimitBytes&^(device.PageSize-1)
		if most/2 < slab {
			slab = most // what would be left beside it is of little use, for a piece of memory must lie in one
		}
		pool, err := t.dev.ReservePool(slab, most)
		if err != nil {
			return nil, err
		}
		return pool, nil
	}
	turns := turns(a)
	var res *device.Reservation
	var err error
	if len(turns) == 1 {
		res, err = t.dev.Reserve(turns[0])
	} else {
		res, err = t.dev.ReserveTurns(turns)
	}
	if err != nil {
		return nil, err
	}
	return res, nil
}

// run runs the subforwards of an admission inside its memory. The outputs stay in it.
func (t *TrainerRank) run(ctx context.Context, c *call, a *Admission, res memory, flat []*forward.Output, tel *Telemetry) (err error) {
	done, count := 0, len(a.Chunks)
	defer func() {
		// A slab that is too small is a fault of the rehearsal, and a pool that is empty one of the estimate: an error of this call, not the end of the process.
		if r := recover(); r != nil {
			e, ok := r.(error)
			if !ok || !ranOut(e) {
				panic(r)
			}
			err = fmt.Errorf("forward: the call outgrew its reservation: %w", e)
		}
		tel.ObservedPeakBytes = res.Peak()
		if o := (Observed{tel.ObservedPeakBytes, done, ranOut(err)}); t.misses != nil && (o.RanOut || o.PeakBytes > a.PredictedPeakBytes) {
			r := a.asked.record(a)
			r.form.Observed = &o
			t.misses(r)
		}
		if err != nil {
			if ranOut(err) {
				t.observe(a, done, res, false)
			}
			err = c.failed(a, *tel, done, err)
		}
	}()
	progress := c.progress
	before, total := 0, a.PackedTokens
	for ; done < count; done++ {
		chunk := &a.Chunks[done]
		if err := failpoint.Hit(failpoint.Subforward); err != nil {
			return fmt.Errorf("forward: %w", err)
		}
		if done > 0 {
			if err := ctx.Err(); err != nil {
				return fmt.Errorf("forward: %w", err)
			}
			res.NextTurn()
		}
		for _, p := range chunk.Plan.Work.(*work).passes {
			b, err := c.batch(p)
			if err != nil {
				return fmt.Errorf("forward: %w", err)
			}
			if progress != nil && (count > 1 || len(a.Layout) > 1) {
				packed, from := p.layout.Packed, before
				b.Progress = func(done, all int) { progress(from+int(int64(packed)*int64(done)/int64(max(1, all))), total) }
			} else {
				b.Progress = progress
			}
			b.Arena, b.Keep = res, a.Retention
			if err := t.pass(ctx, p, b, c.kinds[c.groups[p.requests[0]]], flat); err != nil {
				return err
			}
			before += p.layout.Packed
		}
		t.observe(a, done, res, true)
	}
	tel.RetainedBytes = res.Kept()
	res.ReleaseScratch()
	return nil
}

// ranOut says whether an error is about memory.
func ranOut(err error) bool {
	var oom *device.OutOfMemoryError
	var over *device.OverrunError
	return errors.As(err, &oom) || errors.As(err, &over)
}

// pass runs one batch on the checkpoint of its group, and puts its outputs where they belong.
func (t *TrainerRank) pass(ctx context.Context, p *pass, b *forward.Batch, kind group, flat []*forward.Output) error {
	var g *graph
	if m, ok := b.Arena.(*training); ok {
		defer m.observe()
		if kind.Grad {
			g = m.begin()
			b.Adapter = g.lease.Adapter()
		}
	}
	if g == nil && kind.Slot != "" {
		lease, err := t.slots.Acquire(kind.Slot)
		if err != nil {
			return fmt.Errorf("forward: %w", err)
		}
		defer lease.Release()
		b.Adapter = lease.Adapter()
	}
	res, err := t.model.Forward(ctx, b)
	if err != nil {
		return fmt.Errorf("forward: %w", err)
	}
	if res == nil {
		return errors.New("forward: the model gave no pass")
	}
	if len(res.Outputs) != len(p.requests) {
		return fmt.Errorf("forward: the model gave %d outputs for %d requests", len(res.Outputs), len(p.requests))
	}
	if g != nil {
		if res.Graph == nil {
			return errors.New("forward: the model kept no graph")
		}
		g.Graph = res.Graph
	}
	for i, r := range p.requests {
		*flat[r] = res.Outputs[i] // a copy: whatever the model does with its own keeps nothing of the call
		flat[r].Checkpoint = kind.Slot
	}
	return nil
}

// failed is the error of a call whose execution failed after so many subforwards. A call that was told to stop did not fail.
func (c *call) failed(a *Admission, tel Telemetry, done int, err error) error {
	count := len(a.Chunks)
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) || count == 1 && a.asked.Learned == nil {
		return err
	}
	if ranOut(err) {
		e := c.memoryError(a)
		e.Telemetry, e.Err, e.Executing = tel, err, true
		e.Suggestion = "the rehearsal of the model promised less than the model asked for; smaller inputs may run"
		if a.asked.Learned != nil {
			e.Suggestion = "what it took is remembered, so that the same call is planned with more, split or refused; or give it smaller inputs"
		}
		err = e
	}
	if count == 1 {
		return err
	}
	return &PartialExecutionError{Completed: done, Count: count, Err: err}
}
