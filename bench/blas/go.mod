module github.com/trainerrank/engine/bench/blas

go 1.26.0

require (
	github.com/ebitengine/purego v0.11.3
	github.com/trainerrank/engine v0.0.0
	golang.org/x/sys v0.50.0
)

replace github.com/trainerrank/engine => ../..
