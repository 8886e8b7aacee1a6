package kernel

import (
	"fmt"
	"math"
	"os"
	"runtime"

	"github.com/trainerrank/engine/device"
)

// Sizes of the blocks in which the host works. They bound the workspace and the time of one call of a primitive. No bit of a result
// depends on them.
const (
	blockK    = 320 // k of one primitive product at most: a widened panel of 40 KiB, which fits a first-level cache
	chunkRows = 240 // rows of one task at most: whole tiles of every kernel, and enough that widening a panel costs little
	keyBlock  = 64  // keys per step of attention. Part of the definition of its result: changing it changes bits
)

// Host is the backend that computes on the CPU.
type Host struct {
	p     *prims
	pool  *pool
	lanes []laneState // one per worker
	log   string
}

// NewHost starts a backend with a number of worker threads; 0 means one for every CPU that the process may use. The environment variable
// TRAINERRANK_KERNEL forces an implementation ("generic", "avx2", "avx512"); otherwise the best one that the CPU has and
// that agrees with the generic one in a self-test is used.
func NewHost(threads int) (*Host, error) {
	p, log, err := choose(os.Getenv("TRAINERRANK_KERNEL"))
	if err != nil {
		return nil, err
	}
	if threads < 0 {
		return nil, fmt.Errorf("start host backend: %d threads", threads)
	}
	if threads == 0 {
		threads = DefaultThreads()
	}
	return newHost(p, threads, log), nil
}

// DefaultThreads is the number of workers that NewHost(0) starts: the CPUs that the process may use, in the scheduler's and
// in the runtime's view.
func DefaultThreads() int {
	n := runtime.GOMAXPROCS(0)
	if c := len(allowedCPUs()); c > 0 {
		n = min(n, c)
	}
	return n
}

func newHost(p *prims, threads int, log string) *Host {
	return &Host{p: p, pool: newPool(threads), lanes: make([]laneState, threads), log: log}
}

// Name is the implementation in use: "generic", "avx2" or "avx512".
func (h *Host) Name() string { return h.p.name }

// Log says why an implementation was passed over at the start, or is empty.
func (h *Host) Log() string { return h.log }

// Threads is the number of workers.
func (h *Host) Threads() int { return h.pool.n }

// Close ends the worker threads.
func (h *Host) Close() { h.pool.close() }

// Do runs fn on worker 0 while the others stand by.
func (h *Host) Do(fn func() error) (err error) {
	h.pool.do(func() { err = fn() })
	return err
}

// row is row i of m.
func (m Mat) row(i int) []float32 { return m.Mem.F32()[i*m.Stride:][:m.Cols] }

// WorkBytes is the size of the workspace, in bytes, for a number of threads and heads of headDim elements.
func WorkBytes(threads, headDim int) int64 { return int64(threads) * workerBytes(headDim) }

// workerBytes is one worker's part: a widened panel and two tiles for products, or the lanes of queries, outputs and scores
// for attention, whichever is larger.
func workerBytes(headDim int) int64 {
	product := blockK*Width + 2*chunkRows*Width
	attention := 2*headDim*Width + keyBlock*Width
	return device.RoundAlign(int64(max(product, attention)) * 4)
}

// space is worker w's part of the workspace.
func (h *Host) space(work device.Mem, w int) []float32 {
	each := work.Bytes() / int64(h.pool.n) &^ (device.Align - 1)
	return work.Slice(int64(w)*each, each).F32()
}

// cut divides n rows into chunks for tasks, when other is the number of tasks per chunk: few enough rows that every worker gets work,
// enough that the cost of a task is paid back. It returns the rows per chunk and the number of chunks.
func (h *Host) cut(n, other, least int) (rows, chunks int) {
	rows = max(1, min(n, chunkRows))
	if want := 6 * h.pool.n; h.pool.n > 1 && other*((n+rows-1)/rows) < want {
		rows = max(least, min(rows, n*other/want))
	}
	if rows > 12 {
		rows -= rows % 12 // whole tiles of the widest kernel
	}
	return rows, (n + rows - 1) / rows
}

// eachRow calls fn for ranges of rows that cover [0, n).
func (h *Host) eachRow(n, least int, fn func(from, to int)) {
	rows, chunks := h.cut(n, 1, least)
	h.pool.each(chunks, func(_, i int) { fn(i*rows, min(n, (i+1)*rows)) })
}

// RopeTable implements [Backend].
func (h *Host) RopeTable(cos, sin Mat, invFreq []float64) {
	h.eachRow(cos.Rows, 16, func(from, to int) {
		for p := from; p < to; p++ {
			c, s := cos.row(p), sin.row(p)
			for i, f := range invFreq {
				sn, cs := math.Sincos(float64(p) * f)
				c[i], s[i] = float32(cs), float32(sn)
			}
		}
	})
}

// Embed implements [Backend].
func (h *Host) Embed(dst Mat, w *Weight, tokens []int32, scale float32) {
	h.eachRow(dst.Rows, 16, func(from, to int) {
		for i := from; i < to; i++ {
			w.Row(dst.row(i), int(tokens[i]))
			if scale != 1 {
				for j := range dst.row(i) {
					dst.row(i)[j] *= scale
				}
			}
		}
	})
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

// Norm implements [Backend].
func (h *Host) Norm(dst, src Mat, w device.Mem, offset float32, eps float64) {
	g := w.F32()
	n := len(g)
	h.eachRow(src.Rows, 16, func(from, to int) {
		for i := from; i < to; i++ {
			for at := 0; at < src.Cols; at += n {
				x := src.row(i)[at : at+n]
				r := 1 / math.Sqrt(float64(h.p.sumSquares(x))/float64(n)+eps)
				h.p.scaleNorm(dst.row(i)[at:at+n], x, g, float32(r), offset)
			}
		}
	})
}

// Rope implements [Backend].
func (h *Host) Rope(x Mat, headDim int, positions []int32, cos, sin Mat) {
	h.eachRow(x.Rows, 16, func(from, to int) {
		for i := from; i < to; i++ {
			c, s, row := cos.row(int(positions[i])), sin.row(int(positions[i])), x.row(i)
			for at := 0; at < len(row); at += headDim {
				h.p.rope(row[at:at+headDim], c, s)
			}
		}
	})
}

// Add implements [Backend].
func (h *Host) Add(dst, src Mat) {
	h.eachRow(dst.Rows, 16, func(from, to int) {
		for i := from; i < to; i++ {
			h.p.add(dst.row(i), src.row(i))
		}
	})
}

// CopyRows implements [Backend].
func (h *Host) CopyRows(dst, src Mat, rows []int32) {
	for i, r := range rows {
		copy(dst.row(i), src.row(int(r)))
	}
}

// Store implements [Backend].
func (h *Host) Store(dst device.Mem, src Mat) {
	out := dst.F32()
	for i := range src.Rows {
		copy(out[i*src.Cols:(i+1)*src.Cols], src.row(i))
	}
}

// Zero implements [Backend].
func (h *Host) Zero(dst device.Mem) { clear(dst.Raw()) }
