package strictjson

import (
	"math"
	"slices"
	"strconv"
	"strings"
)

// Kind is what a [Value] is.
type Kind uint8

// The kinds. The zero Value is Missing, which is what [Value.Get] returns for a key that is not there; it never occurs
// in a parsed tree.
const (
	Missing Kind = iota
	Null
	Bool
	Number
	String
	Array
	Object
)

// String is the kind's name in a sentence: "an object", "a number".
func (k Kind) String() string {
	switch k {
	case Missing:
		return "nothing"
	case Null:
		return "null"
	case Bool:
		return "true or false"
	case Number:
		return "a number"
	case String:
		return "a string"
	case Array:
		return "a list"
	case Object:
		return "an object"
	}
	return "an unknown kind"
}

// MaxDepth is the deepest nesting that [Parse] can be asked to allow. Parse calls itself once per level; this bounds
// its stack to a few megabytes.
const MaxDepth = 10_000

// Value is one JSON value in a parsed text. It is small, and cheap to copy. The zero Value is Missing: it has no
// members, no items, and converts to nothing.
type Value struct {
	src        *source
	node       *node // Array, Object, and String with escapes; nil for the others
	start, end int   // where the value stands in src.text, quotes and brackets included
	kind       Kind
	truth      bool
}

// source is the parsed text. All values of a tree share it, and their texts are cut from it.
type source struct{ text string }

// node is what only some values have.
type node struct {
	text    string // the unescaped string
	items   []Value
	members []Member
	index   map[string]int // key to position in members; nil when the members are few enough to look through
}

// Member is one key and value of an object.
type Member struct {
	Key       string // unescaped
	KeyOffset int    // byte offset of the key's opening quote
	Value     Value
}

// few is the number of members up to which looking through them is no slower than a map.
const few = 8

// Parse reads one JSON value, alone in text, with objects and lists nested at most maxDepth deep (a lone number has
// depth 0; at most [MaxDepth] is allowed). The tree takes up to about 50 times the memory of text (a list of empty lists is the worst). An error is an
// [*Error]. text may be reused after Parse returns.
func Parse(text []byte, maxDepth int) (Value, error) {
	s, err := NewScanner(text)
	if err != nil {
		return Value{}, err
	}
	p := parser{s: s, src: &source{string(text)}, maxDepth: min(maxDepth, MaxDepth)}
	v, err := p.value(0)
	if err != nil {
		return Value{}, err
	}
	if err := s.End(); err != nil {
		return Value{}, err
	}
	return v, nil
}

type parser struct {
	s        *Scanner
	src      *source
	scratch  []byte
	maxDepth int
}

func (p *parser) value(depth int) (Value, error) {
	c := p.s.Peek()
	v := Value{src: p.src, start: p.s.pos}
	var err error
	switch {
	case c == '{' || c == '[':
		if depth >= p.maxDepth {
			return Value{}, p.s.Errorf(v.start, "nested deeper than %d", p.maxDepth)
		}
		v.node = new(node)
		if c == '{' {
			v.kind = Object
			err = p.members(v.node, depth+1)
		} else {
			v.kind = Array
			err = p.items(v.node, depth+1)
		}
	case c == '"':
		var text string
		var escaped bool
		v.kind = String
		if text, escaped, err = p.text(); escaped {
			v.node = &node{text: text}
		}
	case c == '-' || '0' <= c && c <= '9':
		v.kind = Number
		_, err = p.s.Number()
	default:
		v.kind, v.truth, err = p.s.Literal()
	}
	v.end = p.s.pos
	return v, err
}

// text takes a string, and says whether it had to be built because of escapes.
func (p *parser) text() (text string, escaped bool, err error) {
	start := p.s.pos
	b, err := p.s.Text(p.scratch)
	if err != nil {
		return "", false, err
	}
	// A string without escapes is as long as what stands between its quotes; each escape makes it shorter.
	if len(b) == p.s.pos-start-2 {
		return p.src.text[start+1 : p.s.pos-1], false, nil
	}
	p.scratch = b
	return string(b), true, nil
}

func (p *parser) items(n *node, depth int) error {
	more, err := p.s.Open('[')
	for more && err == nil {
		var v Value
		if v, err = p.value(depth); err != nil {
			return err
		}
		n.items = append(n.items, v)
		more, err = p.s.More(']')
	}
	return err
}

func (p *parser) members(n *node, depth int) error {
	more, err := p.s.Open('{')
	for more && err == nil {
		if p.s.Peek() != '"' {
			return p.s.wanted("a key in quotes")
		}
		m := Member{KeyOffset: p.s.pos}
		if m.Key, _, err = p.text(); err != nil {
			return err
		}
		if p.s.Peek() != ':' {
			return p.s.wanted("':' after the key")
		}
		p.s.pos++
		if at := n.find(m.Key); at >= 0 {
			line, column := place(p.src.text, n.members[at].KeyOffset)
			return p.s.Errorf(m.KeyOffset, "duplicate key %s, first at line %d, column %d", quote(m.Key), line, column)
		}
		if m.Value, err = p.value(depth); err != nil {
			return err
		}
		n.add(m)
		more, err = p.s.More('}')
	}
	return err
}

func (n *node) add(m Member) {
	n.members = append(n.members, m)
	switch {
	case n.index != nil:
		n.index[m.Key] = len(n.members) - 1
	case len(n.members) > few:
		n.index = make(map[string]int, 2*len(n.members))
		for i, m := range n.members {
			n.index[m.Key] = i
		}
	}
}

func (n *node) find(key string) int {
	if n.index != nil {
		if i, ok := n.index[key]; ok {
			return i
		}
		return -1
	}
	return slices.IndexFunc(n.members, func(m Member) bool { return m.Key == key })
}

// Kind is what the value is.
func (v Value) Kind() Kind { return v.kind }

// Offset is the number of bytes before the value in its text.
func (v Value) Offset() int { return v.start }

// Raw is the value as it stands in its text: a number's digits, a string with its quotes and escapes.
func (v Value) Raw() string {
	if v.src == nil {
		return ""
	}
	return v.src.text[v.start:v.end]
}

// Get returns the member with this very key, and whether there is one. Anything but an object has no members. A member
// that is null is there.
func (v Value) Get(key string) (Value, bool) {
	if v.kind == Object {
		if i := v.node.find(key); i >= 0 {
			return v.node.members[i].Value, true
		}
	}
	return Value{}, false
}

// Members are an object's members in the order of the text; nil for any other kind. Not to be changed.
func (v Value) Members() []Member {
	if v.kind != Object {
		return nil
	}
	return v.node.members
}

// Items are a list's values; nil for any other kind. Not to be changed.
func (v Value) Items() []Value {
	if v.kind != Array {
		return nil
	}
	return v.node.items
}

// Text is a string, unescaped. The error says what else the value is.
func (v Value) Text() (string, error) {
	switch {
	case v.kind != String:
		return "", v.not("a string")
	case v.node != nil:
		return v.node.text, nil
	}
	return v.src.text[v.start+1 : v.end-1], nil
}

// Bool is true or false. The error says what else the value is.
func (v Value) Bool() (bool, error) {
	if v.kind != Bool {
		return false, v.not("true or false")
	}
	return v.truth, nil
}

// Int64 is a number that is written as an integer and fits. 1.0, 1e3 and -0 are refused: whoever writes them thinks of
// floating point, and a reader that rounds would agree with none of its neighbours.
func (v Value) Int64() (int64, error) {
	if err := v.integer(); err != nil {
		return 0, err
	}
	n, err := strconv.ParseInt(v.Raw(), 10, 64)
	if err != nil {
		return 0, v.Errorf("%s does not fit in 64 bits with a sign", quote(v.Raw()))
	}
	return n, nil
}

// Uint64 is Int64 for 0 to 2^64-1.
func (v Value) Uint64() (uint64, error) {
	if err := v.integer(); err != nil {
		return 0, err
	}
	n, err := strconv.ParseUint(v.Raw(), 10, 64)
	if err != nil {
		return 0, v.Errorf("%s is not between 0 and 2^64-1", quote(v.Raw()))
	}
	return n, nil
}

func (v Value) integer() error {
	if v.kind != Number {
		return v.not("an integer")
	}
	if raw := v.Raw(); raw == "-0" || strings.ContainsAny(raw, ".eE") {
		return v.Errorf("%s is not a plain integer", quote(raw))
	}
	return nil
}

// Float is the float64 nearest to a number in any form. A number too large for one is refused; one too small is 0.
func (v Value) Float() (float64, error) {
	if v.kind != Number {
		return 0, v.not("a number")
	}
	f, err := strconv.ParseFloat(v.Raw(), 64)
	if err != nil || math.IsInf(f, 0) {
		return 0, v.Errorf("%s does not fit in a float64", quote(v.Raw()))
	}
	return f, nil
}

// Errorf makes an [*Error] at the value's place, for what only the caller can judge.
func (v Value) Errorf(format string, args ...any) *Error {
	if v.src == nil {
		return errorAt("", 0, format, args...)
	}
	return errorAt(v.src.text, v.start, format, args...)
}

func (v Value) not(want string) *Error {
	return v.Errorf("found %s, want %s", v.kind, want)
}
