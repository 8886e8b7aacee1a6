package trainerrank

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/forward/prefixtree"
	"github.com/trainerrank/engine/forward/transformer"
	"github.com/trainerrank/engine/internal/strictjson"
	"github.com/trainerrank/engine/profile"
)

// Record is everything that the planner was told of one call, and its answer. It holds no token and no label: of the inputs it knows how long they are, what they share
// and what is wanted of them. [Record.Save] and [ReadRecord] are its form in a file, and [Record.Replay] answers again, on any machine and without the model.
//
// The engine's own models ([transformer.Model]) are in it as decoders without weights, which rehearse as the models do. Of any other model the footprints are in it
// that it said when it was asked: those are believed, and if another version of the engine asks for one that is not there, that is an error. Of a model that cannot rehearse
// the profile is in it by which the call was priced.
type Record struct{ form form }

// recordVersion is the version of the saved form. Another one is refused: a record that is misread accuses the planner.
const recordVersion = 1

// form is the saved form of a record. What depends on neither call nor machine is not in it: it is the engine's code.
type form struct {
	Version    int        `json:"version"`
	PageBytes  int64      `json:"page_bytes"` // in which the device counts
	Question   question   `json:"question"`
	Rehearsals rehearsals `json:"rehearsals"`
	Answer     answer     `json:"admission"`
	Observed   *Observed  `json:"observed,omitempty"`
}

// Observed is what became of a call.
type Observed struct {
	PeakBytes int64 `json:"peak_bytes"`        // most bytes of the call in use at one moment
	Completed int   `json:"completed"`         // subforwards that were done
	RanOut    bool  `json:"ran_out,omitempty"` // the next asked for more than there was, which is not in PeakBytes
}

// answer is an Admission as json.Marshal writes it: the caller may change the Admission.
type answer []byte

// MarshalJSON is the answer.
func (a answer) MarshalJSON() ([]byte, error) { return a, nil }

// DecodeJSON reads an Admission, however it is written.
func (a *answer) DecodeJSON(v strictjson.Value) error {
	var x Admission
	err := strictjson.Decode(v, &x)
	if err == nil {
		*a, err = json.Marshal(&x)
	}
	return err
}

// rehearsals are where the footprints of a record come from.
type rehearsals struct {
	Decoder *transformer.Spec `json:"decoder,omitempty"` // nil: from Footprints
	Threads int               `json:"threads,omitzero"`
	Peers   []string          `json:"peers,omitempty"` // variants of ranks that share the inputs, where they differ
	// Footprints are those that somebody else's model said.
	Footprints []footprint `json:"footprints,omitempty"`
}

// footprint is what a model said of a pass.
type footprint struct {
	Requests  []int     `json:"requests"`            // in row order
	Decisions []int     `json:"decisions"`           // that are shared of the tree of these requests
	Retention Retention `json:"retention,omitempty"` // of its graph; "" if it keeps none
	forward.Footprint
}

// recording makes a question remember what must be in its record.
func (q *question) recording() {
	if !q.rehearsals().own() {
		q.said = &footprints{known: map[string]forward.Footprint{}}
	}
}

// rehearsals say where the footprints come from.
func (q *question) rehearsals() (r rehearsals) {
	model := q.rehearser
	if n, ok := model.(*neediest); ok {
		model, r.Peers = n.own, n.others
	}
	// A type that embeds a model may rehearse otherwise.
	if m, ok := model.(*transformer.Model); ok {
		from := m.Rehearsal()
		r.Decoder, r.Threads = from.Decoder, from.Threads
		return r
	}
	return rehearsals{Footprints: q.said.all()}
}

func (r rehearsals) own() bool { return r.Decoder != nil }

// record is the record of a question and its answer.
func (q *question) record(a *Admission) *Record {
	answer, err := json.Marshal(a)
	if err != nil {
		panic(err) // strings and integers can always be written
	}
	f := form{Version: recordVersion, PageBytes: device.PageSize, Question: *q, Rehearsals: q.rehearsals(), Answer: answer}
	f.Question.rehearser, f.Question.said = nil, nil // a record keeps no model
	if l := q.Learned; l != nil {
		var about []profile.Signature
		for _, v := range l.Variants {
			about = append(about, q.signature(v))
		}
		f.Question.Learned = &experience{l.Known.About(about...), l.Variants}
	}
	return &Record{f}
}

// Save is the record as JSON of a few long lines, for [ReadRecord]. Equal records have equal bytes.
func (r *Record) Save() []byte {
	var b bytes.Buffer
	part := func(name string, x any) {
		text, err := json.Marshal(x)
		if err != nil {
			panic(err) // it was marshalled before, or has no type that cannot be
		}
		fmt.Fprintf(&b, "%q:%s", name, text)
	}
	b.WriteByte('{')
	f := &r.form
	part("version", f.Version)
	b.WriteByte(',')
	part("page_bytes", f.PageBytes)
	b.WriteString(",\n")
	part("question", &f.Question)
	b.WriteString(",\n")
	part("rehearsals", &f.Rehearsals)
	b.WriteString(",\n")
	part("admission", f.Answer)
	if f.Observed != nil {
		b.WriteString(",\n")
		part("observed", f.Observed)
	}
	b.WriteString("}\n")
	return b.Bytes()
}

// MarshalJSON is Save, for a record inside another text.
func (r *Record) MarshalJSON() ([]byte, error) { return r.Save(), nil }

// Admission is the answer that is in the record, with what of it has a JSON form.
func (r *Record) Admission() *Admission {
	a := new(Admission)
	v, err := strictjson.Parse(r.form.Answer, recordDepth)
	if err == nil {
		err = strictjson.Decode(v, a)
	}
	if err != nil {
		panic(err) // json.Marshal wrote it
	}
	return a
}

// Observed is what became of the call, in a record of [WithMisses]; nil in others.
func (r *Record) Observed() *Observed { return r.form.Observed }

// recordDepth bounds the nesting of a record.
const recordDepth = 12

// ReadRecord reads what [Record.Save] wrote. What it would not have written is refused: another version, an unknown or missing or repeated key, numbers that
// contradict each other or that no call has. An error is a [*strictjson.Error] and names line, column and field.
func ReadRecord(text []byte) (*Record, error) {
	root, err := strictjson.Parse(text, recordDepth)
	if err != nil {
		return nil, err
	}
	// The version first: all else may differ in another.
	if v, ok := root.Get("version"); ok {
		if n, err := v.Int64(); err == nil && n != recordVersion {
			return nil, v.Errorf("version: %d of a record, only %d is known", n, recordVersion)
		}
	}
	r := &Record{}
	if err := strictjson.Decode(root, &r.form); err != nil {
		return nil, err
	}
	if err := r.form.check(root); err != nil {
		return nil, err
	}
	return r, nil
}

// Difference is the first place in which two admissions differ.
type Difference struct {
	Path       string `json:"path"`     // in the JSON form: "rungs[2].total_bytes"
	Recorded   string `json:"recorded"` // what stands there, as JSON, cut if it is long; "" if there is nothing
	Recomputed string `json:"recomputed"`
}

// String is the place with both values.
func (d *Difference) String() string {
	show := func(s string) string {
		if s == "" {
			return "nothing"
		}
		return s
	}
	return fmt.Sprintf("%s: %s recorded, %s recomputed", d.Path, show(d.Recorded), show(d.Recomputed))
}

// Replay answers the question of the record again, and says where the answer differs from the recorded one: nil if nowhere, to the byte of its JSON form.
func (r *Record) Replay(ctx context.Context) (*Admission, *Difference, error) {
	q := r.form.Question
	if from := &r.form.Rehearsals; from.own() {
		own := transformer.Rehearsal{Decoder: from.Decoder, Threads: from.Threads}
		q.rehearser = own
		if from.Peers != nil {
			q.rehearser = &neediest{own, from.Peers}
		}
	} else {
		q.rehearser, q.said = silent{}, from.said()
	}
	a, err := q.admit(ctx)
	if err != nil {
		return nil, nil, fmt.Errorf("replay: %w", err)
	}
	text, err := json.Marshal(a)
	if err != nil {
		return nil, nil, fmt.Errorf("replay: %w", err)
	}
	if bytes.Equal(text, r.form.Answer) {
		return a, nil, nil
	}
	was, err := strictjson.Parse(r.form.Answer, recordDepth)
	if err != nil {
		return nil, nil, fmt.Errorf("replay: %w", err)
	}
	is, err := strictjson.Parse(text, recordDepth)
	if err != nil {
		return nil, nil, fmt.Errorf("replay: %w", err)
	}
	d := Difference{}
	if at := strictjson.Diff(was, is); at != nil {
		d = Difference{at.Path, at.A, at.B}
	}
	return a, &d, nil
}

// footprints are what somebody else's model has said of passes. Nil remembers nothing.
type footprints struct {
	known map[string]forward.Footprint
	list  []footprint // in the order in which they were asked for
}

func (f *footprints) all() []footprint {
	if f == nil {
		return nil
	}
	return f.list
}

func (r *rehearsals) said() *footprints {
	f := &footprints{known: map[string]forward.Footprint{}}
	for i := range r.Footprints {
		f.add(r.Footprints[i])
	}
	return f
}

func (f *footprints) add(p footprint) {
	f.known[p.key()], f.list = p.Footprint, append(f.list, p)
}

// key tells the passes of a call apart.
func (p *footprint) key() string {
	var key []byte
	for _, r := range p.Requests {
		key = binary.AppendUvarint(key, uint64(r)+1)
	}
	key = append(key, 0)
	for _, d := range p.Decisions {
		key = binary.AppendUvarint(key, uint64(d))
	}
	return string(append(key, p.Retention...))
}

// of is the footprint of a pass: what was said of it, or else what ask says.
func (f *footprints) of(p *pass, r Retention, ask func() (forward.Footprint, error)) (forward.Footprint, error) {
	if f == nil {
		return ask()
	}
	said := footprint{Requests: p.requests, Decisions: p.layout.Decisions, Retention: r}
	if known, ok := f.known[said.key()]; ok {
		return known, nil
	}
	var err error
	if said.Footprint, err = ask(); err == nil {
		f.add(said)
	}
	return said.Footprint, err
}

// silent is a model that is not here.
type silent struct{}

// Rehearse says that it cannot.
func (silent) Rehearse(b *forward.Batch) (forward.Footprint, error) {
	return forward.Footprint{}, fmt.Errorf("a footprint of %d requests in %d spans is needed that is not in the record, and the model is not here to ask", len(b.Requests), len(b.Spans))
}

// MarshalJSON is the outline of the tree.
func (t outlined) MarshalJSON() ([]byte, error) { return json.Marshal(t.Outline()) }

// DecodeJSON reads it.
func (t *outlined) DecodeJSON(v strictjson.Value) error {
	var o prefixtree.Outline
	if err := strictjson.Decode(v, &o); err != nil {
		return err
	}
	tree, err := o.Tree()
	t.Tree = tree
	return err
}

// maxReplayTokens bounds the tokens of an input, times its labels, of a record: a replay takes 4 bytes for each of the longest.
const maxReplayTokens = 1 << 28

// check says what no call has or what contradicts itself. What the planner finds out by itself is not looked for here.
func (f *form) check(root strictjson.Value) error {
	if v, _ := root.Get("page_bytes"); f.PageBytes != device.PageSize {
		return v.Errorf("page_bytes: %d, this engine counts in pages of %d", f.PageBytes, device.PageSize)
	}
	v, _ := root.Get("question")
	if err := f.Question.check(v); err != nil {
		return err
	}
	if o := f.Observed; o != nil && (o.PeakBytes < 0 || o.Completed < 0) {
		v, _ = root.Get("observed")
		return v.Errorf("observed: a number is negative")
	}
	v, _ = root.Get("rehearsals")
	return f.Rehearsals.check(v, &f.Question)
}

func (q *question) check(v strictjson.Value) error {
	fail := func(format string, args ...any) error { return v.Errorf("question."+format, args...) }
	if q.Usable < 0 {
		return fail("usable_limit_bytes: %d is negative", q.Usable)
	}
	if q.Learned != nil && (q.Learned.Known == nil || len(q.Learned.Variants) == 0) {
		return fail("learned: without a profile, or a variant that it is about")
	}
	if q.Retentions != nil && len(q.Retentions) == 0 {
		return fail("retentions: none is allowed")
	}
	for i, r := range q.Retentions {
		if r != Stored && r != Layer && r != Replay {
			return fail("retentions[%d]: %q is none of %s, %s, %s", i, r, Stored, Layer, Replay)
		}
	}
	members := make([]int, len(q.Groups))
	for i := range q.Requests {
		in := &q.Requests[i]
		active := in.Width > 0 || in.TopK > 0 || in.Logits || in.Hidden
		switch {
		case in.Tokens < 1 || in.Tokens > maxReplayTokens:
			return fail("requests[%d].tokens: %d, from 1 to %d are possible", i, in.Tokens, maxReplayTokens)
		case in.Width < 0 || in.Width > maxReplayTokens/in.Tokens:
			return fail("requests[%d].target_width: %d labels for each of %d tokens", i, in.Width, in.Tokens)
		case in.TopK < 0 || in.TopK > max(0, q.Model.Vocabulary):
			return fail("requests[%d].top_k: %d of a vocabulary of %d", i, in.TopK, q.Model.Vocabulary)
		case in.Group < -1 || in.Group >= len(q.Groups):
			return fail("requests[%d].group: %d of %d", i, in.Group, len(q.Groups))
		case active != (in.Group >= 0):
			return fail("requests[%d].group: %d, but whether something is wanted: %v", i, in.Group, active)
		case !active:
			continue
		}
		tree, row := q.Groups[in.Group].Tree, members[in.Group]
		members[in.Group]++
		if row >= len(tree.Terminals) {
			return fail("requests[%d].group: the tree of group %d has only %d rows", i, in.Group, row)
		}
		if n := tree.Segments[tree.Terminals[row]].End; n != in.Tokens {
			return fail("requests[%d].tokens: %d, but %d in the tree of its group", i, in.Tokens, n)
		}
	}
	for g, n := range members {
		if a := q.Groups[g].Adapter; a != nil {
			if a.Bytes < 0 || a.Bytes > math.MaxInt64/8 {
				return fail("groups[%d].adapter.bytes: %d", g, a.Bytes)
			}
			for i, m := range a.Modules {
				if m.Module < 0 || m.Rank < 1 || m.Rank > maxReplayTokens {
					return fail("groups[%d].adapter.modules[%d]: module %d, rank %d", g, i, m.Module, m.Rank)
				}
			}
		}
		if rows := len(q.Groups[g].Tree.Terminals); n != rows {
			return fail("groups[%d].tree.terminals: %d rows, but %d requests", g, rows, n)
		}
	}
	return nil
}

// check says what no model can have said of a call.
func (r *rehearsals) check(v strictjson.Value, q *question) error {
	fail := func(format string, args ...any) error { return v.Errorf("rehearsals"+format, args...) }
	if r.own() {
		if err := (transformer.Rehearsal{Decoder: r.Decoder, Threads: r.Threads}).Validate(); err != nil {
			return fail(": %v", err)
		}
		d, m := r.Decoder, &q.Model
		switch {
		case d.Vocab != m.Vocabulary || d.Hidden != m.Hidden || len(d.Layers) != m.Layers:
			return fail(".decoder: vocabulary %d, hidden %d, %d layers, but %d, %d, %d in question.model", d.Vocab, d.Hidden, len(d.Layers), m.Vocabulary, m.Hidden, m.Layers)
		case r.Footprints != nil:
			return fail(".footprints: beside a decoder, which makes its own")
		case q.Learned != nil:
			return fail(".decoder: beside prices that are learned")
		}
		return nil
	}
	if r.Threads != 0 || r.Peers != nil {
		return fail(": threads or peers, but no decoder")
	}
	for i := range r.Footprints {
		f := &r.Footprints[i]
		for _, n := range f.Requests {
			if n < 0 || n >= len(q.Requests) {
				return fail(".footprints[%d].requests: %d, there are %d", i, n, len(q.Requests))
			}
		}
		for _, n := range f.Decisions {
			if n < 0 {
				return fail(".footprints[%d].decisions: %d is negative", i, n)
			}
		}
		for _, n := range []int64{f.Outputs, f.Retained, f.Scratch, f.BackwardScratch, f.Gradients, f.OutputBytes} {
			if n < 0 || n > math.MaxInt64/8 { // sums of some fit
				return fail(".footprints[%d]: %d bytes", i, n)
			}
		}
	}
	return nil
}
