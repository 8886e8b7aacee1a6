package main

import (
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/cpu"
	"golang.org/x/sys/unix"
)

//go:noescape
func fma256(n int64)

//go:noescape
func fma512(n int64)

// measurePeak is the GFLOP/s of float32 multiply-adds on registers alone, with a thread pinned to each CPU that this process may use, and the
// width that was faster.
func measurePeak(threads int) (gflops float64, kind string) {
	if cpu.X86.HasFMA && cpu.X86.HasAVX2 {
		gflops, kind = rate(threads, fma256, 8), "256-bit"
	}
	if cpu.X86.HasAVX512F {
		if g := rate(threads, fma512, 16); g > gflops {
			gflops, kind = g, "512-bit"
		}
	}
	return gflops, kind
}

func rate(threads int, f func(int64), lanes int) float64 {
	const calls, loops = 20000, 1000 // a call lasts about a microsecond: assembly cannot be preempted
	var allowed unix.CPUSet
	if err := unix.SchedGetaffinity(0, &allowed); err != nil {
		return 0
	}
	var ready, done sync.WaitGroup
	begin := make(chan struct{})
	ready.Add(threads)
	next := 0
	for range threads {
		for !allowed.IsSet(next) {
			next++
		}
		var one unix.CPUSet
		one.Set(next)
		next++
		done.Go(func() {
			runtime.LockOSThread() // never unlocked: the thread ends with the goroutine, and its affinity with it
			_ = unix.SchedSetaffinity(0, &one)
			f(loops * 100)
			ready.Done()
			<-begin
			for range calls {
				f(loops)
			}
		})
	}
	ready.Wait()
	start := time.Now()
	close(begin)
	done.Wait()
	return float64(threads) * calls * loops * 12 * 2 * float64(lanes) / time.Since(start).Seconds() / 1e9
}
