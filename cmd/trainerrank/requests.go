package main

import (
	"bytes"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/internal/strictjson"
)

// request is one line of a request file.
type request struct {
	line  int    // in the file, from 1
	id    []byte // JSON, as it stood in the file; nil if there was none
	wide  bool   // target_tokens was a list of lists, and so is the answer
	input forward.Input
}

// lineError is a fault in a line of a request file.
type lineError struct {
	file   string
	line   int
	column int // 0: the line as a whole
	text   string
	hint   string // "": the form of a request
}

func (e *lineError) Error() string {
	at := fmt.Sprintf("%s:%d", e.file, e.line)
	if e.column > 0 {
		at += fmt.Sprintf(":%d", e.column)
	}
	return fmt.Sprintf("read requests: %s: %s", at, e.text)
}

func (e *lineError) Hint() string {
	if e.hint != "" {
		return e.hint
	}
	return `a request is one line, {"id": any, "input_tokens": [1,2,3]}; optional: target_tokens, top_k, logits, hidden_states, checkpoint`
}

// parseRequests reads a request file: one JSON object a line. Blank lines are skipped.
func parseRequests(file string, data []byte) ([]request, error) {
	var reqs []request
	for n := 1; len(data) > 0; n++ {
		line, rest, _ := bytes.Cut(data, []byte("\n"))
		data = rest
		if len(bytes.Trim(line, " \t\r")) == 0 {
			continue
		}
		r, err := parseRequest(line)
		if err != nil {
			return nil, &lineError{file: file, line: n, column: err.Column, text: err.Problem}
		}
		r.line = n
		reqs = append(reqs, r)
	}
	return reqs, nil
}

// maxJSONDepth bounds the nesting of an id.
const maxJSONDepth = 64

func parseRequest(line []byte) (request, *strictjson.Error) {
	r := request{}
	s, err := strictjson.NewScanner(line)
	if err == nil {
		err = r.parse(s, line)
	}
	if err == nil {
		err = s.End()
	}
	if err != nil {
		return r, err.(*strictjson.Error)
	}
	if !r.input.Active() {
		r.input.Targets = nextTokens(r.input.Tokens)
	}
	return r, nil
}

// nextTokens are the labels that score each next token: the tokens shifted by one, the last position ignored.
func nextTokens(tokens []int32) []int32 {
	return append(slices.Clone(tokens[1:]), forward.IgnoreLabel)
}

func (r *request) parse(s *strictjson.Scanner, line []byte) error {
	if s.Peek() != '{' {
		return s.Errorf(s.Offset(), "a request is an object")
	}
	seen := map[string]bool{}
	more, err := s.Open('{')
	for more && err == nil {
		s.Peek()
		at := s.Offset()
		key, err2 := s.Key(nil)
		if err2 != nil {
			return err2
		}
		name := string(key)
		if seen[name] {
			return s.Errorf(at, "field %.80q comes twice", name)
		}
		seen[name] = true
		if err := r.field(s, line, name, at); err != nil {
			return err
		}
		more, err = s.More('}')
	}
	if err == nil && !seen["input_tokens"] {
		return s.Errorf(0, "input_tokens is missing")
	}
	return err
}

// field reads the value of one field. null is the same as leaving an optional field out.
func (r *request) field(s *strictjson.Scanner, line []byte, name string, at int) (err error) {
	in := &r.input
	c := s.Peek()
	start := s.Offset()
	if c == 'n' && slices.Contains([]string{"target_tokens", "top_k", "logits", "hidden_states", "checkpoint"}, name) {
		_, _, err = s.Literal()
		return err
	}
	switch name {
	case "id":
		if err := s.Skip(maxJSONDepth); err != nil {
			return err
		}
		r.id = slices.Clone(line[start:s.Offset()])
	case "input_tokens":
		in.Tokens, err = integers(s, name)
		if err == nil && len(in.Tokens) == 0 {
			err = s.Errorf(start, "input_tokens is empty")
		}
	case "target_tokens":
		err = r.targets(s)
	case "top_k":
		var k int32
		k, err = integer(s, name)
		if err == nil && k < 0 {
			err = s.Errorf(start, "top_k %d is negative", k)
		}
		in.TopK = int(k)
	case "logits":
		in.Logits, err = boolean(s, name)
	case "hidden_states":
		in.HiddenStates, err = boolean(s, name)
	case "checkpoint":
		if c != '"' {
			return s.Errorf(start, "checkpoint is not a string")
		}
		var text []byte
		text, err = s.Text(nil)
		in.Checkpoint = forward.Checkpoint(string(text))
	default:
		return s.Errorf(at, "unknown field %.80q", name)
	}
	return err
}

// targets reads a list of labels, or a list of equally long lists of them.
func (r *request) targets(s *strictjson.Scanner) error {
	in := &r.input
	if s.Peek() != '[' {
		return s.Errorf(s.Offset(), "target_tokens is not a list")
	}
	in.Targets = []int32{}
	more, err := s.Open('[')
	for i := 0; more && err == nil; i++ {
		wide := s.Peek() == '['
		at := s.Offset()
		if i == 0 {
			r.wide = wide
		} else if wide != r.wide {
			return s.Errorf(at, "target_tokens mixes labels and lists of labels")
		}
		if wide {
			row, err := integers(s, "target_tokens")
			if err != nil {
				return err
			}
			switch {
			case len(row) == 0:
				return s.Errorf(at, "target_tokens has an empty list at position %d", i)
			case i == 0:
				in.TargetWidth = len(row)
			case len(row) != in.TargetWidth:
				return s.Errorf(at, "target_tokens has %d labels at position %d and %d at position 0", len(row), i, in.TargetWidth)
			}
			in.Targets = append(in.Targets, row...)
		} else {
			label, err := integer(s, "target_tokens")
			if err != nil {
				return err
			}
			in.Targets = append(in.Targets, label)
		}
		more, err = s.More(']')
	}
	return err
}

func integers(s *strictjson.Scanner, name string) ([]int32, error) {
	if s.Peek() != '[' {
		return nil, s.Errorf(s.Offset(), "%s is not a list", name)
	}
	list := []int32{}
	more, err := s.Open('[')
	for more && err == nil {
		n, err2 := integer(s, name)
		if err2 != nil {
			return nil, err2
		}
		list = append(list, n)
		more, err = s.More(']')
	}
	return list, err
}

// integer reads a plain integer: no fraction, no exponent.
func integer(s *strictjson.Scanner, name string) (int32, error) {
	c := s.Peek()
	at := s.Offset()
	if c != '-' && (c < '0' || c > '9') {
		return 0, s.Errorf(at, "%s holds something that is not a number", name)
	}
	text, err := s.Number()
	if err != nil {
		return 0, err
	}
	raw := string(text)
	if raw == "-0" || strings.ContainsAny(raw, ".eE") {
		return 0, s.Errorf(at, "%s holds %.40s, which is not a plain integer", name, raw)
	}
	var n int64
	for _, d := range strings.TrimPrefix(raw, "-") {
		if n = n*10 + int64(d-'0'); n > math.MaxInt32 {
			return 0, s.Errorf(at, "%s holds %.40s, which is out of range", name, raw)
		}
	}
	if raw[0] == '-' {
		n = -n
	}
	return int32(n), nil
}

func boolean(s *strictjson.Scanner, name string) (bool, error) {
	c := s.Peek()
	at := s.Offset()
	if c != 't' && c != 'f' {
		return false, s.Errorf(at, "%s is not true or false", name)
	}
	_, v, err := s.Literal()
	return v, err
}
