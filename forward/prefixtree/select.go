package prefixtree

// Method is how a layout was chosen.
type Method string

// The methods.
const (
	Exact   Method = "exact"   // dynamic programming, or all layouts
	Bounded Method = "bounded" // a search that ends after a number of attempts
	Forced  Method = "anchor"  // the caller named it
)

// Stop says why a search ended.
type Stop string

// The reasons.
const (
	NoDecisions Stop = "no_shareable_decisions"
	OutOfBudget Stop = "refinement_budget_exhausted"
	Complete    Stop = "search_complete"
)

// Options are what a caller may ask of [Select]. The zero value is right for production.
type Options struct {
	// Anchor is the label of a candidate to take whatever it costs; see [Tree.Anchor].
	Anchor string
	// Bounded asks for the bounded search even where an exact one is cheap.
	Bounded bool
	// Budget is the number of attempts of the bounded search beyond the family; 0 means 2000, a negative number none.
	Budget int
	// Beam is the number of layouts that the bounded search varies at a time; 0 means 16.
	Beam int
	// Digest asks for [Stats.Digest].
	Digest bool
}

func (o *Options) budget() int {
	if o.Budget == 0 {
		return defaultBudget
	}
	return max(0, o.Budget)
}

// Stats say what a search did. They depend on its arguments alone, never on time.
type Stats struct {
	Method Method `json:"method"`
	Stop   Stop   `json:"stop"`
	// States is the number of subproblems that an exact search solved.
	States int `json:"states,omitempty"`
	// Budget is the number of attempts that were allowed, Attempts the number made: Scored of them gave new layouts, Repeats known ones.
	Budget   int `json:"budget"`
	Attempts int `json:"attempts"`
	Scored   int `json:"scored"`
	Repeats  int `json:"repeats"`
	// Family is the number of mandatory candidates.
	Family int `json:"family"`
	// Tiers and Orders are the finished decisions of the first part and the finished distances of the second.
	Tiers  int `json:"tiers"`
	Orders int `json:"orders"`
	// Digest is the SHA-256, in lower-case hexadecimal, of a line "3,5:1234" (decisions and work) for each layout scored, in order: equal digests
	// are equal searches.
	Digest string `json:"digest,omitempty"`
}

// Choice is the layout that a search chose.
type Choice struct {
	// Decisions are the segments that it shares, ascending: what [Tree.Layout] takes.
	Decisions []int `json:"decisions"`
	Score     Score `json:"score"`
	// Optimal says that no layout of the tree has less work: it was proved, not only searched for.
	Optimal bool `json:"optimal"`
	// Mandatory says that the bounded search took one of the family; always false for an exact search, which does without it.
	Mandatory bool  `json:"mandatory"`
	Stats     Stats `json:"stats"`
}

// maxExhaustive is the number of decisions up to which all layouts are looked at where dynamic programming cannot: 4096 of them, about as many
// as the bounded search would look at.
const maxExhaustive = 12

// Select chooses the layout of least [Score] under a cost; of equal ones, the one whose decisions come first.
//
// Where nothing is divided by a number of ranks, which is where the model runs on one, the choice is exact, by dynamic programming over
// the tree, in O(sum of the decisions' depths) times the number of levels that pay; so it is for up to 12 decisions otherwise. For the rest it is the bounded
// search of section 4.7 of the reference, helped by the exact optimum of the same cost without rounding: never worse than what the bounded
// search finds, and often known to be optimal.
//
// A label that names nothing gives an [*AnchorError], a cost that cannot be used a [*CostError].
func Select(t *Tree, c *Cost, o Options) (*Choice, error) {
	p, err := pricesOf(shapeOf(t), c)
	if err != nil {
		return nil, err
	}
	n := len(p.end)
	if o.Anchor != "" {
		set, err := familyOf(p).anchor(o.Anchor)
		if err != nil {
			return nil, err
		}
		return p.choice(set, Stats{Method: Forced, Stop: Complete}), nil
	}
	var set []uint64 // of the exact search, proved or not
	states := 0
	if !o.Bounded {
		proved, stop := false, Complete
		switch {
		case n == 0:
			proved, stop = true, NoDecisions
		case len(p.divided) == 0:
			set, states, proved = exactly(p)
		case n <= maxExhaustive:
			set, states, proved = p.exhaust(), 1<<n, true
		}
		if proved {
			choice := p.choice(set, Stats{Method: Exact, Stop: stop, States: states})
			choice.Optimal = true
			return choice, nil
		}
	}
	b := bounded(p, &o)
	choice := p.choice(b.sets.at(int(b.best)), b.stats)
	choice.Mandatory = int(b.best) < b.stats.Family
	choice.Optimal = n < 63 && b.sets.n == 1<<n
	choice.Stats.States = states
	if set != nil {
		p.improve(choice, set)
	}
	if !o.Bounded && len(p.divided) > 0 {
		p.help(choice)
	}
	return choice, nil
}

// choice is the layout of a set.
func (p *prices) choice(set []uint64, s Stats) *Choice {
	score, size := p.eval(set)
	return &Choice{Decisions: p.members(make([]int, 0, size), set), Score: score, Stats: s}
}

// exhaust looks at all sets.
func (p *prices) exhaust() []uint64 {
	best, set := make([]uint64, 1), make([]uint64, 1)
	least, _ := p.eval(best)
	for set[0] = 1; set[0] < 1<<len(p.end); set[0]++ {
		score, _ := p.eval(set)
		if c := score.Compare(least); c < 0 || c == 0 && compareSets(set, best) < 0 {
			least, best[0] = score, set[0]
		}
	}
	return best
}

// improve changes a choice to another set if that is better.
func (p *prices) improve(c *Choice, set []uint64) {
	if other := p.choice(set, c.Stats); other.Score.Compare(c.Score) < 0 {
		*c = *other
	}
}

// help improves a choice by what is best without rounding, which also tells how much better another could be at most.
func (p *prices) help(c *Choice) {
	r, ok := p.relax()
	if !ok {
		return
	}
	set, states, proved := exactly(r.prices)
	c.Stats.States = states
	if set == nil {
		return
	}
	p.improve(c, set)
	if proved {
		relaxed, _ := r.eval(set)
		c.Optimal = c.Optimal || c.Score.Work <= r.atLeast(relaxed.Work)
	}
}
