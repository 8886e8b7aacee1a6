package device_test

import (
	"fmt"
	"regexp"
	"runtime"
	"strings"
	"testing"

	"github.com/trainerrank/engine/device"
)

// recorder is a TB that keeps its cleanups and its errors.
type recorder struct {
	cleanups []func()
	errors   []string
}

func (r *recorder) Helper()          {}
func (r *recorder) Cleanup(f func()) { r.cleanups = append(r.cleanups, f) }
func (r *recorder) Errorf(f string, args ...any) {
	r.errors = append(r.errors, fmt.Sprintf(f, args...))
}
func (r *recorder) end() { r.cleanups[0]() }
func allocate(d device.Device, n int64) (*device.Block, string) {
	b, err := d.Allocate(device.Ballast, n)
	_, file, line, _ := runtime.Caller(0)
	if err != nil {
		panic(err)
	}
	return b, fmt.Sprintf("%s:%d", file, line-1)
}

// bare is a device that cannot list what is live.
type bare struct{ device.Device }

func TestLeaksAreReportedWithTheLineThatTookThem(t *testing.T) {
	h, err := device.NewHost(1 << 20)
	if err != nil {
		t.Fatal(err)
	}
	old, _ := allocate(h, 1)
	var rec, unlisted, clean recorder
	device.CheckLeaks(&clean, h)
	clean.end()
	if clean.errors != nil {
		t.Errorf("a test that leaks nothing: %v", clean.errors)
	}

	device.CheckLeaks(&rec, h)
	device.CheckLeaks(&unlisted, bare{h})
	gone, _ := allocate(h, 100)
	gone.Free()
	leak, where := allocate(h, 5000)
	_, file, line, _ := runtime.Caller(0)
	r, err := h.Reserve(device.Sizes{device.Outputs: 1, device.Scratch: 1})
	if err != nil {
		t.Fatal(err)
	}
	r.ReleaseScratch()
	rec.end()
	unlisted.end()
	want := strings.Join([]string{
		"device host does not hold what it held before the test:",
		"  allocated bytes: 4096 before, 16384 now",
		"  bytes in use for ballast: 4096 before, 12288 now",
		"  blocks: 1 before, 2 now",
		"  reservations: 0 before, 1 now",
		"",
	}, "\n")
	listed := want + fmt.Sprintf("  leaked: block of ballast 8192 from %s, called from %s:%d\n", where, file, line-1) +
		fmt.Sprintf("  leaked: reservation of outputs 4096 from %s:%d", file, line+1)
	if got := strings.Join(rec.errors, "|"); got != listed {
		t.Errorf("got\n%s\nwant\n%s", got, listed)
	}
	if got := strings.Join(unlisted.errors, "|"); got != strings.TrimSuffix(want, "\n") {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}

	var freed recorder
	device.CheckLeaks(&freed, h)
	leak.Free()
	r.Release()
	old.Free()
	freed.end()
	if ok, _ := regexp.MatchString(`blocks: 2 before, 0 now`, strings.Join(freed.errors, "")); !ok {
		t.Errorf("a test that frees what is not its own: %v", freed.errors)
	}
}
