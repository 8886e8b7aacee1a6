package slots

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/loader"
)

// The files of a checkpoint. Those of PEFT have PEFT's names.
const (
	configName    = "adapter_config.json"
	weightsName   = "adapter_model.safetensors"
	ownedName     = "trainer_parameters.safetensors"
	optimizerName = "trainer_optimizer.safetensors"
	manifestName  = "checkpoint.json"
)

// fileNames are all that a save writes, and so all that one may replace.
var fileNames = []string{configName, weightsName, ownedName, optimizerName, manifestName}

// The moments of a tensor have its name and these, which are PyTorch's for them.
const (
	suffixMean = ".exp_avg"
	suffixSq   = ".exp_avg_sq"
)

// markKey is a key in the metadata of the weights file that says that the folder has a manifest, so that one that is lost is missed.
const markKey = "trainerrank"

// folder is a folder that holds an adapter, open and checked.
type folder struct {
	dir       string
	plan      *plan
	manifest  *manifest              // nil if it is not ours
	seen      map[string]fs.FileInfo // the files whose digests were compared
	weights   *loader.Set
	owned     *loader.Set // nil without parameters and buffers
	optimizer *loader.Set // nil without moments
}

// openFolder reads all but the tensors of a folder, and holds them against a model's modules. With whole it also computes the digests of our own.
func openFolder(dir string, modules []forward.Module, whole bool) (*folder, error) {
	f := &folder{dir: dir}
	if err := f.openAll(modules, whole); err != nil {
		f.close()
		return nil, err
	}
	return f, nil
}

func (f *folder) openAll(modules []forward.Module, whole bool) error {
	text, err := readSmall(filepath.Join(f.dir, manifestName))
	switch {
	case err == nil:
		if f.manifest, err = parseManifest(text); err != nil {
			return &AdapterError{Path: f.dir, Item: manifestName, Problem: "not as it was saved", Advice: damagedHint, Err: err}
		}
		if f.seen, err = f.manifest.checkFolder(f.dir, whole); err != nil {
			return err
		}
	case !errors.Is(err, fs.ErrNotExist):
		return err
	}
	if err := f.openConfig(modules); err != nil {
		return err
	}
	if f.weights, err = f.open(weightsName, f.plan.tensors); err != nil {
		return err
	}
	if f.manifest != nil {
		return f.openOurs()
	}
	if _, ours := f.weights.Files[0].Metadata[markKey]; ours {
		return &AdapterError{Path: f.dir, Item: manifestName, Problem: "the file is not there, though the weights were saved with it", Advice: damagedHint}
	}
	return nil
}

const damagedHint = "the folder was damaged or changed after it was saved; take another copy, or keep only the weights by loading and saving them with PEFT"

func (f *folder) openConfig(modules []forward.Module) error {
	path := filepath.Join(f.dir, configName)
	text, err := readSmall(path)
	if errors.Is(err, fs.ErrNotExist) {
		return &AdapterError{Path: f.dir, Item: configName, Problem: "the file is not there", Advice: "give the folder of a LoRA adapter, as PEFT's save_pretrained writes it", Err: err}
	}
	if err != nil {
		return err
	}
	c, err := parseConfig(text)
	if err == nil {
		f.plan, err = planOf("", modules, text, c)
	}
	if err != nil {
		return configError(path, err)
	}
	return nil
}

// openOurs opens what a folder of ours has beside PEFT's files.
func (f *folder) openOurs() error {
	var owned, moments []Tensor
	stepped := map[string]int64{"adapter": 0}
	for _, t := range f.plan.tensors {
		moments = append(moments, momentsOf(t)...)
	}
	for _, r := range f.manifest.Owned {
		f.plan.owned = append(f.plan.owned, r.plan())
		t := r.plan().tensor()
		owned = append(owned, t)
		if !r.Buffer {
			moments = append(moments, momentsOf(t)...)
			stepped[t.Name] = 0
		}
	}
	if f.manifest.has(ownedName) != (owned != nil) {
		return &AdapterError{Path: f.dir, Item: manifestName, Problem: "it has parameters and no file of them, or a file and no parameters"}
	}
	if !f.manifest.has(optimizerName) {
		clear(stepped)
	}
	if !maps.EqualFunc(stepped, f.manifest.Steps, func(int64, int64) bool { return true }) {
		return &AdapterError{Path: f.dir, Item: manifestName, Problem: "it does not count the steps of what has moments"}
	}
	var err error
	if owned != nil {
		if f.owned, err = f.open(ownedName, owned); err != nil {
			return err
		}
	}
	if f.manifest.has(optimizerName) {
		f.optimizer, err = f.open(optimizerName, moments)
	}
	return err
}

// momentsOf are the tensors of the optimizer for a tensor.
func momentsOf(t Tensor) []Tensor {
	m, v := t, t
	m.Name, v.Name = t.Name+suffixMean, t.Name+suffixSq
	return []Tensor{m, v}
}

// open opens a file of tensors, which must be exactly these.
func (f *folder) open(name string, want []Tensor) (*loader.Set, error) {
	path := filepath.Join(f.dir, name)
	set, err := openTensors(path)
	if err != nil {
		return nil, err
	}
	if err := checkNames(path, set, want); err != nil {
		set.Close()
		return nil, err
	}
	return set, nil
}

// openTensors opens a file of tensors.
func openTensors(path string) (*loader.Set, error) {
	set, err := loader.Open(path)
	if err != nil {
		e := &AdapterError{Path: path, Problem: "not a whole safetensors file", Advice: loader.Hint(err), Err: err}
		if errors.Is(err, fs.ErrNotExist) {
			e.Problem, e.Advice = "the file is not there", "an adapter in another form, adapter_model.bin for one, has to be saved anew with PEFT"
		}
		return nil, e
	}
	return set, nil
}

func (f *folder) close() {
	for _, set := range []*loader.Set{f.weights, f.owned, f.optimizer} {
		if set != nil {
			set.Close()
		}
	}
}

// readSmall reads a whole file that has no business being large.
func readSmall(path string) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Size() > maxConfig {
		return nil, &AdapterError{Path: path, Problem: fmt.Sprintf("not a file of at most %d bytes", maxConfig)}
	}
	return os.ReadFile(path)
}

// configError says of which file a fault is.
func configError(path string, err error) error {
	var f *fault
	if errors.As(err, &f) {
		return &AdapterError{Path: path, Item: f.key, Problem: f.problem, Advice: f.hint, Err: f.err}
	}
	return &AdapterError{Path: path, Problem: "not a configuration that is understood", Err: err}
}

// checkNames holds the tensors of a file against those that are wanted: not one may be missing or too many.
func checkNames(path string, set *loader.Set, want []Tensor) error {
	known := map[string]bool{}
	for i := range want {
		t := &want[i]
		x, ok := set.Tensor(t.Name)
		if !ok {
			return &AdapterError{Path: path, Item: t.Name, Problem: "the tensor is not there, though the configuration names it or its module"}
		}
		if !slices.Equal(x.Shape, t.Shape) {
			return &AdapterError{Path: path, Item: t.Name, Problem: fmt.Sprintf("its shape is %v, want %v by the configuration and the model", x.Shape, t.Shape),
				Advice: "the adapter may be of another model"}
		}
		if !slices.Contains([]loader.DType{loader.F32, loader.BF16, loader.F16}, x.DType) {
			return &AdapterError{Path: path, Item: t.Name, Problem: fmt.Sprintf("its type is %v, want F32, BF16 or F16", x.DType)}
		}
		known[t.Name] = true
	}
	for _, name := range set.Names() {
		if known[name] {
			continue
		}
		e := &AdapterError{Path: path, Item: name, Problem: "the tensor belongs to no module that the configuration names and the model has", Advice: "the adapter may be of another model"}
		if !strings.HasSuffix(name, suffixA) && !strings.HasSuffix(name, suffixB) {
			e.Problem, e.Advice = "the tensor is no matrix of a LoRA of a projection", plainHint
		}
		return e
	}
	return nil
}

// patience is how often a folder may be replaced while it is read.
const patience = 10

// fromFolder takes the memory of a slot and fills it from a folder. If somebody saves into the folder meanwhile it is read again: what is returned is one whole checkpoint.
func (s *Set) fromFolder(name, dir string, o LoadOptions) (*slot, error) {
	for try := 1; ; try++ {
		before, _ := os.ReadFile(filepath.Join(present(dir), manifestName))
		sl, err := s.fromFolderOnce(name, present(dir), o)
		if err == nil || try == patience {
			return sl, err
		}
		if after, _ := os.ReadFile(filepath.Join(present(dir), manifestName)); bytes.Equal(before, after) {
			return nil, err
		}
	}
}

func (s *Set) fromFolderOnce(name, dir string, o LoadOptions) (*slot, error) {
	f, err := openFolder(dir, s.modules, true)
	if err != nil {
		return nil, err
	}
	defer f.close()
	if c := f.plan.summary; c.Dropout > 0 && !o.Inference && !o.IgnoreDropout {
		return nil, &AdapterError{Path: filepath.Join(dir, configName), Item: "lora_dropout", Problem: fmt.Sprintf("it was trained with a dropout of %g, and the engine has none", c.Dropout),
			Advice: "load with IgnoreDropout, load for inference, or set it to 0"}
	}
	f.plan.name = name
	sl, err := s.build(f.plan, !o.Inference)
	if err != nil {
		return nil, err
	}
	if err := f.fill(sl); err != nil {
		sl.free()
		return nil, err
	}
	return sl, nil
}

// fill reads the tensors of a folder into a slot that is new.
func (f *folder) fill(sl *slot) error {
	for _, v := range sl.vectors() {
		set := f.owned
		if v == sl.main {
			set = f.weights
		}
		err := readInto(set, v, v.params, "")
		if err == nil && f.optimizer != nil && v.trained() {
			err = errors.Join(readInto(f.optimizer, v, v.mean, suffixMean), readInto(f.optimizer, v, v.sq, suffixSq))
			v.steps = f.manifest.Steps[v.name]
		}
		if err != nil {
			return err
		}
	}
	if m := f.manifest; m != nil {
		sl.revision = m.Revision
		if sl.trained {
			sl.adam = m.Adam
		}
	}
	return f.unchanged()
}

// unchanged says whether the files that were read are the ones that were digested: both must still be in the folder.
func (f *folder) unchanged() error {
	for _, set := range []*loader.Set{f.weights, f.owned, f.optimizer} {
		if set == nil {
			continue
		}
		if err := set.Verify(); err != nil {
			return err
		}
	}
	for name, was := range f.seen {
		path := filepath.Join(f.dir, name)
		if now, err := os.Stat(path); err != nil || !os.SameFile(was, now) || !now.ModTime().Equal(was.ModTime()) {
			return &AdapterError{Path: path, Problem: "the file changed while it was read", Err: err}
		}
	}
	return nil
}

// readInto reads a tensor of the file for every tensor of a vector, whose name it has with a suffix.
func readInto(set *loader.Set, v *vector, dst device.Mem, suffix string) error {
	for i := range v.tensors {
		t := &v.tensors[i]
		x, _ := set.Tensor(t.Name + suffix) // checkNames has seen it
		if err := readTensor(set, x, t, t.in(dst)); err != nil {
			return &AdapterError{Path: set.Files[0].Path, Item: x.Name, Problem: "cannot be read", Advice: loader.Hint(err), Err: err}
		}
	}
	return nil
}
