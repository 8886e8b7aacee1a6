package kernel

import (
	"sort"

	"github.com/trainerrank/engine/device"
)

// gradTiles is the number of tiles of queries that walk over the keys together in a backward.
const gradTiles = tileGroup

// attentionGrad is one call of AttendQueryGrad or AttendKeyGrad. Weights are computed again from the statistics that the forward left, as in FlashAttention
// (Dao and others, 2022), but queries and keys each have a walk of their own: then no two workers add to the same place, and every sum has one order.
type attentionGrad struct {
	h                         *Host
	q, k, v, dout, stats, dot Mat
	Attention
	s, dp []float32 // of a block and a tile [keyBlock, Width]
}

// AttendQueryGrad implements [Gradients].
func (h *Host) AttendQueryGrad(work device.Mem, dq, q, k, v, dout, stats, dot Mat, first int, spans []Span, a Attention) {
	c := &attentionGrad{h: h, q: q, k: k, v: v, dout: dout, stats: stats, dot: dot, Attention: a}
	ws, size := work.F32(), a.HeadDim*Width
	var tiles [gradTiles]queryTile
	for i := range tiles {
		t := &tiles[i]
		t.q, t.dout, t.dq = ws[3*i*size:][:size], ws[(3*i+1)*size:][:size], ws[(3*i+2)*size:][:size]
	}
	c.s = ws[3*gradTiles*size:][:keyBlock*Width]
	c.dp = ws[3*gradTiles*size+keyBlock*Width:][:keyBlock*Width]
	var way path
	s := sort.Search(len(spans), func(i int) bool { return spans[i].Offset+spans[i].End-spans[i].Start > first })
	for ; s < len(spans) && spans[s].Offset < first+q.Rows; s++ {
		sp := spans[s]
		from, to := max(sp.Offset, first), min(sp.Offset+sp.End-sp.Start, first+q.Rows)
		way = pathOf(way[:0], spans, s)
		lanes := (to - from) * (a.Heads / a.KVHeads)
		for head := range a.KVHeads {
			for lane := 0; lane < lanes; lane += gradTiles * Width {
				n := 0
				for l := lane; l < lanes && n < gradTiles; l += Width {
					tiles[n].begin(c, sp.Start+from-sp.Offset, from-first, head, l, min(Width, lanes-l))
					n++
				}
				c.queries(tiles[:n], way, head, dq)
			}
		}
	}
}

// queryTile is Width lanes of queries, as in attnTile.
type queryTile struct {
	n           int
	to          [Width]int
	lo, hi      [Width]int32
	mx, inv, d  [Width]float32
	q, dout, dq []float32 // [HeadDim, Width]

	from, end int32 // no lane sees a key before or after
}

func (t *queryTile) begin(c *attentionGrad, pos, row, head, lane, n int) {
	group := c.Heads / c.KVHeads
	t.n = n
	var at, atDout [Width]int
	stats, dot := c.stats.Mem.F32(), c.dot.Mem.F32()
	for l := range Width {
		i := lane + min(l, n-1)
		r, head := row+i/group, head*group+i%group
		at[l], atDout[l] = r*c.q.Stride+head*c.HeadDim, r*c.dout.Stride+head*c.HeadDim
		t.lo[l], t.hi[l] = c.sees(pos + i/group)
		t.mx[l], t.inv[l] = stats[r*c.stats.Stride+head], stats[r*c.stats.Stride+c.Heads+head]
		t.d[l] = dot[r*c.dot.Stride+head]
	}
	t.from, t.end = t.lo[0], t.hi[Width-1]
	t.to = at
	c.h.p.gatherLanes(t.q, c.q.Mem.F32(), &at, c.HeadDim)
	c.h.p.gatherLanes(t.dout, c.dout.Mem.F32(), &atDout, c.HeadDim)
	clear(t.dq)
}

// sees are the keys [lo, hi) that a query at a position sees.
func (a *Attention) sees(pos int) (lo, hi int32) {
	hi = int32(pos + 1)
	if a.Window > 0 {
		lo = max(0, hi-int32(a.Window))
	}
	return lo, hi
}

var ones = func() (x [Width]float32) {
	for l := range x {
		x[l] = 1
	}
	return x
}()

// queries takes tiles of one span over the keys of a head, in the blocks of the forward, and writes their gradients.
func (c *attentionGrad) queries(tiles []queryTile, way path, head int, dq Mat) {
	p, hd, col := c.h.p, c.HeadDim, head*c.HeadDim
	k, v := c.k.Mem.F32()[col:], c.v.Mem.F32()[col:]
	for block := tiles[0].from / keyBlock * keyBlock; block < tiles[len(tiles)-1].end; block += keyBlock {
		for i := range tiles {
			t := &tiles[i]
			from, to := max(block, t.from), min(block+keyBlock, t.end)
			if from >= to {
				continue
			}
			way.runs(from, to, func(a, b int32, row int) {
				p.gemm(c.s[(a-from)*Width:], Width, k[row*c.k.Stride:], c.k.Stride, 1, t.q, int(b-a), hd, false)
				p.gemm(c.dp[(a-from)*Width:], Width, v[row*c.v.Stride:], c.v.Stride, 1, t.dout, int(b-a), hd, false)
			})
			p.softmaxGradLanes(c.s, c.dp, int(to-from), c.Scale, from, &t.lo, &t.hi, &t.mx, &t.inv, &t.d)
			way.runs(from, to, func(a, b int32, row int) {
				p.gemm(t.dq, Width, k[row*c.k.Stride:], 1, c.k.Stride, c.dp[(a-from)*Width:], hd, int(b-a), true)
			})
		}
	}
	for i := range tiles {
		t := &tiles[i]
		for l := range t.to { // dq need not have the stride of q
			t.to[l] = t.to[l]/c.q.Stride*dq.Stride + t.to[l]%c.q.Stride
		}
		p.scatterLanes(dq.Mem.F32(), &t.to, t.n, t.dq, &ones, hd)
	}
}

// AttendKeyGrad implements [Gradients]. Keys are the lanes of a tile, queries come in blocks that are counted from the beginning of their span, so that the order
// of a sum does not depend on where a tile begins.
func (h *Host) AttendKeyGrad(work device.Mem, dk, dv, q, k, v, dout, stats, dot Mat, first int, spans []Span, a Attention) {
	c := &attentionGrad{h: h, q: q, k: k, v: v, dout: dout, stats: stats, dot: dot, Attention: a}
	ws, size := work.F32(), a.HeadDim*Width
	c.s = ws[4*size:][:keyBlock*Width]
	c.dp = ws[4*size+keyBlock*Width:][:keyBlock*Width]
	kt, vt, dkt, dvt := ws[:size], ws[size:][:size], ws[2*size:][:size], ws[3*size:][:size]
	s := sort.Search(len(spans), func(i int) bool { return spans[i].Offset+spans[i].End-spans[i].Start > first })
	for ; s < len(spans) && spans[s].Offset < first+dk.Rows; s++ {
		sp := spans[s]
		from, to := max(sp.Offset, first), min(sp.Offset+sp.End-sp.Start, first+dk.Rows)
		last := s + 1 // of those that descend from the span
		for last < len(spans) && spans[last].Parent >= s {
			last++
		}
		for row := from; row < to; row += Width {
			n := min(Width, to-row)
			var atK, atV, toK, toV [Width]int
			var lo, hi [Width]int32 // of the positions that see the key
			for head := range a.KVHeads {
				for l := range Width {
					r := row + min(l, n-1)
					atK[l], atV[l] = r*k.Stride+head*a.HeadDim, r*v.Stride+head*a.HeadDim
					toK[l], toV[l] = (r-first)*dk.Stride+head*a.HeadDim, (r-first)*dv.Stride+head*a.HeadDim
					lo[l], hi[l] = a.seen(r - sp.Offset + sp.Start)
				}
				h.p.gatherLanes(kt, k.Mem.F32(), &atK, a.HeadDim)
				h.p.gatherLanes(vt, v.Mem.F32(), &atV, a.HeadDim)
				clear(dkt)
				clear(dvt)
				for _, by := range spans[s:last] {
					c.keys(kt, vt, dkt, dvt, by, head, &lo, &hi)
				}
				h.p.scatterLanes(dk.Mem.F32(), &toK, n, dkt, &ones, a.HeadDim)
				h.p.scatterLanes(dv.Mem.F32(), &toV, n, dvt, &ones, a.HeadDim)
			}
		}
	}
}

// seen are the positions [lo, hi) that see a key at a position.
func (a *Attention) seen(pos int) (lo, hi int32) {
	if a.Window > 0 {
		return int32(pos), int32(pos + a.Window)
	}
	return int32(pos), 1<<31 - 1
}

// keys adds what the queries of a span contribute to a tile of keys.
func (c *attentionGrad) keys(kt, vt, dkt, dvt []float32, by Span, head int, lo, hi *[Width]int32) {
	p, hd, group := c.h.p, c.HeadDim, c.Heads/c.KVHeads
	begin := max(by.Start, int(lo[0])) // the first lane is the first key
	begin = by.Start + (begin-by.Start)/keyBlock*keyBlock
	for pos := begin; pos < min(by.End, int(hi[Width-1])); pos += keyBlock {
		n := min(keyBlock, by.End-pos)
		row := by.Offset + pos - by.Start
		for g := range group {
			head := head*group + g
			q, dout := c.q.Mem.F32()[row*c.q.Stride+head*hd:], c.dout.Mem.F32()[row*c.dout.Stride+head*hd:]
			stats, dot := c.stats.Mem.F32()[row*c.stats.Stride+head:], c.dot.Mem.F32()[row*c.dot.Stride+head:]
			p.gemm(c.s, Width, q, c.q.Stride, 1, kt, n, hd, false)
			p.gemm(c.dp, Width, dout, c.dout.Stride, 1, vt, n, hd, false)
			p.softmaxGradRows(c.s, c.dp, n, c.Scale, int32(pos), lo, hi, stats, stats[c.Heads:], c.stats.Stride, dot, c.dot.Stride)
			p.gemm(dvt, Width, dout, 1, c.dout.Stride, c.s, hd, n, true)
			p.gemm(dkt, Width, q, 1, c.q.Stride, c.dp, hd, n, true)
		}
	}
}
