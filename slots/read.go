package slots

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/bits"

	"github.com/trainerrank/engine/loader"
)

// piece is how many bytes of a file are in memory at a time.
const piece = 1 << 20

// readTensor widens a tensor of a file to float32 and stores it where t says in dst. The tensor must have the shape of t.
func readTensor(set *loader.Set, x *loader.Tensor, t *Tensor, dst []float32) error {
	if fmt.Sprint(x.Shape) != fmt.Sprint(t.Shape) {
		return fmt.Errorf("its shape is %v, want %v", x.Shape, t.Shape)
	}
	size := int64(x.DType.Bits() / 8)
	rows, cols := int64(1), t.elements()
	if t.Transposed {
		rows, cols = t.Shape[0], t.Shape[1]
	}
	wide, buf := make([]float32, min(cols*rows, piece/4)), make([]byte, min(x.Bytes, piece/4*size))
	for at, n := int64(0), rows*cols; at < n; {
		m := min(n-at, int64(len(wide)))
		if err := set.ReadAt(x, buf[:m*size], at*size); err != nil {
			return err
		}
		if err := widen(wide[:m], buf[:m*size], x.DType); err != nil {
			return err
		}
		if !t.Transposed {
			copy(dst[at:], wide[:m])
		} else {
			for i, w := range wide[:m] {
				row, col := (at+int64(i))/cols, (at+int64(i))%cols
				dst[col*rows+row] = w
			}
		}
		at += m
	}
	return nil
}

// widen makes float32 of the elements of a file.
func widen(dst []float32, src []byte, d loader.DType) error {
	switch d {
	case loader.F32:
		for i := range dst {
			dst[i] = math.Float32frombits(binary.LittleEndian.Uint32(src[4*i:]))
		}
	case loader.BF16:
		for i := range dst {
			dst[i] = math.Float32frombits(uint32(binary.LittleEndian.Uint16(src[2*i:])) << 16)
		}
	case loader.F16:
		for i := range dst {
			dst[i] = half(binary.LittleEndian.Uint16(src[2*i:]))
		}
	default:
		return fmt.Errorf("its type is %v, want F32, BF16 or F16", d)
	}
	return nil
}

// half is the value of a float16 (IEEE 754 binary16).
func half(h uint16) float32 {
	sign, exp, frac := uint32(h>>15)<<31, uint32(h>>10&31), uint32(h&1023)
	switch {
	case exp == 31: // infinite, or not a number
		return math.Float32frombits(sign | 255<<23 | frac<<13)
	case exp > 0:
		return math.Float32frombits(sign | (exp+112)<<23 | frac<<13)
	case frac == 0:
		return math.Float32frombits(sign)
	}
	up := uint32(11 - bits.Len32(frac)) // places up to where a leading one stands
	return math.Float32frombits(sign | (113-up)<<23 | (frac<<up&1023)<<13)
}
