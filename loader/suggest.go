package loader

import (
	"context"
	"fmt"

	"github.com/trainerrank/engine/collective"
	"github.com/trainerrank/engine/device"
)

// SuggestBudget is a budget for a load onto a device, in bytes: what is free there less a twentieth of it, at least a GiB, the smallest
// over all ranks. It is 0 where no more than that is free. A nil world is one rank alone.
//
// It is a suggestion: who states a budget wants it kept, but what this says is not worth a refusal. See [FitSuggested].
func SuggestBudget(ctx context.Context, dev device.Device, w collective.World) (int64, error) {
	free := dev.Free()
	v := []int64{max(free-max(free/20, 1<<30), 0)}
	if w != nil {
		if err := w.AllReduceInt64(ctx, "load/budget", collective.Min, v); err != nil {
			return 0, fmt.Errorf("suggest a budget: %w", err)
		}
	}
	return v[0], nil
}

// FitSuggested is [Fit] with a budget that was suggested and not stated, p.Budget. If the load does not fit into it, but does into
// most, which is all there is, it is planned with the smallest budget that is enough, and warning says so.
func FitSuggested(stats []FileStats, p PlanParams, most int64) (plan *FitPlan, warning string, err error) {
	suggested := p.Budget
	plan, err = Fit(stats, p)
	e, ok := err.(*BudgetInfeasibleError)
	if !ok || e.Minimum == 0 || e.Minimum > most {
		return plan, "", err
	}
	p.Budget = e.Minimum
	if plan, err = Fit(stats, p); err != nil {
		return nil, "", err
	}
	return plan, fmt.Sprintf("the load needs %d bytes, more than the %d suggested, which leave room for other uses of the %d there are", p.Budget, suggested, most), nil
}
