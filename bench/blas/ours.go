package main

import (
	"fmt"
	"math"
	"unsafe"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward/kernel"
)

// ours is the engine's host backend: weights packed before the clock starts, rows as it lays them out itself.
type ours struct {
	host  *kernel.Host
	dtype kernel.DType
	work  []device.Mem // one per worker
}

func openOurs(store string, threads int) (product, error) {
	dtype, ok := map[string]kernel.DType{"f32": kernel.F32, "bf16": kernel.BF16}[store]
	if !ok {
		return nil, fmt.Errorf("weights %q: want f32 or bf16", store)
	}
	h, err := kernel.NewHost(threads)
	if err != nil {
		return nil, err
	}
	o := &ours{host: h, dtype: dtype}
	for range threads {
		o.work = append(o.work, device.MemOf(mapped(int(kernel.WorkBytes(64)))))
	}
	return o, nil
}

func (o *ours) describe() string {
	if l := o.host.Log(); l != "" {
		return o.host.Name() + ": " + l
	}
	return o.host.Name()
}

func (o *ours) close() { o.host.Close() }

func (o *ours) matrix(rows, cols int) kernel.Mat {
	return kernel.NewMat(device.MemOf(mapped(int(kernel.MatBytes(rows, cols)))), rows, cols)
}

func (o *ours) prepare(s shape, x, w, y []float32) (func(), func() []float32, error) {
	src, dst := o.matrix(s.M, s.K), o.matrix(s.M, s.N)
	in, out := src.Mem.F32(), dst.Mem.F32()
	for i := range s.M {
		copy(in[i*src.Stride:][:s.K], x[i*s.K:][:s.K])
	}
	packed := &kernel.Weight{Mem: device.MemOf(mapped(int(kernel.WeightBytes(o.dtype, s.N, s.K)))), DType: o.dtype, Out: s.N, In: s.K}
	if _, err := o.host.PackRows(packed, 0, stored(w, o.dtype)); err != nil {
		return nil, nil, err
	}
	// Rows are shared among the workers as the engine's decoder shares them (cut in forward/transformer): in blocks of at most
	// HeadRows, as many for every worker, whole tiles of 12 rows.
	workers := len(o.work)
	n := ((s.M+kernel.HeadRows-1)/kernel.HeadRows + workers - 1) / workers * workers
	rows := min(kernel.HeadRows, ((s.M+n-1)/n+11)/12*12)
	n = (s.M + rows - 1) / rows
	run := func() {
		_ = o.host.Do(func() error { // returns what the function returns
			o.host.Each(n, func(worker, i int) {
				from, to := i*rows, min((i+1)*rows, s.M)
				o.host.Linear(o.work[worker], dst.RowRange(from, to), src.RowRange(from, to), packed, device.Mem{}, false)
			})
			return nil
		})
	}
	result := func() []float32 {
		for i := range s.M {
			copy(y[i*s.N:][:s.N], out[i*dst.Stride:][:s.N])
		}
		return y
	}
	return run, result, nil
}

// stored is w as a file holds it.
func stored(w []float32, d kernel.DType) []byte {
	if d == kernel.F32 {
		return unsafe.Slice((*byte)(unsafe.Pointer(&w[0])), len(w)*4)
	}
	b := make([]byte, len(w)*2)
	for i, v := range w {
		h := math.Float32bits(v) >> 16 // exact: measure rounded w
		b[2*i], b[2*i+1] = byte(h), byte(h>>8)
	}
	return b
}
