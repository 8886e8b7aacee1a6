package device

import (
	"fmt"
	"sync"
	"unsafe"
)

// Reservation is the memory of one pass, taken as a whole before the pass begins: one slab per purpose. It is the [Arena]
// that the pass asks. The arena's methods hand out memory by moving an offset; they are called from one goroutine at a
// time. Keep takes from the slab of its purpose; Scratch, Mark and Pop work on the scratch slab as a stack.
//
// Asking for more than a slab holds panics with an [*OverrunError].
type Reservation struct {
	space *Space
	id    uint64
	sizes Sizes
	slabs [NumPurposes]Mem
	room  Sizes // what the arena may hand out. Invariant: off <= room <= sizes; room is 0 once the slab is released.
	extents

	mu       sync.Mutex // serialises releasing
	released bool
}

var _ Arena = (*Reservation)(nil)

// Keep hands out bytes for purpose p until the reservation is released. No bytes are an empty Mem. It panics with an
// [*OverrunError] if the slab of p has no room, and if p is [Scratch].
func (r *Reservation) Keep(p Purpose, bytes int64) Mem {
	checkKeep(p)
	return r.take(p, bytes)
}

// Scratch hands out bytes until the enclosing mark is popped. No bytes are an empty Mem. It panics with an [*OverrunError]
// if the scratch slab has no room.
func (r *Reservation) Scratch(bytes int64) Mem { return r.take(Scratch, bytes) }

// Mark remembers the top of the scratch stack.
func (r *Reservation) Mark() Mark { return r.mark() }

// Pop gives back all scratch memory handed out since m. It panics if m is above the top of the stack.
func (r *Reservation) Pop(m Mark) {
	r.checkPop(m)
	if delta := r.set(Scratch, int64(m)); delta != 0 {
		r.space.use(Scratch, delta)
	}
}

func (r *Reservation) take(p Purpose, bytes int64) Mem {
	off := r.off[p]
	// A negative size is a huge one as uint64. The room left is a multiple of Align, so the rounded size fits if the size does.
	if uint64(bytes) > uint64(r.room[p]-off) {
		r.overrun(p, bytes)
	}
	if bytes == 0 {
		return Mem{}
	}
	if delta := r.set(p, off+RoundAlign(bytes)); delta != 0 {
		r.space.use(p, delta)
	}
	m := Mem{unsafe.Add(r.slabs[p].ptr, off), bytes}
	if invariants && r.space.poison != nil {
		r.space.poison.Poison(m)
	}
	return m
}

func (r *Reservation) overrun(p Purpose, bytes int64) {
	switch {
	case bytes < 0:
		panic(fmt.Sprintf("device: arena asked for %d bytes of %v", bytes, p))
	case r.room[p] < r.sizes[p]:
		panic(fmt.Sprintf("device: arena asked for %d bytes of %v after its release", bytes, p))
	}
	panic(&OverrunError{Purpose: p, Slab: r.sizes[p], Used: r.off[p], Asked: bytes})
}

// Sizes is what was reserved, in bytes, rounded to pages. It does not change.
func (r *Reservation) Sizes() Sizes { return r.sizes }

// Used is the most that each purpose has used, in bytes, rounded to pages. After a pass it equals the [Counter.Sizes] of
// its rehearsal. It stays after a release. Like the arena's methods it belongs to the goroutine that runs the pass.
func (r *Reservation) Used() Sizes { return r.high }

// Peak is the most that all purposes together have used at one moment, in bytes, each rounded to pages. After a pass it
// equals the [Counter.Peak] of its rehearsal.
func (r *Reservation) Peak() int64 { return r.peak }

// ReleaseScratch returns the scratch slab to the operating system at once: a pass is over, what it kept stays. Again does nothing.
func (r *Reservation) ReleaseScratch() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.drop(Scratch)
}

// Release returns all memory to the operating system at once. Nobody may use any Mem of it any more. Releasing a
// reservation again, or a nil one, does nothing.
func (r *Reservation) Release() {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.released {
		return
	}
	r.released = true
	for p := range r.slabs {
		r.drop(Purpose(p))
	}
	r.space.forget(r.id)
}

func (r *Reservation) drop(p Purpose) {
	m := r.slabs[p]
	if !m.Real() {
		return
	}
	r.slabs[p], r.room[p] = Mem{}, 0
	used := -r.set(p, 0)
	r.space.mapper.Unmap(m)
	r.space.giveBack(r.id, p, m.Bytes(), used)
}
