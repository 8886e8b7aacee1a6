package loader

import (
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var updateFit = flag.Bool("update-fit", false, "write testdata/fit/*.txt and *.json anew")

// small is a load of two files that both modes cut.
func small(t *testing.T) *FitPlan {
	t.Helper()
	stats := []FileStats{add(tensors("embed", true, 400), "norm", true, 10), add(tensors("w", true, 100), "cache", false, 300)}
	stats[0].Path, stats[1].Path = "models/a.safetensors", "models/b.safetensors"
	plan, err := Fit(stats, PlanParams{
		Budget: 1340, QueueSize: 2, AccumulateResident: true, YieldClone: true, Group: 1, MaxChunk: 405,
		Copier: Costs{Multiplier: []Ratio{{1, 1}, {1, 1}}, Fixed: 50},
	})
	if err != nil {
		t.Fatal(err)
	}
	return plan
}

func expectFile(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata/fit", name)
	if *updateFit {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(strings.Split(string(want), "\n"), strings.Split(got, "\n")); diff != "" {
		t.Errorf("%s (-want +got):\n%s", name, diff)
	}
}

func TestPlanAsText(t *testing.T) { expectFile(t, "plan.txt", small(t).String()) }

func TestPlanAsJSON(t *testing.T) {
	b, err := json.MarshalIndent(small(t), "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	expectFile(t, "plan.json", string(b)+"\n")
}

func TestDigestNamesWhatDiffers(t *testing.T) {
	fit := func(change func(stats []FileStats, p *PlanParams)) Digest {
		t.Helper()
		stats := []FileStats{add(tensors("a", true, 40), "b", true, 20), add(tensors("c", true, 60), "d", true, 10)}
		stats[0].Path, stats[1].Path = "x/m1", "x/m2"
		p := PlanParams{Budget: 4000, Group: 2, Copier: Costs{Multiplier: []Ratio{{1, 1}, {1, 1}}}, AccumulateResident: true}
		change(stats, &p)
		plan, err := Fit(stats, p)
		if err != nil {
			t.Fatal(err)
		}
		return plan.Digest()
	}
	same := fit(func([]FileStats, *PlanParams) {})
	if d := fit(func(s []FileStats, _ *PlanParams) { s[0].Path, s[1].Path = "/y/m1", "/y/m2" }); d.Sum != same.Sum {
		t.Error("where the files are makes a difference")
	}
	for _, c := range []struct {
		want   string
		change func(s []FileStats, p *PlanParams)
	}{
		{"classic mode", func(_ []FileStats, p *PlanParams) { p.Classic = true }},
		{"ranks", func(_ []FileStats, p *PlanParams) { p.Group = 1 }},
		{"budget", func(_ []FileStats, p *PlanParams) { p.Budget++ }},
		{"queue size asked for", func(_ []FileStats, p *PlanParams) { p.QueueSize++ }},
		{"chunk limit", func(_ []FileStats, p *PlanParams) { p.MaxChunk = 1000 }},
		{"accumulate resident", func(_ []FileStats, p *PlanParams) { p.AccumulateResident = false }},
		{"yield clone", func(_ []FileStats, p *PlanParams) { p.YieldClone = true }},
		{"preallocated", func(_ []FileStats, p *PlanParams) { p.Preallocated = 1 }},
		{"alignment", func(_ []FileStats, p *PlanParams) { p.Align = 2 }},
		{"depth first", func(_ []FileStats, p *PlanParams) { p.DepthFirst = true }},
		{"copier's fixed bytes", func(_ []FileStats, p *PlanParams) { p.Copier.Fixed = 1 }},
		{"copier's bytes per chunk", func(_ []FileStats, p *PlanParams) { p.Copier.PerChunk = 1 }},
		{`file 2 ("m2"): copier's multiplier`, func(_ []FileStats, p *PlanParams) { p.Copier.Multiplier[1] = Ratio{2, 1} }},
		{`file 2 ("m2"): header`, func(s []FileStats, _ *PlanParams) { s[1].Header = "1" }},
		{"file 1", func(s []FileStats, _ *PlanParams) { s[0], s[1] = s[1], s[0] }},
		{`file 2 ("m2"): kept tensors`, func(s []FileStats, _ *PlanParams) { s[1].Tensors[0].Name = "C" }},
		{`file 1 ("m1"): resident tensors`, func(s []FileStats, _ *PlanParams) { s[0].Tensors[0].Resident, s[0].Resident = false, 20 }},
		{`file 1 ("m1"): pieces`, func(s []FileStats, _ *PlanParams) { s[0].Tensors[1].Atom = 3 }},
	} {
		d := fit(c.change)
		item, other, ok := same.Diff(d)
		if !ok || d.Sum == same.Sum {
			t.Errorf("%s makes no difference", c.want)
			continue
		}
		if back, o, _ := d.Diff(same); o != item.Value || back.Value != other {
			t.Errorf("%s: %v and %q one way, %v and %q the other", c.want, item, other, back, o)
		}
		if item.Name != c.want {
			t.Errorf("named %q, want %q", item.Name, c.want)
		}
	}
	if _, _, ok := same.Diff(fit(func([]FileStats, *PlanParams) {})); ok {
		t.Error("equal loads differ")
	}
}

func TestStatsOfASet(t *testing.T) {
	set, err := Open("testdata/fit/sets/mixed")
	if err != nil {
		t.Fatal(err)
	}
	defer set.Close()
	all := StatsOf(set, StatsOptions{})
	var total int64
	asked := map[*Tensor]int{}
	some := StatsOf(set, StatsOptions{
		Keep:     func(x *Tensor) bool { asked[x]++; return x.Bytes != all[0].Largest },
		Resident: func(x *Tensor) bool { return x.Bytes%8 == 0 },
		Atom:     func(x *Tensor) int64 { return x.Bytes / 2 },
	})
	for i := range all {
		a, s := &all[i], &some[i]
		total += a.Kept
		if a.Resident != a.Kept || a.Atom != 0 || a.Path != set.Files[i].Path || len(a.Tensors) != len(set.Files[i].Tensors) {
			t.Errorf("all tensors: %+v", a)
		}
		if s.Header != a.Header || a.Header == "" || i > 0 && a.Header == all[0].Header {
			t.Errorf("header sums %q and %q", s.Header, a.Header)
		}
		if problem, field := s.fault(); problem != "" {
			t.Errorf("%s %s", field, problem)
		}
		if s.Kept > 8 && (s.Atom == 0 || s.Atom > s.Largest) {
			t.Errorf("pieces of up to %d bytes, largest %d", s.Atom, s.Largest)
		}
	}
	if total != set.TotalBytes() {
		t.Errorf("%d bytes, want %d", total, set.TotalBytes())
	}
	for x, n := range asked {
		if n != 1 {
			t.Errorf("asked %d times for %v", n, x)
		}
	}
}
