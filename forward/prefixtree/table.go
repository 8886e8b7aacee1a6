package prefixtree

import (
	"fmt"
	"math"
)

// Facts are what a cost depends on beside the layout: the model and how it is spread. Zero sizes count as 1, zero layers as none.
type Facts struct {
	// Device names what the model runs on and how it computes there, as tables name it.
	Device string `json:"device,omitempty"`
	// Hidden is the width of the model.
	Hidden int `json:"hidden,omitempty"`
	// Layers is the number of all layers, Recurrent the number of those that pass a state on from span to span.
	Layers    int `json:"layers"`
	Recurrent int `json:"recurrent"`
	// ContextParallel is over how many ranks the tokens of a row are spread, TensorParallel over how many each product.
	ContextParallel int `json:"context_parallel"`
	TensorParallel  int `json:"tensor_parallel"`
}

// spread are the two sizes as factors whose product fits.
func (f *Facts) spread() (cp, tp int64) {
	size := func(n int) int64 { return int64(min(max(1, n), math.MaxInt32)) }
	return size(f.ContextParallel), size(f.TensorParallel)
}

// Version1 is the formula for whatever no table was fitted for (section 4.6 of the reference), in units of 1/1024 microsecond. It asks for
// Layers, ContextParallel and whether there are recurrent layers.
func Version1(f Facts) Cost {
	cp, _ := f.spread()
	layers := int64(f.Layers)
	c := Cost{Name: "version 1"}
	c.charge(Tokens, 1024, layers, 1)
	c.Terms = append(c.Terms, Term{Feature: Tokens, Coefficient: 96 + 32*cp, Times: 1, Divisor: cp, Up: true}) // of the rank that has most
	c.charge(Segments, 96+32*cp, 1024, 1)
	c.charge(Decisions, 64+32*cp, 1024, 1)
	if f.Recurrent > 0 {
		c.charge(FirstLevel, 768*1024, layers, 1)
		c.charge(FurtherLevels, 256*1024, layers, 1)
	}
	return c
}

// charge adds a term that rounds down, unless it is for nothing.
func (c *Cost) charge(f Feature, coefficient, times, divisor int64) {
	if coefficient != 0 && times != 0 {
		c.Terms = append(c.Terms, Term{Feature: f, Coefficient: coefficient, Times: times, Divisor: divisor})
	}
}

// Version2Coefficients are the ten numbers of a version-2 table, in units of 1/1000 microsecond. The names are those of the tables.
type Version2Coefficients struct {
	TokenPerRank             int64 `json:"token_per_rank"`
	TokenCPExchange          int64 `json:"token_cp_exchange"`
	TokenTPCollective        int64 `json:"token_tp_collective"`
	GDNTokenPerRank          int64 `json:"gdn_token_per_rank"`
	AttentionTokenCPExchange int64 `json:"attention_token_cp_exchange"`
	TinySegmentPerLayer      int64 `json:"tiny_segment_per_layer"`
	LevelCPPerLayer          int64 `json:"level_cp_per_layer"`
	LevelTPPerLayer          int64 `json:"level_tp_per_layer"`
	GDNLevel                 int64 `json:"gdn_level"`
	GDNLevelTP               int64 `json:"gdn_level_tp"`
}

// Bounds of the length below which version 2 calls a span tiny: the smallest power of two that is at least 128 tokens for each context-parallel
// rank, within the histogram that its tables were fitted over.
const (
	tinyPerRank = 128
	tinyMost    = 8192
)

// Version2 is the cost of a version-2 table (section 4.6 of the reference), which scales every term by 1024 before it is divided.
func Version2(name string, k Version2Coefficients, f Facts) Cost {
	cp, tp := f.spread()
	layers, recurrent := int64(f.Layers), int64(f.Recurrent)
	tiny := tinyPerRank
	for int64(tiny) < tinyPerRank*cp && tiny < tinyMost {
		tiny *= 2
	}
	c := Cost{Name: name, ShortBelow: tiny}
	// units scales a count by 1024. What does not fit 64 bits becomes -1, which Check refuses.
	units := func(factors ...int64) int64 { return product(append(factors, 1024)...) }
	c.charge(Tokens, k.TokenPerRank, units(layers), tp*cp)
	c.charge(Tokens, k.TokenCPExchange, units(layers, cp-1), cp)
	c.charge(Tokens, k.TokenTPCollective, units(layers, tp-1), tp)
	c.charge(Tokens, k.GDNTokenPerRank, units(recurrent), tp*cp)
	c.charge(Tokens, k.AttentionTokenCPExchange, units(layers-recurrent, cp-1), cp)
	c.charge(Short, k.TinySegmentPerLayer, units(layers), 1)
	c.charge(Levels, k.LevelCPPerLayer, units(layers, cp-1), 1)
	c.charge(Levels, k.LevelTPPerLayer, units(layers, tp-1), 1)
	c.charge(Levels, k.GDNLevel, units(recurrent), 1)
	c.charge(Levels, k.GDNLevelTP, units(recurrent, tp-1), 1)
	return c
}

// Coefficients are the numbers of a [Table], in picoseconds per layer. Attended pairs are charged for layers that attend, recurrent levels
// for layers that pass a state on, everything else for both kinds.
type Coefficients struct {
	Token          int64 `json:"token"`
	Pair           int64 `json:"pair"`
	Segment        int64 `json:"segment"`
	Short          int64 `json:"short"`
	Level          int64 `json:"level"`
	RecurrentLevel int64 `json:"recurrent_level"`
	// ShortBelow is the number of tokens below which a span is short.
	ShortBelow int `json:"short_below"`
}

// Range is the numbers from Min to Max, both included. The zero Range is all numbers.
type Range struct {
	Min int `json:"min"`
	Max int `json:"max"`
}

// Contains says whether n is in the range.
func (r Range) Contains(n int) bool { return r == Range{} || r.Min <= n && n <= r.Max }

// Domain is where a table was measured.
type Domain struct {
	// Device is the device by name; any if it is empty.
	Device          string `json:"device"`
	Hidden          Range  `json:"hidden"`
	Layers          Range  `json:"layers"`
	Recurrent       Range  `json:"recurrent"`
	ContextParallel Range  `json:"context_parallel"`
	TensorParallel  Range  `json:"tensor_parallel"`
}

// Contains says whether the table may be used under these facts.
func (d Domain) Contains(f Facts) bool {
	return (d.Device == "" || d.Device == f.Device) && d.Hidden.Contains(f.Hidden) && d.Layers.Contains(f.Layers) &&
		d.Recurrent.Contains(f.Recurrent) && d.ContextParallel.Contains(max(1, f.ContextParallel)) &&
		d.TensorParallel.Contains(max(1, f.TensorParallel))
}

// Table is a fitted cost: numbers that were measured on a device, and where they hold.
type Table struct {
	Name         string       `json:"name"`
	Domain       Domain       `json:"domain"`
	Coefficients Coefficients `json:"coefficients"`
	// Certificate is how the table did on layouts that it was not fitted to. No cost depends on it.
	Certificate []Evidence `json:"certificate,omitempty"`
}

// Evidence is how well a cost orders layouts of calls by their time, on one model in one place. Of each of some calls several layouts were timed.
type Evidence struct {
	Kernel  string `json:"kernel"` // how the device computed
	Threads int    `json:"threads"`
	Hidden  int    `json:"hidden"`
	Layers  int    `json:"layers"`
	// Cells is the number of calls, Pairs that of the pairs of layouts of the same call whose times were at least 3 % apart, Ordered that of those in which
	// the cheaper layout was the faster one.
	Cells   int `json:"cells"`
	Pairs   int `json:"pairs"`
	Ordered int `json:"ordered"`
	// How much longer the cheapest layout of a call took than the fastest one, in 1/100 %.
	MedianRegret int `json:"median_regret"`
	P95Regret    int `json:"p95_regret"`
	MaxRegret    int `json:"max_regret"`
}

// Cost is the table's cost of a model with these layers, wherever that runs; see [CostFor].
func (t *Table) Cost(f Facts) Cost {
	k := &t.Coefficients
	layers, recurrent := int64(f.Layers), int64(f.Recurrent)
	c := Cost{Name: t.Name, ShortBelow: k.ShortBelow}
	c.charge(Tokens, k.Token, layers, 1)
	c.charge(Pairs, k.Pair, layers-recurrent, 1)
	c.charge(Segments, k.Segment, layers, 1)
	c.charge(Short, k.Short, layers, 1)
	c.charge(Levels, k.Level, layers, 1)
	c.charge(Levels, k.RecurrentLevel, recurrent, 1)
	return c
}

// CostFor is the cost of the first table whose domain contains the facts, and [Version1] if there is none.
func CostFor(tables []Table, f Facts) Cost {
	for i := range tables {
		if tables[i].Domain.Contains(f) {
			return tables[i].Cost(f)
		}
	}
	return Version1(f)
}

// String is the table's name, and what it charges for a layer of each kind.
func (t Table) String() string {
	return fmt.Sprintf("table %s: %+v, in %+v", t.Name, t.Coefficients, t.Domain)
}
