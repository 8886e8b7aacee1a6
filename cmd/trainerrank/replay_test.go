package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/trainerrank/engine/trainerrank"
)

// A record is the same whoever makes it of the same call, holds none of the file's tokens, and its replay prints as JSON what was recorded and what is recomputed.
func TestARecordAndItsReplayAsJSON(t *testing.T) {
	dir := t.TempDir()
	requests := writeLines(t, []string{`{"id": "secret", "input_tokens": [31, 29, 23, 19, 17], "top_k": 3}`, `{"id": 2, "input_tokens": [31, 29, 23, 7, 7, 7]}`})
	var texts []string
	for i, verb := range []string{"plan", "score"} {
		path := filepath.Join(dir, verb)
		if o := run(t, verb, "--requests", requests, "--threads", "2", "--budget", "4MB", "--record", path); o.code != exitDone {
			t.Fatal(o)
		}
		text, err := os.ReadFile(path)
		must(t, err)
		if texts = append(texts, string(text)); texts[i] != texts[0] || strings.Contains(texts[i], "secret") || strings.Contains(texts[i], requests) {
			t.Errorf("%s", text)
		}
	}
	changed := filepath.Join(dir, "changed")
	must(t, os.WriteFile(changed, []byte(strings.Replace(texts[0], `"threads":2`, `"threads":4`, 1)), 0o644))
	for _, c := range []struct {
		path string
		code int
		same bool
	}{{filepath.Join(dir, "plan"), exitDone, true}, {changed, exitFailed, false}} {
		o := run(t, "plan", "--replay", c.path, "--json")
		var got struct {
			Same                 bool
			Difference           *trainerrank.Difference
			Recorded, Recomputed map[string]any
		}
		must(t, json.Unmarshal([]byte(o.stdout), &got))
		was, is := got.Recorded["predicted_peak_bytes"], got.Recomputed["predicted_peak_bytes"]
		if o.code != c.code || got.Same != c.same || (was == is) != c.same || (got.Difference == nil) != c.same {
			t.Errorf("exit %d: %+v", o.code, got)
		}
		if d := got.Difference; d != nil && d.Path != "predicted_peak_bytes" {
			t.Errorf("%v", d)
		}
	}
}
