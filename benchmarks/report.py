"""Turns a result file into tables and a plot.

    python benchmarks/report.py show benchmarks/results/h200.json [--plot h200.png]
    python benchmarks/report.py update [FILE.md ...]
    python benchmarks/report.py check  [FILE.md ...]

`update` rewrites, and `check` compares (exit code 1 if they differ), every generated block of the
Markdown files, by default README.md and benchmarks/results/README.md. A block stands between

    <!-- benchmark summary h200.json -->
    <!-- end benchmark -->

where the second word is `summary` or `full` and the third a file in benchmarks/results.

FA3 does not run here: its speed is cuDNN's speed in the same run, times the ratio of the two that
peers_h200.json holds for the same problem. It is shown only for the GPU that the ratio was
measured on.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import harness

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
DEFAULT_FILES = [HERE.parent / "README.md", RESULTS / "README.md"]
BLOCK = re.compile(
    r"(?P<head><!-- benchmark (?P<kind>summary|full) (?P<file>[\w.-]+) -->\n)"
    r"(?:(?!<!-- benchmark ).)*?(?P<tail><!-- end benchmark -->)",
    re.DOTALL,
)
FA3 = "fa3"
FA3_LABEL = "FA3 (by ratio)"
SHAPE = ("batch", "heads_q", "heads_k", "seqlen_q", "seqlen_k", "head_dim")


# ------------------------------------------------------------------------------------------------
# Numbers


@functools.cache
def peer_ratios() -> tuple[str, dict[tuple, float]]:
    """The GPU of peers_h200.json, and FA3's speed over cuDNN's by problem."""
    peers = json.loads((HERE / "peers_h200.json").read_text())
    rows = peers["rows"]
    ratios = {(*r["shape"], r["mask"], r["dtype"]): r["fa3_over_cudnn"] for r in rows}
    return peers["gpu"], ratios


def speeds(row: dict, device: str) -> dict[str, float]:
    """TFLOPS of every candidate that ran on this row, with FA3 by ratio where it is known."""
    rates = {name: r["tflops"] for name, r in row["results"].items() if "tflops" in r}
    gpu, ratios = peer_ratios()
    ratio = ratios.get((*(row[field] for field in SHAPE), row["mask"], row["dtype"]))
    if ratio is not None and device == gpu and "cudnn" in rates:
        rates[FA3] = rates["cudnn"] * ratio
    return rates


def speedup(rates: dict[str, float], other: str) -> float | None:
    """How many times faster ours is than another candidate, or than the best of them (`best`)."""
    others = [rate for name, rate in rates.items() if name != "ours" and other in (name, "best")]
    return rates["ours"] / max(others) if "ours" in rates and others else None


def geomean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def labels(result: dict) -> dict[str, str]:
    """Candidates by name, FA3 last if any row has it."""
    device = result["environment"]["device"]
    known = any(FA3 in speeds(row, device) for row in result["rows"])
    return result["labels"] | ({FA3: FA3_LABEL} if known else {})


# ------------------------------------------------------------------------------------------------
# Tables


def table(heads: list[str], lines: Iterable[list[str]]) -> str:
    """A Markdown table, padded so that it reads in a terminal too; all but the first column are
    numbers."""
    cells = [heads, *lines]
    widths = [max(len(line[i]) for line in cells) for i in range(len(heads))]

    def render(line: list[str]) -> str:
        rest = [cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True)]
        return "| " + " | ".join([line[0].ljust(widths[0]), *rest]) + " |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([render(cells[0]), render(rule), *map(render, cells[1:])])


def number(value: float | None, digits: int = 0) -> str:
    """Fixed digits, three significant ones below 10; a dash for None."""
    if value is None:
        return "-"
    if digits == 0 and value < 10:
        return f"{value:.3g}"
    return f"{value:.{digits}f}"


def grid_table(result: dict) -> str:
    """Geometric means over the sequence lengths of the grid, by head_dim and mask."""
    device, names = result["environment"]["device"], labels(result)
    grid = [row for row in result["rows"] if row["suite"] == "grid"]
    groups: dict[str, list[dict]] = {}
    for row in grid:
        groups.setdefault(f"D{row['head_dim']} {row['mask']}", []).append(row)
    groups["all"] = grid
    lines = []
    for group, rows in groups.items():
        rates = [speeds(row, device) for row in rows]
        line = [f"{group} ({len(rows)})"]
        for name in names:
            known = [r[name] for r in rates if name in r]
            line.append(number(geomean(known) if len(known) == len(rows) else None))
        for other in ("fa2", "best"):
            ratios = [ratio for r in rates if (ratio := speedup(r, other)) is not None]
            complete = len(ratios) == len(rows)
            line.append(number(geomean(ratios) if complete else None, 2))
            line.append(number(min(ratios) if complete else None, 2))
        lines.append(line)
    heads = ["grid (cells)", *names.values(), "ours/FA2", "min", "ours/best", "min"]
    return table(heads, lines)


def row_table(result: dict, rows: Iterable[dict]) -> str:
    """TFLOPS of every candidate, one problem a line."""
    device, names = result["environment"]["device"], labels(result)
    lines = []
    for row in rows:
        rates = speeds(row, device)
        line = [row["label"], *(number(rates.get(name)) for name in names)]
        lines.append(line + [number(speedup(rates, other), 2) for other in ("fa2", "best")])
    return table(["problem", *names.values(), "ours/FA2", "ours/best"], lines)


def noise_table(result: dict) -> str:
    """Microseconds of our launches with their spread, the eager time of small problems (host cost
    included), and the share of the roofline."""
    lines = []
    for row in result["rows"]:
        ours = row["results"].get("ours", {})
        if "median_us" not in ours:
            continue
        share = harness.roofline_share(row, "ours", result["ceilings"])
        spread = (ours["q3_us"] - ours["q1_us"]) / ours["median_us"]
        lines.append(
            [
                row["label"],
                row["mode"],
                number(ours["median_us"], 1),
                f"{100 * spread:.1f} %",
                number(ours.get("eager_us"), 1),
                "-" if share is None else f"{100 * share:.0f} %",
                number(ours["error_share"], 2),
            ]
        )
    heads = ["problem", "mode", "us", "IQR", "eager us", "roofline", "error / tolerance"]
    return table(heads, lines)


def stamp(result: dict) -> str:
    """One line of what the run ran on."""
    env = result["environment"]
    commit = (env["commit"] or "unknown")[:10] + (" + changes" if env["dirty"] else "")
    parts = [env["device"], f"torch {env['torch']}"]
    if env.get("cudnn"):
        parts.append(f"cuDNN {env['cudnn']}")
    loaded = env.get("gpu_loaded") or {}
    if loaded:
        parts.append(f"driver {loaded['driver']}")
        clock = f"{loaded['sm_mhz']} MHz and {loaded['power_w']} W"
        parts.append(f"{clock} of {loaded['power_limit_w']} W under a matrix product")
    return ", ".join([*parts, f"commit {commit}", env["date"]])


def summary_block(result: dict) -> str:
    """The block for README: the grid in geometric means, every other problem in one line."""
    others = [row for row in result["rows"] if row["suite"] != "grid"]
    parts = [f"TFLOPS of useful work (visible pairs only). {stamp(result)}."]
    if len(others) < len(result["rows"]):
        parts.append(grid_table(result))
    if others:
        parts.append(row_table(result, others))
    return "\n\n".join(parts)


def full_block(result: dict) -> str:
    """Every problem, ceilings and noise."""
    rates = ", ".join(f"{name} {value}" for name, value in result["ceilings"].items())
    after = ", ".join(f"{name} {value}" for name, value in result["ceilings_after"].items())
    return "\n\n".join(
        [
            f"{stamp(result)}.",
            f"Ceilings in the same run: {rates}; at its end: {after}.",
            row_table(result, result["rows"]),
            noise_table(result),
        ]
    )


# ------------------------------------------------------------------------------------------------
# Plot


def plot(result: dict, path: Path) -> None:
    """TFLOPS over sequence length, a panel for every head_dim and mask of the grid."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    device, names = result["environment"]["device"], labels(result)
    grid = [row for row in result["rows"] if row["suite"] == "grid"]
    if not grid:
        raise RuntimeError("plot: the result must hold rows of the grid, got none")
    head_dims = sorted({row["head_dim"] for row in grid})
    masks = sorted({row["mask"] for row in grid}, reverse=True)  # full above causal
    # Okabe-Ito: told apart by colour-blind readers. Ours is drawn over the others.
    styles = {
        "ours": {"color": "#D55E00", "marker": "o", "linewidth": 2.5, "zorder": 3},
        "fa2": {"color": "#0072B2", "marker": "s"},
        "cudnn": {"color": "#009E73", "marker": "^"},
        "sdpa": {"color": "#56B4E9", "marker": "v", "linestyle": ":"},
        "efficient": {"color": "#999999", "marker": "x"},
        FA3: {"color": "#CC79A7", "marker": "D", "linestyle": "--"},
    }
    figure, axes = plt.subplots(
        len(masks),
        len(head_dims),
        figsize=(4 * len(head_dims), 3.2 * len(masks) + 0.8),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    drawn, top = {}, 0.0
    for line, mask in zip(axes, masks, strict=True):
        for axis, head_dim in zip(line, head_dims, strict=True):
            rows = [r for r in grid if r["mask"] == mask and r["head_dim"] == head_dim]
            rows.sort(key=lambda row: row["seqlen_k"])
            for name, label in names.items():
                points = {r["seqlen_k"]: speeds(r, device).get(name) for r in rows}
                points = {length: rate for length, rate in points.items() if rate is not None}
                if points:
                    style = styles.get(name, {})
                    (drawn[label],) = axis.plot(*zip(*points.items(), strict=True), **style)
                    top = max(top, *points.values())
            lengths = [row["seqlen_k"] for row in rows]
            axis.set_xscale("log", base=2)
            axis.set_xticks(lengths, [f"{s // 1024}k" if s >= 1024 else str(s) for s in lengths])
            axis.grid(alpha=0.3)
            axis.set_title(f"head_dim {head_dim}, {mask}", fontsize=10)
        line[0].set_ylabel("TFLOPS")
    for axis in axes[-1]:
        axis.set_xlabel("sequence length")
    axes[0][0].set_ylim(0, 1.05 * top)  # of all panels: they share their axes
    figure.legend(
        drawn.values(), drawn, loc="outside lower center", ncols=len(drawn), frameon=False
    )
    dtype = {row["dtype"] for row in grid}
    figure.suptitle(f"Attention forward, {', '.join(dtype)}, 16k tokens, {device}", fontsize=12)
    figure.savefig(path, dpi=110)
    plt.close(figure)


# ------------------------------------------------------------------------------------------------
# Generated blocks


def regenerate(text: str) -> str:
    """The text with every generated block as the result files make it."""

    def block(match: re.Match) -> str:
        path = RESULTS / match["file"]
        if not path.is_file():
            return f"{match['head']}Not measured yet.\n{match['tail']}"
        render = {"summary": summary_block, "full": full_block}[match["kind"]]
        return f"{match['head']}{render(harness.read_result(path))}\n{match['tail']}"

    return BLOCK.sub(block, text)


def stale_files(files: Iterable[Path]) -> list[Path]:
    """Those of the Markdown files whose blocks differ from what the result files make.
    RuntimeError for a file without a block."""
    stale = []
    for path in files:
        text = path.read_text()
        if not BLOCK.search(text):
            raise RuntimeError(f"{path}: must hold a generated block, <!-- benchmark ... -->")
        if text != regenerate(text):
            stale.append(path)
    return stale


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="print the tables of a result file")
    show.add_argument("result", type=Path)
    show.add_argument("--plot", type=Path, help="write a PNG")
    for name in ("update", "check"):
        command = commands.add_parser(name, help=f"{name} the generated blocks")
        command.add_argument("files", type=Path, nargs="*", default=DEFAULT_FILES)
    options = parser.parse_args(arguments)

    if options.command == "show":
        result = harness.read_result(options.result)
        print(summary_block(result), full_block(result), sep="\n\n")
        if options.plot:
            plot(result, options.plot)
        return 0
    stale = stale_files(options.files)
    for path in stale:
        if options.command == "update":
            path.write_text(regenerate(path.read_text()))
            print(f"{path}: updated")
        else:
            print(f"{path}: differs; run `python benchmarks/report.py update`")
    return 1 if stale and options.command == "check" else 0


if __name__ == "__main__":
    sys.exit(main())
