"""The rungs of both logs: what each step changes, and what the log says it brought.

Log 000: a forward in CUDA on a B300, from its version 5 to its version 11. Log 002: a forward in
Triton on a GPU with 48 warps an SM. Names are those of the tables at the foot of
benchmarks/ladder/log000.cu and log002.cu; the last rungs are ours, and plain SDPA is what both logs
measure themselves against.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from workload import Problem

PORTABLE, HOPPER, SDPA = "our portable", "our Hopper", "plain SDPA"


@dataclass(frozen=True)
class Rung:
    name: str
    step: str  # what it changes
    claimed: float | None = None  # in the log's unit
    after: str | None = None  # the rung whose change it is
    fp32: tuple[int, int] | None = None  # FP32 instructions that the log counts: fused, not fused


@dataclass(frozen=True)
class Log:
    name: str
    problem: Problem
    unit: str  # of what it claims: TFLOPS or us
    device: str  # that it was measured on
    rungs: tuple[Rung, ...]

    def rung(self, name: str) -> Rung:
        return next(rung for rung in self.rungs if rung.name == name)

    def claimed_ratio(self, rung: Rung, other: str) -> float | None:
        """How many times as fast as the other the log says that the rung is."""
        claims = rung.claimed, self.rung(other).claimed
        if None in claims:
            return None
        return claims[0] / claims[1] if self.unit == "TFLOPS" else claims[1] / claims[0]


# The problem and its work follow the logs: 4 B H N^2 D, and half of it under the causal mask.
LOG_000 = Log(
    "000",
    Problem("ladder", "log 000", 4, 16, 16, 1024, 1024, 128, "full", torch.float16, graph=True),
    "TFLOPS",
    "B300",
    (
        Rung(
            "V5", "two column warps, two softmax rows at a time", 130.04, None, (1048576, 19660800)
        ),
        Rung(
            "V6",
            "scale in exp2, shared rescale, first tile apart",
            130.05,
            "V5",
            (3080192, 13500416),
        ),
        Rung("V7", "V5 with four rows at a time", 135.73, "V5"),
        Rung("V8", "neighbouring columns: 2-wide loads and stores", 143.37, "V7"),
        Rung("V8 at 4 CTAs", "as many as double-buffered; not in the log", None, "V8"),
        Rung("V9 double-buffered", "Q and K fragments one step ahead", 137.57, "V8"),
        Rung("V9 A prefetched", "Q fragments one step ahead", 137.75, "V8"),
        Rung("V9 fixed addresses", "addresses of Q and K by one XOR", 143.52, "V8"),
        Rung("V10", "scale and maximum in one FMA", 143.37, "V9 fixed addresses"),
        Rung("V11 two templates", "shared rescale, first tile apart", 137.00, "V10"),
        Rung("V11", "shared rescale alone", 144.41, "V10"),
        Rung("whole rows", "a warp owns whole rows, P in registers", None, "V11"),
        Rung(PORTABLE, "fwd_sm80: mma.sync, cp.async", None, "whole rows"),
        Rung(HOPPER, "fwd_sm90: wgmma, TMA", None, PORTABLE),
        Rung(SDPA, "what torch picks", 1156.0),
    ),
)
LOG_002 = Log(
    "002",
    Problem("ladder", "log 002", 2, 16, 8, 1024, 1024, 128, "causal", torch.float16, graph=True),
    "us",
    "a GPU of 48 warps an SM",
    (
        Rung("base", "32 x 32 tiles, grid by heads first", 1380.0),
        Rung("rows first", "grid by query rows first", 1380.0, "base"),
        Rung("skip", "no blocks above the diagonal", 818.0, "rows first"),
        Rung("two loops", "only the last block is masked", 780.0, "skip"),
        Rung("fp32 state", "maximum, sum and O stay in fp32", 792.0, "two loops"),
        # What the log has when its next step starts.
        Rung("fp32 state at 2 CTAs", "as many CTAs as in the log", 792.0),
        Rung("loads apart", "K and V through one buffer", 668.0, "fp32 state at 2 CTAs"),
        Rung("exp2", "log2 e in the scale", 654.0, "loads apart"),
        Rung("fixed strides", "rows of constant length", 652.0, "exp2"),
        Rung("64-wide", "64 x 64 tiles", 700.0, "fixed strides"),
        Rung("whole rows", "a warp owns whole rows, P in registers", None, "64-wide"),
        Rung(PORTABLE, "fwd_sm80: mma.sync, cp.async", None, "whole rows"),
        Rung(HOPPER, "fwd_sm90: wgmma, TMA", None, PORTABLE),
        Rung(SDPA, "what torch picks", 580.0),
    ),
)
LOGS = {log.name: log for log in (LOG_000, LOG_002)}
