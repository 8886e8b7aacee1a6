package main

import (
	"encoding/binary"
	"encoding/json"
	"os"
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
