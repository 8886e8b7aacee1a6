package slots

import "github.com/trainerrank/engine/forward"

// Push makes a slot the one that requests without a choice run on, until it is popped; "" is the base model. It must be loaded.
func (s *Set) Push(name string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, err := s.find(name); err != nil {
		return err
	}
	s.pushed = append(s.pushed, name)
	return nil
}

// Pop ends the last push, and returns its slot. Without one it is an error.
func (s *Set) Pop() (string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := len(s.pushed)
	if n == 0 {
		return "", &SlotStateError{"", "nothing is pushed"}
	}
	name := s.pushed[n-1]
	s.pushed = s.pushed[:n-1]
	return name, nil
}

// SetDefault makes a slot the one that requests without a choice run on while nothing is pushed; "" is the base model. It must be loaded, and
// nothing pushed.
func (s *Set) SetDefault(name string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, err := s.find(name); err != nil {
		return err
	}
	if n := len(s.pushed); n > 0 {
		return &SlotStateError{name, "the default cannot change while " + quote(s.pushed[n-1]) + " is pushed"}
	}
	s.fallback = name
	return nil
}

// Resolve is the name of the slot that a request runs on: its own choice, else that of the call, else what is pushed, else the default, else the base
// model (""). Whether a slot of that name is loaded is for [Set.Ensure] to say, so that all ranks hear it together.
func (s *Set) Resolve(own, call forward.Selection) string {
	switch {
	case !own.Inherits():
		return own.Name()
	case !call.Inherits():
		return call.Name()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := len(s.pushed); n > 0 {
		return s.pushed[n-1]
	}
	return s.fallback
}
