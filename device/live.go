package device

import (
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strings"
)

// holding is one live block or reservation.
type holding struct {
	held        Sizes // bytes still held
	reservation bool
	pcs         [8]uintptr // who asked for it
}

// callers are the program counters from the caller of an exported method outwards. It costs about a microsecond, next to
// the several that a mapping costs.
func callers() (pcs [8]uintptr) {
	runtime.Callers(4, pcs[:]) // skips Callers, callers, commit and the exported method
	return pcs
}

// Allocation is one live block or reservation.
type Allocation struct {
	ID          uint64   // rises from allocation to allocation
	Bytes       Sizes    // what it holds now, in bytes, by purpose
	Reservation bool     // a reservation, else a block
	Callers     []string // who asked for it, innermost first, as file:line
}

// String is one line: what it is, its bytes, and who asked for it.
func (a Allocation) String() string {
	kind := "block"
	if a.Reservation {
		kind = "reservation"
	}
	return fmt.Sprintf("%s of %v from %s", kind, a.Bytes, strings.Join(a.Callers, ", called from "))
}

// Live lists the blocks and reservations that are not given back yet, oldest first.
func (s *Space) Live() []Allocation {
	s.mu.Lock()
	defer s.mu.Unlock()
	var list []Allocation
	for _, id := range slices.Sorted(maps.Keys(s.live)) {
		h := s.live[id]
		list = append(list, Allocation{ID: id, Bytes: h.held, Reservation: h.reservation, Callers: describe(h.pcs)})
	}
	return list
}

// describe names the lines behind pcs, up to where the program or the test begins.
func describe(pcs [8]uintptr) []string {
	n := slices.Index(pcs[:], 0)
	if n < 0 {
		n = len(pcs)
	}
	var lines []string
	for frames := runtime.CallersFrames(pcs[:n]); ; {
		f, more := frames.Next()
		if strings.HasPrefix(f.Function, "runtime.") || strings.HasPrefix(f.Function, "testing.") || f.File == "" {
			return lines
		}
		lines = append(lines, fmt.Sprintf("%s:%d", f.File, f.Line))
		if !more {
			return lines
		}
	}
}

// TB is the part of [testing.TB] that [CheckLeaks] uses.
type TB interface {
	Helper()
	Cleanup(func())
	Errorf(format string, args ...any)
}

// CheckLeaks fails t, when the test is over, if d then holds other memory than it does now: it prints the counters that
// differ and, where the device can list them, the blocks and reservations that were taken since and not given back, with
// the lines that took them. Call it before whatever else registers a cleanup that frees memory: cleanups run last first.
func CheckLeaks(t TB, d Device) {
	t.Helper()
	before := d.Stats()
	seen := make(map[uint64]bool)
	lister, _ := d.(interface{ Live() []Allocation })
	if lister != nil {
		for _, a := range lister.Live() {
			seen[a.ID] = true
		}
	}
	t.Cleanup(func() {
		t.Helper()
		now := d.Stats()
		var b strings.Builder
		differ := func(what string, was, is int64) {
			if was != is {
				fmt.Fprintf(&b, "\n  %s: %d before, %d now", what, was, is)
			}
		}
		differ("allocated bytes", before.Allocated, now.Allocated)
		for p := range now.InUse {
			differ("bytes in use for "+Purpose(p).String(), before.InUse[p], now.InUse[p])
		}
		differ("blocks", int64(before.Blocks), int64(now.Blocks))
		differ("reservations", int64(before.Reservations), int64(now.Reservations))
		if lister != nil {
			for _, a := range lister.Live() {
				if !seen[a.ID] {
					fmt.Fprintf(&b, "\n  leaked: %v", a)
				}
			}
		}
		if b.Len() > 0 {
			t.Errorf("device %s does not hold what it held before the test:%s", d.Name(), b.String())
		}
	})
}
