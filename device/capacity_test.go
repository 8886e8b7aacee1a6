package device

import (
	"math"
	"testing"
	"testing/fstest"
)

// tree is a root file system; names are paths without the leading slash.
func tree(files map[string]string) facts {
	root := fstest.MapFS{}
	for name, text := range files {
		root[name] = &fstest.MapFile{Data: []byte(text)}
	}
	return facts{root: root, pageSize: 4096, goLimit: math.MaxInt64}
}

func TestDefaultCapacityIsTheTightestLimitLessTheReserve(t *testing.T) {
	const (
		hybrid = "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n" +
			"35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n" +
			"41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:3 - cgroup2 cgroup2 rw\n"
		unified = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
		meminfo = "MemTotal:       9000000 kB\nMemFree:          10 kB\nMemAvailable:    8000000 kB\n"
		less    = ", less a reserve of 268435456"
	)
	with := func(f facts, change func(*facts)) facts { change(&f); return f }
	for _, c := range []struct {
		name  string
		facts facts
		bytes int64
		why   string
	}{
		{"nothing can be read", tree(nil), 0, "no limit could be read"},
		{"no files at all", facts{goLimit: math.MaxInt64}, 0, "no limit could be read"},
		{"the machine alone", tree(map[string]string{"proc/meminfo": meminfo}),
			8000000<<10 - DefaultReserve, "MemAvailable leaves 8192000000 bytes" + less},
		{"garbage is no limit", tree(map[string]string{
			"proc/meminfo":               "MemAvailable: lots kB\n\nMemAvailable:\n",
			"proc/self/cgroup":           "\n0\n0::/a\nx:y:z:w\n",
			"proc/self/mountinfo":        "- - -\n1 2 3 - cgroup2\n",
			"sys/fs/cgroup/a/memory.max": "-5\n",
			"sys/fs/cgroup/memory.max":   "twelve",
			"proc/self/statm":            "?",
		}), 0, "no limit could be read"},
		{"v2, from group to root: the parent is tighter", tree(map[string]string{
			"proc/meminfo":                   meminfo,
			"proc/self/cgroup":               "0::/a/b\n",
			"proc/self/mountinfo":            unified,
			"sys/fs/cgroup/a/b/memory.max":   "3000000000\n",
			"sys/fs/cgroup/a/memory.max":     "2000000000\n",
			"sys/fs/cgroup/a/memory.high":    "max\n",
			"sys/fs/cgroup/a/memory.current": "600000000\n",
			"sys/fs/cgroup/a/memory.stat":    "anon 5\ninactive_file 100000000\nactive_file 7\n",
		}), (1500000000 - DefaultReserve) &^ 4095,
			"cgroup v2 /sys/fs/cgroup/a/memory.max (2000000000, 500000000 of it used) leaves 1500000000 bytes" + less},
		{"v2: high is below max", tree(map[string]string{
			"proc/self/cgroup":            "0::/a\n",
			"sys/fs/cgroup/a/memory.max":  "3000000000\n",
			"sys/fs/cgroup/a/memory.high": "1073741824\n",
		}), 1<<30 - DefaultReserve,
			"cgroup v2 /sys/fs/cgroup/a/memory.high (1073741824, 0 of it used) leaves 1073741824 bytes" + less},
		{"v2: max means none", tree(map[string]string{
			"proc/meminfo":                 meminfo,
			"proc/self/cgroup":             "0::/a\n",
			"sys/fs/cgroup/a/memory.max":   "max\n",
			"sys/fs/cgroup/memory.current": "1\n",
		}), 8000000<<10 - DefaultReserve, "MemAvailable leaves 8192000000 bytes" + less},
		{"v1: a huge number means none, the parent's holds", tree(map[string]string{
			"proc/meminfo":        meminfo,
			"proc/self/cgroup":    "4:cpu,memory:/p/q\n0::/\n",
			"proc/self/mountinfo": hybrid,
			"sys/fs/cgroup/memory/p/q/memory.limit_in_bytes": "9223372036854771712\n",
			"sys/fs/cgroup/memory/p/memory.limit_in_bytes":   "1073741824\n",
			"sys/fs/cgroup/memory/p/memory.usage_in_bytes":   "1048576\n",
			"sys/fs/cgroup/memory/p/memory.stat":             "inactive_file 5\ntotal_inactive_file 2097152\n",
			"sys/fs/cgroup/memory/memory.limit_in_bytes":     "9223372036854771712\n",
		}), 1<<30 - DefaultReserve,
			"cgroup v1 /sys/fs/cgroup/memory/p/memory.limit_in_bytes (1073741824, 0 of it used) leaves 1073741824 bytes" + less},
		{"hybrid: both versions bind", tree(map[string]string{
			"proc/self/cgroup":                             "4:memory:/p\n0::/u\n",
			"proc/self/mountinfo":                          hybrid,
			"sys/fs/cgroup/memory/p/memory.limit_in_bytes": "2147483648\n",
			"sys/fs/cgroup/unified/u/memory.max":           "1073741824\n",
		}), 1<<30 - DefaultReserve,
			"cgroup v2 /sys/fs/cgroup/unified/u/memory.max (1073741824, 0 of it used) leaves 1073741824 bytes" + less},
		{"a container sees its own group at the mount", tree(map[string]string{
			"proc/self/cgroup":                              "4:memory:/docker/x\n",
			"proc/self/mountinfo":                           `35 31 0:32 /docker/x /sys/fs/cgroup/my\040memory ro - cgroup cgroup rw,memory`,
			"sys/fs/cgroup/my memory/memory.limit_in_bytes": "1073741824",
		}), 1<<30 - DefaultReserve,
			"cgroup v1 /sys/fs/cgroup/my memory/memory.limit_in_bytes (1073741824, 0 of it used) leaves 1073741824 bytes" + less},
		{"a group outside of the namespace is the mounted one", tree(map[string]string{
			"proc/self/cgroup":         "0::/../../other\n",
			"proc/self/mountinfo":      "30 23 0:26 /../../other /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
			"sys/fs/cgroup/memory.max": "1073741824",
		}), 1<<30 - DefaultReserve,
			"cgroup v2 /sys/fs/cgroup/memory.max (1073741824, 0 of it used) leaves 1073741824 bytes" + less},
		{"address space that is left", with(tree(map[string]string{
			"proc/meminfo":    meminfo,
			"proc/self/statm": "1000 5 5 5 0 200 0\n",
		}), func(f *facts) { f.rlimits = map[string]int64{"RLIMIT_AS": 1<<30 + 1000*4096, "RLIMIT_DATA": 2 << 30} }),
			1<<30 - DefaultReserve, "RLIMIT_AS (1077837824, 4096000 of it used) leaves 1073741824 bytes" + less},
		{"data that is left", with(tree(map[string]string{"proc/self/statm": "1000 5 5 5 0 200 0\n"}),
			func(f *facts) { f.rlimits = map[string]int64{"RLIMIT_DATA": 1<<30 + 200*4096} }),
			1<<30 - DefaultReserve, "RLIMIT_DATA (1074561024, 819200 of it used) leaves 1073741824 bytes" + less},
		{"GOMEMLIMIT less the runtime's share", with(tree(map[string]string{"proc/meminfo": meminfo}),
			func(f *facts) { f.goLimit, f.goRetained = 1<<30+5, 5 }),
			1<<30 - DefaultReserve, "GOMEMLIMIT (1073741829, 5 of it used) leaves 1073741824 bytes" + less},
		{"GOMEMLIMIT is used up", with(tree(nil), func(f *facts) { f.goLimit, f.goRetained = 5, 1000 }),
			0, "GOMEMLIMIT (5, 1000 of it used) leaves 0 bytes" + less},
		{"less than the reserve is nothing", tree(map[string]string{"proc/meminfo": "MemAvailable: 1000 kB"}),
			0, "MemAvailable leaves 1024000 bytes" + less},
		{"whole pages", tree(map[string]string{"proc/meminfo": "MemAvailable: 1048577 kB"}),
			1<<30 - DefaultReserve, "MemAvailable leaves 1073742848 bytes" + less},
	} {
		bytes, why := capacity(c.facts)
		if bytes != c.bytes || why != c.why {
			t.Errorf("%s:\n got %d: %s\nwant %d: %s", c.name, bytes, why, c.bytes, c.why)
		}
	}
}

func TestParseBytes(t *testing.T) {
	for text, want := range map[string]int64{"0": 0, "12": 12, "18446744073709551615": math.MaxInt64, "9223372036854775807": math.MaxInt64} {
		if n, ok := parseBytes(text); n != want || !ok {
			t.Errorf("%s: %d, %v", text, n, ok)
		}
	}
	for _, text := range []string{"", "max", "-1", "1 2", "18446744073709551616", "0x10", "1e3"} {
		if n, ok := parseBytes(text); ok {
			t.Errorf("%q is %d", text, n)
		}
	}
}

func TestAHostOfDefaultCapacitySaysWhereItComesFrom(t *testing.T) {
	h, err := NewHost(0)
	if err != nil {
		t.Skip(err) // a machine without /proc, or too small
	}
	if h.Capacity() <= 0 || h.Capacity()%PageSize != 0 || h.CapacitySource() == "" || h.Name() != "host" {
		t.Errorf("%d bytes: %s", h.Capacity(), h.CapacitySource())
	}
	t.Logf("%d bytes: %s", h.Capacity(), h.CapacitySource())
}
