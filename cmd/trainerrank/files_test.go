package main

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// savedTensor is a tensor as it lies in a safetensors file.
type savedTensor struct {
	name  string
	dtype string
	shape []int64
	data  []byte
}

type tensorEntry struct {
	DType   string   `json:"dtype"`
	Shape   []int64  `json:"shape"`
	Offsets [2]int64 `json:"data_offsets"`
}

// readTensors reads a sound safetensors file, in the order of names. It is not the loader, so that it can be held against it.
func readTensors(t testing.TB, path string) []savedTensor {
	t.Helper()
	data, err := os.ReadFile(path)
	must(t, err)
	n := binary.LittleEndian.Uint64(data)
	var header map[string]json.RawMessage
	must(t, json.Unmarshal(data[8:8+n], &header))
	var list []savedTensor
	for name, raw := range header {
		if name == "__metadata__" {
			continue
		}
		var e tensorEntry
		must(t, json.Unmarshal(raw, &e))
		list = append(list, savedTensor{name, e.DType, e.Shape, data[8+n:][e.Offsets[0]:e.Offsets[1]]})
	}
	slices.SortFunc(list, func(a, b savedTensor) int { return strings.Compare(a.name, b.name) })
	return list
}

// writeTensors writes a safetensors file.
func writeTensors(t testing.TB, path string, list []savedTensor) {
	t.Helper()
	header := map[string]tensorEntry{}
	var payload []byte
	for _, x := range list {
		at := int64(len(payload))
		payload = append(payload, x.data...)
		header[x.name] = tensorEntry{x.dtype, x.shape, [2]int64{at, int64(len(payload))}}
	}
	text, err := json.Marshal(header)
	must(t, err)
	data := binary.LittleEndian.AppendUint64(nil, uint64(len(text)))
	must(t, os.WriteFile(path, slices.Concat(data, text, payload), 0o644))
}

// Whatever a byte of the header is changed to, or wherever the file is cut: the model is scored, or there is one clear error.
func TestRandomDamageIsAnErrorOrNone(t *testing.T) {
	dir := t.TempDir()
	copyModel(t, dir)
	path := filepath.Join(dir, "model.safetensors")
	sound, err := os.ReadFile(path)
	must(t, err)
	header := int(binary.LittleEndian.Uint64(sound))
	rng := rand.New(rand.NewPCG(3, 4))
	refused := 0
	for i := range 150 {
		data := slices.Clone(sound)
		switch i % 5 {
		case 0:
			data = data[:rng.IntN(len(data))]
		case 1:
			data[rng.IntN(8)] ^= 1 << rng.IntN(8)
		case 2:
			data[8+rng.IntN(header)] = byte(rng.Uint32())
		default:
			data[8+rng.IntN(header)] = byte(32 + rng.IntN(95))
		}
		must(t, os.WriteFile(path, data, 0o644))
		o := run(t, "score", "--model", dir, "--requests", filepath.Join(dir, "requests.jsonl"))
		if o.code != exitDone && o.code != exitFailed {
			t.Errorf("damage %d: exit %d: %s", i, o.code, o.stderr)
		}
		if o.code == exitFailed {
			refused++
		}
		if i%5 < 2 && !bytes.Equal(data, sound) && o.code != exitFailed {
			t.Errorf("damage %d: exit %d", i, o.code)
		}
	}
	t.Logf("%d of 150 refused", refused)
}
