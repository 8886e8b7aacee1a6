package transformer

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync/atomic"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward/kernel"
	"github.com/trainerrank/engine/loader"
)

// stagingPart is the staging that one reader makes good use of, in bytes: large reads, still in the second-level cache when they are packed.
const stagingPart = 512 << 10

// MinStaging is the least number of bytes that [Model.Load] needs in flight: the largest piece of a file that is packed at once, on
// one reader.
func (m *Model) MinStaging() int64 {
	least := m.least(nil)
	if m.spare != nil {
		least = max(least, m.least(m.spare))
	}
	return least
}

func (m *Model) least(only *loader.Tensor) int64 {
	_, err := m.fit(nil, 1, only)
	var e *loader.BudgetInfeasibleError
	if !errors.As(err, &e) {
		panic(fmt.Sprintf("transformer: a load with one byte of staging: %v", err)) // a buffer has a page at least
	}
	return e.Minimum - m.bytes
}

// Staging is the number of bytes that [Model.Load] keeps in flight when it may use up to limit: as many readers as there are
// workers, as long as each gets the least; never below MinStaging.
func (m *Model) Staging(limit int64) int64 {
	plan, err := m.fit(nil, limit, nil)
	if err != nil {
		return m.MinStaging()
	}
	return max(plan.BufferBytes*int64(plan.Buffers), m.MinStaging())
}

// fit plans a load with so many bytes in flight, of the tensors of the model, or only of one. The slab is there before.
func (m *Model) fit(copier loader.Copier, staging int64, only *loader.Tensor) (*loader.FitPlan, error) {
	if copier == nil {
		copier = m.copier()
	}
	atoms := make(map[*loader.Tensor]int64, len(m.params))
	most := int64(stagingPart)
	atom := func(t *loader.Tensor, weight bool, size int) {
		if !weight {
			atoms[t] = 0
			most = max(most, t.Bytes)
			return
		}
		atoms[t] = min(kernel.Width, t.Shape[0]) * t.Shape[1] * int64(size)
		most = max(most, atoms[t])
	}
	if only != nil { // it is compared, a row at a time
		atoms[only] = only.Bytes / max(only.Shape[0], 1)
		most = max(most, atoms[only])
	} else {
		for i := range m.params {
			atom(m.params[i].tensor, m.params[i].weight != nil, m.params[i].dtype.Size())
		}
	}
	stats := loader.StatsOf(m.set, loader.StatsOptions{
		Keep: func(t *loader.Tensor) bool { _, ok := atoms[t]; return ok },
		Atom: func(t *loader.Tensor) int64 { return atoms[t] },
	})
	return loader.Fit(stats, loader.PlanParams{
		Budget: m.bytes + min(max(staging, 1), math.MaxInt64-m.bytes), QueueSize: queue(m.backend.Threads()), MaxChunk: most, Group: 1,
		Preallocated: m.bytes, Align: device.PageSize, DepthFirst: true, Copier: copier.Costs(m.set.Files),
	})
}

// queue is the size of a queue with as many chunks alive as there are threads.
func queue(threads int) int {
	if threads < 2 {
		return -1
	}
	return threads - 2
}

// copier is how a model is read if nothing else is asked for: through the page cache, which works for every file and whose need does not
// depend on what is in that cache at the moment.
func (m *Model) copier() loader.Copier {
	c, err := loader.NewCopier(loader.CopierPread, m.backend.Threads())
	if err != nil {
		panic(err) // every system has it
	}
	return c
}

// Place takes the memory of the weights on a device. The model must be placed before it is loaded.
func (m *Model) Place(dev device.Device) error {
	if m.block != nil {
		return fmt.Errorf("place model: the weights of %s are placed already", m.name)
	}
	b, err := dev.Allocate(device.Weights, m.bytes)
	if err != nil {
		return fmt.Errorf("place the weights of %s: %w", m.name, err)
	}
	m.dev, m.block = dev, b
	for i := range m.params {
		p := &m.params[i]
		mem := b.Mem().Slice(p.offset, p.bytes)
		if p.weight != nil {
			p.weight.Mem = mem
		} else {
			*p.vector = mem
		}
	}
	return nil
}

// Load reads the weights into the place that [Model.Place] took, with at most staging bytes in flight ([Model.Staging] says
// how many are useful, [Model.MinStaging] how many are needed); 0 means as many as are useful and free. progress, if not nil, is
// told the file bytes read so far, of total. Weights that are NaN or infinite are loaded and noted.
//
// It is planned before a byte is read: too little staging is a [*loader.BudgetInfeasibleError], whose budget is that of weights and
// staging together.
func (m *Model) Load(ctx context.Context, staging int64, progress func(done, total int64)) error {
	_, err := m.LoadBy(ctx, nil, staging, progress)
	return err
}

// LoadBy is Load with a copier of the caller's choice, nil for that of Load, and a report of what was read and held. The copier's own
// memory counts as staging.
func (m *Model) LoadBy(ctx context.Context, copier loader.Copier, staging int64, progress func(done, total int64)) (*loader.LoadReport, error) {
	if m.block == nil {
		return nil, fmt.Errorf("load model: the weights of %s have no place", m.name)
	}
	if copier == nil {
		copier = m.copier()
	}
	if staging == 0 {
		staging = m.dev.Free()
	}
	plan, err := m.fit(copier, staging, nil)
	if err != nil {
		return nil, fmt.Errorf("load model: %w", err)
	}
	m.loaded = false
	o := loader.LoadOptions{Device: m.dev, Copier: copier, Threads: m.backend.Threads(), Progress: progress}
	odd := m.receive(&o)
	_, report, err := m.set.Execute(ctx, plan, o)
	if err != nil {
		return report, err
	}
	if m.spare != nil {
		if err := m.compareSpare(ctx, copier, staging); err != nil {
			return report, err
		}
	}
	m.loaded = true
	for i := range m.params {
		if odd[i].Load() {
			m.notes = append(m.notes, fmt.Sprintf("tensor %s holds values that are NaN or infinite", m.params[i].Name))
		}
	}
	return report, nil
}

// receive takes the pieces of a load to where they belong: panels of a matrix, or a vector. It returns, by parameter, whether a value of
// it is not finite.
func (m *Model) receive(o *loader.LoadOptions) (odd []atomic.Bool) {
	odd = make([]atomic.Bool, len(m.params))
	index := make(map[*loader.Tensor]int, len(m.params))
	for i := range m.params {
		index[m.params[i].tensor] = i
	}
	o.Deliver = func(piece loader.Piece) error {
		i := index[piece.Tensor]
		p := &m.params[i]
		if p.weight != nil {
			row, data := int64(p.weight.In)*int64(p.dtype.Size()), piece.Data
			if p.weight.DType != p.dtype { // the base model is trained
				wide := make([]float32, len(data)/p.dtype.Size())
				m.backend.Widen(wide, data, p.dtype)
				data = bytesOf(wide)
			}
			bad, err := m.backend.PackRows(p.weight, int(piece.Offset/row), data)
			if bad {
				odd[i].Store(true)
			}
			return err
		}
		v := p.vector.F32()
		m.backend.Widen(v, piece.Data, p.dtype)
		for _, x := range v {
			if x-x != 0 {
				odd[i].Store(true)
				break
			}
		}
		return nil
	}
	return odd
}

// compareSpare reads the head that a tied model holds beside its embedding. Software disagrees which of the two it
// uses, so they must be equal.
func (m *Model) compareSpare(ctx context.Context, copier loader.Copier, staging int64) error {
	dtype, err := storage(m.spare)
	if err != nil {
		return err
	}
	plan, err := m.fit(copier, staging, m.spare)
	if err != nil {
		return fmt.Errorf("load model: compare the spare head: %w", err)
	}
	row := m.embed.In * dtype.Size()
	_, _, err = m.set.Execute(ctx, plan, loader.LoadOptions{Device: m.dev, Copier: copier, Threads: m.backend.Threads(), Deliver: func(p loader.Piece) error {
		got, want := make([]float32, m.embed.In), make([]float32, m.embed.In)
		r := int(p.Offset) / row
		for data := p.Data; len(data) > 0; data = data[row:] {
			m.backend.Widen(got, data[:row], dtype)
			m.embed.Row(want, r)
			for i := range want {
				if math.Float32bits(got[i]) != math.Float32bits(want[i]) {
					return &TensorError{Name: m.spare.Name, Present: true, Found: m.spare.Shape,
						Advice: fmt.Sprintf("config.json says tie_word_embeddings, but row %d differs from the embedding: say false there to use it, or remove the tensor", r)}
				}
			}
			r++
		}
		return nil
	}})
	return err
}
