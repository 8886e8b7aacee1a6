//go:build failpoints

package failpoint

import (
	"errors"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
)

func TestTheNthHitFailsOnce(t *testing.T) {
	defer Disarm()
	for n := 1; n <= 4; n++ {
		a := Arm(Layer, n, Fail)
		for hit := 1; hit <= 6; hit++ {
			err := Hit(Layer)
			var e *Error
			if errors.As(err, &e) != (hit == n) || e != nil && (e.Point != Layer || e.N != n) {
				t.Errorf("armed for hit %d, hit %d: %v", n, hit, err)
			}
			if a.Fired() != (hit >= n) || a.Hits() != hit {
				t.Errorf("armed for hit %d, after %d: fired %t, %d hits", n, hit, a.Fired(), a.Hits())
			}
			if err := Hit(Block); err != nil {
				t.Errorf("another point: %v", err)
			}
		}
	}
	a := Arm(Layer, 1, Panic)
	Disarm()
	if err := Hit(Layer); err != nil || a.Fired() {
		t.Errorf("disarmed: %v", err)
	}
	a = Arm(Layer, 1, Panic)
	func() {
		defer func() {
			if e, ok := recover().(*Error); !ok || e.Point != Layer {
				t.Error("no panic with an error")
			}
		}()
		_ = Hit(Layer)
	}()
	if !a.Fired() {
		t.Error("the panic did not count")
	}
}

// Of hits by several goroutines one fires, and a fault stops them all.
func TestOneOfManyGoroutinesFires(t *testing.T) {
	defer Disarm()
	for range 100 {
		a := Arm(Block, 20, Fail)
		var fault Fault
		var passed atomic.Int64
		var all sync.WaitGroup
		for range 4 {
			all.Go(func() {
				for range 10 {
					if fault.Hit(Block) {
						passed.Add(1)
					}
				}
			})
		}
		all.Wait()
		var e *Error
		if !errors.As(fault.Err(), &e) || e.N != 20 || !a.Fired() || a.Hits() != 40 || fault.Hit(Block) || passed.Load() > 19+3 {
			t.Fatalf("%v, fired %t, %d hits, %d passed", fault.Err(), a.Fired(), a.Hits(), passed.Load())
		}
	}
}

// The test binary is its own process with an environment.
func TestMain(m *testing.M) {
	if os.Getenv("FAILPOINT_TEST") == "" {
		os.Exit(m.Run())
	}
	for range 3 {
		if err := Hit(Allocate); err != nil {
			os.Stdout.WriteString(err.Error() + "\n")
		}
	}
	_ = Hit(Layer)
}

func TestTheEnvironmentArms(t *testing.T) {
	for list, want := range map[string]string{
		"":                           "",
		"device/allocate=2":          "fail-point device/allocate, hit 2\n",
		"device/allocate=3:error":    "fail-point device/allocate, hit 3\n",
		"transformer/layer=1:panic,": "panic: fail-point transformer/layer, hit 1",
		"device/allocate=1,collective/meet=5,transformer/layer=2": "fail-point device/allocate, hit 1\n",
		"device/allocate":          "is not POINT=N",
		"device/allocate=0":        "is not POINT=N",
		"device/allocate=x":        "is not POINT=N",
		"device/allocate=1:":       "is not POINT=N",
		"device/allocate=1:sleep":  "is not POINT=N",
		"device/allocation=1":      "is not POINT=N",
		"device/allocate=1 ":       "is not POINT=N",
		"device/allocate=1;more=2": "is not POINT=N",
	} {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), "FAILPOINT_TEST=1", Variable+"="+list)
		out, err := cmd.CombinedOutput()
		broken := strings.Contains(want, "is not") || strings.Contains(want, "panic")
		if (err != nil) != broken || !strings.Contains(string(out), want) || !broken && string(out) != want {
			t.Errorf("%q: %v\n%s", list, err, out)
		}
	}
}
