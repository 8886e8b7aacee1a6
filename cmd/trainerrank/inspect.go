package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/forward/kernel"
	"github.com/trainerrank/engine/forward/transformer"
	"github.com/trainerrank/engine/loader"
	"github.com/trainerrank/engine/slots"
)

// inspect lists what is in a model folder, the folder of an adapter, or a safetensors file. It reads headers only.
func (t *tool) inspect(_ context.Context, args []string) error {
	fs := flag.NewFlagSet("inspect", flag.ContinueOnError)
	if err := t.parse(fs, args, 1, " FILE_OR_DIR"); err != nil {
		return err
	}
	path := fs.Arg(0)
	if _, err := os.Stat(path); err != nil {
		return fmt.Errorf("inspect: %w", err)
	}
	if isAdapter(path) {
		return t.inspectAdapter(path)
	}
	set, err := loader.Open(path)
	if err != nil {
		return damaged(err)
	}
	defer set.Close()
	if err := t.listTensors(set.Files); err != nil {
		return err
	}
	if fi, err := os.Stat(path); err != nil || !fi.IsDir() {
		for _, n := range set.Warnings {
			fmt.Fprintln(t.stderr, "note:", n)
		}
		return err
	}
	return t.inspectDecoder(path)
}

// listTensors is a table of the tensors of files.
func (t *tool) listTensors(files []*loader.File) error {
	w := tabwriter.NewWriter(t.stdout, 0, 0, 2, ' ', 0)
	fmt.Fprint(w, "tensor\tdtype\tshape\tbytes\tfile\n")
	tensors, bytes := 0, int64(0)
	for _, f := range files {
		tensors += len(f.Tensors)
		for _, x := range f.Tensors {
			bytes += x.Bytes
			fmt.Fprintf(w, "%s\t%s\t%s\t%d\t%s\n", printable(x.Name), x.DType, shape(x.Shape), x.Bytes, f.Path)
		}
	}
	if err := w.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintf(t.stdout, "\n%s, %s in %s\n", count(tensors, "tensor"), showSize(bytes), count(len(files), "file"))
	return err
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

// isAdapter says whether a folder is that of an adapter, and not of a model.
func isAdapter(dir string) bool {
	has := func(name string) bool { _, err := os.Stat(filepath.Join(dir, name)); return err == nil }
	return !has("config.json") && (has("adapter_config.json") || has("adapter_model.safetensors"))
}

// inspectAdapter says what adapter a folder holds.
func (t *tool) inspectAdapter(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("inspect: %w", err)
	}
	var files []*loader.File
	for _, e := range entries {
		if !strings.HasSuffix(e.Name(), ".safetensors") {
			continue
		}
		set, err := loader.Open(filepath.Join(dir, e.Name()))
		if err != nil {
			return damagedAdapter(err)
		}
		defer set.Close()
		files = append(files, set.Files...)
	}
	if err := t.listTensors(files); err != nil {
		return err
	}
	o, err := slots.Describe(dir, slots.LoadOptions{})
	if err != nil {
		return damagedAdapter(err)
	}
	inference, err := slots.Describe(dir, slots.LoadOptions{Inference: true})
	if err != nil {
		return damagedAdapter(err)
	}
	w := tabwriter.NewWriter(t.stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "\nadapter\tLoRA of %s, %s\n", ranks(o.Adapter), scale(&o.Config))
	if o.Config.BaseModel != "" {
		fmt.Fprintf(w, "of\t%s\n", printable(o.Config.BaseModel))
	}
	fmt.Fprintf(w, "targets\t%s: %s\n", count(len(o.Modules), "module"), targets(o.Modules))
	if len(o.Owned) > 0 {
		var own []string
		for _, name := range o.Owned {
			own = append(own, printable(name))
		}
		fmt.Fprintf(w, "owns\t%s\n", strings.Join(own, ", "))
	}
	fmt.Fprintf(w, "parameters\t%d\n", o.Elements)
	fmt.Fprintf(w, "takes\t%s, %s if it is trained\n", showSize(inference.Bytes.Total()), showSize(o.Bytes.Total()))
	if o.Saved {
		fmt.Fprintf(w, "checkpoint\trevision %d, moments of %s\n", o.Revision, count(int(o.Steps), "step"))
	}
	if p := o.Adam; p != nil {
		fmt.Fprintf(w, "last step\tlearning rate %g, betas %g and %g, weight decay %g, gradients clipped at %g\n", p.LearningRate, p.Beta1, p.Beta2, p.WeightDecay, p.GradClipNorm)
	}
	return w.Flush()
}

// damagedAdapter gives a fault in the folder of an adapter a hint, if it has none of its own.
func damagedAdapter(err error) error {
	if ownHint(err) == "" {
		err = &hinted{err, "compare the folder with where it came from: adapter_config.json and adapter_model.safetensors, as PEFT's save_pretrained writes them"}
	}
	return err
}

// ranks are those of an adapter's additions.
func ranks(a *forward.Adapter) string {
	least, most := a.LoRA[0].Rank, 0
	for _, l := range a.LoRA {
		least, most = min(least, l.Rank), max(most, l.Rank)
	}
	if least == most {
		return fmt.Sprintf("rank %d", most)
	}
	return fmt.Sprintf("ranks %d to %d", least, most)
}

// scale is by what an adapter's additions are scaled.
func scale(c *slots.Config) string {
	text := fmt.Sprintf("alpha %g", c.Alpha)
	if len(c.AlphaPattern) > 0 {
		text += ", of some modules another"
	}
	if c.RSLoRA {
		text += ", rank-stabilised"
	}
	if c.Dropout > 0 {
		text += fmt.Sprintf(", trained with a dropout of %g", c.Dropout)
	}
	return text
}

// targets are the last words of the paths of modules, each once.
func targets(paths []string) string {
	var list []string
	for _, p := range paths {
		list = append(list, printable(p[strings.LastIndexByte(p, '.')+1:]))
	}
	slices.Sort(list)
	return strings.Join(slices.Compact(list), ", ")
}
