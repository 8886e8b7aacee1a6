//go:build !race

package trainerrank_test

const raceEnabled = false
