package trainerrank_test

import (
	"context"
	"fmt"
	"log"
	"math"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/forward/kernel"
	"github.com/trainerrank/engine/forward/transformer"
	"github.com/trainerrank/engine/internal/builtin"
	"github.com/trainerrank/engine/trainerrank"
)

// Score two answers to the same question with the built-in model. Its vocabulary is one token a character: the digits 0 to 9 are the tokens
// 3 to 12, "+" is 13, "=" is 16 and ";" is 19. For a folder of your own, use transformer.OpenFolder.
func Example() {
	ctx := context.Background()
	backend, err := kernel.NewHost(0) // a worker thread per CPU
	if err != nil {
		log.Fatal(err)
	}
	defer backend.Close()
	dev, err := device.NewHost(64 << 20) // an arena of 64 MiB for everything
	if err != nil {
		log.Fatal(err)
	}
	folder, err := builtin.Open("arith")
	if err != nil {
		log.Fatal(err)
	}
	model, err := transformer.OpenFS(folder, "arith", backend)
	if err != nil {
		log.Fatal(err)
	}
	defer model.Close()
	if err := model.Place(dev); err != nil {
		log.Fatal(err)
	}
	if err := model.Load(ctx, 0, nil); err != nil {
		log.Fatal(err)
	}
	rank, err := trainerrank.New(model)
	if err != nil {
		log.Fatal(err)
	}

	const skip = forward.IgnoreLabel
	right := forward.Input{ // <bos> 1 2 + 3 4 = 4 6 ;
		Tokens:  []int32{1, 4, 5, 13, 6, 7, 16, 7, 9, 19},
		Targets: []int32{skip, skip, skip, skip, skip, skip, 7, 9, 19, skip},
	}
	wrong := forward.Input{ // <bos> 1 2 + 3 4 = 4 7 ;
		Tokens:  []int32{1, 4, 5, 13, 6, 7, 16, 7, 10, 19},
		Targets: []int32{skip, skip, skip, skip, skip, skip, 7, 10, 19, skip},
	}
	res, err := rank.DPRankForward(ctx, forward.Many(right, wrong))
	if err != nil {
		log.Fatal(err)
	}
	defer res.Release()
	for i, o := range res.Outputs.Flat() {
		var sum float64
		for _, x := range o.TargetLogprobs.Data().([]float32) {
			sum += float64(x)
		}
		fmt.Printf("answer %d: probability %.3f\n", i, math.Exp(sum))
	}
	t := res.Telemetry
	fmt.Printf("%d tokens packed into %d; predicted peak was exact: %v\n", t.LogicalTokens, t.PackedTokens, t.PredictedPeakBytes == t.ObservedPeakBytes)
	// Output:
	// answer 0: probability 0.998
	// answer 1: probability 0.001
	// 20 tokens packed into 12; predicted peak was exact: true
}

// Score a list that does not fit at once: sums of two digits, right and wrong, in waves that do. On several ranks each would run its share of every wave.
func ExampleTrainerRank_ForwardMicroBatches() {
	ctx := context.Background()
	backend, err := kernel.NewHost(1) // what a wave needs depends on the number of threads
	if err != nil {
		log.Fatal(err)
	}
	defer backend.Close()
	dev, err := device.NewHost(64 << 20)
	if err != nil {
		log.Fatal(err)
	}
	folder, err := builtin.Open("arith")
	if err != nil {
		log.Fatal(err)
	}
	model, err := transformer.OpenFS(folder, "arith", backend)
	if err != nil {
		log.Fatal(err)
	}
	defer model.Close()
	if err := model.Place(dev); err != nil {
		log.Fatal(err)
	}
	if err := model.Load(ctx, 0, nil); err != nil {
		log.Fatal(err)
	}

	// An item is a question with its answers, which share it: <bos> a + b = s ; with s right, and one more.
	var items []forward.Inputs
	for a := int32(1); a <= 8; a++ {
		var answers []forward.Input
		for s := a + 1; s <= a+2; s++ {
			tokens := []int32{1, 3 + a, 13, 4, 16, 3 + s, 19}
			targets := []int32{-100, -100, -100, -100, 3 + s, 19, -100}
			if s > 9 {
				tokens, targets = []int32{1, 3 + a, 13, 4, 16, 4, 3 + s - 10, 19}, []int32{-100, -100, -100, -100, 4, 3 + s - 10, 19, -100}
			}
			answers = append(answers, forward.Input{Tokens: tokens, Targets: targets})
		}
		items = append(items, forward.Many(answers...))
	}

	// Not more memory than the first three items need.
	ample, err := trainerrank.New(model)
	if err != nil {
		log.Fatal(err)
	}
	plan, err := ample.Plan(ctx, forward.Nest(items[:3]...))
	if err != nil {
		log.Fatal(err)
	}
	rank, err := trainerrank.New(model, trainerrank.WithUsableBytes(plan.PredictedPeakBytes))
	if err != nil {
		log.Fatal(err)
	}
	right := 0
	for batch, err := range rank.ForwardMicroBatches(ctx, items) {
		if err != nil {
			log.Fatal(err)
		}
		for _, outputs := range batch.Outputs {
			var score [2]float64
			for i, o := range outputs.Flat() {
				for _, x := range o.TargetLogprobs.Data().([]float32) {
					score[i] += float64(x)
				}
			}
			if score[0] > score[1] {
				right++
			}
		}
		s := batch.Stats
		fmt.Printf("items %d to %d: %d tokens packed into %d; within the limit: %v\n", s.GlobalStart, s.GlobalStop-1, s.LogicalTokens, s.PackedTokens, s.RequiredBytes <= s.AvailableBytes)
		batch.Result.Release()
	}
	fmt.Printf("%d of %d are right\n", right, len(items))
	// Output:
	// items 0 to 2: 42 tokens packed into 25; within the limit: true
	// items 3 to 5: 42 tokens packed into 25; within the limit: true
	// items 6 to 7: 29 tokens packed into 18; within the limit: true
	// 8 of 8 are right
}
