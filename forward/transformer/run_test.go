package transformer_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/forward/kernel"
	"github.com/trainerrank/engine/forward/prefixtree"
	"github.com/trainerrank/engine/internal/golden"
)

// layout chooses what a batch shares.
type layout func(t testing.TB, tree *prefixtree.Tree) *prefixtree.Layout

func fullSharing(_ testing.TB, tree *prefixtree.Tree) *prefixtree.Layout { return tree.FullSharing() }

func noSharing(_ testing.TB, tree *prefixtree.Tree) *prefixtree.Layout { return tree.NoSharing() }

// someSharing takes each decision with a chance of one half.
func someSharing(r *rand.Rand) layout {
	return func(t testing.TB, tree *prefixtree.Tree) *prefixtree.Layout {
		t.Helper()
		var take []int
		for _, d := range tree.Decisions {
			if r.IntN(2) == 0 {
				take = append(take, d)
			}
		}
		l, err := tree.Layout(take)
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
}

// pack makes a batch of inputs.
func pack(t testing.TB, inputs []forward.Input, how layout) *forward.Batch {
	t.Helper()
	rows := make([][]int32, len(inputs))
	b := new(forward.Batch)
	for i := range inputs {
		rows[i] = inputs[i].Tokens
		b.Requests = append(b.Requests, &inputs[i])
	}
	tree, err := prefixtree.Build(rows)
	if err != nil {
		t.Fatal(err)
	}
	if b.Batch, err = how(t, tree).Pack(rows); err != nil {
		t.Fatal(err)
	}
	if err := b.CheckRows(rows); err != nil {
		t.Fatal(err)
	}
	return b
}

// run rehearses a batch of inputs, runs it in a reservation of exactly that size, full of NaN, and holds what it used against the rehearsal.
func run(t testing.TB, m *golden.Loaded, inputs []forward.Input, how layout) []golden.Answer {
	t.Helper()
	return runBatch(t, m, pack(t, inputs, how))
}

func runBatch(t testing.TB, m *golden.Loaded, b *forward.Batch) []golden.Answer {
	t.Helper()
	f, err := m.Rehearse(b)
	if err != nil {
		t.Fatal(err)
	}
	sizes := device.Sizes{device.Outputs: f.Outputs, device.Retained: f.Retained, device.Scratch: f.Scratch}
	res, err := m.Dirty.Reserve(sizes)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Release()
	m.Dirty.ResetPeak()
	b.Arena = res
	pass, err := m.Forward(t.Context(), b)
	if err != nil {
		t.Fatal(err)
	}
	if res.Used() != sizes {
		t.Errorf("used %v, rehearsed %v", res.Used(), sizes)
	}
	if peak := m.Dirty.Stats().PeakInUse; peak != f.Required() {
		t.Errorf("peak of %d bytes, predicted %d", peak, f.Required())
	}
	answers := make([]golden.Answer, len(pass.Outputs))
	for i := range pass.Outputs {
		answers[i] = golden.Copy(&pass.Outputs[i])
	}
	return answers
}

// active leaves out the inputs that want nothing: a caller never packs them.
func active(inputs []forward.Input) []forward.Input {
	var list []forward.Input
	for _, in := range inputs {
		if in.Active() {
			list = append(list, in)
		}
	}
	return list
}

func TestFamiliesThatAreNotBuiltAreRefusedByName(t *testing.T) {
	backend, err := kernel.NewHost(1)
	if err != nil {
		t.Fatal(err)
	}
	defer backend.Close()
	for model, word := range golden.Refused {
		for _, config := range []string{"config.json", "config.v4.json", "config.nested.json"} {
			if config == "config.nested.json" && model != "qwen35-tiny" {
				continue
			}
			t.Run(model+"/"+config, func(t *testing.T) {
				m, err := golden.Open(golden.FS(t, model), config, backend)
				if err == nil {
					m.Close()
					t.Fatal("it was opened")
				}
				if !strings.Contains(err.Error(), word) {
					t.Errorf("the refusal does not name %s: %v", word, err)
				}
			})
		}
	}
}

func TestForwardNeedsWeightsAndAnArena(t *testing.T) {
	m := golden.Load(t, golden.FS(t, "qwen2-tiny"), golden.Options{Unloaded: true})
	b := pack(t, []forward.Input{{Tokens: []int32{1, 2}, TopK: 1}}, fullSharing)
	f, err := m.Rehearse(b)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.Forward(t.Context(), b); err == nil || !strings.Contains(err.Error(), "not loaded") {
		t.Errorf("without a place: %v", err)
	}
	if err := m.Place(m.Host); err != nil {
		t.Fatal(err)
	}
	res, err := m.Host.Reserve(device.Sizes{device.Outputs: f.Outputs, device.Scratch: f.Scratch})
	if err != nil {
		t.Fatal(err)
	}
	defer res.Release()
	b.Arena = res
	if _, err := m.Forward(t.Context(), b); err == nil || !strings.Contains(err.Error(), "not loaded") {
		t.Errorf("placed, not loaded: %v", err)
	}
	if err := m.Load(t.Context(), m.Staging(1<<20), nil); err != nil {
		t.Fatal(err)
	}
	b.Arena = nil
	if _, err := m.Forward(t.Context(), b); err == nil || !strings.Contains(err.Error(), "arena") {
		t.Errorf("without an arena: %v", err)
	}
	b.Arena = res
	if _, err := m.Forward(t.Context(), b); err != nil {
		t.Error(err)
	}
}

// A pass looks at its context before each block of each layer: once it has ended, only what the workers have in hand is finished.
func TestForwardHonoursItsContext(t *testing.T) {
	for _, threads := range []int{1, 2} {
		m := golden.Load(t, golden.FS(t, "qwen2-tiny"), golden.Options{Threads: threads})
		in := []forward.Input{{Tokens: make([]int32, 900), TopK: 1}}
		attempt := func(stop int) (last, all int, err error) {
			b := pack(t, in, fullSharing)
			f, err := m.Rehearse(b)
			if err != nil {
				t.Fatal(err)
			}
			res, err := m.Host.Reserve(device.Sizes{device.Outputs: f.Outputs, device.Scratch: f.Scratch})
			if err != nil {
				t.Fatal(err)
			}
			defer res.Release()
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			b.Arena, b.Progress = res, func(done, total int) {
				if done != last+1 || done > total || (all != 0 && all != total) {
					t.Errorf("step %d of %d after step %d of %d", done, total, last, all)
				}
				if last, all = done, total; done == stop {
					cancel()
				}
			}
			if stop == 0 {
				cancel()
			}
			_, err = m.Forward(ctx, b)
			return last, all, err
		}
		last, all, err := attempt(-1)
		if err != nil || last != all || all < 6 {
			t.Fatalf("%d of %d steps: %v", last, all, err)
		}
		for stop := range all + 1 {
			last, _, err := attempt(stop)
			if !errors.Is(err, context.Canceled) {
				t.Errorf("cancelled in step %d: %v", stop, err)
			}
			if most := max(0, stop+threads-1); last < stop || last > most || (stop == 0 && last != 0) {
				t.Errorf("%d threads: cancelled in step %d, the last was %d", threads, stop, last)
			}
		}
	}
}
