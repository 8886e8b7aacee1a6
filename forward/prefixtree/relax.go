package prefixtree

import "math"

// relaxation is prices without divided terms that never charge more than the true ones, on a finer scale: the true work of any layout is at
// least (relaxed work - slack) / scale.
type relaxation struct {
	*prices
	scale, slack int64
}

// relax takes the divided terms of p as fractions. ok is false if the finer scale does not fit an int64.
func (p *prices) relax() (r relaxation, ok bool) {
	r.scale = 1
	for i := range p.divided {
		d := p.divided[i].Divisor
		more := d / gcd(r.scale, d)
		if more > math.MaxInt32/r.scale {
			return r, false
		}
		r.scale *= more
	}
	c := Cost{ShortBelow: p.below}
	for _, f := range []Feature{Tokens, Pairs, Segments, Short, Decisions} {
		c.charge(f, *p.unit(f), r.scale, 1)
	}
	for i := range p.divided {
		t := &p.divided[i]
		c.charge(t.Feature, t.Coefficient, product(t.Times, r.scale/t.Divisor), 1)
		if t.Up {
			continue
		}
		off := product(t.Coefficient, r.scale/t.Divisor, t.Divisor-1) // rounding takes less than one unit off
		if off < 0 || off > math.MaxInt64/2-r.slack {
			return r, false
		}
		r.slack += off
	}
	// The levels are not charged by the unit, so they are added here, and the sum of both must fit.
	additive, err := pricesOf(p.shape, &c)
	if err != nil {
		return r, false
	}
	most := p.most()
	if additive.work(&most) > math.MaxInt64/2 || p.level[p.deepest] > math.MaxInt64/2/r.scale {
		return r, false
	}
	for d, w := range p.level {
		additive.level[d] = w * r.scale
	}
	r.prices = additive
	return r, true
}

// atLeast is the least true work that a layout can have if it has no less than this relaxed work.
func (r *relaxation) atLeast(relaxed int64) int64 {
	return (relaxed - r.slack + r.scale - 1) / r.scale
}

func gcd(a, b int64) int64 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}
