package transformer_test

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"math"
	"strings"
	"testing"
	"unsafe"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/internal/golden"
)

// adapter reads a PEFT folder, without any of the checks that package slots makes, into memory of the model's device.
func adapter(t testing.TB, m *golden.Loaded, folder fs.FS) *forward.Adapter {
	t.Helper()
	var config struct {
		R          int     `json:"r"`
		Alpha      float64 `json:"lora_alpha"`
		Stabilised bool    `json:"use_rslora"`
	}
	data, err := fs.ReadFile(folder, "adapter_config.json")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(data, &config); err != nil {
		t.Fatal(err)
	}
	values := golden.Tensors(t, folder, "adapter_model.safetensors")
	scale := config.Alpha / float64(config.R)
	if config.Stabilised {
		scale = config.Alpha / math.Sqrt(float64(config.R))
	}
	var lora []forward.LoRA
	for i, mod := range m.Modules() {
		if _, ok := values[golden.LoRAName(mod, "A")]; ok {
			lora = append(lora, forward.LoRA{Module: i, Rank: config.R, Scale: float32(scale)})
		}
	}
	a := forward.NewAdapter("golden", m.Modules(), lora)
	block, err := m.Host.Allocate(device.Adapters, a.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(block.Free)
	a.Params = block.Mem()
	for _, l := range a.LoRA {
		mod := m.Modules()[l.Module]
		dst := a.Params.Slice(l.A, int64(l.Rank*mod.In)*4).F32()
		for i, v := range values[golden.LoRAName(mod, "A")] {
			dst[i] = float32(v)
		}
		dst = a.Params.Slice(l.B, int64(l.Rank*mod.Out)*4).F32()
		for i, v := range values[golden.LoRAName(mod, "B")] {
			dst[i%l.Rank*mod.Out+i/l.Rank] = float32(v)
		}
	}
	return a
}

// backward runs a batch forward and backward in memory full of NaN and of exactly the size that was rehearsed.
func backward(t testing.TB, m *golden.Loaded, b *forward.Batch, grads []forward.OutputGrad) ([]golden.Answer, []float32) {
	t.Helper()
	f, err := m.Rehearse(b)
	if err != nil {
		t.Fatal(err)
	}
	sizes := device.Sizes{device.Outputs: f.Outputs, device.Retained: f.Retained, device.Scratch: f.Scratch}
	res, err := m.Dirty.Reserve(sizes)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Release()
	b.Arena = res
	pass, err := m.Forward(t.Context(), b)
	if err != nil {
		t.Fatal(err)
	}
	if res.Used() != sizes {
		t.Errorf("used %v, rehearsed %v", res.Used(), sizes)
	}
	res.ReleaseScratch()
	sizes = device.Sizes{device.Scratch: f.BackwardScratch, device.Gradients: f.Gradients}
	back, err := m.Dirty.Reserve(sizes)
	if err != nil {
		t.Fatal(err)
	}
	defer back.Release()
	vector, err := pass.Graph.Backward(t.Context(), back, grads)
	if err != nil {
		t.Fatal(err)
	}
	if back.Used() != sizes {
		t.Errorf("the backward used %v, rehearsed %v", back.Used(), sizes)
	}
	answers := make([]golden.Answer, len(pass.Outputs))
	for i := range pass.Outputs {
		answers[i] = golden.Copy(&pass.Outputs[i])
	}
	return answers, append([]float32(nil), vector.F32()...)
}

// off compares gradients with references: relative L2 errors of all together, and of the worst tensor.
func off(t testing.TB, got map[string][]float32, want map[string][]float64) (all, worst float64, which string) {
	t.Helper()
	var num, den float64
	for name, g := range got {
		w, ok := want[name]
		if !ok || len(w) != len(g) {
			t.Fatalf("%s: %d values, the reference has %d", name, len(g), len(w))
		}
		var n, d float64
		for i := range g {
			x := float64(g[i]) - w[i]
			n, d = n+x*x, d+w[i]*w[i]
		}
		num, den = num+n, den+d
		if e := math.Sqrt(n / d); !(e <= worst) {
			worst, which = e, name
		}
	}
	return math.Sqrt(num / den), worst, which
}

// Gradients of every golden model by all base parameters, and by its adapters, against the float64 references. The log holds the table of docs/numerics.md:
// go test -v -run GradientParity ./forward/transformer
func TestGradientParity(t *testing.T) {
	var table strings.Builder
	table.WriteString("| model | parameters | kernel | gradients, all | worst tensor |\n| --- | --- | --- | --- | --- |\n")
	golden.Kernels(t, func(t *testing.T, kernel string) {
		for _, c := range golden.Cases {
			folder := golden.FS(t, c.Model)
			for _, what := range []string{"", "adapter-a", "adapter-b"} {
				file := strings.TrimSuffix("gradients."+what, ".") + ".safetensors"
				if _, err := fs.Stat(folder, file); err != nil || c.Config != "config.json" {
					continue
				}
				t.Run(c.Model+"/"+what, func(t *testing.T) {
					m := golden.Load(t, folder, golden.Options{Threads: 2})
					requests := golden.Requests(t, folder)
					b := pack(t, golden.Inputs(requests), fullSharing)
					b.Grad = true
					if what != "" {
						sub, err := fs.Sub(folder, what)
						if err != nil {
							t.Fatal(err)
						}
						b.Adapter = adapter(t, m, sub)
					}
					grads := golden.Cotangents(requests, golden.Tensors(t, folder, "gradients.safetensors"))
					_, vector := backward(t, m, b, grads)
					var got map[string][]float32
					if what == "" {
						got = map[string][]float32{}
						f32 := device.MemOf(bytesOf(vector))
						for i, p := range m.Params() {
							got[p.Name] = m.BaseValues(f32, i)
						}
					} else {
						got = golden.Named(m.Modules(), b.Adapter, vector)
					}
					all, worst, which := off(t, got, golden.Tensors(t, folder, file))
					fmt.Fprintf(&table, "| %s | %s | %s | %.1e | %.1e `%s` |\n", c.Model, what, kernel, all, worst, which)
					if !(all <= 2e-5) || !(worst <= 5e-5) {
						t.Errorf("gradients are off by %.2e, the worst tensor by %.2e: %s", all, worst, which)
					}
				})
			}
		}
	})
	t.Logf("relative errors of gradients against float64\n%s", table.String())
}

func bytesOf(x []float32) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(x))), 4*len(x))
}

// sameBits says where two vectors differ.
func sameBits(t testing.TB, what string, got, want []float32) {
	t.Helper()
	for i := range want {
		if math.Float32bits(got[i]) != math.Float32bits(want[i]) {
			t.Errorf("%s: element %d is %v instead of %v", what, i, got[i], want[i])
			return
		}
	}
	if len(got) != len(want) {
		t.Errorf("%s: %d elements instead of %d", what, len(got), len(want))
	}
}

// Gradients have the same bits on any number of threads and whatever is kept for the backward; outputs have those of a pass without gradients. Plans that share
// less give nearly the same gradients.
func TestGradientsDoNotDependOnThreadsOrRetention(t *testing.T) {
	for _, c := range []struct{ model, adapter string }{{"qwen3-tiny", ""}, {"qwen3-tiny", "adapter-a"}, {"llama3-tiny", "adapter-b"}, {"mistral-tiny", ""}, {"gemma3-tiny", ""}, {"qwen2-tiny", ""}} {
		t.Run(c.model+"/"+c.adapter, func(t *testing.T) {
			folder := golden.FS(t, c.model)
			requests := golden.Requests(t, folder)
			grads := golden.Cotangents(requests, golden.Tensors(t, folder, "gradients.safetensors"))
			var first []float32
			var outputs []golden.Answer
			for threads := 1; threads <= 3; threads++ {
				m := golden.Load(t, folder, golden.Options{Threads: threads})
				batch := func(how layout) *forward.Batch {
					b := pack(t, golden.Inputs(requests), how)
					if c.adapter != "" {
						sub, err := fs.Sub(folder, c.adapter)
						if err != nil {
							t.Fatal(err)
						}
						b.Adapter = adapter(t, m, sub)
					}
					return b
				}
				if first == nil {
					b := batch(fullSharing)
					outputs = runBatch(t, m, b)
				}
				for _, keep := range []forward.Retention{"", forward.Stored, forward.Layer, forward.Replay} {
					b := batch(fullSharing)
					b.Grad, b.Keep = true, keep
					answers, vector := backward(t, m, b, grads)
					what := fmt.Sprintf("%d threads, %s", threads, keep)
					if first == nil {
						first = vector
					}
					sameBits(t, what, vector, first)
					for i := range answers {
						if d := golden.Diff(outputs[i], answers[i]); d != "" {
							t.Errorf("%s: output %d: %s", what, i, d)
						}
					}
				}
				b := batch(noSharing)
				b.Grad = true
				_, vector := backward(t, m, b, grads)
				var n, d float64
				for i := range first {
					x := float64(vector[i]) - float64(first[i])
					n, d = n+x*x, d+float64(first[i])*float64(first[i])
				}
				if e := math.Sqrt(n / d); !(e <= 1e-5) {
					t.Errorf("%d threads: gradients without sharing are %.2e off", threads, e)
				}
			}
		})
	}
}

// A base model that is trained keeps its parameters as float32, and gives the same bits: outputs and gradients. Its vector has the layout of the gradients.
func TestTrainedBaseModel(t *testing.T) {
	for _, model := range []string{"qwen2-tiny", "qwen3-sharded-bf16", "llama3-tiny"} {
		folder := golden.FS(t, model)
		requests := golden.Requests(t, folder)
		grads := golden.Cotangents(requests, golden.Tensors(t, folder, "gradients.safetensors"))
		var outputs [2][]golden.Answer
		var vectors [2][]float32
		for i, trained := range []bool{false, true} {
			m := golden.Load(t, folder, golden.Options{Base: trained})
			b := pack(t, golden.Inputs(requests), fullSharing)
			b.Grad = true
			outputs[i], vectors[i] = backward(t, m, b, grads)
			if !trained {
				if m.BaseVector().Bytes() != 0 {
					t.Errorf("%s: a vector without training", model)
				}
				continue
			}
			if n := m.BaseVector().Bytes(); n != int64(4*len(vectors[i])) {
				t.Errorf("%s: parameters of %d bytes, gradients of %d", model, n, 4*len(vectors[i]))
			}
			if err := m.TrainBase(); err == nil {
				t.Errorf("%s: made trainable when it was placed", model)
			}
			want := golden.Tensors(t, folder, "model.safetensors")
			for j, p := range m.Params() {
				if w, ok := want[p.Name]; ok {
					for k, v := range m.BaseValues(m.BaseVector(), j) {
						if float64(v) != w[k] {
							t.Fatalf("%s: %s[%d] is %v instead of %v", model, p.Name, k, v, w[k])
						}
					}
				}
			}
		}
		sameBits(t, model, vectors[1], vectors[0])
		for i := range outputs[0] {
			if d := golden.Diff(outputs[0][i], outputs[1][i]); d != "" {
				t.Errorf("%s: output %d: %s", model, i, d)
			}
		}
	}
}
