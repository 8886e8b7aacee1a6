package loader

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/trainerrank/engine/internal/strictjson"
)

const (
	indexName  = "model.safetensors.index.json"
	singleName = "model.safetensors"
	suffix     = ".safetensors"

	// maxIndex is the longest index read, in bytes. The largest known, of 222,747 tensors, has about 20 million.
	maxIndex = MaxHeader
)

// An index says in which file each tensor of a model is. It is an allow-list: a tensor that is also in another file is
// not read from there, and a file that it does not name is not read at all.
type index struct {
	files     []string       // sorted, no two equal
	of        map[string]int // tensor name to index in files
	totalSize string         // the number as written; empty if there is none
}

// parseIndex reads an index. An error is an [*IndexError] without a path.
func parseIndex(text []byte) (*index, error) {
	s, err := strictjson.NewScanner(text)
	if err != nil {
		return nil, indexFault(err)
	}
	x := &index{}
	seen := make(map[string]bool)
	more, err := s.Open('{')
	for more && err == nil {
		var field string
		if field, err = uniqueKey(s, seen); err != nil {
			break
		}
		switch field {
		case "weight_map":
			err = x.weightMap(s)
		case "metadata":
			err = x.metadata(s)
		default:
			err = s.Skip(maxDepth)
		}
		if err == nil {
			more, err = s.More('}')
		}
	}
	if err == nil {
		err = s.End()
	}
	switch {
	case err != nil:
		return nil, indexFault(err)
	case x.of == nil:
		return nil, &IndexError{Problem: "the index has no weight_map"}
	case len(x.of) == 0:
		return nil, &IndexError{Problem: "the index's weight_map is empty"}
	}
	x.sortFiles()
	return x, nil
}

func indexFault(err error) error {
	return &IndexError{Problem: "the index is not sound: " + err.Error(), Err: err}
}

// uniqueKey takes a key and refuses it if it is in seen, to which it is added.
func uniqueKey(s *strictjson.Scanner, seen map[string]bool) (string, error) {
	s.Peek()
	at := s.Offset()
	b, err := s.Key(nil)
	if err != nil {
		return "", err
	}
	key := string(b)
	if seen[key] {
		return "", s.Errorf(at, "duplicate key %s", quote(key))
	}
	seen[key] = true
	return key, nil
}

func (x *index) weightMap(s *strictjson.Scanner) error {
	x.of = make(map[string]int)
	number := make(map[string]int) // file to index in x.files
	more, err := s.Open('{')
	for more && err == nil {
		s.Peek()
		at := s.Offset()
		b, err := s.Key(nil)
		if err != nil {
			return err
		}
		name := string(b)
		if _, dup := x.of[name]; dup {
			return s.Errorf(at, "duplicate key %s", quote(name))
		}
		s.Peek()
		at = s.Offset()
		if b, err = s.Text(nil); err != nil {
			return err
		}
		n, known := number[string(b)]
		if !known {
			file := string(b)
			if why := notPlain(file); why != "" {
				return s.Errorf(at, "the file of tensor %s, %s, %s", quote(name), quote(file), why)
			}
			n = len(x.files)
			number[file] = n
			x.files = append(x.files, file)
		}
		x.of[name] = n
		if more, err = s.More('}'); err != nil {
			return err
		}
	}
	return err
}

// notPlain says why a name is not one of a file below the model folder; empty if it is one. It holds on every system, so
// that a checkpoint means the same everywhere.
func notPlain(name string) string {
	switch {
	case name == "":
		return "is empty"
	case strings.Contains(name, "://"):
		return "is a URL"
	case strings.ContainsRune(name, '\\'):
		return "has a backslash"
	case strings.HasPrefix(name, "/"), len(name) > 1 && name[1] == ':':
		return "is an absolute path"
	case strings.IndexFunc(name, func(r rune) bool { return r < 0x20 || r == 0x7f }) >= 0:
		return "has a control character"
	case slices.Contains(strings.Split(name, "/"), ".."):
		return "leads out of the folder"
	case !fs.ValidPath(name) || name == ".":
		return "is not a plain relative name"
	}
	return ""
}

// metadata takes the total size out of the metadata. All else in there is informational.
func (x *index) metadata(s *strictjson.Scanner) error {
	if s.Peek() != '{' {
		return s.Skip(maxDepth)
	}
	seen := make(map[string]bool)
	more, err := s.Open('{')
	for more && err == nil {
		var field string
		if field, err = uniqueKey(s, seen); err != nil {
			break
		}
		c := s.Peek()
		if field == "total_size" && (c == '-' || '0' <= c && c <= '9') {
			var b []byte
			b, err = s.Number()
			x.totalSize = string(b)
		} else {
			err = s.Skip(maxDepth)
		}
		if err == nil {
			more, err = s.More('}')
		}
	}
	return err
}

// sortFiles renumbers the files in the order of their names, so that the order of a set does not depend on that of the
// index's lines.
func (x *index) sortFiles() {
	sorted := slices.Sorted(slices.Values(x.files))
	to := make([]int, len(sorted))
	for i, file := range x.files {
		to[i], _ = slices.BinarySearch(sorted, file)
	}
	for name, i := range x.of {
		x.of[name] = to[i]
	}
	x.files = sorted
}

// sizeWarning compares the index's total size with the real one. It is often wrong in the wild (weights tied or
// quantised after the index was written), so it is never an error.
func (x *index) sizeWarning(total int64) string {
	if x.totalSize == "" || x.totalSize == strconv.FormatInt(total, 10) {
		return ""
	}
	if strings.ContainsAny(x.totalSize, ".eE") {
		if f, err := strconv.ParseFloat(x.totalSize, 64); err == nil && !math.IsInf(f, 0) && f == float64(total) {
			return ""
		}
	}
	said := x.totalSize
	if len(said) > 40 {
		said = said[:40] + "..."
	}
	return fmt.Sprintf("the index says that the tensors have %s bytes in all; they have %d", said, total)
}

// readIndex reads and parses the index of a folder.
func readIndex(src source) (*index, error) {
	name := src.show(indexName)
	fail := func(err error) error {
		var e *IndexError
		if errors.As(err, &e) {
			e.Path = name
			return e
		}
		return &IndexError{Path: name, Problem: "the index cannot be read: " + err.Error(), Err: err}
	}
	info, err := src.stat(indexName)
	switch {
	case err != nil:
		return nil, fail(err)
	case !info.Mode().IsRegular():
		return nil, &IndexError{Path: name, Problem: "the index is " + kindOf(info.Mode()) + ", not a file"}
	case info.Size() > maxIndex:
		return nil, &IndexError{Path: name, Problem: fmt.Sprintf("the index has %d bytes, more than the %d allowed", info.Size(), maxIndex)}
	}
	f, err := src.open(indexName)
	if err != nil {
		return nil, fail(err)
	}
	defer f.Close()
	text := make([]byte, info.Size())
	if n, err := readFull(f, text, 0); err != nil {
		return nil, fail(fmt.Errorf("wanted %d bytes, got %d: %w", len(text), n, err))
	}
	x, err := parseIndex(text)
	if err != nil {
		if what, hint := sniff(f, info.Size()); what != "" && what != "a JSON text" {
			return nil, &IndexError{Path: name, Problem: "the index is " + what, Hint: hint, Err: err}
		}
		return nil, fail(err)
	}
	return x, nil
}
