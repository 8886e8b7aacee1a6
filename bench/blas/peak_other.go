//go:build !amd64

package main

func measurePeak(int) (gflops float64, kind string) { return 0, "not measured on this architecture" }
