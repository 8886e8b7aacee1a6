package transformer_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/internal/golden"
)

// BenchmarkRehearse is the price of a subforward: of few and many layers, requests and tokens, without gradients and with them.
func BenchmarkRehearse(b *testing.B) {
	for _, layers := range []int{2, 30, 64} {
		config := strings.Replace(golden.Wide, `"num_hidden_layers": 2`, fmt.Sprintf(`"num_hidden_layers": %d`, layers), 1)
		m := golden.Load(b, golden.Synthetic{Config: config, DType: "BF16", Seed: 1}.Write(b), golden.Options{Threads: 2, Unloaded: true})
		for _, rows := range []int{1, 16, 128} {
			inputs := make([]forward.Input, rows)
			r := golden.Rand(1)
			for i := range inputs {
				tokens := make([]int32, 1000)
				for j := range tokens {
					tokens[j] = int32(r.IntN(m.Spec().Vocabulary))
				}
				inputs[i] = forward.Input{Tokens: tokens, Targets: tokens}
			}
			batch := pack(b, inputs, fullSharing)
			for _, grad := range []bool{false, true} {
				batch.Grad = grad
				b.Run(fmt.Sprintf("%d layers/%d rows/grad %v", layers, rows, grad), func(b *testing.B) {
					b.ReportAllocs()
					for b.Loop() {
						if _, err := m.Rehearse(batch); err != nil {
							b.Fatal(err)
						}
					}
				})
			}
		}
	}
}
