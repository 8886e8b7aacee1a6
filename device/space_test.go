package device

import (
	"errors"
	"math"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
)

// fake is a mapper of Go memory that counts what is mapped and can refuse.
type fake struct {
	mu       sync.Mutex
	mapped   int64
	maps     int
	failMap  int // the n-th Map fails; 0: none
	failFill bool
}

var errFake = errors.New("the machine says no")

func (f *fake) Map(bytes int64) (Mem, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.maps++; f.maps == f.failMap {
		return Mem{}, errFake
	}
	f.mapped += bytes
	return MemOf(make([]byte, bytes)), nil
}

func (f *fake) Populate(Mem) error {
	if f.failFill {
		return errFake
	}
	return nil
}

func (f *fake) Unmap(m Mem) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.mapped -= m.Bytes()
}

func space(t *testing.T, capacity int64, m Mapper) *Space {
	t.Helper()
	s, err := NewSpace("fake", capacity, m)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestRandomHistoriesKeepTheInvariants(t *testing.T) {
	const capacity = 100*PageSize + 17
	for seed := range uint64(50) {
		f := new(fake)
		s := space(t, capacity, f)
		rng := rand.New(rand.NewPCG(seed, 2))
		var blocks []*Block
		var reservations []*Reservation
		size := func() int64 { return int64(rng.IntN(12 * PageSize)) }
		var peak, peakAllocated int64
		for range 300 {
			free := s.Free()
			switch rng.IntN(7) {
			case 0, 1:
				n := size()
				b, err := s.Allocate(Purpose(rng.IntN(NumPurposes)), n)
				if (err == nil) != (RoundPages(n) <= free) {
					t.Fatalf("seed %d: %d bytes of %d free: %v", seed, n, free, err)
				}
				if err == nil {
					if b.Bytes() != RoundPages(n) || b.Mem().Bytes() != n {
						t.Fatalf("a block of %d bytes costs %d and has %d", n, b.Bytes(), b.Mem().Bytes())
					}
					blocks = append(blocks, b)
				}
			case 2:
				want := Sizes{Outputs: size(), Scratch: size(), Retained: size()}
				if r, err := s.Reserve(want); err == nil {
					reservations = append(reservations, r)
				} else if RoundPages(want[0])+RoundPages(want[Outputs])+RoundPages(want[Scratch])+RoundPages(want[Retained]) <= free {
					t.Fatal(err)
				}
			case 3:
				if i := len(blocks); i > 0 {
					i = rng.IntN(i)
					blocks[i].Free()
					if rng.IntN(3) == 0 {
						blocks[i].Free()
					}
					blocks = append(blocks[:i], blocks[i+1:]...)
				}
			case 4:
				if i := len(reservations); i > 0 {
					i = rng.IntN(i)
					if rng.IntN(2) == 0 {
						reservations[i].ReleaseScratch()
					}
					reservations[i].Release()
					reservations = append(reservations[:i], reservations[i+1:]...)
				}
			default:
				if i := len(reservations); i > 0 {
					untilFull(reservations[rng.IntN(i)], rng.Uint64(), 3)
				}
			}
			st := s.Stats()
			var held int64
			for _, a := range s.Live() {
				held += a.Bytes.Total()
			}
			peak, peakAllocated = max(peak, st.TotalInUse()), max(peakAllocated, st.Allocated)
			if st.Allocated != f.mapped || held != f.mapped || st.Blocks != len(blocks) || st.Reservations != len(reservations) ||
				st.TotalInUse() > st.Allocated || st.Allocated > capacity || s.Free() != capacity-st.Allocated ||
				st.PeakInUse < peak || st.PeakAllocated != peakAllocated {
				t.Fatalf("seed %d: %d mapped, %d held, %d blocks, %d reservations\n%v", seed, f.mapped, held, len(blocks), len(reservations), st)
			}
			if rng.IntN(50) == 0 {
				s.ResetPeak()
				st = s.Stats()
				peak, peakAllocated = st.TotalInUse(), st.Allocated
				if st.Peak != st.InUse || st.PeakInUse != peak || st.PeakAllocated != st.Allocated {
					t.Fatalf("after a reset\n%v", st)
				}
			}
		}
		for _, b := range blocks {
			b.Free()
		}
		for _, r := range reservations {
			r.Release()
		}
		if st := s.Stats(); st.Allocated != 0 || st.InUse != (Sizes{}) || f.mapped != 0 || s.Live() != nil {
			t.Fatalf("seed %d: at the end\n%v", seed, st)
		}
	}
}

func TestTheLastPageFitsAndOneMoreDoesNot(t *testing.T) {
	const capacity = 10 * PageSize
	h := host(t, capacity)
	full := Sizes{Outputs: 3 * PageSize, Retained: PageSize + 1, Scratch: 4*PageSize + 1}
	reserve(t, h, full).Release()
	weights, err := h.Allocate(Weights, 9*PageSize+1)
	if err != nil {
		t.Fatal(err)
	}
	if h.Free() != 0 {
		t.Errorf("%d bytes free", h.Free())
	}
	if weights.Purpose() != Weights || weights.Bytes() != capacity || weights.Mem().Bytes() != 9*PageSize+1 {
		t.Errorf("a block for %v costs %d and has %d bytes", weights.Purpose(), weights.Bytes(), weights.Mem().Bytes())
	}
	weights.Free()
	if weights.Mem().Real() {
		t.Error("a freed block has memory")
	}
	before := h.Stats()

	more := full
	more[Gradients] = 1
	_, err = h.Reserve(more)
	var oom *OutOfMemoryError
	if !errors.As(err, &oom) {
		t.Fatalf("a page too much: %v", err)
	}
	asked := Sizes{Outputs: 3 * PageSize, Retained: 2 * PageSize, Scratch: 5 * PageSize, Gradients: PageSize}
	if want := (OutOfMemoryError{"reserve", "host", Scratch, asked, 11 * PageSize, capacity, capacity, nil}); *oom != want {
		t.Errorf("got  %+v\nwant %+v", *oom, want)
	}
	if want := "reserve on host (outputs 12288, retained 8192, scratch 20480, gradients 4096): out of memory: asked 45056 bytes, 40960 of 40960 free"; err.Error() != want {
		t.Errorf("got  %s\nwant %s", err, want)
	}
	_, err = h.Allocate(Weights, capacity+1)
	if want := "allocate weights on host: out of memory: asked 45056 bytes, 40960 of 40960 free"; err == nil || err.Error() != want {
		t.Errorf("got  %v\nwant %s", err, want)
	}
	if h.Stats() != before {
		t.Errorf("a refusal changed the counters\n%v", h.Stats())
	}
}

func TestSizesOutOfRangeAreErrors(t *testing.T) {
	h := host(t, math.MaxInt64)
	for _, n := range []int64{-1, math.MinInt64} {
		if _, err := h.Allocate(Weights, n); err == nil || !strings.Contains(err.Error(), "negative") {
			t.Errorf("allocate %d: %v", n, err)
		}
		if _, err := h.Reserve(Sizes{Outputs: 5, Scratch: n}); err == nil || !strings.Contains(err.Error(), "negative") {
			t.Errorf("reserve %d: %v", n, err)
		}
	}
	if _, err := h.Allocate(Purpose(NumPurposes), 1); err == nil {
		t.Error("an unknown purpose is allocated")
	}
	var oom *OutOfMemoryError
	if _, err := h.Allocate(Weights, math.MaxInt64); !errors.As(err, &oom) || oom.AskedBytes != math.MaxInt64&^(PageSize-1) {
		t.Errorf("allocate all addresses: %v", err)
	}
	if _, err := h.Reserve(Sizes{math.MaxInt64, math.MaxInt64, math.MaxInt64, math.MaxInt64}); !errors.As(err, &oom) || oom.AskedBytes != math.MaxInt64 {
		t.Errorf("reserve more than all addresses: %v", err)
	}
	if _, err := NewHost(-1); err == nil {
		t.Error("a negative capacity is accepted")
	}
	tiny := host(t, 100)
	if _, err := tiny.Allocate(Weights, 1); !errors.As(err, &oom) {
		t.Errorf("a page of a capacity of 100 bytes: %v", err)
	}
}

func TestNothingCostsNothing(t *testing.T) {
	h := host(t, 0x1000)
	b, err := h.Allocate(Ballast, 0)
	if err != nil {
		t.Fatal(err)
	}
	r := reserve(t, h, Sizes{})
	if st := h.Stats(); st.Allocated != 0 || st.Blocks != 1 || st.Reservations != 1 || b.Mem().Real() || r.Keep(Outputs, 0).Real() {
		t.Errorf("nothing costs something\n%v", st)
	}
	b.Free()
	b.Free()
	(*Block)(nil).Free()
}

func TestAFailedMappingLeavesNothing(t *testing.T) {
	for name, f := range map[string]*fake{"first": {failMap: 1}, "third": {failMap: 3}, "populate": {failFill: true}} {
		s := space(t, 1<<20, f)
		_, err := s.Reserve(Sizes{Outputs: 1, Retained: 1, Scratch: 1})
		var oom *OutOfMemoryError
		if !errors.As(err, &oom) || !errors.Is(err, errFake) || !strings.HasSuffix(err.Error(), "although asked 12288 bytes, 1048576 of 1048576 free: the machine says no") {
			t.Errorf("%s: %v", name, err)
		}
		if s.Stats() != (Stats{Capacity: 1 << 20}) || s.Free() != 1<<20 || f.mapped != 0 {
			t.Errorf("%s: %d mapped\n%v", name, f.mapped, s.Stats())
		}
	}
	s := space(t, 1<<20, &fake{failMap: 1})
	if _, err := s.Allocate(Weights, 5); !errors.Is(err, errFake) || s.Stats() != (Stats{Capacity: 1 << 20}) {
		t.Errorf("allocate: %v", err)
	}
}

func TestManyGoroutinesShareADevice(t *testing.T) {
	const capacity = 64 << 20
	h := host(t, capacity)
	shared, err := h.Allocate(Adapters, 100)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for g := range uint64(8) {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(g, 3))
			for i := range 60 {
				if i == 30 {
					shared.Free() // all of them: it counts once
				}
				if b, err := h.Allocate(Weights, int64(rng.IntN(6<<20))); err == nil {
					if raw := b.Mem().Raw(); len(raw) > 0 {
						raw[len(raw)-1] = 1
					}
					defer b.Free()
					if rng.IntN(2) == 0 {
						b.Free()
					}
				}
				r, err := h.Reserve(Sizes{Outputs: 1 << 20, Retained: 1 << 20, Gradients: 1 << 20, Scratch: 3 << 20})
				if err != nil {
					continue
				}
				untilFull(r, rng.Uint64(), 40)
				if st := h.Stats(); st.TotalInUse() > st.Allocated || st.Allocated > capacity || st.TotalInUse() != st.inUse {
					t.Errorf("counters contradict each other\n%v", st)
				}
				var both sync.WaitGroup
				both.Go(r.ReleaseScratch)
				both.Go(r.Release)
				both.Wait()
			}
		})
	}
	wg.Wait()
	if st := h.Stats(); st.Allocated != 0 || h.Free() != capacity {
		t.Errorf("at the end\n%v", st)
	}
}
