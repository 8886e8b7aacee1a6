package transformer

import (
	"fmt"
	"strings"
)

// UnsupportedError says that config.json asks for something that this package does not implement. Running the model
// without it would give wrong numbers, so it is refused by name.
type UnsupportedError struct {
	Key   string // path in config.json: "rope_scaling.rope_type", "text_config.hidden_act"
	Value string // as found there
	Why   string // what it is
	Hint  string // what to do instead, "" if there is nothing to say
}

func (e *UnsupportedError) Error() string {
	return withHint(fmt.Sprintf("parse config.json: %s: %s is not supported: %s", e.Key, e.Value, e.Why), e.Hint)
}

// ConfigError says that config.json is broken or contradicts itself.
type ConfigError struct {
	Key    string // path in config.json, or the field of the Spec; "" for the file as a whole
	Found  string
	Wanted string
	Hint   string
}

func (e *ConfigError) Error() string {
	key := e.Key
	if key != "" {
		key += ": "
	}
	return withHint(fmt.Sprintf("parse config.json: %sfound %s, wanted %s", key, e.Found, e.Wanted), e.Hint)
}

// TensorError says which tensor of a folder does not fit the Spec, and how.
type TensorError struct {
	Name    string
	Present bool    // the folder holds it
	Found   []int64 // its shape there, if Present
	Wanted  []int64 // the shape due; nil if the tensor should not be there
	Hint    string
}

func (e *TensorError) Error() string {
	found, wanted := "no such tensor", "none"
	if e.Present {
		found = shapeString(e.Found)
	}
	if e.Wanted != nil {
		wanted = shapeString(e.Wanted)
	}
	return withHint(fmt.Sprintf("match tensors: %s: found %s, wanted %s", e.Name, found, wanted), e.Hint)
}

func shapeString(shape []int64) string {
	return strings.ReplaceAll(fmt.Sprint(shape), " ", ", ")
}

func withHint(text, hint string) string {
	if hint == "" {
		return text
	}
	return text + " (" + hint + ")"
}
