package transformer

import (
	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward/kernel"
)

// BaseGradient copies the gradient of parameter i of [Model.Params] out of a vector that [forward.Graph.Backward] gave for the base model, row-major as in the
// files.
func (m *Model) BaseGradient(vector device.Mem, i int) []float32 {
	p := &m.params[i]
	mem := vector.Slice(m.trained[i], p.trainedBytes())
	if p.weight == nil {
		return append([]float32(nil), mem.F32()[:p.Shape[0]]...)
	}
	w := kernel.Weight{Mem: mem, DType: kernel.F32, Out: int(p.Shape[0]), In: int(p.Shape[1])}
	values := make([]float32, w.Out*w.In)
	for r := range w.Out {
		w.Row(values[r*w.In:][:w.In], r)
	}
	return values
}

// Params lists the parameters of the model, in execution order, under the names of its files.
func (m *Model) Params() []Param {
	list := make([]Param, len(m.params))
	for i := range m.params {
		list[i] = m.params[i].Param
		list[i].Name = m.params[i].tensor.Name
	}
	return list
}

// train lays out the vector of gradients of the base model.
func (m *Model) train() {
	m.modules = m.spec.modules()
	for i := range m.params {
		m.trained = append(m.trained, m.vector)
		m.vector += device.RoundAlign(m.params[i].trainedBytes())
	}
}
