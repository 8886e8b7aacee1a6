package golden

import (
	"fmt"
	"math"
	"slices"

	"github.com/google/go-cmp/cmp"
	"gorgonia.org/tensor"

	"github.com/trainerrank/engine/forward"
)

// Answer is an output, copied out of the device's memory. What was not asked for is nil.
type Answer struct {
	Shapes                               string // of the tensors
	Targets, TopLogprobs, Logits, Hidden []float32
	TopTokens                            []int32
}

// Copy copies an output.
func Copy(o *forward.Output) Answer {
	var a Answer
	shape := func(what string, d *tensor.Dense) { a.Shapes += fmt.Sprintf("%s%v ", what, d.Shape()) }
	floats := func(what string, d *tensor.Dense) []float32 {
		if d == nil {
			return nil
		}
		shape(what, d)
		return slices.Clone(d.Data().([]float32))
	}
	a.Targets = floats("targets", o.TargetLogprobs)
	if o.TopK != nil {
		a.TopLogprobs = floats("top", o.TopK.Logprobs)
		shape("tokens", o.TopK.Tokens)
		a.TopTokens = slices.Clone(o.TopK.Tokens.Data().([]int32))
	}
	a.Logits = floats("logits", o.Logits)
	a.Hidden = floats("hidden", o.HiddenStates)
	return a
}

// CopyAll copies outputs.
func CopyAll(list []*forward.Output) []Answer {
	answers := make([]Answer, len(list))
	for i, o := range list {
		answers[i] = Copy(o)
	}
	return answers
}

// Diff says where two answers differ in a bit; "" if nowhere.
func Diff(want, got Answer) string {
	same := func(a, b float32) bool { return math.Float32bits(a) == math.Float32bits(b) }
	if want.Shapes == got.Shapes && slices.Equal(want.TopTokens, got.TopTokens) && slices.EqualFunc(want.Targets, got.Targets, same) &&
		slices.EqualFunc(want.TopLogprobs, got.TopLogprobs, same) && slices.EqualFunc(want.Logits, got.Logits, same) &&
		slices.EqualFunc(want.Hidden, got.Hidden, same) {
		return ""
	}
	d := cmp.Diff(want, got, cmp.Comparer(same))
	if d == "" {
		d = "the answers differ, but cmp sees nothing"
	}
	return d
}

// First is the answer for the first n of a request's positions.
func (a Answer) First(n, positions int) Answer {
	cut := func(list []float32) []float32 { return list[:len(list)/positions*n] }
	return Answer{
		Targets: cut(a.Targets), TopLogprobs: cut(a.TopLogprobs), Logits: cut(a.Logits), Hidden: cut(a.Hidden),
		TopTokens: a.TopTokens[:len(a.TopTokens)/positions*n],
	}
}
