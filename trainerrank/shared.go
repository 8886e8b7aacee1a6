package trainerrank

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"

	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/forward/prefixtree"
)

// Peers are the ranks that are given the same inputs. They plan as one: before the search each tells the others, in one collective, everything that its
// plan would depend on and theirs might not, and from then on all search with the same numbers: the least usable bytes, and the most that a plan needs on
// any of them. So nothing is said during the search, however long it is, and its answer is the same on all. That it is, they
// tell each other when they settle, which they do in any case.

// ground is what a call is planned on.
type ground struct {
	hooks
	usable  int64 // bytes
	model   rehearser
	learned *experience // nil: prices are the model's
}

// facts are what a rank tells its peers before they plan.
type facts struct {
	Failed  string `json:"failed,omitempty"` // why it cannot plan
	Usable  int64  `json:"usable"`
	Variant string `json:"variant"`
	Same    []fact `json:"same"` // what must be equal on all peers

	Learned *experience `json:"learned,omitempty"`
}

type fact struct{ Name, Value string }

// SharedInputsError says that ranks that are to share their inputs (see [WithSharedInputs]) were given different ones, or plan them differently. It is the
// same on all of them, and nothing has run.
type SharedInputsError struct {
	Rank  int // the lowest that differs from rank 0
	What  string
	Zero  string // its value on rank 0
	Other string // its value on the rank
}

// Error names what differs with both values.
func (e *SharedInputsError) Error() string {
	return fmt.Sprintf("forward: ranks that share their inputs differ: %s: %s on rank 0 and %s on rank %d", e.What, e.Zero, e.Other, e.Rank)
}

// survey says what a call is planned on. With peers it is a collective, to which a rank that has failed already brings its error.
func (t *TrainerRank) survey(ctx context.Context, c *call, err error) (*ground, error) {
	g := &ground{model: t.exact, learned: t.experience()}
	if err == nil {
		g.hooks, err = readHooks()
	}
	if err == nil {
		g.usable = t.usable(t.dev.Free(), g.hooks)
	}
	if t.peers.Size() == 1 {
		return g, err
	}
	mine := facts{Failed: failure(err), Usable: g.usable, Variant: t.variant(), Learned: g.learned}
	if err == nil {
		var cost []byte
		cost, err = json.Marshal(t.cost())
		mine.Failed = failure(err)
		mine.Same = []fact{{"the inputs", c.fingerprint()}, {"the cost of layouts", string(cost)}, {anchorEnv, g.anchor}, {"the retentions", fmt.Sprint(c.retentions)},
			{"how calls are priced", g.learned.how()}}
	}
	all, failed := exchange(ctx, t.peers, "forward/facts", mine)
	whys := make([]string, len(all))
	for i := range all {
		whys[i] = all[i].Failed
	}
	if err = told(err, failed, whys); err != nil {
		return nil, err
	}
	var variants []string
	for rank := range all {
		f := &all[rank]
		for i := range f.Same {
			if zero := all[0].Same[i]; f.Same[i] != zero {
				return nil, &SharedInputsError{rank, zero.Name, zero.Value, f.Same[i].Value}
			}
		}
		g.usable = min(g.usable, f.Usable)
		g.learned = g.learned.merged(f.Learned)
		if f.Variant != mine.Variant && !slices.Contains(variants, f.Variant) {
			variants = append(variants, f.Variant)
		}
	}
	if variants != nil && t.exact != nil {
		g.model = &neediest{t.exact, variants}
	}
	return g, nil
}

// cost is what layouts are chosen by.
func (t *TrainerRank) cost() prefixtree.Cost {
	spec := t.model.Spec()
	return prefixtree.CostFor(t.tables, prefixtree.Facts{Device: t.dev.Name(), Hidden: spec.Hidden, Layers: spec.Layers})
}

// variant is what the memory of a pass depends on beside the batch.
func (t *TrainerRank) variant() string {
	if m, ok := t.model.(interface{ Variant() string }); ok {
		return m.Variant()
	}
	return ""
}

// fingerprint tells the inputs of a call, and what is wanted of them, from others.
func (c *call) fingerprint() string {
	if c.print != "" {
		return c.print
	}
	h := uint64(14695981039346656037) // FNV-1a, word by word
	add := func(words ...int) {
		for _, n := range words {
			h = (h ^ uint64(n)) * 1099511628211
		}
	}
	list := func(tokens []int32) {
		add(len(tokens))
		for _, t := range tokens {
			h = (h ^ uint64(uint32(t))) * 1099511628211
		}
	}
	wants := func(want bool) int {
		if want {
			return 1
		}
		return 0
	}
	tokens := 0
	for i, in := range c.inputs {
		tokens += len(in.Tokens)
		list(in.Tokens)
		list(in.Targets)
		add(wants(in.Targets != nil), in.Width(), in.TopK, wants(in.Logits), wants(in.HiddenStates), c.groups[i])
	}
	for _, g := range c.kinds {
		add(len(g.Slot), wants(g.Grad))
		for _, b := range []byte(g.Slot) {
			add(int(b))
		}
	}
	c.print = fmt.Sprintf("%d of %d tokens (%016x)", len(c.inputs), tokens, h)
	return c.print
}

// neediest rehearses as each of some peers: a footprint of it has the most of each part on any.
type neediest struct {
	own    rehearser
	others []string // their variants
}

// Rehearse says what does for the pass of a batch on this rank and on any of the others.
func (n *neediest) Rehearse(b *forward.Batch) (forward.Footprint, error) {
	f, err := n.own.Rehearse(b)
	for _, v := range n.others {
		if err != nil {
			return f, err
		}
		m, ok := n.own.(interface {
			RehearseAs(variant string, b *forward.Batch) (forward.Footprint, error)
		})
		if !ok {
			return f, fmt.Errorf("forward: a peer's model is %q, and that of this rank cannot rehearse as that", v)
		}
		var other forward.Footprint
		if other, err = m.RehearseAs(v, b); err == nil {
			f = f.Max(other)
		}
	}
	return f, err
}

// digest names an admission: equal ones have equal digests.
func (a *Admission) digest() (string, error) {
	text, err := json.Marshal(a)
	if err != nil {
		return "", fmt.Errorf("forward: %w", err)
	}
	sum := sha256.Sum256(text)
	return fmt.Sprintf("%s in %d, %d bytes, %s", a.Verdict, a.SubforwardCount(), a.PredictedPeakBytes, hex.EncodeToString(sum[:8])), nil
}
