package device

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
)

func host(t testing.TB, capacity int64) *Host {
	t.Helper()
	h, err := NewHost(capacity)
	if err != nil {
		t.Fatal(err)
	}
	CheckLeaks(t, h)
	return h
}

func reserve(t testing.TB, d Device, s Sizes) *Reservation {
	t.Helper()
	r, err := d.Reserve(s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Release)
	return r
}

// panicOf is what f panics with, nil if it does not.
func panicOf(f func()) (p any) {
	defer func() { p = recover() }()
	f()
	return nil
}

// history is a random sequence of arena calls. The same seed makes the same calls on any arena.
func history(a Arena, seed uint64, steps int, visit func(Purpose, Mem)) {
	rng := rand.New(rand.NewPCG(seed, 1))
	size := func() int64 {
		switch rng.IntN(4) {
		case 0:
			return int64(rng.IntN(3)) // nothing, or next to it
		case 1:
			return PageSize * int64(rng.IntN(4))
		default:
			return int64(rng.IntN(3 * PageSize))
		}
	}
	kept := []Purpose{Outputs, Retained, Gradients}
	var marks []Mark
	for range steps {
		switch rng.IntN(5) {
		case 0:
			p, n := kept[rng.IntN(len(kept))], size()
			visit(p, a.Keep(p, n))
		case 1, 2:
			n := size()
			visit(Scratch, a.Scratch(n))
		case 3:
			marks = append(marks, a.Mark())
		case 4:
			if len(marks) > 0 { // a pop may close several scopes at once
				i := rng.IntN(len(marks))
				a.Pop(marks[i])
				marks = marks[:i]
			}
		}
	}
}

// untilFull runs a history up to the call that a slab has no room for.
func untilFull(r *Reservation, seed uint64, steps int) {
	p := panicOf(func() { history(r, seed, steps, func(Purpose, Mem) {}) })
	if _, overrun := p.(*OverrunError); p != nil && !overrun {
		panic(p)
	}
}

func TestReservationUsesWhatItsRehearsalCounted(t *testing.T) {
	for seed := range uint64(200) {
		h := host(t, 1<<30)
		c := NewCounter()
		var lengths []int64
		history(c, seed, 150, func(_ Purpose, m Mem) {
			if m.Real() {
				t.Fatal("a rehearsal handed out an address")
			}
			lengths = append(lengths, m.Bytes())
		})
		r, err := h.Reserve(c.Sizes())
		if err != nil {
			t.Fatal(err)
		}
		i := 0
		history(r, seed, 150, func(_ Purpose, m Mem) {
			if m.Bytes() != lengths[i] {
				t.Fatalf("seed %d: piece %d has %d bytes, the rehearsal's had %d", seed, i, m.Bytes(), lengths[i])
			}
			i++
			if st := h.Stats(); st.InUse.Total() > st.Allocated || st.InUse.Total() != st.inUse {
				t.Fatalf("seed %d: counters contradict each other\n%v", seed, st)
			}
		})
		st := h.Stats()
		switch {
		case r.Used() != c.Sizes(), st.Peak != c.Sizes():
			t.Fatalf("seed %d: counted %v, used %v, observed %v", seed, c.Sizes(), r.Used(), st.Peak)
		case r.Peak() != c.Peak(), st.PeakInUse != c.Peak():
			t.Fatalf("seed %d: peak counted %d, used %d, observed %d", seed, c.Peak(), r.Peak(), st.PeakInUse)
		case st.PeakAllocated != c.Sizes().Total():
			t.Fatalf("seed %d: allocated %d, counted %v", seed, st.PeakAllocated, c.Sizes())
		}
		for p, n := range c.Sizes() { // a reservation of one page less overruns
			if n == 0 || seed > 20 {
				continue
			}
			less := c.Sizes()
			less[p] -= PageSize
			tight, err := h.Reserve(less)
			if err != nil {
				t.Fatal(err)
			}
			var overrun *OverrunError
			if err, _ := panicOf(func() { history(tight, seed, 150, func(Purpose, Mem) {}) }).(error); !errors.As(err, &overrun) {
				t.Fatalf("seed %d: a slab for %v of a page less did not overrun: %v", seed, Purpose(p), err)
			}
			if overrun.Purpose != Purpose(p) || overrun.Slab != less[p] || overrun.Used+RoundAlign(overrun.Asked) <= overrun.Slab {
				t.Fatalf("seed %d: %+v", seed, overrun)
			}
			tight.Release()
		}
		r.Release()
		if st := h.Stats(); st.Allocated != 0 || st.InUse != (Sizes{}) || r.Used() != c.Sizes() {
			t.Fatalf("seed %d: after the release %v", seed, st)
		}
	}
}

func TestPiecesDoNotOverlapAndAreAligned(t *testing.T) {
	h := host(t, 1<<30)
	r := reserve(t, h, Sizes{Outputs: 1 << 20, Retained: 1 << 20, Gradients: 1 << 20, Scratch: 1 << 20})
	// Every piece is filled with a byte of its own; a live neighbour must not see it.
	type piece struct {
		m  Mem
		by byte
	}
	var live []piece
	add := func(m Mem) {
		if m.Bytes() == 0 {
			return
		}
		if uintptr(m.ptr)%Align != 0 {
			t.Fatalf("piece at %p", m.ptr)
		}
		by := byte(len(live) + 1)
		for i := range m.Raw() {
			m.Raw()[i] = by
		}
		live = append(live, piece{m, by})
	}
	for i := range int64(20) {
		add(r.Keep(Outputs, 3*i))
		add(r.Keep(Retained, 777*i))
		add(r.Keep(Gradients, i))
		add(r.Scratch(65 * i))
	}
	for _, p := range live {
		for _, b := range p.m.Raw() {
			if b != p.by {
				t.Fatalf("piece %d of %d bytes was overwritten by %d", p.by, p.m.Bytes(), b)
			}
		}
	}
}

func TestScratchIsAStack(t *testing.T) {
	h := host(t, 1<<20)
	r := reserve(t, h, Sizes{Scratch: 4 * PageSize, Outputs: PageSize})
	height := func(want int64) {
		t.Helper()
		if got := h.Stats().InUse[Scratch]; got != want*PageSize {
			t.Fatalf("scratch is %d bytes high, want %d pages", got, want)
		}
	}
	height(0)
	a := r.Scratch(1)
	height(1)
	outer := r.Mark()
	b := r.Scratch(2 * PageSize)
	height(3)
	inner := r.Mark()
	r.Scratch(PageSize - 63)
	height(4)
	r.Pop(inner)
	height(3)
	r.Pop(outer)
	height(1)
	if again := r.Scratch(PageSize); again.ptr != b.ptr || again.ptr == a.ptr {
		t.Error("what was popped is not handed out again")
	}
	r.Pop(0)
	height(0)
	if st := h.Stats(); st.Peak[Scratch] != 4*PageSize || st.Allocated != 5*PageSize {
		t.Errorf("after the pass\n%v", st)
	}
	if got, want := r.Used(), (Sizes{Scratch: 4 * PageSize}); got != want {
		t.Errorf("used %v, want %v", got, want)
	}
}

func TestReleaseScratchLeavesWhatWasKept(t *testing.T) {
	h := host(t, 1<<20)
	r := reserve(t, h, Sizes{Scratch: 8 * PageSize, Outputs: PageSize, Weights: PageSize})
	out := r.Keep(Outputs, 100)
	r.Scratch(5 * PageSize) // an aborted pass has not popped
	r.ReleaseScratch()
	r.ReleaseScratch()
	st := h.Stats()
	if st.Allocated != 2*PageSize || st.InUse != (Sizes{Outputs: PageSize}) || st.Reservations != 1 {
		t.Errorf("after the release of scratch\n%v", st)
	}
	out.Raw()[99] = 1
	for name, f := range map[string]func(){
		"scratch": func() { r.Scratch(1) },
		"pop":     func() { r.Pop(64) },
	} {
		if panicOf(f) == nil {
			t.Errorf("%s after the release of scratch does not panic", name)
		}
	}
	r.Release()
	r.Release()
	(*Reservation)(nil).Release()
	if p := fmt.Sprint(panicOf(func() { r.Keep(Outputs, 1) })); !strings.Contains(p, "after its release") {
		t.Errorf("keep after the release: %s", p)
	}
	if r.Sizes() != (Sizes{Scratch: 8 * PageSize, Outputs: PageSize, Weights: PageSize}) {
		t.Errorf("sizes changed to %v", r.Sizes())
	}
}

func TestArenasRefuseMisuse(t *testing.T) {
	h := host(t, 1<<20)
	for name, a := range map[string]Arena{
		"counter": NewCounter(), "reservation": reserve(t, h, Sizes{Scratch: PageSize, Outputs: PageSize}),
		"pool": pool(t, h, PageSize, 4*PageSize), "pool without a slab": pool(t, h, 0, 4*PageSize),
	} {
		a.Scratch(128)
		for what, f := range map[string]func(){
			"keep of scratch":         func() { a.Keep(Scratch, 1) },
			"keep of no purpose":      func() { a.Keep(Purpose(NumPurposes), 1) },
			"negative keep":           func() { a.Keep(Outputs, -1) },
			"negative scratch":        func() { a.Scratch(math.MinInt64) },
			"pop above the top":       func() { a.Pop(192) },
			"pop below the bottom":    func() { a.Pop(-64) },
			"pop to what is no mark":  func() { a.Pop(1) },
			"the mark of another one": func() { a.Pop(1 << 40) },
		} {
			if panicOf(f) == nil {
				t.Errorf("%s: %s does not panic", name, what)
			}
		}
		if m := a.Keep(Outputs, 0); m.Bytes() != 0 || m.Real() {
			t.Errorf("%s: keep of nothing is %v", name, m)
		}
	}
}

func TestCounterStopsBeforeItOverflows(t *testing.T) {
	c := NewCounter()
	for p := range Purpose(NumPurposes) {
		for range 3 {
			if p == Scratch {
				c.Scratch(math.MaxInt64)
			} else {
				c.Keep(p, math.MaxInt64)
			}
		}
	}
	if c.Sizes().Total() != int64(NumPurposes)*maxCount || c.Peak() != c.Sizes().Total() {
		t.Errorf("counted %v, peak %d", c.Sizes(), c.Peak())
	}
	var oom *OutOfMemoryError
	if _, err := host(t, 1<<40).Reserve(c.Sizes()); !errors.As(err, &oom) {
		t.Errorf("reserving it: %v", err)
	}
}

func TestInvariantsPoisonWhatIsHandedOut(t *testing.T) {
	if !invariants {
		t.Skip("needs the tag invariants")
	}
	r := reserve(t, host(t, 1<<20), Sizes{Outputs: PageSize, Scratch: PageSize})
	for _, m := range []Mem{r.Keep(Outputs, 12), r.Scratch(12)} {
		for _, x := range m.F32() {
			if x == x {
				t.Errorf("memory that nobody wrote reads as %g", x)
			}
		}
	}
}

func TestOverrunText(t *testing.T) {
	e := &OverrunError{Purpose: Retained, Slab: 8192, Used: 4096, Asked: 5000}
	want := "arena: retained slab of 8192 bytes overrun: 4096 used, 5000 more asked\nhint: the pass asked for other memory than its rehearsal"
	if e.Error() != want {
		t.Errorf("%s", e)
	}
}

func BenchmarkArena(b *testing.B) {
	h, err := NewHost(1 << 30)
	if err != nil {
		b.Fatal(err)
	}
	r, err := h.Reserve(Sizes{Outputs: 64 << 20, Scratch: 4 << 20})
	if err != nil {
		b.Fatal(err)
	}
	defer r.Release()
	for name, a := range map[string]Arena{"reservation": r, "counter": NewCounter()} {
		b.Run(name+"/keep", func(b *testing.B) { // 64 pieces to a page
			for i := range b.N {
				if r, ok := a.(*Reservation); ok && i%(1<<20) == 0 {
					r.space.use(Outputs, r.set(Outputs, 0))
				}
				a.Keep(Outputs, 64)
			}
		})
		for _, n := range []int64{64, 1 << 20} {
			b.Run(fmt.Sprintf("%s/mark-scratch-pop-%d", name, n), func(b *testing.B) {
				for b.Loop() {
					m := a.Mark()
					a.Scratch(n)
					a.Pop(m)
				}
			})
		}
	}
}
