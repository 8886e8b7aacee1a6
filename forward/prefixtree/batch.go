package prefixtree

import (
	"fmt"
	"math"
	"slices"
)

// Batch is the packed form of a layout: every span's tokens once, one span after the other, in one row (section 4.11 of the reference).
// A token attends to its own span up to itself and to all of the span's ancestors, to nothing else.
type Batch struct {
	// Tokens, Positions and SegmentOf have one element per packed token: its id, its offset in the rows that use it, and the index
	// in Spans of its span.
	Tokens    []int32 `json:"tokens"`
	Positions []int32 `json:"positions"`
	SegmentOf []int32 `json:"segment_of"`
	// Spans are those of the layout; Offset says where each begins in Tokens. Read-only.
	Spans []Span `json:"segments"`
	// Terminals holds for each row the span that it ends in. Read-only.
	Terminals []int `json:"terminals"`
	// Rows is the number of rows.
	Rows int `json:"rows"`
}

// Pack packs the tokens of rows, which must be the rows that the layout's tree was built from.
//
// Rows that are others in number, in length, or in a token that the layout shares, give a [*RowError] (Row is -1 where it
// is not one row's fault), so that no row is ever computed with another one's prefix. So do more packed tokens than an int32 can count.
func (l *Layout) Pack(rows [][]int32) (*Batch, error) {
	if err := l.fits(rows); err != nil {
		return nil, err
	}
	b := &Batch{
		Tokens:    make([]int32, 0, l.Packed),
		Positions: make([]int32, l.Packed),
		SegmentOf: make([]int32, l.Packed),
		Spans:     l.Spans,
		Terminals: l.Terminals,
		Rows:      len(rows),
	}
	for i := range l.Spans {
		s := &l.Spans[i]
		b.Tokens = append(b.Tokens, rows[s.Rows[0]][s.Start:s.End]...)
		positions, of := b.Positions[s.Offset:][:s.Len()], b.SegmentOf[s.Offset:][:s.Len()]
		for j := range positions {
			positions[j] = int32(s.Start + j)
			of[j] = int32(i)
		}
	}
	return b, nil
}

// fits says why rows are not the ones that the layout is for.
//
// It is enough to compare each row with one other, over what they share: the first row of a span speaks for the
// span, so a row that is first nowhere is compared with the first of the span it ends in, and a row that becomes first
// below some span is compared there with the one that was first above.
func (l *Layout) fits(rows [][]int32) error {
	fail := func(row int, format string, args ...any) error {
		return &RowError{Op: "pack", Row: row, What: fmt.Sprintf(format, args...)}
	}
	if len(rows) != len(l.Terminals) {
		return fail(-1, "%d rows, but the layout is for %d", len(rows), len(l.Terminals))
	}
	if l.Packed > math.MaxInt32 {
		return fail(-1, "%d packed tokens, at most %d are possible", l.Packed, math.MaxInt32)
	}
	for r, t := range l.Terminals {
		if end := l.Spans[t].End; len(rows[r]) != end {
			return fail(r, "has %d tokens, but %d in the layout", len(rows[r]), end)
		}
	}
	same := func(r, first, n int) error {
		if r == first {
			return nil
		}
		if at := commonPrefix(rows[r][:n], rows[first][:n]); at < n {
			return fail(r, "differs from row %d in token %d, but the layout shares %d", first, at, n)
		}
		return nil
	}
	for i := range l.Spans {
		if s := &l.Spans[i]; s.Parent >= 0 {
			if err := same(s.Rows[0], l.Spans[s.Parent].Rows[0], s.Start); err != nil {
				return err
			}
		}
	}
	for r, t := range l.Terminals {
		if err := same(r, l.Spans[t].Rows[0], len(rows[r])); err != nil {
			return err
		}
	}
	return nil
}

// RowLen is the number of tokens of a row.
func (b *Batch) RowLen(row int) int { return b.Spans[b.Terminals[row]].End }

// Gather appends to dst the place in the packed row of each token of a row, in the order of the row, and returns the
// extended slice. It allocates only if dst is too small; b.RowLen(row) says what it needs.
func (b *Batch) Gather(row int, dst []int32) []int32 {
	n := b.RowLen(row)
	dst = slices.Grow(dst, n)[:len(dst)+n]
	places := dst[len(dst)-n:]
	for i := b.Terminals[row]; i >= 0; i = b.Spans[i].Parent {
		s := &b.Spans[i]
		part := places[s.Start:s.End]
		for j := range part {
			part[j] = int32(s.Offset + j)
		}
	}
	return dst
}

// Path appends to dst the spans that lead to a span, from the one that begins the rows to the span itself, and returns
// the extended slice.
func (b *Batch) Path(span int, dst []int) []int {
	from := len(dst)
	for i := span; i >= 0; i = b.Spans[i].Parent {
		dst = append(dst, i)
	}
	slices.Reverse(dst[from:])
	return dst
}
