package ladder

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/trainerrank/engine/forward/prefixtree"
	"github.com/trainerrank/engine/profile"
)

// tens are n requests of 10 tokens that share nothing, a byte a token of which tenths/10 are retained, as in the reference's section 5.10.
type tens struct {
	tenths  int64
	planned []string
	broken  error
	lie     int64 // added to the price of a plan
}

func (p *tens) price(requests []int) profile.Price {
	n := int64(10 * len(requests))
	return profile.Price{Required: n, Retained: (n*p.tenths + 9) / 10, Basis: profile.Learned, Trusted: true}
}

func (p *tens) Plan(requests []int, l Layout) (*Plan, error) {
	p.planned = append(p.planned, fmt.Sprint(l, requests))
	return &Plan{Packed: 10 * len(requests), Layouts: []*prefixtree.Layout{{Depth: 1}}, Work: requests}, p.broken
}

func (p *tens) Price(plan *Plan, _ Retention) (profile.Price, error) {
	price := p.price(plan.Work.([]int))
	price.Required += p.lie
	return price, nil
}
func (p *tens) Minimal(requests []int, _ Retention) (profile.Price, error) {
	return p.price(requests), nil
}
func (p *tens) Bound(requests []int, _ Retention) (profile.Price, error) {
	return p.price(requests), nil
}

func callOf(n int, grad bool) *Call {
	c := &Call{}
	for i := range n {
		c.Requests = append(c.Requests, Request{Tokens: 10, Grad: grad})
		c.Order = append(c.Order, i)
	}
	return c
}

// The worked examples of 5.10 and the catalogue of 7.1: with gradients as upstream, and ours.
func TestWorkedExamples(t *testing.T) {
	stored := []Retention{Stored}
	for _, c := range []struct {
		n              int
		budget, tenths int64
		classic, ours  string // subforwards; empty: refused
	}{
		{4, 20, 0, "[[0 1] [2 3]]", "[[0 1] [2 3]]"},
		{4, 1000, 0, "[[0 1 2 3]]", "[[0 1 2 3]]"},
		{6, 20, 0, "[[0 1] [3 4] [2] [5]]", "[[0 1] [2 3] [4 5]]"}, // 3 was skipped (defect 8)
		{8, 9, 0, "", ""},
		{4, 25, 10, "", ""}, // retained bytes never observed: all of them
		{4, 25, 1, "[[0 1] [2 3]]", "[[0 1] [2 3]]"},
		{8, 30, 0, "[[0 1] [2 3] [4 5] [6 7]]", "[[0 1 2] [3 4 5] [6 7]]"},
		{1, 9, 0, "", ""},
		{1, 10, 0, "[[0]]", "[[0]]"}, // equality fits
	} {
		for _, o := range []Options{{Classic: true}, {Retentions: stored}} {
			p := &tens{tenths: c.tenths}
			a := verdict(t, callOf(c.n, true), p, p, c.budget, o)
			want := c.ours
			if o.Classic {
				want = c.classic
			}
			got := ""
			if a.Verdict != Refused {
				got = fmt.Sprint(a.SubforwardRequestIndices)
			}
			if got != want {
				t.Errorf("%d requests, %d bytes, %d/10 retained, classic %v: %s, want %s\n%s", c.n, c.budget, c.tenths, o.Classic, got, want, a)
			}
		}
	}
}

// test_split_ladder_is_bounded_and_refuses_when_one_request_cannot_fit: the planner ran exactly twice, and the wording.
func TestARefusalPlansTwiceAndClaimsNothing(t *testing.T) {
	for _, o := range []Options{{Classic: true}, {}} {
		p := &tens{}
		a := verdict(t, callOf(8, false), p, p, 9, o)
		if want := []string{"cost_optimal[0 1 2 3 4 5 6 7]", "full_sharing[0 1 2 3 4 5 6 7]"}; !slices.Equal(p.planned, want) {
			t.Errorf("planned %v, want %v", p.planned, want)
		}
		if a.PredictedPeakBytes <= a.UsableLimitBytes || len(a.Rungs) != 5 {
			t.Errorf("%s", a)
		}
		for count, r := range map[int]Rung{2: a.Rungs[2], 4: a.Rungs[3], 8: a.Rungs[4]} {
			if r.Count != count || r.Fits || r.LowerBytes != r.TotalBytes {
				t.Errorf("%+v", r)
			}
		}
	}
	for _, c := range []struct {
		call *Call
		want Reason
	}{{callOf(8, false), Exhausted}, {callOf(1, false), SingleRequest}, {&Call{Requests: callOf(4, true).Requests, Order: []int{0, 1, 2, 3}, ExpertParallel: 2}, ExpertParallel}} {
		p := &tens{}
		a := verdict(t, c.call, p, p, 9, Options{})
		s := strings.ToLower(a.Refusal())
		if a.Reason != c.want || !strings.Contains(s, "split") || !strings.Contains(s, "unable to find a feasible split") ||
			strings.Contains(s, "no feasible") || strings.Contains(s, "infeasible") {
			t.Errorf("%q for %s", s, c.want)
		}
		if c.want == ExpertParallel && (a.SmallestBudgetBytes != 40 || a.LargestPrefix != 0) {
			t.Errorf("%s", a)
		}
	}
}

// Defect 20: the bytes, the tokens and the layout of a refusal are of one and the same plan.
func TestARefusalIsOfOnePlan(t *testing.T) {
	p := &tens{tenths: 10}
	a := verdict(t, callOf(4, true), p, p, 25, Options{})
	checkAdmission(t, callOf(4, true), a)
	if a.PredictedPeakBytes != 40 || a.PackedTokens != 40 || a.LogicalTokens != 40 || len(a.Layout) != 1 || a.Packing != FullSharing || a.Retention != Stored {
		t.Errorf("%+v", a)
	}
	// Defect 22: what would fit.
	if a.SmallestBudgetBytes != 40 || a.LargestPrefix != 2 {
		t.Errorf("%s", a)
	}
}

// Defect 6: requests that want nothing weigh nothing, cost no subforward, and are answered.
func TestInactiveRequestsAreNoReasonToSplit(t *testing.T) {
	c := callOf(5, false)
	c.Requests[0].Group, c.Requests[0].Tokens = -1, 1000
	c.Order = []int{1, 2, 3, 4, 0}
	p := &tens{}
	a := verdict(t, c, p, p, 20, Options{})
	if got := fmt.Sprint(a.SubforwardRequestIndices); got != "[[1 2] [3 4 0]]" || a.LogicalTokens != 40 {
		t.Errorf("%s, %s", got, a)
	}
	for i := range c.Requests {
		c.Requests[i].Group = -1
	}
	a = verdict(t, c, p, p, 0, Options{})
	if a.Verdict != Whole || a.PredictedPeakBytes != 0 || len(a.Chunks) != 1 || a.Chunks[0].Plan != nil || fmt.Sprint(a.SubforwardRequestIndices) != "[[0 1 2 3 4]]" {
		t.Errorf("%+v", a)
	}
	a = verdict(t, &Call{}, p, p, 0, Options{})
	if a.Verdict != Whole || fmt.Sprint(a.SubforwardRequestIndices) != "[[]]" {
		t.Errorf("%+v", a)
	}
}

// Defect 7: with outputs of different weight, chunks are balanced by bytes.
func TestCutsAreBalancedByBytes(t *testing.T) {
	c := callOf(6, false)
	p := &toy{step: 1, rate: 1, place: []int{0, 1, 2, 3, 4, 5}, common: make([]int64, 6)}
	for i := range c.Requests {
		if i < 2 {
			c.Requests[i].Outputs = 60
		}
		p.tokens, p.outputs = append(p.tokens, 10), append(p.outputs, c.Requests[i].Outputs)
	}
	usable := int64(160)
	a := verdict(t, c, p, p, usable, Options{})
	if got := fmt.Sprint(a.SubforwardRequestIndices); got != "[[2 3 4 5] [0 1]]" || a.PredictedPeakBytes != 140 {
		t.Errorf("%s\n%s", got, a)
	}
}

// Defect 10: without gradients the peak of the order that is run counts, with them there is room for a backward.
func TestRunningPeakIsForCallsWithoutGradients(t *testing.T) {
	p := &toy{step: 1, rate: 2, tokens: []int64{10, 5}, common: []int64{0, 0}, outputs: []int64{0, 12}, place: []int{0, 1}}
	for _, c := range []struct {
		grad bool
		o    Options
		want int64
	}{{false, Options{}, 22}, {false, Options{Inequality: true}, 32}, {true, Options{Retentions: []Retention{Stored}}, 32}} {
		call := callOf(2, c.grad)
		call.Requests[1].Outputs = 12
		if a := verdict(t, call, p, p, 0, c.o); a.SmallestBudgetBytes != c.want {
			t.Errorf("gradients %v, %+v: %d, want %d", c.grad, c.o, a.SmallestBudgetBytes, c.want)
		}
	}
}

// The GPU-scale figures of 5.10, from the rounded numbers given there (28.48 and 4.18 GB): with 0.990 retained, halves save 143 MB of 28.6 GB; with almost nothing
// retained they need half, which fits 60 %.
func TestHalvesOfAMeasuredCall(t *testing.T) {
	half := func(r, retained int64) int64 {
		return Total([]int64{r / 2, r / 2}, []int64{retained / 2, retained / 2})
	}
	if got := half(28_600_000_000, 28_600_000_000*990/1000); got != 28_457_000_000 {
		t.Errorf("%d", got)
	}
	if got := half(8_370_000_000, 8_370_000_000*26/1_000_000); got != 4_185_108_810 || got > 5_020_000_000 {
		t.Errorf("%d", got)
	}
	if got := Total([]int64{math.MaxInt64, 5}, []int64{math.MaxInt64, 5}); got != math.MaxInt64 {
		t.Errorf("%d: bytes beyond the largest number fit", got)
	}
}

func TestARetentionThatIsForbiddenIsNotUsed(t *testing.T) {
	p := &toy{step: 1, rate: 1, kept: 30, tokens: []int64{10, 10}, common: []int64{0, 0}, outputs: []int64{0, 0}, place: []int{0, 1}}
	for _, c := range []struct {
		allowed []Retention
		usable  int64
		want    string
	}{
		{nil, 620, "whole stored"}, {nil, 610, "split stored"}, {nil, 609, "whole layer"}, {nil, 219, "split layer"}, {nil, 209, "whole replay"}, {nil, 19, "split replay"}, {nil, 9, "refused stored"},
		{[]Retention{Stored}, 609, "refused stored"}, {[]Retention{Stored, Replay}, 609, "whole replay"},
	} {
		a := verdict(t, callOf(2, true), p, p, c.usable, Options{Retentions: c.allowed})
		if got := fmt.Sprint(a.Verdict, " ", a.Retention); got != c.want {
			t.Errorf("%d bytes, %v: %s, want %s", c.usable, c.allowed, got, c.want)
		}
	}
	if _, err := Search(callOf(2, true), p, p, 9, Options{Retentions: []Retention{}}); err == nil {
		t.Error("no retention is allowed, and a call with gradients is planned")
	}
}

// Section 5.9.
func TestMinimumWave(t *testing.T) {
	p := &tens{}
	fits, refused := verdict(t, callOf(4, false), p, p, 20, Options{}), verdict(t, callOf(4, false), p, p, 9, Options{})
	if fits.Outcome() != Admitted || refused.Outcome() != NoFit || min(Broken, NoFit, Admitted) != Broken {
		t.Error("outcomes")
	}
	if MinimumWave(fits, Admitted) != fits || MinimumWave(refused, NoFit) != refused || MinimumWave(refused, Broken) != refused {
		t.Error("the rank's own outcome stands")
	}
	for _, least := range []Outcome{NoFit, Broken} {
		a := MinimumWave(fits, least)
		if a.Verdict != Refused || a.Reason != OnAnotherRank || a.PredictedPeakBytes != fits.PredictedPeakBytes || fits.Verdict != Split {
			t.Errorf("%+v", a)
		}
	}
}

// The JSON of plan --json (design/cli.md): these keys, in this order, and no others.
func TestAdmissionAsJSON(t *testing.T) {
	p := &tens{tenths: 1}
	got, err := json.Marshal(verdict(t, callOf(2, true), p, p, 15, Options{Explain: true}))
	if err != nil {
		t.Fatal(err)
	}
	want := `{"verdict":"split","basis":"learned","usable_limit_bytes":15,"predicted_peak_bytes":11,"packed_tokens":20,"logical_tokens":20,` +
		`"layout":[{"segments":null,"decisions":null,"depth":1},{"segments":null,"decisions":null,"depth":1}],"rungs":[` +
		`{"count":1,"chunks":[[0,1]],"required":[20],"retained":[2],"total_bytes":20,"fits":false},` +
		`{"count":1,"chunks":[[0,1]],"required":[20],"retained":[2],"total_bytes":20,"fits":false},` +
		`{"count":2,"chunks":[[0],[1]],"required":[10,10],"retained":[1,1],"total_bytes":11,"fits":true}],` +
		`"subforward_request_indices":[[0],[1]],"retention":"stored","smallest_budget_bytes":11,"largest_prefix":2}`
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	for _, c := range []struct {
		call *Call
		o    Options
	}{{&Call{}, Options{}}, {callOf(1, false), Options{}}, {callOf(1, false), Options{Classic: true}}} {
		text, _ := json.Marshal(verdict(t, c.call, p, p, 0, c.o))
		if strings.Contains(string(text), "null,\"rungs") || strings.Contains(string(text), ":null,\"sub") {
			t.Errorf("%s", text)
		}
	}
}

func TestPrintedAdmission(t *testing.T) {
	p := &tens{}
	got := verdict(t, callOf(2, false), p, p, 9, Options{}).String()
	want := `refused: 1 subforwards need 20 of 9 usable bytes (learned), 20 tokens packed into 20
     1 cost_optimal stored              20  needs 20 bytes, 11 more than usable
     1 full_sharing stored              20  needs 20 bytes, 11 more than usable
     2 any layout   stored              10  needs at least 10 bytes, 1 more than usable
unable to find a feasible split (every split that was tried is predicted to exceed available memory); 10 bytes would do, the first 0 requests fit
`
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestWhatIsNoCallIsAnError(t *testing.T) {
	p := &tens{}
	idle := callOf(2, false)
	idle.Requests[0].Group = -1
	negative := callOf(2, false)
	negative.Requests[1].Outputs = -1
	for i, c := range []*Call{
		{Requests: make([]Request, 2), Order: []int{0}}, {Requests: make([]Request, 2), Order: []int{0, 0}}, {Requests: make([]Request, 2), Order: []int{0, 2}},
		idle, negative,
	} {
		var e *CallError
		if _, err := Search(c, p, p, 9, Options{}); !errors.As(err, &e) {
			t.Errorf("call %d: %v", i, err)
		}
	}
	if _, err := NewVisit([]int{0, 0}, nil); err == nil {
		t.Error("a request without a tree is visited")
	}
}

func TestWhatThePlannerSaysIsPassedOn(t *testing.T) {
	p := &tens{broken: errors.New("no")}
	if _, err := Search(callOf(2, false), p, p, 9, Options{}); !errors.Is(err, p.broken) {
		t.Error(err)
	}
	// A plan that costs other than was predicted, and a price that cannot be, admit nothing.
	var e *PriceError
	if _, err := Search(callOf(4, false), &tens{}, &tens{lie: 1}, 20, Options{}); !errors.As(err, &e) || e.Predicted == nil {
		t.Error(err)
	}
	if _, err := Search(callOf(4, false), &tens{}, &tens{lie: -100}, 20, Options{}); !errors.As(err, &e) || e.Predicted != nil || e.Error() == "" {
		t.Error(err)
	}
}

// failing fails the n-th time that it is asked for anything.
type failing struct {
	*toy
	left *int
	err  error
}

func (f failing) count() error {
	if *f.left--; *f.left < 0 {
		return f.err
	}
	return nil
}

func (f failing) Plan(r []int, l Layout) (*Plan, error) {
	if err := f.count(); err != nil {
		return nil, err
	}
	return f.toy.Plan(r, l)
}

func (f failing) Price(p *Plan, r Retention) (profile.Price, error) {
	if err := f.count(); err != nil {
		return profile.Price{}, err
	}
	return f.toy.Price(p, r)
}

func (f failing) Minimal(q []int, r Retention) (profile.Price, error) {
	if err := f.count(); err != nil {
		return profile.Price{}, err
	}
	return f.toy.Minimal(q, r)
}

func (f failing) Bound(q []int, r Retention) (profile.Price, error) {
	if err := f.count(); err != nil {
		return profile.Price{}, err
	}
	return f.toy.Bound(q, r)
}

// Whatever answer is missing, the search ends with that error and admits nothing (#906: a failure to plan is not a refusal).
func TestAFailureAnywhereEndsTheSearch(t *testing.T) {
	defer func(n int) { exactLimit = n }(exactLimit)
	r := rand.New(rand.NewPCG(15, 16))
	failed := 0
	for i := range 60 {
		exactLimit = []int{2, ExactLimit}[i%2]
		c, p := random(r, 6)
		if !slices.ContainsFunc(c.Requests, func(q Request) bool { return q.Group >= 0 }) {
			continue
		}
		usable := thresholds(r, c, p)
		for n := 0; ; n++ {
			left := n
			f := failing{p, &left, errors.New("no answer")}
			a, err := Search(c, f, f, usable, Options{Explain: true})
			if left >= 0 {
				if err != nil {
					t.Fatal(err)
				}
				break // it was never reached
			}
			failed++
			if !errors.Is(err, f.err) {
				t.Fatalf("call %d, answer %d: %v, %v", i, n, a, err)
			}
		}
	}
	if failed < 1000 {
		t.Errorf("only %d failures", failed)
	}
}

func TestDepthOfAnAdmission(t *testing.T) {
	p := &toy{step: 1, tokens: []int64{1, 1, 1}, common: make([]int64, 3), outputs: make([]int64, 3), place: []int{0, 1, 2}}
	if a := verdict(t, callOf(3, false), p, p, 9, Options{}); a.SelectedMaxDepth() != 3 || a.SubforwardCount() != 1 || !a.Trusted || a.Refusal() != "" {
		t.Errorf("%+v", a)
	}
	if s := (&CallError{"x"}).Error(); s != "ladder: x" {
		t.Error(s)
	}
}
