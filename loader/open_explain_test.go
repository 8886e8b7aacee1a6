package loader

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// What a file on disk may be instead of weights is told from its bytes, which takes an open file.
func TestAPointerFileOnDiskIsRecognised(t *testing.T) {
	path := filepath.Join(t.TempDir(), "model.safetensors")
	text := "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	_, err := Open(path)
	if err == nil || !strings.Contains(err.Error(), "Git LFS pointer") || !strings.Contains(Hint(err), "git lfs pull") {
		t.Errorf("%v, hint %q", err, Hint(err))
	}
}
