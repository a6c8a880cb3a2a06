"""What is required of a result of bench_prefill.py or bench_backward.py on an H200, and what was
measured.

"Best" is the fastest of cuDNN, torch's FlashAttention-2 and FlashAttention-3 by ratio (rates.py). A
bar whose problems are not all in the file is missed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import dtype_speed
import host_cost
from rates import FA3, geomean, launch_rows, speeds

BEST_OF = ("cudnn", "fa2", FA3)
GRID_CELLS = 36
BACKWARD_CELLS = 12  # of the grid, and of the portable kernel
D64_CELLS = 8  # of the grid: head_dim 64, S 2048 to 16384, full and causal
PADDED_ROWS = 6  # two shapes, three kinds of mask
HALF = ("float16", "bfloat16")
HALF_PAIRS = 8  # problems measured in both at once (dtype_speed.py)


@dataclass
class Bar:
    name: str
    value: float | None  # None: not measured
    limit: float
    aim: float | None = None
    at_most: bool = False
    notes: list[str] = field(default_factory=list)  # the cells that somebody should look at

    def reaches(self, limit: float) -> bool:
        if self.value is None:
            return False
        return self.value <= limit if self.at_most else self.value >= limit

    @property
    def passed(self) -> bool:
        return self.reaches(self.limit)

    def text(self) -> str:
        """One line, and one more for every note."""
        sign = "<=" if self.at_most else ">="
        value = "-" if self.value is None else f"{self.value:.3f}"
        line = f"{'pass' if self.passed else 'FAIL'}  {self.name:52} {value:>6} {sign} {self.limit}"
        if self.aim is not None:
            line += f", aim {self.aim} {'reached' if self.reaches(self.aim) else 'missed'}"
        return "\n".join([line, *(f"        {note}" for note in self.notes)])


def print_bars(bars: Iterable[Bar]) -> bool:
    """Prints what came of each. Whether all passed."""
    bars = list(bars)
    print(*(bar.text() for bar in bars), sep="\n")
    return all(bar.passed for bar in bars)


def lowest(
    name: str,
    cells: dict[str, float],
    expected: int,
    limit: float,
    aim: float | None = None,
    listed_below: float | None = None,  # default: the limit
) -> Bar:
    """A bar on the lowest of the cells."""
    if len(cells) < expected:
        return Bar(name, None, limit, aim, notes=[f"{len(cells)} of {expected} measured"])
    notes = below(cells, limit if listed_below is None else listed_below)
    return Bar(name, min(cells.values()), limit, aim, notes=notes)


def below(cells: dict[str, float], limit: float) -> list[str]:
    found = sorted((ratio, label) for label, ratio in cells.items() if ratio < limit)
    return [f"{ratio:.3f}  {label}" for ratio, label in found]


def ratios(result: dict, keep: Callable[[dict], bool], others: Iterable[str]) -> dict[str, float]:
    """Ours over the fastest of the others by label, where all of them were measured."""
    found = {}
    for row in filter(keep, launch_rows(result)):
        tflops = speeds(row, result["environment"]["device"])
        if {"ours", *others} <= set(tflops):
            found[row["label"]] = tflops["ours"] / max(tflops[name] for name in others)
    return found


def mean(
    name: str, cells: dict[str, float], expected: int, limit: float, aim: float | None = None
) -> Bar:
    """A bar on the geometric mean of the cells."""
    value = geomean(cells.values()) if len(cells) == expected else None
    return Bar(name, value, limit, aim)


def backward_bars(result: dict) -> list[Bar]:
    def suite(name: str, *others: str) -> dict[str, float]:
        return ratios(result, lambda row: row["suite"] == name, others)

    best, cudnn = suite("grid", *BEST_OF), suite("grid", "cudnn")
    portable, stack = suite("portable", "fa2"), suite("stack", "sdpa")
    return [
        mean("grid: geometric mean of ours/best", best, BACKWARD_CELLS, 0.95, 1.05),
        lowest("grid: lowest ours/cuDNN", cudnn, BACKWARD_CELLS, 1.0),
        mean("portable: geometric mean of ours/FA2", portable, BACKWARD_CELLS, 1.05),
        lowest("stack, forward and backward: ours/plain SDPA", stack, 1, 1.1),
    ]


def forward_bars(result: dict) -> list[Bar]:
    grid = ratios(result, lambda row: row["suite"] == "grid", BEST_OF)
    found = [
        mean("grid: geometric mean of ours/best", grid, GRID_CELLS, 1.05, 1.12),
        lowest("grid: lowest ours/best", grid, GRID_CELLS, 0.95, 1.0, listed_below=1.0),
    ]
    for dtype in HALF:
        seed = ratios(
            result, lambda row, d=dtype: (row["name"], row["dtype"]) == ("seed1", d), ["sdpa"]
        )
        found.append(lowest(f"seed1 {dtype}: ours/plain SDPA", seed, 1, 1.05))
    seed = ratios(result, lambda row: (row["name"], row["dtype"]) == ("seed2", "float16"), ["sdpa"])
    replayed = {label: ratio for label, ratio in seed.items() if label.endswith("in L2")}
    found.append(lowest("seed2 float16 replayed in L2: ours/plain SDPA", replayed, 1, 1.7, 1.9))
    found[-1].notes += [f"{r:.3f}  {label}" for label, r in seed.items() if label not in replayed]

    d64 = ratios(
        result,
        lambda row: (row["suite"], row["head_dim"]) == ("grid", 64) and row["seqlen_k"] >= 2048,
        [FA3],
    )
    found.append(lowest("grid D64 from S 2048: lowest ours/FA3", d64, D64_CELLS, 1.05))
    qwen3 = ratios(result, lambda row: row["name"] == "qwen3-8b", ["sdpa"])
    found.append(lowest("qwen3-8b: ours/plain SDPA", qwen3, 1, 1.35))
    padded = ratios(result, lambda row: row["name"] == "padded", ["sdpa"])
    found.append(lowest("padded masks: lowest ours/plain SDPA", padded, PADDED_ROWS, 2.0, 3.0))
    found.append(lowest("float16/bfloat16 of ours, lowest", half_ratios(result), HALF_PAIRS, 0.97))
    found.append(host_bar(result))
    return found


def half_ratios(result: dict) -> dict[str, float]:
    """Our speed in float16 over that in bfloat16 by label, of the problems timed in both at once.
    Rows of one dtype were measured at another clock than those of the other."""
    return {
        row["label"]: row["ratio"]
        for row in result["rows"]
        if row["mode"] == dtype_speed.MODE and row["ratio"] is not None
    }


def host_bar(result: dict) -> Bar:
    """Host time of an eager call of the operator over that of plain SDPA, the higher of both
    dtypes."""
    shares = {
        row["dtype"]: row["results"]["ours"].get("ratio_to_sdpa")
        for row in result["rows"]
        if row["mode"] == host_cost.MODE
    }
    known = [share for share in shares.values() if share is not None]
    value = max(known) if len(known) == len(HALF) else None
    notes = [] if value is not None else [f"{len(known)} of {len(HALF)} measured"]
    return Bar("host time of fa.forward/plain SDPA, highest", value, 0.5, at_most=True, notes=notes)
