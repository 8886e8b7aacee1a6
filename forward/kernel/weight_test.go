package kernel

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/trainerrank/engine/device"
)

var dtypes = []DType{F32, BF16, F16}

func TestWeightBytesAreWholePanels(t *testing.T) {
	for _, d := range dtypes {
		for _, s := range [][2]int{{1, 1}, {31, 7}, {32, 7}, {33, 7}, {64, 320}, {49152, 576}} {
			want := int64(d.Size()) * int64((s[0]+31)/32*32) * int64(s[1])
			if got := WeightBytes(d, s[0], s[1]); got != want {
				t.Errorf("WeightBytes(%s, %d, %d) = %d instead of %d", d, s[0], s[1], got, want)
			}
		}
	}
	if got := WeightBytes(BF16, 1<<18, 1<<14); got != 1<<33 {
		t.Errorf("a matrix of 8 GiB takes %d bytes", got)
	}
	if got := fmt.Sprint(F32, BF16, F16); got != "f32 bf16 f16" {
		t.Errorf("the types print as %q", got)
	}
}

func TestPackRowsKeepsEveryValue(t *testing.T) {
	eachHost(t, func(t *testing.T, h *Host) {
		eachTrial(t, 30, func(x *trial) {
			d, out, in := among(x.r, dtypes...), 1+x.r.IntN(130), among(x.r, 1, 2, 3, 4, 7, 8, 9, 63, 64, 1+x.r.IntN(400))
			x.what = fmt.Sprintf("%s [%d, %d]", d, out, in)
			w, want := x.weight(h, d, out, in)
			row := x.mat("row", 1, in)
			for i := range want {
				w.Row(row.row(0), i)
				for j, v := range want[i] {
					if got := float64(row.row(0)[j]); got != v {
						x.errorf("Row: (%d, %d) is %v instead of %v", i, j, got, v)
					}
					if got := float64(w.at(i, j)); got != v {
						x.errorf("at: (%d, %d) is %v instead of %v", i, j, got, v)
					}
				}
			}
			// The rows that fill up the last panel must be zero: products run over them.
			wide := *w
			wide.Out = panels(out) * Width
			for i := out; i < wide.Out; i++ {
				for j := range in {
					if v := wide.at(i, j); math.Float32bits(v) != 0 {
						x.errorf("row %d of %d, which fills the panel up, holds %v at %d", i, out, v, j)
					}
				}
			}
		})
	})
}

func TestPackRowsFindsEachValueThatIsNotFinite(t *testing.T) {
	odd := map[DType][]uint32{
		F32:  {0x7f800000, 0xff800000, 0x7fc00000, 0x7f800001, 0xffffffff},
		BF16: {0x7f80, 0xff80, 0x7fc0, 0x7f81, 0xffff},
		F16:  {0x7c00, 0xfc00, 0x7e00, 0x7c01, 0xffff},
	}
	largest := map[DType]uint32{F32: 0xff7fffff, BF16: 0xff7f, F16: 0xfbff}
	eachHost(t, func(t *testing.T, h *Host) {
		if h.Threads() > 1 {
			t.Skip("packing does not use the workers")
		}
		eachTrial(t, 60, func(x *trial) {
			d, out, in := among(x.r, dtypes...), 1+x.r.IntN(40), 1+x.r.IntN(40)
			x.what = fmt.Sprintf("%s [%d, %d]", d, out, in)
			raw := x.mem("raw", int64(out*in*d.Size())).Raw()
			put := func(at int, bits uint32) {
				if d == F32 {
					binary.LittleEndian.PutUint32(raw[at*4:], bits)
				} else {
					binary.LittleEndian.PutUint16(raw[at*2:], uint16(bits))
				}
			}
			for i := range out * in {
				put(i, largest[d])
			}
			w := &Weight{Mem: x.mem("weight", WeightBytes(d, out, in)), DType: d, Out: out, In: in}
			if bad, err := h.PackRows(w, 0, raw); bad || err != nil {
				x.errorf("all values are finite, yet: %t, %v", bad, err)
			}
			at, bits := x.r.IntN(out*in), among(x.r, odd[d]...)
			put(at, bits)
			if bad, err := h.PackRows(w, 0, raw); !bad || err != nil {
				x.errorf("value %d is %#x: not found (%v)", at, bits, err)
			}
		})
	})
}

func TestPackRowsRefusesWhatIsNotWholePanels(t *testing.T) {
	h := newHost(&generic, 1, "")
	defer h.Close()
	const in = 6
	for _, d := range dtypes {
		for _, c := range []struct {
			out, from, bytes int
			ok               bool
		}{
			{100, 0, 100 * in, true}, {100, 32, 68 * in, true}, {100, 96, 4 * in, true}, {100, 32, 64 * in, true}, {100, 64, 0, true},
			{100, 1, 32 * in, false},     // does not begin with a panel
			{100, 0, 33 * in, false},     // ends inside a panel that is not the last
			{100, 96, 3 * in, false},     // misses the last row
			{100, 96, 5 * in, false},     // more rows than there are
			{100, 128, 32 * in, false},   // begins behind the last
			{100, 0, 32*in + 1, false},   // a part of a row
			{100, -32, 32 * in, false},   // before the first
			{100, -32, 132 * in, false},  // before the first, up to the last
			{32, 0, 64 * in, false},      // a panel too many
			{32, 0, 32*in - in/2, false}, // half a row is missing
		} {
			w := &Weight{Mem: device.MemOf(make([]byte, WeightBytes(d, c.out, in))), DType: d, Out: c.out, In: in}
			var err error
			if p := panicOf(func() { _, err = h.PackRows(w, c.from, make([]byte, c.bytes*d.Size())) }); p != nil || (err == nil) != c.ok {
				t.Errorf("%s [%d, %d]: rows from %d on, %d values: error %v, panic %v", d, c.out, in, c.from, c.bytes, err, p)
			}
		}
	}
}

// Loaders pack from several goroutines: panels do not overlap, so the race detector must have nothing to say.
func TestPackRowsFromSeveralGoroutines(t *testing.T) {
	eachHost(t, func(t *testing.T, h *Host) {
		const out, in = 3*Width + 5, 24
		x := &trial{t: t, r: rand.New(rand.NewPCG(1, 2)), what: "four goroutines"}
		raw := x.mem("raw", out*in*2).Raw()
		want := make([]float64, out*in)
		for i := range want {
			want[i] = stored(x.r, BF16, raw[i*2:])
		}
		w := &Weight{Mem: x.mem("weight", WeightBytes(BF16, out, in)), DType: BF16, Out: out, In: in}
		errs := make(chan error)
		for from := 0; from < out; from += Width {
			go func() {
				_, err := h.PackRows(w, from, raw[from*in*2:min(from+Width, out)*in*2])
				errs <- err
			}()
		}
		for range panels(out) {
			if err := <-errs; err != nil {
				t.Error(err)
			}
		}
		for i, v := range want {
			if got := float64(w.at(i/in, i%in)); got != v {
				t.Fatalf("(%d, %d) is %v instead of %v", i/in, i%in, got, v)
			}
		}
		x.checkGuards()
	})
}

func TestWidenIsWhatIsStored(t *testing.T) {
	eachHost(t, func(t *testing.T, h *Host) {
		eachTrial(t, 30, func(x *trial) {
			d, n := among(x.r, dtypes...), x.r.IntN(200)
			x.what = fmt.Sprintf("%d values of %s", n, d)
			raw, dst := x.mem("raw", int64(n*d.Size())), x.mem("dst", int64(n)*4)
			want := make([]float64, n)
			for i := range want {
				want[i] = stored(x.r, d, raw.Raw()[i*d.Size():])
			}
			h.Widen(dst.F32(), raw.Raw(), d)
			for i, v := range want {
				if got := float64(dst.F32()[i]); got != v {
					x.errorf("value %d is %v instead of %v", i, got, v)
				}
			}
		})
	})
}

// at is the float32 value (row, col) of w.
func (w *Weight) at(row, col int) float32 {
	i := (row/Width*w.In+col)*Width + row%Width
	switch w.DType {
	case BF16:
		var v [1]float32
		widenBF16Generic(v[:], w.Mem.U16()[i:i+1])
		return v[0]
	case F16:
		return widenF16(w.Mem.U16()[i])
	}
	return w.Mem.F32()[i]
}
