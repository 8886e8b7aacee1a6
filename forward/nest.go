package forward

import "fmt"

// Inputs is an Input, or a list of Inputs, to any depth. The zero value is an empty list.
type Inputs struct {
	one  *Input
	many []Inputs
}

// One is a single Input.
func One(in Input) Inputs { return Inputs{one: &in} }

// Many is a list of Inputs.
func Many(in ...Input) Inputs {
	list := make([]Inputs, len(in))
	for i := range in {
		list[i] = Inputs{one: &in[i]}
	}
	return Inputs{many: list}
}

// Nest is a list of Inputs that may be lists themselves.
func Nest(in ...Inputs) Inputs { return Inputs{many: in} }

// Walk calls fn for every Input in order, with a function that tells its place: "inputs[2][0]". It stops at the first error.
// Nesting may be of any depth.
func (in Inputs) Walk(fn func(in *Input, path func() string) error) error {
	type frame struct {
		list []Inputs
		next int
	}
	var stack []frame
	path := func() string {
		s := []byte("inputs")
		for _, f := range stack {
			s = fmt.Appendf(s, "[%d]", f.next-1)
		}
		return string(s)
	}
	if in.one != nil {
		return fn(in.one, path)
	}
	stack = append(stack, frame{list: in.many})
	for len(stack) > 0 {
		f := &stack[len(stack)-1]
		if f.next == len(f.list) {
			stack = stack[:len(stack)-1]
			continue
		}
		child := f.list[f.next]
		f.next++
		if child.one == nil {
			stack = append(stack, frame{list: child.many})
		} else if err := fn(child.one, path); err != nil {
			return err
		}
	}
	return nil
}

// Outputs has the nesting of the Inputs that it answers.
type Outputs struct {
	one  *Output
	many []Outputs
}

// Output is the answer to a single Input, or nil if o is a list.
func (o Outputs) Output() *Output { return o.one }

// List is the answers to a list, or nil if o is single.
func (o Outputs) List() []Outputs { return o.many }

// Flat lists the outputs in the caller's order.
func (o Outputs) Flat() []*Output {
	var flat []*Output
	stack := []Outputs{o}
	for len(stack) > 0 {
		top := stack[len(stack)-1]
		stack = stack[:len(stack)-1]
		if top.one != nil {
			flat = append(flat, top.one)
		}
		for i := len(top.many) - 1; i >= 0; i-- {
			stack = append(stack, top.many[i])
		}
	}
	return flat
}

// Shape gives flat outputs, one per Input in order, the nesting of in.
func (in Inputs) Shape(flat []*Output) Outputs {
	var root Outputs
	type job struct {
		in  Inputs
		out *Outputs
	}
	stack := []job{{in, &root}}
	for len(stack) > 0 {
		j := stack[len(stack)-1]
		stack = stack[:len(stack)-1]
		if j.in.one != nil {
			j.out.one, flat = flat[0], flat[1:]
			continue
		}
		j.out.many = make([]Outputs, len(j.in.many))
		for i := len(j.in.many) - 1; i >= 0; i-- {
			stack = append(stack, job{j.in.many[i], &j.out.many[i]})
		}
	}
	return root
}
