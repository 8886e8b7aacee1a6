package prefixtree

import "fmt"

// Invariant names a property of a [Batch] that its consumers build on.
type Invariant string

// The invariants, in the order in which [Batch.Check] looks at them; each may take the ones before it for granted. RowTokens is looked
// at by [Batch.CheckRows] alone, since only the rows themselves can tell.
const (
	ParentFirst  Invariant = "a parent comes before its children"
	NotEmpty     Invariant = "a span has tokens"
	Continues    Invariant = "a span starts where its parent ends"
	OffsetsAddUp Invariant = "spans follow one another without gap"
	Sizes        Invariant = "every packed token belongs to a span"
	RunsTogether Invariant = "the tokens of a span are one run"
	PositionsRun Invariant = "positions continue the parent's"
	Ends         Invariant = "every row ends in a span"
	Used         Invariant = "every span is used by a row"
	Covered      Invariant = "a span lists the rows whose path it is on, ascending"
	RowTokens    Invariant = "a row's tokens are the ones packed for it"
)

// CheckError says which invariant of a batch does not hold, where, and by which numbers. Span, Row and Token (a place in
// the packed row) are -1 where they say nothing.
type CheckError struct {
	Invariant        Invariant
	Span, Row, Token int
	Got, Want        int
}

// Error names the invariant and the place.
func (e *CheckError) Error() string {
	s := "prefixtree: check: not true that " + string(e.Invariant)
	for _, place := range []struct {
		name string
		at   int
	}{{"span", e.Span}, {"row", e.Row}, {"packed token", e.Token}} {
		if place.at >= 0 {
			s += fmt.Sprintf(", %s %d", place.name, place.at)
		}
	}
	return s + fmt.Sprintf(": got %d, want %d", e.Got, e.Want)
}

// invariants holds the check of each invariant of a batch by itself.
var invariants = []func(*Batch) *CheckError{
	(*Batch).checkParents, (*Batch).checkNotEmpty, (*Batch).checkStarts, (*Batch).checkOffsets, (*Batch).checkSizes,
	(*Batch).checkRuns, (*Batch).checkPositions, (*Batch).checkEnds, (*Batch).checkUsed, (*Batch).checkCovered,
}

// Check says whether a consumer may trust the batch: with no error every index in it is in range, each span is one run of packed tokens
// behind its parent's, positions are the offsets in the rows, and the rows of each span are those whose path it is on, so that [Batch.Gather]
// covers every row from its first token to its last. An error is a [*CheckError].
//
// It takes O(packed tokens + numbers in the row lists) and allocates one integer per span. It cannot know what the tokens ought to be:
// see [Batch.CheckRows].
func (b *Batch) Check() error {
	for _, check := range invariants {
		if err := check(b); err != nil {
			return err
		}
	}
	return nil
}

// CheckRows is Check, and says further whether the batch packs exactly these rows, in O(tokens of the rows).
func (b *Batch) CheckRows(rows [][]int32) error {
	if err := b.Check(); err != nil {
		return err
	}
	if len(rows) != b.Rows {
		return &CheckError{Invariant: RowTokens, Span: -1, Row: -1, Token: -1, Got: b.Rows, Want: len(rows)}
	}
	for r, row := range rows {
		if n := b.RowLen(r); n != len(row) {
			return &CheckError{Invariant: RowTokens, Span: b.Terminals[r], Row: r, Token: -1, Got: n, Want: len(row)}
		}
		for i := b.Terminals[r]; i >= 0; i = b.Spans[i].Parent {
			s := &b.Spans[i]
			packed, want := b.Tokens[s.Offset:][:s.Len()], row[s.Start:s.End]
			if at := commonPrefix(packed, want); at < len(want) {
				return &CheckError{Invariant: RowTokens, Span: i, Row: r, Token: s.Offset + at, Got: int(packed[at]), Want: int(want[at])}
			}
		}
	}
	return nil
}

// broken is the error of a span.
func broken(i Invariant, span, got, want int) *CheckError {
	return &CheckError{Invariant: i, Span: span, Row: -1, Token: -1, Got: got, Want: want}
}

func (b *Batch) checkParents() *CheckError {
	for i := range b.Spans {
		if p := b.Spans[i].Parent; p < -1 || p >= i {
			return broken(ParentFirst, i, p, i-1)
		}
	}
	return nil
}

func (b *Batch) checkNotEmpty() *CheckError {
	for i := range b.Spans {
		if n := b.Spans[i].Len(); n < 1 {
			return broken(NotEmpty, i, n, 1)
		}
	}
	return nil
}

func (b *Batch) checkStarts() *CheckError {
	for i := range b.Spans {
		s, want := &b.Spans[i], 0
		if s.Parent >= 0 {
			want = b.Spans[s.Parent].End
		}
		if s.Start != want {
			return broken(Continues, i, s.Start, want)
		}
	}
	return nil
}

func (b *Batch) checkOffsets() *CheckError {
	at := 0
	for i := range b.Spans {
		if b.Spans[i].Offset != at {
			return broken(OffsetsAddUp, i, b.Spans[i].Offset, at)
		}
		at += b.Spans[i].Len()
	}
	return nil
}

func (b *Batch) checkSizes() *CheckError {
	n := 0
	for i := range b.Spans {
		s := &b.Spans[i]
		if s.Len() > len(b.Tokens)-n { // so that no sum of lengths overflows
			return broken(Sizes, i, len(b.Tokens)-n, s.Len())
		}
		n += s.Len()
	}
	for _, got := range []int{len(b.Tokens), len(b.Positions), len(b.SegmentOf)} {
		if got != n {
			return broken(Sizes, len(b.Spans)-1, got, n)
		}
	}
	return nil
}

func (b *Batch) checkRuns() *CheckError {
	at := 0
	for i := range b.Spans {
		for end := at + b.Spans[i].Len(); at < end; at++ {
			if got := int(b.SegmentOf[at]); got != i {
				return &CheckError{Invariant: RunsTogether, Span: i, Row: -1, Token: at, Got: got, Want: i}
			}
		}
	}
	return nil
}

func (b *Batch) checkPositions() *CheckError {
	at := 0
	for i := range b.Spans {
		s := &b.Spans[i]
		for want := s.Start; want < s.End; want++ {
			if got := int(b.Positions[at]); got != want {
				return &CheckError{Invariant: PositionsRun, Span: i, Row: -1, Token: at, Got: got, Want: want}
			}
			at++
		}
	}
	return nil
}

func (b *Batch) checkEnds() *CheckError {
	if len(b.Terminals) != b.Rows {
		return &CheckError{Invariant: Ends, Span: -1, Row: -1, Token: -1, Got: len(b.Terminals), Want: b.Rows}
	}
	for r, t := range b.Terminals {
		if t < 0 || t >= len(b.Spans) {
			return &CheckError{Invariant: Ends, Span: -1, Row: r, Token: -1, Got: t, Want: len(b.Spans) - 1}
		}
	}
	return nil
}

func (b *Batch) checkUsed() *CheckError {
	for i := range b.Spans {
		if len(b.Spans[i].Rows) == 0 {
			return broken(Used, i, 0, 1)
		}
	}
	return nil
}

// checkCovered walks the path of every row and ticks the row off in each span's list.
func (b *Batch) checkCovered() *CheckError {
	ticked := make([]int, len(b.Spans))
	for r, t := range b.Terminals {
		for i := t; i >= 0; i = b.Spans[i].Parent {
			listed, k := b.Spans[i].Rows, ticked[i]
			if k == len(listed) || listed[k] != r {
				got := -1
				if k < len(listed) {
					got = listed[k]
				}
				return &CheckError{Invariant: Covered, Span: i, Row: r, Token: -1, Got: got, Want: r}
			}
			ticked[i]++
		}
	}
	for i, k := range ticked {
		if listed := b.Spans[i].Rows; k < len(listed) {
			return &CheckError{Invariant: Covered, Span: i, Row: listed[k], Token: -1, Got: len(listed), Want: k}
		}
	}
	return nil
}
