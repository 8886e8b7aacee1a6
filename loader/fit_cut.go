package loader

// rule is which of the two sums of fit_better.go bounds a chunk.
type rule int

const (
	share rule = iota
	total
)

// cutting is a load cut into chunks. The slices of several files lie one behind the other.
type cutting struct {
	rule   rule
	depth  int     // as it was asked for
	limits []int64 // bytes, by file: see [FilePlan.Budget]
	chunks []Chunk // of all files
	costs  []chunkCost
	ends   []int // index in chunks and costs of the end of each file
}

// chunkCost is what a chunk adds to the bytes in use, in scaled units.
type chunkCost struct {
	charge   int64 // while it is alive
	resident int64 // from when it has been delivered; if it is copied out, from the start of the delivery
	temp     int64 // while it is delivered
	swell    int64 // the most of what has been copied out of it so far and the copy of the moment
	handed   bool
}

func (c *cutting) of(file int) []Chunk {
	from := 0
	if file > 0 {
		from = c.ends[file-1]
	}
	return c.chunks[from:c.ends[file]:c.ends[file]]
}

func (c *cutting) count() int { return len(c.chunks) }

// open is the chunk that is being filled.
type open struct {
	Chunk
	resident int64 // scaled: what of it stays
	temp     int64 // scaled: to copy the largest that does not
	swell    int64 // scaled: the most of both while it is delivered
	copies   bool  // it is not handed over
}

// cutter cuts the files of one load under one rule at one depth.
type cutter struct {
	*better
	out   *cutting
	depth int64 // chunks that can be alive

	at        position
	mu        int64
	before    int64 // scaled residents before the open chunk; in a group of ranks at.residents
	all, temp int64 // of the whole load, for the rule total

	recent    window // temporary memory of the chunks that may be alive with the open one
	recvSoFar int64  // in a group of ranks, of all groups so far

	// V is of use only while no chunk that may be alive has more temporary memory than it.
	temps    bool  // there is temporary memory at all
	overfull bool  // some file or group so far had more; where chunks are not looked at one by one
	lastOver int64 // otherwise, the last chunk that had; -1 for none

	next int64 // number of the open chunk

	// Of the file so far, for its limit.
	fileTemp int64
	fileOver bool
	copies   bool
}

// cut cuts all files under a rule, so that depth chunks can be alive. nil if some tensor fits in no chunk. If not all tensors
// are known, it only finds the files' limits.
func (b *better) cut(depth int, r rule) *cutting {
	c := &cutter{
		better: b, depth: min(int64(depth), max(b.pieces, 1)), lastOver: -1,
		out: &cutting{rule: r, depth: depth, limits: make([]int64, len(b.files)), ends: make([]int, len(b.files))},
	}
	ps, all, temp := b.positions()
	c.all, c.temp, c.temps = all, temp, temp > 0
	if r == total && satAdd(all, temp) > b.budget {
		return nil
	}
	c.reserve()
	for i := range b.files {
		c.at, c.mu = ps[i], b.mus[i]
		if b.group > 1 {
			c.before = c.at.residents
			c.enterGroup()
		}
		ok := false
		if b.known {
			ok = c.file(i)
		} else {
			ok = c.sums(i)
		}
		if !ok {
			return nil
		}
		c.out.ends[i] = len(c.out.chunks)
	}
	return c.out
}

// reserve makes room for about as many chunks as there will be: with small chunks there are so many that growing costs more
// than cutting.
func (c *cutter) reserve() {
	if !c.known || len(c.files) == 0 {
		return
	}
	c.mu = c.mus[0]
	each := min(c.limit(&open{copies: true}), c.maxChunk)
	if each < 0 {
		return
	}
	var kept int64
	for i := range c.files {
		kept = satAdd(kept, c.files[i].Kept)
	}
	n := min(kept/max(each, 1)+int64(len(c.files)), c.pieces, 1<<22)
	c.out.chunks = make([]Chunk, 0, n+n/8)
	c.out.costs = make([]chunkCost, 0, n+n/8)
}

// enterGroup notes the temporary memory of a file's group: while anything of it is delivered, it may be needed.
func (c *cutter) enterGroup() {
	if c.depth == 1 {
		c.recvSoFar, c.overfull = 0, false
	}
	c.recvSoFar = max(c.recvSoFar, c.at.recv)
	if c.at.recv > satMul(max(c.v(c.at.residents), 0), c.scale) {
		c.overfull = true
	}
}

// v is V of fit_better.go in bytes, with these scaled residents; below 0 if there is no room at all.
func (c *cutter) v(residents int64) int64 {
	room := c.budget - min(residents, c.budget)
	overhead := satMul(c.depth, c.perChunk)
	if residents > c.budget || overhead > room {
		return -1
	}
	return (room - overhead) / satAdd(satMul(c.depth, c.maxMu), c.scale)
}

// limit is how many bytes of buffer a chunk may have at most, by what else is known of it; below 0 if none at all.
func (c *cutter) limit(o *open) int64 {
	mu := c.mu
	if !o.copies {
		mu = max(mu, c.scale)
	}
	var most int64
	if c.out.rule == total {
		used := satAdd(c.all, c.temp)
		if used > c.budget {
			return -1
		}
		each := (c.budget - used) / c.depth
		if !o.copies {
			each = satAdd(each, o.resident)
		}
		most = c.affordable(each, mu)
	} else {
		residents := c.before
		switch {
		case c.group == 1 && o.copies:
			residents = satAdd(residents, o.resident)
		case c.group > 1 && !o.copies:
			residents -= min(residents, o.resident)
		}
		temp := max(o.temp, c.recent.most, c.recvSoFar)
		most = -1
		if used := satAdd(residents, temp); used <= c.budget {
			most = c.affordable((c.budget-used)/c.depth, mu)
		}
		if c.temps && !c.overfull && (c.lastOver < 0 || c.next-c.lastOver >= c.depth) {
			if v := c.v(residents); max(o.temp, c.at.recv) <= satMul(max(v, 0), c.scale) {
				most = max(most, v)
			}
		}
	}
	if most < 0 || most == never {
		return most
	}
	return most / c.align * c.align
}

// affordable is the largest buffer that costs at most a charge.
func (c *cutter) affordable(charge, mu int64) int64 {
	switch {
	case charge < c.perChunk:
		return -1
	case mu == 0:
		return never
	}
	return (charge - c.perChunk) / mu
}

func (c *cutter) fits(o *open) bool {
	return o.Bytes == 0 || o.Bytes <= c.maxChunk && roundTo(o.Bytes, c.align) <= c.limit(o)
}

// with is the chunk with one more whole tensor.
func (c *cutter) with(o open, t *TensorStats) open {
	o.Last++
	if t.Bytes == 0 {
		return o
	}
	o.Bytes = satAdd(o.Bytes, t.Bytes)
	if c.stays(t) {
		o.resident = satAdd(o.resident, c.own(t.Bytes))
		o.swell = max(o.swell, o.resident)
		return o
	}
	o.copies = true
	if c.group == 1 {
		copied := c.copied(t)
		o.temp = max(o.temp, copied)
		o.swell = max(o.swell, satAdd(o.resident, copied))
	}
	return o
}

// close ends the open chunk.
func (c *cutter) close(o *open) {
	if o.Last == o.First {
		return
	}
	if c.group == 1 && c.temps {
		residents := c.before
		if o.copies {
			residents = satAdd(residents, o.resident)
		}
		if o.temp > satMul(max(c.v(residents), 0), c.scale) {
			c.lastOver = c.next
			c.fileOver = true
		}
		c.fileTemp = max(c.fileTemp, c.recent.most, o.temp)
		c.recent.push(c.next, o.temp, c.depth)
	}
	c.copies = c.copies || o.copies
	o.HandOver = !o.copies && o.Bytes > 0
	if o.HandOver && c.group == 1 {
		o.resident = min(o.resident, c.own(o.Bytes)) // rounded once
	}
	c.out.chunks = append(c.out.chunks, o.Chunk)
	c.out.costs = append(c.out.costs, chunkCost{
		charge: c.charge(o.Bytes, c.mu, !o.copies), resident: o.resident, temp: max(o.temp, c.at.recv), swell: o.swell, handed: !o.copies,
	})
	if c.group == 1 {
		c.before = satAdd(c.before, o.resident)
	}
	c.next++
}

// file cuts one file.
func (c *cutter) file(i int) bool {
	f := &c.files[i]
	c.fileTemp, c.fileOver, c.copies = 0, c.overfull || c.lastOver >= 0 && c.next-c.lastOver < c.depth, false
	from := len(c.out.chunks)
	var o open
	for j := range f.Tensors {
		t := &f.Tensors[j]
		if o.Last == o.First {
			o = open{Chunk: Chunk{First: j, Last: j}}
		}
		more := c.with(o, t)
		if c.fits(&more) {
			o = more
			continue
		}
		// Empty tensors need no chunk of their own.
		fresh := open{Chunk: Chunk{First: j, Last: j}}
		if o.Bytes > 0 {
			c.close(&o)
		} else {
			fresh.First = o.First
		}
		if o = c.with(fresh, t); c.fits(&o) {
			continue
		}
		if o = fresh; !c.inPieces(&o, t) {
			return false
		}
	}
	c.close(&o)
	if n := len(c.out.chunks) - from; n <= 1 {
		c.out.limits[i] = c.unlimited(i)
	} else {
		c.out.limits[i] = c.fileLimit(i, !c.copies)
	}
	return true
}

// inPieces cuts a tensor that fits in no chunk whole. The last piece is the new open chunk.
func (c *cutter) inPieces(o *open, t *TensorStats) bool {
	if !c.cuts(t) {
		return false
	}
	o.Last++
	o.copies = true
	if c.stays(t) {
		o.resident = c.own(t.Bytes) // its home is there from the first piece on
	} else if c.group == 1 {
		o.temp = c.copied(t)
	}
	o.swell = max(o.resident, o.temp)
	for {
		n := min(c.limit(o), c.maxChunk)
		if n < t.Atom {
			return false
		}
		n = n / t.Atom * t.Atom
		left := t.Bytes - o.Skip
		o.Bytes = min(n, left)
		if n >= left {
			return true
		}
		o.Stop = o.Skip + n
		skip := o.Stop
		c.close(o)
		*o = open{Chunk: Chunk{First: o.Last - 1, Last: o.Last, Skip: skip}, temp: o.temp, swell: o.temp, copies: true}
	}
}

// sums finds the limit of a file of which only sums are known.
func (c *cutter) sums(i int) bool {
	f := &c.files[i]
	if f.Kept == 0 {
		return true
	}
	handed := c.handsOver(i)
	if c.group == 1 {
		// Which chunks may be alive with one of this file is not known: those of any file before it.
		if c.depth == 1 {
			c.recent.most, c.overfull = 0, false
		}
		copied := c.need[i].copied
		c.recent.most = max(c.recent.most, copied)
		c.overfull = c.overfull || copied > satMul(max(c.v(c.at.residents), 0), c.scale)
	}
	c.fileTemp, c.fileOver = c.recent.most, c.overfull
	limit := c.fileLimit(i, handed)
	c.out.limits[i] = limit
	if f.Largest <= limit {
		return true
	}
	if c.cutsSums(i) {
		c.out.limits[i] = c.fileLimit(i, false)
		return f.Atom <= c.out.limits[i]
	}
	return false
}

// fileLimit is a limit that all chunks of a file may reach, as in its last moment, when its residents are there.
func (c *cutter) fileLimit(i int, handed bool) int64 {
	mu := c.mu
	if handed {
		mu = max(mu, c.scale)
	}
	residents, temp, over := c.at.residents, max(c.fileTemp, c.recvSoFar), c.fileOver
	// A chunk that is handed over is in the residents already: one of the depth's charges less, wherever the rule counts so.
	credit := int64(0)
	if c.out.rule == total {
		residents, temp, over = c.all, c.temp, true
		if handed {
			credit = satMul(c.depth, c.scale)
		}
	} else if handed {
		credit = c.scale
	}
	most := int64(-1)
	overhead := satMul(c.depth, c.perChunk)
	if used := satAdd(satAdd(residents, temp), overhead); used <= c.budget {
		most = never
		if each := satMul(c.depth, mu) - credit; each > 0 {
			most = (c.budget - used) / each
		}
	}
	if c.temps && !over {
		most = max(most, c.v(residents))
	}
	if most >= 0 && most < never {
		most = most / c.align * c.align
	}
	return min(most, c.unlimited(i))
}

// unlimited is the limit of a file whose chunks may be as large as they like. A copier may let a chunk be larger than the budget.
func (c *cutter) unlimited(i int) int64 {
	return min(c.maxChunk, max(c.budget/c.scale, c.files[i].Kept))
}

// window is the most of the last values.
type window struct {
	values []struct{ at, value int64 } // falling
	most   int64
}

// push adds the value of the chunk numbered at. The window is that of the depth-1 chunks up to it.
func (w *window) push(at, value, depth int64) {
	for n := len(w.values); n > 0 && w.values[n-1].value <= value; n = len(w.values) {
		w.values = w.values[:n-1]
	}
	w.values = append(w.values, struct{ at, value int64 }{at, value})
	for len(w.values) > 0 && at-w.values[0].at >= depth-1 {
		w.values = w.values[1:]
	}
	w.most = 0
	if len(w.values) > 0 {
		w.most = w.values[0].value
	}
}
