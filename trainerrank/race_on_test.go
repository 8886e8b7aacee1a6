//go:build race

package trainerrank_test

const raceEnabled = true
