package slots

import (
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
)

// Tensor is a named part of a parameter vector.
type Tensor struct {
	Name  string  // as in files
	Shape []int64 // as in files
	At    int64   // where it begins in the vector, in bytes, a multiple of 4
	// Transposed says that the vector has the matrix with its rows and columns exchanged.
	Transposed bool
}

// elements is the product of the shape.
func (t *Tensor) elements() int64 {
	n := int64(1)
	for _, d := range t.Shape {
		n *= d
	}
	return n
}

// in is the tensor's part of a vector.
func (t *Tensor) in(m device.Mem) []float32 { return m.Slice(t.At, t.elements()*4).F32() }

// vector is parameters that are trained together: one piece of memory, and the gradient accumulators and moments of the same layout. What
// lies between the tensors belongs to nobody, and is not looked at.
type vector struct {
	name     string // in files: "adapter", or that of a parameter or buffer
	tensors  []Tensor
	bytes    int64
	params   device.Mem
	grads    device.Mem // Invariant: zero unless the slot's gradients are pending. This and the moments are empty in a vector that is not trained
	mean, sq device.Mem // AdamW's moments, the first and the second
	steps    int64      // that the moments have seen
	blocks   []*device.Block
}

// sizes are the bytes that a vector takes of a device.
func sizes(bytes int64, trained bool) (s device.Sizes) {
	bytes = device.RoundAlign(bytes)
	s[device.Adapters] = device.RoundPages(bytes)
	if trained {
		s[device.Adapters] += device.RoundPages(2 * bytes)
		s[device.Gradients] = device.RoundPages(bytes)
	}
	return s
}

// newVector takes the memory of a vector, all or nothing. It is zero.
func newVector(dev device.Device, name string, tensors []Tensor, bytes int64, trained bool) (*vector, error) {
	bytes = device.RoundAlign(bytes)
	v := &vector{name: name, tensors: tensors, bytes: bytes}
	var err error
	if v.params, err = v.take(dev, device.Adapters, bytes); err == nil && trained {
		err = v.takeState(dev)
	}
	if err != nil {
		v.free()
		return nil, err
	}
	return v, nil
}

// takeState takes the memory of moments and accumulators, all or nothing.
func (v *vector) takeState(dev device.Device) error {
	before := len(v.blocks)
	state, err := v.take(dev, device.Adapters, 2*v.bytes)
	if err == nil {
		v.mean, v.sq = state.Slice(0, v.bytes), state.Slice(v.bytes, v.bytes)
		v.grads, err = v.take(dev, device.Gradients, v.bytes)
	}
	if err != nil {
		for _, b := range v.blocks[before:] {
			b.Free()
		}
		v.blocks, v.mean, v.sq = v.blocks[:before], device.Mem{}, device.Mem{}
	}
	return err
}

func (v *vector) take(dev device.Device, p device.Purpose, bytes int64) (device.Mem, error) {
	b, err := dev.Allocate(p, bytes)
	if err != nil {
		return device.Mem{}, err
	}
	v.blocks = append(v.blocks, b)
	return b.Mem(), nil
}

func (v *vector) free() {
	for _, b := range v.blocks {
		b.Free()
	}
	v.blocks = nil
}

func (v *vector) trained() bool { return v.grads.Bytes() > 0 }

// adapterTensors are the tensors of an adapter's vector under PEFT's names, in the order of the vector.
func adapterTensors(modules []forward.Module, a *forward.Adapter) []Tensor {
	var list []Tensor
	for _, l := range a.LoRA {
		m, r := modules[l.Module], int64(l.Rank)
		list = append(list,
			Tensor{Name: prefix + m.Path + suffixA, Shape: []int64{r, int64(m.In)}, At: l.A},
			Tensor{Name: prefix + m.Path + suffixB, Shape: []int64{int64(m.Out), r}, At: l.B, Transposed: true})
	}
	return list
}

// PEFT's names for the matrices of a module.
const (
	prefix  = "base_model.model."
	suffixA = ".lora_A.weight"
	suffixB = ".lora_B.weight"
)

// chunk is how many elements are worked on at a time. It is fixed, so that sums have the same bits whatever the number of threads.
const chunk = 1 << 16

// span is a part of one tensor of a vector.
type span struct {
	v      *vector
	at, by int64 // in bytes
}

func spans(vectors []*vector) []span {
	var list []span
	for _, v := range vectors {
		for i := range v.tensors {
			t := &v.tensors[i]
			for at, end := t.At, t.At+t.elements()*4; at < end; at += chunk * 4 {
				list = append(list, span{v, at, min(chunk*4, end-at)})
			}
		}
	}
	return list
}

func (s span) of(m device.Mem) []float32 { return m.Slice(s.at, s.by).F32() }

// each calls do for 0 to n-1 on several goroutines. The calls must be independent.
func each(threads, n int, do func(i int)) {
	threads = min(threads, n)
	if threads <= 1 {
		for i := range n {
			do(i)
		}
		return
	}
	var next atomic.Int64
	var wg sync.WaitGroup
	for range threads {
		wg.Go(func() {
			for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
				do(i)
			}
		})
	}
	wg.Wait()
}

func defaultThreads(n int) int {
	if n > 0 {
		return n
	}
	return runtime.GOMAXPROCS(0)
}

// add is dst += src, for memory of one length.
func add(threads int, dst, src device.Mem) {
	n := int((dst.Bytes() + chunk*4 - 1) / (chunk * 4))
	each(threads, n, func(i int) {
		at := int64(i) * chunk * 4
		by := min(chunk*4, dst.Bytes()-at)
		d, s := dst.Slice(at, by).F32(), src.Slice(at, by).F32()
		for j, x := range s {
			d[j] += x
		}
	})
}

// checkTensors says whether tensors lie inside a vector and apart from one another, in ascending order.
func checkTensors(tensors []Tensor, bytes int64) error {
	end := int64(0)
	for _, t := range tensors {
		n := t.elements()
		if t.At < end || t.At%4 != 0 || n < 0 || n > (bytes-t.At)/4 {
			return fmt.Errorf("tensor %s: %d elements at byte %d of %d, after byte %d", quote(t.Name), n, t.At, bytes, end)
		}
		end = t.At + n*4
	}
	return nil
}
