package loader

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
)

// folder is a model folder in memory: each file's text or bytes by its name.
func folder(files map[string]string) fstest.MapFS {
	m := fstest.MapFS{}
	for name, data := range files {
		m[name] = &fstest.MapFile{Data: []byte(data)}
	}
	return m
}

// shard is a file with one I32 tensor [1] for each name.
func shard(names ...string) string {
	var entries []string
	for i, name := range names {
		entries = append(entries, entry(name, "I32", "[1]", 4*i, 4*i+4))
	}
	return string(whole(header(entries...), 4*len(names)))
}

// weightMap is an index: pairs of tensor and file.
func weightMap(pairs ...string) string {
	var lines []string
	for i := 0; i < len(pairs); i += 2 {
		lines = append(lines, fmt.Sprintf("%q: %q", pairs[i], pairs[i+1]))
	}
	return `{"weight_map": {` + strings.Join(lines, ", ") + `}}`
}

const s1, s2, s3 = "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors"

func three() map[string]string {
	return map[string]string{
		indexName: weightMap("a", s1, "b", s2, "c", s3, "d", s1),
		s1:        shard("a", "d"), s2: shard("b"), s3: shard("c"),
	}
}

func with(base map[string]string, pairs ...string) map[string]string {
	m := maps.Clone(base)
	for i := 0; i < len(pairs); i += 2 {
		m[pairs[i]] = pairs[i+1]
		if pairs[i+1] == "" {
			delete(m, pairs[i])
		}
	}
	return m
}

// recorder notes which files are opened for reading.
type recorder struct {
	fstest.MapFS
	mu     sync.Mutex
	opened []string
}

func (r *recorder) Open(name string) (fs.File, error) {
	r.mu.Lock()
	r.opened = append(r.opened, name)
	r.mu.Unlock()
	return r.MapFS.Open(name)
}

func TestIndexIsAnAllowList(t *testing.T) {
	stray := string(whole(header(entry("b", "F32", "[4]", 0, 16)), 16))
	base := three()
	for _, c := range []struct {
		name    string
		files   map[string]string
		names   string // tensor:file
		ignored string // per file
		warning string
	}{
		{"plain", base, "a:0 b:1 c:2 d:0", "[0 0 0]", ""},
		{"strays are not read", with(base, "model.safetensors", "junk", "consolidated.safetensors", "junk", "adapter_model.safetensors", stray,
			"model-00001-of-00002.safetensors", "junk", "copy/"+s1, "junk"), "a:0 b:1 c:2 d:0", "[0 0 0]", ""},
		{"unlisted tensors do not overwrite", with(base, s1, shard("a", "d", "x", "y"), s3, shard("c", "b")), "a:0 b:1 c:2 d:0", "[2 0 1]",
			"2 tensors of m/" + s1 + " are ignored"},
		{"gaps and wrong numbers in names", map[string]string{
			indexName:                          weightMap("a", "model-00007-of-00003.safetensors", "b", "layers-0.safetensors"),
			"model-00007-of-00003.safetensors": shard("a"), "layers-0.safetensors": shard("b"),
		}, "a:1 b:0", "[0 0]", ""},
		{"below the folder", map[string]string{indexName: weightMap("a", "text/sub/x.safetensors"), "text/sub/x.safetensors": shard("a")}, "a:0", "[0]", ""},
		{"exact size", with(base, indexName, strings.Replace(base[indexName], "{", `{"metadata": {"total_size": 16}, `, 1)), "a:0 b:1 c:2 d:0", "[0 0 0]", ""},
		{"size as a float", with(base, indexName, strings.Replace(base[indexName], "{", `{"metadata": {"total_size": 16.0}, `, 1)), "a:0 b:1 c:2 d:0", "[0 0 0]", ""},
		{"wrong size", with(base, indexName, strings.Replace(base[indexName], "{", `{"metadata": {"total_size": 17, "x": [{}]}, `, 1)), "a:0 b:1 c:2 d:0", "[0 0 0]",
			"the index says that the tensors have 17 bytes in all; they have 16"},
		{"size of another kind", with(base, indexName, strings.Replace(base[indexName], "{", `{"metadata": {"total_size": "16"}, "more": null, `, 1)), "a:0 b:1 c:2 d:0", "[0 0 0]", ""},
		{"metadata of another kind", with(base, indexName, strings.Replace(base[indexName], "{", `{"metadata": null, `, 1)), "a:0 b:1 c:2 d:0", "[0 0 0]", ""},
		{"escaped name", with(base, indexName, strings.Replace(base[indexName], `"a"`, `"\u0061"`, 1)), "a:0 b:1 c:2 d:0", "[0 0 0]", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			fsys := &recorder{MapFS: folder(c.files)}
			s, err := OpenFS(fsys, "m")
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			var names []string
			for _, name := range s.Names() {
				x, _ := s.Tensor(name)
				names = append(names, fmt.Sprintf("%s:%d", name, x.File))
				if err := s.ReadAt(x, make([]byte, 4), 0); err != nil || x.DType != I32 {
					t.Errorf("%v: %v", x, err)
				}
			}
			if got := strings.Join(names, " "); got != c.names {
				t.Errorf("tensors %s, want %s", got, c.names)
			}
			var ignored []int
			listed := 0
			for _, f := range s.Files {
				ignored = append(ignored, f.Ignored)
				listed += len(f.Tensors)
				if !slices.Contains(fsys.opened, f.name) {
					t.Errorf("%s was not opened", f.name)
				}
			}
			if got := fmt.Sprint(ignored); got != c.ignored {
				t.Errorf("ignored %s, want %s", got, c.ignored)
			}
			if got := strings.Join(s.Warnings, "\n"); !strings.Contains(got, c.warning) || c.warning == "" && got != "" {
				t.Errorf("warnings %q, want %q", got, c.warning)
			}
			if listed != len(s.Names()) || s.TotalBytes() != int64(4*listed) {
				t.Errorf("%d tensors in the files, %d by name, %d bytes", listed, len(s.Names()), s.TotalBytes())
			}
			for _, name := range fsys.opened {
				if name != indexName && !slices.ContainsFunc(s.Files, func(f *File) bool { return f.name == name }) {
					t.Errorf("%s was opened", name)
				}
			}
		})
	}
}

func TestStrictIndexRefusesExtraTensors(t *testing.T) {
	_, err := ParseOptions{Strict: true}.OpenFS(folder(with(three(), s1, shard("a", "d", "x", "y"))), "m")
	var e *IndexError
	if !errors.As(err, &e) || !strings.Contains(err.Error(), `2 tensors of "`+s1+`", "y" among them, are not assigned`) {
		t.Error(err)
	}
}

func TestIndexFaults(t *testing.T) {
	base := three()
	for _, c := range []struct {
		name  string
		index string
		want  string
	}{
		{"empty", "", "found the end of the text, want an object"},
		{"not an object", "[]", "found a list, want an object"},
		{"cut", base[indexName][:30], "without its closing quote"},
		{"trailing", base[indexName] + "x", "'x' after the end"},
		{"no map", `{"metadata": {}}`, "has no weight_map"},
		{"map is null", `{"weight_map": null}`, "found null, want an object"},
		{"map is empty", `{"weight_map": {}}`, "weight_map is empty"},
		{"file is a number", `{"weight_map": {"a": 1}}`, "line 1, column 22: found a number, want a string"},
		{"file is null", `{"weight_map": {"a": null}}`, "found null, want a string"},
		{"tensor twice", `{"weight_map": {"a": "x", "a": "y"}}`, `duplicate key "a"`},
		{"tensor twice alike", `{"weight_map": {"a": "x", "\u0061": "x"}}`, `duplicate key "a"`},
		{"map twice", `{"weight_map": {"a": "x"}, "weight_map": {"a": "x"}}`, `duplicate key "weight_map"`},
		{"size twice", `{"metadata": {"total_size": 1, "total_size": 1}, "weight_map": {"a": "x"}}`, `duplicate key "total_size"`},
		{"deep", `{"x": ` + strings.Repeat("[", 1000) + strings.Repeat("]", 1000) + `}`, "nested deeper"},
		{"not UTF-8", "{\"weight_map\": {\"a\xff\": \"x\"}}", "not UTF-8"},
		{"surrogate", `{"weight_map": {"a\ud800": "x"}}`, "half of a surrogate pair"},
		{"no file", weightMap("a", ""), "is empty"},
		{"parent", weightMap("a", "../x.safetensors"), `the file of tensor "a", "../x.safetensors", leads out of the folder`},
		{"hidden parent", weightMap("a", "sub/../../x.safetensors"), "leads out of the folder"},
		{"absolute", weightMap("a", "/etc/passwd"), "is an absolute path"},
		{"drive", weightMap("a", "C:x.safetensors"), "is an absolute path"},
		{"URL", weightMap("a", "https://host/x.safetensors"), "is a URL"},
		{"backslash", `{"weight_map": {"a": "sub\\x.safetensors"}}`, "has a backslash"},
		{"zero byte", `{"weight_map": {"a": "x\u0000.safetensors"}}`, "has a control character"},
		{"dot", weightMap("a", "."), "is not a plain relative name"},
		{"dot slash", weightMap("a", "./x.safetensors"), "is not a plain relative name"},
		{"double slash", weightMap("a", "sub//x.safetensors"), "is not a plain relative name"},
		{"trailing slash", weightMap("a", "sub/"), "is not a plain relative name"},
		{"LFS pointer", "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n", "the index is a Git LFS pointer"},
		{"web page", "<!doctype html>", "the index is a web page"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := OpenFS(folder(map[string]string{indexName: c.index, s1: shard("a"), "x": shard("a"), "y": shard("a")}), "m")
			var e *IndexError
			if !errors.As(err, &e) || !strings.Contains(err.Error(), c.want) || !strings.HasPrefix(err.Error(), "open m/"+indexName+": ") {
				t.Errorf("%v, want ...%s...", err, c.want)
			}
		})
	}
}

func TestMissingShardsAreAllNamed(t *testing.T) {
	_, err := OpenFS(folder(with(three(), s2, "", s3, "")), "m")
	var e *IndexError
	if !errors.As(err, &e) || !slices.Equal(e.Missing, []string{s2, s3}) || e.Unlisted != nil {
		t.Fatalf("%v", err)
	}
	if !strings.Contains(err.Error(), s2) || !strings.Contains(err.Error(), s3) || !strings.Contains(Hint(err), "fetch the missing files") {
		t.Errorf("%v; %s", err, Hint(err))
	}
}

func TestStaleIndexListsMissingAndUnlistedFiles(t *testing.T) {
	_, err := OpenFS(folder(map[string]string{
		indexName:                          weightMap("a", s1, "b", s2, "c", s3),
		"model-00001-of-00002.safetensors": shard("a"), "model-00002-of-00002.safetensors": shard("b", "c"), s1: shard("a"),
	}), "m")
	var e *IndexError
	if !errors.As(err, &e) || !slices.Equal(e.Missing, []string{s2, s3}) ||
		!slices.Equal(e.Unlisted, []string{"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}) {
		t.Fatalf("%v", err)
	}
	if !strings.Contains(err.Error(), "there but not listed") || !strings.Contains(Hint(err), "another version") {
		t.Errorf("%v; %s", err, Hint(err))
	}
}

func TestTensorsAbsentFromTheirFile(t *testing.T) {
	files := with(three(), s1, shard("a"), s2, shard("d"), s3, shard("c"))
	_, err := OpenFS(folder(files), "m")
	var e *IndexError
	if !errors.As(err, &e) || !slices.Equal(e.Absent, []AbsentTensor{{"b", s2, ""}, {"d", s1, s2}}) {
		t.Fatalf("%v", err)
	}
	if want := fmt.Sprintf(`"b" in %q, "d" in %q (but in %q)`, s2, s1, s2); !strings.Contains(err.Error(), want) {
		t.Errorf("%v, want ...%s", err, want)
	}
	// Many are counted, not all shown.
	var pairs []string
	for i := range 100 {
		pairs = append(pairs, fmt.Sprintf("t%02d", i), s1)
	}
	_, err = OpenFS(folder(map[string]string{indexName: weightMap(pairs...), s1: shard("a")}), "m")
	if !errors.As(err, &e) || len(e.Absent) != 100 || !strings.HasSuffix(err.Error(), "and 92 more") {
		t.Errorf("%v", err)
	}
}

func TestEveryShortFileIsListedWithWhatItLacks(t *testing.T) {
	base := three()
	const pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
	files := with(base, s1, base[s1][:len(base[s1])-2], s2, pointer, s3, base[s3][:len(base[s3])-3])
	_, err := OpenFS(folder(files), "m")
	var e *FilesError
	if !errors.As(err, &e) || len(e.Errs) != 3 || e.Total != 3 || e.Missing != 5 {
		t.Fatalf("%#v", err)
	}
	text := err.Error()
	for _, want := range []string{
		"open m/" + indexName + ": 3 of 3 files are unusable (5 bytes missing in all)", "m/" + s1 + ": the file is truncated by 2 bytes",
		"m/" + s2 + ": the header is too long; the file is a Git LFS pointer", "m/" + s3 + ": the file is truncated by 3 bytes",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("%s\nhas no %s", text, want)
		}
	}
	var f *FormatError
	if !errors.As(err, &f) || f.Missing != 2 || Hint(err) != truncatedHint {
		t.Errorf("%v, hint %q", f, Hint(err))
	}
	// One bad file is not wrapped.
	_, err = OpenFS(folder(with(base, s1, base[s1][:len(base[s1])-2])), "m")
	if _, ok := err.(*FormatError); !ok {
		t.Errorf("%#v", err)
	}
}

func TestFolderWithoutAnIndex(t *testing.T) {
	for _, c := range []struct {
		name  string
		files map[string]string
		want  string // part of the error
		hint  string
	}{
		{"single", map[string]string{singleName: shard("a"), "other.safetensors": "junk"}, "", ""},
		{"nothing", map[string]string{"config.json": "{}"}, "open m: the folder has neither model.safetensors.index.json nor model.safetensors", ""},
		{"one other", map[string]string{"lora.safetensors": shard("a")}, `there but not listed: "lora.safetensors"`, "give its own path"},
		{"shards", map[string]string{s1: shard("a"), s2: shard("b")}, s1 + `", "` + s2, "get the checkpoint's " + indexName},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, err := OpenFS(folder(c.files), "m")
			if c.want == "" {
				if err != nil || fmt.Sprint(s.Names()) != "[a]" {
					t.Fatal(err)
				}
				return
			}
			var e *IndexError
			if !errors.As(err, &e) || !strings.Contains(err.Error(), c.want) || !strings.Contains(Hint(err), c.hint) {
				t.Errorf("%v; %s", err, Hint(err))
			}
		})
	}
}

// The output head of a model with tied embeddings is absent, and is not made up.
func TestTiedTensorIsNotInvented(t *testing.T) {
	s, err := OpenFS(folder(map[string]string{singleName: shard("model.embed_tokens.weight")}), "m")
	if err != nil {
		t.Fatal(err)
	}
	if x, ok := s.Tensor("lm_head.weight"); ok || x != nil {
		t.Errorf("found %v", x)
	}
}

func TestIndexThatIsADirectory(t *testing.T) {
	_, err := OpenFS(folder(map[string]string{indexName + "/x": ""}), "m")
	if err == nil || !strings.Contains(err.Error(), "the index is a directory") {
		t.Error(err)
	}
}
