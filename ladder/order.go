package ladder

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/trainerrank/engine/forward/prefixtree"
)

// Order is the order in which requests are visited, so that those with equal prefixes are neighbours (section 5.2 of the reference): group by group as they first
// occur, within a group by the segment of its tree in which a request ends, then by number. groups holds the group of each request, -1 for those that want no
// output, which come last; terminals the segment.
//
// The order of the first m requests is this order without the others.
func Order(groups, terminals []int) []int {
	rank := map[int]int{}
	for _, g := range groups {
		if _, seen := rank[g]; !seen && g >= 0 {
			rank[g] = len(rank)
		}
	}
	order := make([]int, len(groups))
	for r := range order {
		order[r] = r
	}
	slices.SortFunc(order, func(a, b int) int {
		ga, gb := groups[a], groups[b]
		switch {
		case ga < 0 || gb < 0:
			return cmp.Or(cmp.Compare(-ga, -gb), cmp.Compare(a, b))
		case ga != gb:
			return cmp.Compare(rank[ga], rank[gb])
		}
		return cmp.Or(cmp.Compare(terminals[a], terminals[b]), cmp.Compare(a, b))
	})
	return order
}

// Visit is the visiting order of a call with what neighbours in it share, which is enough to count the packed tokens of any chunk in time that does not grow
// with tokens.
type Visit struct {
	Order []int // see [Order]

	groups []int
	length []int // per request
	place  []int // per request its place in Order
	common []int // per place the tokens shared with the place before, 0 across groups
}

// NewVisit reads the trees of a call. groups holds the group of each request, -1 or an index into trees, whose tree has its requests as rows in the caller's order.
func NewVisit(groups []int, trees []*prefixtree.Tree) (*Visit, error) {
	n := len(groups)
	v := &Visit{groups: groups, length: make([]int, n), place: make([]int, n), common: make([]int, n)}
	terminals, rows := make([]int, n), make([]int, len(trees))
	for r, g := range groups {
		if g < 0 {
			continue
		}
		if g >= len(trees) || rows[g] >= len(trees[g].Terminals) {
			return nil, &CallError{fmt.Sprintf("request %d of group %d has no row in a tree", r, g)}
		}
		terminals[r] = trees[g].Terminals[rows[g]]
		v.length[r] = trees[g].Segments[terminals[r]].End
		rows[g]++
	}
	v.Order = Order(groups, terminals)
	for p, r := range v.Order {
		v.place[r] = p
		if p == 0 || groups[r] < 0 || groups[v.Order[p-1]] != groups[r] {
			continue
		}
		v.common[p] = trees[groups[r]].Shared(terminals[v.Order[p-1]], terminals[r])
	}
	return v, nil
}

// Packed is the number of tokens of a full-sharing layout of some requests, in any order: no layout of them has fewer. In visiting order a
// request shares most with the one before it, so that everything beyond that is its own.
func (v *Visit) Packed(requests []int) int {
	byPlace := func(a, b int) int { return cmp.Compare(v.place[a], v.place[b]) }
	if !slices.IsSortedFunc(requests, byPlace) {
		requests = slices.SortedFunc(slices.Values(requests), byPlace)
	}
	packed, last := 0, -1
	for _, r := range requests {
		if v.groups[r] < 0 {
			continue
		}
		packed += v.length[r]
		if p := v.place[r]; last >= 0 && v.groups[v.Order[last]] == v.groups[r] {
			packed -= slices.Min(v.common[last+1 : p+1])
		}
		last = v.place[r]
	}
	return packed
}
