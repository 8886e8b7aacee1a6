//go:build failpoints

package failpoint

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
)

// Enabled says whether fail-points are compiled in.
const Enabled = true

var (
	mu    sync.Mutex // guards armed
	armed = map[Point]*Armed{}
)

func init() {
	if err := parse(os.Getenv(Variable)); err != nil {
		panic(fmt.Sprintf("%s: %v", Variable, err))
	}
}

// Armed is an armed fail-point.
type Armed struct {
	n     int
	do    func(*Error) error
	hits  atomic.Int64
	fired atomic.Bool
}

// Hits is how often the point was hit since.
func (a *Armed) Hits() int { return int(a.hits.Load()) }

// Fired says whether it has fired: it was hit often enough.
func (a *Armed) Fired() bool { return a.fired.Load() }

// Arm makes the n-th hit of p from now on, n >= 1, call do, once; the other hits pass. What do returns, the hit returns; it may panic too, cancel a
// context and return nil, or end its goroutine. What p was armed with before is forgotten. It panics if there is no such point.
func Arm(p Point, n int, do func(*Error) error) *Armed {
	if !slices.Contains(Points(), p) || n < 1 {
		panic(fmt.Sprintf("failpoint: arm hit %d of %q: no such point or hit", n, p))
	}
	a := &Armed{n: n, do: do}
	mu.Lock()
	defer mu.Unlock()
	armed[p] = a
	return a
}

// Disarm lets all points sleep.
func Disarm() {
	mu.Lock()
	defer mu.Unlock()
	clear(armed)
}

// Hit says whether a place in the code is to go on: an error says no.
func Hit(p Point) error {
	mu.Lock()
	a := armed[p]
	mu.Unlock()
	if a == nil || a.hits.Add(1) != int64(a.n) {
		return nil
	}
	a.fired.Store(true)
	return a.do(&Error{p, a.n})
}

// Fault is the first failure among goroutines that can return none themselves.
type Fault struct{ err atomic.Pointer[error] }

// Hit says whether the goroutine is to go on: not if the point fails, nor if one failed before.
func (f *Fault) Hit(p Point) bool {
	if err := Hit(p); err != nil {
		f.err.CompareAndSwap(nil, &err)
	}
	return f.err.Load() == nil
}

// Err is the first failure, or nil.
func (f *Fault) Err() error {
	if err := f.err.Load(); err != nil {
		return *err
	}
	return nil
}

// parse arms what the environment asks for: a list of point=n, or point=n:action.
func parse(list string) error {
	for item := range strings.SplitSeq(list, ",") {
		if item == "" {
			continue
		}
		name, what, _ := strings.Cut(item, "=")
		number, action, given := strings.Cut(what, ":")
		n, err := strconv.Atoi(number)
		do := map[string]func(*Error) error{"error": Fail, "panic": Panic}[action]
		if !given {
			do = Fail
		}
		if p := Point(name); err == nil && n > 0 && do != nil && slices.Contains(Points(), p) {
			Arm(p, n, do)
			continue
		}
		return fmt.Errorf("%q is not POINT=N or POINT=N:ACTION\nhint: points are %v, actions error and panic", item, Points())
	}
	return nil
}
