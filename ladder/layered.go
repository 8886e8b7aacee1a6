package ladder

import (
	"math"
	"slices"
)

// step is a beginning of the visiting order, cut into chunks: what they retain together, and the largest ephemeral part of one.
type step struct {
	retained, ephemeral int64
	before              int32 // the step without the last chunk, -1 for the empty beginning
	lo                  int32 // where the last chunk begins
}

// front are steps to one place of which none is better than another in both numbers.
type front []int32

// add adds a step unless another is as good, and drops those that are not better than it.
func (f front) add(steps *[]step, s step) front {
	all := *steps
	for _, i := range f {
		if all[i].retained <= s.retained && all[i].ephemeral <= s.ephemeral {
			return f
		}
	}
	f = slices.DeleteFunc(f, func(i int32) bool { return s.retained <= all[i].retained && s.ephemeral <= all[i].ephemeral })
	*steps = append(all, s)
	return append(f, int32(len(all)))
}

// extend adds to the fronts beyond place i every chunk that begins there and leaves a total of at most most.
func (v *view) extend(from front, to []front, steps *[]step, i int, most int64, r Retention) error {
	for hi := i + 1; hi < len(to) && len(from) > 0; hi++ {
		p, err := v.minimal(run{i, hi}, r)
		if err != nil {
			return err
		}
		if p.Required > most {
			return nil // and all the more with another request
		}
		for _, at := range from {
			s := (*steps)[at]
			s = step{plus(s.retained, p.Retained), max(s.ephemeral, p.Ephemeral()), at, int32(i)}
			if plus(s.retained, s.ephemeral) <= most {
				to[hi] = to[hi].add(steps, s)
			}
		}
	}
	return nil
}

// layered is the cut into the fewest chunks, at most limit, that satisfies the inequality, and of those the one with the smallest total: dynamic programming over places and
// counts, keeping of each the cuts that are not worse than another in retained and largest ephemeral bytes.
func (v *view) layered(limit int, r Retention) ([]run, error) {
	n := len(v.order)
	steps := []step{{before: -1}}
	now := make([]front, n+1)
	now[0] = front{0}
	for range limit {
		next := make([]front, n+1)
		for i := range n {
			if err := v.extend(now[i], next, &steps, i, v.usable, r); err != nil {
				return nil, err
			}
		}
		if len(next[n]) > 0 {
			best := slices.MinFunc(next[n], func(a, b int32) int { return cmpTotal(steps[a], steps[b]) })
			return unwind(steps, best, n), nil
		}
		now = next
	}
	return nil, nil
}

func cmpTotal(a, b step) int {
	x, y := plus(a.retained, a.ephemeral), plus(b.retained, b.ephemeral)
	switch {
	case x < y:
		return -1
	case x > y:
		return 1
	}
	return 0
}

// unwind lists the chunks of a step to place n.
func unwind(steps []step, at int32, n int) []run {
	var chunks []run
	for hi := n; steps[at].before >= 0; at = steps[at].before {
		lo := int(steps[at].lo)
		chunks = append(chunks, run{lo, hi})
		hi = lo
	}
	slices.Reverse(chunks)
	return chunks
}

// least is the smallest total by the inequality over all cuts, MaxInt64 if none is at most most.
func (v *view) least(most int64, r Retention) (int64, error) {
	n := len(v.order)
	steps := []step{{before: -1}}
	fronts := make([]front, n+1)
	fronts[0] = front{0}
	for i := range n {
		if err := v.extend(fronts[i], fronts, &steps, i, most, r); err != nil {
			return 0, err
		}
	}
	total := int64(math.MaxInt64)
	for _, at := range fronts[n] {
		total = min(total, plus(steps[at].retained, steps[at].ephemeral))
	}
	return total, nil
}
