package trainerrank_test

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"math"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/trainerrank/engine/collective"
	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/internal/golden"
	"github.com/trainerrank/engine/trainerrank"
)

// got is what a rank was given of a list: its answers by item, and the numbers of its waves.
type got struct {
	answers map[int][]golden.Answer
	stats   []trainerrank.MicroBatchStats
	err     error
}

// waves runs a list and releases each wave; body is called with the wave first.
func waves(ctx context.Context, rank *trainerrank.TrainerRank, items []forward.Inputs, body func(m *trainerrank.MicroBatch) bool, opts ...trainerrank.CallOption) got {
	g := got{answers: map[int][]golden.Answer{}}
	for m, err := range rank.ForwardMicroBatches(ctx, items, opts...) {
		if err != nil {
			g.err = err
			continue // there must be no other
		}
		if g.err != nil {
			panic("a wave after an error")
		}
		g.stats = append(g.stats, m.Stats)
		for i, k := range m.Indices {
			if g.answers[k] != nil {
				panic(fmt.Sprintf("item %d is given twice", k))
			}
			g.answers[k] = golden.CopyAll(m.Outputs[i].Flat())
		}
		on := body == nil || body(m)
		m.Result.Release()
		if !on {
			break
		}
	}
	return g
}

// itemsOf are random items, of up to three inputs in any nesting.
func itemsOf(seed uint64, vocab, n, longest int) []forward.Inputs {
	r := golden.Rand(seed)
	var inputs []forward.Input
	for len(inputs) < 3*n {
		inputs = append(inputs, golden.Draw(r, vocab, 2+r.IntN(10), 1+r.IntN(longest))...)
	}
	items := make([]forward.Inputs, n)
	for i := range items {
		k := r.IntN(4)
		items[i] = nested(r, inputs[:k])
		inputs = inputs[k:]
	}
	return items
}

// alone is each item by itself.
func alone(t testing.TB, rank *trainerrank.TrainerRank, items []forward.Inputs) [][]golden.Answer {
	t.Helper()
	list := make([][]golden.Answer, len(items))
	for i, item := range items {
		list[i], _ = score(t, rank, item)
	}
	return list
}

// Over 1, 2 and 4 ranks with unequal memory: every item is run once, in order, with the bits that it has alone; the numbers of a wave agree between ranks and with what was
// observed; each wave is the widest that fits; nothing is left. The number of collectives is that of the waves, though ladders and shares are unequal.
func TestWavesGiveEachItemOnce(t *testing.T) {
	seeds := uint64(16)
	if testing.Short() {
		seeds = 4
	}
	folder := golden.FS(t, "qwen2-tiny")
	many, split, empty := 0, 0, 0
	for _, ranks := range []int{1, 2, 4} {
		models := make([]*golden.Loaded, ranks)
		for i := range models {
			models[i] = golden.Load(t, folder, golden.Options{Threads: 1 + i%2})
		}
		for seed := range seeds {
			r := golden.Rand(1000 + seed)
			items := itemsOf(seed, models[0].Spec().Vocabulary, 1+r.IntN(24), 120)
			want := alone(t, wrap(t, models[0].Model), items)
			// Enough for the dearest item, and for some more.
			usable := make([]int64, ranks)
			for i := range usable {
				for _, item := range items {
					a, err := wrap(t, models[i].Model).Plan(t.Context(), item)
					if err != nil {
						t.Fatal(err)
					}
					usable[i] = max(usable[i], a.SmallestBudgetBytes)
				}
				if r.IntN(3) > 0 {
					usable[i] += r.Int64N(1 + 2*usable[i])
				}
			}
			all, counts := make([]got, ranks), make([]int64, ranks)
			ctx := soon(t)
			err := collective.Run(ranks, func(w collective.World) error {
				i, m, world := w.Rank(), models[w.Rank()], &counted{World: w}
				rank, err := trainerrank.New(m.Model, trainerrank.WithWorld(world), trainerrank.WithUsableBytes(usable[i]))
				if err != nil {
					return err
				}
				before := stateOf(m.Host)
				m.Host.ResetPeak()
				all[i] = waves(ctx, rank, items, func(b *trainerrank.MicroBatch) bool {
					s, tel, peak := b.Stats, b.Result.Telemetry, m.Host.Stats().PeakInUse-before.InUse.Total()
					m.Host.ResetPeak()
					if tel.ObservedPeakBytes != s.RequiredBytes || s.RequiredBytes > s.AvailableBytes || s.AvailableBytes != usable[i] || tel.SubforwardCount != s.SubforwardCount {
						err = fmt.Errorf("%+v, %+v, %d observed", s, tel, peak)
					}
					if s.LocalCount != len(b.Indices) || len(b.Inputs) != len(b.Indices) || len(b.Outputs) != len(b.Indices) || s.SubforwardCount > 1 && !s.ColdStart {
						err = fmt.Errorf("%+v, %d items", s, len(b.Indices))
					}
					if d := cmp.Diff(b.Indices, trainerrank.Select(b, ascending(len(items)))); d != "" {
						err = errors.New(d)
					}
					return true
				})
				counts[i] = world.n.Load()
				if s := stateOf(m.Host); s != before {
					err = fmt.Errorf("counters before %+v and after %+v", before, s)
				}
				return errors.Join(err, all[i].err)
			})
			if err != nil {
				t.Fatalf("%d ranks, seed %d: %v", ranks, seed, err)
			}
			next := 0
			for n, s := range all[0].stats {
				if s.GlobalStart != next || s.GlobalCount != s.GlobalStop-s.GlobalStart || s.GlobalCount < min(ranks, len(items)-next) {
					t.Fatalf("%d ranks, seed %d: wave %d after %d items: %+v", ranks, seed, n, next, s)
				}
				next = s.GlobalStop
				local := 0
				for _, g := range all {
					o := g.stats[n]
					local += o.LocalCount
					if o.GlobalStart != s.GlobalStart || o.GlobalStop != s.GlobalStop || o.ColdStart != s.ColdStart {
						t.Errorf("%d ranks, seed %d: %+v here and %+v there", ranks, seed, s, o)
					}
					split += max(0, o.SubforwardCount-1)
					if o.LocalCount == 0 {
						empty++
						if o.SubforwardCount != 0 || o.RequiredBytes != 0 {
							t.Errorf("an empty share: %+v", o)
						}
					}
				}
				if local != s.GlobalCount {
					t.Errorf("%d ranks, seed %d: %+v, %d in all", ranks, seed, s, local)
				}
				// The widest: an item more per rank, or to the end, does not fit whole everywhere.
				fits := true
				for i := range ranks {
					var share []forward.Inputs
					for k := s.GlobalStart + i; k < min(s.GlobalStop+ranks, len(items)); k += ranks {
						share = append(share, items[k])
					}
					a, err := wrap(t, models[i].Model, trainerrank.WithUsableBytes(usable[i])).Plan(t.Context(), forward.Nest(share...))
					if err != nil {
						t.Fatal(err)
					}
					fits = fits && a.Verdict == trainerrank.Whole
				}
				if fits && s.GlobalStop < len(items) {
					t.Errorf("%d ranks, seed %d: wave %d could be wider: %+v", ranks, seed, n, s)
				}
			}
			many += max(0, len(all[0].stats)-1)
			if next != len(items) {
				t.Errorf("%d ranks, seed %d: %d of %d items", ranks, seed, next, len(items))
			}
			for i, g := range all {
				// One about checkpoints, as in every call; one about the list; three for a wave. A rank alone has but the first.
				if n := int64(2 + 3*len(g.stats)); ranks > 1 && counts[i] != n || ranks == 1 && counts[i] != 1 {
					t.Errorf("%d ranks, seed %d: %d collectives for %d waves", ranks, seed, counts[i], len(g.stats))
				}
			}
			for k := range items {
				n := 0
				for _, g := range all {
					answers, mine := g.answers[k]
					if !mine {
						continue
					}
					n++
					for j := range want[k] {
						if d := golden.Diff(want[k][j], answers[j]); d != "" {
							t.Errorf("%d ranks, seed %d: item %d, input %d: %s", ranks, seed, k, j, d)
						}
					}
				}
				if n != 1 {
					t.Errorf("%d ranks, seed %d: item %d is given %d times", ranks, seed, k, n)
				}
			}
			if t.Failed() {
				t.FailNow()
			}
		}
	}
	t.Logf("%d waves beside the first, %d further subforwards, %d empty shares", many, split, empty)
	if many == 0 || split == 0 || empty == 0 {
		t.Error("there was too little of something")
	}
}

// plain are items of one input each, of these lengths, that share nothing.
func plain(lengths ...int) []forward.Inputs {
	items := make([]forward.Inputs, len(lengths))
	for i, n := range lengths {
		items[i] = forward.One(forward.Input{Tokens: tokens(n + i)[i:], Targets: labels(n)})
	}
	return items
}

// room is what a model needs for items as one call.
func room(t testing.TB, m forward.Model, items ...forward.Inputs) int64 {
	t.Helper()
	a, err := wrap(t, m).Plan(t.Context(), forward.Nest(items...))
	if err != nil {
		t.Fatal(err)
	}
	return a.PredictedPeakBytes
}

// Whatever goes wrong on one rank while others are well: all are told with the same wave, or, where a rank only leaves, those that go on; nobody waits for ever;
// nothing is left; and the same ranks go on with the next call. (#906, #907: planning that failed on one rank left the others waiting. #872: the error path entered
// collectives of its own.)
func TestWavesFailOnAllRanksOrNone(t *testing.T) {
	const ranks, odd = 3, 1
	folder := golden.FS(t, "qwen2-tiny")
	items := plain(30, 31, 32, 33, 34, 35, 36) // waves of 3, 3 and 1: the last share of ranks 1 and 2 is empty
	spoilt := errors.New("spoilt")
	type rankOf struct {
		items  []forward.Inputs
		ctx    context.Context
		model  *spy
		memory *device.Host
		usable int64
		taken  *device.Block
		body   func(m *trainerrank.MicroBatch) bool
	}
	peer := func(err error) bool {
		var e *collective.PeerError
		return errors.As(err, &e) && e.Rank == odd
	}
	fails := func(own error) func(int, error) bool {
		return func(rank int, err error) bool {
			return rank == odd && errors.Is(err, own) || rank != odd && peer(err) && strings.Contains(err.Error(), own.Error())
		}
	}
	ends := func(_ int, err error) bool {
		var gone *collective.AbortError
		return errors.Is(err, context.Canceled) && errors.As(err, &gone) && gone.Rank == odd
	}
	fine := func(_ int, err error) bool { return err == nil }
	// refuses is a refusal, on the other ranks on the odd one's account, with the numbers of their own plan.
	refuses := func(rank int, err error) bool {
		var e *trainerrank.MemoryError
		text := strings.ToLower(fmt.Sprint(err))
		if !errors.As(err, &e) || !strings.Contains(text, "unable to find a feasible split") || !strings.Contains(e.Suggestion, "smaller") || strings.Contains(text, "infeasible") {
			return false
		}
		return rank == odd || peer(err) && strings.Contains(text, "another data-parallel rank") && e.PredictedPeakBytes > 0 && e.PredictedPeakBytes <= e.UsableLimitBytes
	}
	for _, c := range []struct {
		name  string
		spoil func(*rankOf)
		all   func(rank int, r *rankOf)
		right func(rank int, err error) bool
		waves int // given to each rank
		over  bool
	}{
		{name: "all well", right: fine, waves: 3},
		{name: "a list that is shorter", waves: 0, spoil: func(r *rankOf) { r.items = items[:6] }, right: func(_ int, err error) bool {
			var e *trainerrank.ItemsError
			return errors.As(err, &e) && slices.Equal(e.Counts, []int{7, 6, 7}) && e.Rank == odd && strings.Contains(err.Error(), "7 6 7") && strings.Contains(err.Error(), "DPRankForward")
		}},
		{name: "a list that differs", spoil: func(r *rankOf) { r.items = plain(30, 31, 32, 33, 34, 36, 35) }, right: func(_ int, err error) bool {
			var e *trainerrank.ItemsError
			return errors.As(err, &e) && e.Rank == odd && strings.Contains(err.Error(), "7 items each")
		}},
		{name: "no list", spoil: func(r *rankOf) { r.items = nil }, right: func(_ int, err error) bool {
			var e *trainerrank.ItemsError
			return errors.As(err, &e) && slices.Equal(e.Counts, []int{7, 0, 7})
		}},
		{name: "an input that breaks a rule", spoil: func(r *rankOf) {
			r.items = slices.Clone(items)
			r.items[5] = forward.Many(forward.Input{Tokens: tokens(3)}, forward.Input{})
		}, right: func(rank int, err error) bool {
			var e *trainerrank.InputError
			return rank == odd && errors.As(err, &e) && e.Path == "inputs[5][1]" || rank != odd && peer(err)
		}},
		{name: "a rehearsal that fails while the width is searched for", waves: 1, right: fails(spoilt), spoil: func(r *rankOf) {
			r.body = func(*trainerrank.MicroBatch) bool { r.model.rehearsal = func() error { return spoilt }; return true }
		}},
		{name: "a forward that fails", waves: 1, right: fails(spoilt), spoil: func(r *rankOf) {
			r.body = func(*trainerrank.MicroBatch) bool {
				r.model.after = func(*forward.Pass, error) (*forward.Pass, error) { return nil, spoilt }
				return true
			}
		}},
		{name: "the smallest wave is refused (#872)", waves: 1, right: refuses, spoil: func(r *rankOf) {
			r.body = func(*trainerrank.MicroBatch) bool {
				r.taken, _ = r.memory.Allocate(device.Ballast, r.memory.Free()&^(device.PageSize-1)-device.PageSize)
				return true
			}
		}},
		{name: "memory that is taken when the wave is planned (#899)", waves: 1, right: func(rank int, err error) bool {
			var e *trainerrank.MemoryError
			return errors.As(err, &e) && (rank == odd || peer(err))
		}, spoil: func(r *rankOf) {
			r.body = func(*trainerrank.MicroBatch) bool {
				r.model.rehearsal = func() (err error) {
					if r.taken == nil {
						r.taken, err = r.memory.Allocate(device.Ballast, r.memory.Free())
					}
					return err
				}
				return true
			}
		}},
		{name: "one leaves after the first wave", waves: 1, right: func(rank int, err error) bool {
			return rank == odd && err == nil || rank != odd && peer(err) && strings.Contains(err.Error(), "left the loop") && strings.Contains(err.Error(), "item 3")
		}, spoil: func(r *rankOf) { r.body = func(*trainerrank.MicroBatch) bool { return false } }},
		{name: "all leave after the first wave", waves: 1, right: fine, all: func(_ int, r *rankOf) { r.body = func(*trainerrank.MicroBatch) bool { return false } }},
		{name: "one leaves after the last wave", waves: 3, right: fine, spoil: func(r *rankOf) {
			r.body = func(m *trainerrank.MicroBatch) bool { return m.Stats.GlobalStop < 7 }
		}},
		{name: "a context that ends in the loop", waves: 1, right: ends, over: true, spoil: func(r *rankOf) {
			ctx, cancel := context.WithCancel(r.ctx)
			r.ctx = ctx
			r.body = func(*trainerrank.MicroBatch) bool { cancel(); return true }
		}},
		{name: "a context that ends while a forward runs", waves: 1, right: ends, over: true, spoil: func(r *rankOf) {
			ctx, cancel := context.WithCancel(r.ctx)
			r.ctx = ctx
			r.body = func(*trainerrank.MicroBatch) bool {
				r.model.before = func(context.Context, *forward.Batch) { cancel() }
				return true
			}
		}},
		{name: "one leaves with a context that has ended", waves: 1, over: true, spoil: func(r *rankOf) {
			ctx, cancel := context.WithCancel(r.ctx)
			r.ctx = ctx
			r.body = func(*trainerrank.MicroBatch) bool { cancel(); return false }
		}, right: func(rank int, err error) bool { return rank == odd && err == nil || rank != odd && ends(rank, err) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			models := make([]*golden.Loaded, ranks)
			for i := range models {
				models[i] = golden.Load(t, folder, golden.Options{})
			}
			usable := room(t, models[0].Model, items[6])
			want := alone(t, wrap(t, models[0].Model), items)
			ctx := soon(t)
			all := make([]got, ranks)
			err := collective.Run(ranks, func(w collective.World) error {
				m := models[w.Rank()]
				r := rankOf{items: items, ctx: ctx, model: &spy{Model: m.Model}, memory: m.Host, usable: usable}
				if c.all != nil {
					c.all(w.Rank(), &r)
				}
				if w.Rank() == odd && c.spoil != nil {
					c.spoil(&r)
				}
				rank, err := trainerrank.New(r.model, trainerrank.WithWorld(w), trainerrank.WithUsableBytes(r.usable))
				if err != nil {
					return err
				}
				before := stateOf(m.Host)
				all[w.Rank()] = waves(r.ctx, rank, r.items, r.body)
				r.taken.Free()
				if s := stateOf(m.Host); s != before {
					return fmt.Errorf("counters before %+v and after %+v", before, s)
				}
				if c.over {
					return nil
				}
				again, err := trainerrank.New(m.Model, trainerrank.WithWorld(w))
				if err != nil {
					return err
				}
				g := waves(ctx, again, items, nil)
				if g.err == nil && len(g.stats) != 1 {
					g.err = fmt.Errorf("%d waves", len(g.stats))
				}
				for k, answers := range g.answers {
					if d := golden.Diff(want[k][0], answers[0]); d != "" {
						g.err = errors.Join(g.err, errors.New(d))
					}
				}
				return g.err
			})
			if err != nil {
				t.Error(err)
			}
			for rank, g := range all {
				if !c.right(rank, g.err) || len(g.stats) != c.waves {
					t.Errorf("rank %d: %d waves, then: %v", rank, len(g.stats), g.err)
				}
			}
		})
	}
}

// Results that are kept make the next waves narrower, and in the end they are refused; released, they do not. What is abandoned comes back by itself (#872:
// the outputs of a wave were held beyond it).
func TestKeptResultsNarrowTheWaves(t *testing.T) {
	m, _ := load(t, golden.FS(t, "qwen2-tiny"), golden.Options{})
	var items []forward.Inputs
	for range 24 {
		items = append(items, forward.One(forward.Input{Tokens: tokens(40), Logits: true}))
	}
	usable := room(t, m.Model, items[:6]...)
	dev, err := device.NewHost(2 * usable)
	if err != nil {
		t.Fatal(err)
	}
	rank := wrap(t, m.Model, trainerrank.WithDevice(dev), trainerrank.WithUsableBytes(usable))
	released := waves(t.Context(), rank, items, nil)
	if released.err != nil || len(released.stats) != 4 {
		t.Errorf("%+v", released.stats)
	}
	var kept []*trainerrank.Result
	var widths []int
	err = nil
	for b, e := range rank.ForwardMicroBatches(t.Context(), items) {
		if err = e; err != nil {
			break
		}
		kept, widths = append(kept, b.Result), append(widths, b.Stats.GlobalCount)
	}
	var refusal *trainerrank.MemoryError
	if !errors.As(err, &refusal) || len(widths) < 2 || widths[0] != 6 || !slices.IsSortedFunc(widths, func(a, b int) int { return b - a }) {
		t.Errorf("widths %v, then %v", widths, err)
	}
	if tel, err := rank.LastForwardTelemetry(); err != nil || refusal == nil || tel.PredictedPeakBytes != refusal.PredictedPeakBytes {
		t.Errorf("the telemetry is not the refusal's: %+v, %v", tel, err)
	}
	for _, r := range kept {
		r.Release()
	}
	if n := dev.Stats().Allocated; n != 0 {
		t.Errorf("%d bytes are left", n)
	}
	n := 0
	for _, err := range rank.ForwardMicroBatches(t.Context(), items) { // none is released
		if err != nil {
			t.Fatal(err)
		}
		n++
		if !collected(func() bool { return dev.Stats().Allocated == 0 }) {
			t.Fatal("the iterator holds what it handed out")
		}
	}
	if n != 4 {
		t.Errorf("%d waves", n)
	}
}

// The body of the loop may make other calls, other goroutines too; the loop can be run again, and pulled.
func TestWavesAndOtherCalls(t *testing.T) {
	m, _ := load(t, golden.FS(t, "qwen2-tiny"), golden.Options{})
	items := plain(20, 21, 22, 23, 24)
	rank := wrap(t, m.Model, trainerrank.WithUsableBytes(room(t, m.Model, items[3:]...)))
	want := alone(t, rank, items)
	before := stateOf(m.Host)
	ctx, cancel := context.WithCancel(soon(t))
	var wg sync.WaitGroup
	wg.Go(func() {
		for ctx.Err() == nil {
			if res, err := rank.DPRankForward(ctx, items[0]); err == nil {
				res.Release()
			}
		}
	})
	seq := rank.ForwardMicroBatches(soon(t), items)
	for range 3 {
		next := 0
		for b, err := range seq {
			if err != nil {
				t.Fatal(err)
			}
			for i, k := range b.Indices {
				if d := golden.Diff(want[k][0], golden.Copy(b.Outputs[i].Output())); d != "" || k != next {
					t.Errorf("item %d, the next is %d: %s", k, next, d)
				}
				next++
			}
			res, err := rank.DPRankForward(soon(t), items[4])
			if err != nil {
				t.Fatal(err)
			}
			res.Release()
			b.Result.Release()
		}
		if next != len(items) {
			t.Errorf("%d items", next)
		}
	}
	cancel()
	wg.Wait()
	pull, stop := iter.Pull2(seq)
	b, err, ok := pull()
	if err != nil || !ok || b.Stats.GlobalStop == len(items) {
		t.Fatalf("%+v, %v", b, err)
	}
	stop()
	if d := golden.Diff(want[0][0], golden.Copy(b.Outputs[0].Output())); d != "" { // what was handed out stays valid
		t.Error(d)
	}
	b.Result.Release()
	unchanged(t, m.Host, before)
}

// A body that panics or ends its goroutine takes nothing with it: the rank goes on.
func TestWavesWhoseBodyEnds(t *testing.T) {
	m, _ := load(t, golden.FS(t, "qwen2-tiny"), golden.Options{})
	items := plain(20, 21, 22)
	rank := wrap(t, m.Model, trainerrank.WithUsableBytes(room(t, m.Model, items[2])))
	before := stateOf(m.Host)
	for _, end := range []func(){func() { panic("the body") }, runtime.Goexit} {
		done := make(chan any)
		go func() {
			defer func() { done <- recover() }()
			for b, err := range rank.ForwardMicroBatches(t.Context(), items) {
				if err != nil {
					t.Error(err)
				}
				b.Result.Release()
				end()
			}
		}()
		<-done
		unchanged(t, m.Host, before)
		if g := waves(soon(t), rank, items, nil); g.err != nil || len(g.answers) != 3 {
			t.Errorf("%+v", g)
		}
	}
}

// Lists in which there is little or nothing to do.
func TestWavesOfNothing(t *testing.T) {
	folder := golden.FS(t, "qwen2-tiny")
	idle := forward.One(forward.Input{Tokens: tokens(4)})
	for name, items := range map[string][]forward.Inputs{
		"no items": nil, "an item without inputs": {forward.Many()}, "nothing wanted": {idle, forward.Many(forward.Input{Tokens: tokens(3)}), idle},
	} {
		for _, ranks := range []int{1, 2} {
			models := []*golden.Loaded{golden.Load(t, folder, golden.Options{}), golden.Load(t, folder, golden.Options{})}
			all := make([]got, ranks)
			ctx := soon(t)
			err := collective.Run(ranks, func(w collective.World) error {
				rank, err := trainerrank.New(&spy{Model: models[w.Rank()].Model, before: func(context.Context, *forward.Batch) { t.Error("the model ran") }}, trainerrank.WithWorld(w), trainerrank.WithUsableBytes(0))
				if err != nil {
					return err
				}
				all[w.Rank()] = waves(ctx, rank, items, nil)
				return all[w.Rank()].err
			})
			if err != nil {
				t.Errorf("%s on %d ranks: %v", name, ranks, err)
			}
			for rank, g := range all {
				n := (len(items) + ranks - 1 - rank) / ranks
				if len(g.answers) != n || len(g.stats) != min(1, len(items)) {
					t.Errorf("%s: rank %d of %d: %+v", name, rank, ranks, g.stats)
				}
			}
		}
	}
}

// Two rows of two ranks: a row shares its inputs, so that both of its ranks take the same share of the list; the rows take turns. The one rank of the four that has
// least memory makes the waves narrow for all.
func TestWavesOfRanksThatShareInputs(t *testing.T) {
	folder := golden.FS(t, "qwen2-tiny")
	models := make([]*golden.Loaded, 4)
	for i := range models {
		models[i] = golden.Load(t, folder, golden.Options{Threads: 1 + i%2})
	}
	items := itemsOf(5, models[0].Spec().Vocabulary, 17, 80)
	want := alone(t, wrap(t, models[0].Model), items)
	var least int64
	for _, item := range items {
		least = max(least, room(t, models[1].Model, item))
	}
	var narrow [4]int
	for poor := range 4 {
		rows := [2]*collective.Group{collective.NewGroup(2), collective.NewGroup(2)}
		columns := [2]*collective.Group{collective.NewGroup(2), collective.NewGroup(2)}
		ctx := soon(t)
		all := make([]got, 4)
		counts := make([][2]int64, 4)
		err := collective.Run(4, func(w collective.World) error {
			i := w.Rank()
			row, column := i/2, i%2
			peers, world := &counted{World: rows[row].Rank(column)}, &counted{World: columns[column].Rank(row)}
			usable := int64(math.MaxInt64)
			if i == poor {
				usable = least
			}
			rank, err := trainerrank.New(models[i].Model, trainerrank.WithWorld(world), trainerrank.WithSharedInputs(peers), trainerrank.WithUsableBytes(usable))
			if err != nil {
				return err
			}
			all[i] = waves(ctx, rank, items, nil)
			counts[i] = [2]int64{peers.n.Load(), world.n.Load()}
			return all[i].err
		})
		if err != nil {
			t.Fatal(err)
		}
		narrow[poor] = len(all[0].stats)
		for i, g := range all {
			other := all[i^1] // of its row
			if d := cmp.Diff(g.stats, other.stats); d != "" {
				t.Errorf("rank %d and its peer: %s", i, d)
			}
			if d := cmp.Diff(g.answers, other.answers); d != "" {
				t.Errorf("rank %d and its peer: %s", i, d)
			}
			if n := int64(len(g.stats)); counts[i] != [2]int64{1 + 4*n, 2 + 3*n} {
				t.Errorf("rank %d: %d collectives for %d waves", i, counts[i], n)
			}
			for k, answers := range g.answers {
				if k%2 != i/2 && len(g.stats) == 1 {
					t.Errorf("item %d is row %d's", k, i/2)
				}
				for j := range answers {
					if d := golden.Diff(want[k][j], answers[j]); d != "" {
						t.Errorf("rank %d, item %d: %s", i, k, d)
					}
				}
			}
		}
		if n := len(all[0].answers) + len(all[2].answers); n != len(items) {
			t.Errorf("%d of %d items", n, len(items))
		}
	}
	if slices.Min(narrow[:]) < 2 {
		t.Errorf("%v waves", narrow)
	}
}

// A list is trained on in waves, each with its backward: the same gradients as in one call, in the memory of a wave. A wave whose backward is not run keeps its graph, and
// there is no room for the next.
func TestTrainingInWaves(t *testing.T) {
	m, rank := trained(t, "qwen2-tiny", golden.Options{Threads: 2})
	inputs := golden.Inputs(golden.Requests(t, golden.FS(t, "qwen2-tiny")))
	items := make([]forward.Inputs, len(inputs))
	for i, in := range inputs {
		items[i] = forward.One(in)
	}
	grads := cotangentsOf(golden.Rand(1), m.Spec(), inputs)
	res, err := rank.DPRankForward(t.Context(), forward.Many(inputs...), onA()...)
	if err != nil {
		t.Fatal(err)
	}
	if err := res.Backward(t.Context(), grads); err != nil {
		t.Fatal(err)
	}
	whole := res.Telemetry.PredictedPeakBytes
	res.Release()
	want := gradients(t, rank, "a")
	if err := rank.ZeroGrad(); err != nil {
		t.Fatal(err)
	}
	before := m.Host.Stats()
	ballast, err := m.Host.Allocate(device.Ballast, m.Host.Free()-device.RoundPages(whole*2/3))
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for b, err := range rank.ForwardMicroBatches(t.Context(), items, onA()...) {
		if err != nil {
			t.Fatal(err)
		}
		if err := b.Result.Backward(t.Context(), trainerrank.Select(b, grads)); err != nil {
			t.Fatal(err)
		}
		if got := b.Result.ObservedPeakBytes(); got != b.Stats.RequiredBytes || got > b.Stats.AvailableBytes {
			t.Errorf("%+v, %d observed", b.Stats, got)
		}
		b.Result.Release()
		n++
	}
	if d := distance(gradients(t, rank, "a"), want); n < 2 || d > 1e-5 {
		t.Errorf("the gradients of %d waves are %g off", n, d)
	}
	var kept []*trainerrank.Result
	var refusal *trainerrank.MemoryError
	for b, err := range rank.ForwardMicroBatches(t.Context(), items, onA(trainerrank.WithRetentions(trainerrank.Stored))...) {
		if err != nil {
			if !errors.As(err, &refusal) {
				t.Error(err)
			}
			break
		}
		kept = append(kept, b.Result)
	}
	if refusal == nil || len(kept) == 0 {
		t.Errorf("%d graphs are live, and the next wave: %v", len(kept), refusal)
	}
	for _, r := range kept {
		r.Release()
	}
	ballast.Free()
	if s := m.Host.Stats(); s.Allocated != before.Allocated {
		t.Errorf("%d bytes before, %d after", before.Allocated, s.Allocated)
	}
}

// What one rank has learned and another has not decides for both: the wave is the smallest until all have learned, and then as wide as the one that has seen least trusts
// (#840: a rank that judged by itself that it was warm ran another wave than its peers, and they hung).
func TestRanksThatHaveLearnedUnequally(t *testing.T) {
	inputs := apart(128, 2)
	items := make([]forward.Inputs, len(inputs))
	for i := range inputs {
		items[i] = forward.One(inputs[i])
	}
	models := []*scripted{script(t, perToken(1000)), script(t, perToken(3000))}
	all := make([]got, 2)
	ctx := soon(t)
	err := collective.Run(2, func(w collective.World) error {
		i := w.Rank()
		opts := []trainerrank.Option{trainerrank.WithWorld(w)}
		if i == 1 {
			opts = append(opts, trainerrank.WithProfile(after(t, models[1], inputs)))
		}
		rank, err := trainerrank.New(models[i], opts...)
		if err != nil {
			return err
		}
		all[i] = waves(ctx, rank, items, nil)
		return all[i].err
	})
	if err != nil {
		t.Fatal(err)
	}
	var widths []int
	for n, s := range all[0].stats {
		widths = append(widths, s.GlobalCount)
		o := all[1].stats[n]
		if s.ColdStart != (n == 0) || o.ColdStart != s.ColdStart || o.GlobalStart != s.GlobalStart || o.GlobalStop != s.GlobalStop {
			t.Errorf("wave %d: %+v on rank 0, %+v on rank 1", n, s, o)
		}
	}
	if !slices.Equal(widths, []int{2, 16, 110}) || len(all[1].stats) != len(widths) || len(all[0].answers)+len(all[1].answers) != len(items) {
		t.Errorf("waves of %v", widths)
	}
}

// The layout with fewest tokens decides how wide a wave is, though the cost would have every token run for every item (#826: 41, 82, 43 tokens for one, two, three items
// in the cheapest layouts; memory for 60).
func TestSharingWidensAWave(t *testing.T) {
	m, _ := load(t, golden.FS(t, "qwen2-tiny"), golden.Options{Threads: 1})
	var items []forward.Inputs
	for i := range 3 {
		in := forward.Input{Tokens: append(tokens(400), int32(i))}
		in.Targets = labels(401)
		items = append(items, forward.One(in))
	}
	usable := room(t, m.Model, items...)
	rank := wrap(t, m.Model, trainerrank.WithCostTables(dear), trainerrank.WithUsableBytes(usable))
	if a, err := wrap(t, m.Model, trainerrank.WithCostTables(dear)).Plan(t.Context(), forward.Nest(items[:2]...)); err != nil || a.PredictedPeakBytes <= usable || a.PackedTokens != 802 {
		t.Fatalf("two items in the cheapest layout: %v, %v", a, err)
	}
	g := waves(t.Context(), rank, items, nil)
	if g.err != nil || len(g.stats) != 1 || g.stats[0].PackedTokens != 403 || g.stats[0].LogicalTokens != 1203 {
		t.Errorf("%+v, %v", g.stats, g.err)
	}
}
