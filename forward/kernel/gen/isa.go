package main

import (
	"math"

	"github.com/mmcloughlin/avo/attr"
	. "github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// tile is the width of a weight panel and of an attention tile, in elements.
const tile = 32

// isa is one vector extension.
type isa struct {
	suffix string // of function names
	w      int    // float32 lanes of a register
	rows   int    // most rows of a gemm microkernel
	masked int    // most rows of a masked one
	cols   int    // columns of both
}

var isas = map[string]isa{
	"avx2":   {suffix: "AVX2", w: 8, rows: 6, masked: 4, cols: 16},
	"avx512": {suffix: "AVX512", w: 16, rows: 12, masked: 8, cols: 32},
}

// Predicates of VCMPPS, and of VPCMPD where they exist there.
const (
	cmpEQ    = operand.U8(0x00) // equal
	cmpLT    = operand.U8(0x01) // less
	cmpUnord = operand.U8(0x03) // either is NaN
	cmpNLT   = operand.U8(0x05) // not less: greater, equal or NaN
	cmpNLE   = operand.U8(0x06) // greater or NaN; for integers greater
)

// wide says whether this is AVX-512.
func (v isa) wide() bool { return v.w == 16 }

// bytes is the size of a register.
func (v isa) bytes() int { return 4 * v.w }

// vec is a new vector register.
func (v isa) vec() reg.VecVirtual {
	if v.wide() {
		return ZMM()
	}
	return YMM()
}

// vecs are n new vector registers.
func (v isa) vecs(n int) []reg.VecVirtual {
	r := make([]reg.VecVirtual, n)
	for i := range r {
		r[i] = v.vec()
	}
	return r
}

// copy is a new register with the value of x.
func (v isa) copy(x operand.Op) reg.VecVirtual {
	r := v.vec()
	VMOVUPS(x, r)
	return r
}

// zero clears r.
func (v isa) zero(r reg.VecVirtual) {
	if v.wide() {
		VPXORD(r, r, r)
	} else {
		VXORPS(r, r, r)
	}
}

// at is the memory operand base + disp.
func at(base reg.Register, disp int) operand.Mem { return operand.Mem{Base: base, Disp: disp} }

// idx is the memory operand base + index*scale + disp.
func idx(base, index reg.Register, scale uint8, disp int) operand.Mem {
	return operand.Mem{Base: base, Index: index, Scale: scale, Disp: disp}
}

// arg loads the named argument into a new general register.
func arg(name string) reg.GPVirtual {
	r := GP64()
	Load(Param(name), r)
	return r
}

// argMem is the named argument where it lies.
func argMem(name string) operand.Mem {
	b, err := Param(name).Resolve()
	if err != nil {
		panic(err)
	}
	return b.Addr
}

// resultMem is where the only result goes.
func resultMem() operand.Mem {
	b, err := ReturnIndex(0).Resolve()
	if err != nil {
		panic(err)
	}
	return b.Addr
}

// broadcast fills a new register with the 32 bits at m.
func (v isa) broadcast(m operand.Mem) reg.VecVirtual {
	r := v.vec()
	VBROADCASTSS(m, r)
	return r
}

// text starts a function that does not let its arguments escape.
func text(name, signature, doc string) {
	TEXT(name, attr.NOSPLIT, signature)
	Doc(name + " " + doc)
	Pragma("noescape")
}

// end leaves the function; the upper halves are cleared because Go code around uses SSE encodings.
func end() {
	VZEROUPPER()
	RET()
}

// Constants. AVX2 has no register to spare for them and reads whole vectors from memory; AVX-512 broadcasts them into
// registers once per call.

var (
	constMem  operand.Mem
	constAt   = map[string]int{}
	maskTable operand.Mem
)

// constants writes the tables that the functions share.
func constants(v isa) {
	f := func(x float32) uint32 { return math.Float32bits(x) }
	list := []struct {
		name string
		bits uint32
	}{
		{"magic", f(12582912)}, // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
		{"log2e", f(1.44269504)},
		{"ln2hi", 0x3f317218}, // ln 2 rounded, and what is left of it
		{"ln2lo", 0xb102e308},
		{"c2", 0x3efffffe}, {"c3", 0x3e2aaa49}, {"c4", 0x3d2aac79}, {"c5", 0x3c091d10}, {"c6", 0x3ab511e6},
		{"one", f(1)},
		{"lowest", 0xc2aeac4f},  // least x whose exp is a normal number
		{"highest", 0x42b17217}, // largest x whose exp is finite
		{"clamp", f(88.8)},      // exp of this is +Inf, and its exponent still fits the arithmetic
		{"inf", 0x7f800000},
		{"ninf", 0xff800000},
		{"sign", 0x80000000},
		{"gelu1", f(-1.5957691216057308)},   // -2 sqrt(2/pi)
		{"gelu3", f(-0.071354816272600249)}, // that times 0.044715
		{"slope3", f(-0.21406444881780074)}, // 3 times that, for the derivative
		{"far", f(1e4)},                     // the square of a gate from which on gelu(x) is x or 0
		{"int1", 1},
	}
	copies := 1
	if !v.wide() {
		copies = v.w
	}
	constMem = GLOBL("consts"+v.suffix, attr.RODATA|attr.NOPTR)
	for i, c := range list {
		constAt[c.name] = i * copies * 4
		for j := range copies {
			DATA((i*copies+j)*4, operand.U32(c.bits))
		}
	}
	if v.wide() {
		return
	}
	maskTable = GLOBL("masks"+v.suffix, attr.RODATA|attr.NOPTR)
	for i := range 2 * tile {
		x := uint32(0)
		if i < tile {
			x = 0xffffffff
		}
		DATA(4*i, operand.U32(x))
	}
}

// consts are the constants that a function uses, each a register or memory.
type consts map[string]operand.Op

// consts makes the named constants ready.
func (v isa) consts(names ...string) consts {
	c := consts{}
	for _, n := range names {
		m := constMem.Offset(constAt[n])
		if v.wide() {
			c[n] = v.broadcast(m)
		} else {
			c[n] = m
		}
	}
	return c
}

// reg moves a constant into a register, if it is not in one.
func (v isa) reg(c consts, name string) reg.VecVirtual {
	if r, ok := c[name].(reg.VecVirtual); ok {
		return r
	}
	r := v.copy(c[name])
	c[name] = r
	return r
}

// mask selects leading lanes: an opmask register, or a vector of ones and zeros. The nil mask selects all.
type mask reg.Register

// masks are n masks for as many vectors in a row, of which the first rem elements count. rem < 32.
func (v isa) masks(rem reg.GPVirtual, n int) []mask {
	r := make([]mask, n)
	if v.wide() {
		bits := GP64()
		MOVQ(operand.I32(-1), bits)
		SHLXQ(rem, bits, bits)
		NOTQ(bits)
		for i := range r {
			k := K()
			KMOVW(bits.As32(), k)
			r[i] = k
			if i < n-1 {
				SHRQ(operand.Imm(uint64(v.w)), bits)
			}
		}
		return r
	}
	p := GP64()
	LEAQ(maskTable.Offset(4*tile), p)
	back := GP64()
	MOVQ(rem, back)
	NEGQ(back)
	for i := range r {
		x := v.vec()
		VMOVUPS(idx(p, back, 4, i*v.bytes()), x)
		r[i] = x
	}
	return r
}

// load is a new register with the lanes of m that k selects, 0 elsewhere. Other lanes are not read.
func (v isa) load(m operand.Mem, k mask) reg.VecVirtual {
	x := v.vec()
	switch {
	case k == nil:
		VMOVUPS(m, x)
	case v.wide():
		VMOVUPS_Z(m, k, x)
	default:
		VMASKMOVPS(m, k, x)
	}
	return x
}

// store writes those lanes of x that k selects.
func (v isa) store(x reg.VecVirtual, m operand.Mem, k mask) {
	switch {
	case k == nil:
		VMOVUPS(x, m)
	case v.wide():
		VMOVUPS(x, k, m)
	default:
		VMASKMOVPS(x, k, m)
	}
}

// each runs body over n elements of the arrays at the given bases, per elements at a time, and once more for the rest
// with masks. body addresses element lane*4 bytes into array i as mem(i, lane*4). n and the bases are overwritten.
func (v isa) each(n reg.GPVirtual, per int, bases []reg.GPVirtual, body func(mem func(i, disp int) operand.Mem, k []mask)) {
	i := GP64()
	MOVQ(n, i)
	ANDQ(operand.I32(int32(-per)), i)
	for _, b := range bases {
		LEAQ(idx(b, i, 4, 0), b)
	}
	ANDQ(operand.I32(int32(per-1)), n)
	mem := func(j, disp int) operand.Mem { return idx(bases[j], i, 4, disp) }
	NEGQ(i)
	JZ(operand.LabelRef("rest"))
	Label("loop")
	body(mem, make([]mask, per/v.w))
	ADDQ(operand.Imm(uint64(per)), i)
	JNZ(operand.LabelRef("loop"))
	Label("rest")
	TESTQ(n, n)
	JZ(operand.LabelRef("done"))
	body(mem, v.masks(n, per/v.w))
	Label("done")
}
