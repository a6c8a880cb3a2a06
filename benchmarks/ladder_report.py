"""Tables and plot of a result of ladder.py.

    python benchmarks/ladder_report.py update | check

rewrites, or compares, the generated blocks of benchmarks/ladder/README.md, which stand between
`<!-- ladder 000 ladder_h200.json -->` and `<!-- end ladder -->`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import harness
from ladder_profile import top_stall
from ladder_rungs import HOPPER, LOGS, PORTABLE, SDPA, Log
from report import number, stamp, table

HERE = Path(__file__).resolve().parent
README = HERE / "ladder" / "README.md"
BLOCK = re.compile(
    r"(?P<head><!-- ladder (?P<log>\d+) (?P<file>[\w.-]+) -->\n)"
    r"(?:(?!<!-- ladder ).)*?(?P<tail><!-- end ladder -->)",
    re.DOTALL,
)


def rows_of(row: dict) -> list[tuple]:
    """(rung, its result) in the order of the log, for what was run."""
    return [(r, row["results"][r.name]) for r in LOGS[row["log"]].rungs if r.name in row["results"]]


def ratio_here(row: dict, rung: str, other: str | None) -> float | None:
    """How many times as fast as the other the rung is in this result."""
    times = [row["results"].get(name, {}).get("median_us") for name in (rung, other)]
    return times[1] / times[0] if None not in times else None


def claimed_text(log: Log, claimed: float | None) -> str:
    if claimed is None:
        return "-"
    return f"{claimed:.2f}" if log.unit == "TFLOPS" else f"{claimed:.0f}"


def change(ratio: float | None) -> str:
    return "-" if ratio is None else f"{100 * (ratio - 1):+.1f} %"


def time_table(row: dict) -> str:
    """What every rung is and takes, claimed and here. The change is that of the speed, beside the
    rung that it is made to."""
    log = LOGS[row["log"]]
    lines = []
    for rung, result in rows_of(row):
        after = rung.after
        lines.append(
            [
                rung.name,
                rung.step,
                claimed_text(log, rung.claimed),
                number(result.get("median_us"), 1),
                number(result.get("tflops")),
                after or "-",
                change(after and log.claimed_ratio(rung, after)),
                change(ratio_here(row, rung.name, after)),
                number(result.get("error_share"), 2),
            ]
        )
    heads = ["rung", "step", f"{log.unit}, log", "us", "TFLOPS", "after", "change, log", "here"]
    return table([*heads, "error / bound"], lines)


def kernel_table(row: dict) -> str:
    """What a kernel takes from an SM, and what ncu says of it."""
    lines = []
    for rung, result in rows_of(row):
        ncu = result.get("ncu", {})
        registers = result.get("registers", ncu.get("registers"))
        smem = result.get("smem_bytes")
        if smem is None and "dynamic_smem_bytes" in ncu:
            smem = ncu["dynamic_smem_bytes"] + ncu.get("static_smem_bytes", 0)
        stall = top_stall(ncu)
        dram = [ncu.get(f"dram_{way}_bytes") for way in ("read", "write")]
        lines.append(
            [
                rung.name,
                number(registers, 0) if registers is None or registers >= 10 else str(registers),
                number(None if smem is None else smem / 1024, 1),
                "-" if "ctas_per_sm" not in result else str(result["ctas_per_sm"]),
                "-" if "local_bytes" not in result else str(result["local_bytes"]),
                number(ncu.get("warps_per_scheduler"), 2),
                number(ncu.get("tensor_percent"), 1),
                "-" if stall is None else f"{stall[0]} {100 * stall[1]:.0f} %",
                number(scaled(ncu.get("instructions"), 1e-6), 1),
                number(scaled(ncu.get("bank_conflicts"), 1e-6), 2),
                number(ncu.get("l2_hit_percent"), 1),
                number(scaled(ncu.get("l2_sectors"), 32e-6), 1),
                number(scaled(None if None in dram else sum(dram), 1e-6), 1),
            ]
        )
    heads = ["rung", "registers", "smem KiB", "CTAs/SM", "local B", "warps/scheduler", "tensor %"]
    heads += ["top stall", "M instr.", "M conflicts", "L2 hit %", "L2 MB", "DRAM MB"]
    return table(heads, lines)


def scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def fused_table(row: dict) -> str:
    """FP32 instructions of a warp, as the log's profiler counts them."""
    lines = []
    for rung, result in rows_of(row):
        ncu = result.get("ncu", {})
        if {"ffma", "fmul", "fadd"} <= ncu.keys():
            apart = ncu["fmul"] + ncu["fadd"]
            lines.append([rung.name, f"{ncu['ffma'] / 32:.0f}", f"{apart / 32:.0f}"])
    return table(["FP32 instructions", "fused", "not fused"], lines)


def terminal_table(row: dict) -> str:
    log = LOGS[row["log"]]
    parts = [f"log {log.name}: {row['label']}, claimed on {log.device}", time_table(row)]
    if any("ncu" in result or "registers" in result for _, result in rows_of(row)):
        parts.append(kernel_table(row))
    if any("ffma" in result.get("ncu", {}) for _, result in rows_of(row)):
        parts.append(fused_table(row))
    if "ncu_error" in row:
        parts.append(f"ncu: {row['ncu_error']}")
    return "\n\n".join(parts)


# ------------------------------------------------------------------------------------------------
# Plot


def plot(result: dict, path: Path) -> None:
    """A panel a log: the speed of every rung relative to the first, claimed and here."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = result["rows"]
    heights = [len(row["results"]) for row in rows]
    figure, axes = plt.subplots(
        1, len(rows), figsize=(7.5 * len(rows), 0.42 * max(heights) + 1.6), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for axis, row in zip(axes[0], rows, strict=True):
        log, rungs = LOGS[row["log"]], rows_of(row)
        names = [rung.name for rung, _ in rungs]
        places = range(len(names))
        speeds = [r.get("tflops", 0) for _, r in rungs]
        sdpa = row["results"].get(SDPA, {}).get("tflops")
        colors = ["#D55E00" if n in (PORTABLE, HOPPER) else "#0072B2" for n in names]
        axis.barh(places, speeds, color=colors, height=0.6)
        for place, speed in zip(places, speeds, strict=True):
            axis.text(speed, place, f" {speed:.0f}", va="center", fontsize=8)
        claims = []
        for place, (rung, _) in zip(places, rungs, strict=True):
            if rung.claimed is not None:
                scale = 1e-6 * row["flops"]
                claims.append(
                    (rung.claimed if log.unit == "TFLOPS" else scale / rung.claimed, place)
                )
        if claims:
            axis.plot(
                *zip(*claims, strict=True), "D", color="#009E73", label=f"the log, {log.device}"
            )
        if sdpa:
            axis.axvline(sdpa, color="#999999", linestyle="--", label="plain SDPA here")
        axis.set_yticks(places, names)
        axis.invert_yaxis()
        axis.set_xlabel("TFLOPS")
        axis.set_title(row["label"], fontsize=10)
        axis.grid(alpha=0.3, axis="x")
        axis.legend(fontsize=8, loc="lower right")
    figure.suptitle(f"The ladder, {result['environment']['device']}", fontsize=12)
    figure.savefig(path, dpi=110)
    plt.close(figure)


# ------------------------------------------------------------------------------------------------
# Generated blocks


def regenerate(text: str) -> str:
    """The text with every generated block as the result files make it."""

    def block(match: re.Match) -> str:
        path = HERE / "results" / match["file"]
        if not path.is_file():
            return f"{match['head']}Not measured yet.\n{match['tail']}"
        result = harness.read_result(path)
        row = next(row for row in result["rows"] if row["log"] == match["log"])
        parts = [f"{stamp(result)}.", time_table(row), kernel_table(row)]
        if any("ffma" in r.get("ncu", {}) for _, r in rows_of(row)):
            parts.append(fused_table(row))
        return f"{match['head']}{chr(10).join(f'{part}{chr(10)}' for part in parts)}{match['tail']}"

    return BLOCK.sub(block, text)


def main(arguments: list[str]) -> int:
    text = README.read_text()
    fresh = regenerate(text)
    if arguments == ["update"]:
        README.write_text(fresh)
    elif text != fresh:
        print(f"{README}: differs; run `python benchmarks/ladder_report.py update`")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
