//go:build amd64 && !noasm

package kernel

import (
	"math"
	"unsafe"

	"golang.org/x/sys/cpu"
)

//go:generate go run -C gen . -isa avx2 -pkg kernel -out ../prims_avx2_amd64.s -stubs ../prims_avx2_amd64.go
//go:generate go run -C gen . -isa avx512 -pkg kernel -out ../prims_avx512_amd64.s -stubs ../prims_avx512_amd64.go

// hasAVX2 says whether processor and operating system support what the avx2 table uses.
func hasAVX2() bool {
	return cpu.X86.HasAVX2 && cpu.X86.HasFMA && cpu.X86.HasF16C
}

// hasAVX512 says whether processor and operating system support what the avx512 table uses.
func hasAVX512() bool {
	return hasAVX2() && cpu.X86.HasBMI2 &&
		cpu.X86.HasAVX512F && cpu.X86.HasAVX512BW && cpu.X86.HasAVX512DQ && cpu.X86.HasAVX512VL
}

// vectorised lists the tables that this machine can run, best last.
func vectorised() []*prims {
	var t []*prims
	if hasAVX2() {
		t = append(t, &avx2)
	}
	if hasAVX512() {
		t = append(t, &avx512)
	}
	return t
}

// vectorisedNames are the tables of this build, whether or not the machine can run them.
var vectorisedNames = []string{"avx2", "avx512"}

var (
	avx2   = extension{}.table("avx2")
	avx512 = extension{wide: true}.table("avx512")
)

// extension is a vector extension. Its methods slice their arguments to the lengths that the assembly will
// touch, so that a mistake of a caller is a panic here and never a stray access there, and treat the edges that the assembly does not.
type extension struct {
	wide bool // AVX-512
}

func (e extension) table(name string) prims {
	return prims{
		name:         name,
		gemm:         e.gemm,
		widenBF16:    e.widenBF16,
		widenF16:     e.widenF16,
		sumSquares:   e.sumSquares,
		scaleNorm:    e.scaleNorm,
		rope:         e.rope,
		silu:         e.silu,
		geluTanh:     e.geluTanh,
		add:          e.add,
		max:          e.max,
		expSum:       e.expSum,
		softmaxBlock: e.softmaxBlock,
		scaleLanes:   e.scaleLanes,
		accumMasked:  e.accumMasked,
		gatherLanes:  e.gatherLanes,
		scatterLanes: e.scatterLanes,
		packPanel16:  e.packPanel16,
		packPanel32:  e.packPanel32,

		dot:              e.dot,
		scale:            e.scale,
		mulAdd:           e.mulAdd,
		expScale:         e.expScale,
		normDot:          e.normDot,
		normGrad:         e.normGrad,
		siluGrad:         e.siluGrad,
		geluTanhGrad:     e.geluTanhGrad,
		softmaxGradLanes: e.softmaxGradLanes,
		softmaxGradRows:  e.softmaxGradRows,
	}
}

// gemm cuts the rows into as few microkernel calls as possible, of nearly equal size: a call of few rows cannot hide the
// latency of the additions, so 13 rows run as 7 and 6 rather than as 12 and 1.
func (e extension) gemm(c []float32, ldc int, a []float32, ars, acs int, b []float32, m, k int, acc bool) {
	if m < 1 || k < 1 || ldc|ars|acs < 0 {
		panic("kernel: gemm: bad size or stride")
	}
	_ = c[(m-1)*ldc+Width-1]
	_ = a[(m-1)*ars+(k-1)*acs]
	_ = b[k*Width-1]
	most := uint(6)
	if e.wide {
		most = 12
	}
	for i := 0; i < m; {
		n := uint(m - i)
		if n > most {
			calls := (n + most - 1) / most
			n = (n + calls - 1) / calls
		}
		pc, pa := &c[i*ldc], &a[i*ars]
		if e.wide {
			gemmAVX512(int(n), pc, ldc, pa, ars, acs, &b[0], k, acc)
		} else {
			const half = Width / 2
			gemmAVX2(int(n), pc, ldc, pa, ars, acs, &b[0], k, acc)
			gemmAVX2(int(n), &c[i*ldc+half], ldc, pa, ars, acs, &b[half], k, acc)
		}
		i += int(n)
	}
}

func gemmAVX512(m int, c *float32, ldc int, a *float32, ars, acs int, b *float32, k int, acc bool) {
	switch m {
	case 1:
		gemm1AVX512(c, ldc, a, ars, acs, b, k, acc)
	case 2:
		gemm2AVX512(c, ldc, a, ars, acs, b, k, acc)
	case 3:
		gemm3AVX512(c, ldc, a, ars, acs, b, k, acc)
	case 4:
		gemm4AVX512(c, ldc, a, ars, acs, b, k, acc)
	case 5:
		gemm5AVX512(c, ldc, a, ars, acs, b, k, acc)
	case 6:
		gemm6AVX512(c, ldc, a, ars, acs, b, k, acc)
	case 7:
		gemm7AVX512(c, ldc, a, ars, acs, b, k, acc)
	case 8:
		gemm8AVX512(c, ldc, a, ars, acs, b, k, acc)
	case 9:
		gemm9AVX512(c, ldc, a, ars, acs, b, k, acc)
	case 10:
		gemm10AVX512(c, ldc, a, ars, acs, b, k, acc)
	case 11:
		gemm11AVX512(c, ldc, a, ars, acs, b, k, acc)
	default:
		gemm12AVX512(c, ldc, a, ars, acs, b, k, acc)
	}
}

func gemmAVX2(m int, c *float32, ldc int, a *float32, ars, acs int, b *float32, k int, acc bool) {
	if acs == 1 {
		gemmUnitAVX2(m, c, ldc, a, ars, b, k, acc)
		return
	}
	switch m {
	case 1:
		gemm1AVX2(c, ldc, a, ars, acs, b, k, acc)
	case 2:
		gemm2AVX2(c, ldc, a, ars, acs, b, k, acc)
	case 3:
		gemm3AVX2(c, ldc, a, ars, acs, b, k, acc)
	case 4:
		gemm4AVX2(c, ldc, a, ars, acs, b, k, acc)
	case 5:
		gemm5AVX2(c, ldc, a, ars, acs, b, k, acc)
	default:
		gemm6AVX2(c, ldc, a, ars, acs, b, k, acc)
	}
}

func gemmUnitAVX2(m int, c *float32, ldc int, a *float32, ars int, b *float32, k int, acc bool) {
	switch m {
	case 1:
		gemmUnit1AVX2(c, ldc, a, ars, b, k, acc)
	case 2:
		gemmUnit2AVX2(c, ldc, a, ars, b, k, acc)
	case 3:
		gemmUnit3AVX2(c, ldc, a, ars, b, k, acc)
	case 4:
		gemmUnit4AVX2(c, ldc, a, ars, b, k, acc)
	case 5:
		gemmUnit5AVX2(c, ldc, a, ars, b, k, acc)
	default:
		gemmUnit6AVX2(c, ldc, a, ars, b, k, acc)
	}
}

// The conversions are exact, so the last few values may take the generic way.

func (e extension) widenBF16(dst []float32, src []uint16) {
	src = src[:len(dst)]
	n := len(dst) &^ 15
	if n > 0 {
		if e.wide {
			widenBF16AVX512(&dst[0], &src[0], n)
		} else {
			widenBF16AVX2(&dst[0], &src[0], n)
		}
	}
	widenBF16Generic(dst[n:], src[n:])
}

func (e extension) widenF16(dst []float32, src []uint16) {
	src = src[:len(dst)]
	n := len(dst) &^ 15
	if n > 0 {
		if e.wide {
			widenF16AVX512(&dst[0], &src[0], n)
		} else {
			widenF16AVX2(&dst[0], &src[0], n)
		}
	}
	widenF16Generic(dst[n:], src[n:])
}

func (e extension) sumSquares(x []float32) float32 {
	switch {
	case len(x) == 0:
		return 0
	case e.wide:
		return sumSquaresAVX512(&x[0], len(x))
	}
	return sumSquaresAVX2(&x[0], len(x))
}

func (e extension) scaleNorm(dst, x, w []float32, r, offset float32) {
	n := len(dst)
	x, w = x[:n], w[:n]
	switch {
	case n == 0:
	case e.wide:
		scaleNormAVX512(&dst[0], &x[0], &w[0], r, offset, n)
	default:
		scaleNormAVX2(&dst[0], &x[0], &w[0], r, offset, n)
	}
}

func (e extension) rope(x, cos, sin []float32) {
	h := len(cos)
	x, sin = x[:2*h], sin[:h]
	switch {
	case h == 0:
	case e.wide:
		ropeAVX512(&x[0], &x[h], &cos[0], &sin[0], h)
	default:
		ropeAVX2(&x[0], &x[h], &cos[0], &sin[0], h)
	}
}

func (e extension) silu(dst, g, u []float32) {
	n := len(dst)
	g, u = g[:n], u[:n]
	switch {
	case n == 0:
	case e.wide:
		siluAVX512(&dst[0], &g[0], &u[0], n)
	default:
		siluAVX2(&dst[0], &g[0], &u[0], n)
	}
}

func (e extension) geluTanh(dst, g, u []float32) {
	n := len(dst)
	g, u = g[:n], u[:n]
	switch {
	case n == 0:
	case e.wide:
		geluTanhAVX512(&dst[0], &g[0], &u[0], n)
	default:
		geluTanhAVX2(&dst[0], &g[0], &u[0], n)
	}
}

func (e extension) add(dst, x []float32) {
	n := len(dst)
	x = x[:n]
	switch {
	case n == 0:
	case e.wide:
		addAVX512(&dst[0], &x[0], n)
	default:
		addAVX2(&dst[0], &x[0], n)
	}
}

func (e extension) max(x []float32) float32 {
	if e.wide {
		return maxAVX512(&x[0], len(x))
	}
	return maxAVX2(&x[0], len(x))
}

func (e extension) expSum(x []float32, m float32) float64 {
	switch {
	case len(x) == 0:
		return 0
	case e.wide:
		return expSumAVX512(&x[0], len(x), m)
	}
	return expSumAVX2(&x[0], len(x), m)
}

func (e extension) softmaxBlock(s []float32, n int, scale float32, key0 int32, lo, hi *[Width]int32, mx, sum, corr *[Width]float32) {
	s = s[:max(n, 0)*Width]
	if e.wide {
		softmaxBlockAVX512(unsafe.SliceData(s), len(s)/Width, scale, key0, &lo[0], &hi[0], &mx[0], &sum[0], &corr[0])
	} else {
		softmaxBlockAVX2(unsafe.SliceData(s), len(s)/Width, scale, key0, &lo[0], &hi[0], &mx[0], &sum[0], &corr[0])
	}
}

func (e extension) scaleLanes(o []float32, n int, corr *[Width]float32) {
	if n < 1 {
		return
	}
	o = o[:n*Width]
	if e.wide {
		scaleLanesAVX512(&o[0], n, &corr[0])
	} else {
		scaleLanesAVX2(&o[0], n, &corr[0])
	}
}

// accumMasked finds the keys that every lane sees: those are a plain matrix product, in which each value is the same
// chain of fused multiply-adds. The keys before and after them, if any, are seen by some lanes only and run with masks.
func (e extension) accumMasked(o []float32, hd int, v []float32, vs int, p []float32, n int, key0 int32, lo, hi *[Width]int32) {
	if hd < 1 || n < 1 {
		return
	}
	if vs < 0 {
		panic("kernel: accumMasked: bad stride")
	}
	_ = o[hd*Width-1]
	_ = v[(n-1)*vs+hd-1]
	_ = p[n*Width-1]

	loMin, loMax, hiMin, hiMax := lo[0], lo[0], hi[0], hi[0]
	for l := 1; l < Width; l++ {
		loMin, loMax = min(loMin, lo[l]), max(loMax, lo[l])
		hiMin, hiMax = min(hiMin, hi[l]), max(hiMax, hi[l])
	}
	local := func(key int32) int { return min(max(int(key)-int(key0), 0), n) }
	begin, all, some, stop := local(loMin), local(loMax), local(hiMin), local(hiMax)
	if all >= some { // no key is seen by all
		all, some = stop, stop
	}
	e.accumSome(o, hd, v, vs, p, begin, all, key0, lo, hi)
	if all < some {
		e.gemm(o, Width, v[all*vs:], 1, vs, p[all*Width:], hd, some-all, true)
	}
	e.accumSome(o, hd, v, vs, p, some, stop, key0, lo, hi)
}

// accumSome is accumMasked for the keys from <= j < to.
func (e extension) accumSome(o []float32, hd int, v []float32, vs int, p []float32, from, to int, key0 int32, lo, hi *[Width]int32) {
	n := to - from
	if n < 1 {
		return
	}
	key0 += int32(from)
	v, p = v[from*vs:], p[from*Width:]
	for d := 0; d < hd; {
		pv, left := &v[d], hd-d
		if e.wide {
			po, pp, pl, ph := &o[d*Width], &p[0], &lo[0], &hi[0]
			switch {
			case left >= 8:
				accum8AVX512(po, pv, vs, pp, n, key0, pl, ph)
				d += 8
			case left >= 4:
				accum4AVX512(po, pv, vs, pp, n, key0, pl, ph)
				d += 4
			case left >= 2:
				accum2AVX512(po, pv, vs, pp, n, key0, pl, ph)
				d += 2
			default:
				accum1AVX512(po, pv, vs, pp, n, key0, pl, ph)
				d++
			}
			continue
		}
		rows := 0
		for l := 0; l < Width; l += Width / 2 {
			po, pp, pl, ph := &o[d*Width+l], &p[l], &lo[l], &hi[l]
			switch {
			case left >= 4:
				accum4AVX2(po, pv, vs, pp, n, key0, pl, ph)
				rows = 4
			case left >= 2:
				accum2AVX2(po, pv, vs, pp, n, key0, pl, ph)
				rows = 2
			default:
				accum1AVX2(po, pv, vs, pp, n, key0, pl, ph)
				rows = 1
			}
		}
		d += rows
	}
}

func (e extension) gatherLanes(dst, src []float32, off *[Width]int, n int) {
	if n < 1 {
		return
	}
	dst = dst[:n*Width]
	for _, at := range off {
		_ = src[at : at+n]
	}
	whole := n &^ 3
	if whole > 0 {
		if e.wide {
			gatherAVX512(&dst[0], &src[0], &off[0], whole)
		} else {
			gatherAVX2(&dst[0], &src[0], &off[0], whole)
		}
	}
	for d := whole; d < n; d++ {
		for l, at := range off {
			dst[d*Width+l] = src[at+d]
		}
	}
}

func (e extension) scatterLanes(dst []float32, off *[Width]int, lanes int, src []float32, inv *[Width]float32, n int) {
	if n < 1 || lanes < 1 {
		return
	}
	src = src[:n*Width]
	for _, at := range off[:lanes] {
		_ = dst[at : at+n]
	}
	to := off
	if lanes < Width {
		// A group of lanes is written whole, the first lane last: send those that do not exist where the first will overwrite them.
		group := 8
		if e.wide {
			group = 16
		}
		own := *off
		for l := lanes; l < Width; l++ {
			own[l] = own[min(l&^(group-1), lanes-1)]
		}
		to = &own
	}
	whole := n &^ 3
	if whole > 0 {
		if e.wide {
			for l := 0; l < lanes; l += 16 {
				scatterAVX512(&dst[0], &to[l], &src[l], &inv[l], whole)
			}
		} else {
			for l := 0; l < lanes; l += 8 {
				scatterAVX2(&dst[0], &to[l], &src[l], &inv[l], whole)
			}
		}
	}
	for d := whole; d < n; d++ {
		for l := range lanes {
			dst[off[l]+d] = float32(src[d*Width+l]*inv[l]) + 0
		}
	}
}

// rowOffsets are the starts of rows of k values; rows that do not exist take the place of the first.
func rowOffsets(rows, k int) (off [Width]int) {
	for j := range rows {
		off[j] = j * k
	}
	return off
}

func (e extension) packPanel16(dst, src []uint16, rows, k int, expMask uint16) bool {
	whole := k &^ 7
	if rows < 1 || whole < 1 {
		return packPanel16Generic(dst, src, rows, k, expMask)
	}
	dst, src = dst[:k*Width], src[:rows*k]
	off, bad := rowOffsets(rows, k), false
	if e.wide {
		bad = pack16AVX512(&dst[0], &src[0], &off[0], whole, uint32(expMask)<<16|uint32(expMask))
	} else {
		bad = pack16AVX2(&dst[0], &src[0], &off[0], whole, uint32(expMask)<<16|uint32(expMask))
	}
	rest := packRest(dst, src, rows, k, whole, func(x uint16) bool { return x&expMask == expMask })
	return bad || rest
}

func (e extension) packPanel32(dst, src []float32, rows, k int) bool {
	const expMask = 0x7f800000
	whole := k &^ 3
	if rows < 1 || whole < 1 {
		return packPanel32Generic(dst, src, rows, k)
	}
	dst, src = dst[:k*Width], src[:rows*k]
	off, bad := rowOffsets(rows, k), false
	if e.wide {
		bad = pack32AVX512(&dst[0], &src[0], &off[0], whole, expMask)
	} else {
		bad = pack32AVX2(&dst[0], &src[0], &off[0], whole, expMask)
	}
	rest := packRest(dst, src, rows, k, whole, func(x float32) bool { return math.Float32bits(x)&expMask == expMask })
	return bad || rest
}

// packRest packs the values from whole on of each row, tells whether one is odd, and clears the columns of rows that do not exist.
func packRest[T uint16 | float32](dst, src []T, rows, k, whole int, odd func(T) bool) (found bool) {
	for i := whole; i < k; i++ {
		for j := range rows {
			x := src[j*k+i]
			found = found || odd(x)
			dst[i*Width+j] = x
		}
	}
	if rows < Width {
		for i := range k {
			clear(dst[i*Width+rows : (i+1)*Width])
		}
	}
	return found
}
