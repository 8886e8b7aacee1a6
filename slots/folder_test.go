package slots

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/internal/strictjson"
)

// twelve are the modules of the model in testdata/with_peft.py.
var twelve = decoder(12, 8, 8, 4, 12)

var fixtures = []string{"half", "layer", "layers", "linear-bf16", "patterns", "regex"}

func TestAdaptersOfPEFT(t *testing.T) {
	ctx := context.Background()
	for _, name := range fixtures {
		t.Run(name, func(t *testing.T) {
			s := newSet(t, twelve, 1<<24, Options{})
			must(t, s.Load(ctx, "x", "testdata/adapters/"+name, LoadOptions{IgnoreDropout: true}))
			var want map[string]struct {
				R     int
				Scale float64
				A, B  [2]float32
			}
			b, err := os.ReadFile("testdata/adapters/" + name + ".json")
			must(t, err)
			must(t, json.Unmarshal(b, &want))
			a, err := s.Adapter("x")
			must(t, err)
			if len(a.LoRA) != len(want) {
				t.Errorf("%d modules are adapted, want %d", len(a.LoRA), len(want))
			}
			got := state(t, s, "x")
			for _, l := range a.LoRA {
				m := twelve[l.Module]
				w, ok := want[m.Path]
				if !ok || l.Rank != w.R || l.Scale != float32(w.Scale) {
					t.Errorf("%s: rank %d, scale %g, want %+v (%t)", m.Path, l.Rank, l.Scale, w, ok)
					continue
				}
				av, bv := got[prefix+m.Path+suffixA], got[prefix+m.Path+suffixB]
				if av[0] != w.A[0] || av[(l.Rank-1)*m.In] != w.A[1] || bv[l.Rank-1] != w.B[0] || bv[(m.Out-1)*l.Rank] != w.B[1] {
					t.Errorf("%s: other values than in PEFT", m.Path)
				}
			}
		})
	}
}

// TestPEFTReadsWhatIsSaved needs an interpreter that has PEFT, in PEFT_PYTHON.
func TestPEFTReadsWhatIsSaved(t *testing.T) {
	python := os.Getenv("PEFT_PYTHON")
	if python == "" {
		t.Skip("SKIPPED: PEFT_PYTHON does not name a Python with PEFT")
	}
	ctx := context.Background()
	dir := t.TempDir()
	small, large := newSet(t, twelve, 1<<24, Options{}), newSet(t, tiny, 1<<26, Options{BaseModel: "base"})
	for _, name := range fixtures {
		must(t, small.Load(ctx, name, "testdata/adapters/"+name, LoadOptions{IgnoreDropout: true}))
		must(t, small.Save(ctx, name, filepath.Join(dir, name)))
		b, err := os.ReadFile("testdata/adapters/" + name + ".json")
		must(t, err)
		must(t, os.WriteFile(filepath.Join(dir, name+".json"), b, 0o600))
	}
	for name, c := range configs {
		must(t, large.Create(ctx, name, c))
		_, err := large.Parameter(ctx, name, "head", []int64{4}, nil)
		must(t, err)
		must(t, large.Accumulate(name, noise(t, large, name, 1)))
		_, err = large.Step(ctx, StepOptions{Params: Adam(0.01)})
		must(t, err)
		must(t, large.Save(ctx, name, filepath.Join(dir, "tiny-"+name)))
	}
	out, err := exec.Command(python, "-W", "ignore", "testdata/with_peft.py", "check", dir).CombinedOutput()
	if err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	if n := bytes.Count(out, []byte(" tensors\n")); n != len(fixtures)+len(configs) {
		t.Errorf("PEFT read %d of %d folders:\n%s", n, len(fixtures)+len(configs), out)
	}
}

// configs have every field once.
var configs = map[string]Config{
	"plain":   {BaseModel: "m", Rank: 4, Alpha: 8, Targets: []string{"q_proj", "down_proj"}},
	"rslora":  {Rank: 3, Alpha: 0.5, RSLoRA: true, Targets: everything, Layers: []int{0, 2}, LayersPattern: []string{"layers"}, Exclude: []string{"2.mlp.up_proj"}},
	"pattern": {Rank: 2, Alpha: 1, TargetPattern: `.*\.(q|up)_proj`, ExcludePattern: `.*\.1\..*`, RankPattern: []Override{{"q_proj", 5}, {`.*0\.mlp.*`, 1}}, AlphaPattern: []Override{{"up_proj", 2.5}}},
	"linear":  {Rank: 1, Alpha: 1, TargetPattern: "All-Linear", Exclude: []string{"lm_head"}},
}

func TestConfigurationThatIsWrittenIsReadBack(t *testing.T) {
	for name, c := range configs {
		got, err := parseConfig(c.text())
		must(t, err)
		if d := cmp.Diff(&c, got); d != "" {
			t.Errorf("%s (-written +read):\n%s", name, d)
		}
	}
}

func TestConfigurationThatIsNotPlainLoRAIsRefusedByName(t *testing.T) {
	const plain = `"peft_type": "LORA", "target_modules": ["q_proj"]`
	for _, c := range []struct{ text, key, problem string }{
		{plain, "", ""},
		{plain + `, "use_dora": false, "bias": "none", "modules_to_save": null, "loftq_config": {}, "runtime_config": {}, "whatever": null, "layers_pattern": ""`, "", ""},
		{plain + `, "init_lora_weights": "gaussian", "revision": "main", "task_type": "SEQ_CLS", "qalora_group_size": 32, "lora_alpha": 0.5`, "", ""},
		{plain + `, "use_dora": true`, "use_dora", "DoRA"},
		{plain + `, "bias": "lora_only"`, "bias", "biases"},
		{plain + `, "modules_to_save": ["score"]`, "modules_to_save", "in full"},
		{plain + `, "fan_in_fan_out": true`, "fan_in_fan_out", "transposed"},
		{plain + `, "lora_bias": true`, "lora_bias", "lora_B"},
		{plain + `, "init_lora_weights": "pissa_niter_4"`, "init_lora_weights", "base weights"},
		{plain + `, "init_lora_weights": "loftq"`, "init_lora_weights", "base weights"},
		{plain + `, "layer_replication": [[0, 4]]`, "layer_replication", "replicated"},
		{plain + `, "trainable_token_indices": {"embed_tokens": [1]}`, "trainable_token_indices", "tokens"},
		{plain + `, "target_parameters": ["experts.up"]`, "target_parameters", "bare"},
		{plain + `, "use_qalora": true`, "use_qalora", "QALoRA"},
		{plain + `, "kasa_config": {"a": 1}`, "kasa_config", "KaSA"},
		{plain + `, "of_the_future": 1`, "of_the_future", "not known"},
		{plain + `, "r": 0`, "r", "not understood"},
		{plain + `, "r": 4.5`, "r", "not understood"},
		{plain + `, "r": 4, "r": 8`, "", "duplicate key"},
		{plain + `, "lora_alpha": 1e40`, "lora_alpha", "no scale"},
		{plain + `, "lora_dropout": 1`, "lora_dropout", "no probability"},
		{plain + `, "rank_pattern": {"q_proj": 0}`, "rank_pattern", "not understood"},
		{plain + `, "rank_pattern": ["q_proj"]`, "rank_pattern", "not understood"},
		{plain + `, "rank_pattern": {"(?=q)": 2}`, "rank_pattern", "cannot be used"},
		{plain + `, "alpha_pattern": {"a{,3}": 2}`, "alpha_pattern", "cannot be used"},
		{plain + `, "layers_pattern": "h"`, "layers_pattern", "no layers_to_transform"},
		{`"peft_type": "IA3", "target_modules": ["q_proj"]`, "peft_type", `"IA3"`},
		{`"target_modules": ["q_proj"]`, "peft_type", `""`},
		{`"peft_type": "LORA"`, "target_modules", "no module is named"},
		{`"peft_type": "LORA", "target_modules": "[[:alpha:]_.0-9]*"`, "target_modules", "cannot be used"},
		{`"peft_type": "LORA", "target_modules": ".*q_proj", "layers_to_transform": 1`, "layers_to_transform", "pattern"},
		{`"peft_type": "LORA", "target_modules": ["c_attn"]`, "target_modules", "none of the model's 21 modules"},
	} {
		parsed, err := parseConfig([]byte("{" + c.text + "}"))
		if err == nil {
			_, err = parsed.additions(tiny)
		}
		var f *fault
		var syntax *strictjson.Error
		switch {
		case c.problem == "":
			if err != nil {
				t.Errorf("%s: %v", c.text, err)
			}
		case c.key == "":
			if !errors.As(err, &syntax) || !strings.Contains(err.Error(), c.problem) {
				t.Errorf("%s: got %v", c.text, err)
			}
		case !errors.As(err, &f) || f.key != c.key || !strings.Contains(f.problem, c.problem):
			t.Errorf("%s: got %v, want %q about %s", c.text, err, c.problem, c.key)
		}
	}
}

func FuzzConfigurationIsReadOrRefused(f *testing.F) {
	for _, c := range configs {
		f.Add(c.text())
	}
	for _, name := range fixtures {
		b, err := os.ReadFile("testdata/adapters/" + name + "/adapter_config.json")
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		c, err := parseConfig(text)
		if err != nil {
			return
		}
		lora, err := c.additions(twelve)
		if err != nil {
			return
		}
		again, err := parseConfig(c.text())
		if err != nil {
			t.Fatalf("what was read cannot be read again: %v\n%s", err, c.text())
		}
		same, err := again.additions(twelve)
		if err != nil || !slices.Equal(lora, same) {
			t.Fatalf("written and read again it adapts %v, %v, and not %v", same, err, lora)
		}
	})
}

func TestPatternsFollowTheRulesOfPEFT(t *testing.T) {
	paths := func(c Config) string {
		c.Rank = 1
		lora, err := c.additions(tiny)
		if err != nil {
			return err.Error()
		}
		var list []string
		for _, l := range lora {
			list = append(list, strings.TrimPrefix(tiny[l.Module].Path, "model.layers."))
		}
		return strings.Join(list, " ")
	}
	for _, c := range []struct {
		config Config
		want   string
	}{
		{Config{Targets: []string{"k_proj"}}, "0.self_attn.k_proj 1.self_attn.k_proj 2.self_attn.k_proj"},
		{Config{Targets: []string{"1.self_attn.k_proj"}}, "1.self_attn.k_proj"},
		{Config{Targets: []string{"model.layers.2.mlp.up_proj"}}, "2.mlp.up_proj"},
		{Config{Targets: []string{"k_proj", "proj"}, Layers: []int{2}}, "2.self_attn.k_proj"},
		{Config{Targets: []string{"k_proj", "model.layers.0.mlp.up_proj"}, Layers: []int{2}}, "0.mlp.up_proj 2.self_attn.k_proj"},
		{Config{Targets: []string{"k_proj"}, Layers: []int{1}, LayersPattern: []string{"h", "layers"}}, "1.self_attn.k_proj"},
		{Config{Targets: []string{"k_proj"}, Exclude: []string{"self_attn.k_proj"}}, "target_modules: none of the model's 21 modules is a target"},
		{Config{Targets: []string{"k_proj"}, ExcludePattern: `model\.layers\.[01]`}, "0.self_attn.k_proj 1.self_attn.k_proj 2.self_attn.k_proj"},
		{Config{Targets: []string{"k_proj"}, ExcludePattern: `model\.layers\.[01].*`}, "2.self_attn.k_proj"},
		{Config{TargetPattern: "k_proj"}, "target_modules: none of the model's 21 modules is a target"},
		{Config{TargetPattern: ".*k_proj|.*0.*v_proj"}, "0.self_attn.k_proj 0.self_attn.v_proj 1.self_attn.k_proj 2.self_attn.k_proj"},
	} {
		if got := paths(c.config); got != c.want {
			t.Errorf("%+v adapts %s, want %s", c.config, got, c.want)
		}
	}
}

func TestTensorsMustBeThoseOfTheConfiguration(t *testing.T) {
	ctx := context.Background()
	for _, c := range []struct {
		name    string
		modules []forward.Module
		edit    func(dir string)
		item    string
		problem string
	}{
		{"module too few", tiny[:7], nil, "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight", "no module"},
		{"module of another size", decoder(3, 32, 128, 64, 160), nil, "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", "[2 64], want [2 32]"},
		{"other rank", tiny, replace(configName, `"r": 2`, `"r": 3`), "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", "[2 64], want [3 64]"},
		{"target too many", tiny, replace(configName, `"q_proj",`, `"q_proj", "k_proj",`), "base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight", "not there"},
		{"target too few", tiny, replace(configName, `"q_proj",`, ``), "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", "no module"},
		{"dropout", tiny, replace(configName, `"lora_dropout": 0.0`, `"lora_dropout": 0.1`), "lora_dropout", "dropout of 0.1"},
		{"integers", tiny, replace(weightsName, `"F32"`, `"I32"`), "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", "I32"},
		{"cut", tiny, func(dir string) { must(t, os.Truncate(filepath.Join(dir, weightsName), 4000)) }, "", "not a whole"},
		{"no weights", tiny, func(dir string) { must(t, os.Remove(filepath.Join(dir, weightsName))) }, "", "not there"},
		{"no configuration", tiny, func(dir string) { must(t, os.Remove(filepath.Join(dir, configName))) }, configName, "not there"},
		{"other method", tiny, replace(weightsName, "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitud"), "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", "not there"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			must(t, os.CopyFS(dir, os.DirFS("testdata/golden/adapter")))
			if c.edit != nil {
				c.edit(dir)
			}
			s := newSet(t, c.modules, 1<<24, Options{})
			err := s.Load(ctx, "x", dir, LoadOptions{})
			var e *AdapterError
			if !errors.As(err, &e) || e.Item != c.item || !strings.Contains(e.Problem, c.problem) {
				t.Errorf("got %v, want %q about %q", err, c.problem, c.item)
			}
			if c.name == "dropout" {
				must(t, s.Load(ctx, "x", dir, LoadOptions{IgnoreDropout: true}))
				must(t, s.Load(ctx, "x", dir, LoadOptions{Inference: true}))
				refused(t, s.Accumulate("x", noise(t, s, "x", 1)), "x", "inference")
			}
		})
	}
}

// replace edits a file.
func replace(file, old, new string) func(dir string) {
	return func(dir string) {
		path := filepath.Join(dir, file)
		b, err := os.ReadFile(path)
		if err != nil || !bytes.Contains(b, []byte(old)) {
			panic(fmt.Sprintf("%s has no %s: %v", path, old, err))
		}
		if err := os.WriteFile(path, bytes.Replace(b, []byte(old), []byte(new), 1), 0o600); err != nil {
			panic(err)
		}
	}
}

func TestHalvesAreWidenedExactly(t *testing.T) {
	for h := range 1 << 16 {
		exp, frac := h>>10&31, float64(h&1023)
		want := math.Ldexp(1+frac/1024, exp-15)
		switch {
		case exp == 31 && frac != 0:
			want = math.NaN()
		case exp == 31:
			want = math.Inf(1)
		case exp == 0:
			want = math.Ldexp(frac, -24)
		}
		if h>>15 == 1 {
			want = -want
		}
		got := float64(half(uint16(h)))
		if got != want && !(math.IsNaN(got) && math.IsNaN(want)) || math.Signbit(got) != (h>>15 == 1) {
			t.Fatalf("%#04x is %g, want %g", h, got, want)
		}
	}
}

// trained is a set with a slot "x" that has everything a slot can have.
func trained(t testing.TB, o Options) *Set {
	ctx := context.Background()
	s := newSet(t, tiny, 1<<26, o)
	must(t, s.Create(ctx, "x", Config{BaseModel: "base", Rank: 2, Alpha: 2, Targets: []string{"q_proj", "down_proj"}, Seed: 3}))
	_, err := s.Parameter(ctx, "x", "head", []int64{2, 5}, func(v []float32) { v[3] = 1 })
	must(t, err)
	b, err := s.Buffer(ctx, "x", "mean return", nil, nil)
	must(t, err)
	v, err := b.Value()
	must(t, err)
	v[0] = 0.25
	for i := range 3 {
		train(t, s, uint64(i))
	}
	return s
}

// train is one step of the slot "x" of trained.
func train(t testing.TB, s *Set, seed uint64) {
	ctx := context.Background()
	must(t, s.Accumulate("x", noise(t, s, "x", seed)))
	p, err := s.Parameter(ctx, "x", "head", []int64{2, 5}, nil)
	must(t, err)
	g := make([]float32, 10)
	for i := range g {
		g[i] = float32(rand.New(rand.NewPCG(seed, 9)).NormFloat64())
	}
	must(t, p.Accumulate(g))
	_, err = s.Step(ctx, StepOptions{Params: Adam(0.01)})
	must(t, err)
}

func TestTrainingGoesOnFromACheckpointAsIfItHadNeverStopped(t *testing.T) {
	ctx := context.Background()
	dir := filepath.Join(t.TempDir(), "a", "b", "checkpoint")
	s := trained(t, Options{})
	must(t, s.Save(ctx, "x", dir))
	saved := state(t, s, "x")
	info, err := s.Info("x")
	must(t, err)

	again := newSet(t, tiny, 1<<26, Options{})
	price, err := again.PriceOf(dir, LoadOptions{})
	must(t, err)
	must(t, again.Load(ctx, "x", dir, LoadOptions{}))
	same(t, "what was loaded", state(t, again, "x"), saved)
	got, err := again.Info("x")
	must(t, err)
	got.Config.Seed = info.Config.Seed
	if d := cmp.Diff(info, got); d != "" || got.Revision != 3 || got.Steps != 3 || *got.Adam != Adam(0.01) || len(got.Owned) != 2 {
		t.Errorf("info (-saved +loaded):\n%s", d)
	}
	if used := again.dev.Stats().InUse; used != price {
		t.Errorf("it takes %v, priced at %v", used, price)
	}
	for i := range 2 {
		train(t, s, uint64(10+i))
		train(t, again, uint64(10+i))
	}
	same(t, "two steps later", state(t, again, "x"), state(t, s, "x"))
	b, err := again.Buffer(ctx, "x", "mean return", nil, func([]float32) { t.Error("a buffer that was loaded is filled anew") })
	must(t, err)
	if v, err := b.Value(); err != nil || v[0] != 0.25 {
		t.Errorf("the buffer is %v, %v", v, err)
	}

	// For inference the parameters alone come.
	must(t, again.Load(ctx, "frozen", dir, LoadOptions{Inference: true}))
	for name, v := range state(t, again, "frozen") {
		if !cmp.Equal(v, saved[name]) {
			t.Errorf("%s differs for inference", name)
		}
	}
	// Without a step there are no moments to save.
	must(t, again.Load(ctx, "peft", "testdata/golden/adapter", LoadOptions{}))
	must(t, again.Save(ctx, "peft", dir))
	if _, err := os.Stat(filepath.Join(dir, optimizerName)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("there is a file of moments that are zero, or of the checkpoint before: %v", err)
	}
	must(t, again.Load(ctx, "back", dir, LoadOptions{}))
	same(t, "an adapter of PEFT", state(t, again, "back"), state(t, again, "peft"))
	config, err := os.ReadFile(filepath.Join(dir, configName))
	must(t, err)
	original, err := os.ReadFile("testdata/golden/adapter/" + configName)
	must(t, err)
	if !bytes.Equal(config, original) {
		t.Error("the configuration is not saved as it was read")
	}
}

func TestDamagedCheckpointIsRefusedByName(t *testing.T) {
	ctx := context.Background()
	dir := filepath.Join(t.TempDir(), "checkpoint")
	s := trained(t, Options{})
	must(t, s.Save(ctx, "x", dir))
	before := s.dev.Stats().InUse
	broken := func(file, what string) {
		t.Helper()
		err := s.Load(ctx, "y", dir, LoadOptions{})
		var e *AdapterError
		if !errors.As(err, &e) || e.Item != file && filepath.Base(e.Path) != file || e.Hint() == "" {
			t.Errorf("%s of %s: got %v, hint %q", what, file, err, e.Hint())
		}
		if after := s.dev.Stats().InUse; after != before {
			t.Errorf("%s of %s: %v are left, before %v", what, file, after, before)
		}
	}
	rng := rand.New(rand.NewPCG(1, 2))
	for _, file := range fileNames {
		path := filepath.Join(dir, file)
		whole, err := os.ReadFile(path)
		must(t, err)
		flips := rng.Perm(len(whole))
		if file != manifestName {
			flips = flips[:min(len(flips), 60)]
		}
		for _, at := range flips {
			bad := bytes.Clone(whole)
			bad[at] ^= 1 << rng.IntN(8)
			must(t, os.WriteFile(path, bad, 0o600))
			broken(file, fmt.Sprintf("byte %d", at))
		}
		for _, n := range []int{0, 1, len(whole) / 2, len(whole) - 1} {
			must(t, os.WriteFile(path, whole[:n], 0o600))
			broken(file, fmt.Sprintf("the first %d bytes", n))
		}
		must(t, os.WriteFile(path, append(bytes.Clone(whole), '\n'), 0o600))
		broken(file, "one byte too many")
		must(t, os.Remove(path))
		broken(file, "the absence")
		must(t, os.WriteFile(path, whole, 0o600))
	}
	extra := filepath.Join(dir, "extra")
	must(t, os.WriteFile(extra, nil, 0o600))
	broken("extra", "the presence")
	must(t, os.Remove(extra))
	must(t, s.Load(ctx, "y", dir, LoadOptions{}))
}

func TestManifestOfAnotherFormatOrWithOddContentIsRefused(t *testing.T) {
	ctx := context.Background()
	s := trained(t, Options{})
	for _, c := range []struct {
		edit    func(*manifest)
		problem string
	}{
		{func(m *manifest) { m.Format = 2 }, "only 1 is read"},
		{func(m *manifest) { m.Revision = -1 }, "revision of -1"},
		{func(m *manifest) { m.Steps["adapter"] = -1 }, "-1 steps"},
		{func(m *manifest) { delete(m.Steps, "parameter.head") }, "does not count the steps"},
		{func(m *manifest) { m.Steps["other"] = 1 }, "does not count the steps"},
		{func(m *manifest) { m.Adam.Beta1 = 2 }, "beta1 of 2"},
		{func(m *manifest) { m.Owned[0].Name = "../head" }, "has a '.' or a '/'"},
		{func(m *manifest) { m.Owned[1].Name = m.Owned[0].Name }, "listed twice"},
		{func(m *manifest) { m.Owned[0].Shape = []int64{1 << 40, 1 << 40} }, "product"},
		{func(m *manifest) { m.Owned[0].Shape = []int64{5, 2} }, "its shape is [2 5]"},
		{func(m *manifest) { m.Owned = nil }, "parameters and no file of them, or a file"},
		{func(m *manifest) { m.Files["../x"] = fileRecord{} }, "no file of a checkpoint"},
		{func(m *manifest) { delete(m.Files, weightsName) }, "none of the checkpoint's"},
	} {
		dir := filepath.Join(t.TempDir(), "checkpoint")
		must(t, s.Save(ctx, "x", dir))
		path := filepath.Join(dir, manifestName)
		b, err := os.ReadFile(path)
		must(t, err)
		m, err := parseManifest(b)
		must(t, err)
		c.edit(m)
		must(t, os.WriteFile(path, m.text(), 0o600))
		var e *AdapterError
		if err := s.Load(ctx, "y", dir, LoadOptions{}); !errors.As(err, &e) || !strings.Contains(err.Error(), c.problem) {
			t.Errorf("got %v, want %q", err, c.problem)
		}
	}
}
