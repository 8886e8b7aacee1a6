package loader

import "math/big"

// The most bytes that a plan can have in use, found by going through its chunks in order with the queue as full as it may be:
// while one chunk is delivered, all others that may be alive are there in full.

// peak is the scaled peak of a cutting, without what is fixed. Where tensors are not known it is an upper bound.
func (b *better) peak(c *cutting) int64 {
	if !b.known {
		return b.peakOfSums(c)
	}
	return peakOf(c.costs, c.ends, b.group, c.depth)
}

// peakOf is the peak of chunks of files that are loaded by group ranks, with depth chunks alive on each. ends are the ends of the
// files in costs.
func peakOf(costs []chunkCost, ends []int, group, depth int) int64 {
	if group == 1 {
		return peakOfOne(costs, depth)
	}
	var most int64
	t := newTimeline(costs, ends, group)
	for rank := range min(group, len(ends)) {
		most = max(most, t.peak(costs, rank, depth))
	}
	return most
}

// peakOfOne is peakOf for one rank, whose chunks simply follow each other.
func peakOfOne(costs []chunkCost, depth int) int64 {
	var most, residents, alive int64
	next := 0 // the first chunk that is not alive
	for k := range costs {
		c := &costs[k]
		for ; next < len(costs) && next-k < depth; next++ {
			alive = satAdd(alive, costs[next].charge)
		}
		now := satAdd(residents, alive)
		if !c.handed {
			now = satAdd(now, c.swell)
		}
		residents = satAdd(residents, c.resident)
		most = max(most, now, residents)
		alive -= c.charge
	}
	return most
}

// timeline is the batches of a load by several ranks, one after the other.
type timeline struct {
	before, through []int64 // scaled residents before and after each batch, of the chunks of all ranks
	temp            []int64 // the most temporary memory of any chunk of the batch
	ranks           [][]scheduled
}

// scheduled is a chunk of one rank.
type scheduled struct{ batch, chunk int }

func newTimeline(costs []chunkCost, ends []int, group int) *timeline {
	t := &timeline{ranks: make([][]scheduled, min(group, len(ends)))}
	var residents int64
	for first := 0; first < len(ends); first += group {
		start, length := len(t.temp), 0
		for i := first; i < min(len(ends), first+group); i++ {
			from := 0
			if i > 0 {
				from = ends[i-1]
			}
			length = max(length, ends[i]-from)
			for k := from; k < ends[i]; k++ {
				t.ranks[i-first] = append(t.ranks[i-first], scheduled{start + k - from, k})
			}
		}
		t.temp = append(t.temp, make([]int64, length)...)
		t.before = append(t.before, make([]int64, length)...)
		t.through = append(t.through, make([]int64, length)...)
		for r := range t.ranks {
			for k := len(t.ranks[r]) - 1; k >= 0 && t.ranks[r][k].batch >= start; k-- {
				s := t.ranks[r][k]
				t.through[s.batch] = satAdd(t.through[s.batch], costs[s.chunk].resident)
				t.temp[s.batch] = max(t.temp[s.batch], costs[s.chunk].temp)
			}
		}
		for b := start; b < len(t.temp); b++ {
			t.before[b] = residents
			residents = satAdd(residents, t.through[b])
			t.through[b] = residents
		}
	}
	return t
}

// peak is the most bytes in use on one rank.
func (t *timeline) peak(costs []chunkCost, rank, depth int) int64 {
	own := t.ranks[rank]
	var most, alive int64
	oldest, next := 0, 0 // own[oldest:next] are alive
	for b := range t.temp {
		for ; next < len(own) && own[next].batch-b < depth; next++ {
			alive = satAdd(alive, costs[own[next].chunk].charge)
		}
		now := satAdd(satAdd(t.through[b], alive), t.temp[b])
		if oldest < next && own[oldest].batch == b {
			c := &costs[own[oldest].chunk]
			if c.handed {
				now -= min(now, c.resident)
			}
			alive -= c.charge
			oldest++
		}
		most = max(most, now, t.through[b])
	}
	return most
}

// peakOfSums is a bound for files of which only sums are known: each file's residents, or all, and every buffer at the file's limit.
func (b *better) peakOfSums(c *cutting) int64 {
	ps, all, temp := b.positions()
	var most int64
	for i := range b.files {
		f := &b.files[i]
		if f.Kept == 0 {
			continue
		}
		residents := ps[i].residents
		if c.rule == total {
			residents = all
		}
		buffer := min(c.limits[i], f.Kept)
		alive := satMul(int64(c.depth), b.charge(buffer, b.mus[i], false))
		most = max(most, satAdd(satAdd(residents, alive), temp))
	}
	return min(most, b.budget) // which the rules guarantee
}

// peakClassic is the peak in bytes of a plan of the classic mode, everything included: with a chunk's holes charged and
// nothing handed over. Where tensors are not known it is the bound of the formulas.
func peakClassic(p *FitPlan, c *classic) int64 {
	num, den := reduce(c.multiplier)
	var costs []chunkCost
	ends := make([]int, len(p.Files))
	known := true
	for i := range p.Files {
		f := &p.Files[i]
		known = known && (f.Tensors != nil || f.Kept == 0)
		for k := range f.Chunks {
			costs = append(costs, c.chunkCost(f, &f.Chunks[k], num, den))
		}
		ends[i] = len(costs)
	}
	fixed := satAdd(p.Fixed, p.Preallocated)
	if known {
		return satAdd(ceilDiv(peakOf(costs, ends, c.group, buffers(p.QueueSize)), den), fixed)
	}
	return satAdd(c.bound(p), fixed)
}

// chunkCost is the cost of a chunk in units of 1/den byte.
func (c *classic) chunkCost(f *FilePlan, k *Chunk, num, den int64) chunkCost {
	cost := chunkCost{charge: satMul(k.Bytes, num)}
	if k.Bytes > 0 {
		cost.charge = satAdd(cost.charge, satMul(c.perChunk, den))
	}
	for j := k.First; j < k.Last; j++ {
		t := &f.Tensors[j]
		if c.accumulate && t.Resident {
			cost.resident = satAdd(cost.resident, satMul(t.Bytes, den))
			cost.swell = max(cost.swell, cost.resident)
		} else {
			cost.temp = max(cost.temp, satMul(t.Bytes, den))
			cost.swell = max(cost.swell, satAdd(cost.resident, satMul(t.Bytes, den*c.clone)))
		}
	}
	times := c.clone
	if c.group > 1 {
		times++ // the tensor that is being received
	}
	cost.temp = satMul(cost.temp, times)
	return cost
}

// bound is the sum that the classic mode keeps below the budget, in bytes, for chunks that are no larger than their files.
func (c *classic) bound(p *FitPlan) int64 {
	num, den := c.effective(p.Depth)
	most := new(big.Int)
	for i, r := range c.residents() {
		sum := new(big.Int).Mul(num, big.NewInt(min(p.Files[i].Budget, p.Files[i].Span)))
		sum.Add(sum, den).Sub(sum, big.NewInt(1)).Div(sum, den)
		sum.Add(sum, r).Add(sum, c.overhead(i, p.Depth))
		if sum.Cmp(most) > 0 {
			most = sum
		}
	}
	return saturate(most)
}
