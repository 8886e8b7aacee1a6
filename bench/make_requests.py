#!/usr/bin/env python3
"""Write the request files that the benchmarks run: the same files from the same seed, on any machine.

    python3 make_requests.py --out DIR [--seed 1] [--vocab 49152]

unshared.jsonl        16 requests of 256..1024 tokens, evenly spaced lengths in shuffled order; no two begin alike
group.jsonl           16 rows of 1000 tokens, the first 840 of which (84 %) are the same in all
group-apart.jsonl     the control: the rows of group.jsonl, but each begins with a token of its own, so nothing can be shared
many-{1k,4k,16k}.jsonl   2, 8, 32 requests of 512 tokens, nothing shared
one-{1k,4k,8k,16k}.jsonl one request of 1024, 4096, 8192, 16384 tokens
manifest.json         per file: requests, logical tokens, and packed tokens (distinct prefixes: the least that must be run)

Tokens are drawn with probability ~ 1/rank (ids in a byte-pair vocabulary fall roughly in order of frequency) from the ids
at or above --first-id, which skips the special tokens. Only sums and quotients of floats are involved, no libm.
"""
import argparse
import bisect
import itertools
import json
import os
import random


class Draw:
    def __init__(self, seed, first, vocab):
        self.rng = random.Random(seed)
        self.first = first
        self.cumulative = list(itertools.accumulate(1.0 / r for r in range(1, vocab - first + 1)))

    def below(self, n):
        return int(self.rng.random() * n)

    def token(self):
        at = bisect.bisect_right(self.cumulative, self.rng.random() * self.cumulative[-1])
        return self.first + min(at, len(self.cumulative) - 1)

    def tokens(self, n):
        return [self.token() for _ in range(n)]

    def shuffled(self, values):
        values = list(values)
        for i in range(len(values) - 1, 0, -1):
            j = self.below(i + 1)
            values[i], values[j] = values[j], values[i]
        return values


def apart(rows, first):
    """Give each row a first token of its own."""
    return [[first + i] + row[1:] for i, row in enumerate(rows)]


def packed(rows):
    """How many distinct non-empty prefixes the rows have: the nodes of their token trie."""
    total, last = 0, []
    for row in sorted(rows):
        shared = 0
        while shared < min(len(row), len(last)) and row[shared] == last[shared]:
            shared += 1
        total += len(row) - shared
        last = row
    return total


def files(seed, first, vocab, rows, prefix, suffix):
    def draw(name):  # a stream per file: adding one does not change the others
        return Draw(f"{seed}/{name}", first, vocab)

    d = draw("unshared")
    lengths = d.shuffled(256 + i * 768 // (rows - 1) for i in range(rows)) if rows > 1 else [1024]
    yield "unshared", apart([d.tokens(n) for n in lengths], first)
    d = draw("group")
    common = d.tokens(prefix)
    # The second part differs from row to row at its first token, so that exactly `prefix` tokens are shared.
    group = [common + [first + i] + d.tokens(suffix - 1) for i in range(rows)]
    yield "group", group
    yield "group-apart", apart(group, first)
    for name, total in (("1k", 1024), ("4k", 4096), ("16k", 16384)):
        d = draw("many-" + name)
        yield "many-" + name, apart([d.tokens(512) for _ in range(total // 512)], first)
    for name, total in (("1k", 1024), ("4k", 4096), ("8k", 8192), ("16k", 16384)):
        yield "one-" + name, [draw("one-" + name).tokens(total)]


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--out", required=True, help="folder for the files")
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--vocab", type=int, default=49152)
    ap.add_argument("--first-id", type=int, default=17, help="lowest id to draw (below it: special tokens)")
    ap.add_argument("--rows", type=int, default=16)
    ap.add_argument("--prefix", type=int, default=840)
    ap.add_argument("--suffix", type=int, default=160)
    args = ap.parse_args()
    os.makedirs(args.out, exist_ok=True)
    manifest = {}
    for name, rows in files(args.seed, args.first_id, args.vocab, args.rows, args.prefix, args.suffix):
        with open(os.path.join(args.out, name + ".jsonl"), "w") as f:
            for i, row in enumerate(rows):
                f.write(json.dumps({"id": f"{name}-{i:02d}", "input_tokens": row}) + "\n")
        manifest[name] = {"requests": len(rows), "logical_tokens": sum(map(len, rows)), "packed_tokens": packed(rows)}
    with open(os.path.join(args.out, "manifest.json"), "w") as f:
        f.write(json.dumps(manifest, indent=2) + "\n")
    for name, m in manifest.items():
        print(f"{name:12} {m['requests']:3} requests {m['logical_tokens']:6} logical {m['packed_tokens']:6} packed tokens")


if __name__ == "__main__":
    main()
