package trainerrank

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/forward/prefixtree"
	"github.com/trainerrank/engine/ladder"
	"github.com/trainerrank/engine/profile"
)

// Opaque is the model without its ability to rehearse, as if somebody else had made it: calls of it are priced by what calls took that ran before.
// It takes adapters if the model does.
func Opaque(m forward.Model) forward.Model {
	if a, ok := m.(forward.Adaptable); ok {
		return adaptable{opaque{m}, a}
	}
	return opaque{m}
}

// opaque hides all but the methods of [forward.Model], and what a model says about itself.
type opaque struct{ forward.Model }

// adaptable is an opaque model that takes adapters.
type adaptable struct {
	opaque
	model forward.Adaptable
}

// Modules lists the projections of the model.
func (a adaptable) Modules() []forward.Module { return a.model.Modules() }

// Device is the device of the model's weights, nil if the model names none.
func (o opaque) Device() device.Device {
	if m, ok := o.Model.(interface{ Device() device.Device }); ok {
		return m.Device()
	}
	return nil
}

// Variant is what the memory of a pass depends on beside the batch; "" if the model does not say.
func (o opaque) Variant() string {
	if m, ok := o.Model.(interface{ Variant() string }); ok {
		return m.Variant()
	}
	return ""
}

// Profile is a copy of what the calls so far taught about the memory of calls: for [profile.Profile.Save], so that a rank that starts anew is not cold, and for
// [profile.Profile.Merge]. It is empty if the model can rehearse, for then there is nothing to learn.
func (t *TrainerRank) Profile() *profile.Profile {
	t.mu.Lock()
	defer t.mu.Unlock()
	p := new(profile.Profile)
	p.Merge(t.known)
	return p
}

// experience is what prices that are learned are made of, beside the call.
type experience struct {
	Known    *profile.Profile `json:"profile"`
	Variants []string         `json:"variants"` // of the model on this rank and on its peers, ascending
}

// experience is that of this rank; nil if its model can rehearse.
func (t *TrainerRank) experience() *experience {
	if t.exact != nil {
		return nil
	}
	return &experience{t.Profile(), []string{t.variant()}}
}

// merged is what two ranks know together. Neither is changed.
func (e *experience) merged(o *experience) *experience {
	if e == nil || o == nil {
		return nil
	}
	all := &experience{new(profile.Profile), slices.Concat(e.Variants, o.Variants)}
	all.Known.Merge(e.Known)
	all.Known.Merge(o.Known)
	slices.Sort(all.Variants)
	all.Variants = slices.Compact(all.Variants)
	return all
}

// how says how calls are priced.
func (e *experience) how() string {
	if e == nil {
		return "by rehearsal"
	}
	return "by what was observed"
}

// learned prices plans by experience, for package ladder.
type learned struct {
	*planner
	known      *profile.Profile
	signatures []profile.Signature // of the call on each variant
	geometry   profile.Geometry
	outputs    []int64  // bytes, per request
	kinds      []string // of the requests that want something, ascending, each once
	kind       []int    // per request its kind
}

// learned is the pricer of a call that was described.
func (p *planner) learned(lc *ladder.Call) *learned {
	l := &learned{planner: p, known: p.Learned.Known, kind: make([]int, len(p.Requests))}
	m := p.Model
	l.geometry = profile.Geometry{Hidden: int64(m.Hidden), Layers: int64(m.Layers), ElementBytes: int64(cmp.Or(m.ElementBytes, 4))}
	for _, v := range p.Learned.Variants {
		l.signatures = append(l.signatures, p.signature(v))
	}
	kinds := make([]string, len(p.Requests))
	for i := range p.Requests {
		l.outputs = append(l.outputs, lc.Requests[i].Outputs)
		if p.Requests[i].Group >= 0 {
			kinds[i] = profile.Kind(&p.inputs[i])
			l.kinds = append(l.kinds, kinds[i])
		}
	}
	slices.Sort(l.kinds)
	l.kinds = slices.Compact(l.kinds)
	for i, k := range kinds {
		l.kind[i], _ = slices.BinarySearch(l.kinds, k)
	}
	return l
}

// signature is that of the call, and of its chunks even if they have fewer groups: what a call took is to price its chunks.
func (q *question) signature(variant string) profile.Signature {
	m := q.Model
	s := profile.Signature{Cost: prefixtree.CostFor(q.Tables, prefixtree.Facts{Device: q.Device, Hidden: m.Hidden, Layers: m.Layers}).Name}
	var adapters []string
	for i := range q.Groups {
		g := &q.Groups[i]
		if g.Grad {
			s.GradGroups++
		} else {
			s.NoGradGroups++
		}
		if g.Adapter != nil {
			adapters = append(adapters, fmt.Sprintf(", adapter of %d bytes in %d modules", g.Adapter.Bytes, len(g.Adapter.Modules)))
		}
	}
	slices.Sort(adapters)
	s.Model = fmt.Sprintf("%s, vocabulary %d, hidden %d, layers %d, expert parallel %d, %s on %s%s",
		m.Name, m.Vocabulary, m.Hidden, m.Layers, max(1, m.ExpertParallel), variant, q.Device, strings.Join(slices.Compact(adapters), ""))
	return s
}

// search finds how a call is run by what was learned. Of a call that is refused and is far larger than all that was observed, the least that is known is tried too: a first tiny call that took much for its
// few tokens must not refuse what would be admitted if nothing had been observed (#848).
func (l *learned) search(lc *ladder.Call, usable int64, o ladder.Options) (*ladder.Admission, error) {
	found, err := ladder.Search(lc, l.planner, l, usable, o)
	if err != nil || found.Verdict != Refused && !o.Explain {
		return found, err
	}
	low := *l
	low.known = l.known.Floor()
	var all []int
	for i := range l.Requests {
		if l.Requests[i].Group >= 0 {
			all = append(all, i)
		}
	}
	if whole := l.load(all, found.LogicalTokens); l.price(whole) == low.price(whole) {
		return found, nil // and so it is with all that is smaller
	}
	least, err := ladder.Search(lc, l.planner, &low, usable, o)
	if err == nil && found.Verdict != Refused {
		found.SmallestBudgetBytes = least.SmallestBudgetBytes
		return found, nil
	}
	return least, err
}

// load is the size of a subforward that answers requests, all of which want something, with so many packed tokens.
func (l *learned) load(requests []int, packed int) profile.Load {
	load := profile.Load{Packed: int64(packed)}
	tokens := make([]int64, len(l.kinds))
	for _, r := range requests {
		n := int64(l.Requests[r].Tokens)
		load.Logical += n
		tokens[l.kind[r]] += n
		load.Outputs = min(load.Outputs, math.MaxInt64-l.outputs[r]) + l.outputs[r]
	}
	for k, n := range tokens {
		if n > 0 {
			load.Mix = append(load.Mix, profile.Share{Kind: l.kinds[k], Tokens: n})
		}
	}
	return load
}

// most is the most that a load costs on any variant.
func (l *learned) most(load profile.Load, price func(profile.Signature, profile.Geometry, profile.Load) profile.Price) profile.Price {
	p := price(l.signatures[0], l.geometry, load)
	for _, s := range l.signatures[1:] {
		o := price(s, l.geometry, load)
		p.Required, p.Retained = max(p.Required, o.Required), max(p.Retained, o.Retained)
		p.Basis, p.Trusted = p.Basis.Worse(o.Basis), p.Trusted && o.Trusted
	}
	return p
}

func (l *learned) price(load profile.Load) profile.Price { return l.most(load, l.known.Price) }

// Price is the price of a plan, by what was observed. It is for package ladder.
func (l *learned) Price(plan *ladder.Plan, _ ladder.Retention) (profile.Price, error) {
	w := plan.Work.(*work)
	if w.load.Packed == 0 {
		var requests []int
		for _, pass := range w.passes {
			requests = append(requests, pass.requests...)
		}
		w.load = l.load(requests, plan.Packed)
	}
	return l.price(w.load), nil
}

// Minimal is the price of the requests in the layout with fewest tokens. It is for package ladder.
func (l *learned) Minimal(requests []int, _ ladder.Retention) (profile.Price, error) {
	return l.price(l.load(requests, l.visit.Packed(requests))), nil
}

// Bound is the least price of any layout, which where trust depends on it is not that of the one with fewest tokens. It is for package ladder.
func (l *learned) Bound(requests []int, _ ladder.Retention) (profile.Price, error) {
	return l.most(l.load(requests, l.visit.Packed(requests)), l.known.Bound), nil
}

// observe remembers what subforward j of an admission took, if prices are learned. Of one that ran out of memory, what it asked for until then is less than it needs: it counts
// as a peak, so that the same call is not admitted for the same bytes again and again, and says nothing of what is kept.
func (t *TrainerRank) observe(a *Admission, j int, slabs memory, done bool) {
	pool, ok := slabs.(*device.Pool)
	if !ok {
		return
	}
	peak, kept := pool.Asked()
	t.mu.Lock()
	defer t.mu.Unlock()
	w := a.Chunks[j].Plan.Work.(*work)
	t.known.Observe(a.asked.signature(t.variant()), profile.Observation{Load: w.load, Peak: peak, Retained: kept, Kept: done})
}
