package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/operand"
)

// widen writes the conversions of 16-bit floating point to float32, for multiples of v.w.
func widen(v isa) {
	for _, kind := range []string{"BF16", "F16"} {
		text("widen"+kind+v.suffix, "func(dst *float32, src *uint16, n int)", fmt.Sprintf("widens n values; n is a positive multiple of %d.", v.w))
		dst, src, n := arg("dst"), arg("src"), arg("n")
		LEAQ(idx(src, n, 2, 0), src)
		LEAQ(idx(dst, n, 4, 0), dst)
		NEGQ(n)
		Label("loop")
		x := v.vec()
		if kind == "BF16" {
			VPMOVZXWD(idx(src, n, 2, 0), x)
			VPSLLD(operand.Imm(16), x, x)
		} else {
			VCVTPH2PS(idx(src, n, 2, 0), x)
		}
		VMOVUPS(x, idx(dst, n, 4, 0))
		ADDQ(operand.Imm(uint64(v.w)), n)
		JNZ(operand.LabelRef("loop"))
		end()
	}
}
