package prefixtree

// The exact search is a dynamic programme over the tree. Where costs are charged by the unit, a layout's work is a sum over its
// spans and decisions, plus what its depth costs. What the decisions from i downward contribute to the sum depends on the layout above
// them through one number alone: where i's nearest shared ancestor ends. So the best of that part is a table over pairs of a decision
// and an ancestor (or none), filled from the deepest decision up:
//
//	best(i, from) = the lesser of
//	    not shared:  own rows' tails from `from`               + sum over children c of best(c, from)
//	    shared:      span [from, end) + own tails from end     + sum over children c of best(c, end)
//
// The depth is not a sum. But what it costs never falls with it, so the optimum is the least, over all r, of the best sum among layouts of at
// most r levels, plus the cost of r levels. Those best sums come from the same table with r as a third index: a shared decision leaves
// r-1 levels to its children. Without a limit on levels there is one table more, which bounds all the others from below: the first r at which that
// bound and the cost of r levels are no less than the best so far ends the search.
//
// Sums are triples of work, tokens and spans, compared in this order. Since addition keeps that order, the parts of a best whole are
// best parts, ties included; levels, a maximum, are compared last and keep it too.

// sum is what a part of a layout contributes.
type sum struct {
	work     int64
	packed   int
	segments int32
	height   int32 // levels below the nearest shared ancestor
}

func (a *sum) add(b *sum) {
	a.work += b.work
	a.packed += b.packed
	a.segments += b.segments
	a.height = max(a.height, b.height)
}

func (a *sum) less(b *sum) bool {
	if a.work != b.work {
		return a.work < b.work
	}
	if a.packed != b.packed {
		return a.packed < b.packed
	}
	if a.segments != b.segments {
		return a.segments < b.segments
	}
	return a.height < b.height
}

// same says whether two sums are equal, whatever their heights.
func (a *sum) same(b *sum) bool {
	return a.work == b.work && a.packed == b.packed && a.segments == b.segments
}

// maxStates bounds the entries of all tables together: 48 MiB, less than 100 ms here.
const maxStates = 1 << 21

// exact is the tables of one search. The entries of decision i are at[i] + j: j is the depth of the nearest shared ancestor, 0 for none.
type exact struct {
	*prices
	first  []int32 // per decision its first entry
	free   []sum   // without a limit on levels
	levels [][]sum // levels[r-1]: at most r levels
}

// exactly finds the best layout of additive prices: p.divided is not looked at. Among layouts of equal score it is the one whose decisions come first.
// If that takes more than maxStates entries, it is the best of those that were within reach, and proved is false; set is nil if none was.
func exactly(p *prices) (set []uint64, states int, proved bool) {
	if p.states > maxStates {
		return nil, 0, false
	}
	x := &exact{prices: p, first: make([]int32, len(p.end))}
	at := int32(0)
	for i, d := range p.depth {
		x.first[i] = at
		at += d
	}
	x.free = make([]sum, p.states)
	x.fill(x.free, x.free, 0)
	free := x.roots(x.free)
	states = p.states

	// Without a limit the best sum is free, and free.height the fewest levels that attain it. Fewer levels give a larger sum, and pay if they cost
	// so much less.
	best, limit := free, 0
	best.work += p.level[free.height]
	below := x.free // not looked at for one level
	for r := 1; r < int(free.height); r++ {
		bound := free
		bound.work += p.level[r]
		if bound.height = best.height; !bound.less(&best) {
			break
		}
		if states+p.states > maxStates {
			return x.trace(limit, best.height), states, false
		}
		states += p.states
		table := make([]sum, p.states)
		x.fill(table, below, r)
		x.levels, below = append(x.levels, table), table
		found := x.roots(table)
		found.work += p.level[r]
		found.height = int32(r) // no more than that, and what needs fewer was found before
		if found.less(&best) {
			best, limit = found, r
		}
	}
	return x.trace(limit, best.height), states, true
}

// roots is the sum over the decisions that no other is above.
func (x *exact) roots(table []sum) sum {
	s := sum{height: 1}
	for i := int32(0); int(i) < len(x.end); i = x.after[i] {
		s.add(&table[x.first[i]])
	}
	return s
}

// fill fills a table for at most r levels, 0 for no limit; below is the one for a level less.
func (x *exact) fill(table, below []sum, r int) {
	for i := len(x.end) - 1; i >= 0; i-- {
		mine := table[x.first[i]:][:x.depth[i]]
		from := x.parent[i]
		for j := len(mine) - 1; j >= 0; j-- {
			start := 0
			if j > 0 {
				start, from = x.end[from], x.parent[from]
			}
			mine[j] = x.open(i, start)
		}
		shared := x.closed(i)
		for c := int32(i + 1); c < x.after[i]; c = x.after[c] {
			theirs := table[x.first[c]:][:x.depth[c]]
			for j := range mine {
				mine[j].add(&theirs[j])
			}
			if r != 1 {
				shared.add(&below[int(x.first[c])+len(mine)])
			}
		}
		if r == 1 && !x.fits(i, 1) {
			continue
		}
		shared.height++
		from = x.parent[i]
		for j := len(mine) - 1; j >= 0; j-- {
			start := 0
			if j > 0 {
				start, from = x.end[from], x.parent[from]
			}
			s := x.head(i, start)
			s.add(&shared)
			if s.less(&mine[j]) {
				mine[j] = s
			}
		}
	}
}

// fits says whether decision i can be shared with r levels left: with one only if no row goes on beyond it.
func (x *exact) fits(i, r int) bool {
	return r > 1 || x.beyond[i] == 0 && int(x.after[i]) == i+1
}

// sumOf is the sum of charges for f.
func (x *exact) sumOf(f *Features) sum {
	return sum{work: x.work(f), packed: int(f.Tokens), segments: int32(f.Segments)}
}

// open is the own rows of decision i if it is not shared and the nearest shared ancestor ends at from.
func (x *exact) open(i, from int) sum {
	var f Features
	lo, hi := x.at[i], x.at[i+1]
	if lo == hi {
		return sum{}
	}
	x.tails(&f, lo, hi, hi-lo, from)
	s := x.sumOf(&f)
	s.height = 1
	return s
}

// closed is the own rows of decision i if it is shared.
func (x *exact) closed(i int) sum {
	var f Features
	if x.beyond[i] == 0 {
		return sum{}
	}
	x.tails(&f, x.at[i], x.at[i+1], x.beyond[i], x.end[i])
	s := x.sumOf(&f)
	s.height = 1
	return s
}

// head is the span of decision i if it is shared and its nearest shared ancestor ends at from.
func (x *exact) head(i, from int) sum {
	var f Features
	x.span(&f, from, x.end[i])
	f.Decisions = 1
	return x.sumOf(&f)
}

// trace finds, among the layouts that attain the tables' best for at most limit levels (0: without a limit, but with at most so many
// levels), the one whose list of decisions comes first. It goes through the decisions in order and knows, of each, from where it would
// be continued and how many levels are left, and shares what it can while keeping the best: with all before it settled, the list
// that has the smaller number next comes first. (So would a list that ended here, but it has more tokens: whatever is shared saves some.)
func (x *exact) trace(limit int, levels int32) []uint64 {
	n := len(x.end)
	set := make([]uint64, (n+63)/64)
	type state struct {
		from  int
		depth int32 // of the nearest shared ancestor
		left  int32 // levels
	}
	states := make([]state, n)
	table := func(left int32) []sum {
		if limit == 0 {
			return x.free
		}
		return x.levels[left-1]
	}
	for i := int32(0); int(i) < n; i = x.after[i] {
		states[i] = state{left: levels}
	}
	for i := range n {
		s := states[i]
		if x.fits(i, int(s.left)) {
			shared := x.closed(i)
			if s.left > 1 {
				below := table(s.left - 1)
				for c := int32(i + 1); c < x.after[i]; c = x.after[c] {
					shared.add(&below[x.first[c]+x.depth[i]])
				}
			}
			shared.height++
			head := x.head(i, s.from)
			shared.add(&head)
			if shared.same(&table(s.left)[x.first[i]+s.depth]) && (limit > 0 || shared.height <= s.left) {
				flip(set, i)
				s = state{from: x.end[i], depth: x.depth[i], left: s.left - 1}
			}
		}
		for c := int32(i + 1); c < x.after[i]; c = x.after[c] {
			states[c] = s
		}
	}
	return set
}
