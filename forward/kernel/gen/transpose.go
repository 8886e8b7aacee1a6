package main

import (
	. "github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// All transposes work within the 128-bit parts of a register. To turn w rows into w lanes, part q of register r is loaded from
// row b*q + r, b being the elements of a part; transposing b x b elements in every part then leaves in register i the element i of rows
// 0, 1, 2, ... in order. So the parts are put in place by the loads, and no instruction crosses them.

// insert loads 16 bytes at m into part q of x.
func (v isa) insert(q int, m operand.Mem, x reg.VecVirtual) {
	switch {
	case q == 0:
		VMOVDQU(m, x.AsX())
	case v.wide():
		VINSERTI32X4(operand.Imm(uint64(q)), m, x, x)
	default:
		VINSERTI128(operand.Imm(uint64(q)), m, x, x)
	}
}

// extract stores part q of x to m.
func (v isa) extract(q int, x reg.VecVirtual, m operand.Mem) {
	switch {
	case q == 0:
		VMOVDQU(x.AsX(), m)
	case v.wide():
		VEXTRACTI32X4(operand.Imm(uint64(q)), x, m)
	default:
		VEXTRACTI128(operand.Imm(uint64(q)), x, m)
	}
}

// shuffler interleaves registers, with one more than those that hold data.
type shuffler struct{ spare reg.VecVirtual }

// unpack interleaves a and b, low halves by one instruction and high halves by the other. The results take the spare register and that of a;
// that of b becomes the spare one.
func (s *shuffler) unpack(low, high func(ops ...operand.Op), a, b reg.VecVirtual) (lo, hi reg.VecVirtual) {
	lo = s.spare
	low(b, a, lo)
	high(b, a, a)
	s.spare = b
	return lo, a
}

// transpose4 transposes the 4x4 float32 in each part.
func (v isa) transpose4(x []reg.VecVirtual) []reg.VecVirtual {
	s := shuffler{v.vec()}
	l01, h01 := s.unpack(VUNPCKLPS, VUNPCKHPS, x[0], x[1])
	l23, h23 := s.unpack(VUNPCKLPS, VUNPCKHPS, x[2], x[3])
	y := make([]reg.VecVirtual, 4)
	y[0], y[1] = s.unpack(VUNPCKLPD, VUNPCKHPD, l01, l23)
	y[2], y[3] = s.unpack(VUNPCKLPD, VUNPCKHPD, h01, h23)
	return y
}

// transpose8 transposes the 8x8 16-bit values in each part.
func (v isa) transpose8(x []reg.VecVirtual) []reg.VecVirtual {
	s := shuffler{v.vec()}
	var a [8]reg.VecVirtual // pairs of rows, elements 0-3 and 4-7
	for i := 0; i < 8; i += 2 {
		a[i], a[i+1] = s.unpack(VPUNPCKLWD, VPUNPCKHWD, x[i], x[i+1])
	}
	var b [2][4]reg.VecVirtual // four rows, elements 01, 23, 45, 67
	for h := range 2 {
		for e := range 2 {
			b[h][2*e], b[h][2*e+1] = s.unpack(VPUNPCKLDQ, VPUNPCKHDQ, a[4*h+e], a[4*h+2+e])
		}
	}
	y := make([]reg.VecVirtual, 8)
	for e := range 4 {
		y[2*e], y[2*e+1] = s.unpack(VPUNPCKLQDQ, VPUNPCKHQDQ, b[0][e], b[1][e])
	}
	return y
}

// rowsToLanes writes dst[d*32+l] = src[off[l]+d] for n values of d, size bytes each, n a positive multiple of 16/size. With
// a check it also returns whether all exponent bits are set in any value.
func rowsToLanes(v isa, name string, size int, check bool) {
	sig, doc := "func(dst, src *float32, off *int, n int)", "transposes 32 rows of n float32, a positive multiple of 4, into lanes."
	switch {
	case size == 2:
		sig, doc = "func(dst, src *uint16, off *int, n int, expMask uint32) bool", "transposes 32 rows of n 16-bit values, a positive multiple of 8, into lanes; it tells of NaN and infinity. expMask holds the mask twice."
	case check:
		sig, doc = "func(dst, src *float32, off *int, n int, expMask uint32) bool", "transposes 32 rows of n float32, a positive multiple of 4, into lanes; it tells of NaN and infinity."
	}
	text(name+v.suffix, sig, doc)
	dst, src, off := arg("dst"), arg("src"), arg("off")
	per, parts := 16/size, v.bytes()/16 // elements and number of parts
	lanes := per * parts
	var exps, seen reg.VecVirtual
	if check {
		exps, seen = v.broadcast(argMem("expMask")), v.vec()
		v.zero(seen)
	}
	groups := GP64()
	if lanes < tile {
		MOVQ(operand.U32(uint32(tile/lanes)), groups)
		Label("group")
	}
	out, n := GP64(), GP64()
	MOVQ(dst, out)
	Load(Param("n"), n)
	from := GP64()
	MOVQ(src, from)
	Label("loop")
	x := v.vecs(per)
	for r := range per {
		for q := range parts {
			at0 := GP64()
			MOVQ(at(off, 8*(q*per+r)), at0)
			v.insert(q, idx(from, at0, uint8(size), 0), x[r])
		}
		if check {
			y := v.vec()
			switch {
			case v.wide() && size == 2:
				VPANDD(exps, x[r], y)
				VPMAXUW(y, seen, seen)
			case v.wide():
				VPANDD(exps, x[r], y)
				VPMAXUD(y, seen, seen)
			case size == 2:
				VPAND(exps, x[r], y)
				VPMAXUW(y, seen, seen)
			default:
				VPAND(exps, x[r], y)
				VPMAXUD(y, seen, seen)
			}
		}
	}
	var y []reg.VecVirtual
	if size == 2 {
		y = v.transpose8(x)
	} else {
		y = v.transpose4(x)
	}
	for i, r := range y {
		VMOVUPS(r, at(out, i*tile*size))
	}
	ADDQ(operand.U32(uint32(per*tile*size)), out)
	ADDQ(operand.Imm(16), from)
	SUBQ(operand.Imm(uint64(per)), n)
	JNZ(operand.LabelRef("loop"))
	if lanes < tile {
		ADDQ(operand.Imm(uint64(lanes*size)), dst)
		ADDQ(operand.U32(uint32(lanes*8)), off)
		DECQ(groups)
		JNZ(operand.LabelRef("group"))
	}
	if check {
		found := GP32()
		if v.wide() {
			k := K()
			if size == 2 {
				VPCMPEQW(exps, seen, k)
			} else {
				VPCMPEQD(exps, seen, k)
			}
			KMOVD(k, found)
		} else {
			if size == 2 {
				VPCMPEQW(exps, seen, seen)
			} else {
				VPCMPEQD(exps, seen, seen)
			}
			VPMOVMSKB(seen, found)
		}
		TESTL(found, found)
		SETNE(resultMem())
	}
	end()
}

// lanesToRows writes dst[off[l]+d] = src[d*32+l]*inv[l] + 0 for w lanes and n values of d, n a positive multiple of 4.
func lanesToRows(v isa) {
	text("scatter"+v.suffix, "func(dst *float32, off *int, src, inv *float32, n int)",
		"writes the first lanes of n rows of src, a register full of them, to rows of dst, multiplied by inv; n is a positive multiple of 4. Of lanes with the same off the lowest wins.")
	dst, off, src, inv, n := arg("dst"), arg("off"), arg("src"), arg("inv"), arg("n")
	f, zero := v.copy(at(inv, 0)), v.vec()
	v.zero(zero)
	Label("loop")
	x := v.vecs(4)
	for i, r := range x {
		VMULPS(at(src, i*tile*4), f, r)
		VADDPS(zero, r, r)
	}
	y := v.transpose4(x)
	for q := v.w/4 - 1; q >= 0; q-- {
		for r := 3; r >= 0; r-- {
			to := GP64()
			MOVQ(at(off, 8*(4*q+r)), to)
			v.extract(q, y[r], idx(dst, to, 4, 0))
		}
	}
	ADDQ(operand.U32(4*tile*4), src)
	ADDQ(operand.Imm(16), dst)
	SUBQ(operand.Imm(4), n)
	JNZ(operand.LabelRef("loop"))
	end()
}
