package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// render writes a request as a line, with every field that is not the zero value.
func render(r request) string {
	fields := []string{}
	add := func(name string, v any) {
		data, err := json.Marshal(v)
		if err != nil {
			panic(err)
		}
		fields = append(fields, fmt.Sprintf("%q: %s", name, data))
	}
	if r.id != nil {
		fields = append(fields, `"id": `+string(r.id))
	}
	in := r.input
	add("input_tokens", in.Tokens)
	switch {
	case r.wide:
		add("target_tokens", slices.Collect(slices.Chunk(in.Targets, in.Width())))
	case in.Targets != nil:
		add("target_tokens", in.Targets)
	}
	if in.TopK != 0 {
		add("top_k", in.TopK)
	}
	if in.Logits {
		add("logits", true)
	}
	if in.HiddenStates {
		add("hidden_states", true)
	}
	if name := in.Checkpoint.Name(); name != "" {
		add("checkpoint", name)
	}
	return "{" + strings.Join(fields, ", ") + "}"
}

func same(a, b request) bool {
	x, y := a.input, b.input
	return bytes.Equal(a.id, b.id) && (a.id == nil) == (b.id == nil) && a.wide == b.wide && slices.Equal(x.Tokens, y.Tokens) && slices.Equal(x.Targets, y.Targets) &&
		x.Width() == y.Width() && x.TopK == y.TopK && x.Logits == y.Logits && x.HiddenStates == y.HiddenStates && x.Checkpoint.Name() == y.Checkpoint.Name()
}

func FuzzParseRequests(f *testing.F) {
	for _, s := range []string{
		"", "\n\r\n", `{"id":1,"input_tokens":[1,2,3]}`, "{\"input_tokens\":[1]}\r\n{\"input_tokens\":[2],\"top_k\":5,\"logits\":true,\"hidden_states\":true}",
		`{"id":{"a":[1,2.5e9,"\u00e9"]},"input_tokens":[1,2],"target_tokens":[[1,-100],[2,3]]}`, `{"input_tokens":[1,2],"target_tokens":[1,-100],"checkpoint":"a b"}`,
		`{"input_tokens":[1,2],"target_tokens":null,"top_k":null}`, `{"input_tokens":[-0]}`, `{"input_tokens":[2147483647,-2147483647]}`, `{"input_tokens":[1],"target_tokens":[[]]}`,
		`[`, `{"id":"\ud800"}`, "\xef\xbb\xbf{}", "{\"id\":\"\xff\"}", strings.Repeat("[", 100), `{"id":` + strings.Repeat("[", 70) + strings.Repeat("]", 70) + `,"input_tokens":[1]}`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		reqs, err := parseRequests("file", data)
		if err != nil {
			e, ok := err.(*lineError)
			if !ok || e.line < 1 || e.line > 1+bytes.Count(data, []byte("\n")) || e.column < 1 || e.text == "" || reqs != nil {
				t.Fatalf("%d requests and %#v", len(reqs), err)
			}
			if strings.ContainsAny(err.Error(), "\n\r\x1b") {
				t.Fatalf("an error that is not one plain line: %q", err)
			}
			return
		}
		last := 0
		for _, r := range reqs {
			if r.line <= last || len(r.input.Tokens) == 0 || !r.input.Active() || r.id != nil && !json.Valid(r.id) {
				t.Fatalf("accepted: %+v", r)
			}
			last = r.line
			again, err := parseRequests("again", []byte(render(r)))
			if err != nil || len(again) != 1 || !same(r, again[0]) {
				t.Fatalf("%s\nreads back as %+v (%v), want %+v", render(r), again, err, r)
			}
		}
	})
}

func TestRequestsThatAskForNothingScoreTheNextToken(t *testing.T) {
	for line, want := range map[string][]int32{
		`{"input_tokens":[5]}`:                         {-100},
		`{"input_tokens":[5,6,7]}`:                     {6, 7, -100},
		`{"input_tokens":[5,6],"top_k":0}`:             {6, -100},
		`{"input_tokens":[5,6],"top_k":1}`:             nil,
		`{"input_tokens":[5,6],"logits":true}`:         nil,
		`{"top_k":null,"input_tokens":[5,6]}`:          {6, -100},
		`{"target_tokens":[1,2],"input_tokens":[5,6]}`: {1, 2},
	} {
		reqs, err := parseRequests("f", []byte(line))
		if err != nil {
			t.Errorf("%s: %v", line, err)
			continue
		}
		if d := cmp.Diff(want, reqs[0].input.Targets); d != "" {
			t.Errorf("%s: labels, -want +got\n%s", line, d)
		}
	}
}

// An id may be anything of a bounded depth, and a line of any length.
func TestDeepAndLongRequests(t *testing.T) {
	deep := func(n int) string {
		return `{"id": ` + strings.Repeat("[", n) + strings.Repeat("]", n) + `, "input_tokens": [1]}`
	}
	if reqs, err := parseRequests("f", []byte(deep(maxJSONDepth))); err != nil || string(reqs[0].id) != strings.Repeat("[", maxJSONDepth)+strings.Repeat("]", maxJSONDepth) {
		t.Errorf("an id %d deep: %v", maxJSONDepth, err)
	}
	for _, n := range []int{maxJSONDepth + 1, 1 << 20} {
		if _, err := parseRequests("f", []byte(deep(n))); err == nil || !strings.Contains(err.Error(), "nested deeper") {
			t.Errorf("an id %d deep: %v", n, err)
		}
	}
	const n = 1 << 20
	tokens := strings.Repeat("12345, ", n) + "6"
	reqs, err := parseRequests("f", []byte("\n"+`{"id": "`+strings.Repeat("é", n)+`", "input_tokens": [`+tokens+`], "target_tokens": [`+tokens+`]}`))
	if err != nil || len(reqs[0].input.Tokens) != n+1 || len(reqs[0].input.Targets) != n+1 || reqs[0].line != 2 {
		t.Errorf("a long line: %v", err)
	}
	// The place counts characters, and the error stays short.
	_, err = parseRequests("f", []byte(`{"id": "`+strings.Repeat("é", n)+`", "input_tokens": [`+strings.Repeat("9", n)+`]}`))
	if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("f:1:%d: ", n+29)) || len(err.Error()) > 200 {
		t.Errorf("a long number: %.300v", err)
	}
	_, err = parseRequests("f", []byte(`{"`+strings.Repeat("x", n)+`": 1}`))
	if err == nil || len(err.Error()) > 200 {
		t.Errorf("a long name: an error of %d bytes", len(fmt.Sprint(err)))
	}
}
