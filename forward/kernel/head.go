package kernel

import (
	"math"

	"github.com/trainerrank/engine/device"
)

const (
	// HeadRows is the largest number of rows that Head may be given at once.
	HeadRows = 240

	// headTile is the number of columns whose logits are held at once, and the row stride of the tile: seven panels, so that
	// the rows of a product do not compete for the same cache sets.
	headTile = 7 * Width
)

// HeadBytes is the scratch, in bytes, that [Backend.Head] needs for a number of rows of which the k largest logits are wanted
// (0: of none): a tile of logits, two statistics per row, and what is the largest so far. It does not depend on the vocabulary.
func HeadBytes(rows, k int) int64 {
	return device.RoundAlign(int64(rows)*headTile*4) + device.RoundAlign(int64(rows)*8) + device.RoundAlign(int64(rows)*4) + device.RoundAlign(int64(rows)*int64(k)*8)
}

// headWork is the scratch of one call of Head.
type headWork struct {
	row  []headRow
	tile []float32
	sums []float64 // per row: the sum of exponentials of the logits so far, relative to
	max  []float32 // the largest logit so far
}

// headRow is what is wanted of one row.
type headRow struct {
	asks []Ask
	top  top // of the largest k asked for
}

// Head implements [Backend]. Vocabulary tiles stream through a sum of exponentials relative to the largest logit so far, so only one
// tile of logits exists at a time. The sum over a tile is added in float64.
func (h *Host) Head(work, scratch device.Mem, hidden Mat, w *Weight, asks []Ask) {
	if hidden.Rows == 0 {
		return // a product has rows
	}
	hw := newHeadWork(scratch, hidden.Rows, asks)
	ws := work.F32()
	for col := 0; col < w.Out; col += headTile {
		n := min(headTile, w.Out-col)
		for c := 0; c < n; c += Width {
			h.product(hw.tile[c:], headTile, hidden, 0, hidden.Rows, w, (col+c)/Width, ws)
		}
		for r := range hidden.Rows {
			h.headRow(hw, r, hw.tile[r*headTile:][:n], col)
		}
	}
	for r := range hidden.Rows {
		hw.answer(r)
	}
}

func newHeadWork(scratch device.Mem, rows int, asks []Ask) *headWork {
	take := func(n int64) device.Mem {
		m := scratch.Slice(0, n)
		n = device.RoundAlign(n)
		scratch = scratch.Slice(n, scratch.Bytes()-n)
		return m
	}
	hw := &headWork{row: make([]headRow, rows)}
	hw.tile = take(int64(rows) * headTile * 4).F32()
	hw.sums, hw.max = take(int64(rows)*8).F64(), take(int64(rows)*4).F32()
	for r := range hw.row {
		n := 0
		for n < len(asks) && int(asks[n].Row) == r {
			n++
		}
		hw.row[r].asks, asks = asks[:n], asks[n:]
		k := 0
		for _, a := range hw.row[r].asks {
			if a.Kind == AskTopK {
				k = max(k, int(a.Arg))
			}
		}
		m := scratch.Slice(0, int64(k)*8)
		scratch = scratch.Slice(m.Bytes(), scratch.Bytes()-m.Bytes())
		hw.row[r].top = top{vals: m.Slice(0, int64(k)*4).F32(), ids: m.Slice(int64(k)*4, int64(k)*4).I32()}
		hw.max[r], hw.sums[r] = float32(math.Inf(-1)), 0
	}
	return hw
}

// headRow takes the logits x of row r for the tokens from col on.
func (h *Host) headRow(hw *headWork, r int, x []float32, col int) {
	if m := h.p.max(x); m > hw.max[r] || m != m {
		hw.sums[r] *= math.Exp(float64(hw.max[r]) - float64(m))
		hw.max[r] = m
	}
	if m := hw.max[r]; !math.IsInf(float64(m), -1) {
		hw.sums[r] += h.p.expSum(x, m)
	}
	row := &hw.row[r]
	if len(row.top.vals) > 0 {
		row.top.offer(x, int32(col))
	}
	for _, a := range row.asks {
		switch at := int(a.Arg) - col; {
		case a.Kind == AskLogits:
			copy(a.Out.F32()[col:], x)
		case a.Kind == AskTarget && at >= 0 && at < len(x):
			a.Out.F32()[0] = x[at]
		}
	}
}

// answer turns what was collected for row r into logprobs.
func (hw *headWork) answer(r int) {
	logZ := float64(hw.max[r]) + math.Log(hw.sums[r])
	row := &hw.row[r]
	row.top.sort()
	for _, a := range row.asks {
		switch a.Kind {
		case AskTarget:
			out := a.Out.F32()
			out[0] = logprob(out[0], logZ)
		case AskTopK:
			out, ids := a.Out.F32(), a.IDs.I32()
			for i := range int(a.Arg) {
				out[i], ids[i] = logprob(row.top.vals[i], logZ), row.top.ids[i]
			}
		case AskLogZ:
			a.Out.F64()[0] = logZ
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
