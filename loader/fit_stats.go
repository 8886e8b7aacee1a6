package loader

// StatsOptions say which tensors of a model a load is about, and how. A nil function stands for the answer for all tensors.
type StatsOptions struct {
	Keep     func(*Tensor) bool  // it is to be read; nil: all are
	Resident func(*Tensor) bool  // it stays when the load is over; nil: all do. Asked only of those kept
	Atom     func(*Tensor) int64 // it may be cut at multiples of this many bytes; 0, as nil: not at all. Asked only of those kept
}

// StatsOf is what the planner needs to know of the files of a model, in their order in the set. Each function is asked once
// for each tensor; the answers are in the stats, so that ranks on which they differ have different digests.
func StatsOf(set *Set, o StatsOptions) []FileStats {
	stats := make([]FileStats, len(set.Files))
	h := newHasher()
	for i, f := range set.Files {
		stats[i] = o.file(f)
		h.reset()
		h.number(f.Size)
		h.number(f.DataStart)
		h.number(int64(f.Ignored))
		for _, t := range f.Tensors {
			h.text(t.Name)
			h.number(int64(t.DType))
			h.number(int64(len(t.Shape)))
			for _, d := range t.Shape {
				h.number(d)
			}
			h.number(t.Offset)
		}
		stats[i].Header = h.sum()
	}
	return stats
}

func (o StatsOptions) file(f *File) FileStats {
	s := FileStats{Path: f.Path, Tensors: make([]TensorStats, 0, len(f.Tensors))}
	var start, end int64
	for _, t := range f.Tensors {
		if o.Keep != nil && !o.Keep(t) {
			continue
		}
		k := TensorStats{Name: t.Name, Offset: t.Offset, Bytes: t.Bytes, Resident: o.Resident == nil || o.Resident(t)}
		if o.Atom != nil {
			k.Atom = max(o.Atom(t), 0)
		}
		if len(s.Tensors) == 0 {
			start = t.Offset
		}
		end = t.Offset + t.Bytes
		s.Tensors = append(s.Tensors, k)
		s.Kept += t.Bytes
		s.Largest = max(s.Largest, t.Bytes)
		if k.Resident {
			s.Resident += t.Bytes
		}
		piece := t.Bytes
		if k.Atom > 0 {
			piece = min(piece, k.Atom)
		}
		s.Atom = max(s.Atom, piece)
	}
	s.Span = end - start
	if s.Atom == s.Largest {
		s.Atom = 0 // it cannot be read in smaller pieces
	}
	return s
}
