package loader

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"strconv"
	"strings"

	"github.com/trainerrank/engine/internal/strictjson"
)

// MaxHeader is the longest header allowed, in bytes. The format sets it.
const MaxHeader = 100_000_000

const (
	prefixSize = 8  // the header's length, little-endian, comes first in a file
	maxDepth   = 64 // nesting inside a field that we do not know; nothing in the format nests deeper than 3

	// minEntry is the length of the shortest possible entry. With it a header's length bounds its number of tensors.
	minEntry = len(`"":{"dtype":"U8","shape":[],"data_offsets":[0,1]},`)
)

// Tensor is one tensor of a file: what it is, and where its bytes are. Its data is row-major, without gaps.
type Tensor struct {
	Name  string
	DType DType
	// Shape is empty for a scalar. A dimension above 2^63-1 can only stand in a tensor without elements; it is held as 2^63-1.
	Shape  []int64
	File   int   // index in [Set.Files]
	Offset int64 // where its bytes begin in the file, counted from the file's start. Need not be a multiple of anything
	Bytes  int64 // Invariant: Elements() * DType.Bits() / 8
}

// Elements is the product of the shape: 1 for a scalar.
func (t *Tensor) Elements() int64 {
	n := int64(1)
	for _, d := range t.Shape {
		n *= d // cannot overflow: ParseHeader has refused what would, and a zero ends all doubt
	}
	return n
}

// String is the tensor's name, type and shape.
func (t *Tensor) String() string {
	return fmt.Sprintf("%s %v %v", quote(t.Name), t.DType, t.Shape)
}

// Header is what a file says of its tensors.
type Header struct {
	// Tensors are all tensors, in the order of their bytes in the file; empty ones before the one that begins at the same byte.
	// Invariant: each begins where the one before ends, the first at DataStart, and the last ends with the file.
	Tensors   []*Tensor
	Metadata  map[string]string // what the file says under "__metadata__"; nil if nothing
	DataStart int64             // bytes before the tensors: 8 and the length of the header

	byName map[string]*Tensor
}

// Tensor returns the tensor with this name, and whether there is one.
func (h *Header) Tensor(name string) (*Tensor, bool) {
	t, ok := h.byName[name]
	return t, ok
}

// ParseOptions say how much to forgive. The zero value accepts what the format's reference implementation accepts, except
// for duplicate names and keys, which never mean one thing only.
type ParseOptions struct {
	// Strict also refuses what that implementation accepts against the format's description: white space before the
	// first brace, unknown fields, and zero bytes in names and metadata. For a model folder, also tensors that the
	// index does not assign to the file they are in.
	Strict bool
}

// ParseHeader reads the JSON text of a file's header: the bytes after the 8 of its length. fileSize is the size of the
// whole file in bytes; the header must account for every one of them. An error is a [*FormatError] without a path.
//
// The time is linear in the length of the header but for one sort, if the tensors are not already in order; memory is
// linear in the number of tensors. header is not kept.
func ParseHeader(header []byte, fileSize int64, opts ParseOptions) (*Header, error) {
	if len(header) > MaxHeader {
		return nil, headerTooLong(uint64(len(header)))
	}
	p := headerParser{strict: opts.Strict, h: &Header{DataStart: prefixSize + int64(len(header))}}
	if p.h.DataStart > fileSize {
		return nil, headerBeyondEnd(int64(len(header)), fileSize)
	}
	s, err := strictjson.NewScanner(header)
	if err != nil {
		return nil, p.fault("", err)
	}
	p.s = s
	// How many tensors there are is counted, not believed: a header cannot make us reserve more than it pays for in length.
	n := min(bytes.Count(header, []byte(`"data_offsets"`)), len(header)/minEntry)
	p.slab = make([]Tensor, 0, n)
	p.h.Tensors = make([]*Tensor, 0, n)
	p.h.byName = make(map[string]*Tensor, n)
	p.nameChunk = min(64<<10, len(header))

	if err := p.top(header); err != nil {
		return nil, err
	}
	if err := p.h.checkRanges(fileSize); err != nil {
		return nil, err
	}
	return p.h, nil
}

// A headerParser collects the tensors of one header. Names, shapes and tensors are cut from few large allocations, so
// that a header of a million tensors costs the collector little and nothing of the JSON text stays alive.
type headerParser struct {
	s      *strictjson.Scanner
	h      *Header
	strict bool

	hasMetadata bool
	keyBuf      []byte
	shapeBuf    []uint64

	slab      []Tensor
	dims      []int64
	names     strings.Builder
	nameChunk int
}

// fault turns what the scanner or a check found into an error of this package.
func (p *headerParser) fault(tensor string, err error) error {
	var e *strictjson.Error
	if !errors.As(err, &e) {
		return err
	}
	return &FormatError{Tensor: tensor, Offset: prefixSize + int64(e.Offset), Problem: e.Problem, Err: err}
}

func (p *headerParser) top(header []byte) error {
	switch c := p.s.Peek(); {
	case c != '{':
		return &FormatError{
			Offset: prefixSize + int64(p.s.Offset()), Problem: "the header is not a JSON object",
			Found: showByte(header, p.s.Offset()), Want: "'{'",
		}
	case p.strict && p.s.Offset() > 0:
		return &FormatError{Offset: prefixSize, Problem: "white space before the header's first brace"}
	}
	more, err := p.s.Open('{')
	for more && err == nil {
		p.s.Peek()
		at := p.s.Offset()
		if p.keyBuf, err = p.key(p.keyBuf); err != nil {
			return p.fault("", err)
		}
		if string(p.keyBuf) == "__metadata__" {
			err = p.metadata(at)
		} else {
			err = p.entry(at)
		}
		if err != nil {
			return err
		}
		more, err = p.s.More('}')
	}
	if err == nil {
		err = p.s.End()
	}
	return p.fault("", err)
}

// key takes a key and copies it into buf, where it outlives the values that follow.
func (p *headerParser) key(buf []byte) ([]byte, error) {
	key, err := p.s.Key(nil)
	return append(buf[:0], key...), err
}

func (p *headerParser) metadata(at int) error {
	if p.hasMetadata {
		return &FormatError{Offset: prefixSize + int64(at), Problem: "duplicate key \"__metadata__\""}
	}
	p.hasMetadata = true
	if p.s.Peek() == 'n' {
		_, _, err := p.s.Literal()
		return p.inMetadata(err)
	}
	more, err := p.s.Open('{')
	if more {
		p.h.Metadata = make(map[string]string)
	}
	for more && err == nil {
		p.s.Peek()
		at := p.s.Offset()
		if p.keyBuf, err = p.key(p.keyBuf); err != nil {
			break
		}
		key := string(p.keyBuf)
		if _, dup := p.h.Metadata[key]; dup {
			err = p.s.Errorf(at, "duplicate key %s", quote(key))
			break
		}
		var value []byte
		if value, err = p.s.Text(nil); err != nil {
			break
		}
		if p.strict && (strings.IndexByte(key, 0) >= 0 || bytes.IndexByte(value, 0) >= 0) {
			err = p.s.Errorf(at, "zero byte in the text of %s", quote(key))
			break
		}
		p.h.Metadata[key] = string(value)
		more, err = p.s.More('}')
	}
	return p.inMetadata(err)
}

func (p *headerParser) inMetadata(err error) error {
	err = p.fault("", err)
	if e, ok := err.(*FormatError); ok {
		e.Problem = "__metadata__ must map text to text: " + e.Problem
	}
	return err
}

// The fields of an entry.
const (
	hasDType = 1 << iota
	hasShape
	hasOffsets
	hasAll = hasDType | hasShape | hasOffsets
)

// entry takes the value of the tensor whose name is in keyBuf and stands at byte at of the header.
func (p *headerParser) entry(at int) error {
	if _, dup := p.h.byName[string(p.keyBuf)]; dup {
		return &FormatError{Tensor: string(p.keyBuf), Offset: prefixSize + int64(at), Problem: "duplicate name"}
	}
	if p.strict && bytes.IndexByte(p.keyBuf, 0) >= 0 {
		return &FormatError{Tensor: string(p.keyBuf), Offset: prefixSize + int64(at), Problem: "zero byte in the name"}
	}
	t := p.tensor()
	t.Name = p.intern(p.keyBuf)

	var seen int
	var unknown map[string]bool
	var begin, end uint64
	more, err := p.s.Open('{')
	for more && err == nil {
		p.s.Peek()
		fieldAt := p.s.Offset()
		if p.keyBuf, err = p.key(p.keyBuf); err != nil {
			break
		}
		field := 0
		switch string(p.keyBuf) {
		case "dtype":
			field = hasDType
			err = p.dtype(t)
		case "shape":
			field = hasShape
			err = p.shape(t)
		case "data_offsets":
			field = hasOffsets
			begin, end, err = p.offsets()
		default:
			name := string(p.keyBuf)
			switch {
			case p.strict:
				err = p.s.Errorf(fieldAt, "unknown field %s", quote(name))
			case unknown[name]:
				err = p.s.Errorf(fieldAt, "duplicate field %s", quote(name))
			default:
				if unknown == nil {
					unknown = make(map[string]bool)
				}
				unknown[name] = true
				err = p.s.Skip(maxDepth)
			}
		}
		if err == nil && seen&field != 0 {
			err = p.s.Errorf(fieldAt, "duplicate field %s", quote(string(p.keyBuf)))
		}
		if err != nil {
			break
		}
		seen |= field
		more, err = p.s.More('}')
	}
	if err != nil {
		return p.fault(t.Name, err)
	}
	if err := p.place(t, seen, begin, end); err != nil {
		err.Offset = prefixSize + int64(at)
		err.Tensor = t.Name
		return err
	}
	// byName must not hold a tensor that is not in Tensors, so both come last.
	p.h.byName[t.Name] = t
	p.h.Tensors = append(p.h.Tensors, t)
	return nil
}

// place checks that an entry is whole and that its range fits its shape, and sets the range.
func (p *headerParser) place(t *Tensor, seen int, begin, end uint64) *FormatError {
	if seen != hasAll {
		var missing []string
		for i, name := range []string{"dtype", "shape", "data_offsets"} {
			if seen&(1<<i) == 0 {
				missing = append(missing, name)
			}
		}
		return &FormatError{Problem: "the entry has no " + strings.Join(missing, " and no ")}
	}
	size, problem := sizeOf(t.DType, p.shapeBuf)
	switch {
	case problem != "":
		return &FormatError{Problem: problem, Found: t.DType.String() + " " + p.showShape()}
	case end < begin:
		return &FormatError{Problem: "data_offsets end before they begin", Found: fmt.Sprintf("[%d, %d]", begin, end)}
	case end-begin != size:
		return &FormatError{
			Problem: fmt.Sprintf("data_offsets do not span what %v %s takes", t.DType, p.showShape()),
			Found:   fmt.Sprintf("%d bytes", end-begin), Want: fmt.Sprintf("%d bytes", size),
		}
	case end > uint64(math.MaxInt64-p.h.DataStart):
		return &FormatError{Problem: "data_offsets beyond the end of any file", Found: fmt.Sprintf("[%d, %d]", begin, end)}
	}
	t.Offset = p.h.DataStart + int64(begin)
	t.Bytes = int64(end - begin)
	return nil
}

// sizeOf is the number of bytes of a tensor. As in the reference, the product is taken from the left and must not
// overflow on the way, even if a zero is still to come.
func sizeOf(d DType, shape []uint64) (size uint64, problem string) {
	n := uint64(1)
	for _, dim := range shape {
		high, low := bits.Mul64(n, dim)
		if high != 0 {
			return 0, "the shape's product is above 2^64-1"
		}
		n = low
	}
	high, total := bits.Mul64(n, uint64(d.Bits()))
	switch {
	case high != 0:
		return 0, "the size in bits is above 2^64-1"
	case total%8 != 0:
		return 0, fmt.Sprintf("the size, %d bits, is not a whole number of bytes", total)
	}
	return total / 8, ""
}

func (p *headerParser) dtype(t *Tensor) error {
	p.s.Peek()
	at := p.s.Offset()
	name, err := p.s.Text(nil)
	if err != nil {
		return err
	}
	d, ok := parseDType(name)
	if !ok {
		return p.s.Errorf(at, "unknown dtype %s", quote(string(name)))
	}
	t.DType = d
	return nil
}

// shape takes a list of dimensions. It leaves them in shapeBuf as they are, and in t as a caller may use them.
func (p *headerParser) shape(t *Tensor) error {
	p.shapeBuf = p.shapeBuf[:0]
	more, err := p.s.Open('[')
	for more && err == nil {
		var dim uint64
		if dim, err = p.s.Uint64(); err != nil {
			break
		}
		p.shapeBuf = append(p.shapeBuf, dim)
		more, err = p.s.More(']')
	}
	if err != nil {
		return err
	}
	n := len(p.shapeBuf)
	if cap(p.dims)-len(p.dims) < n {
		p.dims = make([]int64, 0, max(n, min(1024, 4*cap(p.slab))))
	}
	start := len(p.dims)
	for _, dim := range p.shapeBuf {
		p.dims = append(p.dims, int64(min(dim, math.MaxInt64)))
	}
	t.Shape = p.dims[start:len(p.dims):len(p.dims)]
	return nil
}

func (p *headerParser) showShape() string {
	const few = 16
	b := []byte{'['}
	for i, dim := range p.shapeBuf {
		if i > 0 {
			b = append(b, ", "...)
		}
		if i == few {
			return fmt.Sprintf("%s...] (%d dimensions)", b, len(p.shapeBuf))
		}
		b = strconv.AppendUint(b, dim, 10)
	}
	return string(append(b, ']'))
}

func (p *headerParser) offsets() (begin, end uint64, err error) {
	p.s.Peek()
	at := p.s.Offset()
	more, err := p.s.Open('[')
	var n int
	for more && err == nil {
		var v uint64
		if v, err = p.s.Uint64(); err != nil {
			break
		}
		switch n {
		case 0:
			begin = v
		case 1:
			end = v
		default:
			return 0, 0, p.s.Errorf(at, "data_offsets has more than 2 numbers")
		}
		n++
		more, err = p.s.More(']')
	}
	if err == nil && n < 2 {
		err = p.s.Errorf(at, "data_offsets has %d numbers, want 2", n)
	}
	return begin, end, err
}

// tensor is a fresh one, cut from a slab.
func (p *headerParser) tensor() *Tensor {
	if len(p.slab) == cap(p.slab) {
		p.slab = make([]Tensor, 0, 256) // the count was too low: the header spells "data_offsets" with escapes
	}
	p.slab = append(p.slab, Tensor{})
	return &p.slab[len(p.slab)-1]
}

// intern copies a name into a chunk that many names share. A Builder's text stays as it is while more is written
// behind it, and a chunk is never outgrown.
func (p *headerParser) intern(name []byte) string {
	if p.names.Cap()-p.names.Len() < len(name) {
		p.names = strings.Builder{}
		p.names.Grow(max(p.nameChunk, len(name)))
	}
	start := p.names.Len()
	p.names.Write(name)
	return p.names.String()[start:]
}

// compareRanges orders tensors by where they begin, and empty ones before the one that begins at the same byte.
func compareRanges(a, b *Tensor) int {
	return cmp.Or(cmp.Compare(a.Offset, b.Offset), cmp.Compare(a.Bytes, b.Bytes))
}

// checkRanges puts the tensors in the order of their bytes, and checks that they cover the data exactly once.
func (h *Header) checkRanges(fileSize int64) error {
	if !slices.IsSortedFunc(h.Tensors, compareRanges) {
		slices.SortFunc(h.Tensors, func(a, b *Tensor) int {
			return cmp.Or(compareRanges(a, b), strings.Compare(a.Name, b.Name)) // so that equal ranges are named in the same order each time
		})
	}
	end := h.DataStart
	for i, t := range h.Tensors {
		if t.Offset == end {
			end += t.Bytes
			continue
		}
		e := &FormatError{
			Tensor: t.Name, Offset: t.Offset,
			Found: fmt.Sprintf("data_offsets [%d, %d]", t.Offset-h.DataStart, t.Offset+t.Bytes-h.DataStart),
			Want:  fmt.Sprintf("a range that begins at %d", end-h.DataStart),
		}
		switch {
		case t.Offset < end:
			before := h.Tensors[i-1]
			e.Problem = fmt.Sprintf("its bytes overlap those of tensor %s, [%d, %d]", quote(before.Name),
				before.Offset-h.DataStart, before.Offset+before.Bytes-h.DataStart)
		case i == 0:
			e.Problem = fmt.Sprintf("%d bytes before the first tensor belong to none", t.Offset-end)
		default:
			e.Problem = fmt.Sprintf("%d bytes between tensor %s and it belong to none", t.Offset-end, quote(h.Tensors[i-1].Name))
		}
		return e
	}
	switch {
	case end > fileSize:
		return &FormatError{
			Offset: fileSize, Problem: fmt.Sprintf("the file is truncated by %d bytes", end-fileSize), Missing: end - fileSize,
			Found: fmt.Sprintf("%d bytes", fileSize), Want: fmt.Sprintf("%d bytes", end), Hint: truncatedHint,
		}
	case end < fileSize:
		return &FormatError{
			Offset: end, Problem: fmt.Sprintf("%d bytes after the last tensor", fileSize-end),
			Found: fmt.Sprintf("%d bytes", fileSize), Want: fmt.Sprintf("%d bytes", end),
		}
	}
	return nil
}

func headerTooLong(n uint64) *FormatError {
	return &FormatError{
		Problem: "the header is too long", Found: fmt.Sprintf("%d bytes", n), Want: fmt.Sprintf("at most %d bytes", MaxHeader),
	}
}

func headerBeyondEnd(n, fileSize int64) *FormatError {
	return &FormatError{
		Problem: "the header does not fit into the file", Found: fmt.Sprintf("a header of %d bytes in a file of %d bytes", n, fileSize),
		Want: fmt.Sprintf("at least %d bytes", prefixSize+n), Missing: prefixSize + n - fileSize,
	}
}

func showByte(b []byte, at int) string {
	if at >= len(b) {
		return "nothing"
	}
	return fmt.Sprintf("byte 0x%02x", b[at])
}
