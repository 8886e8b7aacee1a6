//go:build amd64 && !noasm

package kernel

import (
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

var avx2 = prims{
	name:         "avx2",
	gemm:         gemmAVX2,
	widenBF16:    widenBF16WithAVX2,
	widenF16:     widenF16WithAVX2,
	sumSquares:   sumSquaresGeneric,
	scaleNorm:    scaleNormGeneric,
	rope:         ropeGeneric,
	silu:         siluGeneric,
	geluTanh:     geluTanhGeneric,
	add:          addGeneric,
	max:          maxGeneric,
	expSum:       expSumGeneric,
	softmaxBlock: softmaxBlockGeneric,
	scaleLanes:   scaleLanesGeneric,
	accumMasked:  accumMaskedGeneric,
	gatherLanes:  gatherLanesGeneric,
	scatterLanes: scatterLanesGeneric,
	packPanel16:  packPanel16Generic,
	packPanel32:  packPanel32Generic,
}

var avx512 = prims{
	name:         "avx512",
	gemm:         gemmAVX512,
	widenBF16:    widenBF16WithAVX512,
	widenF16:     widenF16WithAVX512,
	sumSquares:   sumSquaresGeneric,
	scaleNorm:    scaleNormGeneric,
	rope:         ropeGeneric,
	silu:         siluGeneric,
	geluTanh:     geluTanhGeneric,
	add:          addGeneric,
	max:          maxGeneric,
	expSum:       expSumGeneric,
	softmaxBlock: softmaxBlockGeneric,
	scaleLanes:   scaleLanesGeneric,
	accumMasked:  accumMaskedGeneric,
	gatherLanes:  gatherLanesGeneric,
	scatterLanes: scatterLanesGeneric,
	packPanel16:  packPanel16Generic,
	packPanel32:  packPanel32Generic,
}

// gemmCheck panics if a product of these sizes would leave its slices.
func gemmCheck(c []float32, ldc int, a []float32, ars, acs int, b []float32, m, k int) {
	if m < 1 || k < 1 || ldc|ars|acs < 0 {
		panic("kernel: gemm: bad size or stride")
	}
	_ = c[(m-1)*ldc+Width-1]
	_ = a[(m-1)*ars+(k-1)*acs]
	_ = b[k*Width-1]
}

// gemmAVX512 cuts the rows into as few microkernel calls as possible, of nearly equal size: a call of few rows cannot
// hide the latency of the additions, so 13 rows run as 7 and 6 rather than as 12 and 1.
func gemmAVX512(c []float32, ldc int, a []float32, ars, acs int, b []float32, m, k int, acc bool) {
	gemmCheck(c, ldc, a, ars, acs, b, m, k)
	for i := 0; i < m; {
		left := m - i
		n := left
		if left > 12 {
			calls := uint(left+11) / 12
			n = int((uint(left) + calls - 1) / calls)
		}
		pc, pa, pb := &c[i*ldc], &a[i*ars], &b[0]
		if acs == 1 {
			switch n {
			case 1:
				gemm1x1AVX512(pc, ldc, pa, ars, pb, k, acc)
			case 2:
				gemm2x1AVX512(pc, ldc, pa, ars, pb, k, acc)
			case 3:
				gemm3x1AVX512(pc, ldc, pa, ars, pb, k, acc)
			case 4:
				gemm4x1AVX512(pc, ldc, pa, ars, pb, k, acc)
			case 5:
				gemm5x1AVX512(pc, ldc, pa, ars, pb, k, acc)
			case 6:
				gemm6x1AVX512(pc, ldc, pa, ars, pb, k, acc)
			case 7:
				gemm7x1AVX512(pc, ldc, pa, ars, pb, k, acc)
			case 8:
				gemm8x1AVX512(pc, ldc, pa, ars, pb, k, acc)
			case 9:
				gemm9x1AVX512(pc, ldc, pa, ars, pb, k, acc)
			case 10:
				gemm10x1AVX512(pc, ldc, pa, ars, pb, k, acc)
			case 11:
				gemm11x1AVX512(pc, ldc, pa, ars, pb, k, acc)
			default:
				gemm12x1AVX512(pc, ldc, pa, ars, pb, k, acc)
			}
		} else {
			switch n {
			case 1:
				gemm1xKAVX512(pc, ldc, pa, ars, acs, pb, k, acc)
			case 2:
				gemm2xKAVX512(pc, ldc, pa, ars, acs, pb, k, acc)
			case 3:
				gemm3xKAVX512(pc, ldc, pa, ars, acs, pb, k, acc)
			case 4:
				gemm4xKAVX512(pc, ldc, pa, ars, acs, pb, k, acc)
			case 5:
				gemm5xKAVX512(pc, ldc, pa, ars, acs, pb, k, acc)
			case 6:
				gemm6xKAVX512(pc, ldc, pa, ars, acs, pb, k, acc)
			case 7:
				gemm7xKAVX512(pc, ldc, pa, ars, acs, pb, k, acc)
			case 8:
				gemm8xKAVX512(pc, ldc, pa, ars, acs, pb, k, acc)
			case 9:
				gemm9xKAVX512(pc, ldc, pa, ars, acs, pb, k, acc)
			case 10:
				gemm10xKAVX512(pc, ldc, pa, ars, acs, pb, k, acc)
			case 11:
				gemm11xKAVX512(pc, ldc, pa, ars, acs, pb, k, acc)
			default:
				gemm12xKAVX512(pc, ldc, pa, ars, acs, pb, k, acc)
			}
		}
		i += n
	}
}

// gemmAVX2 is gemmAVX512 with microkernels of up to 6 rows and 16 columns, run for both halves of the panel.
func gemmAVX2(c []float32, ldc int, a []float32, ars, acs int, b []float32, m, k int, acc bool) {
	gemmCheck(c, ldc, a, ars, acs, b, m, k)
	for i := 0; i < m; {
		left := m - i
		n := left
		if left > 6 {
			calls := uint(left+5) / 6
			n = int((uint(left) + calls - 1) / calls)
		}
		for j := 0; j < Width; j += 16 {
			pc, pa, pb := &c[i*ldc+j], &a[i*ars], &b[j]
			if acs == 1 {
				switch n {
				case 1:
					gemm1x1AVX2(pc, ldc, pa, ars, pb, k, acc)
				case 2:
					gemm2x1AVX2(pc, ldc, pa, ars, pb, k, acc)
				case 3:
					gemm3x1AVX2(pc, ldc, pa, ars, pb, k, acc)
				case 4:
					gemm4x1AVX2(pc, ldc, pa, ars, pb, k, acc)
				case 5:
					gemm5x1AVX2(pc, ldc, pa, ars, pb, k, acc)
				default:
					gemm6x1AVX2(pc, ldc, pa, ars, pb, k, acc)
				}
			} else {
				switch n {
				case 1:
					gemm1xKAVX2(pc, ldc, pa, ars, acs, pb, k, acc)
				case 2:
					gemm2xKAVX2(pc, ldc, pa, ars, acs, pb, k, acc)
				case 3:
					gemm3xKAVX2(pc, ldc, pa, ars, acs, pb, k, acc)
				case 4:
					gemm4xKAVX2(pc, ldc, pa, ars, acs, pb, k, acc)
				case 5:
					gemm5xKAVX2(pc, ldc, pa, ars, acs, pb, k, acc)
				default:
					gemm6xKAVX2(pc, ldc, pa, ars, acs, pb, k, acc)
				}
			}
		}
		i += n
	}
}

// The conversions are exact, so the last few values may take the generic way.

func widenBF16WithAVX2(dst []float32, src []uint16) {
	src = src[:len(dst)]
	n := len(dst) &^ 7
	if n > 0 {
		widenBF16AVX2(&dst[0], &src[0], n)
	}
	widenBF16Generic(dst[n:], src[n:])
}

func widenF16WithAVX2(dst []float32, src []uint16) {
	src = src[:len(dst)]
	n := len(dst) &^ 7
	if n > 0 {
		widenF16AVX2(&dst[0], &src[0], n)
	}
	widenF16Generic(dst[n:], src[n:])
}

func widenBF16WithAVX512(dst []float32, src []uint16) {
	src = src[:len(dst)]
	n := len(dst) &^ 15
	if n > 0 {
		widenBF16AVX512(&dst[0], &src[0], n)
	}
	widenBF16Generic(dst[n:], src[n:])
}

func widenF16WithAVX512(dst []float32, src []uint16) {
	src = src[:len(dst)]
	n := len(dst) &^ 15
	if n > 0 {
		widenF16AVX512(&dst[0], &src[0], n)
	}
	widenF16Generic(dst[n:], src[n:])
}
