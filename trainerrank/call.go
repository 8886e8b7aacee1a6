package trainerrank

import (
	"errors"
	"fmt"
	"slices"

	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/slots"
)

// call is one call on its way: what the caller gave, flattened and checked.
type call struct {
	grad       forward.GradMode
	checkpoint forward.Selection
	progress   func(done, total int)
	outlines   []*slots.Outline // of checkpoints that are taken for loaded
	agree      bool             // with the other ranks on the outcome
	retentions []Retention      // that may be used; nil: all
	inputs     []*forward.Input // in the caller's order
	groups     []int            // per input its group, -1 if it wants no output
	members    [][]int          // per group its inputs, in the caller's order
	kinds      []group          // of the groups
	print      string           // the fingerprint, once asked for
}

// group is what requests of one batch have in common.
type group struct {
	Slot string `json:"checkpoint,omitzero"` // "": the base model
	Grad bool   `json:"grad,omitzero"`
}

// newCall flattens and checks the inputs.
func (t *TrainerRank) newCall(in forward.Inputs, opts []CallOption) (*call, error) {
	c := &call{grad: forward.NoGrad}
	for _, o := range opts {
		o(c)
	}
	for i, r := range c.retentions {
		if r != Stored && r != Layer && r != Replay || slices.Contains(c.retentions[:i], r) {
			return c, fmt.Errorf("forward: retention %q is not one of stored, layer, replay, or is there twice", r)
		}
	}
	spec := t.model.Spec()
	err := in.Walk(func(in *forward.Input, path func() string) error {
		err := check(in, spec)
		number := -1
		if err == nil && in.Active() {
			number, err = t.group(c, in)
		}
		if err != nil {
			return &InputError{path(), len(c.inputs), err}
		}
		c.add(in, number)
		return nil
	})
	return c, err
}

// add adds an input of a group, -1 if it wants no output.
func (c *call) add(in *forward.Input, group int) {
	if group >= 0 {
		c.members[group] = append(c.members[group], len(c.inputs))
	}
	c.groups = append(c.groups, group)
	c.inputs = append(c.inputs, in)
}

// part is the call of some of the inputs: as if nothing else had been given.
func (c *call) part(inputs []int) *call {
	p := *c
	p.inputs, p.groups, p.members, p.kinds, p.print = nil, nil, nil, nil, ""
	for _, i := range inputs {
		g := c.groups[i]
		if g >= 0 {
			g = p.number(c.kinds[g])
		}
		p.add(c.inputs[i], g)
	}
	return &p
}

// check says what is wrong with an input.
func check(in *forward.Input, spec forward.Spec) error {
	if len(in.Tokens) == 0 {
		return errors.New("no tokens")
	}
	for i, tok := range in.Tokens {
		if tok < 0 || int(tok) >= spec.Vocabulary {
			return fmt.Errorf("token %d at position %d is outside the vocabulary of %d", tok, i, spec.Vocabulary)
		}
	}
	if in.TargetWidth < 0 {
		return fmt.Errorf("target width %d is negative", in.TargetWidth)
	}
	if in.Targets != nil {
		// Divided, not multiplied: the width may be anything.
		if w, n := in.Width(), len(in.Targets); n%w != 0 || n/w != len(in.Tokens) {
			return fmt.Errorf("%d targets for %d tokens with %d labels per position", n, len(in.Tokens), w)
		}
		for i, l := range in.Targets {
			if l != forward.IgnoreLabel && (l < 0 || int(l) >= spec.Vocabulary) {
				return fmt.Errorf("label %d at position %d is outside the vocabulary of %d and not %d", l, i/in.Width(), spec.Vocabulary, forward.IgnoreLabel)
			}
		}
	}
	if in.TopK < 0 || in.TopK > spec.Vocabulary {
		return fmt.Errorf("top k %d is not between 0 and the vocabulary of %d", in.TopK, spec.Vocabulary)
	}
	if in.Grad > forward.NoGrad {
		return fmt.Errorf("grad mode %d is not one of inherit, with grad, no grad", in.Grad)
	}
	return nil
}

// group is the number of the group of an active input, or an error if its checkpoint cannot do what is asked of it.
func (t *TrainerRank) group(c *call, in *forward.Input) (int, error) {
	g := group{Grad: in.Grad == forward.WithGrad || in.Grad == forward.Inherit && c.grad == forward.WithGrad}
	switch {
	case t.slots != nil:
		g.Slot = t.slots.Resolve(in.Checkpoint, c.checkpoint)
	case in.Checkpoint.Inherits():
		g.Slot = c.checkpoint.Name()
	default:
		g.Slot = in.Checkpoint.Name()
	}
	if !slices.Contains(c.kinds, g) {
		if _, err := t.adapterOf(c, g); err != nil {
			return 0, err
		}
	}
	return c.number(g), nil
}

// number is the number of a group, a new one if it is new.
func (c *call) number(g group) int {
	n := slices.Index(c.kinds, g)
	if n < 0 {
		n = len(c.kinds)
		c.kinds, c.members = append(c.kinds, g), append(c.members, nil)
	}
	return n
}

// rows are the tokens of inputs.
func (c *call) rows(inputs []int) [][]int32 {
	rows := make([][]int32, len(inputs))
	for i, r := range inputs {
		rows[i] = c.inputs[r].Tokens
	}
	return rows
}

// batch is a pass over inputs, packed as laid out.
func (c *call) batch(p *pass) (*forward.Batch, error) {
	b := &forward.Batch{Grad: c.kinds[c.groups[p.requests[0]]].Grad}
	for _, r := range p.requests {
		b.Requests = append(b.Requests, c.inputs[r])
	}
	var err error
	b.Batch, err = p.layout.Pack(c.rows(p.requests))
	return b, err
}
