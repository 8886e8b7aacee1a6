package prefixtree

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"hash"
	"slices"
	"strconv"
)

// Limits of the bounded search (section 4.7 of the reference).
const (
	defaultBudget = 2000
	defaultBeam   = 16
	maxOrder      = 4 // decisions that a neighbour differs in
)

// beam is the bounded search: first the family, then, decision by decision, variants of the best few layouts so far, then the neighbours
// of the best. What it does depends on the tree, the cost and the options alone.
type beam struct {
	scored
	stats Stats
	width int
	best  int32 // number of the best set so far
	set   []uint64
	hash  hash.Hash // nil if no digest is wanted
	line  []byte
	order []int // decisions, deepest first
}

// bounded searches. It returns the searched sets and the number of the best of them.
func bounded(p *prices, o *Options) *beam {
	n := len(p.end)
	f := familyOf(p)
	b := &beam{scored: f.scored, width: o.Beam, set: make([]uint64, f.sets.width)}
	if b.width <= 0 {
		b.width = defaultBeam
	}
	b.stats = Stats{Method: Bounded, Budget: o.budget(), Family: len(f.order), Stop: Complete}
	if o.Digest {
		b.hash = sha256.New()
	}
	b.best = f.order[0]
	for _, x := range f.order {
		b.digest(x)
		b.improve(x)
	}
	if n == 0 {
		b.stats.Stop = NoDecisions
	} else if b.order = b.deepestFirst(); !b.tiers(f.order) || !b.neighbours() {
		b.stats.Stop = OutOfBudget
	}
	if b.hash != nil {
		b.stats.Digest = hex.EncodeToString(b.hash.Sum(nil))
	}
	return b
}

func (b *beam) deepestFirst() []int {
	order := make([]int, len(b.end))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(i, j int) int { return cmp.Compare(b.depth[j], b.depth[i]) })
	return order
}

// spent says whether the budget allows no further attempt. An attempt counts even if its layout is known. Beyond the studied planner: on
// trees so large that the attempts would take more than maxSteps, fewer are made.
func (b *beam) spent() bool {
	return b.stats.Attempts >= b.stats.Budget || b.stats.Attempts > 0 && b.stats.Attempts >= maxSteps/len(b.end)
}

// attempt looks at b.set.
func (b *beam) attempt() (number int32, isNew bool) {
	b.stats.Attempts++
	number, isNew = b.look(b.set)
	if !isNew {
		b.stats.Repeats++
		return number, false
	}
	b.stats.Scored++
	b.digest(number)
	b.improve(number)
	return number, true
}

// improve makes x the best set if it is.
func (b *beam) improve(x int32) {
	c := b.scores[x].Compare(b.scores[b.best])
	if c < 0 || c == 0 && compareSets(b.sets.at(int(x)), b.sets.at(int(b.best))) < 0 {
		b.best = x
	}
}

// tiers varies, for each decision, the sets of the frontier in that decision and in all below it. It returns false if the budget
// ended it.
func (b *beam) tiers(family []int32) bool {
	pool := make([]int32, 0, len(family)+4*b.width)
	frontier := b.frontier(append(pool, family...))
	for _, d := range b.order {
		pool = append(pool[:0], frontier...)
		after := int(b.after[d])
		for _, from := range frontier {
			for variant := range 3 {
				if b.spent() {
					return false
				}
				copy(b.set, b.sets.at(int(from)))
				switch variant {
				case 0:
					flip(b.set, d)
				case 1:
					fill(b.set, d, after, true)
				case 2:
					fill(b.set, d, after, false)
				}
				// Known layouts do not come back: they are in the frontier or were worse than it.
				if x, isNew := b.attempt(); isNew {
					pool = append(pool, x)
				}
			}
		}
		frontier = append(frontier[:0], b.frontier(pool)...)
		b.stats.Tiers++
	}
	return true
}

// frontier sorts a pool and keeps, at its beginning, the first few sets that no other beats in everything.
func (b *beam) frontier(pool []int32) []int32 {
	slices.SortFunc(pool, func(i, j int32) int {
		return cmp.Or(b.scores[i].Compare(b.scores[j]), cmp.Compare(b.sizes[i], b.sizes[j]), compareSets(b.sets.at(int(i)), b.sets.at(int(j))))
	})
	kept := pool[:0]
	for _, x := range pool {
		if len(kept) == b.width {
			break
		}
		if !slices.ContainsFunc(kept, func(k int32) bool { return b.dominates(k, x) }) {
			kept = append(kept, x)
		}
	}
	return kept
}

// dominates says whether set i is nowhere worse than set j and somewhere better.
func (b *beam) dominates(i, j int32) bool {
	s, t := &b.scores[i], &b.scores[j]
	return s.Work <= t.Work && s.Packed <= t.Packed && s.Segments <= t.Segments && s.Depth <= t.Depth && b.sizes[i] <= b.sizes[j] &&
		(*s != *t || b.sizes[i] != b.sizes[j])
}

// neighbours looks at what differs from the best set in one decision, then from the best then in two, and so on. It returns false if the
// budget ended it.
func (b *beam) neighbours() bool {
	var chosen [maxOrder]int // places in b.order, ascending
	n := len(b.order)
	for order := 1; order <= min(maxOrder, n); order++ {
		c := chosen[:order]
		for i := range c {
			c[i] = i
		}
		copy(b.set, b.sets.at(int(b.best)))
		flipAll := func() {
			for _, i := range c {
				flip(b.set, b.order[i])
			}
		}
		for more := true; more; {
			if b.spent() {
				return false
			}
			flipAll()
			b.attempt()
			flipAll()
			// The next combination: advance the last place that can go on, and put the ones behind it next to it.
			i := order - 1
			for i >= 0 && c[i] == n-order+i {
				i--
			}
			if more = i >= 0; more {
				c[i]++
				for i++; i < order; i++ {
					c[i] = c[i-1] + 1
				}
			}
		}
		b.stats.Orders++
	}
	return true
}

// digest hashes a scored set.
func (b *beam) digest(x int32) {
	if b.hash == nil {
		return
	}
	line := b.line[:0]
	for i := range b.end {
		if has(b.sets.at(int(x)), i) {
			if len(line) > 0 {
				line = append(line, ',')
			}
			line = strconv.AppendInt(line, int64(b.segments[i]), 10)
		}
	}
	line = strconv.AppendInt(append(line, ':'), b.scores[x].Work, 10)
	b.line = append(line, '\n')
	b.hash.Write(b.line)
}
