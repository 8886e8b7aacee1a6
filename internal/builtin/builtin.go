// Package builtin holds the models that come with the engine: small, really trained, and embedded, so that the command and the examples run
// on a fresh machine. Each is a folder as a user's own would be, with a file of requests.
package builtin

import (
	"embed"
	"fmt"
	"io/fs"
	"slices"
	"strings"
)

//go:embed arith
var files embed.FS

// Default is the name of the model that the command scores when it is told of no other.
const Default = "arith"

// Names lists the models.
func Names() []string { return []string{Default} }

// Open is the folder of a model, with its requests.jsonl.
func Open(name string) (fs.FS, error) {
	if !slices.Contains(Names(), name) {
		return nil, fmt.Errorf("open built-in model %q: there are: %s", name, strings.Join(Names(), ", "))
	}
	return fs.Sub(files, name)
}
