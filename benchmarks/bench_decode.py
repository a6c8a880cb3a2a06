"""Decoding beside torch's SDPA backends: few queries over long caches, bound by reading K and V.

    python benchmarks/bench_decode.py --out benchmarks/results/decode_h200.json
    python benchmarks/bench_decode.py --quick --match B1
    python benchmarks/bench_decode.py --device cpu

Every call is replayed from a CUDA graph, and inputs rotate through three times the L2 cache. `ours`
reads a contiguous cache, `ours_paged_64` and `ours_paged_16` the same keys from pages of so many
keys in a random order, with lengths and a block table on the device; `ours_forward` is fa::forward,
which has the choice between the decoding kernels and its own. Prints microseconds, and the GB/s of
K and V. Exit code 1 if a result is wrong, or if ours refuses a problem; with --bars also if one of
the bars for an H200 is missed.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable

import bench_prefill
import command
import harness
import torch
from bars import print_bars
from decode_rates import BEST_OF, bars, speeds
from harness import Candidate
from torch import Tensor
from workload import Inputs, Problem

PAGE_SIZES = (64, 16)


def bind_ours(problem: Problem) -> Callable[[Inputs], Tensor]:
    forward = torch.ops.fa.forward_kvcache.default

    def call(x: Inputs) -> Tensor:
        query, key, value = (t.transpose(1, 2) for t in (x.query, x.key, x.value))
        return forward(query, key, value)[0].transpose(1, 2)

    return call


def bind_paged(page_size: int, problem: Problem) -> Callable[[Inputs], Tensor]:
    """The pages of a sequence in a random order: without a mask the order of keys does not matter,
    so that the result is the same."""
    forward = torch.ops.fa.forward_kvcache.default
    p = problem
    pages = p.seqlen_k // page_size

    @functools.cache
    def on_device(device: torch.device) -> tuple[Tensor, Tensor]:
        order = torch.stack([torch.randperm(pages) + b * pages for b in range(p.batch)])
        lengths = torch.full((p.batch,), p.seqlen_k)
        return order.int().to(device), lengths.int().to(device)

    def call(x: Inputs) -> Tensor:
        table, lengths = on_device(x.query.device)
        key, value = (
            t.transpose(1, 2).view(p.batch * pages, page_size, p.heads_k, p.head_dim)
            for t in (x.key, x.value)
        )
        return forward(x.query.transpose(1, 2), key, value, lengths, table)[0].transpose(1, 2)

    return call


CANDIDATES = [
    Candidate("ours", "ours", bind_ours, kernel=bench_prefill.ours_kernel),
    *(
        Candidate(f"ours_paged_{size}", f"pages of {size}", functools.partial(bind_paged, size))
        for size in PAGE_SIZES
    ),
    Candidate("ours_forward", "fa.forward", bench_prefill.bind_ours),
    *(bench_prefill.CANDIDATES[name] for name in ("fa2", "cudnn", "sdpa")),
]


def gpu_problems() -> list[Problem]:
    decode = functools.partial(Problem, "decode", graph=True)
    one = [
        (1, 16, 8, 1024),
        (1, 16, 8, 4096),
        (1, 32, 8, 4096),
        (1, 32, 8, 32768),
        (1, 32, 8, 131072),
        (4, 32, 8, 8192),
        (16, 32, 8, 8192),
        (64, 32, 8, 4096),
        (8, 64, 8, 16384),
    ]
    several = [
        (1, 64, 8, 8, 32768),
        (1, 64, 8, 16, 32768),
        (8, 32, 8, 4, 8192),
        (1, 16, 8, 16, 8192),
    ]
    # Whatever the rows of a head group, too few tiles for the GPU: only splits of the keys fill it.
    chunks = [(1, 8, 1, 256, 131072), (1, 32, 8, 64, 8192)]
    short = [(1, 16, 8, 1, 128), (8, 16, 16, 1, 256), (32, 32, 32, 1, 1024)]
    return [
        *(decode("one", b, q, k, 1, s, 128) for b, q, k, s in one),
        *(decode("several", b, q, k, t, s, 128) for b, q, k, t, s in several),
        *(decode("chunk", b, q, k, t, s, 128) for b, q, k, t, s in chunks),
        *(decode("short", b, q, k, t, s, 128) for b, q, k, t, s in short),
        # Other head_dims and groups, and fp16.
        decode("other", 8, 32, 8, 1, 8192, 64),
        decode("other", 8, 16, 2, 1, 8192, 256),
        decode("other", 16, 16, 16, 1, 4096, 128),
        decode("other", 8, 28, 4, 1, 8192, 128, dtype=torch.float16),
    ]


def cpu_problems() -> list[Problem]:
    single = functools.partial(Problem, "decode", dtype=torch.float32)
    return [single("one", 2, 8, 2, 1, 512, 64), single("several", 2, 8, 2, 4, 512, 64)]


def describe(row: dict, result: dict) -> str:
    """One line for the terminal."""
    parts = [f"{row['label']:46}"]
    gbs = speeds(row, result["environment"]["device"])
    for candidate in CANDIDATES:
        outcome = row["results"][candidate.name]
        us = outcome.get("median_us")
        text = "WRONG" if "wrong" in outcome else "-" if us is None else f"{us:.1f} us"
        parts.append(f"{candidate.label} {text}")
    if "ours" in gbs:
        parts.append(f"| {gbs['ours']:.0f} GB/s")
        peers = [gbs[name] for name in BEST_OF if name in gbs]
        parts += [f"ours/best {gbs['ours'] / max(peers):.3f}"] if peers else []
    return "  ".join(parts)


# ------------------------------------------------------------------------------------------------
# Command line


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = command.make_parser(__doc__, "decode.json")
    command.add_problem_arguments(parser)
    parser.add_argument("--bars", action="store_true", help="print the bars for an H200")
    options = parser.parse_args(arguments)
    problems = gpu_problems() if options.device.type == "cuda" else cpu_problems()
    command.choose(parser, options, problems, harness.Settings())
    return options


def main(arguments: list[str] | None = None) -> int:
    options, start = parse_arguments(arguments), time.perf_counter()
    fields = {
        "benchmark": "decode",
        "labels": {candidate.name: candidate.label for candidate in CANDIDATES},
    }
    result = command.measure(
        options,
        fields,
        lambda problem, device: harness.run_problem(problem, CANDIDATES, device, options.settings),
        describe,
    )
    failures = command.report_failures(
        result, options, start, lambda row, name: result["labels"][name]
    )
    missed = options.bars and not print_bars(bars(result))
    return 1 if failures or missed else 0


if __name__ == "__main__":
    sys.exit(main())
