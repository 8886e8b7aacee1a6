//go:build amd64 && !noasm

package kernel

// pause tells the CPU that this is a spin loop.
//
//go:noescape
func pause()
