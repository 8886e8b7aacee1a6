package loader

import (
	"bufio"
	"encoding/json"
	"errors"
	"math/big"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// The vectors of the real planner: all of them where they are, and always the sample in testdata. Their README says what the
// fields mean.
func goldenFolders(t *testing.T) []string {
	t.Helper()
	folders := []string{"testdata/fit"}
	if all := "../../shared/golden/fitplan"; isFolder(all) {
		folders = append(folders, all)
	} else {
		t.Logf("%s is not there; only the sample is tested", all)
	}
	return folders
}

func isFolder(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}

// eachGolden runs check on every line of a file of vectors.
func eachGolden[T any](t *testing.T, name string, check func(t *testing.T, folder string, v *T)) {
	for _, folder := range goldenFolders(t) {
		f, err := os.Open(filepath.Join(folder, name))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		s := bufio.NewScanner(f)
		s.Buffer(nil, 1<<24)
		n := 0
		for ; s.Scan(); n++ {
			var v T
			if err := json.Unmarshal(s.Bytes(), &v); err != nil {
				t.Fatalf("%s/%s:%d: %v", folder, name, n+1, err)
			}
			check(t, folder, &v)
		}
		if n == 0 || s.Err() != nil {
			t.Errorf("%s/%s: %d vectors, %v", folder, name, n, s.Err())
		}
		t.Logf("%s/%s: %d vectors", folder, name, n)
	}
}

// goldenRatio is a multiplier as the vectors spell it: an integer or a short decimal fraction, which JSON numbers are exactly.
type goldenRatio struct{ Ratio }

func (r *goldenRatio) UnmarshalJSON(b []byte) error {
	x, ok := new(big.Rat).SetString(string(b))
	if !ok {
		return errors.New("no number")
	}
	r.Ratio = Ratio{x.Num().Int64(), x.Denom().Int64()}
	return nil
}

type goldenFile struct {
	Path                          string
	Kept, Span, Largest, Resident int64
}

type goldenParams struct {
	Budget             int64
	QueueSize          int    `json:"queue_size"`
	MaxChunk           *int64 `json:"max_chunk"`
	AccumulateResident bool   `json:"accumulate_resident"`
	Group              int
	YieldClone         bool `json:"yield_clone"`
	Copier             struct {
		Multiplier goldenRatio
		Fixed      int64
		PerChunk   int64 `json:"per_chunk"`
	}
}

func (g *goldenParams) params(files int) PlanParams {
	p := PlanParams{
		Budget: g.Budget, QueueSize: g.QueueSize, AccumulateResident: g.AccumulateResident, Group: g.Group,
		YieldClone: g.YieldClone, Classic: true,
		Copier: Costs{Fixed: g.Copier.Fixed, PerChunk: g.Copier.PerChunk},
	}
	if g.MaxChunk != nil {
		p.MaxChunk = *g.MaxChunk
	}
	for range files {
		p.Copier.Multiplier = append(p.Copier.Multiplier, g.Copier.Multiplier.Ratio)
	}
	return p
}

type goldenInfeasible struct {
	Limit          string
	File           string
	Index          int
	Required       int64
	Resident       int64
	EffectiveDepth goldenRatio `json:"effective_depth"`
	Largest        int64
	Overhead       int64
	Budget         int64
	Serial         bool
	BudgetPassed   *int64 `json:"budget_passed"`
	Fixed          int64
}

// check holds an error against the record of the real one.
func (g *goldenInfeasible) check(t *testing.T, name string, e *BudgetInfeasibleError) {
	t.Helper()
	if g.Limit == "fixed" {
		// The real planner blames a budget of 0 on the fixed cost, even if that is 0.
		want := LimitFixed
		if e.Budget <= 0 {
			want = LimitBudget
		}
		if e.Limit != want {
			t.Errorf("%s: limit %q, want %q", name, e.Limit, want)
		}
		return
	}
	got := goldenInfeasible{
		Limit: g.Limit, File: e.File, Index: e.Index, Required: e.RequiredBytes, Resident: e.ResidentBytes,
		EffectiveDepth: g.EffectiveDepth, Largest: e.LargestBytes, Overhead: e.PerChunkBytes, Budget: e.BudgetBytes,
		Serial: g.Serial, BudgetPassed: g.BudgetPassed, Fixed: g.Fixed,
	}
	if diff := cmp.Diff(*g, got); diff != "" {
		t.Errorf("%s: infeasible (-want +got):\n%s", name, diff)
	}
	if e.EffectiveDepth.less(g.EffectiveDepth.Ratio) || g.EffectiveDepth.less(e.EffectiveDepth) {
		t.Errorf("%s: effective depth %v, want %v", name, e.EffectiveDepth, g.EffectiveDepth)
	}
	want := LimitTensor
	if g.Largest > e.MaxChunk {
		want = LimitMaxChunk // which the real planner does not tell apart
	}
	if e.Limit != want {
		t.Errorf("%s: limit %q, want %q", name, e.Limit, want)
	}
	if g.BudgetPassed != nil && (e.Budget != *g.BudgetPassed || e.Fixed != g.Fixed) {
		t.Errorf("%s: budget %d with fixed %d, want %d, %d", name, e.Budget, e.Fixed, *g.BudgetPassed, g.Fixed)
	}
	if e.TransientBytes != e.RequiredBytes-e.ResidentBytes {
		t.Errorf("%s: %d bytes transient of %d required, %d resident", name, e.TransientBytes, e.RequiredBytes, e.ResidentBytes)
	}
}

type goldenPlan struct {
	Name   string
	Files  []goldenFile
	Params goldenParams
	Plan   struct {
		Depth      int
		Budgets    []int64
		Infeasible *goldenInfeasible
		Error      *struct{ Argument string }
	}
	FitQueueSize json.RawMessage `json:"fit_queue_size"`
	Load         *struct {
		QueueSize  int `json:"queue_size"`
		Depth      int
		Budgets    []int64
		Infeasible *goldenInfeasible
	}
}

func (g *goldenPlan) stats() []FileStats {
	stats := make([]FileStats, len(g.Files))
	for i, f := range g.Files {
		stats[i] = FileStats{Path: f.Path, Kept: f.Kept, Span: f.Span, Largest: f.Largest, Resident: f.Resident}
	}
	return stats
}

var argumentNames = map[string]string{"Group": "group_size", "Multiplier": "transient_multiplier", "PerChunk": "chunk_overhead"}

func TestClassicPlanEqualsTheRealPlanner(t *testing.T) {
	eachGolden(t, "plan.jsonl", func(t *testing.T, _ string, v *goldenPlan) {
		stats, p := v.stats(), v.Params.params(len(v.Files))
		plan, err := Fit(stats, p)
		if v.Plan.Error != nil {
			var e *FitArgumentError
			if !errors.As(err, &e) || argumentNames[e.Argument] != v.Plan.Error.Argument {
				t.Errorf("%s: error %v, want one of %s", v.Name, err, v.Plan.Error.Argument)
			}
			return
		}
		v.checkFormulas(t, stats, p)
		if v.Load == nil {
			return // a state that the loader cannot come into
		}
		if v.Load.Infeasible != nil {
			e, _ := err.(*BudgetInfeasibleError)
			if e == nil {
				t.Errorf("%s: error %v, want infeasible", v.Name, err)
				return
			}
			v.Load.Infeasible.check(t, v.Name, e)
			return
		}
		if err != nil {
			t.Errorf("%s: %v", v.Name, err)
			return
		}
		var budgets []int64
		for _, f := range plan.Files {
			budgets = append(budgets, f.Budget)
		}
		if plan.QueueSize != v.Load.QueueSize || plan.Depth != v.Load.Depth || !slices.Equal(budgets, v.Load.Budgets) {
			t.Errorf("%s: queue %d, depth %d, budgets %v; want %d, %d, %v", v.Name, plan.QueueSize, plan.Depth, budgets,
				v.Load.QueueSize, v.Load.Depth, v.Load.Budgets)
		}
	})
}

// checkFormulas checks the parts that the loader puts together: the plan at the queue size as it was asked for, and the clamp.
func (g *goldenPlan) checkFormulas(t *testing.T, stats []FileStats, p PlanParams) {
	t.Helper()
	c := newClassic(stats, p)
	c.clone = 0
	if g.Params.YieldClone {
		c.clone = 1 // here it says that it is charged, not that there may be one to charge
	}
	depth := depthOf(p.QueueSize, p.Group)
	if depth != g.Plan.Depth {
		t.Errorf("%s: depth %d, want %d", g.Name, depth, g.Plan.Depth)
	}
	switch in := g.Plan.Infeasible; {
	case in != nil && in.Limit == "budget":
		if c.budget > 0 {
			t.Errorf("%s: budget %d, want none", g.Name, c.budget)
		}
	default:
		budgets, failed := c.budgets(depth)
		if !slices.Equal(budgets, g.Plan.Budgets) {
			t.Errorf("%s: budgets %v, want %v", g.Name, budgets, g.Plan.Budgets)
		}
		if in == nil {
			break
		}
		required := c.required(failed, depth, c.residents()[failed])
		if failed != in.Index || required.Int64() != in.Required {
			t.Errorf("%s: file %d requires %v, want %d, %d", g.Name, failed, required, in.Index, in.Required)
		}
	}
	want := "null"
	got := "null"
	if s := string(g.FitQueueSize); s != "" {
		want = s
	}
	if q, ok := c.fitQueue(p.QueueSize); ok {
		b, _ := json.Marshal(q)
		got = string(b)
	}
	if got != want {
		t.Errorf("%s: fitting queue size %s, want %s", g.Name, got, want)
	}
}

type goldenChunk struct {
	Tensors []string
	Ranges  [][2]int64
}

func chunkOf(f *FilePlan, c *Chunk, gap int64) goldenChunk {
	g := goldenChunk{Tensors: []string{}, Ranges: [][2]int64{}}
	for p := range f.Parts(c) {
		g.Tensors = append(g.Tensors, f.Tensors[p.Tensor].Name)
	}
	for _, r := range f.Ranges(c, gap) {
		g.Ranges = append(g.Ranges, [2]int64{r.Start, r.End})
	}
	return g
}

func TestClassicChunksEqualTheRealOnes(t *testing.T) {
	type vector struct {
		Name    string
		Header  int64
		Tensors []struct {
			Name       string
			Start, End int64
			Keep       bool
		}
		MaxChunk int64 `json:"max_chunk"`
		MergeGap int64 `json:"merge_gap"`
		Chunks   []goldenChunk
		Error    *struct {
			Tensor string
			Bytes  int64
		}
	}
	eachGolden(t, "chunks.jsonl", func(t *testing.T, _ string, v *vector) {
		f := &FilePlan{}
		for _, x := range v.Tensors {
			if x.Keep {
				f.Tensors = append(f.Tensors, TensorStats{Name: x.Name, Offset: v.Header + x.Start, Bytes: x.End - x.Start})
			}
		}
		chunks, err := cutClassic(f.Tensors, v.MaxChunk)
		if v.Error != nil {
			var e *tooLarge
			if !errors.As(err, &e) || e.tensor != v.Error.Tensor || e.bytes != v.Error.Bytes {
				t.Errorf("%s: error %v, want one of tensor %s with %d bytes", v.Name, err, v.Error.Tensor, v.Error.Bytes)
			}
			return
		}
		if err != nil {
			t.Errorf("%s: %v", v.Name, err)
		}
		got := []goldenChunk{}
		for i := range chunks {
			got = append(got, chunkOf(f, &chunks[i], v.MergeGap))
		}
		if diff := cmp.Diff(v.Chunks, got); diff != "" {
			t.Errorf("%s: chunks (-want +got):\n%s", v.Name, diff)
		}
	})
}

type goldenLoad struct {
	Name         string
	Set          string
	Files        []string
	Keep         []string
	Resident     []string
	Params       goldenParams
	Stats        []goldenFile
	CloneCharged bool `json:"clone_charged"`
	QueueSize    int  `json:"queue_size"`
	Depth        int
	Budgets      []int64
	Infeasible   *goldenInfeasible
	Batches      [][]*struct {
		File string
		goldenChunk
	}
}

// stats are the stats of the vector's files, from their headers, in its order.
func (g *goldenLoad) stats(t *testing.T, set *Set) []FileStats {
	t.Helper()
	in := func(names []string) func(*Tensor) bool {
		if names == nil {
			return nil
		}
		return func(x *Tensor) bool { return slices.Contains(names, x.Name) }
	}
	all := StatsOf(set, StatsOptions{Keep: in(g.Keep), Resident: in(g.Resident)})
	var stats []FileStats
	for _, name := range g.Files {
		i := slices.IndexFunc(all, func(s FileStats) bool { return filepath.Base(s.Path) == name })
		if i < 0 {
			t.Fatalf("%s: no file %s", g.Name, name)
		}
		s := all[i]
		s.Path = name
		stats = append(stats, s)
	}
	return stats
}

func openGolden(t *testing.T, sets map[string]*Set, folder, name string) *Set {
	t.Helper()
	path := filepath.Join(folder, "sets", name)
	if sets[path] == nil {
		set, err := Open(path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { set.Close() })
		sets[path] = set
	}
	return sets[path]
}

func TestClassicLoadEqualsTheRealLoader(t *testing.T) {
	sets := map[string]*Set{}
	eachGolden(t, "load.jsonl", func(t *testing.T, folder string, v *goldenLoad) {
		stats := v.stats(t, openGolden(t, sets, folder, v.Set))
		for i, s := range stats {
			got := goldenFile{s.Path, s.Kept, s.Span, s.Largest, s.Resident}
			if got != v.Stats[i] {
				t.Errorf("%s: stats %+v, want %+v", v.Name, got, v.Stats[i])
			}
		}
		p := v.Params.params(len(stats))
		if charged := newClassic(stats, p).clone == 1; charged != v.CloneCharged {
			t.Errorf("%s: clone charged is %v", v.Name, charged)
		}
		plan, err := Fit(stats, p)
		if v.Infeasible != nil {
			e, _ := err.(*BudgetInfeasibleError)
			if e == nil {
				t.Errorf("%s: error %v, want infeasible", v.Name, err)
				return
			}
			v.Infeasible.check(t, v.Name, e)
			return
		}
		if err != nil {
			t.Errorf("%s: %v", v.Name, err)
			return
		}
		for i, f := range plan.Files {
			if f.Budget != v.Budgets[i] {
				t.Errorf("%s: file %d: budget %d, want %d", v.Name, i, f.Budget, v.Budgets[i])
			}
		}
		if plan.QueueSize != v.QueueSize || plan.Depth != v.Depth {
			t.Errorf("%s: queue %d, depth %d; want %d, %d", v.Name, plan.QueueSize, plan.Depth, v.QueueSize, v.Depth)
		}
		n := 0
		for b := range plan.Batches() {
			if n == len(v.Batches) {
				t.Errorf("%s: more than %d batches", v.Name, n)
				break
			}
			for r, want := range v.Batches[n] {
				switch c := b.Chunks[r]; {
				case (c == nil) != (want == nil):
					t.Errorf("%s: batch %d, rank %d: chunk is %v", v.Name, n, r, c)
				case c != nil:
					f := &plan.Files[b.First+r]
					if diff := cmp.Diff(want.goldenChunk, chunkOf(f, c, MergeGap)); diff != "" || f.Path != want.File {
						t.Errorf("%s: batch %d, rank %d of %s, want %s (-want +got):\n%s", v.Name, n, r, f.Path, want.File, diff)
					}
				}
			}
			n++
		}
		if n != len(v.Batches) {
			t.Errorf("%s: %d batches, want %d", v.Name, n, len(v.Batches))
		}
		if plan.Peak > p.Budget {
			t.Errorf("%s: peak %d above the budget of %d", v.Name, plan.Peak, p.Budget)
		}
	})
}
