package ladder

import (
	"bufio"
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/trainerrank/engine/forward/prefixtree"
	"github.com/trainerrank/engine/profile"
)

// Vectors of the studied planner (shared/golden/planner/README.md). The whole set lies beside the repository; testdata keeps a subset, written by -write-testdata.
const sharedGolden = "../../shared/golden/planner"

var writeTestdata = flag.Bool("write-testdata", false, "rewrite testdata/*.jsonl from the shared vectors")

type goldenRows struct {
	Name   string    `json:"name"`
	Rows   [][]int32 `json:"rows"`
	Recipe *struct {
		Nodes [][2]int `json:"nodes"`
		Rows  []int    `json:"rows"`
	} `json:"recipe"`
	Groups []int `json:"groups"`
}

// tokens are the rows, made by the recipe if there is one.
func (g *goldenRows) tokens() [][]int32 {
	if g.Recipe == nil {
		return g.Rows
	}
	whole := make([][]int32, len(g.Recipe.Nodes))
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

// visit reads the trees of some rows. Groups are renumbered by first occurrence.
func visit(t testing.TB, rows [][]int32, groups []int) *Visit {
	t.Helper()
	number, lists := map[int]int{}, [][][]int32{}
	dense := slices.Clone(groups)
	for r, g := range groups {
		if g < 0 {
			continue
		}
		if _, seen := number[g]; !seen {
			number[g] = len(lists)
			lists = append(lists, nil)
		}
		dense[r] = number[g]
		lists[dense[r]] = append(lists[dense[r]], rows[r])
	}
	trees := make([]*prefixtree.Tree, len(lists))
	for g := range lists {
		tree, err := prefixtree.Build(lists[g])
		if err != nil {
			t.Fatal(err)
		}
		trees[g] = tree
	}
	v, err := NewVisit(dense, trees)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func eachLine[T any](t *testing.T, path string, f func(t *testing.T, c *T)) {
	t.Helper()
	file, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	lines := bufio.NewScanner(file)
	lines.Buffer(nil, 1<<20)
	n := 0
	for ; lines.Scan(); n++ {
		c := new(T)
		if err := json.Unmarshal(lines.Bytes(), c); err != nil {
			t.Fatalf("%s: case %d: %v", path, n, err)
		}
		f(t, c)
		if t.Failed() {
			t.Fatalf("%s: case %d", path, n)
		}
	}
	if lines.Err() != nil || n == 0 {
		t.Fatalf("%s: %d cases, %v", path, n, lines.Err())
	}
	t.Logf("%s: %d cases", path, n)
}

// golden runs a file of testdata, and the whole of it where it lies beside the repository.
func golden[T any](t *testing.T, name string, keep int, f func(t *testing.T, c *T)) {
	local, shared := filepath.Join("testdata", name), filepath.Join(sharedGolden, name)
	if *writeTestdata {
		subset(t, shared, local, keep)
	}
	eachLine(t, local, f)
	if _, err := os.Stat(shared); err != nil {
		t.Logf("ONLY THE SUBSET IN testdata WAS COMPARED: %v", err)
		return
	}
	eachLine(t, shared, f)
}

// subset keeps every so many-th line, and of these the ones that are not long.
func subset(t *testing.T, from, to string, every int) {
	text, err := os.ReadFile(from)
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	for i, line := range bytes.SplitAfter(text, []byte("\n")) {
		if i%every == 0 && len(line) < 4000 {
			out.Write(line)
		}
	}
	if err := os.WriteFile(to, out.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
}

type goldenCut struct {
	Count  int     `json:"count"`
	Chunks [][]int `json:"chunks"`
}

func (c *goldenCut) check(t *testing.T, order []int, masses []int64) {
	t.Helper()
	var got [][]int
	for _, r := range runs(Cut(masses, c.Count)) {
		got = append(got, order[r.lo:r.hi])
	}
	if diff := cmp.Diff(c.Chunks, got); diff != "" {
		t.Errorf("%v cut into %d (-want +got):\n%s", masses, c.Count, diff)
	}
}

func TestGoldenOrders(t *testing.T) {
	type orders struct {
		goldenRows
		Order []int       `json:"order"`
		Cuts  []goldenCut `json:"cuts"`
	}
	golden(t, "order.jsonl", 8, func(t *testing.T, c *orders) {
		rows := c.tokens()
		v := visit(t, rows, c.Groups)
		if diff := cmp.Diff(c.Order, v.Order); diff != "" {
			t.Errorf("%s: order (-want +got):\n%s", c.Name, diff)
		}
		masses := make([]int64, len(rows))
		for i, r := range c.Order {
			masses[i] = int64(len(rows[r]))
		}
		for _, cut := range c.Cuts {
			cut.check(t, c.Order, masses)
		}
		// What prefixes rest on: the order of the first requests is the order without the others.
		for m := 1; m < len(rows); m++ {
			rest := slices.DeleteFunc(slices.Clone(c.Order), func(r int) bool { return r >= m })
			if diff := cmp.Diff(rest, visit(t, rows[:m], c.Groups[:m]).Order); diff != "" {
				t.Errorf("%s: order of the first %d (-want +got):\n%s", c.Name, m, diff)
			}
		}
	})
}

func TestGoldenCuts(t *testing.T) {
	type cuts struct {
		Masses []int64     `json:"masses"`
		Cuts   []goldenCut `json:"cuts"`
	}
	golden(t, "cut.jsonl", 6, func(t *testing.T, c *cuts) {
		order := make([]int, len(c.Masses))
		for i := range order {
			order[i] = i
		}
		for _, cut := range c.Cuts {
			cut.check(t, order, c.Masses)
		}
	})
}

func TestGoldenRungs(t *testing.T) {
	type rung struct {
		Required    []int64 `json:"required"`
		Retained    []int64 `json:"retained"`
		Total       int64   `json:"total"`
		Execution   []int   `json:"execution"`
		RunningPeak int64   `json:"running_peak"`
	}
	golden(t, "rung.jsonl", 5, func(t *testing.T, c *rung) {
		if got := Total(c.Required, c.Retained); got != c.Total {
			t.Errorf("total %d, want %d", got, c.Total)
		}
		if got := Execution(c.Required, c.Retained); !slices.Equal(got, c.Execution) {
			t.Errorf("execution %v, want %v", got, c.Execution)
		}
		if got := RunningPeak(c.Required, c.Retained); got != c.RunningPeak {
			t.Errorf("running peak %d, want %d", got, c.RunningPeak)
		}
	})
}

// house plans rows with the real search and prices them by a line.
type house struct {
	t      testing.TB
	rows   [][]int32
	groups []int
	cost   prefixtree.Cost
	price  struct {
		Output       int64 `json:"output"`
		Fixed        int64 `json:"fixed"`
		Rate         int64 `json:"rate"`
		RetainedRate int64 `json:"retained_rate"`
	}
	visit *Visit
}

type housePlan struct{ requests []int }

func (h *house) Plan(requests []int, l Layout) (*Plan, error) {
	p := &Plan{Work: housePlan{requests}}
	lists, order := map[int][][]int32{}, []int{}
	for _, r := range requests {
		if g := h.groups[r]; g >= 0 {
			if lists[g] == nil {
				order = append(order, g)
			}
			lists[g] = append(lists[g], h.rows[r])
		}
	}
	for _, g := range order {
		tree, err := prefixtree.Build(lists[g])
		if err != nil {
			return nil, err
		}
		layout := tree.FullSharing()
		if l == CostOptimal {
			// The studied search, step by step.
			choice, err := prefixtree.Select(tree, &h.cost, prefixtree.Options{Bounded: true})
			if err != nil {
				return nil, err
			}
			if layout, err = tree.Layout(choice.Decisions); err != nil {
				return nil, err
			}
		}
		p.Layouts = append(p.Layouts, layout)
		p.Packed += layout.Packed
	}
	return p, nil
}

func (h *house) of(requests []int, packed int) (profile.Price, error) {
	logical := int64(0)
	for _, r := range requests {
		if h.groups[r] >= 0 {
			logical += int64(len(h.rows[r]))
		}
	}
	out := h.price.Output * logical
	return profile.Price{
		Required: out + h.price.Fixed + h.price.Rate*int64(packed), Retained: out + h.price.RetainedRate*int64(packed), Outputs: out,
		Basis: profile.Learned, Trusted: true,
	}, nil
}

func (h *house) Price(p *Plan, _ Retention) (profile.Price, error) {
	return h.of(p.Work.(housePlan).requests, p.Packed)
}

func (h *house) Minimal(requests []int, _ Retention) (profile.Price, error) {
	packed := h.visit.Packed(requests)
	if len(requests)%3 == 0 { // the short way against the long one, now and then
		p, err := h.Plan(requests, FullSharing)
		if err != nil || p.Packed != packed {
			h.t.Fatalf("%v: counted %d tokens, packed %d, %v", requests, packed, p.Packed, err)
		}
	}
	return h.of(requests, packed)
}

func (h *house) Bound(requests []int, r Retention) (profile.Price, error) {
	return h.Minimal(requests, r)
}

type goldenLadder struct {
	goldenRows
	Cost struct {
		CP     int  `json:"cp"`
		Layers int  `json:"layers"`
		GDN    bool `json:"gdn"`
	} `json:"cost"`
	Price   json.RawMessage `json:"price"`
	Usable  int64           `json:"usable"`
	Unsplit []struct {
		Layout   Layout `json:"layout"`
		Required int64  `json:"required"`
	} `json:"unsplit"`
	Rungs []struct {
		Count      int     `json:"count"`
		Chunks     [][]int `json:"chunks"`
		LowerBytes int64   `json:"lower_bytes"`
		Priced     []struct {
			Layout   Layout  `json:"layout"`
			Total    int64   `json:"total_bytes"`
			Required []int64 `json:"required"`
			Retained []int64 `json:"retained"`
		} `json:"priced"`
	} `json:"rungs"`
	Verdict    Verdict `json:"verdict"`
	Layout     Layout  `json:"layout"`
	Subforward [][]int `json:"subforward_request_indices"`
	Packed     []int   `json:"packed_tokens"`
	Predicted  int64   `json:"predicted_peak_bytes"`
}

func (c *goldenLadder) house(t *testing.T) (*house, *Call) {
	h := &house{t: t, rows: c.tokens(), groups: c.Groups}
	f := prefixtree.Facts{Layers: c.Cost.Layers, ContextParallel: c.Cost.CP}
	if c.Cost.GDN {
		f.Recurrent = f.Layers
	}
	h.cost = prefixtree.Version1(f)
	if err := json.Unmarshal(c.Price, &h.price); err != nil {
		t.Fatal(err)
	}
	h.visit = visit(t, h.rows, h.groups)
	call := &Call{Order: h.visit.Order}
	for r, row := range h.rows {
		q := Request{Group: h.groups[r], Tokens: len(row), Grad: true}
		if q.Group >= 0 {
			q.Outputs = h.price.Output * int64(len(row))
		}
		call.Requests = append(call.Requests, q)
	}
	return h, call
}

// classic writes a classic admission as the vectors do.
func (c *goldenLadder) classic(a *Admission) goldenLadder {
	got := goldenLadder{goldenRows: c.goldenRows, Cost: c.Cost, Price: c.Price, Usable: a.UsableLimitBytes, Verdict: a.Verdict}
	for _, r := range a.Rungs {
		if r.Count == 1 {
			got.Unsplit = append(got.Unsplit, struct {
				Layout   Layout `json:"layout"`
				Required int64  `json:"required"`
			}{r.Layout, r.TotalBytes})
			continue
		}
		if n := len(got.Rungs); n == 0 || got.Rungs[n-1].Count != r.Count {
			got.Rungs = slices.Grow(got.Rungs, 1)[:n+1]
			got.Rungs[n].Count, got.Rungs[n].Chunks, got.Rungs[n].LowerBytes = r.Count, r.Chunks, r.LowerBytes
		}
		if r.Layout != "" {
			last := &got.Rungs[len(got.Rungs)-1]
			n := len(last.Priced)
			last.Priced = slices.Grow(last.Priced, 1)[:n+1]
			last.Priced[n].Layout, last.Priced[n].Total, last.Priced[n].Required, last.Priced[n].Retained = r.Layout, r.TotalBytes, r.Required, r.Retained
		}
	}
	if a.Verdict != Refused {
		got.Layout, got.Subforward, got.Predicted = a.Packing, a.SubforwardRequestIndices, a.PredictedPeakBytes
		for _, chunk := range a.Chunks {
			got.Packed = append(got.Packed, chunk.Plan.Packed)
		}
	}
	return got
}

func TestGoldenLadders(t *testing.T) {
	golden(t, "ladder.jsonl", 4, func(t *testing.T, c *goldenLadder) {
		h, call := c.house(t)
		classic, err := Search(call, h, h, c.Usable, Options{Classic: true})
		if err != nil {
			t.Fatal(err)
		}
		want := *c
		if len(want.Rungs) == 0 {
			want.Rungs = nil
		}
		for i := range want.Rungs {
			if len(want.Rungs[i].Priced) == 0 {
				want.Rungs[i].Priced = nil
			}
		}
		if diff := cmp.Diff(want, c.classic(classic), cmp.AllowUnexported(goldenLadder{})); diff != "" {
			t.Errorf("%s (-want +got):\n%s", c.Name, diff)
		}

		// Ours admits whatever the studied one admits, in no more subforwards; with gradients by the same inequality.
		for _, grad := range []bool{true, false} {
			for r := range call.Requests {
				call.Requests[r].Grad = grad
			}
			ours, err := Search(call, h, h, c.Usable, Options{Retentions: []Retention{Stored}})
			if err != nil {
				t.Fatal(err)
			}
			checkAdmission(t, call, ours)
			if classic.Verdict != Refused && (ours.Verdict == Refused || ours.SubforwardCount() > classic.SubforwardCount()) {
				t.Errorf("%s, gradients %v: upstream runs it in %d, ours:\n%s", c.Name, grad, classic.SubforwardCount(), ours)
			}
			if ours.Searched > 1+ours.SubforwardCount() {
				t.Errorf("%s: %d layouts were searched for %d subforwards: more than one rung", c.Name, ours.Searched, ours.SubforwardCount())
			}
			checkHints(t, call, h, h, ours, Options{Retentions: []Retention{Stored}})
		}
	})
}
