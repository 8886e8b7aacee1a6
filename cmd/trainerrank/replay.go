package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"

	"github.com/trainerrank/engine/trainerrank"
)

// writeRecord writes the record of the plan, if a file is named for it: before anything runs, so that it is there whatever becomes of the call.
func (s *session) writeRecord(ctx context.Context) error {
	if s.record == "" {
		return nil
	}
	if err := s.write(ctx, s.planned); err != nil {
		return err
	}
	if recorded := s.planned.Admission().Verdict; recorded != s.admit.Verdict {
		fmt.Fprintf(s.stderr, "note: the record is of the call alone, which would fit (%s), but %s\n", recorded, s.noRoom())
	}
	return nil
}

// writeMiss writes the record again if the call took more than was predicted, with what was observed.
func (s *session) writeMiss(ctx context.Context) error {
	if s.missed == nil {
		return nil
	}
	o := s.missed.Observed()
	fmt.Fprintf(s.stderr, "note: the call took more than was predicted: %s\n", took(o, s.missed.Admission()))
	return s.write(ctx, s.missed)
}

// took says what a call took.
func took(o *trainerrank.Observed, a *trainerrank.Admission) string {
	if o.RanOut {
		return fmt.Sprintf("%d bytes, and then it ran out of memory (%d of %s done)", o.PeakBytes, o.Completed, count(a.SubforwardCount(), "subforward"))
	}
	return fmt.Sprintf("%d bytes, %d more", o.PeakBytes, o.PeakBytes-a.PredictedPeakBytes)
}

func (s *session) write(ctx context.Context, r *trainerrank.Record) error {
	err := writeFile(ctx, s.record, func(w io.Writer) error {
		_, err := w.Write(r.Save())
		return err
	})
	if err != nil {
		return &fileError{s.verb + ": " + writingRecord, s.record, err}
	}
	return nil
}

// replayed is what plan --replay --json prints.
type replayed struct {
	Same       bool                    `json:"same"`
	Difference *trainerrank.Difference `json:"difference"` // null if there is none
	Recorded   *trainerrank.Admission  `json:"recorded"`
	Recomputed *trainerrank.Admission  `json:"recomputed"`
	Observed   *trainerrank.Observed   `json:"observed,omitempty"` // if it was more than predicted
}

// replay answers the question of a record again, and fails if the answer is another one.
func (t *tool) replay(ctx context.Context, o *options) error {
	text, err := await(ctx, func() ([]byte, error) { return os.ReadFile(o.replay) })
	if err != nil {
		return &fileError{"plan: read the record", o.replay, err}
	}
	record, err := trainerrank.ReadRecord(text)
	if err != nil {
		return &hinted{fmt.Errorf("plan: read the record %s: %w", o.replay, err), "give a file that score or plan wrote for --record"}
	}
	r := replayed{Recorded: record.Admission(), Observed: record.Observed()}
	if r.Recomputed, r.Difference, err = record.Replay(ctx); err != nil {
		return &hinted{fmt.Errorf("plan: %s: %w", o.replay, err), "another version of the engine may have written the record"}
	}
	r.Same = r.Difference == nil
	if o.json {
		e := json.NewEncoder(t.stdout)
		e.SetIndent("", "  ")
		err = e.Encode(&r)
	} else {
		err = r.print(t.stdout)
	}
	if err == nil && !r.Same {
		err = &hinted{fmt.Errorf("plan: %s: the answer is another one here: %v", o.replay, r.Difference), "another version of the engine wrote the record, or somebody changed it"}
	}
	return err
}

func (r *replayed) print(out io.Writer) error {
	line := func(a *trainerrank.Admission) string {
		text, _, _ := strings.Cut(a.String(), "\n")
		if a.Verdict == trainerrank.Refused {
			text += fmt.Sprintf("; %d bytes would do, the first %d requests fit", a.SmallestBudgetBytes, a.LargestPrefix)
		}
		return text
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "recorded\t%s\n", line(r.Recorded))
	fmt.Fprintf(w, "recomputed\t%s\n", line(r.Recomputed))
	if r.Same {
		fmt.Fprint(w, "same\tyes, to the byte\n")
	} else {
		fmt.Fprintf(w, "same\tno: %v\n", r.Difference)
	}
	if r.Observed != nil {
		fmt.Fprintf(w, "observed\t%s\n", took(r.Observed, r.Recorded))
	}
	return w.Flush()
}
