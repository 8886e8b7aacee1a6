// Command train times the forward and the backward of a training call with a LoRA adapter on every projection, and says what the forward keeps. It is the
// engine's side of bench/train.py.
//
//	go run ./bench/train --model DIR --rows 8 --tokens 512 --rank 16 --threads 2
//
// Tokens and adapter are those of bench/train_peer.py, computed from their place alone; the first --prefix tokens are the same in all rows. Loss and norm of the gradient are
// printed so that they can be held against each other. Prints one JSON object, the best of --rounds; with --interactive first a line when it is warm, and then
// one per line of standard input.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"math"
	"os"
	"runtime/pprof"
	"time"

	"golang.org/x/sys/unix"

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
	Seconds          float64 `json:"seconds"`     // of both
	CPU              float64 `json:"cpu_seconds"` // of all threads
	Loss             float64 `json:"loss"`        // the sum of the logprobs
	GradientNorm     float64 `json:"gradient_norm"`
	RetainedPerToken float64 `json:"retained_bytes_per_packed_token"`
	Required         int64   `json:"required_bytes"`
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
		start, cpu := time.Now(), cpuSeconds()
		b.Arena = res
		pass, err := m.Forward(context.Background(), b)
		if err != nil {
			return r, err
		}
		middle := time.Now()
		vector, err := pass.Graph.Backward(context.Background(), back, grads)
		if err != nil {
			return r, err
		}
		end, cpu := time.Now(), cpuSeconds()-cpu
		var loss, squares float64
		for i := range pass.Outputs {
			for _, v := range pass.Outputs[i].TargetLogprobs.Data().([]float32) {
				loss += float64(v)
			}
		}
		for _, v := range vector.F32() {
			squares += float64(v) * float64(v)
		}
		return report{
			Kernel: backend.Name(), Threads: backend.Threads(), Retention: *keep, Tokens: *rows * *tokens, Packed: len(b.Tokens),
			Forward: middle.Sub(start).Seconds(), Backward: end.Sub(middle).Seconds(), Seconds: end.Sub(start).Seconds(), CPU: cpu,
			Loss: loss, GradientNorm: math.Sqrt(squares), RetainedPerToken: float64(f.Retained) / float64(len(b.Tokens)), Required: f.Required(), Footprint: f.String(),
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
		if err := out.Encode(map[string]any{"kernel": backend.Name(), "threads": backend.Threads()}); err != nil {
			return err
		}
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
		if best.Seconds == 0 || r.Seconds < best.Seconds {
			best = r
		}
	}
	return out.Encode(best)
}

// mix is murmur3's finalizer: a number that looks random, from its place.
func mix(x uint32) uint32 {
	x = (x ^ x>>16) * 0x85ebca6b
	x = (x ^ x>>13) * 0xc2b2ae35
	return x ^ x>>16
}

// cpuSeconds is the processor time of the process so far.
func cpuSeconds() float64 {
	var u unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()).Seconds()
}

// batch packs rows of tokens, every next token scored, with cotangents of 1.
func batch(m *transformer.Model, rows, tokens, prefix int) (*forward.Batch, []forward.OutputGrad, error) {
	vocab := uint32(m.Spec().Vocabulary)
	b := new(forward.Batch)
	var all [][]int32
	var grads []forward.OutputGrad
	for i := range rows {
		in := new(forward.Input)
		for j := range tokens {
			at := i*tokens + j
			if j < prefix {
				at = j
			}
			in.Tokens = append(in.Tokens, int32(mix(uint32(at))%vocab))
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

// adapter is one of values up to 0.03 on every projection.
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
	value := func(module, matrix, i int) float32 {
		return float32((float64(mix(uint32(2*module+matrix)<<20+uint32(i)))/(1<<31) - 1) * 0.03)
	}
	for _, l := range a.LoRA {
		mod := m.Modules()[l.Module]
		matrix := a.Params.Slice(l.A, int64(rank*mod.In)*4).F32()
		for i := range matrix {
			matrix[i] = value(l.Module, 0, i)
		}
		matrix = a.Params.Slice(l.B, int64(rank*mod.Out)*4).F32()
		for i := range matrix { // files hold the transpose
			matrix[i%rank*mod.Out+i/rank] = value(l.Module, 1, i)
		}
	}
	return a, nil
}
