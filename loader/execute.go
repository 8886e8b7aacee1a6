package loader

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/trainerrank/engine/collective"
	"github.com/trainerrank/engine/device"
)

// LoadOptions are what [Set.Execute] needs beside the plan.
type LoadOptions struct {
	Device device.Device // whose ledger all memory is taken from; what it hands out must be host memory
	Copier Copier        // the one whose costs the plan was made with
	// Threads is how many reads may be under way at once, over all chunks; 0 means 1.
	Threads int
	// Deliver is given what does not accumulate, a piece at a time; see [Piece]. It may be nil if there is no such tensor.
	Deliver func(p Piece) error
	// Progress, if not nil, is told now and then how many of the bytes that this rank is to read it has read; one call at a time, each with
	// more than the one before, and in the end with all.
	Progress func(done, total int64)
	// World are the ranks that load together; nil is one rank alone. A plan with a Group above 1 is for as many ranks, each of
	// which reads its own files and sends them to the others; with a Group of 1 each rank reads all for itself.
	World collective.World
}

// Piece is a tensor, or a part of one that the plan had to cut, as it is handed to [LoadOptions.Deliver]. The bytes are there until
// that returns.
//
// In a load by one rank without accumulation, copies and classic mode, pieces come from several goroutines at once in any
// order. In any other they come one at a time, in the order of the plan.
type Piece struct {
	Tensor *Tensor
	Offset int64 // of its first byte, from the start of the tensor
	Data   []byte
}

// Execute carries a plan out, to the byte: before each read the memory that it fills is taken from the device, and never more is held
// than the plan says. The plan must be one of [StatsOf] this set, with the costs of the copier.
//
// Tensors that accumulate get memory of the device, which is returned and is to be freed by the caller; all others are delivered.
// The files are verified (see [Set.Verify]) before the first read and after the last. The first error stops the load: a [*ReadError],
// a [*ChangedError] (or a [*FilesError] of several), a [*CopierError], a [*device.OutOfMemoryError] if somebody else took what the
// plan counts on, what Deliver returned, with the tensor's name in front, or the context's cause. Then nothing of the load is left, neither
// memory nor a goroutine; what has been delivered by then is to be thrown away. The report is of use after an error, too.
//
// With several ranks all must call it, with plans that have the same [FitPlan.Digest]: a [*DigestError] names what differs. If one
// rank fails, all do; the others get a [*collective.PeerError].
func (s *Set) Execute(ctx context.Context, plan *FitPlan, o LoadOptions) (*Tensors, *LoadReport, error) {
	start := time.Now()
	l := &load{set: s, plan: plan, LoadOptions: o, world: o.World, tokens: make(chan struct{}, max(o.Threads, 1)), report: newReport(plan)}
	if l.world == nil {
		l.world = collective.Solo{}
	}
	l.meter = meter{align: max(plan.params.Align, 1)}
	l.meter.add(plan.Preallocated)
	err := l.agree(ctx)
	if err == nil {
		err = l.together(ctx, l.prepare())
	}
	if err == nil {
		if plan.Group > 1 {
			err = l.broadcast(ctx)
		} else {
			err = l.together(ctx, l.alone(ctx))
		}
	}
	if l.reader != nil {
		if e := l.reader.Close(); e != nil {
			err = errors.Join(err, e)
		}
	}
	l.own.Free()
	if err == nil {
		err = l.together(ctx, s.Verify())
	}
	l.report.Peak, l.report.Seconds = l.meter.peak, time.Since(start).Seconds()
	if err != nil {
		l.homes.Free()
		var read *ReadError
		if errors.As(err, &read) && read.Hint == "" && s.Verify() != nil {
			read.Hint = "the file was changed while it was read; let nothing write to it and load again"
		}
		return nil, l.report, err
	}
	return l.homes, l.report, nil
}

// load is one call of Execute.
type load struct {
	LoadOptions
	set    *Set
	plan   *FitPlan
	world  collective.World
	report *LoadReport
	meter  meter

	own    *device.Block // the copier's
	reader Reader
	viewer Viewer      // reader, if it can show what it has
	files  [][]*Tensor // by position in plan.Files, as in its stats
	homes  *Tensors
	tokens chan struct{} // one for each read under way

	mu    sync.Mutex // guards what follows
	done  int64
	total int64
}

// prepare checks the arguments, takes the copier's memory and opens the files.
func (l *load) prepare() error {
	p := l.plan
	if l.Copier == nil || l.Device == nil {
		return errors.New("load: no device or no copier")
	}
	costs := l.Copier.Costs(l.set.Files)
	if costs.Fixed != p.params.Copier.Fixed || costs.PerChunk != p.params.Copier.PerChunk || !equalRatios(costs.Multiplier, p.params.Copier.Multiplier) {
		return fmt.Errorf("load: the plan was not made with the costs of the copier %s", l.Copier.Name())
	}
	if err := l.match(); err != nil {
		return err
	}
	if err := l.set.Verify(); err != nil {
		return err
	}
	var err error
	if l.own, err = l.allocate(device.InFlight, p.Fixed); err != nil {
		return err
	}
	if l.reader, err = l.Copier.Open(l.set.Files, l.own.Mem().Raw()); err != nil {
		return err
	}
	l.viewer, _ = l.reader.(Viewer)
	for i, m := range costs.Multiplier {
		if m.Num == 0 && l.viewer == nil {
			return &CopierError{l.Copier.Name(), l.set.Files[i].Path, errors.New("it says that a chunk costs nothing, and cannot show one")}
		}
	}
	l.report.Copier = l.Copier.Name()
	l.homes = &Tensors{mem: make(map[*Tensor]device.Mem)}
	return nil
}

func equalRatios(a, b []Ratio) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i].less(b[i]) || b[i].less(a[i]) {
			return false
		}
	}
	return true
}

// match finds the tensors of the plan in the set.
func (l *load) match() error {
	p := l.plan
	l.files = make([][]*Tensor, len(p.Files))
	for i := range p.Files {
		f := &p.Files[i]
		if f.Index < 0 || f.Index >= len(l.set.Files) || l.set.Files[f.Index].Path != f.Path || f.Tensors == nil && f.Kept > 0 {
			return fmt.Errorf("load: the plan is not one of this model: file %s", quote(f.Path))
		}
		l.files[i] = make([]*Tensor, len(f.Tensors))
		for j := range f.Tensors {
			s := &f.Tensors[j]
			t := l.set.byName[s.Name]
			if t == nil || t.File != f.Index || t.Offset != s.Offset || t.Bytes != s.Bytes {
				return fmt.Errorf("load: the plan is not one of this model: tensor %s of %s", quote(s.Name), f.Path)
			}
			if l.Deliver == nil && !l.stays(s) {
				return fmt.Errorf("load: tensor %s is to be delivered, and nobody takes it", quote(s.Name))
			}
			l.files[i][j] = t
		}
		if p.Group == 1 || i%p.Group == l.world.Rank() {
			l.total += f.Kept
		}
	}
	return nil
}

// stays says whether a tensor gets memory of its own that outlives the load.
func (l *load) stays(t *TensorStats) bool { return l.plan.params.AccumulateResident && t.Resident }

// allocate takes memory from the device and counts it.
func (l *load) allocate(p device.Purpose, bytes int64) (*device.Block, error) {
	b, err := l.Device.Allocate(p, bytes)
	if err != nil {
		return nil, fmt.Errorf("load: %w", err)
	}
	l.meter.add(l.meter.round(bytes))
	return b, nil
}

// release gives memory back.
func (l *load) release(b *device.Block) {
	if b == nil {
		return
	}
	bytes := b.Mem().Bytes()
	b.Free()
	l.meter.add(-l.meter.round(bytes))
}

// alone loads on one rank without the others.
func (l *load) alone(ctx context.Context) error {
	if l.streams() {
		return l.stream(ctx)
	}
	return l.inOrder(ctx)
}

// streams says whether chunks may be alive in any order: see [FitPlan.Buffers].
func (l *load) streams() bool {
	p := &l.plan.params
	if p.AccumulateResident || p.YieldClone || p.Classic || p.Group > 1 {
		return false
	}
	for _, m := range p.Copier.Multiplier {
		if first := p.Copier.Multiplier[0]; m.less(first) || first.less(m) {
			return false
		}
	}
	return true
}

// stream has one worker for each buffer of the plan. Each takes the next chunk, reads and delivers it.
func (l *load) stream(ctx context.Context) error {
	chunks := l.chunks()
	workers := max(min(l.plan.Buffers, len(chunks)), 1)
	each := l.plan.BufferBytes
	views := l.viewer != nil && len(chunks) > 0 && l.free(chunks[0].file)
	if views {
		each = 0
	}
	buffers, err := l.allocate(device.InFlight, each*int64(workers))
	if err != nil {
		return err
	}
	defer l.release(buffers)
	l.report.Predicted = l.plan.Preallocated + l.plan.Fixed + each*int64(workers)
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var next atomic.Int64
	var wg sync.WaitGroup
	for w := range workers {
		buffer := buffers.Mem().Slice(int64(w)*each, each).Raw()
		wg.Go(func() {
			for ctx.Err() == nil {
				i := int(next.Add(1)) - 1
				if i >= len(chunks) {
					return
				}
				c := chunks[i]
				err := l.readChunk(ctx, c, buffer, nil)
				if err == nil {
					err = l.handOn(ctx, c, buffer)
				}
				if err != nil {
					cancel(err) // only the first has an effect
					return
				}
				l.finish(c, l.meter.now())
			}
		})
	}
	wg.Wait()
	return context.Cause(ctx)
}

// placedChunk is a chunk of a file.
type placedChunk struct {
	*Chunk
	file int // position in the plan
}

// chunks are all chunks in their order.
func (l *load) chunks() []placedChunk {
	var list []placedChunk
	for b := range l.plan.Batches() {
		for r, c := range b.Chunks {
			if c != nil {
				list = append(list, placedChunk{c, b.First + r})
			}
		}
	}
	return list
}

// free says whether the chunks of a file are seen where they lie.
func (l *load) free(file int) bool {
	return l.plan.params.Copier.Multiplier[l.plan.Files[file].Index].Num == 0
}

// handOn delivers the pieces of a chunk that was read to buffer.
func (l *load) handOn(ctx context.Context, c placedChunk, buffer []byte) error {
	f := &l.plan.Files[c.file]
	for p := range f.Parts(c.Chunk) {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err := l.see(c, p, buffer, l.give(c.file, p)); err != nil {
			return err
		}
	}
	return nil
}

// give delivers a piece to the caller.
func (l *load) give(file int, p Part) func(data []byte) error {
	t := l.files[file][p.Tensor]
	return func(data []byte) error {
		if err := l.Deliver(Piece{Tensor: t, Offset: p.Offset, Data: data}); err != nil {
			return fmt.Errorf("load tensor %s: %w", quote(t.Name), err)
		}
		return nil
	}
}

// see shows a part of a chunk to use, from the chunk's buffer or, without one, from where it lies.
func (l *load) see(c placedChunk, p Part, buffer []byte, use func([]byte) error) error {
	if p.Bytes == 0 {
		return use(nil)
	}
	if !l.free(c.file) || c.HandOver {
		return use(buffer[p.At : p.At+p.Bytes : p.At+p.Bytes])
	}
	t := l.files[c.file][p.Tensor]
	off := t.Offset + p.Offset
	var failed error
	err := l.viewer.View(t.File, off, p.Bytes, func(data []byte) error {
		failed = use(data)
		return failed
	})
	if err != nil && failed == nil {
		return &ReadError{Path: l.set.Files[t.File].Path, Tensor: t.Name, Offset: off, Want: p.Bytes, Err: err}
	}
	return err
}

// finish notes that a chunk is delivered.
func (l *load) finish(c placedChunk, peak int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.report.Chunks++
	f := &l.report.PerFile[c.file]
	f.Chunks++
	f.Largest = max(f.Largest, c.Bytes)
	f.Peak = max(f.Peak, peak)
	if l.free(c.file) && !c.HandOver {
		l.advance(l.wanted(c))
	}
}

// wanted are the bytes of a chunk without holes.
func (l *load) wanted(c placedChunk) (n int64) {
	for p := range l.plan.Files[c.file].Parts(c.Chunk) {
		n += p.Bytes
	}
	return n
}

// advance reports progress, with the lock held.
func (l *load) advance(bytes int64) {
	if bytes == 0 {
		return
	}
	l.done += bytes
	l.report.Bytes += bytes
	if l.Progress != nil {
		l.Progress(l.done, l.total)
	}
}

// meter counts the bytes of a load, each block rounded as the plan rounds it.
type meter struct {
	align    int64
	mu       sync.Mutex
	use      int64
	peak     int64
	lastPeak int64
}

func (m *meter) round(bytes int64) int64 { return roundTo(bytes, m.align) }

func (m *meter) add(bytes int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.use += bytes
	m.peak = max(m.peak, m.use)
	m.lastPeak = max(m.lastPeak, m.use)
}

func (m *meter) now() int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.use
}

// since is the peak since the last call of since.
func (m *meter) since() int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.lastPeak
	m.lastPeak = m.use
	return p
}
