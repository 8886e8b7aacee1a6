package prefixtree

import (
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// randomDecisions is a random subset, in random order.
func randomDecisions(rng *rand.Rand, tree *Tree) []int {
	var some []int
	for _, d := range tree.Decisions {
		if rng.IntN(2) == 0 {
			some = append(some, d)
		}
	}
	rng.Shuffle(len(some), func(i, j int) { some[i], some[j] = some[j], some[i] })
	return some
}

func TestEveryRowReadsBackFromEveryLayout(t *testing.T) {
	eachRandomRows(t, 11, 600, 30, func(t *testing.T, rng *rand.Rand, rows [][]int32) {
		tree := mustBuild(t, rows)
		for _, l := range []*Layout{tree.FullSharing(), tree.NoSharing(), mustLayout(t, tree, randomDecisions(rng, tree))} {
			b := mustPack(t, l, rows)
			if len(b.Tokens) != l.Packed {
				t.Errorf("got %d packed tokens, want %d", len(b.Tokens), l.Packed)
			}
			prefix := []int32{-5}
			deepest := 0
			for r, row := range rows {
				got := b.Gather(r, prefix)
				if got[0] != -5 || len(got) != 1+len(row) || b.RowLen(r) != len(row) {
					t.Fatalf("row %d: gathered %v, length %d", r, got, b.RowLen(r))
				}
				path := b.Path(b.Terminals[r], []int{-7, -8})
				if path[0] != -7 || path[1] != -8 {
					t.Errorf("row %d: path %v was not appended", r, path)
				}
				path = path[2:]
				if b.Spans[path[0]].Parent != -1 || path[len(path)-1] != b.Terminals[r] {
					t.Errorf("row %d: path %v is not from a root to span %d", r, path, b.Terminals[r])
				}
				deepest = max(deepest, len(path))
				for i, at := range got[1:] {
					if b.Tokens[at] != row[i] || b.Positions[at] != int32(i) || !slices.Contains(path, int(b.SegmentOf[at])) {
						t.Errorf("row %d, token %d: packed %d has token %d, position %d, span %d of path %v",
							r, i, at, b.Tokens[at], b.Positions[at], b.SegmentOf[at], path)
					}
				}
			}
			if deepest != l.Depth {
				t.Errorf("deepest path %d, depth %d", deepest, l.Depth)
			}
		}
	})
}

func TestFullSharingHasTheFewestTokensOfAllLayouts(t *testing.T) {
	subsets := 0
	eachRandomRows(t, 12, 300, 12, func(t *testing.T, _ *rand.Rand, rows [][]int32) {
		tree := mustBuild(t, rows)
		if len(tree.Decisions) > 10 {
			return
		}
		fewest, most := tree.FullSharing().Packed, tree.NoSharing().Packed
		if most != tree.Logical {
			t.Errorf("no sharing packs %d of %d tokens", most, tree.Logical)
		}
		for set := range 1 << len(tree.Decisions) {
			var decisions []int
			for i, d := range tree.Decisions {
				if set>>i&1 != 0 {
					decisions = append(decisions, d)
				}
			}
			l := mustLayout(t, tree, decisions)
			if l.Packed < fewest || l.Packed > most {
				t.Errorf("%v packs %d tokens, full sharing %d, no sharing %d", decisions, l.Packed, fewest, most)
			}
			subsets++
		}
	})
	if subsets < 5000 {
		t.Errorf("only %d layouts were tried", subsets)
	}
}

func TestPackingIsMonotoneInTheRows(t *testing.T) {
	eachRandomRows(t, 13, 400, 30, func(t *testing.T, rng *rand.Rand, rows [][]int32) {
		whole := mustBuild(t, rows)
		var some [][]int32
		for _, row := range rows {
			if rng.IntN(3) > 0 {
				some = append(some, row)
			}
		}
		if len(some) == 0 {
			return
		}
		part := mustBuild(t, some)
		if p, w := part.FullSharing().Packed, whole.FullSharing().Packed; p > w {
			t.Errorf("%d of %d rows pack into %d tokens, all into %d", len(some), len(rows), p, w)
		}
		if p, w := part.NoSharing().Packed, whole.NoSharing().Packed; p > w {
			t.Errorf("unshared: %d of %d rows pack into %d tokens, all into %d", len(some), len(rows), p, w)
		}
		// Packed tokens of full sharing are the distinct prefixes: no order changes them.
		rng.Shuffle(len(some), func(i, j int) { some[i], some[j] = some[j], some[i] })
		if got, want := mustBuild(t, some).FullSharing().Packed, part.FullSharing().Packed; got != want {
			t.Errorf("shuffled rows pack into %d tokens, before into %d", got, want)
		}
	})
}

func TestLayoutRefusesWhatIsNoDecision(t *testing.T) {
	tree := mustBuild(t, [][]int32{{1, 2}, {1, 3}, {4}}) // segment 0 is shared, 1 to 3 are not
	for _, c := range []struct {
		decisions []int
		bad       int
	}{{[]int{-1}, -1}, {[]int{0, 4}, 4}, {[]int{2, 0}, 2}, {[]int{0, 0}, 0}} {
		_, err := tree.Layout(c.decisions)
		var e *DecisionError
		if !errors.As(err, &e) || e.Decision != c.bad {
			t.Errorf("Layout(%v): got %v, want an error about decision %d", c.decisions, err, c.bad)
		}
	}
}

func TestLayoutTakesDecisionsInAnyOrderAndLeavesThemAlone(t *testing.T) {
	eachRandomRows(t, 14, 100, 30, func(t *testing.T, rng *rand.Rand, rows [][]int32) {
		tree := mustBuild(t, rows)
		some := randomDecisions(rng, tree)
		before := slices.Clone(some)
		shuffled := mustLayout(t, tree, some)
		if !slices.Equal(some, before) {
			t.Errorf("decisions were changed from %v to %v", before, some)
		}
		slices.Sort(some)
		if diff := cmp.Diff(mustLayout(t, tree, some), shuffled); diff != "" {
			t.Errorf("(-sorted +shuffled):\n%s", diff)
		}
		for i := range some {
			some[i] = -1
		}
		if !slices.IsSorted(shuffled.Decisions) || slices.Contains(shuffled.Decisions, -1) {
			t.Errorf("decisions of the layout: %v", shuffled.Decisions)
		}
	})
}

func TestListsOfALayoutCanBeAppendedTo(t *testing.T) {
	eachRandomRows(t, 16, 100, 30, func(t *testing.T, rng *rand.Rand, rows [][]int32) {
		tree := mustBuild(t, rows)
		full := tree.FullSharing()
		for _, l := range []*Layout{full, tree.NoSharing(), mustLayout(t, tree, randomDecisions(rng, tree))} {
			for i, s := range l.Spans {
				if len(s.Rows) != cap(s.Rows) {
					t.Errorf("span %d: append to its rows would write into another list", i)
				}
			}
		}
		clear(full.Decisions)
		if diff := cmp.Diff(mustBuild(t, rows), tree); diff != "" {
			t.Errorf("the tree depends on its layout's decisions (-want +got):\n%s", diff)
		}
	})
}

func TestPackRefusesOtherRows(t *testing.T) {
	rows := func() [][]int32 {
		return [][]int32{{1, 2, 3, 4}, {1, 2, 5}, {1, 2}, {1, 2, 3, 4}, {9, 9}, {1, 2, 5, 6}}
	}
	l := mustBuild(t, rows()).FullSharing()
	for _, c := range []struct {
		name   string
		change func([][]int32) [][]int32
		row    int
		says   string
	}{
		{"one less", func(r [][]int32) [][]int32 { return r[:5] }, -1, "pack: 5 rows, but the layout is for 6"},
		{"one more", func(r [][]int32) [][]int32 { return append(r, r[0]) }, -1, "pack: 7 rows"},
		{"longer", func(r [][]int32) [][]int32 { r[4] = append(r[4], 1); return r }, 4, "row 4 has 3 tokens, but 2"},
		{"first row's prefix", func(r [][]int32) [][]int32 { r[0][0] = 7; return r }, 1, "row 1 differs from row 0 in token 0, but the layout shares 2"},
		{"a prefix", func(r [][]int32) [][]int32 { r[1][1] = 7; return r }, 1, "token 1"},
		{"a row that is first nowhere", func(r [][]int32) [][]int32 { r[2][0] = 7; return r }, 2, "token 0"},
		{"a duplicate's end", func(r [][]int32) [][]int32 { r[3][3] = 7; return r }, 3, "shares 4"},
		{"below another", func(r [][]int32) [][]int32 { r[5][2] = 7; return r }, 5, "row 5 differs from row 1 in token 2, but the layout shares 3"},
	} {
		_, err := l.Pack(c.change(rows()))
		var e *RowError
		if !errors.As(err, &e) || e.Op != "pack" || e.Row != c.row || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: got %v, want an error about row %d that says %q", c.name, err, c.row, c.says)
		}
	}
	free := rows()
	free[4] = []int32{1, 2} // shares nothing, so its tokens are free
	if _, err := l.Pack(free); err != nil {
		t.Error(err)
	}
}

func TestPackRefusesWhatAnInt32CannotCount(t *testing.T) {
	rows := chain(70_000)
	tree := mustBuild(t, rows)
	l := tree.NoSharing()
	if l.Packed <= math.MaxInt32 {
		t.Fatalf("only %d packed tokens", l.Packed)
	}
	if _, err := l.Pack(rows); err == nil || !strings.Contains(err.Error(), "at most 2147483647 are possible") {
		t.Errorf("got %v", err)
	}
}

// mutable is a batch of which every part may be changed.
func mutable(t *testing.T, rows [][]int32) *Batch {
	b := mustPack(t, mustBuild(t, rows).FullSharing(), rows)
	b.Spans, b.Terminals = slices.Clone(b.Spans), slices.Clone(b.Terminals)
	for i := range b.Spans {
		b.Spans[i].Rows = slices.Clone(b.Spans[i].Rows)
	}
	return b
}

// Each invariant has mutations that break it and no other.
func TestCheckFindsEachMutationByItsOwnInvariant(t *testing.T) {
	// Spans: 0 [0,3) of all, 1 [3,5) of 0 and 3, 2 [3,4) of 1, 3 [4,6) of 4 below 2, 4 [0,1) of 2.
	rows := [][]int32{{1, 2, 3, 4, 4}, {1, 2, 3, 5}, {8}, {1, 2, 3, 4, 4}, {1, 2, 3, 5, 6, 7}}
	const root, twin, branch, leaf, alone = 0, 1, 2, 3, 4
	cut := func(list []int32, i int) []int32 { return slices.Delete(slices.Clone(list), i, i+1) }
	for _, m := range []struct {
		name   string
		want   Invariant
		span   int
		mutate func(b *Batch)
	}{
		{"parent below -1", ParentFirst, alone, func(b *Batch) { b.Spans[alone].Parent = -2 }},
		{"child before its parent", ParentFirst, branch, func(b *Batch) {
			// Exchange branch and leaf and everything that refers to them.
			b.Spans[branch], b.Spans[leaf] = b.Spans[leaf], b.Spans[branch]
			b.Spans[branch].Parent = leaf
			b.Terminals[1], b.Terminals[4] = leaf, branch
			at := 5
			for _, i := range []int{branch, leaf} {
				b.Spans[i].Offset = at
				for p := b.Spans[i].Start; p < b.Spans[i].End; p++ {
					b.Positions[at], b.SegmentOf[at] = int32(p), int32(i)
					at++
				}
			}
		}},
		{"empty span", NotEmpty, 5, func(b *Batch) {
			b.Spans = append(b.Spans, Span{Parent: leaf, Start: 6, End: 6, Rows: []int{4}, Offset: len(b.Tokens)})
			b.Terminals[4] = 5
		}},
		{"gap behind the parent", Continues, leaf, func(b *Batch) {
			b.Spans[leaf].Start = 5
			b.Spans[alone].Offset--
			b.Tokens, b.Positions, b.SegmentOf = cut(b.Tokens, 6), cut(b.Positions, 6), cut(b.SegmentOf, 6)
		}},
		{"root that starts late", Continues, alone, func(b *Batch) {
			b.Spans[alone].Start, b.Spans[alone].End = 1, 2
			b.Positions[len(b.Positions)-1] = 1
		}},
		{"parent of another length", Continues, leaf, func(b *Batch) {
			b.Spans[leaf].Parent = twin
			b.Spans[branch].Rows, b.Spans[twin].Rows = []int{1}, []int{0, 3, 4}
		}},
		{"offset", OffsetsAddUp, branch, func(b *Batch) { b.Spans[branch].Offset++ }},
		{"first offset", OffsetsAddUp, root, func(b *Batch) { b.Spans[root].Offset = 1 }},
		{"token missing", Sizes, alone, func(b *Batch) { b.Tokens = b.Tokens[:len(b.Tokens)-1] }},
		{"token too many", Sizes, alone, func(b *Batch) { b.Tokens = append(b.Tokens, 1) }},
		{"position too many", Sizes, alone, func(b *Batch) { b.Positions = append(b.Positions, 1) }},
		{"span number too many", Sizes, alone, func(b *Batch) { b.SegmentOf = append(b.SegmentOf, alone) }},
		{"token of another span", RunsTogether, twin, func(b *Batch) { b.SegmentOf[4] = branch }},
		{"spans interleaved", RunsTogether, twin, func(b *Batch) { b.SegmentOf[4], b.SegmentOf[5] = branch, twin }},
		{"position of the packed row", PositionsRun, branch, func(b *Batch) { b.Positions[5] = 5 }},
		{"positions exchanged", PositionsRun, root, func(b *Batch) { b.Positions[1], b.Positions[2] = 2, 1 }},
		{"more rows than ends", Ends, -1, func(b *Batch) { b.Rows++ }},
		{"fewer rows than ends", Ends, -1, func(b *Batch) { b.Rows-- }},
		{"span of nobody", Used, 5, func(b *Batch) {
			b.Spans = append(b.Spans, Span{Parent: -1, End: 1, Offset: len(b.Tokens)})
			b.Tokens, b.Positions, b.SegmentOf = append(b.Tokens, 4), append(b.Positions, 0), append(b.SegmentOf, 5)
		}},
		{"row not listed", Covered, twin, func(b *Batch) { b.Spans[twin].Rows = []int{0} }},
		{"row listed twice", Covered, twin, func(b *Batch) { b.Spans[twin].Rows = []int{0, 3, 3} }},
		{"row listed where it does not go", Covered, branch, func(b *Batch) { b.Spans[branch].Rows = []int{1, 3, 4} }},
		{"rows out of order", Covered, twin, func(b *Batch) { b.Spans[twin].Rows = []int{3, 0} }},
		{"row that ends elsewhere", Covered, branch, func(b *Batch) { b.Terminals[0] = branch }},
		{"row that ends early", Covered, leaf, func(b *Batch) { b.Terminals[4] = branch }},
	} {
		t.Run(m.name, func(t *testing.T) {
			b := mutable(t, rows)
			m.mutate(b)
			var e *CheckError
			if err := b.Check(); !errors.As(err, &e) {
				t.Fatalf("Check accepts it: %v", err)
			}
			if e.Invariant != m.want || e.Span != m.span {
				t.Errorf("got %v", e)
			}
			if e.Got == e.Want || !strings.Contains(e.Error(), string(m.want)) {
				t.Errorf("the error says little: %v", e)
			}
			for _, check := range invariants {
				if e := check(b); e != nil && e.Invariant != m.want {
					t.Errorf("caught by another invariant as well: %v", e)
				}
			}
		})
	}
	t.Run("its own parent", func(t *testing.T) { // would be an endless path for the checks that follow
		b := mutable(t, rows)
		b.Spans[twin].Parent = twin
		var e *CheckError
		if err := b.Check(); !errors.As(err, &e) || e.Invariant != ParentFirst || e.Span != twin {
			t.Errorf("got %v", err)
		}
	})
	t.Run("sizes that overflow", func(t *testing.T) { // the sum of the lengths wraps around to the number of tokens
		b := &Batch{}
		for i := range 4 {
			b.Spans = append(b.Spans, Span{Parent: -1, End: math.MaxInt/2 + 1, Rows: []int{i}, Offset: i * (math.MaxInt/2 + 1)})
			b.Terminals = append(b.Terminals, i)
			b.Rows++
		}
		var e *CheckError
		if err := b.Check(); !errors.As(err, &e) || e.Invariant != Sizes || e.Span != 0 {
			t.Errorf("got %v", err)
		}
	})
	t.Run("end out of range", func(t *testing.T) { // cannot be looked at by the checks that follow
		for _, bad := range []int{-1, 5} {
			b := mutable(t, rows)
			b.Terminals[2] = bad
			var e *CheckError
			if err := b.Check(); !errors.As(err, &e) || e.Invariant != Ends || e.Row != 2 {
				t.Errorf("got %v", err)
			}
		}
	})
	t.Run("tokens", func(t *testing.T) {
		b := mutable(t, rows)
		b.Tokens[6]++ // the first of leaf
		if err := b.Check(); err != nil {
			t.Error(err)
		}
		var e *CheckError
		if err := b.CheckRows(rows); !errors.As(err, &e) || *e != (CheckError{RowTokens, leaf, 4, 6, 7, 6}) {
			t.Errorf("got %v", err)
		}
		b.Tokens[6]--
		if err := b.CheckRows(rows[:4]); !errors.As(err, &e) || e.Invariant != RowTokens {
			t.Errorf("fewer rows: got %v", err)
		}
		longer := slices.Clone(rows)
		longer[2] = []int32{8, 8}
		if err := b.CheckRows(longer); !errors.As(err, &e) || e.Row != 2 || e.Got != 1 || e.Want != 2 {
			t.Errorf("longer row: got %v", err)
		}
	})
}

// A batch may come from anywhere. Whatever is done to one number of it, Check answers, and what it accepts can be gathered.
func TestCheckNeverPanics(t *testing.T) {
	accepted := 0
	eachRandomRows(t, 15, 400, 8, func(t *testing.T, rng *rand.Rand, rows [][]int32) {
		b := mutable(t, rows)
		s := &b.Spans[rng.IntN(len(b.Spans))]
		value := []int{-2, -1, 0, 1, 2, 7, math.MaxInt, math.MinInt}[rng.IntN(8)]
		switch rng.IntN(10) {
		case 0:
			s.Parent = value
		case 1:
			s.Start = value
		case 2:
			s.End = value
		case 3:
			s.Offset = value
		case 4:
			s.Rows[rng.IntN(len(s.Rows))] = value
		case 5:
			b.Terminals[rng.IntN(len(b.Terminals))] = value
		case 6:
			b.SegmentOf[rng.IntN(len(b.SegmentOf))] = int32(value)
		case 7:
			b.Positions[rng.IntN(len(b.Positions))] = int32(value)
		case 8:
			b.Spans = b.Spans[:len(b.Spans)-1]
		case 9:
			b.Rows = value
		}
		if b.Check() == nil {
			accepted++
			if err := b.CheckRows(rows); err != nil {
				t.Errorf("accepted, but: %v", err)
			}
		}
	})
	if accepted == 0 || accepted == 400 {
		t.Errorf("%d of 400 accepted", accepted)
	}
}
