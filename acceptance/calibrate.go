package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/forward/prefixtree"
	"github.com/trainerrank/engine/trainerrank"
)

// phaseCalibrate is the phase whose gates are times. It runs only when it is asked for by name: on a machine that does something else at the same time they
// may fail, and nothing would be wrong.
const phaseCalibrate = "cost-calibrate"

const (
	gatePairs     = "pairs of layouts held out that are 3 % apart"
	gateOrdered   = "of 10,000 such pairs ordered rightly, on the worst model"
	gateRegret    = "median regret held out, in 1/100 %, on the worst model"
	gateForced    = "calls in another layout than the one asked for"
	gateOtherBits = "calls with other bits in another layout"
)

var calibrateGates = []string{gatePairs, gateOrdered, gateRegret, gateForced, gateOtherBits, gateCounters}

// maxLayouts is how many layouts of a call are timed at most.
const maxLayouts = 6

// calibrate fits a cost table to the times of layouts on the first model, or takes one that it is given, and judges it by calls that it was not fitted to, on
// all models.
func calibrate(b *bench) error {
	fitted, heldOut, rounds := 40, 24, 5
	if b.Short {
		fitted, heldOut, rounds = 12, 12, 3
	}
	table, err := b.table()
	if err != nil {
		return err
	}
	if table != nil {
		fitted, heldOut = 0, 12
	}
	if err := os.Setenv(hooksVariable, "1"); err != nil {
		return err
	}
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	t := timing{rounds: rounds}
	ordered, regret, cells, pairs := 10000, 0, 0, 0
	for _, name := range strings.Split(b.Model, ",") {
		c := *b.config
		c.Model = name
		on := newBench(b, &c)
		timed, l, err := t.cells(on, fitted+heldOut)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		spec := l.model.Spec()
		facts := prefixtree.Facts{Device: l.dev.Name(), Hidden: spec.Hidden, Layers: spec.Layers}
		if table == nil {
			table = &prefixtree.Table{Name: fmt.Sprintf("%s %dx%d", facts.Device, facts.Layers, facts.Hidden), Domain: prefixtree.Domain{Device: facts.Device}}
			if table.Coefficients, err = fit(timed[:fitted], facts.Layers); err != nil {
				return err
			}
			b.note("fitted to %d calls of %s", fitted, name)
		}
		held := timed[fitted:]
		fitted, heldOut = 0, 12
		cost := table.Cost(facts)
		e, err := judged(held, &cost)
		if err != nil {
			return err
		}
		e.Kernel, e.Threads, e.Hidden, e.Layers = l.model.Backend().Name(), b.Threads, facts.Hidden, facts.Layers
		table.Certificate = append(table.Certificate, e)
		cells, pairs = cells+e.Cells, pairs+e.Pairs
		ordered, regret = min(ordered, e.Ordered*10000/max(1, e.Pairs)), max(regret, e.MedianRegret)
		if err := b.compare(name, held, e, facts); err != nil {
			return err
		}
		if err := on.close(); err != nil {
			return err
		}
	}
	bound(table)
	b.tables = append(b.tables, *table)
	b.note("%v", table)
	b.atLeast(gatePairs, int64(cells), int64(pairs))
	b.atLeast(gateOrdered, 9000, int64(ordered))
	b.atMost(gateRegret, 200, int64(regret))
	b.gate(t.layouts.none(gateForced), t.bits.none(gateOtherBits), t.counters.none(gateCounters))
	return nil
}

// table is the first table of the file that is to be judged, or nil if one is to be fitted.
func (b *bench) table() (*prefixtree.Table, error) {
	if b.Table == "" {
		return nil, nil
	}
	text, err := os.ReadFile(b.Table)
	if err != nil {
		return nil, err
	}
	var list []prefixtree.Table
	if err := json.Unmarshal(text, &list); err != nil {
		return nil, fmt.Errorf("%s: %w", b.Table, err)
	}
	if len(list) == 0 {
		return nil, fmt.Errorf("%s: no table is in it", b.Table)
	}
	return &list[0], nil
}

// bound makes the domain of a table what its certificate is about. The number of layers is left open: every charge is by the layer, so which layout is cheapest does
// not depend on it. Recurrent layers and several ranks were not measured.
func bound(t *prefixtree.Table) {
	one := prefixtree.Range{Min: 1, Max: 1}
	d := &t.Domain
	d.Recurrent, d.ContextParallel, d.TensorParallel = prefixtree.Range{Min: -1, Max: 0}, one, one
	d.Hidden = prefixtree.Range{Min: t.Certificate[0].Hidden, Max: t.Certificate[0].Hidden}
	for _, e := range t.Certificate {
		d.Hidden = prefixtree.Range{Min: min(d.Hidden.Min, e.Hidden), Max: max(d.Hidden.Max, e.Hidden)}
	}
}

// compare notes how other costs do on the same calls.
func (b *bench) compare(name string, held []*cell, fitted prefixtree.Evidence, facts prefixtree.Facts) error {
	say := func(what string, e prefixtree.Evidence) {
		b.note("%s: %s: %d of %d pairs ordered rightly, regret %.2f %% (median), %.2f %% (95 of 100), %.2f %% (most)",
			name, what, e.Ordered, e.Pairs, float64(e.MedianRegret)/100, float64(e.P95Regret)/100, float64(e.MaxRegret)/100)
	}
	say("this table", fitted)
	always := prefixtree.Table{Coefficients: prefixtree.Coefficients{Token: 1}}
	for _, other := range []struct {
		what string
		cost prefixtree.Cost
	}{
		{"the engine's own table", prefixtree.CostFor(trainerrank.Tables(), facts)},
		{"always sharing everything", always.Cost(facts)},
		{"version 1", prefixtree.Version1(facts)},
	} {
		e, err := judged(held, &other.cost)
		if err != nil {
			return err
		}
		say(other.what, e)
	}
	return nil
}

// drawRows draws the rows of a call of one to four levels, from a few long ones to many short ones, of at most most tokens and an eighth of that at least. Prefixes of a level
// differ in length by up to a factor of two, so that some layouts share the long ones alone.
func drawRows(r *rand.Rand, vocab, most int) [][]int32 {
	between := func(from, to int) int { // as many from 1 to 10 as from 10 to 100
		return int(float64(from) * math.Pow(float64(to)/float64(from), r.Float64()))
	}
	for {
		levels := 1 + r.IntN(4)
		width, length := make([]int, levels+1), make([]int, levels+1)
		rows, tokens := 1, 0
		for l := range width {
			width[l], length[l] = between(2, 17), between(1, max(2, most/4))
			if l == 0 && r.IntN(2) == 0 {
				width[0] = 1
			}
			rows *= width[l]
			tokens += length[l]
		}
		if rows < 2 || rows > 256 || tokens*rows > most || tokens*rows < most/8 {
			continue
		}
		var list [][]int32
		var grow func(prefix []int32, level int)
		grow = func(prefix []int32, level int) {
			for range width[level] {
				row := append(slices.Clip(prefix), fresh(r, vocab, max(1, length[level]*(4+r.IntN(5))/8))...)
				if level == levels {
					list = append(list, row)
				} else {
					grow(row, level+1)
				}
			}
		}
		grow(nil, 0)
		return list
	}
}

// newCell is a call of rows with some of its named layouts: those that share nothing and everything, and evenly spaced ones between them.
func newCell(rows [][]int32) (*cell, error) {
	tree, err := prefixtree.Build(rows)
	if err != nil {
		return nil, err
	}
	family := tree.Family()
	slices.SortStableFunc(family, func(a, b prefixtree.Candidate) int { return cmp.Compare(b.Packed, a.Packed) })
	c := &cell{rows: rows}
	n := min(maxLayouts, len(family))
	for i := range n {
		f := &family[i*(len(family)-1)/max(1, n-1)]
		l, err := tree.Layout(f.Decisions)
		if err != nil {
			return nil, err
		}
		c.layouts = append(c.layouts, timed{label: f.Labels[0], layout: l})
	}
	return c, nil
}

// inputs are the call of a cell: the last position of each row has a label and no other, so that the head has as much to do in all layouts.
func (c *cell) inputs() forward.Inputs {
	list := make([]forward.Input, len(c.rows))
	for i, row := range c.rows {
		labels := slices.Repeat([]int32{forward.IgnoreLabel}, len(row))
		labels[len(row)-1] = row[0]
		list[i] = forward.Input{Tokens: row, Targets: labels}
	}
	return forward.Many(list...)
}

// timing times the layouts of cells, and counts what is wrong with the calls beside their time.
type timing struct {
	rounds                  int
	layouts, bits, counters tally
}

// cells draws so many cells and times them on a model, which stays loaded.
func (t *timing) cells(b *bench, n int) ([]*cell, *lab, error) {
	twin, err := b.openModel(b.Threads)
	if err != nil {
		return nil, nil, err
	}
	r := random(31)
	list := make([]*cell, n)
	var need int64
	for i := range list {
		if list[i], err = newCell(drawRows(r, twin.Spec().Vocabulary, b.Requests*b.Tokens)); err != nil {
			return nil, nil, err
		}
		if err := os.Setenv(anchorVariable, "no_sharing"); err != nil { // nothing needs more
			return nil, nil, err
		}
		a, err := priceOn(b, twin, list[i].inputs(), ample)
		if err != nil {
			return nil, nil, err
		}
		need = max(need, a.PredictedPeakBytes)
	}
	l, err := b.lab(b.Threads, need)
	if err != nil {
		return nil, nil, err
	}
	for _, c := range list {
		if err := t.time(l, c, r); err != nil {
			return nil, nil, err
		}
	}
	return list, l, nil
}

// time runs a call in each of its layouts, in rounds. Each round runs all layouts in an order of its own. What counts is the part that a layout has of its round: a
// machine that is slower for a while makes none look better. The first round is not counted.
func (t *timing) time(l *lab, c *cell, r *rand.Rand) error {
	before := counters(l.dev.Stats())
	took := make([][]float64, len(c.layouts))
	var sums []float64
	var want []string
	in := c.inputs()
	runtime.GC()
	for round := range t.rounds + 1 {
		seconds, sum := make([]float64, len(c.layouts)), 0.0
		for _, i := range r.Perm(len(c.layouts)) {
			layout := &c.layouts[i]
			if err := os.Setenv(anchorVariable, layout.label); err != nil {
				return err
			}
			rank, err := l.rank()
			if err != nil {
				return err
			}
			start := l.now()
			res, err := rank.DPRankForward(l, in)
			if err != nil {
				return err
			}
			seconds[i] = (l.now() - start - res.Telemetry.PlanningTime).Seconds()
			sum += seconds[i]
			if round == 0 {
				got := digests(res.Outputs.Flat())
				if want == nil {
					want = got
				}
				t.bits.wrong(differing(want, got) > 0, "%d rows as %s", len(c.rows), layout.label)
				tel, has := &res.Telemetry, layout.layout
				t.layouts.wrong(tel.PackedTokens != has.Packed || tel.SelectedMaxDepth != has.Depth || tel.SubforwardCount != 1,
					"%d rows as %s: %d tokens in %d levels, not %d in %d", len(c.rows), layout.label, tel.PackedTokens, tel.SelectedMaxDepth, has.Packed, has.Depth)
			}
			res.Release()
		}
		if round == 0 {
			continue
		}
		sums = append(sums, sum)
		for i := range took {
			took[i] = append(took[i], seconds[i]/sum)
		}
	}
	typical := middle(sums)
	for i := range c.layouts {
		c.layouts[i].seconds = middle(took[i]) * typical
	}
	t.counters.wrong(counters(l.dev.Stats()) != before, "after a call of %d rows", len(c.rows))
	return nil
}

// now is a clock. One thread is timed by the CPU time of the process, which does not run while others have the CPU; several by the time of day.
func (b *bench) now() time.Duration {
	if b.Threads == 1 {
		if t, ok := cpuTime(); ok {
			return t
		}
	}
	return time.Since(began)
}

var began = time.Now()

// middle is the median.
func middle(list []float64) float64 {
	sorted := slices.Sorted(slices.Values(list))
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}
