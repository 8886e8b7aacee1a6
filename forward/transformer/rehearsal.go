package transformer

import (
	"errors"
	"fmt"

	"github.com/trainerrank/engine/forward"
)

// Rehearsal is all that what a [Model] rehearses depends on: its decoder, and how many threads its backend has. No weight and no file, nothing of the machine, and
// nothing of the kernels, whose workspaces have one size everywhere. So a rehearsal can be repeated elsewhere. The zero value cannot rehearse.
type Rehearsal struct {
	Decoder *Spec `json:"decoder"`
	Threads int   `json:"threads"`
}

// maxThreads bounds what [Rehearsal.Validate] lets through: no machine has more, and bytes of so many still fit 64 bits.
const maxThreads = 1 << 16

// Rehearsal is what the rehearsals of the model depend on. The decoder is the model's own: it must not be changed.
func (m *Model) Rehearsal() Rehearsal { return Rehearsal{m.spec, m.backend.Threads()} }

// Validate says what is wrong with a rehearsal that did not come from a model.
func (r Rehearsal) Validate() error {
	if r.Decoder == nil {
		return fmt.Errorf("rehearsal: no decoder")
	}
	if r.Threads < 1 || r.Threads > maxThreads {
		return fmt.Errorf("rehearsal: %d threads, from 1 to %d are possible", r.Threads, maxThreads)
	}
	err := r.Decoder.Validate()
	var e *ConfigError
	if errors.As(err, &e) { // which speaks of a config.json
		return fmt.Errorf("rehearsal: decoder: %s: found %s, wanted %s", e.Key, e.Found, e.Wanted)
	}
	return err
}

// Rehearse says what [Model.Rehearse] of a model of which r is the rehearsal says.
func (r Rehearsal) Rehearse(b *forward.Batch) (forward.Footprint, error) {
	return r.model().rehearse(b, r.Threads)
}

// model is a model that can do nothing else.
func (r Rehearsal) model() *Model {
	m := &Model{spec: r.Decoder, weights: weights{layers: make([]layerWeights, len(r.Decoder.Layers))}}
	for _, p := range r.Decoder.Params() {
		m.params = append(m.params, placed{Param: p, weight: m.slot(p).weight})
	}
	m.train()
	return m
}

// RehearseAs says what [Model.RehearseAs] of such a model says.
func (r Rehearsal) RehearseAs(v string, b *forward.Batch) (forward.Footprint, error) {
	threads, ok := threadsOf(v)
	if !ok {
		return forward.Footprint{}, fmt.Errorf("rehearse: %q is no variant of a decoder", v)
	}
	return Rehearsal{r.Decoder, threads}.Rehearse(b)
}
