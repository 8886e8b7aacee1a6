// Package failpoint makes the engine fail where a test wants it to: at fail-points, places in the code that ask [Hit] whether they are to go on.
//
// Fail-points are compiled in by the build tag failpoints. Without it Hit is a constant nil, [Enabled] is false, and nothing of this package is left in a
// program. With it they sleep until a test arms one ([Arm]), or the environment does, for a process that nobody else can reach into:
//
//	TRAINERRANK_FAILPOINTS=device/allocate=1,transformer/layer=3:panic
//
// fails the first allocation and panics in the third layer. What happens is one of "error" (the default: Hit returns an [*Error]) and "panic" (Hit panics
// with one). A variable that makes no sense ends the process with a panic, lest a test pass because nothing failed. Without the tag it is not looked at.
//
// # Caveats
//
// Points belong to the process, not to a rank or a call: tests that arm one do not run in parallel with others that would hit it.
package failpoint

import "fmt"

// Variable is the environment variable that arms fail-points from outside the process.
const Variable = "TRAINERRANK_FAILPOINTS"

// Point is the name of a fail-point: the package, and the place in it.
type Point string

// The fail-points.
const (
	Allocate   Point = "device/allocate"        // the mapping of a block
	Reserve    Point = "device/reserve"         // the mapping of a reservation's slab
	Populate   Point = "device/populate"        // making a slab resident, after it was mapped
	Meet       Point = "collective/meet"        // a rank's arrival at a collective
	Rehearse   Point = "transformer/rehearse"   // the rehearsal of a pass, which is in planning
	Layer      Point = "transformer/layer"      // within a layer, on the goroutine that runs the pass
	Block      Point = "transformer/block"      // a block of rows in any loop of a pass, on any worker
	Backward   Point = "transformer/backward"   // within a layer of a backward, on the goroutine that runs it
	Accumulate Point = "slots/accumulate"       // before a backward's gradients are added to those of its checkpoint
	Subforward Point = "trainerrank/subforward" // before a subforward
)

// Points lists them.
func Points() []Point {
	return []Point{Allocate, Reserve, Populate, Meet, Rehearse, Layer, Block, Backward, Accumulate, Subforward}
}

// Error is what an armed fail-point fails with.
type Error struct {
	Point Point
	N     int // which hit it was, from 1
}

func (e *Error) Error() string { return fmt.Sprintf("fail-point %s, hit %d", e.Point, e.N) }

// Fail is for [Arm]: the hit returns the error.
func Fail(e *Error) error { return e }

// Panic is for [Arm]: the hit panics with the error.
func Panic(e *Error) error { panic(e) }
