package kernel

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/trainerrank/engine/device"
)

// grow draws a forest of up to n spans, in the order in which they are packed: parents before children. Some are shorter than
// a tile, some longer than a block of keys, and they begin anywhere in one.
func grow(r *rand.Rand, n, most int) (spans []Span, rows int) {
	for i := range n {
		s := Span{Parent: -1, Offset: rows}
		if i > 0 && r.IntN(6) > 0 {
			s.Parent = among(r, i-1, r.IntN(i))
			s.Start = spans[s.Parent].End
		}
		s.End = s.Start + min(most, among(r, 1, 2, 1+r.IntN(10), keyBlock-1, keyBlock, keyBlock+1, 1+r.IntN(3*keyBlock)))
		rows += s.End - s.Start
		spans = append(spans, s)
	}
	return spans, rows
}

// describe prints spans for a message.
func describe(spans []Span) string {
	var b strings.Builder
	for _, s := range spans {
		fmt.Fprintf(&b, "{%d: %d-%d @%d}", s.Parent, s.Start, s.End, s.Offset)
	}
	return b.String()
}

// seen are the packed rows of the keys that a position of span s sees, in order of position.
func seen(spans []Span, s, pos, window int) []int {
	var rows []int
	for p := pos; p >= 0 && (window == 0 || p > pos-window); p-- {
		for p < spans[s].Start {
			s = spans[s].Parent
		}
		rows = append(rows, spans[s].Offset+p-spans[s].Start)
	}
	for i, j := 0, len(rows)-1; i < j; i, j = i+1, j-1 {
		rows[i], rows[j] = rows[j], rows[i]
	}
	return rows
}

// where finds the span and the position of a packed row.
func where(spans []Span, row int) (span, pos int) {
	for s, sp := range spans {
		if row >= sp.Offset && row < sp.Offset+sp.End-sp.Start {
			return s, sp.Start + row - sp.Offset
		}
	}
	panic("row in no span")
}

// shape draws the shape of an attention layer.
func (x *trial) shape() Attention {
	group, hd := among(x.r, 1, 2, 3, 8), among(x.r, 12, 16, 31, 64, 80, 128)
	if x.r.IntN(12) == 0 {
		hd = 256
	}
	a := Attention{KVHeads: among(x.r, 1, 1, 2, 3), HeadDim: hd, Scale: float32(1 / math.Sqrt(float64(hd)))}
	a.Heads = group * a.KVHeads
	a.Window = among(x.r, 0, 0, 1, 2, keyBlock-1, keyBlock, keyBlock+1, 1+x.r.IntN(200))
	return a
}

// some is the range of rows [from, to) out of n: all of them, or a part.
func (x *trial) some(n int) (from, to int) {
	if x.r.IntN(2) == 0 {
		return 0, n
	}
	from = x.r.IntN(n)
	return from, from + 1 + x.r.IntN(n-from)
}

// attend runs rows [first, first+n) of q, as plan cuts them, and returns their output.
func (x *trial) attend(h *Host, plan func(*Host, int, int, func(device.Mem, int, int)), q, k, v Mat, first, n int, spans []Span, a Attention) Mat {
	dst := x.mat("dst", n, q.Cols)
	plan(h, n, a.HeadDim, func(work device.Mem, from, to int) {
		// A block may see the keys of its own rows and of rows before it; the others need not be there yet.
		h.Attend(work, dst.RowRange(from, to), Mat{}, q.RowRange(first+from, first+to), upTo(k, first+to), upTo(v, first+to), first+from, spans, a)
	})
	return dst
}

// upTo is the matrix of the first n rows of m, without what comes after them.
func upTo(m Mat, n int) Mat {
	return Mat{m.Mem.Slice(0, int64((n-1)*m.Stride+m.Cols)*4), n, m.Cols, m.Stride}
}

func TestAttendAgreesWithFloat64(t *testing.T) {
	eachHost(t, func(t *testing.T, h *Host) {
		eachTrial(t, 16, func(x *trial) {
			a := x.shape()
			spans, n := grow(x.r, 1+x.r.IntN(7), 8192/a.HeadDim)
			from, to := x.some(n)
			x.what = fmt.Sprintf("%+v, rows [%d, %d) of %d, spans %s", a, from, to, n, describe(spans))
			q, k := x.normal("q", n, a.Heads*a.HeadDim, 2), x.normal("k", to, a.KVHeads*a.HeadDim, 1)
			v := x.normal("v", to, a.KVHeads*a.HeadDim, 1)
			dst := x.attend(h, x.blocks, q, k, v, from, to-from, spans, a)

			want, tols := make([]float64, q.Cols), make([]float64, q.Cols)
			last := -1
			x.near("dst", dst, func(i, j int) (float64, float64) {
				if i != last {
					last = i
					s, pos := where(spans, from+i)
					keys := seen(spans, s, pos, a.Window)
					for head := range a.Heads {
						reference(want[head*a.HeadDim:], tols[head*a.HeadDim:], q.row(from + i)[head*a.HeadDim:][:a.HeadDim], k, v, keys, head/(a.Heads/a.KVHeads), a)
					}
				}
				return want[j], tols[j]
			})
		})
	})
}

// reference is the attention of one query over the keys of one head: its output and the tolerance for it.
func reference(out, tols []float64, q []float32, k, v Mat, keys []int, head int, a Attention) {
	scores := make([]float64, len(keys))
	highest, off, size := math.Inf(-1), 0.0, 0.0
	wide := make([]float64, a.HeadDim)
	for i, r := range keys {
		for d, kv := range k.row(r)[head*a.HeadDim:][:a.HeadDim] {
			wide[d] = float64(kv)
		}
		s, abs := dot(q, wide)
		scores[i] = s * float64(a.Scale)
		highest = max(highest, scores[i])
		off = max(off, (float64(a.HeadDim)+2)*unit*abs*float64(a.Scale))
		size = max(size, math.Abs(scores[i]))
	}
	var sum float64
	for i := range scores {
		scores[i] = math.Exp(scores[i] - highest)
		sum += scores[i]
	}
	// A weight is off by the error of its score and of the maximum, by the rounding of their difference, and by a few units
	// for exp; it is then multiplied once per block and added, as is the sum, once per key.
	rel := 2*off + 4*unit*size + unit*(2*float64(len(keys))+4*float64(len(keys))/keyBlock+20)
	for d := range a.HeadDim {
		var o, abs float64
		for i, r := range keys {
			t := scores[i] / sum * float64(v.row(r)[head*a.HeadDim+d])
			o += t
			abs += math.Abs(t)
		}
		out[d], tols[d] = o, rel*abs
	}
}

// Other blocks, other workers: the same bits as all rows at once.
func TestAttendGivesARowTheSameBitsInAnyBlock(t *testing.T) {
	eachHost(t, func(t *testing.T, h *Host) {
		eachTrial(t, 12, func(x *trial) {
			a := x.shape()
			spans, n := grow(x.r, 1+x.r.IntN(7), 8192/a.HeadDim)
			x.what = fmt.Sprintf("%+v, %d rows, spans %s", a, n, describe(spans))
			q, k := x.normal("q", n, a.Heads*a.HeadDim, 2), x.normal("k", n, a.KVHeads*a.HeadDim, 1)
			v := x.normal("v", n, a.KVHeads*a.HeadDim, 1)
			want := x.attend(h, x.whole, q, k, v, 0, n, spans, a)
			x.same("in blocks", x.attend(h, x.blocks, q, k, v, 0, n, spans, a), 0, want)
			i := x.r.IntN(n)
			x.same(fmt.Sprintf("row %d", i), want, i, x.attend(h, x.whole, q, k, v, i, 1, spans, a))
		})
	})
}

// One request, cut into spans at random places and packed among others: the same bits as in one piece.
func TestAttendDoesNotSeeHowARequestIsCut(t *testing.T) {
	eachHost(t, func(t *testing.T, h *Host) {
		eachTrial(t, 16, func(x *trial) {
			a := x.shape()
			n := 1 + x.r.IntN(min(300, 16384/a.HeadDim))
			q, k := x.normal("q", n, a.Heads*a.HeadDim, 2), x.normal("k", n, a.KVHeads*a.HeadDim, 1)
			v := x.normal("v", n, a.KVHeads*a.HeadDim, 1)
			want := x.attend(h, x.whole, q, k, v, 0, n, []Span{{Parent: -1, End: n}}, a)

			var spans []Span
			mine, rows := -1, 0 // the last span of the request, packed rows so far
			var place []int     // packed row of each position of the request
			stranger := func() {
				s := Span{Parent: -1, Offset: rows}
				if len(spans) > 0 && x.r.IntN(3) > 0 {
					s.Parent = x.r.IntN(len(spans))
					s.Start = spans[s.Parent].End
				}
				s.End = s.Start + 1 + x.r.IntN(40)
				rows += s.End - s.Start
				spans = append(spans, s)
			}
			pieces := 1 + x.r.IntN(5)
			for start, i := 0, 0; start < n; i++ {
				for x.r.IntN(2) == 0 {
					stranger()
				}
				end := n
				if i+1 < pieces {
					end = start + 1 + x.r.IntN(n-start)
				}
				spans = append(spans, Span{mine, start, end, rows})
				mine = len(spans) - 1
				for range end - start {
					place = append(place, rows)
					rows++
				}
				start = end
			}
			stranger()
			x.what = fmt.Sprintf("%+v, %d positions, spans %s", a, n, describe(spans))
			q2, k2, v2 := x.mat("q2", rows, q.Cols), x.mat("k2", rows, k.Cols), x.mat("v2", rows, v.Cols)
			for _, m := range []Mat{q2, k2, v2} {
				for i := range rows {
					poison(x.r, m.row(i)) // strangers
				}
			}
			for i, p := range place {
				copy(q2.row(p), q.row(i))
				copy(k2.row(p), k.row(i))
				copy(v2.row(p), v.row(i))
			}
			got := x.attend(h, x.blocks, q2, k2, v2, 0, rows, spans, a)
			for i, p := range place {
				x.same(fmt.Sprintf("position %d", i), want, i, got.RowRange(p, p+1))
			}
		})
	})
}

// What is not finite in a token's key or value must not change a bit of a position that may not see the token.
func TestAttendKeepsWhatIsNotFiniteFromWhoMayNotSeeIt(t *testing.T) {
	eachHost(t, func(t *testing.T, h *Host) {
		eachTrial(t, 24, func(x *trial) {
			a := x.shape()
			spans, n := grow(x.r, 1+x.r.IntN(7), 8192/a.HeadDim)
			ill := x.r.IntN(n)
			q, k := x.normal("q", n, a.Heads*a.HeadDim, 1), x.normal("k", n, a.KVHeads*a.HeadDim, 1)
			v := x.normal("v", n, a.KVHeads*a.HeadDim, 1)
			want := x.attend(h, x.whole, q, k, v, 0, n, spans, a)
			which := among(x.r, "key", "value", "query")
			odd := among(x.r, float32(math.NaN()), float32(math.Inf(1)), float32(math.Inf(-1)))
			x.what = fmt.Sprintf("%+v, %d rows, %s of row %d is %v, spans %s", a, n, which, ill, odd, describe(spans))
			sick := map[string]Mat{"key": k, "value": v, "query": q}[which].row(ill)
			for j := range sick {
				sick[j] = odd
			}
			got := x.attend(h, x.blocks, q, k, v, 0, n, spans, a)
			for i := range n {
				s, pos := where(spans, i)
				sees := i == ill
				if which != "query" {
					sees = false
					for _, r := range seen(spans, s, pos, a.Window) {
						sees = sees || r == ill
					}
				}
				if !sees {
					x.same(fmt.Sprintf("row %d, which does not see it", i), want, i, got.RowRange(i, i+1))
				} else if odd != odd && got.row(i)[0] == got.row(i)[0] {
					x.errorf("row %d sees the NaN and yet is %v", i, got.row(i)[0])
				}
			}
		})
	})
}

// Scores so large that exp would overflow without the running maximum, rising and falling from block to block.
func TestAttendOfLargeScores(t *testing.T) {
	eachHost(t, func(t *testing.T, h *Host) {
		eachTrial(t, 8, func(x *trial) {
			a := Attention{Heads: 2, KVHeads: 1, HeadDim: 16, Scale: 1}
			n := 3*keyBlock + 1 + x.r.IntN(keyBlock)
			spans := []Span{{Parent: -1, End: n}}
			x.what = fmt.Sprintf("%d rows", n)
			q, k, v := x.normal("q", n, 32, 1), x.normal("k", n, 16, 0), x.mat("v", n, 16)
			best := make([]int, n) // the key that takes all the weight, as its score is 100 above the others
			top := -1
			order := x.r.Perm(n)
			for i := range n {
				q.row(i)[0], q.row(i)[16] = 1, 1
				k.row(i)[0] = float32(100 * (order[i] - n/2))
				for j := range v.row(i) {
					v.row(i)[j] = float32(i + j)
				}
				if top < 0 || order[i] > order[top] {
					top = i
				}
				best[i] = top
			}
			dst := x.attend(h, x.blocks, q, k, v, 0, n, spans, a)
			x.near("dst", dst, func(i, j int) (float64, float64) { return float64(best[i] + j%16), 0 })
		})
	})
}
