package prefixtree

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// checkSearch compares what a case knows of prices, family and searches.
func checkSearch(t *testing.T, g *golden, tree *Tree) {
	if g.Candidates == nil {
		return
	}
	costs := make([]Cost, len(g.Costs))
	for i, c := range g.Costs {
		costs[i] = c.cost()
	}
	var family []goldenCandidate
	for _, c := range tree.Family() {
		got := goldenCandidate{
			Labels: c.Labels, decided: decided{c.Decisions, metrics{c.Packed, c.Segments, c.Depth}}, Thresholds: c.Thresholds,
		}
		l := mustLayout(t, tree, c.Decisions)
		for i := range costs {
			s, err := costs[i].Score(l)
			if err != nil {
				t.Fatal(err)
			}
			got.Work = append(got.Work, s.Work)
		}
		family = append(family, got)
	}
	exported := cmp.AllowUnexported(goldenCandidate{}, goldenSelected{}, decided{})
	if diff := cmp.Diff(g.Candidates, family, exported); diff != "" {
		t.Errorf("family (-want +got):\n%s", diff)
	}
	for _, c := range g.Candidates {
		for _, label := range c.Labels {
			if got, err := tree.Anchor(label); err != nil || !slices.Equal(got, c.Decisions) {
				t.Errorf("anchor %s: got %v, %v, want %v", label, got, err, c.Decisions)
			}
		}
	}
	check := func(cost *Cost, want goldenSelected) {
		budget := want.Search.Budget
		if budget == 0 {
			budget = -1
		}
		c := mustSelect(t, tree, cost, Options{Bounded: true, Budget: budget, Digest: true})
		got := goldenSelected{
			decided: decided{c.Decisions, metrics{c.Score.Packed, c.Score.Segments, c.Score.Depth}},
			Work:    c.Score.Work, Mandatory: c.Mandatory,
		}
		st, s := &c.Stats, &got.Search
		s.Budget, s.Family, s.Attempts, s.Scored, s.Repeats = st.Budget, st.Family, st.Attempts, st.Scored, st.Repeats
		s.Tiers, s.Orders, s.Stop, s.Digest = st.Tiers, st.Orders, st.Stop, st.Digest
		if diff := cmp.Diff(want, got, exported); diff != "" {
			t.Errorf("bounded search under %v, budget %d (-want +got):\n%s", cost, want.Search.Budget, diff)
		}
		ours := mustSelect(t, tree, cost, Options{})
		if ours.Score.Compare(c.Score) > 0 {
			t.Errorf("under %v ours is %+v, dearer than the bounded search's %+v", cost, ours.Score, c.Score)
		}
	}
	for i, want := range g.Selected {
		check(&costs[i], want)
		ours := mustSelect(t, tree, &costs[i], Options{})
		if o := g.Optimum[i]; o != nil && (ours.Score.Work != *o || !ours.Optimal) {
			t.Errorf("under %v: got %+v, the optimum is %d", costs[i], ours, *o)
		}
		if g.Exhaustive != nil {
			best := g.Exhaustive.Best[i]
			if ours.Score.Work != best.Work || !slices.Equal(ours.Decisions, best.Decisions) || !ours.Optimal {
				t.Errorf("under %v: got %+v, exhaustive %+v", costs[i], ours, best)
			}
		}
	}
	starved := goldenCost{CP: 1, Layers: 4}.cost()
	for _, want := range g.Starved {
		check(&starved, want)
	}
}

func mustSelect(t testing.TB, tree *Tree, c *Cost, o Options) *Choice {
	t.Helper()
	choice, err := Select(tree, c, o)
	if err != nil {
		t.Fatal(err)
	}
	return choice
}

// goldenTable is a case of table.jsonl: "layouts" are other things there than in packed.jsonl.
type goldenTable struct {
	golden
	Thresholds []int         `json:"thresholds"`
	Prices     []goldenPrice `json:"prices"`
	Layouts    []struct {
		decided
		Below []int64 `json:"below"`
	} `json:"layouts"`
}

func TestVersion2TablesOfTheStudiedPlannerInTestdata(t *testing.T) {
	path := filepath.Join("testdata", "table.jsonl")
	if *writeTestdata {
		var out []byte
		for _, line := range tableLines(t, filepath.Join(sharedGolden, "table.jsonl")) {
			// Cases in which there is something to choose, unchanged.
			if g := parseTable(t, line); len(g.Layouts) > 3 && len(out) < 24_000 {
				out = append(append(out, line...), '\n')
			}
		}
		if err := os.WriteFile(path, out, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	runTables(t, path)
}

func TestVersion2TablesOfTheStudiedPlannerBesideTheRepository(t *testing.T) {
	path := filepath.Join(sharedGolden, "table.jsonl")
	if _, err := os.Stat(path); err != nil {
		t.Skipf("SKIPPED, ONLY THE SUBSET IN testdata WAS COMPARED: %v", err)
	}
	runTables(t, path)
}

func tableLines(t *testing.T, path string) [][]byte {
	t.Helper()
	file, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return bytes.Split(bytes.TrimSpace(file), []byte("\n"))
}

func parseTable(t *testing.T, line []byte) *goldenTable {
	t.Helper()
	g := new(goldenTable)
	if err := json.Unmarshal(line, g); err != nil {
		t.Fatal(err)
	}
	return g
}

func runTables(t *testing.T, path string) {
	for _, line := range tableLines(t, path) {
		g := parseTable(t, line)
		t.Run(g.Name, func(t *testing.T) { checkTables(t, g) })
	}
}

func checkTables(t *testing.T, g *goldenTable) {
	tree := mustBuild(t, g.tokens())
	for i, want := range g.Layouts {
		l := mustLayout(t, tree, want.Decisions)
		if got := metricsOf(l); got != want.metrics {
			t.Errorf("layout of %v: got %+v, want %+v", want.Decisions, got, want.metrics)
		}
		for k, threshold := range g.Thresholds {
			if got := l.Features(threshold).Short; got != want.Below[k] {
				t.Errorf("layout of %v: %d spans below %d, want %d", want.Decisions, got, threshold, want.Below[k])
			}
		}
		for _, p := range g.Prices {
			cost := p.cost()
			if got, err := cost.Score(l); err != nil || got.Work != p.Work[i] {
				t.Errorf("layout of %v under %s: got %+v, %v, want %d", want.Decisions, p.Table, got, err, p.Work[i])
			}
		}
	}
	for _, p := range g.Prices {
		cost := p.cost()
		got := mustSelect(t, tree, &cost, Options{Bounded: true})
		if got.Score.Work != p.SelectedWork || !slices.Equal(got.Decisions, p.Selected) {
			t.Errorf("under %s: got %+v, want %v for %d", p.Table, got, p.Selected, p.SelectedWork)
		}
		if ours := mustSelect(t, tree, &cost, Options{}); ours.Score.Compare(got.Score) > 0 || !ours.Optimal {
			t.Errorf("under %s: ours is %+v, the bounded search's %+v", p.Table, ours, got)
		}
	}
}

func (p *goldenPrice) cost() Cost {
	return Version2(p.Table, p.Coefficients, Facts{Layers: p.Layers, Recurrent: p.GDNLayers, ContextParallel: p.CP, TensorParallel: p.TP})
}
