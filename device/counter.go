package device

import "fmt"

// maxCount is where a counter stops counting: no machine has it, and the sum of all purposes still fits an int64.
const maxCount = 1 << 59

// Counter is the counting twin of a [Reservation]: an [Arena] that hands out Mem without an address and adds up what a
// reservation must hold so that the same calls succeed on it. It is for one goroutine. A count that would pass 2^59
// bytes stays there; no device has so much.
type Counter struct{ extents }

var _ Arena = (*Counter)(nil)

// NewCounter is a counter from which nothing has been asked yet.
func NewCounter() *Counter { return new(Counter) }

// Keep counts bytes for purpose p. It panics if p is [Scratch], or if bytes is negative.
func (c *Counter) Keep(p Purpose, bytes int64) Mem {
	checkKeep(p)
	return c.count(p, bytes)
}

// Scratch counts bytes on the scratch stack. It panics if bytes is negative.
func (c *Counter) Scratch(bytes int64) Mem { return c.count(Scratch, bytes) }

// Mark remembers the top of the scratch stack.
func (c *Counter) Mark() Mark { return c.mark() }

// Pop takes the scratch stack back to m. It panics if m is above the top of the stack.
func (c *Counter) Pop(m Mark) {
	c.checkPop(m)
	c.set(Scratch, int64(m))
}

func (c *Counter) count(p Purpose, bytes int64) Mem {
	if bytes < 0 {
		panic(fmt.Sprintf("device: arena asked for %d bytes of %v", bytes, p))
	}
	// Both terms are at most maxCount, so nothing overflows.
	c.set(p, min(c.off[p]+RoundAlign(min(bytes, maxCount)), maxCount))
	return Mem{nil, bytes}
}

// Sizes is what must be reserved, in bytes, so that the calls so far succeed: for each kept purpose the sum of the
// pieces, each rounded to [Align]; for [Scratch] the highest top of the stack; each rounded to [PageSize].
func (c *Counter) Sizes() Sizes { return c.high }

// Kept is the sum of the pieces kept for purpose p, in bytes, each rounded to [Align]: what Sizes says before it is rounded to pages. The sums of passes
// that share a slab add up.
func (c *Counter) Kept(p Purpose) int64 { return c.off[p] }

// Peak is the most that all purposes together used at one moment, in bytes, each rounded to pages: what a device will
// observe as [Stats.PeakInUse] of the pass. It is at most Sizes().Total(), and less if the scratch stack is not at its
// highest when most is kept.
func (c *Counter) Peak() int64 { return c.peak }
