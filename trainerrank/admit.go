package trainerrank

import (
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/forward/prefixtree"
	"github.com/trainerrank/engine/ladder"
	"github.com/trainerrank/engine/profile"
)

// The nouns of an admission are those of packages ladder and profile.
type (
	Basis     = profile.Basis
	Verdict   = ladder.Verdict
	Reason    = ladder.Reason
	Rung      = ladder.Rung
	Retention = ladder.Retention
)

// Bases, verdicts and retentions.
const (
	Exact   = profile.Exact
	Learned = profile.Learned
	Cold    = profile.Cold
	Whole   = ladder.Whole
	Split   = ladder.Split
	Refused = ladder.Refused
	Stored  = ladder.Stored
	Layer   = ladder.Layer
	Replay  = ladder.Replay
)

// Admission is the answer to whether a call fits, and how it would run. It holds no token.
//
// A device counts pages, and what several subforwards keep lies side by side. So PredictedPeakBytes, SmallestBudgetBytes and the TotalBytes of a rung are whole
// pages; Required and Retained of a rung are what each chunk would take alone, in whole pages too, and their running peak may be some pages above TotalBytes.
type Admission struct {
	ladder.Admission
	Shares       device.Sizes  `json:"-"` // PredictedPeakBytes by purpose, at the moment of the peak
	PlanningTime time.Duration `json:"-"`

	asked *question // what it answers
}

// question is what the planner is told of a call. The answer is a function of it, and of nothing else: no token, no clock, no state of a device or a model. That
// is why a [Record] of it can be answered again elsewhere; its JSON form is part of that of a record.
type question struct {
	Usable   int64              `json:"usable_limit_bytes"`
	Explain  bool               `json:"explain,omitzero"` // ask for the least that would do, also if the call is admitted
	Device   string             `json:"device"`           // its name
	Model    forward.Spec       `json:"model"`
	Tables   []prefixtree.Table `json:"tables"`
	Anchor   string             `json:"anchor,omitzero"` // a layout that is forced; "" for the cheapest
	Requests []request          `json:"requests"`
	Groups   []requests         `json:"groups"`
	// Retentions are those that may be used for graphs; nil means all.
	Retentions []Retention `json:"retentions,omitempty"`
	// Learned is what prices are made of; nil means rehearsals.
	Learned *experience `json:"learned,omitempty"`

	rehearser
	said *footprints // what the rehearser has said, if that is to be remembered
}

// request is an input without its tokens and labels.
type request struct {
	Group  int  `json:"group"` // -1 if nothing is wanted of it
	Tokens int  `json:"tokens"`
	Width  int  `json:"target_width,omitzero"` // labels per position; 0: none
	TopK   int  `json:"top_k,omitzero"`
	Logits bool `json:"logits,omitzero"`
	Hidden bool `json:"hidden_states,omitzero"`
}

// requests are what is known of those of a group together.
type requests struct {
	group
	Adapter *adapter `json:"adapter,omitempty"` // what the checkpoint adds to; nil for the base model
	Tree    outlined `json:"tree"`              // its rows are the requests, in the caller's order
}

// adapter is the shape of an adapter.
type adapter struct {
	Bytes   int64     `json:"bytes"` // of all its parameters
	Modules []adapted `json:"modules"`
}

// adapted is a module to which an adapter adds.
type adapted struct {
	Module int `json:"module"`
	Rank   int `json:"rank"`
}

func shapeOf(a *forward.Adapter) *adapter {
	if a == nil {
		return nil
	}
	s := &adapter{Bytes: a.Bytes}
	for _, l := range a.LoRA {
		s.Modules = append(s.Modules, adapted{l.Module, l.Rank})
	}
	return s
}

// adapter is one of the shape, without parameters: for a rehearsal.
func (s *adapter) adapter(name string) *forward.Adapter {
	if s == nil {
		return nil
	}
	a := &forward.Adapter{Name: name, Bytes: s.Bytes}
	for _, m := range s.Modules {
		a.LoRA = append(a.LoRA, forward.LoRA{Module: m.Module, Rank: m.Rank})
	}
	return a
}

// outlined is a tree in its short form.
type outlined struct{ *prefixtree.Tree }

// rehearser is what the planner asks of a model.
type rehearser interface {
	Rehearse(b *forward.Batch) (forward.Footprint, error)
}

// ask puts the question whether a call fits, and if explain, also what the least is that would do.
func (t *TrainerRank) ask(c *call, g *ground, explain bool) (*question, error) {
	q := &question{
		Usable: g.usable, Explain: explain, Device: t.dev.Name(), Model: t.model.Spec(), Tables: t.tables, Anchor: g.anchor, Learned: g.learned, rehearser: g.model,
		Requests: make([]request, len(c.inputs)), Groups: make([]requests, len(c.members)), Retentions: c.retentions,
	}
	for i, in := range c.inputs {
		q.Requests[i] = request{Group: c.groups[i], Tokens: len(in.Tokens), TopK: in.TopK, Logits: in.Logits, Hidden: in.HiddenStates}
		if in.Targets != nil {
			q.Requests[i].Width = in.Width()
		}
	}
	for g, members := range c.members {
		tree, err := prefixtree.Build(c.rows(members))
		if err != nil {
			return nil, err
		}
		a, err := t.adapterOf(c, c.kinds[g])
		if err != nil {
			return nil, err
		}
		q.Groups[g] = requests{c.kinds[g], shapeOf(a), outlined{tree}}
	}
	return q, nil
}

// admit plans a call and says whether it fits.
func (t *TrainerRank) admit(ctx context.Context, c *call, g *ground, explain bool) (*Admission, error) {
	start := time.Now()
	q, err := t.ask(c, g, explain)
	if err != nil {
		return nil, err
	}
	if t.records != nil || t.misses != nil {
		q.recording()
	}
	a, err := q.admit(ctx)
	if err != nil {
		return nil, err
	}
	a.PlanningTime = time.Since(start)
	if t.records != nil {
		t.records(q.record(a))
	}
	return a, nil
}

// admit answers a question.
func (q *question) admit(ctx context.Context) (*Admission, error) {
	p := newPlanner(ctx, q)
	lc, err := p.describe()
	if err != nil {
		return nil, err
	}
	a := &Admission{asked: q}
	search := func(usable int64, o ladder.Options) (*ladder.Admission, error) {
		return ladder.Search(lc, p, p, usable, o)
	}
	if q.Learned != nil {
		l := p.learned(lc)
		search = func(usable int64, o ladder.Options) (*ladder.Admission, error) {
			return l.search(lc, usable, o)
		}
	}
	// A total fits if its pages do, which is to say, if it is within the whole pages that may be used.
	found, err := search(q.Usable&^(device.PageSize-1), ladder.Options{Explain: q.Explain, Retentions: q.Retentions})
	if err != nil {
		return nil, err
	}
	a.Admission = *found
	for _, c := range a.Chunks {
		if c.Plan != nil {
			c.Plan.Work.(*work).ascend(a.Retention)
		}
	}
	a.UsableLimitBytes = q.Usable
	a.PredictedPeakBytes, a.SmallestBudgetBytes = pages(a.PredictedPeakBytes), pages(a.SmallestBudgetBytes)
	for i := range a.Rungs {
		r := &a.Rungs[i]
		r.TotalBytes = pages(r.TotalBytes)
		if r.LowerBytes > 0 {
			r.LowerBytes = pages(r.LowerBytes)
		}
		for j := range r.Required {
			r.Required[j], r.Retained[j] = pages(r.Required[j]), pages(r.Retained[j])
		}
	}
	if len(q.Requests) == 0 {
		a.SubforwardRequestIndices = [][]int{}
	}
	if q.grad() {
		a.Shares = slabs(a)
		for _, c := range a.Chunks {
			a.Shares[device.Retained] += c.Price.Retained - c.Price.Outputs
		}
		return a, nil
	}
	for _, turn := range turns(a) {
		if turn.Total() > a.Shares.Total() {
			a.Shares = turn
		}
	}
	return a, nil
}

// grad says whether any graph is to be kept.
func (q *question) grad() bool {
	return slices.ContainsFunc(q.Groups, func(r requests) bool { return r.Grad })
}

// whole is the price of the call in one subforward, in the layout with fewest tokens.
func (q *question) whole(ctx context.Context) (profile.Price, error) {
	var wanted []int
	for i := range q.Requests {
		if q.Requests[i].Group >= 0 {
			wanted = append(wanted, i)
		}
	}
	if wanted == nil {
		return profile.OfFootprints(), nil
	}
	r := Stored
	if len(q.Retentions) > 0 && q.grad() {
		r = q.Retentions[0]
	}
	p := newPlanner(ctx, q)
	if q.Learned == nil {
		return p.Minimal(wanted, r)
	}
	lc, err := p.describe()
	if err != nil {
		return profile.Price{}, err
	}
	return p.learned(lc).Minimal(wanted, r)
}

// planner lays out and prices the subforwards of one call for the ladder.
type planner struct {
	*question
	ctx    context.Context
	cost   prefixtree.Cost
	inputs []forward.Input          // of the requests: zeros in place of tokens and labels
	rows   []int                    // per request its row in the tree of its group
	visit  *ladder.Visit            // of the requests
	shared map[string]profile.Price // of full sharing, by requests
	blank  []int32                  // zeros
}

// work is a subforward that was laid out.
type work struct {
	passes []*pass // one per group
	prices map[Retention]profile.Price
	load   profile.Load // of a price that is learned
}

// ascend puts the pass with the most intermediates last, where the outputs of all are there: so the subforward reaches the bytes that it is priced at. Backwards are
// run the other way round, while all graphs are there.
func (w *work) ascend(r Retention) {
	slices.SortStableFunc(w.passes, func(a, b *pass) int {
		x, y := profile.OfFootprints(a.prints[r]), profile.OfFootprints(b.prints[r])
		return cmp.Compare(x.Ephemeral(), y.Ephemeral())
	})
}

// pass is the part of a subforward that is one batch.
type pass struct {
	requests []int // indices of the caller's inputs
	layout   *prefixtree.Layout
	prints   map[Retention]forward.Footprint
}

func newPlanner(ctx context.Context, q *question) *planner {
	p := &planner{
		question: q, ctx: ctx, shared: map[string]profile.Price{},
		cost:   prefixtree.CostFor(q.Tables, prefixtree.Facts{Device: q.Device, Hidden: q.Model.Hidden, Layers: q.Model.Layers}),
		inputs: make([]forward.Input, len(q.Requests)), rows: make([]int, len(q.Requests)),
	}
	longest := 0
	for i := range q.Requests {
		longest = max(longest, q.Requests[i].Tokens*max(1, q.Requests[i].Width))
	}
	p.blank = make([]int32, longest)
	known := make([]int, len(q.Groups)) // rows of each
	for i := range q.Requests {
		r := &q.Requests[i]
		in := &p.inputs[i]
		*in = forward.Input{Tokens: p.zeros(r.Tokens), TargetWidth: r.Width, TopK: r.TopK, Logits: r.Logits, HiddenStates: r.Hidden, Grad: forward.NoGrad}
		if r.Width > 0 {
			in.Targets = p.zeros(r.Tokens * r.Width)
		}
		if r.Group < 0 {
			continue
		}
		g := &q.Groups[r.Group]
		if in.Checkpoint = forward.BaseModel(); g.Slot != "" {
			in.Checkpoint = forward.Checkpoint(g.Slot)
		}
		if g.Grad {
			in.Grad = forward.WithGrad
		}
		p.rows[i] = known[r.Group]
		known[r.Group]++
	}
	return p
}

// zeros is a list of n zeros, which nobody may change.
func (p *planner) zeros(n int) []int32 {
	if len(p.blank) < n {
		p.blank = make([]int32, max(n, 2*len(p.blank)))
	}
	return p.blank[:n:n]
}

// pages rounds bytes up to whole pages, the largest number of bytes down.
func pages(bytes int64) int64 {
	if bytes > math.MaxInt64-device.PageSize {
		return math.MaxInt64 &^ (device.PageSize - 1)
	}
	return device.RoundPages(bytes)
}

// turns is what is in use at most while each subforward of a plan without gradients runs: the outputs so far, what else was kept, and its own scratch. Together these are
// whole pages.
func turns(a *Admission) []device.Sizes {
	var list []device.Sizes
	outputs, kept := int64(0), int64(0)
	for _, c := range a.Chunks {
		if c.Plan == nil {
			continue
		}
		total := pages(outputs + kept + c.Price.Required)
		outputs += c.Price.Outputs
		kept += c.Price.Retained - c.Price.Outputs
		turn := device.Sizes{device.Outputs: pages(outputs)}
		turn[device.Retained] = min(pages(kept), total-turn[device.Outputs])
		turn[device.Scratch] = total - turn.Total()
		list = append(list, turn)
	}
	return list
}

// describe is the call as the ladder sees it.
func (p *planner) describe() (*ladder.Call, error) {
	lc := &ladder.Call{ExpertParallel: p.Model.ExpertParallel, Requests: make([]ladder.Request, len(p.Requests))}
	groups, trees := make([]int, len(p.Requests)), make([]*prefixtree.Tree, len(p.Groups))
	for i := range p.Requests {
		r := &lc.Requests[i]
		groups[i] = p.Requests[i].Group
		r.Group, r.Tokens = groups[i], p.Requests[i].Tokens
		if r.Group >= 0 {
			outputs, err := profile.EngineWidths.Outputs(&p.inputs[i], p.Model)
			if err != nil {
				return nil, err
			}
			r.Outputs = device.RoundAlign(min(outputs, math.MaxInt64/2))
			r.Grad = p.Groups[r.Group].Grad
		}
	}
	for g := range p.Groups {
		trees[g] = p.Groups[g].Tree.Tree
	}
	var err error
	if p.visit, err = ladder.NewVisit(groups, trees); err != nil {
		return nil, err
	}
	lc.Order = p.visit.Order
	return lc, nil
}

// Plan lays out requests as one subforward. It is for package ladder.
func (p *planner) Plan(requests []int, l ladder.Layout) (*ladder.Plan, error) {
	if err := p.ctx.Err(); err != nil {
		return nil, fmt.Errorf("forward: %w", err)
	}
	w := &work{}
	plan := &ladder.Plan{Work: w}
	for _, of := range p.byGroup(requests) {
		pass := &pass{requests: of}
		tree, err := p.tree(of)
		if err != nil {
			return nil, err
		}
		if l == ladder.FullSharing {
			pass.layout = tree.FullSharing()
		} else {
			choice, err := prefixtree.Select(tree, &p.cost, prefixtree.Options{Anchor: p.Anchor})
			if err != nil {
				return nil, err
			}
			if pass.layout, err = tree.Layout(choice.Decisions); err != nil {
				return nil, err
			}
		}
		if n := pass.layout.Packed; n > math.MaxInt32 {
			return nil, fmt.Errorf("forward: %d packed tokens, at most %d are possible in one batch", n, math.MaxInt32)
		}
		plan.Packed += pass.layout.Packed
		plan.Layouts = append(plan.Layouts, pass.layout)
		w.passes = append(w.passes, pass)
	}
	return plan, nil
}

// tree is the tree of requests of one group, a row each in their order.
func (p *planner) tree(requests []int) (*prefixtree.Tree, error) {
	rows, all := make([]int, len(requests)), true
	for i, r := range requests {
		rows[i] = p.rows[r]
		all = all && rows[i] == i
	}
	whole := p.Groups[p.Requests[requests[0]].Group].Tree.Tree
	if all && len(rows) == len(whole.Terminals) {
		return whole, nil
	}
	return whole.Restrict(rows)
}

// byGroup divides requests by their groups, in the order in which groups first come.
func (p *planner) byGroup(requests []int) [][]int {
	var lists [][]int
	place := map[int]int{}
	for _, r := range requests {
		g := p.Requests[r].Group
		i, known := place[g]
		if !known {
			i = len(lists)
			place[g], lists = i, append(lists, nil)
		}
		lists[i] = append(lists[i], r)
	}
	return lists
}

// Price is the price of a plan, by rehearsal. It is for package ladder.
func (p *planner) Price(plan *ladder.Plan, r ladder.Retention) (profile.Price, error) {
	w := plan.Work.(*work)
	if price, known := w.prices[r]; known {
		return price, nil
	}
	var prints []forward.Footprint
	for _, pass := range w.passes {
		f, err := p.rehearse(pass, r)
		if err != nil {
			return profile.Price{}, err
		}
		prints = append(prints, f)
	}
	price := profile.OfFootprints(prints...)
	if w.prices == nil {
		w.prices = map[Retention]profile.Price{}
	}
	w.prices[r] = price
	return price, nil
}

// rehearse says what a pass needs under a retention. It is not packed for that: most passes are priced and not run.
func (p *planner) rehearse(pass *pass, r Retention) (forward.Footprint, error) {
	l, g := pass.layout, &p.Groups[p.Requests[pass.requests[0]].Group]
	blank := p.zeros(l.Packed)
	b := &forward.Batch{
		Batch:    &prefixtree.Batch{Tokens: blank, Positions: blank, SegmentOf: blank, Spans: l.Spans, Terminals: l.Terminals, Rows: len(pass.requests)},
		Requests: make([]*forward.Input, len(pass.requests)), Adapter: g.Adapter.adapter(g.Slot), Grad: g.Grad,
	}
	if g.Grad {
		b.Keep = r
	}
	for i, r := range pass.requests {
		b.Requests[i] = &p.inputs[r]
	}
	f, err := p.said.of(pass, b.Keep, func() (forward.Footprint, error) { return p.rehearser.Rehearse(b) })
	if err != nil {
		return f, err
	}
	if !g.Grad && (f.Retained != 0 || f.BackwardScratch != 0 || f.Gradients != 0) {
		return f, fmt.Errorf("forward: the model says that a pass without gradients keeps a graph: %v", f)
	}
	// Outputs of subforwards lie side by side, so that they add up to the same however a call is cut. (What somebody else's model rehearses may be
	// rounded otherwise, or not at all.)
	for _, n := range []*int64{&f.Scratch, &f.Retained, &f.BackwardScratch, &f.Gradients} {
		*n = device.RoundPages(*n)
	}
	f.Outputs = device.RoundAlign(f.Outputs)
	if n := device.RoundAlign(f.OutputBytes); n > 0 && device.RoundPages(n) == device.RoundPages(f.Outputs) {
		f.Outputs = n
	}
	if pass.prints == nil {
		pass.prints = map[Retention]forward.Footprint{}
	}
	pass.prints[r] = f
	return f, nil
}

// Minimal is the price of the requests in the layout with fewest tokens. It is for package ladder.
func (p *planner) Minimal(requests []int, r ladder.Retention) (profile.Price, error) {
	key := append(make([]byte, 0, 8+4*len(requests)), r...)
	for _, q := range requests {
		key = binary.LittleEndian.AppendUint32(key, uint32(q))
	}
	if price, known := p.shared[string(key)]; known {
		return price, nil
	}
	plan, err := p.Plan(requests, ladder.FullSharing)
	if err != nil {
		return profile.Price{}, err
	}
	price, err := p.Price(plan, r)
	if err == nil {
		p.shared[string(key)] = price
	}
	return price, err
}

// Bound is the least price of any layout: that of full sharing, since outputs are the same in all of them, and scratch never falls with packed
// tokens. It is for package ladder.
func (p *planner) Bound(requests []int, r ladder.Retention) (profile.Price, error) {
	return p.Minimal(requests, r)
}

// refusal is the error for a call that was not admitted.
func (c *call) refusal(a *Admission) *MemoryError {
	fits := "not even the first input fits"
	if a.LargestPrefix > 0 {
		fits = fmt.Sprintf("the first %d of the %d inputs fit now", a.LargestPrefix, len(c.inputs))
	}
	e := c.memoryError(a)
	e.Suggestion = fmt.Sprintf("give it %d bytes, or smaller inputs or fewer outputs: %s", a.SmallestBudgetBytes, fits)
	if !a.Trusted {
		e.Suggestion += "; nothing of its size was observed yet, and after one call like it a split may be seen to fit"
	}
	return e
}

// refusedElsewhere is the refusal of a call for which there is a plan, but not on another rank. The numbers are those of the plan.
func (c *call) refusedElsewhere(a *Admission) *MemoryError {
	here := *a
	here.Admission = *ladder.MinimumWave(&a.Admission, ladder.NoFit)
	e := c.memoryError(&here)
	e.Suggestion = "give the other rank more memory, smaller inputs or fewer outputs: on this one it fits"
	return e
}

// memoryError has the numbers of an admission or a refusal.
func (c *call) memoryError(a *Admission) *MemoryError {
	e := &MemoryError{
		PredictedPeakBytes: a.PredictedPeakBytes, UsableLimitBytes: a.UsableLimitBytes,
		PackedTokens: a.PackedTokens, LogicalTokens: a.LogicalTokens, Reason: a.Reason,
		Rungs: a.Rungs, Shares: a.Shares, SmallestBudgetBytes: a.SmallestBudgetBytes, LargestPrefix: a.LargestPrefix, Telemetry: telemetry(a),
	}
	for _, members := range c.members {
		e.Requests += len(members)
	}
	return e
}
