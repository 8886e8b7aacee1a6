package main

import (
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/tensor"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/forward/kernel"
	"github.com/trainerrank/engine/forward/transformer"
	"github.com/trainerrank/engine/internal/builtin"
	"github.com/trainerrank/engine/internal/golden"
	"github.com/trainerrank/engine/slots"
	"github.com/trainerrank/engine/trainerrank"
)

// openBuiltin opens the built-in model.
func openBuiltin(t testing.TB, threads int) *transformer.Model {
	t.Helper()
	backend, err := kernel.NewHost(threads)
	must(t, err)
	t.Cleanup(backend.Close)
	folder, err := builtin.Open(builtin.Default)
	must(t, err)
	m, err := transformer.OpenFS(folder, "arith", backend)
	must(t, err)
	t.Cleanup(func() { m.Close() })
	return m
}

// makeAdapter writes an adapter of the built-in model that changes its answers: as PEFT would write it, or after steps as the engine does.
func makeAdapter(t testing.TB, dir string, rank, steps int) {
	t.Helper()
	dev, err := device.NewHost(64 << 20)
	must(t, err)
	device.CheckLeaks(t, dev)
	set := slots.New(openBuiltin(t, 1).Modules(), dev, slots.Options{BaseModel: "arith"})
	defer set.Close()
	must(t, set.Create(t.Context(), "x", slots.Config{Rank: rank, Alpha: 4, Targets: []string{"q_proj", "down_proj"}, Layers: []int{1}, Seed: uint64(rank)}))
	rng := rand.New(rand.NewPCG(uint64(rank), 1))
	a, err := set.Adapter("x")
	must(t, err)
	// The gradients are those of a loss that wants B to be something.
	for range max(1, steps) {
		g := device.MemOf(make([]byte, a.Bytes))
		for i := range g.F32() {
			g.F32()[i] = float32(rng.NormFloat64())
		}
		must(t, set.Accumulate("x", g))
		_, err := set.Step(t.Context(), slots.StepOptions{Params: slots.Adam(0.05)})
		must(t, err)
	}
	must(t, set.Save(t.Context(), "x", dir))
	if steps > 0 {
		return
	}
	weights := filepath.Join(dir, "adapter_model.safetensors")
	writeTensors(t, weights, readTensors(t, weights)) // without our mark
	must(t, os.Remove(filepath.Join(dir, "checkpoint.json")))
	must(t, os.Remove(filepath.Join(dir, "trainer_optimizer.safetensors")))
}

// onAdapters are requests that run on the adapters a and b, and on the base model.
func onAdapters(t testing.TB) []string {
	lines := mixed(t)
	for i := range lines {
		switch i % 4 {
		case 0:
			lines[i] = strings.Replace(lines[i], `"id"`, `"checkpoint": "b", "id"`, 1)
		case 1:
			lines[i] = strings.Replace(lines[i], `"id"`, `"checkpoint": "", "id"`, 1)
		}
	}
	return lines
}

// twoAdapters are flags for two adapters, of which the first is the default.
func twoAdapters(t testing.TB) []string {
	dir := t.TempDir()
	a, b := filepath.Join(dir, "a"), filepath.Join(dir, "b")
	makeAdapter(t, a, 3, 0)
	makeAdapter(t, b, 5, 2)
	return []string{"--adapter", "a=" + a, "--adapter", "b=" + b, "--checkpoint", "a"}
}

// Adapters count against the budget: with what is predicted the call runs and uses it all, down to the smallest budget, and with one byte less it is refused, before
// anything is read.
func TestTheBudgetIsExactWithAdapters(t *testing.T) {
	adapters := twoAdapters(t)
	split := 0
	for name, lines := range map[string][]string{
		"some on each": onAdapters(t), "one": {`{"input_tokens": [1]}`}, "none": {""}, "base": {`{"input_tokens": [1, 2, 3], "checkpoint": ""}`},
	} {
		for _, threads := range []string{"1", "3"} {
			args := slices.Concat([]string{"score", "--requests", writeLines(t, lines), "--threads", threads}, adapters)
			o, s := summarized(t, args...)
			if o.code != exitDone || s.Verdict != "whole" || s.PredictedPeakBytes != s.ObservedPeakBytes || s.AdaptersBytes == 0 || s.PredictedPeakBytes < s.WeightsBytes+s.AdaptersBytes {
				t.Fatalf("%s: exit %d, %+v\n%s", name, o.code, s, o.stderr)
			}
			need, least := s.PredictedPeakBytes, s.SmallestBudgetBytes
			for _, budget := range []int64{need + 1, need, need - 1, (need + least) / 2, least, least - 1, s.WeightsBytes + s.AdaptersBytes, s.WeightsBytes + 1, s.WeightsBytes - 1} {
				fits := budget >= least
				got, with := summarized(t, slices.Concat(args, []string{"--budget", fmt.Sprint(budget)})...)
				switch {
				case with.SmallestBudgetBytes != least || with.UsableLimitBytes != budget || with.AdaptersBytes != s.AdaptersBytes:
					t.Errorf("%s: at %d: %+v", name, budget, with)
				case !fits && (got.code != exitRefused || with.PredictedPeakBytes != need || with.ObservedPeakBytes != 0):
					t.Errorf("%s: at %d of %d..%d: exit %d, %+v", name, budget, least, need, got.code, with)
				case fits && (got.code != exitDone || with.ObservedPeakBytes != with.PredictedPeakBytes || with.PredictedPeakBytes > budget || (with.Verdict == "whole") != (budget >= need)):
					t.Errorf("%s: at %d of %d..%d: exit %d, %+v", name, budget, least, need, got.code, with)
				case fits && got.stdout != o.stdout:
					t.Errorf("%s: at %d the answers are others", name, budget)
				}
				if with.Verdict == "split" {
					split++
				}
				if args[0] = "plan"; run(t, slices.Concat(args, []string{"--budget", fmt.Sprint(budget)})...).code != got.code {
					t.Errorf("%s: at %d plan says otherwise", name, budget)
				}
				args[0] = "score"
			}
		}
	}
	if split == 0 {
		t.Error("nothing was split")
	}
}

// A request is answered by the adapter that it names, whatever others the call has.
func TestAnswersOfAdapters(t *testing.T) {
	adapters := twoAdapters(t)
	together := run(t, slices.Concat([]string{"score", "--requests", writeLines(t, onAdapters(t))}, adapters)...)
	if together.code != exitDone {
		t.Fatal(together.stderr)
	}
	answers := strings.Split(strings.TrimSuffix(together.stdout, "\n"), "\n")
	seen := map[string]bool{}
	for i, alone := range [][]string{append(slices.Clone(adapters[2:4]), "--checkpoint", "b"), nil, adapters, adapters} {
		for j := i; j < len(answers); j += 4 {
			o := run(t, slices.Concat([]string{"score", "--requests", writeLines(t, mixed(t)[j:j+1])}, alone)...)
			if o.code != exitDone || o.stdout != answers[j]+"\n" {
				t.Errorf("request %d: exit %d, alone %.200s, together %.200s", j, o.code, o.stdout, answers[j])
			}
		}
		o := run(t, slices.Concat([]string{"score"}, alone)...)
		seen[o.stdout] = true
	}
	if len(seen) != 3 {
		t.Errorf("two adapters and the base model give %d different answers", len(seen))
	}
}

// What a plan with gradients says is enough for a rank that loads the adapters and trains: its forward, its backward and a step.
func TestAPlanWithGradientsIsWhatTrainingTakes(t *testing.T) {
	adapters := twoAdapters(t)
	trainedOn := slices.DeleteFunc(onAdapters(t), func(l string) bool { return strings.Contains(l, `"checkpoint": ""`) })
	t.Run("both", func(t *testing.T) { planAndTrain(t, adapters, trainedOn, false) })
	t.Run("one", func(t *testing.T) { // of which what is predicted is used to the byte: the backwards of several differ in what they need most of
		planAndTrain(t, append(slices.Clone(adapters[:2]), adapters[4:]...), mixed(t)[4:16], true)
	})
}

func planAndTrain(t *testing.T, adapters, lines []string, exact bool) {
	args := slices.Concat([]string{"plan", "--grad", "--threads", "2", "--json", "--requests", writeLines(t, lines)}, adapters)
	plan := func(more ...string) (outcome, trainerrank.Admission) {
		o := run(t, slices.Concat(args, more)...)
		var a trainerrank.Admission
		must(t, json.Unmarshal([]byte(o.stdout), &a))
		return o, a
	}
	_, whole := plan()
	reqs, err := parseRequests("requests", []byte(strings.Join(lines, "\n")))
	must(t, err)
	var inputs []forward.Input
	for i := range reqs {
		inputs = append(inputs, reqs[i].input)
	}
	seen := map[trainerrank.Retention]bool{}
	for _, retention := range []string{"stored", "layer", "replay", "stored,layer,replay", "layer,stored"} {
		_, a := plan("--retention", retention)
		for _, budget := range []int64{a.PredictedPeakBytes, a.SmallestBudgetBytes} {
			if o, a := plan("--retention", retention, "--budget", fmt.Sprint(a.SmallestBudgetBytes-1)); o.code != exitRefused || a.Verdict != trainerrank.Refused {
				t.Errorf("%s: %d of %d bytes are not refused", retention, budget-1, budget)
			}
			o, a := plan("--retention", retention, "--budget", fmt.Sprint(budget))
			if o.code != exitDone || a.PredictedPeakBytes > budget || a.PredictedPeakBytes > whole.PredictedPeakBytes {
				t.Fatalf("%s, %d bytes: exit %d: %s", retention, budget, o.code, o.stderr)
			}
			seen[a.Retention] = true
			dev, err := device.NewHost(budget)
			must(t, err)
			device.CheckLeaks(t, dev)
			m := openBuiltin(t, 2)
			must(t, m.Place(dev))
			must(t, m.Load(t.Context(), m.Staging(budget-m.WeightBytes()), nil))
			rank, err := trainerrank.New(m)
			must(t, err)
			var retentions []trainerrank.Retention
			for r := range strings.SplitSeq(retention, ",") {
				retentions = append(retentions, trainerrank.Retention(r))
			}
			for _, a := range adapters {
				if name, dir, ok := strings.Cut(a, "="); ok {
					must(t, rank.LoadCheckpoint(t.Context(), name, dir))
				}
			}
			res, err := rank.DPRankForward(t.Context(), forward.Many(inputs...), trainerrank.WithGradMode(forward.WithGrad), trainerrank.WithCheckpoint(forward.Checkpoint("a")), trainerrank.WithRetentions(retentions...))
			must(t, err)
			grads := make([]forward.OutputGrad, len(inputs))
			for i, o := range res.Outputs.Flat() { // a cotangent for every output: then a backward needs most
				for _, c := range []struct {
					to   *[]float32
					from *tensor.Dense
				}{{&grads[i].TargetLogprobs, o.TargetLogprobs}, {&grads[i].Logits, o.Logits}, {&grads[i].HiddenStates, o.HiddenStates}} {
					if c.from != nil {
						*c.to = slices.Clone(c.from.Data().([]float32))
					}
				}
			}
			must(t, res.Backward(t.Context(), grads))
			if got, want := dev.Stats().PeakInUse, a.PredictedPeakBytes; got > want || exact && got != want || res.Telemetry.Retention != a.Retention || res.Telemetry.SubforwardCount != len(a.SubforwardRequestIndices) {
				t.Errorf("%s, %d bytes: %d in use at the peak, %d predicted; %+v", retention, budget, got, want, res.Telemetry)
			}
			res.Release()
			_, err = rank.OptimStep(t.Context(), slots.StepOptions{Params: slots.Adam(1e-3)})
			must(t, err)
			rank.Close()
			must(t, m.Close())
		}
	}
	if len(seen) != 3 {
		t.Errorf("planned only with %v", seen)
	}
}

// Golden adapters, through the command as users call it.
func TestGoldenAdapters(t *testing.T) {
	for _, c := range []struct{ model, adapter string }{{"qwen3-tiny", "a"}, {"qwen3-tiny", "b"}, {"llama3-tiny", "a"}, {"llama3-tiny", "b"}} {
		t.Run(c.model+"/"+c.adapter, func(t *testing.T) {
			dir := golden.Dir(t, c.model)
			requests := golden.Requests(t, os.DirFS(dir))
			ref := golden.Tensors(t, os.DirFS(dir), "expected.adapter-"+c.adapter+".safetensors")
			folder := filepath.Join(dir, "adapter-"+c.adapter)
			o, s := summarized(t, "score", "--model", dir, "--requests", filepath.Join(dir, "requests.jsonl"), "--adapter", c.adapter+"="+folder, "--checkpoint", c.adapter)
			if o.code != exitDone || s.PredictedPeakBytes != s.ObservedPeakBytes {
				t.Fatalf("exit %d, %+v\n%s", o.code, s, o.stderr)
			}
			worst, compared := map[string]float64{}, 0
			answers := strings.Split(strings.TrimSuffix(o.stdout, "\n"), "\n")
			if len(answers) != len(requests) {
				t.Fatalf("%d answers to %d requests", len(answers), len(requests))
			}
			for i, line := range answers {
				var a struct {
					ID      string          `json:"id"`
					Targets json.RawMessage `json:"target_logprobs"`
					Logits  json.RawMessage `json:"logits"`
					Hidden  json.RawMessage `json:"hidden_states"`
					Top     map[string]any  `json:"top_k"`
				}
				must(t, json.Unmarshal([]byte(line), &a))
				if a.ID != requests[i].ID {
					t.Fatalf("answer %d is that of %s", i, a.ID)
				}
				check := func(what string, got []float64) {
					want := ref[a.ID+"."+what]
					if len(got) != len(want) {
						t.Fatalf("%s: %d values of %s, want %d", a.ID, len(got), what, len(want))
					}
					for j := range got {
						if e := math.Abs(got[j] - want[j]); !(e <= worst[what]) {
							worst[what] = e
						}
						compared++
					}
				}
				check("target_logprobs", flat(t, a.Targets))
				check("logits", flat(t, a.Logits))
				check("hidden_states", flat(t, a.Hidden))
				var top json.RawMessage
				if a.Top != nil {
					text, err := json.Marshal(a.Top["logprobs"])
					must(t, err)
					top = text
				}
				check("topk_logprobs", flat(t, top))
			}
			for what, limit := range map[string]float64{"target_logprobs": 2e-5, "topk_logprobs": 2e-5, "logits": 3e-5, "hidden_states": 3e-5} {
				if !(worst[what] <= limit) {
					t.Errorf("%s: %.2e off", what, worst[what])
				}
			}
			t.Logf("%d values, at most off by %v", compared, worst)
			if o := run(t, "inspect", folder); o.code != exitDone || !strings.Contains(o.stdout, "of          "+c.model) {
				t.Errorf("inspect: %s", o)
			}
		})
	}
}

// flat are the numbers of nested lists, row-major; null is 0.
func flat(t testing.TB, text json.RawMessage) []float64 {
	var list []float64
	var walk func(v any)
	walk = func(v any) {
		switch v := v.(type) {
		case []any:
			for _, x := range v {
				walk(x)
			}
		case float64:
			list = append(list, v)
		case nil:
			list = append(list, 0)
		default:
			t.Fatalf("%v is no number", v)
		}
	}
	if text != nil {
		var v any
		must(t, json.Unmarshal(text, &v))
		walk(v)
	}
	return list
}
