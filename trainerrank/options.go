package trainerrank

import (
	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
)

// Option configures a TrainerRank.
type Option func(*TrainerRank)

// WithDevice says on which device calls run. The default is the device of the model's weights.
func WithDevice(d device.Device) Option { return func(t *TrainerRank) { t.dev = d } }

// WithUsableBytes bounds what a call may use, in bytes, below what is free on the device.
func WithUsableBytes(n int64) Option { return func(t *TrainerRank) { t.limit = n } }

// CallOption configures one call.
type CallOption func(*call)

// WithGradMode sets the grad mode of inputs that inherit it. The default is NoGrad.
func WithGradMode(g forward.GradMode) CallOption { return func(c *call) { c.grad = g } }

// WithCheckpoint sets the selection of inputs that inherit it.
func WithCheckpoint(s forward.Selection) CallOption { return func(c *call) { c.checkpoint = s } }

// WithProgress asks for fn to be called now and then while the model runs, with the steps done and their number.
func WithProgress(fn func(done, total int)) CallOption { return func(c *call) { c.progress = fn } }
