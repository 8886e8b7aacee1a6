package transformer

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/forward/kernel"
	"github.com/trainerrank/engine/internal/failpoint"
	"github.com/trainerrank/engine/loader"
)

// Model is a decoder over a model folder. It can be rehearsed as soon as it is opened, when no payload byte has been
// read yet; it can run once it is loaded.
type Model struct {
	spec    *Spec
	name    string
	set     *loader.Set
	backend *kernel.Host
	params  []placed       // in execution order
	spare   *loader.Tensor // a head beside the embedding of a tied model: it must be equal
	bytes   int64          // of the slab that holds them
	notes   []string

	dev    device.Device
	block  *device.Block // the slab; nil until it is allocated
	loaded bool          // all of it is read

	weights
	modules []forward.Module
	trained []int64 // where each parameter begins in the vector of gradients of the base model, in bytes
	vector  int64   // the size of that
	base    bool    // the base model is trained
}

// weights are the parameters of a decoder, or their gradients.
type weights struct {
	embed, head kernel.Weight
	finalNorm   device.Mem
	layers      []layerWeights
}

// placed is a parameter, where it is in the folder, and where it goes: a matrix into *weight, packed; a vector into *vector, as float32.
type placed struct {
	Param
	tensor *loader.Tensor
	dtype  kernel.DType // in the files; that of *weight is the same, unless the base model is trained
	weight *kernel.Weight
	vector *device.Mem
	offset int64 // in the slab
	bytes  int64
}

// layerWeights are the parameters of a layer. A norm or a bias that the layer does not have is empty.
type layerWeights struct {
	q, k, v, o, gate, up, down                                 kernel.Weight
	attnNorm, qNorm, kNorm, attnPostNorm, mlpNorm, mlpPostNorm device.Mem
	qBias, kBias, vBias, oBias, gateBias, upBias, downBias     device.Mem
}

// maxConfig bounds config.json, in bytes: it is read whole.
const maxConfig = 1 << 20

// OpenFolder opens a Hugging Face model folder: config.json, and safetensors files with or without an index. See [Open].
func OpenFolder(dir string, backend *kernel.Host) (*Model, error) {
	// A stat first: opening a pipe would wait for whoever writes to it.
	path := filepath.Join(dir, "config.json")
	fi, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("open model: %w", err)
	}
	return open(path, fi, func() ([]byte, error) { return os.ReadFile(path) }, func() (*loader.Set, error) { return loader.Open(dir) }, dir, backend)
}

// OpenFS opens the model folder that is the root of fsys. name stands for it in messages.
func OpenFS(fsys fs.FS, name string, backend *kernel.Host) (*Model, error) {
	fi, err := fs.Stat(fsys, "config.json")
	if err != nil {
		return nil, fmt.Errorf("open model: %w", err)
	}
	return open(name+"/config.json", fi, func() ([]byte, error) { return fs.ReadFile(fsys, "config.json") },
		func() (*loader.Set, error) { return loader.OpenFS(fsys, name) }, name, backend)
}

func open(path string, fi fs.FileInfo, read func() ([]byte, error), files func() (*loader.Set, error), name string, backend *kernel.Host) (*Model, error) {
	switch {
	case !fi.Mode().IsRegular():
		return nil, fmt.Errorf("open model: %s is not a regular file", path)
	case fi.Size() > maxConfig:
		return nil, fmt.Errorf("open model: %s has %d bytes, more than a configuration takes", path, fi.Size())
	}
	config, err := read()
	if err != nil {
		return nil, fmt.Errorf("open model: %w", err)
	}
	set, err := files()
	if err != nil {
		return nil, err
	}
	m, err := Open(set, config, name, backend)
	if err != nil {
		return nil, errors.Join(err, set.Close())
	}
	return m, nil
}

// Open makes a model of a configuration and the files of a folder: it checks that they hold what the decoder needs, and reads no
// payload. The model runs on backend. The set stays open for [Model.Load]; [Model.Close] closes it.
func Open(set *loader.Set, config []byte, name string, backend *kernel.Host) (*Model, error) {
	spec, err := ParseConfig(config)
	if err != nil {
		return nil, err
	}
	m := &Model{spec: spec, name: name, set: set, backend: backend, weights: weights{layers: make([]layerWeights, len(spec.Layers))}}
	have := func(name string) ([]int64, bool) {
		t, ok := set.Tensor(name)
		if !ok {
			return nil, false
		}
		return t.Shape, true
	}
	params, notes, err := spec.Resolve(have)
	if err != nil {
		return nil, err
	}
	m.notes = append(append(notes, spec.Notes...), set.Warnings...)
	if p, ok := spec.SpareHead(have); ok {
		m.spare, _ = set.Tensor(p.Name)
	}
	for _, p := range params {
		t, _ := set.Tensor(p.Name)
		pl := placed{Param: p, tensor: t}
		if pl.dtype, err = storage(t); err != nil {
			return nil, err
		}
		slot := m.slot(p)
		pl.weight, pl.vector = slot.weight, slot.vector
		if pl.weight != nil {
			*pl.weight = kernel.Weight{DType: pl.dtype, Out: int(p.Shape[0]), In: int(p.Shape[1])}
		}
		m.params = append(m.params, pl)
	}
	m.layout()
	m.train()
	return m, nil
}

// layout gives every parameter its place in the slab.
func (m *Model) layout() {
	m.bytes = 0
	for i := range m.params {
		p := &m.params[i]
		p.offset, p.bytes = m.bytes, p.Shape[0]*4
		if p.weight != nil {
			p.bytes = kernel.WeightBytes(p.weight.DType, p.weight.Out, p.weight.In)
		}
		m.bytes += device.RoundAlign(p.bytes)
	}
	m.bytes = device.RoundPages(m.bytes)
}

// storage is the type in which the kernels read a tensor.
func storage(t *loader.Tensor) (kernel.DType, error) {
	switch t.DType {
	case loader.F32:
		return kernel.F32, nil
	case loader.BF16:
		return kernel.BF16, nil
	case loader.F16:
		return kernel.F16, nil
	}
	return 0, &DTypeError{Tensor: t.Name, DType: t.DType.String()}
}

// DTypeError is a tensor stored in a type that the engine loads but does not compute with.
type DTypeError struct {
	Tensor, DType string
}

func (e *DTypeError) Error() string {
	return fmt.Sprintf("open model: tensor %s is stored as %s: the engine computes with weights in F32, BF16 and F16", e.Tensor, e.DType)
}

// Hint says what to do about it.
func (e *DTypeError) Hint() string { return "convert the folder to bfloat16" }

type slot struct {
	weight *kernel.Weight
	vector *device.Mem
}

// slot is the place of a parameter.
func (w *weights) slot(p Param) slot {
	switch p.Role {
	case Embedding:
		return slot{weight: &w.embed}
	case Head:
		return slot{weight: &w.head}
	case FinalNorm:
		return slot{vector: &w.finalNorm}
	}
	l := &w.layers[p.Layer]
	switch p.Role {
	case Query:
		return slot{weight: &l.q}
	case Key:
		return slot{weight: &l.k}
	case Value:
		return slot{weight: &l.v}
	case AttentionOut:
		return slot{weight: &l.o}
	case Gate:
		return slot{weight: &l.gate}
	case Up:
		return slot{weight: &l.up}
	case Down:
		return slot{weight: &l.down}
	case AttentionNorm:
		return slot{vector: &l.attnNorm}
	case QueryNorm:
		return slot{vector: &l.qNorm}
	case KeyNorm:
		return slot{vector: &l.kNorm}
	case AttentionPostNorm:
		return slot{vector: &l.attnPostNorm}
	case MLPNorm:
		return slot{vector: &l.mlpNorm}
	case MLPPostNorm:
		return slot{vector: &l.mlpPostNorm}
	case QueryBias:
		return slot{vector: &l.qBias}
	case KeyBias:
		return slot{vector: &l.kBias}
	case ValueBias:
		return slot{vector: &l.vBias}
	case AttentionOutBias:
		return slot{vector: &l.oBias}
	case GateBias:
		return slot{vector: &l.gateBias}
	case UpBias:
		return slot{vector: &l.upBias}
	case DownBias:
		return slot{vector: &l.downBias}
	}
	return slot{}
}

// Spec describes the model to a TrainerRank.
func (m *Model) Spec() forward.Spec {
	return forward.Spec{
		Name: m.name, Vocabulary: m.spec.Vocab, Hidden: m.spec.Hidden, Layers: len(m.spec.Layers), ElementBytes: m.embed.DType.Size(),
	}
}

// Decoder is the decoder as data.
func (m *Model) Decoder() *Spec { return m.spec }

// Notes are what a reader of the results should know: oddities of the folder, and weights that are not finite.
func (m *Model) Notes() []string { return m.notes }

// Backend is what the model runs on.
func (m *Model) Backend() kernel.Backend { return m.backend }

// WeightBytes is what the weights take on a device, in bytes.
func (m *Model) WeightBytes() int64 { return m.bytes }

// Device is the device that the weights were placed on, or nil before that.
func (m *Model) Device() device.Device { return m.dev }

// Rehearse says exactly what a forward of b needs, and with gradients its backward: it runs both on an arena that only counts and a backend that does
// nothing.
func (m *Model) Rehearse(b *forward.Batch) (forward.Footprint, error) {
	return m.rehearse(b, m.backend.Threads())
}

// Variant says on how many worker threads the model runs: each has intermediates of its own.
func (m *Model) Variant() string { return fmt.Sprintf(variant, m.backend.Threads()) }

const variant = "threads=%d"

// RehearseAs says what a forward of b needs on as many threads as a variant says.
func (m *Model) RehearseAs(v string, b *forward.Batch) (forward.Footprint, error) {
	threads, ok := threadsOf(v)
	if !ok {
		return forward.Footprint{}, fmt.Errorf("rehearse: %q is no variant of %s", v, m.name)
	}
	return m.rehearse(b, threads)
}

// threadsOf is the number of threads of a variant.
func threadsOf(v string) (threads int, ok bool) {
	_, err := fmt.Sscanf(v, variant, &threads)
	return threads, err == nil && threads >= 1 && threads <= maxThreads && fmt.Sprintf(variant, threads) == v
}

func (m *Model) rehearse(b *forward.Batch, threads int) (forward.Footprint, error) {
	if err := failpoint.Hit(failpoint.Rehearse); err != nil {
		return forward.Footprint{}, fmt.Errorf("rehearse: %w", err)
	}
	return m.footprint(b, kernel.Rehearsal(threads))
}

// footprint is what a forward of b and its backward take on a backend.
func (m *Model) footprint(b *forward.Batch, be kernel.Backend) (forward.Footprint, error) {
	c := device.NewCounter()
	pass, err := m.run(context.Background(), b, c, be)
	if err != nil {
		return forward.Footprint{}, err
	}
	s := c.Sizes()
	f := forward.Footprint{
		Outputs: s[device.Outputs], Retained: s[device.Retained], Scratch: s[device.Scratch],
		OutputBytes: c.Kept(device.Outputs),
	}
	if g, ok := pass.Graph.(*graph); ok {
		c := device.NewCounter()
		if _, err := g.backward(context.Background(), c, be, nil); err != nil {
			return forward.Footprint{}, err
		}
		s := c.Sizes()
		f.BackwardScratch, f.Gradients = s[device.Scratch], s[device.Gradients]
	}
	return f, nil
}

// Forward runs b inside b.Arena.
func (m *Model) Forward(ctx context.Context, b *forward.Batch) (pass *forward.Pass, err error) {
	if !m.loaded {
		return nil, fmt.Errorf("forward: the weights of %s are not loaded", m.name)
	}
	if b.Arena == nil {
		return nil, fmt.Errorf("forward: the batch has no arena")
	}
	err = m.backend.Do(func() error {
		pass, err = m.run(ctx, b, b.Arena, m.backend)
		return err
	})
	return pass, err
}

// Close gives the weights back to the device and closes the folder. It does not close the backend.
func (m *Model) Close() error {
	if m.block != nil {
		m.block.Free()
		m.block, m.loaded = nil, false
	}
	return m.set.Close()
}

func (a Attention) kernel() kernel.Attention {
	return kernel.Attention{Heads: a.Heads, KVHeads: a.KVHeads, HeadDim: a.HeadDim, Window: a.Window, Scale: float32(a.Scale)}
}

func (a Activation) kernel() kernel.Activation {
	if a == GELUTanh {
		return kernel.GELUTanh
	}
	return kernel.SiLU
}

// maxPosition is the largest position of a batch plus one.
func maxPosition(b *forward.Batch) int {
	n := 0
	for _, s := range b.Spans {
		n = max(n, s.End)
	}
	return n
}
