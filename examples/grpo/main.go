// Command grpo teaches the bundled arithmetic model sums of three small terms, of which it gets one in twelve right, by reinforcement learning: group-relative policy
// optimisation (Shao and others, 2024) of a LoRA adapter, on the CPU, inside a byte budget.
//
//	go run ./examples/grpo [--budget MIB] [--steps 300] [--seeds 3] [--threads N]
//
// Each step asks some questions, samples a group of answers to each, rewards those that are right, and a little those that are near, and pushes the probability of an answer up
// or down by how much better it is than its group. All sequences begin with the same prompt, and the answers of a group with the same question: the engine computes what they share once.
//
// It prints the learning curve, and a digest of every reward and loss: that is the same on any number of threads, and for any budget in which calls are run
// whole. A budget that forces splits, or activations to be computed again, changes only the order in which gradients are added.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward/kernel"
	"github.com/trainerrank/engine/forward/transformer"
	"github.com/trainerrank/engine/internal/builtin"
	"github.com/trainerrank/engine/slots"
	"github.com/trainerrank/engine/trainerrank"
)

// options are those of the command.
type options struct {
	budget    int64 // bytes of the arena: weights, adapter, optimizer, activations, all
	threads   int
	seed      uint64
	steps     int
	questions int // per step
	group     int // answers to each
	eval      int // questions of the test, before and after
	rate      float64
	rank      int
	save      string
}

func main() {
	if err := run(context.Background(), os.Args[1:], os.Stdout); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "grpo:", err)
		var advice interface{ Hint() string }
		if errors.As(err, &advice) && advice.Hint() != "" {
			fmt.Fprintln(os.Stderr, "hint:", advice.Hint())
		}
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, w io.Writer) error {
	var o options
	fs := flag.NewFlagSet("grpo", flag.ContinueOnError)
	mib := fs.Float64("budget", 64, "MiB of the arena, for weights, adapter, optimizer and activations")
	fs.IntVar(&o.threads, "threads", 0, "worker threads; 0: one per CPU")
	fs.Uint64Var(&o.seed, "seed", 1, "of the first run")
	seeds := fs.Int("seeds", 1, "runs, each with a seed of its own")
	fs.IntVar(&o.steps, "steps", 300, "updates")
	fs.IntVar(&o.questions, "questions", 16, "questions of a step")
	fs.IntVar(&o.group, "group", 16, "answers to each")
	fs.IntVar(&o.eval, "eval", 256, "questions of the test before and after")
	fs.Float64Var(&o.rate, "rate", 1e-3, "learning rate, which falls to nothing over the steps")
	fs.IntVar(&o.rank, "rank", 16, "rank of the adapter")
	fs.StringVar(&o.save, "save", "", "write the adapter of the last run to this folder, as PEFT reads it")
	if err := fs.Parse(args); err != nil {
		return err
	}
	if o.steps < 0 || o.questions < 1 || o.group < 2 || o.eval < 1 || *seeds < 1 || fs.NArg() > 0 {
		return errors.New("steps, questions, a group of at least 2, test questions and seeds must be positive, and nothing follows the flags")
	}
	if !(*mib > 0 && *mib < 1<<30) {
		return fmt.Errorf("a budget of %g MiB", *mib)
	}
	o.budget = int64(*mib * (1 << 20))
	var before, after float64
	for range *seeds {
		c, err := train(ctx, o, w)
		if err != nil {
			return err
		}
		before, after = before+c.before/float64(*seeds), after+c.after/float64(*seeds)
		o.seed++
	}
	fmt.Fprintf(w, "right answers, mean of %d: %.1f%% before, %.1f%% after\n", *seeds, 100*before, 100*after)
	return nil
}

// curve is what came of a run.
type curve struct {
	before, after float64 // share of right answers on the test
	digest        uint64
	splits        int // training calls that were not run whole
	again         int // training calls whose backward computed activations again
	peak          int64
}

// train is one run: a model, an adapter and a loop.
func train(ctx context.Context, o options, w io.Writer) (*curve, error) {
	backend, err := kernel.NewHost(o.threads)
	if err != nil {
		return nil, err
	}
	defer backend.Close()
	folder, err := builtin.Open("arith")
	if err != nil {
		return nil, err
	}
	model, err := transformer.OpenFS(folder, "arith", backend)
	if err != nil {
		return nil, err
	}
	defer model.Close()
	arena, err := device.NewHost(o.budget)
	if err != nil {
		return nil, err
	}
	if err := model.Place(arena); err != nil {
		return nil, err
	}
	if err := model.Load(ctx, 0, nil); err != nil {
		return nil, err
	}
	rank, err := trainerrank.New(model)
	if err != nil {
		return nil, err
	}
	defer rank.Close()
	if err := rank.CreateCheckpoint(ctx, policy, slots.Config{Rank: o.rank, Alpha: float64(2 * o.rank), TargetPattern: slots.AllLinear, Seed: o.seed}); err != nil {
		return nil, err
	}
	l := &loop{options: o, rank: rank, vocabulary: model.Spec().Vocabulary, tasks: newTasks(o.seed), curve: &curve{}}
	if l.prompt, err = prompt(folder); err != nil {
		return nil, err
	}
	if l.curve.before, err = l.test(ctx); err != nil {
		return nil, err
	}
	fmt.Fprintf(w, "seed %d, %d threads: %.1f%% right before\n", o.seed, backend.Threads(), 100*l.curve.before)
	start := time.Now()
	mean := 0.0
	for step := 1; step <= o.steps; step++ {
		s, err := l.step(ctx)
		if err != nil {
			return nil, fmt.Errorf("step %d: %w", step, err)
		}
		if mean += s.right; step%10 == 0 {
			fmt.Fprintf(w, "step %4d  right %5.1f%%  %5d tokens packed into %4d  subforwards %d, %s  peak %6.2f MiB  gradient norm %.3f\n",
				step, 10*mean, s.logical, s.packed, s.subforwards, s.retention, float64(s.peak)/(1<<20), s.norm)
			mean = 0
		}
	}
	if l.curve.after, err = l.test(ctx); err != nil {
		return nil, err
	}
	fmt.Fprintf(w, "seed %d: %.1f%% right after %d steps in %.0f s; digest %016x\n", o.seed, 100*l.curve.after, o.steps, time.Since(start).Seconds(), l.curve.digest)
	if o.save != "" {
		if err := rank.SaveCheckpoint(ctx, policy, o.save); err != nil {
			return nil, err
		}
	}
	return l.curve, nil
}
