package prefixtree

import (
	"fmt"
	"slices"
)

// Span is a stretch of tokens that is computed once for a set of rows.
type Span struct {
	// Parent is the index of the span that this one continues, in the same list, -1 if it begins the rows.
	// Invariant: Parent is smaller than the span's own index.
	Parent int `json:"parent"`
	// Start and End are token offsets in each of the rows: the span holds [Start, End).
	// Invariant: End > Start; Start is the End of the parent, 0 if there is none.
	Start int `json:"start"`
	End   int `json:"end"`
	// Rows are the rows that use the span, ascending. Read-only.
	Rows []int `json:"rows"`
	// Offset is the place of the first token in the packed row.
	// Invariant: the sum of the lengths of the spans before this one, which is why the JSON form leaves it out.
	Offset int `json:"-"`
}

// Len is the number of tokens of the span.
func (s Span) Len() int { return s.End - s.Start }

// Layout says which tokens are computed, for which rows, in which order: a tree with some of its decisions taken.
//
// Its JSON form is an element of "layout" in the output of plan --json.
type Layout struct {
	// Spans are in the order of the packed row: parents before children.
	Spans []Span `json:"segments"`
	// Decisions are the segments of the tree that are shared, ascending.
	Decisions []int `json:"decisions"`
	// Terminals holds for each row the span that it ends in. The row's length is that span's End.
	Terminals []int `json:"-"`
	// Packed is the number of tokens of all spans, Logical that of all rows.
	Packed  int `json:"-"`
	Logical int `json:"-"`
	// Depth is the largest number of spans from the beginning of a row to its end.
	Depth int `json:"depth"`
}

// DecisionError says why [Tree.Layout] cannot take a decision.
type DecisionError struct {
	Decision int    // the segment
	What     string // why it is refused
}

// Error names the segment.
func (e *DecisionError) Error() string {
	return fmt.Sprintf("prefixtree: layout: decision %d %s", e.Decision, e.What)
}

// Layout is the layout that shares the given segments and no other (section 4.3 of the reference). The decisions may come in any order and are
// not kept.
//
// A shared segment becomes a span that begins where its nearest shared ancestor ends, so that it takes in the tokens of
// ancestors that are not shared. What then remains of a row becomes a span of its own, its tail. The order is that of the segments; tails stand where
// their rows end, after that segment if it is shared, by row.
//
// A number that is not one of t.Decisions, or comes twice, gives a [*DecisionError].
func (t *Tree) Layout(decisions []int) (*Layout, error) {
	sorted := slices.Sorted(slices.Values(decisions))
	for i, d := range sorted {
		if d < 0 || d >= len(t.Segments) {
			return nil, &DecisionError{Decision: d, What: fmt.Sprintf("is not a segment of the tree, which has %d", len(t.Segments))}
		}
		if len(t.Segments[d].Rows) < 2 {
			return nil, &DecisionError{Decision: d, What: "is a segment of one row, which nobody can share"}
		}
		if i > 0 && sorted[i-1] == d {
			return nil, &DecisionError{Decision: d, What: "is given twice"}
		}
	}
	return t.layout(sorted), nil
}

// FullSharing is the layout of all decisions: no layout of the tree has fewer packed tokens.
func (t *Tree) FullSharing() *Layout { return t.layout(slices.Clone(t.Decisions)) }

// NoSharing is the layout of no decision: one span per row, in the order in which the tree has them.
func (t *Tree) NoSharing() *Layout { return t.layout(nil) }

// layout makes the layout of an ascending list of valid decisions, which it keeps.
func (t *Tree) layout(decisions []int) *Layout {
	rows := len(t.Terminals)
	l := &Layout{
		Spans:     make([]Span, 0, len(decisions)+rows),
		Decisions: decisions,
		Terminals: make([]int, rows),
		Logical:   t.Logical,
	}
	if decisions == nil {
		l.Decisions = []int{} // printed as [], not as null
	}
	emit := func(parent, depth, end int, rows []int) {
		s := Span{Parent: parent, End: end, Rows: rows, Offset: l.Packed}
		if parent >= 0 {
			s.Start = l.Spans[parent].End
		}
		l.Packed += s.Len()
		l.Depth = max(l.Depth, depth)
		l.Spans = append(l.Spans, s)
	}

	ends, at := t.ends()
	// Per segment: the span of its nearest shared segment on the way up, itself included, and the number of spans down to there.
	type owner struct{ span, depth int }
	owners := make([]owner, len(t.Segments))
	for i := range t.Segments {
		s := &t.Segments[i]
		own := owner{span: -1}
		if s.Parent >= 0 {
			own = owners[s.Parent]
		}
		if len(decisions) > 0 && decisions[0] == i {
			decisions = decisions[1:]
			emit(own.span, own.depth+1, s.End, s.Rows)
			own = owner{span: len(l.Spans) - 1, depth: own.depth + 1}
		}
		owners[i] = own
		for k := at[i]; k < at[i+1]; k++ {
			l.Terminals[ends[k]] = own.span
			if own.span < 0 || l.Spans[own.span].End < s.End {
				l.Terminals[ends[k]] = len(l.Spans)
				emit(own.span, own.depth+1, s.End, ends[k:k+1:k+1])
			}
		}
	}
	return l
}

// ends lists the rows by the segment that they end in: those of segment i are rows[at[i]:at[i+1]], ascending.
func (t *Tree) ends() (rows, at []int) {
	rows, at = make([]int, len(t.Terminals)), make([]int, len(t.Segments)+2)
	// Counted two places up and filled one place up, so that at ends as the list of beginnings.
	for _, s := range t.Terminals {
		at[s+2]++
	}
	for i := 2; i < len(at); i++ {
		at[i] += at[i-1]
	}
	for r, s := range t.Terminals {
		rows[at[s+1]] = r
		at[s+1]++
	}
	return rows, at[:len(t.Segments)+1]
}
