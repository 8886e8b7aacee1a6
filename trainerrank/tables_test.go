package trainerrank

import (
	"testing"

	"github.com/trainerrank/engine/forward/prefixtree"
	"github.com/trainerrank/engine/internal/golden"
)

// The tables that come with the engine are ones, and each has the certificate that the acceptance harness asks for: of held-out pairs of layouts at least 90 % are ordered rightly, and
// the median regret is at most 2 %, on every model that was timed; and models at both ends of the domain were.
func TestTablesAreCertified(t *testing.T) {
	if len(Tables()) == 0 {
		t.Fatal("there are none")
	}
	for _, table := range Tables() {
		ends := [2]bool{}
		for _, e := range table.Certificate {
			if e.Cells < 10 || e.Pairs < e.Cells || e.Ordered*10 < e.Pairs*9 || e.MedianRegret > 200 || e.Kernel == "" || e.Threads < 1 {
				t.Errorf("%s: %+v", table.Name, e)
			}
			cost := prefixtree.CostFor(Tables(), prefixtree.Facts{Device: "host", Hidden: e.Hidden, Layers: e.Layers})
			if err := cost.Check(); err != nil || cost.Name != table.Name {
				t.Errorf("%s is not for the model of %+v: %v, %v", table.Name, e, cost, err)
			}
			ends[0], ends[1] = ends[0] || e.Hidden == table.Domain.Hidden.Min, ends[1] || e.Hidden == table.Domain.Hidden.Max
		}
		if ends != [2]bool{true, true} {
			t.Errorf("%s: nothing was timed at an end of %+v", table.Name, table.Domain.Hidden)
		}
		cost := prefixtree.CostFor([]prefixtree.Table{table}, prefixtree.Facts{Device: "host", Hidden: table.Domain.Hidden.Max, Layers: 30, Recurrent: 3})
		if cost.Name == table.Name {
			t.Errorf("%s is used for recurrent layers, which were not timed", table.Name)
		}
	}
	mine := Tables()
	mine[0].Name = "changed"
	if Tables()[0].Name == "changed" {
		t.Error("a caller can change the engine's tables")
	}
}

// Under the engine's own tables the search finds the cheapest of all layouts: they charge for everything, so that sharing a little is not always worth it.
func TestTheCheapestLayoutIsFound(t *testing.T) {
	declined := 0
	for seed := range uint64(300) {
		r := golden.Rand(seed)
		rows := make([][]int32, 2+r.IntN(7))
		for i := range rows {
			rows[i] = make([]int32, 1+r.IntN(1+r.IntN(12)))
			for j := range rows[i] {
				rows[i][j] = int32(r.IntN(2))
			}
		}
		tree, err := prefixtree.Build(rows)
		if err != nil {
			t.Fatal(err)
		}
		n := len(tree.Decisions)
		if n > 10 {
			continue
		}
		cost := prefixtree.CostFor(Tables(), prefixtree.Facts{Device: "host", Hidden: 64, Layers: 1 + r.IntN(40)})
		choice, err := prefixtree.Select(tree, &cost, prefixtree.Options{})
		if err != nil {
			t.Fatal(err)
		}
		for set := range 1 << n {
			var decisions []int
			for j, d := range tree.Decisions {
				if set>>j&1 == 1 {
					decisions = append(decisions, d)
				}
			}
			l, err := tree.Layout(decisions)
			if err != nil {
				t.Fatal(err)
			}
			if score, err := cost.Score(l); err != nil || score.Compare(choice.Score) < 0 {
				t.Fatalf("seed %d: %v costs %+v, the choice %v %+v, %v", seed, decisions, score, choice.Decisions, choice.Score, err)
			}
		}
		if len(choice.Decisions) < n {
			declined++
		}
	}
	if declined == 0 {
		t.Error("everything was always shared")
	}
}
