package loader

import (
	"fmt"
	"math/big"
	"math/rand/v2"
)

// A simulator of loads that shares nothing with the planner but the plan: it moves real tensors through buffers one event at
// a time and keeps its own count of bytes, in exact fractions.

// machine is the memory of one rank.
type machine struct {
	now, peak *big.Rat
}

func newMachine() *machine { return &machine{new(big.Rat), new(big.Rat)} }

func (m *machine) take(bytes *big.Rat) {
	m.now.Add(m.now, bytes)
	if m.now.Cmp(m.peak) > 0 {
		m.peak.Set(m.now)
	}
}

func (m *machine) give(bytes *big.Rat) {
	m.now.Sub(m.now, bytes)
	if m.now.Sign() < 0 {
		panic("more bytes given back than taken")
	}
}

// simulation is one load.
type simulation struct {
	plan  *FitPlan
	p     PlanParams
	align int64
	// rng decides how far the producers run ahead of the consumers; nil for as far as they may, always.
	rng   *rand.Rand
	ranks []*simRank
}

// simRank is one rank: its chunks in order, those that are alive, and homes of tensors that are arriving in pieces.
type simRank struct {
	*machine
	queue []*simChunk // by batch; nil where the rank has none
	made  int         // queue[:made] have been made
}

type simChunk struct {
	file   *FilePlan
	chunk  *Chunk
	charge *big.Rat
}

func rat(bytes int64) *big.Rat { return new(big.Rat).SetInt64(bytes) }

func (s *simulation) mem(bytes int64) *big.Rat {
	a := max(s.align, 1)
	return rat((bytes + a - 1) / a * a)
}

// simulate runs a plan and returns the most bytes in use on any rank, rounded up.
func simulate(plan *FitPlan, p PlanParams, rng *rand.Rand) (peak int64, err error) {
	s := &simulation{plan: plan, p: p, align: p.Align, rng: rng}
	if p.Classic {
		s.align = 1
	}
	return s.run()
}

// simulateRounded is simulate with every block rounded up to align, whatever the mode charges.
func simulateRounded(plan *FitPlan, p PlanParams, align int64) (peak int64, err error) {
	s := &simulation{plan: plan, p: p, align: align}
	return s.run()
}

func (s *simulation) run() (peak int64, err error) {
	plan, p := s.plan, s.p
	var firsts []int
	for range p.Group {
		s.ranks = append(s.ranks, &simRank{machine: newMachine()})
	}
	for b := range plan.Batches() {
		firsts = append(firsts, b.First)
		for r, c := range b.Chunks {
			var x *simChunk
			if c != nil {
				f := &plan.Files[b.First+r]
				x = &simChunk{f, c, s.charge(f, c)}
			}
			s.ranks[r].queue = append(s.ranks[r].queue, x)
		}
	}
	for _, r := range s.ranks {
		r.take(rat(p.Copier.Fixed + p.Preallocated))
	}
	for b, first := range firsts {
		if err := s.batch(b, first); err != nil {
			return 0, err
		}
	}
	most := new(big.Rat)
	for i, r := range s.ranks {
		if r.peak.Cmp(most) > 0 {
			most = r.peak
		}
		if want := s.atEnd(); r.now.Cmp(want) > 0 || s.align <= 1 && r.now.Cmp(want) != 0 {
			return 0, fmt.Errorf("rank %d has %v bytes in the end, want %v", i, r.now.RatString(), want.RatString())
		}
	}
	q, rem := new(big.Int).QuoRem(most.Num(), most.Denom(), new(big.Int))
	if rem.Sign() > 0 {
		q.Add(q, big.NewInt(1))
	}
	return q.Int64(), nil
}

// atEnd is what must be left: all that stays.
func (s *simulation) atEnd() *big.Rat {
	sum := rat(s.p.Copier.Fixed + s.p.Preallocated)
	if s.p.AccumulateResident {
		for i := range s.plan.Files {
			for _, t := range s.plan.Files[i].Tensors {
				if t.Resident {
					sum.Add(sum, s.mem(t.Bytes))
				}
			}
		}
	}
	return sum
}

func (s *simulation) multiplier(f *FilePlan) *big.Rat {
	most := Ratio{0, 1}
	if !s.p.Classic {
		m := s.p.Copier.Multiplier[f.Index]
		return big.NewRat(m.Num, m.Den)
	}
	for _, m := range s.p.Copier.Multiplier { // the classic mode runs all files on the worst path
		if most.less(m) {
			most = m
		}
	}
	return big.NewRat(most.Num, most.Den)
}

func (s *simulation) charge(f *FilePlan, c *Chunk) *big.Rat {
	if c.Bytes == 0 {
		return new(big.Rat)
	}
	m := s.multiplier(f)
	if c.HandOver && m.Cmp(big.NewRat(1, 1)) < 0 {
		m = big.NewRat(1, 1)
	}
	x := m.Mul(m, s.mem(c.Bytes))
	return x.Add(x, rat(s.p.Copier.PerChunk))
}

// produce lets the producers make chunks, at least through batch b, at most as far as the queue allows.
func (s *simulation) produce(b int) {
	depth := buffers(s.plan.QueueSize)
	for _, r := range s.ranks {
		until := min(len(r.queue), b+depth)
		if s.rng != nil {
			until = min(until, b+1+s.rng.IntN(depth))
		}
		for ; r.made < until; r.made++ {
			if x := r.queue[r.made]; x != nil {
				r.take(x.charge)
			}
		}
	}
}

// batch delivers batch b of the group of files that begins at first.
func (s *simulation) batch(b, first int) error {
	s.produce(b)
	for owner, r := range s.ranks {
		x := r.queue[b]
		if x == nil {
			continue
		}
		for part := range x.file.Parts(x.chunk) {
			if err := s.deliver(owner, x, part); err != nil {
				return err
			}
			if s.rng != nil {
				s.produce(b)
			}
		}
	}
	for _, r := range s.ranks {
		x := r.queue[b]
		if x == nil {
			continue
		}
		r.give(x.charge)
		if x.chunk.HandOver {
			r.take(s.mem(x.chunk.Bytes)) // what was the buffer is now that of its tensors
		}
	}
	return nil
}

// deliver hands one part to all ranks.
func (s *simulation) deliver(owner int, x *simChunk, part Part) error {
	t := &x.file.Tensors[part.Tensor]
	starts, ends := part.Offset == 0, part.Offset+part.Bytes == t.Bytes
	stays := s.p.AccumulateResident && t.Resident
	if x.chunk.HandOver && t.Bytes > 0 && !(stays && starts && ends) {
		return fmt.Errorf("a chunk is handed over with a part of %s, which does not stay whole", t.Name)
	}
	if !(starts && ends) && (t.Atom == 0 || part.Offset%t.Atom != 0 || !ends && part.Bytes%t.Atom != 0) {
		return fmt.Errorf("tensor %s is cut at %d to %d, its atom is %d", t.Name, part.Offset, part.Offset+part.Bytes, t.Atom)
	}
	for i, r := range s.ranks {
		switch {
		case t.Bytes == 0 || stays && i == owner && x.chunk.HandOver:
		case stays:
			if starts {
				r.take(s.mem(t.Bytes))
			}
		case s.p.YieldClone && (!s.p.Classic || newClassic(s.plan.stats, s.p).clone > 0):
			// A copy that is complete is dropped before the next begins; one that is not lives across chunks.
			if starts {
				r.take(s.mem(t.Bytes))
			}
			if ends {
				r.give(s.mem(t.Bytes))
			}
		case i != owner:
			// Received, used and dropped, a piece at a time if it may be cut.
			n := part.Bytes
			if t.Atom > 0 && !s.p.Classic {
				n = min(n, t.Atom)
			}
			r.take(s.mem(n))
			r.give(s.mem(n))
		}
	}
	return nil
}
