package loader

import (
	"context"
	"fmt"
	"sync/atomic"

	"github.com/trainerrank/engine/device"
)

// Chunks in the order of the plan: begun one after the other, as many alive as the plan allows, and delivered one after the other. All
// memory is taken and given back by one goroutine, so the bytes in use are the same in every run.

// flight is a chunk that is alive.
type flight struct {
	placedChunk
	batch int
	block *device.Block // its buffer; nil for one that is seen in place
	err   error         // of the read, once done is closed
	done  chan struct{}
}

func (f *flight) data() []byte {
	if f.block == nil {
		return nil
	}
	return f.block.Mem().Raw()
}

// pipeline begins chunks and knows which are alive.
type pipeline struct {
	*load
	queue []*flight // those to be loaded, in order
	begun int       // of queue
	ended int
	depth int
	stop  atomic.Bool
}

// begin begins chunks until those of batch and depth-1 more batches are alive.
func (p *pipeline) begin(ctx context.Context, batch int) error {
	for ; p.begun < len(p.queue) && p.queue[p.begun].batch-batch < p.depth; p.begun++ {
		f := p.queue[p.begun]
		if !p.free(f.file) || f.HandOver {
			purpose := device.InFlight
			if f.HandOver {
				purpose = device.Weights // where it will stay
			}
			var err error
			if f.block, err = p.allocate(purpose, f.Bytes); err != nil {
				return err
			}
		}
		f.done = make(chan struct{})
		go func() {
			defer close(f.done)
			f.err = p.readChunk(ctx, f.placedChunk, f.data(), &p.stop)
		}()
	}
	return nil
}

// end gives the memory of the oldest chunk back, or leaves it to its tensors.
func (p *pipeline) end(f *flight) {
	if f.HandOver {
		p.homes.adopt(f.block)
	} else {
		p.release(f.block)
	}
	f.block = nil
	p.ended++
}

// abandon waits for all reads and gives back what is left.
func (p *pipeline) abandon() {
	p.stop.Store(true)
	for _, f := range p.queue[p.ended:p.begun] {
		<-f.done
		p.release(f.block)
		f.block = nil
	}
}

// copies are the copies of tensors that are delivered as such, while their pieces arrive.
type copies map[*Tensor]*device.Block

// inOrder loads on one rank.
func (l *load) inOrder(ctx context.Context) (err error) {
	p := &pipeline{load: l, depth: buffers(l.plan.QueueSize)}
	for i, c := range l.chunks() {
		p.queue = append(p.queue, &flight{placedChunk: c, batch: i})
	}
	clones := copies{}
	defer func() {
		p.abandon()
		for _, b := range clones {
			l.release(b)
		}
	}()
	l.meter.since()
	for i, f := range p.queue {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		if err := p.begin(ctx, i); err != nil {
			return err
		}
		<-f.done
		if f.err != nil {
			return f.err
		}
		if err := l.settle(ctx, f, clones); err != nil {
			return err
		}
		p.end(f)
		l.finish(f.placedChunk, l.meter.since())
	}
	return nil
}

// settle brings the parts of a chunk to where they belong.
func (l *load) settle(ctx context.Context, f *flight, clones copies) error {
	file := &l.plan.Files[f.file]
	for part := range file.Parts(f.Chunk) {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		stats, t := &file.Tensors[part.Tensor], l.files[f.file][part.Tensor]
		switch {
		case l.stays(stats) && f.HandOver:
			l.homes.mem[t] = f.block.Mem().Slice(part.At, part.Bytes)
		case l.stays(stats):
			home, err := l.home(t)
			if err != nil {
				return err
			}
			if err := l.see(f.placedChunk, part, f.data(), func(data []byte) error {
				copy(home.Slice(part.Offset, part.Bytes).Raw(), data)
				return nil
			}); err != nil {
				return err
			}
		case l.plan.params.YieldClone:
			if err := l.clone(f, part, t, clones); err != nil {
				return err
			}
		default:
			if err := l.see(f.placedChunk, part, f.data(), l.give(f.file, part)); err != nil {
				return err
			}
		}
	}
	return nil
}

// home is the memory of a tensor that stays, taken when it is first asked for.
func (l *load) home(t *Tensor) (device.Mem, error) {
	if m, ok := l.homes.mem[t]; ok {
		return m, nil
	}
	b, err := l.allocate(device.Weights, t.Bytes)
	if err != nil {
		return device.Mem{}, fmt.Errorf("load tensor %s: %w", quote(t.Name), err)
	}
	l.homes.adopt(b)
	l.homes.mem[t] = b.Mem()
	return b.Mem(), nil
}

// clone collects a tensor in memory of its own, and delivers it from there once it is whole.
func (l *load) clone(f *flight, part Part, t *Tensor, clones copies) error {
	b, ok := clones[t]
	if !ok {
		var err error
		if b, err = l.allocate(device.InFlight, t.Bytes); err != nil {
			return fmt.Errorf("load tensor %s: %w", quote(t.Name), err)
		}
		clones[t] = b
	}
	whole := b.Mem()
	if err := l.see(f.placedChunk, part, f.data(), func(data []byte) error {
		copy(whole.Slice(part.Offset, part.Bytes).Raw(), data)
		return nil
	}); err != nil {
		return err
	}
	if part.Offset+part.Bytes < t.Bytes {
		return nil
	}
	err := l.give(f.file, Part{Tensor: part.Tensor, Bytes: t.Bytes})(whole.Raw())
	delete(clones, t)
	l.release(b)
	return err
}
