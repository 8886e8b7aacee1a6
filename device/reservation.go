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
//
// A reservation by [Space.ReserveTurns] is for several passes, one after the other. It is one slab that is cut anew for each: outputs fill it
// from the beginning, and what the present pass does not need for them is its scratch slab.
type Reservation struct {
	space *Space
	id    uint64
	sizes Sizes
	slabs [NumPurposes]Mem
	room  Sizes // what the arena may hand out. Invariant: off <= room <= sizes; room is 0 once the slab is released.
	extents

	// shared is the one slab of a reservation for several passes. The slabs are then parts of it.
	shared Mem
	turns  []Sizes // what each pass may use, in whole pages; nil if the slabs are mappings of their own
	turn   int     // the present one

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

// Sizes is what was reserved, in bytes, rounded to pages. It does not change, except that of several passes it is what the present one may use.
func (r *Reservation) Sizes() Sizes { return r.sizes }

// Used is the most that each purpose has used, in bytes, rounded to pages. After a pass it equals the [Counter.Sizes] of
// its rehearsal. It stays after a release. Like the arena's methods it belongs to the goroutine that runs the pass.
func (r *Reservation) Used() Sizes { return r.high }

// Peak is the most that all purposes together have used at one moment, in bytes, each rounded to pages. After a pass it
// equals the [Counter.Peak] of its rehearsal.
func (r *Reservation) Peak() int64 { return r.peak }

// Kept is what is in use now and is not scratch, in bytes, each purpose rounded to pages. Like the arena's methods it belongs to the goroutine that runs the pass.
func (r *Reservation) Kept() int64 { return r.sum - r.page[Scratch] }

// InUse is what is in use now, in bytes, each purpose rounded to pages.
func (r *Reservation) InUse() int64 { return r.sum }

// ResetPeak makes what is in use now the [Reservation.Peak].
func (r *Reservation) ResetPeak() { r.peak = r.sum }

// NextTurn cuts the slab for the next pass: what was kept stays where it is, and scratch begins behind all that the pass may keep. It panics if
// there is no further turn, or while scratch is in use. Like the arena's methods it belongs to the goroutine that runs the passes.
func (r *Reservation) NextTurn() {
	if r.turn+1 >= len(r.turns) || r.off[Scratch] != 0 || !r.shared.Real() {
		panic(fmt.Sprintf("device: turn %d of %d ends with %d bytes of scratch in use", r.turn+1, len(r.turns), r.off[Scratch]))
	}
	r.begin(r.turn + 1)
}

// begin cuts the slab for a turn.
func (r *Reservation) begin(turn int) {
	r.turn, r.sizes = turn, r.turns[turn]
	r.room = r.sizes
	r.slabs[Outputs] = r.shared.Slice(0, r.sizes[Outputs])
	r.slabs[Scratch] = r.shared.Slice(r.sizes[Outputs], r.sizes[Scratch])
}

// ReleaseScratch returns the scratch slab to the operating system at once: a pass is over, what it kept stays. Again does nothing. Of several
// passes it is to be called after the last; where the device's [Mapper] is no [Trimmer], the memory stays taken until the release.
func (r *Reservation) ReleaseScratch() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.turns != nil {
		r.trim()
		return
	}
	r.drop(Scratch)
}

// trim gives back what of a shared slab is not for outputs.
func (r *Reservation) trim() {
	keep := r.turns[len(r.turns)-1][Outputs]
	trimmer, ok := r.space.mapper.(Trimmer)
	if r.room[Scratch] = 0; keep == 0 || !ok || r.shared.Bytes() <= keep {
		if used := r.set(Scratch, 0); used != 0 {
			r.space.use(Scratch, used)
		}
		return
	}
	over := r.shared.Bytes() - keep
	used := -r.set(Scratch, 0)
	r.shared = trimmer.Trim(r.shared, keep)
	r.space.giveBack(r.id, Scratch, over, used)
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
	if r.shared.Real() {
		r.dropShared()
	}
	for p := range r.slabs {
		r.drop(Purpose(p))
	}
	r.space.forget(r.id)
}

// dropShared gives back a slab of several passes.
func (r *Reservation) dropShared() {
	bytes := Sizes{Outputs: r.turns[len(r.turns)-1][Outputs]}
	bytes[Scratch] = r.shared.Bytes() - bytes[Outputs]
	m := r.shared
	r.shared, r.room = Mem{}, Sizes{}
	outputs, scratch := -r.set(Outputs, 0), -r.set(Scratch, 0)
	r.slabs = [NumPurposes]Mem{}
	r.space.mapper.Unmap(m)
	r.space.giveBack(r.id, Outputs, bytes[Outputs], outputs)
	r.space.giveBack(r.id, Scratch, bytes[Scratch], scratch)
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
