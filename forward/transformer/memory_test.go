package transformer_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/internal/golden"
)

// A rehearsal says the same before there is a place for the weights, before they are loaded, and after.
func TestRehearsalNeedsNoWeights(t *testing.T) {
	for _, c := range golden.Cases {
		t.Run(c.Name(), func(t *testing.T) {
			folder := golden.FS(t, c.Model)
			m := golden.Load(t, folder, golden.Options{Config: c.Config, Threads: 2, Unloaded: true})
			inputs := golden.Inputs(golden.Requests(t, folder))
			rehearse := func() forward.Footprint {
				f, err := m.Rehearse(pack(t, inputs, fullSharing))
				if err != nil {
					t.Fatal(err)
				}
				return f
			}
			opened := rehearse()
			if opened.Outputs == 0 || opened.Scratch == 0 {
				t.Errorf("footprint %v", opened)
			}
			if s := m.Host.Stats(); s.PeakAllocated != 0 {
				t.Errorf("a rehearsal allocated %d bytes", s.PeakAllocated)
			}
			if err := m.Place(m.Host); err != nil {
				t.Fatal(err)
			}
			if got := m.Host.Stats().Allocated; got != m.WeightBytes() {
				t.Errorf("the weights took %d bytes, said to be %d", got, m.WeightBytes())
			}
			placed := rehearse()
			if err := m.Load(t.Context(), m.MinStaging(), nil); err != nil {
				t.Fatal(err)
			}
			loaded := rehearse()
			if d := cmp.Diff([]forward.Footprint{opened, opened}, []forward.Footprint{placed, loaded}); d != "" {
				t.Errorf("opened (-), then placed and loaded (+):\n%s", d)
			}
			run(t, m, inputs, fullSharing) // compares
		})
	}
}

// A model says what one of another variant says: with other threads, and nothing else, though its own are as they were.
func TestRehearsalAsAnotherVariant(t *testing.T) {
	folder := golden.FS(t, "qwen2-tiny")
	var models []*golden.Loaded
	for threads := 1; threads <= 3; threads++ {
		models = append(models, golden.Load(t, folder, golden.Options{Threads: threads, Unloaded: true}))
	}
	inputs := golden.Inputs(golden.Requests(t, folder))
	seen := map[string]forward.Footprint{}
	for _, m := range models {
		f, err := m.Rehearse(pack(t, inputs, fullSharing))
		if err != nil {
			t.Fatal(err)
		}
		for v, other := range seen {
			if other == f {
				t.Errorf("%s needs what %s does: %v", m.Variant(), v, f)
			}
		}
		seen[m.Variant()] = f
		for _, other := range models {
			if got, err := other.RehearseAs(m.Variant(), pack(t, inputs, fullSharing)); err != nil || got != f {
				t.Errorf("%s as %s: %v, %v; want %v", other.Variant(), m.Variant(), got, err, f)
			}
		}
	}
	for _, v := range []string{"", "threads=", "threads=0", "threads=-1", "threads=2 ", "threads=02", "threads=two", "gpu"} {
		if f, err := models[0].RehearseAs(v, pack(t, inputs, fullSharing)); err == nil {
			t.Errorf("%q: %v", v, f)
		}
	}
}

// Random calls use exactly what was rehearsed, whatever they share and ask for, and however many threads there are.
func TestRandomCallsUseWhatWasRehearsed(t *testing.T) {
	seeds := uint64(60)
	if testing.Short() {
		seeds = 8
	}
	folder := golden.FS(t, "qwen2-tiny")
	for threads := 1; threads <= 3; threads++ {
		m := golden.Load(t, folder, golden.Options{Threads: threads})
		for seed := range seeds {
			r := golden.Rand(seed)
			inputs := active(golden.Draw(r, m.Spec().Vocabulary, 1+r.IntN(7), 1+r.IntN(400)))
			if len(inputs) == 0 {
				continue
			}
			if r.IntN(4) == 0 {
				inputs[0].TopK = 1 + r.IntN(m.Spec().Vocabulary) // takes scratch of its own
			}
			if run(t, m, inputs, someSharing(r)); t.Failed() {
				t.Fatalf("seed %d, %d threads", seed, threads)
			}
		}
	}
}

// No layout takes less than full sharing does, nor other outputs: a lower bound of any layout is what full sharing takes. And a request more never takes less.
func TestNoLayoutTakesLessThanFullSharing(t *testing.T) {
	seeds := uint64(100)
	if testing.Short() {
		seeds = 20
	}
	folder := golden.FS(t, "qwen2-tiny")
	for threads := 1; threads <= 3; threads++ {
		m := golden.Load(t, folder, golden.Options{Threads: threads, Unloaded: true})
		for seed := range seeds {
			r := golden.Rand(seed)
			inputs := active(golden.Draw(r, m.Spec().Vocabulary, 1+r.IntN(7), 1+r.IntN(400)))
			var last forward.Footprint
			for n := range inputs {
				least, err := m.Rehearse(pack(t, inputs[:n+1], fullSharing))
				if err != nil {
					t.Fatal(err)
				}
				other, err := m.Rehearse(pack(t, inputs[:n+1], someSharing(r)))
				if err != nil {
					t.Fatal(err)
				}
				if other.Scratch < least.Scratch || other.Outputs != least.Outputs || other.OutputBytes != least.OutputBytes {
					t.Errorf("seed %d: full sharing takes %v, another layout %v", seed, least, other)
				}
				if least.Scratch < last.Scratch || least.OutputBytes <= last.OutputBytes {
					t.Errorf("seed %d: %d inputs take %v, one less %v", seed, n+1, least, last)
				}
				last = least
			}
		}
	}
}
