package loader

import (
	"cmp"
	"slices"
	"sort"
	"strings"
)

// The default plan.
//
// Charges are counted in units of 1/scale byte (see commonScale). The chunks of one rank, in the order in which they are
// loaded, are c[0], c[1] and so on, each with the charge of its buffer. With d chunks alive at once, of which k is the one
// being delivered, the bytes in use are
//
//	P(k) = R(k) + c[k] + ... + c[k+d-1] + T(k)
//
// R(k): residents by the time that k is delivered, k's own only if they are copied out of it, for one that is handed over is
// its own residents. T(k): the copy or the received tensor while k is delivered. A budget B is enough if P(k) <= B for all k.
// That is guaranteed if each chunk keeps to one of two rules, the same one in the whole load:
//
//	share:  d x c[j] <= B - R(j) - T, with T the most of T(j-d+1) to T(j)
//	        or else, as in the classic mode, size(j) <= V(j) = (B - R(j) - d x per_chunk) / (d x multiplier + 1)
//	total:  d x (c[j] - handed[j]) <= B - C - T, with T the most of all, C all residents of the load, handed[j] what
//	        chunk j hands over
//
// Share: R never falls, so with the first form each of the d charges in P(k) is at most (B - R(k) - T(k)) / d. The second is used
// with the largest multiplier of all files, and only while T <= V for all chunks that can be alive: then d x c <= B - R(k) -
// V(k) and T(k) <= V(k). Total: R(k) and what is handed over among k to k+d-1 are at most C. The first form of share with d = 1
// is P(k) <= B itself: no rule could do better, and the least budget of a load is computed from it in one pass.
//
// Every chunk that the classic mode makes keeps to share, so cutting first-fit makes none that is smaller. In a group of ranks
// the residents of all its files are charged for each of its chunks, as the files' chunks interleave, less what the chunk itself
// hands over: that is in its charge, and cannot be there before.

// better is one problem of the default mode.
type better struct {
	files []FileStats // in the order of the load
	index []int       // of files, in the caller's order
	mus   []int64     // scaled charge of a byte of a chunk, by position in files
	fixed int64       // bytes that are not to be planned with

	scale      int64
	budget     int64 // scaled, less what is fixed
	perChunk   int64 // scaled
	maxMu      int64 // the largest of mus, and at least scale if anything is handed over
	maxChunk   int64 // bytes; never for none
	align      int64
	group      int
	accumulate bool
	clone      bool
	known      bool  // all tensors are
	pieces     int64 // the most chunks that there can be; never if not known

	need []fileNeed // by position in files
}

func newBetter(stats []FileStats, p PlanParams) *better {
	b := &better{
		files: slices.Clone(stats), index: make([]int, len(stats)), mus: make([]int64, len(stats)),
		fixed: satAdd(p.Copier.Fixed, p.Preallocated), align: max(p.Align, 1), group: p.Group,
		accumulate: p.AccumulateResident, clone: p.YieldClone, maxChunk: p.MaxChunk, known: true,
		need: make([]fileNeed, len(stats)),
	}
	b.scale, _ = commonScale(p.Copier.Multiplier)
	// One less than never, so that a charge that has saturated is always refused.
	b.budget = min(satMul(max(p.Budget-min(b.fixed, p.Budget), 0), b.scale), never-1)
	b.perChunk = satMul(p.Copier.PerChunk, b.scale)
	if b.maxChunk == 0 {
		b.maxChunk = never
	}
	b.maxMu = 0
	if b.accumulate {
		b.maxMu = b.scale
	}
	for i := range stats {
		b.index[i] = i
		num, den := reduce(p.Copier.Multiplier[i])
		b.mus[i] = num * (b.scale / den)
		b.maxMu = max(b.maxMu, b.mus[i])
		b.known = b.known && (stats[i].Tensors != nil || stats[i].Kept == 0)
	}
	if !b.known {
		b.pieces = never
	}
	for i := range stats {
		if b.known {
			b.need[i] = b.needOf(i)
		} else {
			b.need[i] = b.needOfSums(i)
		}
	}
	return b
}

// inBytes turns scaled units into bytes of budget, with what is fixed.
func (b *better) inBytes(scaled int64) int64 {
	if scaled == never {
		return never
	}
	return satAdd(ceilDiv(scaled, b.scale), b.fixed)
}

// reordered is the problem with the files in the order that needs least: those whose worst moment is furthest above what stays of
// them come first, when there is most room (the rule of Jackson for jobs with delivery times; optimal for one rank).
// Equals are in the order of their paths.
func (b *better) reordered() *better {
	order := make([]int, len(b.files))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(x, y int) int {
		nx, ny := &b.need[x], &b.need[y]
		return cmp.Or(cmp.Compare(satAdd(ny.tail, ny.recv), satAdd(nx.tail, nx.recv)), strings.Compare(b.files[x].Path, b.files[y].Path))
	})
	r := *b
	r.files, r.index = make([]FileStats, len(order)), make([]int, len(order))
	r.mus, r.need = make([]int64, len(order)), make([]fileNeed, len(order))
	for to, from := range order {
		r.files[to], r.index[to], r.mus[to], r.need[to] = b.files[from], b.index[from], b.mus[from], b.need[from]
	}
	return &r
}

// best is the problem in the caller's order if the budget is enough for it, else in the order that needs less.
func (b *better) best() (in *better, need int64, binding int) {
	need, binding = b.minimum()
	if need <= b.budget {
		return b, need, binding
	}
	r := b.reordered()
	if n, at := r.minimum(); n < need {
		return r, n, at
	}
	return b, need, binding
}

// least is the smallest budget in bytes that is enough, in whatever order; never if none is.
func (b *better) least() int64 {
	need, _ := b.minimum()
	if r, _ := b.reordered().minimum(); r < need {
		need = r
	}
	return b.inBytes(need)
}

// fitBetter is Fit in the default mode.
func fitBetter(stats []FileStats, p PlanParams) (*FitPlan, error) {
	caller := newBetter(stats, p)
	if p.Budget <= 0 || caller.fixed > p.Budget {
		return nil, refuseFixed(stats, p)
	}
	b, need, binding := caller.best()
	if need > b.budget {
		return nil, refuse(b.infeasible(need, binding), stats, p)
	}
	bounds, floor := classicBounds(stats, p)
	cut := b.choose(buffers(p.QueueSize), floor, bounds, p.DepthFirst)
	b.deepen(cut, buffers(p.QueueSize))
	plan := &FitPlan{
		QueueSize: p.QueueSize, Depth: depthOf(p.QueueSize, p.Group),
		Minimum: max(caller.least(), 1), Reordered: b != caller, Files: make([]FilePlan, len(b.files)),
	}
	if cut.depth < buffers(p.QueueSize) {
		plan.QueueSize = queueOf(cut.depth)
		plan.Depth = depthOf(plan.QueueSize, p.Group)
	}
	for i := range b.files {
		plan.Files[i] = FilePlan{FileStats: b.files[i], Index: b.index[i], Budget: cut.limits[i]}
		if b.known {
			plan.Files[i].Chunks = cut.of(i)
		}
	}
	plan.complete(stats, p)
	plan.Peak = b.inBytes(b.peak(cut))
	return plan, nil
}

// classicBounds is what the classic mode would do: the limits of its chunks in the caller's order, and how many are alive. nil
// and 1 if it has no plan.
func classicBounds(stats []FileStats, p PlanParams) (bounds []int64, depth int) {
	for _, m := range p.Copier.Multiplier {
		if m.Num < m.Den {
			return nil, 1
		}
	}
	c := newClassic(stats, p)
	queue, ok := c.fitQueue(p.QueueSize)
	if !ok {
		return nil, 1
	}
	bounds, failed := c.budgets(depthOf(queue, p.Group))
	if failed >= 0 {
		return nil, 1
	}
	return bounds, buffers(queue)
}

// choose cuts at the largest depth of at most asked at which every tensor fits and, unless depth comes first, no file is limited
// more than bounds says. floor is a depth at which that is known.
func (b *better) choose(asked, floor int, bounds []int64, depthFirst bool) *cutting {
	if depthFirst {
		bounds = nil
	}
	try := func(depth int) *cutting {
		var best *cutting
		rules := []rule{share, total}
		if !b.accumulate && !b.clone && b.group == 1 {
			rules = rules[:1] // without residents and copies both are the same
		}
		for _, rule := range rules {
			c := b.cut(depth, rule)
			if c == nil || !c.covers(b, bounds) {
				continue
			}
			if best == nil || c.count() < best.count() {
				best = c
			}
		}
		return best
	}
	if c := try(asked); c != nil {
		return c
	}
	best := try(floor)
	if best == nil {
		// Only with rounding, which the classic mode does not charge: then its limits cannot be matched.
		bounds, floor = nil, 1
		if c := try(asked); c != nil {
			return c
		}
		best = try(floor)
	}
	for low, high := floor, asked; high-low > 1; {
		mid := low + (high-low)/2
		if c := try(mid); c != nil {
			best, low = c, mid
		} else {
			high = mid
		}
	}
	return best
}

// deepen lets more of a cutting's chunks be alive, up to asked, if that happens to fit: the rules know each chunk's
// neighbours only as the largest that they may be. It leaves a load alone whose chunks may be alive in any order.
func (b *better) deepen(c *cutting, asked int) {
	if !b.known || !b.accumulate && !b.clone {
		return
	}
	most := int(min(int64(asked), max(b.pieces, 1)))
	if c.depth >= most {
		return
	}
	fits := func(more int) bool { return peakOf(c.costs, c.ends, b.group, c.depth+more) <= b.budget }
	more := sort.Search(most-c.depth, func(i int) bool { return !fits(i + 1) })
	if c.depth += more; c.depth == most {
		c.depth = asked // there are no more chunks than that
	}
}

// covers says whether no file is limited more than bounds says, or stays whole.
func (c *cutting) covers(b *better, bounds []int64) bool {
	if bounds == nil {
		return true
	}
	for i := range b.files {
		if f := &b.files[i]; f.Kept > 0 && c.limits[i] < min(bounds[b.index[i]], f.Kept) {
			return false
		}
	}
	return true
}

// infeasible is the error of a load that does not fit even serially in its best order.
func (b *better) infeasible(need int64, binding int) *BudgetInfeasibleError {
	e := &BudgetInfeasibleError{Limit: LimitTensor, MaxChunk: b.maxChunk}
	at := b.stuck()
	if at >= 0 {
		binding, e.Limit = at, LimitMaxChunk
	}
	f, n := &b.files[binding], &b.need[binding]
	e.File, e.Index = f.Path, b.index[binding]
	e.BudgetBytes = b.budget / b.scale
	e.LargestBytes = f.Largest
	e.PerChunkBytes = b.perChunk / b.scale
	e.EffectiveDepth = Ratio{b.mus[binding], b.scale}
	tensor := n.binding
	if at >= 0 {
		tensor = n.stuckTensor
		e.LargestBytes = n.stuck
	}
	if tensor >= 0 && f.Tensors != nil {
		e.Tensor = f.Tensors[tensor].Name
		if at < 0 {
			e.LargestBytes = f.Tensors[tensor].Bytes
		}
	} else if f.Tensors == nil && at < 0 {
		e.Tensor = f.largestTensor()
	}
	e.ResidentBytes = ceilDiv(b.residentsAt(binding, tensor), b.scale)
	if need == never {
		e.RequiredBytes, e.TransientBytes = 0, 0
		return e
	}
	e.RequiredBytes = ceilDiv(need, b.scale)
	if rest := max(e.RequiredBytes-roundTo(e.LargestBytes, b.align), 0); at < 0 && b.group == 1 && e.ResidentBytes > rest {
		e.ResidentBytes = rest // what lies together is rounded once
	}
	e.TransientBytes = max(e.RequiredBytes-e.ResidentBytes, 0)
	return e
}

// residentsAt are the scaled residents that are there when a tensor arrives, without itself; those of its whole file or group
// where its place is not known.
func (b *better) residentsAt(file, tensor int) int64 {
	var sum int64
	last := min(len(b.files), file-file%b.group+b.group)
	if b.group == 1 && tensor >= 0 {
		last = file
		for j := range tensor {
			if t := &b.files[file].Tensors[j]; b.stays(t) {
				sum = satAdd(sum, b.own(t.Bytes))
			}
		}
	}
	for i := range last {
		sum = satAdd(sum, b.need[i].resident)
	}
	return sum
}

// position is how far a file is along, for the rules: residents and temporary memory around it.
type position struct {
	residents int64 // scaled: all through the end of the file, or of its group
	recv      int64 // scaled: of its group
}

// positions of all files in order, the residents of the whole load, and the most temporary memory.
func (b *better) positions() (ps []position, all, temp int64) {
	ps = make([]position, len(b.files))
	for first := 0; first < len(b.files); first += b.group {
		last := min(len(b.files), first+b.group)
		var recv int64
		for i := first; i < last; i++ {
			all = satAdd(all, b.need[i].most)
			recv = max(recv, b.need[i].recv)
		}
		for i := first; i < last; i++ {
			ps[i] = position{all, recv}
			temp = max(temp, recv, b.need[i].copied)
		}
	}
	return ps, all, temp
}
