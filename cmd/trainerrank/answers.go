package main

import (
	"bufio"
	"errors"
	"io"
	"math"
	"os"
	"path/filepath"
	"strconv"

	"gorgonia.org/tensor"

	"github.com/trainerrank/engine/forward"
)

// answers writes one JSON line per request, piece by piece: a line of logits may be larger than memory should hold twice.
type answers struct{ *bufio.Writer }

func writeAnswers(w io.Writer, reqs []request, outs []*forward.Output) error {
	a := answers{bufio.NewWriterSize(w, 1<<16)}
	for i := range reqs {
		a.answer(&reqs[i], outs[i])
	}
	return a.Flush() // an error of any write before is kept until here
}

func (a answers) answer(r *request, o *forward.Output) {
	in := &r.input
	a.WriteString(`{"id": `)
	if r.id == nil {
		a.WriteString("null")
	}
	a.Write(r.id)
	if o.TargetLogprobs != nil {
		a.WriteString(`, "target_logprobs": `)
		x := o.TargetLogprobs.Data().([]float32)
		cell := func(i int) {
			if in.Targets[i] == forward.IgnoreLabel {
				a.WriteString("null")
			} else {
				a.float(x[i])
			}
		}
		if r.wide {
			a.rows(len(x), in.Width(), cell)
		} else {
			a.list(len(x), cell)
		}
	}
	if o.TopK != nil {
		a.WriteString(`, "top_k": {"tokens": `)
		ids := o.TopK.Tokens.Data().([]int32)
		a.rows(len(ids), in.TopK, func(i int) { a.Write(strconv.AppendInt(a.AvailableBuffer(), int64(ids[i]), 10)) })
		a.WriteString(`, "logprobs": `)
		a.matrix(o.TopK.Logprobs)
		a.WriteByte('}')
	}
	if o.Logits != nil {
		a.WriteString(`, "logits": `)
		a.matrix(o.Logits)
	}
	if o.HiddenStates != nil {
		a.WriteString(`, "hidden_states": `)
		a.matrix(o.HiddenStates)
	}
	a.WriteString("}\n")
}

func (a answers) matrix(t *tensor.Dense) {
	x := t.Data().([]float32)
	a.rows(len(x), t.Shape()[1], func(i int) { a.float(x[i]) })
}

// rows writes n cells as lists of width cells.
func (a answers) rows(n, width int, cell func(i int)) {
	a.list(n/width, func(r int) { a.list(width, func(c int) { cell(r*width + c) }) })
}

func (a answers) list(n int, cell func(i int)) {
	a.WriteByte('[')
	for i := range n {
		if i > 0 {
			a.WriteString(", ")
		}
		cell(i)
	}
	a.WriteByte(']')
}

// float writes the shortest decimal that reads back to the same float32. JSON has no word for what is not finite: that
// becomes a string, which most languages' number parsers take.
func (a answers) float(x float32) {
	switch v := float64(x); {
	case math.IsNaN(v):
		a.WriteString(`"NaN"`)
	case math.IsInf(v, 1):
		a.WriteString(`"Infinity"`)
	case math.IsInf(v, -1):
		a.WriteString(`"-Infinity"`)
	default:
		a.Write(strconv.AppendFloat(a.AvailableBuffer(), v, 'g', -1, 32))
	}
}

// writeFile writes a file whole or not at all: what write produces goes to a temporary file beside it, which then takes its name. What is
// there and is no regular file (a pipe, a terminal) is written to as it is.
func writeFile(path string, write func(w io.Writer) error) (err error) {
	if real, err := filepath.EvalSymlinks(path); err == nil {
		path = real
		if fi, err := os.Stat(path); err == nil && !fi.Mode().IsRegular() {
			f, err := os.OpenFile(path, os.O_WRONLY, 0)
			if err != nil {
				return err
			}
			return errors.Join(write(f), f.Close())
		}
	}
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			os.Remove(f.Name())
		}
	}()
	if err := write(f); err != nil {
		f.Close()
		return err
	}
	if err := f.Chmod(0o644); err != nil {
		f.Close()
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}
