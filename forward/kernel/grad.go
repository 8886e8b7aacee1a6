package kernel

import (
	"math"

	"github.com/trainerrank/engine/device"
)

// Gradients are the operations of a backward, and those of adapters. As with the others, an operation needs work of [GradWorkBytes] bytes
// if it takes any. A gradient dx is that of the loss by x.
//
// Every element of a result is one chain in a fixed order, whatever the number of rows that an operation is given. So gradients do not depend on how rows
// were shared among workers.
type Gradients interface {
	// Pack packs the float32 matrix [dst.Out, dst.In] that src holds row-major without gaps, or if transposed its transpose [dst.In, dst.Out]. dst is in [F32].
	Pack(dst *Weight, src device.Mem, transposed bool)
	// Scale is x *= s.
	Scale(x Mat, s float32)
	// Activate is dst = act(gate) * up. dst may be one of them.
	Activate(dst, gate, up Mat, act Activation)
	// LinearGrad is dx = dy * w, or dx += it if add: the gradient by the rows that [Backend.Linear] multiplied.
	LinearGrad(work device.Mem, dx, dy Mat, w *Weight, add bool)
	// Outer is dst = aᵀ * b, or dst += it if add: the sum over rows of the products of a column of a with a column of b. dst has a row for each column
	// of a.
	Outer(work device.Mem, dst, a, b Mat, add bool)
	// NormGrad is the gradient by x of [Backend.Norm] of x. dx may be dy.
	NormGrad(dx, dy, x Mat, w device.Mem, offset float32, eps float64)
	// NormWeightGrad is dw, the gradient by the weights of that norm.
	NormWeightGrad(dw device.Mem, dy, x Mat, eps float64)
	// ActivateGrad is the backward of [Gradients.Activate]: from dact the gradients dgate and dup, and act = act(gate) * up once more. The
	// matrices may be the same.
	ActivateGrad(act, dgate, dup, gate, up, dact Mat, a Activation)
	// RowDot is dst[i, h] = the dot product of head h of row i of a and b, which have headDim columns for each.
	RowDot(dst, a, b Mat, headDim int)
	// AttendQueryGrad is dq, the gradient by q of [Backend.Attend] with the same q, k, v, first, spans and a. stats is what that wrote, dout the
	// gradient by its output and dot the [Gradients.RowDot] of both.
	AttendQueryGrad(work device.Mem, dq, q, k, v, dout, stats, dot Mat, first int, spans []Span, a Attention)
	// AttendKeyGrad is dk and dv, the gradients by k and v of packed rows from first on. q, dout, stats and dot hold all packed rows, and so do k and v.
	AttendKeyGrad(work device.Mem, dk, dv, q, k, v, dout, stats, dot Mat, first int, spans []Span, a Attention)
	// HeadGrad is dh, the gradient by h of what [Backend.Head] answers about it. wants are sorted by row, logZ holds that of each row of h that has
	// targets. scratch has [HeadGradBytes] bytes.
	HeadGrad(work, scratch device.Mem, dh, h Mat, w *Weight, logZ []float64, wants []AskGrad)
	// HeadWeightGrad is part of dw, the gradient by w of the same, or dw += it if add: panels [panel, panel+HeadPanels) of a [F32] matrix that is packed as
	// w is.
	HeadWeightGrad(work, scratch device.Mem, dw *Weight, panel int, h Mat, w *Weight, logZ []float64, wants []AskGrad, add bool)
	// EmbedGrad adds scale * row i of dx to row tokens[i] of dw, an [F32] matrix, in columns [from, to).
	EmbedGrad(dw *Weight, dx Mat, tokens []int32, scale float32, from, to int)
	// Clear is x = 0.
	Clear(x Mat)
	// Copy is dst = src.
	Copy(dst, src Mat)
	// PlaceRows is dst[rows[i]] = src[i].
	PlaceRows(dst, src Mat, rows []int32)
	// AddRow is dst[i] += x.
	AddRow(dst Mat, i int, x []float32)
	// SumRows is dst = the sum of the rows of x.
	SumRows(dst device.Mem, x Mat)
}

// AskGrad is the cotangent of an [Ask]: of a target, or of a row of logits.
type AskGrad struct {
	Row    int32
	Label  int32     // of a target
	Factor float32   // the cotangent of a target
	Logits []float32 // the cotangents of a row of logits; nil for a target
}

// GradWorkBytes is the size in bytes of the workspace of the operations of [Gradients] and of a [Backend], for heads of headDim elements.
func GradWorkBytes(headDim int) int64 {
	linear := blockK*Width + Width*Width + chunkRows*Width
	attention := 3*gradTiles*headDim*Width + 2*keyBlock*Width
	keys := 4*headDim*Width + 2*keyBlock*Width
	return max(WorkBytes(headDim), device.RoundAlign(int64(max(linear, attention, keys))*4))
}

// Pack implements [Gradients].
func (h *Host) Pack(dst *Weight, src device.Mem, transposed bool) {
	from, to := src.F32(), dst.Mem.F32()
	for p := range panels(dst.Out) {
		col := p * Width
		n := min(Width, dst.Out-col)
		panel := to[p*dst.In*Width:][:dst.In*Width]
		if !transposed {
			h.p.packPanel32(panel, from[col*dst.In:], n, dst.In)
			continue
		}
		for k := range dst.In {
			row := panel[k*Width:][:Width]
			copy(row, from[k*dst.Out+col:][:n])
			clear(row[n:])
		}
	}
}

// Scale implements [Gradients].
func (h *Host) Scale(x Mat, s float32) {
	for i := range x.Rows {
		h.p.scale(x.row(i), s)
	}
}

// Activate implements [Gradients].
func (h *Host) Activate(dst, gate, up Mat, act Activation) {
	f := h.p.silu
	if act == GELUTanh {
		f = h.p.geluTanh
	}
	for i := range dst.Rows {
		f(dst.row(i), gate.row(i), up.row(i))
	}
}

// ActivateGrad implements [Gradients].
func (h *Host) ActivateGrad(act, dgate, dup, gate, up, dact Mat, a Activation) {
	f := h.p.siluGrad
	if a == GELUTanh {
		f = h.p.geluTanhGrad
	}
	for i := range act.Rows {
		f(act.row(i), dgate.row(i), dup.row(i), gate.row(i), up.row(i), dact.row(i))
	}
}

// tileOffsets are the beginnings of the rows of a tile [Width, Width].
var tileOffsets = func() (off [Width]int) {
	for l := range off {
		off[l] = l * Width
	}
	return off
}()

// transposed writes output rows [o, o+n) of columns [k, k+Width) of w to buf as a panel [n, Width]: what a product with w, rather than its transpose, reads. o is
// a multiple of Width; columns beyond w.In are zero. tile holds Width*Width values.
func (h *Host) transposed(buf, tile []float32, w *Weight, o, n, k int) {
	cols := min(Width, w.In-k)
	for at := 0; at < n; at += Width {
		part := h.panel(w, (o+at)/Width, k, cols, tile)
		if cols < Width {
			copy(tile, part)
			clear(tile[cols*Width : Width*Width])
			part = tile[:Width*Width]
		}
		// Rows beyond w.Out are zero in the panel, but buf need not have room for them.
		h.p.gatherLanes(buf[at*Width:], part, &tileOffsets, min(Width, n-at))
	}
}

// LinearGrad implements [Gradients].
func (h *Host) LinearGrad(work device.Mem, dx, dy Mat, w *Weight, add bool) {
	ws := work.F32()
	buf, tile, out := ws[:blockK*Width], ws[blockK*Width:][:Width*Width], ws[(blockK+Width)*Width:][:chunkRows*Width]
	for from := 0; from < dx.Rows; from += chunkRows {
		rows := min(chunkRows, dx.Rows-from)
		a := dy.Mem.F32()[from*dy.Stride:]
		for k := 0; k < w.In; k += Width {
			n := min(Width, w.In-k)
			c, ldc := dx.Mem.F32()[from*dx.Stride+k:], dx.Stride
			direct := n == Width && !add
			if !direct {
				c, ldc = out, Width
			}
			for o := 0; o < w.Out; o += blockK {
				m := min(blockK, w.Out-o)
				h.transposed(buf, tile, w, o, m, k)
				h.p.gemm(c, ldc, a[o:], dy.Stride, 1, buf, rows, m, o > 0)
			}
			if direct {
				continue
			}
			for r := range rows {
				d, s := dx.Mem.F32()[(from+r)*dx.Stride+k:][:n], out[r*Width:][:n]
				if add {
					h.p.add(d, s)
				} else {
					copy(d, s)
				}
			}
		}
	}
}

// Outer implements [Gradients].
func (h *Host) Outer(work device.Mem, dst, a, b Mat, add bool) {
	ws := work.F32()
	buf, tile := ws[:blockK*Width], ws[blockK*Width:][:chunkRows*Width]
	d := dst.Mem.F32()
	if a.Rows == 0 && !add {
		for i := range dst.Rows {
			clear(dst.row(i))
		}
	}
	for col := 0; col < b.Cols; col += Width {
		n := min(Width, b.Cols-col)
		for from := 0; from < a.Rows; from += blockK {
			rows := min(blockK, a.Rows-from)
			for r := range rows {
				row := buf[r*Width:][:Width]
				copy(row, b.row(from + r)[col:col+n])
				clear(row[n:])
			}
			for i := 0; i < a.Cols; i += chunkRows {
				m := min(chunkRows, a.Cols-i)
				at := a.Mem.F32()[from*a.Stride+i:]
				if n == Width {
					h.p.gemm(d[i*dst.Stride+col:], dst.Stride, at, 1, a.Stride, buf, m, rows, add || from > 0)
					continue
				}
				if add || from > 0 {
					for r := range m {
						copy(tile[r*Width:][:n], d[(i+r)*dst.Stride+col:])
					}
				}
				h.p.gemm(tile, Width, at, 1, a.Stride, buf, m, rows, add || from > 0)
				for r := range m {
					copy(d[(i+r)*dst.Stride+col:][:n], tile[r*Width:])
				}
			}
		}
	}
}

// NormGrad implements [Gradients]. With r = 1/sqrt(mean(x^2)+eps) and g = dy*(offset+w), it is r*g - x * r^3 * mean(g*x).
func (h *Host) NormGrad(dx, dy, x Mat, w device.Mem, offset float32, eps float64) {
	g := w.F32()
	n := len(g)
	for i := range x.Rows {
		from, up, to := x.row(i), dy.row(i), dx.row(i)
		for at := 0; at < x.Cols; at += n {
			v, d := from[at:at+n], up[at:at+n]
			r := 1 / math.Sqrt(float64(h.p.sumSquares(v))/float64(n)+eps)
			k := r * r * r * float64(h.p.normDot(d, v, g, offset)) / float64(n)
			h.p.normGrad(to[at:at+n], d, v, g, float32(r), offset, float32(k))
		}
	}
}

// NormWeightGrad implements [Gradients].
func (h *Host) NormWeightGrad(dw device.Mem, dy, x Mat, eps float64) {
	acc := dw.F32()
	n := len(acc)
	clear(acc)
	for i := range x.Rows {
		from, up := x.row(i), dy.row(i)
		for at := 0; at < x.Cols; at += n {
			v := from[at : at+n]
			r := 1 / math.Sqrt(float64(h.p.sumSquares(v))/float64(n)+eps)
			h.p.mulAdd(acc, up[at:at+n], v, float32(r))
		}
	}
}

// RowDot implements [Gradients].
func (h *Host) RowDot(dst, a, b Mat, headDim int) {
	for i := range a.Rows {
		x, y, d := a.row(i), b.row(i), dst.row(i)
		for j := range d {
			d[j] = h.p.dot(x[j*headDim:][:headDim], y[j*headDim:][:headDim])
		}
	}
}

// SumRows implements [Gradients].
func (h *Host) SumRows(dst device.Mem, x Mat) {
	acc := dst.F32()
	clear(acc)
	for i := range x.Rows {
		h.p.add(acc, x.row(i))
	}
}

// HeadGradBytes is the scratch, in bytes, that [Gradients.HeadGrad] needs for a number of rows: a tile of logits.
func HeadGradBytes(rows int) int64 { return device.RoundAlign(int64(rows) * headTile * 4) }

// HeadGrad implements [Gradients]. Tiles of logits are computed once more, and turned into their gradients: of a target with cotangent c, c for its own
// logit less c times the probability of each.
func (h *Host) HeadGrad(work, scratch device.Mem, dh, hidden Mat, w *Weight, logZ []float64, wants []AskGrad) {
	if hidden.Rows == 0 {
		return
	}
	for col := 0; col < w.Out; col += headTile {
		tile := h.logitsGrad(work, scratch, hidden, w, col, logZ, wants)
		// The tile's columns are some panels of w. Together they are a matrix of their own.
		at := int64(col/Width) * Width * int64(w.In) * int64(w.DType.Size())
		part := Weight{Mem: w.Mem.Slice(at, w.Mem.Bytes()-at), DType: w.DType, Out: tile.Cols, In: w.In}
		h.LinearGrad(work, dh, tile, &part, col > 0)
	}
}

// logitsGrad is the gradient by the logits of the tokens from col on, for the rows of hidden: a tile.
func (h *Host) logitsGrad(work, scratch device.Mem, hidden Mat, w *Weight, col int, logZ []float64, wants []AskGrad) Mat {
	n := min(headTile, w.Out-col)
	ws, t := work.F32(), scratch.F32()
	for c := 0; c < n; c += Width {
		h.product(t[c:], headTile, hidden, 0, hidden.Rows, w, (col+c)/Width, ws)
	}
	tile := Mat{scratch, hidden.Rows, n, headTile}
	for r := range hidden.Rows {
		k := 0
		var factor float32
		for ; k < len(wants) && int(wants[k].Row) == r; k++ {
			factor += wants[k].Factor
		}
		row := tile.row(r)
		if factor != 0 {
			h.p.expScale(row, float32(logZ[r]), -factor)
		} else {
			clear(row)
		}
		for _, a := range wants[:k] {
			if a.Logits != nil {
				h.p.add(row, a.Logits[col:col+n])
			} else if at := int(a.Label) - col; at >= 0 && at < n {
				row[at] += a.Factor
			}
		}
		wants = wants[k:]
	}
	return tile
}

// HeadPanels is the number of panels that [Gradients.HeadWeightGrad] treats at once.
const HeadPanels = headTile / Width

// HeadWeightGrad implements [Gradients].
func (h *Host) HeadWeightGrad(work, scratch device.Mem, dw *Weight, panel int, hidden Mat, w *Weight, logZ []float64, wants []AskGrad, add bool) {
	if hidden.Rows == 0 {
		return
	}
	tile := h.logitsGrad(work, scratch, hidden, w, panel*Width, logZ, wants)
	for c := 0; c < tile.Cols; c += Width {
		h.Outer(work, dw.Panel(panel+c/Width), hidden, tile.ColRange(c, min(c+Width, tile.Cols)), add)
	}
}

// Panel is panel i of an [F32] matrix, as a matrix [In, Width], or of as many columns as there are rows left.
func (w *Weight) Panel(i int) Mat {
	size := int64(w.In) * Width * 4
	return Mat{w.Mem.Slice(int64(i)*size, size), w.In, min(Width, w.Out-i*Width), Width}
}

// EmbedGrad implements [Gradients].
func (h *Host) EmbedGrad(dw *Weight, dx Mat, tokens []int32, scale float32, from, to int) {
	d := dw.Mem.F32()
	for i, t := range tokens {
		row, at := dx.row(i), int(t)/Width*Width*dw.In+int(t)%Width
		for j := from; j < to; j++ {
			d[at+j*Width] += scale * row[j]
		}
	}
}

// Clear implements [Gradients].
func (h *Host) Clear(x Mat) {
	for i := range x.Rows {
		clear(x.row(i))
	}
}

// Copy implements [Gradients].
func (h *Host) Copy(dst, src Mat) {
	for i := range dst.Rows {
		copy(dst.row(i), src.row(i))
	}
}

// PlaceRows implements [Gradients].
func (h *Host) PlaceRows(dst, src Mat, rows []int32) {
	for i, r := range rows {
		copy(dst.row(int(r)), src.row(i))
	}
}

// AddRow implements [Gradients].
func (h *Host) AddRow(dst Mat, i int, x []float32) { h.p.add(dst.row(i), x) }
