package transformer_test

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/forward/transformer"
	"github.com/trainerrank/engine/internal/golden"
	"github.com/trainerrank/engine/internal/strictjson"
)

// again is a rehearsal that went through JSON.
func again(t testing.TB, r transformer.Rehearsal) (out transformer.Rehearsal) {
	t.Helper()
	text, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	v, err := strictjson.Parse(text, 10)
	if err == nil {
		err = strictjson.Decode(v, &out)
	}
	if err == nil {
		err = out.Validate()
	}
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	if d := cmp.Diff(r, out); d != "" {
		t.Errorf("before (-) and after (+) JSON:\n%s", d)
	}
	return out
}

// What a decoder and a number of threads say of a batch without its tokens and labels is what the model says of the batch: a rehearsal depends on nothing else.
func TestARehearsalNeedsNoModel(t *testing.T) {
	for _, c := range golden.Cases {
		t.Run(c.Name(), func(t *testing.T) {
			folder := golden.FS(t, c.Model)
			for threads := 1; threads <= 3; threads++ {
				m := golden.Load(t, folder, golden.Options{Config: c.Config, Threads: threads, Unloaded: true})
				other := again(t, m.Rehearsal())
				if threads == 2 { // what is trained is kept as float32
					if err := m.TrainBase(); err != nil {
						t.Fatal(err)
					}
				}
				for seed := range uint64(20) {
					r := golden.Rand(seed)
					inputs := active(golden.Draw(r, m.Spec().Vocabulary, 1+r.IntN(7), 1+r.IntN(400)))
					if len(inputs) == 0 {
						continue
					}
					inputs[0].TopK = r.IntN(m.Spec().Vocabulary)
					b := pack(t, inputs, someSharing(r))
					if b.Grad = r.IntN(3) > 0; b.Grad {
						b.Keep = []forward.Retention{"", forward.Stored, forward.Layer, forward.Replay}[r.IntN(4)]
					}
					if r.IntN(2) == 0 {
						var lora []forward.LoRA
						for i := range m.Modules() {
							if r.IntN(2) == 0 {
								lora = append(lora, forward.LoRA{Module: i, Rank: 1 + r.IntN(9), Scale: 2})
							}
						}
						b.Adapter = forward.NewAdapter("a", m.Modules(), lora)
					}
					want, err := m.Rehearse(b)
					if err != nil {
						t.Fatal(err)
					}
					clear(b.Tokens)
					clear(b.Positions)
					clear(b.SegmentOf)
					for i, in := range b.Requests {
						blank := *in
						blank.Tokens = make([]int32, len(in.Tokens))
						if in.Targets != nil {
							blank.Targets = make([]int32, len(in.Targets))
						}
						b.Requests[i] = &blank
					}
					if b.Adapter != nil { // nor does it matter where its matrices lie
						a := &forward.Adapter{Bytes: b.Adapter.Bytes}
						for _, l := range b.Adapter.LoRA {
							a.LoRA = append(a.LoRA, forward.LoRA{Module: l.Module, Rank: l.Rank})
						}
						b.Adapter = a
					}
					got, err := other.Rehearse(b)
					if err != nil {
						t.Fatal(err)
					}
					if d := cmp.Diff(want, got); d != "" {
						t.Fatalf("%d threads, seed %d:\n%s", threads, seed, d)
					}
				}
			}
		})
	}
}

// A rehearsal that no model has is refused, and one that a model might have does not overflow.
func TestValidateRehearsal(t *testing.T) {
	m := golden.Load(t, golden.FS(t, "qwen2-tiny"), golden.Options{Unloaded: true})
	r := m.Rehearsal()
	for _, c := range []struct {
		spoil func(*transformer.Rehearsal)
		want  string
	}{
		{func(r *transformer.Rehearsal) { r.Decoder = nil }, "rehearsal: no decoder"},
		{func(r *transformer.Rehearsal) { r.Threads = 0 }, "rehearsal: 0 threads"},
		{func(r *transformer.Rehearsal) { r.Threads = 1 << 20 }, "rehearsal: 1048576 threads"},
		{func(r *transformer.Rehearsal) { r.Decoder.Vocab = 0 }, "rehearsal: decoder: vocab: found 0"},
		{func(r *transformer.Rehearsal) { r.Decoder.Layers[1].Attention = nil }, "rehearsal: decoder: layers[1].attention, mlp: found none"},
	} {
		bad, decoder := r, *r.Decoder
		bad.Decoder = &decoder
		decoder.Layers = slices.Clone(decoder.Layers)
		c.spoil(&bad)
		if err := bad.Validate(); err == nil || !strings.HasPrefix(err.Error(), c.want) {
			t.Errorf("%v, want %s", err, c.want)
		}
	}
	r.Threads = 1 << 16
	f, err := r.Rehearse(pack(t, []forward.Input{{Tokens: []int32{1, 2}, TopK: 3}}, fullSharing))
	if err != nil || f.Scratch <= 0 || f.Scratch > 1<<50 {
		t.Errorf("%v, %v", f, err)
	}
}
