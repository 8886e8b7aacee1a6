package collective

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"
)

// waitArrived waits until k ranks are at a meeting.
func waitArrived(t *testing.T, g *Group, k int) {
	t.Helper()
	for begun := time.Now(); time.Since(begun) < patience; runtime.Gosched() {
		g.mu.Lock()
		arrived := g.arrived
		g.mu.Unlock()
		if arrived == k {
			return
		}
	}
	t.Fatalf("%d ranks did not arrive:\n%s", k, stacks())
}

// TestEndedWhileSomeWait ends the group when k of its ranks wait, in every way, for every k and operation: the k get the
// error, and those that come later get it too, beside ErrUnusable.
func TestEndedWhileSomeWait(t *testing.T) {
	ways := map[string]struct {
		end  func(g *Group, k int, cancelFirst func()) // while ranks 0 to k-1 wait
		rank func(k int) int
		err  error
	}{
		"a waiting one is cancelled": {func(_ *Group, _ int, cancelFirst func()) { cancelFirst() }, func(int) int { return 0 }, context.Canceled},
		"a waiting one closes":       {func(g *Group, _ int, _ func()) { _ = g.Rank(0).Close() }, func(int) int { return 0 }, ErrClosed},
		"a waiting one calls again": {func(g *Group, _ int, _ func()) { _ = g.Rank(0).Barrier(context.Background(), "again") },
			func(int) int { return 0 }, ErrConcurrent},
		"the missing one closes":  {func(g *Group, k int, _ func()) { _ = g.Rank(k).Close() }, func(k int) int { return k }, ErrClosed},
		"the missing one is late": {func(g *Group, k int, _ func()) { _ = g.Rank(k).Barrier(past(), "x") }, func(k int) int { return k }, context.DeadlineExceeded},
		"abort":                   {func(g *Group, k int, _ func()) { g.Abort(k, errUnsure) }, func(k int) int { return k }, errUnsure},
	}
	const n = 4
	for name, way := range ways {
		for k := 1; k < n; k++ {
			for op := range each(Solo{}, "") {
				t.Run(fmt.Sprintf("%s/waiting=%d/operation=%d", name, k, op), func(t *testing.T) {
					noGoroutineLeft(t)
					g := NewGroup(n)
					ctx, cancel := context.WithCancel(t.Context())
					defer cancel()
					errs := make(chan error, k)
					for r := range k {
						go func() {
							own := t.Context()
							if r == 0 {
								own = ctx
							}
							errs <- each(g.Rank(r), "x")[op](own)
						}()
					}
					waitArrived(t, g, k)
					way.end(g, k, cancel)
					var first *AbortError
					for range k {
						err := inTime(t, func() error { return <-errs })
						abort, ok := err.(*AbortError)
						if !ok || first != nil && abort != first || abort.Rank != way.rank(k) || !errors.Is(abort, way.err) {
							t.Fatalf("a waiting rank got %v", err)
						}
						first = abort
					}
					for r := range n {
						for _, f := range each(g.Rank(r), "later") {
							if err := f(t.Context()); !errors.Is(err, ErrUnusable) || !errors.Is(err, first) {
								t.Fatalf("rank %d got later %v", r, err)
							}
						}
						if err := g.Rank(r).Close(); err != nil {
							t.Fatal(err)
						}
					}
				})
			}
		}
	}
}

// past is a context whose deadline is over.
func past() context.Context {
	ctx, cancel := context.WithDeadline(context.Background(), time.Unix(0, 0))
	cancel()
	return ctx
}

// TestLeavingAfterTheLastOperation: a rank that is faster than the others may close before they have woken from the
// operation that all have done. Nobody gets an error.
func TestLeavingAfterTheLastOperation(t *testing.T) {
	eachSize(t, func(t *testing.T, n int) {
		for range 200 {
			must(t, n, func(w World) error {
				v := make([]float32, 3)
				if err := w.AllReduceFloat32(t.Context(), "last", Sum, v); err != nil {
					return err
				}
				return w.Close()
			})
		}
	})
}

// TestCancelledTooLate: a context that is cancelled when all have come, but before its rank has woken, changes nothing.
func TestCancelledTooLate(t *testing.T) {
	g := NewGroup(2)
	g.ranks[0].giveUp(context.Canceled) // what the rank does then
	err := run(t, 2, func(w World) error { return g.Rank(w.Rank()).Barrier(t.Context(), "x") })
	if err != nil {
		t.Error(err)
	}
}

// TestNextTooEarly: a mismatch is seen when it happens, not when all have come, as the third rank may never come.
func TestNextTooEarly(t *testing.T) {
	noGoroutineLeft(t)
	g := NewGroup(3)
	errs := make(chan error, 1)
	go func() { errs <- g.Rank(2).AllReduceInt64(t.Context(), "admission", Max, make([]int64, 2)) }()
	waitArrived(t, g, 1)
	mine := g.Rank(0).Broadcast(t.Context(), "weights", 1, make([]byte, 7))
	if theirs := inTime(t, func() error { return <-errs }); theirs != mine {
		t.Errorf("one rank got %v, the other %v", mine, theirs)
	}
	want := `collective: ranks do not call the same operation: rank 0: Broadcast "weights" (7 bytes from rank 1); ` +
		`rank 1: nothing yet; rank 2: AllReduceInt64 "admission" (max of 2); ` +
		`hint: the calls of a rank and their order must not depend on what only that rank knows`
	if mine.Error() != want {
		t.Errorf("text is\n%s\nnot\n%s", mine, want)
	}
	if err := g.Rank(1).Barrier(t.Context(), "x"); err == nil || err.Error() != "collective: the group is unusable: "+want {
		t.Errorf("later text is %v", err)
	}
}

func TestTexts(t *testing.T) {
	same := Call{Operation: barrier, Tag: "load/digest"}
	for want, err := range map[string]error{
		`collective: ranks do not call the same operation: ranks 0, 2: Barrier "load/digest"; rank 1: AllReduceFloat32 "g" (sum of 9); hint: the calls of a rank and their order must not depend on what only that rank knows`: &MismatchError{[]Call{same, {Operation: allReduceFloat32, Tag: "g", Op: Sum, Len: 9}, same}},
		`collective: rank 3 ended the group: it has left the group`: &AbortError{3, ErrClosed},
		`rank 1 failed: no such file`:                               &PeerError{1, "no such file"},
		`rank 1: panic: boom (at x.go:3)`:                           &RankError{1, &PanicError{Value: "boom", Where: "x.go:3"}},
		`panic: boom`:                                               &PanicError{Value: "boom"},
	} {
		if err.Error() != want {
			t.Errorf("text is\n%s\nnot\n%s", err, want)
		}
	}
	if Op(9).String() != "op 9" || Min.String() != "min" {
		t.Error("names of ops")
	}
}

// TestOverlap: memory that two ranks bring is refused where it would be written, and allowed where it is only read.
func TestOverlap(t *testing.T) {
	f, v, p := make([]float32, 9), make([]int64, 9), make([]byte, 9)
	for name, c := range map[string]struct {
		op func(ctx context.Context, w World) error
		ok bool
	}{
		"float32, the same": {func(ctx context.Context, w World) error { return w.AllReduceFloat32(ctx, "x", Sum, f) }, false},
		"float32, by one":   {func(ctx context.Context, w World) error { return w.AllReduceFloat32(ctx, "x", Sum, f[4*w.Rank():][:5]) }, false},
		"float32, beside":   {func(ctx context.Context, w World) error { return w.AllReduceFloat32(ctx, "x", Sum, f[4*w.Rank():][:4]) }, true},
		"float32, turned": {func(ctx context.Context, w World) error {
			return w.AllReduceFloat32(ctx, "x", Sum, f[4-4*w.Rank():][:5])
		}, false},
		"int64":              {func(ctx context.Context, w World) error { return w.AllReduceInt64(ctx, "x", Max, v) }, false},
		"int64, beside":      {func(ctx context.Context, w World) error { return w.AllReduceInt64(ctx, "x", Max, v[4*w.Rank():][:4]) }, true},
		"broadcast":          {func(ctx context.Context, w World) error { return w.Broadcast(ctx, "x", 0, p) }, false},
		"broadcast, beside":  {func(ctx context.Context, w World) error { return w.Broadcast(ctx, "x", 0, p[4*w.Rank():][:4]) }, true},
		"gather, which read": {func(ctx context.Context, w World) error { _, err := w.AllGather(ctx, "x", p); return err }, true},
		"of no length":       {func(ctx context.Context, w World) error { return w.AllReduceInt64(ctx, "x", Max, v[:0]) }, true},
	} {
		t.Run(name, func(t *testing.T) {
			err := run(t, 2, func(w World) error { return c.op(t.Context(), w) })
			var abort *AbortError
			if c.ok && err != nil || !c.ok && (!errors.Is(err, ErrOverlap) || !errors.As(err, &abort) || abort.Rank != 1) {
				t.Error(err)
			}
		})
	}
}

// TestRunReports: all errors, in the order of the ranks, each with its number; the first that happened is why the others
// failed.
func TestRunReports(t *testing.T) {
	noGoroutineLeft(t)
	disk := errors.New("disk")
	err := run(t, 3, func(w World) error {
		if w.Rank() == 1 {
			return disk
		}
		return w.Barrier(t.Context(), "b")
	})
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		t.Fatal(err)
	}
	for i, err := range joined.Unwrap() {
		var r *RankError
		if !errors.As(err, &r) || r.Rank != i || !errors.Is(err, disk) {
			t.Errorf("error %d is %v", i, err)
		}
	}
	lines := strings.Split(err.Error(), "\n")
	if len(lines) != 3 || lines[1] != "rank 1: disk" || !strings.HasSuffix(lines[2], "collective: rank 1 ended the group: disk") {
		t.Errorf("text is\n%v", err)
	}
}

// TestFirstWordStays: what a rank does after the group has ended does not change why.
func TestFirstWordStays(t *testing.T) {
	g := NewGroup(2)
	g.Abort(1, nil)
	g.Abort(0, errUnsure)
	_ = g.Rank(0).Close()
	err := g.Rank(1).Barrier(t.Context(), "x")
	var abort *AbortError
	if !errors.As(err, &abort) || abort.Rank != 1 || errors.Is(err, errUnsure) || !strings.Contains(err.Error(), "without a reason") {
		t.Error(err)
	}
}

// TestTwoGroupsAtOnce: groups know nothing of each other; a rank of one may be a rank of another.
func TestTwoGroupsAtOnce(t *testing.T) {
	rows, columns := []*Group{NewGroup(2), NewGroup(2)}, []*Group{NewGroup(2), NewGroup(2)}
	must(t, 4, func(w World) error {
		row, column := w.Rank()/2, w.Rank()%2
		v := []int64{int64(w.Rank())}
		if err := rows[row].Rank(column).AllReduceInt64(t.Context(), "row", Sum, v); err != nil {
			return err
		}
		if err := columns[column].Rank(row).AllReduceInt64(t.Context(), "column", Sum, v); err != nil {
			return err
		}
		if v[0] != 6 {
			return fmt.Errorf("sum is %d", v[0])
		}
		return nil
	})
}

// TestMemoryIsGivenBack: a group does not keep what the ranks brought, and is itself collected without a Close.
func TestMemoryIsGivenBack(t *testing.T) {
	g := NewGroup(2)
	freed := make(chan string, 3)
	func() {
		p := [2]*[1 << 16]float32{new([1 << 16]float32), new([1 << 16]float32)}
		for _, p := range p {
			runtime.AddCleanup(p, func(s string) { freed <- s }, "slice")
		}
		errs := make(chan error, 1)
		go func() { errs <- g.Rank(1).AllReduceFloat32(t.Context(), "x", Sum, p[1][:]) }()
		if err := errors.Join(g.Rank(0).AllReduceFloat32(t.Context(), "x", Sum, p[0][:]), <-errs); err != nil {
			t.Fatal(err)
		}
	}()
	await := func(want string) {
		t.Helper()
		for range 100 {
			runtime.GC()
			select {
			case s := <-freed:
				if s != want {
					t.Fatalf("freed %s", s)
				}
				return
			case <-time.After(time.Millisecond):
			}
		}
		t.Fatalf("%s not freed", want)
	}
	await("slice")
	await("slice")
	runtime.AddCleanup(g, func(s string) { freed <- s }, "group")
	_ = g.Rank(0).Close() // one rank only
	await("group")
}

// TestNoAllocation: operations on numbers make no garbage.
func TestNoAllocation(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	ctx := t.Context()
	v, f := []int64{1, 2}, make([]float32, 100)
	g := NewGroup(1)
	w := g.Rank(0)
	if n := testing.AllocsPerRun(100, func() {
		if w.AllReduceInt64(ctx, "x", Max, v) != nil || w.AllReduceFloat32(ctx, "x", Sum, f) != nil || w.Barrier(ctx, "x") != nil {
			panic("failed")
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// TestSumIsTheSameInEveryRun, whoever does which piece.
func TestSumIsTheSameInEveryRun(t *testing.T) {
	const length = 100_003
	eachSize(t, func(t *testing.T, n int) {
		var first []float32
		for range 10 {
			results := make([][]float32, n)
			must(t, n, func(w World) error {
				v, _ := random(uint64(w.Rank()), length)
				results[w.Rank()] = v
				return w.AllReduceFloat32(t.Context(), "sum", Sum, v)
			})
			if first == nil {
				first = results[0]
			}
			if i := slices.IndexFunc(results, func(v []float32) bool { return !sameBits(v, first) }); i >= 0 {
				t.Fatalf("rank %d has other bits", i)
			}
		}
	})
}

func TestNewGroupOfNobody(t *testing.T) {
	defer func() {
		if recover() == nil {
			t.Error("no panic")
		}
	}()
	NewGroup(0)
}
