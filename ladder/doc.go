// Package ladder decides how a call is run inside a number of bytes: whole, in subforwards, or not at all.
//
// [Search] is given a [Call], a [Planner] that lays requests out, a [Pricer] that says what they cost, and the bytes that may be used. It answers with an
// [Admission], and has run nothing by then. The package is pure: no clock, no I/O, no floating point. Equal
// arguments give equal admissions, byte for byte in their JSON form, on every rank.
//
// # The ladder
//
// A call is tried whole, in the layout that is cheapest to run and in the one that needs least memory. Then it is cut: requests are visited in
// an order in which equal prefixes are neighbours ([Order]), and the order is cut into 2, 4, 8, ... contiguous chunks of about equal tokens ([Cut]), at last into
// one request each. Every chunk is a subforward of its own, the one with the most ephemeral bytes first ([Execution]); what earlier ones
// retain stays. So a rung fits if
//
//	sum of retained + largest ephemeral <= usable
//
// which bounds every order of running, and leaves room for a backward with all graphs alive. Sections 5.1 to 5.9 of the reference describe this; Options.Classic
// does that and nothing else, number for number.
//
// # What is ours
//
// Without gradients there is no backward to leave room for: then the exact peak of the order that is run counts, [RunningPeak], which is never more.
//
// The first rung that fits is not the fewest that fit. Smaller counts are tried after it, and cuts that are not balanced:
// where all that a subforward retains is its outputs, a greedy fill finds the fewest in one walk, because outputs add up to the same whatever the cut; elsewhere
// dynamic programming over all contiguous cuts does, for up to [ExactLimit] requests. At the count that was found, a balanced cut is taken if it fits.
//
// Where the outputs that are wanted differ from request to request, cuts are balanced by bytes before they are balanced by tokens. Requests that want no
// output weigh nothing, and are no reason for a subforward.
//
// If no split of a call with gradients fits, the ladder is climbed again with less of the graph retained: [Layer], then [Replay].
//
// A refusal says what would have helped: [Admission.SmallestBudgetBytes] and [Admission.LargestPrefix].
//
// # What must hold
//
// Nothing is admitted that the pricer says does not fit. That the fewest is the fewest, and that the smallest budget and the largest prefix are exact, rests on
// monotone prices: the Required, Retained and, where Retained is Outputs, Ephemeral bytes of [Pricer.Minimal] never fall when a request is added to a chunk. The running peak below
// the fewest by the inequality is a bonus; nothing says that it is minimal.
package ladder
