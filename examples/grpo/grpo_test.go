package main

import (
	"bytes"
	"io"
	"strings"
	"testing"
)

// short is a run of few steps.
func short() options {
	return options{budget: 64 << 20, threads: 1, seed: 1, steps: 4, questions: 6, group: 6, eval: 32, rate: 1e-3, rank: 4}
}

func trained(t *testing.T, o options) *curve {
	t.Helper()
	c, err := train(t.Context(), o, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// The learning curve has the same bits on any number of threads.
func TestTheCurveDoesNotDependOnThreads(t *testing.T) {
	o := short()
	want := trained(t, o)
	for o.threads = 2; o.threads <= 3; o.threads++ {
		if got := trained(t, o); got.digest != want.digest {
			t.Errorf("digest %016x on %d threads, %016x on one", got.digest, o.threads, want.digest)
		}
	}
	o = short()
	if o.seed++; trained(t, o).digest == want.digest {
		t.Error("another seed has the same digest")
	}
}

// In a budget that forces splits, or activations to be computed again, training goes on inside it; in one that is too small it is refused.
func TestSmallBudgets(t *testing.T) {
	o := short()
	whole := trained(t, o)
	splits, again := 0, 0
	for _, kib := range []int64{4096, 3500, 3072, 2800} {
		o.budget = kib << 10
		c, err := train(t.Context(), o, io.Discard)
		if err != nil {
			if !strings.Contains(err.Error(), "bytes") {
				t.Errorf("%d KiB: %v", kib, err)
			}
			t.Logf("%d KiB: %v", kib, err)
			continue
		}
		if c.peak >= o.budget || c.peak > whole.peak {
			t.Errorf("%d KiB: a call took %d bytes, %d in an ample budget", kib, c.peak, whole.peak)
		}
		t.Logf("%d KiB: %d of %d calls split, %d with activations computed again", kib, c.splits, o.steps, c.again)
		splits, again = splits+c.splits, again+c.again
	}
	if splits == 0 || again == 0 {
		t.Errorf("%d calls split, %d with activations computed again", splits, again)
	}
}

// The policy learns: also where calls have to be split or activations computed again.
func TestItLearns(t *testing.T) {
	if testing.Short() {
		t.Skip("SKIPPED: trains for some ten seconds")
	}
	for _, mib := range []int64{64, 7} {
		o := options{budget: mib << 20, threads: 0, seed: 1, steps: 50, questions: 16, group: 16, eval: 256, rate: 1e-3, rank: 16}
		c := trained(t, o)
		t.Logf("%d MiB: %.1f%% right before, %.1f%% after %d steps; %d calls split, %d with activations computed again", mib, 100*c.before, 100*c.after, o.steps, c.splits, c.again)
		if !(c.after >= c.before+0.03) {
			t.Errorf("%d MiB: %.1f%% right before, %.1f%% after", mib, 100*c.before, 100*c.after)
		}
		if mib < 64 && c.splits+c.again == 0 {
			t.Errorf("%d MiB: every call was run whole", mib)
		}
	}
}

func TestTheCommand(t *testing.T) {
	var out bytes.Buffer
	dir := t.TempDir() + "/policy"
	if err := run(t.Context(), []string{"--steps", "1", "--questions", "2", "--group", "2", "--eval", "4", "--threads", "1", "--save", dir}, &out); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out.String(), "right answers, mean of 1:") {
		t.Errorf("%s", out.String())
	}
	for _, args := range [][]string{{"--steps", "-1"}, {"--group", "1"}, {"left over"}, {"--budget", "0.1"}} {
		if err := run(t.Context(), args, io.Discard); err == nil {
			t.Errorf("%v: no error", args)
		}
	}
}
