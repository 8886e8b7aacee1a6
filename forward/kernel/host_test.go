package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/trainerrank/engine/device"
)

// The operations are tested against references written plainly in float64, over every table that the machine has, on blocks of rows
// that 1, 2 and 3 workers share. All operands lie in memory that is surrounded by, and at first filled with, NaN of a pattern that no
// computation yields: reading what was not given shows up as NaN, writing beside a result as a broken pattern.

// unit is the unit roundoff of float32. A sum of k rounded products, added one by one, is off by at most about
// k*unit times the sum of their absolute values, fused or not; the tolerances below are such bounds, not guesses.
const unit = 1.0 / (1 << 24)

// eachHost runs fn as a subtest for each table and number of workers.
func eachHost(t *testing.T, fn func(t *testing.T, h *Host)) {
	for _, p := range available() {
		for threads := 1; threads <= 3; threads++ {
			t.Run(fmt.Sprintf("%s/threads=%d", p.name, threads), func(t *testing.T) {
				h := newHost(p, threads, "")
				defer h.Close()
				fn(t, h)
			})
		}
	}
}

// trial is one randomly drawn case: what was drawn, and the guarded memory that it uses.
type trial struct {
	t    testing.TB
	r    *rand.Rand
	seed uint64
	what string // the shapes, for messages
	bad  int    // failures reported so far
	mems []guarded

	backward bool // workspaces are for the operations of a backward
}

// eachTrial draws n cases, fewer in short mode and under the race detector, and checks the guards of each.
func eachTrial(t testing.TB, n int, fn func(x *trial)) {
	if testing.Short() || raceEnabled {
		n = (n + 3) / 4
	}
	for seed := range uint64(n) {
		x := &trial{t: t, r: rand.New(rand.NewPCG(seed, 0x7a11)), seed: seed}
		func() {
			defer func() {
				if p := recover(); p != nil {
					t.Errorf("seed %d, %s: panic: %v\n%s", x.seed, x.what, p, debug.Stack())
				}
			}()
			fn(x)
			x.checkGuards()
		}()
		if t.Failed() {
			return // the first seed that fails tells enough
		}
	}
}

func (x *trial) errorf(format string, args ...any) {
	x.t.Helper()
	if x.bad++; x.bad <= 5 {
		x.t.Errorf("seed %d, %s: %s", x.seed, x.what, fmt.Sprintf(format, args...))
	}
}

// do runs operations in a session of h.
func (x *trial) do(h *Host, fn func()) {
	if err := h.Do(func() error { fn(); return nil }); err != nil {
		x.errorf("%v", err)
	}
}

// among draws one of the choices.
func among[T any](r *rand.Rand, choices ...T) T { return choices[r.IntN(len(choices))] }

// sentinel fills guarded memory. It is a NaN as float32, and each half of it as float16 and bfloat16.
const sentinel = 0xffc0ffee

// guarded is memory with sentinels around it and, for a matrix, between its rows.
type guarded struct {
	what               string
	all                []byte
	from, to           int // the bytes that may be touched
	rowBytes, colBytes int // if not 0: only the first colBytes of every rowBytes
}

// mem is guarded memory of exactly this size, aligned as an arena would.
func (x *trial) mem(what string, bytes int64) device.Mem { return x.memAt(what, bytes, 0, 0) }

func (x *trial) memAt(what string, bytes int64, rowBytes, colBytes int) device.Mem {
	const before, after = device.Align, 5 * device.Align
	raw := make([]byte, before+int(bytes)+after+2*device.Align)
	skip := -int(uintptr(unsafe.Pointer(&raw[0]))) & (device.Align - 1)
	raw = raw[skip : skip+before+int(bytes)+after]
	for i := range raw {
		raw[i] = sentinelByte(i)
	}
	x.mems = append(x.mems, guarded{what, raw, before, before + int(bytes), rowBytes, colBytes})
	return device.MemOf(raw[before : before+int(bytes) : before+int(bytes)])
}

func sentinelByte(i int) byte { return byte(uint32(sentinel) >> (8 * (i % 4))) }

func (x *trial) checkGuards() {
	for _, g := range x.mems {
		for i, b := range g.all {
			inside := i >= g.from && i < g.to && (g.rowBytes == 0 || (i-g.from)%g.rowBytes < g.colBytes)
			if !inside && b != sentinelByte(i) {
				x.errorf("%s: byte %d of %d was written (rows are %d bytes, %d of them used)", g.what, i-g.from, g.to-g.from, g.rowBytes, g.colBytes)
				break
			}
		}
	}
}

// mat is a guarded matrix of one of several strides, whose memory ends with its last element or with its last row.
func (x *trial) mat(what string, rows, cols int) Mat {
	stride := among(x.r, Stride(cols), Stride(cols), cols, cols+1+x.r.IntN(40))
	n := rows * stride
	if rows > 0 && x.r.IntN(2) == 0 {
		n -= stride - cols
	}
	return Mat{x.memAt(what, int64(n)*4, stride*4, cols*4), rows, cols, stride}
}

// normal is a guarded matrix of normal variates times scale.
func (x *trial) normal(what string, rows, cols int, scale float64) Mat {
	m := x.mat(what, rows, cols)
	for i := range rows {
		for j := range m.row(i) {
			m.row(i)[j] = float32(x.r.NormFloat64() * scale)
		}
	}
	return m
}

// copyOf is a guarded matrix with the elements of m.
func (x *trial) copyOf(m Mat) Mat {
	c := x.mat("copy", m.Rows, m.Cols)
	for i := range m.Rows {
		copy(c.row(i), m.row(i))
	}
	return c
}

// vector is a guarded vector of normal variates times scale.
func (x *trial) vector(what string, n int, scale float64) device.Mem {
	m := x.mem(what, int64(n)*4)
	for i := range m.F32() {
		m.F32()[i] = float32(x.r.NormFloat64() * scale)
	}
	return m
}

// maybeVector is a vector, or empty.
func (x *trial) maybeVector(what string, n int, scale float64) device.Mem {
	if x.r.IntN(2) == 0 {
		return device.Mem{}
	}
	return x.vector(what, n, scale)
}

// work is a workspace, not a byte larger than it must be.
func (x *trial) work(headDim int) device.Mem {
	if x.backward {
		return x.mem("work", GradWorkBytes(headDim))
	}
	return x.mem("work", WorkBytes(headDim))
}

// blocks cuts rows [0, n) at random places and lets the workers of h run op for each block, with a workspace of their own.
func (x *trial) blocks(h *Host, n, headDim int, op func(work device.Mem, from, to int)) {
	cuts := []int{0, n}
	for range x.r.IntN(6) {
		cuts = append(cuts, x.r.IntN(n+1))
	}
	slices.Sort(cuts)
	cuts = slices.Compact(cuts)
	works := make([]device.Mem, h.Threads())
	for i := range works {
		works[i] = x.work(headDim)
	}
	x.what += fmt.Sprintf(", blocks %v", cuts)
	x.do(h, func() {
		h.Each(len(cuts)-1, func(worker, i int) { op(works[worker], cuts[i], cuts[i+1]) })
	})
}

// whole runs op for all rows at once.
func (x *trial) whole(h *Host, n, headDim int, op func(work device.Mem, from, to int)) {
	work := x.work(headDim)
	x.do(h, func() { op(work, 0, n) })
}

// stored draws the bytes of a value of a type, as in a file, and says what it is: about normal, sometimes 0 or denormal.
func stored(r *rand.Rand, d DType, b []byte) float64 {
	switch d {
	case F16:
		h := uint16(r.Uint32())&0x83ff | uint16(8+r.IntN(8))<<10
		if r.IntN(50) == 0 {
			h &= 0x83ff // denormal
		}
		binary.LittleEndian.PutUint16(b, h)
		sign := 1 - 2*float64(h>>15)
		if h>>10&31 == 0 {
			return sign * math.Ldexp(float64(h&0x3ff), -24)
		}
		return sign * math.Ldexp(float64(h&0x3ff|0x400), int(h>>10&31)-25)
	case BF16:
		h := uint16(math.Float32bits(float32(r.NormFloat64())) >> 16)
		binary.LittleEndian.PutUint16(b, h)
		return float64(math.Float32frombits(uint32(h) << 16))
	}
	v := float32(r.NormFloat64())
	binary.LittleEndian.PutUint32(b, math.Float32bits(v))
	return float64(v)
}

// weight draws a matrix, packs it with h in pieces, and returns it with its values.
func (x *trial) weight(h *Host, d DType, out, in int) (*Weight, [][]float64) {
	n := out * in * d.Size()
	raw := x.mem("raw weight", int64(n)+3).Raw()[x.r.IntN(4):][:n] // a file need not align what it holds
	want := make([][]float64, out)
	for i := range want {
		want[i] = make([]float64, in)
		for j := range want[i] {
			want[i][j] = stored(x.r, d, raw[(i*in+j)*d.Size():])
		}
	}
	return x.pack(h, d, out, in, raw), want
}

func (x *trial) pack(h *Host, d DType, out, in int, raw []byte) *Weight {
	w := &Weight{Mem: x.mem("weight", WeightBytes(d, out, in)), DType: d, Out: out, In: in}
	for from := 0; from < out; {
		n := min(Width*(1+x.r.IntN(3)), out-from)
		bad, err := h.PackRows(w, from, raw[from*in*d.Size():][:n*in*d.Size()])
		if err != nil || bad {
			x.errorf("pack rows %d to %d: non-finite %t, %v", from, from+n, bad, err)
		}
		from += n
	}
	return w
}

// near compares a matrix with its reference: want and the tolerance for element (i, j).
func (x *trial) near(what string, got Mat, want func(i, j int) (v, tol float64)) {
	x.t.Helper()
	for i := range got.Rows {
		for j, g := range got.row(i) {
			if v, tol := want(i, j); !(math.Abs(float64(g)-v) <= tol) {
				x.errorf("%s (%d, %d) is %v instead of %v: off by %.3g, allowed %.3g", what, i, j, g, v, math.Abs(float64(g)-v), tol)
				return
			}
		}
	}
}

// same compares the bits of rows [from, from+want.Rows) of got with want.
func (x *trial) same(what string, got Mat, from int, want Mat) {
	x.t.Helper()
	for i := range want.Rows {
		g, w := got.row(from+i), want.row(i)
		for j := range w {
			if math.Float32bits(g[j]) != math.Float32bits(w[j]) {
				x.errorf("%s: row %d (%d of what is wanted), column %d is %v (%#x) instead of %v (%#x)", what, from+i, i, j, g[j], math.Float32bits(g[j]), w[j], math.Float32bits(w[j]))
				return
			}
		}
	}
}

// poison replaces a row by values that are not finite.
func poison(r *rand.Rand, row []float32) {
	for j := range row {
		row[j] = among(r, float32(math.NaN()), float32(math.Inf(1)), float32(math.Inf(-1)))
	}
}

// rows draws a number of rows, at most most: in and around whole tiles and blocks.
func (x *trial) rows(most int) int {
	return min(most, among(x.r, 1, 2, 3, 1+x.r.IntN(16), 11, 12, 13, 119, 121, 239, 241, 1+x.r.IntN(300)))
}

func TestRopeTableIsCosineAndSineOfTheFloat64Product(t *testing.T) {
	eachHost(t, func(t *testing.T, h *Host) {
		eachTrial(t, 8, func(x *trial) {
			n, half, first := x.rows(200), 1+x.r.IntN(40), among(x.r, 0, 1, 30000)
			x.what = fmt.Sprintf("%d positions from %d on, %d frequencies", n, first, half)
			freq := make([]float64, half)
			for i := range freq {
				freq[i] = math.Pow(10000, -float64(i)/float64(half))
			}
			cos, sin := x.mat("cos", n, half), x.mat("sin", n, half)
			x.blocks(h, n, 0, func(_ device.Mem, from, to int) {
				h.RopeTable(cos.RowRange(from, to), sin.RowRange(from, to), first+from, freq)
			})
			// Half a unit for the rounding, as the values are at most 1; the rest covers float64.
			x.near("cos", cos, func(i, j int) (float64, float64) { return math.Cos(float64(first+i) * freq[j]), 0.51 * unit })
			x.near("sin", sin, func(i, j int) (float64, float64) { return math.Sin(float64(first+i) * freq[j]), 0.51 * unit })
		})
	})
}

func TestEmbedIsTheRowTimesScaleRoundedOnce(t *testing.T) {
	eachHost(t, func(t *testing.T, h *Host) {
		eachTrial(t, 24, func(x *trial) {
			d, n, vocab, in := DType(x.r.IntN(3)), x.rows(200), 1+x.r.IntN(100), 1+x.r.IntN(90)
			scale := among(x.r, 1, 1, float32(math.Sqrt(float64(in))))
			x.what = fmt.Sprintf("%d tokens, %s [%d, %d], scale %v", n, d, vocab, in, scale)
			w, want := x.weight(h, d, vocab, in)
			tokens := make([]int32, n)
			for i := range tokens {
				tokens[i] = int32(x.r.IntN(vocab))
			}
			dst := x.mat("dst", n, in)
			x.blocks(h, n, 0, func(_ device.Mem, from, to int) { h.Embed(dst.RowRange(from, to), w, tokens[from:to], scale) })
			x.near("dst", dst, func(i, j int) (float64, float64) { return float64(float32(want[tokens[i]][j]) * scale), 0 })
		})
	})
}

func TestNormAgreesWithFloat64(t *testing.T) {
	eachHost(t, func(t *testing.T, h *Host) {
		eachTrial(t, 24, func(x *trial) {
			rows, n, heads := x.rows(300), among(x.r, 1, 7, 31, 32, 33, 64, 128, 576, 1+x.r.IntN(300)), among(x.r, 1, 1, 2, 5)
			offset, eps := among(x.r, float32(0), 1), among(x.r, 1e-5, 1e-6)
			scale := math.Exp2(float64(x.r.IntN(21) - 10))
			inPlace := x.r.IntN(2) == 0
			x.what = fmt.Sprintf("%d rows of %d runs of %d, offset %v, values about %v, in place %t", rows, heads, n, offset, scale, inPlace)
			src, w := x.normal("src", rows, n*heads, scale), x.vector("w", n, 1)
			was := x.copyOf(src)
			dst := src
			if !inPlace {
				dst = x.mat("dst", rows, n*heads)
			}
			x.blocks(h, rows, 0, func(_ device.Mem, from, to int) {
				h.Norm(dst.RowRange(from, to), src.RowRange(from, to), w, offset, eps)
			})
			inv := make([]float64, rows*heads)
			for i := range inv {
				var sum float64
				for _, v := range was.row(i / heads)[i%heads*n:][:n] {
					sum += float64(v) * float64(v)
				}
				inv[i] = 1 / math.Sqrt(sum/float64(n)+eps)
			}
			x.near("dst", dst, func(i, j int) (float64, float64) {
				v := float64(was.row(i)[j]) * inv[i*heads+j/n]
				g := float64(offset) + float64(w.F32()[j%n])
				// Half of the sum's roundings go into the root; then r, two products, and offset+w, which may cancel.
				rel := (float64(n)/Width + 8) * unit
				return v * g, math.Abs(v) * (rel*math.Abs(g) + unit*(1+math.Abs(g)))
			})
			if !inPlace {
				x.same("src is only read", src, 0, was)
			}
		})
	})
}

func TestRopeRotatesTheRotaryPartOfEachHead(t *testing.T) {
	eachHost(t, func(t *testing.T, h *Host) {
		eachTrial(t, 24, func(x *trial) {
			half := 1 + x.r.IntN(64)
			headDim, heads, n, table := 2*half+among(x.r, 0, 0, 1, 32), 1+x.r.IntN(4), x.rows(200), 1+x.r.IntN(50)
			x.what = fmt.Sprintf("%d rows, %d heads of %d, %d of it rotary", n, heads, headDim, 2*half)
			m, cos, sin := x.normal("x", n, heads*headDim, 1), x.normal("cos", table, half, 1), x.normal("sin", table, half, 1)
			positions := make([]int32, n)
			for i := range positions {
				positions[i] = int32(x.r.IntN(table))
			}
			was := x.copyOf(m)
			x.blocks(h, n, 0, func(_ device.Mem, from, to int) { h.Rope(m.RowRange(from, to), headDim, positions[from:to], cos, sin) })
			x.near("x", m, func(i, j int) (float64, float64) {
				head, d := was.row(i)[j/headDim*headDim:], j%headDim
				if d >= 2*half {
					return float64(head[d]), 0
				}
				c, s := float64(cos.row(int(positions[i]))[d%half]), float64(sin.row(int(positions[i]))[d%half])
				a, b := float64(head[d]), -float64(head[(d+half)%(2*half)])
				if d >= half {
					b = -b
				}
				return a*c + b*s, 2 * unit * (math.Abs(a*c) + math.Abs(b*s))
			})
		})
	})
}

func TestAddCopyRowsStoreAndZeroAreExact(t *testing.T) {
	eachHost(t, func(t *testing.T, h *Host) {
		eachTrial(t, 24, func(x *trial) {
			n, from, cols := x.rows(200), 1+x.r.IntN(100), 1+x.r.IntN(200)
			x.what = fmt.Sprintf("%d rows out of %d, %d columns", n, from, cols)
			src, a := x.normal("src", from, cols, 1), x.normal("a", n, cols, 1)
			rows := make([]int32, n)
			for i := range rows {
				rows[i] = int32(x.r.IntN(from))
			}
			copied, sum := x.mat("copied", n, cols), x.copyOf(a)
			out, zero := x.mem("stored", int64(n*cols)*4), x.vector("zero", cols, 1)
			x.blocks(h, n, 0, func(_ device.Mem, from, to int) {
				h.CopyRows(copied.RowRange(from, to), src, rows[from:to])
				h.Add(sum.RowRange(from, to), copied.RowRange(from, to))
				h.Store(out.Slice(int64(from*cols)*4, int64((to-from)*cols)*4), sum.RowRange(from, to))
			})
			x.do(h, func() { h.Zero(zero) })
			want := func(i, j int) float64 { return float64(a.row(i)[j] + src.row(int(rows[i]))[j]) }
			x.near("copied", copied, func(i, j int) (float64, float64) { return float64(src.row(int(rows[i]))[j]), 0 })
			x.near("sum", sum, func(i, j int) (float64, float64) { return want(i, j), 0 })
			x.near("stored", Mat{out, n, cols, cols}, func(i, j int) (float64, float64) { return want(i, j), 0 })
			x.near("zero", Mat{zero, 1, cols, cols}, func(int, int) (float64, float64) { return 0, 0 })
		})
	})
}

// The operations on rows do the same bits to a row whichever block it is part of, beside whichever neighbours.
func TestRowOperationsTreatEachRowAlone(t *testing.T) {
	eachHost(t, func(t *testing.T, h *Host) {
		eachTrial(t, 12, func(x *trial) {
			n, half, heads := x.rows(300), 1+x.r.IntN(40), 1+x.r.IntN(4)
			cols := 2 * half * heads
			x.what = fmt.Sprintf("%d rows, %d heads of %d", n, heads, 2*half)
			src, b := x.normal("src", n, cols, 1), x.normal("b", n, cols, 1)
			w, cos, sin := x.vector("w", 2*half, 1), x.normal("cos", n, half, 1), x.normal("sin", n, half, 1)
			positions := make([]int32, n)
			for i := range positions {
				positions[i] = int32(x.r.IntN(n))
			}
			run := func(plan func(*Host, int, int, func(device.Mem, int, int)), src Mat) Mat {
				dst := x.mat("dst", n, cols)
				plan(h, n, 0, func(_ device.Mem, from, to int) {
					part := dst.RowRange(from, to)
					h.Norm(part, src.RowRange(from, to), w, 1, 1e-6)
					h.Rope(part, 2*half, positions[from:to], cos, sin)
					h.Add(part, b.RowRange(from, to))
				})
				return dst
			}
			want := run(x.whole, src)
			x.same("in blocks", run(x.blocks, src), 0, want)
			ill := x.r.IntN(n)
			sick := x.copyOf(src)
			poison(x.r, sick.row(ill))
			got := run(x.blocks, sick)
			x.same("rows before one that is not finite", want, 0, got.RowRange(0, ill))
			if ill+1 < n {
				x.same("rows after one that is not finite", want, ill+1, got.RowRange(ill+1, n))
			}
		})
	})
}

func TestOperationsOnNoRowsDoNothing(t *testing.T) {
	eachHost(t, func(t *testing.T, h *Host) {
		x := &trial{t: t, r: rand.New(rand.NewPCG(1, 1)), what: "no rows"}
		w, _ := x.weight(h, F32, 40, 24)
		m := func(cols int) Mat { return x.mat("none", 0, cols) }
		work, gain := x.work(8), x.vector("gain", 24, 1)
		x.do(h, func() {
			h.Each(0, func(int, int) { t.Error("a loop of none runs") })
			h.RopeTable(m(4), m(4), 0, make([]float64, 4))
			h.Embed(m(24), w, nil, 2)
			h.Norm(m(24), m(24), gain, 0, 1e-6)
			h.Linear(work, m(40), m(24), w, device.Mem{}, true)
			h.GatedMLP(work, m(40), m(24), w, w, device.Mem{}, device.Mem{}, SiLU)
			h.Rope(m(24), 8, nil, m(4), m(4))
			h.Attend(work, m(24), Mat{}, m(24), m(8), m(8), 0, nil, Attention{Heads: 3, KVHeads: 1, HeadDim: 8, Scale: 1})
			h.Add(m(24), m(24))
			h.CopyRows(m(24), m(24), nil)
			h.Store(device.Mem{}, m(24))
			h.Zero(device.Mem{})
			h.Head(work, x.mem("scratch", HeadBytes(0, 0)), m(24), w, nil)

			work, scratch := x.mem("work", GradWorkBytes(8)), x.mem("scratch", HeadGradBytes(0))
			a := Attention{Heads: 3, KVHeads: 1, HeadDim: 8, Scale: 1}
			h.Scale(m(24), 2)
			h.Activate(m(24), m(24), m(24), SiLU)
			h.ActivateGrad(m(24), m(24), m(24), m(24), m(24), m(24), GELUTanh)
			h.LinearGrad(work, m(24), m(40), w, true)
			h.NormGrad(m(24), m(24), m(24), gain, 0, 1e-6)
			h.RowDot(m(3), m(24), m(24), 8)
			h.AttendQueryGrad(work, m(24), m(24), m(8), m(8), m(24), m(6), m(3), 0, nil, a)
			h.AttendKeyGrad(work, m(8), m(8), m(24), m(8), m(8), m(24), m(6), m(3), 0, nil, a)
			h.HeadGrad(work, scratch, m(24), m(24), w, nil, nil)
			h.HeadWeightGrad(work, scratch, w, 0, m(24), w, nil, nil, true)
			h.EmbedGrad(w, m(24), nil, 1, 0, 24)
			h.Clear(m(24))
			h.Copy(m(24), m(24))
			h.PlaceRows(m(24), m(24), nil)
			// Sums over no rows are zero, unless they are added to something.
			outer, sum, dw := x.normal("outer", 40, 24, 1), x.vector("sum", 24, 1), x.vector("dw", 24, 1)
			was := x.copyOf(outer)
			h.Outer(work, outer, m(40), m(24), true)
			x.same("nothing added", outer, 0, was)
			h.Outer(work, outer, m(40), m(24), false)
			h.SumRows(sum, m(24))
			h.NormWeightGrad(dw, m(24), m(24), 1e-6)
			for _, got := range []Mat{outer, {sum, 1, 24, 24}, {dw, 1, 24, 24}} {
				x.near("a sum of nothing", got, func(int, int) (float64, float64) { return 0, 0 })
			}
		})
		x.checkGuards()
	})
}

func TestSizesOfMatrices(t *testing.T) {
	for cols := 1; cols < 3000; cols++ {
		s := Stride(cols)
		if s < cols || s%16 != 0 || s/16%2 != 1 || s >= cols+32 {
			t.Fatalf("Stride(%d) = %d: not the fewest whole cache lines, an odd number of them", cols, s)
		}
		if got, want := MatBytes(7, cols), int64(7*s*4); got != want {
			t.Fatalf("MatBytes(7, %d) = %d instead of %d", cols, got, want)
		}
	}
	m := NewMat(device.MemOf(make([]byte, MatBytes(5, 3))), 5, 3)
	for i := range m.Mem.F32() {
		m.Mem.F32()[i] = float32(i)
	}
	r := m.RowRange(2, 4)
	if r.Rows != 2 || r.Cols != 3 || r.row(1)[2] != m.row(3)[2] {
		t.Errorf("RowRange(2, 4) of 5 rows: %d rows of %d columns, its row 1 is %v instead of %v", r.Rows, r.Cols, r.row(1), m.row(3))
	}
}

func TestNewHost(t *testing.T) {
	if h, err := NewHost(-1); err == nil {
		h.Close()
		t.Error("NewHost(-1) is not refused")
	}
	t.Setenv("TRAINERRANK_KERNEL", "abacus")
	if h, err := NewHost(1); err == nil || !strings.Contains(err.Error(), "abacus") {
		if err == nil {
			h.Close()
		}
		t.Errorf("NewHost with an unknown kernel: %v", err)
	}
	for _, p := range available() {
		t.Setenv("TRAINERRANK_KERNEL", p.name)
		h, err := NewHost(0)
		if err != nil {
			t.Fatal(err)
		}
		if h.Name() != p.name || h.Threads() != DefaultThreads() || h.Threads() < 1 {
			t.Errorf("forced to %s, NewHost(0) runs %s on %d threads instead of %d", p.name, h.Name(), h.Threads(), DefaultThreads())
		}
		failure := errors.New("failure")
		if err := h.Do(func() error { return failure }); err != failure {
			t.Errorf("Do returns %v instead of the error of its function", err)
		}
		h.Close()
	}
}

var (
	_ Backend = (*Host)(nil)
	_ Backend = Rehearsal(0)
)

// A rehearsal is given memory without addresses, so whatever looks inside would fail.
func TestRehearsalDoesNothing(t *testing.T) {
	var b Backend = Rehearsal(3)
	if b.Name() != "rehearsal" || b.Threads() != 3 {
		t.Errorf("rehearsal for 3 threads is %q with %d", b.Name(), b.Threads())
	}
	c := device.NewCounter()
	mem := c.Scratch(1 << 20)
	m, w := NewMat(mem, 4, 8), &Weight{Mem: mem, DType: BF16, Out: 8, In: 8}
	failure := errors.New("failure")
	err := b.Do(func() error {
		b.Each(2, func(int, int) { t.Error("a rehearsal runs a loop") })
		b.RopeTable(m, m, 0, make([]float64, 8))
		b.Embed(m, w, make([]int32, 4), 2)
		b.Norm(m, m, mem, 0, 1e-6)
		b.Linear(mem, m, m, w, mem, true)
		b.GatedMLP(mem, m, m, w, w, mem, mem, GELUTanh)
		b.Rope(m, 8, make([]int32, 4), m, m)
		b.Attend(mem, m, m, m, m, m, 0, []Span{{Parent: -1, End: 4}}, Attention{Heads: 1, KVHeads: 1, HeadDim: 8})
		b.Add(m, m)
		b.CopyRows(m, m, make([]int32, 4))
		b.Store(mem, m)
		b.Zero(mem)
		b.Head(mem, mem, m, w, []Ask{{Out: mem}})
		a, spans := Attention{Heads: 1, KVHeads: 1, HeadDim: 8}, []Span{{Parent: -1, End: 4}}
		b.Pack(w, mem, true)
		b.Scale(m, 2)
		b.Activate(m, m, m, SiLU)
		b.ActivateGrad(m, m, m, m, m, m, SiLU)
		b.LinearGrad(mem, m, m, w, true)
		b.Outer(mem, m, m, m, true)
		b.NormGrad(m, m, m, mem, 0, 1e-6)
		b.NormWeightGrad(mem, m, m, 1e-6)
		b.RowDot(m, m, m, 8)
		b.AttendQueryGrad(mem, m, m, m, m, m, m, m, 0, spans, a)
		b.AttendKeyGrad(mem, m, m, m, m, m, m, m, m, 0, spans, a)
		b.HeadGrad(mem, mem, m, m, w, make([]float64, 4), []AskGrad{{Factor: 1}})
		b.HeadWeightGrad(mem, mem, w, 0, m, w, make([]float64, 4), []AskGrad{{Factor: 1}}, true)
		b.EmbedGrad(w, m, make([]int32, 4), 1, 0, 8)
		b.Clear(m)
		b.Copy(m, m)
		b.PlaceRows(m, m, make([]int32, 4))
		b.AddRow(m, 0, make([]float32, 8))
		b.SumRows(mem, m)
		b.Close()
		return failure
	})
	if err != failure {
		t.Errorf("Do returns %v instead of the error of its function", err)
	}
	if err := b.Do(func() error { return nil }); err != nil {
		t.Errorf("Do: %v", err)
	}
}
