package kernel

import (
	"runtime"
	"sync"
	"sync/atomic"
)

// pool is a set of persistent worker threads.
//
// Goroutines that were idle wake on one core and halve the speed of a parallel loop, so each worker is locked to its thread and, if the
// pool has one for every CPU that the process may use, pinned to a CPU. [pool.do] runs a function on worker 0, and that function shares
// loops among all workers with [pool.each]. A worker that waits spins for some microseconds, which is how long the gaps within a call
// last, and then sleeps.
//
// What a caller's function does to the goroutine that it runs on happens to the caller's instead: a panic is raised again there, and
// [runtime.Goexit] (a t.FailNow in a callback, say) ends that one, and not a worker.
type pool struct {
	n     int
	spins int
	calls chan func() // for worker 0
	turn  sync.Mutex  // one call at a time
	gone  sync.WaitGroup

	mu     sync.Mutex // guards waiting for job to change
	cond   *sync.Cond
	job    atomic.Pointer[job]
	idle   *job // what job is between loops, so that a loop's closure is not kept alive
	closed bool
}

// job is one parallel loop. Workers take indices until there are none left; the loop is over when all are done, whether or not every
// worker came.
type job struct {
	n    int32
	fn   func(worker, i int)
	fin  chan struct{} // closed when all are done
	fail atomic.Pointer[any]
	_    [64]byte
	next atomic.Int32
	_    [64]byte
	done atomic.Int32
}

// spinning is how often a waiting worker looks before it sleeps: some tens of microseconds.
const spinning = 1000

func newPool(n int) *pool {
	cpus := allowedCPUs()
	p := &pool{n: n, spins: spinning, calls: make(chan func()), idle: &job{}}
	p.cond = sync.NewCond(&p.mu)
	p.job.Store(p.idle)
	if n > runtime.GOMAXPROCS(0) || n > max(len(cpus), 1) {
		p.spins = 0 // whoever is waited for may need this CPU
	}
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
	ended := false
	defer func() {
		if !ended {
			go p.worker(w, cpu) // runtime.Goexit took the goroutine and its thread: another one goes on
			return
		}
		p.gone.Done()
	}()
	// Never unlocked: a pinned thread must end with its goroutine rather than go back to the runtime's pool.
	runtime.LockOSThread()
	if cpu >= 0 {
		pinThread(cpu)
	}
	if w == 0 {
		for fn := range p.calls {
			fn()
		}
		ended = true
		return
	}
	for j := p.idle; ; {
		if j = p.await(j); j == nil {
			ended = true
			return
		}
		if j != p.idle { // whose count of indices would rise with every loop, and overflow one day
			j.run(w)
		}
	}
}

// await waits until the job is another one than last and returns it, or nil when the pool is closed.
func (p *pool) await(last *job) *job {
	for range p.spins {
		if j := p.job.Load(); j != last {
			return j
		}
		pause()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.job.Load() == last && !p.closed {
		p.cond.Wait()
	}
	if p.closed {
		return nil
	}
	return p.job.Load()
}

// set makes j the job.
func (p *pool) set(j *job) {
	p.mu.Lock()
	p.job.Store(j)
	p.mu.Unlock()
	p.cond.Broadcast()
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

// one runs index i. A panic is kept for whoever started the loop, and so is the end of the goroutine.
func (j *job) one(w, i int) {
	var r any = exited{}
	defer func() {
		if p := recover(); p != nil {
			r = p
		}
		if r != nil {
			j.fail.CompareAndSwap(nil, &r)
		}
		if j.done.Add(1) == j.n {
			close(j.fin)
		}
	}()
	j.fn(w, i)
	r = nil
}

// exited stands for a panic where a function neither returned nor panicked: it called [runtime.Goexit].
type exited struct{}

// raise does to this goroutine what was done to another: r is a panic, [exited], or nil.
func raise(r any) {
	switch r.(type) {
	case nil:
	case exited:
		runtime.Goexit()
	default:
		panic(r)
	}
}

// do runs fn on worker 0 and returns when it has returned. A panic of fn, or of a loop that it runs, is raised again in the caller.
func (p *pool) do(fn func()) {
	p.turn.Lock()
	defer p.turn.Unlock()
	done := make(chan any, 1)
	p.calls <- func() {
		var r any = exited{}
		defer func() {
			if p := recover(); p != nil {
				r = p
			}
			done <- r
		}()
		fn()
		r = nil
	}
	raise(<-done)
}

// each calls fn(worker, i) for every i < n, on all workers, and returns when all calls have returned. Indices are taken in
// ascending order. It may only be called from a function that do runs, and not from fn.
func (p *pool) each(n int, fn func(worker, i int)) {
	if n <= 1 || p.n == 1 {
		for i := range n {
			fn(0, i)
		}
		return
	}
	j := &job{n: int32(n), fn: fn, fin: make(chan struct{})}
	p.set(j)
	func() {
		defer p.finish(j) // also if fn ends this goroutine: the other workers are still in the loop
		j.run(0)
	}()
	if r := j.fail.Load(); r != nil {
		raise(*r)
	}
}

// finish waits until all indices of the present job are done.
func (p *pool) finish(j *job) {
	for range p.spins {
		if j.done.Load() == j.n {
			break
		}
		pause()
	}
	<-j.fin
	// Set without waking anybody: who sleeps may go on sleeping.
	p.mu.Lock()
	p.job.Store(p.idle)
	p.mu.Unlock()
}

// close ends the workers and waits for them.
func (p *pool) close() {
	p.turn.Lock()
	defer p.turn.Unlock()
	close(p.calls)
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.cond.Broadcast()
	p.gone.Wait()
}
