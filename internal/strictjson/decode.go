package strictjson

import (
	"encoding"
	"fmt"
	"reflect"
	"slices"
	"strings"
)

// Decoder is a value that reads its own form.
type Decoder interface {
	DecodeJSON(v Value) error
}

// Decode sets *into to v. It reads what encoding/json writes of the same type, and less: a struct wants each of its keys, spelled as its tag has it, except those that
// may be left out (omitempty, omitzero), and no other. So what was left out of a text, or misspelt, is an error and not a zero. Booleans, integers, floats, strings, slices, arrays, pointers,
// structs, [Decoder] and [encoding.TextUnmarshaler] can be decoded; null is a nil slice or pointer. An error of v is an [*Error] that names the
// field: "requests[2].tokens: found a string, want an integer". A type that cannot be decoded is a panic.
func Decode(v Value, into any) error {
	return decode(v, reflect.ValueOf(into).Elem(), "")
}

func decode(v Value, into reflect.Value, path string) error {
	fail := func(err error) error { return at(v, path, err) }
	if d, ok := into.Addr().Interface().(Decoder); ok {
		return fail(d.DecodeJSON(v))
	}
	if d, ok := into.Addr().Interface().(encoding.TextUnmarshaler); ok {
		text, err := v.Text()
		if err == nil {
			err = d.UnmarshalText([]byte(text))
		}
		return fail(err)
	}
	switch kind := into.Kind(); kind {
	case reflect.Bool:
		x, err := v.Bool()
		into.SetBool(x)
		return fail(err)
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		x, err := v.Int64()
		if err == nil && into.OverflowInt(x) {
			err = v.Errorf("%d does not fit in %d bits with a sign", x, into.Type().Bits())
		}
		into.SetInt(x)
		return fail(err)
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		x, err := v.Uint64()
		if err == nil && into.OverflowUint(x) {
			err = v.Errorf("%d does not fit in %d bits", x, into.Type().Bits())
		}
		into.SetUint(x)
		return fail(err)
	case reflect.Float32, reflect.Float64:
		x, err := v.Float()
		if err == nil && into.OverflowFloat(x) {
			err = v.Errorf("%s does not fit in a float%d", quote(v.Raw()), into.Type().Bits())
		}
		into.SetFloat(x)
		return fail(err)
	case reflect.String:
		x, err := v.Text()
		into.SetString(x)
		return fail(err)
	case reflect.Pointer:
		if v.kind == Null {
			into.SetZero()
			return nil
		}
		into.Set(reflect.New(into.Type().Elem()))
		return decode(v, into.Elem(), path)
	case reflect.Slice, reflect.Array:
		return decodeList(v, into, path)
	case reflect.Struct:
		return decodeStruct(v, into, path)
	default:
		panic(fmt.Sprintf("strictjson: decode: %s: %s cannot be decoded", path, into.Type()))
	}
}

func decodeList(v Value, into reflect.Value, path string) error {
	if into.Kind() == reflect.Slice && v.kind == Null {
		into.SetZero()
		return nil
	}
	if v.kind != Array {
		return at(v, path, v.not("a list"))
	}
	items := v.Items()
	if into.Kind() == reflect.Slice {
		into.Set(reflect.MakeSlice(into.Type(), len(items), len(items)))
	} else if into.Len() != len(items) {
		return at(v, path, v.Errorf("found a list of %d, want %d", len(items), into.Len()))
	}
	for i, item := range items {
		if err := decode(item, into.Index(i), fmt.Sprintf("%s[%d]", path, i)); err != nil {
			return err
		}
	}
	return nil
}

func decodeStruct(v Value, into reflect.Value, path string) error {
	if v.kind != Object {
		return at(v, path, v.not("an object"))
	}
	var known []string
	for _, f := range fields(into) {
		known = append(known, f.name)
		member, found := v.Get(f.name)
		switch {
		case found:
			if err := decode(member, f.value, join(path, f.name)); err != nil {
				return err
			}
		case f.optional:
			f.value.SetZero()
		default:
			return at(v, path, v.Errorf("no key %q", f.name))
		}
	}
	for _, m := range v.Members() {
		if !slices.Contains(known, m.Key) {
			return at(m.Value, path, m.Value.Errorf("unknown key %s", quote(m.Key)))
		}
	}
	return nil
}

// field is a key of a struct.
type field struct {
	name     string
	optional bool
	value    reflect.Value
}

// fields are those of a struct, with those of structs that it embeds.
func fields(v reflect.Value) []field {
	var list []field
	for i := range v.NumField() {
		f := v.Type().Field(i)
		name, options, _ := strings.Cut(f.Tag.Get("json"), ",")
		switch {
		case f.Anonymous && f.Type.Kind() == reflect.Struct && name == "":
			list = append(list, fields(v.Field(i))...)
		case !f.IsExported() || name == "-" && options == "":
		default:
			if name == "" {
				name = f.Name
			}
			optional := strings.Contains(options, "omit") // omitempty, omitzero
			list = append(list, field{name, optional, v.Field(i)})
		}
	}
	return list
}

func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}

// at puts a path before the problem of an error.
func at(v Value, path string, err error) error {
	if err == nil || err == (*Error)(nil) {
		return nil
	}
	e, ok := err.(*Error)
	if !ok {
		e = v.Errorf("%v", err)
	}
	if path != "" {
		e.Problem = path + ": " + e.Problem
	}
	return e
}

// Difference is a place where two values differ.
type Difference struct {
	Path string `json:"path"` // "rungs[2].total_bytes"; "" for the whole
	A    string `json:"a"`    // what stands there, as JSON, cut if it is long; "" if there is nothing
	B    string `json:"b"`
}

// Diff is the first place, in the order of a, where two values differ; nil if they are the same but for white space and the ways to write a string. Numbers are compared as they are written, and
// keys in their order.
func Diff(a, b Value) *Difference { return diff(a, b, "") }

func diff(a, b Value, path string) *Difference {
	here := &Difference{path, short(a), short(b)}
	if a.kind != b.kind {
		return here
	}
	switch a.kind {
	case String:
		x, _ := a.Text()
		y, _ := b.Text()
		if x != y {
			return here
		}
	case Array:
		x, y := a.Items(), b.Items()
		for i := range max(len(x), len(y)) {
			if d := diff(item(x, i), item(y, i), fmt.Sprintf("%s[%d]", path, i)); d != nil {
				return d
			}
		}
	case Object:
		x, y := a.Members(), b.Members()
		for i := range max(len(x), len(y)) {
			p, q := item(x, i), item(y, i)
			switch {
			case p.Key == q.Key:
				if d := diff(p.Value, q.Value, join(path, p.Key)); d != nil {
					return d
				}
			case i < len(x):
				other, _ := b.Get(p.Key)
				return &Difference{join(path, p.Key), short(p.Value), short(other)}
			default:
				return &Difference{join(path, q.Key), "", short(q.Value)}
			}
		}
	default:
		if a.Raw() != b.Raw() {
			return here
		}
	}
	return nil
}

// item is element i of a list, a zero beyond its end.
func item[T any](list []T, i int) (x T) {
	if i < len(list) {
		x = list[i]
	}
	return x
}

// short is a value as it stands in its text, or the beginning of it.
func short(v Value) string {
	const most = 60
	raw := v.Raw()
	if len(raw) <= most {
		return raw
	}
	return strings.ToValidUTF8(raw[:most], "") + "..."
}
