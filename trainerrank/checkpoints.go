package trainerrank

import (
	"context"
	"fmt"

	"github.com/trainerrank/engine/collective"
	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/slots"
)

// Checkpoints is the set of LoRA adapters that are resident beside the base model, with their gradients and optimizer state: see package slots for all that can be done
// with them. It is nil if the model takes none.
func (t *TrainerRank) Checkpoints() *slots.Set { return t.slots }

// adaptable is the set of slots, or says that the model has none.
func (t *TrainerRank) adaptable() (*slots.Set, error) {
	if t.slots == nil {
		return nil, &RuntimeSupportError{fmt.Sprintf("model %s takes no adapters", t.model.Spec().Name)}
	}
	return t.slots, nil
}

// still waits for the call, or the backward, that runs, and holds up others until the function that it returns is called: parameters do not change under a pass, nor between a call's
// plan and its run. With a context that is over it does not wait: whatever was to be done fails with it where the ranks meet, before anything has changed.
func (t *TrainerRank) still(ctx context.Context) func() {
	if t.lock(ctx) != nil {
		return func() {}
	}
	return func() { <-t.turn }
}

// LoadCheckpoint loads an adapter folder, as PEFT or [TrainerRank.SaveCheckpoint] wrote it, under a name. A slot of the name is replaced, unless graphs of it are
// live or gradients pending. All ranks call it.
func (t *TrainerRank) LoadCheckpoint(ctx context.Context, name, dir string) error {
	s, err := t.adaptable()
	if err != nil {
		return err
	}
	defer t.still(ctx)()
	return s.Load(ctx, name, dir, slots.LoadOptions{})
}

// SaveCheckpoint writes a checkpoint into a folder that PEFT reads, with what it takes to train on with the same bits: see [slots.Set.Prepare], also for the two phases
// of a save. Whoever reads the folder has the old checkpoint or the new one, whole. All ranks call it, and rank 0 writes.
func (t *TrainerRank) SaveCheckpoint(ctx context.Context, name, dir string) error {
	s, err := t.adaptable()
	if err != nil {
		return err
	}
	return s.Save(ctx, name, dir)
}

// CreateCheckpoint makes a fresh adapter, whose additions are zero. All ranks call it.
func (t *TrainerRank) CreateCheckpoint(ctx context.Context, name string, c slots.Config) error {
	s, err := t.adaptable()
	if err != nil {
		return err
	}
	defer t.still(ctx)()
	return s.Create(ctx, name, c)
}

// PushCheckpoint makes a loaded slot the one that inputs without a selection run on, until [TrainerRank.Pop]; "" is the base model.
func (t *TrainerRank) PushCheckpoint(name string) error {
	s, err := t.adaptable()
	if err != nil {
		return err
	}
	return s.Push(name)
}

// Pop ends the last push, and returns its slot.
func (t *TrainerRank) Pop() (string, error) {
	s, err := t.adaptable()
	if err != nil {
		return "", err
	}
	return s.Pop()
}

// SnapshotCheckpoint makes a copy of a slot for inference, under another name. It is false if that name is taken.
func (t *TrainerRank) SnapshotCheckpoint(ctx context.Context, src, dst string) (bool, error) {
	s, err := t.adaptable()
	if err != nil {
		return false, err
	}
	return s.Snapshot(ctx, src, dst)
}

// ZeroGrad forgets the gradients of slots, of all of them if none is named.
func (t *TrainerRank) ZeroGrad(names ...string) error {
	s, err := t.adaptable()
	if err != nil {
		return err
	}
	return s.ZeroGrad(names...)
}

// OptimStep is one step of AdamW for the selected slots; see [slots.Set.Step]. It waits for the call that runs. All ranks call it.
func (t *TrainerRank) OptimStep(ctx context.Context, o slots.StepOptions) (*slots.StepReport, error) {
	s, err := t.adaptable()
	if err != nil {
		return nil, err
	}
	defer t.still(ctx)()
	return s.Step(ctx, o)
}

// DPReduce replaces values by their sums over the ranks of the world. All ranks call it with as many values.
func (t *TrainerRank) DPReduce(ctx context.Context, values []float32) error {
	return t.world.AllReduceFloat32(ctx, "dp reduce", collective.Sum, values)
}

// ensure asks all ranks of the world whether the checkpoints of a call are loaded everywhere. Every call does it once, whatever it is about; a rank that has failed
// already takes part.
func (t *TrainerRank) ensure(ctx context.Context, c *call, err error) error {
	if t.slots == nil || err != nil && t.world.Size() == 1 {
		return err
	}
	var names []string
	for _, k := range c.kinds {
		names = append(names, k.Slot)
	}
	if e := t.slots.Ensure(ctx, names); err == nil && e != nil {
		return e
	}
	return err
}

// Close gives back the memory of all checkpoints, once the call that runs has ended. Results stay until they are released, but their graphs are of no use any more.
func (t *TrainerRank) Close() {
	defer t.still(context.Background())()
	if t.slots != nil {
		t.slots.Close()
	}
}

// adapterOf is the adapter that a group of requests runs on, nil for the base model. It is an error if there is none, or if a graph is to be kept
// and nothing of it is trained.
func (t *TrainerRank) adapterOf(c *call, g group) (*forward.Adapter, error) {
	if g == (group{}) {
		return nil, nil
	}
	if g.Grad && t.exact == nil {
		return nil, &RuntimeSupportError{fmt.Sprintf("model %s cannot rehearse, and training without is not built yet: use the no-grad mode", t.model.Spec().Name)}
	}
	if t.slots == nil {
		if g.Slot != "" {
			return nil, &SlotStateError{Slot: g.Slot, Reason: "the model takes no adapters"}
		}
		return nil, &RuntimeSupportError{fmt.Sprintf("model %s has nothing to train: it takes no adapters", t.model.Spec().Name)}
	}
	info, a, err := t.checkpoint(c, g.Slot)
	if err != nil {
		return nil, err
	}
	if g.Grad && !info.Trainable {
		why := "it was loaded for inference only"
		if g.Slot == "" {
			why = "the base model is not trained: select a checkpoint, or use the no-grad mode"
		}
		return nil, &SlotStateError{Slot: g.Slot, Reason: why}
	}
	return a, nil
}

// checkpoint is a checkpoint that is loaded, or else one that the call takes for loaded.
func (t *TrainerRank) checkpoint(c *call, name string) (slots.Info, *forward.Adapter, error) {
	info, err := t.slots.Info(name)
	if err == nil {
		a, err := t.slots.Adapter(name)
		return info, a, err
	}
	for _, o := range c.outlines {
		if o.Name == name {
			return o.Info, o.Adapter, nil
		}
	}
	return info, nil, err
}

// trainable is a model whose own parameters can be trained: they are one vector of float32.
type trainable interface {
	BaseVector() device.Mem
	BaseParams() []forward.Param
}

// TrainBase makes the parameters of the base model trainable, as the checkpoint "": calls with gradients that select the base model train them, and
// [TrainerRank.OptimStep] steps them. The model must have been told before it was placed (TrainBase of a transformer.Model). It takes the memory of gradients and optimizer
// state, 12 bytes per parameter. All ranks call it.
func (t *TrainerRank) TrainBase(ctx context.Context) error {
	s, err := t.adaptable()
	if err != nil {
		return err
	}
	m, ok := t.model.(trainable)
	if !ok || m.BaseVector().Bytes() == 0 {
		return &SlotStateError{Slot: "", Reason: "the base model was not placed to be trained"}
	}
	var tensors []slots.Tensor
	for _, p := range m.BaseParams() {
		tensors = append(tensors, slots.Tensor{Name: p.Name, Shape: []int64{p.Bytes / 4}, At: p.At})
	}
	return s.AddBase(ctx, m.BaseVector(), tensors)
}
