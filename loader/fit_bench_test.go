package loader

import (
	"fmt"
	"testing"
)

// benchStats are files of tensors as a large model has them: matrices, vectors between them, one large tensor in each file.
func benchStats(files, tensors int, atom int64) []FileStats {
	stats := make([]FileStats, files)
	for i := range stats {
		f := &stats[i]
		*f = FileStats{Path: fmt.Sprintf("model-%05d.safetensors", i), Tensors: make([]TensorStats, tensors)}
		var at int64
		for j := range f.Tensors {
			size := int64(8<<10 + 256*(j%7))
			if j%3 == 0 {
				size = 32 << 20
			}
			if j == tensors/2 {
				size = 1 << 30
			}
			f.Tensors[j] = TensorStats{Name: fmt.Sprintf("layers.%d.w%d", i, j), Offset: at, Bytes: size, Atom: atom, Resident: j%5 > 0}
			at += size
			f.Largest = max(f.Largest, size)
			if j%5 > 0 {
				f.Resident += size
			}
		}
		f.Kept, f.Span = at, at
	}
	return stats
}

func BenchmarkFit(b *testing.B) {
	for _, n := range []struct{ files, tensors int }{{10, 1000}, {100, 1000}, {1000, 1000}, {1, 1_000_000}} {
		stats := benchStats(n.files, n.tensors, 0)
		pieces := benchStats(n.files, n.tensors, 4<<20)
		for _, m := range []struct {
			name  string
			stats []FileStats
			p     PlanParams
		}{
			{"classic", stats, PlanParams{AccumulateResident: true, YieldClone: true, Group: 1, Classic: true}},
			{"default", stats, PlanParams{AccumulateResident: true, YieldClone: true, Group: 1}},
			{"tight", stats, PlanParams{YieldClone: true, Group: 1}},
			{"ranks", stats, PlanParams{AccumulateResident: true, Group: 8}},
			{"slab", pieces, PlanParams{Group: 1, Preallocated: 1 << 40, Align: 4096, MaxChunk: 4 << 20, DepthFirst: true}},
		} {
			m.p.QueueSize = 8
			for range m.stats {
				m.p.Copier.Multiplier = append(m.p.Copier.Multiplier, Ratio{1, 1})
			}
			least, _ := leastBudget(m.stats, m.p)
			m.p.Budget = least + least/100
			if m.name == "tight" {
				m.p.Budget = least + 1<<20
			}
			b.Run(fmt.Sprintf("%s/%dx%d", m.name, n.files, n.tensors), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					if _, err := Fit(m.stats, m.p); err != nil {
						b.Fatal(err)
					}
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(n.files*n.tensors), "ns/tensor")
			})
		}
	}
}

func BenchmarkDigest(b *testing.B) {
	stats := benchStats(1000, 1000, 0)
	p := PlanParams{Budget: 1 << 50, AccumulateResident: true, Group: 1}
	for range stats {
		p.Copier.Multiplier = append(p.Copier.Multiplier, Ratio{1, 1})
	}
	plan, err := Fit(stats, p)
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		plan.Digest()
	}
}
