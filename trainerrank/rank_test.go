package trainerrank_test

import (
	"context"
	"io/fs"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/forward/transformer"
	"github.com/trainerrank/engine/internal/golden"
	"github.com/trainerrank/engine/trainerrank"
)

// load opens a model and wraps it.
func load(t testing.TB, folder fs.FS, o golden.Options, opts ...trainerrank.Option) (*golden.Loaded, *trainerrank.TrainerRank) {
	t.Helper()
	m := golden.Load(t, folder, o)
	return m, wrap(t, m.Model, opts...)
}

func wrap(t testing.TB, m forward.Model, opts ...trainerrank.Option) *trainerrank.TrainerRank {
	t.Helper()
	rank, err := trainerrank.New(m, opts...)
	if err != nil {
		t.Fatal(err)
	}
	return rank
}

// score runs a call, copies the answers and releases the result.
func score(t testing.TB, rank *trainerrank.TrainerRank, in forward.Inputs, opts ...trainerrank.CallOption) ([]golden.Answer, trainerrank.Telemetry) {
	t.Helper()
	res, err := rank.DPRankForward(t.Context(), in, opts...)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Release()
	return golden.CopyAll(res.Outputs.Flat()), res.Telemetry
}

// state is what a call that failed, or a result that was released, must leave as it was.
type state struct {
	Allocated            int64
	InUse                device.Sizes
	Blocks, Reservations int
}

func stateOf(d device.Device) state {
	s := d.Stats()
	return state{s.Allocated, s.InUse, s.Blocks, s.Reservations}
}

// unchanged fails t if the device does not hold what it held.
func unchanged(t testing.TB, d device.Device, before state) {
	t.Helper()
	if diff := cmp.Diff(before, stateOf(d)); diff != "" {
		t.Errorf("counters before (-) and after (+):\n%s", diff)
	}
}

func nested(r *rand.Rand, inputs []forward.Input) forward.Inputs { return golden.Nested(r, inputs) }

// picked are the inputs with the given indices.
func picked(inputs []forward.Input, order []int) []forward.Input {
	list := make([]forward.Input, len(order))
	for i, k := range order {
		list[i] = inputs[k]
	}
	return list
}

func ascending(n int) []int {
	list := make([]int, n)
	for i := range list {
		list[i] = i
	}
	return list
}

func tokens(n int) []int32 {
	list := make([]int32, n)
	for i := range list {
		list[i] = int32(i % 50)
	}
	return list
}

func labels(n int) []int32 { return slices.Repeat([]int32{3}, n) }

// spy is a model whose calls are counted, looked at, and spoilt.
type spy struct {
	*transformer.Model
	forwards  atomic.Int64
	running   atomic.Int64
	before    func(ctx context.Context, b *forward.Batch)
	after     func(p *forward.Pass, err error) (*forward.Pass, error)
	price     func(f forward.Footprint) forward.Footprint
	rehearsal func() error // before each
}

func (s *spy) Forward(ctx context.Context, b *forward.Batch) (*forward.Pass, error) {
	s.forwards.Add(1)
	if s.running.Add(1) != 1 {
		panic("two calls at a time")
	}
	defer s.running.Add(-1)
	if s.before != nil {
		s.before(ctx, b)
	}
	p, err := s.Model.Forward(ctx, b)
	if s.after != nil {
		return s.after(p, err)
	}
	return p, err
}

func (s *spy) Rehearse(b *forward.Batch) (forward.Footprint, error) {
	if s.rehearsal != nil {
		if err := s.rehearsal(); err != nil {
			return forward.Footprint{}, err
		}
	}
	f, err := s.Model.Rehearse(b)
	if s.price != nil {
		f = s.price(f)
	}
	return f, err
}
