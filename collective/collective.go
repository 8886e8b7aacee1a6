// Package collective is what a rank says to the other ranks.
//
// Only the solo world exists so far: one rank, for which every collective is the identity. The in-process group comes
// with loading over ranks.
package collective

// World is the set of ranks that run together.
type World interface {
	// Rank is this rank's number, from 0.
	Rank() int
	// Size is the number of ranks.
	Size() int
}

// Solo is the world of one rank.
type Solo struct{}

// Rank is 0.
func (Solo) Rank() int { return 0 }

// Size is 1.
func (Solo) Size() int { return 1 }
