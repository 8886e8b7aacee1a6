//go:build !linux

package kernel

import "runtime"

func allowedCPUs() []int {
	cpus := make([]int, runtime.NumCPU())
	for i := range cpus {
		cpus[i] = i
	}
	return cpus
}

func pinThread(int) {}
