package device

import (
	"errors"
	"math/rand/v2"
	"testing"
)

// trimmer is a fake whose mappings can be made shorter.
type trimmer struct{ fake }

func (f *trimmer) Trim(m Mem, keep int64) Mem {
	f.Unmap(m.Slice(keep, m.Bytes()-keep))
	return m.Slice(0, keep)
}

// Passes in turn use one slab of the largest turn: outputs stay where they are and keep what was written, scratch never meets them, counters say what is in use for what,
// and everything comes back.
func TestTurnsShareOneSlab(t *testing.T) {
	for seed := range uint64(100) {
		rng := rand.New(rand.NewPCG(seed, 3))
		var turns []Sizes
		var pieces, scratch []int64
		var sum, largest int64
		for range 1 + rng.IntN(6) {
			out, tmp := int64(1+rng.IntN(3*PageSize)), int64(rng.IntN(9*PageSize))
			sum += RoundAlign(out)
			pieces, scratch = append(pieces, out), append(scratch, tmp)
			turns = append(turns, Sizes{Outputs: RoundPages(sum), Scratch: RoundPages(tmp)})
			largest = max(largest, RoundPages(sum)+RoundPages(tmp))
		}
		can, cannot := new(trimmer), new(fake)
		for name, c := range map[string]struct {
			m      Mapper
			mapped func() int64
		}{"trims": {can, func() int64 { return can.mapped }}, "does not": {cannot, func() int64 { return cannot.mapped }}} {
			s := space(t, largest, c.m)
			if _, err := space(t, largest-1, new(fake)).ReserveTurns(turns); !isFull(err) {
				t.Fatalf("seed %d: a byte less: %v", seed, err)
			}
			r, err := s.ReserveTurns(turns)
			if err != nil {
				t.Fatal(err)
			}
			if s.Stats().Allocated != largest || c.mapped() != largest {
				t.Fatalf("seed %d, %s: %d bytes are mapped, want %d\n%v", seed, name, c.mapped(), largest, s.Stats())
			}
			var kept []Mem
			for j := range turns {
				if j > 0 {
					r.NextTurn()
				}
				if r.Sizes() != turns[j] {
					t.Errorf("turn %d: sizes %v, want %v", j, r.Sizes(), turns[j])
				}
				m := r.Keep(Outputs, pieces[j])
				fill(m, byte(j+1))
				kept = append(kept, m)
				mark := r.Mark()
				fill(r.Scratch(scratch[j]), 0xff)
				if in := s.Stats().InUse; in != turns[j] {
					t.Errorf("seed %d, turn %d: in use %v, want %v", seed, j, in, turns[j])
				}
				if p := panicOf(func() { r.Scratch(turns[j][Scratch] + 1) }); p == nil {
					t.Errorf("seed %d, turn %d: more scratch than was reserved", seed, j)
				}
				if p := panicOf(func() { r.Keep(Outputs, turns[j][Outputs]+1) }); p == nil {
					t.Errorf("seed %d, turn %d: more outputs than were reserved", seed, j)
				}
				r.Pop(mark)
			}
			if p := panicOf(r.NextTurn); p == nil {
				t.Error("a turn after the last")
			}
			if r.Peak() != largest || s.Stats().PeakInUse != largest {
				t.Errorf("seed %d: peak %d, want %d", seed, r.Peak(), largest)
			}
			r.ReleaseScratch()
			r.ReleaseScratch()
			left := s.Stats()
			if outs := RoundPages(sum); left.InUse != (Sizes{Outputs: outs}) || name == "trims" && (left.Allocated != outs || c.mapped() != outs) {
				t.Errorf("seed %d, %s: %d mapped\n%v", seed, name, c.mapped(), left)
			}
			for j, m := range kept {
				for _, b := range m.Raw() {
					if b != byte(j+1) {
						t.Fatalf("seed %d: output %d was overwritten", seed, j)
					}
				}
			}
			if seed%2 == 0 {
				r.Release()
			}
			r.Release()
			if now := s.Stats(); now.Allocated != 0 || now.TotalInUse() != 0 || now.Reservations != 0 || c.mapped() != 0 {
				t.Errorf("seed %d, %s: %d mapped\n%v", seed, name, c.mapped(), now)
			}
		}
	}
}

func isFull(err error) bool {
	var oom *OutOfMemoryError
	return errors.As(err, &oom)
}

func fill(m Mem, b byte) {
	raw := m.Raw()
	for i := range raw {
		raw[i] = b
	}
}

// A reservation that is released under way gives everything back, and one that cannot be had takes nothing.
func TestTurnsThatFail(t *testing.T) {
	turns := []Sizes{{Outputs: 10, Scratch: 5 * PageSize}, {Outputs: 2 * PageSize, Scratch: PageSize}}
	for _, f := range []*fake{{failMap: 1}, {failFill: true}} {
		s := space(t, 1<<20, f)
		if _, err := s.ReserveTurns(turns); !isFull(err) || !errors.Is(err, errFake) || s.Stats().Allocated != 0 || f.mapped != 0 {
			t.Errorf("%v, %d mapped\n%v", err, f.mapped, s.Stats())
		}
	}
	f := new(trimmer)
	s := space(t, 1<<20, f)
	for _, bad := range [][]Sizes{nil, {}, {{Outputs: -1}}, {{Scratch: -1}}, {{Retained: 1}}, {{Outputs: 2 * PageSize}, {Outputs: 1}}} {
		if _, err := s.ReserveTurns(bad); err == nil || isFull(err) {
			t.Errorf("%v: %v", bad, err)
		}
	}
	r, err := s.ReserveTurns(turns)
	if err != nil {
		t.Fatal(err)
	}
	r.Keep(Outputs, 10)
	mark := r.Mark()
	r.Scratch(100)
	if p := panicOf(r.NextTurn); p == nil {
		t.Error("a turn ended with scratch in use")
	}
	r.Pop(mark)
	r.NextTurn()
	r.Scratch(100)
	r.Release()
	if now := s.Stats(); now.Allocated != 0 || now.TotalInUse() != 0 || f.mapped != 0 {
		t.Errorf("%d mapped\n%v", f.mapped, now)
	}
	if p := panicOf(func() { r.Scratch(1) }); p == nil {
		t.Error("scratch after the release")
	}
}

// On the host the end of a large slab goes back to the operating system in the middle of a huge page.
func TestTheHostTrims(t *testing.T) {
	h := host(t, 64<<20)
	r, err := h.ReserveTurns([]Sizes{{Outputs: 100, Scratch: 30 << 20}, {Outputs: 3<<20 + 100, Scratch: 20 << 20}})
	if err != nil {
		t.Fatal(err)
	}
	fill(r.Keep(Outputs, 100), 1)
	mark := r.Mark()
	fill(r.Scratch(30<<20), 2)
	r.Pop(mark)
	r.NextTurn()
	m := r.Keep(Outputs, 3<<20)
	fill(m, 3)
	fill(r.Scratch(20<<20), 4)
	r.ReleaseScratch()
	if raw := m.Raw(); raw[0] != 3 || raw[len(raw)-1] != 3 {
		t.Error("outputs were overwritten")
	}
	if _, ok := any(hostMapper{}).(Trimmer); ok && h.Stats().Allocated != RoundPages(3<<20+100) {
		t.Errorf("%v", h.Stats())
	}
	r.Release()
}
