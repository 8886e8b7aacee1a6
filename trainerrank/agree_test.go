package trainerrank_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/trainerrank/engine/collective"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/internal/golden"
	"github.com/trainerrank/engine/trainerrank"
)

// What goes wrong on one rank is an error on all and leaves nothing anywhere, and the next call of the same ranks works. Nobody waits for ever.
func TestRanksAgreeOnTheOutcome(t *testing.T) {
	const ranks, odd = 3, 1
	folder := golden.FS(t, "qwen2-tiny")
	good := forward.Many(forward.Input{Tokens: tokens(9), Targets: labels(9)})
	spoilt := errors.New("spoilt")
	for _, c := range []struct {
		name  string
		input forward.Inputs // of the odd rank
		limit int64          // of the odd rank; 0: none
		spoil bool           // the odd rank's forward fails
		fails bool
		own   func(err error) bool // what the odd rank's error must be
	}{
		{name: "all well", input: good},
		{name: "nothing on one rank", input: forward.Many()},
		{name: "nothing wanted on one rank", input: forward.Many(forward.Input{Tokens: tokens(3)})},
		{name: "refused on one rank", input: good, limit: 1, fails: true, own: func(err error) bool { var e *trainerrank.MemoryError; return errors.As(err, &e) }},
		{name: "wrong input on one rank", input: forward.Many(forward.Input{}), fails: true, own: func(err error) bool { var e *trainerrank.InputError; return errors.As(err, &e) }},
		{name: "failure on one rank", input: good, spoil: true, fails: true, own: func(err error) bool { return errors.Is(err, spoilt) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			models := make([]*golden.Loaded, ranks)
			for i := range models {
				models[i] = golden.Load(t, folder, golden.Options{})
			}
			want, _ := score(t, wrap(t, models[0].Model), good)
			var mu sync.Mutex // of t
			fail := func(format string, args ...any) {
				mu.Lock()
				defer mu.Unlock()
				t.Errorf(format, args...)
			}
			err := collective.Run(ranks, func(w collective.World) error {
				m := models[w.Rank()]
				model := &spy{Model: m.Model}
				opts := []trainerrank.Option{trainerrank.WithWorld(w)}
				in := good
				if w.Rank() == odd {
					in = c.input
					if c.spoil {
						model.after = func(p *forward.Pass, err error) (*forward.Pass, error) { return nil, spoilt }
					}
				}
				if w.Rank() == odd && c.limit > 0 {
					opts = append(opts, trainerrank.WithUsableBytes(c.limit))
				}
				rank, err := trainerrank.New(model, opts...)
				if err != nil {
					return err
				}
				before := stateOf(m.Host)
				res, err := rank.DPRankForward(context.Background(), in, trainerrank.AgreeAcrossRanks())
				switch {
				case (err != nil) != c.fails:
					return fmt.Errorf("rank %d: %v", w.Rank(), err)
				case err == nil:
					res.Release()
				case w.Rank() == odd && !c.own(err):
					fail("rank %d: %v", w.Rank(), err)
				case w.Rank() != odd:
					var peer *collective.PeerError
					if !errors.As(err, &peer) || peer.Rank != odd {
						fail("rank %d: %v", w.Rank(), err)
					}
				}
				if d := cmp.Diff(before, stateOf(m.Host)); d != "" {
					fail("rank %d: counters before (-) and after (+):\n%s", w.Rank(), d)
				}
				// The same ranks go on.
				again, err := trainerrank.New(m.Model, trainerrank.WithWorld(w))
				if err != nil {
					return err
				}
				res, err = again.DPRankForward(context.Background(), good, trainerrank.AgreeAcrossRanks())
				if err != nil {
					return err
				}
				defer res.Release()
				if d := cmp.Diff(want, golden.CopyAll(res.Outputs.Flat())); d != "" {
					fail("rank %d: %s", w.Rank(), d)
				}
				return nil
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
}
