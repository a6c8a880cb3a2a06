"""Packed sequences beside torch's varlen_attn, and beside our own kernels for one length.

    python benchmarks/bench_varlen.py --out benchmarks/results/varlen_h200.json
    python benchmarks/bench_varlen.py --quick --match forward
    python benchmarks/bench_varlen.py --device cpu

`mixed` are 16 sequences of 69 to 3792 tokens, which FlashAttention-2 takes through
torch.nn.attention.varlen; `equal` are batches that fa::forward and fa::backward take as well, on
the same memory. Forward and backward are timed apart: of ours the operators, of torch's backward a
torch.autograd.grad that keeps its graph. Exit code 1 if a result is wrong, or if ours refuses a
problem; with --bars also if one of the bars for an H200 is missed.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace

import command
import harness
import torch
from bars import Bar, lowest, print_bars
from gradients import GradientInputs, GradientReference, Gradients, gradient_bytes, gradient_flops
from harness import Call
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from workload import Problem, Reference, least_bytes, useful_flops

MIXED = (
    *(869, 1131, 460, 3336, 3455, 3017, 2955, 69),
    *(1359, 2944, 3792, 3073, 524, 1287, 941, 3772),
)
LABELS = {"ours": "ours", "dense": "ours, one length", "fa2": "FA2 (varlen_attn)"}
BACKWARD = "backward"


# ------------------------------------------------------------------------------------------------
# Problems


@dataclass(frozen=True)
class PackedProblem(Problem):
    """batch and seqlen_q are those of the longest sequence and their number; `name` is the
    direction."""

    lengths: tuple[int, ...] = ()

    @classmethod
    def of(cls, suite: str, name: str, lengths: tuple[int, ...], *shape, **more) -> PackedProblem:
        """shape: heads_q, heads_k, head_dim, mask."""
        heads_q, heads_k, head_dim, mask = shape
        longest, count = max(lengths), len(lengths)
        problem = (suite, name, count, heads_q, heads_k, longest, longest, head_dim, mask)
        return cls(*problem, lengths=lengths, **more)

    def label(self) -> str:
        return f"{self.suite} {super().label()}"

    def sequences(self) -> list[Problem]:
        fields = (self.suite, self.name, 1, self.heads_q, self.heads_k)
        more = (self.head_dim, self.mask, self.dtype)
        return [Problem(*fields, length, length, *more) for length in self.lengths]

    def total(self, work: Callable[[Problem], int]) -> int:
        """work, FLOPs or bytes, of all sequences."""
        return sum(map(work, self.sequences()))


def gpu_problems() -> list[PackedProblem]:
    found = []
    for name in ("forward", BACKWARD):
        for head_dim, mask in ((128, "causal"), (64, "causal"), (256, "causal"), (128, "full")):
            heads = 16 * 128 // head_dim
            found.append(PackedProblem.of("mixed", name, MIXED, heads, heads // 2, head_dim, mask))
        for lengths in ((2048,) * 8, (8192,) * 2):
            for head_dim, mask in ((128, "causal"), (128, "full"), (64, "causal"), (256, "causal")):
                heads = 16 * 128 // head_dim
                shape = (heads, heads // 2, head_dim, mask)
                found.append(PackedProblem.of("equal", name, lengths, *shape))
    return found


def cpu_problems() -> list[PackedProblem]:
    shape, more = (4, 2, 64, "causal"), {"dtype": torch.float32}
    return [
        PackedProblem.of(suite, name, lengths, *shape, **more)
        for name in ("forward", BACKWARD)
        for suite, lengths in (("mixed", (100, 7, 64)), ("equal", (96, 96)))
    ]


# ------------------------------------------------------------------------------------------------
# Inputs and candidates


@dataclass
class PackedInputs:
    problem: PackedProblem
    query: Tensor  # (total, Hq, D)
    key: Tensor  # (total, Hk, D)
    value: Tensor  # (total, Hk, D)
    grad_out: Tensor  # (total, Hq, D)
    cu_seqlens: Tensor  # (sequences + 1,), int32

    def batched(self, tensor: Tensor) -> Tensor:
        """(B, H, S, D), for equal lengths."""
        return tensor.unflatten(0, (self.problem.batch, -1)).transpose(1, 2)

    def split(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """For each sequence, its rows of each tensor as (1, H, S, D)."""
        ends = list(itertools.accumulate(self.problem.lengths, initial=0))
        for begin, end in itertools.pairwise(ends):
            yield tuple(x[begin:end].transpose(0, 1).unsqueeze(0) for x in tensors)

    def checks(self) -> list[GradientInputs]:
        parts = self.split(self.query, self.key, self.value, self.grad_out)
        return [GradientInputs(*part[:3], None, part[3]) for part in parts]


def input_sets(problem: PackedProblem, device: torch.device) -> list[PackedInputs]:
    """As workload.input_sets: together they hold three times the L2 cache."""
    p, count = problem, 1
    if device.type == "cuda":
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        count = math.ceil(3 * l2_bytes / p.total(least_bytes))
    ends = list(itertools.accumulate(p.lengths, initial=0))
    cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=device)

    def normal(heads: int) -> Tensor:
        return torch.randn(ends[-1], heads, p.head_dim, dtype=p.dtype, device=device)

    heads = (p.heads_q, p.heads_k, p.heads_k, p.heads_q)
    return [PackedInputs(p, *map(normal, heads), cu_seqlens) for _ in range(count)]


Step = Callable[[], Tensor | Gradients]  # packed results


def prepare_ours(p: PackedProblem, x: PackedInputs) -> Step:
    arguments = (x.query, x.key, x.value)
    more = (x.cu_seqlens, x.cu_seqlens, p.mask == "causal")
    if p.name != BACKWARD:
        forward = torch.ops.fa.forward_varlen.default
        return lambda: forward(*arguments, *more)[0]
    saved = torch.ops.fa.forward_varlen.default(*arguments, *more)
    backward = torch.ops.fa.backward_varlen.default
    return lambda: Gradients(*backward(x.grad_out, *arguments, *saved, *more))


def prepare_dense(p: PackedProblem, x: PackedInputs) -> Step:
    """Results stay as the kernels of one length leave them: rows of each sequence together."""
    arguments = tuple(map(x.batched, (x.query, x.key, x.value)))
    more = (None, p.mask == "causal")

    def packed(result: Tensor) -> Tensor:
        return result.transpose(1, 2).flatten(0, 1)

    if p.name != BACKWARD:
        forward = torch.ops.fa.forward.default
        return lambda: packed(forward(*arguments, *more)[0])
    saved = torch.ops.fa.forward.default(*arguments, *more)
    backward, grad_out = torch.ops.fa.backward.default, x.batched(x.grad_out)
    return lambda: Gradients(*map(packed, backward(grad_out, *arguments, *saved, *more)))


def prepare_varlen_attn(p: PackedProblem, x: PackedInputs) -> Step:
    if x.query.device.type == "cpu":
        raise RuntimeError("varlen_attn has no kernel for the CPU")
    options = {"window_size": (-1, 0) if p.mask == "causal" else (-1, -1)}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # not in torch 2.11
        options["enable_gqa"] = True
    more = (x.cu_seqlens, x.cu_seqlens, p.seqlen_q, p.seqlen_k)
    tensors = (x.query, x.key, x.value)
    if p.name != BACKWARD:
        return lambda: varlen_attn(*tensors, *more, **options)
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out = varlen_attn(*leaves, *more, **options)
    return lambda: Gradients(*torch.autograd.grad(out, leaves, x.grad_out, retain_graph=True))


METHODS = {
    "mixed": {"ours": prepare_ours, "fa2": prepare_varlen_attn},
    "equal": {"ours": prepare_ours, "dense": prepare_dense, "fa2": prepare_varlen_attn},
}


# ------------------------------------------------------------------------------------------------
# Rows


def error_share(x: PackedInputs, references: list, result: Tensor | Gradients) -> float:
    """The largest of all sequences."""
    if isinstance(result, Tensor):
        shares = [r.error_share(out) for r, (out,) in zip(references, x.split(result), strict=True)]
    else:
        parts = x.split(*result)
        shares = [r.error_share(Gradients(*g)) for r, g in zip(references, parts, strict=True)]
    return math.nan if any(map(math.isnan, shares)) else max(shares)


def run_problem(problem: PackedProblem, device: torch.device, settings: harness.Settings) -> dict:
    """Checks every method, then times those that passed: the row of the result file."""
    sets = input_sets(problem, device)
    kind = GradientReference if problem.name == BACKWARD else Reference
    references = [kind.of(p, x) for p, x in zip(problem.sequences(), sets[0].checks(), strict=True)]
    calls: dict[str, Call] = {}
    results: dict[str, dict] = {}
    for name, prepare in METHODS[problem.suite].items():
        steps: list[Step] = []

        def share(prepare=prepare, steps=steps):
            steps += [prepare(problem, x) for x in sets]
            # Whatever is left unwritten shows as NaN, when the allocator hands out these blocks.
            x = sets[0]
            poison = [torch.full_like(t, math.nan) for t in (x.query, x.key, x.value)]
            del poison
            return error_share(x, references, steps[0]())

        results[name] = harness.checked(nullcontext, share, device)
        if not results[name].keys() & {"error", "wrong"}:
            calls[name] = Call(nullcontext, lambda i, steps=steps: steps[i](), len(sets))
    flops, least = useful_flops, least_bytes
    if problem.name == BACKWARD:
        flops, least = gradient_flops, gradient_bytes
    harness.add_timings(results, calls, problem.total(flops), device, settings)
    return harness.problem_fields(problem) | {
        "mode": harness.eager_mode(device),
        "input_sets": len(sets),
        "flops": problem.total(flops),
        "bytes": problem.total(least),
        "results": results,
    }


def bars(result: dict) -> list[Bar]:
    """What is required on an H200, and what was measured."""

    def ratios(suite: str, name: str, other: str) -> dict[str, float]:
        return {
            row["label"]: row["results"][other]["median_us"] / row["results"]["ours"]["median_us"]
            for row in result["rows"]
            if (row["suite"], row["name"]) == (suite, name)
            and all("median_us" in row["results"][method] for method in ("ours", other))
        }

    mixed = ratios("mixed", "forward", "fa2")
    anchor = {label: ratio for label, ratio in mixed.items() if label.endswith("D128 causal bf16")}
    return [
        lowest("mixed lengths, D128 causal: ours/varlen_attn", anchor, 1, 1.8),
        lowest("equal lengths, forward: lowest ours/dense", ratios("equal", "forward", "dense"),
               8, 0.95),
        lowest("equal lengths, backward: lowest ours/dense", ratios("equal", BACKWARD, "dense"),
               8, 0.95),
    ]  # fmt: skip


def describe(row: dict, result: dict) -> str:
    """One line for the terminal."""
    parts = [f"{row['label']:52}"]
    for name, r in row["results"].items():
        text = "WRONG" if "wrong" in r else f"{r['tflops']:.0f}" if "tflops" in r else "-"
        parts.append(f"{result['labels'][name]} {text}")
    us = {name: r["median_us"] for name, r in row["results"].items() if "median_us" in r}
    parts += [
        f"ours/{name} {us[name] / us['ours']:.3f}" for name in us if name != "ours" and "ours" in us
    ]
    return "  ".join(parts)


# ------------------------------------------------------------------------------------------------
# Command line


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = command.make_parser(__doc__, "varlen.json")
    command.add_problem_arguments(parser)
    parser.add_argument("--bars", action="store_true", help="print the bars for an H200")
    options = parser.parse_args(arguments)
    problems = gpu_problems() if options.device.type == "cuda" else cpu_problems()
    settings = replace(harness.Settings(), samples=16, warmup_ms=100.0, reruns=1)
    command.choose(parser, options, problems, settings)
    return options


def main(arguments: list[str] | None = None) -> int:
    options, start = parse_arguments(arguments), time.perf_counter()
    result = command.measure(
        options,
        {"benchmark": "varlen", "labels": LABELS},
        lambda problem, device: run_problem(problem, device, options.settings),
        describe,
    )
    failures = command.report_failures(
        result, options, start, lambda row, name: result["labels"][name]
    )
    missed = options.bars and not print_bars(bars(result))
    return 1 if failures or missed else 0


if __name__ == "__main__":
    sys.exit(main())
