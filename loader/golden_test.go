package loader

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/trainerrank/engine/device"
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

// readAll loads every tensor by Execute and by ReadAt, and compares.
func readAll(t *testing.T, s *Set) {
	t.Helper()
	l := newLab(t, s, 2<<30)
	plan, err := Fit(StatsOf(s, StatsOptions{}), PlanParams{Budget: 1 << 30, Group: 1, AccumulateResident: true, Align: device.PageSize, Copier: pread{}.Costs(s.Files)})
	check(t, err)
	tensors, report, err := s.Execute(t.Context(), plan, LoadOptions{Device: l.dev, Copier: pread{}, Threads: 2})
	check(t, err)
	defer tensors.Free()
	if report.Peak != report.Predicted || report.Bytes != s.TotalBytes() {
		t.Errorf("%v", report)
	}
	l.same(tensors)
}
