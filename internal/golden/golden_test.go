package golden

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
)

// The copies inside the repository are the golden data, if these lie beside it.
func TestCopiesAreTheGoldenOnes(t *testing.T) {
	for _, model := range []string{"qwen2-tiny", "arith"} {
		dir := filepath.Join(shared(), model)
		if _, err := os.Stat(dir); err != nil {
			t.Skipf("SKIPPED: no golden data beside this checkout: %v", err)
		}
		err := fs.WalkDir(FS(t, model), ".", func(name string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			have, err := fs.ReadFile(FS(t, model), name)
			if err != nil {
				return err
			}
			want, err := os.ReadFile(filepath.Join(dir, name))
			if err != nil {
				return err
			}
			if !bytes.Equal(have, want) {
				t.Errorf("%s/%s differs from the golden file", model, name)
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	}
}
