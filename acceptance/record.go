package main

import (
	"fmt"
	"sync"
	"time"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/trainerrank"
)

// Trace is what the device held over time in the calls of an arm.
type Trace struct {
	Calls []CallTrace `json:"calls,omitempty"`
}

// CallTrace is one call. All bytes are those beside what the device held before it.
type CallTrace struct {
	Title    string       `json:"title"`
	Verdict  string       `json:"verdict"`
	Base     device.Sizes `json:"base"`     // what it held before, by purpose
	Admitted int64        `json:"admitted"` // predicted peak of the plan
	Usable   int64        `json:"usable"`
	Observed int64        `json:"observed"` // peak by the device's counters; of a refusal 0
	Came     int64        `json:"came"`     // ballast that others put on the device during the call; it is in no sample
	Planned  device.Sizes `json:"planned"`  // the predicted peak by purpose; zero if that is not known
	Backward int64        `json:"backward"` // microseconds after which the backward began; 0 if there was none
	Refused  bool         `json:"refused"`
	Samples  []Sample     `json:"samples"`
}

// Sample is one moment.
type Sample struct {
	Micros int64        `json:"us"` // since the call began
	InUse  device.Sizes `json:"in_use"`
}

// interval is how often a recorder looks by itself, besides each time that the model asks for memory or says how far it is.
const interval = time.Millisecond

// most is how many samples of a call are kept.
const most = 400

// recorder watches a device during a call.
type recorder struct {
	dev  device.Device
	base device.Sizes
	stop chan struct{}
	done chan struct{}
	took time.Duration // once it has ended
	back time.Duration // when the backward began; 0: not at all

	mu      sync.Mutex
	start   time.Time
	samples []Sample
}

func newRecorder(dev device.Device) *recorder {
	r := &recorder{dev: dev, base: dev.Stats().InUse, stop: make(chan struct{}), done: make(chan struct{}), start: time.Now()}
	r.sample()
	go func() {
		defer close(r.done)
		tick := time.NewTicker(interval)
		defer tick.Stop()
		for {
			select {
			case <-r.stop:
				return
			case <-tick.C:
				r.sample()
			}
		}
	}()
	return r
}

// sample notes what the device holds now.
func (r *recorder) sample() {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.dev.Stats().InUse
	for p := range now {
		now[p] -= r.base[p]
	}
	s := Sample{time.Since(r.start).Microseconds(), now}
	if n := len(r.samples); n > 0 && r.samples[n-1].InUse == now {
		return // the step is drawn where the next one differs
	}
	r.samples = append(r.samples, s)
}

// backward notes that the forward is over.
func (r *recorder) backward() {
	r.sample()
	r.back = time.Since(r.start)
}

// end ends the recording.
func (r *recorder) end() {
	close(r.stop)
	<-r.done
	r.sample()
	r.took = time.Since(r.start)
}

// trace is what was recorded, after its end.
func (r *recorder) trace(title string, o *outcome) CallTrace {
	c := CallTrace{Title: title, Base: r.base, Admitted: o.tel.PredictedPeakBytes, Usable: o.tel.UsableLimitBytes, Observed: o.observed, Planned: o.planned, Backward: r.back.Microseconds()}
	for _, s := range r.samples {
		c.Came = max(c.Came, s.InUse[device.Ballast])
	}
	if c.Came > 0 { // what others take is not the call's
		c.Observed = 0
		for i := range r.samples {
			s := &r.samples[i]
			s.InUse[device.Ballast] = 0
			c.Observed = max(c.Observed, s.InUse.Total())
		}
	}
	switch {
	case o.refusal != nil && o.forwards == 0:
		c.Verdict, c.Refused = "refused before it ran", true
		if c.Came > 0 {
			c.Verdict = "refused, overtaken"
		}
	case o.err != nil:
		c.Verdict = "failed"
	case o.tel.SubforwardCount == 1:
		c.Verdict = "whole"
	default:
		c.Verdict = fmt.Sprintf("split into %d", o.tel.SubforwardCount)
	}
	if k := o.tel.Retention; o.err == nil && k != trainerrank.Stored && k != "" {
		c.Verdict += ", " + string(k)
	}
	// The last one says how long it took.
	last := r.samples[len(r.samples)-1].InUse
	c.Samples = append(thin(r.samples), Sample{r.took.Microseconds(), last})
	return c
}

// thin keeps of each of so many equal parts the first sample and the one with most bytes, so that no peak is lost.
func thin(all []Sample) []Sample {
	if len(all) <= most {
		return all
	}
	var list []Sample
	for i := range most / 2 {
		part := all[i*len(all)*2/most : (i+1)*len(all)*2/most]
		best := 0
		for j := range part {
			if part[j].InUse.Total() > part[best].InUse.Total() {
				best = j
			}
		}
		list = append(list, part[0])
		if best > 0 {
			list = append(list, part[best])
		}
	}
	return list
}

// tap is an arena that has the device looked at after every request.
type tap struct {
	device.Arena
	record *recorder
}

// Keep hands out bytes for purpose p.
func (t *tap) Keep(p device.Purpose, bytes int64) device.Mem {
	defer t.record.sample()
	return t.Arena.Keep(p, bytes)
}

// Scratch hands out bytes until the enclosing mark is popped.
func (t *tap) Scratch(bytes int64) device.Mem {
	defer t.record.sample()
	return t.Arena.Scratch(bytes)
}

// Pop gives scratch memory back.
func (t *tap) Pop(m device.Mark) {
	defer t.record.sample()
	t.Arena.Pop(m)
}
