//go:build !linux

package device

// hostFacts knows only the Go runtime's limit: the other systems have no common place to ask.
func hostFacts() (f facts) {
	f.goLimit, f.goRetained = goMemory()
	return f
}
