package prefixtree

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// randomRows draws rows from a random tree with up to width children per node: with duplicates, with rows that end inside others, in random order,
// of tokens that repeat.
func randomRows(rng *rand.Rand, n, width, stretch int) [][]int32 {
	rows := make([][]int32, 0, n)
	for len(rows) < n {
		var row []int32
		switch k := rng.IntN(10); {
		case k == 0 && len(rows) > 0: // a duplicate
			row = slices.Clone(rows[rng.IntN(len(rows))])
		case k == 1 && len(rows) > 0: // ends inside another
			of := rows[rng.IntN(len(rows))]
			row = slices.Clone(of[:1+rng.IntN(len(of))])
		case k < 7 && len(rows) > 0: // parts from another
			of := rows[rng.IntN(len(rows))]
			row = slices.Clone(of[:rng.IntN(len(of)+1)])
			fallthrough
		default:
			for range 1 + rng.IntN(stretch) {
				row = append(row, int32(rng.IntN(width))-1)
			}
		}
		rows = append(rows, row)
	}
	return rows
}

// eachRandomRows runs a property over many row sets, small and not so small.
func eachRandomRows(t *testing.T, seed uint64, cases, maxRows int, property func(t *testing.T, rng *rand.Rand, rows [][]int32)) {
	t.Helper()
	rng := rand.New(rand.NewPCG(seed, 0))
	for i := range cases {
		rows := randomRows(rng, 1+rng.IntN(maxRows), 2+rng.IntN(3), []int{1, 3, 40, 700}[i%4])
		property(t, rng, rows)
		if t.Failed() {
			t.Fatalf("case %d of seed %d: rows %v", i, seed, rows)
		}
	}
}

// buildByTheBook follows the words of section 4.2.
func buildByTheBook(rows [][]int32) *Tree {
	t := &Tree{Decisions: []int{}, Terminals: make([]int, len(rows))}
	type state struct {
		rows          []int
		start, parent int
	}
	all := make([]int, len(rows))
	for r := range rows {
		all[r] = r
		t.Logical += len(rows[r])
	}
	emit := func(s state, end int) int {
		i, depth := len(t.Segments), 1
		if s.parent >= 0 {
			depth += t.Segments[s.parent].Depth
		}
		t.Segments = append(t.Segments, Segment{s.parent, s.start, end, depth, s.rows})
		for _, r := range s.rows {
			t.Terminals[r] = i
		}
		if len(s.rows) > 1 {
			t.Decisions = append(t.Decisions, i)
		}
		return i
	}
	for stack := []state{{all, 0, -1}}; len(stack) > 0; {
		s := stack[len(stack)-1]
		stack = stack[:len(stack)-1]
		var active []int
		for _, r := range s.rows {
			if len(rows[r]) > s.start {
				active = append(active, r)
			}
		}
		s.rows = active
		if len(active) == 0 {
			continue
		}
		if len(active) == 1 {
			emit(s, len(rows[active[0]]))
			continue
		}
		end := s.start
		for agree := true; agree; {
			for _, r := range active {
				agree = agree && len(rows[r]) > end && rows[r][end] == rows[active[0]][end]
			}
			if agree {
				end++
			}
		}
		if end > s.start {
			stack = append(stack, state{active, end, emit(s, end)})
			continue
		}
		var parts []state
		seen := map[int32]int{}
		for _, r := range active {
			k, ok := seen[rows[r][s.start]]
			if !ok {
				k = len(parts)
				seen[rows[r][s.start]] = k
				parts = append(parts, state{nil, s.start, s.parent})
			}
			parts[k].rows = append(parts[k].rows, r)
		}
		slices.Reverse(parts)
		stack = append(stack, parts...)
	}
	return t
}

func mustBuild(t testing.TB, rows [][]int32) *Tree {
	t.Helper()
	tree, err := Build(rows)
	if err != nil {
		t.Fatal(err)
	}
	return tree
}

func TestBuildFollowsTheBook(t *testing.T) {
	for _, maxRows := range []int{6, 200} {
		eachRandomRows(t, 1, 800, maxRows, func(t *testing.T, _ *rand.Rand, rows [][]int32) {
			if diff := cmp.Diff(buildByTheBook(rows), mustBuild(t, rows)); diff != "" {
				t.Errorf("(-book +got):\n%s", diff)
			}
		})
	}
}

func TestBuildKeepsNoTokensAndNeedsOnlyTheirValues(t *testing.T) {
	eachRandomRows(t, 2, 200, 40, func(t *testing.T, _ *rand.Rand, rows [][]int32) {
		// The same rows, once as clones and once as windows of one buffer where one is a prefix of another.
		aliased := slices.Clone(rows)
		for i, a := range rows {
			for _, b := range rows {
				if len(b) >= len(aliased[i]) && slices.Equal(a, b[:len(a)]) {
					aliased[i] = b[:len(a)]
				}
			}
		}
		cloned := make([][]int32, len(rows))
		for r, row := range rows {
			cloned[r] = slices.Clone(row)
		}
		one, two := mustBuild(t, aliased), mustBuild(t, cloned)
		for _, row := range cloned {
			clear(row)
		}
		if diff := cmp.Diff(one, two); diff != "" {
			t.Errorf("(-aliased +cloned):\n%s", diff)
		}
	})
}

func TestBuildRefusesNothingToDo(t *testing.T) {
	for _, rows := range [][][]int32{nil, {}} {
		if _, err := Build(rows); !errors.Is(err, ErrNoRows) {
			t.Errorf("Build(%v): got %v, want %v", rows, err, ErrNoRows)
		}
	}
	_, err := Build([][]int32{{1}, {2, 3}, {}, nil})
	var e *RowError
	if !errors.As(err, &e) || e.Row != 2 || e.Op != "build" {
		t.Errorf("got %v, want an error about row 2", err)
	}
	if want := "prefixtree: build: row 2 has no tokens"; err.Error() != want {
		t.Errorf("got %q, want %q", err, want)
	}
}

func TestCommonPrefixAtEveryLengthAndPlace(t *testing.T) {
	a, b := make([]int32, 2*largeBlock+3*smallBlock+5), make([]int32, 2*largeBlock+3*smallBlock+5)
	for i := range a {
		a[i], b[i] = int32(i), int32(i)
	}
	for n := range len(a) + 1 {
		if got := commonPrefix(a[:n], b); got != n {
			t.Fatalf("first %d: got %d", n, got)
		}
		if got := commonPrefix(a, a[:n]); got != n {
			t.Fatalf("first %d of the same: got %d", n, got)
		}
		if n == len(b) {
			break
		}
		b[n] = -1
		if got := commonPrefix(a, b); got != n {
			t.Fatalf("difference at %d: got %d", n, got)
		}
		b[n] = a[n]
	}
}

// chain is n rows of which each is a prefix of the next, all windows of one buffer.
func chain(n int) [][]int32 {
	buffer := make([]int32, n)
	rows := make([][]int32, n)
	for i := range rows {
		buffer[i] = int32(i * 7)
		rows[i] = buffer[:i+1]
	}
	return rows
}

func TestDeepChainsAreNeitherRecursiveNorQuadratic(t *testing.T) {
	const n = 100_000
	ascending := chain(n)
	descending := slices.Clone(ascending)
	slices.Reverse(descending)
	// Two chains, row by row in turn: no segment's rows are consecutive numbers.
	interleaved := make([][]int32, 0, n)
	other := make([]int32, n/2)
	for i := range other {
		other[i] = -1 - int32(i)
		interleaved = append(interleaved, ascending[i], other[:i+1])
	}
	for _, c := range []struct {
		name           string
		rows           [][]int32
		segments, deep int
	}{{"ascending", ascending, n, n}, {"descending", descending, n, n}, {"interleaved", interleaved, n, n / 2}} {
		t.Run(c.name, func(t *testing.T) {
			tree := mustBuild(t, c.rows)
			if got := len(tree.Segments); got != c.segments {
				t.Fatalf("got %d segments, want %d", got, c.segments)
			}
			full := tree.FullSharing()
			if got, want := metricsOf(full), (metrics{c.segments, c.segments, c.deep}); got != want {
				t.Errorf("full sharing: got %+v, want %+v", got, want)
			}
			if got := tree.NoSharing().Packed; got != tree.Logical {
				t.Errorf("no sharing: got %d packed tokens, want %d", got, tree.Logical)
			}
			b, err := full.Pack(c.rows)
			if err != nil {
				t.Fatal(err)
			}
			var gather []int32
			var path []int
			for r := 0; r < n; r += n/50 + 1 {
				gather, path = b.Gather(r, gather[:0]), b.Path(b.Terminals[r], path[:0])
				if len(gather) != len(c.rows[r]) || len(path) != len(c.rows[r]) {
					t.Fatalf("row %d has %d tokens: gathered %d, path of %d spans", r, len(c.rows[r]), len(gather), len(path))
				}
				for i, at := range gather {
					if b.Tokens[at] != c.rows[r][i] {
						t.Fatalf("row %d, token %d: got %d, want %d", r, i, b.Tokens[at], c.rows[r][i])
					}
				}
			}
			if len(tree.String()) > 20_000 || len(full.String()) > 20_000 {
				t.Error("the printed form of a deep tree is not small")
			}
		})
	}
}

func TestAllocationsDoNotDependOnTheNumberOfTokens(t *testing.T) {
	allocations := func(scale int) float64 {
		rows := grpo(2, 8, scale, 4*scale, scale/4)
		return testing.AllocsPerRun(5, func() {
			if _, err := mustBuild(t, rows).FullSharing().Pack(rows); err != nil {
				t.Fatal(err)
			}
		})
	}
	small, large := allocations(8), allocations(8000)
	if small != large {
		t.Errorf("%v allocations for few tokens, %v for many", small, large)
	}
	t.Logf("%v allocations", large)
}

func TestListsOfATreeHoldAtMostOneNumberPerToken(t *testing.T) {
	eachRandomRows(t, 3, 400, 300, func(t *testing.T, _ *rand.Rand, rows [][]int32) {
		tree, n := mustBuild(t, rows), 0
		for i := range tree.Segments {
			s := &tree.Segments[i]
			n += len(s.Rows)
			if cap(s.Rows) != len(s.Rows) {
				t.Errorf("segment %d: append to its rows would write into another list", i)
			}
		}
		if n > tree.Logical {
			t.Errorf("%d numbers in the lists, %d tokens", n, tree.Logical)
		}
	})
}

func FuzzBuild(f *testing.F) {
	f.Add([]byte("abc\x00abd\x00ab\x00abc"), byte(0b101))
	f.Add([]byte("a\x00a\x00a\x00\x00b"), byte(0))
	f.Add([]byte{1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 255}, byte(0xff))
	f.Fuzz(func(t *testing.T, data []byte, choice byte) {
		// Zero ends a row; the bytes between are tokens, some of them negative.
		rows := [][]int32{nil}
		for _, c := range data {
			if c == 0 {
				rows = append(rows, nil)
			} else {
				last := &rows[len(rows)-1]
				*last = append(*last, int32(int8(c)))
			}
		}
		empty := slices.IndexFunc(rows, func(row []int32) bool { return len(row) == 0 })
		tree, err := Build(rows)
		if empty >= 0 {
			var e *RowError
			if !errors.As(err, &e) || e.Row != empty {
				t.Fatalf("row %d is empty: got %v", empty, err)
			}
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(buildByTheBook(rows), tree); diff != "" {
			t.Fatalf("(-book +got):\n%s", diff)
		}
		var decisions []int
		for i, d := range tree.Decisions {
			if choice>>(i%8)&1 != 0 {
				decisions = append(decisions, d)
			}
		}
		mustPack(t, mustLayout(t, tree, decisions), rows)
		mustPack(t, tree.FullSharing(), rows)
		mustPack(t, tree.NoSharing(), rows)
	})
}
