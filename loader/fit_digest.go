package loader

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"hash"
	"path"
)

// planVersion changes whenever the same arguments make another plan.
const planVersion = "2"

// Digest identifies a load. Ranks that load together must have the same: what differs would show as a collective that
// never ends. It covers the files, their order, headers and tensors, which of them are kept, stay or may be cut, all
// parameters and costs, and the plan that came of them.
type Digest struct {
	Sum   string // of all items, hexadecimal
	Items []DigestItem
}

// DigestItem is one thing that must be the same on all ranks: a number or a sum over many.
type DigestItem struct{ Name, Value string }

// Diff names the first item in which two digests differ, with both values; an item that only one of them has is "none" in
// the other. ok is false if they do not differ.
func (d Digest) Diff(o Digest) (item DigestItem, other string, ok bool) {
	for i := range max(len(d.Items), len(o.Items)) {
		switch {
		case i >= len(d.Items):
			return DigestItem{o.Items[i].Name, "none"}, o.Items[i].Value, true
		case i >= len(o.Items) || d.Items[i].Name != o.Items[i].Name:
			return d.Items[i], "none", true
		case d.Items[i].Value != o.Items[i].Value:
			return d.Items[i], o.Items[i].Value, true
		}
	}
	return DigestItem{}, "", false
}

// Digest is computed anew with each call, in time linear in the number of tensors.
func (p *FitPlan) Digest() Digest {
	var d Digest
	add := func(name string, value any) { d.Items = append(d.Items, DigestItem{name, fmt.Sprint(value)}) }
	q := &p.params
	add("planner", planVersion)
	add("classic mode", q.Classic)
	add("ranks", q.Group)
	add("files", len(p.Files))
	add("budget", q.Budget)
	add("queue size asked for", q.QueueSize)
	add("queue size", p.QueueSize)
	add("chunk limit", q.MaxChunk)
	add("accumulate resident", q.AccumulateResident)
	add("yield clone", q.YieldClone)
	add("preallocated", q.Preallocated)
	add("alignment", q.Align)
	add("depth first", q.DepthFirst)
	add("copier's fixed bytes", q.Copier.Fixed)
	add("copier's bytes per chunk", q.Copier.PerChunk)
	h := newHasher()
	for i := range p.Files {
		f := &p.Files[i]
		base := quote(path.Base(f.Path))
		add(fmt.Sprintf("file %d", i+1), base)
		name := fmt.Sprintf("file %d (%s)", i+1, base)
		add(name+": place in the list", f.Index)
		add(name+": header", f.Header)
		add(name+": copier's multiplier", q.Copier.Multiplier[f.Index])
		h.reset()
		h.tensors(&f.FileStats, func(t *TensorStats) { h.text(t.Name) })
		add(name+": kept tensors", fmt.Sprintf("%d bytes, sum %s", f.Kept, h.sum()))
		h.reset()
		h.tensors(&f.FileStats, func(t *TensorStats) { h.bool(t.Resident) })
		add(name+": resident tensors", fmt.Sprintf("%d bytes, sum %s", f.Resident, h.sum()))
		h.reset()
		h.tensors(&f.FileStats, func(t *TensorStats) { h.number(t.Atom) })
		add(name+": pieces", fmt.Sprintf("%d bytes, sum %s", f.Atom, h.sum()))
		h.reset()
		h.number(f.Budget)
		for _, c := range f.Chunks {
			h.number(int64(c.First))
			h.number(int64(c.Last))
			h.number(c.Skip)
			h.number(c.Stop)
			h.number(c.Bytes)
			h.bool(c.HandOver)
		}
		add(name+": chunks", fmt.Sprintf("%d, sum %s", len(f.Chunks), h.sum()))
	}
	h.reset()
	for _, item := range d.Items {
		h.text(item.Name)
		h.text(item.Value)
	}
	d.Sum = h.sum()
	return d
}

// tensors adds something of each tensor of a file, and what tells the tensors apart.
func (h *hasher) tensors(f *FileStats, add func(*TensorStats)) {
	h.number(f.Span)
	h.number(f.Largest)
	for i := range f.Tensors {
		t := &f.Tensors[i]
		h.number(t.Offset)
		h.number(t.Bytes)
		add(t)
	}
}

// hasher makes short hexadecimal sums of values, so that equal sums mean equal values.
type hasher struct {
	h   hash.Hash
	buf []byte
}

func newHasher() *hasher { return &hasher{h: sha256.New(), buf: make([]byte, 0, 64<<10)} }

func (h *hasher) reset() {
	h.h.Reset()
	h.buf = h.buf[:0]
}

func (h *hasher) number(n int64) {
	h.spill(8)
	h.buf = binary.LittleEndian.AppendUint64(h.buf, uint64(n))
}

func (h *hasher) text(s string) {
	h.number(int64(len(s)))
	h.spill(len(s))
	h.buf = append(h.buf, s...)
}

func (h *hasher) bool(b bool) {
	n := int64(0)
	if b {
		n = 1
	}
	h.number(n)
}

// spill makes room for n more bytes.
func (h *hasher) spill(n int) {
	if len(h.buf)+n > cap(h.buf) {
		h.h.Write(h.buf)
		h.buf = h.buf[:0]
	}
}

func (h *hasher) sum() string {
	h.h.Write(h.buf)
	h.buf = h.buf[:0]
	return hex.EncodeToString(h.h.Sum(nil)[:16])
}
