package strictjson

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

// Error is one fault in a JSON text, and where it is.
type Error struct {
	Offset  int    // bytes before the fault, from the start of the text
	Line    int    // from 1; a line ends at LF
	Column  int    // characters (not bytes) into the line, from 1
	Problem string // lower-case, without the place
}

// Error is the place and the problem. The caller puts the name of the text in front.
func (e *Error) Error() string {
	return fmt.Sprintf("line %d, column %d: %s", e.Line, e.Column, e.Problem)
}

// place counts lines and columns only once there is an error to tell, so that scanning need not.
func place[T string | []byte](text T, offset int) (line, column int) {
	before := string(text[:min(offset, len(text))])
	line = 1 + strings.Count(before, "\n")
	return line, 1 + utf8.RuneCountInString(before[strings.LastIndexByte(before, '\n')+1:])
}

func errorAt[T string | []byte](text T, offset int, format string, args ...any) *Error {
	e := &Error{Offset: offset, Problem: fmt.Sprintf(format, args...)}
	e.Line, e.Column = place(text, offset)
	return e
}

// quote shows a piece of the text in an error.
func quote(s string) string { return Quote(s, 80) }

// Quote shows a piece of foreign text: escaped, so that it cannot play tricks on a terminal, and cut if it is longer than most bytes.
func Quote(s string, most int) string {
	if len(s) <= most {
		return fmt.Sprintf("%q", s)
	}
	cut := most
	for cut > 0 && !utf8.RuneStart(s[cut]) {
		cut--
	}
	return fmt.Sprintf("%q... (%d bytes)", s[:cut], len(s))
}
