package trainerrank

import (
	"context"
	"fmt"
	"iter"
	"slices"
	"strings"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/profile"
)

// MicroBatch is this rank's share of a wave of [TrainerRank.ForwardMicroBatches].
type MicroBatch struct {
	Inputs  []forward.Inputs  // the items of the share; none if there were fewer items than ranks
	Outputs []forward.Outputs // per item, with its nesting
	Indices []int             // per item its place in the list of all, ascending
	Stats   MicroBatchStats
	Result  *Result // owns the memory of the outputs: release it when they have been used
}

// MicroBatchStats are the numbers of a wave. Those that begin with Global, and ColdStart, are the same on all ranks; the others are of this rank's share.
type MicroBatchStats struct {
	GlobalStart        int // the wave is items [GlobalStart, GlobalStop) of the list
	GlobalStop         int
	GlobalCount        int // items of the wave
	LocalCount         int // items of the share
	PackedTokens       int
	LogicalTokens      int
	RequiredBytes      int64 // predicted peak, beside what was allocated
	AvailableBytes     int64 // that the share was planned for
	RejectedCandidates int   // widths that were tried and would not have fit whole
	// ColdStart says that the wave is the smallest there is, an item per rank, because on some rank it does not fit whole (and was split), or its price
	// was not trusted yet.
	ColdStart       bool
	SubforwardCount int // of the share; 0 if it is empty
}

// Select is those of xs, one per item of the list, that belong to the items of m.
func Select[T any](m *MicroBatch, xs []T) []T {
	mine := make([]T, len(m.Indices))
	for i, k := range m.Indices {
		mine[i] = xs[k]
	}
	return mine
}

// ItemsError says that ranks were given different lists. It is the same on all.
type ItemsError struct {
	Counts []int // items, by rank
	Rank   int   // the lowest whose list differs from that of rank 0
}

func (e *ItemsError) Error() string {
	what := fmt.Sprintf("lists of %s items", strings.Trim(fmt.Sprint(e.Counts), "[]"))
	if e.Counts[0] == e.Counts[e.Rank] {
		what = fmt.Sprintf("lists of %d items each, and that of rank %d is not that of rank 0", e.Counts[0], e.Rank)
	}
	return fmt.Sprintf("micro-batches: the ranks were given %s: give every rank the same list, or use DPRankForward for inputs of its own", what)
}

// ForwardMicroBatches runs a list of items, each one input or several in any nesting, in waves that fit into memory. Every rank of the world is given the same
// list. A wave is as many of the items that are left as fit whole on every rank; of it rank r of n takes items r, r+n, r+2n, ... Each item
// is run once, in order. If the smallest wave, an item per rank, does not fit whole somewhere, it is split there; if no split fits, all ranks get an error, which is a
// [*MemoryError].
//
//	for batch, err := range rank.ForwardMicroBatches(ctx, items) {
//		if err != nil {
//			return err
//		}
//		use(batch.Outputs)
//		batch.Result.Release()
//	}
//
// An error is the last thing that the loop is given, and all ranks are given one for the same wave, or before the first: what goes wrong on one rank is told to the
// others where they meet next, so that none waits. A rank whose share is empty is given a batch without items.
//
// The caller owns what it is given. The results of earlier waves that it has not released take their room from the later waves, which get narrower and at last are refused;
// [AgreeAcrossRanks] is implied. Between the waves no lock is held, so that the loop's body may make other calls, as long as it makes the same on all ranks.
//
// A rank may leave the loop early. It tells the others where they meet for the next wave, and waits for them there. Those that leave it at the same
// wave get no error, and those that go on get one that wraps a [*collective.PeerError]; all of them can go on with the next call. The results that were handed out stay valid.
func (t *TrainerRank) ForwardMicroBatches(ctx context.Context, items []forward.Inputs, opts ...CallOption) iter.Seq2[*MicroBatch, error] {
	return func(yield func(*MicroBatch, error) bool) {
		w, err := t.waves(ctx, items, opts)
		for start := 0; err == nil && start < len(items); {
			var m *MicroBatch
			if m, err = w.next(start, nil); err != nil {
				break
			}
			start = m.Stats.GlobalStop
			if !yield(m, nil) {
				if start < len(items) {
					_, _ = w.next(start, fmt.Errorf("it has left the loop over the micro-batches, before item %d", start)) // heard by the others
				}
				return
			}
		}
		if err != nil {
			yield(nil, err)
		}
	}
}

// waves is a list of items on its way.
type waves struct {
	*TrainerRank
	ctx   context.Context
	items []forward.Inputs
	all   *call  // the inputs of all items
	first []int  // per item its first input, and at last how many there are
	kind  string // of the call: widths are remembered for others of the kind
}

// waves checks a list of items, and whether the other ranks have the same.
func (t *TrainerRank) waves(ctx context.Context, items []forward.Inputs, opts []CallOption) (*waves, error) {
	w := &waves{TrainerRank: t, ctx: ctx, items: items, first: make([]int, len(items)+1)}
	for i, item := range items {
		w.first[i+1] = w.first[i]
		_ = item.Walk(func(*forward.Input, func() string) error { w.first[i+1]++; return nil })
	}
	var err error
	w.all, err = t.newCall(forward.Nest(items...), opts)
	if err == nil {
		if err = t.lock(ctx); err == nil {
			defer func() { <-t.turn }()
		}
	}
	w.all.agree, w.kind = true, w.all.kind()
	err = t.ensure(ctx, w.all, err)
	if _, err = t.survey(ctx, w.all, err); t.world.Size() > 1 {
		err = w.compare(err)
	}
	if err != nil {
		return nil, fmt.Errorf("micro-batches: %w", err)
	}
	return w, nil
}

// compare is the meeting about the list.
func (w *waves) compare(err error) error {
	type list struct {
		Why   string `json:"why,omitempty"`
		Count int    `json:"count"`
		Print string `json:"print"`
	}
	mine := list{Why: failure(err), Count: len(w.items)}
	if err == nil {
		mine.Print = fmt.Sprint(w.all.fingerprint(), w.first)
	}
	all, failed := exchange(w.ctx, w.world, "forward/items", mine)
	if failed != nil {
		w.abandonPeers(failed)
	}
	whys, counts := make([]string, len(all)), make([]int, len(all))
	for i := range all {
		whys[i], counts[i] = all[i].Why, all[i].Count
	}
	if err := told(err, failed, whys); err != nil {
		return err
	}
	for i := range all {
		if all[i] != all[0] {
			return &ItemsError{counts, i}
		}
	}
	return nil
}

// next runs the wave that begins with an item, or tells the others why not.
func (w *waves) next(start int, err error) (*MicroBatch, error) {
	if busy := w.lock(w.ctx); busy == nil {
		defer func() { <-w.turn }()
	} else if err == nil {
		err = busy
	}
	g, err := w.survey(w.ctx, w.all, err)
	var c choice
	if err == nil {
		c, err = w.widest(start, g)
	}
	wave, err := w.meet(w.ctx, "forward/wave", word{Width: c.width, Alone: c.alone}, err, true)
	if err != nil {
		return nil, fmt.Errorf("micro-batches from item %d on: %w", start, err)
	}
	m := &MicroBatch{Indices: w.share(start, start+wave.Width), Inputs: []forward.Inputs{}}
	for _, i := range m.Indices {
		m.Inputs = append(m.Inputs, w.items[i])
	}
	res, err := w.execute(w.ctx, forward.Nest(m.Inputs...), w.all.part(w.inputs(m.Indices)), g, nil)
	if err != nil {
		return nil, fmt.Errorf("micro-batch of items %d to %d: %w", start, start+wave.Width-1, err)
	}
	m.Result, m.Outputs = res, res.Outputs.List()
	m.Stats = MicroBatchStats{
		GlobalStart: start, GlobalStop: start + wave.Width, GlobalCount: wave.Width, LocalCount: len(m.Indices), PackedTokens: res.Telemetry.PackedTokens,
		LogicalTokens: res.Telemetry.LogicalTokens, RequiredBytes: res.Telemetry.PredictedPeakBytes, AvailableBytes: g.usable,
		RejectedCandidates: c.rejected, ColdStart: wave.Alone, SubforwardCount: res.Telemetry.SubforwardCount,
	}
	if m.Stats.GlobalStop < len(w.items) { // a tail is as narrow as it is because there was no more
		w.widths[w.kind] = wave.Width
	}
	return m, nil
}

// widest is the widest wave in which this rank's share fits.
func (w *waves) widest(start int, g *ground) (choice, error) {
	return widest(len(w.items)-start, w.world.Size(), w.widths[w.kind], func(width int) (probed, error) {
		q, err := w.ask(w.all.part(w.inputs(w.share(start, start+width))), g, false)
		if err != nil {
			return probed{}, err
		}
		p, err := q.whole(w.ctx)
		return probed{fits: p.Required <= g.usable&^(device.PageSize-1), trusted: p.Trusted, cold: p.Basis == profile.Cold}, err
	})
}

// share are the items of a wave that are this rank's.
func (w *waves) share(start, stop int) []int {
	mine := []int{}
	for i := start + w.world.Rank(); i < stop; i += w.world.Size() {
		mine = append(mine, i)
	}
	return mine
}

// inputs are the inputs of items.
func (w *waves) inputs(items []int) []int {
	var list []int
	for _, i := range items {
		for k := w.first[i]; k < w.first[i+1]; k++ {
			list = append(list, k)
		}
	}
	return list
}

// kind says in one word what is wanted of the inputs of a call, and of what weights.
func (c *call) kind() string {
	var parts []string
	for _, s := range profile.Mix(c.inputs) {
		parts = append(parts, s.Kind)
	}
	for _, g := range c.kinds {
		parts = append(parts, fmt.Sprintf("%q %v", g.Slot, g.Grad))
	}
	slices.Sort(parts)
	return strings.Join(parts, ", ")
}
