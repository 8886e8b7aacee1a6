package profile

import (
	"cmp"
	"math/bits"
	"slices"
	"strings"
)

// Constants of the estimate; the reference's section 3.1 has them as 1.10, 0.03 and 8.
const (
	// SafetyNumerator over SafetyDenominator is the factor on every estimate: room for what an estimate does not see.
	SafetyNumerator, SafetyDenominator int64 = 11, 10
	// Growth is how many times as large as an observation a call may be to be trusted, and how wide a bucket of observations is.
	Growth int64 = 8

	reserveNumerator, reserveDenominator int64 = 3, 100
)

// Observation is what was measured of one subforward.
type Observation struct {
	Load
	// Peak is the most bytes in use at one moment, above what was in use before: of the forward, or if that is what was measured of forward and backward.
	Peak int64
	// Retained is what was still in use after the forward, outputs included, in bytes, if Kept. Peak is the forward's then.
	Retained int64
	// Kept says that Retained was measured. A retained byte count of 0 that was measured differs from none.
	Kept bool
}

// rational is a fraction in lowest terms. Invariant: num >= 0, den > 0, no common divisor: equal fractions are equal values.
type rational struct{ num, den int64 }

func fraction(num, den int64) rational {
	a, b := max(0, num), max(1, den)
	for x, y := a, b; ; x, y = y, x%y {
		if y == 0 {
			return rational{a / x, b / x}
		}
	}
}

// compare is negative if r is smaller than o.
func (r rational) compare(o rational) int {
	h1, l1 := bits.Mul64(uint64(r.num), uint64(o.den))
	h2, l2 := bits.Mul64(uint64(o.num), uint64(r.den))
	return cmp.Or(cmp.Compare(h1, h2), cmp.Compare(l1, l2))
}

// grown is r times the trust growth, MaxInt64 if it is more.
func (r rational) grown() rational { return rational{times(r.num, Growth), r.den} }

func (r *rational) raise(o rational) {
	if r.compare(o) < 0 {
		*r = o
	}
}

// track is what the observations of one bucket say of one quantity of bytes, outputs not counted. Every field is the largest observed.
type track struct {
	packed int64      // tokens
	ratio  rational   // logical tokens per packed token
	bytes  int64      // of one observation
	rate   rational   // bytes per packed token
	shares []rational // per kind of the entry: its tokens among the logical ones
}

func (t *track) raise(o *track) {
	t.packed, t.bytes = max(t.packed, o.packed), max(t.bytes, o.bytes)
	if t.shares == nil {
		t.ratio, t.rate, t.shares = o.ratio, o.rate, slices.Clone(o.shares)
		return
	}
	t.ratio.raise(o.ratio)
	t.rate.raise(o.rate)
	for i := range t.shares {
		t.shares[i].raise(o.shares[i])
	}
}

// bucket holds the observations of Growth^k to Growth^(k+1)-1 packed tokens.
type bucket struct {
	peak track
	// kept is about retained bytes, which have a rate of their own: a backward's peak says nothing about what a forward keeps. It is empty (packed is 0)
	// as long as none were measured. It keeps its own sizes, because a peak alone earns them no trust.
	kept track
	// fraction is the largest ratio of retained bytes to the peak of the same forward, outputs counted in both. Not used in prices.
	fraction rational
}

// number is k of the bucket for so many tokens.
func number(packed int64) int {
	k := 0
	for ; packed >= Growth; packed /= Growth {
		k++
	}
	return k
}

// entry is all that was observed under one signature and one set of kinds. Invariant: kinds ascend; buckets ascend by number, none is empty.
type entry struct {
	signature Signature
	kinds     []string
	buckets   []bucket
}

func (e *entry) compare(s *Signature, kinds []string) int {
	a := e.signature
	return cmp.Or(
		cmp.Compare(a.Model, s.Model),
		cmp.Compare(a.Topology.DataParallel, s.Topology.DataParallel),
		cmp.Compare(a.Topology.TensorParallel, s.Topology.TensorParallel),
		cmp.Compare(a.Topology.ContextParallel, s.Topology.ContextParallel),
		cmp.Compare(a.Topology.PipelineParallel, s.Topology.PipelineParallel),
		cmp.Compare(a.Cost, s.Cost),
		cmp.Compare(a.GradGroups, s.GradGroups),
		cmp.Compare(a.NoGradGroups, s.NoGradGroups),
		cmp.Compare(len(e.kinds), len(kinds)),
		slices.Compare(e.kinds, kinds),
	)
}

func (e *entry) merge(o *bucket) {
	k := number(o.peak.packed)
	i, found := slices.BinarySearchFunc(e.buckets, k, func(b bucket, k int) int { return cmp.Compare(number(b.peak.packed), k) })
	if !found {
		e.buckets = slices.Insert(e.buckets, i, bucket{})
	}
	b := &e.buckets[i]
	b.peak.raise(&o.peak)
	if o.kept.packed > 0 {
		b.kept.raise(&o.kept)
		if b.fraction.den == 0 {
			b.fraction = o.fraction
		}
		b.fraction.raise(o.fraction)
	}
}

// Profile is what a rank has learned about the memory of calls. The zero value has learned nothing and is ready for use. It is not safe for concurrent use.
type Profile struct {
	entries []entry // ascending
	floor   bool    // see Floor
}

// canonical reads a topology that is not given as one rank, and names as what can be saved.
func (s Signature) canonical() Signature {
	s.Model, s.Cost = strings.ToValidUTF8(s.Model, "?"), strings.ToValidUTF8(s.Cost, "?")
	t := &s.Topology
	for _, n := range []*int{&t.DataParallel, &t.TensorParallel, &t.ContextParallel, &t.PipelineParallel} {
		*n = max(1, *n)
	}
	return s
}

func (p *Profile) search(s *Signature, kinds []string) (int, bool) {
	return slices.BinarySearchFunc(p.entries, s, func(e entry, s *Signature) int { return e.compare(s, kinds) })
}

func (p *Profile) at(s *Signature, kinds []string) *entry {
	i, found := p.search(s, kinds)
	if !found {
		p.entries = slices.Insert(p.entries, i, entry{signature: *s, kinds: slices.Clone(kinds)})
	}
	return &p.entries[i]
}

func kindsOf(mix []Share) []string {
	kinds := make([]string, len(mix))
	for i, s := range mix {
		kinds[i] = s.Kind
	}
	return kinds
}

// Observe learns from a subforward. Observations are max-merged bucket by bucket: a call never gets cheaper by one, and their order
// does not matter. One without packed tokens says nothing and is ignored.
func (p *Profile) Observe(s Signature, o Observation) {
	if o.Packed <= 0 {
		return
	}
	s = s.canonical()
	peak, outputs := max(0, o.Peak), max(0, o.Outputs)
	b := bucket{peak: newTrack(&o.Load, max(0, peak-outputs))}
	if o.Kept {
		// Memory that another call's release freed in between can make retained the larger; no more than the peak was ever this call's.
		kept := min(max(0, o.Retained), peak)
		b.kept = newTrack(&o.Load, max(0, kept-outputs))
		b.fraction = fraction(kept, peak)
	}
	p.at(&s, kindsOf(o.Mix)).merge(&b)
}

func newTrack(l *Load, bytes int64) track {
	t := track{packed: l.Packed, ratio: fraction(l.Logical, l.Packed), bytes: bytes, rate: fraction(bytes, l.Packed), shares: make([]rational, len(l.Mix))}
	for i, s := range l.Mix {
		t.shares[i] = fraction(s.Tokens, l.Logical)
	}
	return t
}

// Merge learns all that other knows, as if both had observed everything: what ranks do to agree. Other is not changed.
func (p *Profile) Merge(other *Profile) {
	for i := range other.entries {
		e := &other.entries[i]
		mine := p.at(&e.signature, e.kinds)
		for j := range e.buckets {
			mine.merge(&e.buckets[j])
		}
	}
}

// About is a copy of what was observed under some signatures: enough for their prices.
func (p *Profile) About(signatures ...Signature) *Profile {
	all := new(Profile)
	all.Merge(p)
	all.entries = slices.DeleteFunc(all.entries, func(e entry) bool {
		return !slices.ContainsFunc(signatures, func(s Signature) bool { return e.signature == s.canonical() })
	})
	return all
}

// Forget drops everything that was observed under a signature: the way back from a measurement that was wrong.
func (p *Profile) Forget(s Signature) {
	s = s.canonical()
	p.entries = slices.DeleteFunc(p.entries, func(e entry) bool { return e.signature == s })
}

// RetainedFraction is the largest observed ratio of retained bytes to the forward's peak, outputs counted in both, among observations under a signature and of these very kinds;
// ok is false if retained bytes were never measured, which is not the same as a ratio of 1. It is for reports; prices use bytes per token.
func (p *Profile) RetainedFraction(s Signature, mix []Share) (retained, peak int64, ok bool) {
	s = s.canonical()
	i, found := p.search(&s, kindsOf(mix))
	if !found {
		return 0, 0, false
	}
	f := rational{0, 1}
	for j := range p.entries[i].buckets {
		if b := &p.entries[i].buckets[j]; b.kept.packed > 0 {
			f.raise(b.fraction)
			ok = true
		}
	}
	return f.num, f.den, ok
}
