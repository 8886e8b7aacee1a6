//go:build failpoints

package device

import (
	"errors"
	"testing"

	"github.com/trainerrank/engine/internal/failpoint"
)

// A mapping that fails, whichever of a reservation's it is, is running out of memory: nothing is taken, and the next one works.
func TestMappingsThatFail(t *testing.T) {
	defer failpoint.Disarm()
	h, err := NewHost(1 << 20)
	if err != nil {
		t.Fatal(err)
	}
	CheckLeaks(t, h)
	ballast, err := h.Allocate(Ballast, 3*PageSize)
	if err != nil {
		t.Fatal(err)
	}
	defer ballast.Free()
	sizes := Sizes{Outputs: 1, Retained: 5 * PageSize, Scratch: 2 * PageSize}
	turns := []Sizes{{Outputs: PageSize, Scratch: 4 * PageSize}, {Outputs: 2 * PageSize, Scratch: PageSize}}
	for _, c := range []struct {
		name  string
		point failpoint.Point
		hits  int
		take  func() (free func(), err error)
	}{
		{"a block", failpoint.Allocate, 1, func() (func(), error) { b, err := h.Allocate(Weights, 5); return b.Free, err }},
		{"a reservation", failpoint.Reserve, 3, func() (func(), error) { r, err := h.Reserve(sizes); return r.Release, err }},
		{"a reservation, made resident", failpoint.Populate, 3, func() (func(), error) { r, err := h.Reserve(sizes); return r.Release, err }},
		{"turns", failpoint.Reserve, 1, func() (func(), error) { r, err := h.ReserveTurns(turns); return r.Release, err }},
		{"a pool", failpoint.Reserve, 1, func() (func(), error) { l, err := h.ReservePool(5, 5); return l.Release, err }},
		{"a pool, made resident", failpoint.Populate, 1, func() (func(), error) { l, err := h.ReservePool(5, 5); return l.Release, err }},
		{"turns, made resident", failpoint.Populate, 1, func() (func(), error) { r, err := h.ReserveTurns(turns); return r.Release, err }},
	} {
		for n := 1; n <= c.hits+1; n++ {
			before, free := h.Stats(), h.Free()
			armed := failpoint.Arm(c.point, n, failpoint.Fail)
			give, err := c.take()
			failpoint.Disarm()
			if armed.Fired() != (n <= c.hits) || armed.Fired() != (err != nil) {
				t.Fatalf("%s: fail-point %s, hit %d, fired %t: %v", c.name, c.point, n, armed.Fired(), err)
			}
			if err == nil {
				give()
			} else {
				var oom *OutOfMemoryError
				var point *failpoint.Error
				if !errors.As(err, &oom) || !errors.As(err, &point) || point.N != n || oom.FreeBytes != free {
					t.Errorf("%s: %v", c.name, err)
				}
				if now := h.Stats(); now != before {
					t.Errorf("%s: before\n%v\nafter a failure\n%v", c.name, before, now)
				}
			}
			if now := h.Free(); now != free {
				t.Errorf("%s: %d bytes are free, %d were", c.name, now, free)
			}
			give, err = c.take()
			if err != nil {
				t.Fatalf("%s, the next one: %v", c.name, err)
			}
			give()
			h.ResetPeak()
		}
	}
}
