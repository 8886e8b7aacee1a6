package loader

import (
	"fmt"
	"math/rand/v2"
	"slices"
)

// randomLoad makes a load. Few sizes are large against the rest, so that tensors and budgets collide often.
func randomLoad(rng *rand.Rand, tensors bool) ([]FileStats, PlanParams) {
	pick := func(xs ...int) int { return xs[rng.IntN(len(xs))] }
	p := PlanParams{
		QueueSize: pick(-1, -1, 0, 0, 1, 3, 8), Group: pick(1, 1, 1, 2, 3, 4),
		AccumulateResident: rng.IntN(3) > 0, YieldClone: rng.IntN(2) > 0, Align: 1,
	}
	if rng.IntN(4) == 0 {
		p.Copier.PerChunk = int64(rng.IntN(50))
	}
	if rng.IntN(4) == 0 {
		p.Copier.Fixed = int64(rng.IntN(200))
	}
	if rng.IntN(4) == 0 {
		p.Preallocated = int64(rng.IntN(200))
	}
	ratios := []Ratio{{1, 1}, {1, 1}, {2, 1}, {3, 2}, {11, 10}}
	if rng.IntN(8) == 0 {
		ratios = []Ratio{{1, 1}, {1, 2}, {0, 1}, {2, 1}} // some are nothing for the classic mode
	}
	one := ratios[rng.IntN(len(ratios))]
	mixed := rng.IntN(3) == 0
	residency := rng.IntN(3) // all, none, some
	cuts := rng.IntN(3) == 0
	// Sand fills chunks up to their limits, so that a limit which is a little too large shows.
	sand := rng.IntN(3) == 0
	var stats []FileStats
	for i := range 1 + rng.IntN(6) {
		if mixed {
			one = ratios[rng.IntN(len(ratios))]
		}
		p.Copier.Multiplier = append(p.Copier.Multiplier, one)
		f := FileStats{Path: fmt.Sprintf("f%d", i)}
		offset := int64(64)
		start, end := int64(-1), int64(0)
		scale := pick(10, 100, 1000)
		count := rng.IntN(12)
		if sand {
			count, scale = 10+rng.IntN(40), 4
		}
		for j := range count {
			size := int64(rng.IntN(scale))
			if rng.IntN(8) == 0 && !sand {
				size *= 8
			}
			if sand && j == count/2 && rng.IntN(3) == 0 {
				size = 10 + rng.Int64N(100)
			}
			if rng.IntN(10) == 0 {
				size = 0
			}
			if rng.IntN(4) > 0 { // else it is a hole
				t := TensorStats{Name: fmt.Sprintf("t%d.%d", i, j), Offset: offset, Bytes: size}
				t.Resident = residency == 0 || residency == 2 && rng.IntN(2) > 0
				if cuts && size > 1 && rng.IntN(2) > 0 {
					t.Atom = 1 + rng.Int64N(size)
				}
				if start < 0 {
					start = offset
				}
				end = offset + size
				f.Tensors = append(f.Tensors, t)
				f.Kept += size
				f.Largest = max(f.Largest, size)
				if t.Resident {
					f.Resident += size
				}
				piece := size
				if t.Atom > 0 {
					piece = min(piece, t.Atom)
				}
				f.Atom = max(f.Atom, piece)
			}
			offset += size
		}
		if start >= 0 {
			f.Span = end - start
		}
		if !tensors {
			f.Tensors = nil
		}
		stats = append(stats, f)
	}
	var largest int64
	for _, f := range stats {
		largest = max(largest, f.Largest)
	}
	if rng.IntN(4) == 0 {
		p.MaxChunk = 1 + rng.Int64N(2*largest+1)
	}
	return stats, p
}

// randomAlign is a unit of memory: small against the sizes of randomLoad, or a block of a disk or a page and large against most.
func randomAlign(rng *rand.Rand) int64 {
	if rng.IntN(2) == 0 {
		return []int64{1, 512, 4096}[rng.IntN(3)]
	}
	return 1 << rng.IntN(7)
}

// hasClassic says whether the classic mode has plans with such costs.
func hasClassic(p PlanParams) bool {
	return !slices.ContainsFunc(p.Copier.Multiplier, func(r Ratio) bool { return r.Num < r.Den })
}

// sumKept is all kept bytes.
func sumKept(stats []FileStats) (n int64) {
	for _, f := range stats {
		n += f.Kept
	}
	return n
}
