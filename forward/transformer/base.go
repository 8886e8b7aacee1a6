package transformer

import (
	"fmt"
	"unsafe"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/forward/kernel"
)

// TrainBase makes the parameters of the base model trainable: they are kept in float32, whatever the files store, as one vector ([Model.BaseVector]). It must
// come before [Model.Place].
func (m *Model) TrainBase() error {
	if m.block != nil {
		return fmt.Errorf("train base: the weights of %s are placed already", m.name)
	}
	for i := range m.params {
		if w := m.params[i].weight; w != nil {
			w.DType = kernel.F32
		}
	}
	m.base = true
	m.layout() // now that of the vector of gradients
	return nil
}

// BaseVector is the vector of all parameters, or empty if they are not trained or have no place. What a gradient of the base model holds at some place is that of the
// parameter at the same place.
func (m *Model) BaseVector() device.Mem {
	if !m.base || m.block == nil {
		return device.Mem{}
	}
	return m.block.Mem().Slice(0, m.vector)
}

// BaseParams lists the parameters of the vector, ascending.
func (m *Model) BaseParams() []forward.Param {
	list := make([]forward.Param, len(m.params))
	for i := range m.params {
		p := &m.params[i]
		list[i] = forward.Param{Name: p.tensor.Name, At: m.trained[i], Bytes: p.trainedBytes()}
	}
	return list
}

func bytesOf(x []float32) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(x))), 4*len(x))
}

// BaseValues copies the values for parameter i of [Model.Params] out of a vector of the base model, its own or one of gradients, row-major as in the files.
func (m *Model) BaseValues(vector device.Mem, i int) []float32 {
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
