package ladder

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"github.com/trainerrank/engine/profile"
)

// Rung is one way to run a call that was tried: a number of subforwards, the requests of each, and what they cost in bytes. The slices go by chunks in the order of the
// cut, not of execution.
//
// Its JSON form is an element of "rungs" in the output of plan --json.
type Rung struct {
	Count    int     `json:"count"`
	Chunks   [][]int `json:"chunks"`
	Required []int64 `json:"required"`
	Retained []int64 `json:"retained"`
	// TotalBytes is what the rung needs: [Total], or [RunningPeak] if there are no gradients.
	TotalBytes int64 `json:"total_bytes"`
	Fits       bool  `json:"fits"`

	// Layout says how the chunks are laid out; it is empty if the numbers are lower bounds of any layout.
	Layout    Layout        `json:"-"`
	Retention Retention     `json:"-"`
	Basis     profile.Basis `json:"-"` // the least reliable of the prices
	// LowerBytes is the total of the lower bounds, if they were asked for; -1 if not.
	LowerBytes int64 `json:"-"`
}

// WhyNot says in a few words why the rung does not fit in so many bytes, "" if it does.
func (r *Rung) WhyNot(usable int64) string {
	if r.TotalBytes <= usable {
		return ""
	}
	least := ""
	if r.Layout == "" {
		least = "at least "
	}
	return fmt.Sprintf("needs %s%d bytes, %d more than usable", least, r.TotalBytes, r.TotalBytes-usable)
}

// Execution is the order in which chunks are run: the one with the most ephemeral bytes first, of equal ones the first (section 5.7 of the reference).
// No order has a smaller running peak.
func Execution(required, retained []int64) []int {
	order := make([]int, len(required))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int {
		return cmp.Compare(required[b]-retained[b], required[a]-retained[a])
	})
	return order
}

// Total is what a rung needs by the inequality of section 5.6: all that is retained, and the largest ephemeral part. It bounds the peak of
// every order of execution. MaxInt64 if it is more than that.
func Total(required, retained []int64) int64 {
	sum, most := int64(0), int64(0)
	for j := range required {
		sum = plus(sum, retained[j])
		most = max(most, required[j]-retained[j])
	}
	return plus(sum, most)
}

// RunningPeak is the exact peak of the chunks run one after the other in the order of [Execution], with no backward: the largest of what was retained before a
// chunk and what it requires. It is never more than [Total], and equal to it for equal chunks.
func RunningPeak(required, retained []int64) int64 {
	peak, before := int64(0), int64(0)
	for _, j := range Execution(required, retained) {
		peak = max(peak, plus(before, required[j]))
		before = plus(before, retained[j])
	}
	return peak
}

// plus is the sum of two numbers that are not negative, MaxInt64 if that is too small for it.
func plus(a, b int64) int64 {
	if a > math.MaxInt64-b {
		return math.MaxInt64
	}
	return a + b
}
