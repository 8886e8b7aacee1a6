package main

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/trainerrank/engine/internal/builtin"
)

var update = flag.Bool("update", false, "rewrite what the scripts in testdata expect")

// outcome is what a run of the command left.
type outcome struct {
	code           int
	stdout, stderr string
}

// run runs the command in this process and checks what holds of every run.
func run(t testing.TB, args ...string) outcome {
	t.Helper()
	return runWith(t, t.Context(), "", args...)
}

func runWith(t testing.TB, ctx context.Context, stdin string, args ...string) outcome {
	t.Helper()
	var stdout, stderr bytes.Buffer
	code := (&tool{strings.NewReader(stdin), &stdout, &stderr}).main(ctx, args)
	o := outcome{code, stdout.String(), stderr.String()}
	o.check(t, args)
	return o
}

// check is for what holds of every run: a failure says so in one line and then what to do, and writes no result. plan and inspect are there
// to say what is wrong, so they may have said something before it.
func (o outcome) check(t testing.TB, args []string) {
	t.Helper()
	lines := strings.Split(strings.TrimSuffix(o.stderr, "\n"), "\n")
	said := slices.ContainsFunc(lines, func(l string) bool { return strings.HasPrefix(l, "trainerrank: ") })
	if o.code == exitDone {
		if said {
			t.Errorf("%q: exit 0 with an error:\n%s", args, o.stderr)
		}
		return
	}
	n := len(lines)
	if n < 2 || !strings.HasPrefix(lines[n-2], "trainerrank: ") || !strings.HasPrefix(lines[n-1], "hint: ") {
		t.Errorf("%q: exit %d, but standard error does not end in one line of error and one of hint:\n%s", args, o.code, o.stderr)
	}
	for _, l := range lines[:max(0, n-2)] {
		if strings.HasPrefix(l, "trainerrank: ") || strings.HasPrefix(l, "hint: ") {
			t.Errorf("%q: more than one error:\n%s", args, o.stderr)
		}
	}
	if o.stdout != "" && args[0] != "plan" && args[0] != "inspect" {
		t.Errorf("%q: exit %d with %d bytes on standard output", args, o.code, len(o.stdout))
	}
}

// problem is the line of the error.
func (o outcome) problem() string {
	for l := range strings.Lines(o.stderr) {
		if text, ok := strings.CutPrefix(l, "trainerrank: "); ok {
			return strings.TrimSuffix(text, "\n")
		}
	}
	return ""
}

func (o outcome) String() string {
	var b strings.Builder
	b.WriteString(o.stdout)
	for l := range strings.Lines(o.stderr) {
		fmt.Fprintf(&b, "! %s", l)
	}
	fmt.Fprintf(&b, "exit %d", o.code)
	return b.String()
}

// steady replaces what differs between machines, kernels and days: byte counts, speeds, the last digits of floats.
func steady(s string) string {
	// Rounded, so that no kernel shows.
	s = regexp.MustCompile(`-?[0-9]+\.[0-9]{4,}(e[-+]?[0-9]+)?`).ReplaceAllStringFunc(s, func(f string) string {
		x, err := strconv.ParseFloat(f, 64)
		if err != nil {
			return f
		}
		return strconv.FormatFloat(x, 'f', 2, 64)
	})
	for _, r := range []struct {
		re *regexp.Regexp
		to string
	}{
		{regexp.MustCompile(` \([0-9.]+ [MG]iB\)`), ""},
		{regexp.MustCompile(`kernel (generic|avx2|avx512)`), "kernel K"},
		{regexp.MustCompile(`"kernel": "[^"]*"`), `"kernel": K`},
		{regexp.MustCompile(`[0-9]+ threads?\b`), "N threads"},
		{regexp.MustCompile(`"(threads|seconds)": [-+.e0-9]+`), `"$1": N`},
		{regexp.MustCompile(`[0-9]+ tokens/s`), "N tokens/s"},
		{regexp.MustCompile(`, in [0-9.]+ s, [0-9]+ MB/s`), ", in N s, N MB/s"},
		{regexp.MustCompile(`scratch  .*|predicted peak  .*|usable  .*|weights  .*`), "..."},
		{regexp.MustCompile(`[0-9]+ too many`), "N too many"},
		{regexp.MustCompile(`\b[0-9]{6,}\b`), "N"},
	} {
		s = r.re.ReplaceAllString(s, r.to)
	}
	return s
}

// TestScripts runs the files of testdata. A file is a list of blocks:
//
//	command with its arguments
//	input of the command, if it has any
//	----
//	what it is expected to print, up to a blank line
//
// In input and output ~ stands for a blank line.
// What lies between blocks and begins with # is a comment. A script has a folder to itself, which is the working directory. Its commands are
// the methods of script. With -update the expected parts are rewritten.
func TestScripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no scripts: %v", err)
	}
	for _, file := range files {
		path, err := filepath.Abs(file)
		if err != nil {
			t.Fatal(err)
		}
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			data, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			t.Chdir(t.TempDir())
			var out strings.Builder
			lines := strings.Split(strings.TrimRight(string(data), "\n"), "\n")
			for i := 0; i < len(lines); i++ {
				if lines[i] == "" || strings.HasPrefix(lines[i], "#") {
					out.WriteString(lines[i] + "\n")
					continue
				}
				n, end := slices.Index(lines[i:], "----"), slices.Index(lines[i:], "")
				if end < 0 {
					end = len(lines) - i
				}
				if n < 0 || end < n {
					t.Fatalf("%s:%d: no ---- after the command and its input", path, i+1)
				}
				s := script{t}
				input := slices.Clone(lines[i+1 : i+n])
				for j, l := range input {
					if l == "~" {
						input[j] = ""
					}
				}
				got := s.do(lines[i], input)
				got = strings.Split(steady(strings.Join(got, "\n")), "\n")
				for j, l := range got {
					if l == "" {
						got[j] = "~"
					}
				}
				if len(got) == 1 && got[0] == "~" {
					got = nil
				}
				if want := lines[i+n+1 : i+end]; !*update && !slices.Equal(want, got) {
					t.Errorf("%s:%d: %s\n-want +got\n%s", path, i+1, lines[i], cmp.Diff(strings.Join(want, "\n"), strings.Join(got, "\n")))
				}
				for _, l := range slices.Concat(lines[i:i+n+1], got) {
					out.WriteString(l + "\n")
				}
				i += end - 1
			}
			if *update {
				if err := os.WriteFile(path, []byte(out.String()), 0o644); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

type script struct{ *testing.T }

// do runs one command of a script and returns the lines that it printed.
func (s script) do(command string, input []string) []string {
	s.Helper()
	args := words(command)
	text := strings.Join(input, "\n")
	must := func(err error) {
		s.Helper()
		if err != nil {
			s.Fatalf("%s: %v", command, err)
		}
	}
	switch args[0] {
	case "run": // ARGS...: the command line; the input is what stands on standard input
		if text != "" {
			text += "\n"
		}
		return strings.Split(runWith(s, s.Context(), text, args[1:]...).String(), "\n")
	case "file": // NAME: write a file
		must(os.MkdirAll(filepath.Dir(args[1]), 0o755))
		must(os.WriteFile(args[1], []byte(text+"\n"), 0o644))
	case "cat": // NAME
		data, err := os.ReadFile(args[1])
		must(err)
		return strings.Split(strings.TrimSuffix(string(data), "\n"), "\n")
	case "same": // NAME NAME: whether two files are
		a, err := os.ReadFile(args[1])
		must(err)
		b, err := os.ReadFile(args[2])
		must(err)
		return []string{fmt.Sprint(bytes.Equal(a, b))}
	case "ls": // DIR: names, and what is no file
		var list []string
		entries, err := os.ReadDir(args[1])
		must(err)
		for _, e := range entries {
			list = append(list, strings.TrimPrefix(fmt.Sprintf("%v %s", e.Type(), e.Name()), "---------- "))
		}
		return list
	case "do": // the lines of the input are changes: see change
		for _, l := range input {
			change(s, ".", words(l))
		}
	case "model": // DIR: a copy of the built-in model
		copyModel(s, args[1])
	case "shards": // DIR: the built-in model in three files with an index
		shardModel(s, args[1])
	case "adapter": // DIR RANK: an adapter of the built-in model, as PEFT would save it
		rank, err := strconv.Atoi(args[2])
		must(err)
		makeAdapter(s, args[1], rank, 0)
	case "checkpoint": // DIR RANK STEPS: one that the engine trained and saved
		rank, err := strconv.Atoi(args[2])
		must(err)
		steps, err := strconv.Atoi(args[3])
		must(err)
		makeAdapter(s, args[1], rank, steps)
	case "lines": // each line of the input alone, as the third line of a request file: place and problem of the error
		return s.lines(input)
	case "damage": // MODEL VERB [quiet]: each line is a list of changes, with ; between them, to a fresh copy of the model
		list := s.damage(args[1], args[2], input)
		for i := range list {
			if len(args) > 3 { // without the error's text
				list[i], _, _ = strings.Cut(list[i], " ")
			}
		}
		return list
	default:
		s.Fatalf("unknown command %q", command)
	}
	return nil
}

// words splits a line at spaces; a word in quotes is a Go string.
func words(line string) []string {
	var list []string
	for line = strings.TrimSpace(line); line != ""; line = strings.TrimSpace(line) {
		if q, err := strconv.QuotedPrefix(line); err == nil {
			text, err := strconv.Unquote(q)
			if err != nil {
				panic(err)
			}
			list, line = append(list, text), line[len(q):]
			continue
		}
		word, rest, _ := strings.Cut(line, " ")
		list, line = append(list, word), rest
	}
	return list
}

// lines tries malformed requests. A line in backquotes is a Go string.
func (s script) lines(input []string) []string {
	var list []string
	for _, l := range input {
		if text, err := strconv.Unquote(l); err == nil {
			l = text
		}
		must(s, os.WriteFile("lines.jsonl", []byte("\n{\"id\": 0, \"input_tokens\": [1, 2]}\r\n"+l+"\n"), 0o644))
		o := run(s, "score", "--requests", "lines.jsonl")
		p, ok := strings.CutPrefix(o.problem(), "read requests: lines.jsonl:3")
		if o.code != exitFailed || !ok {
			s.Errorf("line %.80s: exit %d: %s", l, o.code, o.problem())
		}
		list = append(list, strings.TrimPrefix(p, ":"))
	}
	return list
}

// damage tries damaged folders.
func (s script) damage(model, verb string, input []string) []string {
	var list []string
	for i, l := range input {
		dir := "damaged"
		must(s, os.RemoveAll(dir))
		must(s, os.CopyFS(dir, os.DirFS(model)))
		for c := range strings.SplitSeq(l, ";") {
			change(s, dir, words(c))
		}
		args := []string{verb, dir}
		if verb != "inspect" {
			args = []string{verb, "--model", dir, "--requests", filepath.Join(model, "requests.jsonl")}
		}
		o := run(s, args...)
		if strings.Contains(o.problem(), "\x1b") {
			s.Errorf("%s:%d: control characters in %q", model, i, o.problem())
		}
		list = append(list, fmt.Sprintf("%d %s", o.code, o.problem()))
	}
	return list
}

// change makes one change in a folder.
func change(t testing.TB, dir string, args []string) {
	t.Helper()
	path := filepath.Join(dir, args[1])
	read := func() []byte {
		data, err := os.ReadFile(path)
		must(t, err)
		return data
	}
	write := func(data []byte) { must(t, os.WriteFile(path, data, 0o644)) }
	number := func() int64 {
		n, err := strconv.ParseInt(args[2], 10, 64)
		must(t, err)
		return n
	}
	switch args[0] {
	case "remove":
		must(t, os.RemoveAll(path))
	case "truncate": // to so many bytes; negative: by so many
		n := number()
		if n < 0 {
			n += int64(len(read()))
		}
		must(t, os.Truncate(path, n))
	case "append":
		write(append(read(), args[2]...))
	case "write":
		write([]byte(args[2]))
	case "zero":
		write(make([]byte, len(read())))
	case "replace": // OLD NEW: the first one
		data := read()
		if !bytes.Contains(data, []byte(args[2])) {
			t.Fatalf("%s holds no %q", path, args[2])
		}
		write(bytes.Replace(data, []byte(args[2]), []byte(args[3]), 1))
	case "put": // OFFSET BYTES; the offset counts from the end if it is negative
		data, n := read(), number()
		if n < 0 {
			n += int64(len(data))
		}
		copy(data[n:], args[3])
		write(data)
	case "dir":
		must(t, os.RemoveAll(path))
		must(t, os.Mkdir(path, 0o755))
	case "fifo":
		must(t, os.RemoveAll(path))
		must(t, exec.Command("mkfifo", path).Run())
	case "link": // to
		must(t, os.RemoveAll(path))
		must(t, os.Symlink(args[2], path))
	case "move": // to
		must(t, os.Rename(path, filepath.Join(dir, args[2])))
	case "mode":
		mode, err := strconv.ParseUint(args[2], 8, 32)
		must(t, err)
		must(t, os.Chmod(path, fs.FileMode(mode)))
	default:
		t.Fatalf("unknown change %q", args)
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// copyModel writes the built-in model to a folder.
func copyModel(t testing.TB, dir string) {
	t.Helper()
	folder, err := builtin.Open(builtin.Default)
	must(t, err)
	must(t, os.MkdirAll(dir, 0o755))
	for _, name := range []string{"config.json", "model.safetensors", "requests.jsonl"} {
		data, err := fs.ReadFile(folder, name)
		must(t, err)
		must(t, os.WriteFile(filepath.Join(dir, name), data, 0o644))
	}
}

// shardModel writes the built-in model as three files with an index.
func shardModel(t testing.TB, dir string) {
	t.Helper()
	copyModel(t, dir)
	path := filepath.Join(dir, "model.safetensors")
	tensors := readTensors(t, path)
	must(t, os.Remove(path))
	index := map[string]string{}
	const shards = 3
	for i := range shards {
		name := fmt.Sprintf("model-%05d-of-%05d.safetensors", i+1, shards)
		part := tensors[i*len(tensors)/shards : (i+1)*len(tensors)/shards]
		for _, x := range part {
			index[x.name] = name
		}
		writeTensors(t, filepath.Join(dir, name), part)
	}
	data, err := json.Marshal(map[string]any{"metadata": map[string]any{}, "weight_map": index})
	must(t, err)
	must(t, os.WriteFile(filepath.Join(dir, "model.safetensors.index.json"), data, 0o644))
}
