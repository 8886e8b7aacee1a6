package loader

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// gib is n GiB in bytes.
func gib(n float64) int64 { return int64(math.Round(n * (1 << 30))) }

// sums are files of which only sums are known: kept bytes and the largest tensor in pairs, all in GiB, all resident.
func sums(pairs ...float64) []FileStats {
	var stats []FileStats
	for i := 0; i < len(pairs); i += 2 {
		k, l := gib(pairs[i]), gib(pairs[i+1])
		stats = append(stats, FileStats{Path: fmt.Sprintf("f%d", i/2), Kept: k, Span: k, Largest: l, Resident: k})
	}
	return stats
}

// times is the same file n times.
func times(n int, kept, largest float64) []FileStats {
	var pairs []float64
	for range n {
		pairs = append(pairs, kept, largest)
	}
	return sums(pairs...)
}

func resident(stats []FileStats, each float64) []FileStats {
	for i := range stats {
		stats[i].Resident = gib(each)
	}
	return stats
}

// like are the parameters most examples have: queue for the depth, a plain copier, everything accumulates.
func like(stats []FileStats, budget float64, queue int, change ...func(*PlanParams)) PlanParams {
	p := PlanParams{Budget: gib(budget), QueueSize: queue, AccumulateResident: true, Group: 1, Classic: true}
	for range stats {
		p.Copier.Multiplier = append(p.Copier.Multiplier, Ratio{1, 1})
	}
	for _, c := range change {
		c(&p)
	}
	return p
}

func group(n int) func(*PlanParams)          { return func(p *PlanParams) { p.Group = n } }
func elsewhere(p *PlanParams)                { p.AccumulateResident = false }
func clones(p *PlanParams)                   { p.YieldClone = true }
func byDefault(p *PlanParams)                { p.Classic = false }
func maxChunk(bytes int64) func(*PlanParams) { return func(p *PlanParams) { p.MaxChunk = bytes } }
func costing(num, den int64) func(*PlanParams) {
	return func(p *PlanParams) {
		for i := range p.Copier.Multiplier {
			p.Copier.Multiplier[i] = Ratio{num, den}
		}
	}
}

// TestClassicWorkedExamples holds the rows of section 1.14 of the reference page against the formulas and against Fit.
func TestClassicWorkedExamples(t *testing.T) {
	pair := sums(0, 0, 0, 0)
	pair[0] = FileStats{Path: "f0", Kept: 10, Span: 10, Largest: 3, Resident: 10}
	pair[1] = FileStats{Path: "f1", Kept: 7, Span: 7, Largest: 2, Resident: 7}
	bytes := func(n int64) func(*PlanParams) { return func(p *PlanParams) { p.Budget = n } }
	gibs := func(xs ...float64) (b []int64) {
		for _, x := range xs {
			b = append(b, gib(x))
		}
		return b
	}
	half := times(2, 8, 1)
	for _, c := range []struct {
		name   string
		stats  []FileStats
		p      PlanParams
		queue  int     // as clamped
		want   []int64 // budgets; nil if infeasible
		file   string
		needs  int64
		serial bool
	}{
		{name: "1", stats: times(8, 4, 1), p: like(times(8, 4, 1), 40, 0), want: gibs(18, 16, 14, 12, 10, 8, 6, 4)},
		{name: "2", stats: times(4, 2, .5), p: like(times(4, 2, .5), 100, 0), want: gibs(49, 48, 47, 46)},
		{name: "3", stats: times(1, 1, .25), p: like(times(1, 1, .25), 100, -1, maxChunk(gib(.5))), queue: -1, want: gibs(.5)},
		{name: "4", stats: sums(8, 1, 2, 1, 8, 1, 2, 1), p: like(times(4, 1, 1), 40, -1, group(2)), queue: -1, want: gibs(15, 15, 10, 10)},
		{name: "4 merged", stats: sums(10, 1, 10, 1), p: like(times(2, 1, 1), 40, 0), want: gibs(15, 10)},
		{name: "5", stats: sums(8, 1, 2, 1, 8, 1, 2, 1), p: like(times(4, 1, 1), 40, 0), want: gibs(16, 15, 11, 10)},
		{name: "6", stats: times(6, 8, 1), p: like(times(6, 8, 1), 12, 0, elsewhere), want: gibs(6, 6, 6, 6, 6, 6)},
		{name: "7", stats: times(6, 8, 1), p: like(times(6, 8, 1), 12, 0, elsewhere, clones), want: gibs(4, 4, 4, 4, 4, 4)},
		{name: "8", stats: times(10, 2, 1), p: like(times(10, 2, 1), 12, 0), file: "f5", needs: gib(13)},
		{name: "9", stats: sums(4, 1, 0, 0, 4, 1), p: like(times(3, 1, 1), 20, -1), queue: -1, want: gibs(16, 16, 12)},
		{name: "11", stats: times(1, 2, .5), p: like(times(1, 2, .5), 3, 0), want: gibs(.5)},
		{name: "11 twice", stats: times(1, 2, .5), p: like(times(1, 2, .5), 3, 0, costing(2, 1)), queue: -1, want: gibs(.5)},
		{name: "12", stats: times(1, 4, 3), p: like(times(1, 4, 3), 2, 4), file: "f0", needs: gib(7)},
		{name: "12 group", stats: times(1, 4, 3), p: like(times(1, 4, 3), 2, -1, group(2)), file: "f0", needs: gib(10)},
		{name: "15", stats: times(3, 0, 0), p: like(times(3, 0, 0), 1, 3), queue: 3, want: gibs(.2, .2, .2)},
		{name: "18 all", stats: half, p: like(half, 10, -1), file: "f1", needs: gib(17)},
		{name: "18 half", stats: resident(times(2, 8, 1), 4), p: like(half, 10, -1), queue: -1, want: gibs(6, 2)},
		{name: "19", stats: resident(times(3, 8, 1), 4), p: like(times(3, 8, 1), 20, -1), queue: -1, want: gibs(16, 12, 8)},
		{name: "19 elsewhere", stats: resident(times(3, 8, 1), 4), p: like(times(3, 8, 1), 20, -1, elsewhere), queue: -1, want: gibs(20, 20, 20)},
		{name: "20", stats: times(4, 4, 1), p: like(times(4, 4, 1), 10, 8), file: "f2", needs: gib(13)},
		{name: "20 none stays", stats: resident(times(4, 4, 1), 0), p: like(times(4, 4, 1), 10, 8), queue: 8, want: gibs(1, 1, 1, 1)},
		{name: "31", stats: pair, p: like(pair, 0, 1, bytes(31)), queue: 1, want: []int64{7, 4}},
		{name: "31, 9", stats: pair, p: like(pair, 0, 9, bytes(31)), queue: 5, want: []int64{3, 2}},
		{name: "23", stats: pair, p: like(pair, 0, 5, bytes(23)), queue: 1, want: []int64{4, 2}},
		{name: "22", stats: pair, p: like(pair, 0, 5, bytes(22)), queue: 0, want: []int64{6, 2}},
		{name: "21", stats: pair, p: like(pair, 0, 5, bytes(21)), queue: 0, want: []int64{5, 2}},
		{name: "18 bytes", stats: pair, p: like(pair, 0, 5, bytes(18)), file: "f1", needs: 19},
		{name: "five, 2 ranks", stats: times(5, 3, 1), p: like(times(5, 3, 1), 30, 0, group(2)), want: gibs(8, 8, 6, 6, 5)},
		{name: "five", stats: times(5, 3, 1), p: like(times(5, 3, 1), 30, 0), want: gibs(13.5, 12, 10.5, 9, 7.5)},
	} {
		plan, err := Fit(c.stats, c.p)
		if c.want == nil {
			var e *BudgetInfeasibleError
			if !errors.As(err, &e) || e.File != c.file || e.RequiredBytes != c.needs {
				t.Errorf("example %s: %v, want that %s needs %d", c.name, err, c.file, c.needs)
			}
			continue
		}
		if err != nil {
			t.Errorf("example %s: %v", c.name, err)
			continue
		}
		var got []int64
		for _, f := range plan.Files {
			got = append(got, f.Budget)
		}
		if !slices.Equal(got, c.want) && c.name != "15" || plan.QueueSize != c.queue {
			t.Errorf("example %s: queue %d, budgets %v; want %d, %v", c.name, plan.QueueSize, got, c.queue, c.want)
		}
	}
}

func TestClassicMinimumOfTheWholeLoad(t *testing.T) {
	for _, c := range []struct {
		stats []FileStats
		p     PlanParams
		want  float64
	}{
		{times(10, 2, 1), like(times(10, 2, 1), 12, 0), 21}, // example 8: what it names first is 14
		{times(8, 4, 1), like(times(8, 4, 1), 1, 0), 33},
		{times(8, 4, 1), like(times(8, 4, 1), 1, 0, group(2)), 34},
		{times(1, 1, 1), like(times(1, 1, 1), 1, -1, group(2), elsewhere, costing(2, 1)), 4},
	} {
		if got, _ := leastBudget(c.stats, c.p); got != gib(c.want) {
			t.Errorf("minimum %d, want %d: %s", got, gib(c.want), describe(c.stats, c.p))
		}
	}
}

// TestPadding is example 16: what the copier needs for each chunk.
func TestPadding(t *testing.T) {
	const mib, pad = 1 << 20, 12285
	stats := []FileStats{{Path: "f0", Kept: 8 * mib, Span: 8 * mib, Largest: 2 * mib, Resident: 8 * mib}}
	for _, c := range []struct{ multiplier, clone, budget int64 }{{1, 0, 12607482}, {1, 1, 14704634}, {2, 0, 16801786}, {2, 1, 18898938}} {
		p := like(stats, 0, 4, costing(c.multiplier, 1))
		p.Budget, p.Copier.PerChunk = c.budget, pad
		f := newClassic(stats, p)
		f.clone = c.clone
		if q, ok := f.fitQueue(4); q != 0 || !ok {
			t.Errorf("%+v: queue %d, %v", c, q, ok)
		}
		if b, _ := f.budgets(2); !slices.Equal(b, []int64{2 * mib}) {
			t.Errorf("%+v: budgets %v", c, b)
		}
		f.budget--
		if q, ok := f.fitQueue(4); q != -1 || !ok {
			t.Errorf("%+v: queue %d, %v, with one byte less", c, q, ok)
		}
		if _, failed := f.budgets(2); failed != 0 {
			t.Errorf("%+v: fits with one byte less", c)
		}
	}
	empty := []FileStats{{Path: "empty"}}
	p := like(empty, 0, 4)
	p.Budget, p.Copier.PerChunk = 1, pad
	if plan, err := Fit(empty, p); err != nil || plan.QueueSize != 4 || plan.Files[0].Budget != 0 {
		t.Errorf("an empty file: %v, %v", plan, err) // example 17
	}
}

// With a chunk limit, too, what is handed over is rounded once a chunk and not once a tensor.
func TestMinimumOfManySmallTensorsInLimitedChunks(t *testing.T) {
	f := FileStats{Path: "f"}
	for i := range 1000 {
		f = add(f, fmt.Sprint(i), true, 1)
	}
	stats := []FileStats{f}
	for _, c := range []struct{ limit, minimum int64 }{{0, 4096}, {1000, 4096}, {999, 8192}, {100, 40960}, {1, 4096000}} {
		p := PlanParams{Budget: c.minimum, QueueSize: -1, MaxChunk: c.limit, AccumulateResident: true, Align: 4096, Group: 1, Copier: Costs{Multiplier: []Ratio{{1, 1}}}}
		plan, err := Fit(stats, p)
		if err != nil || plan.Minimum != c.minimum || plan.Peak != c.minimum {
			t.Fatalf("limit %d: want %d, found %v, %v", c.limit, c.minimum, plan, err)
		}
		p.Budget--
		e := fails(stats, p)
		if e == nil || e.Minimum != c.minimum {
			t.Fatalf("limit %d: with one byte less than %d: %v", c.limit, c.minimum, e)
		}
		if c.minimum > 4096 && !slices.Contains(e.Levers, Lever{LeverMaxChunk, "without a chunk limit", 4096}) {
			t.Errorf("limit %d: levers %+v", c.limit, e.Levers)
		}
	}
}

// TestDefaultCharges holds the default mode to the figures that the reference page computes for its improvements.
func TestDefaultCharges(t *testing.T) {
	fit := func(stats []FileStats, p PlanParams) []int64 {
		t.Helper()
		plan, err := Fit(stats, p)
		if err != nil {
			t.Fatal(err)
		}
		var b []int64
		for _, f := range plan.Files {
			b = append(b, f.Budget)
		}
		return b
	}
	// Item 4: a clone is one tensor. Example 7 has 4 GiB in the classic mode.
	if got := fit(times(6, 8, 1), like(times(6, 8, 1), 12, 0, elsewhere, clones, byDefault)); got[0] != gib(5.5) {
		t.Errorf("a clone is charged: %v", got)
	}
	// A load of 2 bytes a byte for 2 ranks, serially: one tensor is received, once.
	one := times(1, 1, 1)
	if got, _ := leastBudget(one, like(one, 1, -1, group(2), elsewhere, costing(2, 1), byDefault)); got != gib(3) {
		t.Errorf("a received tensor is charged: the minimum is %d", got)
	}
	// Item 8: a file that costs more does not make the others cost more.
	two := times(2, 4, 1)
	p := like(two, 10, 0, elsewhere, byDefault)
	p.Copier.Multiplier[1] = Ratio{2, 1}
	if got := fit(two, p); got[0] != gib(5) || got[1] != gib(2.5) {
		t.Errorf("two multipliers: %v", got)
	}
	// Item 10: everything stays, nothing is copied, whole files are handed over at any depth.
	all := times(10, 2, 1)
	if got, _ := leastBudget(all, like(all, 1, 4, byDefault)); got != gib(20) {
		t.Errorf("all stays: the minimum is %d", got)
	}
	if plan, err := Fit(all, like(all, 20, 4, byDefault)); err != nil || plan.QueueSize != 4 {
		t.Errorf("all stays: %v, %v", plan, err)
	}
	// Item 5: residents count as they arrive. The largest tensor comes first, so it does not meet what comes after.
	f := tensors("first", false, 10<<20)
	for i := range 100 {
		f = add(f, fmt.Sprint("t", i), true, 100<<10)
	}
	stats := []FileStats{f}
	if got, _ := leastBudget(stats, like(stats, 1, 0, byDefault)); got != 10<<20 {
		t.Errorf("the largest comes first: the minimum is %d", got)
	}
	if got, _ := leastBudget(stats, like(stats, 1, 0)); got != 10<<20+100*(100<<10) {
		t.Errorf("the largest comes first, classic: the minimum is %d", got)
	}
	// Item 6: a hole is not read and takes no room.
	g := tensors("a", true, 10)
	g.Tensors = append(g.Tensors, TensorStats{Name: "b", Offset: 1000, Bytes: 10, Resident: true})
	g.Kept, g.Span, g.Resident = 20, 1010, 20
	plan, err := Fit([]FileStats{g}, PlanParams{Budget: 20, QueueSize: -1, Group: 1, Copier: Costs{Multiplier: []Ratio{{1, 1}}}})
	if err != nil || len(plan.Files[0].Chunks) != 1 || plan.Files[0].Chunks[0].Bytes != 20 || plan.Peak != 20 {
		t.Errorf("a hole: %v, %v", plan, err)
	}
	if rs := plan.Files[0].Ranges(&plan.Files[0].Chunks[0], 0); !slices.Equal(rs, []Range{{0, 10}, {1000, 1010}}) {
		t.Errorf("a hole: ranges %v", rs)
	}
	// Item 11: the classic example, as tensors that do not stay at the end of each file's residents.
	h := []FileStats{add(tensors("r", true, 9), "t", false, 1), add(tensors("s", true, 4), "u", false, 5)}
	h[0].Path, h[1].Path = "x", "y"
	if least, _ := leastBudget(h, like(h, 1, -1, byDefault)); least != 14 {
		t.Errorf("order: the minimum is %d", least)
	}
	q := like(h, 1, -1, byDefault)
	q.Budget = 14
	if plan, err := Fit(h, q); err != nil || !plan.Reordered || plan.Files[0].Path != "y" || plan.Files[0].Index != 1 {
		t.Errorf("order: %v, %v", plan, err)
	}
	// Item 14: a tensor that is larger than any chunk.
	big := tensors("big", false, 1000)
	big.Tensors[0].Atom = 7
	plan, err = Fit([]FileStats{big}, PlanParams{Budget: 40, QueueSize: 0, Group: 1, Copier: Costs{Multiplier: []Ratio{{1, 1}}}})
	if err != nil || plan.QueueSize != 0 || plan.Files[0].Chunks[0].Bytes != 14 || plan.Peak != 28 || plan.Minimum != 7 {
		t.Errorf("pieces: %v, %v", plan, err)
	}
}

// tensors is a file of one tensor at its start.
func tensors(name string, resident bool, bytes int64) FileStats {
	return add(FileStats{Path: "file", Tensors: []TensorStats{}}, name, resident, bytes)
}

func add(f FileStats, name string, resident bool, bytes int64) FileStats {
	f.Tensors = append(slices.Clip(f.Tensors), TensorStats{Name: name, Offset: f.Span, Bytes: bytes, Resident: resident})
	f.Kept += bytes
	f.Span += bytes
	f.Largest = max(f.Largest, bytes)
	if resident {
		f.Resident += bytes
	}
	return f
}

// TestWeightsPackedIntoOneSlab plans as a model is loaded that packs its matrices in panels: see PlanParams.
func TestWeightsPackedIntoOneSlab(t *testing.T) {
	const page, row, panel = 4096, 100, 32 * 100
	f := tensors("norm", true, 3000)
	for i := range 5 {
		f = add(f, fmt.Sprint("matrix", i), true, 1000*row)
		f.Tensors[i+1].Atom = panel
	}
	stats := []FileStats{f, f}
	slab := int64(1 << 20)
	params := func(budget int64, queue, ranks int) PlanParams {
		return PlanParams{
			Budget: budget, QueueSize: queue, Group: ranks, Preallocated: slab, Align: page, DepthFirst: true, MaxChunk: 64 << 10,
			Copier: Costs{Multiplier: []Ratio{{1, 1}, {1, 1}}},
		}
	}
	depth, chunk := 0, int64(0)
	for budget := slab; budget < slab+20*(64<<10); budget += 512 {
		plan, err := Fit(stats, params(budget, 6, 1))
		if budget < slab+page {
			e := &BudgetInfeasibleError{}
			if !errors.As(err, &e) || e.Minimum != slab+page || e.File == "" || e.Tensor == "" && e.Limit == LimitTensor {
				t.Fatalf("budget %d: %v", budget, err)
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if want := min(8, (budget-slab)/page); int64(plan.Buffers) != want || plan.Minimum != slab+page {
			t.Fatalf("budget %d: %d buffers, minimum %d; want %d, %d", budget, plan.Buffers, plan.Minimum, want, slab+page)
		}
		staging := int64(plan.Buffers) * plan.BufferBytes
		if plan.Buffers < depth || plan.Buffers == depth && plan.BufferBytes < chunk || slab+staging > budget || plan.Peak > slab+staging {
			t.Fatalf("budget %d: %d buffers of %d after %d of %d, peak %d", budget, plan.Buffers, plan.BufferBytes, depth, chunk, plan.Peak)
		}
		depth, chunk = plan.Buffers, plan.BufferBytes
		for i := range plan.Files {
			for k := range plan.Files[i].Chunks {
				for p := range plan.Files[i].Parts(&plan.Files[i].Chunks[k]) {
					x := &plan.Files[i].Tensors[p.Tensor]
					if x.Atom > 0 && (p.Offset%x.Atom != 0 || p.Bytes%x.Atom != 0 && p.Offset+p.Bytes != x.Bytes) || x.Atom == 0 && p.Bytes != x.Bytes {
						t.Fatalf("budget %d: %s is cut at %d to %d", budget, x.Name, p.Offset, p.Offset+p.Bytes)
					}
				}
			}
		}
	}
	if depth != 8 || chunk != 64<<10 {
		t.Errorf("with an ample budget %d buffers of %d", depth, chunk)
	}
	// Two ranks read a file each and send: one panel more, for what is received.
	if _, err := Fit(stats, params(slab+2*page, 6, 2)); err != nil {
		t.Error(err)
	}
	if e := fails(stats, params(slab+2*page-1, 6, 2)); e == nil || e.Minimum != slab+2*page {
		t.Error(e)
	}
	// Sums are enough to know how much is needed.
	known := stats
	stats = slices.Clone(stats)
	for i := range stats {
		stats[i].Tensors, stats[i].Atom = nil, panel
	}
	for _, ranks := range []int{1, 2} {
		a, _ := leastBudget(known, params(1, 6, ranks))
		b, _ := leastBudget(stats, params(1, 6, ranks))
		if a != b {
			t.Errorf("%d ranks: the minimum is %d, from sums %d", ranks, a, b)
		}
	}
}

func TestFitRefusesWhatCannotBe(t *testing.T) {
	good := func() ([]FileStats, PlanParams) {
		stats := []FileStats{add(tensors("a", true, 10), "b", false, 20)}
		return stats, PlanParams{Budget: 100, Group: 1, Copier: Costs{Multiplier: []Ratio{{1, 1}}}}
	}
	for _, c := range []struct {
		argument string
		change   func(f *FileStats, p *PlanParams)
	}{
		{"Multiplier", func(_ *FileStats, p *PlanParams) { p.Copier.Multiplier = nil }},
		{"Multiplier", func(_ *FileStats, p *PlanParams) { p.Copier.Multiplier[0] = Ratio{} }},
		{"Multiplier", func(_ *FileStats, p *PlanParams) { p.Copier.Multiplier[0] = Ratio{1, 0} }},
		{"Multiplier", func(_ *FileStats, p *PlanParams) { p.Copier.Multiplier[0] = Ratio{-1, 1} }},
		{"Multiplier", func(_ *FileStats, p *PlanParams) { p.Copier.Multiplier[0] = Ratio{-1, -1} }},
		{"Multiplier", func(_ *FileStats, p *PlanParams) { p.Copier.Multiplier[0] = Ratio{math.MaxInt64, 1} }},
		{"Multiplier", func(_ *FileStats, p *PlanParams) { p.Copier.Multiplier[0] = Ratio{math.MaxInt64, math.MaxInt64 - 1} }},
		{"Multiplier", func(_ *FileStats, p *PlanParams) { p.Copier.Multiplier[0], p.Classic = Ratio{9, 10}, true }},
		{"PerChunk", func(_ *FileStats, p *PlanParams) { p.Copier.PerChunk = -1 }},
		{"Fixed", func(_ *FileStats, p *PlanParams) { p.Copier.Fixed = -1 }},
		{"Group", func(_ *FileStats, p *PlanParams) { p.Group = 0 }},
		{"Group", func(_ *FileStats, p *PlanParams) { p.Group = 1 << 30 }},
		{"MaxChunk", func(_ *FileStats, p *PlanParams) { p.MaxChunk = -1 }},
		{"Preallocated", func(_ *FileStats, p *PlanParams) { p.Preallocated = -1 }},
		{"Align", func(_ *FileStats, p *PlanParams) { p.Align = -1 }},
		{"Kept", func(f *FileStats, _ *PlanParams) { f.Kept = -1 }},
		{"Span", func(f *FileStats, _ *PlanParams) { f.Span = 29 }},
		{"Largest", func(f *FileStats, _ *PlanParams) { f.Largest = 31 }},
		{"Largest", func(f *FileStats, _ *PlanParams) { f.Largest = 0 }},
		{"Resident", func(f *FileStats, _ *PlanParams) { f.Resident = 31 }},
		{"Atom", func(f *FileStats, _ *PlanParams) { f.Atom = -1 }},
		{"Tensors", func(f *FileStats, _ *PlanParams) { f.Tensors[1].Offset = 9 }},
		{"Tensors", func(f *FileStats, _ *PlanParams) { f.Tensors[1].Bytes = math.MaxInt64 }},
		{"Tensors", func(f *FileStats, _ *PlanParams) { f.Tensors[1].Bytes = -1 }},
		{"Tensors", func(f *FileStats, _ *PlanParams) { f.Tensors[1].Atom = -1 }},
		{"Tensors", func(f *FileStats, _ *PlanParams) { f.Tensors[1].Bytes = 19 }},
		{"Tensors", func(f *FileStats, _ *PlanParams) { f.Tensors[1].Resident = true }},
	} {
		stats, p := good()
		c.change(&stats[0], &p)
		_, err := Fit(stats, p)
		var e *FitArgumentError
		if !errors.As(err, &e) || e.Argument != c.argument {
			t.Errorf("want an error of %s: %v", c.argument, err)
		}
	}
	stats, p := good()
	if _, err := Fit(stats, p); err != nil {
		t.Error(err)
	}
	if _, err := Fit(nil, PlanParams{Budget: 1, Group: 1}); err != nil {
		t.Errorf("no files: %v", err)
	}
}

func TestAbsurdSizesAreRefusedAndDoNotWrap(t *testing.T) {
	const huge = math.MaxInt64
	f := FileStats{Path: "f", Kept: huge, Span: huge, Largest: huge, Resident: huge}
	cut := f
	cut.Atom = huge / 2
	whole := f
	whole.Tensors = []TensorStats{{Name: "t", Bytes: huge, Resident: true, Atom: 3}}
	for _, stats := range [][]FileStats{{f}, {f, f}, {cut, cut}, {whole, whole}} {
		for _, classic := range []bool{false, true} {
			for _, m := range []Ratio{{1, 1}, {3, 2}, {1 << 20, 1}} {
				p := PlanParams{
					Budget: huge, QueueSize: math.MaxInt, AccumulateResident: true, YieldClone: true, Group: 1, Classic: classic,
					Copier: Costs{Multiplier: slices.Repeat([]Ratio{m}, len(stats)), Fixed: huge, PerChunk: huge}, Preallocated: huge,
				}
				if _, err := Fit(stats, p); err == nil {
					t.Errorf("accepted: %s", describe(stats, p))
				}
				p.Copier.Fixed, p.Copier.PerChunk, p.Preallocated = 0, 0, 0
				if e := fails(stats, p); len(stats) > 1 && e == nil {
					t.Errorf("accepted: %s", describe(stats, p))
				}
				p.Budget = math.MinInt64
				if e := fails(stats, p); e == nil || e.Limit != LimitBudget {
					t.Errorf("accepted, or %v: %s", e, describe(stats, p))
				}
			}
		}
	}
}

func TestRefusalNamesTheTensorAndTheWaysOut(t *testing.T) {
	stats := []FileStats{add(tensors("embed", true, 400), "norm", true, 10), add(tensors("w", true, 100), "cache", false, 300)}
	stats[0].Path, stats[1].Path = "a.safetensors", "b.safetensors"
	p := PlanParams{
		Budget: 600, QueueSize: 2, MaxChunk: 350, AccumulateResident: true, YieldClone: true, Group: 1,
		Copier: Costs{Multiplier: []Ratio{{2, 1}, {2, 1}}, Fixed: 50, PerChunk: 5},
	}
	e := fails(stats, p)
	if e == nil {
		t.Fatal("accepted")
	}
	want := &BudgetInfeasibleError{
		Limit: LimitMaxChunk, File: "a.safetensors", Index: 0, Tensor: "embed", ResidentBytes: 0, BudgetBytes: 550, PerChunkBytes: 5,
		LargestBytes: 400, EffectiveDepth: Ratio{2, 1}, MaxChunk: 350, Budget: 600, Fixed: 50,
		Levers: []Lever{{LeverMaxChunk, "with a chunk limit of 400", 1055}},
	}
	if diff := cmp.Diff(want, e); diff != "" {
		t.Errorf("refusal (-want +got):\n%s", diff)
	}
	p.MaxChunk = 0
	e = fails(stats, p)
	want = &BudgetInfeasibleError{
		Limit: LimitTensor, File: "b.safetensors", Index: 1, Tensor: "cache", RequiredBytes: 100 + 600 + 5 + 300, ResidentBytes: 100, // its file comes first
		TransientBytes: 905, BudgetBytes: 550, PerChunkBytes: 5, LargestBytes: 300, EffectiveDepth: Ratio{2, 1}, MaxChunk: math.MaxInt64,
		Budget: 600, Fixed: 50, Minimum: 1055,
		Levers: []Lever{
			{LeverCopier, "with a copier that needs no more than the chunk", 700},
			{LeverBorrow, "if tensors are used before the next one and not copied", 955},
		},
	}
	if diff := cmp.Diff(want, e); diff != "" {
		t.Errorf("refusal (-want +got):\n%s", diff)
	}
	text := `fit plan: file "b.safetensors", tensor "cache": needs 1005 bytes, 100 resident and 905 in flight, and there are 550, ` +
		`the budget of 600 less 50 that the copier holds; 455 bytes are missing: the smallest budget for the whole load is 1055; ` +
		`700 with a copier that needs no more than the chunk, or 955 if tensors are used before the next one and not copied`
	if e.Error() != text {
		t.Errorf("text:\n%s\nwant:\n%s", e, text)
	}
	for _, l := range e.Levers { // each is what it says
		q := p
		switch l.Name {
		case LeverCopier:
			q.Copier = Costs{Multiplier: []Ratio{{1, 1}, {1, 1}}}
		case LeverBorrow:
			q.YieldClone = false
		case LeverResident:
			q.AccumulateResident = false
		}
		if q.Budget = l.Minimum; fails(stats, q) != nil {
			t.Errorf("%s: %v", l.Name, fails(stats, q))
		}
		if q.Budget--; fails(stats, q) == nil {
			t.Errorf("%s: one byte less is enough", l.Name)
		}
	}
	p.Classic = true
	for _, part := range []string{`file "a.safetensors", tensor "embed"`, "in the default mode", "the smallest budget for the whole load is"} {
		if e := fails(stats, p); e == nil || !strings.Contains(e.Error(), part) {
			t.Errorf("classic: %v, want %q", e, part)
		}
	}
	p.Budget = 0
	if e := fails(stats, p); e == nil || !strings.Contains(e.Error(), "a budget of 0 bytes is not above 0") {
		t.Errorf("budget 0: %v", e)
	}
	p.Budget = 50
	if e := fails(stats, p); e == nil || !strings.Contains(e.Error(), "nothing is left after 50 that the copier holds") {
		t.Errorf("budget 50: %v", e)
	}
}
