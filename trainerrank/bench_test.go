package trainerrank

import (
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/internal/golden"
)

// levels is a call of rows of three levels: they share a trunk, and by leaves of a branch each a branch. No two rows share memory.
type levels struct{ branches, leaves, trunk, branch, leaf int }

func (l levels) rows() int   { return l.branches * l.leaves }
func (l levels) tokens() int { return l.rows() * (l.trunk + l.branch + l.leaf) }

// times is the same call with so many times the tokens.
func (l levels) times(n, of int) levels {
	return levels{l.branches, l.leaves, l.trunk * n / of, l.branch * n / of, l.leaf * n / of}
}

func (l levels) inputs(vocab int) forward.Inputs {
	r := golden.Rand(1)
	fresh := func(n int) []int32 {
		list := make([]int32, n)
		for i := range list {
			list[i] = int32(r.IntN(vocab))
		}
		return list
	}
	trunk := fresh(l.trunk)
	var inputs []forward.Input
	for i := range l.branches {
		branch := slices.Concat(trunk, fresh(l.branch))
		branch[l.trunk] = int32(i) // they share no more than they are to
		for j := range l.leaves {
			tokens := slices.Concat(branch, fresh(l.leaf))
			tokens[len(branch)] = int32(j)
			inputs = append(inputs, forward.Input{Tokens: tokens, Targets: tokens})
		}
	}
	return forward.Many(inputs...)
}

// The calls whose planning has a bound in docs/planner.md: 5 decisions, and 9.
var (
	sixteen = levels{4, 4, 8192, 2048, 512}
	many    = levels{8, 16, 1024, 7351, 1000}
)

// deep is a model as deep as real ones, which planning looks at layer by layer, and small otherwise, which it does not notice.
func deep(b testing.TB) *golden.Loaded {
	config := strings.NewReplacer(`"num_hidden_layers": 2`, `"num_hidden_layers": 30`, `"hidden_size": 344`, `"hidden_size": 32`, `"intermediate_size": 424`,
		`"intermediate_size": 64`, `"head_dim": 40`, `"head_dim": 8`).Replace(golden.Wide)
	return golden.Load(b, golden.Synthetic{Config: config, DType: "BF16", Seed: 1}.Write(b), golden.Options{Threads: 2, Unloaded: true})
}

// planning is a call that is planned again and again on a model that is never loaded.
type planning struct {
	rank *TrainerRank
	call *call
}

func newPlanning(b testing.TB, m *golden.Loaded, l levels) planning {
	rank, err := New(m.Model, WithDevice(m.Host))
	if err != nil {
		b.Fatal(err)
	}
	c, err := rank.newCall(l.inputs(m.Spec().Vocabulary), nil)
	if err != nil {
		b.Fatal(err)
	}
	return planning{rank, c}
}

// in plans the call with so many usable bytes: tree, search, prices, admission.
func (p planning) in(b testing.TB, usable int64, explain bool) *Admission {
	a, err := p.rank.admit(b.Context(), p.call, &ground{usable: usable, model: p.rank.exact}, explain)
	if err != nil {
		b.Fatal(err)
	}
	return a
}

// ways are the budgets in which a call is whole, split as far as it can be, and refused.
func (p planning) ways(b testing.TB) []way {
	return []way{{"whole", 1 << 50}, {"split", p.in(b, 1<<50, true).SmallestBudgetBytes}, {"refused", 0}}
}

type way struct {
	name   string
	usable int64
}

// BenchmarkPlan plans calls that fit whole, that are split in what is the least for them, and that are refused.
func BenchmarkPlan(b *testing.B) {
	m := deep(b)
	for _, l := range []levels{sixteen, many, many.times(1, 8), many.times(8, 1)} {
		p := newPlanning(b, m, l)
		for _, w := range p.ways(b) {
			b.Run(fmt.Sprintf("%d rows/%d tokens/%s", l.rows(), l.tokens(), w.name), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					p.in(b, w.usable, false)
				}
			})
		}
	}
}

// coldEnv makes a process plan sixteen in so many bytes, once.
const coldEnv = "TRAINERRANK_BENCH_COLD"

// BenchmarkPlanCold is the first plan of a process: each is made by a new one.
func BenchmarkPlanCold(b *testing.B) {
	self, err := os.Executable()
	if err != nil {
		b.Fatal(err)
	}
	for _, w := range newPlanning(b, deep(b), sixteen).ways(b) {
		b.Run(fmt.Sprintf("%d rows/%d tokens/%s", sixteen.rows(), sixteen.tokens(), w.name), func(b *testing.B) {
			var all []time.Duration
			for b.Loop() {
				cmd := exec.CommandContext(b.Context(), self, "-test.run", "^TestPlanCold$")
				cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d", coldEnv, w.usable))
				out, err := cmd.Output()
				var took time.Duration
				if _, text, ok := strings.Cut(string(out), w.name+" in "); ok && err == nil {
					took, err = time.ParseDuration(strings.Fields(text)[0])
				}
				if err != nil || took == 0 {
					b.Fatalf("%v\n%s", err, out)
				}
				all = append(all, took)
			}
			slices.Sort(all)
			b.ReportMetric(0, "ns/op")
			b.ReportMetric(all[len(all)/2].Seconds()*1e3, "ms/plan")
			b.ReportMetric(all[len(all)-1].Seconds()*1e3, "ms/slowest")
		})
	}
}

// TestPlanCold is the process of BenchmarkPlanCold.
func TestPlanCold(t *testing.T) {
	text := os.Getenv(coldEnv)
	if text == "" {
		t.Skip("it is for BenchmarkPlanCold")
	}
	usable, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	a := newPlanning(t, deep(t), sixteen).in(t, usable, false)
	fmt.Printf("%s in %v\n", a.Verdict, a.PlanningTime)
}

// What planning allocates does not grow with the tokens of a call. (Chunks of other lengths take other rungs: a split may try a few more.)
func TestPlanAllocatesNothingPerToken(t *testing.T) {
	m := deep(t)
	for _, l := range []levels{sixteen.times(1, 8), many.times(1, 64)} {
		small, large := newPlanning(t, m, l), newPlanning(t, m, l.times(8, 1))
		ways := large.ways(t)
		for i, w := range small.ways(t) {
			allocs := func(p planning, usable int64) float64 {
				return testing.AllocsPerRun(3, func() { p.in(t, usable, false) })
			}
			few, all := allocs(small, w.usable), allocs(large, ways[i].usable)
			if w.name != "split" && all != few || all > 1.1*few {
				t.Errorf("%+v, %s: %.0f allocations, eight times the tokens: %.0f", l, w.name, few, all)
			}
		}
	}
}

// BenchmarkSplit runs a call whose requests share nothing, so that a split computes no token more than the whole call: whole, and in the smallest budget.
func BenchmarkSplit(b *testing.B) {
	m := golden.Load(b, golden.FS(b, "qwen2-tiny"), golden.Options{Threads: 2})
	r := golden.Rand(1)
	var inputs []forward.Input
	for i := range 8 {
		in := forward.Input{TopK: 1}
		for range 1000 {
			in.Tokens = append(in.Tokens, int32(r.IntN(m.Spec().Vocabulary)))
		}
		in.Tokens[0] = int32(i)
		inputs = append(inputs, in)
	}
	call := forward.Many(inputs...)
	rank, err := New(m.Model)
	if err != nil {
		b.Fatal(err)
	}
	a, err := rank.Plan(b.Context(), call)
	if err != nil {
		b.Fatal(err)
	}
	for _, usable := range []int64{a.PredictedPeakBytes, (a.PredictedPeakBytes + a.SmallestBudgetBytes) / 2, a.SmallestBudgetBytes} {
		rank.limit = usable
		plan, err := rank.Plan(b.Context(), call)
		if err != nil {
			b.Fatal(err)
		}
		b.Run(fmt.Sprintf("%d subforwards/%d packed tokens", plan.SubforwardCount(), plan.PackedTokens), func(b *testing.B) {
			for b.Loop() {
				res, err := rank.DPRankForward(b.Context(), call)
				if err != nil {
					b.Fatal(err)
				}
				res.Release()
			}
		})
	}
}

// BenchmarkWidth looks for the width of a wave of which half of the list fits: for the first time, and with the width remembered.
func BenchmarkWidth(b *testing.B) {
	m := deep(b)
	rank, err := New(m.Model, WithDevice(m.Host))
	if err != nil {
		b.Fatal(err)
	}
	r := golden.Rand(1)
	items := make([]forward.Inputs, 512)
	for i := range items {
		in := forward.Input{Tokens: make([]int32, 1024)}
		for k := range in.Tokens {
			in.Tokens[k] = int32(r.IntN(m.Spec().Vocabulary))
		}
		in.Targets = in.Tokens
		items[i] = forward.One(in)
	}
	w, err := rank.waves(b.Context(), items, nil)
	if err != nil {
		b.Fatal(err)
	}
	g, err := rank.survey(b.Context(), w.all, nil)
	if err != nil {
		b.Fatal(err)
	}
	q, err := rank.ask(w.all.part(w.inputs(w.share(0, 256))), g, false)
	if err != nil {
		b.Fatal(err)
	}
	p, err := q.whole(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	g.usable = p.Required
	for name, remembered := range map[string]int{"first": 0, "remembered": 256} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				w.widths[w.kind] = remembered
				if c, err := w.widest(0, g); err != nil || c.width != 256 {
					b.Fatal(c, err)
				}
			}
		})
	}
}
