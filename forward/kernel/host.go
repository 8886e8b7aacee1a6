package kernel

import (
	"fmt"
	"math"
	"os"
	"runtime"
	"sync"

	"github.com/trainerrank/engine/device"
)

// Sizes of the blocks in which the host works. They bound the workspace and the time of one call of a primitive. No bit of a result
// depends on them.
const (
	blockK    = 320 // k of one primitive product at most: a widened panel of 40 KiB, which fits a first-level cache
	chunkRows = 240 // rows of one product at most: whole tiles of every kernel, and enough that widening a panel costs little
	keyBlock  = 64  // keys per step of attention. Part of the definition of its result: changing it changes bits
)

// Host is the backend that computes on the CPU.
type Host struct {
	p      *prims
	pool   *pool
	attend sync.Pool // of *attention
	log    string
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
	return &Host{p: p, pool: newPool(threads), attend: sync.Pool{New: func() any { return new(attention) }}, log: log}
}

// Name is the implementation in use: "generic", "avx2" or "avx512".
func (h *Host) Name() string { return h.p.name }

// Log says why an implementation was passed over at the start, or is empty.
func (h *Host) Log() string { return h.log }

// Threads is the number of workers.
func (h *Host) Threads() int { return h.pool.n }

// Close ends the worker threads.
func (h *Host) Close() { h.pool.close() }

// Do runs fn on worker 0.
func (h *Host) Do(fn func() error) (err error) {
	h.pool.do(func() { err = fn() })
	return err
}

// row is row i of m.
func (m Mat) row(i int) []float32 { return m.Mem.F32()[i*m.Stride:][:m.Cols] }

// Each shares a loop among the workers.
func (h *Host) Each(n int, fn func(worker, i int)) { h.pool.each(n, fn) }

// WorkBytes is the size in bytes of the workspace of operations, for heads of headDim elements: a widened panel and two tiles for
// products, or queries and outputs of some tiles and the scores of one for attention, whichever is larger.
func WorkBytes(headDim int) int64 {
	product := blockK*Width + 2*chunkRows*Width
	attention := 2*tileGroup*headDim*Width + keyBlock*Width
	return device.RoundAlign(int64(max(product, attention)) * 4)
}

// RopeTable implements [Backend].
func (h *Host) RopeTable(cos, sin Mat, first int, invFreq []float64) {
	for r := range cos.Rows {
		c, s := cos.row(r), sin.row(r)
		for i, f := range invFreq {
			sn, cs := math.Sincos(float64(first+r) * f)
			c[i], s[i] = float32(cs), float32(sn)
		}
	}
}

// Embed implements [Backend].
func (h *Host) Embed(dst Mat, w *Weight, tokens []int32, scale float32) {
	for i, t := range tokens {
		row := dst.row(i)
		w.Row(row, int(t))
		if scale != 1 {
			for j := range row {
				row[j] *= scale
			}
		}
	}
}

// Norm implements [Backend].
func (h *Host) Norm(dst, src Mat, w device.Mem, offset float32, eps float64) {
	g := w.F32()
	n := len(g)
	for i := range src.Rows {
		from, to := src.row(i), dst.row(i)
		for at := 0; at < src.Cols; at += n {
			x := from[at : at+n]
			r := 1 / math.Sqrt(float64(h.p.sumSquares(x))/float64(n)+eps)
			h.p.scaleNorm(to[at:at+n], x, g, float32(r), offset)
		}
	}
}

// Rope implements [Backend].
func (h *Host) Rope(x Mat, headDim int, positions []int32, cos, sin Mat) {
	for i, p := range positions {
		c, s, row := cos.row(int(p)), sin.row(int(p)), x.row(i)
		for at := 0; at < len(row); at += headDim {
			h.p.rope(row[at:at+headDim], c, s)
		}
	}
}

// Add implements [Backend].
func (h *Host) Add(dst, src Mat) {
	for i := range dst.Rows {
		h.p.add(dst.row(i), src.row(i))
	}
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
