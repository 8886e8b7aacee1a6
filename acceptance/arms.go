package main

import (
	"slices"

	"github.com/trainerrank/engine/internal/failpoint"
)

// arms are those that are built, in the order in which they are run; learnedArms those of --pricing learned.
var arms, learnedArms []arm

func init() { // a table of functions that look into the table
	arms = []arm{
		{"split-conversion cap unlimited", "split-conversion", pressureCap, "with room: whole, predicted to the byte", wholeGates, capUnlimited},
		{"split-conversion cap below whole", "split-conversion", pressureCap, "one byte less than the whole needs: split, same bits", convertGates, capBelowWhole},
		{"split-conversion cap below one", "split-conversion", pressureCap, "less than one request needs: refused before anything runs",
			append([]string{gatePrefix, gateSingle}, refusedGates...), capBelowOne},
		{"split-conversion cap below whole, training", "split-conversion", pressureCap, "one byte less than the whole needs: split, gradients of the unsplit", capTrainingGates, capTraining},
		{"split-conversion ballast no_grad", "split-conversion", pressureBallast, "live ballast leaves 60 %: split, same bits", convertGates, ballastWarm},
		{"split-conversion ballast R/8", "split-conversion", pressureBallast, "live ballast leaves an eighth: refused, or split if that is enough", []string{gateAdmitted, gateForwards, gateCounters}, ballastEighth},
		{"split-conversion ballast training", "split-conversion", pressureBallast, "live ballast leaves the window in which only a split fits, backwards included", ballastTrainingGates, ballastTraining},
		{"split-conversion ballast R/8, training", "split-conversion", pressureBallast, "live ballast leaves an eighth: refused with everything stored", eighthTrainingGates, ballastEighthTraining},
		{"cold ballast no_grad", "cold", "", "the first call of a process, under ballast: split", append([]string{"priced exactly"}, convertGates...), coldBallast},
		{"retention", "retention", "", "a training call that no split admits: graphs keep less, gradients keep their bits", retentionGates, retention},
		{"invariance", "invariance", "", "orders, nestings, splits, threads: same bits", invarianceGates, invariance},
		{"invariance gradients", "invariance", "", "training calls: same bits whatever is kept and on any threads, close in any layout, split, order", gradientGates, invariantGradients},
		{"micro-batches", "micro-batches", "", "lists in waves on 1, 2 and 4 ranks under unequal ballast: every item once, in order; a failure is one of all", waveGates, microBatches},
		{"faults", "faults", "", "cancellation, failing subforwards, memory taken away: typed, nothing left, next call right", faultGates, faults},
		{"faults training", "faults", "", "training calls that fail or are cancelled in forward and backward, and what must be refused", trainFaultGates, faultsTraining},
		{armSweep, "faults", "", "every fail-point: an error, a panic, a cancellation: typed, nothing left, next call right", sweepGates, sweep},
		{armTrain, "faults", "", "the same of a training call and its backward: the next gives the right gradients", trainGates, sweepTraining},
		{armRanks, "faults", "", "fail-points in the collectives of several ranks: all fail, none waits, new ranks work", ranksGates, sweepRanks},
		{armFirst, "faults", "", "a process in which the first of everything fails", firstGates, firstOfAll},
		{"pressure-soak", "pressure-soak", "", "random calls in random budgets: admitted if and only if they fit", soakGates, soak},
		{"load", "load", "", "budgets from too small to ample, by every copier: same bytes, inside the budget", loadGates, loading},
		{phaseCalibrate, phaseCalibrate, "", "layouts timed: a cost table that orders those of other calls (only if asked for; --model may name several)", calibrateGates, calibrate},
	}
	learnedArms = []arm{
		{"learned split-conversion cap unlimited", "split-conversion", pressureCap, "with room: whole, first by a cold price, then within a learned one", learnedWholeGates, learnedUnlimited},
		{"learned split-conversion cap below whole", "split-conversion", pressureCap, "one byte less than the whole is priced at: split, same bits", learnedConvertGates, learnedBelowWhole},
		{"learned split-conversion cap below one", "split-conversion", pressureCap, "less than one request is priced at: refused before anything runs",
			append([]string{gatePrefix, gateSingle}, refusedGates...), learnedBelowOne},
		{"learned split-conversion ballast no_grad", "split-conversion", pressureBallast, "live ballast leaves 60 %: split, same bits", learnedConvertGates, learnedBallast},
		{"learned split-conversion ballast R/8", "split-conversion", pressureBallast, "live ballast leaves an eighth, or less than the smallest split: refused", refusedGates, learnedEighth},
		{"learned cold ballast no_grad", "cold", "", "the first call of a process, under ballast: refused, and split after one profiled call", learnedColdGates, learnedCold},
		{"learned pressure-soak", "pressure-soak", "", "random calls in random budgets: admitted if and only if they would fit by what is known", learnedSoakGates, learnedSoak},
	}
	if !failpoint.Enabled {
		arms = slices.DeleteFunc(arms, func(a arm) bool { return slices.Contains(failpointArms, a.name) })
	}
}
