package collective

import (
	"errors"
	"sync"
)

// errExit is the reason when a rank's goroutine ended without a return: runtime.Goexit, which t.FailNow calls too.
var errExit = errors.New("its goroutine exited")

// Run makes a group of n ranks, calls f for each in a goroutine of its own, and returns when all have returned: nil if
// all did so without error, else their errors as [*RankError], joined in the order of the ranks.
//
// The first rank that returns an error or panics ends the group, so the others get an [*AbortError] from the operation that
// they wait in or call next, and can return; a panic becomes a [*PanicError]. A rank that returns nil is closed. A rank that
// calls no operation any more is waited for, as Go cannot stop a goroutine.
func Run(n int, f func(w World) error) error {
	g := NewGroup(n)
	errs := make([]error, n)
	var wg sync.WaitGroup
	for rank := range n {
		wg.Go(func() {
			err := errExit
			defer func() {
				if p := recover(); p != nil {
					err = panicError(p)
				}
				if err == nil {
					_ = g.Rank(rank).Close() // never fails
					return
				}
				errs[rank] = &RankError{Rank: rank, Err: err}
				g.Abort(rank, err)
			}()
			err = f(g.Rank(rank))
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}
