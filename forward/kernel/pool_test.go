package kernel

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// inTime fails the test with all stacks if fn does not end: a pool that hangs would otherwise take the test's whole time limit.
func inTime(t *testing.T, limit time.Duration, fn func()) {
	t.Helper()
	done := make(chan any, 1)
	go func() {
		defer func() { done <- recover() }()
		fn()
	}()
	select {
	case p := <-done:
		if p != nil {
			t.Fatalf("panic: %v", p)
		}
	case <-time.After(limit):
		buf := make([]byte, 1<<16)
		t.Fatalf("not done after %v\n%s", limit, buf[:runtime.Stack(buf, true)])
	}
}

// fewer is n, or a part of it in short mode and under the race detector.
func fewer(n int) int {
	if testing.Short() || raceEnabled {
		return max(1, n/5)
	}
	return n
}

func TestPoolRunsEachIndexOnce(t *testing.T) {
	for _, threads := range []int{1, 2, 3, 8} {
		t.Run(fmt.Sprint(threads), func(t *testing.T) {
			inTime(t, time.Minute, func() {
				p := newPool(threads)
				defer p.close()
				p.do(func() {
					for n := range 200 {
						times := make([]atomic.Int32, n)
						busy := make([]atomic.Bool, threads)
						p.each(n, func(w, i int) {
							if w < 0 || w >= threads || !busy[w].CompareAndSwap(false, true) {
								t.Errorf("%d indices: worker %d of %d runs two at once", n, w, threads)
							}
							times[i].Add(1)
							busy[w].Store(false)
						})
						for i := range times {
							if c := times[i].Load(); c != 1 {
								t.Errorf("%d indices: number %d ran %d times", n, i, c)
							}
						}
					}
				})
			})
		})
	}
}

// Many loops in one session, and many sessions of one loop: workers that sleep through some of them must neither hang the others
// nor be lost.
func TestPoolManyShortLoops(t *testing.T) {
	for _, c := range []struct{ threads, sessions, loops int }{{2, 1, 10000}, {2, 5000, 1}, {3, 3000, 2}, {8, 1, 2000}, {8, 1000, 1}} {
		t.Run(fmt.Sprintf("%d threads, %d sessions of %d", c.threads, c.sessions, c.loops), func(t *testing.T) {
			inTime(t, time.Minute, func() {
				p := newPool(c.threads)
				defer p.close()
				var sum atomic.Int64
				sessions, loops := c.sessions, c.loops
				if sessions > 1 {
					sessions = fewer(sessions)
				} else {
					loops = fewer(loops)
				}
				var want int64
				for s := range sessions {
					p.do(func() {
						for l := range loops {
							n := (s + l) % 7
							want += int64(n * (n + 1) / 2)
							p.each(n, func(_, i int) { sum.Add(int64(i + 1)) })
						}
					})
				}
				if got := sum.Load(); got != want {
					t.Errorf("the loops add up to %d instead of %d", got, want)
				}
			})
		})
	}
}

// A loop must not wait for workers that did not come: with more workers than CPUs, or busy neighbours, that can take long.
func TestPoolOversubscribedMakesProgress(t *testing.T) {
	inTime(t, time.Minute, func() {
		p := newPool(4 * runtime.NumCPU())
		defer p.close()
		stop := make(chan struct{})
		var noise sync.WaitGroup
		for range runtime.GOMAXPROCS(0) {
			noise.Go(func() {
				for n := 0; ; n++ {
					select {
					case <-stop:
						return
					default:
					}
				}
			})
		}
		for range fewer(20) {
			p.do(func() {
				var n atomic.Int32
				p.each(100, func(int, int) { n.Add(1) })
				if n.Load() != 100 {
					t.Errorf("%d of 100 indices ran", n.Load())
				}
			})
		}
		close(stop)
		noise.Wait()
	})
}

func TestPoolSessionsFromSeveralGoroutinesSerialise(t *testing.T) {
	inTime(t, time.Minute, func() {
		p := newPool(3)
		defer p.close()
		var inside, total atomic.Int32
		var callers sync.WaitGroup
		for range 5 {
			callers.Go(func() {
				for range fewer(200) {
					p.do(func() {
						if inside.Add(1) != 1 {
							t.Error("two sessions at once")
						}
						p.each(5, func(int, int) { total.Add(1) })
						inside.Add(-1)
					})
				}
			})
		}
		callers.Wait()
		if want := int32(5 * 5 * fewer(200)); total.Load() != want {
			t.Errorf("%d indices ran instead of %d", total.Load(), want)
		}
	})
}

// panicOf is the value with which fn panics, nil if it does not.
func panicOf(fn func()) (p any) {
	defer func() { p = recover() }()
	fn()
	return nil
}

func TestPoolPassesPanicsOnAndStaysUsable(t *testing.T) {
	failure := errors.New("failure")
	for _, threads := range []int{1, 2, 3, 8} {
		t.Run(fmt.Sprint(threads), func(t *testing.T) {
			inTime(t, time.Minute, func() {
				p := newPool(threads)
				defer p.close()
				for round := range fewer(50) {
					n := 1 + round%9
					if got := panicOf(func() {
						p.do(func() { p.each(n, func(_, i int) { panic(failure) }) })
					}); got != failure {
						t.Errorf("round %d: every index panics, the caller gets %v", round, got)
					}
					after := false
					if got := panicOf(func() {
						p.do(func() {
							p.each(n, func(_, i int) {
								if i == round%n {
									panic(i)
								}
							})
							after = true
						})
					}); got != round%n || after {
						t.Errorf("round %d: index %d panics, the caller gets %v; code after the loop ran: %t", round, round%n, got, after)
					}
					// A panic that the session's function catches ends there, and the session goes on.
					var ran atomic.Int32
					if got := panicOf(func() {
						p.do(func() {
							if got := panicOf(func() { p.each(3, func(int, int) { panic("caught") }) }); got != "caught" {
								t.Errorf("round %d: inside the session the panic is %v", round, got)
							}
							p.each(n, func(int, int) { ran.Add(1) })
						})
					}); got != nil || int(ran.Load()) != n {
						t.Errorf("round %d: after a caught panic: %v, %d of %d indices ran", round, got, ran.Load(), n)
					}
					if got := panicOf(func() { p.do(func() { panic("session") }) }); got != "session" {
						t.Errorf("round %d: the session panics, the caller gets %v", round, got)
					}
				}
			})
		})
	}
}

// A function that ends its goroutine, as t.FailNow in a callback does, ends the caller's and no worker, once no other worker runs the loop any more.
func TestPoolPassesGoexitOnAndStaysUsable(t *testing.T) {
	for _, threads := range []int{1, 2, 3, 8} {
		t.Run(fmt.Sprint(threads), func(t *testing.T) {
			inTime(t, time.Minute, func() {
				p := newPool(threads)
				defer p.close()
				var running atomic.Int32
				// exits says whether a session that runs fn ends the goroutine that asks for it.
				exits := func(fn func()) (ended bool) {
					done := make(chan struct{})
					go func() {
						defer close(done)
						ended = true
						p.do(fn)
						ended = false
					}()
					<-done
					if n := running.Load(); n != 0 {
						t.Errorf("%d indices are still running", n)
					}
					return ended
				}
				for round := range fewer(50) {
					n := 1 + round%9
					after := false
					for what, fn := range map[string]func(){
						"the session": runtime.Goexit,
						"every index": func() {
							p.each(n, func(int, int) { runtime.Goexit() })
							after = true
						},
						"one index": func() {
							p.each(n, func(_, i int) {
								running.Add(1)
								defer running.Add(-1)
								if i == round%n {
									runtime.Goexit()
								}
								time.Sleep(10 * time.Microsecond)
							})
							after = true
						},
					} {
						if !exits(fn) || after {
							t.Errorf("round %d: %s ends its goroutine: the caller goes on, or the session (%t)", round, what, after)
						}
						var ran atomic.Int32
						if exits(func() { p.each(n, func(int, int) { ran.Add(1) }) }) || int(ran.Load()) != n {
							t.Errorf("round %d, after %s ended its goroutine: %d of %d indices ran", round, what, ran.Load(), n)
						}
					}
				}
			})
		})
	}
}

// workers is the number of goroutines that are pool workers, of whatever pool.
func workers() int {
	buf := make([]byte, 1<<20)
	return strings.Count(string(buf[:runtime.Stack(buf, true)]), "(*pool).worker(")
}

// osThreads is the number of threads of this process, 0 where the system does not tell.
func osThreads() int {
	tasks, _ := os.ReadDir("/proc/self/task")
	return len(tasks)
}

func TestPoolCloseEndsItsWorkers(t *testing.T) {
	inTime(t, time.Minute, func() {
		before, threads := workers(), osThreads()
		for round := range fewer(100) {
			p := newPool(1 + round%5)
			if round%3 > 0 { // a pool may also be closed before its first session
				p.do(func() { p.each(10, func(int, int) {}) })
			}
			p.close()
		}
		// close waits for the workers' functions; their goroutines are gone a moment later.
		// The runtime may have started a few threads of its own.
		for deadline := time.Now().Add(10 * time.Second); workers() > before || osThreads() > threads+10; time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Errorf("%d workers instead of %d, %d threads instead of about %d after all pools were closed", workers(), before, osThreads(), threads)
				return
			}
		}
	})
}

// Between loops the job is an empty one. Running it, harmless as it looks, counts its index up: after 2^31 loops, which a
// trainer reaches within days, the count would overflow and the empty job would begin to run indices.
func TestPoolDoesNotWearOut(t *testing.T) {
	inTime(t, time.Minute, func() {
		p := newPool(2)
		defer p.close()
		for range fewer(200) {
			p.do(func() {
				for range 5 {
					p.each(4, func(int, int) {})
				}
			})
		}
		if n := p.idle.next.Load(); n != 0 {
			t.Errorf("the empty job counted to %d", n)
		}
	})
}

// A process that starts and ends backends one after the other has as many threads in the last as in the first, though workers pin threads that outlive them.
func TestThreadsOfLaterBackends(t *testing.T) {
	want := 0
	for i := range 8 {
		h, err := NewHost(0)
		if err != nil {
			t.Fatal(err)
		}
		if want = max(want, h.Threads()); h.Threads() != want {
			t.Errorf("backend %d has %d threads, an earlier one %d", i, h.Threads(), want)
		}
		_ = h.Do(func() error {
			h.Each(8, func(_, _ int) {})
			return nil
		})
		h.Close()
	}
}
