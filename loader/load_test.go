package loader

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
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

// pieces are jobs for all of a tensor, each of up to n bytes, that copy to into.
func pieces(x *Tensor, n int64, into []byte) []Job {
	var jobs []Job
	for off := int64(0); off < x.Bytes; off += n {
		b := min(n, x.Bytes-off)
		jobs = append(jobs, Job{Tensor: x, Offset: off, Bytes: b, Do: func(data []byte) error {
			if int64(len(data)) != b || int64(cap(data)) != b {
				return fmt.Errorf("%d bytes with room for %d, want %d", len(data), cap(data), b)
			}
			copy(into[off:], data)
			return nil
		}})
	}
	return jobs
}

func staging(workers, size int) [][]byte {
	s := make([][]byte, workers)
	for i := range s {
		s[i] = make([]byte, size)
	}
	return s
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

func TestLoadHandsOnEveryByteOnce(t *testing.T) {
	leaks(t)
	m := matrix(64, 100)
	rng := rand.New(rand.NewPCG(1, 2))
	for _, workers := range []int{1, 2, 7} {
		for _, room := range []int{640, 1000, 6400, 1 << 20} {
			s, err := OpenFS(m, "m")
			if err != nil {
				t.Fatal(err)
			}
			into := map[string][]byte{}
			var jobs []Job
			for _, name := range s.Names() {
				x := must(t, s, name)
				into[name] = make([]byte, x.Bytes)
				jobs = append(jobs, pieces(x, 320, into[name])...)
			}
			rng.Shuffle(len(jobs), func(i, j int) { jobs[i], jobs[j] = jobs[j], jobs[i] })
			var seen []int64
			if err := s.Load(t.Context(), staging(workers, room), jobs, func(n int64) { seen = append(seen, n) }); err != nil {
				t.Fatal(err)
			}
			for name, got := range into {
				if !bytes.Equal(got, content(m, s, must(t, s, name))) {
					t.Errorf("%d workers, %d bytes: tensor %s differs", workers, room, name)
				}
			}
			for i := range seen {
				if i > 0 && seen[i] <= seen[i-1] {
					t.Errorf("progress %v", seen)
				}
			}
			if len(seen) == 0 || seen[len(seen)-1] != s.TotalBytes() {
				t.Errorf("progress %v, want it to end with %d", seen, s.TotalBytes())
			}
		}
	}
}

func TestAdjacentJobsOfATensorAreReadInOneGo(t *testing.T) {
	type read struct{ off, n int64 }
	var mu sync.Mutex
	var reads []read
	m := matrix(64, 100)
	s, err := OpenFS(oddFS{m, func(r io.ReaderAt, p []byte, off int64) (int, error) {
		mu.Lock()
		defer mu.Unlock()
		reads = append(reads, read{off, int64(len(p))})
		return r.ReadAt(p, off)
	}}, "m")
	if err != nil {
		t.Fatal(err)
	}
	w, b := must(t, s, "w"), must(t, s, "b")
	into := make([]byte, w.Bytes)
	jobs := append(pieces(w, 100, into), pieces(b, 100, make([]byte, 100))...)
	for _, c := range []struct{ room, largest, count int64 }{
		{100, 100, 65},   // no room for two
		{399, 300, 23},   // three at a time, and the vector
		{6400, 800, 9},   // more would leave one worker with too much of the work
		{100000, 800, 9}, // as much as the room is
	} {
		reads = nil
		if err := s.Load(t.Context(), staging(1, int(c.room)), jobs, nil); err != nil {
			t.Fatal(err)
		}
		var largest, total int64
		for i, r := range reads {
			largest = max(largest, r.n)
			total += r.n
			if i > 0 && r.off != reads[i-1].off+reads[i-1].n {
				t.Errorf("reads %v are not in the order of the file", reads)
			}
		}
		if largest != c.largest || int64(len(reads)) != c.count || total != w.Bytes+b.Bytes {
			t.Errorf("room for %d: %d reads, the largest %d, %d bytes in all; want %d and %d", c.room, len(reads), largest, total, c.count, c.largest)
		}
	}
}

func TestLoadOfOverlappingAndEmptyJobs(t *testing.T) {
	m := matrix(4, 10)
	s, err := OpenFS(m, "m")
	if err != nil {
		t.Fatal(err)
	}
	x := must(t, s, "w")
	var done atomic.Int64
	job := func(off, n int64) Job {
		return Job{x, off, n, func(data []byte) error {
			if !bytes.Equal(data, content(m, s, x)[off:off+n]) {
				return fmt.Errorf("%d bytes at %d differ", n, off)
			}
			done.Add(1)
			return nil
		}}
	}
	jobs := []Job{job(0, 20), job(0, 20), job(10, 20), job(5, 0), job(40, 0), job(0, 0), job(0, 1), job(39, 1)}
	if err := s.Load(t.Context(), staging(2, 20), jobs, nil); err != nil || done.Load() != int64(len(jobs)) {
		t.Errorf("%d done, %v", done.Load(), err)
	}
	if err := s.Load(t.Context(), staging(2, 0), nil, func(int64) { t.Error("progress of nothing") }); err != nil {
		t.Error(err)
	}
}

func TestLoadRefusesBeforeReading(t *testing.T) {
	leaks(t)
	var reads atomic.Int64
	s, err := OpenFS(oddFS{matrix(4, 10), func(r io.ReaderAt, p []byte, off int64) (int, error) {
		reads.Add(1)
		return r.ReadAt(p, off)
	}}, "m")
	if err != nil {
		t.Fatal(err)
	}
	reads.Store(0)
	x := must(t, s, "w")
	do := func([]byte) error { return nil }
	for _, c := range []struct {
		staging [][]byte
		job     Job
		want    string
	}{
		{nil, Job{x, 0, 1, do}, "load: no staging buffer"},
		{[][]byte{make([]byte, 40), make([]byte, 29)}, Job{x, 0, 30, do}, `load: job 1 of tensor "w" has 30 bytes; staging buffer 1 has 29`},
		{staging(1, 40), Job{x, 0, 41, do}, "not inside it"},
		{staging(1, 40), Job{x, 0, -1, do}, "not inside it"},
		{staging(1, 40), Job{x, -1, 1, do}, "not inside it"},
		{staging(1, 40), Job{nil, 0, 1, do}, "no tensor"},
		{staging(1, 40), Job{&Tensor{Name: "w", Bytes: 40}, 0, 1, do}, "not of this model"},
		{staging(1, 40), Job{x, 0, 1, nil}, "nothing to do"},
	} {
		err := s.Load(t.Context(), c.staging, []Job{{x, 0, 1, do}, c.job}, nil)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v, want %s", err, c.want)
		}
	}
	if reads.Load() != 0 {
		t.Errorf("%d reads", reads.Load())
	}
}

func TestFirstErrorStopsTheLoad(t *testing.T) {
	leaks(t)
	s, err := OpenFS(matrix(1000, 10), "m")
	if err != nil {
		t.Fatal(err)
	}
	x := must(t, s, "w")
	mine := errors.New("no room")
	var done atomic.Int64
	jobs := pieces(x, 10, make([]byte, x.Bytes))
	for i := range jobs {
		do := jobs[i].Do
		jobs[i].Do = func(data []byte) error {
			if done.Add(1) == 5 {
				return mine
			}
			time.Sleep(time.Millisecond)
			return do(data)
		}
	}
	err = s.Load(t.Context(), staging(4, 10), jobs, nil)
	if !errors.Is(err, mine) || err.Error() != `load tensor "w": no room` {
		t.Errorf("%v", err)
	}
	if done.Load() > 5+3 {
		t.Errorf("%d jobs done after the fifth of 4 workers had failed", done.Load())
	}
}

func TestLoadHonoursItsContextBetweenJobs(t *testing.T) {
	leaks(t)
	s, err := OpenFS(matrix(1000, 10), "m")
	if err != nil {
		t.Fatal(err)
	}
	x := must(t, s, "w")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var done atomic.Int64
	jobs := pieces(x, 10, make([]byte, x.Bytes))
	for i := range jobs {
		jobs[i].Do = func([]byte) error {
			if done.Add(1) == 3 {
				cancel()
			}
			return nil
		}
	}
	if err := s.Load(ctx, staging(2, 10_000), jobs, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	if done.Load() > 4 {
		t.Errorf("%d jobs done after the third had cancelled", done.Load())
	}
	done.Store(0)
	if err := s.Load(ctx, staging(2, 10), jobs, nil); !errors.Is(err, context.Canceled) || done.Load() != 0 {
		t.Errorf("%v after %d jobs", err, done.Load())
	}
}

func TestLoadVerifiesFilesBeforeAndAfter(t *testing.T) {
	leaks(t)
	dir := t.TempDir()
	path := filepath.Join(dir, singleName)
	data := whole(one(`"U8"`, "[1000]", "[0,1000]"), 1000)
	open := func() (*Set, *Tensor) {
		if err := os.WriteFile(path, data, 0o644); err != nil {
			t.Fatal(err)
		}
		s, err := Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { s.Close() })
		return s, must(t, s, "a")
	}
	touch := func() {
		later := time.Now().Add(time.Hour)
		if err := os.Chtimes(path, later, later); err != nil {
			t.Error(err)
		}
	}
	var changed *ChangedError
	var short *ReadError

	s, x := open()
	touch()
	err := s.Load(t.Context(), staging(1, 1000), []Job{{x, 0, 10, func([]byte) error { t.Error("read"); return nil }}}, nil)
	if !errors.As(err, &changed) {
		t.Errorf("before: %v", err)
	}
	s, x = open()
	err = s.Load(t.Context(), staging(1, 1000), []Job{{x, 0, 10, func([]byte) error { touch(); return nil }}}, nil)
	if !errors.As(err, &changed) {
		t.Errorf("after: %v", err)
	}
	s, x = open()
	err = s.Load(t.Context(), staging(1, 500), []Job{
		{x, 0, 500, func([]byte) error { return os.Truncate(path, x.Offset+600) }},
		{x, 500, 500, func([]byte) error { t.Error("handed on"); return nil }},
	}, nil)
	if !errors.As(err, &short) || short.Got != 100 || short.Err != io.ErrUnexpectedEOF || !strings.Contains(Hint(err), "changed while") {
		t.Errorf("during: %v; %s", err, Hint(err))
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

func BenchmarkLoad(b *testing.B) {
	const rows, cols = 16384, 8192 // 128 MiB
	dir := b.TempDir()
	const n = rows * cols
	data := whole(header(entry("w", "U8", fmt.Sprintf("[%d,%d]", rows, cols), 0, n)), 0)
	data = append(data, make([]byte, n)...)
	if err := os.WriteFile(filepath.Join(dir, singleName), data, 0o644); err != nil {
		b.Fatal(err)
	}
	s, err := Open(dir)
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	x, _ := s.Tensor("w")
	into := make([]byte, n)
	workers := runtime.GOMAXPROCS(0)
	copyIn := func(b *testing.B, piece int) []Job {
		jobs := pieces(x, int64(piece), into)
		return jobs
	}
	for _, room := range []int{256 << 10, 1 << 20, 4 << 20, 16 << 20} {
		b.Run(fmt.Sprintf("staging=%dKiB", room>>10), func(b *testing.B) {
			jobs := copyIn(b, 32*cols)
			buffers := staging(workers, room)
			b.SetBytes(n)
			for b.Loop() {
				if err := s.Load(b.Context(), buffers, jobs, nil); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
	b.Run("copy", func(b *testing.B) { // what a plain copy of the same bytes takes, by as many workers
		b.SetBytes(n)
		for b.Loop() {
			var wg sync.WaitGroup
			for w := range workers {
				wg.Go(func() {
					lo, hi := n/workers*w, n/workers*(w+1)
					copy(into[lo:hi], data[lo:hi])
				})
			}
			wg.Wait()
		}
	})
}
