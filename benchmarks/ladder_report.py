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
from ladder_profile import LIMITS, top_stall
from ladder_rungs import HOPPER, LOGS, PORTABLE, SDPA, Log
from report import number, stamp, table

# Of ladder_profile.read_machine_code; shuffles are a part of the softmax.
PHASE_ORDER = ("K copy", "Q K^T", "softmax", "shuffles", "P V", "epilogue")
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
        smem = result.get("smem_bytes")
        if smem is None and "dynamic_smem_bytes" in ncu:
            smem = ncu["dynamic_smem_bytes"] + ncu.get("static_smem_bytes", 0)
        limit = min((ncu[f"limit_{n}"] for n in LIMITS if f"limit_{n}" in ncu), default=None)
        stall = top_stall(ncu)
        dram = [ncu.get(f"dram_{way}_bytes") for way in ("read", "write")]
        lines.append(
            [
                rung.name,
                whole(result.get("registers", ncu.get("registers"))),
                whole(result.get("local_bytes")),
                scaled(smem, 1 / 1024),
                whole(result.get("ctas_per_sm", limit)),
                number(ncu.get("warps_per_scheduler"), 2),
                number(ncu.get("issue_percent"), 1),
                number(ncu.get("tensor_percent"), 1),
                "-" if stall is None else f"{stall[0]} {100 * stall[1]:.0f} %",
                scaled(ncu.get("instructions"), 1e-6),
                scaled(ncu.get("branches"), 1e-6, 2),
                scaled(ncu.get("excess_wavefronts"), 1e-6),
                number(ncu.get("l2_hit_percent"), 1),
                scaled(ncu.get("l2_sectors"), 32e-6),
                scaled(None if None in dram else sum(dram), 1e-6),
            ]
        )
    heads = ["rung", "registers", "spilled B", "smem KiB", "CTAs/SM", "warps/scheduler", "issue %"]
    heads += ["tensor %", "top stall", "M instr.", "M branches", "M excess wavefronts"]
    return table([*heads, "L2 hit %", "L2 MB", "DRAM MB"], lines)


def whole(value: float | None) -> str:
    return "-" if value is None else str(round(value))


def scaled(value: float | None, factor: float, digits: int = 1) -> str:
    return number(None if value is None else value * factor, digits)


def fused_table(row: dict) -> str:
    """FP32 instructions of warps, counted as in the log, and in the log."""
    lines = []
    for rung, result in rows_of(row):
        ncu = result.get("ncu", {})
        if "fused" in ncu:
            counts = (*(rung.fp32 or (None, None)), ncu["fused"], ncu["not_fused"])
            lines.append([rung.name, *map(whole, counts)])
    heads = ["FP32 instructions", "fused, log", "not fused, log", "fused", "not fused"]
    return table(heads, lines)


def phase_table(row: dict) -> str:
    """Where the warps stand, in percent of the samples."""
    lines = []
    for rung, result in rows_of(row):
        if shares := result.get("ncu", {}).get("phases"):
            lines.append([rung.name, *(number(shares.get(name), 1) for name in PHASE_ORDER)])
    return table(["warps stand in, %", *PHASE_ORDER], lines)


def profile_tables(row: dict) -> list[str]:
    """What there is to say of the kernels."""
    found = [result.get("ncu", {}) for _, result in rows_of(row)]
    parts = [kernel_table(row)]
    if any("fused" in ncu for ncu in found):
        parts.append(fused_table(row))
    if any("phases" in ncu for ncu in found):
        parts.append(phase_table(row))
    return parts


def terminal_table(row: dict) -> str:
    log = LOGS[row["log"]]
    parts = [f"log {log.name}: {row['label']}, claimed on {log.device}", time_table(row)]
    parts += profile_tables(row)
    if "ncu_error" in row:
        parts.append(f"ncu: {row['ncu_error']}")
    return "\n\n".join(parts)


# ------------------------------------------------------------------------------------------------
# Plot


def plot(result: dict, path: Path) -> None:
    """A row a log: how fast every rung is, and what its step brought, here and in the log."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = result["rows"]
    figure, axes = plt.subplots(
        len(rows), 2, figsize=(13, 5 * len(rows) + 0.4), squeeze=False, layout="constrained"
    )
    for (speeds, steps), row in zip(axes, rows, strict=True):
        plot_speeds(speeds, row)
        plot_steps(steps, row)
    figure.suptitle(f"The ladder, {result['environment']['device']}", fontsize=12)
    figure.savefig(path, dpi=110)
    plt.close(figure)


# Okabe-Ito, as in report.py: ours, the rungs, the log.
OURS, RUNGS, CLAIMED = "#D55E00", "#0072B2", "#009E73"


def plot_speeds(axis, row: dict) -> None:
    names = [rung.name for rung, _ in rows_of(row)]
    speeds = [result.get("tflops", 0) for _, result in rows_of(row)]
    colors = [OURS if name in (PORTABLE, HOPPER) else RUNGS for name in names]
    axis.bar_label(axis.barh(names, speeds, color=colors, height=0.6), fmt=" %.0f", fontsize=8)
    if sdpa := row["results"].get(SDPA, {}).get("tflops"):
        axis.axvline(sdpa, color="#999999", linestyle="--")
    axis.margins(x=0.1)
    axis.invert_yaxis()
    axis.set_xlabel("TFLOPS; the line is plain SDPA")
    axis.set_title(row["label"], fontsize=10)
    axis.grid(alpha=0.3, axis="x")


def plot_steps(axis, row: dict) -> None:
    """The steps that the log has a figure for."""
    log = LOGS[row["log"]]
    names, bars = [], {"here": [], f"the log, {log.device}": []}
    for rung, _ in rows_of(row):
        ratios = ratio_here(row, rung.name, rung.after), None
        if rung.after:
            ratios = ratios[0], log.claimed_ratio(rung, rung.after)
        if None not in ratios:
            names.append(f"{rung.name}\nafter {rung.after}")
            for values, ratio in zip(bars.values(), ratios, strict=True):
                values.append(100 * (ratio - 1))
    for offset, color, (label, values) in zip(
        (-0.2, 0.2), (RUNGS, CLAIMED), bars.items(), strict=True
    ):
        places = [place + offset for place in range(len(names))]
        drawn = axis.barh(places, values, height=0.36, color=color, label=label)
        axis.bar_label(drawn, fmt=" %+.1f ", fontsize=8)
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.axvline(0, color="black", linewidth=0.8)
    axis.margins(x=0.12)
    axis.invert_yaxis()
    axis.set_xlabel("change of the speed, %")
    axis.set_title("what the steps brought", fontsize=10)
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3, axis="x")


# ------------------------------------------------------------------------------------------------
# Generated blocks


def regenerate(text: str) -> str:
    """The text with every generated block as the result files make it."""

    def block(match: re.Match) -> str:
        path = HERE / "results" / match["file"]
        result = harness.read_result(path) if path.is_file() else {"rows": []}
        row = next((row for row in result["rows"] if row["log"] == match["log"]), None)
        if row is None:
            return f"{match['head']}Not measured yet.\n{match['tail']}"
        parts = [f"{stamp(result)}.", time_table(row), *profile_tables(row)]
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
