package ladder

import (
	"math"
	"slices"
)

// smallest is the smallest number of usable bytes with which the call is admitted: the least total of everything that a search would try, none of which depends on
// the bytes that there are. The fill does, but it admits nothing that one request each would not: without gradients that rung
// has the least running peak of all.
func (v *view) smallest() (int64, error) {
	best := int64(math.MaxInt64)
	for _, r := range v.options.retentions(v.grad) {
		whole := []run{{0, len(v.order)}}
		for _, layout := range []Layout{CostOptimal, FullSharing} {
			t, err := v.planned(whole, layout, r)
			if err != nil {
				return 0, err
			}
			best = min(best, t.total)
		}
		if !v.splittable() {
			continue
		}
		var rungs [][]run
		for _, k := range v.counts() {
			cuts, err := v.balanced(k, r)
			if err != nil {
				return 0, err
			}
			rungs = append(rungs, cuts...)
		}
		all := slices.Clone(rungs)
		more, err := v.more(r)
		if err != nil {
			return 0, err
		}
		for _, k := range more {
			cuts, err := v.balanced(k, r)
			if err != nil {
				return 0, err
			}
			all = append(all, cuts...)
		}
		for _, chunks := range all {
			prices, err := v.minimals(chunks, r)
			if err != nil {
				return 0, err
			}
			best = min(best, v.total(prices))
		}
		additive, _, err := v.outputsOnly(r)
		if err == nil && !additive && len(v.order) <= exactLimit {
			var total int64
			total, err = v.least(best, r)
			best = min(best, total)
		}
		if err != nil {
			return 0, err
		}
		for _, chunks := range rungs {
			lower, err := v.bounds(chunks, r)
			if err != nil {
				return 0, err
			}
			if v.total(lower) >= best {
				continue
			}
			t, err := v.planned(chunks, CostOptimal, r)
			if err != nil {
				return 0, err
			}
			best = min(best, t.total)
		}
	}
	return best, nil
}

// largestPrefix is how many of the first inputs are admitted as a call: found by halving, so that one more is not. It
// is the largest there is where prices are monotone.
func (s *search) largestPrefix() (int, error) {
	fit, not := 0, len(s.call.Requests)
	for not-fit > 1 {
		m := fit + (not-fit)/2
		ok, err := s.view(m).admitted()
		if err != nil {
			return 0, err
		}
		if ok {
			fit = m
		} else {
			not = m
		}
	}
	return fit, nil
}

// admitted says whether a search would admit the view, without recording what it tried.
func (v *view) admitted() (bool, error) {
	if v.wanted == 0 {
		return true, nil
	}
	for _, r := range v.options.retentions(v.grad) {
		ok, err := v.admittedAs(r)
		if ok || err != nil {
			return ok, err
		}
	}
	return false, nil
}

func (v *view) admittedAs(r Retention) (bool, error) {
	if best, err := v.try([]run{{0, len(v.order)}}, r, false); best != nil || err != nil {
		return best != nil, err
	}
	if !v.splittable() {
		return false, nil
	}
	additive, _, err := v.outputsOnly(r)
	if err != nil {
		return false, err
	}
	if additive {
		// No cut has a smaller peak than one request each.
		best, err := v.try(v.cutByTokens(len(v.order)), r, false)
		return best != nil, err
	}
	if best, _, err := v.firstRung(r, false); best != nil || err != nil {
		return best != nil, err
	}
	if len(v.order) <= exactLimit {
		if total, err := v.least(v.usable, r); err != nil || total <= v.usable {
			return err == nil, err
		}
	}
	more, err := v.more(r)
	for _, k := range more {
		if err != nil {
			break
		}
		var cuts [][]run
		cuts, err = v.balanced(k, r)
		for _, chunks := range cuts {
			prices, err := v.minimals(chunks, r)
			if err != nil || v.total(prices) <= v.usable {
				return err == nil, err
			}
		}
	}
	return false, err
}
