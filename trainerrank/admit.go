package trainerrank

import (
	"context"
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
