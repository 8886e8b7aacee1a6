package transformer

import (
	"context"
	"fmt"
	"math"
	"sync"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward/kernel"
	"github.com/trainerrank/engine/loader"
)

// stagingPart is the staging that one reader makes good use of, in bytes: large reads, still in the second-level cache when they are packed.
const stagingPart = 512 << 10

// MinStaging is the least number of bytes that [Model.Load] needs in flight: the largest piece of a file that is packed at once, on
// one reader.
func (m *Model) MinStaging() int64 {
	var largest int64
	for _, j := range m.jobs(nil) {
		largest = max(largest, j.Bytes)
	}
	return device.RoundPages(largest)
}

// Staging is the number of bytes that [Model.Load] keeps in flight when it may use up to limit: as many readers as there are
// workers, as long as each gets the least; never below MinStaging.
func (m *Model) Staging(limit int64) int64 {
	_, each, readers := m.staging(limit)
	return each * readers
}

func (m *Model) staging(limit int64) (least, each, readers int64) {
	least = m.MinStaging()
	readers = max(1, min(int64(m.backend.Threads()), limit/least))
	each = max(least, min(limit/readers, max(least, stagingPart))&^(device.PageSize-1))
	return least, each, readers
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
func (m *Model) Load(ctx context.Context, staging int64, progress func(done, total int64)) error {
	if m.block == nil {
		return fmt.Errorf("load model: the weights of %s have no place", m.name)
	}
	if staging == 0 {
		staging = m.Staging(m.dev.Free())
	}
	least, each, readers := m.staging(staging)
	if staging < least {
		return fmt.Errorf("load model: %d bytes of staging, %d are needed", staging, least)
	}
	buf, err := m.dev.Allocate(device.InFlight, each*readers)
	if err != nil {
		return fmt.Errorf("load model: %w", err)
	}
	defer buf.Free()
	m.loaded = false
	parts := make([][]byte, readers)
	for i := range parts {
		parts[i] = buf.Mem().Slice(int64(i)*each, each).Raw()
	}
	odd := map[string]bool{}
	var mu sync.Mutex
	jobs := m.jobs(func(name string) {
		mu.Lock()
		defer mu.Unlock()
		odd[name] = true
	})
	var total int64
	for _, j := range jobs {
		total += j.Bytes
	}
	var report func(int64)
	if progress != nil {
		report = func(done int64) { progress(done, total) }
	}
	if err := m.set.Load(ctx, parts, jobs, report); err != nil {
		return err
	}
	if m.spare != nil {
		if err := m.compareSpare(ctx, parts); err != nil {
			return err
		}
	}
	m.loaded = true
	for _, p := range m.params {
		if odd[p.Name] {
			m.notes = append(m.notes, fmt.Sprintf("tensor %s holds values that are NaN or infinite", p.Name))
		}
	}
	return nil
}

// compareSpare reads the head that a tied model holds beside its embedding. Software disagrees which of the two it
// uses, so they must be equal.
func (m *Model) compareSpare(ctx context.Context, parts [][]byte) error {
	dtype, err := storage(m.spare)
	if err != nil {
		return err
	}
	row := int64(m.embed.In) * int64(dtype.Size())
	var jobs []loader.Job
	for r := range m.embed.Out {
		jobs = append(jobs, loader.Job{Tensor: m.spare, Offset: int64(r) * row, Bytes: row, Do: func(data []byte) error {
			got, want := make([]float32, m.embed.In), make([]float32, m.embed.In)
			m.backend.Widen(got, data, dtype)
			m.embed.Row(want, r)
			for i := range want {
				if math.Float32bits(got[i]) != math.Float32bits(want[i]) {
					return &TensorError{Name: m.spare.Name, Present: true, Found: m.spare.Shape,
						Advice: fmt.Sprintf("config.json says tie_word_embeddings, but row %d differs from the embedding: say false there to use it, or remove the tensor", r)}
				}
			}
			return nil
		}})
	}
	return m.set.Load(ctx, parts, jobs, nil)
}

// jobs are the pieces of the files that are packed at once: panels of a matrix, or a vector. odd is told of tensors that hold a value
// that is not finite.
func (m *Model) jobs(odd func(tensor string)) []loader.Job {
	var jobs []loader.Job
	for i := range m.params {
		p := &m.params[i]
		size := int64(p.dtype.Size())
		if p.weight == nil {
			jobs = append(jobs, loader.Job{Tensor: p.tensor, Bytes: p.Shape[0] * size, Do: func(data []byte) error {
				v := p.vector.F32()
				m.backend.Widen(v, data, p.dtype)
				for _, x := range v {
					if x-x != 0 {
						odd(p.Name)
						break
					}
				}
				return nil
			}})
			continue
		}
		row := int64(p.weight.In) * size
		for from := 0; from < p.weight.Out; from += kernel.Width {
			n := min(kernel.Width, p.weight.Out-from)
			jobs = append(jobs, loader.Job{Tensor: p.tensor, Offset: int64(from) * row, Bytes: int64(n) * row, Do: func(data []byte) error {
				bad, err := m.backend.PackRows(p.weight, from, data)
				if bad {
					odd(p.Name)
				}
				return err
			}})
		}
	}
	return jobs
}
