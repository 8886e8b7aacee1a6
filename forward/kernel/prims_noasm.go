//go:build !amd64 || noasm

package kernel

// vectorised lists the tables that this machine can run besides the generic one: none in this build.
func vectorised() []*prims { return nil }

// vectorisedNames are the tables of this build besides the generic one.
var vectorisedNames []string
