// Command trainerrank scores token sequences with a language model inside a byte budget.
//
//	trainerrank score    [--model DIR] [--requests FILE.jsonl] [--adapter NAME=DIR]... [--checkpoint NAME] [--budget BYTES] [--out FILE] [--summary FILE]
//	                     [--record FILE] [--threads N] [--pricing exact|learned] [--profile FILE]
//	trainerrank plan     the same flags, and --json: says what score would do, and runs nothing
//	trainerrank plan     --grad [--rank N] [--retention stored,layer,replay] with the same flags: what a training call would take
//	trainerrank plan     --replay FILE [--json]: plans again what a record is of, and says whether the answer is the same
//	trainerrank load     [--model DIR] [--budget BYTES] [--queue N] [--max-chunk BYTES] [--group RANKS] [--copier NAME] [--classic] [--dry-run] [--json]
//	                     [--threads N] [--summary FILE]: loads the tensors as they are stored, whatever their types
//	trainerrank inspect  FILE_OR_DIR: the tensors of a model or an adapter, and what is wrong with it
//
// Without --model and --requests it uses a small model and requests that are built in. Results go to standard output, everything else
// to standard error. Exit codes: 0 done, 1 failed, 2 usage, 3 refused because it does not fit,
// 4 a split failed under way.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/trainerrank/engine/loader"
	"github.com/trainerrank/engine/trainerrank"
)

// The exit codes.
const (
	exitDone    = 0
	exitFailed  = 1
	exitUsage   = 2
	exitRefused = 3
	exitPartial = 4
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
	{"load", "bring the tensors of a model into memory, inside a budget", (*tool).load},
	{"inspect", "list the tensors of a model or an adapter, and what is wrong with it", (*tool).inspect},
}

func main() {
	t := &tool{os.Stdin, os.Stdout, os.Stderr}
	os.Exit(t.main(interrupts(), os.Args[1:]))
}

// interrupts is a context that ends with the first signal to stop. A second one ends the process at once.
func interrupts() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	if !signal.Ignored(syscall.SIGHUP) { // nohup ignores it
		signal.Notify(signals, syscall.SIGHUP)
	}
	go func() {
		<-signals
		cancel()
		<-signals
		os.Exit(exitFailed)
	}()
	return ctx
}

// main runs the command and returns its exit code.
func (t *tool) main(ctx context.Context, args []string) int {
	err := t.dispatch(ctx, args)
	if err == nil || errors.Is(err, flag.ErrHelp) {
		return exitDone
	}
	text, advice := err.Error(), hint(err)
	if before, after, ok := strings.Cut(text, "\nhint: "); ok {
		text = before
		if advice == "" {
			advice = after
		}
	}
	if ctx.Err() != nil {
		text = "interrupted: " + text
	}
	fmt.Fprintf(t.stderr, "trainerrank: %s\n", oneLine(text))
	if advice != "" {
		fmt.Fprintf(t.stderr, "hint: %s\n", oneLine(advice))
	}
	return exitCode(err)
}

// exitCode is the exit code for an error.
func exitCode(err error) int {
	var usage *usageError
	var refused *refusedError
	var partial *trainerrank.PartialExecutionError
	switch {
	case errors.As(err, &usage):
		return exitUsage
	case errors.As(err, &refused):
		return exitRefused
	case errors.As(err, &partial):
		return exitPartial
	}
	return exitFailed
}

// oneLine makes a line of bounded length of a text: a file may bring names of any length into it.
func oneLine(s string) string {
	const most = 8 << 10
	if len(s) > most {
		s = strings.ToValidUTF8(s[:most], "") + "..."
	}
	return strings.ReplaceAll(s, "\n", "; ")
}

// ownHint is what the error itself says that the user may do about it, or "".
func ownHint(err error) string {
	var h interface{ Hint() string }
	if errors.As(err, &h) && h.Hint() != "" {
		return h.Hint()
	}
	return loader.Hint(err)
}

// hint is what the user may do about an error, or "".
func hint(err error) string {
	if s := ownHint(err); s != "" {
		return s
	}
	var path *fs.PathError
	switch {
	case errors.Is(err, context.Canceled):
		return "it was stopped before it was done, so run it again; a file is written whole or not at all"
	case errors.Is(err, fs.ErrPermission):
		return "check the permissions of the file, and of the folder that it is in"
	case errors.Is(err, syscall.EISDIR):
		return "give the path of a file"
	case errors.Is(err, syscall.ENOSPC):
		return "free some space, or write to another place"
	case errors.As(err, &path):
		return "check the path; a relative one starts at the working directory"
	}
	return ""
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
func (t *tool) parse(flags *flag.FlagSet, args []string, want int, what string) error {
	help := "trainerrank " + flags.Name() + " --help lists the flags"
	flags.SetOutput(io.Discard)
	err := flags.Parse(args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		fmt.Fprintf(t.stdout, "usage: trainerrank %s [flags]%s\n\n", flags.Name(), what)
		flags.SetOutput(t.stdout)
		flags.PrintDefaults()
		return err
	case err != nil:
		return &usageError{flags.Name() + ": " + err.Error(), help}
	case flags.NArg() < want:
		return &usageError{flags.Name() + ":" + what + " is missing", help}
	case flags.NArg() > want:
		return &usageError{fmt.Sprintf("%s: unexpected argument %q", flags.Name(), flags.Arg(want)), help}
	}
	// A variable that is empty in a script must not mean the default.
	flags.Visit(func(f *flag.Flag) {
		if g, ok := f.Value.(flag.Getter); ok && g.Get() == "" {
			err = &usageError{fmt.Sprintf("%s: --%s is empty", flags.Name(), f.Name), "leave the flag out for the default"}
		}
	})
	return err
}
