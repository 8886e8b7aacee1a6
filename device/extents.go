package device

import "fmt"

// extents say how far each purpose's slab is used. The arena and its counting twin both keep their books in it, so
// that they cannot count differently.
type extents struct {
	off  Sizes // bytes handed out now. Invariant: multiples of Align.
	page Sizes // Invariant: page[p] == RoundPages(off[p])
	high Sizes // highest page of each purpose
	sum  int64 // Invariant: sum == page.Total()
	peak int64 // highest sum
}

// set makes off the bytes handed out for p and returns by how much the pages in use changed, in bytes.
func (e *extents) set(p Purpose, off int64) (delta int64) {
	e.off[p] = off
	page := RoundPages(off)
	delta = page - e.page[p]
	if delta == 0 {
		return 0
	}
	e.page[p] = page
	e.high[p] = max(e.high[p], page)
	e.sum += delta
	e.peak = max(e.peak, e.sum)
	return delta
}

// mark and checkPop are the two ends of a scope of the scratch stack.
func (e *extents) mark() Mark { return Mark(e.off[Scratch]) }

func (e *extents) checkPop(m Mark) {
	if m < 0 || int64(m) > e.off[Scratch] || m%Align != 0 {
		panic(fmt.Sprintf("device: pop to %d of a scratch stack that is %d bytes high", m, e.off[Scratch]))
	}
}

func checkKeep(p Purpose) {
	if p == Scratch || int(p) >= NumPurposes {
		panic(fmt.Sprintf("device: keep asked for %v, which is not kept", p))
	}
}
