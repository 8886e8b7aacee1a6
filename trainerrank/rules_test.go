package trainerrank_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/internal/golden"
	"github.com/trainerrank/engine/trainerrank"
)

// An input that wants nothing is never packed and costs nothing. It keeps its place and is answered with nils, whatever else it says.
func TestInactiveInputsKeepTheirPlace(t *testing.T) {
	m := golden.Load(t, golden.FS(t, "qwen2-tiny"), golden.Options{})
	var packed [][]int32
	s := &spy{Model: m.Model, before: func(_ context.Context, b *forward.Batch) {
		packed = nil
		for _, r := range b.Requests {
			packed = append(packed, r.Tokens)
		}
	}}
	rank := wrap(t, s)
	a, b := forward.Input{Tokens: tokens(9), TopK: 2}, forward.Input{Tokens: tokens(5), HiddenStates: true}
	idle := []forward.Input{{Tokens: tokens(400)}, {Tokens: tokens(9)}, {Tokens: []int32{1}, Grad: forward.WithGrad, Checkpoint: forward.Checkpoint("none")}}
	want, wantTel := score(t, rank, forward.Many(a, b))

	in := forward.Nest(forward.One(idle[0]), forward.Many(a, idle[1]), forward.Nest(forward.Many(idle[2], b)))
	res, err := rank.DPRankForward(t.Context(), in)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Release()
	if d := cmp.Diff([][]int32{a.Tokens, b.Tokens}, packed); d != "" {
		t.Errorf("packed:\n%s", d)
	}
	got := golden.CopyAll(res.Outputs.Flat())
	for i, w := range []golden.Answer{{}, want[0], {}, {}, want[1]} {
		if d := golden.Diff(w, got[i]); d != "" {
			t.Errorf("output %d:\n%s", i, d)
		}
	}
	if o := res.Outputs.List()[2].List()[0].List()[1].Output(); o == nil || o.HiddenStates == nil {
		t.Error("the nesting is another")
	}
	wantTel.SubforwardRequestIndices, wantTel.PlanningTime = [][]int{{0, 1, 2, 3, 4}}, res.Telemetry.PlanningTime
	if d := cmp.Diff(wantTel, res.Telemetry); d != "" {
		t.Errorf("telemetry without (-) and with (+) inactive inputs:\n%s", d)
	}

	// Only inactive ones: nothing runs, nothing is taken.
	ran, before := s.forwards.Load(), stateOf(m.Host)
	answers, tel := score(t, rank, forward.Many(idle[:2]...))
	if d := cmp.Diff([]golden.Answer{{}, {}}, answers); d != "" {
		t.Error(d)
	}
	if s.forwards.Load() != ran || tel.PredictedPeakBytes != 0 || tel.SubforwardCount != 1 || len(tel.SubforwardRequestIndices[0]) != 2 {
		t.Errorf("telemetry of a call that wants nothing: %+v", tel)
	}
	unchanged(t, m.Host, before)
}

// No inputs: no outputs, in the same nesting, and nothing is disturbed.
func TestEmptyInputs(t *testing.T) {
	m, rank := load(t, golden.FS(t, "qwen2-tiny"), golden.Options{})
	if _, err := rank.LastForwardTelemetry(); err == nil {
		t.Error("telemetry before the first call")
	}
	empty := map[string]forward.Inputs{"zero": {}, "many": forward.Many(), "nested": forward.Nest(forward.Many(), forward.Nest(forward.Nest()))}
	try := func() {
		for name, in := range empty {
			before := stateOf(m.Host)
			res, err := rank.DPRankForward(t.Context(), in)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if n := len(res.Outputs.Flat()); n != 0 || res.Outputs.Output() != nil || len(res.Outputs.List()) != len(map[string][]int{"nested": {0, 1}}[name]) {
				t.Errorf("%s: %d outputs, %+v", name, n, res.Outputs)
			}
			unchanged(t, m.Host, before)
			res.Release()
			res.Release()
			if _, err := rank.Plan(t.Context(), in); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
	try()
	if tel, err := rank.LastForwardTelemetry(); err == nil {
		t.Errorf("an empty call left telemetry: %+v", tel)
	}
	_, want := score(t, rank, forward.Many(forward.Input{Tokens: tokens(3), TopK: 1}))
	try()
	if got, err := rank.LastForwardTelemetry(); err != nil || cmp.Diff(want, got) != "" {
		t.Errorf("an empty call changed the telemetry: %v\n%s", err, cmp.Diff(want, got))
	}
}

// What breaks a rule is an error that names the place, before anything is planned.
func TestErrorsNameThePlace(t *testing.T) {
	m := golden.Load(t, golden.FS(t, "qwen2-tiny"), golden.Options{})
	s := &spy{Model: m.Model}
	rank := wrap(t, s)
	vocab := m.Spec().Vocabulary
	v := int32(vocab)
	ok := forward.Input{Tokens: []int32{1, 2}, TopK: 1}
	slot := new(trainerrank.SlotStateError)
	for _, c := range []struct {
		name string
		in   forward.Input
		opts []trainerrank.CallOption
		want string // after the path
		as   any
	}{
		{"no tokens", forward.Input{TopK: 1}, nil, "no tokens", nil},
		{"an empty list of tokens", forward.Input{Tokens: []int32{}, TopK: 1}, nil, "no tokens", nil},
		{"no tokens, nothing wanted", forward.Input{}, nil, "no tokens", nil},
		{"a negative token", forward.Input{Tokens: []int32{3, -1}, TopK: 1}, nil, fmt.Sprintf("token -1 at position 1 is outside the vocabulary of %d", vocab), nil},
		{"a token too high", forward.Input{Tokens: []int32{0, 1, v}}, nil, fmt.Sprintf("token %d at position 2 is outside the vocabulary of %d", v, vocab), nil},
		{"the ignored label as a token", forward.Input{Tokens: []int32{forward.IgnoreLabel}, TopK: 1}, nil, "token -100 at position 0", nil},
		{"a label too high", forward.Input{Tokens: []int32{1, 2}, Targets: []int32{0, v}}, nil, fmt.Sprintf("label %d at position 1", v), nil},
		{"a negative label", forward.Input{Tokens: []int32{1, 2}, Targets: []int32{-1, 0}}, nil, "label -1 at position 0", nil},
		{"a label of the second column", forward.Input{Tokens: []int32{1, 2}, Targets: []int32{0, 0, 0, -99}, TargetWidth: 2}, nil, "label -99 at position 1", nil},
		{"too few targets", forward.Input{Tokens: []int32{1, 2}, Targets: []int32{1}}, nil, "1 targets for 2 tokens with 1 labels per position", nil},
		{"no targets, not nil", forward.Input{Tokens: []int32{1, 2}, Targets: []int32{}}, nil, "0 targets for 2 tokens", nil},
		{"too many targets", forward.Input{Tokens: []int32{1}, Targets: []int32{1, 2}}, nil, "2 targets for 1 tokens", nil},
		{"targets of another width", forward.Input{Tokens: []int32{1, 2}, Targets: []int32{1, 2, 3}, TargetWidth: 2}, nil, "3 targets for 2 tokens with 2 labels per position", nil},
		{"a width that overflows", forward.Input{Tokens: []int32{1, 2}, Targets: []int32{1, 2}, TargetWidth: math.MaxInt}, nil, "2 targets for 2 tokens", nil},
		{"a negative width", forward.Input{Tokens: []int32{1}, Targets: []int32{1}, TargetWidth: -1}, nil, "target width -1 is negative", nil},
		{"a negative top k", forward.Input{Tokens: []int32{1}, TopK: -1}, nil, "top k -1", nil},
		{"a top k above the vocabulary", forward.Input{Tokens: []int32{1}, TopK: vocab + 1}, nil, fmt.Sprintf("top k %d is not between 0 and the vocabulary of %d", vocab+1, vocab), nil},
		{"an unknown grad mode", forward.Input{Tokens: []int32{1}, TopK: 1, Grad: 7}, nil, "grad mode 7", nil},
		{"with grad", forward.Input{Tokens: []int32{1}, TopK: 1, Grad: forward.WithGrad}, nil, `checkpoint "": the base model is not trained`, &slot},
		{"with grad by the call", forward.Input{Tokens: []int32{1}, TopK: 1}, []trainerrank.CallOption{trainerrank.WithGradMode(forward.WithGrad)}, `checkpoint "": the base model is not trained`, &slot},
		{"a checkpoint", forward.Input{Tokens: []int32{1}, TopK: 1, Checkpoint: forward.Checkpoint("a")}, nil, `checkpoint "a": no checkpoint of that name is loaded`, &slot},
		{"a checkpoint by the call", forward.Input{Tokens: []int32{1}, TopK: 1}, []trainerrank.CallOption{trainerrank.WithCheckpoint(forward.Checkpoint("b"))}, `checkpoint "b"`, &slot},
	} {
		t.Run(c.name, func(t *testing.T) {
			// The inputs around it are sound under every option of the call.
			sound := ok
			sound.Grad, sound.Checkpoint = forward.NoGrad, forward.BaseModel()
			for _, place := range []struct {
				path  string
				index int
				in    forward.Inputs
			}{
				{"inputs", 0, forward.One(c.in)},
				{"inputs[1]", 1, forward.Many(sound, c.in, forward.Input{})},
				{"inputs[2][0]", 2, forward.Nest(forward.One(sound), forward.One(sound), forward.Many(c.in, sound))},
				{"inputs[1][2][0][0]", 1, forward.Nest(forward.One(sound), forward.Nest(forward.Many(), forward.Nest(), forward.Nest(forward.Many(c.in))))},
			} {
				before := m.Host.Stats()
				_, err := rank.DPRankForward(t.Context(), place.in, c.opts...)
				var e *trainerrank.InputError
				if !errors.As(err, &e) || e.Path != place.path || e.Index != place.index || !strings.HasPrefix(err.Error(), place.path+": "+c.want) {
					t.Errorf("got %v, want %s: %s", err, place.path, c.want)
				}
				if c.as != nil && !errors.As(err, c.as) {
					t.Errorf("%v is not a %T", err, c.as)
				}
				if _, planErr := rank.Plan(t.Context(), place.in, c.opts...); fmt.Sprint(planErr) != fmt.Sprint(err) {
					t.Errorf("Plan says %v, the call %v", planErr, err)
				}
				if now := m.Host.Stats(); now != before {
					t.Errorf("the device was touched: %v", now)
				}
			}
			if _, err := rank.LastForwardTelemetry(); err == nil || s.forwards.Load() != 0 {
				t.Error("something was planned or run")
			}
		})
	}
}

// The selection and the grad mode of an input go before those of the call.
func TestInputsGoBeforeTheCall(t *testing.T) {
	_, rank := load(t, golden.FS(t, "qwen2-tiny"), golden.Options{})
	in := forward.Input{Tokens: tokens(4), TopK: 1, Grad: forward.NoGrad, Checkpoint: forward.BaseModel()}
	res, err := rank.DPRankForward(t.Context(), forward.One(in), trainerrank.WithGradMode(forward.WithGrad), trainerrank.WithCheckpoint(forward.Checkpoint("none")))
	if err != nil {
		t.Fatal(err)
	}
	defer res.Release()
	if o := res.Outputs.Output(); !o.NoGrad || o.Checkpoint != "" || o.TopK == nil {
		t.Errorf("%+v", o)
	}
}

// A position that is ignored scores 0, not NaN and not -0, also where all of a request's are.
func TestIgnoredLabelsScoreZero(t *testing.T) {
	for _, model := range []string{"qwen2-tiny", "arith"} {
		m, rank := load(t, golden.FS(t, model), golden.Options{Threads: 2})
		vocab := m.Spec().Vocabulary
		for seed := range uint64(20) {
			r := golden.Rand(seed)
			n, w := 1+r.IntN(40), 1+r.IntN(3)
			in := forward.Input{Targets: slices.Repeat([]int32{forward.IgnoreLabel}, n*w), TargetWidth: w}
			for range n {
				in.Tokens = append(in.Tokens, int32(r.IntN(vocab)))
			}
			mixed := in
			mixed.Targets = slices.Clone(in.Targets)
			for i := range mixed.Targets {
				if r.IntN(2) == 0 {
					mixed.Targets[i] = int32(r.IntN(vocab))
				}
			}
			answers, _ := score(t, rank, forward.Many(in, mixed))
			for k, c := range []forward.Input{in, mixed} {
				for i, label := range c.Targets {
					got := answers[k].Targets[i]
					if ignored := label == forward.IgnoreLabel; ignored && math.Float32bits(got) != 0 || !ignored && !(got < 0) {
						t.Errorf("%s, seed %d: label %d scores %v", model, seed, label, got)
					}
				}
			}
		}
	}
}

// A logprob is never above 0, however sure the model is; of equal logprobs the lower token comes first; a k of the whole vocabulary works.
func TestLogprobsOfASureModel(t *testing.T) {
	for _, c := range []struct {
		name  string
		vocab int
		scale float32
	}{{"sure", 70, 3000}, {"even", 70, 0}, {"one token", 1, 1}, {"unsure", 70, 1e-3}} {
		golden.Kernels(t, func(t *testing.T, _ string) {
			config := strings.Replace(golden.Wide, `"vocab_size": 1111`, fmt.Sprintf(`"vocab_size": %d`, c.vocab), 1)
			folder := golden.Synthetic{Config: config, DType: "F32", Seed: 4, Change: func(name string, v []float32, _ *string) {
				for i := range v {
					if name == "lm_head.weight" {
						v[i] *= c.scale
					}
				}
			}}.Write(t)
			_, rank := load(t, folder, golden.Options{})
			in := forward.Input{TopK: c.vocab, Logits: true, TargetWidth: c.vocab}
			for i := range 20 {
				in.Tokens = append(in.Tokens, int32(i%c.vocab))
				for l := range c.vocab {
					in.Targets = append(in.Targets, int32(l))
				}
			}
			answers, _ := score(t, rank, forward.One(in))
			a := answers[0]
			for p := range in.Tokens {
				row := func(list []float32) []float32 { return list[p*c.vocab : (p+1)*c.vocab] }
				ids, top, logprobs, logits := a.TopTokens[p*c.vocab:(p+1)*c.vocab], row(a.TopLogprobs), row(a.Targets), row(a.Logits)
				sum := 0.0
				for i, id := range ids {
					if !(top[i] <= 0) || math.Float32bits(top[i]) != math.Float32bits(logprobs[id]) {
						t.Fatalf("%s, position %d: rank %d is token %d with %v; its logprob is %v", c.name, p, i, id, top[i], logprobs[id])
					}
					if i > 0 && (logits[ids[i-1]] < logits[id] || logits[ids[i-1]] == logits[id] && ids[i-1] >= id) {
						t.Fatalf("%s, position %d: token %d (%v) stands before token %d (%v)", c.name, p, ids[i-1], logits[ids[i-1]], id, logits[id])
					}
					sum += math.Exp(float64(top[i]))
				}
				if math.Abs(sum-1) > 1e-5 {
					t.Errorf("%s, position %d: the probabilities add up to %v", c.name, p, sum)
				}
			}
		})
	}
}

// A call that is cancelled, before it, while it waits for its turn, or while it runs, leaves nothing allocated, and the next one works.
func TestCancelledCallsLeaveNothing(t *testing.T) {
	m := golden.Load(t, golden.FS(t, "qwen2-tiny"), golden.Options{Threads: 2})
	s := &spy{Model: m.Model}
	rank := wrap(t, s)
	in := forward.Many(forward.Input{Tokens: tokens(700), TopK: 3}, forward.Input{Tokens: tokens(500), Logits: true})
	want, _ := score(t, rank, in)
	before := stateOf(m.Host)
	next := func() {
		t.Helper()
		unchanged(t, m.Host, before)
		got, _ := score(t, rank, in)
		for i := range got {
			if d := golden.Diff(want[i], got[i]); d != "" {
				t.Errorf("the call after: %s", d)
			}
		}
	}

	over, cancel := context.WithCancel(t.Context())
	cancel()
	ran := s.forwards.Load()
	if _, err := rank.DPRankForward(over, in); !errors.Is(err, context.Canceled) || s.forwards.Load() != ran {
		t.Errorf("cancelled before: %v", err)
	}
	if _, err := rank.Plan(over, in); !errors.Is(err, context.Canceled) {
		t.Errorf("plan, cancelled before: %v", err)
	}
	next()

	steps := 0
	if _, err := rank.Plan(t.Context(), in, trainerrank.WithProgress(func(int, int) { steps++ })); err != nil || steps != 0 {
		t.Errorf("a plan reported %d steps: %v", steps, err)
	}
	res, err := rank.DPRankForward(t.Context(), in, trainerrank.WithProgress(func(done, total int) {
		if steps++; done != steps {
			t.Errorf("step %d of %d comes as number %d", done, total, steps)
		}
		if done == total {
			steps = -steps
		}
	}))
	if err != nil || steps >= 0 {
		t.Fatalf("%d steps, without the last: %v", steps, err)
	}
	res.Release()
	for stop := 1; stop <= -steps; stop++ {
		ctx, cancel := context.WithCancel(t.Context())
		_, err := rank.DPRankForward(ctx, in, trainerrank.WithProgress(func(done, _ int) {
			if done == stop {
				cancel()
			}
		}))
		cancel()
		if !errors.Is(err, context.Canceled) {
			t.Errorf("cancelled in step %d: %v", stop, err)
		}
		next()
	}

	started, release := make(chan struct{}), make(chan struct{})
	s.before = func(context.Context, *forward.Batch) {
		close(started)
		<-release
	}
	done := make(chan error)
	go func() {
		res, err := rank.DPRankForward(t.Context(), in)
		if err == nil {
			res.Release()
		}
		done <- err
	}()
	<-started
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := rank.DPRankForward(ctx, in); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "waiting") {
		t.Errorf("cancelled while waiting: %v", err)
	}
	close(release)
	if err := <-done; err != nil {
		t.Error(err)
	}
	s.before = nil
	next()
}

// Callers from several goroutines take turns; each gets its own answers. (The spy panics if two calls run at once.)
func TestConcurrentCallersTakeTurns(t *testing.T) {
	m := golden.Load(t, golden.FS(t, "qwen2-tiny"), golden.Options{Threads: 2})
	rank := wrap(t, &spy{Model: m.Model})
	r := golden.Rand(1)
	inputs := golden.Draw(r, m.Spec().Vocabulary, 12, 60)
	want, _ := score(t, rank, forward.Many(inputs...))
	var wg sync.WaitGroup
	for i := range inputs {
		wg.Go(func() {
			for range 5 {
				res, err := rank.DPRankForward(t.Context(), forward.One(inputs[i]))
				if err != nil {
					t.Error(err)
					return
				}
				if d := golden.Diff(want[i], golden.Copy(res.Outputs.Output())); d != "" {
					t.Errorf("caller %d:\n%s", i, d)
				}
				if _, err := rank.LastForwardTelemetry(); err != nil {
					t.Error(err)
				}
				if _, err := rank.Plan(t.Context(), forward.One(inputs[i])); err != nil {
					t.Error(err)
				}
				res.Release()
			}
		})
	}
	wg.Wait()
}

// A result can be released again, from anywhere; one that nobody holds any more is released by the collector.
func TestResultsAreReleasedOnce(t *testing.T) {
	m, rank := load(t, golden.FS(t, "qwen2-tiny"), golden.Options{})
	before := stateOf(m.Host)
	in := forward.Many(forward.Input{Tokens: tokens(300), Logits: true})
	first, err := rank.DPRankForward(t.Context(), in)
	if err != nil {
		t.Fatal(err)
	}
	second, err := rank.DPRankForward(t.Context(), in)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(first.Release)
	}
	wg.Wait()
	first.Release()
	if got, want := m.Host.Stats().InUse[device.Outputs], second.Telemetry.RetainedBytes; got != want {
		t.Errorf("%d bytes of outputs are left, want those of the other result, %d", got, want)
	}
	second.Release()
	unchanged(t, m.Host, before)

	for range 3 {
		if _, err := rank.DPRankForward(t.Context(), in); err != nil { // abandoned
			t.Fatal(err)
		}
	}
	if !collected(func() bool { return stateOf(m.Host) == before }) {
		unchanged(t, m.Host, before)
	}
}

// collected runs the collector until done, and says whether that came to be.
func collected(done func() bool) bool {
	for deadline := time.Now().Add(20 * time.Second); !done(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			return false
		}
		runtime.GC()
	}
	return true
}

// Who keeps an answer keeps the memory that it lies in, also when the result and the other answers are gone; whoever is last gives it back.
func TestAnswersKeepTheirMemory(t *testing.T) {
	m, _ := load(t, golden.FS(t, "qwen2-tiny"), golden.Options{})
	s := &spy{Model: m.Model}
	var passes []*forward.Pass // a model that remembers them keeps nothing
	s.after = func(p *forward.Pass, err error) (*forward.Pass, error) {
		passes = append(passes, p)
		return p, err
	}
	rank := wrap(t, s)
	before := stateOf(m.Host)
	in := forward.Nest(forward.Many(forward.Input{Tokens: tokens(300), Logits: true}), forward.One(forward.Input{Tokens: tokens(3)}))
	want, tel := score(t, rank, in)
	for what, keep := range map[string]func(o forward.Outputs) (outputs func() []*forward.Output, first int){
		"all":             func(o forward.Outputs) (func() []*forward.Output, int) { return o.Flat, 0 },
		"the nested list": func(o forward.Outputs) (func() []*forward.Output, int) { return o.List()[0].Flat, 0 },
		"one": func(o forward.Outputs) (func() []*forward.Output, int) {
			flat := o.Flat()[:1:1]
			return func() []*forward.Output { return flat }, 0
		},
		"one that wanted nothing": func(o forward.Outputs) (func() []*forward.Output, int) {
			flat := []*forward.Output{o.Flat()[1]}
			return func() []*forward.Output { return flat }, 1
		},
	} {
		other := newCollectable()
		res, err := rank.DPRankForward(t.Context(), in)
		if err != nil {
			t.Fatal(err)
		}
		outputs, first := keep(res.Outputs)
		res = nil
		if !collected(other) || !collected(newCollectable()) {
			t.Fatal("the collector collects nothing")
		}
		if got := m.Host.Stats().InUse[device.Outputs] - before.InUse[device.Outputs]; got != tel.RetainedBytes {
			t.Fatalf("%s: %d bytes of outputs are in use, want %d", what, got, tel.RetainedBytes)
		}
		for i, o := range outputs() {
			if d := golden.Diff(want[first+i], golden.Copy(o)); d != "" {
				t.Errorf("%s: output %d:\n%s", what, first+i, d)
			}
		}
		outputs = nil
		if !collected(func() bool { return stateOf(m.Host) == before }) {
			t.Errorf("%s: nobody holds the answers any more:", what)
			unchanged(t, m.Host, before)
		}
	}
	runtime.KeepAlive(passes)
}

// newCollectable makes garbage, and gives a function that says whether it was collected.
func newCollectable() func() bool {
	var gone atomic.Bool
	runtime.AddCleanup(&struct{ self [2]*int }{}, func(gone *atomic.Bool) { gone.Store(true) }, &gone)
	return gone.Load
}

// A callback or a model that ends the goroutine, as t.FailNow does, ends the caller's: nothing is left, and the rank goes on.
func TestCallsWhoseGoroutineEnds(t *testing.T) {
	m, in, _, least := splitCall(t)
	want, _ := score(t, wrap(t, m.Model), in)
	for what, usable := range map[string]int64{"whole": math.MaxInt64, "split": least} {
		s := &spy{Model: m.Model}
		rank := wrap(t, s, trainerrank.WithUsableBytes(usable))
		before := stateOf(m.Host)
		// ends runs a call and says whether it ended the goroutine.
		ends := func(opts ...trainerrank.CallOption) (ended bool) {
			done := make(chan struct{})
			go func() {
				defer close(done)
				ended = true
				res, err := rank.DPRankForward(t.Context(), in, opts...)
				ended = false
				if err != nil {
					t.Error(err)
					return
				}
				res.Release()
			}()
			<-done
			s.running.Store(0)
			return ended
		}
		steps := 0
		if ends(trainerrank.WithProgress(func(int, int) { steps++ })) {
			t.Fatal("a call ended its goroutine unasked")
		}
		stop := func(at int) trainerrank.CallOption {
			n := 0
			return trainerrank.WithProgress(func(int, int) { // on any worker
				if n++; n == at {
					runtime.Goexit()
				}
			})
		}
		for at := 1; at <= steps; at += max(1, steps/16) {
			if !ends(stop(at)) {
				t.Errorf("%s: the goroutine was ended in step %d, and the call went on", what, at)
			}
			unchanged(t, m.Host, before)
		}
		s.before = func(context.Context, *forward.Batch) { runtime.Goexit() }
		if !ends() {
			t.Errorf("%s: the model ended the goroutine, and the call went on", what)
		}
		s.before, s.price = nil, func(forward.Footprint) forward.Footprint { runtime.Goexit(); return forward.Footprint{} }
		if !ends() {
			t.Errorf("%s: the rehearsal ended the goroutine, and the call went on", what)
		}
		unchanged(t, m.Host, before)
		*s = spy{Model: m.Model}
		got, _ := score(t, rank, in)
		for i := range want {
			if d := golden.Diff(want[i], got[i]); d != "" {
				t.Errorf("%s: the call after: %s", what, d)
			}
		}
	}
}

// A model that does not keep its word is an error of the call that met it: nothing leaks, and the next call works.
func TestModelsThatDoNotKeepTheirWord(t *testing.T) {
	m := golden.Load(t, golden.FS(t, "qwen2-tiny"), golden.Options{Threads: 2})
	in := forward.Many(forward.Input{Tokens: tokens(60), TopK: 3}, forward.Input{Tokens: tokens(90), Logits: true})
	failed := errors.New("no luck")
	for _, c := range []struct {
		name  string
		spoil func(s *spy)
		want  string
	}{
		{"scratch rehearsed too small", func(s *spy) {
			s.price = func(f forward.Footprint) forward.Footprint { f.Scratch -= 4096; return f }
		}, "outgrew its reservation"},
		{"no scratch rehearsed", func(s *spy) { s.price = func(f forward.Footprint) forward.Footprint { f.Scratch = 0; return f } }, "outgrew its reservation"},
		{"outputs rehearsed too small", func(s *spy) {
			s.price = func(f forward.Footprint) forward.Footprint { f.Outputs -= 4096; return f }
		}, "outgrew its reservation"},
		{"an output too few", func(s *spy) {
			s.after = func(p *forward.Pass, _ error) (*forward.Pass, error) {
				return &forward.Pass{Outputs: p.Outputs[:1]}, nil
			}
		}, "1 outputs for 2 requests"},
		{"an output too many", func(s *spy) {
			s.after = func(p *forward.Pass, _ error) (*forward.Pass, error) {
				return &forward.Pass{Outputs: append(p.Outputs, forward.Output{})}, nil
			}
		}, "3 outputs for 2 requests"},
		{"no pass", func(s *spy) { s.after = func(*forward.Pass, error) (*forward.Pass, error) { return nil, nil } }, "no pass"},
		{"an error", func(s *spy) { s.after = func(*forward.Pass, error) (*forward.Pass, error) { return nil, failed } }, "no luck"},
		{"a panic", func(s *spy) { s.after = func(*forward.Pass, error) (*forward.Pass, error) { panic(failed) } }, "panic: no luck"},
		{"a panic under way", func(s *spy) {
			s.before = func(_ context.Context, b *forward.Batch) { b.Progress = func(int, int) { panic(failed) } }
		}, "panic: no luck"},
	} {
		t.Run(c.name, func(t *testing.T) {
			before := stateOf(m.Host)
			s := &spy{Model: m.Model}
			rank := wrap(t, s)
			want, _ := score(t, rank, in)
			c.spoil(s)
			err := func() (err error) {
				defer func() {
					if r := recover(); r != nil {
						err = fmt.Errorf("panic: %w", r.(error))
					}
				}()
				_, err = rank.DPRankForward(t.Context(), in)
				return err
			}()
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %s", err, c.want)
			}
			var over *device.OverrunError
			if wanted := strings.Contains(c.want, "outgrew"); errors.As(err, &over) != wanted {
				t.Errorf("an overrun: %v, in %v", !wanted, err)
			}
			unchanged(t, m.Host, before)
			*s = spy{Model: m.Model}
			got, _ := score(t, rank, in)
			for i := range got {
				if d := golden.Diff(want[i], got[i]); d != "" {
					t.Errorf("the call after: %s", d)
				}
			}
		})
	}
}

// homeless can rehearse, and is on no device.
type homeless struct{ forward.Rehearser }

func TestNewRefusesWhatIsOnNoDevice(t *testing.T) {
	m := golden.Load(t, golden.FS(t, "qwen2-tiny"), golden.Options{Unloaded: true})
	for name, model := range map[string]forward.Model{
		"homeless": homeless{m.Model}, "not placed": m.Model, "opaque and homeless": trainerrank.Opaque(homeless{m.Model}), "opaque and not placed": trainerrank.Opaque(m.Model),
	} {
		if _, err := trainerrank.New(model); err == nil || !strings.Contains(err.Error(), "no device") {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := trainerrank.New(model, trainerrank.WithDevice(m.Host)); err != nil {
			t.Errorf("%s, with a device: %v", name, err)
		}
	}
	rank := wrap(t, m.Model, trainerrank.WithDevice(m.Host))
	before := stateOf(m.Host)
	if _, err := rank.DPRankForward(t.Context(), forward.One(forward.Input{Tokens: tokens(2), TopK: 1})); err == nil || !strings.Contains(err.Error(), "not loaded") {
		t.Errorf("a call of a model that is not loaded: %v", err)
	}
	unchanged(t, m.Host, before)
}

// One call's telemetry: what it was, in tokens, bytes and order.
func TestTelemetry(t *testing.T) {
	_, rank := load(t, golden.FS(t, "qwen2-tiny"), golden.Options{}, trainerrank.WithUsableBytes(123<<20))
	in := func(n int, last int32) forward.Input {
		return forward.Input{Tokens: append(tokens(n), last), TopK: 1}
	}
	_, tel := score(t, rank, forward.Nest(forward.Many(in(10, 60), in(10, 61)), forward.One(in(10, 60))))
	if tel.PlanningTime <= 0 || tel.PredictedPeakBytes <= 0 {
		t.Errorf("%+v", tel)
	}
	want := trainerrank.Telemetry{
		PlanningTime: tel.PlanningTime, SubforwardCount: 1, SubforwardRequestIndices: [][]int{{0, 1, 2}}, SelectedMaxDepth: 2,
		PackedTokens: 12, LogicalTokens: 33, PredictedPeakBytes: tel.PredictedPeakBytes, UsableLimitBytes: 123 << 20,
		ObservedPeakBytes: tel.PredictedPeakBytes, RetainedBytes: 4096, Basis: trainerrank.Exact, Retention: "stored",
	}
	if d := cmp.Diff(want, tel); d != "" {
		t.Error(d)
	}
}
