package loader

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"text/tabwriter"
)

// complete fills in what follows from a plan's files and depth.
func (p *FitPlan) complete(stats []FileStats, params PlanParams) {
	p.Budget, p.Fixed, p.Preallocated, p.Group = params.Budget, params.Copier.Fixed, params.Preallocated, params.Group
	p.stats, p.params = stats, params
	known := true
	for i := range p.Files {
		f := &p.Files[i]
		known = known && (f.Tensors != nil || f.Kept == 0)
		for k := range f.Chunks {
			p.BufferBytes = max(p.BufferBytes, f.Chunks[k].Bytes)
		}
		if f.Tensors == nil {
			p.BufferBytes = max(p.BufferBytes, min(f.Budget, f.Span))
		}
	}
	p.BufferBytes = roundTo(p.BufferBytes, params.Align)
	p.Buffers = buffers(p.QueueSize)
	if known {
		n, _, _ := p.sizes()
		p.Buffers = min(p.Buffers, n)
	}
}

// mode is one line of the comparison of both modes.
type mode struct {
	name    string
	minimum int64
	ok      bool // some budget is enough
	plan    *FitPlan
}

// modes are both modes on the same files and budget, that of the plan first.
func (p *FitPlan) modes() []mode {
	ms := make([]mode, 2)
	for i := range ms {
		q := p.params
		q.Classic = p.Classic != (i == 1)
		ms[i].name = "default"
		if q.Classic {
			ms[i].name = "classic"
		}
		if i == 0 {
			ms[0].plan = p
		} else if checkCosts(p.stats, q) != nil {
			continue // a multiplier below 1 has no classic plan
		} else if plan, err := Fit(p.stats, q); err == nil {
			ms[i].plan = plan
		}
		ms[i].minimum, ms[i].ok = leastBudget(p.stats, q)
	}
	return ms
}

// String is a table of the plan, and of what the other mode would do with the same files and budget. It has one line for each
// file, and ends in a line break.
func (p *FitPlan) String() string {
	var b strings.Builder
	name := "default"
	if p.Classic {
		name = "classic"
	}
	fmt.Fprintf(&b, "fit plan (%s mode): budget %d bytes, predicted peak %d", name, p.Budget, p.Peak)
	if p.Fixed > 0 {
		fmt.Fprintf(&b, ", copier's own %d", p.Fixed)
	}
	if p.Preallocated > 0 {
		fmt.Fprintf(&b, ", preallocated %d", p.Preallocated)
	}
	if p.Group > 1 {
		fmt.Fprintf(&b, ", %d ranks", p.Group)
	}
	if p.Reordered {
		b.WriteString(", files reordered")
	}
	b.WriteString("\n\n")
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', tabwriter.AlignRight)
	ms := p.modes()
	fmt.Fprintln(w, "mode\tsmallest budget\tpeak\tqueue\tchunks\tsmallest chunk\tlargest chunk\t")
	for _, m := range ms {
		minimum := "none"
		if m.ok {
			minimum = strconv.FormatInt(m.minimum, 10)
		}
		if m.plan == nil {
			fmt.Fprintf(w, "%s\t%s\t-\t-\t-\t-\t-\t\n", m.name, minimum)
			continue
		}
		n, small, large := m.plan.sizes()
		if n == 0 {
			fmt.Fprintf(w, "%s\t%s\t%d\t%d\t-\t-\t-\t\n", m.name, minimum, m.plan.Peak, m.plan.QueueSize)
			continue
		}
		fmt.Fprintf(w, "%s\t%s\t%d\t%d\t%d\t%d\t%d\t\n", m.name, minimum, m.plan.Peak, m.plan.QueueSize, n, small, large)
	}
	w.Flush()
	b.WriteString("\n")
	p.writeFiles(&b, ms)
	return b.String()
}

// writeFiles writes the table of files: how each is cut in both modes.
func (p *FitPlan) writeFiles(b *strings.Builder, ms []mode) {
	w := tabwriter.NewWriter(b, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(w, "kept\tlargest\tresident\t%s limit\tchunks\t%s limit\tchunks\t\n", ms[0].name, ms[1].name)
	other := map[int]*FilePlan{}
	if q := ms[1].plan; q != nil {
		for i := range q.Files {
			other[q.Files[i].Index] = &q.Files[i]
		}
	}
	for i := range p.Files {
		f := &p.Files[i]
		fmt.Fprintf(w, "%d\t%d\t%d", f.Kept, f.Largest, f.Resident)
		for _, f := range []*FilePlan{f, other[f.Index]} {
			switch {
			case f == nil:
				fmt.Fprint(w, "\t-\t-")
			case f.Tensors == nil:
				fmt.Fprintf(w, "\t%d\t-", f.Budget)
			default:
				fmt.Fprintf(w, "\t%d\t%d", f.Budget, len(f.Chunks))
			}
		}
		fmt.Fprintf(w, "\t  %s\n", quote(f.Path))
	}
	w.Flush()
}

// sizes are the number of chunks that are not empty, and the bytes of the smallest and the largest.
func (p *FitPlan) sizes() (n int, smallest, largest int64) {
	for i := range p.Files {
		for k := range p.Files[i].Chunks {
			size := p.Files[i].Chunks[k].Bytes
			if size == 0 {
				continue
			}
			if n == 0 || size < smallest {
				smallest = size
			}
			largest = max(largest, size)
			n++
		}
	}
	return n, smallest, largest
}

type planJSON struct {
	Mode         string     `json:"mode"`
	Budget       int64      `json:"budget_bytes"`
	Fixed        int64      `json:"fixed_bytes"`
	Preallocated int64      `json:"preallocated_bytes"`
	QueueSize    int        `json:"queue_size"`
	Depth        int        `json:"depth"`
	Reordered    bool       `json:"reordered"`
	Files        []fileJSON `json:"files"`
	Peak         int64      `json:"predicted_peak_bytes"`
	Minimum      int64      `json:"minimum_budget_bytes"`
	Digest       string     `json:"digest"`
}

type fileJSON struct {
	Path     string      `json:"path"`
	Kept     int64       `json:"kept"`
	Span     int64       `json:"span"`
	Largest  int64       `json:"largest"`
	Resident int64       `json:"resident"`
	Budget   int64       `json:"budget"`
	Chunks   []chunkJSON `json:"chunks"`
}

type chunkJSON struct {
	Tensors int   `json:"tensors"`
	Bytes   int64 `json:"bytes"`
}

// MarshalJSON is the plan as one object: what the command's load --dry-run --json prints. A chunk counts its tensors, whole or
// not, and the bytes of its buffer.
func (p *FitPlan) MarshalJSON() ([]byte, error) {
	j := planJSON{
		Mode: "default", Budget: p.Budget, Fixed: p.Fixed, Preallocated: p.Preallocated, QueueSize: p.QueueSize, Depth: p.Depth,
		Reordered: p.Reordered, Files: make([]fileJSON, len(p.Files)), Peak: p.Peak, Minimum: p.Minimum, Digest: p.Digest().Sum,
	}
	if p.Classic {
		j.Mode = "classic"
	}
	for i := range p.Files {
		f := &p.Files[i]
		j.Files[i] = fileJSON{f.Path, f.Kept, f.Span, f.Largest, f.Resident, f.Budget, make([]chunkJSON, len(f.Chunks))}
		for k, c := range f.Chunks {
			j.Files[i].Chunks[k] = chunkJSON{c.Last - c.First, c.Bytes}
		}
	}
	return json.Marshal(j)
}
