package loader

// What one file needs, and the least budget of a load.

// fileNeed is what a file adds to the least budget of a load, in scaled units.
type fileNeed struct {
	resident int64
	most     int64 // resident, if every tensor has memory of its own; more only by what rounding adds
	recv     int64 // in a group of ranks, while a tensor of it is received or copied
	copied   int64 // otherwise, while its largest tensor is delivered as a copy
	// tail is how much more than resident the file needs in its worst moment, with pieces as small as they can be and one
	// chunk alive. In a load of one rank its residents count as they arrive, so the moment need not be the last.
	tail    int64
	binding int // the tensor of that moment; -1 if not known
	// stuck is the bytes of the largest piece that is above MaxChunk and cannot be made smaller; 0 if there is none.
	stuck       int64
	stuckTensor int
}

// stays says whether a tensor accumulates.
func (b *better) stays(t *TensorStats) bool { return b.accumulate && t.Resident }

// own is the scaled charge of memory of a tensor's own.
func (b *better) own(bytes int64) int64 { return satMul(roundTo(bytes, b.align), b.scale) }

// charge is the scaled charge of a chunk while it is alive. One that is handed over costs no less than what it becomes.
func (b *better) charge(bytes, mu int64, handed bool) int64 {
	if bytes == 0 {
		return 0
	}
	if handed {
		mu = max(mu, b.scale)
	}
	return satAdd(satMul(roundTo(bytes, b.align), mu), b.perChunk)
}

// copied is the scaled charge of delivering a tensor that does not stay.
func (b *better) copied(t *TensorStats) int64 {
	if !b.clone || b.stays(t) {
		return 0
	}
	return b.own(t.Bytes)
}

// received is the scaled charge of receiving a tensor that does not stay: whole, or a piece at a time if it may be cut and is
// not delivered as a copy.
func (b *better) received(t *TensorStats) int64 {
	switch {
	case b.group == 1 || b.stays(t):
		return 0
	case !b.cuts(t):
		return b.own(t.Bytes)
	}
	return b.own(t.Atom)
}

// cuts says whether a tensor may be read in pieces. In a group of ranks one that is delivered as a copy may not: tensors of
// several files could be in the middle of their copies at once.
func (b *better) cuts(t *TensorStats) bool {
	return t.Atom > 0 && t.Atom < t.Bytes && (b.group == 1 || !b.clone || b.stays(t))
}

// needOf is the need of a file whose tensors are known.
func (b *better) needOf(i int) fileNeed {
	f, mu := &b.files[i], b.mus[i]
	n := fileNeed{binding: -1, stuckTensor: -1}
	var worst, before int64
	worst = -1
	for j := range f.Tensors {
		t := &f.Tensors[j]
		if t.Bytes == 0 {
			continue
		}
		stays, own := b.stays(t), int64(0)
		if stays {
			own = b.own(t.Bytes)
		}
		n.recv = max(n.recv, b.received(t))
		copied := b.copied(t)
		if b.group > 1 {
			n.recv = max(n.recv, copied)
			copied = 0 // is in recv, for all of the group
		}
		n.copied = max(n.copied, copied)
		// What it needs beyond the residents before it: whole, or in pieces to a home that exists from the first of them.
		least := int64(never)
		smallest := t.Bytes
		if t.Bytes <= b.maxChunk {
			least = satAdd(b.charge(t.Bytes, mu, stays), copied)
		}
		pieces := int64(1)
		if b.cuts(t) {
			smallest = t.Atom
			pieces = ceilDiv(t.Bytes, t.Atom)
			if t.Atom <= b.maxChunk {
				least = min(least, satAdd(own, satAdd(b.charge(t.Atom, mu, false), copied)))
			}
		}
		b.pieces = satAdd(b.pieces, pieces)
		if smallest > b.maxChunk && smallest > n.stuck {
			n.stuck, n.stuckTensor = smallest, j
		}
		switch {
		case least == never:
		case b.group == 1:
			least = satAdd(before, least)
		default:
			least = max(least-own, 0) // the group's residents are charged as a whole
		}
		if least > worst {
			worst, n.binding = least, j
		}
		before = satAdd(before, own)
	}
	n.resident, n.most = before, before
	n.tail = max(worst, 0)
	if b.group == 1 && n.tail < never {
		n.tail = max(n.tail-before, 0)
	}
	// Chunks that are handed over are rounded once each, not once a tensor. Where those that MaxChunk allows fit, cutting first-fit
	// makes them.
	if b.group == 1 && b.accumulate && f.Resident == f.Kept && f.Kept > 0 && f.Largest <= b.maxChunk {
		if resident, most := b.packed(f, mu); most < satAdd(before, n.tail) {
			n.resident, n.tail = resident, most-resident
		}
	}
	return n
}

// packed is what a file needs whose chunks are all handed over and as large as MaxChunk lets first-fit make them: what stays of
// it, and the most while it is loaded.
func (b *better) packed(f *FileStats, mu int64) (resident, most int64) {
	var chunk int64
	end := func() {
		most = max(most, satAdd(resident, b.charge(chunk, mu, true)))
		resident = satAdd(resident, b.own(chunk))
	}
	for j := range f.Tensors {
		t := &f.Tensors[j]
		if chunk > b.maxChunk-t.Bytes {
			end()
			chunk = 0
		}
		chunk += t.Bytes
	}
	end()
	return resident, most
}

// needOfSums is the need of a file of which only sums are known: the worst that they allow.
func (b *better) needOfSums(i int) fileNeed {
	f, mu := &b.files[i], b.mus[i]
	n := fileNeed{binding: -1, stuckTensor: -1}
	if f.Largest == 0 {
		return n
	}
	if b.accumulate {
		n.resident = b.own(f.Resident)
	}
	n.most = n.resident
	handed := b.handsOver(i)
	copied := int64(0)
	if b.clone && !handed {
		copied = b.own(f.Largest)
	}
	cuts := b.cutsSums(i)
	if b.group > 1 {
		switch {
		case handed:
		case cuts:
			n.recv = b.own(f.Atom)
		default:
			n.recv = b.own(f.Largest)
		}
		copied = 0
	}
	n.copied = copied
	n.tail = never
	smallest := f.Largest
	if f.Largest <= b.maxChunk {
		n.tail = satAdd(b.charge(f.Largest, mu, handed), copied)
		if handed && n.tail < never {
			n.tail = max(n.tail-b.own(f.Largest), 0)
		}
	}
	if cuts {
		smallest = f.Atom
		if f.Atom <= b.maxChunk {
			n.tail = min(n.tail, satAdd(b.charge(f.Atom, mu, false), copied))
		}
	}
	if smallest > b.maxChunk {
		n.stuck = smallest
	}
	return n
}

// cutsSums is cuts for the largest tensor of a file of which only sums are known.
func (b *better) cutsSums(i int) bool {
	f := &b.files[i]
	return f.Atom > 0 && f.Atom < f.Largest && (b.group == 1 || !b.clone || b.handsOver(i))
}

// handsOver says whether all chunks of a file are handed over.
func (b *better) handsOver(i int) bool {
	return b.accumulate && b.files[i].Resident == b.files[i].Kept
}

// minimum is the least scaled budget that the files need in their present order, serially, and the position of the file that
// needs it, -1 if none. never if no budget is enough.
func (b *better) minimum() (need int64, binding int) {
	binding = -1
	var before int64
	for first := 0; first < len(b.files); first += b.group {
		var tail, recv int64
		worst := -1
		for i := first; i < min(len(b.files), first+b.group); i++ {
			n := &b.need[i]
			before = satAdd(before, n.resident)
			recv = max(recv, n.recv)
			if b.files[i].Kept > 0 && (worst < 0 || n.tail > tail) {
				tail, worst = n.tail, i
			}
		}
		if sum := satAdd(before, satAdd(tail, recv)); worst >= 0 && (binding < 0 || sum > need) {
			need, binding = sum, worst
		}
	}
	return need, binding
}

// stuck is the position of a file with a piece that no chunk may hold; -1 if there is none.
func (b *better) stuck() int {
	at := -1
	for i := range b.need {
		if b.need[i].stuck > 0 && (at < 0 || b.need[i].stuck > b.need[at].stuck) {
			at = i
		}
	}
	return at
}
