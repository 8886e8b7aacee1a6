package main

import (
	. "github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// reductions writes the functions that fold a row into one value, in 32 lanes and a tree.
func reductions(v isa) {
	lanes := tile / v.w

	text("sumSquares"+v.suffix, "func(x *float32, n int) float32", "is the sum of the squares of n values.")
	acc := v.cleared(lanes)
	v.each(arg("n"), tile, args("x"), func(mem func(i, disp int) operand.Mem, k []mask) {
		for j, a := range acc {
			x := v.load(mem(0, j*v.bytes()), k[j])
			VMULPS(x, x, x)
			VADDPS(x, a, a)
		}
	})
	add := func(high, low reg.Register) { VADDPS(high, low, low) }
	sum := v.tree(acc, add)
	VMOVSS(sum, resultMem())
	end()

	text("max"+v.suffix, "func(x *float32, n int) float32", "is the largest of n values, NaN if any is NaN. n is positive.")
	n, p := arg("n"), arg("x")
	for j := range acc {
		acc[j] = v.broadcast(at(p, 0))
	}
	nan := mask(nil)
	if v.wide() {
		k := K()
		KXORW(k, k, k)
		nan = k
	} else {
		x := v.vec()
		v.zero(x)
		nan = x
	}
	v.each(n, tile, []reg.GPVirtual{p}, func(mem func(i, disp int) operand.Mem, k []mask) {
		var odd reg.VecVirtual
		for j, a := range acc {
			x := v.load(mem(0, j*v.bytes()), k[j])
			switch {
			case k[j] == nil:
				VMAXPS(a, x, a) // a if x is NaN or equal
			case v.wide():
				VMAXPS(a, x, k[j], a)
			default:
				y := v.vec()
				VMAXPS(a, x, y)
				VBLENDVPS(k[j], y, a, a)
			}
			if j%2 == 0 {
				odd = x
			} else if v.wide() {
				m := K()
				VCMPPS(cmpUnord, odd, x, m)
				KORW(m, nan, nan)
			} else {
				VCMPPS(cmpUnord, odd, x, x)
				VORPS(x, nan, nan)
			}
		}
	})
	if v.wide() {
		KORTESTW(nan, nan)
	} else {
		bits := GP32()
		VMOVMSKPS(nan, bits)
		TESTL(bits, bits)
	}
	JNZ(operand.LabelRef("nan"))
	top := v.tree(acc, func(high, low reg.Register) { VMAXPS(low, high, low) })
	VMOVSS(top, resultMem())
	end()
	Label("nan")
	quiet := GP32()
	MOVL(operand.U32(0x7fc00000), quiet)
	MOVL(quiet, resultMem())
	end()

	text("expSum"+v.suffix, "func(x *float32, n int, m float32) float64", "is the sum of exp(x-m) over n values: float32 lanes, the tree in float64.")
	c := v.expConsts(false)
	m := v.broadcast(argMem("m"))
	acc = v.cleared(lanes)
	v.each(arg("n"), tile, args("x"), func(mem func(i, disp int) operand.Mem, k []mask) {
		for j, a := range acc {
			x := v.load(mem(0, j*v.bytes()), k[j])
			VSUBPS(m, x, x)
			e := v.exp(c, x, false)
			switch {
			case k[j] == nil:
				VADDPS(e, a, a)
			case v.wide():
				VADDPS(e, a, k[j], a)
			default:
				VANDPS(k[j], e, e)
				VADDPS(e, a, a)
			}
		}
	})
	// Lane i+16 is added to lane i in float64, and so on.
	var wide []reg.VecVirtual
	for _, a := range acc {
		lo, hi := v.vec(), v.vec()
		if v.wide() {
			VCVTPS2PD(a.AsY(), lo)
			high := YMM()
			VEXTRACTF64X4(operand.Imm(1), a, high)
			VCVTPS2PD(high, hi)
		} else {
			VCVTPS2PD(a.AsX(), lo)
			high := XMM()
			VEXTRACTF128(operand.Imm(1), a, high)
			VCVTPS2PD(high, hi)
		}
		wide = append(wide, lo, hi)
	}
	total := v.fold(wide, func(high, low reg.Register) { VADDPD(high, low, low) })
	high := XMM()
	VUNPCKHPD(total, total, high)
	VADDSD(high, total, total)
	VMOVSD(total, resultMem())
	end()
}

// cleared are n registers of zeros.
func (v isa) cleared(n int) []reg.VecVirtual {
	r := v.vecs(n)
	for _, x := range r {
		v.zero(x)
	}
	return r
}

// fold combines registers, then halves of a register, by op(high, low) into low, down to 128 bits.
func (v isa) fold(acc []reg.VecVirtual, op func(high, low reg.Register)) reg.Register {
	for h := len(acc) / 2; h > 0; h /= 2 {
		for i := range h {
			op(acc[i+h], acc[i])
		}
	}
	a := acc[0]
	if v.wide() {
		high := YMM()
		VEXTRACTF64X4(operand.Imm(1), a, high)
		op(high, a.AsY())
	}
	high := XMM()
	VEXTRACTF128(operand.Imm(1), a.AsY(), high)
	op(high, a.AsX())
	return a.AsX()
}

// tree folds 32 lanes of float32 into the lowest.
func (v isa) tree(acc []reg.VecVirtual, op func(high, low reg.Register)) reg.Register {
	a := v.fold(acc, op)
	high := XMM()
	VMOVHLPS(a, a, high)
	op(high, a)
	next := XMM()
	VMOVSHDUP(a, next)
	op(next, a)
	return a
}
