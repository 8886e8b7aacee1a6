package loader

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"syscall"
)

// A source is a model folder: on the operating system's file system, or in an fs.FS. Names are relative, with slashes.
type source interface {
	show(name string) string // the name to be shown
	// stat follows links.
	stat(name string) (fs.FileInfo, error)
	isLink(name string) bool
	open(name string) (file, error)
	list() ([]fs.DirEntry, error)
}

// A file is what is needed of an open one.
type file interface {
	io.ReaderAt
	io.Closer
	Stat() (fs.FileInfo, error)
}

// osSource is a folder of the operating system. It is not an [os.Root], because that refuses links that lead out of the
// folder, and model caches are full of them.
type osSource string

func (dir osSource) path(name string) string {
	return filepath.Join(string(dir), filepath.FromSlash(name))
}

func (dir osSource) show(name string) string               { return dir.path(name) }
func (dir osSource) stat(name string) (fs.FileInfo, error) { return os.Stat(dir.path(name)) }
func (dir osSource) list() ([]fs.DirEntry, error)          { return os.ReadDir(string(dir)) }

func (dir osSource) isLink(name string) bool {
	info, err := os.Lstat(dir.path(name))
	return err == nil && info.Mode()&fs.ModeSymlink != 0
}

func (dir osSource) open(name string) (file, error) {
	f, err := os.Open(dir.path(name))
	if err != nil {
		return nil, err // not f: a nil *os.File in an interface is not nil
	}
	return f, nil
}

type fsSource struct {
	fsys  fs.FS
	label string
}

func (s fsSource) show(name string) string               { return path.Join(s.label, name) }
func (s fsSource) stat(name string) (fs.FileInfo, error) { return fs.Stat(s.fsys, name) }
func (s fsSource) list() ([]fs.DirEntry, error)          { return fs.ReadDir(s.fsys, ".") }

func (s fsSource) isLink(name string) bool {
	info, err := fs.Lstat(s.fsys, name)
	return err == nil && info.Mode()&fs.ModeSymlink != 0
}

func (s fsSource) open(name string) (file, error) {
	f, err := s.fsys.Open(name)
	if err != nil {
		return nil, err
	}
	if r, ok := f.(file); ok {
		return r, nil
	}
	f.Close()
	return nil, fmt.Errorf("open %s: the file system has no random access (its files are no io.ReaderAt)", s.show(name))
}

// kindOf names what is not a regular file.
func kindOf(m fs.FileMode) string {
	switch {
	case m.IsDir():
		return "a directory"
	case m&fs.ModeNamedPipe != 0:
		return "a pipe"
	case m&fs.ModeSocket != 0:
		return "a socket"
	case m&fs.ModeDevice != 0:
		return "a device"
	}
	return "not a regular file"
}

// weightFiles lists the weight files of a folder: what a user who sees an error about the folder wants to know.
func weightFiles(src source) []string {
	entries, err := src.list()
	if err != nil {
		return nil
	}
	var names []string
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), suffix) && !e.IsDir() {
			names = append(names, e.Name())
		}
	}
	return names
}

// patience is how often in a row a read may bring nothing, or be interrupted.
const patience = 100

// readFull fills p from byte off on. It goes on after a short read and after an interrupted one, and gives up when
// nothing comes. An end before p is full is io.ErrUnexpectedEOF, also if not one byte came.
func readFull(r io.ReaderAt, p []byte, off int64) (n int, err error) {
	for idle := 0; n < len(p); {
		m, err := r.ReadAt(p[n:], off+int64(n))
		if m < 0 || m > len(p)-n {
			return n, fmt.Errorf("the reader claims to have read %d of %d bytes", m, len(p)-n)
		}
		n += m
		if m > 0 {
			idle = 0
		} else {
			idle++
		}
		switch {
		case n == len(p):
			return n, nil // whatever err is: the bytes are there
		case errors.Is(err, io.EOF):
			return n, io.ErrUnexpectedEOF
		case err != nil && !errors.Is(err, syscall.EINTR):
			return n, err
		case idle == patience:
			if err == nil {
				err = io.ErrNoProgress
			}
			return n, err
		}
	}
	return n, nil
}
