package transformer

import "testing"

// Blocks are all rows in order, none empty, none above the bound nor above what workers took memory for, and about equal: no two differ by more than a tile, but
// for the last, which may be shorter. There are as many for every worker, if there are tiles for that.
func TestBlocksAreEqual(t *testing.T) {
	for _, most := range []int{1, 5, 7, 100, 240} {
		for workers := 1; workers <= 5; workers++ {
			for n := 1; n <= 1500; n++ {
				b := cut(n, most, workers)
				next, least, longest := 0, n, 0
				for i := range b.count {
					from, to := b.at(i)
					if from != next || to <= from {
						t.Fatalf("%d rows, at most %d, %d workers: block %d is [%d, %d) behind %d", n, most, workers, i, from, to, next)
					}
					next, longest = to, max(longest, to-from)
					if i < b.count-1 {
						least = min(least, to-from)
					}
				}
				if next != n || longest > most || longest > widest(n, most, workers) || b.count > 1 && longest-least > tileRows {
					t.Fatalf("%d rows, at most %d, %d workers: %+v ends at %d, from %d to %d rows each", n, most, workers, b, next, least, longest)
				}
				if b.count%workers != 0 && n >= workers*tileRows && most%tileRows == 0 && b.count != (n+tileRows-1)/tileRows {
					t.Fatalf("%d rows, at most %d: %d blocks for %d workers", n, most, b.count, workers)
				}
			}
		}
	}
}
