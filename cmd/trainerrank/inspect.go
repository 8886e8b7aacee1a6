package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"strings"
	"text/tabwriter"

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
	set, err := loader.Open(path)
	if err != nil {
		return err
	}
	defer set.Close()
	w := tabwriter.NewWriter(t.stdout, 0, 0, 2, ' ', 0)
	fmt.Fprint(w, "tensor\tdtype\tshape\tbytes\tfile\n")
	for _, f := range set.Files {
		for _, x := range f.Tensors {
			fmt.Fprintf(w, "%s\t%s\t%s\t%d\t%s\n", x.Name, x.DType, shape(x.Shape), x.Bytes, f.Path)
		}
	}
	if err := w.Flush(); err != nil {
		return err
	}
	fmt.Fprintf(t.stdout, "\n%d tensors, %s in %d files\n", len(set.Names()), showSize(set.TotalBytes()), len(set.Files))
	for _, n := range set.Warnings {
		fmt.Fprintln(t.stderr, "note:", n)
	}
	if strings.HasSuffix(path, ".safetensors") {
		return nil
	}
	return t.inspectDecoder(path, set)
}

// inspectDecoder says what decoder a folder holds, if it says so itself.
func (t *tool) inspectDecoder(dir string, set *loader.Set) error {
	config, err := readConfig(dir)
	if err != nil {
		return err
	}
	spec, err := transformer.ParseConfig(config)
	if err != nil {
		return err
	}
	fmt.Fprintf(t.stdout, "\n%s", spec)
	_, notes, err := spec.Resolve(func(name string) ([]int64, bool) {
		x, ok := set.Tensor(name)
		if !ok {
			return nil, false
		}
		return x.Shape, true
	})
	for _, n := range notes {
		fmt.Fprintln(t.stderr, "note:", n)
	}
	return errors.Join(err)
}

func shape(dims []int64) string {
	return strings.ReplaceAll(fmt.Sprint(dims), " ", ", ")
}
