package ladder

import (
	"slices"

	"github.com/trainerrank/engine/forward/prefixtree"
	"github.com/trainerrank/engine/profile"
)

// Search finds how a call is run within usable bytes, or that it is refused, which is no error. An error is a [*CallError], a
// [*PriceError], or what the planner or the pricer returned.
func Search(c *Call, planner Planner, pricer Pricer, usable int64, o Options) (*Admission, error) {
	if err := c.check(); err != nil {
		return nil, err
	}
	s := &search{
		call: c, planner: planner, pricer: pricer, usable: usable, options: o,
		prices: map[key]profile.Price{}, plans: map[key]*Plan{},
	}
	return s.run()
}

// search is one run of [Search].
type search struct {
	call    *Call
	planner Planner
	pricer  Pricer
	usable  int64
	options Options

	prices map[key]profile.Price
	plans  map[key]*Plan
	result Admission
}

// attempt is a rung with its plans.
type attempt struct {
	chunks    []run
	layout    Layout
	retention Retention
	plans     []*Plan
	prices    []profile.Price
	total     int64
}

func (s *search) run() (*Admission, error) {
	v := s.view(len(s.call.Requests))
	a := &s.result
	*a = Admission{
		UsableLimitBytes: s.usable, Layout: []*prefixtree.Layout{}, Rungs: []Rung{}, Retention: Stored, LargestPrefix: len(s.call.Requests),
	}
	for i := range s.call.Requests {
		if r := &s.call.Requests[i]; r.Group >= 0 {
			a.LogicalTokens += r.Tokens
		}
	}
	if v.wanted == 0 {
		a.Verdict, a.Basis, a.Trusted = Whole, profile.Exact, true
		a.SubforwardRequestIndices = [][]int{s.callers(v.m)}
		a.Chunks = []Chunk{{Requests: s.callers(v.m), Price: profile.Price{Basis: profile.Exact, Trusted: true}}}
		return a, nil
	}
	var refused *attempt
	for _, r := range s.options.retentions(v.grad) {
		won, whole, err := v.climb(r)
		if err != nil {
			return nil, err
		}
		if refused == nil {
			refused = whole
		}
		if won != nil {
			s.settle(v, won)
			a.Verdict = Split
			if len(won.chunks) == 1 {
				a.Verdict = Whole
			}
			a.SmallestBudgetBytes = won.total
			if s.options.Explain && !s.options.Classic {
				a.SmallestBudgetBytes, err = v.smallest()
			}
			return a, err
		}
	}
	if refused == nil {
		return nil, &CallError{"no retention is allowed"}
	}
	s.settle(v, refused)
	a.Verdict, a.LargestPrefix = Refused, 0
	switch {
	case v.wanted == 1:
		a.Reason = SingleRequest
	case s.call.ExpertParallel > 1:
		a.Reason = ExpertParallel
	default:
		a.Reason = Exhausted
	}
	if s.options.Classic {
		return a, nil
	}
	var err error
	if a.SmallestBudgetBytes, err = v.smallest(); err == nil {
		a.LargestPrefix, err = s.largestPrefix()
	}
	return a, err
}

// settle writes the plan of an attempt into the result.
func (s *search) settle(v *view, t *attempt) {
	a := &s.result
	a.PredictedPeakBytes, a.Retention, a.Packing, a.Trusted = t.total, t.retention, t.layout, true
	required, retained := amounts(t.prices)
	for _, j := range Execution(required, retained) {
		c := Chunk{Requests: v.answered(t.chunks, j), Plan: t.plans[j], Price: t.prices[j]}
		a.Chunks = append(a.Chunks, c)
		a.SubforwardRequestIndices = append(a.SubforwardRequestIndices, c.Requests)
		a.PackedTokens += c.Plan.Packed
		a.Layout = append(a.Layout, c.Plan.Layouts...)
		a.Basis = a.Basis.Worse(c.Price.Basis)
		a.Trusted = a.Trusted && c.Price.Trusted
	}
}

// climb tries a call under one retention: whole, then split. whole is the last attempt of the whole call; won is nil if nothing fits.
func (v *view) climb(r Retention) (won, whole *attempt, err error) {
	all := []run{{0, len(v.order)}}
	for _, layout := range []Layout{CostOptimal, FullSharing} {
		if whole, err = v.attempt(all, layout, r, -1); err != nil {
			return nil, nil, err
		}
		if whole.total <= v.usable {
			return whole, whole, nil
		}
	}
	if !v.splittable() {
		return nil, whole, nil
	}
	if v.options.Classic {
		won, err = v.classic(r)
	} else {
		won, err = v.fewest(r)
	}
	return won, whole, err
}

// classic is the ladder of the reference: at each count one cut, refused by its lower bound or priced in both layouts.
func (v *view) classic(r Retention) (*attempt, error) {
	for _, k := range v.counts() {
		chunks := v.cutByTokens(k)
		lower, err := v.bounds(chunks, r)
		if err != nil {
			return nil, err
		}
		total := v.total(lower)
		if total > v.usable {
			v.record(chunks, "", r, lower, total)
			continue
		}
		for _, layout := range []Layout{CostOptimal, FullSharing} {
			if t, err := v.attempt(chunks, layout, r, total); err != nil || t.total <= v.usable {
				return t, err
			}
		}
	}
	return nil, nil
}

// counts are those of the ladder: 2, 4, 8, ... and at last one request each.
func (v *view) counts() []int {
	n := len(v.order)
	var list []int
	for k := 2; k < n; k *= 2 {
		list = append(list, k)
	}
	return append(list, n)
}

// attempt plans and prices a rung, and records it.
func (v *view) attempt(chunks []run, layout Layout, r Retention, lower int64) (*attempt, error) {
	t, err := v.planned(chunks, layout, r)
	if err != nil {
		return nil, err
	}
	v.record(chunks, layout, r, t.prices, t.total).LowerBytes = lower
	return t, nil
}

// planned plans and prices a rung.
func (v *view) planned(chunks []run, layout Layout, r Retention) (*attempt, error) {
	t := &attempt{chunks: chunks, layout: layout, retention: r}
	for _, c := range chunks {
		p, err := v.plan(c, layout)
		if err != nil {
			return nil, err
		}
		price, err := v.pricer.Price(p, r)
		if err == nil {
			err = v.checked(c, r, price)
		}
		if err != nil {
			return nil, err
		}
		v.result.Priced++
		t.plans, t.prices = append(t.plans, p), append(t.prices, price)
	}
	t.total = v.total(t.prices)
	return t, nil
}

// record adds a rung to the result.
func (v *view) record(chunks []run, layout Layout, r Retention, prices []profile.Price, total int64) *Rung {
	rung := Rung{
		Count: len(chunks), TotalBytes: total, Fits: total <= v.usable && layout != "", Layout: layout, Retention: r, LowerBytes: -1,
	}
	rung.Required, rung.Retained = amounts(prices)
	for j := range chunks {
		rung.Chunks = append(rung.Chunks, v.answered(chunks, j))
		rung.Basis = rung.Basis.Worse(prices[j].Basis)
	}
	if layout == "" {
		rung.LowerBytes = total
	}
	v.result.Rungs = append(v.result.Rungs, rung)
	return &v.result.Rungs[len(v.result.Rungs)-1]
}

// amounts are the bytes of prices that a rung is judged by.
func amounts(prices []profile.Price) (required, retained []int64) {
	both := make([]int64, 2*len(prices))
	required, retained = both[:len(prices):len(prices)], both[len(prices):]
	for j, p := range prices {
		required[j], retained[j] = p.Required, p.Retained
	}
	return required, retained
}

// callers are the first m requests in the caller's order.
func (s *search) callers(m int) []int {
	list := make([]int, m)
	for i := range list {
		list[i] = i
	}
	return list
}

// answered are the requests that chunk j answers: its own, and those that want nothing with the last. A whole call answers in the caller's order.
func (v *view) answered(chunks []run, j int) []int {
	if len(chunks) == 1 {
		return v.callers(v.m)
	}
	list := slices.Clone(v.order[chunks[j].lo:chunks[j].hi])
	if j == len(chunks)-1 {
		list = append(list, v.idle...)
	}
	return list
}
