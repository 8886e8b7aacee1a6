package loader

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
)

// read fills p from byte off of the file on. An error is a [*ReadError].
func (f *File) read(p []byte, off int64, tensor string) error {
	n, err := readFull(f.file, p, off)
	if err == nil {
		return nil
	}
	return &ReadError{Path: f.Path, Tensor: tensor, Offset: off, Want: int64(len(p)), Got: int64(n), Err: err}
}

// ReadAt fills p with the bytes of t from byte off of the tensor on. It fills all of p or returns an error: a [*ReadError],
// or one about the arguments if the range is not inside the tensor. p then holds nothing of use.
func (s *Set) ReadAt(t *Tensor, p []byte, off int64) error {
	f, err := s.check(t, off, int64(len(p)))
	if err != nil {
		return fmt.Errorf("read: %w", err)
	}
	if len(p) == 0 {
		return nil
	}
	return f.read(p, t.Offset+off, t.Name)
}

// check finds the file of a range of a tensor, and holds the range against the tensor.
func (s *Set) check(t *Tensor, off, n int64) (*File, error) {
	switch {
	case t == nil:
		return nil, errors.New("no tensor")
	case s.byName[t.Name] != t:
		return nil, fmt.Errorf("tensor %s is not of this model", quote(t.Name))
	case off < 0 || n < 0 || off > t.Bytes || n > t.Bytes-off:
		return nil, fmt.Errorf("tensor %s has %d bytes; %d from byte %d on are not inside it", quote(t.Name), t.Bytes, n, off)
	}
	return s.Files[t.File], nil
}

// Verify checks that every file is still the one that was opened: same size, same time of change, and on the operating
// system's file systems same inode. The error is a [*ChangedError], or a [*FilesError] of several.
func (s *Set) Verify() error {
	errs := make([]error, len(s.Files))
	for i, f := range s.Files {
		errs[i] = f.verify(s.src)
	}
	return gather("verify", s.shown, errs)
}

func (f *File) verify(src source) error {
	now, err := src.stat(f.name)
	if errors.Is(err, fs.ErrNotExist) {
		return &ChangedError{Path: f.Path, Problem: "it is gone"}
	}
	if err != nil {
		return &ChangedError{Path: f.Path, Problem: "the file cannot be looked at", Err: err}
	}
	switch {
	case now.Size() != f.Size:
		return &ChangedError{Path: f.Path, Problem: fmt.Sprintf("it has %d bytes, and had %d", now.Size(), f.Size)}
	// A file system that has no inodes does not know a file as itself either.
	case os.SameFile(f.info, f.info) && !os.SameFile(f.info, now):
		return &ChangedError{Path: f.Path, Problem: "another file stands in its place"}
	case !now.ModTime().Equal(f.info.ModTime()):
		return &ChangedError{Path: f.Path, Problem: fmt.Sprintf("written to at %v, and opened as of %v", now.ModTime(), f.info.ModTime())}
	}
	return nil
}
