package profile

import "slices"

// Geometry is what a cold estimate knows of a model.
type Geometry struct {
	Hidden       int64 // elements of a hidden state
	Layers       int64
	ElementBytes int64 // of a weight
}

// Static is the cold estimate of a forward's bytes beside its outputs (section 3.3 of the reference): one hidden state per packed token and for
// about every fourth layer, at least 4 and at most 16 of them.
func (g Geometry) Static(packed int64) int64 {
	states := min(max(max(1, g.Layers)/4+4, 4), 16)
	return times(times(max(0, packed), times(max(0, g.Hidden), max(0, g.ElementBytes))), states)
}

// find is the entry that speaks for a load: that of its very kinds, else the one with the fewest more. Which it is
// depends on the kinds alone, never on sizes, so that prices stay monotone in sizes.
func (p *Profile) find(s *Signature, mix []Share) *entry {
	kinds := kindsOf(mix)
	i, found := p.search(s, kinds)
	if found {
		return &p.entries[i]
	}
	// Entries of a signature stand together, fewer kinds first.
	for ; i < len(p.entries) && p.entries[i].signature == *s; i++ {
		more := p.entries[i].kinds
		if !slices.ContainsFunc(kinds, func(k string) bool { _, in := slices.BinarySearch(more, k); return !in }) {
			return &p.entries[i]
		}
	}
	return nil
}

// Price estimates what a load costs (sections 3.4 and 3.7 of the reference, and the package comment).
//
//	required = (outputs + max(static, estimate)) * 11/10, rounded down
//	retained = (outputs + estimate of retained bytes) * 11/10, rounded up, at most required; required if not trusted
//
// A load without packed tokens costs its outputs, without a safety factor.
func (p *Profile) Price(s Signature, g Geometry, l Load) Price {
	if l.Packed <= 0 {
		return Price{Required: l.Outputs, Retained: l.Outputs, Outputs: l.Outputs, Basis: Exact, Trusted: true}
	}
	s = s.canonical()
	return p.price(p.find(&s, l.Mix), &g, &l)
}

// Floor is p for whoever asks what is known at least: a load that is more than [Growth]*[Growth] times as large as everything that was observed costs what one of just that size does, or the cold estimate if
// that is more. Nothing costs more than by p itself, and all that is smaller costs the same. The two share their observations: p must not change while the other is in use.
//
// Between Growth and Growth*Growth times what was observed a rate is not trusted, but it is all that there is to go by. Beyond that it says little: a first small call compiled, or
// had workspaces that a larger one has too. By p such a call can make ones refused that would be admitted if nothing had been observed.
func (p *Profile) Floor() *Profile { return &Profile{p.entries, true} }

// Bound is a price that no layout of a load can beat: Required and Retained are each at most those of [Profile.Price] for l with any Packed from l.Packed, the fewest
// tokens that a layout has, to l.Logical, the most. Both may not be reached by one and the same layout.
//
// More packed tokens never need fewer bytes, but they lower the ratio of logical to packed tokens, which may bring a layout within reach of what was observed, and
// then fewer of its bytes count as retained. The upstream bound once overlooked that (#877).
func (p *Profile) Bound(s Signature, g Geometry, l Load) Price {
	if l.Packed <= 0 {
		return p.Price(s, g, l)
	}
	s = s.canonical()
	e := p.find(&s, l.Mix)
	least := p.price(e, &g, &l)
	if e == nil {
		return least
	}
	for i := range e.buckets {
		// Retained bytes never fall as tokens are added within reach of one observation: the fewest tokens within reach have the least.
		if t := &e.buckets[i].kept; t.packed > 0 {
			ratio := t.ratio.grown()
			at := l
			at.Packed = max(l.Packed, mulDivUp(l.Logical, ratio.den, max(1, ratio.num)))
			if at.Packed <= l.Logical && at.Packed <= times(t.packed, Growth) {
				least.Retained = min(least.Retained, p.price(e, &g, &at).Retained)
			}
		}
	}
	return least
}

func (p *Profile) price(e *entry, g *Geometry, l *Load) Price {
	r := Price{Outputs: l.Outputs, Basis: Cold}
	compute := g.Static(l.Packed)
	kept, believed := int64(0), false
	if e != nil {
		r.Basis = Learned
		compute = max(compute, e.estimate(l, peakOf, p.floor))
		for i := range e.buckets {
			b := &e.buckets[i]
			r.Trusted = r.Trusted || b.peak.reaches(l, e.kinds)
			believed = believed || b.kept.packed > 0 && b.kept.reaches(l, e.kinds) && b.kept.shared(l)
		}
	}
	r.Required = mulDiv(plus(l.Outputs, compute), SafetyNumerator, SafetyDenominator)
	r.Retained = r.Required
	if believed {
		kept = e.estimate(l, keptOf, false)
		r.Retained = min(r.Required, mulDivUp(plus(l.Outputs, kept), SafetyNumerator, SafetyDenominator))
	}
	return r
}

// reaches says whether a call is no larger than [Growth] times what was observed, and of no other mix.
func (t *track) reaches(l *Load, kinds []string) bool {
	return l.Packed <= times(t.packed, Growth) && l.within(kinds, t.shares)
}

// shared says whether a call shares no more than [Growth] times as much as what was observed.
func (t *track) shared(l *Load) bool {
	return (rational{l.Logical, l.Packed}).compare(t.ratio.grown()) <= 0
}

func peakOf(b *bucket) *track { return &b.peak }
func keptOf(b *bucket) *track { return &b.kept }

// tokens is the size of a call in tokens of t: packed ones, or if it shares more than what was observed did, as many as would carry its logical tokens at the observed ratio.
// That is the reference's factor max(1, ratio/observed ratio), kept apart from the rate so that all stays in integers (#877: in floating point it was not monotone).
func (t *track) tokens(packed, logical int64) int64 {
	return max(packed, mulDivUp(logical, t.ratio.den, max(1, t.ratio.num)))
}

// estimate is the smaller of the two bounds of the package comment, for the tracks that have something to say; 0 if none has. As a floor it ends at
// Growth*Growth times the largest observation.
func (e *entry) estimate(l *Load, of func(*bucket) *track, floor bool) int64 {
	last := -1
	for i := range e.buckets {
		if of(&e.buckets[i]).packed > 0 {
			last = i
		}
	}
	if last < 0 {
		return 0
	}
	byRate, bySize, most := int64(0), int64(-1), int64(0)
	near := false // a bucket was met that the call has not outgrown
	for i := range e.buckets[:last+1] {
		t := of(&e.buckets[i])
		if t.packed == 0 {
			continue
		}
		size, reach := t.tokens(l.Packed, l.Logical), times(t.packed, Growth)
		if floor && i == last {
			size = min(size, times(reach, Growth))
		}
		outgrown := i < last && size > reach
		// Above the range only the nearest bucket counts, and that only if none was within it.
		if outgrown || !near || t.packed <= times(size, Growth) {
			asked := size
			if outgrown {
				asked = reach
			}
			byRate = max(byRate, mulDivUp(t.rate.num, asked, t.rate.den))
		}
		near = near || !outgrown
		most = max(most, t.bytes)
		if t.packed >= l.Packed || i == last {
			// In proportion to tokens, if that is more than was observed.
			if bound := mulDivUp(most, max(t.packed, size), t.packed); bySize < 0 || bound < bySize {
				bySize = bound
			}
		}
	}
	return min(byRate, bySize)
}
