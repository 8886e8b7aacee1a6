// Command split measures what it costs to run a call in several subforwards instead of whole.
//
//	go run ./bench/split --model DIR [--requests 16] [--tokens 512] [--shared 0] [--counts 2,4,8] [--threads N] [--rounds 5]
//
// The call is so many requests of so many tokens, of which the first --shared are the same in all, with a label for every position. For each
// count the smallest budget with which the engine takes no more subforwards is looked for, and then the call is run whole and in those
// budgets, in turns: each round runs all of them, in an order that turns round. A ratio is the median over the rounds of (seconds split / seconds whole in the same
// round); beside it stands the least seconds split over the least whole, which others on the machine disturb less. Answers are compared bit for bit; a time for other answers says nothing. The table is in Markdown.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"sort"
	"strconv"
	"strings"
	"time"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/forward/kernel"
	"github.com/trainerrank/engine/forward/transformer"
	"github.com/trainerrank/engine/trainerrank"
)

func main() {
	if err := run(context.Background(), os.Args[1:], os.Stdout); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "split:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, w io.Writer) error {
	fs := flag.NewFlagSet("split", flag.ContinueOnError)
	dir := fs.String("model", "", "model folder")
	requests := fs.Int("requests", 16, "requests of the call")
	tokens := fs.Int("tokens", 512, "tokens of each")
	shared := fs.Int("shared", 0, "of which so many, the first, are the same in all")
	counts := fs.String("counts", "2,4,8", "numbers of subforwards")
	threads := fs.Int("threads", runtime.GOMAXPROCS(0), "worker threads")
	rounds := fs.Int("rounds", 5, "rounds")
	if err := fs.Parse(args); err != nil {
		return err
	}
	if *shared < 0 || *shared >= *tokens || *requests < 2 || *rounds < 1 {
		return fmt.Errorf("%d requests of %d tokens, %d shared, %d rounds", *requests, *tokens, *shared, *rounds)
	}
	backend, err := kernel.NewHost(*threads)
	if err != nil {
		return err
	}
	defer backend.Close()
	m, err := transformer.OpenFolder(*dir, backend)
	if err != nil {
		return err
	}
	defer m.Close()
	in := call(m.Spec().Vocabulary, *requests, *tokens, *shared)
	whole, err := planned(ctx, m, in, math.MaxInt64)
	if err != nil {
		return err
	}
	dev, err := device.NewHost(m.WeightBytes() + whole.PredictedPeakBytes)
	if err != nil {
		return err
	}
	if err := m.Place(dev); err != nil {
		return err
	}
	if err := m.Load(ctx, 0, nil); err != nil {
		return err
	}
	var ways []*way
	for _, text := range append([]string{"1"}, strings.Split(*counts, ",")...) {
		k, err := strconv.Atoi(text)
		if err != nil {
			return err
		}
		a, err := budget(ctx, m, in, k, whole.PredictedPeakBytes)
		if err != nil {
			return err
		}
		rank, err := trainerrank.New(m, trainerrank.WithUsableBytes(a.PredictedPeakBytes))
		if err != nil {
			return err
		}
		ways = append(ways, &way{rank: rank, plan: a})
	}
	var want []float32
	for round := -1; round < *rounds; round++ { // the first is not counted: pages are touched for the first time
		for i := range ways {
			way := ways[i]
			if round%2 != 0 {
				way = ways[len(ways)-1-i]
			}
			start := time.Now()
			res, err := way.rank.DPRankForward(ctx, in)
			if err != nil {
				return err
			}
			took := time.Since(start)
			got := answers(res)
			res.Release()
			if want == nil {
				want = got
			}
			if !slices.Equal(want, got) {
				return fmt.Errorf("other answers in %d subforwards", res.Telemetry.SubforwardCount)
			}
			if round >= 0 {
				way.took = append(way.took, took)
				way.planning = append(way.planning, res.Telemetry.PlanningTime)
			}
		}
	}
	fmt.Fprintf(w, "%s, %s, %d threads, %d requests of %d tokens, %d of them shared, %d rounds\n\n", m.Spec().Name, backend.Name(), *threads, *requests, *tokens, *shared, *rounds)
	fmt.Fprintln(w, "| subforwards | bytes | packed tokens | seconds | to whole | fastest to fastest | packed to whole | time over tokens | planned in ms |\n|---|---|---|---|---|---|---|---|---|")
	for _, way := range ways {
		var ratios []float64
		for i := range way.took {
			ratios = append(ratios, way.took[i].Seconds()/ways[0].took[i].Seconds())
		}
		slices.Sort(ratios)
		packed := float64(way.plan.PackedTokens) / float64(whole.PackedTokens)
		fmt.Fprintf(w, "| %d | %d | %d | %.3f | **%.3f** (%.3f..%.3f) | %.3f | %.3f | %.3f | %.2f |\n", way.plan.SubforwardCount(), way.plan.PredictedPeakBytes, way.plan.PackedTokens,
			median(way.took).Seconds(), ratios[len(ratios)/2], ratios[0], ratios[len(ratios)-1], slices.Min(way.took).Seconds()/slices.Min(ways[0].took).Seconds(), packed, ratios[len(ratios)/2]/packed, median(way.planning).Seconds()*1e3)
	}
	return nil
}

// way is a budget and the times in it.
type way struct {
	rank           *trainerrank.TrainerRank
	plan           *trainerrank.Admission
	took, planning []time.Duration
}

// call is the requests. No two have a token in common where they may not.
func call(vocab, requests, tokens, shared int) forward.Inputs {
	r := rand.New(rand.NewPCG(1, 0x5917))
	list := make([]forward.Input, requests)
	common := make([]int32, shared)
	for i := range common {
		common[i] = int32(r.IntN(vocab))
	}
	for i := range list {
		row := append(make([]int32, 0, tokens), common...)
		row = append(row, int32(i%vocab))
		for len(row) < tokens {
			row = append(row, int32(r.IntN(vocab)))
		}
		list[i] = forward.Input{Tokens: row, Targets: append(slices.Clone(row[1:]), forward.IgnoreLabel)}
	}
	return forward.Many(list...)
}

// planned is the plan of a call on a device of its own, of which nothing is taken.
func planned(ctx context.Context, m forward.Model, in forward.Inputs, usable int64) (*trainerrank.Admission, error) {
	nowhere, err := device.NewHost(1 << 50)
	if err != nil {
		return nil, err
	}
	rank, err := trainerrank.New(m, trainerrank.WithDevice(nowhere), trainerrank.WithUsableBytes(usable))
	if err != nil {
		return nil, err
	}
	return rank.Plan(ctx, in)
}

// budget is the plan in the smallest number of bytes in which the call takes at most k subforwards.
func budget(ctx context.Context, m forward.Model, in forward.Inputs, k int, most int64) (*trainerrank.Admission, error) {
	var failed error
	pages := sort.Search(int(most/device.PageSize), func(pages int) bool {
		a, err := planned(ctx, m, in, int64(pages)*device.PageSize)
		if err != nil {
			failed = err
			return true
		}
		return a.Verdict != trainerrank.Refused && a.SubforwardCount() <= k
	})
	if failed != nil {
		return nil, failed
	}
	a, err := planned(ctx, m, in, int64(pages)*device.PageSize)
	if err == nil && (a.Verdict == trainerrank.Refused || a.SubforwardCount() != k) {
		err = fmt.Errorf("no budget takes %d subforwards: %d bytes take %d", k, a.UsableLimitBytes, a.SubforwardCount())
	}
	return a, err
}

// answers are the logprobs of all requests.
func answers(res *trainerrank.Result) []float32 {
	var list []float32
	for _, o := range res.Outputs.Flat() {
		list = append(list, o.TargetLogprobs.Data().([]float32)...)
	}
	return list
}

func median(list []time.Duration) time.Duration {
	sorted := slices.Sorted(slices.Values(list))
	return sorted[len(sorted)/2]
}
