package loader

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/fstest"
	"time"
)

// odd is an open file whose reads go through a hook.
type odd struct {
	fs.File
	hook func(r io.ReaderAt, p []byte, off int64) (int, error)
}

func (o odd) ReadAt(p []byte, off int64) (int, error) { return o.hook(o.File.(io.ReaderAt), p, off) }

type oddFS struct {
	fstest.MapFS
	hook func(r io.ReaderAt, p []byte, off int64) (int, error)
}

func (o oddFS) Open(name string) (fs.File, error) {
	f, err := o.MapFS.Open(name)
	if err != nil || name == "." {
		return f, err
	}
	return odd{f, o.hook}, nil
}

// leaks fails the test if goroutines are left when it ends.
func leaks(t *testing.T) {
	before := runtime.NumGoroutine()
	t.Cleanup(func() {
		for range 100 {
			if runtime.NumGoroutine() <= before {
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
		t.Errorf("%d goroutines, %d before", runtime.NumGoroutine(), before)
	})
}

// matrix is a folder with tensors "w" U8 [rows, cols], "b" U8 [cols] in one file and "v" alike to "w" in another.
func matrix(rows, cols int) fstest.MapFS {
	n := rows * cols
	return fstest.MapFS{
		indexName: {Data: []byte(weightMap("w", s1, "b", s1, "v", s2))},
		s1:        {Data: whole(header(entry("b", "U8", fmt.Sprintf("[%d]", cols), 0, cols), entry("w", "U8", fmt.Sprintf("[%d,%d]", rows, cols), cols, cols+n)), cols+n)},
		s2:        {Data: whole(header(entry("v", "U8", fmt.Sprintf("[%d,%d]", rows, cols), 0, n)), n)},
	}
}

// content is what a tensor has in its file.
func content(m fstest.MapFS, s *Set, x *Tensor) []byte {
	return m[s.Files[x.File].name].Data[x.Offset : x.Offset+x.Bytes]
}

func must(t *testing.T, s *Set, name string) *Tensor {
	t.Helper()
	x, ok := s.Tensor(name)
	if !ok {
		t.Fatalf("no tensor %q", name)
	}
	return x
}

func TestReadsLoopToCompletion(t *testing.T) {
	type hook = func(r io.ReaderAt, p []byte, off int64) (int, error)
	var calls atomic.Int64
	for name, h := range map[string]hook{
		"half": func(r io.ReaderAt, p []byte, off int64) (int, error) {
			return r.ReadAt(p[:(len(p)+1)/2], off)
		},
		"half with an interruption": func(r io.ReaderAt, p []byte, off int64) (int, error) {
			n, _ := r.ReadAt(p[:(len(p)+1)/2], off)
			return n, syscall.EINTR
		},
		"interrupted twice": func(r io.ReaderAt, p []byte, off int64) (int, error) {
			if calls.Add(1)%3 != 0 {
				return 0, &fs.PathError{Op: "read", Path: "x", Err: syscall.EINTR}
			}
			return r.ReadAt(p, off)
		},
		"nothing now and then": func(r io.ReaderAt, p []byte, off int64) (int, error) {
			if calls.Add(1)%2 != 0 {
				return 0, nil
			}
			return r.ReadAt(p, off)
		},
		"all with the end": func(r io.ReaderAt, p []byte, off int64) (int, error) {
			n, _ := r.ReadAt(p, off)
			return n, io.EOF
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := matrix(16, 100)
			s, err := OpenFS(oddFS{m, h}, "m")
			if err != nil {
				t.Fatal(err)
			}
			for _, name := range s.Names() {
				x := must(t, s, name)
				p := make([]byte, x.Bytes)
				if err := s.ReadAt(x, p, 0); err != nil || !bytes.Equal(p, content(m, s, x)) {
					t.Errorf("%v: %v", x, err)
				}
			}
		})
	}
}

func TestReadFailuresAreTyped(t *testing.T) {
	broken := errors.New("input/output error")
	for _, c := range []struct {
		name string
		hook func(r io.ReaderAt, p []byte, off int64) (int, error)
		want error
		got  int64
	}{
		{"fails", func(r io.ReaderAt, p []byte, off int64) (int, error) { n, _ := r.ReadAt(p[:7], off); return n, broken }, broken, 7},
		{"ends", func(r io.ReaderAt, p []byte, off int64) (int, error) { n, _ := r.ReadAt(p[:7], off); return n, io.EOF }, io.ErrUnexpectedEOF, 7},
		{"ends at once", func(io.ReaderAt, []byte, int64) (int, error) { return 0, io.EOF }, io.ErrUnexpectedEOF, 0},
		{"never comes", func(io.ReaderAt, []byte, int64) (int, error) { return 0, nil }, io.ErrNoProgress, 0},
		{"always interrupted", func(io.ReaderAt, []byte, int64) (int, error) { return 0, syscall.EINTR }, syscall.EINTR, 0},
		{"lies", func(_ io.ReaderAt, p []byte, _ int64) (int, error) { return len(p) + 1, nil }, nil, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			var on atomic.Bool
			s, err := OpenFS(oddFS{matrix(16, 100), func(r io.ReaderAt, p []byte, off int64) (int, error) {
				if on.Load() {
					return c.hook(r, p, off)
				}
				return r.ReadAt(p, off)
			}}, "m")
			if err != nil {
				t.Fatal(err)
			}
			on.Store(true)
			x := must(t, s, "w")
			err = s.ReadAt(x, make([]byte, 50), 10)
			var e *ReadError
			if !errors.As(err, &e) || c.want != nil && !errors.Is(err, c.want) ||
				e.Got != c.got || e.Want != 50 || e.Offset != x.Offset+10 || e.Tensor != "w" || e.Path != "m/"+s1 {
				t.Errorf("%#v", err)
			}
		})
	}
}

// A file whose first page reads as zeros once, then well, is opened; one that always does is named for what it is.
func TestZerosInPlaceOfTheLengthAreAskedAgainOnce(t *testing.T) {
	for _, times := range []int64{1, 2} {
		var calls atomic.Int64
		s, err := OpenFS(oddFS{fstest.MapFS{singleName: {Data: whole(good, 8)}}, func(r io.ReaderAt, p []byte, off int64) (int, error) {
			if calls.Add(1) <= times {
				clear(p)
				return len(p), nil
			}
			return r.ReadAt(p, off)
		}}, "m")
		if times == 1 {
			if err != nil || s.TotalBytes() != 8 {
				t.Errorf("%v", err)
			}
		} else if err == nil || !strings.Contains(err.Error(), "all-zero header") {
			t.Errorf("%v", err)
		}
	}
}

func TestShortHeaderReadIsAReadError(t *testing.T) {
	_, err := OpenFS(oddFS{fstest.MapFS{singleName: {Data: whole(good, 8)}}, func(r io.ReaderAt, p []byte, off int64) (int, error) {
		if off >= prefixSize {
			return 0, io.EOF
		}
		return r.ReadAt(p, off)
	}}, "m")
	var e *ReadError
	if !errors.As(err, &e) || e.Offset != 8 || e.Want != int64(len(good)) || !strings.Contains(err.Error(), "m/model.safetensors: header: ") {
		t.Errorf("%v", err)
	}
}

func TestReadAtRefusesWhatIsNotInsideTheTensor(t *testing.T) {
	s, err := OpenFS(matrix(4, 10), "m")
	if err != nil {
		t.Fatal(err)
	}
	x := must(t, s, "w")
	for _, c := range []struct {
		t   *Tensor
		n   int
		off int64
		ok  bool
	}{{x, 40, 0, true}, {x, 0, 40, true}, {x, 1, 39, true}, {x, 41, 0, false}, {x, 1, 40, false}, {x, 0, 41, false}, {x, 1, -1, false},
		{x, 2, 1<<63 - 1, false}, {nil, 0, 0, false}, {&Tensor{Name: "w", Bytes: 40}, 1, 0, false}} {
		if err := s.ReadAt(c.t, make([]byte, c.n), c.off); (err == nil) != c.ok {
			t.Errorf("%d bytes at %d of %v: %v", c.n, c.off, c.t, err)
		}
	}
}

func TestVerifyNamesEveryChangedFile(t *testing.T) {
	m := matrix(4, 10)
	s, err := OpenFS(m, "m")
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Verify(); err != nil {
		t.Error(err)
	}
	for _, name := range []string{s1, s2} {
		m[name] = &fstest.MapFile{Data: m[name].Data, ModTime: time.Now()}
	}
	if err := s.Verify(); err == nil || !strings.HasPrefix(err.Error(), "verify m/"+indexName+": 2 of 2 files are unusable: m/"+s1+": the file changed") || !strings.Contains(err.Error(), s2) {
		t.Errorf("%v", err)
	}
}

// sealed is a file system whose files can only be read from the start.
type sealed struct{ fstest.MapFS }

func (s sealed) Open(name string) (fs.File, error) {
	f, err := s.MapFS.Open(name)
	return struct{ fs.File }{f}, err
}

func TestFileSystemWithoutRandomAccessIsRefused(t *testing.T) {
	_, err := OpenFS(sealed{fstest.MapFS{singleName: {Data: whole(good, 8)}}}, "m")
	if err == nil || !strings.Contains(err.Error(), "random access") {
		t.Error(err)
	}
}
