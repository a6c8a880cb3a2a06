"""What one eager call costs the host.

A batch of calls is queued on an idle GPU and the host clock read before and after; the batch is
short enough that the launch queue, which holds 1024 kernels, never makes the host wait. Batches of
the candidates are interleaved. The shape is tiny, so that the GPU keeps up.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict

import harness
import torch
import torch.nn.functional as F
from workload import Inputs, Problem, input_sets

SUITE = "host"
MODE = "host"
CALLS = 200  # in a batch
WARMUP_BATCHES = 3
LABELS = {
    "ours": "fa.forward",
    "ours_sdpa": "ours as SDPA",
    "sdpa": "plain SDPA",
    "empty": "empty_like",
}


def problems() -> list[Problem]:
    return [
        Problem(SUITE, "host", 1, 16, 8, 128, 128, 128, "causal", dtype)
        for dtype in (torch.float16, torch.bfloat16)
    ]


def bind(x: Inputs) -> dict[str, Callable[[], object]]:
    """The calls by name, as a user writes them. The empty tensor is the floor: one allocation and
    one trip through the dispatcher."""
    from flashattn_ext import scaled_dot_product_attention as ours_sdpa

    query, key, value = x.query, x.key, x.value
    return {
        "ours": lambda: torch.ops.fa.forward(query, key, value, None, True),
        "ours_sdpa": lambda: ours_sdpa(query, key, value, is_causal=True, enable_gqa=True),
        "sdpa": lambda: F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        ),
        "empty": lambda: torch.empty_like(query),
    }


def time_batches(
    calls: dict[str, Callable[[], object]],
    device: torch.device,
    batches: int,
    size: int = CALLS,
    contexts: dict[str, Callable[[], AbstractContextManager]] | None = None,
) -> dict[str, harness.Timing]:
    """The wall-clock time of one call, from interleaved batches of `size` calls. contexts: what is
    entered around the batches of a call, outside the timed part."""
    contexts = contexts or {}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    with harness.no_garbage_collection():
        for _, (name, call) in itertools.product(
            range(WARMUP_BATCHES + batches), tuple(calls.items())
        ):
            with contexts.get(name, nullcontext)():
                start = time.perf_counter()
                for _ in itertools.repeat(None, size):
                    call()
                samples[name].append((time.perf_counter() - start) * 1e3)
                harness.synchronize(device)
    return {name: harness.summary(ms[WARMUP_BATCHES:], size) for name, ms in samples.items()}


def run_problem(problem: Problem, device: torch.device, settings: harness.Settings) -> dict:
    """The row of the result file, in microseconds."""
    calls, results = {}, {}
    for name, call in bind(input_sets(problem, device)[0]).items():
        try:
            call()
        except RuntimeError as error:
            results[name] = {"error": harness.first_line(error)}
            continue
        calls[name] = call
    timings = time_batches(calls, device, settings.samples)
    for name, timing in timings.items():
        results[name] = asdict(timing)
        if "sdpa" in timings:
            ratio = timing.median_us / timings["sdpa"].median_us
            results[name]["ratio_to_sdpa"] = round(ratio, 4)
    return harness.problem_fields(problem) | {"mode": MODE, "unit": "us", "results": results}
