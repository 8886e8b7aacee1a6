#!/usr/bin/env python3
"""Run the same training call through PyTorch + PEFT (train_peer.py) and through the engine (bench/train), in turns, and print the ratios.

    go build -o train-bin ./bench/train
    python3 bench/train.py --ours ./train-bin --model SMOLLM2 --python VENV/bin/python --markdown table.md

A call is a forward and a backward of --rows sequences of --tokens tokens with LoRA on all seven projections, every next token scored.

How it is measured
- Each side is pinned with taskset to the first N of the CPUs that this process may use, for N threads, and stays loaded and warm.
- First every peer configuration (--peer, attention:batch size:loss) runs alone, in a process of its own: the fastest goes on, and growth of the resident set and
  bytes of saved tensors are taken from there. Then rounds alternate, the order turned round each time: one call of the peer, one of ours with everything stored, one that keeps the
  input of each layer, and one of a group of the same size whose rows share --prefix tokens.
- Seconds are wall time of forward and backward; beside them the processor time of all threads, which neighbours on the machine disturb less. A ratio is the median
  over rounds of the quotient within the round; the range stands beside it.
- Loss and norm of the gradient must agree to --tolerance: a time for another call says nothing.
- Bytes: ours are what the engine prices and takes (the arena is exact); the peer's are the storages that autograd saves, each once, without parameters.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys

import compare

HERE = os.path.dirname(os.path.abspath(__file__))
DEFAULT_PEERS = ["sdpa:8:cross_entropy", "sdpa:8:log_softmax", "eager:8:cross_entropy", "sdpa:1:cross_entropy", "sdpa:2:cross_entropy"]


class Side:
    """A process that is warm and runs one call per line that it is sent."""

    def __init__(self, name, threads, command, env=None):
        self.name = name
        self.process = subprocess.Popen(compare.pinned(threads, command), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.DEVNULL, env=compare.clean_env(env), text=True)
        self.about, self.calls = self.line(), []

    def line(self):
        text = self.process.stdout.readline()
        if not text:
            raise SystemExit(f"train: {self.name} ended with {self.process.wait()}")
        return json.loads(text)

    def once(self):
        self.process.stdin.write("run\n")
        self.process.stdin.flush()
        self.calls.append(self.line())

    def median(self, field="seconds"):
        return statistics.median(c[field] for c in self.calls)

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def ratio(a, b, field="seconds", by=1.0):
    """How many times as long a takes as b, divided by `by`."""
    return compare.ratio([c[field] / by for c in a.calls], [c[field] for c in b.calls])


def peer(args, config, threads):
    attn, batch, loss = config.split(":")
    return Side(f"peer {config}", threads, [
        args.python, os.path.join(HERE, "train_peer.py"), "--model", args.model, "--rows", str(args.rows), "--tokens", str(args.tokens), "--rank", str(args.rank),
        "--threads", str(threads), "--attn", attn, "--batch-size", batch, "--loss", loss, "--interactive"],
        {"ATEN_CPU_CAPABILITY": args.peer_capability} if args.peer_capability else None)


def ours(args, threads, retention="stored", prefix=0):
    return Side(f"ours {retention}", threads, [
        args.ours, "--model", args.model, "--rows", str(args.rows), "--tokens", str(args.tokens), "--rank", str(args.rank), "--threads", str(threads),
        "--retention", retention, "--prefix", str(prefix), "--interactive"], {"TRAINERRANK_KERNEL": args.kernel} if args.kernel else None)


def section(args, threads):
    probes = []
    for config in args.peer:
        p = peer(args, config, threads)
        p.once()
        probes.append({"config": config, **p.about, **p.calls[0]})
        compare.say(f"{threads} threads, {config}: {probes[-1]['seconds']:.2f} s, {probes[-1]['cpu_seconds']:.2f} CPU s, "
                    f"{p.about['saved_bytes_per_token']:.0f} B saved per token, grows by {p.about['growth_bytes'] / 1e9:.2f} GB")
        p.close()
    best = min(probes, key=lambda p: p["cpu_seconds" if args.pick_by_cpu else "seconds"])["config"]
    sides = [peer(args, best, threads), ours(args, threads), ours(args, threads, "layer"), ours(args, threads, prefix=args.prefix)]
    theirs, stored, layer, group = sides
    for i in range(args.rounds):
        for side in sides if i % 2 == 0 else reversed(sides):
            side.once()
        compare.say(f"{threads} threads, round {i + 1}: " + ", ".join(f"{s.name} {s.calls[-1]['seconds']:.2f} s ({s.calls[-1]['cpu_seconds']:.2f})" for s in sides))
    for side in sides:
        side.close()
    for field in ("loss", "gradient_norm"):
        want = theirs.calls[-1][field]
        for side in (stored, layer):
            if abs(side.calls[-1][field] - want) > args.tolerance * abs(want):
                raise SystemExit(f"train: {side.name}: {field} is {side.calls[-1][field]}, the peer's {want}")
    shared = group.calls[-1]["tokens"] / group.calls[-1]["packed_tokens"]
    tokens = args.rows * args.tokens
    entry = {"threads": threads, "kernel": stored.about["kernel"], "peer": best, "probes": probes, "logical_to_packed": shared,
             "tokens_per_second": {s.name: tokens / s.median() for s in (theirs, stored, layer)},
             "tokens_per_cpu_second": {s.name: tokens / s.median("cpu_seconds") for s in (theirs, stored, layer)},
             "retained": {s.name: s.calls[-1]["retained_bytes_per_packed_token"] for s in (stored, layer)},
             "required": {s.name: s.calls[-1]["required_bytes"] for s in (stored, layer)},
             "saved": next(p["saved_bytes_per_token"] for p in probes if p["config"] == best),
             "growth": next(p["growth_bytes"] for p in probes if p["config"] == best)}
    for field, name in (("seconds", ""), ("cpu_seconds", "_cpu")):
        entry["speed" + name], entry["layer_speed" + name] = ratio(theirs, stored, field), ratio(theirs, layer, field)
        entry["layer_time" + name], entry["shared" + name] = ratio(layer, stored, field), ratio(stored, group, field, shared)
    return entry


def markdown(args, report):
    m, first = report["machine"], report["sections"][0]
    about = first["probes"][0]
    out = [f"{m['cpu']}, {m['cpus']} CPUs, {m['system']}; load average before {m['load']:.2f}; {args.rounds} rounds of {args.rows} x {args.tokens} tokens, rank {args.rank}; "
           f"our kernel: {first['kernel']}; torch {about['torch']} ({about['cpu_capability']}), peft {about['peft']}, transformers {about['transformers']}"
           + (f"; {args.label}" if args.label else "") + ".", "",
           "| threads | peer | | peer tokens/s | ours, stored | ours, layer | **ratio** | ratio, layer | layer / stored time | shared group, of logical / packed |", "|" + " --- |" * 10]
    for e in report["sections"]:
        for name, label, rate in (("", "wall", "tokens_per_second"), ("_cpu", "processor", "tokens_per_cpu_second")):
            r = list(e[rate].values())
            out.append(f"| {e['threads']} | {e['peer']} | {label} | {r[0]:.0f} | {r[1]:.0f} | {r[2]:.0f} | {compare.spread(e['speed' + name])} | {compare.spread(e['layer_speed' + name])} | "
                       f"{compare.spread(e['layer_time' + name])} | {compare.spread(e['shared' + name])} |")
    e = report["sections"][-1]
    saved, growth = e["saved"], e["growth"]
    out += ["", f"The shared group has {e['logical_to_packed']:.2f} logical tokens for each packed one.", "",
            "| | bytes kept per token | against the peer | highest need of the call |", "|" + " --- |" * 4,
            f"| peer, {e['peer']} | {saved:.0f} | 1 | {compare.gb(growth)} (growth of the resident set) |"]
    for name, kept in e["retained"].items():
        out.append(f"| {name} | {kept:.0f} | **{kept / saved:.3f}** | {compare.gb(e['required'][name])} (predicted, and taken) |")
    out += ["", "Every peer configuration, one call each:", "", "| threads | attention:batch:loss | tokens/s | tokens per CPU second | bytes saved per token | growth |", "|" + " --- |" * 6]
    for s in report["sections"]:
        for p in s["probes"]:
            out.append(f"| {s['threads']} | {p['config']} | {p['tokens'] / p['seconds']:.0f} | {p['tokens'] / p['cpu_seconds']:.0f} | {p['saved_bytes_per_token']:.0f} | {compare.gb(p['growth_bytes'])} |")
    return "\n".join(out) + "\n"


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--ours", required=True, help="the binary of bench/train")
    ap.add_argument("--kernel", help="TRAINERRANK_KERNEL for our side")
    ap.add_argument("--peer-capability", help="ATEN_CPU_CAPABILITY for the peer, such as avx2")
    ap.add_argument("--model", required=True, help="Hugging Face folder")
    ap.add_argument("--python", required=True, help="an interpreter with torch, transformers and peft")
    ap.add_argument("--peer", action="append", help=f"attention:batch size:loss (repeat); default {' '.join(DEFAULT_PEERS)}")
    ap.add_argument("--pick-by-cpu", action="store_true", help="the fastest peer is the one of the least processor time: for a busy machine")
    ap.add_argument("--rows", type=int, default=8)
    ap.add_argument("--tokens", type=int, default=512)
    ap.add_argument("--prefix", type=int, help="tokens that the rows of the group share; default 84 %%")
    ap.add_argument("--rank", type=int, default=16)
    ap.add_argument("--threads", default="1,2", type=lambda s: [int(n) for n in s.split(",")])
    ap.add_argument("--rounds", type=int, default=5)
    ap.add_argument("--tolerance", type=float, default=1e-5, help="largest relative difference of loss and norm of the gradient")
    ap.add_argument("--label", default="", help="words for the table's first line")
    ap.add_argument("--markdown", help="write the table here (default: standard output)")
    ap.add_argument("--json", help="write every number here")
    args = ap.parse_args()
    args.peer = args.peer or DEFAULT_PEERS
    args.prefix = int(args.tokens * 0.84) if args.prefix is None else args.prefix
    args.ours, args.model = os.path.abspath(args.ours), os.path.abspath(args.model)
    report = {"machine": compare.machine()}
    report["sections"] = [section(args, n) for n in args.threads]
    text = markdown(args, report)
    for path, value in ((args.markdown, text), (args.json, json.dumps(report, indent=2) + "\n")):
        if path:
            with open(path, "w") as f:
                f.write(value)
    if not args.markdown:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
