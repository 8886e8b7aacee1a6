package trainerrank

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/trainerrank/engine/collective"
	"github.com/trainerrank/engine/ladder"
)

// word is what a rank says where ranks meet.
type word struct {
	Outcome ladder.Outcome `json:"outcome"`
	Why     string         `json:"why,omitempty"`   // unless admitted
	Plan    string         `json:"plan,omitempty"`  // that was admitted: equal on peers
	Width   int            `json:"width,omitempty"` // of a wave: the widest that this rank can take
	Alone   bool           `json:"alone,omitempty"` // the smallest wave is to go alone
}

// say puts a rank's own error, or that it has none, into its word.
func (w *word) say(err error) {
	var refused *MemoryError
	switch {
	case err == nil:
		w.Outcome, w.Why = ladder.Admitted, ""
		return
	case errors.As(err, &refused) && !refused.Executing:
		w.Outcome = ladder.NoFit
	default:
		w.Outcome = ladder.Broken
	}
	w.Why = failure(err)
}

// meet is where ranks agree: peers always, and the others if wide. What one cannot do none does, and otherwise it returns what is true for all. Peers meet first, so that what
// one of them says reaches the others, and so the peers of these. A rank comes to every meeting of its call, whatever it has met with: the number of
// collectives does not depend on what only one rank knows.
func (t *TrainerRank) meet(ctx context.Context, tag string, mine word, err error, wide bool) (word, error) {
	mine.say(err)
	for _, stage := range []struct {
		ranks collective.World
		peers bool
	}{{t.peers, true}, {t.world, false}} {
		if stage.ranks.Size() == 1 || !stage.peers && !wide {
			continue
		}
		all, failed := exchange(ctx, stage.ranks, tag, mine)
		least := mine
		for i := range all {
			o := &all[i]
			least.Outcome, least.Width, least.Alone = min(least.Outcome, o.Outcome), min(least.Width, o.Width), least.Alone || o.Alone
		}
		whys := make([]string, len(all))
		for i := range all {
			if all[i].Outcome == least.Outcome {
				whys[i] = all[i].Why
			}
		}
		if failed != nil && !stage.peers {
			t.abandonPeers(failed)
		}
		err = told(err, failed, whys)
		for i := range all {
			if err == nil && stage.peers && all[i].Plan != all[0].Plan {
				err = &SharedInputsError{i, "the plan", all[0].Plan, all[i].Plan}
			}
		}
		mine = least
		if err != nil && mine.Outcome == ladder.Admitted { // nobody's own
			mine.Outcome = ladder.Broken
		}
		mine.Why = failure(err)
	}
	return mine, err
}

// abandonPeers ends the world of the peers because that of the other ranks has ended in a meeting. A peer meets other ranks: for it the meeting may
// have gone well, and then it goes on to where it would wait for this rank.
func (t *TrainerRank) abandonPeers(why error) {
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(why)
	if t.peers.Size() > 1 {
		_ = t.peers.Barrier(ctx, "forward/abandon") // a context that has ended ends the world
	}
}

// settle is the meeting about the plan of a call, and about its run, where a is nil.
func (t *TrainerRank) settle(ctx context.Context, c *call, a *Admission, err error) error {
	var mine word
	if err == nil && a != nil && t.peers.Size() > 1 {
		mine.Plan, err = a.digest()
	}
	all, other := t.meet(ctx, "forward/settle", mine, err, c.agree)
	if err == nil && a != nil && all.Outcome == ladder.NoFit {
		return fmt.Errorf("%w: %w", c.refusedElsewhere(a), other)
	}
	return other
}

// exchange is one collective in which each rank says something, and hears what each has said, by rank.
func exchange[T any](ctx context.Context, w collective.World, tag string, mine T) ([]T, error) {
	text, err := json.Marshal(mine)
	if err != nil {
		return nil, fmt.Errorf("forward: %w", err)
	}
	texts, err := w.AllGather(ctx, tag, text)
	if err != nil {
		return nil, fmt.Errorf("forward: %w", err)
	}
	all := make([]T, len(texts))
	for rank, text := range texts {
		if err := json.Unmarshal(text, &all[rank]); err != nil {
			return nil, fmt.Errorf("forward: what rank %d says: %w", rank, err)
		}
	}
	return all, nil
}

// failure is an error as it travels: its text, which is not empty.
func failure(err error) string {
	if err == nil {
		return ""
	}
	if text := err.Error(); text != "" {
		return text
	}
	return "an error without a text"
}

// told is the outcome of a collective for this rank: its own error, that of the collective, or why the lowest rank that failed has done so.
func told(own, failed error, whys []string) error {
	switch {
	case own != nil && failed != nil && !errors.Is(failed, collective.ErrUnusable): // which says why it has ended, and that is own, or has been said before
		return errors.Join(own, failed)
	case own != nil:
		return own
	case failed != nil:
		return failed
	}
	for rank, why := range whys {
		if why != "" {
			return fmt.Errorf("forward: on another rank: %w", &collective.PeerError{Rank: rank, Text: why})
		}
	}
	return nil
}
