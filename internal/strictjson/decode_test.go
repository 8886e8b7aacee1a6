package strictjson

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

type word string

func (w *word) UnmarshalText(text []byte) error {
	if strings.ContainsAny(string(text), " ") {
		return errors.New("not a word")
	}
	*w = word(text)
	return nil
}

type even struct{ n int64 }

func (e even) MarshalJSON() ([]byte, error) { return fmt.Append(nil, e.n), nil }

func (e *even) DecodeJSON(v Value) (err error) {
	if e.n, err = v.Int64(); err == nil && e.n%2 != 0 {
		err = v.Errorf("%d is odd", e.n)
	}
	return err
}

type Inner struct {
	Small int8   `json:"small"`
	Word  word   `json:"word,omitzero"`
	Even  even   `json:"even"`
	None  string `json:"-"`
}

type outer struct {
	Inner
	Name   string
	On     bool      `json:"on"`
	Count  uint16    `json:"count"`
	Rate   float32   `json:"rate"`
	Pair   [2]int    `json:"pair"`
	List   []*Inner  `json:"list"`
	Floats []float64 `json:"floats,omitempty"`
	hidden int
}

func parsed(t testing.TB, text string) Value {
	t.Helper()
	v, err := Parse([]byte(text), 20)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func TestDecodeReadsWhatJSONWrites(t *testing.T) {
	for _, want := range []outer{
		{},
		{List: []*Inner{}, Rate: 0.1},
		{Inner{-128, "x", even{4}, ""}, "a\u00e4\n", true, 65535, 1e-30, [2]int{-1, 1 << 40}, []*Inner{nil, {}, {127, "yz", even{-2}, ""}}, []float64{1e300, 0.3}, 0},
	} {
		text, err := json.MarshalIndent(want, "", " ")
		if err != nil {
			t.Fatal(err)
		}
		got := outer{Name: "stale", Floats: []float64{9}, Inner: Inner{Word: "stale"}}
		if err := Decode(parsed(t, string(text)), &got); err != nil {
			t.Fatalf("%v\n%s", err, text)
		}
		if d := cmp.Diff(want, got, cmp.AllowUnexported(outer{}, even{})); d != "" {
			t.Errorf("%s\n%s", text, d)
		}
	}
}

func TestDecodeNamesTheField(t *testing.T) {
	whole := `{"small":1,"word":"w","even":2,"Name":"n","on":true,"count":3,"rate":1.5,"pair":[1,2],"list":[{"small":1,"even":0}],"floats":[1]}`
	if err := Decode(parsed(t, whole), new(outer)); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ from, to, want string }{
		{whole, `[]`, "line 1, column 1: found a list, want an object"},
		{`"small":1,"word"`, `"word"`, `no key "small"`},
		{`"small":1,"even":0`, `"even":0`, `list[0]: no key "small"`},
		{`"even":0`, `"even":0,"more":1`, `list[0]: unknown key "more"`},
		{`"Name"`, `"name"`, `no key "Name"`},
		{`"on":true`, `"on":true,"None":""`, `unknown key "None"`},
		{`"on":true`, `"on":true,"hidden":1`, `unknown key "hidden"`},
		{`"small":1`, `"small":128`, "small: 128 does not fit in 8 bits with a sign"},
		{`"small":1`, `"small":1.0`, `small: "1.0" is not a plain integer`},
		{`"count":3`, `"count":65536`, "count: 65536 does not fit in 16 bits"},
		{`"count":3`, `"count":-1`, `count: "-1" is not between 0 and 2^64-1`},
		{`"rate":1.5`, `"rate":1e300`, `rate: "1e300" does not fit in a float32`},
		{`"rate":1.5`, `"rate":"1"`, "rate: found a string, want a number"},
		{`"on":true`, `"on":null`, "on: found null, want true or false"},
		{`"Name":"n"`, `"Name":7`, "Name: found a number, want a string"},
		{`"word":"w"`, `"word":"a b"`, "word: not a word"},
		{`"word":"w"`, `"word":1`, "word: found a number, want a string"},
		{`"even":2`, `"even":3`, "even: 3 is odd"},
		{`"pair":[1,2]`, `"pair":[1]`, "pair: found a list of 1, want 2"},
		{`"pair":[1,2]`, `"pair":[1,null]`, "pair[1]: found null, want an integer"},
		{`"list":[{"small":1`, `"list":[{"small":[]`, "list[0].small: found a list, want an integer"},
		{`"floats":[1]`, `"floats":{}`, "floats: found an object, want a list"},
	} {
		text := strings.Replace(whole, c.from, c.to, 1)
		if text == whole {
			t.Fatalf("%q does not occur", c.from)
		}
		err := Decode(parsed(t, text), new(outer))
		var e *Error
		if !errors.As(err, &e) || !strings.HasSuffix(err.Error(), c.want) {
			t.Errorf("%s:\n got %v\nwant %s", text, err, c.want)
		}
	}
}

func TestDiffNamesTheFirstPlace(t *testing.T) {
	a := `{"a":[1,{"b":"x"},[]],"c":null,"d":1.50}`
	if d := Diff(parsed(t, a), parsed(t, "{ \"a\" : [1, {\"\\u0062\":\"\\u0078\"}, []],\n\"c\":null, \"d\":1.50 }")); d != nil {
		t.Errorf("the same, written otherwise: %+v", d)
	}
	for _, c := range []struct {
		b    string
		want Difference
	}{
		{`[]`, Difference{"", a, "[]"}},
		{`{"a":[2,{"b":"x"},[]],"c":1,"d":1.50}`, Difference{"a[0]", "1", "2"}},
		{`{"a":[1,{"b":"y"},[]],"c":null,"d":1.50}`, Difference{"a[1].b", `"x"`, `"y"`}},
		{`{"a":[1,{"b":"x"}],"c":null,"d":1.50}`, Difference{"a[2]", "[]", ""}},
		{`{"a":[1,{"b":"x"},[[7]]],"c":null,"d":1.50}`, Difference{"a[2][0]", "", "[7]"}},
		{`{"a":[1,{"b":"x"},[]],"c":false,"d":1.50}`, Difference{"c", "null", "false"}},
		{`{"a":[1,{"b":"x"},[]],"c":null,"d":1.5}`, Difference{"d", "1.50", "1.5"}},
		{`{"a":[1,{"b":"x"},[]],"d":1.50,"c":null}`, Difference{"c", "null", "null"}},
		{`{"a":[1,{"b":"x"},[]],"c":null}`, Difference{"d", "1.50", ""}},
		{`{"a":[1,{"b":"x"},[]],"c":null,"d":1.50,"e":"` + strings.Repeat("\u00e4", 60) + `"}`, Difference{"e", "", `"` + strings.Repeat("\u00e4", 29) + "..."}},
	} {
		if d := cmp.Diff(&c.want, Diff(parsed(t, a), parsed(t, c.b))); d != "" {
			t.Errorf("%s:\n%s", c.b, d)
		}
	}
}
