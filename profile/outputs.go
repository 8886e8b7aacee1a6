package profile

import (
	"fmt"

	"github.com/trainerrank/engine/forward"
)

// Widths are the bytes of one element of each kind of output.
type Widths struct {
	Label  int64 // a target's logprob
	TopK   int64 // one of the top k: its logprob and its token
	Logit  int64
	Hidden int64 // one element of a hidden state
}

// EngineWidths are those of a [forward.Output]: float32, and int32 for tokens.
var EngineWidths = Widths{Label: 4, TopK: 8, Logit: 4, Hidden: 4}

// Outputs is what the outputs of a request take, in bytes, for a model of that vocabulary and hidden size: exact for
// tensors that are not rounded (section 3.2 of the reference). It is 0 for an inactive request. Logits of a model whose vocabulary is not known are an error.
func (w Widths) Outputs(in *forward.Input, s forward.Spec) (int64, error) {
	n := int64(len(in.Tokens))
	sum := times(int64(len(in.Targets)), w.Label)
	sum = plus(sum, times(times(n, int64(max(0, in.TopK))), w.TopK))
	if in.Logits {
		if s.Vocabulary <= 0 {
			return 0, fmt.Errorf("output bytes: logits are wanted, but the vocabulary of model %q is not known", s.Name)
		}
		sum = plus(sum, times(times(n, int64(s.Vocabulary)), w.Logit))
	}
	if in.HiddenStates {
		sum = plus(sum, times(times(n, int64(max(0, s.Hidden))), w.Hidden))
	}
	return sum, nil
}
