package device

import (
	"errors"
	"fmt"
)

// Host is the memory of this process outside of the Go heap: the [Device] that needs no hardware.
//
// Every block and every slab is a mapping of its own and costs exactly the bytes that are counted for it. On Linux one of
// 2 MiB or more begins on a huge page and asks for huge pages as far as they fill it; the rest lies on small pages. What
// is given back is unmapped at once, so a Mem that is used after that faults.
//
// Caveats. The unit of counting is [PageSize]; on a machine with larger pages a mapping costs up to one page more than
// counted. The kernel's page tables are not counted. Elsewhere than on Linux the memory comes from the Go heap, and what is
// given back returns when the garbage collector sees it.
type Host struct {
	*Space
	why string
}

// NewHost is the host's memory with that capacity, in bytes; 0 means [DefaultCapacity]. It takes no memory yet. A negative
// capacity is an error, and so is 0 where the default cannot be found or is nothing.
func NewHost(capacity int64) (*Host, error) {
	why := "stated"
	if capacity == 0 {
		if capacity, why = DefaultCapacity(); capacity == 0 {
			return nil, fmt.Errorf("open host device: no memory to use: %w\nhint: state a capacity in bytes", errors.New(why))
		}
	}
	space, err := NewSpace("host", capacity, hostMapper{})
	if err != nil {
		return nil, err
	}
	return &Host{space, why}, nil
}

// CapacitySource says where the capacity comes from: "stated", or the explanation of [DefaultCapacity].
func (h *Host) CapacitySource() string { return h.why }

// Poison fills m with all-ones bytes, which are a NaN in every float format.
func (hostMapper) Poison(m Mem) {
	b := m.Raw()
	for i := range b {
		b[i] = 0xff
	}
}
