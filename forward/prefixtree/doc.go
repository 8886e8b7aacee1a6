// Package prefixtree finds the prefixes that rows of tokens share, decides which of them to compute once, and lays
// the result out as one packed row.
//
// It is the pure part of the planner: integers in, integers out. It reads no clock, does no I/O and starts no goroutine,
// and every function gives the same answer for the same arguments, so that ranks which plan apart plan alike.
//
// There are four values, each made from the one before it:
//
//   - [Build] gives the [Tree] of a group of rows: the canonical radix tree, in which every stretch of tokens that a set of rows
//     has in common is one [Segment]. It depends on the tokens and on the order of the rows, on nothing else. A segment with more
//     than one row is a decision: its tokens may be shared or computed once per row.
//   - [Select] gives the [Choice] of decisions that is cheapest under a [Cost]. A cost charges for integer features of a layout, such as packed tokens,
//     spans and levels: [Version1] is a formula for any model, a [Table] is fitted to one device, and [CostFor] picks. [Tree.Family] lists the
//     layouts that have names, which [Tree.Anchor] finds again.
//   - [Tree.Layout] gives the [Layout] of a set of decisions: the spans of tokens that are computed, who descends from
//     whom, and what that costs in tokens, spans and levels. [Tree.FullSharing] takes every decision: no layout has fewer tokens,
//     and more rows never make it smaller, which is why feasibility is judged by it. [Tree.NoSharing] takes none.
//   - [Layout.Pack] gives the [Batch]: the packed row with the position and the span of each token. [Batch.Gather] finds the tokens
//     of a row in it again; [Batch.Check] is what a consumer asks before it trusts one.
//
// # Search
//
// Select is exact where costs allow it: dynamic programming over the tree (exact.go) finds the least [Score] in microseconds and proves it, which it
// reports as Optimal. That is wherever nothing is divided by a number of ranks and rounded, up to some two million pairs of a
// decision and an ancestor. Otherwise it looks at all layouts if they are few, and else does the bounded search of the studied planner (beam.go), step by
// step as there, improved by the exact optimum of the same cost without rounding. Options.Bounded asks for the studied search alone, of which
// Stats.Digest proves that it was the same.
//
// Choosing by cost is not monotone: with one row more, the cheapest layout may have fewer packed tokens. The least work is monotone, unless short spans
// are charged for. Neither is a bound on memory: that is what full sharing is for.
//
// # Cost
//
// Build compares tokens and never hashes them: rows are merge-sorted with their common prefixes remembered, which looks
// at every token about once, at the speed of a memory comparison. With T tokens in n rows it takes O(T + n log² n) time,
// less where rows are slices of one buffer, since equal addresses are not compared. Nothing recurses, so depth costs nothing. Memory
// beside the row lists is O(n), in a number of allocations that does not grow with T.
//
// No search makes a layout: it scores sets of decisions, each a few nanoseconds per decision, from arrays made once.
//
// # Caveats
//
// Slices are shared, not copied: the Rows of a segment is often a window of its parent's, a layout's spans point to the tree's row
// lists, and a batch's spans are its layout's. Treat all of them as read-only; their capacity is clipped, so append is safe.
//
// Rows are listed in ascending order, as given by the caller. A child lists a subset of its parent's rows; where that subset
// is a run of the parent's list it costs no memory. Where it is not, it is written out, and the lists of a tree hold at most one
// number per token. That can only hurt for rows that alias each other: a chain of 100,000 prefixes of one buffer is small if the
// rows come in order of length, and five billion numbers if they come shuffled.
package prefixtree
