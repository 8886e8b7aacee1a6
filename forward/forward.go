// Package forward says what a model call is: the [Input] that a caller gives and the [Output] that it gets, nested as it
// likes ([Inputs], [Outputs]); the packed [Batch] that a [Model] is handed, and the [Footprint] in bytes of running it.
package forward

import (
	"context"
	"fmt"

	"gorgonia.org/tensor"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward/prefixtree"
)

// IgnoreLabel marks a position that is not scored: its logprob is 0.
const IgnoreLabel = -100

// GradMode says whether a request keeps a graph for a backward.
type GradMode uint8

// The grad modes. Inherit takes the mode of the call.
const (
	Inherit GradMode = iota
	WithGrad
	NoGrad
)

func (g GradMode) String() string { return [...]string{"inherit", "with grad", "no grad"}[min(g, 2)] }

// Selection says which weights a request runs on. The zero value inherits the selection of the call.
type Selection struct {
	set  bool
	name string
}

// BaseModel selects the base model without an adapter.
func BaseModel() Selection { return Selection{set: true} }

// Checkpoint selects the adapter that was loaded under a name.
func Checkpoint(name string) Selection { return Selection{true, name} }

// Inherits says whether s leaves the choice to the call.
func (s Selection) Inherits() bool { return !s.set }

// Name is the name of the selected adapter, or "" for the base model.
func (s Selection) Name() string { return s.name }

// Input is one request: a sequence of n tokens, and what is wanted of it. An Input that wants nothing is inactive: it costs
// nothing and gives an Output of nils.
type Input struct {
	Tokens       []int32   // n >= 1 token ids, each in [0, vocabulary)
	Targets      []int32   // nil, or n*TargetWidth labels: label i is scored against the distribution after token i; IgnoreLabel scores 0
	TargetWidth  int       // labels per position; 0 means 1
	TopK         int       // the largest TopK logprobs of every position; 0: none
	Logits       bool      // the logits of every position over the whole vocabulary
	HiddenStates bool      // the hidden state of every position after the final norm
	Grad         GradMode  // whether a graph is kept
	Checkpoint   Selection // which weights
}

// Active says whether the input wants any output.
func (in *Input) Active() bool {
	return in.Targets != nil || in.TopK > 0 || in.Logits || in.HiddenStates
}

// Width is the number of labels per position: TargetWidth, or 1 if it is 0.
func (in *Input) Width() int { return max(1, in.TargetWidth) }

// Output is the answer to one Input of n tokens. Its tensors lie in the device's memory and are valid until the result is released, and of a result that is never
// released, as long as the program holds it or one of its Outputs. A tensor does not hold the memory that it lies in: keep its Output beside it. What was not
// asked for is nil.
type Output struct {
	TargetLogprobs *tensor.Dense // float32 [n], or [n, TargetWidth] if that is above 1
	TopK           *TopK
	Logits         *tensor.Dense // float32 [n, vocabulary]
	HiddenStates   *tensor.Dense // float32 [n, hidden]
	Checkpoint     string        // the adapter that it ran on, "" for the base model
	NoGrad         bool          // no graph was kept

	owner any
}

// KeepAlive makes the output keep owner reachable: whoever owns the memory of its tensors.
func (o *Output) KeepAlive(owner any) { o.owner = owner }

// TopK holds the k most likely tokens of each of n positions, most likely first; of equal ones the lower token comes first.
type TopK struct {
	Logprobs *tensor.Dense // float32 [n, k]
	Tokens   *tensor.Dense // int32 [n, k]
}

// Spec is what a TrainerRank must know of a model.
type Spec struct {
	Name       string `json:"name"`       // for messages
	Vocabulary int    `json:"vocabulary"` // number of tokens
	Hidden     int    `json:"hidden"`     // elements of a hidden state
	Layers     int    `json:"layers"`
	// ExpertParallel is the number of ranks that the experts are spread over; 0 is 1. Above 1 a call is not split.
	ExpertParallel int `json:"expert_parallel,omitzero"`
	// ElementBytes is the size of an element of the weights, in bytes; 0 is 4.
	ElementBytes int `json:"element_bytes,omitzero"`
}

// Batch is one group of requests, packed: the requests share one selection and one grad mode. Row r of the packed batch is Requests[r].
type Batch struct {
	*prefixtree.Batch
	Requests []*Input
	Adapter  *Adapter              // what the base weights are added to; nil: nothing
	Grad     bool                  // whether the pass keeps a graph: for the parameters of the adapter, or without one for those of the base model
	Keep     Retention             // what the graph keeps; "" is Stored
	Arena    device.Arena          // where the pass lives; what a model takes elsewhere is neither predicted nor observed
	Progress func(done, total int) // called now and then with steps done; nil: not wanted
}

// Pass is what a forward of a Batch leaves.
type Pass struct {
	Outputs []Output // per row of the batch
	Graph   Graph    // nil without gradients
}

// Footprint is what a pass needs, in bytes, rounded as a device rounds.
type Footprint struct {
	Outputs         int64 `json:"outputs"`                   // tensors handed to the caller
	Retained        int64 `json:"retained,omitzero"`         // activations kept for the backward
	Scratch         int64 `json:"scratch"`                   // peak of the forward's intermediates
	BackwardScratch int64 `json:"backward_scratch,omitzero"` // peak of the backward's intermediates
	Gradients       int64 `json:"gradients,omitzero"`        // gradient accumulators
	// OutputBytes is Outputs without what fills its last page, which the outputs of a later pass may take; 0 if it is not known.
	OutputBytes int64 `json:"output_bytes,omitzero"`
}

// Required is the peak of forward and backward, in bytes.
func (f Footprint) Required() int64 {
	return f.Outputs + f.Retained + max(f.Scratch, f.BackwardScratch+f.Gradients)
}

// Max has the larger of each part of two footprints: what does for either pass.
func (f Footprint) Max(o Footprint) Footprint {
	m := Footprint{
		Outputs: max(f.Outputs, o.Outputs), Retained: max(f.Retained, o.Retained), Scratch: max(f.Scratch, o.Scratch),
		BackwardScratch: max(f.BackwardScratch, o.BackwardScratch), Gradients: max(f.Gradients, o.Gradients),
	}
	if f.OutputBytes > 0 && o.OutputBytes > 0 {
		m.OutputBytes = max(f.OutputBytes, o.OutputBytes)
	}
	return m
}

func (f Footprint) String() string {
	return fmt.Sprintf("outputs %d + retained %d + max(scratch %d, backward %d + gradients %d) = %d bytes",
		f.Outputs, f.Retained, f.Scratch, f.BackwardScratch, f.Gradients, f.Required())
}

// Model is what a TrainerRank wraps.
type Model interface {
	// Spec describes the model.
	Spec() Spec
	// Forward runs a batch. Between layers it honours ctx; a cancelled pass returns the context's error, wrapped.
	Forward(ctx context.Context, b *Batch) (*Pass, error)
}

// Rehearser is a Model that can say exactly what a batch needs. The batch needs no arena. What it needs must follow from its spans and from what its requests want:
// Tokens, Positions and SegmentOf of a batch that is only planned, and Tokens and Targets of its requests, have their lengths, but not their values.
type Rehearser interface {
	Model
	Rehearse(b *Batch) (Footprint, error)
}

// Variant is a Rehearser whose footprints depend on more than the batch: on a number of worker threads, say, each of which needs memory of its own. Ranks that
// plan together tell each other which variants they are, so that each can rehearse as any.
type Variant interface {
	Rehearser
	// Variant says what footprints depend on beside the batch. Models that are equal but for it have equal footprints where it is equal.
	Variant() string
	// RehearseAs is what Rehearse says on a rank whose model is of that variant. A variant that the model cannot stand for is an error.
	RehearseAs(variant string, b *Batch) (Footprint, error)
}
