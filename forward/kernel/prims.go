package kernel

// Width is the number of columns of a packed weight panel and the number of lanes of an attention tile. It is the same
// for every implementation, so that packed weights and tiles look alike everywhere.
const Width = 32

// prims are the innermost loops of the host backend. There is one set in generic Go and one per vector extension; a
// process picks one at start and never mixes them. Each function is small enough that a call stays under a few
// microseconds for the sizes that the operations in this package pass (the k of gemm is at most [blockK]).
//
// Rules that every implementation keeps:
//
//   - the value of one output element depends on its own inputs alone: not on m, on its row, on its neighbours, on
//     alignment. So a row has the same bits wherever a plan puts it.
//   - reductions over a row use 32 lanes: element i is added to lane i mod 32 in ascending order of i, then the lanes are
//     added by a fixed tree.
//   - exp(x): NaN gives NaN; results that would be denormal (x below about -87.33) are +0, so is exp(-Inf); x above
//     about 88.72 gives +Inf.
//   - slices may have any length and alignment (4 bytes); nothing outside them is written, nothing outside is read.
type prims struct {
	name string

	// gemm computes the m x 32 product c[i*ldc+j] = sum over k of a[i*ars+k*acs] * b[k*32+j], or adds it to what c holds if acc.
	// The sum is one chain of fused multiply-adds in ascending k, starting from 0 (or from c): its bits do not depend on
	// how k was cut into calls. m >= 1, k >= 1.
	gemm func(c []float32, ldc int, a []float32, ars, acs int, b []float32, m, k int, acc bool)

	// widenBF16 and widenF16 convert len(dst) stored values to float32, exactly.
	widenBF16 func(dst []float32, src []uint16)
	widenF16  func(dst []float32, src []uint16)

	// sumSquares is the sum of x[i]*x[i] by lanes.
	sumSquares func(x []float32) float32
	// scaleNorm is dst[i] = x[i] * r * (offset + w[i]), multiplied left to right. dst may be x.
	scaleNorm func(dst, x, w []float32, r, offset float32)

	// rope rotates len(cos) pairs: x[i], x[i+h] become x[i]*cos[i] - x[i+h]*sin[i], x[i+h]*cos[i] + x[i]*sin[i], with h = len(cos).
	// len(x) >= 2*len(cos); the rest of x is left alone.
	rope func(x, cos, sin []float32)

	// silu is dst[i] = g[i] / (1 + exp(-g[i])) * u[i]; geluTanh is the tanh form of gelu of g[i], times u[i]. dst may be g or u.
	silu     func(dst, g, u []float32)
	geluTanh func(dst, g, u []float32)

	// add is dst[i] += x[i].
	add func(dst, x []float32)

	// max is the largest of x, which is not empty; NaN if any is NaN.
	max func(x []float32) float32
	// expSum is the sum over i of exp(x[i]-m): float32 lanes, the tree in float64.
	expSum func(x []float32, m float32) float64

	// softmaxBlock updates the online softmax of 32 queries (lanes) by n <= 64 keys. s[j*32+l] is the raw score of key j for lane
	// l, and becomes its weight exp(scale*s - max), or 0 where key j is outside lo[l] <= key0+j < hi[l]. mx and sum are the
	// running maximum (of scaled scores; -Inf at the start) and sum of weights per lane, added key by key in ascending order; corr[l] receives the
	// factor exp(old max - new max) by which whatever was accumulated under the old maximum must be multiplied: 1 if the
	// maximum did not change, 0 if there was none. A masked score is never looked at, even if it is NaN. A lane without any key in
	// the block keeps mx and sum, with corr 1.
	softmaxBlock func(s []float32, n int, scale float32, key0 int32, lo, hi *[Width]int32, mx, sum, corr *[Width]float32)

	// scaleLanes is o[i*32+l] *= corr[l] for the n rows of o.
	scaleLanes func(o []float32, n int, corr *[Width]float32)

	// accumMasked adds n weighted values row by row: o[d*32+l] = fma(v[j*vs+d], p[j*32+l], o[d*32+l]) for j ascending, d < hd, in those
	// lanes alone in which lo[l] <= key0+j < hi[l]: the others are left as they are, whatever v holds.
	accumMasked func(o []float32, hd int, v []float32, vs int, p []float32, n int, key0 int32, lo, hi *[Width]int32)

	// gatherLanes transposes 32 rows into lanes: dst[d*32+l] = src[off[l]+d] for d < n.
	gatherLanes func(dst []float32, src []float32, off *[Width]int, n int)
	// scatterLanes is the inverse with a factor: dst[off[l]+d] = src[d*32+l]*inv[l] + 0 for d < n and l < lanes. Adding 0 turns -0 into +0.
	scatterLanes func(dst []float32, off *[Width]int, lanes int, src []float32, inv *[Width]float32, n int)

	// packPanel16 and packPanel32 transpose up to 32 rows of k values each (row stride k) into a panel: dst[i*32+j] = src[j*k+i]
	// for i < k, j < rows, and 0 for j >= rows. They return whether any value is NaN or infinite (packPanel16 takes
	// the exponent mask of the stored type: 0x7f80 for bfloat16, 0x7c00 for float16).
	packPanel16 func(dst, src []uint16, rows, k int, expMask uint16) (nonFinite bool)
	packPanel32 func(dst, src []float32, rows, k int) (nonFinite bool)

	// The rest is for backwards.

	// dot is the sum of x[i]*y[i] by lanes.
	dot func(x, y []float32) float32
	// scale is x[i] *= s.
	scale func(x []float32, s float32)
	// mulAdd is dst[i] += x[i]*y[i]*s, multiplied left to right.
	mulAdd func(dst, x, y []float32, s float32)
	// expScale is x[i] = c*exp(x[i]-m).
	expScale func(x []float32, m, c float32)

	// normDot is the sum of dy[i]*(offset+w[i])*x[i] by lanes, multiplied left to right.
	normDot func(dy, x, w []float32, offset float32) float32
	// normGrad is dst[i] = dy[i]*(offset+w[i])*r - x[i]*k. dst may be dy or x.
	normGrad func(dst, dy, x, w []float32, r, offset, k float32)

	// siluGrad is about a = act(g)*u, act(g) being g/(1+exp(-g)): it writes a[i], with the bits that silu gives, and from da the derivatives
	// dg[i] = da[i]*u[i]*act'(g[i]) and du[i] = da[i]*act(g[i]). geluTanhGrad does the same for the tanh form of gelu. The slices may be the same.
	siluGrad     func(a, dg, du, g, u, da []float32)
	geluTanhGrad func(a, dg, du, g, u, da []float32)

	// softmaxGradLanes takes n <= 64 keys of 32 queries (lanes). s[j*32+l] is the raw score of key j for lane l and becomes its weight p = exp(scale*s - mx[l])*inv[l];
	// dp[j*32+l] is the derivative by that weight and becomes the one by the raw score, scale*p*(dp-d[l]). Both become 0 where key j is outside
	// lo[l] <= key0+j < hi[l], whatever they are.
	softmaxGradLanes func(s, dp []float32, n int, scale float32, key0 int32, lo, hi *[Width]int32, mx, inv, d *[Width]float32)
	// softmaxGradRows does the same for n <= 64 queries (rows) of 32 keys (lanes): the statistics of query j are mx[j*stride], inv[j*stride] and
	// d[j*dstride], and key l counts if lo[l] <= query0+j < hi[l].
	softmaxGradRows func(s, dp []float32, n int, scale float32, query0 int32, lo, hi *[Width]int32, mx, inv []float32, stride int, d []float32, dstride int)
}
