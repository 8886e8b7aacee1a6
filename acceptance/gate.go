package main

import (
	"fmt"
	"io"
	"text/tabwriter"
)

// Op is how what was observed must compare to its bound.
type Op string

// The comparisons.
const (
	Equal   Op = "=="
	AtMost  Op = "<="
	AtLeast Op = ">="
)

// Gate is one thing that must hold. All of them are numbers, so that a verdict is a comparison that anybody can repeat; what is yes or no is a
// count of the cases in which it is wrong, bound to 0. An arm reports numbers and no verdicts: those are given by [Gate.Holds] alone, in the process that prints them.
type Gate struct {
	Name     string `json:"name"`
	Op       Op     `json:"op"`
	Bound    int64  `json:"bound"`
	Observed int64  `json:"observed"`
	// Why says, of a gate that does not hold, what was seen first.
	Why string `json:"why,omitempty"`
}

// Holds says whether it does. A gate with an unknown comparison does not.
func (g Gate) Holds() bool {
	switch g.Op {
	case Equal:
		return g.Observed == g.Bound
	case AtMost:
		return g.Observed <= g.Bound
	case AtLeast:
		return g.Observed >= g.Bound
	}
	return false
}

// Verdict is a gate with its arm and whether it holds: a row of the table.
type Verdict struct {
	Arm string `json:"arm"`
	Gate
	Holds bool `json:"holds"`
}

// judge makes the verdicts on an arm. Beside the gates that it reported there are two of its own: that it ran to its end, and that
// it reported each of the gates that its kind must, so that a gate cannot be passed by leaving it out.
func judge(a *arm, r *Result) []Verdict {
	ended := Gate{Name: "ran to its end", Op: Equal, Bound: 1, Why: r.Error}
	if r.Error == "" {
		ended.Observed = 1
	}
	seen := make(map[string]bool)
	for _, g := range r.Gates {
		seen[g.Name] = true
	}
	all := Gate{Name: "gates reported", Op: Equal, Bound: int64(len(a.gates))}
	for _, name := range a.gates {
		if seen[name] {
			all.Observed++
		} else if all.Why == "" {
			all.Why = "missing: " + name
		}
	}
	var list []Verdict
	for _, g := range append([]Gate{ended, all}, r.Gates...) {
		list = append(list, Verdict{a.name, g, g.Holds()})
	}
	return list
}

// exitCode is 0 if there are gates and all hold, else 1.
func exitCode(list []Verdict) int {
	for _, v := range list {
		if !v.Holds {
			return exitFailed
		}
	}
	if len(list) == 0 {
		return exitFailed
	}
	return exitHolds
}

// printTable prints the verdicts, and a line below those that fail with what was seen.
func printTable(w io.Writer, list []Verdict) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "arm\tgate\tbound\tobserved\tverdict")
	last := ""
	for _, v := range list {
		name := v.Arm
		if name == last {
			name = ""
		}
		last = v.Arm
		fmt.Fprintf(t, "%s\t%s\t%s %d\t%d\t%s\n", name, v.Name, v.Op, v.Bound, v.Observed, v.word())
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, v := range list {
		if !v.Holds && v.Why != "" {
			fmt.Fprintf(w, "%s: %s: %s\n", v.Arm, v.Name, v.Why)
		}
	}
	failed := 0
	for _, v := range list {
		if !v.Holds {
			failed++
		}
	}
	_, err := fmt.Fprintf(w, "%d gates, %d hold, %d fail\n", len(list), len(list)-failed, failed)
	return err
}

func (v Verdict) word() string {
	if v.Holds {
		return "holds"
	}
	return "FAILS"
}

// tally counts the cases in which something is wrong, and keeps the first.
type tally struct {
	n   int64
	why string
}

// wrong notes a case if bad.
func (t *tally) wrong(bad bool, format string, args ...any) {
	if !bad {
		return
	}
	if t.n++; t.n == 1 {
		t.why = fmt.Sprintf(format, args...)
	}
}

// none is the gate that there are no cases.
func (t *tally) none(name string) Gate {
	return Gate{Name: name, Op: Equal, Bound: 0, Observed: t.n, Why: t.why}
}
