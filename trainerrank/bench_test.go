package trainerrank

import (
	"fmt"
	"testing"

	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/internal/golden"
)

// BenchmarkPlan plans 16 rows of three levels, 172,032 logical tokens: whole, split (half of what the call needs), and refused.
func BenchmarkPlan(b *testing.B) {
	m := golden.Load(b, golden.FS(b, "qwen2-tiny"), golden.Options{Threads: 2, Unloaded: true})
	rank, err := New(m.Model, WithDevice(m.Host))
	if err != nil {
		b.Fatal(err)
	}
	vocab := m.Spec().Vocabulary
	r := golden.Rand(1)
	fresh := func(n int) []int32 {
		list := make([]int32, n)
		for i := range list {
			list[i] = int32(r.IntN(vocab))
		}
		return list
	}
	trunk := fresh(8192)
	var inputs []forward.Input
	for range 4 {
		branch := append(append([]int32(nil), trunk...), fresh(2048)...)
		for range 4 {
			tokens := append(append([]int32(nil), branch...), fresh(512)...)
			inputs = append(inputs, forward.Input{Tokens: tokens, Targets: tokens})
		}
	}
	c, err := rank.newCall(forward.Many(inputs...), nil)
	if err != nil {
		b.Fatal(err)
	}
	whole, err := rank.admit(b.Context(), c, 1<<40, hooks{}, true)
	if err != nil {
		b.Fatal(err)
	}
	for name, usable := range map[string]int64{"whole": 1 << 40, "split": whole.SmallestBudgetBytes, "refused": 0} {
		b.Run(fmt.Sprintf("%s/%d", name, whole.LogicalTokens), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := rank.admit(b.Context(), c, usable, hooks{}, false); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
