package trainerrank

import (
	"slices"

	"github.com/trainerrank/engine/collective"
	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/forward/prefixtree"
	"github.com/trainerrank/engine/profile"
	"github.com/trainerrank/engine/slots"
)

// Option configures a TrainerRank.
type Option func(*TrainerRank)

// WithDevice says on which device calls run. The default is the device of the model's weights.
func WithDevice(d device.Device) Option { return func(t *TrainerRank) { t.dev = d } }

// WithUsableBytes bounds what a call may use, in bytes, below what is free on the device.
func WithUsableBytes(n int64) Option { return func(t *TrainerRank) { t.limit = n } }

// WithCostTables says by which cost the layouts of calls are chosen: that of the first table for the model and the device. They go before the
// engine's own; where none is for them, it is [prefixtree.Version1]. No table changes a bit of an answer, nor what is refused.
func WithCostTables(tables ...prefixtree.Table) Option {
	return func(t *TrainerRank) { t.tables = append(slices.Clone(tables), t.tables...) }
}

// WithProfile lets a rank begin with what others, or it before it was started anew, have learned about the memory of calls. The profile is copied.
func WithProfile(p *profile.Profile) Option { return func(t *TrainerRank) { t.known.Merge(p) } }

// WithWorld says with which other ranks this one runs that have inputs of their own: data-parallel ones. The default is to be alone.
func WithWorld(w collective.World) Option { return func(t *TrainerRank) { t.world = w } }

// WithSharedInputs says with which other ranks this one shares its inputs: those that run one model together, tensor- or context-parallel. All of them must make
// the same calls, [TrainerRank.Plan] too, with equal inputs. They plan as one: for the least of what they may use and the most that a plan needs on any of
// them. A call has the same [Admission] on all, and is refused or fails on all or on none; on those where nothing was wrong the error wraps a
// [*collective.PeerError]. Inputs, or plans, that differ are a [*SharedInputsError] on all. The default is to share with nobody.
//
// A call then has three collectives on w, and Plan two, whatever the inputs are. They have the context of the call, so that one that ends on one rank ends w
// for all.
func WithSharedInputs(w collective.World) Option { return func(t *TrainerRank) { t.peers = w } }

// WithRecords asks for a record of every call that is planned, [TrainerRank.Plan] included: it is handed over when the call is admitted or refused, before anything
// runs. fn is called by the goroutine of the call, whose turn it is; it must not make a call of the rank.
func WithRecords(fn func(*Record)) Option { return func(t *TrainerRank) { t.records = fn } }

// WithMisses asks for a record of every call that took more memory than was predicted, or ran out of what it was given: it is handed over when that has happened, with what was
// observed ([Record.Observed]). That is how an estimate that was wrong can be looked into; where prices are exact it does not happen. fn is called as that of [WithRecords] is. A
// call of which all goes well pays nothing for it.
func WithMisses(fn func(*Record)) Option { return func(t *TrainerRank) { t.misses = fn } }

// CallOption configures one call.
type CallOption func(*call)

// WithGradMode sets the grad mode of inputs that inherit it. The default is NoGrad.
func WithGradMode(g forward.GradMode) CallOption { return func(c *call) { c.grad = g } }

// WithCheckpoint sets the selection of inputs that inherit it.
func WithCheckpoint(s forward.Selection) CallOption { return func(c *call) { c.checkpoint = s } }

// WithOutlines lets [TrainerRank.Plan] take checkpoints for loaded that are not: those of these outlines, under their names. Where one is loaded that
// counts, and no call runs on an outline.
func WithOutlines(list ...*slots.Outline) CallOption {
	return func(c *call) { c.outlines = append(c.outlines, list...) }
}

// WithProgress asks for fn to be called now and then while the model runs, with the steps done and their number; of a call that is split, with packed tokens.
func WithProgress(fn func(done, total int)) CallOption { return func(c *call) { c.progress = fn } }

// AgreeAcrossRanks makes the ranks of the world agree on the outcome: a call that is refused or fails on one rank gives an error on all, on the others one that
// wraps a [*collective.PeerError], and then nothing of it is left on any. All ranks must make the call, with inputs of their own, which may be none.
func AgreeAcrossRanks() CallOption { return func(c *call) { c.agree = true } }

// WithRetentions says what graphs may keep, in the order in which it is tried: by default everything ([Stored]), and if no split of the call fits so, the input of each
// layer ([Layer]), then nothing ([Replay]). Gradients are the same, to the bit; the fewer a graph keeps, the more its backward has to compute again.
func WithRetentions(r ...Retention) CallOption {
	return func(c *call) { c.retentions = slices.Clone(r) }
}
