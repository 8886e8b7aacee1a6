//go:build unix

package loader

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestOpenTakesAFolderOrAFile(t *testing.T) {
	dir := write(t, map[string]string{"lora.safetensors": shard("a"), "no.txt": "hello, this is no model"})
	s, err := Open(filepath.Join(dir, "lora.safetensors"))
	check(t, err)
	if got := fmt.Sprintln(s.Names(), s.Files[0].Path); got != "[a] "+filepath.Join(dir, "lora.safetensors")+"\n" {
		t.Error(got)
	}
	check(t, s.Close())
	check(t, s.Close())
	x, _ := s.Tensor("a")
	if err := s.ReadAt(x, make([]byte, 4), 0); !errors.Is(err, os.ErrClosed) {
		t.Errorf("read after Close: %v", err)
	}
	if _, err := Open(filepath.Join(dir, "no.txt")); err == nil {
		t.Error("a text was opened")
	}
	if _, err := Open(filepath.Join(dir, "gone")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%v", err)
	}
}

func TestCase60WhatIsNotAFileIsRefusedAtOnce(t *testing.T) {
	dir := write(t, map[string]string{indexName: weightMap("a", "pipe", "b", "dir", "c", "null"), "dir/x": ""})
	check(t, syscall.Mkfifo(filepath.Join(dir, "pipe"), 0o644))
	check(t, os.Symlink(os.DevNull, filepath.Join(dir, "null")))
	done := make(chan error)
	go func() {
		_, err := Open(dir)
		done <- err
	}()
	select {
	case err := <-done:
		for _, want := range []string{"pipe: not a file: found a pipe", "dir: not a file: found a directory", "null: not a file: found a device"} {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%v has no %s", err, want)
			}
		}
	case <-time.After(10 * time.Second):
		t.Fatal("hangs")
	}
	if _, err := Open(filepath.Join(dir, "pipe")); err == nil || !strings.Contains(err.Error(), "found a pipe") {
		t.Error(err)
	}
	single := write(t, map[string]string{singleName + "/x": ""})
	if _, err := Open(single); err == nil || !strings.Contains(err.Error(), "found a directory") {
		t.Error(err)
	}
}

func TestCase67LinksIntoABlobStoreAreFollowed(t *testing.T) {
	files := three()
	blobs := t.TempDir()
	dir := t.TempDir()
	for name, data := range files {
		check(t, os.WriteFile(filepath.Join(blobs, "blob-"+name), []byte(data), 0o644))
		check(t, os.Symlink(filepath.Join(blobs, "blob-"+name), filepath.Join(dir, name)))
	}
	s, err := Open(dir)
	check(t, err)
	check(t, s.Verify())
	if s.TotalBytes() != 16 || s.Files[0].Size != int64(len(files[s1])) {
		t.Errorf("%d bytes; first file of %d", s.TotalBytes(), s.Files[0].Size)
	}
	check(t, s.Close())

	// A blob that is gone leaves a link that leads nowhere.
	check(t, os.Remove(filepath.Join(blobs, "blob-"+s2)))
	_, err = Open(dir)
	var e *IndexError
	if !errors.As(err, &e) || len(e.Missing) != 1 || !strings.Contains(e.Hint, "links to files that are gone") {
		t.Errorf("%v; %s", err, Hint(err))
	}
	check(t, os.Remove(filepath.Join(blobs, "blob-"+indexName)))
	if _, err = Open(dir); !errors.As(err, &e) || !strings.Contains(err.Error(), indexName) {
		t.Errorf("an index that leads nowhere: %v", err)
	}
}

func TestCase54FileThatShrinksIsAnErrorNeverZeros(t *testing.T) {
	dir := write(t, map[string]string{singleName: string(whole(one(`"U8"`, "[100000]", "[0,100000]"), 100_000))})
	s, err := Open(dir)
	check(t, err)
	defer s.Close()
	x, _ := s.Tensor("a")
	check(t, os.Truncate(filepath.Join(dir, singleName), x.Offset+70_000))
	err = s.ReadAt(x, make([]byte, 50_000), 40_000)
	var e *ReadError
	if !errors.As(err, &e) || e.Tensor != "a" || e.Offset != x.Offset+40_000 || e.Want != 50_000 || e.Got != 30_000 {
		t.Fatalf("%v", err)
	}
	if want := fmt.Sprintf(`read %s/model.safetensors: tensor "a": wanted 50000 bytes at byte %d, got 30000`, dir, e.Offset); !strings.Contains(err.Error(), want) {
		t.Errorf("%v, want %s", err, want)
	}
	// Within what is left, the change is noticed all the same.
	check(t, s.ReadAt(x, make([]byte, 10), 0))
	var changed *ChangedError
	if err := s.Verify(); !errors.As(err, &changed) || !strings.Contains(err.Error(), "bytes, and had") {
		t.Errorf("%v", err)
	}
}

func TestVerifyNoticesEveryChange(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(path string, data []byte) error
		want   string
	}{
		{"nothing", func(string, []byte) error { return nil }, ""},
		{"read", func(p string, _ []byte) error { _, err := os.ReadFile(p); return err }, ""},
		{"written in place", func(p string, data []byte) error {
			if err := os.WriteFile(p, data, 0o644); err != nil {
				return err
			}
			return os.Chtimes(p, time.Time{}, time.Now().Add(time.Hour)) // not to depend on how fine the clock is
		}, "written to at"},
		{"grown", func(p string, data []byte) error { return os.WriteFile(p, append(data, 0), 0o644) }, "bytes, and had"},
		{"removed", func(p string, _ []byte) error { return os.Remove(p) }, "it is gone"},
		{"replaced by its like", func(p string, data []byte) error {
			info, err := os.Stat(p)
			if err == nil {
				err = os.WriteFile(p+".new", data, 0o644)
			}
			if err == nil {
				err = os.Chtimes(p+".new", info.ModTime(), info.ModTime())
			}
			if err == nil {
				err = os.Rename(p+".new", p)
			}
			return err
		}, "another file stands in its place"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := write(t, three())
			s, err := Open(dir)
			check(t, err)
			defer s.Close()
			data := three()[s2]
			check(t, c.change(filepath.Join(dir, s2), []byte(data)))
			err = s.Verify()
			if c.want == "" {
				check(t, err)
				return
			}
			var e *ChangedError
			if !errors.As(err, &e) || e.Path != filepath.Join(dir, s2) || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want ...%s...", err, c.want)
			}
		})
	}
}

// A tensor of 2.18 GB must not overflow anything. The file is sparse, and almost nothing of it is read.
func TestTensorAbove2GiB(t *testing.T) {
	const n = 152_064 * 3_584 * 4
	head := whole(header(entry("e", "F32", "[152064,3584]", 0, n), entry("z", "U8", "[4]", n, n+4)), 0)
	path := filepath.Join(t.TempDir(), singleName)
	f, err := os.Create(path)
	check(t, err)
	defer f.Close()
	_, err = f.Write(head)
	check(t, err)
	_, err = f.WriteAt([]byte("last"), int64(len(head))+n)
	if err != nil {
		t.Skipf("this file system has no sparse files of 2 GiB: %v", err)
	}
	s, err := Open(filepath.Dir(path))
	check(t, err)
	defer s.Close()
	z, _ := s.Tensor("z")
	p := make([]byte, 4)
	check(t, s.ReadAt(z, p, 0))
	e, _ := s.Tensor("e")
	if string(p) != "last" || e.Bytes != n || e.Elements() != n/4 {
		t.Errorf("%q, %v", p, e)
	}
	if err := s.ReadAt(e, make([]byte, 8), n-8); err != nil {
		t.Error(err)
	}
	if err := s.ReadAt(e, make([]byte, 8), n-7); err == nil {
		t.Error("read past the end of a tensor")
	}
}

func TestDirFSReadsLikeTheFolder(t *testing.T) {
	dir := write(t, three())
	s, err := OpenFS(os.DirFS(dir), "label")
	check(t, err)
	defer s.Close()
	x, _ := s.Tensor("d")
	p := make([]byte, 4)
	check(t, s.ReadAt(x, p, 0))
	check(t, s.Verify())
	if want := three()[s1]; !bytes.Equal(p, []byte(want[len(want)-4:])) || s.Files[0].Path != "label/"+s1 {
		t.Errorf("%v from %s", p, s.Files[0].Path)
	}
}
