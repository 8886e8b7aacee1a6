package prefixtree

import (
	"bufio"
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// Vectors of the studied planner (shared/golden/planner/README.md). The whole set lies beside the repository; a subset is kept in testdata, with
// the fields that this package answers for, and is written by -write-testdata.
const sharedGolden = "../../../shared/golden/planner"

var writeTestdata = flag.Bool("write-testdata", false, "rewrite testdata/*.jsonl from the shared vectors")

type metrics struct {
	Packed   int `json:"packed"`
	Segments int `json:"segments"`
	Depth    int `json:"depth"`
}

type decided struct {
	Decisions []int `json:"decisions"`
	metrics
}

type goldenCost struct {
	CP     int  `json:"cp"`
	Layers int  `json:"layers"`
	GDN    bool `json:"gdn"`
}

func (c goldenCost) cost() Cost {
	f := Facts{Layers: c.Layers, ContextParallel: c.CP}
	if c.GDN {
		f.Recurrent = c.Layers
	}
	return Version1(f)
}

type goldenCandidate struct {
	Labels []string `json:"labels"`
	decided
	Thresholds []int   `json:"thresholds"`
	Work       []int64 `json:"work"`
}

type goldenSelected struct {
	decided
	Work      int64 `json:"work"`
	Mandatory bool  `json:"mandatory"`
	Search    struct {
		Budget   int    `json:"budget"`
		Family   int    `json:"family"`
		Attempts int    `json:"attempts"`
		Scored   int    `json:"scored"`
		Repeats  int    `json:"repeats"`
		Tiers    int    `json:"tiers"`
		Orders   int    `json:"orders"`
		Stop     Stop   `json:"stop"`
		Digest   string `json:"digest"`
	} `json:"search"`
}

type goldenExhaustive struct {
	Layouts int `json:"layouts"`
	Best    []struct {
		Decisions []int `json:"decisions"`
		Work      int64 `json:"work"`
	} `json:"best"`
}

// goldenPrice is a fitted table of the studied planner and the works of a case's layouts under it.
type goldenPrice struct {
	CP           int                  `json:"cp"`
	TP           int                  `json:"tp"`
	Layers       int                  `json:"layers"`
	GDNLayers    int                  `json:"gdn_layers"`
	Table        string               `json:"table"`
	Coefficients Version2Coefficients `json:"coefficients"`
	Work         []int64              `json:"work"`
	Selected     []int                `json:"selected"`
	SelectedWork int64                `json:"selected_work"`
}

type goldenSpan struct {
	Parent int   `json:"parent"`
	Start  int   `json:"start"`
	End    int   `json:"end"`
	Rows   []int `json:"rows"`
	Offset int   `json:"offset"`
}

type goldenPacked struct {
	Decisions []int        `json:"decisions"`
	Tokens    []int32      `json:"tokens"`
	Positions []int32      `json:"positions"`
	SegmentOf []int32      `json:"segment_of"`
	Segments  []goldenSpan `json:"segments"`
	Gather    [][]int32    `json:"gather"`
}

type golden struct {
	Name   string    `json:"name"`
	Rows   [][]int32 `json:"rows,omitempty"`
	Recipe *struct {
		Nodes [][2]int `json:"nodes"`
		Rows  []int    `json:"rows"`
	} `json:"recipe,omitempty"`

	Logical     int               `json:"logical,omitempty"`
	Tree        *Tree             `json:"tree,omitempty"`
	NoSharing   *metrics          `json:"no_sharing,omitempty"`
	FullSharing *metrics          `json:"full_sharing,omitempty"`
	Costs       []goldenCost      `json:"costs,omitempty"`
	Candidates  []goldenCandidate `json:"candidates,omitempty"`
	Selected    []goldenSelected  `json:"selected,omitempty"`
	Starved     []goldenSelected  `json:"starved,omitempty"`
	Exhaustive  *goldenExhaustive `json:"exhaustive,omitempty"`
	Optimum     []*int64          `json:"optimum_work,omitempty"`
	Layout      []Span            `json:"layout,omitempty"`
	Layouts     []goldenPacked    `json:"layouts,omitempty"`
}

// tokens are the case's rows, made by its recipe if it has one.
func (g *golden) tokens() [][]int32 {
	if g.Recipe == nil {
		return g.Rows
	}
	whole := make([][]int32, len(g.Recipe.Nodes)) // parents precede children
	for i, node := range g.Recipe.Nodes {
		if node[0] >= 0 {
			whole[i] = slices.Clone(whole[node[0]])
		}
		for j := range node[1] {
			whole[i] = append(whole[i], int32(((i+1)*7919+j*104729)%151936))
		}
	}
	rows := make([][]int32, len(g.Recipe.Rows))
	for r, node := range g.Recipe.Rows {
		rows[r] = whole[node]
	}
	return rows
}

func readGolden(t *testing.T, path string) (cases []*golden) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		g := new(golden)
		if err := json.Unmarshal(lines.Bytes(), g); err != nil {
			t.Fatalf("%s: case %d: %v", path, len(cases), err)
		}
		cases = append(cases, g)
	}
	if err := lines.Err(); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	return cases
}

// checkGolden compares everything that a case knows.
func checkGolden(t *testing.T, g *golden) {
	rows := g.tokens()
	tree, err := Build(rows)
	if err != nil {
		t.Fatal(err)
	}
	if g.Tree != nil {
		want := *g.Tree
		want.Logical = g.Logical
		if diff := cmp.Diff(&want, tree); diff != "" {
			t.Errorf("tree (-want +got):\n%s", diff)
		}
		for _, side := range []struct {
			name string
			got  *Layout
			want *metrics
		}{{"no sharing", tree.NoSharing(), g.NoSharing}, {"full sharing", tree.FullSharing(), g.FullSharing}} {
			if got := metricsOf(side.got); got != *side.want {
				t.Errorf("%s: got %+v, want %+v", side.name, got, *side.want)
			}
		}
	}
	var layouts []decided
	for _, c := range g.Candidates {
		layouts = append(layouts, c.decided)
	}
	for _, c := range g.Selected {
		layouts = append(layouts, c.decided)
	}
	for _, c := range layouts {
		l := mustLayout(t, tree, c.Decisions)
		if got := metricsOf(l); got != c.metrics {
			t.Errorf("layout of %v: got %+v, want %+v", c.Decisions, got, c.metrics)
		}
		mustPack(t, l, rows)
	}
	if g.Layout != nil {
		got := slices.Clone(mustLayout(t, tree, g.Selected[0].Decisions).Spans)
		for i := range got {
			got[i].Offset = 0 // not in the file
		}
		if diff := cmp.Diff(g.Layout, got); diff != "" {
			t.Errorf("spans of %v (-want +got):\n%s", g.Selected[0].Decisions, diff)
		}
	}
	checkSearch(t, g, tree)
	for _, want := range g.Layouts {
		b := mustPack(t, mustLayout(t, tree, want.Decisions), rows)
		got := goldenPacked{Decisions: want.Decisions, Tokens: b.Tokens, Positions: b.Positions, SegmentOf: b.SegmentOf}
		for _, s := range b.Spans {
			got.Segments = append(got.Segments, goldenSpan(s))
		}
		for r := range rows {
			got.Gather = append(got.Gather, b.Gather(r, nil))
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("packed form of %v (-want +got):\n%s", want.Decisions, diff)
		}
	}
}

func metricsOf(l *Layout) metrics { return metrics{l.Packed, len(l.Spans), l.Depth} }

func mustLayout(t testing.TB, tree *Tree, decisions []int) *Layout {
	t.Helper()
	l, err := tree.Layout(decisions)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func mustPack(t testing.TB, l *Layout, rows [][]int32) *Batch {
	t.Helper()
	b, err := l.Pack(rows)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.CheckRows(rows); err != nil {
		t.Fatal(err)
	}
	return b
}

// goldenFiles and how many of their first cases testdata keeps, where they are small enough.
var goldenFiles = []struct {
	name string
	keep int
}{{"edge", 23}, {"random", 12}, {"large", 11}, {"packed", 24}}

func TestGoldenVectorsInTestdata(t *testing.T) {
	for _, f := range goldenFiles {
		path := filepath.Join("testdata", f.name+".jsonl")
		if *writeTestdata {
			writeSubset(t, filepath.Join(sharedGolden, f.name+".jsonl"), path, f.keep)
		}
		runGolden(t, f.name, readGolden(t, path))
	}
}

func TestGoldenVectorsBesideTheRepository(t *testing.T) {
	for _, f := range goldenFiles {
		path := filepath.Join(sharedGolden, f.name+".jsonl")
		if _, err := os.Stat(path); err != nil {
			t.Skipf("SKIPPED, ONLY THE SUBSET IN testdata WAS COMPARED: %v", err)
		}
		runGolden(t, f.name, readGolden(t, path))
	}
}

func runGolden(t *testing.T, name string, cases []*golden) {
	if len(cases) == 0 {
		t.Errorf("%s: no cases", name)
	}
	for _, g := range cases {
		t.Run(name+"/"+g.Name, func(t *testing.T) { checkGolden(t, g) })
	}
}

// writeSubset keeps the first cases of a file that are not large, without the fields that are not ours.
func writeSubset(t *testing.T, from, to string, keep int) {
	var out bytes.Buffer
	for _, g := range readGolden(t, from) {
		line, err := json.Marshal(g)
		if err != nil {
			t.Fatal(err)
		}
		if keep > 0 && len(line) < 16_000 {
			keep--
			out.Write(line)
			out.WriteByte('\n')
		}
	}
	if err := os.WriteFile(to, out.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestPrintedForms(t *testing.T) {
	tree, err := Build([][]int32{{1, 2, 3, 4}, {1, 2, 5}, {9}, {1, 2, 3, 4}})
	if err != nil {
		t.Fatal(err)
	}
	full := tree.FullSharing()
	batch := mustPack(t, full, [][]int32{{1, 2, 3, 4}, {1, 2, 5}, {9}, {1, 2, 3, 4}})
	spans := []string{
		"  0: [0,2) 2 tokens, rows 0-1,3",
		"    1: [2,4) 2 tokens, rows 0,3",
		"    2: [2,3) 1 token, row 1",
		"  3: [0,1) 1 token, row 2",
	}
	for _, c := range []struct {
		got  string
		head string
	}{
		{tree.String(), "4 rows, 12 tokens, 4 segments, 2 decisions"},
		{full.String(), "4 rows, 12 tokens packed into 6, 4 spans, 2 levels, sharing 0-1"},
		{batch.String(), "4 rows, 6 packed tokens in 4 spans"},
	} {
		want := strings.Join(append([]string{c.head}, spans...), "\n") + "\n"
		if diff := cmp.Diff(want, c.got); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	}
	wantJSON := `{"segments":[{"parent":-1,"start":0,"end":4,"rows":[0]},{"parent":-1,"start":0,"end":4,"rows":[3]},` +
		`{"parent":-1,"start":0,"end":3,"rows":[1]},{"parent":-1,"start":0,"end":1,"rows":[2]}],"decisions":[],"depth":1}`
	if got, err := json.Marshal(tree.NoSharing()); err != nil || string(got) != wantJSON {
		t.Errorf("got %s, %v, want %s", got, err, wantJSON)
	}
}
