package trainerrank

import (
	"fmt"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/slots"
)

// InputError is an input that breaks a rule of a call, or asks for what the engine cannot do. Nothing was planned.
type InputError struct {
	Path  string // which input: "inputs[2][0]"
	Index int    // its number in the caller's order
	Err   error  // what is wrong
}

func (e *InputError) Error() string { return e.Path + ": " + e.Err.Error() }
func (e *InputError) Unwrap() error { return e.Err }

// MemoryError is the refusal of a call that does not fit, before anything ran. All numbers belong to one and the same plan: the whole call with
// fewest tokens.
//
// It is also what a [PartialExecutionError] wraps if memory ran out while a split ran, and what a call whose price was an estimate fails with if memory ran out while it
// ran whole; then the numbers are those of the plan that ran, and SmallestBudgetBytes is what it was to need.
type MemoryError struct {
	PredictedPeakBytes  int64 // bytes that the call needs beside what is allocated
	UsableLimitBytes    int64 // bytes that it may use
	Suggestion          string
	PackedTokens        int
	LogicalTokens       int
	Requests            int          // those that want an output
	Reason              Reason       // why it is not split; empty if it was admitted
	Rungs               []Rung       // each plan that was tried
	Shares              device.Sizes // PredictedPeakBytes by purpose
	SmallestBudgetBytes int64        // usable bytes with which the call is admitted, one less it is not
	LargestPrefix       int          // the first so many inputs, in the caller's order, fit now
	Telemetry           Telemetry
	Err                 error // why the device gave no memory although the call was within the limit; nil otherwise
	Executing           bool  // it ran out while a call that was admitted ran
}

func (e *MemoryError) Error() string {
	what, why, cause := "is predicted to exceed available memory: unable to find a feasible split", string(e.Reason), ""
	if e.Err != nil {
		what, why, cause = "could not reserve what it is predicted to need: unable to find a feasible split", "the bytes that it was planned for are not there", ": "+e.Err.Error()
	}
	if e.Executing {
		what, why = "ran out of memory in a call that was admitted", "its rehearsal asked for less"
		if e.Telemetry.SubforwardCount > 1 {
			what = "ran out of memory in a split that was admitted"
		}
		if e.Telemetry.Basis != Exact {
			why = fmt.Sprintf("its price was an estimate, %s", e.Telemetry.Basis)
		}
	}
	return fmt.Sprintf("forward %s (%s): predicted_peak_bytes=%d usable_limit_bytes=%d packed_tokens=%d logical_tokens=%d%s",
		what, why, e.PredictedPeakBytes, e.UsableLimitBytes, e.PackedTokens, e.LogicalTokens, cause)
}

// Unwrap is why the device gave no memory although the call was within the limit, or nil.
func (e *MemoryError) Unwrap() error { return e.Err }

// Hint says what would fit.
func (e *MemoryError) Hint() string { return e.Suggestion }

// PartialExecutionError is a failure while the subforwards of an admitted split ran, the first included. No output is left of it. If memory ran out,
// [errors.As] finds a [*MemoryError] in it.
type PartialExecutionError struct {
	Completed int // subforwards that were done
	Count     int // subforwards of the split
	Err       error
}

func (e *PartialExecutionError) Error() string {
	return fmt.Sprintf("subforward %d of %d failed during execution (%d of %d completed): %v", e.Completed+1, e.Count, e.Completed, e.Count, e.Err)
}

// Unwrap is why the subforward failed.
func (e *PartialExecutionError) Unwrap() error { return e.Err }

// SlotStateError is a slot that is not in a state for what was asked of it.
type SlotStateError = slots.SlotStateError

// RuntimeSupportError is a way of running that the engine cannot run.
type RuntimeSupportError struct{ Reason string }

func (e *RuntimeSupportError) Error() string { return e.Reason }
