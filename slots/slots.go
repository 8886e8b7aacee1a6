package slots

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/trainerrank/engine/collective"
	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
)

// Set holds the slots of one model on one device. See the package comment for which methods all ranks must call together. Methods may be
// called from several goroutines; those that change a slot run one at a time.
type Set struct {
	modules []forward.Module
	dev     device.Device
	world   collective.World
	base    string
	threads int

	turn sync.Mutex // held by whoever changes a slot's memory or speaks to the other ranks; taken before mu

	mu       sync.Mutex // never held while something slow is done: a lease may be released by the collector
	slots    map[string]*slot
	bases    slot // the base model; its main vector is nil unless it is trained
	pushed   []string
	fallback string // the default slot
}

// Options are what [New] can do without.
type Options struct {
	World     collective.World // the other ranks; nil is a rank alone
	BaseModel string           // the model's name or path, written into the files of adapters that [Set.Create] makes
	Threads   int              // that work on large vectors; 0 is one per processor. No bit depends on it
}

// slot is one adapter. What is not said to be fixed is guarded by Set.mu, and its memory by Set.turn.
type slot struct {
	name     string           // fixed
	adapter  *forward.Adapter // fixed; nil for the base model
	config   []byte           // fixed: adapter_config.json; nil for the base model
	summary  *Config          // fixed: the same, read
	main     *vector          // fixed
	trained  bool             // fixed: there are accumulators and moments
	snapshot bool             // fixed

	owned    map[string]*owned
	revision int64
	adam     *AdamParams // of the last step
	pending  bool        // gradients were accumulated
	live     int         // leases
	closing  bool        // it is about to be replaced or unloaded: no new leases
	gone     bool        // it was
}

// New is the set of slots of a model with these modules, empty, on a device.
func New(modules []forward.Module, dev device.Device, o Options) *Set {
	if o.World == nil {
		o.World = collective.Solo{}
	}
	return &Set{modules: modules, dev: dev, world: o.World, base: o.BaseModel, threads: defaultThreads(o.Threads), slots: map[string]*slot{}}
}

// Close gives the memory of all slots back, whatever their state. Nothing of the set can be used any more.
func (s *Set) Close() {
	s.turn.Lock()
	defer s.turn.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, sl := range append(slices.Collect(maps.Values(s.slots)), &s.bases) {
		sl.gone = true
		sl.free()
	}
	clear(s.slots)
	s.bases.main, s.bases.trained, s.pushed, s.fallback = nil, false, nil, ""
}

// vectors are all of a slot's, in an order that every rank has.
func (sl *slot) vectors() []*vector {
	var list []*vector
	if sl.main != nil {
		list = append(list, sl.main)
	}
	for _, name := range slices.Sorted(maps.Keys(sl.owned)) {
		list = append(list, sl.owned[name].v)
	}
	return list
}

// trainable are the vectors that have gradients.
func (sl *slot) trainable() []*vector {
	return slices.DeleteFunc(sl.vectors(), func(v *vector) bool { return !v.trained() })
}

func (sl *slot) free() {
	for _, v := range sl.vectors() {
		v.free()
	}
}

// find is a slot that is loaded, or the base model. The caller holds mu.
func (s *Set) find(name string) (*slot, error) {
	if name == "" {
		return &s.bases, nil
	}
	if sl := s.slots[name]; sl != nil {
		return sl, nil
	}
	return nil, &SlotStateError{name, "no checkpoint of that name is loaded"}
}

// lookup is find for who does not hold mu.
func (s *Set) lookup(name string) (*slot, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.find(name)
}

// Names are the names of the slots, sorted.
func (s *Set) Names() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(maps.Keys(s.slots))
}

// Adapter is what a batch that runs on a slot is given; nil for the base model. Only a lease keeps it from being replaced while it is in use.
func (s *Set) Adapter(name string) (*forward.Adapter, error) {
	sl, err := s.lookup(name)
	if err != nil {
		return nil, err
	}
	return sl.adapter, nil
}

// Info is a slot at one moment.
type Info struct {
	Name      string
	Config    Config
	Modules   []string     // the paths of those that it adds to
	Elements  int64        // parameters, those of [Set.Parameter] included
	Bytes     device.Sizes // taken of the device
	Trainable bool
	Snapshot  bool
	Revision  int64       // one more with every step
	Steps     int64       // of the optimizer that its moments have seen
	Adam      *AdamParams // of the last step; nil before the first
	Pending   bool        // gradients were accumulated on this rank
	Live      int         // leases
	Owned     []string
}

// Info describes a slot.
func (s *Set) Info(name string) (Info, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	sl, err := s.find(name)
	if err != nil {
		return Info{}, err
	}
	in := Info{
		Name: name, Trainable: sl.trained, Snapshot: sl.snapshot, Revision: sl.revision, Pending: sl.pending, Live: sl.live,
		Owned: slices.Sorted(maps.Keys(sl.owned)),
	}
	if sl.summary != nil {
		in.Config = *sl.summary
	}
	if sl.adapter != nil {
		for _, l := range sl.adapter.LoRA {
			in.Modules = append(in.Modules, s.modules[l.Module].Path)
		}
	}
	if sl.main != nil {
		in.Steps = sl.main.steps
	}
	if sl.adam != nil {
		p := *sl.adam
		in.Adam = &p
	}
	for _, v := range sl.vectors() {
		for i := range v.tensors {
			in.Elements += v.tensors[i].elements()
		}
		for _, b := range v.blocks {
			in.Bytes[b.Purpose()] += b.Bytes()
		}
	}
	return in, nil
}

func (in Info) String() string {
	s := fmt.Sprintf("%s: %d parameters in %d modules, revision %d, %v", quote(in.Name), in.Elements, len(in.Modules), in.Revision, in.Bytes)
	for _, f := range []struct {
		on   bool
		what string
	}{{in.Snapshot, "snapshot"}, {!in.Trainable && !in.Snapshot, "for inference only"}, {in.Pending, "gradients pending"}} {
		if f.on {
			s += ", " + f.what
		}
	}
	if in.Live > 0 {
		s += fmt.Sprintf(", %d live graphs", in.Live)
	}
	return s
}

// settle is one collective, to which every rank brings nil or its error, and what must be the same on all. What fails on one fails on
// all: a rank keeps its own error, and the others get a [*collective.PeerError].
func (s *Set) settle(ctx context.Context, op string, err error, same string) error {
	type word struct {
		Failed bool
		Err    string
		Same   string
	}
	mine := word{Same: same}
	if err != nil {
		mine.Failed, mine.Err = true, err.Error()
	}
	all, met := s.world.AllGather(ctx, "slots/"+op, encode(mine))
	if met != nil {
		return errors.Join(err, met)
	}
	if err != nil {
		return err
	}
	words := make([]word, len(all))
	for r := range all {
		if err := decode(all[r], &words[r]); err != nil {
			return err
		}
		if words[r].Failed {
			return &collective.PeerError{Rank: r, Text: words[r].Err}
		}
	}
	for r, w := range words {
		if w.Same != words[0].Same {
			return fmt.Errorf("%s: ranks 0 and %d do not have the same: %s, and %s", op, r, words[0].Same, w.Same)
		}
	}
	return nil
}

// alone says that there are no other ranks, so that nothing need be compared.
func (s *Set) alone() bool { return s.world.Size() == 1 }

func encode(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(fmt.Sprintf("slots: a message cannot be encoded: %v", err))
	}
	return b
}

func decode(b []byte, v any) error {
	if err := json.Unmarshal(b, v); err != nil {
		return fmt.Errorf("a rank's message is not understood: %w", err)
	}
	return nil
}

// print is a digest of a slot's layout, and with content also of its parameters and state. Ranks compare it.
func (sl *slot) print(content bool) string {
	h := sha256.New()
	h.Write(sl.config)
	for _, v := range sl.vectors() {
		fmt.Fprintf(h, "%d %d %t %+v", v.bytes, v.steps, v.trained(), v.tensors)
		if !content {
			continue
		}
		for i := range v.tensors {
			t := &v.tensors[i]
			for _, m := range []device.Mem{v.params, v.mean, v.sq} {
				if m.Bytes() > 0 {
					h.Write(m.Slice(t.At, t.elements()*4).Raw())
				}
			}
		}
	}
	return hex.EncodeToString(h.Sum(nil)[:8])
}
