package ladder

import (
	"fmt"
	"slices"

	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/forward/prefixtree"
	"github.com/trainerrank/engine/profile"
)

// Layout is a way to choose a layout of requests.
type Layout string

// The layouts: cheapest to run, found by search; and fewest tokens, which needs none.
const (
	CostOptimal Layout = "cost_optimal"
	FullSharing Layout = "full_sharing"
)

// Retention is how much of a graph is kept for the backward.
type Retention = forward.Retention

// The retentions, from the one that needs most memory to the one that needs most time.
const (
	Stored = forward.Stored
	Layer  = forward.Layer
	Replay = forward.Replay
)

// Request is what the ladder must know of one input.
type Request struct {
	Group   int   // requests of one group share weights and grad mode; -1: no output is wanted of it
	Tokens  int   // its length
	Outputs int64 // bytes of what is wanted of it
	Grad    bool  // a graph is kept
}

// Call is a call as the ladder sees it.
type Call struct {
	Requests []Request // in the caller's order
	// Order is the order in which requests are visited: [Order] or [Visit] gives it. Invariant: a permutation, inactive requests last.
	Order []int
	// ExpertParallel is the number of ranks that experts are spread over. Above 1 a call is never split, because the buffer for their exchange, sized
	// by the largest subforward, must not be replaced while an earlier graph refers to it (section 5.11 of the reference). 0 is 1.
	ExpertParallel int
}

// Options are what a caller may ask of [Search]. The zero value is right for production.
type Options struct {
	// Classic asks for the studied ladder alone: 2, 4, 8, ..., one cut each, the inequality, inactive requests counted. No retention
	// but Stored, no hints to a refusal.
	Classic bool
	// Retentions are the ones that may be used for calls with gradients, in the order in which they are tried. Nil means Stored, Layer, Replay; a caller that
	// forbids recomputation passes Stored alone.
	Retentions []Retention
	// Inequality judges calls without gradients by the inequality too: for whoever reserves retained and ephemeral bytes apart, for all subforwards at once.
	Inequality bool
	// Explain asks for the hints of a refusal from an admission too.
	Explain bool
}

// Plan is one subforward, laid out. It is the planner's; the ladder looks at its sizes and passes it on.
type Plan struct {
	Packed  int                  // tokens that enter the model
	Layouts []*prefixtree.Layout // one per group
	Work    any                  // whatever the planner wants to find again
}

// Planner lays requests out.
type Planner interface {
	// Plan lays out requests, given in row order, as one subforward. The answer depends on the arguments alone. The slice must not be changed.
	Plan(requests []int, l Layout) (*Plan, error)
}

// Pricer says what subforwards cost. All answers depend on the arguments alone.
type Pricer interface {
	// Price is the price of a plan.
	Price(p *Plan, r Retention) (profile.Price, error)
	// Minimal is the price that the plan of the requests under [FullSharing] has, without the plan.
	Minimal(requests []int, r Retention) (profile.Price, error)
	// Bound is at most the price of any plan of the requests: Required and Retained, each by itself. It is what [Pricer.Minimal] says where prices
	// never fall with tokens.
	Bound(requests []int, r Retention) (profile.Price, error)
}

// CallError is a call that is none.
type CallError struct{ What string }

// Error says what is wrong with the call.
func (e *CallError) Error() string { return "ladder: " + e.What }

// PriceError is a price that cannot be: it breaks its invariant, or the price of a plan is not the one that was predicted for it. Nothing is admitted.
type PriceError struct {
	Requests  []int // of the chunk
	Retention Retention
	Price     profile.Price
	Predicted *profile.Price // nil: the price itself is impossible
}

// Error says which price.
func (e *PriceError) Error() string {
	if e.Predicted == nil {
		return fmt.Sprintf("ladder: requests %v, %s: %v is no price", e.Requests, e.Retention, e.Price)
	}
	return fmt.Sprintf("ladder: requests %v, %s: the plan costs %v, but %v was predicted", e.Requests, e.Retention, e.Price, *e.Predicted)
}

func (c *Call) check() error {
	if len(c.Order) != len(c.Requests) {
		return &CallError{fmt.Sprintf("%d requests are visited, there are %d", len(c.Order), len(c.Requests))}
	}
	seen, idle := make([]bool, len(c.Requests)), false
	for _, r := range c.Order {
		if r < 0 || r >= len(seen) || seen[r] {
			return &CallError{fmt.Sprintf("the order is no permutation: it has request %d", r)}
		}
		seen[r] = true
		if c.Requests[r].Group >= 0 && idle {
			return &CallError{fmt.Sprintf("request %d comes after one that wants no output", r)}
		}
		idle = c.Requests[r].Group < 0
	}
	for r := range c.Requests {
		if q := &c.Requests[r]; q.Tokens < 0 || q.Outputs < 0 {
			return &CallError{fmt.Sprintf("request %d has %d tokens and %d bytes of outputs", r, q.Tokens, q.Outputs)}
		}
	}
	return nil
}

// retentions lists the ones to try.
func (o *Options) retentions(grad bool) []Retention {
	switch {
	case o.Classic || !grad:
		return []Retention{Stored}
	case o.Retentions == nil:
		return []Retention{Stored, Layer, Replay}
	}
	return slices.Clone(o.Retentions)
}
