package loader

import (
	"errors"
	"fmt"
	"math/big"
	"math/rand/v2"
	"slices"
	"testing"
)

// loads is how many random loads each property is tried on.
func loads(t *testing.T) int {
	if testing.Short() {
		return 500
	}
	return 4000
}

func describe(stats []FileStats, p PlanParams) string {
	s := fmt.Sprintf("%+v\n", p)
	for _, f := range stats {
		s += fmt.Sprintf("%+v\n", f)
	}
	return s
}

// budgets are where a load of this minimum gets interesting.
func budgetsAround(rng *rand.Rand, minimum, kept int64) []int64 {
	return []int64{minimum, minimum + 1, minimum + rng.Int64N(kept/4+2), minimum + rng.Int64N(2*kept+2), minimum + 20*kept + 100}
}

// checkWhole checks that the chunks of a plan are exactly the tensors, in order.
func checkWhole(plan *FitPlan) error {
	for i := range plan.Files {
		f := &plan.Files[i]
		tensor, at := 0, int64(0)
		for k := range f.Chunks {
			var sum int64
			for p := range f.Parts(&f.Chunks[k]) {
				if p.Tensor != tensor || p.Offset != at || !plan.Classic && p.At != sum {
					return fmt.Errorf("%s, chunk %d: part %+v, want tensor %d from %d at %d", f.Path, k, p, tensor, at, sum)
				}
				if first := &f.Tensors[f.Chunks[k].First]; plan.Classic && p.At != f.Tensors[p.Tensor].Offset-first.Offset {
					return fmt.Errorf("%s, chunk %d: part %+v is not where its span has it", f.Path, k, p)
				}
				sum += p.Bytes
				if at += p.Bytes; at == f.Tensors[tensor].Bytes {
					tensor, at = tensor+1, 0
				}
			}
			if c := &f.Chunks[k]; !plan.Classic && c.Bytes != sum || c.Bytes < sum {
				return fmt.Errorf("%s, chunk %d: %d bytes for parts of %d", f.Path, k, c.Bytes, sum)
			}
		}
		if tensor != len(f.Tensors) || at != 0 {
			return fmt.Errorf("%s: chunks end at tensor %d, byte %d", f.Path, tensor, at)
		}
	}
	return nil
}

func TestReplayNeverExceedsTheBudget(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 0))
	var accepted, chunked, cut, handed, wide, several, reordered int
	for n := range loads(t) {
		stats, p := randomLoad(rng, true)
		p.Classic = n%4 == 0 && hasClassic(p)
		if rng.IntN(3) == 0 {
			p.Align = randomAlign(rng)
		}
		p.DepthFirst = rng.IntN(3) == 0
		minimum, ok := leastBudget(stats, p)
		if !ok {
			minimum = sumKept(stats)
		}
		for _, p.Budget = range budgetsAround(rng, minimum, sumKept(stats)) {
			plan, err := Fit(stats, p)
			if (err == nil) != ok {
				t.Fatalf("load %d: %v\n%s", n, err, describe(stats, p))
			}
			if err != nil {
				continue
			}
			accepted++
			if err := checkWhole(plan); err != nil {
				t.Fatalf("load %d: %v\n%s", n, err, describe(stats, p))
			}
			eager, err := simulate(plan, p, nil)
			if err != nil {
				t.Fatalf("load %d: %v\n%s", n, err, describe(stats, p))
			}
			lazy, err := simulate(plan, p, rng)
			if err != nil {
				t.Fatalf("load %d: %v\n%s", n, err, describe(stats, p))
			}
			if eager > p.Budget || lazy > eager || plan.Peak > p.Budget || eager > plan.Peak {
				t.Fatalf("load %d: peaks %d and %d, predicted %d, budget %d\n%s%v", n, eager, lazy, plan.Peak, p.Budget, describe(stats, p), plan)
			}
			if exact := p.Group == 1 && (p.Align == 1 || p.Classic || !p.AccumulateResident); exact && eager != plan.Peak {
				t.Fatalf("load %d: peak %d, predicted %d\n%s%v", n, eager, plan.Peak, describe(stats, p), plan)
			}
			if !p.AccumulateResident && !p.YieldClone && p.Group == 1 && !p.Classic {
				if any := anyOrder(plan, p); any > p.Budget {
					t.Fatalf("load %d: the %d largest chunks need %d, the budget is %d\n%s%v", n, plan.Buffers, any, p.Budget, describe(stats, p), plan)
				}
			}
			for i := range plan.Files {
				f := &plan.Files[i]
				if len(f.Chunks) > 2 {
					chunked++
				}
				for _, c := range f.Chunks {
					if c.Skip > 0 {
						cut++
					}
					if c.HandOver {
						handed++
					}
					if c.Last-c.First > 1 {
						wide++
					}
				}
			}
			if p.Group > 1 {
				several++
			}
			if plan.Reordered {
				reordered++
			}
		}
	}
	t.Logf("%d plans: %d files of more than 2 chunks, %d cuts in tensors, %d chunks handed over, %d with several tensors, %d plans for several ranks, %d reordered",
		accepted, chunked, cut, handed, wide, several, reordered)
	if min(chunked, cut, handed, wide, several, reordered) < 20 {
		t.Error("the generator has drifted: too few loads of some kind")
	}
}

// anyOrder is the most bytes in use if any chunks at all may be alive together, rounded down.
func anyOrder(plan *FitPlan, p PlanParams) int64 {
	s := &simulation{plan: plan, p: p, align: p.Align}
	var charges []*big.Rat
	for i := range plan.Files {
		f := &plan.Files[i]
		for k := range f.Chunks {
			charges = append(charges, s.charge(f, &f.Chunks[k]))
		}
	}
	slices.SortFunc(charges, func(a, b *big.Rat) int { return b.Cmp(a) })
	sum := rat(p.Copier.Fixed + p.Preallocated)
	for _, c := range charges[:plan.Buffers] {
		sum.Add(sum, c)
	}
	return new(big.Int).Quo(sum.Num(), sum.Denom()).Int64()
}

func TestAtTheMinimumItFitsAndOneByteLessDoesNot(t *testing.T) {
	rng := rand.New(rand.NewPCG(2, 0))
	tight, plans := 0, 0
	for n := range loads(t) {
		stats, p := randomLoad(rng, n%3 > 0)
		p.Classic = n%4 == 0 && hasClassic(p)
		if rng.IntN(3) == 0 {
			p.Align = randomAlign(rng)
		}
		p.Budget = 1
		var refusal *BudgetInfeasibleError
		plan, err := Fit(stats, p)
		minimum := int64(0)
		switch {
		case err == nil:
			minimum = plan.Minimum
		case errors.As(err, &refusal):
			minimum = refusal.Minimum
		default:
			t.Fatalf("load %d: %v", n, err)
		}
		if minimum == 0 {
			if refusal.Limit != LimitMaxChunk && refusal.Limit != LimitFixed && !p.Classic { // classic: of the first file, as it was
				t.Fatalf("load %d: no budget would do, because of %q\n%s", n, refusal.Limit, describe(stats, p))
			}
			if p.Budget = 1 << 40; fails(stats, p) == nil {
				t.Fatalf("load %d: no budget would do, but %d does\n%s", n, p.Budget, describe(stats, p))
			}
			continue
		}
		p.Budget = minimum
		if plan, err = Fit(stats, p); err != nil {
			t.Fatalf("load %d: at the minimum of %d: %v\n%s", n, minimum, err, describe(stats, p))
		}
		if plan.Minimum != minimum {
			t.Fatalf("load %d: minimum %d at the minimum of %d", n, plan.Minimum, minimum)
		}
		plans++
		if plan.Peak == minimum {
			tight++
		} else if !p.Classic && p.Group == 1 && (p.Align == 1 || !p.AccumulateResident) && n%3 > 0 && minimum > 1 {
			t.Fatalf("load %d: peak %d at the minimum of %d\n%s%v", n, plan.Peak, minimum, describe(stats, p), plan)
		}
		for range 4 { // and nowhere above it
			p.Budget = minimum + rng.Int64N(max(200, 2*p.Align))
			if plan, err = Fit(stats, p); err != nil || !p.Classic && plan.Peak > p.Budget {
				t.Fatalf("load %d: minimum %d, with %d: %v, %v\n%s", n, minimum, p.Budget, plan, err, describe(stats, p))
			}
		}
		if p.Budget = minimum - 1; p.Budget == 0 {
			continue
		}
		if refusal = fails(stats, p); refusal == nil {
			t.Fatalf("load %d: fits in %d, the minimum is %d\n%s", n, p.Budget, minimum, describe(stats, p))
		}
		if refusal.Minimum != minimum || refusal.MissingBytes() != 1 {
			t.Fatalf("load %d: refusal at the minimum less 1: %v\n%s", n, refusal, describe(stats, p))
		}
		if refusal.Limit == LimitTensor && refusal.File == "" {
			t.Fatalf("load %d: names no file: %v", n, refusal)
		}
	}
	t.Logf("%d plans at their minimum, %d with that peak", plans, tight)
}

// fails is Fit's refusal, nil if it has none.
func fails(stats []FileStats, p PlanParams) *BudgetInfeasibleError {
	_, err := Fit(stats, p)
	e, _ := err.(*BudgetInfeasibleError)
	return e
}

func TestDefaultIsAtLeastAsGoodAsClassic(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 0))
	var feasible, deeper, fewer, clamped, only int
	for n := range loads(t) {
		stats, p := randomLoad(rng, n%3 > 0)
		minimum, ok := leastBudget(stats, classically(p))
		if !ok || !hasClassic(p) {
			continue
		}
		for _, p.Budget = range append(budgetsAround(rng, minimum, sumKept(stats)), max(minimum-1-rng.Int64N(minimum), 1)) {
			classic, err := Fit(stats, classically(p))
			better, berr := Fit(stats, p)
			if err != nil {
				if berr == nil {
					only++
				}
				continue
			}
			feasible++
			if berr != nil {
				t.Fatalf("load %d: classic accepts, default: %v\n%s%v", n, berr, describe(stats, p), classic)
			}
			compareModes(t, fmt.Sprintf("load %d", n), classic, better)
			if t.Failed() {
				t.Fatalf("%s%v%v", describe(stats, p), classic, better)
			}
			if better.QueueSize > classic.QueueSize {
				deeper++
			}
			if classic.QueueSize < p.QueueSize {
				clamped++
			}
			a, _, _ := classic.sizes()
			b, _, _ := better.sizes()
			if b < a {
				fewer++
			}
		}
	}
	t.Logf("%d plans of both modes: %d have a deeper queue in the default mode, %d fewer chunks, %d a shorter queue than asked in classic; %d only in the default mode",
		feasible, deeper, fewer, clamped, only)
	if min(deeper, fewer, clamped, only) < 20 {
		t.Error("the generator has drifted: too few loads of some kind")
	}
}

// The classic mode counts bytes and a device pages. Whatever it really takes at its smallest budget, with each block rounded, is enough
// for the default mode with the rounding charged: nothing that loads in classic mode is refused.
func TestDefaultNeedsNoMoreThanClassicTakesInPages(t *testing.T) {
	rng := rand.New(rand.NewPCG(8, 0))
	checked, limited, less := 0, 0, 0
	for n := range loads(t) {
		stats, p := randomLoad(rng, true)
		p.QueueSize, p.Group = -1, 1 // of several ranks the default mode knows a bound only
		p.Align = []int64{1, 512, 4096}[rng.IntN(3)]
		if rng.IntN(2) == 0 { // a chunk limit that some tensors just pass
			for i := range stats {
				p.MaxChunk = max(p.MaxChunk, stats[i].Largest)
			}
			p.MaxChunk += rng.Int64N(p.MaxChunk + 2)
		}
		var ok bool
		if p.Budget, ok = leastBudget(stats, classically(p)); !ok || !hasClassic(p) {
			continue
		}
		classic, err := Fit(stats, classically(p))
		if err != nil {
			t.Fatalf("load %d: %v\n%s", n, err, describe(stats, p))
		}
		rounded, err := simulateRounded(classic, classically(p), p.Align)
		if err != nil {
			t.Fatalf("load %d: %v\n%s", n, err, describe(stats, p))
		}
		rounded = max(rounded, 1) // a budget has to be
		// Above it, too: with more room chunks become larger, and must not become too large.
		for _, p.Budget = range []int64{rounded, rounded + 1, rounded + rng.Int64N(2*p.Align), rounded + rng.Int64N(2*rounded+2)} {
			better, err := Fit(stats, p)
			if err != nil {
				t.Fatalf("load %d: classic takes %d, default: %v\n%s%v", n, rounded, err, describe(stats, p), classic)
			}
			peak, err := simulate(better, p, nil)
			if err != nil || peak > better.Peak || better.Peak > p.Budget {
				t.Fatalf("load %d: peak %d, predicted %d, budget %d, %v\n%s%v", n, peak, better.Peak, p.Budget, err, describe(stats, p), better)
			}
			checked++
			if p.MaxChunk > 0 {
				limited++
			}
			if better.Minimum < rounded {
				less++
			}
		}
	}
	t.Logf("%d plans, %d with a chunk limit, %d whose smallest budget is less", checked, limited, less)
}

func classically(p PlanParams) PlanParams {
	p.Classic = true
	return p
}

// compareModes checks that the default mode's queue is at least as deep as the classic one's, its budgets at least as large, and
// each of its chunks ends at least as far in the file as the classic chunk of the same number.
func compareModes(t *testing.T, name string, classic, better *FitPlan) {
	t.Helper()
	if better.QueueSize < classic.QueueSize || better.Depth < classic.Depth || better.Reordered || better.Minimum > classic.Minimum {
		t.Errorf("%s: queue %d, depth %d, minimum %d, reordered %v; classic %d, %d, %d", name,
			better.QueueSize, better.Depth, better.Minimum, better.Reordered, classic.QueueSize, classic.Depth, classic.Minimum)
	}
	for i := range classic.Files {
		c, b := &classic.Files[i], &better.Files[i]
		if c.Kept > 0 && (b.Budget < c.Budget && b.Budget < c.Kept || b.Budget < c.Budget && b.Tensors != nil) || len(b.Chunks) > len(c.Chunks) {
			t.Errorf("%s: %s: budget %d, %d chunks; classic %d, %d", name, c.Path, b.Budget, len(b.Chunks), c.Budget, len(c.Chunks))
		}
		for k := range b.Chunks {
			if x, y := &b.Chunks[k], &c.Chunks[k]; x.Last < y.Last || x.Stop > 0 && x.Last == y.Last {
				t.Errorf("%s: %s, chunk %d ends at tensor %d, byte %d; classic at tensor %d", name, c.Path, k, x.Last, x.Stop, y.Last)
			}
		}
	}
}

func TestDefaultAcceptsWhatTheRealPlannerAccepts(t *testing.T) {
	check := func(t *testing.T, name string, stats []FileStats, p PlanParams) {
		t.Helper()
		classic, err := Fit(stats, classically(p))
		if err != nil {
			return
		}
		better, err := Fit(stats, p)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			return
		}
		compareModes(t, name, classic, better)
	}
	eachGolden(t, "plan.jsonl", func(t *testing.T, _ string, v *goldenPlan) {
		p := v.Params.params(len(v.Files))
		p.Classic = false
		check(t, v.Name, v.stats(), p)
	})
	sets := map[string]*Set{}
	eachGolden(t, "load.jsonl", func(t *testing.T, folder string, v *goldenLoad) {
		stats := v.stats(t, openGolden(t, sets, folder, v.Set))
		p := v.Params.params(len(stats))
		p.Classic = false
		check(t, v.Name, stats, p)
	})
}

func TestSumsAloneGiveLimitsThatAnyTensorsKeep(t *testing.T) {
	rng := rand.New(rand.NewPCG(4, 0))
	checked := 0
	for n := range loads(t) {
		stats, p := randomLoad(rng, true)
		for i := range stats {
			stats[i].Atom = 0
			for j := range stats[i].Tensors {
				stats[i].Tensors[j].Atom = 0
			}
		}
		sums := slices.Clone(stats)
		for i := range sums {
			sums[i].Tensors = nil
		}
		minimum, ok := leastBudget(sums, p)
		if least, _ := leastBudget(stats, p); ok && least > minimum && p.Group == 1 { // in a group, the order is a good one, not the best
			t.Fatalf("load %d: the minimum is %d, without tensors %d\n%s", n, least, minimum, describe(stats, p))
		}
		if !ok {
			continue
		}
		for _, p.Budget = range budgetsAround(rng, minimum, sumKept(stats)) {
			plan, err := Fit(sums, p)
			if err != nil {
				t.Fatalf("load %d: %v\n%s", n, err, describe(stats, p))
			}
			for i := range plan.Files { // cut first-fit, as whoever has the limits only would
				f := &plan.Files[i]
				f.FileStats = stats[f.Index]
				f.Chunks = cutDense(f, p.AccumulateResident)
			}
			peak, err := simulate(plan, p, nil)
			if err != nil || peak > plan.Peak || plan.Peak > p.Budget {
				t.Fatalf("load %d: peak %d, predicted %d, budget %d, error %v\n%s%v", n, peak, plan.Peak, p.Budget, err, describe(stats, p), plan)
			}
			checked++
		}
	}
	t.Logf("%d plans", checked)
}

// cutDense cuts a file by its limit.
func cutDense(f *FilePlan, accumulate bool) []Chunk {
	var chunks []Chunk
	for i, t := range f.Tensors {
		if n := len(chunks); n == 0 || chunks[n-1].Bytes+t.Bytes > f.Budget {
			chunks = append(chunks, Chunk{First: i, HandOver: accumulate && f.Resident == f.Kept})
		}
		c := &chunks[len(chunks)-1]
		c.Last = i + 1
		c.Bytes += t.Bytes
	}
	return chunks
}

func TestReorderedNeedsNoMoreThanAnyOrder(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 0))
	better := 0
	for n := range loads(t) / 20 {
		stats, p := randomLoad(rng, n%3 > 0)
		p.Group = 1
		least, ok := leastBudget(stats, p)
		if !ok {
			continue
		}
		given, _ := newBetter(stats, p).minimum()
		if newBetter(stats, p).inBytes(given) > least {
			better++
		}
		permute(len(stats), func(order []int) {
			b := newBetter(stats, p)
			r := *b
			r.files, r.need = nil, nil
			for _, i := range order {
				r.files, r.need = append(r.files, b.files[i]), append(r.need, b.need[i])
			}
			if need, _ := r.minimum(); max(r.inBytes(need), 1) < least {
				t.Fatalf("load %d: the order %v needs %d, the minimum is %d\n%s", n, order, r.inBytes(need), least, describe(stats, p))
			}
		})
	}
	if better == 0 {
		t.Error("no load is better in another order")
	}
}

// permute calls do with each order of n numbers.
func permute(n int, do func([]int)) {
	order := make([]int, n)
	for i := range order {
		order[i] = i
	}
	var rest func(k int)
	rest = func(k int) {
		if k == n {
			do(order)
			return
		}
		for i := k; i < n; i++ {
			order[k], order[i] = order[i], order[k]
			rest(k + 1)
			order[k], order[i] = order[i], order[k]
		}
	}
	rest(0)
}
