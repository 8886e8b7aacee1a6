package loader

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"
)

// golden is the folder of golden models beside the repository.
const golden = "../../shared/golden/models"

// Every model, adapter and expectation of the golden folders was written by the format's own library.
func TestGoldenFilesAreOpenedStrictly(t *testing.T) {
	if _, err := os.Stat(golden); err != nil {
		t.Skipf("the golden folder is missing: %v", err)
	}
	var models, files int
	err := filepath.WalkDir(golden, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		switch {
		case e.Name() == indexName, e.Name() == singleName && !exists(filepath.Join(filepath.Dir(path), indexName)):
			models++
			s, err := ParseOptions{Strict: true}.Open(filepath.Dir(path))
			if err != nil {
				t.Error(err)
				return nil
			}
			defer s.Close()
			if len(s.Warnings) > 0 || len(s.Names()) == 0 {
				t.Errorf("%s: %d tensors, warnings %q", path, len(s.Names()), s.Warnings)
			}
			readAll(t, s)
		case filepath.Ext(path) == suffix:
			files++
			s, err := ParseOptions{Strict: true}.Open(path)
			if err != nil {
				t.Error(err)
				return nil
			}
			defer s.Close()
			readAll(t, s)
		}
		return nil
	})
	if err != nil || models == 0 || files == 0 {
		t.Errorf("%d models and %d other files: %v", models, files, err)
	}
	t.Logf("%d models and %d other files", models, files)
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// readAll loads every tensor with Load and with ReadAt, and compares.
func readAll(t *testing.T, s *Set) {
	t.Helper()
	into := make(map[string][]byte)
	var jobs []Job
	for _, name := range s.Names() {
		x, _ := s.Tensor(name)
		into[name] = make([]byte, x.Bytes)
		jobs = append(jobs, pieces(x, 4096, into[name])...)
	}
	if err := s.Load(t.Context(), staging(2, 16<<10), jobs, nil); err != nil {
		t.Error(err)
		return
	}
	for _, f := range s.Files {
		for _, x := range f.Tensors {
			want := make([]byte, x.Bytes)
			if err := s.ReadAt(x, want, 0); err != nil || string(into[x.Name]) != string(want) {
				t.Errorf("%s: %v: %v", f.Path, x, err)
			}
		}
	}
}
