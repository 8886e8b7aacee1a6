package prefixtree

// Block sizes, in tokens, of commonPrefix. Comparing two arrays of the large one is a call to the runtime's vectorised memory comparison,
// whose cost is hidden by 1 KiB of data; the small one is where the last mismatch is looked for, a few words at a time.
const (
	largeBlock = 256
	smallBlock = 16
)

// commonPrefix is the number of tokens at the start of a and b that agree.
//
// It compares block by block, since == on arrays is a memory comparison and a loop over elements is not. Slices that
// start at the same address are equal as far as both go and are not read.
func commonPrefix(a, b []int32) int {
	n := min(len(a), len(b))
	if n == 0 || &a[0] == &b[0] {
		return n
	}
	a, b = a[:n], b[:n]
	i := 0
	for n-i >= largeBlock && *(*[largeBlock]int32)(a[i:]) == *(*[largeBlock]int32)(b[i:]) {
		i += largeBlock
	}
	for n-i >= smallBlock && *(*[smallBlock]int32)(a[i:]) == *(*[smallBlock]int32)(b[i:]) {
		i += smallBlock
	}
	for i < n && a[i] == b[i] {
		i++
	}
	return i
}

// sortRows orders the rows by their tokens, a prefix before what it is a prefix of, equal rows by number. It returns the order
// and, for each place in it, the length of the prefix that the row there has in common with the row before it (0 for the first).
//
// It is a merge sort that remembers common prefixes (Ng and Kakehi, "Merging string sequences by longest common prefixes", IPSJ
// 2008): of two heads, the one that shares more with the row written last is the smaller, and only when both share
// equally much are tokens compared, from there on. A row's remembered prefix only grows within a merge and over merges, so all
// merges together compare O(tokens + n log n) tokens.
func sortRows(rows [][]int32) (order []int32, common []int) {
	n := len(rows)
	order, common = make([]int32, n), make([]int, n)
	for i := range order {
		order[i] = int32(i)
	}
	if n == 1 {
		return order, common
	}
	toOrder, toCommon := make([]int32, n), make([]int, n)
	for width := 1; width < n; width *= 2 {
		for lo := 0; lo < n; lo += 2 * width {
			mid, hi := min(lo+width, n), min(lo+2*width, n)
			merge(rows, order, common, toOrder, toCommon, lo, mid, hi)
		}
		order, toOrder = toOrder, order
		common, toCommon = toCommon, common
	}
	return order, common
}

// merge merges the sorted runs [lo, mid) and [mid, hi) of order into the same places of toOrder.
func merge(rows [][]int32, order []int32, common []int, toOrder []int32, toCommon []int, lo, mid, hi int) {
	i, j := lo, mid
	// What each head shares with the row written last. Before the first there is none, and nothing is shared.
	withI, withJ := 0, 0
	for k := lo; k < hi; k++ {
		left := j == hi || i < mid && withI > withJ
		at := min(withI, withJ) // what the head that stays shares with the one that is written
		if i < mid && j < hi && withI == withJ {
			a, b := rows[order[i]], rows[order[j]]
			at += commonPrefix(a[at:], b[at:])
			left = at == len(a) || at < len(b) && a[at] < b[at]
		}
		if left {
			toOrder[k], toCommon[k] = order[i], withI
			withJ = at
			if i++; i < mid {
				withI = common[i]
			}
		} else {
			toOrder[k], toCommon[k] = order[j], withJ
			withI = at
			if j++; j < hi {
				withJ = common[j]
			}
		}
	}
}
