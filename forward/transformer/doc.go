// Package transformer runs the decoders of a Hugging Face folder: Qwen3, Qwen2, Llama, Mistral and the text part of Gemma 3.
//
// [ParseConfig] turns a config.json into a [Spec], and refuses by name whatever a Spec cannot say. There is one decoder, which the
// Spec parametrises; no family has code of its own. [OpenFolder] reads headers only; [Model.Place] chooses the device, and
// [Model.Load] brings the weights to it.
//
// A [Model] implements [forward.Model] and [forward.Rehearser]: a rehearsal takes the same path as a run, on arenas that only count.
package transformer
