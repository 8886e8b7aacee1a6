//go:build !unix

package main

import "time"

// cpuTime is the CPU time that the process has used, if the system says.
func cpuTime() (time.Duration, bool) { return 0, false }
