package golden

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/loader"
)

// Tensors reads a file of float32 or float64 tensors.
func Tensors(t testing.TB, folder fs.FS, name string) map[string][]float64 {
	t.Helper()
	data, err := fs.ReadFile(folder, name)
	if errors.Is(err, fs.ErrNotExist) && name == "model.safetensors" {
		return nil // in several files
	}
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "tensors.safetensors")
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	set, err := loader.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer set.Close()
	all := map[string][]float64{}
	for _, x := range set.Files[0].Tensors {
		raw := make([]byte, x.Bytes)
		if err := set.ReadAt(x, raw, 0); err != nil {
			t.Fatal(err)
		}
		m := device.MemOf(raw)
		switch x.DType {
		case loader.F64:
			all[x.Name] = append([]float64(nil), m.F64()...)
		case loader.F32:
			for _, v := range m.F32() {
				all[x.Name] = append(all[x.Name], float64(v))
			}
		}
	}
	return all
}

// LoRAName is the name of a matrix, A or B, in adapter files.
func LoRAName(m forward.Module, matrix string) string {
	return "base_model.model." + m.Path + ".lora_" + matrix + ".weight"
}

// Named takes a vector of an adapter's gradients apart, as in adapter files.
func Named(modules []forward.Module, a *forward.Adapter, vector []float32) map[string][]float32 {
	all := map[string][]float32{}
	for _, l := range a.LoRA {
		mod := modules[l.Module]
		all[LoRAName(mod, "A")] = vector[l.A/4:][:l.Rank*mod.In]
		b := make([]float32, l.Rank*mod.Out)
		for i := range b {
			b[i] = vector[int(l.B/4)+i%l.Rank*mod.Out+i/l.Rank]
		}
		all[LoRAName(mod, "B")] = b
	}
	return all
}

// Cotangents are those of the golden loss.
func Cotangents(requests []Request, ref map[string][]float64) []forward.OutputGrad {
	f32 := func(name string) []float32 {
		var list []float32
		for _, v := range ref[name] {
			list = append(list, float32(v))
		}
		return list
	}
	grads := make([]forward.OutputGrad, len(requests))
	for i, r := range requests {
		grads[i] = forward.OutputGrad{TargetLogprobs: f32(r.ID + ".coefficients"), Logits: f32(r.ID + ".d_logits"), HiddenStates: f32(r.ID + ".d_hidden_states")}
	}
	return grads
}

// Sub is a folder of a folder.
func Sub(t testing.TB, folder fs.FS, name string) fs.FS {
	t.Helper()
	sub, err := fs.Sub(folder, name)
	if err != nil {
		t.Fatal(err)
	}
	return sub
}

// Dir is the folder of a golden model that lies outside the repository. The test is skipped if there is none.
func Dir(t testing.TB, model string) string {
	t.Helper()
	dir := filepath.Join(shared(), model)
	if _, err := os.Stat(dir); err != nil {
		t.Skipf("SKIPPED: no golden model %s beside this checkout: %v", model, err)
	}
	return dir
}
