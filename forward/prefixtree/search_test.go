package prefixtree

import (
	"encoding/json"
	"errors"
	"math"
	"math/big"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var everyFeature = []Feature{Tokens, Pairs, Segments, Short, Decisions, Levels, FirstLevel, FurtherLevels}

// randomCost draws charges that are of similar weight on trees with rows of some tokens, some of them divided.
func randomCost(rng *rand.Rand, tokens int, divided bool) Cost {
	c := Cost{Name: "random", ShortBelow: rng.IntN(tokens + 2)}
	for range 1 + rng.IntN(7) {
		t := Term{Feature: everyFeature[rng.IntN(len(everyFeature))], Coefficient: rng.Int64N(20), Times: 1 + rng.Int64N(3), Divisor: 1}
		switch t.Feature {
		case Segments, Short, Decisions:
			t.Times *= int64(1 + tokens/2)
		case Levels, FirstLevel, FurtherLevels:
			t.Times *= int64(1 + tokens)
		}
		if divided && rng.IntN(2) == 0 {
			t.Divisor, t.Up = 1+rng.Int64N(8), rng.IntN(2) == 0
		}
		c.Terms = append(c.Terms, t)
	}
	return c
}

func randomFormula(rng *rand.Rand) Cost {
	f := Facts{Layers: 1 + rng.IntN(40), ContextParallel: 1, TensorParallel: 1}
	if rng.IntN(2) == 0 {
		f.Recurrent = rng.IntN(f.Layers + 1)
	}
	if rng.IntN(3) == 0 {
		f.ContextParallel, f.TensorParallel = 1+rng.IntN(8), 1+rng.IntN(4)
	}
	if rng.IntN(2) == 0 {
		return Version1(f)
	}
	n := func() int64 { return rng.Int64N(1<<rng.IntN(20) + 1) }
	return Version2("random version 2", Version2Coefficients{n(), n(), n(), n(), n(), n(), n(), n(), n(), n()}, f)
}

// cheapest scores the layouts of all sets of decisions by the book: every layout is made.
func cheapest(t *testing.T, tree *Tree, c *Cost) (Score, []int) {
	t.Helper()
	var best Score
	var which []int
	for mask := range 1 << len(tree.Decisions) {
		decisions := []int{}
		for i, d := range tree.Decisions {
			if mask>>i&1 != 0 {
				decisions = append(decisions, d)
			}
		}
		s, err := c.Score(mustLayout(t, tree, decisions))
		if err != nil {
			t.Fatal(err)
		}
		if x := s.Compare(best); mask == 0 || x < 0 || x == 0 && slices.Compare(decisions, which) < 0 {
			best, which = s, decisions
		}
	}
	return best, which
}

func TestSelectEqualsTheExhaustiveOptimum(t *testing.T) {
	multi, deep, equal := 0, 0, 0
	eachRandomRows(t, 21, 3000, 16, func(t *testing.T, rng *rand.Rand, rows [][]int32) {
		tree := mustBuild(t, rows)
		n := len(tree.Decisions)
		if n > 14 || n > 9 && rng.IntN(10) != 0 {
			return
		}
		c := randomCost(rng, tree.Logical/len(rows), rng.IntN(3) == 0)
		if rng.IntN(3) == 0 {
			c = randomFormula(rng)
		}
		best, which := cheapest(t, tree, &c)
		got := mustSelect(t, tree, &c, Options{})
		p, err := pricesOf(shapeOf(tree), &c)
		if err != nil {
			t.Fatal(err)
		}
		if got.Stats.Method == Exact {
			if !got.Optimal || got.Score != best || !slices.Equal(got.Decisions, which) {
				t.Errorf("under %v: got %+v, the best is %v at %+v", c, got, which, best)
			}
		} else if got.Score.Compare(best) < 0 || got.Optimal && got.Score.Work != best.Work {
			t.Errorf("under %v: got %+v, the best is %v at %+v", c, got, which, best)
		}
		searched := mustSelect(t, tree, &c, Options{Bounded: true})
		if searched.Score.Compare(got.Score) < 0 || searched.Optimal && searched.Score.Work != best.Work {
			t.Errorf("under %v: got %+v, but the bounded search %+v", c, got, searched)
		}
		for _, m := range tree.Family() {
			if s, err := c.Score(mustLayout(t, tree, m.Decisions)); err != nil || s.Compare(searched.Score) < 0 {
				t.Errorf("under %v: the bounded search got %+v, but %v has %+v, %v", c, searched, m.Labels, s, err)
			}
		}
		// The search without rounding bounds the true work from below.
		if r, ok := p.relax(); ok && n > 0 {
			set, _, ok := exactly(r.prices)
			if relaxed, _ := r.eval(set); !ok || r.atLeast(relaxed.Work) > best.Work {
				t.Errorf("under %v: no layout can have less than %d, but %v has %d", c, r.atLeast(relaxed.Work), which, best.Work)
			}
		}
		if len(which) > 1 {
			multi++
		}
		if best.Depth > 2 && len(p.divided) == 0 {
			deep++
		}
		if searched.Score == best {
			equal++
		}
	})
	if multi < 300 || deep < 100 {
		t.Errorf("too few cases of interest: %d winners with several decisions, %d with several levels", multi, deep)
	}
	t.Logf("%d winners with several decisions, %d with several levels; the bounded search found %d", multi, deep, equal)
}

// Levels that cost make the exact search go through its tables by levels; here it often ends there.
func TestExactSearchUnderLimitsOfLevels(t *testing.T) {
	limited := 0
	eachRandomRows(t, 22, 2000, 14, func(t *testing.T, rng *rand.Rand, rows [][]int32) {
		tree := mustBuild(t, rows)
		if n := len(tree.Decisions); n == 0 || n > 10 {
			return
		}
		c := Cost{Name: "levels", Terms: []Term{
			{Feature: Tokens, Coefficient: 1 + rng.Int64N(3), Times: 1, Divisor: 1},
			{Feature: Segments, Coefficient: rng.Int64N(3), Times: 1, Divisor: 1},
			{Feature: Levels, Coefficient: rng.Int64N(int64(tree.Logical)), Times: 1, Divisor: 1 + rng.Int64N(3)},
		}}
		best, which := cheapest(t, tree, &c)
		got := mustSelect(t, tree, &c, Options{})
		if got.Score != best || !slices.Equal(got.Decisions, which) || !got.Optimal || got.Stats.Method != Exact {
			t.Errorf("under %v: got %+v, the best is %v at %+v", c, got, which, best)
		}
		if full := tree.FullSharing(); best.Depth > 1 && best.Depth < full.Depth {
			limited++
		}
	})
	if limited < 50 {
		t.Errorf("only %d winners are between one level and all", limited)
	}
}

// Prices of a few units on rows of a few tokens make ties possible: they go to fewer levels, then to the first list of decisions.
func TestTiesGoToFewerLevelsThenToTheFirstDecisions(t *testing.T) {
	levels, lists, masks := 0, 0, 0
	rng := rand.New(rand.NewPCG(30, 0))
	for range 60_000 {
		tree := mustBuild(t, randomRows(rng, 3+rng.IntN(12), 2+rng.IntN(2), 1+rng.IntN(2)))
		n := len(tree.Decisions)
		if n < 3 || n > 7 {
			continue
		}
		c := Cost{Name: "ties"}
		c.charge(Tokens, 1+rng.Int64N(3), 1, 1+rng.Int64N(2))
		c.charge(Segments, rng.Int64N(2), 1, 1)
		c.charge(Decisions, rng.Int64N(7), 1, 1)
		c.charge(Levels, rng.Int64N(2)*rng.Int64N(20), 1, 1)
		p, err := pricesOf(shapeOf(tree), &c)
		if err != nil {
			t.Fatal(err)
		}
		score := func(mask int) Score { s, _ := p.eval([]uint64{uint64(mask)}); return s }
		list := func(mask int) []int { return p.members([]int{}, []uint64{uint64(mask)}) }
		best := 0
		for mask := range 1 << n {
			if x := score(mask).Compare(score(best)); x < 0 || x == 0 && slices.Compare(list(mask), list(best)) < 0 {
				best = mask
			}
		}
		for mask := range 1 << n {
			s := score(mask)
			switch depth := s.Depth; {
			case mask == best:
			case s == score(best) && mask < best:
				masks++
			case s == score(best):
				lists++
			default:
				if s.Depth = score(best).Depth; s == score(best) && depth > s.Depth {
					levels++
				}
			}
		}
		if got := mustSelect(t, tree, &c, Options{}); got.Score != score(best) || !slices.Equal(got.Decisions, list(best)) {
			t.Fatalf("%v under %v: got %+v, the best is %v at %+v", tree, c, got, list(best), score(best))
		}
	}
	t.Logf("ties broken by levels: %d; by decisions: %d, and %d against the order of bit patterns", levels, lists, masks)
	if levels < 20 || lists < 100 || masks < 1 {
		t.Error("too few ties")
	}
}

func TestScoresOfSetsAreThoseOfTheirLayouts(t *testing.T) {
	eachRandomRows(t, 23, 1000, 200, func(t *testing.T, rng *rand.Rand, rows [][]int32) {
		tree := mustBuild(t, rows)
		c := randomCost(rng, tree.Logical/len(rows), true)
		p, err := pricesOf(shapeOf(tree), &c)
		if err != nil {
			t.Fatal(err)
		}
		for range 8 {
			decisions := randomDecisions(rng, tree)
			slices.Sort(decisions)
			set := make([]uint64, (len(tree.Decisions)+63)/64)
			for _, d := range decisions {
				i, _ := slices.BinarySearch(tree.Decisions, d)
				flip(set, i)
			}
			want, err := c.Score(mustLayout(t, tree, decisions))
			if got, n := p.eval(set); err != nil || got != want || n != len(decisions) {
				t.Errorf("%v under %v: got %+v, %d, want %+v, %d, %v", decisions, c, got, n, want, len(decisions), err)
			}
			if got := p.members([]int{}, set); !slices.Equal(got, decisions) {
				t.Errorf("members %v, want %v", got, decisions)
			}
		}
	})
}

func TestSelectIsAFunctionOfItsArguments(t *testing.T) {
	eachRandomRows(t, 24, 200, 60, func(t *testing.T, rng *rand.Rand, rows [][]int32) {
		c := randomFormula(rng)
		for _, o := range []Options{{}, {Digest: true, Bounded: true}, {Anchor: "full_sharing"}} {
			before := c.String()
			a, errA := json.Marshal(mustSelect(t, mustBuild(t, rows), &c, o))
			copied := make([][]int32, len(rows))
			for r := range rows {
				copied[r] = slices.Clone(rows[r])
			}
			b, errB := json.Marshal(mustSelect(t, mustBuild(t, copied), &c, o))
			if errA != nil || errB != nil || string(a) != string(b) || c.String() != before {
				t.Errorf("%s, %v, then %s, %v", a, errA, b, errB)
			}
		}
	})
}

// Taking a row away from a layout can only take features away, short spans excepted: a tail may become one.
func TestLeastWorkNeverFallsWhenARowIsAdded(t *testing.T) {
	eachRandomRows(t, 25, 600, 40, func(t *testing.T, rng *rand.Rand, rows [][]int32) {
		c := randomCost(rng, 1+len(rows[0]), rng.IntN(3) == 0)
		c.Terms = slices.DeleteFunc(c.Terms, func(t Term) bool { return t.Feature == Short })
		before := int64(0)
		for n := range rows {
			got := mustSelect(t, mustBuild(t, rows[:n+1]), &c, Options{})
			if !got.Optimal {
				return
			}
			if got.Score.Work < before {
				t.Errorf("under %v: %d rows cost %d, one less %d", c, n+1, got.Score.Work, before)
			}
			before = got.Score.Work
		}
	})
}

func TestBudgetAndBeamBoundTheSearch(t *testing.T) {
	rng := rand.New(rand.NewPCG(26, 0))
	tree := mustBuild(t, randomRows(rng, 200, 3, 3))
	c := Version1(Facts{Layers: 2, Recurrent: 1, ContextParallel: 2})
	last := Score{Work: math.MaxInt64}
	for _, budget := range []int{-1, 1, 10, 100, 1000, 5000} {
		got := mustSelect(t, tree, &c, Options{Bounded: true, Budget: budget})
		s := got.Stats
		if s.Budget != max(0, budget) || s.Attempts != s.Budget || s.Attempts != s.Scored+s.Repeats || s.Stop != OutOfBudget || got.Optimal {
			t.Errorf("budget %d: %+v", budget, got)
		}
		if got.Score.Compare(last) > 0 {
			t.Errorf("budget %d: got %+v, with less %+v", budget, got.Score, last)
		}
		last = got.Score
	}
	one := mustSelect(t, tree, &c, Options{Bounded: true, Beam: 1}).Stats
	if one.Tiers < len(tree.Decisions) && one.Attempts != 3*one.Tiers+one.Attempts%3 {
		t.Errorf("a beam of one makes three attempts a tier: %+v", one)
	}
}

// Where ranks share the tokens the exact search cannot round as they do, but it helps, and often proves.
func TestSelectWithRanksIsNeverDearerThanTheBoundedSearch(t *testing.T) {
	better, proved, many := 0, 0, 0
	eachRandomRows(t, 27, 200, 120, func(t *testing.T, rng *rand.Rand, rows [][]int32) {
		tree := mustBuild(t, rows)
		c := Version1(Facts{Layers: 1 + rng.IntN(3), Recurrent: rng.IntN(2), ContextParallel: 2 + 2*rng.IntN(2)})
		o := Options{Budget: 200}
		ours := mustSelect(t, tree, &c, o)
		o.Bounded = true
		theirs := mustSelect(t, tree, &c, o)
		if ours.Score.Compare(theirs.Score) > 0 {
			t.Errorf("ours %+v, theirs %+v", ours, theirs)
		}
		if len(tree.Decisions) <= maxExhaustive {
			return
		}
		many++
		if ours.Score.Work < theirs.Score.Work {
			better++
		}
		if ours.Optimal {
			proved++
		}
	})
	t.Logf("of %d trees with many decisions: %d better than the bounded search, %d proved", many, better, proved)
}

func TestAnchorForcesALayout(t *testing.T) {
	tree := mustBuild(t, [][]int32{{1, 2, 3, 4}, {1, 2, 5}, {9}, {1, 2, 3, 4}})
	c := Version1(Facts{Layers: 4})
	for label, want := range map[string][]int{"no_sharing": {}, "uniform_depth_0": {}, "depth_one": {0}, "full_sharing": {0, 1}} {
		got := mustSelect(t, tree, &c, Options{Anchor: label})
		score, err := c.Score(mustLayout(t, tree, want))
		if err != nil || !slices.Equal(got.Decisions, want) || got.Score != score || got.Stats.Method != Forced || got.Optimal {
			t.Errorf("%s: got %+v, want %v at %+v, %v", label, got, want, score, err)
		}
	}
	_, err := Select(tree, &c, Options{Anchor: "depth_two"})
	var anchor *AnchorError
	if !errors.As(err, &anchor) || anchor.Label != "depth_two" {
		t.Fatalf("got %v", err)
	}
	for _, part := range []string{`"depth_two"`, "no_sharing", "full_sharing", "savings_plateau_99"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%q does not name %s", err, part)
		}
	}
	if _, again := tree.Anchor("depth_two"); again == nil || again.Error() != err.Error() {
		t.Errorf("got %v, want %v", again, err)
	}
}

func TestTreesTooLargeForTheTablesAreSearchedInBoundedTime(t *testing.T) {
	for _, n := range []int{3_000, 50_000} {
		tree := mustBuild(t, chain(n))
		c := Version1(Facts{Layers: 1})
		got := mustSelect(t, tree, &c, Options{})
		score, err := c.Score(mustLayout(t, tree, got.Decisions))
		if err != nil || score != got.Score || got.Stats.Method != Bounded || got.Optimal {
			t.Errorf("chain of %d: %+v, %v", n, got.Stats, err)
		}
		if steps := (got.Stats.Attempts + got.Stats.Family) * n; steps > 4*maxSteps {
			t.Errorf("chain of %d: %d attempts and %d candidates", n, got.Stats.Attempts, got.Stats.Family)
		}
		full, err := tree.Anchor("full_sharing")
		if err != nil || len(full) != len(tree.Decisions) {
			t.Errorf("chain of %d: full sharing takes %d decisions, %v", n, len(full), err)
		}
	}
}

// Where the tables by levels grow too large, what they have shown by then still counts.
func TestUnfinishedExactSearchHelpsTheBoundedOne(t *testing.T) {
	rng := rand.New(rand.NewPCG(31, 0))
	buffer := make([]int32, 700*50)
	rows := make([][]int32, 700)
	for i, n := 0, 0; i < len(rows); i++ {
		n += 1 + rng.IntN(50)
		rows[i] = buffer[:n]
	}
	tree := mustBuild(t, rows)
	c := Cost{Name: "few levels"}
	c.charge(Tokens, 1, 1, 1)
	c.charge(Levels, 200_000, 1, 1)
	o := Options{Budget: 50}
	ours := mustSelect(t, tree, &c, o)
	o.Bounded = true
	theirs := mustSelect(t, tree, &c, o)
	if ours.Optimal || ours.Stats.States == 0 || ours.Stats.States > maxStates || ours.Score.Compare(theirs.Score) >= 0 {
		t.Errorf("ours %+v, theirs %+v", ours.Score, theirs.Score)
	}
	if score, err := c.Score(mustLayout(t, tree, ours.Decisions)); err != nil || score != ours.Score {
		t.Errorf("got %+v, its layout has %+v, %v", ours.Score, score, err)
	}
}

func TestSetsAreOrderedAsTheirLists(t *testing.T) {
	rng := rand.New(rand.NewPCG(28, 0))
	s := &shape{segments: make([]int, 192)}
	for i := range s.segments {
		s.segments[i] = i
	}
	draw := func() []uint64 {
		set := make([]uint64, 3)
		for range rng.IntN(4) {
			flip(set, rng.IntN(192))
		}
		return set
	}
	for range 20_000 {
		a, b := draw(), draw()
		if rng.IntN(2) == 0 {
			copy(b, a)
			lo := rng.IntN(192)
			fill(b, lo, lo+rng.IntN(193-lo), rng.IntN(2) == 0)
		}
		la, lb := s.members(nil, a), s.members(nil, b)
		if got, want := compareSets(a, b), slices.Compare(la, lb); got != want {
			t.Fatalf("%v and %v: got %d, want %d", la, lb, got, want)
		}
	}
	for lo := range 192 {
		for hi := lo; hi <= 192; hi++ {
			set := make([]uint64, 3)
			fill(set, lo, hi, true)
			if got := s.members(nil, set); len(got) != hi-lo || hi > lo && (got[0] != lo || got[len(got)-1] != hi-1) {
				t.Fatalf("fill from %d to %d: %v", lo, hi, got)
			}
			fill(set, lo, hi, false)
			if !slices.Equal(set, make([]uint64, 3)) {
				t.Fatalf("clearing from %d to %d: %v", lo, hi, set)
			}
		}
	}
}

func TestWorkIsExactOrRefused(t *testing.T) {
	rng := rand.New(rand.NewPCG(29, 0))
	draw := func() int64 { return rng.Int64() >> rng.IntN(63) }
	fits := 0
	for range 50_000 {
		f := Features{draw(), draw(), draw(), draw(), draw(), draw()}
		c := Cost{Name: "random"}
		want := new(big.Int)
		for range 1 + rng.IntN(3) {
			term := Term{Feature: everyFeature[rng.IntN(len(everyFeature))], Coefficient: draw(), Up: rng.IntN(2) == 0}
			term.Times, term.Divisor = 1+draw()/2, 1+draw()/2
			c.Terms = append(c.Terms, term)
			n, _ := f.of(term.Feature)
			units := new(big.Int).Mul(big.NewInt(n), big.NewInt(term.Times))
			if term.Up {
				units.Add(units, big.NewInt(term.Divisor-1))
			}
			units.Div(units, big.NewInt(term.Divisor))
			want.Add(want, units.Mul(units, big.NewInt(term.Coefficient)))
		}
		got, err := c.Work(f)
		if err == nil {
			fits++
			if want.Cmp(big.NewInt(got)) != 0 {
				t.Fatalf("%v of %+v: got %d, want %v", c, f, got, want)
			}
		} else if e := new(CostError); !errors.As(err, &e) || e.Term < 0 {
			t.Fatalf("%v of %+v: %v", c, f, err)
		}
	}
	if fits < 1000 {
		t.Errorf("only %d fit", fits)
	}
}

func TestCostsThatCannotBeUsedAreRefused(t *testing.T) {
	tree := mustBuild(t, grpo(2, 2, 5, 5, 5))
	for name, c := range map[string]Cost{
		"no feature":           {Terms: []Term{{Feature: "tokenz", Coefficient: 1, Times: 1, Divisor: 1}}},
		"negative coefficient": {Terms: []Term{{Feature: Tokens, Coefficient: -1, Times: 1, Divisor: 1}}},
		"no units":             {Terms: []Term{{Feature: Tokens, Coefficient: 1, Divisor: 1}}},
		"no ranks":             {Terms: []Term{{Feature: Tokens, Coefficient: 1, Times: 1}}},
		"too dear":             {Terms: []Term{{Feature: Tokens, Coefficient: math.MaxInt64 / 2, Times: 1, Divisor: 1}}},
		"too dear together": {Terms: []Term{
			{Feature: Tokens, Coefficient: math.MaxInt64 / 64, Times: 1, Divisor: 1},
			{Feature: Segments, Coefficient: math.MaxInt64 / 10, Times: 1, Divisor: 1},
		}},
		"more recurrent layers": Version2("v2", Version2Coefficients{AttentionTokenCPExchange: 1}, Facts{Layers: 1, Recurrent: 2, ContextParallel: 2}),
		"layers without end":    Version1(Facts{Layers: math.MaxInt}),
	} {
		if got, err := Select(tree, &c, Options{}); err == nil || got != nil || !errors.As(err, new(*CostError)) {
			t.Errorf("%s: got %+v, %v", name, got, err)
		}
	}
	if _, err := new(Cost).Work(Features{Tokens: -1}); err != nil {
		t.Errorf("a cost that charges for nothing: %v", err)
	}
	c := Version1(Facts{Layers: 1})
	if _, err := c.Work(Features{Tokens: -1}); !errors.As(err, new(*CostError)) {
		t.Errorf("a negative number of tokens: %v", err)
	}
	// The largest that fits.
	c = Cost{Terms: []Term{{Feature: Tokens, Coefficient: math.MaxInt64 / 60, Times: 1, Divisor: 1}}}
	if got, err := Select(tree, &c, Options{}); err != nil || got.Score.Work != int64(tree.FullSharing().Packed)*(math.MaxInt64/60) {
		t.Errorf("got %+v, %v", got, err)
	}
}

// The worked numbers of section 4.6 of the reference.
func TestWorkedPricesOfTheReference(t *testing.T) {
	features := func(packed, segments, decisions, depth int64) Features {
		return Features{Tokens: packed, Segments: segments, Decisions: decisions, Depth: depth}
	}
	old := Version2Coefficients{2002, 39, 221, 594, 27, 219288, 187255, 684798, 3336555, 1194872}
	win := func(cp int) Facts { return Facts{Layers: 2, Recurrent: 2, ContextParallel: cp} }
	for _, c := range []struct {
		cost Cost
		f    Features
		want int64
	}{
		{Version1(Facts{Layers: 4}), features(82, 2, 0, 1), 608_512},
		{Version1(Facts{Layers: 4}), features(42, 3, 1, 2), 668_928},
		{Version1(Facts{Layers: 4}), features(123, 3, 0, 1), 912_768},
		{Version1(Facts{Layers: 4}), features(43, 4, 1, 2), 804_224},
		{Version1(win(4)), features(26_624, 19, 3, 3), 63_062_016},
		{Version1(win(4)), features(28_672, 18, 2, 2), 66_420_736},
		{Version1(win(4)), features(141_312, 17, 1, 2), 302_989_312},
		{Version1(win(4)), features(172_032, 16, 0, 1), 365_625_344},
		{Version1(win(1)), features(16*4008, 16, 0, 1), 141_639_680},
		{Version1(win(1)), features(8+16*4000, 17, 1, 2), 143_180_800},
		{Version2("old", old, win(4)), features(28_672, 18, 2, 2), 47_810_772_992},
		{Version2("old", old, win(4)), features(26_624, 19, 3, 3), 52_949_745_664},
		{Version2("old", old, win(1)), features(26_624, 19, 3, 3), 155_215_900_672},
		{Version2("old", old, win(1)), features(28_672, 18, 2, 2), 159_271_049_216},
	} {
		if got, err := c.cost.Work(c.f); err != nil || got != c.want {
			t.Errorf("%v of %+v: got %d, %v, want %d", c.cost, c.f, got, err, c.want)
		}
	}
}

func TestCostForTakesTheFirstTableInWhoseDomainTheFactsAre(t *testing.T) {
	tables := []Table{
		{
			Name:         "narrow",
			Domain:       Domain{Device: "host", Hidden: Range{64, 128}, ContextParallel: Range{1, 1}},
			Coefficients: Coefficients{Token: 1, Pair: 2, Segment: 3, Short: 4, Level: 5, RecurrentLevel: 6, ShortBelow: 7},
		},
		{Name: "wide", Domain: Domain{Hidden: Range{64, 4096}}, Coefficients: Coefficients{Token: 1}},
	}
	for _, c := range []struct {
		facts Facts
		want  string
	}{
		{Facts{Device: "host", Hidden: 64, Layers: 10, Recurrent: 4}, "narrow: work = 1*10*tokens + 2*6*pairs + 3*10*segments + 4*10*short(<7) + 5*10*levels + 6*4*levels"},
		{Facts{Device: "host", Hidden: 129, Layers: 3}, "wide: work = 1*3*tokens"},
		{Facts{Device: "gpu", Hidden: 128, Layers: 3}, "wide: work = 1*3*tokens"},
		{Facts{Device: "host", Hidden: 64, Layers: 3, ContextParallel: 2}, "wide: work = 1*3*tokens"},
		{Facts{Device: "host", Hidden: 63, Layers: 3}, "version 1: work = 1024*3*tokens + 128*tokens + 128*1024*segments + 96*1024*decisions"},
		{Facts{Layers: 3, Recurrent: 1, ContextParallel: 2}, "version 1: work = 1024*3*tokens + 160*ceil(tokens/2) + 160*1024*segments + 128*1024*decisions + 786432*3*first level + 262144*3*further levels"},
	} {
		if got := CostFor(tables, c.facts).String(); got != c.want {
			t.Errorf("(-want +got):\n%s", cmp.Diff(c.want, got))
		}
	}
	for i := range tables { // a table is data
		text, err := json.Marshal(tables[i])
		var back Table
		if err := errors.Join(err, json.Unmarshal(text, &back)); err != nil || cmp.Diff(tables[i], back) != "" {
			t.Errorf("%s, %v", text, err)
		}
	}
}

func TestAllocationsOfASearchDoNotDependOnTheNumberOfTokens(t *testing.T) {
	for _, f := range []Facts{{Layers: 4}, {Layers: 4, Recurrent: 2}, {Layers: 4, ContextParallel: 4}} {
		for _, bounded := range []bool{false, true} {
			c := Version1(f)
			var allocs [2]float64
			for i, scale := range []int{16, 1024} { // both so long that sharing everything is best
				rows := grpo(4, 4, 16*scale, 32*scale, 8*scale)
				allocs[i] = testing.AllocsPerRun(5, func() { mustSelect(t, mustBuild(t, rows), &c, Options{Bounded: bounded}) })
			}
			if allocs[0] != allocs[1] || allocs[0] > 80 {
				t.Errorf("%+v, bounded %v: %v allocations with 64 times the tokens of %v", f, bounded, allocs[1], allocs[0])
			}
		}
	}
}

func FuzzSelect(f *testing.F) {
	f.Add([]byte("abc\x00abd\x00ab\x00x"), uint64(1))
	f.Add([]byte("a\x00aa\x00aaa\x00aaab\x00aab"), uint64(2))
	f.Fuzz(func(t *testing.T, text []byte, seed uint64) {
		var rows [][]int32
		for part := range strings.SplitSeq(string(text), "\x00") {
			row := []int32{}
			for _, c := range []byte(part) {
				row = append(row, int32(c))
			}
			if len(row) > 0 {
				rows = append(rows, row)
			}
		}
		if len(rows) == 0 {
			return
		}
		rng := rand.New(rand.NewPCG(seed, 0))
		tree := mustBuild(t, rows)
		c := randomCost(rng, 1+tree.Logical/len(rows), seed%3 == 0)
		got := mustSelect(t, tree, &c, Options{})
		score, err := c.Score(mustLayout(t, tree, got.Decisions))
		if err != nil || score != got.Score {
			t.Errorf("got %+v, its layout has %+v, %v", got, score, err)
		}
		bounded := mustSelect(t, tree, &c, Options{Bounded: true, Budget: 100})
		if got.Score.Compare(bounded.Score) > 0 && got.Stats.Method == Exact {
			t.Errorf("got %+v, the bounded search %+v", got, bounded)
		}
		if len(tree.Decisions) > 8 {
			return
		}
		if best, which := cheapest(t, tree, &c); got.Score != best || !slices.Equal(got.Decisions, which) {
			t.Errorf("under %v: got %+v, the best is %v at %+v", c, got, which, best)
		}
	})
}
