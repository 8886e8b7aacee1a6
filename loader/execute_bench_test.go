package loader

import (
	"fmt"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/trainerrank/engine/device"
)

// BenchmarkLoad compares loads of a cached file, every time into fresh memory of the device, with a plain copy of the same bytes from
// memory into such memory, by as many goroutines; and, for a load that hands pieces on, with no more than reading them.
func BenchmarkLoad(b *testing.B) {
	const tensors, size = 64, 8 << 20 // 512 MiB
	var entries []string
	for i := range tensors {
		entries = append(entries, entry(fmt.Sprintf("t%d", i), "U8", fmt.Sprintf("[%d]", size), i*size, (i+1)*size))
	}
	data := append(whole(header(entries...), 0), make([]byte, tensors*size)...)
	for i := range data[len(data)-tensors*size:] {
		data[len(data)-1-i] = byte(i)
	}
	path := b.TempDir() + "/" + singleName
	if err := os.WriteFile(path, data, 0o644); err != nil {
		b.Fatal(err)
	}
	if f, err := os.Open(path); err == nil { // writing it back must not be in the way
		_ = f.Sync()
		f.Close()
	}
	s, err := Open(path)
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	threads := runtime.GOMAXPROCS(0)
	dev, err := device.NewHost(4 << 30)
	if err != nil {
		b.Fatal(err)
	}
	for _, name := range CopierNames() {
		c, err := NewCopier(name, threads)
		if err != nil {
			b.Fatal(err)
		}
		for _, most := range []int64{0, 64 << 20} {
			p := PlanParams{Budget: 2 << 30, Group: 1, AccumulateResident: true, Align: device.PageSize, MaxChunk: most, Copier: c.Costs(s.Files)}
			plan, err := Fit(StatsOf(s, StatsOptions{}), p)
			if err != nil {
				b.Fatal(err)
			}
			b.Run(fmt.Sprintf("%s/chunk=%dMiB", name, most>>20), func(b *testing.B) {
				b.SetBytes(tensors * size)
				for b.Loop() {
					t, _, err := s.Execute(b.Context(), plan, LoadOptions{Device: dev, Copier: c, Threads: threads})
					if err != nil {
						b.Fatal(err)
					}
					t.Free()
				}
			})
		}
		p := PlanParams{Budget: 2 << 30, QueueSize: threads - 2, Group: 1, Align: device.PageSize, MaxChunk: 512 << 10, DepthFirst: true, Copier: c.Costs(s.Files)}
		plan, err := Fit(StatsOf(s, StatsOptions{Atom: func(*Tensor) int64 { return 4096 }}), p)
		if err != nil {
			b.Fatal(err)
		}
		b.Run(name+"/deliver", func(b *testing.B) {
			b.SetBytes(tensors * size)
			for b.Loop() {
				block, err := dev.Allocate(device.Weights, tensors*size)
				if err != nil {
					b.Fatal(err)
				}
				to := block.Mem().Raw()
				_, _, err = s.Execute(b.Context(), plan, LoadOptions{Device: dev, Copier: c, Threads: threads, Deliver: func(p Piece) error {
					copy(to[p.Tensor.Offset-s.Files[0].DataStart+p.Offset:], p.Data)
					return nil
				}})
				if err != nil {
					b.Fatal(err)
				}
				block.Free()
			}
		})
	}
	b.Run("copy", func(b *testing.B) {
		b.SetBytes(tensors * size)
		from := data[len(data)-tensors*size:]
		for b.Loop() {
			block, err := dev.Allocate(device.Weights, tensors*size)
			if err != nil {
				b.Fatal(err)
			}
			to := block.Mem().Raw()
			var next atomic.Int64
			var wg sync.WaitGroup
			for range threads {
				wg.Go(func() {
					for {
						off := (next.Add(1) - 1) * segment
						if off >= tensors*size {
							return
						}
						copy(to[off:off+segment], from[off:])
					}
				})
			}
			wg.Wait()
			block.Free()
		}
	})
}
