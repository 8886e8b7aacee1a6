package prefixtree

import (
	"math/rand/v2"
	"testing"
)

// grpo makes the rows of a usual training step: groups of rows with one prompt each, behind a common system prompt. No two rows share memory.
func grpo(groups, perGroup, system, prompt, completion int) [][]int32 {
	rng := rand.New(rand.NewPCG(7, 7))
	draw := func(n int) []int32 {
		tokens := make([]int32, n)
		for i := range tokens {
			tokens[i] = rng.Int32N(151_936)
		}
		return tokens
	}
	var rows [][]int32
	common := draw(system)
	for range groups {
		own := draw(prompt)
		for range perGroup {
			row := make([]int32, 0, system+prompt+completion)
			rows = append(rows, append(append(append(row, common...), own...), draw(completion)...))
		}
	}
	return rows
}

// pairs is n rows of which row i shares its first token with row i+n/2: every shared row list is spread over the half of its parent's.
func pairs(n int) [][]int32 {
	rows := make([][]int32, n)
	for i := range rows {
		rows[i] = []int32{int32(i % (n / 2)), int32(i)}
	}
	return rows
}

var shapes = []struct {
	name string
	rows func() [][]int32
}{
	{"16x172032", func() [][]int32 { return grpo(2, 8, 2048, 8192, 512) }},
	{"128x1.2M", func() [][]int32 { return grpo(16, 8, 1024, 7351, 1000) }},
	{"128x1.2M_9_decisions", func() [][]int32 { return grpo(8, 16, 1024, 7351, 1000) }},
	{"1024x10M", func() [][]int32 { return grpo(64, 16, 2048, 7168, 550) }},
	{"10M_in_1M_rows", func() [][]int32 { return grpo(125_000, 8, 2, 4, 4) }},
	{"pairs100000", func() [][]int32 { return pairs(100_000) }},
	{"chain100000", func() [][]int32 { return chain(100_000) }},
}

// BenchmarkPlanCold is the first shape of BenchmarkPlan with rows that are in no cache.
func BenchmarkPlanCold(b *testing.B) {
	rows := grpo(2, 8, 2048, 8192, 512)
	sweep := make([]int64, 64<<20) // 512 MiB, more than any cache here
	for b.Loop() {
		b.StopTimer()
		for i := range sweep {
			sweep[i]++
		}
		b.StartTimer()
		mustBuild(b, rows).FullSharing().Pack(rows)
	}
}

// BenchmarkPlan is what every call pays: tree, full-sharing layout, packed row. The tree alone and the check stand beside it.
func BenchmarkPlan(b *testing.B) {
	for _, s := range shapes {
		b.Run(s.name, func(b *testing.B) {
			rows := s.rows()
			logical := mustBuild(b, rows).Logical
			stage := func(name string, f func()) {
				b.Run(name, func(b *testing.B) {
					b.ReportAllocs()
					for b.Loop() {
						f()
					}
					b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(logical), "ns/token")
				})
			}
			tree := mustBuild(b, rows)
			full := tree.FullSharing()
			batch, err := full.Pack(rows)
			if err != nil {
				b.Fatal(err)
			}
			stage("build", func() { mustBuild(b, rows) })
			stage("layout", func() { tree.FullSharing() })
			stage("pack", func() { full.Pack(rows) })
			stage("all", func() { mustBuild(b, rows).FullSharing().Pack(rows) })
			places := make([]int32, 0, logical/len(rows)*2)
			stage("gather", func() {
				for r := range min(len(rows), 1000) {
					places = batch.Gather(r, places[:0])
				}
			})
			if s.name != "chain100000" { // its row lists hold five billion numbers
				stage("check", func() { batch.Check() })
			}
		})
	}
}

// BenchmarkSelect is the choice of a layout under the version-1 price: the exact one, which a single rank gets, with and without recurrent layers, with the
// tree (what a call pays), and in memory that is in no cache; the exact one of four ranks; and the studied planner's search.
func BenchmarkSelect(b *testing.B) {
	one, recurrent := Version1(Facts{Layers: 36}), Version1(Facts{Layers: 36, Recurrent: 27})
	four := Version1(Facts{Layers: 36, Recurrent: 27, ContextParallel: 4})
	for _, s := range shapes {
		b.Run(s.name, func(b *testing.B) {
			rows := s.rows()
			tree := mustBuild(b, rows)
			stage := func(name string, f func()) {
				b.Run(name, func(b *testing.B) {
					b.ReportAllocs()
					for b.Loop() {
						f()
					}
				})
			}
			stage("exact", func() { mustSelect(b, tree, &one, Options{}) })
			stage("exact_recurrent", func() { mustSelect(b, tree, &recurrent, Options{}) })
			stage("four_ranks", func() { mustSelect(b, tree, &four, Options{}) })
			stage("bounded", func() { mustSelect(b, tree, &recurrent, Options{Bounded: true}) })
			stage("bounded_digest", func() { mustSelect(b, tree, &recurrent, Options{Bounded: true, Digest: true}) })
			stage("tree_and_exact", func() { mustSelect(b, mustBuild(b, rows), &recurrent, Options{}) })
			stage("tree_and_bounded", func() { mustSelect(b, mustBuild(b, rows), &recurrent, Options{Bounded: true}) })
		})
	}
}

// BenchmarkSelectCold is tree and choice for the first shape with rows that are in no cache.
func BenchmarkSelectCold(b *testing.B) {
	rows := grpo(2, 8, 2048, 8192, 512)
	c := Version1(Facts{Layers: 36, Recurrent: 27})
	sweep := make([]int64, 64<<20) // 512 MiB, more than any cache here
	for b.Loop() {
		b.StopTimer()
		for i := range sweep {
			sweep[i]++
		}
		b.StartTimer()
		mustSelect(b, mustBuild(b, rows), &c, Options{})
	}
}
