package loader

import (
	"fmt"
	"math"
)

// The plan of a load inside a byte budget, before the first payload byte is read. This file holds what goes in and what
// comes out; fit_classic.go and fit_better.go hold the two ways to plan, chunks.go what a chunk is, replay.go the exact
// peak of a plan.

// FileStats is what the planner knows of one file. All sizes are bytes. [StatsOf] makes them from headers.
type FileStats struct {
	Path     string // for messages; its last element is part of the digest
	Kept     int64  // of the tensors that are to be read
	Span     int64  // from the start of the first of them to the end of the last, with what lies between
	Largest  int64  // of the largest of them
	Resident int64  // of those that stay in the budget's memory when the load is over

	// Atom, if above 0, says that the file's tensors may be read in pieces, and that no piece needs to be larger than this.
	// It is only looked at where Tensors is nil.
	Atom int64
	// Tensors are the tensors to be read, in the order of their bytes. Without them (nil, in a file that has some) the
	// planner works with the sums above and the worst that they allow, and there are budgets in the plan but no chunks.
	Tensors []TensorStats
	// Header identifies what the file's header says, in the digest; empty if that is not known.
	Header string
}

// TensorStats is what the planner knows of one tensor. All sizes are bytes.
type TensorStats struct {
	Name   string
	Offset int64 // where its bytes begin in the file
	Bytes  int64
	// Atom, if above 0, says that the tensor may be cut into pieces at multiples of it; the last may be shorter. It declares
	// that whoever gets the pieces can do with them (see [PlanParams]).
	Atom     int64
	Resident bool // it stays in the budget's memory when the load is over
}

// Costs is what a copier needs beside the bytes it was asked for. There is no default: a copier that has not declared its
// multipliers cannot be planned.
type Costs struct {
	// Multiplier is how many bytes of the budget each byte of a chunk costs until the chunk is delivered, one ratio for
	// each file: 1 for a reader with a fixed pool, 2 where the page cache and the buffer come from the same memory, 0 where
	// the chunk is a mapping.
	Multiplier []Ratio
	Fixed      int64 // bytes for the whole load, whatever the chunks
	PerChunk   int64 // bytes for every chunk that is alive and not empty
}

// PlanParams are the choices of one load.
//
// # How memory is charged
//
// A chunk is charged from before its first read until it is delivered: its bytes (rounded up to Align) times its file's
// multiplier, and the copier's bytes per chunk. QueueSize bounds how many are alive, delivered in order: one if it is below
// 0 (the next is not begun before the last is done with), otherwise two more than it, namely those that wait, one that is
// being read, and one that is being delivered.
//
// With AccumulateResident the tensors that stay are charged as they arrive. A chunk of which everything stays is
// handed over: its memory becomes that of its tensors, nothing is copied. Out of another chunk each tensor that stays is
// copied to memory of its own, while the chunk is alive. With YieldClone a tensor that does not stay is delivered as a
// copy, one at a time. In a group of ranks every rank reads its own files and gets the tensors of all others, one at a
// time; one that does not stay needs memory for that while it is delivered.
//
// # Tensors in pieces, and homes that exist before the load
//
// A tensor whose Atom is above 0 may be cut when it does not fit whole. Where its pieces go is up to the consumer:
//
//   - with AccumulateResident, a tensor that stays gets its final memory when its first piece arrives, and is charged in
//     full from then on, plus the pieces in flight;
//   - with YieldClone, the copy of a tensor that does not stay is charged in full while its pieces arrive;
//   - otherwise the consumer takes the pieces as they come, and nothing is charged but what is in flight.
//
// The last is how a model is loaded that packs its weights into one slab: the slab is there from the start and may be larger
// than the files, so its bytes are Preallocated and AccumulateResident is false; a matrix has the bytes of one panel of
// rows as its Atom, a vector has none. Then the smallest budget is the slab, what the copier holds fixed, and one
// largest piece (rounded to Align); each further unit of depth costs one more largest piece; and what is left beyond that
// makes the chunks larger. Such a consumer has as many readers as the plan has Buffers, each with a buffer of BufferBytes,
// and sets DepthFirst. As nothing accumulates, it need not even finish chunks in order. Over ranks that broadcast, Group
// adds one piece for what is being received; a load in which each rank reads for itself is planned with Group 1.
type PlanParams struct {
	Budget    int64 // bytes, for everything: Fixed and Preallocated included
	QueueSize int   // the most chunks that may wait; lowered if the budget is too small for it. Below 0: serial
	MaxChunk  int64 // bytes, an upper limit for every chunk; 0 for none

	AccumulateResident bool // what stays grows inside the budget. False: its memory exists already, or is outside
	YieldClone         bool // what does not stay is delivered as a copy
	Group              int  // ranks that load together, each byte read once; 1 if each reads for itself

	Preallocated int64 // bytes that are taken before the load and stay
	Align        int64 // the unit in which the memory for chunks and tensors is taken, bytes; 0 or 1 for none. Not in classic mode
	// DepthFirst asks for the deepest queue that one piece of each tensor fits in, even if another choice has larger chunks.
	// Otherwise the queue is not made deeper than the classic mode's, if that has a plan, where it would cost chunk size.
	DepthFirst bool

	Copier  Costs
	Classic bool // plan as fastsafetensors does, to the byte
}

// FitPlan is how a set of files is to be read. It depends on nothing but the arguments of [Fit].
type FitPlan struct {
	Classic      bool
	Budget       int64 // bytes, as it was given
	Fixed        int64 // bytes that the copier holds for the whole load
	Preallocated int64 // bytes, as given
	Group        int   // ranks

	QueueSize int // at most what was asked for
	Depth     int // chunks that may be alive at once on one rank; with Group above 1 one more, for what is being received
	// Buffers is Depth without the one for receiving, and not more than there are chunks. In a load by one rank with
	// AccumulateResident and YieldClone false and one multiplier for all files, Buffers times BufferBytes fit into the budget,
	// so chunks may be alive in any order; where Tensors are known, and in the default mode.
	Buffers     int
	BufferBytes int64 // bytes of the largest chunk, rounded up to Align

	Files     []FilePlan // in the order in which they are to be loaded; with Group above 1, each Group of them together
	Reordered bool       // that order is not the caller's, whose order does not fit

	// Peak is the most bytes in use at any moment, everything included: exact for one rank that delivers in order and uses all the
	// depth, as [Set.Execute] does; an upper bound over several ranks and where tensors are not known.
	Peak    int64
	Minimum int64 // the smallest budget that is enough, in this mode; if need be with another order and no queue

	stats  []FileStats
	params PlanParams
}

// FilePlan is how one file is to be read.
type FilePlan struct {
	FileStats
	Index int // in the stats that were given to [Fit]
	// Budget is the limit in bytes under which the file is cut. Invariant: at least the file's largest tensor, or its Atom.
	// Residents grow while a file is loaded, and chunks at its start may be larger. A file that stays whole is not limited:
	// then it is the smaller of MaxChunk and the budget less what is fixed (or the file, if a copier makes do with less). In classic mode it is the formula's.
	Budget int64
	Chunks []Chunk // in file order; nil where tensors are not known
}

// Fit plans a load. It is a pure function of its arguments, the same on every rank.
//
// The classic mode follows the fit planner of fastsafetensors 0.5.0: a budget for each file that declines as tensors
// accumulate, cut evenly over the depth of the queue. The default mode accepts whatever the classic one accepts, with chunks at
// least as large and a queue at least as deep, and more: it charges a copy or a received tensor as one tensor and not as one
// chunk, residents as their chunks arrive and not as files, handed over without a copy where all of a chunk stays, files by
// their own multipliers; it leaves out holes between tensors, cuts tensors that may be cut, and takes the files with
// the largest needs first if their given order does not fit.
//
// The error is a [*BudgetInfeasibleError], or a [*FitArgumentError] for a number that cannot be. Time and memory are linear
// in the number of tensors.
func Fit(stats []FileStats, p PlanParams) (*FitPlan, error) {
	if err := checkFit(stats, &p); err != nil {
		return nil, err
	}
	if p.Classic {
		return fitClassic(stats, p)
	}
	return fitBetter(stats, p)
}

// FitArgumentError says that a number given to [Fit] cannot be.
type FitArgumentError struct {
	Argument string // the field, as in [PlanParams], [Costs] or [FileStats]
	File     string // the file it belongs to; empty if none
	Problem  string // what is wrong with it, lower-case
}

// Error is one line.
func (e *FitArgumentError) Error() string {
	if e.File != "" {
		return fmt.Sprintf("fit plan: %s: %s %s", quote(e.File), e.Argument, e.Problem)
	}
	return fmt.Sprintf("fit plan: %s %s", e.Argument, e.Problem)
}

// buffers is how many chunks are alive at most with a queue of this size. An absurd size is as good as the largest int.
func buffers(queueSize int) int {
	switch {
	case queueSize < 0:
		return 1
	case queueSize > math.MaxInt-3:
		return math.MaxInt - 1
	}
	return queueSize + 2
}

// queueOf is the opposite of buffers.
func queueOf(buffers int) int {
	if buffers <= 1 {
		return -1
	}
	return buffers - 2
}

// depthOf is the depth of the pipeline: its buffers, and one for the tensor being received.
func depthOf(queueSize, group int) int {
	d := buffers(queueSize)
	if group > 1 {
		d++
	}
	return d
}

// maxGroup bounds what is allocated for each batch.
const maxGroup = 1 << 16

// checkFit refuses what is no plan's input. It sets what has a neutral default.
func checkFit(stats []FileStats, p *PlanParams) error {
	arg := func(name, format string, args ...any) error {
		return &FitArgumentError{Argument: name, Problem: fmt.Sprintf(format, args...)}
	}
	if err := checkCosts(stats, *p); err != nil {
		return err
	}
	switch {
	case p.Copier.PerChunk < 0:
		return arg("PerChunk", "is %d bytes", p.Copier.PerChunk)
	case p.Copier.Fixed < 0:
		return arg("Fixed", "is %d bytes", p.Copier.Fixed)
	case p.Group < 1:
		return arg("Group", "is %d ranks; 1 means that each rank reads for itself", p.Group)
	case p.Group > maxGroup:
		return arg("Group", "is %d ranks; the most is %d", p.Group, maxGroup)
	case p.MaxChunk < 0:
		return arg("MaxChunk", "is %d bytes; 0 means no limit", p.MaxChunk)
	case p.Preallocated < 0:
		return arg("Preallocated", "is %d bytes", p.Preallocated)
	case p.Align < 0:
		return arg("Align", "is %d bytes", p.Align)
	}
	p.Align = max(p.Align, 1)
	if p.Classic {
		p.Align = 1
	}
	for i := range stats {
		if problem, field := stats[i].fault(); problem != "" {
			return &FitArgumentError{Argument: field, File: stats[i].Path, Problem: problem}
		}
	}
	return nil
}

func checkCosts(stats []FileStats, p PlanParams) error {
	ms := p.Copier.Multiplier
	fault := func(file, format string, args ...any) error {
		return &FitArgumentError{Argument: "Multiplier", File: file, Problem: fmt.Sprintf(format, args...)}
	}
	if len(ms) != len(stats) {
		return fault("", "is declared for %d files, and there are %d; a copier must declare its cost for each", len(ms), len(stats))
	}
	for i, m := range ms {
		file := stats[i].Path
		switch {
		case m == Ratio{}:
			return fault(file, "is not declared; a copier must say what a byte costs it")
		case m.Den < 1 || m.Num < 0:
			return fault(file, "is %v, no number from 0 up", m)
		case m.Num/m.Den > maxMultiplier:
			return fault(file, "is %v; the most is %d", m, maxMultiplier)
		case p.Classic && m.Num < m.Den:
			return fault(file, "is %v; in classic mode the least is 1", m)
		}
	}
	if _, ok := commonScale(ms); !ok {
		return fault("", "has fractions whose common denominator is above %d", maxDenominator)
	}
	return nil
}

// fault says what is wrong with a file's numbers, and with which.
func (f *FileStats) fault() (problem, field string) {
	switch {
	case f.Kept < 0:
		return fmt.Sprintf("is %d bytes", f.Kept), "Kept"
	case f.Span < f.Kept:
		return fmt.Sprintf("is %d bytes, less than the %d kept", f.Span, f.Kept), "Span"
	case f.Largest < 0 || f.Largest > f.Kept || f.Largest == 0 && f.Kept > 0:
		return fmt.Sprintf("is %d bytes, of %d kept", f.Largest, f.Kept), "Largest"
	case f.Resident < 0 || f.Resident > f.Kept:
		return fmt.Sprintf("is %d bytes, of %d kept", f.Resident, f.Kept), "Resident"
	case f.Atom < 0:
		return fmt.Sprintf("is %d bytes", f.Atom), "Atom"
	case f.Tensors == nil:
		return "", ""
	}
	var kept, largest, resident, start, end int64
	for i := range f.Tensors {
		t := &f.Tensors[i]
		switch {
		case t.Bytes < 0 || t.Offset < 0 || t.Atom < 0 || t.Bytes > never-t.Offset:
			return fmt.Sprintf("has tensor %s with %d bytes at byte %d and an atom of %d", quote(t.Name), t.Bytes, t.Offset, t.Atom), "Tensors"
		case t.Offset < end:
			return fmt.Sprintf("has tensor %s at byte %d, before the end of the one before it", quote(t.Name), t.Offset), "Tensors"
		}
		if i == 0 {
			start = t.Offset
		}
		end = t.Offset + t.Bytes
		kept += t.Bytes // cannot overflow: ranges are disjoint and end below 2^63
		largest = max(largest, t.Bytes)
		if t.Resident {
			resident += t.Bytes
		}
	}
	if kept != f.Kept || largest != f.Largest || resident != f.Resident || end-start > f.Span {
		return fmt.Sprintf("has %d bytes, the largest %d, resident %d, over %d; want %d, %d, %d, over %d",
			kept, largest, resident, end-start, f.Kept, f.Largest, f.Resident, f.Span), "Tensors"
	}
	return "", ""
}
