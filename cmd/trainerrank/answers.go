package main

import (
	"bufio"
	"io"
	"math"
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
