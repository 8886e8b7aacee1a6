package transformer

import (
	"fmt"
	"strings"
)

// UnsupportedError says that config.json asks for something that this package does not implement. Running the model
// without it would give wrong numbers, so it is refused by name.
type UnsupportedError struct {
	Key    string // path in config.json: "rope_scaling.rope_type", "text_config.hidden_act"
	Value  string // as found there
	Why    string // what it is
	Advice string // what to do instead, "" if there is nothing to say
}

func (e *UnsupportedError) Error() string {
	return fmt.Sprintf("parse config.json: %s: %s is not supported: %s", e.Key, e.Value, e.Why)
}

// Hint says what to do instead; "" if there is nothing to say.
func (e *UnsupportedError) Hint() string { return e.Advice }

// ConfigError says that config.json is broken or contradicts itself.
type ConfigError struct {
	Key    string // path in config.json, or the field of the Spec; "" for the file as a whole
	Found  string
	Wanted string
	Advice string // what to do about it, "" if there is nothing to say
}

// Hint says what to do about it; "" if there is nothing to say.
func (e *ConfigError) Hint() string { return e.Advice }

func (e *ConfigError) Error() string {
	key := e.Key
	if key != "" {
		key += ": "
	}
	return fmt.Sprintf("parse config.json: %sfound %s, wanted %s", key, e.Found, e.Wanted)
}

// TensorError says which tensor of a folder does not fit the Spec, and how.
type TensorError struct {
	Name    string
	Present bool    // the folder holds it
	Found   []int64 // its shape there, if Present
	Wanted  []int64 // the shape due; nil if the tensor should not be there
	Advice  string  // what may be the matter
}

// Hint says what may be the matter.
func (e *TensorError) Hint() string { return e.Advice }

func (e *TensorError) Error() string {
	found, wanted := "no such tensor", "none"
	if e.Present {
		found = shapeString(e.Found)
	}
	if e.Wanted != nil {
		wanted = shapeString(e.Wanted)
	}
	return fmt.Sprintf("match tensors: %s: found %s, wanted %s", e.Name, found, wanted)
}

func shapeString(shape []int64) string {
	return strings.ReplaceAll(fmt.Sprint(shape), " ", ", ")
}
