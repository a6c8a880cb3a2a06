"""Decoding from a static cache of transformers that is filled in part: the attention functions that
a model calls, ours ("fa_ext") beside that of "sdpa".

    python benchmarks/bench_static_cache.py --out static_cache.json
    python benchmarks/bench_static_cache.py --device cpu

Query, key and value of all slots, and the bool mask that says which are filled, are what the model
hands to its attention; the shapes are those of Qwen3-0.6B. Every call is replayed from a CUDA
graph, as in a compiled decoding step, and inputs rotate through three times the L2 cache. Prints
the microseconds of a call and of a token, 28 layers. Exit code 1 if a result is wrong; with --bars
also if ours takes more than a fifth of the time of plain SDPA.
"""

from __future__ import annotations

import functools
import sys
import time
import types
from collections.abc import Callable
from dataclasses import replace

import command
import harness
import torch
from bars import Bar, print_bars
from torch import Tensor
from workload import Inputs, Problem, Reference, input_sets

LAYERS = 28
LABELS = {"ours": "fa_ext", "sdpa": "sdpa of transformers"}


def gpu_problems() -> dict[Problem, int]:
    """With the slots that are filled."""
    static = functools.partial(Problem, "static", graph=True)
    return {
        static("static", 1, 16, 8, 1, 32768, 128): 2000,
        static("static", 4, 16, 8, 1, 8192, 128): 2000,
        static("static", 1, 16, 8, 4, 32768, 128): 2000,
    }


def cpu_problems() -> dict[Problem, int]:
    return {Problem("static", "static", 1, 4, 2, 1, 512, 32, dtype=torch.float32): 100}


def bind(name: str, problem: Problem, mask: Tensor) -> Callable[[Inputs], Tensor]:
    """The attention function of this name, called as a layer of the model calls it."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    import flashattn_ext.transformers

    functions = {
        "ours": flashattn_ext.transformers.attention_forward,
        "sdpa": sdpa_attention_forward,
    }
    group = problem.heads_q // problem.heads_k
    layer = types.SimpleNamespace(is_causal=True, num_key_value_groups=group, training=False)
    scaling = problem.head_dim**-0.5

    def call(x: Inputs) -> Tensor:
        out, _ = functions[name](layer, x.query, x.key, x.value, mask, scaling=scaling)
        return out.transpose(1, 2)

    return call


def filled_mask(problem: Problem, filled: int, device: torch.device) -> Tensor:
    """(batch, 1, seqlen_q, slots), True = take part: the last query stands in the last of them."""
    keys = torch.arange(problem.seqlen_k, device=device)
    rows = torch.arange(problem.seqlen_q, device=device)[:, None] + filled - problem.seqlen_q
    return (keys <= rows).expand(problem.batch, 1, -1, -1).contiguous()


def exact(problem: Problem, filled: int, x: Inputs) -> Reference:
    """Of the last query, which sees all that is filled."""
    part = replace(problem, seqlen_q=1, seqlen_k=filled)
    key, value = (tensor[:, :, :filled] for tensor in (x.key, x.value))
    reference = Reference.of(part, Inputs(x.query[:, :, -1:], key, value, None))
    return Reference(reference.rows + problem.seqlen_q - 1, reference.out)


def run_problem(
    problem: Problem, filled: int, device: torch.device, settings: harness.Settings
) -> dict:
    """The row of the result file."""
    sets = input_sets(problem, device)
    mask = filled_mask(problem, filled, device)
    reference = exact(problem, filled, sets[0])
    calls, results = {}, {}
    for name in LABELS:
        call = bind(name, problem, mask)
        results[name] = harness.checked(
            harness.nullcontext, lambda call=call: reference.error_share(call(sets[0])), device
        )
        if not results[name].keys() & {"error", "wrong"}:
            calls[name] = harness.Call(
                harness.nullcontext, lambda i, call=call: call(sets[i]), len(sets)
            )
    graph = problem.graph and device.type == "cuda"
    flops = 4 * problem.batch * problem.heads_q * problem.seqlen_q * filled * problem.head_dim
    harness.add_timings(results, calls, flops, device, settings, graph)
    return harness.problem_fields(problem) | {
        "label": f"{problem.label()}, {filled} filled",
        "filled": filled,
        "mode": "graph" if graph else harness.eager_mode(device),
        "results": results,
    }


def describe(row: dict, result: dict) -> str:
    """One line for the terminal."""
    parts = [f"{row['label']:58}"]
    for name, label in LABELS.items():
        us = row["results"][name].get("median_us")
        text = "-" if us is None else f"{us:.1f} us, a token {LAYERS * us * 1e-3:.2f} ms"
        parts.append(f"{label} {text}")
    return "  ".join(parts)


def bars(result: dict) -> list[Bar]:
    """What is required on an H200 of one query and 32768 slots: its share of plain SDPA's time."""
    shares = [
        row["results"]["ours"]["median_us"] / row["results"]["sdpa"]["median_us"]
        for row in result["rows"]
        if "S1x32768" in row["label"] and all("median_us" in r for r in row["results"].values())
    ]
    share = shares[0] if shares else None
    return [Bar("static cache: time of ours/plain SDPA", share, 0.2, at_most=True)]


def main(arguments: list[str] | None = None) -> int:
    parser = command.make_parser(__doc__, "static_cache.json")
    command.add_problem_arguments(parser)
    parser.add_argument("--bars", action="store_true", help="print the bar for an H200")
    options, start = parser.parse_args(arguments), time.perf_counter()
    filled = gpu_problems() if options.device.type == "cuda" else cpu_problems()
    command.choose(parser, options, filled, harness.Settings())
    result = command.measure(
        options,
        {"benchmark": "static_cache", "labels": LABELS},
        lambda problem, device: run_problem(problem, filled[problem], device, options.settings),
        describe,
    )
    failures = command.report_failures(result, options, start)
    missed = options.bars and not print_bars(bars(result))
    return 1 if failures or missed else 0


if __name__ == "__main__":
    sys.exit(main())
