package collective

import (
	"errors"
	"runtime/debug"
	"syscall"
	"testing"
	"unsafe"
)

// TestFault: memory that one rank has freed too early faults in the hands of any rank. With SetPanicOnFault that is an
// error for all of them, and all come out of the operation. Small work is done by one rank, large work by all.
func TestFault(t *testing.T) {
	for _, length := range []int{8, 4 * inlineBytes} {
		eachSize(t, func(t *testing.T, n int) {
			gone, err := syscall.Mmap(-1, 0, 4*length, syscall.PROT_NONE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
			if err != nil {
				t.Skip(err)
			}
			defer func() { _ = syscall.Munmap(gone) }()
			var last any
			errs := make([]error, n)
			_ = run(t, n, func(w World) error {
				debug.SetPanicOnFault(true)
				v := make([]float32, length)
				if w.Rank() == n-1 {
					v = unsafe.Slice((*float32)(unsafe.Pointer(unsafe.SliceData(gone))), length)
				}
				errs[w.Rank()] = w.AllReduceFloat32(t.Context(), "x", Sum, v)
				if err := w.Barrier(t.Context(), "later"); n > 1 && !errors.Is(err, ErrUnusable) {
					t.Errorf("the group goes on after a fault: %v", err)
				}
				return errs[w.Rank()]
			})
			if n == 1 {
				return // the identity touches nothing
			}
			for r, err := range errs {
				var p *PanicError
				if !errors.As(err, &p) || r > 0 && ended(err) != last {
					t.Fatalf("rank %d got %v", r, err)
				}
				last = ended(err)
			}
		})
	}
}
