// Package device is a memory space with a capacity. It knows what every byte is for.
//
// A [Device] hands out memory in two ways. [Device.Allocate] gives one [Block] for one [Purpose] (weights, ballast,
// bytes in flight). [Device.Reserve] gives a [Reservation]: the slabs that one pass will live in, taken as a whole
// before the pass starts, so that nothing inside it can run out. A pass asks an [Arena] for memory; the reservation is
// the real arena, and [Counter] is its counting twin: the same calls on it add up what a reservation must hold. That is
// how a price is exact: the pass is rehearsed on the twin, not estimated by a second formula. A pass that cannot be rehearsed
// lives in a [Pool], which holds an estimate and can grow.
//
// All sizes are bytes and int64. A device counts in pages of [PageSize] bytes, the unit in which the operating
// system hands out memory; addresses inside a slab are aligned to [Align] bytes.
package device

import (
	"fmt"
	"unsafe"
)

const (
	// Align is the alignment, in bytes, of every piece of memory that an arena hands out: a cache line, and the widest vector.
	Align = 64
	// PageSize is the unit, in bytes, in which a device counts: the smallest page of the host.
	PageSize = 4096
)

// Purpose says what a byte is for.
type Purpose uint8

// The purposes, in the order in which they are printed.
const (
	Weights   Purpose = iota // frozen base parameters, packed for the kernels
	Adapters                 // adapter weights and their optimizer state
	InFlight                 // file bytes on their way to where they belong
	Outputs                  // tensors handed to the caller, live until the result is released
	Retained                 // activations kept for a backward
	Scratch                  // intermediates of a pass
	Gradients                // gradient accumulators
	Ballast                  // held by a test or a harness to make memory scarce

	NumPurposes = int(Ballast) + 1
)

var purposeNames = [NumPurposes]string{"weights", "adapters", "in flight", "outputs", "retained", "scratch", "gradients", "ballast"}

func (p Purpose) String() string {
	if int(p) < NumPurposes {
		return purposeNames[p]
	}
	return fmt.Sprintf("purpose %d", uint8(p))
}

// Sizes holds one byte count per purpose.
type Sizes [NumPurposes]int64

// Total is the sum over the purposes.
func (s Sizes) Total() int64 {
	var t int64
	for _, n := range s {
		t += n
	}
	return t
}

// Mem is a range of device memory. The zero Mem is empty. A Mem that a [Counter] handed out has a length and no
// address: a rehearsal passes it around and never looks inside.
type Mem struct {
	ptr unsafe.Pointer
	n   int64
}

// MemOf is the Mem over b, which must not be moved or freed while the Mem is in use.
func MemOf(b []byte) Mem {
	return Mem{unsafe.Pointer(unsafe.SliceData(b)), int64(len(b))}
}

// Bytes is the length of m in bytes.
func (m Mem) Bytes() int64 { return m.n }

// Real says whether m has an address. A Mem from a rehearsal has none.
func (m Mem) Real() bool { return m.ptr != nil }

// Slice is the part of m from byte off on, n bytes long. It panics if m has no such part.
func (m Mem) Slice(off, n int64) Mem {
	if off < 0 || n < 0 || off > m.n-n {
		panic(fmt.Sprintf("device: slice [%d, %d+%d) of %d bytes", off, off, n, m.n))
	}
	if m.ptr == nil {
		return Mem{nil, n}
	}
	return Mem{unsafe.Add(m.ptr, off), n}
}

// Raw is m as bytes; nil for a Mem without an address.
func (m Mem) Raw() []byte { return view[byte](m) }

// F32 is m as float32 values; nil for a Mem without an address.
func (m Mem) F32() []float32 { return view[float32](m) }

// F64 is m as float64 values; nil for a Mem without an address.
func (m Mem) F64() []float64 { return view[float64](m) }

// I32 is m as int32 values; nil for a Mem without an address.
func (m Mem) I32() []int32 { return view[int32](m) }

// U16 is m as 16-bit values (bfloat16 and float16 storage); nil for a Mem without an address.
func (m Mem) U16() []uint16 { return view[uint16](m) }

func view[T any](m Mem) []T {
	if m.ptr == nil {
		return nil
	}
	var t T
	return unsafe.Slice((*T)(m.ptr), m.n/int64(unsafe.Sizeof(t)))
}

// Arena hands out memory to one pass.
//
// Kept memory ([Arena.Keep]) lives until the arena is released. Scratch memory is a stack: it lives until the [Mark] that
// was taken before it is passed to Pop. Every piece is aligned to [Align] and its size rounded up to it. The contents
// are undefined.
type Arena interface {
	// Keep hands out bytes for purpose p ([Outputs], [Retained] or [Gradients]) until the arena is released.
	Keep(p Purpose, bytes int64) Mem
	// Scratch hands out bytes until the enclosing mark is popped.
	Scratch(bytes int64) Mem
	// Mark remembers the top of the scratch stack.
	Mark() Mark
	// Pop gives back all scratch memory handed out since m.
	Pop(m Mark)
}

// Mark is a height of a scratch stack, in bytes.
type Mark int64

// Device is a memory space with a capacity. Its methods may be called from several goroutines.
type Device interface {
	// Name says which device it is, for messages: "host".
	Name() string
	// Capacity is the number of bytes that the device may hold at once.
	Capacity() int64
	// Free is the number of bytes that can be allocated now.
	Free() int64
	// Allocate takes bytes, rounded up to [PageSize], for one purpose. The memory is zero. Running out is an [*OutOfMemoryError].
	Allocate(p Purpose, bytes int64) (*Block, error)
	// Reserve takes one slab per purpose with a size above 0, each rounded up to [PageSize], all or none. The pages are
	// faulted in before it returns. Running out is an [*OutOfMemoryError].
	Reserve(s Sizes) (*Reservation, error)
	// ReserveTurns takes one slab for passes that run one after the other, of the size of the largest: turns[j] is what may be in use while pass j
	// runs, [Outputs] with those of all passes before it, and its own [Scratch]. The pages are faulted in before it returns. Running out is an [*OutOfMemoryError].
	ReserveTurns(turns []Sizes) (*Reservation, error)
	// ReservePool takes one slab of bytes, rounded up to [PageSize], for passes of which it is only estimated what they need; together with what they ask
	// beyond that, the pool may come to hold most bytes. The pages are faulted in before it returns. Running out is an [*OutOfMemoryError].
	ReservePool(bytes, most int64) (*Pool, error)
	// Stats are the counters of this moment.
	Stats() Stats
	// ResetPeak makes the present counters the peak counters.
	ResetPeak()
}

// RoundPages rounds bytes up to whole pages, the unit in which a device counts.
func RoundPages(bytes int64) int64 { return (bytes + PageSize - 1) &^ (PageSize - 1) }

// RoundAlign rounds bytes up to [Align], the unit in which an arena hands out memory.
func RoundAlign(bytes int64) int64 { return (bytes + Align - 1) &^ (Align - 1) }
