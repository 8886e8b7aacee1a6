// Package kernel is the arithmetic of a forward: a small [Backend] interface, and the host's implementation of it.
//
// Matrices are row-major float32 ([Mat]); frozen weights are packed once ([Weight]) and stay in the type in which
// they are stored. [Host] runs on a pool of worker threads with the vector extension that [NewHost] chose; [Rehearsal]
// does nothing, so that the code which calls a backend can be run to see what memory it would ask for.
//
// # Bits
//
// A plan may change how many rows run together, where a row lies, which rows are its neighbours, how many
// threads there are, and how a request's keys are spread over segments. None of it changes a bit of the result: each
// output element is one chain of fused multiply-adds in a fixed order, attention visits keys in blocks aligned to the
// absolute position in the request, and reductions over a row have a fixed shape.
//
// # Memory
//
// No operation allocates device memory. What an operation needs beside its operands it is given as a [device.Mem]:
// [WorkBytes] and [HeadBytes] say how much.
package kernel

import "github.com/trainerrank/engine/device"

// Mat is a row-major float32 matrix in device memory. Element (i, j) is at index i*Stride+j. What lies between the rows is not part of
// the matrix: no operation reads or writes it, and the memory may end with the last element.
type Mat struct {
	Mem                device.Mem
	Rows, Cols, Stride int
}

// Stride is the row stride, in elements, that matrices with this many columns should have: whole cache lines, an odd number
// of them, so that the rows of a tile do not compete for the same cache sets.
func Stride(cols int) int { return ((cols+15)/16 | 1) * 16 }

// MatBytes is the size in bytes of a matrix with the stride that [Stride] recommends.
func MatBytes(rows, cols int) int64 { return int64(rows) * int64(Stride(cols)) * 4 }

// NewMat is the matrix in m, with the stride that [Stride] recommends.
func NewMat(m device.Mem, rows, cols int) Mat { return Mat{m, rows, cols, Stride(cols)} }

// RowRange is the matrix of rows [from, to) of m.
func (m Mat) RowRange(from, to int) Mat {
	at := int64(from) * int64(m.Stride) * 4
	return Mat{m.Mem.Slice(at, m.Mem.Bytes()-at), to - from, m.Cols, m.Stride}
}

// ColRange is the matrix of columns [from, to) of m.
func (m Mat) ColRange(from, to int) Mat {
	at := int64(from) * 4
	return Mat{m.Mem.Slice(at, m.Mem.Bytes()-at), m.Rows, to - from, m.Stride}
}

// Span is a run of packed rows: the positions [Start, End) of a request, stored from packed row Offset on. Before
// them in the request come the positions of Parent, another span, or nothing if Parent is -1.
type Span struct {
	Parent, Start, End, Offset int
}

// Attention is the shape of an attention layer. Query head h reads key head h/(Heads/KVHeads).
type Attention struct {
	Heads, KVHeads, HeadDim int
	Window                  int     // keys seen from a position, itself included; 0: all
	Scale                   float32 // factor on the scores
}

// Activation is the function on the gate of a gated MLP.
type Activation uint8

// The activations.
const (
	SiLU     Activation = iota // x / (1 + exp(-x))
	GELUTanh                   // 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))
)

// Ask is one value, or row of values, wanted of the head for row Row of the matrix that it is given.
type Ask struct {
	Row  int32
	Kind AskKind
	Arg  int32      // AskTarget: the label; AskTopK: k
	Out  device.Mem // AskTarget: 4 bytes, the logprob of the label; AskTopK: k*4 bytes, the logprobs, descending; AskLogits: vocab*4 bytes
	IDs  device.Mem // AskTopK: k*4 bytes, the tokens (int32); of equal logprobs the lower token comes first
}

// AskKind says what an [Ask] wants.
type AskKind uint8

// The kinds of asks.
const (
	AskTarget AskKind = iota
	AskTopK
	AskLogits
	AskLogZ // Out: 8 bytes, the log of the sum of exponentials of all logits, float64: what HeadGrad needs
)

// Backend is the work of a forward. [Backend.Do] runs a function on the backend, and that function shares loops among the workers with
// [Backend.Each]. The other methods are operations: each runs on the goroutine that calls it, which is that of Do or of a
// worker in Each. What an operation needs beside its operands it is given as work, of [WorkBytes] bytes, which no other
// operation may use at the same time. Matrices must not overlap unless said so.
type Backend interface {
	// Name says which implementation runs: "generic", "avx2", "avx512", "rehearsal".
	Name() string
	// Threads is the number of workers.
	Threads() int
	// Do runs fn and returns its error. Calls from several goroutines run one after another. What fn, or a loop that it shares, does to its goroutine,
	// a panic or [runtime.Goexit], happens to the caller's, after the loop has ended on all workers; the backend stays usable.
	Do(fn func() error) error
	// Each calls fn(worker, i) for every i < n, on all workers, and returns when all calls have returned. Indices are taken in ascending
	// order. It is called from the function of Do.
	Each(n int, fn func(worker, i int))
	// RopeTable fills row i of cos and sin with the cosine and sine of (first+i)*invFreq[j], computed in float64.
	RopeTable(cos, sin Mat, first int, invFreq []float64)
	// Embed is dst[i] = scale * row tokens[i] of w.
	Embed(dst Mat, w *Weight, tokens []int32, scale float32)
	// Norm is the root mean square norm: x / sqrt(mean(x^2) + eps) * (offset + w) for every run x of as many elements as w has; the
	// columns of src are a multiple of that (one run: a row; several: its heads). dst may be src.
	Norm(dst, src Mat, w device.Mem, offset float32, eps float64)
	// Linear is dst = src * w^T + bias, or dst += it if add. bias is float32 [out], or empty.
	Linear(work device.Mem, dst, src Mat, w *Weight, bias device.Mem, add bool)
	// GatedMLP is dst = act(src * gate^T + gateBias) * (src * up^T + upBias). The biases may be empty.
	GatedMLP(work device.Mem, dst, src Mat, gate, up *Weight, gateBias, upBias device.Mem, act Activation)
	// Rope rotates the heads of each row of x, cols/headDim of them, by the angles of row positions[i] of cos and sin.
	Rope(x Mat, headDim int, positions []int32, cos, sin Mat)
	// Attend computes attention for the packed rows from first on: row i of q is packed row first+i. k and v hold all packed rows up to
	// the last of them. spans are in the order of their rows, in preorder: each is followed by those that descend from it. dst has the shape of q. If stats
	// has rows, it has those of q and 2*Heads columns: column h receives the largest scaled score of head h, column Heads+h the inverse of the sum of weights
	// relative to it.
	Attend(work device.Mem, dst, stats, q, k, v Mat, first int, spans []Span, a Attention)
	// Add is dst += src.
	Add(dst, src Mat)
	// CopyRows is dst[i] = src[rows[i]].
	CopyRows(dst, src Mat, rows []int32)
	// Store copies the rows of src to dst without gaps between them: the layout of a caller's tensor.
	Store(dst device.Mem, src Mat)
	// Zero clears dst.
	Zero(dst device.Mem)
	// Head answers asks, which are sorted by row, about the log-softmax of h * w^T. scratch has [HeadBytes] bytes for the rows of h and
	// the largest k asked for.
	Head(work, scratch device.Mem, h Mat, w *Weight, asks []Ask)
	// Close ends the workers. The backend must not be used after it.
	Close()

	Gradients
}

// Rehearsal is a backend that does nothing, standing in for one with a number of threads.
type Rehearsal int

// Name is "rehearsal".
func (Rehearsal) Name() string { return "rehearsal" }

// Threads is the number of workers of the backend that it stands in for.
func (r Rehearsal) Threads() int { return int(r) }

// Do runs fn.
func (Rehearsal) Do(fn func() error) error { return fn() }

// Each does nothing: what a worker takes must have been taken before.
func (Rehearsal) Each(int, func(worker, i int)) {}

// RopeTable does nothing; nor do the other operations.
func (Rehearsal) RopeTable(Mat, Mat, int, []float64) {}

// Embed does nothing.
func (Rehearsal) Embed(Mat, *Weight, []int32, float32) {}

// Norm does nothing.
func (Rehearsal) Norm(Mat, Mat, device.Mem, float32, float64) {}

// Linear does nothing.
func (Rehearsal) Linear(device.Mem, Mat, Mat, *Weight, device.Mem, bool) {}

// GatedMLP does nothing.
func (Rehearsal) GatedMLP(device.Mem, Mat, Mat, *Weight, *Weight, device.Mem, device.Mem, Activation) {
}

// Rope does nothing.
func (Rehearsal) Rope(Mat, int, []int32, Mat, Mat) {}

// Attend does nothing.
func (Rehearsal) Attend(device.Mem, Mat, Mat, Mat, Mat, Mat, int, []Span, Attention) {}

// Add does nothing.
func (Rehearsal) Add(Mat, Mat) {}

// CopyRows does nothing.
func (Rehearsal) CopyRows(Mat, Mat, []int32) {}

// Store does nothing.
func (Rehearsal) Store(device.Mem, Mat) {}

// Zero does nothing.
func (Rehearsal) Zero(device.Mem) {}

// Head does nothing.
func (Rehearsal) Head(device.Mem, device.Mem, Mat, *Weight, []Ask) {}

// Close does nothing.
func (Rehearsal) Close() {}
