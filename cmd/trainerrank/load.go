package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"runtime"
	"strings"
	"sync"

	"github.com/trainerrank/engine/collective"
	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/internal/builtin"
	"github.com/trainerrank/engine/loader"
	"github.com/trainerrank/engine/trainerrank"
)

// loadOptions are the flags of load.
type loadOptions struct {
	model, copier, summary string
	budget, maxChunk       int64
	queue, group, threads  int
	classic, dryRun, json  bool
}

const autoCopier = "auto"

func (t *tool) loadFlags(args []string) (*loadOptions, error) {
	o := &loadOptions{}
	fs := flag.NewFlagSet("load", flag.ContinueOnError)
	fs.StringVar(&o.model, "model", "", "model folder or safetensors file, or builtin:NAME (default builtin:"+builtin.Default+")")
	size := func(to *int64) func(string) error {
		return func(s string) (err error) {
			*to, err = parseSize(s)
			return err
		}
	}
	fs.Func("budget", "most bytes in use at any moment, tensors and bytes in flight: bytes, or a number with KiB, MiB, GiB, KB, MB, GB (default: a suggestion by what the process may use)", size(&o.budget))
	fs.IntVar(&o.queue, "queue", 0, "chunks that may wait beside the one being read and the one being delivered; -1 for one chunk at a time")
	fs.Func("max-chunk", "most bytes of one chunk (default: no limit)", size(&o.maxChunk))
	fs.IntVar(&o.group, "group", 1, "ranks that load together, each byte read once; each gets all tensors, on a device of its own with the budget")
	fs.StringVar(&o.copier, "copier", autoCopier, "how files are read: "+autoCopier+" (by trying), "+strings.Join(loader.CopierNames(), ", "))
	fs.BoolVar(&o.classic, "classic", false, "plan as fastsafetensors does")
	fs.BoolVar(&o.dryRun, "dry-run", false, "plan, and read headers only")
	fs.BoolVar(&o.json, "json", false, "print the plan as JSON")
	fs.IntVar(&o.threads, "threads", 0, "reads under way at once (default: one per usable CPU)")
	fs.StringVar(&o.summary, "summary", "", "file for the summary as one JSON object")
	if err := t.parse(fs, args, 0, ""); err != nil {
		return nil, err
	}
	switch {
	case o.threads < 0 || o.threads > 1024:
		return nil, &usageError{fmt.Sprintf("load: --threads %d is not between 0 and 1024", o.threads), "leave it out for one per usable CPU"}
	case o.group < 1 || o.group > 64:
		return nil, &usageError{fmt.Sprintf("load: --group %d is not between 1 and 64", o.group), "1 is one rank alone"}
	}
	if o.threads == 0 {
		o.threads = runtime.GOMAXPROCS(0)
	}
	if o.model == "" {
		o.model = "builtin:" + builtin.Default
	}
	return o, nil
}

// loadSummary is what --summary writes: the fields of score's, and what only a load has.
type loadSummary struct {
	summary
	Copier       string `json:"copier"`
	BudgetBytes  int64  `json:"budget_bytes"`
	BytesRead    int64  `json:"bytes_read"`
	Chunks       int    `json:"chunks"`
	MissingBytes int64  `json:"missing_bytes"`
}

// planSummary is the plan as the command prints it.
type planSummary struct {
	Budget    int64             `json:"budget_bytes"`
	Fixed     int64             `json:"fixed_bytes"`
	QueueSize int               `json:"queue_size"`
	Depth     int               `json:"depth"`
	Files     []json.RawMessage `json:"files"`
	Peak      int64             `json:"predicted_peak_bytes"`
	Minimum   int64             `json:"minimum_budget_bytes"`
	Digest    string            `json:"digest"`
}

// loading is one load: files that are open and a plan.
type loading struct {
	*tool
	*loadOptions
	set    *loader.Set
	copier loader.Copier
	plan   *loader.FitPlan
	pages  int64 // most bytes in use on a rank, counted by its arena
	sum    loadSummary
}

// load brings the tensors of a folder into an arena as they are stored, inside a budget, and says what it took. It needs no decoder for the
// model and computes with nothing, so it works for every type of tensor.
func (t *tool) load(ctx context.Context, args []string) error {
	o, err := t.loadFlags(args)
	if err != nil {
		return err
	}
	if o.summary != "" {
		if err := probe(o.summary); err != nil {
			return &fileError{"load: " + writingSummary, o.summary, err}
		}
	}
	l := &loading{tool: t, loadOptions: o}
	if l.set, err = openSet(o.model); err != nil {
		return err
	}
	defer l.set.Close()
	for _, n := range l.set.Warnings {
		fmt.Fprintln(t.stderr, "note:", n)
	}
	l.sum = loadSummary{summary: summary{Verdict: trainerrank.Whole, Basis: trainerrank.Exact, Threads: o.threads, WeightsBytes: l.set.TotalBytes()}}
	err = l.fit(ctx)
	var refused *loader.BudgetInfeasibleError
	var wrong *loader.FitArgumentError
	switch {
	case errors.As(err, &refused):
		l.sum.Verdict, l.sum.BudgetBytes, l.sum.UsableLimitBytes = trainerrank.Refused, refused.Budget, refused.Budget
		l.sum.PredictedPeakBytes, l.sum.SmallestBudgetBytes, l.sum.MissingBytes = refused.Minimum, refused.Minimum, refused.MissingBytes()
		return errors.Join(&refusedError{fmt.Errorf("load: refused before anything was read: %w", err)}, l.writeSummary(ctx))
	case errors.As(err, &wrong):
		return &usageError{"load: " + err.Error(), "the classic mode takes the copiers pread and direct"}
	case err != nil:
		return err
	}
	if o.dryRun {
		return errors.Join(l.print(ctx, nil), l.writeSummary(ctx))
	}
	fmt.Fprintf(t.stderr, "plan: %s in %s by %s: %s predicted, budget %s\n", showSize(l.set.TotalBytes()), count(len(l.set.Files), "file"), l.copier.Name(),
		showSize(l.plan.Peak), showSize(l.plan.Budget))
	l.noteOverstated(l.plan.Budget)
	report, err := l.run(ctx)
	if err != nil {
		return err
	}
	if l.pages > report.Peak {
		fmt.Fprintf(t.stderr, "note: this mode counts bytes; counted in pages, as the arena and the machine do, %s were in use at most\n", showSize(l.pages))
	}
	l.sum.ObservedPeakBytes, l.sum.Seconds, l.sum.BytesRead, l.sum.Chunks = report.Peak, report.Seconds, report.Bytes, report.Chunks
	if err := l.print(ctx, report); err != nil {
		return err
	}
	if err := l.writeSummary(ctx); err != nil {
		return err
	}
	fmt.Fprintf(t.stderr, "done: %s, predicted peak %d and observed %d bytes of a budget of %d\n", count(report.Chunks, "chunk"), report.Predicted, report.Peak, report.Budget)
	return nil
}

// openSet opens a folder or a file, or what is built in.
func openSet(model string) (*loader.Set, error) {
	if name, ok := strings.CutPrefix(model, "builtin:"); ok {
		folder, err := builtin.Open(name)
		if err != nil {
			return nil, &usageError{"load: " + err.Error(), "give one of these, or the path of a model folder"}
		}
		return loader.OpenFS(folder, model)
	}
	set, err := loader.Open(model)
	if err != nil {
		return nil, damaged(err)
	}
	return set, nil
}

// pieceAtom is at what multiples a tensor may be cut if it has to be: pieces of it are only copied, so any will do.
const pieceAtom = device.PageSize

// fit plans. Without a stated budget one is suggested, which is a warning if it is not enough.
func (l *loading) fit(ctx context.Context) error {
	stats := loader.StatsOf(l.set, loader.StatsOptions{Atom: func(*loader.Tensor) int64 { return pieceAtom }})
	p := loader.PlanParams{
		Budget: l.budget, QueueSize: l.queue, MaxChunk: l.maxChunk, AccumulateResident: true, Group: l.group, Align: device.PageSize, Classic: l.classic,
	}
	most := int64(-1)
	if l.budget == 0 {
		dev, err := device.NewHost(0)
		if err != nil {
			return err
		}
		most = dev.Free()
		if p.Budget, err = loader.SuggestBudget(ctx, dev, nil); err != nil {
			return err
		}
		p.Budget, most = p.Budget/int64(l.group), most/int64(l.group) // the ranks share this machine
	}
	plan := func(c loader.Copier) (err error) {
		l.copier = c
		p.Copier = c.Costs(l.set.Files)
		if most < 0 {
			l.plan, err = loader.Fit(stats, p)
			return err
		}
		var warning string
		if l.plan, warning, err = loader.FitSuggested(stats, p, most); warning != "" {
			fmt.Fprintln(l.stderr, "note:", warning)
		}
		return err
	}
	if l.copier == nil && l.loadOptions.copier != autoCopier {
		c, err := loader.NewCopier(l.loadOptions.copier, l.threads)
		if err != nil {
			return &usageError{"load: " + err.Error(), "leave --copier out to have it found"}
		}
		err = plan(c)
		l.planned()
		return err
	}
	// What is found must not change what fits: the smallest budget is that of the copier which needs least, and another is taken only
	// if it fits as well.
	plain, err := loader.NewCopier(loader.CopierPread, l.threads)
	if err != nil {
		return err
	}
	if err := plan(plain); err != nil {
		return err
	}
	if found := loader.Probe(l.set, l.threads); found.Name() != plain.Name() {
		least, kept := l.plan.Minimum, l.plan
		if plan(found) != nil {
			l.copier, l.plan = plain, kept
		}
		l.plan.Minimum = least
	}
	l.planned()
	return nil
}

// planned notes what the plan says.
func (l *loading) planned() {
	if l.plan == nil {
		return
	}
	l.sum.Copier, l.sum.BudgetBytes, l.sum.UsableLimitBytes = l.copier.Name(), l.plan.Budget, l.plan.Budget
	l.sum.PredictedPeakBytes, l.sum.SmallestBudgetBytes = l.plan.Peak, l.plan.Minimum
}

// run carries the plan out, on as many ranks as it is for.
func (l *loading) run(ctx context.Context) (*loader.LoadReport, error) {
	bar := newProgress(l.stderr, "load")
	defer bar.end()
	var mu sync.Mutex
	var all loader.LoadReport
	err := l.ranks(func(w collective.World) error {
		dev, err := device.NewHost(l.capacity())
		if err != nil {
			return err
		}
		o := loader.LoadOptions{Device: dev, Copier: l.copier, Threads: l.threads, World: w}
		if w.Rank() == 0 {
			o.Progress = func(done, total int64) { bar.at(done, total, "bytes") }
		}
		tensors, report, err := l.set.Execute(ctx, l.plan, o)
		defer tensors.Free()
		mu.Lock()
		defer mu.Unlock()
		l.pages = max(l.pages, dev.Stats().PeakInUse)
		merge(&all, report)
		return err
	})
	return &all, err
}

// merge adds what another rank has done to a report: of peaks the largest.
func merge(all, r *loader.LoadReport) {
	if all.PerFile == nil {
		*all = *r
		return
	}
	all.Peak, all.Seconds = max(all.Peak, r.Peak), max(all.Seconds, r.Seconds)
	all.Bytes += r.Bytes
	all.Chunks += r.Chunks
	for i := range all.PerFile {
		f, g := &all.PerFile[i], &r.PerFile[i]
		f.Chunks += g.Chunks
		f.Largest, f.Peak = max(f.Largest, g.Largest), max(f.Peak, g.Peak)
	}
}

func (l *loading) ranks(f func(collective.World) error) error {
	if l.group == 1 {
		return f(collective.Solo{})
	}
	return collective.Run(l.group, f)
}

// capacity is that of the arena. The classic mode counts bytes where memory comes in pages, so each block may take most of a page more.
func (l *loading) capacity() int64 {
	bytes := l.plan.Budget
	if l.classic {
		for i := range l.plan.Files {
			bytes += 2 * device.PageSize * int64(len(l.plan.Files[i].Tensors)+1)
		}
	}
	return bytes
}

// print prints the plan and, if there is one, the report.
func (l *loading) print(ctx context.Context, report *loader.LoadReport) error {
	w := interruptible{ctx, l.stdout}
	if !l.json {
		text := l.plan.String()
		if report != nil {
			text += "\n" + report.String()
		}
		_, err := io.WriteString(w, text)
		return err
	}
	full, err := json.Marshal(l.plan)
	if err != nil {
		return err
	}
	var p planSummary
	if err := json.Unmarshal(full, &p); err != nil {
		return err
	}
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(p)
}

func (l *loading) writeSummary(ctx context.Context) error {
	return writeSummary(ctx, "load", l.summary, l.sum)
}
