//go:build unix

package slots

import (
	"errors"
	"os"
)

// syncDir sees the names in a folder onto the disk.
func syncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}
