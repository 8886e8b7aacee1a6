package device

import (
	"fmt"
	"io/fs"
	"math"
	"path"
	"runtime/debug"
	"runtime/metrics"
	"strconv"
	"strings"
)

// DefaultReserve is what [DefaultCapacity] leaves of the tightest limit, in bytes: room for what is not allocated on the
// device, yet counts against the same limit. That is the Go heap of a planner and its garbage (some tens of MiB), stacks,
// the kernel's page tables (2 MiB per GiB of small pages), file pages of a load on their way, and the slack of
// MemAvailable, which is an estimate.
const DefaultReserve = 256 << 20

// DefaultCapacity is how many bytes this process may still take for a host device, a multiple of [PageSize], and one line
// that says which limit decided and with which numbers. It is the smallest of these, less [DefaultReserve]:
//
//   - what each memory cgroup up the tree leaves: memory.max and memory.high of version 2 (a process above "high" is
//     throttled to a standstill), memory.limit_in_bytes of version 1; machines with both exist. The limit binds the whole
//     group, so what the group uses already is subtracted, this process's share included; only its inactive file pages are
//     not, since the kernel drops them first.
//   - MemAvailable of /proc/meminfo.
//   - RLIMIT_AS and RLIMIT_DATA less what the process has mapped of that kind.
//   - GOMEMLIMIT less what the Go runtime holds, if it is set. The runtime itself does not count memory outside of its
//     heap. But who sets it, by hand or from the container's size, says what the process may use, and a device that took
//     as much again would break that. Who means the heap alone states the device's capacity.
//
// 0 bytes means that nothing is left, or that no limit could be read; the line says which.
func DefaultCapacity() (bytes int64, why string) { return capacity(hostFacts()) }

// facts are what the capacity is computed from.
type facts struct {
	root       fs.FS            // "/": proc and the cgroup mounts are read from it; nil if there are none
	pageSize   int64            // bytes of a page in /proc/self/statm
	rlimits    map[string]int64 // RLIMIT_AS and RLIMIT_DATA in bytes, if set
	goLimit    int64            // GOMEMLIMIT, in bytes; MaxInt64 if not set
	goRetained int64            // what of it the Go runtime holds, in bytes
}

// limit is a bound on what this process may still take.
type limit struct {
	left   int64 // bytes, not below 0
	source string
}

func capacity(f facts) (bytes int64, why string) {
	limits := goLimits(f)
	if f.root != nil {
		limits = append(limits, cgroupLimits(f.root)...)
		limits = append(limits, machineLimits(f.root)...)
		limits = append(limits, processLimits(f)...)
	}
	if len(limits) == 0 {
		return 0, "no limit could be read"
	}
	least := limits[0]
	for _, l := range limits[1:] {
		if l.left < least.left {
			least = l
		}
	}
	bytes = max(0, least.left-DefaultReserve) &^ (PageSize - 1)
	return bytes, fmt.Sprintf("%s leaves %d bytes, less a reserve of %d", least.source, least.left, int64(DefaultReserve))
}

// left is the limit that allows most bytes, of which used are taken.
func left(source string, most, used int64) limit {
	return limit{max(0, most-used), fmt.Sprintf("%s (%d, %d of it used)", source, most, used)}
}

func goLimits(f facts) []limit {
	if f.goLimit == math.MaxInt64 {
		return nil
	}
	return []limit{left("GOMEMLIMIT", f.goLimit, f.goRetained)}
}

// goMemory is GOMEMLIMIT and, in the same meaning, what the Go runtime holds: all it mapped and did not release.
func goMemory() (limit, retained int64) {
	samples := []metrics.Sample{{Name: "/memory/classes/total:bytes"}, {Name: "/memory/classes/heap/released:bytes"}}
	metrics.Read(samples)
	return debug.SetMemoryLimit(-1), int64(samples[0].Value.Uint64() - samples[1].Value.Uint64())
}

func machineLimits(root fs.FS) []limit {
	n, ok := field(root, "proc/meminfo", "MemAvailable:")
	if !ok || n > math.MaxInt64>>10 {
		return nil
	}
	return []limit{{n << 10, "MemAvailable"}} // "kB" there means KiB
}

// processLimits are the resource limits less what counts against them: VmSize and VmData, columns 1 and 6 of statm, in pages.
func processLimits(f facts) []limit {
	var list []limit
	text, _ := fs.ReadFile(f.root, "proc/self/statm")
	columns := strings.Fields(string(text))
	for _, r := range []struct {
		name   string
		column int
	}{{"RLIMIT_AS", 0}, {"RLIMIT_DATA", 5}} {
		n, ok := f.rlimits[r.name]
		if !ok {
			continue
		}
		used := int64(0)
		if r.column < len(columns) {
			if pages, ok := parseBytes(columns[r.column]); ok && pages < math.MaxInt64/f.pageSize {
				used = pages * f.pageSize
			}
		}
		list = append(list, left(r.name, n, used))
	}
	return list
}

// unlimited is from where a number of bytes means that there is no limit; version 1 has no other word for it.
const unlimited = 1 << 60

// hierarchy says how a version of memory cgroups names its files.
type hierarchy struct {
	version  string
	limits   []string
	usage    string
	inactive string // key in memory.stat of file pages to be dropped first, of the whole subtree
}

var (
	cgroup1 = hierarchy{"cgroup v1", []string{"memory.limit_in_bytes"}, "memory.usage_in_bytes", "total_inactive_file"}
	cgroup2 = hierarchy{"cgroup v2", []string{"memory.max", "memory.high"}, "memory.current", "inactive_file"}
)

// cgroupLimits are those of the groups that this process is in, in both versions, from its own group up to the root. A
// file that is missing or makes no sense is no limit: the other limits still hold.
func cgroupLimits(root fs.FS) []limit {
	text, err := fs.ReadFile(root, "proc/self/cgroup")
	if err != nil {
		return nil
	}
	mounts := cgroupMounts(root)
	var list []limit
	for line := range strings.Lines(string(text)) {
		// "4:memory,cpu:/a/b" in version 1, "0::/a/b" in version 2.
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(parts) < 3 {
			continue
		}
		switch {
		case parts[0] == "0" && parts[1] == "":
			list = append(list, walk(root, cgroup2, mounts.v2, parts[2])...)
		case hasWord(parts[1], "memory"):
			list = append(list, walk(root, cgroup1, mounts.v1, parts[2])...)
		}
	}
	return list
}

// walk reads the limits of group, and of its ancestors as far as the mount shows them.
func walk(root fs.FS, h hierarchy, m mount, group string) []limit {
	var list []limit
	for _, dir := range m.dirs(group) {
		for _, name := range h.limits {
			n, ok := number(root, path.Join(dir, name))
			if !ok || n >= unlimited {
				continue
			}
			used, _ := number(root, path.Join(dir, h.usage))
			inactive, _ := field(root, path.Join(dir, "memory.stat"), h.inactive)
			list = append(list, left(fmt.Sprintf("%s /%s", h.version, path.Join(dir, name)), n, max(0, used-inactive)))
		}
	}
	return list
}

// mount is where a cgroup hierarchy, or the part of it below root, can be read.
type mount struct{ root, point string }

// dirs are the directories of group and of its ancestors, deepest first, as paths in an fs.FS. A group that the mount
// does not show, as from inside some containers, is taken to be the one that is mounted.
func (m mount) dirs(group string) []string {
	rel := "."
	group = path.Clean("/" + group)
	switch below, ok := strings.CutPrefix(group, strings.TrimSuffix(m.root, "/")+"/"); {
	case ok:
		rel = path.Clean(below)
	case m.root == "/":
		rel = path.Clean(strings.TrimPrefix(group, "/"))
	}
	point := strings.TrimPrefix(path.Clean(m.point), "/")
	var list []string
	for ; rel != "."; rel = path.Dir(rel) {
		list = append(list, path.Join(point, rel))
	}
	return append(list, point)
}

// cgroupMounts finds the memory hierarchies among the mounts, and takes the usual places where it cannot.
func cgroupMounts(root fs.FS) (found struct{ v1, v2 mount }) {
	found.v1 = mount{"/", "/sys/fs/cgroup/memory"}
	found.v2 = mount{"/", "/sys/fs/cgroup"}
	text, err := fs.ReadFile(root, "proc/self/mountinfo")
	if err != nil {
		return found
	}
	for line := range strings.Lines(string(text)) {
		// 35 31 0:32 ROOT POINT rw,relatime [tags] - TYPE source options
		head, tail, ok := strings.Cut(strings.TrimSpace(line), " - ")
		l, r := strings.Fields(head), strings.Fields(tail)
		if !ok || len(l) < 5 || len(r) < 3 {
			continue
		}
		m := mount{unescape.Replace(l[3]), unescape.Replace(l[4])}
		switch {
		case r[0] == "cgroup2":
			found.v2 = m
		case r[0] == "cgroup" && hasWord(r[2], "memory"):
			found.v1 = m
		}
	}
	return found
}

// unescape undoes how the kernel writes white space and backslashes in mount tables.
var unescape = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)

func hasWord(list, word string) bool {
	for w := range strings.SplitSeq(list, ",") {
		if w == word {
			return true
		}
	}
	return false
}

// number reads a file that holds one number. "max" and whatever else is none are not ok.
func number(root fs.FS, name string) (int64, bool) {
	text, err := fs.ReadFile(root, name)
	if err != nil {
		return 0, false
	}
	return parseBytes(strings.TrimSpace(string(text)))
}

// field reads the number after a key that begins a line.
func field(root fs.FS, name, key string) (int64, bool) {
	text, err := fs.ReadFile(root, name)
	if err != nil {
		return 0, false
	}
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) >= 2 && f[0] == key {
			return parseBytes(f[1])
		}
	}
	return 0, false
}

// parseBytes is a number that is not negative. One too large for int64 is the largest: some files hold uint64.
func parseBytes(s string) (int64, bool) {
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		return 0, false
	}
	return int64(min(n, math.MaxInt64)), true
}
