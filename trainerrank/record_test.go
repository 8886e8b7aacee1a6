package trainerrank_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/trainerrank/engine/collective"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/internal/golden"
	"github.com/trainerrank/engine/internal/strictjson"
	"github.com/trainerrank/engine/profile"
	"github.com/trainerrank/engine/slots"
	"github.com/trainerrank/engine/trainerrank"
)

var update = flag.Bool("update", false, "rewrite the records in testdata")

// keeper keeps the records of a rank.
type keeper []*trainerrank.Record

func (k *keeper) option() trainerrank.Option {
	return trainerrank.WithRecords(func(r *trainerrank.Record) { *k = append(*k, r) })
}

// last takes the only record that was handed over.
func (k *keeper) last(t testing.TB) *trainerrank.Record {
	t.Helper()
	if len(*k) != 1 {
		t.Fatalf("%d records of one call", len(*k))
	}
	r := (*k)[0]
	*k = nil
	return r
}

func mustMarshal(t testing.TB, x any) string {
	t.Helper()
	text, err := json.Marshal(x)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// replayed reads a record again and answers it again: both must be what they were, to the byte.
func replayed(t testing.TB, r *trainerrank.Record, want string) {
	t.Helper()
	text := r.Save()
	read, err := trainerrank.ReadRecord(text)
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	if again := read.Save(); !bytes.Equal(text, again) {
		t.Errorf("saved, read and saved again:\n%s%s", text, again)
	}
	a, d, err := read.Replay(t.Context())
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	if d != nil || mustMarshal(t, a) != want || mustMarshal(t, read.Admission()) != want {
		t.Errorf("%v\n%s", d, text)
	}
}

// somebody is a model of somebody else: it can rehearse, and embeds nothing of the engine.
type somebody struct {
	forward.Rehearser
	asked int
}

func (s *somebody) Rehearse(b *forward.Batch) (forward.Footprint, error) {
	s.asked++
	f, err := s.Rehearser.Rehearse(b)
	f.Scratch += 4096 * int64(len(b.Spans)) // so that no decoder says the same
	f.OutputBytes = 0
	return f, err
}

// recordedCall is a random call of a random rank.
type recordedCall struct {
	inputs []forward.Input
	opts   []trainerrank.Option
	model  forward.Model
	usable int64
}

func drawCall(t testing.TB, r *rand.Rand, models []*golden.Loaded) recordedCall {
	t.Helper()
	m := models[r.IntN(len(models))]
	c := recordedCall{inputs: golden.Draw(r, m.Spec().Vocabulary, 1+r.IntN(12), 1+r.IntN(250)), model: m.Model}
	switch r.IntN(6) {
	case 0:
		c.model = &somebody{Rehearser: m.Model}
	case 1: // a type that only embeds the engine's model
		c.model = &spy{Model: m.Model, price: func(f forward.Footprint) forward.Footprint { f.Scratch *= 2; return f }}
	}
	c.opts = append(c.opts, trainerrank.WithDevice(m.Host))
	switch r.IntN(3) {
	case 0:
		c.opts = append(c.opts, trainerrank.WithCostTables(dear))
	case 1:
		c.opts = append(c.opts, trainerrank.WithDevice(m.Dirty)) // another name, for which there is no table
	}
	a, err := wrap(t, c.model, c.opts...).Plan(t.Context(), forward.Many(c.inputs...))
	if err != nil {
		t.Fatal(err)
	}
	c.usable = 1 << 40
	if r.IntN(4) > 0 {
		c.usable = a.SmallestBudgetBytes/2 + r.Int64N(a.PredictedPeakBytes+1)
	}
	c.opts = append(c.opts, trainerrank.WithUsableBytes(c.usable))
	return c
}

func recordedModels(t testing.TB) (models []*golden.Loaded) {
	for threads := 1; threads <= 3; threads++ {
		models = append(models, golden.Load(t, golden.FS(t, "qwen2-tiny"), golden.Options{Threads: threads, Unloaded: true}))
	}
	return append(models, golden.Load(t, golden.FS(t, "arith"), golden.Options{Threads: 2, Unloaded: true}))
}

// What a record says of a call, whatever the model, the cost, the device, the budget and the layout that is forced, is enough for the same answer.
func TestARecordIsEnoughForTheSameAnswer(t *testing.T) {
	seeds := uint64(3000)
	if testing.Short() {
		seeds = 200
	}
	models := recordedModels(t)
	verdicts := map[trainerrank.Verdict]int{}
	for seed := range seeds {
		r := golden.Rand(seed)
		c := drawCall(t, r, models)
		if r.IntN(10) == 0 {
			t.Setenv("ART_TRAINER_RANK_TEST_HOOKS", "1")
			t.Setenv("ART_TRAINER_RANK_TEST_ANCHOR", []string{"full_sharing", "no_sharing"}[r.IntN(2)])
		} else {
			t.Setenv("ART_TRAINER_RANK_TEST_HOOKS", "")
		}
		var kept keeper
		a, err := wrap(t, c.model, append(c.opts, kept.option())...).Plan(t.Context(), nested(r, c.inputs))
		if err != nil {
			t.Fatal(err)
		}
		verdicts[a.Verdict]++
		want := mustMarshal(t, a)
		a.PredictedPeakBytes, a.Rungs, a.SubforwardRequestIndices[0] = -1, nil, nil // the caller's to change
		replayed(t, kept.last(t), want)
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
	t.Logf("verdicts: %v", verdicts)
	if verdicts[trainerrank.Whole] == 0 || verdicts[trainerrank.Split] == 0 || verdicts[trainerrank.Refused] == 0 {
		t.Error("a verdict is missing")
	}
}

// Other tokens that share as much, and other labels, have the same record: nothing of either is in it.
func TestARecordHoldsNoToken(t *testing.T) {
	seeds := uint64(500)
	if testing.Short() {
		seeds = 100
	}
	models := recordedModels(t)
	for seed := range seeds {
		r := golden.Rand(seed)
		c := drawCall(t, r, models)
		var texts []string
		for range 3 {
			var kept keeper
			if _, err := wrap(t, c.model, append(c.opts, kept.option())...).Plan(t.Context(), forward.Many(c.inputs...)); err != nil {
				t.Fatal(err)
			}
			texts = append(texts, string(kept.last(t).Save()))
			names := r.Perm(c.model.Spec().Vocabulary)
			for i := range c.inputs {
				in := &c.inputs[i]
				in.Tokens, in.Targets = slices.Clone(in.Tokens), slices.Clone(in.Targets)
				for j, token := range in.Tokens {
					in.Tokens[j] = int32(names[token])
				}
				for j := range in.Targets {
					if in.Targets[j] = int32(r.IntN(len(names)+1)) - 1; in.Targets[j] < 0 {
						in.Targets[j] = forward.IgnoreLabel
					}
				}
			}
		}
		if texts[0] != texts[1] || texts[0] != texts[2] {
			t.Fatalf("seed %d:\n%s", seed, cmp.Diff(texts[0], texts[1]))
		}
	}
}

// training makes a rank with checkpoints of several shapes that keeps its records, and a random call of it that keeps graphs. The budget is that of the test hooks.
func training(t testing.TB, m *golden.Loaded, model forward.Model, kept *keeper) (rank *trainerrank.TrainerRank, draw func(r *rand.Rand) ([]forward.Input, []trainerrank.CallOption)) {
	t.Helper()
	rank = wrap(t, model, trainerrank.WithDevice(m.Host), kept.option())
	t.Cleanup(rank.Close)
	for name, c := range map[string]slots.Config{
		"all":   {Rank: 3, Alpha: 6, TargetPattern: slots.AllLinear},
		"some":  {Rank: 16, Alpha: 6, Targets: []string{"q_proj", "down_proj"}},
		"other": {Rank: 1, Alpha: 6, TargetPattern: slots.AllLinear, RankPattern: []slots.Override{{Pattern: "mlp.*", Value: 5}}},
	} {
		if err := rank.CreateCheckpoint(t.Context(), name, c); err != nil {
			t.Fatal(err)
		}
	}
	return rank, func(r *rand.Rand) ([]forward.Input, []trainerrank.CallOption) {
		inputs := golden.Draw(r, m.Spec().Vocabulary, 1+r.IntN(9), 1+r.IntN(150))
		for i := range inputs {
			in := &inputs[i]
			in.Checkpoint = []forward.Selection{{}, forward.Checkpoint("all"), forward.Checkpoint("some"), forward.BaseModel()}[r.IntN(4)]
			if in.Grad = forward.GradMode(r.IntN(3)); !in.Checkpoint.Inherits() && in.Checkpoint.Name() == "" {
				in.Grad = forward.NoGrad
			}
		}
		opts := []trainerrank.CallOption{withGrad, trainerrank.WithCheckpoint(forward.Checkpoint("other"))}
		if n := r.IntN(4); n < 3 {
			all := []trainerrank.Retention{trainerrank.Stored, trainerrank.Layer, trainerrank.Replay}
			opts = append(opts, trainerrank.WithRetentions(all[n:]...))
		}
		return inputs, opts
	}
}

// Calls that keep graphs too: their records know the shapes of adapters, and none of their names' values.
func TestRecordsOfTraining(t *testing.T) {
	seeds := uint64(60)
	if testing.Short() {
		seeds = 20
	}
	t.Setenv("ART_TRAINER_RANK_TEST_HOOKS", "1")
	verdicts, retentions := map[trainerrank.Verdict]int{}, map[trainerrank.Retention]int{}
	for threads := 1; threads <= 2; threads++ {
		m := golden.Load(t, golden.FS(t, "qwen2-tiny"), golden.Options{Threads: threads})
		for _, model := range []forward.Model{m.Model, &spy{Model: m.Model, price: func(f forward.Footprint) forward.Footprint { f.Retained *= 2; return f }}} {
			var kept keeper
			rank, draw := training(t, m, model, &kept)
			for seed := range seeds {
				r := golden.Rand(seed)
				inputs, opts := draw(r)
				plan := func(limit int64) *trainerrank.Admission {
					t.Setenv("ART_TRAINER_RANK_TEST_MEMORY_LIMIT_BYTES", fmt.Sprint(m.Host.Stats().Allocated+limit))
					a, err := rank.Plan(t.Context(), forward.Many(inputs...), opts...)
					if err != nil {
						t.Fatal(err)
					}
					return a
				}
				free := plan(1 << 40)
				replayed(t, kept.last(t), mustMarshal(t, free))
				a := plan(free.SmallestBudgetBytes*7/8 + r.Int64N(free.PredictedPeakBytes+1)*3/4)
				replayed(t, kept.last(t), mustMarshal(t, a))
				verdicts[a.Verdict]++
				if a.Verdict != trainerrank.Refused {
					retentions[a.Retention]++
				}
				if t.Failed() {
					t.Fatalf("%d threads, seed %d", threads, seed)
				}
			}
		}
	}
	t.Logf("%v, %v", verdicts, retentions)
	if len(verdicts) < 3 || len(retentions) < 3 {
		t.Error("a verdict or a retention is missing")
	}
}

// Ranks that share their inputs and differ in threads have records from which each alone finds the common answer.
func TestRecordsOfRanksThatShareInputs(t *testing.T) {
	models := recordedModels(t)[:3]
	for seed := range uint64(20) {
		r := golden.Rand(seed)
		in := forward.Many(golden.Draw(r, models[0].Spec().Vocabulary, 2+r.IntN(10), 1+r.IntN(200))...)
		a, err := wrap(t, models[0].Model, trainerrank.WithDevice(models[0].Host)).Plan(t.Context(), in)
		if err != nil {
			t.Fatal(err)
		}
		usable := a.SmallestBudgetBytes + r.Int64N(a.PredictedPeakBytes+1)
		records, answers := make([]*trainerrank.Record, 3), make([]string, 3)
		ctx := soon(t)
		err = collective.Run(len(records), func(w collective.World) error {
			i := w.Rank()
			var kept keeper
			model := forward.Model(models[i].Model)
			if seed%2 == 1 {
				model = &spy{Model: models[i].Model}
			}
			rank, err := trainerrank.New(model, trainerrank.WithSharedInputs(w), trainerrank.WithDevice(models[i].Host), trainerrank.WithUsableBytes(usable), kept.option())
			if err != nil {
				return err
			}
			a, err := rank.Plan(ctx, in)
			if err != nil {
				return err
			}
			text, err := json.Marshal(a)
			records[i], answers[i] = kept[0], string(text)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		for i, r := range records {
			replayed(t, r, answers[0])
			if t.Failed() {
				t.Fatalf("seed %d, rank %d", seed, i)
			}
		}
	}
}

// A call that runs, one that is refused and one that is planned anew each hand over what they were planned as, before they run.
func TestEveryPlanIsRecorded(t *testing.T) {
	m, in, whole, least := splitCall(t)
	for _, usable := range []int64{whole, least, least - 1} {
		var kept keeper
		s := &spy{Model: m.Model}
		rank := wrap(t, m.Model, trainerrank.WithUsableBytes(usable), kept.option())
		res, err := rank.DPRankForward(t.Context(), in)
		var e *trainerrank.MemoryError
		if (err != nil) != (usable < least) || err != nil && !errors.As(err, &e) {
			t.Fatal(err)
		}
		r := kept.last(t)
		a := r.Admission()
		replayed(t, r, mustMarshal(t, a))
		tel, err := rank.LastForwardTelemetry()
		if err != nil || a.PredictedPeakBytes != tel.PredictedPeakBytes || a.UsableLimitBytes != usable || a.SubforwardCount() != tel.SubforwardCount ||
			(a.Verdict == trainerrank.Refused) != (e != nil) || e != nil && a.SmallestBudgetBytes != e.SmallestBudgetBytes {
			t.Errorf("%v: the record has %+v, the telemetry %+v", err, a, tel)
		}
		if e == nil {
			res.Release()
		}
		if s.forwards.Load() != 0 {
			t.Error("it ran")
		}
	}

	// Memory that is gone when it is to be reserved.
	var kept keeper
	rank := wrap(t, m.Model, trainerrank.WithDevice(&faint{Device: m.Host}), kept.option())
	free := m.Host.Free() - whole + 1
	ballast, err := m.Host.Allocate(0, free)
	if err != nil {
		t.Fatal(err)
	}
	defer ballast.Free()
	res, err := rank.DPRankForward(t.Context(), in)
	if err != nil {
		t.Fatal(err)
	}
	res.Release()
	if len(kept) != 2 {
		t.Fatalf("%d records of a call that was planned twice", len(kept))
	}
	for i, r := range kept {
		a := r.Admission()
		replayed(t, r, mustMarshal(t, a))
		if want := []trainerrank.Verdict{trainerrank.Whole, trainerrank.Split}[i]; a.Verdict != want {
			t.Errorf("plan %d: %s", i, a.Verdict)
		}
	}
}

// record makes the record of a call that is split.
func record(t testing.TB, model func(*golden.Loaded) forward.Model) *trainerrank.Record {
	t.Helper()
	m := golden.Load(t, golden.FS(t, "arith"), golden.Options{Threads: 2, Unloaded: true})
	r := golden.Rand(4)
	var kept keeper
	rank := wrap(t, model(m), trainerrank.WithDevice(m.Host), trainerrank.WithUsableBytes(550000), kept.option())
	if _, err := rank.Plan(t.Context(), forward.Many(golden.Draw(r, m.Spec().Vocabulary, 8, 100)...)); err != nil {
		t.Fatal(err)
	}
	return kept.last(t)
}

func engines(m *golden.Loaded) forward.Model { return m.Model }

func TestAReplayNamesTheFirstDifference(t *testing.T) {
	text := string(record(t, engines).Save())
	for _, c := range []struct{ from, to, path string }{
		{`"admission":{"verdict":"split"`, `"admission":{"verdict":"whole"`, "verdict"},
		{`"fits":true}`, `"fits":false}`, "rungs[0].fits"},
		{`"threads":2`, `"threads":3`, "verdict"},
		{`"smallest_budget_bytes":`, `"smallest_budget_bytes":1`, "smallest_budget_bytes"},
	} {
		if c.path == "rungs[0].fits" { // the last rung is the one that fits
			n := strings.Count(text[:strings.Index(text, c.from)], `"total_bytes"`)
			c.path = fmt.Sprintf("rungs[%d].fits", n-1)
		}
		r, err := trainerrank.ReadRecord([]byte(strings.Replace(text, c.from, c.to, 1)))
		if err != nil {
			t.Fatalf("%s: %v", c.from, err)
		}
		_, d, err := r.Replay(t.Context())
		if err != nil || d == nil || d.Path != c.path || !strings.HasPrefix(d.String(), c.path+": ") {
			t.Errorf("%s: %v, %v", c.to, d, err)
		}
	}
}

// What somebody else's model said is believed; what it was not asked cannot be answered.
func TestAFootprintThatIsNotInTheRecordIsMissed(t *testing.T) {
	var s *somebody
	r := record(t, func(m *golden.Loaded) forward.Model {
		s = &somebody{Rehearser: m.Model}
		return s
	})
	asked := s.asked
	replayed(t, r, mustMarshal(t, r.Admission()))
	if s.asked != asked || asked == 0 {
		t.Errorf("asked %d times, %d after the replay", asked, s.asked)
	}
	text := string(r.Save())
	from := strings.Index(text, `"footprints":[{`) + len(`"footprints":[`)
	to := from + strings.Index(text[from:], "},{") + len("},")
	read, err := trainerrank.ReadRecord([]byte(text[:from] + text[to:]))
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := read.Replay(t.Context()); err == nil || !strings.Contains(err.Error(), "not in the record") {
		t.Errorf("a footprint less: %v", err)
	}
}

func TestReadRecordNamesTheField(t *testing.T) {
	own := string(record(t, engines).Save())
	told := string(record(t, func(m *golden.Loaded) forward.Model { return &somebody{Rehearser: m.Model} }).Save())
	for _, c := range []struct{ text, from, to, want string }{
		{own, `"version":1`, `"version":2`, "line 1, column 12: version: 2 of a record, only 1 is known"},
		{own, `"version":1,`, ``, `no key "version"`},
		{own, `"page_bytes":4096`, `"page_bytes":16384`, "line 1, column 27: page_bytes: 16384, this engine counts in pages of 4096"},
		{own, `"usable_limit_bytes":550000`, `"usable_limit_bytes":-1`, "question.usable_limit_bytes: -1 is negative"},
		{own, `"usable_limit_bytes":550000`, `"usable_limit_bytes":5.5e5`, `line 2, column 34: question.usable_limit_bytes: "5.5e5" is not a plain integer`},
		{own, `"explain"`, `"explains"`, `question: unknown key "explains"`},
		{own, `"group":0,"tokens":`, `"group":0,"tokens":-`, "question.requests[0].tokens: -"},
		{own, `"group":0,"tokens":`, `"group":0,"tokens":9`, "in the tree of its group"},
		{own, `"group":0,`, `"group":1,`, "question.requests[0].group: 1 of 1"},
		{own, `"group":0,`, `"group":-1,`, "question.requests[0].group: -1, but whether something is wanted: true"},
		{own, `"groups":[`, `"retentions":["stored","half"],"groups":[`, `question.retentions[1]: "half" is none of stored, layer, replay`},
		{own, `"groups":[`, `"retentions":[],"groups":[`, "question.retentions: none is allowed"},
		{own, `"groups":[{`, `"groups":[{"adapter":{"bytes":-1,"modules":[]},`, "question.groups[0].adapter.bytes: -1"},
		{own, `"groups":[{`, `"groups":[{"adapter":{"bytes":1,"modules":[{"module":0,"rank":0}]},`, "question.groups[0].adapter.modules[0]: module 0, rank 0"},
		{own, `"admission":`, `"observed":{"peak_bytes":-1,"completed":0},"admission":`, "observed: a number is negative"},
		{own, `"parents":[-1`, `"parents":[0`, "question.groups[0].tree: prefixtree: outline: parents[0] is 0"},
		{own, `"terminals":[`, `"terminals":[99,`, "question.groups[0].tree: prefixtree: outline: terminals[0] is 99"},
		{own, `"threads":2`, `"threads":0`, "rehearsals: rehearsal: 0 threads"},
		{own, `"vocab":`, `"vocab":1`, "rehearsals.decoder: vocabulary 1"},
		{own, `"activation":"silu"`, `"activation":"relu"`, `rehearsals.decoder.layers[0].mlp.activation: "relu" is no activation`},
		{own, `"threads":2`, `"threads":2,"footprints":[{"requests":[],"decisions":[],"outputs":0,"scratch":0}]`, "rehearsals.footprints: beside a decoder"},
		{own, `"verdict"`, `"verdicts"`, `admission: no key "verdict"`},
		{own, `"packed_tokens":`, `"packed_tokens":"x`, "found"},
		{told, `"footprints":`, `"threads":1,"footprints":`, "rehearsals: threads or peers, but no decoder"},
		{told, `"footprints":[{"requests":[`, `"footprints":[{"requests":[99,`, "rehearsals.footprints[0].requests: 99, there are 8"},
		{told, `"decisions":[`, `"decisions":[-1,`, "rehearsals.footprints[0].decisions: -1 is negative"},
		{told, `"outputs":`, `"outputs":-`, "rehearsals.footprints[0]: -"},
	} {
		text := strings.Replace(c.text, c.from, c.to, 1)
		if text == c.text {
			t.Fatalf("%s does not occur in\n%s", c.from, text)
		}
		_, err := trainerrank.ReadRecord([]byte(text))
		var e *strictjson.Error
		if !errors.As(err, &e) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s:\n got %v\nwant %s", c.to, err, c.want)
		}
	}
}

// A call whose price is learned is answered again by the profile that is in its record, whatever was learned since.
func TestRecordsOfLearnedCalls(t *testing.T) {
	m := golden.Load(t, golden.FS(t, "arith"), golden.Options{Threads: 2})
	for seed := range uint64(20) {
		r := golden.Rand(seed)
		var k keeper
		var given profile.Profile
		usable := int64(1 << 40)
		for range 5 {
			rank := wrap(t, trainerrank.Opaque(m.Model), k.option(), trainerrank.WithProfile(&given), trainerrank.WithUsableBytes(usable))
			in := nested(r, golden.Draw(r, m.Spec().Vocabulary, 1+r.IntN(6), 1+r.IntN(200)))
			a, err := rank.Plan(t.Context(), in)
			if err != nil {
				t.Fatal(err)
			}
			plan, want := k.last(t), mustMarshal(t, a)
			replayed(t, plan, want)
			if res, err := rank.DPRankForward(t.Context(), in); err == nil {
				call := k.last(t)
				replayed(t, call, mustMarshal(t, call.Admission()))
				res.Release()
			}
			k = nil
			replayed(t, plan, want) // it has learned
			given = *rank.Profile()
			usable = a.SmallestBudgetBytes/2 + r.Int64N(2*a.PredictedPeakBytes+1)
		}
	}
	var k keeper
	if _, err := wrap(t, trainerrank.Opaque(m.Model), k.option()).Plan(t.Context(), forward.One(forward.Input{Tokens: []int32{1}, Targets: labels(1)})); err != nil {
		t.Fatal(err)
	}
	text := string(k.last(t).Save())
	for from, to := range map[string]string{`"variants":["`: `"variants":[],"x":["`, `"profile":{`: `"profile":null,"x":{`, `"version":1,"entries"`: `"version":2,"entries"`} {
		damaged := strings.Replace(text, from, to, 1)
		if _, err := trainerrank.ReadRecord([]byte(damaged)); err == nil || damaged == text {
			t.Errorf("%s: it is read", to)
		}
	}
}

// A call that takes more than was predicted has a record of that, with what was observed; one that does not has none. The record holds of the profile what is about the call, and is
// of the plan that was wrong, whatever was learned since.
func TestMissesAreRecorded(t *testing.T) {
	m := script(t, perToken(1000))
	in := forward.Many(apart(10, 100)...)
	other := script(t, perToken(500))
	other.spec.Name = "another"
	known := after(t, other, apart(3, 7))
	var misses keeper
	rank := wrap(t, m, trainerrank.WithProfile(known), trainerrank.WithMisses(func(r *trainerrank.Record) { misses = append(misses, r) }))
	cold, err := rank.Plan(t.Context(), in)
	if err != nil {
		t.Fatal(err)
	}
	_, tel := score(t, rank, in)
	r := misses.last(t)
	want := &trainerrank.Observed{PeakBytes: tel.ObservedPeakBytes, Completed: 1}
	if d := cmp.Diff(want, r.Observed()); d != "" || tel.ObservedPeakBytes <= tel.PredictedPeakBytes {
		t.Errorf("%s", d)
	}
	if a := r.Admission(); a.PredictedPeakBytes != cold.PredictedPeakBytes || a.Basis != trainerrank.Cold {
		t.Errorf("%s", a)
	}
	replayed(t, r, mustMarshal(t, r.Admission()))
	if text := string(r.Save()); strings.Contains(text, "another") || !strings.Contains(text, `"entries":[]`) {
		t.Errorf("%s", text)
	}
	if read, err := trainerrank.ReadRecord(r.Save()); err != nil || cmp.Diff(want, read.Observed()) != "" {
		t.Errorf("%v\n%+v", err, read)
	}
	if score(t, rank, in); len(misses) != 0 {
		t.Errorf("a miss, though it has learned: %s", misses[0].Save())
	}

	// Out of memory under way: in a split, with the profile that the split was priced by.
	p := rank.Profile()
	usable := planned(t, m, p, in, plenty).PredictedPeakBytes / 2
	for _, fail := range []int{1, 3} {
		first := m.forwards
		m.scratch = func(packed int) int64 {
			if m.forwards-first == fail {
				return 10_000 * int64(packed)
			}
			return 1000 * int64(packed)
		}
		rank := wrap(t, m, trainerrank.WithProfile(p), trainerrank.WithUsableBytes(usable), trainerrank.WithMisses(func(r *trainerrank.Record) { misses = append(misses, r) }))
		if _, err := rank.DPRankForward(t.Context(), in); err == nil {
			t.Fatal("it ran")
		}
		r := misses.last(t)
		if o, a := r.Observed(), r.Admission(); !o.RanOut || o.Completed != fail-1 || a.Verdict != trainerrank.Split || a.Basis != trainerrank.Learned {
			t.Errorf("%+v, %s", o, a)
		}
		replayed(t, r, mustMarshal(t, r.Admission()))
	}
}

// A model that asks for more than it rehearsed is a miss too.
func TestARehearsalThatWasWrongIsRecorded(t *testing.T) {
	m := golden.Load(t, golden.FS(t, "qwen2-tiny"), golden.Options{})
	s := &spy{Model: m.Model, price: func(f forward.Footprint) forward.Footprint { f.Scratch /= 2; return f }}
	var misses keeper
	rank := wrap(t, s, trainerrank.WithMisses(func(r *trainerrank.Record) { misses = append(misses, r) }))
	if _, err := rank.DPRankForward(t.Context(), forward.One(forward.Input{Tokens: tokens(40), TopK: 1})); err == nil {
		t.Fatal("it ran")
	}
	r := misses.last(t)
	if o := r.Observed(); !o.RanOut || o.Completed != 0 {
		t.Errorf("%+v", o)
	}
	replayed(t, r, mustMarshal(t, r.Admission()))
	s.price = nil
	if score(t, rank, forward.One(forward.Input{Tokens: tokens(40), TopK: 1})); len(misses) != 0 {
		t.Errorf("%d misses of a call that went well", len(misses))
	}
}

// The records in testdata were made on one machine and have the same answers on every other, until the planner changes: then -update makes new ones.
func TestOldRecords(t *testing.T) {
	for name, record := range map[string]func() *trainerrank.Record{
		"split.json": func() *trainerrank.Record { return record(t, engines) },
		"somebody.json": func() *trainerrank.Record {
			return record(t, func(m *golden.Loaded) forward.Model { return &somebody{Rehearser: m.Model} })
		},
		"training.json": func() *trainerrank.Record {
			m := golden.Load(t, golden.FS(t, "arith"), golden.Options{Threads: 2})
			var kept keeper
			rank, draw := training(t, m, m.Model, &kept)
			inputs, opts := draw(golden.Rand(12))
			t.Setenv("ART_TRAINER_RANK_TEST_HOOKS", "1")
			t.Setenv("ART_TRAINER_RANK_TEST_MEMORY_LIMIT_BYTES", fmt.Sprint(m.Host.Stats().Allocated+1<<20))
			if _, err := rank.Plan(t.Context(), forward.Many(inputs...), opts...); err != nil {
				t.Fatal(err)
			}
			return kept.last(t)
		},
		"learned.json": func() *trainerrank.Record {
			m := script(t, perToken(1000))
			p := after(t, m, apart(10, 100))
			var kept keeper
			usable := planned(t, m, p, forward.Many(apart(10, 100)...), plenty).PredictedPeakBytes / 2
			rank := wrap(t, m, trainerrank.WithProfile(p), trainerrank.WithUsableBytes(usable), kept.option())
			if _, err := rank.Plan(t.Context(), forward.Many(apart(10, 100)...)); err != nil {
				t.Fatal(err)
			}
			return kept.last(t)
		},
	} {
		path := "testdata/records/" + name
		r := record()
		if *update {
			if err := os.WriteFile(path, r.Save(), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(text, r.Save()) {
			t.Errorf("%s: the same call has another record now\n%s", path, cmp.Diff(string(text), string(r.Save())))
		}
		old, err := trainerrank.ReadRecord(text)
		if err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		if _, d, err := old.Replay(t.Context()); d != nil || err != nil {
			t.Errorf("%s: %v, %v", path, d, err)
		}
	}
}

// FuzzReadRecord holds that a record is refused, or is one: saved it reads the same, and a replay of it ends, with an answer or an error.
func FuzzReadRecord(f *testing.F) {
	for _, name := range []string{"split.json", "somebody.json", "training.json", "learned.json"} {
		text, err := os.ReadFile("testdata/records/" + name)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		r, err := trainerrank.ReadRecord(text)
		if err != nil {
			var e *strictjson.Error
			if !errors.As(err, &e) {
				t.Errorf("%v is no error with a place", err)
			}
			return
		}
		saved := r.Save()
		again, err := trainerrank.ReadRecord(saved)
		if err != nil {
			t.Fatalf("%v\n%s", err, saved)
		}
		if !bytes.Equal(saved, again.Save()) {
			t.Errorf("saved, read and saved again:\n%s%s", saved, again.Save())
		}
		r.Admission()
		var size struct {
			Question struct {
				Requests []struct {
					Tokens int `json:"tokens"`
					Width  int `json:"target_width"`
				} `json:"requests"`
			} `json:"question"`
		}
		if err := json.Unmarshal(saved, &size); err != nil {
			t.Fatal(err)
		}
		for _, q := range size.Question.Requests {
			if q.Tokens*max(1, q.Width) > 1<<16 {
				return // takes its time
			}
		}
		one, _, err := r.Replay(t.Context())
		if err != nil {
			return
		}
		two, d, err := again.Replay(t.Context())
		if err != nil || mustMarshal(t, one) != mustMarshal(t, two) {
			t.Errorf("replayed twice: %v, %v", d, err)
		}
	})
}
