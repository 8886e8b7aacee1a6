package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/forward/kernel"
	"github.com/trainerrank/engine/forward/prefixtree"
	"github.com/trainerrank/engine/forward/transformer"
	"github.com/trainerrank/engine/internal/builtin"
	"github.com/trainerrank/engine/trainerrank"
)

// bench is where an arm runs: what it was told, and what it reports.
type bench struct {
	context.Context
	*config
	gates   []Gate
	notes   []string
	trace   Trace
	tables  []prefixtree.Table
	closers []func() error
}

func newBench(ctx context.Context, c *config) *bench { return &bench{Context: ctx, config: c} }

func (b *bench) close() error {
	var err error
	for _, f := range b.closers {
		err = errors.Join(err, f())
	}
	b.closers = nil
	return err
}

func (b *bench) gate(g ...Gate) { b.gates = append(b.gates, g...) }

func (b *bench) equal(name string, bound, observed int64) {
	b.gate(Gate{Name: name, Op: Equal, Bound: bound, Observed: observed})
}

func (b *bench) atMost(name string, bound, observed int64) {
	b.gate(Gate{Name: name, Op: AtMost, Bound: bound, Observed: observed})
}

func (b *bench) atLeast(name string, bound, observed int64) {
	b.gate(Gate{Name: name, Op: AtLeast, Bound: bound, Observed: observed})
}

func (b *bench) note(format string, args ...any) {
	b.notes = append(b.notes, fmt.Sprintf(format, args...))
}

// openModel opens the model: its configuration and headers are read, no payload.
func (b *bench) openModel(threads int) (*transformer.Model, error) {
	backend, err := kernel.NewHost(threads)
	if err != nil {
		return nil, err
	}
	b.closers = append(b.closers, func() error { backend.Close(); return nil })
	var m *transformer.Model
	if name, ok := strings.CutPrefix(b.Model, "builtin:"); ok {
		folder, err := builtin.Open(name)
		if err != nil {
			return nil, err
		}
		m, err = transformer.OpenFS(folder, b.Model, backend)
		if err != nil {
			return nil, err
		}
	} else if m, err = transformer.OpenFolder(b.Model, backend); err != nil {
		return nil, err
	}
	b.closers = append([]func() error{m.Close}, b.closers...) // before its backend
	return m, nil
}

// ample is a capacity that a plan never reaches. Nothing of it is taken.
const ample = 1 << 50

// priceOn plans a call on an empty device of usable bytes. Arms do that with a twin of the model that never runs, so that the model under
// test stays cold. With options it is a call that trains: see [training].
func priceOn(ctx context.Context, m forward.Model, in forward.Inputs, usable int64, opts ...trainerrank.CallOption) (*trainerrank.Admission, error) {
	nowhere, err := device.NewHost(ample)
	if err != nil {
		return nil, err
	}
	rank, err := trainerrank.New(m, trainerrank.WithDevice(nowhere), trainerrank.WithUsableBytes(usable))
	if err != nil {
		return nil, err
	}
	defer rank.Close()
	if len(opts) > 0 {
		if err := rank.CreateCheckpoint(ctx, policy, policyConfig); err != nil {
			return nil, err
		}
	}
	return rank.Plan(ctx, in, opts...)
}

// smallest is the smallest number of usable bytes with which a call is admitted: what its refusal with nothing says.
func smallest(ctx context.Context, m forward.Model, in forward.Inputs, opts ...trainerrank.CallOption) (int64, error) {
	a, err := priceOn(ctx, m, in, 0, opts...)
	if err != nil {
		return 0, err
	}
	return a.SmallestBudgetBytes, nil
}

// lab is a loaded model on a device of its own.
type lab struct {
	*bench
	dev   *device.Host
	model *spy
}

// lab loads the model onto a device that has room for calls of up to need bytes, twice, unless a capacity is stated.
func (b *bench) lab(threads int, need int64) (*lab, error) {
	m, err := b.openModel(threads)
	if err != nil {
		return nil, err
	}
	capacity := b.Capacity
	if capacity == 0 {
		capacity = m.WeightBytes() + 2*need + 64<<20
	}
	l := &lab{bench: b, model: &spy{Model: m}}
	if l.dev, err = device.NewHost(capacity); err != nil {
		return nil, err
	}
	if err := m.Place(l.dev); err != nil {
		return nil, err
	}
	if err := m.Load(b, 0, nil); err != nil {
		return nil, err
	}
	if free := l.dev.Free(); free < need {
		return nil, fmt.Errorf("a capacity of %d bytes leaves %d beside the weights, and the call needs %d", capacity, free, need)
	}
	return l, nil
}

// rank wraps the model anew: what one has learned another does not know.
func (l *lab) rank(opts ...trainerrank.Option) (*trainerrank.TrainerRank, error) {
	return trainerrank.New(l.model, opts...)
}

// squeeze puts live ballast on the device until at most usable bytes are free. Every page of it is touched: the memory is really gone.
func (l *lab) squeeze(usable int64) (*device.Block, error) {
	free := l.dev.Free()
	usable &^= device.PageSize - 1
	if usable < 0 || usable > free {
		return nil, fmt.Errorf("ballast: %d bytes are free, %d are to be left", free, usable)
	}
	block, err := l.dev.Allocate(device.Ballast, (free-usable)&^(device.PageSize-1))
	if err != nil {
		return nil, err
	}
	if l.model.record != nil { // it comes during a call
		l.model.record.sample()
	}
	touch(block.Mem().Raw())
	return block, nil
}

func touch(mem []byte) {
	for i := 0; i < len(mem); i += device.PageSize {
		mem[i] = 1
	}
}

// spy is the model under test with its calls counted, its memory watched, and faults put in where an arm asks for them.
type spy struct {
	*transformer.Model
	forwards  int
	backwards int               // of graphs
	record    *recorder         // of the present call; nil: it is not drawn
	fault     func(i int) error // asked before forward i of the call, from 0 on
	backFault func(i int) error // asked before backward i of the call's graphs
	rehearsed func()            // told of each rehearsal, one at a time
	mu        sync.Mutex
}

// spied is a graph of a spy's pass.
type spied struct {
	forward.Graph
	*spy
}

// Backward runs it, or fails.
func (g spied) Backward(ctx context.Context, arena device.Arena, grads []forward.OutputGrad) (device.Mem, error) {
	i := g.backwards
	g.backwards++
	if g.backFault != nil {
		if err := g.backFault(i); err != nil {
			return device.Mem{}, err
		}
	}
	if g.record != nil {
		arena = &tap{arena, g.record}
	}
	return g.Graph.Backward(ctx, arena, grads)
}

// Forward runs a batch, or fails.
func (s *spy) Forward(ctx context.Context, batch *forward.Batch) (*forward.Pass, error) {
	i := s.forwards
	s.forwards++
	if s.fault != nil {
		if err := s.fault(i); err != nil {
			return nil, err
		}
	}
	if s.record != nil {
		tapped := *batch
		tapped.Arena = &tap{batch.Arena, s.record}
		batch = &tapped
	}
	pass, err := s.Model.Forward(ctx, batch)
	if err == nil && pass.Graph != nil {
		pass.Graph = spied{pass.Graph, s}
	}
	return pass, err
}

// Rehearse says what a batch needs.
func (s *spy) Rehearse(batch *forward.Batch) (forward.Footprint, error) {
	s.mu.Lock()
	if s.rehearsed != nil {
		s.rehearsed()
	}
	s.mu.Unlock()
	return s.Model.Rehearse(batch)
}

// outcome is what became of a call, and what the device saw of it.
type outcome struct {
	err      error
	digests  []string // of the outputs, in the caller's order; nil if there are none
	tel      trainerrank.Telemetry
	usable   int64 // bytes that were free before
	observed int64 // the most bytes in use during the call and its backward, beside those before: by the device, not by the telemetry
	told     int64 // the same as the result says
	taken    int64 // the most bytes allocated, beside those before
	kept     int64 // bytes that the unreleased result has in use after its forward
	live     int64 // bytes that the unreleased result keeps allocated, after its backward if there was one
	forwards int   // that were run
	changed  bool  // the device's counters differ from those before, after the result was released
	refusal  *trainerrank.MemoryError
	trained               // what became of its backward
	planned  device.Sizes // what it was to use, if it is drawn
}

// call runs a call, reads its outputs and releases it. With a title it is drawn.
func (l *lab) call(title string, rank *trainerrank.TrainerRank, in forward.Inputs, opts ...trainerrank.CallOption) *outcome {
	return l.callIn(l.Context, title, rank, in, opts...)
}

func (l *lab) callIn(ctx context.Context, title string, rank *trainerrank.TrainerRank, in forward.Inputs, opts ...trainerrank.CallOption) *outcome {
	return l.callAnd(ctx, title, rank, in, nil, opts...)
}

// callAnd does something with the result before it is released: a backward.
func (l *lab) callAnd(ctx context.Context, title string, rank *trainerrank.TrainerRank, in forward.Inputs, and func(*trainerrank.Result, *outcome), opts ...trainerrank.CallOption) *outcome {
	o := new(outcome)
	l.model.forwards, l.model.backwards = 0, 0
	before := l.dev.Stats()
	o.usable = l.dev.Free()
	l.dev.ResetPeak()
	asked := opts
	if title != "" {
		l.model.record = newRecorder(l.dev)
		defer func() { l.model.record = nil }()
		// First, so that the caller's own takes its place: the arena is watched all the same.
		opts = append([]trainerrank.CallOption{trainerrank.WithProgress(func(int, int) { l.model.record.sample() })}, opts...)
	}
	res, err := rank.DPRankForward(ctx, in, opts...)
	o.err = err
	errors.As(err, &o.refusal)
	o.forwards = l.model.forwards
	if res != nil {
		o.digests = digests(res.Outputs.Flat())
		o.tel = res.Telemetry
		o.kept = l.dev.Stats().TotalInUse() - before.TotalInUse()
		if and != nil {
			if title != "" {
				l.model.record.backward()
			}
			and(res, o)
		}
		o.told = res.ObservedPeakBytes()
	} else if last, err := rank.LastForwardTelemetry(); err == nil {
		o.tel = last
	}
	if title != "" {
		l.model.record.end()
	}
	after := l.dev.Stats()
	o.observed = after.PeakInUse - before.TotalInUse()
	o.taken = after.PeakAllocated - before.Allocated
	o.live = after.Allocated - before.Allocated
	if res != nil {
		res.Release()
	}
	o.changed = counters(l.dev.Stats()) != counters(before)
	if title != "" {
		// The plan is that of the call, unless the memory that there is has changed meanwhile.
		if a, err := rank.Plan(l, in, asked...); err == nil && a.PredictedPeakBytes == o.tel.PredictedPeakBytes {
			o.planned = a.Shares
		}
		l.trace.Calls = append(l.trace.Calls, l.model.record.trace(title, o))
	}
	return o
}

// held are the counters of a device, without peaks.
type held struct {
	allocated            int64
	inUse                device.Sizes
	blocks, reservations int
}

func counters(s device.Stats) held { return held{s.Allocated, s.InUse, s.Blocks, s.Reservations} }

// differing is how many of the answers have other bits than those wanted.
func differing(want, got []string) int64 {
	n := int64(max(len(want), len(got)) - min(len(want), len(got)))
	for i := range min(len(want), len(got)) {
		if want[i] != got[i] {
			n++
		}
	}
	return n
}

// count is 1 or 0.
func count(is bool) int64 {
	if is {
		return 1
	}
	return 0
}
