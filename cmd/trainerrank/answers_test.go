package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"math"
	"math/rand/v2"
	"runtime"
	"strconv"
	"testing"

	"gorgonia.org/tensor"

	"github.com/trainerrank/engine/forward"
)

func matrixOf(rows, cols int, x []float32) *tensor.Dense {
	return tensor.New(tensor.WithShape(rows, cols), tensor.WithBacking(x))
}

func TestFloatsReadBackToTheSameBits(t *testing.T) {
	xs := []float32{0, float32(math.Copysign(0, -1)), 1, -1, math.MaxFloat32, -math.MaxFloat32, math.SmallestNonzeroFloat32, 1e-6, 1e21, 16777216, 0x1p-126,
		float32(math.NaN()), float32(math.Inf(1)), float32(math.Inf(-1))}
	for range 200000 {
		xs = append(xs, math.Float32frombits(rand.Uint32()))
	}
	var b bytes.Buffer
	a := answers{bufio.NewWriter(&b)}
	for _, x := range xs {
		a.float(x)
		a.WriteByte('\n')
	}
	a.Flush()
	lines := bytes.Split(bytes.TrimSpace(b.Bytes()), []byte("\n"))
	for i, x := range xs {
		var text string
		if x-x != 0 {
			if err := json.Unmarshal(lines[i], &text); err != nil {
				t.Fatalf("%v is written as %s, no string", x, lines[i])
			}
		} else {
			var n json.Number
			if err := json.Unmarshal(lines[i], &n); err != nil {
				t.Fatalf("%v is written as %s, no number: %v", x, lines[i], err)
			}
			text = n.String()
		}
		// Both a reader that parses float32 and one that parses float64 and narrows.
		got, err := strconv.ParseFloat(text, 32)
		wide, err2 := strconv.ParseFloat(text, 64)
		if x != x {
			if got == got || wide == wide {
				t.Fatalf("a NaN reads back as %v", got)
			}
			continue
		}
		if err != nil || err2 != nil || math.Float32bits(float32(got)) != math.Float32bits(x) || math.Float32bits(float32(wide)) != math.Float32bits(x) {
			t.Fatalf("%v (%08x) is written as %s, which reads back as %v and %v", x, math.Float32bits(x), lines[i], got, wide)
		}
	}
}

// A line of logits may be hundreds of megabytes; writing it takes no memory in proportion.
func TestALongLineTakesLittleMemory(t *testing.T) {
	const rows, cols = 200, 5000
	x := make([]float32, rows*cols)
	for i := range x {
		x[i] = math.Float32frombits(0x3f800000 + uint32(i)*7919%0x800000)
	}
	reqs := []request{{id: []byte("1"), input: forward.Input{Tokens: make([]int32, rows), Logits: true}}}
	outs := []*forward.Output{{Logits: matrixOf(rows, cols, x)}}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	var n counter
	if err := writeAnswers(&n, reqs, outs); err != nil {
		t.Fatal(err)
	}
	runtime.ReadMemStats(&after)
	if got := after.TotalAlloc - before.TotalAlloc; got > 512<<10 {
		t.Errorf("a line of %d bytes took %d bytes of memory", n, got)
	}
	if n < rows*cols*4 {
		t.Errorf("only %d bytes were written", n)
	}
}

type counter int

func (c *counter) Write(p []byte) (int, error) { *c += counter(len(p)); return len(p), nil }

// A writer that fails at any point makes the answers fail.
func TestAFailingWriteIsAnError(t *testing.T) {
	x := make([]float32, 100*100)
	reqs := []request{{input: forward.Input{Tokens: make([]int32, 100), HiddenStates: true}}}
	outs := []*forward.Output{{HiddenStates: matrixOf(100, 100, x)}}
	var whole bytes.Buffer
	if err := writeAnswers(&whole, reqs, outs); err != nil {
		t.Fatal(err)
	}
	if !json.Valid(whole.Bytes()) {
		t.Fatalf("not JSON: %.100s", whole.Bytes())
	}
	full := errors.New("full")
	for room := 0; room < whole.Len(); room += 1 + whole.Len()/20 {
		if err := writeAnswers(&limited{room, full}, reqs, outs); !errors.Is(err, full) {
			t.Fatalf("with room for %d of %d bytes: %v", room, whole.Len(), err)
		}
	}
}

// limited is a writer with room for so many bytes.
type limited struct {
	room int
	err  error
}

func (l *limited) Write(p []byte) (int, error) {
	if len(p) > l.room {
		n := l.room
		l.room = 0
		return n, l.err
	}
	l.room -= len(p)
	return len(p), nil
}
