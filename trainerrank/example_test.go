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
