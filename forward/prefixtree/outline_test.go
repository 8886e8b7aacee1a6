package prefixtree

import (
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestTheTreeOfSomeRowsIsWhatBuildMakesOfTheirTokens(t *testing.T) {
	eachRandomRows(t, 11, 3000, 40, func(t *testing.T, rng *rand.Rand, rows [][]int32) {
		tree := mustBuild(t, rows)
		var list []int
		var some [][]int32
		for range 1 + rng.IntN(2*len(rows)) { // in any order, some more than once
			r := rng.IntN(len(rows))
			list, some = append(list, r), append(some, rows[r])
		}
		if rng.IntN(2) == 0 {
			list, some = rng.Perm(len(rows))[:1+rng.IntN(len(rows))], nil
			for _, r := range list {
				some = append(some, rows[r])
			}
		}
		got, err := tree.Restrict(list)
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(mustBuild(t, some), got); d != "" {
			t.Errorf("rows %v:\n%s", list, d)
		}
	})
}

func TestRestrictRefusesWhatIsNoRow(t *testing.T) {
	tree := mustBuild(t, [][]int32{{1, 2}, {1}})
	if _, err := tree.Restrict(nil); !errors.Is(err, ErrNoRows) {
		t.Errorf("no rows: %v", err)
	}
	for _, r := range []int{-1, 2} {
		var e *RowError
		if _, err := tree.Restrict([]int{0, r}); !errors.As(err, &e) || e.Row != 1 || e.Op != "restrict" {
			t.Errorf("row %d: %v", r, err)
		}
	}
}

func TestAnOutlineIsItsTree(t *testing.T) {
	eachRandomRows(t, 12, 3000, 40, func(t *testing.T, _ *rand.Rand, rows [][]int32) {
		want := mustBuild(t, rows)
		o := want.Outline()
		got, err := o.Tree()
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Error(d)
		}
	})
}

func TestAnOutlineOfNoTreeIsRefused(t *testing.T) {
	// Two rows that share three tokens, of which one ends there, and one of its own.
	ok := Outline{Parents: []int{-1, 0, -1}, Ends: []int{3, 5, 4}, Terminals: []int{1, 0, 2}}
	if _, err := ok.Tree(); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name  string
		spoil func(o *Outline)
		list  string
		index int
	}{
		{"no rows", func(o *Outline) { o.Terminals = nil }, "terminals", -1},
		{"a list too short", func(o *Outline) { o.Ends = o.Ends[:2] }, "ends", -1},
		{"a segment as its own parent", func(o *Outline) { o.Parents[1] = 1 }, "parents", 1},
		{"a parent that comes later", func(o *Outline) { o.Parents[0] = 2 }, "parents", 0},
		{"a parent below -1", func(o *Outline) { o.Parents[2] = -2 }, "parents", 2},
		{"an empty segment", func(o *Outline) { o.Ends[1] = 3 }, "ends", 1},
		{"a segment that ends before it begins", func(o *Outline) { o.Ends[0] = 0 }, "ends", 0},
		{"more tokens than a batch can count", func(o *Outline) { o.Ends[2] = math.MaxInt32 + 1 }, "ends", 2},
		{"a terminal below 0", func(o *Outline) { o.Terminals[2] = -1 }, "terminals", 2},
		{"a terminal that is no segment", func(o *Outline) { o.Terminals[2] = 3 }, "terminals", 2},
		{"a segment of no row", func(o *Outline) { o.Terminals[0] = 0 }, "parents", -1},
		{"a segment in two pieces", func(o *Outline) { *o = Outline{[]int{-1, 0}, []int{3, 5}, []int{1}} }, "parents", -1},
		{"segments in another order", func(o *Outline) { *o = Outline{[]int{-1, -1}, []int{3, 4}, []int{1, 0}} }, "ends", 0},
		{"children apart", func(o *Outline) {
			*o = Outline{[]int{-1, -1, 0, 0}, []int{3, 4, 5, 6}, []int{2, 1, 3}}
		}, "parents", 1},
	} {
		o := Outline{slices.Clone(ok.Parents), slices.Clone(ok.Ends), slices.Clone(ok.Terminals)}
		c.spoil(&o)
		_, err := o.Tree()
		var e *OutlineError
		if !errors.As(err, &e) || e.List != c.list || e.Index != c.index {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

// FuzzOutline holds that an outline is refused or is that of its tree, and that nothing panics.
func FuzzOutline(f *testing.F) {
	f.Add([]byte{0, 3, 1, 2, 0, 4}, []byte{1, 0, 2})
	f.Add([]byte{0, 3, 0, 4, 1, 5, 1, 6}, []byte{2, 1, 3})
	f.Fuzz(func(t *testing.T, segments, rows []byte) {
		var o Outline
		for i := 0; i+1 < len(segments); i += 2 {
			o.Parents, o.Ends = append(o.Parents, int(segments[i])-1), append(o.Ends, int(segments[i+1]))
		}
		for _, r := range rows {
			o.Terminals = append(o.Terminals, int(r))
		}
		tree, err := o.Tree()
		if err != nil {
			return
		}
		if d := cmp.Diff(o, tree.Outline()); d != "" {
			t.Error(d)
		}
		// Rows that have this tree: each segment is a stretch of a token of its own.
		list := make([][]int32, len(o.Terminals))
		for r, s := range o.Terminals {
			list[r] = make([]int32, tree.Segments[s].End)
			for ; s >= 0; s = tree.Segments[s].Parent {
				for i := tree.Segments[s].Start; i < tree.Segments[s].End; i++ {
					list[r][i] = int32(s)
				}
			}
		}
		if d := cmp.Diff(mustBuild(t, list), tree); d != "" {
			t.Error(d)
		}
	})
}
