package trainerrank

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/slots"
)

// GraphError is a backward that cannot be run: nothing was changed by it.
type GraphError struct {
	Subforward int // its place in the order of execution; -1: the call as a whole
	Reason     string
}

func (e *GraphError) Error() string {
	if e.Subforward < 0 {
		return "backward: " + e.Reason
	}
	return fmt.Sprintf("backward of subforward %d: %s", e.Subforward+1, e.Reason)
}

// graph is what a pass with gradients left: one for each group with gradients of each subforward.
type graph struct {
	subforward int
	requests   []int // the caller's, in the order of its rows
	kept       *device.Reservation
	lease      *slots.Lease
	forward.Graph
	over string // why there is nothing left of it; "" while it is live
}

// end gives back what a graph holds.
func (g *graph) end(why string) {
	if g.over == "" {
		g.over, g.Graph = why, nil
		g.kept.Release()
		g.lease.Release()
	}
}

// training is the memory of a call with gradients: the slabs of outputs and of intermediates, which serve one pass at a time, forward or backward, and what each
// graph keeps. The intermediates are given back when no graph is live any more.
type training struct {
	*device.Reservation
	mu     sync.Mutex // held by a backward, and by whoever gives memory back
	graphs []*graph   // in the order of execution
	begun  int        // of these
	peak   int64
}

// begin begins the pass of the next graph.
func (m *training) begin() *graph {
	m.begun++
	return m.graphs[m.begun-1]
}

// Keep implements [device.Arena]. Gradients lie below the intermediates of the backward that computes them.
func (m *training) Keep(p device.Purpose, bytes int64) device.Mem {
	switch p {
	case device.Retained:
		return m.graphs[m.begun-1].kept.Keep(p, bytes)
	case device.Gradients:
		return m.Scratch(device.RoundPages(bytes)).Slice(0, bytes)
	}
	return m.Reservation.Keep(p, bytes)
}

// NextTurn implements memory: all passes have the same slabs.
func (m *training) NextTurn() {}

// Peak is the most that was in use at one moment so far, in bytes.
func (m *training) Peak() int64 {
	m.observe()
	return m.peak
}

// observe closes the books on a pass. A graph takes all that it keeps before any intermediate, so the two were highest together.
func (m *training) observe() {
	m.peak = max(m.peak, m.retained()+m.Reservation.Peak())
	m.Reservation.ResetPeak()
}

// retained is what graphs keep now, in bytes.
func (m *training) retained() int64 {
	n := int64(0)
	for _, g := range m.graphs {
		if g.over == "" && g.kept != nil {
			n += g.kept.InUse()
		}
	}
	return n
}

// Kept implements memory.
func (m *training) Kept() int64 { return m.Reservation.Kept() + m.retained() }

// ReleaseScratch implements memory: backwards will need it.
func (m *training) ReleaseScratch() {}

// Release ends all graphs and gives all memory back. Again does nothing.
func (m *training) Release() {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, g := range m.graphs {
		g.end("the result was released")
	}
	m.Reservation.Release()
}

// takeTraining takes the memory of an admitted call with gradients: the slabs, what each graph keeps, and its lease.
func (t *TrainerRank) takeTraining(c *call, a *Admission) (_ *training, err error) {
	m := &training{}
	defer func() {
		if err != nil {
			m.Release()
			var oom *device.OutOfMemoryError
			if errors.As(err, &oom) {
				whole := *oom
				whole.FreeBytes = t.dev.Free() // without what was taken of this call already
				err = &whole
			}
		}
	}()
	if m.Reservation, err = t.dev.Reserve(slabs(a)); err != nil {
		return m, err
	}
	for j := range a.Chunks {
		if a.Chunks[j].Plan == nil {
			continue
		}
		for _, p := range a.Chunks[j].Plan.Work.(*work).passes {
			if !c.kinds[c.groups[p.requests[0]]].Grad {
				continue
			}
			g := &graph{subforward: j, requests: p.requests}
			if keep := p.prints[a.Retention].Retained; keep > 0 {
				if g.kept, err = t.dev.Reserve(device.Sizes{device.Retained: keep}); err != nil {
					return m, err
				}
			}
			m.graphs = append(m.graphs, g)
			if g.lease, err = t.slots.Acquire(c.kinds[c.groups[p.requests[0]]].Slot); err != nil {
				return m, err
			}
		}
	}
	return m, nil
}

// slabs are what the outputs of all subforwards of a call take, and the intermediates of the one that needs most.
func slabs(a *Admission) device.Sizes {
	var s device.Sizes
	for _, chunk := range a.Chunks {
		s[device.Outputs] += chunk.Price.Outputs
		s[device.Scratch] = max(s[device.Scratch], chunk.Price.Ephemeral())
	}
	s[device.Outputs] = device.RoundPages(s[device.Outputs])
	return s
}

// Subforward is one of the subforwards that a call was run in. It has a backward of its own, which may be run before or after those of the others, while these are
// live.
type Subforward struct {
	// RequestIndices are the caller's inputs that it answered.
	RequestIndices []int

	result *Result
	number int
}

// Subforwards are those of the call, in the order in which they were run.
func (r *Result) Subforwards() []*Subforward {
	list := make([]*Subforward, len(r.Telemetry.SubforwardRequestIndices))
	for j, requests := range r.Telemetry.SubforwardRequestIndices {
		list[j] = &Subforward{requests, r, j}
	}
	return list
}

// Backward adds the gradient of sum(output * cotangent) over all outputs of the call to the accumulators of the checkpoints that they ran on. grads has one element per input, in the
// caller's order; those of inputs without gradients must be zero. All graphs of the call must be live. Their memory is given back, the outputs stay.
//
// Nothing in it can run out of memory. If it is cancelled, the graphs whose backward was not done stay live, and [Subforward.Backward] can be called for
// them. Gradients do not depend, bit for bit, on the number of threads or on what was retained.
func (r *Result) Backward(ctx context.Context, grads []forward.OutputGrad) error {
	return r.backward(ctx, -1, grads)
}

// Backward is [Result.Backward] for one subforward. grads has one element for each of its RequestIndices.
func (s *Subforward) Backward(ctx context.Context, grads []forward.OutputGrad) error {
	if len(grads) != len(s.RequestIndices) {
		return &GraphError{s.number, fmt.Sprintf("cotangents of %d outputs, but it has %d", len(grads), len(s.RequestIndices))}
	}
	all := make([]forward.OutputGrad, s.result.inputs)
	for i, r := range s.RequestIndices {
		all[r] = grads[i]
	}
	return s.result.backward(ctx, s.number, all)
}

// backward runs the backward of a subforward, or of all of them if number is -1.
func (r *Result) backward(ctx context.Context, number int, grads []forward.OutputGrad) error {
	defer runtime.KeepAlive(r.held)
	if len(grads) != r.inputs {
		return &GraphError{number, fmt.Sprintf("cotangents of %d outputs, but there are %d", len(grads), r.inputs)}
	}
	m, ok := r.held.memory.(*training)
	if !ok {
		return &GraphError{number, "the call kept no graph: ask for gradients with WithGradMode, or in its inputs"}
	}
	if err := r.owner.lock(ctx); err != nil {
		return err
	}
	defer func() { <-r.owner.turn }()
	m.mu.Lock()
	defer m.mu.Unlock()
	var list []*graph
	with := make([]bool, r.inputs)
	for _, g := range m.graphs {
		if number >= 0 && g.subforward != number {
			continue
		}
		for _, q := range g.requests {
			with[q] = true
		}
		if g.over != "" {
			return &GraphError{g.subforward, g.over}
		}
		if g.lease.Stale() {
			return &GraphError{g.subforward, fmt.Sprintf("checkpoint %q, or the base model, was stepped or closed since the forward", g.lease.Name())}
		}
		list = append(list, g)
	}
	for q := range grads {
		if c := &grads[q]; !with[q] && (c.TargetLogprobs != nil || c.Logits != nil || c.HiddenStates != nil) {
			return &GraphError{number, fmt.Sprintf("output %d has a cotangent, but keeps no graph here", q)}
		}
	}
	if len(list) == 0 {
		return &GraphError{number, "it kept no graph"}
	}
	// Within a subforward the last pass needs most.
	slices.Reverse(list)
	slices.SortStableFunc(list, func(a, b *graph) int { return a.subforward - b.subforward })
	for _, g := range list {
		if err := r.owner.backward(ctx, m, g, grads); err != nil {
			return err
		}
	}
	return nil
}

// backward runs the backward of one graph, and adds what it gives to the accumulators of its checkpoint.
func (t *TrainerRank) backward(ctx context.Context, m *training, g *graph, grads []forward.OutputGrad) error {
	own := make([]forward.OutputGrad, len(g.requests))
	for i, q := range g.requests {
		own[i] = grads[q]
	}
	mark := m.Mark()
	defer func() {
		m.Pop(mark)
		m.observe()
		if !slices.ContainsFunc(m.graphs, func(g *graph) bool { return g.over == "" }) {
			m.Reservation.ReleaseScratch()
		}
	}()
	vector, err := g.Backward(ctx, m, own)
	if err != nil {
		return err
	}
	over := "its gradients are lost: they could not be added to those of the checkpoint"
	defer func() {
		m.observe() // while the graph's memory is there
		g.end(over)
	}()
	if err := t.slots.Accumulate(g.lease.Name(), vector); err != nil {
		return fmt.Errorf("backward: %w", err)
	}
	over = "its backward was run already"
	return nil
}
