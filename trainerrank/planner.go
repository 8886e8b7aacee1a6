package trainerrank

import (
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"slices"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/forward/prefixtree"
	"github.com/trainerrank/engine/ladder"
	"github.com/trainerrank/engine/profile"
)

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
