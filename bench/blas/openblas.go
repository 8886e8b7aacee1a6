package main

import (
	"errors"
	"fmt"
	"runtime"

	"github.com/ebitengine/purego"
)

// Values of the C interface (cblas.h).
const (
	rowMajor = 101
	noTrans  = 111
	trans    = 112
)

type openblas struct {
	config, core string
	sgemm        func(order, transA, transB, m, n, k int32, alpha float32, a *float32, lda int32, b *float32, ldb int32,
		beta float32, c *float32, ldc int32)
}

// openBLAS loads the library. OPENBLAS_CORETYPE is read while it loads, so there is one core type per process.
func openBLAS(path string, threads int) (_ product, err error) {
	if path == "" {
		return nil, errors.New("no -lib")
	}
	h, err := purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_LOCAL)
	if err != nil {
		return nil, err
	}
	defer func() { // purego panics on a missing symbol
		if p := recover(); p != nil {
			err = fmt.Errorf("%s: %v", path, p)
		}
	}()
	var b openblas
	var config, core func() string
	var setThreads func(int32)
	var getThreads func() int32
	purego.RegisterLibFunc(&b.sgemm, h, "cblas_sgemm")
	purego.RegisterLibFunc(&config, h, "openblas_get_config")
	purego.RegisterLibFunc(&core, h, "openblas_get_corename")
	purego.RegisterLibFunc(&setThreads, h, "openblas_set_num_threads")
	purego.RegisterLibFunc(&getThreads, h, "openblas_get_num_threads")
	setThreads(int32(threads))
	if n := getThreads(); int(n) != threads {
		return nil, fmt.Errorf("asked OpenBLAS for %d threads, it has %d", threads, n)
	}
	b.config, b.core = config(), core()
	return &b, nil
}

func (b *openblas) describe() string { return b.core + ": " + b.config }
func (b *openblas) close()           {}

func (b *openblas) prepare(s shape, x, w, y []float32) (func(), func() []float32, error) {
	run := func() {
		b.sgemm(rowMajor, noTrans, trans, int32(s.M), int32(s.N), int32(s.K), 1, &x[0], int32(s.K), &w[0], int32(s.K), 0, &y[0], int32(s.N))
	}
	return run, func() []float32 { runtime.KeepAlive(b); return y }, nil
}
