package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"github.com/trainerrank/engine/profile"
)

// readProfile reads what was learned before, if there is something.
func (s *session) readProfile(ctx context.Context) error {
	s.known = new(profile.Profile)
	if s.profile == "" {
		return nil
	}
	text, err := await(ctx, func() ([]byte, error) { return os.ReadFile(s.profile) })
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return &fileError{s.verb + ": read the profile", s.profile, err}
	}
	if s.known, err = profile.Read(text); err != nil {
		return &hinted{fmt.Errorf("%s: read the profile %s: %w", s.verb, s.profile, err), "give the file that score --profile wrote, or another name to begin anew"}
	}
	return nil
}

// writeProfile writes what is known now, if it is more than before.
func (s *session) writeProfile(ctx context.Context) error {
	text := s.rank.Profile().Save()
	if s.profile == "" || ctx.Err() != nil || bytes.Equal(text, s.known.Save()) {
		return nil
	}
	err := writeFile(ctx, s.profile, func(w io.Writer) error {
		_, err := w.Write(text)
		return err
	})
	if err != nil {
		return &fileError{s.verb + ": " + writingProfile, s.profile, err}
	}
	return nil
}
