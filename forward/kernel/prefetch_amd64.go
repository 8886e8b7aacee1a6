//go:build amd64 && !noasm

package kernel

// prefetch asks for the whole cache lines of mem to be brought near, and waits for none.
//
//go:noescape
func prefetch(mem []byte)
