package forward

import (
	"context"

	"github.com/trainerrank/engine/device"
)

// Module is a projection of a model to which an adapter may add.
type Module struct {
	Path    string // as in the model's tensor names, without ".weight": "model.layers.0.self_attn.q_proj"
	In, Out int
}

// LoRA is what an adapter adds to one module: y += Scale * (x Aᵀ) Bᵀ (Hu and others, 2021).
type LoRA struct {
	Module int // index in [Adaptable.Modules]
	Rank   int
	Scale  float32 // alpha/Rank, or alpha/sqrt(Rank) for a rank-stabilised adapter (Kalajdzievski, 2023)
	// A and B say where in [Adapter.Params] the matrices begin, in bytes, multiples of [device.Align]. A is float32 [Rank, In] and B float32 [Rank, Out], the
	// transpose of what adapter files hold; both row-major without gaps.
	A, B int64
}

// Adapter is a set of LoRA additions, resident on a device. All its parameters are one vector, so that gradients and optimizer state are
// vectors of the same layout. What fills a gap in the vector is zero.
type Adapter struct {
	Name   string
	LoRA   []LoRA     // ascending by Module, none twice
	Bytes  int64      // of the vector
	Params device.Mem // the vector; empty in an adapter that is only planned with
}

// NewAdapter lays out the vector of an adapter: it sets A and B of every addition, and Bytes.
func NewAdapter(name string, modules []Module, lora []LoRA) *Adapter {
	a := &Adapter{Name: name, LoRA: lora}
	take := func(n int) int64 {
		at := a.Bytes
		a.Bytes += device.RoundAlign(int64(n) * 4)
		return at
	}
	for i := range a.LoRA {
		l := &a.LoRA[i]
		m := modules[l.Module]
		l.A, l.B = take(l.Rank*m.In), take(l.Rank*m.Out)
	}
	return a
}

// Param says where in a vector of parameters one of them lies: bytes [At, At+Bytes), in whatever order the model likes, some of which may belong to none and are zero.
type Param struct {
	Name      string // in the model's files
	At, Bytes int64
}

// Adaptable is a [Model] to which adapters can add.
type Adaptable interface {
	Model
	// Modules lists the projections, in execution order. It is the same list at every call.
	Modules() []Module
}

// Retention says what a pass with gradients keeps for its backward. Gradients have the same bits under each.
type Retention string

// The retentions, from the one that keeps most.
const (
	Stored Retention = "stored" // every activation that the backward reads
	Layer  Retention = "layer"  // the input of each layer; the backward runs the layer again
	Replay Retention = "replay" // the tokens; the backward runs the pass again
)

// OutputGrad is the cotangent of one [Output]: the gradient of the caller's loss by each of its tensors, row-major. What is nil is
// zero. The largest logprobs have none.
type OutputGrad struct {
	TargetLogprobs []float32 // n*width; at labels that are ignored it does not matter
	Logits         []float32 // n*vocabulary
	HiddenStates   []float32 // n*hidden
}

// Graph is what a pass with gradients keeps. Its memory is that of the pass.
type Graph interface {
	// Backward gives the gradient of sum(output * cotangent) by the parameters that the pass trained: those of the batch's adapter, or without one those of the
	// base model. It is a vector of their layout that arena keeps as [device.Gradients]. Intermediates are scratch of arena. grads
	// has one element per row of the batch. Once it has succeeded it is refused; after an error the graph is as it was, and it can be called again
	// with an arena that has the room, less what the attempt that failed kept there.
	Backward(ctx context.Context, arena device.Arena, grads []OutputGrad) (device.Mem, error)
}
