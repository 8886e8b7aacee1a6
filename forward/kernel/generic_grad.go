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

// siluGradGeneric: the derivative of x s, s being the logistic function of x, is s + x s (1-s). 1-s is e s, with e = exp(-x), or 1 where e is infinite.
func siluGradGeneric(a, dg, du, g, u, da []float32) {
	for i := range a {
		x, y, d := g[i], u[i], da[i]
		e := expGeneric(-x)
		s, act, rest := 1/(1+e), x/(1+e), e*(1/(1+e))
		if !(rest < 1) {
			rest = 1
		}
		a[i] = act * y
		dg[i] = float32(d*y) * (s + float32(act*rest))
		du[i] = d * act
	}
}

// geluTanhGradGeneric differentiates x s(v), with s the logistic function and v = 2c(x + b x^3).
func geluTanhGradGeneric(a, dg, du, g, u, da []float32) {
	const c, b = 0.7978845608028654, 0.044715
	for i := range a {
		x, y, d := float64(g[i]), u[i], da[i]
		e := math.Exp(-2 * c * (x + b*x*x*x))
		s, act := 1/(1+e), float32(x/(1+e))
		a[i] = act * y
		dg[i] = float32(d*y) * float32(s+float64(act)*(1-s)*2*c*(1+3*b*x*x))
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
