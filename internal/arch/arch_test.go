// Package arch holds the test that the house keeps its floors: a package imports only from floors below its own.
package arch

import (
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/trainerrank/engine"

// floors has every package of the module, ground floor first. internal/ packages that everybody may use are on floor -1.
var floors = map[string]int{
	"internal/strictjson": -1,
	"internal/arch":       -1,
	"internal/failpoint":  -1,
	"device":              0,
	"collective":          0,
	"forward/kernel":      1,
	"loader":              1,
	"cuda":                2,
	"forward/prefixtree":  2,
	"forward":             2,
	"forward/transformer": 3,
	"profile":             3,
	"slots":               3,
	"ladder":              4,
	"trainerrank":         5,
	"internal/builtin":    5,
	"internal/golden":     6,
	"acceptance":          6,
	"cmd/trainerrank":     6,
	"bench/split":         6,
	"bench/train":         6,
	"examples/grpo":       6,
}

// beside lists the imports within a floor that are allowed: a package may be the other's part.
var beside = map[string]string{"forward": "forward/prefixtree"}

// pure packages do no I/O, read no clock and hold no goroutine; none of these may be imported by their code.
var pure = map[string][]string{
	"forward/prefixtree": {"os", "io", "time", "sync", "net", "math/rand", "context"},
	"profile":            {"os", "io", "time", "sync", "net", "math/rand", "context"},
	"ladder":             {"os", "io", "time", "sync", "net", "math/rand", "context"},
}

func TestNoImportRunsUpward(t *testing.T) {
	root := filepath.Join("..", "..")
	seen := 0
	err := filepath.WalkDir(root, func(file string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if _, err := os.Stat(filepath.Join(file, "go.mod")); err == nil && file != root || d.Name() == "testdata" || strings.HasPrefix(d.Name(), ".") && file != root {
				return filepath.SkipDir // another module, or no package
			}
			return nil
		}
		if !strings.HasSuffix(file, ".go") {
			return nil
		}
		rel, err := filepath.Rel(root, filepath.Dir(file))
		if err != nil {
			return err
		}
		pkg := filepath.ToSlash(rel)
		floor, known := floors[pkg]
		if !known {
			t.Errorf("package %s has no floor: add it to the table, and to docs/architecture.md", pkg)
			return nil
		}
		f, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ImportsOnly)
		if err != nil {
			return err
		}
		seen++
		test := strings.HasSuffix(file, "_test.go")
		for _, im := range f.Imports {
			name, err := strconv.Unquote(im.Path.Value)
			if err != nil {
				return err
			}
			if own, ok := strings.CutPrefix(name, module+"/"); ok {
				if below, ok := floors[own]; !ok {
					t.Errorf("%s imports %s, which has no floor", file, own)
				} else if below >= floor && beside[pkg] != own && !test {
					t.Errorf("%s imports %s: floor %d from floor %d", file, own, below, floor)
				}
			}
			for _, not := range pure[pkg] {
				if !test && (name == not || strings.HasPrefix(name, not+"/")) {
					t.Errorf("%s imports %s, but %s is pure", file, name, path.Base(pkg))
				}
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if seen < 10 {
		t.Fatalf("only %d files seen: the walk is broken", seen)
	}
}
