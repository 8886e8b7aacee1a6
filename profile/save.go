package profile

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"slices"

	"github.com/trainerrank/engine/internal/strictjson"
)

// version of the saved form. Another one is refused: a profile that is misread admits what does not fit.
const version = 1

// The saved form of entries; around them stands {"version":1,"entries":[...]}. Fractions are pairs [numerator, denominator], shares are in the order of kinds.
type (
	savedEntry struct {
		Model        string        `json:"model"`
		Topology     [4]int        `json:"topology"` // data, tensor, context, pipeline parallel
		Cost         string        `json:"cost"`
		GradGroups   int           `json:"grad_groups"`
		NoGradGroups int           `json:"no_grad_groups"`
		Kinds        []string      `json:"kinds"`
		Buckets      []savedBucket `json:"buckets"`
	}
	savedBucket struct {
		Peak     savedTrack  `json:"peak"`
		Kept     *savedTrack `json:"kept"` // null if never measured
		Fraction [2]int64    `json:"fraction"`
	}
	savedTrack struct {
		Packed int64      `json:"packed_tokens"`
		Ratio  [2]int64   `json:"logical_per_packed"`
		Bytes  int64      `json:"bytes"`
		Rate   [2]int64   `json:"bytes_per_token"`
		Shares [][2]int64 `json:"shares"`
	}
)

func (r rational) pair() [2]int64 { return [2]int64{r.num, r.den} }

func (t *track) saved() savedTrack {
	s := savedTrack{Packed: t.packed, Ratio: t.ratio.pair(), Bytes: t.bytes, Rate: t.rate.pair(), Shares: make([][2]int64, len(t.shares))}
	for i, r := range t.shares {
		s.Shares[i] = r.pair()
	}
	return s
}

// Save is the profile as JSON, one entry a line, for [Read]. Equal profiles have equal bytes. Nothing is rounded: numbers are integers, rates are fractions.
func (p *Profile) Save() []byte {
	var out bytes.Buffer
	fmt.Fprintf(&out, `{"version":%d,"entries":[`, version)
	for i := range p.entries {
		e := &p.entries[i]
		t := e.signature.Topology
		s := savedEntry{
			Model: e.signature.Model, Topology: [4]int{t.DataParallel, t.TensorParallel, t.ContextParallel, t.PipelineParallel}, Cost: e.signature.Cost,
			GradGroups: e.signature.GradGroups, NoGradGroups: e.signature.NoGradGroups, Kinds: append([]string{}, e.kinds...), Buckets: []savedBucket{},
		}
		for j := range e.buckets {
			b := &e.buckets[j]
			saved := savedBucket{Peak: b.peak.saved(), Fraction: [2]int64{0, 1}}
			if b.kept.packed > 0 {
				kept := b.kept.saved()
				saved.Kept, saved.Fraction = &kept, b.fraction.pair()
			}
			s.Buckets = append(s.Buckets, saved)
		}
		line, err := json.Marshal(s)
		if err != nil {
			panic(err) // strings and integers can always be written
		}
		if i > 0 {
			out.WriteByte(',')
		}
		out.WriteByte('\n')
		out.Write(line)
	}
	out.WriteString("\n]}\n")
	return out.Bytes()
}

// MarshalJSON is Save, for a profile inside another text.
func (p *Profile) MarshalJSON() ([]byte, error) { return p.Save(), nil }

// UnmarshalJSON is [Read].
func (p *Profile) UnmarshalJSON(text []byte) error {
	q, err := Read(text)
	if err == nil {
		*p = *q
	}
	return err
}

// DecodeJSON is [Read] of a part of a text.
func (p *Profile) DecodeJSON(v strictjson.Value) error {
	q, err := decode(v)
	if err == nil {
		*p = *q
	}
	return err
}

// Read is the profile that [Profile.Save] wrote. What Save would not have written is refused, with the place: another version, unknown or missing or repeated
// keys, numbers that are no integers, buckets and entries out of order, a rate below what its own bytes say. An error is a [*strictjson.Error].
func Read(text []byte) (*Profile, error) {
	root, err := strictjson.Parse(text, 8)
	if err != nil {
		return nil, err
	}
	return decode(root)
}

func decode(root strictjson.Value) (*Profile, error) {
	r := &reader{}
	fields := r.object(root, "version", "entries")
	if v := r.integer(fields[0], 0); r.err == nil && v != version {
		return nil, fields[0].Errorf("version %d of a profile, only %d is known", v, version)
	}
	p := &Profile{}
	for _, v := range r.list(fields[1]) {
		e := r.entry(v)
		if n := len(p.entries); r.err == nil && n > 0 && p.entries[n-1].compare(&e.signature, e.kinds) >= 0 {
			r.fail(v, "entries are not in ascending order")
		}
		p.entries = append(p.entries, e)
	}
	if r.err != nil {
		return nil, r.err
	}
	return p, nil
}

// reader walks a parsed text until the first error, which it keeps. After it all it returns is empty.
type reader struct{ err error }

func (r *reader) fail(v strictjson.Value, format string, args ...any) {
	if r.err == nil {
		r.err = v.Errorf(format, args...)
	}
}

// object gives the values of exactly these keys.
func (r *reader) object(v strictjson.Value, keys ...string) []strictjson.Value {
	fields := make([]strictjson.Value, len(keys))
	if r.err != nil {
		return fields
	}
	if v.Kind() != strictjson.Object {
		r.fail(v, "found %s, want an object", v.Kind())
		return fields
	}
	for _, m := range v.Members() {
		i := slices.Index(keys, m.Key)
		if i < 0 {
			r.fail(m.Value, "unknown key %q", m.Key)
			return fields
		}
		fields[i] = m.Value
	}
	for i, f := range fields {
		if f.Kind() == strictjson.Missing {
			r.fail(v, "no key %q", keys[i])
		}
	}
	return fields
}

func (r *reader) list(v strictjson.Value) []strictjson.Value {
	if r.err == nil && v.Kind() != strictjson.Array {
		r.fail(v, "found %s, want a list", v.Kind())
	}
	if r.err != nil {
		return nil
	}
	return v.Items()
}

func (r *reader) integer(v strictjson.Value, least int64) int64 {
	if r.err != nil {
		return 0
	}
	n, err := v.Int64()
	if err != nil {
		r.err = err
	} else if n < least {
		r.fail(v, "%d is less than %d", n, least)
	}
	return n
}

func (r *reader) count(v strictjson.Value, least int64) int {
	n := r.integer(v, least)
	if n > math.MaxInt32 {
		r.fail(v, "%d is no count", n)
	}
	return int(n)
}

func (r *reader) text(v strictjson.Value) string {
	if r.err != nil {
		return ""
	}
	s, err := v.Text()
	r.err = err
	return s
}

// rational reads a fraction in lowest terms.
func (r *reader) rational(v strictjson.Value) rational {
	pair := r.list(v)
	if r.err == nil && len(pair) != 2 {
		r.fail(v, "found %d numbers, want a numerator and a denominator", len(pair))
	}
	if r.err != nil {
		return rational{0, 1}
	}
	f := rational{r.integer(pair[0], 0), r.integer(pair[1], 1)}
	if r.err == nil && f != fraction(f.num, f.den) {
		r.fail(v, "%d/%d is not in lowest terms", f.num, f.den)
	}
	return f
}

func (r *reader) entry(v strictjson.Value) (e entry) {
	f := r.object(v, "model", "topology", "cost", "grad_groups", "no_grad_groups", "kinds", "buckets")
	e.signature = Signature{Model: r.text(f[0]), Cost: r.text(f[2]), GradGroups: r.count(f[3], 0), NoGradGroups: r.count(f[4], 0)}
	t := &e.signature.Topology
	sizes := r.list(f[1])
	if r.err == nil && len(sizes) != 4 {
		r.fail(f[1], "found %d sizes, want 4", len(sizes))
	}
	for i, into := range []*int{&t.DataParallel, &t.TensorParallel, &t.ContextParallel, &t.PipelineParallel} {
		if r.err == nil {
			*into = r.count(sizes[i], 1)
		}
	}
	for _, k := range r.list(f[5]) {
		kind := r.text(k)
		if n := len(e.kinds); r.err == nil && n > 0 && e.kinds[n-1] >= kind {
			r.fail(k, "kinds are not in ascending order")
		}
		e.kinds = append(e.kinds, kind)
	}
	for _, b := range r.list(f[6]) {
		bucket := r.bucket(b, len(e.kinds))
		if n := len(e.buckets); r.err == nil && n > 0 && number(e.buckets[n-1].peak.packed) >= number(bucket.peak.packed) {
			r.fail(b, "buckets are not in ascending order")
		}
		e.buckets = append(e.buckets, bucket)
	}
	if len(e.buckets) == 0 {
		r.fail(v, "an entry without observations")
	}
	return e
}

func (r *reader) bucket(v strictjson.Value, kinds int) (b bucket) {
	f := r.object(v, "peak", "kept", "fraction")
	b.peak = r.track(f[0], kinds)
	b.fraction = r.rational(f[2])
	if f[1].Kind() != strictjson.Null {
		b.kept = r.track(f[1], kinds)
		if r.err == nil && (b.kept.packed > b.peak.packed || number(b.kept.packed) != number(b.peak.packed)) {
			r.fail(f[1], "%d packed tokens beside %d of the peak", b.kept.packed, b.peak.packed)
		}
		if b.fraction.num > b.fraction.den {
			r.fail(f[2], "more is retained than the peak")
		}
	} else if b.fraction != (rational{0, 1}) {
		r.fail(f[2], "a fraction, but no retained bytes")
	}
	return b
}

func (r *reader) track(v strictjson.Value, kinds int) (t track) {
	f := r.object(v, "packed_tokens", "logical_per_packed", "bytes", "bytes_per_token", "shares")
	t = track{packed: r.integer(f[0], 1), ratio: r.rational(f[1]), bytes: r.integer(f[2], 0), rate: r.rational(f[3]), shares: []rational{}}
	// No observation in the bucket had more tokens, so the one with the most bytes had at least this rate.
	if r.err == nil && t.rate.compare(fraction(t.bytes, t.packed)) < 0 {
		r.fail(f[3], "%d bytes for at most %d tokens are more than %d/%d per token", t.bytes, t.packed, t.rate.num, t.rate.den)
	}
	for _, s := range r.list(f[4]) {
		share := r.rational(s)
		if share.num > share.den {
			r.fail(s, "a share above 1")
		}
		t.shares = append(t.shares, share)
	}
	if r.err == nil && len(t.shares) != kinds {
		r.fail(f[4], "%d shares for %d kinds", len(t.shares), kinds)
	}
	return t
}
