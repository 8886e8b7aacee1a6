package collective

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
)

// step is one operation of a history, the same on all ranks unless one goes astray.
type step struct {
	call Call
	seed uint64 // of what the ranks bring
}

// history is a random program of several steps, each with its own tag.
func history(rng *rand.Rand) []step {
	steps := make([]step, 1+rng.IntN(12))
	for i := range steps {
		c := Call{Tag: fmt.Sprintf("step %d", i), Len: rng.IntN(40)}
		if rng.IntN(8) == 0 {
			c.Len = rng.IntN(inlineBytes / 4) // shared by the ranks, mostly
		}
		switch rng.IntN(5) {
		case 0:
			c.Operation = barrier
		case 1:
			c.Operation = allGather
		case 2:
			c.Operation, c.Op = allReduceInt64, Max+Op(rng.IntN(3))
		case 3:
			c.Operation, c.Op = allReduceFloat32, Max+Op(rng.IntN(3))
		case 4:
			c.Operation = broadcast
		}
		steps[i] = step{c, rng.Uint64()}
	}
	return steps
}

// do carries out the step on one rank and checks its result against what all ranks bring, by the definition.
func (s step) do(ctx context.Context, w World) error {
	n, me, c := w.Size(), w.Rank(), s.call
	bringInts := func(r int) []int64 { _, v := random(s.seed+uint64(r), c.Len); return v }
	bringFloats := func(r int) []float32 { v, _ := random(s.seed+uint64(r), c.Len); return v }
	bringBytes := func(r, length int) []byte {
		return bytes.Repeat([]byte{byte(s.seed) + byte(r)}, length)
	}
	wrong := errors.New("wrong result of " + c.String())
	switch c.Operation {
	case barrier:
		return w.Barrier(ctx, c.Tag)
	case allGather:
		all, err := w.AllGather(ctx, c.Tag, bringBytes(me, c.Len*me))
		if err != nil {
			return err
		}
		for r := range n {
			if !bytes.Equal(all[r], bringBytes(r, c.Len*r)) {
				return wrong
			}
		}
	case allReduceInt64:
		v := bringInts(me)
		if err := w.AllReduceInt64(ctx, c.Tag, c.Op, v); err != nil {
			return err
		}
		want := bringInts(0)
		for r := 1; r < n; r++ {
			for i, x := range bringInts(r) {
				switch c.Op {
				case Max:
					want[i] = max(want[i], x)
				case Min:
					want[i] = min(want[i], x)
				case Sum:
					want[i] += x
				}
			}
		}
		if !slices.Equal(v, want) {
			return wrong
		}
	case allReduceFloat32:
		v := bringFloats(me)
		if err := w.AllReduceFloat32(ctx, c.Tag, c.Op, v); err != nil {
			return err
		}
		want := bringFloats(0)
		for r := 1; r < n; r++ {
			for i, x := range bringFloats(r) {
				switch c.Op {
				case Max:
					want[i] = max(want[i], x)
				case Min:
					want[i] = min(want[i], x)
				case Sum:
					want[i] += x
				}
			}
		}
		if !sameBits(v, want) {
			return wrong
		}
	case broadcast:
		p := bringBytes(me, c.Len)
		if err := w.Broadcast(ctx, c.Tag, c.Root%n, p); err != nil {
			return err
		}
		if !bytes.Equal(p, bringBytes(c.Root%n, c.Len)) {
			return wrong
		}
	}
	return nil
}

// astray are the ways in which one rank leaves the common path at a step. Each returns what ends that rank's part, and nil
// only if it left in peace. done is closed when all other ranks have returned.
var astray = map[string]func(ctx context.Context, w World, s step, done <-chan struct{}) error{
	"another operation": func(ctx context.Context, w World, s step, _ <-chan struct{}) error {
		if s.call.Operation == barrier {
			_, err := w.AllGather(ctx, s.call.Tag, nil)
			return err
		}
		return w.Barrier(ctx, s.call.Tag)
	},
	"another tag": func(ctx context.Context, w World, s step, _ <-chan struct{}) error {
		s.call.Tag += "'"
		return s.do(ctx, w)
	},
	"another length": func(ctx context.Context, w World, s step, _ <-chan struct{}) error {
		s.call.Len++
		if s.call.Operation == barrier || s.call.Operation == allGather { // have none
			s.call.Operation = broadcast
		}
		return s.do(ctx, w)
	},
	"another op": func(ctx context.Context, w World, s step, _ <-chan struct{}) error {
		s.call.Op = s.call.Op%Sum + 1
		if s.call.Operation != allReduceFloat32 {
			s.call.Operation = allReduceInt64 // or another operation, if it was no reduction
		}
		return s.do(ctx, w)
	},
	"another root": func(ctx context.Context, w World, s step, _ <-chan struct{}) error {
		s.call.Operation = broadcast
		s.call.Root = 1
		return s.do(ctx, w)
	},
	"the step after": func(ctx context.Context, w World, s step, _ <-chan struct{}) error {
		s.call.Tag = "step after " + s.call.Tag
		s.call.Operation = allGather
		return s.do(ctx, w)
	},
	"closed": func(_ context.Context, w World, _ step, _ <-chan struct{}) error { return w.Close() },
	"closed, then back": func(ctx context.Context, w World, s step, _ <-chan struct{}) error {
		return errors.Join(w.Close(), w.Close(), s.do(ctx, w))
	},
	"cancelled": func(ctx context.Context, w World, s step, _ <-chan struct{}) error {
		ctx, cancel := context.WithCancel(ctx)
		cancel()
		return s.do(ctx, w)
	},
	"past its deadline": func(ctx context.Context, w World, s step, _ <-chan struct{}) error {
		ctx, cancel := context.WithTimeout(ctx, -1)
		defer cancel()
		return s.do(ctx, w)
	},
	"panic":       func(context.Context, World, step, <-chan struct{}) error { panic("boom") },
	"nil pointer": func(context.Context, World, step, <-chan struct{}) error { return errors.New(*(*string)(nil)) },
	"goexit":      func(context.Context, World, step, <-chan struct{}) error { runtime.Goexit(); return nil },
	"own error":   func(context.Context, World, step, <-chan struct{}) error { return errUnsure },
	"returns":     func(context.Context, World, step, <-chan struct{}) error { return nil },
	"bad argument": func(ctx context.Context, w World, s step, _ <-chan struct{}) error {
		return w.Broadcast(ctx, s.call.Tag, 99, nil)
	},
	"two at once": func(ctx context.Context, w World, s step, _ <-chan struct{}) error {
		second := make(chan error, 1)
		w.(*member).using.Store(true) // as if the first were under way
		go func() { second <- s.do(ctx, w) }()
		return <-second
	},
	"missing": func(_ context.Context, _ World, _ step, done <-chan struct{}) error { <-done; return errUnsure },
}

var errUnsure = errors.New("this rank has its own mind")

// ended is the group's last word as err has it: a *MismatchError or an *AbortError, nil if there is none.
func ended(err error) any {
	var mismatch *MismatchError
	var abort *AbortError
	switch {
	case errors.As(err, &mismatch):
		return mismatch
	case errors.As(err, &abort):
		return abort
	}
	return nil
}

// TestHistories runs random programs of which one rank leaves the common path somewhere. Until there all is well on all
// ranks; there, all other ranks fail, with one and the same error.
func TestHistories(t *testing.T) {
	rounds := 6
	if testing.Short() {
		rounds = 2
	}
	for way, deviate := range astray {
		t.Run(way, func(t *testing.T) {
			eachSize(t, func(t *testing.T, n int) {
				if n == 1 {
					return // nobody to leave
				}
				for seed := range uint64(rounds) {
					rng := rand.New(rand.NewPCG(seed, uint64(n)))
					steps := history(rng)
					at, who := rng.IntN(len(steps)), rng.IntN(n)
					ctx, cancel := context.WithCancel(t.Context())
					defer cancel()
					if way == "missing" { // without time-outs only a context helps: one waiting rank's is enough
						var cancelled context.CancelFunc
						ctx, cancelled = context.WithCancel(ctx)
						go cancelled()
					}
					failedAt := make([]int, n)
					errs := make([]error, n)
					var others atomic.Int64
					done := make(chan struct{})
					all := run(t, n, func(w World) error {
						me := w.Rank()
						if me != who {
							defer func() {
								if others.Add(1) == int64(n-1) {
									close(done)
								}
							}()
						}
						for i, s := range steps {
							failedAt[me] = i
							if me == who && i == at {
								errs[me] = deviate(ctx, w, s, done)
								return errs[me]
							}
							own := context.Background() // only the rank before the astray one may be cancelled
							if way == "missing" && i == at && me == (who+1)%n {
								own = ctx
							}
							if errs[me] = s.do(own, w); errs[me] != nil {
								return errs[me]
							}
						}
						return nil
					})
					var last any
					for r := range n {
						if r == who {
							continue
						}
						if failedAt[r] != at || errs[r] == nil {
							t.Fatalf("seed %d: rank %d left at step %d of %d, rank %d at %d with %v", seed, who, at, len(steps), r, failedAt[r], errs[r])
						}
						word := ended(errs[r])
						if last == nil {
							last = word
						}
						if word == nil || word != last {
							t.Fatalf("seed %d: ranks ended differently: %v, and rank %d by %v", seed, last, r, word)
						}
					}
					if word := ended(errs[who]); word != nil && word != last {
						t.Fatalf("seed %d: the astray rank ended by %v, the others by %v", seed, word, last)
					}
					checkLast(t, way, who, n, last)
					if all == nil {
						t.Fatalf("seed %d: Run saw no error", seed)
					}
				}
			})
		})
	}
}

// checkLast checks that the last word tells the truth about the way in which a rank went astray.
func checkLast(t *testing.T, way string, who, n int, last any) {
	t.Helper()
	switch e := last.(type) {
	case *MismatchError:
		if len(e.Calls) != n {
			t.Errorf("%s: %d calls of %d ranks", way, len(e.Calls), n)
		}
		distinct := map[Call]bool{}
		for r, c := range e.Calls {
			if c.Operation != "" {
				distinct[c] = true
			}
			if r != who && c.Operation != "" && c == e.Calls[who] {
				t.Errorf("%s: rank %d is said to have done what astray rank %d did", way, r, who)
			}
		}
		if len(distinct) != 2 {
			t.Errorf("%s: not two different calls: %v", way, e)
		}
	case *AbortError:
		wantRank := who
		if way == "missing" {
			wantRank = (who + 1) % n
		}
		if e.Rank != wantRank {
			t.Errorf("%s: rank %d is blamed, not %d", way, e.Rank, wantRank)
		}
		var p *PanicError
		ok := false
		switch way {
		case "closed", "closed, then back", "returns":
			ok = errors.Is(e, ErrClosed)
		case "cancelled", "missing":
			ok = errors.Is(e, context.Canceled)
		case "past its deadline":
			ok = errors.Is(e, context.DeadlineExceeded)
		case "panic":
			ok = errors.As(e, &p) && p.Value == "boom"
		case "nil pointer":
			ok = errors.As(e, &p) && p.Unwrap() != nil
		case "goexit":
			ok = errors.Is(e, errExit)
		case "own error":
			ok = errors.Is(e, errUnsure)
		case "two at once":
			ok = errors.Is(e, ErrConcurrent)
		case "bad argument":
			ok = true
		}
		if !ok {
			t.Errorf("%s: ended by %v", way, e)
		}
		if p != nil && (!bytes.Contains([]byte(p.Where), []byte("history_test.go:")) || !bytes.Contains(p.Stack, []byte("history_test.go"))) {
			t.Errorf("%s: panicked at %q, stack\n%s", way, p.Where, p.Stack)
		}
	}
}

// TestAnytime ends groups from outside at a random moment, while the ranks work: whatever the moment, all ranks succeed in
// the same steps and fail in the same one.
func TestAnytime(t *testing.T) {
	ways := map[string]func(g *Group, who int, cancel func()){
		"abort":  func(g *Group, who int, _ func()) { g.Abort(who, errUnsure) },
		"close":  func(g *Group, who int, _ func()) { _ = g.Rank(who).Close() },
		"cancel": func(_ *Group, _ int, cancel func()) { cancel() },
	}
	rounds := 40
	if testing.Short() {
		rounds = 15
	}
	for way, strike := range ways {
		t.Run(way, func(t *testing.T) {
			eachSize(t, func(t *testing.T, n int) {
				for seed := range uint64(rounds) {
					rng := rand.New(rand.NewPCG(seed, uint64(n)))
					who := rng.IntN(n)
					sizes := [2]int{3, 1 + rng.IntN(inlineBytes/8)}
					g := NewGroup(n)
					ctx, cancel := context.WithCancel(context.Background())
					moment := rng.Int64N(100)
					var begun atomic.Int64 // steps that rank who has begun
					failedAt := make([]int, n)
					errs := make([]error, n)
					finished := make(chan struct{}, n+1)
					for r := range n {
						go func() {
							defer func() { finished <- struct{}{} }()
							own := context.Background()
							if r == who {
								own = ctx
							}
							v := make([]float32, sizes[1])
							for ; ; failedAt[r]++ { // until it is struck
								size := sizes[0]
								if failedAt[r]%16 == 15 {
									size = sizes[1]
								}
								if r == who {
									begun.Add(1)
								}
								if errs[r] = g.Rank(r).AllReduceFloat32(own, "x", Sum, v[:size]); errs[r] != nil {
									return
								}
							}
						}()
					}
					go func() {
						for begun.Load() < moment {
							runtime.Gosched()
						}
						strike(g, who, cancel)
						finished <- struct{}{}
					}()
					_ = inTime(t, func() error {
						for range n + 1 {
							<-finished
						}
						return nil
					})
					cancel()
					for r := range n {
						if failedAt[r] != failedAt[0] {
							t.Fatalf("seed %d: rank 0 failed at step %d, rank %d at %d", seed, failedAt[0], r, failedAt[r])
						}
						abort, _ := ended(errs[r]).(*AbortError)
						if abort == nil || abort != ended(errs[0]) || abort.Rank != who {
							t.Fatalf("seed %d: rank %d ended by %v, rank 0 by %v", seed, r, errs[r], errs[0])
						}
					}
				}
			})
		})
	}
}
