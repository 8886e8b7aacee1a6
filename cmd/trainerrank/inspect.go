package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/trainerrank/engine/forward/kernel"
	"github.com/trainerrank/engine/forward/transformer"
	"github.com/trainerrank/engine/loader"
)

// inspect lists what is in a model folder or a safetensors file. It reads headers only.
func (t *tool) inspect(_ context.Context, args []string) error {
	fs := flag.NewFlagSet("inspect", flag.ContinueOnError)
	if err := t.parse(fs, args, 1, " FILE_OR_DIR"); err != nil {
		return err
	}
	path := fs.Arg(0)
	if _, err := os.Stat(path); err != nil {
		return fmt.Errorf("inspect: %w", err)
	}
	set, err := loader.Open(path)
	if err != nil {
		return damaged(err)
	}
	defer set.Close()
	w := tabwriter.NewWriter(t.stdout, 0, 0, 2, ' ', 0)
	fmt.Fprint(w, "tensor\tdtype\tshape\tbytes\tfile\n")
	for _, f := range set.Files {
		for _, x := range f.Tensors {
			fmt.Fprintf(w, "%s\t%s\t%s\t%d\t%s\n", printable(x.Name), x.DType, shape(x.Shape), x.Bytes, f.Path)
		}
	}
	if err := w.Flush(); err != nil {
		return err
	}
	fmt.Fprintf(t.stdout, "\n%s, %s in %s\n", count(len(set.Names()), "tensor"), showSize(set.TotalBytes()), count(len(set.Files), "file"))
	if fi, err := os.Stat(path); err != nil || !fi.IsDir() {
		for _, n := range set.Warnings {
			fmt.Fprintln(t.stderr, "note:", n)
		}
		return err
	}
	return t.inspectDecoder(path)
}

// inspectDecoder says what decoder a folder holds.
func (t *tool) inspectDecoder(dir string) error {
	backend, err := kernel.NewHost(1)
	if err != nil {
		return err
	}
	defer backend.Close()
	m, err := transformer.OpenFolder(dir, backend)
	if err != nil {
		return damaged(err)
	}
	defer m.Close()
	fmt.Fprintf(t.stdout, "\n%s", m.Decoder())
	for _, n := range m.Notes() {
		fmt.Fprintln(t.stderr, "note:", n)
	}
	return nil
}

// printable is a stranger's name as it may go to a terminal: in quotes, with escapes, if it holds anything that does not print.
func printable(name string) string {
	if q := strconv.Quote(name); q != `"`+name+`"` {
		return q
	}
	return name
}

func shape(dims []int64) string {
	return strings.ReplaceAll(fmt.Sprint(dims), " ", ", ")
}
