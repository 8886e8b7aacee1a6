package main

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/internal/builtin"
	"github.com/trainerrank/engine/loader"
)

const (
	gateLoads      = "loads"
	gateLoadBytes  = "tensors with other bytes than in their file"
	gateLoadPeak   = "loads whose peak is above predicted or budget"
	gateInfeasible = "budgets too small that were not named when planned"
	gateMinimum    = "smallest budgets that are not enough, or not the smallest"
	gateLoadLeft   = "loads after which something is left"
	gateScores     = "loads of the model with which calls give other bits"
)

var loadGates = []string{gateLoads, gateLoadBytes, gateLoadPeak, gateInfeasible, gateMinimum, gateLoadLeft, gateScores}

// loading loads the model's tensors by every copier in budgets from too small to ample, on a device of exactly the budget; and the model itself, to run.
func loading(b *bench) error {
	dir, err := b.folder()
	if err != nil {
		return err
	}
	set, err := loader.Open(dir)
	if err != nil {
		return err
	}
	b.closers = append(b.closers, set.Close)
	l := &loads{bench: b, set: set, sums: make(map[string][sha256.Size]byte)}
	// What is in the files, read a tensor at a time: the weights must be these bytes.
	for _, name := range set.Names() {
		t, _ := set.Tensor(name)
		data := make([]byte, t.Bytes)
		if err := set.ReadAt(t, data, 0); err != nil {
			return err
		}
		l.sums[name] = sha256.Sum256(data)
	}
	for _, name := range loader.CopierNames() {
		if err := l.by(name); err != nil {
			return fmt.Errorf("copier %s: %w", name, err)
		}
	}
	if err := l.models(dir); err != nil {
		return err
	}
	b.atLeast(gateLoads, int64(2*4*len(l.shapes())*len(loader.CopierNames())), l.n)
	b.gate(l.other.none(gateLoadBytes), l.peak.none(gateLoadPeak), l.named.none(gateInfeasible), l.minimum.none(gateMinimum), l.left.none(gateLoadLeft), l.scores.none(gateScores))
	return nil
}

// folder is the model's folder; of a built-in one a copy, since a copier reads files.
func (b *bench) folder() (string, error) {
	name, ok := strings.CutPrefix(b.Model, "builtin:")
	if !ok {
		return b.Model, nil
	}
	from, err := builtin.Open(name)
	if err != nil {
		return "", err
	}
	dir, err := os.MkdirTemp("", "acceptance-")
	if err != nil {
		return "", err
	}
	b.closers = append(b.closers, func() error { return os.RemoveAll(dir) })
	for _, file := range []string{"config.json", "model.safetensors"} {
		data, err := fs.ReadFile(from, file)
		if err != nil {
			return "", err
		}
		if err := os.WriteFile(filepath.Join(dir, file), data, 0o600); err != nil {
			return "", err
		}
	}
	return dir, nil
}

// loads is the arm under way.
type loads struct {
	*bench
	set  *loader.Set
	sums map[string][sha256.Size]byte
	n    int64

	other, peak, named, minimum, left, scores tally
}

// shape is a way to ask for a load.
type shape struct {
	name      string
	delivered bool  // nothing stays on the device: pieces are handed over
	queue     int   // see loader.PlanParams
	maxChunk  int64 // bytes; 0 is no limit
}

// shapes are those that are tried: everything stays; the same in chunks that are less than the large tensors; nothing stays, so that
// the smallest budget is far below the model.
func (l *loads) shapes() []shape {
	var largest int64
	for _, name := range l.set.Names() {
		t, _ := l.set.Tensor(name)
		largest = max(largest, t.Bytes)
	}
	return []shape{
		{name: "stays"},
		{name: "stays, small chunks", queue: 1, maxChunk: device.RoundPages(largest / 3)},
		{name: "handed over", queue: 1, delivered: true},
	}
}

// by loads by one copier.
func (l *loads) by(name string) error {
	copier, err := loader.NewCopier(name, l.Threads)
	if err != nil {
		return err
	}
	for i, shape := range l.shapes() {
		what := name + ", " + shape.name
		stats := loader.StatsOf(l.set, loader.StatsOptions{
			Atom:     func(*loader.Tensor) int64 { return device.PageSize },
			Resident: func(*loader.Tensor) bool { return !shape.delivered },
		})
		fit := func(budget int64) (*loader.FitPlan, error) {
			return loader.Fit(stats, loader.PlanParams{
				Budget: budget, Group: 1, AccumulateResident: true, Align: device.PageSize, Copier: copier.Costs(l.set.Files),
				QueueSize: shape.queue, MaxChunk: shape.maxChunk,
			})
		}
		plan, err := fit(ample)
		if err != nil {
			return err
		}
		least, full := plan.Minimum, max(plan.Peak, plan.Minimum)
		for _, budget := range []int64{1, least / 2, least - 1} {
			if budget < 1 || budget >= least { // a copier that shows the page cache needs nothing where nothing stays
				continue
			}
			_, err := fit(budget)
			var e *loader.BudgetInfeasibleError
			l.named.wrong(!errors.As(err, &e) || e.Minimum != least || e.MissingBytes() != least-budget, "%s, %d of %d bytes: %v", what, budget, least, err)
			l.minimum.wrong(err == nil, "%s: %d bytes are enough, %d are said to be the smallest", what, budget, least)
		}
		for j, budget := range []int64{least, least + (full-least)/2, full, 2 * full} {
			plan, err := fit(budget)
			if err != nil {
				l.minimum.wrong(true, "%s, %d bytes: %v", what, budget, err)
				continue
			}
			title := ""
			if i > 0 && j == 0 || i == 1 && j == 2 {
				title = fmt.Sprintf("%s, in %s", what, shortBytes(budget))
			}
			if err := l.load(title, shape, plan, copier); err != nil {
				return err
			}
		}
	}
	return nil
}

// load carries a plan out, and again, on a device that has no byte more than the budget.
func (l *loads) load(title string, shape shape, plan *loader.FitPlan, copier loader.Copier) error {
	for range 2 {
		dev, err := device.NewHost(plan.Budget)
		if err != nil {
			return err
		}
		rec := newRecorder(dev)
		pieces := make(map[string][]byte) // what was handed over
		var mu sync.Mutex
		o := loader.LoadOptions{Device: dev, Copier: copier, Threads: l.Threads, Progress: func(int64, int64) { rec.sample() }}
		if shape.delivered {
			o.Deliver = func(p loader.Piece) error {
				rec.sample()
				mu.Lock()
				defer mu.Unlock()
				if pieces[p.Tensor.Name] == nil {
					pieces[p.Tensor.Name] = make([]byte, p.Tensor.Bytes)
				}
				copy(pieces[p.Tensor.Name][p.Offset:], p.Data)
				return nil
			}
		}
		tensors, report, err := l.set.Execute(l, plan, o)
		rec.end()
		peak := dev.Stats().PeakAllocated
		if err != nil {
			return err
		}
		l.n++
		what := fmt.Sprintf("%s, %s, in %d bytes", copier.Name(), shape.name, plan.Budget)
		l.peak.wrong(peak > plan.Budget || peak > plan.Peak || report.Peak > plan.Peak, "%s: predicted %d, report %d, device %d", what, plan.Peak, report.Peak, peak)
		for _, name := range l.set.Names() {
			t, _ := l.set.Tensor(name)
			data := pieces[name]
			if m, ok := tensors.Mem(t); ok {
				data = m.Raw()
			}
			l.other.wrong(int64(len(data)) != t.Bytes || l.sums[name] != sha256.Sum256(data), "%s: tensor %s", what, name)
		}
		if title != "" {
			trace := rec.trace(title, &outcome{observed: peak})
			trace.Verdict, trace.Admitted, trace.Usable = "loaded", plan.Peak, plan.Budget
			l.trace.Calls = append(l.trace.Calls, trace)
			title = ""
		}
		tensors.Free()
		s := dev.Stats()
		l.left.wrong(s.Allocated != 0 || s.Blocks != 0, "%s: %d bytes in %d blocks", what, s.Allocated, s.Blocks)
	}
	return nil
}

// models loads the model to run, by every copier with the least and with ample staging, and compares what calls answer.
func (l *loads) models(dir string) error {
	inner := *l.config
	inner.Model = dir
	b := newBench(l.Context, &inner)
	var want []string
	for _, name := range loader.CopierNames() {
		copier, err := loader.NewCopier(name, l.Threads)
		if err != nil {
			return err
		}
		for _, scarce := range []bool{true, false} {
			m, err := b.openModel(l.Threads)
			if err != nil {
				return err
			}
			in := forward.Many(workload(m.Spec().Vocabulary, 2, 16)...)
			a, err := priceOn(l, m, in, ample)
			if err != nil {
				return err
			}
			dev, err := device.NewHost(m.WeightBytes() + a.PredictedPeakBytes + copier.Costs(l.set.Files).Fixed + 64<<20)
			if err != nil {
				return err
			}
			if err := m.Place(dev); err != nil {
				return err
			}
			staging := copier.Costs(l.set.Files).Fixed + 16<<20
			if scarce {
				// The least of this copier is what its refusal says.
				_, err := m.LoadBy(l, copier, 1, nil)
				var e *loader.BudgetInfeasibleError
				if err == nil && free(copier, l.set.Files) {
					staging = 1 // it shows what lies in the page cache
				} else if !errors.As(err, &e) {
					l.named.wrong(true, "%s: the model with one byte of staging: %v", name, err)
				} else {
					staging = e.Minimum - m.WeightBytes()
				}
			}
			if _, err := m.LoadBy(l, copier, staging, nil); err != nil {
				l.minimum.wrong(true, "%s: the model with %d bytes of staging: %v", name, staging, err)
				continue
			}
			lab := &lab{bench: b, dev: dev, model: &spy{Model: m}}
			rank, err := lab.rank()
			if err != nil {
				return err
			}
			o := lab.call("", rank, in)
			if o.err != nil {
				return o.err
			}
			if want == nil {
				want = o.digests
			}
			l.scores.wrong(differing(want, o.digests) > 0, "%s", name)
		}
	}
	return b.close()
}

// free says whether a copier needs no memory of the budget for these files.
func free(c loader.Copier, files []*loader.File) bool {
	costs := c.Costs(files)
	for _, m := range costs.Multiplier {
		if m.Num != 0 {
			return false
		}
	}
	return costs.Fixed == 0
}
