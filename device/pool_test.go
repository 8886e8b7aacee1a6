package device

import (
	"errors"
	"fmt"
	"math"
	"testing"
)

func pool(t testing.TB, d Device, bytes, most int64) *Pool {
	t.Helper()
	l, err := d.ReservePool(bytes, most)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.Release)
	return l
}

// Whatever of it fits into the slab, a pass gets what it asks for: pieces do not overlap and keep what was written, the counters of the device are those of the pool, what was asked is what
// the counting twin counts, and all comes back.
func TestAPoolHoldsWhatAPassAsks(t *testing.T) {
	for seed := range uint64(60) {
		c := NewCounter()
		history(c, seed, 150, func(Purpose, Mem) {})
		slab := []int64{0, PageSize, c.Peak() / 3, c.Peak() - PageSize, c.Peak(), 2 * c.Peak()}[seed%6]
		for name, m := range map[string]Mapper{"trims": new(trimmer), "does not": new(fake)} {
			s := space(t, 1<<40, m)
			CheckLeaks(t, s)
			l := pool(t, s, slab, 1<<40)
			type piece struct {
				m  Mem
				by byte
			}
			var kept []piece
			most := int64(0)
			history(l, seed, 150, func(p Purpose, m Mem) {
				if uintptr(m.ptr)%Align != 0 {
					t.Fatalf("a piece at %p", m.ptr)
				}
				by := byte(0xff)
				if p != Scratch {
					by = byte(len(kept) % 251)
					kept = append(kept, piece{m, by})
				}
				fill(m, by)
				st := s.Stats()
				if most = max(most, st.TotalInUse()); st.TotalInUse() != l.sum+l.more || st.Allocated != l.held {
					t.Fatalf("seed %d, slab %d: %d in use and %d more, %d held\n%v", seed, slab, l.sum, l.more, l.held, st)
				}
			})
			peak, kept2 := l.Asked()
			want := c.off.Total() - c.off[Scratch]
			if peak != c.Peak() || kept2 != want {
				t.Errorf("seed %d: asked %d and kept %d, the twin counts %d and %d", seed, peak, kept2, c.Peak(), want)
			}
			if l.Peak() < most || l.Peak() != s.Stats().PeakInUse || slab >= c.Peak()+3*PageSize && l.Peak() != c.Peak() {
				t.Errorf("seed %d, slab %d: peak %d, seen %d, of the twin %d\n%v", seed, slab, l.Peak(), most, c.Peak(), s.Stats())
			}
			l.ReleaseScratch()
			l.ReleaseScratch()
			st := s.Stats()
			if st.InUse[Scratch] != 0 || st.TotalInUse() != l.Kept() || name == "trims" && st.Allocated != l.Kept() {
				t.Errorf("seed %d, %s: %d kept\n%v", seed, name, l.Kept(), st)
			}
			if live := s.Live(); name == "trims" && live[0].Bytes[Scratch] != 0 {
				t.Errorf("seed %d: %v", seed, live[0])
			}
			for _, p := range kept {
				for _, b := range p.m.Raw() {
					if b != p.by {
						t.Fatalf("seed %d, slab %d: a piece of %d bytes was overwritten by %d", seed, slab, p.m.Bytes(), b)
					}
				}
			}
			l.Release()
			l.Release()
			if st := s.Stats(); st.Allocated != 0 || st.InUse != (Sizes{}) || st.Blocks+st.Reservations != 0 {
				t.Fatalf("seed %d: after the release\n%v", seed, st)
			}
			if p := panicOf(func() { l.Keep(Outputs, 1) }); p == nil {
				t.Error("keep after the release")
			}
		}
	}
	(*Pool)(nil).Release()
}

// A pool never holds more than it may, nor than the device has; running out is an error with the numbers, after which everything is as it was and can come back.
func TestAPoolRunsOut(t *testing.T) {
	var oom *OutOfMemoryError
	for _, c := range []struct {
		name                 string
		slab, most, capacity int64 // pages
		free                 int64
	}{{"of what it may hold", 4, 7, 100, 3}, {"of the device", 4, 100, 6, 2}, {"of both, as they are", 4, 4, 4, 0}, {"of less than the slab", 4, 3, 100, 0}} {
		s := space(t, c.capacity*PageSize, new(trimmer))
		CheckLeaks(t, s)
		l := pool(t, s, c.slab*PageSize, c.most*PageSize)
		out := l.Keep(Outputs, PageSize)
		mark := l.Mark()
		l.Scratch(2 * PageSize)
		before := s.Stats()
		for what, f := range map[string]func(){
			"scratch":         func() { l.Scratch((c.free+1)*PageSize + 1) },
			"keep":            func() { l.Keep(Retained, (c.free+1)*PageSize+1) },
			"more than there": func() { l.Scratch(math.MaxInt64) },
		} {
			err, _ := panicOf(f).(error)
			if oom = nil; !errors.As(err, &oom) || oom.FreeBytes != c.free*PageSize || oom.AskedBytes <= oom.FreeBytes {
				t.Errorf("%s, %s: %v", c.name, what, err)
			}
			if now := s.Stats(); now != before {
				t.Errorf("%s, %s: %v\n%v", c.name, what, before, now)
			}
		}
		if peak, kept := l.Asked(); peak < (c.free+4)*PageSize || kept != PageSize {
			t.Errorf("%s: asked %d and kept %d", c.name, peak, kept)
		}
		if c.free > 0 {
			l.Scratch(c.free * PageSize)
		}
		l.Scratch(PageSize) // there is room in the slab still
		if s.Stats().Allocated != (c.slab+c.free)*PageSize {
			t.Errorf("%s: %v", c.name, s.Stats())
		}
		l.Pop(mark)
		if st := s.Stats(); st.Allocated != c.slab*PageSize || st.InUse != (Sizes{Outputs: PageSize}) {
			t.Errorf("%s, after the pop: %v", c.name, st)
		}
		fill(out, 1)
		l.Release()
	}
	if _, err := space(t, PageSize, new(fake)).ReservePool(PageSize+1, 1<<40); !isFull(err) {
		t.Errorf("a slab that the device does not have: %v", err)
	}
	if _, err := space(t, PageSize, new(fake)).ReservePool(-1, 1); err == nil {
		t.Error("a slab of a negative size")
	}
	for _, f := range []*fake{{failMap: 1}, {failFill: true}} {
		s := space(t, 1<<20, f)
		if _, err := s.ReservePool(PageSize, PageSize); !errors.Is(err, errFake) || f.mapped != 0 || s.Stats().Allocated != 0 || s.Free() != 1<<20 {
			t.Errorf("%v\n%v", err, s.Stats())
		}
	}
}

// Each pass is measured by itself, and one that leaves scratch on the stack loses it.
func TestPassesOfAPoolAreMeasuredApart(t *testing.T) {
	h := host(t, 1<<20)
	l := pool(t, h, 8*PageSize, 100*PageSize)
	for pass, c := range [][2]int64{{100, 5 * PageSize}, {70, 12 * PageSize}, {1, 1}, {0, 0}} {
		if pass > 0 {
			l.NextTurn()
		}
		l.Keep(Outputs, c[0])
		l.Scratch(c[1])
		want := RoundPages(c[0]) + RoundPages(c[1])
		if peak, kept := l.Asked(); peak != want || kept != RoundAlign(c[0]) {
			t.Errorf("pass %d: peak %d and %d kept, want %d and %d", pass, peak, kept, want, RoundAlign(c[0]))
		}
		if in := h.Stats().InUse; in[Outputs] != PageSize || in[Scratch] != RoundPages(c[1]) {
			t.Errorf("pass %d: %v", pass, in)
		}
	}
	if want := int64(13 * PageSize); l.Peak() != want || l.Kept() != PageSize {
		t.Errorf("peak %d, want %d; %d kept", l.Peak(), want, l.Kept())
	}
	l.Keep(Gradients, 9*PageSize) // beyond the slab
	if l.ReleaseScratch(); l.Kept() != 10*PageSize || h.Stats().Allocated != 10*PageSize {
		t.Errorf("%d kept\n%v", l.Kept(), h.Stats())
	}
	if p := fmt.Sprint(panicOf(func() { l.Scratch(1) })); p == "<nil>" {
		t.Error("scratch after the last pass")
	}
}
