// Package golden is what the tests of several packages share: the golden models with their requests and float64 references
// (see README.md beside them), models with random weights, random requests, and comparisons that say where two answers differ.
//
// Most golden models lie outside the repository, in ../shared/golden; a test that needs one is skipped where that is absent. Two
// are inside, so that a bare clone has something to be right or wrong about: arith (internal/builtin) and qwen2-tiny (testdata).
package golden

import (
	"bufio"
	"bytes"
	"embed"
	"encoding/binary"
	"encoding/json"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/forward/kernel"
	"github.com/trainerrank/engine/forward/transformer"
	"github.com/trainerrank/engine/internal/builtin"
	"github.com/trainerrank/engine/loader"
)

// Case is a golden model under one of the spellings of its configuration.
type Case struct {
	Model  string
	Config string // "config.json", "config.v4.json"

	// Largest absolute errors allowed: those of "How to compare" in the README of the golden data.
	Logprob, Value float64
}

// Name is the model, with the configuration if it is not the usual one.
func (c Case) Name() string {
	if c.Config == "config.json" {
		return c.Model
	}
	return c.Model + "/" + strings.TrimSuffix(c.Config, ".json")
}

// Cases are the golden models that the engine runs.
var Cases = []Case{
	{"arith", "config.json", 5e-5, 3e-5},
	{"qwen2-tiny", "config.json", 2e-5, 3e-5},
	{"qwen3-tiny", "config.json", 2e-5, 3e-5},
	{"qwen3-sharded-bf16", "config.json", 2e-5, 3e-5},
	{"llama3-tiny", "config.json", 2e-5, 3e-5},
	{"llama3-tiny", "config.v4.json", 2e-5, 3e-5},
	{"mistral-tiny", "config.json", 2e-5, 3e-5},
	{"gemma3-tiny", "config.json", 2e-5, 3e-5},
}

// Refused are the golden models that the engine does not run yet, with a word that the refusal must name.
var Refused = map[string]string{"qwen3moe-tiny": "qwen3_moe", "qwen35-tiny": "qwen3_5", "qwen3next-tiny": "qwen3_next"}

//go:embed testdata
var embedded embed.FS

// shared is the folder of all golden models, found from this file, wherever the test runs.
func shared() string {
	_, file, _, _ := runtime.Caller(0)
	return filepath.Join(filepath.Dir(file), "../../../shared/golden/models")
}

// FS is the folder of a golden model. The test is skipped if there is none.
func FS(t testing.TB, model string) fs.FS {
	t.Helper()
	if model == "arith" {
		f, err := builtin.Open(model)
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	if f, err := fs.Sub(embedded, "testdata/"+model); err == nil {
		if _, err := fs.Stat(f, "config.json"); err == nil {
			return f
		}
	}
	dir := filepath.Join(shared(), model)
	if _, err := os.Stat(dir); err != nil {
		t.Skipf("SKIPPED: no golden model %s beside this checkout: %v", model, err)
	}
	return os.DirFS(dir)
}

// Request is a golden request.
type Request struct {
	ID    string
	Input forward.Input
}

// Requests are those of a model. One that asks for nothing scores every next token.
func Requests(t testing.TB, folder fs.FS) []Request {
	t.Helper()
	data, err := fs.ReadFile(folder, "requests.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	var list []Request
	for lines := bufio.NewScanner(bytes.NewReader(data)); lines.Scan(); {
		var r struct {
			ID     string          `json:"id"`
			Tokens []int32         `json:"input_tokens"`
			Labels json.RawMessage `json:"target_tokens"`
			TopK   int             `json:"top_k"`
			Logits bool            `json:"logits"`
			Hidden bool            `json:"hidden_states"`
		}
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			t.Fatalf("%s: %v", lines.Bytes(), err)
		}
		in := forward.Input{Tokens: r.Tokens, TopK: r.TopK, Logits: r.Logits, HiddenStates: r.Hidden}
		if r.Labels != nil && json.Unmarshal(r.Labels, &in.Targets) != nil {
			var wide [][]int32
			if err := json.Unmarshal(r.Labels, &wide); err != nil {
				t.Fatalf("%s: %v", lines.Bytes(), err)
			}
			in.Targets, in.TargetWidth = slices.Concat(wide...), len(wide[0])
		}
		if !in.Active() {
			in.Targets = append(slices.Clone(in.Tokens[1:]), forward.IgnoreLabel)
		}
		list = append(list, Request{r.ID, in})
	}
	return list
}

// Inputs are the inputs of requests.
func Inputs(requests []Request) []forward.Input {
	list := make([]forward.Input, len(requests))
	for i, r := range requests {
		list[i] = r.Input
	}
	return list
}

// Expected are the references of a model.
type Expected struct{ set *loader.Set }

// References opens the references of a golden model.
func References(t testing.TB, model string, folder fs.FS) *Expected {
	t.Helper()
	data, err := fs.ReadFile(folder, "expected.safetensors")
	if model == "arith" {
		_, file, _, _ := runtime.Caller(0)
		data, err = os.ReadFile(filepath.Join(filepath.Dir(file), "../builtin/testdata/arith.expected.safetensors"))
	}
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "expected.safetensors")
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	set, err := loader.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { set.Close() })
	return &Expected{set}
}

// Floats is a float64 tensor, row-major, or nil if there is none of that name.
func (e *Expected) Floats(t testing.TB, name string) []float64 {
	t.Helper()
	words := e.words(t, name, loader.F64)
	list := make([]float64, len(words))
	for i, w := range words {
		list[i] = math.Float64frombits(w)
	}
	return list
}

// Ints is an int64 tensor, row-major.
func (e *Expected) Ints(t testing.TB, name string) []int32 {
	t.Helper()
	words := e.words(t, name, loader.I64)
	list := make([]int32, len(words))
	for i, w := range words {
		list[i] = int32(w)
	}
	return list
}

func (e *Expected) words(t testing.TB, name string, d loader.DType) []uint64 {
	t.Helper()
	x, ok := e.set.Tensor(name)
	if !ok {
		t.Fatalf("the references hold no %s", name)
	}
	if x.DType != d {
		t.Fatalf("reference %s is stored as %v, not %v", name, x.DType, d)
	}
	data := make([]byte, x.Bytes)
	if err := e.set.ReadAt(x, data, 0); err != nil {
		t.Fatal(err)
	}
	words := make([]uint64, len(data)/8)
	for i := range words {
		words[i] = binary.LittleEndian.Uint64(data[8*i:])
	}
	return words
}

// Worst are the largest absolute errors of a model.
type Worst struct{ Logprob, Logits, Hidden float64 }

// Errors compares answers with references: it fails t where an answer is missing, surplus, or of another shape, and where tokens differ,
// and returns how far the values are off.
func (e *Expected) Errors(t testing.TB, requests []Request, answers []Answer) Worst {
	t.Helper()
	var w Worst
	if len(requests) != len(answers) {
		t.Fatalf("%d answers to %d requests", len(answers), len(requests))
	}
	for i, r := range requests {
		a, in := answers[i], r.Input
		check := func(worst *float64, what string, wanted bool, got []float32, n int) {
			if !wanted {
				if got != nil {
					t.Errorf("%s: %s without being asked", r.ID, what)
				}
				return
			}
			want := e.Floats(t, r.ID+"."+what)
			if len(got) != len(want) || len(got) != n {
				t.Errorf("%s: %d values of %s, want %d (the reference has %d)", r.ID, len(got), what, n, len(want))
				return
			}
			for j := range want {
				d := math.Abs(float64(got[j]) - want[j])
				if math.IsNaN(d) {
					d = math.Inf(1)
				}
				*worst = max(*worst, d)
			}
		}
		n := len(in.Tokens)
		check(&w.Logprob, "target_logprobs", in.Targets != nil, a.Targets, len(in.Targets))
		check(&w.Logprob, "topk_logprobs", in.TopK > 0, a.TopLogprobs, n*in.TopK)
		if in.TopK > 0 {
			if want := e.Ints(t, r.ID+".topk_tokens"); !slices.Equal(a.TopTokens, want) {
				t.Errorf("%s: top-k tokens\n got %v\nwant %v", r.ID, a.TopTokens, want)
			}
		}
		check(&w.Logits, "logits", in.Logits, a.Logits, len(a.Logits))
		check(&w.Hidden, "hidden_states", in.HiddenStates, a.Hidden, len(a.Hidden))
	}
	return w
}

// Kernels calls fn in a subtest for every kernel that the machine can run, with the environment such that [kernel.NewHost] takes it.
// A kernel that the machine has and that fails its self-test fails the test.
func Kernels(t *testing.T, fn func(t *testing.T, name string)) {
	t.Helper()
	for _, name := range []string{"generic", "avx2", "avx512"} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("TRAINERRANK_KERNEL", name)
			b, err := kernel.NewHost(1)
			if err != nil && (strings.Contains(err.Error(), "unknown kernel") || strings.Contains(err.Error(), "cannot run kernel")) {
				t.Skipf("SKIPPED: %v", err)
			}
			if err != nil {
				t.Fatal(err)
			}
			b.Close()
			if b.Name() != name {
				t.Fatalf("kernel %s runs where %s was asked for", b.Name(), name)
			}
			t.Logf("runs kernel %s", name)
			fn(t, name)
		})
	}
}

// Options say how a model is opened.
type Options struct {
	Config   string // file of the configuration; "": config.json
	Threads  int    // 0: 1
	Capacity int64  // of the device, in bytes; 0: 4 GiB
	Unloaded bool   // leave the model without a place
	Base     bool   // make the base model trainable
}

// Loaded is a model on a device of its own.
type Loaded struct {
	*transformer.Model
	Host    *device.Host
	Dirty   *device.Space // a device beside it whose memory is full of NaN, for passes: what one does not write it must not read
	Backend *kernel.Host
}

// dirt is memory of the Go heap that is all NaN.
type dirt struct{}

func (dirt) Map(n int64) (device.Mem, error) {
	b := bytes.Repeat([]byte{0xff}, int(n)+device.Align)
	skip := -uintptr(unsafe.Pointer(unsafe.SliceData(b))) & (device.Align - 1)
	return device.MemOf(b[skip:][:n]), nil
}

func (dirt) Populate(device.Mem) error { return nil }

func (dirt) Unmap(device.Mem) {}

// Load opens a folder and loads the model. When the test is over, everything is closed and the device must be empty.
func Load(t testing.TB, folder fs.FS, o Options) *Loaded {
	t.Helper()
	if o.Config == "" {
		o.Config = "config.json"
	}
	if o.Capacity == 0 {
		o.Capacity = 4 << 30
	}
	dev, err := device.NewHost(o.Capacity)
	if err != nil {
		t.Fatal(err)
	}
	device.CheckLeaks(t, dev)
	backend, err := kernel.NewHost(max(1, o.Threads))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(backend.Close)
	m, err := Open(folder, o.Config, backend)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	if o.Base {
		if err := m.TrainBase(); err != nil {
			t.Fatal(err)
		}
	}
	if !o.Unloaded {
		if err := m.Place(dev); err != nil {
			t.Fatal(err)
		}
		if err := m.Load(t.Context(), m.Staging(1<<30), nil); err != nil {
			t.Fatal(err)
		}
	}
	dirty, err := device.NewSpace("dirty", o.Capacity, dirt{})
	if err != nil {
		t.Fatal(err)
	}
	device.CheckLeaks(t, dirty)
	return &Loaded{m, dev, dirty, backend}
}

// Open opens a folder under one of its configurations.
func Open(folder fs.FS, config string, backend *kernel.Host) (*transformer.Model, error) {
	data, err := fs.ReadFile(folder, config)
	if err != nil {
		return nil, err
	}
	set, err := loader.OpenFS(folder, "golden")
	if err != nil {
		return nil, err
	}
	m, err := transformer.Open(set, data, "golden", backend)
	if err != nil {
		set.Close()
		return nil, err
	}
	return m, nil
}
