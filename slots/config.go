package slots

import (
	"encoding/json"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/internal/strictjson"
)

// AllLinear as a [Config]'s TargetPattern means every module of the model, in any case of letters.
const AllLinear = "all-linear"

const (
	maxRank   = 1 << 16 // no rank is near it; with it, sizes in bytes fit an int64
	maxConfig = 4 << 20 // bytes of a JSON file
	maxDepth  = 16      // of the nesting of adapter_config.json, which is 2
)

// Config is what an adapter adds, and to which modules: what PEFT's adapter_config.json says. Patterns are regular expressions.
//
// A name in Targets or Exclude is a module's path, or what follows a dot in it up to its end. Of RankPattern and AlphaPattern the first counts that
// matches the path, or what follows a dot in it up to its end; without one, Rank and Alpha do.
type Config struct {
	BaseModel string // the model's name or path, for whoever reads the files

	Rank   int
	Alpha  float64
	RSLoRA bool // what is added is scaled by alpha / sqrt(rank) instead of alpha / rank

	Targets        []string // the modules; or
	TargetPattern  string   // what must match the whole path, or [AllLinear]
	Exclude        []string // modules that are not adapted though they are targets; or
	ExcludePattern string   // what must match the whole path
	Layers         []int    // if not empty, Targets are only those of these layers, but for a target that is a whole path
	LayersPattern  []string // what precedes the layer's number in the path; without one, any word

	RankPattern  []Override
	AlphaPattern []Override

	Dropout float64 // of the training that it comes from. The engine has none

	Seed uint64 // of the fresh A matrices, in [Set.Create]; in no file
}

// Override is a rank or an alpha of the modules that a pattern matches.
type Override struct {
	Pattern string
	Value   float64
}

// fault is what is wrong with a key of a configuration.
type fault struct {
	key, problem, hint string
	err                error
}

func (f *fault) Error() string {
	s := f.key + ": " + f.problem
	if f.err != nil {
		s += ": " + f.err.Error()
	}
	return s
}

func (f *fault) Unwrap() error { return f.err }
func (f *fault) Hint() string  { return f.hint }

// ignored are the keys of PEFT that say nothing about what a loaded adapter computes: who wrote it, for what, how it began.
var ignored = []string{
	"auto_mapping", "eva_config", "inference_mode", "loftq_config", "megatron_core", "peft_version", "qalora_group_size", "revision", "task_type",
}

// unsupported are the keys of PEFT that must be as if they were not there, each with what is said of it.
var unsupported = map[string]string{
	"alora_invocation_tokens": "activated LoRA is not supported",
	"arrow_config":            "Arrow routing is not supported",
	"bias":                    "trained biases are not supported",
	"corda_config":            "CorDA changes the base weights",
	"ensure_weight_tying":     "adapters of tied modules are not supported",
	"fan_in_fan_out":          "transposed base weights are not supported",
	"kasa_config":             "KaSA is not supported",
	"layer_replication":       "replicated layers are not supported",
	"lora_bias":               "biases of lora_B are not supported",
	"lora_ga_config":          "LoRA-GA changes the base weights",
	"megatron_config":         "Megatron modules are not supported",
	"modules_to_save":         "modules that are trained in full are not supported",
	"monteclora_config":       "MonteCLoRA is not supported",
	"target_parameters":       "adapters of bare parameters are not supported",
	"trainable_token_indices": "trained tokens are not supported",
	"use_bdlora":              "block-diagonal LoRA is not supported",
	"use_dora":                "DoRA is not supported",
	"use_qalora":              "QALoRA is not supported",
	"velora_config":           "VeLoRA is not supported",
}

const plainHint = "only plain LoRA is read; export the adapter as one, or merge it into the model"

// parseConfig reads adapter_config.json. The error is a [*strictjson.Error] or a [*fault].
func parseConfig(text []byte) (*Config, error) {
	root, err := strictjson.Parse(text, maxDepth)
	if err != nil {
		return nil, err
	}
	if root.Kind() != strictjson.Object {
		return nil, root.Errorf("found %s, want an object", root.Kind())
	}
	c := &Config{Rank: 8, Alpha: 8} // PEFT's defaults
	kind := ""
	for _, m := range root.Members() {
		v := m.Value
		null := v.Kind() == strictjson.Null
		var err error
		switch m.Key {
		case "peft_type":
			kind, err = v.Text()
		case "base_model_name_or_path":
			if !null {
				c.BaseModel, err = v.Text()
			}
		case "r":
			c.Rank, err = rankOf(v)
		case "lora_alpha":
			c.Alpha, err = v.Float()
		case "lora_dropout":
			c.Dropout, err = v.Float()
		case "use_rslora":
			c.RSLoRA, err = v.Bool()
		case "target_modules":
			c.TargetPattern, c.Targets, err = textOrList(v)
		case "exclude_modules":
			c.ExcludePattern, c.Exclude, err = textOrList(v)
		case "layers_to_transform":
			c.Layers, err = numbers(v)
		case "layers_pattern":
			var one string
			if one, c.LayersPattern, err = textOrList(v); one != "" {
				c.LayersPattern = []string{one}
			}
		case "rank_pattern":
			c.RankPattern, err = overrides(v, func(v strictjson.Value) (float64, error) { r, err := rankOf(v); return float64(r), err })
		case "alpha_pattern":
			c.AlphaPattern, err = overrides(v, strictjson.Value.Float)
		case "init_lora_weights":
			err = checkInit(v)
		default:
			if what, known := unsupported[m.Key]; !slices.Contains(ignored, m.Key) && !unset(m.Key, v) {
				if !known {
					what = "this key is not known, and it is set"
				}
				err = &fault{key: m.Key, problem: what, hint: plainHint}
			}
		}
		if err != nil {
			if f, ok := err.(*fault); ok {
				f.key = m.Key
				return nil, f
			}
			return nil, &fault{key: m.Key, problem: "not understood", err: err}
		}
	}
	if kind != "LORA" {
		return nil, &fault{key: "peft_type", problem: fmt.Sprintf("found %s, want \"LORA\"", quote(kind)), hint: plainHint}
	}
	return c, c.check()
}

// unset says whether a key has a value that asks for nothing.
func unset(key string, v strictjson.Value) bool {
	switch v.Kind() {
	case strictjson.Null:
		return true
	case strictjson.Bool:
		on, _ := v.Bool()
		return !on
	case strictjson.Array:
		return len(v.Items()) == 0
	case strictjson.Object:
		return len(v.Members()) == 0
	case strictjson.String:
		s, _ := v.Text()
		return s == "" || key == "bias" && s == "none"
	}
	return false
}

func rankOf(v strictjson.Value) (int, error) {
	n, err := v.Int64()
	if err == nil && (n < 1 || n > maxRank) {
		err = v.Errorf("a rank of %d is not between 1 and %d", n, maxRank)
	}
	return int(n), err
}

func textOrList(v strictjson.Value) (text string, list []string, err error) {
	switch v.Kind() {
	case strictjson.Null:
		return "", nil, nil
	case strictjson.String:
		text, err = v.Text()
		return text, nil, err
	case strictjson.Array:
		for _, item := range v.Items() {
			s, err := item.Text()
			if err != nil {
				return "", nil, err
			}
			list = append(list, s)
		}
		return "", list, nil
	}
	return "", nil, v.Errorf("found %s, want a string or a list of strings", v.Kind())
}

func numbers(v strictjson.Value) ([]int, error) {
	items := []strictjson.Value{v}
	switch v.Kind() {
	case strictjson.Null:
		return nil, nil
	case strictjson.Array:
		items = v.Items()
	}
	var list []int
	for _, item := range items {
		n, err := item.Int64()
		if err != nil {
			return nil, err
		}
		list = append(list, int(n))
	}
	return list, nil
}

func overrides(v strictjson.Value, value func(strictjson.Value) (float64, error)) ([]Override, error) {
	if k := v.Kind(); k != strictjson.Object && k != strictjson.Null {
		return nil, v.Errorf("found %s, want an object", k)
	}
	var list []Override
	for _, m := range v.Members() {
		x, err := value(m.Value)
		if err != nil {
			return nil, err
		}
		list = append(list, Override{m.Key, x})
	}
	return list, nil
}

// checkInit refuses the initialisations that change the base weights: the adapter alone is then only half of the difference.
func checkInit(v strictjson.Value) error {
	switch v.Kind() {
	case strictjson.Null, strictjson.Bool:
		return nil
	}
	how, err := v.Text()
	if err != nil {
		return err
	}
	if slices.Contains([]string{"gaussian", "eva", "orthogonal"}, strings.ToLower(how)) {
		return nil
	}
	return &fault{
		problem: fmt.Sprintf("the initialisation %s may have changed the base weights, which the adapter then needs", quote(how)),
		hint:    "save it with PEFT's path_initial_model_for_weight_conversion, which makes a plain LoRA of it",
	}
}

// check says what is wrong with a configuration, whoever made it.
func (c *Config) check() error {
	real := func(x float64) bool { return !math.IsNaN(x) && !math.IsInf(x, 0) && math.Abs(x) < 1e30 }
	switch {
	case c.Rank < 1 || c.Rank > maxRank:
		return &fault{key: "r", problem: fmt.Sprintf("a rank of %d is not between 1 and %d", c.Rank, maxRank)}
	case !real(c.Alpha):
		return &fault{key: "lora_alpha", problem: fmt.Sprintf("%g is no scale", c.Alpha)}
	case !(c.Dropout >= 0 && c.Dropout < 1):
		return &fault{key: "lora_dropout", problem: fmt.Sprintf("%g is no probability below 1", c.Dropout)}
	case c.TargetPattern == "" && len(c.Targets) == 0:
		return &fault{key: "target_modules", problem: "no module is named", hint: "name them: PEFT's defaults for a family of models are not known here"}
	case c.TargetPattern != "" && len(c.Targets) > 0:
		return &fault{key: "target_modules", problem: "both names and a pattern are given"}
	case c.TargetPattern != "" && (len(c.Layers) > 0 || len(c.LayersPattern) > 0):
		return &fault{key: "layers_to_transform", problem: "layers cannot be chosen if target_modules is a pattern"}
	case len(c.LayersPattern) > 0 && len(c.Layers) == 0:
		return &fault{key: "layers_pattern", problem: "there is no layers_to_transform beside it"}
	}
	for _, o := range c.RankPattern {
		if r := int(o.Value); float64(r) != o.Value || r < 1 || r > maxRank {
			return &fault{key: "rank_pattern", problem: fmt.Sprintf("a rank of %g is not between 1 and %d", o.Value, maxRank)}
		}
	}
	for _, o := range c.AlphaPattern {
		if !real(o.Value) {
			return &fault{key: "alpha_pattern", problem: fmt.Sprintf("%g is no scale", o.Value)}
		}
	}
	return nil
}

// additions gives the additions of the configuration to the modules of a model, in their order, not laid out yet.
func (c *Config) additions(modules []forward.Module) ([]forward.LoRA, error) {
	m, err := c.matcher()
	if err != nil {
		return nil, err
	}
	var list []forward.LoRA
	for i, mod := range modules {
		if !m.targets(mod.Path) {
			continue
		}
		r, alpha := int(first(m.ranks, mod.Path, float64(c.Rank))), first(m.alphas, mod.Path, c.Alpha)
		scale := alpha / float64(r)
		if c.RSLoRA {
			scale = alpha / math.Sqrt(float64(r))
		}
		list = append(list, forward.LoRA{Module: i, Rank: r, Scale: float32(scale)})
	}
	if list == nil {
		e := &fault{key: "target_modules", problem: fmt.Sprintf("none of the model's %d modules is a target", len(modules))}
		if len(modules) > 0 {
			e.hint = fmt.Sprintf("its modules are named like %s", modules[0].Path)
		}
		return nil, e
	}
	return list, nil
}

// matcher is a configuration with its patterns compiled.
type matcher struct {
	*Config
	all             bool
	target, exclude *regexp.Regexp
	layers          []*regexp.Regexp
	ranks, alphas   []override
}

type override struct {
	pattern *regexp.Regexp
	value   float64
}

func (c *Config) matcher() (*matcher, error) {
	m := &matcher{Config: c, all: strings.EqualFold(c.TargetPattern, AllLinear)}
	var failed error
	compile := func(key, before, pattern, after string) *regexp.Regexp {
		re, err := compile(before, pattern, after)
		if err != nil && failed == nil {
			failed = &fault{key: key, problem: fmt.Sprintf("the pattern %s cannot be used", quote(pattern)), err: err,
				hint: "only what Go's and Python's regular expressions have in common is understood; name the modules instead"}
		}
		return re
	}
	if c.TargetPattern != "" && !m.all {
		m.target = compile("target_modules", "", c.TargetPattern, `\z`)
	}
	if c.ExcludePattern != "" {
		m.exclude = compile("exclude_modules", "", c.ExcludePattern, `\z`)
	}
	for _, p := range c.LayersPattern {
		m.layers = append(m.layers, compile("layers_pattern", `(?:^|.*?\.)`, p, `\.(?P<idx>\d+)\.`))
	}
	if len(c.LayersPattern) == 0 {
		m.layers = append(m.layers, compile("layers_pattern", `.*?\.`, `[^.]*`, `\.(?P<idx>\d+)\.`))
	}
	for _, o := range c.RankPattern {
		m.ranks = append(m.ranks, override{compile("rank_pattern", `(.*\.)?(`, o.Pattern, `)$`), o.Value})
	}
	for _, o := range c.AlphaPattern {
		m.alphas = append(m.alphas, override{compile("alpha_pattern", `(.*\.)?(`, o.Pattern, `)$`), o.Value})
	}
	return m, failed
}

// compile is a pattern of Python that must match from the start.
func compile(before, pattern, after string) (*regexp.Regexp, error) {
	// What both languages take, but not for the same.
	for _, odd := range []string{"[[:", "{,"} {
		if strings.Contains(pattern, odd) {
			return nil, fmt.Errorf("%q does not mean the same in Python", odd)
		}
	}
	return regexp.Compile(`\A(?:` + before + pattern + after + `)`)
}

// targets says whether a module is adapted, by the rules of PEFT 0.21's check_target_module_exists.
func (m *matcher) targets(path string) bool {
	switch {
	case m.exclude != nil && m.exclude.MatchString(path), named(m.Exclude, path):
		return false
	case m.all:
		return true
	case m.target != nil:
		return m.target.MatchString(path)
	case slices.Contains(m.Targets, path):
		return true
	case !named(m.Targets, path):
		return false
	case len(m.Layers) == 0:
		return true
	}
	for _, re := range m.layers {
		if found := re.FindStringSubmatch(path); found != nil {
			n, err := strconv.Atoi(found[re.SubexpIndex("idx")])
			return err == nil && slices.Contains(m.Layers, n)
		}
	}
	return false
}

func named(names []string, path string) bool {
	return slices.ContainsFunc(names, func(name string) bool { return name == path || strings.HasSuffix(path, "."+name) })
}

func first(list []override, path string, otherwise float64) float64 {
	for _, o := range list {
		if o.pattern.MatchString(path) {
			return o.value
		}
	}
	return otherwise
}

// text is the configuration as adapter_config.json. parseConfig gives it back, but for the seed.
func (c *Config) text() []byte {
	b := []byte("{\n")
	put := func(key string, v any) {
		x, err := json.Marshal(v)
		if err != nil {
			panic(fmt.Sprintf("slots: %s: %v", key, err)) // check has seen to it
		}
		b = fmt.Appendf(b, "  %q: %s,\n", key, x)
	}
	either := func(text string, list []string) any {
		switch {
		case text != "":
			return text
		case len(list) > 0:
			return list
		}
		return nil
	}
	pattern := func(key string, list []Override) {
		b = fmt.Appendf(b, "  %q: {", key)
		for i, o := range list {
			k, _ := json.Marshal(o.Pattern)
			v, _ := json.Marshal(o.Value)
			b = fmt.Appendf(b, "%s%s: %s", map[bool]string{true: ", "}[i > 0], k, v)
		}
		b = append(b, "},\n"...)
	}
	pattern("alpha_pattern", c.AlphaPattern)
	put("base_model_name_or_path", c.BaseModel)
	put("bias", "none")
	put("exclude_modules", either(c.ExcludePattern, c.Exclude))
	put("fan_in_fan_out", false)
	put("inference_mode", true)
	put("init_lora_weights", true)
	put("layers_pattern", either("", c.LayersPattern))
	var layers any
	if len(c.Layers) > 0 {
		layers = c.Layers
	}
	put("layers_to_transform", layers)
	put("lora_alpha", c.Alpha)
	put("lora_bias", false)
	put("lora_dropout", c.Dropout)
	put("modules_to_save", nil)
	put("peft_type", "LORA")
	put("r", c.Rank)
	pattern("rank_pattern", c.RankPattern)
	put("target_modules", either(c.TargetPattern, c.Targets))
	put("task_type", "CAUSAL_LM")
	put("use_dora", false)
	put("use_rslora", c.RSLoRA)
	return append(b[:len(b)-2], "\n}\n"...)
}
