package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"unicode/utf8"

	"github.com/trainerrank/engine/device"
)

// The test binary is the command where it is started again as an arm.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == armFlag {
		main()
	}
	os.Exit(m.Run())
}

// small is a run that takes seconds.
var small = []string{"--short", "--tokens", "64", "--requests", "6"}

// output is what --json prints.
type output struct {
	Holds bool      `json:"holds"`
	Gates []Verdict `json:"gates"`
}

// whole is a run of the command with all arms of a pricing.
type whole struct {
	code           int
	stdout, stderr string
	timed          string // what the phase whose gates are times prints
	page           []byte
	output
}

// allArms is a function that runs all arms of a pricing once for all tests, each in a process of its own.
func allArms(args ...string) func() (whole, error) {
	return sync.OnceValues(func() (run whole, err error) {
		dir, err := os.MkdirTemp("", "acceptance-test-")
		if err != nil {
			return run, err
		}
		defer os.RemoveAll(dir)
		file := filepath.Join(dir, "out.html")
		var stdout, stderr bytes.Buffer
		run.code = runMain(slices.Concat([]string{"--json", "--report", file}, small, args), &stdout, &stderr)
		run.stdout, run.stderr = stdout.String(), stderr.String()
		if err := json.Unmarshal(stdout.Bytes(), &run.output); err != nil {
			return run, err
		}
		run.page, err = os.ReadFile(file)
		return run, err
	})
}

var (
	once        = sync.OnceValues(allArmsAndTimes)
	onceLearned = allArms("--pricing", "learned", "--threads", "1") // with more threads the workload is larger
)

// allArmsAndTimes runs the phase whose gates are times too. What a clock says is not for a test: those gates are taken to hold.
func allArmsAndTimes() (whole, error) {
	run, err := allArms()()
	if err != nil {
		return run, err
	}
	var stdout, stderr bytes.Buffer
	var timed output
	runMain(append([]string{"--json", "--phase", phaseCalibrate, "--threads", "1"}, small...), &stdout, &stderr)
	run.timed = stdout.String()
	if err := json.Unmarshal(stdout.Bytes(), &timed); err != nil {
		return run, err
	}
	for _, v := range timed.Gates {
		if v.Name == gatePairs || v.Name == gateOrdered || v.Name == gateRegret {
			v.Observed, v.Holds = v.Bound, true
		}
		run.Gates, run.Holds = append(run.Gates, v), run.Holds && v.Holds
	}
	return run, nil
}

// pricings are the arms of each, with a run of them.
func pricings() map[string]struct {
	arms []arm
	run  func() (whole, error)
} {
	return map[string]struct {
		arms []arm
		run  func() (whole, error)
	}{pricingExact: {arms, once}, pricingLearned: {learnedArms, onceLearned}}
}

func TestEveryGateHolds(t *testing.T) {
	for name, p := range pricings() {
		t.Run(name, func(t *testing.T) { everyGateHolds(t, p.arms, p.run) })
	}
}

func everyGateHolds(t *testing.T, arms []arm, run func() (whole, error)) {
	r, err := run()
	if err != nil {
		t.Fatalf("%v\n%s", err, r.stderr)
	}
	var table strings.Builder
	if err := printTable(&table, r.Gates); err != nil {
		t.Fatal(err)
	}
	if r.code != exitHolds || !r.Holds {
		t.Errorf("exit code %d\n%s", r.code, table.String())
	}
	for i := range arms {
		a := &arms[i]
		for _, name := range append([]string{"ran to its end", "gates reported"}, a.gates...) {
			if !slices.ContainsFunc(r.Gates, func(v Verdict) bool { return v.Arm == a.name && v.Name == name }) {
				t.Errorf("%s did not report %q", a.name, name)
			}
		}
	}
}

// Every gate of a real run can fail: with an observation on the wrong side of its bound it alone fails, and so does the command.
func TestEveryGateCanFail(t *testing.T) {
	for name, p := range pricings() {
		t.Run(name, func(t *testing.T) { everyGateCanFail(t, p.arms, p.run) })
	}
}

func everyGateCanFail(t *testing.T, arms []arm, run func() (whole, error)) {
	r, err := run()
	if err != nil {
		t.Fatalf("%v\n%s", err, r.stderr)
	}
	for i := range arms {
		a := &arms[i]
		real := &Result{Arm: a.name}
		for _, v := range r.Gates {
			if v.Arm == a.name {
				real.Gates = append(real.Gates, v.Gate)
			}
		}
		real.Gates = real.Gates[2:] // its own, without those about the arm
		if code := exitCode(judge(a, real)); code != exitHolds {
			t.Fatalf("%s: what it reported is judged with %d", a.name, code)
		}
		for g := range real.Gates {
			broken := *real
			broken.Gates = slices.Clone(real.Gates)
			gate := &broken.Gates[g]
			switch gate.Op {
			case Equal:
				gate.Observed = gate.Bound + 1
			case AtMost:
				gate.Observed = gate.Bound + 1
			case AtLeast:
				gate.Observed = gate.Bound - 1
			}
			list := judge(a, &broken)
			failed := 0
			for _, v := range list {
				if !v.Holds {
					failed++
				}
			}
			if failed != 1 || list[g+2].Holds || exitCode(list) != exitFailed {
				t.Errorf("%s: %+v: %d fail, exit code %d", a.name, *gate, failed, exitCode(list))
			}
		}
		for _, name := range a.gates { // leaving a gate out is no way to pass it
			silent := *real
			silent.Gates = slices.DeleteFunc(slices.Clone(real.Gates), func(g Gate) bool { return g.Name == name })
			if exitCode(judge(a, &silent)) != exitFailed {
				t.Errorf("%s: without %q it passes", a.name, name)
			}
		}
		if exitCode(judge(a, &Result{Arm: a.name, Gates: real.Gates, Error: "it broke"})) != exitFailed {
			t.Errorf("%s: an arm that broke passes", a.name)
		}
	}
	if exitCode(nil) != exitFailed {
		t.Error("no gates at all pass")
	}
}

func TestGateCompares(t *testing.T) {
	for _, c := range []struct {
		op              Op
		bound, observed int64
		holds           bool
	}{
		{Equal, 5, 5, true}, {Equal, 5, 4, false}, {Equal, 5, 6, false}, {AtMost, 5, 5, true}, {AtMost, 5, 6, false},
		{AtLeast, 5, 5, true}, {AtLeast, 5, 4, false}, {"", 5, 5, false}, {"<", 5, 4, false},
	} {
		if g := (Gate{Op: c.op, Bound: c.bound, Observed: c.observed}); g.Holds() != c.holds {
			t.Errorf("%d %s %d: %v", c.observed, c.op, c.bound, g.Holds())
		}
	}
}

// The page is one file that refers to nothing else, and has a picture for each arm.
func TestReportIsSelfContained(t *testing.T) {
	r, err := once()
	if err != nil {
		t.Fatalf("%v\n%s", err, r.stderr)
	}
	checkPage(t, string(r.page))
	if !strings.Contains(string(r.page), "every gate holds") {
		t.Error("the page does not say that every gate holds")
	}
	if n := strings.Count(string(r.page), "<polygon"); n < 20 {
		t.Errorf("only %d areas are drawn", n)
	}
	for what, n := range map[string]int{">backward</text>": 8, ">plan</text>": 20, "</i>retained</span>": 1, "</i>ballast</span>": 1, "split into 2</text>": 4, ", replay</text>": 2} {
		if got := strings.Count(string(r.page), what); got < n {
			t.Errorf("the page has %q %d times, less than %d", what, got, n)
		}
	}
}

// checkPage checks that a page is well formed and refers to nothing.
func checkPage(t *testing.T, page string) {
	t.Helper()
	if !utf8.ValidString(page) {
		t.Error("not UTF-8")
	}
	for _, words := range []string{"http:", "https:", "//", "src=", "href=", "url(", "@import", "<script", "<link", "<iframe", "NaN", "Inf", "%!", "ZgotmplZ"} {
		if i := strings.Index(page, words); i >= 0 {
			t.Errorf("the page has %q: ...%s...", words, page[max(0, i-40):min(len(page), i+40)])
		}
	}
	for i := range arms {
		if a := &arms[i]; !a.selected(&config{Phase: "all", Pressure: "both"}) {
			continue
		}
		if !regexp.MustCompile(`<svg [^>]*role="img"><title>` + regexp.QuoteMeta(arms[i].name) + `: bytes over time</title>`).MatchString(page) {
			t.Errorf("no picture of %s", arms[i].name)
		}
	}
	// Every element that is opened is closed, in order.
	var open []string
	tags := regexp.MustCompile(`<(/?)([a-zA-Z][a-zA-Z0-9]*)((?:[^<>"]|"[^"]*")*?)(/?)>`)
	rest := tags.ReplaceAllString(page, "")
	if i := strings.IndexAny(strings.TrimPrefix(rest, "<!DOCTYPE html>"), "<"); i >= 0 {
		t.Error("a < that begins no element")
	}
	for _, m := range tags.FindAllStringSubmatch(page, -1) {
		switch name := strings.ToLower(m[2]); {
		case name == "meta" || m[4] == "/":
		case m[1] == "":
			open = append(open, name)
		case len(open) == 0 || open[len(open)-1] != name:
			t.Fatalf("</%s> closes %v", name, open)
		default:
			open = open[:len(open)-1]
		}
	}
	if len(open) > 0 {
		t.Errorf("not closed: %v", open)
	}
}

// A page about failures, and with text that is like markup, is a page too.
func TestReportOfFailures(t *testing.T) {
	var results []*Result
	var verdicts []Verdict
	for i := range arms {
		r := &Result{Arm: arms[i].name, Error: `<script>alert("&")</script>`, Notes: []string{"a < b & c"}}
		if i%2 == 0 {
			r.Trace.Calls = []CallTrace{
				{Title: "<b>", Verdict: "failed", Samples: []Sample{{}}},
				{Title: "refused", Refused: true, Admitted: 10, Usable: 1, Base: device.Sizes{5}, Samples: []Sample{{}, {Micros: 3}}},
			}
		}
		results = append(results, r)
		verdicts = append(verdicts, judge(&arms[i], r)...)
	}
	page, err := render(&config{Model: "<model>"}, results, verdicts)
	if err != nil {
		t.Fatal(err)
	}
	checkPage(t, string(page))
	if !strings.Contains(string(page), "gates fail") || !strings.Contains(string(page), "FAILS") {
		t.Error("the page does not say that gates fail")
	}
}

// What is not built is a usage error and no gate.
func TestUsage(t *testing.T) {
	for _, args := range [][]string{
		{"--pricing", "learned", "--phase", "load"}, {"--pricing", "guessed"}, {"--device", "cuda:0"}, {"--phase", "nothing"}, {"--table", "tables.json"},
		{"--pressure", "none"}, {"--requests", "1"}, {"--tokens", "2"}, {"--capacity", "-1"}, {"--capacity", "much"}, {"more"}, {"--unknown"},
	} {
		var stdout, stderr bytes.Buffer
		if code := runMain(args, &stdout, &stderr); code != exitUsage || stdout.Len() > 0 || stderr.Len() == 0 {
			t.Errorf("%v: exit code %d, %q", args, code, stderr.String())
		}
	}
	var stdout, stderr bytes.Buffer
	if code := runMain([]string{"--help"}, &stdout, &stderr); code != exitHolds || !strings.Contains(stderr.String(), "not built") {
		t.Errorf("--help: exit code %d, %q", code, stderr.String())
	}
}

// An arm that cannot run is a failed gate, and the command says why.
func TestArmThatCannotRunFails(t *testing.T) {
	var stdout, stderr bytes.Buffer
	code := runMain([]string{"--phase", "cold", "--model", filepath.Join(t.TempDir(), "missing")}, &stdout, &stderr)
	if code != exitFailed || !strings.Contains(stdout.String(), "FAILS") || !strings.Contains(stdout.String(), "missing") {
		t.Errorf("exit code %d\n%s", code, stdout.String())
	}
	stdout.Reset()
	if code := runMain([]string{"--phase", "cold", "--capacity", "1"}, &stdout, &stderr); code != exitFailed {
		t.Errorf("a capacity of one byte: exit code %d\n%s", code, stdout.String())
	}
}

// What a wrong refusal says is noticed.
func TestWording(t *testing.T) {
	for text, n := range map[string]int64{
		"unable to find a feasible split": 0, "Unable to find a feasible SPLIT": 0, "out of memory": 2, "unable to find a feasible split: infeasible": 1,
		"there is no feasible split": 2,
	} {
		if got := wording(sayError(text)).n; got != n {
			t.Errorf("%q: %d, not %d", text, got, n)
		}
	}
	if wording(nil).n == 0 {
		t.Error("no error at all says it right")
	}
}

type sayError string

func (e sayError) Error() string { return string(e) }

// Thinning keeps the peak, the order, and not too much.
func TestThinKeepsThePeak(t *testing.T) {
	all := make([]Sample, 12345)
	for i := range all {
		all[i].Micros = int64(i)
		all[i].InUse[device.Scratch] = int64(i*7919%10007) + 1
	}
	all[7001].InUse[device.Scratch] = 1 << 30
	list := thin(all)
	if len(list) > most || !slices.Contains(list, all[7001]) || list[0] != all[0] {
		t.Errorf("%d samples", len(list))
	}
	for i := 1; i < len(list); i++ {
		if list[i].Micros <= list[i-1].Micros {
			t.Fatalf("sample %d is not later than the one before", i)
		}
	}
}

func TestShowBytes(t *testing.T) {
	for n, want := range map[int64]string{0: "0", 999: "999", 1000: "1,000", 1234567: "1,234,567", -12: "-12", -1234: "-1,234", -123456: "-123,456"} {
		if got := showBytes(n); got != want {
			t.Errorf("%d: %s", n, got)
		}
	}
}

// runMain is run without a context of its own.
func runMain(args []string, stdout, stderr *bytes.Buffer) int {
	return run(context.Background(), args, stdout, stderr)
}
