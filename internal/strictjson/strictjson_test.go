package strictjson

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"runtime"
	"strings"
	"testing"
)

// refused are texts that must not parse, with a part of the message and the place of the fault.
var refused = []struct {
	text         string
	problem      string
	line, column int
}{
	{"", "found the end of the text, want a value", 1, 1},
	{" \n ", "found the end of the text", 2, 2},
	{"\x00", "want a value", 1, 1},
	{"\xff", "byte 0xff is not UTF-8", 1, 1},
	{"\"a\xed\xa0\x80\"", "byte 0xed is not UTF-8", 1, 3}, // a surrogate, encoded as if it were a character
	{"\xef\xbb\xbf{}", "byte order mark", 1, 1},
	{"{", "found the end of the text, want a key", 1, 2},
	{"[", "found the end of the text, want a value", 1, 2},
	{"{}x", "'x' after the end of the value", 1, 3},
	{"{}{}", "an object after the end", 1, 3},
	{"1 2", "a number after the end", 1, 3},
	{"[1,]", "want a value", 1, 4},
	{"[,1]", "want a value", 1, 2},
	{"[1 2]", "found a number, want ',' or ']'", 1, 4},
	{"[1}", "want ',' or ']'", 1, 3},
	{`{"a":1,}`, "want a key in quotes", 1, 8},
	{`{a:1}`, "want a key in quotes", 1, 2},
	{`{"a" 1}`, "want ':' after the key", 1, 6},
	{`{"a"}`, "want ':' after the key", 1, 5},
	{`{"a":}`, "want a value", 1, 6},
	{`{"a":1 "b":2}`, "want ',' or '}'", 1, 8},
	{"{\n \"a\": 1,\n \"ä\": 2, \"a\": 3}", `duplicate key "a", first at line 2, column 2`, 3, 10},
	{`{"a":1,"\u0061":2}`, `duplicate key "a"`, 1, 8},
	{`{"0":0,"1":0,"2":0,"3":0,"4":0,"5":0,"6":0,"7":0,"8":0,"9":0,"3":0}`, `duplicate key "3"`, 1, 62},
	{`{"0":0,"1":0,"2":0,"3":0,"4":0,"5":0,"6":0,"7":0,"8":0,"9":0,"9":0}`, `duplicate key "9"`, 1, 62},
	{`"\ud800"`, `\ud800 is half of a surrogate pair`, 1, 2},
	{`"\udc00\ud800"`, "half of a surrogate pair", 1, 2},
	{`"\ud800\u0061"`, "half of a surrogate pair", 1, 2},
	{`"\ud800\n"`, "half of a surrogate pair", 1, 2},
	{`"\ud800\ud800"`, "half of a surrogate pair", 1, 2},
	{`"\ud800\u"`, "half of a surrogate pair", 1, 2},
	{`"\ud800`, "half of a surrogate pair", 1, 2},
	{`"\u12g4"`, "four hexadecimal digits", 1, 2},
	{`"\u12`, "four hexadecimal digits", 1, 2},
	{`"\x"`, "unknown escape", 1, 2},
	{`"\`, "without its closing quote", 1, 1},
	{`"a\n`, "without its closing quote", 1, 1},
	{`"abc`, "without its closing quote", 1, 1},
	{"\"a\nb\"", "control character 0x0a", 1, 3},
	{"\"\\t\x01\"", "control character 0x01", 1, 4},
	{"01", "leading zero", 1, 1},
	{"-01", "leading zero", 1, 2},
	{"-", "without digits", 1, 2},
	{"+4", "found '+'", 1, 1},
	{"0x4", "'x' after the end", 1, 2},
	{".5", "found '.'", 1, 1},
	{"5.", "without digits after its point", 1, 3},
	{"5e", "without digits in its exponent", 1, 3},
	{"5e+", "without digits in its exponent", 1, 4},
	{"NaN", "found 'N'", 1, 1},
	{"Infinity", "found 'I'", 1, 1},
	{"nul", "found 'n'", 1, 1},
	{"True", "found 'T'", 1, 1},
	{"'a'", `found '\''`, 1, 1},
	{"[1] // no", "'/' after the end", 1, 5},
	{strings.Repeat("[", 11) + strings.Repeat("]", 11), "nested deeper than 10", 1, 11},
	{strings.Repeat(`{"a":`, 11) + "1" + strings.Repeat("}", 11), "nested deeper than 10", 1, 51},
}

func TestWhatIsRefusedAndWhere(t *testing.T) {
	for _, c := range refused {
		_, err := Parse([]byte(c.text), 10)
		var e *Error
		if !errors.As(err, &e) {
			t.Errorf("%q: %v, want an *Error", c.text, err)
			continue
		}
		if !strings.Contains(e.Problem, c.problem) || e.Line != c.line || e.Column != c.column {
			t.Errorf("%q: %v, want line %d, column %d: ...%s...", c.text, e, c.line, c.column, c.problem)
		}
		// Skip is as strict, but for duplicates and for what follows.
		if s, err := NewScanner([]byte(c.text)); err == nil && !strings.Contains(c.problem, "duplicate") {
			err := s.Skip(10)
			if err == nil {
				err = s.End()
			}
			if err == nil {
				t.Errorf("%q: skipped, want an error", c.text)
			}
		}
	}
}

func TestTreeKeepsOrderTextAndPlace(t *testing.T) {
	const text = `{"z": [1, -2.50e1, "tab\there \ud83d\ude00"], "a": {"n": null, "t": true}, "Z": "plain"}`
	v, err := Parse([]byte(text), 2)
	if err != nil {
		t.Fatal(err)
	}
	var keys []string
	for _, m := range v.Members() {
		keys = append(keys, m.Key)
		if text[m.KeyOffset:m.KeyOffset+3] != `"`+m.Key+`"` {
			t.Errorf("key %q said to be at %d", m.Key, m.KeyOffset)
		}
	}
	if got := fmt.Sprint(keys); got != "[z a Z]" {
		t.Errorf("keys %s, want them in the order of the text", got)
	}
	z, _ := v.Get("z")
	items := z.Items()
	if len(items) != 3 || items[1].Raw() != "-2.50e1" || items[1].Offset() != strings.Index(text, "-2") {
		t.Errorf("list %q", z.Raw())
	}
	if f, err := items[1].Float(); f != -25 || err != nil {
		t.Errorf("float %v %v", f, err)
	}
	if s, err := items[2].Text(); s != "tab\there 😀" || err != nil {
		t.Errorf("text %q %v", s, err)
	}
	if p, _ := v.Get("Z"); p.Raw() != `"plain"` {
		t.Errorf("raw %s", p.Raw())
	} else if s, _ := p.Text(); s != "plain" {
		t.Errorf("text %q", s)
	}
	a, _ := v.Get("a")
	if n, ok := a.Get("n"); !ok || n.Kind() != Null {
		t.Error("a null member is there")
	}
	if b, err := must(a.Get("t")).Bool(); !b || err != nil {
		t.Errorf("true is %v %v", b, err)
	}
	if m, ok := v.Get("missing"); ok || m.Kind() != Missing {
		t.Error("found a member that is not there")
	}
}

func must(v Value, _ bool) Value { return v }

func TestKeysAreMatchedByteByByte(t *testing.T) {
	v, err := Parse([]byte(`{"DTYPE": 1, "dtype ": 2, "\u0064type": 3}`), 1)
	if err != nil {
		t.Fatal(err)
	}
	if n, err := must(v.Get("dtype")).Int64(); n != 3 || err != nil {
		t.Errorf("dtype is %d %v, want 3", n, err)
	}
}

func TestIntegersAreExactOrRefused(t *testing.T) {
	for _, c := range []struct {
		text string
		i    int64
		u    uint64
		iok  bool
		uok  bool
	}{
		{"0", 0, 0, true, true},
		{"-7", -7, 0, true, false},
		{"9007199254740993", 1<<53 + 1, 1<<53 + 1, true, true},
		{"9223372036854775807", math.MaxInt64, math.MaxInt64, true, true},
		{"-9223372036854775808", math.MinInt64, 0, true, false},
		{"9223372036854775808", 0, 1 << 63, false, true},
		{"18446744073709551615", 0, math.MaxUint64, false, true},
		{"18446744073709551616", 0, 0, false, false},
		{"99999999999999999999999", 0, 0, false, false},
		{"1.0", 0, 0, false, false},
		{"1e3", 0, 0, false, false},
		{"1E3", 0, 0, false, false},
		{"-0", 0, 0, false, false},
		{`"1"`, 0, 0, false, false},
		{"null", 0, 0, false, false},
		{"true", 0, 0, false, false},
	} {
		v, err := Parse([]byte(c.text), 0)
		if err != nil {
			t.Fatal(err)
		}
		if i, err := v.Int64(); i != c.i || (err == nil) != c.iok {
			t.Errorf("Int64 of %s is %d, %v", c.text, i, err)
		}
		if u, err := v.Uint64(); u != c.u || (err == nil) != c.uok {
			t.Errorf("Uint64 of %s is %d, %v", c.text, u, err)
		}
		s, _ := NewScanner([]byte(c.text))
		if u, err := s.Uint64(); u != c.u || (err == nil) != c.uok {
			t.Errorf("the scanner's Uint64 of %s is %d, %v", c.text, u, err)
		}
	}
}

func TestFloats(t *testing.T) {
	for text, want := range map[string]float64{"-0": 0, "1e-6": 1e-6, "10000.0": 1e4, "1e-400": 0, "500000": 5e5} {
		v, _ := Parse([]byte(text), 0)
		if f, err := v.Float(); f != want || err != nil {
			t.Errorf("%s is %v, %v", text, f, err)
		}
	}
	for _, text := range []string{"1e400", `"1"`, "null"} {
		v, _ := Parse([]byte(text), 0)
		if f, err := v.Float(); err == nil {
			t.Errorf("%s is %v, want an error", text, f)
		}
	}
}

func TestWrongKindSaysBothKindsAndThePlace(t *testing.T) {
	v, _ := Parse([]byte("{\n  \"hidden_size\": \"64\"}"), 1)
	_, err := must(v.Get("hidden_size")).Int64()
	if got, want := fmt.Sprint(err), "line 2, column 18: found a string, want an integer"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	_, err = must(v.Get("no")).Text()
	if got, want := fmt.Sprint(err), "line 1, column 1: found nothing, want a string"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestForeignTextIsQuotedAndBounded(t *testing.T) {
	key := strings.Repeat("é", 1000)
	_, err := Parse(fmt.Appendf(nil, `{"\u001b[2J%s":1,"\u001b[2J%s":2}`, key, key), 1)
	if err == nil || len(err.Error()) > 400 || strings.Contains(err.Error(), "\x1b") || strings.Contains(err.Error(), "\ufffd") {
		t.Errorf("message %q", err)
	}
}

// A text of a hundred thousand brackets must cost neither stack nor memory.
func TestDeepNestingIsRefusedCheaply(t *testing.T) {
	for _, open := range []string{"[", `{"a":`} {
		text := []byte(strings.Repeat(open, 100_000))
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, err := Parse(text, 64)
		s, _ := NewScanner(text)
		skipErr := s.Skip(64)
		runtime.ReadMemStats(&after)
		if err == nil || skipErr == nil {
			t.Fatal("accepted")
		}
		if grown := after.TotalAlloc - before.TotalAlloc; grown > 2<<20 {
			t.Errorf("allocated %d bytes", grown)
		}
		// Skipping to the end of a text that may be so deep takes a bit per level.
		if s, _ = NewScanner(text); s.Skip(1e6) == nil {
			t.Error("accepted an unfinished text")
		}
	}
	if _, err := Parse([]byte(strings.Repeat("[", MaxDepth+1)), math.MaxInt); err == nil || !strings.Contains(err.Error(), "deeper") {
		t.Errorf("%v, want a refusal at MaxDepth", err)
	}
}

func TestSkipTakesExactlyOneValue(t *testing.T) {
	for _, text := range []string{
		`1`, `-1.5e+7`, `"a\"]}"`, `null`, `[]`, `{}`, `[[],{}]`, `[{"a":[1,{"b":null}],"c":"]"},[true]]`,
		strings.Repeat(`[{"k":`, 65) + "0" + strings.Repeat("}]", 65),
		strings.Repeat(`[0,`, 130) + "0" + strings.Repeat("]", 130),
	} {
		s, err := NewScanner([]byte(text + " ,next"))
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Skip(130); err != nil || s.Offset() != len(text) {
			t.Errorf("%s: skipped %d of %d bytes: %v", text, s.Offset(), len(text), err)
		}
	}
}

func TestMessageOfAnUnknownKind(t *testing.T) {
	if got := Kind(99).String(); got != "an unknown kind" {
		t.Error(got)
	}
}

// FuzzParse holds Parse against encoding/json: what we accept it must accept, with the same meaning, and what only we
// refuse must be one of the things we are here to refuse. Skip must agree with Parse.
func FuzzParse(f *testing.F) {
	for _, c := range refused {
		f.Add([]byte(c.text))
	}
	for _, text := range []string{
		`{"a":[1,2.5,-3e7,"x\u00e9\n",true,false,null,{}],"b":{"c":[[]]}}`, ` 0 `, `"\ud83d\ude00"`, `18446744073709551615`,
	} {
		f.Add([]byte(text))
	}
	const depth = 16
	stricter := []string{"duplicate key", "nested deeper", "surrogate", "not UTF-8", "byte order mark"}
	f.Fuzz(func(t *testing.T, text []byte) {
		v, err := Parse(text, depth)
		s, scanErr := NewScanner(text)
		if scanErr == nil {
			if scanErr = s.Skip(depth); scanErr == nil {
				scanErr = s.End()
			}
		}
		if err != nil {
			var e *Error
			if !errors.As(err, &e) || e.Offset < 0 || e.Offset > len(text) || e.Line < 1 || e.Column < 1 {
				t.Fatalf("error %#v", err)
			}
			if scanErr == nil && !strings.Contains(err.Error(), "duplicate key") {
				t.Fatalf("Skip accepts what Parse refuses: %v", err)
			}
			if json.Valid(text) {
				for _, reason := range stricter {
					if strings.Contains(e.Problem, reason) {
						return
					}
				}
				t.Fatalf("refused valid JSON %q: %v", text, err)
			}
			return
		}
		if scanErr != nil {
			t.Fatalf("Skip refuses what Parse accepts: %v", scanErr)
		}
		var want any
		decoder := json.NewDecoder(strings.NewReader(string(text)))
		decoder.UseNumber()
		if err := decoder.Decode(&want); err != nil {
			t.Fatalf("accepted %q, which encoding/json refuses: %v", text, err)
		}
		same(t, v, want)
	})
}

func same(t *testing.T, v Value, want any) {
	t.Helper()
	switch want := want.(type) {
	case nil:
		if v.Kind() != Null {
			t.Fatalf("%s, want null", v.Raw())
		}
	case bool:
		if b, err := v.Bool(); b != want || err != nil {
			t.Fatalf("%s, want %v", v.Raw(), want)
		}
	case json.Number:
		if v.Kind() != Number || v.Raw() != want.String() {
			t.Fatalf("%s, want %s", v.Raw(), want)
		}
		i, err := v.Int64()
		if n, e := want.Int64(); (e == nil && want != "-0") != (err == nil) || err == nil && n != i {
			t.Fatalf("integer %s: %d %v, want %d %v", want, i, err, n, e)
		}
	case string:
		if s, err := v.Text(); s != want || err != nil {
			t.Fatalf("%q, want %q", s, want)
		}
	case []any:
		if v.Kind() != Array || len(v.Items()) != len(want) {
			t.Fatalf("%s, want %v", v.Raw(), want)
		}
		for i, item := range v.Items() {
			same(t, item, want[i])
		}
	case map[string]any:
		if v.Kind() != Object || len(v.Members()) != len(want) {
			t.Fatalf("%s, want %v", v.Raw(), want)
		}
		for key, value := range want {
			got, ok := v.Get(key)
			if !ok {
				t.Fatalf("%s has no %q", v.Raw(), key)
			}
			same(t, got, value)
		}
	}
}

func BenchmarkParse(b *testing.B) {
	text := []byte(`{"request":"r1","tokens":[` + strings.Repeat("12345,", 4095) + `7],"top_k":5}`)
	b.SetBytes(int64(len(text)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := Parse(text, 8); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkSkip(b *testing.B) {
	text := []byte(`{"request":"r1","tokens":[` + strings.Repeat("12345,", 4095) + `7],"top_k":5}`)
	b.SetBytes(int64(len(text)))
	b.ReportAllocs()
	for b.Loop() {
		s, err := NewScanner(text)
		if err == nil {
			err = s.Skip(8)
		}
		if err != nil {
			b.Fatal(err)
		}
	}
}
