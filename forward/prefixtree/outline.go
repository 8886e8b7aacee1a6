package prefixtree

import (
	"cmp"
	"fmt"
	"math"
	"slices"
)

// Outline is a [Tree] without what follows from the rest: which stretches of tokens rows share, and no token. Equal trees have equal
// outlines, and [Outline.Tree] makes the tree again.
type Outline struct {
	// Parents and Ends are those of the segments, in their order.
	Parents []int `json:"parents"`
	Ends    []int `json:"ends"`
	// Terminals holds for each row the segment that it ends in.
	Terminals []int `json:"terminals"`
}

// OutlineError says why an [Outline] is that of no tree.
type OutlineError struct {
	List  string // "parents", "ends" or "terminals"
	Index int    // in that list; -1 if it is the list as a whole
	What  string // what is wrong
}

// Error names the list and the place.
func (e *OutlineError) Error() string {
	if e.Index < 0 {
		return fmt.Sprintf("prefixtree: outline: %s %s", e.List, e.What)
	}
	return fmt.Sprintf("prefixtree: outline: %s[%d] %s", e.List, e.Index, e.What)
}

// Outline is the outline of the tree.
func (t *Tree) Outline() Outline {
	o := Outline{Parents: make([]int, len(t.Segments)), Ends: make([]int, len(t.Segments)), Terminals: slices.Clone(t.Terminals)}
	for i := range t.Segments {
		o.Parents[i], o.Ends[i] = t.Segments[i].Parent, t.Segments[i].End
	}
	return o
}

// Tree is the tree of which o is the outline. An outline that no rows of tokens have, segments in another order included, gives an [*OutlineError].
func (o *Outline) Tree() (*Tree, error) {
	fail := func(list string, i int, format string, args ...any) (*Tree, error) {
		return nil, &OutlineError{List: list, Index: i, What: fmt.Sprintf(format, args...)}
	}
	if n, m := len(o.Parents), len(o.Ends); n != m {
		return fail("ends", -1, "has %d numbers, and parents %d", m, n)
	}
	if len(o.Terminals) == 0 || len(o.Terminals) > maxRows {
		return fail("terminals", -1, "is for %d rows, from 1 to %d are possible", len(o.Terminals), maxRows)
	}
	t := &Tree{Segments: make([]Segment, len(o.Parents))} // only what shared looks at
	for i, p := range o.Parents {
		if p < -1 || p >= i {
			return fail("parents", i, "is %d, want -1 or an earlier segment", p)
		}
		s := Segment{Parent: p, End: o.Ends[i]}
		if p >= 0 {
			s.Start = o.Ends[p]
		}
		if s.End <= s.Start || s.End > math.MaxInt32 {
			return fail("ends", i, "is %d, want more than %d and at most %d", s.End, s.Start, math.MaxInt32)
		}
		t.Segments[i] = s
	}
	for r, s := range o.Terminals {
		if s < 0 || s >= len(t.Segments) {
			return fail("terminals", r, "is %d, which is not one of the %d segments", s, len(t.Segments))
		}
	}
	// The outline says how long rows are and what neighbours share. If it is that of a tree, it is that of the tree of such rows.
	made := t.of(o.Terminals)
	if n, m := len(made.Segments), len(t.Segments); n != m {
		return fail("parents", -1, "has %d segments, but such rows have %d", m, n)
	}
	for i := range made.Segments {
		switch s := &made.Segments[i]; {
		case s.Parent != o.Parents[i]:
			return fail("parents", i, "is %d, but %d in the tree of such rows", o.Parents[i], s.Parent)
		case s.End != o.Ends[i]:
			return fail("ends", i, "is %d, but %d in the tree of such rows", o.Ends[i], s.End)
		}
	}
	for r, s := range made.Terminals {
		if s != o.Terminals[r] {
			return fail("terminals", r, "is %d, but %d in the tree of such rows", o.Terminals[r], s)
		}
	}
	return made, nil
}

// Restrict is the tree of some rows of t alone: row i of it is row rows[i] of t. It is what [Build] makes of their tokens, found without them in O(segments + n log n)
// time for n rows. No rows give [ErrNoRows], a number that is no row a [*RowError].
func (t *Tree) Restrict(rows []int) (*Tree, error) {
	if len(rows) == 0 {
		return nil, ErrNoRows
	}
	terminals := make([]int, len(rows))
	for i, r := range rows {
		if r < 0 || r >= len(t.Terminals) {
			return nil, &RowError{Op: "restrict", Row: i, What: fmt.Sprintf("is row %d of a tree of %d", r, len(t.Terminals))}
		}
		terminals[i] = t.Terminals[r]
	}
	return t.of(terminals), nil
}

// of is the tree of rows that end in these segments of t. Preorder is as good as the order of tokens: rows of one segment are neighbours in it, the one that ends
// first stands first.
func (t *Tree) of(terminals []int) *Tree {
	n := len(terminals)
	order, common, lengths := make([]int32, n), make([]int, n), make([]int, n)
	logical := 0
	for i, s := range terminals {
		order[i], lengths[i] = int32(i), t.Segments[s].End
		logical += lengths[i]
	}
	byTerminal := func(a, b int32) int { return cmp.Or(cmp.Compare(terminals[a], terminals[b]), cmp.Compare(a, b)) }
	if !slices.IsSortedFunc(order, byTerminal) {
		slices.SortFunc(order, byTerminal)
	}
	for i := 1; i < n; i++ {
		common[i] = t.Shared(terminals[order[i-1]], terminals[order[i]])
	}
	return treeOf(lengths, order, common, logical)
}

// Shared is the number of tokens that rows have in common of which one ends in segment a and one in segment b: the End of the deepest segment that both are in.
func (t *Tree) Shared(a, b int) int {
	for a != b { // a parent has the smaller number
		if a < b {
			a, b = b, a
		}
		if a = t.Segments[a].Parent; a < 0 {
			return 0
		}
	}
	return t.Segments[a].End
}
