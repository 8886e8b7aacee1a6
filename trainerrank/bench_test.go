package trainerrank

import (
	"fmt"
	"slices"
	"testing"

	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/internal/golden"
)

// threeLevels is a call of rows that share a trunk, and by leaves of a branch each a branch: 10,752 tokens a row, of which the last 512 are its own.
func threeLevels(vocab, branches, leaves int) forward.Inputs {
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
	for range branches {
		branch := slices.Concat(trunk, fresh(2048))
		for range leaves {
			tokens := slices.Concat(branch, fresh(512))
			inputs = append(inputs, forward.Input{Tokens: tokens, Targets: tokens})
		}
	}
	return forward.Many(inputs...)
}

// BenchmarkPlan plans calls of three levels that fit whole, that are split in what is the least for them, and that are refused.
func BenchmarkPlan(b *testing.B) {
	m := golden.Load(b, golden.FS(b, "qwen2-tiny"), golden.Options{Threads: 2, Unloaded: true})
	rank, err := New(m.Model, WithDevice(m.Host))
	if err != nil {
		b.Fatal(err)
	}
	for _, shape := range [][2]int{{4, 4}, {8, 16}} {
		c, err := rank.newCall(threeLevels(m.Spec().Vocabulary, shape[0], shape[1]), nil)
		if err != nil {
			b.Fatal(err)
		}
		all, err := rank.admit(b.Context(), c, &ground{usable: 1 << 40, model: rank.exact}, true)
		if err != nil {
			b.Fatal(err)
		}
		for _, k := range []struct {
			name   string
			usable int64
		}{{"whole", 1 << 40}, {"split", all.SmallestBudgetBytes}, {"refused", 0}} {
			b.Run(fmt.Sprintf("%d rows/%d tokens/%s", len(c.inputs), all.LogicalTokens, k.name), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					if _, err := rank.admit(b.Context(), c, &ground{usable: k.usable, model: rank.exact}, false); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}

// BenchmarkSplit runs a call whose requests share nothing, so that a split computes no token more than the whole call: whole, and in the smallest budget.
func BenchmarkSplit(b *testing.B) {
	m := golden.Load(b, golden.FS(b, "qwen2-tiny"), golden.Options{Threads: 2})
	r := golden.Rand(1)
	var inputs []forward.Input
	for i := range 8 {
		in := forward.Input{TopK: 1}
		for range 1000 {
			in.Tokens = append(in.Tokens, int32(r.IntN(m.Spec().Vocabulary)))
		}
		in.Tokens[0] = int32(i)
		inputs = append(inputs, in)
	}
	call := forward.Many(inputs...)
	rank, err := New(m.Model)
	if err != nil {
		b.Fatal(err)
	}
	a, err := rank.Plan(b.Context(), call)
	if err != nil {
		b.Fatal(err)
	}
	for _, usable := range []int64{a.PredictedPeakBytes, (a.PredictedPeakBytes + a.SmallestBudgetBytes) / 2, a.SmallestBudgetBytes} {
		rank.limit = usable
		plan, err := rank.Plan(b.Context(), call)
		if err != nil {
			b.Fatal(err)
		}
		b.Run(fmt.Sprintf("%d subforwards/%d packed tokens", plan.SubforwardCount(), plan.PackedTokens), func(b *testing.B) {
			for b.Loop() {
				res, err := rank.DPRankForward(b.Context(), call)
				if err != nil {
					b.Fatal(err)
				}
				res.Release()
			}
		})
	}
}
