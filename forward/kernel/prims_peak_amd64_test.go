//go:build amd64 && !noasm

package kernel

// peakRun runs n rounds of p's multiply-adds and returns how many operations that was.
func peakRun(p *prims, n int) float64 {
	switch p {
	case &avx512:
		peakAVX512(n)
		return 12 * 16 * 2 * float64(n)
	case &avx2:
		peakAVX2(n)
		return 12 * 8 * 2 * float64(n)
	}
	return 0
}
