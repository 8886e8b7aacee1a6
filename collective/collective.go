// Package collective is what a rank says to the other ranks.
//
// A [World] is the set of ranks that run one job together: each has a number, and each calls the same operations in the
// same order. An operation is a meeting. Nobody leaves it before everybody has come, and what is decided there is decided
// for all: the operation succeeds on every rank or fails on every rank.
//
// There are two worlds. [Solo] is one rank alone, for which every operation is the identity. [Group] holds several ranks
// of one process, each a goroutine with its own device; [Run] starts one and joins it. A third, over MPI, can be written
// against the same interface.
//
//	err := collective.Run(4, func(w collective.World) error {
//		need := []int64{required, -usable}                               // one meeting for both: MAX, and MIN as -MAX
//		if err := w.AllReduceInt64(ctx, "admission", collective.Max, need); err != nil {
//			return err
//		}
//		...
//		err := read(myFile)                                              // may fail on this rank only
//		return collective.Agree(ctx, w, err)                             // now it has failed on all, or on none
//	})
//
// # When ranks do not meet
//
// The usual fate of such programs is that one rank leaves early, for a reason that only it knows, and the others wait
// for ever. Three rules prevent it here.
//
// A failure of one rank travels in-band. Between two meetings a rank may fail alone; it then does not return, but brings
// its error to the next meeting, [Agree], and all return together. This is the road for whatever can be foreseen (a read
// error, a refusal), and the group lives on.
//
// Every call says what it is. An operation carries a tag, chosen by the caller, and the group compares operation, tag,
// length and root as the ranks come in. The first difference ends the group: all get one [*MismatchError] that lists what
// each rank called. Tags cost nothing; a tag that names the place in the code ("load/digest") makes the report read well.
//
// A rank that is gone is noticed. If a rank closes its world, is cancelled, panics under [Run], or is given up with
// [Group.Abort], all that wait for it, and all that would come later, get one [*AbortError] with its number and the reason.
//
// After a mismatch or an abort the group is unusable, because nobody can know which rank stands where. Later calls say so
// with [ErrUnusable], and wrap the error that ended it. Make a new group to start again.
//
// # Caveats
//
//   - There is no time-out. A rank that computes for an hour is waited for. Give a context with a deadline if that is wrong.
//   - A context ends the waiting and nothing else. As soon as all ranks have come the operation is carried out, and a
//     context that is cancelled later is noticed at the next one: this is what makes the outcome the same everywhere. The
//     ranks' contexts need not be the same, and the first to be cancelled ends the group for all.
//   - On the ranks that were not cancelled, too, errors.Is(err, context.Canceled) is true. AbortError.Rank tells who was.
//   - A rank of a [Group] must be used by one goroutine at a time; a second call while one is under way ends the group
//     ([ErrConcurrent]). Close may be called at any time.
//   - During an operation the ranks read and write each other's slices, so that nothing is copied twice. They are the
//     caller's alone again when the call returns. Two ranks must not bring overlapping memory to an operation that writes
//     ([ErrOverlap]): a sum over a slice that two ranks share would be wrong without a sign. The memory is host memory.
//   - The sum of float32 is taken in the order of the ranks, element by element: v0 + v1, then + v2, and so on. Its bits
//     depend on the values and on the number of ranks, and on nothing else, so one job over 2 and over 4 ranks will differ
//     in the last bits. A sum of int64 wraps as Go's addition does.
package collective

import (
	"context"
	"fmt"

	"github.com/trainerrank/engine/internal/failpoint"
)

// World is the set of ranks that run together, seen by one of them.
//
// Every method with a context is a collective operation: all ranks call the same ones in the same order with the same tag,
// and each returns when all have called it. Its error is a [*MismatchError] or an [*AbortError], the same on all ranks (or
// wraps the one that ended the group before, with [ErrUnusable]); what the slices hold after an error is not specified.
type World interface {
	// Rank is this rank's number, from 0.
	Rank() int
	// Size is the number of ranks, at least 1.
	Size() int
	// Barrier returns when all ranks have called it.
	Barrier(ctx context.Context, tag string) error
	// AllGather gives every rank the messages of all, indexed by rank. Lengths may differ and may be zero (an empty message
	// arrives as an empty slice, not nil). The result is this rank's own, and a copy even of its own message.
	AllGather(ctx context.Context, tag string, mine []byte) ([][]byte, error)
	// AllReduceInt64 replaces v[i] on every rank by op over the ranks' v[i]. Lengths must agree.
	AllReduceInt64(ctx context.Context, tag string, op Op, v []int64) error
	// AllReduceFloat32 replaces v[i] on every rank by op over the ranks' v[i], taken in the order of the ranks: all ranks get
	// the same bits, in every run. Lengths must agree. Max and Min are those of the built-in functions: a NaN wins, and -0 is
	// below +0. v may be large (a gradient bucket): no copy of it is made.
	AllReduceFloat32(ctx context.Context, tag string, op Op, v []float32) error
	// Broadcast copies the root's p into every rank's p. Lengths must agree.
	Broadcast(ctx context.Context, tag string, root int, p []byte) error
	// Close leaves. Ranks that wait for this one, or later meet without it, get an AbortError with ErrClosed; if all close
	// after their last operation, nobody gets any. Closing again does nothing.
	Close() error
}

// Op is how a reduction combines two numbers.
type Op uint8

// The reductions. The zero Op is none of them, so that a forgotten one is refused.
const (
	Max Op = 1 + iota // the larger
	Min               // the smaller
	Sum               // the sum: wrapping for integers, in the order of the ranks for floats
)

// String is "max", "min" or "sum".
func (o Op) String() string {
	switch o {
	case Max:
		return "max"
	case Min:
		return "min"
	case Sum:
		return "sum"
	}
	return fmt.Sprintf("op %d", uint8(o))
}

// Solo is the world of one rank. Every operation is the identity; one whose context is cancelled, or whose arguments no
// world accepts, fails as it does in a [Group]. Solo has no state: it does not become unusable, and Close does nothing.
type Solo struct{}

var _ World = Solo{}

// Rank is 0.
func (Solo) Rank() int { return 0 }

// Size is 1.
func (Solo) Size() int { return 1 }

// Barrier returns at once.
func (Solo) Barrier(ctx context.Context, tag string) error {
	return alone(ctx, Call{Operation: barrier, Tag: tag})
}

// AllGather returns a copy of the one message.
func (Solo) AllGather(ctx context.Context, tag string, mine []byte) ([][]byte, error) {
	if err := alone(ctx, Call{Operation: allGather, Tag: tag}); err != nil {
		return nil, err
	}
	return [][]byte{append([]byte{}, mine...)}, nil
}

// AllReduceInt64 leaves v as it is.
func (Solo) AllReduceInt64(ctx context.Context, tag string, op Op, v []int64) error {
	return alone(ctx, Call{Operation: allReduceInt64, Tag: tag, Op: op, Len: len(v)})
}

// AllReduceFloat32 leaves v as it is.
func (Solo) AllReduceFloat32(ctx context.Context, tag string, op Op, v []float32) error {
	return alone(ctx, Call{Operation: allReduceFloat32, Tag: tag, Op: op, Len: len(v)})
}

// Broadcast leaves p as it is.
func (Solo) Broadcast(ctx context.Context, tag string, root int, p []byte) error {
	return alone(ctx, Call{Operation: broadcast, Tag: tag, Root: root, Len: len(p)})
}

// Close does nothing.
func (Solo) Close() error { return nil }

// alone is what can be wrong with an operation of one rank.
func alone(ctx context.Context, c Call) error {
	if err := cause(ctx); err != nil {
		return &AbortError{Rank: 0, Err: err}
	}
	if err := c.check(1); err != nil {
		return &AbortError{Rank: 0, Err: err}
	}
	if err := failpoint.Hit(failpoint.Meet); err != nil {
		return &AbortError{Rank: 0, Err: err}
	}
	return nil
}

// cause is why ctx is cancelled, nil if it is not. It matches ctx.Err() and, if the canceller gave one, its cause.
func cause(ctx context.Context) error {
	err := ctx.Err()
	if err == nil {
		return nil
	}
	if why := context.Cause(ctx); why != nil && why != err {
		return fmt.Errorf("%w: %w", err, why)
	}
	return err
}
