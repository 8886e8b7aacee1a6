package strictjson

import (
	"fmt"
	"math/bits"
	"unicode/utf16"
	"unicode/utf8"
)

// Scanner walks a JSON text one token at a time and allocates nothing of its own. The caller says what must come next;
// anything else is an [*Error]. A list or an object is walked so:
//
//	more, err := s.Open('{')
//	for more && err == nil {
//		key, err := s.Key(nil)
//		... exactly one value ...
//		more, err = s.More('}')
//	}
//
// After an error the scanner's position is that of the token that failed; only Offset and Errorf are useful then.
// A Scanner does not check for duplicate keys and does not count depth: whoever walks knows both better.
type Scanner struct {
	text []byte // Invariant: valid UTF-8
	pos  int    // Invariant: 0 <= pos <= len(text)
}

// NewScanner returns a scanner at the start of text, which must not change while it is in use. The error says that
// text is not UTF-8, or starts with a byte order mark.
func NewScanner(text []byte) (*Scanner, error) {
	if !utf8.Valid(text) {
		at := 0
		for at < len(text) {
			r, size := utf8.DecodeRune(text[at:])
			if r == utf8.RuneError && size <= 1 {
				break
			}
			at += size
		}
		return nil, errorAt(text, at, "byte 0x%02x is not UTF-8", text[at])
	}
	if len(text) >= 3 && text[0] == 0xef && text[1] == 0xbb && text[2] == 0xbf {
		return nil, errorAt(text, 0, "the text starts with a byte order mark")
	}
	return &Scanner{text: text}, nil
}

// Offset is the number of bytes before the next byte to be read.
func (s *Scanner) Offset() int { return s.pos }

// Errorf makes an error at a byte offset of the text.
func (s *Scanner) Errorf(offset int, format string, args ...any) *Error {
	return errorAt(s.text, offset, format, args...)
}

// Peek passes over white space and returns the byte that comes next, without taking it; 0 at the end of the text. A
// zero byte in the text is no token either, so the caller need not tell the two apart: whatever it asks for next fails.
func (s *Scanner) Peek() byte {
	for i := s.pos; i < len(s.text); i++ {
		if c := s.text[i]; c != ' ' && c != '\n' && c != '\r' && c != '\t' {
			s.pos = i
			return c
		}
	}
	s.pos = len(s.text)
	return 0
}

// Open takes the opening '{' or '[', and says whether an element follows. An empty object or list is taken whole.
func (s *Scanner) Open(bracket byte) (more bool, err error) {
	if s.Peek() != bracket || s.pos == len(s.text) {
		return false, s.wanted(nameOf(bracket))
	}
	s.pos++
	closing := closingOf(bracket)
	if s.Peek() == closing {
		s.pos++
		return false, nil
	}
	return true, nil
}

// More takes what follows an element: a comma (true) or the closing '}' or ']' (false).
func (s *Scanner) More(closing byte) (bool, error) {
	switch s.Peek() {
	case ',':
		s.pos++
		// A comma before the closing bracket is left to the next element's own check: neither a key nor a value starts so.
		return true, nil
	case closing:
		s.pos++
		return false, nil
	}
	return false, s.wanted(fmt.Sprintf("',' or '%c'", closing))
}

// Key takes a string and the colon after it; see [Scanner.Text] for the result.
func (s *Scanner) Key(scratch []byte) ([]byte, error) {
	if s.Peek() != '"' {
		return nil, s.wanted("a key in quotes")
	}
	key, err := s.Text(scratch)
	if err != nil {
		return nil, err
	}
	if s.Peek() != ':' {
		return nil, s.wanted("':' after the key")
	}
	s.pos++
	return key, nil
}

// Text takes a string and returns its bytes, unescaped. Without escapes the result is a part of the scanned text; with
// escapes it is built in scratch[:0], which is grown if need be. Both are valid until the caller changes them.
func (s *Scanner) Text(scratch []byte) ([]byte, error) {
	if s.Peek() != '"' {
		return nil, s.wanted("a string")
	}
	start := s.pos + 1
	for i := start; i < len(s.text); i++ {
		switch c := s.text[i]; {
		case c == '"':
			s.pos = i + 1
			return s.text[start:i], nil
		case c == '\\':
			return s.unescape(scratch[:0], start, i)
		case c < 0x20:
			return nil, s.Errorf(i, "control character 0x%02x in a string", c)
		}
	}
	return nil, s.Errorf(s.pos, "a string without its closing quote")
}

// unescape goes on with a string that began at start and has its first escape at i.
func (s *Scanner) unescape(to []byte, start, i int) ([]byte, error) {
	text := s.text
	to = append(to, text[start:i]...)
	for i < len(text) {
		switch c := text[i]; {
		case c == '"':
			s.pos = i + 1
			return to, nil
		case c < 0x20:
			return nil, s.Errorf(i, "control character 0x%02x in a string", c)
		case c != '\\':
			to = append(to, c)
			i++
			continue
		}
		if i+1 == len(text) {
			break
		}
		switch c := text[i+1]; c {
		case '"', '\\', '/':
			to = append(to, c)
		case 'b':
			to = append(to, '\b')
		case 'f':
			to = append(to, '\f')
		case 'n':
			to = append(to, '\n')
		case 'r':
			to = append(to, '\r')
		case 't':
			to = append(to, '\t')
		case 'u':
			r, ok := hex4(text[i+2:])
			if !ok {
				return nil, s.Errorf(i, "\\u without four hexadecimal digits")
			}
			if utf16.IsSurrogate(r) {
				// Only a high half followed at once by a low half is a character.
				var low rune
				if i+7 < len(text) && text[i+6] == '\\' && text[i+7] == 'u' {
					low, _ = hex4(text[i+8:])
				}
				whole := utf16.DecodeRune(r, low)
				if whole == utf8.RuneError {
					return nil, s.Errorf(i, "\\u%04x is half of a surrogate pair", r)
				}
				r = whole
				i += 6
			}
			to = utf8.AppendRune(to, r)
			i += 4
		default:
			return nil, s.Errorf(i, "unknown escape %s", quote(string(text[i:i+2])))
		}
		i += 2
	}
	return nil, s.Errorf(start-1, "a string without its closing quote")
}

func hex4(b []byte) (r rune, ok bool) {
	if len(b) < 4 {
		return 0, false
	}
	for _, c := range b[:4] {
		switch {
		case '0' <= c && c <= '9':
			c -= '0'
		case 'a' <= c && c <= 'f':
			c -= 'a' - 10
		case 'A' <= c && c <= 'F':
			c -= 'A' - 10
		default:
			return 0, false
		}
		r = r<<4 | rune(c)
	}
	return r, true
}

// Number takes a number and returns its text: a part of the scanned text.
func (s *Scanner) Number() ([]byte, error) {
	c := s.Peek()
	if c != '-' && (c < '0' || c > '9') {
		return nil, s.wanted("a number")
	}
	i := s.pos
	if c == '-' {
		i++
	}
	whole := s.digits(i)
	switch {
	case whole == i:
		return nil, s.Errorf(i, "a number without digits")
	case s.text[i] == '0' && whole > i+1:
		return nil, s.Errorf(i, "a number with a leading zero")
	}
	i = whole
	if i < len(s.text) && s.text[i] == '.' {
		i++
		end := s.digits(i)
		if end == i {
			return nil, s.Errorf(i, "a number without digits after its point")
		}
		i = end
	}
	if i < len(s.text) && s.text[i]|0x20 == 'e' {
		i++
		if i < len(s.text) && (s.text[i] == '+' || s.text[i] == '-') {
			i++
		}
		end := s.digits(i)
		if end == i {
			return nil, s.Errorf(i, "a number without digits in its exponent")
		}
		i = end
	}
	number := s.text[s.pos:i]
	s.pos = i
	return number, nil
}

func (s *Scanner) digits(i int) int {
	for i < len(s.text) && '0' <= s.text[i] && s.text[i] <= '9' {
		i++
	}
	return i
}

// Uint64 takes a number that is written as a plain integer from 0 to 2^64-1: no sign (so no -0), point or exponent.
func (s *Scanner) Uint64() (uint64, error) {
	if c := s.Peek(); c != '-' && (c < '0' || c > '9') {
		return 0, s.wanted("an integer")
	}
	start := s.pos
	number, err := s.Number()
	if err != nil {
		return 0, err
	}
	var n uint64
	for _, c := range number {
		if c < '0' || c > '9' {
			return 0, s.refuse(start, "%s is not an integer from 0 up, in digits alone", quote(string(number)))
		}
		high, low := bits.Mul64(n, 10)
		sum, carry := bits.Add64(low, uint64(c-'0'), 0)
		if high != 0 || carry != 0 {
			return 0, s.refuse(start, "%s is above 2^64-1", quote(string(number)))
		}
		n = sum
	}
	return n, nil
}

// refuse steps back to the start of a token that was taken but will not do.
func (s *Scanner) refuse(start int, format string, args ...any) *Error {
	s.pos = start
	return s.Errorf(start, format, args...)
}

// Literal takes one of the words true, false and null.
func (s *Scanner) Literal() (Kind, bool, error) {
	s.Peek()
	for _, w := range [...]struct {
		word  string
		kind  Kind
		value bool
	}{{"true", Bool, true}, {"false", Bool, false}, {"null", Null, false}} {
		if end := s.pos + len(w.word); end <= len(s.text) && string(s.text[s.pos:end]) == w.word {
			s.pos = end
			return w.kind, w.value, nil
		}
	}
	return Missing, false, s.wanted("a value")
}

// Skip takes one whole value of any kind, nested at most maxDepth objects and lists deep, and forgets it. It uses one
// bit of memory per level and does not call itself, so a hostile text costs nothing but the time to read it.
func (s *Scanner) Skip(maxDepth int) error {
	var inObject []uint64 // bit d: the container at depth d is an object
	depth := 0
	isObject := func() bool { return inObject[(depth-1)/64]>>((depth-1)%64)&1 == 1 }
	for {
		c := s.Peek()
		// One value, or the start of a container.
		switch {
		case c == '{' || c == '[':
			if depth == maxDepth {
				return s.Errorf(s.pos, "nested deeper than %d", maxDepth)
			}
			more, err := s.Open(c)
			if err != nil {
				return err
			}
			if more {
				if depth%64 == 0 {
					inObject = append(inObject[:depth/64], 0)
				}
				bit := uint64(1) << (depth % 64)
				inObject[depth/64] &^= bit
				if c == '{' {
					inObject[depth/64] |= bit
					if _, err := s.Key(nil); err != nil {
						return err
					}
				}
				depth++
				continue
			}
		case c == '"':
			if _, err := s.Text(nil); err != nil {
				return err
			}
		case c == '-' || '0' <= c && c <= '9':
			if _, err := s.Number(); err != nil {
				return err
			}
		default:
			if _, _, err := s.Literal(); err != nil {
				return err
			}
		}
		// Close all that ends here, up to the next value.
		for {
			if depth == 0 {
				return nil
			}
			object, closing := isObject(), byte(']')
			if object {
				closing = '}'
			}
			more, err := s.More(closing)
			if err != nil {
				return err
			}
			if !more {
				depth--
				continue
			}
			if object {
				if _, err := s.Key(nil); err != nil {
					return err
				}
			}
			break
		}
	}
}

// End checks that nothing but white space is left.
func (s *Scanner) End() error {
	s.Peek()
	if s.pos < len(s.text) {
		return s.Errorf(s.pos, "%s after the end of the value", s.found())
	}
	return nil
}

func (s *Scanner) wanted(what string) *Error {
	return s.Errorf(s.pos, "found %s, want %s", s.found(), what)
}

// found says what kind of thing stands at the scanner's position.
func (s *Scanner) found() string {
	if s.pos >= len(s.text) {
		return "the end of the text"
	}
	switch c := s.text[s.pos]; {
	case c == '{' || c == '[':
		return nameOf(c)
	case c == '"':
		return "a string"
	case c == '-' || '0' <= c && c <= '9':
		return "a number"
	}
	for _, w := range []string{"null", "true", "false"} {
		if end := s.pos + len(w); end <= len(s.text) && string(s.text[s.pos:end]) == w {
			return w
		}
	}
	r, _ := utf8.DecodeRune(s.text[s.pos:])
	return fmt.Sprintf("%q", r)
}

func nameOf(bracket byte) string {
	if bracket == '{' {
		return "an object"
	}
	return "a list"
}

func closingOf(bracket byte) byte {
	if bracket == '{' {
		return '}'
	}
	return ']'
}
