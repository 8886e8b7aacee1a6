package kernel

import (
	"runtime"
	"sync"
	"sync/atomic"
)

// pool is a set of persistent worker threads.
//
// Goroutines that were idle wake on one core and halve the speed of a parallel loop, so each worker is locked to its
// thread and, if the pool has one for every CPU that the process may use, pinned to a CPU. A session ([pool.do]) runs a function on worker 0; until it
// ends, the other workers spin for the parallel loops ([pool.each]) that the function starts. Between sessions they sleep.
type pool struct {
	n       int
	polite  bool // yield while spinning: there are more workers than CPUs
	session sync.Mutex
	main    chan func()   // sessions for worker 0
	wake    chan struct{} // tokens, at most one per other worker, to come to a session
	job     atomic.Pointer[job]
	gone    sync.WaitGroup
}

// job is one parallel loop. Workers take indices until there are none left; the loop is over when all are done, whether
// or not every worker came.
type job struct {
	n    int32
	over bool // the session ends
	fn   func(worker, i int)
	_    [64]byte
	next atomic.Int32
	_    [64]byte
	done atomic.Int32
	fail atomic.Pointer[any]
}

func newPool(n int) *pool {
	cpus := allowedCPUs()
	p := &pool{n: n, polite: n > runtime.GOMAXPROCS(0) || n > max(len(cpus), 1), main: make(chan func()), wake: make(chan struct{}, n-1)}
	for w := range n {
		cpu := -1
		if n == len(cpus) && n > 1 {
			cpu = cpus[w]
		}
		p.gone.Add(1)
		go p.worker(w, cpu)
	}
	return p
}

func (p *pool) worker(w, cpu int) {
	defer p.gone.Done()
	// Never unlocked: a pinned thread must end with its goroutine rather than go back to the runtime's pool.
	runtime.LockOSThread()
	if cpu >= 0 {
		pinThread(cpu)
	}
	if w == 0 {
		for fn := range p.main {
			fn()
		}
		return
	}
	for range p.wake {
		var last *job
		for {
			j := p.job.Load()
			if j == last || j == nil {
				p.spin()
				continue
			}
			last = j
			if j.over {
				break
			}
			j.run(w)
		}
	}
}

// spin passes a moment of waiting. Yielding takes a locked thread tens of microseconds, so it is done only where waiting
// without it would keep a worker from its CPU.
func (p *pool) spin() {
	if p.polite {
		runtime.Gosched()
		return
	}
	pause()
}

func (j *job) run(w int) {
	for {
		i := j.next.Add(1) - 1
		if i >= j.n {
			return
		}
		j.one(w, int(i))
	}
}

func (j *job) one(w, i int) {
	defer func() {
		if r := recover(); r != nil {
			j.fail.CompareAndSwap(nil, &r)
		}
		j.done.Add(1)
	}()
	j.fn(w, i)
}

// do runs fn on worker 0 while the other workers stand by, and returns when it is done. A panic of fn or of a loop that
// it runs is raised again in the caller.
func (p *pool) do(fn func()) {
	p.session.Lock()
	defer p.session.Unlock()
	done := make(chan any, 1)
	p.main <- func() {
		defer func() {
			r := recover()
			p.job.Store(&job{over: true})
			done <- r
		}()
		p.job.Store(nil)
		p.wakeAll()
		fn()
	}
	if r := <-done; r != nil {
		panic(r)
	}
}

// wakeAll sees to it that there is a token for every other worker. It must not wait for room to put one: a worker that was too slow
// to notice the end of earlier sessions has left its tokens there, takes part in this session all the same, and takes no token
// before it ends.
func (p *pool) wakeAll() {
	for range p.n - 1 {
		select {
		case p.wake <- struct{}{}:
		default: // full
		}
	}
}

// each calls fn(worker, i) for every i < n, in any order, on all workers, and returns when all calls have returned. It may
// only be called from the function of a session.
func (p *pool) each(n int, fn func(worker, i int)) {
	if n == 1 || p.n == 1 {
		for i := range n {
			fn(0, i)
		}
		return
	}
	j := &job{n: int32(n), fn: fn}
	p.job.Store(j)
	j.run(0)
	for j.done.Load() < j.n {
		p.spin()
	}
	if r := j.fail.Load(); r != nil {
		panic(*r)
	}
}

// close ends the workers and waits for them.
func (p *pool) close() {
	p.session.Lock()
	defer p.session.Unlock()
	close(p.main)
	close(p.wake)
	p.gone.Wait()
}
