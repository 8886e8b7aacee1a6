package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/trainerrank/engine/collective"
	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/forward/transformer"
	"github.com/trainerrank/engine/trainerrank"
)

const (
	gateOnce      = "items that were not run exactly once, in order"
	gateWaveBits  = "items with other bits than alone"
	gateWaveBytes = "shares that used other bytes than predicted, or more than was left"
	gateWaveAlike = "waves whose numbers differ between ranks"
	gateWidest    = "waves that could have been wider"
	gateUneven    = "failures that were not raised on all ranks at the same wave"
	gateWaveTypes = "failures of another type than they must be"
	gateWaited    = "ranks that waited until the deadline"
	gateMeetings  = "ranks with another number of collectives than their waves say"
	gateWaves     = "waves"
	gateEmpty     = "empty shares"
	gateLadders   = "waves that were split on one rank and whole on another"
	gateOnPurpose = "lists that were made to fail"
	gateNextList  = "next lists that were not run right"
)

var waveGates = []string{gateOnce, gateWaveBits, gateWaveBytes, gateWaveAlike, gateWidest, gateUneven, gateWaveTypes, gateWaited, gateMeetings, gateWaves, gateEmpty,
	gateLadders, gateOnPurpose, gateNextList, gateCounters}

// waveLimit is how long a list may take: many times what the longest needs, so that ranks that wait for each other are a gate that fails.
const waveLimit = 5 * time.Minute

// microBatches runs lists in waves on 1, 2 and 4 ranks of this process, each with a thread, a model and a device of its own, on which live ballast leaves each rank another
// room. Then it has one rank fail in several ways.
func microBatches(b *bench) error {
	w := &waving{bench: b}
	seeds := uint64(4)
	if b.Short {
		seeds = 1
	}
	for _, ranks := range []int{1, 2, 4} {
		for seed := range seeds {
			if err := w.lists(ranks, seed); err != nil {
				return err
			}
		}
		if err := w.failures(ranks); err != nil {
			return err
		}
	}
	b.gate(w.once.none(gateOnce), w.bits.none(gateWaveBits), w.bytes.none(gateWaveBytes), w.alike.none(gateWaveAlike), w.widest.none(gateWidest), w.uneven.none(gateUneven),
		w.types.none(gateWaveTypes), w.waited.none(gateWaited), w.meetings.none(gateMeetings), w.next.none(gateNextList), w.changed.none(gateCounters))
	b.atLeast(gateWaves, 6, w.waves)
	b.atLeast(gateEmpty, 4, w.empty) // of a single item on 2 and on 4 ranks
	b.atLeast(gateLadders, 2, w.ladders)
	b.equal(gateOnPurpose, w.planned, w.failed)
	b.note("%d waves on 1, 2 and 4 ranks, %d of them split on one rank and whole on another; %d empty shares", w.waves, w.ladders, w.empty)
	return nil
}

// waving is the arm under way.
type waving struct {
	*bench
	twin *transformer.Model // of the present ranks; never run, for prices

	once, bits, bytes, alike, widest, uneven, types, waited, meetings, next, changed tally
	waves, empty, ladders, planned, failed                                           int64
}

// crew are ranks: what each has, and the bytes that it is left beside it.
type crew struct {
	labs []*lab
	left []int64
}

// open opens the twin of the next ranks.
func (w *waving) open() (err error) {
	w.twin, err = w.openModel(1)
	return err
}

// crew loads a model for each rank.
func (w *waving) crew(left []int64) (*crew, error) {
	c := &crew{left: left}
	for _, n := range left {
		l, err := w.lab(1, n)
		if err != nil {
			return nil, err
		}
		c.labs = append(c.labs, l)
	}
	return c, nil
}

// part is what one rank was given of a list.
type part struct {
	stats    []trainerrank.MicroBatchStats
	observed []int64          // peak of each wave, by the device
	digests  map[int][]string // by item
	twice    int64            // items that it was given before
	meetings int64
	err      error
	changed  bool // the device's counters differ
}

// orders are what a rank does with a list: nothing special, if they are empty.
type orders struct {
	items []forward.Inputs // instead of everybody's
	ctx   context.Context
	body  func(m *trainerrank.MicroBatch) bool // told of each wave; says whether to go on
	after func()                               // called at the end
}

// run runs a list on all ranks under ballast, and has one of them follow orders.
func (w *waving) run(c *crew, items []forward.Inputs, odd int, o orders) ([]part, error) {
	parts := make([]part, len(c.labs))
	limited, cancel := context.WithTimeout(w, waveLimit)
	defer cancel()
	err := collective.Run(len(c.labs), func(world collective.World) error {
		i := world.Rank()
		l, p, mine := c.labs[i], &parts[i], orders{}
		if i == odd {
			mine = o
		}
		if mine.items == nil {
			mine.items = items
		}
		if mine.ctx == nil {
			mine.ctx = limited
		}
		before := counters(l.dev.Stats())
		ballast, err := l.squeeze(c.left[i])
		if err != nil {
			return err
		}
		defer ballast.Free()
		counted := &countedWorld{World: world}
		rank, err := l.rank(trainerrank.WithWorld(counted))
		if err != nil {
			return err
		}
		l.model.forwards, p.digests = 0, map[int][]string{}
		base := l.dev.Stats().TotalInUse()
		l.dev.ResetPeak()
		for m, err := range rank.ForwardMicroBatches(mine.ctx, mine.items) {
			if err != nil {
				p.err = errors.Join(p.err, err)
				continue
			}
			p.stats, p.observed = append(p.stats, m.Stats), append(p.observed, l.dev.Stats().PeakInUse-base)
			for k, item := range m.Indices {
				p.twice += count(p.digests[item] != nil)
				p.digests[item] = digests(m.Outputs[k].Flat())
			}
			m.Result.Release()
			l.dev.ResetPeak()
			if mine.body != nil && !mine.body(m) {
				break
			}
		}
		p.meetings = counted.n
		if mine.after != nil {
			mine.after()
		}
		ballast.Free()
		p.changed = counters(l.dev.Stats()) != before
		return nil
	})
	for i := range parts {
		w.waited.wrong(errors.Is(parts[i].err, context.DeadlineExceeded), "rank %d of %d: %v", i, len(parts), parts[i].err)
	}
	return parts, err
}

// lists runs random lists on so many ranks with unequal room. The first rank has as much as the smallest budget of the dearest item, and the first item is a
// call that does not fit whole in that; the others have room for one item, and up to two more.
func (w *waving) lists(ranks int, seed uint64) error {
	if err := w.open(); err != nil {
		return err
	}
	r, vocab := random(10*seed+uint64(ranks)), w.twin.Spec().Vocabulary
	items := []forward.Inputs{forward.Many(workload(vocab, w.Requests, w.Tokens)...)}
	for len(items) < 4*ranks+1 {
		items = append(items, nested(r, draw(r, vocab, 3, w.Tokens/2)))
	}
	var whole, least int64
	for _, item := range items {
		a, err := priceOn(w, w.twin, item, ample)
		if err != nil {
			return err
		}
		n, err := smallest(w, w.twin, item)
		if err != nil {
			return err
		}
		whole, least = max(whole, a.PredictedPeakBytes), max(least, n)
	}
	left := []int64{device.RoundPages(least)}
	for len(left) < ranks {
		left = append(left, device.RoundPages(whole+r.Int64N(2*whole)))
	}
	c, err := w.crew(left)
	if err != nil {
		return err
	}
	want, err := w.alone(c, items)
	if err != nil {
		return err
	}
	l := c.labs[0]
	if seed == 0 {
		l.model.record = newRecorder(l.dev)
	}
	for _, list := range [][]forward.Inputs{items, items[1:2]} {
		first := len(items) - len(list)
		if len(list) == 1 {
			first = 1
		}
		parts, err := w.run(c, list, 0, orders{})
		if err != nil {
			return err
		}
		w.check(c, list, want[first:first+len(list)], parts)
		if len(list) > 1 && seed == 0 {
			l.model.record.end()
			o := &outcome{tel: trainerrank.Telemetry{UsableLimitBytes: left[0]}}
			for _, s := range parts[0].stats {
				o.tel.PredictedPeakBytes = max(o.tel.PredictedPeakBytes, s.RequiredBytes)
			}
			t := l.model.record.trace(fmt.Sprintf("the first of %d ranks", ranks), o)
			t.Verdict = fmt.Sprintf("%d waves", len(parts[0].stats))
			w.trace.Calls = append(w.trace.Calls, t)
			l.model.record = nil
		}
	}
	return w.close()
}

// alone runs each item by itself.
func (w *waving) alone(c *crew, items []forward.Inputs) ([][]string, error) {
	l := c.labs[0]
	rank, err := l.rank()
	if err != nil {
		return nil, err
	}
	var list [][]string
	for _, item := range items {
		o := l.call("", rank, item)
		if o.err != nil {
			return nil, o.err
		}
		list = append(list, o.digests)
	}
	return list, nil
}

// check checks a list that was to go well.
func (w *waving) check(c *crew, items []forward.Inputs, want [][]string, parts []part) {
	ranks, next := len(parts), 0
	what := fmt.Sprintf("%d items on %d ranks", len(items), ranks)
	for i := range parts {
		p := &parts[i]
		w.next.wrong(p.err != nil, "%s, rank %d: %v", what, i, p.err)
		w.changed.wrong(p.changed, "%s, rank %d", what, i)
		// One about checkpoints, as in every call; then, unless the rank is alone, one about the list and three for a wave.
		meetings := 1 + count(ranks > 1)*int64(1+3*len(p.stats))
		w.meetings.wrong(p.meetings != meetings, "%s, rank %d: %d for %d waves", what, i, p.meetings, len(p.stats))
		w.alike.wrong(len(p.stats) != len(parts[0].stats), "%s, rank %d: %d waves, %d on rank 0", what, i, len(p.stats), len(parts[0].stats))
		if len(p.stats) != len(parts[0].stats) {
			return
		}
	}
	for n, s := range parts[0].stats {
		w.waves++
		w.once.wrong(s.GlobalStart != next, "%s: wave %d begins with item %d, the next is %d", what, n, s.GlobalStart, next)
		next = s.GlobalStop
		split, whole := false, false
		for i := range parts {
			o, observed := parts[i].stats[n], parts[i].observed[n]
			w.alike.wrong(o.GlobalStart != s.GlobalStart || o.GlobalStop != s.GlobalStop || o.ColdStart != s.ColdStart || o.GlobalCount != s.GlobalStop-s.GlobalStart,
				"%s, wave %d, rank %d: %+v, on rank 0 %+v", what, n, i, o, s)
			w.bytes.wrong(observed != o.RequiredBytes || o.RequiredBytes > o.AvailableBytes || o.AvailableBytes > c.left[i], "%s, wave %d, rank %d: %d observed, %+v", what, n, i, observed, o)
			split, whole = split || o.SubforwardCount > 1, whole || o.SubforwardCount == 1
			w.empty += count(o.LocalCount == 0)
		}
		w.ladders += count(split && whole)
		w.widest.wrong(w.wider(c, items, s), "%s, wave %d: %+v", what, n, s)
	}
	w.once.wrong(next != len(items), "%s: %d were run", what, next)
	for item := range items {
		n := int64(0)
		for i := range parts {
			got, mine := parts[i].digests[item]
			n += count(mine)
			w.bits.wrong(mine && differing(want[item], got) > 0, "%s: item %d, on rank %d", what, item, i)
		}
		w.once.wrong(n != 1, "%s: item %d on %d ranks", what, item, n)
	}
	for i := range parts {
		w.once.wrong(parts[i].twice > 0, "%s: %d items twice on rank %d", what, parts[i].twice, i)
	}
}

// wider says whether a wave with an item more for every rank, or up to the end, would have fitted whole.
func (w *waving) wider(c *crew, items []forward.Inputs, s trainerrank.MicroBatchStats) bool {
	if s.GlobalStop == len(items) {
		return false
	}
	for i := range c.labs {
		var mine []forward.Inputs
		for k := s.GlobalStart + i; k < min(s.GlobalStop+len(c.labs), len(items)); k += len(c.labs) {
			mine = append(mine, items[k])
		}
		a, err := priceOn(w, w.twin, forward.Nest(mine...), c.left[i])
		if err != nil || a.Verdict != trainerrank.Whole {
			return false
		}
	}
	return true
}

// failures has the last rank fail in several ways after the first wave of a list, and once before it. The others must get an error at the same wave, nothing may be left, and
// the same ranks must run the next list.
func (w *waving) failures(ranks int) error {
	if err := w.open(); err != nil {
		return err
	}
	r, vocab := random(uint64(50+ranks)), w.twin.Spec().Vocabulary
	var items []forward.Inputs
	var left int64
	for range 2*ranks + 1 {
		in := forward.Input{Tokens: fresh(r, vocab, w.Tokens), TopK: 1}
		a, err := priceOn(w, w.twin, forward.One(in), ample)
		if err != nil {
			return err
		}
		items, left = append(items, forward.One(in)), max(left, a.PredictedPeakBytes)
	}
	c, err := w.crew(slices.Repeat([]int64{left}, ranks))
	if err != nil {
		return err
	}
	want, err := w.alone(c, items)
	if err != nil {
		return err
	}
	odd := ranks - 1
	l := c.labs[odd]
	refused := func(err error) bool {
		var e *trainerrank.MemoryError
		return errors.As(err, &e) && wording(err).n == 0
	}
	told := func(err error) bool {
		var e *collective.PeerError
		return errors.As(err, &e) && e.Rank == odd
	}
	ended := func(err error) bool {
		var e *collective.AbortError
		return errors.As(err, &e) && e.Rank == odd && errors.Is(err, context.Canceled)
	}
	var block *device.Block
	var grabErr error
	ending, cancel := context.WithCancel(w)
	defer cancel()
	for _, f := range []struct {
		name        string
		orders      orders
		waves       int
		own, others func(error) bool
		many        bool // needs another rank
	}{
		{name: "no room for the next wave", waves: 1, own: refused, others: func(err error) bool { return refused(err) && told(err) }, orders: orders{body: func(*trainerrank.MicroBatch) bool {
			block, grabErr = l.squeeze(device.PageSize)
			return true
		}, after: func() { block.Free() }}},
		{name: "a fault in the next forward", waves: 1, own: func(err error) bool { return errors.Is(err, errInjected) }, others: told, orders: orders{body: func(*trainerrank.MicroBatch) bool {
			l.model.fault = func(int) error { return errInjected }
			return true
		}, after: func() { l.model.fault = nil }}},
		{name: "the loop is left", waves: 1, own: func(err error) bool { return err == nil }, others: told, orders: orders{body: func(*trainerrank.MicroBatch) bool { return false }}},
		{name: "the context ends", waves: 1, own: func(err error) bool { return errors.Is(err, context.Canceled) }, others: ended, orders: orders{ctx: ending, body: func(*trainerrank.MicroBatch) bool {
			cancel()
			return true
		}}},
		{name: "a list that is shorter", many: true, own: listed, others: listed, orders: orders{items: items[:ranks]}},
	} {
		if f.many && ranks == 1 {
			continue
		}
		w.planned++
		what := fmt.Sprintf("%d ranks, %s on the last", ranks, f.name)
		parts, err := w.run(c, items, odd, f.orders)
		if err = errors.Join(err, grabErr); err != nil {
			return err
		}
		even := true
		for i := range parts {
			p, right := &parts[i], f.others
			if i == odd {
				right = f.own
			}
			even = even && len(p.stats) == f.waves
			w.types.wrong(!right(p.err), "%s: rank %d: %v", what, i, p.err)
			w.uneven.wrong(len(p.stats) != f.waves || i != odd && p.err == nil, "%s: rank %d: %d waves, then: %v", what, i, len(p.stats), p.err)
			w.changed.wrong(p.changed, "%s: rank %d", what, i)
		}
		w.failed += count(even)
		parts, err = w.run(c, items, 0, orders{})
		if err != nil {
			return err
		}
		w.check(c, items, want, parts)
	}
	return w.close()
}

// listed says whether an error is about lists of different lengths.
func listed(err error) bool {
	var e *trainerrank.ItemsError
	return errors.As(err, &e) && !slices.Equal(e.Counts, slices.Repeat(e.Counts[:1], len(e.Counts)))
}

// countedWorld counts the collectives of a rank.
type countedWorld struct {
	collective.World
	n int64
}

// Barrier counts.
func (c *countedWorld) Barrier(ctx context.Context, tag string) error {
	c.n++
	return c.World.Barrier(ctx, tag)
}

// AllGather counts.
func (c *countedWorld) AllGather(ctx context.Context, tag string, mine []byte) ([][]byte, error) {
	c.n++
	return c.World.AllGather(ctx, tag, mine)
}

// AllReduceInt64 counts.
func (c *countedWorld) AllReduceInt64(ctx context.Context, tag string, op collective.Op, v []int64) error {
	c.n++
	return c.World.AllReduceInt64(ctx, tag, op, v)
}

// AllReduceFloat32 counts.
func (c *countedWorld) AllReduceFloat32(ctx context.Context, tag string, op collective.Op, v []float32) error {
	c.n++
	return c.World.AllReduceFloat32(ctx, tag, op, v)
}

// Broadcast counts.
func (c *countedWorld) Broadcast(ctx context.Context, tag string, root int, p []byte) error {
	c.n++
	return c.World.Broadcast(ctx, tag, root, p)
}
