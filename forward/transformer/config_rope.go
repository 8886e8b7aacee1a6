package transformer

import (
	"fmt"

	"github.com/trainerrank/engine/internal/strictjson"
)

// ropes reads the rotary tables: that of full layers and, in a family that has one, that of windowed layers.
//
// Old spelling: rope_theta and rope_scaling at the top (and rope_local_base_freq, which is not scaled). New spelling: one
// object rope_parameters, or in Gemma 3 one per layer type inside it. A file may hold both if they agree.
func (r *reader) ropes(f *family, dim int) (full, local Rope) {
	old := Rope{Theta: f.theta, Rotary: dim, Factor: 1}
	local = Rope{Theta: f.localTheta, Rotary: dim, Factor: 1}
	topTheta := r.set("rope_theta")
	if topTheta {
		old.Theta = r.positive("rope_theta")
	}
	topLocal := f.localTheta > 0 && r.set("rope_local_base_freq")
	if topLocal {
		local.Theta = r.positive("rope_local_base_freq")
	}
	base := old
	scaled, said := r.object("rope_scaling"), topTheta
	if scaled != nil {
		old = scaled.rope(base, topTheta)
		said = said || scaled.set("rope_theta")
	}

	full = old
	if params := r.object("rope_parameters"); params != nil {
		here := params
		if f.localTheta > 0 {
			here = params.layerRope("full_attention")
			if sliding := params.layerRope("sliding_attention"); sliding != nil {
				local = sliding.rope(local, topLocal)
				topLocal = topLocal || sliding.set("rope_theta")
			}
			params.leftovers()
		}
		if here != nil {
			full = here.rope(base, topTheta)
			said = said || here.set("rope_theta")
		}
		if scaled != nil && !full.equal(old) {
			r.fail(&ConfigError{Key: r.path("rope_scaling"), Found: fmt.Sprintf("%+v", old), Wanted: fmt.Sprintf("%+v, as rope_parameters says", full),
				Advice: "remove one of the two"})
		}
	}
	if !said {
		r.assume("rope_theta", f.theta)
	}
	if f.localTheta > 0 && !topLocal {
		r.assume("rope_local_base_freq", f.localTheta)
	}
	// Only llama3 looks at it; transformers 5 then prefers this one to the one in the object.
	if v := r.get("original_max_position_embeddings"); full.Llama3 != nil && v.Kind() != strictjson.Missing && v.Kind() != strictjson.Null {
		if n := r.count("original_max_position_embeddings", maxTokens); n != full.Llama3.Original && !r.failed() {
			r.fail(&ConfigError{Key: r.path("original_max_position_embeddings"), Found: fmt.Sprint(n),
				Wanted: fmt.Sprintf("%d, as the rope parameters say", full.Llama3.Original)})
		}
	}
	return full, local
}

// layerRope is the object for one layer type within rope_parameters.
func (r *reader) layerRope(key string) *reader {
	out := r.object(key)
	if out == nil && !r.failed() {
		r.fail(&ConfigError{Key: r.path(key), Found: shown(r.get(key)), Wanted: "an object with rope_type and rope_theta",
			Advice: "this family has a rotary table per layer type"})
	}
	return out
}

// rope reads one object of rope parameters. base holds what stands outside it; fixed says that base.Theta is the
// file's word and not a default, so that another theta in the object contradicts it.
func (r *reader) rope(base Rope, fixed bool) Rope {
	out := base
	if r.set("rope_theta") {
		out.Theta = r.positive("rope_theta")
		if fixed && out.Theta != base.Theta {
			r.fail(&ConfigError{Key: r.path("rope_theta"), Found: fmt.Sprint(out.Theta), Wanted: fmt.Sprintf("%v, as outside", base.Theta)})
		}
	}
	key, kind := "rope_type", "default"
	switch a, b := r.set("rope_type"), r.set("type"); {
	case a && b:
		kind = r.text("rope_type")
		if old := r.text("type"); old != kind {
			r.fail(&ConfigError{Key: r.path("type"), Found: quoted(old), Wanted: quoted(kind) + ", as rope_type says"})
		}
	case a:
		kind = r.text("rope_type")
	case b:
		key, kind = "type", r.text("type")
	}
	if r.failed() {
		return out
	}
	r.refuse()
	switch kind {
	case "default":
		// A factor is left over where someone switched the scaling off; one that is in force would be a scaling.
		if r.set("factor") && r.positive("factor") != 1 {
			r.fail(&ConfigError{Key: r.path("factor"), Found: shown(r.get("factor")), Wanted: "none with rope type default",
				Advice: "name the rope_type, or remove the factor"})
		}
		r.get("original_max_position_embeddings")
	case "linear":
		out.Factor = r.positive("factor")
		r.get("original_max_position_embeddings")
	case "llama3":
		l := &Llama3Scaling{
			Factor:   r.positive("factor"),
			LowFreq:  r.positive("low_freq_factor"),
			HighFreq: r.positive("high_freq_factor"),
			Original: r.count("original_max_position_embeddings", maxTokens),
		}
		if l.HighFreq <= l.LowFreq {
			r.fail(&ConfigError{Key: r.path("high_freq_factor"), Found: fmt.Sprint(l.HighFreq), Wanted: fmt.Sprintf("more than low_freq_factor %v", l.LowFreq)})
		}
		out.Llama3 = l
	default:
		why, hint := whyNotRope(kind)
		r.fail(&UnsupportedError{Key: r.path(key), Value: quoted(kind), Why: why, Advice: hint})
	}
	r.leftovers()
	return out
}
