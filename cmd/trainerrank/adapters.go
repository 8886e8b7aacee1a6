package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/slots"
	"github.com/trainerrank/engine/trainerrank"
)

// named is the value of one --adapter.
type named struct{ name, dir string }

// The rank of the adapter that plan --grad makes up, and the most that it may be.
const (
	defaultRank = 16
	maxRank     = 1 << 16
)

// addAdapter takes a value of --adapter.
func (o *options) addAdapter(s string) error {
	name, dir, ok := strings.Cut(s, "=")
	switch {
	case !ok || name == "" || dir == "":
		return errors.New("an adapter is NAME=DIR, a name for requests to use and a folder")
	case slices.ContainsFunc(o.adapters, func(a named) bool { return a.name == name }):
		return fmt.Errorf("the name %q is given twice", name)
	}
	o.adapters = append(o.adapters, named{name, dir})
	return nil
}

// checkAdapters says what contradicts itself in the flags that are about adapters and gradients. given says whether a flag was set.
func (o *options) checkAdapters(verb string, given func(name string) bool) error {
	if o.checkpoint != "" && !slices.ContainsFunc(o.adapters, func(a named) bool { return a.name == o.checkpoint }) {
		return &usageError{fmt.Sprintf("%s: --checkpoint %q: no adapter of that name is given", verb, o.checkpoint), o.whichAdapters()}
	}
	if given("grad") && o.pricing == learnedPricing {
		return &usageError{verb + ": --pricing learned and --grad", "calls with gradients are rehearsed: leave --pricing out"}
	}
	for _, flag := range []string{"rank", "retention"} {
		if given(flag) && !o.grad {
			return &usageError{fmt.Sprintf("%s: --%s without --grad", verb, flag), "it is about calls with gradients: add --grad"}
		}
	}
	if given("rank") && len(o.adapters) > 0 {
		return &usageError{verb + ": --rank and --adapter", "an adapter has its own rank; --rank is for planning without one"}
	}
	if given("rank") && (o.rankOf < 1 || o.rankOf > maxRank) {
		return &usageError{fmt.Sprintf("%s: --rank %d is not between 1 and %d", verb, o.rankOf, maxRank), fmt.Sprintf("leave it out for %d", defaultRank)}
	}
	if given("retention") {
		for name := range strings.SplitSeq(o.retention, ",") {
			r := trainerrank.Retention(name)
			known := []trainerrank.Retention{trainerrank.Stored, trainerrank.Layer, trainerrank.Replay}
			if !slices.Contains(known, r) || slices.Contains(o.retentions, r) {
				return &usageError{fmt.Sprintf("%s: --retention %q: %q is unknown, or comes twice", verb, o.retention, name), "name some of stored, layer, replay, in the order in which they are to be tried"}
			}
			o.retentions = append(o.retentions, r)
		}
	}
	return nil
}

// whichAdapters is the hint for a name that is none.
func (o *options) whichAdapters() string {
	if len(o.adapters) == 0 {
		return "no adapter is given: --adapter NAME=DIR loads one under a name"
	}
	var names []string
	for _, a := range o.adapters {
		names = append(names, printable(a.name))
	}
	slices.Sort(names)
	return "adapters: " + strings.Join(names, ", ") + "; --adapter NAME=DIR loads another"
}

// outline finds out what the adapters are, and takes nothing of the arena.
func (s *session) outline() error {
	set := slots.New(s.model.Modules(), s.dev, slots.Options{BaseModel: s.options.model})
	for _, a := range s.adapters {
		o, err := set.Outline(a.name, a.dir, slots.LoadOptions{Inference: !s.trains(a.name)})
		if err != nil {
			return s.badAdapter(err)
		}
		if d := o.Config.Dropout; d > 0 && o.Trainable {
			fmt.Fprintf(s.stderr, "note: adapter %s asks for a dropout of %g, which the engine does not apply: training it has to ignore that\n", printable(a.name), d)
		}
		s.outlines = append(s.outlines, o)
	}
	if s.grad && len(s.adapters) == 0 {
		o, err := set.OutlineNew("fresh", slots.Config{Rank: s.rankOf, Alpha: float64(s.rankOf), TargetPattern: slots.AllLinear})
		if err != nil {
			return fmt.Errorf("plan: %w", err)
		}
		fmt.Fprintf(s.stderr, "note: no adapter is given, so the plan is for training a fresh one of rank %d on every projection: %d parameters\n", s.rankOf, o.Elements)
		s.outlines, s.checkpoint = append(s.outlines, o), o.Name
	}
	for _, o := range s.outlines {
		for p, n := range o.Bytes {
			s.resident[p] += n
		}
	}
	return nil
}

// badAdapter is the error for an adapter that cannot be used.
func (s *session) badAdapter(err error) error {
	err = fmt.Errorf("%s: %w", s.verb, err)
	if ownHint(err) == "" {
		err = &hinted{err, "give the folder of a LoRA adapter of this model, as PEFT's save_pretrained writes it"}
	}
	return err
}

// trains says whether the call trains the adapter of a name.
func (s *session) trains(name string) bool {
	return s.grad && (s.checkpoint == name || slices.ContainsFunc(s.reqs, func(r request) bool { return r.input.Checkpoint.Name() == name }))
}

// callOptions are those of the call, planned or run.
func (s *session) callOptions(more ...trainerrank.CallOption) []trainerrank.CallOption {
	if s.checkpoint != "" {
		more = append(more, trainerrank.WithCheckpoint(forward.Checkpoint(s.checkpoint)))
	}
	if s.grad {
		more = append(more, trainerrank.WithGradMode(forward.WithGrad))
	}
	if s.retentions != nil {
		more = append(more, trainerrank.WithRetentions(s.retentions...))
	}
	return more
}

// loadAdapters brings the adapters into the arena.
func (s *session) loadAdapters(ctx context.Context) error {
	for _, a := range s.adapters {
		if err := s.rank.Checkpoints().Load(ctx, a.name, a.dir, slots.LoadOptions{Inference: true}); err != nil {
			return s.badAdapter(err)
		}
	}
	return nil
}

// adapterBytes is what adapters take, with what trains them: "" if there are none.
func (s *session) adapterBytes(format string) string {
	if n := s.resident.Total(); n > 0 {
		return fmt.Sprintf(format, n)
	}
	return ""
}

// adapterNames lists the adapters, and whether they are trained.
func (s *session) adapterNames() string {
	var list []string
	for _, o := range s.outlines {
		text := printable(o.Name)
		if o.Trainable {
			text += " (trained)"
		}
		list = append(list, text)
	}
	return strings.Join(list, ", ")
}

// held are the bytes of the call at its peak, with those of adapters.
func (s *session) held() device.Sizes {
	sum := s.admit.Shares
	for p, n := range s.resident {
		sum[p] += n
	}
	return sum
}
