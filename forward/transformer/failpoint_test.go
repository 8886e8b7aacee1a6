//go:build failpoints

package transformer_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/internal/failpoint"
	"github.com/trainerrank/engine/internal/golden"
)

// A backward that fails, within a layer or on any worker, ends with that error; it leaves no scratch in its arena, and its graph stays what it was: another
// backward of it has the right bits, and only then it is spent.
func TestEveryFailPointOfABackward(t *testing.T) {
	defer failpoint.Disarm()
	folder := golden.FS(t, "qwen2-tiny")
	m := golden.Load(t, folder, golden.Options{Threads: 2})
	requests := golden.Requests(t, folder)
	grads := make([]forward.OutputGrad, len(requests))
	for i, r := range requests {
		if r.Input.Targets != nil {
			grads[i].TargetLogprobs = slices.Repeat([]float32{0.5}, len(r.Input.Targets))
		}
	}
	for _, keep := range []forward.Retention{forward.Stored, forward.Layer, forward.Replay} {
		batch := func() *forward.Batch {
			b := pack(t, golden.Inputs(requests), fullSharing)
			b.Grad, b.Keep = true, keep
			return b
		}
		_, want := backward(t, m, batch(), grads)
		f, err := m.Rehearse(batch())
		if err != nil {
			t.Fatal(err)
		}
		// fails runs a backward that meets what is armed once the forward is over.
		fails := func(ctx context.Context, arm func()) (panicked any, err error) {
			b := batch()
			arena, err := m.Dirty.Reserve(device.Sizes{device.Outputs: f.Outputs, device.Retained: f.Retained, device.Scratch: f.Scratch})
			if err != nil {
				t.Fatal(err)
			}
			defer arena.Release()
			b.Arena = arena
			pass, err := m.Forward(t.Context(), b)
			if err != nil {
				t.Fatal(err)
			}
			back, err := m.Dirty.Reserve(device.Sizes{device.Scratch: f.BackwardScratch, device.Gradients: f.Gradients})
			if err != nil {
				t.Fatal(err)
			}
			defer back.Release()
			arm()
			defer failpoint.Disarm()
			func() {
				defer func() { panicked = recover() }()
				_, err = pass.Graph.Backward(ctx, back, grads)
			}()
			if back.Mark() != 0 {
				t.Errorf("%s: the backward leaves %d bytes of scratch", keep, back.Mark())
			}
			failpoint.Disarm()
			more, rerr := m.Dirty.Reserve(device.Sizes{device.Scratch: f.BackwardScratch, device.Gradients: f.Gradients})
			if rerr != nil {
				t.Fatal(rerr)
			}
			defer more.Release()
			vector, again := pass.Graph.Backward(t.Context(), more, grads)
			switch failed := panicked != nil || err != nil; {
			case !failed && again == nil:
				t.Errorf("%s: a graph is used twice", keep)
			case failed && again != nil:
				t.Errorf("%s: after %v, %v: %v", keep, panicked, err, again)
			case failed:
				sameBits(t, string(keep)+", the backward again", vector.F32(), want)
			}
			return panicked, err
		}
		for _, point := range []failpoint.Point{failpoint.Backward, failpoint.Block, failpoint.Layer} {
			var armed *failpoint.Armed
			if p, err := fails(t.Context(), func() { armed = failpoint.Arm(point, math.MaxInt, failpoint.Fail) }); err != nil || p != nil {
				t.Fatal(p, err)
			}
			n := armed.Hits()
			if (n == 0) != (point == failpoint.Layer && keep == forward.Stored) {
				t.Errorf("%s: a backward hits %s %d times", keep, point, n)
			}
			for hit := 1; hit <= n; hit += max(1, n/8) {
				for _, what := range []string{"an error", "a panic", "a cancellation"} {
					at := fmt.Sprintf("%s, %s at hit %d of %d of %s", keep, what, hit, n, point)
					ctx, cancel := context.WithCancel(t.Context())
					panicked, err := fails(ctx, func() {
						armed = failpoint.Arm(point, hit, map[string]func(*failpoint.Error) error{
							"an error": failpoint.Fail, "a panic": failpoint.Panic, "a cancellation": func(*failpoint.Error) error { cancel(); return nil },
						}[what])
					})
					cancel()
					var failed *failpoint.Error
					switch what {
					case "an error":
						errors.As(err, &failed)
					case "a panic":
						failed, _ = panicked.(*failpoint.Error)
					default:
						failed = &failpoint.Error{Point: point, N: hit}
						if !errors.Is(err, context.Canceled) {
							t.Errorf("%s: %v", at, err)
						}
					}
					if !armed.Fired() || failed == nil || failed.Point != point || failed.N != hit || (panicked != nil) != (what == "a panic") {
						t.Errorf("%s: fired %t: %v, panic %v", at, armed.Fired(), err, panicked)
					}
				}
			}
		}
		_, got := backward(t, m, batch(), grads)
		sameBits(t, string(keep)+", the backward after", got, want)
	}
}
