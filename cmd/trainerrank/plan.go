package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"text/tabwriter"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/trainerrank"
)

// plan says what score would do, and runs nothing.
func (t *tool) plan(ctx context.Context, args []string) error {
	o, err := t.flags("plan", args)
	if err != nil {
		return err
	}
	if o.replay != "" {
		return t.replay(ctx, o)
	}
	s, err := t.open(ctx, "plan", o)
	if err != nil {
		return err
	}
	defer s.close()
	s.notes()
	if s.json {
		e := json.NewEncoder(t.stdout)
		e.SetIndent("", "  ")
		err = e.Encode(s.admit)
	} else {
		err = s.printPlan()
	}
	if s.admit.Verdict == trainerrank.Refused {
		err = errors.Join(err, s.refusal())
	}
	return errors.Join(err, s.writeSummary(ctx))
}

func (s *session) printPlan() error {
	a := s.admit
	w := tabwriter.NewWriter(s.stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "verdict\t%s\n", a.Verdict)
	if n := a.SubforwardCount(); n > 1 {
		fmt.Fprintf(w, "subforwards\t%d\n", n)
	}
	fmt.Fprintf(w, "requests\t%d\n", len(s.reqs))
	fmt.Fprintf(w, "tokens\t%d logical, %d packed\n", a.LogicalTokens, a.PackedTokens)
	for _, l := range a.Layout {
		fmt.Fprintf(w, "layout\t%s, %d shared, depth %d\n", count(len(l.Spans), "segment"), len(l.Decisions), l.Depth)
	}
	fmt.Fprintf(w, "weights\t%s\n", showSize(s.sum.WeightsBytes))
	for p, n := range s.held() {
		switch {
		case n == 0:
		case device.Purpose(p) == device.Adapters:
			fmt.Fprintf(w, "%s\t%s: %s\n", device.Adapters, showSize(n), s.adapterNames())
		default:
			fmt.Fprintf(w, "%s\t%s\n", device.Purpose(p), showSize(n))
		}
	}
	if rest := s.held().Total(); s.staging > rest {
		fmt.Fprintf(w, "in flight\t%s while loading, more than the call needs\n", showSize(s.staging))
	}
	if s.grad {
		fmt.Fprintf(w, "retention\t%s\n", a.Retention)
	}
	fmt.Fprintf(w, "predicted peak\t%s, %s\n", showSize(a.PredictedPeakBytes), a.Basis)
	fmt.Fprintf(w, "usable\t%s\n", showSize(a.UsableLimitBytes))
	if err := w.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(s.stdout)
	return s.printRungs(s.stdout)
}

// printRungs is a table of what was tried: how many subforwards, laid out how, keeping what if that was tried several ways, and what that needs, weights and adapters included.
func (s *session) printRungs(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	rungs := s.admit.Rungs
	several := slices.ContainsFunc(rungs, func(r trainerrank.Rung) bool { return r.Retention != rungs[0].Retention })
	column := func(text string) string {
		if several {
			return text + "\t"
		}
		return ""
	}
	if len(rungs) > 0 {
		fmt.Fprintf(w, "subforwards\tlayout\t%sneeds\n", column("retention"))
	}
	for i := range rungs {
		r := &rungs[i]
		if i > 0 { // both layouts are tried, also if they are the same
			if p := &rungs[i-1]; p.TotalBytes == r.TotalBytes && p.Retention == r.Retention && slices.EqualFunc(p.Chunks, r.Chunks, slices.Equal) {
				continue
			}
		}
		layout, verdict, least := string(r.Layout), "fits", ""
		if layout == "" {
			layout, least = "any", "at least "
		}
		if over := r.TotalBytes - s.admit.UsableLimitBytes; over > 0 {
			verdict = fmt.Sprintf("%d too many", over)
		}
		fmt.Fprintf(w, "%d\t%s\t%s%s%d bytes: %s\n", r.Count, layout, column(string(r.Retention)), least, r.TotalBytes, verdict)
	}
	return w.Flush()
}
