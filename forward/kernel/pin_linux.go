package kernel

import (
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// allowedCPUs are the CPUs that this process may run on, ascending. It is empty if TRAINERRANK_PIN=off: then no
// worker is pinned.
func allowedCPUs() []int {
	if os.Getenv("TRAINERRANK_PIN") == "off" {
		return nil
	}
	return cpusAtStart()
}

// cpusAtStart is asked for before the first worker is pinned, and only then: that worker's thread may be the first of the process, whose CPUs these are, and it
// stays pinned when the worker has ended.
var cpusAtStart = sync.OnceValue(func() (cpus []int) {
	var set unix.CPUSet
	if unix.SchedGetaffinity(os.Getpid(), &set) != nil {
		return nil
	}
	for c := 0; len(cpus) < set.Count(); c++ {
		if set.IsSet(c) {
			cpus = append(cpus, c)
		}
	}
	return cpus
})

// pinThread binds the calling thread to a CPU. Failing is harmless: the thread then floats.
func pinThread(cpu int) {
	var set unix.CPUSet
	set.Set(cpu)
	_ = unix.SchedSetaffinity(0, &set)
}
