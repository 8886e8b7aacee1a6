package prefixtree

// shape is what a tree looks like to a search: its decisions in preorder, numbered from 0, and with each of them the rows that no deeper
// decision holds, its own. Everything that a layout is scored by follows from these few arrays, so that no search makes a layout.
type shape struct {
	segments []int   // per decision its segment in the tree
	parent   []int32 // -1 for none
	after    []int32 // first decision that does not descend from it
	depth    []int32 // number of decisions down to it, itself included
	end      []int
	beyond   []int32 // how many of its own rows go on beyond it
	// The own rows' lengths, those of decision i at lengths[at[i]:at[i+1]], and so those of all its descendants' at
	// lengths[at[i]:at[after[i]]]. sums[k] is the sum of the first k, pairs[k] that of their pairs.
	lengths []int
	at      []int32
	sums    []int
	pairs   []int64
	alone   []int // lengths of the rows that share nothing
	states  int   // number of pairs of a decision and one that it may continue, or none
	deepest int   // largest depth of any segment
	logical int
}

// shapeOf takes O(segments + rows).
func shapeOf(t *Tree) *shape {
	n, rows := len(t.Decisions), len(t.Terminals)
	small := make([]int32, 5*n+1+len(t.Segments))
	take := func(n int) []int32 { s := small[:n:n]; small = small[n:]; return s }
	s := &shape{
		segments: t.Decisions,
		parent:   take(n), after: take(n), depth: take(n), beyond: take(n), at: take(n + 1),
		end:     make([]int, n),
		logical: t.Logical,
	}
	number := take(len(t.Segments)) // per segment the innermost decision, itself included
	k := int32(0)
	for i := range t.Segments {
		seg := &t.Segments[i]
		s.deepest = max(s.deepest, seg.Depth)
		own := int32(-1)
		if seg.Parent >= 0 {
			own = number[seg.Parent]
		}
		if len(seg.Rows) > 1 {
			s.parent[k], s.depth[k], s.end[k] = own, int32(seg.Depth), seg.End
			s.states += seg.Depth
			own = k
			k++
		}
		number[i] = own
	}
	for i := range s.after {
		s.after[i] = int32(i + 1)
	}
	for i := n - 1; i >= 0; i-- {
		if p := s.parent[i]; p >= 0 {
			s.after[p] = max(s.after[p], s.after[i])
		}
	}

	// Rows are counted one place up and filled from there, so that at ends as the list of beginnings.
	alone := 0
	for _, x := range t.Terminals {
		if d := number[x]; d < 0 {
			alone++
		} else if int(d)+2 <= n {
			s.at[d+2]++
		}
	}
	for i := 2; i <= n; i++ {
		s.at[i] += s.at[i-1]
	}
	lengths := make([]int, 2*rows-alone+1)
	s.lengths, s.alone, s.sums = lengths[:rows-alone:rows-alone], lengths[rows-alone:rows-alone:rows], lengths[rows:]
	s.pairs = make([]int64, len(s.sums))
	for _, x := range t.Terminals {
		d, length := number[x], t.Segments[x].End
		if d < 0 {
			s.alone = append(s.alone, length)
			continue
		}
		s.lengths[s.at[d+1]] = length
		s.at[d+1]++
		if length > s.end[d] {
			s.beyond[d]++
		}
	}
	for i, length := range s.lengths {
		s.sums[i+1] = s.sums[i] + length
		s.pairs[i+1] = plus(s.pairs[i], attended(0, length))
	}
	return s
}

// most is a bound on every feature of every layout: no layout has more tokens or pairs than the rows, nor more spans than rows and decisions.
func (s *shape) most() Features {
	spans := int64(len(s.lengths) + len(s.alone) + len(s.segments))
	f := Features{
		Tokens: int64(s.logical), Pairs: s.pairs[len(s.lengths)], Segments: spans, Short: spans,
		Decisions: int64(len(s.segments)), Depth: int64(s.deepest),
	}
	for _, length := range s.alone {
		f.Pairs = plus(f.Pairs, attended(0, length))
	}
	return f
}
