package device

import (
	"fmt"
	"os"
	"runtime/debug"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// resident is how many bytes of [p, p+n) are in memory.
func resident(t *testing.T, m Mem) int64 {
	t.Helper()
	pages := make([]byte, (m.Bytes()+PageSize-1)/PageSize)
	if _, _, e := unix.Syscall(unix.SYS_MINCORE, uintptr(m.ptr), uintptr(m.Bytes()), uintptr(unsafe.Pointer(&pages[0]))); e != 0 {
		t.Fatal(e)
	}
	var n int64
	for _, in := range pages {
		n += int64(in&1) * PageSize
	}
	return n
}

// rss is the resident memory of the process as the kernel sums it up, in bytes.
func rss(t *testing.T) int64 {
	t.Helper()
	n, ok := field(os.DirFS("/"), "proc/self/status", "VmRSS:")
	if !ok {
		t.Skip("no VmRSS here")
	}
	return n << 10
}

func TestWhatIsFreedReturnsToTheSystem(t *testing.T) {
	debug.FreeOSMemory()
	h := host(t, 1<<30)
	const size, slack = 200<<20 + 3*PageSize, 8 << 20
	start := rss(t)
	b, err := h.Allocate(Weights, size)
	if err != nil {
		t.Fatal(err)
	}
	if grown := rss(t) - start; grown > slack {
		t.Errorf("an untouched block costs %d bytes", grown)
	}
	for i := 0; i < size; i += PageSize {
		if b.Mem().Raw()[i] != 0 {
			t.Fatalf("byte %d is not zero", i)
		}
		b.Mem().Raw()[i] = 1
	}
	if grown := rss(t) - start; grown < size-slack || grown > size+slack {
		t.Errorf("a touched block of %d bytes costs %d", int64(size), grown)
	}
	b.Free()
	if grown := rss(t) - start; grown > slack {
		t.Errorf("%d bytes stay after the free", grown)
	}
	r := reserve(t, h, Sizes{Outputs: size / 2, Scratch: size / 2})
	if grown := rss(t) - start; grown < size-slack || grown > size+slack {
		t.Errorf("a reservation of %d bytes costs %d", int64(size), grown)
	}
	r.ReleaseScratch()
	if grown := rss(t) - start; grown > size/2+slack {
		t.Errorf("%d bytes stay after the release of half", grown)
	}
	r.Release()
	if grown := rss(t) - start; grown > slack {
		t.Errorf("%d bytes stay after the release", grown)
	}
}

func TestAReservationIsResidentToThePage(t *testing.T) {
	h := host(t, 1<<30)
	for _, n := range []int64{1, 1 << 20, hugePage, hugePage + 1, 3*hugePage - 1, 2*populateRange + 5*PageSize} {
		r := reserve(t, h, Sizes{Outputs: n})
		slab := r.slabs[Outputs]
		if got := resident(t, slab); got != RoundPages(n) || slab.Bytes() != got {
			t.Errorf("%d bytes: %d are resident of a slab of %d", n, got, slab.Bytes())
		}
		b, err := h.Allocate(Weights, n)
		if err != nil {
			t.Fatal(err)
		}
		if got := resident(t, *b.mem.Load()); got != 0 {
			t.Errorf("%d bytes: %d are resident before they are touched", n, got)
		}
		for _, m := range []Mem{slab, b.Mem()} {
			if n >= hugePage && uintptr(m.ptr)%hugePage != 0 {
				t.Errorf("%d bytes begin at %p, off a huge page", n, m.ptr)
			}
		}
		// The last byte of the tail brings in its page, not a huge one.
		if RoundPages(n)%hugePage != 0 {
			b.Mem().Raw()[n-1] = 1
			if got := resident(t, *b.mem.Load()); got != PageSize {
				t.Errorf("%d bytes: one byte of the tail made %d resident", n, got)
			}
		}
		b.Free()
		r.Release()
	}
}

func TestOldKernelsFaultPagesInByTouching(t *testing.T) {
	h := host(t, 1<<30)
	populateUnknown.Store(true)
	defer populateUnknown.Store(false)
	r := reserve(t, h, Sizes{Scratch: populateRange + 7*PageSize})
	if got := resident(t, r.slabs[Scratch]); got != populateRange+7*PageSize {
		t.Errorf("%d bytes are resident", got)
	}
}

// mapped is how much address space the process has, in bytes.
func mapped(t *testing.T) int64 {
	t.Helper()
	n, _ := field(os.DirFS("/"), "proc/self/status", "VmSize:")
	return n << 10
}

func TestMappingsCostNoMoreAddressesThanTheyAreLarge(t *testing.T) {
	h := host(t, 1<<40)
	before := mapped(t)
	var blocks []*Block
	const size = 5*hugePage + PageSize
	for range 50 {
		b, err := h.Allocate(Ballast, size)
		if err != nil {
			t.Fatal(err)
		}
		blocks = append(blocks, b)
	}
	if grown := mapped(t) - before; grown < 50*size || grown > 50*size+8<<20 { // a thread more has a stack and a heap
		t.Errorf("50 blocks of %d bytes take %d bytes of addresses", int64(size), grown)
	}
	for _, b := range blocks {
		b.Free()
	}
	if grown := mapped(t) - before; grown > 8<<20 {
		t.Errorf("%d bytes of addresses stay", grown)
	}
}

func TestTheSystemsRefusalIsAnError(t *testing.T) {
	h := host(t, 1<<62)
	before := h.Stats()
	_, err := h.Allocate(Ballast, 1<<60) // no address space is as large
	if err == nil || h.Stats() != before {
		t.Errorf("%v\n%v", err, h.Stats())
	}
	t.Log(err)
}

func BenchmarkReserve(b *testing.B) {
	h, err := NewHost(2 << 30)
	if err != nil {
		b.Fatal(err)
	}
	for _, n := range []int64{PageSize, 1 << 20, 64 << 20, 1 << 30} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			var release time.Duration
			for b.Loop() {
				r, err := h.Reserve(Sizes{Scratch: n})
				if err != nil {
					b.Fatal(err)
				}
				start := time.Now()
				r.Release()
				release += time.Since(start)
			}
			b.ReportMetric(float64(release.Microseconds())/float64(b.N), "µs-release/op")
		})
	}
}
