package device

import "fmt"

// OutOfMemoryError says that a device could not give what was asked. Nothing was taken. All sizes are in bytes.
type OutOfMemoryError struct {
	Op            string  // "allocate" or "reserve"
	Device        string  // the device's name
	Purpose       Purpose // what the bytes were for; of a reservation, the purpose with the largest slab
	Asked         Sizes   // what was asked for each purpose, rounded to pages
	AskedBytes    int64   // all that was asked; the largest int64 if the sum is larger
	FreeBytes     int64   // what the device could have given
	CapacityBytes int64   // what the device may hold at once
	Err           error   // why the operating system or driver refused; nil if the capacity was the bound
}

func (e *OutOfMemoryError) Error() string {
	what := fmt.Sprintf("%s %v on %s: ", e.Op, e.Purpose, e.Device)
	if e.Op == "reserve" {
		what = fmt.Sprintf("reserve on %s (%v): ", e.Device, e.Asked)
	}
	numbers := fmt.Sprintf("asked %d bytes, %d of %d free", e.AskedBytes, e.FreeBytes, e.CapacityBytes)
	if e.Err != nil {
		return fmt.Sprintf("%sout of memory although %s: %v", what, numbers, e.Err)
	}
	return fmt.Sprintf("%sout of memory: %s", what, numbers)
}

// Unwrap is the refusal of the operating system or driver, or nil.
func (e *OutOfMemoryError) Unwrap() error { return e.Err }

// outOfMemory is called with the lock held, after the claim is taken back.
func (s *Space) outOfMemory(op string, asked Sizes, cause error) error {
	e := &OutOfMemoryError{
		Op: op, Device: s.name, Asked: asked, FreeBytes: s.free(), CapacityBytes: s.stats.Capacity, Err: cause,
	}
	for p, n := range asked {
		e.AskedBytes = addSaturated(e.AskedBytes, n)
		if n > asked[e.Purpose] {
			e.Purpose = Purpose(p)
		}
	}
	return e
}

// OverrunError is what a [Reservation] panics with when a pass asks for more than the slab was reserved for. It can
// only mean that the pass did not do what its rehearsal did. All sizes are in bytes.
type OverrunError struct {
	Purpose Purpose // whose slab
	Slab    int64   // size of the slab
	Used    int64   // handed out before
	Asked   int64   // asked on top of it
}

func (e *OverrunError) Error() string {
	return fmt.Sprintf("arena: %v slab of %d bytes overrun: %d used, %d more asked\nhint: the pass asked for other memory than its rehearsal",
		e.Purpose, e.Slab, e.Used, e.Asked)
}
