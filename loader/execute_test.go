package loader

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/fstest"
	"time"

	"github.com/trainerrank/engine/device"
)

// lab is a set and a device to load it to, which must be empty when the test is over.
type lab struct {
	*testing.T
	set *Set
	dev *device.Host
}

func newLab(t *testing.T, s *Set, capacity int64) *lab {
	t.Helper()
	dev, err := device.NewHost(capacity)
	check(t, err)
	device.CheckLeaks(t, dev)
	return &lab{t, s, dev}
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// write lays files into a new folder.
func write(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, data := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(data), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// want are the bytes of a tensor, read without any plan.
func (l *lab) want(x *Tensor) []byte {
	l.Helper()
	p := make([]byte, x.Bytes)
	check(l.T, l.set.ReadAt(x, p, 0))
	return p
}

// same checks that all tensors of the set are there, byte by byte.
func (l *lab) same(tensors *Tensors) {
	l.Helper()
	for _, name := range l.set.Names() {
		x, _ := l.set.Tensor(name)
		m, ok := tensors.Mem(x)
		if !ok || !bytes.Equal(m.Raw(), l.want(x)) {
			l.Errorf("tensor %q: there %v, or other bytes", name, ok)
		}
	}
}

// receiver takes what is delivered.
type receiver struct {
	mu    sync.Mutex
	got   map[*Tensor][]byte
	parts map[*Tensor]int64
	order []*Tensor
}

func (r *receiver) take(p Piece) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.got == nil {
		r.got, r.parts = map[*Tensor][]byte{}, map[*Tensor]int64{}
	}
	if r.got[p.Tensor] == nil {
		r.got[p.Tensor] = make([]byte, p.Tensor.Bytes)
	}
	copy(r.got[p.Tensor][p.Offset:], p.Data)
	r.parts[p.Tensor] += int64(len(p.Data))
	r.order = append(r.order, p.Tensor)
	return nil
}

// sand is a model folder of random files on disk: tensors of all types and of any size, empty ones, names in any script, tensors that the
// index does not list.
func sand(t *testing.T, rng *rand.Rand, files int, largest int) *Set {
	t.Helper()
	folder := map[string]string{}
	var pairs []string
	for f := range files {
		file := fmt.Sprintf("sub/model-%d.safetensors", f)
		var entries []string
		at := 0
		for i := range 1 + rng.IntN(12) {
			d := DType(1 + rng.IntN(len(dtypes)-1))
			n := 0 // of 24 bits, so that every type has whole bytes
			if rng.IntN(6) > 0 {
				n = rng.IntN(1 + largest/3)
			}
			size := n * 3
			if d.Bits() > 24 || 24%d.Bits() != 0 {
				n = n * 3 * 8 / d.Bits()
				size = n * d.Bits() / 8
				for n*d.Bits()%8 != 0 {
					n--
					size = n * d.Bits() / 8
				}
			} else {
				n *= 24 / d.Bits()
			}
			name := fmt.Sprintf("層.%d.%d", f, i)
			entries = append(entries, entry(name, d.String(), fmt.Sprintf("[%d]", n), at, at+size))
			at += size
			if rng.IntN(8) > 0 || i == 0 {
				pairs = append(pairs, name, file)
			}
		}
		folder[file] = string(whole(header(entries...), at))
	}
	folder[indexName] = weightMap(pairs...)
	folder["stray.safetensors"] = "no safetensors at all"
	folder["sub/more/model.safetensors"] = "nor this"
	s, err := Open(write(t, folder))
	check(t, err)
	t.Cleanup(func() { s.Close() })
	return s
}

// For every copier and every way to plan, at the smallest budget, a little above and far above, a load holds what its plan says, and
// brings every byte to where it belongs; one byte below it is refused.
func TestLoadsKeepTheirPlanAtEveryBudget(t *testing.T) {
	leaks(t)
	rng := rand.New(rand.NewPCG(4, 4))
	exact, loads := 0, 0
	for round := range 60 {
		s := sand(t, rng, 1+rng.IntN(4), []int{30, 5000, 60_000}[rng.IntN(3)])
		for _, name := range CopierNames() {
			c, err := NewCopier(name, 1+rng.IntN(3))
			check(t, err)
			o := StatsOptions{}
			if rng.IntN(2) == 0 {
				o.Keep = func(x *Tensor) bool { return x.Bytes%5 != 1 }
			}
			if rng.IntN(3) == 0 {
				o.Resident = func(x *Tensor) bool { return x.Offset%3 != 0 }
			}
			if rng.IntN(2) == 0 {
				o.Atom = func(x *Tensor) int64 { return 1 + x.Bytes/7 }
			}
			p := PlanParams{
				QueueSize: rng.IntN(6) - 1, Group: 1, AccumulateResident: rng.IntN(2) == 0, YieldClone: rng.IntN(3) == 0, Align: device.PageSize,
				DepthFirst: rng.IntN(2) == 0, Copier: c.Costs(s.Files), Classic: name != CopierMmap && rng.IntN(5) == 0,
			}
			if rng.IntN(3) == 0 {
				p.MaxChunk = 100 + rng.Int64N(70_000)
			}
			stats := StatsOf(s, o)
			p.Budget = 1
			_, err = Fit(stats, p)
			var e *BudgetInfeasibleError
			least := int64(1)
			if errors.As(err, &e) {
				if least = e.Minimum; least == 0 {
					continue // a tensor above the limit of chunks
				}
				p.Budget = least - 1
				if _, err := Fit(stats, p); !errors.As(err, &e) {
					t.Fatalf("a byte below the smallest budget: %v", err)
				}
			}
			for _, budget := range []int64{least, least + 1, least + 4096, least + least/3, 1 << 30} {
				p.Budget = budget
				plan, err := Fit(stats, p)
				check(t, err)
				capacity := budget
				if p.Classic {
					capacity += 1 << 20 // it does not count pages
				}
				l := newLab(t, s, capacity)
				var r receiver
				var last int64
				tensors, report, err := s.Execute(t.Context(), plan, LoadOptions{Device: l.dev, Copier: c, Threads: 1 + rng.IntN(3), Deliver: r.take,
					Progress: func(done, total int64) {
						if done <= last || done > total {
							t.Errorf("progress %d of %d after %d", done, total, last)
						}
						last = done
					}})
				if err != nil {
					t.Fatalf("round %d, %s, %+v:\n%v\n%v", round, name, p, plan, err)
				}
				loads++
				if report.Peak > report.Predicted || report.Predicted > budget {
					t.Errorf("round %d, %s: peak %d, predicted %d, budget %d\n%+v\n%v", round, name, report.Peak, report.Predicted, budget, p, plan)
				}
				if report.Peak == report.Predicted {
					exact++
				}
				if used := l.dev.Stats().PeakInUse; !p.Classic && used != report.Peak {
					t.Errorf("round %d, %s: the device saw %d, the report %d", round, name, used, report.Peak)
				}
				l.checkAll(stats, p, tensors, &r)
				var kept int64
				for i := range stats {
					kept += stats[i].Kept
				}
				if report.Bytes != kept || last != kept {
					t.Errorf("round %d, %s: %d bytes reported, progress up to %d, of %d", round, name, report.Bytes, last, kept)
				}
				tensors.Free()
				tensors.Free()
			}
		}
	}
	t.Logf("%d loads, the peak exactly as predicted in %d", loads, exact)
	if exact*10 < loads*9 {
		t.Errorf("the peak was exact in only %d of %d loads", exact, loads)
	}
}

// checkAll checks that each kept tensor has arrived once, where it should.
func (l *lab) checkAll(stats []FileStats, p PlanParams, tensors *Tensors, r *receiver) {
	l.Helper()
	homes := 0
	for i := range stats {
		for j := range stats[i].Tensors {
			k := &stats[i].Tensors[j]
			x, _ := l.set.Tensor(k.Name)
			if p.AccumulateResident && k.Resident {
				homes++
				if m, ok := tensors.Mem(x); !ok || !bytes.Equal(m.Raw(), l.want(x)) {
					l.Errorf("resident %v differs", x)
				}
				if r.got[x] != nil {
					l.Errorf("resident %v was delivered", x)
				}
				continue
			}
			if r.got[x] == nil || r.parts[x] != x.Bytes || !bytes.Equal(r.got[x], l.want(x)) {
				l.Errorf("delivered %v differs: %d bytes", x, r.parts[x])
			}
		}
	}
	if tensors.Len() != homes {
		l.Errorf("%d tensors have memory, want %d", tensors.Len(), homes)
	}
}

// raw are the parameters of a load in which everything stays.
func raw(s *Set, c Copier, budget int64) PlanParams {
	return PlanParams{Budget: budget, Group: 1, AccumulateResident: true, Align: device.PageSize, Copier: c.Costs(s.Files)}
}

// A read that fails at byte k, for every k of a small file, is an error that names file and offset, and leaves nothing.
func TestEveryFailingByteIsNamed(t *testing.T) {
	leaks(t)
	m := matrix(8, 10)
	var at atomic.Int64
	var cause atomic.Pointer[error]
	at.Store(-1)
	s, err := OpenFS(oddFS{m, func(r io.ReaderAt, p []byte, off int64) (int, error) {
		k := at.Load()
		if k < off || k >= off+int64(len(p)) || strings.HasPrefix(string(p), "{") {
			return r.ReadAt(p, off)
		}
		n, _ := r.ReadAt(p[:k-off], off)
		return n, *cause.Load()
	}}, "m")
	check(t, err)
	for _, failure := range []error{syscall.EIO, io.EOF} {
		cause.Store(&failure)
		for _, accumulate := range []bool{true, false} {
			for _, most := range []int64{0, 25} {
				first, last := s.Files[0].DataStart, s.Files[0].Size
				for k := first; k < last; k++ {
					at.Store(-1)
					l := newLab(t, s, 1<<20)
					p := raw(s, pread{}, 1<<20)
					p.AccumulateResident, p.MaxChunk = accumulate, most
					plan, err := Fit(StatsOf(s, StatsOptions{Atom: func(*Tensor) int64 { return 5 }}), p)
					check(t, err)
					var r receiver
					at.Store(k)
					tensors, _, err := s.Execute(t.Context(), plan, LoadOptions{Device: l.dev, Copier: pread{}, Threads: 2, Deliver: r.take})
					var e *ReadError
					if !errors.As(err, &e) || tensors != nil || e.Offset+e.Got != k && s.Files[1].DataStart > k || !strings.HasPrefix(e.Path, "m/model-0000") || e.Tensor == "" {
						t.Fatalf("byte %d: %v", k, err)
					}
					if want := failure; want == syscall.EIO && !errors.Is(err, want) || want == io.EOF && !errors.Is(err, io.ErrUnexpectedEOF) {
						t.Fatalf("byte %d: %v", k, err)
					}
					if now := l.dev.Stats(); now.Allocated != 0 || now.Blocks != 0 {
						t.Fatalf("byte %d: left behind: %v", k, now)
					}
				}
			}
		}
	}
}

func TestInterruptedAndShortReadsAreCompleted(t *testing.T) {
	leaks(t)
	var calls atomic.Int64
	s, err := OpenFS(oddFS{matrix(16, 100), func(r io.ReaderAt, p []byte, off int64) (int, error) {
		if calls.Add(1)%2 == 0 {
			return 0, syscall.EINTR
		}
		return r.ReadAt(p[:(len(p)+2)/3], off)
	}}, "m")
	check(t, err)
	l := newLab(t, s, 1<<20)
	plan, err := Fit(StatsOf(s, StatsOptions{}), raw(s, pread{}, 1<<20))
	check(t, err)
	tensors, _, err := s.Execute(t.Context(), plan, LoadOptions{Device: l.dev, Copier: pread{}})
	check(t, err)
	l.same(tensors)
	tensors.Free()
}

// A load that is cancelled, or whose consumer fails, at any of its pieces leaves the device as it was.
func TestStoppedAtEveryPiece(t *testing.T) {
	leaks(t)
	s := sand(t, rand.New(rand.NewPCG(8, 1)), 3, 9000)
	mine := errors.New("no room")
	for _, how := range []struct {
		name string
		p    PlanParams
	}{
		{"stream", PlanParams{}}, {"copies", PlanParams{YieldClone: true}},
		{"half stays", PlanParams{AccumulateResident: true}}, {"classic", PlanParams{AccumulateResident: true, YieldClone: true, Classic: true}},
	} {
		for _, name := range CopierNames() {
			if how.p.Classic && name == CopierMmap {
				continue
			}
			c, err := NewCopier(name, 2)
			check(t, err)
			p := how.p
			p.Budget, p.Group, p.QueueSize, p.MaxChunk, p.Align, p.Copier = 1<<30, 1, 2, 12_000, device.PageSize, c.Costs(s.Files)
			plan, err := Fit(StatsOf(s, StatsOptions{Resident: func(x *Tensor) bool { return x.Bytes%2 == 0 }}), p)
			check(t, err)
			for at := int64(0); ; at++ {
				l := newLab(t, s, 1<<30)
				before := l.dev.Stats()
				ctx, cancel := context.WithCancel(t.Context())
				if at == 0 {
					cancel()
				}
				var pieces atomic.Int64
				fail := at%2 == 1
				tensors, _, err := s.Execute(ctx, plan, LoadOptions{Device: l.dev, Copier: c, Threads: 2, Deliver: func(Piece) error {
					if pieces.Add(1) == at {
						if fail {
							return mine
						}
						cancel()
					}
					return nil
				}})
				cancel()
				if err == nil {
					tensors.Free()
					if at < 3 {
						t.Errorf("%s, %s: nothing stopped it at piece %d", how.name, name, at)
					}
					break
				}
				if fail && !errors.Is(err, mine) || !fail && !errors.Is(err, context.Canceled) {
					t.Errorf("%s, %s, piece %d: %v", how.name, name, at, err)
				}
				if now := l.dev.Stats(); now.InUse != before.InUse || now.Blocks != 0 || tensors != nil {
					t.Errorf("%s, %s, piece %d: left behind %v", how.name, name, at, now)
				}
			}
		}
	}
}

// A file that is cut, grown or replaced between plan and read, or while it is read, is an error with every copier.
func TestChangedFilesAreNoticed(t *testing.T) {
	leaks(t)
	const n = 3 << 20
	for _, name := range CopierNames() {
		for what, change := range map[string]func(path string) error{
			"cut":     func(p string) error { return os.Truncate(p, 1<<20) },
			"grown":   func(p string) error { return os.Truncate(p, 4<<20) },
			"written": func(p string) error { return os.Chtimes(p, time.Time{}, time.Now().Add(time.Hour)) },
			"removed": os.Remove,
			"replaced": func(p string) error {
				return errors.Join(os.Rename(p, p+".old"), os.Link(p+".old", p+".2"), copyFile(p+".old", p))
			},
		} {
			for _, during := range []bool{false, true} {
				dir := write(t, map[string]string{singleName: string(whole(header(entry("a", "U8", fmt.Sprintf("[%d]", n), 0, n)), n))})
				path := filepath.Join(dir, singleName)
				s, err := Open(dir)
				check(t, err)
				c, err := NewCopier(name, 1)
				check(t, err)
				l := newLab(t, s, 1<<30)
				p := raw(s, c, 1<<30)
				p.AccumulateResident, p.MaxChunk, p.QueueSize = false, 1<<20, -1
				plan, err := Fit(StatsOf(s, StatsOptions{Atom: func(*Tensor) int64 { return 1 << 20 }}), p)
				check(t, err)
				if !during {
					check(t, change(path))
				}
				pieces := 0
				_, _, err = s.Execute(t.Context(), plan, LoadOptions{Device: l.dev, Copier: c, Deliver: func(p Piece) error {
					if pieces++; pieces == 1 && during {
						return change(path)
					}
					bytes.Count(p.Data, []byte{0}) // a mapping is only touched here
					return nil
				}})
				var changed *ChangedError
				var short *ReadError
				switch {
				case errors.As(err, &changed):
					if changed.Path != path {
						t.Errorf("%s, %s: %v", name, what, err)
					}
				case what == "cut" && during && errors.As(err, &short):
					if short.Path != path || short.Tensor != "a" || !strings.Contains(Hint(err), "changed while") {
						t.Errorf("%s, %s: %v; %s", name, what, err, Hint(err))
					}
				default:
					t.Errorf("%s, %s, during the load %v: %v", name, what, during, err)
				}
				if !during && pieces > 0 {
					t.Errorf("%s, %s: read before it was noticed", name, what)
				}
				if Hint(err) == "" {
					t.Errorf("%s, %s: no hint for %v", name, what, err)
				}
				check(t, s.Close())
			}
		}
	}
}

func copyFile(from, to string) error {
	data, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return os.WriteFile(to, data, 0o644)
}

// A plan of other files, tensors or costs is refused before anything is read.
func TestExecuteRefusesAPlanThatIsNotOfTheSet(t *testing.T) {
	leaks(t)
	var reads atomic.Int64
	count := func(r io.ReaderAt, p []byte, off int64) (int, error) {
		reads.Add(1)
		return r.ReadAt(p, off)
	}
	s, err := OpenFS(oddFS{matrix(4, 10), count}, "m")
	check(t, err)
	other, err := OpenFS(matrix(4, 11), "m")
	check(t, err)
	elsewhere, err := OpenFS(matrix(4, 10), "n")
	check(t, err)
	plan := func(s *Set, change func(*PlanParams)) *FitPlan {
		p := raw(s, pread{}, 1<<20)
		if change != nil {
			change(&p)
		}
		f, err := Fit(StatsOf(s, StatsOptions{}), p)
		check(t, err)
		return f
	}
	sums := StatsOf(s, StatsOptions{})
	for i := range sums {
		sums[i].Tensors = nil
	}
	vague, err := Fit(sums, raw(s, pread{}, 1<<20))
	check(t, err)
	l := newLab(t, s, 1<<20)
	reads.Store(0)
	for want, c := range map[string]struct {
		p *FitPlan
		o LoadOptions
	}{
		"no device or no copier":   {plan(s, nil), LoadOptions{Device: l.dev}},
		"tensor":                   {plan(other, nil), LoadOptions{Device: l.dev, Copier: pread{}}},
		"file":                     {plan(elsewhere, nil), LoadOptions{Device: l.dev, Copier: pread{}}},
		"the plan is not one":      {vague, LoadOptions{Device: l.dev, Copier: pread{}}},
		"costs of the copier":      {plan(s, func(p *PlanParams) { p.Copier.Fixed = 1 }), LoadOptions{Device: l.dev, Copier: pread{}}},
		"nobody takes it":          {plan(s, func(p *PlanParams) { p.AccumulateResident = false }), LoadOptions{Device: l.dev, Copier: pread{}}},
		"cannot show one":          {plan(s, func(p *PlanParams) { p.Copier = free{}.Costs(s.Files) }), LoadOptions{Device: l.dev, Copier: free{}}},
		"for 3 ranks that read":    {plan(s, func(p *PlanParams) { p.Group = 3 }), LoadOptions{Device: l.dev, Copier: pread{}}},
		"asked 4096 bytes, 0 of 0": {plan(s, nil), LoadOptions{Device: newLab(t, s, 0x0000).empty(), Copier: pread{}}},
	} {
		if tensors, _, err := s.Execute(t.Context(), c.p, c.o); err == nil || !strings.Contains(err.Error(), want) || tensors != nil {
			t.Errorf("%v, want %s", err, want)
		}
	}
	if reads.Load() > 0 {
		t.Errorf("%d reads", reads.Load())
	}
}

// empty is a device without capacity: [device.NewHost] takes 0 for the default.
func (l *lab) empty() device.Device {
	s, err := device.NewSpace("none", 0, nil)
	check(l.T, err)
	return s
}

// free is a copier that lies about its costs.
type free struct{ pread }

func (free) Costs(files []*File) Costs {
	m := make([]Ratio, len(files))
	for i := range m {
		m[i] = Ratio{0, 1}
	}
	return Costs{Multiplier: m}
}

// Links into a store of blobs are read like files, by every copier.
func TestLinksAreLoadedByEveryCopier(t *testing.T) {
	leaks(t)
	blobs, dir := t.TempDir(), t.TempDir()
	for name, data := range three() {
		check(t, os.WriteFile(filepath.Join(blobs, "blob-"+name), []byte(data), 0o644))
		check(t, os.Symlink(filepath.Join(blobs, "blob-"+name), filepath.Join(dir, name)))
	}
	s, err := Open(dir)
	check(t, err)
	defer s.Close()
	for _, name := range CopierNames() {
		c, err := NewCopier(name, 2)
		check(t, err)
		l := newLab(t, s, 1<<30)
		plan, err := Fit(StatsOf(s, StatsOptions{}), raw(s, c, 1<<30))
		check(t, err)
		tensors, report, err := s.Execute(t.Context(), plan, LoadOptions{Device: l.dev, Copier: c, Threads: 2})
		check(t, err)
		l.same(tensors)
		tensors.Free()
		if report.Copier != name || !strings.Contains(report.String(), "predicted peak") {
			t.Errorf("%v", report)
		}
	}
}

func TestCopiersAreNamed(t *testing.T) {
	if _, err := NewCopier("fast", 1); err == nil || !strings.Contains(err.Error(), `"fast" is not known; there are pread`) {
		t.Error(err)
	}
	if !slices.Contains(CopierNames(), CopierPread) {
		t.Error(CopierNames())
	}
	m := fstest.MapFS{singleName: {Data: whole(good, 8)}}
	s, err := OpenFS(m, "m")
	check(t, err)
	if c := Probe(s, 2); c.Name() != CopierPread {
		t.Errorf("for files that are not on disk: %s", c.Name())
	}
	var _ fs.FS = m
}
