// Command trainerrank scores token sequences with a language model inside a byte budget.
//
//	trainerrank score    [--model DIR] [--requests FILE.jsonl] [--budget BYTES] [--out FILE] [--summary FILE] [--threads N]
//	trainerrank plan     the same flags, and --json: says what score would do, and runs nothing
//	trainerrank inspect  FILE_OR_DIR: the tensors of a model, and what is wrong with it
//
// Without --model and --requests it uses a small model and requests that are built in. Results go to standard output, everything else
// to standard error. Exit codes: 0 done, 1 failed, 2 usage, 3 refused because it does not fit.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/trainerrank/engine/loader"
)

// The exit codes.
const (
	exitDone    = 0
	exitFailed  = 1
	exitUsage   = 2
	exitRefused = 3
)

// usageError is a fault in the command line.
type usageError struct{ text, hint string }

func (e *usageError) Error() string { return e.text }
func (e *usageError) Hint() string  { return e.hint }

// refusedError is a call or a load that does not fit.
type refusedError struct{ error }

func (e *refusedError) Unwrap() error { return e.error }

// tool is one run of the command.
type tool struct {
	stdin          io.Reader
	stdout, stderr io.Writer
}

var verbs = []struct {
	name, what string
	run        func(t *tool, ctx context.Context, args []string) error
}{
	{"score", "score requests with a model", (*tool).score},
	{"plan", "say what score would do, and run nothing", (*tool).plan},
	{"inspect", "list the tensors of a model, and what is wrong with it", (*tool).inspect},
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process as if nobody listened
	t := &tool{os.Stdin, os.Stdout, os.Stderr}
	os.Exit(t.main(ctx, os.Args[1:]))
}

// main runs the command and returns its exit code.
func (t *tool) main(ctx context.Context, args []string) int {
	err := t.dispatch(ctx, args)
	if err == nil || errors.Is(err, flag.ErrHelp) {
		return exitDone
	}
	text := strings.ReplaceAll(err.Error(), "\n", "; ") // one line, whatever is wrapped
	if ctx.Err() != nil {
		text = "interrupted: " + text
	}
	fmt.Fprintf(t.stderr, "trainerrank: %s\n", text)
	if h := hint(err); h != "" {
		fmt.Fprintf(t.stderr, "hint: %s\n", strings.ReplaceAll(h, "\n", "; "))
	}
	var usage *usageError
	var refused *refusedError
	switch {
	case errors.As(err, &usage):
		return exitUsage
	case errors.As(err, &refused):
		return exitRefused
	}
	return exitFailed
}

// hint is what the user may do about an error, or "".
func hint(err error) string {
	var h interface{ Hint() string }
	if errors.As(err, &h) {
		return h.Hint()
	}
	return loader.Hint(err)
}

func (t *tool) dispatch(ctx context.Context, args []string) error {
	if len(args) == 0 {
		t.usage(t.stderr)
		return &usageError{"no verb", "try: trainerrank score"}
	}
	for _, v := range verbs {
		if v.name == args[0] {
			return v.run(t, ctx, args[1:])
		}
	}
	switch args[0] {
	case "help", "-h", "-help", "--help":
		t.usage(t.stdout)
		return nil
	}
	return &usageError{fmt.Sprintf("unknown verb %q", args[0]), "trainerrank help lists the verbs"}
}

func (t *tool) usage(w io.Writer) {
	fmt.Fprint(w, "usage: trainerrank VERB [flags]\n\n")
	for _, v := range verbs {
		fmt.Fprintf(w, "  %-9s %s\n", v.name, v.what)
	}
	fmt.Fprint(w, "\ntrainerrank VERB --help lists the flags of a verb.\n")
}

// parse parses the flags of a verb. want says what arguments may follow them.
func (t *tool) parse(fs *flag.FlagSet, args []string, want int, what string) error {
	fs.SetOutput(io.Discard)
	err := fs.Parse(args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		fmt.Fprintf(t.stdout, "usage: trainerrank %s [flags]%s\n\n", fs.Name(), what)
		fs.SetOutput(t.stdout)
		fs.PrintDefaults()
		return err
	case err != nil:
		return &usageError{fs.Name() + ": " + err.Error(), "trainerrank " + fs.Name() + " --help lists the flags"}
	case fs.NArg() != want:
		return &usageError{fmt.Sprintf("%s: %d arguments, want %d%s", fs.Name(), fs.NArg(), want, what), "trainerrank " + fs.Name() + " --help lists the flags"}
	}
	return nil
}
