package loader

import (
	"errors"
	"runtime"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// directReader reads with the direct copier.
type directReader struct {
	pool    chan []byte
	reading chan struct{} // one for each read under way
	files   []directState
}

// Limit implements overlapping: while one call reads, another copies out of its buffer what it has read.
func (r *directReader) Limit(reads int) (calls int) {
	if reads < cap(r.reading) {
		r.reading = make(chan struct{}, reads)
	}
	return cap(r.reading) * directBuffers
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
		return r.plain(s, p, off)
	}
	buf := <-r.pool
	defer func() { r.pool <- buf }()
	for interrupted := 0; n < len(p); {
		at := off + int64(n)
		start := at &^ (d.align - 1)
		want := min(int64(len(buf)), (at+int64(len(p)-n)-start+d.align-1)&^(d.align-1))
		m, err := r.read(d, buf[:want], start)
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
			k, err := r.plain(s, p[n:], at)
			return n + k, err
		}
		n += copy(p[n:], buf[at-start:m])
	}
	return n, nil
}

// read is one direct read, begun when it is its turn.
func (r *directReader) read(d *directFile, p []byte, off int64) (int, error) {
	r.reading <- struct{}{}
	n, err := d.pread(p, off)
	<-r.reading
	runtime.Gosched() // on a single processor, whoever waits for its turn must be let go before this one copies
	return n, err
}

// plain reads through the page cache when it is its turn.
func (r *directReader) plain(s *directState, p []byte, off int64) (int, error) {
	r.reading <- struct{}{}
	defer func() { <-r.reading }()
	return readFull(s.plain.file, p, off)
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
