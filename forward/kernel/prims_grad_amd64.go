//go:build amd64 && !noasm

package kernel

// The methods of an extension for backwards.

func (e extension) dot(x, y []float32) float32 {
	n := len(x)
	y = y[:n]
	switch {
	case n == 0:
		return 0
	case e.wide:
		return dotAVX512(&x[0], &y[0], n)
	}
	return dotAVX2(&x[0], &y[0], n)
}

func (e extension) scale(x []float32, s float32) {
	switch n := len(x); {
	case n == 0:
	case e.wide:
		scaleAVX512(&x[0], s, n)
	default:
		scaleAVX2(&x[0], s, n)
	}
}

func (e extension) mulAdd(dst, x, y []float32, s float32) {
	n := len(dst)
	x, y = x[:n], y[:n]
	switch {
	case n == 0:
	case e.wide:
		mulAddAVX512(&dst[0], &x[0], &y[0], s, n)
	default:
		mulAddAVX2(&dst[0], &x[0], &y[0], s, n)
	}
}

func (e extension) expScale(x []float32, m, c float32) {
	switch n := len(x); {
	case n == 0:
	case e.wide:
		expScaleAVX512(&x[0], m, c, n)
	default:
		expScaleAVX2(&x[0], m, c, n)
	}
}

func (e extension) normDot(dy, x, w []float32, offset float32) float32 {
	n := len(x)
	dy, w = dy[:n], w[:n]
	switch {
	case n == 0:
		return 0
	case e.wide:
		return normDotAVX512(&dy[0], &x[0], &w[0], offset, n)
	}
	return normDotAVX2(&dy[0], &x[0], &w[0], offset, n)
}

func (e extension) normGrad(dst, dy, x, w []float32, r, offset, k float32) {
	n := len(dst)
	dy, x, w = dy[:n], x[:n], w[:n]
	switch {
	case n == 0:
	case e.wide:
		normGradAVX512(&dst[0], &dy[0], &x[0], &w[0], r, offset, k, n)
	default:
		normGradAVX2(&dst[0], &dy[0], &x[0], &w[0], r, offset, k, n)
	}
}

func (e extension) siluGrad(a, dg, du, g, u, da []float32) {
	n := len(a)
	dg, du, g, u, da = dg[:n], du[:n], g[:n], u[:n], da[:n]
	switch {
	case n == 0:
	case e.wide:
		siluGradAVX512(&a[0], &dg[0], &du[0], &g[0], &u[0], &da[0], n)
	default:
		siluGradAVX2(&a[0], &dg[0], &du[0], &g[0], &u[0], &da[0], n)
	}
}

func (e extension) geluTanhGrad(a, dg, du, g, u, da []float32) {
	n := len(a)
	dg, du, g, u, da = dg[:n], du[:n], g[:n], u[:n], da[:n]
	switch {
	case n == 0:
	case e.wide:
		geluTanhGradAVX512(&a[0], &dg[0], &du[0], &g[0], &u[0], &da[0], n)
	default:
		geluTanhGradAVX2(&a[0], &dg[0], &du[0], &g[0], &u[0], &da[0], n)
	}
}

func (e extension) softmaxGradLanes(s, dp []float32, n int, scale float32, key0 int32, lo, hi *[Width]int32, mx, inv, d *[Width]float32) {
	if n < 1 {
		return
	}
	s, dp = s[:n*Width], dp[:n*Width]
	if e.wide {
		softmaxGradLanesAVX512(&s[0], &dp[0], n, scale, key0, &lo[0], &hi[0], &mx[0], &inv[0], &d[0])
	} else {
		softmaxGradLanesAVX2(&s[0], &dp[0], n, scale, key0, &lo[0], &hi[0], &mx[0], &inv[0], &d[0])
	}
}

func (e extension) softmaxGradRows(s, dp []float32, n int, scale float32, query0 int32, lo, hi *[Width]int32, mx, inv []float32, stride int, d []float32, dstride int) {
	if n < 1 {
		return
	}
	if stride|dstride < 0 {
		panic("kernel: softmaxGradRows: bad stride")
	}
	s, dp = s[:n*Width], dp[:n*Width]
	mx, inv, d = mx[:(n-1)*stride+1], inv[:(n-1)*stride+1], d[:(n-1)*dstride+1]
	if e.wide {
		softmaxGradRowsAVX512(&s[0], &dp[0], n, scale, query0, &lo[0], &hi[0], &mx[0], &inv[0], stride, &d[0], dstride)
	} else {
		softmaxGradRowsAVX2(&s[0], &dp[0], n, scale, query0, &lo[0], &hi[0], &mx[0], &inv[0], stride, &d[0], dstride)
	}
}
