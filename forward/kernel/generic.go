package kernel

import "math"

// generic is the portable implementation: the twin against which the vectorised ones are tested, and the one that runs
// where there are none. Conversions to float32 around products keep the compiler from fusing them.
var generic = prims{
	name:         "generic",
	gemm:         gemmGeneric,
	widenBF16:    widenBF16Generic,
	widenF16:     widenF16Generic,
	sumSquares:   sumSquaresGeneric,
	scaleNorm:    scaleNormGeneric,
	rope:         ropeGeneric,
	silu:         siluGeneric,
	geluTanh:     geluTanhGeneric,
	add:          addGeneric,
	max:          maxGeneric,
	expSum:       expSumGeneric,
	softmaxBlock: softmaxBlockGeneric,
	scaleLanes:   scaleLanesGeneric,
	accumMasked:  accumMaskedGeneric,
	gatherLanes:  gatherLanesGeneric,
	scatterLanes: scatterLanesGeneric,
	packPanel16:  packPanel16Generic,
	packPanel32:  packPanel32Generic,

	dot:              dotGeneric,
	scale:            scaleGeneric,
	mulAdd:           mulAddGeneric,
	expScale:         expScaleGeneric,
	normDot:          normDotGeneric,
	normGrad:         normGradGeneric,
	siluGrad:         siluGradGeneric,
	geluTanhGrad:     geluTanhGradGeneric,
	softmaxGradLanes: softmaxGradLanesGeneric,
	softmaxGradRows:  softmaxGradRowsGeneric,
}

func gemmGeneric(c []float32, ldc int, a []float32, ars, acs int, b []float32, m, k int, acc bool) {
	for i := range m {
		row := (*[Width]float32)(c[i*ldc:])
		if !acc {
			clear(row[:])
		}
		for t := range k {
			x := a[i*ars+t*acs]
			p := (*[Width]float32)(b[t*Width:])
			for j := range row {
				row[j] += float32(x * p[j])
			}
		}
	}
}

func widenBF16Generic(dst []float32, src []uint16) {
	for i := range dst {
		dst[i] = math.Float32frombits(uint32(src[i]) << 16)
	}
}

func widenF16Generic(dst []float32, src []uint16) {
	for i := range dst {
		dst[i] = widenF16(src[i])
	}
}

// widenF16 is the float32 of an IEEE 754 binary16.
func widenF16(h uint16) float32 {
	sign := uint32(h&0x8000) << 16
	exp, frac := uint32(h>>10)&0x1f, uint32(h)&0x3ff
	switch {
	case exp == 0x1f: // infinity, NaN
		if frac != 0 {
			frac |= 0x200 // quiet, as the hardware conversion does
		}
		return math.Float32frombits(sign | 0xff<<23 | frac<<13)
	case exp == 0: // zero, denormal: frac * 2^-24
		v := float32(frac) * (1.0 / (1 << 24))
		return math.Float32frombits(math.Float32bits(v) | sign)
	}
	return math.Float32frombits(sign | (exp+112)<<23 | frac<<13)
}

// lanes sums f(0..n-1) as the vectorised reductions do.
func lanes(n int, f func(i int) float32) *[Width]float32 {
	var l [Width]float32
	for i := range n {
		l[i%Width] += f(i)
	}
	return &l
}

// tree32 adds 32 lanes by halving: lane i takes lane i+16, then i+8, i+4, i+2, i+1.
func tree32(l *[Width]float32) float32 {
	for h := Width / 2; h > 0; h /= 2 {
		for i := range h {
			l[i] += l[i+h]
		}
	}
	return l[0]
}

// tree64 is tree32 in float64.
func tree64(l *[Width]float32) float64 {
	var d [Width]float64
	for i, v := range l {
		d[i] = float64(v)
	}
	for h := Width / 2; h > 0; h /= 2 {
		for i := range h {
			d[i] += d[i+h]
		}
	}
	return d[0]
}

func sumSquaresGeneric(x []float32) float32 {
	return tree32(lanes(len(x), func(i int) float32 { return float32(x[i] * x[i]) }))
}

func scaleNormGeneric(dst, x, w []float32, r, offset float32) {
	for i := range dst {
		dst[i] = x[i] * r * float32(offset+w[i])
	}
}

func ropeGeneric(x, cos, sin []float32) {
	h := len(cos)
	for i, c := range cos {
		a, b, s := x[i], x[i+h], sin[i]
		x[i] = float32(a*c) - float32(b*s)
		x[i+h] = float32(b*c) + float32(a*s)
	}
}

const (
	expLowest  = -87.33654 // ln of the smallest normal float32: below it the result is 0
	expHighest = 88.72284  // ln of the largest float32: above it the result is +Inf
)

func expGeneric(x float32) float32 {
	if x < expLowest {
		return 0
	}
	return float32(math.Exp(float64(x)))
}

func siluGeneric(dst, g, u []float32) {
	for i := range dst {
		dst[i] = g[i] / (1 + expGeneric(-g[i])) * u[i]
	}
}

// geluTanhGeneric uses 0.5 x (1 + tanh(y)) = x / (1 + exp(-2y)), which loses nothing where tanh(y) is near -1.
func geluTanhGeneric(dst, g, u []float32) {
	const c, a = 0.7978845608028654, 0.044715 // sqrt(2/pi) and the cubic term, as in the tanh form of gelu
	for i := range dst {
		x := float64(g[i])
		dst[i] = float32(x/(1+math.Exp(-2*c*(x+a*x*x*x)))) * u[i]
	}
}

func addGeneric(dst, x []float32) {
	for i := range dst {
		dst[i] += x[i]
	}
}

func maxGeneric(x []float32) float32 {
	m := x[0]
	for _, v := range x {
		if v > m || v != v {
			m = v
		}
		if m != m {
			break
		}
	}
	return m
}

func expSumGeneric(x []float32, m float32) float64 {
	return tree64(lanes(len(x), func(i int) float32 { return expGeneric(x[i] - m) }))
}

func softmaxBlockGeneric(s []float32, n int, scale float32, key0 int32, lo, hi *[Width]int32, mx, sum, corr *[Width]float32) {
	for l := range Width {
		from, to := max(int(lo[l]-key0), 0), min(int(hi[l]-key0), n)
		old, m := mx[l], mx[l]
		for j := range n {
			v := &s[j*Width+l]
			if j < from || j >= to {
				*v = float32(math.Inf(-1))
				continue
			}
			*v *= scale
			if *v > m {
				m = *v
			}
		}
		corr[l] = 1
		if m != old {
			corr[l] = expGeneric(old - m)
		}
		ref := m
		if math.IsInf(float64(m), -1) {
			ref = 0
		}
		var t float32
		for j := range n {
			v := &s[j*Width+l]
			if j < from || j >= to {
				*v = 0
				continue
			}
			*v = expGeneric(*v - ref)
			t += *v
		}
		mx[l] = m
		sum[l] = float32(sum[l]*corr[l]) + t
	}
}

func scaleLanesGeneric(o []float32, n int, corr *[Width]float32) {
	for i := range n {
		for l := range Width {
			o[i*Width+l] *= corr[l]
		}
	}
}

func accumMaskedGeneric(o []float32, hd int, v []float32, vs int, p []float32, n int, key0 int32, lo, hi *[Width]int32) {
	for j := range n {
		for l := range Width {
			if k := key0 + int32(j); k < lo[l] || k >= hi[l] {
				continue
			}
			w := p[j*Width+l]
			for d := range hd {
				o[d*Width+l] += float32(v[j*vs+d] * w)
			}
		}
	}
}

func gatherLanesGeneric(dst, src []float32, off *[Width]int, n int) {
	for l, at := range off {
		for d, v := range src[at : at+n] {
			dst[d*Width+l] = v
		}
	}
}

func scatterLanesGeneric(dst []float32, off *[Width]int, lanes int, src []float32, inv *[Width]float32, n int) {
	for l := range lanes {
		row := dst[off[l] : off[l]+n]
		for d := range row {
			row[d] = float32(src[d*Width+l]*inv[l]) + 0
		}
	}
}

func packPanel16Generic(dst, src []uint16, rows, k int, expMask uint16) bool {
	bad := false
	for i := range k {
		out := (*[Width]uint16)(dst[i*Width:])
		for j := range rows {
			v := src[j*k+i]
			bad = bad || v&expMask == expMask
			out[j] = v
		}
		clear(out[rows:])
	}
	return bad
}

func packPanel32Generic(dst, src []float32, rows, k int) bool {
	bad := false
	for i := range k {
		out := (*[Width]float32)(dst[i*Width:])
		for j := range rows {
			v := src[j*k+i]
			bad = bad || math.Float32bits(v)&0x7f800000 == 0x7f800000
			out[j] = v
		}
		clear(out[rows:])
	}
	return bad
}
