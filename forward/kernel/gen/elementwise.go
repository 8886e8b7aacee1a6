package main

import (
	. "github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// args loads the named arguments.
func args(names ...string) []reg.GPVirtual {
	var r []reg.GPVirtual
	for _, n := range names {
		r = append(r, arg(n))
	}
	return r
}

// elementwise writes the functions that treat each element alone.
func elementwise(v isa) {
	text("add"+v.suffix, "func(dst, x *float32, n int)", "adds n values of x to dst.")
	v.each(arg("n"), v.w, args("dst", "x"), func(mem func(i, disp int) operand.Mem, k []mask) {
		x, d := v.load(mem(1, 0), k[0]), v.load(mem(0, 0), k[0])
		VADDPS(x, d, d)
		v.store(d, mem(0, 0), k[0])
	})
	end()

	text("scaleNorm"+v.suffix, "func(dst, x, w *float32, r, offset float32, n int)", "is dst = x * r * (offset + w) for n values.")
	r, offset := v.broadcast(argMem("r")), v.broadcast(argMem("offset"))
	v.each(arg("n"), v.w, args("dst", "x", "w"), func(mem func(i, disp int) operand.Mem, k []mask) {
		x, w := v.load(mem(1, 0), k[0]), v.load(mem(2, 0), k[0])
		VMULPS(r, x, x)
		VADDPS(w, offset, w)
		VMULPS(w, x, x)
		v.store(x, mem(0, 0), k[0])
	})
	end()

	text("rope"+v.suffix, "func(x, y, cos, sin *float32, n int)", "rotates n pairs (x, y).")
	v.each(arg("n"), v.w, args("x", "y", "cos", "sin"), func(mem func(i, disp int) operand.Mem, k []mask) {
		x, y, cos, sin := v.load(mem(0, 0), k[0]), v.load(mem(1, 0), k[0]), v.load(mem(2, 0), k[0]), v.load(mem(3, 0), k[0])
		xc, ys := v.vec(), v.vec()
		VMULPS(cos, x, xc)
		VMULPS(sin, y, ys)
		VSUBPS(ys, xc, xc)
		VMULPS(cos, y, y)
		VMULPS(sin, x, x)
		VADDPS(x, y, y)
		v.store(xc, mem(0, 0), k[0])
		v.store(y, mem(1, 0), k[0])
	})
	end()

	text("silu"+v.suffix, "func(dst, gate, up *float32, n int)", "is dst = gate / (1 + exp(-gate)) * up for n values.")
	c := v.expConsts(false, "sign")
	v.each(arg("n"), v.w, args("dst", "gate", "up"), func(mem func(i, disp int) operand.Mem, k []mask) {
		g, x := v.load(mem(1, 0), k[0]), v.vec()
		if v.wide() {
			VPXORD(c["sign"], g, x)
		} else {
			VXORPS(c["sign"], g, x)
		}
		v.gate(c, g, x, mem, k[0])
	})
	end()

	text("geluTanh"+v.suffix, "func(dst, gate, up *float32, n int)", "is dst = gelu(gate) * up for n values, in the tanh form: 0.5 x (1 + tanh(y)) = x / (1 + exp(-2y)).")
	c = v.expConsts(false, "gelu1", "gelu3")
	v.each(arg("n"), v.w, args("dst", "gate", "up"), func(mem func(i, disp int) operand.Mem, k []mask) {
		g, x := v.load(mem(1, 0), k[0]), v.vec()
		VMULPS(g, g, x)
		y := v.copy(c["gelu3"])
		VFMADD213PS(c["gelu1"], x, y)
		VMULPS(g, y, y)
		v.gate(c, g, y, mem, k[0])
	})
	end()

	text("scaleLanes"+v.suffix, "func(o *float32, n int, corr *float32)", "multiplies n rows of 32 lanes by corr.")
	o, n, p := arg("o"), arg("n"), arg("corr")
	f := v.vecs(tile / v.w)
	for j, x := range f {
		VMOVUPS(at(p, j*v.bytes()), x)
	}
	Label("loop")
	for j, x := range f {
		y := v.vec()
		VMULPS(at(o, j*v.bytes()), x, y)
		VMOVUPS(y, at(o, j*v.bytes()))
	}
	ADDQ(operand.U32(4*tile), o)
	DECQ(n)
	JNZ(operand.LabelRef("loop"))
	end()
}

// gate stores g / (1 + exp(x)) * u.
func (v isa) gate(c consts, g, x reg.VecVirtual, mem func(i, disp int) operand.Mem, k mask) {
	e, u := v.exp(c, x, false), v.load(mem(2, 0), k)
	VADDPS(c["one"], e, e)
	VDIVPS(e, g, g)
	VMULPS(u, g, g)
	v.store(g, mem(0, 0), k)
}
