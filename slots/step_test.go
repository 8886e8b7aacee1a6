package slots

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/trainerrank/engine/collective"
	"github.com/trainerrank/engine/device"
)

// float64 twin of the optimizer, element by element as PyTorch's documentation of AdamW has it.
type twin struct{ w, m, v []float64 }

func (x *twin) step(p AdamParams, g []float64, clip float64, t int) {
	for i := range x.w {
		gi := g[i] * clip
		x.w[i] -= p.LearningRate * p.WeightDecay * x.w[i]
		x.m[i] = p.Beta1*x.m[i] + (1-p.Beta1)*gi
		x.v[i] = p.Beta2*x.v[i] + (1-p.Beta2)*gi*gi
		mh, vh := x.m[i]/(1-math.Pow(p.Beta1, float64(t))), x.v[i]/(1-math.Pow(p.Beta2, float64(t)))
		x.w[i] -= p.LearningRate * mh / (math.Sqrt(vh) + p.Eps)
	}
}

func TestStepsFollowTheFormulaOfAdamWOverRanks(t *testing.T) {
	for _, n := range []int{1, 2, 4} {
		for _, p := range []AdamParams{Adam(1e-2), {LearningRate: 1e-3, Beta1: 0.5, Beta2: 0.9, Eps: 1e-3, GradClipNorm: -1}, {LearningRate: 0.1, Eps: 1e-12, WeightDecay: 1, GradClipNorm: 1e9}} {
			for _, scale := range []float64{0, 0.25} {
				t.Run(fmt.Sprint(n, p.LearningRate, scale), func(t *testing.T) {
					ranks(t, n, func(rank int, s *Set) error { return followsFormula(t, n, rank, s, p, scale) })
				})
			}
		}
	}
}

func followsFormula(t *testing.T, n, rank int, s *Set, p AdamParams, scale float64) error {
	ctx := context.Background()
	if err := s.Load(ctx, "x", "testdata/golden/adapter", LoadOptions{}); err != nil {
		return err
	}
	start := state(t, s, "x")
	twins := map[string]*twin{}
	sl, _ := s.lookup("x")
	for _, x := range sl.main.tensors {
		w := &twin{}
		for _, f := range start[x.Name] {
			w.w, w.m, w.v = append(w.w, float64(f)), append(w.m, 0), append(w.v, 0)
		}
		twins[x.Name] = w
	}
	factor := scale
	if scale == 0 {
		factor = 1
	}
	for step := 1; step <= 3; step++ {
		// The last rank has no gradients, but for a world of one.
		sum, norm := map[string][]float64{}, 0.0
		for r := range max(1, n-1) {
			g := noise(t, s, "x", uint64(100*step+r))
			if r == rank {
				// In two parts, as a split call does.
				half := device.MemOf(make([]byte, g.Bytes()))
				for i, f := range g.F32() {
					half.F32()[i] = f / 2
				}
				if err := errors.Join(s.Accumulate("x", half), s.Accumulate("x", half)); err != nil {
					return err
				}
			}
			for i := range sl.main.tensors {
				x := &sl.main.tensors[i]
				f := inFile(x, g)
				if sum[x.Name] == nil {
					sum[x.Name] = make([]float64, len(f))
				}
				for j := range f {
					sum[x.Name][j] += factor * float64(f[j])
				}
			}
		}
		for _, g := range sum {
			for _, v := range g {
				norm += v * v
			}
		}
		norm = math.Sqrt(norm)
		clip := 1.0
		if p.GradClipNorm > 0 {
			clip = min(1, p.GradClipNorm/(norm+1e-6))
		}
		report, err := s.Step(ctx, StepOptions{Params: p, Scale: scale, OnLiveGraphs: Error})
		if err != nil {
			return err
		}
		if r := report.Slots[0]; !r.Updated || r.Revision != int64(step) || r.LearningRate != p.LearningRate || math.Abs(r.GradNorm/norm-1) > 1e-6 || math.Abs(r.ClipFactor/clip-1) > 1e-6 {
			t.Errorf("rank %d: %+v, want norm %g, clip %g", rank, r, norm, clip)
		}
		got := state(t, s, "x")
		var diff, update float64
		for name, w := range twins {
			before := append([]float64{}, w.w...)
			w.step(p, sum[name], clip, step)
			for i := range w.w {
				diff += math.Pow(float64(got[name][i])-w.w[i], 2)
				update += math.Pow(w.w[i]-before[i], 2)
				if got[name+" grad"][i] != 0 {
					return fmt.Errorf("%s: gradients are left", name)
				}
			}
		}
		if e := math.Sqrt(diff / update); !(e < 2e-5) {
			return fmt.Errorf("rank %d, step %d: the update is off by %g", rank, step, e)
		}
	}
	return nil
}

func TestRanksHaveTheSameBitsAfterAStepWhateverTheThreads(t *testing.T) {
	ctx := context.Background()
	// A vector of several chunks and more than one bucket.
	n := int64(bucket + chunk + 77)
	results := make([]map[string][]float32, 3)
	norms := make([]float64, 3)
	dev := host(t, 1<<28)
	err := collective.Run(3, func(w collective.World) error {
		s := New(tiny, dev, Options{World: w, Threads: 1 + 3*w.Rank()})
		defer s.Close()
		if err := s.Create(ctx, "x", Config{Rank: 1, Alpha: 1, Targets: []string{"q_proj"}}); err != nil {
			return err
		}
		p, err := s.Parameter(ctx, "x", "big", []int64{n}, func(v []float32) {
			for i := range v {
				v[i] = float32(i%1000) / 500
			}
		})
		if err != nil {
			return err
		}
		g := make([]float32, n)
		for i := range g {
			g[i] = float32(math.Sin(float64(i * (w.Rank() + 1))))
		}
		if err := p.Accumulate(g); err != nil {
			return err
		}
		r, err := s.Step(ctx, StepOptions{Params: Adam(1e-2)})
		if err != nil {
			return err
		}
		results[w.Rank()], norms[w.Rank()] = state(t, s, "x"), r.Slots[0].GradNorm
		return nil
	})
	must(t, err)
	for r := 1; r < 3; r++ {
		if norms[r] != norms[0] || !equal(results[r], results[0]) {
			t.Errorf("rank %d has a norm of %v and rank 0 of %v, or other parameters", r, norms[r], norms[0])
		}
	}
}

// #835 of the reference.
func TestEachSlotIsClippedByItsOwnNormAndHasItsOwnSettings(t *testing.T) {
	ctx := context.Background()
	s := newSet(t, tiny, 1<<26, Options{})
	var alone []map[string][]float32
	set := func() {
		for i, name := range []string{"x", "y", "idle"} {
			must(t, s.Create(ctx, name, Config{Rank: 2, Alpha: 2, Targets: []string{"q_proj", "v_proj"}, Seed: uint64(i)}))
		}
		must(t, s.Accumulate("x", noise(t, s, "x", 1)))
		must(t, s.Accumulate("y", noise(t, s, "y", 2)))
		must(t, s.Accumulate("y", noise(t, s, "y", 3)))
	}
	px, py := Adam(0.1), AdamParams{LearningRate: 0.01, Beta1: 0.8, Beta2: 0.9, Eps: 1e-6, GradClipNorm: 3}
	set()
	idle := state(t, s, "idle")
	for name, p := range map[string]SlotParams{"x": {Params: px}, "y": {py, 2}} {
		r, err := s.Step(ctx, StepOptions{Params: p.Params, Scale: p.Scale, Slots: []string{name}})
		must(t, err)
		if len(r.Slots) != 1 {
			t.Errorf("stepped %v", r)
		}
	}
	alone = append(alone, state(t, s, "x"), state(t, s, "y"))
	set()
	r, err := s.Step(ctx, StepOptions{Params: px, PerSlot: map[string]SlotParams{"y": {py, 2}}})
	must(t, err)
	same(t, "x stepped with y", state(t, s, "x"), alone[0])
	same(t, "y stepped with x", state(t, s, "y"), alone[1])
	same(t, "a slot without gradients", state(t, s, "idle"), idle)
	if len(r.Slots) != 2 || r.Slots[0].ClipFactor == r.Slots[1].ClipFactor || r.Slots[1].LearningRate != 0.01 || !strings.Contains(r.String(), `"y": gradient norm`) {
		t.Errorf("report:\n%v", r)
	}
}

func TestNonFiniteNormOfOneSlotLeavesAllUnchangedAndSaysSo(t *testing.T) {
	for _, bad := range []float32{float32(math.NaN()), float32(math.Inf(1)), math.MaxFloat32} { // the last overflows when it is summed
		ranks(t, 2, func(rank int, s *Set) error {
			ctx := context.Background()
			before := map[string]map[string][]float32{}
			for _, name := range []string{"x", "y"} {
				if err := s.Create(ctx, name, Config{Rank: 2, Alpha: 2, Targets: []string{"q_proj"}}); err != nil {
					return err
				}
				before[name] = state(t, s, name)
				g := noise(t, s, name, 5)
				if name == "y" {
					g.F32()[3] = bad
				}
				if name == "y" || rank == 0 {
					if err := s.Accumulate(name, g); err != nil {
						return err
					}
				}
			}
			r, err := s.Step(ctx, StepOptions{Params: Adam(0.1)})
			if err != nil {
				return err
			}
			if r.Updated() || len(r.Slots) != 2 || r.Slots[0].Updated || r.Slots[1].Updated || math.IsInf(r.Slots[0].GradNorm, 0) || !math.IsInf(r.Slots[1].GradNorm, 0) && !math.IsNaN(r.Slots[1].GradNorm) {
				t.Errorf("rank %d: the report is\n%v", rank, r)
			}
			for name, b := range before {
				same(t, name, state(t, s, name), b)
				if in, _ := s.Info(name); in.Pending || in.Revision != 0 || in.Steps != 0 {
					t.Errorf("after a skipped step: %v", in)
				}
			}
			return nil
		})
	}
}

func TestStepIsRefusedOnAllRanksBeforeAnythingChanges(t *testing.T) {
	ctx := context.Background()
	adam := Adam(0.1)
	bad := adam
	bad.Beta2 = 1
	for _, c := range []struct {
		name    string
		options func(rank int) StepOptions
		slot    string
		text    string // of the SlotStateError, or of another error if plain
		plain   bool
	}{
		{"live graph elsewhere", func(int) StepOptions { return StepOptions{Params: adam, OnLiveGraphs: Error} }, "live", "are live", false},
		{"snapshot named", func(int) StepOptions { return StepOptions{Params: adam, Slots: []string{"snap"}} }, "snap", "snapshot", false},
		{"not loaded", func(int) StepOptions { return StepOptions{Params: adam, Slots: []string{"absent"}} }, "absent", "no checkpoint", false},
		{"no gradients", func(int) StepOptions { return StepOptions{Params: adam, Slots: []string{"idle"}} }, "idle", "no gradients", false},
		{"inference", func(int) StepOptions { return StepOptions{Params: adam, Slots: []string{"frozen"}} }, "frozen", "inference", false},
		{"base", func(int) StepOptions { return StepOptions{Params: adam, Slots: []string{""}} }, "", "not trained", false},
		{"nothing", func(int) StepOptions { return StepOptions{Params: adam, Slots: []string{}} }, "", "no slot has gradients", false},
		{"only on one rank", func(int) StepOptions { return StepOptions{Params: adam, Slots: []string{"lonely"}} }, "lonely", "do not have the same", false},
		{"options differ", func(rank int) StepOptions { return StepOptions{Params: Adam(float64(rank))} }, "", "different options", true},
		{"bad settings", func(rank int) StepOptions {
			if rank == 1 {
				return StepOptions{Params: bad}
			}
			return StepOptions{Params: adam}
		}, "", "beta2 of 1", true},
		{"no settings", func(int) StepOptions { return StepOptions{} }, "", "eps of 0", true},
		{"bad scale", func(int) StepOptions { return StepOptions{Params: adam, Scale: math.NaN()} }, "", "scaled by NaN", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			ranks(t, 2, func(rank int, s *Set) error {
				for _, name := range []string{"live", "idle"} {
					if err := s.Create(ctx, name, Config{Rank: 2, Alpha: 2, Targets: []string{"q_proj"}}); err != nil {
						return err
					}
				}
				if err := s.Load(ctx, "frozen", "testdata/golden/adapter", LoadOptions{Inference: true}); err != nil {
					return err
				}
				if _, err := s.Snapshot(ctx, "idle", "snap"); err != nil {
					return err
				}
				if rank == 0 {
					// What a program that lets one rank alone do something ends up with.
					sl, err := s.build(&plan{name: "lonely", adapter: s.slots["idle"].adapter, tensors: s.slots["idle"].main.tensors}, true)
					must(t, err)
					sl.pending = true
					s.slots["lonely"] = sl
				} else {
					l, err := s.Acquire("live")
					must(t, err)
					defer l.Release()
					must(t, s.Accumulate("live", noise(t, s, "live", 1)))
				}
				before := state(t, s, "live")
				_, err := s.Step(ctx, c.options(rank))
				switch {
				case !c.plain:
					refused(t, err, c.slot, c.text)
				case err == nil || !strings.Contains(err.Error(), c.text):
					t.Errorf("rank %d: error %v, want %q", rank, err, c.text)
				}
				same(t, "the slot", state(t, s, "live"), before)
				return nil
			})
		})
	}
}

// #799 of the reference: a retained forward that adds nothing to the loss must not block the step.
func TestStepWithLiveGraphsIsAllowedAndMakesTheirLeasesStale(t *testing.T) {
	ctx := context.Background()
	s := newSet(t, tiny, 1<<26, Options{})
	must(t, s.Create(ctx, "x", Config{Rank: 2, Alpha: 2, Targets: []string{"q_proj"}}))
	l, err := s.Acquire("x")
	must(t, err)
	defer l.Release()
	must(t, s.Accumulate("x", noise(t, s, "x", 1)))
	_, err = s.Step(ctx, StepOptions{Params: Adam(1), OnLiveGraphs: Error})
	refused(t, err, "x", "live")
	if l.Stale() {
		t.Error("a refused step made the lease stale")
	}
	_, err = s.Step(ctx, StepOptions{Params: Adam(1)})
	must(t, err)
	if !l.Stale() {
		t.Error("a lease from before the step is not stale")
	}
	_, err = s.Step(ctx, StepOptions{Params: Adam(1)})
	refused(t, err, "", "no slot has gradients")
}

// breaking is a world whose n-th sum fails, as when a rank is gone.
type breaking struct {
	collective.World
	n int
}

var errGone = errors.New("gone")

func (b *breaking) AllReduceFloat32(ctx context.Context, tag string, op collective.Op, v []float32) error {
	if b.n--; b.n == 0 {
		return errGone
	}
	return b.World.AllReduceFloat32(ctx, tag, op, v)
}

func TestStepThatIsCutShortChangesNoSlotAndDropsItsGradients(t *testing.T) {
	ctx := context.Background()
	for n := 1; n <= 3; n++ {
		s := newSet(t, tiny, 1<<26, Options{World: &breaking{collective.Solo{}, n}})
		before := map[string]map[string][]float32{}
		for _, name := range []string{"x", "y"} {
			must(t, s.Create(ctx, name, Config{Rank: 2, Alpha: 2, Targets: []string{"q_proj"}}))
			_, err := s.Parameter(ctx, name, "p", []int64{2}, nil)
			must(t, err)
			before[name] = state(t, s, name)
			must(t, s.Accumulate(name, noise(t, s, name, 1)))
		}
		if _, err := s.Step(ctx, StepOptions{Params: Adam(1)}); !errors.Is(err, errGone) {
			t.Errorf("sum %d: got %v", n, err)
		}
		for name, b := range before {
			same(t, name, state(t, s, name), b)
		}
		_, err := s.Step(ctx, StepOptions{Params: Adam(1)})
		refused(t, err, "", "no slot has gradients")
	}
	cancelled, cancel := context.WithCancel(ctx)
	cancel()
	s := newSet(t, tiny, 1<<26, Options{})
	must(t, s.Create(ctx, "x", Config{Rank: 2, Alpha: 2, Targets: []string{"q_proj"}}))
	must(t, s.Accumulate("x", noise(t, s, "x", 1)))
	before := state(t, s, "x")
	if _, err := s.Step(cancelled, StepOptions{Params: Adam(1)}); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	same(t, "a slot whose step had not begun", state(t, s, "x"), before)
}

func TestBaseModelIsASlotOnceItIsAdded(t *testing.T) {
	ctx := context.Background()
	for _, n := range []int{1, 2} {
		ranks(t, n, func(rank int, s *Set) error {
			params := device.MemOf(make([]byte, 256))
			for i := range params.F32() {
				params.F32()[i] = float32(i)
			}
			refused(t, s.Accumulate("", device.MemOf(make([]byte, 256))), "", "not trained")
			tensors := []Tensor{{Name: "a", Shape: []int64{3, 5}}, {Name: "b", Shape: []int64{7}, At: 64}}
			overlapping := []Tensor{{Name: "a", Shape: []int64{3, 6}}, {Name: "b", Shape: []int64{7}, At: 64}}
			if err := s.AddBase(ctx, params, overlapping); err == nil {
				t.Error("overlapping tensors are taken")
			}
			if err := s.AddBase(ctx, params, tensors); err != nil {
				return err
			}
			refused(t, s.AddBase(ctx, params, tensors), "", "already")
			g := device.MemOf(make([]byte, 256))
			for i := range g.F32() {
				g.F32()[i] = 1
			}
			if err := s.Accumulate("", g); err != nil {
				return err
			}
			l, err := s.Acquire("")
			must(t, err)
			_, err = s.Step(ctx, StepOptions{Params: AdamParams{LearningRate: 0.5, Eps: 1e-30}, OnLiveGraphs: Error})
			refused(t, err, "", "live")
			l.Release()
			r, err := s.Step(ctx, StepOptions{Params: AdamParams{LearningRate: 0.5, Eps: 1e-30}})
			if err != nil {
				return err
			}
			if len(r.Slots) != 1 || r.Slots[0].Name != "" || r.Slots[0].GradNorm != float64(n)*math.Sqrt(22) {
				t.Errorf("stepped %+v", r)
			}
			for i, w := range params.F32() {
				want := float32(i)
				if i < 15 || 16 <= i && i < 23 {
					want -= 0.5
				}
				if w != want {
					t.Errorf("element %d is %g, want %g", i, w, want)
				}
			}
			return nil
		})
	}
}

func TestVotesOfRanksDecideTheStep(t *testing.T) {
	on := func(name string, pending bool) slotVote { return slotVote{Name: name, Trained: true, Pending: pending} }
	got, err := choose([]vote{{Slots: []slotVote{on("b", false), on("a", true), on("c", false)}}, {Slots: []slotVote{on("a", false), on("b", true), on("c", false)}}}, &StepOptions{})
	if err != nil || !cmp.Equal(got, []string{"a", "b"}) {
		t.Errorf("chose %q, %v", got, err)
	}
	got, err = choose([]vote{{Slots: []slotVote{on("b", true), on("a", true)}}}, &StepOptions{Slots: []string{"b", "a", "b"}})
	if err != nil || !cmp.Equal(got, []string{"a", "b"}) {
		t.Errorf("chose %q, %v", got, err)
	}
}

func BenchmarkStep(b *testing.B) {
	const n = 16 << 20
	ctx := context.Background()
	s := newSet(b, tiny, 1<<30, Options{})
	must(b, s.Create(ctx, "x", Config{Rank: 1, Alpha: 1, Targets: []string{"q_proj"}}))
	p, err := s.Parameter(ctx, "x", "p", []int64{n}, nil)
	must(b, err)
	g := make([]float32, n)
	for i := range g {
		g[i] = float32(i%1001) - 500
	}
	b.SetBytes(n * 4)
	for b.Loop() {
		b.StopTimer()
		must(b, p.Accumulate(g))
		b.StartTimer()
		_, err := s.Step(ctx, StepOptions{Params: Adam(1e-3)})
		must(b, err)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/n, "ns/element")
}
