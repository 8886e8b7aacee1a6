package kernel

import (
	"os"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// fence hands out slices that border on memory which cannot be touched: an access past the edge ends the process.
type fence struct {
	tb    testing.TB
	maps  [][]byte
	whole [][]byte // the part of each map that may be touched
	used  [][2]int // the bytes of it that were handed out
}

const canary = 0xa5

func (f *fence) bytes(n int, atEnd bool) []byte {
	page := os.Getpagesize()
	size := (n+page-1)/page*page + page
	m, err := unix.Mmap(-1, 0, size+2*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		f.tb.Fatal(err)
	}
	for _, p := range [][]byte{m[:page], m[len(m)-page:]} {
		if err := unix.Mprotect(p, unix.PROT_NONE); err != nil {
			f.tb.Fatal(err)
		}
	}
	w := m[page : len(m)-page]
	for i := range w {
		w[i] = canary
	}
	at := 0
	if atEnd {
		at = len(w) - n
	}
	f.maps, f.whole, f.used = append(f.maps, m), append(f.whole, w), append(f.used, [2]int{at, at + n})
	return w[at : at+n : at+n]
}

// close checks that nothing beside the slices was written and gives all of them up.
func (f *fence) close() {
	f.tb.Helper()
	for i, w := range f.whole {
		for j, b := range w {
			if (j < f.used[i][0] || j >= f.used[i][1]) && b != canary {
				f.tb.Errorf("byte %d beside a slice of %d was written", j-f.used[i][0], f.used[i][1]-f.used[i][0])
				break
			}
		}
		if err := unix.Munmap(f.maps[i]); err != nil {
			f.tb.Error(err)
		}
	}
	f.maps, f.whole, f.used = nil, nil, nil
}

func fenced[T any](f *fence, x []T, atEnd bool) []T {
	var zero T
	b := f.bytes(len(x)*int(unsafe.Sizeof(zero)), atEnd)
	s := unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), len(x))
	copy(s, x)
	return s
}
