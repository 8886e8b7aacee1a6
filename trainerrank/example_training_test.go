package trainerrank_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"path/filepath"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/forward/kernel"
	"github.com/trainerrank/engine/forward/transformer"
	"github.com/trainerrank/engine/internal/builtin"
	"github.com/trainerrank/engine/slots"
	"github.com/trainerrank/engine/trainerrank"
)

// Train an adapter and a value head together: the head is a parameter of the adapter's slot, which the caller multiplies with hidden states. It is to tell right sums from wrong ones. The
// gradient by the head the caller knows; that by the hidden states is what the engine goes on from.
func ExampleTrainerRank_OptimStep_valueHead() {
	ctx := context.Background()
	backend, err := kernel.NewHost(0)
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
	rank, err := trainerrank.New(model)
	if err != nil {
		log.Fatal(err)
	}
	defer rank.Close()

	if err := rank.CreateCheckpoint(ctx, "critic", slots.Config{Rank: 4, Alpha: 8, TargetPattern: slots.AllLinear, Seed: 1}); err != nil {
		log.Fatal(err)
	}
	width := model.Spec().Hidden
	head, err := rank.Checkpoints().Parameter(ctx, "critic", "value", []int64{int64(width)}, nil) // zeros
	if err != nil {
		log.Fatal(err)
	}

	// <bos> a + b = s ; with the right s and with a wrong one. The value is read off the last token's hidden state.
	var inputs []forward.Input
	var right []float32
	for a := int32(1); a <= 4; a++ {
		for b := int32(1); b <= 4; b++ {
			for _, s := range []int32{a + b, a + b - 1} {
				inputs = append(inputs, forward.Input{Tokens: []int32{1, 3 + a, 13, 3 + b, 16, 3 + s, 19}, HiddenStates: true})
				if s == a+b {
					right = append(right, 1)
				} else {
					right = append(right, 0)
				}
			}
		}
	}
	adam := slots.Adam(3e-3)
	adam.GradClipNorm = 1
	var first, last float32
	for step := range 40 {
		res, err := rank.DPRankForward(ctx, forward.Many(inputs...), trainerrank.WithCheckpoint(forward.Checkpoint("critic")), trainerrank.WithGradMode(forward.WithGrad))
		if err != nil {
			log.Fatal(err)
		}
		weights, err := head.Value()
		if err != nil {
			log.Fatal(err)
		}
		loss := float32(0) // mean of (value - right)^2
		byHead := make([]float32, width)
		grads := make([]forward.OutputGrad, len(inputs))
		for i, o := range res.Outputs.Flat() {
			states := o.HiddenStates.Data().([]float32)
			end := len(states) - width
			value := float32(0)
			for j, h := range states[end:] {
				value += weights[j] * h
			}
			off := value - right[i]
			loss += off * off / float32(len(inputs))
			byValue := 2 * off / float32(len(inputs))
			grads[i].HiddenStates = make([]float32, len(states))
			for j, h := range states[end:] {
				byHead[j] += byValue * h
				grads[i].HiddenStates[end+j] = byValue * weights[j]
			}
		}
		if err := res.Backward(ctx, grads); err != nil {
			log.Fatal(err)
		}
		res.Release()
		if err := head.Accumulate(byHead); err != nil {
			log.Fatal(err)
		}
		if _, err := rank.OptimStep(ctx, slots.StepOptions{Params: adam}); err != nil {
			log.Fatal(err)
		}
		if last = loss; step == 0 {
			first = loss
		}
	}
	fmt.Printf("mean square error: %.2f at first, below 0.15 at last: %v\n", first, last < 0.15)

	// The head is saved with the adapter, and PEFT reads the folder. What is loaded goes on with the same bits.
	dir, err := os.MkdirTemp("", "")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	if err := rank.SaveCheckpoint(ctx, "critic", filepath.Join(dir, "critic")); err != nil {
		log.Fatal(err)
	}
	if err := rank.LoadCheckpoint(ctx, "again", filepath.Join(dir, "critic")); err != nil {
		log.Fatal(err)
	}
	info, err := rank.Checkpoints().Info("again")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("revision", info.Revision, "with", info.Owned)
	// Output:
	// mean square error: 0.50 at first, below 0.15 at last: true
	// revision 40 with [value]
}
