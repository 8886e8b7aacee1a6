package device

import (
	"fmt"
	"math"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	// hugePage is what the kernel can map with one entry on x86-64, and on arm64 with pages of 4 KiB.
	hugePage = 2 << 20
	// populateRange is how much one goroutine faults in at a time: about 6 ms of the kernel's work, so that the goroutines
	// finish together. A multiple of hugePage.
	populateRange = 64 << 20
)

// hostMapper maps anonymous private memory.
type hostMapper struct{}

func (hostMapper) Map(bytes int64) (Mem, error) {
	if bytes > math.MaxInt-hugePage {
		return Mem{}, fmt.Errorf("map %d bytes: %w", bytes, unix.ENOMEM)
	}
	n := uintptr(bytes)
	over := uintptr(0)
	if n >= hugePage {
		over = hugePage
	}
	p, err := unix.MmapPtr(-1, 0, nil, n+over, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return Mem{}, fmt.Errorf("map %d bytes: %w", bytes, err)
	}
	if over > 0 {
		if p, err = trim(p, n, over); err != nil {
			return Mem{}, fmt.Errorf("map %d bytes: %w", bytes, err)
		}
	}
	m := Mem{p, bytes}
	// A kernel without huge pages answers EINVAL, and small ones are all it has. The rest must say no: it, and a neighbour that
	// the kernel joined it with, could otherwise become one huge page, resident for bytes that nobody touched.
	body := bytes &^ (hugePage - 1)
	if body > 0 {
		_ = unix.Madvise(m.Slice(0, body).Raw(), unix.MADV_HUGEPAGE)
	}
	if body < bytes {
		_ = unix.Madvise(m.Slice(body, bytes-body).Raw(), unix.MADV_NOHUGEPAGE)
	}
	return m, nil
}

// trim cuts a mapping of n+over bytes at p down to n bytes that begin on a huge page.
func trim(p unsafe.Pointer, n, over uintptr) (unsafe.Pointer, error) {
	page := uintptr(os.Getpagesize())
	head := -uintptr(p) & (hugePage - 1)
	start := unsafe.Add(p, head)
	end := (n + page - 1) &^ (page - 1) // of what stays, in the kernel's pages
	var err error
	if head > 0 {
		err = unix.MunmapPtr(p, head)
	}
	if tail := n + over - head; err == nil && tail > end {
		err = unix.MunmapPtr(unsafe.Add(start, end), tail-end)
	}
	if err != nil {
		_ = unix.MunmapPtr(p, n+over) // holes do not disturb it
		return nil, err
	}
	return start, nil
}

// Populate faults the pages in. The kernel clears a page when it is first touched, at some 90 ms per GiB and thread in
// huge pages, so a large mapping is cut in ranges for as many goroutines as may run.
func (hostMapper) Populate(m Mem) error {
	ranges := (m.Bytes() + populateRange - 1) / populateRange
	workers := min(int64(runtime.GOMAXPROCS(0)), ranges)
	var next atomic.Int64
	work := func() error {
		for {
			off := (next.Add(1) - 1) * populateRange
			if off >= m.Bytes() {
				return nil
			}
			if err := populate(m.Slice(off, min(populateRange, m.Bytes()-off)).Raw()); err != nil {
				next.Store(ranges) // the others need not go on
				return err
			}
		}
	}
	errs := make([]error, workers)
	var wg sync.WaitGroup
	for i := range workers - 1 {
		wg.Go(func() { errs[i] = work() })
	}
	errs[workers-1] = work()
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return fmt.Errorf("fault in %d bytes: %w", m.Bytes(), err)
		}
	}
	return nil
}

// populateUnknown remembers that the kernel is older than MADV_POPULATE_WRITE (5.14).
var populateUnknown atomic.Bool

func populate(b []byte) error {
	for !populateUnknown.Load() {
		switch err := unix.Madvise(b, unix.MADV_POPULATE_WRITE); err {
		case unix.EINTR, unix.EAGAIN: // a signal came; what is resident stays so
		case unix.EINVAL:
			populateUnknown.Store(true)
		default:
			return err
		}
	}
	touch(b)
	return nil
}

// touch writes to every page of b, whose bytes are zero.
func touch(b []byte) {
	for i := 0; i < len(b); i += PageSize {
		b[i] = 0
	}
}

// Trim unmaps the end of m, but for what shares a page of the kernel with what stays.
func (h hostMapper) Trim(m Mem, keep int64) Mem {
	page := int64(os.Getpagesize())
	if from := (keep + page - 1) &^ (page - 1); from < m.n {
		h.Unmap(m.Slice(from, m.n-from))
	}
	return m.Slice(0, keep)
}

func (hostMapper) Unmap(m Mem) {
	err := unix.MunmapPtr(m.ptr, uintptr(m.n))
	if err == nil {
		return
	}
	// The kernel joins neighbouring mappings, so this may have to split one, which the limit on mappings (vm.max_map_count) can
	// forbid. The pages can be given back all the same; only their addresses are lost.
	if e := unix.Madvise(m.Raw(), unix.MADV_DONTNEED); e != nil {
		panic(fmt.Sprintf("device: unmap %d bytes: %v, %v", m.n, err, e))
	}
}
