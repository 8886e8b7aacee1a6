package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// fileError is a file that cannot be read or written, named as the user named it.
type fileError struct {
	what string // "write the answers to"
	path string
	err  error
}

func (e *fileError) Error() string { return fmt.Sprintf("%s %s: %v", e.what, e.path, cause(e.err)) }
func (e *fileError) Unwrap() error { return e.err }

// cause is an error without the path that the operating system's errors carry: it may be that of a temporary file.
func cause(err error) error {
	var at *fs.PathError
	if errors.As(err, &at) {
		return at.Err
	}
	var link *os.LinkError
	if errors.As(err, &link) {
		return link.Err
	}
	return err
}

// target is where an output goes.
type target struct {
	path   string      // behind all links, so that a link stays one
	direct bool        // no regular file: it is written as it is
	mode   fs.FileMode // of the file that is replaced; 0: there is none
}

// destination finds out where an output goes, and whether it may.
func destination(path string) (t target, err error) {
	t.path = filepath.Clean(path)
	for range 40 { // as many links as Linux follows
		// These name open files of this process. What they link to is not always a path.
		if t.direct = strings.HasPrefix(t.path, "/proc/") || strings.HasPrefix(t.path, "/dev/fd/"); t.direct {
			break
		}
		to, err := os.Readlink(t.path)
		if err != nil {
			break
		}
		if !filepath.IsAbs(to) {
			to = filepath.Dir(t.path) + string(filepath.Separator) + to // not joined: .. leads out of where a folder's link leads
		}
		t.path = to
	}
	fi, err := os.Stat(t.path)
	switch {
	case errors.Is(err, fs.ErrNotExist) && !t.direct:
		return t, nil
	case err != nil:
		return t, err
	case fi.IsDir():
		return t, syscall.EISDIR
	case !fi.Mode().IsRegular():
		t.direct = true
	}
	if !t.direct {
		t.mode = fi.Mode().Perm()
		f, err := os.OpenFile(t.path, os.O_WRONLY, 0) // a file that may not be written must not be replaced either
		if err != nil {
			return t, err
		}
		f.Close()
	}
	return t, nil
}

// temporary makes an empty file beside the target.
func (t target) temporary() (*os.File, error) {
	for {
		name := filepath.Join(filepath.Dir(t.path), fmt.Sprintf(".trainerrank-%08x.tmp", rand.Uint32()))
		f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
		if !errors.Is(err, fs.ErrExist) {
			return f, err
		}
	}
}

// probe says whether writeFile could write to path now, so that a long run does not end in finding out.
func probe(path string) error {
	t, err := destination(path)
	if err != nil || t.direct {
		return err
	}
	f, err := t.temporary()
	if err != nil {
		return err
	}
	return errors.Join(f.Close(), os.Remove(f.Name()))
}

// writeFile writes a file whole or not at all: what write produces goes to a temporary file beside it, which then takes its name and, if
// there was such a file, its mode. What is there and is no regular file (a pipe, a terminal) is written to as it is.
func writeFile(ctx context.Context, path string, write func(w io.Writer) error) (err error) {
	t, err := destination(path)
	if err != nil {
		return err
	}
	if t.direct {
		f, err := await(ctx, func() (*os.File, error) { return os.OpenFile(t.path, os.O_WRONLY|os.O_APPEND, 0) })
		if err != nil {
			return err
		}
		return errors.Join(write(interruptible{ctx, f}), f.Close())
	}
	f, err := t.temporary()
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			f.Close() // again, if that is what failed
			os.Remove(f.Name())
		}
	}()
	if err := write(interruptible{ctx, f}); err != nil {
		return err
	}
	if t.mode != 0 {
		if err := f.Chmod(t.mode); err != nil {
			return err
		}
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	return os.Rename(f.Name(), t.path)
}

// interruptible is a writer that stops when the context ends, also while a full pipe keeps it waiting.
type interruptible struct {
	ctx context.Context
	w   io.Writer
}

func (i interruptible) Write(p []byte) (int, error) {
	if err := i.ctx.Err(); err != nil {
		return 0, err
	}
	return await(i.ctx, func() (int, error) { return i.w.Write(p) })
}

// await waits for fn or for the end of the context. It is for what may block for ever and cannot be cancelled, like opening a pipe; fn is
// then left behind.
func await[T any](ctx context.Context, fn func() (T, error)) (T, error) {
	type result struct {
		value T
		err   error
	}
	done := make(chan result, 1)
	go func() {
		v, err := fn()
		done <- result{v, err}
	}()
	select {
	case r := <-done:
		return r.value, r.err
	case <-ctx.Done():
		var none T
		return none, ctx.Err()
	}
}
