// Package profile says what a plan costs in bytes, before it runs.
//
// A [Price] has two roads to it. A model that rehearses its calls gives a [forward.Footprint], and [OfFootprints] turns that into a price that is exact.
// Any other model is priced by experience: a [Profile] remembers what calls of the same [Signature] took ([Profile.Observe]), and [Profile.Price]
// estimates from that, or from the geometry of the model alone as long as nothing was observed. [Profile.Bound] is the least price that
// any layout of a call can have, for whoever wants to rule a call out before it is laid out.
//
// The package is pure: integers and exact rationals in and out, no clock, no I/O, no floating point. Equal observations in any order give equal
// profiles and equal bytes from [Profile.Save].
//
// # The estimate
//
// Sections 3.2 to 3.7 of the reference are the starting point; design/planner.md, "Price", is what binds. An observation
// is filed in a bucket by its packed tokens, a factor of [Growth] wide, and max-merged there. So it stays a joint
// statement ("so many tokens took so many bytes"), and a tiny call cannot lend its bytes per token to a large one.
// For p packed tokens the estimate is the smaller of two bounds:
//
//   - by rate: bytes per token times tokens, with the largest rate among buckets of p/8 to 8p tokens, or of the nearest larger one if there is none below
//     in that range. A bucket that p has outgrown keeps what it asked for last, so that the bound does not fall.
//   - by size: what the smallest bucket that is no smaller than p took, or any below it, and in proportion beyond the largest bucket.
//
// The first bound alone is the rule of planner.md made monotone. A rule that drops a rate when p has outgrown it asks less for more, and one that keeps it
// lets eight times what a tiny first call took to compile stand for ever; the second bound is what was really seen, and cures that. Neither is ever below the
// observed peak of a smaller or equal call, and neither falls when tokens are added.
//
// Trust is about how far observations reach. A price is trusted if some observation has at least p/8 tokens, and each kind of
// request in the call had at least an eighth of its share in that observation. Retained bytes below the
// required ones are believed only if, besides, the observation had at least an eighth of the call's logical tokens per packed token, and
// retained bytes were measured in it at all: before that, everything is retained. Out of reach the estimate is still a floor.
//
// # Caveats
//
// The cold estimate is a floor and no bound: the reference found it twenty times too low. Whoever can rehearse should.
//
// Required bytes never fall when a call grows under one signature and one set of kinds. Retained bytes can, where a call
// grows into the trusted range; [Profile.Bound] accounts for that.
package profile
