package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// visible is the mask of the lanes with lo <= key < hi.
func (v isa) visible(key, lo, hi reg.VecVirtual) mask {
	if v.wide() {
		from, both := K(), K()
		VPCMPD(cmpNLT, lo, key, from)
		VPCMPD(cmpLT, hi, key, from, both)
		return both
	}
	before, m := v.vec(), v.vec()
	VPCMPGTD(key, lo, before)
	VPCMPGTD(key, hi, m)
	VPANDN(m, before, m)
	return m
}

// softmax writes the update of an online softmax. Two registers of lanes are treated at a time: all 32 lanes under
// AVX-512, in two rounds under AVX2. A first pass over the keys scales, masks with -Inf and finds the maximum, a second takes the exponentials.
func softmax(v isa) {
	text("softmaxBlock"+v.suffix, "func(s *float32, n int, scale float32, key0 int32, lo, hi *int32, mx, sum, corr *float32)",
		"updates the online softmax of 32 lanes by n keys.")
	s, lop, hip, mxp, sump, corrp := arg("s"), arg("lo"), arg("hi"), arg("mx"), arg("sum"), arg("corr")
	const regs = 2
	off := GP64()
	XORQ(off, off)
	Label("lanes")

	scale, key := v.broadcast(argMem("scale")), v.broadcast(argMem("key0"))
	c := v.expConsts(true, "ninf", "int1")
	ninf, int1 := v.reg(c, "ninf"), v.reg(c, "int1")
	var lo, hi, m, t []reg.VecVirtual
	mem := func(p reg.GPVirtual, i int) operand.Mem { return idx(p, off, 1, i*v.bytes()) }
	for i := range regs {
		lo, hi, m = append(lo, v.copy(mem(lop, i))), append(hi, v.copy(mem(hip, i))), append(m, v.copy(mem(mxp, i)))
	}
	p, n := GP64(), GP64()
	LEAQ(idx(s, off, 1, 0), p)
	Load(Param("n"), n)
	TESTQ(n, n)
	JZ(operand.LabelRef("found"))
	Label("scores")
	for i := range regs {
		k, x := v.visible(key, lo[i], hi[i]), reg.VecVirtual(nil)
		if v.wide() {
			x = v.copy(ninf)
			VMULPS(at(p, i*v.bytes()), scale, k, x)
		} else {
			x = v.vec()
			VMULPS(at(p, i*v.bytes()), scale, x)
			VBLENDVPS(k, x, ninf, x)
		}
		VMOVUPS(x, at(p, i*v.bytes()))
		VMAXPS(m[i], x, m[i]) // m if x is NaN or equal
	}
	VPADDD(int1, key, key)
	ADDQ(operand.U32(4*tile), p)
	DECQ(n)
	JNZ(operand.LabelRef("scores"))
	Label("found")

	// corr = exp(old - m), but 1 where they are equal; m becomes the reference, 0 where there is no key yet.
	for i := range regs {
		old, d := v.copy(mem(mxp, i)), v.vec()
		VMOVUPS(m[i], mem(mxp, i))
		VSUBPS(m[i], old, d)
		e := v.exp(c, d, true)
		if v.wide() {
			same, none := K(), K()
			VCMPPS(cmpEQ, old, m[i], same)
			VMOVUPS(c["one"], same, e)
			VCMPPS(cmpEQ, ninf, m[i], none)
			VPXORD(m[i], m[i], none, m[i])
		} else {
			same, none := v.vec(), v.vec()
			VCMPPS(cmpEQ, old, m[i], same)
			VBLENDVPS(same, c["one"], e, e)
			VCMPPS(cmpEQ, ninf, m[i], none)
			VANDNPS(m[i], none, m[i])
		}
		VMOVUPS(e, mem(corrp, i))
	}
	for range regs {
		x := v.vec()
		v.zero(x)
		t = append(t, x)
	}
	LEAQ(idx(s, off, 1, 0), p)
	Load(Param("n"), n)
	TESTQ(n, n)
	JZ(operand.LabelRef("summed"))
	Label("weights")
	for i := range regs {
		x := v.copy(at(p, i*v.bytes()))
		VSUBPS(m[i], x, x)
		e := v.exp(c, x, true)
		VMOVUPS(e, at(p, i*v.bytes()))
		VADDPS(e, t[i], t[i])
	}
	ADDQ(operand.U32(4*tile), p)
	DECQ(n)
	JNZ(operand.LabelRef("weights"))
	Label("summed")
	for i := range regs {
		x := v.copy(mem(sump, i))
		VMULPS(mem(corrp, i), x, x)
		VADDPS(t[i], x, x)
		VMOVUPS(x, mem(sump, i))
	}
	if !v.wide() {
		ADDQ(operand.U32(uint32(regs*v.bytes())), off)
		CMPQ(off, operand.U32(4*tile))
		JLT(operand.LabelRef("lanes"))
	}
	end()
}

// accum writes the masked twins of the gemm microkernels, for 1, 2, 4 ... rows of o.
func accum(v isa) {
	for m := v.masked; m >= 1; m /= 2 {
		text(fmt.Sprintf("accum%d%s", m, v.suffix), "func(o, v *float32, vs int, p *float32, n int, key0 int32, lo, hi *int32)",
			fmt.Sprintf("adds n keys to %d rows of %d lanes of o where lo <= key < hi.", m, v.cols))
		o, val, vs, p, n := arg("o"), arg("v"), arg("vs"), arg("p"), arg("n")
		lop, hip := arg("lo"), arg("hi")
		SHLQ(operand.Imm(2), vs)
		key := v.broadcast(argMem("key0"))
		int1 := v.reg(v.consts("int1"), "int1")
		regs := v.cols / v.w
		var lo, hi []operand.Op
		for j := range regs {
			if v.wide() {
				lo, hi = append(lo, v.copy(at(lop, j*v.bytes()))), append(hi, v.copy(at(hip, j*v.bytes())))
			}
		}
		acc := make([][]reg.VecVirtual, m)
		for i := range acc {
			for j := range regs {
				acc[i] = append(acc[i], v.copy(at(o, i*tile*4+j*v.bytes())))
			}
		}
		Label("loop")
		k, w := make([]mask, regs), make([]reg.VecVirtual, regs)
		for j := range regs {
			if v.wide() {
				k[j] = v.visible(key, lo[j].(reg.VecVirtual), hi[j].(reg.VecVirtual))
			} else {
				k[j] = v.visible(key, v.copy(at(lop, j*v.bytes())), v.copy(at(hip, j*v.bytes())))
			}
			w[j] = v.copy(at(p, j*v.bytes()))
		}
		for i := range acc {
			x := v.broadcast(at(val, 4*i))
			for j, a := range acc[i] {
				if v.wide() {
					VFMADD231PS(w[j], x, k[j], a)
				} else {
					y := v.copy(a)
					VFMADD231PS(w[j], x, y)
					VBLENDVPS(k[j], y, a, a)
				}
			}
		}
		VPADDD(int1, key, key)
		ADDQ(vs, val)
		ADDQ(operand.U32(4*tile), p)
		DECQ(n)
		JNZ(operand.LabelRef("loop"))
		for i := range acc {
			for j, a := range acc[i] {
				VMOVUPS(a, at(o, i*tile*4+j*v.bytes()))
			}
		}
		end()
	}
}
