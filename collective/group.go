package collective

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/trainerrank/engine/internal/failpoint"
)

// The work of an operation is cut into tasks of this many bytes per rank, which the ranks share. In a reduction, rank 0's
// piece, the accumulator, so stays in a first-level cache (32 or 48 KiB) beside the one that is added to it. BenchmarkSum
// is the same with 16 and 32 KiB.
const taskBytes = 16 << 10

// An operation that touches no more bytes than this, over all ranks, is carried out by the rank that came last while the
// others sleep: to share it they must be woken and then wait for each other once more. BenchmarkSum with 64 KiB: two cores
// gain nothing for 8 ranks (512 KiB).
const inlineBytes = 256 << 10

// Group is a world of several ranks in one process. It starts no goroutine and needs no closing to be collected.
//
// How it works: a rank that calls an operation notes what it brings and sleeps. The last to come finds everything in place,
// does the work if it is small, and wakes all; large work is cut into tasks that all take from one counter, and then they
// wait for each other once more, since a rank that returned could free memory that another still reads.
type Group struct {
	ranks []member

	mu      sync.Mutex
	err     error // what ended the group; the first one stays
	arrived int   // Invariant: number of ranks with waiting set
	call    Call  // of the meeting, set by the first to arrive

	// Of a meeting that is complete. Written by the last to arrive before it wakes the others.
	tasks int
	next  atomic.Int64               // next task to take
	busy  atomic.Int64               // ranks that have not finished their tasks
	fault atomic.Pointer[AbortError] // of the last meeting there is, since it ends the group
}

// member is one rank. Its owner writes call and bring before it arrives; from then until it is woken they are the group's.
type member struct {
	group *Group
	rank  int
	using atomic.Bool // an operation of this rank is under way

	call  Call
	bring bring
	wake  chan wake // Invariant: never more than one unread

	// Under group.mu.
	waiting bool // arrived at a meeting that is not complete
	closed  bool
}

// bring is a rank's part in an operation. Only the field that belongs to the operation is used.
type bring struct {
	bytes    []byte // AllGather: read. Broadcast: read or written
	int64s   []int64
	float32s []float32
	gathered [][]byte // the result of AllGather
}

// wake is why a rank is woken.
type wake struct {
	work bool  // all are here: share the tasks
	err  error // if not work: the outcome
}

// NewGroup makes a group of n ranks. It panics if n < 1.
func NewGroup(n int) *Group {
	if n < 1 {
		panic(fmt.Sprintf("collective: a group of %d ranks", n))
	}
	g := &Group{ranks: make([]member, n)}
	for i := range g.ranks {
		g.ranks[i] = member{group: g, rank: i, wake: make(chan wake, 1)}
	}
	return g
}

// Size is the number of ranks.
func (g *Group) Size() int { return len(g.ranks) }

// Rank is the world as rank i sees it, the same value for the same i. It panics if there is no such rank.
func (g *Group) Rank(i int) World { return &g.ranks[i] }

// Abort ends the group because of err on a rank: all that wait, and all that come later, get an AbortError with both. An
// operation at which all ranks have arrived already is still carried out. If the group has ended before, nothing happens.
func (g *Group) Abort(rank int, err error) {
	if err == nil {
		err = fmt.Errorf("aborted without a reason")
	}
	_ = g.abort(rank, err)
}

// abort ends the group, and returns what a call of this moment has to return.
func (g *Group) abort(rank int, err error) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.err != nil {
		return unusable(g.err)
	}
	return g.end(&AbortError{Rank: rank, Err: err})
}

// end makes err the group's last word and wakes all that wait. The caller holds mu and has seen that err is the first.
func (g *Group) end(err error) error {
	g.err = err
	for i := range g.ranks {
		if m := &g.ranks[i]; m.waiting {
			m.waiting = false
			m.wake <- wake{err: err}
		}
	}
	g.arrived = 0
	return err
}

func unusable(err error) error { return fmt.Errorf("%w: %w", ErrUnusable, err) }

// Rank is this rank's number.
func (m *member) Rank() int { return m.rank }

// Size is the number of ranks.
func (m *member) Size() int { return len(m.group.ranks) }

func (m *member) Barrier(ctx context.Context, tag string) error {
	_, err := m.meet(ctx, Call{Operation: barrier, Tag: tag}, bring{})
	return err
}

func (m *member) AllGather(ctx context.Context, tag string, mine []byte) ([][]byte, error) {
	return m.meet(ctx, Call{Operation: allGather, Tag: tag}, bring{bytes: mine})
}

func (m *member) AllReduceInt64(ctx context.Context, tag string, op Op, v []int64) error {
	_, err := m.meet(ctx, Call{Operation: allReduceInt64, Tag: tag, Op: op, Len: len(v)}, bring{int64s: v})
	return err
}

func (m *member) AllReduceFloat32(ctx context.Context, tag string, op Op, v []float32) error {
	_, err := m.meet(ctx, Call{Operation: allReduceFloat32, Tag: tag, Op: op, Len: len(v)}, bring{float32s: v})
	return err
}

func (m *member) Broadcast(ctx context.Context, tag string, root int, p []byte) error {
	_, err := m.meet(ctx, Call{Operation: broadcast, Tag: tag, Root: root, Len: len(p)}, bring{bytes: p})
	return err
}

func (m *member) Close() error {
	g := m.group
	g.mu.Lock()
	defer g.mu.Unlock()
	m.closed = true
	// Ranks that are at a meeting wait for this one; nobody has to be told if there is none.
	if g.arrived > 0 && g.err == nil {
		_ = g.end(&AbortError{Rank: m.rank, Err: ErrClosed})
	}
	return nil
}

// meet is one operation, from arrival to return.
func (m *member) meet(ctx context.Context, c Call, b bring) ([][]byte, error) {
	g := m.group
	if !m.using.CompareAndSwap(false, true) {
		return nil, g.abort(m.rank, ErrConcurrent)
	}
	defer func() {
		m.bring = bring{} // do not keep the caller's memory alive
		m.using.Store(false)
	}()
	if err := cause(ctx); err != nil {
		return nil, g.abort(m.rank, err)
	}
	if err := c.check(len(g.ranks)); err != nil {
		return nil, g.abort(m.rank, err)
	}
	if err := failpoint.Hit(failpoint.Meet); err != nil {
		return nil, g.abort(m.rank, err)
	}

	last, err := m.arrive(c, b)
	if err != nil {
		return nil, err
	}
	if !last {
		var w wake
		select {
		case w = <-m.wake:
		case <-ctx.Done():
			m.giveUp(cause(ctx))
			w = <-m.wake // from giveUp, or because all had come just before
		}
		if !w.work {
			return m.bring.gathered, w.err
		}
	} else if inline := g.prepare(); inline {
		g.work(m.rank)
		outcome := g.outcome()
		g.wakeOthers(m, wake{err: outcome})
		return m.bring.gathered, outcome
	} else {
		g.wakeOthers(m, wake{work: true})
	}

	g.work(m.rank)
	if g.busy.Add(-1) > 0 {
		w := <-m.wake // no context: the others still use this rank's memory
		return m.bring.gathered, w.err
	}
	outcome := g.outcome()
	g.wakeOthers(m, wake{err: outcome})
	return m.bring.gathered, outcome
}

// arrive takes the rank's place at the meeting and says whether the meeting is complete with it.
func (m *member) arrive(c Call, b bring) (last bool, err error) {
	g := m.group
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.err != nil {
		return false, unusable(g.err)
	}
	for i := range g.ranks {
		if g.ranks[i].closed {
			return false, g.end(&AbortError{Rank: i, Err: ErrClosed})
		}
	}
	if g.arrived > 0 && c != g.call {
		// Not put off until all are here: a rank that is lost on another way might never come.
		e := &MismatchError{Calls: make([]Call, len(g.ranks))}
		for i := range g.ranks {
			if g.ranks[i].waiting {
				e.Calls[i] = g.ranks[i].call
			}
		}
		e.Calls[m.rank] = c
		return false, g.end(e)
	}
	m.call, m.bring = c, b
	g.call = c
	if g.arrived+1 < len(g.ranks) {
		m.waiting = true
		g.arrived++
		return false, nil
	}
	if a, b, ok := g.overlap(); ok {
		return false, g.end(&AbortError{Rank: b, Err: fmt.Errorf("%w: that of rank %d", ErrOverlap, a)})
	}
	// The meeting is complete: from here on nothing but its outcome wakes the others, whatever becomes of the group.
	for i := range g.ranks {
		g.ranks[i].waiting = false
	}
	g.arrived = 0
	return true, nil
}

// giveUp ends the group unless the meeting has been completed, or ended, in the meantime.
func (m *member) giveUp(err error) {
	g := m.group
	g.mu.Lock()
	defer g.mu.Unlock()
	if m.waiting {
		_ = g.end(&AbortError{Rank: m.rank, Err: err})
	}
}

// wakeOthers wakes all ranks but m, all of which are asleep or about to be.
func (g *Group) wakeOthers(m *member, w wake) {
	for i := range g.ranks {
		if i != m.rank {
			g.ranks[i].wake <- w
		}
	}
}

// prepare cuts the work of a complete meeting into tasks and says whether the last rank should do it alone.
func (g *Group) prepare() (inline bool) {
	n := len(g.ranks)
	g.next.Store(0)
	g.busy.Store(int64(n))
	var bytes int
	switch g.call.Operation {
	case barrier:
		g.tasks = 0
	case allGather:
		g.tasks = n // each makes the result of one rank
		for i := range g.ranks {
			bytes += len(g.ranks[i].bring.bytes)
		}
		bytes *= n
	case allReduceInt64:
		g.tasks = pieces(g.call.Len, taskBytes/8)
		bytes = n * g.call.Len * 8
	case allReduceFloat32:
		g.tasks = pieces(g.call.Len, taskBytes/4)
		bytes = n * g.call.Len * 4
	case broadcast:
		g.tasks = pieces(g.call.Len, taskBytes)
		bytes = n * g.call.Len
	}
	return n == 1 || bytes <= inlineBytes
}

// pieces is n/size, rounded up.
func pieces(n, size int) int {
	k := n / size
	if n%size != 0 {
		k++
	}
	return k
}

// work takes tasks until there are none. A panic here can only be a fault on memory that some rank brought, and any rank
// may run into it, so it becomes the outcome for all.
func (g *Group) work(rank int) {
	defer func() {
		if p := recover(); p != nil {
			g.fault.CompareAndSwap(nil, &AbortError{Rank: rank, Err: panicError(p)})
		}
	}()
	for {
		t := int(g.next.Add(1) - 1)
		if t >= g.tasks {
			return
		}
		g.task(t)
	}
}

// outcome is the error of a meeting whose work is done; one ends the group.
func (g *Group) outcome() error {
	fault := g.fault.Load()
	if fault == nil {
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.err == nil {
		_ = g.end(fault)
	}
	return fault
}

// task is the t-th part of the work of a meeting.
func (g *Group) task(t int) {
	switch g.call.Operation {
	case allGather:
		total := 0
		for i := range g.ranks {
			total += len(g.ranks[i].bring.bytes)
		}
		all := make([][]byte, len(g.ranks))
		room := make([]byte, 0, total)
		for i := range g.ranks {
			from := len(room)
			room = append(room, g.ranks[i].bring.bytes...)
			all[i] = room[from:len(room):len(room)] // appending to one message must not run into the next
		}
		g.ranks[t].bring.gathered = all
	case allReduceInt64:
		reducePiece(g.ranks, g.call.Op, t, taskBytes/8, func(b *bring) []int64 { return b.int64s })
	case allReduceFloat32:
		reducePiece(g.ranks, g.call.Op, t, taskBytes/4, func(b *bring) []float32 { return b.float32s })
	case broadcast:
		from := piece(g.ranks[g.call.Root].bring.bytes, t, taskBytes)
		for i := range g.ranks {
			if i != g.call.Root {
				copy(piece(g.ranks[i].bring.bytes, t, taskBytes), from)
			}
		}
	}
}

// overlap finds two ranks that brought the same memory to an operation that writes it. All slices of one operation have
// the same length, so they overlap if their beginnings are closer than that.
func (g *Group) overlap() (a, b int, found bool) {
	if g.call.Operation == allGather || g.call.Len == 0 {
		return 0, 0, false
	}
	start := func(i int) (at, size uintptr) {
		switch b := &g.ranks[i].bring; g.call.Operation {
		case allReduceInt64:
			return uintptr(unsafe.Pointer(unsafe.SliceData(b.int64s))), 8
		case allReduceFloat32:
			return uintptr(unsafe.Pointer(unsafe.SliceData(b.float32s))), 4
		default:
			return uintptr(unsafe.Pointer(unsafe.SliceData(b.bytes))), 1
		}
	}
	for b := range g.ranks {
		at, size := start(b)
		for a := range b {
			other, _ := start(a)
			if max(at, other)-min(at, other) < uintptr(g.call.Len)*size {
				return a, b, true
			}
		}
	}
	return 0, 0, false
}
