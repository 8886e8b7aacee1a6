package trainerrank

// The search for the width of a wave (section 4.8 of the reference). A wave of a width is that many items from the first that is left on; a rank
// takes every so-many-th of them. Each rank searches for the widest that its own share fits in, and then they take the least: where a wider share never needs less, that
// is the widest that fits on all, and it has cost one collective, however many widths were tried.

// probed is what is known of a width, of one rank's share.
type probed struct {
	fits    bool // into memory, whole, with fewest tokens
	trusted bool // the price is exact, or within the reach of what was observed
	cold    bool // nothing like it was observed: a wave may be tried all the same, but none wider
}

// ok says whether a wave of the width may be run.
func (p probed) ok() bool { return p.fits && (p.trusted || p.cold) }

// choice is a width.
type choice struct {
	width    int
	alone    bool // the smallest wave: it does not fit whole, or its price is not trusted yet
	rejected int  // widths that did not fit into memory
}

// widest chooses the width of a wave of so many items that remain, over ranks that take turns. remembered is the width of a wave before, or 0. No
// width is probed twice.
func widest(remaining, ranks, remembered int, probe func(width int) (probed, error)) (choice, error) {
	n := normaliser{remaining, ranks}
	c := choice{width: n.least()}
	failed := remaining + 1 // the least width that is known not to be ok
	var err error
	try := func(width int) (p probed) {
		if p, err = probe(width); err == nil && !p.fits {
			c.rejected++
		}
		return p
	}
	p := try(c.width)
	if err != nil || !p.fits || !p.trusted {
		c.alone = true
		return c, err
	}
	// A width that was right before is a good place to start, but only where its price is trusted: it may have been another kind of call (#927).
	if w := n.normalise(remembered); remembered > 0 && w > c.width {
		switch p := try(w); {
		case err != nil:
			return c, err
		case p.fits && p.trusted:
			c.width = w
		case !p.ok():
			failed = w
		}
	}
	for next := n.normalise(2 * c.width); next > c.width && next < failed; next = n.normalise(2 * c.width) {
		p := try(next)
		if err != nil {
			return c, err
		}
		if !p.ok() {
			failed = next
			break
		}
		c.width = next
		if !p.trusted {
			return c, nil // a wider one must wait for what this one teaches
		}
	}
	for {
		next := n.normalise(c.width + (failed-c.width)/2)
		if next <= c.width { // between the middle and failed there may be one more (the reference stops here)
			next = n.after(c.width)
		}
		if next <= c.width || next >= failed {
			return c, nil
		}
		p := try(next)
		switch {
		case err != nil:
			return c, err
		case !p.ok():
			failed = next
		default:
			if c.width = next; !p.trusted {
				return c, nil
			}
		}
	}
}

// normaliser makes one of several near widths of a wide wave, so that few are tried, and the ranks' shares are equal.
type normaliser struct{ remaining, ranks int }

// least is the smallest wave: an item per rank.
func (n normaliser) least() int { return min(n.ranks, n.remaining) }

// grain is what wide widths are multiples of.
func (n normaliser) grain() int {
	base := 32
	if n.remaining < 64 {
		base = 1
	} else if n.remaining < 256 {
		base = 8
	}
	return (base + n.ranks - 1) / n.ranks * n.ranks
}

// normalise is the width that is tried for width.
func (n normaliser) normalise(width int) int {
	grain := n.grain()
	width = min(max(width, n.least()), n.remaining)
	if width == n.least() || width == n.remaining || width < grain {
		return width
	}
	return max(width/grain*grain, n.least())
}

// after is the next larger width that is tried than width, which is one.
func (n normaliser) after(width int) int {
	grain := n.grain()
	if width < grain {
		return min(width+1, n.remaining)
	}
	return min((width/grain+1)*grain, n.remaining)
}
