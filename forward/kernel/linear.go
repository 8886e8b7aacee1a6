package kernel

import "github.com/trainerrank/engine/device"

// steps cuts k into equal parts of at most blockK and returns the length of a part.
func steps(k int) int {
	n := (k + blockK - 1) / blockK
	return (k + n - 1) / n
}

// product computes rows [from, to) of src times panel p of w into c, whose rows are ldc apart.
func (h *Host) product(c []float32, ldc int, src Mat, from, to int, w *Weight, p int, buf []float32) {
	a := src.Mem.F32()[from*src.Stride:]
	step := steps(w.In)
	for k := 0; k < w.In; k += step {
		n := min(step, w.In-k)
		b := h.panel(w, p, k, n, buf)
		if w.DType != F32 {
			w.prefetch(p*w.In+k+n, n)
		}
		h.p.gemm(c, ldc, a[k:], src.Stride, 1, b, to-from, n, k > 0)
	}
}

// prefetch asks for n rows of Width values from row on, which are the next to be widened. Widening reads them all at once, at the speed of memory, unless they
// come while the product before is computed: that matters the more, the fewer rows there are.
func (w *Weight) prefetch(row, n int) {
	size := int64(Width * w.DType.Size())
	from := int64(row) * size
	prefetch(w.Mem.Slice(from, min(int64(n)*size, w.Mem.Bytes()-from)).Raw())
}

// Linear implements [Backend].
func (h *Host) Linear(work device.Mem, dst, src Mat, w *Weight, bias device.Mem, add bool) {
	ws := work.F32()
	for from := 0; from < src.Rows; from += chunkRows {
		to := min(from+chunkRows, src.Rows)
		for p := range panels(w.Out) {
			col := p * Width
			n := min(Width, w.Out-col)
			out := dst.Mem.F32()[from*dst.Stride+col:]
			if n == Width && !add {
				h.product(out, dst.Stride, src, from, to, w, p, ws)
				h.addBias(out, dst.Stride, to-from, bias, col, n)
				continue
			}
			tile := ws[blockK*Width:]
			h.product(tile, Width, src, from, to, w, p, ws)
			h.addBias(tile, Width, to-from, bias, col, n)
			for r := range to - from {
				d, s := out[r*dst.Stride:][:n], tile[r*Width:][:n]
				if add {
					h.p.add(d, s)
				} else {
					copy(d, s)
				}
			}
		}
	}
}

func (h *Host) addBias(c []float32, ldc, rows int, bias device.Mem, col, n int) {
	if bias.Bytes() == 0 {
		return
	}
	b := bias.F32()[col : col+n]
	for r := range rows {
		h.p.add(c[r*ldc:][:n], b)
	}
}

// GatedMLP implements [Backend].
func (h *Host) GatedMLP(work device.Mem, dst, src Mat, gate, up *Weight, gateBias, upBias device.Mem, act Activation) {
	f := h.p.silu
	if act == GELUTanh {
		f = h.p.geluTanh
	}
	ws := work.F32()
	for from := 0; from < src.Rows; from += chunkRows {
		m := min(chunkRows, src.Rows-from)
		g := ws[blockK*Width:][:m*Width]
		u := ws[(blockK+chunkRows)*Width:][:m*Width]
		for p := range panels(gate.Out) {
			col := p * Width
			n := min(Width, gate.Out-col)
			h.product(g, Width, src, from, from+m, gate, p, ws)
			h.product(u, Width, src, from, from+m, up, p, ws)
			h.addBias(g, Width, m, gateBias, col, n)
			h.addBias(u, Width, m, upBias, col, n)
			f(g, g, u)
			out := dst.Mem.F32()[from*dst.Stride+col:]
			for r := range m {
				copy(out[r*dst.Stride:][:n], g[r*Width:])
			}
		}
	}
}
