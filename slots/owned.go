package slots

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/internal/failpoint"
)

// owned is a parameter or a buffer of a slot.
type owned struct {
	name   string
	buffer bool
	v      *vector
}

// Parameter is an array that a slot owns beside its adapter: [Set.Step] trains it with the adapter's settings, and it is saved and loaded with it. It is how a value head
// is built. It is of no use any more once its slot is replaced or unloaded.
type Parameter struct {
	set  *Set
	slot *slot
	o    *owned
}

// Buffer is an array that a slot owns beside its adapter: it is saved and loaded with it, and not trained. It is of no use any more once its slot is replaced or
// unloaded.
type Buffer struct{ p Parameter }

// Parameter is the parameter of that name of a slot. If the slot has none, because it was neither registered before nor saved with the adapter, it takes its memory and lets init fill it,
// row-major; a nil init leaves zeros. The name must not be empty and hold no '.' and no '/'. All ranks call it, and init must do the same on all.
func (s *Set) Parameter(ctx context.Context, slot, name string, shape []int64, init func([]float32)) (*Parameter, error) {
	return s.register(ctx, slot, ownedPlan{name, false, shape}, init)
}

// Buffer is the buffer of that name of a slot; in all else it is as [Set.Parameter].
func (s *Set) Buffer(ctx context.Context, slot, name string, shape []int64, init func([]float32)) (*Buffer, error) {
	p, err := s.register(ctx, slot, ownedPlan{name, true, shape}, init)
	if err != nil {
		return nil, err
	}
	return &Buffer{*p}, nil
}

func (s *Set) register(ctx context.Context, slot string, want ownedPlan, init func([]float32)) (*Parameter, error) {
	s.turn.Lock()
	defer s.turn.Unlock()
	sl, err := s.lookup(slot)
	var o *owned
	fresh := false
	if err == nil {
		o, fresh, err = s.ownedFor(sl, want, init)
	}
	same := ""
	if err == nil && !s.alone() {
		same = fmt.Sprintf("%q of %q: fresh=%t %s", want.name, slot, fresh, sl.print(true))
	}
	if err := s.settle(ctx, "register", err, same); err != nil {
		if fresh {
			s.mu.Lock()
			delete(sl.owned, want.name)
			s.mu.Unlock()
			o.v.free()
		}
		return nil, fmt.Errorf("register %s of checkpoint %s: %w", quote(want.name), quote(slot), err)
	}
	return &Parameter{s, sl, o}, nil
}

// ownedFor finds what a slot has of that name, or makes it.
func (s *Set) ownedFor(sl *slot, want ownedPlan, init func([]float32)) (o *owned, fresh bool, err error) {
	if sl.adapter == nil {
		return nil, false, &SlotStateError{sl.name, "the base model owns no parameters and buffers"}
	}
	if o := sl.owned[want.name]; o != nil {
		if t := o.v.tensors[0]; o.buffer != want.buffer || !slices.Equal(t.Shape, want.shape) {
			return nil, false, &SlotStateError{sl.name, fmt.Sprintf("it has %s already, a %v of shape %v", quote(want.name), kind(o.buffer), t.Shape)}
		}
		return o, false, nil
	}
	if err := want.check(); err != nil {
		return nil, false, err
	}
	if sl.snapshot {
		return nil, false, &SlotStateError{sl.name, "it is a snapshot: register what it should have before it is taken"}
	}
	if o, err = s.own(sl, want); err != nil {
		return nil, false, err
	}
	if init != nil {
		init(o.values())
	}
	return o, true, nil
}

func kind(buffer bool) string {
	if buffer {
		return "buffer"
	}
	return "parameter"
}

// maxElements bounds what one parameter may have, so that sizes in bytes fit an int64.
const maxElements = 1 << 50

func (o ownedPlan) check() error {
	if o.name == "" || strings.ContainsAny(o.name, "./") {
		return fmt.Errorf("the name %s is empty, or has a '.' or a '/'", quote(o.name))
	}
	n := int64(1)
	for _, d := range o.shape {
		if d < 1 || d > maxElements/n {
			return fmt.Errorf("the shape %v is not of numbers from 1 with a product of at most %d", o.shape, int64(maxElements))
		}
		n *= d
	}
	return nil
}

// tensor is where it lies in a vector of its own.
func (o ownedPlan) tensor() Tensor {
	return Tensor{Name: kind(o.buffer) + "." + o.name, Shape: slices.Clone(o.shape)}
}

func elements(shape []int64) int64 { return (&Tensor{Shape: shape}).elements() }

// own takes the memory of a parameter or buffer and gives it to a slot.
func (s *Set) own(sl *slot, p ownedPlan) (*owned, error) {
	t := p.tensor()
	v, err := newVector(s.dev, t.Name, []Tensor{t}, t.elements()*4, sl.trained && !p.buffer)
	if err != nil {
		return nil, err
	}
	o := &owned{p.name, p.buffer, v}
	s.mu.Lock()
	defer s.mu.Unlock()
	sl.owned[p.name] = o
	return o, nil
}

func (o *owned) values() []float32 { return o.v.tensors[0].in(o.v.params) }

// Value is the parameter, row-major, in the device's memory: valid until the slot is replaced or unloaded, after which Value is an error. A lease of the slot prevents both.
func (p *Parameter) Value() ([]float32, error) {
	if err := p.stale(); err != nil {
		return nil, err
	}
	return p.o.values(), nil
}

// Gradient is what was accumulated since the last step, in all else as Value. A slot that is not trained has none, which is an error.
func (p *Parameter) Gradient() ([]float32, error) {
	if err := p.stale(); err != nil {
		return nil, err
	}
	if err := p.slot.mustTrain(); err != nil {
		return nil, err
	}
	return p.o.v.tensors[0].in(p.o.v.grads), nil
}

// Accumulate adds a gradient, row-major, to what was accumulated.
func (p *Parameter) Accumulate(grad []float32) error {
	p.set.turn.Lock()
	defer p.set.turn.Unlock()
	to, err := p.Gradient()
	if err != nil {
		return err
	}
	if len(to) != len(grad) {
		return fmt.Errorf("accumulate into %s of checkpoint %s: %d elements for %d", quote(p.o.name), quote(p.slot.name), len(grad), len(to))
	}
	for i, g := range grad {
		to[i] += g
	}
	p.set.mu.Lock()
	defer p.set.mu.Unlock()
	p.slot.pending = true
	return nil
}

func (p *Parameter) stale() error {
	p.set.mu.Lock()
	defer p.set.mu.Unlock()
	if p.slot.gone {
		return &SlotStateError{p.slot.name, fmt.Sprintf("the slot that had %s was replaced or unloaded", quote(p.o.name))}
	}
	return nil
}

// Value is the buffer, row-major, in the device's memory, for reading and writing: valid until the slot is replaced or unloaded, after which Value is an error.
func (b *Buffer) Value() ([]float32, error) { return b.p.Value() }

// mustTrain says why a slot has no gradients.
func (sl *slot) mustTrain() error {
	switch {
	case sl.trained:
		return nil
	case sl.snapshot:
		return &SlotStateError{sl.name, "it is a snapshot, which is not trained"}
	case sl.adapter == nil:
		return &SlotStateError{sl.name, "the base model is not trained"}
	}
	return &SlotStateError{sl.name, "it was loaded for inference only"}
}

// Accumulate adds a gradient of the layout of the slot's vector to what was accumulated. It is of no other use afterwards.
func (s *Set) Accumulate(name string, grad device.Mem) error {
	s.turn.Lock()
	defer s.turn.Unlock()
	sl, err := s.lookup(name)
	if err == nil {
		err = sl.mustTrain()
	}
	if err != nil {
		return err
	}
	if want := sl.gradBytes(); grad.Bytes() != want || !grad.Real() {
		return fmt.Errorf("accumulate into checkpoint %s: a gradient of %d bytes for parameters of %d", quote(name), grad.Bytes(), want)
	}
	if err := failpoint.Hit(failpoint.Accumulate); err != nil {
		return fmt.Errorf("accumulate into checkpoint %s: %w", quote(name), err)
	}
	add(s.threads, sl.main.grads.Slice(0, grad.Bytes()), grad)
	s.mu.Lock()
	defer s.mu.Unlock()
	sl.pending = true
	return nil
}

// gradBytes is the length of a backward's vector.
func (sl *slot) gradBytes() int64 {
	if sl.adapter != nil {
		return sl.adapter.Bytes
	}
	return sl.main.bytes
}

// Gradients is what was accumulated into a slot's vector since the last step, for reading.
func (s *Set) Gradients(name string) (device.Mem, error) {
	sl, err := s.lookup(name)
	if err == nil {
		err = sl.mustTrain()
	}
	if err != nil {
		return device.Mem{}, err
	}
	return sl.main.grads.Slice(0, sl.gradBytes()), nil
}

// ZeroGrad forgets the accumulated gradients of slots, all of them if none is named. Live graphs stay live.
func (s *Set) ZeroGrad(names ...string) error {
	s.turn.Lock()
	defer s.turn.Unlock()
	var list []*slot
	s.mu.Lock()
	if len(names) == 0 {
		list = append(list, &s.bases)
		for _, sl := range s.slots {
			list = append(list, sl)
		}
	}
	for _, name := range names {
		sl, err := s.find(name)
		if err != nil {
			s.mu.Unlock()
			return err
		}
		list = append(list, sl)
	}
	s.mu.Unlock()
	for _, sl := range list {
		s.clear(sl)
	}
	return nil
}

// clear zeroes the accumulators of a slot.
func (s *Set) clear(sl *slot) {
	s.mu.Lock()
	pending := sl.pending
	s.mu.Unlock()
	if !pending {
		return
	}
	for _, v := range sl.trainable() {
		clear(v.grads.Raw())
	}
	s.mu.Lock()
	sl.pending = false
	s.mu.Unlock()
}
