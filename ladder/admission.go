package ladder

import (
	"fmt"
	"strings"

	"github.com/trainerrank/engine/forward/prefixtree"
	"github.com/trainerrank/engine/profile"
)

// Verdict says how a call is run.
type Verdict string

// The verdicts.
const (
	Whole   Verdict = "whole"
	Split   Verdict = "split"
	Refused Verdict = "refused"
)

// Reason says why a call is refused; empty if it is not.
type Reason string

// The reasons.
const (
	SingleRequest  Reason = "a single request cannot be split"
	ExpertParallel Reason = "splitting is disabled under expert parallelism"
	Exhausted      Reason = "every split that was tried is predicted to exceed available memory"
	OnAnotherRank  Reason = "another data-parallel rank found none for its share"
)

// Chunk is one subforward of an admission.
type Chunk struct {
	// Requests are the ones that it answers, in row order. Those that want no output come last and are not in the plan.
	Requests []int
	Plan     *Plan // nil if none wants an output
	Price    profile.Price
}

// Admission is the answer to whether a call fits, and how it is run. It holds no token.
//
// Its JSON form is the output of plan --json.
type Admission struct {
	Verdict          Verdict       `json:"verdict"`
	Basis            profile.Basis `json:"basis"` // the least reliable of the prices
	UsableLimitBytes int64         `json:"usable_limit_bytes"`
	// PredictedPeakBytes is what the call needs beside what is allocated. With the tokens, the layout and the chunks it belongs to one
	// and the same plan: the one that is run, or if the call is refused the whole call with fewest tokens and everything stored.
	PredictedPeakBytes int64                `json:"predicted_peak_bytes"`
	PackedTokens       int                  `json:"packed_tokens"`
	LogicalTokens      int                  `json:"logical_tokens"` // of requests that want an output
	Layout             []*prefixtree.Layout `json:"layout"`         // of each subforward's groups, in execution order
	// Rungs are the ways that were tried, in that order. The one that is admitted is the last.
	Rungs                    []Rung    `json:"rungs"`
	SubforwardRequestIndices [][]int   `json:"subforward_request_indices"` // in execution order
	Retention                Retention `json:"retention"`
	// SmallestBudgetBytes are the usable bytes with which the call is admitted; with one less it is not. LargestPrefix is how many of the first
	// inputs, as a call, are admitted with the bytes that there are. Of an admission the first is what this plan needs, unless Options.Explain
	// asks for the smallest; of a classic refusal both are 0.
	SmallestBudgetBytes int64 `json:"smallest_budget_bytes"`
	LargestPrefix       int   `json:"largest_prefix"`

	Reason  Reason  `json:"-"`
	Trusted bool    `json:"-"` // all prices of the plan are
	Chunks  []Chunk `json:"-"` // the subforwards of the plan, in execution order
	Packing Layout  `json:"-"` // how they are laid out
	// Priced counts the prices that were asked for, Planned the plans made, and Searched those of them that needed a search.
	Priced   int `json:"-"`
	Planned  int `json:"-"`
	Searched int `json:"-"`
}

// SubforwardCount is the number of subforwards of the plan.
func (a *Admission) SubforwardCount() int { return len(a.SubforwardRequestIndices) }

// SelectedMaxDepth is the number of levels of the deepest layout, 0 if nothing is run.
func (a *Admission) SelectedMaxDepth() int {
	depth := 0
	for _, l := range a.Layout {
		depth = max(depth, l.Depth)
	}
	return depth
}

// Refusal is the sentence that says why the call is refused, "" if it is not. It tells what was looked for and not found; it
// never claims that there is nothing.
func (a *Admission) Refusal() string {
	if a.Verdict != Refused {
		return ""
	}
	return fmt.Sprintf("unable to find a feasible split (%s)", a.Reason)
}

// String is the verdict and a table of the rungs.
func (a *Admission) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %d subforwards need %d of %d usable bytes (%s), %d tokens packed into %d\n",
		a.Verdict, a.SubforwardCount(), a.PredictedPeakBytes, a.UsableLimitBytes, a.Basis, a.LogicalTokens, a.PackedTokens)
	for i := range a.Rungs {
		r := &a.Rungs[i]
		why, layout := "fits", string(r.Layout)
		if !r.Fits {
			why = r.WhyNot(a.UsableLimitBytes)
		}
		if layout == "" {
			layout = "any layout"
		}
		fmt.Fprintf(&b, "%6d %-12s %-6s %15d  %s\n", r.Count, layout, r.Retention, r.TotalBytes, why)
	}
	if a.Verdict == Refused {
		fmt.Fprintf(&b, "%s; %d bytes would do, the first %d requests fit\n", a.Refusal(), a.SmallestBudgetBytes, a.LargestPrefix)
	}
	return b.String()
}

// Outcome is what a rank tells the others about its own share of a wave. Ranks agree on the least of theirs.
type Outcome int

// The outcomes.
const (
	Broken   Outcome = iota // planning failed with an error
	NoFit                   // refused
	Admitted                // found a plan
)

// Outcome is the rank's own outcome.
func (a *Admission) Outcome() Outcome {
	if a.Verdict == Refused {
		return NoFit
	}
	return Admitted
}

// MinimumWave is what becomes of the smallest wave, one item per rank, when each rank has searched for its own share (section 5.9 of the reference): own is this rank's
// admission, least the least outcome of all ranks. A rank that was refused stays so. One that found a plan while another did not is refused on the
// other's account, with the numbers of the plan that it found.
func MinimumWave(own *Admission, least Outcome) *Admission {
	if own.Verdict == Refused || least == Admitted {
		return own
	}
	a := *own
	a.Verdict, a.Reason = Refused, OnAnotherRank
	return &a
}
