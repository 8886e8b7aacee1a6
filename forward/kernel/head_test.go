package kernel

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/trainerrank/engine/device"
)

// headCase is a head, rows for it, and what is asked of them.
type headCase struct {
	h    Mat
	w    *Weight
	wide [][]float64
	asks []Ask
	k    int // largest k of the asks
}

// vocab draws the size of a vocabulary: one token, parts of panels and of tiles, many tiles.
func vocab(r *rand.Rand) int {
	return among(r, 1, 2, 31, 33, headTile-1, headTile, headTile+1, 1+r.IntN(1000), 1+r.IntN(3000), 8000+r.IntN(1000))
}

// newHead draws a case with some pairs of equal rows in the head, whose logits tie exactly.
func (x *trial) newHead(h *Host, rows, vocab, in int) *headCase {
	c := &headCase{}
	d := among(x.r, dtypes...)
	size := in * d.Size()
	raw := x.mem("raw head", int64(vocab*size)).Raw()
	for i := range vocab {
		c.wide = append(c.wide, make([]float64, in))
		for j := range in {
			c.wide[i][j] = stored(x.r, d, raw[i*size+j*d.Size():])
		}
		if i > 0 && x.r.IntN(3) == 0 {
			twin := x.r.IntN(i)
			c.wide[i] = c.wide[twin]
			copy(raw[i*size:][:size], raw[twin*size:])
		}
	}
	c.w = x.pack(h, d, vocab, in, raw)
	c.h = x.normal("h", rows, in, among(x.r, 0.1, 1, 3))
	c.asks = x.asks(rows, vocab)
	for _, a := range c.asks {
		if a.Kind == AskTopK {
			c.k = max(c.k, int(a.Arg))
		}
	}
	x.what = fmt.Sprintf("%d rows, head %s [%d, %d], %d asks, k %d", rows, d, vocab, in, len(c.asks), c.k)
	return c
}

// asks draws what is asked of rows: of some nothing, of some a lot.
func (x *trial) asks(rows, vocab int) []Ask {
	var asks []Ask
	most := min(vocab, among(x.r, 1, 5, 20, 200)) // largest k of an ask
	for r := range rows {
		for range x.r.IntN(6) {
			switch x.r.IntN(3) {
			case 0:
				asks = append(asks, Ask{Row: int32(r), Kind: AskTarget, Arg: int32(among(x.r, 0, vocab-1, x.r.IntN(vocab)))})
			case 1:
				asks = append(asks, Ask{Row: int32(r), Kind: AskTopK, Arg: int32(among(x.r, 1, most, 1+x.r.IntN(most)))})
			case 2:
				asks = append(asks, Ask{Row: int32(r), Kind: AskLogits})
			}
		}
	}
	if vocab < 400 && x.r.IntN(4) == 0 {
		asks = append(asks, Ask{Row: int32(rows - 1), Kind: AskTopK, Arg: int32(vocab)})
	}
	return asks
}

// answer gives the asks of a case memory for their answers and runs them, as plan cuts the rows.
func (x *trial) answer(h *Host, plan func(*Host, int, int, func(device.Mem, int, int)), c *headCase) []Ask {
	asks := slices.Clone(c.asks)
	k := 0
	for i := range asks {
		switch a := &asks[i]; a.Kind {
		case AskTarget:
			a.Out = x.mem("logprob", 4)
		case AskTopK:
			a.Out, a.IDs = x.mem("logprobs", 4*int64(a.Arg)), x.mem("tokens", 4*int64(a.Arg))
			k = max(k, int(a.Arg))
		case AskLogits:
			a.Out = x.mem("logits", 4*int64(c.w.Out))
		}
	}
	var mu sync.Mutex // x is for one goroutine
	plan(h, c.h.Rows, 0, func(work device.Mem, from, to int) {
		part := of(asks, from, to)
		for i := range part {
			part[i].Row -= int32(from)
		}
		mu.Lock()
		scratch := x.mem("scratch", HeadBytes(to-from, k))
		mu.Unlock()
		h.Head(work, scratch, c.h.RowRange(from, to), c.w, part)
	})
	return asks
}

// headRows draws a number of rows; fewer if the head is large, since the references take long.
func (x *trial) headRows(vocab int) int {
	if vocab > 1000 {
		return 1 + x.r.IntN(5)
	}
	return among(x.r, 1, 2, 1+x.r.IntN(20), 1+x.r.IntN(HeadRows), HeadRows)
}

func TestHeadAgreesWithFloat64(t *testing.T) {
	eachHost(t, func(t *testing.T, h *Host) {
		eachTrial(t, 20, func(x *trial) {
			n := vocab(x.r)
			c := x.newHead(h, x.headRows(n), n, among(x.r, 1, 8, 17, 64))
			logits, tol := make([]float64, n), 0.0
			var logZ float64
			row := int32(-1)
			for i, a := range x.answer(h, x.blocks, c) {
				if a.Row != row { // the asks are sorted by row
					row, tol = a.Row, 0
					for j := range logits {
						var abs float64
						logits[j], abs = dot(c.h.row(int(row)), c.wide[j])
						tol = max(tol, (float64(c.w.In)+2)*unit*abs)
					}
					highest, sum := slices.Max(logits), 0.0
					for _, v := range logits {
						sum += math.Exp(v - highest)
					}
					logZ = highest + math.Log(sum)
				}
				// logprob: the error of the logit, and that of all logits in the sum, whose lanes have a few additions; then one rounding.
				probTol := func(v float64) float64 { return 2*tol + 20*unit + 2*unit*math.Abs(v) }
				switch out := a.Out.F32(); a.Kind {
				case AskTarget:
					if want := logits[a.Arg] - logZ; !(math.Abs(float64(out[0])-want) <= probTol(want)) {
						x.errorf("ask %d: logprob of token %d in row %d is %v instead of %v", i, a.Arg, row, out[0], want)
					}
				case AskLogits:
					for j, want := range logits {
						if !(math.Abs(float64(out[j])-want) <= tol) {
							x.errorf("ask %d: logit of token %d in row %d is %v instead of %v", i, j, row, out[j], want)
						}
					}
				case AskTopK:
					ids := a.IDs.I32()
					order := slices.Clone(logits)
					slices.Sort(order)
					for j, id := range ids {
						want := logits[id] - logZ
						if !(math.Abs(float64(out[j])-want) <= probTol(want)) || math.Abs(logits[id]-order[n-1-j]) > 2*tol {
							x.errorf("ask %d: rank %d of row %d is token %d with %v; its logprob is %v, that of the rank %v", i, j, row, id, out[j], want, order[n-1-j]-logZ)
						}
					}
				}
			}
		})
	})
}

// The answers for one row fit each other to the bit: targets, the largest, ties by the lower token, and logits, which are those of Linear.
func TestHeadAnswersAreConsistent(t *testing.T) {
	eachHost(t, func(t *testing.T, h *Host) {
		eachTrial(t, 16, func(x *trial) {
			n := vocab(x.r)
			c := x.newHead(h, x.headRows(n), n, among(x.r, 1, 8, 17, blockK+1))
			k := min(n, among(x.r, 1, 2, 50, n))
			rows := min(c.h.Rows, 7)
			c.h = c.h.RowRange(0, rows)
			c.asks = nil
			for r := range rows {
				c.asks = append(c.asks, Ask{Row: int32(r), Kind: AskLogits}, Ask{Row: int32(r), Kind: AskTopK, Arg: int32(k)}, Ask{Row: int32(r), Kind: AskTopK, Arg: int32((k + 1) / 2)})
			}
			x.what = fmt.Sprintf("%d rows, head [%d, %d], k %d", rows, n, c.w.In, k)
			asks := x.answer(h, x.blocks, c)
			linear := x.mat("linear", rows, n)
			x.whole(h, rows, 0, func(work device.Mem, _, _ int) { h.Linear(work, linear, c.h, c.w, device.Mem{}, false) })
			c.asks = nil
			var want []float32
			for r := range rows {
				logits, probs, ids := asks[3*r].Out.F32(), asks[3*r+1].Out.F32(), asks[3*r+1].IDs.I32()
				x.same("logits", linear, r, Mat{asks[3*r].Out, 1, n, n})
				order := make([]int32, n)
				for i := range order {
					order[i] = int32(i)
				}
				slices.SortStableFunc(order, func(a, b int32) int {
					switch la, lb := logits[a], logits[b]; {
					case la > lb:
						return -1
					case la < lb:
						return 1
					}
					return 0
				})
				if !slices.Equal(ids, order[:k]) {
					x.errorf("row %d: the first are %v instead of %v", r, ids, order[:k])
				}
				half := asks[3*r+2]
				if !slices.Equal(half.IDs.I32(), ids[:half.Arg]) || !slices.Equal(half.Out.F32(), probs[:half.Arg]) {
					x.errorf("row %d: the first %d of %d differ from the first %d", r, half.Arg, k, half.Arg)
				}
				for i, id := range ids {
					c.asks = append(c.asks, Ask{Row: int32(r), Kind: AskTarget, Arg: id})
					want = append(want, probs[i])
				}
			}
			for i, a := range x.answer(h, x.blocks, c) {
				if got := a.Out.F32()[0]; math.Float32bits(got) != math.Float32bits(want[i]) || got > 0 {
					x.errorf("row %d: token %d scores %v as a target, %v among the first", a.Row, a.Arg, got, want[i])
				}
			}
		})
	})
}

// sameAnswers compares the bits of answers to the same asks.
func (x *trial) sameAnswers(what string, got, want []Ask) {
	x.t.Helper()
	if len(got) != len(want) {
		x.errorf("%s: %d answers instead of %d", what, len(got), len(want))
		return
	}
	for i, g := range got {
		if w := want[i]; !slices.Equal(g.Out.Raw(), w.Out.Raw()) || !slices.Equal(g.IDs.Raw(), w.IDs.Raw()) {
			x.errorf("%s: ask %d (row %d, kind %d, %d): %v %v instead of %v %v", what, i, g.Row, g.Kind, g.Arg, g.Out.F32(), g.IDs.I32(), w.Out.F32(), w.IDs.I32())
			return
		}
	}
}

// of are the asks about rows [from, to).
func of(asks []Ask, from, to int) []Ask {
	var part []Ask
	for _, a := range asks {
		if int(a.Row) >= from && int(a.Row) < to {
			part = append(part, a)
		}
	}
	return part
}

func TestHeadGivesARowTheSameBitsInAnyBlock(t *testing.T) {
	eachHost(t, func(t *testing.T, h *Host) {
		eachTrial(t, 12, func(x *trial) {
			n := vocab(x.r)
			c := x.newHead(h, x.headRows(n), n, among(x.r, 8, 17, 64, blockK+1))
			rows := c.h.Rows
			want := x.answer(h, x.whole, c)
			x.sameAnswers("in blocks", x.answer(h, x.blocks, c), want)
			// A row that is not finite tells its neighbours nothing, and its own answers are NaN, the first k of equal rank by token.
			ill := x.r.IntN(rows)
			poison(x.r, c.h.row(ill))
			c.h.row(ill)[0] = float32(math.NaN())
			sick := x.answer(h, x.blocks, c)
			x.sameAnswers("before a row that is not finite", of(sick, 0, ill), of(want, 0, ill))
			x.sameAnswers("after a row that is not finite", of(sick, ill+1, rows), of(want, ill+1, rows))
			for _, a := range of(sick, ill, ill+1) {
				for i, v := range a.Out.F32() {
					if v == v || a.Kind == AskTopK && a.IDs.I32()[i] != int32(i) {
						x.errorf("of a row that is NaN, %d of kind %d is %v, tokens %v", i, a.Kind, v, a.IDs.I32())
						break
					}
				}
			}
		})
	})
}

// One logit that is NaN or infinite, in whichever part of the vocabulary: every logprob of the row is NaN, but for those under a logit
// of -Inf, which is a token that cannot come.
func TestHeadOfOddLogits(t *testing.T) {
	eachHost(t, func(t *testing.T, h *Host) {
		eachTrial(t, 80, func(x *trial) {
			n := 2 + vocab(x.r)
			odd := among(x.r, float32(math.NaN()), float32(math.Inf(1)), float32(math.Inf(-1)))
			at := among(x.r, 0, n-1, x.r.IntN(n))
			x.what = fmt.Sprintf("token %d of %d has the logit %v", at, n, odd)
			raw := x.mem("raw head", int64(n)*4).Raw()
			for i := range n {
				binary.LittleEndian.PutUint32(raw[i*4:], math.Float32bits(float32(x.r.NormFloat64())))
			}
			binary.LittleEndian.PutUint32(raw[at*4:], math.Float32bits(odd))
			c := &headCase{h: x.normal("h", 1, 1, 0), w: &Weight{Mem: x.mem("head", WeightBytes(F32, n, 1)), Out: n, In: 1}}
			c.h.row(0)[0] = 1
			if bad, err := h.PackRows(c.w, 0, raw); !bad || err != nil {
				x.errorf("pack: %t, %v", bad, err)
			}
			other, k := (at+1+x.r.IntN(n-1))%n, among(x.r, 1, 2, n)
			x.what += fmt.Sprintf(", k %d", k)
			c.asks = []Ask{{Kind: AskTarget, Arg: int32(at)}, {Kind: AskTarget, Arg: int32(other)}, {Kind: AskTopK, Arg: int32(k)}}
			a := x.answer(h, x.whole, c)
			self, rest, ids := a[0].Out.F32()[0], a[1].Out.F32()[0], a[2].IDs.I32()
			place := slices.Index(ids, int32(at)) // -1: not among the first k
			last := -1
			if k == n {
				last = n - 1
			}
			switch {
			case odd < 0:
				if !math.IsInf(float64(self), -1) || !(rest <= 0) || math.IsInf(float64(rest), -1) || place != last {
					x.errorf("its logprob is %v, another's %v, its rank %d", self, rest, place)
				}
			case self == self || place != 0:
				x.errorf("its logprob is %v, another's %v, its rank %d", self, rest, place)
			case odd != odd && rest == rest:
				x.errorf("another's logprob is %v beside a NaN", rest)
			}
		})
	})
}

func TestHeadBytesDoNotDependOnTheVocabulary(t *testing.T) {
	for _, c := range []struct {
		rows, k int
		want    int64
	}{
		{1, 0, headTile*4 + 64 + 64},
		{HeadRows, 0, HeadRows * (headTile*4 + 8 + 4)},
		{7, 5, 7*headTile*4 + 64 + 64 + 320},
	} {
		if got := HeadBytes(c.rows, c.k); got != c.want {
			t.Errorf("HeadBytes(%d, %d) = %d instead of %d", c.rows, c.k, got, c.want)
		}
	}
}
