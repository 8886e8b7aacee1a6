package prefixtree

// prices are a cost made ready for a shape: what is charged by the unit, summed over the terms; what a depth costs; and the terms that
// are divided, which only a whole layout can be charged.
type prices struct {
	*shape
	token, pair, segment, short, decision int64
	below                                 int
	level                                 []int64 // per depth; never falls
	divided                               []Term
	spans                                 bool // pairs or short spans are charged for, so that they must be counted
	base                                  Features
	// Per decision, scratch of eval: the end of the innermost shared decision down to it, and how many there are.
	from []int
	deep []int32
}

// pricesOf makes the prices. No arithmetic with them can overflow then, since the most that the cost could charge has been
// seen to fit, and all that is ever added up is a part of it. Errors are those of [Cost.Work].
func pricesOf(s *shape, c *Cost) (*prices, error) {
	most := s.most()
	if !c.charges(Pairs) {
		most.Pairs = 0 // may be too many to count
	}
	if _, err := c.Work(most); err != nil {
		return nil, err
	}
	p := &prices{
		shape: s, below: c.ShortBelow, spans: c.charges(Pairs) || c.charges(Short),
		level: make([]int64, s.deepest+1), from: make([]int, len(s.end)), deep: make([]int32, len(s.end)),
	}
	for i := range c.Terms {
		t := &c.Terms[i]
		switch t.Feature {
		case Levels, FirstLevel, FurtherLevels:
			for d := range p.level {
				n, _ := (&Features{Depth: int64(d)}).of(t.Feature)
				w, _ := t.charge(n)
				p.level[d] += w
			}
		default:
			if !t.whole() {
				p.divided = append(p.divided, *t)
				break
			}
			*p.unit(t.Feature) += t.each()
		}
	}
	for _, length := range s.alone {
		p.span(&p.base, 0, length)
		p.base.Depth = 1
	}
	return p, nil
}

// charges says whether some term is for a feature.
func (c *Cost) charges(f Feature) bool {
	for i := range c.Terms {
		if c.Terms[i].Feature == f {
			return true
		}
	}
	return false
}

// unit is the price of a unit of a feature.
func (p *prices) unit(f Feature) *int64 {
	switch f {
	case Tokens:
		return &p.token
	case Pairs:
		return &p.pair
	case Segments:
		return &p.segment
	case Short:
		return &p.short
	default:
		return &p.decision
	}
}

// span adds the span [from, to) to f.
func (p *prices) span(f *Features, from, to int) {
	f.Tokens += int64(to - from)
	f.Segments++
	if p.spans {
		f.Pairs += attended(from, to)
		if to-from < p.below {
			f.Short++
		}
	}
}

// tails adds what rows lo to hi of lengths have left beyond from to f; n of them have something left, each a span of its own.
func (p *prices) tails(f *Features, lo, hi, n int32, from int) {
	f.Tokens += int64(p.sums[hi] - p.sums[lo] - int(hi-lo)*from)
	f.Segments += int64(n)
	if p.spans {
		f.Pairs += p.pairs[hi] - p.pairs[lo] - int64(hi-lo)*attended(0, from)
		if p.short != 0 || p.divided != nil {
			for _, length := range p.lengths[lo:hi] {
				if length > from && length-from < p.below {
					f.Short++
				}
			}
		}
	}
}

// work is the charge for all of f but its depth and what is divided.
func (p *prices) work(f *Features) int64 {
	return p.token*f.Tokens + p.pair*f.Pairs + p.segment*f.Segments + p.short*f.Short + p.decision*f.Decisions
}

// eval is the score of the layout that shares the decisions of a set, and their number. It walks the decisions once and allocates nothing.
func (p *prices) eval(set []uint64) (s Score, decisions int) {
	f := p.base
	deepest := int32(f.Depth)
	for i, end := range p.end {
		from, deep := 0, int32(0)
		if up := p.parent[i]; up >= 0 {
			from, deep = p.from[up], p.deep[up]
		}
		lo, hi := p.at[i], p.at[i+1]
		n := hi - lo
		if has(set, i) {
			p.span(&f, from, end)
			f.Decisions++
			from = end
			deep++
			deepest = max(deepest, deep)
			n = p.beyond[i]
		}
		p.from[i], p.deep[i] = from, deep
		if n > 0 {
			p.tails(&f, lo, hi, n, from)
			deepest = max(deepest, deep+1)
		}
	}
	f.Depth = int64(deepest)
	work := p.work(&f) + p.level[deepest]
	for i := range p.divided {
		n, _ := f.of(p.divided[i].Feature)
		w, _ := p.divided[i].charge(n)
		work += w
	}
	return Score{Work: work, Packed: int(f.Tokens), Segments: int(f.Segments), Depth: int(deepest)}, int(f.Decisions)
}
