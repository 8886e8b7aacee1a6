package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
	"time"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/forward/kernel"
	"github.com/trainerrank/engine/forward/transformer"
	"github.com/trainerrank/engine/internal/builtin"
	"github.com/trainerrank/engine/profile"
	"github.com/trainerrank/engine/slots"
	"github.com/trainerrank/engine/trainerrank"
)

// options are the flags of score and plan.
type options struct {
	model, requests, out, summary, pricing, profile, record, replay string
	adapters                                                        []named
	checkpoint                                                      string // default for requests that name none; "": the base model
	budget                                                          int64
	threads                                                         int
	grad, json                                                      bool
	retention                                                       string
	retentions                                                      []trainerrank.Retention // nil: all
	rankOf                                                          int                     // of a fresh adapter
}

func (t *tool) flags(verb string, args []string) (*options, error) {
	o := &options{}
	fs := flag.NewFlagSet(verb, flag.ContinueOnError)
	fs.StringVar(&o.model, "model", "", "model folder, or builtin:NAME (default builtin:"+builtin.Default+")")
	fs.StringVar(&o.requests, "requests", "", "file of requests, one JSON object a line; - is standard input (default: those of the built-in model)")
	fs.Func("budget", "capacity of the arena for weights, adapters, outputs and activations: bytes, or a number with KiB, MiB, GiB, KB, MB, GB (default: what the process may use)", func(s string) (err error) {
		o.budget, err = parseSize(s)
		return err
	})
	fs.StringVar(&o.summary, "summary", "", "file for the summary as one JSON object")
	fs.StringVar(&o.record, "record", "", "file for a record of the plan, for plan --replay; it holds no token. It is written before anything runs, and again if the call then takes more than predicted")
	fs.StringVar(&o.pricing, "pricing", exactPricing, "how calls are priced: exact, by rehearsing them; or learned, by what calls took that ran before, as for a model that cannot rehearse")
	profiles := "file with what calls took, for --pricing learned; "
	if verb == "plan" {
		profiles += "it is read if it is there"
	} else {
		profiles += "it is read if it is there, and written whole or not at all after the call"
	}
	fs.StringVar(&o.profile, "profile", "", profiles)
	fs.IntVar(&o.threads, "threads", 0, "worker threads (default: one per usable CPU)")
	fs.StringVar(&o.out, "out", "", "file for the answers, written whole or not at all; - is standard output (the default)")
	fs.Func("adapter", "NAME=DIR: load a LoRA adapter, as PEFT or the engine saved it, for requests whose checkpoint is NAME; may be given several times", o.addAdapter)
	fs.StringVar(&o.checkpoint, "checkpoint", "", "adapter for requests that name none (default: the base model)")
	if verb == "plan" {
		fs.BoolVar(&o.json, "json", false, "print the admission as JSON")
		fs.StringVar(&o.replay, "replay", "", "instead of planning a call: answer the question of a record again, and say whether the answer is the same")
		fs.BoolVar(&o.grad, "grad", false, "plan a call that keeps graphs for a backward, with what it takes to train the adapters that it uses, or a fresh one if none is given")
		fs.IntVar(&o.rankOf, "rank", defaultRank, "with --grad and without --adapter: rank of the fresh adapter, on every projection")
		fs.StringVar(&o.retention, "retention", "", "with --grad: what graphs may keep, some of stored, layer, replay with commas between them, in the order in which they are tried (default: all)")
	}
	if err := t.parse(fs, args, 0, ""); err != nil {
		return nil, err
	}
	if o.replay != "" {
		var other string
		fs.Visit(func(f *flag.Flag) {
			if f.Name != "replay" && f.Name != "json" {
				other = f.Name
			}
		})
		if other != "" {
			return nil, &usageError{fmt.Sprintf("%s: --replay and --%s", verb, other), "a record holds all that its plan depends on: give --replay alone, or with --json"}
		}
		return o, nil
	}
	given := map[string]bool{}
	fs.Visit(func(f *flag.Flag) { given[f.Name] = true })
	if err := o.checkAdapters(verb, func(name string) bool { return given[name] }); err != nil {
		return nil, err
	}
	switch {
	case o.pricing != exactPricing && o.pricing != learnedPricing:
		return nil, &usageError{fmt.Sprintf("%s: --pricing %q is unknown", verb, o.pricing), "it is exact or learned"}
	case o.profile != "" && o.pricing == exactPricing:
		return nil, &usageError{verb + ": --profile without --pricing learned", "where calls are rehearsed there is nothing to learn: leave it out, or add --pricing learned"}
	}
	if o.threads < 0 || o.threads > 1024 {
		return nil, &usageError{fmt.Sprintf("%s: --threads %d is not between 0 and 1024", verb, o.threads), "leave it out for one per usable CPU"}
	}
	if o.model == "" {
		o.model = "builtin:" + builtin.Default
	}
	if o.requests == "" && !strings.HasPrefix(o.model, "builtin:") {
		return nil, &usageError{verb + ": --model needs --requests", "a request is a JSON object a line: {\"id\": 1, \"input_tokens\": [1,2,3]}"}
	}
	if o.out == "-" {
		o.out = ""
	}
	files := []struct{ flag, path string }{{"out", o.out}, {"summary", o.summary}, {"record", o.record}, {"profile", o.profile}}
	for i, a := range files {
		for _, b := range files[i+1:] {
			if a.path != "" && a.path == b.path {
				return nil, &usageError{fmt.Sprintf("%s: --%s and --%s name the same file", verb, a.flag, b.flag), "the one would replace the other"}
			}
		}
	}
	return o, nil
}

// The pricings.
const (
	exactPricing   = "exact"
	learnedPricing = "learned"
)

// summary is what --summary writes.
type summary struct {
	Verdict             trainerrank.Verdict `json:"verdict"`
	Requests            int                 `json:"requests"`
	LogicalTokens       int                 `json:"logical_tokens"`
	PackedTokens        int                 `json:"packed_tokens"`
	SubforwardCount     int                 `json:"subforward_count"`
	PredictedPeakBytes  int64               `json:"predicted_peak_bytes"`
	ObservedPeakBytes   int64               `json:"observed_peak_bytes"`
	UsableLimitBytes    int64               `json:"usable_limit_bytes"`
	WeightsBytes        int64               `json:"weights_bytes"`
	AdaptersBytes       int64               `json:"adapters_bytes,omitzero"` // with what trains them
	Basis               trainerrank.Basis   `json:"basis"`
	Kernel              string              `json:"kernel"`
	Threads             int                 `json:"threads"`
	Seconds             float64             `json:"seconds"`
	SmallestBudgetBytes int64               `json:"smallest_budget_bytes"`
	LargestPrefix       int                 `json:"largest_prefix"`
}

// session is a model that is placed and planned for, not yet loaded.
type session struct {
	*options
	*tool
	verb     string
	file     string // what the requests are in, for messages
	reqs     []request
	inputs   forward.Inputs
	backend  *kernel.Host
	model    *transformer.Model
	dev      *device.Host
	outlines []*slots.Outline // of the adapters
	resident device.Sizes     // what they take
	rank     *trainerrank.TrainerRank
	admit    *trainerrank.Admission
	planned  *trainerrank.Record
	missed   *trainerrank.Record // of the plan, if it was wrong
	known    *profile.Profile    // what was learned before; empty if prices are exact
	staging  int64               // bytes in flight while loading
	sum      summary
}

// open reads requests, configuration and headers, and plans the call. It reads no weights.
func (t *tool) open(ctx context.Context, verb string, o *options) (s *session, err error) {
	s = &session{options: o, tool: t, verb: verb, file: o.requests}
	switch o.requests {
	case "":
		s.file = o.model + "/requests.jsonl"
	case "-":
		s.file = "standard input"
	}
	defer func() {
		if err != nil {
			s.close()
			s = nil
		}
	}()
	if err := s.probe(); err != nil {
		return s, err
	}
	if s.backend, err = kernel.NewHost(o.threads); err != nil {
		return s, err
	}
	if log := s.backend.Log(); log != "" {
		fmt.Fprintln(t.stderr, "note:", log)
	}
	if err := s.openModel(); err != nil {
		return s, err
	}
	if err := s.readRequests(ctx); err != nil {
		return s, err
	}
	if err := s.readProfile(ctx); err != nil {
		return s, err
	}
	if err := s.plan(ctx); err != nil {
		return s, err
	}
	return s, s.writeRecord(ctx)
}

const (
	writingAnswers = "write the answers to"
	writingSummary = "write the summary to"
	writingRecord  = "write the record to"
	writingProfile = "write the profile to"
)

// probe finds out whether the files can be written, before there is anything to lose.
func (s *session) probe() error {
	for _, f := range []struct{ what, path string }{{writingAnswers, s.out}, {writingSummary, s.summary}, {writingRecord, s.record}, {writingProfile, s.profile}} {
		if f.path == "" || (f.what == writingAnswers || f.what == writingProfile) && s.verb == "plan" {
			continue
		}
		if sameFile(f.path, s.requests) {
			return &usageError{fmt.Sprintf("%s: %s %s would overwrite the requests", s.verb, f.what, f.path), "name another file"}
		}
		if err := probe(f.path); err != nil {
			return &fileError{s.verb + ": " + f.what, f.path, err}
		}
	}
	return nil
}

// sameFile says whether two paths lead to one regular file.
func sameFile(a, b string) bool {
	fa, errA := os.Stat(a)
	fb, errB := os.Stat(b)
	return errA == nil && errB == nil && fa.Mode().IsRegular() && os.SameFile(fa, fb)
}

// noteOverstated says so if a stated budget is more than this process may use: the arena will hold to the budget, but the operating system need not.
func (t *tool) noteOverstated(budget int64) {
	if most, why := device.DefaultCapacity(); budget > most && most > 0 {
		fmt.Fprintf(t.stderr, "note: a budget of %s is more than this process may use, %s (%s)\n", showSize(budget), showSize(most), why)
	}
}

// openModel opens the folder: built in, or on disk.
func (s *session) openModel() error {
	name, ok := strings.CutPrefix(s.options.model, "builtin:")
	if !ok {
		dir := s.options.model
		fi, err := os.Stat(dir)
		if err != nil {
			return fmt.Errorf("open model: %w", err)
		}
		if !fi.IsDir() {
			return &hinted{fmt.Errorf("open model: %s is not a folder", dir), "give the folder that holds config.json and the weights"}
		}
		s.model, err = transformer.OpenFolder(dir, s.backend)
		return damaged(err)
	}
	folder, err := builtin.Open(name)
	if err != nil {
		return &usageError{s.verb + ": " + err.Error(), "give one of these, or the path of a model folder"}
	}
	s.model, err = transformer.OpenFS(folder, s.options.model, s.backend)
	return err
}

func (s *session) readRequests(ctx context.Context) error {
	// What is read may be a pipe or a terminal.
	data, err := await(ctx, s.requestText)
	if err != nil {
		return &fileError{"read requests: read", s.file, err}
	}
	if s.reqs, err = parseRequests(s.file, data); err != nil {
		return err
	}
	if len(s.reqs) == 0 {
		fmt.Fprintf(s.stderr, "note: %s holds no requests\n", s.file)
	}
	list := make([]forward.Input, len(s.reqs))
	for i := range s.reqs {
		list[i] = s.reqs[i].input
	}
	s.inputs = forward.Many(list...)
	return nil
}

// requestText is the request file: that of the built-in model, standard input, or a file.
func (s *session) requestText() ([]byte, error) {
	switch s.options.requests {
	case "":
		folder, err := builtin.Open(strings.TrimPrefix(s.options.model, "builtin:"))
		if err != nil {
			return nil, err
		}
		return fs.ReadFile(folder, "requests.jsonl")
	case "-":
		return io.ReadAll(s.stdin)
	}
	return os.ReadFile(s.options.requests)
}

// locate turns the place of an input into a line of the request file.
func (s *session) locate(err error) error {
	var in *trainerrank.InputError
	if !errors.As(err, &in) || in.Index >= len(s.reqs) {
		return err
	}
	var support *trainerrank.RuntimeSupportError
	if errors.As(err, &support) { // of the call, not of this request
		return &hinted{fmt.Errorf("%s: %w", s.verb, support), "leave --grad out"}
	}
	hint := "tokens and labels are ids of this model's own tokenizer; -100 is no label"
	var slot *trainerrank.SlotStateError
	if errors.As(err, &slot) {
		hint = s.whichAdapters()
		if slot.Slot == "" {
			hint = "name one of the adapters as its checkpoint, or with --checkpoint for all that name none"
			if len(s.adapters) == 0 {
				hint = "leave its checkpoint out: requests that name none train the fresh adapter"
			}
		}
	}
	return &lineError{file: s.file, line: s.reqs[in.Index].line, text: in.Err.Error(), hint: hint}
}

// plan prices the call, the adapters and the load together, against the capacity of a fresh arena, and refuses what does not fit.
func (s *session) plan(ctx context.Context) (err error) {
	if s.dev, err = device.NewHost(s.budget); err != nil {
		return err
	}
	s.noteOverstated(s.budget)
	if err := s.outline(); err != nil {
		return err
	}
	w, adapters := s.model.WeightBytes(), s.resident.Total()
	// With weights or adapters that do not fit there is no room to plan in; the call is planned all the same, for the numbers of the refusal.
	limit, model := s.dev.Capacity(), forward.Model(s.model)
	if s.pricing == learnedPricing {
		limit, model = profile.Usable(limit, limit), trainerrank.Opaque(model) // what is not used stands for what estimates do not see
	}
	room := limit - w
	opts := []trainerrank.Option{trainerrank.WithDevice(s.dev), trainerrank.WithProfile(s.known), trainerrank.WithUsableBytes(max(0, room-adapters))}
	if s.dev.Capacity() >= w {
		if err := s.model.Place(s.dev); err != nil {
			return err
		}
	}
	if s.record != "" {
		opts = append(opts, trainerrank.WithRecords(func(r *trainerrank.Record) { s.planned = r }),
			trainerrank.WithMisses(func(r *trainerrank.Record) { s.missed = r }))
	}
	if s.rank, err = trainerrank.New(model, opts...); err != nil {
		return err
	}
	a, err := s.rank.Plan(ctx, s.inputs, s.callOptions(trainerrank.WithOutlines(s.outlines...))...)
	if err != nil {
		return s.locate(err)
	}
	s.admit = a
	// While weights are loaded, the arena holds bytes in flight where adapters and the call will be: as many as these need, if that is enough to read at all.
	beside := adapters + a.PredictedPeakBytes
	s.staging = s.model.Staging(beside)
	need := max(beside, s.staging)
	least := s.model.MinStaging()
	if need > room {
		a.Verdict = trainerrank.Refused
	}
	if max(least, adapters) > room {
		a.LargestPrefix = 0
	}
	// The rank speaks of the call alone; here everything counts against one budget.
	a.PredictedPeakBytes, a.SmallestBudgetBytes, a.UsableLimitBytes = w+need, w+max(adapters+a.SmallestBudgetBytes, least), limit
	if s.pricing == learnedPricing {
		a.SmallestBudgetBytes = profile.Total(a.SmallestBudgetBytes)
	}
	for i := range a.Rungs {
		r := &a.Rungs[i]
		r.TotalBytes = w + max(adapters+r.TotalBytes, least)
		r.Fits = r.TotalBytes <= a.UsableLimitBytes && r.Layout != ""
		for j := range r.Required {
			r.Required[j] += w + adapters
		}
	}
	s.sum = summary{
		Verdict: a.Verdict, Requests: len(s.reqs), LogicalTokens: a.LogicalTokens, PackedTokens: a.PackedTokens,
		SubforwardCount: len(a.SubforwardRequestIndices), PredictedPeakBytes: a.PredictedPeakBytes, UsableLimitBytes: a.UsableLimitBytes,
		WeightsBytes: w, AdaptersBytes: adapters, Basis: a.Basis, Kernel: s.backend.Name(), Threads: s.backend.Threads(),
		SmallestBudgetBytes: a.SmallestBudgetBytes, LargestPrefix: a.LargestPrefix,
	}
	return nil
}

// refusal is the error for an admission that is none.
func (s *session) refusal() error {
	a := s.admit
	fits := "not even the first request fits"
	if a.LargestPrefix > 0 {
		fits = fmt.Sprintf("the first %d of %d requests fit", a.LargestPrefix, len(s.reqs))
	}
	if !a.Trusted {
		fits += "; nothing of this size was observed yet, and if it is run once with more, and with --profile, a split may be seen to fit"
	}
	why := a.Refusal()
	if a.Reason == "" {
		why = fmt.Sprintf("unable to find a feasible split (%s)", s.noRoom())
	}
	return &refusedError{&hinted{
		fmt.Errorf("%s: refused before anything ran: %s: the call is predicted to need %s and may use %s (weights %d%s)",
			s.verb, why, showSize(a.PredictedPeakBytes), showSize(a.UsableLimitBytes), s.sum.WeightsBytes, s.adapterBytes(", adapters %d")),
		fmt.Sprintf("give --budget %d, or smaller requests or fewer outputs; %s", a.SmallestBudgetBytes, fits),
	}}
}

// noRoom is what does not fit where the call alone would.
func (s *session) noRoom() string {
	if s.sum.WeightsBytes+s.sum.AdaptersBytes > s.sum.UsableLimitBytes && s.sum.AdaptersBytes > 0 {
		return "there is no room for the adapters beside the weights"
	}
	return "there is no room to read the weights through"
}

// damaged gives a fault in a model folder a hint, if it has none of its own.
func damaged(err error) error {
	if err == nil || ownHint(err) != "" {
		return err
	}
	return &hinted{err, "compare the folder with where it came from, or fetch it again: config.json, and model.safetensors or an index with the files that it names"}
}

// hinted is an error with a hint.
type hinted struct {
	error
	hint string
}

func (e *hinted) Hint() string  { return e.hint }
func (e *hinted) Unwrap() error { return e.error }

func (s *session) close() {
	if s.rank != nil {
		s.rank.Close()
	}
	if s.model != nil {
		s.model.Close()
	}
	if s.backend != nil {
		s.backend.Close()
	}
}

func (s *session) writeSummary(ctx context.Context) error {
	return writeSummary(ctx, s.verb, s.summary, s.sum)
}

// writeSummary writes the summary of a verb as one JSON object, if a file is named for it.
func writeSummary(ctx context.Context, verb, path string, sum any) error {
	if path == "" {
		return nil
	}
	err := writeFile(ctx, path, func(w io.Writer) error {
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		return e.Encode(sum)
	})
	if err != nil {
		return &fileError{verb + ": " + writingSummary, path, err}
	}
	return nil
}

func (s *session) notes() {
	for _, n := range s.model.Notes() {
		fmt.Fprintln(s.stderr, "note:", n)
	}
}

func (t *tool) score(ctx context.Context, args []string) error {
	o, err := t.flags("score", args)
	if err != nil {
		return err
	}
	s, err := t.open(ctx, "score", o)
	if err != nil {
		return err
	}
	defer s.close()
	if s.admit.Verdict == trainerrank.Refused {
		s.notes()
		return errors.Join(s.printRungs(t.stderr), s.refusal(), s.writeSummary(ctx))
	}
	how := string(s.admit.Verdict)
	if s.admit.Verdict == trainerrank.Split {
		how = "split into " + count(s.sum.SubforwardCount, "subforward")
		if err := s.printRungs(t.stderr); err != nil {
			return err
		}
	}
	if s.admit.Basis == trainerrank.Cold {
		fmt.Fprintln(t.stderr, "note: nothing like this call was observed yet: its price is a guess by the size of the model, and it may need much more")
	}
	fmt.Fprintf(t.stderr, "plan: %s, %d tokens packed into %d, %s: %s predicted, %s usable%s, kernel %s, %s\n", count(s.sum.Requests, "request"),
		s.sum.LogicalTokens, s.sum.PackedTokens, how, showSize(s.sum.PredictedPeakBytes), showSize(s.sum.UsableLimitBytes), s.adapterBytes(", %d bytes of adapters"), s.sum.Kernel, count(s.sum.Threads, "thread"))

	bar := newProgress(t.stderr, "load")
	err = s.model.Load(ctx, s.staging, func(done, total int64) { bar.at(done, total, "bytes") })
	bar.end()
	if err != nil {
		return err
	}
	s.notes()
	if err := s.loadAdapters(ctx); err != nil {
		return err
	}

	bar = newProgress(t.stderr, "score")
	start := time.Now()
	res, err := s.rank.DPRankForward(ctx, s.inputs, s.callOptions(trainerrank.WithProgress(func(done, total int) { bar.at(int64(done), int64(total), "steps") }))...)
	bar.end()
	// Also after a failure: what ran out of memory must not be tried again with as much.
	unsaved := errors.Join(s.writeProfile(ctx), s.writeMiss(ctx))
	if err != nil {
		var partial *trainerrank.PartialExecutionError
		var memory *trainerrank.MemoryError
		switch {
		case errors.As(err, &memory) && memory.Telemetry.Basis != trainerrank.Exact && s.profile == "":
			err = &hinted{err, "with --profile FILE what it took is remembered, and the next time it is split, or refused; or give a larger --budget, or smaller requests"}
		case errors.As(err, &partial) && ownHint(err) == "":
			err = &hinted{err, "nothing was answered; with a larger --budget there are fewer subforwards"}
		}
		return errors.Join(s.locate(err), unsaved)
	}
	defer res.Release()
	if unsaved != nil {
		return unsaved
	}
	s.sum.Seconds = time.Since(start).Seconds()
	s.sum.ObservedPeakBytes = s.dev.Stats().PeakInUse

	write := func(w io.Writer) error { return writeAnswers(w, s.reqs, res.Outputs.Flat()) }
	where := s.out
	if where == "" {
		where = "standard output"
		err = write(interruptible{ctx, t.stdout})
	} else {
		err = writeFile(ctx, s.out, write)
	}
	if err != nil {
		return &fileError{"score: " + writingAnswers, where, err}
	}
	if err := s.writeSummary(ctx); err != nil {
		return err
	}
	fmt.Fprintf(t.stderr, "done: %s, %d logical and %d packed tokens, %s, predicted peak %d and observed %d bytes, %.0f tokens/s\n", count(s.sum.Requests, "request"),
		s.sum.LogicalTokens, s.sum.PackedTokens, count(s.sum.SubforwardCount, "subforward"), s.sum.PredictedPeakBytes, s.sum.ObservedPeakBytes, float64(s.sum.LogicalTokens)/s.sum.Seconds)
	return nil
}
