package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/trainerrank"
)

const (
	gateCancelled = "cancelled calls"
	gateInjected  = "faults put in"
	gateTyped     = "failures of another type than they must be"
	gateLeaked    = "failures after which something is left"
	gateNext      = "next calls with other bits, or none"
	gateOvertaken = "reservations overtaken by another goroutine"
	gateReplanned = "overtaken calls that were split for what was left"
)

var faultGates = []string{gateCancelled, gateInjected, gateTyped, gateLeaked, gateNext, gateOvertaken, gateReplanned}

// errInjected is the fault of a model.
var errInjected = errors.New("a fault put in by the harness")

// faults makes calls fail in every way that a call without gradients can: cancelled at every step, the model failing or running out of memory at
// each subforward, and the memory taken by another goroutine between plan and reservation. Each time the error must be of its type, nothing may be left, and
// the next call must give the right answers.
func faults(b *bench) error {
	c, err := b.conversion()
	if err != nil {
		return err
	}
	whole, err := c.unlimited("no fault")
	if err != nil {
		return err
	}
	least, err := smallest(c, c.twin, c.in)
	if err != nil {
		return err
	}
	// In the smallest budget there are most subforwards.
	tight, err := c.rank(trainerrank.WithUsableBytes(least))
	if err != nil {
		return err
	}
	f := &failing{conversion: c, want: whole.digests}
	f.cancelled(tight)
	f.failed(tight)
	if err := f.overtaken(); err != nil {
		return err
	}
	b.gate(f.typed.none(gateTyped), f.leaked.none(gateLeaked), f.next.none(gateNext))
	return nil
}

// failing is the arm of the faults under way.
type failing struct {
	*conversion
	want                []string
	typed, leaked, next tally
}

// after checks what every failure must leave: nothing, and a rank that works.
func (f *failing) after(what string, o *outcome, rank *trainerrank.TrainerRank) {
	f.leaked.wrong(o.changed, "%s: the device's counters differ", what)
	f.leaked.wrong(o.err != nil && o.digests != nil, "%s: an error and a result", what)
	f.model.fault = nil
	o = f.call("", rank, f.in)
	f.next.wrong(o.err != nil || differing(f.want, o.digests) > 0, "after %s: %v", what, o.err)
	f.leaked.wrong(o.changed, "after %s and another call: the device's counters differ", what)
}

// cancelled cancels a split at each of its steps.
func (f *failing) cancelled(rank *trainerrank.TrainerRank) {
	steps := 0
	o := f.call("", rank, f.in, trainerrank.WithProgress(func(int, int) { steps++ }))
	f.typed.wrong(o.err != nil, "a call without a fault: %v", o.err)
	stride := 1
	if f.Short {
		stride = max(1, steps/16)
	}
	var tried, ended int64
	for at := 0; at < steps; at += stride {
		ctx, cancel := context.WithCancel(f.Context)
		seen := 0
		title := ""
		if at >= steps/2 && at < steps/2+stride {
			title = "cancelled half way"
		}
		o := f.callIn(ctx, title, rank, f.in, trainerrank.WithProgress(func(int, int) {
			if seen == at {
				cancel()
			}
			seen++
		}))
		cancel()
		tried++
		what := fmt.Sprintf("a cancellation at step %d of %d", at+1, steps)
		switch {
		case o.err != nil:
			ended++
			f.typed.wrong(!errors.Is(o.err, context.Canceled), "%s: %v", what, o.err)
		default:
			// At the last step there may be nothing left to cancel; then the answers must be right.
			f.typed.wrong(at < steps-1-stride || differing(f.want, o.digests) > 0, "%s: the call went on", what)
		}
		f.after(what, o, rank)
	}
	f.atLeast(gateCancelled, max(1, tried-2), ended)
	before, cancel := context.WithCancel(f.Context)
	cancel()
	o = f.callIn(before, "", rank, f.in)
	f.typed.wrong(!errors.Is(o.err, context.Canceled) || o.forwards > 0, "a call that was cancelled before it began: %v", o.err)
	f.after("a call that was cancelled before it began", o, rank)
}

// failed has each subforward fail, with a fault of the model and with the device running out.
func (f *failing) failed(rank *trainerrank.TrainerRank) {
	o := f.call("", rank, f.in)
	k := o.tel.SubforwardCount
	var put int64
	for i := range k {
		for _, memory := range []bool{false, true} {
			f.model.fault = only(i, f.fault(memory))
			title := ""
			if i == k-1 && memory {
				title = "the last subforward runs out"
			}
			o := f.call(title, rank, f.in)
			put++
			what := fmt.Sprintf("a fault in subforward %d of %d", i+1, k)
			f.typed.wrong(!errors.Is(o.err, errInjected), "%s: %v", what, o.err)
			f.typed.wrong(o.forwards != i+1, "%s: %d forwards ran: something is tried again", what, o.forwards)
			f.partial(what, o.err, i, k, memory)
			f.after(what, o, rank)
		}
	}
	f.atLeast(gateInjected, int64(2*2), put)
}

// overtaken has another goroutine take the memory after the call was planned for it and before it is reserved: while the plan is
// rehearsed, which is after the free bytes were read. If it leaves nothing the call is refused; if it leaves enough for a split the call is
// planned anew.
func (f *failing) overtaken() error {
	var times, split int64
	enough, err := f.leaves()
	if err != nil {
		return err
	}
	for _, left := range []int64{device.PageSize, enough} {
		rank, err := f.rank()
		if err != nil {
			return err
		}
		var block *device.Block
		var grabErr error
		var once sync.Once
		f.model.rehearsed = func() {
			once.Do(func() {
				done := make(chan struct{})
				go func() {
					defer close(done)
					block, grabErr = f.squeeze(left)
				}()
				<-done
			})
		}
		before := counters(f.dev.Stats())
		title := fmt.Sprintf("ballast comes, %s left", shortBytes(left))
		o := f.call(title, rank, f.in)
		f.model.rehearsed = nil
		if grabErr != nil {
			return grabErr
		}
		times += count(block != nil)
		if left == device.PageSize {
			f.typed.wrong(o.refusal == nil || o.forwards > 0 || wording(o.err).n > 0, "all memory is taken before it is reserved: %v", o.err)
		} else {
			f.next.wrong(o.err != nil || differing(f.want, o.digests) > 0, "memory is taken before it is reserved: %v", o.err)
			split += count(o.err == nil && o.tel.SubforwardCount > 1 && o.tel.PredictedPeakBytes <= left)
		}
		block.Free()
		// The ballast came during the call, so the counters are compared without it.
		o.changed = counters(f.dev.Stats()) != before
		f.after("memory that was taken before it was reserved", o, rank)
	}
	f.equal(gateOvertaken, 2, times)
	f.equal(gateReplanned, 1, split)
	return nil
}

// partial checks the error of a split that failed under way.
func (f *failing) partial(what string, err error, i, k int, memory bool) {
	var e *trainerrank.PartialExecutionError
	if !errors.As(err, &e) {
		f.typed.wrong(memory, "%s: not a failure of a split: %v", what, err)
		return
	}
	f.typed.wrong(e.Completed != i || e.Count != k, "%s: %v", what, err)
	f.typed.wrong(!strings.Contains(err.Error(), fmt.Sprintf("subforward %d of %d failed during execution (%d of %d completed)", i+1, k, i, k)), "%s: %v", what, err)
	var m *trainerrank.MemoryError
	f.typed.wrong(errors.As(err, &m) != memory, "%s: %v", what, err)
}
