package main

import (
	"errors"
	"fmt"
	"testing"

	"github.com/trainerrank/engine/trainerrank"
)

func TestExitCodes(t *testing.T) {
	partial := &trainerrank.PartialExecutionError{Completed: 1, Count: 3, Err: errors.New("no luck")}
	for _, c := range []struct {
		err  error
		want int
	}{
		{errors.New("no luck"), exitFailed},
		{&usageError{"no verb", "try one"}, exitUsage},
		{errors.Join(&refusedError{errors.New("too large")}, errors.New("and no summary")), exitRefused},
		{fmt.Errorf("score: %w", &hinted{partial, "run it again"}), exitPartial},
	} {
		if got := exitCode(c.err); got != c.want {
			t.Errorf("%v: exit %d, want %d", c.err, got, c.want)
		}
	}
}
