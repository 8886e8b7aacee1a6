package loader

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"runtime"
	"strings"
	"testing"
	"testing/fstest"
	"time"
)

// The cases of this file are those of the table of malformed and borderline files in the design's reference
// (fit-planner, 4.5), by their numbers there. Cases 54, 60 and 67 need a real file system and are in os_test.go.

// whole is a file with this header and n bytes of data.
func whole(header string, n int) []byte {
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	b = append(b, header...)
	for i := range n {
		b = append(b, byte(i*7+i>>8))
	}
	return b
}

// entry is one tensor of a header.
func entry(name, dtype, shape string, begin, end int) string {
	return fmt.Sprintf(`"%s":{"dtype":"%s","shape":%s,"data_offsets":[%d,%d]}`, name, dtype, shape, begin, end)
}

// one is a header with the single tensor "a", its three fields as given.
func one(dtype, shape, offsets string) string {
	return `{"a":{"dtype":` + dtype + `,"shape":` + shape + `,"data_offsets":` + offsets + `}}`
}

func header(entries ...string) string { return "{" + strings.Join(entries, ",") + "}" }

// openBytes opens a model folder with this one file.
func openBytes(b []byte, o ParseOptions) (*Set, error) {
	return o.OpenFS(fstest.MapFS{singleName: {Data: b}}, "m")
}

const good = `{"a":{"dtype":"I32","shape":[2],"data_offsets":[0,8]}}`

type formatCase struct {
	number string
	file   []byte
	want   string // part of the error; empty if the file is sound
	strict string // part of the error in strict mode, if it differs
	hint   string // part of the hint
}

func formatCases() []formatCase {
	sixteen := make([]string, 10)
	for i := range sixteen {
		sixteen[i] = entry(fmt.Sprintf("t%d", i), "I32", "[2,2]", 0, 16)
	}
	ok16 := func(fields string) string { return `{"a":{` + fields + `}}` }
	cases := []formatCase{
		{number: "1 empty", file: nil, want: "too short for the length", hint: "fetch it again"},
		{number: "1 seven bytes", file: []byte{2, 0, 0, 0, 0, 0, 0}, want: "too short for the length"},
		{number: "2", file: []byte{0x3c, 0, 0, 0, 0, 0, 0, 0}, want: "a header of 60 bytes in a file of 8 bytes"},
		{number: "3", file: []byte{0x3c, 0, 0, 0, 0, 0xff, 0xff, 0xff}, want: "header is too long"},
		{number: "4", file: bytes.Repeat([]byte{0xff}, 8), want: "header is too long: found 18446744073709551615 bytes, want at most 100000000"},
		{number: "5", file: whole("\xff", 0), want: "byte 0xff is not UTF-8 (at byte 8)"},
		{number: "6", file: whole("{", 0), want: "found the end of the text, want a key"},
		{number: "7", file: append(binary.LittleEndian.AppendUint64(nil, 1000), "{}"...), want: "a header of 1000 bytes in a file of 10 bytes"},
		{number: "8", file: whole(header(sixteen...), 16), want: `tensor "t1": its bytes overlap those of tensor "t0"`},
		{number: "11", file: append(whole(good, 8), "PK\x03\x04"...), want: "4 bytes after the last tensor: found 74 bytes, want 70 bytes"},
		{number: "12", file: whole(good, 6), want: "truncated by 2 bytes: found 68 bytes, want 70 bytes", hint: "fetch it again"},
		{number: "13", file: whole(one(`"I32"`, "[2,2]", "[0,4]"), 4), want: "found 4 bytes, want 16 bytes"},
		{number: "14", file: whole(one(`"U8"`, "[2,18446744073709551614]", "[0,4]"), 4), want: `tensor "a": the shape's product is above 2^64-1`},
		{number: "15 U8", file: whole(one(`"U8"`, "[2,9223372036854775807]", "[0,4]"), 4), want: "size in bits is above 2^64-1"},
		{number: "15 F32", file: whole(one(`"F32"`, "[2,9223372036854775807]", "[0,4]"), 4), want: "size in bits is above 2^64-1"},
		{number: "16", file: whole(one(`"F4"`, "[1,3]", "[0,2]"), 2), want: "12 bits, is not a whole number of bytes"},
		{number: "17", file: whole("{}\r \t\n", 0)},
		{number: "18", file: whole("\t\n{}\r ", 0), strict: "white space before"},
		{number: "19 x", file: whole("{}x", 0), want: "'x' after the end"},
		{number: "19 twice", file: whole("{}{}", 0), want: "an object after the end"},
		{number: "20", file: whole("\xef\xbb\xbf{}", 0), want: "byte order mark"},
		{number: "21", file: whole(header(entry("a", "I32", "[1]", 0, 4), entry("b", "I32", "[1]", 8, 12)), 12),
			want: `tensor "b": 4 bytes between tensor "a" and it belong to none: found data_offsets [8, 12], want a range that begins at 4`},
		{number: "22", file: whole(one(`"I32"`, "[1]", "[4,8]"), 8), want: `tensor "a": 4 bytes before the first tensor`},
		{number: "23", file: whole(one(`"I32"`, "[1]", "[8,4]"), 8), want: "end before they begin: found [8, 4]"},
		{number: "24 one", file: whole(one(`"I32"`, "[1]", "[0]"), 4), want: "data_offsets has 1 numbers, want 2"},
		{number: "24 none", file: whole(one(`"I32"`, "[0]", "[]"), 0), want: "data_offsets has 0 numbers, want 2"},
		{number: "24 three", file: whole(one(`"I32"`, "[1]", "[0,4,8]"), 4), want: "data_offsets has more than 2 numbers"},
		{number: "26 negative", file: whole(one(`"I32"`, "[-1]", "[0,4]"), 4), want: `"-1" is not an integer from 0 up`},
		{number: "26 fraction", file: whole(one(`"I32"`, "[1.5]", "[0,4]"), 4), want: `"1.5" is not an integer from 0 up`},
		{number: "26 null", file: whole(one(`"I32"`, "null", "[0,4]"), 4), want: "found null, want a list"},
		{number: "26 null within", file: whole(one(`"I32"`, "[null]", "[0,4]"), 4), want: "found null, want an integer"},
		{number: "26 missing", file: whole(ok16(`"dtype":"I32","data_offsets":[0,4]`), 4), want: `tensor "a": the entry has no shape`},
		{number: "27 missing", file: whole(ok16(`"shape":[1],"data_offsets":[0,4]`), 4), want: `tensor "a": the entry has no dtype`},
		{number: "27 all missing", file: whole(ok16(``), 0), want: "no dtype and no shape and no data_offsets"},
		{number: "27 f32", file: whole(one(`"f32"`, "[1]", "[0,4]"), 4), want: `tensor "a": unknown dtype "f32"`},
		{number: "27 float32", file: whole(one(`"float32"`, "[1]", "[0,4]"), 4), want: `unknown dtype "float32"`},
		{number: "27 unknown", file: whole(one(`"F8_E3M4"`, "[1]", "[0,4]"), 4), want: `unknown dtype "F8_E3M4"`},
		{number: "27 null", file: whole(one(`null`, "[1]", "[0,4]"), 4), want: "found null, want a string"},
		{number: "28", file: whole(ok16(`"dtype":"I32","dtype":"I32","shape":[1],"data_offsets":[0,4]`), 4), want: `duplicate field "dtype"`},
		{number: "28 escaped", file: whole(ok16(`"dtype":"I32","\u0064type":"F32","shape":[1],"data_offsets":[0,4]`), 4), want: `duplicate field "dtype"`},
		{number: "28 shape", file: whole(ok16(`"dtype":"I32","shape":[2],"shape":[1],"data_offsets":[0,4]`), 4), want: `duplicate field "shape"`},
		{number: "28 unknown", file: whole(ok16(`"dtype":"I32","x":1,"shape":[1],"x":2,"data_offsets":[0,4]`), 4), want: `duplicate field "x"`, strict: `unknown field "x"`},
		{number: "29", file: whole(`{"__metadata__":{},"__metadata__":{}}`, 0), want: `duplicate key "__metadata__"`},
		{number: "29 inside", file: whole(`{"__metadata__":{"k":"1","k":"2"}}`, 0), want: `duplicate key "k"`},
		{number: "30", file: whole(header(entry("a", "I32", "[1]", 0, 4), entry("a", "I32", "[1]", 4, 8)), 8), want: `tensor "a": duplicate name`},
		{number: "31", file: whole(header(entry("a", "I32", "[1]", 0, 4), entry("a", "I32", "[1]", 0, 4)), 4), want: `tensor "a": duplicate name`},
		{number: "32", file: whole(header(entry("a", "I32", "[1]", 0, 4), entry(`\u0061`, "I32", "[1]", 4, 8)), 8), want: `tensor "a": duplicate name`},
		{number: "33 number", file: whole(`{"__metadata__":{"k":1}}`, 0), want: "__metadata__ must map text to text: found a number"},
		{number: "33 list", file: whole(`{"__metadata__":{"k":[]}}`, 0), want: "__metadata__ must map text to text: found a list"},
		{number: "33 map", file: whole(`{"__metadata__":{"k":{"a":"b"}}}`, 0), want: "__metadata__ must map text to text: found an object"},
		{number: "33 null", file: whole(`{"__metadata__":{"k":null}}`, 0), want: "__metadata__ must map text to text: found null"},
		{number: "33 whole", file: whole(`{"__metadata__":[]}`, 0), want: "__metadata__ must map text to text: found a list"},
		{number: "34", file: whole(`{"__metadata__":null}`, 0)},
		{number: "35 missing", file: whole(good, 8)},
		{number: "35 empty", file: whole(`{"__metadata__":{},`+good[1:], 8)},
		{number: "36", file: whole(ok16(`"dtype":"I32","x":[{"y":null}],"shape":[1],"data_offsets":[0,4]`), 4), strict: `unknown field "x"`},
		{number: "36 case", file: whole(ok16(`"DTYPE":"I32","shape":[1],"data_offsets":[0,4]`), 4), want: "the entry has no dtype", strict: `unknown field "DTYPE"`},
		{number: "37", file: whole(ok16(`"x":`+strings.Repeat("[", 100_000)+strings.Repeat("]", 100_000)), 0), want: "nested deeper than 64", strict: `unknown field "x"`},
		{number: "38", file: whole(one(`"I32"`, "[]", "[0,4]"), 4)},
		{number: "39", file: whole(one(`"I32"`, "[2,0]", "[0,0]"), 0)},
		{number: "40", file: whole(header(entry("a", "I32", "[1]", 0, 4), entry("b", "F32", "[0]", 0, 0), entry("c", "F32", "[0]", 4, 4)), 4)},
		{number: "41 length", file: whole(one(`"I32"`, "[0]", "[0,4]"), 4), want: "found 4 bytes, want 0 bytes"},
		{number: "41 beyond", file: whole(one(`"I32"`, "[0]", "[4,4]"), 0), want: "4 bytes before the first tensor"},
		{number: "42", file: whole(one(`"I32"`, "[0,18446744073709551615]", "[0,0]"), 0)},
		{number: "43", file: whole(one(`"I32"`, "[9223372036854775808,4,0]", "[0,0]"), 0), want: "the shape's product is above 2^64-1"},
		{number: "44", file: whole(one(`"I32"`, "[1"+strings.Repeat(",1", 9_999)+"]", "[0,4]"), 4)},
		{number: "45 name", file: whole(header(entry(`a\u0000b`, "I32", "[1]", 0, 4)), 4), strict: `tensor "a\x00b": zero byte in the name`},
		{number: "45 metadata", file: whole(`{"__metadata__":{"k":"\u0000"}}`, 0), strict: "zero byte in the text"},
		{number: "46", file: whole(header(entry(`\ud800`, "I32", "[1]", 0, 4)), 4), want: "half of a surrogate pair"},
		{number: "46 raw", file: whole(header(entry("\xed\xa0\x80", "I32", "[1]", 0, 4)), 4), want: "byte 0xed is not UTF-8"},
		{number: "47 list", file: whole(`[]`, 0), want: "the header is not a JSON object: found byte 0x5b, want '{'"},
		{number: "47 null", file: whole(`null`, 0), want: "the header is not a JSON object"},
		{number: "47 string", file: whole(`"a"`, 0), want: "the header is not a JSON object"},
		{number: "47 blanks", file: whole(`   `, 0), want: "the header is not a JSON object: found nothing"},
		{number: "48 null", file: whole(`{"a":null}`, 0), want: `tensor "a": found null, want an object`},
		{number: "48 list", file: whole(`{"a":["I32",[1],[0,4]]}`, 4), want: `tensor "a": found a list, want an object`},
		{number: "49 zero", file: whole(one(`"I32"`, "[01]", "[0,4]"), 4), want: "leading zero"},
		{number: "49 plus", file: whole(one(`"I32"`, "[+4]", "[0,4]"), 4), want: "found '+', want an integer"},
		{number: "49 hex", file: whole(one(`"I32"`, "[0x4]", "[0,4]"), 4), want: "found 'x'"},
		{number: "49 NaN", file: whole(one(`"I32"`, "[NaN]", "[0,4]"), 4), want: "found 'N', want an integer"},
		{number: "50 2^63", file: whole(one(`"U8"`, "[9223372036854775808]", "[0,9223372036854775808]"), 4), want: "size in bits is above"},
		{number: "50 2^63 spanned", file: whole(one(`"U8"`, "[8]", "[9223372036854775800,9223372036854775808]"), 4), want: "beyond the end of any file"},
		{number: "50 2^63-1", file: whole(one(`"U8"`, "[7]", "[9223372036854775800,9223372036854775807]"), 4), want: "beyond the end of any file"},
		{number: "50 2^40", file: whole(one(`"U8"`, "[1099511627780]", "[0,1099511627780]"), 4), want: "truncated by 1099511627776 bytes"},
		{number: "51", file: whole(header(entry("b", "I32", "[1]", 4, 8), entry("a", "I32", "[1]", 0, 4)), 8)},
		{number: "52", file: whole(good+" ", 8)},
		{number: "53", file: whole(header(entry("a", "U8", "[1]", 0, 1), entry("b", "F32", "[1]", 1, 5)), 5)},
		{number: "55 LFS", file: []byte("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"), want: "the file is a Git LFS pointer", hint: "git lfs pull"},
		{number: "55 Xet", file: []byte("# xet version 0\nfilesize = 12345\nhash = 'ab'\n"), want: "the file is a Xet pointer", hint: "without its large files"},
		{number: "56 HTML", file: []byte("\n<!DOCTYPE html><html><body>Sign in</body></html>"), want: "the file is a web page", hint: "web server's answer"},
		{number: "56 short HTML", file: []byte("<html>"), want: "the file is a web page", hint: "web server's answer"},
		{number: "56 XML", file: []byte(`<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>`), want: "the file is a web page", hint: "web server's answer"},
		{number: "56 JSON", file: []byte(`{"error":"Repository not found"}`), want: "the file is a JSON text", hint: "web server's answer"},
		{number: "56 zip", file: append([]byte("PK\x03\x04\x00\x00\x08\x08"), make([]byte, 500)...), want: "the file is a zip archive", hint: "PyTorch"},
		{number: "56 zip with a short length", file: append([]byte("PK\x03\x04\x00\x00\x00\x00"), make([]byte, 500)...), want: "the file is a zip archive", hint: "PyTorch"},
		{number: "56 pickle", file: append([]byte("\x80\x02\x8a\x0al\xfc\x9cF"), make([]byte, 500)...), want: "the file is a pickle", hint: "PyTorch"},
		{number: "56 gguf", file: append([]byte("GGUF\x03\x00\x00\x00"), make([]byte, 500)...), want: "the file is a GGUF file", hint: "only safetensors"},
		{number: "56 none of these", file: whole(`{x:1`+strings.Repeat(" ", 0x0280-4), 0), want: "found 'x', want a key in quotes"}, // its length looks like a pickle
		{number: "57", file: make([]byte, 4096), want: "all-zero header", hint: "never arrived"},
		{number: "57 zero pages after the length", file: append([]byte{0, 8, 0, 0, 0, 0, 0, 0}, make([]byte, 4096)...), want: "all-zero header", hint: "never arrived"},
		{number: "59", file: append(binary.LittleEndian.AppendUint64(nil, 100_000_001), "{}"...), want: "header is too long: found 100000001 bytes"},
		{number: "61", file: whole(one(`"F32"`, "[1000,1000]", "[0,4]"), 4), want: "F32 [1000, 1000] takes: found 4 bytes, want 4000000 bytes"},
		{number: "62", file: whole(one(`"F32"`, "[2,2]", "[1099511627776,1099511627792]"), 16), want: "1099511627776 bytes before the first tensor"},
		{number: "63", file: whole(one(`"F32"`, "[2,2]", "[-16,0]"), 16), want: `"-16" is not an integer from 0 up`},
		{number: "64", file: append(binary.LittleEndian.AppendUint64(nil, math.MaxUint64-7), "{}"...), want: "header is too long"},
		{number: "65", file: whole(one(`"F32"`, "[2,2]", "[0,8]"), 8), want: "found 8 bytes, want 16 bytes"},
		{number: "66", file: whole(header(entry("A", "U8", "[100]", 0, 100), entry("B", "U8", "[100]", 50, 150)), 150),
			want: `tensor "B": its bytes overlap those of tensor "A", [0, 100]: found data_offsets [50, 150], want a range that begins at 100`},
		{number: "69", file: whole(one(`{"I32":null}`, "[1]", "[0,4]"), 4), want: `tensor "a": found an object, want a string`},
		{number: "70 large", file: whole(one(`"I32"`, "[18446744073709551616,0]", "[0,4]"), 4), want: "is above 2^64-1"},
		{number: "70 very large", file: whole(one(`"I32"`, "[1]", "[0,99999999999999999999999]"), 4), want: "is above 2^64-1"},
		{number: "70 -0", file: whole(one(`"I32"`, "[1]", "[-0,4]"), 4), want: `"-0" is not an integer`},
	}
	for _, number := range []string{"-1", "4.0", "4e0", `"4"`, "null", "true"} {
		for _, offsets := range []string{"[0," + number + "]", "[" + number + ",4]"} {
			c := formatCase{number: "25 " + offsets, file: whole(one(`"I32"`, "[1]", offsets), 4), want: "is not an integer from 0 up"}
			switch number {
			case `"4"`, "null", "true":
				c.want = "want an integer"
			}
			cases = append(cases, c)
		}
	}
	for _, n := range []int{99_994, 99_997, 100_000} {
		cases = append(cases, formatCase{number: fmt.Sprint("68 ", n), file: whole(good+strings.Repeat(" ", n-len(good)), 8)})
	}
	return cases
}

func TestEveryCaseOfTheFormat(t *testing.T) {
	for _, c := range formatCases() {
		t.Run(c.number, func(t *testing.T) {
			for _, strict := range []bool{false, true} {
				want := c.want
				if strict && c.strict != "" {
					want = c.strict
				}
				set, err := openBytes(c.file, ParseOptions{Strict: strict})
				if want == "" {
					if err != nil {
						t.Fatalf("strict %v: %v, want it accepted", strict, err)
					}
					checkSound(t, set, c.file)
					set.Close()
					continue
				}
				var e *FormatError
				if !errors.As(err, &e) || !strings.Contains(e.Error(), want) {
					t.Fatalf("strict %v: %v, want ...%s...", strict, err, want)
				}
				if !strings.HasPrefix(e.Error(), "open m/model.safetensors: ") || len(e.Error()) > 1000 {
					t.Errorf("message %q", e)
				}
				if c.hint != "" && !strings.Contains(Hint(err), c.hint) {
					t.Errorf("hint %q, want ...%s...", Hint(err), c.hint)
				}
			}
		})
	}
}

// checkSound checks what is promised of an opened set whose one file is b.
func checkSound(t *testing.T, s *Set, b []byte) {
	t.Helper()
	f := s.Files[0]
	at := f.DataStart
	for _, x := range f.Tensors {
		if x.Offset != at || x.Bytes*8 != x.Elements()*int64(x.DType.Bits()) {
			t.Fatalf("tensor %v is at %d with %d bytes; the one before ends at %d", x, x.Offset, x.Bytes, at)
		}
		at += x.Bytes
		if got, ok := s.Tensor(x.Name); !ok || got != x {
			t.Fatalf("tensor %q is not found by its name", x.Name)
		}
		data := make([]byte, x.Bytes)
		if err := s.ReadAt(x, data, 0); err != nil || !bytes.Equal(data, b[x.Offset:x.Offset+x.Bytes]) {
			t.Fatalf("tensor %v reads as %v, %v", x, data, err)
		}
	}
	if at != int64(len(b)) || f.Size != at || s.TotalBytes() != at-f.DataStart || len(s.Names()) != len(f.Tensors) {
		t.Fatalf("tensors end at %d in a file of %d bytes", at, len(b))
	}
}

func TestWhatAcceptedCasesMean(t *testing.T) {
	tensor := func(file []byte, name string) *Tensor {
		t.Helper()
		s, err := openBytes(file, ParseOptions{})
		if err != nil {
			t.Fatal(err)
		}
		x, ok := s.Tensor(name)
		if !ok {
			t.Fatalf("no tensor %q among %q", name, s.Names())
		}
		return x
	}
	if x := tensor(whole(one(`"I32"`, "[]", "[0,4]"), 4), "a"); x.Elements() != 1 || len(x.Shape) != 0 {
		t.Errorf("case 38: %v has %d elements", x, x.Elements())
	}
	if x := tensor(whole(one(`"I32"`, "[0,18446744073709551615]", "[0,0]"), 0), "a"); x.Elements() != 0 || x.Shape[1] != math.MaxInt64 {
		t.Errorf("case 42: %v", x)
	}
	if x := tensor(whole(header(entry(`a\u0000b`, "I32", "[1]", 0, 4)), 4), "a\x00b"); x.Name != "a\x00b" {
		t.Errorf("case 45: name %q", x.Name)
	}
	if x := tensor(whole(header(entry(`\ud83d\ude00\n`, "I32", "[1]", 0, 4)), 4), "😀\n"); x.Bytes != 4 {
		t.Errorf("escaped name: %v", x)
	}
	if x := tensor(whole(one(`"F6_E3M2"`, "[2,4]", "[0,6]"), 6), "a"); x.DType != F6_E3M2 || x.Elements() != 8 {
		t.Errorf("sub-byte type: %v", x)
	}
	s, err := openBytes(whole(`{"__metadata__":{"format":"pt","n\u0061me":"x"},`+good[1:], 8), ParseOptions{Strict: true})
	if err != nil || s.Files[0].Metadata["format"] != "pt" || s.Files[0].Metadata["name"] != "x" {
		t.Errorf("metadata %v, %v", s, err)
	}
}

func TestFaultIsLocated(t *testing.T) {
	file := whole(header(entry("a", "I32", "[1]", 0, 4), entry("b", "I31", "[1]", 4, 8)), 8)
	_, err := openBytes(file, ParseOptions{})
	var e *FormatError
	if !errors.As(err, &e) || e.Tensor != "b" || e.Offset != int64(bytes.Index(file, []byte(`"I31"`))) {
		t.Errorf("%#v", e)
	}
	_, err = openBytes(whole(good, 6), ParseOptions{})
	if !errors.As(err, &e) || e.Missing != 2 || e.Path != "m/model.safetensors" {
		t.Errorf("%#v", e)
	}
	if _, err := ParseHeader([]byte(good), 1000, ParseOptions{}); err == nil || !strings.HasPrefix(err.Error(), "read header: ") {
		t.Errorf("without a path: %v", err)
	}
	if _, err := ParseHeader([]byte(good), 20, ParseOptions{}); !errors.As(err, &e) || !strings.Contains(e.Problem, "does not fit") {
		t.Errorf("a header longer than its file: %v", err)
	}
	if _, err := ParseHeader(make([]byte, MaxHeader+1), math.MaxInt64, ParseOptions{}); !errors.As(err, &e) || !strings.Contains(e.Problem, "too long") {
		t.Errorf("a header that is too long: %v", err)
	}
}

// slow is far more than any header takes on a busy machine under the race detector, and far less than a quadratic one would.
const slow = 20 * time.Second

// measured runs f and returns the bytes it allocated. It fails if f takes longer than the limit.
func measured(t *testing.T, limit time.Duration, f func()) int64 {
	t.Helper()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	start := time.Now()
	f()
	if took := time.Since(start); took > limit {
		t.Errorf("took %v, want less than %v", took, limit)
	}
	runtime.ReadMemStats(&after)
	return int64(after.TotalAlloc - before.TotalAlloc)
}

// blanks is a file that has a first few bytes and then blanks, of any size and at no cost.
type blanks struct {
	start []byte
	size  int64
	reads *int
}

func (b blanks) ReadAt(p []byte, off int64) (int, error) {
	*b.reads++
	n := int(min(int64(len(p)), b.size-off))
	if n <= 0 {
		return 0, io.EOF
	}
	for filled := copy(p[:n], "        "); filled < n; {
		filled += copy(p[filled:n], p[:filled])
	}
	if off < int64(len(b.start)) {
		copy(p, b.start[off:])
	}
	return n, nil
}
func (b blanks) Close() error               { return nil }
func (b blanks) Read([]byte) (int, error)   { return 0, fs.ErrInvalid }
func (b blanks) Stat() (fs.FileInfo, error) { return sized(b.size), nil }

// sized is the FileInfo of a regular file of this size.
type sized int64

func (s sized) Name() string       { return singleName }
func (s sized) Size() int64        { return int64(s) }
func (s sized) Mode() fs.FileMode  { return 0o444 }
func (s sized) ModTime() time.Time { return time.Time{} }
func (s sized) IsDir() bool        { return false }
func (s sized) Sys() any           { return nil }

// oneFile is a file system with one file.
type oneFile struct{ fs.File }

func (f oneFile) Open(name string) (fs.File, error) {
	if name != singleName {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
	}
	return f.File, nil
}

func TestLengthIsCheckedBeforeMemoryIsTaken(t *testing.T) {
	for _, n := range []uint64{60, 1000, MaxHeader, MaxHeader + 1, 1 << 62, 1 << 63, math.MaxUint64 - 7, math.MaxUint64} {
		file := append(binary.LittleEndian.AppendUint64(nil, n), '{')
		grown := measured(t, time.Second, func() {
			if _, err := openBytes(file, ParseOptions{}); err == nil {
				t.Errorf("N = %d: accepted", n)
			}
		})
		if grown > 64<<10 {
			t.Errorf("N = %d: allocated %d bytes", n, grown)
		}
	}
}

func TestCase58LongestHeaderIsReadOnceIntoOneBuffer(t *testing.T) {
	var reads int
	file := blanks{append(binary.LittleEndian.AppendUint64(nil, MaxHeader), "{}"...), prefixSize + MaxHeader, &reads}
	grown := measured(t, slow, func() {
		s, err := OpenFS(oneFile{file}, "")
		if err != nil || s.TotalBytes() != 0 || s.Files[0].DataStart != prefixSize+MaxHeader {
			t.Errorf("%v, %v", s, err)
		}
	})
	if grown > MaxHeader+MaxHeader/10 || reads != 2 {
		t.Errorf("%d bytes allocated in %d reads, want %d in 2", grown, reads, MaxHeader)
	}
}

// manyTensors is the header of n tensors of 4 bytes each; overlap puts all in the same place.
func manyTensors(n int, overlap bool) []byte {
	b := []byte{'{'}
	for i := range n {
		if i > 0 {
			b = append(b, ',')
		}
		at := 4 * i
		if overlap {
			at = 0
		}
		b = fmt.Appendf(b, `"model.layers.%d.w":{"dtype":"F32","shape":[1],"data_offsets":[%d,%d]}`, i, at, at+4)
	}
	return append(b, '}')
}

func TestCase9And10ManyOverlappingTensorsTakeBoundedTimeAndMemory(t *testing.T) {
	// Ten million entries are more than the longest header holds, whatever their names.
	if n := 10_000_000 * minEntry; n <= MaxHeader {
		t.Errorf("ten million entries fit in %d bytes", n)
	}
	text := manyTensors(100_000, true)
	grown := measured(t, slow, func() {
		_, err := ParseHeader(text, int64(len(text))+12, ParseOptions{})
		if err == nil || !strings.Contains(err.Error(), "overlap") {
			t.Errorf("case 10: %v", err)
		}
	})
	if grown > 4*int64(len(text)) {
		t.Errorf("case 10: %d bytes allocated for a header of %d", grown, len(text))
	}
	// The same for a header that only looks like many tensors.
	text = []byte(`{"a":[` + strings.Repeat(`"data_offsets",`, 1_000_000))
	grown = measured(t, slow, func() {
		if _, err := ParseHeader(text, int64(len(text))+12, ParseOptions{}); err == nil {
			t.Error("accepted")
		}
	})
	if grown > 8*int64(len(text)) {
		t.Errorf("%d bytes allocated for a header of %d", grown, len(text))
	}
}

// Names must be found whatever the header's text was, and must not keep it alive.
func TestNamesDoNotKeepTheHeaderAlive(t *testing.T) {
	text := []byte(good[:len(good)-1] + strings.Repeat(" ", 32<<20) + "}")
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	h, err := ParseHeader(bytes.Clone(text), prefixSize+int64(len(text))+8, ParseOptions{})
	if err != nil {
		t.Fatal(err)
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > 1<<20 {
		t.Errorf("a header of one tensor keeps %d bytes", grown)
	}
	if x, ok := h.Tensor("a"); !ok || x.Name != "a" {
		t.Error("not found")
	}
	runtime.KeepAlive(text)
}

func TestDTypesAndTheirNames(t *testing.T) {
	const bits = "BOOL 8 F4 4 F6_E2M3 6 F6_E3M2 6 U8 8 I8 8 F8_E5M2 8 F8_E4M3 8 F8_E8M0 8 F8_E4M3FNUZ 8 F8_E5M2FNUZ 8 " +
		"I16 16 U16 16 F16 16 BF16 16 I32 32 U32 32 F32 32 C64 64 F64 64 I64 64 U64 64"
	words := strings.Fields(bits)
	for i := 0; i < len(words); i += 2 {
		d, ok := ParseDType(words[i])
		if !ok || d.String() != words[i] || fmt.Sprint(d.Bits()) != words[i+1] || int(d) != i/2+1 {
			t.Errorf("%s: %v of %d bits, number %d", words[i], d, d.Bits(), d)
		}
	}
	for _, name := range []string{"", "f32", "F32 ", "float32"} {
		if d, ok := ParseDType(name); ok {
			t.Errorf("%q is %v", name, d)
		}
	}
	for _, d := range []DType{0, U64 + 1, 255} {
		if d.Bits() != 0 || d.String() != fmt.Sprintf("DType(%d)", uint8(d)) {
			t.Errorf("%d is %v", uint8(d), d)
		}
	}
}

func BenchmarkParseHeader(b *testing.B) {
	for _, n := range []int{100, 10_000, 1_000_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			text := manyTensors(n, false)
			b.SetBytes(int64(len(text)))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := ParseHeader(text, prefixSize+int64(len(text))+4*int64(n), ParseOptions{}); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(n), "ns/tensor")
		})
	}
}
