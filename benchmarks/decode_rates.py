"""Speeds of a result of bench_decode.py, and what is required of them on an H200."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import rates
import torch
from bars import Bar, lowest

PEERS = Path(__file__).resolve().parent / "peers_decode_h200.json"
BEST_OF = ("cudnn", "fa2", rates.FA3)
ROWS = 22  # of bench_decode.gpu_problems()


@functools.cache
def fa3_ratios() -> tuple[str, dict[tuple, float]]:
    """The GPU of the file, and FA3's speed over cuDNN's by problem."""
    peers = json.loads(PEERS.read_text())
    return peers["gpu"], {(*r["shape"], r["dtype"]): r["fa3_over_cudnn"] for r in peers["rows"]}


def kv_bytes(row: dict) -> int:
    itemsize = getattr(torch, row["dtype"]).itemsize
    return 2 * row["batch"] * row["heads_k"] * row["seqlen_k"] * row["head_dim"] * itemsize


def speeds(row: dict, device: str) -> dict[str, float]:
    """GB/s of K and V, for every candidate that ran, and for FA3 by ratio where it is known."""
    found = {
        name: kv_bytes(row) / result["median_us"] * 1e-3
        for name, result in row["results"].items()
        if "median_us" in result
    }
    gpu, ratios = fa3_ratios()
    ratio = ratios.get((*(row[field] for field in rates.SHAPE), row["dtype"]))
    if ratio is not None and device == gpu and "cudnn" in found:
        found[rates.FA3] = found["cudnn"] * ratio
    return found


def bars(result: dict) -> list[Bar]:
    """What is required on an H200, and what was measured."""
    device = result["environment"]["device"]

    def ratios(name: str, ours: str, others: tuple[str, ...]) -> dict[str, float]:
        found = {}
        for row in result["rows"]:
            gbs = speeds(row, device)
            if name in (row["name"], "") and {ours, *others} <= gbs.keys():
                found[row["label"]] = gbs[ours] / max(gbs[other] for other in others)
        return found

    one = ratios("one", "ours", BEST_OF)
    mean = rates.geomean(one.values()) if len(one) == 9 else None
    several = ratios("several", "ours", ("sdpa",))
    four = {label: ratio for label, ratio in several.items() if "S4x" in label}
    more = {label: ratio for label, ratio in several.items() if "S4x" not in label}
    chunk = {
        label: ratio
        for label, ratio in ratios("chunk", "ours", ("sdpa",)).items()
        if "x131072" in label
    }

    def paged(page_size: int) -> Bar:
        found = ratios("", f"ours_paged_{page_size}", ("ours",))
        return lowest(f"pages of {page_size}: lowest paged/contiguous", found, ROWS, 0.95)

    return [
        Bar("one query: geometric mean of ours/best", mean, 1.15),
        lowest("one query: lowest ours/best", one, 9, 1.0),
        lowest("4 queries: ours/plain SDPA", four, 1, 3.0),
        lowest("8 and 16 queries: lowest ours/plain SDPA", more, 3, 6.0),
        lowest("chunk of 256 queries: ours/plain SDPA", chunk, 1, 4.0),
        paged(64),
        paged(16),
    ]
