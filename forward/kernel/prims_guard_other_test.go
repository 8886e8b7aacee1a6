//go:build !linux

package kernel

import "testing"

// fence would hand out slices that border on untouchable memory; here they are ordinary copies.
type fence struct{ tb testing.TB }

func (f *fence) close() {}

func fenced[T any](_ *fence, x []T, _ bool) []T { return append([]T(nil), x...) }
