package trainerrank_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/trainerrank/engine/collective"
	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/internal/golden"
	"github.com/trainerrank/engine/trainerrank"
)

// counted is a world that counts this rank's collectives.
type counted struct {
	collective.World
	n atomic.Int64
}

func (c *counted) Barrier(ctx context.Context, tag string) error {
	c.n.Add(1)
	return c.World.Barrier(ctx, tag)
}

func (c *counted) AllGather(ctx context.Context, tag string, mine []byte) ([][]byte, error) {
	c.n.Add(1)
	return c.World.AllGather(ctx, tag, mine)
}

func (c *counted) AllReduceInt64(ctx context.Context, tag string, op collective.Op, v []int64) error {
	c.n.Add(1)
	return c.World.AllReduceInt64(ctx, tag, op, v)
}

func (c *counted) AllReduceFloat32(ctx context.Context, tag string, op collective.Op, v []float32) error {
	c.n.Add(1)
	return c.World.AllReduceFloat32(ctx, tag, op, v)
}

func (c *counted) Broadcast(ctx context.Context, tag string, root int, p []byte) error {
	c.n.Add(1)
	return c.World.Broadcast(ctx, tag, root, p)
}

// soon is a context that ends long after all that is right has ended: who waits for ever gets an error.
func soon(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// Ranks with the same inputs and unequal memory and threads plan the same, byte for byte, and run it. With equal threads it is what one rank with the least
// of their memory would plan, and what is predicted is observed; otherwise it is observed where most is needed.
func TestRanksThatShareInputsPlanAsOne(t *testing.T) {
	seeds := uint64(24)
	if testing.Short() {
		seeds = 6
	}
	verdicts := map[trainerrank.Verdict]int{}
	for _, ranks := range []int{1, 2, 4} {
		for _, unequal := range []bool{false, true} {
			models := make([]*golden.Loaded, ranks)
			for i := range models {
				threads := 2
				if unequal {
					threads = 1 + (i+1)%3
				}
				models[i] = golden.Load(t, golden.FS(t, "qwen2-tiny"), golden.Options{Threads: threads})
			}
			for seed := range seeds {
				r := golden.Rand(seed)
				in := nested(r, golden.Draw(r, models[0].Spec().Vocabulary, 2+r.IntN(10), 1+r.IntN(200)))
				a, err := wrap(t, models[0].Model).Plan(t.Context(), in)
				if err != nil {
					t.Fatal(err)
				}
				if a.PredictedPeakBytes == 0 {
					continue // nothing is wanted
				}
				usable := make([]int64, ranks)
				for i := range usable {
					usable[i] = a.SmallestBudgetBytes*3/4 + r.Int64N(a.PredictedPeakBytes)
				}
				alone, err := wrap(t, models[0].Model, trainerrank.WithUsableBytes(slices.Min(usable))).Plan(t.Context(), in)
				if err != nil {
					t.Fatal(err)
				}
				plans, peaks, refused := make([]string, ranks), make([]int64, ranks), make([]error, ranks)
				answers := make([][]golden.Answer, ranks)
				ctx := soon(t)
				err = collective.Run(ranks, func(w collective.World) error {
					i, m := w.Rank(), models[w.Rank()]
					peers := &counted{World: w}
					rank, err := trainerrank.New(m.Model, trainerrank.WithSharedInputs(peers), trainerrank.WithUsableBytes(usable[i]))
					if err != nil {
						return err
					}
					before := stateOf(m.Host)
					a, err := rank.Plan(ctx, in)
					if err != nil {
						return err
					}
					text, err := json.Marshal(a)
					plans[i] = string(text)
					if err != nil {
						return err
					}
					calls := peers.n.Load()
					res, err := rank.DPRankForward(ctx, in)
					// One for the facts, and as ever one before it runs and one after it.
					want := [2]int64{2, 3}
					if err != nil {
						want[1] = 2
					}
					if ranks == 1 {
						want = [2]int64{}
					}
					if got := [2]int64{calls, peers.n.Load() - calls}; got != want {
						return fmt.Errorf("%d collectives to plan and to run", got)
					}
					var e *trainerrank.MemoryError
					switch {
					case errors.As(err, &e):
						if e.UsableLimitBytes != slices.Min(usable) || e.SmallestBudgetBytes != a.SmallestBudgetBytes {
							return fmt.Errorf("refused as %+v, planned as %s", e, text)
						}
						refused[i] = err
					case err != nil:
						return err
					default:
						tel := res.Telemetry
						if tel.PredictedPeakBytes != a.PredictedPeakBytes || tel.ObservedPeakBytes > tel.PredictedPeakBytes {
							return fmt.Errorf("planned %d, predicted %d, observed %d", a.PredictedPeakBytes, tel.PredictedPeakBytes, tel.ObservedPeakBytes)
						}
						peaks[i], answers[i] = tel.ObservedPeakBytes, golden.CopyAll(res.Outputs.Flat())
						res.Release()
					}
					if s := stateOf(m.Host); s != before {
						return fmt.Errorf("counters %+v, then %+v", before, s)
					}
					return nil
				})
				if err != nil {
					t.Fatalf("%d ranks, seed %d: %v", ranks, seed, err)
				}
				own, err := json.Marshal(alone)
				if err != nil {
					t.Fatal(err)
				}
				if !unequal && plans[0] != string(own) {
					t.Errorf("%d ranks, seed %d: %s\nalone: %s", ranks, seed, plans[0], own)
				}
				var got trainerrank.Admission
				if err := json.Unmarshal([]byte(plans[0]), &got); err != nil {
					t.Fatal(err)
				}
				verdicts[got.Verdict]++
				for i := range ranks {
					if plans[i] != plans[0] {
						t.Errorf("%d ranks, seed %d: rank 0 plans\n%s\nand rank %d\n%s", ranks, seed, plans[0], i, plans[i])
					}
					if (refused[i] != nil) != (got.Verdict == trainerrank.Refused) {
						t.Errorf("%d ranks, seed %d: rank %d: %v, %s", ranks, seed, i, refused[i], got.Verdict)
					}
					for k := range answers[i] {
						if d := golden.Diff(answers[0][k], answers[i][k]); d != "" {
							t.Errorf("%d ranks, seed %d: rank %d, input %d: %s", ranks, seed, i, k, d)
						}
					}
				}
				if got.Verdict != trainerrank.Refused && slices.Max(peaks) != got.PredictedPeakBytes && !(unequal && got.Verdict == trainerrank.Split) {
					t.Errorf("%d ranks, seed %d: predicted %d, observed %v", ranks, seed, got.PredictedPeakBytes, peaks)
				}
				if t.Failed() {
					return
				}
			}
		}
	}
	t.Logf("verdicts: %v", verdicts)
	if verdicts[trainerrank.Whole] == 0 || verdicts[trainerrank.Split] == 0 || verdicts[trainerrank.Refused] == 0 {
		t.Error("a verdict is missing")
	}
}

// Whatever one of the ranks that share inputs cannot do, none does: each gets an error that says why, nobody waits for ever (#906, #907: a planning exception on
// one rank left the others waiting), and nothing is left. Without a context that ended, the next call works.
func TestNoneGoesOnWithoutAPeer(t *testing.T) {
	const ranks, odd = 3, 1
	folder := golden.FS(t, "qwen2-tiny")
	good := forward.Many(forward.Input{Tokens: tokens(9), Targets: labels(9)}, forward.Input{Tokens: tokens(5), TopK: 2})
	spoilt := errors.New("spoilt")
	type rankOf struct {
		in     forward.Inputs
		ctx    context.Context
		model  *spy
		opts   []trainerrank.Option
		memory *device.Host
		taken  *device.Block
	}
	// A difference is the same error on all ranks.
	differs := func(what string) func(int, error) bool {
		return func(_ int, err error) bool {
			var e *trainerrank.SharedInputsError
			return errors.As(err, &e) && e.Rank == odd && e.What == what && strings.Contains(err.Error(), "rank 1")
		}
	}
	// A failure is the odd rank's own, and the others are told.
	fails := func(own error) func(int, error) bool {
		return func(rank int, err error) bool {
			var peer *collective.PeerError
			return rank == odd && errors.Is(err, own) || rank != odd && errors.As(err, &peer) && peer.Rank == odd && strings.Contains(err.Error(), own.Error())
		}
	}
	// A context that ends, ends the group.
	ends := func(_ int, err error) bool {
		var gone *collective.AbortError
		return errors.Is(err, context.Canceled) && errors.As(err, &gone) && gone.Rank == odd
	}
	for _, c := range []struct {
		name  string
		spoil func(*rankOf)
		right func(rank int, err error) bool
		runs  int64 // forwards on each rank
		over  bool  // the group is
	}{
		{name: "other tokens", right: differs("the inputs"), spoil: func(r *rankOf) {
			r.in = forward.Many(forward.Input{Tokens: append(tokens(8), 3), Targets: labels(9)}, forward.Input{Tokens: tokens(5), TopK: 2})
		}},
		{name: "another output wanted", right: differs("the inputs"), spoil: func(r *rankOf) {
			r.in = forward.Many(forward.Input{Tokens: tokens(9), Targets: labels(9)}, forward.Input{Tokens: tokens(5), TopK: 3})
		}},
		{name: "an input less", right: differs("the inputs"), spoil: func(r *rankOf) { r.in = forward.Many(forward.Input{Tokens: tokens(9), Targets: labels(9)}) }},
		{name: "no input", right: differs("the inputs"), spoil: func(r *rankOf) { r.in = forward.Many() }},
		{name: "another cost", right: differs("the cost of layouts"), spoil: func(r *rankOf) { r.opts = append(r.opts, trainerrank.WithCostTables(dear)) }},
		{name: "other prices of which nobody was told", right: differs("the plan"), spoil: func(r *rankOf) {
			r.model.price = func(f forward.Footprint) forward.Footprint { f.Scratch += device.PageSize; return f }
		}},
		{name: "refused", spoil: func(r *rankOf) { r.opts = append(r.opts, trainerrank.WithUsableBytes(1)) }, right: func(rank int, err error) bool {
			var e *trainerrank.MemoryError // on every rank its own, since all have planned it
			return errors.As(err, &e) && e.UsableLimitBytes == 1
		}},
		{name: "an input that breaks a rule", spoil: func(r *rankOf) { r.in = forward.Many(forward.Input{}) }, right: func(rank int, err error) bool {
			var e *trainerrank.InputError
			var peer *collective.PeerError
			return rank == odd && errors.As(err, &e) || rank != odd && errors.As(err, &peer) && peer.Rank == odd
		}},
		{name: "a rehearsal that fails", right: fails(spoilt), spoil: func(r *rankOf) { r.model.rehearsal = func() error { return spoilt } }},
		{name: "memory that is taken after the facts", spoil: func(r *rankOf) {
			r.model.rehearsal = func() (err error) {
				if r.taken == nil {
					r.taken, err = r.memory.Allocate(device.Ballast, r.memory.Free())
				}
				return err
			}
		}, right: func(rank int, err error) bool {
			var e *trainerrank.MemoryError
			var peer *collective.PeerError
			return rank == odd && errors.As(err, &e) && e.Err != nil || rank != odd && errors.As(err, &peer) && peer.Rank == odd
		}},
		{name: "a forward that fails", right: fails(spoilt), runs: 1, spoil: func(r *rankOf) {
			r.model.after = func(*forward.Pass, error) (*forward.Pass, error) { return nil, spoilt }
		}},
		{name: "a context that has ended", right: ends, over: true, spoil: func(r *rankOf) {
			ctx, cancel := context.WithCancel(r.ctx)
			cancel()
			r.ctx = ctx
		}},
		{name: "a context that ends while it plans", right: ends, over: true, spoil: func(r *rankOf) {
			ctx, cancel := context.WithCancel(r.ctx)
			r.ctx = ctx
			r.model.rehearsal = func() error { cancel(); return nil }
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			models := make([]*golden.Loaded, ranks)
			for i := range models {
				models[i] = golden.Load(t, folder, golden.Options{})
			}
			ctx := soon(t)
			errs := make([]error, ranks)
			err := collective.Run(ranks, func(w collective.World) error {
				m := models[w.Rank()]
				r := rankOf{in: good, ctx: ctx, model: &spy{Model: m.Model}, memory: m.Host}
				if w.Rank() == odd {
					c.spoil(&r)
				}
				rank, err := trainerrank.New(r.model, append(r.opts, trainerrank.WithSharedInputs(w))...)
				if err != nil {
					return err
				}
				before := stateOf(m.Host)
				_, errs[w.Rank()] = rank.DPRankForward(r.ctx, r.in)
				r.taken.Free()
				after := stateOf(m.Host)
				if before != after || r.model.forwards.Load() != c.runs {
					return fmt.Errorf("counters before %+v, after %+v, %d forwards", before, after, r.model.forwards.Load())
				}
				if c.over {
					return nil
				}
				again, err := trainerrank.New(m.Model, trainerrank.WithSharedInputs(w))
				if err != nil {
					return err
				}
				_, err = again.Plan(ctx, good)
				return err
			})
			if err != nil {
				t.Error(err)
			}
			for rank, err := range errs {
				if err == nil || !c.right(rank, err) {
					t.Errorf("rank %d: %v", rank, err)
				}
			}
		})
	}
}

// Two ranks with inputs of their own, each with a peer that shares them: what one of the four cannot do, none does.
func TestPeersTellTheOtherRanks(t *testing.T) {
	folder := golden.FS(t, "qwen2-tiny")
	ctx := soon(t)
	for odd := range 4 {
		rows := [2]*collective.Group{collective.NewGroup(2), collective.NewGroup(2)}    // who shares inputs
		columns := [2]*collective.Group{collective.NewGroup(2), collective.NewGroup(2)} // who does not
		errs := make([]error, 4)
		models := make([]*golden.Loaded, 4)
		for i := range models {
			models[i] = golden.Load(t, folder, golden.Options{})
		}
		err := collective.Run(4, func(w collective.World) error {
			i := w.Rank()
			row, column := i/2, i%2
			opts := []trainerrank.Option{trainerrank.WithWorld(columns[column].Rank(row)), trainerrank.WithSharedInputs(rows[row].Rank(column))}
			model := &spy{Model: models[i].Model}
			if i == odd {
				model.after = func(*forward.Pass, error) (*forward.Pass, error) { return nil, errors.New("spoilt") }
			}
			rank, err := trainerrank.New(model, opts...)
			if err != nil {
				return err
			}
			n := 4 + row
			_, errs[i] = rank.DPRankForward(ctx, forward.Many(forward.Input{Tokens: tokens(n), Targets: labels(n)}), trainerrank.AgreeAcrossRanks())
			return nil
		})
		if err != nil {
			t.Error(err)
		}
		for i, err := range errs {
			if err == nil || !strings.Contains(err.Error(), "spoilt") {
				t.Errorf("rank %d fails, and rank %d says: %v", odd, i, err)
			}
		}
	}
}

// ending is a world in which the context of the n-th collective ends.
type ending struct {
	collective.World
	n int
}

func (e *ending) AllGather(ctx context.Context, tag string, mine []byte) ([][]byte, error) {
	if e.n--; e.n == 0 {
		ended, end := context.WithCancel(ctx)
		end()
		ctx = ended
	}
	return e.World.AllGather(ctx, tag, mine)
}

// The same four, one of whose contexts ends in a meeting with the other ranks, of which its peer knows nothing: none waits.
func TestPeersDoNotWaitForOneThatHasLeft(t *testing.T) {
	models := make([]*golden.Loaded, 4)
	for i := range models {
		models[i] = golden.Load(t, golden.FS(t, "qwen2-tiny"), golden.Options{})
	}
	item := forward.One(forward.Input{Tokens: tokens(5), Targets: labels(5)})
	for name, call := range map[string]func(context.Context, *trainerrank.TrainerRank) error{
		"a call": func(ctx context.Context, rank *trainerrank.TrainerRank) error {
			res, err := rank.DPRankForward(ctx, item, trainerrank.AgreeAcrossRanks())
			if err == nil {
				res.Release()
			}
			return err
		},
		"waves": func(ctx context.Context, rank *trainerrank.TrainerRank) error {
			return waves(ctx, rank, []forward.Inputs{item, item, item}, nil).err
		},
	} {
		last := 0 // the last collective whose end a rank of the other column did not notice
		for n := 1; ; n++ {
			rows := [2]*collective.Group{collective.NewGroup(2), collective.NewGroup(2)}
			columns := [2]*collective.Group{collective.NewGroup(2), collective.NewGroup(2)}
			ctx, left := soon(t), &ending{columns[0].Rank(0), n}
			errs := make([]error, 4)
			err := collective.Run(4, func(w collective.World) error {
				i := w.Rank()
				row, column := i/2, i%2
				world := columns[column].Rank(row)
				if i == 0 {
					world = left
				}
				rank, err := trainerrank.New(models[i].Model, trainerrank.WithWorld(world), trainerrank.WithSharedInputs(rows[row].Rank(column)))
				if err == nil {
					errs[i] = call(ctx, rank)
				}
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
			if left.n > 0 { // there were not so many
				if n < 3 || errors.Join(errs...) != nil || last > 0 && last < n-1 {
					t.Errorf("%s: %d collectives, at the %dth some went on; at last %v", name, n-1, last, errs)
				}
				break
			}
			for i, err := range errs {
				if err == nil && i%2 == 1 { // nothing was left to do
					last = n
				} else if err == nil || errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("%s, collective %d: rank %d: %v", name, n, i, err)
				}
			}
		}
	}
}
