package device

// Stack is an [Arena] for scratch alone, inside memory that is there already: what one of several workers of a pass uses for itself. It
// does no accounting, for whoever handed out the memory has done it.
type Stack struct {
	mem  Mem
	used int64
}

// NewStack makes a stack of m.
func NewStack(m Mem) *Stack { return &Stack{mem: m} }

// Keep panics: nothing on a stack outlives its mark.
func (s *Stack) Keep(Purpose, int64) Mem { panic("device: a stack keeps nothing") }

// Scratch hands out bytes until the enclosing mark is popped. It panics with an [*OverrunError] if there is no room.
func (s *Stack) Scratch(bytes int64) Mem {
	n := RoundAlign(bytes)
	if bytes < 0 || n > s.mem.n-s.used {
		panic(&OverrunError{Purpose: Scratch, Slab: s.mem.n, Used: s.used, Asked: bytes})
	}
	m := s.mem.Slice(s.used, bytes)
	s.used += n
	if invariants && m.Real() {
		hostMapper{}.Poison(m) // the builds that check run on the host
	}
	return m
}

// Mark remembers the top of the stack.
func (s *Stack) Mark() Mark { return Mark(s.used) }

// Pop gives back all memory handed out since m. It panics if m is above the top.
func (s *Stack) Pop(m Mark) {
	if m < 0 || int64(m) > s.used {
		panic("device: pop of a mark that is above the top of the stack")
	}
	s.used = int64(m)
}
