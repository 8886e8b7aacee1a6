package slots

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// need is what a rank says before a call.
type need struct {
	Wanted []string
	Loaded map[string]int64 // revisions by name
}

// Ensure says whether the slots that this call of any rank runs on are loaded on all ranks. It is one collective, whatever the names are, so every rank calls it in every call, also without
// a name. The base model ("") is always there. A slot that is not loaded, or not the same everywhere, is a [*SlotStateError], the same on all ranks.
func (s *Set) Ensure(ctx context.Context, names []string) error {
	s.turn.Lock()
	defer s.turn.Unlock()
	mine := need{Wanted: slices.Compact(slices.Sorted(slices.Values(names))), Loaded: map[string]int64{}}
	s.mu.Lock()
	for name, sl := range s.slots {
		mine.Loaded[name] = sl.revision
	}
	s.mu.Unlock()
	all, err := s.world.AllGather(ctx, "slots/ensure", encode(mine))
	if err != nil {
		return fmt.Errorf("ensure checkpoints: %w", err)
	}
	needs := make([]need, len(all))
	for r := range all {
		if err := decode(all[r], &needs[r]); err != nil {
			return err
		}
	}
	return compare(needs)
}

// compare is the outcome of what all ranks need and have.
func compare(needs []need) error {
	wanted := map[string]bool{}
	for _, n := range needs {
		for _, name := range n.Wanted {
			wanted[name] = true
		}
	}
	delete(wanted, "")
	for _, name := range slices.Sorted(maps.Keys(wanted)) {
		var with, without []string
		odd := ""
		first := int64(-1)
		for r, n := range needs {
			revision, ok := n.Loaded[name]
			if !ok {
				without = append(without, fmt.Sprint(r))
				continue
			}
			with = append(with, fmt.Sprint(r))
			if first < 0 {
				first = revision
			} else if revision != first {
				odd = fmt.Sprintf("rank %d is at revision %d, rank %s at %d", r, revision, with[0], first)
			}
		}
		switch {
		case with == nil:
			return &SlotStateError{name, "no checkpoint of that name is loaded"}
		case without != nil:
			return &SlotStateError{name, fmt.Sprintf("it is loaded on ranks %s and not on %s", strings.Join(with, ", "), strings.Join(without, ", "))}
		case odd != "":
			return &SlotStateError{name, "the ranks do not have the same: " + odd}
		}
	}
	return nil
}
