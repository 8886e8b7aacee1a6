package loader

import (
	"context"
	"sync"
	"sync/atomic"
)

// segment is the most that is read in one go, in bytes, where a chunk is large enough for several readers: small enough that they
// end at about the same time, large enough that a read costs nothing beside its bytes. Reads end at multiples of it in the file, so that
// no two of them need the same block of a disk.
const segment = 4 << 20

// extent is one read: bytes of a file and where they go in the chunk's buffer.
type extent struct{ off, at, bytes int64 }

// extents are the reads of a chunk, in file order.
func (l *load) extents(c placedChunk) []extent {
	f := &l.plan.Files[c.file]
	gap := int64(0)
	base := int64(-1)
	if f.spanned(c.Chunk) {
		gap = MergeGap
		base = f.Tensors[c.First].Offset
	}
	var list []extent
	var at int64
	for _, r := range f.Ranges(c.Chunk, gap) {
		if base >= 0 {
			at = r.Start - base
		}
		for off := r.Start; off < r.End; {
			n := min(off&^(segment-1)+segment, r.End) - off
			list = append(list, extent{off, at, n})
			at += n
			off += n
		}
	}
	return list
}

// readChunk reads a chunk to buffer, with as many readers as there are tokens; nothing where it is seen in place. stop ends it early.
func (l *load) readChunk(ctx context.Context, c placedChunk, buffer []byte, stop *atomic.Bool) error {
	if c.Bytes == 0 || l.free(c.file) && !c.HandOver {
		return context.Cause(ctx)
	}
	list := l.extents(c)
	wanted := l.wanted(c)
	var read int64
	for _, e := range list {
		read += e.bytes
	}
	var next atomic.Int64
	var mu sync.Mutex
	var first error
	work := func() {
		for {
			i := int(next.Add(1)) - 1
			if i >= len(list) {
				return
			}
			l.tokens <- struct{}{}
			err := context.Cause(ctx)
			if err == nil && stop != nil && stop.Load() {
				err = context.Canceled // somebody else has the reason
			}
			if err == nil {
				err = l.readExtent(c, list[i], buffer)
			}
			<-l.tokens
			if err != nil {
				next.Store(int64(len(list))) // the others need not go on
				mu.Lock()
				if first == nil {
					first = err
				}
				mu.Unlock()
				return
			}
			if read == wanted {
				l.mu.Lock()
				l.advance(list[i].bytes)
				l.mu.Unlock()
			}
		}
	}
	var wg sync.WaitGroup
	for range min(len(list), cap(l.tokens)) - 1 {
		wg.Go(work)
	}
	work()
	wg.Wait()
	if first == nil && read != wanted {
		l.mu.Lock()
		l.advance(wanted)
		l.mu.Unlock()
	}
	return first
}

func (l *load) readExtent(c placedChunk, e extent, buffer []byte) error {
	index := l.plan.Files[c.file].Index
	n, err := l.reader.ReadAt(buffer[e.at:e.at+e.bytes:e.at+e.bytes], index, e.off)
	if err == nil {
		return nil
	}
	return &ReadError{
		Path: l.set.Files[index].Path, Tensor: l.tensorAt(c, e.off+int64(n)), Offset: e.off, Want: e.bytes, Got: int64(n), Err: err,
	}
}

// tensorAt is the name of the tensor of a chunk that has this byte of the file, or of the next one.
func (l *load) tensorAt(c placedChunk, off int64) string {
	last := ""
	for p := range l.plan.Files[c.file].Parts(c.Chunk) {
		t := l.files[c.file][p.Tensor]
		last = t.Name
		if off < t.Offset+t.Bytes {
			break
		}
	}
	return last
}
