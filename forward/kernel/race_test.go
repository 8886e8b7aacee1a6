//go:build race

package kernel

// raceEnabled says that the race detector watches: everything is many times slower then, so tests do less.
const raceEnabled = true
