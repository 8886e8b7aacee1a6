package slots

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/trainerrank/engine/collective"
	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/loader"
)

// tiny are the modules of the golden model qwen3-tiny.
var tiny = decoder(3, 64, 128, 64, 160)

// decoder are the modules of a decoder, by its widths: hidden, of all query heads, of all key heads, and of the feed-forward.
func decoder(layers, hidden, q, kv, inner int) []forward.Module {
	var list []forward.Module
	for i := range layers {
		for _, m := range []forward.Module{
			{Path: "self_attn.q_proj", In: hidden, Out: q}, {Path: "self_attn.k_proj", In: hidden, Out: kv}, {Path: "self_attn.v_proj", In: hidden, Out: kv},
			{Path: "self_attn.o_proj", In: q, Out: hidden},
			{Path: "mlp.gate_proj", In: hidden, Out: inner}, {Path: "mlp.up_proj", In: hidden, Out: inner}, {Path: "mlp.down_proj", In: inner, Out: hidden},
		} {
			m.Path = fmt.Sprintf("model.layers.%d.%s", i, m.Path)
			list = append(list, m)
		}
	}
	return list
}

var everything = []string{"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}

// host is a device that must be empty again when the test is over.
func host(t testing.TB, capacity int64) *device.Host {
	t.Helper()
	dev, err := device.NewHost(capacity)
	if err != nil {
		t.Fatal(err)
	}
	device.CheckLeaks(t, dev)
	return dev
}

// newSet is a set that is emptied when the test is over.
func newSet(t testing.TB, modules []forward.Module, capacity int64, o Options) *Set {
	t.Helper()
	s := New(modules, host(t, capacity), o)
	t.Cleanup(s.Close)
	return s
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// refused fails the test unless err is a SlotStateError about a slot that mentions a text.
func refused(t testing.TB, err error, slot, text string) {
	t.Helper()
	var e *SlotStateError
	if !errors.As(err, &e) || e.Slot != slot || !strings.Contains(e.Reason, text) {
		t.Errorf("got error %v, want a SlotStateError about %q with %q", err, slot, text)
	}
}

// doubles are the float64 tensors of a file.
func doubles(t testing.TB, path string) map[string][]float64 {
	t.Helper()
	set, err := loader.Open(path)
	must(t, err)
	defer set.Close()
	all := map[string][]float64{}
	for _, name := range set.Names() {
		x, _ := set.Tensor(name)
		b := make([]byte, x.Bytes)
		must(t, set.ReadAt(x, b, 0))
		for i := 0; i < len(b); i += 8 {
			all[name] = append(all[name], math.Float64frombits(binary.LittleEndian.Uint64(b[i:])))
		}
	}
	return all
}

// inFile is a tensor of a vector in the order of files.
func inFile(t *Tensor, m device.Mem) []float32 {
	x := t.in(m)
	if !t.Transposed {
		return x
	}
	rows, cols := int(t.Shape[0]), int(t.Shape[1])
	y := make([]float32, len(x))
	for i := range rows {
		for j := range cols {
			y[i*cols+j] = x[j*rows+i]
		}
	}
	return y
}

// gradient is a block with a gradient of a slot's layout, from the tensors of a file.
func gradient(t testing.TB, s *Set, name string, file map[string][]float64) device.Mem {
	t.Helper()
	sl, err := s.lookup(name)
	must(t, err)
	g := device.MemOf(make([]byte, sl.gradBytes()))
	for i := range sl.main.tensors {
		x := &sl.main.tensors[i]
		to, rows, cols := x.in(g), int(x.Shape[0]), int(x.Shape[1])
		for j, v := range file[x.Name] {
			if x.Transposed {
				j = j%cols*rows + j/cols
			}
			to[j] = float32(v)
		}
	}
	return g
}

// noise is a gradient of a slot's layout, garbage between the tensors included.
func noise(t testing.TB, s *Set, name string, seed uint64) device.Mem {
	t.Helper()
	sl, err := s.lookup(name)
	must(t, err)
	rng := rand.New(rand.NewPCG(seed, 0))
	g := device.MemOf(make([]byte, sl.gradBytes()))
	for i := range g.F32() {
		g.F32()[i] = float32(math.NaN())
	}
	for i := range sl.main.tensors {
		x := sl.main.tensors[i].in(g)
		for j := range x {
			x[j] = float32(rng.NormFloat64())
		}
	}
	return g
}

// state is all that a slot has, by tensor, in the order of files.
func state(t testing.TB, s *Set, name string) map[string][]float32 {
	t.Helper()
	sl, err := s.lookup(name)
	must(t, err)
	all := map[string][]float32{}
	for _, v := range sl.vectors() {
		for i := range v.tensors {
			x := &v.tensors[i]
			all[x.Name] = append([]float32{}, inFile(x, v.params)...)
			if v.trained() {
				all[x.Name+" mean"] = append([]float32{}, inFile(x, v.mean)...)
				all[x.Name+" sq"] = append([]float32{}, inFile(x, v.sq)...)
				all[x.Name+" grad"] = append([]float32{}, inFile(x, v.grads)...)
			}
		}
	}
	return all
}

func same(t testing.TB, what string, got, want map[string][]float32) {
	t.Helper()
	if !equal(got, want) {
		t.Errorf("%s (-want +got):\n%s", what, cmp.Diff(want, got))
	}
}

// equal compares bits; cmp.Equal takes a minute for what a bucket holds.
func equal(a, b map[string][]float32) bool {
	return maps.EqualFunc(a, b, func(x, y []float32) bool {
		return slices.EqualFunc(x, y, func(x, y float32) bool { return math.Float32bits(x) == math.Float32bits(y) })
	})
}

func TestGoldenAdapterAndItsFirstStepAreReproduced(t *testing.T) {
	ctx := context.Background()
	s := newSet(t, tiny, 1<<24, Options{})
	must(t, s.Load(ctx, "b", "testdata/golden/adapter", LoadOptions{}))
	a, err := s.Adapter("b")
	must(t, err)
	if len(a.LoRA) != 6 || a.LoRA[0].Rank != 2 || a.LoRA[0].Scale != float32(2/math.Sqrt2) {
		t.Errorf("adapter is %+v", a.LoRA)
	}
	golden := doubles(t, "testdata/golden/adamw.safetensors")
	before := state(t, s, "b")
	must(t, s.Accumulate("b", gradient(t, s, "b", doubles(t, "testdata/golden/gradients.safetensors"))))
	r, err := s.Step(ctx, StepOptions{Params: AdamParams{LearningRate: 1e-2, Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, WeightDecay: 0.1, GradClipNorm: 0.5}})
	must(t, err)
	norm := golden["pre_clip_norms"][0]
	if got := r.Slots[0]; math.Abs(got.GradNorm/norm-1) > 1e-6 || math.Abs(got.ClipFactor-0.5/(norm+1e-6)) > 1e-6 || !got.Updated || got.Revision != 1 {
		t.Errorf("the step reports %+v, want a norm of %g", got, norm)
	}
	after := state(t, s, "b")
	var diff, update float64
	for name, want := range golden {
		tensor, ok := strings.CutPrefix(name, "step1.")
		if !ok {
			continue
		}
		if len(after[tensor]) != len(want) {
			t.Fatalf("%s has %d elements, want %d", tensor, len(after[tensor]), len(want))
		}
		for i, w := range want {
			was := float64(before[tensor][i])
			diff += math.Pow(float64(after[tensor][i])-w, 2)
			update += math.Pow(w-was, 2)
		}
	}
	if err := math.Sqrt(diff / update); !(err < 1e-4) {
		t.Errorf("the update is off by %g, want 1e-4", err)
	}
}

func TestFreshAdapterIsAsPEFTInitialisesItAndFollowsFromTheSeed(t *testing.T) {
	ctx := context.Background()
	s := newSet(t, tiny, 1<<26, Options{BaseModel: "base"})
	c := Config{Rank: 8, Alpha: 16, Targets: everything, Seed: 7}
	must(t, s.Create(ctx, "x", c))
	must(t, s.Create(ctx, "y", c))
	few := c
	few.Targets = []string{"down_proj"}
	must(t, s.Create(ctx, "z", few))
	other := c
	other.Seed = 8
	must(t, s.Create(ctx, "w", other))
	x, z, w := state(t, s, "x"), state(t, s, "z"), state(t, s, "w")
	same(t, "another slot of that seed", state(t, s, "y"), x)
	const down = "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"
	if !cmp.Equal(z[down], x[down]) || cmp.Equal(w[down], x[down]) || cmp.Equal(x[strings.Replace(down, "layers.1", "layers.2", 1)], x[down]) {
		t.Error("what is drawn for a module depends on the other targets, or not on the seed and the module")
	}
	for name, v := range x {
		var most, sum, squares float64
		for _, f := range v {
			most, sum, squares = max(most, math.Abs(float64(f))), sum+float64(f), squares+float64(f)*float64(f)
		}
		in := 64.0
		switch {
		case !strings.HasSuffix(name, suffixA): // B, moments and gradients
			if most != 0 {
				t.Errorf("%s is not zero", name)
			}
			continue
		case strings.Contains(name, "o_proj"):
			in = 128
		case strings.Contains(name, "down_proj"):
			in = 160
		}
		bound, n := 1/math.Sqrt(in), float64(len(v))
		// A uniform number has variance bound²/3; its mean has a 3n-th of bound².
		if most > bound || most < 0.95*bound || math.Abs(sum/n) > 5*bound/math.Sqrt(3*n) || math.Abs(squares/n*3/bound/bound-1) > 0.2 {
			t.Errorf("%s is not uniform within %g: largest %g, mean %g, variance %g", name, bound, most, sum/n, squares/n)
		}
	}
	in, err := s.Info("x")
	must(t, err)
	if in.Config.BaseModel != "base" || len(in.Modules) != 21 || in.Config.Rank != 8 {
		t.Errorf("info is %+v", in)
	}
}

func TestPriceIsWhatTheDeviceCounts(t *testing.T) {
	ctx := context.Background()
	s := newSet(t, tiny, 1<<28, Options{})
	count := func(do func()) device.Sizes {
		before := s.dev.Stats().InUse
		do()
		after := s.dev.Stats().InUse
		for p := range after {
			after[p] -= before[p]
		}
		return after
	}
	for i, c := range []Config{
		{Rank: 1, Alpha: 1, Targets: []string{"q_proj"}},
		{Rank: 16, Alpha: 1, Targets: everything},
		{Rank: 3, Alpha: 1, TargetPattern: AllLinear, RankPattern: []Override{{"mlp.*", 5}}},
	} {
		name := fmt.Sprint(i)
		want, err := s.Price(c, LoadOptions{})
		must(t, err)
		if got := count(func() { must(t, s.Create(ctx, name, c)) }); got != want {
			t.Errorf("%+v takes %v, priced at %v", c, got, want)
		}
		in, err := s.Info(name)
		must(t, err)
		if in.Bytes != want {
			t.Errorf("info of %+v says %v, priced at %v", c, in.Bytes, want)
		}
	}
	for _, o := range []LoadOptions{{}, {Inference: true}} {
		want, err := s.PriceOf("testdata/golden/adapter", o)
		must(t, err)
		got := count(func() { must(t, s.Load(ctx, fmt.Sprint(o), "testdata/golden/adapter", o)) })
		if got != want || o.Inference == (got[device.Gradients] > 0) {
			t.Errorf("%+v takes %v, priced at %v", o, got, want)
		}
	}
}

func TestWithoutMemoryNothingIsTakenAndTheOldSlotStays(t *testing.T) {
	ctx := context.Background()
	c := Config{Rank: 8, Alpha: 8, Targets: everything, Seed: 1}
	price, err := New(tiny, nil, Options{}).Price(c, LoadOptions{})
	must(t, err)
	// One page less than each of the three blocks, and than their sum, takes.
	for _, capacity := range []int64{price.Total() - 1, price[device.Adapters] - 1, price[device.Adapters], price[device.Adapters] / 3} {
		s := newSet(t, tiny, 2*price.Total(), Options{})
		must(t, s.Create(ctx, "old", c))
		before := state(t, s, "old")
		ballast, err := s.dev.Allocate(device.Ballast, s.dev.Free()-capacity&^(device.PageSize-1))
		must(t, err)
		stats := s.dev.Stats().InUse
		replacing := c
		replacing.Seed = 2
		err = s.Create(ctx, "old", replacing)
		var oom *device.OutOfMemoryError
		if !errors.As(err, &oom) {
			t.Errorf("with %d bytes: %v", capacity, err)
		}
		if got := s.dev.Stats().InUse; got != stats {
			t.Errorf("with %d bytes the failure left %v, before it %v", capacity, got, stats)
		}
		same(t, "the old slot", state(t, s, "old"), before)
		ballast.Free()
		must(t, s.Create(ctx, "old", replacing))
		must(t, s.Accumulate("old", noise(t, s, "old", 1)))
		must(t, s.ZeroGrad())
	}
}

func TestSlotIsNotReplacedWhileAnythingDependsOnIt(t *testing.T) {
	ctx := context.Background()
	s := newSet(t, tiny, 1<<26, Options{})
	c := Config{Rank: 2, Alpha: 2, Targets: []string{"q_proj"}}
	must(t, s.Create(ctx, "x", c))
	lease, err := s.Acquire("x")
	must(t, err)
	second, err := s.Acquire("x")
	must(t, err)
	refused(t, s.Create(ctx, "x", c), "x", "2 of its graphs are live")
	lease.Release()
	lease.Release()
	refused(t, s.Load(ctx, "x", "testdata/golden/adapter", LoadOptions{}), "x", "1 of its graphs")
	refused(t, s.Unload(ctx, "x"), "x", "1 of its graphs")
	must(t, s.ZeroGrad()) // which ends no graph
	refused(t, s.Unload(ctx, "x"), "x", "1 of its graphs")
	second.Release()
	must(t, s.Accumulate("x", noise(t, s, "x", 1)))
	refused(t, s.Create(ctx, "x", c), "x", "gradients are pending")
	must(t, s.ZeroGrad("x"))
	must(t, s.Create(ctx, "x", c))
	must(t, s.Push("x"))
	refused(t, s.Unload(ctx, "x"), "x", "pushed")
	_, err = s.Pop()
	must(t, err)
	must(t, s.SetDefault("x"))
	refused(t, s.Unload(ctx, "x"), "x", "default")
	must(t, s.SetDefault(""))
	must(t, s.Unload(ctx, "x"))
	refused(t, s.Unload(ctx, "x"), "x", "no checkpoint")
	_, err = s.Acquire("x")
	refused(t, err, "x", "no checkpoint")
	refused(t, s.Create(ctx, "", c), "", "needs a name")
	var none *Lease
	none.Release()
}

func TestDroppedLeaseIsReleasedByTheCollector(t *testing.T) {
	s := newSet(t, tiny, 1<<26, Options{})
	must(t, s.Create(context.Background(), "x", Config{Rank: 2, Alpha: 2, Targets: []string{"q_proj"}}))
	func() {
		l, err := s.Acquire("x")
		must(t, err)
		g := new([64]byte)
		runtime.AddCleanup(g, (*Lease).Release, l)
	}()
	for range 1000 {
		runtime.GC()
		in, err := s.Info("x")
		must(t, err)
		if in.Live == 0 {
			return
		}
		time.Sleep(time.Millisecond)
	}
	t.Error("the lease of a graph that nobody has is live")
}

func TestSelectionIsOwnThenCallThenPushedThenDefaultThenBase(t *testing.T) {
	ctx := context.Background()
	s := newSet(t, tiny, 1<<26, Options{})
	for _, name := range []string{"own", "call", "pushed", "default"} {
		must(t, s.Create(ctx, name, Config{Rank: 1, Alpha: 1, Targets: []string{"q_proj"}}))
	}
	check := func(own, call forward.Selection, want string) {
		t.Helper()
		if got := s.Resolve(own, call); got != want {
			t.Errorf("resolved to %q, want %q", got, want)
		}
	}
	var inherit forward.Selection
	own, call := forward.Checkpoint("own"), forward.Checkpoint("call")
	check(inherit, inherit, "")
	must(t, s.SetDefault("default"))
	check(inherit, inherit, "default")
	must(t, s.Push("pushed"))
	check(inherit, inherit, "pushed")
	must(t, s.Push(""))
	check(inherit, inherit, "")
	refused(t, s.SetDefault("own"), "own", "pushed")
	check(inherit, call, "call")
	check(own, call, "own")
	check(forward.BaseModel(), call, "")
	check(inherit, forward.BaseModel(), "")
	for _, want := range []string{"", "pushed"} {
		if got, err := s.Pop(); err != nil || got != want {
			t.Errorf("popped %q, %v, want %q", got, err, want)
		}
	}
	_, err := s.Pop()
	refused(t, err, "", "nothing is pushed")
	refused(t, s.Push("absent"), "absent", "no checkpoint")
	refused(t, s.SetDefault("absent"), "absent", "no checkpoint")
}

func TestSnapshotIsAFrozenCopy(t *testing.T) {
	ctx := context.Background()
	s := newSet(t, tiny, 1<<26, Options{})
	c := Config{Rank: 2, Alpha: 2, Targets: []string{"q_proj"}, Seed: 3}
	must(t, s.Create(ctx, "x", c))
	p, err := s.Parameter(ctx, "x", "head", []int64{3}, func(v []float32) { v[1] = 5 })
	must(t, err)
	taken := func(src, dst string, want bool) {
		t.Helper()
		if ok, err := s.Snapshot(ctx, src, dst); err != nil || ok != want {
			t.Errorf("snapshot: %t, %v", ok, err)
		}
	}
	taken("x", "old", true)
	frozen := state(t, s, "old")
	must(t, s.Accumulate("x", noise(t, s, "x", 1)))
	must(t, p.Accumulate([]float32{1, 1, 1}))
	_, err = s.Step(ctx, StepOptions{Params: Adam(0.1)}) // #823 of the reference: an implicit step leaves snapshots alone
	must(t, err)
	taken("x", "old", false)
	same(t, "the snapshot", state(t, s, "old"), frozen)
	if x := state(t, s, "x"); cmp.Equal(x["parameter.head"], frozen["parameter.head"]) || len(frozen) != 7 {
		t.Errorf("%d tensors, head %v", len(frozen), x["parameter.head"])
	}
	refused(t, s.Load(ctx, "old", "testdata/golden/adapter", LoadOptions{}), "old", "snapshot")
	refused(t, s.Accumulate("old", noise(t, s, "old", 1)), "old", "snapshot")
	_, err = s.Step(ctx, StepOptions{Params: Adam(0.1), Slots: []string{"old"}})
	refused(t, err, "old", "snapshot")
	_, err = s.Snapshot(ctx, "x", "x")
	refused(t, err, "x", "no snapshot")
	_, err = s.Snapshot(ctx, "absent", "new")
	refused(t, err, "absent", "no checkpoint")
	_, err = s.Snapshot(ctx, "", "new")
	refused(t, err, "", "cannot be copied")
	if in, err := s.Info("old"); err != nil || !in.Snapshot || in.Trainable || in.Bytes[device.Gradients] != 0 {
		t.Errorf("info is %v, %v", in, err)
	}
	taken("old", "older", true)
	same(t, "a snapshot of the snapshot", state(t, s, "older"), frozen)
	must(t, s.Unload(ctx, "old"))
}

// ranks runs a function on each of n ranks with a set of its own.
func ranks(t *testing.T, n int, do func(rank int, s *Set) error) {
	t.Helper()
	dev := host(t, 1<<28)
	err := collective.Run(n, func(w collective.World) error {
		s := New(tiny, dev, Options{World: w, Threads: 2})
		defer s.Close()
		return do(w.Rank(), s)
	})
	if err != nil {
		t.Error(err)
	}
}

// meddling is a world in which something else happens while ranks meet.
type meddling struct {
	collective.World
	meanwhile func()
}

func (m *meddling) AllGather(ctx context.Context, tag string, mine []byte) ([][]byte, error) {
	if f := m.meanwhile; f != nil {
		m.meanwhile = nil
		f()
	}
	return m.World.AllGather(ctx, tag, mine)
}

func TestLeaseIsNotTakenOfASlotThatIsBeingReplaced(t *testing.T) {
	ctx := context.Background()
	w := &meddling{World: collective.Solo{}}
	s := newSet(t, tiny, 1<<26, Options{World: w})
	c := Config{Rank: 2, Alpha: 2, Targets: []string{"q_proj"}}
	must(t, s.Create(ctx, "x", c))
	old, err := s.Adapter("x")
	must(t, err)
	acquire := func() {
		_, err := s.Acquire("x")
		refused(t, err, "x", "being replaced")
	}
	w.meanwhile = acquire
	must(t, s.Create(ctx, "x", c))
	if now, err := s.Adapter("x"); err != nil || now == old {
		t.Errorf("the slot is not replaced: %v", err)
	}
	// After a failure it is as it was.
	cancelled, cancel := context.WithCancel(ctx)
	w.meanwhile = func() { acquire(); cancel() }
	if err := s.Unload(cancelled, "x"); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	l, err := s.Acquire("x")
	must(t, err)
	l.Release()
}

func TestSlotsAreUsedByManyGoroutines(t *testing.T) {
	ctx := context.Background()
	s := newSet(t, tiny, 1<<26, Options{})
	c := Config{Rank: 2, Alpha: 2, Targets: []string{"q_proj"}}
	must(t, s.Create(ctx, "x", c))
	g := noise(t, s, "x", 1)
	var wg sync.WaitGroup
	var replaced, stepped atomic.Int64
	for i := range 4 {
		wg.Go(func() {
			for range 200 {
				if l, err := s.Acquire("x"); err == nil {
					if l.Adapter().Params.Bytes() != g.Bytes() || i == 2 && s.Accumulate("x", g) != nil {
						t.Error("the slot is not there although it is leased")
					}
					l.Release()
				}
				if i == 1 && s.Create(ctx, "x", c) == nil {
					replaced.Add(1)
				}
				if i == 2 {
					if _, err := s.Step(ctx, StepOptions{Params: Adam(1e-3)}); err == nil {
						stepped.Add(1)
					}
				}
				if in, err := s.Info("x"); err != nil || in.Live > 4 || in.String() == "" {
					t.Errorf("info is %v, %v", in, err)
				}
			}
		})
	}
	wg.Wait()
	if in, err := s.Info("x"); err != nil || in.Live != 0 || replaced.Load() == 0 || stepped.Load() == 0 {
		t.Errorf("%v, %v; replaced %d times, stepped %d times", in, err, replaced.Load(), stepped.Load())
	}
}
