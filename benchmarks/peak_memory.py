"""Peak memory of a forward and a backward, above that of their inputs.

What counts is what the caching allocator has handed out at the highest point, less what it had
before: output, LSE, the three gradients and every scratch buffer. Only on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import harness
import torch
from gradients import GradientInputs, gradient_inputs
from workload import Problem

SUITE = "memory"
MODE = "memory"


def problems() -> list[Problem]:
    """16384 tokens of 2048 channels for every head_dim, and one layer of Qwen3-0.6B."""
    return [
        Problem(SUITE, SUITE, *shape, "causal")
        for shape in (
            (2, 32, 32, 8192, 8192, 64),
            (2, 16, 16, 8192, 8192, 128),
            (2, 8, 8, 8192, 8192, 256),
            (1, 16, 8, 8192, 8192, 128),
        )
    ]


def peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    """Of the second call: the first one sets up what stays, such as the workspace of a library."""
    step()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def forward_and_backward(call: Callable, leaves: GradientInputs) -> None:
    leaves.gradients(call(leaves))


def run_problem(
    problem: Problem, candidates: Sequence[harness.Candidate], device: torch.device
) -> dict:
    """The row of the result file, in bytes. The candidates are those of the forward."""
    leaves = gradient_inputs(problem, device)[0].leaves()
    results = {}
    for candidate in candidates:
        step = functools.partial(forward_and_backward, candidate.bind(problem), leaves)
        try:
            with candidate.context():
                results[candidate.name] = {"peak_bytes": peak_bytes(step, device)}
        except RuntimeError as error:
            results[candidate.name] = {"error": harness.first_line(error)}
    return harness.problem_fields(problem) | {"mode": MODE, "unit": "bytes", "results": results}
