"""Speeds of a row of a result file, and FlashAttention-3's by its ratio to cuDNN.

FA3 does not run here: its speed is cuDNN's speed in the same run, times the ratio of the two that
peers_h200.json holds for the same problem. It is known only for the GPU that the ratio was measured
on.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable
from pathlib import Path

import dtype_speed
import host_cost
import peak_memory

HERE = Path(__file__).resolve().parent
FA3 = "fa3"
FA3_LABEL = "FA3 (by ratio)"
# What a row times, where it says so: its `direction`, forward if it does not.
FORWARD, BACKWARD, BOTH = "forward", "backward", "both"
SHAPE = ("batch", "heads_q", "heads_k", "seqlen_q", "seqlen_k", "head_dim")


@functools.cache
def peer_ratios(direction: str = FORWARD) -> tuple[str, dict[tuple, float]]:
    """The GPU of peers_h200.json, and FA3's speed over cuDNN's by problem, in one direction."""
    peers = json.loads((HERE / "peers_h200.json").read_text())
    rows = peers.get(direction, [])
    ratios = {(*r["shape"], r["mask"], r["dtype"]): r["fa3_over_cudnn"] for r in rows}
    return peers["gpu"], ratios


def speeds(row: dict, device: str) -> dict[str, float]:
    """TFLOPS of every candidate that ran on this row, with FA3 by ratio where it is known."""
    rates = {name: r["tflops"] for name, r in row["results"].items() if "tflops" in r}
    gpu, ratios = peer_ratios(row.get("direction", FORWARD))
    ratio = ratios.get((*(row[field] for field in SHAPE), row["mask"], row["dtype"]))
    if ratio is not None and device == gpu and "cudnn" in rates:
        rates[FA3] = rates["cudnn"] * ratio
    return rates


def speedup(rates: dict[str, float], other: str) -> float | None:
    """How many times faster ours is than another candidate, or than the best of them (`best`)."""
    others = [rate for name, rate in rates.items() if name != "ours" and other in (name, "best")]
    return rates["ours"] / max(others) if "ours" in rates and others else None


def launch_rows(result: dict) -> list[dict]:
    """The rows that time the operation for its TFLOPS, without those of host_cost.py,
    dtype_speed.py and peak_memory.py."""
    others = (host_cost.MODE, dtype_speed.MODE, peak_memory.MODE)
    return [row for row in result["rows"] if row["mode"] not in others]


def geomean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))
