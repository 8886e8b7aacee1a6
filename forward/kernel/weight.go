package kernel

import (
	"fmt"
	"math"

	"github.com/trainerrank/engine/device"
)

// DType is a type in which weights are stored. Arithmetic is float32 whatever the storage.
type DType uint8

// The storage types.
const (
	F32 DType = iota
	BF16
	F16
)

// Size is the number of bytes of a value.
func (d DType) Size() int {
	if d == F32 {
		return 4
	}
	return 2
}

func (d DType) String() string { return [...]string{"f32", "bf16", "f16"}[d] }

// Weight is a frozen matrix [Out, In], packed: panels of [Width] output rows, each panel stored as In groups of Width values,
// so that a kernel reads it front to back. Rows beyond Out are zero. A panel takes the bytes that its rows take in
// a safetensors file, in the same place, transposed.
type Weight struct {
	Mem     device.Mem
	DType   DType
	Out, In int
}

// WeightBytes is the size in bytes of a packed [out, in] matrix.
func WeightBytes(d DType, out, in int) int64 {
	return int64(panels(out)) * Width * int64(in) * int64(d.Size())
}

func panels(out int) int { return (out + Width - 1) / Width }

// PackRows packs whole panels: rows holds the rows [from, from+n) of w as stored in a file, in little-endian order; from is
// a multiple of Width, and n is too unless the rows are the last. It says whether any value is NaN or infinite. Different
// panels may be packed from several goroutines.
func (h *Host) PackRows(w *Weight, from int, rows []byte) (nonFinite bool, err error) {
	size := w.DType.Size()
	n := len(rows) / (w.In * size)
	if from < 0 || from%Width != 0 || len(rows) != n*w.In*size || from+n > w.Out || (n%Width != 0 && from+n != w.Out) {
		return false, fmt.Errorf("pack weight: %d bytes from row %d on are not whole panels of a %s matrix [%d, %d]", len(rows), from, w.DType, w.Out, w.In)
	}
	src := device.MemOf(rows)
	for at := 0; at < n; at += Width {
		r := min(Width, n-at)
		lo, len := int64(at*w.In*size), int64(r*w.In*size)
		to := w.Mem.Slice(int64(from+at)*int64(w.In*size), int64(Width*w.In*size))
		var bad bool
		switch w.DType {
		case F32:
			bad = h.p.packPanel32(to.F32(), src.Slice(lo, len).F32(), r, w.In)
		case BF16:
			bad = h.p.packPanel16(to.U16(), src.Slice(lo, len).U16(), r, w.In, 0x7f80)
		case F16:
			bad = h.p.packPanel16(to.U16(), src.Slice(lo, len).U16(), r, w.In, 0x7c00)
		}
		nonFinite = nonFinite || bad
	}
	return nonFinite, nil
}

// Widen converts stored values, little-endian, to float32.
func (h *Host) Widen(dst []float32, src []byte, d DType) {
	m := device.MemOf(src)
	switch d {
	case F32:
		copy(dst, m.F32())
	case BF16:
		h.p.widenBF16(dst, m.U16())
	case F16:
		h.p.widenF16(dst, m.U16())
	}
}

// panel returns rows [k0, k0+n) of panel p as float32, widened into buf if they are not stored so.
func (h *Host) panel(w *Weight, p, k0, n int, buf []float32) []float32 {
	at := int64(p*w.In+k0) * Width
	size := int64(w.DType.Size())
	m := w.Mem.Slice(at*size, int64(n)*Width*size)
	switch w.DType {
	case BF16:
		buf = buf[:n*Width]
		h.p.widenBF16(buf, m.U16())
	case F16:
		buf = buf[:n*Width]
		h.p.widenF16(buf, m.U16())
	default:
		return m.F32()
	}
	return buf
}

// Row copies row r of w to dst, which has In elements, as float32.
func (w *Weight) Row(dst []float32, r int) {
	first := r/Width*Width*w.In + r%Width
	switch w.DType {
	case BF16:
		src := w.Mem.U16()[first:]
		for j := range dst {
			dst[j] = math.Float32frombits(uint32(src[j*Width]) << 16)
		}
	case F16:
		src := w.Mem.U16()[first:]
		for j := range dst {
			dst[j] = widenF16(src[j*Width])
		}
	default:
		src := w.Mem.F32()[first:]
		for j := range dst {
			dst[j] = src[j*Width]
		}
	}
}
