"""Forward attention beside torch's SDPA backends.

    python benchmarks/bench_prefill.py --out benchmarks/results/h200.json
    python benchmarks/bench_prefill.py --quick --only grid --match D128
    python benchmarks/bench_prefill.py --device cpu

Exit code 1 if a result is wrong, or if ours refuses a problem.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable

import command
import dtype_speed
import harness
import host_cost
import rates
import report
import torch
import torch.nn.functional as F
from harness import Candidate
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from workload import Inputs, Problem

# ------------------------------------------------------------------------------------------------
# Candidates


def bind_ours(problem: Problem) -> Callable[[Inputs], Tensor]:
    forward = torch.ops.fa.forward.default
    if problem.mask in ("causal", "window"):
        window = problem.window

        def banded(x: Inputs) -> Tensor:
            return forward(x.query, x.key, x.value, None, True, window_left=window)[0]

        return banded

    return lambda x: forward(x.query, x.key, x.value, x.mask)[0]


def ours_kernel(problem: Problem, x: Inputs) -> str | None:
    """The kernel that the call of bind_ours takes; None in a build whose operators do not tell."""
    if not hasattr(torch.ops.fa, "forward_kernel"):
        return None
    banded = problem.mask in ("causal", "window")
    return torch.ops.fa.forward_kernel(
        x.query,
        x.key,
        x.value,
        None if banded else x.mask,
        banded,
        None,
        window_left=problem.window if banded else -1,
        window_right=-1,
        bottom_right=False,
    )


def bind_sdpa(problem: Problem) -> Callable[[Inputs], Tensor]:
    causal = problem.mask == "causal"
    gqa = problem.heads_q != problem.heads_k

    def call(x: Inputs) -> Tensor:
        return F.scaled_dot_product_attention(
            x.query, x.key, x.value, attn_mask=x.mask, is_causal=causal, enable_gqa=gqa
        )

    return call


def sdpa_backend(name: str, label: str, backend: SDPBackend) -> Candidate:
    return Candidate(name, label, bind_sdpa, functools.partial(sdpa_kernel, backend))


CANDIDATES = {
    candidate.name: candidate
    for candidate in [
        Candidate("ours", "ours", bind_ours, kernel=ours_kernel),
        sdpa_backend("fa2", "FA2 (torch)", SDPBackend.FLASH_ATTENTION),
        sdpa_backend("cudnn", "cuDNN", SDPBackend.CUDNN_ATTENTION),
        Candidate("sdpa", "plain SDPA", bind_sdpa),
        sdpa_backend("efficient", "mem-efficient", SDPBackend.EFFICIENT_ATTENTION),
    ]
}
DEFAULT_CANDIDATES = ["ours", "fa2", "cudnn", "sdpa"]


# ------------------------------------------------------------------------------------------------
# Problems


def grid() -> list[Problem]:
    """16384 tokens of 2048 channels, whatever the head_dim and the sequence length."""
    return [
        Problem("grid", "grid", 16384 // s, 2048 // d, 2048 // d, s, s, d, mask, graph=s <= 2048)
        for d in (64, 128, 256)
        for s in (512, 1024, 2048, 4096, 8192, 16384)
        for mask in ("full", "causal")
    ]


def gpu_suites() -> dict[str, list[Problem]]:
    half = torch.float16
    small = functools.partial(Problem, graph=True)  # too short to time eagerly
    return {
        "grid": grid(),
        "seed": [
            small("seed", "seed1", 4, 16, 16, 1024, 1024, 128, "full", half),
            small("seed", "seed2", 2, 16, 8, 1024, 1024, 128, "causal", half),
            small("seed", "seed2", 2, 16, 8, 1024, 1024, 128, "causal", half, in_l2=True),
            small("seed", "seed1", 4, 16, 16, 1024, 1024, 128, "full"),
            small("seed", "seed2", 2, 16, 8, 1024, 1024, 128, "causal"),
            small("seed", "seed2-mha", 2, 16, 16, 1024, 1024, 128, "causal"),
        ],
        "fp16": [
            Problem("fp16", "grid", 4, heads, heads, 4096, 4096, d, mask, half)
            for heads, d in ((32, 64), (16, 128), (8, 256))
            for mask in ("full", "causal")
        ],
        "qwen3": [
            small("qwen3", "qwen3-0.6b", 1, 16, 8, 512, 512, 128, "causal"),
            small("qwen3", "qwen3-0.6b", 1, 16, 8, 2048, 2048, 128, "causal"),
            Problem("qwen3", "qwen3-0.6b", 1, 16, 8, 4096, 4096, 128, "causal"),
            Problem("qwen3", "qwen3-0.6b", 1, 16, 8, 32768, 32768, 128, "causal"),
            Problem("qwen3", "qwen3-8b", 1, 32, 8, 8192, 8192, 128, "causal"),
        ],
        "odd": [
            small("odd", "chunk", 1, 32, 8, 512, 8192, 128, "full"),
            Problem("odd", "cross", 2, 16, 16, 1000, 3000, 128, "full"),
            Problem("odd", "d96", 4, 16, 16, 4096, 4096, 96, "causal"),
        ],
        "mask": [
            Problem("mask", "padded", b, 16, 16, s, s, 128, mask)
            for b, s in ((4, 2048), (1, 8192))
            for mask in ("bool", "lowest", "-inf")
        ],
        "window": [Problem("window", "window", 2, 16, 16, 8192, 8192, 128, "window", window=1023)],
        host_cost.SUITE: host_cost.problems(),
        dtype_speed.SUITE: dtype_speed.problems(),
    }


def cpu_suites(quick: bool) -> dict[str, list[Problem]]:
    heads, length = (2, 96) if quick else (8, 2048)
    single = functools.partial(Problem, dtype=torch.float32)
    return {
        "cpu": [
            single("cpu", "cpu", 1, heads, heads, length, length, 64, "full"),
            single("cpu", "cpu", 1, heads, heads, length, length, 64, "causal"),
            single("cpu", "cpu-gqa", 1, heads, heads // 2, length, length, 64, "causal"),
            single("cpu", "padded", 1, heads, heads, length, length, 64, "bool"),
        ]
    }


# ------------------------------------------------------------------------------------------------
# Command line


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = command.make_parser(__doc__, "prefill.json")
    command.add_problem_arguments(parser)
    parser.add_argument("--only", help="suites to run, comma-separated (default: all)")
    parser.add_argument(
        "--candidates",
        default=",".join(DEFAULT_CANDIDATES),
        help=f"comma-separated, of {', '.join(CANDIDATES)} (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    suites = gpu_suites() if options.device.type == "cuda" else cpu_suites(options.quick)
    suite_names = command.names(parser, "--only", options.only, suites)
    names = command.names(parser, "--candidates", options.candidates, CANDIDATES)
    options.chosen = [CANDIDATES[name] for name in names]
    problems = [problem for name in suite_names for problem in suites[name]]
    command.choose(parser, options, problems, harness.Settings())
    return options


def describe(row: dict, result: dict) -> str:
    """One line for the terminal."""
    parts = [f"{row['label']:44} {row['mode']:6}"]
    if row["mode"] == host_cost.MODE:
        for name, label in result["host_labels"].items():
            parts.append(f"{label} {report.number(row['results'][name].get('median_us'), 2)} us")
        return "  ".join(parts)
    if row["mode"] == dtype_speed.MODE:
        for name, label in result["dtype_labels"].items():
            wrong = "wrong" in row["results"][name]
            us = report.number(row["results"][name].get("median_us"), 1)
            parts.append(f"{label} {'WRONG' if wrong else us} us")
        ratios = [report.number(row[name], 3) for name in ("ratio", "cudnn_ratio")]
        return "  ".join([*parts, f"| fp16/bf16 ours {ratios[0]}  cuDNN {ratios[1]}"])
    tflops = rates.speeds(row, result["environment"]["device"])
    for name, label in result["labels"].items():
        wrong = "wrong" in row["results"][name]
        parts.append(f"{label} {'WRONG' if wrong else report.number(tflops.get(name))}")
    if rates.FA3 in tflops:
        parts.append(f"{rates.FA3_LABEL} {report.number(tflops[rates.FA3])}")
    parts.append(f"| ours/FA2 {report.number(rates.speedup(tflops, 'fa2'), 3)}")
    return "  ".join(parts)


def main(arguments: list[str] | None = None) -> int:
    options, start = parse_arguments(arguments), time.perf_counter()

    def run_problem(problem: Problem, device: torch.device) -> dict:
        if problem.suite == host_cost.SUITE:
            return host_cost.run_problem(problem, device, options.settings)
        if problem.suite == dtype_speed.SUITE:
            both = [CANDIDATES[name] for name in dtype_speed.CANDIDATES]
            return dtype_speed.run_problem(problem, both, device, options.settings)
        return harness.run_problem(problem, options.chosen, device, options.settings)

    # These suites have candidates of their own, ours among them.
    own = any(p.suite in (host_cost.SUITE, dtype_speed.SUITE) for p in options.problems)
    fields = {
        "benchmark": "prefill",
        "labels": {candidate.name: candidate.label for candidate in options.chosen},
        "host_labels": host_cost.LABELS,
        "dtype_labels": dtype_speed.LABELS,
    }
    with_package = own or CANDIDATES["ours"] in options.chosen
    result = command.measure(options, fields, run_problem, describe, with_package)
    print(f"\nceilings {result['ceilings']}, after {result['ceilings_after']}")
    if any(row["suite"] == "grid" for row in result["rows"]):
        print(report.grid_table(result))
    failures = command.report_failures(
        result, options, start, lambda row, name: report.row_labels(result, row)[name]
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
