//go:build failpoints

package trainerrank_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/trainerrank/engine/collective"
	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/internal/failpoint"
	"github.com/trainerrank/engine/internal/golden"
	"github.com/trainerrank/engine/trainerrank"
)

// hits is how often each fail-point is hit by fn.
func hits(fn func()) map[failpoint.Point]int {
	armed := map[failpoint.Point]*failpoint.Armed{}
	for _, p := range failpoint.Points() {
		armed[p] = failpoint.Arm(p, math.MaxInt, failpoint.Fail)
	}
	fn()
	failpoint.Disarm()
	n := map[failpoint.Point]int{}
	for p, a := range armed {
		n[p] = a.Hits()
	}
	return n
}

// some are hits from 1 to n: all of few, the first, the last and some between of many.
func some(n int) []int {
	most := 24
	if testing.Short() {
		most = 6
	}
	var list []int
	for i := range min(n, most) {
		list = append(list, 1+i*(n-1)/max(1, min(n, most)-1))
	}
	return list
}

// caught runs fn and returns what it panics with.
func caught(fn func()) (p any) {
	defer func() { p = recover() }()
	fn()
	return nil
}

// Wherever a call fails, with an error, a panic or a cancellation: the error is of its type, nothing is left, and the next call gives the right bits.
func TestEveryFailPoint(t *testing.T) {
	m, in, _, least := splitCall(t)
	defer failpoint.Disarm()
	want, _ := score(t, wrap(t, m.Model), in)
	seen := map[failpoint.Point]bool{failpoint.Allocate: true, failpoint.Backward: true, failpoint.Accumulate: true} // see the tests of device and transformer
	for name, usable := range map[string]int64{"whole": math.MaxInt64, "split": least} {
		s := &spy{Model: m.Model}
		rank := wrap(t, s, trainerrank.WithUsableBytes(usable))
		var tel trainerrank.Telemetry
		call := func(ctx context.Context) (err error) {
			res, err := rank.DPRankForward(ctx, in, trainerrank.AgreeAcrossRanks())
			if err != nil {
				return err
			}
			defer res.Release()
			tel = res.Telemetry
			for i, o := range res.Outputs.Flat() {
				if d := golden.Diff(want[i], golden.Copy(o)); d != "" {
					t.Errorf("%s: output %d:\n%s", name, i, d)
				}
			}
			return nil
		}
		count := hits(func() {
			if err := call(t.Context()); err != nil {
				t.Fatal(err)
			}
		})
		split, predicted := tel.SubforwardCount > 1, tel.PredictedPeakBytes
		before, free := stateOf(m.Host), m.Host.Free()
		for point, n := range count {
			seen[point] = seen[point] || n > 0
			planning := point == failpoint.Rehearse || point == failpoint.Reserve || point == failpoint.Populate
			for what, do := range map[string]func(cancel func()) func(*failpoint.Error) error{
				"an error": func(func()) func(*failpoint.Error) error { return failpoint.Fail },
				"a panic":  func(func()) func(*failpoint.Error) error { return failpoint.Panic },
				"a cancellation": func(cancel func()) func(*failpoint.Error) error {
					return func(*failpoint.Error) error { cancel(); return nil }
				},
			} {
				if what == "a panic" && (point == failpoint.Reserve || point == failpoint.Populate) {
					continue // the operating system does not panic
				}
				for _, hit := range some(n) {
					at := fmt.Sprintf("%s, %s at hit %d of %d of %s", name, what, hit, n, point)
					ctx, cancel := context.WithCancel(t.Context())
					ran := s.forwards.Load()
					armed := failpoint.Arm(point, hit, do(cancel))
					var err error
					panicked := caught(func() { err = call(ctx) })
					failpoint.Disarm()
					cancel()
					s.running.Store(0)
					unchanged(t, m.Host, before)
					if !armed.Fired() || m.Host.Free() != free {
						t.Fatalf("%s: fired %t, %d bytes are free, %d were", at, armed.Fired(), m.Host.Free(), free)
					}
					if started := s.forwards.Load() > ran; started && planning && what != "a cancellation" {
						t.Errorf("%s: the call ran", at)
					}
					var failed *failpoint.Error
					var memory *trainerrank.MemoryError
					var partial *trainerrank.PartialExecutionError
					var oom *device.OutOfMemoryError
					var gone *collective.AbortError
					switch {
					case what == "a panic":
						if failed, _ = panicked.(*failpoint.Error); failed == nil || failed.Point != point || failed.N != hit {
							t.Errorf("%s: %v", at, panicked)
						}
					case panicked != nil:
						t.Errorf("%s: it panics: %v", at, panicked)
					case what == "a cancellation":
						over := point == failpoint.Meet && hit == n && err == nil // in a meeting after all has run nothing is left to be cancelled
						if !errors.Is(err, context.Canceled) && !over || errors.As(err, &partial) {
							t.Errorf("%s: %v", at, err)
						}
					case !errors.As(err, &failed) || failed.Point != point || failed.N != hit:
						t.Errorf("%s: %v", at, err)
					case point == failpoint.Reserve || point == failpoint.Populate:
						if !errors.As(err, &memory) || !errors.As(err, &oom) || memory.PredictedPeakBytes != predicted || memory.Executing {
							t.Errorf("%s: %v", at, err)
						}
					case point == failpoint.Meet:
						if !errors.As(err, &gone) {
							t.Errorf("%s: %v", at, err)
						}
					case point != failpoint.Rehearse:
						if errors.As(err, &partial) != split || errors.As(err, &memory) || split && point == failpoint.Subforward && partial.Completed != hit-1 {
							t.Errorf("%s: %v", at, err)
						}
					}
					last, lastErr := rank.LastForwardTelemetry() // that of the call before, if this one was not even planned
					if lastErr != nil || last.PredictedPeakBytes != predicted || err != nil && point != failpoint.Meet && point != failpoint.Rehearse && last.RetainedBytes != 0 {
						t.Errorf("%s: the telemetry: %v, %+v", at, lastErr, last)
					}
					if err := call(t.Context()); err != nil {
						t.Errorf("%s: the call after: %v", at, err)
					}
					unchanged(t, m.Host, before)
					if t.Failed() {
						t.FailNow()
					}
				}
			}
		}
	}
	for _, p := range failpoint.Points() {
		if !seen[p] {
			t.Errorf("%s is not hit by a call", p)
		}
	}
}

// The same for a call whose price is an estimate, which takes memory while it runs: what a failure of the device does then is a [*trainerrank.MemoryError] of a call that was admitted.
func TestEveryFailPointOfALearnedCall(t *testing.T) {
	m, in, _, _ := splitCall(t)
	defer failpoint.Disarm()
	want, _ := score(t, wrap(t, m.Model), in)
	call := func() error {
		res, err := wrap(t, trainerrank.Opaque(m.Model)).DPRankForward(t.Context(), in)
		if err != nil {
			return err
		}
		defer res.Release()
		for i, o := range res.Outputs.Flat() {
			if d := golden.Diff(want[i], golden.Copy(o)); d != "" {
				t.Errorf("output %d:\n%s", i, d)
			}
		}
		return nil
	}
	before := stateOf(m.Host)
	count := hits(func() {
		if err := call(); err != nil {
			t.Fatal(err)
		}
	})
	if count[failpoint.Allocate] == 0 || count[failpoint.Rehearse] > 0 {
		t.Fatalf("a cold call hits %v", count)
	}
	for point, n := range count {
		for _, hit := range some(n) {
			for what, do := range map[string]func(*failpoint.Error) error{"error": failpoint.Fail, "panic": failpoint.Panic} {
				taking := point == failpoint.Allocate || point == failpoint.Reserve || point == failpoint.Populate
				if taking && what == "panic" {
					continue // the operating system does not panic
				}
				at := fmt.Sprintf("%s at hit %d of %d of %s", what, hit, n, point)
				failpoint.Arm(point, hit, do)
				var err error
				panicked := caught(func() { err = call() })
				failpoint.Disarm()
				unchanged(t, m.Host, before)
				var failed *failpoint.Error
				var memory *trainerrank.MemoryError
				var partial *trainerrank.PartialExecutionError
				switch {
				case what == "panic":
					if failed, _ = panicked.(*failpoint.Error); failed == nil || failed.N != hit {
						t.Errorf("%s: %v", at, panicked)
					}
				case !errors.As(err, &failed) || failed.N != hit || errors.As(err, &partial) || errors.As(err, &memory) != taking:
					t.Errorf("%s: %v", at, err)
				case taking && memory.Executing != (point == failpoint.Allocate):
					t.Errorf("%s: %v", at, err)
				}
				if err := call(); err != nil {
					t.Errorf("%s: the call after: %v", at, err)
				}
				unchanged(t, m.Host, before)
				if t.Failed() {
					t.FailNow()
				}
			}
		}
	}
}

// Wherever a training call fails, in its forward or its backward: nothing is left of it once it is released, no checkpoint is held, and the next one gives the right
// gradients.
func TestEveryFailPointOfTraining(t *testing.T) {
	defer failpoint.Disarm()
	hit := map[failpoint.Point]bool{}
	for _, split := range []bool{false, true} {
		m, rank := trained(t, "qwen2-tiny", golden.Options{Threads: 2})
		inputs := golden.Draw(golden.Rand(3), m.Spec().Vocabulary, 5, 60)
		in, grads := forward.Many(inputs...), cotangentsOf(golden.Rand(4), m.Spec(), inputs)
		if split {
			a, err := rank.Plan(t.Context(), in, onA()...)
			if err != nil {
				t.Fatal(err)
			}
			m, rank = trained(t, "qwen2-tiny", golden.Options{Threads: 2}, trainerrank.WithUsableBytes(a.SmallestBudgetBytes))
		}
		before, free := stateOf(m.Host), m.Host.Free()
		subforwards := 0
		train := func(ctx context.Context) (sum []float32, err error) {
			defer func() {
				unchanged(t, m.Host, before)
				if info, err := rank.Checkpoints().Info("a"); err != nil || info.Live != 0 || m.Host.Free() != free {
					t.Errorf("%d leases are left, %d bytes are free, %d were: %v", info.Live, m.Host.Free(), free, err)
				}
				if err := rank.ZeroGrad(); err != nil {
					t.Error(err)
				}
			}()
			res, err := rank.DPRankForward(ctx, in, onA()...)
			if err != nil {
				return nil, err
			}
			defer res.Release()
			subforwards = res.Telemetry.SubforwardCount
			if err := res.Backward(ctx, grads); err != nil {
				return nil, err
			}
			return gradients(t, rank, "a"), nil
		}
		var want []float32
		count := hits(func() {
			var err error
			if want, err = train(t.Context()); err != nil || (subforwards > 1) != split {
				t.Fatalf("%d subforwards: %v", subforwards, err)
			}
		})
		for point, n := range count {
			hit[point] = hit[point] || n > 0
			for what, do := range map[string]func(*failpoint.Error) error{"an error": failpoint.Fail, "a panic": failpoint.Panic} {
				if what == "a panic" && (point == failpoint.Reserve || point == failpoint.Populate) {
					continue // the operating system does not panic
				}
				for _, i := range some(n) {
					at := fmt.Sprintf("split %t, %s at hit %d of %d of %s", split, what, i, n, point)
					failpoint.Arm(point, i, do)
					var err error
					panicked := caught(func() { _, err = train(t.Context()) })
					failpoint.Disarm()
					if panicked != nil {
						err, _ = panicked.(error)
					}
					var failed *failpoint.Error
					if !errors.As(err, &failed) || failed.Point != point || failed.N != i || (panicked != nil) != (what == "a panic") {
						t.Errorf("%s: %v, as a panic: %t", at, err, panicked != nil)
					}
					if got, err := train(t.Context()); err != nil || !slices.Equal(got, want) {
						t.Errorf("%s: the call after: %v, its gradients are off by %.2e", at, err, distance(got, want))
					}
					if t.Failed() {
						t.FailNow()
					}
				}
			}
		}
	}
	if !hit[failpoint.Backward] || !hit[failpoint.Accumulate] || !hit[failpoint.Block] || !hit[failpoint.Subforward] {
		t.Errorf("hit are %v", hit)
	}
}

// A backward that has failed can be run again, to the bit; one whose gradients could not be added is over, and says that they are lost.
func TestBackwardAfterAFailPoint(t *testing.T) {
	defer failpoint.Disarm()
	m, rank := trained(t, "qwen2-tiny", golden.Options{Threads: 2})
	inputs := golden.Draw(golden.Rand(3), m.Spec().Vocabulary, 5, 60)
	grads := cotangentsOf(golden.Rand(4), m.Spec(), inputs)
	var want []float32
	for _, c := range []struct {
		point failpoint.Point
		lost  bool
	}{{}, {failpoint.Backward, false}, {failpoint.Block, false}, {failpoint.Accumulate, true}} {
		for what, do := range map[string]func(*failpoint.Error) error{"error": failpoint.Fail, "panic": failpoint.Panic} {
			before := stateOf(m.Host)
			res, err := rank.DPRankForward(t.Context(), forward.Many(inputs...), onA()...)
			if err != nil {
				t.Fatal(err)
			}
			if c.point != "" {
				failpoint.Arm(c.point, 1, do)
				var failed *failpoint.Error
				if p := caught(func() { err = res.Backward(t.Context(), grads) }); p != nil {
					err, _ = p.(error)
				}
				if !errors.As(err, &failed) {
					t.Fatalf("%s at %s: %v", what, c.point, err)
				}
				failpoint.Disarm()
			}
			err = res.Backward(t.Context(), grads)
			var over *trainerrank.GraphError
			if c.lost != (errors.As(err, &over) && strings.Contains(over.Reason, "lost")) || !c.lost && err != nil {
				t.Errorf("after a %s at %s: %v", what, c.point, err)
			}
			if got := gradients(t, rank, "a"); want == nil {
				want = got
			} else if !c.lost && !slices.Equal(got, want) {
				t.Errorf("after a %s at %s: other gradients", what, c.point)
			} else if c.lost && slices.ContainsFunc(got, func(v float32) bool { return v != 0 }) {
				t.Errorf("after a %s at %s: some gradients were added", what, c.point)
			}
			res.Release()
			unchanged(t, m.Host, before)
			if err := rank.ZeroGrad(); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// A rank that fails in a collective, before the call has run or after, takes the others with it: an error or a panic on all, nothing left on any; new ranks work.
func TestEveryFailPointInACollective(t *testing.T) {
	const ranks = 3
	folder := golden.FS(t, "qwen2-tiny")
	in := forward.Many(golden.Inputs(golden.Requests(t, folder))[:6]...)
	defer failpoint.Disarm()
	models := make([]*golden.Loaded, ranks)
	for i := range models {
		models[i] = golden.Load(t, folder, golden.Options{})
	}
	want, _ := score(t, wrap(t, models[0].Model), in)
	var mu sync.Mutex // of t
	for name, opts := range map[string]func(w collective.World) (trainerrank.Option, []trainerrank.CallOption){
		"ranks that agree": func(w collective.World) (trainerrank.Option, []trainerrank.CallOption) {
			return trainerrank.WithWorld(w), []trainerrank.CallOption{trainerrank.AgreeAcrossRanks()}
		},
		"ranks that share their inputs": func(w collective.World) (trainerrank.Option, []trainerrank.CallOption) {
			return trainerrank.WithSharedInputs(w), nil
		},
	} {
		// errs are those of the calls, by rank.
		run := func() (errs []error, err error) {
			errs = make([]error, ranks)
			return errs, collective.Run(ranks, func(w collective.World) error {
				m := models[w.Rank()]
				before := stateOf(m.Host)
				defer func() {
					mu.Lock()
					defer mu.Unlock()
					unchanged(t, m.Host, before)
				}()
				world, call := opts(w)
				rank, err := trainerrank.New(m.Model, world)
				if err != nil {
					return err
				}
				res, err := rank.DPRankForward(context.Background(), in, call...)
				if errs[w.Rank()] = err; err != nil {
					return nil
				}
				defer res.Release()
				mu.Lock()
				defer mu.Unlock()
				for i, o := range res.Outputs.Flat() {
					if d := golden.Diff(want[i], golden.Copy(o)); d != "" {
						t.Errorf("%s, rank %d, output %d:\n%s", name, w.Rank(), i, d)
					}
				}
				return nil
			})
		}
		sound := func() {
			if errs, err := run(); errors.Join(append(errs, err)...) != nil {
				t.Fatalf("%s: %v, %v", name, errs, err)
			}
		}
		n := hits(sound)[failpoint.Meet]
		if n < 2*ranks {
			t.Fatalf("%s: the ranks meet %d times", name, n)
		}
		for hit := 1; hit <= n; hit++ {
			for what, do := range map[string]func(*failpoint.Error) error{"error": failpoint.Fail, "panic": failpoint.Panic} {
				failpoint.Arm(failpoint.Meet, hit, do)
				errs, err := run()
				failpoint.Disarm()
				panicked, own := 0, 0
				for rank, e := range errs {
					var gone *collective.AbortError
					var peer *collective.PeerError // it failed where that rank is alone
					var failed *failpoint.Error
					switch {
					case e == nil:
						panicked++
					case errors.As(e, &gone) && errors.As(e, &failed) && failed.N == hit:
						own++
					case !errors.As(e, &peer) || !strings.Contains(peer.Text, fmt.Sprintf("hit %d", hit)):
						t.Errorf("%s, %s at hit %d, rank %d: %v", name, what, hit, rank, e)
					}
				}
				var failed *failpoint.Error
				if what == "error" && own == 0 {
					t.Errorf("%s at hit %d: no rank says that it failed: %v", name, hit, errs)
				}
				if (panicked == 1) != (what == "panic") || panicked > 1 || errors.As(err, &failed) != (what == "panic") {
					t.Errorf("%s, %s at hit %d: %d ranks got no error: %v, %v", name, what, hit, panicked, errs, err)
				}
				sound()
			}
		}
	}
}
