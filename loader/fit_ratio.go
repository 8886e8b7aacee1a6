package loader

import (
	"fmt"
	"math"
	"math/big"
	"math/bits"
)

// Ratio is an exact non-negative fraction, for costs per byte. The zero value is no number: it means that a cost has not been
// declared, and is refused wherever a cost is due.
type Ratio struct{ Num, Den int64 }

// String is the fraction in lowest terms, "2" or "3/2"; "undeclared" for the zero value.
func (r Ratio) String() string {
	switch {
	case r == Ratio{}:
		return "undeclared"
	case r.Den == 0:
		return fmt.Sprintf("%d/0", r.Num)
	}
	x := big.NewRat(r.Num, r.Den)
	if x.IsInt() {
		return x.Num().String()
	}
	return x.String()
}

const (
	// Multipliers are small numbers with small denominators; these bounds leave 2^33 bytes times any of them inside int64.
	maxMultiplier  = 1 << 20
	maxDenominator = 1 << 10
)

// commonScale is the least common denominator of all multipliers. Charges are counted in units of 1/scale byte, so that
// sums of fractional charges of different files stay exact without a fraction type in the inner loops.
func commonScale(rs []Ratio) (scale int64, ok bool) {
	scale = 1
	for _, r := range rs {
		_, den := reduce(r)
		scale = scale / gcd(scale, den) * den
		if scale > maxDenominator {
			return 0, false
		}
	}
	return scale, true
}

func reduce(r Ratio) (num, den int64) {
	g := gcd(r.Num, r.Den)
	return r.Num / g, r.Den / g
}

func gcd(a, b int64) int64 {
	for b != 0 {
		a, b = b, a%b
	}
	return max(a, 1)
}

// less compares two declared ratios.
func (r Ratio) less(s Ratio) bool {
	ah, al := bits.Mul64(uint64(r.Num), uint64(s.Den))
	bh, bl := bits.Mul64(uint64(s.Num), uint64(r.Den))
	return ah < bh || ah == bh && al < bl
}

// The planner's sums saturate at never, which no budget reaches: a charge that is too large for int64 is refused like any
// other charge that is too large. All arguments are at least 0.
const never = math.MaxInt64

func satAdd(a, b int64) int64 {
	if a > never-b {
		return never
	}
	return a + b
}

func satMul(a, b int64) int64 {
	hi, lo := bits.Mul64(uint64(a), uint64(b))
	if hi != 0 || lo > never {
		return never
	}
	return int64(lo)
}

func ceilDiv(a, b int64) int64 {
	q := a / b
	if a%b > 0 {
		q++
	}
	return q
}

// roundTo rounds up to a multiple of unit.
func roundTo(a, unit int64) int64 {
	if unit <= 1 || a%unit == 0 {
		return a
	}
	return satAdd(a, unit-a%unit)
}
