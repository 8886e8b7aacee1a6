package trainerrank

import (
	"fmt"
	"slices"
	"testing"

	"github.com/trainerrank/engine/internal/golden"
)

// sizes are the tokens of items.
func sizes(n, each int) []int { return slices.Repeat([]int{each}, n) }

// learner prices waves by tokens, and trusts prices up to eight times the largest wave that has run; a kind of wave that has not is cold.
type learner struct {
	items  []int
	budget func(start int) int
	kind   func(start, stop int) string // nil: all are alike
	known  map[string]int               // tokens of the largest wave of a kind
	exact  bool
}

func (l *learner) name(start, stop int) string {
	if l.kind == nil {
		return ""
	}
	return l.kind(start, stop)
}

func (l *learner) tokens(start, stop, rank, ranks int) (n int) {
	for i := start + rank; i < stop; i += ranks {
		n += l.items[i]
	}
	return n
}

// run runs all waves on so many ranks, and gives their widths and the most that one probed and rejected.
func (l *learner) run(t *testing.T, ranks, remembered int) (widths []int, probes, rejected int) {
	t.Helper()
	for start := 0; start < len(l.items); {
		width := len(l.items) - start
		for rank := range ranks {
			seen := map[int]bool{}
			c, err := widest(len(l.items)-start, ranks, remembered, func(w int) (probed, error) {
				if seen[w] {
					t.Errorf("item %d: a width of %d is probed twice", start, w)
				}
				seen[w] = true
				n := l.tokens(start, start+w, rank, ranks)
				known, warm := l.known[l.name(start, start+w)]
				return probed{n <= l.budget(start), l.exact || n == 0 || warm && n <= 8*known, !warm && !l.exact}, nil
			})
			if err != nil {
				t.Fatal(err)
			}
			width = min(width, c.width)
			probes, rejected = max(probes, len(seen)), max(rejected, c.rejected)
		}
		widths = append(widths, width)
		for rank := range ranks {
			if l.known != nil {
				k := l.name(start, start+width)
				l.known[k] = max(l.known[k], l.tokens(start, start+width, rank, ranks))
			}
		}
		if start += width; start < len(l.items) {
			remembered = width
		}
	}
	return widths, probes, rejected
}

// The worked numbers of section 4.8 of the reference.
func TestWidthsAreThoseOfTheReference(t *testing.T) {
	fixed := func(n int) func(int) int { return func(int) int { return n } }
	slots := func(start, stop int) string { return fmt.Sprint(min(4, stop-start)) } // how many of four, that take turns
	for _, c := range []struct {
		name             string
		items            []int
		ranks            int
		remembered       int
		learner          learner
		widths           []int // the first ones
		probes, rejected int   // of the first wave, at most; 0: any
	}{
		{name: "a small profile reaches eight times as far", items: sizes(64, 2), ranks: 1, learner: learner{budget: fixed(1000), known: map[string]int{"": 2}}, widths: []int{8}},
		{name: "the tail is as long as it is", items: sizes(130, 2), ranks: 1, remembered: 64, learner: learner{budget: fixed(128), exact: true}, widths: []int{64, 64, 2}},
		{name: "a stable window grows (#926)", items: sizes(900, 1), ranks: 1, remembered: 512, learner: learner{budget: fixed(700), exact: true}, widths: []int{672, 228}, probes: 7, rejected: 2},
		{name: "few estimates", items: sizes(96, 5), ranks: 1, remembered: 32, learner: learner{budget: fixed(200), exact: true}, widths: []int{40, 40, 16}, probes: 10},
		{name: "less memory, narrower waves", items: sizes(14, 1), ranks: 1, remembered: 8, learner: learner{budget: func(start int) int {
			if start < 8 {
				return 8
			}
			return 3
		}, exact: true}, widths: []int{8, 3, 3}},
		{name: "never learned: an item per rank", items: sizes(5, 3), ranks: 2, learner: learner{budget: fixed(1000)}, widths: []int{2, 2, 1}},
		{name: "new kinds are tried as they come", items: sizes(16, 1), ranks: 1, learner: learner{budget: fixed(1000), kind: slots, known: map[string]int{}}, widths: []int{1, 2, 4}},
		// The width of 32 was learned with another kind of call; the shortcut would run 32 cold ones.
		{name: "a width is not taken over by a kind that is cold (#927)", items: sizes(64, 1), ranks: 1, remembered: 32, learner: learner{budget: fixed(1000), kind: func(start, stop int) string {
			if stop-start > 1 {
				return "new"
			}
			return "old"
		}, known: map[string]int{"old": 32}}, widths: []int{2}},
		// No price of 2 fits where that of 3 does, since the fewest tokens count, and not the cheapest layout: 41, 42, 43 and not 41, 82, 43.
		{name: "the layout with fewest tokens decides (#826)", items: []int{41, 1, 1, 40}, ranks: 1, learner: learner{budget: fixed(60), exact: true}, widths: []int{3, 1}},
		{name: "what does not fit goes alone", items: []int{9, 1, 1}, ranks: 1, learner: learner{budget: fixed(5), exact: true}, widths: []int{1, 2}},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.learner.items = c.items
			widths, probes, rejected := c.learner.run(t, c.ranks, c.remembered)
			if n := len(c.widths); len(widths) < n || !slices.Equal(widths[:n], c.widths) {
				t.Errorf("widths %v, want %v", widths, c.widths)
			}
			if c.probes > 0 && probes > c.probes || c.rejected > 0 && rejected > c.rejected {
				t.Errorf("%d probes, %d rejected", probes, rejected)
			}
		})
	}
}

// The least of what ranks find by themselves is the widest of the widths that all ranks can take, whatever width was remembered; and it takes few probes.
func TestTheLeastWidthIsTheWidestForAll(t *testing.T) {
	for seed := range uint64(3000) {
		r := golden.Rand(seed)
		ranks, n := 1+r.IntN(5), 1+r.IntN(400)
		items := make([]int, n)
		for i := range items {
			items[i] = r.IntN(12)
		}
		budgets := make([]int, ranks)
		for i := range budgets {
			budgets[i] = r.IntN(12 * n)
		}
		need := func(rank, width int) (sum int) {
			for i := rank; i < width; i += ranks {
				sum += items[i]
			}
			return sum
		}
		norm := normaliser{n, ranks}
		want := norm.least()
		fits := func(width int) bool {
			for rank := range ranks {
				if need(rank, width) > budgets[rank] {
					return false
				}
			}
			return true
		}
		for w := want; w <= n; w++ {
			if norm.normalise(w) == w && fits(w) {
				want = w
			}
		}
		got, alone := n, false
		for rank := range ranks {
			probes, last := 0, 0
			c, err := widest(n, ranks, r.IntN(2*n), func(w int) (probed, error) {
				if w < norm.least() || w > n || norm.normalise(w) != w || w == last {
					t.Fatalf("seed %d: %d is probed of %d items over %d ranks", seed, w, n, ranks)
				}
				probes, last = probes+1, w
				return probed{fits: need(rank, w) <= budgets[rank], trusted: true}, nil
			})
			if err != nil {
				t.Fatal(err)
			}
			if probes > 20 {
				t.Errorf("seed %d: %d probes for %d items", seed, probes, n)
			}
			got, alone = min(got, c.width), alone || c.alone
		}
		small := !fits(norm.least())
		if got != want || alone != small {
			t.Fatalf("seed %d: %d items over %d ranks: a width of %d (alone: %v), want %d (%v)", seed, n, ranks, got, alone, want, small)
		}
	}
}

// Normalised widths are their own, ascend, and reach both ends.
func TestNormalisedWidths(t *testing.T) {
	for remaining := 1; remaining < 600; remaining += 7 {
		for ranks := 1; ranks < 10; ranks++ {
			n := normaliser{remaining, ranks}
			last := 0
			for w := range remaining + 40 {
				got := n.normalise(w)
				if up := n.after(got); up <= got && got < remaining || n.normalise(up) != up || up > got+1 && n.normalise(up-1) != got {
					t.Fatalf("%d items over %d ranks: %d comes after %d", remaining, ranks, up, got)
				}
				if got < last || got < n.least() || got > remaining || n.normalise(got) != got || got > max(w, n.least()) && got != remaining {
					t.Fatalf("%d of %d items over %d ranks: %d, after %d", w, remaining, ranks, got, last)
				}
				last = got
			}
			if last != remaining {
				t.Fatalf("%d items over %d ranks end with %d", remaining, ranks, last)
			}
		}
	}
	if got := (normaliser{900, 3}).normalise(700); got != 693 {
		t.Errorf("700 of 900 over 3 ranks: %d", got)
	}
}
