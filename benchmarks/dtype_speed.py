"""Our speed in fp16 and in bf16, and cuDNN's, interleaved in one measurement.

Between two problems measured minutes apart the GPU's clock differs by a few percent, which is more
than the two dtypes do. The inputs are the same random values, rounded to either dtype: what a
product costs in power, and so the clock, depends on the bits of its operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

import harness
import torch
from workload import Inputs, Problem, input_sets

SUITE = "dtypes"
MODE = "dtypes"
CANDIDATES = ("ours", "cudnn")
DTYPES = ("float16", "bfloat16")
LABELS = {
    "ours_float16": "ours fp16",
    "ours_bfloat16": "ours bf16",
    "cudnn_float16": "cuDNN fp16",
    "cudnn_bfloat16": "cuDNN bf16",
}


def problems() -> list[Problem]:
    """The shapes of the seed, and one of the grid for every head_dim. Measured in both dtypes,
    whatever that of the problem."""
    return [
        Problem(SUITE, SUITE, *shape, mask, graph=True)
        for *shape, masks in (
            (4, 16, 16, 1024, 1024, 128, ["full"]),
            (2, 16, 8, 1024, 1024, 128, ["causal"]),
            (4, 32, 32, 4096, 4096, 64, ["full", "causal"]),
            (4, 16, 16, 4096, 4096, 128, ["full", "causal"]),
            (4, 8, 8, 4096, 4096, 256, ["full", "causal"]),
        )
        for mask in masks
    ]


def paired_inputs(problem: Problem, device: torch.device) -> dict[str, list[Inputs]]:
    """The input sets by dtype, for a problem without a mask tensor: bf16 rounds the values of
    fp16, which has all of its bits and three more."""
    half = input_sets(replace(problem, dtype=torch.float16), device)
    rounded = [
        Inputs(*(tensor.bfloat16() for tensor in (x.query, x.key, x.value)), x.mask) for x in half
    ]
    return {"float16": half, "bfloat16": rounded}


def run_problem(
    problem: Problem,
    candidates: Sequence[harness.Candidate],
    device: torch.device,
    settings: harness.Settings,
) -> dict:
    """The row of the result file, in microseconds, with the speed in fp16 relative to bf16. The
    candidates are those that CANDIDATES names."""
    calls: dict[str, harness.Call] = {}
    results: dict[str, dict] = {name: {} for name in LABELS}  # in the order of the tables
    inputs = paired_inputs(problem, device)
    for dtype, sets in inputs.items():
        typed = replace(problem, dtype=getattr(torch, dtype))
        checked, found = harness.checked_calls(typed, candidates, sets, device)
        calls |= {f"{name}_{dtype}": call for name, call in checked.items()}
        for name, result in found.items():
            results[f"{name}_{dtype}"] = result

    # Neighbours in the order of measurement are the two dtypes of one candidate. The calls hold
    # the inputs, which the graphs read, until measure returns.
    ordered = {name: calls[name] for name in results if name in calls}
    graph = problem.graph and device.type == "cuda"
    timings, failures = harness.measure(ordered, device, settings, graph)
    for name, timing in timings.items():
        results[name] |= asdict(timing)
    for name, reason in failures.items():
        results[name] = {"error": reason}

    def ratio(name: str) -> float | None:
        half, brain = (timings.get(f"{name}_{dtype}") for dtype in DTYPES)
        return round(brain.median_us / half.median_us, 4) if half and brain else None

    fields = harness.problem_fields(problem)
    return fields | {
        "label": f"{fields['label'].rpartition(' ')[0]} fp16/bf16",
        "dtype": "/".join(DTYPES),
        "mode": MODE,
        "unit": "us",
        "input_sets": len(inputs["float16"]),
        "ratio": ratio("ours"),
        "cudnn_ratio": ratio("cudnn"),
        "results": results,
    }
