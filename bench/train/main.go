// Command train times the forward and the backward of a training call with a LoRA adapter on every projection, and says what the forward keeps. It is the
// engine's side of bench/train.py.
//
//	go run ./bench/train --model DIR --rows 8 --tokens 512 --rank 16 --threads 2
//
// Rows are random tokens, of which the first --prefix are the same in all. Prints one JSON object; with --interactive first a line when it is warm, then
// it runs once per line read from standard input.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime/pprof"
	"time"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/forward/kernel"
	"github.com/trainerrank/engine/forward/prefixtree"
	"github.com/trainerrank/engine/forward/transformer"
)

type report struct {
	Kernel           string  `json:"kernel"`
	Threads          int     `json:"threads"`
	Retention        string  `json:"retention"`
	Tokens           int     `json:"tokens"`
	Packed           int     `json:"packed_tokens"`
	Forward          float64 `json:"forward_seconds"`
	Backward         float64 `json:"backward_seconds"`
	TokensPerSecond  float64 `json:"tokens_per_second"`
	RetainedPerToken float64 `json:"retained_bytes_per_packed_token"`
	Footprint        string  `json:"footprint"`
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "train:", err)
		os.Exit(1)
	}
}

func run() error {
	dir := flag.String("model", "", "model folder")
	rows := flag.Int("rows", 8, "sequences")
	tokens := flag.Int("tokens", 512, "tokens of each")
	prefix := flag.Int("prefix", 0, "tokens that all rows share")
	rank := flag.Int("rank", 16, "rank of the adapter")
	threads := flag.Int("threads", 0, "worker threads")
	keep := flag.String("retention", "stored", "stored, layer or replay")
	rounds := flag.Int("rounds", 3, "timed rounds")
	interactive := flag.Bool("interactive", false, "run once per line of standard input")
	profile := flag.String("cpuprofile", "", "write a profile")
	flag.Parse()

	backend, err := kernel.NewHost(*threads)
	if err != nil {
		return err
	}
	defer backend.Close()
	capacity, _ := device.DefaultCapacity()
	host, err := device.NewHost(capacity)
	if err != nil {
		return err
	}
	m, err := transformer.OpenFolder(*dir, backend)
	if err != nil {
		return err
	}
	defer m.Close()
	if err := m.Place(host); err != nil {
		return err
	}
	if err := m.Load(context.Background(), m.Staging(1<<30), nil); err != nil {
		return err
	}
	b, grads, err := batch(m, *rows, *tokens, *prefix)
	if err != nil {
		return err
	}
	if b.Adapter, err = adapter(m, host, *rank); err != nil {
		return err
	}
	b.Grad, b.Keep = true, forward.Retention(*keep)
	f, err := m.Rehearse(b)
	if err != nil {
		return err
	}
	once := func() (r report, err error) {
		res, err := host.Reserve(device.Sizes{device.Outputs: f.Outputs, device.Retained: f.Retained, device.Scratch: f.Scratch})
		if err != nil {
			return r, err
		}
		defer res.Release()
		back, err := host.Reserve(device.Sizes{device.Scratch: f.BackwardScratch, device.Gradients: f.Gradients})
		if err != nil {
			return r, err
		}
		defer back.Release()
		start := time.Now()
		b.Arena = res
		pass, err := m.Forward(context.Background(), b)
		if err != nil {
			return r, err
		}
		middle := time.Now()
		if _, err := pass.Graph.Backward(context.Background(), back, grads); err != nil {
			return r, err
		}
		end := time.Now()
		n := *rows * *tokens
		return report{
			Kernel: backend.Name(), Threads: backend.Threads(), Retention: *keep, Tokens: n, Packed: len(b.Tokens),
			Forward: middle.Sub(start).Seconds(), Backward: end.Sub(middle).Seconds(), TokensPerSecond: float64(n) / end.Sub(start).Seconds(),
			RetainedPerToken: float64(f.Retained) / float64(len(b.Tokens)), Footprint: f.String(),
		}, nil
	}
	if _, err := once(); err != nil { // warm
		return err
	}
	if *profile != "" {
		w, err := os.Create(*profile)
		if err != nil {
			return err
		}
		defer w.Close()
		if err := pprof.StartCPUProfile(w); err != nil {
			return err
		}
		defer pprof.StopCPUProfile()
	}
	out := json.NewEncoder(os.Stdout)
	if *interactive {
		fmt.Println("ready")
		for in := bufio.NewScanner(os.Stdin); in.Scan(); {
			r, err := once()
			if err != nil {
				return err
			}
			if err := out.Encode(r); err != nil {
				return err
			}
		}
		return nil
	}
	var best report
	for range *rounds {
		r, err := once()
		if err != nil {
			return err
		}
		if r.TokensPerSecond > best.TokensPerSecond {
			best = r
		}
	}
	return out.Encode(best)
}

// batch packs rows of random tokens, every next token scored, with cotangents of 1.
func batch(m *transformer.Model, rows, tokens, prefix int) (*forward.Batch, []forward.OutputGrad, error) {
	r := rand.New(rand.NewPCG(1, 2))
	vocab := int32(m.Spec().Vocabulary)
	shared := make([]int32, prefix)
	for i := range shared {
		shared[i] = r.Int32N(vocab)
	}
	b := new(forward.Batch)
	var all [][]int32
	var grads []forward.OutputGrad
	for range rows {
		in := &forward.Input{Tokens: append([]int32(nil), shared...)}
		for len(in.Tokens) < tokens {
			in.Tokens = append(in.Tokens, r.Int32N(vocab))
		}
		in.Targets = append(append(in.Targets, in.Tokens[1:]...), forward.IgnoreLabel)
		b.Requests, all = append(b.Requests, in), append(all, in.Tokens)
		g := forward.OutputGrad{TargetLogprobs: make([]float32, tokens)}
		for i := range g.TargetLogprobs {
			g.TargetLogprobs[i] = 1
		}
		grads = append(grads, g)
	}
	tree, err := prefixtree.Build(all)
	if err != nil {
		return nil, nil, err
	}
	b.Batch, err = tree.FullSharing().Pack(all)
	return b, grads, err
}

// adapter is one of random values on every projection.
func adapter(m *transformer.Model, host *device.Host, rank int) (*forward.Adapter, error) {
	var lora []forward.LoRA
	for i := range m.Modules() {
		lora = append(lora, forward.LoRA{Module: i, Rank: rank, Scale: 2})
	}
	a := forward.NewAdapter("bench", m.Modules(), lora)
	block, err := host.Allocate(device.Adapters, a.Bytes)
	if err != nil {
		return nil, err
	}
	a.Params = block.Mem()
	r := rand.New(rand.NewPCG(3, 4))
	for _, l := range a.LoRA {
		mod := m.Modules()[l.Module]
		for _, part := range [][]float32{a.Params.Slice(l.A, int64(rank*mod.In)*4).F32(), a.Params.Slice(l.B, int64(rank*mod.Out)*4).F32()} {
			for i := range part {
				part[i] = float32(r.NormFloat64()) * 0.02
			}
		}
	}
	return a, nil
}
