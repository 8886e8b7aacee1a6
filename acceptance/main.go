// Command acceptance runs the public API under real memory pressure and says which of its promises hold.
//
//	go run ./acceptance [--phase all] [--pressure both] [--model DIR|builtin:NAME] [--requests N] [--tokens N] [--capacity BYTES]
//	                    [--threads N] [--short] [--json] [--report out.html] [--pricing exact|learned]
//	go run ./acceptance --phase cost-calibrate [--model DIR,DIR,...] [--table FILE] [--json]
//	go run -tags failpoints ./acceptance --phase faults
//
// Fail-points are places in the engine that a build tag makes fail; without it their arms are not in the command, which it says where it runs the others of
// their phase.
//
// Each arm runs in a fresh process, so that nothing that one has warmed up, allocated or leaked reaches another: the command starts itself
// again with the arm's name. An arm reports numbers; the verdicts on them are given here. What is printed is a table of gates: name, bound,
// observed, verdict. Exit codes: 0 every gate holds, 1 one does not, 2 usage.
//
// With --pricing learned the model's ability to rehearse is hidden, and the arms are those that depend on it.
//
// The phase cost-calibrate, whose gates are times, runs only if it is asked for.
//
// What needs another device is not built. It is listed by --help, and asking for it is a usage error: none passes as a gate.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/trainerrank/engine/forward/prefixtree"
	"github.com/trainerrank/engine/internal/builtin"
	"github.com/trainerrank/engine/internal/failpoint"
)

// The exit codes.
const (
	exitHolds  = 0
	exitFailed = 1
	exitUsage  = 2
)

// config is what the flags say. It travels to the process of an arm.
type config struct {
	Phase    string `json:"phase"`
	Pressure string `json:"pressure"`
	Pricing  string `json:"pricing"`
	Model    string `json:"model"`
	Requests int    `json:"requests"`
	Tokens   int    `json:"tokens"`
	Capacity int64  `json:"capacity"`
	Threads  int    `json:"threads"`
	Short    bool   `json:"short"`
	Table    string `json:"table,omitempty"` // of cost-calibrate
}

// The pricings.
const (
	pricingExact   = "exact"
	pricingLearned = "learned"
)

// arms are those of the pricing.
func (c *config) arms() []arm {
	if c.Pricing == pricingLearned {
		return learnedArms
	}
	return arms
}

const notBuilt = `
not built:
  --device cuda:N
`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// run is the command, and the process of one arm if the first argument says so.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	if len(args) == 3 && args[0] == armFlag {
		return runArm(ctx, args[1], args[2], stdout, stderr)
	}
	c := config{}
	var asJSON bool
	var report, dev string
	fs := flag.NewFlagSet("acceptance", flag.ContinueOnError)
	fs.SetOutput(stderr)
	fs.StringVar(&c.Phase, "phase", "all", "all, or one of: "+strings.Join(phases(arms), ", "))
	fs.StringVar(&c.Pressure, "pressure", "both", "of split-conversion: cap (test hooks), ballast (live memory), both")
	fs.StringVar(&c.Pricing, "pricing", pricingExact, "how calls are priced: exact, or learned (the model's ability to rehearse is hidden)")
	fs.StringVar(&c.Model, "model", "builtin:"+builtin.Default, "model folder, or builtin:NAME")
	fs.IntVar(&c.Requests, "requests", 8, "requests of a call")
	fs.IntVar(&c.Tokens, "tokens", 512, "tokens of each")
	fs.Func("capacity", "capacity of the host arena in bytes (default: weights, twice what the call needs, and 64 MiB)", func(s string) (err error) {
		c.Capacity, err = strconv.ParseInt(s, 10, 64)
		return err
	})
	fs.IntVar(&c.Threads, "threads", 0, "worker threads (default: one per usable CPU)")
	fs.BoolVar(&c.Short, "short", false, "fewer random calls and faults")
	fs.StringVar(&c.Table, "table", "", "of cost-calibrate: a file with a list of cost tables, of which the first is judged; none is fitted")
	fs.BoolVar(&asJSON, "json", false, "print the gates as JSON")
	fs.StringVar(&report, "report", "", "file for one self-contained page with pictures")
	fs.StringVar(&dev, "device", "host", "device: host")
	fs.Usage = func() {
		fmt.Fprintln(stderr, "usage: acceptance [flags]")
		fs.PrintDefaults()
		fmt.Fprintln(stderr, "\narms:")
		for _, a := range slices.Concat(arms, learnedArms) {
			fmt.Fprintf(stderr, "  %-40s %s\n", a.name, a.what)
		}
		if !failpoint.Enabled {
			fmt.Fprintln(stderr, "\nnot in this build:\n ", noFailpoints)
		}
		fmt.Fprint(stderr, notBuilt)
	}
	if err := fs.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return exitHolds
		}
		return exitUsage
	}
	usage := func(format string, args ...any) int {
		fmt.Fprintf(stderr, "acceptance: "+format+"\n", args...)
		return exitUsage
	}
	switch {
	case fs.NArg() > 0:
		return usage("unknown argument %q", fs.Arg(0))
	case c.Pricing != pricingExact && c.Pricing != pricingLearned:
		return usage("--pricing %q is not known: exact, learned", c.Pricing)
	case dev != "host":
		return usage("--device %q is not built yet\nhint: host is the only device so far", dev)
	case c.Phase != "all" && !slices.Contains(phases(arms), c.Phase):
		return usage("--phase %q is not built\nhint: all, or one of %s", c.Phase, strings.Join(phases(arms), ", "))
	case c.Phase != "all" && !slices.Contains(phases(c.arms()), c.Phase):
		return usage("--phase %q does not depend on --pricing\nhint: leave --pricing out, or take one of %s", c.Phase, strings.Join(phases(learnedArms), ", "))
	case c.Pressure != "both" && c.Pressure != pressureCap && c.Pressure != pressureBallast:
		return usage("--pressure %q is not known: cap, ballast, both", c.Pressure)
	case c.Requests < 2 || c.Requests > 1<<16 || c.Tokens < 8 || c.Tokens > 1<<24:
		return usage("--requests %d of --tokens %d each: at least 2 of 8", c.Requests, c.Tokens)
	case c.Table != "" && c.Phase != phaseCalibrate:
		return usage("--table is for --phase %s", phaseCalibrate)
	case c.Capacity < 0 || c.Threads < 0 || c.Threads > 1024:
		return usage("--capacity %d, --threads %d: neither may be negative", c.Capacity, c.Threads)
	}
	if c.Threads == 0 {
		c.Threads = runtime.GOMAXPROCS(0)
	}
	var results []*Result
	var verdicts []Verdict
	arms := c.arms()
	for i := range arms {
		a := &arms[i]
		if !a.selected(&c) {
			continue
		}
		fmt.Fprintf(stderr, "%s ...\n", a.name)
		r := startArm(ctx, a, &c, stderr)
		results = append(results, r)
		verdicts = append(verdicts, judge(a, r)...)
	}
	var err error
	if asJSON {
		e := json.NewEncoder(stdout)
		e.SetIndent("", "  ")
		err = e.Encode(struct {
			Config config    `json:"config"`
			Holds  bool      `json:"holds"`
			Gates  []Verdict `json:"gates"`
			Notes  []string  `json:"notes"`
			// Tables are the cost tables that were fitted, for trainerrank.WithCostTables.
			Tables []prefixtree.Table `json:"tables,omitempty"`
		}{c, exitCode(verdicts) == exitHolds, verdicts, notesOf(results), tablesOf(results)})
	} else {
		err = printTable(stdout, verdicts)
		for _, n := range notesOf(results) {
			fmt.Fprintln(stdout, n)
		}
	}
	if err == nil && report != "" {
		err = writeReport(report, &c, results, verdicts)
	}
	if err != nil {
		fmt.Fprintln(stderr, "acceptance:", err)
		return exitFailed
	}
	return exitCode(verdicts)
}

// tablesOf are the tables of all arms.
func tablesOf(results []*Result) []prefixtree.Table {
	var list []prefixtree.Table
	for _, r := range results {
		list = append(list, r.Tables...)
	}
	return list
}

// notesOf are the remarks of all arms.
func notesOf(results []*Result) []string {
	list := []string{}
	for _, r := range results {
		for _, n := range r.Notes {
			list = append(list, r.Arm+": "+n)
		}
	}
	if !failpoint.Enabled && slices.ContainsFunc(results, func(r *Result) bool { return r.Arm == "faults" }) {
		list = append(list, noFailpoints)
	}
	return list
}
