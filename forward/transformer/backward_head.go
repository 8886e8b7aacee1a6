package transformer

import (
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/forward/kernel"
)

// wish is a packed row with cotangents.
type wish struct {
	place
	row int32
}

// head takes the gradient from the outputs to behind the last layer: bp.dx. Rows without cotangents are zero.
func (bp *backpass) head() {
	mark := bp.arena.Mark()
	defer bp.arena.Pop(mark)
	hidden, base := bp.spec.Hidden, bp.base != nil
	bp.eachBlock(func(l *lane, from, to int) { l.Clear(bp.dx.RowRange(from, to)) })
	rows, scored := bp.rows, bp.scored
	// What the base model's gradients are products of, one row after the other.
	xs, hs, ds := bp.full(base, hidden), bp.full(base, hidden), bp.full(base, hidden)
	type part struct{ from, to int }
	var parts []part
	for _, of := range []part{{0, scored}, {scored, len(rows)}} {
		if n := of.to - of.from; n > 0 {
			b := cut(n, kernel.HeadRows, bp.be.Threads())
			for i := range b.count {
				from, to := b.at(i)
				parts = append(parts, part{of.from + from, of.from + to})
			}
		}
	}
	run := func(l *lane, from, to int, rows []wish) { // rows [from, to), or none if only memory is taken
		n := to - from
		packed := make([]int32, n)
		for i, w := range rows {
			packed[i] = w.row
		}
		x, h, d := l.own(xs, from, to, hidden), l.own(hs, from, to, hidden), l.own(ds, from, to, hidden)
		l.CopyRows(x, bp.x, packed)
		bp.norm(l, h, x, bp.finalNorm)
		logZ, wants := bp.wants(rows)
		scratch := l.arena.Scratch(kernel.HeadGradBytes(n))
		if len(wants) > 0 {
			l.HeadGrad(l.work, scratch, d, h, bp.headWeight(), logZ, wants)
		} else {
			l.Clear(d)
		}
		bp.addHidden(l, d, rows)
		t := l.mat(n, hidden)
		bp.normGrad(l, t, d, x, bp.finalNorm)
		l.PlaceRows(bp.dx, t, packed)
	}
	widest := min(kernel.HeadRows, bp.dx.Rows)
	bp.each(len(parts), func(l *lane) { run(l, 0, widest, nil) }, func(l *lane, i int) {
		run(l, parts[i].from, parts[i].to, rows[parts[i].from:parts[i].to])
	})
	if !base {
		return
	}
	dw := &bp.base.head
	if bp.spec.Tied {
		dw = &bp.base.embed
	}
	bp.tasks = append(bp.tasks, func(l *lane) {
		l.NormWeightGrad(bp.base.finalNorm, ds.RowRange(0, len(rows)), xs.RowRange(0, len(rows)), bp.spec.NormEps)
	})
	tile := func(l *lane, panel int) {
		scratch := l.arena.Scratch(kernel.HeadGradBytes(widest))
		for from := 0; from < scored; from += kernel.HeadRows {
			to := min(from+kernel.HeadRows, scored)
			logZ, wants := bp.wants(rows[from:to])
			l.HeadWeightGrad(l.work, scratch, dw, panel, hs.RowRange(from, to), bp.headWeight(), logZ, wants, from > 0)
		}
	}
	bp.run()
	panels := (bp.spec.Vocab + kernel.Width - 1) / kernel.Width
	bp.each((panels+kernel.HeadPanels-1)/kernel.HeadPanels, func(l *lane) { l.arena.Scratch(kernel.HeadGradBytes(widest)) },
		func(l *lane, i int) { tile(l, i*kernel.HeadPanels) })
}

// wishes lists the packed rows with cotangents, first those of labels or logits, then the others.
func (bp *backpass) wishes() (rows []wish, scored int) {
	var rest []wish
	for i, s := range bp.b.Spans {
		for pos := s.Start; pos < s.End; pos++ {
			head, any := false, false
			for _, r := range s.Rows {
				h, hid := bp.cotangents(r, pos)
				head, any = head || h, any || hid
			}
			w := wish{place{i, pos}, int32(s.Offset + pos - s.Start)}
			if head {
				rows = append(rows, w)
			} else if any {
				rest = append(rest, w)
			}
		}
	}
	return append(rows, rest...), len(rows)
}

// cotangents says whether request r has cotangents at a position that are not zero: of labels or logits, and of the hidden state.
func (bp *backpass) cotangents(r, pos int) (head, hidden bool) {
	in, g := bp.b.Requests[r], &bp.grads[r]
	if len(g.TargetLogprobs) > 0 {
		w := in.Width()
		for j := pos * w; j < (pos+1)*w; j++ {
			head = head || in.Targets[j] != forward.IgnoreLabel && g.TargetLogprobs[j] != 0
		}
	}
	return head || !zero(row(g.Logits, pos, bp.spec.Vocab)), !zero(row(g.HiddenStates, pos, bp.spec.Hidden))
}

// row is row i of values with n in each, or nil if there are none.
func row(values []float32, i, n int) []float32 {
	if len(values) == 0 {
		return nil
	}
	return values[i*n : (i+1)*n]
}

func zero(values []float32) bool {
	for _, v := range values {
		if v != 0 {
			return false
		}
	}
	return true
}

// wants is what the head's backward is told about rows: their normalisers and cotangents.
func (bp *backpass) wants(rows []wish) (logZ []float64, wants []kernel.AskGrad) {
	logZ = make([]float64, len(rows))
	for i, w := range rows {
		if bp.g.logZ.Real() {
			logZ[i] = bp.g.logZ.F64()[w.row]
		}
		for _, r := range bp.b.Spans[w.span].Rows {
			in, g := bp.b.Requests[r], &bp.grads[r]
			if len(g.TargetLogprobs) > 0 {
				n := in.Width()
				for j := w.pos * n; j < (w.pos+1)*n; j++ {
					if in.Targets[j] != forward.IgnoreLabel && g.TargetLogprobs[j] != 0 {
						wants = append(wants, kernel.AskGrad{Row: int32(i), Label: in.Targets[j], Factor: g.TargetLogprobs[j]})
					}
				}
			}
			if c := row(g.Logits, w.pos, bp.spec.Vocab); !zero(c) {
				wants = append(wants, kernel.AskGrad{Row: int32(i), Logits: c})
			}
		}
	}
	return logZ, wants
}

// addHidden adds the cotangents of hidden states to the gradients of rows.
func (bp *backpass) addHidden(l *lane, d kernel.Mat, rows []wish) {
	for i, w := range rows {
		for _, r := range bp.b.Spans[w.span].Rows {
			if c := row(bp.grads[r].HiddenStates, w.pos, bp.spec.Hidden); c != nil {
				l.AddRow(d, i, c)
			}
		}
	}
}

// embedding is the gradient of the embedding, from that before the first layer.
func (bp *backpass) embedding() {
	if bp.base == nil || bp.idle {
		return
	}
	const step = 64
	n := bp.spec.Hidden
	bp.be.Each((n+step-1)/step, func(_, i int) {
		bp.be.EmbedGrad(&bp.base.embed, bp.dx, bp.b.Tokens, float32(bp.spec.EmbedScale), i*step, min((i+1)*step, n))
	})
}
