"""Backward of attention beside torch's SDPA backends: speed and memory.

    python benchmarks/bench_backward.py --out benchmarks/results/backward_h200.json
    python benchmarks/bench_backward.py --quick --only grid,dtype --match D128
    python benchmarks/bench_backward.py --device cpu

Suites: `grid` is the backward alone, 16384 tokens of 2048 channels in bf16; `dtype` some of it in
fp16; `deterministic` ours with and without that option; `portable` our kernel for every GPU, beside
FA2; `stack` the forwards and backwards of 28 layers, beside plain SDPA; `memory` the peak of a
forward and a backward.

Of ours the operator fa::backward is timed, of torch's a torch.autograd.grad that keeps its graph;
both run behind a full launch queue. Exit code 1 if a gradient is wrong, or if ours refuses.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import bench_prefill
import command
import harness
import peak_memory
import rates
import report
import torch
import torch.nn.functional as F
from gradients import (
    GradientInputs,
    GradientReference,
    Gradients,
    gradient_bytes,
    gradient_flops,
    gradient_inputs,
)
from harness import Call
from workload import Problem, least_bytes, useful_flops

SETTINGS = harness.Settings(samples=16, warmup_ms=100.0, reruns=1)
LAYERS = 28  # of the stack, those of Qwen3-0.6B
DETERMINISTIC = "ours_deterministic"

Step = Callable[[], Gradients]


# ------------------------------------------------------------------------------------------------
# Methods


@dataclass(frozen=True)
class Method:
    """A competitor in the backward alone. `prepare` runs the forward on one set of inputs and
    returns the call to time; it raises RuntimeError for what the implementation refuses."""

    name: str  # key in the result file
    prepare: Callable[[Problem, GradientInputs, float], Step]  # the last: scale
    context: Callable[[], AbstractContextManager] = nullcontext  # around the forward
    scale_sign: int = 1


def backward_arguments(problem: Problem, x: GradientInputs, scale: float) -> tuple:
    """Of the operator: what forward was given and what it returned."""
    tensors, causal = (x.query, x.key, x.value), problem.mask == "causal"
    out, lse = torch.ops.fa.forward.default(*tensors, None, causal, scale)
    return (x.grad_out, *tensors, out, lse, None, causal, scale)


def prepare_ours(
    problem: Problem, x: GradientInputs, scale: float, deterministic: bool = False
) -> Step:
    arguments = backward_arguments(problem, x, scale)
    backward = torch.ops.fa.backward.default
    return lambda: Gradients(*backward(*arguments, deterministic=deterministic))


def prepare_torch(problem: Problem, x: GradientInputs, scale: float) -> Step:
    leaves = x.leaves()
    out = F.scaled_dot_product_attention(
        leaves.query,
        leaves.key,
        leaves.value,
        is_causal=problem.mask == "causal",
        scale=scale,
        enable_gqa=problem.heads_q != problem.heads_k,
    )
    return lambda: leaves.gradients(out, retain_graph=True)


METHODS = {"ours": Method("ours", prepare_ours)} | {
    name: Method(name, prepare_torch, candidate.context)
    for name, candidate in bench_prefill.CANDIDATES.items()
    if name != "ours"
}
# The Hopper kernel takes positive scales only. The work is the same for either sign.
PORTABLE = Method("ours", prepare_ours, scale_sign=-1)
REPEATABLE = Method(DETERMINISTIC, functools.partial(prepare_ours, deterministic=True))
DEFAULT_CANDIDATES = ["ours", "fa2", "cudnn", "sdpa"]


# ------------------------------------------------------------------------------------------------
# Problems


def cells(suite: str, dtype: torch.dtype = torch.bfloat16) -> list[Problem]:
    return [
        Problem(suite, suite, 16384 // s, 2048 // d, 2048 // d, s, s, d, mask, dtype)
        for d in (64, 128, 256)
        for s in (2048, 8192)
        for mask in ("full", "causal")
    ]


def gpu_suites() -> dict[str, list[Problem]]:
    half = [p for p in cells("dtype", torch.float16) if p.seqlen_q == 8192]
    return {
        "grid": cells("grid"),
        "dtype": [p for p in half if p.head_dim == 128 or p.mask == "causal"],
        "deterministic": cells("deterministic"),
        "portable": cells("portable"),
        "stack": [Problem("stack", "stack", 1, 16, 8, 8192, 8192, 128, "causal")],
        peak_memory.SUITE: peak_memory.problems(),
    }


def cpu_suites(quick: bool) -> dict[str, list[Problem]]:
    heads, length = (2, 48) if quick else (8, 512)

    def problem(suite: str, heads_k: int, mask: str, dtype: torch.dtype = torch.float32) -> Problem:
        return Problem(suite, suite, 1, heads, heads_k, length, length, 64, mask, dtype)

    return {
        "grid": [
            problem("grid", heads, "full"),
            problem("grid", heads, "causal"),
            problem("grid", heads // 2, "causal"),
        ],
        "dtype": [problem("dtype", heads, "causal", torch.bfloat16)],
        "deterministic": [problem("deterministic", heads, "causal")],
        "portable": [problem("portable", heads, "causal")],
        "stack": [problem("stack", heads // 2, "causal")],
    }


# ------------------------------------------------------------------------------------------------
# Rows


def run_backward(
    problem: Problem, methods: list[Method], device: torch.device, settings: harness.Settings
) -> dict:
    """Checks the gradients of every method, then times those that passed: the row of the result
    file."""
    sets = gradient_inputs(problem, device)
    calls: dict[str, Call] = {}
    results: dict[str, dict] = {}
    references: dict[float, GradientReference] = {}
    scales = {method.name: method.scale_sign * problem.head_dim**-0.5 for method in methods}
    for method in methods:
        scale = scales[method.name]
        if scale not in references:
            references[scale] = GradientReference.of(problem, sets[0], scale)
        steps: list[Step] = []

        def error_share(method=method, scale=scale, reference=references[scale], steps=steps):
            steps += [method.prepare(problem, x, scale) for x in sets]
            poison_free_memory(sets[0])
            return reference.error_share(steps[0]())

        result = results[method.name] = harness.checked(method.context, error_share, device)
        if not result.keys() & {"error", "wrong"}:
            calls[method.name] = Call(nullcontext, lambda i, steps=steps: steps[i](), len(sets))
    if DETERMINISTIC in calls and not repeats(calls[DETERMINISTIC]):
        del calls[DETERMINISTIC]
        results[DETERMINISTIC]["wrong"] = "two runs differ"
    extra = {}
    if "ours" in calls:
        arguments = backward_arguments(problem, sets[0], scales["ours"])
        extra["kernel"] = kernel = torch.ops.fa.backward_kernel(*arguments)
        if problem.suite == "portable" and kernel.startswith("bwd_sm90"):
            del calls["ours"]
            results["ours"]["wrong"] = f"not the portable kernel, but {kernel}"
    timings = harness.add_timings(results, calls, gradient_flops(problem), device, settings)
    if {"ours", DETERMINISTIC} <= timings.keys():
        slowdown = timings[DETERMINISTIC].median_us / timings["ours"].median_us
        extra["slowdown"] = round(slowdown, 4)
    return harness.problem_fields(problem) | {
        "direction": rates.BACKWARD,
        "mode": harness.eager_mode(device),
        "input_sets": len(sets),
        "flops": gradient_flops(problem),
        "bytes": gradient_bytes(problem),
        **extra,
        "results": results,
    }


def poison_free_memory(x: GradientInputs) -> None:
    """What a backward leaves unwritten shows as NaN, when the allocator hands it these blocks."""
    poison = [torch.full_like(tensor, float("nan")) for tensor in (x.query, x.key, x.value)]
    del poison


def repeats(call: Call) -> bool:
    """Whether two runs give the same gradients bit by bit."""
    return all(map(torch.equal, call.launch(0), call.launch(0)))


def run_stack(
    problem: Problem,
    candidates: list[harness.Candidate],
    device: torch.device,
    settings: harness.Settings,
    layers: int = LAYERS,
) -> dict:
    """Forward of all layers, then backward of all of them, every layer with inputs of its own. The
    gradients of the first layer are checked."""
    sets: list[GradientInputs] = []
    while len(sets) < layers:
        sets += [x.leaves() for x in gradient_inputs(problem, device)]
    sets = sets[:layers]
    leaves = [tensor for x in sets for tensor in (x.query, x.key, x.value)]
    reference = GradientReference.of(problem, sets[0])
    calls: dict[str, Call] = {}
    results: dict[str, dict] = {}
    for candidate in candidates:
        attention = candidate.bind(problem)

        def launch(_, attention=attention):
            outs = [attention(x) for x in sets]
            return torch.autograd.grad(outs, leaves, [x.grad_out for x in sets])

        def error_share(launch=launch):
            return reference.error_share(Gradients(*launch(0)[:3]))

        name, context = candidate.name, candidate.context
        results[name] = harness.checked(context, error_share, device)
        if not results[name].keys() & {"error", "wrong"}:
            calls[name] = Call(context, launch)
    flops = layers * (useful_flops(problem) + gradient_flops(problem))
    # A sample is one launch of tens of milliseconds.
    fewer = replace(settings, samples=min(10, settings.samples))
    harness.add_timings(results, calls, flops, device, fewer)
    return harness.problem_fields(problem) | {
        "direction": rates.BOTH,
        "mode": harness.eager_mode(device),
        "layers": layers,
        "input_sets": layers,
        "flops": flops,
        "bytes": layers * (least_bytes(problem) + gradient_bytes(problem)),
        "results": results,
    }


def run_problem(
    problem: Problem, names: list[str], device: torch.device, settings: harness.Settings
) -> dict:
    """The row of the result file. Some suites have candidates of their own."""
    if problem.suite == "deterministic":
        return run_backward(problem, [METHODS["ours"], REPEATABLE], device, settings)
    if problem.suite == "portable":
        return run_backward(problem, [PORTABLE, METHODS["fa2"]], device, settings)
    if problem.suite == "stack":
        pair = [bench_prefill.CANDIDATES[name] for name in ("ours", "sdpa")]
        return run_stack(problem, pair, device, settings)
    if problem.suite == peak_memory.SUITE:
        chosen = [bench_prefill.CANDIDATES[name] for name in names]
        return peak_memory.run_problem(problem, chosen, device)
    return run_backward(problem, [METHODS[name] for name in names], device, settings)


# ------------------------------------------------------------------------------------------------
# Command line


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = command.make_parser(__doc__, "backward.json")
    command.add_problem_arguments(parser)
    parser.add_argument("--only", help="suites to run, comma-separated (default: all)")
    parser.add_argument(
        "--candidates",
        default=",".join(DEFAULT_CANDIDATES),
        help=f"of grid, dtype and memory: {', '.join(METHODS)} (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    suites = gpu_suites() if options.device.type == "cuda" else cpu_suites(options.quick)
    suite_names = command.names(parser, "--only", options.only, suites)
    options.names = command.names(parser, "--candidates", options.candidates, METHODS)
    problems = [problem for name in suite_names for problem in suites[name]]
    command.choose(parser, options, problems, SETTINGS)
    return options


def describe(row: dict, result: dict) -> str:
    """One line for the terminal."""
    parts = [f"{row['label']:46} {row['mode']:6}"]
    tflops = rates.speeds(row, result["environment"]["device"])
    for name, r in row["results"].items():
        value = report.number(tflops.get(name))
        if row["mode"] == peak_memory.MODE:
            value = f"{report.mebibytes(r.get('peak_bytes'))} MiB"
        parts.append(f"{name} {'WRONG' if 'wrong' in r else value}")
    if rates.FA3 in tflops:
        parts.append(f"{rates.FA3_LABEL} {report.number(tflops[rates.FA3])}")
    if "slowdown" in row:
        parts.append(f"| {row['slowdown']:.3f} times the time")
    elif "ours" in tflops:
        parts.append(f"| ours/best {report.number(rates.speedup(tflops, 'best'), 3)}")
    return "  ".join(parts)


def main(arguments: list[str] | None = None) -> int:
    options, start = parse_arguments(arguments), time.perf_counter()
    fields = {
        "benchmark": "backward",
        "labels": {name: bench_prefill.CANDIDATES[name].label for name in options.names},
    }
    result = command.measure(
        options,
        fields,
        lambda problem, device: run_problem(problem, options.names, device, options.settings),
        describe,
    )
    print("", report.backward_summary(result), "", sep="\n")
    return 1 if command.report_failures(result, options, start) else 0


if __name__ == "__main__":
    sys.exit(main())
