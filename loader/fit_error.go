package loader

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Limit says what bound a load that cannot be planned.
type Limit string

// The limits.
const (
	LimitTensor   Limit = "largest tensor" // what is resident and the smallest pieces in flight do not fit together
	LimitMaxChunk Limit = "max chunk"      // a piece that cannot be made smaller is above MaxChunk, whatever the budget
	LimitFixed    Limit = "fixed"          // what is fixed or preallocated leaves nothing
	LimitBudget   Limit = "budget"         // the budget is not above 0
)

// Lever is a way to make a load fit.
type Lever struct {
	Name    string // one of the constants Lever...
	Change  string // what to change, as a clause
	Minimum int64  // the smallest budget with which the whole load then fits, bytes
}

// The names of levers.
const (
	LeverDefault  = "default mode"
	LeverOrder    = "order"
	LeverSplit    = "split"
	LeverBorrow   = "borrow"
	LeverMaxChunk = "max chunk"
	LeverGroup    = "all local"
	LeverCopier   = "copier"
	LeverResident = "non-resident"
)

// splitBytes is the size of the pieces of the lever that splits tensors: large enough for any disk to read at full speed.
const splitBytes = 16 << 20

// BudgetInfeasibleError says that a load does not fit into its budget, and what would do. All sizes are bytes. Nothing has
// been read.
//
// In classic mode it is about the first file that does not fit serially; in the default mode about the tensor that needs the
// most, in the best order of the files. RequiredBytes and BudgetBytes do not include what is fixed or preallocated.
type BudgetInfeasibleError struct {
	Limit  Limit
	File   string // the file that binds; empty if none does by itself
	Index  int    // of that file in the stats given to [Fit]
	Tensor string // the tensor that binds; empty if tensors are not known

	RequiredBytes  int64 // what is needed when it is loaded; at most BudgetBytes if only MaxChunk binds
	ResidentBytes  int64 // of that, what stays
	TransientBytes int64 // of that, what is in flight, or temporary
	BudgetBytes    int64 // what there is for it
	PerChunkBytes  int64 // part of TransientBytes: the copier's for all chunks alive
	LargestBytes   int64 // the tensor, or the file's largest
	EffectiveDepth Ratio // how many times a chunk counts: of chunks alive, times their cost
	MaxChunk       int64 // the limit of a chunk; the largest int64 if there is none

	Budget       int64 // as it was given
	Fixed        int64 // of it, the copier's for the whole load
	Preallocated int64 // of it, taken before the load

	Minimum int64 // the smallest budget with which the whole load fits, everything included; 0 if none is enough
	Levers  []Lever
}

// MissingBytes is how many bytes the budget is short of what the whole load needs; 0 if no budget is enough.
func (e *BudgetInfeasibleError) MissingBytes() int64 { return max(e.Minimum-e.Budget, 0) }

// Error is one line.
func (e *BudgetInfeasibleError) Error() string {
	var b strings.Builder
	b.WriteString("fit plan: ")
	switch e.Limit {
	case LimitBudget:
		fmt.Fprintf(&b, "a budget of %d bytes is not above 0", e.Budget)
	case LimitFixed:
		fmt.Fprintf(&b, "of a budget of %d bytes nothing is left after %s", e.Budget, e.deductions())
	default:
		fmt.Fprintf(&b, "file %s", quote(e.File))
		if e.Tensor != "" {
			fmt.Fprintf(&b, ", tensor %s", quote(e.Tensor))
		}
		if e.Limit == LimitMaxChunk {
			fmt.Fprintf(&b, ": %d bytes have to be in one chunk, and a chunk has at most %d", e.LargestBytes, e.MaxChunk)
			break
		}
		fmt.Fprintf(&b, ": needs %d bytes, %d resident and %d in flight, and there are %d", e.RequiredBytes, e.ResidentBytes, e.TransientBytes, e.BudgetBytes)
		if e.BudgetBytes != e.Budget {
			fmt.Fprintf(&b, ", the budget of %d less %s", e.Budget, e.deductions())
		}
	}
	if e.Minimum > 0 {
		fmt.Fprintf(&b, "; %d bytes are missing: the smallest budget for the whole load is %d", e.MissingBytes(), e.Minimum)
	} else {
		b.WriteString("; no budget would do as it is")
	}
	for i, l := range e.Levers {
		sep := ", or "
		if i == 0 {
			sep = "; "
		}
		fmt.Fprintf(&b, "%s%d %s", sep, l.Minimum, l.Change)
	}
	return b.String()
}

// hint is what would make the load fit: a larger budget, or the most effective lever.
func (e *BudgetInfeasibleError) hint() string {
	var change string
	for _, l := range e.Levers {
		if l.Name != LeverResident { // the user of a program cannot choose that
			change = fmt.Sprintf("%d bytes do %s", l.Minimum, l.Change)
			break
		}
	}
	switch {
	case e.Minimum > 0 && change != "":
		return fmt.Sprintf("give a budget of at least %d bytes; %s", e.Minimum, change)
	case e.Minimum > 0:
		return fmt.Sprintf("give a budget of at least %d bytes", e.Minimum)
	}
	return change
}

func (e *BudgetInfeasibleError) deductions() string {
	switch {
	case e.Preallocated == 0:
		return fmt.Sprintf("%d that the copier holds", e.Fixed)
	case e.Fixed == 0:
		return fmt.Sprintf("%d that are taken before", e.Preallocated)
	}
	return fmt.Sprintf("%d that the copier holds and %d that are taken before", e.Fixed, e.Preallocated)
}

// refuse completes an error with the whole load's numbers.
func refuse(e *BudgetInfeasibleError, stats []FileStats, p PlanParams) *BudgetInfeasibleError {
	e.Budget, e.Fixed, e.Preallocated = p.Budget, p.Copier.Fixed, p.Preallocated
	e.Minimum, _ = leastBudget(stats, p)
	e.Levers = levers(stats, p, e.Minimum)
	return e
}

// refuseFixed is the error of a load that fails before any file is looked at.
func refuseFixed(stats []FileStats, p PlanParams) *BudgetInfeasibleError {
	e := &BudgetInfeasibleError{Limit: LimitFixed, Index: -1}
	if p.Budget <= 0 {
		e.Limit = LimitBudget
	}
	return refuse(e, stats, p)
}

// leastBudget is the smallest budget with which Fit succeeds; 0, false if none is.
func leastBudget(stats []FileStats, p PlanParams) (bytes int64, ok bool) {
	if !p.Classic {
		return known(max(newBetter(stats, p).least(), 1))
	}
	c := newClassic(stats, p)
	for i := range stats {
		if stats[i].Largest > c.maxChunk {
			return 0, false
		}
	}
	bytes, _ = c.minimum()
	return known(satAdd(bytes, satAdd(p.Copier.Fixed, p.Preallocated)))
}

func known(bytes int64) (int64, bool) {
	if bytes == never {
		return 0, false
	}
	return bytes, true
}

// levers are the changes that make the smallest budget smaller than it is, the most effective first.
func levers(stats []FileStats, p PlanParams, least int64) []Lever {
	var ls []Lever
	try := func(name, change string, stats []FileStats, p PlanParams) {
		if m, ok := leastBudget(stats, p); ok && (least == 0 || m < least) {
			ls = append(ls, Lever{name, change, m})
		}
	}
	if p.Classic {
		q := p
		q.Classic = false
		try(LeverDefault, "in the default mode", stats, q)
		try(LeverOrder, "with the files of the largest tensors first", largestFirst(stats), p)
	} else if split := splitAll(stats); split != nil {
		try(LeverSplit, fmt.Sprintf("if tensors are taken in pieces of %d bytes", splitBytes), split, p)
	}
	if p.YieldClone {
		q := p
		q.YieldClone = false
		try(LeverBorrow, "if tensors are used before the next one and not copied", stats, q)
	}
	if p.MaxChunk > 0 {
		q, change := p, "without a chunk limit"
		q.MaxChunk = 0
		if piece := largestPiece(stats, p.Classic); piece > p.MaxChunk {
			q.MaxChunk, change = piece, fmt.Sprintf("with a chunk limit of %d", piece)
		}
		try(LeverMaxChunk, change, stats, q)
	}
	if p.Group > 1 {
		q := p
		q.Group = 1
		try(LeverGroup, "if each rank reads for itself", stats, q)
	}
	if plain, changed := plainCosts(p.Copier); changed {
		q := p
		q.Copier = plain
		try(LeverCopier, "with a copier that needs no more than the chunk", stats, q)
	}
	if p.AccumulateResident {
		q := p
		q.AccumulateResident = false
		try(LeverResident, "if what stays lies elsewhere", stats, q)
	}
	slices.SortStableFunc(ls, func(a, b Lever) int { return cmp.Compare(a.Minimum, b.Minimum) })
	return ls
}

// largestFirst is the best order of files for the classic mode, which takes the same cost for all.
func largestFirst(stats []FileStats) []FileStats {
	ordered := slices.Clone(stats)
	slices.SortStableFunc(ordered, func(a, b FileStats) int {
		return cmp.Or(cmp.Compare(b.Largest, a.Largest), strings.Compare(a.Path, b.Path))
	})
	return ordered
}

// splitAll is the files with all tensors in pieces; nil if that changes nothing.
func splitAll(stats []FileStats) []FileStats {
	changed := false
	split := make([]FileStats, len(stats))
	for i := range stats {
		split[i] = stats[i]
		f := &split[i]
		if f.Tensors == nil {
			if f.Largest > splitBytes && (f.Atom == 0 || f.Atom > splitBytes) {
				f.Atom, changed = splitBytes, true
			}
			continue
		}
		f.Tensors = append([]TensorStats(nil), f.Tensors...)
		for j := range f.Tensors {
			if t := &f.Tensors[j]; t.Bytes > splitBytes && (t.Atom == 0 || t.Atom > splitBytes) {
				t.Atom, changed = splitBytes, true
			}
		}
	}
	if !changed {
		return nil
	}
	return split
}

// largestPiece is the bytes of the largest piece that cannot be made smaller.
func largestPiece(stats []FileStats, classic bool) int64 {
	var most int64
	for i := range stats {
		f := &stats[i]
		switch {
		case classic || f.Tensors == nil && f.Atom == 0:
			most = max(most, f.Largest)
		case f.Tensors == nil:
			most = max(most, min(f.Largest, f.Atom))
		}
		for j := range f.Tensors {
			if t := &f.Tensors[j]; !classic && t.Atom > 0 {
				most = max(most, min(t.Bytes, t.Atom))
			} else {
				most = max(most, t.Bytes)
			}
		}
	}
	return most
}

// plainCosts are the costs of a copier that needs one byte for each byte, and whether that is less than c.
func plainCosts(c Costs) (plain Costs, less bool) {
	less = c.Fixed > 0 || c.PerChunk > 0
	one := Ratio{1, 1}
	plain.Multiplier = make([]Ratio, len(c.Multiplier))
	for i, m := range c.Multiplier {
		plain.Multiplier[i] = one
		if one.less(m) {
			less = true
		} else {
			plain.Multiplier[i] = m
		}
	}
	return plain, less
}
