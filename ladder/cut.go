package ladder

import "math/bits"

// Cut divides items, visited in order, into count contiguous chunks of about equal mass (section 5.3 of the reference); count is brought into [1, len(masses)].
// It returns the end of each chunk. No chunk is empty. Integers only: a chunk ends where the mass so far has reached its part of the total.
func Cut(masses []int64, count int) (ends []int) {
	n := len(masses)
	if n == 0 {
		return nil
	}
	count = min(max(count, 1), n)
	var total uint64
	for _, m := range masses {
		total += uint64(m)
	}
	ends = make([]int, 0, count)
	var sum uint64
	for p, m := range masses {
		sum += uint64(m)
		left := count - len(ends) - 1 // chunks after this one
		if left > 0 && (reached(sum, count, total, len(ends)+1) || n-p-1 <= left) {
			ends = append(ends, p+1)
		}
	}
	return append(ends, n)
}

// reached says whether sum*count >= total*part.
func reached(sum uint64, count int, total uint64, part int) bool {
	h1, l1 := bits.Mul64(sum, uint64(count))
	h2, l2 := bits.Mul64(total, uint64(part))
	return h1 > h2 || h1 == h2 && l1 >= l2
}
