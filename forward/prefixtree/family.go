package prefixtree

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// Candidate is a layout that the search always looks at, and why.
type Candidate struct {
	// Labels are the names under which [Tree.Anchor] knows it.
	Labels []string `json:"labels"`
	// Decisions are the segments that it shares, ascending.
	Decisions []int `json:"decisions"`
	// Packed, Segments and Depth are the tokens, spans and levels of the layout.
	Packed   int `json:"packed"`
	Segments int `json:"segments"`
	Depth    int `json:"depth"`
	// Thresholds are the smallest effective spans that select this layout.
	Thresholds []int `json:"thresholds"`
}

// Family lists the mandatory candidates in the order of their decisions (section 4.4 of the reference): no sharing; sharing down to each depth; for each
// length at which the outcome changes, sharing what would be a span of at least that length; full sharing; and of all these
// the simplest that save 90, 95 and 99 percent of the tokens that can be saved. Layouts that come about in several ways are listed once.
//
// Trees for which that would be more than about 16 million steps, for which the studied planner would need minutes, get an
// evenly thinned selection of depths and of lengths.
func (t *Tree) Family() []Candidate {
	p, err := pricesOf(shapeOf(t), new(Cost))
	if err != nil {
		panic(err) // a cost without terms has nothing that could be wrong
	}
	f := familyOf(p)
	list := make([]Candidate, len(f.order))
	for i, number := range f.order {
		set := f.sets.at(int(number))
		score := f.scores[number]
		list[i] = Candidate{
			Decisions: p.members([]int{}, set), Packed: score.Packed, Segments: score.Segments, Depth: score.Depth,
			Thresholds: []int{},
		}
	}
	place := make([]int, len(f.order))
	for i, number := range f.order {
		place[number] = i
	}
	for _, l := range f.labels {
		c := &list[place[l.set]]
		c.Labels = append(c.Labels, l.kind.label(l.of))
		if l.kind == minimumSpan {
			c.Thresholds = append(c.Thresholds, l.of)
		}
	}
	return list
}

// AnchorError is what [Tree.Anchor] returns for a label that names no candidate of the tree.
type AnchorError struct {
	Label string
	Known []string // the labels of the tree's candidates
}

// maxKnown is how many labels an error's text lists.
const maxKnown = 32

// Error lists the labels that there are.
func (e *AnchorError) Error() string {
	known := strings.Join(e.Known[:min(len(e.Known), maxKnown)], ", ")
	if more := len(e.Known) - maxKnown; more > 0 {
		known += fmt.Sprintf(" and %d more", more)
	}
	return fmt.Sprintf("prefixtree: anchor: no layout %q; hint: this tree has %s", e.Label, known)
}

// Anchor is the decisions of the candidate with a label, ascending. A label that none has gives an [*AnchorError].
func (t *Tree) Anchor(label string) ([]int, error) {
	p, err := pricesOf(shapeOf(t), new(Cost))
	if err != nil {
		return nil, err
	}
	set, err := familyOf(p).anchor(label)
	if err != nil {
		return nil, err
	}
	return p.members([]int{}, set), nil
}

// anchor is the set with a label.
func (f *family) anchor(name string) ([]uint64, error) {
	known := make([]string, len(f.labels))
	for i, l := range f.labels {
		if known[i] = l.kind.label(l.of); known[i] == name {
			return f.sets.at(int(l.set)), nil
		}
	}
	return nil, &AnchorError{Label: name, Known: known}
}

// kind is a way to come to a candidate; some have a number.
type kind uint8

const (
	noSharing kind = iota
	depthOne
	uniformDepth // the depth
	minimumSpan  // the length
	fullSharing
	savingsPlateau // the percentage
)

func (k kind) label(of int) string {
	switch k {
	case noSharing:
		return "no_sharing"
	case depthOne:
		return "depth_one"
	case uniformDepth:
		return "uniform_depth_" + strconv.Itoa(of)
	case minimumSpan:
		return "minimum_effective_span_" + strconv.Itoa(of)
	case fullSharing:
		return "full_sharing"
	default:
		return "savings_plateau_" + strconv.Itoa(of)
	}
}

// scored is the sets that have been looked at, by number, with their scores and sizes.
type scored struct {
	*prices
	sets   *sets
	scores []Score
	sizes  []int32
}

// look gives a set's number and scores it if it is new.
func (s *scored) look(set []uint64) (number int32, isNew bool) {
	i, isNew := s.sets.add(set)
	if isNew {
		score, size := s.eval(set)
		s.scores, s.sizes = append(s.scores, score), append(s.sizes, int32(size))
	}
	return int32(i), isNew
}

// family is the mandatory candidates of a shape.
type family struct {
	scored
	labels []label // in the order in which they are given
	order  []int32 // the sets by their decisions
}

type label struct {
	kind kind
	of   int
	set  int32
}

// maxSteps bounds the decisions that are walked to make a family, and those that a bounded search walks: about 50 ms here.
const maxSteps = 1 << 24

func familyOf(p *prices) *family {
	n := len(p.end)
	most := max(4, maxSteps/2/max(1, n)) // depths, and lengths
	lengths := p.breakpoints()
	levels := 1
	for _, d := range p.depth {
		levels = max(levels, int(d))
	}
	expected := min(most, len(lengths)) + min(most, levels) + 1
	f := &family{scored: scored{prices: p, sets: newSets(n, min(expected, 4096))}, labels: make([]label, 0, expected+8)}
	set := make([]uint64, f.sets.width)
	add := func(k kind, of int) {
		number, _ := f.look(set)
		f.labels = append(f.labels, label{kind: k, of: of, set: number})
	}

	add(noSharing, 0)
	add(uniformDepth, 0)
	for i := range thinned(levels, most) {
		level := int32(i + 1)
		clear(set)
		for j, d := range p.depth {
			if d <= level {
				flip(set, j)
			}
		}
		if level == 1 {
			add(depthOne, 0)
		}
		add(uniformDepth, int(level))
	}
	for i := range thinned(len(lengths), most) {
		p.effective(set, lengths[i])
		add(minimumSpan, lengths[i])
	}
	fill(set, 0, n, true)
	add(fullSharing, 0)
	f.plateaus()

	f.order = make([]int32, f.sets.n)
	for i := range f.order {
		f.order[i] = int32(i)
	}
	slices.SortFunc(f.order, func(a, b int32) int { return compareSets(f.sets.at(int(a)), f.sets.at(int(b))) })
	return f
}

// thinned yields all numbers below n, or at most of them, the first and the last among them.
func thinned(n, most int) func(yield func(int) bool) {
	return func(yield func(int) bool) {
		steps := min(n, most)
		for k := range steps {
			i := k
			if steps < n {
				i = int(int64(k) * int64(n-1) / int64(steps-1))
			}
			if !yield(i) {
				return
			}
		}
	}
}

// breakpoints are the lengths at which the outcome of effective may change, ascending: one more than each length that a shared
// span can have. On trees with too many pairs of decisions for that, the lengths of spans that continue the next decision
// or none.
func (p *prices) breakpoints() []int {
	all := p.states <= maxSteps/16
	list := make([]int, 0, 1+min(p.states, 2*len(p.end)))
	list = append(list, 1)
	for i, end := range p.end {
		list = append(list, end+1)
		for up := p.parent[i]; up >= 0; up = p.parent[up] {
			list = append(list, end-p.end[up]+1)
			if !all {
				break
			}
		}
	}
	slices.Sort(list)
	return slices.Compact(list)
}

// effective makes the set of the decisions that are shared when, from the outside in, each is whose span would have at least so many tokens.
func (p *prices) effective(set []uint64, length int) {
	clear(set)
	for i, end := range p.end {
		from := 0
		if up := p.parent[i]; up >= 0 {
			from = p.from[up]
		}
		if end-from >= length {
			flip(set, i)
			from = end
		}
		p.from[i] = from
	}
}

// plateaus labels the candidates with the fewest decisions among those that save enough.
func (f *family) plateaus() {
	most, least := f.scores[0].Packed, math.MaxInt // the first set shares nothing
	for i := range f.scores {
		least = min(least, f.scores[i].Packed)
	}
	for _, percent := range []int{90, 95, 99} {
		best := -1
		for i := range f.scores {
			// saved*100 >= most saved*percent, without products that could overflow
			saved, goal := most-f.scores[i].Packed, most-least
			if saved < goal-goal/100*(100-percent)-goal%100*(100-percent)/100 {
				continue
			}
			if best < 0 || f.simpler(i, best) {
				best = i
			}
		}
		f.labels = append(f.labels, label{kind: savingsPlateau, of: percent, set: int32(best)})
	}
}

// simpler orders candidates for a plateau: by decisions, levels, spans, tokens, and then by what they share.
func (f *family) simpler(i, j int) bool {
	a, b := &f.scores[i], &f.scores[j]
	switch {
	case f.sizes[i] != f.sizes[j]:
		return f.sizes[i] < f.sizes[j]
	case a.Depth != b.Depth:
		return a.Depth < b.Depth
	case a.Segments != b.Segments:
		return a.Segments < b.Segments
	case a.Packed != b.Packed:
		return a.Packed < b.Packed
	}
	return compareSets(f.sets.at(i), f.sets.at(j)) < 0
}
