package device

import (
	"fmt"
	"strings"
)

// Stats are the counters of a [Device] at one moment. All byte counts are multiples of [PageSize], but for Capacity. Two
// Stats can be compared with ==.
//
// Allocated is what is taken from the capacity: blocks, and the slabs of reservations as a whole. InUse is what of it is
// really used: a block as a whole, of a slab the pages that its arena has handed out (the bump offset of kept memory,
// the present height of the scratch stack). The peak of a pass can therefore be compared with what was predicted for
// it, and an over-generous reservation does not hide behind its own size.
type Stats struct {
	Capacity int64 // bytes that the device may hold at once

	// Allocated is what is taken from the capacity now, in bytes.
	// Invariant: TotalInUse() <= Allocated <= Capacity.
	Allocated int64
	// PeakAllocated is the highest Allocated since the last [Device.ResetPeak].
	PeakAllocated int64

	// InUse is what is used now, in bytes, by purpose.
	InUse Sizes
	// Peak is the highest InUse of each purpose, each at its own moment.
	Peak Sizes
	// PeakInUse is the highest TotalInUse of any one moment.
	// Invariant: TotalInUse() <= PeakInUse <= Peak.Total().
	PeakInUse int64

	Blocks       int // live blocks
	Reservations int // reservations not yet released

	inUse int64 // Invariant: inUse == InUse.Total(). Kept so that a page more costs no sum.
}

// TotalInUse is what is used now for all purposes, in bytes.
func (s Stats) TotalInUse() int64 { return s.InUse.Total() }

func (s *Stats) use(p Purpose, delta int64) {
	s.InUse[p] += delta
	s.inUse += delta
	if delta > 0 {
		s.Peak[p] = max(s.Peak[p], s.InUse[p])
		s.PeakInUse = max(s.PeakInUse, s.inUse)
	}
}

// String is a table in bytes: a row for each purpose that is or was in use, their total, and what is allocated for them.
func (s Stats) String() string {
	rows := [][3]string{{"bytes", "live", "peak"}}
	add := func(name string, live, peak int64) {
		rows = append(rows, [3]string{name, fmt.Sprint(live), fmt.Sprint(peak)})
	}
	for p := range s.InUse {
		if s.InUse[p] != 0 || s.Peak[p] != 0 {
			add(Purpose(p).String(), s.InUse[p], s.Peak[p])
		}
	}
	add("total", s.TotalInUse(), s.PeakInUse)
	add("allocated", s.Allocated, s.PeakAllocated)
	var wide [3]int
	for _, row := range rows {
		for i, cell := range row {
			wide[i] = max(wide[i], len(cell))
		}
	}
	var b strings.Builder
	for _, row := range rows {
		fmt.Fprintf(&b, "%-*s  %*s  %*s\n", wide[0], row[0], wide[1], row[1], wide[2], row[2])
	}
	fmt.Fprintf(&b, "capacity %d, blocks %d, reservations %d\n", s.Capacity, s.Blocks, s.Reservations)
	return b.String()
}

// String lists the purposes that have bytes: "outputs 4096, scratch 8192". Without any it is "nothing".
func (s Sizes) String() string {
	var parts []string
	for p, n := range s {
		if n != 0 {
			parts = append(parts, fmt.Sprintf("%v %d", Purpose(p), n))
		}
	}
	if parts == nil {
		return "nothing"
	}
	return strings.Join(parts, ", ")
}
