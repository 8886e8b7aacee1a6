package main

import (
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
	cols   int    // columns of a gemm microkernel
}

var isas = map[string]isa{
	"avx2":   {suffix: "AVX2", w: 8, rows: 6, cols: 16},
	"avx512": {suffix: "AVX512", w: 16, rows: 12, cols: 32},
}

// wide says whether this is AVX-512.
func (v isa) wide() bool { return v.w == 16 }

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

// zero clears r.
func (v isa) zero(r reg.VecVirtual) {
	if v.wide() {
		VPXORD(r, r, r)
	} else {
		VXORPS(r, r, r)
	}
}

// bytes is the size of a register.
func (v isa) bytes() int { return 4 * v.w }

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

// end leaves the function; the upper halves are cleared because Go code around uses SSE encodings.
func end() {
	VZEROUPPER()
	RET()
}
