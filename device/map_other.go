//go:build !linux

package device

import (
	"fmt"
	"math"
	"unsafe"
)

// hostMapper takes memory from the Go heap. A Mem keeps the memory that it points to alive.
type hostMapper struct{}

func (hostMapper) Map(bytes int64) (Mem, error) {
	if bytes > math.MaxInt-Align {
		return Mem{}, fmt.Errorf("map %d bytes: more than an address can hold", bytes)
	}
	b := make([]byte, bytes+Align)
	skip := -uintptr(unsafe.Pointer(unsafe.SliceData(b))) & (Align - 1)
	return MemOf(b[skip:][:bytes:bytes]), nil
}

// Populate writes to every page.
func (hostMapper) Populate(m Mem) error {
	b := m.Raw()
	for i := 0; i < len(b); i += PageSize {
		b[i] = 0
	}
	return nil
}

func (hostMapper) Unmap(Mem) {}
