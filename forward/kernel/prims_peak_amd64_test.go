//go:build amd64 && !noasm

package kernel

// peakRun runs n rounds of the widest multiply-adds there are and returns how many operations that was.
func peakRun(n int) float64 {
	switch {
	case hasAVX512():
		peakAVX512(n)
		return 12 * 16 * 2 * float64(n)
	case hasAVX2():
		peakAVX2(n)
		return 12 * 8 * 2 * float64(n)
	}
	return 0
}
