package main

import (
	"errors"
	"math"
	"slices"

	"gonum.org/v1/gonum/floats"
	"gonum.org/v1/gonum/mat"

	"github.com/trainerrank/engine/forward/prefixtree"
)

// cell is a call, and layouts of it that were timed.
type cell struct {
	rows    [][]int32
	layouts []timed
}

// timed is a layout and the seconds that the call took in it.
type timed struct {
	label   string // by which it is asked for
	layout  *prefixtree.Layout
	seconds float64
}

// shortBelow are the lengths that are tried as [prefixtree.Coefficients.ShortBelow].
var shortBelow = []int{4, 8, 16, 32, 64, 128}

// fit finds the coefficients with which a model of so many layers takes the seconds that the cells took: the non-negative ones with the least sum of squares of relative
// errors. Beside what its layouts are charged for each call takes a constant time of its own, for its requests and their answers. Layouts of one call are
// compared only with each other, so these constants are fitted and dropped.
func fit(cells []*cell, layers int) (prefixtree.Coefficients, error) {
	var best prefixtree.Coefficients
	least := math.Inf(1)
	for _, below := range shortBelow {
		var a, b []float64
		for _, c := range cells {
			// Rows are divided by the seconds, which makes errors relative, and the constant's column by its length. What all columns have of that is taken
			// out of them: then the best constant is 0.
			one := make([]float64, len(c.layouts))
			rows := make([][]float64, len(c.layouts))
			for i := range rows {
				l := &c.layouts[i]
				f := l.layout.Features(below)
				one[i] = 1 / l.seconds
				for _, n := range []int64{f.Tokens, f.Pairs, f.Segments, f.Short, f.Depth - 1} {
					rows[i] = append(rows[i], float64(n)/l.seconds)
				}
				rows[i] = append(rows[i], 1)
			}
			floats.Scale(1/floats.Norm(one, 2), one)
			for j := range rows[0] {
				part := 0.0
				for i := range rows {
					part += one[i] * rows[i][j]
				}
				for i := range rows {
					rows[i][j] -= part * one[i]
				}
			}
			for _, row := range rows {
				a, b = append(a, row[:features]...), append(b, row[features])
			}
		}
		if len(b) == 0 {
			break
		}
		x, rest := nonNegative(mat.NewDense(len(b), features, a), b)
		if x == nil || rest >= least {
			continue
		}
		least = rest
		picoseconds := func(x float64) int64 { return int64(math.Round(x / float64(layers) * 1e12)) }
		best = prefixtree.Coefficients{
			Token: picoseconds(x[0]), Pair: picoseconds(x[1]), Segment: picoseconds(x[2]), Short: picoseconds(x[3]), Level: picoseconds(x[4]), ShortBelow: below,
		}
		if best.Short == 0 {
			best.ShortBelow = 0
		}
	}
	if math.IsInf(least, 1) {
		return best, errors.New("fit: no coefficients explain the times")
	}
	return best, nil
}

// features is the number of features that layouts are charged for.
const features = 5

// nonNegative is the x without a negative element for which |a x - b|^2 is least, and that least. The columns in which the optimum is not 0 have it for their
// least-squares solution, and no other solution without a negative element is better: with the few columns that there are, all sets of them are tried.
func nonNegative(a *mat.Dense, b []float64) (x []float64, least float64) {
	m, n := a.Dims()
	least = math.Inf(1)
	want := mat.NewVecDense(m, b)
	scale := make([]float64, n) // columns of about the same size
	for j := range scale {
		scale[j] = mat.Norm(a.ColView(j), 2)
	}
	for set := range 1 << n {
		var columns []int
		for j := range n {
			if set>>j&1 == 1 {
				columns = append(columns, j)
			}
		}
		if len(columns) == 0 || len(columns) > m || slices.ContainsFunc(columns, func(j int) bool { return scale[j] == 0 }) {
			continue
		}
		part := mat.NewDense(m, len(columns), nil)
		for k, j := range columns {
			for i := range m {
				part.Set(i, k, a.At(i, j)/scale[j])
			}
		}
		var qr mat.QR
		var solved, off mat.VecDense
		qr.Factorize(part)
		if qr.SolveVecTo(&solved, false, want) != nil {
			continue // these columns depend on each other: fewer of them do as well
		}
		off.MulVec(part, &solved)
		off.SubVec(&off, want)
		rest := mat.Dot(&off, &off)
		if mat.Min(&solved) < 0 || rest >= least {
			continue
		}
		least, x = rest, make([]float64, n)
		for k, j := range columns {
			x[j] = solved.AtVec(k) / scale[j]
		}
	}
	return x, least
}

// distinct is how far two times must be apart to say that one layout is faster.
const distinct = 1.03

// judged counts in how many pairs of layouts of the same cell, of those that are apart, the cost says rightly which is faster, and how much more time than the fastest
// layout of a cell the one takes that costs least.
func judged(cells []*cell, cost *prefixtree.Cost) (prefixtree.Evidence, error) {
	e := prefixtree.Evidence{Cells: len(cells)}
	var regrets []float64
	for _, c := range cells {
		scores := make([]prefixtree.Score, len(c.layouts))
		for i := range scores {
			var err error
			if scores[i], err = cost.Score(c.layouts[i].layout); err != nil {
				return e, err
			}
		}
		cheapest, fastest := 0, math.Inf(1)
		for i := range scores {
			if scores[i].Compare(scores[cheapest]) < 0 {
				cheapest = i
			}
			fastest = min(fastest, c.layouts[i].seconds)
			for j := range i {
				a, b := c.layouts[i].seconds, c.layouts[j].seconds
				if max(a, b) <= distinct*min(a, b) {
					continue
				}
				e.Pairs++
				if (a < b) == (scores[i].Compare(scores[j]) < 0) {
					e.Ordered++
				}
			}
		}
		regrets = append(regrets, c.layouts[cheapest].seconds/fastest-1)
	}
	slices.Sort(regrets)
	at := func(q float64) int { // in 1/100 percent
		if len(regrets) == 0 {
			return 0
		}
		return int(math.Round(regrets[int(math.Ceil(q*float64(len(regrets)-1)))] * 1e4))
	}
	e.MedianRegret, e.P95Regret, e.MaxRegret = at(0.5), at(0.95), at(1)
	return e, nil
}
