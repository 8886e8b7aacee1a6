package loader

import (
	"fmt"
	"iter"
)

// Chunk is what is read into one buffer: consecutive tensors of a file, the first and the last perhaps not whole.
type Chunk struct {
	First, Last int // it has tensors First to Last-1 of [FileStats.Tensors]
	// Skip is how many bytes of tensor First were in chunks before. Stop, if above 0, is how many bytes of tensor Last-1,
	// counted from that tensor's start, are in chunks up to this one: the rest follows.
	Skip, Stop int64
	// Bytes is the size of its buffer: the sum of its parts, without holes; in classic mode its span, with holes.
	Bytes int64
	// HandOver says that all of it stays and nothing is to be copied: the buffer becomes the tensors' memory.
	HandOver bool
}

// Part is what a chunk has of one tensor.
type Part struct {
	Tensor int   // index in [FileStats.Tensors]
	Offset int64 // bytes from the start of the tensor
	Bytes  int64 // 0 for an empty tensor, which is delivered too
	At     int64 // where it lies in the chunk's buffer
}

// Range is bytes of a file, from Start up to End.
type Range struct{ Start, End int64 }

// MergeGap is up to how many unwanted bytes between two wanted ones the classic mode reads along.
const MergeGap = 4096

// Parts are what a chunk of this file has of each of its tensors, in file order.
func (f *FilePlan) Parts(c *Chunk) iter.Seq[Part] {
	return func(yield func(Part) bool) {
		dense := !f.spanned(c)
		var at, base int64
		if c.First < c.Last {
			base = f.Tensors[c.First].Offset + c.Skip
		}
		for i := c.First; i < c.Last; i++ {
			t := &f.Tensors[i]
			p := Part{Tensor: i, Bytes: t.Bytes, At: at}
			if i == c.Last-1 && c.Stop > 0 {
				p.Bytes = c.Stop
			}
			if i == c.First {
				p.Offset = c.Skip
				p.Bytes -= c.Skip
			}
			if !dense {
				p.At = t.Offset + p.Offset - base
			}
			at += p.Bytes
			if !yield(p) {
				return
			}
		}
	}
}

// spanned says whether the chunk's buffer has the holes of the file in it. Where there are none it does not matter.
func (f *FilePlan) spanned(c *Chunk) bool {
	if c.First == c.Last {
		return false
	}
	last := &f.Tensors[c.Last-1]
	return c.Skip == 0 && c.Stop == 0 && c.Bytes == last.Offset+last.Bytes-f.Tensors[c.First].Offset
}

// Ranges are the reads of a chunk of this file: what it wants, and gaps of up to gap bytes between, in file order. Empty
// tensors read nothing.
func (f *FilePlan) Ranges(c *Chunk, gap int64) []Range {
	var rs []Range
	for p := range f.Parts(c) {
		if p.Bytes == 0 {
			continue
		}
		start := f.Tensors[p.Tensor].Offset + p.Offset
		if n := len(rs); n > 0 && start-rs[n-1].End <= gap {
			rs[n-1].End = start + p.Bytes
			continue
		}
		rs = append(rs, Range{start, start + p.Bytes})
	}
	return rs
}

// Batch is what the ranks of a group load at the same time: one chunk each.
type Batch struct {
	First  int      // index in [FitPlan.Files] of the first file of the group: that of rank 0
	Chunks []*Chunk // by rank; nil for a rank that has no file, or whose file has no chunk left
}

// Batches are the chunks of all files in the order in which they are loaded: for each group of files, first the first
// chunk of each, then the second of each. With a group of 1 every batch is one chunk.
func (p *FitPlan) Batches() iter.Seq[Batch] {
	return func(yield func(Batch) bool) {
		for first := 0; first < len(p.Files); first += p.Group {
			files := p.Files[first:min(len(p.Files), first+p.Group)]
			for j := 0; ; j++ {
				b := Batch{First: first, Chunks: make([]*Chunk, p.Group)}
				some := false
				for r := range files {
					if j < len(files[r].Chunks) {
						b.Chunks[r] = &files[r].Chunks[j]
						some = true
					}
				}
				if !some {
					break
				}
				if !yield(b) {
					return
				}
			}
		}
	}
}

// tooLarge says that a tensor does not fit in a chunk.
type tooLarge struct {
	tensor string
	bytes  int64
	limit  int64
}

func (e *tooLarge) Error() string {
	return fmt.Sprintf("tensor %s has %d bytes, more than a chunk of %d", quote(e.tensor), e.bytes, e.limit)
}

// cutClassic cuts a file into chunks whose span is at most limit, first fit, as plan_chunks of fastsafetensors does.
func cutClassic(tensors []TensorStats, limit int64) ([]Chunk, error) {
	var chunks []Chunk
	var start int64
	for i := range tensors {
		t := &tensors[i]
		if t.Bytes > limit {
			return nil, &tooLarge{t.Name, t.Bytes, limit}
		}
		end := t.Offset + t.Bytes
		if i == 0 || end-start > limit {
			chunks = append(chunks, Chunk{First: i})
			start = t.Offset
		}
		c := &chunks[len(chunks)-1]
		c.Last = i + 1
		c.Bytes = end - start
	}
	return chunks, nil
}
