package prefixtree

import (
	"errors"
	"fmt"
	"math"
	"slices"
)

// Segment is a maximal stretch of tokens that a set of rows has in common: it begins where its parent ends and ends where
// the first of its rows ends or where two of them part.
type Segment struct {
	// Parent is the index in [Tree.Segments] of the segment that this one continues, -1 if it begins the rows.
	// Invariant: Parent is smaller than the segment's own index.
	Parent int `json:"parent"`
	// Start and End are token offsets in each of the rows: the segment holds [Start, End).
	// Invariant: End > Start; Start is the End of the parent, 0 if there is none.
	Start int `json:"start"`
	End   int `json:"end"`
	// Depth is the number of segments from the beginning of the rows to this one, itself included: 1 without a parent.
	Depth int `json:"depth"`
	// Rows are the rows that contain the segment, ascending. Read-only: it may be a window of the parent's.
	// Invariant: a proper subset of the parent's.
	Rows []int `json:"rows"`
}

// Tree is the canonical prefix tree of a list of rows. Equal rows, in equal order, have equal trees.
type Tree struct {
	// Segments are in preorder: parents first, children by the first row that has them.
	Segments []Segment `json:"segments"`
	// Decisions are the segments with more than one row, ascending: the ones that a layout may share.
	Decisions []int `json:"decisions"`
	// Terminals holds for each row the segment that it ends in. The row's length is that segment's End.
	Terminals []int `json:"terminals"`
	// Logical is the number of tokens of all rows together.
	Logical int `json:"logical"`
}

// ErrNoRows is what [Build] returns for an empty list of rows.
var ErrNoRows = errors.New("prefixtree: build: no rows")

// RowError says which row an operation cannot take.
type RowError struct {
	Op   string // "build" or "pack"
	Row  int    // -1 if it is not one row's fault
	What string // what is wrong
}

// Error names the operation and the row.
func (e *RowError) Error() string {
	if e.Row < 0 {
		return fmt.Sprintf("prefixtree: %s: %s", e.Op, e.What)
	}
	return fmt.Sprintf("prefixtree: %s: row %d %s", e.Op, e.Row, e.What)
}

// maxRows keeps node numbers, at most two per row, inside an int32.
const maxRows = math.MaxInt32 / 2

// Build makes the canonical tree of rows, each a list of token ids. It keeps the order of the rows; equal rows share all
// their segments. It keeps no reference to the tokens.
//
// The result is that of section 4.2 of the reference (extend a set of rows while they agree, else part it by next
// token in order of first appearance), found another way: the rows are sorted, and the common prefixes of neighbours in sorted order are the
// branching points of the tree, as in the construction of a suffix tree from its suffix array.
//
// No rows give [ErrNoRows], a row without tokens a [*RowError].
func Build(rows [][]int32) (*Tree, error) {
	if len(rows) == 0 {
		return nil, ErrNoRows
	}
	if len(rows) > maxRows {
		return nil, &RowError{Op: "build", Row: -1, What: fmt.Sprintf("%d rows, at most %d are possible", len(rows), maxRows)}
	}
	lengths, logical := make([]int, len(rows)), 0
	for r, row := range rows {
		if len(row) == 0 {
			return nil, &RowError{Op: "build", Row: r, What: "has no tokens"}
		}
		lengths[r] = len(row)
		logical += len(row)
	}
	order, common := sortRows(rows)
	return treeOf(lengths, order, common, logical), nil
}

// treeOf is the tree of rows of these lengths, logical together. order lists them so that rows with a common prefix are neighbours, a prefix before what it is a
// prefix of; common[i] is what the row at place i has in common with the one before it.
// Invariant: common[i] is at most the length of either.
func treeOf(lengths []int, order []int32, common []int, logical int) *Tree {
	g := grow(lengths, order, common)
	g.link()
	t := g.emit(order)
	t.Logical = logical
	return t
}

// none is the number of no node.
const none = int32(-1)

// node is a segment before it has its place in the preorder.
type node struct {
	end         int
	parent      int32
	lo, hi      int32 // its rows are [lo, hi) of the sorted order
	first, last int32 // lowest and highest row
	child       int32 // first child, in the order in which rows show them
	tail        int32 // last child
	next        int32 // next sibling
	index       int32 // place in the preorder
}

// growth is a tree under construction.
type growth struct {
	nodes     []node
	terminals []int32 // per row the node in which it ends
	root      int32   // first node without a parent
}

// grow makes the nodes and their parents by a walk over the sorted rows. The rightmost path of what has been built is a stack whose links are the
// nodes' own parents.
func grow(lengths []int, order []int32, common []int) *growth {
	g := &growth{nodes: make([]node, 0, 2*len(lengths)), terminals: make([]int32, len(lengths)), root: none}
	add := func(parent int32, end int, lo int32) int32 {
		g.nodes = append(g.nodes, node{
			end: end, parent: parent, lo: lo,
			first: none, last: none, child: none, tail: none, next: none,
		})
		return int32(len(g.nodes) - 1)
	}
	top := none
	for i, r := range order {
		// Close the nodes that end beyond what this row shares with the one before it, and cut the last of them in two if it
		// begins before that point.
		shared := common[i]
		for top != none && g.nodes[top].end > shared {
			closed := &g.nodes[top]
			closed.hi = int32(i)
			if shared > 0 && (closed.parent == none || g.nodes[closed.parent].end < shared) {
				upper := add(closed.parent, shared, closed.lo)
				closed.parent = upper // capacity is 2n, so append has not moved the nodes
				top = upper
				break
			}
			top = closed.parent
		}
		if n := lengths[r]; n > shared {
			top = add(top, n, int32(i))
		}
		g.terminals[r] = top
	}
	for ; top != none; top = g.nodes[top].parent {
		g.nodes[top].hi = int32(len(order))
	}
	return g
}

// link finds each node's lowest and highest row and makes the lists of children. Rows are visited in order, and each climbs
// until it meets a node that an earlier one has seen: so children are linked in the order of their lowest rows.
func (g *growth) link() {
	end := none // last node without a parent
	for r, x := range g.terminals {
		for x != none && g.nodes[x].first == none {
			nd := &g.nodes[x]
			nd.first = int32(r)
			head, tail := &g.root, &end
			if nd.parent != none {
				p := &g.nodes[nd.parent]
				head, tail = &p.child, &p.tail
			}
			if *tail == none {
				*head = x
			} else {
				g.nodes[*tail].next = x
			}
			*tail = x
			x = nd.parent
		}
	}
	for r, x := range slices.Backward(g.terminals) {
		for x != none && g.nodes[x].last == none {
			g.nodes[x].last = int32(r)
			x = g.nodes[x].parent
		}
	}
}

// emit walks the nodes in preorder and writes the segments.
func (g *growth) emit(order []int32) *Tree {
	n := len(order)
	lists := newRowLists(order)
	t := &Tree{
		Segments:  make([]Segment, 0, len(g.nodes)),
		Terminals: make([]int, n),
	}
	decisions := 0
	for i := range g.nodes {
		if g.nodes[i].hi-g.nodes[i].lo > 1 {
			decisions++
		}
	}
	t.Decisions = make([]int, 0, decisions)
	for x := g.root; x != none; {
		nd := &g.nodes[x]
		nd.index = int32(len(t.Segments))
		s := Segment{Parent: -1, End: nd.end, Depth: 1}
		within := lists.all
		if nd.parent != none {
			s.Parent = int(g.nodes[nd.parent].index)
			p := &t.Segments[s.Parent]
			s.Start, s.Depth, within = p.End, p.Depth+1, p.Rows
		}
		s.Rows = lists.of(nd, within)
		if len(s.Rows) > 1 {
			t.Decisions = append(t.Decisions, len(t.Segments))
		}
		t.Segments = append(t.Segments, s)
		if nd.child != none {
			x = nd.child
			continue
		}
		for x != none && g.nodes[x].next == none {
			x = g.nodes[x].parent
		}
		if x != none {
			x = g.nodes[x].next
		}
	}
	for r, x := range g.terminals {
		t.Terminals[r] = int(g.nodes[x].index)
	}
	return t
}

// rowLists makes the ascending lists of rows of the segments with as little memory as it can.
type rowLists struct {
	order []int32
	rank  []int32 // inverse of order
	all   []int   // every row: what the segments without a parent choose from
	free  []int   // unused rest of the last chunk
}

func newRowLists(order []int32) *rowLists {
	l := &rowLists{order: order, rank: make([]int32, len(order)), all: make([]int, len(order))}
	for i, r := range order {
		l.rank[r] = int32(i)
		l.all[i] = i
	}
	return l
}

// sparse is the factor from which on a child's rows are sorted instead of picked out of its parent's list. Picking costs the stretch of the
// parent's list that holds them, sorting their own number times its logarithm; a row can be in at most log n / log sparse sorted lists,
// since each is smaller than its parent's by that factor.
const sparse = 8

// of lists the rows of nd, a subset of within, the rows of its parent. If they are a run of within then they are that run itself.
func (l *rowLists) of(nd *node, within []int) []int {
	n := int(nd.hi - nd.lo)
	from, _ := slices.BinarySearch(within, int(nd.first))
	to, _ := slices.BinarySearch(within, int(nd.last))
	within = within[from : to+1 : to+1]
	if len(within) == n {
		return within
	}
	list := l.take(n)
	if n*sparse < len(within) {
		for i, r := range l.order[nd.lo:nd.hi] {
			list[i] = int(r)
		}
		slices.Sort(list)
		return list
	}
	k := 0
	for _, r := range within {
		if rank := l.rank[r]; rank >= nd.lo && rank < nd.hi {
			list[k] = r
			k++
		}
	}
	return list
}

// take cuts a list of n rows from the free chunk. Chunks grow with what is asked of them, so that their number stays small.
func (l *rowLists) take(n int) []int {
	if len(l.free) < n {
		l.free = make([]int, max(n, 2*len(l.all), len(l.free)))
	}
	list := l.free[:n:n]
	l.free = l.free[n:]
	return list
}
