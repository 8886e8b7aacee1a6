package ladder

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/trainerrank/engine/forward/prefixtree"
	"github.com/trainerrank/engine/profile"
)

// learned prices rows by a profile, with layouts that share everything or nothing.
type learned struct {
	rows    [][]int32
	visit   *Visit
	profile profile.Profile
	output  int64 // bytes per token
}

func (l *learned) load(requests []int) profile.Load {
	load := profile.Load{Packed: int64(l.visit.Packed(requests))}
	for _, r := range requests {
		load.Logical += int64(len(l.rows[r]))
	}
	load.Outputs = l.output * load.Logical
	return load
}

func (l *learned) Plan(requests []int, how Layout) (*Plan, error) {
	load := l.load(requests)
	if how == CostOptimal {
		load.Packed = load.Logical
	}
	return &Plan{Packed: int(load.Packed), Layouts: []*prefixtree.Layout{{}}, Work: load}, nil
}

var signature = profile.Signature{Model: "m"}

func (l *learned) Price(p *Plan, _ Retention) (profile.Price, error) {
	return l.profile.Price(signature, profile.Geometry{}, p.Work.(profile.Load)), nil
}
func (l *learned) Minimal(requests []int, _ Retention) (profile.Price, error) {
	return l.profile.Price(signature, profile.Geometry{}, l.load(requests)), nil
}
func (l *learned) Bound(requests []int, _ Retention) (profile.Price, error) {
	return l.profile.Bound(signature, profile.Geometry{}, l.load(requests)), nil
}

// family is so many groups of rows that share all but their last tokens; rows are in visiting order.
func family(t testing.TB, groups, each, shared, tail int) (*Call, *learned) {
	l := &learned{}
	c := &Call{}
	for g := range groups {
		for i := range each {
			row := make([]int32, shared+tail)
			for k := range shared {
				row[k] = int32(g)
			}
			for k := range tail {
				row[shared+k] = int32(1000 + i)
			}
			l.rows = append(l.rows, row)
			c.Requests = append(c.Requests, Request{Tokens: len(row), Grad: true})
		}
	}
	l.visit = visit(t, l.rows, make([]int, len(l.rows)))
	c.Order = l.visit.Order
	return c, l
}

func (l *learned) observe(packed, logical, peak, retained int64) {
	l.profile.Observe(signature, profile.Observation{
		Load: profile.Load{Packed: packed, Logical: logical, Outputs: l.output * logical}, Peak: peak, Retained: retained, Kept: retained >= 0,
	})
}

// 7.2, test_retained_ratio_lower_bound_reaches_exact_split_admission; defect 13 (#877). Two families of 16 rows of 4,000 tokens share so much that the profile, which saw no
// sharing, does not believe what full sharing would retain. Without sharing it does, so that the bound must let the rung through.
func TestABoundThatTrustRelaxesReachesTheSplit(t *testing.T) {
	const gib = int64(1) << 30
	for _, c := range []struct {
		usable int64
		want   int
	}{{40 * gib, 2}, {20 * gib, 4}} {
		call, l := family(t, 2, 16, 3999, 1)
		// 64,000 tokens, half of the call, need 35 GiB, and keep nothing.
		l.observe(8000, 8000, 35*gib*10/88, 0)
		a := verdict(t, call, l, l, c.usable, Options{Retentions: []Retention{Stored}})
		checkAdmission(t, call, a)
		if a.SubforwardCount() != c.want || a.Verdict != Split {
			t.Errorf("want %d subforwards\n%s", c.want, a)
		}
		if classic := verdict(t, call, l, l, c.usable, Options{Classic: true}); classic.Verdict != Refused && a.SubforwardCount() > classic.SubforwardCount() {
			t.Errorf("upstream:\n%s\nours:\n%s", classic, a)
		}
		checkHints(t, call, l, l, a, Options{Retentions: []Retention{Stored}})
	}
}

// The learned road: refused cold, converted after one call was observed, within 8 times of it and no further (5.10, last rows).
func TestALearnedCallConvertsAfterOneObservation(t *testing.T) {
	for _, c := range []struct {
		packed int64 // of the observation
		want   string
	}{{0, "refused"}, {1, "refused"}, {20, "split"}} {
		call, l := family(t, 4, 1, 10, 0)
		// A byte and a tenth a token, so that with the safety factor 40 tokens need 44 bytes, 20 of them 22 and keep 3.
		if c.packed > 0 {
			l.observe(c.packed, c.packed, c.packed, c.packed/10)
		} else {
			l.observe(20, 20, 20, -1)
		}
		a := verdict(t, call, l, l, 25, Options{Retentions: []Retention{Stored}})
		if string(a.Verdict) != c.want {
			t.Errorf("observed %d tokens: want %s\n%s", c.packed, c.want, a)
		}
	}
}

// Random learned calls around the limits of trust: whatever is admitted fits, hints are exact, and upstream is never better.
func TestLearnedCallsAcrossLimitsOfTrust(t *testing.T) {
	r := rand.New(rand.NewPCG(13, 14))
	seen := map[string]int{}
	for i := range 1500 {
		call, l := family(t, 1+r.IntN(3), 1+r.IntN(4), r.IntN(30), 1+r.IntN(3))
		grad := r.IntN(2) == 0
		for q := range call.Requests {
			call.Requests[q].Grad = grad
		}
		l.output = r.Int64N(3)
		for q := range call.Requests {
			call.Requests[q].Outputs = l.output * int64(call.Requests[q].Tokens)
		}
		for range r.IntN(4) {
			packed := 1 + r.Int64N(60)
			peak := r.Int64N(1000)
			l.observe(packed, packed*(1+r.Int64N(4)), peak, r.Int64N(peak+2)-1)
		}
		whole, _ := l.Minimal(call.Order, Stored)
		usable := whole.Required * (20 + r.Int64N(90)) / 100
		o := Options{Retentions: []Retention{Stored}}
		a := verdict(t, call, l, l, usable, o)
		checkAdmission(t, call, a)
		checkHints(t, call, l, l, a, o)
		classic := verdict(t, call, l, l, usable, Options{Classic: true})
		if classic.Verdict != Refused && (a.Verdict == Refused || a.SubforwardCount() > classic.SubforwardCount()) {
			t.Errorf("upstream:\n%s\nours:\n%s", classic, a)
		}
		seen[fmt.Sprint(a.Verdict, a.Packing, a.Basis)]++
		if t.Failed() {
			t.Fatalf("call %d: %+v\n%s\nusable %d", i, call, l.profile.Save(), usable)
		}
	}
	t.Log(seen)
}

// trusting believes what a layout without sharing retains, and not what one with sharing does.
type trusting struct{ tens }

func (p *trusting) Price(plan *Plan, _ Retention) (profile.Price, error) {
	price := p.price(plan.Work.([]int))
	if strings.HasPrefix(p.planned[len(p.planned)-1], string(CostOptimal)) {
		price.Retained = 0
	}
	return price, nil
}

func (p *trusting) Bound(requests []int, _ Retention) (profile.Price, error) {
	price := p.price(requests)
	price.Retained = 0
	return price, nil
}

// Where only another layout than the one with fewest tokens is believed to fit, it is found, and the smallest budget counts it.
func TestTheSmallestBudgetCountsLayoutsThatAreBelieved(t *testing.T) {
	for _, c := range []struct {
		usable  int64
		verdict Verdict
	}{{20, Split}, {10, Split}, {9, Refused}} {
		p := &trusting{tens{tenths: 10}}
		a := verdict(t, callOf(4, true), p, p, c.usable, Options{Retentions: []Retention{Stored}, Explain: true})
		if a.Verdict != c.verdict || a.SmallestBudgetBytes != 10 || a.Verdict == Split && a.Packing != CostOptimal {
			t.Errorf("%d bytes: %s\n%s", c.usable, a.Verdict, a)
		}
	}
}
