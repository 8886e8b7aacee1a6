package main

import (
	"fmt"

	"github.com/mmcloughlin/avo/attr"
	. "github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// gemms writes the microkernels for 1..v.rows rows. The narrow ones also come unrolled for unit stride along k, where
// there are so few multiply-adds per step that a processor that decodes four instructions per cycle would feel the pointer arithmetic.
func gemms(v isa) {
	for m := v.rows; m >= 1; m-- {
		gemm(v, m, false)
		if !v.wide() {
			gemm(v, m, true)
		}
	}
}

// gemm writes one microkernel: the m x v.cols tile of c stays in registers while k runs. Per step of k it loads one row
// of the panel (v.cols values) and, for each row of a, broadcasts one value and multiplies. The rows of a are addressed
// from one pointer per four rows plus 0, 1, 2, 3 strides.
func gemm(v isa, m int, unit bool) {
	name, sig := fmt.Sprintf("gemm%d%s", m, v.suffix), "func(c *float32, ldc int, a *float32, ars, acs int, b *float32, k int, acc bool)"
	what := "any stride acs"
	if unit {
		name, sig = fmt.Sprintf("gemmUnit%d%s", m, v.suffix), "func(c *float32, ldc int, a *float32, ars int, b *float32, k int, acc bool)"
		what = "stride 1"
	}
	text(name, sig, fmt.Sprintf("computes %d rows of %d columns of c over k steps, a having %s along k.", m, v.cols, what))

	c, ldc := arg("c"), arg("ldc")
	SHLQ(operand.Imm(2), ldc)
	a := []reg.GPVirtual{arg("a")}
	s := arg("ars")
	SHLQ(operand.Imm(2), s)
	s3 := GP64()
	if m > 3 {
		LEAQ(idx(s, s, 2, 0), s3)
	}
	for i := 4; i < m; i += 4 {
		p := GP64()
		LEAQ(idx(a[len(a)-1], s, 4, 0), p)
		a = append(a, p)
	}
	acs := reg.GPVirtual(nil)
	if !unit {
		acs = arg("acs")
		SHLQ(operand.Imm(2), acs)
	}
	b, k := arg("b"), arg("k")

	n := v.cols / v.w
	acc := make([][]reg.VecVirtual, m)
	for i := range acc {
		acc[i] = v.vecs(n)
	}

	flag := GP64()
	Load(Param("acc"), flag.As8())
	TESTB(flag.As8(), flag.As8())
	JZ(operand.LabelRef("clear"))
	row := GP64()
	MOVQ(c, row)
	for i := range acc {
		for j, r := range acc[i] {
			VMOVUPS(at(row, j*v.bytes()), r)
		}
		if i < m-1 {
			ADDQ(ldc, row)
		}
	}
	JMP(operand.LabelRef("start"))
	Label("clear")
	for i := range acc {
		for j, r := range acc[i] {
			v.zero(r)
			if !v.wide() {
				continue
			}
			// The tile is written at the end: have its lines ready by then.
			if j == 0 && i == 0 {
				MOVQ(c, row)
			}
			PREFETCHT0(at(row, j*v.bytes()))
		}
		if v.wide() && i < m-1 {
			ADDQ(ldc, row)
		}
	}
	Label("start")

	step := func(t int) {
		w := v.vecs(n)
		for j, r := range w {
			VMOVUPS(at(b, t*tile*4+j*v.bytes()), r)
		}
		for i := range acc {
			p, x := a[i/4], v.vec()
			var mem operand.Mem
			switch i % 4 {
			case 0:
				mem = at(p, 4*t)
			case 1:
				mem = idx(p, s, 1, 4*t)
			case 2:
				mem = idx(p, s, 2, 4*t)
			case 3:
				mem = idx(p, s3, 1, 4*t)
			}
			VBROADCASTSS(mem, x)
			for j, r := range w {
				VFMADD231PS(r, x, acc[i][j])
			}
		}
	}
	advance := func(n int) {
		for _, p := range a {
			if unit {
				ADDQ(operand.Imm(uint64(4*n)), p)
			} else {
				ADDQ(acs, p)
			}
		}
		ADDQ(operand.U32(uint32(n*tile*4)), b)
	}
	if unit {
		const unroll = 4
		SUBQ(operand.Imm(unroll), k)
		JLT(operand.LabelRef("rest"))
		Label("loop4")
		for t := range unroll {
			step(t)
		}
		advance(unroll)
		SUBQ(operand.Imm(unroll), k)
		JGE(operand.LabelRef("loop4"))
		Label("rest")
		ADDQ(operand.Imm(unroll), k)
		JZ(operand.LabelRef("store"))
	}
	Label("loop1")
	step(0)
	advance(1)
	DECQ(k)
	JNZ(operand.LabelRef("loop1"))

	Label("store")
	for i := range acc {
		for j, r := range acc[i] {
			VMOVUPS(r, at(c, j*v.bytes()))
		}
		if i < m-1 {
			ADDQ(ldc, c)
		}
	}
	end()
}

// peak writes a loop of independent multiply-adds, the yardstick of the benchmarks.
func peak(v isa) {
	name := "peak" + v.suffix
	TEXT(name, attr.NOSPLIT, "func(n int)")
	Doc(fmt.Sprintf("%s runs n rounds of 12 independent fused multiply-adds of a register.", name))
	n := arg("n")
	acc, x := v.vecs(12), v.vec()
	v.zero(x)
	for _, r := range acc {
		v.zero(r)
	}
	Label("loop")
	for _, r := range acc {
		VFMADD231PS(x, x, r)
	}
	DECQ(n)
	JNZ(operand.LabelRef("loop"))
	end()
}
