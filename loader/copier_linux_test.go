package loader

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/trainerrank/engine/device"
)

// strange is a direct copier whose reads go through a hook, over the same files, aligned to align. A hook of nil makes the open fail.
func strange(align int64, fail error, hook func(f *File, p []byte, off int64) (int, error)) *direct {
	return &direct{threads: 2, open: func(f *File) (*directFile, error) {
		if hook == nil {
			return nil, fail
		}
		return &directFile{
			pread: func(p []byte, off int64) (int, error) {
				if off%align != 0 || int64(len(p))%align != 0 {
					return 0, unix.EINVAL
				}
				return hook(f, p, off)
			},
			close: func() error { return nil }, align: align,
		}, nil
	}}
}

// plainRead is a read that stops at the end of the file, as the kernel's does.
func plainRead(f *File, p []byte, off int64) (int, error) {
	n, err := f.file.ReadAt(p, off)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return n, err
}

// Whatever a file system does to direct reads (refuse them at the open or at the first read, interrupt them, cut them anywhere), the bytes
// are the same, or the error is typed.
func TestDirectReadsFallBackAndGoOn(t *testing.T) {
	leaks(t)
	var calls atomic.Int64
	for name, c := range map[string]*direct{
		"whole":                 strange(512, nil, plainRead),
		"alignment of a page":   strange(4096, nil, plainRead),
		"alignment of a byte":   strange(1, nil, plainRead),
		"refused at the open":   strange(512, unix.EINVAL, nil),
		"unsupported":           strange(512, unix.ENOTSUP, nil),
		"refused at first read": strange(512, nil, func(*File, []byte, int64) (int, error) { return 0, unix.EINVAL }),
		"refused at a later read": strange(512, nil, func(f *File, p []byte, off int64) (int, error) {
			if calls.Add(1)%3 == 0 {
				return 0, unix.EOPNOTSUPP
			}
			return plainRead(f, p, off)
		}),
		"interrupted": strange(512, nil, func(f *File, p []byte, off int64) (int, error) {
			if calls.Add(1)%2 == 0 {
				return 0, unix.EINTR
			}
			return plainRead(f, p, off)
		}),
		"short, aligned": strange(512, nil, func(f *File, p []byte, off int64) (int, error) { return plainRead(f, p[:512], off) }),
		"short anywhere": strange(512, nil, func(f *File, p []byte, off int64) (int, error) { return plainRead(f, p[:1+len(p)*2/3], off) }),
		"very short":     strange(512, nil, func(f *File, p []byte, off int64) (int, error) { return plainRead(f, p[:1], off) }),
		"nothing":        strange(512, nil, func(*File, []byte, int64) (int, error) { return 0, nil }),
	} {
		rng := rand.New(rand.NewPCG(6, 6))
		for range 4 {
			s := sand(t, rng, 2, 9000)
			l := newLab(t, s, 1<<30)
			plan, err := Fit(StatsOf(s, StatsOptions{}), raw(s, c, 1<<30))
			check(t, err)
			tensors, _, err := s.Execute(t.Context(), plan, LoadOptions{Device: l.dev, Copier: c, Threads: 3})
			if err != nil {
				t.Errorf("%s: %v", name, err)
				continue
			}
			l.same(tensors)
			tensors.Free()
		}
	}
	s := sand(t, rand.New(rand.NewPCG(6, 6)), 2, 9000)
	for name, c := range map[string]*direct{
		"open": strange(512, unix.EACCES, nil),
		"read": strange(512, nil, func(*File, []byte, int64) (int, error) { return 0, unix.EIO }),
	} {
		l := newLab(t, s, 1<<30)
		plan, err := Fit(StatsOf(s, StatsOptions{}), raw(s, c, 1<<30))
		check(t, err)
		_, _, err = s.Execute(t.Context(), plan, LoadOptions{Device: l.dev, Copier: c, Threads: 3})
		var e *ReadError
		if err == nil || name == "read" && (!errors.As(err, &e) || !errors.Is(err, unix.EIO)) || name == "open" && !errors.Is(err, unix.EACCES) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// The pool is whole huge pages where there is much to read, and small where there is little.
func TestDirectPool(t *testing.T) {
	for _, c := range []struct{ size, fixed int64 }{{0, 3 << 20}, {probeLeast/2 - 1, 3 << 20}, {probeLeast / 2, 12 << 20}} {
		files := []*File{{Path: "a", Size: c.size}, {Path: "b", Size: c.size}}
		d, err := NewCopier(CopierDirect, 3)
		check(t, err)
		if fixed := d.Costs(files).Fixed; fixed != c.fixed {
			t.Errorf("files of %d bytes: %d bytes fixed, want %d", c.size, fixed, c.fixed)
		}
		r, err := d.Open(files, make([]byte, c.fixed))
		check(t, err)
		pool := r.(*directReader).pool
		if len(pool) != 6 || len(<-pool)*6 != int(c.fixed) {
			t.Errorf("files of %d bytes: %d buffers", c.size, len(pool)+1)
		}
		check(t, r.Close())
	}
}

// However often ReadAt is called, no more reads are under way than there are threads.
func TestDirectReadsAreLimited(t *testing.T) {
	for _, limit := range []int64{1, 2, 8} { // the copier is for 2
		var now, calls atomic.Int64
		c := strange(512, nil, func(f *File, p []byte, off int64) (int, error) {
			defer now.Add(-1)
			if n := now.Add(1); n > min(limit, 2) {
				t.Errorf("%d reads at once, want at most %d", n, min(limit, 2))
			}
			calls.Add(1)
			return plainRead(f, p[:512], off)
		})
		s := sand(t, rand.New(rand.NewPCG(6, 7)), 3, 9000)
		l := newLab(t, s, 1<<30)
		p := raw(s, c, 1<<30)
		p.QueueSize = 4
		plan, err := Fit(StatsOf(s, StatsOptions{}), p)
		check(t, err)
		tensors, _, err := s.Execute(t.Context(), plan, LoadOptions{Device: l.dev, Copier: c, Threads: int(limit)})
		check(t, err)
		l.same(tensors)
		tensors.Free()
		if calls.Load() < 10 {
			t.Errorf("%d reads", calls.Load())
		}
	}
}

// No block of the disk is read twice where a chunk is read in several parts.
func TestDirectReadsEachBlockOnce(t *testing.T) {
	const n = 3*segment + 12345
	path := t.TempDir() + "/" + singleName
	check(t, os.WriteFile(path, append(whole(header(entry("a", "U8", "[12595257]", 0, n)), 0), bytes.Repeat([]byte("0123456"), n/7+1)[:n]...), 0o644))
	s, err := Open(path)
	check(t, err)
	defer s.Close()
	var blocks [n/512 + 8]atomic.Int64
	c := strange(512, nil, func(f *File, p []byte, off int64) (int, error) {
		for b := off / 512; b < (off+int64(len(p)))/512; b++ {
			blocks[b].Add(1)
		}
		return plainRead(f, p, off)
	})
	l := newLab(t, s, 1<<30)
	plan, err := Fit(StatsOf(s, StatsOptions{}), raw(s, c, 1<<30))
	check(t, err)
	tensors, _, err := s.Execute(t.Context(), plan, LoadOptions{Device: l.dev, Copier: c, Threads: 2})
	check(t, err)
	l.same(tensors)
	tensors.Free()
	twice := 0
	for i := range blocks {
		if blocks[i].Load() > 1 {
			twice++
		}
	}
	if twice > 0 {
		t.Errorf("%d blocks are read twice", twice)
	}
}

// What is chosen depends on where the bytes are: cold files are read directly if that works, cached ones through the cache.
func TestProbe(t *testing.T) {
	const n = probeLeast
	dir := t.TempDir()
	path := dir + "/" + singleName
	head := whole(header(entry("a", "U8", "[268435456]", 0, n)), 0)
	check(t, os.WriteFile(path, head, 0o644))
	check(t, os.Truncate(path, int64(len(head))+n))
	s, err := Open(dir)
	check(t, err)
	defer s.Close()
	want := CopierPread
	if o, err := openDirect(s.Files[0]); err == nil {
		if _, err := o.pread(alignedPage(), 0); err == nil {
			want = CopierDirect
		}
		check(t, o.close())
	}
	if c := Probe(s, 2); c.Name() != want {
		t.Errorf("a sparse file, none of it in the cache: %s, want %s", c.Name(), want)
	}
	buf := make([]byte, 1<<20)
	for off := int64(0); off < s.Files[0].Size; off += int64(len(buf)) {
		if _, err := s.Files[0].file.ReadAt(buf, off); err != nil && !errors.Is(err, io.EOF) {
			t.Fatal(err)
		}
	}
	if in, looked := cached(s.Files[0]); in < looked {
		t.Skipf("the cache kept %d of %d pages", in, looked)
	}
	if c := Probe(s, 2); c.Name() != CopierPread {
		t.Errorf("a cached file: %s", c.Name())
	}
	small := sand(t, rand.New(rand.NewPCG(1, 1)), 1, 100)
	if c := Probe(small, 2); c.Name() != CopierPread {
		t.Errorf("a small file: %s", c.Name())
	}
}

// Offsets behind 2 and 4 GiB are read from where they are, by every copier. The file is sparse.
func TestOffsetsAbove4GiB(t *testing.T) {
	const big = 5 << 30
	path := t.TempDir() + "/" + singleName
	head := whole(header(entry("a", "U8", "[5368709120]", 0, big), entry("z", "U8", "[70000]", big, big+70_000)), 0)
	check(t, os.WriteFile(path, head, 0o644))
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	check(t, err)
	last := bytes.Repeat([]byte("last"), 17_500)
	if _, err := f.WriteAt(last, int64(len(head))+big); err != nil {
		t.Skipf("this file system has no sparse files of 5 GiB: %v", err)
	}
	check(t, f.Close())
	s, err := Open(path)
	check(t, err)
	defer s.Close()
	for _, name := range CopierNames() {
		c, err := NewCopier(name, 1)
		check(t, err)
		l := newLab(t, s, 8<<20)
		stats := StatsOf(s, StatsOptions{Keep: func(x *Tensor) bool { return x.Name == "z" }})
		plan, err := Fit(stats, raw(s, c, 8<<20))
		check(t, err)
		tensors, _, err := s.Execute(t.Context(), plan, LoadOptions{Device: l.dev, Copier: c})
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		z, _ := s.Tensor("z")
		if m, _ := tensors.Mem(z); !bytes.Equal(m.Raw(), last) {
			t.Errorf("%s: other bytes", name)
		}
		tensors.Free()
	}
}

// A panic of the consumer while it looks at a mapping is its own, and not taken for a broken file.
func TestPanicsOfTheConsumerPass(t *testing.T) {
	s := sand(t, rand.New(rand.NewPCG(1, 1)), 1, 1000)
	r, err := mapped{}.Open(s.Files, nil)
	check(t, err)
	defer r.Close()
	defer func() {
		if p := recover(); p == nil || !strings.Contains(p.(error).Error(), "nil pointer") {
			t.Errorf("recovered %v", p)
		}
	}()
	var nothing *device.Host
	_ = r.(Viewer).View(0, 0, 4, func([]byte) error { _ = nothing.CapacitySource(); return nil })
}
