package profile

import (
	"fmt"
	"math"
	"math/bits"

	"github.com/trainerrank/engine/forward"
)

// Basis says where a price comes from.
type Basis string

// The bases.
const (
	Exact   Basis = "exact"   // from a rehearsal: it is what the call will take
	Learned Basis = "learned" // from calls that were observed, with a safety factor
	Cold    Basis = "cold"    // from the geometry of the model, with a safety factor: nothing like it was observed
)

// Worse is the less reliable of two bases: what a plan of several parts rests on. The empty basis is better than any.
func (b Basis) Worse(o Basis) Basis {
	rank := func(b Basis) int {
		switch b {
		case "":
			return 0
		case Exact:
			return 1
		case Learned:
			return 2
		}
		return 3
	}
	if rank(o) > rank(b) {
		return o
	}
	return b
}

// Price is what a plan costs, in bytes beside what was allocated before it.
//
// Invariant: 0 <= Outputs <= Retained <= Required.
type Price struct {
	Required int64 `json:"required"` // the most in use at one moment, with gradients in the backward too
	Retained int64 `json:"retained"` // what stays after the forward: outputs, and with gradients the graph
	Outputs  int64 `json:"outputs"`  // what is handed to the caller
	Basis    Basis `json:"basis"`
	// Trusted says that Required is exact, or estimated within the reach of observations.
	Trusted bool `json:"trusted"`
}

// Ephemeral is what is free again after the forward: required less retained, in bytes.
func (p Price) Ephemeral() int64 { return p.Required - p.Retained }

// Check says whether p keeps its invariant. A price that breaks it comes from a faulty pricer, and nothing may be admitted by it.
func (p Price) Check() error {
	if p.Outputs < 0 || p.Retained < p.Outputs || p.Required < p.Retained {
		return fmt.Errorf("price: %v is impossible: 0 <= outputs <= retained <= required does not hold", p)
	}
	return nil
}

// String is the numbers on one line.
func (p Price) String() string {
	trust := ""
	if !p.Trusted {
		trust = ", not trusted"
	}
	return fmt.Sprintf("required %d, retained %d, outputs %d bytes (%s%s)", p.Required, p.Retained, p.Outputs, p.Basis, trust)
}

// OfFootprints is the exact price of a subforward that runs passes with these footprints one after the other, one per group of requests
// that share weights and grad mode. All that passes keep adds up; the rest is used in turn, by one forward or by one backward, whose gradients are handed on
// when it is done. There is no safety factor: a footprint is rounded as the device rounds. No footprints cost nothing.
func OfFootprints(passes ...forward.Footprint) Price {
	p := Price{Basis: Exact, Trusted: true}
	ephemeral := int64(0)
	for _, f := range passes {
		p.Outputs = plus(p.Outputs, f.Outputs)
		p.Retained = plus(p.Retained, plus(f.Outputs, f.Retained))
		ephemeral = max(ephemeral, f.Scratch, plus(f.BackwardScratch, f.Gradients))
	}
	p.Required = plus(p.Retained, ephemeral)
	return p
}

// Usable is what a call may use, in bytes, of a device that has free of total bytes left: what is free less a reserve of 3/100 of the total. Bytes that
// an allocator caches are not free: counting them once left a communication library without 24 bytes (#870).
func Usable(free, total int64) int64 {
	return max(0, free-mulDiv(max(0, total), reserveNumerator, reserveDenominator))
}

// Total is the least capacity of a device on which so many bytes are usable as long as nothing is on it: the inverse of [Usable].
func Total(usable int64) int64 {
	if usable <= 0 {
		return 0
	}
	return plus(mulDiv(usable-1, reserveDenominator, reserveDenominator-reserveNumerator), 1)
}

// plus is the sum of two numbers that are not negative, MaxInt64 if that is too small for it.
func plus(a, b int64) int64 {
	if a > math.MaxInt64-b {
		return math.MaxInt64
	}
	return a + b
}

// times is the product of two numbers that are not negative, MaxInt64 if that is too small for it.
func times(a, b int64) int64 { return mulDiv(a, b, 1) }

// mulDiv is a*b/c rounded down, MaxInt64 if that is too small for it. a and b are not negative, c is positive.
func mulDiv(a, b, c int64) int64 {
	hi, lo := bits.Mul64(uint64(a), uint64(b))
	if hi >= uint64(c) {
		return math.MaxInt64
	}
	q, _ := bits.Div64(hi, lo, uint64(c))
	return int64(min(q, math.MaxInt64))
}

// mulDivUp is a*b/c rounded up.
func mulDivUp(a, b, c int64) int64 {
	hi, lo := bits.Mul64(uint64(a), uint64(b))
	lo, carry := bits.Add64(lo, uint64(c-1), 0)
	hi += carry
	if hi >= uint64(c) {
		return math.MaxInt64
	}
	q, _ := bits.Div64(hi, lo, uint64(c))
	return int64(min(q, math.MaxInt64))
}
