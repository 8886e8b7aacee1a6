package kernel

import (
	"math"
	"sort"

	"github.com/trainerrank/engine/device"
)

// tileGroup is the number of tiles that walk over the keys together, so that a block of keys is read from memory once for all of them. No
// bit of a result depends on it.
const tileGroup = 4

// attention is one call of Attend.
type attention struct {
	h      *Host
	dst, q Mat
	stats  Mat // wanted if it has rows
	k, v   Mat
	Attention
	path   path
	scores []float32 // of a tile and a block of keys [keyBlock, Width]
	tiles  [tileGroup]attnTile
}

// attnTile is Width lanes: the query heads of one key head at some positions of a span.
type attnTile struct {
	n             int          // lanes in use; the others repeat the last
	at, to, stat  [Width]int   // where the query lies, and where its output and its statistics go
	lo, hi        [Width]int32 // the positions that the lane sees: [lo, hi)
	mx, sum, corr [Width]float32
	q, o          []float32 // queries and outputs [HeadDim, Width]

	anyFrom, allFrom int32 // no lane sees a key before anyFrom; all see those from allFrom on
	allTo, anyTo     int32 // up to allTo; none sees a key from anyTo on
}

// Attend implements [Backend]. The queries of one key head are the lanes of a tile: lane arithmetic is vertical, so a query's
// bits cannot depend on its neighbours. Keys are visited in blocks aligned to the absolute position (0, keyBlock, ...), whichever spans
// they lie in, with a running maximum and sum (the online softmax of Milakov and Gimelshein, 2018). A key that some lanes of
// a tile may not see is added to the others alone, so that a value that is not finite stays where it belongs.
func (h *Host) Attend(work device.Mem, dst, stats, q, k, v Mat, first int, spans []Span, a Attention) {
	c := h.attend.Get().(*attention)
	defer h.attend.Put(c)
	c.h, c.dst, c.stats, c.q, c.k, c.v, c.Attention = h, dst, stats, q, k, v, a
	ws, size := work.F32(), a.HeadDim*Width
	for i := range c.tiles {
		c.tiles[i].q, c.tiles[i].o = ws[2*i*size:][:size], ws[(2*i+1)*size:][:size]
	}
	c.scores = ws[2*tileGroup*size:][:keyBlock*Width]
	// The spans are in the order of their rows.
	s := sort.Search(len(spans), func(i int) bool { return spans[i].Offset+spans[i].End-spans[i].Start > first })
	for ; s < len(spans) && spans[s].Offset < first+q.Rows; s++ {
		sp := spans[s]
		from, to := max(sp.Offset, first), min(sp.Offset+sp.End-sp.Start, first+q.Rows)
		c.path = pathOf(c.path[:0], spans, s)
		c.span(sp.Start+from-sp.Offset, from-first, (to-from)*(a.Heads/a.KVHeads))
	}
}

// span runs the queries from position pos on, which is row of q. lanes is the number of positions times that of query heads per key head.
func (c *attention) span(pos, row, lanes int) {
	for head := range c.KVHeads {
		for lane := 0; lane < lanes; lane += tileGroup * Width {
			n := 0
			for l := lane; l < lanes && n < tileGroup; l += Width {
				c.tiles[n].begin(c, pos, row, head, l, min(Width, lanes-l))
				n++
			}
			c.walk(c.tiles[:n], head)
		}
	}
}

// begin makes t the lanes [lane, lane+n) of a span's queries: lane l is query head l%group of the key head at position pos + l/group.
func (t *attnTile) begin(c *attention, pos, row, head, lane, n int) {
	group := c.Heads / c.KVHeads
	t.n = n
	t.anyFrom, t.allFrom, t.allTo, t.anyTo = math.MaxInt32, 0, math.MaxInt32, 0
	for l := range Width {
		i := lane + min(l, n-1)
		col := (head*group + i%group) * c.HeadDim
		t.at[l], t.to[l] = (row+i/group)*c.q.Stride+col, (row+i/group)*c.dst.Stride+col
		t.stat[l] = (row+i/group)*c.stats.Stride + head*group + i%group
		lo, hi := int32(0), int32(pos+i/group+1)
		if c.Window > 0 {
			lo = max(0, hi-int32(c.Window))
		}
		t.anyFrom, t.allFrom = min(t.anyFrom, lo), max(t.allFrom, lo)
		t.allTo, t.anyTo = min(t.allTo, hi), max(t.anyTo, hi)
		t.lo[l], t.hi[l], t.mx[l], t.sum[l] = lo, hi, float32(math.Inf(-1)), 0
	}
	c.h.p.gatherLanes(t.q, c.q.Mem.F32(), &t.at, c.HeadDim)
	clear(t.o)
}

// walk takes tiles of one span over the keys of a head.
func (c *attention) walk(tiles []attnTile, head int) {
	col := head * c.HeadDim
	k, v := c.k.Mem.F32()[col:], c.v.Mem.F32()[col:]
	from, to := tiles[0].anyFrom, tiles[len(tiles)-1].anyTo // later positions see later keys
	for block := from / keyBlock * keyBlock; block < to; block += keyBlock {
		for i := range tiles {
			if t := &tiles[i]; block < t.anyTo && block+keyBlock > t.anyFrom {
				c.step(t, block, k, v)
			}
		}
	}
	for i := range tiles {
		t := &tiles[i]
		for l, sum := range t.sum {
			t.corr[l] = 1 / sum
		}
		c.h.p.scatterLanes(c.dst.Mem.F32(), &t.to, t.n, t.o, &t.corr, c.HeadDim)
		if c.stats.Rows > 0 {
			stats := c.stats.Mem.F32()
			for l := range t.n {
				stats[t.stat[l]], stats[t.stat[l]+c.Heads] = t.mx[l], t.corr[l]
			}
		}
	}
}

// step takes a tile over one block of keys.
func (c *attention) step(t *attnTile, block int32, k, v []float32) {
	p, hd, s := c.h.p, c.HeadDim, c.scores
	from, to := max(block, t.anyFrom), min(block+keyBlock, t.anyTo)
	c.path.runs(from, to, func(a, b int32, row int) {
		p.gemm(s[(a-from)*Width:], Width, k[row*c.k.Stride:], c.k.Stride, 1, t.q, int(b-a), hd, false)
	})
	p.softmaxBlock(s, int(to-from), c.Scale, from, &t.lo, &t.hi, &t.mx, &t.sum, &t.corr)
	if block > t.anyFrom {
		p.scaleLanes(t.o, hd, &t.corr)
	}
	some := func(a, b int32, row int) { // keys that not every lane may see
		p.accumMasked(t.o, hd, v[row*c.v.Stride:], c.v.Stride, s[(a-from)*Width:], int(b-a), a, &t.lo, &t.hi)
	}
	all := func(a, b int32, row int) {
		p.gemm(t.o, Width, v[row*c.v.Stride:], 1, c.v.Stride, s[(a-from)*Width:], hd, int(b-a), true)
	}
	allFrom := min(max(from, t.allFrom), to)
	allTo := max(allFrom, min(to, t.allTo))
	c.path.runs(from, allFrom, some)
	c.path.runs(allFrom, allTo, all)
	c.path.runs(allTo, to, some)
}

// path is the way from a span to its root, the span first.
type path []Span

func pathOf(p path, spans []Span, s int) path {
	for ; s >= 0; s = spans[s].Parent {
		p = append(p, spans[s])
	}
	return p
}

// runs calls fn for the pieces of [from, to) that lie in one span each, in ascending order, with the packed row of the
// piece's first position.
func (p path) runs(from, to int32, fn func(from, to int32, row int)) {
	for i := len(p) - 1; i >= 0 && from < to; i-- {
		if sp := p[i]; int(from) < sp.End {
			end := min(to, int32(sp.End))
			fn(from, end, sp.Offset+int(from)-sp.Start)
			from = end
		}
	}
}
