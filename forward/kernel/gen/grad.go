package main

import (
	. "github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// grads writes what a backward needs beside the functions of a forward.
func grads(v isa) {
	products(v)
	text("expScale"+v.suffix, "func(x *float32, m, f float32, n int)", "is x = f * exp(x-m) for n values.")
	c := v.expConsts(false)
	m, f := v.broadcast(argMem("m")), v.broadcast(argMem("f"))
	v.each(arg("n"), v.w, args("x"), func(mem func(i, disp int) operand.Mem, k []mask) {
		x := v.load(mem(0, 0), k[0])
		VSUBPS(m, x, x)
		e := v.exp(c, x, false)
		VMULPS(f, e, e)
		v.store(e, mem(0, 0), k[0])
	})
	end()

	gateGrad(v, "silu", "sign")
	gateGrad(v, "geluTanh", "gelu1", "gelu3", "slope3", "far")
	softmaxGrad(v, false)
	softmaxGrad(v, true)
}

// products writes the functions that only multiply and add, by element and by row.
func products(v isa) {
	text("scale"+v.suffix, "func(x *float32, f float32, n int)", "multiplies n values of x by f.")
	f := v.broadcast(argMem("f"))
	v.each(arg("n"), v.w, args("x"), func(mem func(i, disp int) operand.Mem, k []mask) {
		x := v.load(mem(0, 0), k[0])
		VMULPS(f, x, x)
		v.store(x, mem(0, 0), k[0])
	})
	end()

	text("mulAdd"+v.suffix, "func(dst, x, y *float32, f float32, n int)", "adds x * y * f to dst for n values.")
	f = v.broadcast(argMem("f"))
	v.each(arg("n"), v.w, args("dst", "x", "y"), func(mem func(i, disp int) operand.Mem, k []mask) {
		d, x, y := v.load(mem(0, 0), k[0]), v.load(mem(1, 0), k[0]), v.load(mem(2, 0), k[0])
		VMULPS(y, x, x)
		VMULPS(f, x, x)
		VADDPS(x, d, d)
		v.store(d, mem(0, 0), k[0])
	})
	end()

	text("normGrad"+v.suffix, "func(dst, dy, x, w *float32, r, offset, k float32, n int)", "is dst = dy * (offset + w) * r - x * k for n values.")
	r, offset, k := v.broadcast(argMem("r")), v.broadcast(argMem("offset")), v.broadcast(argMem("k"))
	v.each(arg("n"), v.w, args("dst", "dy", "x", "w"), func(mem func(i, disp int) operand.Mem, m []mask) {
		dy, x, w := v.load(mem(1, 0), m[0]), v.load(mem(2, 0), m[0]), v.load(mem(3, 0), m[0])
		VADDPS(w, offset, w)
		VMULPS(w, dy, dy)
		VMULPS(r, dy, dy)
		VMULPS(k, x, x)
		VSUBPS(x, dy, dy)
		v.store(dy, mem(0, 0), m[0])
	})
	end()

	add := func(high, low reg.Register) { VADDPS(high, low, low) }
	text("dot"+v.suffix, "func(x, y *float32, n int) float32", "is the sum of x * y over n values.")
	acc := v.cleared(tile / v.w)
	v.each(arg("n"), tile, args("x", "y"), func(mem func(i, disp int) operand.Mem, k []mask) {
		for j, a := range acc {
			x, y := v.load(mem(0, j*v.bytes()), k[j]), v.load(mem(1, j*v.bytes()), k[j])
			VMULPS(y, x, x)
			VADDPS(x, a, a)
		}
	})
	VMOVSS(v.tree(acc, add), resultMem())
	end()

	text("normDot"+v.suffix, "func(dy, x, w *float32, offset float32, n int) float32", "is the sum of dy * (offset + w) * x over n values.")
	offset = v.broadcast(argMem("offset"))
	acc = v.cleared(tile / v.w)
	v.each(arg("n"), tile, args("dy", "x", "w"), func(mem func(i, disp int) operand.Mem, k []mask) {
		for j, a := range acc {
			at := j * v.bytes()
			dy, x, w := v.load(mem(0, at), k[j]), v.load(mem(1, at), k[j]), v.load(mem(2, at), k[j])
			VADDPS(w, offset, w)
			VMULPS(w, dy, dy)
			VMULPS(x, dy, dy)
			VADDPS(dy, a, a) // beyond the end that is +0
		}
	})
	VMOVSS(v.tree(acc, add), resultMem())
	end()
}

// gateGrad writes the backward of a gate. With e = exp(y), y being -g or what gelu has in its place, and the logistic
// function s = 1 / (1+e), the derivative of g s is s - g s (1-s) dy/dg. 1-s is e s, which loses nothing where s is near 1; where e is infinite it is 1.
func gateGrad(v isa, name string, consts ...string) {
	text(name+"Grad"+v.suffix, "func(a, dgate, dup, gate, up, da *float32, n int)", "is the backward of a = "+name+"(gate) * up for n values, and a itself.")
	c := v.expConsts(false, consts...)
	one := v.reg(c, "one")
	v.each(arg("n"), v.w, args("a", "dgate", "dup", "gate", "up", "da"), func(mem func(i, disp int) operand.Mem, k []mask) {
		g, y, square := v.load(mem(3, 0), k[0]), v.vec(), v.vec()
		switch {
		case name == "geluTanh":
			VMULPS(g, g, square)
			VMINPS(c["far"], square, square) // the second operand if it is NaN
			VMOVUPS(c["gelu3"], y)
			VFMADD213PS(c["gelu1"], square, y)
			VMULPS(g, y, y)
		case v.wide():
			VPXORD(c["sign"], g, y)
		default:
			VXORPS(c["sign"], g, y)
		}
		e := v.exp(c, y, false)
		s, act, rest := v.vec(), v.vec(), v.vec()
		VADDPS(one, e, rest)
		VDIVPS(rest, one, s)
		VDIVPS(rest, g, act)
		VMULPS(s, e, rest)
		VMINPS(one, rest, rest) // the second operand if it is NaN
		VMULPS(act, rest, rest)
		if name == "geluTanh" {
			slope := v.copy(c["slope3"]) // of y by g
			VFMADD213PS(c["gelu1"], square, slope)
			VFNMADD231PS(slope, rest, s)
		} else {
			VADDPS(rest, s, s)
		}
		u, d := v.load(mem(4, 0), k[0]), v.load(mem(5, 0), k[0])
		du := v.vec()
		VMULPS(d, act, du)
		VMULPS(u, act, act)
		VMULPS(u, d, d)
		VMULPS(s, d, d)
		v.store(act, mem(0, 0), k[0])
		v.store(d, mem(1, 0), k[0])
		v.store(du, mem(2, 0), k[0])
	})
	end()
}

// softmaxGrad writes the backward of a softmax for n rows of 32 lanes, one register of lanes after the other. The statistics
// belong to a lane, or to a row if rows is set.
func softmaxGrad(v isa, rows bool) {
	if rows {
		text("softmaxGradRows"+v.suffix, "func(s, dp *float32, n int, scale float32, query0 int32, lo, hi *int32, mx, inv *float32, stride int, d *float32, dstride int)",
			"is the backward of a softmax for n queries of 32 keys. n is positive.")
	} else {
		text("softmaxGradLanes"+v.suffix, "func(s, dp *float32, n int, scale float32, key0 int32, lo, hi *int32, mx, inv, d *float32)",
			"is the backward of a softmax for 32 queries of n keys. n is positive.")
	}
	c := v.expConsts(false, "int1")
	int1, scale := v.reg(c, "int1"), v.broadcast(argMem("scale"))
	var stride, dstride reg.GPVirtual
	first := "key0"
	if rows {
		stride, dstride, first = arg("stride"), arg("dstride"), "query0"
	}
	off := GP64()
	XORQ(off, off)
	Label("lanes")
	ps, pd, n, lo, hi := arg("s"), arg("dp"), arg("n"), arg("lo"), arg("hi")
	ADDQ(off, ps)
	ADDQ(off, pd)
	from, to, at0 := v.copy(idx(lo, off, 1, 0)), v.copy(idx(hi, off, 1, 0)), v.broadcast(argMem(first))
	pm, pi, pt := arg("mx"), arg("inv"), arg("d")
	var mx, inv, d reg.VecVirtual
	if !rows {
		mx, inv, d = v.copy(idx(pm, off, 1, 0)), v.copy(idx(pi, off, 1, 0)), v.copy(idx(pt, off, 1, 0))
	}
	Label("loop")
	if rows {
		mx, inv, d = v.broadcast(at(pm, 0)), v.broadcast(at(pi, 0)), v.broadcast(at(pt, 0))
	}
	k, x := v.visible(at0, from, to), v.vec()
	VMULPS(at(ps, 0), scale, x)
	VSUBPS(mx, x, x)
	p, y, f := v.exp(c, x, false), v.copy(at(pd, 0)), v.vec()
	VSUBPS(d, y, y)
	if v.wide() {
		VMULPS_Z(inv, p, k, p)
		VMULPS(p, scale, f)
		VMULPS_Z(f, y, k, y)
	} else {
		VMULPS(inv, p, p)
		VANDPS(k, p, p)
		VMULPS(p, scale, f)
		VMULPS(f, y, y)
		VANDPS(k, y, y)
	}
	VMOVUPS(p, at(ps, 0))
	VMOVUPS(y, at(pd, 0))
	VPADDD(int1, at0, at0)
	ADDQ(operand.U32(4*tile), ps)
	ADDQ(operand.U32(4*tile), pd)
	if rows {
		LEAQ(idx(pm, stride, 4, 0), pm)
		LEAQ(idx(pi, stride, 4, 0), pi)
		LEAQ(idx(pt, dstride, 4, 0), pt)
	}
	DECQ(n)
	JNZ(operand.LabelRef("loop"))
	ADDQ(operand.U32(uint32(v.bytes())), off)
	CMPQ(off, operand.U32(4*tile))
	JLT(operand.LabelRef("lanes"))
	end()
}
