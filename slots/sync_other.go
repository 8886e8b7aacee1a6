//go:build !unix

package slots

// syncDir does nothing: a folder cannot be opened for that here.
func syncDir(string) error { return nil }
