package device

import (
	"math"
	"os"

	"golang.org/x/sys/unix"
)

func hostFacts() facts {
	f := facts{root: os.DirFS("/"), pageSize: int64(os.Getpagesize()), rlimits: make(map[string]int64)}
	f.goLimit, f.goRetained = goMemory()
	for name, resource := range map[string]int{"RLIMIT_AS": unix.RLIMIT_AS, "RLIMIT_DATA": unix.RLIMIT_DATA} {
		var r unix.Rlimit
		if err := unix.Getrlimit(resource, &r); err == nil && r.Cur < math.MaxInt64 { // RLIM_INFINITY is above
			f.rlimits[name] = int64(r.Cur)
		}
	}
	return f
}
