package ladder

import "slices"

// ExactLimit is the number of requests up to which the fewest subforwards are found by dynamic programming, where a greedy fill cannot: about 2,000
// prices then, most of which the budget rules out unasked.
const ExactLimit = 64

// exactLimit is ExactLimit, but for tests.
var exactLimit = ExactLimit

// fits is a cut that fits, and if that took a search for layouts, its attempt.
type fits struct {
	chunks  []run
	attempt *attempt // nil: it fits with full sharing
}

// fewest climbs the ladder to the first rung that fits, then looks for fewer subforwards, and plans what it has found.
func (v *view) fewest(r Retention) (*attempt, error) {
	best, failed, err := v.firstRung(r, true)
	if err != nil {
		return nil, err
	}
	if best, err = v.fewer(best, failed, r); err != nil || best == nil {
		return nil, err
	}
	if best.attempt != nil {
		return best.attempt, nil
	}
	v.superseded(best.chunks, r)
	t, err := v.attempt(best.chunks, CostOptimal, r, -1)
	if err != nil || t.total <= v.usable {
		return t, err
	}
	if t, err = v.attempt(best.chunks, FullSharing, r, -1); err != nil {
		return nil, err
	}
	for j, c := range t.chunks {
		predicted, err := v.minimal(c, r)
		if err != nil {
			return nil, err
		}
		if t.prices[j] != predicted {
			return nil, &PriceError{Requests: v.requests(c), Retention: r, Price: t.prices[j], Predicted: &predicted}
		}
	}
	return t, nil
}

// superseded takes back the record of a cut that fits, since its plans are recorded next.
func (v *view) superseded(chunks []run, r Retention) {
	v.result.Rungs = slices.DeleteFunc(v.result.Rungs, func(rung Rung) bool {
		if !rung.Fits || rung.Count != len(chunks) || rung.Retention != r {
			return false
		}
		for j := range chunks {
			if !slices.Equal(rung.Chunks[j], v.answered(chunks, j)) {
				return false
			}
		}
		return true
	})
}

// firstRung is the first rung of 2, 4, 8, ... that fits, and the count of the last one before it that did not.
func (v *view) firstRung(r Retention, record bool) (best *fits, failed int, err error) {
	failed = 1
	for _, k := range v.counts() {
		cuts, err := v.balanced(k, r)
		if err != nil {
			return nil, 0, err
		}
		for _, chunks := range cuts {
			if best, err = v.try(chunks, r, record); err != nil || best != nil {
				return best, failed, err
			}
		}
		failed = k
	}
	return nil, failed, nil
}

// try says whether a cut fits. Full sharing is priced first, since that takes no plans; only if it is too much, and the lower bounds are not, another
// layout can be less, and is searched for.
func (v *view) try(chunks []run, r Retention, record bool) (*fits, error) {
	prices, err := v.minimals(chunks, r)
	if err != nil {
		return nil, err
	}
	total := v.total(prices)
	if total <= v.usable {
		if record {
			v.record(chunks, FullSharing, r, prices, total)
		}
		return &fits{chunks: chunks}, nil
	}
	lower, err := v.bounds(chunks, r)
	if err != nil {
		return nil, err
	}
	if bound := v.total(lower); bound > v.usable {
		if record {
			v.record(chunks, "", r, lower, bound)
		}
		return nil, nil
	}
	t, err := v.planned(chunks, CostOptimal, r)
	if err != nil {
		return nil, err
	}
	if record {
		v.record(chunks, FullSharing, r, prices, total)
		v.record(chunks, CostOptimal, r, t.prices, t.total)
	}
	if t.total <= v.usable {
		return &fits{chunks, t}, nil
	}
	return nil, nil
}

// fewer looks for fewer chunks than those of first, which is nil if no rung fits; failed is the largest count of the ladder that did not.
func (v *view) fewer(first *fits, failed int, r Retention) (*fits, error) {
	best := first
	limit := len(v.order)
	if first != nil {
		limit = len(first.chunks) - 1
	}
	found, all, err := v.minimum(limit, r)
	if err != nil {
		return nil, err
	}
	switch {
	case found != nil:
		// As few as can be, but perhaps lopsided: balanced is better, if it fits.
		if best, err = v.tryBalanced(len(found), r); err != nil {
			return nil, err
		}
		if best == nil {
			if best, err = v.tryShared(found, r); err != nil {
				return nil, err
			}
		}
		if best == nil {
			best = first // judged by the running peak it fits all the more, so that this is for prices that are not monotone
		}
	case !all && first != nil:
		for k := failed; k < len(first.chunks) && best == first; k++ {
			if k < 2 {
				continue
			}
			less, err := v.tryBalanced(k, r)
			if err == nil && less == nil {
				less, err = v.tryFill(k, r)
			}
			if err != nil {
				return nil, err
			}
			if less != nil {
				best = less
			}
		}
	}
	if best == nil {
		more, err := v.more(r)
		if err != nil {
			return nil, err
		}
		for _, k := range more {
			if best, err = v.tryBalanced(k, r); best != nil || err != nil {
				break
			}
		}
		if err != nil {
			return nil, err
		}
	}
	if v.inequality() {
		return best, nil
	}
	for best != nil && len(best.chunks) > 2 {
		less, err := v.tryBalanced(len(best.chunks)-1, r)
		if err != nil {
			return nil, err
		}
		if less == nil {
			break
		}
		best = less
	}
	return best, nil
}

// tryBalanced tries the balanced cuts into k chunks by the prices of full sharing alone.
func (v *view) tryBalanced(k int, r Retention) (*fits, error) {
	cuts, err := v.balanced(k, r)
	if err != nil {
		return nil, err
	}
	for _, chunks := range cuts {
		if f, err := v.tryShared(chunks, r); f != nil || err != nil {
			return f, err
		}
	}
	return nil, nil
}

// tryShared says whether a cut fits with full sharing.
func (v *view) tryShared(chunks []run, r Retention) (*fits, error) {
	prices, err := v.minimals(chunks, r)
	if err != nil {
		return nil, err
	}
	total := v.total(prices)
	v.record(chunks, FullSharing, r, prices, total)
	if total > v.usable {
		return nil, nil
	}
	return &fits{chunks: chunks}, nil
}

// tryFill tries to fill k chunks up to what the balanced cut leaves for ephemeral bytes.
func (v *view) tryFill(k int, r Retention) (*fits, error) {
	prices, err := v.minimals(v.cutByTokens(k), r)
	if err != nil {
		return nil, err
	}
	retained := int64(0)
	for _, p := range prices {
		retained = plus(retained, p.Retained)
	}
	chunks, err := v.fill(v.usable-retained, k, r)
	if err != nil || chunks == nil {
		return nil, err
	}
	return v.tryShared(chunks, r)
}

// minimum finds the fewest chunks, at most limit, that satisfy the inequality with full sharing; nil if there are none. all is false if
// it did not look at every cut.
func (v *view) minimum(limit int, r Retention) (chunks []run, all bool, err error) {
	additive, retained, err := v.outputsOnly(r)
	if err != nil || limit < 2 {
		return nil, true, err // the whole call was tried
	}
	if additive {
		chunks, err = v.fill(v.usable-retained, limit, r)
		return chunks, true, err
	}
	if len(v.order) > exactLimit {
		return nil, false, nil
	}
	chunks, err = v.layered(limit, r)
	return chunks, true, err
}

// more are further counts that are tried before a call is refused, where neither the fill nor dynamic programming sees every cut as it is judged.
func (v *view) more(r Retention) ([]int, error) {
	additive, _, err := v.outputsOnly(r)
	if err != nil || additive || v.inequality() && len(v.order) <= exactLimit {
		return nil, err
	}
	var counts []int
	for k := 2; k <= min(len(v.order), exactLimit); k++ {
		counts = append(counts, k)
	}
	return counts, nil
}

// outputsOnly says whether all that a subforward retains is its outputs, so that the sum is that of the whole call however it is cut.
func (v *view) outputsOnly(r Retention) (bool, int64, error) {
	if v.grad {
		return false, 0, nil
	}
	whole, err := v.minimal(run{0, len(v.order)}, r)
	if err != nil || whole.Retained != whole.Outputs {
		return false, 0, err
	}
	return true, whole.Retained, nil
}

// fill walks the order and extends each chunk as long as its ephemeral bytes stay within room. Where they never fall as a chunk grows, no
// other cut into such chunks has fewer; which is also why the end of a chunk can be found by doubling and halving, so that a long chunk is not priced once for each of its
// requests. It is nil if a single request has more, or if more than limit chunks were needed.
func (v *view) fill(room int64, limit int, r Retention) ([]run, error) {
	var chunks []run
	for lo := 0; lo < len(v.order); {
		hi, not := lo, len(v.order)+1 // [lo, hi) is within room, [lo, not) is not or cannot be
		for not-hi > 1 {
			at := hi + max(1, hi-lo)
			if at >= not {
				at = hi + (not-hi)/2
			}
			p, err := v.minimal(run{lo, at}, r)
			if err != nil {
				return nil, err
			}
			if p.Ephemeral() <= room {
				hi = at
			} else {
				not = at
			}
		}
		if hi == lo || len(chunks) == limit {
			return nil, nil
		}
		chunks = append(chunks, run{lo, hi})
		lo = hi
	}
	return chunks, nil
}
