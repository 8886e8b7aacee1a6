//go:build !failpoints

package failpoint

import "testing"

// Nothing fails, and nobody can arm a point by mistake and wait for it.
func TestPointsAreNotCompiledIn(t *testing.T) {
	for _, p := range Points() {
		if err := Hit(p); err != nil || Enabled {
			t.Errorf("%s: %v", p, err)
		}
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s can be armed", p)
				}
			}()
			Arm(p, 1, Fail)
		}()
	}
}
