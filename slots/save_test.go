package slots

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/trainerrank/engine/collective"
	"github.com/trainerrank/engine/device"
)

// counting makes a slot "x" whose checkpoint says a number.
func counting(s *Set) (*Buffer, error) {
	ctx := context.Background()
	if err := s.Create(ctx, "x", Config{Rank: 2, Alpha: 2, Targets: []string{"q_proj"}}); err != nil {
		return nil, err
	}
	return s.Buffer(ctx, "x", "number", []int64{1000}, nil)
}

func saveNumber(s *Set, b *Buffer, n int, dir string) error {
	v, err := b.Value()
	if err != nil {
		return err
	}
	for i := range v {
		v[i] = float32(n)
	}
	return s.Save(context.Background(), "x", dir)
}

// number is what the checkpoint in a folder says, -1 if there is none.
func number(t testing.TB, dir string) int {
	t.Helper()
	ctx := context.Background()
	s := newSet(t, tiny, 1<<24, Options{})
	err := s.Load(ctx, "y", dir, LoadOptions{Inference: true})
	if errors.Is(err, os.ErrNotExist) {
		if _, err := os.Lstat(dir); errors.Is(err, os.ErrNotExist) {
			return -1
		}
	}
	must(t, err)
	b, err := s.Buffer(ctx, "y", "number", []int64{1000}, nil)
	must(t, err)
	v, err := b.Value()
	must(t, err)
	for i := range v {
		if v[i] != v[0] {
			t.Fatalf("element %d is %g and the first %g", i, v[i], v[0])
		}
	}
	return int(v[0])
}

func siblings(t testing.TB, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(filepath.Dir(dir))
	must(t, err)
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// bothWays runs a test with and without the exchange of folders in one step.
func bothWays(t *testing.T, test func(t *testing.T)) {
	t.Run("exchange", func(t *testing.T) {
		a, b := t.TempDir(), t.TempDir()
		if err := exchange(a, b); errors.Is(err, errors.ErrUnsupported) {
			t.Skip("SKIPPED: folders cannot be exchanged here")
		}
		test(t)
	})
	t.Run("two renames", func(t *testing.T) {
		canExchange = false
		defer func() { canExchange = true }()
		test(t)
	})
}

func TestCrashBetweenAnyTwoStepsOfASaveLeavesTheOldOrTheNew(t *testing.T) {
	bothWays(t, func(t *testing.T) {
		ctx := context.Background()
		for _, first := range []bool{true, false} {
			for k := 0; ; k++ {
				dir := filepath.Join(t.TempDir(), "checkpoint")
				s := newSet(t, tiny, 1<<24, Options{})
				b, err := counting(s)
				must(t, err)
				old := -1
				if !first {
					old = 1
					must(t, saveNumber(s, b, 1, dir))
				}
				v, _ := b.Value()
				for i := range v {
					v[i] = 2
				}
				p, err := s.Prepare(ctx, "x", dir)
				must(t, err)
				steps := replacement(p.temp, p.dir, canExchange)
				for _, st := range steps[:min(k, len(steps))] {
					must(t, st.do())
				}
				got := number(t, dir)
				if got != old && got != 2 || k == 0 && got != old || k >= len(steps) && got != 2 {
					t.Errorf("after %d of %d steps the checkpoint is %d, before %d", k, len(steps), got, old)
				}
				// The next save finds its way, and leaves nothing else.
				must(t, saveNumber(s, b, 3, dir))
				if got, names := number(t, dir), siblings(t, dir); got != 3 || !cmp.Equal(names, []string{"checkpoint"}) {
					t.Errorf("after a crash at step %d and another save the checkpoint is %d, the folder has %q", k, got, names)
				}
				if k > len(steps) {
					break
				}
			}
		}
	})
}

// TestSaverChild is no test: it saves for ever, and is killed by the test below.
func TestSaverChild(t *testing.T) {
	dir := os.Getenv("SLOTS_TEST_SAVER")
	if dir == "" {
		t.Skip("it is the child of another test")
	}
	canExchange = os.Getenv("SLOTS_TEST_EXCHANGE") != ""
	dev, err := device.NewHost(1 << 24)
	must(t, err)
	s := New(tiny, dev, Options{})
	b, err := counting(s)
	must(t, err)
	n, err := strconv.Atoi(os.Getenv("SLOTS_TEST_FIRST"))
	must(t, err)
	for ; ; n++ {
		fmt.Printf("begin %d\n", n)
		must(t, saveNumber(s, b, n, dir))
		fmt.Printf("end %d\n", n)
	}
}

func TestKilledSaverLeavesTheOldOrTheNewCheckpoint(t *testing.T) {
	kills := 200
	if testing.Short() {
		kills = 20
	}
	bothWays(t, func(t *testing.T) {
		rng := rand.New(rand.NewPCG(7, 7))
		dir := filepath.Join(t.TempDir(), "checkpoint")
		last, mid := -1, 0
		for range kills {
			c := exec.Command(os.Args[0], "-test.run=^TestSaverChild$", "-test.v")
			c.Env = append(os.Environ(), "SLOTS_TEST_SAVER="+dir, fmt.Sprintf("SLOTS_TEST_FIRST=%d", last+1))
			if canExchange {
				c.Env = append(c.Env, "SLOTS_TEST_EXCHANGE=1")
			}
			out, err := c.StdoutPipe()
			must(t, err)
			must(t, c.Start())
			begun, ended := -1, last
			lines := bufio.NewScanner(out)
			for lines.Scan() {
				word, n, _ := strings.Cut(lines.Text(), " ")
				at, err := strconv.Atoi(n)
				switch {
				case err != nil:
				case word == "begin":
					if begun < 0 { // the first save of the child
						time.AfterFunc(time.Duration(rng.Int64N(int64(12*time.Millisecond))), func() { c.Process.Kill() })
					}
					begun = at
				case word == "end":
					ended = at
				}
			}
			_ = c.Wait()
			if begun < 0 {
				t.Fatal("the child did not save")
			}
			if begun > ended {
				mid++
			}
			got := number(t, dir)
			if got != ended && got != begun {
				t.Fatalf("the checkpoint is %d; save %d was done and %d begun", got, ended, begun)
			}
			last = max(got, ended)
		}
		if mid < kills/4 {
			t.Errorf("only %d of %d kills came during a save", mid, kills)
		}
	})
}

func TestReaderBesideASaverAlwaysHasAWholeCheckpoint(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "checkpoint")
	a, b := t.TempDir(), t.TempDir()
	if err := exchange(a, b); err != nil {
		t.Skip("SKIPPED: folders cannot be exchanged here")
	}
	s := newSet(t, tiny, 1<<24, Options{})
	buf, err := counting(s)
	must(t, err)
	must(t, saveNumber(s, buf, 0, dir))
	done := make(chan error)
	go func() {
		var err error
		for n := 1; n <= 30 && err == nil; n++ {
			err = saveNumber(s, buf, n, dir)
		}
		done <- err
	}()
	last := 0
	for {
		got := number(t, dir)
		if got < last {
			t.Errorf("the checkpoint goes back from %d to %d", last, got)
		}
		last = got
		select {
		case err := <-done:
			must(t, err)
			if got := number(t, dir); got != 30 {
				t.Errorf("the last checkpoint is %d", got)
			}
			return
		default:
		}
	}
}

func TestFolderWithAnythingElseIsNotReplaced(t *testing.T) {
	ctx := context.Background()
	s := trained(t, Options{})
	dir := t.TempDir()
	must(t, s.Save(ctx, "x", dir)) // an empty folder may be
	note := filepath.Join(dir, "README.md")
	must(t, os.WriteFile(note, []byte("mine"), 0o600))
	var e *AdapterError
	if err := s.Save(ctx, "x", dir); !errors.As(err, &e) || e.Item != "README.md" {
		t.Errorf("got %v", err)
	}
	if b, err := os.ReadFile(note); err != nil || string(b) != "mine" {
		t.Errorf("the file is %q, %v", b, err)
	}
	if err := s.Save(ctx, "x", note); !errors.As(err, &e) {
		t.Errorf("a file is replaced by a folder: %v", err)
	}
	must(t, os.Remove(note))
	// One that appears after the check is not deleted either.
	p, err := s.Prepare(ctx, "x", dir)
	must(t, err)
	must(t, os.WriteFile(note, []byte("mine"), 0o600))
	if err := p.Finish(ctx); !errors.As(err, &e) {
		t.Errorf("got %v", err)
	}
	must(t, os.Remove(note))
	must(t, p.Finish(ctx))
	must(t, p.Abort(ctx))
	if err := p.Finish(ctx); err == nil {
		t.Error("a save can be finished twice")
	}
	// A link to a folder stays one.
	link := filepath.Join(t.TempDir(), "link")
	must(t, os.Symlink(dir, link))
	must(t, s.Save(ctx, "x", link))
	if to, err := os.Readlink(link); err != nil || to != dir {
		t.Errorf("the link is %q, %v", to, err)
	}
	must(t, s.Load(ctx, "y", link, LoadOptions{}))
}

func TestAbortedOrFailedSaveLeavesNothing(t *testing.T) {
	ctx := context.Background()
	s := trained(t, Options{})
	dir := filepath.Join(t.TempDir(), "checkpoint")
	p, err := s.Prepare(ctx, "x", dir)
	must(t, err)
	if names := siblings(t, dir); len(names) != 1 || !strings.HasPrefix(names[0], ".checkpoint.saving-") {
		t.Errorf("the folder has %q", names)
	}
	must(t, p.Abort(ctx))
	cancelled, cancel := context.WithCancel(ctx)
	cancel()
	if err := s.Save(cancelled, "x", dir); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if err := s.Save(ctx, "absent", dir); err == nil {
		t.Error("a slot that is not loaded is saved")
	}
	refused(t, s.Save(ctx, "", dir), "", "not saved")
	if names := siblings(t, dir); names != nil {
		t.Errorf("the folder has %q", names)
	}
}

func TestSecondSaveIntoAFolderEndsTheFirst(t *testing.T) {
	bothWays(t, func(t *testing.T) {
		ctx := context.Background()
		dir := filepath.Join(t.TempDir(), "checkpoint")
		s := newSet(t, tiny, 1<<24, Options{})
		b, err := counting(s)
		must(t, err)
		for n := 1; n <= 2; n++ {
			must(t, saveNumber(s, b, n, dir))
			first, err := s.Prepare(ctx, "x", dir)
			must(t, err)
			second, err := s.Prepare(ctx, "x", dir)
			must(t, err)
			if err := first.Finish(ctx); err == nil {
				t.Error("a save that was ended is finished")
			}
			must(t, first.Abort(ctx))
			if got := number(t, dir); got != n {
				t.Errorf("the checkpoint is %d, want %d", got, n)
			}
			must(t, second.Finish(ctx))
		}
		if names := siblings(t, dir); !cmp.Equal(names, []string{"checkpoint"}) {
			t.Errorf("the folder has %q", names)
		}
	})
}

func TestRanksSaveAndLoadTogether(t *testing.T) {
	for _, n := range []int{1, 2, 4} {
		ctx := context.Background()
		parent := t.TempDir()
		dir := filepath.Join(parent, "checkpoint")
		ranks(t, n, func(rank int, s *Set) error {
			b, err := counting(s)
			if err != nil {
				return err
			}
			v, err := b.Value()
			if err != nil {
				return err
			}
			v[0] = 5
			if err := s.Save(ctx, "x", dir); err != nil {
				return err
			}
			if err := s.Load(ctx, "y", dir, LoadOptions{}); err != nil {
				return err
			}
			same(t, "what was loaded", state(t, s, "y"), state(t, s, "x"))
			// Only rank 0 can know that this fails.
			err = s.Save(ctx, "x", filepath.Join(dir, weightsName, "checkpoint"))
			var peer *collective.PeerError
			if err == nil || errors.As(err, &peer) != (rank > 0) {
				t.Errorf("rank %d: got %v", rank, err)
			}
			// Only one rank can know that this does.
			path := dir
			if rank == n-1 {
				path = filepath.Join(parent, "absent")
			}
			before := state(t, s, "y")
			if err := s.Load(ctx, "y", path, LoadOptions{}); err == nil {
				t.Errorf("rank %d of %d: loaded", rank, n)
			}
			same(t, "a slot that could not be replaced on one rank", state(t, s, "y"), before)
			return s.Ensure(ctx, []string{"x", "y"})
		})
		if names := siblings(t, dir); !cmp.Equal(names, []string{"checkpoint"}) {
			t.Errorf("the folder has %q", names)
		}
	}
}

func TestRanksThatDoNotHoldTheSameAreToldSo(t *testing.T) {
	ctx := context.Background()
	ranks(t, 2, func(rank int, s *Set) error {
		c := Config{Rank: 2, Alpha: 2, Targets: []string{"q_proj"}, Seed: uint64(rank)}
		if err := s.Create(ctx, "x", c); err == nil || !strings.Contains(err.Error(), "do not have the same") {
			t.Errorf("rank %d: other seeds: %v", rank, err)
		}
		c.Seed = 1
		if err := s.Create(ctx, "x", c); err != nil {
			return err
		}
		_, err := s.Parameter(ctx, "x", "p", []int64{1}, func(v []float32) { v[0] = float32(rank) })
		if err == nil || !strings.Contains(err.Error(), "do not have the same") {
			t.Errorf("rank %d: other values: %v", rank, err)
		}
		p, err := s.Parameter(ctx, "x", "p", []int64{1}, nil)
		if err != nil {
			return err
		}
		if v, err := p.Value(); err != nil || v[0] != 0 {
			t.Errorf("rank %d: a parameter that was refused is there: %v, %v", rank, v, err)
		}
		return nil
	})
}

// Section 6 and 10.17 of the reference: one gather, whatever one rank knows, and the same error on all.
func TestEnsureIsOneCollectiveWhateverTheNames(t *testing.T) {
	ctx := context.Background()
	for _, n := range []int{1, 2, 4} {
		for _, c := range []struct {
			names func(rank int) []string
			slot  string
			text  string
		}{
			{func(rank int) []string { return []string{"x", "", "x", "y"}[:rank%5] }, "", ""},
			{func(rank int) []string { return []string{"absent", "x"} }, "absent", "no checkpoint"},
			{func(rank int) []string { return map[int][]string{n - 1: {"gone"}}[rank] }, "gone", "no checkpoint"},
		} {
			counts := make([]int, n)
			ranks(t, n, func(rank int, s *Set) error {
				for _, name := range []string{"x", "y"} {
					if err := s.Create(ctx, name, Config{Rank: 2, Alpha: 2, Targets: []string{"q_proj"}}); err != nil {
						return err
					}
				}
				w := &gathers{World: s.world}
				s.world = w
				err := s.Ensure(ctx, c.names(rank))
				counts[rank] = w.n
				if c.slot == "" {
					return err
				}
				refused(t, err, c.slot, c.text)
				return nil
			})
			for rank, count := range counts {
				if count != 1 {
					t.Errorf("rank %d of %d: %d collectives", rank, n, count)
				}
			}
		}
	}
	for _, c := range []struct {
		needs []need
		text  string
	}{
		{[]need{{Wanted: []string{"x"}}, {Loaded: map[string]int64{"x": 1}}}, "loaded on ranks 1 and not on 0"},
		{[]need{{Wanted: []string{"x"}, Loaded: map[string]int64{"x": 2}}, {Loaded: map[string]int64{"x": 1}}}, "rank 1 is at revision 1, rank 0 at 2"},
	} {
		refused(t, compare(c.needs), "x", c.text)
	}
}

// gathers counts the collectives of a rank.
type gathers struct {
	collective.World
	n int
}

func (g *gathers) AllGather(ctx context.Context, tag string, mine []byte) ([][]byte, error) {
	g.n++
	return g.World.AllGather(ctx, tag, mine)
}

func TestParametersAndBuffersBelongToTheirSlot(t *testing.T) {
	ctx := context.Background()
	s := trained(t, Options{})
	for _, name := range []string{"", "a.b", "a/b"} {
		if _, err := s.Parameter(ctx, "x", name, nil, nil); err == nil {
			t.Errorf("%q is a name", name)
		}
	}
	for _, shape := range [][]int64{{0}, {-1, 2}, {1 << 40, 1 << 40}} {
		if _, err := s.Parameter(ctx, "x", "p", shape, nil); err == nil {
			t.Errorf("%v is a shape", shape)
		}
	}
	_, err := s.Parameter(ctx, "x", "head", []int64{5, 2}, nil)
	refused(t, err, "x", "shape [2 5]")
	_, err = s.Buffer(ctx, "x", "head", []int64{2, 5}, nil)
	refused(t, err, "x", "a parameter of")
	_, err = s.Parameter(ctx, "absent", "p", nil, nil)
	refused(t, err, "absent", "no checkpoint")
	_, err = s.Parameter(ctx, "", "p", nil, nil)
	refused(t, err, "", "base model")
	p, err := s.Parameter(ctx, "x", "head", []int64{2, 5}, nil)
	must(t, err)
	b, err := s.Buffer(ctx, "x", "mean return", nil, nil)
	must(t, err)
	if err := p.Accumulate([]float32{1}); err == nil {
		t.Error("a gradient of one element is added to ten")
	}
	must(t, p.Accumulate(make([]float32, 10)))
	g, err := p.Gradient()
	must(t, err)
	if g[0] != 0 || len(g) != 10 {
		t.Errorf("the gradient is %v", g)
	}
	must(t, s.ZeroGrad())
	must(t, s.Load(ctx, "x", "testdata/golden/adapter", LoadOptions{}))
	_, err = p.Value()
	refused(t, err, "x", "replaced")
	_, err = p.Gradient()
	refused(t, err, "x", "replaced")
	refused(t, p.Accumulate(make([]float32, 10)), "x", "replaced")
	_, err = b.Value()
	refused(t, err, "x", "replaced")
}
