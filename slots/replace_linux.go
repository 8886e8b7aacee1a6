package slots

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// exchange gives two folders each other's names in one step. The error is errors.ErrUnsupported where the file system, or the kernel, cannot.
func exchange(a, b string) error {
	err := unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, unix.RENAME_EXCHANGE)
	if err == unix.EINVAL || err == unix.ENOSYS || errors.Is(err, errors.ErrUnsupported) {
		return fmt.Errorf("exchange %s and %s: %w", a, b, errors.ErrUnsupported)
	}
	if err != nil {
		return &os.LinkError{Op: "exchange", Old: a, New: b, Err: err}
	}
	return nil
}
