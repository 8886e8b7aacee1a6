package loader

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/trainerrank/engine/collective"
	"github.com/trainerrank/engine/device"
)

// Ranks that read for themselves, and ranks that read each byte once, have the same tensors as one alone, and hold no more than
// planned.
func TestRanksHaveTheSameTensors(t *testing.T) {
	leaks(t)
	rng := rand.New(rand.NewPCG(2, 9))
	for round := range 40 {
		s := sand(t, rng, 1+rng.IntN(6), []int{40, 9000}[rng.IntN(2)])
		name := CopierNames()[rng.IntN(len(CopierNames()))]
		c, err := NewCopier(name, 2)
		check(t, err)
		for _, ranks := range []int{2, 4} {
			for _, group := range []int{1, ranks} {
				o := StatsOptions{}
				if rng.IntN(2) == 0 {
					o.Resident = func(x *Tensor) bool { return x.Offset%3 != 0 }
				}
				if rng.IntN(2) == 0 {
					o.Atom = func(x *Tensor) int64 { return 1 + x.Bytes/7 }
				}
				p := PlanParams{
					Budget: 1, QueueSize: rng.IntN(5) - 1, Group: group, AccumulateResident: rng.IntN(2) == 0, YieldClone: rng.IntN(3) == 0,
					Align: device.PageSize, Copier: c.Costs(s.Files), Classic: name != CopierMmap && rng.IntN(5) == 0,
				}
				stats := StatsOf(s, o)
				var e *BudgetInfeasibleError
				if _, err := Fit(stats, p); errors.As(err, &e) {
					p.Budget = e.Minimum + rng.Int64N(2)*rng.Int64N(200_000)
				}
				capacity := p.Budget
				if p.Classic {
					capacity += 1 << 20
				}
				var mu sync.Mutex
				var read int64
				err := collective.Run(ranks, func(w collective.World) error {
					plan, err := FitTogether(t.Context(), w, stats, p)
					if err != nil {
						return err
					}
					dev, err := device.NewHost(capacity)
					if err != nil {
						return err
					}
					device.CheckLeaks(t, dev)
					var r receiver
					tensors, report, err := s.Execute(t.Context(), plan, LoadOptions{Device: dev, Copier: c, Threads: 2, Deliver: r.take, World: w})
					if err != nil {
						return fmt.Errorf("%w\n%+v\n%v", err, p, plan)
					}
					defer tensors.Free()
					mu.Lock()
					defer mu.Unlock()
					read += report.Bytes
					l := &lab{t, s, dev}
					l.checkAll(stats, p, tensors, &r)
					if used := dev.Stats().PeakInUse; report.Peak > report.Predicted || report.Predicted > p.Budget || !p.Classic && used != report.Peak {
						t.Errorf("round %d, %s, rank %d of %d, group %d: the device saw %d, peak %d, predicted %d, budget %d\n%+v\n%v",
							round, name, w.Rank(), ranks, group, used, report.Peak, report.Predicted, p.Budget, p, plan)
					}
					return nil
				})
				if err != nil {
					t.Fatalf("round %d, %s, %d ranks, group %d: %v", round, name, ranks, group, err)
				}
				if want := s.TotalBytes(); group > 1 && read != want || group == 1 && read != want*int64(ranks) {
					t.Errorf("%d ranks, group %d: %d bytes read, the set has %d", ranks, group, read, want)
				}
			}
		}
	}
}

// Plans that differ are refused on all ranks with the item that differs, before anything is read.
func TestDifferingPlansAreNamed(t *testing.T) {
	leaks(t)
	s := sand(t, rand.New(rand.NewPCG(2, 2)), 3, 500)
	for want, change := range map[string]func(p *PlanParams, o *StatsOptions){
		"budget is 1048576 on rank 0 and 1048575 on rank 2":   func(p *PlanParams, _ *StatsOptions) { p.Budget-- },
		"queue size asked for is 0 on rank 0 and 7 on rank 2": func(p *PlanParams, _ *StatsOptions) { p.QueueSize = 7 },
		"kept tensors is":          func(_ *PlanParams, o *StatsOptions) { o.Keep = func(x *Tensor) bool { return x.Bytes%2 == 0 } },
		"resident tensors is":      func(_ *PlanParams, o *StatsOptions) { o.Resident = func(*Tensor) bool { return false } },
		"ranks is 3 on rank 0 and": func(p *PlanParams, _ *StatsOptions) { p.Group = 1 },
	} {
		errs := make([]error, 3)
		_ = collective.Run(3, func(w collective.World) error {
			p, o := raw(s, pread{}, 1<<20), StatsOptions{}
			p.Group = 3
			if w.Rank() == 2 {
				change(&p, &o)
			}
			plan, err := Fit(StatsOf(s, o), p)
			if err != nil {
				return err
			}
			dev, err := device.NewHost(1 << 20)
			if err != nil {
				return err
			}
			var r receiver
			_, _, errs[w.Rank()] = s.Execute(t.Context(), plan, LoadOptions{Device: dev, Copier: pread{}, World: w, Deliver: r.take})
			if r.got != nil {
				t.Error("read")
			}
			return nil
		})
		for rank, err := range errs {
			var e *DigestError
			if !errors.As(err, &e) || e.Rank != 2 || !strings.Contains(err.Error(), want) {
				t.Errorf("rank %d: %v, want %s", rank, err, want)
			}
		}
	}
}

// What fails on one rank, whatever it is and wherever, reaches the others, and nobody hangs or keeps anything.
func TestFailureOfOneRankReachesAll(t *testing.T) {
	leaks(t)
	mine := errors.New("no room")
	for _, group := range []int{1, 4} {
		for _, how := range []string{"read", "deliver", "cancel", "memory"} {
			for at := int64(1); at < 12; at += 2 {
				var reads atomic.Int64
				var armed atomic.Bool
				s, err := OpenFS(oddFS{matrix(16, 100), func(r io.ReaderAt, p []byte, off int64) (int, error) {
					if armed.Load() && how == "read" && reads.Add(1) == at {
						return 0, syscall.EIO
					}
					return r.ReadAt(p, off)
				}}, "m")
				check(t, err)
				armed.Store(true)
				errs := make([]error, 4)
				devs := make([]*device.Host, 4)
				err = collective.Run(4, func(w collective.World) error {
					capacity := int64(1 << 20)
					if how == "memory" && w.Rank() == 1 {
						capacity = at << 10 &^ 4095
						if capacity == 0 {
							capacity = 4096
						}
					}
					dev, err := device.NewHost(capacity)
					if err != nil {
						return err
					}
					devs[w.Rank()] = dev
					p := raw(s, pread{}, 1<<20)
					p.Group, p.MaxChunk = group, 300
					plan, err := Fit(StatsOf(s, StatsOptions{
						Resident: func(x *Tensor) bool { return x.Name != "v" }, Atom: func(*Tensor) int64 { return 100 },
					}), p)
					if err != nil {
						return err
					}
					ctx, cancel := context.WithCancel(t.Context())
					defer cancel()
					pieces := int64(0)
					var tensors *Tensors
					tensors, _, errs[w.Rank()] = s.Execute(ctx, plan, LoadOptions{Device: dev, Copier: pread{}, Threads: 2, World: w, Deliver: func(Piece) error {
						if pieces++; w.Rank() == 1 && pieces == at {
							switch how {
							case "deliver":
								return mine
							case "cancel":
								cancel()
							}
						}
						return nil
					}})
					tensors.Free()
					return nil
				})
				check(t, err)
				failed := 0
				for rank, err := range errs {
					if err != nil {
						failed++
					}
					if now := devs[rank].Stats(); now.Allocated != 0 || now.Blocks != 0 {
						t.Errorf("%s, group %d, at %d: rank %d holds %v", how, group, at, rank, now)
					}
				}
				if failed != 0 && failed != 4 || failed == 0 && at < 3 {
					t.Errorf("%s, group %d, at %d: failed on %d of 4 ranks: %v", how, group, at, failed, errs)
				}
				if how == "deliver" && failed > 0 && !errors.Is(errs[1], mine) {
					t.Errorf("group %d, at %d: rank 1 lost its own error: %v", group, at, errs[1])
				}
			}
		}
	}
}

func TestSuggestedBudgets(t *testing.T) {
	var got [2]int64
	check(t, collective.Run(2, func(w collective.World) error {
		dev, err := device.NewHost(int64(100-w.Rank()*60) << 30)
		if err != nil {
			return err
		}
		b, err := SuggestBudget(t.Context(), dev, w)
		got[w.Rank()] = b
		return err
	}))
	if got[0] != 38<<30 || got[1] != 38<<30 { // 40 GiB less a twentieth
		t.Errorf("%v", got)
	}
	dev, err := device.NewHost(3 << 30)
	check(t, err)
	if b, err := SuggestBudget(t.Context(), dev, nil); err != nil || b != 2<<30 {
		t.Errorf("%d, %v", b, err)
	}
	if dev, err = device.NewHost(1 << 20); err == nil {
		if b, err := SuggestBudget(t.Context(), dev, nil); err != nil || b != 0 {
			t.Errorf("%d, %v", b, err)
		}
	}

	s := sand(t, rand.New(rand.NewPCG(2, 2)), 1, 5000)
	stats := StatsOf(s, StatsOptions{})
	plan, warning, err := FitSuggested(stats, raw(s, pread{}, 1<<30), 1<<31)
	if err != nil || warning != "" || plan.Budget != 1<<30 {
		t.Errorf("%v, %q, %v", plan, warning, err)
	}
	plan, warning, err = FitSuggested(stats, raw(s, pread{}, 0), 1<<31)
	if err != nil || !strings.Contains(warning, "more than the 0 suggested") || plan.Budget != plan.Minimum {
		t.Errorf("%v, %q, %v", plan, warning, err)
	}
	var e *BudgetInfeasibleError
	if _, _, err = FitSuggested(stats, raw(s, pread{}, 0), 4096); !errors.As(err, &e) || !strings.Contains(Hint(err), fmt.Sprintf("at least %d bytes", e.Minimum)) {
		t.Errorf("%v; %s", err, Hint(err))
	}
}

// One rank that cannot plan stops all.
func TestFitTogether(t *testing.T) {
	s := sand(t, rand.New(rand.NewPCG(2, 2)), 1, 5000)
	errs := make([]error, 2)
	check(t, collective.Run(2, func(w collective.World) error {
		_, errs[w.Rank()] = FitTogether(t.Context(), w, StatsOf(s, StatsOptions{}), raw(s, pread{}, 1<<30*int64(1-w.Rank())))
		return nil
	}))
	var e *BudgetInfeasibleError
	var peer *collective.PeerError
	if !errors.As(errs[1], &e) || !errors.As(errs[0], &peer) || peer.Rank != 1 {
		t.Errorf("%v", errs)
	}
}
