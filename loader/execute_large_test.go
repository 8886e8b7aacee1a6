package loader

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// A file of a million tensors, sparse, is planned in less than a second, with any depth.
func TestAMillionTensorsArePlannedInASecond(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	const n, size = 1_000_000, 4096
	var head strings.Builder
	head.WriteString("{")
	for i := range n {
		if i > 0 {
			head.WriteByte(',')
		}
		fmt.Fprintf(&head, `"t%d":{"dtype":"F32","shape":[1024],"data_offsets":[%d,%d]}`, i, i*size, (i+1)*size)
	}
	head.WriteString("}")
	path := filepath.Join(t.TempDir(), singleName)
	first := whole(head.String(), 0)
	check(t, os.WriteFile(path, first, 0o644))
	if err := os.Truncate(path, int64(len(first))+n*size); err != nil {
		t.Skipf("no sparse files of 4 GiB: %v", err)
	}
	s, err := Open(path)
	check(t, err)
	defer s.Close()
	stats := StatsOf(s, StatsOptions{Atom: func(*Tensor) int64 { return 4096 }})
	for _, queue := range []int{-1, 0, 30} {
		p := raw(s, pread{}, 5<<30)
		p.QueueSize, p.MaxChunk = queue, 1<<20
		best := time.Hour // of a few: the machine may be busy
		for range 4 {
			start := time.Now()
			plan, err := Fit(stats, p)
			check(t, err)
			best = min(best, time.Since(start))
			if len(plan.Files[0].Chunks) < n*size>>20 {
				t.Fatalf("%d chunks", len(plan.Files[0].Chunks))
			}
			if best < time.Second {
				break
			}
		}
		if best > time.Second {
			t.Errorf("queue %d: %v", queue, best)
		}
		t.Logf("queue %d: %v", queue, best)
	}
}

// The report is a table that shows both, plan and load.
func TestReportAsText(t *testing.T) {
	s, err := OpenFS(matrix(16, 100), "m")
	check(t, err)
	l := newLab(t, s, 1<<20)
	plan, err := Fit(StatsOf(s, StatsOptions{}), raw(s, pread{}, 1<<20))
	check(t, err)
	tensors, report, err := s.Execute(t.Context(), plan, LoadOptions{Device: l.dev, Copier: pread{}})
	check(t, err)
	tensors.Free()
	report.Seconds = 0.5
	want := `  bytes  chunks  chunk limit  largest chunk  peak
   1700       1      1048576           1700  8192    "m/model-00001-of-00003.safetensors"
   1600       1      1048576           1600  8192    "m/model-00002-of-00003.safetensors"
3300 bytes, chunks: 2, copier: pread, in 0.500 s, 0 MB/s
predicted peak 8192, observed 8192, budget 1048576
`
	trim := func(s string) string {
		var b bytes.Buffer
		for line := range strings.Lines(s) {
			b.WriteString(strings.Join(strings.Fields(line), " ") + "\n")
		}
		return b.String()
	}
	if got := report.String(); trim(got) != trim(want) {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}
