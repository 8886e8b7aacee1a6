package ladder

import (
	"fmt"
	"testing"

	"github.com/trainerrank/engine/profile"
)

// flat prices a chunk in constant time.
type flat struct{ kept int64 }

func (p flat) price(n int) profile.Price {
	out := int64(4 * n)
	return profile.Price{Required: out + (p.kept+100)*int64(n) + 50, Retained: out + p.kept*int64(n), Outputs: out, Basis: profile.Exact, Trusted: true}
}
func (p flat) Plan(requests []int, _ Layout) (*Plan, error) {
	return &Plan{Packed: len(requests)}, nil
}
func (p flat) Price(plan *Plan, _ Retention) (profile.Price, error) { return p.price(plan.Packed), nil }
func (p flat) Minimal(r []int, _ Retention) (profile.Price, error)  { return p.price(len(r)), nil }
func (p flat) Bound(r []int, _ Retention) (profile.Price, error)    { return p.price(len(r)), nil }

func BenchmarkSearch(b *testing.B) {
	for _, n := range []int{16, 64, 128} {
		for _, c := range []struct {
			name   string
			grad   bool
			kept   int64
			usable int64
		}{
			{"whole", false, 0, 1 << 40}, {"split", false, 0, int64(4*n + 100*n/5 + 50)}, {"refused", false, 0, int64(4*n + 149)},
			{"split-grad", true, 10, int64(14*n + 100*n/5 + 50)}, {"refused-grad", true, 10, int64(14*n + 149)},
		} {
			b.Run(fmt.Sprintf("%s-%d", c.name, n), func(b *testing.B) {
				p := flat{c.kept}
				call := callOf(n, c.grad)
				for i := range call.Requests {
					call.Requests[i].Outputs = 4
				}
				b.ReportAllocs()
				var a *Admission
				for b.Loop() {
					var err error
					if a, err = Search(call, p, p, c.usable, Options{Retentions: []Retention{Stored}}); err != nil {
						b.Fatal(err)
					}
				}
				b.ReportMetric(float64(a.Priced), "prices")
				b.ReportMetric(float64(a.SubforwardCount()), "subforwards")
			})
		}
	}
}

// Prices are asked for once each, and as few as the kind of call allows.
func TestNumberOfPrices(t *testing.T) {
	for _, c := range []struct {
		n           int
		grad        bool
		kept        int64
		usable      int64
		priced, all int // at most; plans searched for
	}{
		{16, false, 0, 1 << 40, 1, 1},
		{16, false, 0, 4*16 + 350, 60, 1 + 6},
		{128, false, 0, 4*128 + 350, 700, 1 + 43},
		{16, true, 10, 14*16 + 350, 150, 1 + 6},
		{64, true, 10, 14*64 + 149, 900, 1},
	} {
		p := flat{c.kept}
		a := verdict(t, callOf(c.n, c.grad), p, p, c.usable, Options{Retentions: []Retention{Stored}})
		if a.Priced > c.priced || a.Searched > c.all {
			t.Errorf("%d requests, gradients %v: %d prices, %d searches\n%s", c.n, c.grad, a.Priced, a.Searched, a)
		}
	}
}
