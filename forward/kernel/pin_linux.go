package kernel

import (
	"os"

	"golang.org/x/sys/unix"
)

// allowedCPUs are the CPUs that this process may run on, ascending. It is empty if TRAINERRANK_PIN=off: then no
// worker is pinned.
func allowedCPUs() []int {
	var set unix.CPUSet
	if os.Getenv("TRAINERRANK_PIN") == "off" || unix.SchedGetaffinity(os.Getpid(), &set) != nil {
		return nil
	}
	var cpus []int
	for c := 0; len(cpus) < set.Count(); c++ {
		if set.IsSet(c) {
			cpus = append(cpus, c)
		}
	}
	return cpus
}

// pinThread binds the calling thread to a CPU. Failing is harmless: the thread then floats.
func pinThread(cpu int) {
	var set unix.CPUSet
	set.Set(cpu)
	_ = unix.SchedSetaffinity(0, &set)
}
