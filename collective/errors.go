package collective

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
)

var (
	// ErrClosed is the reason in an AbortError when the rank has closed its world (under Run: has returned without error).
	ErrClosed = errors.New("it has left the group")
	// ErrConcurrent is the reason in an AbortError when two goroutines used one rank at the same time.
	ErrConcurrent = errors.New("it called two operations at the same time")
	// ErrOverlap is the reason in an AbortError when two ranks brought the same memory to an operation that writes it.
	ErrOverlap = errors.New("its memory overlaps that of another rank")
	// ErrUnusable is in the error of every call that comes after the group has ended; it stands beside the error that ended it.
	ErrUnusable = errors.New("collective: the group is unusable")
)

// The operations, as Call.Operation names them.
const (
	barrier          = "Barrier"
	allGather        = "AllGather"
	allReduceInt64   = "AllReduceInt64"
	allReduceFloat32 = "AllReduceFloat32"
	broadcast        = "Broadcast"
)

// Call is what must agree between the ranks of one operation.
type Call struct {
	Operation string // the method of World; "" if the rank had not arrived
	Tag       string
	Op        Op  // of a reduction, else 0
	Root      int // of a broadcast, else 0
	Len       int // elements of a reduction, bytes of a broadcast; 0 where lengths may differ
}

// String is, for example, `AllReduceInt64 "admission" (max of 2)`.
func (c Call) String() string {
	switch c.Operation {
	case "":
		return "nothing yet"
	case allReduceInt64, allReduceFloat32:
		return fmt.Sprintf("%s %q (%v of %d)", c.Operation, c.Tag, c.Op, c.Len)
	case broadcast:
		return fmt.Sprintf("%s %q (%d bytes from rank %d)", c.Operation, c.Tag, c.Len, c.Root)
	}
	return fmt.Sprintf("%s %q", c.Operation, c.Tag)
}

// check refuses what no world of n ranks can carry out.
func (c Call) check(n int) error {
	switch {
	case (c.Operation == allReduceInt64 || c.Operation == allReduceFloat32) && (c.Op < Max || c.Op > Sum):
		return fmt.Errorf("%v: no such reduction", c)
	case c.Operation == broadcast && (c.Root < 0 || c.Root >= n):
		return fmt.Errorf("%v: no such rank among %d", c, n)
	}
	return nil
}

// MismatchError says that the ranks did not call the same operation with the same tag, length, op and root. All ranks get
// the same one; it must not be changed.
type MismatchError struct {
	Calls []Call // by rank; the zero Call for a rank that had not arrived when the difference was seen
}

// Error lists the calls, ranks that did the same together.
func (e *MismatchError) Error() string {
	var b strings.Builder
	b.WriteString("collective: ranks do not call the same operation:")
	told := make([]bool, len(e.Calls))
	sep := " "
	for i, c := range e.Calls {
		if told[i] {
			continue
		}
		var same []string
		for j := i; j < len(e.Calls); j++ {
			if e.Calls[j] == c {
				told[j] = true
				same = append(same, fmt.Sprint(j))
			}
		}
		who := "rank "
		if len(same) > 1 {
			who = "ranks "
		}
		fmt.Fprintf(&b, "%s%s%s: %v", sep, who, strings.Join(same, ", "), c)
		sep = "; "
	}
	b.WriteString("; hint: the calls of a rank and their order must not depend on what only that rank knows")
	return b.String()
}

// AbortError says that a rank is gone, or never could take part. All ranks get the same one; it must not be changed.
type AbortError struct {
	Rank int   // who ended the group
	Err  error // why: ErrClosed, ErrConcurrent, ErrOverlap, a context's error, a *PanicError, or what was given to Abort
}

// Error names the rank and the reason.
func (e *AbortError) Error() string {
	return fmt.Sprintf("collective: rank %d ended the group: %v", e.Rank, e.Err)
}

// Unwrap is the reason.
func (e *AbortError) Unwrap() error { return e.Err }

// PeerError says that another rank brought an error to [Agree]. The error itself stays on that rank, since what crosses a
// process cannot be more than text.
type PeerError struct {
	Rank int    // the lowest rank that failed
	Text string // its error's text
}

// Error names the rank and gives its text.
func (e *PeerError) Error() string { return fmt.Sprintf("rank %d failed: %s", e.Rank, e.Text) }

// RankError is what one rank of [Run] returned.
type RankError struct {
	Rank int
	Err  error
}

// Error puts the rank's number before its error.
func (e *RankError) Error() string { return fmt.Sprintf("rank %d: %v", e.Rank, e.Err) }

// Unwrap is what the rank returned.
func (e *RankError) Unwrap() error { return e.Err }

// PanicError is a panic that was made an error: of a rank under [Run], or a memory fault inside an operation.
type PanicError struct {
	Value any    // what was panicked with
	Where string // file:line of the function that panicked, "" if not known
	Stack []byte // as of debug.Stack; not in the text, since the text reaches all ranks
}

// Error is one line with the value and the place.
func (e *PanicError) Error() string {
	if e.Where == "" {
		return fmt.Sprintf("panic: %v", e.Value)
	}
	return fmt.Sprintf("panic: %v (at %s)", e.Value, e.Where)
}

// Unwrap is the value if it is an error.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}

// panicError describes a panic; it must be called by the deferred function that recovered it.
func panicError(value any) *PanicError {
	stack := make([]byte, 64<<10)
	e := &PanicError{Value: value, Stack: slices.Clip(stack[:runtime.Stack(stack, false)])}
	pc := make([]uintptr, 64)
	frames := runtime.CallersFrames(pc[:runtime.Callers(1, pc)])
	panicking := false
	for {
		f, more := frames.Next()
		// Below the frames of the panic itself (gopanic, and sigpanic or panicmem for a fault) stands who caused it.
		if own := strings.HasPrefix(f.Function, "runtime."); own && f.Function == "runtime.gopanic" {
			panicking = true
		} else if panicking && !own {
			e.Where = fmt.Sprintf("%s:%d", f.File, f.Line)
			return e
		}
		if !more {
			return e
		}
	}
}
