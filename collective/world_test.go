package collective

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"
)

// patience is how long a test waits for what must happen at once, before it says that somebody hangs.
const patience = 30 * time.Second

// sizes are the group sizes that every test runs with; 3 does not divide the lengths.
var sizes = []int{1, 2, 3, 4, 8}

// eachSize runs f for each group size, and looks for goroutines left behind.
func eachSize(t *testing.T, f func(t *testing.T, n int)) {
	for _, n := range sizes {
		t.Run(fmt.Sprintf("ranks=%d", n), func(t *testing.T) {
			noGoroutineLeft(t)
			f(t, n)
		})
	}
}

// noGoroutineLeft fails the test if it ends with more goroutines than it began with.
func noGoroutineLeft(t *testing.T) {
	t.Helper()
	before := runtime.NumGoroutine()
	t.Cleanup(func() {
		var after int
		for range 200 { // a goroutine that is joined still needs a moment to vanish
			if after = runtime.NumGoroutine(); after <= before {
				return
			}
			time.Sleep(time.Millisecond)
		}
		t.Errorf("%d goroutines before, %d after:\n%s", before, after, stacks())
	})
}

func stacks() []byte {
	b := make([]byte, 1<<20)
	return b[:runtime.Stack(b, true)]
}

// inTime is f's result; it fails with all stacks if f hangs.
func inTime(t *testing.T, f func() error) error {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- f() }()
	select {
	case err := <-done:
		return err
	case <-time.After(patience):
		t.Fatalf("hangs:\n%s", stacks())
		return nil
	}
}

// run is Run, in time.
func run(t *testing.T, n int, f func(w World) error) error {
	t.Helper()
	return inTime(t, func() error { return Run(n, f) })
}

// must is run, without error.
func must(t *testing.T, n int, f func(w World) error) {
	t.Helper()
	if err := run(t, n, f); err != nil {
		t.Fatal(err)
	}
}

// sameBits says whether two vectors are equal to the bit.
func sameBits(a, b []float32) bool {
	return slices.EqualFunc(a, b, func(x, y float32) bool { return math.Float32bits(x) == math.Float32bits(y) })
}

// TestOperations is what every world must do; a world of one rank in a group, and Solo, too.
func TestOperations(t *testing.T) {
	eachSize(t, func(t *testing.T, n int) {
		must(t, n, func(w World) error { return operations(t.Context(), w) })
	})
	t.Run("solo", func(t *testing.T) {
		if err := operations(t.Context(), Solo{}); err != nil {
			t.Fatal(err)
		}
	})
}

func operations(ctx context.Context, w World) error {
	n, me := w.Size(), w.Rank()
	if me < 0 || me >= n {
		return fmt.Errorf("rank %d of %d", me, n)
	}
	if err := w.Barrier(ctx, "b"); err != nil {
		return err
	}

	// Messages of different lengths, among them none.
	mine := bytes.Repeat([]byte{byte(me + 1)}, 3*me)
	all, err := w.AllGather(ctx, "g", mine)
	if err != nil {
		return err
	}
	if len(all) != n {
		return fmt.Errorf("%d messages from %d ranks", len(all), n)
	}
	for r, p := range all {
		if p == nil || !bytes.Equal(p, bytes.Repeat([]byte{byte(r + 1)}, 3*r)) {
			return fmt.Errorf("message of rank %d is %v", r, p)
		}
	}
	// The result is this rank's own: change it, grow it, and look whether anybody sees that.
	for r := range all {
		for i := range all[r] {
			all[r][i] = byte(100 + me)
		}
	}
	for r := range all {
		_ = append(all[r], 99)
	}
	if err := w.Barrier(ctx, "changed"); err != nil {
		return err
	}
	for r, p := range all {
		if slices.ContainsFunc(p, func(b byte) bool { return b != byte(100+me) }) {
			return fmt.Errorf("message of rank %d became %v after rank %d's change", r, p, me)
		}
	}
	if slices.ContainsFunc(mine, func(b byte) bool { return b != byte(me+1) }) {
		return fmt.Errorf("the sent message became %v", mine)
	}

	// Admission's one meeting: MAX of what is needed, MIN of what is usable.
	need := []int64{int64(10 * me), -int64(1000 - me)}
	if err := w.AllReduceInt64(ctx, "max", Max, need); err != nil {
		return err
	}
	if want := []int64{int64(10 * (n - 1)), -int64(1000 - (n - 1))}; !slices.Equal(need, want) {
		return fmt.Errorf("max is %v, not %v", need, want)
	}
	least := []int64{int64(5 - me), math.MaxInt64, math.MinInt64}
	if err := w.AllReduceInt64(ctx, "min", Min, least); err != nil {
		return err
	}
	if want := []int64{int64(5 - (n - 1)), math.MaxInt64, math.MinInt64}; !slices.Equal(least, want) {
		return fmt.Errorf("min is %v, not %v", least, want)
	}
	total := []int64{1, int64(me)}
	if err := w.AllReduceInt64(ctx, "sum", Sum, total); err != nil {
		return err
	}
	if want := []int64{int64(n), int64(n * (n - 1) / 2)}; !slices.Equal(total, want) {
		return fmt.Errorf("sum is %v, not %v", total, want)
	}

	// A NaN on one rank wins whatever its rank.
	for _, op := range []Op{Max, Min, Sum} {
		v := []float32{float32(me), 1}
		if me == n-1 {
			v[0] = float32(math.NaN())
		}
		if err := w.AllReduceFloat32(ctx, "nan", op, v); err != nil {
			return err
		}
		if !math.IsNaN(float64(v[0])) || math.IsNaN(float64(v[1])) {
			return fmt.Errorf("%v beside a NaN is %v", op, v)
		}
	}

	// Zero elements are a meeting too.
	if err := w.AllReduceInt64(ctx, "none", Sum, nil); err != nil {
		return err
	}
	if err := w.AllReduceFloat32(ctx, "none", Sum, []float32{}); err != nil {
		return err
	}
	for root := range n {
		p := []byte{byte(me), byte(me)}
		if err := w.Broadcast(ctx, "c", root, p); err != nil {
			return err
		}
		if p[0] != byte(root) || p[1] != byte(root) {
			return fmt.Errorf("rank %d has %v from root %d", me, p, root)
		}
	}
	if err := w.Broadcast(ctx, "c", 0, nil); err != nil {
		return err
	}
	if err := w.Close(); err != nil {
		return err
	}
	return w.Close()
}

// TestLargeOperations crosses the sizes at which work is shared, and the edges of its pieces.
func TestLargeOperations(t *testing.T) {
	lengths := []int{1, taskBytes/4 - 1, taskBytes / 4, taskBytes/4 + 1, 3*taskBytes + 5, 300_001}
	if testing.Short() {
		lengths = lengths[:len(lengths)-1]
	}
	eachSize(t, func(t *testing.T, n int) {
		for _, length := range lengths {
			// What each rank brings, and the sum by the definition: rank after rank.
			floats := make([][]float32, n)
			ints := make([][]int64, n)
			for r := range n {
				floats[r], ints[r] = random(uint64(r), length)
			}
			sum := slices.Clone(floats[0])
			most := slices.Clone(ints[0])
			for r := 1; r < n; r++ {
				for i := range sum {
					sum[i] += floats[r][i]
					most[i] = max(most[i], ints[r][i])
				}
			}
			must(t, n, func(w World) error {
				f, v := slices.Clone(floats[w.Rank()]), slices.Clone(ints[w.Rank()])
				if err := w.AllReduceFloat32(t.Context(), "f", Sum, f); err != nil {
					return err
				}
				if !sameBits(f, sum) {
					return fmt.Errorf("length %d: the sum differs in bits", length)
				}
				if err := w.AllReduceInt64(t.Context(), "i", Max, v); err != nil {
					return err
				}
				if !slices.Equal(v, most) {
					return fmt.Errorf("length %d: the maximum is wrong", length)
				}
				p := make([]byte, length)
				root := n / 2
				if w.Rank() == root {
					for i := range p {
						p[i] = byte(i * 7)
					}
				}
				if err := w.Broadcast(t.Context(), "p", root, p); err != nil {
					return err
				}
				for i := range p {
					if p[i] != byte(i*7) {
						return fmt.Errorf("length %d: byte %d is %d", length, i, p[i])
					}
				}
				all, err := w.AllGather(t.Context(), "g", p[:length/(w.Rank()+1)])
				if err != nil {
					return err
				}
				for r := range all {
					if !bytes.Equal(all[r], p[:length/(r+1)]) {
						return fmt.Errorf("length %d: message of rank %d is wrong", length, r)
					}
				}
				return nil
			})
		}
	})
}

// random has numbers of many magnitudes, so that the order of a sum shows.
func random(seed uint64, length int) ([]float32, []int64) {
	rng := rand.New(rand.NewPCG(seed, 7))
	f, v := make([]float32, length), make([]int64, length)
	for i := range f {
		f[i] = float32(math.Ldexp(rng.Float64()-0.5, rng.IntN(40)-20))
		v[i] = rng.Int64() - math.MaxInt64/2
	}
	return f, v
}

// TestFloatSumIsInRankOrder: (big + small) - big is not big - big + small, and -0 + -0 stays -0.
func TestFloatSumIsInRankOrder(t *testing.T) {
	minusZero := float32(math.Copysign(0, -1))
	brought := [][]float32{{1e8, 1, minusZero}, {1, 1e8, minusZero}, {-1e8, -1e8, minusZero}}
	must(t, 3, func(w World) error {
		v := slices.Clone(brought[w.Rank()])
		if err := w.AllReduceFloat32(t.Context(), "order", Sum, v); err != nil {
			return err
		}
		if want := []float32{0, 0, minusZero}; !sameBits(v, want) {
			return fmt.Errorf("sum is %v, not %v", v, want)
		}
		return nil
	})
	rotated := append(brought[2:3:3], brought[:2]...)
	must(t, 3, func(w World) error {
		v := slices.Clone(rotated[w.Rank()])
		if err := w.AllReduceFloat32(t.Context(), "order", Sum, v); err != nil {
			return err
		}
		if want := []float32{1, 0, minusZero}; !sameBits(v, want) {
			return fmt.Errorf("sum of the rotated is %v, not %v", v, want)
		}
		return nil
	})
}

func TestAgree(t *testing.T) {
	for _, bad := range [][]int{{}, {0}, {3}, {1, 2}, {0, 1, 2, 3}} {
		t.Run(fmt.Sprint(bad), func(t *testing.T) {
			noGoroutineLeft(t)
			must(t, 4, func(w World) error {
				var own error
				if slices.Contains(bad, w.Rank()) {
					own = fmt.Errorf("disk of rank %d: %w", w.Rank(), errors.ErrUnsupported)
				}
				got := Agree(t.Context(), w, own)
				var peer *PeerError
				switch {
				case own != nil:
					if got != own {
						return fmt.Errorf("own error became %v", got)
					}
				case len(bad) == 0:
					if got != nil {
						return fmt.Errorf("all were well, but %v", got)
					}
				case !errors.As(got, &peer) || peer.Rank != bad[0] || peer.Text != fmt.Sprintf("disk of rank %d: unsupported operation", bad[0]):
					return fmt.Errorf("peer's error is %v", got)
				}
				return w.Barrier(t.Context(), "the group lives on")
			})
		})
	}
	t.Run("no text", func(t *testing.T) {
		must(t, 2, func(w World) error {
			var own error
			if w.Rank() == 1 {
				own = errors.New("")
			}
			if Agree(t.Context(), w, own) == nil {
				return errors.New("an error without text was lost")
			}
			return nil
		})
	})
	t.Run("solo", func(t *testing.T) {
		own := errors.New("mine")
		if err := Agree(t.Context(), Solo{}, own); err != own {
			t.Errorf("got %v", err)
		}
		if err := Agree(t.Context(), Solo{}, nil); err != nil {
			t.Errorf("got %v", err)
		}
	})
	t.Run("cancelled", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		own := errors.New("mine")
		if err := Agree(ctx, Solo{}, own); !errors.Is(err, own) || !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
		if err := Agree(ctx, Solo{}, nil); !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
	})
}

// TestArgumentsThatNoWorldAccepts are refused by a group for all ranks, and by Solo.
func TestArgumentsThatNoWorldAccepts(t *testing.T) {
	for name, op := range map[string]func(ctx context.Context, w World) error{
		"int64 op 0":     func(ctx context.Context, w World) error { return w.AllReduceInt64(ctx, "x", 0, nil) },
		"float32 op 4":   func(ctx context.Context, w World) error { return w.AllReduceFloat32(ctx, "x", 4, nil) },
		"root below 0":   func(ctx context.Context, w World) error { return w.Broadcast(ctx, "x", -1, nil) },
		"root above all": func(ctx context.Context, w World) error { return w.Broadcast(ctx, "x", w.Size(), nil) },
	} {
		t.Run(name, func(t *testing.T) {
			var abort *AbortError
			if err := op(t.Context(), Solo{}); !errors.As(err, &abort) || !strings.Contains(err.Error(), "no such") {
				t.Errorf("solo: %v", err)
			}
			g := NewGroup(2)
			if err := op(t.Context(), g.Rank(1)); !errors.As(err, &abort) || abort.Rank != 1 || !strings.Contains(err.Error(), "no such") {
				t.Errorf("group: %v", err)
			}
			if err := g.Rank(0).Barrier(t.Context(), "x"); !errors.Is(err, ErrUnusable) || !errors.Is(err, abort) {
				t.Errorf("the other rank: %v", err)
			}
		})
	}
}

func TestSoloIsNotEndedByAnError(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("the user pressed a key")
	cancel(why)
	for _, f := range each(Solo{}, "x") {
		if err := f(ctx); !errors.Is(err, context.Canceled) || !errors.Is(err, why) {
			t.Errorf("got %v", err)
		}
		if err := f(t.Context()); err != nil {
			t.Errorf("got %v", err)
		}
	}
}

// each is every operation of w, once.
func each(w World, tag string) []func(ctx context.Context) error {
	return []func(ctx context.Context) error{
		func(ctx context.Context) error { return w.Barrier(ctx, tag) },
		func(ctx context.Context) error { _, err := w.AllGather(ctx, tag, []byte{1}); return err },
		func(ctx context.Context) error { return w.AllReduceInt64(ctx, tag, Sum, make([]int64, 3)) },
		func(ctx context.Context) error { return w.AllReduceFloat32(ctx, tag, Sum, make([]float32, 3)) },
		func(ctx context.Context) error { return w.Broadcast(ctx, tag, 0, make([]byte, 3)) },
	}
}
