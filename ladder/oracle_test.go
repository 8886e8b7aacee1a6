package ladder

import (
	"bytes"
	"encoding/json"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/trainerrank/engine/forward/prefixtree"
	"github.com/trainerrank/engine/profile"
)

// checkAdmission holds what is true of every admission.
func checkAdmission(t *testing.T, c *Call, a *Admission) {
	t.Helper()
	var all []int
	var required, retained []int64
	for i, chunk := range a.Chunks {
		all = append(all, chunk.Requests...)
		required, retained = append(required, chunk.Price.Required), append(retained, chunk.Price.Retained)
		if !slices.Equal(a.SubforwardRequestIndices[i], chunk.Requests) {
			t.Errorf("subforward %d: %v is not %v", i, a.SubforwardRequestIndices[i], chunk.Requests)
		}
		if i > 0 && chunk.Price.Ephemeral() > a.Chunks[i-1].Price.Ephemeral() {
			t.Errorf("subforward %d has more ephemeral bytes than the one before", i)
		}
	}
	slices.Sort(all)
	for i, r := range all {
		if i != r || len(all) != len(c.Requests) {
			t.Fatalf("requests %v are answered, %d were asked", all, len(c.Requests))
		}
	}
	// The peak of what is really run, added up as it runs.
	live, peak := int64(0), int64(0)
	for j := range required {
		peak = max(peak, live+required[j])
		live += retained[j]
	}
	if peak > a.PredictedPeakBytes {
		t.Errorf("the peak is %d, predicted was %d", peak, a.PredictedPeakBytes)
	}
	grad := slices.ContainsFunc(c.Requests, func(r Request) bool { return r.Grad && r.Group >= 0 })
	if grad && len(required) > 0 && Total(required, retained) != a.PredictedPeakBytes || !grad && peak != a.PredictedPeakBytes {
		t.Errorf("predicted %d, total %d, peak %d", a.PredictedPeakBytes, Total(required, retained), peak)
	}
	if (a.Verdict == Refused) != (a.PredictedPeakBytes > a.UsableLimitBytes) {
		t.Errorf("%s, but %d of %d bytes are needed", a.Verdict, a.PredictedPeakBytes, a.UsableLimitBytes)
	}
	if (a.Verdict == Refused) != (a.Reason != "") || a.Verdict == Whole && len(a.Chunks) != 1 || a.Verdict == Split && len(a.Chunks) < 2 {
		t.Errorf("%s, %q, %d chunks", a.Verdict, a.Reason, len(a.Chunks))
	}
	for i, r := range a.Rungs {
		if r.Fits && (r.TotalBytes > a.UsableLimitBytes || r.WhyNot(a.UsableLimitBytes) != "") || !r.Fits && r.WhyNot(a.UsableLimitBytes) == "" {
			t.Errorf("rung %d: %+v", i, r)
		}
	}
	if last := a.Rungs; len(last) > 0 && a.Verdict != Refused && (last[len(last)-1].TotalBytes != a.PredictedPeakBytes || !last[len(last)-1].Fits) {
		t.Errorf("the last rung is not the one that is admitted:\n%s", a)
	}
}

// prefix is the first m inputs as a call of its own.
func prefix(c *Call, m int) *Call {
	p := *c
	p.Requests = c.Requests[:m]
	p.Order = slices.DeleteFunc(slices.Clone(c.Order), func(r int) bool { return r >= m })
	return &p
}

func verdict(t *testing.T, c *Call, pl Planner, pr Pricer, usable int64, o Options) *Admission {
	t.Helper()
	a, err := Search(c, pl, pr, usable, o)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// checkHints: with the smallest budget the call is admitted, with a byte less it is not; the largest prefix is admitted, one input more is not.
func checkHints(t *testing.T, c *Call, pl Planner, pr Pricer, a *Admission, o Options) {
	t.Helper()
	if a.Verdict != Refused {
		if a.LargestPrefix != len(c.Requests) {
			t.Errorf("admitted, but only %d inputs fit", a.LargestPrefix)
		}
		o.Explain = true
		b := verdict(t, c, pl, pr, a.UsableLimitBytes, o)
		grad := slices.ContainsFunc(c.Requests, func(r Request) bool { return r.Grad && r.Group >= 0 })
		if b.SmallestBudgetBytes > a.SmallestBudgetBytes && grad && len(c.Requests) <= exactLimit {
			t.Errorf("the smallest budget is %d, this plan needs %d", b.SmallestBudgetBytes, a.SmallestBudgetBytes)
		}
		a = b
	}
	if b := verdict(t, c, pl, pr, a.SmallestBudgetBytes, o); b.Verdict == Refused {
		t.Errorf("the smallest budget %d is not enough:\n%s", a.SmallestBudgetBytes, b)
	}
	if b := verdict(t, c, pl, pr, a.SmallestBudgetBytes-1, o); b.Verdict != Refused || b.SmallestBudgetBytes != a.SmallestBudgetBytes {
		t.Errorf("a byte less than the smallest budget %d is enough:\n%s", a.SmallestBudgetBytes, b)
	}
	for _, m := range []int{a.LargestPrefix, a.LargestPrefix + 1} {
		if m > len(c.Requests) {
			continue
		}
		if b := verdict(t, prefix(c, m), pl, pr, a.UsableLimitBytes, o); (b.Verdict == Refused) != (m > a.LargestPrefix) {
			t.Errorf("the largest prefix is %d, but of %d inputs: %s\n%s", a.LargestPrefix, m, b, a)
		}
	}
}

// toy prices requests by their tokens beyond what each shares with the one before it in visiting order, per retention. Monotone, by construction: everything it
// adds up is at least 0, and a shared token that is not shared after a cut is paid again.
type toy struct {
	tokens, common, outputs []int64 // per request; common with the one before it in the order
	place                   []int
	rate, kept, fixed       int64 // per token; kept of Stored
	step                    int64 // tokens are rounded up to a multiple
	dearer                  int64 // tokens that the cheapest layout has more
	calls                   int
	slack                   int64 // how far the bound is below
}

func (p *toy) packed(requests []int) int64 {
	sorted := slices.Clone(requests)
	slices.SortFunc(sorted, func(a, b int) int { return p.place[a] - p.place[b] })
	n := int64(0)
	for i, r := range sorted {
		n += p.tokens[r]
		if i == 0 {
			continue
		}
		shared := p.tokens[r]
		for q := p.place[sorted[i-1]] + 1; q <= p.place[r]; q++ {
			for r2, at := range p.place {
				if at == q {
					shared = min(shared, p.common[r2])
				}
			}
		}
		n -= shared
	}
	return (n + p.step - 1) / p.step * p.step
}

func (p *toy) of(requests []int, packed int64, r Retention) profile.Price {
	out := int64(0)
	for _, q := range requests {
		out += p.outputs[q]
	}
	kept := p.kept
	switch r {
	case Layer:
		kept /= 3
	case Replay:
		kept = 0
	}
	return profile.Price{
		Required: out + kept*packed + p.fixed + p.rate*packed, Retained: out + kept*packed, Outputs: out, Basis: profile.Exact, Trusted: true,
	}
}

func (p *toy) Plan(requests []int, l Layout) (*Plan, error) {
	n := p.packed(requests)
	if l == CostOptimal {
		n += p.dearer
	}
	return &Plan{Packed: int(n), Layouts: []*prefixtree.Layout{{Depth: len(requests)}}, Work: slices.Clone(requests)}, nil
}

func (p *toy) Price(plan *Plan, r Retention) (profile.Price, error) {
	p.calls++
	return p.of(plan.Work.([]int), int64(plan.Packed), r), nil
}

func (p *toy) Minimal(requests []int, r Retention) (profile.Price, error) {
	p.calls++
	return p.of(requests, p.packed(requests), r), nil
}

func (p *toy) Bound(requests []int, r Retention) (profile.Price, error) {
	price := p.of(requests, p.packed(requests), r)
	price.Required -= min(p.slack, price.Ephemeral())
	return price, nil
}

// random is a call with a toy.
func random(r *rand.Rand, most int) (*Call, *toy) {
	n := 1 + r.IntN(most)
	p := &toy{step: 1, rate: r.Int64N(12), fixed: r.Int64N(2) * r.Int64N(40), place: make([]int, n), dearer: r.Int64N(2) * r.Int64N(9), slack: r.Int64N(2) * r.Int64N(50)}
	if r.IntN(3) == 0 {
		p.step = 4
	}
	grad := r.IntN(2) == 0
	if grad {
		p.kept = r.Int64N(12)
	}
	c := &Call{Order: r.Perm(n)}
	idle, width := r.IntN(3) == 0, r.Int64N(30)
	for i := range n {
		q := Request{Tokens: 1 + r.IntN(20), Grad: grad && r.IntN(4) > 0}
		if idle && r.IntN(3) == 0 {
			q.Group = -1
		} else {
			q.Outputs = int64(q.Tokens) * (1 + width*r.Int64N(2)*r.Int64N(2))
		}
		p.tokens, p.outputs = append(p.tokens, int64(q.Tokens)), append(p.outputs, q.Outputs)
		p.common = append(p.common, 0)
		if q.Group < 0 {
			p.tokens[i] = 0
		}
		c.Requests = append(c.Requests, q)
	}
	slices.SortStableFunc(c.Order, func(a, b int) int { return min(0, c.Requests[b].Group) - min(0, c.Requests[a].Group) })
	for at, q := range c.Order {
		p.place[q] = at
		if at > 0 {
			p.common[q] = r.Int64N(1 + min(p.tokens[q], p.tokens[c.Order[at-1]]))
		}
	}
	return c, p
}

// oracle looks at every contiguous cut of the visiting order of the requests that want an output. fewest is the smallest count that satisfies the
// inequality (0 if none), least the smallest total, of the inequality and of the running peak.
func oracle(c *Call, p *toy, r Retention, usable int64) (fewest int, least, leastPeak int64) {
	var order []int
	for _, q := range c.Order {
		if c.Requests[q].Group >= 0 {
			order = append(order, q)
		}
	}
	least, leastPeak = math.MaxInt64, math.MaxInt64
	for cuts := range 1 << (len(order) - 1) {
		var required, retained []int64
		lo := 0
		for hi := 1; hi <= len(order); hi++ {
			if hi == len(order) || cuts>>(hi-1)&1 == 1 {
				price := p.of(order[lo:hi], p.packed(order[lo:hi]), r)
				required, retained = append(required, price.Required), append(retained, price.Retained)
				lo = hi
			}
		}
		total := Total(required, retained)
		least, leastPeak = min(least, total), min(leastPeak, RunningPeak(required, retained))
		if total <= usable && (fewest == 0 || len(required) < fewest) {
			fewest = len(required)
		}
	}
	return fewest, least, leastPeak
}

// thresholds are budgets around everything that a search compares with.
func thresholds(r *rand.Rand, c *Call, p *toy) int64 {
	var order []int
	for _, q := range c.Order {
		if c.Requests[q].Group >= 0 {
			order = append(order, q)
		}
	}
	whole := p.of(order, p.packed(order), Stored).Required
	_, least, peak := oracle(c, p, Stored, 0)
	return []int64{whole, whole - 1, least, least - 1, peak, peak - 1, r.Int64N(whole + 1), least + r.Int64N(1+max(0, whole-least)), least + r.Int64N(1+max(0, whole-least))}[r.IntN(9)]
}

// Ten thousand random calls against every contiguous cut of their order.
func TestSearchAgainstAllCuts(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	verdicts := map[Verdict]int{}
	fewer := 0
	for i := range 10_000 {
		most := 7
		if i%500 == 0 {
			most = 12
		}
		c, p := random(r, most)
		if !slices.ContainsFunc(c.Requests, func(q Request) bool { return q.Group >= 0 }) {
			continue
		}
		usable := thresholds(r, c, p)
		o := Options{Retentions: []Retention{Stored}, Inequality: r.IntN(4) == 0}
		a := verdict(t, c, p, p, usable, o)
		if !o.Inequality {
			checkAdmission(t, c, a)
		}
		verdicts[a.Verdict]++
		fewest, least, peak := oracle(c, p, Stored, usable)
		if fewest > 0 && (a.Verdict == Refused || a.SubforwardCount() > fewest) {
			t.Errorf("%d subforwards fit:\n%s", fewest, a)
		}
		if fewest == 0 && a.Verdict != Refused && a.PredictedPeakBytes > usable {
			t.Errorf("admitted, and does not fit:\n%s", a)
		}
		grad := slices.ContainsFunc(c.Requests, func(q Request) bool { return q.Grad && q.Group >= 0 })
		exact := grad || o.Inequality
		if !exact && p.kept == 0 {
			exact, least = true, peak // only outputs stay: nothing that fits is missed at all
		}
		if (a.Verdict == Refused) != (least > usable) && (exact || a.Verdict == Refused) {
			t.Errorf("%d bytes are needed at least, %d usable:\n%s", least, usable, a)
		}
		checkHints(t, c, p, p, a, o)
		o.Explain = true
		if b := verdict(t, c, p, p, usable, o); b.SmallestBudgetBytes != least && (exact || b.SmallestBudgetBytes > least || b.SmallestBudgetBytes < peak) {
			t.Errorf("smallest budget %d, want %d", b.SmallestBudgetBytes, least)
		}
		// Never worse than the studied ladder.
		classic := verdict(t, c, p, p, usable, Options{Classic: true})
		if classic.Verdict != Refused {
			if a.Verdict == Refused || a.SubforwardCount() > classic.SubforwardCount() {
				t.Errorf("upstream:\n%s\nours:\n%s", classic, a)
			}
			if a.SubforwardCount() < classic.SubforwardCount() {
				fewer++
			}
		}
		one, _ := json.Marshal(a)
		two, _ := json.Marshal(verdict(t, c, p, p, usable, Options{Retentions: []Retention{Stored}, Inequality: o.Inequality}))
		if !bytes.Equal(one, two) {
			t.Errorf("two searches:\n%s\n%s", one, two)
		}
		if t.Failed() {
			t.Fatalf("call %d: %+v\n%+v\nusable %d", i, c, p, usable)
		}
	}
	t.Logf("%v, in fewer subforwards than upstream %d", verdicts, fewer)
	if verdicts[Split] < 1000 || verdicts[Refused] < 1000 || verdicts[Whole] < 500 || fewer < 100 {
		t.Error("the calls are too easy")
	}
}

// Beyond the limit of dynamic programming the hints stay exact and nothing is worse than upstream.
func TestSearchBeyondTheExactLimit(t *testing.T) {
	defer func(n int) { exactLimit = n }(exactLimit)
	exactLimit = 2
	r := rand.New(rand.NewPCG(9, 10))
	for i := range 3000 {
		c, p := random(r, 8)
		if !slices.ContainsFunc(c.Requests, func(q Request) bool { return q.Group >= 0 }) {
			continue
		}
		usable := thresholds(r, c, p)
		o := Options{Retentions: []Retention{Stored}}
		a := verdict(t, c, p, p, usable, o)
		checkAdmission(t, c, a)
		checkHints(t, c, p, p, a, o)
		if classic := verdict(t, c, p, p, usable, Options{Classic: true}); classic.Verdict != Refused && (a.Verdict == Refused || a.SubforwardCount() > classic.SubforwardCount()) {
			t.Errorf("upstream:\n%s\nours:\n%s", classic, a)
		}
		if t.Failed() {
			t.Fatalf("call %d: %+v\n%+v\nusable %d", i, c, p, usable)
		}
	}
}

// With every retention allowed: stored if that fits in any way, then layer, then replay; hints are about all of them.
func TestRetentionsAreTriedInOrder(t *testing.T) {
	r := rand.New(rand.NewPCG(11, 12))
	used := map[Retention]int{}
	for i := range 3000 {
		c, p := random(r, 6)
		if !slices.ContainsFunc(c.Requests, func(q Request) bool { return q.Group >= 0 }) {
			continue
		}
		usable := max(0, thresholds(r, c, p)*r.Int64N(5)/4)
		a := verdict(t, c, p, p, usable, Options{})
		checkAdmission(t, c, a)
		checkHints(t, c, p, p, a, Options{})
		grad := slices.ContainsFunc(c.Requests, func(q Request) bool { return q.Grad && q.Group >= 0 })
		want := Stored
		for _, q := range []Retention{Stored, Layer, Replay} {
			if fewest, _, _ := oracle(c, p, q, usable); fewest > 0 && grad {
				want = q
				if a.Verdict == Refused || a.SubforwardCount() > fewest {
					t.Errorf("%d subforwards fit with %s:\n%s", fewest, q, a)
				}
				break
			}
		}
		if a.Retention != want {
			t.Errorf("retention %s, want %s\n%s", a.Retention, want, a)
		}
		if a.Verdict != Refused {
			used[a.Retention]++
		}
		if t.Failed() {
			t.Fatalf("call %d: %+v\n%+v\nusable %d", i, c, p, usable)
		}
	}
	if used[Layer] < 30 || used[Replay] < 30 {
		t.Errorf("%v: too few", used)
	}
}
