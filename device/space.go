package device

import (
	"fmt"
	"math"
	"slices"
	"sync"

	"github.com/trainerrank/engine/internal/failpoint"
)

// Mapper is where a [Space] gets its memory from: the operating system, or a driver. Its methods may be called from
// several goroutines.
type Mapper interface {
	// Map returns bytes of zero memory, bytes being a positive multiple of [PageSize], that starts on a multiple of [Align].
	Map(bytes int64) (Mem, error)
	// Populate makes every page of m, exactly as Map returned it, resident, so that no later access can fail.
	Populate(m Mem) error
	// Unmap gives m, exactly as Map returned it, back at once.
	Unmap(m Mem)
}

// Poisoner is a [Mapper] whose memory can be overwritten cheaply. Built with the tag invariants, a reservation
// poisons what it hands out, so that a pass that reads memory before writing it computes NaN instead of a lucky zero.
type Poisoner interface {
	// Poison fills m with bytes that read as NaN in every float format in use.
	Poison(m Mem)
}

// Trimmer is a [Mapper] that can give back the end of what it mapped.
type Trimmer interface {
	// Trim gives all but the first keep bytes of m back at once, and returns what is left, which is then what Unmap is given. m is exactly as Map
	// or Trim returned it; keep is a multiple of [PageSize] between 0 and the size of m, both excluded.
	Trim(m Mem, keep int64) Mem
}

// Space is the part of a device that does not depend on the hardware: the capacity, the counters and the list of what
// is live, over the memory of a [Mapper]. It implements [Device]; [Host] is a Space, and so is any other device.
//
// Capacity is checked before anything is mapped, and bytes return to the capacity only after they are unmapped. So the
// counters never say less than what is mapped.
type Space struct {
	name   string
	mapper Mapper
	poison Poisoner // nil if the mapper cannot

	mu sync.Mutex
	// pending bytes are taken from the capacity by a call that is still mapping. They become allocated when it succeeds.
	// Invariant: stats.Allocated + pending <= stats.Capacity.
	pending int64
	stats   Stats
	live    map[uint64]*holding
	lastID  uint64
}

var _ Device = (*Space)(nil)

// NewSpace is a device of that name and capacity, in bytes, over the memory of m. A negative capacity is an error.
func NewSpace(name string, capacity int64, m Mapper) (*Space, error) {
	if capacity < 0 {
		return nil, fmt.Errorf("open device %s: capacity of %d bytes is negative", name, capacity)
	}
	s := &Space{name: name, mapper: m, stats: Stats{Capacity: capacity}, live: make(map[uint64]*holding)}
	s.poison, _ = m.(Poisoner)
	return s, nil
}

// Name says which device it is.
func (s *Space) Name() string { return s.name }

// Capacity is the number of bytes that the device may hold at once.
func (s *Space) Capacity() int64 { return s.stats.Capacity }

// Free is the number of bytes that can be allocated now.
func (s *Space) Free() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.free()
}

func (s *Space) free() int64 { return s.stats.Capacity - s.stats.Allocated - s.pending }

// Stats are the counters of this moment, all of the same moment.
func (s *Space) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stats
}

// ResetPeak makes the present counters the peak counters.
func (s *Space) ResetPeak() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stats.Peak = s.stats.InUse
	s.stats.PeakInUse = s.stats.inUse
	s.stats.PeakAllocated = s.stats.Allocated
}

// Allocate takes bytes, rounded up to [PageSize], for purpose p. The memory is zero and its pages are not faulted in. No
// bytes are a block without memory. Running out is an [*OutOfMemoryError]; a negative size or an unknown purpose is an error.
func (s *Space) Allocate(p Purpose, bytes int64) (*Block, error) {
	if int(p) >= NumPurposes {
		return nil, fmt.Errorf("allocate on %s: unknown %v", s.name, p)
	}
	var asked Sizes
	asked[p] = bytes
	sizes, err := s.claim("allocate", asked)
	if err != nil {
		return nil, err
	}
	var mem Mem
	if sizes[p] > 0 {
		if err = failpoint.Hit(failpoint.Allocate); err == nil {
			mem, err = s.mapper.Map(sizes[p])
		}
		if err != nil {
			return nil, s.unclaim("allocate", sizes, err)
		}
	}
	b := &Block{space: s, purpose: p, asked: bytes, bytes: sizes[p]}
	b.mem.Store(&mem)
	b.id = s.commit(&holding{held: sizes})
	return b, nil
}

// Reserve takes one slab per purpose with a size above 0, each rounded up to [PageSize], all or none, and faults their
// pages in. Running out is an [*OutOfMemoryError]; a negative size is an error.
func (s *Space) Reserve(asked Sizes) (*Reservation, error) {
	sizes, err := s.claim("reserve", asked)
	if err != nil {
		return nil, err
	}
	r := &Reservation{space: s, sizes: sizes}
	for p, n := range sizes {
		if n == 0 {
			continue
		}
		var m Mem
		err := failpoint.Hit(failpoint.Reserve)
		if err == nil {
			m, err = s.mapper.Map(n)
		}
		if err == nil {
			r.slabs[p] = m
			err = s.populate(m)
		}
		if err != nil {
			for _, m := range r.slabs {
				if m.Real() {
					s.mapper.Unmap(m)
				}
			}
			return nil, s.unclaim("reserve", sizes, err)
		}
	}
	r.room = sizes
	r.id = s.commit(&holding{held: sizes, reservation: true})
	return r, nil
}

// ReserveTurns takes one slab for passes that run one after the other, and faults its pages in. turns[j] is what may be in use while pass j runs:
// [Outputs] of it and of all passes before it, and [Scratch] of its own. The slab has the size of the largest turn, which is less than all outputs and the largest scratch
// together where the passes with much scratch come early. The arena is cut for the first; [Reservation.NextTurn] goes on to the next. All sizes are rounded up to [PageSize].
//
// Running out is an [*OutOfMemoryError]; no turns, a negative size, another purpose, or outputs that become fewer are an error.
func (s *Space) ReserveTurns(turns []Sizes) (*Reservation, error) {
	r := &Reservation{space: s}
	var largest, before int64
	for j, t := range turns {
		out, scratch := roundSaturated(t[Outputs]), roundSaturated(t[Scratch])
		if t[Outputs] < 0 || t[Scratch] < 0 || addSaturated(t[Outputs], t[Scratch]) != t.Total() || out < before {
			return nil, fmt.Errorf("reserve on %s: turn %d of %d is impossible: %v", s.name, j+1, len(turns), t)
		}
		before, largest = out, max(largest, addSaturated(out, scratch))
		r.turns = append(r.turns, Sizes{Outputs: out, Scratch: scratch})
	}
	if len(turns) == 0 {
		return nil, fmt.Errorf("reserve on %s: no turns", s.name)
	}
	sizes, err := s.claim("reserve", Sizes{Outputs: before, Scratch: largest - before})
	if err != nil {
		return nil, err
	}
	if largest == 0 {
		r.id = s.commit(&holding{held: sizes, reservation: true})
		return r, nil
	}
	if err = failpoint.Hit(failpoint.Reserve); err == nil {
		r.shared, err = s.mapper.Map(largest)
	}
	if err != nil {
		return nil, s.unclaim("reserve", sizes, err)
	}
	if err = s.populate(r.shared); err != nil {
		s.mapper.Unmap(r.shared)
		return nil, s.unclaim("reserve", sizes, err)
	}
	r.begin(0)
	r.id = s.commit(&holding{held: sizes, reservation: true})
	return r, nil
}

// populate makes m resident.
func (s *Space) populate(m Mem) error {
	if err := failpoint.Hit(failpoint.Populate); err != nil {
		return err
	}
	return s.mapper.Populate(m)
}

// claim takes the page-rounded sizes from the capacity, or says why not.
func (s *Space) claim(op string, asked Sizes) (Sizes, error) {
	var sizes Sizes
	var total int64
	for p, n := range asked {
		if n < 0 {
			return Sizes{}, fmt.Errorf("%s %v on %s: size of %d bytes is negative", op, Purpose(p), s.name, n)
		}
		sizes[p] = roundSaturated(n)
		total = addSaturated(total, sizes[p])
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if total > s.free() {
		return Sizes{}, s.outOfMemory(op, sizes, nil)
	}
	s.pending += total
	return sizes, nil
}

// unclaim takes a claim back whose memory could not be had, and makes the error of it.
func (s *Space) unclaim(op string, sizes Sizes, cause error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pending -= sizes.Total()
	return s.outOfMemory(op, sizes, cause)
}

// commit turns a claim into an allocation. A block is in use as a whole from here on, a reservation is not yet.
func (s *Space) commit(h *holding) (id uint64) {
	h.pcs = callers()
	s.mu.Lock()
	defer s.mu.Unlock()
	total := h.held.Total()
	s.pending -= total
	s.stats.Allocated += total
	s.stats.PeakAllocated = max(s.stats.PeakAllocated, s.stats.Allocated)
	if h.reservation {
		s.stats.Reservations++
	} else {
		s.stats.Blocks++
		for p, n := range h.held {
			s.stats.use(Purpose(p), n)
		}
	}
	s.lastID++
	s.live[s.lastID] = h
	s.check()
	return s.lastID
}

// use changes the bytes in use of one purpose inside memory that is allocated already.
func (s *Space) use(p Purpose, delta int64) {
	s.mu.Lock()
	s.stats.use(p, delta)
	s.check()
	s.mu.Unlock()
}

// giveBack returns bytes of one holding, used of which were in use, to the capacity. They are unmapped already.
func (s *Space) giveBack(id uint64, p Purpose, bytes, used int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stats.use(p, -used)
	s.stats.Allocated -= bytes
	s.live[id].held[p] -= bytes
	s.check()
}

// relabel says for what purposes the bytes of a holding are, of which there are as many as before.
func (s *Space) relabel(id uint64, held Sizes) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.live[id].held = held
	s.check()
}

// forget strikes a holding off the list once all its bytes are given back.
func (s *Space) forget(id uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.live[id].reservation {
		s.stats.Reservations--
	} else {
		s.stats.Blocks--
	}
	delete(s.live, id)
	s.check()
}

// check panics if an invariant of the counters is broken. It is compiled in by the tag invariants only.
func (s *Space) check() {
	if !invariants {
		return
	}
	st := s.stats
	var held int64
	for _, h := range s.live {
		held += h.held.Total()
	}
	switch {
	case st.InUse.Total() != st.inUse, st.inUse > st.Allocated, st.Allocated+s.pending > st.Capacity, held != st.Allocated,
		st.inUse > st.PeakInUse, st.Allocated > st.PeakAllocated, st.Blocks+st.Reservations != len(s.live),
		slices.Min(st.InUse[:]) < 0, s.pending < 0:
		panic(fmt.Sprintf("device: counters of %s contradict each other: %d held, %d pending\n%v", s.name, held, s.pending, st))
	}
}

// roundSaturated is RoundPages, and the largest whole number of pages where that would overflow.
func roundSaturated(bytes int64) int64 {
	if bytes > math.MaxInt64-(PageSize-1) {
		return math.MaxInt64 &^ (PageSize - 1)
	}
	return RoundPages(bytes)
}

func addSaturated(a, b int64) int64 {
	if a > math.MaxInt64-b {
		return math.MaxInt64
	}
	return a + b
}
