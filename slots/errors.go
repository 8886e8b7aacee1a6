package slots

import (
	"fmt"

	"github.com/trainerrank/engine/internal/strictjson"
)

// SlotStateError is a slot that is not in a state for what was asked of it: not loaded, live graphs, gradients pending, a snapshot. Nothing was changed.
type SlotStateError struct {
	Slot   string // "" for the base model, or where it is about no slot in particular
	Reason string
}

func (e *SlotStateError) Error() string { return fmt.Sprintf("checkpoint %q: %s", e.Slot, e.Reason) }

// AdapterError is a folder that does not hold a whole adapter that the engine can run as it is meant. Nothing was changed.
type AdapterError struct {
	Path    string // the file or folder at fault
	Item    string // the key, tensor or file of it that is at fault; empty if it is the whole
	Problem string // what is wrong, lower-case
	Advice  string // what the user may do about it; empty if there is no saying
	Err     error  // the cause, or nil
}

func (e *AdapterError) Error() string {
	s := e.Path
	if e.Item != "" {
		s += ": " + quote(e.Item)
	}
	s += ": " + e.Problem
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	return s
}

// Unwrap is the cause, or nil.
func (e *AdapterError) Unwrap() error { return e.Err }

// Hint is what the user may do about it.
func (e *AdapterError) Hint() string { return e.Advice }

// quote shows a foreign name: escaped and of bounded length.
func quote(s string) string { return strictjson.Quote(s, 120) }
