package trainerrank

import (
	"math"
	"slices"
	"testing"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/internal/golden"
	"github.com/trainerrank/engine/ladder"
)

// oracle looks at every contiguous cut of a call's visiting order, at the prices of full sharing, by counts of chunks: the least that the
// inequality and the running peak need.
func oracle(t *testing.T, p *planner, order []int) (inequality, running []int64) {
	t.Helper()
	n := len(order)
	inequality, running = slices.Repeat([]int64{math.MaxInt64}, n+1), slices.Repeat([]int64{math.MaxInt64}, n+1)
	for mask := range 1 << (n - 1) {
		var required, retained []int64
		for lo, hi := 0, 1; hi <= n; hi++ {
			if hi < n && mask>>(hi-1)&1 == 0 {
				continue
			}
			requests := order[lo:hi:hi]
			if hi-lo == n {
				requests = slices.Sorted(slices.Values(requests))
			}
			price, err := p.Minimal(requests, ladder.Stored)
			if err != nil {
				t.Fatal(err)
			}
			required, retained = append(required, price.Required), append(retained, price.Retained)
			lo = hi
		}
		k := len(required)
		inequality[k] = min(inequality[k], pages(ladder.Total(required, retained)))
		running[k] = min(running[k], pages(ladder.RunningPeak(required, retained)))
	}
	return inequality, running
}

// If any contiguous cut satisfies the inequality, the call is admitted with no more subforwards than the fewest of those; what is admitted fits; the smallest
// budget is the least running peak of all cuts.
func TestNoCutHasFewerSubforwards(t *testing.T) {
	seeds := uint64(150)
	if testing.Short() {
		seeds = 25
	}
	m := golden.Load(t, golden.FS(t, "qwen2-tiny"), golden.Options{Threads: 2})
	rank, err := New(m.Model)
	if err != nil {
		t.Fatal(err)
	}
	splits := 0
	for seed := range seeds {
		r := golden.Rand(seed)
		inputs := golden.Draw(r, m.Spec().Vocabulary, 2+r.IntN(8), 1+r.IntN(200))
		c, err := rank.newCall(forward.Many(inputs...), nil)
		if err != nil {
			t.Fatal(err)
		}
		if len(c.members) == 0 {
			continue
		}
		q, err := rank.ask(c, &ground{model: rank.exact}, false)
		if err != nil {
			t.Fatal(err)
		}
		p := newPlanner(t.Context(), q)
		lc, err := p.describe()
		if err != nil {
			t.Fatal(err)
		}
		inequality, running := oracle(t, p, lc.Order[:len(c.members[0])])
		least := slices.Min(running)
		budgets := []int64{0, least - 1, least, least + 1}
		for _, n := range append(slices.Clone(inequality), running...) {
			if n < math.MaxInt64 {
				budgets = append(budgets, n-1, n, n+device.PageSize-1)
			}
		}
		for _, usable := range budgets {
			a, err := rank.admit(t.Context(), c, &ground{usable: usable, model: rank.exact}, false)
			if err != nil {
				t.Fatal(err)
			}
			if (a.Verdict == Refused) != (usable < least) || a.Verdict == Refused && a.SmallestBudgetBytes != least {
				t.Errorf("seed %d, %d usable bytes: %s, smallest budget %d, want %d", seed, usable, a.Verdict, a.SmallestBudgetBytes, least)
			}
			if a.Verdict == Refused {
				continue
			}
			if a.PredictedPeakBytes > usable || a.Shares.Total() != a.PredictedPeakBytes {
				t.Errorf("seed %d, %d usable bytes: predicted %d, shares %v", seed, usable, a.PredictedPeakBytes, a.Shares)
			}
			fewest := slices.IndexFunc(inequality, func(n int64) bool { return n <= usable })
			if fewest > 0 && a.SubforwardCount() > fewest {
				t.Errorf("seed %d, %d usable bytes: %d subforwards, %d would do", seed, usable, a.SubforwardCount(), fewest)
			}
			if a.SubforwardCount() > 1 {
				splits++
			}
		}
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
	t.Logf("%d splits", splits)
}
