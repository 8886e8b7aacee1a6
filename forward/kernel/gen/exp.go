package main

import (
	. "github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// expConsts makes ready what exp needs, and the other constants named.
func (v isa) expConsts(nonPositive bool, others ...string) consts {
	names := append(others, "magic", "log2e", "ln2hi", "ln2lo", "c2", "c3", "c4", "c5", "c6", "one", "lowest")
	switch {
	case nonPositive:
	case v.wide():
		names = append(names, "clamp")
	default:
		names = append(names, "highest", "inf")
	}
	c := v.consts(names...)
	v.reg(c, "magic")
	return c
}

// exp is exp(x) in a new register. nonPositive promises x <= 0 or NaN and saves the care for overflow.
//
// The method is the classic one of the Cephes library: x = n ln 2 + r with n the nearest integer, so |r| <= 0.35, then
// exp(r) 2^n. ln 2 is taken in two parts. Since n*ln2hi is a multiple of 2^-24 and so is x where it matters, the first fused step
// is exact. exp(r) is 1 + r + c2 r^2 + ... + c6 r^6, the coefficients fitted for the least relative error (3e-9, well
// below a rounding). 2^n is an addition to the exponent, or VSCALEFPS. Where x is below the range of normal results, a mask puts
// 0; NaN passes through all steps, but for the addition to the exponent, after which it is put back.
func (v isa) exp(c consts, x reg.VecVirtual, nonPositive bool) reg.VecVirtual {
	y := x
	if v.wide() && !nonPositive {
		y = v.vec()
		VMINPS(x, c["clamp"], y) // the second operand, x, if it is NaN
	}
	magic := c["magic"]
	t, n := v.copy(y), v.vec()
	VFMADD132PS(c["log2e"], magic, t)
	VSUBPS(magic, t, n)
	r := v.copy(y)
	VFNMADD231PS(c["ln2hi"], n, r)
	VFNMADD231PS(c["ln2lo"], n, r)
	p := v.copy(c["c6"])
	for _, q := range []string{"c5", "c4", "c3", "c2", "one", "one"} {
		VFMADD213PS(c[q], r, p)
	}
	if v.wide() {
		k := K()
		VCMPPS(cmpNLT, c["lowest"], x, k)
		VSCALEFPS_Z(n, p, k, p)
		return p
	}
	VPSLLD(operand.Imm(23), t, t)
	VPADDD(t, p, p)
	m := v.vec()
	VCMPPS(cmpNLT, c["lowest"], x, m)
	VANDPS(m, p, p)
	if nonPositive {
		nan := v.vec()
		VCMPPS(cmpUnord, x, x, nan)
		VORPS(nan, p, p)
		return p
	}
	over, sum := v.vec(), v.vec()
	VCMPPS(cmpNLE, c["highest"], x, over)
	VADDPS(c["inf"], x, sum) // +Inf, or NaN
	VBLENDVPS(over, sum, p, p)
	return p
}
