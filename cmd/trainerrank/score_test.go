package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/trainerrank/engine/trainerrank"
)

// bundled are the requests of the built-in model, a line each.
func bundled(t testing.TB) []string {
	t.Helper()
	data, err := os.ReadFile("../../internal/builtin/arith/requests.jsonl")
	must(t, err)
	return strings.Split(strings.TrimSpace(string(data)), "\n")
}

func writeLines(t testing.TB, lines []string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "requests.jsonl")
	must(t, os.WriteFile(path, []byte(strings.Join(lines, "\n")+"\n"), 0o644))
	return path
}

// summarized runs the command and reads its summary.
func summarized(t testing.TB, args ...string) (outcome, summary) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "summary.json")
	o := run(t, append(args, "--summary", path)...)
	var s summary
	if data, err := os.ReadFile(path); err == nil {
		d := json.NewDecoder(bytes.NewReader(data))
		d.DisallowUnknownFields()
		must(t, d.Decode(&s))
	}
	return o, s
}

// mixed is a request file in which every kind of output is asked for.
func mixed(t testing.TB) []string {
	lines := bundled(t)[:12]
	for i := range 8 {
		lines = append(lines, fmt.Sprintf(`{"id": "m%d", "input_tokens": [1, 2, %d, 4, %d, 6], "top_k": %d, "logits": %v, "hidden_states": %v}`, i, i, i/2, i%4, i%3 == 1, i%2 == 1))
	}
	return lines
}

func TestAnswersKeepTheFilesOrderAndIDs(t *testing.T) {
	path := writeLines(t, mixed(t))
	o := run(t, "score", "--requests", path)
	if o.code != exitDone {
		t.Fatal(o.stderr)
	}
	lines := strings.Split(strings.TrimSuffix(o.stdout, "\n"), "\n")
	if len(lines) != len(mixed(t)) {
		t.Fatalf("%d answers", len(lines))
	}
	for i, want := range mixed(t) {
		var q, a map[string]any
		must(t, json.Unmarshal([]byte(want), &q))
		if err := json.Unmarshal([]byte(lines[i]), &a); err != nil {
			t.Fatalf("answer %d: %v", i, err)
		}
		if q["id"] != a["id"] {
			t.Errorf("answer %d is that of %v, want %v", i, a["id"], q["id"])
		}
		n := len(q["input_tokens"].([]any))
		for field, x := range a {
			if field == "id" {
				continue
			}
			if top, ok := x.(map[string]any); ok {
				if got := slices.Sorted(maps.Keys(top)); !slices.Equal(got, []string{"logprobs", "tokens"}) {
					t.Errorf("answer %d: top_k has %q", i, got)
				}
				x = top["tokens"]
			}
			if got := len(x.([]any)); got != n {
				t.Errorf("answer %d: %s has %d positions, want %d", i, field, got, n)
			}
		}
	}
}

// The same bytes whatever the threads, the order and the neighbours, and wherever they are written to.
func TestAnswersAreTheSameBytes(t *testing.T) {
	lines := mixed(t)
	want := map[string]string{}
	whole := run(t, "score", "--requests", writeLines(t, lines))
	for l := range strings.Lines(whole.stdout) {
		id, _, _ := strings.Cut(l, ",")
		want[id] = l
	}
	for i, args := range [][]string{{"--threads", "1"}, {"--threads", "2"}, {"--threads", "5"}, {"--budget", "64MiB"}} {
		some := slices.Clone(lines)
		slices.Reverse(some)
		some = some[i:]
		out := filepath.Join(t.TempDir(), "answers")
		if o := run(t, "score", "--requests", writeLines(t, some), "--out", out, args[0], args[1]); o.code != exitDone {
			t.Fatal(o.stderr)
		}
		data, err := os.ReadFile(out)
		must(t, err)
		n := 0
		for l := range strings.Lines(string(data)) {
			n++
			id, _, _ := strings.Cut(l, ",")
			if want[id] != l {
				t.Errorf("%v: the answer to %s differs", args, id)
			}
		}
		if n != len(some) {
			t.Errorf("%v: %d answers, want %d", args, n, len(some))
		}
	}
}

// What is predicted is what is used, whole or split; with what the whole call needs it runs whole, with less it is split, down to the
// smallest budget, and one byte less is refused before a weight is read.
func TestTheBudgetIsExact(t *testing.T) {
	split := 0
	for name, lines := range map[string][]string{
		"bundled": bundled(t), "mixed": mixed(t), "one": {`{"input_tokens": [1]}`}, "none": {""},
		"all ignored": {`{"input_tokens": [1, 2], "target_tokens": [-100, -100]}`},
	} {
		for _, threads := range []string{"1", "3"} {
			args := []string{"score", "--requests", writeLines(t, lines), "--threads", threads}
			o, s := summarized(t, args...)
			if o.code != exitDone || s.Verdict != "whole" || s.PredictedPeakBytes == 0 || s.PredictedPeakBytes != s.ObservedPeakBytes || s.SmallestBudgetBytes > s.PredictedPeakBytes {
				t.Fatalf("%s: exit %d, %+v", name, o.code, s)
			}
			answers, need, least, weights := o.stdout, s.PredictedPeakBytes, s.SmallestBudgetBytes, s.WeightsBytes
			with := func(budget int64) (outcome, summary) {
				return summarized(t, append(args, "--budget", fmt.Sprint(budget))...)
			}
			for _, budget := range []int64{need + 1, need, need - 1, (need + least) / 2, least} {
				if budget < least {
					continue
				}
				o, s := with(budget)
				verdict := "whole"
				if budget < need {
					verdict = "split"
					split++
				}
				if string(s.Verdict) != verdict || (s.SubforwardCount > 1) != (verdict == "split") {
					t.Errorf("%s: at %d of %d..%d: %+v", name, budget, least, need, s)
				}
				if o.code != exitDone || s.ObservedPeakBytes != s.PredictedPeakBytes || s.PredictedPeakBytes > budget || s.UsableLimitBytes != budget || s.SmallestBudgetBytes != least {
					t.Errorf("%s: at %d: exit %d, %+v", name, budget, o.code, s)
				}
				if o.stdout != answers {
					t.Errorf("%s: at %d the answers are others", name, budget)
				}
			}
			for _, budget := range []int64{least - 1, weights + 1, weights, weights - 1, 1} {
				o, s := with(budget)
				if o.code != exitRefused || s.Verdict != "refused" || s.PredictedPeakBytes != need || s.SmallestBudgetBytes != least || s.ObservedPeakBytes != 0 || s.UsableLimitBytes != budget {
					t.Errorf("%s: at %d of %d: exit %d, %+v", name, budget, need, o.code, s)
				}
				for _, number := range []int64{need, budget} {
					if !strings.Contains(o.problem(), fmt.Sprint(number)) {
						t.Errorf("%s: the refusal at %d does not name %d: %s", name, budget, number, o.problem())
					}
				}
				low := strings.ToLower(o.stderr)
				if !strings.Contains(low, "unable to find a feasible split") || !strings.Contains(low, "smaller") || strings.Contains(low, "infeasible") || strings.Contains(low, "no feasible") {
					t.Errorf("%s: a refusal in other words: %s", name, o.stderr)
				}
				if p := run(t, "plan", "--requests", args[2], "--threads", threads, "--budget", fmt.Sprint(budget)); p.code != exitRefused {
					t.Errorf("%s: plan at %d: exit %d", name, budget, p.code)
				}
			}
		}
	}
	if split == 0 {
		t.Error("nothing was split")
	}
}

// Where prices are learned the smallest budget is exact too, the part of the arena included that stays free: it is admitted, one byte less is not. The answers are those of an exact
// price. A profile that taught nothing new is left alone.
func TestTheSmallestBudgetOfALearnedPrice(t *testing.T) {
	requests := writeLines(t, mixed(t))
	exact := run(t, "score", "--requests", requests, "--threads", "2")
	file := filepath.Join(t.TempDir(), "profile")
	args := []string{"score", "--requests", requests, "--threads", "2", "--pricing", "learned", "--profile", file}
	o, _ := summarized(t, args...)
	if o.code != exitDone || o.stdout != exact.stdout {
		t.Fatalf("exit %d: %s", o.code, o.stderr)
	}
	learned, err := os.ReadFile(file)
	must(t, err)
	if _, s := summarized(t, args...); s.Basis != "learned" || s.ObservedPeakBytes > s.PredictedPeakBytes {
		t.Errorf("%+v", s)
	}
	now, err := os.ReadFile(file)
	must(t, err)
	if !bytes.Equal(now, learned) {
		t.Errorf("the same call again taught something: %s\n%s", learned, now)
	}
	plan := func(budget int64) summary {
		_, s := summarized(t, append([]string{"plan"}, append(args[1:], "--budget", fmt.Sprint(budget))...)...)
		return s
	}
	least := plan(1 << 40).SmallestBudgetBytes
	for _, d := range []int64{-1, 0, 1} {
		s := plan(least + d)
		if (s.Verdict == "refused") != (d < 0) || s.SmallestBudgetBytes != least || s.PredictedPeakBytes > s.UsableLimitBytes && d >= 0 || s.UsableLimitBytes > least*97/100+2 {
			t.Errorf("%+d: %+v", d, s)
		}
	}
}

// The largest prefix that a refusal names is admitted with the same budget, and one request more is not.
func TestTheLargestPrefixIsExact(t *testing.T) {
	var lines []string
	for i := range 30 {
		lines = append(lines, fmt.Sprintf(`{"id": %d, "input_tokens": [%d, 2, 3, 4, %d, 6, 7], "logits": true}`, i, i%30, i%7))
	}
	_, all := summarized(t, "score", "--requests", writeLines(t, lines), "--threads", "1")
	_, first := summarized(t, "score", "--requests", writeLines(t, lines[:1]), "--threads", "1")
	for i := range int64(6) {
		budget := first.SmallestBudgetBytes - 1 + (all.SmallestBudgetBytes-first.SmallestBudgetBytes)*i/5
		args := []string{"--threads", "1", "--budget", fmt.Sprint(budget)}
		o, s := summarized(t, "score", "--requests", writeLines(t, lines), args[0], args[1], args[2], args[3])
		if o.code != exitRefused || s.LargestPrefix >= len(lines) {
			t.Fatalf("with %d bytes: exit %d, %+v", budget, o.code, s)
		}
		k := s.LargestPrefix
		if (k == 0) != (i == 0) || k == 0 != strings.Contains(o.stderr, "not even the first request fits") {
			t.Errorf("with %d bytes the first %d fit: %s", budget, k, o.stderr)
		}
		if k > 0 {
			if o := run(t, "score", "--requests", writeLines(t, lines[:k]), args[0], args[1], args[2], args[3]); o.code != exitDone {
				t.Errorf("the first %d do not fit into %d bytes: %s", k, budget, o.stderr)
			}
		}
		if o := run(t, "score", "--requests", writeLines(t, lines[:k+1]), args[0], args[1], args[2], args[3]); o.code != exitRefused {
			t.Errorf("%d fit into %d bytes, not only %d", k+1, budget, k)
		}
	}
}

// A split is shown as a table of what was tried, the plan that is taken last; what a budget is compared with includes the weights.
func TestSplitsAreShown(t *testing.T) {
	file := writeLines(t, bundled(t))
	_, s := summarized(t, "score", "--requests", file, "--threads", "1")
	budget := fmt.Sprint(s.SmallestBudgetBytes)
	o := run(t, "plan", "--json", "--requests", file, "--threads", "1", "--budget", budget)
	var a trainerrank.Admission
	must(t, json.Unmarshal([]byte(o.stdout), &a))
	last := a.Rungs[len(a.Rungs)-1]
	if a.Verdict != trainerrank.Split || !last.Fits || last.TotalBytes != a.PredictedPeakBytes || last.Count != len(a.SubforwardRequestIndices) || len(a.Layout) != last.Count {
		t.Errorf("%s", o.stdout)
	}
	for _, r := range a.Rungs {
		if r.Fits != (r.TotalBytes <= a.UsableLimitBytes) || slices.Min(r.Required) < s.WeightsBytes || r.TotalBytes < slices.Max(r.Required) {
			t.Errorf("%+v", r)
		}
	}
	row := fmt.Sprintf("%d bytes: fits", a.PredictedPeakBytes)
	if o := run(t, "plan", "--requests", file, "--threads", "1", "--budget", budget); !strings.Contains(o.stdout, row) || !strings.Contains(o.stdout, " too many") {
		t.Errorf("%s", o.stdout)
	}
	if o := run(t, "score", "--requests", file, "--threads", "1", "--budget", budget); !strings.Contains(o.stderr, row) || !strings.Contains(o.stderr, fmt.Sprintf("split into %d subforwards", last.Count)) {
		t.Errorf("%s", o.stderr)
	}
}

// on is a writer that calls fn when a text comes by.
type on struct {
	bytes.Buffer
	text string
	fn   func()
}

func (o *on) Write(p []byte) (int, error) {
	if strings.Contains(string(p), o.text) {
		o.fn()
	}
	return o.Buffer.Write(p)
}

// An interruption at any time ends the run with exit 1, says so, and leaves no file.
func TestAnInterruptedRunLeavesNothing(t *testing.T) {
	requests := writeLines(t, bundled(t))
	for _, at := range []string{"", "plan: "} {
		dir := t.TempDir()
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		if at == "" {
			cancel()
		}
		args := []string{"score", "--requests", requests, "--summary", filepath.Join(dir, "s.json"), "--out", filepath.Join(dir, "a.jsonl")}
		var stdout bytes.Buffer
		stderr := &on{text: at, fn: cancel}
		code := (&tool{strings.NewReader(""), &stdout, stderr}).main(ctx, args)
		o := outcome{code, stdout.String(), stderr.String()}
		o.check(t, args)
		if code != exitFailed || !strings.Contains(o.stderr, "trainerrank: interrupted: ") {
			t.Errorf("interrupted at %q: exit %d\n%s", at, code, o.stderr)
		}
		if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
			t.Errorf("interrupted at %q: left %v", at, left)
		}
	}
}

// Somebody who asks for standard input and types nothing can still leave.
func TestWaitingForRequestsCanBeInterrupted(t *testing.T) {
	r, w := io.Pipe()
	defer w.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	var stderr bytes.Buffer
	code := (&tool{r, io.Discard, &stderr}).main(ctx, []string{"score", "--requests", "-"})
	if code != exitFailed || !strings.Contains(stderr.String(), "interrupted: read requests: read standard input") {
		t.Errorf("exit %d: %s", code, stderr.String())
	}
}

// writeFile leaves the target as it was, and nothing beside it, when writing fails part of the way.
func TestAFileIsWrittenWholeOrNotAtAll(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "answers")
	must(t, os.WriteFile(path, []byte("old"), 0o640))
	must(t, os.Chmod(path, 0o640))
	failing := fmt.Errorf("failing")
	err := writeFile(t.Context(), path, func(w io.Writer) error {
		io.WriteString(w, "half of")
		return failing
	})
	ctx, cancel := context.WithCancel(t.Context())
	err2 := writeFile(ctx, path, func(w io.Writer) error {
		io.WriteString(w, "half of")
		cancel()
		_, err := io.WriteString(w, " it")
		return err
	})
	if err != failing || err2 != context.Canceled {
		t.Errorf("%v and %v", err, err2)
	}
	look := func(want string) {
		t.Helper()
		data, err := os.ReadFile(path)
		must(t, err)
		left, err := os.ReadDir(dir)
		must(t, err)
		fi, err := os.Stat(path)
		must(t, err)
		if string(data) != want || len(left) != 1 || fi.Mode().Perm() != 0o640 {
			t.Errorf("%q with mode %v, beside it %v", data, fi.Mode(), left)
		}
	}
	look("old")
	must(t, writeFile(t.Context(), path, func(w io.Writer) error { _, err := io.WriteString(w, "new"); return err }))
	look("new")
	must(t, probe(path))
	must(t, probe(filepath.Join(dir, "other")))
	look("new")
	// Names of the greatest length leave no room for a temporary name that is made of them.
	long := filepath.Join(t.TempDir(), strings.Repeat("n", 255))
	must(t, writeFile(t.Context(), long, func(w io.Writer) error { return nil }))
}

func TestReadOnlyPlacesAreRefusedFirst(t *testing.T) {
	if os.Geteuid() == 0 {
		t.Skip("SKIPPED: root may write everywhere")
	}
	dir := t.TempDir()
	must(t, os.WriteFile(filepath.Join(dir, "file"), nil, 0o400))
	must(t, os.Mkdir(filepath.Join(dir, "folder"), 0o500))
	for _, path := range []string{"file", "folder/file"} {
		o := run(t, "score", "--out", filepath.Join(dir, path))
		if o.code != exitFailed || !strings.Contains(o.stderr, "permission denied") || strings.Contains(o.stderr, "plan:") {
			t.Errorf("%s: exit %d: %s", path, o.code, o.stderr)
		}
	}
}

// TestPlanJSON holds the names of the fields against the design.
func TestPlanJSON(t *testing.T) {
	o := run(t, "plan", "--json")
	var got map[string]any
	must(t, json.Unmarshal([]byte(o.stdout), &got))
	keys := func(v any, want ...string) map[string]any {
		t.Helper()
		m, ok := v.(map[string]any)
		if slices.Sort(want); !ok || !slices.Equal(slices.Sorted(maps.Keys(m)), want) {
			t.Fatalf("fields %q, want %q", slices.Sorted(maps.Keys(m)), want)
		}
		return m
	}
	keys(got, "verdict", "basis", "usable_limit_bytes", "predicted_peak_bytes", "packed_tokens", "logical_tokens", "layout", "rungs", "subforward_request_indices",
		"retention", "smallest_budget_bytes", "largest_prefix")
	layout := keys(got["layout"].([]any)[0], "segments", "decisions", "depth")
	keys(layout["segments"].([]any)[0], "parent", "start", "end", "rows")
	keys(got["rungs"].([]any)[0], "count", "chunks", "required", "retained", "total_bytes", "fits")
	if got["verdict"] != "whole" || got["basis"] != "exact" {
		t.Errorf("%v %v", got["verdict"], got["basis"])
	}
}

// TestUnsupportedFamilies runs inspect and score on golden models that the engine does not run: their tensors are listed, and they are
// refused by name.
func TestUnsupportedFamilies(t *testing.T) {
	for model, name := range map[string]string{"qwen35-tiny": "qwen3_5", "qwen3moe-tiny": "qwen3_moe", "qwen3next-tiny": "qwen3_next"} {
		t.Run(model, func(t *testing.T) {
			dir := "../../../shared/golden/models/" + model
			if _, err := os.Stat(dir); err != nil {
				t.Skipf("SKIPPED: no golden models beside this checkout: %v", err)
			}
			o := run(t, "inspect", dir)
			if o.code != exitFailed || !strings.Contains(o.stdout, "model.embed_tokens.weight") || !strings.Contains(o.problem(), name) {
				t.Errorf("inspect: exit %d: %s", o.code, o.stderr)
			}
			if o := run(t, "score", "--model", dir, "--requests", dir+"/requests.jsonl"); o.code != exitFailed || !strings.Contains(o.problem(), name) {
				t.Errorf("score: exit %d: %s", o.code, o.stderr)
			}
		})
	}
}

// TestGoldenFolders scores every golden model that the engine runs; the values are held against the references in forward/transformer.
func TestGoldenFolders(t *testing.T) {
	for _, model := range []string{"arith", "qwen3-tiny", "qwen3-sharded-bf16", "llama3-tiny", "qwen2-tiny", "mistral-tiny", "gemma3-tiny"} {
		t.Run(model, func(t *testing.T) {
			dir := "../../../shared/golden/models/" + model
			if _, err := os.Stat(dir); err != nil {
				t.Skipf("SKIPPED: no golden models beside this checkout: %v", err)
			}
			o, s := summarized(t, "score", "--model", dir, "--requests", dir+"/requests.jsonl")
			if o.code != exitDone || s.PredictedPeakBytes != s.ObservedPeakBytes || s.Requests != strings.Count(o.stdout, "\n") {
				t.Errorf("exit %d, %+v\n%s", o.code, s, o.stderr)
			}
			if o := run(t, "inspect", dir); o.code != exitDone {
				t.Errorf("inspect: exit %d: %s", o.code, o.stderr)
			}
		})
	}
}
