package slots

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"github.com/trainerrank/engine/internal/strictjson"
)

// formatVersion is that of checkpoint.json and of the files that it lists.
const formatVersion = 1

// manifest is checkpoint.json: what makes a folder a checkpoint that can be trained on as if it had never left memory.
type manifest struct {
	Format    int64                 `json:"format_version"`
	BaseModel string                `json:"base_model"`
	Revision  int64                 `json:"revision"`
	Adam      *AdamParams           `json:"adam"`  // of the last step; null before the first
	Steps     map[string]int64      `json:"steps"` // that the moments of each vector have seen, by the name of its record; empty without moments
	Owned     []ownedRecord         `json:"owned"`
	Files     map[string]fileRecord `json:"files"`
	Digest    string                `json:"digest"` // SHA-256 of this text with "" in this place
}

type ownedRecord struct {
	Name   string  `json:"name"`
	Buffer bool    `json:"buffer"`
	Shape  []int64 `json:"shape"`
}

type fileRecord struct {
	Bytes  int64  `json:"bytes"`
	SHA256 string `json:"sha256"`
}

func (r ownedRecord) plan() ownedPlan { return ownedPlan{r.Name, r.Buffer, r.Shape} }

func (m *manifest) has(file string) bool {
	_, ok := m.Files[file]
	return ok
}

// text is the manifest with its digest.
func (m *manifest) text() []byte {
	marshal := func() []byte {
		b, err := json.MarshalIndent(m, "", "  ")
		if err != nil {
			panic(fmt.Sprintf("slots: the manifest cannot be written: %v", err)) // no value of it can fail
		}
		return append(b, '\n')
	}
	m.Digest = ""
	m.Digest = digest(marshal())
	return marshal()
}

func digest(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// parseManifest reads checkpoint.json, of which not a byte may have changed.
func parseManifest(text []byte) (*manifest, error) {
	root, err := strictjson.Parse(text, maxDepth)
	if err != nil {
		return nil, err
	}
	if v, ok := root.Get("format_version"); ok {
		if n, err := v.Int64(); err != nil || n != formatVersion {
			return nil, v.Errorf("a checkpoint of format %s, and only %d is read", quote(v.Raw()), formatVersion)
		}
	}
	said, _ := root.Get("digest")
	want, err := said.Text()
	if err != nil {
		return nil, fmt.Errorf("digest: %w", err)
	}
	at := said.Offset()
	blank := slices.Concat(text[:at], []byte(`""`), text[at+len(said.Raw()):])
	if got := digest(blank); got != want {
		return nil, said.Errorf("the digest of the file is %s, and it says %s", got, quote(want))
	}
	// The text is now known to be one that we wrote, or that somebody took care to forge.
	m := new(manifest)
	if err := json.Unmarshal(text, m); err != nil {
		return nil, err
	}
	if m.Revision < 0 {
		return nil, fmt.Errorf("a revision of %d", m.Revision)
	}
	for name, n := range m.Steps {
		if n < 0 {
			return nil, fmt.Errorf("%d steps of %s", n, quote(name))
		}
	}
	seen := map[string]bool{}
	for _, r := range m.Owned {
		if err := r.plan().check(); err != nil {
			return nil, err
		}
		if seen[r.Name] {
			return nil, fmt.Errorf("%s is listed twice", quote(r.Name))
		}
		seen[r.Name] = true
	}
	if m.Adam != nil {
		return m, m.Adam.check()
	}
	return m, nil
}

// checkFolder holds a folder against its manifest: not one file may be missing or too many, nor, if it is looked at as a whole, different in one bit. Then it returns
// the files that it has seen to be so.
func (m *manifest) checkFolder(dir string, whole bool) (seen map[string]fs.FileInfo, err error) {
	wrong := func(name, problem string, err error) (map[string]fs.FileInfo, error) {
		return nil, &AdapterError{Path: dir, Item: name, Problem: problem, Advice: damagedHint, Err: err}
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	seen = map[string]fs.FileInfo{}
	for _, e := range entries {
		if name := e.Name(); name != manifestName && !m.has(name) {
			return wrong(name, "the file is none of the checkpoint's", nil)
		}
	}
	for _, name := range []string{configName, weightsName} {
		if !m.has(name) {
			return wrong(manifestName, fmt.Sprintf("it does not list %s", name), nil)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(m.Files)) {
		r := m.Files[name]
		if !slices.Contains(fileNames, name) || name == manifestName {
			return wrong(manifestName, fmt.Sprintf("it lists %s, which is no file of a checkpoint", quote(name)), nil)
		}
		info, err := os.Stat(filepath.Join(dir, name))
		switch {
		case err != nil:
			return wrong(name, "the file is not there", err)
		case !info.Mode().IsRegular() || info.Size() != r.Bytes:
			return wrong(name, fmt.Sprintf("it has %d bytes, and was saved with %d", info.Size(), r.Bytes), nil)
		case !whole:
			continue
		}
		var sum string
		if sum, seen[name], err = digestFile(filepath.Join(dir, name)); err != nil {
			return wrong(name, "the file cannot be read", err)
		}
		if sum != r.SHA256 {
			return wrong(name, "it is not what was saved: its digest is another", nil)
		}
	}
	return seen, nil
}

func digestFile(path string) (string, fs.FileInfo, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", nil, err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.CopyBuffer(h, f, make([]byte, piece)); err != nil {
		return "", nil, err
	}
	info, err := f.Stat()
	return hex.EncodeToString(h.Sum(nil)), info, err
}
