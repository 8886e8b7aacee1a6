package loader

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"io/fs"
	"strings"
	"testing"
	"testing/fstest"
)

// FuzzHeader opens files of any content. What is accepted must be what encoding/json reads from the same bytes, must
// account for every byte, and must be accepted again in every stricter way it claims; nothing may panic.
func FuzzHeader(f *testing.F) {
	for _, c := range formatCases() {
		if len(c.file) < 4096 {
			f.Add(c.file)
		}
	}
	f.Fuzz(func(t *testing.T, file []byte) {
		s, err := openBytes(file, ParseOptions{})
		if err != nil {
			var e *FormatError
			if !errors.As(err, &e) || e.Problem == "" || e.Path == "" || len(err.Error()) > 4096 {
				t.Fatalf("error %#v", err)
			}
			if _, err := openBytes(file, ParseOptions{Strict: true}); err == nil {
				t.Fatal("strict mode accepts what is refused without it")
			}
			return
		}
		checkSound(t, s, file)
		n := binary.LittleEndian.Uint64(file)
		var top map[string]json.RawMessage
		if err := json.Unmarshal(file[8:8+n], &top); err != nil {
			t.Fatalf("accepted what encoding/json refuses: %v", err)
		}
		delete(top, "__metadata__")
		if len(top) != len(s.Names()) {
			t.Fatalf("%d tensors, want %d", len(s.Names()), len(top))
		}
		for name, raw := range top {
			var fields map[string]json.RawMessage
			if err := json.Unmarshal(raw, &fields); err != nil {
				t.Fatal(err)
			}
			var dtype string
			var shape []uint64
			var offsets []int64
			if json.Unmarshal(fields["dtype"], &dtype) != nil || json.Unmarshal(fields["shape"], &shape) != nil || json.Unmarshal(fields["data_offsets"], &offsets) != nil {
				t.Fatalf("accepted the entry %s", raw)
			}
			x, ok := s.Tensor(name)
			if !ok || x.DType.String() != dtype || len(x.Shape) != len(shape) || len(offsets) != 2 ||
				x.Offset != s.Files[0].DataStart+offsets[0] || x.Bytes != offsets[1]-offsets[0] {
				t.Fatalf("tensor %v at %d, want %s", x, x.Offset, raw)
			}
		}
	})
}

// FuzzIndex opens a folder with an index of any content. Whatever it says, only files below the folder may be asked
// for, and what is accepted must be what encoding/json reads.
func FuzzIndex(f *testing.F) {
	for _, text := range []string{
		three()[indexName], weightMap("a", s1), weightMap("a", "../x"), weightMap("a", "sub/x.safetensors"), weightMap("b", s1), "{}", "",
		`{"metadata": {"total_size": 4.0, "x": []}, "weight_map": {"a": "model-00001-of-00003.safetensors"}}`,
		`{"weight_map": {"a": "x", "\u0061": "x"}}`, `{"weight_map": {"a": "https://x/y"}}`, `{"weight_map": null}`,
		`{"metadata": {"total_size": 1e400}, "weight_map": {"d": "model-00001-of-00003.safetensors"}}`,
	} {
		f.Add([]byte(text))
	}
	base := folder(with(three(), "sub/x.safetensors", shard("a", "e")))
	f.Fuzz(func(t *testing.T, text []byte) {
		m := fstest.MapFS{}
		for name, file := range base {
			m[name] = file
		}
		m[indexName] = &fstest.MapFile{Data: text}
		s, err := OpenFS(watched{m, t}, "m")
		if err != nil {
			var e *IndexError
			if !errors.As(err, &e) || e.Problem == "" || e.Path == "" {
				t.Fatalf("error %#v", err)
			}
			return
		}
		var want struct {
			Map map[string]string `json:"weight_map"`
		}
		if err := json.Unmarshal(text, &want); err != nil {
			t.Fatalf("accepted what encoding/json refuses: %v", err)
		}
		if want.Map != nil && len(want.Map) == len(s.Names()) {
			for name, file := range want.Map {
				if x, ok := s.Tensor(name); !ok || s.Files[x.File].name != file {
					t.Fatalf("tensor %q is not from %q", name, file)
				}
			}
		} else if !strings.Contains(strings.ToLower(string(text)), `weight_map`) {
			t.Fatalf("%d tensors, want %d", len(s.Names()), len(want.Map))
		}
	})
}

// watched fails a test that asks for a name outside the folder.
type watched struct {
	fstest.MapFS
	t *testing.T
}

func (w watched) Open(name string) (fs.File, error) {
	if !fs.ValidPath(name) || strings.ContainsAny(name, "\\\x00") {
		w.t.Errorf("asked for %q", name)
	}
	return w.MapFS.Open(name)
}

func (w watched) Stat(name string) (fs.FileInfo, error) {
	if !fs.ValidPath(name) || strings.ContainsAny(name, "\\\x00") {
		w.t.Errorf("asked about %q", name)
	}
	return w.MapFS.Stat(name)
}
