package loader

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
)

// Job is one piece of a tensor and what to do with its bytes.
type Job struct {
	Tensor *Tensor
	Offset int64 // first byte, counted from the start of the tensor
	Bytes  int64 // at least 0, and inside the tensor
	// Do is given the bytes, in file order. They are only there until it returns. It is called on the goroutine of one
	// worker, at the same time as other jobs on other workers, in no order that can be relied on.
	Do func(data []byte) error
}

// Load reads the pieces of tensors that jobs ask for, each once, and hands them on. It returns when all is done, or
// stopped: no goroutine is left behind, and no byte of staging is in use.
//
// There is one worker for each buffer of staging, which is where it reads to; each buffer must hold the largest job. For a
// file that is in memory already, sizes from 256 KiB to 16 MiB make no difference that can be relied on. The
// jobs are done in the order of their bytes in the files, and adjacent jobs of one tensor are read in one go when they
// fit in a buffer, so that larger buffers make larger reads. Within a buffer, a job of a tensor lies as far from the
// start as it lies from another job of the same tensor in the file: if jobs begin at multiples of n bytes of the
// tensor, and the buffers at multiples of n in memory, so does all data.
//
// The files are verified (see [Set.Verify]) before the first read and after the last. The first error stops the load
// and is returned: a [*ReadError], a [*ChangedError] (or a [*FilesError] of several), what Do returned, with the tensor's
// name in front, or the context's cause; the context is looked at between jobs. What has been handed on by then is to be thrown away.
//
// progress, if not nil, is told now and then how many bytes are done so far; one call at a time, each with more than
// the one before, and in the end with all.
func (s *Set) Load(ctx context.Context, staging [][]byte, jobs []Job, progress func(bytes int64)) error {
	l := loading{set: s, jobs: jobs, progress: progress}
	if err := l.plan(staging); err != nil {
		return fmt.Errorf("load: %w", err)
	}
	if err := s.Verify(); err != nil {
		return err
	}
	if err := l.run(ctx, staging); err != nil {
		var short *ReadError
		if errors.As(err, &short) && s.Verify() != nil {
			short.Hint = "the file was changed while it was read; let nothing write to it and load again"
		}
		return err
	}
	return s.Verify()
}

// A loading is one call of Load.
type loading struct {
	set      *Set
	jobs     []Job
	order    []int // jobs in the order of their bytes
	reads    []span
	progress func(int64)

	next atomic.Int64 // index in reads

	mu   sync.Mutex
	done int64
}

// A span is the jobs order[first:last], adjacent in one tensor and read in one go.
type span struct {
	first, last int
	bytes       int64
}

// readsPerWorker is into how many reads per worker the work is cut at least, if the jobs are small enough: with fewer,
// the last read of one worker is what all others wait for.
const readsPerWorker = 8

// plan checks the jobs against the tensors and the buffers and cuts them into reads.
func (l *loading) plan(staging [][]byte) error {
	if len(staging) == 0 {
		return errors.New("no staging buffer")
	}
	smallest := 0
	for i, b := range staging {
		if len(b) < len(staging[smallest]) {
			smallest = i
		}
	}
	room := int64(len(staging[smallest]))
	var total, largest int64
	l.order = make([]int, len(l.jobs))
	for i, j := range l.jobs {
		if _, err := l.set.check(j.Tensor, j.Offset, j.Bytes); err != nil {
			return fmt.Errorf("job %d: %w", i, err)
		}
		if j.Do == nil {
			return fmt.Errorf("job %d: tensor %s: nothing to do", i, quote(j.Tensor.Name))
		}
		if j.Bytes > room {
			return fmt.Errorf("job %d of tensor %s has %d bytes; staging buffer %d has %d", i, quote(j.Tensor.Name), j.Bytes, smallest, room)
		}
		total += j.Bytes
		largest = max(largest, j.Bytes)
		l.order[i] = i
	}
	byPlace := func(a, b int) int {
		x, y := &l.jobs[a], &l.jobs[b]
		return cmp.Or(cmp.Compare(x.Tensor.File, y.Tensor.File), cmp.Compare(x.Tensor.Offset+x.Offset, y.Tensor.Offset+y.Offset), cmp.Compare(a, b))
	}
	if !slices.IsSortedFunc(l.order, byPlace) {
		slices.SortFunc(l.order, byPlace)
	}
	most := min(room, max(largest, total/int64(readsPerWorker*len(staging))))
	for i := 0; i < len(l.order); {
		j := &l.jobs[l.order[i]]
		r := span{first: i, last: i + 1, bytes: j.Bytes}
		for ; r.last < len(l.order); r.last++ {
			k := &l.jobs[l.order[r.last]]
			if k.Tensor != j.Tensor || k.Offset != j.Offset+r.bytes || k.Bytes > most-r.bytes {
				break
			}
			r.bytes += k.Bytes
		}
		l.reads = append(l.reads, r)
		i = r.last
	}
	return nil
}

func (l *loading) run(ctx context.Context, staging [][]byte) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	for _, buffer := range staging[:min(len(staging), max(1, len(l.reads)))] {
		wg.Go(func() {
			if err := l.work(ctx, buffer); err != nil {
				cancel(err) // only the first has an effect
			}
		})
	}
	wg.Wait()
	return context.Cause(ctx)
}

// work is one worker.
func (l *loading) work(ctx context.Context, buffer []byte) error {
	for {
		if ctx.Err() != nil {
			return nil // run knows why
		}
		i := int(l.next.Add(1)) - 1
		if i >= len(l.reads) {
			return nil
		}
		r := l.reads[i]
		first := &l.jobs[l.order[r.first]]
		data := buffer[:r.bytes]
		if err := l.set.ReadAt(first.Tensor, data, first.Offset); err != nil {
			return err
		}
		for _, k := range l.order[r.first:r.last] {
			if ctx.Err() != nil {
				return nil
			}
			j := &l.jobs[k]
			at := j.Offset - first.Offset
			if err := j.Do(data[at : at+j.Bytes : at+j.Bytes]); err != nil {
				return fmt.Errorf("load tensor %s: %w", quote(j.Tensor.Name), err)
			}
		}
		l.report(r.bytes)
	}
}

func (l *loading) report(bytes int64) {
	if l.progress == nil || bytes == 0 {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.done += bytes
	l.progress(l.done)
}
