//go:build !invariants

package device

// invariants says whether the package checks its counters at every change and poisons what arenas hand out.
const invariants = false
