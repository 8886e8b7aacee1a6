package kernel

import (
	"math"
	"sort"

	"github.com/trainerrank/engine/device"
)

// attnTile is n <= Width lanes of one span's part of the block. Lane number
// l of the part is query head l%group of the key head's group, at position from + l/group.
type attnTile struct {
	span    int
	from    int // first position of the part
	row     int // its row in q
	lane, n int // the lanes [lane, lane+n) of the part
}

// laneState is what is kept for the lanes of a tile.
type laneState struct {
	at, to        [Width]int   // where the query lies, and where its output goes
	lo, hi        [Width]int32 // the positions that the lane sees: [lo, hi)
	mx, sum, corr [Width]float32
	path          path
}

// Attend implements [Backend]. The queries of one key head are the lanes of a tile: lane arithmetic is vertical, so a query's
// bits cannot depend on its neighbours. Keys are visited in blocks aligned to the absolute position (0, keyBlock, ...), whichever spans
// they lie in, with a running maximum and sum (the online softmax of Milakov and Gimelshein, 2018). A key that some lanes of
// a tile may not see is added to the others alone, so that a value that is not finite stays where it belongs.
func (h *Host) Attend(work device.Mem, dst, q, k, v Mat, first int, spans []Span, a Attention) {
	st := h.lanes.Get().(*laneState)
	defer h.lanes.Put(st)
	ws, group := work.F32(), a.Heads/a.KVHeads
	// The spans are in the order of their rows.
	s := sort.Search(len(spans), func(i int) bool { return spans[i].Offset+spans[i].End-spans[i].Start > first })
	for ; s < len(spans) && spans[s].Offset < first+q.Rows; s++ {
		sp := spans[s]
		from, to := max(sp.Offset, first), min(sp.Offset+sp.End-sp.Start, first+q.Rows)
		for lane := 0; lane < (to-from)*group; lane += Width {
			t := attnTile{s, sp.Start + from - sp.Offset, from - first, lane, min(Width, (to-from)*group-lane)}
			for head := range a.KVHeads {
				h.attendTile(ws, st, dst, q, k, v, spans, a, t, head)
			}
		}
	}
}

func (h *Host) attendTile(ws []float32, st *laneState, dst, q, k, v Mat, spans []Span, a Attention, t attnTile, head int) {
	hd, group := a.HeadDim, a.Heads/a.KVHeads
	qt, o, s := ws[:hd*Width], ws[hd*Width:2*hd*Width], ws[2*hd*Width:][:keyBlock*Width]
	allFrom, anyTo := int32(0), int32(0) // keys that all lanes may see begin at allFrom; none is seen from anyTo on
	anyFrom, allTo := int32(math.MaxInt32), int32(math.MaxInt32)
	for l := range Width {
		i := t.lane + min(l, t.n-1) // surplus lanes repeat the last
		pos, row, head := t.from+i/group, t.row+i/group, head*group+i%group
		st.at[l], st.to[l] = row*q.Stride+head*hd, row*dst.Stride+head*hd
		lo, hi := int32(0), int32(pos+1)
		if a.Window > 0 {
			lo = max(0, hi-int32(a.Window))
		}
		allFrom, anyTo = max(allFrom, lo), max(anyTo, hi)
		anyFrom, allTo = min(anyFrom, lo), min(allTo, hi)
		st.lo[l], st.hi[l], st.mx[l], st.sum[l] = lo, hi, float32(math.Inf(-1)), 0
	}
	h.p.gatherLanes(qt, q.Mem.F32(), &st.at, hd)
	clear(o)
	kv, vv := k.Mem.F32()[head*hd:], v.Mem.F32()[head*hd:]
	st.path = pathOf(st.path[:0], spans, t.span)
	for block := anyFrom / keyBlock * keyBlock; block < anyTo; block += keyBlock {
		from, end := max(block, anyFrom), min(block+keyBlock, anyTo)
		st.path.runs(from, end, func(from2, to2 int32, row int) {
			h.p.gemm(s[(from2-from)*Width:], Width, kv[row*k.Stride:], k.Stride, 1, qt, int(to2-from2), hd, false)
		})
		h.p.softmaxBlock(s, int(end-from), a.Scale, from, &st.lo, &st.hi, &st.mx, &st.sum, &st.corr)
		if block > anyFrom {
			h.p.scaleLanes(o, hd, &st.corr)
		}
		// Before mid[0] and from mid[1] on, some lanes may not see the key.
		mid := [2]int32{min(max(from, allFrom), end), 0}
		mid[1] = max(mid[0], min(end, allTo))
		some := func(from2, to2 int32, row int) {
			h.p.accumMasked(o, hd, vv[row*v.Stride:], v.Stride, s[(from2-from)*Width:], int(to2-from2), from2, &st.lo, &st.hi)
		}
		st.path.runs(from, mid[0], some)
		st.path.runs(mid[0], mid[1], func(from2, to2 int32, row int) {
			h.p.gemm(o, Width, vv[row*v.Stride:], 1, v.Stride, s[(from2-from)*Width:], hd, int(to2-from2), true)
		})
		st.path.runs(mid[1], end, some)
	}
	for l, sum := range st.sum {
		st.corr[l] = 1 / sum
	}
	h.p.scatterLanes(dst.Mem.F32(), &st.to, t.n, o, &st.corr, hd)
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
