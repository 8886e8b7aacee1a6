package kernel

import "math"

func dotGeneric(x, y []float32) float32 {
	return tree32(lanes(len(x), func(i int) float32 { return float32(x[i] * y[i]) }))
}

func scaleGeneric(x []float32, s float32) {
	for i := range x {
		x[i] *= s
	}
}

func mulAddGeneric(dst, x, y []float32, s float32) {
	for i := range dst {
		dst[i] += float32(x[i] * y[i] * s)
	}
}

func expScaleGeneric(x []float32, m, c float32) {
	for i := range x {
		x[i] = c * expGeneric(x[i]-m)
	}
}

func normDotGeneric(dy, x, w []float32, offset float32) float32 {
	return tree32(lanes(len(x), func(i int) float32 { return float32(dy[i] * float32(offset+w[i]) * x[i]) }))
}

func normGradGeneric(dst, dy, x, w []float32, r, offset, k float32) {
	for i := range dst {
		dst[i] = float32(dy[i]*float32(offset+w[i])*r) - float32(x[i]*k)
	}
}

func siluGradGeneric(a, dg, du, g, u, da []float32) {
	for i := range a {
		x, y, d := g[i], u[i], da[i]
		s := 1 / (1 + expGeneric(-x)) // the derivative is s + x s (1-s)
		act := x * s
		a[i] = x / (1 + expGeneric(-x)) * y
		dg[i] = float32(d*y) * (s + float32(act*(1-s)))
		du[i] = d * act
	}
}

// geluTanhGradGeneric differentiates x s(v), with s the logistic function and v = 2c(x + a x^3).
func geluTanhGradGeneric(a, dg, du, g, u, da []float32) {
	const c, cubic = 0.7978845608028654, 0.044715
	for i := range a {
		x, y, d := float64(g[i]), u[i], da[i]
		s := 1 / (1 + math.Exp(-2*c*(x+cubic*x*x*x)))
		act := float32(x * s)
		a[i] = act * y
		dg[i] = float32(d*y) * float32(s+x*s*(1-s)*2*c*(1+3*cubic*x*x))
		du[i] = d * act
	}
}

// softmaxGrad is the weight p of a score, and the derivative by the score if dp is that by the weight.
func softmaxGrad(s, dp *float32, seen bool, scale, mx, inv, d float32) {
	if !seen {
		*s, *dp = 0, 0
		return
	}
	p := expGeneric(float32(*s*scale)-mx) * inv
	*s, *dp = p, float32(scale*p)*(*dp-d)
}

func softmaxGradLanesGeneric(s, dp []float32, n int, scale float32, key0 int32, lo, hi *[Width]int32, mx, inv, d *[Width]float32) {
	for j := range n {
		for l := range Width {
			key := key0 + int32(j)
			softmaxGrad(&s[j*Width+l], &dp[j*Width+l], lo[l] <= key && key < hi[l], scale, mx[l], inv[l], d[l])
		}
	}
}

func softmaxGradRowsGeneric(s, dp []float32, n int, scale float32, query0 int32, lo, hi *[Width]int32, mx, inv []float32, stride int, d []float32, dstride int) {
	for j := range n {
		for l := range Width {
			query := query0 + int32(j)
			softmaxGrad(&s[j*Width+l], &dp[j*Width+l], lo[l] <= query && query < hi[l], scale, mx[j*stride], inv[j*stride], d[j*dstride])
		}
	}
}
