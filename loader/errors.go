package loader

import (
	"errors"
	"fmt"
	"strings"

	"github.com/trainerrank/engine/internal/strictjson"
)

// FormatError says that a file is not a whole and sound safetensors file.
type FormatError struct {
	Path    string // the file, as it is to be shown; empty from [ParseHeader]
	Tensor  string // the tensor at fault; empty if it is the file as a whole
	Offset  int64  // byte of the file at which the fault shows
	Problem string // what is wrong, lower-case
	Found   string // what stands there, if that says more
	Want    string // what should stand there, if that says more
	Missing int64  // bytes that the file is too short by, at least; 0 if it is not too short
	Hint    string // what the user may do about it; empty if there is no saying
	Err     error  // the cause, or nil
}

// Error is one line without the hint.
func (e *FormatError) Error() string {
	var b strings.Builder
	if e.Path == "" {
		b.WriteString("read header")
	} else {
		fmt.Fprintf(&b, "open %s", e.Path)
	}
	if e.Tensor != "" {
		fmt.Fprintf(&b, ": tensor %s", quote(e.Tensor))
	}
	fmt.Fprintf(&b, ": %s", e.Problem)
	sep := ": "
	if e.Found != "" {
		fmt.Fprintf(&b, "%sfound %s", sep, e.Found)
		sep = ", "
	}
	if e.Want != "" {
		fmt.Fprintf(&b, "%swant %s", sep, e.Want)
	}
	fmt.Fprintf(&b, " (at byte %d)", e.Offset)
	return b.String()
}

// Unwrap is the cause.
func (e *FormatError) Unwrap() error { return e.Err }

// IndexError says that a model folder, or its index, does not name one sound set of files.
type IndexError struct {
	Path     string         // the index; the folder if it has no index
	Problem  string         // what is wrong, lower-case
	Missing  []string       // files that the index names and that are not there, sorted
	Unlisted []string       // weight files that are there and not named, sorted; only if Missing is set or there is no index
	Absent   []AbsentTensor // tensors that are not in the file that the index names for them, sorted by name
	Hint     string         // what the user may do about it; empty if there is no saying
	Err      error          // the cause, or nil
}

// AbsentTensor is a tensor that is not where the index says.
type AbsentTensor struct {
	Name      string
	File      string // where the index says it is
	Elsewhere string // another listed file that has a tensor of this name; empty if none has
}

// Error is one line without the hint. It lists all files, but only the first few tensors.
func (e *IndexError) Error() string {
	const few = 8
	var b strings.Builder
	fmt.Fprintf(&b, "open %s: %s", e.Path, e.Problem)
	if len(e.Missing) > 0 {
		fmt.Fprintf(&b, ": missing %s", quoteAll(e.Missing))
	}
	if len(e.Unlisted) > 0 {
		fmt.Fprintf(&b, "; there but not listed: %s", quoteAll(e.Unlisted))
	}
	for i, a := range e.Absent {
		if i == few {
			fmt.Fprintf(&b, " and %d more", len(e.Absent)-few)
			break
		}
		sep := ", "
		if i == 0 {
			sep = ": "
		}
		fmt.Fprintf(&b, "%s%s in %s", sep, quote(a.Name), quote(a.File))
		if a.Elsewhere != "" {
			fmt.Fprintf(&b, " (but in %s)", quote(a.Elsewhere))
		}
	}
	return b.String()
}

// Unwrap is the cause.
func (e *IndexError) Unwrap() error { return e.Err }

// FilesError says that several files of a model are unusable, each with its own reason: usually a download that
// stopped. All files are checked before it is returned.
type FilesError struct {
	Op      string  // "open" or "verify"
	Path    string  // the index
	Total   int     // files that the model has
	Missing int64   // bytes missing in all of them together, at least
	Errs    []error // one per bad file, in the order of the files
}

// Error lists every bad file, separated by semicolons.
func (e *FilesError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s: %d of %d files are unusable", e.Op, e.Path, len(e.Errs), e.Total)
	if e.Missing > 0 {
		fmt.Fprintf(&b, " (%d bytes missing in all)", e.Missing)
	}
	sep := ": "
	for _, err := range e.Errs {
		b.WriteString(sep)
		b.WriteString(strings.TrimPrefix(err.Error(), e.Op+" "))
		sep = "; "
	}
	return b.String()
}

// Unwrap are the files' errors.
func (e *FilesError) Unwrap() []error { return e.Errs }

// ReadError says that bytes which the file had when it was opened could not be read.
type ReadError struct {
	Path   string // the file, as it is to be shown
	Tensor string // the tensor being read; empty for the header
	Offset int64  // byte of the file at which the read began
	Want   int64  // bytes wanted
	Got    int64  // bytes read before it failed
	Hint   string // what the user may do about it; empty if there is no saying
	Err    error  // the cause: io.ErrUnexpectedEOF for a file that ended early
}

// Error is one line without the hint.
func (e *ReadError) Error() string {
	what := "header"
	if e.Tensor != "" {
		what = "tensor " + quote(e.Tensor)
	}
	return fmt.Sprintf("read %s: %s: wanted %d bytes at byte %d, got %d: %v", e.Path, what, e.Want, e.Offset, e.Got, e.Err)
}

// Unwrap is the cause.
func (e *ReadError) Unwrap() error { return e.Err }

// ChangedError says that a file is not the one that was opened.
type ChangedError struct {
	Path    string // the file, as it is to be shown
	Problem string // what changed, with both values
	Err     error  // why the file could not be looked at, or nil
}

// Error is one line.
func (e *ChangedError) Error() string {
	if e.Err != nil {
		return fmt.Sprintf("verify %s: %s: %v", e.Path, e.Problem, e.Err)
	}
	return fmt.Sprintf("verify %s: the file changed since it was opened: %s", e.Path, e.Problem)
}

// Unwrap is the cause.
func (e *ChangedError) Unwrap() error { return e.Err }

// CopierError says that a copier cannot read a file at all. Nothing has been read.
type CopierError struct {
	Copier string // its name
	Path   string // the file, as it is to be shown
	Err    error
}

// Error is one line.
func (e *CopierError) Error() string {
	return fmt.Sprintf("load %s: the copier %s cannot open it: %v", e.Path, e.Copier, e.Err)
}

// Unwrap is the cause.
func (e *CopierError) Unwrap() error { return e.Err }

// Hint is what the user may do about an error of this package, for a line of its own: the first hint found in err and
// what it wraps. Empty if there is none.
func Hint(err error) string {
	var hint string
	switch e := err.(type) {
	case nil:
		return ""
	case *FormatError:
		hint = e.Hint
	case *IndexError:
		hint = e.Hint
	case *ReadError:
		hint = e.Hint
	case *CopierError:
		hint = "the copier pread reads every file"
	case *ChangedError:
		hint = "let nothing write to the files while they are loaded, and load again"
	case *BudgetInfeasibleError:
		hint = e.hint()
	case interface{ Unwrap() []error }:
		for _, err := range e.Unwrap() {
			if hint = Hint(err); hint != "" {
				break
			}
		}
		return hint
	}
	if hint == "" {
		hint = Hint(errors.Unwrap(err))
	}
	return hint
}

// quote shows a foreign name: escaped, so that it cannot play tricks on a terminal, and of bounded length.
func quote(s string) string { return strictjson.Quote(s, 120) }

func quoteAll(names []string) string {
	quoted := make([]string, len(names))
	for i, n := range names {
		quoted[i] = quote(n)
	}
	return strings.Join(quoted, ", ")
}
