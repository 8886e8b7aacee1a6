package transformer

// ParseConfig turns a config.json into a Spec.
func ParseConfig(data []byte) (*Spec, error) { panic("soon") }
