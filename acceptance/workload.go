package main

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"hash"
	"math"
	"math/rand/v2"

	"gorgonia.org/tensor"

	"github.com/trainerrank/engine/forward"
)

// random is the source of a seed.
func random(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, 0xacce97)) }

func fresh(r *rand.Rand, vocab, n int) []int32 {
	list := make([]int32, n)
	for i := range list {
		list[i] = int32(r.IntN(vocab))
	}
	return list
}

// workload is the call of the arms that convert: n requests of so many tokens, the first quarter of which all share and the second each
// half of the requests, all with a label for every position, every fourth with the most likely tokens too.
func workload(vocab, n, tokens int) []forward.Input {
	r := random(1)
	trunk := fresh(r, vocab, tokens/4)
	branches := [2][]int32{fresh(r, vocab, tokens/4), fresh(r, vocab, tokens/4)}
	list := make([]forward.Input, n)
	for i := range list {
		in := &list[i]
		in.Tokens = append(in.Tokens, trunk...)
		in.Tokens = append(in.Tokens, branches[i*2/n]...)
		in.Tokens = append(in.Tokens, fresh(r, vocab, tokens-len(in.Tokens))...)
		in.Targets = append(in.Tokens[1:len(in.Tokens):len(in.Tokens)], forward.IgnoreLabel)
		if i%4 == 3 {
			in.TopK = min(4, vocab)
		}
	}
	return list
}

// draw draws the requests of a random call: up to n, of up to longest tokens. Some share a prefix, some of these a second one below it; there
// are duplicates, requests that end inside another, and some of one token. Outputs are mixed; now and then one wants none, but never all.
func draw(r *rand.Rand, vocab, n, longest int) []forward.Input {
	upTo := func(n int) int { return 1 + r.IntN(max(1, n)) }
	join := func(a, b []int32) []int32 {
		all := append(append([]int32{}, a...), b...)
		return all[:min(len(all), longest)]
	}
	trunk := fresh(r, vocab, upTo(longest/2))
	branches := [2][]int32{join(trunk, fresh(r, vocab, upTo(longest/4))), join(trunk, fresh(r, vocab, upTo(longest/4)))}
	list := make([]forward.Input, upTo(n))
	for i := range list {
		var tokens []int32
		switch kind := r.IntN(8); {
		case kind < 2:
			tokens = join(trunk, fresh(r, vocab, upTo(longest/2)))
		case kind < 4:
			tokens = join(branches[r.IntN(2)], fresh(r, vocab, upTo(longest/4)))
		case kind == 4 && i > 0:
			tokens = list[r.IntN(i)].Tokens
		case kind == 5 && i > 0:
			tokens = list[r.IntN(i)].Tokens
			tokens = tokens[:upTo(len(tokens))]
		case kind == 6:
			tokens = fresh(r, vocab, 1)
		default:
			tokens = fresh(r, vocab, upTo(longest))
		}
		list[i] = wants(r, vocab, tokens, i == 0)
	}
	return list
}

// wants is a request for tokens with random outputs, of which there is at least one if active.
func wants(r *rand.Rand, vocab int, tokens []int32, active bool) forward.Input {
	in := forward.Input{Tokens: tokens}
	if !active && r.IntN(12) == 0 {
		return in
	}
	for !in.Active() {
		if r.IntN(2) == 0 {
			in.TargetWidth = r.IntN(4)
			in.Targets = make([]int32, len(tokens)*in.Width())
			for i := range in.Targets {
				if in.Targets[i] = int32(r.IntN(vocab)); r.IntN(3) == 0 {
					in.Targets[i] = forward.IgnoreLabel
				}
			}
		}
		if r.IntN(4) == 0 {
			in.TopK = 1 + r.IntN(min(9, vocab))
		}
		// Only where it is not most of the memory: a vocabulary may have hundreds of thousands of tokens.
		in.Logits = r.IntN(6) == 0 && (vocab < 4096 || len(tokens) < 8)
		in.HiddenStates = r.IntN(6) == 0
	}
	return in
}

// nested nests a list of inputs at random; the order stays.
func nested(r *rand.Rand, list []forward.Input) forward.Inputs {
	var parts []forward.Inputs
	for len(list) > 0 {
		n := 1 + r.IntN(len(list))
		switch {
		case n == 1:
			parts = append(parts, forward.One(list[0]))
		case n < len(list) && r.IntN(2) == 0:
			parts = append(parts, nested(r, list[:n]))
		default:
			parts = append(parts, forward.Many(list[:n]...))
		}
		list = list[n:]
	}
	return forward.Nest(parts...)
}

// digests are a checksum of each output: of every bit, and of what there is.
func digests(outputs []*forward.Output) []string {
	list := make([]string, len(outputs))
	for i, o := range outputs {
		h := sha256.New()
		dense(h, o.TargetLogprobs)
		if o.TopK != nil {
			dense(h, o.TopK.Logprobs)
			dense(h, o.TopK.Tokens)
		}
		dense(h, o.Logits)
		dense(h, o.HiddenStates)
		list[i] = hex.EncodeToString(h.Sum(nil))
	}
	return list
}

func dense(h hash.Hash, t *tensor.Dense) {
	if t == nil {
		h.Write([]byte{0})
		return
	}
	h.Write([]byte{1})
	var bits []byte
	for _, n := range t.Shape() {
		bits = binary.LittleEndian.AppendUint64(bits, uint64(n))
	}
	switch data := t.Data().(type) {
	case []float32:
		for _, v := range data {
			bits = binary.LittleEndian.AppendUint32(bits, math.Float32bits(v))
		}
	case []int32:
		for _, v := range data {
			bits = binary.LittleEndian.AppendUint32(bits, uint32(v))
		}
	case float32: // a single element
		bits = binary.LittleEndian.AppendUint32(bits, math.Float32bits(data))
	case int32:
		bits = binary.LittleEndian.AppendUint32(bits, uint32(data))
	default:
		panic("acceptance: an output of another type than float32 and int32")
	}
	h.Write(bits)
}
