#!/usr/bin/env python3
"""Score a request file with PyTorch and transformers, as their users would: the other side of bench/compare.py.

    python peer.py --model DIR --requests FILE.jsonl --threads 2 --attn sdpa --batch-size 4

float32 (weights widened from what the file stores), no_grad, use_cache off. Requests are sorted by length, cut into batches
of --batch-size, padded on the right; a mask is passed only where there is padding. A request's answer is the logprob of each
token given those before it. --score says how logits become logprobs:

  log_softmax    log_softmax of logits[:, :-1], then gather at the shifted labels: what most people write. With more than one row
                 the slice is not contiguous, and costs a copy
  whole          log_softmax of all the logits, then gather: one copy less
  cross_entropy  F.cross_entropy(reduction="none") on all the logits: the same, fused
  logsumexp      gather from the logits, minus logsumexp row by row (TRL's selective_log_softmax): no second copy
  chunked        head and logsumexp over --chunk positions at a time, none of them padding: logits are never whole

Prints one JSON object. `seconds` are the scoring loop alone, tensors and padding included, after load and warm-up;
tokens_per_second counts real tokens, not padding. `peak_rss_bytes` is the highest resident set of this whole process so
far (VmHWM): run one configuration per process. With --interactive it prints a first line when it is warm, then runs once per line
read from standard input, so that a driver can interleave it with something else.
"""
import argparse
import json
import os
import resource
import statistics
import sys
import time


def status(field):
    with open("/proc/self/status") as f:
        for line in f:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return None


def reset_peak():
    """Start VmHWM afresh, so that the peak of scoring can be told from the peak of loading. False if not permitted."""
    try:
        with open("/proc/self/clear_refs", "w") as f:
            f.write("5")
        return True
    except OSError:
        return False


def read_requests(path):
    with open(path) as f:
        rows = [json.loads(line)["input_tokens"] for line in f if line.strip()]
    if not rows or not all(rows):
        raise SystemExit(f"peer: {path}: no requests, or an empty one")
    return rows


class Scorer:
    def __init__(self, torch, model, rows, batch_size, how, chunk):
        self.torch, self.model, self.rows, self.how, self.chunk = torch, model, rows, how, chunk
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
        self.batches = [order[i:i + batch_size] for i in range(0, len(order), batch_size)]
        self.padded = sum(len(b) * max(len(rows[i]) for i in b) for b in self.batches)

    def pad(self, which):
        torch, rows = self.torch, [self.rows[i] for i in which]
        width = max(map(len, rows))
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros(len(rows), width, dtype=torch.long)
        for i, row in enumerate(rows):
            ids[i, :len(row)] = torch.tensor(row)
            mask[i, :len(row)] = 1
        return ids, (mask if int(mask.min()) == 0 else None), [len(r) for r in rows]

    def batch(self, which):
        """The logprobs of a batch: a list of 1-D tensors, one shorter than their rows."""
        torch = self.torch
        ids, mask, lengths = self.pad(which)
        labels = ids.roll(-1, 1)  # the last column is cut off below
        kw = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
        if self.how == "chunked":
            hidden = self.model.model(**kw).last_hidden_state
            h = torch.cat([hidden[i, :n - 1] for i, n in enumerate(lengths)])
            y = torch.cat([labels[i, :n - 1] for i, n in enumerate(lengths)])
            del hidden
            parts = []
            for at in range(0, len(h), self.chunk):
                lg = self.model.lm_head(h[at:at + self.chunk])
                parts.append(lg.gather(1, y[at:at + self.chunk, None])[:, 0] - lg.logsumexp(1))
            return list((torch.cat(parts) if parts else h.new_zeros(0)).split([n - 1 for n in lengths]))
        logits = self.model(**kw).logits
        if self.how == "log_softmax":
            lp = torch.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0]
        elif self.how == "whole":
            lp = torch.log_softmax(logits, -1).gather(-1, labels[..., None])[..., 0]
        elif self.how == "cross_entropy":
            flat = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
            lp = -flat.view(labels.shape)
        else:
            lse = torch.stack([row.logsumexp(-1) for row in logits])
            lp = logits.gather(-1, labels[..., None])[..., 0] - lse
        return [lp[i, :n - 1].clone() for i, n in enumerate(lengths)]

    def all(self):
        """Seconds, CPU seconds (of all threads), and the logprobs in the file's order."""
        out = [None] * len(self.rows)
        start, cpu = time.perf_counter(), time.process_time()
        for which in self.batches:
            for i, lp in zip(which, self.batch(which)):
                out[i] = lp
        return time.perf_counter() - start, time.process_time() - cpu, out

    def warm(self, batches):
        """Run the last (narrowest) batches: thread team, kernels chosen at first use and page tables are then warm. The big
        buffers need no warming: the C library maps them afresh each time."""
        for which in self.batches[len(self.batches) - min(batches, len(self.batches)):]:
            self.batch(which)


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--model", required=True)
    ap.add_argument("--requests", required=True)
    ap.add_argument("--threads", type=int, required=True)
    ap.add_argument("--attn", choices=("eager", "sdpa"), default="sdpa")
    ap.add_argument("--batch-size", type=int, default=4)
    ap.add_argument("--score", choices=("log_softmax", "whole", "cross_entropy", "logsumexp", "chunked"), default="log_softmax")
    ap.add_argument("--chunk", type=int, default=256, help="positions per block of --score chunked")
    ap.add_argument("--runs", type=int, default=3)
    ap.add_argument("--warm-batches", type=int, default=1)
    ap.add_argument("--compile", action="store_true", help="torch.compile the model (needs a C++ compiler)")
    ap.add_argument("--dump", help="write the logprobs as JSON lines, in the file's order")
    ap.add_argument("--interactive", action="store_true")
    args = ap.parse_args()

    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    import torch
    import transformers
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    torch.set_num_interop_threads(1)
    imported = status("VmRSS")
    rows = read_requests(args.requests)
    start = time.perf_counter()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.float32, attn_implementation=args.attn).eval()
    if args.compile:
        model.model = torch.compile(model.model, dynamic=True)
    loaded_seconds, loaded_at = time.perf_counter() - start, time.time()
    loaded, load_peak = status("VmRSS"), status("VmHWM")
    scoring_is_apart = reset_peak()
    scorer = Scorer(torch, model, rows, args.batch_size, args.score, args.chunk)
    seconds, cpu_seconds, answers = [], [], None
    with torch.no_grad():
        scorer.warm(args.warm_batches)
        if args.interactive:
            print(json.dumps({"ready": True, "loaded_at": loaded_at}), flush=True)
            for _ in sys.stdin:
                s, cpu, answers = scorer.all()
                seconds.append(s)
                cpu_seconds.append(cpu)
                print(json.dumps({"seconds": s, "cpu_seconds": cpu, "peak_rss_bytes": max(load_peak, status("VmHWM"))}), flush=True)
        else:
            for _ in range(args.runs):
                s, cpu, answers = scorer.all()
                seconds.append(s)
                cpu_seconds.append(cpu)
    if args.dump and answers:
        with open(args.dump, "w") as f:
            for lp in answers:
                f.write(json.dumps({"target_logprobs": lp.tolist() + [None]}) + "\n")
    tokens = sum(map(len, rows))
    scoring_peak = status("VmHWM")
    median = statistics.median(seconds) if seconds else None
    print(json.dumps({
        "torch": torch.__version__, "transformers": transformers.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(), "compile": args.compile,
        "attn": args.attn, "batch_size": args.batch_size, "score": args.score, "threads": torch.get_num_threads(),
        "cpus": sorted(os.sched_getaffinity(0)), "requests": len(rows), "tokens": tokens, "padded_tokens": scorer.padded,
        "load_seconds": loaded_seconds, "seconds": seconds, "cpu_seconds": cpu_seconds,
        "median_seconds": median,
        "tokens_per_second": tokens / median if median else None,
        "rss_imported_bytes": imported, "rss_loaded_bytes": loaded, "peak_rss_load_bytes": load_peak,
        "peak_rss_scoring_bytes": scoring_peak if scoring_is_apart else None,
        "peak_rss_bytes": max(load_peak, scoring_peak),
        "ru_maxrss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "rss_file_bytes": status("RssFile"),
    }), flush=True)


if __name__ == "__main__":
    main()
