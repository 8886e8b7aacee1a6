package transformer

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/trainerrank/engine/internal/strictjson"
)

// reader reads the members of one object of config.json. It remembers which keys were looked at, so that [reader.leftovers]
// can judge the others, and keeps the first error, so that the mapping of a family reads as a list of keys.
type reader struct {
	spec   *Spec // takes the notes
	prefix string
	obj    strictjson.Value
	seen   map[string]bool
	shared *outcome
}

// outcome is common to the readers of one file.
type outcome struct {
	err     error
	assumed []string // "key value" of what config.json is silent about
	unknown int      // keys noted as unknown
}

// maxUnknown bounds the notes about unknown keys: a hostile file may hold a million.
const maxUnknown = 20

func newReader(s *Spec, prefix string, obj strictjson.Value) *reader {
	return &reader{spec: s, prefix: prefix, obj: obj, seen: map[string]bool{}, shared: new(outcome)}
}

// sub reads an object below this one.
func (r *reader) sub(key string, obj strictjson.Value) *reader {
	return &reader{spec: r.spec, prefix: r.path(key) + ".", obj: obj, seen: map[string]bool{}, shared: r.shared}
}

func (r *reader) fail(err error) {
	if r.shared.err == nil {
		r.shared.err = err
	}
}

func (r *reader) failed() bool { return r.shared.err != nil }

func (r *reader) err() error { return r.shared.err }

// path is where key stands in config.json. Keys come from strangers: odd ones are quoted.
func (r *reader) path(key string) string {
	if len(key) > 80 || strings.IndexFunc(key, func(c rune) bool {
		return !('a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '_' || c == '-' || c == '.')
	}) >= 0 {
		key = quoted(key)
	}
	return r.prefix + key
}

func (r *reader) get(key string) strictjson.Value {
	r.seen[key] = true
	v, _ := r.obj.Get(key)
	return v
}

// set says whether key is there and not null.
func (r *reader) set(key string) bool {
	k := r.get(key).Kind()
	return k != strictjson.Missing && k != strictjson.Null
}

func (r *reader) wrong(key, wanted string) {
	r.fail(&ConfigError{Key: r.path(key), Found: shown(r.get(key)), Wanted: wanted})
}

// assume remembers that config.json is silent about key.
func (r *reader) assume(key string, v any) {
	r.shared.assumed = append(r.shared.assumed, fmt.Sprintf("%s %v", r.path(key), v))
}

// number is a whole number from low to high that must be there.
func (r *reader) number(key string, low, high int) int {
	n, err := r.get(key).Int64()
	if err != nil || n < int64(low) || n > int64(high) {
		r.wrong(key, fmt.Sprintf("a whole number, %d to %d", low, high))
		return low
	}
	return int(n)
}

// count is a number from 1.
func (r *reader) count(key string, high int) int { return r.number(key, 1, high) }

// countOr is a count that may be absent, unless absent is 0.
func (r *reader) countOr(key string, high, absent int) int {
	if absent > 0 && r.get(key).Kind() == strictjson.Missing {
		r.assume(key, absent)
		return absent
	}
	return r.count(key, high)
}

// positive is a number above 0, within what a Spec may hold, that must be there.
func (r *reader) positive(key string) float64 {
	x, err := r.get(key).Float()
	if err != nil || !(x >= minScalar && x <= maxScalar) {
		r.wrong(key, "a number above 0")
		return 1
	}
	return x
}

func (r *reader) positiveOr(key string, absent float64) float64 {
	if r.get(key).Kind() == strictjson.Missing {
		r.assume(key, absent)
		return absent
	}
	return r.positive(key)
}

// boolOr is true or false; null and absent mean the default.
func (r *reader) boolOr(key string, absent bool) bool {
	if !r.set(key) {
		return absent
	}
	b, err := r.get(key).Bool()
	if err != nil {
		r.wrong(key, "true or false")
	}
	return b
}

func (r *reader) text(key string) string {
	s, err := r.get(key).Text()
	if err != nil {
		r.wrong(key, "a string")
	}
	return s
}

// object is the reader of an object below; nil where it is absent, null or empty.
func (r *reader) object(key string) *reader {
	if !r.set(key) {
		return nil
	}
	v := r.get(key)
	if v.Kind() != strictjson.Object {
		r.wrong(key, "an object or null")
		return nil
	}
	if len(v.Members()) == 0 {
		return nil
	}
	return r.sub(key, v)
}

// refuse looks for keys that are known to change the arithmetic, and whose value says that they do. A key that was read
// before is left out.
func (r *reader) refuse() {
	for _, m := range r.obj.Members() {
		rule, known := refusals[m.Key]
		if !known || r.seen[m.Key] {
			continue
		}
		r.seen[m.Key] = true
		harmless := isNeutral
		if rule.harmless != nil {
			harmless = rule.harmless
		}
		if !harmless(m.Value) {
			r.fail(&UnsupportedError{Key: r.path(m.Key), Value: shown(m.Value), Why: rule.why, Advice: rule.hint})
		}
	}
}

// leftovers judges the keys that nobody looked at.
func (r *reader) leftovers() {
	for _, m := range r.obj.Members() {
		if r.seen[m.Key] || ignored(m.Key) || isNeutral(m.Value) {
			continue
		}
		switch m.Value.Kind() {
		case strictjson.Number, strictjson.Bool: // false is neutral
			r.fail(&UnsupportedError{Key: r.path(m.Key), Value: shown(m.Value), Why: "the key is not known, and a number or a switch may change the arithmetic",
				Advice: "if it changes nothing in a forward, remove it from config.json"})
		default:
			if r.shared.unknown++; r.shared.unknown <= maxUnknown {
				r.spec.note("%s is not known and is ignored", r.path(m.Key))
			}
		}
	}
}

// quoted shows a foreign string: escaped and of bounded length.
func quoted(s string) string {
	const most = 60
	if len(s) > most {
		return strconv.Quote(strings.ToValidUTF8(s[:most], "")) + "..."
	}
	return strconv.Quote(s)
}

// shown is a value of the file in an error, of bounded length.
func shown(v strictjson.Value) string {
	switch v.Kind() {
	case strictjson.String:
		s, _ := v.Text()
		return quoted(s)
	case strictjson.Array:
		return fmt.Sprintf("a list of %d", len(v.Items()))
	case strictjson.Object:
		return fmt.Sprintf("an object with %d keys", len(v.Members()))
	case strictjson.Missing:
		return "nothing"
	}
	if raw := v.Raw(); len(raw) <= 60 {
		return raw
	}
	return v.Raw()[:60] + "..."
}
