package ladder

import (
	"cmp"
	"math/bits"
	"slices"

	"github.com/trainerrank/engine/profile"
)

// view is the first m requests of a call as a call of its own.
type view struct {
	*search
	m      int
	order  []int // the requests that are cut, in visiting order
	idle   []int // the others
	wanted int   // number of requests that want an output
	grad   bool  // a graph is kept for one of them
	place  []int // per element of order, its place in that of the whole call
	masses []int64
	byByte []int64 // made by cutByBytes
}

func (s *search) view(m int) *view {
	v := &view{search: s, m: m}
	for place, r := range s.call.Order {
		if r >= m {
			continue
		}
		q := &s.call.Requests[r]
		if q.Group >= 0 {
			v.wanted++
			v.grad = v.grad || q.Grad
		} else if !s.options.Classic {
			v.idle = append(v.idle, r)
			continue
		}
		v.order, v.place, v.masses = append(v.order, r), append(v.place, place), append(v.masses, int64(q.Tokens))
	}
	return v
}

func (v *view) splittable() bool { return len(v.order) > 1 && v.call.ExpertParallel <= 1 }

// inequality says whether rungs are judged by [Total] and not by [RunningPeak].
func (v *view) inequality() bool { return v.grad || v.options.Classic || v.options.Inequality }

// total is what a rung needs.
func (v *view) total(prices []profile.Price) int64 {
	required, retained := amounts(prices)
	if v.inequality() {
		return Total(required, retained)
	}
	return RunningPeak(required, retained)
}

// run is a run of the visiting order of a view: a chunk.
type run struct{ lo, hi int }

// runs are the chunks with these ends.
func runs(ends []int) []run {
	chunks, lo := make([]run, len(ends)), 0
	for j, hi := range ends {
		chunks[j] = run{lo, hi}
		lo = hi
	}
	return chunks
}

func (v *view) cutByTokens(k int) []run { return runs(Cut(v.masses, k)) }

// cutByBytes is balanced by what requests weigh in memory: their outputs, and their tokens at the call's own bytes per token. It is nil if that is no other cut.
func (v *view) cutByBytes(k int, r Retention) ([]run, error) {
	if v.byByte == nil {
		v.byByte = []int64{} // not wanted
		first := &v.call.Requests[v.order[0]]
		if !slices.ContainsFunc(v.order, func(r int) bool {
			q := &v.call.Requests[r]
			h1, l1 := bits.Mul64(uint64(q.Outputs), uint64(first.Tokens))
			h2, l2 := bits.Mul64(uint64(first.Outputs), uint64(q.Tokens))
			return h1 != h2 || l1 != l2 // other bytes per token
		}) {
			return nil, nil
		}
		whole, err := v.minimal(run{0, len(v.order)}, r)
		if err != nil {
			return nil, err
		}
		tokens := int64(0)
		for _, m := range v.masses {
			tokens = plus(tokens, m)
		}
		v.byByte = make([]int64, len(v.order))
		for i, r := range v.order {
			// A price is far below 2^63 bytes, and a request's tokens are some of the call's, so that the quotient fits.
			hi, lo := bits.Mul64(uint64(whole.Required-whole.Outputs), uint64(v.masses[i]))
			q, _ := bits.Div64(hi, lo, uint64(max(1, tokens)))
			v.byByte[i] = plus(v.call.Requests[r].Outputs, int64(q))
		}
	}
	if len(v.byByte) == 0 {
		return nil, nil
	}
	ends := Cut(v.byByte, k)
	if slices.Equal(ends, Cut(v.masses, k)) {
		return nil, nil
	}
	return runs(ends), nil
}

// cutLikeUpstream is balanced by the tokens of all requests, wanted or not, without the chunks that have nothing to do.
func (v *view) cutLikeUpstream(k int) []run {
	masses := slices.Clone(v.masses)
	for _, r := range v.idle {
		masses = append(masses, int64(v.call.Requests[r].Tokens))
	}
	ends := Cut(masses, k)
	for i := range ends {
		ends[i] = min(ends[i], len(v.order)) // those that are not wanted come last
	}
	return runs(slices.Compact(ends))
}

// balanced are the balanced cuts into k chunks, in the order in which they are tried.
func (v *view) balanced(k int, r Retention) ([][]run, error) {
	byByte, err := v.cutByBytes(k, r)
	if err != nil {
		return nil, err
	}
	var cuts [][]run
	if byByte != nil {
		cuts = append(cuts, byByte)
	}
	cuts = append(cuts, v.cutByTokens(k))
	n := len(v.order)
	if len(v.idle) == 0 || n <= exactLimit {
		return cuts, nil
	}
	// Not every cut can be looked at, so that what upstream would try must be tried: it weighs requests that are not wanted, and counts them.
	add := func(c []run) {
		if !slices.ContainsFunc(cuts, func(o []run) bool { return slices.Equal(o, c) }) {
			cuts = append(cuts, c)
		}
	}
	add(v.cutLikeUpstream(k))
	for j := 2; k == n && j < n+len(v.idle); j *= 2 {
		if j > n {
			add(v.cutLikeUpstream(j))
		}
	}
	return cuts, nil
}

// kind tells apart what is remembered of a run.
type kind uint8

const (
	minimalPrice kind = iota
	boundPrice
	costPlan
	fullPlan
)

// key names a set of requests: those at places first to last, of the first m requests if not all of them.
type key struct {
	first, last, m int
	kind           kind
	retention      Retention
}

func (v *view) key(c run, k kind, r Retention) key {
	id := key{first: v.place[c.lo], last: v.place[c.hi-1], kind: k, retention: r}
	if id.last-id.first != c.hi-1-c.lo {
		id.m = v.m
	}
	if c.hi-c.lo == len(v.order) {
		id.m = v.m // in another row order than as a chunk
	}
	return id
}

// requests are those of a run in row order: the visiting order for a chunk, the caller's for a whole call.
func (v *view) requests(c run) []int {
	list := v.order[c.lo:c.hi:c.hi]
	if c.hi-c.lo == len(v.order) && !slices.IsSorted(list) {
		list = slices.SortedFunc(slices.Values(list), cmp.Compare)
	}
	return list
}

func (v *view) minimal(c run, r Retention) (profile.Price, error) {
	return v.priced(c, minimalPrice, r, v.pricer.Minimal)
}

func (v *view) bound(c run, r Retention) (profile.Price, error) {
	return v.priced(c, boundPrice, r, v.pricer.Bound)
}

func (v *view) priced(c run, k kind, r Retention, ask func([]int, Retention) (profile.Price, error)) (profile.Price, error) {
	id := v.key(c, k, r)
	if p, known := v.prices[id]; known {
		return p, nil
	}
	p, err := ask(v.requests(c), r)
	if err == nil {
		err = v.checked(c, r, p)
	}
	if err == nil {
		v.result.Priced++
		v.prices[id] = p
	}
	return p, err
}

func (v *view) checked(c run, r Retention, p profile.Price) error {
	if p.Check() != nil {
		return &PriceError{Requests: v.requests(c), Retention: r, Price: p}
	}
	return nil
}

// plan lays a chunk out.
func (v *view) plan(c run, l Layout) (*Plan, error) {
	k := costPlan
	if l == FullSharing {
		k = fullPlan
	}
	id := v.key(c, k, "") // a layout does not depend on what is retained
	if p, known := v.plans[id]; known {
		return p, nil
	}
	p, err := v.planner.Plan(v.requests(c), l)
	if err != nil {
		return nil, err
	}
	v.result.Planned++
	if l == CostOptimal {
		v.result.Searched++
	}
	v.plans[id] = p
	return p, nil
}

func (v *view) minimals(chunks []run, r Retention) ([]profile.Price, error) {
	return v.each(chunks, r, v.minimal)
}

func (v *view) bounds(chunks []run, r Retention) ([]profile.Price, error) {
	return v.each(chunks, r, v.bound)
}

func (v *view) each(chunks []run, r Retention, price func(run, Retention) (profile.Price, error)) ([]profile.Price, error) {
	prices := make([]profile.Price, len(chunks))
	var err error
	for j, c := range chunks {
		if prices[j], err = price(c, r); err != nil {
			return nil, err
		}
	}
	return prices, nil
}
