package trainerrank

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/forward/prefixtree"
	"github.com/trainerrank/engine/internal/golden"
	"github.com/trainerrank/engine/ladder"
	"github.com/trainerrank/engine/profile"
)

// calls is how many random calls are held against every cut of theirs. docs/planner.md has what came of ten thousand:
// go test -run Oracle -calls 10000 -timeout 2h -v ./trainerrank
var calls = flag.Int("calls", 150, "random calls of TestOracle")

// windowed is a model in which half of the layers see four positions, all have four norms, and the head is the embedding.
const windowed = `{"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 40, "intermediate_size": 56,
	"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 24, "rms_norm_eps": 1e-6,
	"query_pre_attn_scalar": 24, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "rope_theta": 10000.0,
	"rope_local_base_freq": 10000.0, "vocab_size": 71, "tie_word_embeddings": true, "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 4096}`

// oracle knows all prices of a call: of every run of its visiting order with full sharing.
type oracle struct {
	order  []int // the requests that want an output, in visiting order
	prices [][]profile.Price
}

func (o *oracle) price(lo, hi int) profile.Price { return o.prices[lo][hi-lo-1] }

func newOracle(t *testing.T, p *planner, order []int) *oracle {
	t.Helper()
	o := &oracle{order: order}
	for lo := range order {
		var list []profile.Price
		for hi := lo + 1; hi <= len(order); hi++ {
			list = append(list, o.of(t, p, order[lo:hi]))
		}
		o.prices = append(o.prices, list)
	}
	return o
}

// of is the price of requests with full sharing. All of them are in the caller's order, in which a whole call runs them.
func (o *oracle) of(t *testing.T, p *planner, requests []int) profile.Price {
	t.Helper()
	if requests = slices.Clone(requests); len(requests) == len(o.order) {
		slices.Sort(requests)
	}
	price, err := p.Minimal(requests, ladder.Stored)
	if err != nil {
		t.Fatal(err)
	}
	return price
}

// cuts looks at every contiguous cut, by counts of chunks: the least that the inequality and the running peak need.
func (o *oracle) cuts() (inequality, running []int64) {
	n := len(o.order)
	inequality, running = slices.Repeat([]int64{math.MaxInt64}, n+1), slices.Repeat([]int64{math.MaxInt64}, n+1)
	for mask := range 1 << (n - 1) {
		var chunks []profile.Price
		for lo, hi := 0, 1; hi <= n; hi++ {
			if hi == n || mask>>(hi-1)&1 == 1 {
				chunks = append(chunks, o.price(lo, hi))
				lo = hi
			}
		}
		slices.SortStableFunc(chunks, func(a, b profile.Price) int { return cmp.Compare(b.Ephemeral(), a.Ephemeral()) })
		peak, kept, k := int64(0), int64(0), len(chunks)
		for _, c := range chunks { // as they are run
			peak = max(peak, kept+c.Required)
			kept += c.Retained
		}
		inequality[k] = min(inequality[k], pages(kept+chunks[0].Ephemeral()))
		running[k] = min(running[k], pages(peak))
	}
	return inequality, running
}

// monotone checks that a request more never makes a chunk cheaper, in any number: of every run, and of random sets.
func (o *oracle) monotone(t *testing.T, p *planner, r *rand.Rand) {
	t.Helper()
	check := func(less, more profile.Price, of, with []int) {
		if less.Required > more.Required || less.Retained > more.Retained || less.Outputs > more.Outputs || less.Ephemeral() > more.Ephemeral() {
			t.Errorf("requests %v need %+v, and %v need %+v", of, less, with, more)
		}
	}
	n := len(o.order)
	for lo := range n {
		for hi := lo + 1; hi <= n; hi++ {
			if hi < n {
				check(o.price(lo, hi), o.price(lo, hi+1), o.order[lo:hi], o.order[lo:hi+1])
			}
			if lo > 0 {
				check(o.price(lo, hi), o.price(lo-1, hi), o.order[lo:hi], o.order[lo-1:hi])
			}
		}
	}
	for range 4 {
		of := slices.DeleteFunc(slices.Clone(o.order), func(int) bool { return r.IntN(3) == 0 })
		for len(of) > 1 {
			i := r.IntN(len(of))
			less := slices.Delete(slices.Clone(of), i, i+1)
			check(o.of(t, p, less), o.of(t, p, of), less, of)
			of = less
		}
	}
}

// trial is a random call with all that is known of it.
type trial struct {
	*testing.T
	what       string
	m          *golden.Loaded
	opts       []Option
	in         forward.Inputs
	inputs     []forward.Input
	want       []golden.Answer // of the unsplit call
	inequality []int64         // the least that any cut into so many chunks needs
	whole      int64
	least      int64
	seen       *seen
}

// seen counts what was tried.
type seen struct{ calls, budgets, splits, refusals, prefixes, runs, splitRuns int }

func (s *seen) String() string {
	return fmt.Sprintf("%d calls planned in %d budgets: %d splits, %d refusals, %d largest prefixes; %d run, %d of them split",
		s.calls, s.budgets, s.splits, s.refusals, s.prefixes, s.runs, s.splitRuns)
}

// fewest is the smallest number of chunks into which any cut satisfies the inequality; -1 if none does.
func (c *trial) fewest(usable int64) int {
	return slices.IndexFunc(c.inequality, func(n int64) bool { return n <= usable })
}

// rank wraps the model with so many usable bytes, on its device or on one full of NaN.
func (c *trial) rank(usable int64, dev device.Device) *TrainerRank {
	rank, err := New(c.m.Model, append(c.opts, WithUsableBytes(usable), WithDevice(dev))...)
	if err != nil {
		c.Fatal(err)
	}
	return rank
}

// planned holds the plan in so many bytes against the oracle.
func (c *trial) planned(usable int64, prefix bool) {
	rank := c.rank(usable, c.m.Host)
	a, err := rank.admitted(c, c.in)
	if err != nil {
		c.Fatal(err)
	}
	c.seen.budgets++
	if (a.Verdict == Refused) != (usable < c.least) {
		c.Errorf("%s, %d usable bytes: %s, the smallest budget is %d", c.what, usable, a.Verdict, c.least)
	}
	if a.Verdict != Refused {
		if a.PredictedPeakBytes > usable || a.Shares.Total() != a.PredictedPeakBytes || (a.Verdict == Whole) != (usable >= c.whole) {
			c.Errorf("%s, %d usable bytes: %s, predicted %d, shares %v, whole %d", c.what, usable, a.Verdict, a.PredictedPeakBytes, a.Shares, c.whole)
		}
		if k := c.fewest(usable); k > 0 && a.SubforwardCount() > k {
			c.Errorf("%s, %d usable bytes: %d subforwards, %d would do", c.what, usable, a.SubforwardCount(), k)
		}
		if a.SubforwardCount() > 1 {
			c.seen.splits++
		}
		return
	}
	c.seen.refusals++
	if a.SmallestBudgetBytes != c.least || a.PredictedPeakBytes != c.whole {
		c.Errorf("%s, %d usable bytes: refused with the smallest budget %d, want %d, predicted %d, want %d", c.what, usable, a.SmallestBudgetBytes, c.least, a.PredictedPeakBytes, c.whole)
	}
	if !prefix {
		return
	}
	c.seen.prefixes++
	for n, refused := range map[int]bool{a.LargestPrefix: false, a.LargestPrefix + 1: true} {
		p, err := rank.admitted(c, forward.Many(c.inputs[:n]...))
		if err != nil {
			c.Fatal(err)
		}
		if (p.Verdict == Refused) != refused {
			c.Errorf("%s, %d usable bytes, largest prefix %d: the first %d inputs are %s", c.what, usable, a.LargestPrefix, n, p.Verdict)
		}
	}
}

// admitted plans a call as DPRankForward does.
func (t *TrainerRank) admitted(c *trial, in forward.Inputs) (*Admission, error) {
	call, err := t.newCall(in, nil)
	if err != nil {
		return nil, err
	}
	g, err := t.survey(c.Context(), call, nil)
	if err != nil {
		return nil, err
	}
	return t.admit(c.Context(), call, g, false)
}

// ran runs the call in so many bytes: of a limit, or what live ballast leaves of the device.
func (c *trial) ran(usable int64, dev device.Device, ballast bool) {
	rank := c.rank(usable, dev)
	if ballast {
		usable &^= device.PageSize - 1
		block, err := dev.Allocate(device.Ballast, dev.Free()-usable)
		if err != nil {
			c.Fatal(err)
		}
		defer block.Free()
		rank = c.rank(math.MaxInt64, dev)
	}
	what := fmt.Sprintf("%s, run in %d usable bytes (ballast %t)", c.what, usable, ballast)
	c.seen.runs++
	before, free := dev.Stats(), dev.Free()
	dev.ResetPeak()
	res, err := rank.DPRankForward(c.Context(), c.in)
	now := dev.Stats()
	if usable < c.least {
		var e *MemoryError
		if !errors.As(err, &e) || e.SmallestBudgetBytes != c.least || e.UsableLimitBytes != usable || e.PredictedPeakBytes != c.whole || now.PeakAllocated != before.Allocated {
			c.Errorf("%s: %v", what, err)
		}
	} else if err != nil {
		c.Errorf("%s: %v", what, err)
	}
	if res != nil {
		tel := res.Telemetry
		for name, n := range map[string]int64{
			"observed": tel.ObservedPeakBytes, "in use": now.PeakInUse - before.TotalInUse(), "allocated": now.PeakAllocated - before.Allocated,
		} {
			if n != tel.PredictedPeakBytes || n > usable {
				c.Errorf("%s: %s %d, predicted %d", what, name, n, tel.PredictedPeakBytes)
			}
		}
		if k := c.fewest(usable); k > 0 && tel.SubforwardCount > k {
			c.Errorf("%s: %d subforwards, %d would do", what, tel.SubforwardCount, k)
		}
		if kept := now.TotalInUse() - before.TotalInUse(); kept != tel.RetainedBytes || now.InUse[device.Scratch] != 0 {
			c.Errorf("%s: %d bytes kept, %d retained", what, kept, tel.RetainedBytes)
		}
		if tel.SubforwardCount > 1 {
			c.seen.splitRuns++
		}
		for i, o := range res.Outputs.Flat() {
			if d := golden.Diff(c.want[i], golden.Copy(o)); d != "" {
				c.Errorf("%s: output %d of %d subforwards:\n%s", what, i, tel.SubforwardCount, d)
			}
		}
		res.Release()
	}
	after := dev.Stats()
	if after.Allocated != before.Allocated || after.InUse != before.InUse || after.Blocks != before.Blocks || after.Reservations != before.Reservations || dev.Free() != free {
		c.Errorf("%s: before\n%v\nafter\n%v", what, before, after)
	}
}

// Random calls, nested at random, in budgets around every threshold, against every contiguous cut of the order in which they are visited. If any cut
// satisfies the inequality, the call is admitted with no more subforwards than the fewest of those. What is admitted fits, and when it is run takes what was
// predicted, to the byte, with the bits of the unsplit call; memory never runs out. The smallest budget is the least running peak of all cuts: with a byte less the call is
// refused. The largest prefix is admitted and one input more is not. Prices never fall when a chunk gets another request. Nothing is left of any call.
func TestOracle(t *testing.T) {
	n := *calls
	if testing.Short() {
		n = min(n, 25)
	}
	small := golden.Synthetic{Config: windowed, DType: "F32", Seed: 7}.Write(t)
	var models []*golden.Loaded
	for threads := 1; threads <= 3; threads++ {
		for _, folder := range []fs.FS{golden.FS(t, "qwen2-tiny"), small} {
			models = append(models, golden.Load(t, folder, golden.Options{Threads: threads, Capacity: 16 << 20}))
		}
	}
	total := &seen{}
	for seed := uint64(0); total.calls < n; seed++ {
		r := golden.Rand(seed)
		m := models[r.IntN(len(models))]
		most, longest := 9, 200
		if r.IntN(16) == 0 { // several blocks of rows for every worker
			longest = 1000
		}
		if r.IntN(16) == 0 {
			most = 12
		}
		inputs := golden.Draw(r, m.Spec().Vocabulary, 1+r.IntN(most), 1+r.IntN(longest))
		if r.IntN(4) == 0 { // outputs that outweigh all scratch
			inputs[r.IntN(len(inputs))].TopK = 1 + r.IntN(m.Spec().Vocabulary)
		}
		c := &trial{T: t, what: fmt.Sprintf("seed %d, %d threads", seed, m.Backend.Threads()), m: m, in: golden.Nested(r, inputs), inputs: inputs, seen: total}
		if r.IntN(3) == 0 { // under which the cheapest layout shares nothing
			c.opts = []Option{WithCostTables(prefixtree.Table{Name: "dear", Coefficients: prefixtree.Coefficients{Token: 1, Segment: 1e6, Level: 1e6}})}
		}
		rank := c.rank(math.MaxInt64, m.Host)
		flat, err := rank.newCall(c.in, nil)
		if err != nil {
			t.Fatal(err)
		}
		q, err := rank.ask(flat, &ground{model: rank.exact}, true)
		if err != nil {
			t.Fatal(err)
		}
		p := newPlanner(t.Context(), q)
		lc, err := p.describe()
		if err != nil {
			t.Fatal(err)
		}
		wanted := len(inputs)
		for _, g := range flat.groups {
			if g < 0 {
				wanted-- // and last in the order
			}
		}
		if wanted == 0 {
			continue
		}
		total.calls++
		o := newOracle(t, p, lc.Order[:wanted])
		o.monotone(t, p, r)
		var running []int64
		c.inequality, running = o.cuts()
		c.whole, c.least = running[1], slices.Min(running)
		if a, err := rank.Plan(t.Context(), c.in); err != nil || a.SmallestBudgetBytes != c.least || a.LargestPrefix != len(inputs) {
			t.Errorf("%s: %v, smallest budget %d, want %d", c.what, err, a.SmallestBudgetBytes, c.least)
		}

		budgets := []int64{0, c.least - 1, c.least, c.least + 1, c.least / 2, r.Int64N(c.least)}
		for _, n := range append(slices.Clone(c.inequality), running...) {
			if n < math.MaxInt64 {
				budgets = append(budgets, n-1, n, n+device.PageSize-1)
			}
		}
		slices.Sort(budgets)
		budgets = slices.Compact(budgets)
		for _, usable := range budgets {
			c.planned(usable, r.IntN(3) == 0 || usable == c.least-1)
		}

		res, err := rank.DPRankForward(t.Context(), c.in)
		if err != nil {
			t.Fatal(err)
		}
		c.want = golden.CopyAll(res.Outputs.Flat())
		res.Release()
		for _, usable := range []int64{c.least, budgets[r.IntN(len(budgets))], c.least + r.Int64N(c.whole-c.least+1)} {
			dev := device.Device(m.Host)
			if r.IntN(2) == 0 {
				dev = m.Dirty
			}
			c.ran(usable, dev, r.IntN(2) == 0)
		}
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
	t.Log(total)
	if total.splits < n || total.splitRuns < n/2 || total.refusals < n || total.prefixes < n/2 {
		t.Error("the calls are too easy")
	}
}
