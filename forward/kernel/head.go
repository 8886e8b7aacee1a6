package kernel

import (
	"math"
	"sort"

	"github.com/trainerrank/engine/device"
)

const (
	// HeadRows is the largest number of rows that Head may be given at once.
	HeadRows = 240

	headChunk  = 120             // rows of one product of the head
	headTile   = 256             // columns whose logits are held at once, per worker
	headStride = headTile + 16   // their row stride: an odd number of cache lines
	headGroups = 32              // parts of the vocabulary that are summed on their own: tasks, at fixed offsets
	statBytes  = headGroups * 12 // per row: a float32 maximum and a float64 sum per part
)

// HeadBytes is the scratch, in bytes, that [Backend.Head] needs for a number of rows of which the k largest logits are wanted
// (0: of none). It does not depend on the vocabulary.
func HeadBytes(threads, rows, k int) int64 {
	tile := device.RoundAlign(int64(min(rows, headChunk)) * headStride * 4)
	return int64(threads)*tile + device.RoundAlign(int64(rows)*statBytes) + int64(threads)*topBytes(rows, k)
}

func topBytes(rows, k int) int64 { return device.RoundAlign(int64(rows) * int64(k) * 8) }

// headWork is the scratch of one call of Head.
type headWork struct {
	asks  []Ask
	first []int // asks of row r are [first[r], first[r+1])
	topK  []int // largest k asked for by row
	k     int   // largest of topK
	sums  []float64
	maxes []float32
	tiles []device.Mem // per worker
	tops  [][]top      // per worker and row
}

// Head implements [Backend]. Vocabulary tiles stream through a sum of exponentials relative to the largest logit so far, so only one
// tile of logits per worker exists at a time. The vocabulary is cut at fixed columns into parts, which are tasks; their sums are added in
// their order, in float64.
func (h *Host) Head(work, scratch device.Mem, hidden Mat, w *Weight, asks []Ask) {
	hw := newHeadWork(scratch, h.pool.n, hidden.Rows, asks)
	np := panels(w.Out)
	tiles := (np*Width + headTile - 1) / headTile
	per := (tiles + headGroups - 1) / headGroups
	groups := (tiles + per - 1) / per
	h.pool.each(groups, func(worker, g int) {
		h.headGroup(h.space(work, worker), hw, worker, hidden, w, g, g*per, min(tiles, (g+1)*per))
	})
	h.eachRow(hidden.Rows, 4, func(from, to int) {
		for r := from; r < to; r++ {
			hw.answer(r, groups)
		}
	})
}

func newHeadWork(scratch device.Mem, threads, rows int, asks []Ask) *headWork {
	hw := &headWork{asks: asks, first: make([]int, rows+1), topK: make([]int, rows), tops: make([][]top, threads)}
	for r := range hw.first {
		hw.first[r] = sort.Search(len(asks), func(i int) bool { return int(asks[i].Row) >= r })
	}
	for _, a := range asks {
		if a.Kind == AskTopK {
			hw.topK[a.Row] = max(hw.topK[a.Row], int(a.Arg))
			hw.k = max(hw.k, int(a.Arg))
		}
	}
	take := func(n int64) device.Mem {
		m := scratch.Slice(0, n)
		n = device.RoundAlign(n)
		scratch = scratch.Slice(n, scratch.Bytes()-n)
		return m
	}
	stats := take(int64(rows) * statBytes)
	hw.sums = stats.Slice(0, int64(rows)*headGroups*8).F64()
	hw.maxes = stats.Slice(int64(rows)*headGroups*8, int64(rows)*headGroups*4).F32()
	for t := range threads {
		hw.tiles = append(hw.tiles, take(int64(min(rows, headChunk))*headStride*4))
		if hw.k == 0 {
			continue
		}
		m := take(int64(rows) * int64(hw.k) * 8)
		half := int64(rows) * int64(hw.k) * 4
		vals, ids := m.Slice(0, half).F32(), m.Slice(half, half).I32()
		hw.tops[t] = make([]top, rows)
		for r, k := range hw.topK {
			hw.tops[t][r] = top{vals: vals[r*hw.k:][:k], ids: ids[r*hw.k:][:k]}
		}
	}
	return hw
}

// headGroup runs the rows past the tiles [t0, t1), which are part g of the vocabulary.
func (h *Host) headGroup(ws []float32, hw *headWork, worker int, hidden Mat, w *Weight, g, t0, t1 int) {
	x := hw.tiles[worker].F32()
	for r0 := 0; r0 < hidden.Rows; r0 += headChunk {
		r1 := min(r0+headChunk, hidden.Rows)
		for t := t0; t < t1; t++ {
			col := t * headTile
			n := min(headTile, w.Out-col)
			for p := col / Width; p*Width < col+n; p++ {
				h.product(x[p*Width-col:], headStride, hidden, r0, r1, w, p, ws)
			}
			for r := r0; r < r1; r++ {
				row := x[(r-r0)*headStride:][:n]
				i := r*headGroups + g
				if t == t0 {
					hw.maxes[i], hw.sums[i] = float32(math.Inf(-1)), 0
				}
				if m := h.p.max(row); m > hw.maxes[i] || m != m {
					hw.sums[i] *= math.Exp(float64(hw.maxes[i]) - float64(m))
					hw.maxes[i] = m
				}
				if m := hw.maxes[i]; !math.IsInf(float64(m), -1) {
					hw.sums[i] += h.p.expSum(row, m)
				}
				if k := hw.topK[r]; k > 0 {
					hw.tops[worker][r].offer(row, int32(col))
				}
				hw.pick(r, row, col)
			}
		}
	}
}

// pick stores the logits of row r that asks want, out of a tile of logits that begins at column col.
func (hw *headWork) pick(r int, row []float32, col int) {
	for _, a := range hw.asks[hw.first[r]:hw.first[r+1]] {
		switch at := int(a.Arg) - col; {
		case a.Kind == AskLogits:
			copy(a.Out.F32()[col:], row)
		case a.Kind == AskTarget && at >= 0 && at < len(row):
			a.Out.F32()[0] = row[at]
		}
	}
}

// answer turns what was collected for row r into logprobs.
func (hw *headWork) answer(r, groups int) {
	maxes, sums := hw.maxes[r*headGroups:][:groups], hw.sums[r*headGroups:][:groups]
	m := maxes[0]
	for _, v := range maxes[1:] {
		if v > m || v != v {
			m = v
		}
		if m != m {
			break
		}
	}
	var sum float64
	for g, v := range maxes {
		if !math.IsInf(float64(v), -1) {
			sum += sums[g] * math.Exp(float64(v)-float64(m))
		}
	}
	logZ := float64(m) + math.Log(sum)
	var best *top
	if hw.topK[r] > 0 {
		best = &hw.tops[0][r]
		for t := 1; t < len(hw.tops); t++ {
			o := &hw.tops[t][r]
			for i := range o.n {
				best.put(o.vals[i], o.ids[i])
			}
		}
		best.sort()
	}
	for _, a := range hw.asks[hw.first[r]:hw.first[r+1]] {
		switch a.Kind {
		case AskTarget:
			out := a.Out.F32()
			out[0] = logprob(out[0], logZ)
		case AskTopK:
			out, ids := a.Out.F32(), a.IDs.I32()
			for i := range int(a.Arg) {
				out[i], ids[i] = logprob(best.vals[i], logZ), best.ids[i]
			}
		}
	}
}

// logprob is logit - logZ, which is never above 0, rounded once.
func logprob(logit float32, logZ float64) float32 {
	d := float64(logit) - logZ
	if d > 0 {
		d = 0
	}
	return float32(d)
}

// top keeps the largest of the logits that it is offered: a heap with the worst kept one in front. The order is total (higher
// logit first, then lower token; NaN counts as the highest), so what is kept does not depend on the order of the offers.
type top struct {
	vals []float32
	ids  []int32
	n    int
}

// before says whether logit v of token i ranks before logit w of token j.
func before(v float32, i int32, w float32, j int32) bool {
	switch vn, wn := v != v, w != w; {
	case vn != wn:
		return vn
	case vn || v == w:
		return i < j
	}
	return v > w
}

// offer offers the logits of the tokens from first on.
func (t *top) offer(row []float32, first int32) {
	for i, v := range row {
		if t.n < len(t.vals) || !(v < t.vals[0]) {
			t.put(v, first+int32(i))
		}
	}
}

func (t *top) put(v float32, id int32) {
	if t.n < len(t.vals) {
		i := t.n
		t.n++
		for i > 0 && before(t.vals[(i-1)/2], t.ids[(i-1)/2], v, id) {
			t.vals[i], t.ids[i] = t.vals[(i-1)/2], t.ids[(i-1)/2]
			i = (i - 1) / 2
		}
		t.vals[i], t.ids[i] = v, id
		return
	}
	if before(v, id, t.vals[0], t.ids[0]) {
		t.sink(0, t.n, v, id)
	}
}

// sink puts a logit into the heap of the first n at i, or below.
func (t *top) sink(i, n int, v float32, id int32) {
	for {
		c := 2*i + 1
		if c >= n {
			break
		}
		if c+1 < n && before(t.vals[c], t.ids[c], t.vals[c+1], t.ids[c+1]) {
			c++
		}
		if !before(v, id, t.vals[c], t.ids[c]) {
			break
		}
		t.vals[i], t.ids[i] = t.vals[c], t.ids[c]
		i = c
	}
	t.vals[i], t.ids[i] = v, id
}

// sort puts the best first.
func (t *top) sort() {
	for n := t.n - 1; n > 0; n-- {
		v, id := t.vals[n], t.ids[n]
		t.vals[n], t.ids[n] = t.vals[0], t.ids[0]
		t.sink(0, n, v, id)
	}
}
