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
	"github.com/trainerrank/engine/profile"
	"github.com/trainerrank/engine/slots"
)

// calls is how many random calls are held against every cut of theirs. docs/planner.md has what came of ten thousand:
// go test -run Oracle -calls 10000 -timeout 2h -v ./trainerrank
var calls = flag.Int("calls", 100, "random calls of TestOracle")

// windowed is a model in which half of the layers see four positions, all have four norms, and the head is the embedding.
const windowed = `{"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 40, "intermediate_size": 56,
	"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 24, "rms_norm_eps": 1e-6,
	"query_pre_attn_scalar": 24, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "rope_theta": 10000.0,
	"rope_local_base_freq": 10000.0, "vocab_size": 71, "tie_word_embeddings": true, "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 4096}`

// oracle knows all prices of a call under one retention: of every run of its visiting order with full sharing.
type oracle struct {
	retention Retention
	order     []int // the requests that want an output, in visiting order
	prices    [][]profile.Price
}

func (o *oracle) price(lo, hi int) profile.Price { return o.prices[lo][hi-lo-1] }

func newOracle(t *testing.T, p *planner, order []int, r Retention) *oracle {
	t.Helper()
	o := &oracle{retention: r, order: order}
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
	price, err := p.Minimal(requests, o.retention)
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
			t.Errorf("%s: requests %v need %+v, and %v need %+v", o.retention, of, less, with, more)
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

// school is a model with two adapters, and a rank of it.
type school struct {
	*golden.Loaded
	rank   *TrainerRank
	tables []prefixtree.Table // that it comes with
}

func newSchool(t *testing.T, folder fs.FS, threads int) *school {
	t.Helper()
	m := golden.Load(t, folder, golden.Options{Threads: threads, Capacity: 64 << 20})
	rank, err := New(m.Model)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(rank.Close)
	for i, name := range []string{"a", "b"} {
		if err := rank.CreateCheckpoint(t.Context(), name, slots.Config{Rank: 2 + i, Alpha: 4, TargetPattern: slots.AllLinear, Seed: uint64(i)}); err != nil {
			t.Fatal(err)
		}
	}
	return &school{m, rank, rank.tables}
}

// trial is a random call with all that is known of it.
type trial struct {
	*testing.T
	*school
	what   string
	tables []prefixtree.Table
	in     forward.Inputs
	inputs []forward.Input
	grads  []forward.OutputGrad // nil if no graph is kept
	want   []golden.Answer      // of the unsplit call
	cuts   []cuts               // by retention, in the order in which they are tried
	least  int64                // that any way of running it needs
	seen   *seen
}

// cuts are what the best of all cuts of a call need under a retention, by counts of chunks.
type cuts struct {
	Retention
	inequality, running []int64
}

// judged is what a cut is judged by, by counts of chunks.
func (c *trial) judged(k *cuts) []int64 {
	if c.grads != nil {
		return k.inequality
	}
	return k.running
}

// seen counts what was tried.
type seen struct{ calls, training, budgets, splits, refusals, prefixes, runs, splitRuns, backwards int }

func (s *seen) String() string {
	return fmt.Sprintf("%d calls, %d of them with gradients, planned in %d budgets: %d splits, %d refusals, %d largest prefixes; %d run, %d of them split, %d backward too",
		s.calls, s.training, s.budgets, s.splits, s.refusals, s.prefixes, s.runs, s.splitRuns, s.backwards)
}

// on is the rank with so many usable bytes of a device.
func (c *trial) on(usable int64, dev device.Device) *TrainerRank {
	c.rank.limit, c.rank.dev, c.rank.tables = usable, dev, append(slices.Clone(c.tables), c.school.tables...)
	return c.rank
}

// agrees holds how a call is run against the oracle: it is under the first retention with a cut that fits, and in no more subforwards than the fewest of these.
func (c *trial) agrees(what string, usable int64, count int, retention Retention) {
	for i := range c.cuts {
		k := &c.cuts[i]
		fewest := slices.IndexFunc(k.inequality, func(n int64) bool { return n <= usable })
		if fewest < 0 && (c.grads != nil || slices.Min(k.running) > usable) {
			continue
		}
		if retention != k.Retention || fewest > 0 && count > fewest || (count == 1) != (k.inequality[1] <= usable) {
			c.Errorf("%s: %s in %d subforwards, and %s in %d would do", what, retention, count, k.Retention, fewest)
		}
		return
	}
	c.Errorf("%s: %s in %d subforwards, and no cut fits", what, retention, count)
}

// planned holds the plan in so many bytes against the oracle.
func (c *trial) planned(usable int64, prefix bool) {
	what := fmt.Sprintf("%s, %d usable bytes", c.what, usable)
	rank := c.on(usable, c.Host)
	a, err := rank.admitted(c, c.in)
	if err != nil {
		c.Fatal(err)
	}
	c.seen.budgets++
	if (a.Verdict == Refused) != (usable < c.least) {
		c.Errorf("%s: %s, the smallest budget is %d", what, a.Verdict, c.least)
	}
	if a.Verdict != Refused {
		if a.PredictedPeakBytes > usable || a.Shares.Total() != a.PredictedPeakBytes {
			c.Errorf("%s: %s, predicted %d, shares %v", what, a.Verdict, a.PredictedPeakBytes, a.Shares)
		}
		c.agrees(what, usable, a.SubforwardCount(), a.Retention)
		if a.Verdict == Split {
			c.seen.splits++
		}
		return
	}
	c.seen.refusals++
	if whole := c.cuts[0].inequality[1]; a.SmallestBudgetBytes != c.least || a.PredictedPeakBytes != whole {
		c.Errorf("%s: refused with the smallest budget %d, want %d, predicted %d, want %d", what, a.SmallestBudgetBytes, c.least, a.PredictedPeakBytes, whole)
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
			c.Errorf("%s, largest prefix %d: the first %d inputs are %s", what, a.LargestPrefix, n, p.Verdict)
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
	rank := c.on(usable, dev)
	if ballast {
		usable &^= device.PageSize - 1
		block, err := dev.Allocate(device.Ballast, dev.Free()-usable)
		if err != nil {
			c.Fatal(err)
		}
		defer block.Free()
		rank = c.on(math.MaxInt64, dev)
	}
	what := fmt.Sprintf("%s, run in %d usable bytes (ballast %t)", c.what, usable, ballast)
	c.seen.runs++
	before, free := dev.Stats(), dev.Free()
	dev.ResetPeak()
	res, err := rank.DPRankForward(c.Context(), c.in)
	now := dev.Stats()
	if usable < c.least {
		var e *MemoryError
		if !errors.As(err, &e) || e.SmallestBudgetBytes != c.least || e.UsableLimitBytes != usable || e.PredictedPeakBytes != c.cuts[0].inequality[1] || now.PeakAllocated != before.Allocated {
			c.Errorf("%s: %v", what, err)
		}
	} else if err != nil {
		c.Errorf("%s: %v", what, err)
	}
	if res != nil {
		tel := res.Telemetry
		c.agrees(what, usable, tel.SubforwardCount, tel.Retention)
		if tel.SubforwardCount > 1 {
			c.seen.splitRuns++
		}
		if kept := now.TotalInUse() - before.TotalInUse(); kept != tel.RetainedBytes || now.InUse[device.Scratch] != 0 {
			c.Errorf("%s: %d bytes kept, %d retained", what, kept, tel.RetainedBytes)
		}
		for i, o := range res.Outputs.Flat() {
			if d := golden.Diff(c.want[i], golden.Copy(o)); d != "" {
				c.Errorf("%s: output %d of %d subforwards:\n%s", what, i, tel.SubforwardCount, d)
			}
		}
		if c.grads != nil {
			if err := res.Backward(c.Context(), c.grads); err != nil {
				c.Errorf("%s: %v", what, err)
			}
			c.seen.backwards++
			now = dev.Stats()
		}
		// A split with gradients is admitted with all that is ever kept beside the most intermediates, which may be those of a forward before the rest is there.
		exact := c.grads == nil || tel.SubforwardCount == 1
		for name, n := range map[string]int64{
			"observed": res.ObservedPeakBytes(), "in use": now.PeakInUse - before.TotalInUse(), "allocated": now.PeakAllocated - before.Allocated,
		} {
			if n > tel.PredictedPeakBytes || n > usable || exact && n != tel.PredictedPeakBytes {
				c.Errorf("%s: %s %d, predicted %d", what, name, n, tel.PredictedPeakBytes)
			}
		}
		res.Release()
	}
	after := dev.Stats()
	if after.Allocated != before.Allocated || after.InUse != before.InUse || after.Blocks != before.Blocks || after.Reservations != before.Reservations || dev.Free() != free {
		c.Errorf("%s: before\n%v\nafter\n%v", what, before, after)
	}
}

// varied gives some calls several groups: inputs on one of two adapters or none, and of some calls some that keep a graph. It returns cotangents if one does.
func varied(r *rand.Rand, spec forward.Spec, inputs []forward.Input) []forward.OutputGrad {
	kind := r.IntN(4)
	if kind < 2 {
		return nil
	}
	grads, any := make([]forward.OutputGrad, len(inputs)), false
	for i := range inputs {
		in := &inputs[i]
		in.Checkpoint = []forward.Selection{forward.BaseModel(), forward.Checkpoint("a"), forward.Checkpoint("b")}[r.IntN(3)]
		if kind == 2 || in.Checkpoint == forward.BaseModel() || r.IntN(4) == 0 || !in.Active() {
			continue
		}
		in.Grad, any = forward.WithGrad, true
		some := func(n int) []float32 { return slices.Repeat([]float32{r.Float32()}, n) }
		if in.Targets != nil {
			grads[i].TargetLogprobs = some(len(in.Targets))
		}
		if in.Logits {
			grads[i].Logits = some(len(in.Tokens) * spec.Vocabulary)
		}
		if in.HiddenStates {
			grads[i].HiddenStates = some(len(in.Tokens) * spec.Hidden)
		}
	}
	if !any {
		return nil
	}
	return grads
}

// Random calls, nested at random, on several adapters and some with gradients, in budgets around every threshold, against every contiguous cut of the order in which they are
// visited. If any cut satisfies the inequality, the call is admitted with no more subforwards than the fewest of those; with gradients under the first retention under which
// one does. What is admitted fits, and when it is run, forward and backward, takes what was predicted, to the byte, with the bits of the unsplit call; memory never runs out.
// The smallest budget is the least of all cuts, without gradients by their running peaks: with a byte less the call is refused. The largest prefix is admitted and one
// input more is not. Prices never fall when a chunk gets another request. Nothing is left of any call.
func TestOracle(t *testing.T) {
	n := *calls
	if testing.Short() {
		n = min(n, 25)
	}
	small := golden.Synthetic{Config: windowed, DType: "F32", Seed: 7}.Write(t)
	var schools []*school
	for threads := 1; threads <= 3; threads++ {
		schools = append(schools, newSchool(t, golden.FS(t, "qwen2-tiny"), threads), newSchool(t, small, threads))
	}
	total := &seen{}
	for seed := uint64(0); total.calls < n; seed++ {
		r := golden.Rand(seed)
		m := schools[r.IntN(len(schools))]
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
		c := &trial{T: t, school: m, what: fmt.Sprintf("seed %d, %d threads", seed, m.Backend.Threads()), inputs: inputs, seen: total}
		c.grads = varied(r, m.Spec(), inputs)
		c.in = golden.Nested(r, inputs)
		if r.IntN(3) == 0 { // under which the cheapest layout shares nothing
			c.tables = []prefixtree.Table{{Name: "dear", Coefficients: prefixtree.Coefficients{Token: 1, Segment: 1e6, Level: 1e6}}}
		}
		rank := c.on(math.MaxInt64, m.Host)
		flat, err := rank.newCall(c.in, nil)
		if err != nil {
			t.Fatal(err)
		}
		g, err := rank.survey(t.Context(), flat, nil)
		if err != nil {
			t.Fatal(err)
		}
		q, err := rank.ask(flat, g, true)
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
		retentions := []Retention{Stored}
		if c.grads != nil {
			retentions = append(retentions, Layer, Replay)
			total.training++
		}
		c.least = math.MaxInt64
		var thresholds []int64
		for _, keep := range retentions {
			o := newOracle(t, p, lc.Order[:wanted], keep)
			o.monotone(t, p, r)
			k := cuts{Retention: keep}
			k.inequality, k.running = o.cuts()
			c.cuts = append(c.cuts, k)
			c.least = min(c.least, slices.Min(c.judged(&k)))
			thresholds = append(append(thresholds, k.inequality...), k.running...)
		}
		whole := c.cuts[0].inequality[1]
		if a, err := rank.Plan(t.Context(), c.in); err != nil || a.SmallestBudgetBytes != c.least || a.LargestPrefix != len(inputs) {
			t.Errorf("%s: %v, smallest budget %d, want %d", c.what, err, a.SmallestBudgetBytes, c.least)
		}

		budgets := []int64{0, c.least - 1, c.least, c.least + 1, c.least / 2, r.Int64N(c.least)}
		for _, n := range thresholds {
			if n < math.MaxInt64 {
				budgets = append(budgets, n-1, n, n+device.PageSize-1)
			}
		}
		slices.Sort(budgets)
		budgets = slices.Compact(budgets)
		for _, usable := range budgets {
			c.planned(usable, r.IntN(3) == 0 || usable == c.least-1)
		}

		res, err := c.on(math.MaxInt64, m.Host).DPRankForward(t.Context(), c.in)
		if err != nil {
			t.Fatal(err)
		}
		c.want = golden.CopyAll(res.Outputs.Flat())
		res.Release()
		for _, usable := range []int64{c.least, budgets[r.IntN(len(budgets))], c.least + r.Int64N(max(0, whole-c.least)+1)} {
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
	if total.splits < n || total.splitRuns < n/2 || total.refusals < n || total.prefixes < n/2 || total.backwards < n/4 {
		t.Error("the calls are too easy")
	}
}
