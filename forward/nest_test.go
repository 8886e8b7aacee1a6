package forward

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// walked lists what Walk calls: the first token of each Input, and its place.
func walked(t *testing.T, in Inputs) []string {
	t.Helper()
	var list []string
	err := in.Walk(func(in *Input, path func() string) error {
		list = append(list, fmt.Sprintf("%s=%d", path(), in.Tokens[0]))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return list
}

func numbered(n int32) Input { return Input{Tokens: []int32{n}} }

func TestWalkTellsThePlaces(t *testing.T) {
	for name, c := range map[string]struct {
		in   Inputs
		want []string
	}{
		"the zero value": {Inputs{}, nil},
		"no inputs":      {Many(), nil},
		"empty lists":    {Nest(Many(), Nest(), Inputs{}), nil},
		"one":            {One(numbered(1)), []string{"inputs=1"}},
		"many":           {Many(numbered(1), numbered(2)), []string{"inputs[0]=1", "inputs[1]=2"}},
		"one in a list":  {Nest(One(numbered(1))), []string{"inputs[0]=1"}},
		"mixed": {Nest(One(numbered(1)), Many(), Many(numbered(2), numbered(3)), Nest(Nest(), Nest(One(numbered(4)), Many(numbered(5)))), One(numbered(6))),
			[]string{"inputs[0]=1", "inputs[2][0]=2", "inputs[2][1]=3", "inputs[3][1][0]=4", "inputs[3][1][1][0]=5", "inputs[4]=6"}},
	} {
		if d := cmp.Diff(c.want, walked(t, c.in)); d != "" {
			t.Errorf("%s:\n%s", name, d)
		}
	}
}

func TestWalkStopsAtTheFirstError(t *testing.T) {
	stop := errors.New("stop")
	calls := 0
	err := Nest(Many(numbered(0), numbered(1)), Many(numbered(2))).Walk(func(in *Input, _ func() string) error {
		if calls++; in.Tokens[0] == 1 {
			return stop
		}
		return nil
	})
	if err != stop || calls != 2 {
		t.Errorf("%v after %d calls", err, calls)
	}
}

// draw makes a random nesting of inputs that are numbered from *next on, and says how it is nested.
func draw(r *rand.Rand, next *int32, depth int, shape *strings.Builder) Inputs {
	if depth == 0 || r.IntN(3) == 0 {
		shape.WriteString("x")
		*next++
		return One(numbered(*next - 1))
	}
	list := make([]Inputs, r.IntN(4))
	shape.WriteString("(")
	for i := range list {
		list[i] = draw(r, next, depth-1, shape)
	}
	shape.WriteString(")")
	return Nest(list...)
}

func shapeOf(o Outputs) string {
	if o.Output() != nil {
		return "x"
	}
	s := "("
	for _, c := range o.List() {
		s += shapeOf(c)
	}
	return s + ")"
}

// Outputs come back in the nesting of the inputs, each in the place of its input.
func TestShapeAndFlatUndoEachOther(t *testing.T) {
	for seed := range uint64(500) {
		r := rand.New(rand.NewPCG(seed, 1))
		var n int32
		var shape strings.Builder
		in := draw(r, &n, 6, &shape)
		flat := make([]*Output, n)
		for i := range flat {
			flat[i] = &Output{Checkpoint: fmt.Sprint(i)}
		}
		out := in.Shape(flat)
		if got := shapeOf(out); got != shape.String() {
			t.Fatalf("seed %d: inputs %s, outputs %s", seed, shape.String(), got)
		}
		back := out.Flat()
		if len(back) != len(flat) {
			t.Fatalf("seed %d: %d outputs of %d", seed, len(back), len(flat))
		}
		for i := range back {
			if back[i] != flat[i] {
				t.Fatalf("seed %d: output %d is output %s", seed, i, back[i].Checkpoint)
			}
		}
		for i, line := range walked(t, in) {
			// The path leads to the output of the same input.
			path, _, _ := strings.Cut(strings.TrimPrefix(line, "inputs"), "=")
			o := out
			for _, part := range strings.Split(strings.Trim(path, "[]"), "][") {
				k := 0
				if _, err := fmt.Sscan(part, &k); err == nil {
					o = o.List()[k]
				}
			}
			if o.Output() != flat[i] {
				t.Fatalf("seed %d: %s leads to another output", seed, line)
			}
		}
	}
}

// A nesting may be as deep as memory allows.
func TestDeepNesting(t *testing.T) {
	const depth = 100_000
	in := One(numbered(7))
	for range depth {
		in = Nest(Many(), in)
	}
	var path string
	err := in.Walk(func(_ *Input, p func() string) error {
		path = p()
		return nil
	})
	if err != nil || path != "inputs"+strings.Repeat("[1]", depth) {
		t.Fatalf("%v, a path of %d bytes", err, len(path))
	}
	want := &Output{}
	out := in.Shape([]*Output{want})
	if flat := out.Flat(); len(flat) != 1 || flat[0] != want {
		t.Errorf("%d outputs", len(flat))
	}
	for range depth {
		if len(out.List()) != 2 || out.List()[0].List() == nil {
			t.Fatal("another nesting")
		}
		out = out.List()[1]
	}
	if out.Output() != want {
		t.Error("another output")
	}
}

func TestInputsThatWantNothingAreInactive(t *testing.T) {
	for _, c := range []struct {
		in   Input
		want bool
	}{
		{Input{}, false},
		{Input{Tokens: []int32{1}, TargetWidth: 2, Grad: WithGrad, Checkpoint: Checkpoint("a")}, false},
		{Input{Targets: []int32{}}, true},
		{Input{Targets: []int32{IgnoreLabel}}, true},
		{Input{TopK: 1}, true},
		{Input{Logits: true}, true},
		{Input{HiddenStates: true}, true},
	} {
		if got := c.in.Active(); got != c.want {
			t.Errorf("%+v: active is %v", c.in, got)
		}
	}
}

func TestSelections(t *testing.T) {
	type facts struct {
		Inherits bool
		Name     string
	}
	for _, c := range []struct {
		s    Selection
		want facts
	}{{Selection{}, facts{true, ""}}, {BaseModel(), facts{false, ""}}, {Checkpoint("a"), facts{false, "a"}}} {
		if d := cmp.Diff(c.want, facts{c.s.Inherits(), c.s.Name()}); d != "" {
			t.Error(d)
		}
	}
}

// Required is what is live at once: the outputs and what is kept, and either the forward's scratch or the backward's memory.
func TestRequired(t *testing.T) {
	for _, c := range []struct {
		f    Footprint
		want int64
	}{
		{Footprint{}, 0},
		{Footprint{Outputs: 1, Retained: 10, Scratch: 100}, 111},
		{Footprint{Outputs: 1, Retained: 10, Scratch: 100, BackwardScratch: 60, Gradients: 39}, 111},
		{Footprint{Outputs: 1, Retained: 10, Scratch: 100, BackwardScratch: 62, Gradients: 39}, 112},
	} {
		if got := c.f.Required(); got != c.want || !strings.HasSuffix(c.f.String(), fmt.Sprintf("= %d bytes", c.want)) {
			t.Errorf("%v, want %d", c.f, c.want)
		}
	}
}
