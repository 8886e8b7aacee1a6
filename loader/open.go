package loader

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
)

// Set is the tensors of one model, in one file or several, open for reading. Its methods may be used by several
// goroutines at once, but for Close.
type Set struct {
	Files    []*File  // in the order of their names; not to be changed
	Warnings []string // what is odd but does no harm, each a sentence without a full stop

	src    source
	shown  string // what an error about several files is about
	byName map[string]*Tensor
	total  int64
}

// File is one open file of a [Set].
type File struct {
	Path      string            // as it is to be shown
	Size      int64             // bytes
	DataStart int64             // bytes before the first tensor: 8 and the length of the header
	Tensors   []*Tensor         // those to be read from this file, in the order of their bytes
	Metadata  map[string]string // the header's; nil if it has none
	Ignored   int               // tensors that are in the file, but not for this file in the index

	name string // in the source
	disk string // path on the operating system's file system; empty if it is elsewhere
	info fs.FileInfo
	file file
}

// Open opens a model: a folder, or one file of any name.
//
// In a folder, model.safetensors.index.json says which files to read and which tensors of them; they are all in the folder or
// below it. Without an index, model.safetensors is read. Other files are never read, whatever their names.
//
// All headers are read, and every file's size is held against its header, so that a set that has been opened has all its
// bytes. Links are followed. The error is a [*FormatError], [*IndexError], [*ReadError], a [*FilesError] of several, or
// what the operating system said.
func Open(dir string) (*Set, error) { return ParseOptions{}.Open(dir) }

// OpenFS opens the model folder that is the root of fsys, whose files must be [io.ReaderAt] (those of embed.FS and
// os.DirFS are) and may be opened by several goroutines at once. label stands before the names of files where they are shown.
func OpenFS(fsys fs.FS, label string) (*Set, error) { return ParseOptions{}.OpenFS(fsys, label) }

// Open is the function [Open], with these options.
func (o ParseOptions) Open(dir string) (*Set, error) {
	info, err := os.Stat(dir)
	if err != nil {
		return nil, fmt.Errorf("open model: %w", err)
	}
	if info.IsDir() {
		return o.openFolder(osSource(dir), dir)
	}
	return o.openFiles(osSource(filepath.Dir(dir)), dir, []string{filepath.Base(dir)}, nil)
}

// OpenFS is the function [OpenFS], with these options.
func (o ParseOptions) OpenFS(fsys fs.FS, label string) (*Set, error) {
	return o.openFolder(fsSource{fsys, label}, label)
}

func (o ParseOptions) openFolder(src source, folder string) (*Set, error) {
	_, err := src.stat(indexName)
	switch {
	case err == nil || src.isLink(indexName): // a link that leads nowhere was meant to be an index
		x, err := readIndex(src)
		if err != nil {
			return nil, err
		}
		return o.openFiles(src, src.show(indexName), x.files, x)
	case !errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("open model: %w", err)
	}
	if _, err := src.stat(singleName); errors.Is(err, fs.ErrNotExist) && !src.isLink(singleName) {
		e := &IndexError{
			Path: folder, Problem: fmt.Sprintf("the folder has neither %s nor %s", indexName, singleName),
			Unlisted: weightFiles(src),
		}
		switch n := len(e.Unlisted); {
		case n == 1:
			e.Hint = fmt.Sprintf("if %s is the model, give its own path", quote(e.Unlisted[0]))
		case n > 1:
			e.Hint = "without an index nothing says which of these files belong together; get the checkpoint's " + indexName
		}
		return nil, e
	}
	return o.openFiles(src, src.show(singleName), []string{singleName}, nil)
}

// openFiles opens the named files. x is nil for a single file.
func (o ParseOptions) openFiles(src source, shown string, names []string, x *index) (*Set, error) {
	s := &Set{src: src, shown: shown, Files: make([]*File, len(names))}
	if x != nil {
		if err := checkPresent(src, shown, names); err != nil {
			return nil, err
		}
	}
	headers := make([]*Header, len(names))
	errs := make([]error, len(names))
	each(len(names), func(i int) {
		s.Files[i], headers[i], errs[i] = o.openFile(src, names[i])
	})
	err := gather("open", shown, errs)
	if err == nil {
		if x == nil {
			s.adopt(headers[0])
		} else {
			err = s.assign(o, x, headers)
		}
	}
	if err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// checkPresent looks for all files that the index names before any is opened.
func checkPresent(src source, shown string, names []string) error {
	var missing []string
	dangling := 0
	for _, name := range names {
		if _, err := src.stat(name); errors.Is(err, fs.ErrNotExist) {
			missing = append(missing, name)
			if src.isLink(name) {
				dangling++
			}
		}
	}
	if missing == nil {
		return nil
	}
	e := &IndexError{
		Path: shown, Missing: missing,
		Problem: fmt.Sprintf("%d of the %d files that the index names are not there", len(missing), len(names)),
		Hint:    "a download stopped early; fetch the missing files",
	}
	for _, there := range weightFiles(src) {
		if !slices.Contains(names, there) {
			e.Unlisted = append(e.Unlisted, there)
		}
	}
	switch {
	case dangling > 0:
		e.Hint = fmt.Sprintf("%d of them are links to files that are gone, as after a clean-up of the cache; fetch them again", dangling)
	case len(e.Unlisted) > 0:
		e.Hint = "the index may be of another version of the model than the files; fetch both again"
	}
	return e
}

// each calls do for 0 to n-1, several at a time: headers on a network file system are a matter of latency.
func each(n int, do func(i int)) {
	var next atomic.Int64
	var wg sync.WaitGroup
	for range min(n, max(4, runtime.GOMAXPROCS(0))) {
		wg.Go(func() {
			for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
				do(i)
			}
		})
	}
	wg.Wait()
}

// gather makes one error of those of several files.
func gather(op, shown string, errs []error) error {
	e := &FilesError{Op: op, Path: shown, Total: len(errs)}
	for _, err := range errs {
		if err == nil {
			continue
		}
		e.Errs = append(e.Errs, err)
		if f, ok := err.(*FormatError); ok {
			e.Missing += f.Missing
		}
	}
	switch len(e.Errs) {
	case 0:
		return nil
	case 1:
		return e.Errs[0]
	}
	return e
}

// openFile opens one file and reads its header. The file is closed again if there is an error.
func (o ParseOptions) openFile(src source, name string) (*File, *Header, error) {
	f := &File{Path: src.show(name), name: name}
	if dir, ok := src.(osSource); ok {
		f.disk = dir.path(name)
	}
	// Look before opening: the open itself would hang on a pipe and could upset a device.
	info, err := src.stat(name)
	if err == nil && !info.Mode().IsRegular() {
		return nil, nil, &FormatError{Path: f.Path, Problem: "not a file", Found: kindOf(info.Mode()), Want: "a safetensors file"}
	}
	if err == nil {
		f.file, err = src.open(name)
	}
	if err != nil {
		return nil, nil, err
	}
	h, err := f.readHeader(o)
	if err != nil {
		err = f.explain(err) // looks into the file
		f.file.Close()
		return nil, nil, err
	}
	f.DataStart = h.DataStart
	f.Metadata = h.Metadata
	return f, h, nil
}

func (f *File) readHeader(o ParseOptions) (*Header, error) {
	var err error
	if f.info, err = f.file.Stat(); err != nil {
		return nil, err
	}
	f.Size = f.info.Size()
	if f.Size < prefixSize {
		return nil, &FormatError{
			Problem: "the file is too short for the length of a header", Found: fmt.Sprintf("%d bytes", f.Size),
			Want: "at least 8 bytes", Missing: prefixSize - f.Size, Hint: truncatedHint,
		}
	}
	var prefix [prefixSize]byte
	if err := f.read(prefix[:], 0, ""); err != nil {
		return nil, err
	}
	n := binary.LittleEndian.Uint64(prefix[:])
	if n == 0 {
		// Some network file systems have been seen to return zeros for pages of a sound file once. Ask again, once.
		if err := f.read(prefix[:], 0, ""); err != nil {
			return nil, err
		}
		n = binary.LittleEndian.Uint64(prefix[:])
	}
	switch {
	case n == 0:
		return nil, &FormatError{Problem: "all-zero header", Found: "a header of 0 bytes", Hint: zeroHint}
	case n > MaxHeader:
		return nil, headerTooLong(n)
	case int64(n) > f.Size-prefixSize:
		return nil, headerBeyondEnd(int64(n), f.Size)
	}
	header := make([]byte, n)
	if err := f.read(header, prefixSize, ""); err != nil {
		return nil, err
	}
	if header[0] == 0 && !slices.ContainsFunc(header, func(c byte) bool { return c != 0 }) {
		return nil, &FormatError{Offset: prefixSize, Problem: "all-zero header", Found: fmt.Sprintf("%d zero bytes", n), Hint: zeroHint}
	}
	return ParseHeader(header, f.Size, o)
}

// explain completes an error of the header with the file's name and with what the file may be instead.
func (f *File) explain(err error) error {
	e, ok := err.(*FormatError)
	if !ok {
		return err
	}
	e.Path = f.Path
	// A fault of a tensor is one of a safetensors file, however broken.
	if e.Tensor == "" && e.Hint != truncatedHint || f.Size < prefixSize {
		if what, hint := sniff(f.file, f.Size); what != "" {
			e.Problem += "; the file is " + what
			e.Hint = hint
			e.Missing = 0
		} else if e.Missing > 0 {
			e.Hint = truncatedHint
		}
	}
	return e
}

// adopt takes all tensors of a single file.
func (s *Set) adopt(h *Header) {
	s.Files[0].Tensors = h.Tensors
	s.byName = h.byName
	for _, t := range h.Tensors {
		s.total += t.Bytes
	}
}

// assign takes from each file the tensors that the index assigns to it.
func (s *Set) assign(o ParseOptions, x *index, headers []*Header) error {
	s.byName = make(map[string]*Tensor, len(x.of))
	for i, h := range headers {
		f := s.Files[i]
		var extra string
		for _, t := range h.Tensors {
			if at, listed := x.of[t.Name]; !listed || at != i {
				extra = t.Name
				f.Ignored++
				continue
			}
			t.File = i
			f.Tensors = append(f.Tensors, t)
			s.byName[t.Name] = t
			s.total += t.Bytes
		}
		if f.Ignored == 0 {
			continue
		}
		if o.Strict {
			return &IndexError{Path: s.shown, Problem: fmt.Sprintf("%d tensors of %s, %s among them, are not assigned to it",
				f.Ignored, quote(f.name), quote(extra))}
		}
		s.Warnings = append(s.Warnings, fmt.Sprintf("%d tensors of %s are ignored: the index does not assign them to it", f.Ignored, f.Path))
	}
	if len(s.byName) < len(x.of) {
		return s.absent(x, headers)
	}
	if w := x.sizeWarning(s.total); w != "" {
		s.Warnings = append(s.Warnings, w)
	}
	return nil
}

func (s *Set) absent(x *index, headers []*Header) error {
	e := &IndexError{Path: s.shown}
	for name, i := range x.of {
		if s.byName[name] != nil {
			continue
		}
		a := AbsentTensor{Name: name, File: x.files[i]}
		for j, h := range headers {
			if h.byName[name] != nil {
				a.Elsewhere = x.files[j]
				break
			}
		}
		e.Absent = append(e.Absent, a)
	}
	slices.SortFunc(e.Absent, func(a, b AbsentTensor) int { return strings.Compare(a.Name, b.Name) })
	e.Problem = fmt.Sprintf("%d of the %d tensors of the index are not in the files that it names for them", len(e.Absent), len(x.of))
	e.Hint = "the index may be of another version of the model than the files; fetch both again"
	return e
}

// Tensor returns the tensor with this name, and whether the model has it.
func (s *Set) Tensor(name string) (*Tensor, bool) {
	t, ok := s.byName[name]
	return t, ok
}

// Names are the names of all tensors, sorted. Each call makes a new list.
func (s *Set) Names() []string {
	names := make([]string, 0, len(s.byName))
	for name := range s.byName {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// TotalBytes is the size of all tensors together.
func (s *Set) TotalBytes() int64 { return s.total }

// Close closes all files. Tensors keep their names and shapes, but no more bytes can be read. Closing twice is no error.
func (s *Set) Close() error {
	var first error
	for _, f := range s.Files {
		if f == nil || f.file == nil {
			continue
		}
		if err := f.file.Close(); err != nil && first == nil && !errors.Is(err, fs.ErrClosed) {
			first = err
		}
	}
	return first
}
