package loader

import (
	"fmt"
	"io"
	"strings"
)

// Copier is a way to get bytes out of files. It declares what it costs, and there is no default for that: without costs
// nothing can be planned, and a guess would be a plan that is not kept.
type Copier interface {
	// Name is what it is called on a command line.
	Name() string
	// Costs are the bytes of the budget that reading these files takes beside what is asked for: a multiplier for each file. They
	// depend on nothing that may change before Open.
	Costs(files []*File) Costs
	// Open prepares to read the files. own is memory of as many bytes as Costs.Fixed, aligned to pages; it belongs to the reader until
	// that is closed.
	Open(files []*File, own []byte) (Reader, error)
}

// Reader reads the files that a [Copier] has opened. Its methods may be called from several goroutines, but for Close.
type Reader interface {
	// ReadAt fills p from byte off of a file on, counted as in the call of Open. It fills all of p or says why not: io.ErrUnexpectedEOF
	// for a file that ends before.
	ReadAt(p []byte, file int, off int64) (n int, err error)
	Close() error
}

// Viewer is a [Reader] that can show a range of a file where it lies. A copier with a multiplier of 0 must have one.
type Viewer interface {
	Reader
	// View calls use with n bytes of a file from byte off on, which are only there until use returns. Its error is that of use, or
	// io.ErrUnexpectedEOF if the file turns out to be shorter.
	View(file int, off, n int64, use func(data []byte) error) error
}

// overlapping is a [Reader] that counts by itself how many reads are under way, and is to be called more often than that: one call may do
// something else than read while another reads.
type overlapping interface {
	// Limit sets how many reads may be under way at once, before the first; calls is how many calls of ReadAt at once keep so many so.
	Limit(reads int) (calls int)
}

// The names of the copiers.
const (
	CopierPread  = "pread"  // buffered reads, through the page cache
	CopierDirect = "direct" // reads past the page cache, from a fixed pool of buffers
	CopierMmap   = "mmap"   // the page cache itself, mapped
)

// copiers are those of this system, by name.
var copiers = map[string]func(threads int) Copier{
	CopierPread: func(int) Copier { return pread{} },
}

// CopierNames are the copiers of this system.
func CopierNames() []string {
	var names []string
	for _, n := range []string{CopierPread, CopierDirect, CopierMmap} {
		if copiers[n] != nil {
			names = append(names, n)
		}
	}
	return names
}

// NewCopier is the copier of that name, for that many threads, which are at least 1.
func NewCopier(name string, threads int) (Copier, error) {
	c := copiers[name]
	if c == nil {
		return nil, fmt.Errorf("copier %s is not known; there are %s", quote(name), strings.Join(CopierNames(), ", "))
	}
	return c(max(threads, 1)), nil
}

// plainCost is a cost of one byte for each byte read.
func plainCost(files []*File) []Ratio {
	m := make([]Ratio, len(files))
	for i := range m {
		m[i] = Ratio{1, 1}
	}
	return m
}

// pread reads through the page cache. It works for every file.
type pread struct{}

func (pread) Name() string              { return CopierPread }
func (pread) Costs(files []*File) Costs { return Costs{Multiplier: plainCost(files)} }

func (pread) Open(files []*File, _ []byte) (Reader, error) { return preadReader(files), nil }

type preadReader []*File

func (r preadReader) ReadAt(p []byte, file int, off int64) (int, error) {
	return readFull(r[file].file, p, off)
}

func (preadReader) Close() error { return nil }

// Probe finds the copier that reads a set's files fastest, by trying: direct if they are large, not in the page cache, and can be read
// so; otherwise pread, which is never wrong. It reads a few bytes and no more.
func Probe(set *Set, threads int) Copier {
	if direct := copiers[CopierDirect]; direct != nil && set.TotalBytes() >= probeLeast && probeDirect(set) {
		return direct(max(threads, 1))
	}
	return pread{}
}

// probeLeast is from how many bytes on a set may be worth the pool of the direct copier.
const probeLeast = 256 << 20

var _ io.Closer = Reader(nil)
