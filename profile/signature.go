package profile

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/trainerrank/engine/forward"
)

// Topology is how a model is spread over ranks. The zero value is read as one rank.
type Topology struct {
	DataParallel     int
	TensorParallel   int
	ContextParallel  int
	PipelineParallel int
}

// Signature is what calls must have in common for one to say something about the memory of another (section 3.5 of the reference),
// beside the kinds of their requests, which stand in the [Load].
type Signature struct {
	// Model names the model and whatever of it changes memory: geometry, adapter shapes, recomputation.
	Model    string
	Topology Topology
	// Cost names the cost by which layouts are chosen: another one chooses other layouts.
	Cost string
	// GradGroups and NoGradGroups count the groups (weights, grad mode) of the call.
	GradGroups   int
	NoGradGroups int
}

// Share is how many logical tokens of a call belong to requests of one kind.
type Share struct {
	Kind   string
	Tokens int64
}

// Kind says in one word what a request wants: "targets:2+topk:5+logits+hidden", or "inactive".
func Kind(in *forward.Input) string {
	var parts []string
	if in.Targets != nil {
		parts = append(parts, fmt.Sprintf("targets:%d", in.Width()))
	}
	if in.TopK > 0 {
		parts = append(parts, fmt.Sprintf("topk:%d", in.TopK))
	}
	if in.Logits {
		parts = append(parts, "logits")
	}
	if in.HiddenStates {
		parts = append(parts, "hidden")
	}
	if parts == nil {
		return "inactive"
	}
	return strings.Join(parts, "+")
}

// Mix counts the tokens of the active requests by kind, in ascending order of kinds.
//
// The reference keys its profiles by the set of kinds, so that one logits request in a hundred passes for a hundred in a hundred (its weakness 5). A key with
// the number of each kind would tell them apart, but also a call from its own chunks, whose prices the profile is for. Here the
// set stays the key and the shares become a third axis of trust, beside tokens and ratio: see [Profile.Price].
func Mix(requests []*forward.Input) []Share {
	var mix []Share
	for _, in := range requests {
		if !in.Active() {
			continue
		}
		kind, n := Kind(in), int64(len(in.Tokens))
		i, found := slices.BinarySearchFunc(mix, kind, func(s Share, k string) int { return cmp.Compare(s.Kind, k) })
		if !found {
			mix = slices.Insert(mix, i, Share{Kind: kind})
		}
		mix[i].Tokens = plus(mix[i].Tokens, n)
	}
	return mix
}

// Load is the size of a call.
type Load struct {
	Packed  int64 // tokens that enter the model
	Logical int64 // tokens of the active requests
	Outputs int64 // bytes of what is returned
	// Mix are the kinds of the requests with their shares of Logical, in ascending order, each once: see [Mix]. Invariant: the tokens add up to Logical.
	Mix []Share
}

// within says whether each kind of load has at most [Growth] times its share in what was observed. kinds and shares are parallel; shares are tokens over all tokens.
func (l *Load) within(kinds []string, shares []rational) bool {
	for _, s := range l.Mix {
		i, found := slices.BinarySearch(kinds, s.Kind)
		if !found || (rational{s.Tokens, max(1, l.Logical)}).compare(shares[i].grown()) > 0 {
			return false
		}
	}
	return true
}
