#!/usr/bin/env python3
"""Run the same requests through PyTorch (peer.py) and through `trainerrank score`, in turns, and print the ratios.

    go build -o trainerrank-bin ./cmd/trainerrank
    python3 bench/compare.py --ours ./trainerrank-bin --model SMOLLM2 --python VENV/bin/python --markdown table.md

Sections (--sections): `speed` (unshared requests, tokens/s against the peer), `memory` (peak resident set against the peer's),
`shared` (a group of rows with a common prefix against the same rows without one, ours alone), `linear` (seconds for
1k..16k tokens, ours alone). `speed` and `memory` want --python; without it only our side is measured.

How it is measured
- Each side is pinned with taskset to the first N of the CPUs that this process may use, for N threads.
- First every peer configuration (--peer, attention:batch size:scoring) runs one pass in a process of its own. That pass gives the
  peak resident set, and picks the fastest configuration for that thread count. Then the fastest stays loaded and warm, and rounds
  alternate: one pass of the peer, one whole run of our command, the order turned round each time.
- Seconds. peer: its scoring loop, after load and warm-up. ours, "scoring": `seconds` of the summary, which is the call with the
  weights already loaded (our first pass; there is no warm-up). ours, "process": wall time of the whole command, with start,
  load, and writing of the answers, which the peer's number leaves out; "both processes" adds to the peer's its interpreter's start,
  imports and load. A ratio is the median over rounds of (peer's seconds / our
  seconds in the same round); the range over the rounds stands beside it.
- Peak resident set: ours is ru_maxrss of the command from wait4; the peer's is VmHWM of its process. Both count weights,
  runtime and libraries; the peer's libraries alone are shown, as are the bytes that come on top of them.
- Variables that change thread counts or kernels (OMP_*, MKL_*, KMP_*, GOMP_*, OPENBLAS_*, ATEN_*, GOGC, GOMEMLIMIT, GOMAXPROCS,
  GODEBUG) are removed for both sides.
- The answers are compared too: the largest difference between the two sides' logprobs is in the table, and the run fails if
  it is above --tolerance, since a time for other answers says nothing.

--peer-preload LIB runs every peer configuration a second time with LD_PRELOAD=LIB; see mkl_intel.c for what that is for.
"""
import argparse
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
DROP = ("OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "ATEN_", "BLIS_", "GOGC", "GOMEMLIMIT", "GOMAXPROCS", "GODEBUG")
DEFAULT_PEERS = ["sdpa:1:log_softmax", "sdpa:4:log_softmax", "sdpa:8:log_softmax", "eager:1:log_softmax", "eager:4:log_softmax",
                 "sdpa:4:whole", "sdpa:1:chunked", "sdpa:4:chunked"]
LINEAR = ["many-1k", "many-4k", "many-16k", "one-1k", "one-4k", "one-8k", "one-16k"]


def say(text):
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def clean_env(extra=None):
    env = {k: v for k, v in os.environ.items() if not k.startswith(DROP)}
    env.update(extra or {})
    return env


def pinned(threads, command):
    cpus = sorted(os.sched_getaffinity(0))
    if threads > len(cpus):
        raise SystemExit(f"compare: {threads} threads asked, {len(cpus)} CPUs allowed")
    return ["taskset", "-c", ",".join(map(str, cpus[:threads])), *command]


def read_lines(path, field):
    with open(path) as f:
        return [json.loads(line)[field] for line in f if line.strip()]


def last_line(path):
    """What a command said last, but for its hint."""
    with open(path, errors="replace") as f:
        lines = [line.strip() for line in f if line.strip() and not line.startswith("hint:")]
    return lines[-1] if lines else ""


class Refused(Exception):
    """Our command ended with another code than 0."""


class Ours:
    def __init__(self, args, folder):
        self.args, self.folder, self.kernel = args, folder, None

    def run(self, name, threads):
        """One run of the command: seconds by its own account, wall seconds, peak resident set, summary, answers' path."""
        at = os.path.join(self.folder, f"ours-{name}-{threads}")
        command = [self.args.ours, "score", "--model", self.args.model, "--requests", requests_path(self.args, name),
                   "--threads", str(threads), "--summary", at + ".summary", "--out", at + ".out", *self.args.ours_flag]
        env = clean_env({"TRAINERRANK_KERNEL": self.args.kernel} if self.args.kernel else None)
        with open(at + ".err", "wb") as err:
            start = time.perf_counter()
            p = subprocess.Popen(pinned(threads, command), stdin=subprocess.DEVNULL, stdout=err, stderr=err, env=env)
            try:
                _, status, usage = os.wait4(p.pid, 0)
            except BaseException:
                p.kill()
                raise
            wall = time.perf_counter() - start
        p.returncode = os.waitstatus_to_exitcode(status)
        if p.returncode != 0:
            raise Refused(f"exit {p.returncode}: {last_line(at + '.err')}")
        with open(at + ".summary") as f:
            summary = json.load(f)
        self.kernel = summary.get("kernel")
        return {"seconds": summary["seconds"], "wall": wall, "peak_rss_bytes": usage.ru_maxrss * 1024,
                "cpu_seconds": usage.ru_utime + usage.ru_stime, "summary": summary, "answers": at + ".out"}


class Peer:
    """One configuration of peer.py, in a process of its own."""

    def __init__(self, args, folder, config, threads, preload=None):
        self.config, self.threads, self.preload = config, threads, preload
        self.dump = os.path.join(folder, f"peer-{config.replace(':', '-')}-{threads}{'-preload' if preload else ''}.out")
        attn, batch, score = config.split(":")
        self.command = [args.python, os.path.join(HERE, "peer.py"), "--model", args.model, "--requests",
                        requests_path(args, "unshared"), "--threads", str(threads), "--attn", attn, "--batch-size", batch,
                        "--score", score, "--dump", self.dump]
        self.err = self.dump + ".err"
        self.env = clean_env({"LD_PRELOAD": preload} if preload else None)
        self.process, self.load_seconds = None, None

    def name(self):
        attn, batch, score = self.config.split(":")
        return f"{attn}, batch {batch}, {score}" + (", preload" if self.preload else "")

    def start(self, *flags):
        with open(self.err, "wb") as err:
            self.process = subprocess.Popen(pinned(self.threads, [*self.command, *flags]), stdin=subprocess.PIPE,
                                            stdout=subprocess.PIPE, stderr=err, env=self.env, text=True)

    def line(self):
        text = self.process.stdout.readline()
        if not text:
            self.process.wait()
            raise SystemExit(f"compare: peer ({self.name()}) ended with {self.process.returncode}: {last_line(self.err)}")
        return json.loads(text)

    def probe(self):
        self.start("--runs", "1")
        self.process.stdin.close()
        result = self.line()
        self.process.wait()
        return result

    def warm(self):
        spawned = time.time()
        self.start("--interactive")
        self.load_seconds = self.line()["loaded_at"] - spawned

    def once(self):
        self.process.stdin.write("run\n")
        self.process.stdin.flush()
        return self.line()

    def finish(self):
        self.process.stdin.close()
        result = self.line()
        self.process.wait()
        return result

    def kill(self):
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def requests_path(args, name):
    return os.path.join(args.requests, name + ".jsonl")


def flops(config, lengths):
    """Multiplications and additions of the matrix products and the causal attention of scoring rows of these lengths, each
    position through the head. A rough yardstick for "how much of the machine": norms, softmax and rope are left out."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads, kv = config["num_attention_heads"], config.get("num_key_value_heads") or config["num_attention_heads"]
    hd = config.get("head_dim") or hidden // heads
    linear = 2 * (layers * (2 * hidden * heads * hd + 2 * hidden * kv * hd + 3 * hidden * config["intermediate_size"])
                  + hidden * config["vocab_size"])
    attention = 4 * layers * heads * hd
    return sum(n * linear + attention * n * (n + 1) // 2 for n in lengths)


def ratio(peer, ours):
    """Median and range over rounds of how many times faster ours is."""
    r = [p / o for p, o in zip(peer, ours)]
    return {"median": statistics.median(r), "lowest": min(r), "highest": max(r)}


def differ(ours, peer):
    """Largest absolute difference of two answer files; NaN and other shapes count as infinite."""
    a, b = read_lines(ours, "target_logprobs"), read_lines(peer, "target_logprobs")
    if [len(x) for x in a] != [len(x) for x in b]:
        return math.inf
    worst = 0.0
    for x, y in zip(a, b):
        for p, q in zip(x, y):
            if (p is None) != (q is None):
                return math.inf
            if p is not None:
                d = abs(p - q)
                worst = max(worst, d if d == d else math.inf)
    return worst


def speed(args, ours, folder, report):
    report["speed"], report["probes"] = [], []
    lengths = [len(r) for r in read_lines(requests_path(args, "unshared"), "input_tokens")]
    with open(os.path.join(args.model, "config.json")) as f:
        work = flops(json.load(f), lengths)
    for n in args.threads:
        peers = []
        if args.python:
            for preload in [None] + ([args.peer_preload] if args.peer_preload else []):
                probes = []
                for config in args.peer:
                    p = Peer(args, folder, config, n, preload)
                    try:
                        result = p.probe()
                    finally:
                        p.kill()
                    say(f"{n} threads, probe {p.name()}: {result['tokens_per_second']:.0f} tokens/s, "
                        f"{result['peak_rss_bytes'] / 1e9:.2f} GB")
                    report["probes"].append({**result, "config": config, "name": p.name(), "preload": bool(preload), "threads": n})
                    probes.append((result["tokens_per_second"], config))
                peers.append(Peer(args, folder, max(probes)[1], n, preload))
        try:
            for p in peers:
                p.warm()
            rounds = {"ours": [], "peers": [[] for _ in peers]}
            for i in range(args.rounds):
                turns = [*range(len(peers)), -1]
                for turn in turns if i % 2 == 0 else reversed(turns):
                    if turn < 0:
                        rounds["ours"].append(ours.run("unshared", n))
                    else:
                        rounds["peers"][turn].append(peers[turn].once())
                say(f"{n} threads, round {i + 1}: ours {rounds['ours'][-1]['seconds']:.2f} s ({rounds['ours'][-1]['wall']:.2f} s "
                    f"process), peer " + ", ".join(f"{r[-1]['seconds']:.2f} s" for r in rounds["peers"]))
            ended = [p.finish() for p in peers]
        finally:
            for p in peers:
                p.kill()
        scoring, wall = [r["seconds"] for r in rounds["ours"]], [r["wall"] for r in rounds["ours"]]
        entry = {"threads": n, "tokens": sum(lengths), "flops": work, "ours_seconds": scoring, "ours_wall": wall,
                 "ours_cpu_seconds": [r["cpu_seconds"] for r in rounds["ours"]],
                 "ours_peak_rss_bytes": max(r["peak_rss_bytes"] for r in rounds["ours"]),
                 "summary": rounds["ours"][-1]["summary"], "peers": []}
        for p, passes, end in zip(peers, rounds["peers"], ended):
            seconds = [r["seconds"] for r in passes]
            worst = differ(rounds["ours"][-1]["answers"], p.dump)
            entry["peers"].append({
                "name": p.name(), "preload": bool(p.preload), "seconds": seconds,
                "cpu_seconds": [r["cpu_seconds"] for r in passes], "load_seconds": p.load_seconds, "scoring": ratio(seconds, scoring),
                "process": ratio(seconds, wall), "processes": ratio([s + p.load_seconds for s in seconds], wall), "max_difference": worst, "peak_rss_bytes": end["peak_rss_bytes"],
                "torch": end["torch"], "transformers": end["transformers"], "cpu_capability": end["cpu_capability"]})
            if worst > args.tolerance:
                report["failures"].append(f"{p.name()}, {n} threads: logprobs differ by {worst:.3g} > {args.tolerance:g}")
        report["speed"].append(entry)


def shared(args, ours, report):
    report["shared"] = []
    for n in args.threads:
        group, apart = [], []
        for i in range(args.rounds):
            for name, to in (("group", group), ("group-apart", apart))[::1 if i % 2 == 0 else -1]:
                to.append(ours.run(name, n))
            say(f"{n} threads, round {i + 1}: group {group[-1]['seconds']:.2f} s, apart {apart[-1]['seconds']:.2f} s")
        s = group[-1]["summary"]
        bound = s["logical_tokens"] / s["packed_tokens"]
        entry = {"threads": n, "logical_tokens": s["logical_tokens"], "packed_tokens": s["packed_tokens"], "bound": bound,
                 "apart_packed_tokens": apart[-1]["summary"]["packed_tokens"]}
        for key, field in (("scoring", "seconds"), ("process", "wall")):
            entry[key] = ratio([r[field] for r in apart], [r[field] for r in group])
            entry[key + "_seconds"] = {"group": [r[field] for r in group], "apart": [r[field] for r in apart]}
        entry["fraction"] = entry["scoring"]["median"] / bound
        report["shared"].append(entry)


def linear(args, ours, report):
    n = max(args.threads)
    with open(os.path.join(args.model, "config.json")) as f:
        config = json.load(f)
    report["linear"] = []
    for name in args.linear:
        lengths = [len(r) for r in read_lines(requests_path(args, name), "input_tokens")]
        entry = {"name": name, "threads": n, "requests": len(lengths), "tokens": sum(lengths), "flops": flops(config, lengths)}
        try:
            runs = [ours.run(name, n) for _ in range(args.rounds)]
            entry["seconds"], entry["wall"] = [r["seconds"] for r in runs], [r["wall"] for r in runs]
            entry["peak_rss_bytes"] = max(r["peak_rss_bytes"] for r in runs)
            entry["observed_peak_bytes"] = runs[-1]["summary"].get("observed_peak_bytes")
            say(f"{name}: {statistics.median(entry['seconds']):.2f} s")
        except Refused as e:
            entry["refused"] = str(e)
            say(f"{name}: {e}")
        report["linear"].append(entry)


def machine():
    model, flags = platform.processor(), ""
    try:
        with open("/proc/cpuinfo") as f:
            info = dict(tuple(map(str.strip, line.split(":", 1))) for line in f.read().split("\n\n")[0].splitlines() if ":" in line)
        model = f"{info.get('model name', model)} (family {info.get('cpu family')}, model {info.get('model')})"
        flags = info.get("flags", "")
    except OSError:
        pass
    load = os.getloadavg()[0]
    if load > 0.3:
        say(f"the machine is not idle: load average {load:.2f}")
    return {"cpu": model, "avx2": " avx2 " in f" {flags} ", "avx512": " avx512f " in f" {flags} ",
            "cpus": len(os.sched_getaffinity(0)), "system": f"{platform.system()} {platform.release()}", "load": load,
            "removed_environment": sorted(k for k in os.environ if k.startswith(DROP))}


def gb(n):
    return f"{n / 1e9:.2f} GB"


def spread(r):
    return f"**{r['median']:.2f}** ({r['lowest']:.2f}..{r['highest']:.2f})"


def markdown(args, report):
    m = report["machine"]
    vectors = ", ".join(v for v, has in (("AVX2", m["avx2"]), ("AVX-512", m["avx512"])) if has) or "no AVX2"
    out = [f"{m['cpu']}, {m['cpus']} CPUs, {vectors}, {m['system']}; load average before {m['load']:.2f}; {args.rounds} rounds; "
           f"our kernel: {report['kernel']}" + (f"; {args.label}" if args.label else "") + "."]
    if m["removed_environment"]:
        out.append(f"Removed from both sides' environment: {', '.join(m['removed_environment'])}.")
    if report.get("speed"):
        out += ["", "**Unshared scoring**", ""]
        if args.python:
            p = report["speed"][0]["peers"][0]
            out += [f"PyTorch {p['torch']}, transformers {p['transformers']}, float32, CPU capability {p['cpu_capability']}; the fastest of "
                    f"{len(args.peer)} configurations at each thread count.", ""]
        out += ["| threads | peer | peer tokens/s | ours, scoring | ours, process | ratio, scoring | ratio, our process to its scoring | "
                "ratio, both processes | GFLOP/s peer, ours | max logprob difference |", "|" + " --- |" * 10]
        for e in report["speed"]:
            s, w = statistics.median(e["ours_seconds"]), statistics.median(e["ours_wall"])
            if not e["peers"]:
                out.append(f"| {e['threads']} | - | - | {e['tokens'] / s:.0f} | {e['tokens'] / w:.0f} | - | - | - | -, {e['flops'] / s / 1e9:.0f} | - |")
            for p in e["peers"]:
                t = statistics.median(p["seconds"])
                out.append(f"| {e['threads']} | {p['name']} | {e['tokens'] / t:.0f} | {e['tokens'] / s:.0f} | {e['tokens'] / w:.0f} | "
                           f"{spread(p['scoring'])} | {spread(p['process'])} | {p['processes']['median']:.2f} | {e['flops'] / t / 1e9:.0f}, {e['flops'] / s / 1e9:.0f} | {p['max_difference']:.1e} |")
        by = {e["threads"]: statistics.median(e["ours_seconds"]) for e in report["speed"]}
        if 1 in by and 2 in by:
            out += ["", f"Ours, two threads against one: **{by[1] / by[2]:.2f}** x."]
    if report.get("probes"):
        out += ["", "Every peer configuration, one pass each (the picks above are the fastest):", "",
                "| peer | " + " | ".join(f"tokens/s, {n} threads" for n in args.threads) + " |", "| --- |" + " --- |" * len(args.threads)]
        names = list(dict.fromkeys(p["name"] for p in report["probes"]))
        for name in names:
            cells = {p["threads"]: f"{p['tokens_per_second']:.0f}" for p in report["probes"] if p["name"] == name}
            out.append(f"| {name} | " + " | ".join(cells.get(n, "-") for n in args.threads) + " |")
    if report.get("memory"):
        e = report["memory"]
        s = e["summary"]
        out += ["", "**Peak resident set, unshared requests**", "",
                f"Ours ({e['threads']} threads): {gb(e['ours_peak_rss_bytes'])}, of which weights {gb(s['weights_bytes'])}; arena, "
                f"predicted {s['predicted_peak_bytes']}, observed {s['observed_peak_bytes']} bytes.", ""]
        if e["peers"]:
            out += ["| peer | peak, whole process | peak while scoring | after import, before the model | ours / peer | ours / (peer less import) |",
                    "| --- | --- | --- | --- | --- | --- |"]
            for p in e["peers"]:
                apart = gb(p["peak_rss_scoring_bytes"]) if p["peak_rss_scoring_bytes"] else "-"
                less = p["peak_rss_bytes"] - p["rss_imported_bytes"]
                out.append(f"| {p['name']} | {gb(p['peak_rss_bytes'])} | {apart} | {gb(p['rss_imported_bytes'])} | "
                           f"**{e['ours_peak_rss_bytes'] / p['peak_rss_bytes']:.2f}** | {e['ours_peak_rss_bytes'] / less:.2f} |")
    if report.get("shared"):
        out += ["", "**A group with a common prefix, against the same rows without one (ours)**", "",
                "| threads | logical tokens | packed tokens | logical / packed | faster, scoring | fraction of logical / packed | faster, process |",
                "| --- | --- | --- | --- | --- | --- | --- |"]
        for e in report["shared"]:
            out.append(f"| {e['threads']} | {e['logical_tokens']} | {e['packed_tokens']} | {e['bound']:.2f} | {spread(e['scoring'])} | "
                       f"**{e['fraction']:.2f}** | {spread(e['process'])} |")
    if report.get("linear"):
        n = report["linear"][0]["threads"]
        out += ["", f"**Growth with the number of tokens (ours, {n} threads)**", "",
                "| file | requests | tokens | seconds, scoring | seconds, process | microseconds/token | against the first | GFLOP/s | peak resident set |",
                "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"]
        first = {}
        for e in report["linear"]:
            if "refused" in e:
                out.append(f"| {e['name']} | {e['requests']} | {e['tokens']} | {e['refused'].replace('|', '/')} | - | - | - | - | - |")
                continue
            s = statistics.median(e["seconds"])
            each = s / e["tokens"] * 1e6
            base = first.setdefault(e["name"].split("-")[0], each)
            out.append(f"| {e['name']} | {e['requests']} | {e['tokens']} | {s:.2f} | {statistics.median(e['wall']):.2f} | {each:.0f} | "
                       f"{each / base:.2f} | {e['flops'] / s / 1e9:.0f} | {gb(e['peak_rss_bytes'])} |")
    for f in report["failures"]:
        out += ["", f"FAILED: {f}"]
    return "\n".join(out) + "\n"


def memory(report):
    """Made from the speed section's runs: our largest peak over its rounds, the peer's from each configuration's own process."""
    e = max(report["speed"], key=lambda e: e["threads"])
    report["memory"] = {"threads": e["threads"], "ours_peak_rss_bytes": e["ours_peak_rss_bytes"], "summary": e["summary"],
                        "peers": [p for p in report["probes"] if p["threads"] == e["threads"] and not p["preload"]]}


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--ours", required=True, help="the trainerrank binary")
    ap.add_argument("--ours-flag", action="append", default=[], help="one more argument for it (repeat)")
    ap.add_argument("--kernel", help="TRAINERRANK_KERNEL for our side")
    ap.add_argument("--model", required=True, help="Hugging Face folder")
    ap.add_argument("--python", help="an interpreter with torch and transformers")
    ap.add_argument("--peer", action="append", help=f"attention:batch size:scoring (repeat); default {' '.join(DEFAULT_PEERS)}")
    ap.add_argument("--peer-preload", help="run each peer configuration with this library preloaded, too")
    ap.add_argument("--requests", help="folder of make_requests.py; made afresh if not given")
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--threads", default="1,2", type=lambda s: [int(n) for n in s.split(",")])
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--sections", default="speed,memory,shared,linear", type=lambda s: s.split(","))
    ap.add_argument("--linear", default=LINEAR, type=lambda s: s.split(","), help="files of the linear section")
    ap.add_argument("--tolerance", type=float, default=1e-3, help="largest logprob difference between the two sides")
    ap.add_argument("--label", default="", help="words for the table's first line, such as the commit")
    ap.add_argument("--markdown", help="write the table here (default: standard output)")
    ap.add_argument("--json", help="write every number here")
    args = ap.parse_args()
    args.peer = args.peer or DEFAULT_PEERS
    for config in args.peer:
        if len(config.split(":")) != 3:
            ap.error(f"--peer {config}: want attention:batch size:scoring")
    if unknown := set(args.sections) - {"speed", "memory", "shared", "linear"}:
        ap.error(f"unknown section {', '.join(sorted(unknown))}")
    if not shutil.which("taskset"):
        ap.error("taskset is not installed")
    args.ours, args.model = os.path.abspath(args.ours), os.path.abspath(args.model)
    if args.peer_preload:
        args.peer_preload = os.path.abspath(args.peer_preload)

    with tempfile.TemporaryDirectory(prefix="trainerrank-bench-") as folder:
        if not args.requests:
            args.requests = os.path.join(folder, "requests")
            with open(os.path.join(args.model, "config.json")) as f:
                vocab = json.load(f)["vocab_size"]
            subprocess.run([sys.executable, os.path.join(HERE, "make_requests.py"), "--out", args.requests, "--seed", str(args.seed),
                            "--vocab", str(vocab)], check=True, stdout=subprocess.DEVNULL)
        report = {"machine": machine(), "failures": []}
        ours = Ours(args, folder)
        try:
            if "speed" in args.sections or "memory" in args.sections:
                speed(args, ours, folder, report)
                if "memory" in args.sections:
                    memory(report)
            if "shared" in args.sections:
                shared(args, ours, report)
            if "linear" in args.sections:
                linear(args, ours, report)
        except Refused as e:
            raise SystemExit(f"compare: our command: {e}") from None
        report["kernel"] = ours.kernel
        report["rounds"] = args.rounds
    text = markdown(args, report)
    for path, value in ((args.markdown, text), (args.json, json.dumps(report, indent=2) + "\n")):
        if path:
            with open(path, "w") as f:
                f.write(value)
    if not args.markdown:
        print(text, end="")
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
