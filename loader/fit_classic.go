package loader

import (
	"math"
	"math/big"
)

// The classic plan: the fit planner of fastsafetensors 0.5.0, in exact rationals. In its terms, for file i,
//
//	resident_i = resident bytes of all files through the end of i's group of ranks, or 0 if nothing accumulates
//	e          = depth x multiplier + (1 if a clone is charged)
//	budget_i   = floor((budget - resident_i - depth x per_chunk) / e), at most MaxChunk
//
// and the load fits if each file's largest tensor fits in its budget. Files of which nothing is kept need nothing.

// classic is the arguments of the classic formulas. All sizes are bytes.
type classic struct {
	files      []FileStats
	budget     int64 // less what is fixed
	maxChunk   int64 // math.MaxInt64 for none
	multiplier Ratio // of every file
	perChunk   int64
	group      int
	clone      int64 // 1 if a clone is charged
	accumulate bool
}

// newClassic translates the arguments of Fit. The multiplier is one for all files: the largest.
func newClassic(stats []FileStats, p PlanParams) *classic {
	c := &classic{
		files: stats, budget: p.Budget - p.Copier.Fixed, maxChunk: p.MaxChunk, multiplier: Ratio{1, 1},
		perChunk: p.Copier.PerChunk, group: p.Group, accumulate: p.AccumulateResident,
	}
	c.budget = max(c.budget, math.MinInt64+p.Preallocated) - p.Preallocated
	if c.maxChunk == 0 {
		c.maxChunk = math.MaxInt64
	}
	for _, m := range p.Copier.Multiplier {
		if c.multiplier.less(m) {
			c.multiplier = m
		}
	}
	// A copy is charged only where it is not the growth of what stays, which is charged already.
	if p.YieldClone && (!p.AccumulateResident || hasNonResident(stats)) {
		c.clone = 1
	}
	return c
}

func hasNonResident(stats []FileStats) bool {
	for i := range stats {
		if stats[i].Resident < stats[i].Kept {
			return true
		}
	}
	return false
}

// residents are the bytes charged as resident for each file: all through the end of its group.
func (c *classic) residents() []*big.Int {
	rs := make([]*big.Int, len(c.files))
	sum := new(big.Int)
	for first := 0; first < len(c.files); first += c.group {
		last := min(len(c.files), first+c.group)
		if c.accumulate {
			sum = new(big.Int).Set(sum)
			for i := first; i < last; i++ {
				sum.Add(sum, big.NewInt(c.files[i].Resident))
			}
		}
		for i := first; i < last; i++ {
			rs[i] = sum
		}
	}
	return rs
}

// effective is the effective depth as a fraction: depth x multiplier + clone.
func (c *classic) effective(depth int) (num, den *big.Int) {
	n, d := reduce(c.multiplier)
	num = new(big.Int).Mul(big.NewInt(int64(depth)), big.NewInt(n))
	den = big.NewInt(d)
	return num.Add(num, new(big.Int).Mul(den, big.NewInt(c.clone))), den
}

func (c *classic) overhead(i, depth int) *big.Int {
	if c.files[i].Largest == 0 {
		return new(big.Int)
	}
	return new(big.Int).Mul(big.NewInt(int64(depth)), big.NewInt(c.perChunk))
}

// budgets plans at a depth that counts the receive tensor. A file that does not fit is named by its index; -1 is none.
func (c *classic) budgets(depth int) (budgets []int64, failed int) {
	num, den := c.effective(depth)
	budgets = make([]int64, len(c.files))
	for i, r := range c.residents() {
		b := new(big.Int).Sub(big.NewInt(c.budget), r)
		b.Sub(b, c.overhead(i, depth))
		b.Mul(b, den).Div(b, num) // Div rounds down also below 0, as the divisor is positive
		if limit := big.NewInt(c.maxChunk); b.Cmp(limit) > 0 {
			b = limit
		}
		if b.Cmp(big.NewInt(c.files[i].Largest)) < 0 {
			return nil, i
		}
		budgets[i] = b.Int64()
	}
	return budgets, -1
}

// required is what a file needs at a depth, rounded up to whole bytes: resident + e x largest + overhead.
func (c *classic) required(i, depth int, resident *big.Int) *big.Int {
	num, den := c.effective(depth)
	t := num.Mul(num, big.NewInt(c.files[i].Largest))
	t.Add(t, den).Sub(t, big.NewInt(1)).Div(t, den)
	t.Add(t, resident)
	return t.Add(t, c.overhead(i, depth))
}

// fitQueue is the largest queue size, asked or below, with which all files fit.
func (c *classic) fitQueue(asked int) (size int, ok bool) {
	if c.budget <= 0 {
		return 0, false
	}
	n, d := reduce(c.multiplier)
	var least *big.Int
	for i, r := range c.residents() {
		largest := big.NewInt(c.files[i].Largest)
		if largest.Sign() == 0 {
			continue
		}
		if c.files[i].Largest > c.maxChunk {
			return 0, false // whatever the depth
		}
		// depth x (multiplier x largest + per_chunk) + clone x largest <= budget - resident
		room := new(big.Int).Sub(big.NewInt(c.budget), r)
		room.Sub(room, new(big.Int).Mul(largest, big.NewInt(c.clone)))
		room.Mul(room, big.NewInt(d))
		each := new(big.Int).Mul(largest, big.NewInt(n))
		each.Add(each, new(big.Int).Mul(big.NewInt(c.perChunk), big.NewInt(d)))
		if depth := room.Div(room, each); least == nil || depth.Cmp(least) < 0 {
			least = depth
		}
	}
	if least == nil {
		return asked, true
	}
	if c.group > 1 {
		least.Sub(least, big.NewInt(1))
	}
	if least.Sign() <= 0 {
		return 0, false
	}
	if !least.IsInt64() || least.Int64() > math.MaxInt/2 {
		return asked, true
	}
	return min(asked, queueOf(int(least.Int64()))), true
}

// minimum is the smallest budget, what is fixed not included, with which all files fit serially, and the file that needs
// it; -1 if none needs anything.
func (c *classic) minimum() (bytes int64, binding int) {
	binding = -1
	most := big.NewInt(1) // a budget has to be positive
	for i, r := range c.residents() {
		need := r // a file of which nothing is kept needs only that its budget is not negative
		if c.files[i].Largest > 0 {
			need = c.required(i, depthOf(-1, c.group), r)
		}
		if need.Cmp(most) > 0 {
			most, binding = need, i
		}
	}
	return saturate(most), binding
}

func saturate(x *big.Int) int64 {
	if !x.IsInt64() {
		return never
	}
	return x.Int64()
}

// infeasible is the error of a load that does not fit even serially: of its first file that does not.
func (c *classic) infeasible(failed int) *BudgetInfeasibleError {
	depth := depthOf(-1, c.group)
	num, den := c.effective(depth)
	f := &c.files[failed]
	resident := c.residents()[failed]
	required := c.required(failed, depth, resident)
	e := &BudgetInfeasibleError{
		Limit: LimitTensor, File: f.Path, Index: failed, Tensor: f.largestTensor(),
		RequiredBytes: saturate(required), ResidentBytes: saturate(resident),
		TransientBytes: saturate(new(big.Int).Sub(required, resident)),
		BudgetBytes:    c.budget, LargestBytes: f.Largest, PerChunkBytes: saturate(c.overhead(failed, depth)),
		EffectiveDepth: Ratio{num.Int64(), den.Int64()}, MaxChunk: c.maxChunk,
	}
	if f.Largest > c.maxChunk {
		e.Limit = LimitMaxChunk
	}
	return e
}

// largestTensor is the name of the first of the file's largest tensors; empty if they are not known.
func (f *FileStats) largestTensor() string {
	for i := range f.Tensors {
		if f.Tensors[i].Bytes == f.Largest {
			return f.Tensors[i].Name
		}
	}
	return ""
}

// fitClassic is Fit in classic mode.
func fitClassic(stats []FileStats, p PlanParams) (*FitPlan, error) {
	c := newClassic(stats, p)
	minimum, _ := c.minimum()
	if c.budget <= 0 {
		return nil, refuseFixed(stats, p)
	}
	queue, ok := c.fitQueue(p.QueueSize)
	if !ok {
		queue = -1 // so that the error names the smallest shortfall
	}
	depth := depthOf(queue, p.Group)
	budgets, failed := c.budgets(depth)
	if failed >= 0 {
		return nil, refuse(c.infeasible(failed), stats, p)
	}
	plan := &FitPlan{
		Classic: true, QueueSize: queue, Depth: depth,
		Minimum: satAdd(minimum, satAdd(p.Copier.Fixed, p.Preallocated)),
		Files:   make([]FilePlan, len(stats)),
	}
	for i := range stats {
		f := &plan.Files[i]
		*f = FilePlan{FileStats: stats[i], Index: i, Budget: budgets[i]}
		f.Chunks, _ = cutClassic(f.Tensors, f.Budget) // each tensor is at most the file's largest, and that fits
	}
	plan.complete(stats, p)
	if plan.Peak = peakClassic(plan, c); plan.Peak > p.Budget {
		plan.Peak = p.Budget // only a bound, where tensors are not known
	}
	return plan, nil
}
