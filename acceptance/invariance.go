package main

import (
	"fmt"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/trainerrank"
)

const (
	gateOrders  = "answers with other bits in another order and nesting"
	gateSplits  = "answers with other bits in a split"
	gateThreads = "answers with other bits on another number of threads"
	gateAlone   = "answers with other bits than alone"
	gateCalls   = "calls compared"
	gateSplit   = "calls that were split"
	gateFailed  = "calls that failed"
)

var invarianceGates = []string{gateOrders, gateSplits, gateThreads, gateAlone, gateCalls, gateSplit, gateFailed, gateCounters}

// invariance runs random calls in every way: each request alone, all together, in other orders and nestings, in budgets that force splits, and
// all of it on several numbers of threads. What a request is answered must have the same bits in all.
func invariance(b *bench) error {
	sets := 12
	if b.Short {
		sets = 4
	}
	var orders, splits, threads, alone, failed, changed tally
	var calls, split int64
	var first [][]string // by set: the digests of the first number of threads
	for turn, n := range []int{1, b.Threads, b.Threads + 1} {
		twin, err := b.openModel(n)
		if err != nil {
			return err
		}
		vocab := twin.Spec().Vocabulary
		lists := make([][]forward.Input, sets)
		var need int64
		for s := range lists {
			lists[s] = draw(random(uint64(100+s)), vocab, b.Requests, b.Tokens)
			a, err := priceOn(b, twin, forward.Many(lists[s]...), ample)
			if err != nil {
				return err
			}
			need = max(need, a.PredictedPeakBytes)
		}
		l, err := b.lab(n, need)
		if err != nil {
			return err
		}
		// run answers in the order of list, though the call is in another.
		run := func(title string, list []forward.Input, order []int, seed uint64, opts ...trainerrank.Option) []string {
			moved := make([]forward.Input, len(list))
			for i, j := range order {
				moved[i] = list[j]
			}
			rank, err := l.rank(opts...)
			if err != nil {
				failed.wrong(true, "%v", err)
				return nil
			}
			if turn > 0 {
				title = ""
			}
			o := l.call(title, rank, nested(random(seed), moved))
			calls++
			failed.wrong(o.err != nil, "%v", o.err)
			changed.wrong(o.changed, "after a call of %d requests", len(list))
			split += count(o.tel.SubforwardCount > 1 && o.err == nil)
			if len(o.digests) != len(order) {
				return nil
			}
			got := make([]string, len(list))
			for i, j := range order {
				got[j] = o.digests[i]
			}
			return got
		}
		compare := func(t *tally, what string, want, got []string) {
			if d := differing(want, got); d > 0 {
				t.n += d
				if t.why == "" {
					t.why = what
				}
			}
		}
		for s, list := range lists {
			r := random(uint64(200 + s))
			asIs := ascending(len(list))
			title := func(what string) string {
				if s > 0 {
					return ""
				}
				return what
			}
			want := run(title("all together"), list, asIs, uint64(s))
			if turn == 0 {
				first = append(first, want)
			} else {
				compare(&threads, fmt.Sprintf("set %d on %d threads", s, n), first[s], want)
			}
			one := make([]string, 0, len(list))
			for i := range list {
				one = append(one, run("", list[i:i+1], []int{0}, 0)...)
			}
			compare(&alone, fmt.Sprintf("set %d on %d threads", s, n), one, want)
			for k := range 3 {
				got := run(title("another order"), list, r.Perm(len(list)), r.Uint64())
				compare(&orders, fmt.Sprintf("set %d on %d threads, order %d", s, n, k), want, got)
			}
			least, err := smallest(b, l.model, forward.Many(list...))
			if err != nil {
				return err
			}
			a, err := priceOn(b, l.model, forward.Many(list...), ample)
			if err != nil {
				return err
			}
			for _, usable := range []int64{least, least + (a.PredictedPeakBytes-least)/2, a.PredictedPeakBytes - 1} {
				if usable < least {
					continue // it is never split
				}
				got := run(title("less memory"), list, asIs, r.Uint64(), trainerrank.WithUsableBytes(usable))
				compare(&splits, fmt.Sprintf("set %d on %d threads in %d bytes", s, n, usable), want, got)
			}
		}
		if l.dev.Stats().InUse[device.Outputs] != 0 {
			changed.wrong(true, "outputs are left")
		}
		if err := b.close(); err != nil {
			return err
		}
	}
	b.gate(orders.none(gateOrders), splits.none(gateSplits), threads.none(gateThreads), alone.none(gateAlone), failed.none(gateFailed), changed.none(gateCounters))
	b.atLeast(gateCalls, int64(3*sets*4), calls)
	b.atLeast(gateSplit, int64(sets), split)
	return nil
}

func ascending(n int) []int {
	list := make([]int, n)
	for i := range list {
		list[i] = i
	}
	return list
}
