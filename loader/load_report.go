package loader

import (
	"fmt"
	"strings"
	"text/tabwriter"
)

// LoadReport is what a load did, beside what its plan said. All sizes are bytes.
type LoadReport struct {
	Copier    string
	Budget    int64 // of the plan
	Predicted int64 // the most in use at any moment, by the plan
	Peak      int64 // the most in use at any moment, as taken from the device and with what was taken before; at most Predicted
	Bytes     int64 // read, of tensors that are kept; in a group of ranks by this one
	Chunks    int   // delivered
	Seconds   float64
	PerFile   []FileReport // in the order of the load
}

// FileReport is the part of one file.
type FileReport struct {
	Path    string
	Bytes   int64 // kept
	Chunks  int   // delivered
	Limit   int64 // of its chunks, by the plan
	Largest int64 // of its chunks
	Peak    int64 // the most in use while one of its chunks was delivered
}

func newReport(p *FitPlan) *LoadReport {
	r := &LoadReport{Budget: p.Budget, Predicted: p.Peak, PerFile: make([]FileReport, len(p.Files))}
	for i := range p.Files {
		f := &p.Files[i]
		r.PerFile[i] = FileReport{Path: f.Path, Bytes: f.Kept, Limit: f.Budget}
	}
	return r
}

// String is a table with a line for each file. It ends in a line break.
func (r *LoadReport) String() string {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "bytes\tchunks\tchunk limit\tlargest chunk\tpeak\t")
	for _, f := range r.PerFile {
		fmt.Fprintf(w, "%d\t%d\t%d\t%d\t%d\t  %s\n", f.Bytes, f.Chunks, f.Limit, f.Largest, f.Peak, quote(f.Path))
	}
	w.Flush()
	rate := ""
	if r.Seconds > 0 {
		rate = fmt.Sprintf(", in %.3f s, %.0f MB/s", r.Seconds, float64(r.Bytes)/r.Seconds/1e6)
	}
	fmt.Fprintf(&b, "%d bytes, chunks: %d, copier: %s%s\npredicted peak %d, observed %d, budget %d\n", r.Bytes, r.Chunks, r.Copier, rate, r.Predicted, r.Peak, r.Budget)
	return b.String()
}
