package loader

import (
	"errors"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// directReader reads with the direct copier.
type directReader struct {
	pool  chan []byte
	files []directState
}

type directState struct {
	plain  *File
	open   *directFile                // to be closed
	direct atomic.Pointer[directFile] // nil once the file is read like any other
}

func (r *directReader) ReadAt(p []byte, file int, off int64) (n int, err error) {
	s := &r.files[file]
	d := s.direct.Load()
	if d == nil {
		return readFull(s.plain.file, p, off)
	}
	buf := <-r.pool
	defer func() { r.pool <- buf }()
	for interrupted := 0; n < len(p); {
		at := off + int64(n)
		start := at &^ (d.align - 1)
		want := min(int64(len(buf)), (at+int64(len(p)-n)-start+d.align-1)&^(d.align-1))
		m, err := d.pread(buf[:want], start)
		switch {
		case errors.Is(err, unix.EINTR) && interrupted < patience:
			interrupted++
			continue
		case err != nil && unsupported(err):
			s.direct.Store(nil)
			m = 0
		case err != nil:
			return n, err
		}
		if start+int64(m) <= at {
			// Nothing of what is wanted came: the end of the file, or a read that stopped short. The plain road can tell.
			k, err := readFull(s.plain.file, p[n:], at)
			return n + k, err
		}
		n += copy(p[n:], buf[at-start:m])
	}
	return n, nil
}

func (r *directReader) Close() error {
	var first error
	for i := range r.files {
		if o := r.files[i].open; o != nil {
			if err := o.close(); err != nil && first == nil {
				first = err
			}
		}
	}
	return first
}

func uintptrOf(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }

// mincore says for each page of m whether it is in memory.
func mincore(m, vec []byte) error {
	_, _, e := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(unsafe.SliceData(m))), uintptr(len(m)), uintptr(unsafe.Pointer(unsafe.SliceData(vec))))
	if e != 0 {
		return e
	}
	return nil
}
