// Command gen writes the assembly of package kernel: one file of functions per vector extension, and the Go
// declarations that go with it. Run it through "go generate" in package kernel.
//
// Every function is written once, against the small set of operations in isa.go, and generated for AVX2 (8 lanes, 16
// registers) and AVX-512 (16 lanes, 32 registers). Both get the same arithmetic in the same order, so a process
// computes the same bits under either.
package main

import (
	"flag"
	"log"

	. "github.com/mmcloughlin/avo/build"
)

func main() {
	isa := flag.String("isa", "", "avx2 or avx512")
	flag.Parse()
	v, ok := isas[*isa]
	if !ok {
		log.Fatalf("gen: unknown -isa %q", *isa)
	}
	ConstraintExpr("amd64,!noasm")
	constants(v)
	gemms(v)
	accum(v)
	softmax(v)
	elementwise(v)
	reductions(v)
	grads(v)
	widen(v)
	rowsToLanes(v, "gather", 4, false)
	rowsToLanes(v, "pack32", 4, true)
	rowsToLanes(v, "pack16", 2, true)
	lanesToRows(v)
	peak(v)
	Generate()
}
