package loader

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/trainerrank/engine/collective"
	"github.com/trainerrank/engine/device"
)

// DigestError says that ranks that are to load together have not planned the same. It is the same on all ranks.
type DigestError struct {
	Rank  int // the lowest that differs from rank 0
	Item  string
	Zero  string // its value on rank 0
	Other string // its value on the rank
}

// Error names the item with both values.
func (e *DigestError) Error() string {
	return fmt.Sprintf("load: the plans of the ranks differ: %s is %s on rank 0 and %s on rank %d", e.Item, e.Zero, e.Other, e.Rank)
}

// FitTogether is [Fit] on several ranks that will load together: if one of them cannot plan, none goes on.
func FitTogether(ctx context.Context, w collective.World, stats []FileStats, p PlanParams) (*FitPlan, error) {
	plan, err := Fit(stats, p)
	if err = collective.Agree(ctx, w, err); err != nil {
		return nil, err
	}
	return plan, nil
}

// together makes an error of one rank an error of all.
func (l *load) together(ctx context.Context, err error) error {
	if l.world.Size() == 1 {
		return err
	}
	return collective.Agree(ctx, l.world, err)
}

// agree checks that all ranks have the same plan.
func (l *load) agree(ctx context.Context) error {
	if l.world.Size() > 1 {
		mine := l.plan.Digest()
		text, err := json.Marshal(mine)
		if err != nil {
			return err
		}
		all, err := l.world.AllGather(ctx, "load/digest", text)
		if err != nil {
			return fmt.Errorf("load: %w", err)
		}
		digests := make([]Digest, len(all))
		for i, text := range all {
			if err := json.Unmarshal(text, &digests[i]); err != nil {
				return fmt.Errorf("load: the digest of rank %d: %w", i, err)
			}
		}
		for rank := range digests {
			if item, other, differ := digests[0].Diff(digests[rank]); differ {
				return &DigestError{Rank: rank, Item: item.Name, Zero: item.Value, Other: other}
			}
		}
	}
	if g := l.plan.Group; g > 1 && g != l.world.Size() {
		return fmt.Errorf("load: the plan is for %d ranks that read for each other, and there are %d", g, l.world.Size())
	}
	return nil
}

// broadcast loads as a group of ranks: each reads its own files, and every tensor is sent by the one that has it.
//
// Whatever a rank can fail in by itself (reads, memory, what the caller does with a tensor) it brings to the meeting before the
// next batch is sent, so all stop at the same place.
func (l *load) broadcast(ctx context.Context) (err error) {
	me := l.world.Rank()
	var batches []Batch
	p := &pipeline{load: l, depth: buffers(l.plan.QueueSize)}
	for b := range l.plan.Batches() {
		if c := b.Chunks[me]; c != nil {
			p.queue = append(p.queue, &flight{placedChunk: placedChunk{c, b.First + me}, batch: len(batches)})
		}
		batches = append(batches, b)
	}
	defer p.abandon()
	var failed error // by this rank alone, not yet said
	for i, b := range batches {
		var mine *flight
		if failed == nil {
			failed = context.Cause(ctx)
		}
		if failed == nil {
			failed = p.begin(ctx, i)
		}
		if p.ended < p.begun && p.queue[p.ended].batch == i && failed == nil {
			mine = p.queue[p.ended]
			<-mine.done
			failed = mine.err
		}
		var temp *device.Block
		if failed == nil {
			temp, failed = l.ready(b, mine)
		}
		if err := collective.Agree(ctx, l.world, failed); err != nil {
			l.release(temp)
			return err
		}
		for r, c := range b.Chunks {
			if c == nil {
				continue
			}
			if err := l.exchange(ctx, r, placedChunk{c, b.First + r}, mine, temp, &failed); err != nil {
				l.release(temp)
				return errors.Join(failed, err)
			}
		}
		l.release(temp)
		if mine != nil {
			p.end(mine)
			l.finish(mine.placedChunk, l.meter.since())
		}
	}
	return collective.Agree(ctx, l.world, failed)
}

// ready takes all memory that a batch needs on this rank: a home for what stays, and room for one piece that does not.
func (l *load) ready(b Batch, mine *flight) (temp *device.Block, err error) {
	var most int64
	for r, c := range b.Chunks {
		if c == nil {
			continue
		}
		f := &l.plan.Files[b.First+r]
		own := mine != nil && mine.Chunk == c
		for part := range f.Parts(c) {
			t := &f.Tensors[part.Tensor]
			switch x := l.files[b.First+r][part.Tensor]; {
			case l.stays(t) && own && c.HandOver:
				l.homes.mem[x] = mine.block.Mem().Slice(part.At, part.Bytes)
			case l.stays(t):
				if _, err := l.home(x); err != nil {
					return nil, err
				}
			case !own || l.plan.params.YieldClone:
				most = max(most, min(part.Bytes, l.pieceBytes(t)))
			}
		}
	}
	return l.allocate(device.InFlight, most)
}

// pieceBytes is the most of a tensor that is sent at once: one piece if the plan may cut it, else all.
func (l *load) pieceBytes(t *TensorStats) int64 {
	if t.Atom > 0 && t.Atom < t.Bytes && !l.plan.params.YieldClone {
		return t.Atom
	}
	return max(t.Bytes, 1)
}

// exchange brings a chunk of rank root to all ranks. Its error is one of the world; failed is that of this rank alone.
func (l *load) exchange(ctx context.Context, root int, c placedChunk, mine *flight, temp *device.Block, failed *error) error {
	f := &l.plan.Files[c.file]
	own := root == l.world.Rank()
	for part := range f.Parts(c.Chunk) {
		t := l.files[c.file][part.Tensor]
		stays := l.stays(&f.Tensors[part.Tensor])
		step := l.pieceBytes(&f.Tensors[part.Tensor])
		if stays {
			step = max(part.Bytes, 1)
		}
		for off := int64(0); off < part.Bytes || off == 0; off += step {
			piece := Part{Tensor: part.Tensor, Offset: part.Offset + off, Bytes: min(step, part.Bytes-off), At: part.At + off}
			if err := l.send(ctx, root, own, stays, c, piece, t, mine, temp, failed); err != nil {
				return err
			}
		}
	}
	return nil
}

// send brings one piece to all ranks.
func (l *load) send(ctx context.Context, root int, own, stays bool, c placedChunk, piece Part, t *Tensor, mine *flight, temp *device.Block, failed *error) error {
	// to is where the piece is, or is to be, on this rank.
	var to []byte
	switch {
	case stays:
		to = l.homes.mem[t].Slice(piece.Offset, piece.Bytes).Raw()
	case !own || l.plan.params.YieldClone:
		to = temp.Mem().Slice(0, piece.Bytes).Raw()
	}
	var lost error
	sent := false
	pass := func(data []byte) error {
		if sent = true; piece.Bytes > 0 {
			lost = l.world.Broadcast(ctx, "load/tensor", root, data)
		}
		return lost
	}
	switch {
	case own && !stays && !l.plan.params.YieldClone: // from the chunk, as it is
		err := l.see(c, piece, mine.data(), func(data []byte) error {
			if err := pass(data); err != nil {
				return err
			}
			if *failed == nil {
				*failed = l.give(c.file, piece)(data)
			}
			return nil
		})
		if err != nil && *failed == nil && lost == nil {
			*failed = err
		}
		if !sent { // the mapping is broken, and the others wait for the bytes
			return pass(make([]byte, piece.Bytes))
		}
		return lost
	case own && !(stays && c.HandOver):
		err := l.see(c, piece, mine.data(), func(data []byte) error {
			copy(to, data)
			return nil
		})
		if err != nil && *failed == nil {
			*failed = err
		}
	}
	if err := pass(to); err != nil {
		return err
	}
	if !stays && *failed == nil {
		*failed = l.give(c.file, piece)(to)
	}
	return nil
}
