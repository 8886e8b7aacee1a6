package transformer_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/trainerrank/engine/internal/golden"
)

// Every output of every golden model, with each kernel, against the float64 references. The log holds the table of docs/numerics.md:
// go test -v -run Parity ./forward/transformer
func TestParity(t *testing.T) {
	var table strings.Builder
	table.WriteString("| model | kernel | max logprob | max logits | max hidden |\n| --- | --- | --- | --- | --- |\n")
	golden.Kernels(t, func(t *testing.T, name string) {
		for _, c := range golden.Cases {
			t.Run(c.Name(), func(t *testing.T) {
				folder := golden.FS(t, c.Model)
				m := golden.Load(t, folder, golden.Options{Config: c.Config})
				requests := golden.Requests(t, folder)
				w := golden.References(t, c.Model, folder).Errors(t, requests, run(t, m, golden.Inputs(requests), fullSharing))
				cell := func(v float64) string {
					if v == 0 {
						return "-"
					}
					return fmt.Sprintf("%.1e", v)
				}
				fmt.Fprintf(&table, "| %s | %s | %s | %s | %s |\n", c.Name(), name, cell(w.Logprob), cell(w.Logits), cell(w.Hidden))
				for _, x := range []struct {
					what       string
					got, limit float64
				}{{"logprobs", w.Logprob, c.Logprob}, {"logits", w.Logits, c.Value}, {"hidden states", w.Hidden, c.Value}} {
					if !(x.got <= x.limit) {
						t.Errorf("%s are off by %.2e, more than %.0e", x.what, x.got, x.limit)
					}
				}
			})
		}
	})
	t.Logf("worst absolute errors against float64\n%s", table.String())
}
