package loader

import (
	"errors"
	"io"
	"os"
	"runtime"
	"runtime/debug"

	"golang.org/x/sys/unix"
)

func init() {
	copiers[CopierDirect] = func(threads int) Copier { return &direct{threads: threads, open: openDirect} }
	copiers[CopierMmap] = func(int) Copier { return mapped{} }
}

// errNotOnDisk says that a file has no path.
var errNotOnDisk = errors.New("the file is not on the operating system's file system")

// reopen opens a file again with other flags, and makes sure that it is the one that was opened first.
func reopen(f *File, flags int) (*os.File, error) {
	if f.disk == "" {
		return nil, errNotOnDisk
	}
	o, err := os.OpenFile(f.disk, os.O_RDONLY|flags, 0)
	if err != nil {
		return nil, err
	}
	info, err := o.Stat()
	if err == nil && !os.SameFile(info, f.info) {
		err = &ChangedError{Path: f.Path, Problem: "another file stands in its place"}
	}
	if err != nil {
		o.Close()
		return nil, err
	}
	return o, nil
}

// Each thread of the direct copier has directBuffers buffers, so that one is copied out of while the drive fills the other. Those
// of a thread are directBlock bytes together and with that multiples of 2 MiB: what the kernel needs to give the pool huge pages. A direct read to
// a small page for each 4 KiB takes the kernel longer than the drive.
//
// For a set that is not large, all of that might be more than what is loaded. It gets directSmall, which is slower for each byte.
const (
	directBuffers = 2
	directBlock   = 4 << 20
	directSmall   = 1 << 20
)

// direct reads past the page cache (O_DIRECT). What can be read so begins and ends at multiples of the file system's alignment, so
// each read goes to a buffer of a fixed pool, and what is wanted of it is copied on.
//
// Where a file system does not know such reads, which may show when a file is opened or only at its first read, the file is read
// like any other.
type direct struct {
	threads int
	open    func(*File) (*directFile, error)
}

// directFile is an open file for direct reads.
type directFile struct {
	pread func(p []byte, off int64) (int, error) // one read, perhaps short
	close func() error
	align int64 // of offsets, lengths and memory; a power of two
}

func (*direct) Name() string { return CopierDirect }

func (d *direct) Costs(files []*File) Costs {
	return Costs{Multiplier: plainCost(files), Fixed: int64(d.threads) * directEach(files)}
}

// directEach is the bytes of the buffers of one thread.
func directEach(files []*File) int64 {
	var total int64
	for _, f := range files {
		total = satAdd(total, f.Size)
	}
	if total < probeLeast {
		return directSmall
	}
	return directBlock
}

// unsupported says whether an error means that a file cannot be read directly, and not that something is wrong with it.
func unsupported(err error) bool {
	return errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOTSUP) || errors.Is(err, unix.ENOSYS) || errors.Is(err, errNotOnDisk)
}

func openDirect(f *File) (*directFile, error) {
	o, err := reopen(f, unix.O_DIRECT)
	if err != nil {
		return nil, err
	}
	d := &directFile{
		pread: func(p []byte, off int64) (int, error) {
			n, err := unix.Pread(int(o.Fd()), p, off)
			runtime.KeepAlive(o)
			return n, err
		},
		close: o.Close, align: 4096,
	}
	var st unix.Statx_t
	if err := unix.Statx(int(o.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_DIOALIGN, &st); err == nil && st.Mask&unix.STATX_DIOALIGN != 0 {
		d.align = int64(max(st.Dio_offset_align, st.Dio_mem_align))
		if st.Dio_offset_align == 0 || d.align&(d.align-1) != 0 || d.align > 4096 { // the pool is aligned to pages
			o.Close()
			return nil, unix.ENOTSUP
		}
	}
	return d, nil
}

func (d *direct) Open(files []*File, own []byte) (Reader, error) {
	r := &directReader{
		pool: make(chan []byte, d.threads*directBuffers), reading: make(chan struct{}, d.threads), files: make([]directState, len(files)),
	}
	buffer := int(directEach(files) / directBuffers)
	for range cap(r.pool) {
		r.pool <- own[:buffer:buffer]
		own = own[buffer:]
	}
	for i, f := range files {
		r.files[i].plain = f
		o, err := d.open(f)
		if err == nil {
			r.files[i].direct.Store(o)
			r.files[i].open = o
		} else if !unsupported(err) {
			r.Close()
			return nil, err
		}
	}
	return r, nil
}

// probeDirect says whether reading directly is best: it works for all files, and less than half of a sample is in the page cache.
func probeDirect(set *Set) bool {
	var inCache, looked int64
	for _, f := range set.Files {
		o, err := openDirect(f)
		if err != nil {
			return false
		}
		_, err = o.pread(alignedPage(), 0)
		o.close()
		if err != nil {
			return false
		}
		a, b := cached(f)
		inCache += a
		looked += b
	}
	return inCache*2 < looked
}

// alignedPage is a page at the start of a page.
func alignedPage() []byte {
	b := make([]byte, 2*4096)
	skip := -int(uintptrOf(b)) & 4095
	return b[skip : skip+4096]
}

// cached looks at a sample of a file's pages: how many are in the page cache, of how many.
func cached(f *File) (in, looked int64) {
	const windows, window = 16, 1 << 20
	o, err := reopen(f, 0)
	if err != nil {
		return 0, 0
	}
	defer o.Close()
	page := int64(os.Getpagesize())
	step := max(f.Size/windows, window)
	for off := int64(0); off < f.Size; off += step {
		n := min(window, f.Size-off)
		m, err := unix.Mmap(int(o.Fd()), off/page*page, int(n), unix.PROT_READ, unix.MAP_SHARED)
		if err != nil {
			return 0, 0
		}
		vec := make([]byte, (n+page-1)/page)
		if mincore(m, vec) == nil {
			for _, v := range vec {
				in += int64(v & 1)
			}
			looked += int64(len(vec))
		}
		_ = unix.Munmap(m)
	}
	return in, looked
}

// mapped reads the page cache where it is. The mapping is the kernel's memory, given back when it wants it, so it costs nothing of the
// budget.
type mapped struct{}

func (mapped) Name() string { return CopierMmap }

func (mapped) Costs(files []*File) Costs {
	m := make([]Ratio, len(files))
	for i := range m {
		m[i] = Ratio{0, 1}
	}
	return Costs{Multiplier: m}
}

func (mapped) Open(files []*File, _ []byte) (Reader, error) {
	var r mappedReader
	for _, f := range files {
		m, err := mapFile(f)
		if err != nil {
			r.Close()
			return nil, &CopierError{Copier: CopierMmap, Path: f.Path, Err: err}
		}
		r = append(r, m)
	}
	return r, nil
}

func mapFile(f *File) ([]byte, error) {
	o, err := reopen(f, 0)
	if err != nil {
		return nil, err
	}
	defer o.Close()
	if int64(int(f.Size)) != f.Size {
		return nil, unix.ENOMEM
	}
	m, err := unix.Mmap(int(o.Fd()), 0, int(f.Size), unix.PROT_READ, unix.MAP_SHARED)
	if err == nil {
		_ = unix.Madvise(m, unix.MADV_SEQUENTIAL) // only advice
	}
	return m, err
}

type mappedReader [][]byte

func (r mappedReader) ReadAt(p []byte, file int, off int64) (n int, err error) {
	err = r.View(file, off, int64(len(p)), func(data []byte) error {
		n = copy(p, data)
		return nil
	})
	return n, err
}

// View turns the fault that touching pages behind the end of a truncated file is into an error. Other panics pass.
func (r mappedReader) View(file int, off, n int64, use func([]byte) error) (err error) {
	m := r[file]
	if off < 0 || n < 0 || off > int64(len(m))-n {
		return io.ErrUnexpectedEOF
	}
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if p := recover(); p != nil {
			at, ok := p.(interface{ Addr() uintptr })
			if base := uintptrOf(m); !ok || at.Addr() < base || at.Addr()-base >= uintptr(len(m)) {
				panic(p)
			}
			err = io.ErrUnexpectedEOF
		}
	}()
	return use(m[off : off+n : off+n])
}

func (r mappedReader) Close() error {
	for _, m := range r {
		if err := unix.Munmap(m); err != nil {
			return err
		}
	}
	return nil
}
