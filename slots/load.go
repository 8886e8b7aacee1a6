package slots

import (
	"context"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
)

// LoadOptions say what a slot is loaded for.
type LoadOptions struct {
	// Inference takes the memory of the parameters only: no accumulators, no moments. The slot cannot be trained.
	Inference bool
	// IgnoreDropout trains an adapter without the dropout that its configuration asks for. Otherwise it is refused, but for inference.
	IgnoreDropout bool
}

// Load reads an adapter from a folder in PEFT's format into the slot of that name, which it replaces if there is one: then both are in memory until the new one is whole. All ranks
// call it.
//
// Tensors are widened to float32. What the engine cannot run as the configuration means it is an [*AdapterError]. A folder that [Set.Save] wrote brings revision, moments, parameters and buffers back,
// and is refused, with the same error, if it is not to the byte what was saved; any other brings weights, and the moments are zero. Running out of memory is a [*device.OutOfMemoryError]. A slot that is a snapshot, or that
// has live graphs or pending gradients, is not replaced: a [*SlotStateError]. After any error, on any rank, the slot is what it was.
func (s *Set) Load(ctx context.Context, name, dir string, o LoadOptions) error {
	s.turn.Lock()
	defer s.turn.Unlock()
	return s.put(ctx, "load", name, func() (*slot, error) {
		return s.fromFolder(name, dir, o)
	})
}

// Create makes a fresh adapter in the slot of that name, as PEFT initialises one: A is uniform within 1/sqrt(in) of 0 (He and others, 2015, with PyTorch's a = sqrt(5)),
// and drawn from the seed, B is zero. In all else it is as [Set.Load].
func (s *Set) Create(ctx context.Context, name string, c Config) error {
	s.turn.Lock()
	defer s.turn.Unlock()
	return s.put(ctx, "create", name, func() (*slot, error) {
		if c.BaseModel == "" {
			c.BaseModel = s.base
		}
		text := c.text()
		parsed, err := parseConfig(text) // what will be read when it has been saved
		if err != nil {
			return nil, err
		}
		p, err := planOf(name, s.modules, text, parsed)
		if err != nil {
			return nil, err
		}
		sl, err := s.build(p, true)
		if err != nil {
			return nil, err
		}
		for _, l := range sl.adapter.LoRA {
			m := s.modules[l.Module]
			// Each module has a stream of its own: what is drawn for it does not depend on which others are adapted.
			rng := rand.New(rand.NewPCG(c.Seed, uint64(l.Module)))
			bound := 1 / math.Sqrt(float64(m.In))
			a := sl.main.params.Slice(l.A, int64(l.Rank*m.In)*4).F32()
			for i := range a {
				a[i] = float32((2*rng.Float64() - 1) * bound)
			}
		}
		return sl, nil
	})
}

// Unload gives the memory of a slot back. It must be idle, as for [Set.Load], and neither pushed nor the default; a snapshot may be unloaded.
// All ranks call it.
func (s *Set) Unload(ctx context.Context, name string) error {
	s.turn.Lock()
	defer s.turn.Unlock()
	sl, err := s.shut(name, func(sl *slot) error {
		switch {
		case sl == nil:
			return &SlotStateError{name, "no checkpoint of that name is loaded"}
		case slices.Contains(s.pushed, name):
			return &SlotStateError{name, "it is pushed: pop it first"}
		case s.fallback == name:
			return &SlotStateError{name, "it is the default: choose another first"}
		}
		return sl.idle()
	})
	err = s.settle(ctx, "unload", err, name)
	s.swap(name, sl, nil, err)
	if err != nil {
		return fmt.Errorf("unload checkpoint %s: %w", quote(name), err)
	}
	return nil
}

// put makes a slot and puts it where one of that name is, on all ranks or on none. The caller holds turn.
func (s *Set) put(ctx context.Context, op, name string, build func() (*slot, error)) error {
	old, err := s.shut(name, func(sl *slot) error {
		switch {
		case name == "":
			return &SlotStateError{name, "that is the base model: a checkpoint needs a name"}
		case sl == nil:
			return nil
		case sl.snapshot:
			return &SlotStateError{name, "it is a snapshot: unload it first"}
		}
		return sl.idle()
	})
	var sl *slot
	if err == nil {
		sl, err = build()
	}
	same := name
	if err == nil && !s.alone() {
		same = fmt.Sprintf("%q trained=%t revision=%d %s", name, sl.trained, sl.revision, sl.print(true))
	}
	err = s.settle(ctx, op, err, same)
	if err != nil {
		if sl != nil {
			sl.free()
		}
		sl = nil
	}
	s.swap(name, old, sl, err)
	if err != nil {
		return fmt.Errorf("%s checkpoint %s: %w", op, quote(name), err)
	}
	return nil
}

// shut finds the slot of a name, nil if there is none, and lets nobody take a lease of it until swap. If allowed says no, there is nothing to swap.
func (s *Set) shut(name string, allowed func(*slot) error) (*slot, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	sl := s.slots[name]
	if err := allowed(sl); err != nil {
		return nil, err
	}
	if sl != nil {
		sl.closing = true
	}
	return sl, nil
}

// swap puts the new slot in the place of the old, either of which may be nil, or opens the old one again after an error.
func (s *Set) swap(name string, old, new *slot, err error) {
	s.mu.Lock()
	if old != nil {
		old.closing, old.gone = false, err == nil
	}
	if err == nil {
		delete(s.slots, name)
		if new != nil {
			s.slots[name] = new
		}
	}
	s.mu.Unlock()
	if old != nil && err == nil {
		old.free()
	}
}

// plan is a slot before any memory is taken.
type plan struct {
	name    string
	config  []byte
	summary *Config
	adapter *forward.Adapter
	tensors []Tensor
	owned   []ownedPlan
}

// ownedPlan is a parameter or a buffer that a folder holds.
type ownedPlan struct {
	name   string
	buffer bool
	shape  []int64
}

// planOf lays a configuration out over a model's modules.
func planOf(name string, modules []forward.Module, text []byte, c *Config) (*plan, error) {
	lora, err := c.additions(modules)
	if err != nil {
		return nil, err
	}
	a := forward.NewAdapter(name, modules, lora)
	return &plan{name: name, config: text, summary: c, adapter: a, tensors: adapterTensors(modules, a)}, nil
}

// sizes are the bytes that the slot takes of a device.
func (p *plan) sizes(trained bool) device.Sizes {
	total := sizes(p.adapter.Bytes, trained)
	for _, o := range p.owned {
		for purpose, n := range sizes(elements(o.shape)*4, trained && !o.buffer) {
			total[purpose] += n
		}
	}
	return total
}

// Price is what a slot with that configuration takes of the device, in bytes, before it exists. What [Set.Parameter] and [Set.Buffer] add is beside it.
func (s *Set) Price(c Config, o LoadOptions) (device.Sizes, error) {
	if err := c.check(); err != nil {
		return device.Sizes{}, err
	}
	p, err := planOf("", s.modules, nil, &c)
	if err != nil {
		return device.Sizes{}, err
	}
	return p.sizes(!o.Inference), nil
}

// PriceOf is what [Set.Load] of a folder takes of the device, in bytes. It reads no more than headers.
func (s *Set) PriceOf(dir string, o LoadOptions) (device.Sizes, error) {
	out, err := outlineFolder("", present(dir), s.modules, o)
	if err != nil {
		return device.Sizes{}, fmt.Errorf("price checkpoint: %w", err)
	}
	return out.Bytes, nil
}

// build takes the memory of a planned slot, all or nothing.
func (s *Set) build(p *plan, trained bool) (*slot, error) {
	main, err := newVector(s.dev, "adapter", p.tensors, p.adapter.Bytes, trained)
	if err != nil {
		return nil, err
	}
	a := *p.adapter
	a.Name, a.Params = p.name, main.params.Slice(0, a.Bytes)
	sl := &slot{name: p.name, adapter: &a, config: p.config, summary: p.summary, main: main, trained: trained, owned: map[string]*owned{}}
	for _, o := range p.owned {
		if _, err := s.own(sl, o); err != nil {
			sl.free()
			return nil, err
		}
	}
	return sl, nil
}

// Snapshot copies the parameters of a slot, as they are, into a new slot that is for inference only and cannot be loaded over. It says whether it did: if a snapshot of that name exists
// already, it stays. All ranks call it.
func (s *Set) Snapshot(ctx context.Context, src, dst string) (bool, error) {
	s.turn.Lock()
	defer s.turn.Unlock()
	const op = "snapshot"
	old, _ := s.lookup(dst)
	if old != nil && old.snapshot {
		return false, s.settle(ctx, op, nil, quote(dst)+" exists")
	}
	err := s.put(ctx, op, dst, func() (*slot, error) {
		from, err := s.lookup(src)
		switch {
		case err != nil:
			return nil, err
		case old != nil:
			return nil, &SlotStateError{dst, "it is a checkpoint and no snapshot: unload it first"}
		case from.adapter == nil:
			return nil, &SlotStateError{src, "the base model cannot be copied"}
		}
		p := &plan{name: dst, config: from.config, summary: from.summary, adapter: from.adapter, tensors: from.main.tensors}
		for _, name := range slices.Sorted(maps.Keys(from.owned)) {
			o := from.owned[name]
			p.owned = append(p.owned, ownedPlan{name, o.buffer, o.v.tensors[0].Shape})
		}
		sl, err := s.build(p, false)
		if err != nil {
			return nil, err
		}
		sl.snapshot, sl.revision = true, from.revision
		to := sl.vectors()
		for i, v := range from.vectors() {
			copy(to[i].params.Raw(), v.params.Raw())
		}
		return sl, nil
	})
	return err == nil, err
}
