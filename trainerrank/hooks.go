package trainerrank

import (
	"fmt"
	"os"
	"strconv"

	"github.com/trainerrank/engine/profile"
)

// The environment of the hooks for tests. Without the first set to 1 the others are not looked at.
const (
	hooksEnv  = "ART_TRAINER_RANK_TEST_HOOKS"
	limitEnv  = "ART_TRAINER_RANK_TEST_MEMORY_LIMIT_BYTES"
	anchorEnv = "ART_TRAINER_RANK_TEST_ANCHOR"
)

// hooks are what a test may ask for from outside the process.
type hooks struct {
	limited bool
	limit   int64  // bytes that the device may have allocated with the call's
	anchor  string // the label of the layout to use; see prefixtree.Tree.Anchor
}

// readHooks reads the environment. It is read for every call, so that a test can change it under way.
func readHooks() (h hooks, err error) {
	if os.Getenv(hooksEnv) != "1" {
		return h, nil
	}
	h.anchor = os.Getenv(anchorEnv)
	if text := os.Getenv(limitEnv); text != "" {
		h.limited = true
		if h.limit, err = strconv.ParseInt(text, 10, 64); err != nil {
			return h, fmt.Errorf("forward: %s: %w", limitEnv, err)
		}
	}
	return h, nil
}

// usable is the number of bytes that a call may use, of free. Where prices are estimates a part of the device stays free.
func (t *TrainerRank) usable(free int64, h hooks) int64 {
	if t.exact == nil {
		free = profile.Usable(free, t.dev.Capacity())
	}
	n := max(0, min(t.limit, free))
	if h.limited {
		n = min(n, max(0, h.limit-t.dev.Stats().Allocated))
	}
	return n
}
