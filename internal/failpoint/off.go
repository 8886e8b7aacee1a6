//go:build !failpoints

package failpoint

// Enabled says whether fail-points are compiled in.
const Enabled = false

// Hit says whether a place in the code is to go on: always.
func Hit(Point) error { return nil }

// Fault is the first failure among goroutines that can return none themselves: there is none.
type Fault struct{}

// Hit says whether the goroutine is to go on: always.
func (*Fault) Hit(Point) bool { return true }

// Err is nil.
func (*Fault) Err() error { return nil }

// Armed is an armed fail-point. There is none.
type Armed struct{}

// Hits is how often the point was hit since: never.
func (*Armed) Hits() int { return 0 }

// Fired says whether it has fired: never.
func (*Armed) Fired() bool { return false }

// Arm panics: fail-points are not compiled in.
func Arm(p Point, n int, do func(*Error) error) *Armed {
	panic("failpoint: fail-points are not compiled in; hint: build with -tags failpoints")
}

// Disarm does nothing.
func Disarm() {}
