package slots_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"path/filepath"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/slots"
)

// A fresh adapter with a value head takes a step and is saved. The gradients are those that a model's backward, and the caller's own for the head, would give.
func Example() {
	ctx := context.Background()
	dev, err := device.NewHost(1 << 20)
	if err != nil {
		log.Fatal(err)
	}
	modules := []forward.Module{{Path: "model.layers.0.self_attn.q_proj", In: 8, Out: 8}}
	set := slots.New(modules, dev, slots.Options{BaseModel: "tiny"})
	defer set.Close()

	if err := set.Create(ctx, "policy", slots.Config{Rank: 2, Alpha: 4, Targets: []string{"q_proj"}, Seed: 1}); err != nil {
		log.Fatal(err)
	}
	head, err := set.Parameter(ctx, "policy", "value", []int64{8}, nil)
	if err != nil {
		log.Fatal(err)
	}

	lease, err := set.Acquire("policy")
	if err != nil {
		log.Fatal(err)
	}
	gradient := device.MemOf(make([]byte, lease.Adapter().Bytes))
	gradient.F32()[0] = 3
	if err := set.Accumulate("policy", gradient); err != nil {
		log.Fatal(err)
	}
	if err := head.Accumulate([]float32{0, 4, 0, 0, 0, 0, 0, 0}); err != nil {
		log.Fatal(err)
	}
	lease.Release()

	report, err := set.Step(ctx, slots.StepOptions{Params: slots.Adam(1e-3)})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Print(report)

	dir, err := os.MkdirTemp("", "")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	if err := set.Save(ctx, "policy", filepath.Join(dir, "policy")); err != nil {
		log.Fatal(err)
	}
	if err := set.Load(ctx, "again", filepath.Join(dir, "policy"), slots.LoadOptions{}); err != nil {
		log.Fatal(err)
	}
	info, err := set.Info("again")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(info)
	// Output:
	// "policy": gradient norm 5, clipped by 0.02, learning rate 0.001, revision 1
	// "again": 40 parameters in 1 modules, revision 1, adapters 16384, gradients 8192
}
