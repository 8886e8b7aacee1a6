package slots

import (
	"fmt"
	"sync/atomic"

	"github.com/trainerrank/engine/forward"
)

// Lease says that a graph of a pass on a slot is live: until it is released the slot cannot be replaced or unloaded. Its methods may be called
// from any goroutine, one of the garbage collector included.
type Lease struct {
	set      *Set
	slot     *slot
	revision int64 // of the slot
	base     int64 // and of the base model, on which the pass ran too
	released atomic.Bool
}

// Acquire takes a lease of a slot, or of the base model (""): one for each group of each subforward that keeps a graph.
func (s *Set) Acquire(name string) (*Lease, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	sl, err := s.find(name)
	if err != nil {
		return nil, err
	}
	if sl.closing {
		return nil, &SlotStateError{name, "it is being replaced"}
	}
	sl.live++
	return &Lease{set: s, slot: sl, revision: sl.revision, base: s.bases.revision}, nil
}

// Release ends the lease. Releasing again, or a nil lease, does nothing.
func (l *Lease) Release() {
	if l == nil || l.released.Swap(true) {
		return
	}
	l.set.mu.Lock()
	defer l.set.mu.Unlock()
	l.slot.live--
}

// Name is the slot's name.
func (l *Lease) Name() string { return l.slot.name }

// Adapter is what the pass ran with; nil for the base model.
func (l *Lease) Adapter() *forward.Adapter { return l.slot.adapter }

// Stale says that the slot, or the base model beneath it, was stepped since the lease was taken, so that a backward would mix two sets of weights, or that the set was closed.
func (l *Lease) Stale() bool {
	l.set.mu.Lock()
	defer l.set.mu.Unlock()
	return l.slot.gone || l.slot.revision != l.revision || l.set.bases.revision != l.base
}

// idle says why a slot cannot be replaced or unloaded now. The caller holds mu.
func (sl *slot) idle() error {
	switch {
	case sl.live > 0:
		return &SlotStateError{sl.name, fmt.Sprintf("%d of its graphs are live: run their backward or release their results first", sl.live)}
	case sl.pending:
		return &SlotStateError{sl.name, "gradients are pending: step or zero them first"}
	}
	return nil
}
