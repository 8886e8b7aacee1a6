package device

import (
	"fmt"
	"sync"

	"github.com/trainerrank/engine/internal/failpoint"
)

// Pool is the [Arena] of passes of which it is only estimated what they will ask for: those of a model that cannot be rehearsed.
//
// It holds the estimate as one slab before the first pass begins. What is kept fills the slab from the beginning and the scratch stack fills it from the end, so that only
// their sum has to be right. A piece for which the slab has no room is a [Block] of the device, as long as the pool then holds no more than it may. If that is exceeded, or the
// device has no more, the arena's methods panic with an [*OutOfMemoryError].
//
// The arena's methods, NextTurn and Asked belong to the goroutine that runs the passes. A pass after which scratch is still in use loses it.
type Pool struct {
	space *Space
	id    uint64
	most  int64 // bytes that it may hold
	held  int64 // bytes that it holds. Invariant: slab and blocks together.

	slab    Mem
	extents // of the slab. Invariant: sum <= the slab's size.

	// Beyond the slab: blocks for what is kept, and for scratch.
	kept  []*Block
	stack []beyond
	more  int64 // bytes of these blocks
	high  int64 // most bytes in use at one moment, in the slab and beyond

	asked Counter // what the present pass has asked for

	mu       sync.Mutex // serialises releasing
	closed   bool       // it hands out no more
	released bool
}

// beyond is scratch beyond the slab: a block, and how high the stack of all scratch was below it, in bytes.
type beyond struct {
	*Block
	below Mark
}

var _ Arena = (*Pool)(nil)

// ReservePool takes a slab of bytes, rounded up to [PageSize], for passes that run one after the other, and faults its pages in. The pool may grow, slab
// included, to most bytes. Running out is an [*OutOfMemoryError]; a negative size is an error.
func (s *Space) ReservePool(bytes, most int64) (*Pool, error) {
	sizes, err := s.claim("reserve", Sizes{Scratch: bytes})
	if err != nil {
		return nil, err
	}
	l := &Pool{space: s, held: sizes[Scratch], most: most}
	if l.held > 0 {
		if err = failpoint.Hit(failpoint.Reserve); err == nil {
			l.slab, err = s.mapper.Map(l.held)
		}
		if err != nil {
			return nil, s.unclaim("reserve", sizes, err)
		}
		if err = s.populate(l.slab); err != nil {
			s.mapper.Unmap(l.slab)
			return nil, s.unclaim("reserve", sizes, err)
		}
	}
	l.id = s.commit(&holding{held: sizes, reservation: true})
	return l, nil
}

// Keep hands out bytes for purpose p until the pool is released. No bytes are an empty Mem. It panics with an [*OutOfMemoryError] if there are no more, and if p is [Scratch].
func (l *Pool) Keep(p Purpose, bytes int64) Mem {
	checkKeep(p)
	return l.take(p, bytes)
}

// Scratch hands out bytes until the enclosing mark is popped. No bytes are an empty Mem. It panics with an [*OutOfMemoryError] if there are no more.
func (l *Pool) Scratch(bytes int64) Mem { return l.take(Scratch, bytes) }

// Mark remembers the top of the scratch stack.
func (l *Pool) Mark() Mark { return l.asked.Mark() }

// Pop gives back all scratch memory handed out since m. It panics if m is above the top of the stack.
func (l *Pool) Pop(m Mark) {
	l.asked.Pop(m)
	for n := len(l.stack); n > 0 && l.stack[n-1].below >= m; n-- {
		l.drop(l.stack[n-1].Block)
		l.stack = l.stack[:n-1]
	}
	slab := int64(m)
	for _, b := range l.stack {
		slab -= RoundAlign(b.Block.asked)
	}
	if slab < 0 || slab > l.off[Scratch] {
		panic(fmt.Sprintf("device: pop to %d, which is no mark", m))
	}
	l.use(Scratch, slab)
}

// use makes off the bytes of the slab that are handed out for p.
func (l *Pool) use(p Purpose, off int64) {
	if delta := l.set(p, off); delta != 0 {
		l.space.use(p, delta)
	}
	l.high = max(l.high, l.sum+l.more)
}

func (l *Pool) take(p Purpose, bytes int64) Mem {
	if l.closed {
		panic(fmt.Sprintf("device: arena asked for %d bytes of %v after its release", bytes, p))
	}
	before := l.asked.off[p]
	l.asked.count(p, bytes)
	if bytes == 0 {
		return Mem{}
	}
	m, ok := l.fit(p, bytes)
	if !ok {
		b, err := l.grow(p, bytes)
		if err != nil {
			l.asked.set(p, before) // its peak remembers what was asked
			panic(err)
		}
		if p == Scratch {
			l.stack = append(l.stack, beyond{b, Mark(before)})
		} else {
			l.kept = append(l.kept, b)
		}
		m = b.Mem()
	}
	if invariants && l.space.poison != nil {
		l.space.poison.Poison(m)
	}
	return m
}

// fit takes a piece from the slab, if it has room.
func (l *Pool) fit(p Purpose, bytes int64) (m Mem, ok bool) {
	if bytes > l.slab.n {
		return Mem{}, false
	}
	end := l.off[p] + RoundAlign(bytes)
	if l.sum-l.page[p]+RoundPages(end) > l.slab.n {
		return Mem{}, false
	}
	at := l.slab.n - end
	if p != Scratch { // all purposes are kept side by side
		at = l.off.Total() - l.off[Scratch]
	}
	l.use(p, end)
	return l.slab.Slice(at, bytes), true
}

// grow takes a block from the device.
func (l *Pool) grow(p Purpose, bytes int64) (*Block, error) {
	asked := roundSaturated(bytes)
	if free := max(0, l.most-l.held); asked > free {
		e := &OutOfMemoryError{Op: "allocate", Device: l.space.name, Purpose: p, AskedBytes: asked, FreeBytes: min(free, l.space.Free()), CapacityBytes: l.most}
		e.Asked[p] = asked
		return nil, e
	}
	b, err := l.space.Allocate(p, bytes)
	if err != nil {
		return nil, err
	}
	l.held += b.bytes
	l.more += b.bytes
	l.high = max(l.high, l.sum+l.more)
	return b, nil
}

func (l *Pool) drop(b *Block) {
	l.held -= b.bytes
	l.more -= b.bytes
	b.Free()
}

// NextTurn ends a pass and begins the next: what the one kept stays, its scratch is given back.
func (l *Pool) NextTurn() {
	l.Pop(0)
	l.asked = Counter{}
}

// Asked is what the present pass has asked for, as if it were alone: the most at one moment, in whole pages like [Counter.Peak], what it was not given
// included; and what it keeps, in bytes.
func (l *Pool) Asked() (peak, kept int64) {
	return l.asked.Peak(), l.asked.off.Total() - l.asked.off[Scratch]
}

// Peak is the most that was in use at one moment, in bytes, each purpose and each block rounded to pages.
func (l *Pool) Peak() int64 { return l.high }

// Kept is what is in use now and is not scratch, in bytes, each purpose and each block rounded to pages.
func (l *Pool) Kept() int64 {
	kept := l.sum - l.page[Scratch]
	for _, b := range l.kept {
		kept += b.bytes
	}
	return kept
}

// ReleaseScratch returns all that is not kept to the operating system at once: the passes are over. Again does nothing. Where the device's [Mapper] is no
// [Trimmer], the slab stays taken until the release, unless nothing in it is kept.
func (l *Pool) ReleaseScratch() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.close()
}

// close is called with the lock held.
func (l *Pool) close() {
	if l.closed {
		return
	}
	l.Pop(0)
	l.closed = true
	over := l.slab.n - l.sum
	trimmer, ok := l.space.mapper.(Trimmer)
	switch {
	case over == 0:
	case l.sum == 0:
		l.space.mapper.Unmap(l.slab)
		l.slab = Mem{}
		l.space.giveBack(l.id, Scratch, over, 0)
	case ok:
		l.slab = trimmer.Trim(l.slab, l.sum)
		l.space.giveBack(l.id, Scratch, over, 0)
	}
	held := l.page
	held[Scratch] = l.slab.n - l.sum
	l.space.relabel(l.id, held)
}

// Release returns all memory to the operating system at once. Nobody may use any Mem of it any more. Releasing a pool again, or a nil one, does nothing.
func (l *Pool) Release() {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.released {
		return
	}
	l.released = true
	l.close()
	for _, b := range l.kept {
		l.drop(b)
	}
	used, rest := l.page, l.slab.n-l.sum
	if l.slab.Real() {
		l.space.mapper.Unmap(l.slab)
	}
	l.slab, l.kept, l.extents = Mem{}, nil, extents{}
	for p, n := range used {
		if n > 0 {
			l.space.giveBack(l.id, Purpose(p), n, n)
		}
	}
	l.space.giveBack(l.id, Scratch, rest, 0)
	l.space.forget(l.id)
}
