package transformer_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/trainerrank/engine/device"
	"github.com/trainerrank/engine/forward"
	"github.com/trainerrank/engine/forward/kernel"
	"github.com/trainerrank/engine/forward/transformer"
	"github.com/trainerrank/engine/internal/golden"
	"github.com/trainerrank/engine/loader"
)

// watched is a device that remembers the blocks for weights.
type watched struct {
	device.Device
	weights []*device.Block
}

func (w *watched) Allocate(p device.Purpose, bytes int64) (*device.Block, error) {
	b, err := w.Device.Allocate(p, bytes)
	if err == nil && p == device.Weights {
		w.weights = append(w.weights, b)
	}
	return b, err
}

// The bytes of the weights do not depend on the staging, on the number of threads, or on the kernel that packs them.
func TestLoadedBytesDoNotDependOnHowTheyWereRead(t *testing.T) {
	for _, c := range golden.Cases {
		t.Run(c.Name(), func(t *testing.T) {
			folder := golden.FS(t, c.Model)
			var first []byte
			golden.Kernels(t, func(t *testing.T, _ string) {
				for _, threads := range []int{1, 3} {
					m := golden.Load(t, folder, golden.Options{Config: c.Config, Threads: threads, Unloaded: true})
					w := &watched{Device: m.Host}
					if err := m.Place(w); err != nil {
						t.Fatal(err)
					}
					least := m.MinStaging()
					for _, staging := range []int64{least, 2*least + 4096, 1 << 20, m.Staging(64 << 20), 0} {
						for _, b := range w.weights {
							for i := range b.Mem().Raw() {
								b.Mem().Raw()[i] = 0xa5
							}
						}
						m.Host.ResetPeak()
						if err := m.Load(t.Context(), staging, nil); err != nil {
							t.Fatal(err)
						}
						if used := m.Host.Stats().Peak[device.InFlight]; staging > 0 && used > device.RoundPages(staging) {
							t.Errorf("%d bytes in flight, %d allowed", used, staging)
						}
						got := w.weights[0].Mem().Raw()
						if first == nil {
							first = bytes.Clone(got)
						}
						if !bytes.Equal(got, first) {
							t.Errorf("%d threads, %d bytes of staging: other bytes", threads, staging)
						}
					}
				}
			})
		})
	}
}

func TestLoadReportsProgress(t *testing.T) {
	m := golden.Load(t, golden.FS(t, "qwen2-tiny"), golden.Options{Unloaded: true})
	if err := m.Place(m.Host); err != nil {
		t.Fatal(err)
	}
	var last, all int64
	err := m.Load(t.Context(), m.MinStaging(), func(done, total int64) {
		if done <= last || done > total || (all != 0 && total != all) {
			t.Errorf("progress %d of %d after %d of %d", done, total, last, all)
		}
		last, all = done, total
	})
	if err != nil || last != all || all == 0 {
		t.Errorf("%v, %d of %d bytes at the end", err, last, all)
	}
}

func TestStaging(t *testing.T) {
	for _, threads := range []int{1, 2, 5} {
		m := golden.Load(t, golden.FS(t, "qwen2-tiny"), golden.Options{Threads: threads, Unloaded: true})
		least := m.MinStaging()
		for _, limit := range []int64{0, 1, least - 1, least, least + 1, 2 * least, 3*least + 77, 1 << 24, 1 << 40} {
			got := m.Staging(limit)
			if got < least || got > max(least, limit) || got%device.PageSize != 0 {
				t.Errorf("%d threads: staging %d for a limit of %d, the least being %d", threads, got, limit, least)
			}
		}
		if err := m.Place(m.Host); err != nil {
			t.Fatal(err)
		}
		before := m.Host.Stats()
		if err := m.Load(t.Context(), least-1, nil); err == nil || !strings.Contains(err.Error(), fmt.Sprint(least)) {
			t.Errorf("one byte below the least: %v", err)
		}
		if d := cmp.Diff(before.InUse, m.Host.Stats().InUse); d != "" {
			t.Errorf("a refused load left something:\n%s", d)
		}
	}
}

// A load that is cancelled gives its staging back; what it read counts for nothing, and it can be done again.
func TestCancelledLoadLeavesTheCountersAsTheyWere(t *testing.T) {
	folder := golden.FS(t, "qwen2-tiny")
	m := golden.Load(t, folder, golden.Options{Threads: 2, Unloaded: true})
	if err := m.Place(m.Host); err != nil {
		t.Fatal(err)
	}
	before := m.Host.Stats()
	for _, at := range []int64{0, 1, 50_000} {
		ctx, cancel := context.WithCancel(t.Context())
		if at == 0 {
			cancel()
		}
		err := m.Load(ctx, m.MinStaging(), func(done, _ int64) {
			if done >= at {
				cancel()
			}
		})
		cancel()
		if !errors.Is(err, context.Canceled) {
			t.Errorf("cancelled after %d bytes: %v", at, err)
		}
		now := m.Host.Stats()
		if d := cmp.Diff([]any{before.InUse, before.Allocated, before.Blocks}, []any{now.InUse, now.Allocated, now.Blocks}); d != "" {
			t.Errorf("counters before (-) and after (+) a cancelled load:\n%s", d)
		}
		b := pack(t, []forward.Input{{Tokens: []int32{1}, TopK: 1}}, fullSharing)
		if b.Arena, err = m.Host.Reserve(device.Sizes{device.Outputs: 4096, device.Scratch: 1 << 20}); err != nil {
			t.Fatal(err)
		}
		if _, err := m.Forward(t.Context(), b); err == nil || !strings.Contains(err.Error(), "not loaded") {
			t.Errorf("a model that is loaded in part ran: %v", err)
		}
		b.Arena.(*device.Reservation).Release()
	}
	if err := m.Load(t.Context(), m.MinStaging(), nil); err != nil {
		t.Fatal(err)
	}
	requests := golden.Requests(t, folder)
	if w := golden.References(t, "qwen2-tiny", folder).Errors(t, requests, run(t, m, golden.Inputs(requests), fullSharing)); w.Logprob > 2e-5 {
		t.Errorf("logprobs are off by %v", w.Logprob)
	}
}

func TestPlaceAndClose(t *testing.T) {
	m := golden.Load(t, golden.FS(t, "qwen2-tiny"), golden.Options{Unloaded: true})
	empty := m.Host.Stats()
	if err := m.Load(t.Context(), 1<<20, nil); err == nil || !strings.Contains(err.Error(), "no place") {
		t.Errorf("load without a place: %v", err)
	}
	small, err := device.NewHost(m.WeightBytes() - 1)
	if err != nil {
		t.Fatal(err)
	}
	device.CheckLeaks(t, small)
	var oom *device.OutOfMemoryError
	if err := m.Place(small); !errors.As(err, &oom) || oom.AskedBytes != m.WeightBytes() {
		t.Errorf("a device that is a byte too small: %v", err)
	}
	if m.Device() != nil {
		t.Error("a failed Place left its device")
	}
	if err := m.Place(m.Host); err != nil {
		t.Fatal(err)
	}
	placed := m.Host.Stats()
	if placed.InUse[device.Weights] != m.WeightBytes() {
		t.Errorf("in use: %v", placed.InUse)
	}
	if err := m.Place(m.Host); err == nil || !strings.Contains(err.Error(), "placed already") {
		t.Errorf("second place: %v", err)
	}
	if now := m.Host.Stats(); now != placed {
		t.Errorf("a second place changed the counters: %v", now)
	}
	for range 2 {
		m.Close()
		if now := m.Host.Stats(); now.Allocated != empty.Allocated || now.Blocks != empty.Blocks {
			t.Errorf("after Close: %v", now)
		}
	}
}

// A tensor stored in a type that is not computed with is refused by its name, before anything is read.
func TestOtherTypesAreRefusedByName(t *testing.T) {
	const odd = "model.layers.1.self_attn.k_proj.weight"
	for _, dtype := range []string{"F64", "I32", "I16"} {
		folder := golden.Synthetic{Config: golden.Wide, DType: "BF16", Change: func(name string, _ []float32, d *string) {
			if name == odd {
				*d = dtype
			}
		}}.Write(t)
		m, err := golden.Open(folder, "config.json", nil)
		var e *transformer.DTypeError
		if !errors.As(err, &e) || e.Tensor != odd || e.DType != dtype || e.Hint() == "" || !strings.Contains(e.Error(), odd) {
			t.Errorf("%s: %v", dtype, err)
		}
		if m != nil {
			m.Close()
		}
	}
}

// Values that are not finite are loaded and said, by tensor. They harm the requests that touch them, from there on, and no others,
// neither of the same batch nor below the same prefix.
func TestValuesThatAreNotFiniteAreSaidAndStayWhereTheyAre(t *testing.T) {
	const token, embedding = 77, "model.embed_tokens.weight"
	spoil := map[string]float32{"F32": float32(math.NaN()), "BF16": float32(math.Inf(1)), "F16": float32(math.NaN())}
	for dtype, value := range spoil {
		t.Run(dtype, func(t *testing.T) {
			s := golden.Synthetic{Config: golden.Wide, DType: dtype, Seed: 3}
			clean := golden.Load(t, s.Write(t), golden.Options{Threads: 2})
			s.Change = func(name string, v []float32, _ *string) {
				if name == embedding {
					v[token*344+5] = value
				}
			}
			m := golden.Load(t, s.Write(t), golden.Options{Threads: 2})
			want := []string{"tensor " + embedding + " holds values that are NaN or infinite"}
			if d := cmp.Diff(want, m.Notes()); d != "" {
				t.Errorf("notes:\n%s", d)
			}
			if len(clean.Notes()) > 0 {
				t.Errorf("notes on sound weights: %q", clean.Notes())
			}
			// The requests share a prefix and differ in their last token; some hold the spoilt one, in places of their own.
			r := golden.Rand(11)
			var inputs []forward.Input
			for len(inputs) < 12 {
				in := golden.Wants(r, 1111, slices.Repeat([]int32{9, 8, 7}, 1+r.IntN(30)))
				if !in.Active() {
					continue
				}
				in.Tokens[len(in.Tokens)-1] = int32(100 + len(inputs))
				if len(inputs)%3 == 0 {
					in.Tokens[r.IntN(len(in.Tokens))] = token
				}
				inputs = append(inputs, in)
			}
			sound := run(t, clean, inputs, fullSharing)
			for _, how := range []layout{fullSharing, noSharing} { // below a prefix of others, and beside own tokens
				spoilt := run(t, m, inputs, how)
				for i, in := range inputs {
					d := golden.Diff(sound[i], spoilt[i])
					n, at := len(in.Tokens), slices.Index(in.Tokens, token)
					switch {
					case at < 0 && d != "":
						t.Errorf("request %d is changed by a neighbour:\n%s", i, d)
					case at >= 0 && d == "":
						t.Errorf("request %d holds the spoilt token and does not show it", i)
					case at >= 0:
						if d := golden.Diff(sound[i].First(at, n), spoilt[i].First(at, n)); d != "" {
							t.Errorf("request %d is changed before position %d, where it is spoilt:\n%s", i, at, d)
						}
					}
				}
			}
		})
	}
}

// Every tensor that holds an oddity is named, vectors and matrices, also in the last, short panel.
func TestOddValuesAreFoundWhereverTheyAre(t *testing.T) {
	places := map[string]int{ // 0: the first value; -1: the last
		"model.layers.0.input_layernorm.weight": -1, "model.layers.0.self_attn.q_proj.weight": 0,
		"model.layers.1.mlp.down_proj.weight": -1, "model.norm.weight": 0, "lm_head.weight": -1,
	}
	for _, dtype := range []string{"F32", "BF16", "F16"} {
		folder := golden.Synthetic{Config: golden.Wide, DType: dtype, Change: func(name string, v []float32, _ *string) {
			if at, ok := places[name]; ok {
				v[(at+len(v))%len(v)] = float32(math.Inf(-1))
			}
		}}.Write(t)
		golden.Kernels(t, func(t *testing.T, _ string) {
			m := golden.Load(t, folder, golden.Options{Threads: 2})
			var got, want []string
			for _, n := range m.Notes() {
				got = append(got, strings.Fields(n)[1])
			}
			for _, p := range m.Decoder().Params() {
				if _, ok := places[p.Name]; ok {
					want = append(want, p.Name)
				}
			}
			if d := cmp.Diff(want, got); d != "" {
				t.Errorf("%s: tensors that should be named (-) and are (+):\n%s", dtype, d)
			}
		})
	}
}

// Every copier, at the smallest budget and far above it, packs the same bytes; one byte of staging less is refused, and nothing is read.
func TestEveryCopierPacksTheSameBytes(t *testing.T) {
	for _, model := range []string{"qwen3-sharded-bf16", "llama3-tiny"} {
		dir := t.TempDir()
		if err := os.CopyFS(dir, golden.FS(t, model)); err != nil {
			t.Fatal(err)
		}
		var first []byte
		for _, name := range loader.CopierNames() {
			for _, threads := range []int{1, 3} {
				host, err := device.NewHost(1 << 30)
				if err != nil {
					t.Fatal(err)
				}
				device.CheckLeaks(t, host)
				backend, err := kernel.NewHost(threads)
				if err != nil {
					t.Fatal(err)
				}
				m, err := transformer.OpenFolder(dir, backend)
				if err != nil {
					t.Fatal(err)
				}
				w := &watched{Device: host}
				if err := m.Place(w); err != nil {
					t.Fatal(err)
				}
				copier, err := loader.NewCopier(name, threads)
				if err != nil {
					t.Fatal(err)
				}
				var e *loader.BudgetInfeasibleError
				if _, err := m.LoadBy(t.Context(), copier, 1, nil); name != loader.CopierMmap && (!errors.As(err, &e) || host.Stats().Peak[device.InFlight] != 0) {
					t.Fatalf("%s: one byte of staging: %v", name, err)
				}
				least := int64(1)
				if e != nil {
					least = e.Minimum - m.WeightBytes()
					if _, err := m.LoadBy(t.Context(), copier, least-1, nil); !errors.As(err, &e) || e.MissingBytes() != 1 || e.File == "" || e.Tensor == "" {
						t.Errorf("%s: a byte below the least: %v", name, err)
					}
				}
				if name == loader.CopierPread && least != m.MinStaging() {
					t.Errorf("the plan needs %d bytes of staging, MinStaging says %d", least, m.MinStaging())
				}
				for _, staging := range []int64{least, least + 5000, 64 << 20, 0} {
					clear(w.weights[0].Mem().Raw())
					host.ResetPeak()
					report, err := m.LoadBy(t.Context(), copier, staging, nil)
					if err != nil {
						t.Fatalf("%s, %d bytes of staging: %v", name, staging, err)
					}
					used := host.Stats()
					if report.Peak != used.PeakInUse || report.Predicted != report.Peak || staging > 0 && used.Peak[device.InFlight] > max(staging, 0) {
						t.Errorf("%s, %d bytes of staging: the device saw %d, %d of it in flight; predicted %d, observed %d", name, staging, used.PeakInUse,
							used.Peak[device.InFlight], report.Predicted, report.Peak)
					}
					got := w.weights[0].Mem().Raw()
					if first == nil {
						first = bytes.Clone(got)
					}
					if !bytes.Equal(got, first) {
						t.Errorf("%s, %d threads, %d bytes of staging: other bytes", name, threads, staging)
					}
				}
				m.Close()
				backend.Close()
			}
		}
	}
}
