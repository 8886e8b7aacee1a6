#!/usr/bin/env python3
"""Load the same safetensors files with `trainerrank load` and with what people use instead, in turns, and print the ratios.

    go build -o trainerrank-bin ./cmd/trainerrank
    python3 bench/load.py --ours ./trainerrank-bin --python VENV/bin/python --scratch DIR --markdown table.md MODEL...

MODEL is a folder. `synthetic` stands for four shards of 256 MiB of bfloat16, written under --scratch and kept there.

What runs
- ours            `trainerrank load --budget BIG`; "loader" is `seconds` of its summary: from the first memory taken to the last byte delivered,
                  headers already read. "process" is the wall time of the whole command, with start, headers and unmapping.
- copy, 4 KiB     copies the same bytes from memory to memory that was never touched, in pages of 4 KiB, by as many threads
- copy, huge      the same into memory advised to have huge pages, as ours is; it is faulted in by the copy, too
- reader          as many threads as there may be, each reading the next 4 MiB of the files straight to such memory: no more than pread
- safetensors     load_file of each file, then clone of each tensor: without the clone tensors are a mapping, and nothing is read
- fastsafetensors its loader for the CPU; where what it hands out is not memory that it has filled, it is cloned
Cold files also: reader with O_DIRECT. Caches are dropped with posix_fadvise and, where allowed, drop_caches, and mincore is asked
whether that worked; what is still cached after that is printed.

How it is measured
- Each side is pinned with taskset to the first N of the CPUs that this process may use, for N threads.
- Each side is a process that stays, with its imports done, and forks for every load, so each load has a heap that nobody has used and no side
  pays for an interpreter's start. A round is one load by every side, in an order that turns round each time. Ratios are medians over the rounds of
  (their seconds / our loader's seconds in the same round), with the range; above 1 ours is faster.
- Before every load as much memory as it takes is touched and given back. A virtual machine's free memory may not be there until the host is asked
  for it, at a tenth of the speed, and that would be charged to whoever comes first.
- The last line of a table is what ours would have if the whole process counted.
"""
import argparse
import ctypes
import json
import mmap
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time

HUGE = 2 << 20
SEGMENT = 4 << 20
DROP = ("OMP_", "MKL_", "KMP_", "GOMP_", "GOGC", "GOMEMLIMIT", "GOMAXPROCS", "GODEBUG", "MALLOC_")
libc = ctypes.CDLL(None, use_errno=True)
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
libc.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def shards(model):
    return sorted(os.path.join(model, n) for n in os.listdir(model) if n.endswith(".safetensors"))


# --- the sides that are Python: each a function of files and threads that returns seconds -------------------------------------------


class Memory:
    """Fresh anonymous memory, not touched, that starts at a multiple of 2 MiB."""

    def __init__(self, size, huge):
        self.map = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.map.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.skip = -self.base % HUGE
        self.address = self.base + self.skip

    def view(self, at, size):
        return memoryview(self.map)[self.skip + at:self.skip + at + size]


def spread(jobs, threads, work):
    """Does all jobs with so many threads, each taking the next when it is done with one."""
    left, lock, failed = iter(jobs), threading.Lock(), []

    def run():
        while not failed:
            with lock:
                job = next(left, None)
            if job is None:
                return
            try:
                work(*job)
            except Exception as e:
                failed.append(e)
    others = [threading.Thread(target=run) for _ in range(threads - 1)]
    for t in others:
        t.start()
    run()
    for t in others:
        t.join()
    if failed:
        raise failed[0]


class Copy:
    def __init__(self, files, threads, huge):
        self.size = sum(map(os.path.getsize, files))
        self.threads, self.huge = threads, huge
        self.source = Memory(self.size, True)
        at = 0
        for f in files:
            with open(f, "rb", buffering=0) as o:
                while n := o.readinto(self.source.view(at, SEGMENT)):
                    at += n

    def load(self):
        start = time.perf_counter()
        to = Memory(self.size, self.huge)
        spread([(o, min(SEGMENT, self.size - o)) for o in range(0, self.size, SEGMENT)], self.threads,
               lambda o, n: libc.memcpy(to.address + o, self.source.address + o, n))
        return time.perf_counter() - start


class Reader:
    def __init__(self, files, threads, direct):
        self.files, self.threads, self.flags = files, threads, os.O_RDONLY | (os.O_DIRECT if direct else 0)

    def load(self):
        start = time.perf_counter()
        jobs, at, opened = [], 0, []
        for f in self.files:
            opened.append(os.open(f, self.flags))
            size = os.path.getsize(f)
            jobs += [(opened[-1], o, at + o, min(SEGMENT, size - o)) for o in range(0, size, SEGMENT)]
            at += -(-size // HUGE) * HUGE
        to = Memory(at, True)

        def read(fd, off, at, n):
            room = -(-n // 4096) * 4096  # past the end of a file too, as O_DIRECT wants whole blocks
            got = 0
            while got < n:
                m = os.preadv(fd, [to.view(at + got, room - got)], off + got)
                if m <= 0:
                    raise OSError(f"the file ends at byte {off + got}")
                got += m
        spread(jobs, self.threads, read)
        seconds = time.perf_counter() - start
        for fd in opened:
            os.close(fd)
        return seconds


class Safetensors:
    def __init__(self, files, threads):
        import torch
        from safetensors.torch import load_file
        torch.set_num_threads(threads)
        self.files, self.load_file = files, load_file

    def load(self):
        start = time.perf_counter()
        kept = {}
        for f in self.files:
            kept.update((k, t.clone()) for k, t in self.load_file(f).items())
        return time.perf_counter() - start


def anonymous():
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("RssAnon:"))


class Fastsafetensors:
    def __init__(self, files, threads):
        import torch
        from fastsafetensors import SafeTensorsFileLoader, SingleGroup
        torch.set_num_threads(threads)
        self.files, self.threads = files, threads
        self.make = lambda: SafeTensorsFileLoader(SingleGroup(), "cpu", nogds=True, max_threads=threads)

    def load(self):
        before, size = anonymous(), sum(map(os.path.getsize, self.files))
        start = time.perf_counter()
        loader = self.make()
        loader.add_filenames({0: self.files})
        buffers = loader.copy_files_to_device()
        kept = {k: buffers.get_tensor(k) for k in list(loader.get_keys())}
        seconds = time.perf_counter() - start
        if anonymous() - before < 0.98 * size:  # then it is a mapping, and most was not read
            start = time.perf_counter()
            kept = {k: t.clone() for k, t in kept.items()}
            seconds += time.perf_counter() - start
        if anonymous() - before < 0.98 * size:
            raise RuntimeError("fastsafetensors has not filled memory with the tensors")
        return seconds


SIDES = {
    "copy, 4 KiB": lambda f, n: Copy(f, n, False),
    "copy, huge": lambda f, n: Copy(f, n, True),
    "reader": lambda f, n: Reader(f, n, False),
    "reader, O_DIRECT": lambda f, n: Reader(f, n, True),
    "safetensors": Safetensors,
    "fastsafetensors": Fastsafetensors,
}


def serve(side, threads, files):
    """Says "ready"; then forks for each line of standard input, and prints the seconds or an error as a JSON object."""
    worker = SIDES[side](files, threads)
    print("ready", flush=True)
    for _ in sys.stdin:
        r, w = os.pipe()
        if pid := os.fork():
            os.close(w)
            with open(r) as f:
                answer = f.read()
            os.waitpid(pid, 0)
            print(answer or '{"error": "it died"}', flush=True)
            continue
        try:
            answer = {"seconds": worker.load()}
        except BaseException as e:
            answer = {"error": f"{type(e).__name__}: {e}"[:300]}
        os.write(w, json.dumps(answer).encode())
        os._exit(0)


# --- the driver -----------------------------------------------------------------------------------------------------------------------


def say(text):
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def pinned(threads, command):
    cpus = sorted(os.sched_getaffinity(0))
    if threads > len(cpus):
        raise SystemExit(f"load: {threads} threads asked, {len(cpus)} CPUs allowed")
    return ["taskset", "-c", ",".join(map(str, cpus[:threads])), *command]


def clean_env():
    return {k: v for k, v in os.environ.items() if not k.startswith(DROP)}


class Peer:
    def __init__(self, side, python, threads, files):
        command = [python, os.path.abspath(__file__), "--serve", side, "--threads", str(threads), *files]
        self.side = side
        self.process = subprocess.Popen(pinned(threads, command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=clean_env(),
                                        stderr=subprocess.PIPE)
        if self.process.stdout.readline().strip() != "ready":
            raise SystemExit(f"load: {side}: {self.process.stderr.read()[-600:]}")

    def load(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        if "error" in answer:
            raise SystemExit(f"load: {self.side}: {answer['error']}")
        return answer["seconds"]

    def close(self):
        self.process.stdin.close()
        self.process.wait()


class Ours:
    def __init__(self, binary, model, threads, copier, total):
        self.summary = tempfile.NamedTemporaryFile(suffix=".json")
        self.command = pinned(threads, [binary, "load", "--model", model, "--budget", str(2 * total + (1 << 30)), "--threads", str(threads),
                                        "--copier", copier, "--summary", self.summary.name])

    def load(self):
        start = time.perf_counter()
        r = subprocess.run(self.command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=clean_env())
        self.wall = time.perf_counter() - start
        if r.returncode:
            raise SystemExit(f"load: ours: {r.stderr[-600:]}")
        with open(self.summary.name) as f:
            s = json.load(f)
        self.copier = s["copier"]
        return s["seconds"]

    def close(self):
        pass


def cached(files):
    """The bytes of the files that are in the page cache."""
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    total = 0
    for f in files:
        fd, size = os.open(f, os.O_RDONLY), os.path.getsize(f)
        at = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        vec = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
        if libc.mincore(at, size, vec) == 0:
            total += sum(b & 1 for b in vec.raw[:-1]) * mmap.PAGESIZE
        libc.munmap(at, size)
        os.close(fd)
    return total


def drop(files):
    for f in files:
        fd = os.open(f, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    try:
        with open("/proc/sys/vm/drop_caches", "w") as f:
            f.write("1")
    except OSError:
        pass


def heat(size):
    """Touches so much free memory and gives it back."""
    m = Memory(size, True)
    libc.memset(m.address, 1, size)


def warm(files):
    for f in files:
        with open(f, "rb", buffering=0) as o:
            while o.read(SEGMENT):
                pass


def synthetic(scratch, count=4, size=256 << 20, each=32 << 20):
    folder = os.path.join(scratch, "synthetic")
    os.makedirs(folder, exist_ok=True)
    rng, names = random.Random(1), {}
    for i in range(count):
        name = f"model-{i + 1:05}-of-{count:05}.safetensors"
        header = {f"layer.{i}.{j}": {"dtype": "BF16", "shape": [each // 2048, 1024], "data_offsets": [j * each, (j + 1) * each]} for j in range(size // each)}
        names.update(dict.fromkeys(header, name))
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        path = os.path.join(folder, name)
        if os.path.exists(path) and os.path.getsize(path) == 8 + len(text) + size:
            continue
        block = rng.randbytes(each)
        with open(path, "wb") as f:
            f.write(len(text).to_bytes(8, "little") + text)
            for _ in range(size // each):
                f.write(block)
            f.flush()
            os.fsync(f.fileno())
    with open(os.path.join(folder, "model.safetensors.index.json"), "w") as f:
        json.dump({"metadata": {"total_size": count * size}, "weight_map": names}, f)
    return folder


def measure(o, model, threads, cold):
    files = shards(model)
    total = sum(map(os.path.getsize, files))
    names = ["copy, 4 KiB", "copy, huge", "reader", "safetensors", "fastsafetensors"]
    if cold:
        names = ["reader, O_DIRECT", "reader", "safetensors", "fastsafetensors"]
    runners = {"ours": Ours(o.ours, model, threads, o.copier, total)}
    for n in names:
        python = o.python if "safetensors" in n else sys.executable
        if python:
            runners[n] = Peer(n, python, threads, files)
    seconds, walls, left = {n: [] for n in runners}, [], 0
    order = list(runners)
    for k in range(o.rounds + 1):
        for n in order if k % 2 else order[::-1]:
            if cold:
                drop(files)
                left = max(left, cached(files))
            else:
                warm(files)  # whatever the one before did to the cache
            heat(total + (256 << 20))
            s = runners[n].load()
            if k:  # the first round warms up
                seconds[n].append(s)
                if n == "ours":
                    walls.append(runners[n].wall)
    for r in runners.values():
        r.close()
    if cold:
        say(f"still cached after dropping: at most {left} of {total} bytes")
    return {"model": os.path.basename(model.rstrip("/")), "bytes": total, "threads": threads, "cold": cold, "copier": runners["ours"].copier, "left": left,
            "seconds": seconds, "walls": walls}


def ratio(theirs, ours):
    r = sorted(t / u for t, u in zip(theirs, ours))
    return f"**{statistics.median(r):.2f}** ({r[0]:.2f}..{r[-1]:.2f})"


def table(results, cold):
    some = [r for r in results if r["cold"] == cold]
    if not some:
        return ""
    heads = [f"{r['model']}, {r['bytes'] / 1e6:.0f} MB, {r['threads']} thread{'s' * (r['threads'] > 1)}" for r in some]
    lines = [f"| {'cold' if cold else 'cached'} file | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    rate = lambda r, s: f"{r['bytes'] / statistics.median(s) / 1e9:.2f}"
    lines.append("| ours, GB/s (copier) | " + " | ".join(f"{rate(r, r['seconds']['ours'])} ({r['copier']})" for r in some) + " |")
    for n in some[0]["seconds"]:
        if n != "ours":
            lines.append(f"| {n}: GB/s, ratio | " + " | ".join(f"{rate(r, r['seconds'][n])}, {ratio(r['seconds'][n], r['seconds']['ours'])}" for r in some) + " |")
    lines.append("| ours as a whole process, GB/s | " + " | ".join(rate(r, r["walls"]) for r in some) + " |")
    return "\n".join(lines) + "\n"


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("models", nargs="*")
    p.add_argument("--ours", help="the trainerrank binary")
    p.add_argument("--copier", default="auto", help="for ours")
    p.add_argument("--python", help="a Python with torch, safetensors and fastsafetensors; without it these are left out")
    p.add_argument("--scratch", default=tempfile.gettempdir(), help="folder for the synthetic model")
    p.add_argument("--threads", default="1,2")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--only", choices=["cached", "cold"])
    p.add_argument("--markdown", help="file for the tables; standard output otherwise")
    p.add_argument("--serve", help=argparse.SUPPRESS)
    o = p.parse_args()
    if o.serve:
        return serve(o.serve, int(o.threads), o.models)
    if not o.ours or not o.models:
        p.error("--ours and a model are needed")
    o.ours = os.path.abspath(o.ours)
    models = [synthetic(o.scratch) if m == "synthetic" else m for m in o.models]
    start, results = time.time(), []
    say("load average: " + " ".join(f"{x:.2f}" for x in os.getloadavg()))
    for cold in (False, True):
        if o.only == ("cached" if cold else "cold"):
            continue
        for model in models:
            for threads in map(int, o.threads.split(",")):
                results.append(measure(o, model, threads, cold))
                r = results[-1]
                say(f"{r['model']}, {threads} threads, {'cold' if cold else 'cached'}: " +
                    ", ".join(f"{n} {statistics.median(s):.3f} s" for n, s in r["seconds"].items()))
    text = "\n".join(filter(None, (table(results, False), table(results, True))))
    say(f"took {time.time() - start:.0f} s; load average: " + " ".join(f"{x:.2f}" for x in os.getloadavg()))
    if o.markdown:
        with open(o.markdown, "w") as f:
            f.write(text)
    print(text)


if __name__ == "__main__":
    main()
