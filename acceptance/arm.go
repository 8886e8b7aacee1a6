package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"time"

	"github.com/trainerrank/engine/forward/prefixtree"
	"github.com/trainerrank/engine/internal/failpoint"
)

// The kinds of pressure: a cap by the test hooks, or live memory.
const (
	pressureCap     = "cap"
	pressureBallast = "ballast"
)

// armFlag in front of an arm's name and its configuration makes the command be that arm.
const armFlag = "--arm"

// armLimit is how long an arm may take: many times what the longest needs, so that one that hangs is a failed gate.
const armLimit = 2 * time.Hour

// The variables of the test hooks, see trainerrank.
const (
	hooksVariable  = "ART_TRAINER_RANK_TEST_HOOKS"
	limitVariable  = "ART_TRAINER_RANK_TEST_MEMORY_LIMIT_BYTES"
	anchorVariable = "ART_TRAINER_RANK_TEST_ANCHOR"
)

// arm is one part of a phase.
type arm struct {
	name     string
	phase    string
	pressure string // of an arm that is only run under one
	what     string
	gates    []string // that it must report
	run      func(b *bench) error
}

// Result is what the process of an arm reports.
type Result struct {
	Arm     string   `json:"arm"`
	Gates   []Gate   `json:"gates"`
	Notes   []string `json:"notes"`
	Error   string   `json:"error,omitempty"`
	Trace   Trace    `json:"trace"`
	Seconds float64  `json:"seconds"`
	// Tables are the cost tables that were fitted.
	Tables []prefixtree.Table `json:"tables,omitempty"`
}

// phases lists the phases of some arms, in the order in which they are run.
func phases(arms []arm) []string {
	var list []string
	for i := range arms {
		if !slices.Contains(list, arms[i].phase) {
			list = append(list, arms[i].phase)
		}
	}
	return list
}

func (a *arm) selected(c *config) bool {
	return (c.Phase == "all" && a.phase != phaseCalibrate || c.Phase == a.phase) && (a.pressure == "" || c.Pressure == "both" || c.Pressure == a.pressure)
}

// startArm runs an arm in a process of its own. Whatever goes wrong with that is in the result.
func startArm(ctx context.Context, a *arm, c *config, stderr io.Writer) *Result {
	failed := func(err error) *Result { return &Result{Arm: a.name, Error: err.Error()} }
	self, err := os.Executable()
	if err != nil {
		return failed(err)
	}
	given, err := json.Marshal(c)
	if err != nil {
		return failed(err)
	}
	ctx, cancel := context.WithTimeout(ctx, armLimit)
	defer cancel()
	var out bytes.Buffer
	cmd := exec.CommandContext(ctx, self, armFlag, a.name, string(given))
	cmd.Stdout, cmd.Stderr = &out, stderr
	// The hooks are on in the arms that need them, and off in the others whatever the caller's environment says; so are fail-points.
	cmd.Env = append(os.Environ(), hooksVariable+"=", limitVariable+"=", anchorVariable+"=", failpoint.Variable+"="+armedPoints[a.name])
	if a.pressure == pressureCap {
		cmd.Env = append(cmd.Env, hooksVariable+"=1")
	}
	if err := cmd.Run(); err != nil {
		return failed(errors.Join(fmt.Errorf("the process of the arm: %w", err), ctx.Err()))
	}
	r := new(Result)
	if err := json.Unmarshal(out.Bytes(), r); err != nil {
		return failed(fmt.Errorf("the report of the arm: %w", err))
	}
	if r.Arm != a.name {
		return failed(fmt.Errorf("the arm reported as %q", r.Arm))
	}
	return r
}

// runArm is the process of an arm. It exits with 0 if it could report, whatever it reports.
func runArm(ctx context.Context, name, given string, stdout, stderr io.Writer) int {
	arms := slices.Concat(arms, learnedArms)
	i := slices.IndexFunc(arms, func(a arm) bool { return a.name == name })
	if i < 0 {
		fmt.Fprintf(stderr, "acceptance: unknown arm %q\n", name)
		return exitUsage
	}
	var c config
	if err := json.Unmarshal([]byte(given), &c); err != nil {
		fmt.Fprintln(stderr, "acceptance:", err)
		return exitUsage
	}
	if err := json.NewEncoder(stdout).Encode(runHere(ctx, &arms[i], &c)); err != nil {
		fmt.Fprintln(stderr, "acceptance:", err)
		return exitFailed
	}
	return exitHolds
}

// runHere runs an arm in this process.
func runHere(ctx context.Context, a *arm, c *config) *Result {
	start := time.Now()
	b := newBench(ctx, c)
	err := a.run(b)
	r := &Result{Arm: a.name, Gates: b.gates, Notes: b.notes, Trace: b.trace, Tables: b.tables}
	if err = errors.Join(err, b.close()); err != nil {
		r.Error = err.Error()
	}
	r.Seconds = time.Since(start).Seconds()
	return r
}
