package device

import (
	"flag"
	"os"
	"testing"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func golden(t *testing.T, name, got string) {
	t.Helper()
	file := "testdata/" + name
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s: got\n%s\nwant\n%s", file, got, want)
	}
}

func TestStatsPrintAsATable(t *testing.T) {
	s := space(t, 1<<30, new(fake))
	golden(t, "stats_empty.txt", s.Stats().String())
	if _, err := s.Allocate(Weights, 123<<20); err != nil {
		t.Fatal(err)
	}
	b, err := s.Allocate(InFlight, 5000)
	if err != nil {
		t.Fatal(err)
	}
	r := reserve(t, s, Sizes{Outputs: 1 << 20, Scratch: 1 << 20, Retained: PageSize})
	r.Keep(Outputs, 9000)
	r.Scratch(700000)
	r.Pop(0)
	b.Free()
	golden(t, "stats.txt", s.Stats().String())
}

func TestSizesPrintWhatIsThere(t *testing.T) {
	for want, s := range map[string]Sizes{"nothing": {}, "weights 1, ballast -2": {Weights: 1, Ballast: -2}} {
		if s.String() != want {
			t.Errorf("%q, want %q", s, want)
		}
	}
}
