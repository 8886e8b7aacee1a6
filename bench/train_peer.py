#!/usr/bin/env python3
"""Forward and backward of a training call with PyTorch and PEFT, as their users would: the other side of bench/train.py.

    python train_peer.py --model DIR --rows 8 --tokens 512 --rank 16 --threads 2 --attn sdpa --batch-size 8 --loss cross_entropy

float32 (weights widened from what the file stores), LoRA on all seven projections without dropout, use_cache off, the sum of the next
tokens' logprobs as loss. Rows go --batch-size at a time, each batch forward and backward before the next, so that gradients are accumulated. Tokens
and adapter are those of bench/train/main.go, computed from their place alone; loss and norm of the gradient are printed so that they can be held against
each other. --loss: `cross_entropy` of all logits, or `log_softmax` of them and a gather.

Prints one JSON object, that of the fastest call; with --interactive a first line when it is warm, and then one per line of standard input.
`saved_bytes` are the storages that autograd keeps for the backward (torch.autograd.graph.saved_tensors_hooks), each counted once, parameters and buffers
left out; `growth_bytes` is how far the resident set rises above what it was after load, in the first run.
"""
import argparse
import json
import os
import sys
import time

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def mix(np, x):
    """murmur3's finalizer of 32 bits."""
    x = x.astype(np.uint32)
    for shift, factor in ((16, 0x85ebca6b), (13, 0xc2b2ae35)):
        x ^= x >> np.uint32(shift)
        x *= np.uint32(factor)
    return x ^ (x >> np.uint32(16))


def status(field):
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith(field + ":"))


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--model", required=True)
    ap.add_argument("--rows", type=int, default=8)
    ap.add_argument("--tokens", type=int, default=512)
    ap.add_argument("--rank", type=int, default=16)
    ap.add_argument("--threads", type=int, required=True)
    ap.add_argument("--attn", choices=("eager", "sdpa"), default="sdpa")
    ap.add_argument("--batch-size", type=int, default=8)
    ap.add_argument("--loss", choices=("cross_entropy", "log_softmax"), default="cross_entropy")
    ap.add_argument("--runs", type=int, default=1, help="calls after the first, which warms up")
    ap.add_argument("--interactive", action="store_true")
    args = ap.parse_args()

    os.environ["HF_HUB_OFFLINE"], os.environ["TRANSFORMERS_VERBOSITY"] = "1", "error"
    import numpy as np
    import peft
    import torch
    import transformers
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    torch.set_num_interop_threads(1)
    base = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation=args.attn)
    vocab = base.config.vocab_size
    model = peft.get_peft_model(base, peft.LoraConfig(
        r=args.rank, lora_alpha=2 * args.rank, lora_dropout=0.0, target_modules=PROJECTIONS, task_type="CAUSAL_LM"))
    model.train()
    trained = []
    with torch.no_grad():
        for i, layer in enumerate(base.model.layers):
            for j, name in enumerate(PROJECTIONS):
                m = getattr(layer.self_attn if j < 4 else layer.mlp, name)
                for k, w in enumerate((m.lora_A["default"].weight, m.lora_B["default"].weight)):
                    at = np.arange(w.numel(), dtype=np.uint32) + np.uint32(((i * len(PROJECTIONS) + j) * 2 + k) << 20)
                    values = (mix(np, at).astype(np.float64) / 2**31 - 1) * 0.03
                    w.copy_(torch.from_numpy(values.astype(np.float32).reshape(w.shape)))
                    trained.append(w)
    ids = mix(np, np.arange(args.rows * args.tokens, dtype=np.uint32)) % np.uint32(vocab)
    ids = torch.from_numpy(ids.astype(np.int64)).view(args.rows, args.tokens)

    def batch_loss(rows):
        logits = model(input_ids=rows, use_cache=False).logits[:, :-1]
        labels = rows[:, 1:]
        if args.loss == "cross_entropy":
            return -torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return torch.log_softmax(logits, -1).gather(-1, labels[..., None]).sum()

    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}

    def once(kept=None):
        """One call; `kept` receives the storages that autograd saves of the first batch."""
        def pack(t):
            s = t.untyped_storage()
            if s.data_ptr() not in own:
                kept[s.data_ptr()] = s.nbytes()
            return t

        model.zero_grad(set_to_none=True)
        total, cpu = 0.0, time.process_time()
        forward = backward = 0.0
        for i, rows in enumerate(ids.split(args.batch_size)):
            a = time.perf_counter()
            if kept is not None and i == 0:
                with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                    loss = batch_loss(rows)
            else:
                loss = batch_loss(rows)
            b = time.perf_counter()
            loss.backward()
            c = time.perf_counter()
            total, forward, backward = total + float(loss.detach()), forward + b - a, backward + c - b
        norm = float(torch.stack([w.grad.double().square().sum() for w in trained]).sum().sqrt())
        return {"seconds": forward + backward, "forward_seconds": forward, "backward_seconds": backward,
                "cpu_seconds": time.process_time() - cpu, "loss": total, "gradient_norm": norm}

    loaded = status("VmRSS")
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")
    kept = {}
    calls = [once(kept)]
    about = {"torch": torch.__version__, "peft": peft.__version__, "transformers": transformers.__version__,
             "cpu_capability": torch.backends.cpu.get_cpu_capability(), "threads": args.threads, "attn": args.attn,
             "batch_size": args.batch_size, "loss_of": args.loss, "tokens": ids.numel(), "growth_bytes": status("VmHWM") - loaded,
             "saved_bytes_per_token": sum(kept.values()) / min(ids.numel(), args.batch_size * args.tokens)}
    if args.interactive:
        print(json.dumps(about), flush=True)
        for _ in sys.stdin:
            print(json.dumps(once()), flush=True)
    else:
        calls += [once() for _ in range(args.runs)]
        print(json.dumps({**about, **min(calls, key=lambda r: r["seconds"])}))


if __name__ == "__main__":
    main()
