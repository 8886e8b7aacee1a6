package main

import (
	"bytes"
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"gonum.org/v1/gonum/mat"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward/prefixtree"
	"github.com/trainerrank/engine/internal/builtin"
	"github.com/trainerrank/engine/trainerrank"
)

// The solution satisfies the conditions that only the least of all can (Karush, Kuhn and Tucker): the sum of squares falls in no direction that is allowed.
func TestNonNegativeIsTheLeast(t *testing.T) {
	positive := 0
	for seed := range uint64(300) {
		r := random(seed)
		m, n := 1+r.IntN(20), 1+r.IntN(5)
		a, b := mat.NewDense(m, n, nil), make([]float64, m)
		for i := range m {
			for j := range n {
				a.Set(i, j, r.NormFloat64()*math.Pow(10, float64(j-2)))
			}
			b[i] = r.NormFloat64()
		}
		if n > 1 && r.IntN(4) == 0 { // columns that depend on each other
			for i := range m {
				a.Set(i, 1, 3*a.At(i, 0))
			}
		}
		x, least := nonNegative(a, b)
		if x == nil { // then 0 is the best
			x, least = make([]float64, n), mat.Dot(mat.NewVecDense(m, b), mat.NewVecDense(m, b))
		}
		var off, slope mat.VecDense
		off.MulVec(a, mat.NewVecDense(n, x))
		off.SubVec(&off, mat.NewVecDense(m, b))
		slope.MulVec(a.T(), &off)
		if got := mat.Dot(&off, &off); math.Abs(got-least) > 1e-9*(1+least) {
			t.Errorf("seed %d: the sum of squares is %g, said to be %g", seed, got, least)
		}
		for j := range n {
			size := mat.Norm(a.ColView(j), 2) + 1e-300
			if x[j] < 0 || slope.AtVec(j)/size < -1e-7 || x[j] > 0 && math.Abs(slope.AtVec(j))/size > 1e-7 {
				t.Errorf("seed %d: x = %v, slope %v", seed, x, mat.Formatted(slope.T()))
			}
			positive += int(count(x[j] > 0))
		}
	}
	if positive < 300 {
		t.Errorf("only %d elements are positive", positive)
	}
}

// drawn are cells without times.
func drawn(t *testing.T, n, vocab int) []*cell {
	r := random(5)
	list := make([]*cell, n)
	for i := range list {
		var err error
		if list[i], err = newCell(drawRows(r, vocab, 2048)); err != nil {
			t.Fatal(err)
		}
	}
	return list
}

// Calls are of the size that was asked for, and their first and last layouts are the one without sharing and the one that shares everything.
func TestCellsHaveBothExtremes(t *testing.T) {
	most := 0
	for _, c := range drawn(t, 200, 1000) {
		first, last, tokens := c.layouts[0].layout, c.layouts[len(c.layouts)-1].layout, 0
		for _, row := range c.rows {
			tokens += len(row)
		}
		tree, err := prefixtree.Build(c.rows)
		if err != nil {
			t.Fatal(err)
		}
		if tokens > 2048 || tokens < 100 || first.Packed != tokens || last.Packed != tree.FullSharing().Packed || len(c.layouts) > maxLayouts {
			t.Errorf("%d rows of %d tokens: %d layouts, of %d to %d tokens", len(c.rows), tokens, len(c.layouts), first.Packed, last.Packed)
		}
		most = max(most, len(c.layouts))
	}
	if most < maxLayouts {
		t.Errorf("no call has more than %d layouts", most)
	}
}

// Times that are made of coefficients give them back, whatever constant each call has beside, and the table orders all layouts of other calls.
func TestFitFindsTheCoefficients(t *testing.T) {
	want := prefixtree.Coefficients{Token: 20_000_000, Pair: 3_000, Segment: 7_000_000, Short: 30_000_000, Level: 100_000_000, ShortBelow: 16}
	const layers = 12
	cells := drawn(t, 60, 1000)
	made := prefixtree.Table{Coefficients: want}
	cost := made.Cost(prefixtree.Facts{Layers: layers})
	for i, c := range cells {
		for j := range c.layouts {
			l := &c.layouts[j]
			work, err := cost.Work(l.layout.Features(cost.ShortBelow))
			if err != nil {
				t.Fatal(err)
			}
			l.seconds = float64(work)/1e12 + 0.01*float64(i%7)
		}
	}
	got, err := fit(cells[:30], layers)
	if err != nil {
		t.Fatal(err)
	}
	near := func(a, b int64) bool { return math.Abs(float64(a-b)) <= 1e-3*float64(b) }
	if !near(got.Token, want.Token) || !near(got.Pair, want.Pair) || !near(got.Segment, want.Segment) || !near(got.Short, want.Short) || !near(got.Level, want.Level) ||
		got.ShortBelow != want.ShortBelow {
		t.Errorf("%+v, not %+v", got, want)
	}
	fitted := prefixtree.Table{Coefficients: got}
	cost = fitted.Cost(prefixtree.Facts{Layers: layers})
	e, err := judged(cells[30:], &cost)
	if err != nil {
		t.Fatal(err)
	}
	if e.Cells != 30 || e.Pairs < 60 || e.Ordered != e.Pairs || e.MaxRegret != 0 {
		t.Errorf("%+v", e)
	}
	wrong := prefixtree.Table{Coefficients: prefixtree.Coefficients{Segment: 1, Level: 1}}
	cost = wrong.Cost(prefixtree.Facts{Layers: layers})
	if e, err = judged(cells[30:], &cost); err != nil || e.Ordered > e.Pairs/2 || e.MaxRegret < 1000 {
		t.Errorf("a cost that shares nothing: %+v, %v", e, err)
	}
	if _, err := fit(nil, layers); err == nil {
		t.Error("no times have a fit")
	}
}

// Pairs that are less than 3 % apart do not count, and a regret is that of the layout that costs least.
func TestJudged(t *testing.T) {
	cells := drawn(t, 3, 1000)
	for i, seconds := range [][]float64{{1, 1.02, 2}, {3, 1, 1.5}, {1, 1, 1.2}} {
		c := cells[i]
		c.layouts = []timed{c.layouts[0], c.layouts[0], c.layouts[0]}
		for j, s := range seconds {
			l := *c.layouts[j].layout
			l.Packed = []int{10, 20, 30}[j] // so that the first is taken, and each is cheaper than those behind it
			c.layouts[j] = timed{layout: &l, seconds: s}
		}
	}
	e, err := judged(cells, &prefixtree.Cost{Terms: []prefixtree.Term{{Feature: prefixtree.Tokens, Coefficient: 1, Times: 1, Divisor: 1}}})
	want := prefixtree.Evidence{Cells: 3, Pairs: 2 + 3 + 2, Ordered: 2 + 1 + 2, MedianRegret: 0, P95Regret: 20000, MaxRegret: 20000}
	if err != nil || e.Cells != want.Cells || e.Pairs != want.Pairs || e.Ordered != want.Ordered || e.MedianRegret != want.MedianRegret ||
		e.P95Regret != want.P95Regret || e.MaxRegret != want.MaxRegret {
		t.Errorf("%+v, not %+v, %v", e, want, err)
	}
}

// What the phase prints can be given to a TrainerRank, which then plans by it.
func TestFittedTableIsUsed(t *testing.T) {
	r, err := once()
	if err != nil {
		t.Fatalf("%v\n%s", err, r.stderr)
	}
	var printed struct {
		Tables []prefixtree.Table `json:"tables"`
	}
	if err := json.Unmarshal([]byte(r.timed), &printed); err != nil || len(printed.Tables) != 1 {
		t.Fatalf("%v\n%s", err, r.timed)
	}
	b := newBench(t.Context(), &config{Model: "builtin:" + builtin.Default, Threads: 1})
	defer b.close()
	m, err := b.openModel(1)
	if err != nil {
		t.Fatal(err)
	}
	table, spec := printed.Tables[0], m.Spec()
	facts := prefixtree.Facts{Device: "host", Hidden: spec.Hidden, Layers: spec.Layers}
	cost := prefixtree.CostFor(printed.Tables, facts)
	if err := cost.Check(); err != nil || cost.Name != table.Name || table.Coefficients.Token == 0 {
		t.Errorf("%v, %v", table, err)
	}
	facts.Recurrent = 1
	if cost := prefixtree.CostFor(printed.Tables, facts); cost.Name == table.Name {
		t.Error("it is used for layers that were not measured")
	}
	if i := slices.IndexFunc(table.Certificate, func(e prefixtree.Evidence) bool { return e.Hidden == spec.Hidden && e.Threads == 1 }); i < 0 {
		t.Errorf("%+v", table.Certificate)
	}
	dev, err := device.NewHost(ample)
	if err != nil {
		t.Fatal(err)
	}
	rank, err := trainerrank.New(m, trainerrank.WithDevice(dev), trainerrank.WithCostTables(printed.Tables...))
	if err != nil {
		t.Fatal(err)
	}
	if a, err := rank.Plan(t.Context(), drawn(t, 1, spec.Vocabulary)[0].inputs()); err != nil || a.Verdict != trainerrank.Whole {
		t.Errorf("%v, %v", a, err)
	}
}

// A table that was printed can be judged again: the evidence is added to its certificate, and the rest is the same. A file that is none fails.
func TestTableIsJudgedAgain(t *testing.T) {
	r, err := once()
	if err != nil {
		t.Fatalf("%v\n%s", err, r.stderr)
	}
	type output struct {
		Tables []prefixtree.Table `json:"tables"`
	}
	var printed, again output
	if err := json.Unmarshal([]byte(r.timed), &printed); err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(printed.Tables)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "tables.json")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	args := []string{"--phase", phaseCalibrate, "--json", "--short", "--threads", "1", "--tokens", "16", "--requests", "4", "--table", file}
	var stdout, stderr bytes.Buffer
	runMain(args, &stdout, &stderr)
	if err := json.Unmarshal(stdout.Bytes(), &again); err != nil || len(again.Tables) != 1 {
		t.Fatalf("%v\n%s%s", err, stdout.String(), stderr.String())
	}
	was, is := printed.Tables[0], again.Tables[0]
	if n := len(was.Certificate); len(is.Certificate) != n+1 || is.Certificate[n].Cells == 0 {
		t.Errorf("%+v, then %+v", was.Certificate, is.Certificate)
	}
	is.Certificate = was.Certificate
	if d := cmp.Diff(was, is); d != "" {
		t.Errorf("%s", d)
	}
	for _, text := range []string{"", "{", "[]"} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if code := runMain(args, &stdout, &stderr); code != exitFailed {
			t.Errorf("%q: exit code %d", text, code)
		}
	}
}
