package collective_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/trainerrank/engine/collective"
)

// Two ranks ask in one meeting what the largest need and the smallest budget are: MIN is MAX of the negated.
func Example_admission() {
	need := []int64{70, 90}
	usable := []int64{100, 80}
	fits := make([]bool, 2)
	err := collective.Run(2, func(w collective.World) error {
		v := []int64{need[w.Rank()], -usable[w.Rank()]}
		if err := w.AllReduceInt64(context.Background(), "admission", collective.Max, v); err != nil {
			return err
		}
		fits[w.Rank()] = v[0] <= -v[1]
		return nil
	})
	fmt.Println(fits, err)
	// Output: [false false] <nil>
}

// A rank that fails alone brings its error to the others, and all return together.
func ExampleAgree() {
	err := collective.Run(3, func(w collective.World) error {
		var own error
		if w.Rank() == 1 {
			own = errors.New("model.safetensors: short read")
		}
		return collective.Agree(context.Background(), w, own)
	})
	fmt.Println(err)
	// Output:
	// rank 0: rank 1 failed: model.safetensors: short read
	// rank 1: model.safetensors: short read
	// rank 2: rank 1 failed: model.safetensors: short read
}

// Ranks that do not call the same operation are told so, at once.
func ExampleMismatchError() {
	err := collective.Run(2, func(w collective.World) error {
		if w.Rank() == 0 {
			return w.Barrier(context.Background(), "load/done")
		}
		_, err := w.AllGather(context.Background(), "load/digest", []byte("abc"))
		return err
	})
	var mismatch *collective.MismatchError
	if errors.As(err, &mismatch) {
		for rank, call := range mismatch.Calls {
			fmt.Println(rank, call)
		}
	}
	// Output:
	// 0 Barrier "load/done"
	// 1 AllGather "load/digest"
}
