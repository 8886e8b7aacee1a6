package prefixtree

import (
	"cmp"
	"fmt"
	"math"
	"math/bits"
	"strings"
)

// Feature is an integer of a layout that a cost can charge for. Only [Short] can grow when a row is taken away: a tail may become short.
type Feature string

// The features of a layout.
const (
	Tokens    Feature = "tokens"    // packed tokens
	Pairs     Feature = "pairs"     // attended pairs: for each packed token, the tokens it attends to, itself included
	Segments  Feature = "segments"  // spans
	Short     Feature = "short"     // spans of fewer tokens than [Cost.ShortBelow], too few to run well
	Decisions Feature = "decisions" // shared segments
	// Levels are what runs one after the other: a layout without sharing is level one and has none beyond it. FirstLevel is the first level
	// beyond (0 or 1), FurtherLevels those beyond that, since a first hand-over of state costs more than each later one.
	Levels        Feature = "levels"
	FirstLevel    Feature = "first level"
	FurtherLevels Feature = "further levels"
)

// Features are the numbers of a layout that costs are charged for.
type Features struct {
	Tokens    int64 `json:"tokens"`
	Pairs     int64 `json:"pairs"` // MaxInt64 if it is too small
	Segments  int64 `json:"segments"`
	Short     int64 `json:"short"`
	Decisions int64 `json:"decisions"`
	Depth     int64 `json:"depth"` // largest number of spans from the beginning of a row to its end
}

// of is one of the features.
func (f *Features) of(x Feature) (n int64, ok bool) {
	switch x {
	case Tokens:
		return f.Tokens, true
	case Pairs:
		return f.Pairs, true
	case Segments:
		return f.Segments, true
	case Short:
		return f.Short, true
	case Decisions:
		return f.Decisions, true
	case Levels:
		return max(0, f.Depth-1), true
	case FirstLevel:
		return min(1, max(0, f.Depth-1)), true
	case FurtherLevels:
		return max(0, f.Depth-2), true
	}
	return 0, false
}

// Features counts a layout's features; spans of fewer than shortBelow tokens are short.
func (l *Layout) Features(shortBelow int) Features {
	f := Features{Tokens: int64(l.Packed), Segments: int64(len(l.Spans)), Decisions: int64(len(l.Decisions)), Depth: int64(l.Depth)}
	for i := range l.Spans {
		s := &l.Spans[i]
		f.Pairs = plus(f.Pairs, attended(s.Start, s.End))
		if s.Len() < shortBelow {
			f.Short++
		}
	}
	return f
}

// attended is the number of pairs that tokens [start, end) of a row attend to, MaxInt64 for rows so long that it might not fit.
func attended(start, end int) int64 {
	s, e := int64(start), int64(end)
	if e > math.MaxInt32 {
		return math.MaxInt64
	}
	return e*(e+1)/2 - s*(s+1)/2
}

// plus is the sum of two numbers that are not negative, MaxInt64 if that is too small for it.
func plus(a, b int64) int64 {
	if a > math.MaxInt64-b {
		return math.MaxInt64
	}
	return a + b
}

// Term is one charge: Coefficient times a number of units, which is Times*feature/Divisor, rounded down, or up if Up.
type Term struct {
	Feature     Feature `json:"feature"`
	Coefficient int64   `json:"coefficient"` // work per unit; not negative
	// Times is how many units one of the feature gives (layers, say, or a finer scale), Divisor over how many ranks they are spread; both at least 1.
	Times   int64 `json:"times"`
	Divisor int64 `json:"divisor"`
	Up      bool  `json:"up,omitempty"`
}

// charge is what n of the feature cost; ok is false if that does not fit an int64.
func (t *Term) charge(n int64) (work int64, ok bool) {
	units := product(n, t.Times)
	if units < 0 {
		return 0, false
	}
	up := t.Up && units%t.Divisor != 0
	units /= t.Divisor
	if up {
		units++ // the divisor is at least 2, so that this fits
	}
	work = product(units, t.Coefficient)
	return work, work >= 0
}

// whole says whether a unit of the feature always costs the same.
func (t *Term) whole() bool { return t.Divisor == 1 }

// each is what a unit of the feature costs if the term is whole.
func (t *Term) each() int64 { return product(t.Coefficient, t.Times) }

// product is the product of the factors, or -1 if one is negative or the product is larger than MaxInt64.
func product(factors ...int64) int64 {
	p := uint64(1)
	for _, f := range factors {
		hi, lo := bits.Mul64(p, uint64(f))
		if f < 0 || hi != 0 || lo > math.MaxInt64 {
			return -1
		}
		p = lo
	}
	return int64(p)
}

// Cost is what a layout costs in time: the sum of its terms, in integers of a unit that the cost chooses. It is a value: print
// it, compare it, send it to other ranks.
type Cost struct {
	// Name says which formula or table this is. It belongs in the key of a choice that is remembered, with the terms.
	Name string `json:"name"`
	// ShortBelow is the number of tokens below which a span counts as [Short].
	ShortBelow int    `json:"short_below,omitempty"`
	Terms      []Term `json:"terms"`
}

// CostError says why a cost cannot be used.
type CostError struct {
	Cost string // its name
	Term int    // index of the term, -1 if it is not one term's fault
	What string // what is wrong
}

// Error names the cost and the term.
func (e *CostError) Error() string {
	if e.Term < 0 {
		return fmt.Sprintf("prefixtree: cost %q: %s", e.Cost, e.What)
	}
	return fmt.Sprintf("prefixtree: cost %q: term %d %s", e.Cost, e.Term, e.What)
}

// Check says whether the cost is one: known features, coefficients that are not negative, units that there are. So no charge falls when a
// feature grows, which the searches build on. An error is a [*CostError].
func (c *Cost) Check() error {
	for i := range c.Terms {
		t := &c.Terms[i]
		fail := func(format string, args ...any) error {
			return &CostError{Cost: c.Name, Term: i, What: fmt.Sprintf(format, args...)}
		}
		if _, ok := new(Features).of(t.Feature); !ok {
			return fail("charges for %q, which is no feature", t.Feature)
		}
		if t.Coefficient < 0 {
			return fail("has a coefficient that is negative or did not fit 64 bits: %d", t.Coefficient)
		}
		if t.Times < 1 || t.Divisor < 1 {
			return fail("counts %d units over %d ranks, at least 1 over 1 is possible", t.Times, t.Divisor)
		}
	}
	return nil
}

// Work is what a layout with these features costs. A cost that fails [Cost.Check], a negative feature, or a sum that an int64 cannot
// hold give a [*CostError].
func (c *Cost) Work(f Features) (int64, error) {
	if err := c.Check(); err != nil {
		return 0, err
	}
	sum := int64(0)
	for i := range c.Terms {
		n, _ := f.of(c.Terms[i].Feature)
		if n < 0 {
			return 0, &CostError{Cost: c.Name, Term: i, What: fmt.Sprintf("would charge for %d units", n)}
		}
		w, ok := c.Terms[i].charge(n)
		if !ok || w > math.MaxInt64-sum || n == math.MaxInt64 {
			return 0, &CostError{Cost: c.Name, Term: i, What: fmt.Sprintf("overflows at %d units", n)}
		}
		sum += w
	}
	return sum, nil
}

// String is the name and the formula.
func (c Cost) String() string {
	var b strings.Builder
	b.WriteString(c.Name)
	b.WriteString(": work =")
	for i, t := range c.Terms {
		if i > 0 {
			b.WriteString(" +")
		}
		units := string(t.Feature)
		if t.Feature == Short {
			units += fmt.Sprintf("(<%d)", c.ShortBelow)
		}
		if t.Times != 1 {
			units = fmt.Sprintf("%d*%s", t.Times, units)
		}
		if t.Divisor != 1 {
			round := "floor"
			if t.Up {
				round = "ceil"
			}
			units = fmt.Sprintf("%s(%s/%d)", round, units, t.Divisor)
		}
		fmt.Fprintf(&b, " %d*%s", t.Coefficient, units)
	}
	return b.String()
}

// Score is what layouts are compared by: less work is better, then fewer packed tokens, fewer spans, fewer levels.
type Score struct {
	Work     int64 `json:"work"`
	Packed   int   `json:"packed"`
	Segments int   `json:"segments"`
	Depth    int   `json:"depth"`
}

// Compare is negative if s is better than o, positive if o is better, 0 if they are equal.
func (s Score) Compare(o Score) int {
	return cmp.Or(cmp.Compare(s.Work, o.Work), cmp.Compare(s.Packed, o.Packed), cmp.Compare(s.Segments, o.Segments), cmp.Compare(s.Depth, o.Depth))
}

// Score is the score of a layout. Errors are those of [Cost.Work].
func (c *Cost) Score(l *Layout) (Score, error) {
	work, err := c.Work(l.Features(c.ShortBelow))
	return Score{Work: work, Packed: l.Packed, Segments: len(l.Spans), Depth: l.Depth}, err
}
