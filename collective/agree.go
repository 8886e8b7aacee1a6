package collective

import (
	"context"
	"errors"
)

// Agree is one collective to which every rank brings nil or its error. It returns nil on all ranks if all brought nil.
// Otherwise it returns an error on all: a rank that failed keeps its own, and the others get a [*PeerError] about the
// lowest rank that failed. The group stays usable.
//
// If the collective itself fails, its error is returned, joined to the rank's own.
func Agree(ctx context.Context, w World, err error) error {
	// One byte tells failure from success, so that an error without text is still an error.
	var mine []byte
	if err != nil {
		mine = append([]byte{1}, err.Error()...)
	}
	all, failed := w.AllGather(ctx, "agree", mine)
	if failed != nil {
		if err != nil {
			return errors.Join(err, failed)
		}
		return failed
	}
	if err != nil {
		return err
	}
	for rank, text := range all {
		if len(text) > 0 {
			return &PeerError{Rank: rank, Text: string(text[1:])}
		}
	}
	return nil
}
